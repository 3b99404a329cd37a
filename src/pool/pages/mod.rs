//! The page pool: every request that no plan serves, of any size, with or without a plan beside it.
//!
//! Each stream has its own addresses, which grow at their end. A chunk has one *home* there and may
//! be shown at further addresses as well. Free memory is counted at home, in units of 512 bytes:
//!
//! ```text
//!   home      | chunk 1      | chunk 2 | chunk 3      | chunk 4 | chunk 5     ...end
//!             | AAAA  ..free | free    | BBBBBBBBBBBB | free    | CCC  ..free
//!   a place            | ..free | free    | free    |            three runs shown side by side
//! ```
//!
//! A request takes the shortest free run at home that is long enough (best fit, across chunk
//! borders). Where no run is long enough, a *place* that was made before is used again if all of its
//! bytes are free. Otherwise the runtime grows the end, or makes a new place ([`stitch`]); [`policy`]
//! decides which. GMLake's words map to these (ASPLOS'24, sections 3 and 4):
//!
//! | GMLake | here | driver calls |
//! |---|---|---|
//! | pBlock | chunk, at home | |
//! | sBlock | place | |
//! | S1, exact reuse | best fit finds a run, or a place, of that size | none |
//! | S2, split | best fit takes a part of a longer run | none |
//! | S3, stitch | a new place over free runs | map, set access |
//! | S4, grow | new chunks at the end, or in a new place | create, export, import, map |
//! | S5 | out of memory | |
//!
//! Unlike an sBlock, a place may begin in the middle of a chunk and end in the middle of one: two
//! live allocations may use different bytes of one chunk at different addresses.
//!
//! A freed run serves its own stream again at once; the runtime delays frees that other streams must
//! pass first. A chunk goes from one stream to another only after it was unmapped, which waits for
//! the device.
//!
//! Invariant: at home, live allocations, pieces of live places and free runs lie side by side and
//! cover exactly the chunks.

mod arena;
mod locate;
mod place;
pub mod policy;
mod site;
mod stitch;
mod trim;

use std::sync::Arc;

use self::arena::Arena;
pub use self::policy::PagePolicy;
pub use self::site::Site;
pub use self::stitch::{Pieces, Shortage};
use super::AddressMap;
use crate::ids::StreamId;
use crate::limits;
use crate::memory::{Chunk, Device, MemoryError};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

/// Bytes of one unit: sizes and addresses of allocations are multiples of it.
const UNIT: u64 = limits::ALLOCATION_ALIGNMENT.get();

/// The page pool of one device.
#[derive(Debug)]
pub struct PagePool {
    device: Arc<Device>,
    policy: PagePolicy,
    arenas: Vec<Arena>,
    /// Addresses that the first stream reserves at once. Each further one reserves half of what the one
    /// before does, and [`limits::SIDE_RANGE_LEN`] at least.
    range_len: Bytes,
    live: AddressMap<Live>,
    live_units: u64,
    /// Units that a plan's pool has.
    plan_units: u64,
    counts: PageCounts,
    /// Numbers the uses of places, to know which was used least recently.
    uses: u64,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    bytes: Bytes,
    arena: u32,
    at: At,
}

/// Where a live allocation lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// At home.
    Home,
    /// In this place of its arena.
    Place(u32),
}

/// How requests were served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageCounts {
    /// At home.
    pub home: u64,
    /// In a place that was there already.
    pub reused_places: u64,
    /// In a new place.
    pub new_places: u64,
    /// Bytes of those, as asked for.
    pub stitched_bytes: Bytes,
    /// Places that were dropped to stay within the limit.
    pub dropped_places: u64,
}

/// What the pool holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageUse {
    /// Bytes of all its chunks, without what a plan's pool has of them.
    pub held: Bytes,
    /// Bytes of live allocations, rounded to the unit.
    pub live: Bytes,
    /// The longest free run.
    pub largest_contiguous: Bytes,
    /// Bytes of chunks that hold nothing live.
    pub idle_chunks: Bytes,
}

fn units_of(bytes: Bytes) -> u64 {
    // A request may be longer than addresses are.
    bytes.get().max(1).div_ceil(UNIT)
}

fn bytes_of(units: u64) -> Bytes {
    Bytes::new(units * UNIT)
}

fn unit_at(address: DeviceAddress) -> u64 {
    address.get() / UNIT
}

fn address_of(unit: u64) -> DeviceAddress {
    DeviceAddress::new(unit * UNIT)
}

impl PagePool {
    /// An empty pool.
    pub fn new(device: Arc<Device>, policy: PagePolicy) -> PagePool {
        PagePool {
            device,
            policy,
            arenas: Vec::new(),
            range_len: limits::PAGE_RANGE_LEN,
            live: AddressMap::default(),
            live_units: 0,
            plan_units: 0,
            counts: PageCounts::default(),
            uses: 0,
        }
    }

    /// The same with so many addresses for its first stream at once.
    #[must_use]
    pub fn with_range_len(self, range_len: Bytes) -> PagePool {
        PagePool { range_len, ..self }
    }

    #[inline]
    fn arena_of(&self, stream: StreamId) -> Option<usize> {
        self.arenas.iter().position(|arena| arena.stream == stream)
    }

    /// The stream's arena; a new one where it has none.
    fn arena_for(&mut self, stream: StreamId) -> usize {
        self.arena_of(stream).unwrap_or_else(|| {
            // Most of the memory is nearly always that of one of the first streams.
            let halved = self.range_len.get().checked_shr(self.arenas.len() as u32).unwrap_or(0);
            self.arenas.push(Arena::new(stream, Bytes::new(halved).max(limits::SIDE_RANGE_LEN)));
            self.arenas.len() - 1
        })
    }

    /// Serves a request without a driver call, if free memory allows it.
    #[inline]
    pub fn alloc(&mut self, bytes: Bytes, stream: StreamId) -> Option<DeviceAddress> {
        let units = units_of(bytes);
        let at = self.arena_of(stream)?;
        let arena = &mut self.arenas[at];
        match arena.free.take_best_fit(units) {
            Some(start) => {
                self.counts.home += 1;
                let live = Live { bytes, arena: at as u32, at: At::Home };
                Some(self.note_live(address_of(start), units, live))
            }
            None => self.alloc_in_place(bytes, at),
        }
    }

    /// Serves a request in a place that is there already and all of whose bytes are free.
    fn alloc_in_place(&mut self, bytes: Bytes, at: usize) -> Option<DeviceAddress> {
        let units = units_of(bytes);
        if self.free_bytes().get() / UNIT < units {
            return None;
        }
        let arena = &mut self.arenas[at];
        let place = arena.free_place(units)?;
        self.uses += 1;
        let start = arena.occupy_place(place, units, self.uses);
        self.counts.reused_places += 1;
        let live = Live { bytes, arena: at as u32, at: At::Place(place as u32) };
        Some(self.note_live(start, units, live))
    }

    fn note_live(&mut self, address: DeviceAddress, units: u64, live: Live) -> DeviceAddress {
        self.live_units += units;
        self.live.insert(address, live);
        address
    }

    /// Takes an allocation back and returns the bytes that were asked for. `None` if it is not one
    /// of this pool's.
    #[inline]
    pub fn free(&mut self, address: DeviceAddress) -> Option<Bytes> {
        let Live { bytes, arena, at } = self.live.remove(&address)?;
        let units = units_of(bytes);
        self.live_units -= units;
        let arena = &mut self.arenas[arena as usize];
        match at {
            At::Home => arena.give(unit_at(address), units),
            At::Place(place) => arena.vacate_place(place as usize, units),
        }
        Some(bytes)
    }

    /// The stream that a live allocation was made on.
    pub fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.live.get(&address).map(|live| self.arenas[live.arena as usize].stream)
    }

    /// Bytes that a live allocation occupies.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.live.get(&address).map(|live| limits::occupied_len(live.bytes))
    }

    /// Maps new chunks at the end of a stream's addresses. On error nothing has changed, and the
    /// chunks are still the caller's.
    pub fn extend(&mut self, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<(), MemoryError> {
        let at = self.arena_for(stream);
        let device = Arc::clone(&self.device);
        self.arenas[at].extend(&device, chunks)
    }

    /// The same, and says where the first chunk is.
    pub fn extend_at(&mut self, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<DeviceAddress, MemoryError> {
        self.extend(chunks, stream)?;
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let end = self.arena_of(stream).and_then(|at| self.arenas[at].end_unit());
        end.map(|end| address_of(end - len.get() / UNIT)).ok_or(MemoryError::Unstitchable(len))
    }

    /// The addresses of live allocations with their homes: several of one that lies in a place.
    pub fn live_homes(&self) -> impl Iterator<Item = (DeviceAddress, AddressSpan)> + '_ {
        self.live.iter().flat_map(|(address, live)| {
            let units = units_of(live.bytes);
            let pieces = match live.at {
                At::Home => vec![(unit_at(*address), units)],
                At::Place(place) => {
                    let pieces = self.arenas[live.arena as usize].places[place as usize].first_pieces(units);
                    pieces.map(|piece| (piece.start, piece.units)).collect()
                }
            };
            let span = |(start, units)| Some((*address, Span::new(address_of(start), bytes_of(units))?));
            pieces.into_iter().filter_map(span)
        })
    }

    /// Bytes of new chunks at the end of the stream's addresses that would let a request fit there.
    /// `None` where that is more than any device has.
    pub fn lacks_at_end(&self, bytes: Bytes, stream: StreamId) -> Option<Bytes> {
        let len = limits::allocation_len(bytes)?;
        let arena = self.arena_of(stream).map(|at| &self.arenas[at]);
        let tail = arena.map_or(0..0, |arena| arena.tail(len.get() / UNIT, self.policy.granule));
        len.saturating_sub(bytes_of(tail.end - tail.start)).round_up(self.policy.granule)
    }

    /// Bytes of all its chunks.
    pub fn held(&self) -> Bytes {
        self.arenas.iter().map(|arena| arena.held).sum()
    }

    /// Bytes that serve no allocation, and that no plan's pool has.
    pub fn free_bytes(&self) -> Bytes {
        self.held() - bytes_of(self.live_units + self.plan_units)
    }

    /// Live allocations.
    pub fn live_allocations(&self) -> u64 {
        self.live.len() as u64
    }

    /// Bytes of live allocations, as asked for. Walks over all of them.
    pub fn live_bytes(&self) -> Bytes {
        self.live.values().map(|live| live.bytes).sum()
    }

    /// How requests were served.
    pub fn counts(&self) -> PageCounts {
        self.counts
    }

    /// Ranges of addresses.
    pub fn range_count(&self) -> usize {
        self.arenas.iter().map(Arena::range_count).sum()
    }

    /// The longest free run. Takes no walk.
    pub fn largest_contiguous(&self) -> Bytes {
        bytes_of(self.arenas.iter().map(Arena::longest_run).max().unwrap_or(0))
    }

    /// What the pool holds now. Walks over all free runs.
    pub fn usage(&self) -> PageUse {
        PageUse {
            held: self.held() - bytes_of(self.plan_units),
            live: bytes_of(self.live_units),
            largest_contiguous: self.largest_contiguous(),
            idle_chunks: self.idle_chunk_bytes(),
        }
    }

    /// Every chunk, live ones included, for the end of the pool's life: all mappings go.
    pub fn take_all(&mut self) -> Vec<Arc<Chunk>> {
        self.live.clear();
        (self.live_units, self.plan_units) = (0, 0);
        std::mem::take(&mut self.arenas).into_iter().flat_map(Arena::into_chunks).collect()
    }

    /// Says what is wrong with the pool; nothing, unless this module has a bug. `of_plan` is what a
    /// plan's pool has of its site. Takes time in proportion to everything there is.
    pub fn invariants(&self, of_plan: Option<(Site, &[AddressSpan])>) -> Result<(), String> {
        let mut live_units = 0;
        for (at, arena) in self.arenas.iter().enumerate() {
            let live = self.live.iter().filter(|(_, live)| live.arena as usize == at);
            let mut home = Vec::new();
            let mut places = Vec::new();
            for (address, live) in live {
                let units = units_of(live.bytes);
                live_units += units;
                match live.at {
                    At::Home => home.push((unit_at(*address), units)),
                    At::Place(place) => places.push((*address, units, place as usize)),
                }
            }
            let parts = of_plan.filter(|(site, _)| site.is_in(at)).map_or(&[][..], |(_, parts)| parts);
            let parts: Vec<_> = parts.iter().map(|part| (unit_at(part.start()), part.len().get() / UNIT)).collect();
            let checked = arena.invariants(&home, &places, &parts);
            checked.map_err(|wrong| format!("{:?}: {wrong}", arena.stream))?;
        }
        let plan_units: u64 = of_plan.iter().flat_map(|(_, parts)| *parts).map(|part| part.len().get() / UNIT).sum();
        if (live_units, plan_units) == (self.live_units, self.plan_units) {
            Ok(())
        } else {
            let counted = (self.live_units, self.plan_units);
            Err(format!(
                "{counted:?} units are counted as live and the plan's: there are {live_units} and {plan_units}"
            ))
        }
    }
}

#[cfg(test)]
mod tests;
