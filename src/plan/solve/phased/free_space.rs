//! What is free in time and space beside placed requests.
//!
//! Gaps are rectangles: from tick to tick, some bytes from an offset on. Who takes a part of one leaves three: the time before and after it, as high as it is, for others of its size, and all the time of what is above.
//! Sizes are asked for in descending order, so gaps that are too low wait until their size comes, and of those that are high enough only the time is looked at: a tree over the ticks at which gaps begin
//! finds, among those that last long enough, the one that begins last.
//!
//! Not for: joining gaps. What lies side by side stays apart.
//!
//! Invariant: gaps never overlap, and nothing that was placed lies in one.

use std::collections::{BTreeSet, BinaryHeap};

use crate::units::{Lifetime, Tick};

/// A free rectangle.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Gap {
    pub(super) from: Tick,
    pub(super) to: Tick,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// All gaps.
pub(super) struct FreeSpace {
    /// Those that are too low so far, by height.
    low: BinaryHeap<(u64, Gap)>,
    /// At least so high are the others.
    served: u64,
    /// Ticks at which a gap can begin.
    begins: Vec<Tick>,
    /// The others, at the tick at which they begin: end, height and offset.
    gaps: Vec<BTreeSet<(Tick, u64, u64)>>,
    /// A tree over them: when the last gap below a node ends.
    last: Vec<Tick>,
}

impl FreeSpace {
    /// None yet. Gaps begin at zero, or where one of these requests ends.
    pub(super) fn of(ends: impl Iterator<Item = Tick>) -> FreeSpace {
        let mut begins: Vec<Tick> = ends.chain([Tick(0)]).collect();
        begins.sort_unstable();
        begins.dedup();
        let leaves = begins.len().next_power_of_two();
        FreeSpace {
            low: BinaryHeap::new(),
            served: u64::MAX,
            gaps: vec![BTreeSet::new(); begins.len()],
            last: vec![Tick(0); 2 * leaves],
            begins,
        }
    }

    /// From now on it is asked for `len` bytes, which are no more than before.
    pub(super) fn serve(&mut self, len: u64) {
        self.served = len;
        while self.low.peek().is_some_and(|(height, _)| *height >= len) {
            self.low.pop().into_iter().for_each(|(_, gap)| self.insert(gap));
        }
    }

    /// Adds a gap; one of no time or height is none.
    pub(super) fn give(&mut self, gap: Gap) {
        if gap.from >= gap.to || gap.len == 0 {
            return;
        }
        if gap.len >= self.served {
            self.insert(gap);
        } else {
            self.low.push((gap.len, gap));
        }
    }

    /// An offset where `len` bytes are free for a lifetime.
    pub(super) fn take(&mut self, len: u64, lifetime: Lifetime) -> Option<u64> {
        let leaf = self.begins_last(lifetime)?;
        let (to, height, offset) = self.gaps[leaf].range((lifetime.end, 0, 0)..).next().copied()?;
        self.gaps[leaf].remove(&(to, height, offset));
        self.tell(leaf);
        let from = self.begins[leaf];
        self.give(Gap { from, to: lifetime.start, offset, len });
        self.give(Gap { from: lifetime.end, to, offset, len });
        self.give(Gap { from, to, offset: offset + len, len: height - len });
        Some(offset)
    }

    fn insert(&mut self, Gap { from, to, offset, len }: Gap) {
        let leaf = self.begins.binary_search(&from).expect("gaps begin at zero, or where a request ends");
        self.gaps[leaf].insert((to, len, offset));
        self.tell(leaf);
    }

    /// Takes over into the tree when the last gap of a leaf ends.
    fn tell(&mut self, leaf: usize) {
        let mut node = leaf + self.last.len() / 2;
        self.last[node] = self.gaps[leaf].last().map_or(Tick(0), |(to, ..)| *to);
        while node > 1 {
            node /= 2;
            let last = self.last[2 * node].max(self.last[2 * node + 1]);
            if self.last[node] == last {
                break;
            }
            self.last[node] = last;
        }
    }

    /// Of the leaves with a gap that spans a lifetime, the one that begins last.
    fn begins_last(&self, lifetime: Lifetime) -> Option<usize> {
        let leaves = self.last.len() / 2;
        let is_so = |node: usize| self.last[node] >= lifetime.end;
        let mut node = self.begins.partition_point(|begin| *begin <= lifetime.start).checked_sub(1)? + leaves;
        while !is_so(node) {
            // To the next subtree on the left, above which everything to the right was looked at.
            while node.is_multiple_of(2) {
                node /= 2;
            }
            if node == 1 {
                return None;
            }
            node -= 1;
        }
        while node < leaves {
            node = if is_so(2 * node + 1) { 2 * node + 1 } else { 2 * node };
        }
        Some(node - leaves)
    }
}
