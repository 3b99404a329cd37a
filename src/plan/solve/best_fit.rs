//! Best fit in the order of time: each buffer goes to the smallest extent that is free when it comes and large enough, or to the top.
//!
//! What an allocator does that knows nothing of what comes; n log n whatever the lifetimes are. Small buffers that live long keep large extents cut up, so they have
//! a part of the pool to themselves, as in PyTorch's allocator.

use super::Stopped;
use crate::extents::Extents;
use crate::units::{Bytes, Lifetime, Tick};

/// Which buffers are small enough to be placed apart from the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Small {
    /// None.
    Nothing,
    /// Those below 256 KiB.
    Below256Kib,
    /// Those below 1 MiB.
    Below1Mib,
    /// Those below 2 MiB.
    Below2Mib,
}

impl Small {
    /// Its name in plans and on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Small::Nothing => "best-fit",
            Small::Below256Kib => "best-fit/small-256KiB",
            Small::Below1Mib => "best-fit/small-1MiB",
            Small::Below2Mib => "best-fit/small-2MiB",
        }
    }

    const fn end(self) -> Bytes {
        match self {
            Small::Nothing => Bytes::ZERO,
            Small::Below256Kib => Bytes::kib(256),
            Small::Below1Mib => Bytes::mib(1),
            Small::Below2Mib => Bytes::mib(2),
        }
    }
}

/// Offsets for buffers of these lifetimes and sizes, in their order.
pub(super) fn place(buffers: &[(Lifetime, u64)], small: Small) -> Result<Vec<u64>, Stopped> {
    let mut changes: Vec<(Tick, bool, usize)> = Vec::with_capacity(2 * buffers.len());
    for (at, (lifetime, _)) in buffers.iter().enumerate() {
        changes.extend([(lifetime.start, true, at), (lifetime.end, false, at)]);
    }
    // At one tick whoever leaves goes first: lifetimes are half-open.
    changes.sort_unstable();
    let mut offsets = vec![0; buffers.len()];
    let (mut larges, mut smalls) = (Stack::default(), Stack::default());
    let is_small = |len: u64| len < small.end().get();
    for (_, comes, at) in changes {
        let len = buffers[at].1;
        let stack = if is_small(len) { &mut smalls } else { &mut larges };
        if comes {
            offsets[at] = stack.take(len).ok_or(Stopped::TooLarge)?;
        } else {
            stack.free.give(offsets[at], len);
        }
    }
    // Small ones lie above the others.
    smalls.top.checked_add(larges.top).ok_or(Stopped::TooLarge)?;
    for (offset, (_, len)) in offsets.iter_mut().zip(buffers) {
        *offset += if is_small(*len) { larges.top } else { 0 };
    }
    Ok(offsets)
}

/// Bytes up to the top, and what is free of them.
#[derive(Default)]
struct Stack {
    top: u64,
    free: Extents,
}

impl Stack {
    fn take(&mut self, len: u64) -> Option<u64> {
        if let Some(offset) = self.free.take_best_fit(len) {
            return Some(offset);
        }
        // Nothing fits: what is free right below the top is the beginning.
        let last = self.free.last().filter(|(offset, len)| offset + len == self.top);
        if let Some((offset, len)) = last {
            self.free.take(offset, len);
        }
        let offset = last.map_or(self.top, |(offset, _)| offset);
        self.top = offset.checked_add(len)?;
        Some(offset)
    }
}
