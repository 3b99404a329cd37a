//! The bytes below which no plan can go.

use super::{Lane, Problem};
use crate::units::{Bytes, Tick};

/// The largest sum of live sizes at any tick, for each lane on its own, summed over the lanes: bytes are not shared between them.
pub fn lower_bound(problem: &Problem) -> Bytes {
    Changes::of(problem).bound(|_| true)
}

/// Bytes that come and go, in the order of time, lane by lane.
pub(super) struct Changes(Vec<(Lane, Tick, i128)>);

impl Changes {
    pub(super) fn of(problem: &Problem) -> Changes {
        let mut changes = Vec::with_capacity(4 * problem.buffers.len());
        for buffer in &problem.buffers {
            let len = i128::from(buffer.len.get());
            for lifetime in buffer.lifetimes() {
                changes.extend([(buffer.lane, lifetime.start, len), (buffer.lane, lifetime.end, -len)]);
            }
        }
        // At one tick whoever leaves goes first: lifetimes are half-open.
        changes.sort_unstable();
        Changes(changes)
    }

    /// The bound for the buffers of some lengths.
    pub(super) fn bound(&self, is_one: impl Fn(Bytes) -> bool) -> Bytes {
        let is_one = |change: i128| is_one(Bytes::new(change.unsigned_abs() as u64));
        let peak = |changes: &[(Lane, Tick, i128)]| {
            let mut live = 0;
            changes.iter().filter(|(.., change)| is_one(*change)).fold(0, |peak, (.., change)| {
                live += change;
                live.max(peak)
            })
        };
        let sum: i128 = self.0.chunk_by(|one, next| one.0 == next.0).map(peak).sum();
        Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX).min(Bytes::MAX.get()))
    }
}
