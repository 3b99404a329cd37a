//! A request that is not the entry at its lane's cursor. It may be a skipped entry or a later one,
//! belong to another lane, have another size than planned, or not be in the plan.

use super::matcher::{self, Again};
use super::places::Occupant;
use super::{PlannedPool, Request, Served};
use crate::limits;
use crate::trace::ContextKey;
use crate::units::Span;

impl PlannedPool {
    /// A request of a stream or thread that is bound to no lane: binds one that expects the request
    /// next, or else one that has skipped it or expects it soon.
    #[cold]
    pub(super) fn alloc_in_new_lane(&mut self, request: &Request) -> Served {
        self.says_dynamic |= request.is_dynamic;
        let new = self.lanes.that_may_begin(request);
        if let Some(lane) = self.that_wants_next(&new, request) {
            self.lanes.bind(lane, request);
            return self.alloc(request);
        }
        if self.is_dynamic(request) {
            return Served::Elsewhere;
        }
        for lane in new {
            self.lanes[lane].matcher.note(request);
            if self.has_near(lane, request) {
                self.lanes.bind(lane, request);
                return self.serve_astray(lane, request);
            }
        }
        self.lanes.note_turned_away(request);
        self.counts.unplanned += 1;
        Served::Unknown
    }

    /// An unbound lane has the request near its cursor. Many entries have one size, so without a
    /// context several requests in a row have to agree.
    fn has_near(&self, lane: usize, request: &Request) -> bool {
        let again = || self.lanes[lane].matcher.find_again(|entry, asked| self.is_like(entry, asked)).is_some();
        let near = || self.find_missed(lane, request).is_some() || self.find_entry(lane, request).is_some();
        if request.context.is_unknown() { again() } else { near() }
    }

    /// The first of some lanes of which the next request may be this.
    fn that_wants_next(&self, lanes: &[usize], request: &Request) -> Option<usize> {
        let wants = |number: &usize| {
            let lane = &self.lanes[*number];
            if lane.dynamic.is_dynamic(request) {
                lane.dynamic.knows(request)
            } else {
                lane.next().is_some_and(|next| self.is_like(next, request))
            }
        };
        let goes_round = |number: &usize| !request.is_dynamic && self.that_begins_with(*number, request).is_some();
        let lanes = || lanes.iter().copied();
        lanes().find(wants).or_else(|| lanes().find(goes_round))
    }

    /// A request that is not the entry at the cursor: skipped before, ahead, or not in the plan.
    #[cold]
    pub(super) fn alloc_elsewhere_in_the_plan(&mut self, lane: usize, request: &Request) -> Served {
        self.unserved_dynamic = None;
        if self.lanes[lane].dynamic.is_dynamic(request) {
            return self.alloc_dynamic(lane, request);
        }
        if let Some(served) = self.alloc_on_detour(lane, request) {
            return served;
        }
        if let Some(served) = self.alloc_unlike_before(lane, request) {
            return served;
        }
        self.lanes[lane].matcher.note(request);
        self.serve_astray(lane, request)
    }

    /// A request that the matcher has noted as not the one at the cursor.
    pub(super) fn serve_astray(&mut self, lane: usize, request: &Request) -> Served {
        if let Some(entry) = self.find_missed(lane, request) {
            self.lanes[lane].matcher.forget_missed(entry);
            return self.serve_late(entry, request);
        }
        match self.find_entry(lane, request) {
            None => self.serve_unfound(lane, request),
            Some(Again::Ahead(entry)) => {
                self.skip_to(entry);
                self.serve_found(entry, request)
            }
            Some(Again::Back(entry)) => {
                self.counts.resynchronised += 1;
                self.rewind_behind(entry - 1);
                self.serve_found(entry, request)
            }
        }
    }

    /// The entry that a request agrees with which was missed.
    fn find_missed(&self, lane: usize, request: &Request) -> Option<u32> {
        self.lanes[lane].matcher.find_missed(|entry| self.is_like(entry, request))
    }

    /// The entry that a request agrees with which was not missed and is not at the cursor.
    fn find_entry(&self, lane: usize, request: &Request) -> Option<Again> {
        let matcher = &self.lanes[lane].matcher;
        let ahead = || matcher.look_ahead(request);
        let before = std::iter::once(matcher.cursor()).chain(ahead());
        let found = before.zip(ahead()).enumerate().find(|(distance, (before, entry))| {
            // Further away one alone may be like a later one by chance.
            let is_sure = || matcher.stray_before().is_some_and(|stray| self.is_like(*before, stray));
            self.is_like(*entry, request) && (*distance < matcher::NEAR || is_sure())
        });
        let near = found.map(|(_, (_, entry))| Again::Ahead(entry));
        near.or_else(|| matcher.find_again(|entry, asked| self.is_like(entry, asked)))
    }

    /// Serves an entry that was searched for, and to which the cursor has moved.
    fn serve_found(&mut self, entry: u32, request: &Request) -> Served {
        let planned = self.entries[entry as usize];
        self.lanes[planned.lane as usize].matcher.step();
        self.serve_in_order(entry, &planned, request)
    }

    /// A request that nothing near the cursor agrees with. It is taken for the entry at the cursor,
    /// resized, if it has that context and between half and twice that size.
    fn serve_unfound(&mut self, lane: usize, request: &Request) -> Served {
        let is_resized = |next: &u32| {
            let planned = &self.entries[*next as usize];
            request.context != ContextKey::UNKNOWN
                && planned.context == request.context
                && planned.bytes.get().max(request.bytes.get()) / 2 <= planned.bytes.get().min(request.bytes.get())
        };
        let resized = self.lanes[lane].next().filter(is_resized);
        self.lanes.note_unfound(lane, resized.is_some());
        let Some(entry) = resized else {
            self.counts.unplanned += 1;
            self.note_like(lane, request);
            return Served::Unknown;
        };
        self.counts.resized += 1;
        self.skip(entry);
        let planned = self.entries[entry as usize];
        let (span, is_smaller) = (self.offsets_of(entry), request.bytes < planned.bytes);
        let is_free = self.places.at(planned.place) == Occupant::Nobody && self.tenants.is_clear(span);
        if !is_smaller || !is_free {
            return self.relocate(entry, request);
        }
        let len = limits::allocation_len(request.bytes);
        let span = len.and_then(|len| Span::new(span.start(), len)).expect("it is less than the entry's");
        Served::Reused(self.serve_tenant(span, request))
    }

    /// Serves an entry that the cursor has passed, if its place is free.
    fn serve_late(&mut self, entry: u32, request: &Request) -> Served {
        let span = self.offsets_of(entry);
        let planned = self.entries[entry as usize];
        let matcher = &self.lanes[planned.lane as usize].matcher;
        // Orderly allocations of earlier entries are live together with this one in the plan. Those
        // of later entries lie between it and the cursor.
        let overlaps_since =
            matcher.since(entry).any(|other| self.orderly.is_set(other) && self.offsets_of(other).overlaps(span));
        let is_taken = self.places.at(planned.place) != Occupant::Nobody;
        if overlaps_since || is_taken || !self.tenants.is_clear(span) {
            self.counts.blocked += 1;
            return self.relocate(entry, request);
        }
        self.settle(span, request.bytes);
        self.counts.late += 1;
        if self.lanes[planned.lane as usize].matcher.is_behind(entry) {
            self.rewind_behind(entry);
        }
        Served::At(self.address(planned.place))
    }
}
