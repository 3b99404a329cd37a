//! Time in as few sections as can be.
//!
//! Between a birth and the next death only more buffers come, so two that are live together are so at the last birth before a death: a section of time begins at the first
//! birth after a death, and nothing else needs to be told apart. That halves the number of sections at least.

use crate::lifetimes::changes;
use crate::units::Lifetime;

/// The sections of a set of lifetimes.
pub(super) struct Sections {
    count: u32,
    /// Of each lifetime, the sections that it is live in, half-open.
    stretches: Vec<(u32, u32)>,
}

impl Sections {
    pub(super) fn of(lifetimes: &[Lifetime]) -> Sections {
        let mut stretches = vec![(0, 0); lifetimes.len()];
        let (mut count, mut has_died) = (0, true);
        for change in changes(lifetimes) {
            let stretch = &mut stretches[change.of as usize];
            if change.comes {
                count += u32::from(has_died);
                has_died = false;
                stretch.0 = count - 1;
            } else {
                has_died = true;
                stretch.1 = count;
            }
        }
        Sections { count, stretches }
    }

    pub(super) fn count(&self) -> usize {
        self.count as usize
    }

    /// Those that a lifetime is live in, by its place among the lifetimes, half-open.
    pub(super) fn of_lifetime(&self, at: usize) -> (usize, usize) {
        let (from, to) = self.stretches[at];
        (from as usize, to as usize)
    }
}
