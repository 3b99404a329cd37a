//! What is free in a row of offsets: found by length for the best fit, and by place to be joined with its neighbours. In whatever unit.
//!
//! Not for: what is free in time as well, which solvers keep in their own ways.
//!
//! Invariant: no two free stretches touch, and both ways to find one know the same ones.

use std::collections::{BTreeMap, BTreeSet};

/// Free stretches.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Extents {
    /// The shortest that has room for so much, of those the lowest: its length and its start.
    pub(crate) fn best_fit(&self, len: u64) -> Option<(u64, u64)> {
        self.by_len.range((len, 0)..).next().copied()
    }

    /// The length of the longest.
    pub(crate) fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |(len, _)| *len)
    }

    /// The one at the highest place: its start and its length.
    pub(crate) fn last(&self) -> Option<(u64, u64)> {
        self.by_start.last_key_value().map(|(start, len)| (*start, *len))
    }

    /// The one that ends at `end`: its start.
    pub(crate) fn ending_at(&self, end: u64) -> Option<u64> {
        self.by_start.range(..end).next_back().filter(|(start, len)| *start + *len == end).map(|(start, _)| *start)
    }

    /// The length of the one that begins at `start`.
    pub(crate) fn len_at(&self, start: u64) -> Option<u64> {
        self.by_start.get(&start).copied()
    }

    /// `len` from `start` on is all free.
    pub(crate) fn covers(&self, start: u64, len: u64) -> bool {
        self.by_start.range(..=start).next_back().is_some_and(|(from, has)| start + len <= from + has)
    }

    /// The one that `place` lies in, or the next one: its start and its length.
    pub(crate) fn at_or_after(&self, place: u64) -> Option<(u64, u64)> {
        let pair = |(start, len): (&u64, &u64)| (*start, *len);
        let before = self.by_start.range(..=place).next_back().map(pair);
        before.filter(|(start, len)| start + len > place).or_else(|| self.by_start.range(place..).next().map(pair))
    }

    /// Start and length of each that is at least so long, the shortest first.
    pub(crate) fn at_least(&self, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_len.range((len, 0)..).map(|(len, start)| (*start, *len))
    }

    /// Start and length of each, in the order of places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_start.iter().map(|(start, len)| (*start, *len))
    }

    /// Takes `wanted` from `start` on, which lies in one free stretch.
    pub(crate) fn take(&mut self, start: u64, wanted: u64) {
        let (from, len) =
            self.by_start.range(..=start).next_back().map(|(from, len)| (*from, *len)).unwrap_or_default();
        assert!(from <= start && start + wanted <= from + len, "only what is free is taken");
        self.remove(from, len);
        if start > from {
            self.insert(from, start - from);
        }
        if from + len > start + wanted {
            self.insert(start + wanted, from + len - start - wanted);
        }
    }

    /// Gives `len` from `start` on back, of which nothing is free.
    pub(crate) fn give(&mut self, start: u64, len: u64) {
        let (mut from, mut to) = (start, start + len);
        if let Some(before) = self.ending_at(start) {
            self.remove(before, start - before);
            from = before;
        }
        if let Some(after) = self.len_at(to) {
            self.remove(to, after);
            to += after;
        }
        self.insert(from, to - from);
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
    pub(crate) fn invariants(&self) -> Result<(), String> {
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

/// Takes `[from, to)` out of stretches, each from its first place to behind its last, that stand in the order of places; what is left of one and shorter than `len` goes.
pub(crate) fn cut(room: &mut Vec<(u64, u64)>, from: u64, to: u64, len: u64) {
    let mut at = room.partition_point(|(_, end)| *end <= from);
    while let Some((start, end)) = room.get(at).copied().filter(|(start, _)| *start < to) {
        let left = [(start, from), (to, end)].into_iter().filter(|(start, end)| *end >= start.saturating_add(len));
        let left: Vec<(u64, u64)> = left.collect();
        let count = left.len();
        room.splice(at..=at, left);
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_leaves_what_is_long_enough() {
        let whole = vec![(0, 10), (20, 30), (40, 50)];
        let after = |from, to, len| {
            let mut room = whole.clone();
            cut(&mut room, from, to, len);
            room
        };
        assert_eq!(after(10, 20, 1), whole);
        assert_eq!(after(3, 5, 2), [(0, 3), (5, 10), (20, 30), (40, 50)]);
        assert_eq!(after(3, 5, 4), [(5, 10), (20, 30), (40, 50)]);
        assert_eq!(after(5, 45, 5), [(0, 5), (45, 50)]);
        assert_eq!(after(5, 45, 6), []);
        assert_eq!(after(0, 60, 1), []);
    }
}
