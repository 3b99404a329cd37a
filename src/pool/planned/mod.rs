//! The planned pool: serves requests at the addresses that a plan gives them, as long as that is safe.
//!
//! A plan is a hint. For each of its lanes ([`lanes`]), a stream or a thread on it, the matcher ([`matcher`]) holds a cursor into it; when a request agrees with the entry there and the entry's span is free, the
//! answer is `base + offset`, in constant time.
//!
//! ## When a span is free
//!
//! Live allocations of the pool are of two kinds.
//!
//! * *Orderly* ones were served at the cursor of their lane, and the plan has them live where that stands. A bit per entry says so. When the cursor comes to an entry, those that the plan
//!   has gone by then are looked at ([`Expiries`]; about one for each entry) and whoever is still there is a tenant from then on. What is orderly then is live at that moment of the plan together with
//!   the entry, and two entries that are live together share no byte: that is what the validator has checked. Entries of different lanes never share one, so a cursor looks at its own lane only.
//! * *Tenants* ([`tenants`]) are all others: served out of order, freed later than the plan says, or unknown to the plan. Their spans are kept
//!   exactly, with a bit per 2 MiB so that the exact look-up is rare.
//!
//! So an entry is free when no tenant overlaps it, and a space that the plan leaves idle over the layers of a request that varies ([`crate::plan::ReuseSpaces`]) is free when no tenant does. That is the
//! whole argument why two live allocations never overlap, whatever the plan says and however late a free comes; [`PlannedPool::invariants`] checks it. A plan that does not pass the validator is not
//! served from.

mod astray;
mod bits;
mod counts;
mod cursor;
mod detours;
mod dynamic;
mod flags;
mod install;
mod lanes;
mod lend;
mod locate;
mod matcher;
mod places;
mod relocate;
mod starts;
mod tenants;

use std::ops::Range;

pub use self::counts::PlannedCounts;
use self::detours::Detours;
use self::flags::Flags;
pub use self::install::InstallError;
use self::lanes::{Lanes, Progress};
pub use self::lend::Placed;
use self::places::{NOBODY, Occupant, Places, TENANT};
use self::tenants::{LENT, Tenants};
use super::Request;
use crate::limits;
use crate::plan::Expiries;
use crate::trace::ContextKey;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, PlanOffset, PlanSpan, Span};

/// The planned pool of one device.
#[derive(Debug)]
pub struct PlannedPool {
    span: AddressSpan,
    /// Lane by lane.
    entries: Box<[Planned]>,
    expiries: Expiries,
    /// Entries whose allocation is live and orderly. There is one flag more, which is never set.
    orderly: Flags,
    places: Places,
    tenants: Tenants,
    lanes: Lanes,
    /// Which bytes of the pool are whose, lane by lane: where its entries lie, and its detours. In order, and none is two lanes'.
    parts: Box<[(Range<u64>, u32)]>,
    detours: Detours,
    /// Where entries are, once somebody has asked.
    cells: Option<Box<locate::Cells>>,
    /// All but the hits, which follow from how far the cursors have come.
    counts: PlannedCounts,
    /// Entries that a cursor went over and that were not served.
    passed_unserved: u64,
    /// Dynamic requests of modules that the plan knows, where it expects none.
    unexpected: u64,
    /// The job says of dynamic requests that they are: others are not.
    says_dynamic: bool,
    /// The last request that was not served here, if it was a dynamic one.
    unserved_dynamic: Option<Request>,
    /// Who is in the way of a request may be freed already and wait for a stream: whoever can ask is told first.
    expects_frees: bool,
}

/// What the pool does with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// It is served here, for an entry of the plan.
    At(DeviceAddress),
    /// It is served here, in a space that the plan leaves idle.
    Reused(DeviceAddress),
    /// Another pool must serve it.
    Elsewhere,
    /// The plan does not know it. Another pool should serve it, and if none has room [`PlannedPool::alloc_anywhere`] may.
    Unknown,
    /// It is the one at the cursor, and a part of its place is not the pool's now
    /// ([`PlannedPool::lacks`]). Nothing has changed: it may be asked for again when the pool has that, or
    /// the cursor goes over it ([`PlannedPool::pass_over`]).
    Unbacked,
    /// It is the one at the cursor, and who has its place may be freed already. Nothing has changed: it may be asked for again
    /// when that has been seen to, and no more is expected ([`PlannedPool::expect_frees`]).
    HeldUp,
}

/// An entry as the matcher and the guard need it: half a cache line, and all of it in that line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Planned {
    bytes: Bytes,
    context: ContextKey,
    /// Index into [`Places`], which has its offset.
    place: u32,
    /// Index into [`Lanes`].
    lane: u32,
    /// The first of those that the plan has gone before it, or one behind all entries.
    gone: u32,
    /// There are more of those.
    has_more_gone: bool,
}

const _: () = assert!(size_of::<Planned>() == 32);

impl Planned {
    #[inline]
    fn is_like(&self, request: &Request) -> bool {
        self.bytes == request.bytes && self.context.may_be(request.context)
    }
}

impl PlannedPool {
    /// The addresses of the pool.
    pub fn span(&self) -> AddressSpan {
        self.span
    }

    /// What it has served.
    pub fn counts(&self) -> PlannedCounts {
        let passed: u64 = self.lanes.iter().map(|lane| lane.matcher.passed()).sum();
        PlannedCounts { hits: passed - self.passed_unserved, ..self.counts }
    }

    /// Allocations that are live here. Walks over the plan: a count that is kept would be written at every allocation.
    pub fn live_allocations(&self) -> u64 {
        (self.orderly.iter().count() + self.tenants.iter().filter(|(_, bytes)| *bytes != LENT).count()) as u64
    }

    /// Dynamic requests of modules that the plan knows, where it expects none: the job does something else.
    pub fn unexpected(&self) -> u64 {
        self.unexpected
    }

    /// The request is dynamic: it says so, or the plan knows its module to be, or expected a dynamic one
    /// when it came.
    pub fn is_dynamic(&self, request: &Request) -> bool {
        self.lanes.has_dynamic(request) || self.unserved_dynamic == Some(*request)
    }

    /// A request comes while the plan is suspended.
    pub fn note_suspended(&mut self, request: &Request) {
        self.counts.unplanned += u64::from(!self.is_dynamic(request));
    }

    /// Serves a request, or says that another pool must.
    #[inline]
    pub fn alloc(&mut self, request: &Request) -> Served {
        let Some(number) = self.lanes.of(request) else { return self.alloc_in_new_lane(request) };
        if request.is_dynamic {
            self.says_dynamic = true;
            return self.alloc_dynamic(number, request);
        }
        let lane = &mut self.lanes[number];
        if let Some(next) = lane.next()
            && let planned = self.entries[next as usize]
            && planned.is_like(request)
            && lane.detour.is_none()
            && !(request.context.is_unknown() && !self.says_dynamic && lane.dynamic.expects_before(lane.own_next()))
        {
            lane.matcher.step();
            return self.serve_in_order(next, &planned, request);
        }
        self.alloc_elsewhere_in_the_plan(number, request)
    }

    #[inline]
    fn is_like(&self, entry: u32, request: &Request) -> bool {
        self.entries[entry as usize].is_like(request)
    }

    fn lane_of(&self, entry: u32) -> usize {
        self.entries[entry as usize].lane as usize
    }

    /// The cursor has just stepped over `entry`, whose turn it is.
    #[inline]
    fn serve_in_order(&mut self, entry: u32, planned: &Planned, request: &Request) -> Served {
        self.expire(entry, planned);
        let is_alone = || self.tenants.is_empty() || self.tenants.is_clear(self.offsets_of(entry));
        if self.places.at(planned.place) != Occupant::Nobody || !is_alone() {
            return self.serve_blocked(entry, request);
        }
        self.places.set(planned.place, Occupant::Entry(entry));
        self.orderly.set(entry);
        Served::At(self.address(planned.place))
    }

    /// The entry, which the cursor has just gone over, cannot have its place now.
    #[cold]
    fn serve_blocked(&mut self, entry: u32, request: &Request) -> Served {
        self.unserved_dynamic = None;
        if self.tenants.has_lent(self.offsets_of(entry)) {
            let lane = self.lane_of(entry);
            self.lanes[lane].matcher.step_back(entry);
            return Served::Unbacked;
        }
        if self.expects_frees {
            let lane = self.lane_of(entry);
            self.lanes[lane].matcher.step_back(entry);
            return Served::HeldUp;
        }
        self.counts.blocked += 1;
        self.passed_unserved += 1;
        self.relocate(entry, request)
    }

    /// Frees wait for streams, or none does any more: as long as they do, a request whose place somebody has is [`Served::HeldUp`].
    pub fn expect_frees(&mut self, expects: bool) {
        self.expects_frees = expects;
    }

    /// The addresses of a part of the pool.
    pub fn addresses_of(&self, offsets: PlanSpan) -> AddressSpan {
        let start = self.span.start().checked_add(Bytes::new(offsets.start().get()));
        start.and_then(|start| Span::new(start, offsets.len())).expect("it is a part of the pool")
    }

    /// The parts of the pool that are live or lent now.
    pub fn live_spans(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.orderly.iter().map(|entry| self.offsets_of(entry)).chain(self.tenants.spans())
    }

    /// The cursor comes to an entry: whoever the plan has gone by then, and is still there, is a tenant from now on.
    #[inline]
    fn expire(&mut self, entry: u32, planned: &Planned) {
        if self.orderly.is_set(planned.gone) || planned.has_more_gone && self.lingers(self.expiries.before(entry)) {
            self.make_tenants(self.expiries.before(entry).to_vec());
        }
    }

    /// One of these entries is live and orderly.
    #[inline]
    fn lingers(&self, entries: &[u32]) -> bool {
        entries.iter().any(|entry| self.orderly.is_set(*entry))
    }

    #[cold]
    fn make_tenants(&mut self, entries: Vec<u32>) {
        for entry in entries {
            if self.orderly.is_set(entry) {
                self.make_tenant(entry);
            }
        }
    }

    fn make_tenant(&mut self, entry: u32) {
        self.settle(self.offsets_of(entry), self.entries[entry as usize].bytes);
        self.orderly.clear(entry);
    }

    #[inline]
    fn address(&self, place: u32) -> DeviceAddress {
        let offset = Bytes::new(self.plan_offset(self.places.offset(place)).get());
        self.span.start().checked_add(offset).expect("every offset lies in the pool")
    }

    /// The bytes of the pool that an entry occupies.
    fn offsets_of(&self, entry: u32) -> PlanSpan {
        let planned = &self.entries[entry as usize];
        let start = self.plan_offset(self.places.offset(planned.place));
        Span::new(start, limits::occupied_len(planned.bytes)).expect("checked when the plan was made")
    }

    /// Serves a request where no entry has it.
    fn serve_tenant(&mut self, span: PlanSpan, request: &Request) -> DeviceAddress {
        self.settle(span, request.bytes);
        self.counts.reused += 1;
        self.addresses_of(span).start()
    }

    /// Takes an allocation back, and says how many bytes had been asked for. `None` if it is not one of this pool's.
    #[inline]
    pub fn free(&mut self, address: DeviceAddress) -> Option<Bytes> {
        let offset = self.offset_of(address)?;
        let (known, occupant) = self.places.near(offset);
        if *known != offset || *occupant >= TENANT {
            return self.free_tenant(offset);
        }
        let entry = std::mem::replace(occupant, NOBODY);
        self.orderly.clear(entry);
        Some(self.entries[entry as usize].bytes)
    }

    #[cold]
    fn free_tenant(&mut self, offset: u32) -> Option<Bytes> {
        let at = self.plan_offset(offset);
        // At an offset that no entry has only a tenant can be.
        let Some(place) = self.places.find(offset) else { return self.tenants.remove(at) };
        if self.places.at(place) != Occupant::Tenant {
            return None;
        }
        let bytes = self.tenants.remove(at)?;
        self.places.set(place, Occupant::Nobody);
        Some(bytes)
    }

    fn plan_offset(&self, units: u32) -> PlanOffset {
        PlanOffset::new(u64::from(units) * limits::ALLOCATION_ALIGNMENT.get())
    }

    /// Where `address` lies in the pool, in units of allocation.
    #[inline]
    fn offset_of(&self, address: DeviceAddress) -> Option<u32> {
        let distance = address.checked_distance(self.span.start())?.get();
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        (distance < self.span.len().get() && distance.is_multiple_of(unit)).then_some((distance / unit) as u32)
    }

    /// Gives a part of the pool to somebody whom the plan does not know, if nobody has it now. The plan's own requests stay away from it.
    pub fn occupy(&mut self, span: AddressSpan) -> bool {
        let Some(start) = span.start().checked_distance(self.span.start()) else { return false };
        let Some(offsets) = Span::new(PlanOffset::new(start.get()), span.len()) else { return false };
        if !self.span.contains_span(span) || span.is_empty() || !self.is_free_now(offsets) {
            return false;
        }
        self.settle(offsets, offsets.len());
        true
    }

    /// A tenant comes, whom no entry stands for.
    fn settle(&mut self, offsets: PlanSpan, bytes: Bytes) {
        self.tenants.insert(offsets, bytes);
        // Whom the plan does not know may begin anywhere.
        let (start, unit) = (offsets.start().get(), limits::ALLOCATION_ALIGNMENT.get());
        let offset = start.is_multiple_of(unit).then_some((start / unit) as u32);
        if let Some(place) = offset.and_then(|offset| self.places.find(offset)) {
            self.places.set(place, Occupant::Tenant);
        }
    }

    /// Takes back what [`PlannedPool::occupy`] gave.
    pub fn vacate(&mut self, address: DeviceAddress) -> bool {
        if self.free(address).is_some() {
            return true;
        }
        let start = address.checked_distance(self.span.start());
        start.and_then(|start| self.tenants.remove(PlanOffset::new(start.get()))).is_some()
    }

    /// Nobody is there, looked up the slow way: over every live allocation.
    fn is_free_now(&self, span: PlanSpan) -> bool {
        self.tenants.is_clear(span) && self.live_spans().all(|live| !live.overlaps(span))
    }

    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        let orderly: Vec<u32> = self.orderly.iter().collect();
        let mut spans: Vec<PlanSpan> = self.live_spans().collect();
        spans.sort_unstable_by_key(|span| span.start());
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].overlaps(pair[1])) {
            return Err(format!("live allocations overlap: {pair:?}"));
        }
        for entry in 0..self.entries.len() as u32 {
            if self.orderly.is_set(entry)
                != (self.places.at(self.entries[entry as usize].place) == Occupant::Entry(entry))
            {
                return Err(format!("entry {entry} is orderly or not, and its place says otherwise"));
            }
        }
        // What makes the flags enough: whoever is orderly and overlaps the entry at a cursor is gone by the plan when that comes, or is itself.
        for next in self.lanes.iter().filter_map(Progress::next) {
            let span = self.offsets_of(next);
            for entry in orderly.iter().copied() {
                let is_known = entry == next || self.expiries.before(next).contains(&entry);
                if self.offsets_of(entry).overlaps(span) && !is_known {
                    return Err(format!("entry {entry} is live and overlaps entry {next}, and the plan has both"));
                }
            }
        }
        self.tenants.invariants()
    }
}

#[cfg(test)]
mod tests;
