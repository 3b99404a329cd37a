//! Giving chunks back: those that hold nothing live leave every address that shows them.

use std::cmp::Reverse;
use std::sync::Arc;

use super::arena::Arena;
use super::{PagePool, UNIT, address_of, bytes_of, units_of};
use crate::ids::StreamId;
use crate::memory::Chunk;
use crate::units::{Bytes, Span};

impl PagePool {
    /// Bytes of chunks that hold nothing live.
    pub(super) fn idle_chunk_bytes(&self) -> Bytes {
        self.idle_chunks_but(None)
    }

    /// The same of the chunks that a stream has not.
    pub fn idle_chunks_of_others(&self, stream: StreamId) -> Bytes {
        self.idle_chunks_but(Some(stream))
    }

    fn idle_chunks_but(&self, keeps: Option<StreamId>) -> Bytes {
        let arenas = self.arenas.iter().filter(|arena| Some(arena.stream) != keeps);
        let idle = arenas.flat_map(|arena| arena.idle_homes(self.policy.granule.get() / UNIT));
        idle.map(|(_, units)| bytes_of(units)).sum()
    }

    /// Takes idle chunks out until they hold `wanted` bytes or none is left; the chunks are the
    /// caller's. Those that the fewest places show go first. What cannot be unmapped stays.
    ///
    /// Where memory stays with its addresses only whole ranges leave.
    pub fn trim(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        self.trim_but(None, wanted)
    }

    /// The same of the chunks that a stream has not.
    pub fn trim_others(&mut self, stream: StreamId, wanted: Bytes) -> Vec<Arc<Chunk>> {
        self.trim_but(Some(stream), wanted)
    }

    /// Bytes of a stream's idle chunks that can move to its end for a request: none where chunks can be shown twice
    /// instead, or cannot leave their addresses.
    pub fn movable(&self, bytes: Bytes, stream: StreamId) -> Bytes {
        let capabilities = self.device.capabilities();
        if capabilities.alias || capabilities.memory_stays_with_addresses || !self.policy.stitches {
            return Bytes::ZERO;
        }
        let arena = self.arena_of(stream).map(|at| &self.arenas[at]);
        let idle = arena.into_iter().flat_map(|arena| arena.idle_before_end(units_of(bytes), self.policy.granule));
        idle.map(|(_, units)| bytes_of(units)).sum()
    }

    /// Takes such chunks until they hold `wanted` bytes or none is left.
    pub fn trim_before_end(&mut self, bytes: Bytes, stream: StreamId, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let Some(at) = self.arena_of(stream).filter(|_| !self.movable(bytes, stream).is_zero()) else {
            return Vec::new();
        };
        let arena = &mut self.arenas[at];
        let idle = arena.idle_before_end(units_of(bytes), self.policy.granule);
        let homes = arena.choose(idle, wanted);
        arena.take_homes(homes)
    }

    fn trim_but(&mut self, keeps: Option<StreamId>, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let least = self.policy.granule.get() / UNIT;
        let stays = self.device.capabilities().memory_stays_with_addresses;
        let mut chunks = Vec::new();
        for arena in self.arenas.iter_mut().filter(|arena| Some(arena.stream) != keeps) {
            let found: Bytes = chunks.iter().map(|chunk: &Arc<Chunk>| chunk.len()).sum();
            let left = wanted.saturating_sub(found);
            if left.is_zero() {
                break;
            }
            let homes =
                if stays { arena.idle_ranges(least, left) } else { arena.choose(arena.idle_homes(least), left) };
            chunks.extend(arena.take_homes(homes));
        }
        chunks
    }
}

impl Arena {
    /// Chunks that hold nothing live: where each has its home, and its units.
    pub(super) fn idle_homes(&self, least: u64) -> Vec<(u64, u64)> {
        let mut idle = Vec::new();
        for (start, len) in self.free.at_least(least) {
            let homes = self.chunks.range(start..start + len);
            let whole = homes.filter(|(home, chunk)| *home + chunk.units <= start + len);
            idle.extend(whole.map(|(home, chunk)| (*home, chunk.units)));
        }
        idle
    }

    /// The same without those in the free run at the end, where that can grow for so many units.
    fn idle_before_end(&self, units: u64, granule: Bytes) -> Vec<(u64, u64)> {
        let tail = self.tail(units, granule);
        let idle = self.idle_homes(granule.get() / UNIT).into_iter();
        idle.filter(|(home, units)| home + units <= tail.start || *home >= tail.end).collect()
    }

    /// Of some idle chunks those that together hold about `wanted` bytes, by their homes.
    fn choose(&self, mut idle: Vec<(u64, u64)>, wanted: Bytes) -> Vec<u64> {
        idle.sort_unstable_by_key(|(home, units)| (self.chunks[home].places.len(), Reverse(*units), Reverse(*home)));
        let mut left = wanted.get().div_ceil(UNIT);
        let (mut chosen, mut larger) = (Vec::new(), Vec::new());
        for (home, units) in idle {
            if units <= left {
                left -= units;
                chosen.push(home);
            } else if left > 0 {
                larger.push((units, home));
            }
        }
        // What is left is less than any of the others holds: the smallest of them.
        if left > 0 {
            chosen.extend(larger.into_iter().min().map(|(_, home)| home));
        }
        chosen
    }

    /// The chunks of ranges in which nothing is live, until they hold `wanted` bytes.
    fn idle_ranges(&self, least: u64, wanted: Bytes) -> Vec<u64> {
        let idle = self.idle_homes(least);
        let (mut chosen, mut found) = (Vec::new(), Bytes::ZERO);
        for (id, range) in &self.ranges {
            let here: Vec<(u64, u64)> =
                idle.iter().copied().filter(|(home, _)| self.chunks[home].range == id).collect();
            // A place goes whole, as its addresses keep the memory.
            let is_shown = |id: &usize| self.places.get(*id).is_some_and(|place| place.is_live);
            let is_pinned = || here.iter().any(|(home, _)| self.chunks[home].places.iter().any(is_shown));
            if found >= wanted || here.len() != range.mapping.chunk_count() || range.plan_end.is_some() || is_pinned() {
                continue;
            }
            found += here.iter().map(|(_, units)| bytes_of(*units)).sum();
            chosen.extend(here.into_iter().map(|(home, _)| home));
        }
        chosen
    }

    /// Unmaps idle chunks wherever they are shown, and hands them over.
    pub(super) fn take_homes(&mut self, homes: Vec<u64>) -> Vec<Arc<Chunk>> {
        let mut hidden: Vec<(u64, u64)> = Vec::new();
        for home in homes {
            if self.hide(home) {
                hidden.push((home, self.chunks[&home].units));
            }
        }
        hidden.sort_unstable();
        let mut chunks = Vec::new();
        for run in hidden.chunk_by(|one, next| one.0 + one.1 == next.0) {
            let (start, range) = (run[0].0, self.chunks[&run[0].0].range);
            let units: u64 = run.iter().map(|(_, units)| units).sum();
            let span = Span::new(address_of(start), bytes_of(units)).expect("homes lie in a range");
            let Ok(taken) = self.ranges[range].mapping.take(span) else { continue };
            self.free.take(start, units);
            self.held -= bytes_of(units);
            run.iter().for_each(|(home, _)| {
                self.chunks.remove(home);
            });
            chunks.extend(taken);
            self.drop_if_empty(range);
        }
        chunks
    }

    /// Unmaps an idle chunk at every place that shows it. False where that fails.
    fn hide(&mut self, home: u64) -> bool {
        let places = self.chunks[&home].places.clone();
        places.into_iter().all(|id| {
            let Some(place) = self.places.get(id) else { return true };
            let stays = place.mapping.device().capabilities().memory_stays_with_addresses;
            let Some(slot) = place.homes.iter().position(|shown| *shown == home) else { return true };
            match stays {
                true => !place.is_live && self.cut_place(id, 0).is_ok(),
                false => self.cut_place(id, slot).is_ok(),
            }
        })
    }
}
