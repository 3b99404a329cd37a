//! STAlloc's runtime as published: the n-th request gets the n-th address of the plan, whatever it is for.
//!
//! * A static pool of one cudaMalloc, planned from the first iteration and one more; after that the one more is repeated for ever.
//! * The n-th request is matched with the n-th entry. Where the size differs the request goes to a caching allocator, and the count goes on: one request that
//!   is missing shifts every match behind it. A request that could not be placed has an entry without an address, and goes to the caching allocator, too.
//! * Nothing guards the plan: an address is handed out whether or not its bytes are live. A replay counts what then overlaps.
//! * Requests of at most 512 bytes have a pool of their own, of twice their peak in the planned iterations. Requests that vary go to the caching allocator.
//!
//! The addresses are those of this project's planner, which are at least as close to the lower bound as the published synthesis; its reuse of the static pool for
//! varying requests is not modelled. Source: section 6 and the published code's behaviour.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::plan::{Plan, PlanError, Problem};
use crate::replay::allocator::{Allocator, More, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::models::caching::{CachingAllocator, Conf, Version};
use crate::replay::script::Asked;
use crate::trace::{Event, EventKind, Phase, Trace};
use crate::units::{Bytes, DeviceAddress};

/// STAlloc's allocator of one device in one process.
#[derive(Clone, Debug)]
pub struct Stalloc {
    /// Bytes of each request, and its address in the pool if it has one.
    entries: Vec<(Bytes, Option<u64>)>,
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
    Small(u64),
    Fallback,
}

/// Slots of 512 bytes.
#[derive(Clone, Debug, Default)]
struct SmallPool {
    slots: u64,
    /// Slots below this were given out before.
    used: u64,
    /// Those that are free again.
    free: Vec<u64>,
}

impl SmallPool {
    fn take(&mut self) -> Option<u64> {
        let slot = self.free.pop().or_else(|| Some(self.used).filter(|slot| *slot < self.slots))?;
        self.used = self.used.max(slot + 1);
        Some(slot)
    }
}

/// Its planner knows the first iteration and one more.
fn plan_of_two(trace: &Trace, iteration: u32) -> Result<Plan, PlanError> {
    let mut problem = Problem::from_trace(trace, iteration)?;
    problem.kinds.clear();
    Plan::of(trace, &problem, None)
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
        // Where all is small there is nothing to plan.
        let has_work = planned.events.iter().any(|event| event.kind == EventKind::Alloc);
        let plan = if has_work { Some(plan_of_two(&planned, iteration)?) } else { None };
        let slots = 2 * small_peak;
        let too_large = || PlanError::TooLarge;
        let small_len = SMALL.checked_mul(slots).and_then(|len| len.round_up(PAGE)).ok_or_else(too_large)?;
        let static_len = plan.as_ref().map_or(Bytes::ZERO, |plan| plan.pool_len);
        let static_len = static_len.round_up(PAGE).ok_or_else(too_large)?;
        let pools = static_len.checked_add(small_len).ok_or_else(too_large)?;
        let (entries, cycle_start) = plan.as_ref().map(|plan| entries(&planned, iteration, plan)).unwrap_or_default();
        let capacity = capacity.unwrap_or(Bytes::LARGEST);
        let is_dead = capacity < pools;
        let (mut calls, mut total) = (Calls::new(costs), Reserved::default());
        if !is_dead {
            calls.malloc(pools);
            total.grow(pools);
        }
        Ok(Stalloc {
            longest: plan.iter().flat_map(|plan| &plan.entries).map(|entry| entry.bytes.get()).max().unwrap_or(0),
            entries,
            cycle_start,
            at: 0,
            pools,
            is_dead,
            small: SmallPool { slots, ..SmallPool::default() },
            calls,
            total,
            // A copy of PyTorch's is part of it.
            fallback: CachingAllocator::new(Conf::of(Version(2, 3)), Some(capacity.saturating_sub(pools)), costs),
            held: Vec::new(),
            live: BTreeMap::new(),
            more: More::default(),
        })
    }

    /// The entry that it is this request's turn for.
    fn next(&mut self) -> Option<(Bytes, Option<u64>)> {
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
        self.more.overlapped = self.more.overlapped.saturating_add(Bytes::new(overlapped));
        self.live.insert((offset, slot), end);
        self.more.served.planned = self.more.served.planned.saturating_add(bytes);
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
    // A free may name an earlier iteration than its allocation, and come without it.
    let (mut live, mut peak) = (HashSet::new(), 0);
    for event in trace.events.iter().filter(|event| event.iteration <= iteration && small.contains(&event.id)) {
        match event.kind {
            EventKind::Alloc => drop(live.insert(event.id)),
            EventKind::Free => drop(live.remove(&event.id)),
            _ => {}
        }
        peak = peak.max(live.len() as u64);
    }
    let rest = trace.events.iter().filter(|event| !event.kind.has_id() || !small.contains(&event.id));
    (Trace { events: rest.copied().collect(), modules: trace.modules.clone() }, peak)
}

/// The plan with an entry for each request of its two iterations, those that it leaves out included, and the first of those that repeat. An entry of a plan begins at the
/// place of its request: how many allocations and frees of its iteration came before, behind those of the first where it is of the other.
fn entries(trace: &Trace, iteration: u32, plan: &Plan) -> (Vec<(Bytes, Option<u64>)>, usize) {
    // Of an only iteration, what comes before its first step is planned as the first.
    let is_first = |event: &&Event| match iteration {
        0 => event.iteration == 0 && event.context.phase == Phase::Init,
        _ => event.iteration == 0,
    };
    let is_other = |event: &&Event| event.iteration == iteration && !is_first(event);
    let is_counted =
        |event: &&Event| matches!(event.kind, EventKind::Alloc | EventKind::Free | EventKind::FreeCompleted);
    let counted = || trace.events.iter().filter(is_counted);
    let addresses: HashMap<u64, u64> =
        plan.entries.iter().map(|entry| (entry.lifetime.start.0, entry.offset.get())).collect();
    let mut entries = Vec::with_capacity(plan.entries.len());
    let mut cycle_start = 0;
    let events = counted().filter(is_first).map(|event| (event, true));
    for (place, (event, is_prologue)) in
        events.chain(counted().filter(is_other).map(|event| (event, false))).enumerate()
    {
        if event.kind == EventKind::Alloc && !event.is_dynamic {
            entries.push((event.bytes, addresses.get(&(place as u64)).copied()));
            cycle_start += usize::from(is_prologue);
        }
    }
    (entries, cycle_start)
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
        let small = if asked.bytes <= SMALL { self.small.take() } else { None };
        let (held, address) = if let Some(slot) = small {
            self.more.served.pool = self.more.served.pool.saturating_add(asked.bytes);
            (Held::Small(slot), DeviceAddress::new(FIRST_ADDRESS - SMALL.get() * (slot + 1)))
        } else if asked.is_dynamic || asked.bytes <= SMALL {
            (Held::Fallback, self.fall_back(asked)?)
        } else {
            match self.next() {
                Some((bytes, Some(offset))) if bytes == asked.bytes => {
                    (Held::Static(offset), self.place(asked.slot, offset, bytes))
                }
                entry => {
                    // What was not placed was foreseen all the same.
                    let is_foreseen = entry == Some((asked.bytes, None));
                    self.more.deviations += u64::from(!is_foreseen);
                    (Held::Fallback, self.fall_back(asked)?)
                }
            }
        };
        if matches!(held, Held::Fallback) {
            self.more.served.pool = self.more.served.pool.saturating_add(asked.bytes);
        }
        self.held[slot] = Some(held);
        Ok(address)
    }

    fn free(&mut self, slot: u32) {
        match self.held.get(slot as usize) {
            Some(Some(Held::Fallback)) => self.fallback.free(slot),
            // It ignores streams: what is given back is free.
            Some(Some(Held::Static(offset))) => drop(self.live.remove(&(*offset, slot))),
            Some(Some(Held::Small(small))) => self.small.free.push(*small),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::replay::script::Script;
    use crate::replay::{Run, Watch, run};

    fn read(rows: &str) -> Trace {
        let text = format!("tick,event,id,bytes,iteration,dynamic\n{rows}");
        crate::trace::csv::read(text.as_bytes()).unwrap()
    }

    fn model(rows: &str, capacity: Option<Bytes>) -> Stalloc {
        Stalloc::new(&read(rows), 1, capacity, &CostTable::A100).unwrap()
    }

    fn ran(planned: &str, rows: &str) -> (Run, Stalloc) {
        let mut model = model(planned, None);
        let script = Script::of(&read(rows), 0);
        let run = run(&script, &mut model, Watch::default(), &ManualClock::default(), &|_| ());
        (run, model)
    }

    fn asked(slot: u32, bytes: u64) -> Asked {
        let (stream, context) = (StreamId::DEFAULT, crate::trace::ContextKey::UNKNOWN);
        Asked { slot, event: slot, bytes: Bytes::new(bytes), stream, thread: 0, context, is_dynamic: false }
    }

    /// Weights of 4096, and a step of two requests that are live one after the other.
    const JOB: &str = "0,alloc,1,4096,0,\n\
        1,alloc,2,8192,1,\n2,free,2,,1,\n3,alloc,3,6144,1,\n4,free,3,,1,\n\
        5,alloc,4,8192,2,\n6,free,4,,2,\n7,alloc,5,6144,2,\n8,free,5,,2,\n";

    #[test]
    fn the_nth_request_has_the_nth_address_again_and_again() {
        let (run, model) = ran(JOB, JOB);
        let planned = 4096 + 2 * (8192 + 6144);
        assert_eq!((run.more.served.planned, run.more.deviations), (Bytes::new(planned), 0));
        assert_eq!((run.more.overlapped, run.calls.malloc), (Bytes::ZERO, 1));
        assert_eq!((run.peak_reserved, model.pools), (Bytes::mib(2), Bytes::mib(2)));
        let mut model = model;
        assert_eq!((model.entries.len(), model.cycle_start, model.at), (3, 1, 1));
        // Both requests of the step lie behind the weights, at the same place.
        let first = model.alloc(&asked(0, 8192)).unwrap();
        model.free(0);
        assert_eq!(model.alloc(&asked(0, 6144)).unwrap(), first);
    }

    #[test]
    fn a_size_that_is_not_the_entrys_falls_back_and_the_count_goes_on() {
        // One request more in the last step, and every one behind it meets another's entry.
        let other = JOB.replace("5,alloc,4,8192,2,\n", "5,alloc,9,7000,2,\n5,free,9,,2,\n5,alloc,4,8192,2,\n");
        let (run, model) = ran(JOB, &other);
        assert_eq!((run.more.deviations, run.more.served.planned), (3, Bytes::new(4096 + 8192 + 6144)));
        assert_eq!(run.more.served.pool, Bytes::new(7000 + 8192 + 6144));
        // Small segments of the caching allocator beside the pool, and the count where three requests leave it.
        assert_eq!((run.peak_reserved, model.at), (Bytes::mib(4), 2));
    }

    #[test]
    fn a_request_that_could_not_be_placed_has_an_entry_all_the_same() {
        // 7000 is freed two iterations later, so that every pass would need another address for it.
        let rows = "0,alloc,1,4096,0,\n\
            1,alloc,2,7000,1,\n2,alloc,3,8192,1,\n3,free,3,,1,\n4,alloc,4,6144,1,\n5,free,4,,1,\n\
            6,alloc,5,7000,2,\n7,alloc,6,8192,2,\n8,free,6,,2,\n9,alloc,7,6144,2,\n10,free,7,,2,\n\
            11,free,2,,3,\n";
        let (run, model) = ran(rows, rows);
        let sizes: Vec<_> = model.entries.iter().map(|(bytes, at)| (bytes.get(), at.is_some())).collect();
        assert_eq!(sizes, [(4096, true), (7000, false), (8192, true), (6144, true)]);
        assert_eq!((run.more.deviations, run.more.served.planned), (0, Bytes::new(4096 + 2 * (8192 + 6144))));
        assert_eq!((run.more.served.pool, run.more.overlapped), (Bytes::new(2 * 7000), Bytes::ZERO));
    }

    #[test]
    fn requests_that_vary_do_not_count() {
        let rows = JOB.replace("1,alloc,2", "1,alloc,8,9000,1,1\n1,free,8,,1,\n1,alloc,2");
        let (run, _) = ran(&rows, &rows);
        assert_eq!((run.more.deviations, run.more.served.pool), (0, Bytes::new(9000)));
    }

    #[test]
    fn small_requests_have_slots_for_twice_their_peak() {
        let rows = format!("{JOB}9,alloc,10,512,1,\n9,alloc,11,100,1,\n9,free,10,,1,\n9,alloc,12,7,1,\n");
        let mut model = model(&rows, None);
        assert_eq!((model.small.slots, model.pools), (4, Bytes::mib(4)));
        let mut addresses: Vec<u64> = (0..4).map(|slot| model.alloc(&asked(slot, 512)).unwrap().get()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == 512), "{addresses:x?}");
        assert_eq!((model.more.served.pool, model.reserved().now), (Bytes::new(2048), Bytes::mib(4)));
        // A fifth takes a segment, and what is free again is taken first.
        model.alloc(&asked(4, 1)).unwrap();
        assert_eq!((model.more.served.pool, model.reserved().now), (Bytes::new(2049), Bytes::mib(6)));
        model.free(2);
        model.alloc(&asked(5, 1)).unwrap();
        assert_eq!((model.more.served.pool, model.more.deviations), (Bytes::new(2050), 0));
    }

    #[test]
    fn a_free_that_names_an_iteration_before_its_allocations_counts_nothing() {
        let trace = read("0,alloc,1,64,2,\n1,free,1,,1,\n2,alloc,2,4096,1,\n3,alloc,3,4096,0,\n");
        assert_eq!(without_small(&trace, 1).1, 0);
        assert!(Stalloc::new(&trace, 1, None, &CostTable::A100).is_ok());
    }

    #[test]
    fn a_pool_that_does_not_fit_is_the_end_and_reserves_nothing() {
        let mut dead = model(JOB, Some(Bytes::mib(2) - Bytes::new(1)));
        assert_eq!(dead.alloc(&asked(0, 4096)), Err(OutOfMemory));
        assert_eq!((dead.reserved(), dead.calls().malloc), (Reserved::default(), 0));
        let mut alive = model(JOB, Some(Bytes::mib(2)));
        assert!(alive.alloc(&asked(0, 4096)).is_ok());
        assert_eq!(alive.reserved().now, Bytes::mib(2));
    }
}
