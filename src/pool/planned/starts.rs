//! Where things begin in a row of places: finds the first one at or behind a place in a few steps,
//! however many there are.
//!
//! A bit for each place, a bit for each word of those that is not zero, and so on: six levels reach 2³⁶ places, which is more than any range of addresses has.

const LEVELS: usize = 6;

/// A set of places.
#[derive(Debug, Default)]
pub(super) struct Starts {
    levels: [Vec<u64>; LEVELS],
}

impl Starts {
    pub(super) fn set(&mut self, at: u64) {
        let mut at = at as usize;
        for words in &mut self.levels {
            let (word, bit) = (at / 64, 1 << (at % 64));
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            let was = words[word];
            words[word] |= bit;
            if was != 0 {
                return;
            }
            at = word;
        }
    }

    pub(super) fn clear(&mut self, at: u64) {
        let mut at = at as usize;
        for words in &mut self.levels {
            let (word, bit) = (at / 64, 1 << (at % 64));
            words[word] &= !bit;
            if words[word] != 0 {
                return;
            }
            at = word;
        }
    }

    /// The first that is set, from `at` on.
    pub(super) fn first_from(&self, at: u64) -> Option<u64> {
        let mut at = at as usize;
        for (level, words) in self.levels.iter().enumerate() {
            let word = at / 64;
            let bits = words.get(word)? & u64::MAX << (at % 64);
            if bits != 0 {
                let mut found = word * 64 + bits.trailing_zeros() as usize;
                for words in self.levels[..level].iter().rev() {
                    found = found * 64 + words[found].trailing_zeros() as usize;
                }
                return Some(found as u64);
            }
            at = word + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::rng::Rng;

    #[test]
    fn the_first_from_a_place_on_is_found_as_in_a_plain_set() {
        let mut rng = Rng::new(9);
        let (mut starts, mut plain) = (Starts::default(), BTreeSet::new());
        for _ in 0..40_000 {
            let shift = rng.below(22);
            let at = rng.below(1 << shift);
            match rng.below(3) {
                0 if plain.contains(&at) => {
                    plain.remove(&at);
                    starts.clear(at);
                }
                1 => {
                    plain.insert(at);
                    starts.set(at);
                }
                _ => assert_eq!(starts.first_from(at), plain.range(at..).next().copied(), "{at}"),
            }
        }
        assert!(plain.len() > 100);
    }
}
