//! `stitchd reserve`: the static pool of a plan, made before its job starts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::{Common, DONE, Outcome, ask, print_json, read_plan};
use crate::plan::format;
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::plans_client::PlansClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd reserve --plan job.plan --wait 60s   # wait up to a minute for others to finish\n  stitchd reserve --plan job.plan --release    # the job will not come after all"
)]
pub(super) struct ReserveArgs {
    /// A plan file; the daemon stores it
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// The daemon's device: its ordinal, or its UUID
    #[arg(long, value_name = "DEVICE", default_value = "0")]
    device: String,
    /// Wait so many seconds for memory that others hold
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = super::time)]
    wait: Duration,
    /// Give the reserved chunks up instead
    #[arg(long)]
    release: bool,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &ReserveArgs) -> Outcome {
    let plan = read_plan(&args.plan)?;
    let socket = args.common.socket();
    let id = plan.id();
    if args.release {
        let request = v1::UnreservePlanRequest { plan_id: id.0 };
        ask::ask(&socket, Duration::ZERO, async |channel| PlansClient::new(channel).unreserve(request).await)?;
        if args.common.json {
            print_json(&json!({ "plan": id.to_hex(), "reserved_bytes": 0, "chunks": 0 }));
        } else {
            outln!("nothing is reserved for plan {} any more", id.to_hex());
        }
        return DONE;
    }
    let status = ask::status(&socket)?;
    let device_uuid = ask::device(&status, &args.device)?.uuid;
    let list = v1::ListPlansRequest::default();
    let listed = ask::ask(&socket, Duration::ZERO, async |channel| PlansClient::new(channel).list(list).await)?;
    // One that is stored keeps its name, and is the newest of its job from now on: that is the one whose memory is there.
    let stored = listed.plans.into_iter().find(|stored| stored.plan_id == id.0);
    let put = v1::PutPlanRequest {
        plan: format::write(&plan),
        name: stored.map_or_else(|| name_of(&args.plan), |stored| stored.name),
    };
    ask::ask(&socket, Duration::ZERO, async |channel| {
        PlansClient::new(channel).max_encoding_message_size(crate::limits::GRPC_MESSAGE_LEN_MAX).put(put).await
    })?;
    let wait = args.wait;
    let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let reserve = v1::ReservePlanRequest { plan_id: id.0, device_uuid, wait_ms };
    let reserved = ask::ask(&socket, wait, async |channel| PlansClient::new(channel).reserve(reserve).await)?;
    if args.common.json {
        print_json(
            &json!({ "plan": id.to_hex(), "reserved_bytes": reserved.reserved_bytes, "chunks": reserved.chunks }),
        );
    } else {
        outln!(
            "reserved {} in {} chunks for plan {}",
            Bytes::new(reserved.reserved_bytes),
            reserved.chunks,
            id.to_hex()
        );
    }
    DONE
}

/// The file's name without directories: what people call the plan.
pub(super) fn name_of(path: &std::path::Path) -> String {
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    name.chars().take(crate::limits::NAME_LEN_MAX / 4).collect()
}
