//! `stitchd plans`: the plans that a daemon stores.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;

use super::table::Table;
use super::{Common, DONE, Failure, Outcome, ask, print_json};
use crate::ids::PlanId;
use crate::units::Bytes;
use crate::wire::v1;
use crate::wire::v1::plans_client::PlansClient;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  stitchd plans\n  stitchd plans delete 0123456789abcdef")]
pub(super) struct PlansArgs {
    #[command(subcommand)]
    command: Option<PlansCommand>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Subcommand)]
enum PlansCommand {
    /// Deletes a plan, and frees what is reserved for it
    #[command(after_help = "Example:\n  stitchd plans delete 0123456789abcdef")]
    Delete {
        /// Its id, as the list shows it
        id: String,
    },
}

pub(super) fn run(args: &PlansArgs) -> Outcome {
    let socket = args.common.socket();
    if let Some(PlansCommand::Delete { id }) = &args.command {
        let unreadable = || Failure::Usage(format!("'{id}' is not the id of a plan: sixteen hexadecimal digits"));
        let plan_id = PlanId::from_hex(id).ok_or_else(unreadable)?.0;
        let request = v1::DeletePlanRequest { plan_id };
        ask::ask(&socket, Duration::ZERO, async |channel| PlansClient::new(channel).delete(request).await)?;
        if args.common.json {
            print_json(&json!({ "deleted": id }));
        } else {
            outln!("deleted {id}");
        }
        return DONE;
    }
    let listed = ask::ask(&socket, Duration::ZERO, async |channel| {
        PlansClient::new(channel).list(v1::ListPlansRequest {}).await
    })?;
    if args.common.json {
        let plan = |plan: &v1::PlanInfo| {
            json!({
                "plan": PlanId(plan.plan_id).to_hex(),
                "name": plan.name,
                "pool_bytes": plan.pool_bytes,
                "requests": plan.requests,
                "reserved_bytes": plan.reserved_bytes,
            })
        };
        print_json(&json!({ "plans": listed.plans.iter().map(plan).collect::<Vec<_>>() }));
        return DONE;
    }
    if listed.plans.is_empty() {
        outln!("no plans");
        return DONE;
    }
    let mut table = Table::new(&["plan", "name", ">pool", ">requests", ">reserved"]);
    for plan in &listed.plans {
        table.row(vec![
            PlanId(plan.plan_id).to_hex(),
            plan.name.clone(),
            Bytes::new(plan.pool_bytes).to_string(),
            plan.requests.to_string(),
            Bytes::new(plan.reserved_bytes).to_string(),
        ]);
    }
    out!("{table}");
    DONE
}
