//! Looking at the page pool from outside: which allocation has an address, what is free beside it,
//! which chunks it lies in, and what lies where.

use std::sync::Arc;

use super::arena::{Arena, Range};
use super::{At, Live, PagePool, address_of, bytes_of, unit_at};
use crate::limits;
use crate::memory::Chunk;
use crate::pool::laid::{Found, Laid, LaidState};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

impl PagePool {
    /// The live allocation that has `address`, which may be any of its bytes.
    pub fn find(&self, address: DeviceAddress) -> Option<Found> {
        self.arenas.iter().find_map(|arena| match arena.range_at(address) {
            Some(range) => self.find_at_home(arena, range, address),
            None => self.find_in_place(arena, address),
        })
    }

    fn find_at_home(&self, arena: &Arena, range: &Range, address: DeviceAddress) -> Option<Found> {
        let unit = unit_at(address);
        let run_end = arena.free.last_until(unit).map_or(0, |(start, units)| start + units);
        if unit < run_end {
            return None;
        }
        let span = self.walk_to(run_end.max(range.first_unit()), address).or_else(|| self.look_through(address))?;
        let (start, end) = (unit_at(span.start()), unit_at(span.end()));
        let before = arena.free.ending_at(start).map_or(0, |from| start - from);
        let after = arena.free.len_at(end).unwrap_or(0);
        Some(Found { span, before: bytes_of(before), after: bytes_of(after) })
    }

    /// From the end of the free run before an address on live allocations lie side by side: those that
    /// lead there. `None` where something else lies between.
    fn walk_to(&self, run_end: u64, address: DeviceAddress) -> Option<AddressSpan> {
        let mut at = run_end;
        while at <= unit_at(address) {
            let span = self.span_of(address_of(at))?;
            if span.contains(address) {
                return Some(span);
            }
            at = unit_at(span.end());
        }
        None
    }

    /// Where pieces of a place, or a plan's pool, lie between: all live allocations.
    fn look_through(&self, address: DeviceAddress) -> Option<AddressSpan> {
        let spans = self.live.keys().filter_map(|start| self.span_of(*start));
        spans.into_iter().find(|span| span.contains(address))
    }

    fn find_in_place(&self, arena: &Arena, address: DeviceAddress) -> Option<Found> {
        let contains = |mapping: AddressSpan| mapping.contains(address);
        let live = arena.places.iter().filter(|(_, place)| place.is_live);
        let (_, place) = live.into_iter().find(|(_, place)| contains(place.mapping.span()))?;
        let span = self.span_of(place.address()).filter(|span| span.contains(address))?;
        // What lies behind it in the place may serve another allocation at home.
        Some(Found { span, before: Bytes::ZERO, after: Bytes::ZERO })
    }

    /// What the live allocation that begins at `address` occupies.
    fn span_of(&self, address: DeviceAddress) -> Option<AddressSpan> {
        Span::new(address, self.len_of(address)?)
    }

    /// The chunks that a live allocation lies in: where each is shown, and the chunk.
    pub fn chunks_at(&self, address: DeviceAddress) -> Vec<(DeviceAddress, Arc<Chunk>)> {
        let Some((Live { arena, at, .. }, span)) = self.live.get(&address).copied().zip(self.span_of(address)) else {
            return Vec::new();
        };
        let arena = &self.arenas[arena as usize];
        let mapping = match at {
            At::Home => &arena.range_at(address).expect("a home lies in a range").mapping,
            At::Place(place) => &arena.places[place as usize].mapping,
        };
        mapping.chunks_in(span).map(|(start, chunk)| (start, Arc::clone(chunk))).collect()
    }

    /// What lies where: each range of every arena, and each live place.
    pub fn laid(&self) -> (Vec<Vec<Laid>>, Vec<Vec<Laid>>) {
        let (mut homes, mut places) = (Vec::new(), Vec::new());
        for (at, arena) in self.arenas.iter().enumerate() {
            let mut laid: Vec<Laid> = free_of(arena).collect();
            for (address, live) in self.live.iter().filter(|(_, live)| live.arena as usize == at) {
                let Some(span) = Span::new(*address, limits::occupied_len(live.bytes)) else { continue };
                let here = Laid { span, stream: arena.stream, state: LaidState::Live(live.bytes) };
                match live.at {
                    At::Home => laid.push(here),
                    At::Place(place) => {
                        let place = &arena.places[place as usize];
                        let pieces = place.first_pieces(span.len().get() / super::UNIT);
                        laid.extend(pieces.filter_map(|piece| {
                            let span = Span::new(address_of(piece.start), bytes_of(piece.units))?;
                            Some(Laid { span, stream: arena.stream, state: LaidState::Shown })
                        }));
                        places.push(vec![here]);
                    }
                }
            }
            laid.sort_unstable_by_key(|laid| laid.span.start());
            for (_, range) in &arena.ranges {
                let span = range.mapping.span();
                homes.push(laid.iter().filter(|laid| span.contains(laid.span.start())).copied().collect());
            }
        }
        (homes, places)
    }
}

fn free_of(arena: &Arena) -> impl Iterator<Item = Laid> + '_ {
    arena.free.iter().filter_map(|(start, units)| {
        let span = Span::new(address_of(start), bytes_of(units))?;
        Some(Laid { span, stream: arena.stream, state: LaidState::Free })
    })
}
