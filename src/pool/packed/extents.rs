//! What is free in a row of offsets: found by length for the best fit, and by place to be joined with its neighbours.
//!
//! Invariant: no two free stretches touch, and both ways to find one know the same ones.

use std::collections::{BTreeMap, BTreeSet};

/// Free stretches of one range, in units of allocation.
#[derive(Debug, Default)]
pub(super) struct Extents {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Extents {
    /// The shortest that has room for so many units, of those the lowest: its length and its start.
    pub(super) fn best_fit(&self, units: u64) -> Option<(u64, u64)> {
        self.by_len.range((units, 0)..).next().copied()
    }

    /// The length of the longest.
    pub(super) fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |(len, _)| *len)
    }

    /// The one that ends at `end`: its start.
    pub(super) fn ending_at(&self, end: u64) -> Option<u64> {
        self.by_start.range(..end).next_back().filter(|(start, len)| *start + *len == end).map(|(start, _)| *start)
    }

    /// The length of the one that begins at `start`.
    pub(super) fn len_at(&self, start: u64) -> Option<u64> {
        self.by_start.get(&start).copied()
    }

    /// Start and length of each, in the order of places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_start.iter().map(|(start, len)| (*start, *len))
    }

    /// Takes `units` from `start` on, which lie in one free stretch.
    pub(super) fn take(&mut self, start: u64, units: u64) {
        let (from, len) =
            self.by_start.range(..=start).next_back().map(|(from, len)| (*from, *len)).unwrap_or_default();
        assert!(from <= start && start + units <= from + len, "only what is free is taken");
        self.remove(from, len);
        if start > from {
            self.insert(from, start - from);
        }
        if from + len > start + units {
            self.insert(start + units, from + len - start - units);
        }
    }

    /// Gives `units` from `start` on back, of which nothing is free.
    pub(super) fn give(&mut self, start: u64, units: u64) {
        let (mut from, mut len) = (start, units);
        if let Some(before) = self.ending_at(start) {
            self.remove(before, start - before);
            (from, len) = (before, start - before + len);
        }
        if let Some(after) = self.len_at(start + units) {
            self.remove(start + units, after);
            len += after;
        }
        self.insert(from, len);
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }

    /// Says what is wrong; nothing, unless this file has a bug.
    pub(super) fn invariants(&self) -> Result<(), String> {
        let mut end = None;
        for (start, len) in self.iter() {
            if len == 0 || end.is_some_and(|end| start <= end) {
                return Err(format!("free stretches touch, or have no length, at {start}"));
            }
            if !self.by_len.contains(&(len, start)) {
                return Err(format!("the stretch at {start} is not found by its length"));
            }
            end = Some(start + len);
        }
        let (by_len, by_start) = (self.by_len.len(), self.by_start.len());
        if by_len == by_start { Ok(()) } else { Err(format!("{by_len} are found by length and {by_start} by place")) }
    }
}
