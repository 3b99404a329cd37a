//! Whether a job still goes by its plan.
//!
//! Not for: what a single deviation costs, which the planned pool keeps small.

use crate::runtime::{Counter, Runtime};

/// What the runtime has counted since the plan came, stretch by stretch.
#[derive(Debug)]
pub(super) struct Deviations {
    before: Figures,
    /// Requests of an iteration: a stretch is at least two of them.
    requests: u64,
    /// Stretches in a row with too many deviations, and how many are too many of those.
    bad: u32,
    bad_max: u32,
    /// When it was last looked for a surprise, and the deviations that are usual, once that is known.
    looked: Figures,
    usual: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Figures {
    requests: u64,
    deviations: u64,
    /// Iterations that somebody has marked.
    iterations: u64,
}

/// More than one request in so many that does not go by the plan is too many.
const SHARE: u64 = 10;
/// Iterations of a stretch.
const ITERATIONS: u64 = 2;
/// A stretch is over after the requests of so many iterations, whether their ends are marked or not: who marked the first may mark no more.
const LONGEST: u64 = 1024;
/// So many deviations within an iteration are a surprise: fewer are no iteration of another kind.
const SURPRISE: u64 = 16;
/// Stretches in a row before the first new plan; each plan after that takes twice as many, for a job that no plan fits.
const BAD_MAX: u32 = 2;

impl Figures {
    fn of(runtime: &Runtime) -> Figures {
        let counters = runtime.counters();
        // First: what ends between the two looks is an iteration whose deviations are counted.
        let iterations = counters.get(Counter::Iterations);
        Figures {
            requests: counters.sum(&Counter::REQUESTS),
            deviations: counters.sum(&Counter::DEVIATIONS),
            iterations,
        }
    }

    /// Deviations and requests that have come since.
    fn since(&self, before: &Figures) -> (u64, u64) {
        (self.deviations.saturating_sub(before.deviations), self.requests - before.requests)
    }
}

impl Deviations {
    /// Of the plan that has just come, the `made`-th, with so many requests in an iteration.
    pub(super) fn from_now(runtime: &Runtime, made: u32, requests: usize) -> Deviations {
        let bad_max = BAD_MAX.checked_shl(made.saturating_sub(1)).unwrap_or(u32::MAX);
        let before = Figures::of(runtime);
        Deviations { before, requests: requests as u64, bad: 0, bad_max, looked: before, usual: None }
    }

    /// Iterations that somebody marks have ended since it was last asked, and much more in them than before did not go by the plan.
    pub(super) fn has_surprise(&mut self, runtime: &Runtime) -> bool {
        let now = Figures::of(runtime);
        let (deviations, requests) = now.since(&self.looked);
        // Two marks one after the other end one iteration.
        if now.iterations == self.looked.iterations || requests < self.requests / 2 {
            return false;
        }
        self.looked = now;
        // An iteration that goes by the plan says that the job has not changed for good.
        if deviations * SHARE <= requests {
            self.bad = 0;
        }
        let usual = self.usual.replace(deviations);
        usual.is_some_and(|usual| deviations >= SURPRISE.saturating_add(usual.saturating_mul(2)))
    }

    /// Looks at what has come since. True once too much of it has not gone by the plan for too long.
    pub(super) fn look(&mut self, runtime: &Runtime) -> bool {
        let now = Figures::of(runtime);
        let (deviations, requests) = now.since(&self.before);
        // Of marked iterations one may be much longer than the others, as with an evaluation in it.
        let is_marked = self.before.iterations > 0;
        let is_short = is_marked && now.iterations < self.before.iterations + ITERATIONS;
        if requests < ITERATIONS * self.requests || is_short && requests < LONGEST * self.requests {
            return false;
        }
        self.before = now;
        self.bad = if deviations * SHARE > requests { self.bad + 1 } else { 0 };
        self.bad >= self.bad_max
    }
}
