//! `stitchd evict`: a session gets nothing more, and on demand its process ends.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::{Common, DONE, Outcome, ask, print_json};
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd evict train-4711                 # nothing more for it, and what lies idle in it comes back\n  stitchd evict 3 --end-after 30s          # its process is killed if it holds anything after 30 seconds\n\nWhat is live in a process cannot be taken out of it: a mapping is its own. Only its end gives that back.\nA session that is evicted stays so: its program gets memory again when it is started anew."
)]
pub(super) struct EvictArgs {
    /// The session: its number, or its name
    session: String,
    /// Kill its process if it still holds memory after so long
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    end_after: Option<Duration>,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &EvictArgs) -> Outcome {
    let socket = args.common.socket();
    let status = ask::status(&socket)?;
    let session = ask::session(&status, &args.session)?;
    let end_after = args.end_after;
    let end_after_ms = end_after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
    let request = v1::EvictRequest { session_id: session.session_id, end_after_ms };
    let patience = end_after.unwrap_or_default().saturating_add(Duration::from_secs(15));
    let reply = ask::ask(&socket, patience, async |channel| AdminClient::new(channel).evict(request).await)?;
    let v1::EvictReply { returned_bytes, held_bytes, is_ended } = reply;
    if args.common.json {
        let (returned, held) = (returned_bytes, held_bytes);
        print_json(
            &json!({ "session": session.session_id, "returned_bytes": returned, "held_bytes": held, "ended": is_ended }),
        );
        return DONE;
    }
    let (name, returned, held) = (&session.name, Bytes::new(returned_bytes), Bytes::new(held_bytes));
    match is_ended {
        true => outln!("'{name}' (pid {}) was killed: {returned} came back", session.pid),
        false => outln!("'{name}' gets nothing more: {returned} came back, it holds {held}"),
    }
    DONE
}
