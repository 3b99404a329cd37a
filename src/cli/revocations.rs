//! `stitchd revocations`: who was asked for memory for whom, and gave how much.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::table::Table;
use super::{Common, DONE, Outcome, ask, print_json};
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  stitchd revocations | tail    # what has just moved\n\nTimes are since the daemon began; it remembers the last 1024."
)]
pub(super) struct RevocationsArgs {
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &RevocationsArgs) -> Outcome {
    let socket = args.common.socket();
    let request = v1::RevocationsRequest {};
    let reply =
        ask::ask(&socket, Duration::ZERO, async |channel| AdminClient::new(channel).revocations(request).await)?;
    if args.common.json {
        print_json(&json!({ "revocations": reply.revocations.iter().map(to_json).collect::<Vec<_>>() }));
        return DONE;
    }
    let mut table = Table::new(&[">at", "from", "for", ">asked", ">given", ">took", ""]);
    for one in &reply.revocations {
        let who = |id: u64, name: &str| match (id, name) {
            (0, "") => "by hand".to_owned(),
            (0, name) => name.to_owned(),
            (id, name) => format!("{name} ({id})"),
        };
        table.row(vec![
            format!("{:.3} s", one.at_ms as f64 / 1000.0),
            who(one.from_session_id, &one.from),
            who(one.to_session_id, &one.to),
            Bytes::new(one.asked_bytes).to_string(),
            Bytes::new(one.given_bytes).to_string(),
            format!("{} ms", one.took_ms),
            if one.is_unanswered { "no answer".into() } else { String::new() },
        ]);
    }
    out!("{table}");
    DONE
}

fn to_json(one: &v1::Revocation) -> Value {
    json!({
        "at_seconds": one.at_ms as f64 / 1000.0,
        "device": crate::wire::convert::device_uuid("device_uuid", &one.device_uuid).map(|uuid| uuid.to_string()).ok(),
        "from_session": one.from_session_id,
        "from": one.from,
        "for_session": one.to_session_id,
        "for": one.to,
        "asked_bytes": one.asked_bytes,
        "given_bytes": one.given_bytes,
        "took_seconds": one.took_ms as f64 / 1000.0,
        "unanswered": one.is_unanswered,
    })
}
