//! The pools together, over a source that this test controls.

mod growth;
mod plans;
mod streams;

use std::sync::Mutex;
use std::time::Duration;

use super::*;
use crate::clock::ManualClock;
use crate::driver::host::{HostDriver, HostOptions};
use crate::driver::layers::faulty::Faults;
use crate::driver::{Call, Driver};
use crate::error::ErrorKind;
use crate::ids::{ChunkId, DeviceId};
use crate::ladder::Ladder;
use crate::memory::Chunk;
use crate::plan::{Entry, Lane, Plan};
use crate::pool::pages::PagePolicy;
use crate::record::{self, Collected};
use crate::trace::ContextKey;
use crate::trace::binary::Remarks;
use crate::units::{Lifetime, Place, PlanOffset, Span};

const STREAM: StreamId = StreamId(0);

/// Creates chunks itself, up to a limit.
#[derive(Debug)]
struct TestSource {
    device: Arc<Device>,
    state: Mutex<SourceState>,
}

#[derive(Debug, Default)]
struct SourceState {
    left: Bytes,
    next: u64,
    acquires: u64,
    released: Bytes,
    /// How long it takes to answer.
    takes: Duration,
}

impl ChunkSource for TestSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let takes = self.state.lock().unwrap().takes;
        std::thread::sleep(takes);
        let mut state = self.state.lock().unwrap();
        state.acquires += 1;
        let ladder = Ladder::new([2, 8, 32, 256].map(Bytes::mib).to_vec()).unwrap();
        let parts = ladder.cover(want.len, want.shape).unwrap();
        let sum: Bytes = parts.iter().map(|part| part.bytes().unwrap()).sum();
        let refused = || SourceError { kind: ErrorKind::Exhausted, message: format!("only {} left", state.left) };
        let left = state.left.checked_sub(sum).ok_or_else(refused)?;
        state.left = left;
        let mut chunks = Vec::new();
        for part in parts {
            for _ in 0..part.count {
                state.next += 1;
                chunks.push(Arc::new(Chunk::create(&self.device, ChunkId(state.next), part.len).unwrap()));
            }
        }
        Ok(chunks)
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let mut state = self.state.lock().unwrap();
        for chunk in chunks {
            state.left += chunk.len();
            state.released += chunk.len();
            assert_eq!(Arc::strong_count(&chunk), 1, "a chunk is released while something maps it");
        }
    }
}

struct Bench {
    host: Arc<HostDriver>,
    source: Arc<TestSource>,
    clock: Arc<ManualClock>,
    runtime: Runtime,
}

impl Bench {
    fn new(mib: u64, config: RuntimeConfig) -> Bench {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::gib(4)])));
        Bench { host: Arc::clone(&host), ..Bench::over(host, mib, config) }
    }

    /// Over another driver.
    fn over(driver: Arc<dyn Driver>, mib: u64, config: RuntimeConfig) -> Bench {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[])));
        let device = Device::open(driver, DeviceId(0)).unwrap();
        let state = Mutex::new(SourceState { left: Bytes::mib(mib), ..SourceState::default() });
        let source = Arc::new(TestSource { device: Arc::clone(&device), state });
        let clock = Arc::new(ManualClock::default());
        let (as_source, as_clock) = (Arc::clone(&source) as Arc<dyn ChunkSource>, Arc::clone(&clock) as Arc<dyn Clock>);
        let runtime = Runtime::new(device, as_source, as_clock, config, Counters::private());
        Bench { host, source, clock, runtime }
    }

    fn alloc(&self, bytes: Bytes) -> Result<DeviceAddress, AllocError> {
        self.alloc_on(bytes, STREAM)
    }

    fn alloc_on(&self, bytes: Bytes, stream: StreamId) -> Result<DeviceAddress, AllocError> {
        let served = self.runtime.alloc(&Request { stream, ..Request::of(bytes) });
        self.runtime.invariants().unwrap();
        served
    }

    fn free(&self, address: DeviceAddress) {
        self.runtime.free(address, STREAM).unwrap();
        self.runtime.invariants().unwrap();
    }

    fn acquires(&self) -> u64 {
        self.source.state.lock().unwrap().acquires
    }
}

fn entry(bytes: Bytes, offset: u64, from: u64, until: u64) -> Entry {
    Entry {
        bytes,
        offset: PlanOffset::new(offset),
        lane: Lane::on(STREAM),
        context: ContextKey::UNKNOWN,
        lifetime: Lifetime::new(from, until),
        again: None,
    }
}

fn plan() -> Plan {
    let entries = vec![entry(Bytes::mib(3), 0, 0, 1), entry(Bytes::kib(1), 3 << 20, 0, 1)];
    Plan { pool_len: Bytes::kib(3073), entries, ..Plan::default() }
}

#[test]
fn requests_lie_side_by_side_whatever_their_size() {
    let bench = Bench::new(64, RuntimeConfig::default());
    // Whole chunks would take 4 MiB each.
    let kib = Bytes::kib(2304);
    let mut held: Vec<DeviceAddress> = (0..16).map(|_| bench.alloc(kib).unwrap()).collect();
    let stats = bench.runtime.stats();
    assert_eq!((stats.live, stats.held), (Bytes::mib(36), Bytes::mib(36)));
    // Chunks matter at the end alone.
    for (bytes, len) in [(Bytes::mib(4), 4), (Bytes::mib(9), 10), (Bytes::kib(4000), 4)] {
        let before = bench.runtime.stats().held;
        let address = bench.alloc(bytes).unwrap();
        assert_eq!(bench.runtime.stats().held - before, Bytes::mib(len), "{bytes}");
        held.push(address);
    }
    held.into_iter().for_each(|address| bench.free(address));
}

#[test]
fn free_memory_serves_requests_of_any_size() {
    let bench = Bench::new(40, RuntimeConfig::default());
    for _ in 0..3 {
        let blocks: Vec<DeviceAddress> = (0..16).map(|_| bench.alloc(Bytes::kib(2304)).unwrap()).collect();
        blocks.into_iter().for_each(|address| bench.free(address));
        let block = bench.alloc(Bytes::mib(40)).unwrap();
        assert_eq!(bench.runtime.stats().held, Bytes::mib(40));
        bench.free(block);
    }
    let kept = bench.alloc(Bytes::kib(2304)).unwrap();
    let error = bench.alloc(Bytes::mib(40)).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory { .. }), "{error}");
    let more: Vec<DeviceAddress> = (0..16).map(|_| bench.alloc(Bytes::kib(2304)).unwrap()).collect();
    assert!(matches!(bench.alloc(Bytes::kib(2304)), Err(AllocError::OutOfMemory { .. })));
    more.into_iter().chain([kept]).for_each(|address| bench.free(address));
    assert_eq!(bench.runtime.stats().live, Bytes::ZERO);
}

#[test]
fn borders_are_where_chunks_meet() {
    let pages = PagePolicy { granule: Bytes::mib(8), ..PagePolicy::default() }.with_uniform_chunks();
    let bench = Bench::new(256, RuntimeConfig { pages, ..RuntimeConfig::default() });
    // A range is aligned to the device's granularity: most do not begin at a multiple of 8 MiB.
    let mut at = 0;
    for mib in [20, 9, 33, 8] {
        let address = bench.runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap();
        let offsets: Vec<u64> =
            bench.runtime.borders(address).iter().map(|border| (border.get() - address.get()) >> 20).collect();
        let expected: Vec<u64> = (at + 1..at + mib).filter(|mib| mib % 8 == 0).map(|mib| mib - at).collect();
        assert_eq!(offsets, expected, "{mib} MiB");
        at += mib;
    }
    let small = bench.runtime.alloc(&Request::of(Bytes::kib(600))).unwrap();
    assert_eq!(bench.runtime.borders(small), []);
}

#[test]
fn what_private_pools_serve_is_left_out_of_a_recording_which_says_so() {
    let bench = Bench::new(64, RuntimeConfig::default());
    let (tap, mut recorder) = record::begin(0, Collected::up_to(100), 128);
    let tap = bench.runtime.record_into(tap);
    let id = PrivatePoolId(1, 7);
    bench.runtime.begin_private(id);
    let request = Request { stream: STREAM, ..Request::of(Bytes::mib(3)) };
    let private = [0, 1].map(|_| bench.runtime.alloc_private(id, &request).unwrap());
    bench.runtime.end_private(id);
    let beside = bench.runtime.alloc(&request).unwrap();
    for address in [private[0], beside, private[1]] {
        bench.runtime.free(address, STREAM).unwrap();
    }
    bench.runtime.stop_recording(tap);
    while recorder.drain(100).goes_on {}
    assert_eq!(recorder.remarks(), Remarks { private: 2, ..Remarks::default() });
    assert_eq!(recorder.finish().0.into_trace().events.len(), 2);
}

/// Found by `tests/model`: the error named the slab that could not be had.
#[test]
fn a_small_request_that_fails_names_the_bytes_that_were_asked_for() {
    let bench = Bench::new(0, RuntimeConfig::default());
    let error = bench.alloc(Bytes::kib(3)).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory { requested, .. } if requested == Bytes::kib(3)), "{error:?}");
}

/// Found by `tests/model`: a place could not be unmapped, and its chunks went back, to be leased to another
/// process while they were still visible here.
#[test]
fn a_chunk_that_may_still_be_visible_here_is_never_given_back() {
    let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::gib(4)])));
    let faulty = Faults::around(host);
    let bench = Bench::over(faulty.clone(), 16, RuntimeConfig::default());
    let blocks: Vec<_> = (0..8).map(|_| bench.alloc(Bytes::mib(2)).unwrap()).collect();
    for at in [0, 2, 4, 6] {
        bench.free(blocks[at]);
    }
    let stitched = bench.alloc(Bytes::mib(8)).unwrap();
    for block in [blocks[1], blocks[3], blocks[5], blocks[7], stitched] {
        bench.free(block);
    }
    faulty.layer().fail_always(&[Call::Unmap]);
    assert_eq!(bench.runtime.trim(Bytes::MAX), Bytes::ZERO);
    faulty.layer().fail_always(&[]);
    assert_eq!(bench.runtime.trim(Bytes::MAX), Bytes::mib(16), "all can be unmapped now");
    assert_eq!(bench.source.state.lock().unwrap().left, Bytes::mib(16));
}

#[test]
fn trimmed_memory_goes_back_and_what_is_live_stays() {
    let bench = Bench::new(64, RuntimeConfig::default());
    let kept = bench.alloc(Bytes::mib(4)).unwrap();
    bench.host.write(kept, &[42]).unwrap();
    let idle = bench.alloc(Bytes::mib(20)).unwrap();
    let small = bench.alloc(Bytes::kib(4)).unwrap();
    bench.free(idle);
    bench.free(small);
    assert_eq!(bench.runtime.trim(Bytes::MAX), Bytes::mib(22));
    let mut byte = [0];
    bench.host.read(kept, &mut byte).unwrap();
    assert_eq!((byte[0], bench.runtime.stats().held), (42, Bytes::mib(4)));
    bench.alloc(Bytes::mib(60)).unwrap();
}

#[test]
fn a_runtime_that_ends_gives_everything_back() {
    let bench = Bench::new(64, RuntimeConfig::default());
    bench.runtime.install_plan(&plan()).unwrap();
    for bytes in [Bytes::mib(3), Bytes::mib(9), Bytes::kib(1), Bytes::kib(3)] {
        bench.alloc(bytes).unwrap();
    }
    let Bench { host, source, runtime, .. } = bench;
    drop(runtime);
    assert_eq!(source.state.lock().unwrap().left, Bytes::mib(64));
    drop(source);
    assert_eq!(host.counts(), (0, 0, 0));
}

#[test]
fn figures_of_idle_bytes_follow_the_job() {
    let bench = Bench::new(64, RuntimeConfig::default());
    let counters = *bench.runtime.counters();
    let idle =
        || [Counter::HeldBytes, Counter::StitchableBytes, Counter::ContiguousBytes].map(|at| counters.get(at) >> 20);
    let alloc = |mib| bench.runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap();
    let first = alloc(16);
    assert_eq!(idle(), [16, 0, 0], "what was grown for a request is not idle");
    let second = alloc(8);
    bench.runtime.free(first, STREAM).unwrap();
    bench.runtime.mark_iteration();
    assert_eq!(idle(), [24, 16, 16], "at the end of an iteration");
    bench.runtime.free(second, STREAM).unwrap();
    // No pool grows any more, and no iteration is marked.
    for _ in 0..OPERATIONS_PER_LOOK / 2 {
        let small = alloc(4);
        bench.runtime.free(small, STREAM).unwrap();
    }
    assert!(idle()[1] >= 20, "{:?}", idle());
}

#[test]
fn threads_that_allocate_at_once_never_share_bytes() {
    let bench = Bench::new(128, RuntimeConfig::default());
    let (runtime, host) = (&bench.runtime, &bench.host);
    std::thread::scope(|scope| {
        for thread in 1..=4_u8 {
            scope.spawn(move || {
                let mut rng = crate::rng::Rng::new(u64::from(thread));
                let mut live: Vec<(DeviceAddress, Bytes)> = Vec::new();
                for _ in 0..2000 {
                    if live.len() < 5 && rng.chance(600) {
                        let shift = 9 + rng.below(14);
                        let bytes = Bytes::new(1 + rng.below(1 << shift));
                        let address = runtime.alloc(&Request::of(bytes)).unwrap();
                        for at in [Bytes::ZERO, bytes - Bytes::new(1)] {
                            host.write(address.checked_add(at).unwrap(), &[thread]).unwrap();
                        }
                        live.push((address, bytes));
                    } else if !live.is_empty() {
                        let (address, bytes) = live.swap_remove(rng.index(live.len()));
                        for at in [Bytes::ZERO, bytes - Bytes::new(1)] {
                            let mut byte = [0];
                            host.read(address.checked_add(at).unwrap(), &mut byte).unwrap();
                            assert_eq!(byte[0], thread, "another thread wrote here");
                        }
                        runtime.free(address, STREAM).unwrap();
                    }
                }
            });
        }
    });
    runtime.invariants().unwrap();
}

#[test]
fn what_is_brought_for_one_of_many_threads_is_enough_for_all() {
    const THREADS: u32 = 8;
    for has_plan in [false, true] {
        // One chunk, and those of the plan, all of which is in use.
        let bench = Bench::new(if has_plan { 6 } else { 2 }, RuntimeConfig::default());
        if has_plan {
            bench.runtime.install_plan(&plan()).unwrap();
            bench.alloc(Bytes::mib(3)).unwrap();
            bench.alloc(Bytes::kib(1)).unwrap();
        }
        let before = bench.acquires();
        bench.source.state.lock().unwrap().takes = Duration::from_millis(20);
        let together = std::sync::Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    together.wait();
                    bench.alloc(Bytes::kib(3)).unwrap();
                });
            }
        });
        assert_eq!(bench.acquires() - before, 1, "{has_plan}");
        bench.runtime.invariants().unwrap();
    }
}
