//! Parts of the pool that the page pool has: requests that cannot have their places are served there.
//!
//! The pool's own parts are those that its entries have. A part of them that is free, and that the plan
//! leaves alone for long enough, is *lent* to the page pool; a request whose place is lent takes back
//! what the page pool has free of it.
//!
//! Not for: which request is served from such a part, which the runtime and the page pool decide.

use super::relocate::AHEAD_MAX;
use super::tenants::LENT;
use super::{PlannedPool, Request, Served};
use crate::ids::StreamId;
use crate::units::{self, Bytes, DeviceAddress, PlanOffset, PlanSpan, Span};

/// A request of which nothing is known is expected to be freed after so many entries.
const AHEAD_UNKNOWN: u32 = 64;

/// A live allocation of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// Where.
    pub span: PlanSpan,
    /// Bytes as asked for.
    pub bytes: Bytes,
}

impl PlannedPool {
    /// The place of the request at the cursor, if this is the request and a part of that is lent.
    pub fn lacks(&self, request: &Request) -> Option<PlanSpan> {
        let lane = self.lanes.of(request)?;
        let place = if self.lanes[lane].detour.is_some() {
            self.next_on_detour(lane, request)
        } else {
            let next = self.lanes[lane].next().filter(|next| self.is_like(*next, request));
            next.map(|next| self.offsets_of(next))
        };
        place.filter(|span| self.tenants.has_lent(*span))
    }

    /// The cursor goes over the entry of this request, whose place cannot be had. Serves it at
    /// another, if one is free for long enough.
    pub fn pass_over(&mut self, request: &Request) -> Option<DeviceAddress> {
        let lane = self.lanes.of(request)?;
        self.counts.blocked += 1;
        if self.pass_over_on_detour(lane) {
            return None;
        }
        let next = self.lanes[lane].next()?;
        self.skip(next);
        match self.relocate(next, request) {
            Served::Reused(address) => Some(address),
            _ => None,
        }
    }

    /// Free parts, at least `least` bytes each, that the plan leaves alone until a request is freed
    /// that was not served, in ascending order of offsets: only those of the request's own lane. None
    /// for a stream that the plan does not know, or that has requested nothing yet.
    pub fn left_alone(&self, request: &Request, least: Bytes) -> Vec<PlanSpan> {
        let Some(lane) = self.lanes.with_room(request) else { return Vec::new() };
        let life = self.expected_life(lane, request).unwrap_or(AHEAD_UNKNOWN).min(AHEAD_MAX as u32);
        self.room_while(life, least.get().max(1), lane).into_iter().filter_map(span_of).collect()
    }

    /// Of the parts that are free for a request now, the one that the plan leaves alone for the longest.
    pub fn left_alone_longest(&self, request: &Request, len: Bytes) -> Option<PlanSpan> {
        let lane = self.lanes.with_room(request)?;
        self.last_reached(lane, len).map(|(span, _)| span)
    }

    /// All parts that are free and the pool's own.
    pub fn idle_parts(&self) -> Vec<PlanSpan> {
        self.free_within(0, self.span.len().get(), 1).into_iter().filter_map(span_of).collect()
    }

    /// The same of the lanes of one stream: what is free there was freed by what that stream does.
    pub fn idle_parts_of(&self, stream: StreamId) -> Vec<PlanSpan> {
        let lanes = (0..self.lanes.count()).filter(|lane| self.lanes.bound_stream(*lane) == Some(stream));
        lanes.flat_map(|lane| self.room_now(1, lane)).filter_map(span_of).collect()
    }

    /// A free part is the page pool's from now on.
    pub fn lend(&mut self, part: PlanSpan) {
        self.tenants.lend(part);
    }

    /// A part that was lent is the pool's again.
    pub fn take_back(&mut self, part: PlanSpan) {
        self.tenants.take_back(part);
    }

    /// What of a part is not the pool's.
    pub fn lent_in(&self, part: PlanSpan) -> Vec<PlanSpan> {
        self.tenants.lent_in(part).collect()
    }

    /// The offsets of the pool.
    pub fn offsets(&self) -> PlanSpan {
        Span::new(PlanOffset::new(0), self.span.len()).expect("a pool begins somewhere and ends")
    }

    /// Entries of the plan.
    pub fn entry_count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The parts that its entries have, in ascending order, those that touch as one.
    pub fn entry_parts(&self) -> Vec<PlanSpan> {
        let mut spans: Vec<PlanSpan> = (0..self.entries.len() as u32).map(|entry| self.offsets_of(entry)).collect();
        spans.sort_unstable_by_key(|span| span.start());
        units::joined(spans)
    }

    /// Live allocations.
    pub fn placed(&self) -> Vec<Placed> {
        let placed = |entry: u32| Placed { span: self.offsets_of(entry), bytes: self.entries[entry as usize].bytes };
        let orderly = self.orderly.iter().map(placed);
        let tenants = self.tenants.iter().filter(|(_, bytes)| *bytes != LENT);
        orderly.chain(tenants.map(|(span, bytes)| Placed { span, bytes })).collect()
    }
}

fn span_of((start, end): (u64, u64)) -> Option<PlanSpan> {
    Span::new(PlanOffset::new(start), Bytes::new(end.checked_sub(start)?))
}
