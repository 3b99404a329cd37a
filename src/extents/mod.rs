//! Free runs of a row of offsets, in any unit: found by length for the best fit, and by start to be
//! joined with their neighbours. What is also free in *time* is not covered; solvers keep that.
//!
//! Up to 16 runs are one sorted block, which is scanned for the best fit. With more, [`bins`] find
//! them by length, and most changes of a run replace its entry in the sorted [`blocks`] in place.
//!
//! Invariant: no two free runs touch, and both indexes have the same runs.

mod bins;
mod blocks;
#[cfg(test)]
mod tests;

use bins::Bins;
use blocks::{BlockList, Pair, Position, UNUSED, as_wide};

/// Free runs. The start and the end of every run are below 2^64.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    /// Start and length of each.
    by_start: BlockList,
    /// Length and start of each. `None` while `by_start` is small.
    by_len: Option<Box<Bins>>,
}

impl Extents {
    /// Takes `len` from the start of the best fit, and returns where: the shortest run that is long
    /// enough, of those the lowest.
    #[inline]
    pub(crate) fn take_best_fit(&mut self, len: u64) -> Option<u64> {
        let (has, start) = match &mut self.by_len {
            Some(bins) => bins.take_best_fit(len)?,
            None => self.best_of_few(len)?,
        };
        let behind = self.behind_near(start);
        let (position, _) = self.by_start.before(behind)?;
        self.replace(position, (start, has), start, start + len);
        Some(start)
    }

    /// The length of the longest run, 0 if there is none.
    pub(crate) fn longest(&self) -> u64 {
        match &self.by_len {
            Some(bins) => bins.longest().unwrap_or(0),
            None => self.iter().map(|(_, len)| len).max().unwrap_or(0),
        }
    }

    /// The run with the highest start: its start and its length.
    pub(crate) fn last(&self) -> Option<(u64, u64)> {
        self.by_start.last()
    }

    /// The last run that begins at `place` or before: its start and its length.
    pub(crate) fn last_until(&self, place: u64) -> Option<(u64, u64)> {
        self.at_or_before(place).map(|(_, run)| run)
    }

    /// The start of the run that ends at `end`.
    pub(crate) fn ending_at(&self, end: u64) -> Option<u64> {
        let (_, (start, len)) = self.by_start.before(self.by_start.position(|(start, _)| *start < end))?;
        (start + len == end).then_some(start)
    }

    /// The length of the run that begins at `start`.
    pub(crate) fn len_at(&self, start: u64) -> Option<u64> {
        let (_, (from, len)) = self.at_or_before(start)?;
        (from == start).then_some(len)
    }

    /// Whether `len` from `start` on is all free.
    pub(crate) fn covers(&self, start: u64, len: u64) -> bool {
        self.at_or_before(start).is_some_and(|(_, (from, has))| start + len <= from + has)
    }

    /// The run that contains `place`, or the next one: its start and its length.
    pub(crate) fn at_or_after(&self, place: u64) -> Option<(u64, u64)> {
        let position = self.behind(place);
        let before = self.by_start.before(position).map(|(_, run)| run);
        let after = || self.by_start.after(position).map(|(_, run)| run);
        before.filter(|(start, len)| start + len > place).or_else(after)
    }

    /// Start and length of each run of at least `len`, in ascending order of start. Looks at all runs.
    pub(crate) fn at_least(&self, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.iter().filter(move |(_, has)| *has >= len)
    }

    /// Start and length of each run, in ascending order of start.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_start.iter()
    }

    /// Takes `wanted` from `start` on, which must lie in one free run.
    pub(crate) fn take(&mut self, start: u64, wanted: u64) {
        let found = self.at_or_before(start);
        let (position, (from, len)) = found.unwrap_or_default();
        assert!(from <= start && start + wanted <= from + len, "only what is free is taken");
        if wanted == 0 {
            return;
        }
        if let Some(bins) = &mut self.by_len {
            bins.remove((len, from));
        }
        self.replace(position, (from, len), start, start + wanted);
    }

    /// Gives `len` from `start` on back, of which nothing is free.
    pub(crate) fn give(&mut self, start: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (mut from, mut to) = (start, start + len);
        let position = self.behind_near(start);
        let before = self.by_start.before(position).filter(|(_, (start, len))| start + len == from);
        let after = self.by_start.after(position).filter(|(_, (start, _))| *start == to);
        if let Some((_, run)) = before {
            from = run.0;
            self.unlist(run);
        }
        if let Some((_, run)) = after {
            to += run.1;
            self.unlist(run);
        }
        let whole = (from, to - from);
        match (before, after) {
            (None, None) => return self.insert(position, whole),
            (Some((joined, _)), None) | (None, Some((joined, _))) => self.by_start.set(joined, whole),
            (Some((joined, _)), Some((gone, _))) => {
                self.by_start.set(joined, whole);
                self.by_start.remove(gone);
            }
        }
        self.list(whole);
    }

    /// The best fit where `by_len` does not exist.
    #[inline]
    fn best_of_few(&self, len: u64) -> Option<(u64, u64)> {
        let runs = self.by_start.only_block()?;
        let fits = runs.iter().map(|(start, has)| if *has >= len { (*has, *start) } else { UNUSED });
        fits.min_by_key(|fit| as_wide(*fit)).filter(|best| *best != UNUSED)
    }

    /// Behind all runs that begin at `place` or before.
    #[inline]
    fn behind(&self, place: u64) -> Position {
        self.by_start.position(|(start, _)| *start <= place)
    }

    /// `behind`, for a place near the last one.
    #[inline]
    fn behind_near(&mut self, place: u64) -> Position {
        self.by_start.position_near(|(start, _)| *start <= place)
    }

    /// The last run that begins at `place` or before.
    #[inline]
    fn at_or_before(&self, place: u64) -> Option<(Position, Pair)> {
        self.by_start.before(self.behind(place))
    }

    /// Leaves of a run only what lies outside `[start, end)`. `by_len` no longer has the run.
    #[inline]
    fn replace(&mut self, position: Position, (from, len): Pair, start: u64, end: u64) {
        let before = (from, start - from);
        let after = (end, from + len - end);
        match (before.1 > 0, after.1 > 0) {
            (false, false) => self.by_start.remove(position),
            (true, false) => self.change(position, before),
            (false, true) => self.change(position, after),
            (true, true) => {
                self.change(position, before);
                self.insert(self.behind(start), after);
            }
        }
    }

    /// Replaces the run at a position, which `by_len` no longer has.
    #[inline]
    fn change(&mut self, position: Position, run: Pair) {
        self.by_start.set(position, run);
        self.list(run);
    }

    #[inline]
    fn insert(&mut self, position: Position, run: Pair) {
        self.by_start.insert(position, run);
        if self.by_len.is_none() && !self.by_start.is_small() {
            self.build_by_len();
        } else {
            self.list(run);
        }
    }

    #[cold]
    #[inline(never)]
    fn build_by_len(&mut self) {
        let mut bins = Box::<Bins>::default();
        self.iter().for_each(|(start, len)| bins.insert((len, start)));
        self.by_len = Some(bins);
    }

    #[inline]
    fn list(&mut self, (start, len): Pair) {
        if let Some(bins) = &mut self.by_len {
            bins.insert((len, start));
        }
    }

    #[inline]
    fn unlist(&mut self, (start, len): Pair) {
        if let Some(bins) = &mut self.by_len {
            bins.remove((len, start));
        }
    }

    /// Describes the first broken invariant. An error is a bug in this module.
    pub(crate) fn invariants(&self) -> Result<(), String> {
        self.by_start.invariants()?;
        let mut end = None;
        for (start, len) in self.iter() {
            if len == 0 || end.is_some_and(|end| start <= end) {
                return Err(format!("free runs touch, or have no length, at {start}"));
            }
            end = Some(start + len);
        }
        let Some(bins) = &self.by_len else {
            let is_small = self.by_start.is_small();
            return if is_small { Ok(()) } else { Err("many free runs are not found by length".to_owned()) };
        };
        bins.invariants()?;
        let mut runs: Vec<Pair> = self.iter().map(|(start, len)| (len, start)).collect();
        runs.sort_unstable();
        if bins.iter().eq(runs) { Ok(()) } else { Err("other runs are found by length than by start".to_owned()) }
    }
}

/// Takes `[from, to)` out of runs, which are pairs of start and end in ascending order. Drops what
/// is left of a run if it is shorter than `len`.
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
