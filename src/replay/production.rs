//! The production pools under a replay: the runtime of a training process, the ledger and the store of a daemon, over the simulated driver.
//!
//! What a daemon and its client do in two processes happens here in one: the descriptors that would go between them are not made, and counted as one export for each chunk that
//! is created and one import for each that is leased.
//! Clearing a new chunk is charged and not counted: a helper process makes those calls.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::allocator::{Allocator, AutoPlans, More, OutOfMemory, Reserved, ServedBytes};
use super::beside::Beside;
use super::calls::{CallSum, SHOWN};
use super::planning::{AutoOptions, Planning};
use super::script::Asked;
use crate::clock::{Clock, ManualClock};
use crate::driver::cost_table::CostTable;
use crate::driver::layers::Layered;
use crate::driver::layers::metered::{Meter, Metered};
use crate::driver::sim::{SimDriver, SimOptions};
use crate::driver::{Call, Driver};
use crate::error::{ErrorKind, chain, root};
use crate::ids::{ChunkId, DeviceId, SessionId, StreamId};
use crate::ladder::Ladder;
use crate::ledger::{Holder, Terms};
use crate::memory::{Chunk, Device};
use crate::plan::Plan;
use crate::pool::Request;
use crate::runtime::{ChunkSource, Counter, Counters, Runtime, RuntimeConfig, RuntimeStats, SourceError, Want};
use crate::steward::{Answer, Ask, Steward};
use crate::store::Store;
use crate::units::{Bytes, DeviceAddress};

/// How the production pools are set up.
#[derive(Clone, Debug)]
pub struct ProductionOptions {
    /// Bytes of the device.
    pub capacity: Bytes,
    /// Sizes of chunk.
    pub ladder: Ladder,
    /// How the runtime behaves.
    pub runtime: RuntimeConfig,
    /// What calls cost.
    pub costs: CostTable,
    /// Plans are made while the job runs.
    pub auto: Option<AutoOptions>,
}

impl ProductionOptions {
    /// Bytes of a device where nobody has said how many: more than any job needs.
    pub const UNLIMITED: Bytes = Bytes::gib(4096);
}

/// The production pools of one device in one process.
#[derive(Debug)]
pub struct Production {
    runtime: Runtime,
    source: Arc<LedgerSource>,
    sim: Arc<SimDriver>,
    meter: Arc<Metered>,
    clock: Arc<ManualClock>,
    beside: Arc<Beside>,
    /// By slot of the script.
    held: Vec<(DeviceAddress, StreamId)>,
    requests: u64,
    iterations: u64,
    planning: Option<Planning>,
    /// The job says no more where it asks from once a plan is installed.
    contexts_end: bool,
    /// The first iteration that a plan served which was made while the job ran.
    planned_from: Option<u32>,
    /// Most bytes that the runtime has held from there on.
    held_by_plan: Bytes,
    /// Why a request was not served.
    refusal: Option<String>,
}

const DEVICE: DeviceId = DeviceId(0);

impl Production {
    /// A node of one device with one session; with `plan` its static pool is there before the first
    /// request, or where plans are made while the job runs, that is the one which an earlier run has
    /// kept. The text says why that plan is not used, if it is not.
    pub fn new(options: &ProductionOptions, plan: Option<&Plan>) -> (Production, Option<String>) {
        let clock = Arc::new(ManualClock::default());
        let sim = SimOptions { costs: options.costs.clone(), ..SimOptions::with_devices(&[options.capacity]) };
        let sim = Arc::new(SimDriver::new(sim));
        let meter = Meter::around(Arc::clone(&sim) as Arc<dyn Driver>, Arc::clone(&clock) as Arc<dyn Clock>);
        let beside = Beside::new();
        let driver = Layered::new(Arc::clone(&meter) as Arc<dyn Driver>, Arc::clone(&beside));
        let device = Device::open(Arc::new(driver) as Arc<dyn Driver>, DEVICE);
        let device = device.expect("a simulated device without faults opens");
        let store = Store::new(vec![Arc::clone(&device)]);
        let steward = Steward::inline(store, Arc::clone(&clock) as Arc<dyn Clock>);
        let steward = steward.expect("a simulated device without faults says what it has");
        let session = steward.open(Terms::new(Bytes::MAX, 0)).expect("the first session of a ledger is opened");
        let source = Arc::new(LedgerSource {
            steward,
            session,
            ladder: options.ladder.clone(),
            costs: options.costs.clone(),
            sim: Arc::clone(&sim),
            beside: Arc::clone(&beside),
            rpcs: AtomicU64::new(0),
            imports: AtomicU64::new(0),
            passing: Mutex::default(),
            reserved: Mutex::default(),
        });
        let config = options.runtime.on(&options.ladder);
        let runtime = Runtime::new(
            device,
            Arc::clone(&source) as Arc<dyn ChunkSource>,
            Arc::clone(&clock) as Arc<dyn Clock>,
            config,
            Counters::private(),
        );
        let installed = plan.filter(|_| options.auto.is_none()).map(|plan| runtime.install_plan(plan));
        let refused = installed.and_then(Result::err).map(|error| chain(&error));
        let planning = options.auto.map(|auto| Planning::begin(&runtime, auto.step, plan.cloned()));
        let production = Production {
            runtime,
            source,
            sim,
            meter,
            clock,
            beside,
            held: Vec::new(),
            requests: 0,
            iterations: 0,
            planning,
            contexts_end: options.auto.is_some_and(|auto| auto.contexts_end),
            planned_from: None,
            held_by_plan: Bytes::ZERO,
            refusal: None,
        };
        (production, refused)
    }

    /// What the runtime holds and has done.
    pub fn stats(&self) -> RuntimeStats {
        self.runtime.stats()
    }

    /// The runtime, to be asked what no replay does.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Does what a thread beside the job would do: looks after its plans.
    fn look(&mut self) {
        if let Some(planning) = &mut self.planning {
            planning.look(&self.runtime, &self.beside);
        }
    }

    /// Why no more plans are made while the job runs, if none are.
    pub fn auto_is_over(&self) -> Option<String> {
        self.planning.as_ref().and_then(Planning::over)
    }

    /// The plan that the job has left for its next run.
    pub fn kept_plan(self) -> Option<Plan> {
        self.planning.and_then(Planning::kept)
    }

    /// Says what is wrong with pools or ledger; nothing, unless one has a bug.
    pub fn invariants(&self) -> Result<(), String> {
        self.runtime.invariants()
    }
}

impl Allocator for Production {
    #[inline]
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        // Time passes while a job works: what the daemon refused a while ago may be asked for again.
        const PER_64_REQUESTS: Duration = Duration::from_millis(1);
        self.requests += 1;
        if self.requests.is_multiple_of(64) {
            self.clock.advance(PER_64_REQUESTS);
            self.look();
        }
        let Asked { bytes, stream, thread, context, is_dynamic, .. } = *asked;
        let request = match self.contexts_end && self.planned_from.is_some() {
            true => Request { stream, thread, ..Request::of(bytes) },
            false => Request { bytes, stream, thread, context, is_dynamic },
        };
        let address = self.runtime.alloc(&request).map_err(|error| {
            self.refusal = Some(root(&error).to_string());
            OutOfMemory
        })?;
        if self.planned_from.is_some() {
            self.held_by_plan = self.held_by_plan.max(Bytes::new(self.runtime.counters().get(Counter::HeldBytes)));
        }
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, (DeviceAddress::new(0), StreamId::DEFAULT));
        }
        self.held[slot] = (address, stream);
        Ok(address)
    }

    fn free(&mut self, _slot: u32) {
        // With the rest, once the bytes can be used again: the simulated streams have always passed.
    }

    #[inline]
    fn completed(&mut self, slot: u32) {
        let (address, stream) = self.held[slot as usize];
        self.runtime.free(address, stream).expect("a script completes what is live, once");
    }

    fn record_stream(&mut self, slot: u32, stream: StreamId) {
        self.runtime.record_stream(self.held[slot as usize].0, stream);
    }

    fn begin_iteration(&mut self, iteration: u32) {
        // The first begins where the job does, and ends nothing.
        if self.iterations > 0 {
            self.runtime.mark_iteration();
            self.planning.iter_mut().for_each(|planning| planning.mark(&self.runtime));
            self.look();
        }
        if self.runtime.counters().get(Counter::PlansInstalled) > 0 {
            self.planned_from.get_or_insert(iteration);
        }
        self.iterations += 1;
    }

    fn reserved(&self) -> Reserved {
        *self.source.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn calls(&self) -> CallSum {
        let counts = self.meter.layer().counts();
        let mut sum = CallSum::default();
        for call in SHOWN {
            sum.add(call, counts.of(call).calls);
        }
        sum.add(Call::Export, counts.of(Call::Create).calls);
        sum.add(Call::Import, self.source.imports.load(Ordering::Relaxed));
        let passing = self.source.passing.lock().unwrap_or_else(PoisonError::into_inner).seconds;
        sum.seconds = self.sim.modelled_seconds() + passing;
        sum
    }

    fn beside(&self) -> Duration {
        self.beside.time()
    }

    fn refusal(&self) -> Option<String> {
        self.refusal.clone()
    }

    fn more(&self) -> More {
        let stats = self.runtime.stats();
        More {
            lease_rpcs: self.source.rpcs.load(Ordering::Relaxed),
            served: ServedBytes {
                planned: stats.served.planned_bytes,
                reuse: stats.served.reuse_bytes,
                pool: stats.served.pool_bytes,
            },
            deviations: stats.planned.deviations(),
            auto: self.planning.as_ref().map(|planning| AutoPlans {
                made: planning.made(),
                planning: planning.spent(),
                installed: self.runtime.counters().get(Counter::PlansInstalled),
                refused: self.runtime.counters().get(Counter::PlansRefused),
                from_iteration: self.planned_from,
                peak_held: self.held_by_plan,
            }),
            overlapped: Bytes::ZERO,
        }
    }
}

/// The node's ledger as a source of chunks for the one session that it has.
#[derive(Debug)]
struct LedgerSource {
    steward: Arc<Steward>,
    session: SessionId,
    ladder: Ladder,
    costs: CostTable,
    sim: Arc<SimDriver>,
    beside: Arc<Beside>,
    /// Requests that would have gone to the daemon.
    rpcs: AtomicU64,
    imports: AtomicU64,
    passing: Mutex<Passing>,
    /// Bytes of chunks that exist, leased or idle.
    reserved: Mutex<Reserved>,
}

/// What passing chunks from the daemon to the session would have cost.
#[derive(Debug, Default)]
struct Passing {
    /// Chunks that have been exported and cleared: a daemon keeps the descriptor of a chunk.
    exported: HashSet<ChunkId>,
    seconds: f64,
}

impl LedgerSource {
    fn note_reserved(&self) {
        let now = self.sim.charged(DEVICE);
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.now = now;
        reserved.peak = reserved.peak.max(now);
    }

    fn lease(&self, want: Want) -> Result<Vec<(ChunkId, Bytes)>, SourceError> {
        let invalid = |message| SourceError { kind: ErrorKind::Invalid, message };
        let too_large = || invalid(format!("{} are more than one lease can be", want.len));
        let stock = || self.steward.stock(self.session, DEVICE);
        let parts = self.ladder.cover_with(want.len, want.shape, stock).ok_or_else(too_large)?;
        self.rpcs.fetch_add(1, Ordering::Relaxed);
        let holder = Holder::Session(self.session);
        let ask = Ask { holder, device: DEVICE, parts, plan: want.plan, wait_ms: 0, waited_ms: 0 };
        let answer = self.steward.acquire_now(ask).map_err(|error| invalid(chain(&error)))?;
        match answer {
            Answer::Granted(chunks) => Ok(chunks),
            Answer::Refused(refusal) => Err(SourceError { kind: refusal.kind(), message: refusal.to_string() }),
        }
    }

    fn acquire_timed(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let granted = self.lease(want)?;
        self.imports.fetch_add(granted.len() as u64, Ordering::Relaxed);
        let mut passing = self.passing.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, len) in &granted {
            passing.seconds += self.costs.seconds(Call::Import, *len);
            if passing.exported.insert(*id) {
                passing.seconds += self.costs.seconds(Call::Export, *len) + self.costs.clear_seconds(*len);
            }
        }
        drop(passing);
        self.note_reserved();
        let chunk = |id: &ChunkId| self.steward.store().chunk(*id).expect("it was just granted");
        Ok(granted.iter().map(|(id, _)| chunk(id)).collect())
    }

    fn release_timed(&self, ids: Vec<ChunkId>) {
        self.rpcs.fetch_add(1, Ordering::Relaxed);
        self.steward.release(self.session, ids).expect("a runtime releases what it was granted");
        self.note_reserved();
    }
}

impl ChunkSource for LedgerSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        self.beside.run(|| self.acquire_timed(want))
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let ids = chunks.iter().map(|chunk| chunk.id()).collect();
        drop(chunks);
        self.beside.run(|| self.release_timed(ids));
    }
}
