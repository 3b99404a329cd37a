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

use std::sync::Arc;
use std::time::Duration;

use super::installed::Installed;
use super::{Pools, Runtime};
use crate::memory::Chunk;
use crate::pool::pages::PagePool;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// An exchange saves at least this part of what the process holds: it costs driver calls.
const SAVED_PART: u64 = 4096;

/// An idle chunk, and the parts of it that a plan's entries need, in whole granules.
#[derive(Debug)]
struct PartlyNeeded {
    start: DeviceAddress,
    len: Bytes,
    needed: Vec<AddressSpan>,
}

impl PartlyNeeded {
    fn saved(&self) -> Bytes {
        self.len.saturating_sub(self.needed.iter().map(|part| part.len()).sum())
    }
}

impl Runtime {
    /// Exchanges idle chunks of which the plan needs a part for smaller ones, and returns the bytes
    /// that the process holds less. Takes the pools' lock to unmap a chunk, and to map its successors.
    ///
    /// The daemon gets the old chunks first, so its device never holds both. A part for which memory
    /// cannot be had is brought with the request that needs it.
    pub fn exchange_partly_needed(&self) -> Bytes {
        let (mut spent, mut needed) = (Vec::new(), Vec::new());
        {
            let mut pools = self.lock();
            for chunk in self.partly_needed(&pools) {
                let taken = pools.take_partly_needed(&chunk);
                if !taken.is_empty() {
                    needed.extend(chunk.needed);
                }
                spent.extend(taken);
            }
            self.note_held(&mut pools);
        }
        let given = self.give_back(spent);
        let mut taken = Bytes::ZERO;
        for part in needed {
            let Ok(chunks) = self.acquire(part.len(), Duration::ZERO) else { break };
            let mut pools = self.lock();
            if self.fill(&mut pools, part, chunks) {
                pools.take_for_entries(part);
            }
            self.note_held(&mut pools);
            taken += part.len();
        }
        given.saturating_sub(taken)
    }

    fn partly_needed(&self, pools: &Pools) -> Vec<PartlyNeeded> {
        // Under pressure the new memory is refused; unmapping would break a capture.
        if pools.private.is_open() || pools.asleep.is_some() || self.was_refused(pools) {
            return Vec::new();
        }
        let least = Bytes::new(pools.held().get() / SAVED_PART).max(Bytes::new(1));
        let Some(installed) = &pools.planned else { return Vec::new() };
        let mut chunks = installed.partly_needed(&pools.pages, self.config.granule());
        chunks.retain(|chunk| chunk.saved() >= least);
        chunks
    }
}

impl Pools {
    fn take_partly_needed(&mut self, chunk: &PartlyNeeded) -> Vec<Arc<Chunk>> {
        let Pools { planned: Some(installed), pages, .. } = self else { return Vec::new() };
        installed.give_up(chunk.start, chunk.len, pages)
    }

    fn take_for_entries(&mut self, part: AddressSpan) {
        if let Pools { planned: Some(installed), pages, .. } = self {
            installed.take_at(part, pages);
        }
    }
}

impl Installed {
    /// Idle chunks of which the plan's entries need a part, but not all granules.
    fn partly_needed(&self, pages: &PagePool, granule: Bytes) -> Vec<PartlyNeeded> {
        let idle = self.idle_chunks(pages, granule);
        if idle.is_empty() {
            return Vec::new();
        }
        let parts: Vec<AddressSpan> =
            self.pool.entry_parts().into_iter().map(|part| self.pool.addresses_of(part)).collect();
        let needed = |start: DeviceAddress, len: Bytes| {
            let from = parts.partition_point(|part| part.end() <= start);
            let end = start.checked_add(len)?;
            let parts = parts[from..].iter().take_while(|part| part.start() < end);
            let needed = granules_of(Span::new(start, len)?, parts, granule);
            let chunk = PartlyNeeded { start, len, needed };
            (!chunk.needed.is_empty() && !chunk.saved().is_zero()).then_some(chunk)
        };
        idle.into_iter().filter_map(|chunk| needed(chunk.start, chunk.len)).collect()
    }
}

/// The whole granules of a chunk that some parts, in ascending order, lie in; those that touch as one.
fn granules_of<'a>(
    chunk: AddressSpan,
    parts: impl Iterator<Item = &'a AddressSpan>,
    granule: Bytes,
) -> Vec<AddressSpan> {
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

    /// A runtime whose large requests come in one chunk.
    fn runtime() -> Runtime {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(1)])));
        let device = Device::open(sim, DeviceId(0)).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(store, DeviceId(0), Ladder::standard()));
        let pages = PagePolicy { request_chunks: 1, ..PagePolicy::default() };
        let config = RuntimeConfig { pages, ..RuntimeConfig::default() };
        Runtime::new(device, source, Arc::new(ManualClock::default()), config, Counters::private())
    }

    /// 3 MiB at the pool's start and 1 MiB at 21 MiB.
    fn plan() -> Plan {
        let entry = |mib, offset, order| Entry {
            bytes: Bytes::mib(mib),
            offset: PlanOffset::new(offset * MIB),
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey::UNKNOWN,
            lifetime: Lifetime::new(order, 2),
            again: None,
        };
        Plan { pool_len: Bytes::mib(22), entries: vec![entry(3, 0, 0), entry(1, 21, 1)], ..Plan::default() }
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
    fn a_chunk_of_which_the_plan_needs_little_is_exchanged() {
        let runtime = runtime();
        let block = alloc(&runtime, 64);
        runtime.free(block, StreamId::DEFAULT).unwrap();
        offer(&runtime);
        assert_eq!((runtime.stats().held, runtime.exchange_partly_needed()), (Bytes::mib(64), Bytes::mib(58)));
        runtime.invariants().unwrap();
        let blocks = [3, 1].map(|mib| alloc(&runtime, mib));
        let stats = runtime.stats();
        assert_eq!((stats.held, stats.served.planned), (Bytes::mib(6), 2), "{stats:?}");
        assert_eq!(runtime.exchange_partly_needed(), Bytes::ZERO, "in use, and as small as can be");
        blocks.into_iter().for_each(|block| runtime.free(block, StreamId::DEFAULT).unwrap());
        assert_eq!(runtime.exchange_partly_needed(), Bytes::ZERO);
    }

    #[test]
    fn a_chunk_with_something_live_stays() {
        let runtime = runtime();
        let block = alloc(&runtime, 64);
        runtime.free(block, StreamId::DEFAULT).unwrap();
        offer(&runtime);
        alloc(&runtime, 3);
        assert_eq!((runtime.exchange_partly_needed(), runtime.stats().held), (Bytes::ZERO, Bytes::mib(64)));
        runtime.invariants().unwrap();
    }

    #[test]
    fn parts_need_the_granules_that_they_lie_in() {
        let chunk = span(100, 20);
        let needed = |parts: &[AddressSpan]| granules_of(chunk, parts.iter(), Bytes::mib(2));
        assert_eq!(needed(&[span(90, 11)]), [span(100, 2)], "from before the chunk");
        assert_eq!(needed(&[span(103, 1), span(105, 1), span(111, 2)]), [span(102, 4), span(110, 4)]);
        assert_eq!(needed(&[span(119, 9)]), [span(118, 2)], "beyond the chunk");
        assert_eq!(needed(&[]), []);
    }
}
