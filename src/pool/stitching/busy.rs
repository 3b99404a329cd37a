//! Which PBlocks serve somebody, one bit each, and which blocks wait for one of them.
//!
//! A block is a few words with a mask each ([`PartSet`]): whether all of it is idle, taking it and giving it back are a handful of instructions, however
//! large it is, however often it was cut and wherever its parts lie.
//!
//! A block that was found in the way of a live one is not looked at again until the part that it was found to lack is idle: so a search for an exact
//! match meets each obstacle once in the obstacle's life.

use super::blocks::{BlockId, PBlockId};

/// The bits of a pool's PBlocks, by their numbers.
#[derive(Debug)]
pub(super) struct Busy {
    words: Vec<Word>,
    /// Who waits for each PBlock.
    waiting: Vec<Vec<BlockId>>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Word {
    busy: u64,
    /// PBlocks that somebody waits for.
    watched: u64,
}

/// Some bits of one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cell {
    bits: u64,
    word: u32,
}

/// The PBlocks of one block, itself where it is one. Most are in one or two words: those stand here, and what is missing is no bit of a word that nobody has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PartSet {
    bits: [u64; 2],
    words: [u32; 2],
    more: Box<[Cell]>,
}

impl PartSet {
    pub(super) fn of(parts: &[PBlockId]) -> PartSet {
        PartSet::of_cells(parts.iter().map(|part| Cell::of(*part)).collect())
    }

    /// One more, which was not among them.
    pub(super) fn insert(&mut self, part: PBlockId) {
        let new = Cell::of(part);
        match self.bits_of(new.word) {
            Some(bits) => *bits |= new.bits,
            None => *self = PartSet::of_cells(self.iter().filter(|cell| cell.bits != 0).chain([new]).collect()),
        }
    }

    /// One less, which was among them.
    pub(super) fn remove(&mut self, part: PBlockId) {
        let gone = Cell::of(part);
        let bits = self.bits_of(gone.word).expect("it was among them");
        *bits &= !gone.bits;
        if *bits == 0 {
            *self = PartSet::of_cells(self.iter().filter(|cell| cell.bits != 0).collect());
        }
    }

    fn bits_of(&mut self, word: u32) -> Option<&mut u64> {
        match self.words.iter().position(|known| *known == word) {
            Some(at) => Some(&mut self.bits[at]),
            None => self.more.binary_search_by_key(&word, |cell| cell.word).ok().map(|at| &mut self.more[at].bits),
        }
    }

    fn of_cells(mut cells: Vec<Cell>) -> PartSet {
        cells.sort_unstable_by_key(|cell| cell.word);
        cells.dedup_by(|cell, before| {
            let is_same = cell.word == before.word;
            before.bits |= if is_same { cell.bits } else { 0 };
            is_same
        });
        let mut cells = cells.into_iter();
        let mut inline = || cells.next().unwrap_or(Cell { bits: 0, word: NOBODYS });
        let (first, second) = (inline(), inline());
        PartSet { bits: [first.bits, second.bits], words: [first.word, second.word], more: cells.collect() }
    }

    #[inline]
    fn iter(&self) -> impl Iterator<Item = Cell> + '_ {
        let inline = [0, 1].map(|at| Cell { bits: self.bits[at], word: self.words[at] });
        inline.into_iter().chain(self.more.iter().copied())
    }

    /// One by one, from the smallest number up.
    pub(super) fn parts(&self) -> impl Iterator<Item = PBlockId> + '_ {
        self.iter()
            .flat_map(|cell| (0..64).filter(move |bit| cell.bits >> bit & 1 == 1).map(move |bit| cell.part_at(bit)))
    }
}

/// The word that no PBlock has.
const NOBODYS: u32 = 0;

impl Cell {
    fn of(part: PBlockId) -> Cell {
        Cell { bits: 1 << (part % 64), word: NOBODYS + 1 + (part / 64) as u32 }
    }

    /// Whose the bit with this number is.
    fn part_at(self, bit: u32) -> PBlockId {
        (self.word - NOBODYS - 1) as usize * 64 + bit as usize
    }
}

impl Busy {
    pub(super) fn new() -> Busy {
        Busy { words: vec![Word::default()], waiting: Vec::new() }
    }

    /// There is a PBlock with this number, which is idle.
    pub(super) fn insert(&mut self, part: PBlockId) {
        let words = Cell::of(part).word as usize + 1;
        if self.words.len() < words {
            self.words.resize(words, Word::default());
        }
    }

    #[inline]
    pub(super) fn is_idle(&self, parts: &PartSet) -> bool {
        let busy = |at: usize| self.words[parts.words[at] as usize].busy & parts.bits[at];
        busy(0) | busy(1) == 0 && parts.more.iter().all(|cell| self.words[cell.word as usize].busy & cell.bits == 0)
    }

    #[inline]
    pub(super) fn is_busy(&self, part: PBlockId) -> bool {
        let cell = Cell::of(part);
        self.words[cell.word as usize].busy & cell.bits != 0
    }

    /// The first of these that serves somebody.
    pub(super) fn first_busy(&self, parts: &PartSet) -> Option<PBlockId> {
        parts.iter().find_map(|cell| {
            let busy = self.words[cell.word as usize].busy & cell.bits;
            (busy != 0).then(|| cell.part_at(busy.trailing_zeros()))
        })
    }

    /// These serve somebody now, if all of them are idle; else nothing changes.
    #[inline]
    pub(super) fn try_occupy(&mut self, parts: &PartSet) -> bool {
        let busy = |at: usize| self.words[parts.words[at] as usize].busy & parts.bits[at];
        if busy(0) | busy(1) != 0 {
            return false;
        }
        for at in 0..2 {
            self.words[parts.words[at] as usize].busy |= parts.bits[at];
        }
        for (at, cell) in parts.more.iter().enumerate() {
            let word = &mut self.words[cell.word as usize];
            if word.busy & cell.bits != 0 {
                self.undo(parts, at);
                return false;
            }
            word.busy |= cell.bits;
        }
        true
    }

    /// Takes back what [`Busy::try_occupy`] did up to this cell of `more`.
    #[cold]
    fn undo(&mut self, parts: &PartSet, end: usize) {
        for cell in parts.iter().take(2 + end) {
            self.words[cell.word as usize].busy &= !cell.bits;
        }
    }

    /// These are idle again. True when somebody waits for one of them, and is to be [`Busy::woken`].
    #[inline]
    pub(super) fn vacate(&mut self, parts: &PartSet) -> bool {
        let mut watched = 0;
        for at in 0..2 {
            let word = &mut self.words[parts.words[at] as usize];
            word.busy &= !parts.bits[at];
            watched |= word.watched & parts.bits[at];
        }
        for cell in &parts.more {
            let word = &mut self.words[cell.word as usize];
            word.busy &= !cell.bits;
            watched |= word.watched & cell.bits;
        }
        watched != 0
    }

    /// Everybody who waits for one of these; they wait no longer.
    pub(super) fn woken(&mut self, parts: &PartSet) -> Vec<BlockId> {
        let mut woken = Vec::new();
        for cell in parts.iter() {
            let word = &mut self.words[cell.word as usize];
            let mut watched = word.watched & cell.bits;
            word.watched &= !cell.bits;
            while watched != 0 {
                woken.append(&mut self.waiting[cell.part_at(watched.trailing_zeros())]);
                watched &= watched - 1;
            }
        }
        woken
    }

    /// `block` is to be looked at again when this part, which is busy, is idle.
    pub(super) fn wait(&mut self, part: PBlockId, block: BlockId) {
        if self.waiting.len() <= part {
            self.waiting.resize_with(part + 1, Vec::new);
        }
        self.waiting[part].push(block);
        let cell = Cell::of(part);
        self.words[cell.word as usize].watched |= cell.bits;
    }

    /// `block` waits no longer.
    pub(super) fn leave(&mut self, part: PBlockId, block: BlockId) {
        let waiting = &mut self.waiting[part];
        let place = waiting.iter().position(|other| *other == block).expect("a block waits where it says");
        waiting.swap_remove(place);
        if waiting.is_empty() {
            let cell = Cell::of(part);
            self.words[cell.word as usize].watched &= !cell.bits;
        }
    }

    /// Everybody who waits, with what for, for the audit.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (PBlockId, BlockId)> + '_ {
        self.waiting.iter().enumerate().flat_map(|(part, blocks)| blocks.iter().map(move |block| (part, *block)))
    }

    /// What is wrong with the words, for the audit: who waits must be woken, and nobody has the word that is nobody's.
    pub(super) fn invariants(&self) -> Result<(), String> {
        let nobodys = self.words[NOBODYS as usize];
        if nobodys.busy | nobodys.watched != 0 {
            return Err(format!("somebody has the word that is nobody's: {nobodys:?}"));
        }
        let watched: u32 = self.words.iter().map(|word| word.watched.count_ones()).sum();
        let awaited = self.waiting.iter().filter(|blocks| !blocks.is_empty()).count();
        let is_watched = |part: PBlockId| {
            let cell = Cell::of(part);
            self.words[cell.word as usize].watched & cell.bits != 0
        };
        match self.waiting().find(|(part, _)| !is_watched(*part)) {
            Some((part, block)) => Err(format!("{block:?} waits for part {part} and would not be woken")),
            None if watched as usize != awaited => Err(format!("{watched} parts are watched, {awaited} awaited")),
            None => Ok(()),
        }
    }

    /// How many serve somebody.
    pub(super) fn count(&self) -> usize {
        self.words.iter().map(|word| word.busy.count_ones() as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool of `count` PBlocks, all idle.
    fn busy_of(count: usize) -> Busy {
        let mut busy = Busy::new();
        (0..count).for_each(|part| busy.insert(part));
        busy
    }

    fn set(parts: impl IntoIterator<Item = PBlockId>) -> PartSet {
        PartSet::of(&parts.into_iter().collect::<Vec<_>>())
    }

    #[test]
    fn parts_are_set_found_and_cleared_in_however_many_words() {
        let sets =
            [vec![0], vec![63, 64], vec![199, 0], (5..200).collect(), (0..200).rev().collect(), vec![1, 70, 130]];
        for mut parts in sets {
            let mut busy = busy_of(200);
            let block = PartSet::of(&parts);
            parts.sort_unstable();
            assert!(block.parts().eq(parts.iter().copied()));
            assert!(busy.is_idle(&block) && busy.try_occupy(&block) && !busy.is_idle(&block));
            assert!((0..200).all(|part| busy.is_busy(part) == parts.contains(&part)));
            assert_eq!((busy.count(), busy.first_busy(&set(0..200))), (parts.len(), parts.first().copied()));
            assert_eq!(busy.first_busy(&set(parts[parts.len() - 1]..200)), parts.last().copied());
            let others: Vec<_> = (0..200).filter(|part| !parts.contains(part)).collect();
            assert!(busy.is_idle(&PartSet::of(&others)));
            assert!(!busy.vacate(&block));
            assert_eq!(busy.count(), 0);
        }
    }

    #[test]
    fn a_set_that_grows_and_shrinks_is_the_set_of_what_is_in_it() {
        let mut rng = crate::rng::Rng::new(7);
        let (mut grown, mut has) = (set([3]), std::collections::BTreeSet::from([3]));
        for _ in 0..2000 {
            let part = rng.index(400);
            match has.insert(part) {
                true => grown.insert(part),
                false if has.len() > 1 => {
                    has.remove(&part);
                    grown.remove(part);
                }
                false => {}
            }
            assert_eq!(grown, set(has.iter().copied()));
            assert!(grown.parts().eq(has.iter().copied()));
        }
    }

    #[test]
    fn a_block_with_one_busy_part_occupies_none() {
        let mut busy = busy_of(640);
        let all = set(0..640);
        for part in [0, 64, 128, 400, 639] {
            let one = set([part]);
            assert!(busy.try_occupy(&one));
            assert!(!busy.try_occupy(&all) && !busy.try_occupy(&one));
            assert_eq!(busy.count(), 1, "with {part} busy");
            busy.vacate(&one);
        }
        assert!(busy.try_occupy(&all));
    }

    #[test]
    fn whoever_waits_is_woken_by_whatever_word_its_part_is_in() {
        for part in [0, 70, 130, 199] {
            let (mut busy, all) = (busy_of(200), set(0..200));
            assert!(busy.try_occupy(&all));
            busy.wait(part, BlockId::S(1));
            assert!(busy.vacate(&all));
            assert_eq!(busy.woken(&all), [BlockId::S(1)]);
        }
    }

    #[test]
    fn whoever_waits_is_woken_once_when_its_part_is_idle() {
        let mut busy = busy_of(130);
        let (front, back) = (set(0..70), set(70..130));
        assert!(busy.try_occupy(&set(0..130)));
        busy.wait(70, BlockId::S(1));
        busy.wait(70, BlockId::P(2));
        busy.wait(129, BlockId::S(3));
        busy.leave(70, BlockId::P(2));
        assert!(!busy.vacate(&front));
        assert_eq!(busy.woken(&front), []);
        assert!(busy.vacate(&back));
        assert_eq!(busy.woken(&back), [BlockId::S(1), BlockId::S(3)]);
        assert!(busy.try_occupy(&back));
        assert!(!busy.vacate(&back));
    }
}
