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

mod bits;
mod detours;
mod dynamic;
mod flags;
mod lanes;
mod lend;
mod locate;
mod matcher;
mod places;
mod relocate;
mod starts;
mod tenants;

use std::ops::Range;

use self::detours::Detours;
use self::dynamic::Dynamic;
use self::flags::Flags;
use self::lanes::{Lanes, Progress};
pub use self::lend::Placed;
use self::matcher::{Again, Matcher};
use self::places::{NO_KEY, NOBODY, Occupant, Places, TENANT};
use self::tenants::{LENT, Tenants};
use super::Request;
use crate::ids::StreamId;
use crate::limits;
use crate::plan::validate::{self, Wrong};
use crate::plan::{self, Expiries, LanePlan, Plan};
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
    /// Who is in the way of a request may be freed already and wait for a stream: whoever can ask is told first.
    expects_frees: bool,
}

/// What the pool has served and what it has not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PlannedCounts {
    /// Requests served at the cursor.
    pub hits: u64,
    /// Requests served for an entry that the cursor had skipped.
    pub late: u64,
    /// Requests that agreed with an entry whose span was not free.
    pub blocked: u64,
    /// Requests that agree with no entry near the cursor.
    pub unplanned: u64,
    /// Entries that the cursor went over without a request, or back over where an iteration had ended before.
    pub skipped: u64,
    /// Times that the cursor was set anew, far away.
    pub resynchronised: u64,
    /// Requests for an entry with another size.
    pub resized: u64,
    /// Requests served where the plan has nobody for as long as they live: those that vary, and those whose place was taken or had not room for them.
    pub reused: u64,
    /// Requests served where a detour has them.
    pub detoured: u64,
}

impl std::ops::Add for PlannedCounts {
    type Output = PlannedCounts;

    fn add(self, other: PlannedCounts) -> PlannedCounts {
        PlannedCounts {
            hits: self.hits + other.hits,
            late: self.late + other.late,
            blocked: self.blocked + other.blocked,
            unplanned: self.unplanned + other.unplanned,
            skipped: self.skipped + other.skipped,
            resynchronised: self.resynchronised + other.resynchronised,
            resized: self.resized + other.resized,
            reused: self.reused + other.reused,
            detoured: self.detoured + other.detoured,
        }
    }
}

impl PlannedCounts {
    /// Requests that the plan did not serve although it might have, and entries that nobody asked for.
    pub fn deviations(&self) -> u64 {
        self.late + self.blocked + self.unplanned + self.skipped + self.resized
    }
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

/// A plan that this pool cannot serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InstallError {
    /// The addresses are fewer than the plan needs.
    #[error("the plan needs {needed} and got {given}")]
    TooSmall {
        /// Bytes of the plan.
        needed: Bytes,
        /// Bytes of the addresses.
        given: Bytes,
    },
    /// The pool is larger than offsets of 32 bits reach, in units of allocation.
    #[error("a planned pool of {0} is too large")]
    TooLarge(Bytes),
    /// It contradicts itself.
    #[error("the plan contradicts itself")]
    Wrong(#[from] Wrong),
}

impl PlannedPool {
    /// Offsets are numbers of 32 bits, in units of allocation, and two of those stand for none.
    pub const LEN_MAX: Bytes = Bytes::new(NO_KEY as u64 * limits::ALLOCATION_ALIGNMENT.get());

    /// The pool of `plan` at `span`, which is mapped and stays so while the pool lives.
    pub fn new(plan: &Plan, span: AddressSpan) -> Result<PlannedPool, InstallError> {
        if plan.pool_len > span.len() {
            return Err(InstallError::TooSmall { needed: plan.pool_len, given: span.len() });
        }
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        if plan.pool_len >= PlannedPool::LEN_MAX {
            return Err(InstallError::TooLarge(plan.pool_len));
        }
        validate::check(plan)?;
        let units = |offset: PlanOffset| (offset.get() / unit) as u32;
        let places = Places::new(plan.entries.iter().map(|entry| units(entry.offset)));
        let of_lanes = plan.lanes();
        let expiries = Expiries::of(&of_lanes);
        let nobody = plan.entries.len() as u32;
        let numbered = of_lanes.iter().zip(0..).flat_map(|(of, lane)| of.plan.entries.iter().map(move |of| (of, lane)));
        let entries = numbered
            .zip(0..)
            .map(|((entry, lane), at)| Planned {
                bytes: entry.bytes,
                context: entry.context,
                place: places.of(units(entry.offset)),
                lane,
                gone: expiries.before(at).first().map_or(nobody, |gone| *gone),
                has_more_gone: expiries.before(at).len() > 1,
            })
            .collect::<Box<[_]>>();
        let mut first = 0;
        let progress = |of: &LanePlan| {
            let of_lane = first..first + of.entries.len() as u32;
            first = of_lane.end;
            let cycle_start = of_lane.start + of.plan.cycle_start as u32;
            let number_at = |at: usize| of.entries.get(at).copied().unwrap_or(nobody);
            // What the entries of the only lane leave over, detours have.
            let part = Some(0..plan.pool_len.get()).filter(|_| of_lanes.len() == 1);
            let part = part.or_else(|| of.plan.part().map(|part| part.start().get()..part.end().get()));
            let part = part.unwrap_or(0..0);
            let begins = (number_at(0), number_at(of.plan.cycle_start));
            let matcher = Matcher::new(&entries, of_lane, cycle_start);
            (of.lane, Progress::new(matcher, Dynamic::new(of), part, begins))
        };
        let detours = Detours::of(&of_lanes);
        let lanes = Lanes::new(of_lanes.iter().map(progress));
        let of_detours = detours.spans().map(|(lane, span)| (span.start().get()..span.end().get(), lane));
        let parts = lanes.iter().zip(0..).map(|(lane, number)| (lane.part.clone(), number)).chain(of_detours);
        let parts = merged(parts.collect());
        Ok(PlannedPool {
            span,
            orderly: Flags::new(entries.len() + 1),
            expiries,
            places,
            tenants: Tenants::new(span.len()),
            lanes,
            parts,
            detours,
            entries,
            cells: None,
            counts: PlannedCounts::default(),
            passed_unserved: 0,
            expects_frees: false,
        })
    }

    /// What varies is served elsewhere from now on, whatever the plan leaves idle.
    pub fn stop_reusing(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.dynamic = Dynamic::none());
    }

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

    /// A request comes while the plan is suspended.
    pub fn note_suspended(&mut self, request: &Request) {
        self.counts.unplanned += u64::from(!request.is_dynamic);
    }

    /// Serves a request, or says that another pool must.
    #[inline]
    pub fn alloc(&mut self, request: &Request) -> Served {
        let Some(number) = self.lanes.of(request) else { return self.alloc_in_new_lane(request) };
        if request.is_dynamic {
            return self.alloc_dynamic(number, request);
        }
        let lane = &mut self.lanes[number];
        if let Some(next) = lane.next()
            && let planned = self.entries[next as usize]
            && planned.is_like(request)
            && lane.detour.is_none()
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

    /// A request of a stream or thread that no lane is known to be: of the lane that wants it now, or has wanted it or will soon.
    #[cold]
    fn alloc_in_new_lane(&mut self, request: &Request) -> Served {
        let new = self.lanes.that_may_begin(request);
        if let Some(lane) = self.that_wants_next(&new, request) {
            self.lanes.bind(lane, request);
            return self.alloc(request);
        }
        if request.is_dynamic {
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

    /// A lane that nobody is known to be has a request in store, beyond doubt: of one size there are many.
    fn has_near(&self, lane: usize, request: &Request) -> bool {
        let again = || self.lanes[lane].matcher.find_again(|entry, asked| self.is_like(entry, asked)).is_some();
        let near = || self.find_missed(lane, request).is_some() || self.find_entry(lane, request).is_some();
        if request.context.is_unknown() { again() } else { near() }
    }

    /// The first of some lanes of which the next request may be this.
    fn that_wants_next(&self, lanes: &[usize], request: &Request) -> Option<usize> {
        let wants = |number: &usize| match (&self.lanes[*number], request.is_dynamic) {
            (lane, true) => lane.dynamic.knows(request),
            (lane, false) => lane.next().is_some_and(|next| self.is_like(next, request)),
        };
        let goes_round = |number: &usize| !request.is_dynamic && self.that_begins_with(*number, request).is_some();
        let lanes = || lanes.iter().copied();
        lanes().find(wants).or_else(|| lanes().find(goes_round))
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

    /// The same for an entry that was looked for and is at the cursor now.
    fn serve_found(&mut self, entry: u32, request: &Request) -> Served {
        let planned = self.entries[entry as usize];
        self.lanes[planned.lane as usize].matcher.step();
        self.serve_in_order(entry, &planned, request)
    }

    /// The entry, which the cursor has just gone over, cannot have its place now.
    #[cold]
    fn serve_blocked(&mut self, entry: u32, request: &Request) -> Served {
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

    /// The place of a request, where it is the one at the cursor and a part of that is not the pool's.
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

    /// Frees wait for streams, or none does any more: as long as they do, a request whose place somebody has is [`Served::HeldUp`].
    pub fn expect_frees(&mut self, expects: bool) {
        self.expects_frees = expects;
    }

    /// The cursor goes over the entry of this request, at which it stands: its place cannot be had. Serves
    /// it at another, if one is free for long enough.
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

    /// The cursor goes over the entry at which it stands.
    fn skip(&mut self, entry: u32) {
        let planned = self.entries[entry as usize];
        self.lanes[planned.lane as usize].matcher.skip();
        self.passed_unserved += 1;
        self.expire(entry, &planned);
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

    /// A request that is not the entry's at the cursor: one that was skipped before, one ahead, or one that the plan does not have.
    #[cold]
    fn alloc_elsewhere_in_the_plan(&mut self, lane: usize, request: &Request) -> Served {
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
    fn serve_astray(&mut self, lane: usize, request: &Request) -> Served {
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

    /// A request that nothing near the cursor agrees with. If it comes from where the entry at the cursor does, and is about as large, it is that one with another size; whether it was, the next ones tell.
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

    /// The entry's place cannot be had, and for as long as it lives some other can.
    #[cold]
    fn relocate(&mut self, entry: u32, request: &Request) -> Served {
        let lane = self.lane_of(entry);
        self.note_displaced(entry, request);
        let span = self.expected_life(lane, request).and_then(|life| self.room_for(life, request, lane));
        let Some(span) = span else { return Served::Elsewhere };
        Served::Reused(self.serve_tenant(span, request))
    }

    /// Serves a request that the plan does not know where the plan sends nobody for as long as can be: it may be gone by then, and if it is not, what is in its way goes elsewhere in turn.
    #[cold]
    pub fn alloc_anywhere(&mut self, request: &Request) -> Option<DeviceAddress> {
        let lane = self.lanes.with_room(request)?;
        let span = match self.expected_life(lane, request) {
            Some(life) => self.room_for(life, request, lane),
            None => self.longest_room(lane, request),
        }?;
        Some(self.serve_tenant(span, request))
    }

    /// Serves a request where no entry has it.
    fn serve_tenant(&mut self, span: PlanSpan, request: &Request) -> DeviceAddress {
        self.settle(span, request.bytes);
        self.counts.reused += 1;
        self.addresses_of(span).start()
    }

    /// Moves the cursor to `entry` over all that lies between, which nobody has asked for.
    fn skip_to(&mut self, entry: u32) {
        let skipped = self.go_on_to(entry);
        self.counts.skipped += skipped;
        self.counts.resynchronised += u64::from(skipped > matcher::WINDOW as u64);
    }

    /// Moves the cursor to `entry`, and says over how many others.
    fn go_on_to(&mut self, entry: u32) -> u64 {
        let lane = self.lane_of(entry);
        let mut over = 0;
        while let Some(next) = self.lanes[lane].next().filter(|next| *next != entry) {
            self.skip(next);
            over += 1;
        }
        over
    }

    fn make_tenant(&mut self, entry: u32) {
        self.settle(self.offsets_of(entry), self.entries[entry as usize].bytes);
        self.orderly.clear(entry);
    }

    /// Serves an entry that the cursor has gone over already, if nobody is there now.
    fn serve_late(&mut self, entry: u32, request: &Request) -> Served {
        let span = self.offsets_of(entry);
        let planned = self.entries[entry as usize];
        let matcher = &self.lanes[planned.lane as usize].matcher;
        // Whoever came before the entry and is orderly now was live together with it; whoever came after lies between it and the cursor.
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

    /// The job is not where the cursor is but just behind `entry`: the cursor goes back, and what was served ahead of it is no longer orderly.
    fn rewind_behind(&mut self, entry: u32) {
        let lane = self.lane_of(entry);
        self.make_tenants(self.lanes[lane].matcher.since(entry).collect());
        self.lanes[lane].matcher.rewind_behind(entry);
    }

    /// The job has asked for more than an iteration has, and what the next one begins with was like that: the cursor goes back to where it begins.
    fn rewind_to_start(&mut self, lane: usize) {
        let matcher = &self.lanes[lane].matcher;
        let last = matcher.entries().end - 1;
        self.counts.skipped += matcher.since(last).count() as u64;
        self.rewind_behind(last);
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

    /// The stream whose part of the pool an address lies in, if anybody has come for it.
    pub fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        let offset = address.checked_distance(self.span.start())?.get();
        let behind = self.parts.partition_point(|(part, _)| part.start <= offset);
        let (_, lane) = self.parts[..behind].last().filter(|(part, _)| offset < part.end)?;
        self.lanes.bound_stream(*lane as usize)
    }

    /// A lane is of another stream than this, or may come to be.
    pub fn has_other_streams(&self, stream: StreamId) -> bool {
        (0..self.lanes.count()).any(|lane| self.lanes.bound_stream(lane) != Some(stream))
    }

    /// Bytes that an allocation at `address` has, if it is a live one of this pool's.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        let offset = self.offset_of(address)?;
        let Some(place) = self.places.find(offset) else { return self.tenants.len_at(self.plan_offset(offset)) };
        match self.places.at(place) {
            Occupant::Nobody => None,
            Occupant::Entry(entry) => Some(self.offsets_of(entry).len()),
            Occupant::Tenant => self.tenants.len_at(self.plan_offset(offset)),
        }
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

    /// A request of a module whose sizes vary: in a space that the plan leaves idle for as long as it lives, if one is free.
    #[inline]
    fn alloc_dynamic(&mut self, number: usize, request: &Request) -> Served {
        let lane = &mut self.lanes[number];
        let next = lane.own_next();
        let found = lane.dynamic.find(request, next);
        found.and_then(|of| self.reuse(number, of, request)).map_or(Served::Elsewhere, Served::Reused)
    }

    /// A request that the entry at the cursor is not: one that the plan expects right here, without knowing its size. Nobody has said that it would vary.
    fn alloc_unlike_before(&mut self, number: usize, request: &Request) -> Option<Served> {
        let lane = &mut self.lanes[number];
        let next = lane.own_next();
        let found = lane.dynamic.find_at(request, next)?;
        Some(self.reuse(number, found, request).map_or(Served::Elsewhere, Served::Reused))
    }

    /// Serves a request that varies in the first of its spaces, the shortest first, that has room for it now (STAlloc, equation 7): best fit, but for spaces of which a part is taken.
    fn reuse(&mut self, number: usize, expected: u32, request: &Request) -> Option<DeviceAddress> {
        let lane = &self.lanes[number];
        let group = lane.dynamic.spaces.group(expected)?;
        let (first, last) = group.cursor;
        // Behind the last entry of a pass the cursor stands at the first of the next; before the first pass it does, too, and that is not the same.
        let has_ended_pass = lane.matcher.has_ended_pass();
        let is_behind_last =
            last as usize == lane.matcher.entries().len() && lane.matcher.at_cycle_start() && has_ended_pass;
        // What is idle in the prologue some entry of the cycle may have from then on, for good.
        let is_over = has_ended_pass && lane.dynamic.is_of_prologue(expected);
        if is_over || !(first..=last).contains(&lane.own_next()) && !is_behind_last {
            return None;
        }
        let len = limits::allocation_len(request.bytes)?;
        let units = u32::try_from(len.get() / limits::ALLOCATION_ALIGNMENT.get()).ok()?;
        let spaces = lane.dynamic.spaces.spaces(group);
        let first = plan::first_with_room(spaces, units, lane.dynamic.near[expected as usize] as usize);
        let next = lane.next();
        let is_free = |span: PlanSpan| {
            let is_there = |entry: u32| self.orderly.is_set(entry) && self.offsets_of(entry).overlaps(span);
            match next {
                // Behind the end of a plan without a cycle nobody comes, and so nobody looks for any of them.
                None => !self.orderly.iter().any(is_there),
                // The plan has these gone when the next entry comes, and nobody has looked since whether they are.
                Some(next) => !self.expiries.before(next).iter().copied().any(is_there),
            }
        };
        let gap = |space: &(u32, u32)| {
            let start = self.tenants.gap(plan::span_of(*space), len)?;
            Span::new(start, len).filter(|span| is_free(*span))
        };
        let found = spaces[first..].iter().find_map(gap);
        self.lanes[number].dynamic.near[expected as usize] = first as u32;
        Some(self.serve_tenant(found?, request))
    }

    /// Nobody is there, looked up the slow way: over every live allocation.
    fn is_free_now(&self, span: PlanSpan) -> bool {
        self.tenants.is_clear(span) && self.live_spans().all(|live| !live.overlaps(span))
    }

    /// An iteration ends: the next request is the first of the cycle.
    pub fn mark_iteration(&mut self) {
        self.lanes.note_mark();
        for number in 0..self.lanes.count() {
            self.break_off_detour(number);
            let lane = &mut self.lanes[number];
            lane.dynamic.begin_cycle();
            let (cursor, cycle_start) = (lane.matcher.cursor(), lane.matcher.cycle_start());
            if cycle_start == lane.matcher.entries().end {
                continue;
            }
            if self.detours.lead(cursor, cycle_start) {
                self.go_over_to(number, cycle_start);
            } else if lane.matcher.is_past_mark() {
                self.rewind_to_start(number);
            } else {
                self.skip_to(cycle_start);
            }
            self.lanes[number].matcher.note_mark();
        }
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

/// The same parts in order, those of one lane that meet put together.
fn merged(mut parts: Vec<(Range<u64>, u32)>) -> Box<[(Range<u64>, u32)]> {
    parts.retain(|(part, _)| !part.is_empty());
    parts.sort_by_key(|(part, _)| (part.start, part.end));
    parts.dedup_by(|(next, next_lane), (last, lane)| {
        let meets = lane == next_lane && next.start <= last.end;
        if meets {
            last.end = last.end.max(next.end);
        }
        meets
    });
    parts.into()
}

#[cfg(test)]
mod tests;
