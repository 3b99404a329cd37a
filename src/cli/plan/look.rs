//! `stitchd plan check` and `show`: what a plan is, and whether it is right.

use serde_json::json;

use super::super::spinner::Spinner;
use super::super::table::Table;
use super::{DONE, Failure, Outcome, cut_object, cut_words, job, print_json, print_out, problem_of, read_plan, trace};
use crate::plan::{Plan, Position, lower_bound, validate};
use crate::trace::Trace;
use crate::units::{Bytes, counted};

pub(super) fn check(
    plan_file: &std::path::Path,
    trace_file: &std::path::Path,
    device: Option<u32>,
    json: bool,
) -> Outcome {
    // Reading validates the plan in itself; what is left is whether it is this job's.
    let wrong = match read_plan(plan_file) {
        Err(Failure::PlanFile { .. }) if read_plan(trace_file).is_ok() => {
            let (plan, trace) = (trace_file.display(), plan_file.display());
            return Err(Failure::Usage(format!(
                "{plan} is the plan: it comes first, as in `stitchd plan check {plan} {trace}`"
            )));
        }
        Err(error @ Failure::PlanFile { .. }) => vec![error.to_string()],
        Err(other) => return Err(other),
        Ok(plan) => {
            let contents = trace::read_contents(trace_file)?;
            let spinner = Spinner::of(!json);
            spinner.say("comparing");
            let (imported, _) = trace::job_of(contents, trace_file, device)?;
            differences(&plan, &imported.trace)?
        }
    };
    if json {
        print_json(&json!({ "valid": wrong.is_empty(), "wrong": wrong }));
    } else if wrong.is_empty() {
        outln!("the plan is right, and made for this job");
    } else {
        wrong.iter().for_each(|line| outln!("{line}"));
    }
    Ok(u8::from(!wrong.is_empty()))
}

/// What keeps the plan from being one for this job. At most a screen of it.
pub(in crate::cli) fn differences(plan: &Plan, trace: &Trace) -> Result<Vec<String>, Failure> {
    const SHOWN: usize = 20;
    let problem = problem_of(trace, plan.provenance.iteration, plan.provenance.cut)?;
    let mut wrong = Vec::new();
    if let Err(error) = validate::check(plan) {
        wrong.push(error.to_string());
    }
    if plan.entries.len() != problem.buffers.len() || plan.cycle_start != problem.cycle_start {
        wrong.push(format!(
            "the plan has {} requests, {} of them in the first iteration; the trace has {} and {}",
            plan.entries.len(),
            plan.cycle_start,
            problem.buffers.len(),
            problem.cycle_start
        ));
    }
    for (at, (entry, buffer)) in plan.entries.iter().zip(&problem.buffers).enumerate() {
        let same = (entry.bytes, entry.lane, entry.context) == (buffer.bytes, buffer.lane, buffer.context);
        if !same {
            wrong.push(format!(
                "request {at}: the plan has {} on {}, the trace {} on {}",
                entry.bytes, entry.lane, buffer.bytes, buffer.lane
            ));
        } else if (entry.lifetime, entry.again) != (buffer.lifetime, buffer.again) {
            wrong.push(format!("request {at}: the plan has it live at other times than the trace"));
        }
        if wrong.len() >= SHOWN {
            wrong.push("and more".into());
            break;
        }
    }
    let bound = lower_bound(&problem);
    if bound > plan.pool_len {
        wrong.push(format!("the pool of {} is below the bound of the trace, {bound}", plan.pool_len));
    }
    Ok(wrong)
}

pub(super) fn show(file: &std::path::Path, json: bool) -> Outcome {
    let plan = read_plan(file)?;
    let lifetime = |lifetime: crate::units::Lifetime| format!("{}..{}", lifetime.start, lifetime.end);
    if json {
        let entry = |entry: &crate::plan::Entry| {
            json!({
                "bytes": entry.bytes.get(),
                "offset": entry.offset.get(),
                "stream": entry.lane.stream.0,
                "role": entry.lane.role,
                "context": format!("{:016x}", entry.context.0),
                "lifetimes": entry.lifetimes().map(|life| [life.start.0, life.end.0]).collect::<Vec<_>>(),
            })
        };
        print_json(&json!({
            "plan": plan.id().to_hex(),
            "fingerprint": plan.job.fingerprint.to_hex(),
            "rank": plan.job.position.map(Position::rank),
            "world_size": plan.job.position.map(Position::world_size),
            "pool_bytes": plan.pool_len.get(),
            "lower_bound_bytes": plan.provenance.lower_bound.get(),
            "solver": plan.provenance.solver,
            "iteration": plan.provenance.iteration,
            "cut": plan.provenance.cut.as_ref().map(cut_object),
            "cycle_start": plan.cycle_start,
            "entries": plan.entries.iter().map(entry).collect::<Vec<_>>(),
        }));
        return DONE;
    }
    print_out(&format_args!(
        "plan {} of job {}: {} in {}, the first {} once, the others in every iteration\n",
        plan.id().to_hex(),
        job(&plan.job),
        counted(plan.entries.len() as u64, "request"),
        plan.pool_len,
        plan.cycle_start
    ));
    if let Some(cut) = &plan.provenance.cut {
        outln!("{}", cut_words(cut));
    }
    let mut table = Table::new(&[">request", "part", ">size", ">offset", ">stream", "live", "again"]);
    for (at, entry) in plan.entries.iter().enumerate() {
        table.row(vec![
            at.to_string(),
            if at < plan.cycle_start { "once".into() } else { "cycle".into() },
            Bytes::new(entry.bytes.get()).to_string(),
            entry.offset.to_string(),
            entry.lane.to_string(),
            lifetime(entry.lifetime),
            entry.again.map_or_else(String::new, lifetime),
        ]);
    }
    print_out(&table);
    DONE
}
