//! Free runs by length. A row has the runs from one power of two up to the next, in bins of equal
//! width; bitmaps lead to the next row and bin that is not empty.
//!
//! A row is cut into more bins as it gets fuller, so that most bins have few runs. A bin whose runs
//! have one length can have any number of them.
//!
//! Invariant: a bit is set exactly where the row or the bin has a run.

use super::blocks::{BlockList, Pair, Position, as_wide};

/// Binary logarithm of the number of bins of a row, at first and at most (a bitmap has 64 bits).
const CUT_MIN: u32 = 3;
const CUT_MAX: u32 = 6;
/// Runs per bin at which a row is cut into more.
const LOAD_MAX: usize = 2;
/// Runs of a bin that are kept in one vector.
const FEW_MAX: usize = 64;
/// Runs at which they are kept in one vector again.
const FEW_AGAIN: usize = 16;

/// Free runs as pairs of length and start. No length is 0.
#[derive(Debug)]
pub(super) struct Bins {
    nonempty: u64,
    /// By the binary logarithm of the length.
    rows: [Option<Box<Row>>; 64],
}

#[derive(Debug)]
struct Row {
    nonempty: u64,
    cut: u32,
    count: usize,
    bins: Vec<Bin>,
}

/// Sorted runs of similar lengths.
#[derive(Debug)]
enum Bin {
    Few(Vec<Pair>),
    Many(Box<BlockList>),
}

/// Where a run is. Valid until one is inserted or removed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    row: usize,
    bin: usize,
    position: Position,
}

#[inline]
fn row_for(len: u64) -> usize {
    (len | 1).ilog2() as usize
}

/// The bits above the lowest `count + 1`.
#[inline]
fn above(bits: u64, count: usize) -> u64 {
    bits >> count >> 1 << 1 << count
}

/// The lowest bit that is set.
#[inline]
fn lowest(bits: u64) -> Option<usize> {
    (bits != 0).then_some(bits.trailing_zeros() as usize)
}

impl Bin {
    /// Before the first pair that is `pair` or more.
    #[inline]
    fn position(&self, pair: Pair) -> Position {
        let key = as_wide(pair);
        let is_below = |other: &Pair| as_wide(*other) < key;
        match self {
            Bin::Few(pairs) => Position { block: 0, at: pairs.partition_point(is_below) },
            Bin::Many(list) => list.position(is_below),
        }
    }

    /// The first pair from a position on.
    #[inline]
    fn after(&self, position: Position) -> Option<(Position, Pair)> {
        match self {
            Bin::Few(pairs) => Some((position, *pairs.get(position.at)?)),
            Bin::Many(list) => list.after(position),
        }
    }

    #[inline]
    fn first(&self) -> Option<Pair> {
        match self {
            Bin::Few(pairs) => pairs.first().copied(),
            Bin::Many(list) => list.first(),
        }
    }

    fn last(&self) -> Option<Pair> {
        match self {
            Bin::Few(pairs) => pairs.last().copied(),
            Bin::Many(list) => list.last(),
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        // A list of many pairs becomes a vector before it is empty.
        matches!(self, Bin::Few(pairs) if pairs.is_empty())
    }

    #[inline]
    fn insert(&mut self, pair: Pair) {
        let position = self.position(pair);
        match self {
            Bin::Few(pairs) if pairs.len() < FEW_MAX => pairs.insert(position.at, pair),
            Bin::Few(_) => self.insert_as_many(position, pair),
            Bin::Many(list) => list.insert(position, pair),
        }
    }

    #[cold]
    #[inline(never)]
    fn insert_as_many(&mut self, position: Position, pair: Pair) {
        if let Bin::Few(pairs) = self {
            let mut list = BlockList::from_few(pairs);
            list.insert(position, pair);
            *self = Bin::Many(Box::new(list));
        }
    }

    #[inline]
    fn remove(&mut self, position: Position) {
        match self {
            // Most bins have one pair. The check saves a call that moves nothing.
            Bin::Few(pairs) if position.at + 1 == pairs.len() => pairs.truncate(position.at),
            Bin::Few(pairs) => drop(pairs.remove(position.at)),
            Bin::Many(list) => {
                list.remove(position);
                if let Some(few) = list.only_block().filter(|pairs| pairs.len() <= FEW_AGAIN) {
                    *self = Bin::Few(few.to_vec());
                }
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = Pair> + '_ {
        let (few, many) = match self {
            Bin::Few(pairs) => (Some(pairs), None),
            Bin::Many(list) => (None, Some(list.iter())),
        };
        few.into_iter().flatten().copied().chain(many.into_iter().flatten())
    }
}

impl Row {
    fn with_cut(cut: u32) -> Row {
        let bins = (0..1 << cut).map(|_| Bin::Few(Vec::new())).collect();
        Row { nonempty: 0, cut, count: 0, bins }
    }

    /// The bits of the length behind the highest say which bin it has.
    #[inline]
    fn bin_for(&self, len: u64) -> usize {
        (len << len.leading_zeros() << 1 >> (u64::BITS - self.cut)) as usize
    }

    #[inline]
    fn insert(&mut self, pair: Pair) {
        if self.count >= self.bins.len() * LOAD_MAX && self.cut < CUT_MAX {
            self.cut_finer();
        }
        let bin = self.bin_for(pair.0);
        self.nonempty |= 1 << bin;
        self.count += 1;
        self.bins[bin].insert(pair);
    }

    #[cold]
    #[inline(never)]
    fn cut_finer(&mut self) {
        let mut row = Row::with_cut(self.cut + 1);
        for pair in self.bins.iter().flat_map(Bin::iter) {
            row.insert(pair);
        }
        *self = row;
    }

    #[inline]
    fn remove(&mut self, bin: usize, position: Position) {
        let changed = &mut self.bins[bin];
        changed.remove(position);
        self.count -= 1;
        self.nonempty &= !(u64::from(changed.is_empty()) << bin);
    }

    /// The first pair that is `key` or more, whose length has its place in this row.
    #[inline]
    fn find(&self, key: Pair) -> Option<(usize, Position, Pair)> {
        let bin = self.bin_for(key.0);
        let near = &self.bins[bin];
        if let Some((position, pair)) = near.after(near.position(key)) {
            return Some((bin, position, pair));
        }
        let bin = lowest(above(self.nonempty, bin))?;
        Some((bin, Position::default(), self.bins[bin].first()?))
    }
}

impl Default for Bins {
    fn default() -> Bins {
        Bins { nonempty: 0, rows: [const { None }; 64] }
    }
}

impl Bins {
    /// Removes the first run that is at least so long.
    #[inline]
    pub(super) fn take_best_fit(&mut self, len: u64) -> Option<Pair> {
        let (slot, pair) = self.find(len)?;
        self.remove_at(slot);
        Some(pair)
    }

    /// The first run that is at least so long.
    #[inline]
    pub(super) fn find(&self, len: u64) -> Option<(Slot, Pair)> {
        // No run has length 0, which is in no row either.
        let key = (len.max(1), 0);
        let row = row_for(key.0);
        if let Some((bin, position, pair)) = self.rows[row].as_ref().and_then(|row| row.find(key)) {
            return Some((Slot { row, bin, position }, pair));
        }
        let row = lowest(above(self.nonempty, row))?;
        let bins = self.rows[row].as_ref()?;
        let bin = lowest(bins.nonempty)?;
        Some((Slot { row, bin, position: Position::default() }, bins.bins[bin].first()?))
    }

    pub(super) fn longest(&self) -> Option<u64> {
        let row = self.rows[self.nonempty.checked_ilog2()? as usize].as_ref()?;
        let bin = row.nonempty.checked_ilog2()? as usize;
        row.bins[bin].last().map(|(len, _)| len)
    }

    /// All runs, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Pair> + '_ {
        self.rows.iter().flatten().flat_map(|row| row.bins.iter().flat_map(Bin::iter))
    }

    #[inline]
    pub(super) fn insert(&mut self, pair: Pair) {
        let row = row_for(pair.0);
        self.nonempty |= 1 << row;
        self.rows[row].get_or_insert_with(|| Box::new(Row::with_cut(CUT_MIN))).insert(pair);
    }

    #[inline]
    pub(super) fn remove(&mut self, pair: Pair) {
        let row = row_for(pair.0);
        let Some(bins) = &self.rows[row] else { return };
        let bin = bins.bin_for(pair.0);
        let near = &bins.bins[bin];
        let found = near.after(near.position(pair)).filter(|(_, found)| *found == pair);
        if let Some((position, _)) = found {
            self.remove_at(Slot { row, bin, position });
        }
    }

    #[inline]
    fn remove_at(&mut self, slot: Slot) {
        if let Some(row) = &mut self.rows[slot.row] {
            row.remove(slot.bin, slot.position);
            self.nonempty &= !(u64::from(row.nonempty == 0) << slot.row);
        }
    }

    /// Describes the first broken invariant. An error is a bug in this file.
    pub(super) fn invariants(&self) -> Result<(), String> {
        for (number, row) in self.rows.iter().enumerate() {
            let is_used = row.as_ref().is_some_and(|row| row.nonempty != 0);
            if is_used != (self.nonempty >> number & 1 == 1) {
                return Err(format!("the bitmap is wrong about row {number}"));
            }
            if let Some(row) = row {
                row.invariants(number).map_err(|wrong| format!("row {number}: {wrong}"))?;
            }
        }
        Ok(())
    }
}

impl Row {
    fn invariants(&self, number: usize) -> Result<(), String> {
        for (at, bin) in self.bins.iter().enumerate() {
            if bin.iter().next().is_none() == (self.nonempty >> at & 1 == 1) {
                return Err(format!("the bitmap is wrong about bin {at}"));
            }
            if bin.iter().any(|(len, _)| row_for(len) != number || self.bin_for(len) != at) {
                return Err(format!("bin {at} has a run of another length"));
            }
            match bin {
                Bin::Few(pairs) if !pairs.is_sorted() => return Err(format!("bin {at} is not sorted")),
                Bin::Few(_) => {}
                Bin::Many(list) => list.invariants()?,
            }
        }
        let count = self.bins.iter().flat_map(Bin::iter).count();
        if count == self.count { Ok(()) } else { Err(format!("{} runs are counted, not {count}", self.count)) }
    }
}
