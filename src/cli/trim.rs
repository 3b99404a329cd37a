//! `stitchd trim`: idle memory goes back to the driver.

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
    after_help = "Examples:\n  stitchd trim                              # all that lies idle, in all sessions and with the daemon\n  stitchd trim --session train-4711 4GiB    # 4 GiB of one session's at most"
)]
pub(super) struct TrimArgs {
    /// At most so much of each session
    bytes: Option<Bytes>,
    /// Only of this session: its number, or its name
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
    /// Only of this device of the daemon's: its ordinal, or its UUID
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &TrimArgs) -> Outcome {
    let socket = args.common.socket();
    let status = ask::status(&socket)?;
    let session = args.session.as_ref().map(|session| ask::session(&status, session)).transpose()?;
    let device = args.device.as_ref().map(|device| ask::device(&status, device)).transpose()?;
    let request = v1::TrimRequest {
        device_uuid: device.map(|device| device.uuid).unwrap_or_default(),
        session_id: session.map_or(0, |session| session.session_id),
        len_bytes: args.bytes.map_or(0, Bytes::get),
    };
    let reply = ask::ask(&socket, PATIENCE, async |channel| AdminClient::new(channel).trim(request).await)?;
    let v1::TrimReply { returned_bytes, asked, unanswered } = reply;
    if args.common.json {
        print_json(&json!({ "returned_bytes": returned_bytes, "asked": asked, "unanswered": unanswered }));
        return DONE;
    }
    let sessions = crate::units::counted(u64::from(asked), "session");
    outln!("{} went back to the driver; {sessions} asked", Bytes::new(returned_bytes));
    if unanswered > 0 {
        outln!("{} did not answer in time", crate::units::counted(u64::from(unanswered), "session"));
    }
    DONE
}
