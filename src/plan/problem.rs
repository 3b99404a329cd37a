//! Which requests of a trace are planned, and when each is live.
//!
//! ## Time
//!
//! A job asks once for what its first iteration needs (the *prologue*) and then, iteration after iteration, for the same things again (the
//! *cycle*). An address that works in every pass works for ever, so the time of a problem is
//!
//! ```text
//!   | prologue (iteration 0) | cycle, first pass | cycle, a later pass |
//!   0                        P                   P+C                   P+2C
//! ```
//!
//! with one tick per event of the trace. What the prologue leaves live reaches into the first pass, or to the end when it is never freed. A
//! request of the cycle is live at the same place in both passes; one that is freed only in the next iteration (a gradient, say) is live
//! from its place in the first pass into the second, and from its place in the second to the end. Later passes look like the
//! second, so nothing is gained by drawing them.

use super::kinds::Kind;
use super::phases::{PhasePair, Phases};
use super::seen::Allocation;
use super::timeline::Timeline;
use super::{DynamicEntry, Entry, Lane, Plan, PlanError};
#[cfg(feature = "daemon")]
use crate::ids::StreamId;
#[cfg(feature = "daemon")]
use crate::lifetimes::Change;
use crate::limits;
#[cfg(feature = "daemon")]
use crate::trace::import::Rows;
use crate::trace::{ContextKey, Cut, Trace};
use crate::units::{Bytes, Lifetime, PlanOffset, PlanSpan, Tick};

/// Requests with their lifetimes, to be given addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Problem {
    /// In the order in which they are asked for.
    pub buffers: Vec<Buffer>,
    /// Buffers before this one belong to the prologue.
    pub cycle_start: usize,
    /// Requests that vary, in the order in which they are asked for, with the buffer that each comes before.
    pub dynamic: Vec<DynamicEntry>,
    /// Those before this one belong to the prologue.
    pub dynamic_cycle_start: usize,
    /// Requests that vary and were left out.
    pub dynamic_requests: u64,
    /// Dynamic requests of the cycle whose modules are not dynamic: as many as can be of iterations that
    /// have little in common.
    pub irregular_requests: u64,
    /// The share of dynamic requests at the peak of the planned iteration's requests, in hundredths.
    pub dynamic_percent: u64,
    /// The iteration that repeats.
    pub iteration: u32,
    /// Where that is cut.
    pub cut: Option<Cut>,
    /// Where its first pass ends: what lives on is there when another begins.
    pub pass_end: Tick,
    /// Iterations before it that do something else.
    pub kinds: Vec<Kind>,
    /// Offsets that are not to be had, in ascending order: of what the job has allocated already.
    pub taken: Vec<PlanSpan>,
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// Bytes as asked for.
    pub bytes: Bytes,
    /// Bytes that it occupies.
    pub len: Bytes,
    /// Among whose requests it is.
    pub lane: Lane,
    /// From where in the job it is asked for.
    pub context: ContextKey,
    /// When it is live.
    pub lifetime: Lifetime,
    /// When it is live again.
    pub again: Option<Lifetime>,
    /// In which computation phases it comes and goes.
    pub phases: PhasePair,
}

impl Buffer {
    /// Every stretch of ticks in which it is live.
    pub fn lifetimes(&self) -> impl Iterator<Item = Lifetime> {
        [Some(self.lifetime), self.again].into_iter().flatten()
    }

    pub(super) fn placed_at(&self, offset: PlanOffset) -> Entry {
        let Buffer { bytes, lane, context, lifetime, again, .. } = *self;
        Entry { bytes, offset, lane, context, lifetime, again }
    }
}

impl Problem {
    /// The requests of the first iteration and of `iteration`, from what the trace says up to the end of `iteration`: what comes later is
    /// not known when a job is planned.
    ///
    /// A request of the cycle that is still live then is taken to be freed where the same request of the iteration before was freed; if that
    /// is not known either, it is left out, as a varying one.
    pub fn from_trace(trace: &Trace, iteration: u32) -> Result<Problem, PlanError> {
        Problem::of(trace, iteration, None)
    }

    /// The requests of the first iteration and of one that is cut, as far as it goes. What lives at the cut, and nobody knows how long it would have, lives on.
    pub fn from_cut(trace: &Trace, cut: Cut) -> Result<Problem, PlanError> {
        Problem::of(&trace.before(&cut), cut.iteration, Some(cut))
    }

    /// A problem of placement as it is: sizes to the byte, and nothing that repeats. Of each buffer the row that it is, as what has no bytes is none.
    #[cfg(feature = "daemon")]
    pub fn from_rows(rows: &Rows) -> Result<(Problem, Vec<u32>), PlanError> {
        let all = rows.buffers();
        let asked = all.iter().try_fold(Bytes::ZERO, |sum, row| sum.checked_add(row.bytes));
        asked.ok_or(PlanError::TooLarge)?;
        let changes = rows.changes();
        let mut ends = vec![0; all.len()];
        changes
            .iter()
            .zip(0..)
            .filter(|(change, _)| !change.comes)
            .for_each(|(change, at)| ends[change.of as usize] = at);
        let is_placed = |change: &Change| change.comes && !all[change.of as usize].bytes.is_zero();
        let (buffers, rows): (Vec<Buffer>, Vec<u32>) = changes
            .iter()
            .zip(0..)
            .filter(|(change, _)| is_placed(change))
            .map(|(Change { of, .. }, at)| {
                let (bytes, lifetime) = (all[*of as usize].bytes, Lifetime::new(at, ends[*of as usize]));
                let (lane, context) = (Lane::on(StreamId(0)), ContextKey::UNKNOWN);
                (Buffer { bytes, len: bytes, lane, context, lifetime, again: None, phases: PhasePair::default() }, *of)
            })
            .unzip();
        match buffers.len() {
            0 => Err(PlanError::NothingStatic),
            count if count > limits::PLAN_ENTRIES_MAX => Err(PlanError::TooManyRequests(count)),
            _ => Ok((Problem { buffers, pass_end: Tick(changes.len() as u64), ..Problem::default() }, rows)),
        }
    }

    fn of(trace: &Trace, iteration: u32, cut: Option<Cut>) -> Result<Problem, PlanError> {
        let iterations = trace.iterations();
        if iteration >= iterations {
            return Err(PlanError::NoIteration { wanted: iteration, iterations });
        }
        let timeline = Timeline::from_trace(trace, iteration, cut.is_some());
        let mut problem = Problem { iteration, cut, pass_end: timeline.pass_end(), ..Problem::default() };
        timeline.draw_prologue(&mut problem)?;
        let numbers = timeline.draw_cycle(&mut problem)?;
        if problem.buffers.is_empty() {
            return Err(PlanError::NothingStatic);
        }
        timeline.draw_dynamic(&mut problem)?;
        problem.kinds = timeline.variants(&numbers, problem.buffers.len());
        let phases = Phases::of(trace, timeline.iteration(), timeline.is_first());
        problem.buffers.iter_mut().for_each(|buffer| buffer.phases = phases.pair(buffer.lifetime));
        Ok(problem)
    }

    /// The requests of a plan, with kinds of iterations that it may not have yet.
    pub(super) fn of_plan(plan: &Plan, kinds: Vec<Kind>) -> Problem {
        let buffer = |entry: &Entry| {
            let Entry { bytes, lane, context, lifetime, again, .. } = *entry;
            Buffer { bytes, len: entry.span().len(), lane, context, lifetime, again, phases: PhasePair::default() }
        };
        let buffers = plan.entries.iter().map(buffer).collect();
        let problem = Problem { buffers, cycle_start: plan.cycle_start, kinds, ..Problem::default() };
        // What lives on into the next pass lives to the end in that.
        let pass_end = Tick(problem.end().0.saturating_sub(plan.cycle_len().unwrap_or(0)));
        Problem { pass_end, ..problem }
    }

    /// What comes again and again, without what comes once before it.
    pub fn without_prologue(mut self) -> Result<Problem, PlanError> {
        self.buffers.drain(..self.cycle_start);
        self.dynamic.drain(..self.dynamic_cycle_start);
        // Those of the cycle come behind all of the prologue.
        self.dynamic.iter_mut().for_each(|entry| entry.before -= self.cycle_start as u32);
        self.kinds.iter_mut().for_each(|kind| kind.begin_at(self.cycle_start));
        (self.cycle_start, self.dynamic_cycle_start) = (0, 0);
        self.dynamic_requests = self.dynamic.len() as u64;
        if self.buffers.is_empty() { Err(PlanError::NothingStatic) } else { Ok(self) }
    }

    pub(super) fn push(
        &mut self,
        one: &Allocation,
        lifetime: Lifetime,
        again: Option<Lifetime>,
    ) -> Result<(), PlanError> {
        if self.buffers.len() >= limits::PLAN_ENTRIES_MAX {
            return Err(PlanError::TooManyRequests(self.buffers.len() + 1));
        }
        let Allocation { bytes, lane, context, .. } = *one;
        let len = limits::allocation_len(bytes).ok_or(PlanError::TooLarge)?;
        self.buffers.push(Buffer { bytes, len, lane, context, lifetime, again, phases: PhasePair::default() });
        Ok(())
    }

    /// A request that varies, of the prologue or of the cycle, which begins at `first`; and from where to
    /// where it is expected, from there.
    pub(super) fn expect(&mut self, one: &Allocation, around: Option<(u64, u64)>, first: u64) -> Result<(), PlanError> {
        if self.dynamic.len() >= limits::PLAN_ENTRIES_MAX {
            return Err(PlanError::TooManyRequests(self.dynamic.len() + 1));
        }
        let before = self.buffers.partition_point(|buffer| buffer.lifetime.start.0 < first + one.at);
        self.dynamic.push(DynamicEntry {
            before: before as u32,
            lane: one.lane,
            context: one.context,
            interval: around.map(|(from, to)| Lifetime::new(first + from, first + to)),
        });
        Ok(())
    }

    /// It is of a job that repeats itself.
    pub fn comes_again(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.again.is_some())
    }

    /// One more than the last tick.
    pub fn end(&self) -> Tick {
        self.buffers.iter().flat_map(Buffer::lifetimes).map(|lifetime| lifetime.end).max().unwrap_or_default()
    }
}
