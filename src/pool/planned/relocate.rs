//! A request that has an entry and cannot have its place: somebody is still there, or the size has changed. When it will be freed is known all the same, so it may go where nobody is now and the plan
//! sends nobody before that.
//!
//! Surprises are few, so this looks at everything that is live and at every entry that comes before the free: microseconds, where a request that goes by the plan takes nanoseconds.

use super::matcher::NEAR;
use super::{PlannedPool, Request, Served};
use crate::extents::cut;
use crate::limits;
use crate::plan::NEVER;
use crate::units::{Bytes, DeviceAddress, PlanOffset, PlanSpan, Span};

/// Below this a request takes less memory elsewhere than the search is worth.
const LEN_MIN: Bytes = Bytes::kib(256);
/// Entries that are looked at; who lives longer goes elsewhere.
pub(super) const AHEAD_MAX: usize = 1 << 14;
/// A request of which nothing is known goes where nobody comes for so many entries at least, or not here.
const AHEAD_MIN: usize = 64;

/// A request that was not served where the plan has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Displaced {
    /// Entries that come before it is freed.
    life: u32,
    bytes: Bytes,
}

impl PlannedPool {
    /// The entry's place cannot be had, and for as long as it lives some other can.
    #[cold]
    pub(super) fn relocate(&mut self, entry: u32, request: &Request) -> Served {
        let lane = self.lane_of(entry);
        self.note_displaced(entry, request);
        let span = self.expected_life(lane, request).and_then(|life| self.room_for(life, request, lane));
        let Some(span) = span else { return Served::Elsewhere };
        Served::Reused(self.serve_tenant(span, request))
    }

    /// Serves a request that the plan does not know at the place that the plan leaves free longest.
    /// If it is still live then, the entry that comes there is served elsewhere.
    #[cold]
    pub fn alloc_anywhere(&mut self, request: &Request) -> Option<DeviceAddress> {
        let lane = self.lanes.with_room(request)?;
        let span = match self.expected_life(lane, request) {
            Some(life) => self.room_for(life, request, lane),
            None => self.longest_room(lane, request),
        }?;
        Some(self.serve_tenant(span, request))
    }

    /// Where the plan sends requests of a lane from its cursor on, or from where it is on a detour, one by one. Behind a plan without a cycle nobody comes.
    pub(super) fn coming(&self, lane: usize) -> impl Iterator<Item = PlanSpan> + '_ {
        let lane = &self.lanes[lane];
        let next = |entry: &u32| Some(lane.matcher.next(*entry));
        let entries = std::iter::successors(Some(self.next_in_cycle(lane)), next);
        let entries = entries.take_while(|entry| *entry < lane.matcher.entries().end);
        self.coming_on_detour(lane).chain(entries.map(|entry| self.offsets_of(entry)))
    }

    /// The smallest stretch that can serve a request for as long as `life` entries take that come from the cursor on.
    pub(super) fn room_for(&self, life: u32, request: &Request, lane: usize) -> Option<PlanSpan> {
        let len = limits::allocation_len(request.bytes)?;
        if len < LEN_MIN || life as usize > AHEAD_MAX {
            return None;
        }
        let room = self.room_while(life, len.get(), lane);
        let (start, _) = room.into_iter().min_by_key(|(start, end)| (end - start, *start))?;
        Span::new(PlanOffset::new(start), len)
    }

    /// Stretches of at least `len` bytes of a lane's part of the pool that are free, and where the plan sends
    /// nothing for as long as `life` entries take that come from the cursor on.
    pub(super) fn room_while(&self, life: u32, len: u64, lane: usize) -> Vec<(u64, u64)> {
        let mut room = self.room_now(len, lane);
        for span in self.coming(lane).take(life as usize) {
            if room.is_empty() {
                break;
            }
            cut(&mut room, span.start().get(), span.end().get(), len);
        }
        room
    }

    /// Entries that come behind `entry` before it is gone; `None` if the plan has it for good.
    fn life(&self, entry: u32) -> Option<u32> {
        let death = Some(self.expiries.death(entry)).filter(|death| *death != NEVER)?;
        self.lanes[self.lane_of(entry)].matcher.distance(entry + 1, death)
    }

    /// The entry of this request is not to be had: it lives as long all the same.
    pub(super) fn note_displaced(&mut self, entry: u32, request: &Request) {
        let lane = self.lane_of(entry);
        self.lanes[lane].displaced = self.life(entry).map(|life| Displaced { life, bytes: request.bytes });
    }

    /// A request that the plan does not have, and that may be one more like those just before: it is taken to live as long.
    pub(super) fn note_like(&mut self, number: usize, request: &Request) {
        let lane = &self.lanes[number];
        let cursor = lane.matcher.cursor();
        let first = cursor.saturating_sub(NEAR as u32).max(lane.matcher.entries().start);
        let like = (first..cursor).rev().find(|entry| self.is_like(*entry, request));
        self.lanes[number].displaced = None;
        if let Some(like) = like {
            self.note_displaced(like, request);
        }
    }

    /// How many entries will come before a request is gone that was not served where the plan has it, if that is known.
    pub(super) fn expected_life(&self, lane: usize, request: &Request) -> Option<u32> {
        self.lanes[lane].displaced.filter(|of| of.bytes == request.bytes).map(|of| of.life)
    }

    /// The stretch that can serve a request of which nothing is known for the longest.
    fn longest_room(&self, lane: usize, request: &Request) -> Option<PlanSpan> {
        let len = limits::allocation_len(request.bytes)?;
        if len < LEN_MIN {
            return None;
        }
        let (span, left_alone) = self.last_reached(lane, len)?;
        (left_alone >= AHEAD_MIN).then_some(span)
    }

    /// Where a lane's part of the pool is free for `len` bytes and the plan sends something last, and how
    /// many entries come before that.
    pub(super) fn last_reached(&self, lane: usize, len: Bytes) -> Option<(PlanSpan, usize)> {
        let shortest = |room: &[(u64, u64)]| room.iter().copied().min_by_key(|(start, end)| end - start);
        let mut room = self.room_now(len.get(), lane);
        let (mut last, mut left_alone) = (shortest(&room), 0);
        for span in self.coming(lane).take(AHEAD_MAX) {
            if room.is_empty() {
                break;
            }
            last = shortest(&room);
            cut(&mut room, span.start().get(), span.end().get(), len.get());
            left_alone += 1;
        }
        let (start, _) = last?;
        Some((Span::new(PlanOffset::new(start), len)?, left_alone))
    }

    /// Stretches of at least `len` bytes of a lane's part of the pool that are free and not lent, in the
    /// order of places.
    pub(super) fn room_now(&self, len: u64, lane: usize) -> Vec<(u64, u64)> {
        let part = &self.lanes[lane].part;
        self.free_within(part.start, part.end, len)
    }

    /// The same of the offsets from `from` to `to`.
    pub(super) fn free_within(&self, from: u64, to: u64, len: u64) -> Vec<(u64, u64)> {
        let taken = self.orderly.iter().map(|entry| self.offsets_of(entry)).chain(self.tenants.spans());
        let mut taken: Vec<(u64, u64)> = taken
            .map(|span| (span.start().get(), span.end().get()))
            .filter(|(start, end)| *start < to && from < *end)
            .collect();
        taken.sort_unstable();
        let (mut room, mut at) = (Vec::new(), from);
        for (start, end) in taken.into_iter().chain([(to, to)]) {
            if start >= at + len {
                room.push((at, start));
            }
            // Whom the plan does not know may end anywhere.
            at = at.max(end.next_multiple_of(limits::ALLOCATION_ALIGNMENT.get()));
        }
        room
    }
}
