//! The packed pool: what a plan does not serve, of any size, side by side in units of 512 bytes; without a plan, what is too small to be stitched and would leave too much of a block over.
//!
//! Each stream has a range of addresses that grows at its end, chunk by chunk. A request takes the shortest free stretch that has room for it, so sizes that change at every
//! step leave no more than what lies between two of them; whole chunks matter at the edges alone. Before a range grows by new chunks, those that lie idle in its gaps,
//! or in another stream's range, can move: they leave their place, and the place stays as a hole of addresses that may be filled again.
//!
//! Not for: what is large, or of whole chunks, in a job without a plan, which the stitching pool serves, or getting memory, which is the runtime's ([`PackedPool::lacks`], [`PackedPool::grow`]).
//!
//! ## Streams
//!
//! A range is one stream's, and its bytes are used by nobody else. What moves is unmapped first, and unmapping waits for the device.
//!
//! Invariant: live allocations, free stretches and holes of a range lie side by side and cover it up to its end, and no chunk is in two slots.

mod locate;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::AddressMap;
use super::starts::Starts;
use crate::extents::Extents;
use crate::ids::StreamId;
use crate::limits;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::units::{Bytes, DeviceAddress, Place as _, Span};

const UNIT: u64 = limits::ALLOCATION_ALIGNMENT.get();

/// The packed pool of one device.
#[derive(Debug)]
pub struct PackedPool {
    device: Arc<Device>,
    granule: Bytes,
    ranges: Vec<Range>,
    live: AddressMap<Live>,
    held: Bytes,
    live_units: u64,
}

#[derive(Debug)]
struct Range {
    stream: StreamId,
    mapping: Mapping,
    free: Extents,
    /// Where live allocations begin, in units.
    starts: Starts,
    /// Slots without a chunk below the last that has one: the first of each run, and how many.
    holes: BTreeMap<usize, usize>,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    bytes: Bytes,
    range: u32,
}

/// Where a range would grow for a request, and by how much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Growth {
    /// None: a range that does not exist yet.
    range: Option<usize>,
    first: usize,
    slots: usize,
}

/// Which of the places where a range can grow is the best.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefer {
    /// The one that takes the fewest chunks.
    FewChunks,
    /// The one that takes the fewest new chunks, whatever has to move: so many lie idle outside of the pool and move, too.
    FewNew(u64),
}

/// What the pool holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PackedUse {
    /// Bytes of all its chunks.
    pub held: Bytes,
    /// Bytes of live allocations, rounded to the unit.
    pub live: Bytes,
    /// The longest free stretch.
    pub largest_contiguous: Bytes,
    /// Bytes of chunks of which nothing is live.
    pub idle_chunks: Bytes,
}

impl PackedPool {
    /// An empty pool whose chunks will be of `granule` bytes, a power of two.
    pub fn new(device: Arc<Device>, granule: Bytes) -> PackedPool {
        PackedPool {
            device,
            granule,
            ranges: Vec::new(),
            live: AddressMap::default(),
            held: Bytes::ZERO,
            live_units: 0,
        }
    }

    fn units_of(bytes: Bytes) -> u64 {
        bytes.get().max(1).div_ceil(UNIT)
    }

    fn units_per_slot(&self) -> u64 {
        self.granule.get() / UNIT
    }

    fn bytes_of(&self, slots: usize) -> Bytes {
        Bytes::new(slots as u64 * self.granule.get())
    }

    /// Slots for which a range has addresses.
    fn room(&self, range: &Range) -> usize {
        (range.mapping.span().len().get() / self.granule.get()) as usize
    }

    /// Serves a request from what is free, if there is room.
    pub fn alloc(&mut self, bytes: Bytes, stream: StreamId) -> Option<DeviceAddress> {
        let units = PackedPool::units_of(bytes);
        let of_stream = self.ranges.iter().enumerate().filter(|(_, range)| range.stream == stream);
        let fits = of_stream.filter_map(|(at, range)| range.free.best_fit(units).map(|(len, start)| (len, at, start)));
        let (_, at, start) = fits.min()?;
        let range = &mut self.ranges[at];
        range.free.take(start, units);
        range.starts.set(start);
        self.live_units += units;
        let address = range.mapping.span().start().checked_add(Bytes::new(start * UNIT))?;
        self.live.insert(address, Live { bytes, range: at as u32 });
        Some(address)
    }

    /// Takes an allocation back, and says how many bytes had been asked for. `None` if it is not one of this pool's.
    #[inline]
    pub fn free(&mut self, address: DeviceAddress) -> Option<Bytes> {
        if self.live.is_empty() {
            return None;
        }
        let Live { bytes, range } = self.live.remove(&address)?;
        let units = PackedPool::units_of(bytes);
        let range = &mut self.ranges[range as usize];
        let start = address.checked_distance(range.mapping.span().start()).expect("it was served from this range");
        range.free.give(start.get() / UNIT, units);
        range.starts.clear(start.get() / UNIT);
        self.live_units -= units;
        Some(bytes)
    }

    /// The stream that a live allocation was made on.
    pub fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.live.get(&address).map(|live| self.ranges[live.range as usize].stream)
    }

    /// Bytes that a live allocation occupies.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.live.get(&address).map(|live| limits::occupied_len(live.bytes))
    }

    /// The chunks of the range that a live allocation lies in: where each is, and the chunk.
    pub fn chunks_at(&self, address: DeviceAddress) -> Vec<(DeviceAddress, Arc<Chunk>)> {
        let Some((live, len)) = self.live.get(&address).zip(self.len_of(address)) else { return Vec::new() };
        let mapping = &self.ranges[live.range as usize].mapping;
        let span = Span::new(address, len).expect("it was served from this range");
        mapping.chunks_in(mapping.slots_at(span))
    }

    /// Bytes of chunks that a request would take, new ones or such that move.
    pub fn lacks(&self, bytes: Bytes, stream: StreamId, prefer: Prefer) -> Option<Bytes> {
        let growth = self.growth(PackedPool::units_of(bytes), stream, prefer);
        self.granule.checked_mul(growth.slots as u64)
    }

    /// The best place to grow: a hole that free stretches or the end of a range lie beside.
    fn growth(&self, units: u64, stream: StreamId, prefer: Prefer) -> Growth {
        let slots = units.div_ceil(self.units_per_slot()) as usize;
        let anew = Growth { range: None, first: 0, slots };
        let of_stream = self.ranges.iter().enumerate().filter(|(_, range)| range.stream == stream);
        let places = of_stream.flat_map(|(at, range)| self.places(at, range, units)).chain([anew]);
        let idle: u64 = match prefer {
            Prefer::FewChunks => 0,
            Prefer::FewNew(outside) => outside + self.idle_runs().map(|(_, _, count)| count as u64).sum::<u64>(),
        };
        let new = |growth: &Growth| match prefer {
            Prefer::FewChunks => 0,
            Prefer::FewNew(_) => (growth.slots as u64).saturating_sub(idle - self.idle_beside(growth)),
        };
        places.min_by_key(|growth| (new(growth), growth.slots, growth.range.is_none())).unwrap_or(anew)
    }

    /// Every place where a range can grow for so many units.
    fn places(&self, at: usize, range: &Range, units: u64) -> Vec<Growth> {
        let per_slot = self.units_per_slot();
        let slots_for = |units: u64| units.div_ceil(per_slot) as usize;
        let before = |slot: usize| {
            let edge = slot as u64 * per_slot;
            range.free.ending_at(edge).map_or(0, |start| edge - start)
        };
        let hole = |(first, count): (&usize, &usize)| {
            let lacks = slots_for(units.saturating_sub(before(*first)));
            let after = range.free.len_at((*first + *count) as u64 * per_slot).unwrap_or(0);
            let whole = before(*first) + *count as u64 * per_slot + after;
            (whole >= units).then_some(Growth { range: Some(at), first: *first, slots: lacks.min(*count) })
        };
        let mut places: Vec<Growth> = range.holes.iter().filter_map(hole).collect();
        let count = range.mapping.slot_count();
        // A hole at the end is where the end is.
        let last = range.holes.last_key_value().filter(|(first, len)| *first + *len == count);
        let first = last.map_or(count, |(first, _)| *first);
        let at_end = Growth { range: Some(at), first, slots: slots_for(units.saturating_sub(before(first))) };
        places.extend(Some(at_end).filter(|growth| first + growth.slots <= self.room(range)));
        places
    }

    /// Chunks of which nothing is live, and that stay where they are when the pool grows there.
    fn idle_beside(&self, growth: &Growth) -> u64 {
        self.idle_runs().filter(|run| self.is_beside(growth, run)).map(|(_, _, count)| count as u64).sum()
    }

    fn is_beside(&self, growth: &Growth, (range, first, count): &(usize, usize, usize)) -> bool {
        let after = growth.range.and_then(|range| self.ranges[range].holes.get(&growth.first)).unwrap_or(&0);
        let edges = growth.first..=growth.first + after;
        growth.range == Some(*range) && (edges.contains(first) || edges.contains(&(first + count)))
    }

    /// Maps chunks at the best place for a request for `bytes`; more than that takes lie at the end. On error nothing has changed, and the chunks are still the caller's.
    pub fn grow(&mut self, chunks: &[Arc<Chunk>], bytes: Bytes, stream: StreamId) -> Result<(), MemoryError> {
        assert!(chunks.iter().all(|chunk| chunk.len() == self.granule), "the pool is made of chunks of one size");
        let growth = self.growth(PackedPool::units_of(bytes), stream, Prefer::FewChunks);
        self.grow_at(growth, chunks, stream)
    }

    fn grow_at(&mut self, growth: Growth, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<(), MemoryError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let range = match growth.range {
            Some(range) => range,
            None => self.add_range(chunks.len(), stream)?,
        };
        let (here, rest) = chunks.split_at(growth.slots.min(chunks.len()));
        self.put(range, growth.first, here)?;
        if rest.is_empty() {
            return Ok(());
        }
        let end = self.ranges[range].mapping.slot_count();
        let put = if end + rest.len() <= self.room(&self.ranges[range]) {
            self.put(range, end, rest)
        } else {
            self.add_range(rest.len(), stream).and_then(|range| self.put(range, 0, rest))
        };
        put.inspect_err(|_| drop(self.take_out(range, growth.first, here.len())))
    }

    /// Addresses for a stream: as many as any device has memory, or, where those cannot be had, as many as are needed.
    fn add_range(&mut self, slots: usize, stream: StreamId) -> Result<usize, MemoryError> {
        let needed = self.granule.checked_mul(slots as u64).ok_or(MemoryError::Unstitchable(Bytes::LARGEST))?;
        let generous = limits::PACKED_RANGE_LEN.max(needed);
        let mapping = Mapping::empty(&self.device, generous).or_else(|_| Mapping::empty(&self.device, needed))?;
        self.ranges.push(Range {
            stream,
            mapping,
            free: Extents::default(),
            starts: Starts::default(),
            holes: BTreeMap::new(),
        });
        Ok(self.ranges.len() - 1)
    }

    fn put(&mut self, range: usize, first: usize, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let per_slot = self.units_per_slot();
        let range = &mut self.ranges[range];
        range.mapping.put(first, chunks)?;
        if let Some(count) = range.holes.remove(&first)
            && count > chunks.len()
        {
            range.holes.insert(first + chunks.len(), count - chunks.len());
        }
        range.free.give(first as u64 * per_slot, chunks.len() as u64 * per_slot);
        self.held += self.bytes_of(chunks.len());
        Ok(())
    }

    /// Runs of whole slots of which nothing is live: range, first slot, count.
    fn idle_runs(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let per_slot = self.units_per_slot();
        self.ranges.iter().enumerate().flat_map(move |(at, range)| {
            range.free.iter().filter_map(move |(start, len)| {
                let (first, end) = (start.div_ceil(per_slot), (start + len) / per_slot);
                (first < end).then(|| (at, first as usize, (end - first) as usize))
            })
        })
    }

    /// Takes chunks of which nothing is live out of their places, the shortest runs first, until they hold `wanted` bytes or none is left; the chunks are the caller's. What cannot be unmapped stays.
    ///
    /// Where memory stays with its addresses nothing leaves: it would be nobody's until the whole range goes.
    pub fn trim(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let runs = self.idle_runs().collect();
        self.take_runs(runs, wanted)
    }

    /// Grows for a request by chunks from outside, and by what is idle here and not beside the place where it grows: says how many chunks moved. Where they cannot be mapped they are the caller's.
    pub fn grow_by_moving(
        &mut self,
        mut chunks: Vec<Arc<Chunk>>,
        bytes: Bytes,
        stream: StreamId,
    ) -> Result<usize, (Vec<Arc<Chunk>>, MemoryError)> {
        let growth = self.growth(PackedPool::units_of(bytes), stream, Prefer::FewNew(chunks.len() as u64));
        let wanted = self.bytes_of(growth.slots.saturating_sub(chunks.len()));
        let runs = self.idle_runs().filter(|run| !self.is_beside(&growth, run)).collect();
        chunks.extend(self.take_runs(runs, wanted));
        match self.grow_at(growth, &chunks, stream) {
            Ok(()) => Ok(chunks.len()),
            Err(error) => Err((chunks, error)),
        }
    }

    fn take_runs(&mut self, mut runs: Vec<(usize, usize, usize)>, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let mut chunks = Vec::new();
        if self.device.capabilities().memory_stays_with_addresses {
            return chunks;
        }
        let mut left = wanted.get().div_ceil(self.granule.get()) as usize;
        runs.sort_unstable_by_key(|(range, first, count)| (*count, *range, *first));
        for (range, first, count) in runs {
            // From the end: what is left stays beside what is in use.
            let taken = count.min(left);
            if taken == 0 {
                break;
            }
            if let Ok(out) = self.take_out(range, first + count - taken, taken) {
                left -= taken;
                chunks.extend(out);
            }
        }
        chunks
    }

    fn take_out(&mut self, range: usize, first: usize, count: usize) -> Result<Vec<Arc<Chunk>>, MemoryError> {
        let per_slot = self.units_per_slot();
        let range = &mut self.ranges[range];
        let chunks = range.mapping.take(first..first + count)?;
        range.free.take(first as u64 * per_slot, count as u64 * per_slot);
        let (mut from, mut holes) = (first, count);
        if let Some((before, len)) = range.holes.range(..first).next_back().map(|(before, len)| (*before, *len))
            && before + len == first
        {
            range.holes.remove(&before);
            (from, holes) = (before, holes + len);
        }
        if let Some(len) = range.holes.remove(&(first + count)) {
            holes += len;
        }
        range.holes.insert(from, holes);
        self.held -= self.bytes_of(count);
        Ok(chunks)
    }

    /// Every chunk that the pool has, live ones included, for the end of its life: all mappings go.
    pub fn take_all(&mut self) -> Vec<Arc<Chunk>> {
        self.live.clear();
        (self.held, self.live_units) = (Bytes::ZERO, 0);
        let ranges = std::mem::take(&mut self.ranges);
        ranges.iter().flat_map(|range| range.mapping.chunks().cloned()).collect()
    }

    /// Bytes of all its chunks.
    pub fn held(&self) -> Bytes {
        self.held
    }

    /// Bytes that serve nobody.
    pub fn free_bytes(&self) -> Bytes {
        self.held - Bytes::new(self.live_units * UNIT)
    }

    /// Ranges that there are.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// Live allocations.
    pub fn live_allocations(&self) -> u64 {
        self.live.len() as u64
    }

    /// Some chunk has nothing live in it.
    pub fn has_idle_chunks(&self) -> bool {
        self.idle_runs().next().is_some()
    }

    /// What the pool holds now. Walks over all that is free.
    pub fn usage(&self) -> PackedUse {
        let longest = self.ranges.iter().map(|range| range.free.longest()).max().unwrap_or(0);
        let idle: usize = self.idle_runs().map(|(_, _, count)| count).sum();
        PackedUse {
            held: self.held,
            live: Bytes::new(self.live_units * UNIT),
            largest_contiguous: Bytes::new(longest * UNIT),
            idle_chunks: self.bytes_of(idle),
        }
    }

    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        let mut held = 0;
        for (at, range) in self.ranges.iter().enumerate() {
            range.free.invariants()?;
            let per_slot = self.units_per_slot();
            let base = range.mapping.span().start();
            let live = self.live.iter().filter(|(_, live)| live.range as usize == at).map(|(address, live)| {
                let start = address.checked_distance(base).map_or(0, Bytes::get) / UNIT;
                (start, PackedPool::units_of(live.bytes))
            });
            let holes = range.holes.iter().map(|(first, count)| (*first as u64 * per_slot, *count as u64 * per_slot));
            let mut all: Vec<(u64, u64)> = live.chain(range.free.iter()).chain(holes).collect();
            all.sort_unstable();
            let mut end = 0;
            for (start, len) in all {
                if start != end {
                    return Err(format!(
                        "range {at}: something is missing or there twice at unit {end}, where {start} is next"
                    ));
                }
                end = start + len;
            }
            if end != range.mapping.slot_count() as u64 * per_slot {
                return Err(format!("range {at} ends at unit {end} and has {} slots", range.mapping.slot_count()));
            }
            for slot in 0..range.mapping.slot_count() {
                let is_hole = range.holes.range(..=slot).next_back().is_some_and(|(first, count)| slot < first + count);
                if is_hole == range.mapping.chunk(slot).is_some() {
                    return Err(format!("range {at}: slot {slot} is a hole or not, and its chunk says otherwise"));
                }
                held += usize::from(!is_hole);
            }
        }
        let held = self.bytes_of(held);
        if held == self.held { Ok(()) } else { Err(format!("{} are counted and {held} are held", self.held)) }
    }
}

#[cfg(test)]
mod tests;
