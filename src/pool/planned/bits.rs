//! Bits in words of 64: one bit for each of a row of things that are there or not.

use std::ops::Range;

/// One bit each for a number of things, all clear at first.
#[derive(Debug)]
pub(super) struct Bits(Box<[u64]>);

impl Bits {
    pub(super) fn new(count: usize) -> Bits {
        Bits(vec![0; count.div_ceil(64)].into_boxed_slice())
    }

    #[inline]
    pub(super) fn is_set(&self, at: u32) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// One of these, not none, is set.
    #[inline]
    pub(super) fn any_of(&self, stretch: Range<u32>) -> bool {
        words(stretch).any(|(word, bits)| self.0[word] & bits != 0)
    }

    /// So many in a row of these, not none, are clear.
    pub(super) fn has_clear(&self, stretch: Range<u32>, count: u32) -> bool {
        // Where a run of clear ones may begin: behind the last run of set ones.
        let (mut from, end) = (stretch.start, stretch.end);
        for (word, bits) in words(stretch) {
            let mut set = self.0[word] & bits;
            while set != 0 {
                let first = set.trailing_zeros();
                let at = word as u32 * 64 + first;
                if at - from >= count {
                    return true;
                }
                from = at + (set >> first).trailing_ones();
                // The carry clears the run.
                set &= set.wrapping_add(1 << first);
            }
        }
        end - from >= count
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
    fn any_of_a_stretch_is_as_each_by_itself() {
        const COUNT: u32 = 200;
        let set = [0, 63, 64, 130, 131, 132, 199];
        let mut bits = Bits::new(COUNT as usize);
        set.into_iter().for_each(|at| bits.set_all(at..at + 1));
        bits.set_all(70..71);
        bits.clear_all(70..71);
        let those_set = |bits: &Bits| (0..COUNT).filter(|at| bits.is_set(*at)).collect::<Vec<_>>();
        assert_eq!(those_set(&bits), set);
        for start in 0..COUNT {
            for end in start + 1..=COUNT {
                assert_eq!(bits.any_of(start..end), (start..end).any(|at| bits.is_set(at)), "{start}..{end}");
                let set = set.iter().copied().filter(|at| (start..end).contains(at));
                let edges: Vec<u32> = [start].into_iter().chain(set.flat_map(|at| [at, at + 1])).chain([end]).collect();
                let longest = edges.chunks(2).map(|run| run[1] - run[0]).max().unwrap_or(0);
                assert!(
                    bits.has_clear(start..end, longest) && !bits.has_clear(start..end, longest + 1),
                    "{start}..{end}"
                );
                let mut all = Bits::new(COUNT as usize);
                all.set_all(start..end);
                assert_eq!(those_set(&all), (start..end).collect::<Vec<_>>());
                all.set_all(0..COUNT);
                all.clear_all(start..end);
                assert_eq!(those_set(&all), (0..start).chain(end..COUNT).collect::<Vec<_>>());
            }
        }
    }
}
