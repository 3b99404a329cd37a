//! A training process without the training: replays a trace against a daemon, with patterns in its memory. The demo runs several.
//!
//! It prints lines of JSON on standard output: progress while it runs, and at the end one report.

mod pattern;

use std::collections::HashMap;
use std::io::Write as _;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use self::pattern::{Marked, Patterns};
use super::{DONE, Failure, Outcome, read_plan, serve, trace};
use crate::clock::{Clock, SystemClock};
use crate::driver::Driver;
use crate::pool::Request;
use crate::runtime::{Runtime, RuntimeConfig};
use crate::session::giving::GiverThread;
use crate::session::locate::Environment;
use crate::session::{Session, SessionConfig};
use crate::trace::{EventKind, Trace};
use crate::units::DeviceAddress;

/// What a trainer says of itself until it has its static pool.
pub(super) const WAITING: &str = "waiting";

#[derive(Debug, Args)]
pub(super) struct TrainerArgs {
    /// The daemon's socket
    #[arg(long)]
    socket: PathBuf,
    /// What to call the session
    #[arg(long)]
    name: String,
    /// The trace to replay
    #[arg(long)]
    trace: PathBuf,
    /// The plan to serve from
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Replay the last iteration so many times more
    #[arg(long, default_value_t = 0)]
    repeat: u32,
    /// Wait so many seconds for memory that others hold
    #[arg(long, default_value_t = 0)]
    wait: u64,
    /// Replay the last iteration again and again, until standard input ends
    #[arg(long)]
    endless: bool,
    /// At the end keep the memory until standard input ends
    #[arg(long)]
    hold: bool,
    /// Keep idle memory when others wait for it
    #[arg(long)]
    keep_idle: bool,
    /// End when nobody reads what this one says: whoever started it is gone
    #[arg(long, hide = true)]
    until_unheard: bool,
    /// Mark and check one allocation of so many
    #[arg(long, default_value = "1")]
    mark_every: NonZeroU64,
    /// Tells this trainer's bytes from others'
    #[arg(long, default_value_t = 1)]
    tag: u16,
}

/// One step of a job: what a trace says, without look-ups.
#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc {
        slot: u32,
        request: Request,
    },
    Free {
        slot: u32,
    },
    /// An iteration ends.
    Mark,
}

/// A trace as steps, with the place of its last iteration.
#[derive(Debug)]
struct Job {
    steps: Vec<Step>,
    slots: usize,
    last_iteration: usize,
}

impl Job {
    fn new(trace: &Trace) -> Job {
        let mut job = Job { steps: Vec::with_capacity(trace.events.len()), slots: 0, last_iteration: 0 };
        let mut slot_of: HashMap<u64, u32> = HashMap::new();
        let mut keys = HashMap::new();
        let mut iteration = 0;
        for event in &trace.events {
            if event.iteration != iteration {
                iteration = event.iteration;
                job.steps.push(Step::Mark);
                job.last_iteration = job.steps.len();
            }
            match event.kind {
                EventKind::Alloc => {
                    let slot = slot_of.len() as u32;
                    slot_of.insert(event.id, slot);
                    let context = *keys.entry(event.context).or_insert_with(|| trace.key(&event.context));
                    job.steps.push(Step::Alloc { slot, request: Request::recorded(event, context) });
                }
                EventKind::Free => job.steps.push(Step::Free { slot: slot_of[&event.id] }),
                _ => {}
            }
        }
        job.steps.push(Step::Mark);
        job.slots = slot_of.len();
        job
    }

    fn last(&self) -> &[Step] {
        &self.steps[self.last_iteration..]
    }
}

/// How long the end waits for the thread that gives memory back.
const GIVER_PATIENCE: Duration = Duration::from_secs(2);

struct Trainer {
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    driver: Arc<dyn Driver>,
    clock: SystemClock,
    patterns: Patterns,
    mark_every: NonZeroU64,
    live: Vec<Option<Marked>>,
    allocations: u64,
    /// Memory calls of each iteration that has ended.
    calls: Vec<u64>,
    calls_before: u64,
    done: u64,
    total: u64,
    said: Duration,
    ends_unheard: bool,
}

pub(super) fn run(args: &TrainerArgs) -> Outcome {
    serve::raise_descriptor_limit();
    if args.endless {
        std::thread::spawn(end_with_stdin);
    }
    let (imported, _) = trace::read_numbered(&args.trace)?;
    let job = Job::new(&imported.trace);
    let plan = args.plan.as_ref().map(|path| read_plan(path)).transpose()?;
    let environment = Environment::read();
    let (library, tenant, pod) = (environment.library.clone(), environment.tenant(), environment.pod());
    let config = SessionConfig { library, tenant, pod, ..SessionConfig::new(args.socket.clone(), args.name.clone()) };
    let session = Session::connect(&config)?;
    let wait = Duration::from_secs(args.wait);
    let runtime = Arc::new(session.runtime(0, RuntimeConfig { wait, ..RuntimeConfig::default() })?);
    let giver = begin_giver(&session, &runtime, args.keep_idle);
    let giver = giver.context("starting the thread that gives memory back").map_err(Failure::Other)?;
    say(&json!({ "state": WAITING }));
    if let Some(plan) = &plan {
        runtime.install_plan(plan).context("installing the plan").map_err(Failure::Other)?;
    }
    say(&json!({ "state": "running" }));
    let total = job.steps.len() as u64 + u64::from(args.repeat) * job.last().len() as u64;
    let mut trainer = Trainer {
        driver: session.driver(),
        session,
        runtime,
        clock: SystemClock::new(),
        patterns: Patterns::new(args.tag),
        mark_every: args.mark_every,
        live: vec![None; job.slots],
        allocations: 0,
        calls: Vec::new(),
        calls_before: 0,
        done: 0,
        total,
        said: Duration::ZERO,
        ends_unheard: args.until_unheard,
    };
    trainer.calls_before = trainer.session.calls().memory_calls();
    trainer.train(&job, args).map_err(Failure::Other)?;
    if args.hold {
        // Whatever comes, or an error: the end of it is what counts.
        serve::wait_for_end_of_stdin();
    }
    giver.end(GIVER_PATIENCE);
    DONE
}

/// Answers the daemon: with idle memory, or with nothing.
fn begin_giver(session: &Arc<Session>, runtime: &Arc<Runtime>, keeps_idle: bool) -> std::io::Result<GiverThread> {
    if !keeps_idle {
        return GiverThread::begin(session, Arc::clone(runtime));
    }
    let shown = Arc::clone(runtime);
    GiverThread::with(session, runtime.device().uuid(), |_| (), move || shown.segments())
}

fn end_with_stdin() {
    serve::wait_for_end_of_stdin();
    end();
}

/// Whoever started this trainer is gone.
#[expect(clippy::disallowed_methods, reason = "nothing asks for the end of work that has none")]
fn end() -> ! {
    std::process::exit(0);
}

impl Trainer {
    fn train(&mut self, job: &Job, args: &TrainerArgs) -> anyhow::Result<()> {
        self.pass(&job.steps)?;
        let mut repeated = 0;
        while repeated < args.repeat || args.endless {
            self.pass(job.last())?;
            repeated = repeated.saturating_add(1);
        }
        // What is live at the end is checked like everything else.
        for marked in std::mem::take(&mut self.live).into_iter().flatten() {
            self.patterns.check(&*self.driver, &marked)?;
            self.runtime.free(marked.address, crate::ids::StreamId::DEFAULT)?;
        }
        let ns = self.nanoseconds_per_allocation(job)?;
        self.report(ns);
        Ok(())
    }

    fn pass(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        for step in steps {
            match *step {
                Step::Alloc { slot, request } => self.alloc(slot, &request)?,
                Step::Free { slot } => self.free(slot)?,
                Step::Mark => self.mark(),
            }
            self.done += 1;
            self.say_progress();
        }
        Ok(())
    }

    fn alloc(&mut self, slot: u32, request: &Request) -> anyhow::Result<()> {
        // In a repeated iteration something that the trace never frees is there already.
        if self.live[slot as usize].is_some() {
            return Ok(());
        }
        let address = self.runtime.alloc(request)?;
        self.allocations += 1;
        let marked = if self.allocations.is_multiple_of(self.mark_every.get()) {
            Marked::new(address, request.bytes, self.allocations, &self.runtime.borders(address))
        } else {
            Marked::nowhere(address, self.allocations)
        };
        self.patterns.write(&*self.driver, &marked)?;
        self.live[slot as usize] = Some(marked);
        Ok(())
    }

    fn free(&mut self, slot: u32) -> anyhow::Result<()> {
        // In a repeated iteration something that an earlier one allocated is gone already.
        let Some(marked) = self.live[slot as usize].take() else { return Ok(()) };
        self.patterns.check(&*self.driver, &marked)?;
        self.runtime.free(marked.address, crate::ids::StreamId::DEFAULT)?;
        Ok(())
    }

    fn mark(&mut self) {
        self.runtime.mark_iteration();
        let calls = self.session.calls().memory_calls();
        self.calls.push(calls - self.calls_before);
        self.calls_before = calls;
    }

    /// One more iteration without patterns, timed as a whole: an allocation and its free.
    fn nanoseconds_per_allocation(&self, job: &Job) -> anyhow::Result<f64> {
        const PASSES: u32 = 3;
        let mut addresses: Vec<Option<DeviceAddress>> = vec![None; job.slots];
        let mut best = f64::INFINITY;
        for _ in 0..PASSES {
            let mut allocations = 0_u32;
            let started = self.clock.now();
            for step in job.last() {
                match step {
                    Step::Alloc { slot, request } => {
                        addresses[*slot as usize] = Some(self.runtime.alloc(request)?);
                        allocations += 1;
                    }
                    Step::Free { slot } => {
                        if let Some(address) = addresses[*slot as usize].take() {
                            self.runtime.free(address, crate::ids::StreamId::DEFAULT)?;
                        }
                    }
                    Step::Mark => self.runtime.mark_iteration(),
                }
            }
            let nanos = (self.clock.now() - started).as_nanos() as f64;
            best = best.min(nanos / f64::from(allocations.max(1)));
            for address in addresses.iter_mut().filter_map(Option::take) {
                self.runtime.free(address, crate::ids::StreamId::DEFAULT)?;
            }
        }
        Ok(best)
    }

    fn say_progress(&mut self) {
        const EVERY: u64 = 256;
        const PAUSE: Duration = Duration::from_millis(50);
        if !self.done.is_multiple_of(EVERY) || self.clock.now() < self.said + PAUSE {
            return;
        }
        self.said = self.clock.now();
        let stats = self.runtime.stats();
        let is_heard = say(&json!({
            "done": self.done.min(self.total),
            "total": self.total,
            "live_bytes": stats.live.get(),
            "leased_bytes": stats.held.get(),
        }));
        if !is_heard && self.ends_unheard {
            end();
        }
    }

    fn report(&self, ns_per_allocation: f64) {
        let stats = self.runtime.stats();
        say(&json!({
            "report": {
                "allocations": self.allocations,
                "peak_live_bytes": stats.peak_live.get(),
                "peak_leased_bytes": stats.peak_held.get(),
                "static_pool_bytes": stats.static_pool.get(),
                "patterns_checked": self.patterns.checked(),
                "served": {
                    "planned": stats.served.planned,
                    "reuse": stats.served.reuse,
                    "pool": stats.served.pool,
                },
                "served_bytes": {
                    "planned": stats.served.planned_bytes.get(),
                    "reuse": stats.served.reuse_bytes.get(),
                    "pool": stats.served.pool_bytes.get(),
                },
                "deviations": stats.planned.deviations(),
                "driver_calls_first_iteration": self.calls.first().copied().unwrap_or(0),
                "driver_calls_last_iteration": self.calls.last().copied().unwrap_or(0),
                "driver_calls_by_iteration": self.calls,
                "iterations": self.calls.len(),
                "ns_per_allocation": ns_per_allocation,
            }
        }));
    }
}

/// One line for whoever started this process. Says whether anybody can hear it.
fn say(line: &serde_json::Value) -> bool {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).is_ok()
}
