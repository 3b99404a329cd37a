//! A plan that is served from: its planned pool, the addresses of the static pool, and the memory
//! behind them, which may come bit by bit.
//!
//! A plan that is there before the job has all its memory at once. A plan that is made while the job
//! runs finds the memory in use: it gets the idle chunks, of whatever lengths. The rest of the static
//! pool stays without memory (a *hole*) until chunks that become idle, or new ones, fill it.
//!
//! Behind the plan's pool there are addresses for more chunks: the *tail*, for requests that cannot
//! have their places ([`super::lent`]).
//!
//! Not for: which request may have which address ([`PlannedPool`]), when a plan comes
//! ([`super::offer`]), and where chunks go ([`super::holes`]).
//!
//! Invariant: the static pool is made of chunks and holes, and the planned pool knows the same holes;
//! the tail has no holes, and the planned pool ends where the tail does.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RuntimeConfig;
use super::holes::Holes;
use super::lent::LentBlocks;
use crate::ids::{PlanId, StreamId};
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::plan::Plan;
use crate::pool::Request;
use crate::pool::planned::{Lendable, PlannedPool, overlapped};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, PlanOffset, PlanSpan, Span};

#[derive(Debug)]
pub(super) struct Installed {
    pub(super) pool: PlannedPool,
    pub(super) mapping: Mapping,
    pub(super) id: PlanId,
    held: Bytes,
    is_late: bool,
    holes: Holes,
    /// Bytes of the pool that the plan's entries have; its detours have the rest.
    cycle_len: Bytes,
    pub(super) granule: Bytes,
    /// Chunks of the tail, by where they begin, and the stream that each is for.
    tail: BTreeMap<PlanOffset, StreamId>,
    pub(super) lent: LentBlocks,
}

/// Behind the plan's pool there are addresses for this part of its length, and at least for these.
const TAIL_PART: u64 = 4;
const TAIL_MIN: Bytes = Bytes::mib(64);

/// Up to this part of the plan's pool, or these bytes, the tail grows before the plan's requests lose
/// their places.
const TAIL_USUAL_PART: u64 = 128;
const TAIL_USUAL_MIN: Bytes = Bytes::mib(32);

/// Addresses behind a plan's pool.
fn tail_room(len: Bytes, granule: Bytes) -> Bytes {
    (Bytes::new(len.get() / TAIL_PART).max(TAIL_MIN)).round_up(granule).expect("plans are shorter than addresses are")
}

/// Chunks that could not be mapped, and why.
type Unmapped = (Vec<Arc<Chunk>>, MemoryError);

impl Installed {
    /// A plan with all its memory.
    pub(super) fn whole(
        plan: &Plan,
        chunks: &[Arc<Chunk>],
        config: &RuntimeConfig,
    ) -> Result<Installed, super::PlanInstallError> {
        let held: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let device = chunks.first().ok_or(MemoryError::Unstitchable(held))?.device();
        let generous = held.checked_add(tail_room(held, config.granule())).unwrap_or(held);
        // Where addresses are few there is no tail.
        let mut mapping = Mapping::reserve(device, generous).or_else(|_| Mapping::reserve(device, held))?;
        mapping.put(mapping.span().start(), chunks)?;
        let pool = PlannedPool::new(plan, part_of(mapping.span(), held))?;
        let ends = chunks.iter().scan(Bytes::ZERO, |end, chunk| {
            *end += chunk.len();
            Some(*end)
        });
        let cycle_len = ends.into_iter().find(|end| *end >= plan.cycle_span()).unwrap_or(held);
        let holes = Holes::none(config.granule());
        Ok(Installed { held, cycle_len, ..Installed::new(plan, pool, mapping, holes, config) })
    }

    fn new(plan: &Plan, mut pool: PlannedPool, mapping: Mapping, holes: Holes, config: &RuntimeConfig) -> Installed {
        if !config.reuses {
            pool.stop_reusing();
        }
        Installed {
            pool,
            mapping,
            id: plan.id(),
            held: Bytes::ZERO,
            is_late: false,
            holes,
            cycle_len: Bytes::ZERO,
            granule: config.granule(),
            tail: BTreeMap::new(),
            lent: LentBlocks::default(),
        }
    }

    /// A plan with addresses, whole granules, and without memory.
    pub(super) fn hollow(
        plan: &Plan,
        device: &Arc<Device>,
        config: &RuntimeConfig,
    ) -> Result<Installed, super::PlanInstallError> {
        let granule = config.granule();
        let too_long = MemoryError::Unstitchable(Bytes::LARGEST);
        let len = plan.pool_len.max(granule).round_up(granule).ok_or(too_long)?;
        let generous = len.checked_add(tail_room(len, granule)).unwrap_or(len);
        let mapping = Mapping::reserve(device, generous).or_else(|_| Mapping::reserve(device, len))?;
        let mut pool = PlannedPool::new(plan, part_of(mapping.span(), len))?;
        let whole = Span::new(PlanOffset::new(0), len).expect("a mapping begins somewhere and ends");
        pool.set_hole(whole, true);
        let holes = Holes::for_plan(plan, granule, len);
        let cycle_len = plan.cycle_span().round_up(granule).unwrap_or(len).min(len);
        Ok(Installed { is_late: true, cycle_len, ..Installed::new(plan, pool, mapping, holes, config) })
    }

    /// Bytes of the plan's pool.
    pub(super) fn base_len(&self) -> Bytes {
        self.pool.plan_len()
    }

    /// Bytes of the pool that its entries have: its detours have the others, which get memory once a
    /// detour comes.
    pub(super) fn cycle_len(&self) -> Bytes {
        self.cycle_len
    }

    /// The part is behind the plan's own pool.
    pub(super) fn is_tail(&self, part: PlanSpan) -> bool {
        part.start().get() >= self.base_len().get()
    }

    /// Chunks that may serve a request at other addresses, by their parts of the pool. Nothing for a
    /// stream that the plan does not know.
    pub(super) fn lendable(&self, request: &Request) -> Option<Vec<Lendable>> {
        let may_have = |part: &PlanSpan| {
            !self.is_tail(*part) || self.tail.get(&part.start()).is_none_or(|stream| *stream == request.stream)
        };
        let parts: Vec<PlanSpan> = self.parts().filter(may_have).collect();
        self.pool.lendable(request, &parts)
    }

    /// The tail is still a small part of the plan's pool when it is longer by `more`.
    pub(super) fn may_have_tail(&self, more: Bytes) -> bool {
        let most = self.base_len().get() / TAIL_USUAL_PART;
        let tail = self.pool.span().len() - self.base_len();
        tail.get().saturating_add(more.get()) <= most.max(TAIL_USUAL_MIN.get())
    }

    /// Bytes for which there are addresses behind the tail.
    pub(super) fn tail_room(&self) -> Bytes {
        let len = self.pool.span().len();
        (self.mapping.span().len() - len).min(PlannedPool::LEN_MAX.saturating_sub(len))
    }

    /// Maps chunks behind the tail, for requests on a stream: all of them, or none where there are no
    /// addresses for them.
    pub(super) fn grow_tail(&mut self, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<bool, MemoryError> {
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        if chunks.is_empty() || len > self.tail_room() {
            return Ok(false);
        }
        let mut at = PlanOffset::new(self.pool.span().len().get());
        self.mapping.put(self.pool.span().end(), chunks)?;
        self.held += len;
        self.pool.extend(len);
        for chunk in chunks {
            self.tail.insert(at, stream);
            at = at.checked_add(chunk.len()).expect("the tail has addresses");
        }
        Ok(true)
    }

    /// Takes chunks out at the end of the tail of which nothing is in use, until they hold `wanted`
    /// bytes or none is left.
    pub(super) fn take_tail(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let (mut chunks, mut found) = (Vec::new(), Bytes::ZERO);
        // Memory that stays with its addresses would be unusable until all of the mapping goes.
        if self.mapping.device().capabilities().memory_stays_with_addresses {
            return chunks;
        }
        while found < wanted {
            let Some(part) = self.last_of_tail().filter(|part| self.pool.is_clear(*part)) else { break };
            self.lent.forget_idle(part);
            let Ok(taken) = self.mapping.take(self.pool.addresses_of(part)) else { break };
            self.tail.remove(&part.start());
            self.held -= part.len();
            self.pool.shorten(part.len());
            found += part.len();
            chunks.extend(taken);
        }
        chunks
    }

    fn last_of_tail(&self) -> Option<PlanSpan> {
        self.tail.last_key_value().and_then(|(start, _)| self.part_at(*start))
    }

    /// Bytes of the tail that [`Installed::take_tail`] would take.
    pub(super) fn tail_idle(&self) -> Bytes {
        let parts = self.tail.keys().rev().filter_map(|start| self.part_at(*start));
        parts.take_while(|part| self.pool.is_clear(*part)).map(|part| part.len()).sum()
    }

    /// Bytes of its memory that are free, but for the end of the tail. Walks over all that is live.
    pub(super) fn idle_of_plan(&self) -> Bytes {
        let live: Bytes = self.pool.live_spans().map(|span| span.len()).sum();
        self.held().saturating_sub(live).saturating_sub(self.tail_idle())
    }

    /// Takes an allocation back, wherever it was served. Says how many bytes had been asked for; `None` if it was served elsewhere.
    #[inline]
    pub(super) fn free(&mut self, address: DeviceAddress) -> Option<Bytes> {
        self.pool.free(address).or_else(|| self.free_lent(address))
    }

    /// The stream that a live allocation was made on.
    pub(super) fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.pool.stream_at(address).or_else(|| self.lent.stream_at(address))
    }

    /// Bytes that a live allocation occupies.
    pub(super) fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.pool.len_of(address).or_else(|| self.lent.len_of(address))
    }

    /// Allocations that are live here.
    pub(super) fn live_allocations(&self) -> u64 {
        self.pool.live_allocations() + self.lent.live_count()
    }

    /// The chunks behind a live allocation: where each is, and the chunk.
    pub(super) fn chunks_at(&self, span: AddressSpan) -> Option<Vec<(DeviceAddress, Arc<Chunk>)>> {
        if !self.mapping.span().contains(span.start()) {
            return self.lent.chunks_at(span.start());
        }
        Some(self.mapping.chunks_in(span).map(|(start, chunk)| (start, Arc::clone(chunk))).collect())
    }

    /// It came while the job ran.
    pub(super) fn is_late(&self) -> bool {
        self.is_late
    }

    /// Bytes of its chunks.
    pub(super) fn held(&self) -> Bytes {
        self.held
    }

    /// Bytes that its entries' holes take.
    pub(super) fn lacks(&self) -> Bytes {
        self.holes.bytes_until(self.cycle_len)
    }

    /// Holes in which the place of a request lies that is the one at the cursor: whole granules.
    pub(super) fn lacks_for(&self, request: &Request) -> Vec<PlanSpan> {
        self.pool.lacks(request).map_or_else(Vec::new, |place| self.holes.under(place))
    }

    /// Fills holes, `first` before the others. Gives back the chunks that fit into no hole.
    pub(super) fn fill(&mut self, first: &[PlanSpan], chunks: Vec<Arc<Chunk>>) -> Result<Vec<Arc<Chunk>>, Unmapped> {
        let (placed, mut rest) = self.holes.place(first, chunks);
        let end_of = |(start, chunk): &(PlanOffset, Arc<Chunk>)| start.checked_add(chunk.len());
        let mut runs = placed.chunk_by(|one, next| end_of(one) == Some(next.0));
        while let Some(run) = runs.next() {
            let here: Vec<Arc<Chunk>> = run.iter().map(|(_, chunk)| Arc::clone(chunk)).collect();
            let len: Bytes = here.iter().map(|chunk| chunk.len()).sum();
            let part = Span::new(run[0].0, len).expect("holes lie in the pool");
            if let Err(error) = self.mapping.put(self.pool.addresses_of(part).start(), &here) {
                for (start, chunk) in std::iter::once(run).chain(runs).flatten() {
                    self.holes.add(Span::new(*start, chunk.len()).expect("holes lie in the pool"));
                    rest.push(Arc::clone(chunk));
                }
                return Err((rest, error));
            }
            self.held += len;
            self.pool.set_hole(part, false);
        }
        Ok(rest)
    }

    /// Says what is wrong with it; nothing, unless there is a bug.
    pub(super) fn invariants(&self) -> Result<(), String> {
        self.holes.invariants()?;
        let held: Bytes = self.parts().map(|part| part.len()).sum();
        if held != self.held {
            return Err(format!("the static pool counts {} and has {held}", self.held));
        }
        let len = held + self.holes.bytes_until(Bytes::MAX);
        if len != self.pool.span().len() {
            return Err(format!("the planned pool has {}, its chunks and holes {len}", self.pool.span().len()));
        }
        let is_mapped = |hole: &PlanSpan| self.mapping.chunks_in(self.pool.addresses_of(*hole)).next().is_some();
        if let Some(hole) = self.holes.iter().find(is_mapped) {
            return Err(format!("{hole:?} of the static pool has a chunk and is a hole"));
        }
        if let Some(start) = self.tail.keys().find(|start| self.part_at(**start).is_none()) {
            return Err(format!("no chunk of the tail begins at {start:?}"));
        }
        self.lent.invariants(|part| self.pool.is_lent(part))?;
        self.pool.invariants()
    }

    /// Nothing of it is in use any more, and it has no memory.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_zero() && self.pool.live_spans().next().is_none()
    }

    /// Of a plan that serves no new requests: takes out chunks of which nothing is in use, until they
    /// hold `wanted` bytes or none is left. What cannot be unmapped stays.
    pub(super) fn take_idle(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        if wanted.is_zero() { Vec::new() } else { self.take_parts(self.idle_parts(), wanted) }
    }

    /// The same of a plan that is served from: its own chunks leave holes, which are filled again when
    /// they are needed. Chunks stay whose place new chunks of `granule` could not fill.
    pub(super) fn take_own(&mut self, wanted: Bytes, granule: Bytes) -> Vec<Arc<Chunk>> {
        if wanted.is_zero() { Vec::new() } else { self.take_parts(self.own_idle_parts(granule), wanted) }
    }

    fn own_idle_parts(&self, granule: Bytes) -> Vec<PlanSpan> {
        let is_whole = |bytes: u64| bytes.is_multiple_of(granule.get());
        let mut parts = self.idle_parts();
        parts.retain(|part| !self.is_tail(*part) && is_whole(part.start().get()) && is_whole(part.end().get()));
        parts
    }

    fn take_parts(&mut self, parts: Vec<PlanSpan>, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let mut found = Bytes::ZERO;
        let enough = parts.iter().take_while(|part| {
            let is_needed = found < wanted;
            found += part.len();
            is_needed
        });
        let mut chunks: Vec<Arc<Chunk>> = Vec::new();
        for run in parts[..enough.count()].chunk_by(|one, next| one.end() == next.start()) {
            run.iter().for_each(|part| self.lent.forget_idle(*part));
            let len: Bytes = run.iter().map(|part| part.len()).sum();
            let whole = Span::new(run[0].start(), len).expect("chunks lie in the pool");
            if let Ok(taken) = self.mapping.take(self.pool.addresses_of(whole)) {
                self.held -= len;
                self.pool.set_hole(whole, true);
                self.holes.add(whole);
                // Of a plan that serves no new requests the tail goes with the rest.
                run.iter().for_each(|part| {
                    self.tail.remove(&part.start());
                });
                chunks.extend(taken);
            }
        }
        chunks
    }

    /// Bytes that it could give up.
    pub(super) fn idle(&self) -> Bytes {
        self.idle_parts().into_iter().map(|part| part.len()).sum()
    }

    /// Bytes that [`Installed::take_own`] would take.
    pub(super) fn own_idle(&self) -> Bytes {
        self.own_idle_parts(self.granule).into_iter().map(|part| part.len()).sum()
    }

    /// Chunks of which nothing is in use, and that can be taken out, by their parts of the pool.
    fn idle_parts(&self) -> Vec<PlanSpan> {
        // Memory that stays with its addresses would be unusable until all of the mapping goes.
        if self.mapping.device().capabilities().memory_stays_with_addresses {
            return Vec::new();
        }
        let parts: Vec<PlanSpan> = self.parts().collect();
        let mut is_idle = vec![true; parts.len()];
        for span in self.pool.live_spans() {
            is_idle[overlapped(&parts, span)].fill(false);
        }
        parts.into_iter().zip(is_idle).filter(|(_, is_idle)| *is_idle).map(|(part, _)| part).collect()
    }

    /// The parts of the pool that chunks are behind, one for each, in their order.
    fn parts(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.mapping.chunks().map(|(start, chunk)| self.part_of_chunk(start, chunk))
    }

    /// The part of the pool that the chunk has which begins there.
    fn part_at(&self, start: PlanOffset) -> Option<PlanSpan> {
        let address = self.address_of(start);
        self.mapping.chunk(address).map(|chunk| self.part_of_chunk(address, chunk))
    }

    fn part_of_chunk(&self, start: DeviceAddress, chunk: &Chunk) -> PlanSpan {
        let offset = start.checked_distance(self.mapping.span().start()).expect("it is a chunk of this mapping");
        Span::new(PlanOffset::new(offset.get()), chunk.len()).expect("a chunk lies in the pool")
    }

    fn address_of(&self, offset: PlanOffset) -> DeviceAddress {
        let start = self.mapping.span().start();
        start.checked_add(Bytes::new(offset.get())).expect("it is an offset of the pool")
    }

    /// The chunk behind a part of the pool.
    pub(super) fn chunk_of(&self, part: PlanSpan) -> Option<&Arc<Chunk>> {
        self.mapping.chunk(self.address_of(part.start()))
    }
}

/// The first `len` bytes of a span that is at least that long.
fn part_of(span: AddressSpan, len: Bytes) -> AddressSpan {
    Span::new(span.start(), len).expect("it is a part of the span")
}
