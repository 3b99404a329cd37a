//! HomoSize groups: requests of one size at a time, large ones first, into gaps and layers.
//!
//! A group's requests, in the order in which they begin, go where something is free in time and space beside what was placed before, which is all larger. Those that fit nowhere make layers
//! (Algorithm 1), one above the other; what these leave free is for the groups to come.
//!
//! Not for: what a request is made of; most are local plans.
//!
//! Invariant: no two requests that are live together share a byte.

use std::cmp::Reverse;

use super::super::Stopped;
use super::free_space::{FreeSpace, Gap};
use super::layers::layers;
use crate::units::{Lifetime, Tick};

/// An offset for each request: a size and a lifetime. [`Stopped::NoUse`] when they come to `top`.
pub(super) fn stack(requests: &[(u64, Lifetime)], top: u64) -> Result<Vec<u64>, Stopped> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    let life = |at: usize| requests[at].1;
    order.sort_unstable_by_key(|at| (Reverse(requests[*at].0), life(*at).start, life(*at).end, *at));
    let mut free = FreeSpace::of(requests.iter().map(|(_, lifetime)| lifetime.end));
    let mut offsets = vec![0; requests.len()];
    let mut end = 0_u64;
    for group in order.chunk_by(|one, other| requests[*one].0 == requests[*other].0) {
        let len = requests[group[0]].0;
        free.serve(len);
        let mut rest = Vec::new();
        for at in group {
            match free.take(len, life(*at)) {
                Some(offset) => offsets[*at] = offset,
                None => rest.push(*at),
            }
        }
        let base = end;
        let mut layer_ends: Vec<Tick> = Vec::new();
        for (at, layer) in rest.iter().zip(layers(&rest.iter().map(|at| life(*at)).collect::<Vec<_>>())) {
            if layer == layer_ends.len() {
                layer_ends.push(Tick(0));
                end = end.checked_add(len).filter(|end| *end <= i64::MAX as u64).ok_or(Stopped::TooLarge)?;
                if end >= top {
                    return Err(Stopped::NoUse);
                }
            }
            offsets[*at] = base + layer as u64 * len;
            free.give(Gap { from: layer_ends[layer], to: life(*at).start, offset: offsets[*at], len });
            layer_ends[layer] = life(*at).end;
        }
        for (layer, from) in layer_ends.into_iter().enumerate() {
            free.give(Gap { from, to: Tick(u64::MAX), offset: base + layer as u64 * len, len });
        }
    }
    Ok(offsets)
}
