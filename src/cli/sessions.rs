//! `stitchd sessions`: who holds what.

use clap::Args;
use serde_json::json;

use super::table::Table;
use super::{Common, DONE, Outcome, ask, print_json};
use crate::daemon::live::json as show;
use crate::units::Bytes;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  watch -n1 stitchd sessions")]
pub(super) struct SessionsArgs {
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &SessionsArgs) -> Outcome {
    let status = ask::status(&args.common.socket())?;
    if args.common.json {
        print_json(&json!({ "sessions": status.sessions.iter().map(show::session).collect::<Vec<_>>() }));
        return DONE;
    }
    let mut table = Table::new(&[
        "session",
        "name",
        "tenant",
        ">pid",
        ">leased",
        ">shared",
        ">live",
        ">limit",
        ">guarantee",
        ">chunks",
        "plan",
        ">planned",
        ">reuse",
        ">pool",
        ">deviations",
        ">age",
        "state",
    ]);
    for session in &status.sessions {
        let counter = |name: &str| show::counter(session, name);
        table.row(vec![
            session.session_id.to_string(),
            session.name.clone(),
            session.tenant.clone(),
            session.pid.to_string(),
            Bytes::new(session.leased_bytes).to_string(),
            Bytes::new(session.on.iter().map(|on| on.shared_bytes).sum()).to_string(),
            Bytes::new(counter("live_bytes")).to_string(),
            Bytes::new(session.limit_bytes).to_string(),
            Bytes::new(session.on.iter().map(|on| on.guarantee_bytes).sum()).to_string(),
            session.chunks.to_string(),
            show::plan_of(session).unwrap_or_else(|| "-".to_owned()),
            counter("requests_planned").to_string(),
            counter("requests_reuse").to_string(),
            counter("requests_pool").to_string(),
            show::deviations(session).to_string(),
            format!("{} s", session.age_ms / 1000),
            show::session_state(session).into(),
        ]);
    }
    if status.sessions.is_empty() {
        outln!("no sessions");
    } else {
        out!("{table}");
    }
    DONE
}
