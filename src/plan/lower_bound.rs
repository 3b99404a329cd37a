//! The bytes below which no plan can go.

use super::{Buffer, Problem};
use crate::ids::StreamId;
use crate::units::{Bytes, Tick};

/// The largest sum of live sizes at any tick, for each stream on its own, summed over the streams: bytes are not shared between streams.
pub fn lower_bound(problem: &Problem) -> Bytes {
    bound_of(problem, |_| true)
}

/// The same for some of the buffers.
pub(super) fn bound_of(problem: &Problem, is_one: impl Fn(&Buffer) -> bool) -> Bytes {
    let mut changes: Vec<(StreamId, Tick, i128)> = Vec::with_capacity(4 * problem.buffers.len());
    for buffer in problem.buffers.iter().filter(|buffer| is_one(buffer)) {
        let len = i128::from(buffer.len.get());
        for lifetime in buffer.lifetimes() {
            changes.extend([(buffer.stream, lifetime.start, len), (buffer.stream, lifetime.end, -len)]);
        }
    }
    // At one tick whoever leaves goes first: lifetimes are half-open.
    changes.sort_unstable();
    let peak = |changes: &[(StreamId, Tick, i128)]| {
        let mut live = 0;
        changes.iter().fold(0, |peak, (_, _, change)| {
            live += change;
            live.max(peak)
        })
    };
    let sum: i128 = changes.chunk_by(|one, next| one.0 == next.0).map(peak).sum();
    Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX).min(Bytes::MAX.get()))
}
