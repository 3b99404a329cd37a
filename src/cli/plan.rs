//! `stitchd plan`: makes a plan from a trace; `check` and `show` look at one.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;

use super::table::Table;
use super::{DONE, Failure, Outcome, print_json, print_out, read_plan, trace, whole_file};
use crate::clock::{Clock as _, SystemClock};
use crate::limits;
use crate::plan::solve::{self, Budget};
use crate::plan::{Job, Plan, PlanError, Position, Problem, format, lower_bound, validate};
use crate::trace::{Cut, EventKind, Trace};
use crate::units::{Bytes, PlanOffset, counted};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  stitchd plan trace.csv.zst -o job.plan         # plan from the first two iterations\n  stitchd plan trace.csv.zst --from-iteration 2  # from the first and the third\n  stitchd plan check job.plan trace.csv.zst      # is it right, and for this job?\n  stitchd plan show job.plan | less"
)]
pub(super) struct PlanArgs {
    #[command(subcommand)]
    command: Option<PlanCommand>,
    /// A trace, or anything that can be imported (.zst and .gz are read as they are)
    #[arg(required = true)]
    file: Option<PathBuf>,
    /// Write the plan here
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The iteration that repeats; nothing later in the trace is looked at [default: 1, or 0 if that is the only whole one]
    #[arg(long, value_name = "N")]
    from_iteration: Option<u32>,
    /// Which device of a job that uses several [default: the first that it allocates on]
    #[arg(long, value_name = "ORDINAL")]
    device: Option<u32>,
    /// Use only this solver, such as first-fit/size-start
    #[arg(long, value_name = "NAME")]
    solver: Option<String>,
    /// Search for so many units of work, some seven million a second: the same answer on every machine [default: 8000000 for a problem CSV, 500 for each request of a trace]
    #[arg(long, value_name = "UNITS")]
    work: Option<u64>,
    /// Stop the search after so long with the best that there is, such as 60s; without --work as long as that takes
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    time_limit: Option<Duration>,
    /// The plan is for this process of a job of several, counted from 0
    #[arg(long, value_name = "R", requires = "world_size")]
    rank: Option<u32>,
    /// Of so many
    #[arg(long, value_name = "N", requires = "rank")]
    world_size: Option<u32>,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum PlanCommand {
    /// Checks that a plan is right in itself and made for the job of a trace: exit code 0, or what is wrong
    #[command(after_help = "Example:\n  stitchd plan check job.plan trace.csv.zst && stitchd reserve --plan job.plan")]
    Check {
        /// A plan file
        plan: PathBuf,
        /// The trace
        file: PathBuf,
        /// Which device of a job that uses several
        #[arg(long, value_name = "ORDINAL")]
        device: Option<u32>,
    },
    /// Prints a plan
    #[command(
        after_help = "Examples:\n  stitchd plan show job.plan | less\n  stitchd plan show job.plan --json | jq .pool_bytes"
    )]
    Show {
        /// A plan file
        plan: PathBuf,
    },
}

pub(super) fn run(args: &PlanArgs) -> Outcome {
    match (&args.command, &args.file) {
        (Some(PlanCommand::Check { plan, file, device }), _) => check(plan, file, *device, args.json),
        (Some(PlanCommand::Show { plan }), _) => show(plan, args.json),
        (None, Some(file)) => make(args, file),
        (None, None) => Err(Failure::Usage("which trace?".into())),
    }
}

fn make(args: &PlanArgs, file: &Path) -> Outcome {
    let clock = SystemClock::new();
    if let Some(out) = &args.out {
        whole_file::is_not(out, file)?;
    }
    let position = position(args.rank, args.world_size)?;
    let solver = args.solver.as_deref().map(solver).transpose()?;
    let (mut imported, _) = trace::read_job(file, args.device)?;
    imported.notes.extend(about_one_pass(&imported.trace));
    let cut = imported.cut();
    let trace = imported.trace;
    // What is whole is better than what is not, and nothing later is looked at.
    let last_whole = cut.map_or(trace.iterations(), |cut| cut.iteration).saturating_sub(1);
    let iteration = args.from_iteration.unwrap_or(last_whole.min(1));
    imported.notes.extend(cut.map(|cut| about_cut(&cut, iteration)));
    let started = clock.now();
    if imported.is_problem && args.out.as_deref().is_none_or(is_csv) {
        return stack(args, file, &trace, solver, &budget(args, Budget::patient()));
    }
    let problem = problem(&trace, iteration, cut)?;
    let solution = Plan::solved(&problem, solver, &budget(args, known(imported.is_problem, &problem)))?;
    let is_optimal = solution.is_optimal;
    let mut plan = Plan::of_solved(&trace, &problem, solution)?;
    let seconds = (clock.now() - started).as_secs_f64();
    plan.job.position = position;
    imported.notes.extend(about_rounding(&plan));
    if let Some(out) = &args.out {
        whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, &format::write(&plan)))?;
    }
    // Detours may lie behind what was searched.
    let is_optimal = is_optimal && plan.pool_len == plan.cycle_span() || plan.pool_len == plan.provenance.lower_bound;
    if args.json {
        print_json(&json!({
            "plan": plan.id().to_hex(),
            "fingerprint": plan.job.fingerprint.to_hex(),
            "rank": plan.job.position.map(Position::rank),
            "world_size": plan.job.position.map(Position::world_size),
            "buffers": plan.entries.len(),
            "lower_bound_bytes": plan.provenance.lower_bound.get(),
            "peak_bytes": plan.pool_len.get(),
            "gap": plan.gap(),
            "solver": plan.provenance.solver,
            "seconds": seconds,
            "work_units": plan.provenance.work_units,
            "proven_optimal": is_optimal,
            "static_requests": plan.entries.len(),
            "dynamic_requests": plan.provenance.dynamic_requests,
            "static_pool_bytes": plan.pool_len.get(),
            "reuse_groups": plan.reuse_groups(),
            "lanes": plan.lanes().len(),
            "detours": plan.detours.len(),
            "detour_requests": plan.detour_requests(),
            "iteration": iteration,
            "cut": cut.as_ref().map(cut_object),
            "notes": imported.notes,
        }));
        return DONE;
    }
    outln!("plan {} from {} of {}", plan.id().to_hex(), made_from(iteration), file.display());
    outln!("  job        {}", job(&plan.job));
    outln!(
        "  requests   {} planned, {} vary and are left to the pools",
        plan.entries.len(),
        plan.provenance.dynamic_requests
    );
    outln!("  pool       {} ({} bytes)", plan.pool_len, plan.pool_len.get());
    outln!(
        "  bound      {}, gap {:.3} %{}",
        plan.provenance.lower_bound,
        plan.gap() * 100.0,
        if is_optimal { ": optimal" } else { "" }
    );
    if let lanes = plan.lanes()
        && lanes.len() > 1
    {
        let parts = lanes.iter().map(|of| {
            let len = of.plan.part().map_or(Bytes::ZERO, |part| part.len());
            format!("{len} for {}", of.lane)
        });
        outln!("  parts      {}", parts.collect::<Vec<_>>().join(", "));
    }
    if !plan.detours.is_empty() {
        let detours = counted(plan.detours.len() as u64, "detour");
        outln!(
            "  other      {detours} of {} planned, for iterations that do something else",
            counted(plan.detour_requests(), "request")
        );
    }
    outln!("  solver     {} in {seconds:.2} s", plan.provenance.solver);
    imported.notes.iter().for_each(|note| outln!("  note       {note}"));
    match &args.out {
        Some(out) => outln!("  written    {}", out.display()),
        None => outln!("  not written; -o FILE writes it"),
    }
    DONE
}

/// How long is searched where nobody says.
fn known(is_problem: bool, problem: &Problem) -> Budget {
    if is_problem { Budget::patient() } else { Budget::of(problem) }
}

/// How long is searched.
fn budget(args: &PlanArgs, known: Budget) -> Budget {
    let stop = args.time_limit.map(|limit| {
        let clock = SystemClock::new();
        let until = clock.now() + limit;
        Rc::new(move || clock.now() >= until) as Rc<dyn Fn() -> bool>
    });
    // Somewhat more than there is time for: how much there is decides what is tried for how long.
    let timed = |limit: Duration| (limit.as_secs_f64() * 1e7).min(1e15) as u64;
    let units = args.work.unwrap_or(args.time_limit.map_or(known.units, timed));
    Budget { units, stop }
}

fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "csv")
}

/// A problem of placement is answered as it is: sizes to the byte, and an offset for each row.
fn stack(args: &PlanArgs, file: &Path, trace: &Trace, solver: Option<solve::Solver>, budget: &Budget) -> Outcome {
    let clock = SystemClock::new();
    let started = clock.now();
    let mut problem = Problem::from_trace(trace, 0)?;
    for buffer in &mut problem.buffers {
        (buffer.len, buffer.again) = (buffer.bytes, None);
    }
    let solution = Plan::solved(&problem, solver, budget)?;
    let seconds = (clock.now() - started).as_secs_f64();
    validate::check_offsets(&problem.buffers, &solution.offsets)
        .map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
    let bound = lower_bound(&problem);
    let gap = solution.peak.get() as f64 / bound.get().max(1) as f64 - 1.0;
    if let Some(out) = &args.out {
        let rows = rows(trace, &solution.offsets);
        whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, rows.as_bytes()))?;
    }
    if args.json {
        print_json(&json!({
            "buffers": problem.buffers.len(),
            "lower_bound_bytes": bound.get(),
            "peak_bytes": solution.peak.get(),
            "gap": gap,
            "solver": solution.solver,
            "seconds": seconds,
            "work_units": solution.work_units,
            "proven_optimal": solution.is_optimal,
        }));
        return DONE;
    }
    outln!("{} of {}", counted(problem.buffers.len() as u64, "buffer"), file.display());
    outln!("  peak       {} ({} bytes)", solution.peak, solution.peak.get());
    outln!("  bound      {bound}, gap {:.3} %{}", gap * 100.0, if solution.is_optimal { ": optimal" } else { "" });
    outln!("  solver     {} in {seconds:.2} s, {} units of work", solution.solver, solution.work_units);
    match &args.out {
        Some(out) => outln!("  written    {}", out.display()),
        None => outln!(
            "  not written; -o FILE.csv writes the offsets, and -o FILE.plan a plan with sizes as pools serve them"
        ),
    }
    DONE
}

/// The problem with its answer, in the order of time.
fn rows(trace: &Trace, offsets: &[PlanOffset]) -> String {
    let frees = trace.events.iter().filter(|event| event.kind == EventKind::Free);
    let freed: HashMap<u64, u64> = frees.map(|event| (event.id, event.tick.0)).collect();
    let allocs = trace.events.iter().filter(|event| event.kind == EventKind::Alloc);
    let mut text = "id,lower,upper,size,offset\n".to_owned();
    for (event, offset) in allocs.zip(offsets) {
        let upper = freed.get(&event.id).copied().unwrap_or_default();
        let _ = writeln!(text, "{},{},{upper},{},{}", event.id, event.tick.0, event.bytes.get(), offset.get());
    }
    text
}

/// The solver of this name.
fn solver(name: &str) -> Result<solve::Solver, Failure> {
    let known = solve::Solver::ALL.map(solve::Solver::name).join(", ");
    let unknown = || Failure::Usage(format!("there is no solver '{name}'; there are {known}"));
    solve::Solver::ALL.into_iter().find(|solver| solver.name() == name).ok_or_else(unknown)
}

/// What is planned of a trace that is cut there, or not at all.
fn problem(trace: &Trace, iteration: u32, cut: Option<Cut>) -> Result<Problem, PlanError> {
    match cut.filter(|cut| cut.iteration == iteration) {
        Some(cut) => Problem::from_cut(trace, cut),
        None => Problem::from_trace(trace, iteration),
    }
}

/// Where a trace is cut, and what becomes of that in a plan for `iteration`.
fn about_cut(cut: &Cut, iteration: u32) -> String {
    if cut.iteration == iteration {
        return format!("{}, and is planned as far as it goes: what was live lives on", cut_words(cut));
    }
    let planned = made_from(iteration);
    let which = cut.iteration;
    format!("{}; the plan is made from {planned}, and --from-iteration {which} makes it from that", cut_words(cut))
}

fn cut_words(cut: &Cut) -> String {
    let requests = counted(cut.requests, "request");
    format!("iteration {} was cut after {requests}, with {} live", cut.iteration, cut.live)
}

fn cut_object(cut: &Cut) -> serde_json::Value {
    json!({ "iteration": cut.iteration, "requests": cut.requests, "live_bytes": cut.live.get() })
}

/// The process that two options name.
pub(super) fn position(rank: Option<u32>, world_size: Option<u32>) -> Result<Option<Position>, Failure> {
    let Some((rank, world_size)) = rank.zip(world_size) else { return Ok(None) };
    let none = || {
        let most = limits::WORLD_SIZE_MAX;
        Failure::Usage(format!("there is no rank {rank} of {world_size}: ranks go from 0, worlds to {most}"))
    };
    Position::new(rank, world_size).map(Some).ok_or_else(none)
}

/// Whose a plan is, in words.
fn job(job: &Job) -> String {
    let position = job.position.map_or_else(String::new, |position| format!(", {position}"));
    format!("{}{position}", job.fingerprint)
}

/// What a plan for `iteration` is made from, in words.
pub(super) fn made_from(iteration: u32) -> String {
    match iteration {
        0 => "iteration 0".to_owned(),
        _ => format!("iterations 0 and {iteration}"),
    }
}

/// What a plan of a job that was seen for one iteration has to hold beside what was seen, if that is much more.
pub(super) fn about_one_pass(trace: &Trace) -> Option<String> {
    let problem = Some(trace).filter(|trace| trace.iterations() == 1).map(|trace| Problem::from_trace(trace, 0))?;
    let mut problem = problem.ok()?;
    // As live bytes are counted: unrounded.
    problem.buffers.iter_mut().for_each(|buffer| buffer.len = buffer.bytes);
    let (bound, live) = (lower_bound(&problem), trace.summary().peak_live);
    let is_more = bound.get() > live.get().saturating_add(live.get() / 50);
    is_more.then(|| {
        format!(
            "a plan of one iteration is for a job that repeats it: with what it leaves behind {bound} are live in the next one, and {live} in this one"
        )
    })
}

/// How much rounding adds to what is asked for, if that is more than a little.
fn about_rounding(plan: &Plan) -> Option<String> {
    const SAID_FROM: f64 = 1.01;
    let unit = limits::ALLOCATION_ALIGNMENT;
    let asked: f64 = plan.entries.iter().map(|entry| entry.bytes.get() as f64).sum();
    let rounded: f64 = plan.entries.iter().map(|entry| entry.span().len().get() as f64).sum();
    (rounded > asked * SAID_FROM).then(|| {
        let more = (rounded / asked.max(1.0) - 1.0) * 100.0;
        format!("sizes are rounded up to {unit}, as the pools serve them: pool and bound are of {more:.1} % more than is asked for")
    })
}

fn check(plan_file: &std::path::Path, trace_file: &std::path::Path, device: Option<u32>, json: bool) -> Outcome {
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
            let (imported, _) = trace::read_job(trace_file, device)?;
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
pub(super) fn differences(plan: &Plan, trace: &Trace) -> Result<Vec<String>, Failure> {
    const SHOWN: usize = 20;
    let problem = problem(trace, plan.provenance.iteration, plan.provenance.cut)?;
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

fn show(file: &std::path::Path, json: bool) -> Outcome {
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
