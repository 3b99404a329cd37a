//! The bytes below which no plan can go.

use std::collections::BTreeMap;

use super::{Buffer, Lane, Problem};
use crate::lifetimes::{Change, changes};
use crate::units::{Bytes, Lifetime};

/// The largest sum of live sizes at any tick, for each lane on its own, summed over the lanes: bytes are not shared between them.
pub fn lower_bound(problem: &Problem) -> Bytes {
    Changes::of(problem).bound(|_| true)
}

/// The same of what is asked for, before it is rounded up to what pools serve.
pub fn lower_bound_as_asked(problem: &Problem) -> Bytes {
    Changes::of_lens(problem, |buffer| buffer.bytes).bound(|_| true)
}

/// Bytes that come and go, in the order of time, lane by lane.
pub(super) struct Changes(BTreeMap<Lane, Vec<i64>>);

impl Changes {
    pub(super) fn of(problem: &Problem) -> Changes {
        Changes::of_lens(problem, |buffer| buffer.len)
    }

    fn of_lens(problem: &Problem, len: impl Fn(&Buffer) -> Bytes) -> Changes {
        let len = |buffer: &Buffer| len(buffer).min(Bytes::MAX).get() as i64;
        let mut lanes: BTreeMap<Lane, (Vec<Lifetime>, Vec<i64>)> = BTreeMap::new();
        for of_lane in problem.buffers.chunk_by(|one, next| one.lane == next.lane) {
            let (lifetimes, lens) = lanes.entry(of_lane[0].lane).or_default();
            for buffer in of_lane {
                lifetimes.extend(buffer.lifetimes());
                lens.resize(lifetimes.len(), len(buffer));
            }
        }
        let in_order = |(lifetimes, lens): (Vec<Lifetime>, Vec<i64>)| {
            let change = |change: Change| {
                let len = lens[change.of as usize];
                if change.comes { len } else { -len }
            };
            changes(&lifetimes).into_iter().map(change).collect()
        };
        Changes(lanes.into_iter().map(|(lane, of)| (lane, in_order(of))).collect())
    }

    /// The bound for the buffers of some lengths.
    pub(super) fn bound(&self, is_one: impl Fn(Bytes) -> bool) -> Bytes {
        let is_one = |change: i64| is_one(Bytes::new(change.unsigned_abs()));
        let peak = |changes: &Vec<i64>| {
            let mut live = 0_i128;
            changes.iter().filter(|change| is_one(**change)).fold(0, |peak, change| {
                live += i128::from(*change);
                live.max(peak)
            })
        };
        let sum: i128 = self.0.values().map(peak).sum();
        Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX).min(Bytes::MAX.get()))
    }
}
