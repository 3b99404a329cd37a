//! `stitchd plans`: the plans that a daemon stores.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::reserve::name_of;
use super::table::Table;
use super::{Common, DONE, Failure, Outcome, ask, print_json, read_plan, whole_file};
use crate::ids::PlanId;
use crate::limits;
use crate::plan::{Fingerprint, format};
use crate::units::Bytes;
use crate::wire::convert::WantedPlans;
use crate::wire::v1;
use crate::wire::v1::plans_client::PlansClient;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd plans                                   # all, the newest first\n  stitchd plans --fingerprint 6a20eddfe1d26f33    # those for a job\n  stitchd plans put job.plan\n  stitchd plans delete 0123456789abcdef"
)]
pub(super) struct PlansArgs {
    #[command(subcommand)]
    command: Option<PlansCommand>,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    common: Common,
}

/// Which plans.
#[derive(Debug, Args)]
struct JobArgs {
    /// Only plans for the job of this fingerprint, as `plan show` says it
    #[arg(long, value_name = "F")]
    fingerprint: Option<String>,
    /// Only plans for this process of it, counted from 0, and after them those for any
    #[arg(long, value_name = "R")]
    rank: Option<u32>,
    /// Of so many processes
    #[arg(long, value_name = "N", requires = "rank")]
    world_size: Option<u32>,
}

#[derive(Debug, Subcommand)]
enum PlansCommand {
    /// Stores a plan: `plans get` finds the newest of a job. A job is started with it as STITCHD_PLAN=FILE
    #[command(after_help = "Example:\n  stitchd plans put job.plan --name 'gpt2, 8 ranks'")]
    Put {
        /// A plan file
        file: PathBuf,
        /// What people call it [default: the file's name]
        #[arg(long)]
        name: Option<String>,
    },
    /// Fetches a plan, by its id or by its job
    #[command(
        after_help = "Examples:\n  stitchd plans get 0123456789abcdef -o job.plan\n  stitchd plans get --fingerprint 6a20eddfe1d26f33 --rank 3 -o job.plan"
    )]
    Get {
        /// Its id, as the list shows it
        #[arg(required_unless_present = "fingerprint", conflicts_with = "fingerprint")]
        id: Option<String>,
        #[command(flatten)]
        job: JobArgs,
        /// Write the plan here
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Deletes a plan, and frees what is reserved for it
    #[command(after_help = "Example:\n  stitchd plans delete 0123456789abcdef")]
    Delete {
        /// Its id, as the list shows it
        id: String,
    },
}

impl JobArgs {
    fn wanted(&self) -> Result<v1::PlanFor, Failure> {
        let JobArgs { fingerprint, rank, world_size } = self;
        let unreadable = |text: &String| {
            Failure::Usage(format!("'{text}' is not the fingerprint of a job: sixteen hexadecimal digits"))
        };
        let read = |text: &String| Fingerprint::from_hex(text).ok_or_else(|| unreadable(text));
        let fingerprint = fingerprint.as_ref().map(read).transpose()?.map(|fingerprint| fingerprint.0);
        let wanted = v1::PlanFor { fingerprint, rank: *rank, world_size: *world_size };
        // What makes no sense is said before anybody is asked.
        WantedPlans::try_from(wanted).map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(wanted)
    }

    fn is_given(&self) -> bool {
        self.fingerprint.is_some() || self.rank.is_some()
    }
}

pub(super) fn run(args: &PlansArgs) -> Outcome {
    let (socket, json) = (args.common.socket(), args.common.json);
    if args.command.is_some() && args.job.is_given() {
        return Err(Failure::Usage("--fingerprint and --rank stand behind the subcommand".into()));
    }
    match &args.command {
        None => list(&socket, args.job.wanted()?, json),
        Some(PlansCommand::Put { file, name }) => put(&socket, file, name.clone(), json),
        Some(PlansCommand::Get { id, job, out }) => get(&socket, id.as_deref(), job, out, json),
        Some(PlansCommand::Delete { id }) => delete(&socket, id, json),
    }
}

fn id_of(text: &str) -> Result<PlanId, Failure> {
    let unreadable = || {
        Failure::Usage(format!(
            "'{text}' is not the id of a plan: sixteen hexadecimal digits, as `stitchd plans` lists them"
        ))
    };
    PlanId::from_hex(text).ok_or_else(unreadable)
}

fn put(socket: &Path, file: &Path, name: Option<String>, json: bool) -> Outcome {
    let plan = read_plan(file)?;
    let put = v1::PutPlanRequest { plan: format::write(&plan), name: name.unwrap_or_else(|| name_of(file)) };
    let stored = ask::ask(socket, Duration::ZERO, async |channel| {
        PlansClient::new(channel).max_encoding_message_size(limits::GRPC_MESSAGE_LEN_MAX).put(put).await
    })?;
    let id = PlanId(stored.plan_id).to_hex();
    if json {
        print_json(&json!({ "plan": id, "fingerprint": plan.job.fingerprint.to_hex() }));
    } else {
        outln!("stored plan {id}");
    }
    DONE
}

fn get(socket: &Path, id: Option<&str>, job: &JobArgs, out: &Path, json: bool) -> Outcome {
    let plan_id = id.map(id_of).transpose()?.map_or(0, |id| id.0);
    let request = v1::GetPlanRequest { plan_id, job: Some(job.wanted()?).filter(|_| plan_id == 0) };
    let reply = ask::ask(socket, Duration::ZERO, async |channel| {
        PlansClient::new(channel).max_decoding_message_size(limits::GRPC_MESSAGE_LEN_MAX).get(request).await
    })?;
    let id = PlanId(reply.plan_id).to_hex();
    // Whatever the daemon has, what is written is a plan.
    let unusable = |error| Failure::Usage(format!("plan {id} of the daemon: {}", crate::error::chain(&error)));
    format::read(&reply.plan).map_err(unusable)?;
    whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, &reply.plan))?;
    if json {
        print_json(&json!({ "plan": id, "out": out.display().to_string() }));
    } else {
        outln!("plan {id} written to {}", out.display());
    }
    DONE
}

fn delete(socket: &Path, id: &str, json: bool) -> Outcome {
    let request = v1::DeletePlanRequest { plan_id: id_of(id)?.0 };
    ask::ask(socket, Duration::ZERO, async |channel| PlansClient::new(channel).delete(request).await)?;
    if json {
        print_json(&json!({ "deleted": id }));
    } else {
        outln!("deleted {id}");
    }
    DONE
}

fn list(socket: &Path, job: v1::PlanFor, json: bool) -> Outcome {
    let request = v1::ListPlansRequest { job: Some(job) };
    let listed = ask::ask(socket, Duration::ZERO, async |channel| PlansClient::new(channel).list(request).await)?;
    if json {
        print_json(&json!({ "plans": listed.plans.iter().map(object).collect::<Vec<_>>() }));
        return DONE;
    }
    if listed.plans.is_empty() {
        outln!("no plans");
        return DONE;
    }
    let mut table = Table::new(&["plan", "name", "fingerprint", ">rank", ">of", ">pool", ">requests", ">reserved"]);
    for plan in &listed.plans {
        let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
        table.row(vec![
            PlanId(plan.plan_id).to_hex(),
            plan.name.clone(),
            Fingerprint(plan.fingerprint).to_hex(),
            number(plan.rank),
            number(plan.world_size),
            Bytes::new(plan.pool_bytes).to_string(),
            plan.requests.to_string(),
            Bytes::new(plan.reserved_bytes).to_string(),
        ]);
    }
    out!("{table}");
    DONE
}

fn object(plan: &v1::PlanInfo) -> Value {
    json!({
        "plan": PlanId(plan.plan_id).to_hex(),
        "name": plan.name,
        "fingerprint": Fingerprint(plan.fingerprint).to_hex(),
        "rank": plan.rank,
        "world_size": plan.world_size,
        "pool_bytes": plan.pool_bytes,
        "requests": plan.requests,
        "reserved_bytes": plan.reserved_bytes,
    })
}
