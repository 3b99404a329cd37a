//! `stitchd health`: whether a daemon serves.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::{Common, Outcome, ask, print_json};
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd health --socket /run/stitchd/stitchd.sock || echo \"no: $?\"   # 1 of one that shuts down, 3 where none answers\n  stitchd health --timeout 2s   # in a probe: one that does not answer by then is not well"
)]
pub(super) struct HealthArgs {
    #[command(flatten)]
    common: Common,
    /// How long the daemon may take to answer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = super::time)]
    timeout: Duration,
}

pub(super) fn run(args: &HealthArgs) -> Outcome {
    let socket = args.common.socket();
    let request = HealthCheckRequest { service: "stitchd.v1.Sessions".into() };
    let is_serving = ask::ask_within(&socket, args.timeout, async |channel| {
        let reply = HealthClient::new(channel.clone()).check(request).await?.into_inner();
        let status = AdminClient::new(channel).status(v1::StatusRequest {}).await?.into_inner();
        Ok(tonic::Response::new(reply.status() == ServingStatus::Serving && !status.is_draining))
    })?;
    if args.common.json {
        print_json(&json!({ "serving": is_serving }));
    } else {
        outln!("{}", if is_serving { "serving" } else { "not serving" });
    }
    Ok(u8::from(!is_serving))
}
