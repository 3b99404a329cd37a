//! A plan that is served from: its planned pool, and the site in the page pool where that lies.
//!
//! The planned pool has the bytes that the plan's entries need; it counts all other bytes of its span
//! as lent, and the page pool has those ([`crate::pool::pages::Site`]). A plan that is there before the
//! job gets new chunks. One that is made while the job runs lies around what is live, and takes what is
//! free: nothing moves. What lacks is taken, or brought, once a request comes for it.
//!
//! Not for: which request may have which address ([`PlannedPool`]), and when a plan comes
//! ([`super::offer`]).
//!
//! Invariant: a byte of the site is the planned pool's, or the page pool's, or has no memory; the last
//! two are lent in the planned pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RuntimeConfig;
use crate::ids::{PlanId, StreamId};
use crate::limits;
use crate::memory::{Chunk, MemoryError};
use crate::plan::Plan;
use crate::pool::Request;
use crate::pool::pages::{PagePool, Site};
use crate::pool::planned::PlannedPool;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, PlanOffset, PlanSpan, Span};

#[derive(Debug)]
pub(super) struct Installed {
    pub(super) pool: PlannedPool,
    pub(super) id: PlanId,
    pub(super) site: Site,
    /// The most that the process held before the plan came, if that came while the job ran. Up to it a
    /// lease may bring more than its request lacks.
    pub(super) most: Option<Bytes>,
    /// The job does something else until its next iteration begins: the page pool has all that is free.
    is_suspended: bool,
    /// Where the iteration began.
    since: Progress,
    /// Bytes that the process may hold before requests without a place take what the plan needs later.
    pub(super) usual: Bytes,
    /// Bytes of the pool that the plan's entries span; its detours have the rest.
    pub(super) cycle_len: Bytes,
    /// What its entries need.
    pub(super) parts: Vec<PlanSpan>,
}

/// Requests in an iteration that the plan has, and that it has not or could not serve; and all deviations.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    hits: u64,
    astray: u64,
    deviations: u64,
}

impl Progress {
    fn of(pool: &PlannedPool) -> Progress {
        let counts = pool.counts();
        let astray = counts.unplanned + counts.resized + pool.unexpected();
        Progress { hits: counts.hits, astray, deviations: counts.deviations() }
    }
}

/// After so many requests of an iteration that go astray, and this part of the plan's entries, and one for
/// so many that do not, the plan is suspended.
const ASTRAY_MIN: u64 = 32;
const ASTRAY_OF_ENTRIES: u64 = 256;
const ASTRAY_PART: u64 = 3;

/// Up to this part of what is held, or these bytes, the process grows before requests without a place
/// take what the plan needs later.
const MORE_PART: u64 = 1024;
const MORE_MIN: Bytes = Bytes::mib(4);

/// What a process that holds `held` bytes may hold more before its plan makes room.
pub(super) fn growth_margin(held: Bytes) -> Bytes {
    Bytes::new(held.get() / MORE_PART).max(MORE_MIN)
}

/// A plan that has no site yet.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) id: PlanId,
    /// All of it is lent.
    pub(super) pool: PlannedPool,
    /// What its entries need.
    parts: Vec<PlanSpan>,
    /// In whose arena it lies.
    pub(super) stream: StreamId,
    cycle_len: Bytes,
}

impl Ready {
    /// A plan whose pool begins at an address.
    pub(super) fn at(
        plan: &Plan,
        start: DeviceAddress,
        config: &RuntimeConfig,
    ) -> Result<Ready, super::PlanInstallError> {
        let granule = config.granule();
        let len = plan.pool_len.max(granule).round_up(granule);
        let span = len.and_then(|len| Span::new(start, len));
        let mut pool = PlannedPool::new(plan, span.ok_or(MemoryError::Unstitchable(Bytes::LARGEST))?)?;
        if !config.reuses {
            pool.stop_reusing();
        }
        pool.lend(pool.offsets());
        let cycle_len = plan.cycle_span().round_up(granule).unwrap_or(pool.span().len());
        Ok(Ready { id: plan.id(), parts: pool.entry_parts(), pool, stream: main_stream(plan), cycle_len })
    }
}

/// What a plan that has no site yet takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Bytes that its entries lack.
    pub(super) lacks: Bytes,
    /// Bytes of idle chunks that are the plan's from then on.
    pub(super) idle: Bytes,
}

impl Ready {
    /// What it takes. `None` where it cannot lie where it was to.
    pub(super) fn need(&self, pages: &PagePool) -> Option<Need> {
        let span = self.pool.span();
        pages.site_range(self.stream).filter(|range| range.start() == span.start())?;
        let site = pages.site(self.stream, span)?;
        let holes = |part: &PlanSpan| pages.holes_in(site, self.pool.addresses_of(*part));
        let lacks = self.parts.iter().flat_map(holes).map(|hole| hole.len()).sum();
        let entries = Span::new(span.start(), self.cycle_len.min(span.len()))?;
        Some(Need { lacks, idle: pages.idle_in(site, entries) })
    }
}

/// The stream that most bytes of a plan are requested on.
pub(super) fn main_stream(plan: &Plan) -> StreamId {
    let mut bytes: BTreeMap<StreamId, u64> = BTreeMap::new();
    for entry in &plan.entries {
        *bytes.entry(entry.lane.stream).or_default() += entry.span().len().get();
    }
    let most = bytes.into_iter().max_by_key(|(stream, bytes)| (*bytes, std::cmp::Reverse(*stream)));
    most.map_or(StreamId::DEFAULT, |(stream, _)| stream)
}

impl Installed {
    /// Opens the site. `None` where the arena has not these addresses.
    pub(super) fn open(ready: Ready, most: Option<Bytes>, pages: &mut PagePool) -> Option<Installed> {
        let Ready { id, pool, stream, cycle_len, parts } = ready;
        let site = pages.open_site(stream, pool.span())?;
        let (is_suspended, since, usual) = (false, Progress::default(), Bytes::ZERO);
        Some(Installed { pool, id, site, most, is_suspended, since, usual, cycle_len, parts })
    }

    /// Takes an allocation back, and says how many bytes were asked for. `None` if it is not one of the
    /// planned pool's.
    #[inline]
    pub(super) fn free(&mut self, address: DeviceAddress, pages: &mut PagePool) -> Option<Bytes> {
        let bytes = self.pool.free(address)?;
        if self.is_suspended {
            let span = Span::new(address, limits::occupied_len(bytes)).expect("it was served");
            self.lend(self.part_of(span), pages);
        }
        Some(bytes)
    }

    /// Takes what the page pool has free up to where the entries end: what varies may go where no entry
    /// is, too.
    pub(super) fn take_entries(&mut self, pages: &mut PagePool) {
        let whole = self.pool.offsets();
        let part = Span::new(whole.start(), self.cycle_len.min(whole.len())).expect("it is a part of the pool");
        self.take(part, pages);
    }

    /// The job does something else until its next iteration begins.
    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    /// A request went astray. Suspends the plan where too many did in this iteration.
    #[cold]
    pub(super) fn note_astray(&mut self, pages: &mut PagePool) {
        let now = Progress::of(&self.pool);
        let (hits, astray) = (now.hits - self.since.hits, now.astray - self.since.astray);
        if astray >= self.least_astray() && astray * ASTRAY_PART >= hits {
            self.suspend(pages);
        }
    }

    /// The page pool serves everything until the next mark, from what is free here, too. False where it
    /// does already, or where that cannot be: what other streams have freed is not the page pool's before
    /// the device was waited for.
    pub(super) fn suspend(&mut self, pages: &mut PagePool) -> bool {
        if self.is_suspended || self.has_other_streams() {
            return false;
        }
        self.is_suspended = true;
        for part in self.pool.idle_parts() {
            self.lend(part, pages);
        }
        true
    }

    fn least_astray(&self) -> u64 {
        ASTRAY_MIN.max(self.pool.entry_count() / ASTRAY_OF_ENTRIES)
    }

    /// The iteration does something else than the plan, or did.
    pub(super) fn has_deviated(&self) -> bool {
        self.pool.counts().deviations() - self.since.deviations >= self.least_astray()
    }

    /// An iteration ends: the next one goes by the plan.
    pub(super) fn mark_iteration(&mut self, pages: &mut PagePool) {
        if std::mem::take(&mut self.is_suspended) {
            self.take_entries(pages);
        }
        self.pool.mark_iteration();
        self.since = Progress::of(&self.pool);
    }

    /// Takes what the page pool has free of a part that is lent.
    pub(super) fn take(&mut self, part: PlanSpan, pages: &mut PagePool) {
        for taken in pages.take_for_plan(self.site, self.pool.addresses_of(part)) {
            self.pool.take_back(self.part_of(taken));
        }
    }

    /// The same of a part by its addresses.
    pub(super) fn take_at(&mut self, part: AddressSpan, pages: &mut PagePool) {
        self.take(self.part_of(part), pages);
    }

    /// Takes chunks of which nothing is in use out of the site: their parts are lent then, and have no
    /// memory. Chunks that cannot be unmapped stay, and their parts are the planned pool's as before.
    pub(super) fn give_up(&mut self, chunks: &[IdleChunk], pages: &mut PagePool) -> Vec<Arc<Chunk>> {
        let parts = || chunks.iter().flat_map(|chunk| chunk.own.iter().copied());
        parts().for_each(|part| self.lend(part, pages));
        let starts: Vec<DeviceAddress> = chunks.iter().map(|chunk| chunk.start).collect();
        let taken = pages.take_chunks(self.site, &starts);
        if taken.len() < chunks.len() {
            // The page pool has nothing free where a chunk is gone.
            parts().for_each(|part| self.take(part, pages));
        }
        taken
    }

    /// Lends a free part to the page pool.
    pub(super) fn lend(&mut self, part: PlanSpan, pages: &mut PagePool) {
        self.pool.lend(part);
        pages.give_from_plan(self.site, self.pool.addresses_of(part));
    }

    /// Live allocations in parts of other streams than the site's, with those.
    pub(super) fn live_of_others(&self) -> Vec<(DeviceAddress, StreamId)> {
        let addresses = self.pool.placed().into_iter().map(|placed| self.pool.addresses_of(placed.span).start());
        let of = |address| Some((address, self.pool.stream_at(address)?));
        addresses.filter_map(of).filter(|(_, stream)| *stream != self.site.stream()).collect()
    }

    /// Gives everything back: what is live is the page pool's from now on.
    pub(super) fn retire(self, pages: &mut PagePool) {
        for part in self.pool.idle_parts() {
            pages.give_from_plan(self.site, self.pool.addresses_of(part));
        }
        for placed in self.pool.placed() {
            let span = self.pool.addresses_of(placed.span);
            pages.adopt(self.site, span.start(), placed.bytes);
        }
        pages.close_site(self.site);
    }

    /// Bytes that the planned pool has, live and free.
    pub(super) fn held(&self) -> Bytes {
        let lent: Bytes = self.pool.lent_in(self.pool.offsets()).iter().map(|part| part.len()).sum();
        self.pool.span().len() - lent
    }

    /// Bytes of the planned pool that are free. Walks over all that is live.
    pub(super) fn idle(&self) -> Bytes {
        self.pool.idle_parts().iter().map(|part| part.len()).sum()
    }

    /// The process holds `held` bytes with the plan. It grows by a little before requests without a place
    /// take what the plan needs later, but not beyond what it held before a plan that came while it ran.
    pub(super) fn note_usual(&mut self, held: Bytes) {
        let most = self.most.map_or(Bytes::MAX, |most| most.max(held));
        self.usual = held.saturating_add(growth_margin(held)).min(most);
    }

    /// It came while the job ran.
    pub(super) fn is_late(&self) -> bool {
        self.most.is_some()
    }

    /// Requests of other streams than the site's are served: bytes that these free are not for the
    /// site's stream before the device was waited for, and the other way round.
    pub(super) fn has_other_streams(&self) -> bool {
        self.pool.has_other_streams(self.site.stream())
    }

    /// The parts that lack for a request which is the one at the cursor.
    pub(super) fn lacks_for(&self, request: &Request) -> Vec<PlanSpan> {
        self.pool.lacks(request).map_or_else(Vec::new, |place| self.pool.lent_in(place))
    }

    /// The stream that a live allocation was made on.
    pub(super) fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.pool.len_of(address)?;
        self.pool.stream_at(address)
    }

    /// Chunks all of whose bytes are free, here or in the page pool, and of which the planned pool has
    /// some: where each begins, its bytes, and the parts that the planned pool has. Chunks stay whose
    /// place new chunks of `granule` could not fill.
    pub(super) fn idle_chunks(&self, pages: &PagePool, granule: Bytes) -> Vec<IdleChunk> {
        let idle = self.pool.idle_parts();
        let mut chunks = Vec::new();
        // Memory that stays with its addresses would be unusable until all of the range goes.
        if pages.device().capabilities().memory_stays_with_addresses {
            return chunks;
        }
        for (start, chunk) in pages.chunks_in(self.site, self.pool.span()) {
            let Some(span) = Span::new(start, chunk.len()) else { continue };
            let is_whole = |bytes: u64| bytes.is_multiple_of(granule.get());
            let offset = start.checked_distance(self.pool.span().start());
            if !offset.is_some_and(|offset| is_whole(offset.get())) || !is_whole(chunk.len().get()) {
                continue;
            }
            let own = self.within(&idle, span);
            let own_len: Bytes = own.iter().map(|part| part.len()).sum();
            let free = || pages.free_parts(self.site, span).iter().map(|part| part.len()).sum::<Bytes>();
            if !own_len.is_zero() && own_len + free() == chunk.len() {
                chunks.push(IdleChunk { start, len: chunk.len(), own });
            }
        }
        chunks
    }

    /// The parts of some, in ascending order, that lie in a span of addresses.
    pub(super) fn within(&self, parts: &[PlanSpan], span: AddressSpan) -> Vec<PlanSpan> {
        let base = self.pool.span().start();
        let from = span.start().checked_distance(base).unwrap_or_default().get();
        let to = span.end().checked_distance(base).unwrap_or_default().get();
        let first = parts.partition_point(|part| part.end().get() <= from);
        let parts = parts[first..].iter().take_while(|part| part.start().get() < to);
        let cut = |part: &PlanSpan| {
            let (from, to) = (part.start().get().max(from), part.end().get().min(to));
            Span::new(PlanOffset::new(from), Bytes::new(to - from)).expect("it lies in the pool")
        };
        parts.map(cut).collect()
    }

    fn part_of(&self, span: AddressSpan) -> PlanSpan {
        let offset = span.start().checked_distance(self.pool.span().start()).expect("it lies in the site");
        Span::new(PlanOffset::new(offset.get()), span.len()).expect("it lies in the site")
    }

    /// What the planned pool has of the site.
    pub(super) fn own_parts(&self) -> Vec<AddressSpan> {
        let live = self.pool.placed().into_iter().map(|placed| placed.span);
        self.pool.idle_parts().into_iter().chain(live).map(|part| self.pool.addresses_of(part)).collect()
    }
}

/// A chunk of which nothing is in use.
#[derive(Debug)]
pub(super) struct IdleChunk {
    pub(super) start: DeviceAddress,
    pub(super) len: Bytes,
    /// The planned pool's parts of it.
    pub(super) own: Vec<PlanSpan>,
}
