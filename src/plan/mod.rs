//! From a trace to a plan: addresses for every request that repeats, made ahead of time.
//!
//! `trace → problem → plan`: [`problem`] says which requests are planned and when each is live, [`phases`] in which computation phases, [`solve`] gives each an offset, [`validate`] checks
//! the result without knowing how it was found, [`mod@format`] writes and reads it. [`Fingerprint`] says whose it is.
//!
//! Not for: serving. A plan is a hint; the planned pool trusts nothing in it but its own checks.
//!
//! Invariant of a [`Plan`] that this module gives: no two entries that can be live together share a byte, entries of different lanes never
//! do, and every entry lies inside the pool, aligned.

mod detour;
pub mod directory;
mod expiry;
mod fingerprint;
pub mod format;
mod habits;
mod kinds;
mod lane;
mod lower_bound;
mod modules;
mod phases;
mod problem;
mod race;
mod reuse;
mod seen;
pub mod solve;
mod timeline;
pub mod validate;
mod vary;
mod watch;

pub use detour::{Detour, DetourRequest};
pub use expiry::{Expiries, NEVER};
pub use fingerprint::{Fingerprint, Job, Position};
pub use kinds::Kind;
pub use lane::{Lane, LanePlan};
use lower_bound::Changes;
pub use lower_bound::{lower_bound, lower_bound_as_asked};
pub(crate) use modules::DynamicModules;
pub use phases::PhasePair;
pub use problem::{Buffer, Problem};
pub use reuse::{ReuseSpaces, first_with_room, span_of};
use solve::Solution;
pub use watch::Watch;

use std::collections::BTreeMap;

use crate::ids::PlanId;
use crate::limits;
use crate::trace::{ContextKey, Cut, Trace};
use crate::units::{Bytes, Lifetime, PlanOffset, PlanSpan, Span};
use crate::work::Budget;

/// Addresses for the requests of a job: those of its first iteration once, then those of one later iteration again and again.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// Bytes that all entries together span: what is reserved for it.
    pub pool_len: Bytes,
    /// The entries in the order in which they are asked for.
    pub entries: Vec<Entry>,
    /// Entries before this one belong to the prologue and come once; the others come again in every iteration.
    pub cycle_start: usize,
    /// The requests that vary, in the order in which they are asked for.
    pub dynamic: Vec<DynamicEntry>,
    /// Those before this one belong to the prologue.
    pub dynamic_cycle_start: usize,
    /// What comes instead of a part of the cycle in iterations of another kind, in the order of the entries that do not come.
    pub detours: Vec<Detour>,
    /// Whose it is.
    pub job: Job,
    /// How it came to be.
    pub provenance: Provenance,
}

/// What stays where it is when a plan comes to a job that runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stays {
    /// What lives longer than an iteration has these offsets, in ascending order.
    pub taken: Vec<PlanSpan>,
    /// Entries that have these offsets already, by their numbers.
    pub fixed: BTreeMap<usize, PlanOffset>,
}

/// One planned request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Bytes as asked for.
    pub bytes: Bytes,
    /// Where it lies in the pool.
    pub offset: PlanOffset,
    /// Among whose requests it is.
    pub lane: Lane,
    /// From where in the job it is asked for.
    pub context: ContextKey,
    /// When it is live, in ticks of the plan's own time ([`Problem`]).
    pub lifetime: Lifetime,
    /// When it is live again, for what lives on into the next iteration.
    pub again: Option<Lifetime>,
}

/// A request whose size is known only when it comes: where it is expected, and for how long its bytes are needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DynamicEntry {
    /// It comes before the entry of this number, and behind the one before that.
    pub before: u32,
    /// Among whose requests it is.
    pub lane: Lane,
    /// From where in the job it is asked for.
    pub context: ContextKey,
    /// From the beginning of the layer that asks for it to the end of the layer that frees it, in the time of the plan (of a cycle: in its second pass); nothing where it lives
    /// on into another iteration.
    pub interval: Option<Lifetime>,
}

/// How a plan came to be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Provenance {
    /// The iteration that repeats.
    pub iteration: u32,
    /// The solver that found it.
    pub solver: String,
    /// Bytes below which no plan for these requests can go.
    pub lower_bound: Bytes,
    /// Requests of the iterations it was made from that vary and are not in it.
    pub dynamic_requests: u64,
    /// Work that went into it: buffers placed, over all tries, and units of the search. The same for the same problem on every machine.
    pub work_units: u64,
    /// Where the iteration that repeats was cut, if it was: it is planned as far as it goes.
    pub cut: Option<Cut>,
}

/// Why there is no plan.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlanError {
    /// The trace does not have this iteration.
    #[error("there is no iteration {wanted}; the trace has {iterations}, counted from 0")]
    NoIteration {
        /// As asked for.
        wanted: u32,
        /// How many there are.
        iterations: u32,
    },
    /// Nothing in the trace repeats.
    #[error("no request of the trace can be planned: all are marked as varying, or ask for nothing")]
    NothingStatic,
    /// More requests than a plan can have.
    #[error("{0} requests are more than a plan can have, {max}", max = limits::PLAN_ENTRIES_MAX)]
    TooManyRequests(usize),
    /// The requests together are larger than any machine.
    #[error("the requests together are larger than any machine")]
    TooLarge,
    /// A solver that searches was to find an answer alone, and did not.
    #[error(
        "the {solver} solver found no answer in {work_units} units of work; more of it may (--work), or another solver"
    )]
    NotFound {
        /// Which solver.
        solver: &'static str,
        /// What it did until then.
        work_units: u64,
    },
    /// The solver's answer did not pass the validator: a bug here, and the plan is not used.
    #[error("the {solver} solver gave a plan that is wrong")]
    Wrong {
        /// Which solver.
        solver: &'static str,
        /// What is wrong.
        #[source]
        source: validate::Wrong,
    },
}

impl Entry {
    /// The bytes of the pool that are its own while it is live: rounded to the unit of allocation.
    pub fn span(&self) -> PlanSpan {
        let len = limits::allocation_len(self.bytes)
            .expect("the size of an entry was checked when the plan was made or read");
        Span::new(self.offset, len).expect("the place of an entry was checked when the plan was made or read")
    }

    /// Every stretch of ticks in which it is live.
    pub fn lifetimes(&self) -> impl Iterator<Item = Lifetime> {
        [Some(self.lifetime), self.again].into_iter().flatten()
    }
}

impl Plan {
    /// Plans the job of `trace` from its first iteration and `iteration`, without looking at anything that comes later.
    pub fn from_trace(trace: &Trace, iteration: u32) -> Result<Plan, PlanError> {
        Plan::of(trace, &Problem::from_trace(trace, iteration)?, None)
    }

    /// The same with a search in proportion: what `stitchd plan` makes of a trace that is not cut.
    pub fn searched(trace: &Trace, iteration: u32) -> Result<Plan, PlanError> {
        let problem = Problem::from_trace(trace, iteration)?;
        Plan::of_solved(trace, &problem, Plan::solved(&problem, None, &solve::in_proportion(&problem))?)
    }

    /// A plan of the cycle alone, for a job that runs already: what it allocated once is there, and is no part of it.
    pub fn of_cycle(trace: &Trace, iteration: u32) -> Result<(Plan, Problem), PlanError> {
        let problem = Problem::from_trace(trace, iteration)?.without_prologue()?;
        Ok((Plan::of(trace, &problem, None)?, problem))
    }

    /// The same plan around what a job that runs has allocated already. `problem` is what the plan was
    /// made of.
    pub fn around(&self, problem: Problem, stays: &Stays) -> Result<Plan, PlanError> {
        let compact: Vec<PlanOffset> = self.entries.iter().map(|entry| entry.offset).collect();
        let solution = solve::around::solve(&problem, &compact, stays, &Budget::default())?;
        // What no problem says any more the plan does.
        let is_known = problem.kinds.is_empty() && !self.detours.is_empty();
        let detours = if is_known { detour::place_again(self, &solution, &stays.taken) } else { Vec::new() };
        Plan::placed(&Problem { taken: stays.taken.clone(), ..problem }, solution, self.job, detours)
    }

    /// The problem that the plan of a cycle solves, without its detours.
    pub fn problem(&self) -> Problem {
        Problem {
            dynamic: self.dynamic.clone(),
            dynamic_cycle_start: self.dynamic_cycle_start,
            iteration: self.provenance.iteration,
            cut: self.provenance.cut,
            ..Problem::of_plan(self, Vec::new())
        }
    }

    /// Plans a problem that was made of `trace`, by the best solver or by one alone.
    pub fn of(trace: &Trace, problem: &Problem, solver: Option<solve::Solver>) -> Result<Plan, PlanError> {
        Plan::of_solved(trace, problem, Plan::solved(problem, solver, &Budget::default())?)
    }

    /// The answer of the best solver or of one alone, with so much of a search.
    pub fn solved(problem: &Problem, solver: Option<solve::Solver>, budget: &Budget) -> Result<Solution, PlanError> {
        match solver {
            Some(solver) if budget.units == 0 => solve::solve_in(problem, solver),
            Some(solver) => solve::solve_in_with(problem, solver, budget),
            None => solve::solve_with(problem, budget),
        }
    }

    /// The plan that an answer makes.
    pub fn of_solved(trace: &Trace, problem: &Problem, solution: Solution) -> Result<Plan, PlanError> {
        let cut_first = problem.cut.filter(|cut| cut.iteration == 0).map(|cut| trace.before(&cut));
        let fingerprint = Fingerprint::of(cut_first.as_ref().unwrap_or(trace));
        Plan::placed(problem, solution, Job { fingerprint, position: None }, Vec::new())
    }

    /// The plan of its cycle alone, as [`Plan::of_cycle`] makes one of the trace. Detours are left out.
    pub fn without_prologue(&self) -> Result<Plan, PlanError> {
        let problem = self.problem().without_prologue()?;
        Plan::placed(&problem, solve::solve(&problem)?, self.job, Vec::new())
    }

    fn placed(problem: &Problem, solution: Solution, job: Job, detours: Vec<Detour>) -> Result<Plan, PlanError> {
        let around = detour::place(problem, &solution, detours);
        let placed = problem.buffers.iter().zip(&solution.offsets);
        let plan = Plan {
            pool_len: around.pool_len,
            entries: placed.map(|(buffer, offset)| buffer.placed_at(*offset)).collect(),
            cycle_start: problem.cycle_start,
            dynamic: problem.dynamic.clone(),
            dynamic_cycle_start: problem.dynamic_cycle_start,
            detours: around.detours,
            job,
            provenance: Provenance {
                iteration: problem.iteration,
                solver: solution.solver.to_owned(),
                lower_bound: solution.lower_bound.max(around.bound),
                dynamic_requests: problem.dynamic_requests,
                work_units: solution.work_units + around.work_units,
                cut: problem.cut,
            },
        };
        validate::check(&plan).map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
        Ok(plan)
    }

    /// The same plan with detours for iterations of these kinds, too: its entries stay where they are, and
    /// its pool may be longer. It lies around what is `taken`.
    ///
    /// # Errors
    ///
    /// [`PlanError::Wrong`], which is a bug here.
    pub fn with_kinds(&self, kinds: Vec<Kind>, taken: &[PlanSpan]) -> Result<Plan, PlanError> {
        let problem = Problem { taken: taken.to_vec(), ..Problem::of_plan(self, kinds) };
        let offsets = self.entries.iter().map(|entry| entry.offset).collect();
        let solution = Solution { offsets, peak: self.pool_len, solver: "", work_units: 0, lower_bound: Bytes::ZERO };
        let around = detour::place(&problem, &solution, self.detours.clone());
        let mut plan = Plan { pool_len: around.pool_len, detours: around.detours, ..self.clone() };
        plan.provenance.lower_bound = plan.provenance.lower_bound.max(around.bound);
        plan.provenance.work_units += around.work_units;
        validate::check(&plan).map_err(|source| PlanError::Wrong { solver: "detours", source })?;
        Ok(plan)
    }

    /// Bytes of the pool that its entries span; detours may lie behind them.
    pub fn cycle_span(&self) -> Bytes {
        let ends = self.entries.iter().map(|entry| Bytes::new(entry.span().end().get()));
        ends.max().unwrap_or_default()
    }

    /// Ticks from one pass of the cycle to the next; nothing where no entry comes again.
    pub fn cycle_len(&self) -> Option<u64> {
        let again = self.entries.iter().find_map(|entry| Some((entry.again?.start.0, entry.lifetime.start.0)));
        again.and_then(|(second, first)| second.checked_sub(first))
    }

    /// The entries that are live where one pass of the cycle ends and the next begins, and are freed in
    /// that.
    pub fn carried(&self) -> Vec<usize> {
        let ticks = |lifetime: Lifetime| lifetime.end.0 - lifetime.start.0;
        let is_carried = |entry: &Entry| entry.again.is_some_and(|again| ticks(again) != ticks(entry.lifetime));
        (0..self.entries.len()).filter(|at| is_carried(&self.entries[*at])).collect()
    }

    /// Requests on detours that have a place.
    pub fn detour_requests(&self) -> u64 {
        self.detours.iter().map(|detour| detour.spans().count() as u64).sum()
    }

    /// HomoLayer groups (STAlloc, equation 3): different stretches of time in which requests that vary are live.
    pub fn reuse_groups(&self) -> usize {
        let intervals = self.dynamic.iter().filter_map(|entry| Some((entry.lane, entry.interval?)));
        intervals.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// The name of this plan: the same contents have the same name.
    pub fn id(&self) -> PlanId {
        format::id(&format::write(self))
    }

    /// How far the pool is above the lower bound: 0 for none.
    pub fn gap(&self) -> f64 {
        let bound = self.provenance.lower_bound.get().max(1) as f64;
        self.pool_len.get() as f64 / bound - 1.0
    }
}

#[cfg(test)]
mod tests;
