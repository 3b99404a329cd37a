//! The part of an arena that a plan's pool lies in, its *site*.
//!
//! ```text
//!   range       | AAAA | pp | free | BB | pppppppppp | free | CC | pp | (hole) |
//!   plan's pool |~~~~~~| pp |~~~~~~~~~~~| pppppppppp |~~~~~~~~~~~| pp |~~~~~~~~|     ~ lent
//! ```
//!
//! A plan is made around what lives longer than an iteration (A, B, C), so that nothing moves where it
//! is installed. The plan's pool takes what its entries need and is free (p). All other bytes of the
//! site stay the page pool's, and the plan's pool counts them as lent. Both give parts to each other
//! without a driver call.
//!
//! Invariant: no byte is free here and the plan's pool's.

use std::sync::Arc;

use super::{At, Live, PagePool, UNIT, address_of, bytes_of, unit_at, units_of};
use crate::ids::StreamId;
use crate::memory::{Chunk, Device, MemoryError};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// Where a plan's pool lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    arena: usize,
    range: usize,
    stream: StreamId,
    span: AddressSpan,
}

impl Site {
    pub(super) fn is_in(&self, arena: usize) -> bool {
        self.arena == arena
    }

    /// The stream whose arena it lies in.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Its addresses.
    pub fn span(&self) -> AddressSpan {
        self.span
    }
}

impl PagePool {
    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The addresses of the range of a stream's arena that grows: where a plan's pool may lie.
    pub fn site_range(&self, stream: StreamId) -> Option<AddressSpan> {
        let arena = &self.arenas[self.arena_of(stream)?];
        arena.last.map(|last| arena.ranges[last].mapping.span())
    }

    /// `span` as a site, in the range of a stream's arena that grows. `None` where the range has not all
    /// of these addresses.
    pub fn site(&self, stream: StreamId, span: AddressSpan) -> Option<Site> {
        let arena = self.arena_of(stream)?;
        let range = self.arenas[arena].last?;
        let has = self.arenas[arena].ranges[range].mapping.span();
        let needed = span.end().checked_add(self.device.capabilities().granularity)?;
        (has.start() <= span.start() && needed <= has.end()).then_some(Site { arena, range, stream, span })
    }

    /// Makes `span` a plan's site. `None` where the range has not all of these addresses, or has a site.
    pub fn open_site(&mut self, stream: StreamId, span: AddressSpan) -> Option<Site> {
        let site = self.site(stream, span)?;
        let range = &mut self.arenas[site.arena].ranges[site.range];
        if range.plan_end.is_some() {
            return None;
        }
        range.plan_end = Some(unit_at(span.end()));
        Some(site)
    }

    /// The plan's pool has given everything back.
    pub fn close_site(&mut self, site: Site) {
        let arena = &mut self.arenas[site.arena];
        arena.ranges[site.range].plan_end = None;
        arena.drop_if_empty(site.range);
    }

    /// Takes what is free of a part of the site, for the plan's pool.
    pub fn take_for_plan(&mut self, site: Site, part: AddressSpan) -> Vec<AddressSpan> {
        let taken = self.free_parts(site, part);
        for part in &taken {
            let units = part.len().get() / UNIT;
            self.arenas[site.arena].free.take(unit_at(part.start()), units);
            self.plan_units += units;
        }
        taken
    }

    /// Takes back a part that the plan's pool has.
    pub fn give_from_plan(&mut self, site: Site, part: AddressSpan) {
        let units = part.len().get() / UNIT;
        self.plan_units -= units;
        self.arenas[site.arena].give(unit_at(part.start()), units);
    }

    /// An allocation that the plan's pool has served is this pool's from now on.
    pub fn adopt(&mut self, site: Site, address: DeviceAddress, bytes: Bytes) {
        let units = units_of(bytes);
        self.plan_units -= units;
        let live = Live { bytes, arena: site.arena as u32, at: At::Home };
        self.note_live(address, units, live);
    }

    /// The free parts of a part of the site.
    pub fn free_parts(&self, site: Site, part: AddressSpan) -> Vec<AddressSpan> {
        let free = &self.arenas[site.arena].free;
        let end = unit_at(part.end());
        let (mut at, mut parts) = (unit_at(part.start()), Vec::new());
        while let Some((start, units)) = free.at_or_after(at).filter(|(start, _)| *start < end) {
            let (from, to) = (start.max(at), (start + units).min(end));
            parts.extend(Span::new(address_of(from), bytes_of(to - from)));
            at = start + units;
        }
        parts
    }

    /// The parts of a part of the site that have no chunk.
    pub fn holes_in(&self, site: Site, part: AddressSpan) -> Vec<AddressSpan> {
        let (mut at, mut holes) = (part.start(), Vec::new());
        let ends = Some((part.end(), Bytes::ZERO));
        let chunks = self.chunks_in(site, part).map(|(start, chunk)| (start, chunk.len()));
        for (start, len) in chunks.chain(ends) {
            let hole = start.checked_distance(at).filter(|hole| !hole.is_zero());
            holes.extend(hole.and_then(|hole| Span::new(at, hole)));
            at = at.max(start.checked_add(len).unwrap_or(start));
        }
        holes
    }

    /// The chunks that a part of the site lies in, by the addresses where they begin.
    pub fn chunks_in(&self, site: Site, part: AddressSpan) -> impl Iterator<Item = (DeviceAddress, &Arc<Chunk>)> {
        self.arenas[site.arena].ranges[site.range].mapping.chunks_in(part)
    }

    /// Bytes of chunks that begin in a part of the site and are free.
    pub fn idle_in(&self, site: Site, part: AddressSpan) -> Bytes {
        let free = &self.arenas[site.arena].free;
        let is_free = |(start, len): &(DeviceAddress, Bytes)| free.covers(unit_at(*start), len.get() / UNIT);
        let chunks = self.chunks_in(site, part).map(|(start, chunk)| (start, chunk.len()));
        chunks.filter(is_free).map(|(_, len)| len).sum()
    }

    /// Maps chunks into a hole of the site. On error nothing has changed.
    pub fn fill_site(&mut self, site: Site, from: DeviceAddress, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        self.arenas[site.arena].put(site.range, from, chunks)
    }

    /// Takes out the chunks that begin at some addresses of the site, all of whose bytes are free. What
    /// cannot be unmapped stays.
    pub fn take_chunks(&mut self, site: Site, starts: &[DeviceAddress]) -> Vec<Arc<Chunk>> {
        let homes = starts.iter().map(|start| unit_at(*start)).collect();
        self.arenas[site.arena].take_homes(homes)
    }
}
