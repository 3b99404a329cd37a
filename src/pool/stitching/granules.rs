//! Which granules of the pool serve somebody, one bit each, and which blocks wait for one of them.
//!
//! Every range has its granules in words of its own, so a block is a few words with a mask each ([`Cells`]): whether all of it is idle, taking it
//! and giving it back are a handful of instructions, however often it was cut and wherever its parts lie.
//!
//! A block that was found in the way of a live one is not looked at again until the granule that it was found to lack is idle: so a search for an exact
//! match meets each obstacle once in the obstacle's life.

use std::collections::BTreeMap;
use std::ops::Range;

use super::blocks::BlockId;
use crate::pool::bits::words;

/// The granules of a pool, numbered through.
#[derive(Debug)]
pub(super) struct Granules {
    words: Vec<Word>,
    /// Who waits for each granule.
    waiting: Vec<Vec<BlockId>>,
    /// Words that no range has: from where, how many. No two touch.
    vacant: BTreeMap<u32, u32>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Word {
    busy: u64,
    /// Granules that somebody waits for.
    watched: u64,
}

/// Some bits of one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cell {
    bits: u64,
    word: u32,
}

/// The granules of one block. Most have one or two words: those stand here, and what is missing is no bit of a word that nobody has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cells {
    bits: [u64; 2],
    words: [u32; 2],
    more: Box<[Cell]>,
}

impl Cells {
    /// The granules in all of these stretches.
    pub(super) fn of(stretches: impl IntoIterator<Item = Range<u32>>) -> Cells {
        let mut cells: Vec<Cell> =
            stretches.into_iter().flat_map(words).map(|(word, bits)| Cell { bits, word }).collect();
        cells.sort_unstable_by_key(|cell| cell.word);
        cells.dedup_by(|cell, before| {
            let is_same = cell.word == before.word;
            before.bits |= if is_same { cell.bits } else { 0 };
            is_same
        });
        let mut cells = cells.into_iter();
        let mut inline = || cells.next().unwrap_or(Cell { bits: 0, word: NOBODYS });
        let (first, second) = (inline(), inline());
        Cells { bits: [first.bits, second.bits], words: [first.word, second.word], more: cells.collect() }
    }

    #[inline]
    fn iter(&self) -> impl Iterator<Item = Cell> + '_ {
        let inline = [0, 1].map(|at| Cell { bits: self.bits[at], word: self.words[at] });
        inline.into_iter().chain(self.more.iter().copied())
    }

    /// The granules one by one.
    pub(super) fn granules(&self) -> impl Iterator<Item = u32> + '_ {
        self.iter()
            .flat_map(|cell| (0..64).filter(move |bit| cell.bits >> bit & 1 == 1).map(move |bit| cell.word * 64 + bit))
    }
}

/// The word that no range has.
const NOBODYS: u32 = 0;

impl Granules {
    pub(super) fn new() -> Granules {
        Granules { words: vec![Word::default()], waiting: Vec::new(), vacant: BTreeMap::new() }
    }

    /// Numbers for `count` granules side by side, all idle; the first of them.
    pub(super) fn insert(&mut self, count: u32) -> u32 {
        let wanted = count.div_ceil(64);
        let found = self.vacant.iter().find(|(_, len)| **len >= wanted).map(|(start, len)| (*start, *len));
        let start = match found {
            Some((start, len)) => {
                self.vacant.remove(&start);
                if len > wanted {
                    self.vacant.insert(start + wanted, len - wanted);
                }
                start
            }
            None => {
                let start = self.words.len() as u32;
                self.words.resize(self.words.len() + wanted as usize, Word::default());
                start
            }
        };
        start * 64
    }

    /// The range with these numbers, all idle, is gone.
    pub(super) fn remove(&mut self, first: u32, count: u32) {
        let (mut start, mut len) = (first / 64, count.div_ceil(64));
        let words = &self.words[start as usize..(start + len) as usize];
        assert!(words.iter().all(|word| word.busy | word.watched == 0), "nobody uses a range that goes");
        if let Some(after) = self.vacant.remove(&(start + len)) {
            len += after;
        }
        if let Some((before, before_len)) = self.vacant.range(..start).next_back().map(|(at, len)| (*at, *len))
            && before + before_len == start
        {
            (start, len) = (before, before_len + len);
        }
        self.vacant.insert(start, len);
    }

    #[inline]
    pub(super) fn is_idle(&self, cells: &Cells) -> bool {
        let busy = |at: usize| self.words[cells.words[at] as usize].busy & cells.bits[at];
        busy(0) | busy(1) == 0 && cells.more.iter().all(|cell| self.words[cell.word as usize].busy & cell.bits == 0)
    }

    pub(super) fn is_busy(&self, granule: u32) -> bool {
        self.words[granule as usize / 64].busy >> (granule % 64) & 1 == 1
    }

    /// The first of these that serves somebody.
    pub(super) fn first_busy(&self, cells: &Cells) -> Option<u32> {
        cells.iter().find_map(|cell| {
            let busy = self.words[cell.word as usize].busy & cell.bits;
            (busy != 0).then(|| cell.word * 64 + busy.trailing_zeros())
        })
    }

    /// These serve somebody now, if all of them are idle; else nothing changes.
    #[inline]
    pub(super) fn try_occupy(&mut self, cells: &Cells) -> bool {
        let busy = |at: usize| self.words[cells.words[at] as usize].busy & cells.bits[at];
        if busy(0) | busy(1) != 0 {
            return false;
        }
        for at in 0..2 {
            self.words[cells.words[at] as usize].busy |= cells.bits[at];
        }
        for (at, cell) in cells.more.iter().enumerate() {
            let word = &mut self.words[cell.word as usize];
            if word.busy & cell.bits != 0 {
                self.undo(cells, at);
                return false;
            }
            word.busy |= cell.bits;
        }
        true
    }

    /// Takes back what [`Granules::try_occupy`] did up to this cell of `more`.
    #[cold]
    fn undo(&mut self, cells: &Cells, end: usize) {
        for cell in cells.iter().take(2 + end) {
            self.words[cell.word as usize].busy &= !cell.bits;
        }
    }

    /// These are idle again. True when somebody waits for one of them, and is to be [`Granules::woken`].
    #[inline]
    pub(super) fn vacate(&mut self, cells: &Cells) -> bool {
        let mut watched = 0;
        for at in 0..2 {
            let word = &mut self.words[cells.words[at] as usize];
            word.busy &= !cells.bits[at];
            watched |= word.watched & cells.bits[at];
        }
        for cell in &cells.more {
            let word = &mut self.words[cell.word as usize];
            word.busy &= !cell.bits;
            watched |= word.watched & cell.bits;
        }
        watched != 0
    }

    /// Everybody who waits for one of these; they wait no longer.
    pub(super) fn woken(&mut self, cells: &Cells) -> Vec<BlockId> {
        let mut woken = Vec::new();
        for cell in cells.iter() {
            let word = &mut self.words[cell.word as usize];
            let mut watched = word.watched & cell.bits;
            word.watched &= !cell.bits;
            while watched != 0 {
                let granule = cell.word * 64 + watched.trailing_zeros();
                watched &= watched - 1;
                woken.append(&mut self.waiting[granule as usize]);
            }
        }
        woken
    }

    /// `block` is to be looked at again when this granule, which is busy, is idle.
    pub(super) fn wait(&mut self, granule: u32, block: BlockId) {
        if self.waiting.len() <= granule as usize {
            self.waiting.resize_with(self.words.len() * 64, Vec::new);
        }
        self.waiting[granule as usize].push(block);
        self.words[granule as usize / 64].watched |= 1 << (granule % 64);
    }

    /// `block` waits no longer.
    pub(super) fn leave(&mut self, granule: u32, block: BlockId) {
        let waiting = &mut self.waiting[granule as usize];
        let place = waiting.iter().position(|other| *other == block).expect("a block waits where it says");
        waiting.swap_remove(place);
        if waiting.is_empty() {
            self.words[granule as usize / 64].watched &= !(1 << (granule % 64));
        }
    }

    /// Everybody who waits, with what for, for the audit.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (u32, BlockId)> + '_ {
        (0..).zip(&self.waiting).flat_map(|(at, blocks)| blocks.iter().map(move |block| (at, *block)))
    }

    /// How many serve somebody.
    pub(super) fn busy_count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.busy.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(stretch: Range<u32>) -> Cells {
        Cells::of([stretch])
    }

    #[test]
    fn stretches_of_bits_are_set_found_and_cleared_across_words() {
        for (start, end) in [(0, 1), (63, 64), (63, 65), (0, 64), (64, 128), (5, 200), (0, 200), (199, 200)] {
            let mut granules = Granules::new();
            let first = granules.insert(200);
            let block = cells(first + start..first + end);
            assert!(granules.is_idle(&block));
            assert!(granules.try_occupy(&block));
            for at in 0..200 {
                assert_eq!(granules.is_busy(first + at), (start..end).contains(&at), "{at} of {start}..{end}");
            }
            assert_eq!(block.granules().count() as u32, end - start);
            assert_eq!(granules.busy_count(), u64::from(end - start));
            assert_eq!(granules.first_busy(&cells(first..first + 200)), Some(first + start));
            assert_eq!(granules.first_busy(&cells(first + end - 1..first + 200)), Some(first + end - 1));
            assert!(start == 0 || granules.is_idle(&cells(first..first + start)));
            assert!(!granules.vacate(&block));
            assert_eq!(granules.busy_count(), 0);
        }
    }

    #[test]
    fn a_block_whose_last_granule_is_busy_occupies_none() {
        let mut granules = Granules::new();
        let first = granules.insert(640);
        let all = cells(first..first + 640);
        for busy in [0, 64, 128, 400, 639] {
            let one = cells(first + busy..first + busy + 1);
            assert!(granules.try_occupy(&one));
            assert!(!granules.try_occupy(&all) && !granules.try_occupy(&one));
            assert_eq!(granules.busy_count(), 1, "with {busy} busy");
            granules.vacate(&one);
        }
        assert!(granules.try_occupy(&all));
    }

    #[test]
    fn whoever_waits_is_woken_once_when_its_granule_is_idle() {
        let mut granules = Granules::new();
        let first = granules.insert(130);
        let all = cells(first..first + 130);
        let (front, back) = (cells(first..first + 70), cells(first + 70..first + 130));
        assert!(granules.try_occupy(&all));
        granules.wait(first + 70, BlockId::S(1));
        granules.wait(first + 70, BlockId::P(2));
        granules.wait(first + 129, BlockId::S(3));
        granules.leave(first + 70, BlockId::P(2));
        assert!(!granules.vacate(&front));
        assert_eq!(granules.woken(&front), []);
        assert!(granules.vacate(&back));
        assert_eq!(granules.woken(&back), [BlockId::S(1), BlockId::S(3)]);
        assert!(granules.try_occupy(&back));
        assert!(!granules.vacate(&back));
    }

    #[test]
    fn the_words_of_ranges_that_went_serve_others() {
        let mut granules = Granules::new();
        let ranges: Vec<(u32, u32)> = [64, 1, 300, 65].map(|count| (granules.insert(count), count)).to_vec();
        let words = granules.words.len();
        let mut of_each: Vec<u32> = ranges.iter().flat_map(|(first, count)| *first..first + count).collect();
        of_each.sort_unstable();
        of_each.dedup();
        assert_eq!(of_each.len(), 64 + 1 + 300 + 65);
        assert!(of_each[0] >= 64, "the first word is nobody's");
        for at in [1, 3, 2, 0] {
            granules.remove(ranges[at].0, ranges[at].1);
        }
        assert_eq!(granules.vacant.iter().collect::<Vec<_>>(), [(&1, &(words as u32 - 1))]);
        let again = granules.insert(128);
        assert_eq!((again, granules.words.len()), (64, words));
        assert!(granules.try_occupy(&cells(again..again + 128)));
        assert_eq!(granules.busy_count(), 128);
    }
}
