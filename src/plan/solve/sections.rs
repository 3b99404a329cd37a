//! Time in as few sections as can be.
//!
//! Between a birth and the next death only more buffers come, so two that are live together are so at the last birth before a death: a section of time begins at the first
//! birth after a death, and nothing else needs to be told apart. That halves the number of sections at least.

use crate::units::{Lifetime, Tick};

/// The sections of a set of lifetimes.
pub(super) struct Sections {
    /// Where each begins.
    starts: Vec<Tick>,
}

impl Sections {
    pub(super) fn of(lifetimes: impl Iterator<Item = Lifetime>) -> Sections {
        let mut changes: Vec<(Tick, bool)> =
            lifetimes.flat_map(|lifetime| [(lifetime.start, true), (lifetime.end, false)]).collect();
        // At one tick whoever leaves goes first: lifetimes are half-open.
        changes.sort_unstable();
        let is_first = |at: &usize| changes[*at].1 && !at.checked_sub(1).is_some_and(|before| changes[before].1);
        Sections { starts: (0..changes.len()).filter(is_first).map(|at| changes[at].0).collect() }
    }

    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    /// Those that a lifetime is live in, half-open.
    pub(super) fn of_lifetime(&self, lifetime: Lifetime) -> (usize, usize) {
        let begun = |tick: Tick| self.starts.partition_point(|start| *start <= tick);
        (begun(lifetime.start) - 1, self.starts.partition_point(|start| *start < lifetime.end))
    }
}
