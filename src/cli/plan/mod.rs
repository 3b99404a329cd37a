//! `stitchd plan`: makes a plan from a trace; `check` and `show` look at one.

mod answer;
mod look;
mod problem;
mod search;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;

use super::spinner::Spinner;
use super::{DONE, Failure, Outcome, interrupt, print_json, print_out, read_plan, trace, whole_file};
use crate::clock::{Clock as _, SystemClock};
use crate::limits;
use crate::plan::solve;
use crate::plan::{Job, Plan, PlanError, Position, Problem, format, lower_bound_as_asked};
use crate::trace::import::Contents;
use crate::trace::{Cut, Trace};
use crate::units::{Bytes, counted};

pub(super) use look::differences;
use search::Searching;

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
    /// Search for so many units of work, some fifteen million a second on two cores: the same answer on every machine [default: 16000000 for a problem CSV, 500 for each request of a trace]
    #[arg(long, value_name = "UNITS")]
    work: Option<u64>,
    /// Where chance begins in a search: another number is another search
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1 << 63))]
    seed: u64,
    /// Stop the search after so long with the best that there is, such as 60s; without --work as long as that takes. Ctrl-C stops it, too
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
    #[command(
        after_help = "Examples:\n  stitchd plan check job.plan trace.csv.zst && stitchd reserve --plan job.plan\n  stitchd plan check answer.csv problem.csv    # offsets of whatever solver: apart, and how far from the bound"
    )]
    Check {
        /// A plan file; or the answer to a problem of placement, in CSV with `id` and `offset`
        plan: PathBuf,
        /// The trace; or the problem
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
        // Where the second is a plan the two are in the wrong order, and are told so.
        (Some(PlanCommand::Check { plan, file, device }), _)
            if (problem::is_csv(plan) || problem::is_compressed(plan))
                && !(file.is_file() && read_plan(file).is_ok()) =>
        {
            answer::check(plan, file, *device, args.json)
        }
        (Some(PlanCommand::Check { plan, file, device }), _) => look::check(plan, file, *device, args.json),
        (Some(PlanCommand::Show { plan }), _) => look::show(plan, args.json),
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
    let contents = trace::read_contents(file)?;
    if let Contents::Problem(rows) = &contents
        && args.out.as_deref().is_none_or(problem::is_csv)
    {
        trace::check_device_of_problem(args.device, file)?;
        let of_jobs = [("--from-iteration", args.from_iteration.is_some()), ("--rank", args.rank.is_some())];
        if let Some((option, _)) = of_jobs.iter().find(|(_, is_there)| *is_there) {
            return Err(Failure::Usage(format!(
                "{option}: a problem of placement has no iterations and no processes; with --out FILE.plan it is planned as a job"
            )));
        }
        return problem::stack(args, file, rows, solver);
    }
    let spinner = Spinner::of(!args.json);
    spinner.say("comparing iterations");
    let (mut imported, _) = trace::job_of(contents, file, args.device)?;
    let cut = imported.cut();
    let trace = &imported.trace;
    // What is whole is better than what is not, and nothing later is looked at.
    let last_whole = cut.map_or(trace.iterations(), |cut| cut.iteration).saturating_sub(1);
    let iteration = args.from_iteration.unwrap_or(last_whole.min(1));
    imported.notes.extend(cut.map(|cut| about_cut(&cut, iteration)));
    let started = clock.now();
    if let Some(out) = args.out.as_deref().filter(|out| imported.is_problem && problem::is_compressed(out)) {
        let out = out.display();
        return Err(Failure::Usage(format!("--out {out}: the answer to a problem is written as .csv, as it is")));
    }
    if let Some(out) = args.out.as_deref().filter(|out| imported.is_problem && !problem::is_plan(out)) {
        let out = out.display();
        let what = "FILE.csv has an offset for each row, and FILE.plan is a plan with sizes as pools serve them";
        return Err(Failure::Usage(format!("--out {out}: which of two is wanted? {what}")));
    }
    let problem = problem_of(trace, iteration, cut)?;
    drop(spinner);
    let searching = Searching::of(args.json);
    let known = if imported.is_problem { solve::patient() } else { solve::in_proportion(&problem) };
    let solution = Plan::solved(&problem, solver, &searching.budget(args, known, &problem))?;
    let until_cut = cut.filter(|cut| cut.iteration == iteration).map(|cut| trace.before(&cut));
    imported.notes.extend(about_one_pass(until_cut.as_ref().unwrap_or(trace), &problem, solution.lower_bound));
    let interrupted = searching.is_cut_short(&solution);
    imported.notes.extend(interrupted.then(|| interrupt::NOTE.to_owned()));
    let is_optimal = solution.is_optimal();
    let mut plan = Plan::of_solved(trace, &problem, solution)?;
    let improvements = searching.improvements();
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
            "improvements": improvements,
            "interrupted": interrupted,
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

/// The solver of this name.
fn solver(name: &str) -> Result<solve::Solver, Failure> {
    let known = solve::Solver::ALL.map(solve::Solver::name).join(", ");
    let unknown = || Failure::Usage(format!("there is no solver '{name}'; there are {known}"));
    solve::Solver::ALL.into_iter().find(|solver| solver.name() == name).ok_or_else(unknown)
}

/// What is planned of a trace that is cut there, or not at all.
fn problem_of(trace: &Trace, iteration: u32, cut: Option<Cut>) -> Result<Problem, PlanError> {
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

/// What a plan of a job that was seen for one iteration has to hold beside what was seen, if that is much more. The bound of what pools serve is `rounded`.
pub(super) fn about_one_pass(trace: &Trace, problem: &Problem, rounded: Bytes) -> Option<String> {
    if trace.iterations() > 1 {
        return None;
    }
    let live = trace.summary().peak_live;
    let is_more = |bound: Bytes| bound.get() > live.get().saturating_add(live.get() / 50);
    // Live bytes are unrounded, and what they are compared with is not above what is rounded.
    let bound = Some(rounded).filter(|rounded| is_more(*rounded)).map(|_| lower_bound_as_asked(problem))?;
    is_more(bound).then(|| {
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
