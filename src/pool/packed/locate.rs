//! Looking at the packed pool from outside: which allocation has an address, what is free beside it, what lies where.

use super::{PackedPool, Range, UNIT};
use crate::pool::laid::{Found, Laid, LaidState};
use crate::units::{Bytes, DeviceAddress, Place as _, Span};

impl PackedPool {
    /// The live allocation that has `address`. A few steps to find it; what is free beside it takes steps as many as the logarithm of the number of free stretches.
    pub fn find(&self, address: DeviceAddress) -> Option<Found> {
        // As many ranges as there are streams.
        let range = self.ranges.iter().find(|range| range.mapping.span().contains(address))?;
        let base = range.mapping.span().start();
        let start = range.starts.last_until(address.checked_distance(base)?.get() / UNIT)?;
        let first = base.checked_add(Bytes::new(start * UNIT))?;
        let span = Span::new(first, self.len_of(first)?).filter(|span| span.contains(address))?;
        let end = start + span.len().get() / UNIT;
        let before = range.free.ending_at(start).map_or(0, |from| start - from);
        let after = range.free.len_at(end).unwrap_or(0);
        Some(Found { span, before: Bytes::new(before * UNIT), after: Bytes::new(after * UNIT) })
    }

    /// What lies where, range by range. Walks over all there is.
    pub fn laid(&self) -> Vec<Vec<Laid>> {
        let mut ranges: Vec<Vec<Laid>> = self.ranges.iter().map(|range| self.free_of(range)).collect();
        for (address, live) in &self.live {
            let span = self.len_of(*address).and_then(|len| Span::new(*address, len));
            let stream = self.ranges[live.range as usize].stream;
            let laid = span.map(|span| Laid { span, stream, state: LaidState::Live(live.bytes) });
            ranges[live.range as usize].extend(laid);
        }
        for range in &mut ranges {
            range.sort_unstable_by_key(|laid| laid.span.start());
        }
        ranges
    }

    fn free_of(&self, range: &Range) -> Vec<Laid> {
        let base = range.mapping.span().start();
        let free = range.free.iter().filter_map(|(start, len)| {
            let start = base.checked_add(Bytes::new(start * UNIT))?;
            let span = Span::new(start, Bytes::new(len * UNIT))?;
            Some(Laid { span, stream: range.stream, state: LaidState::Free })
        });
        free.collect()
    }
}
