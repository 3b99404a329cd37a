//! `stitchd replay`: runs a trace through the production pools and models of others.

mod choice;
mod notes;
mod show;
mod sweep;

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::spinner::{MOVES, Spinner};
use super::{DONE, Failure, Outcome, trace, whole_file};
use crate::clock::SystemClock;
use crate::driver::cost_table::CostTable;
use crate::limits;
use crate::plan::{Plan, PlanError};
use crate::replay::models::caching::{Conf, Version};
use crate::replay::script::Script;
use crate::replay::{AutoOptions, Floor, Job, Least, Perturbation, PoolName, PoolRun, Record, Run, Setup, Watch};
use crate::replay::{lacks, left_plan, min_capacity, perturb, recorded, repeat, replay};
use crate::runtime::RuntimeConfig;
use crate::trace::Trace;
use crate::units::{Bytes, counted};
use sweep::Sweep;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd replay trace.csv.zst                           # what stitchd and PyTorch reserve and call\n  stitchd replay trace.csv.zst --costs h200              # the same, with an H200's driver calls\n  stitchd replay trace.csv.zst --pool all                # models of other allocators, too\n  stitchd replay trace.csv.zst --pool stitchd-auto,stitchd-plan   # plans made while the job runs, and before it\n  stitchd replay trace.csv.zst --plan-from-iteration 1   # stitchd with a plan of iterations 0, 1\n  stitchd replay snapshot.pickle --min-capacity          # what each pool needs\n  stitchd replay trace.csv.zst --pool caching,expandable --capacity 40GiB\n  stitchd replay trace.csv.zst --pool caching --conf max_split_size_mb:128\n  stitchd replay trace.csv.zst --pool gmlake --sweep gmlake.frag_limit=2MiB,64MiB,512MiB"
)]
pub(super) struct ReplayArgs {
    /// A trace, a PyTorch memory snapshot, or whatever `stitchd trace info` can read
    file: PathBuf,
    /// Run these pools, or all: native, caching, expandable, gmlake, stalloc, stitchd, stitchd-auto,
    /// stitchd-plan [default: stitchd,stitchd-auto,stitchd-plan,caching,expandable]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pool: Vec<String>,
    /// The plan that stitchd and stitchd-plan serve from
    #[arg(long, value_name = "FILE", conflicts_with = "plan_from_iteration")]
    plan: Option<PathBuf>,
    /// Plan from the trace up to and including this iteration, as a profiling run would
    #[arg(long, value_name = "N")]
    plan_from_iteration: Option<u32>,
    /// Let stitchd make its plans while the job runs, as stitchd-auto does
    #[arg(long, conflicts_with_all = ["plan", "plan_from_iteration"])]
    auto: bool,
    /// Delay plans of stitchd-auto by what making them takes here, if an iteration of the job takes so
    /// many seconds
    #[arg(long, value_name = "SECONDS", value_parser = step_seconds, conflicts_with = "min_capacity")]
    step_seconds: Option<f64>,
    /// Replay what stitchd-auto would do for a job that says where its requests come from, and which
    /// vary, only until it has a plan: saying so takes time
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    contexts: Contexts,
    /// Replay stitchd-auto as a later run of the job: with the plan that the first one has left
    #[arg(long)]
    again: bool,
    /// Bytes that the device has for this process [default: any number]
    #[arg(long, value_name = "BYTES", conflicts_with = "min_capacity")]
    capacity: Option<Bytes>,
    /// Find the smallest capacity with which each pool gets to the end
    #[arg(long)]
    min_capacity: bool,
    /// Append the last iteration so many times
    #[arg(long, value_name = "K", default_value_t = 0)]
    repeat: u32,
    /// Disturb the iterations that no plan was made from (all, without one): 1 % of requests dropped, inserted, swapped or resized, and in the one in the middle one-more micro-batch, and an evaluation before it; or these kinds alone, and one-less; with once, requests in the middle one only
    #[arg(long, value_name = "SEED[:KIND,...]", allow_negative_numbers = true)]
    perturb: Option<Perturbation>,
    /// Turn parts of stitchd's pools off, to see what they are worth: plan, reuse, stitch
    #[arg(long, value_name = "PART,...", value_delimiter = ',')]
    disable: Vec<String>,
    /// Measure nanoseconds per operation: pools one after another, the median of five; without the
    /// simulated driver and daemon (the modelled seconds have them) and without planning, which a
    /// thread beside the job does; and the floor, a lock and a look at a table by address
    #[arg(long, conflicts_with_all = ["sweep", "report"])]
    timing: bool,
    /// Change a setting (several times if need be; `replay FILE --set help` lists them)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Replay once for each value of a setting (`replay FILE --sweep help` lists them)
    #[arg(long, value_name = "KEY=A,B,C")]
    sweep: Option<String>,
    /// Write a picture of it all: one HTML file that needs nothing else
    #[arg(long, value_name = "FILE", conflicts_with = "sweep")]
    report: Option<PathBuf>,
    /// PyTorch's options for caching and expandable, as in PYTORCH_CUDA_ALLOC_CONF [default: those of a snapshot's job, else none]
    #[arg(long, value_name = "TEXT")]
    conf: Option<String>,
    /// Whose rules caching and expandable follow
    #[arg(long, value_name = "VERSION", default_value_t = Version::NEWEST)]
    torch: Version,
    /// What driver calls cost: a100, gmlake, h200 or free
    #[arg(long, value_name = "NAME", default_value = "a100")]
    costs: String,
    /// Which device of a job that uses several [default: the first that it allocates on]
    #[arg(long, value_name = "ORDINAL")]
    device: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ReplayArgs {
    /// A part of the pools is turned off.
    fn disables(&self, part: &str) -> bool {
        self.disable.iter().any(|disabled| disabled == part)
    }
}

/// How long a job says where its requests come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Contexts {
    #[default]
    Always,
    RecordedOnly,
}

/// Seconds of an iteration: a nanosecond to a day.
fn step_seconds(text: &str) -> std::result::Result<f64, String> {
    let seconds = text.trim().parse::<f64>().ok().filter(|seconds| (1e-9..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "from 1e-9 to 86400, such as 0.25".to_owned())
}

/// Nanoseconds per operation.
#[derive(Clone, Copy, Debug)]
struct Nanos {
    /// In the allocator.
    own: f64,
    /// In simulated drivers, the daemon's half of a lease, and planning.
    beside: f64,
}

/// A pool's results.
#[derive(Debug)]
struct Result {
    pool: PoolName,
    done: PoolRun,
    /// The least that it needs, if that was asked for; `None` in it where no device has so much.
    least: Option<Option<Least>>,
    time: Option<Nanos>,
}

/// What was replayed and what came of it.
struct Replayed<'a> {
    trace: &'a Trace,
    script: &'a Script,
    /// What the allocator that was recorded did, if the file says so.
    recorded: Option<Record>,
    notes: Vec<String>,
    has_plan: bool,
    results: Vec<Result>,
    /// Nanoseconds per operation of what no allocator can do without, where times are wanted.
    floor_ns: Option<f64>,
}

pub(super) fn run(args: &ReplayArgs) -> Outcome {
    if args.set.iter().map(String::as_str).chain(args.sweep.as_deref()).any(|text| text == "help") {
        sweep::print_keys();
        return DONE;
    }
    let mut pools = choice::pools(args)?;
    let mut setup = setup(args)?;
    let sweep = args.sweep.as_deref().map(Sweep::parse).transpose()?;
    sweep::check_capacity(args, sweep.as_ref())?;
    // What is wrong must not cost the time that a large file takes.
    args.set.iter().try_for_each(|setting| sweep::set(setting, &setup).map(drop))?;
    if let Some(out) = &args.report {
        whole_file::is_not(out, &args.file)?;
    }
    let (imported, device) = trace::read_job(&args.file, args.device)?;
    let mut notes = imported.notes;
    notes.extend(sweep::about_old_keys(args.set.iter().map(String::as_str).chain(args.sweep.as_deref())));
    if let (None, Some(settings)) = (&args.conf, &imported.settings) {
        notes.extend(notes::follow(settings, &mut setup.conf));
    }
    // After what a snapshot says: an explicit setting wins.
    for setting in &args.set {
        setup = sweep::set(setting, &setup)?;
    }
    let profile = imported.trace;
    let work = Spinner::of(!is_unseen(args));
    work.say("planning");
    let plan = choice::plan(args, &mut pools, &profile, &mut notes)?;
    notes.extend(notes::about_plans(args, &pools, plan.as_ref(), &profile));
    notes.extend(notes::about_options(args, &pools, &setup));
    let is_as_recorded = args.repeat == 0 && args.perturb.is_none();
    let recorded = recorded(&profile, device, &imported.reserved).filter(|_| is_as_recorded);
    work.say("preparing the trace");
    let trace = prepared(args, &profile, plan.as_ref())?;
    if let Some(how) = &args.perturb {
        notes.extend(lacks(&profile, how).map(str::to_owned));
    }
    let trace = trace.as_ref().unwrap_or(&profile);
    let script = Script::of(trace, device);
    if args.repeat > 0 && profile.iterations() == 1 && script.peak_live > Script::of(&profile, device).peak_live {
        notes.push("the trace has one iteration: what that leaves behind stays beside each repetition".to_owned());
    }
    notes.extend(replayable(args, &script)?);
    let job = Job { trace, profile: &profile, script: &script, plan: plan.as_ref(), left: None };
    let is_later_run = args.again && pools.iter().any(|pool| setup.makes_plans(*pool));
    let left = is_later_run.then(|| left_plan(job, &setup, &SystemClock::new())).flatten();
    let job = Job { left: left.as_ref(), ..job };
    drop(work);
    if let Some(sweep) = sweep {
        return sweep.run(args, &pools, job, &setup, notes);
    }
    let results = all(args, &pools, job, &setup, &mut notes)?;
    let replayed = Replayed {
        has_plan: profiled(plan.as_ref()).is_some(),
        trace,
        script: &script,
        recorded,
        notes,
        results,
        floor_ns: args.timing.then(|| floor(&script)),
    };
    if let Some(out) = &args.report {
        let work = Spinner::of(!is_unseen(args));
        work.say("drawing");
        show::report(args, &replayed, &setup, out)?;
    }
    show::print(args, &replayed, &setup)
}

/// Refuses a script without a request, and names the requests that are not replayed.
fn replayable(args: &ReplayArgs, script: &Script) -> std::result::Result<Option<String>, Failure> {
    if script.requests == 0 {
        return Err(Failure::Usage(format!("{}: only nothing is asked for", args.file.display())));
    }
    let empty = Some(script.empty).filter(|empty| *empty > 0);
    Ok(empty.map(|empty| {
        let empty = counted(empty, "request");
        format!("not replayed, as no allocator does anything for it: {empty} of no bytes")
    }))
}

fn setup(args: &ReplayArgs) -> std::result::Result<Setup, Failure> {
    let costs = CostTable::named(&args.costs).ok_or_else(|| {
        let names = CostTable::ALL.map(|table| table.name).join(", ");
        Failure::Usage(format!("there is no cost table '{}'; there are {names}", args.costs))
    })?;
    let mut runtime = RuntimeConfig::default();
    for part in &args.disable {
        match part.as_str() {
            "plan" => {}
            "stitch" => runtime.pages.stitches = false,
            "reuse" => runtime.reuses = false,
            other => return Err(Failure::Usage(format!("--disable takes plan, reuse and stitch, not '{other}'"))),
        }
    }
    Ok(Setup {
        capacity: args.capacity,
        costs,
        conf: Conf::parse(args.conf.as_deref().unwrap_or_default(), args.torch)
            .map_err(|error| Failure::Usage(format!("--conf: {error}")))?,
        planned_iteration: args.plan_from_iteration,
        runtime,
        is_auto: args.auto && !args.disables("plan"),
        auto: AutoOptions {
            step: args.step_seconds.map(Duration::from_secs_f64),
            contexts_end: args.contexts == Contexts::RecordedOnly,
        },
        ..Setup::default()
    })
}

/// The iterations up to this one are what the plan is made of. One that is made while the job runs comes too late for a figure of its own: what the daemon got back counts as reserved to the end.
fn profiled(plan: Option<&Plan>) -> Option<u32> {
    plan.map(|plan| plan.provenance.iteration)
}

/// The trace as it is replayed, where that is another than what was read.
fn prepared(args: &ReplayArgs, trace: &Trace, plan: Option<&Plan>) -> std::result::Result<Option<Trace>, Failure> {
    let mut prepared = None;
    if args.repeat > 0 {
        let last = trace.iterations().saturating_sub(1);
        let cycle = trace.events.iter().filter(|event| event.iteration == last).count();
        let events = cycle.saturating_mul(args.repeat as usize).saturating_add(trace.events.len());
        if events > limits::TRACE_EVENTS_MAX {
            let max = limits::TRACE_EVENTS_MAX;
            let text = format!("--repeat {} makes {events} events of {cycle}; {max} are possible", args.repeat);
            return Err(Failure::Usage(text));
        }
        prepared = Some(repeat(trace, args.repeat));
    }
    if let Some(how) = &args.perturb {
        let trace = prepared.as_ref().unwrap_or(trace);
        // What a plan was made from stays as it was when it was made.
        let first = plan.map_or(0, |plan| plan.provenance.iteration.saturating_add(1));
        if first >= trace.iterations() {
            let text = format!(
                "--perturb disturbs iterations that the plan was not made from, and there are none after {}; --repeat adds some",
                first.saturating_sub(1)
            );
            return Err(Failure::Usage(text));
        }
        prepared = Some(perturb(trace, how, first));
    }
    Ok(prepared)
}

/// Options about plans that are made while the job runs need a pool that makes some, and iterations.
fn check_auto(args: &ReplayArgs, pools: &[PoolName], setup: &Setup, trace: &Trace) -> std::result::Result<(), Failure> {
    let options = [
        ("--step-seconds", args.step_seconds.is_some()),
        ("--contexts recorded-only", args.contexts == Contexts::RecordedOnly),
        ("--again", args.again),
    ];
    let Some((option, _)) = options.into_iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    if !pools.iter().any(|pool| setup.makes_plans(*pool)) {
        let text = format!("{option} needs a pool that makes plans while the job runs: --pool stitchd-auto");
        return Err(Failure::Usage(text));
    }
    if args.step_seconds.is_some() && trace.iterations() < 2 {
        let text = "--step-seconds needs a trace with more than one iteration; --repeat adds some".to_owned();
        return Err(Failure::Usage(text));
    }
    Ok(())
}

/// Every pool's results, in the order asked for: several at a time, unless they are measured. What a pool has to say goes to `notes`; one that cannot have this job is left out with
/// the reason.
fn all(
    args: &ReplayArgs,
    pools: &[PoolName],
    job: Job<'_>,
    setup: &Setup,
    notes: &mut Vec<String>,
) -> std::result::Result<Vec<Result>, Failure> {
    check_auto(args, pools, setup, job.trace)?;
    let steps = job.script.steps.len();
    let bar = bar(args, (steps * pools.len()) as u64);
    let results: Mutex<Vec<Option<std::result::Result<Result, PlanError>>>> =
        Mutex::new(pools.iter().map(|_| None).collect());
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(pool) = pools.get(at) else { break };
            let result = one(args, *pool, job, setup, &bar);
            results.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(result);
        }
    };
    let threads = if args.timing || args.step_seconds.is_some() {
        1
    } else {
        std::thread::available_parallelism().map_or(1, usize::from)
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(pools.len()) {
            scope.spawn(work);
        }
        work();
    });
    bar.finish_and_clear();
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (mut done, mut failed) = (Vec::new(), None);
    for (pool, result) in pools.iter().zip(results) {
        match result.expect("every pool was given to a thread") {
            Ok(result) => {
                if *pool == PoolName::Stalloc {
                    notes.push(notes::about_stalloc(args, pools, job, setup));
                }
                notes.extend(notes::about_result(&result, job.script));
                done.push(result);
            }
            Err(error) => {
                notes.push(format!("{} is left out, it has no plan: {error}", pool.as_str()));
                failed = Some(error);
            }
        }
    }
    match failed.filter(|_| done.is_empty()) {
        Some(error) => Err(error.into()),
        None => Ok(done),
    }
}

fn one(
    args: &ReplayArgs,
    pool: PoolName,
    job: Job<'_>,
    setup: &Setup,
    bar: &ProgressBar,
) -> std::result::Result<Result, PlanError> {
    let clock = SystemClock::new();
    let watch = Watch { after_iteration: profiled(job.plan), records: args.report.is_some() };
    let job = choice::job_of(args, pool, job);
    let last = AtomicUsize::new(0);
    let progress = |steps: usize| {
        bar.inc(steps.saturating_sub(last.swap(steps, Ordering::Relaxed)) as u64);
    };
    let done = replay(pool, job, setup, watch, &clock, &progress)?;
    let nanos = if args.timing && done.run.out_of_memory.is_none() {
        let timed = || Ok(times(&replay(pool, job, setup, Watch::default(), &clock, &|_| ())?.run));
        let (own, beside) = median(timed)?;
        Some(Nanos { own: per_operation(own, job.script), beside: per_operation(beside, job.script) })
    } else {
        None
    };
    let tried = |capacity: Bytes| bar.set_message(format!("trying {} in {capacity}", pool.as_str()));
    let least = match (args.min_capacity, setup.capacity) {
        (false, _) => None,
        (true, None) => Some(min_capacity(pool, job, setup, &done.run, &clock, &tried)?),
        (true, Some(_)) => {
            let setup = Setup { capacity: None, ..setup.clone() };
            let unlimited = replay(pool, job, &setup, Watch::default(), &clock, &|_| ())?;
            Some(min_capacity(pool, job, &setup, &unlimited.run, &clock, &tried)?)
        }
    };
    Ok(Result { pool, done, least, time: nanos })
}

/// How long the steps of a run took: in the allocator, and beside it.
type Times = (Duration, Duration);

fn times(run: &Run) -> Times {
    (run.time, run.beside)
}

/// The median of several times.
fn median<E>(mut time: impl FnMut() -> std::result::Result<Times, E>) -> std::result::Result<Times, E> {
    const ROUNDS: usize = 5;
    let times: std::result::Result<Vec<Times>, E> = (0..ROUNDS).map(|_| time()).collect();
    let mut times = times?;
    times.sort_unstable();
    Ok(times[ROUNDS / 2])
}

/// Nanoseconds per operation of what no allocator can do without.
fn floor(script: &Script) -> f64 {
    let clock = SystemClock::new();
    let mut floor = Floor::new(script.slots);
    let timed =
        || Ok::<_, Infallible>(times(&crate::replay::run(script, &mut floor, Watch::default(), &clock, &|_| ())));
    let Ok((time, _)) = median(timed);
    per_operation(time, script)
}

/// Allocations and frees are an operation each.
fn per_operation(time: Duration, script: &Script) -> f64 {
    use crate::replay::script::Step;
    let operations = script.steps.iter().filter(|step| matches!(step, Step::Alloc(_) | Step::Free { .. })).count();
    time.as_nanos() as f64 / operations.max(1) as f64
}

/// Nobody looks, or only a program.
fn is_unseen(args: &ReplayArgs) -> bool {
    use std::io::IsTerminal as _;
    args.json || !std::io::stderr().is_terminal()
}

/// A bar on a terminal; nothing where nobody looks.
fn bar(args: &ReplayArgs, steps: u64) -> ProgressBar {
    if is_unseen(args) {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{spinner} {bar:40} {percent:>3} % of {len} steps, {elapsed} {msg}");
    let bar = ProgressBar::new(steps).with_style(style.expect("the template is right"));
    bar.enable_steady_tick(MOVES);
    bar
}
