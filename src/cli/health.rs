//! `stitchd health`: whether a daemon serves.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::{Common, Outcome, ask, print_json};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  stitchd health --socket /run/stitchd/stitchd.sock || systemctl restart stitchd")]
pub(super) struct HealthArgs {
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &HealthArgs) -> Outcome {
    let socket = args.common.socket();
    let request = HealthCheckRequest { service: "stitchd.v1.Sessions".into() };
    let reply = ask::ask(&socket, Duration::ZERO, async |channel| HealthClient::new(channel).check(request).await)?;
    let draining = ask::status(&socket)?.is_draining;
    let is_serving = reply.status() == ServingStatus::Serving && !draining;
    if args.common.json {
        print_json(&json!({ "serving": is_serving }));
    } else {
        outln!("{}", if is_serving { "serving" } else { "not serving" });
    }
    Ok(u8::from(!is_serving))
}
