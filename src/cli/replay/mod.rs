//! `stitchd replay`: runs a trace through the production pools and models of others.

mod show;
mod sweep;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::{Failure, Outcome, read_plan, trace};
use crate::clock::SystemClock;
use crate::driver::cost_table::CostTable;
use crate::ladder::Ladder;
use crate::plan::Plan;
use crate::replay::models::caching::{Conf, Version};
use crate::replay::models::gmlake::GmlakeOptions;
use crate::replay::script::Script;
use crate::replay::{Job, PoolName, PoolRun, Record, Setup, Watch};
use crate::replay::{min_capacity, perturb, recorded, repeat, replay};
use crate::runtime::RuntimeConfig;
use crate::trace::Trace;
use crate::trace::import::snapshot::AllocatorSettings;
use crate::units::Bytes;
use sweep::Sweep;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd replay trace.csv.zst                              every pool, without a limit\n  stitchd replay trace.csv.zst --plan-from-iteration 1      stitchd with a plan of iterations 0 and 1\n  stitchd replay snapshot.pickle --min-capacity             what each pool needs\n  stitchd replay trace.csv.zst --pool caching,expandable --capacity 40GiB\n  stitchd replay trace.csv.zst --pool caching --conf max_split_size_mb:128,garbage_collection_threshold:0.8\n  stitchd replay trace.csv.zst --pool gmlake --sweep gmlake.frag_limit=2MiB,64MiB,512MiB"
)]
pub(super) struct ReplayArgs {
    /// A trace, a PyTorch memory snapshot, or whatever `stitchd trace info` can read
    file: PathBuf,
    /// Pools, separated by commas: native, caching, expandable, gmlake, stalloc, stitchd; or all
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "all")]
    pool: Vec<String>,
    /// The plan that stitchd's pools serve from
    #[arg(long, value_name = "FILE", conflicts_with = "plan_from_iteration")]
    plan: Option<PathBuf>,
    /// Plan from the trace up to and including this iteration, as a profiling run would
    #[arg(long, value_name = "N")]
    plan_from_iteration: Option<u32>,
    /// Bytes that the device has for this process [default: any number]
    #[arg(long, value_name = "BYTES")]
    capacity: Option<Bytes>,
    /// Find the smallest capacity with which each pool gets to the end
    #[arg(long)]
    min_capacity: bool,
    /// Append the last iteration so many times
    #[arg(long, value_name = "K", default_value_t = 0)]
    repeat: u32,
    /// Disturb the iterations that no plan was made from: 1 % of requests dropped, inserted, swapped or resized, one micro-batch more, an evaluation between
    #[arg(long, value_name = "SEED")]
    perturb: Option<u64>,
    /// Turn parts of stitchd's pools off, to see what they are worth: plan, stitch
    #[arg(long, value_name = "PART,...", value_delimiter = ',')]
    disable: Vec<String>,
    /// Measure nanoseconds per operation: pools one after another, the median of five
    #[arg(long, conflicts_with_all = ["sweep", "report"])]
    timing: bool,
    /// Change a setting (may be given several times; --set help lists them)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Replay once for each value of a setting (--sweep help lists them)
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
    /// What driver calls cost: a100, gmlake or free
    #[arg(long, value_name = "NAME", default_value = "a100")]
    costs: String,
    /// Which device of a job that uses several
    #[arg(long, value_name = "ORDINAL")]
    device: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A pool's results.
#[derive(Debug)]
struct Result {
    pool: PoolName,
    done: PoolRun,
    min_capacity: Option<Option<Bytes>>,
    ns_per_operation: Option<f64>,
}

/// What was replayed and what came of it.
struct Replayed {
    trace: Trace,
    script: Script,
    /// What the allocator that was recorded did, if the file says so.
    recorded: Option<Record>,
    notes: Vec<String>,
    has_plan: bool,
    results: Vec<Result>,
}

pub(super) fn run(args: &ReplayArgs) -> Outcome {
    let pools = pools(&args.pool)?;
    let mut setup = setup(args)?;
    let sweep = args.sweep.as_deref().map(Sweep::parse).transpose()?;
    // What is wrong must not cost the time that a large file takes.
    args.set.iter().try_for_each(|setting| sweep::set(setting, &setup).map(drop))?;
    let (imported, _) = trace::read_numbered(&args.file)?;
    let mut notes = imported.notes;
    if let (None, Some(settings)) = (&args.conf, &imported.settings) {
        notes.extend(follow(settings, &mut setup.conf));
    }
    let device = args.device.unwrap_or_else(|| imported.trace.events.first().map_or(0, |event| event.device));
    let plan = plan(args, &imported.trace)?;
    let is_as_recorded = args.repeat == 0 && args.perturb.is_none();
    let recorded = recorded(&imported.trace, device, &imported.reserved).filter(|_| is_as_recorded);
    let trace = prepared(args, imported.trace, plan.as_ref());
    let script = Script::of(&trace, device);
    if script.requests == 0 {
        return Err(Failure::Usage(format!("{}: nothing is allocated on device {device}", args.file.display())));
    }
    if script.left_out > 0 {
        notes.push(format!("{} events of other devices are left out; --device chooses another", script.left_out));
    }
    let job = Job { trace: &trace, script: &script, plan: plan.as_ref() };
    // After what a snapshot says: whoever sets something means it.
    for setting in &args.set {
        setup = sweep::set(setting, &setup)?;
    }
    if let Some(sweep) = sweep {
        return sweep.run(args, &pools, job, &setup);
    }
    let results = all(args, &pools, job, &setup)?;
    for result in &results {
        notes.extend(result.done.note.iter().map(|note| format!("{}: {note}", result.pool.as_str())));
    }
    let replayed = Replayed { has_plan: plan.is_some(), trace, script, recorded, notes, results };
    if let Some(out) = &args.report {
        show::report(args, &replayed, out)?;
    }
    show::print(args, &replayed, &setup)
}

fn pools(names: &[String]) -> std::result::Result<Vec<PoolName>, Failure> {
    if names.iter().any(|name| name == "all") {
        return Ok(PoolName::ALL.into_iter().map(|(_, pool)| pool).collect());
    }
    let known = |name: &String| {
        let found = PoolName::ALL.into_iter().find(|(known, _)| known == name);
        let names = PoolName::ALL.map(|(name, _)| name).join(", ");
        found
            .map(|(_, pool)| pool)
            .ok_or_else(|| Failure::Usage(format!("there is no pool '{name}'; there are {names}")))
    };
    names.iter().map(known).collect()
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
            "stitch" => runtime.stitch.is_on = false,
            "reuse" => {
                return Err(Failure::Usage("--disable reuse: these pools have no reuse of a plan's idle bytes".into()));
            }
            other => return Err(Failure::Usage(format!("--disable takes plan and stitch, not '{other}'"))),
        }
    }
    Ok(Setup {
        capacity: args.capacity,
        costs,
        conf: Conf::parse(args.conf.as_deref().unwrap_or_default(), args.torch)
            .map_err(|error| Failure::Usage(format!("--conf: {error}")))?,
        gmlake: GmlakeOptions::default(),
        planned_iteration: args.plan_from_iteration,
        ladder: Ladder::standard(),
        runtime,
    })
}

/// Sets the models of PyTorch's allocator as it was set where the snapshot was taken. Says what is different from what nobody asked for.
fn follow(settings: &AllocatorSettings, conf: &mut Conf) -> Vec<String> {
    let options = settings.options();
    let mut notes = Vec::new();
    if settings.expandable_segments {
        notes.push("the job that was recorded had expandable segments".to_owned());
    }
    if options.is_empty() {
        return notes;
    }
    notes.push(match conf.clone().and(&options) {
        Ok(followed) => {
            *conf = followed;
            format!("caching and expandable are set as the recorded job had it: {options}; --conf sets them otherwise")
        }
        Err(error) => format!("the recorded job had the settings {options}, and they are not followed: {error}"),
    });
    notes
}

fn plan(args: &ReplayArgs, trace: &Trace) -> std::result::Result<Option<Plan>, Failure> {
    if args.disable.iter().any(|part| part == "plan") {
        return Ok(None);
    }
    match (&args.plan, args.plan_from_iteration) {
        (Some(file), _) => read_plan(file).map(Some),
        (None, Some(iteration)) => Ok(Some(Plan::from_trace(trace, iteration)?)),
        (None, None) => Ok(None),
    }
}

/// The trace as it is replayed.
fn prepared(args: &ReplayArgs, trace: Trace, plan: Option<&Plan>) -> Trace {
    let trace = if args.repeat > 0 { repeat(&trace, args.repeat) } else { trace };
    match args.perturb {
        // What a plan was made from stays as it was when it was made.
        Some(seed) => perturb(&trace, seed, plan.map_or(0, |plan| plan.provenance.iteration + 1)),
        None => trace,
    }
}

/// Every pool's results, in the order asked for: several at a time, unless they are measured.
fn all(
    args: &ReplayArgs,
    pools: &[PoolName],
    job: Job<'_>,
    setup: &Setup,
) -> std::result::Result<Vec<Result>, Failure> {
    let steps = job.script.steps.len();
    let bar = bar(args, (steps * pools.len()) as u64);
    let results: Mutex<Vec<Option<std::result::Result<Result, Failure>>>> =
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
    let threads = if args.timing { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(pools.len()) {
            scope.spawn(work);
        }
        work();
    });
    bar.finish_and_clear();
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|result| result.expect("every pool was given to a thread")).collect()
}

fn one(
    args: &ReplayArgs,
    pool: PoolName,
    job: Job<'_>,
    setup: &Setup,
    bar: &ProgressBar,
) -> std::result::Result<Result, Failure> {
    const ROUNDS: usize = 5;
    let clock = SystemClock::new();
    let watch =
        Watch { after_iteration: job.plan.map(|plan| plan.provenance.iteration), records: args.report.is_some() };
    let last = AtomicUsize::new(0);
    let progress = |steps: usize| {
        bar.inc(steps.saturating_sub(last.swap(steps, Ordering::Relaxed)) as u64);
    };
    let done = replay(pool, job, setup, watch, &clock, &progress)?;
    let ns_per_operation = if args.timing && done.run.out_of_memory.is_none() {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            times.push(replay(pool, job, setup, Watch::default(), &clock, &|_| ())?.run.time);
        }
        times.sort_unstable();
        Some(per_operation(times[ROUNDS / 2], job.script))
    } else {
        None
    };
    let min_capacity = if args.min_capacity { Some(min_capacity(pool, job, setup, &clock, &|_| ())?) } else { None };
    Ok(Result { pool, done, min_capacity, ns_per_operation })
}

/// Allocations and frees are an operation each.
fn per_operation(time: Duration, script: &Script) -> f64 {
    use crate::replay::script::Step;
    let operations = script.steps.iter().filter(|step| matches!(step, Step::Alloc(_) | Step::Free { .. })).count();
    time.as_nanos() as f64 / operations.max(1) as f64
}

/// A bar on a terminal; nothing where nobody looks.
fn bar(args: &ReplayArgs, steps: u64) -> ProgressBar {
    use std::io::IsTerminal as _;
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % of {len} steps, {eta} left");
    ProgressBar::new(steps).with_style(style.expect("the template is right"))
}
