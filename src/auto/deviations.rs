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
    stretches: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Figures {
    requests: u64,
    deviations: u64,
}

/// More than one request in so many that does not go by the plan is too many.
const SHARE: u64 = 10;
/// Iterations of a stretch.
const ITERATIONS: u64 = 2;
/// Stretches in a row before the first new plan; each plan after that takes twice as many, for a job that no plan fits.
const BAD_MAX: u32 = 2;

impl Figures {
    fn of(runtime: &Runtime) -> Figures {
        let counters = runtime.counters();
        Figures { requests: counters.sum(&Counter::REQUESTS), deviations: counters.sum(&Counter::DEVIATIONS) }
    }
}

impl Deviations {
    /// Of the plan that has just come, the `made`-th, with so many requests in an iteration.
    pub(super) fn from_now(runtime: &Runtime, made: u32, requests: usize) -> Deviations {
        let bad_max = BAD_MAX.checked_shl(made.saturating_sub(1)).unwrap_or(u32::MAX);
        Deviations { before: Figures::of(runtime), requests: requests as u64, bad: 0, bad_max, stretches: 0 }
    }

    /// Stretches that are over.
    pub(super) fn stretches(&self) -> u64 {
        self.stretches
    }

    /// Looks at what has come since. True once too much of it has not gone by the plan for too long.
    pub(super) fn look(&mut self, runtime: &Runtime) -> bool {
        let now = Figures::of(runtime);
        let requests = now.requests - self.before.requests;
        if requests < ITERATIONS * self.requests {
            return false;
        }
        let deviations = now.deviations.saturating_sub(self.before.deviations);
        self.before = now;
        self.stretches += 1;
        self.bad = if deviations * SHARE > requests { self.bad + 1 } else { 0 };
        self.bad >= self.bad_max
    }
}
