//! Flags in bytes: what is set and cleared with every allocation, and seldom walked over.
//!
//! Not for: what is asked for in stretches ([`super::bits`]).

/// One flag each for a number of things, all clear at first.
#[derive(Debug)]
pub(super) struct Flags(Box<[bool]>);

/// So many are looked at at once for one that is set.
const STRIDE: usize = 64;

impl Flags {
    pub(super) fn new(count: usize) -> Flags {
        Flags(vec![false; count].into_boxed_slice())
    }

    #[inline]
    pub(super) fn is_set(&self, at: u32) -> bool {
        self.0[at as usize]
    }

    #[inline]
    pub(super) fn set(&mut self, at: u32) {
        self.0[at as usize] = true;
    }

    #[inline]
    pub(super) fn clear(&mut self, at: u32) {
        self.0[at as usize] = false;
    }

    /// Those that are set, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let strides = self.0.chunks(STRIDE).zip((0..).step_by(STRIDE));
        // Without an early end, which would keep it from being a few instructions.
        let some = strides.filter(|(flags, _)| flags.iter().fold(false, |any, flag| any | flag));
        some.flat_map(|(flags, first)| (first..).zip(flags).filter(|(_, flag)| **flag).map(|(at, _)| at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_set_are_walked_over_in_order() {
        let mut flags = Flags::new(200);
        assert_eq!(flags.iter().count(), 0);
        [199, 0, 64, 63, 5].into_iter().for_each(|at| flags.set(at));
        flags.clear(5);
        assert_eq!(flags.iter().collect::<Vec<u32>>(), [0, 63, 64, 199]);
        assert!((0..200).all(|at| flags.is_set(at) == [0, 63, 64, 199].contains(&at)));
    }
}
