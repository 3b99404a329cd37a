//! The bytes below which no plan can go.

use std::collections::BTreeMap;

use super::Problem;
use crate::ids::StreamId;
use crate::units::{Bytes, Tick};

/// The largest sum of live sizes at any tick, for each stream on its own, summed over the streams: bytes are not shared between streams.
pub fn lower_bound(problem: &Problem) -> Bytes {
    let mut changes: BTreeMap<StreamId, BTreeMap<Tick, i128>> = BTreeMap::new();
    for buffer in &problem.buffers {
        let of_stream = changes.entry(buffer.stream).or_default();
        for lifetime in buffer.lifetimes() {
            *of_stream.entry(lifetime.start).or_default() += i128::from(buffer.len.get());
            *of_stream.entry(lifetime.end).or_default() -= i128::from(buffer.len.get());
        }
    }
    let peak = |changes: BTreeMap<Tick, i128>| {
        let mut live = 0;
        changes.into_values().fold(0, |peak, change| {
            live += change;
            live.max(peak)
        })
    };
    let sum: i128 = changes.into_values().map(peak).sum();
    Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX).min(Bytes::MAX.get()))
}
