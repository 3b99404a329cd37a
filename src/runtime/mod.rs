//! The runtime of one device in one process: its pools behind one lock, and the way to more memory when they have none. The same code runs in
//! training processes, in the demo, and over the simulated driver.
//!
//! ## Who may touch what, when
//!
//! * The pools belong to whoever holds the lock. No driver call is made under it but the mapping of memory that is new, moved or given up, and events
//!   for what several streams use (where no event can be had, waiting for the device); no other
//!   process can hold it; nobody waits for the daemon under it.
//! * Whoever puts memory to sleep or wakes it reads and writes all of it under the lock: nobody is to use it then.
//! * Asking the daemon happens outside the lock, so other threads go on allocating and freeing meanwhile. What comes back is put into the
//!   pools under the lock, and the request tries again: another thread may have been faster.
//! * Counters are written under the lock, one writer each, and read by anybody.

mod blocks;
mod config;
mod counters;
mod deferred;
mod error;
mod exchange;
mod fallback;
mod figures;
mod giving;
mod installed;
mod kept;
mod lease;
mod lock;
mod manifest;
mod need;
mod offer;
mod plan_fallbacks;
mod pools;
mod private_pools;
mod room;
mod sleep;
mod source;
mod statistics;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use blocks::{Block, BlockState, Candidate, Segment, SegmentPool};
pub use config::RuntimeConfig;
pub use counters::{Counter, Counters};
pub use error::{AllocError, NotLive, OutOfPlan, PlanInstallError};
pub use figures::{RuntimeStats, ServedCounts};
pub use manifest::{ManifestError, Piece};
pub use need::Need;
pub use offer::Offer;
pub use private_pools::{PrivatePoolId, PrivateUse};
pub use sleep::{SleepError, Slept};
pub use source::{ChunkSource, Room, SourceError, Want};
pub use statistics::MemoryStatistics;

use crate::clock::Clock;
use crate::driver::DriverError;
use crate::ids::{PlanId, StreamId};
use crate::ladder::Shape;
use crate::memory::{Chunk, Device};
use crate::plan::Plan;
use crate::pool::pages::PagePool;
use crate::pool::planned::PlannedCounts;
use crate::pool::{AddressMap, Request};
use crate::record::Tap;
use crate::sync::Mutex;
use crate::units::{Bytes, DeviceAddress};
use deferred::Deferred;
use installed::{Installed, Ready};
use lease::Growth;
use lock::{Held, Lock};
use need::{MostHeld, PeakOfIteration};
use private_pools::PrivatePools;
use sleep::Asleep;
use statistics::Watermarks;

/// The runtime of one device.
#[derive(Debug)]
pub struct Runtime {
    device: Arc<Device>,
    source: Arc<dyn ChunkSource>,
    clock: Arc<dyn Clock>,
    config: RuntimeConfig,
    pools: Lock<Pools>,
    /// Held while memory is brought for what is smaller than the least that can be: what comes for the first of many threads is enough for all.
    growing: Mutex<()>,
    /// Held while idle memory goes back because others want it, and while a capture begins.
    giving: Mutex<()>,
    counters: Counters,
}

#[derive(Debug)]
struct Pools {
    planned: Option<Installed>,
    /// What plans have served that are no more.
    counts_before: PlannedCounts,
    /// The plan that is installed where the next iteration begins.
    offered: Option<Offer>,
    /// What no plan serves.
    pages: PagePool,
    /// Memory for what captured graphs replay.
    private: PrivatePools,
    most_held: MostHeld,
    /// A plan is or was installed.
    had_plan: bool,
    /// Something was asked for on another stream than the default one.
    has_streams: bool,
    /// Live allocations that other streams use, too.
    recorded: AddressMap<BTreeSet<StreamId>>,
    deferred: Deferred,
    /// The last request has not been served because frees are expected.
    is_held_up: bool,
    /// What the process has set itself as the most that it holds here.
    limit: Option<Bytes>,
    /// Until then the source is not asked for more: it has just refused.
    refused_until: Duration,
    growth: Growth,
    /// Where what happens is recorded, if it is: each with its number.
    taps: Vec<(TapNumber, Tap)>,
    /// What statistics count that no pool does.
    marks: Watermarks,
    peak: PeakOfIteration,
    /// Its memory is gone until it is woken.
    asleep: Option<Asleep>,
    /// Allocations and frees until figures are written that take a walk over all blocks.
    until_look: u32,
    /// An iteration was marked since such figures were written for the last time.
    has_begun: bool,
}

/// So many allocations and frees at most is such a figure old: a walk costs as much as some hundred of them.
const OPERATIONS_PER_LOOK: u32 = 8192;

/// One of the recordings of a runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TapNumber(u32);

impl Runtime {
    /// A runtime over `device` that gets its memory from `source` and counts in `counters`.
    pub fn new(
        device: Arc<Device>,
        source: Arc<dyn ChunkSource>,
        clock: Arc<dyn Clock>,
        config: RuntimeConfig,
        counters: Counters,
    ) -> Runtime {
        let pools = Pools {
            planned: None,
            counts_before: PlannedCounts::default(),
            offered: None,
            pages: PagePool::new(Arc::clone(&device), config.pages),
            private: PrivatePools::default(),
            most_held: MostHeld::default(),
            had_plan: false,
            has_streams: false,
            recorded: AddressMap::default(),
            deferred: Deferred::default(),
            is_held_up: false,
            limit: None,
            refused_until: Duration::ZERO,
            growth: Growth::default(),
            taps: Vec::new(),
            marks: Watermarks::default(),
            peak: PeakOfIteration::default(),
            asleep: None,
            until_look: OPERATIONS_PER_LOOK,
            has_begun: false,
        };
        Runtime {
            device,
            source,
            clock,
            config,
            pools: Lock::new(pools),
            growing: Mutex::new(()),
            giving: Mutex::new(()),
            counters,
        }
    }

    #[inline]
    fn lock(&self) -> Held<'_, Pools> {
        self.pools.lock()
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Serves a request: tens of nanoseconds when a pool has what it needs, a round trip to the daemon when not.
    #[inline]
    pub fn alloc(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let served = self.pools.with(|pools| {
            self.count_down(pools);
            if pools.asleep.is_some() {
                return None;
            }
            pools.has_streams |= request.stream != StreamId::DEFAULT;
            let served = self.alloc_now(pools, request)?;
            pools.note(|tap| tap.alloc(request, served));
            Some(served)
        });
        match served {
            Some(address) => Ok(address),
            None => self.alloc_slow(request),
        }
    }

    /// Serves a request from what is there, if a pool can.
    #[inline]
    fn alloc_now(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        match pools.alloc(request, self.counters) {
            None if pools.is_held_up => self.alloc_held_up(pools, request),
            served => served,
        }
    }

    /// Takes an allocation back that was used last on `stream`. Where that is not the stream that it was made on, its bytes are not reused before that stream has passed the free.
    #[inline]
    pub fn free(&self, address: DeviceAddress, stream: StreamId) -> Result<(), NotLive> {
        let is_freed = self.pools.with(|pools| {
            self.count_down(pools);
            pools.may_free_now(address, stream) && self.free_shared(pools, address, stream)
        });
        if is_freed { Ok(()) } else { self.free_otherwise(address, stream) }
    }

    /// Another stream uses the allocation, too: its bytes are not reused before that stream has passed the free. Addresses that are not ours are
    /// ignored, as PyTorch hands over any, and so is the stream that the allocation was made on, where that
    /// is known: what a plan serves may lie in another's part.
    pub fn record_stream(&self, address: DeviceAddress, stream: StreamId) {
        let mut pools = self.lock();
        let is_own = !pools.may_be_of_another(stream) || !pools.had_plan && !pools.is_of_another(address, stream);
        if !is_own && pools.is_live(address) && !pools.deferred.has(address) {
            pools.recorded.entry(address).or_default().insert(stream);
            pools.note_recorded(address, stream);
        }
    }

    /// An iteration of the job ends.
    pub fn mark_iteration(&self) {
        let mut pools = self.lock();
        let Pools { planned, pages, .. } = &mut *pools;
        if let Some(installed) = planned {
            installed.mark_iteration(pages);
        }
        pools.note(Tap::mark);
        self.counters.add(Counter::Iterations, 1);
        pools.turn_peak();
        self.install_offered(&mut pools);
        self.look(&mut pools);
        pools.has_begun = true;
    }

    /// Records from now on what happens through `tap`, too, until [`Runtime::stop_recording`] is told its number.
    pub fn record_into(&self, tap: Tap) -> TapNumber {
        let mut pools = self.lock();
        let number = TapNumber(pools.taps.last().map_or(0, |(last, _)| last.0.wrapping_add(1)));
        pools.taps.push((number, tap));
        number
    }

    /// Takes a tap away, which ends its recording; says whether it was there.
    pub fn stop_recording(&self, number: TapNumber) -> bool {
        let mut pools = self.lock();
        let before = pools.taps.len();
        pools.taps.retain(|(known, _)| *known != number);
        pools.taps.len() < before
    }

    /// Gets the static pool of a plan and serves from it from now on. What is live stays where it is.
    pub fn install_plan(&self, plan: &Plan) -> Result<(), PlanInstallError> {
        if self.lock().planned.is_some() {
            return Err(PlanInstallError::Installed);
        }
        let len = plan.pool_len.max(Bytes::new(1));
        let want = Want { len, shape: Shape::STATIC, plan: Some(plan.id()), wait: self.config.wait };
        let chunks = self.check_limit(len).and_then(|()| self.source.acquire(want));
        let chunks = chunks.map_err(|source| PlanInstallError::Source { len, source })?;
        let mut pools = self.lock();
        let installed = self.install_whole(&mut pools, plan, &chunks);
        self.note_held(&mut pools);
        drop(pools);
        match installed {
            Ok(()) => Ok(()),
            // As many idle chunks leave as have come, whichever they are.
            Err((error, true)) => {
                self.trim(chunks.iter().map(|chunk| chunk.len()).sum());
                Err(error)
            }
            Err((error, false)) => {
                self.give_back(chunks);
                Err(error)
            }
        }
    }

    /// Serves from a plan whose memory these chunks are. On error it says whether they are mapped all
    /// the same.
    fn install_whole(
        &self,
        pools: &mut Pools,
        plan: &Plan,
        chunks: &[Arc<Chunk>],
    ) -> Result<(), (PlanInstallError, bool)> {
        if pools.planned.is_some() {
            return Err((PlanInstallError::Installed, false));
        }
        let stream = installed::main_stream(plan);
        let start = pools.pages.extend_at(chunks, stream).map_err(|error| (PlanInstallError::from(error), false))?;
        let installed = Ready::at(plan, start, &self.config).and_then(|ready| {
            let opened = Installed::open(ready, None, &mut pools.pages);
            opened.ok_or(PlanInstallError::NoAddresses(plan.pool_len))
        });
        let mut installed = installed.map_err(|error| (error, true))?;
        installed.take(installed.pool.offsets(), &mut pools.pages);
        installed.note_usual(pools.held());
        (pools.planned, pools.had_plan) = (Some(installed), true);
        Ok(())
    }

    /// The plan that is installed.
    pub fn plan(&self) -> Option<PlanId> {
        self.lock().planned.as_ref().map(|installed| installed.id)
    }

    /// Bytes that a live allocation occupies.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.lock().len_of(address)
    }

    /// The addresses inside a live allocation at which one chunk ends and the next begins.
    pub fn borders(&self, address: DeviceAddress) -> Vec<DeviceAddress> {
        self.lock().pieces(address).into_iter().skip(1).map(|(span, ..)| span.start()).collect()
    }

    /// Gives idle memory back to the daemon, `wanted` bytes of it or all there is; says how much it was. None while a private pool is open: unmapping would break a capture.
    pub fn trim(&self, wanted: Bytes) -> Bytes {
        let chunks = {
            let mut pools = self.lock();
            if pools.private.is_open() || pools.asleep.is_some() {
                return Bytes::ZERO;
            }
            let chunks = pools.pages.trim(wanted);
            self.note_held(&mut pools);
            chunks
        };
        self.give_back(chunks) + self.give_back_spent()
    }

    /// Gives chunks to whoever owns them and says how many bytes that was. Those that may still be visible here stay: nobody else may get them while
    /// the process lives.
    fn give_back(&self, mut chunks: Vec<Arc<Chunk>>) -> Bytes {
        chunks.retain(|chunk| !chunk.is_stuck());
        let given = chunks.iter().map(|chunk| chunk.len()).sum();
        if !chunks.is_empty() {
            self.source.release(chunks);
        }
        given
    }

    /// Waits for all streams: what was freed while they used it is idle now.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.device.driver().synchronize(self.device.id())?;
        if self.finish_deferred(&mut self.lock()) {
            self.give_back_spent();
        }
        Ok(())
    }

    /// Says what is wrong with the pools; nothing, unless one has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        let pools = self.lock();
        if let Some(installed) = &pools.planned {
            installed.pool.invariants()?;
        }
        let planned = pools.planned.iter().flat_map(|installed| installed.pool.placed());
        let planned: Bytes = planned.map(|placed| placed.bytes).sum();
        let of_pools = planned + pools.pages.live_bytes() + pools.private.live_bytes();
        let counted = Bytes::new(self.counters.get(Counter::LiveBytes));
        if of_pools != counted {
            return Err(format!("{counted} are counted as live, and pools have {of_pools}"));
        }
        let parts = pools.planned.as_ref().map(|installed| (installed.site, installed.own_parts()));
        pools.pages.invariants(parts.as_ref().map(|(site, parts)| (*site, &parts[..])))?;
        pools.private.invariants()
    }

    #[inline]
    fn count_down(&self, pools: &mut Pools) {
        pools.until_look -= 1;
        if pools.until_look == 0 {
            self.look(pools);
        }
    }

    #[cold]
    fn look(&self, pools: &mut Pools) {
        pools.until_look = OPERATIONS_PER_LOOK;
        pools.has_begun = false;
        if pools.offered.is_some() {
            // With every operation, perhaps: the figures can wait.
            pools.until_look = self.look_for_beginning(pools);
            return;
        }
        self.note_held(pools);
    }

    /// Writes to the counters what is held, and in which pieces.
    fn note_held(&self, pools: &mut Pools) {
        let held = pools.held();
        pools.note_most_held(held);
        pools.note_marks(held);
        pools.peak.note(held);
        self.counters.set(Counter::HeldBytes, held.get());
        self.counters.raise(Counter::PeakHeldBytes, held.get());
        self.counters.set(Counter::StitchableBytes, pools.pages.free_bytes().get());
        let (mappings, addresses) = self.device.mapped();
        self.counters.set(Counter::Mappings, mappings);
        self.counters.set(Counter::AddressBytes, addresses.get());
        self.counters.set(Counter::ContiguousBytes, pools.pages.largest_contiguous().get());
        let planned = pools.planned_counts();
        self.counters.set(Counter::DeviationsLate, planned.late);
        self.counters.set(Counter::DeviationsBlocked, planned.blocked);
        self.counters.set(Counter::DeviationsUnplanned, planned.unplanned);
        self.counters.set(Counter::DeviationsSkipped, planned.skipped);
        self.counters.set(Counter::DeviationsResized, planned.resized);
        self.counters.set(Counter::StitchedBytes, pools.pages.counts().stitched_bytes.get());
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Mappings first, then the handles, then the word to whoever owns the chunks.
        let Some(pools) = self.pools.get_mut() else { return };
        pools.deferred.end(self.device.driver());
        let mut chunks = Vec::new();
        chunks.extend(pools.pages.take_all());
        chunks.extend(pools.private.take_all());
        self.give_back(chunks);
        // The next runtime of the session may count on in the same cells.
        Counter::NOW.into_iter().for_each(|counter| self.counters.set(counter, 0));
    }
}

#[cfg(test)]
mod tests;
