//! What the next iteration of a job needs, as far as it can be told before it begins.

use std::time::Duration;

use super::{Counter, Pools, Runtime, installed};
use crate::units::Bytes;

/// What a job needs of a device, in whole chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Need {
    /// Between two iterations: chunks in which something is in use.
    pub at_rest: Bytes,
    /// At the peak of the next iteration: its plan, or what the last one has held where that is more.
    pub peak: Bytes,
}

impl Need {
    /// What both need together.
    #[must_use]
    pub fn and(self, other: Need) -> Need {
        Need { at_rest: self.at_rest + other.at_rest, peak: self.peak + other.peak }
    }
}

/// The most that was held since an iteration began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct PeakOfIteration {
    now: Bytes,
    /// In the whole iteration before.
    last: Bytes,
}

impl PeakOfIteration {
    pub(super) fn note(&mut self, held: Bytes) {
        self.now = self.now.max(held);
    }

    /// One ends, and the next begins with this.
    pub(super) fn turn(&mut self, held: Bytes) {
        *self = PeakOfIteration { now: held, last: self.now.max(held) };
    }
}

/// The most that the process has held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct MostHeld {
    pub(super) ever: Bytes,
    /// What its page pool may hold with a late plan before that is suspended: what it held before
    /// the first plan and a margin, or what it held later while no plan was followed.
    pub(super) with_plan: Bytes,
}

impl Runtime {
    /// What the iteration that begins now needs. Nothing at its peak where nobody can tell: neither is there a plan, nor has one iteration ended.
    pub fn need(&self) -> Need {
        let pools = self.lock();
        let of_plan = pools.planned.as_ref().map_or(Bytes::ZERO, |installed| installed.cycle_len);
        let at_rest = pools.in_use(self.config.granule());
        Need { at_rest, peak: pools.peak.last.max(of_plan).max(at_rest) }
    }

    /// An iteration ends whose marks are another runtime's.
    pub fn turn_peak(&self) {
        self.lock().turn_peak();
    }

    /// How the admission of an iteration ended, and how long it took.
    pub fn note_admission(&self, is_admitted: bool, took: Duration) {
        // Its counters have one writer: whoever has the lock.
        let _pools = self.lock();
        let ended = if is_admitted { Counter::IterationsAdmitted } else { Counter::IterationsRefused };
        self.counters.add(ended, 1);
        self.counters.add(Counter::AdmissionMicros, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }
}

impl Pools {
    pub(super) fn note_most_held(&mut self, held: Bytes) {
        self.most_held.ever = self.most_held.ever.max(held);
        if self.planned.as_ref().is_some_and(|installed| !installed.is_suspended()) {
            return;
        }
        let held = self.pages.held();
        let margin = if self.had_plan { Bytes::ZERO } else { installed::growth_margin(held) };
        let may_hold = held.saturating_add(margin);
        self.most_held.with_plan = self.most_held.with_plan.max(may_hold);
    }

    /// The peak of the iteration that ends is that of the last one from now on.
    pub(super) fn turn_peak(&mut self) {
        let held = self.held();
        self.peak.turn(held);
    }

    /// Bytes of chunks in which something is in use.
    fn in_use(&self, granule: Bytes) -> Bytes {
        let own = self.planned.as_ref().map_or_else(Vec::new, |installed| installed.idle_chunks(&self.pages, granule));
        let own = own.iter().map(|chunk| chunk.len).sum();
        self.held().saturating_sub(self.idle_chunks()).saturating_sub(own)
    }
}
