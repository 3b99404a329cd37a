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
mod exchange;
mod fallback;
mod giving;
mod installed;
mod kept;
mod lock;
mod manifest;
mod need;
mod offer;
mod plan_fallbacks;
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
pub use manifest::{ManifestError, Piece};
pub use need::Need;
pub use offer::Offer;
pub use private_pools::{PrivatePoolId, PrivateUse};
pub use sleep::{SleepError, Slept};
pub use source::{ChunkSource, Room, SourceError, Want};
pub use statistics::MemoryStatistics;

use crate::clock::Clock;
use crate::driver::DriverError;
use crate::error::ErrorKind;
use crate::ids::{PlanId, StreamId};
use crate::ladder::Shape;
use crate::limits;
use crate::memory::{Chunk, Device, MemoryError};
use crate::plan::Plan;
use crate::pool::pages::{PageCounts, PagePool, PageUse};
use crate::pool::planned::{InstallError, PlannedCounts, Served};
use crate::pool::{AddressMap, Request};
use crate::record::Tap;
use crate::sync::Mutex;
use crate::units::{Bytes, DeviceAddress};
use deferred::Deferred;
use installed::{Installed, Ready};
use lock::{Held, Lock};
use need::PeakOfIteration;
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

/// Why a request was not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// There is no memory left, anywhere.
    #[error(
        "out of memory: {requested} asked for; this process holds {held} of which {live} are live, and {stitchable} idle could be stitched ({parked} idle in all, {contiguous} in one piece{})",
        plan_words(*of_plan)
    )]
    OutOfMemory {
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes that this process holds.
        held: Bytes,
        /// Bytes of live allocations.
        live: Bytes,
        /// Idle bytes that can be put together elsewhere: whole chunks.
        stitchable: Bytes,
        /// All idle bytes outside of a static pool, those between live ones among them.
        parked: Bytes,
        /// The longest idle stretch.
        contiguous: Bytes,
        /// Of its plan, if it has one.
        of_plan: Option<OutOfPlan>,
        /// Why there is no more.
        #[source]
        source: SourceError,
    },
    /// Its memory is asleep.
    #[error("cannot serve {requested}: this memory is asleep, and is to be woken first")]
    Asleep {
        /// Bytes asked for.
        requested: Bytes,
    },
    /// More than any device has.
    #[error("{requested} are more than any device has")]
    TooLarge {
        /// Bytes asked for.
        requested: Bytes,
    },
    /// Memory was there and could not be mapped.
    #[error("cannot serve {requested}")]
    Memory {
        /// Bytes asked for.
        requested: Bytes,
        /// What failed.
        #[source]
        source: MemoryError,
    },
}

/// What a job has of its plan that runs out of memory all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfPlan {
    /// Idle bytes of the static pool: where the plan has requests that are not live, and where it has none.
    pub idle: Bytes,
    /// How often the job has left the plan, and those before it.
    pub deviations: u64,
}

fn plan_words(of_plan: Option<OutOfPlan>) -> String {
    let words = |OutOfPlan { idle, deviations }| {
        format!("; {} from its plan, in whose pool {idle} are idle", crate::units::counted(deviations, "deviation"))
    };
    of_plan.map_or_else(String::new, words)
}

impl AllocError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            AllocError::OutOfMemory { source, .. } => source.kind,
            AllocError::TooLarge { .. } => ErrorKind::Invalid,
            AllocError::Asleep { .. } => ErrorKind::Conflict,
            AllocError::Memory { source, .. } => source.kind(),
        }
    }

    /// Memory has run out, or there is not as much in the world: a smaller request may be served.
    pub fn is_lack(&self) -> bool {
        matches!(self, AllocError::TooLarge { .. }) || self.kind().is_lack()
    }
}

/// An address that is not a live allocation of this runtime: freed before, or never its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a live allocation")]
pub struct NotLive(pub DeviceAddress);

/// Why a plan was not installed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanInstallError {
    /// There is one already.
    #[error("a plan is installed already")]
    Installed,
    /// The static pool could not be had.
    #[error("cannot get the {len} of the static pool")]
    Source {
        /// Bytes of it.
        len: Bytes,
        /// Why.
        #[source]
        source: SourceError,
    },
    /// The static pool could not be mapped.
    #[error("cannot map the static pool")]
    Memory(#[from] MemoryError),
    /// The plan cannot be served.
    #[error("the plan cannot be served")]
    Pool(#[from] InstallError),
    /// There is no range of addresses for it.
    #[error("no addresses for the {0} of the plan's pool")]
    NoAddresses(Bytes),
}

impl PlanInstallError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PlanInstallError::Installed => ErrorKind::Conflict,
            PlanInstallError::Source { source, .. } => source.kind,
            PlanInstallError::Memory(error) => error.kind(),
            PlanInstallError::Pool(_) => ErrorKind::Invalid,
            PlanInstallError::NoAddresses(_) => ErrorKind::Exhausted,
        }
    }
}

/// What the runtime holds and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuntimeStats {
    /// Bytes of all chunks: static pools, page pool and private pools.
    pub held: Bytes,
    /// Most of them at one time.
    pub peak_held: Bytes,
    /// Bytes of live allocations, as asked for.
    pub live: Bytes,
    /// Most of them at one time.
    pub peak_live: Bytes,
    /// Bytes of the static pool.
    pub static_pool: Bytes,
    /// Live allocations.
    pub live_allocations: u64,
    /// Requests and bytes served by each pool.
    pub served: ServedCounts,
    /// The plan's side of it.
    pub planned: PlannedCounts,
    /// The page pool's side of it.
    pub pages: PageCounts,
    /// What the page pool holds.
    pub page_use: PageUse,
    /// What private pools hold.
    pub private_use: PrivateUse,
    /// Requests that failed.
    pub failures: u64,
}

/// Requests served, by pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServedCounts {
    /// At the address of the plan.
    pub planned: u64,
    /// In a space that the plan leaves idle.
    pub reuse: u64,
    /// By the page pool.
    pub pool: u64,
    /// Bytes of each, as asked for.
    pub planned_bytes: Bytes,
    /// See above.
    pub reuse_bytes: Bytes,
    /// See above.
    pub pool_bytes: Bytes,
}

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
            has_streams: false,
            recorded: AddressMap::default(),
            deferred: Deferred::default(),
            is_held_up: false,
            limit: None,
            refused_until: Duration::ZERO,
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
            pools.waits_for_nobody(address, stream) && self.free_shared(pools, address, stream)
        });
        if is_freed { Ok(()) } else { self.free_otherwise(address, stream) }
    }

    /// Another stream uses the allocation, too: its bytes are not reused before that stream has passed the free. Addresses that are not ours are
    /// ignored, as PyTorch hands over any.
    pub fn record_stream(&self, address: DeviceAddress, stream: StreamId) {
        let mut pools = self.lock();
        if pools.is_live(address) && !pools.deferred.has(address) {
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
            let opened = Installed::open(ready, false, &mut pools.pages);
            opened.ok_or(PlanInstallError::NoAddresses(plan.pool_len))
        });
        let mut installed = installed.map_err(|error| (error, true))?;
        installed.take(installed.pool.offsets(), &mut pools.pages);
        installed.note_usual(pools.held());
        pools.planned = Some(installed);
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

    /// What it holds and has done.
    pub fn stats(&self) -> RuntimeStats {
        let pools = self.lock();
        let count = |counter| self.counters.get(counter);
        let bytes = |counter| Bytes::new(self.counters.get(counter));
        RuntimeStats {
            held: pools.held(),
            peak_held: bytes(Counter::PeakHeldBytes),
            live: bytes(Counter::LiveBytes),
            peak_live: bytes(Counter::PeakLiveBytes),
            static_pool: pools.planned.as_ref().map_or(Bytes::ZERO, Installed::held),
            live_allocations: pools.live_allocations(),
            served: ServedCounts {
                planned: count(Counter::RequestsPlanned),
                reuse: count(Counter::RequestsReuse),
                pool: count(Counter::RequestsPool),
                planned_bytes: bytes(Counter::BytesPlanned),
                reuse_bytes: bytes(Counter::BytesReuse),
                pool_bytes: bytes(Counter::BytesPool),
            },
            planned: pools.planned_counts(),
            pages: pools.pages.counts(),
            page_use: pools.pages.usage(),
            private_use: pools.private.usage(),
            failures: count(Counter::Failures),
        }
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

impl Pools {
    /// Tells whoever records.
    #[inline]
    fn note(&mut self, what: impl Fn(&mut Tap)) {
        for (_, tap) in &mut self.taps {
            what(tap);
        }
    }

    /// What is private is in no recording.
    fn note_recorded(&mut self, address: DeviceAddress, stream: StreamId) {
        if self.private.len_of(address).is_none() {
            self.note(|tap| tap.record_stream(address, stream));
        }
    }

    #[inline]
    fn alloc(&mut self, request: &Request, counters: Counters) -> Option<DeviceAddress> {
        let (address, by) = match &mut self.planned {
            Some(installed) if !installed.is_suspended() => match installed.pool.alloc(request) {
                Served::At(address) => (address, Counter::PLANNED),
                other => self.alloc_astray(request, other, counters)?,
            },
            planned => {
                planned.iter_mut().for_each(|installed| installed.pool.note_suspended(request));
                (self.pages.alloc(request.bytes, request.stream)?, Counter::POOL)
            }
        };
        counters.served(by, request.bytes, limits::occupied_len(request.bytes));
        Some(address)
    }

    /// Serves a request that does not have the place of its entry.
    fn alloc_astray(
        &mut self,
        request: &Request,
        served: Served,
        counters: Counters,
    ) -> Option<(DeviceAddress, (Counter, Counter))> {
        match served {
            Served::At(_) | Served::Unbacked => return None,
            Served::HeldUp => {
                self.is_held_up = true;
                return None;
            }
            Served::Reused(_) | Served::Unknown | Served::Elsewhere => {}
        }
        let installed = self.planned.as_mut()?;
        // Without marks nothing says when the job may go by its plan again.
        if counters.get(Counter::Iterations) > 0 {
            installed.note_astray(&mut self.pages);
        }
        if let Served::Reused(address) = served {
            return Some((address, Counter::REUSED));
        }
        match self.pages.alloc(request.bytes, request.stream) {
            Some(address) => Some((address, Counter::POOL)),
            None if served == Served::Unknown && !installed.is_suspended() => {
                Some((installed.pool.alloc_anywhere(request)?, Counter::REUSED))
            }
            None => None,
        }
    }

    #[inline]
    fn free(&mut self, address: DeviceAddress, counters: Counters) -> Result<(), NotLive> {
        let planned = self.planned.as_mut().and_then(|installed| installed.free(address, &mut self.pages));
        let freed = planned.or_else(|| self.pages.free(address));
        let bytes = freed.ok_or(NotLive(address))?;
        counters.freed(bytes, limits::occupied_len(bytes));
        Ok(())
    }

    /// No stream but the one that an allocation was made on has to pass its free, and it is not freed already.
    #[inline]
    fn waits_for_nobody(&self, address: DeviceAddress, stream: StreamId) -> bool {
        (self.recorded.is_empty() || !self.recorded.contains_key(&address))
            && (self.deferred.is_empty() || !self.deferred.has(address))
            && !(self.may_be_of_another(stream) && self.is_of_another(address, stream))
    }

    /// Jobs of one stream, which most are, never look.
    #[inline]
    fn may_be_of_another(&self, stream: StreamId) -> bool {
        self.has_streams || stream != StreamId::DEFAULT
    }

    /// It lies in memory of another stream than this.
    fn is_of_another(&self, address: DeviceAddress, stream: StreamId) -> bool {
        let of = self.planned.as_ref().and_then(|installed| installed.stream_at(address));
        let of = of.or_else(|| self.pages.stream_at(address)).or_else(|| self.private.stream_at(address));
        of.is_some_and(|of| of != stream)
    }

    fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        let planned = self.planned.as_ref().and_then(|installed| installed.pool.len_of(address));
        planned.or_else(|| self.pages.len_of(address)).or_else(|| self.private.len_of(address))
    }

    fn is_live(&self, address: DeviceAddress) -> bool {
        self.len_of(address).is_some()
    }

    /// Idle bytes of the page pool: what a plan needs later is not idle.
    fn idle(&self) -> Bytes {
        self.pages.free_bytes()
    }

    /// What the plan has served, and those before it.
    fn planned_counts(&self) -> PlannedCounts {
        let now = self.planned.as_ref().map_or_else(PlannedCounts::default, |installed| installed.pool.counts());
        self.counts_before + now
    }

    /// Bytes of chunks of which nothing is in use, and that no plan needs.
    fn idle_chunks(&self) -> Bytes {
        self.pages.usage().idle_chunks
    }

    fn held(&self) -> Bytes {
        let all = self.pages.held() + self.private.held();
        all.saturating_sub(self.slept())
    }

    fn live_allocations(&self) -> u64 {
        let planned = self.planned.as_ref().map_or(0, |installed| installed.pool.live_allocations());
        planned + self.pages.live_allocations() + self.private.live_allocations()
    }
}

#[cfg(test)]
mod tests;
