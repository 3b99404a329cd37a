//! A plan that is served from: its planned pool, the addresses of the static pool, and the memory behind them, which may come bit by bit.
//!
//! A plan that is there before the job has all its memory at once. One that is made while the job runs finds the memory in use: it gets what is idle, and slots that nobody needs for a while stay holes
//! until what is freed meanwhile, or new chunks, can fill them.
//!
//! Behind the plan's slots there are addresses for more of them: the *tail*, for requests that cannot have their places ([`super::lent`]).
//!
//! Not for: who may be at which address ([`PlannedPool`]), and when a plan comes ([`super::offer`]).
//!
//! Invariant: a slot of the plan without a chunk is a hole of the planned pool, and the other way round; the tail has no holes, and the planned pool ends where it does.

use std::sync::Arc;

use super::RuntimeConfig;
use super::lent::LentBlocks;
use crate::ids::{PlanId, StreamId};
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::plan::Plan;
use crate::pool::Request;
use crate::pool::planned::{Lendable, PlannedPool};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, PlanOffset, PlanSpan, Span};

#[derive(Debug)]
pub(super) struct Installed {
    pub(super) pool: PlannedPool,
    pub(super) mapping: Mapping,
    pub(super) id: PlanId,
    held: Bytes,
    is_late: bool,
    /// Slots without a chunk; the one that is needed first is the last.
    holes: Vec<usize>,
    /// Slots of the plan, and the first of those that only its detours have.
    base: usize,
    cycle: usize,
    pub(super) granule: Bytes,
    /// Whose stream each slot behind them is for.
    tail: Vec<StreamId>,
    pub(super) lent: LentBlocks,
}

/// Behind the plan's slots there are addresses for such a part of them, and these.
const TAIL_PART: u64 = 4;
const TAIL_MIN: Bytes = Bytes::mib(64);

/// Up to such a part of the plan's slots, and these, the tail grows rather than that the plan's requests lose their places.
const TAIL_USUAL_PART: u64 = 128;
const TAIL_USUAL_MIN: Bytes = Bytes::mib(32);

/// Addresses behind a plan's slots.
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
        let mut mapping = Mapping::empty(device, generous).or_else(|_| Mapping::empty(device, held))?;
        mapping.put(0, chunks)?;
        let pool = PlannedPool::new(plan, part_of(mapping.span(), held))?;
        Ok(Installed::of(plan, pool, mapping, held, config))
    }

    fn of(plan: &Plan, mut pool: PlannedPool, mapping: Mapping, held: Bytes, config: &RuntimeConfig) -> Installed {
        if !config.reuses {
            pool.stop_reusing();
        }
        let granule = config.granule();
        let (base, lent) = (mapping.slot_count(), LentBlocks::default());
        let span = plan.cycle_span();
        let cycle = (0..base).take_while(|slot| slot_begins(&mapping, *slot) < span).count();
        let (holes, tail) = (Vec::new(), Vec::new());
        Installed { pool, mapping, id: plan.id(), held, is_late: false, holes, base, cycle, granule, tail, lent }
    }

    /// A plan with addresses, in slots of `granule`, and no memory.
    pub(super) fn hollow(
        plan: &Plan,
        device: &Arc<Device>,
        config: &RuntimeConfig,
    ) -> Result<Installed, super::PlanInstallError> {
        let granule = config.granule();
        let count = plan.pool_len.get().div_ceil(granule.get()).max(1) as usize;
        let len = granule.checked_mul(count as u64).ok_or(MemoryError::Unstitchable(Bytes::LARGEST))?;
        let generous = Mapping::hollow(device, granule, count, tail_room(len, granule));
        let mapping = generous.or_else(|_| Mapping::hollow(device, granule, count, Bytes::ZERO))?;
        let mut pool = PlannedPool::new(plan, part_of(mapping.span(), len))?;
        let whole = Span::new(PlanOffset::new(0), len).expect("a mapping begins somewhere and ends");
        pool.set_hole(whole, true);
        let holes = in_order_of_need(plan, granule, count);
        Ok(Installed { holes, is_late: true, ..Installed::of(plan, pool, mapping, Bytes::ZERO, config) })
    }

    /// Bytes of the plan's slots.
    pub(super) fn base_len(&self) -> Bytes {
        self.pool.plan_len()
    }

    /// Bytes of the slots that its entries have: the others are for its detours, and have memory once one comes.
    pub(super) fn cycle_len(&self) -> Bytes {
        (0..self.cycle).map(|slot| self.mapping.slot_span(slot).len()).sum()
    }

    /// The slot is none of the plan's.
    pub(super) fn is_tail(&self, slot: usize) -> bool {
        slot >= self.base
    }

    /// Slots with memory that may serve a request at other addresses, by their numbers. Nothing for a stream that the plan does not know.
    pub(super) fn lendable(&self, request: &Request) -> Option<Vec<Lendable>> {
        let of_plan = (0..self.base).filter(|slot| self.mapping.chunk(*slot).is_some());
        let tail = self.tail.iter().zip(self.base..).filter(|(of, _)| **of == request.stream).map(|(_, slot)| slot);
        let parts: Vec<(usize, PlanSpan)> = of_plan.chain(tail).map(|slot| (slot, self.offsets_of(slot))).collect();
        self.pool.lendable(request, &parts)
    }

    /// The tail is still a small part of the plan's slots when it is longer by `more`.
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

    /// Maps chunks behind the plan's slots, for requests on a stream: all of them, or none where there are no addresses for them.
    pub(super) fn grow_tail(&mut self, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<bool, MemoryError> {
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        if chunks.is_empty() || len > self.tail_room() {
            return Ok(false);
        }
        self.mapping.put(self.base + self.tail.len(), chunks)?;
        self.held += len;
        self.pool.extend(len);
        self.tail.extend(chunks.iter().map(|_| stream));
        Ok(true)
    }

    /// Takes chunks out at the end of the tail of which nothing is in use, until they hold `wanted` bytes or none is left.
    pub(super) fn take_tail(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let (mut chunks, mut found) = (Vec::new(), Bytes::ZERO);
        // Memory that stays with its addresses would be nobody's until all of them go.
        if self.mapping.device().capabilities().memory_stays_with_addresses {
            return chunks;
        }
        while found < wanted && !self.tail.is_empty() {
            let slot = self.base + self.tail.len() - 1;
            if !self.pool.is_clear(self.offsets_of(slot)) {
                break;
            }
            self.lent.let_go(slot);
            let Ok(taken) = self.mapping.take(slot..slot + 1) else { break };
            let len = self.mapping.slot_span(slot).len();
            self.tail.pop();
            self.held -= len;
            self.pool.shorten(len);
            found += len;
            chunks.extend(taken);
        }
        chunks
    }

    /// Bytes of the tail that [`Installed::take_tail`] would take.
    pub(super) fn tail_idle(&self) -> Bytes {
        let slots = (self.base..self.base + self.tail.len()).rev();
        let idle = slots.take_while(|slot| self.pool.is_clear(self.offsets_of(*slot)));
        idle.map(|slot| self.mapping.slot_span(slot).len()).sum()
    }

    /// Bytes of its memory that nobody has, but for whole slots behind the plan's. Walks over all that is live.
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
        Some(self.mapping.chunks_in(self.mapping.slots_at(span)))
    }

    /// All its slots are of this size.
    pub(super) fn has_slots_of(&self, granule: Bytes) -> bool {
        (0..self.mapping.slot_count()).all(|slot| self.mapping.slot_span(slot).len() == granule)
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
        let of_entries = self.holes.iter().filter(|slot| **slot < self.cycle);
        of_entries.map(|slot| self.mapping.slot_span(*slot).len()).sum()
    }

    /// Slots without memory in which the place of a request lies that is the one at the cursor.
    pub(super) fn lacks_for(&self, request: &Request) -> Vec<usize> {
        let Some(place) = self.pool.lacks(request) else { return Vec::new() };
        let holes = self.holes.iter().copied();
        holes.filter(|slot| self.offsets_of(*slot).overlaps(place)).collect()
    }

    /// The part of the pool that a slot is.
    pub(super) fn offsets_of(&self, slot: usize) -> PlanSpan {
        let start = PlanOffset::new(slot_begins(&self.mapping, slot).get());
        Span::new(start, self.mapping.slot_span(slot).len()).expect("a slot lies in the pool")
    }

    /// Fills holes, `first` before the others. Gives back what it has no hole for, as chunks of another size than its slots'.
    pub(super) fn fill(&mut self, first: &[usize], chunks: Vec<Arc<Chunk>>) -> Result<Vec<Arc<Chunk>>, Unmapped> {
        let fits = |chunk: &Arc<Chunk>| {
            self.holes.first().is_some_and(|slot| self.mapping.slot_span(*slot).len() == chunk.len())
        };
        let (mut chunks, other): (Vec<_>, Vec<_>) = chunks.into_iter().partition(fits);
        // To the end, where those are that are needed first.
        self.holes.sort_by_key(|slot| first.contains(slot));
        let count = chunks.len().min(self.holes.len());
        let mut slots = self.holes.split_off(self.holes.len() - count);
        slots.sort_unstable();
        let runs: Vec<Vec<usize>> = slots.chunk_by(|one, next| one + 1 == *next).map(<[usize]>::to_vec).collect();
        let mut runs = runs.into_iter();
        while let Some(run) = runs.next() {
            let here: Vec<Arc<Chunk>> = chunks.drain(..run.len()).collect();
            if let Err(error) = self.mapping.put(run[0], &here) {
                self.holes.extend(runs.flatten().chain(run));
                chunks.extend(here);
                chunks.extend(other);
                return Err((chunks, error));
            }
            self.held += here.iter().map(|chunk| chunk.len()).sum();
            run.into_iter().for_each(|slot| self.pool.set_hole(self.offsets_of(slot), false));
        }
        chunks.extend(other);
        Ok(chunks)
    }

    /// Says what is wrong with it; nothing, unless there is a bug.
    pub(super) fn invariants(&self) -> Result<(), String> {
        let is_hole = |slot: &usize| self.mapping.chunk(*slot).is_none();
        if let Some(slot) = self.holes.iter().find(|slot| !is_hole(slot)) {
            return Err(format!("slot {slot} of the static pool has a chunk and is a hole"));
        }
        let held: Bytes = self.mapping.chunks().map(|chunk| chunk.len()).sum();
        if held != self.held {
            return Err(format!("the static pool counts {} and has {held}", self.held));
        }
        let len: Bytes = (0..self.base + self.tail.len()).map(|slot| self.mapping.slot_span(slot).len()).sum();
        if len != self.pool.span().len() {
            return Err(format!("the planned pool has {} and its slots {len}", self.pool.span().len()));
        }
        self.lent.invariants(|slot| self.pool.is_lent(self.offsets_of(slot)))?;
        self.pool.invariants()
    }

    /// Nothing of it is in use any more, and it has no memory.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_zero() && self.pool.live_spans().next().is_none()
    }

    /// Of a plan that is served from no more: takes out chunks of which nothing is in use, until they hold `wanted` bytes or none is left. What cannot be unmapped stays.
    pub(super) fn take_idle(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        self.take_slots(self.idle_slots(), wanted)
    }

    /// The same of a plan that is served from: its own slots become holes, which are filled again when they are needed. None where new chunks of `granule` would not fit there.
    pub(super) fn take_own(&mut self, wanted: Bytes, granule: Bytes) -> Vec<Arc<Chunk>> {
        if wanted.is_zero() { Vec::new() } else { self.take_slots(self.own_idle_slots(granule), wanted) }
    }

    fn own_idle_slots(&self, granule: Bytes) -> Vec<usize> {
        if !self.has_slots_of(granule) {
            return Vec::new();
        }
        let mut slots = self.idle_slots();
        slots.retain(|slot| *slot < self.base);
        slots
    }

    fn take_slots(&mut self, slots: Vec<usize>, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let mut chunks: Vec<Arc<Chunk>> = Vec::new();
        let mut found = Bytes::ZERO;
        for slot in slots {
            if found >= wanted {
                break;
            }
            let len = self.mapping.slot_span(slot).len();
            self.lent.let_go(slot);
            if let Ok(taken) = self.mapping.take(slot..slot + 1) {
                self.held -= len;
                self.pool.set_hole(self.offsets_of(slot), true);
                self.holes.push(slot);
                found += len;
                chunks.extend(taken);
            }
        }
        chunks
    }

    /// Bytes that it could give up.
    pub(super) fn idle(&self) -> Bytes {
        self.idle_slots().into_iter().map(|slot| self.mapping.slot_span(slot).len()).sum()
    }

    /// Bytes that [`Installed::take_own`] would take.
    pub(super) fn own_idle(&self) -> Bytes {
        self.own_idle_slots(self.granule).into_iter().map(|slot| self.mapping.slot_span(slot).len()).sum()
    }

    /// Slots with a chunk of which nothing is in use, and that can be taken out.
    fn idle_slots(&self) -> Vec<usize> {
        // Memory that stays with its addresses would be nobody's until all of them go.
        if self.mapping.device().capabilities().memory_stays_with_addresses {
            return Vec::new();
        }
        let mut is_idle: Vec<bool> =
            (0..self.mapping.slot_count()).map(|slot| self.mapping.chunk(slot).is_some()).collect();
        for span in self.pool.live_spans() {
            is_idle[self.mapping.slots_at(self.pool.addresses_of(span))].fill(false);
        }
        (0..is_idle.len()).filter(|slot| is_idle[*slot]).collect()
    }
}

/// How far from the beginning of a mapping a slot lies.
fn slot_begins(mapping: &Mapping, slot: usize) -> Bytes {
    mapping.slot_span(slot).start().checked_distance(mapping.span().start()).expect("it is a slot of this mapping")
}

/// The first `len` bytes of a span that is at least that long.
fn part_of(span: AddressSpan, len: Bytes) -> AddressSpan {
    Span::new(span.start(), len).expect("it is a part of one that there is")
}

/// The slots of a plan's pool, the one that is needed first last.
fn in_order_of_need(plan: &Plan, granule: Bytes, count: usize) -> Vec<usize> {
    let mut is_listed = vec![false; count];
    let mut order = Vec::with_capacity(count);
    for entry in &plan.entries {
        let span = entry.span();
        let slots = span.start().get() / granule.get()..span.end().get().div_ceil(granule.get());
        for slot in slots.map(|slot| slot as usize) {
            if !std::mem::replace(&mut is_listed[slot], true) {
                order.push(slot);
            }
        }
    }
    order.extend((0..count).filter(|slot| !is_listed[*slot]));
    order.reverse();
    order
}
