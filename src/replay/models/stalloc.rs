//! STAlloc's runtime as published: the n-th request gets the n-th address of the plan, whatever it is for.
//!
//! * A static pool of one cudaMalloc, planned from the first iteration and one more; after that the one more is repeated for ever.
//! * The n-th request is matched with the n-th entry. Where the size differs the request goes to a caching allocator, and the count goes on: one request that
//!   is missing shifts every match behind it.
//! * Nothing guards the plan: an address is handed out whether or not its bytes are live. A replay counts what then overlaps.
//! * Requests of at most 512 bytes have a pool of their own, of twice their peak in the planned iterations. Requests that vary go to the caching allocator.
//!
//! The addresses are those of this project's planner, which are at least as close to the lower bound as the published synthesis; its reuse of the static pool for
//! varying requests is not modelled. Source: section 6 and the published code's behaviour.

use std::collections::{BTreeMap, HashSet};

use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::plan::{Plan, PlanError};
use crate::replay::allocator::{Allocator, More, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::models::caching::{CachingAllocator, Conf, Version};
use crate::replay::script::Asked;
use crate::trace::{EventKind, Trace};
use crate::units::{Bytes, DeviceAddress};

/// STAlloc's allocator of one device in one process.
#[derive(Clone, Debug)]
pub struct Stalloc {
    entries: Vec<(Bytes, u64)>,
    cycle_start: usize,
    /// The entry of the next request.
    at: usize,
    /// Static pool and pool of small requests.
    pools: Bytes,
    /// The pools do not fit the device: the job dies before its first request.
    is_dead: bool,
    small: SmallPool,
    calls: Calls,
    total: Reserved,
    fallback: CachingAllocator,
    held: Vec<Option<Held>>,
    /// The longest entry: how far below one that overlaps can begin.
    longest: u64,
    /// Live allocations of the static pool: by first byte and slot, the end.
    live: BTreeMap<(u64, u32), u64>,
    more: More,
}

#[derive(Clone, Copy, Debug)]
enum Held {
    Static(u64),
    Small,
    Fallback,
}

/// Slots of 512 bytes.
#[derive(Clone, Copy, Debug, Default)]
struct SmallPool {
    slots: u64,
    live: u64,
}

/// Requests up to this are not planned.
const SMALL: Bytes = Bytes::new(512);
const FIRST_ADDRESS: u64 = 0x7800_0000_0000;

impl Stalloc {
    /// Plans from the first iteration of `trace` and `iteration`, for a device that has `capacity` bytes for it, or any number.
    pub fn new(
        trace: &Trace,
        iteration: u32,
        capacity: Option<Bytes>,
        costs: &CostTable,
    ) -> Result<Stalloc, PlanError> {
        let (planned, small_peak) = without_small(trace, iteration);
        let plan = Plan::from_trace(&planned, iteration)?;
        let slots = 2 * small_peak;
        let too_large = || PlanError::TooLarge;
        let small_len = SMALL.checked_mul(slots).and_then(|len| len.round_up(PAGE)).ok_or_else(too_large)?;
        let pools = plan.pool_len.round_up(PAGE).ok_or_else(too_large)? + small_len;
        let mut calls = Calls::new(costs);
        calls.malloc(pools);
        let left = capacity.map(|capacity| capacity.saturating_sub(pools));
        let mut total = Reserved::default();
        total.grow(pools);
        Ok(Stalloc {
            longest: plan.entries.iter().map(|entry| entry.bytes.get()).max().unwrap_or(0),
            entries: plan.entries.iter().map(|entry| (entry.bytes, entry.offset.get())).collect(),
            cycle_start: plan.cycle_start,
            at: 0,
            pools,
            is_dead: capacity.is_some_and(|capacity| capacity < pools),
            small: SmallPool { slots, live: 0 },
            calls,
            total,
            // A copy of PyTorch's is part of it.
            fallback: CachingAllocator::new(Conf::of(Version(2, 3)), left, costs),
            held: Vec::new(),
            live: BTreeMap::new(),
            more: More::default(),
        })
    }

    /// The entry that it is this request's turn for.
    fn next(&mut self) -> Option<(Bytes, u64)> {
        let entry = self.entries.get(self.at).copied();
        self.at += 1;
        if self.at >= self.entries.len() {
            self.at = self.cycle_start;
        }
        entry
    }

    /// Hands out the bytes, live or not.
    fn place(&mut self, slot: u32, offset: u64, bytes: Bytes) -> DeviceAddress {
        let end = offset + bytes.get();
        // While nothing overlaps, nothing before the nearest neighbour below can reach this far.
        let nearest = self.live.range(..(offset, 0)).next_back().map_or(offset, |((start, _), _)| *start);
        let from = if self.more.overlapped == Bytes::ZERO { nearest } else { offset.saturating_sub(self.longest) };
        let near = self.live.range((from, 0)..(end, 0));
        let overlapped: u64 =
            near.map(|((start, _), other)| (*other).min(end).saturating_sub((*start).max(offset))).sum();
        self.more.overlapped += Bytes::new(overlapped);
        self.live.insert((offset, slot), end);
        self.more.served.planned += bytes;
        DeviceAddress::new(FIRST_ADDRESS + offset)
    }

    fn fall_back(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let served = self.fallback.alloc(asked);
        self.follow_fallback();
        served
    }

    fn follow_fallback(&mut self) {
        let now = self.pools + self.fallback.reserved().now;
        self.total = Reserved { now, peak: self.total.peak.max(now) };
    }
}

const PAGE: Bytes = Bytes::mib(2);

/// The trace up to `iteration` without small requests, and most of those that were live at one time.
fn without_small(trace: &Trace, iteration: u32) -> (Trace, u64) {
    let is_small = |bytes: Bytes| bytes <= SMALL;
    let small: HashSet<u64> = trace
        .events
        .iter()
        .filter(|event| event.kind == EventKind::Alloc && is_small(event.bytes))
        .map(|event| event.id)
        .collect();
    let (mut live, mut peak) = (0_u64, 0);
    for event in trace.events.iter().filter(|event| event.iteration <= iteration && small.contains(&event.id)) {
        match event.kind {
            EventKind::Alloc => live += 1,
            EventKind::Free => live -= 1,
            _ => {}
        }
        peak = peak.max(live);
    }
    let rest = trace.events.iter().filter(|event| !event.kind.has_id() || !small.contains(&event.id));
    (Trace { events: rest.copied().collect(), modules: trace.modules.clone() }, peak)
}

impl Allocator for Stalloc {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        if self.is_dead {
            return Err(OutOfMemory);
        }
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, None);
        }
        let (held, address) = if asked.bytes <= SMALL && self.small.live < self.small.slots {
            self.small.live += 1;
            self.more.served.small += asked.bytes;
            (Held::Small, DeviceAddress::new(FIRST_ADDRESS - 512 * (self.small.live + 1)))
        } else if asked.is_dynamic || asked.bytes <= SMALL {
            (Held::Fallback, self.fall_back(asked)?)
        } else {
            match self.next() {
                Some((bytes, offset)) if bytes == asked.bytes => {
                    (Held::Static(offset), self.place(asked.slot, offset, bytes))
                }
                _ => {
                    self.more.deviations += 1;
                    (Held::Fallback, self.fall_back(asked)?)
                }
            }
        };
        if matches!(held, Held::Fallback) {
            self.more.served.stitching += asked.bytes;
        }
        self.held[slot] = Some(held);
        Ok(address)
    }

    fn free(&mut self, slot: u32) {
        match self.held.get(slot as usize) {
            Some(Some(Held::Fallback)) => self.fallback.free(slot),
            // It ignores streams: what is given back is free.
            Some(Some(Held::Static(offset))) => drop(self.live.remove(&(*offset, slot))),
            Some(Some(Held::Small)) => self.small.live -= 1,
            _ => {}
        }
    }

    fn completed(&mut self, slot: u32) {
        if let Some(Held::Fallback) = self.held.get_mut(slot as usize).and_then(Option::take) {
            self.fallback.completed(slot);
        }
    }

    fn record_stream(&mut self, _slot: u32, _stream: StreamId) {
        // Silently dropped.
    }

    fn reserved(&self) -> Reserved {
        self.total
    }

    fn calls(&self) -> CallSum {
        self.calls.sum().plus(&self.fallback.calls())
    }

    fn more(&self) -> More {
        self.more
    }
}
