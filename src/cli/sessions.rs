//! `stitchd sessions`: who holds what.

use clap::Args;
use serde_json::{Value, json};

use super::table::Table;
use super::{Common, DONE, Outcome, ask, print_json};
use crate::units::Bytes;
use crate::wire::v1;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  watch -n1 stitchd sessions")]
pub(super) struct SessionsArgs {
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &SessionsArgs) -> Outcome {
    let status = ask::status(&args.common.socket())?;
    if args.common.json {
        print_json(&json!({ "sessions": status.sessions.iter().map(to_json).collect::<Vec<_>>() }));
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
        ">planned",
        ">reuse",
        ">stitching",
        ">small",
        ">deviations",
        ">age",
        "state",
    ]);
    for session in &status.sessions {
        let counter = |name: &str| session.counters.get(name).copied().unwrap_or(0);
        let deviations =
            ["late", "blocked", "unplanned", "skipped", "resized"].map(|kind| counter(&format!("deviations_{kind}")));
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
            counter("requests_planned").to_string(),
            counter("requests_reuse").to_string(),
            counter("requests_stitching").to_string(),
            counter("requests_small").to_string(),
            deviations.iter().sum::<u64>().to_string(),
            format!("{} s", session.age_ms / 1000),
            state_of(session).into(),
        ]);
    }
    if status.sessions.is_empty() {
        outln!("no sessions");
    } else {
        out!("{table}");
    }
    DONE
}

fn state_of(session: &v1::SessionStatus) -> &'static str {
    // What is live and has no memory sleeps.
    let is_asleep = session.leased_bytes == 0 && session.counters.get("live_bytes").is_some_and(|live| *live > 0);
    match (session.is_evicted, session.is_attached) {
        (true, _) => "evicted",
        (false, true) if is_asleep => "asleep",
        (false, true) => "attached",
        (false, false) => "detached",
    }
}

fn to_json(session: &v1::SessionStatus) -> Value {
    let counters: serde_json::Map<String, Value> = crate::runtime::Counter::ALL
        .iter()
        .map(|(name, _)| ((*name).to_owned(), json!(session.counters.get(*name))))
        .collect();
    json!({
        "session": session.session_id,
        "name": session.name,
        "tenant": session.tenant,
        "pid": session.pid,
        "priority": session.priority,
        "revision": session.revision,
        "lend": session.lends,
        "is_evicted": session.is_evicted,
        "unanswered": session.unanswered,
        "devices": session.on.iter().map(|on| json!({
            "ordinal": on.ordinal,
            "leased_bytes": on.leased_bytes,
            "shared_bytes": on.shared_bytes,
            "guarantee_bytes": on.guarantee_bytes,
        })).collect::<Vec<_>>(),
        "limit_bytes": session.limit_bytes,
        "leased_bytes": session.leased_bytes,
        "chunks": session.chunks,
        "is_attached": session.is_attached,
        "age_ms": session.age_ms,
        "counters": counters,
    })
}
