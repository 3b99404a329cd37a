//! Bits in words of 64: one bit for each of a row of things that are there or not.

use std::ops::Range;

/// One bit each for a number of things, all clear at first.
#[derive(Debug)]
pub(super) struct Bits(Box<[u64]>);

impl Bits {
    pub(super) fn new(count: usize) -> Bits {
        Bits(vec![0; count.div_ceil(64)].into_boxed_slice())
    }

    /// As many bits as these, from now on; new ones are clear.
    pub(super) fn resize(&mut self, count: usize) {
        let mut words = std::mem::take(&mut self.0).into_vec();
        words.resize(count.div_ceil(64), 0);
        if let Some(last) = words.last_mut().filter(|_| !count.is_multiple_of(64)) {
            *last &= u64::MAX >> (64 - count % 64);
        }
        self.0 = words.into_boxed_slice();
    }

    #[inline]
    pub(super) fn is_set(&self, at: u32) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    #[inline]
    pub(super) fn set(&mut self, at: u32) {
        self.0[at as usize / 64] |= 1 << (at % 64);
    }

    #[inline]
    pub(super) fn clear(&mut self, at: u32) {
        self.0[at as usize / 64] &= !(1 << (at % 64));
    }

    /// Those that are set.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().zip(0..).flat_map(|(word, number): (&u64, u32)| {
            let rest = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
            let words = std::iter::successors(Some(*word).filter(|word| *word != 0), rest);
            words.map(move |word| number * 64 + word.trailing_zeros())
        })
    }

    /// One of these, not none, is set.
    #[inline]
    pub(super) fn any_of(&self, stretch: Range<u32>) -> bool {
        words(stretch).any(|(word, bits)| self.0[word] & bits != 0)
    }

    /// Sets all of these, not none.
    #[inline]
    pub(super) fn set_all(&mut self, stretch: Range<u32>) {
        words(stretch).for_each(|(word, bits)| self.0[word] |= bits);
    }

    /// Clears all of these, not none.
    #[inline]
    pub(super) fn clear_all(&mut self, stretch: Range<u32>) {
        words(stretch).for_each(|(word, bits)| self.0[word] &= !bits);
    }
}

/// The words of a stretch, not empty, and which bits of them.
#[inline]
fn words(stretch: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (stretch.start / 64, (stretch.end - 1) / 64);
    (first..=last).map(move |word| {
        let low = if word == first { stretch.start % 64 } else { 0 };
        let high = if word == last { (stretch.end - 1) % 64 } else { 63 };
        (word as usize, (u64::MAX >> (63 - (high - low))) << low)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_come_are_clear_and_those_that_go_are_gone() {
        let mut bits = Bits::new(3);
        [0, 2].into_iter().for_each(|at| bits.set(at));
        bits.resize(130);
        bits.set(129);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 2, 129]);
        bits.resize(2);
        bits.resize(130);
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn any_of_a_stretch_is_as_each_by_itself() {
        const COUNT: u32 = 200;
        let set = [0, 63, 64, 130, 199];
        let mut bits = Bits::new(COUNT as usize);
        set.into_iter().for_each(|at| bits.set(at));
        bits.set(70);
        bits.clear(70);
        assert!((0..COUNT).all(|at| bits.is_set(at) == set.contains(&at)));
        assert_eq!(bits.iter().collect::<Vec<_>>(), set);
        for start in 0..COUNT {
            for end in start + 1..=COUNT {
                assert_eq!(bits.any_of(start..end), (start..end).any(|at| bits.is_set(at)), "{start}..{end}");
                let mut all = Bits::new(COUNT as usize);
                all.set_all(start..end);
                assert_eq!(all.iter().collect::<Vec<_>>(), (start..end).collect::<Vec<_>>());
                all.set_all(0..COUNT);
                all.clear_all(start..end);
                assert_eq!(all.iter().collect::<Vec<_>>(), (0..start).chain(end..COUNT).collect::<Vec<_>>());
            }
        }
    }
}
