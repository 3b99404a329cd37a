//! `stitchd shared`: which ranges processes share, and who holds them.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::table::Table;
use super::{Common, DONE, Outcome, ask, print_json};
use crate::units::{Bytes, counted};
use crate::wire::v1;
use crate::wire::v1::ranges_client::RangesClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd shared                  # what your tenant shares; all, for those who run the daemon\n  stitchd shared --withdraw 3     # nobody more attaches range 3; it goes with its last holder\n\nread-only: `enforced` where the driver lets nobody write the range any more, `by agreement` where each process\nkeeps to that by itself: who imports memory of a GPU chooses its own access."
)]
pub(super) struct SharedArgs {
    /// Take a range's name away: whoever holds it keeps it, and it goes with its last holder.
    #[arg(long, value_name = "RANGE")]
    withdraw: Option<u64>,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &SharedArgs) -> Outcome {
    let socket = args.common.socket();
    if let Some(range_id) = args.withdraw {
        let request = v1::WithdrawRequest { range_id };
        let reply =
            ask::ask(&socket, Duration::ZERO, async |channel| RangesClient::new(channel).withdraw(request).await)?;
        if args.common.json {
            print_json(&json!({ "range": range_id, "holders": reply.holders }));
        } else if reply.holders == 0 {
            outln!("range {range_id} is gone");
        } else {
            let holders = counted(u64::from(reply.holders), "session");
            outln!("range {range_id} is for nobody more, and goes with its last holder: {holders} still");
        }
        return DONE;
    }
    let request = v1::ListRangesRequest {};
    let reply = ask::ask(&socket, Duration::ZERO, async |channel| RangesClient::new(channel).list(request).await)?;
    if args.common.json {
        print_json(&json!({ "ranges": reply.ranges.iter().map(to_json).collect::<Vec<_>>() }));
        return DONE;
    }
    if reply.ranges.is_empty() {
        outln!("nothing is shared");
        return DONE;
    }
    let mut table =
        Table::new(&[">range", "name", ">version", "tenant", ">size", ">content", "read-only", "holders", "goes"]);
    for range in &reply.ranges {
        let holders: Vec<_> = range.holder_session_ids.iter().map(u64::to_string).collect();
        table.row(vec![
            range.range_id.to_string(),
            format!("{}{}", range.name, if range.has_key { " (key)" } else { "" }),
            range.version.to_string(),
            range.tenant.clone(),
            Bytes::new(range.len_bytes).to_string(),
            Bytes::new(range.content_bytes).to_string(),
            read_only(range).into(),
            if holders.is_empty() { "nobody".into() } else { holders.join(", ") },
            goes(range),
        ]);
    }
    out!("{table}");
    DONE
}

fn read_only(range: &v1::SharedRange) -> &'static str {
    match (range.is_writable, range.is_sealed) {
        (true, _) => "no",
        (false, true) => "enforced",
        (false, false) => "by agreement",
    }
}

fn goes(range: &v1::SharedRange) -> String {
    match (range.left_ms, range.is_withdrawn) {
        (Some(left_ms), _) => format!("in {} s", left_ms / 1000),
        (None, true) => "with its last holder".into(),
        (None, false) => format!("{} s after its last holder", range.linger_ms / 1000),
    }
}

fn to_json(range: &v1::SharedRange) -> Value {
    json!({
        "range": range.range_id,
        "name": range.name,
        "version": range.version,
        "tenant": range.tenant,
        "device": crate::wire::convert::device_uuid("device_uuid", &range.device_uuid).map(|uuid| uuid.to_string()).ok(),
        "len_bytes": range.len_bytes,
        "content_bytes": range.content_bytes,
        "chunks": range.chunks,
        "publisher": range.publisher_session_id,
        "holders": range.holder_session_ids,
        "linger_seconds": range.linger_ms as f64 / 1000.0,
        "left_seconds": range.left_ms.map(|left_ms| left_ms as f64 / 1000.0),
        "read_only": if range.is_writable { "no" } else if range.is_sealed { "enforced" } else { "cooperative" },
        "key": range.has_key,
        "withdrawn": range.is_withdrawn,
    })
}
