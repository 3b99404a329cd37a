//! Chunks of which a plan needs a small part, exchanged for smaller ones.
//!
//! A plan that comes while the job runs lies in chunks that were as long as the job needed before.
//! The last of them may be hundreds of MiB, of which the plan needs a few. Where nothing in such a
//! chunk is live it leaves its addresses, and new chunks take the parts that entries need.
//!
//! ```text
//!   before | chunk 7: entries ppppppppp, nothing behind them                |
//!   after  | new: ppppppppp |                              (hole)           |
//! ```
//!
//! Not for: chunks of which the plan needs nothing; those are idle, and [`Runtime::trim`] gives them back.
//!
//! Invariant: an entry whose part has no memory is served all the same: its request brings it.

use std::sync::PoisonError;
use std::time::Duration;

use super::installed::{IdleChunk, Installed};
use super::{Counter, Pools, Runtime};
use crate::ids::PlanId;
use crate::pool::pages::PagePool;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// An exchange saves at least this part of what the process holds: it costs driver calls.
const SAVED_PART: u64 = 4096;

/// New parts in the place of one chunk. Each is a lease.
const PARTS_MAX: usize = 32;

/// An idle chunk, and the parts of it that a plan's entries need, in whole granules.
#[derive(Debug)]
struct PartlyNeeded {
    chunk: IdleChunk,
    needed: Vec<AddressSpan>,
}

impl PartlyNeeded {
    fn saved(&self) -> Bytes {
        self.chunk.len.saturating_sub(self.needed.iter().map(|part| part.len()).sum())
    }
}

impl Runtime {
    /// Exchanges idle chunks of which the plan needs a part for smaller ones, one after the other, and
    /// returns the bytes that the process holds less. Not below what was live at one time, as far as
    /// that is more than the plan needs.
    ///
    /// The daemon gets an old chunk first, so its device never holds both. A part for which memory
    /// cannot be had is brought with the request that needs it.
    pub fn exchange_partly_needed(&self) -> Bytes {
        // Unmapping would break a capture: one that begins waits for the end of this.
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.lock().held();
        // What is queued is waited for here, and not while the job wants the lock.
        if self.best_exchange(&self.lock()).is_none() || self.synchronize().is_err() {
            return Bytes::ZERO;
        }
        while self.exchange_one() {}
        let mut pools = self.lock();
        let held = pools.held();
        if let Some(installed) = &mut pools.planned {
            installed.note_usual(held);
        }
        before.saturating_sub(held)
    }

    /// Exchanges one chunk. False where there is none, or memory is refused.
    fn exchange_one(&self) -> bool {
        let (plan, needed, spent) = {
            let mut pools = self.lock();
            let Some(found) = self.best_exchange(&pools) else { return false };
            let Pools { planned: Some(installed), pages, .. } = &mut *pools else { return false };
            let spent = installed.give_up(std::slice::from_ref(&found.chunk), pages);
            let plan = installed.id;
            self.note_held(&mut pools);
            (plan, found.needed, spent)
        };
        if spent.is_empty() {
            return false;
        }
        self.give_back(spent);
        needed.into_iter().all(|part| self.bring_part(plan, part))
    }

    /// The chunk whose exchange saves most.
    fn best_exchange(&self, pools: &Pools) -> Option<PartlyNeeded> {
        // Under pressure the new memory is refused.
        if !pools.may_exchange() || self.was_refused(pools) {
            return None;
        }
        let least = Bytes::new(pools.held().get() / SAVED_PART).max(Bytes::new(1));
        // Chunks are whole granules, live bytes are not.
        let most = pools.held().saturating_sub(Bytes::new(self.counters.get(Counter::PeakLiveBytes)));
        let most = most.saturating_add(Bytes::new(most.get() / 4)).saturating_add(self.config.granule());
        let installed = pools.planned.as_ref()?;
        let chunks = installed.partly_needed(&pools.pages, self.config.granule()).into_iter();
        let is_worth_it = |chunk: &PartlyNeeded| (least..=most).contains(&chunk.saved());
        chunks.filter(is_worth_it).max_by_key(PartlyNeeded::saved)
    }

    /// Brings memory for a part of a plan's site. False where it is refused.
    fn bring_part(&self, plan: PlanId, part: AddressSpan) -> bool {
        let Ok(chunks) = self.acquire(part.len(), Duration::ZERO) else {
            self.note_refused(&mut self.lock());
            return false;
        };
        let mut pools = self.lock();
        let is_same = pools.may_exchange() && pools.planned.as_ref().is_some_and(|installed| installed.id == plan);
        if !is_same {
            drop(pools);
            self.give_back(chunks);
            return false;
        }
        let is_filled = self.fill(&mut pools, part, chunks);
        if let Pools { planned: Some(installed), pages, .. } = &mut *pools {
            installed.take_at(part, pages);
        }
        self.note_held(&mut pools);
        is_filled
    }
}

impl Pools {
    fn may_exchange(&self) -> bool {
        let is_served_from = |installed: &Installed| !installed.is_suspended();
        !self.private.is_open() && self.asleep.is_none() && self.planned.as_ref().is_some_and(is_served_from)
    }
}

impl Installed {
    /// Idle chunks of which the plan's entries need a part, but not all granules.
    fn partly_needed(&self, pages: &PagePool, granule: Bytes) -> Vec<PartlyNeeded> {
        let needed = |chunk: IdleChunk| {
            let span = Span::new(chunk.start, chunk.len)?;
            let parts = self.within(&self.parts, span).into_iter().map(|part| self.pool.addresses_of(part));
            let found = PartlyNeeded { needed: granules_of(span, parts, granule), chunk };
            let is_part = !found.needed.is_empty() && found.needed.len() <= PARTS_MAX && !found.saved().is_zero();
            is_part.then_some(found)
        };
        self.idle_chunks(pages, granule).into_iter().filter_map(needed).collect()
    }
}

/// The whole granules of a chunk that some parts, in ascending order, lie in; those that touch as one.
fn granules_of(chunk: AddressSpan, parts: impl Iterator<Item = AddressSpan>, granule: Bytes) -> Vec<AddressSpan> {
    let offset = |address: DeviceAddress| address.checked_distance(chunk.start()).unwrap_or_default().min(chunk.len());
    let mut joined: Vec<(Bytes, Bytes)> = Vec::new();
    for part in parts {
        let from = offset(part.start()).round_down(granule);
        let to = offset(part.end()).round_up(granule).unwrap_or(chunk.len()).min(chunk.len());
        match joined.last_mut() {
            Some((_, end)) if *end >= from => *end = to.max(*end),
            _ => joined.push((from, to)),
        }
    }
    let span = |(from, to): (Bytes, Bytes)| Span::new(chunk.start().checked_add(from)?, to - from);
    joined.into_iter().filter_map(span).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::ManualClock;
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::ids::{DeviceId, StreamId};
    use crate::ladder::Ladder;
    use crate::memory::Device;
    use crate::plan::{Entry, Lane, Plan};
    use crate::pool::Request;
    use crate::pool::pages::PagePolicy;
    use crate::runtime::{Counters, RuntimeConfig};
    use crate::session::PrivateSource;
    use crate::store::Store;
    use crate::trace::ContextKey;
    use crate::units::{Lifetime, PlanOffset};

    fn span(from: u64, len: u64) -> AddressSpan {
        Span::new(DeviceAddress::new(from << 20), Bytes::mib(len)).expect("it is a span")
    }

    const MIB: u64 = 1 << 20;

    /// A runtime whose large requests come in one chunk. It holds 80 MiB for 65.
    fn runtime() -> Runtime {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(1)])));
        let device = Device::open(sim, DeviceId(0)).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(store, DeviceId(0), Ladder::standard()));
        let pages = PagePolicy { request_chunks: 1, chunk_least: Bytes::mib(64), ..PagePolicy::default() };
        let config = RuntimeConfig { pages, ..RuntimeConfig::default() };
        let runtime = Runtime::new(device, source, Arc::new(ManualClock::default()), config, Counters::private());
        let blocks = [64, 1].map(|mib| alloc(&runtime, mib));
        blocks.into_iter().for_each(|block| runtime.free(block, StreamId::DEFAULT).unwrap());
        assert_eq!(runtime.stats().held, Bytes::mib(80));
        runtime
    }

    /// 64 MiB, and 1 MiB at 4 MiB behind them.
    fn plan() -> Plan {
        let entry = |mib, offset, order| Entry {
            bytes: Bytes::mib(mib),
            offset: PlanOffset::new(offset * MIB),
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey::UNKNOWN,
            lifetime: Lifetime::new(order, 2),
            again: None,
        };
        Plan { pool_len: Bytes::mib(69), entries: vec![entry(64, 0, 0), entry(1, 68, 1)], ..Plan::default() }
    }

    fn alloc(runtime: &Runtime, mib: u64) -> DeviceAddress {
        let address = runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap();
        runtime.invariants().unwrap();
        address
    }

    fn offer(runtime: &Runtime) {
        runtime.offer(Some(runtime.prepare(&plan(), Bytes::ZERO).unwrap()));
        runtime.mark_iteration();
        assert!(runtime.plan().is_some());
    }

    #[test]
    fn a_chunk_of_which_a_plan_needs_little_goes() {
        let runtime = runtime();
        offer(&runtime);
        assert_eq!((runtime.exchange_partly_needed(), runtime.stats().held), (Bytes::mib(14), Bytes::mib(66)));
        runtime.invariants().unwrap();
        let blocks = [64, 1].map(|mib| alloc(&runtime, mib));
        let stats = runtime.stats();
        assert_eq!((stats.held, stats.served.planned), (Bytes::mib(66), 2), "{stats:?}");
        blocks.into_iter().for_each(|block| runtime.free(block, StreamId::DEFAULT).unwrap());
        assert_eq!(runtime.exchange_partly_needed(), Bytes::ZERO, "it is as small as can be");
    }

    #[test]
    fn a_chunk_with_something_live_stays() {
        let runtime = runtime();
        offer(&runtime);
        let blocks = [64, 1].map(|mib| alloc(&runtime, mib));
        assert_eq!((runtime.exchange_partly_needed(), runtime.stats().held), (Bytes::ZERO, Bytes::mib(80)));
        blocks.into_iter().for_each(|block| runtime.free(block, StreamId::DEFAULT).unwrap());
        runtime.invariants().unwrap();
    }

    #[test]
    fn what_was_live_at_one_time_stays() {
        let runtime = runtime();
        let blocks = [64, 14].map(|mib| alloc(&runtime, mib));
        blocks.into_iter().for_each(|block| runtime.free(block, StreamId::DEFAULT).unwrap());
        offer(&runtime);
        assert_eq!((runtime.exchange_partly_needed(), runtime.stats().held), (Bytes::ZERO, Bytes::mib(80)));
    }

    #[test]
    fn parts_need_the_granules_that_they_lie_in() {
        let chunk = span(100, 20);
        let needed = |parts: &[AddressSpan]| granules_of(chunk, parts.iter().copied(), Bytes::mib(2));
        assert_eq!(needed(&[span(90, 11)]), [span(100, 2)], "from before the chunk");
        assert_eq!(needed(&[span(103, 1), span(105, 1), span(111, 2)]), [span(102, 4), span(110, 4)]);
        assert_eq!(needed(&[span(119, 9)]), [span(118, 2)], "beyond the chunk");
        assert_eq!(needed(&[]), []);
    }
}
