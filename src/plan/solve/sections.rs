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
        let (mut births, mut deaths): (Vec<Tick>, Vec<Tick>) =
            lifetimes.map(|lifetime| (lifetime.start, lifetime.end)).unzip();
        births.sort();
        deaths.sort();
        let mut starts: Vec<Tick> = Vec::new();
        let mut died = 0;
        for birth in births {
            // At one tick whoever leaves goes first: lifetimes are half-open.
            let dead = died + deaths[died..].iter().take_while(|death| **death <= birth).count();
            if dead > died || starts.is_empty() {
                starts.push(birth);
            }
            died = dead;
        }
        Sections { starts }
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
