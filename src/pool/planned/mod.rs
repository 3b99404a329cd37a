//! The planned pool: serves requests at the addresses that a plan gives them, as long as that is safe.
//!
//! A plan is a hint. The matcher ([`matcher`]) holds a cursor into it; when a request agrees with the entry there and the entry's span is free, the
//! answer is `base + offset`, in constant time.
//!
//! ## When a span is free
//!
//! Live allocations of the pool are of two kinds.
//!
//! * *Orderly* ones were served at the cursor, and the plan has them live where the cursor stands. A bit per entry says so. When the cursor comes to an entry, those that the plan
//!   has gone by then are looked at ([`Expiries`]; about one for each entry) and whoever is still there is a tenant from then on. What is orderly then is live at that moment of the plan together with
//!   the entry, and two entries that are live together share no byte: that is what the validator has checked.
//! * *Tenants* ([`tenants`]) are all others: served out of order, freed later than the plan says, or unknown to the plan. Their spans are kept
//!   exactly, with a bit per 2 MiB so that the exact look-up is rare.
//!
//! So an entry is free when no tenant overlaps it, and a space that the plan leaves idle over the layers of a request that varies ([`crate::plan::ReuseSpaces`]) is free when no tenant does. That is the
//! whole argument why two live allocations never overlap, whatever the plan says and however late a free comes; [`PlannedPool::invariants`] checks it. A plan that does not pass the validator is not
//! served from.

mod bits;
mod dynamic;
mod flags;
mod lend;
mod locate;
mod matcher;
mod relocate;
mod tenants;

use std::collections::HashMap;
use std::ops::Range;

use self::dynamic::Dynamic;
use self::flags::Flags;
pub use self::lend::Lendable;
use self::matcher::{Again, Matcher};
use self::tenants::{LENT, Tenants};
use super::Request;
use crate::ids::StreamId;
use crate::limits;
use crate::plan::validate::{self, Wrong};
use crate::plan::{self, Expiries, Plan};
use crate::trace::ContextKey;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, PlanOffset, PlanSpan, Span};

/// The planned pool of one device.
#[derive(Debug)]
pub struct PlannedPool {
    span: AddressSpan,
    entries: Box<[Planned]>,
    cycle_start: u32,
    expiries: Expiries,
    dynamic: Dynamic,
    /// Entries whose allocation is live and orderly. There is one flag more, which is never set.
    orderly: Flags,
    places: Places,
    tenants: Tenants,
    matcher: Matcher,
    streams: Streams,
    /// Where entries are, once somebody has asked.
    cells: Option<Box<locate::Cells>>,
    /// The last request that was not served where the plan has it.
    displaced: Option<relocate::Displaced>,
    /// What lies behind is nobody's of the plan.
    plan_end: u64,
    /// All but the hits, which follow from how far the cursor has come.
    counts: PlannedCounts,
    /// Requests that agreed with the entry at the cursor and were not served.
    blocked_at_cursor: u64,
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
    /// Entries that the cursor went over without a request.
    pub skipped: u64,
    /// Times that the cursor was set anew, far away.
    pub resynchronised: u64,
    /// Requests for an entry with another size.
    pub resized: u64,
    /// Requests served where the plan has nobody for as long as they live: those that vary, and those whose place was taken or had not room for them.
    pub reused: u64,
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
    /// It is the one at the cursor, and there is no memory behind its place yet ([`PlannedPool::lacks`]). Nothing has changed: it may be asked for again when there is, or
    /// the cursor goes over it ([`PlannedPool::pass_over`]).
    Unbacked,
}

/// An entry as the matcher and the guard need it: half a cache line, and all of it in that line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Planned {
    bytes: Bytes,
    context: ContextKey,
    /// Index into [`Places`], which has its offset.
    place: u32,
    /// Index into [`Streams`].
    stream: u32,
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

/// Who is at an offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Occupant {
    Nobody,
    /// An orderly allocation, served for this entry.
    Entry(u32),
    Tenant,
}

const NOBODY: u32 = u32::MAX;
const TENANT: u32 = u32::MAX - 1;
const NO_KEY: u32 = u32::MAX;

/// Who is at each offset of the plan: an open-addressed table with linear probing, made once. The key is the offset in units of allocation.
#[derive(Debug)]
struct Places {
    cells: Box<[(u32, u32)]>,
    shift: u32,
}

impl Places {
    fn new(offsets: impl Iterator<Item = u32> + Clone) -> Places {
        let count = offsets.clone().collect::<std::collections::BTreeSet<_>>().len();
        let len = (count * 2).next_power_of_two().max(2);
        let mut places =
            Places { cells: vec![(NO_KEY, NOBODY); len].into_boxed_slice(), shift: 32 - len.trailing_zeros() };
        for offset in offsets {
            let at = places.probe(offset);
            places.cells[at].0 = offset;
        }
        places
    }

    /// The cell of `offset`, or the empty one where it would go.
    #[inline]
    fn probe(&self, offset: u32) -> usize {
        let mut at = (offset.wrapping_mul(0x9e37_79b1) >> self.shift) as usize;
        while self.cells[at].0 != offset && self.cells[at].0 != NO_KEY {
            at = (at + 1) & (self.cells.len() - 1);
        }
        at
    }

    fn find(&self, offset: u32) -> Option<u32> {
        let at = self.probe(offset);
        (self.cells[at].0 == offset).then_some(at as u32)
    }

    /// The cell of an offset of the plan.
    fn of(&self, offset: u32) -> u32 {
        self.probe(offset) as u32
    }

    /// The cell of an offset: that, and who is there, [`NOBODY`], [`TENANT`] or an entry. Some other one where the plan has no such offset.
    #[inline]
    fn near(&mut self, offset: u32) -> &mut (u32, u32) {
        let at = self.probe(offset);
        &mut self.cells[at]
    }

    fn offset(&self, place: u32) -> u32 {
        self.cells[place as usize].0
    }

    fn at(&self, place: u32) -> Occupant {
        match self.cells[place as usize].1 {
            NOBODY => Occupant::Nobody,
            TENANT => Occupant::Tenant,
            entry => Occupant::Entry(entry),
        }
    }

    fn set(&mut self, place: u32, occupant: Occupant) {
        self.cells[place as usize].1 = match occupant {
            Occupant::Nobody => NOBODY,
            Occupant::Tenant => TENANT,
            Occupant::Entry(entry) => entry,
        };
    }
}

/// Which stream of this process each stream of the plan is. Raw stream handles differ between runs, so they are bound when they are first
/// seen; the default stream is always itself.
#[derive(Debug)]
struct Streams(Vec<Stream>);

#[derive(Debug)]
struct Stream {
    bound: Option<StreamId>,
    /// The bytes of the pool that its entries have.
    part: Range<u64>,
}

impl Streams {
    /// The plan's number of a stream of which something has come.
    fn of(&self, asked: StreamId) -> Option<u32> {
        self.0.iter().position(|stream| stream.bound == Some(asked)).map(|of| of as u32)
    }

    #[inline]
    fn is_bound(&self, planned: u32, asked: StreamId) -> bool {
        self.0[planned as usize].bound == Some(asked)
    }

    fn agree(&self, planned: u32, asked: StreamId) -> bool {
        match self.0[planned as usize].bound {
            Some(bound) => bound == asked,
            None => asked != StreamId::DEFAULT && self.of(asked).is_none(),
        }
    }

    fn bind(&mut self, planned: u32, asked: StreamId) {
        let bound = &mut self.0[planned as usize].bound;
        if bound.is_none() {
            *bound = Some(asked);
        }
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
        let mut streams = Streams(Vec::new());
        let mut stream_of: HashMap<StreamId, u32> = HashMap::new();
        let mut number = |stream: StreamId| {
            *stream_of.entry(stream).or_insert_with(|| {
                let bound = (stream == StreamId::DEFAULT).then_some(StreamId::DEFAULT);
                let part = plan.part_of(stream).map_or(0..0, |part| part.start().get()..part.end().get());
                streams.0.push(Stream { bound, part });
                streams.0.len() as u32 - 1
            })
        };
        let expiries = Expiries::of(plan);
        let nobody = plan.entries.len() as u32;
        let entries = plan
            .entries
            .iter()
            .zip(0..)
            .map(|(entry, at)| Planned {
                bytes: entry.bytes,
                context: entry.context,
                place: places.of(units(entry.offset)),
                stream: number(entry.stream),
                gone: expiries.before(at).first().map_or(nobody, |gone| *gone),
                has_more_gone: expiries.before(at).len() > 1,
            })
            .collect::<Box<[_]>>();
        let dynamic = Dynamic::new(plan, number);
        Ok(PlannedPool {
            span,
            orderly: Flags::new(entries.len() + 1),
            cycle_start: plan.cycle_start as u32,
            expiries,
            dynamic,
            places,
            tenants: Tenants::new(span.len()),
            matcher: Matcher::new(&entries, plan.cycle_start as u32),
            entries,
            streams,
            cells: None,
            displaced: None,
            plan_end: span.len().get(),
            counts: PlannedCounts::default(),
            blocked_at_cursor: 0,
        })
    }

    /// What varies is served elsewhere from now on, whatever the plan leaves idle.
    pub fn stop_reusing(&mut self) {
        self.dynamic = Dynamic::none();
    }

    /// The addresses of the pool.
    pub fn span(&self) -> AddressSpan {
        self.span
    }

    /// What it has served.
    pub fn counts(&self) -> PlannedCounts {
        let passed_unserved = self.counts.skipped + self.counts.resized + self.blocked_at_cursor;
        PlannedCounts { hits: self.matcher.passed() - passed_unserved, ..self.counts }
    }

    /// Allocations that are live here. Walks over the plan: a count that is kept would be written at every allocation.
    pub fn live_allocations(&self) -> u64 {
        (self.orderly.iter().count() + self.tenants.iter().filter(|(_, bytes)| *bytes != LENT).count()) as u64
    }

    /// Serves a request, or says that another pool must.
    #[inline]
    pub fn alloc(&mut self, request: &Request) -> Served {
        if request.is_dynamic {
            return self.alloc_dynamic(request);
        }
        let cursor = self.matcher.cursor();
        if let Some(planned) = self.entries.get(cursor as usize).copied()
            && planned.is_like(request)
            && self.streams.is_bound(planned.stream, request.stream)
        {
            self.matcher.step();
            return self.serve_in_order(cursor, &planned, request);
        }
        self.alloc_elsewhere_in_the_plan(request)
    }

    fn agrees(&self, entry: u32, request: &Request) -> bool {
        let planned = &self.entries[entry as usize];
        planned.is_like(request) && self.streams.agree(planned.stream, request.stream)
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

    /// The same for an entry that was looked for: its stream may be none of this process yet.
    fn serve_found(&mut self, entry: u32, request: &Request) -> Served {
        let planned = self.entries[entry as usize];
        self.streams.bind(planned.stream, request.stream);
        self.matcher.step();
        self.serve_in_order(entry, &planned, request)
    }

    /// The entry, which the cursor has just gone over, cannot have its place now.
    #[cold]
    fn serve_blocked(&mut self, entry: u32, request: &Request) -> Served {
        if self.tenants.has_hole(self.offsets_of(entry)) {
            self.matcher.step_back(entry);
            return Served::Unbacked;
        }
        self.counts.blocked += 1;
        self.blocked_at_cursor += 1;
        self.relocate(entry, request)
    }

    /// The place of a request, where it is the one at the cursor and has no memory behind all of it.
    pub fn lacks(&self, request: &Request) -> Option<PlanSpan> {
        let cursor = self.matcher.cursor();
        let is_it = (cursor as usize) < self.entries.len() && self.agrees(cursor, request);
        is_it.then(|| self.offsets_of(cursor)).filter(|span| self.tenants.has_hole(*span))
    }

    /// The cursor goes over the entry that stands there: for it there is no memory.
    pub fn pass_over(&mut self) {
        let entry = self.matcher.cursor();
        if let Some(planned) = self.entries.get(entry as usize).copied() {
            self.matcher.skip();
            self.expire(entry, &planned);
            self.counts.skipped += 1;
        }
    }

    /// Says of a part of the pool, in whole cells of 2 MiB, that there is no memory behind it, or that there is. Nobody is there.
    pub fn set_hole(&mut self, offsets: PlanSpan, is_hole: bool) {
        self.tenants.set_hole(offsets, is_hole);
    }

    /// The addresses of a part of the pool.
    pub fn addresses_of(&self, offsets: PlanSpan) -> AddressSpan {
        let start = self.span.start().checked_add(Bytes::new(offsets.start().get()));
        start.and_then(|start| Span::new(start, offsets.len())).expect("it is a part of the pool")
    }

    /// The parts of the pool that somebody has now.
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

    /// A request that is not the entry at the cursor's on a stream that is known: one on a stream of which it is the first, one that was skipped before, one ahead, or one that the plan does not have.
    #[cold]
    fn alloc_elsewhere_in_the_plan(&mut self, request: &Request) -> Served {
        let cursor = self.matcher.cursor();
        if (cursor as usize) < self.entries.len() && self.agrees(cursor, request) {
            return self.serve_found(cursor, request);
        }
        if let Some(served) = self.alloc_unlike_before(request) {
            return served;
        }
        self.matcher.note(request);
        if let Some(entry) = self.matcher.find_missed(|entry| self.agrees(entry, request)) {
            self.matcher.forget_missed(entry);
            return self.serve_late(entry, request);
        }
        match self.find_entry(request) {
            None => self.serve_unfound(request),
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

    /// The entry that a request agrees with which was not missed and is not at the cursor.
    fn find_entry(&self, request: &Request) -> Option<Again> {
        let ahead = || self.matcher.look_ahead(request);
        let before = std::iter::once(self.matcher.cursor()).chain(ahead());
        let found = before.zip(ahead()).enumerate().find(|(distance, (before, entry))| {
            // Further away one alone may be like a later one by chance.
            let is_sure = || self.matcher.stray_before().is_some_and(|stray| self.agrees(*before, stray));
            self.agrees(*entry, request) && (*distance < matcher::NEAR || is_sure())
        });
        let near = found.map(|(_, (_, entry))| Again::Ahead(entry));
        near.or_else(|| self.matcher.find_again(|entry, asked| self.agrees(entry, asked)))
    }

    /// A request that nothing near the cursor agrees with. If it comes from where the entry at the cursor does, and is about as large, it is that one with another size; whether it was, the next ones tell.
    fn serve_unfound(&mut self, request: &Request) -> Served {
        let entry = self.matcher.cursor();
        let is_resized = self.entries.get(entry as usize).is_some_and(|planned| {
            request.context != ContextKey::UNKNOWN
                && planned.context == request.context
                && planned.bytes.get().max(request.bytes.get()) / 2 <= planned.bytes.get().min(request.bytes.get())
                && self.streams.agree(planned.stream, request.stream)
        });
        if !is_resized {
            self.counts.unplanned += 1;
            self.note_like(request);
            return Served::Unknown;
        }
        self.counts.resized += 1;
        self.matcher.skip();
        let planned = self.entries[entry as usize];
        self.expire(entry, &planned);
        let (span, is_smaller) = (self.offsets_of(entry), request.bytes < planned.bytes);
        let is_free = self.places.at(planned.place) == Occupant::Nobody && self.tenants.is_clear(span);
        if !is_smaller || !is_free {
            return self.relocate(entry, request);
        }
        let len = limits::allocation_len(request.bytes);
        let span = len.and_then(|len| Span::new(span.start(), len)).expect("it is less than the entry's");
        Served::Reused(self.serve_tenant(span, request, planned.stream))
    }

    /// The entry's place cannot be had, and for as long as it lives some other can.
    #[cold]
    fn relocate(&mut self, entry: u32, request: &Request) -> Served {
        let stream = self.entries[entry as usize].stream;
        self.note_displaced(entry, request);
        let span = self.expected_life(request).and_then(|life| self.room_for(life, request, stream));
        let Some(span) = span else { return Served::Elsewhere };
        Served::Reused(self.serve_tenant(span, request, stream))
    }

    /// Serves a request that the plan does not know where the plan sends nobody for as long as can be: it may be gone by then, and if it is not, what is in its way goes elsewhere in turn.
    #[cold]
    pub fn alloc_anywhere(&mut self, request: &Request) -> Option<DeviceAddress> {
        let of_plan = self.streams.of(request.stream)?;
        let span = match self.expected_life(request) {
            Some(life) => self.room_for(life, request, of_plan),
            None => self.longest_room(of_plan, request),
        }?;
        Some(self.serve_tenant(span, request, of_plan))
    }

    /// Serves a request where no entry has it.
    fn serve_tenant(&mut self, span: PlanSpan, request: &Request, stream: u32) -> DeviceAddress {
        self.settle(span, request.bytes);
        self.streams.bind(stream, request.stream);
        self.counts.reused += 1;
        self.addresses_of(span).start()
    }

    /// Moves the cursor to `entry` over all that lies between.
    fn skip_to(&mut self, entry: u32) {
        let mut skipped = 0;
        while self.matcher.cursor() != entry {
            let over = self.matcher.cursor();
            self.matcher.skip();
            let planned = self.entries[over as usize];
            self.expire(over, &planned);
            skipped += 1;
        }
        self.counts.skipped += skipped;
        self.counts.resynchronised += u64::from(skipped > matcher::WINDOW as u64);
    }

    fn make_tenant(&mut self, entry: u32) {
        self.settle(self.offsets_of(entry), self.entries[entry as usize].bytes);
        self.orderly.clear(entry);
    }

    /// Serves an entry that the cursor has gone over already, if nobody is there now.
    fn serve_late(&mut self, entry: u32, request: &Request) -> Served {
        let span = self.offsets_of(entry);
        let planned = self.entries[entry as usize];
        // Whoever came before the entry and is orderly now was live together with it; whoever came after lies between it and the cursor.
        let overlaps_since =
            self.matcher.since(entry).any(|other| self.orderly.is_set(other) && self.offsets_of(other).overlaps(span));
        let is_taken = self.places.at(planned.place) != Occupant::Nobody;
        if overlaps_since || is_taken || !self.tenants.is_clear(span) {
            self.counts.blocked += 1;
            return self.relocate(entry, request);
        }
        self.settle(span, request.bytes);
        self.streams.bind(planned.stream, request.stream);
        self.counts.late += 1;
        if self.matcher.is_behind(entry) {
            self.rewind_behind(entry);
        }
        Served::At(self.address(planned.place))
    }

    /// The job is not where the cursor is but just behind `entry`: the cursor goes back, and what was served ahead of it is no longer orderly.
    fn rewind_behind(&mut self, entry: u32) {
        self.make_tenants(self.matcher.since(entry).collect());
        self.matcher.rewind_behind(entry);
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

    /// A tenant that began here is gone.
    fn vacate_place(&mut self, offset: PlanOffset) {
        let units = (offset.get() / limits::ALLOCATION_ALIGNMENT.get()) as u32;
        if let Some(place) = self.places.find(units) {
            self.places.set(place, Occupant::Nobody);
        }
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
    fn alloc_dynamic(&mut self, request: &Request) -> Served {
        if self.dynamic.is_empty() {
            return Served::Elsewhere;
        }
        let streams = &self.streams;
        let found = self.dynamic.find(request, self.matcher.cursor(), |stream| streams.agree(stream, request.stream));
        found.and_then(|number| self.reuse(number, request)).map_or(Served::Elsewhere, Served::Reused)
    }

    /// A request that the entry at the cursor is not: one that the plan expects right here, without knowing its size. Nobody has said that it would vary.
    fn alloc_unlike_before(&mut self, request: &Request) -> Option<Served> {
        if self.dynamic.is_empty() {
            return None;
        }
        let streams = &self.streams;
        let number =
            self.dynamic.find_at(request, self.matcher.cursor(), |stream| streams.agree(stream, request.stream))?;
        Some(self.reuse(number, request).map_or(Served::Elsewhere, Served::Reused))
    }

    /// Serves a request that varies in the first of its spaces, the shortest first, that has room for it now (STAlloc, equation 7): best fit, but for spaces of which a part is taken.
    fn reuse(&mut self, number: u32, request: &Request) -> Option<DeviceAddress> {
        let cursor = self.matcher.cursor();
        let group = self.dynamic.spaces.group(number)?;
        let (first, last) = group.cursor;
        // Behind the last entry of a pass the cursor stands at the first of the next; before the first pass it does, too, and that is not the same.
        let has_ended_pass = self.matcher.has_ended_pass();
        let is_behind_last = last as usize == self.entries.len() && cursor == self.cycle_start && has_ended_pass;
        // What is idle in the prologue some entry of the cycle may have from then on, for good.
        let is_over = has_ended_pass && self.dynamic.is_of_prologue(number);
        if is_over || !(first..=last).contains(&cursor) && !is_behind_last {
            return None;
        }
        let len = limits::allocation_len(request.bytes)?;
        let units = u32::try_from(len.get() / limits::ALLOCATION_ALIGNMENT.get()).ok()?;
        let spaces = self.dynamic.spaces.spaces(group);
        let near = &mut self.dynamic.near[number as usize];
        let first = plan::first_with_room(spaces, units, *near as usize);
        *near = first as u32;
        let is_behind_plan = cursor as usize >= self.entries.len();
        let is_free = |span: PlanSpan| {
            let is_there = |entry: u32| self.orderly.is_set(entry) && self.offsets_of(entry).overlaps(span);
            if is_behind_plan {
                // Behind the end of a plan without a cycle nobody comes, and so nobody looks for any of them.
                return !self.orderly.iter().any(is_there);
            }
            // The plan has these gone when the next entry comes, and nobody has looked since whether they are.
            !self.expiries.before(cursor).iter().copied().any(is_there)
        };
        let gap = |space: &(u32, u32)| {
            let start = self.tenants.gap(plan::span_of(*space), len)?;
            Span::new(start, len).filter(|span| is_free(*span))
        };
        let span = spaces[first..].iter().find_map(gap)?;
        Some(self.serve_tenant(span, request, self.dynamic.stream(number)))
    }

    /// Nobody is there, looked up the slow way: over every live allocation.
    fn is_free_now(&self, span: PlanSpan) -> bool {
        self.tenants.is_clear(span) && self.live_spans().all(|live| !live.overlaps(span))
    }

    /// An iteration ends: the next request is the first of the cycle.
    pub fn mark_iteration(&mut self) {
        self.dynamic.begin_cycle();
        if self.matcher.at_cycle_start() || self.cycle_start as usize >= self.entries.len() {
            return;
        }
        self.skip_to(self.cycle_start);
    }

    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        let orderly: Vec<u32> = self.orderly.iter().collect();
        let mut spans: Vec<PlanSpan> = self.live_spans().collect();
        if let Some(span) = spans.iter().find(|span| self.tenants.has_hole(**span)) {
            return Err(format!("{span:?} is live, and there is no memory behind it"));
        }
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
        // What makes the flags enough: whoever is orderly and overlaps the entry at the cursor is gone by the plan when that comes, or is itself.
        let cursor = self.matcher.cursor();
        if (cursor as usize) < self.entries.len() {
            let span = self.offsets_of(cursor);
            for entry in orderly {
                let is_known = entry == cursor || self.expiries.before(cursor).contains(&entry);
                if self.offsets_of(entry).overlaps(span) && !is_known {
                    return Err(format!("entry {entry} is live and overlaps entry {cursor}, and the plan has both"));
                }
            }
        }
        self.tenants.invariants()
    }
}

#[cfg(test)]
mod tests;
