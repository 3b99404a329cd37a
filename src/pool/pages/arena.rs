//! One stream's addresses: the homes of its chunks, what is free there, and its places.
//!
//! Positions are in units of 512 bytes from address zero, so a free run and an address convert
//! without a lookup. Two ranges never touch (each has a spare granule behind it), so no run crosses
//! from one into another.

use std::collections::BTreeMap;
use std::sync::Arc;

use slab::Slab;

use super::place::{Piece, Place};
use super::{UNIT, address_of, bytes_of, unit_at};
use crate::extents::Extents;
use crate::ids::StreamId;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::units::{Bytes, DeviceAddress};

#[derive(Debug)]
pub(super) struct Arena {
    pub(super) stream: StreamId,
    /// Addresses that it reserves at once.
    range_len: Bytes,
    pub(super) ranges: Slab<Range>,
    /// The range that grows.
    pub(super) last: Option<usize>,
    pub(super) free: Extents,
    /// The last request that no place could serve, in units, if nothing was freed since.
    unserved: Option<u64>,
    /// The place that was occupied last.
    occupied: Option<usize>,
    /// Chunks by the unit where their home begins.
    pub(super) chunks: BTreeMap<u64, Home>,
    pub(super) places: Slab<Place>,
    /// Places by their length.
    by_len: BTreeMap<u64, Vec<usize>>,
    /// Slots of all places together: each is a mapping.
    pub(super) shown_slots: usize,
    pub(super) held: Bytes,
}

/// Contiguous addresses that chunks have their homes in.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) mapping: Mapping,
    /// The unit behind a plan's pool that lies here: new chunks for other requests go behind it.
    pub(super) plan_end: Option<u64>,
}

impl Range {
    pub(super) fn first_unit(&self) -> u64 {
        unit_at(self.mapping.span().start())
    }

    /// The unit behind the last chunk, and behind a plan's pool.
    fn end_unit(&self) -> u64 {
        unit_at(self.mapping.chunks_end()).max(self.plan_end.unwrap_or(0))
    }
}

/// Where a chunk has its home.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) range: usize,
    pub(super) units: u64,
    /// Places that may show it.
    pub(super) places: Vec<usize>,
}

/// Places of one length, and of longer ones, that are looked at for one request.
const LOOKED_AT_MAX: usize = 512;
/// A request may use a place up to this many times its own length.
const LONGER_MAX: u64 = 6;

impl Arena {
    pub(super) fn new(stream: StreamId, range_len: Bytes) -> Arena {
        Arena {
            stream,
            range_len,
            ranges: Slab::new(),
            last: None,
            free: Extents::default(),
            unserved: None,
            occupied: None,
            chunks: BTreeMap::new(),
            places: Slab::new(),
            by_len: BTreeMap::new(),
            shown_slots: 0,
            held: Bytes::ZERO,
        }
    }

    /// The range that an address lies in. There is nearly always one.
    pub(super) fn range_at(&self, address: DeviceAddress) -> Option<&Range> {
        self.ranges.iter().map(|(_, range)| range).find(|range| range.mapping.span().contains(address))
    }

    /// The unit behind the last chunk of the range that grows.
    pub(super) fn end_unit(&self) -> Option<u64> {
        self.last.map(|last| self.ranges[last].end_unit())
    }

    /// Where the free run at the end lies, if new chunks can continue it for a request of so many units;
    /// empty where the range has no addresses left for the rest. Other ranges may lie before it or
    /// behind it.
    pub(super) fn tail(&self, units: u64, granule: Bytes) -> std::ops::Range<u64> {
        let Some(end) = self.end_unit() else { return 0..0 };
        let start = self.free.ending_at(end).unwrap_or(end);
        let rest = bytes_of(units.saturating_sub(end - start)).round_up(granule);
        if rest.is_some_and(|rest| self.can_continue_by(rest)) { start..end } else { end..end }
    }

    /// New chunks of so many bytes continue the range that grows.
    fn can_continue_by(&self, len: Bytes) -> bool {
        self.can_continue() && self.last.is_some_and(|last| self.has_room(last, len))
    }

    fn can_continue(&self) -> bool {
        self.last.is_some_and(|last| {
            let device = self.ranges[last].mapping.device();
            !device.capabilities().memory_stays_with_addresses
        })
    }

    /// Maps chunks at the end.
    pub(super) fn extend(&mut self, device: &Arc<Device>, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let range = match self.last.filter(|_| self.can_continue_by(len)) {
            Some(range) => range,
            None => self.add_range(device, len)?,
        };
        let from = address_of(self.ranges[range].end_unit());
        let put = self.put(range, from, chunks);
        match put {
            Ok(()) => self.last = Some(range),
            Err(_) => self.drop_if_empty(range),
        }
        put
    }

    /// Maps chunks into a hole of a range, from an address on.
    pub(super) fn put(&mut self, range: usize, from: DeviceAddress, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        self.ranges[range].mapping.put(from, chunks)?;
        let mut start = unit_at(from);
        for chunk in chunks {
            let units = chunk.len().get() / UNIT;
            self.chunks.insert(start, Home { range, units, places: Vec::new() });
            self.held += chunk.len();
            start += units;
        }
        self.give(unit_at(from), start - unit_at(from));
        Ok(())
    }

    fn has_room(&self, range: usize, len: Bytes) -> bool {
        let range = &self.ranges[range];
        let used = bytes_of(range.end_unit() - range.first_unit());
        let spare = range.mapping.device().capabilities().granularity;
        used.checked_add(len)
            .and_then(|sum| sum.checked_add(spare))
            .is_some_and(|sum| sum <= range.mapping.span().len())
    }

    /// Addresses for new chunks: many, or, where those cannot be had or memory stays with its addresses, as
    /// many as these chunks need.
    fn add_range(&mut self, device: &Arc<Device>, len: Bytes) -> Result<usize, MemoryError> {
        let spare = device.capabilities().granularity;
        let needed = len.checked_add(spare).ok_or(MemoryError::Unstitchable(Bytes::LARGEST))?;
        let generous = self.range_len.max(needed);
        let mapping = if device.capabilities().memory_stays_with_addresses {
            Mapping::reserve(device, needed)?
        } else {
            Mapping::reserve(device, generous).or_else(|_| Mapping::reserve(device, needed))?
        };
        Ok(self.ranges.insert(Range { mapping, plan_end: None }))
    }

    /// Drops a range that has no chunk left, unless a plan's pool lies there.
    pub(super) fn drop_if_empty(&mut self, range: usize) {
        if self.ranges.get(range).is_some_and(|range| range.mapping.is_empty() && range.plan_end.is_none()) {
            self.ranges.remove(range);
            self.last = self.last.filter(|last| *last != range);
        }
    }

    /// A run is free from now on.
    #[inline]
    pub(super) fn give(&mut self, start: u64, units: u64) {
        self.free.give(start, units);
        self.unserved = None;
    }

    /// A place of at least so many units all of whose first units are free.
    pub(super) fn free_place(&mut self, units: u64) -> Option<usize> {
        if self.places.is_empty() || self.unserved == Some(units) {
            return None;
        }
        if let Some(next) = self.expected_place(units) {
            return Some(next);
        }
        let most = units.saturating_mul(LONGER_MAX);
        let candidates = self.by_len.range(units..=most).flat_map(|(_, places)| places).take(LOOKED_AT_MAX);
        let found = candidates.copied().find(|place| self.places[*place].is_free(units, &self.free));
        self.unserved = found.is_none().then_some(units);
        found
    }

    /// The place that followed the last one before, if it has just these units: a job that repeats uses
    /// its places in the same order again.
    fn expected_place(&mut self, units: u64) -> Option<usize> {
        let next = self.places.get(self.occupied?)?.next?;
        let place = self.places.get_mut(next).filter(|place| place.units() == units)?;
        place.is_free(units, &self.free).then_some(next)
    }

    pub(super) fn occupy_place(&mut self, place: usize, units: u64, used: u64) -> DeviceAddress {
        if let Some(before) = self.occupied.replace(place).and_then(|before| self.places.get_mut(before)) {
            before.next = Some(place);
        }
        let place = &mut self.places[place];
        for piece in place.first_pieces(units) {
            self.free.take(piece.start, piece.units);
        }
        place.is_live = true;
        place.used = used;
        place.address()
    }

    pub(super) fn vacate_place(&mut self, place: usize, units: u64) {
        let place = &mut self.places[place];
        place.is_live = false;
        for piece in place.first_pieces(units) {
            self.free.give(piece.start, piece.units);
        }
        self.unserved = None;
    }

    pub(super) fn add_place(&mut self, place: Place) -> usize {
        let (units, slots) = (place.units(), place.mapping.chunk_count());
        let homes = place.homes.clone();
        let id = self.places.insert(place);
        self.by_len.entry(units).or_default().push(id);
        self.shown_slots += slots;
        for home in homes {
            self.chunks.get_mut(&home).expect("a place shows chunks of its arena").places.push(id);
        }
        id
    }

    /// Forgets a place's length, before that changes or the place goes.
    fn unlist(&mut self, id: usize) {
        let units = self.places[id].units();
        if let Some(places) = self.by_len.get_mut(&units) {
            places.retain(|other| *other != id);
            if places.is_empty() {
                self.by_len.remove(&units);
            }
        }
    }

    /// Unmaps a place from its `keep`th slot on. On error nothing has changed.
    pub(super) fn cut_place(&mut self, id: usize, keep: usize) -> Result<(), MemoryError> {
        let place = &mut self.places[id];
        let count = place.homes.len();
        if keep >= count {
            return Ok(());
        }
        place.mapping.take(place.span_from(keep))?;
        self.unlist(id);
        // What is left of the place may serve what the whole was too long for.
        self.unserved = None;
        let place = &mut self.places[id];
        place.pieces.truncate(keep);
        let gone = place.homes.split_off(keep);
        self.shown_slots -= gone.len();
        for home in gone {
            if !self.places[id].homes.contains(&home)
                && let Some(home) = self.chunks.get_mut(&home)
            {
                home.places.retain(|other| *other != id);
            }
        }
        if keep == 0 {
            self.places.remove(id);
        } else {
            let units = self.places[id].units();
            self.by_len.entry(units).or_default().push(id);
        }
        Ok(())
    }

    /// The home that a unit lies in, by its first unit.
    pub(super) fn home_at(&self, unit: u64) -> Option<(u64, &Home)> {
        let (start, home) = self.chunks.range(..=unit).next_back()?;
        (unit < start + home.units).then_some((*start, home))
    }

    /// `[start, end)`, which lies in chunks, cut at their edges: each chunk's home, and its piece.
    pub(super) fn pieces_in(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Home, Piece)> {
        let first = self.home_at(start).filter(|_| start < end);
        let next = first.map_or(end, |(home, chunk)| home + chunk.units);
        // Most runs lie in one chunk: no second search for those.
        let others = (next < end).then(|| self.chunks.range(next..end)).into_iter().flatten();
        let homes = first.into_iter().chain(others.map(|(home, chunk)| (*home, chunk)));
        homes.map(move |(home, chunk)| {
            let (from, to) = (start.max(home), end.min(home + chunk.units));
            (home, chunk, Piece { start: from, units: to - from })
        })
    }

    /// The chunk whose home begins at this unit.
    pub(super) fn chunk(&self, start: u64, home: &Home) -> &Arc<Chunk> {
        self.ranges[home.range].mapping.chunk(address_of(start)).expect("a home has its chunk")
    }

    pub(super) fn range_count(&self) -> usize {
        self.ranges.len()
    }

    pub(super) fn longest_run(&self) -> u64 {
        self.free.longest()
    }

    pub(super) fn into_chunks(mut self) -> Vec<Arc<Chunk>> {
        // Shown addresses first: a chunk is given up once nothing shows it.
        self.places.clear();
        self.ranges.iter().flat_map(|(_, range)| range.mapping.chunks()).map(|(_, chunk)| Arc::clone(chunk)).collect()
    }

    /// `home` and `places` are the live allocations of this arena: unit and units, or address, units and place.
    /// `of_plan` is what a plan's pool has of it: unit and units.
    pub(super) fn invariants(
        &self,
        home: &[(u64, u64)],
        places: &[(DeviceAddress, u64, usize)],
        of_plan: &[(u64, u64)],
    ) -> Result<(), String> {
        self.free.invariants()?;
        let mut all: Vec<(u64, u64)> = self.free.iter().chain(of_plan.iter().copied()).collect();
        all.extend(home);
        for (address, units, id) in places {
            let place = self.places.get(*id).ok_or_else(|| format!("place {id} is live and gone"))?;
            if !place.is_live || place.address() != *address || place.units() < *units {
                return Err(format!("place {id} serves {units} units at {address} and says otherwise"));
            }
            all.extend(place.first_pieces(*units).map(|piece| (piece.start, piece.units)));
        }
        if self.places.iter().filter(|(_, place)| place.is_live).count() != places.len() {
            return Err("a place is live and serves no allocation".to_owned());
        }
        all.sort_unstable();
        self.check_cover(&all)?;
        self.check_places()
    }

    /// What is live and what is free cover the chunks, each unit once.
    fn check_cover(&self, all: &[(u64, u64)]) -> Result<(), String> {
        let joined = |runs: &mut dyn Iterator<Item = (u64, u64)>| {
            let mut joined: Vec<(u64, u64)> = Vec::new();
            for (start, units) in runs {
                match joined.last_mut() {
                    Some((last, len)) if *last + *len == start => *len += units,
                    Some((last, len)) if *last + *len > start => return Err(format!("unit {start} is used twice")),
                    _ => joined.push((start, units)),
                }
            }
            Ok(joined)
        };
        let used = joined(&mut all.iter().copied())?;
        let homes = joined(&mut self.chunks.iter().map(|(start, home)| (*start, home.units)))?;
        if used != homes {
            return Err("live allocations and free runs do not cover the chunks".to_owned());
        }
        let held: Bytes = self.chunks.values().map(|home| bytes_of(home.units)).sum();
        let mapped: Bytes =
            self.ranges.iter().flat_map(|(_, range)| range.mapping.chunks()).map(|(_, chunk)| chunk.len()).sum();
        if held != self.held || mapped != self.held {
            return Err(format!("{} are counted, homes have {held} and {mapped} are mapped", self.held));
        }
        Ok(())
    }

    fn check_places(&self) -> Result<(), String> {
        let mut slots = 0;
        for (id, place) in &self.places {
            slots += place.homes.len();
            place.invariants().map_err(|wrong| format!("place {id}: {wrong}"))?;
            for (home, (_, shown)) in place.homes.iter().zip(place.mapping.chunks()) {
                let here = self.chunks.get(home).ok_or_else(|| format!("place {id} shows a chunk that is gone"))?;
                if !Arc::ptr_eq(shown, self.chunk(*home, here)) || !here.places.contains(&id) {
                    return Err(format!("place {id} shows another chunk than that at home in unit {home}"));
                }
            }
            if !self.by_len.get(&place.units()).is_some_and(|places| places.contains(&id)) {
                return Err(format!("place {id} is not found by its length"));
            }
        }
        if slots == self.shown_slots {
            Ok(())
        } else {
            Err(format!("{} slots are counted, not {slots}", self.shown_slots))
        }
    }
}
