//! Which granules of a range serve somebody, one bit each, and which blocks wait for one of them.
//!
//! A block that was found in the way of a live one is not looked at again until the granule that it was found to lack is idle: so a search for an exact
//! match meets each obstacle once in the obstacle's life, and testing a whole block takes a word per 64 granules, however often it was cut.

use std::ops::Range;

use super::blocks::BlockId;

#[derive(Debug)]
pub(super) struct Granules {
    busy: Vec<u64>,
    /// Granules that somebody waits for.
    watched: Vec<u64>,
    /// Who, by granule; empty until there is the first.
    waiting: Vec<Vec<BlockId>>,
    count: u32,
}

/// The words that hold these bits, with a mask of the bits in each.
#[inline]
fn words(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (bits.start / 64, bits.end.saturating_sub(1) / 64);
    (first..=last).map(move |word| {
        let low = if word == first { bits.start % 64 } else { 0 };
        let high = if word == last { (bits.end - 1) % 64 } else { 63 };
        (word as usize, (u64::MAX >> (63 - (high - low))) << low)
    })
}

impl Granules {
    /// All idle.
    pub(super) fn new(count: u32) -> Granules {
        let words = vec![0; count.div_ceil(64) as usize];
        Granules { busy: words.clone(), watched: words, waiting: Vec::new(), count }
    }

    #[inline]
    pub(super) fn is_busy(&self, at: u32) -> bool {
        self.busy[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// The first of these, not none, that serves somebody.
    #[inline]
    pub(super) fn first_busy(&self, slots: Range<u32>) -> Option<u32> {
        words(slots).find_map(|(word, mask)| {
            let busy = self.busy[word] & mask;
            (busy != 0).then(|| word as u32 * 64 + busy.trailing_zeros())
        })
    }

    /// These serve somebody now, and nobody else.
    #[inline]
    pub(super) fn occupy(&mut self, slots: Range<u32>) {
        for (word, mask) in words(slots) {
            assert!(self.busy[word] & mask == 0, "no granule serves two allocations");
            self.busy[word] |= mask;
        }
    }

    /// These are idle again. True when somebody waits for one of them, and is to be [`Granules::woken`].
    #[inline]
    pub(super) fn vacate(&mut self, slots: Range<u32>) -> bool {
        let mut watched = 0;
        for (word, mask) in words(slots) {
            self.busy[word] &= !mask;
            watched |= self.watched[word] & mask;
        }
        watched != 0
    }

    /// Everybody who waits for one of these; they wait no longer.
    pub(super) fn woken(&mut self, slots: Range<u32>) -> Vec<BlockId> {
        let mut woken = Vec::new();
        for (word, mask) in words(slots) {
            let mut watched = self.watched[word] & mask;
            self.watched[word] &= !mask;
            while watched != 0 {
                let at = word * 64 + watched.trailing_zeros() as usize;
                watched &= watched - 1;
                woken.append(&mut self.waiting[at]);
            }
        }
        woken
    }

    /// `block` is to be looked at again when this granule, which is busy, is idle.
    pub(super) fn wait(&mut self, at: u32, block: BlockId) {
        if self.waiting.is_empty() {
            self.waiting.resize_with(self.count as usize, Vec::new);
        }
        self.waiting[at as usize].push(block);
        self.watched[at as usize / 64] |= 1 << (at % 64);
    }

    /// `block` waits no longer.
    pub(super) fn leave(&mut self, at: u32, block: BlockId) {
        let waiting = &mut self.waiting[at as usize];
        let place = waiting.iter().position(|other| *other == block).expect("a block waits where it says");
        waiting.swap_remove(place);
        if waiting.is_empty() {
            self.watched[at as usize / 64] &= !(1 << (at % 64));
        }
    }

    /// Everybody who waits, with what for, for the audit.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (u32, BlockId)> + '_ {
        self.waiting.iter().enumerate().flat_map(|(at, blocks)| blocks.iter().map(move |block| (at as u32, *block)))
    }

    /// How many serve somebody.
    pub(super) fn busy_count(&self) -> u64 {
        self.busy.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_of_bits_are_set_found_and_cleared_across_words() {
        for (start, end) in [(0, 1), (63, 64), (63, 65), (0, 64), (64, 128), (5, 200), (0, 200), (199, 200)] {
            let mut granules = Granules::new(200);
            granules.occupy(start..end);
            for at in 0..200 {
                assert_eq!(granules.is_busy(at), (start..end).contains(&at), "{at} of {start}..{end}");
            }
            assert_eq!(granules.busy_count(), u64::from(end - start));
            assert_eq!(granules.first_busy(0..200), Some(start));
            assert_eq!(granules.first_busy(end - 1..200), Some(end - 1));
            assert!(start == 0 || granules.first_busy(0..start).is_none());
            assert!(!granules.vacate(start..end));
            assert_eq!(granules.busy_count(), 0);
        }
    }

    #[test]
    fn whoever_waits_is_woken_once_when_its_granule_is_idle() {
        let mut granules = Granules::new(130);
        granules.occupy(0..130);
        granules.wait(70, BlockId::S(1));
        granules.wait(70, BlockId::P(2));
        granules.wait(129, BlockId::S(3));
        granules.leave(70, BlockId::P(2));
        assert!(!granules.vacate(0..70));
        assert_eq!(granules.woken(0..70), []);
        assert!(granules.vacate(70..130));
        assert_eq!(granules.woken(70..130), [BlockId::S(1), BlockId::S(3)]);
        granules.occupy(70..130);
        assert!(!granules.vacate(70..130));
    }
}
