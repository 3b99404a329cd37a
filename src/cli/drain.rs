//! `stitchd drain`: nothing more of a device is leased.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::{Common, DONE, Outcome, ask, print_json};
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

/// Every session has a second to answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd drain 1            # before maintenance: nothing more of device 1 is leased, what lies idle comes back\n  stitchd drain --undo 1     # it is for everybody again\n\nExit code 0 when nothing of it is leased or reserved any more, 1 while sessions hold some or it is kept for plans."
)]
pub(super) struct DrainArgs {
    /// The daemon's device: its ordinal, or its UUID
    #[arg(value_name = "DEVICE")]
    device: String,
    /// Lease it again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &DrainArgs) -> Outcome {
    let socket = args.common.socket();
    let status = ask::status(&socket)?;
    let v1::Device { uuid: device_uuid, ordinal, .. } = ask::device(&status, &args.device)?;
    let request = v1::DrainRequest { device_uuid, undo: args.undo };
    let reply = ask::ask(&socket, PATIENCE, async |channel| AdminClient::new(channel).drain(request).await)?;
    let v1::DrainReply { leased_bytes, session_ids, reserved_bytes } = reply;
    let is_left = !args.undo && (leased_bytes > 0 || reserved_bytes > 0);
    if args.common.json {
        print_json(&json!({
            "device": ordinal,
            "draining": !args.undo,
            "leased_bytes": leased_bytes,
            "reserved_bytes": reserved_bytes,
            "sessions": session_ids,
        }));
    } else if args.undo {
        outln!("device {ordinal} is leased again");
    } else {
        outln!("device {ordinal}: nothing more is leased; {} still is", Bytes::new(leased_bytes));
        for session in status.sessions.iter().filter(|session| session_ids.contains(&session.session_id)) {
            outln!("  session {} '{}' (pid {})", session.session_id, session.name, session.pid);
        }
        if reserved_bytes > 0 {
            let reserved = Bytes::new(reserved_bytes);
            outln!(
                "  {reserved} is reserved for plans (`stitchd plans`), and there until it is released: stitchd reserve --plan FILE.plan --release"
            );
        }
    }
    if is_left { Ok(super::Failure::NO) } else { DONE }
}
