//! Which pools a replay runs, and which of them serve from a plan.

use super::super::{Failure, read_plan};
use super::ReplayArgs;
use crate::plan::Plan;
use crate::replay::{Job, PoolName};
use crate::trace::Trace;

/// The pools without `--pool`: what users get, beside PyTorch's allocator as it is and with
/// expandable segments.
const DEFAULT: [PoolName; 5] =
    [PoolName::Stitchd, PoolName::StitchdAuto, PoolName::StitchdPlan, PoolName::Caching, PoolName::Expandable];

/// The iteration that `stitchd-plan` is planned from where no flag says which: the first one behind
/// the warm-up.
const PLANNED_ITERATION: u32 = 1;

/// The pools that are asked for, each once.
pub(super) fn pools(args: &ReplayArgs) -> Result<Vec<PoolName>, Failure> {
    if args.pool.is_empty() {
        return Ok(DEFAULT.into_iter().filter(|pool| !is_repetition(args, *pool)).collect());
    }
    let mut pools = Vec::new();
    for name in &args.pool {
        let named = match name.trim() {
            "all" => PoolName::ALL.map(|(_, pool)| pool).to_vec(),
            name => vec![known(name)?],
        };
        for pool in named {
            if !pools.contains(&pool) {
                pools.push(pool);
            }
        }
    }
    Ok(pools)
}

fn known(name: &str) -> Result<PoolName, Failure> {
    let found = PoolName::ALL.into_iter().find(|(known, _)| *known == name);
    let names = PoolName::ALL.map(|(name, _)| name).join(", ");
    found
        .map(|(_, pool)| pool)
        .ok_or_else(|| Failure::Usage(format!("there is no pool '{name}'; there are {names}, or all")))
}

/// With these flags `stitchd` is what this pool is.
fn is_repetition(args: &ReplayArgs, pool: PoolName) -> bool {
    match pool {
        PoolName::StitchdAuto => args.auto || args.disables("plan"),
        PoolName::StitchdPlan => has_plan_flag(args) || args.disables("plan"),
        _ => false,
    }
}

fn has_plan_flag(args: &ReplayArgs) -> bool {
    args.plan.is_some() || args.plan_from_iteration.is_some()
}

/// `stitchd` serves from a plan only where a flag asks for one.
pub(super) fn serves_from_plan(args: &ReplayArgs, pool: PoolName) -> bool {
    pool == PoolName::StitchdPlan || (pool == PoolName::Stitchd && has_plan_flag(args))
}

/// The job as `pool` gets it.
pub(super) fn job_of<'a>(args: &ReplayArgs, pool: PoolName, job: Job<'a>) -> Job<'a> {
    Job { plan: job.plan.filter(|_| serves_from_plan(args, pool)), ..job }
}

/// The plan of this replay. Pools that cannot have what their name says are taken out of `pools`,
/// with the reason in `notes`; where no pool is left the reason is the error.
pub(super) fn plan(
    args: &ReplayArgs,
    pools: &mut Vec<PoolName>,
    profile: &Trace,
    notes: &mut Vec<String>,
) -> Result<Option<Plan>, Failure> {
    let is_disabled = args.disables("plan");
    let mut plan = given_plan(args, profile)?;
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    for pool in pools.drain(..) {
        let missing = match pool {
            PoolName::StitchdAuto | PoolName::StitchdPlan if is_disabled => Some("--disable plan".to_owned()),
            PoolName::StitchdPlan if plan.is_none() => made_plan(args, profile).map(|made| plan = Some(made)).err(),
            _ => None,
        };
        match missing {
            Some(why) => left_out.push(format!("{} is left out: {why}", pool.as_str())),
            None => kept.push(pool),
        }
    }
    if kept.is_empty() {
        return Err(Failure::Usage(left_out.join("; ")));
    }
    *pools = kept;
    notes.extend(left_out);
    Ok(plan)
}

/// The plan that flags ask for.
fn given_plan(args: &ReplayArgs, profile: &Trace) -> Result<Option<Plan>, Failure> {
    match (&args.plan, args.plan_from_iteration) {
        _ if args.disables("plan") => Ok(None),
        (Some(file), _) => read_plan(file).map(Some),
        (None, Some(iteration)) => Ok(Some(Plan::searched(profile, iteration)?)),
        (None, None) => Ok(None),
    }
}

/// The plan of `stitchd-plan` where no flag asks for one, or why there is none.
fn made_plan(args: &ReplayArgs, profile: &Trace) -> Result<Plan, String> {
    let iterations = profile.iterations();
    if iterations <= PLANNED_ITERATION {
        return Err(format!(
            "the trace has {iterations} iteration, and a plan is made from iteration {PLANNED_ITERATION} on. \
             Mark iterations, or plan from the first with --plan-from-iteration 0"
        ));
    }
    if args.perturb.is_some() && iterations.saturating_add(args.repeat) <= PLANNED_ITERATION + 1 {
        return Err(format!(
            "no iteration is left for --perturb behind iteration {PLANNED_ITERATION}, from which the plan is \
             made. Add some with --repeat"
        ));
    }
    Plan::searched(profile, PLANNED_ITERATION).map_err(|error| error.to_string())
}
