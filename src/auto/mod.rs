//! Plans without a profiling run: the first iterations are recorded while the page pool serves them, a
//! plan is made of one of them, and the runtime takes it where an iteration begins.
//!
//! ```text
//!  recording ─────► planning ─────► offered ─────► following ─────► recording …
//!   two whole        whoever         the runtime     deviations stay
//!   iterations       looks           installs it     above a limit
//! ```
//!
//! An iteration that does something else than the plan may be of another kind, as with an evaluation before the step. From the first on the job is recorded again until one has come twice: then the plan gets detours for it
//! ([`Watch`]), and is offered again.
//!
//! An [`AutoPlanner`] does nothing by itself: somebody looks after it now and then, a thread of its own in a training process ([`crate::session::auto`]), the loop of a replay. Planning happens in that
//! look. The job pays for what a [`crate::record::Tap`] takes while it is recorded, and for mapping memory when the plan comes.
//!
//! Not for: deciding whether there is memory for a plan, which the runtime does ([`Runtime::offer`]).
//!
//! Invariant: whatever goes wrong, the job is served as it was before.

mod deviations;
mod in_place;
mod over;
mod recorded;

use crate::error::chain;
use crate::limits;
use crate::plan::{Fingerprint, Plan, PlanError, Watch};
use crate::runtime::{Counter, Runtime};
use crate::units::Bytes;
use deviations::Deviations;
use in_place::{InPlace, Living};
pub use over::Over;
use recorded::{Ended, Recorded};

/// Where plans of earlier runs of a job are, and where those of this one go.
pub trait Shelf {
    /// A plan for the job that does this first.
    fn find(&self, job: Fingerprint) -> Option<Plan>;

    /// Keeps a plan for the next run.
    fn keep(&self, plan: &Plan);
}

/// There is none, and nothing is kept.
#[derive(Clone, Copy, Debug)]
pub struct NoShelf;

impl Shelf for NoShelf {
    fn find(&self, _: Fingerprint) -> Option<Plan> {
        None
    }

    fn keep(&self, _: &Plan) {}
}

/// Makes plans for one runtime.
#[derive(Debug)]
pub struct AutoPlanner {
    stage: Stage,
    /// A recording has room for so many.
    events_max: usize,
    /// Plans made so far, and those among them that are others with more kinds of iterations.
    made: u32,
    extended: u32,
    /// Recordings in a row that lacked events, and recordings whose iterations had little in common.
    torn: u32,
    unlike: u32,
    /// Times that kinds of iterations may yet be looked for.
    watches_left: u32,
    /// Bytes that are live where an iteration begins, as far as is known.
    begins_at: Bytes,
    /// The last plan is of what repeats, and not of what is marked.
    is_unmarked: bool,
    /// What the job did first, once that is known.
    fingerprint: Option<Fingerprint>,
    /// The recording of a job without marks goes on beside its plan: once a mark comes the plan was of
    /// a part of an iteration, and this has the iteration from its beginning.
    unmarked: Option<Box<Recorded>>,
    /// Runs long work.
    run: Run,
}

/// Runs some work and returns when it is done.
pub type Run = fn(&mut (dyn FnMut() + Send));

#[derive(Debug)]
enum Stage {
    Recording(Box<Recorded>),
    Offered(Box<Offered>),
    Following(Box<Following>),
    Over(Over),
}

impl Stage {
    /// Ends the recordings of a stage that is left.
    fn end(self, runtime: &Runtime) {
        let recorded = match self {
            Stage::Recording(recorded) => Some(*recorded),
            Stage::Following(following) => following.watching.map(|watching| watching.recorded),
            Stage::Offered(_) | Stage::Over(_) => None,
        };
        recorded.into_iter().for_each(|recorded| recorded.stop(runtime));
    }
}

/// The job goes by a plan.
#[derive(Debug)]
struct Following {
    plan: InPlace,
    deviations: Deviations,
    watching: Option<Watching>,
    /// Looks in which chunks of which the plan needs a part may be exchanged: they have to be idle then.
    exchanges_left: u32,
}

/// Iterations of other kinds are looked for.
#[derive(Debug)]
struct Watching {
    recorded: Recorded,
    watch: Watch,
    iterations: usize,
}

/// A plan that the runtime has been offered.
#[derive(Debug)]
struct Offered {
    plan: InPlace,
    /// The one that the job goes by, if this has the same entries.
    before: Option<InPlace>,
    /// It is of an earlier run, or of whoever begins alike.
    is_known: bool,
    installed_before: u64,
    tries: u32,
    looks: u32,
}

/// A recording that lacks events is begun again so often.
const TORN_MAX: u32 = 4;
/// So many iterations of a job may differ from the one before until none is planned.
const UNLIKE_MAX: u32 = 6;
/// A plan is of no use where dynamic requests have more than so many hundredths of the peak: they are
/// served beside it. The traces with experts have at most 64 (moe-top2).
const DYNAMIC_PERCENT_MAX: u64 = 75;
/// Kinds of iterations are looked for so often, in so many iterations each time: an evaluation in every thousand has come twice by then.
const WATCHES_MAX: u32 = 8;
const WATCHED_MAX: usize = 4096;
/// A plan for which there was no memory is offered so often: a later iteration may begin with less in use.
const TRIES_MAX: u32 = 3;
/// Where nobody marks iterations an offer waits for so many looks, a minute of a training process.
const LOOKS_MAX: u32 = 600;
/// Looks after a plan was installed in which chunks of which it needs a part are exchanged.
const EXCHANGES_MAX: u32 = 32;
/// So much of what is idle once a plan is there is given back at a time: the job may want the lock in between.
const GIVEN_BACK: Bytes = Bytes::mib(64);

/// Gives back what is idle, down to what was live at one time: iterations that do something else than the
/// plan may need that again.
fn give_back_idle(runtime: &Runtime) {
    let counters = runtime.counters();
    let spare = || counters.get(Counter::HeldBytes).saturating_sub(counters.get(Counter::PeakLiveBytes));
    let most = spare() / GIVEN_BACK.get() + 1;
    for _ in 0..most {
        let wanted = GIVEN_BACK.min(Bytes::new(spare()));
        if wanted.is_zero() || runtime.trim(wanted) == Bytes::ZERO {
            return;
        }
    }
}

impl AutoPlanner {
    /// Begins to record what `runtime` does, which has done nothing yet.
    pub fn begin(runtime: &Runtime) -> AutoPlanner {
        AutoPlanner::with_room(runtime, limits::AUTO_EVENTS_MAX)
    }

    /// The same with room for so many events.
    fn with_room(runtime: &Runtime, events_max: usize) -> AutoPlanner {
        let stage = Stage::Recording(Box::new(Recorded::begin(runtime, false, events_max)));
        AutoPlanner {
            stage,
            events_max,
            made: 0,
            extended: 0,
            torn: 0,
            unlike: 0,
            watches_left: WATCHES_MAX,
            begins_at: Bytes::ZERO,
            is_unmarked: false,
            fingerprint: None,
            unmarked: None,
            run: |work| work(),
        }
    }

    /// The same, which has `run` run what takes long, once: making a plan, and laying it into the job.
    #[must_use]
    pub fn with_run(self, run: Run) -> AutoPlanner {
        AutoPlanner { run, ..self }
    }

    fn work<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let (mut work, mut done) = (Some(work), None);
        (self.run)(&mut || done = work.take().map(|work| work()));
        done.expect("it was run")
    }

    fn record(&self, runtime: &Runtime, is_later: bool) -> Stage {
        Stage::Recording(Box::new(Recorded::begin(runtime, is_later, self.events_max)))
    }

    /// Goes on as far as it can. To be called many times a second while it [is recording](AutoPlanner::is_recording), and some times a second after that.
    pub fn look(&mut self, runtime: &Runtime, shelf: &impl Shelf) {
        let stage = std::mem::replace(&mut self.stage, Stage::Over(Over::TooFast));
        self.stage = self.go_on(stage, runtime, shelf).unwrap_or_else(|over| {
            tracing::debug!(why = %chain(&over), "no more plans are made for this job");
            Stage::Over(over)
        });
    }

    fn go_on(&mut self, stage: Stage, runtime: &Runtime, shelf: &impl Shelf) -> Result<Stage, Over> {
        if let Some(mut recorded) = self.unmarked.take() {
            if runtime.counters().get(Counter::Iterations) > 0 {
                runtime.offer(None);
                stage.end(runtime);
                return Ok(Stage::Recording(recorded));
            }
            if recorded.keep_up() {
                self.unmarked = Some(recorded);
            } else {
                recorded.stop(runtime);
            }
        }
        Ok(match stage {
            Stage::Recording(mut recorded) => {
                let ended = recorded.look();
                if let Some(known) = self.find(&recorded, shelf) {
                    return self.offer_known(known, *recorded, runtime);
                }
                match ended {
                    None => Stage::Recording(recorded),
                    Some(ended) => self.plan(recorded, ended, runtime, shelf)?,
                }
            }
            Stage::Offered(offered) => self.wait(offered, runtime)?,
            Stage::Following(following) => self.follow(following, runtime, shelf)?,
            Stage::Over(over) => Stage::Over(over),
        })
    }

    fn follow(&mut self, mut following: Box<Following>, runtime: &Runtime, shelf: &impl Shelf) -> Result<Stage, Over> {
        if following.exchanges_left > 0 {
            following.exchanges_left -= 1;
            runtime.exchange_partly_needed();
        }
        let deviations = &mut following.deviations;
        // Whoever marks iterations knows better what they are.
        let has_marks = self.is_unmarked && runtime.counters().get(Counter::Iterations) > 0;
        let is_lost = deviations.look(runtime) || has_marks;
        let is_surprised = deviations.has_surprise(runtime);
        if runtime.plan().is_none() {
            // The runtime has ended it: the job took more memory with it than without.
            Stage::Following(following).end(runtime);
            self.unmarked.take().into_iter().for_each(|recorded| recorded.stop(runtime));
            return Err(Over::NoMemory);
        }
        if is_lost {
            Stage::Following(following).end(runtime);
            self.unmarked.take().into_iter().for_each(|recorded| recorded.stop(runtime));
            // How it was before says nothing of how it is now.
            self.unlike = 0;
            return Ok(self.record(runtime, true));
        }
        if let Some(watching) = following.watching.take() {
            return Ok(self.watch(watching, following, runtime, shelf));
        }
        if is_surprised && self.watches_left > 0 {
            self.watches_left -= 1;
            let recorded = Recorded::begin(runtime, true, self.events_max);
            following.watching = Some(Watching { recorded, watch: Watch::of(&following.plan.kept), iterations: 0 });
        }
        Ok(Stage::Following(following))
    }

    /// Looks at the iterations that have ended, and offers the plan with the kinds that came twice.
    fn watch(
        &mut self,
        mut watching: Watching,
        mut following: Box<Following>,
        runtime: &Runtime,
        shelf: &impl Shelf,
    ) -> Stage {
        let (ended, goes_on) = watching.recorded.ended();
        watching.iterations += ended.len();
        let found = ended.iter().map(|one| watching.watch.look(one)).find(|kinds| !kinds.is_empty());
        if found.is_none() && goes_on && watching.iterations < WATCHED_MAX {
            following.watching = Some(watching);
            return Stage::Following(following);
        }
        watching.recorded.stop(runtime);
        let Some(Ok(plan)) = found.map(|kinds| self.work(|| following.plan.with_kinds(kinds))) else {
            return Stage::Following(following);
        };
        (self.made, self.extended) = (self.made + 1, self.extended + 1);
        if self.fingerprint.is_some() {
            shelf.keep(&plan.kept);
        }
        let before = following.plan.clone();
        self.offer_first(Some(before), plan, false, runtime).unwrap_or(Stage::Following(following))
    }

    /// The plan of an earlier run of this job, looked for once: when its first iteration is over.
    fn find(&mut self, recorded: &Recorded, shelf: &impl Shelf) -> Option<Plan> {
        if self.fingerprint.is_some() || !recorded.has_first_iteration() {
            return None;
        }
        let fingerprint = Fingerprint::of(recorded.trace());
        self.fingerprint = Some(fingerprint);
        // What such a job allocates once is there already, and a plan that has it would take the memory a second time.
        let plan = shelf.find(fingerprint)?;
        let plan = if plan.cycle_start == 0 { Ok(plan) } else { plan.without_prologue() };
        plan.inspect_err(|error| tracing::debug!(error = %chain(error), "a plan for this job has no cycle")).ok()
    }

    fn offer_known(&mut self, plan: Plan, recorded: Recorded, runtime: &Runtime) -> Result<Stage, Over> {
        let (living, trace) = Living::of_known(&plan, recorded, runtime);
        self.begins_at = recorded::live_before(&trace, 1);
        let problem = plan.problem();
        let Ok(plan) = self.work(|| InPlace::around(plan, problem, &living, runtime)) else {
            return Ok(self.record(runtime, true));
        };
        // One that cannot be served from is no reason to do without.
        Ok(self.offer_first(None, plan, true, runtime).unwrap_or_else(|_| self.record(runtime, true)))
    }

    fn offer_first(
        &self,
        before: Option<InPlace>,
        plan: InPlace,
        is_known: bool,
        runtime: &Runtime,
    ) -> Result<Stage, Over> {
        let installed_before = runtime.counters().get(Counter::PlansInstalled);
        self.offer(Box::new(Offered { plan, before, is_known, installed_before, tries: 0, looks: 0 }), runtime)
    }

    /// The recording is a whole, or never will be: makes a plan of it and offers that.
    fn plan(
        &mut self,
        mut recorded: Box<Recorded>,
        ended: Ended,
        runtime: &Runtime,
        shelf: &impl Shelf,
    ) -> Result<Stage, Over> {
        let is_unmarked = matches!(ended, Ended::Repeats(_));
        self.is_unmarked = is_unmarked;
        if matches!(ended, Ended::Marked) {
            self.unlike += self.work(|| recorded.compare());
            if recorded.alike() < self.unlike.div_ceil(2).max(1) {
                return self.record_more(recorded, Over::Unlike, runtime);
            }
        }
        let alive = recorded.alive(runtime);
        let (trace, iteration, live) = match ended {
            Ended::Marked => recorded.last_alike(),
            Ended::Repeats(period) => {
                let (trace, iteration) = recorded::repeating(recorded.trace().clone(), &period);
                let live = recorded.live_before(&trace, iteration);
                (trace, iteration, live)
            }
            Ended::NoPeriod => {
                recorded.stop(runtime);
                return Err(Over::NoPeriod(recorded.trace().events.len()));
            }
            Ended::Torn => {
                recorded.stop(runtime);
                self.torn += 1;
                return if self.torn > TORN_MAX { Err(Over::TooFast) } else { Ok(self.record(runtime, true)) };
            }
        };
        self.torn = 0;
        if is_unmarked && !recorded::repeats(&trace, iteration) {
            self.unlike += 2;
            return self.record_more(recorded, Over::Unlike, runtime);
        }
        let living = Living::of(&alive, &trace, iteration);
        let (mut plan, problem) = match self.work(|| Plan::of_cycle(&trace, iteration)) {
            Ok((_, problem)) if problem.dynamic_percent > DYNAMIC_PERCENT_MAX => {
                self.unlike += 2;
                return self.record_more(recorded, Over::Dynamic, runtime);
            }
            // Of two iterations that have little in common the later may be like those that follow.
            Ok((plan, problem)) if problem.irregular_requests <= plan.entries.len() as u64 => (plan, problem),
            Ok(_) | Err(PlanError::NothingStatic) if self.unlike < UNLIKE_MAX => {
                self.unlike += 2;
                return self.record_more(recorded, Over::Unlike, runtime);
            }
            other => other.inspect_err(|_| recorded.stop(runtime))?,
        };
        if is_unmarked {
            self.unmarked = Some(recorded);
        } else {
            recorded.stop(runtime);
        }
        self.made += 1;
        if let Some(fingerprint) = self.fingerprint {
            plan.job.fingerprint = fingerprint;
            shelf.keep(&plan);
        }
        self.begins_at = live;
        let placed = self.work(|| InPlace::around(plan, problem, &living, runtime))?;
        self.offer_first(None, placed, false, runtime)
    }

    /// Two iterations differ, or have too little in common: the next may be like the last. Where several did,
    /// half as many in a row have to be alike: two of a job whose lengths change may be so by chance.
    fn record_more(&mut self, mut recorded: Box<Recorded>, over: Over, runtime: &Runtime) -> Result<Stage, Over> {
        let may_go_on = self.unlike <= UNLIKE_MAX;
        if may_go_on && !self.is_unmarked && recorded.go_on(self.events_max) {
            return Ok(Stage::Recording(recorded));
        }
        recorded.stop(runtime);
        if may_go_on { Ok(self.record(runtime, true)) } else { Err(over) }
    }

    fn offer(&self, mut offered: Box<Offered>, runtime: &Runtime) -> Result<Stage, Over> {
        let mut offer = self.work(|| runtime.prepare(&offered.plan.placed, self.begins_at))?;
        if offered.is_known {
            offer = offer.expecting(offered.plan.adds());
        }
        runtime.offer(Some(offer));
        offered.tries += 1;
        Ok(Stage::Offered(offered))
    }

    /// The runtime has taken the plan, or has no memory for it, or waits for an iteration to begin.
    fn wait(&mut self, mut offered: Box<Offered>, runtime: &Runtime) -> Result<Stage, Over> {
        if runtime.has_offer() {
            offered.looks += 1;
            if self.is_unmarked && offered.looks > LOOKS_MAX {
                runtime.offer(None);
                return Err(Over::NoMoment);
            }
            return Ok(Stage::Offered(offered));
        }
        if runtime.counters().get(Counter::PlansInstalled) > offered.installed_before {
            // What varies needs what is idle now at another time.
            if offered.plan.kept.dynamic.is_empty() {
                give_back_idle(runtime);
                runtime.exchange_partly_needed();
            }
            return Ok(self.going_by(offered.plan, runtime));
        }
        let (before, is_known) = (offered.before.clone(), offered.is_known);
        let is_given_up = offered.tries == TRIES_MAX;
        let offered = if is_given_up { Err(Over::NoMemory) } else { self.offer(offered, runtime) };
        offered.or_else(|over| {
            // What another run left is too large for this one: it makes its own.
            if is_known {
                return Ok(self.record(runtime, true));
            }
            // With the plan that is there the job goes on as it did.
            self.watches_left = 0;
            before.map(|plan| self.going_by(plan, runtime)).ok_or(over)
        })
    }

    fn going_by(&self, plan: InPlace, runtime: &Runtime) -> Stage {
        let deviations = Deviations::from_now(runtime, self.made - self.extended, plan.kept.entries.len());
        // What varies needs what is idle now at another time.
        let exchanges_left = if plan.kept.dynamic.is_empty() { EXCHANGES_MAX } else { 0 };
        Stage::Following(Box::new(Following { plan, deviations, watching: None, exchanges_left }))
    }

    /// The job is being recorded: the recording is short of room if nobody looks.
    pub fn is_recording(&self) -> bool {
        let is_unmarked = self.unmarked.is_some();
        is_unmarked
            || match &self.stage {
                Stage::Recording(_) => true,
                Stage::Following(following) => following.watching.is_some(),
                Stage::Offered(_) | Stage::Over(_) => false,
            }
    }

    /// Why no more plans are made, if none are.
    pub fn over(&self) -> Option<&Over> {
        match &self.stage {
            Stage::Over(over) => Some(over),
            _ => None,
        }
    }

    /// Plans made so far.
    pub fn made(&self) -> u32 {
        self.made
    }
}

#[cfg(test)]
mod tests;
