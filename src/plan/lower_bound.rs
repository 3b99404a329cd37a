//! The bytes below which no plan can go.

use std::collections::BTreeMap;

use super::{Buffer, Lane, Problem};
use crate::units::{Bytes, Lifetime, Tick};

/// The largest sum of live sizes at any tick, for each lane on its own, summed over the lanes: bytes are not shared between them.
pub fn lower_bound(problem: &Problem) -> Bytes {
    Changes::of(problem).bound(|_| true)
}

/// The same of what is asked for, before it is rounded up to what pools serve.
pub fn lower_bound_as_asked(problem: &Problem) -> Bytes {
    Changes::of_lens(problem, |buffer| buffer.bytes).bound(|_| true)
}

/// Bytes that come and go, in the order of time, lane by lane.
pub(super) struct Changes(BTreeMap<Lane, Vec<(Tick, i64)>>);

impl Changes {
    pub(super) fn of(problem: &Problem) -> Changes {
        Changes::of_lens(problem, |buffer| buffer.len)
    }

    fn of_lens(problem: &Problem, len: impl Fn(&Buffer) -> Bytes) -> Changes {
        let len = |buffer: &Buffer| len(buffer).min(Bytes::MAX).get() as i64;
        let mut lanes: BTreeMap<Lane, Vec<(Tick, i64)>> = BTreeMap::new();
        // Buffers are in the order in which they begin, and a sort that knows what is in order already has half of its work done.
        for (is_end, is_again) in [(false, false), (false, true), (true, false), (true, true)] {
            for buffer in &problem.buffers {
                let lifetime = if is_again { buffer.again } else { Some(buffer.lifetime) };
                let change = |life: Lifetime| if is_end { (life.end, -len(buffer)) } else { (life.start, len(buffer)) };
                lanes.entry(buffer.lane).or_default().extend(lifetime.map(change));
            }
        }
        // At one tick whoever leaves goes first: lifetimes are half-open.
        lanes.values_mut().for_each(|changes| changes.sort());
        Changes(lanes)
    }

    /// The bound for the buffers of some lengths.
    pub(super) fn bound(&self, is_one: impl Fn(Bytes) -> bool) -> Bytes {
        let is_one = |change: i64| is_one(Bytes::new(change.unsigned_abs()));
        let peak = |changes: &Vec<(Tick, i64)>| {
            let mut live = 0_i128;
            changes.iter().filter(|(_, change)| is_one(*change)).fold(0, |peak, (_, change)| {
                live += i128::from(*change);
                live.max(peak)
            })
        };
        let sum: i128 = self.0.values().map(peak).sum();
        Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX).min(Bytes::MAX.get()))
    }
}
