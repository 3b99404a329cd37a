//! The few numbers that say what a trace is.

use foldhash::HashMap;

use super::{EventKind, Trace};
use crate::units::Bytes;

/// What a trace is, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Allocations.
    pub requests: u64,
    /// How many of them are marked as varying.
    pub dynamic_requests: u64,
    /// Iterations.
    pub iterations: u32,
    /// Most bytes asked for and not yet given back, unrounded.
    pub peak_live: Bytes,
    /// Bytes that are never given back.
    pub persistent: Bytes,
}

impl Trace {
    /// Counts it all once. Sums stop at what no machine has.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary { iterations: self.iterations(), ..Summary::default() };
        let mut live = HashMap::default();
        let mut live_bytes = Bytes::ZERO;
        for event in &self.events {
            match event.kind {
                EventKind::Alloc => {
                    summary.requests += 1;
                    summary.dynamic_requests += u64::from(event.is_dynamic);
                    live.insert(event.id, event.bytes);
                    live_bytes = live_bytes.saturating_add(event.bytes);
                    summary.peak_live = summary.peak_live.max(live_bytes);
                }
                EventKind::Free => {
                    live_bytes = live_bytes.saturating_sub(live.remove(&event.id).unwrap_or(Bytes::ZERO));
                }
                _ => {}
            }
        }
        summary.persistent = live_bytes;
        summary
    }
}
