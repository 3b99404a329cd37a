//! A runtime as a whole over a source that sometimes refuses: live spans, physical bytes, streams, statistics, and what is given back, against
//! plain maps. And threads that allocate at once, over real bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stitchd::clock::ManualClock;
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Call, Handle};
use stitchd::error::ErrorKind;
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::memory::{Chunk, Device};
use stitchd::plan::Plan;
use stitchd::pool::pages::PagePolicy;
use stitchd::pool::planned::PlannedCounts;
use stitchd::pool::{Found, Request};
use stitchd::rng::Rng;
use stitchd::runtime::{
    AllocError, BlockState, ChunkSource, Counter, Counters, NotLive, Runtime, RuntimeConfig, RuntimeStats, Segment,
    SourceError, Want,
};
use stitchd::trace::Trace;
use stitchd::units::{Bytes, DeviceAddress};

use crate::alone;
use crate::job::{Act, Job};
use crate::reference::{Physical, Spans, Trail};
use crate::watch::{Piece, Watch, check_pattern, write_pattern};

const MIB: u64 = 1 << 20;
const UNIT: u64 = 512;
const GRANULE: u64 = 2 * MIB;
const CHUNK_MAX: u64 = 64 * MIB;
const STREAMS: u64 = 3;
const SEEDS: [u64; 4] = [31, 32, 33, 34];

/// Makes chunks up to a budget, and refuses or fails at times.
#[derive(Debug)]
struct Source {
    device: Arc<Device>,
    /// To know a chunk's handle, where anybody looks.
    watch: Option<Arc<Watch>>,
    state: Mutex<SourceState>,
}

#[derive(Debug)]
struct SourceState {
    left: u64,
    next: u64,
    out: BTreeMap<ChunkId, (u64, Option<Handle>)>,
    came_back: Vec<Handle>,
    /// What is wrong with what came back. Told by [`Bench::check`]: it may come while a test unwinds.
    wrong: Option<String>,
    rng: Rng,
    /// Of a thousand requests for memory so many meet a source that does not answer.
    unavailable_per_mille: u64,
    peak: u64,
}

impl Source {
    fn new(device: &Arc<Device>, watch: Option<&Arc<Watch>>, budget: u64, seed: u64) -> Arc<Source> {
        let state = SourceState {
            left: budget,
            next: 1,
            out: BTreeMap::new(),
            came_back: Vec::new(),
            wrong: None,
            rng: Rng::new(seed),
            unavailable_per_mille: 0,
            peak: 0,
        };
        Arc::new(Source { device: Arc::clone(device), watch: watch.cloned(), state: Mutex::new(state) })
    }

    fn check(&self) {
        let wrong = self.state.lock().unwrap().wrong.clone();
        assert_eq!(wrong, None);
    }

    fn out(&self) -> u64 {
        self.state.lock().unwrap().out.values().map(|(len, _)| len).sum()
    }
}

impl ChunkSource for Source {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let mut state = self.state.lock().unwrap();
        let refused = |kind, message: &str| Err(SourceError { kind, message: message.into() });
        let per_mille = state.unavailable_per_mille;
        if state.rng.chance(per_mille) {
            return refused(ErrorKind::Unavailable, "the line is dead");
        }
        let Some(parts) = Ladder::standard().cover(want.len, want.shape) else {
            return refused(ErrorKind::Invalid, "nobody has so much");
        };
        let len: u64 = parts.iter().map(|part| part.bytes().unwrap().get()).sum();
        if len > state.left {
            return refused(ErrorKind::Exhausted, "nothing is left");
        }
        let mut chunks = Vec::new();
        for part in parts.iter().flat_map(|part| std::iter::repeat_n(part, part.count as usize)) {
            let id = ChunkId(state.next);
            state.next += 1;
            // The chunks until here go with `chunks`; nobody has seen them.
            let Ok(chunk) = Chunk::create(&self.device, id, part.len) else {
                return refused(ErrorKind::Broken, "the driver fails");
            };
            chunks.push((Arc::new(chunk), self.watch.as_ref().map(|watch| watch.created())));
        }
        for (chunk, handle) in &chunks {
            state.left -= chunk.len().get();
            state.out.insert(chunk.id(), (chunk.len().get(), *handle));
        }
        let out = state.out.values().map(|(len, _)| len).sum();
        state.peak = state.peak.max(out);
        Ok(chunks.into_iter().map(|(chunk, _)| chunk).collect())
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let mut state = self.state.lock().unwrap();
        for chunk in chunks {
            let Some((len, handle)) = state.out.remove(&chunk.id()) else {
                state.wrong = Some(format!("{} comes back a second time", chunk.id()));
                continue;
            };
            state.left += len;
            if Arc::strong_count(&chunk) > 1 {
                state.wrong = Some(format!("{} comes back and is still used", chunk.id()));
            }
            if let (Some(watch), Some(handle)) = (&self.watch, handle) {
                if watch.mapped_times(handle) > 0 {
                    state.wrong = Some(format!("{} comes back and is still mapped", chunk.id()));
                }
                state.came_back.push(handle);
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    alias: bool,
    config: RuntimeConfig,
    has_plan: bool,
    /// Plans are offered while the job runs, of the job and of others.
    has_offers: bool,
    faults: bool,
    unavailable_per_mille: u64,
    /// Bytes that the source has.
    budget: u64,
}

const SETUP: Setup = Setup {
    alias: true,
    config: RuntimeConfig {
        pages: PagePolicy {
            granule: Bytes::new(GRANULE),
            chunk_per_mille: 17,
            request_chunks: 4,
            chunk_max: Bytes::new(CHUNK_MAX),
            chunk_least: Bytes::mib(32),
            slack_per_mille: 2,
            piece_min: Bytes::mib(1),
            stitch_min: Bytes::mib(2),
            stitches: true,
        },
        soft_budget: Bytes::ZERO,
        wait: Duration::ZERO,
        reuses: true,
    },
    has_plan: false,
    has_offers: false,
    faults: false,
    unavailable_per_mille: 0,
    budget: 256 * MIB,
};

#[derive(Clone, Debug)]
struct Live {
    bytes: u64,
    stream: StreamId,
    pieces: Vec<Piece>,
    /// Other streams that use it.
    recorded: Vec<StreamId>,
    /// The stream that had it last.
    last: StreamId,
    /// When it was freed, where it waits for the streams that use it.
    freed: Option<u64>,
}

struct Bench {
    setup: Setup,
    sim: Arc<SimDriver>,
    watch: Arc<Watch>,
    faulty: Arc<Faulty>,
    source: Arc<Source>,
    clock: Arc<ManualClock>,
    runtime: Runtime,
    live: Spans<Live>,
    physical: Physical,
    served: u64,
    served_bytes: u64,
    failures: u64,
    peak_live: u64,
    /// Something was asked for on another stream than the default one.
    has_streams: bool,
}

impl Bench {
    fn new(setup: Setup, seed: u64) -> Bench {
        let options = SimOptions { alias: setup.alias, ..SimOptions::with_devices(&[Bytes::gib(64)]) };
        let sim = Arc::new(SimDriver::new(options));
        let faulty = Faults::around(sim.clone());
        let watch = Watch::around(faulty.clone());
        let device = Device::open(watch.clone(), DeviceId(0)).unwrap();
        let source = Source::new(&device, Some(&watch), setup.budget, seed);
        source.state.lock().unwrap().unavailable_per_mille = setup.unavailable_per_mille;
        let clock = Arc::new(ManualClock::default());
        let runtime = Runtime::new(device, source.clone(), clock.clone(), setup.config, Counters::private());
        Bench {
            setup,
            sim,
            watch,
            faulty,
            source,
            clock,
            runtime,
            live: Spans::default(),
            physical: Physical::default(),
            served: 0,
            served_bytes: 0,
            failures: 0,
            peak_live: 0,
            has_streams: false,
        }
    }

    fn alloc(&mut self, request: &Request) -> Option<u64> {
        self.has_streams |= request.stream != StreamId::DEFAULT;
        let before = self.runtime.stats();
        let answer = self.runtime.alloc(request);
        let start = answer.as_ref().ok().map(|address| address.get());
        self.end_of_waiting(start);
        self.forget_returned();
        match answer {
            Ok(_) => self.note_served(start.unwrap(), request),
            Err(error) => {
                self.failures += 1;
                self.check_failed(request, &error, &before);
            }
        }
        start
    }

    fn note_served(&mut self, start: u64, request: &Request) {
        let bytes = request.bytes.get();
        let len = self.runtime.len_of(DeviceAddress::new(start)).expect("it is live").get();
        assert!(len >= bytes && len - bytes < GRANULE, "{bytes} in {len}");
        assert_eq!(start % UNIT, 0, "allocations are aligned");
        let pieces = self.watch.behind(start, len);
        let watch = &self.watch;
        self.physical.take(&pieces, request.stream, |stream| watch.passed(stream));
        let (stream, last) = (request.stream, request.stream);
        let live = Live { bytes, stream, pieces, recorded: Vec::new(), last, freed: None };
        self.live.insert(start, len, live);
        self.watch.guard(start, len);
        self.watch.queue(request.stream);
        self.served += 1;
        self.served_bytes += bytes;
        self.peak_live = self.peak_live.max(self.live_bytes());
    }

    /// Bytes of live allocations as asked for, with those that wait for their streams.
    fn live_bytes(&self) -> u64 {
        self.live.iter().map(|(.., live)| live.bytes).sum()
    }

    /// What fails changes nothing, and it fails only when there is no other way.
    fn check_failed(&self, request: &Request, error: &AllocError, before: &RuntimeStats) {
        let after = self.runtime.stats();
        assert_eq!(before.served, after.served, "what fails serves nobody");
        match error {
            AllocError::Asleep { .. } => panic!("nobody has put it to sleep"),
            AllocError::OutOfMemory { requested, held, live, stitchable, parked, contiguous, source, .. } => {
                assert!(stitchable <= parked && contiguous <= parked, "{error:?}");
                assert_eq!((*requested, *held, live.get()), (request.bytes, after.held, self.live_bytes()));
                assert_eq!(*stitchable, after.page_use.idle_chunks);
                // Unless waiting for them is what has failed.
                let waits = self.live.iter().any(|(.., live)| live.freed.is_some());
                assert!(self.setup.faults || !waits, "streams are waited for before");
                if source.kind != ErrorKind::Exhausted || self.setup.faults {
                    return;
                }
                // All idle chunks and all that the source has are too few together.
                let bytes = request.bytes.get();
                let block = bytes.div_ceil(GRANULE) * GRANULE;
                let (idle, left) = (stitchable.get(), self.source.state.lock().unwrap().left);
                assert!(idle + left < block, "{idle} are idle and {left} left, and {bytes} were refused: {error:?}");
            }
            AllocError::Memory { .. } => assert!(self.setup.faults, "nothing fails here: {error:?}"),
            AllocError::TooLarge { .. } => assert!(request.bytes.get() > 1 << 62, "{error:?}"),
        }
    }

    fn free(&mut self, start: u64, stream: StreamId) {
        let mut waits = false;
        if let Some((_, live)) = self.live.get(start).filter(|(_, live)| live.freed.is_none()) {
            // The streams that use it do so until now.
            live.recorded.iter().chain([&live.stream, &stream]).for_each(|stream| self.watch.queue(*stream));
            waits = live.stream != stream;
        }
        // What a plan served that has ended may lie among the memory of the stream that frees it, and waits for
        // its own.
        let lies_among = waits && self.setup.has_offers && self.lies_among(start, stream);
        let now = self.watch.tick();
        let freed = self.runtime.free(DeviceAddress::new(start), stream);
        let Some((len, live)) = self.live.get(start).filter(|(_, live)| live.freed.is_none()) else {
            assert_eq!(freed, Err(NotLive(DeviceAddress::new(start))));
            return;
        };
        assert_eq!(freed, Ok(()));
        assert_eq!(self.watch.behind(start, len), live.pieces, "other bytes than it was given");
        // What a plan served that has ended lies among another stream's.
        let is_live = self.runtime.len_of(DeviceAddress::new(start)).is_some();
        waits |= self.setup.has_offers && live.recorded.is_empty() && is_live;
        if waits {
            // It was freed on another stream than its own, and waits for that.
            let (len, mut live) = self.live.remove(start).unwrap();
            live.recorded.push(if lies_among { live.stream } else { stream });
            self.live.insert(start, len, live);
        }
        let live = &self.live.get(start).unwrap().1;
        if live.recorded.is_empty() {
            self.gone(start, now);
            return;
        }
        // Nobody uses these addresses any more, but for the streams that are waited for; an unmap waits for those itself.
        self.watch.unguard(start);
        let (len, live) = self.live.remove(start).unwrap();
        self.live.insert(start, len, Live { freed: Some(now), ..live });
        self.end_of_waiting(None);
    }

    fn lies_among(&self, start: u64, stream: StreamId) -> bool {
        let has =
            |segment: &Segment| segment.blocks.iter().any(|block| block.span.start() == DeviceAddress::new(start));
        self.runtime.segments().iter().any(|segment| segment.stream == stream && has(segment))
    }

    /// Frees that waited for streams may have happened: of `reused` certainly, of others when their addresses are live no more. Nothing is
    /// taken back before all streams that use it have passed the free.
    fn end_of_waiting(&mut self, reused: Option<u64>) {
        let waiting: Vec<(u64, u64)> =
            self.live.iter().filter_map(|(start, _, live)| live.freed.map(|at| (start, at))).collect();
        for (start, at) in waiting {
            if Some(start) == reused || self.runtime.len_of(DeviceAddress::new(start)).is_none() {
                for stream in &self.live.get(start).unwrap().1.recorded {
                    assert!(self.watch.passed(*stream) >= at, "{start:#x} is taken back, and {stream} uses it");
                }
                self.gone(start, at);
            }
        }
    }

    fn gone(&mut self, start: u64, at: u64) {
        let (_, live) = self.live.remove(start).unwrap();
        self.physical.give(&live.pieces, &[live.last], at);
        if live.freed.is_none() {
            self.watch.unguard(start);
        }
    }

    fn record(&mut self, start: u64, stream: StreamId) {
        self.runtime.record_stream(DeviceAddress::new(start), stream);
        // The stream that an allocation was made on has nothing to wait for. It is ignored while no plan was
        // there, and where no other was ever used.
        let had_plan = self.setup.has_plan || self.runtime.counters().get(Counter::PlansInstalled) > 0;
        let is_single = !self.has_streams && stream == StreamId::DEFAULT;
        let is_own = |live: &Live| live.stream == stream && (!had_plan || is_single);
        if self.live.get(start).is_some_and(|(_, live)| live.freed.is_none() && !is_own(live)) {
            let (len, mut live) = self.live.remove(start).unwrap();
            live.recorded.push(stream);
            self.watch.queue(stream);
            self.live.insert(start, len, live);
        }
    }

    /// Chunks that were given back may be anybody's.
    fn forget_returned(&mut self) {
        let came_back = std::mem::take(&mut self.source.state.lock().unwrap().came_back);
        came_back.into_iter().for_each(|handle| self.physical.forget(handle));
    }

    fn trim(&mut self, wanted: u64) {
        let (out, idle) = (self.source.out(), self.runtime.stats().page_use.idle_chunks.get());
        let given = self.runtime.trim(Bytes::new(wanted)).get();
        if !self.setup.faults {
            // Chunks are given whole.
            assert!(
                given >= wanted.min(idle) && given < wanted.saturating_add(CHUNK_MAX),
                "{given} of {wanted}, {idle}"
            );
            assert_eq!(self.source.out(), out - given);
        }
        self.forget_returned();
    }

    fn synchronize(&mut self) {
        if let Err(error) = self.runtime.synchronize() {
            assert!(self.setup.faults, "nothing fails here: {error:?}");
            return;
        }
        self.end_of_waiting(None);
        // Unless an event of one could not be asked about.
        assert!(
            self.setup.faults || !self.live.iter().any(|(.., live)| live.freed.is_some()),
            "every stream has passed everything"
        );
    }

    fn check(&self) {
        self.watch.check();
        self.source.check();
        let stats = self.runtime.stats();
        let out = self.source.out();
        self.runtime.invariants().unwrap();
        assert!(stats.held.get() == out || self.setup.faults && stats.held.get() <= out, "{stats:?}, {out} are out");
        assert!(stats.peak_held.get() == self.source.state.lock().unwrap().peak || self.setup.faults, "{stats:?}");
        assert_eq!(stats.held, stats.static_pool + stats.page_use.held);
        assert!(stats.page_use.idle_chunks <= stats.page_use.held - stats.page_use.live);
        assert_eq!((stats.live.get(), stats.peak_live.get()), (self.live_bytes(), self.peak_live));
        assert_eq!((stats.live_allocations, stats.failures), (self.live.len() as u64, self.failures));
        let served = stats.served;
        assert_eq!(served.planned + served.reuse + served.pool, self.served);
        let bytes = served.planned_bytes + served.reuse_bytes + served.pool_bytes;
        assert_eq!(bytes.get(), self.served_bytes);
        let PlannedCounts { hits, late, detoured, .. } = stats.planned;
        assert_eq!(served.planned, hits + late + detoured);
        assert_eq!(served.reuse, stats.planned.reused);
    }

    /// What can be looked at from outside, which takes long.
    fn check_looks(&self) {
        let stats = self.runtime.stats();
        self.check_statistics(&stats);
        self.check_blocks(&stats);
    }

    /// PyTorch's figures say the same as a list of what is live.
    fn check_statistics(&self, stats: &RuntimeStats) {
        let figures = self.runtime.memory_statistics();
        let figure = |name: &str| figures.get(name).unwrap() as u64;
        let allocated: u64 = self.live.iter().filter(|(.., live)| live.freed.is_none()).map(|(_, len, _)| len).sum();
        assert_eq!(figure("allocated_bytes.all.current"), allocated);
        assert_eq!(figure("active_bytes.all.current"), self.live.bytes());
        assert!(figure("active_bytes.all.peak") >= self.live.bytes());
        let freed = self.live.iter().filter(|(.., live)| live.freed.is_some()).count();
        assert_eq!(figure("allocation.all.current") as usize, self.live.len() - freed);
        assert_eq!(figure("allocation.all.allocated"), self.served);
        assert_eq!(figure("requested_bytes.all.allocated"), self.served_bytes);
        assert_eq!(figure("requested_bytes.all.peak"), self.peak_live);
        assert_eq!(figure("reserved_bytes.all.current"), stats.held.get());
        assert!(figure("num_ooms") <= self.failures);
        for name in ["allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"] {
            let of = |pool: &str, part: &str| figure(&format!("{name}.{pool}.{part}"));
            assert_eq!(of("all", "current"), of("small_pool", "current") + of("large_pool", "current"), "{name}");
            for part in ["current", "peak", "allocated"] {
                let most = if part == "peak" { of("all", part) } else { u64::MAX };
                assert!(of("small_pool", part).max(of("large_pool", part)) <= most, "{name}.{part}");
            }
            for pool in ["all", "small_pool", "large_pool"] {
                assert!(of(pool, "peak") >= of(pool, "current"), "{name}.{pool}");
            }
        }
    }

    /// Every live allocation is found by any of its bytes, with what is free beside it, and nothing else is.
    fn check_blocks(&self, stats: &RuntimeStats) {
        let segments = self.runtime.segments();
        let mut held = 0;
        let mut seen = Vec::new();
        for segment in &segments {
            held += if segment.is_stitched { 0 } else { segment.span.len().get() };
            let mut end = segment.span.start();
            for (at, block) in segment.blocks.iter().enumerate() {
                assert_eq!(block.span.start(), end, "blocks lie side by side");
                end = block.span.end();
                let middle = DeviceAddress::new((block.span.start().get() + end.get()) / 2);
                let last = DeviceAddress::new(end.get() - 1);
                let found = [block.span.start(), middle, last].map(|address| self.runtime.block_of(address));
                if matches!(block.state, BlockState::Free | BlockState::Shown) {
                    assert_eq!(found, [None; 3], "{block:?} is nobody's");
                    continue;
                }
                let free = |at: Option<usize>| {
                    let beside = at.and_then(|at| segment.blocks.get(at)).filter(|of| of.state == BlockState::Free);
                    beside.map_or(Bytes::ZERO, |of| of.span.len())
                };
                let (before, after) = (free(at.checked_sub(1)), free(Some(at + 1)));
                assert_eq!(found, [Some(Found { span: block.span, before, after }); 3], "{:?}", segment.pool);
                let is_waiting = block.state == BlockState::Waiting;
                seen.push((block.span.start().get(), block.span.len().get(), block.requested.get(), is_waiting));
            }
            assert_eq!(end, segment.span.end());
        }
        seen.sort_unstable();
        let live = self.live.iter().map(|(at, len, live)| (at, len, live.bytes, live.freed.is_some()));
        assert_eq!(seen, live.collect::<Vec<_>>());
        assert!(held == stats.held.get() || self.setup.faults, "{held} of {}", stats.held);
        let wanted = Bytes::mib(16);
        let ranked = self.runtime.release_candidates(wanted);
        assert_eq!(ranked.len(), self.live.iter().filter(|(.., live)| live.freed.is_none()).count());
        let enough = ranked.iter().take_while(|candidate| candidate.room() >= wanted).count();
        assert!(ranked[..enough].is_sorted_by_key(|candidate| candidate.room()));
        assert!(ranked[enough..].is_sorted_by_key(|candidate| std::cmp::Reverse(candidate.room())));
        assert!(ranked[enough..].iter().all(|candidate| candidate.room() < wanted));
    }

    /// Drops the runtime, whatever is live: every chunk comes back once.
    fn end(self) {
        let Bench { setup, sim, watch, source, runtime, live, .. } = self;
        live.iter().filter(|(.., live)| live.freed.is_none()).for_each(|(start, ..)| watch.unguard(start));
        drop(runtime);
        source.check();
        if !setup.faults {
            assert_eq!(source.out(), 0);
            drop(source);
            assert_eq!(sim.counts(), (0, 0, 0));
        }
    }
}

fn size(rng: &mut Rng, are_small: bool) -> u64 {
    match rng.below(1000) {
        0..900 if are_small => 1 + rng.below(3 * MIB / 2),
        0..350 => 1 + rng.below(16 << 10),
        350..500 => 1 + rng.below(2 * MIB),
        500..700 => (1 + rng.below(8)) * GRANULE,
        700..900 => 1 + rng.below(24 * MIB),
        900..995 => 1 + rng.below(100 * MIB),
        _ => *[1 << 50, Bytes::MAX.get(), MIB, GRANULE - 1].get(rng.index(4)).unwrap(),
    }
}

/// One random operation beside the job's.
fn step(bench: &mut Bench, rng: &mut Rng, gone: &mut Vec<u64>, are_small: bool) {
    let stream = StreamId(rng.below(STREAMS));
    let nth_live = |bench: &Bench, rng: &mut Rng| {
        let nth = rng.index(bench.live.len().max(1));
        bench.live.iter().nth(nth).map(|(start, _, live)| (start, live.stream))
    };
    match rng.below(1000) {
        0..480 => {
            let request =
                Request { stream, is_dynamic: rng.chance(200), ..Request::of(Bytes::new(size(rng, are_small))) };
            bench.alloc(&request);
        }
        480..850 => {
            if let Some((start, own)) = nth_live(bench, rng) {
                bench.free(start, if rng.chance(30) { stream } else { own });
                gone.push(start);
            }
        }
        850..870 => {
            let known = gone.get(rng.index(32)).copied().unwrap_or(4096);
            if bench.live.get(known).is_none_or(|(_, live)| live.freed.is_some()) {
                bench.free(known, stream);
            }
            if gone.len() > 32 {
                gone.drain(..gone.len() - 16);
            }
        }
        870..910 => {
            // Those that were freed already are ignored, as are those that nobody has.
            let start = nth_live(bench, rng).map_or(4096, |(start, _)| start);
            bench.record(if rng.chance(900) { start } else { start + 8 }, stream);
        }
        910..930 => {
            let wanted = if rng.chance(100) { Bytes::MAX.get() >> 1 } else { rng.below(40 * MIB) };
            bench.trim(wanted);
        }
        930..970 => bench.watch.pass(stream),
        970..975 => bench.synchronize(),
        975..990 => bench.clock.advance(Duration::from_millis(rng.below(30))),
        _ => mark(bench),
    }
}

/// An iteration ends, and an offered plan may be installed: for that nothing more is held than before.
fn mark(bench: &mut Bench) {
    let before = bench.runtime.stats();
    bench.runtime.mark_iteration();
    let after = bench.runtime.stats();
    assert!(after.held <= before.held, "{after:?} after {before:?}");
    // Frees that waited may have come to their end.
    bench.end_of_waiting(None);
    assert!(after.live <= before.live && after.live_allocations <= before.live_allocations, "{after:?}");
}

/// Offers a plan of the job, in its own order or not, or of another job.
fn offer(bench: &Bench, rng: &mut Rng, job: &Job, trace: &Trace) {
    let other = Job::random(rng);
    let (job, trace) = if rng.chance(700) { (job, trace) } else { (&other, &other.trace(other.planned() + 1)) };
    let plan = Plan::of_cycle(trace, job.planned()).map(|(plan, _)| plan);
    // A driver that fails has no addresses, and a random job may repeat nothing.
    let prepared = plan.ok().and_then(|plan| bench.runtime.prepare(&plan, Bytes::mib(64)).ok());
    bench.runtime.offer(prepared.filter(|_| rng.chance(950)));
}

fn run(setup: Setup, seed: u64, steps: u64) {
    let mut trail = Trail::new(setup, seed);
    let mut rng = Rng::new(seed);
    let mut bench = Bench::new(setup, seed);
    let job = Job::random(&mut rng);
    let trace = job.trace(job.planned() + 1);
    if setup.has_plan {
        bench.runtime.install_plan(&Plan::from_trace(&trace, job.planned()).unwrap()).unwrap();
    }
    let mut job_holds: BTreeMap<usize, (u64, StreamId)> = BTreeMap::new();
    let mut acts = VecDeque::new();
    let mut gone = Vec::new();
    for at in 0..steps {
        trail.step = at;
        if setup.faults {
            match rng.below(100) {
                0..10 => bench.faulty.layer().fail_nth(1 + rng.below(20)),
                10 => bench.faulty.layer().fail_always(&[Call::Unmap]),
                12..14 => bench.faulty.layer().fail_always(&[Call::Map, Call::Create]),
                _ => bench.faulty.layer().fail_always(&[]),
            }
        }
        if setup.has_offers && rng.chance(2) {
            offer(&bench, &mut rng, &job, &trace);
        }
        if (setup.has_plan || setup.has_offers) && rng.chance(600) {
            if acts.is_empty() {
                // Some ends are marked.
                if rng.chance(300) {
                    mark(&mut bench);
                }
                let kind = job.kinds.get(rng.index(10)).unwrap_or(&job.cycle);
                acts.extend(if kind.is_empty() { &job.cycle } else { kind });
            }
            match acts.pop_front().unwrap() {
                Act::Alloc(slot) => {
                    let request = job.request(slot, &trace, stitchd::trace::Phase::Forward);
                    if let Some(start) = bench.alloc(&request) {
                        job_holds.insert(slot, (start, request.stream));
                    }
                }
                Act::Free(slot) => {
                    // Unless somebody else has freed it.
                    if let Some((start, stream)) = job_holds.remove(&slot)
                        && bench.live.get(start).is_some_and(|(_, live)| live.stream == stream)
                    {
                        bench.free(start, stream);
                    }
                }
            }
        } else {
            // At times there are many small ones.
            step(&mut bench, &mut rng, &mut gone, at / 1000 % 4 == 0);
        }
        bench.check();
        if at % 32 == 0 {
            bench.check_looks();
        }
        if at % 32 == 0 || bench.live.len() < 3 {
            bench.runtime.invariants().unwrap();
        }
    }
    let served = bench.runtime.stats().served;
    let wanted = if setup.faults { steps / 20 } else { steps / 5 };
    assert!(bench.served > wanted && served.pool > steps / 100, "{served:?}");
    assert!(bench.failures > 10, "nothing ran out");
    // Where much goes astray the plan is suspended.
    assert!(!setup.has_plan || served.planned > steps / 40, "{served:?}");
    if setup.has_offers {
        let count = |counter| bench.runtime.counters().get(counter);
        let (installed, refused) = (count(Counter::PlansInstalled), count(Counter::PlansRefused));
        // A short run of a driver that fails may come to no plan.
        // A job may be so short that its plan has a request or two.
        let is_enough = installed >= steps / 5_000 && served.planned > 0;
        assert!(setup.faults || is_enough, "{installed} plans installed, {refused} refused, {served:?}");
    }
    bench.end();
}

#[test]
fn live_allocations_share_nothing_and_all_figures_are_right() {
    for seed in crate::times(SEEDS) {
        run(SETUP, seed, 60_000);
        run(Setup { config: SETUP.config.with_uniform_chunks(), ..SETUP }, seed, 60_000);
    }
}

#[test]
fn with_a_plan_and_others_beside_it_all_figures_are_right() {
    for seed in crate::times(SEEDS) {
        run(Setup { has_plan: true, budget: 400 * MIB, ..SETUP }, seed, 100_000);
    }
}

#[test]
fn plans_that_come_while_the_job_runs_take_what_is_idle_and_nothing_that_is_live() {
    for seed in crate::times(SEEDS) {
        let config = SETUP.config.with_uniform_chunks();
        run(Setup { has_offers: true, budget: 400 * MIB, config, ..SETUP }, seed, 50_000);
        let config = RuntimeConfig { soft_budget: Bytes::mib(128), ..SETUP.config };
        run(Setup { has_offers: true, alias: false, config, ..SETUP }, seed, 30_000);
        for part in 0..10 {
            let config = if part % 2 == 0 { SETUP.config } else { SETUP.config.with_uniform_chunks() };
            run(Setup { has_offers: true, faults: true, config, ..SETUP }, seed << 8 | part, 5_000);
        }
    }
}

#[test]
fn a_source_that_does_not_answer_and_a_device_without_aliases_lose_nothing() {
    for seed in crate::times(SEEDS) {
        let pages = PagePolicy { slack_per_mille: 200, ..SETUP.config.pages };
        let config = RuntimeConfig { soft_budget: Bytes::mib(64), pages, ..SETUP.config };
        run(Setup { alias: false, unavailable_per_mille: 300, config, ..SETUP }, seed, 50_000);
    }
}

#[test]
fn driver_calls_that_fail_give_no_chunk_away_that_is_still_mapped() {
    // What is stuck is lost to its runtime, so these runs are short and many.
    for seed in crate::times(SEEDS) {
        for part in 0..20 {
            let config = if part % 4 < 2 { SETUP.config } else { SETUP.config.with_uniform_chunks() };
            run(Setup { alias: part % 2 == 0, faults: true, config, ..SETUP }, seed << 8 | part, 5_000);
        }
    }
}

/// A thread's allocation: where, its bytes, its number.
type Owned = (u64, u64, u64);

fn work(runtime: &Runtime, host: &HostDriver, thread: u64) {
    let mut rng = Rng::new(40 + thread);
    let stream = StreamId(thread);
    let mut live: Vec<Owned> = Vec::new();
    for n in 0..20_000 {
        let number = thread << 32 | n;
        match rng.below(100) {
            0..55 if live.len() < 12 => {
                let shift = 9 + rng.below(15);
                let bytes = 16 + rng.below(1 << shift);
                if let Ok(address) = runtime.alloc(&Request { stream, ..Request::of(Bytes::new(bytes)) }) {
                    write_pattern(host, address.get(), bytes, GRANULE, number);
                    live.push((address.get(), bytes, number));
                }
            }
            0..90 if !live.is_empty() => {
                let (start, bytes, number) = live.swap_remove(rng.index(live.len()));
                check_pattern(host, start, bytes, GRANULE, number);
                if rng.chance(100) {
                    runtime.record_stream(DeviceAddress::new(start), StreamId(thread % 4 + 1));
                }
                runtime.free(DeviceAddress::new(start), stream).unwrap();
            }
            90..93 => drop(runtime.trim(Bytes::new(rng.below(16 * MIB)))),
            93 => runtime.synchronize().unwrap(),
            94 => runtime.mark_iteration(),
            _ => drop(runtime.stats()),
        }
    }
    for (start, bytes, number) in live {
        check_pattern(host, start, bytes, GRANULE, number);
        runtime.free(DeviceAddress::new(start), stream).unwrap();
    }
}

#[test]
fn four_threads_at_once_never_write_to_each_others_bytes() {
    let _alone = alone();
    let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::gib(1)])));
    let device = Device::open(host.clone(), DeviceId(0)).unwrap();
    let source = Source::new(&device, None, 96 * MIB, 1);
    let config = RuntimeConfig { soft_budget: Bytes::mib(48), ..SETUP.config };
    let clock = Arc::new(ManualClock::default());
    let runtime = Runtime::new(device, source.clone(), clock, config, Counters::private());
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let (runtime, host) = (&runtime, &host);
            scope.spawn(move || work(runtime, host, thread));
        }
    });
    runtime.invariants().unwrap();
    runtime.synchronize().unwrap();
    let stats = runtime.stats();
    assert_eq!((stats.live, stats.live_allocations), (Bytes::ZERO, 0));
    assert_eq!(stats.held.get(), source.out());
    runtime.trim(Bytes::MAX);
    assert_eq!(source.out(), 0);
    drop(runtime);
    source.check();
    drop(source);
    assert_eq!(host.counts(), (0, 0, 0));
}
