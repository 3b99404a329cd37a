//! `stitchd limit`: what a session may have, while it runs.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::{Common, DONE, Failure, Outcome, ask, print_json};
use crate::limits;
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd limit train-4711 20GiB          # at once; what it holds above that is asked back\n  stitchd limit 3 --priority 5            # its requests are served first from now on\n  stitchd limit 3 20GiB --revision 2      # only if nobody has changed its terms since"
)]
pub(super) struct LimitArgs {
    /// The session: its number, or its name
    session: String,
    /// Bytes that it may never pass, all devices together
    limit: Option<Bytes>,
    /// Its place among others: higher is served first
    #[arg(long, value_name = "N")]
    priority: Option<u32>,
    /// Lend what it does not use of its guarantees to others
    #[arg(long, value_name = "BOOL")]
    lend: Option<bool>,
    /// Only if its terms have been changed so many times (`revision` in `sessions --json`)
    #[arg(long, value_name = "N")]
    revision: Option<u64>,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &LimitArgs) -> Outcome {
    if let Some(limit) = args.limit.filter(|limit| !limit.is_zero() && *limit < limits::CHUNK_LEN_MIN) {
        return Err(Failure::Usage(format!(
            "{limit} are less than one chunk, {}: with that the session gets nothing. A unit may be missing, as in {}GiB; 0 means nothing",
            limits::CHUNK_LEN_MIN,
            limit.get()
        )));
    }
    let socket = args.common.socket();
    let status = ask::status(&socket)?;
    let session = ask::session(&status, &args.session)?;
    let request = v1::LimitRequest {
        session_id: session.session_id,
        limit_bytes: args.limit.map(Bytes::get),
        priority: args.priority,
        lends: args.lend,
        revision: args.revision,
    };
    let reply = ask::ask(&socket, Duration::ZERO, async |channel| AdminClient::new(channel).limit(request).await)?;
    let is_deferred = reply.outcome() == v1::limit_reply::Outcome::Deferred;
    if args.common.json {
        print_json(&json!({
            "session": session.session_id,
            "outcome": if is_deferred { "deferred" } else { "applied" },
            "revision": reply.revision,
            "limit_bytes": reply.limit_bytes,
            "priority": reply.priority,
            "lend": reply.lends,
            "held_bytes": reply.held_bytes,
        }));
        return DONE;
    }
    let (limit, held) = (Bytes::new(reply.limit_bytes), Bytes::new(reply.held_bytes));
    if session.is_evicted {
        outln!("it is evicted, and gets nothing more whatever its terms are, until its program is started anew");
    }
    let (name, revision) = (&session.name, reply.revision);
    outln!("'{name}': limit {limit}, priority {}, holds {held} (revision {revision})", reply.priority);
    if is_deferred {
        outln!(
            "deferred: it holds {} more than its new limit. It gets nothing more, and was asked for what lies idle in it.",
            held.saturating_sub(limit)
        );
    }
    DONE
}
