//! The pools of one runtime together: which of them serves a request, and which takes a free.
//!
//! Invariant: an address is live in one pool at most.

use super::{Counter, Counters, NotLive, Pools};
use crate::ids::StreamId;
use crate::limits;
use crate::pool::Request;
use crate::pool::planned::{PlannedCounts, Served};
use crate::record::Tap;
use crate::units::{Bytes, DeviceAddress};

impl Pools {
    /// Records an event.
    #[inline]
    pub(super) fn note(&mut self, what: impl Fn(&mut Tap)) {
        for (_, tap) in &mut self.taps {
            what(tap);
        }
    }

    /// What is private is in no recording.
    pub(super) fn note_recorded(&mut self, address: DeviceAddress, stream: StreamId) {
        if self.private.len_of(address).is_none() {
            self.note(|tap| tap.record_stream(address, stream));
        }
    }

    #[inline]
    pub(super) fn alloc(&mut self, request: &Request, counters: Counters) -> Option<DeviceAddress> {
        let (address, by) = match &mut self.planned {
            Some(installed) if !installed.is_suspended() => match installed.pool.alloc(request) {
                Served::At(address) => (address, Counter::PLANNED),
                other => self.alloc_astray(request, other, counters)?,
            },
            planned => {
                planned.iter_mut().for_each(|installed| installed.pool.note_suspended(request));
                (self.pages.alloc(request.bytes, request.stream)?, Counter::POOL)
            }
        };
        counters.served(by, request.bytes, limits::occupied_len(request.bytes));
        Some(address)
    }

    /// Serves a request that does not have the place of its entry.
    fn alloc_astray(
        &mut self,
        request: &Request,
        served: Served,
        counters: Counters,
    ) -> Option<(DeviceAddress, (Counter, Counter))> {
        match served {
            Served::At(_) | Served::Unbacked => return None,
            Served::HeldUp => {
                self.is_held_up = true;
                return None;
            }
            Served::Reused(_) | Served::Unknown | Served::Elsewhere => {}
        }
        let installed = self.planned.as_mut()?;
        // Without marks nothing says when the job may go by its plan again.
        if counters.get(Counter::Iterations) > 0 {
            installed.note_astray(&mut self.pages);
        }
        if let Served::Reused(address) = served {
            return Some((address, Counter::REUSED));
        }
        match self.pages.alloc(request.bytes, request.stream) {
            Some(address) => Some((address, Counter::POOL)),
            None if served == Served::Unknown && !installed.is_suspended() => {
                Some((installed.pool.alloc_anywhere(request)?, Counter::REUSED))
            }
            None => None,
        }
    }

    #[inline]
    pub(super) fn free(&mut self, address: DeviceAddress, counters: Counters) -> Result<(), NotLive> {
        let planned = self.planned.as_mut().and_then(|installed| installed.free(address, &mut self.pages));
        let freed = planned.or_else(|| self.pages.free(address));
        let bytes = freed.ok_or(NotLive(address))?;
        counters.freed(bytes, limits::occupied_len(bytes));
        Ok(())
    }

    /// No stream but the one that an allocation was made on has to pass its free, and it is not freed already.
    #[inline]
    pub(super) fn may_free_now(&self, address: DeviceAddress, stream: StreamId) -> bool {
        (self.recorded.is_empty() || !self.recorded.contains_key(&address))
            && (self.deferred.is_empty() || !self.deferred.has(address))
            && !(self.may_be_of_another(stream) && self.is_of_another(address, stream))
    }

    /// Jobs of one stream, which most are, never look.
    #[inline]
    pub(super) fn may_be_of_another(&self, stream: StreamId) -> bool {
        self.has_streams || stream != StreamId::DEFAULT
    }

    /// It lies in memory of another stream than this.
    pub(super) fn is_of_another(&self, address: DeviceAddress, stream: StreamId) -> bool {
        let of = self.planned.as_ref().and_then(|installed| installed.stream_at(address));
        let of = of.or_else(|| self.pages.stream_at(address)).or_else(|| self.private.stream_at(address));
        of.is_some_and(|of| of != stream)
    }

    pub(super) fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        let planned = self.planned.as_ref().and_then(|installed| installed.pool.len_of(address));
        planned.or_else(|| self.pages.len_of(address)).or_else(|| self.private.len_of(address))
    }

    pub(super) fn is_live(&self, address: DeviceAddress) -> bool {
        self.len_of(address).is_some()
    }

    /// Idle bytes of the page pool: what a plan needs later is not idle.
    pub(super) fn idle(&self) -> Bytes {
        self.pages.free_bytes()
    }

    /// What the plan has served, and those before it.
    pub(super) fn planned_counts(&self) -> PlannedCounts {
        let now = self.planned.as_ref().map_or_else(PlannedCounts::default, |installed| installed.pool.counts());
        self.counts_before + now
    }

    /// Bytes of chunks of which nothing is in use, and that no plan needs.
    pub(super) fn idle_chunks(&self) -> Bytes {
        self.pages.usage().idle_chunks
    }

    pub(super) fn held(&self) -> Bytes {
        let all = self.pages.held() + self.private.held();
        all.saturating_sub(self.slept())
    }

    pub(super) fn live_allocations(&self) -> u64 {
        let planned = self.planned.as_ref().map_or(0, |installed| installed.pool.live_allocations());
        planned + self.pages.live_allocations() + self.private.live_allocations()
    }
}
