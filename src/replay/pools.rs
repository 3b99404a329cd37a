//! The pools that a replay knows, by name, and how each is set up.

use std::collections::HashSet;

use super::allocator::Allocator;
use super::models::caching::{CachingAllocator, Conf, Version};
use super::models::gmlake::{Gmlake, GmlakeOptions};
use super::models::native::Native;
use super::models::stalloc::Stalloc;
use super::planning::AutoOptions;
use super::production::{Production, ProductionOptions};
use super::script::Script;
use super::{Run, Watch, run};
use crate::clock::Clock;
use crate::context::{self, Pushed};
use crate::driver::cost_table::CostTable;
use crate::ladder::Ladder;
use crate::plan::{Plan, PlanError};
use crate::runtime::RuntimeConfig;
use crate::trace::{Context, Trace};
use crate::units::Bytes;

/// A pool, or a model of somebody's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolName {
    /// cudaMalloc for every request.
    Native,
    /// PyTorch's caching allocator.
    Caching,
    /// The same with expandable segments.
    Expandable,
    /// GMLake as published.
    Gmlake,
    /// STAlloc as published.
    Stalloc,
    /// The production pools of this project, as flags set them.
    Stitchd,
    /// The same with plans that are made while the job runs.
    StitchdAuto,
    /// The same with a plan from before the job.
    StitchdPlan,
}

impl PoolName {
    /// Every pool with its name.
    pub const ALL: [(&'static str, PoolName); 8] = [
        ("native", PoolName::Native),
        ("caching", PoolName::Caching),
        ("expandable", PoolName::Expandable),
        ("gmlake", PoolName::Gmlake),
        ("stalloc", PoolName::Stalloc),
        ("stitchd", PoolName::Stitchd),
        ("stitchd-auto", PoolName::StitchdAuto),
        ("stitchd-plan", PoolName::StitchdPlan),
    ];

    /// The production pools, by how they are planned.
    pub const OURS: [PoolName; 3] = [PoolName::Stitchd, PoolName::StitchdAuto, PoolName::StitchdPlan];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        PoolName::ALL.into_iter().find(|(_, pool)| *pool == self).map_or("", |(name, _)| name)
    }
}

/// How pools are set up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Bytes that the device has for this process, or any number.
    pub capacity: Option<Bytes>,
    /// What driver calls cost.
    pub costs: CostTable,
    /// PyTorch's options.
    pub conf: Conf,
    /// GMLake's knobs.
    pub gmlake: GmlakeOptions,
    /// The iteration that `stalloc` plans from, beside the first.
    pub planned_iteration: Option<u32>,
    /// Sizes of chunk of the production pools.
    pub ladder: Ladder,
    /// How the production runtime behaves.
    pub runtime: RuntimeConfig,
    /// [`PoolName::Stitchd`] makes its plans while the job runs, as [`PoolName::StitchdAuto`] does.
    pub is_auto: bool,
    /// How such plans come.
    pub auto: AutoOptions,
}

impl Default for Setup {
    /// A device without a limit and with the costs of an A100, PyTorch's newest version, and no
    /// plans while the job runs.
    fn default() -> Setup {
        Setup {
            capacity: None,
            costs: CostTable::A100,
            conf: Conf::of(Version::NEWEST),
            gmlake: GmlakeOptions::default(),
            planned_iteration: None,
            ladder: Ladder::standard(),
            runtime: RuntimeConfig::default(),
            is_auto: false,
            auto: AutoOptions::default(),
        }
    }
}

/// What is replayed.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The events.
    pub trace: &'a Trace,
    /// The job before anything in it was repeated or disturbed: what plans are made from.
    pub profile: &'a Trace,
    /// The same as `trace`, ready to run.
    pub script: &'a Script,
    /// The plan that the production pools serve from, but for [`PoolName::StitchdAuto`].
    pub plan: Option<&'a Plan>,
    /// The plan that an earlier run has left, where plans are made while the job runs ([`left_plan`]).
    pub left: Option<&'a Plan>,
}

/// A pool's run, and what there is to say beside.
#[derive(Clone, Debug, Default)]
pub struct PoolRun {
    /// What came of it.
    pub run: Run,
    /// Why something that was asked for was not done; a sentence.
    pub note: Option<String>,
}

/// How a job runs, whichever pool serves it.
struct Runner<'a> {
    script: &'a Script,
    watch: Watch,
    clock: &'a dyn Clock,
    progress: &'a dyn Fn(usize),
}

impl Runner<'_> {
    fn run(&self, allocator: &mut impl Allocator) -> Run {
        run(self.script, allocator, self.watch, self.clock, self.progress)
    }

    fn through(&self, mut allocator: impl Allocator) -> PoolRun {
        PoolRun { run: self.run(&mut allocator), note: None }
    }
}

impl Setup {
    /// Whether a pool makes its plans while the job runs.
    pub fn makes_plans(&self, pool: PoolName) -> bool {
        pool == PoolName::StitchdAuto || pool == PoolName::Stitchd && self.is_auto
    }

    fn production(&self, is_auto: bool) -> ProductionOptions {
        ProductionOptions {
            capacity: self.capacity.unwrap_or(ProductionOptions::UNLIMITED),
            ladder: self.ladder.clone(),
            runtime: self.runtime,
            costs: self.costs.clone(),
            auto: is_auto.then_some(self.auto),
        }
    }

    /// The iteration that the pool `stalloc` is planned from: the second, if there is one.
    pub fn stalloc_iteration(&self, profile: &Trace) -> u32 {
        self.planned_iteration.unwrap_or_else(|| u32::from(profile.iterations() > 1))
    }
}

/// Runs a job through one pool.
pub fn replay(
    pool: PoolName,
    job: Job<'_>,
    setup: &Setup,
    watch: Watch,
    clock: &dyn Clock,
    progress: &dyn Fn(usize),
) -> Result<PoolRun, PlanError> {
    let runner = Runner { script: job.script, watch, clock, progress };
    let Setup { capacity, costs, .. } = setup;
    Ok(match pool {
        PoolName::Native => runner.through(Native::new(*capacity, costs)),
        PoolName::Caching | PoolName::Expandable => {
            let mut conf = setup.conf.clone();
            conf.expandable_segments = pool == PoolName::Expandable;
            runner.through(CachingAllocator::new(conf, *capacity, costs))
        }
        PoolName::Gmlake => runner.through(Gmlake::new(setup.gmlake, *capacity, costs)),
        PoolName::Stalloc => {
            let iteration = setup.stalloc_iteration(job.profile);
            runner.through(Stalloc::new(job.profile, iteration, *capacity, costs)?)
        }
        PoolName::Stitchd | PoolName::StitchdAuto | PoolName::StitchdPlan => production(pool, job, setup, &runner),
    })
}

/// Runs a job through the production pools.
fn production(pool: PoolName, job: Job<'_>, setup: &Setup, runner: &Runner<'_>) -> PoolRun {
    let is_auto = setup.makes_plans(pool);
    if is_auto {
        make_contexts_known(job.trace);
    }
    let plan = if is_auto { job.left } else { job.plan };
    let (mut production, refused) = Production::new(&setup.production(is_auto), plan);
    let run = runner.run(&mut production);
    let refused = refused.map(|why| format!("the plan is not used: {why}"));
    let over = production.auto_is_over().map(|why| format!("no more plans are made while the job runs: {why}"));
    PoolRun { run, note: refused.or(over) }
}

/// The plan that a run of the job leaves to later ones, where plans are made while it runs: on a device
/// without a limit, so that it is the same for later runs on any.
pub fn left_plan(job: Job<'_>, setup: &Setup, clock: &dyn Clock) -> Option<Plan> {
    make_contexts_known(job.trace);
    let unlimited = Setup { capacity: None, ..setup.clone() };
    let (mut first, _) = Production::new(&unlimited.production(true), None);
    run(job.script, &mut first, Watch::default(), clock, &|_| ());
    first.kept_plan()
}

/// A job in a process of its own has pushed the contexts that it allocates from; what records it finds their words so.
fn make_contexts_known(trace: &Trace) {
    let contexts: HashSet<_> = trace.events.iter().map(|event| event.context).collect();
    for Context { phase, microbatch, chunk, module } in contexts {
        let module = trace.modules.get(module as usize).map_or("", String::as_str);
        if context::push(&Pushed { phase, microbatch, chunk, module, is_dynamic: false }).is_ok() {
            context::pop().expect("it was just pushed");
        }
    }
}

/// The least that a pool needs, and what it does then.
#[derive(Clone, Debug)]
pub struct Least {
    /// Of the device.
    pub capacity: Bytes,
    /// The job with no more than that.
    pub done: PoolRun,
}

/// The smallest capacity with which the job runs to its end, and also at each of the next eight steps of 2 MiB: more memory does not always help an allocator. `unlimited` is the
/// job without a limit; nothing where even then memory runs out. `progress` hears of each capacity that is tried.
pub fn min_capacity(
    pool: PoolName,
    job: Job<'_>,
    setup: &Setup,
    unlimited: &Run,
    clock: &dyn Clock,
    progress: &dyn Fn(Bytes),
) -> Result<Option<Least>, PlanError> {
    const STEP: u64 = 2 << 20;
    const STEPS: u64 = 8;
    /// Of a device that nobody will ever have.
    const MOST: u64 = (1 << 62) / STEP;
    let run = |steps: u64| -> Result<PoolRun, PlanError> {
        let capacity = Bytes::new(steps * STEP);
        progress(capacity);
        let setup = Setup { capacity: Some(capacity), ..setup.clone() };
        replay(pool, job, &setup, Watch::default(), clock, &|_| ())
    };
    let fits = |steps: u64| -> Result<bool, PlanError> { Ok(run(steps)?.run.out_of_memory.is_none()) };
    if unlimited.out_of_memory.is_some() {
        return Ok(None);
    }
    // Nothing below what is live can do, and what was reserved without a limit mostly does; where it does not, look further up.
    let mut low = job.script.peak_live.get().saturating_sub(1) / STEP;
    let mut high = unlimited.peak_reserved.get().div_ceil(STEP).max(low + 1);
    while !fits(high)? {
        (low, high) = (high, high + high / 8 + 1);
        // An option may keep a pool from ever having enough.
        if high > MOST {
            return Ok(None);
        }
    }
    loop {
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle)? {
                high = middle;
            } else {
                low = middle;
            }
        }
        // The last of the steps above that fails is what the answer must be above of.
        let mut failed = None;
        for above in 1..=STEPS {
            if !fits(high + above)? {
                failed = Some(high + above);
            }
        }
        let Some(failed) = failed else {
            return Ok(Some(Least { capacity: Bytes::new(high * STEP), done: run(high)? }));
        };
        low = failed;
        high = failed + 1;
        while !fits(high)? {
            (low, high) = (high, high + 1);
        }
    }
}
