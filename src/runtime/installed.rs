//! A plan that is served from: its planned pool, the addresses of the static pool, and the memory behind them, which may come bit by bit.
//!
//! A plan that is there before the job has all its memory at once. One that is made while the job runs finds the memory in use: it gets what is idle, and slots that nobody needs for a while stay holes
//! until what is freed meanwhile, or new chunks, can fill them.
//!
//! Not for: who may be at which address ([`PlannedPool`]), and when a plan comes ([`super::offer`]).
//!
//! Invariant: a slot without a chunk is a hole of the planned pool, and the other way round.

use std::sync::Arc;

use crate::ids::PlanId;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::plan::Plan;
use crate::pool::Request;
use crate::pool::planned::{InstallError, PlannedPool};
use crate::units::{Bytes, Place as _, PlanOffset, PlanSpan, Span};

#[derive(Debug)]
pub(super) struct Installed {
    pub(super) pool: PlannedPool,
    pub(super) mapping: Mapping,
    pub(super) id: PlanId,
    held: Bytes,
    is_late: bool,
    /// Slots without a chunk; the one that is needed first is the last.
    holes: Vec<usize>,
}

/// Chunks that could not be mapped, and why.
type Unmapped = (Vec<Arc<Chunk>>, MemoryError);

impl Installed {
    /// A plan with all its memory.
    pub(super) fn whole(plan: &Plan, mapping: Mapping) -> Result<Installed, InstallError> {
        let pool = PlannedPool::new(plan, mapping.span())?;
        let held = mapping.span().len();
        Ok(Installed { pool, mapping, id: plan.id(), held, is_late: false, holes: Vec::new() })
    }

    /// A plan with addresses, in slots of `granule`, and no memory.
    pub(super) fn hollow(
        plan: &Plan,
        device: &Arc<Device>,
        granule: Bytes,
    ) -> Result<Installed, super::PlanInstallError> {
        let count = plan.pool_len.get().div_ceil(granule.get()).max(1) as usize;
        let mapping = Mapping::hollow(device, granule, count)?;
        let mut pool = PlannedPool::new(plan, mapping.span())?;
        let whole = Span::new(PlanOffset::new(0), mapping.span().len()).expect("a mapping begins somewhere and ends");
        pool.set_hole(whole, true);
        let holes = in_order_of_need(plan, granule, count);
        Ok(Installed { pool, mapping, id: plan.id(), held: Bytes::ZERO, is_late: true, holes })
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

    /// Bytes that its holes take.
    pub(super) fn lacks(&self) -> Bytes {
        self.holes.iter().map(|slot| self.mapping.slot_span(*slot).len()).sum()
    }

    /// Slots without memory in which the place of a request lies that is the one at the cursor.
    pub(super) fn lacks_for(&self, request: &Request) -> Vec<usize> {
        let Some(place) = self.pool.lacks(request) else { return Vec::new() };
        let holes = self.holes.iter().copied();
        holes.filter(|slot| self.offsets_of(*slot).overlaps(place)).collect()
    }

    /// The part of the pool that a slot is.
    fn offsets_of(&self, slot: usize) -> PlanSpan {
        let span = self.mapping.slot_span(slot);
        let start = span.start().checked_distance(self.mapping.span().start()).expect("it is a slot of this mapping");
        Span::new(PlanOffset::new(start.get()), span.len()).expect("a slot lies in the pool")
    }

    /// Fills holes, `first` before the others. Gives back what it has no hole for.
    pub(super) fn fill(&mut self, first: &[usize], mut chunks: Vec<Arc<Chunk>>) -> Result<Vec<Arc<Chunk>>, Unmapped> {
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
                return Err((chunks, error));
            }
            self.held += here.iter().map(|chunk| chunk.len()).sum();
            run.into_iter().for_each(|slot| self.pool.set_hole(self.offsets_of(slot), false));
        }
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
        self.pool.invariants()
    }

    /// Nothing of it is in use any more, and it has no memory.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_zero() && self.pool.live_spans().next().is_none()
    }

    /// Of a plan that is served from no more: takes out chunks of which nothing is in use, until they hold `wanted` bytes or none is left. What cannot be unmapped stays.
    pub(super) fn take_idle(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let mut chunks: Vec<Arc<Chunk>> = Vec::new();
        let mut found = Bytes::ZERO;
        for slot in self.idle_slots() {
            if found >= wanted {
                break;
            }
            let len = self.mapping.slot_span(slot).len();
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
