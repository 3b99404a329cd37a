//! Algorithm 1: requests of one size into as few memory layers as can be.
//!
//! A layer is as high as the requests are, and has them one after the other. In the order in which they begin each goes behind the one that ended last before it, or begins a layer. That is colouring an
//! interval graph greedily: a new layer is begun only where all others are in use, so there are as many as are live at one time.
//!
//! Not for: sizes, or what fits beside larger requests (`free_space`).
//!
//! Invariant: no two lifetimes in one layer overlap.

use std::collections::BTreeSet;

use crate::units::{Lifetime, Tick};

/// The number of the layer of each lifetime, counted from 0. They come in the order in which they begin.
pub(super) fn layers(lifetimes: &[Lifetime]) -> Vec<usize> {
    let mut ends: BTreeSet<(Tick, usize)> = BTreeSet::new();
    let mut count = 0;
    let mut layer = |lifetime: &Lifetime| {
        // Half-open: who ends where another begins is out of its way.
        let last = ends.range(..=(lifetime.start, usize::MAX)).next_back().copied();
        let layer = match last {
            Some(last) => {
                ends.remove(&last);
                last.1
            }
            None => {
                count += 1;
                count - 1
            }
        };
        ends.insert((lifetime.end, layer));
        layer
    };
    lifetimes.iter().map(&mut layer).collect()
}
