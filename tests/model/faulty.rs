//! A runtime as a whole, from its first growth to its end, over a driver of which call 1, 2, 3 … fails: each step is whole or leaves no trace, works when it is
//! tried again, and at the end nothing is left but what is counted as lost: no bytes, no chunk, no descriptor, no mapping. What the kernel says of
//! this process is looked at, beside what the driver's books say.
//!
//! Once over a store of its own and once over the daemon's steward; on the host driver, and on pretended machines with GPUs.

use std::sync::Arc;
use std::time::Duration;

use stitchd::clock::ManualClock;
use stitchd::driver::Driver;
use stitchd::driver::gpu::{GpuDriver, GpuKind};
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::error::ErrorKind;
use stitchd::ids::{ChunkId, DeviceId, SessionId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::ledger::{EndReason, Holder, Terms};
use stitchd::memory::{Chunk, Device, Quarantine};
use stitchd::plan::{Entry, Lane, Plan};
use stitchd::pool::Request;
use stitchd::pool::pages::PagePolicy;
use stitchd::runtime::{ChunkSource, Counters, Runtime, RuntimeConfig, SourceError, Want};
use stitchd::session::PrivateSource;
use stitchd::steward::{Answer, Ask, Steward};
use stitchd::store::Store;
use stitchd::trace::ContextKey;
use stitchd::units::{Bytes, DeviceAddress, Lifetime, PlanOffset, Span};

use crate::standin::Machine;
use crate::{At, alone};

const DEVICE: DeviceId = DeviceId(0);
/// What the scenario needs, and a little for what a failure may cost.
const TOTAL: Bytes = Bytes::mib(32);
const STREAM: StreamId = StreamId(0);
const OTHER: StreamId = StreamId(2);

/// The steward as a source, as the daemon is for another process; but that chunks are not imported here.
#[derive(Debug)]
struct StewardSource {
    steward: Arc<Steward>,
    session: SessionId,
}

impl ChunkSource for StewardSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let parts = Ladder::standard().cover(want.len, want.shape).unwrap();
        let holder = Holder::Session(self.session);
        let ask = Ask { holder, device: DEVICE, parts, plan: want.plan, wait_ms: 0, waited_ms: 0 };
        match self.steward.acquire_now(ask) {
            Ok(Answer::Granted(chunks)) => {
                Ok(chunks.iter().map(|(id, _)| self.steward.store().chunk(*id).unwrap()).collect())
            }
            Ok(Answer::Refused(refusal)) => Err(SourceError { kind: refusal.kind(), message: refusal.to_string() }),
            Err(error) => Err(SourceError { kind: error.kind(), message: error.to_string() }),
        }
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id()).collect();
        drop(chunks);
        self.steward.release(self.session, ids).unwrap();
    }
}

/// Who owns the chunks.
#[derive(Clone)]
enum Owner {
    /// One source for all runtimes: it gives chunks their names.
    Store(Arc<Store>, Arc<PrivateSource>),
    Steward(Arc<Steward>),
}

/// What is there, by the driver's books and by the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Seen {
    chunks: usize,
    mappings: usize,
    reservations: usize,
    used: Bytes,
    /// Descriptors of chunks that this process has open.
    descriptors: usize,
    /// Lines of /proc/self/maps that show a chunk.
    shown: usize,
}

/// What is under the faults.
enum Under {
    Host(Arc<HostDriver>),
    Gpu(Arc<GpuDriver>, Machine),
}

impl Under {
    fn new(vendor: Option<GpuKind>) -> Under {
        let Some(kind) = vendor else {
            return Under::Host(Arc::new(HostDriver::new(HostOptions::with_devices(&[TOTAL]))));
        };
        let machine = Machine::new(kind, &format!("devices = {}", TOTAL.get()));
        Under::Gpu(Arc::new(GpuDriver::open_library(kind, machine.library()).unwrap()), machine)
    }

    fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Under::Host(host) => host.clone(),
            Under::Gpu(gpu, _) => gpu.clone(),
        }
    }

    /// Chunks, mappings and reservations by the driver's books.
    fn counts(&self) -> (usize, usize, usize) {
        match self {
            Under::Host(host) => host.counts(),
            Under::Gpu(gpu, _) => gpu.counts(),
        }
    }

    /// Descriptors and mappings of chunks that the kernel knows of in this process. A GPU's mappings are none of the kernel's.
    fn of_the_kernel(&self) -> (usize, usize) {
        let name = match self {
            Under::Host(_) => "/memfd:stitchd-chunk".to_owned(),
            Under::Gpu(_, machine) => format!("{}/chunk-", machine.library().parent().unwrap().display()),
        };
        let links = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let descriptors = links.filter(|link| link.to_string_lossy().contains(&name)).count();
        if matches!(self, Under::Gpu(..)) {
            // Nor is it looked for: every machine before this one has left a library in that list.
            return (descriptors, 0);
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        (descriptors, maps.lines().filter(|line| line.contains(&name)).count())
    }
}

struct Bench {
    under: Under,
    faulty: Arc<Faulty>,
    device: Arc<Device>,
    clock: Arc<ManualClock>,
    owner: Owner,
    /// Descriptors and mappings of chunks before this began: what an earlier round has lost stays.
    before: (usize, usize),
}

impl Bench {
    fn new(vendor: Option<GpuKind>, has_steward: bool) -> Bench {
        let under = Under::new(vendor);
        let faulty = Faults::around(under.driver());
        let device = Device::open(faulty.clone(), DEVICE).unwrap();
        let clock = Arc::new(ManualClock::default());
        let store = Store::new(vec![Arc::clone(&device)]);
        let owner = if has_steward {
            // With a descriptor for each chunk from its beginning, as the daemon has it.
            Owner::Steward(Steward::new(store, clock.clone(), Box::new(|work| work())).unwrap())
        } else {
            let store = Arc::new(store);
            let source = PrivateSource::new(Arc::clone(&store), DEVICE, Ladder::standard());
            Owner::Store(store, Arc::new(source))
        };
        let before = under.of_the_kernel();
        Bench { under, faulty, device, clock, owner, before }
    }

    fn seen(&self) -> Seen {
        let used = TOTAL - self.under.driver().memory(DEVICE).unwrap().free;
        let (chunks, mappings, reservations) = self.under.counts();
        let (descriptors, shown) = self.under.of_the_kernel();
        let (descriptors, shown) = (descriptors - self.before.0, shown - self.before.1);
        Seen { chunks, mappings, reservations, used, descriptors, shown }
    }

    /// Bytes that are a runtime's, as the owner of the chunks knows it.
    fn leased(&self) -> Bytes {
        match &self.owner {
            Owner::Store(..) => self.seen().used,
            Owner::Steward(steward) => steward.devices()[0].bytes.leased,
        }
    }

    /// Chunks of whoever owns them, and how many of them were exported.
    fn stored(&self) -> (usize, usize) {
        let (stored, exported) = self.store().counts();
        (stored as usize, exported as usize)
    }

    fn store(&self) -> &Store {
        match &self.owner {
            Owner::Store(store, _) => store,
            Owner::Steward(steward) => steward.store(),
        }
    }

    /// Chunks that the driver did not take back, and will be asked for again.
    fn kept(&self) -> usize {
        self.store().kept() as usize
    }

    /// Asks the driver again.
    fn retry(&self) {
        match &self.owner {
            Owner::Store(store, _) => drop(store.destroy_kept(DEVICE)),
            Owner::Steward(steward) => {
                self.clock.advance(Duration::from_secs(2));
                steward.tick();
            }
        }
        assert_eq!(self.kept(), 0);
    }

    /// The books and the kernel agree, and the owner of the chunks has those that there are. The kernel's list grows with all that was ever lost: it is looked at after each failure, and at the end.
    fn check(&self) {
        let seen = self.seen();
        let descriptors = seen.chunks + self.stored().1;
        let shown = if matches!(self.under, Under::Host(_)) { seen.mappings } else { 0 };
        assert_eq!((seen.descriptors, seen.shown), (descriptors, shown), "{seen:?}");
        assert!(seen.used <= TOTAL, "{seen:?}");
        self.check_books();
    }

    /// The owner of the chunks has those that there are.
    fn check_books(&self) {
        let ((stored, _), (chunks, ..)) = (self.stored(), self.under.counts());
        let (stored, lost) = (stored + self.kept(), self.device.quarantine());
        assert!(stored == chunks || stored < chunks && lost != Quarantine::default(), "{stored} of {chunks}, {lost:?}");
    }

    fn runtime(&self) -> (Runtime, Option<SessionId>) {
        let (source, session): (Arc<dyn ChunkSource>, _) = match &self.owner {
            Owner::Store(_, source) => (source.clone(), None),
            Owner::Steward(steward) => {
                let session = steward.open(Terms::new(TOTAL, 0)).unwrap();
                (Arc::new(StewardSource { steward: Arc::clone(steward), session }), Some(session))
            }
        };
        let config = RuntimeConfig {
            pages: PagePolicy { piece_min: Bytes::mib(1), ..PagePolicy::default() },
            ..RuntimeConfig::default()
        };
        let (device, clock) = (Arc::clone(&self.device), self.clock.clone());
        (Runtime::new(device, source, clock, config, Counters::private()), session)
    }

    /// A step that happens whole or leaves no trace; then it works the second time. Says whether it had to be tried again.
    fn twice<T, E: std::fmt::Debug>(&self, runtime: &Runtime, mut step: impl FnMut() -> Result<T, E>) -> T {
        let before = runtime.stats();
        let injected = self.faulty.layer().injected();
        let done = step().unwrap_or_else(|error| {
            assert!(self.faulty.layer().injected() > injected, "nothing has failed, and yet {error:?}");
            let after = runtime.stats();
            assert_eq!((after.live, after.live_allocations), (before.live, before.live_allocations), "{error:?}");
            runtime.invariants().unwrap();
            self.check();
            // A source that has just failed is left alone for a while.
            self.clock.advance(Duration::from_secs(1));
            step().unwrap_or_else(|again| panic!("fails again: {again:?}, after {error:?}"))
        });
        runtime.invariants().unwrap();
        self.check_books();
        done
    }
}

fn plan() -> Plan {
    let entry = Entry {
        bytes: Bytes::kib(3_000),
        offset: PlanOffset::new(0),
        lane: Lane::on(STREAM),
        context: ContextKey::UNKNOWN,
        lifetime: Lifetime::new(0, 1),
        again: None,
    };
    Plan { pool_len: Bytes::kib(3_000), entries: vec![entry], ..Plan::default() }
}

/// The page pool serves what the plan does not have, from chunks that lie idle from before as far as they go.
fn beside_a_plan(bench: &Bench, runtime: &Runtime, is_whole: &dyn Fn() -> bool) {
    let alloc = |bytes: Bytes| bench.twice(runtime, || runtime.alloc(&Request::of(bytes)));
    let free = |address: DeviceAddress| bench.twice(runtime, || runtime.free(address, STREAM));
    bench.twice(runtime, || runtime.install_plan(&plan()));
    let planned = alloc(Bytes::kib(3_000));
    let before = runtime.stats();
    let packed = [Bytes::mib(5), Bytes::new(700), Bytes::mib(1)].map(alloc);
    free(packed[0]);
    let again = alloc(Bytes::mib(5));
    bench.under.driver().fill(DEVICE, STREAM, Span::new(again, Bytes::mib(5)).unwrap(), 0x5b).unwrap();
    let after = runtime.stats();
    if is_whole() {
        assert_eq!(after.served.pool - before.served.pool, 4, "{after:?}");
        assert!(after.page_use.held > Bytes::mib(6), "{after:?}");
    }
    for address in [planned, packed[1], packed[2], again] {
        free(address);
    }
}

/// Everything that a runtime does to a device, once. Where nothing has failed yet it is looked at that it was done.
fn scenario(bench: &Bench) {
    let failed_before = bench.faulty.layer().injected();
    let is_whole =
        || bench.faulty.layer().injected() == failed_before && bench.device.quarantine() == Quarantine::default();
    let (runtime, session) = bench.runtime();
    let alloc = |bytes: Bytes| bench.twice(&runtime, || runtime.alloc(&Request::of(bytes)));
    let free = |address: DeviceAddress| bench.twice(&runtime, || runtime.free(address, STREAM));

    // A block that grows, goes, and is split.
    free(alloc(Bytes::mib(4)));
    let halves = [alloc(Bytes::mib(2)), alloc(Bytes::mib(2))];
    // Every other one of a row goes, and what is left of it serves as one.
    let row: Vec<_> = (0..6).map(|_| alloc(Bytes::mib(2))).collect();
    let small = alloc(Bytes::new(1_000));
    row.iter().step_by(2).for_each(|address| free(*address));
    let stitched = alloc(Bytes::mib(6));
    bench.under.driver().fill(DEVICE, STREAM, Span::new(stitched, Bytes::mib(6)).unwrap(), 0x5a).unwrap();
    if is_whole() {
        let stats = runtime.stats();
        assert_eq!(stats.served.pool, 11, "{stats:?}");
        assert!(stats.pages.new_places > 0, "{:?}", stats.pages);
        assert!(stats.held <= Bytes::mib(2 + 4 + 12), "{stats:?}");
    }
    // More than there is: an answer, whatever fails on the way to it.
    let before = runtime.stats().live;
    let refused = runtime.alloc(&Request::of(Bytes::mib(64))).unwrap_err();
    assert!(!is_whole() || refused.kind() == ErrorKind::Exhausted, "{refused:?}");
    assert_eq!(runtime.stats().live, before);
    bench.check();
    bench.clock.advance(Duration::from_secs(1));

    free(stitched);
    free(halves[0]);
    // Freed while another stream uses it; and what one stream used last, for another.
    let shared = alloc(Bytes::mib(4));
    runtime.record_stream(shared, OTHER);
    free(shared);
    bench.twice(&runtime, || runtime.synchronize());
    let request = Request { stream: OTHER, ..Request::of(Bytes::mib(2)) };
    let passed = bench.twice(&runtime, || runtime.alloc(&request));
    bench.twice(&runtime, || runtime.free(passed, OTHER));
    let before = (bench.leased(), (bench.device.quarantine(), bench.kept()));
    let given = runtime.trim(Bytes::mib(4));
    bench.check();
    if (bench.device.quarantine(), bench.kept()) == before.1 {
        assert_eq!(before.0 - bench.leased(), given);
    }
    // What was trimmed comes back when it is wanted.
    free(alloc(Bytes::mib(8)));
    beside_a_plan(bench, &runtime, &is_whole);
    for address in [small, halves[1], row[1], row[3], row[5]] {
        free(address);
    }
    assert_eq!((runtime.stats().live, runtime.stats().live_allocations), (Bytes::ZERO, 0));
    runtime.trim(Bytes::MAX);
    drop(runtime);
    if let (Owner::Steward(steward), Some(session)) = (&bench.owner, session) {
        steward.end(session, EndReason::Closed).unwrap();
    }
    bench.check();
}

#[test]
fn whatever_call_of_a_runtime_fails_the_next_try_works_and_nothing_is_left_that_is_not_counted() {
    every_call_fails_once(None);
}

#[test]
fn whatever_call_fails_on_a_gpu_the_next_try_works_and_nothing_is_left_that_is_not_counted() {
    every_call_fails_once(Some(GpuKind::Cuda));
    every_call_fails_once(Some(GpuKind::Hip));
}

fn every_call_fails_once(vendor: Option<GpuKind>) {
    let _alone = alone();
    for has_steward in [false, true] {
        let mut lossy = 0;
        for n in 1.. {
            let at = At::new(if has_steward { "runtime over a steward" } else { "runtime over a store" }, n);
            let bench = Bench::new(vendor, has_steward);
            bench.check();
            bench.faulty.layer().fail_nth(n);
            scenario(&bench);
            let has_failed = bench.faulty.layer().injected() > 0;
            bench.faulty.layer().fail_nth(0);
            bench.retry();
            let (left, lost) = (bench.seen(), bench.device.quarantine());
            if lost == Quarantine::default() {
                assert_eq!(left, Seen::default());
            } else {
                lossy += 1;
                assert!(has_failed && left.used <= lost.bytes, "{left:?}, {lost:?}");
            }
            // The next job on the same device finds all that it needs, and leaves no more behind.
            scenario(&bench);
            assert_eq!((bench.seen(), bench.device.quarantine()), (left, lost));
            if !has_failed {
                assert!(n > 60, "a scenario of only {n} calls");
                break;
            }
            drop(at);
        }
        // Unmaps, and ranges and chunks that could not be given back.
        assert!(lossy > 5, "{lossy}");
    }
}
