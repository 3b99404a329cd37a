//! Best fit in the order of time: each buffer goes to the smallest extent that is free when it comes and large enough, or to the top.
//!
//! What an allocator does that knows nothing of what comes; n log n whatever the lifetimes are. Small buffers that live long keep large extents cut up, so they have
//! a part of the pool to themselves, as in PyTorch's allocator.

use std::collections::{BTreeMap, BTreeSet};

use super::Stopped;
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
    let (mut larges, mut smalls) = (Extents::default(), Extents::default());
    let is_small = |len: u64| len < small.end().get();
    for (_, comes, at) in changes {
        let len = buffers[at].1;
        let extents = if is_small(len) { &mut smalls } else { &mut larges };
        if comes {
            offsets[at] = extents.take(len).ok_or(Stopped::TooLarge)?;
        } else {
            extents.give(offsets[at], len);
        }
    }
    // Small ones lie above the others.
    smalls.top.checked_add(larges.top).ok_or(Stopped::TooLarge)?;
    for (offset, (_, len)) in offsets.iter_mut().zip(buffers) {
        *offset += if is_small(*len) { larges.top } else { 0 };
    }
    Ok(offsets)
}

/// Free extents below the top.
#[derive(Default)]
struct Extents {
    top: u64,
    by_offset: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Extents {
    fn take(&mut self, len: u64) -> Option<u64> {
        if let Some((found, offset)) = self.by_len.range((len, 0)..).next().copied() {
            self.remove(offset, found);
            if found > len {
                self.insert(offset + len, found - len);
            }
            return Some(offset);
        }
        // Nothing fits: what is free right below the top is the beginning.
        let last = self.by_offset.last_key_value().map(|(offset, len)| (*offset, *len));
        let last = last.filter(|(offset, len)| offset + len == self.top);
        if let Some((offset, len)) = last {
            self.remove(offset, len);
        }
        let offset = last.map_or(self.top, |(offset, _)| offset);
        self.top = offset.checked_add(len)?;
        Some(offset)
    }

    fn give(&mut self, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((before, len)) = self.by_offset.range(..start).next_back().map(|(at, len)| (*at, *len))
            && before + len == start
        {
            self.remove(before, len);
            start = before;
        }
        if let Some(len) = self.by_offset.get(&end).copied() {
            self.remove(end, len);
            end += len;
        }
        self.insert(start, end - start);
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_len.insert((len, offset));
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
    }
}
