//! Which numbers of GPUs of which degrees fit on a mesh, as one number each, and sets of such numbers as bits.
//!
//! Degrees are powers of two, and larger ones are multiples of smaller ones, so stages fit on nodes exactly if for every degree s all stages of s or more GPUs, counted in pieces of s, are no
//! more pieces than the nodes have room for: `sum(degree / s) ≤ nodes · ⌊gpus_per_node / s⌋`. (Placed largest first, a stage of s finds pieces of s taken or free only.) Where s divides a
//! node that follows from the number of GPUs; for every other s there is a digit more. Each digit has room for one stage more than fits, so that adding a stage never carries.

use super::{Config, Mesh, PartitionError};
use crate::limits;

/// What is counted of the stages of a plan.
#[derive(Debug)]
struct Digit {
    /// In pieces of so many GPUs.
    piece: usize,
    /// The most that there can be.
    cap: usize,
    /// What one more is worth.
    stride: usize,
    radix: usize,
}

/// All that can be used of a mesh.
#[derive(Debug)]
pub(super) struct Space {
    digits: Vec<Digit>,
    bits: usize,
    mask: Vec<u64>,
    gpus: usize,
}

impl Space {
    pub(super) fn new(mesh: Mesh, configs: &[Config]) -> Result<Space, PartitionError> {
        let most = configs.iter().map(|config| config.degree as usize).max().unwrap_or(1);
        let powers = (0..=most.ilog2()).map(|power| 1_usize << power);
        let pieces = powers.filter(|piece| *piece == 1 || !mesh.gpus_per_node().is_multiple_of(*piece));
        let (mut digits, mut bits) = (Vec::new(), 1_usize);
        for piece in pieces {
            let cap = mesh.nodes() * (mesh.gpus_per_node() / piece);
            let radix = cap + 1 + most / piece;
            digits.push(Digit { piece, cap, stride: bits, radix });
            bits = bits.saturating_mul(radix);
        }
        if bits > limits::PARTITION_WAYS_MAX {
            let (what, max) = ("ways to use the GPUs", limits::PARTITION_WAYS_MAX);
            return Err(PartitionError::TooLarge { what, is_mesh: true, count: bits, max });
        }
        let mut space = Space { digits, bits, mask: vec![0; bits.div_ceil(64)], gpus: mesh.gpus() };
        for at in 0..bits {
            if space.digits.iter().all(|digit| at / digit.stride % digit.radix <= digit.cap) {
                space.mask[at / 64] |= 1 << (at % 64);
            }
        }
        Ok(space)
    }

    /// How many numbers there are, possible ones and others.
    pub(super) fn bits(&self) -> usize {
        self.bits
    }

    /// How many GPUs are to be used.
    pub(super) fn gpus(&self) -> usize {
        self.gpus
    }

    /// Words of a set.
    pub(super) fn words(&self) -> usize {
        self.mask.len()
    }

    /// What a stage of this degree adds.
    pub(super) fn step(&self, degree: u32) -> usize {
        self.digits.iter().map(|digit| degree as usize / digit.piece * digit.stride).sum()
    }

    pub(super) fn is_possible(&self, at: usize) -> bool {
        self.mask.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// All numbers that use every GPU.
    pub(super) fn full(&self) -> impl Iterator<Item = usize> {
        let radix = self.digits[0].radix;
        (0..self.bits).skip(self.gpus).step_by(radix).filter(|at| self.is_possible(*at))
    }

    /// Adds to a set what becomes of another when a stage is added. What does not fit is left in until [`Space::keep_possible`].
    pub(super) fn or_shifted(&self, into: &mut [u64], from: &[u64], step: usize) {
        let (words, bits) = (step / 64, step % 64);
        let len = into.len().saturating_sub(words);
        if bits == 0 {
            into.iter_mut().skip(words).zip(&from[..len]).for_each(|(into, from)| *into |= from);
            return;
        }
        let mut carried = 0;
        for (into, from) in into.iter_mut().skip(words).zip(&from[..len]) {
            *into |= from << bits | carried;
            carried = from >> (64 - bits);
        }
    }

    /// Takes out of a set what does not fit, and says whether anything is left.
    pub(super) fn keep_possible(&self, set: &mut [u64]) -> bool {
        let mut any = 0;
        for (word, mask) in set.iter_mut().zip(&self.mask) {
            *word &= mask;
            any |= *word;
        }
        any != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Parallelism;
    use crate::rng::Rng;

    /// Whether stages fit, tried one way after the other.
    fn fit(degrees: &[usize], room: &mut [usize]) -> bool {
        let Some((degree, rest)) = degrees.split_first() else { return true };
        for node in 0..room.len() {
            if room[node] >= *degree {
                room[node] -= degree;
                let is_fit = fit(rest, room);
                room[node] += degree;
                if is_fit {
                    return true;
                }
            }
        }
        false
    }

    #[test]
    fn what_is_possible_by_counting_is_what_fits_on_nodes() {
        let mut rng = Rng::new(7);
        for _ in 0..3000 {
            let mesh = Mesh::new(1 + rng.index(3), 1 + rng.index(9)).unwrap();
            let powers = mesh.degree_max().ilog2() + 1;
            let configs: Vec<Config> =
                (0..powers).map(|power| Config { parallelism: Parallelism::Data, degree: 1 << power }).collect();
            let space = Space::new(mesh, &configs).unwrap();
            let degrees: Vec<usize> = (0..1 + rng.index(7)).map(|_| 1 << rng.index(powers as usize)).collect();
            let mut at = 0;
            let mut is_possible = true;
            for degree in &degrees {
                at += space.step(*degree as u32);
                is_possible &= space.is_possible(at);
                // Beyond that digits would carry.
                if !is_possible {
                    break;
                }
            }
            let mut room = vec![mesh.gpus_per_node(); mesh.nodes()];
            assert_eq!(is_possible, fit(&degrees, &mut room), "{mesh:?} {degrees:?}");
            if is_possible {
                let is_full = degrees.iter().sum::<usize>() == mesh.gpus();
                assert_eq!(space.full().any(|full| full == at), is_full, "{mesh:?} {degrees:?}");
            }
        }
    }

    #[test]
    fn sets_are_shifted_bit_by_bit() {
        let config = Config { parallelism: Parallelism::Data, degree: 128 };
        let space = Space::new(Mesh::new(2, 128).unwrap(), &[config]).unwrap();
        let mut rng = Rng::new(3);
        for step in [0, 1, 63, 64, 65, 127, 128] {
            let mut from: Vec<u64> = (0..space.words()).map(|_| rng.next_u64()).collect();
            space.keep_possible(&mut from);
            let mut into = vec![0; space.words()];
            space.or_shifted(&mut into, &from, step);
            space.keep_possible(&mut into);
            for at in 0..space.bits() {
                let was = at >= step && from[(at - step) / 64] >> ((at - step) % 64) & 1 == 1;
                assert_eq!(into[at / 64] >> (at % 64) & 1 == 1, was && at <= 256, "{at} by {step}");
            }
        }
    }

    #[test]
    fn more_than_a_search_takes_is_refused_with_numbers() {
        let config = Config { parallelism: Parallelism::Data, degree: 4 };
        let error = Space::new(Mesh::new(128, 7).unwrap(), &[config]).unwrap_err().to_string();
        assert!(error.contains("ways to use the GPUs are more than the search takes, 2097152"), "{error}");
        assert!(Space::new(Mesh::new(170, 6).unwrap(), &[config]).is_ok());
    }
}
