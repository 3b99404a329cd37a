//! The stitching pool against a map of live spans and the physical chunks behind them: over the simulated driver, with and without aliases, with
//! tiny limits and failing calls, and over the host driver with patterns in real bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Call, Driver, Handle};
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::memory::{Chunk, Device};
use stitchd::pool::stitching::{Effort, StitchAllocation, StitchConfig, StitchCounts, Stitched, StitchingPool};
use stitchd::rng::Rng;
use stitchd::units::{Bytes, DeviceAddress};

use crate::alone;
use crate::reference::{Physical, Spans, Trail};
use crate::watch::{Piece, Watch, check_pattern, write_pattern};

pub(crate) const GRANULE: u64 = 2 << 20;
const STREAMS: u64 = 3;
const SEEDS: [u64; 4] = [1, 2, 3, 4];

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) is_host: bool,
    pub(crate) alias: bool,
    pub(crate) config: StitchConfig,
    pub(crate) faults: bool,
    /// Chunks that the pool may hold.
    pub(crate) chunks_max: u64,
}

/// Everything may be stitched, and nearly everything is remembered.
pub(crate) const SETUP: Setup = Setup {
    is_host: false,
    alias: true,
    config: StitchConfig {
        fragmentation_limit: Bytes::mib(2),
        packed_below: Some(Bytes::ZERO),
        stitch_limit: Bytes::gib(1),
        remembered_max: 4096,
        is_on: true,
    },
    faults: false,
    chunks_max: 24,
};

/// A live allocation.
#[derive(Clone, Debug)]
struct Live {
    stream: StreamId,
    pieces: Vec<Piece>,
    number: u64,
    is_lent: bool,
}

/// The pool and the reference.
pub(crate) struct Bench {
    setup: Setup,
    watch: Arc<Watch>,
    faulty: Arc<Faulty>,
    sim: Option<Arc<SimDriver>>,
    device: Arc<Device>,
    pub(crate) pool: StitchingPool,
    live: Spans<Live>,
    physical: Physical,
    held: BTreeMap<ChunkId, Handle>,
    /// The time of the reference: one more with each free.
    time: u64,
    passed: BTreeMap<StreamId, u64>,
    next: u64,
    served: u64,
}

impl Bench {
    pub(crate) fn new(setup: Setup) -> Bench {
        let (driver, sim): (Arc<dyn Driver>, _) = if setup.is_host {
            let options = HostOptions { alias: setup.alias, ..HostOptions::with_devices(&[Bytes::gib(4)]) };
            (Arc::new(HostDriver::new(options)), None)
        } else {
            let options = SimOptions { alias: setup.alias, ..SimOptions::with_devices(&[Bytes::gib(4)]) };
            let sim = Arc::new(SimDriver::new(options));
            (sim.clone(), Some(sim))
        };
        let faulty = Faults::around(driver);
        let watch = Watch::around(faulty.clone());
        let device = Device::open(watch.clone(), DeviceId(0)).unwrap();
        let pool = StitchingPool::new(Arc::clone(&device), Bytes::new(GRANULE), setup.config);
        Bench {
            setup,
            watch,
            faulty,
            sim,
            device,
            pool,
            live: Spans::default(),
            physical: Physical::default(),
            held: BTreeMap::new(),
            time: 0,
            passed: BTreeMap::new(),
            next: 0,
            served: 0,
        }
    }

    fn passed(&self) -> impl Fn(StreamId) -> u64 {
        |stream| self.passed.get(&stream).copied().unwrap_or(0)
    }

    /// Idle bytes that `stream` may have, wherever they are.
    fn usable(&self, stream: StreamId) -> u64 {
        let usable = |chunk: &&Handle| self.physical.is_usable(**chunk, stream, self.passed());
        self.held.values().filter(usable).count() as u64 * GRANULE
    }

    pub(crate) fn grow(&mut self, chunks: u64, stream: StreamId) -> bool {
        if self.held.len() as u64 + chunks > self.setup.chunks_max {
            return false;
        }
        let mut made = Vec::new();
        let mut handles = Vec::new();
        for _ in 0..chunks {
            self.next += 1;
            // A create that fails is the source's trouble, not the pool's.
            let Ok(chunk) = Chunk::create(&self.device, ChunkId(self.next), Bytes::new(GRANULE)) else { return false };
            handles.push((chunk.id(), self.watch.created()));
            made.push(Arc::new(chunk));
        }
        let grown = self.pool.grow(&made, stream);
        if grown.is_ok() {
            self.held.extend(handles);
            return true;
        }
        assert!(self.setup.faults, "nothing fails here: {grown:?}");
        for (chunk, (_, handle)) in made.iter().zip(handles) {
            self.check_invisible(chunk, handle);
        }
        false
    }

    /// A chunk that is somebody else's is visible nowhere, or nobody else can get it.
    fn check_invisible(&self, chunk: &Arc<Chunk>, handle: Handle) {
        let is_visible = self.watch.mapped_times(handle) > 0;
        assert!(!is_visible || chunk.is_stuck(), "{} is given away while it is mapped", chunk.id());
        assert!(!chunk.is_stuck() || self.setup.faults, "nothing fails here");
    }

    /// Chunks that the pool gives away.
    fn leave(&mut self, chunks: Vec<Arc<Chunk>>) {
        for chunk in chunks {
            let handle = self.held.remove(&chunk.id()).expect("a chunk comes back once");
            self.check_invisible(&chunk, handle);
            assert!(chunk.is_stuck() || Arc::strong_count(&chunk) == 1, "{} is still in use", chunk.id());
            self.physical.forget(handle);
        }
    }

    fn note_served(&mut self, served: StitchAllocation, bytes: u64, stream: StreamId) -> u64 {
        let (start, len) = (served.address.get(), bytes.div_ceil(GRANULE) * GRANULE);
        assert_eq!(served.len.get(), len);
        assert_eq!(start % GRANULE, 0, "chunks are aligned");
        let pieces = self.watch.behind(start, len);
        let passed = &self.passed;
        self.physical.take(&pieces, stream, |stream| passed.get(&stream).copied().unwrap_or(0));
        self.next += 1;
        let number = self.next;
        self.live.insert(start, len, Live { stream, pieces, number, is_lent: false });
        self.watch.guard(start, len);
        if self.setup.is_host {
            write_pattern(&*self.watch, start, len, GRANULE, number);
        }
        assert_eq!(self.pool.len_of(served.address), Some(Bytes::new(len)));
        self.served += 1;
        start
    }

    /// Asks for bytes that can be had without a call.
    pub(crate) fn alloc(&mut self, bytes: u64, stream: StreamId) -> Option<u64> {
        let served = self.pool.alloc(Bytes::new(bytes), stream)?;
        Some(self.note_served(served, bytes, stream))
    }

    /// Asks for bytes that may be stitched.
    pub(crate) fn stitch(&mut self, bytes: u64, stream: StreamId, effort: Effort) -> Result<u64, Option<u64>> {
        let (usable, len) = (self.usable(stream), bytes.div_ceil(GRANULE) * GRANULE);
        let idle = self.held.len() as u64 * GRANULE - self.live.bytes();
        let stitched = self.pool.stitch(Bytes::new(bytes), stream, effort);
        let orphans = self.pool.orphans();
        assert!(orphans.is_empty() || self.setup.faults, "nothing fails here");
        self.leave(orphans);
        match stitched {
            Ok(Stitched::Served(served)) => Ok(self.note_served(served, bytes, stream)),
            Ok(Stitched::Lacks(lacks)) => {
                let lacks = lacks.get();
                assert!(lacks <= len && lacks >= len.saturating_sub(usable), "{len} of {usable} usable lack {lacks}");
                // A cut that heals, or a move that fails, may tie bytes to one stream more than needs be.
                let is_tied = self.setup.faults && !self.setup.alias || self.setup.config.remembered_max < 4096;
                let is_exact = usable == idle && !is_tied;
                if effort == Effort::Last && is_exact {
                    assert_eq!(lacks, len - usable, "every idle chunk is looked at");
                }
                Err(Some(lacks))
            }
            Err(error) => {
                assert!(self.setup.faults, "nothing fails here: {error}");
                Err(None)
            }
        }
    }

    pub(crate) fn free(&mut self, start: u64, stream: StreamId) {
        let freed = self.pool.free(DeviceAddress::new(start), stream);
        let Some((_, live)) = self.live.get(start) else {
            assert_eq!(freed, None, "nothing is live at {start:#x}");
            return;
        };
        if live.is_lent {
            assert_eq!(freed, None, "a slab is not an allocation");
            return;
        }
        assert!(freed.is_some(), "{start:#x} was live");
        self.note_freed(start, stream);
    }

    fn note_freed(&mut self, start: u64, stream: StreamId) {
        let (len, live) = self.live.remove(start).unwrap();
        assert_eq!(self.watch.behind(start, len), live.pieces, "other bytes than it was given");
        if self.setup.is_host {
            check_pattern(&*self.watch, start, len, GRANULE, live.number);
        }
        self.time += 1;
        self.physical.give(&live.pieces, &[stream], self.time);
        self.watch.unguard(start);
        assert_eq!(self.pool.len_of(DeviceAddress::new(start)), None);
    }

    pub(crate) fn trim(&mut self, wanted: u64) {
        let held = self.held.len() as u64 * GRANULE;
        let idle = held - self.live.bytes();
        let chunks = self.pool.trim(Bytes::new(wanted));
        let given: u64 = chunks.iter().map(|chunk| chunk.len().get()).sum();
        let expected = wanted.min(idle).div_ceil(GRANULE) * GRANULE;
        assert!(given == expected || self.setup.faults && given <= expected, "{given} of {wanted} with {idle} idle");
        self.leave(chunks);
    }

    /// What `stream` has queued until now runs.
    pub(crate) fn pass(&mut self, stream: StreamId) {
        self.pool.note_passed(stream, self.pool.moment());
        self.passed.insert(stream, self.time);
    }

    pub(crate) fn check(&self) {
        self.watch.check();
        let held = self.held.len() as u64 * GRANULE;
        let live = self.live.bytes();
        assert_eq!(self.pool.held().get(), held);
        assert_eq!(self.pool.live_bytes().get(), live);
        let lent = self.live.iter().filter(|(.., live)| live.is_lent).count();
        assert_eq!(self.pool.live_allocations(), (self.live.len() - lent) as u64);
        let usage = self.pool.usage();
        assert_eq!((usage.held.get(), usage.live.get(), usage.stitchable.get()), (held, live, held - live));
        assert!(usage.largest_contiguous <= usage.stitchable);
    }

    pub(crate) fn check_all(&self) {
        self.check();
        self.pool.invariants().unwrap();
    }

    /// The n-th live allocation, by age: addresses are the driver's choice, and what a seed does must not hang on it.
    pub(crate) fn nth_live(&self, n: usize) -> Option<(u64, StreamId)> {
        let mut live: Vec<_> = self.live.iter().map(|(start, _, live)| (live.number, start, live.stream)).collect();
        live.sort_unstable();
        live.get(n).map(|(_, start, stream)| (*start, *stream))
    }

    pub(crate) fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Frees everything, and takes every chunk back once.
    pub(crate) fn end(mut self) {
        self.faulty.layer().fail_nth(0);
        self.faulty.layer().fail_always(&[]);
        while let Some((start, stream)) = self.nth_live(0) {
            if self.live.get(start).unwrap().1.is_lent {
                self.pool.take_back(DeviceAddress::new(start), stream);
                self.note_freed(start, stream);
            } else {
                self.free(start, stream);
            }
        }
        self.check_all();
        assert_eq!(self.pool.usage().stitchable, self.pool.held());
        self.trim(Bytes::MAX.get());
        self.check_all();
        assert_eq!(self.pool.held(), Bytes::ZERO);
        if !self.setup.faults {
            assert!(self.held.is_empty());
            assert_eq!(self.sim.map_or((0, 0, 0), |sim| sim.counts()), (0, 0, 0));
        }
    }
}

/// One random operation.
fn step(bench: &mut Bench, rng: &mut Rng, tokens: &mut Vec<(u64, u64)>, gone: &mut Vec<u64>) {
    let stream = StreamId(rng.below(STREAMS));
    match rng.below(100) {
        0..45 => ask(bench, rng, stream),
        45..85 if bench.live_count() > 0 => {
            let (start, own) = bench.nth_live(rng.index(bench.live_count())).unwrap();
            gone.push(start);
            bench.free(start, if rng.chance(900) { own } else { stream });
        }
        85..88 => {
            // Freed before, inside of something, or nowhere.
            let known = gone.get(rng.below(64) as usize).copied().unwrap_or(GRANULE);
            if rng.chance(500) {
                let inside = bench.nth_live(rng.index(bench.live_count().max(1))).map_or(8, |(start, _)| start + 512);
                bench.free(inside, stream);
            } else if bench.live.get(known).is_none() {
                bench.free(known, stream);
            }
            gone.truncate(64);
        }
        88..92 => {
            let wanted = if rng.chance(50) { Bytes::MAX.get() } else { rng.below(6 * GRANULE) };
            bench.trim(wanted);
        }
        92..95 => tokens.push((bench.pool.moment(), bench.time)),
        95..98 if !tokens.is_empty() => {
            // A moment that was noted a while ago is passed only now.
            let (moment, time) = tokens.swap_remove(rng.index(tokens.len()));
            bench.pool.note_passed(stream, moment);
            let passed = bench.passed.entry(stream).or_default();
            *passed = (*passed).max(time);
        }
        95..99 => bench.pass(stream),
        _ => lend_or_take_back(bench, rng),
    }
}

fn ask(bench: &mut Bench, rng: &mut Rng, stream: StreamId) {
    let chunks = 1 + if rng.chance(700) { rng.below(4) } else { rng.below(10) };
    let bytes = chunks * GRANULE - if rng.chance(300) { rng.below(GRANULE) } else { 0 };
    if bench.alloc(bytes, stream).is_some() {
        return;
    }
    match rng.below(4) {
        0 => drop(bench.grow(chunks, stream)),
        1 => drop(bench.stitch(bytes, stream, Effort::Last)),
        _ => {
            if let Err(Some(lacks)) = bench.stitch(bytes, stream, Effort::Usual)
                && bench.grow(lacks / GRANULE, stream)
                && !bench.setup.faults
            {
                bench.stitch(bytes, stream, Effort::Usual).expect("what was lacking is there");
            }
        }
    }
}

fn lend_or_take_back(bench: &mut Bench, rng: &mut Rng) {
    if bench.live_count() == 0 {
        return;
    }
    let (start, stream) = bench.nth_live(rng.index(bench.live_count())).unwrap();
    let (len, mut live) = bench.live.remove(start).unwrap();
    let was_lent = live.is_lent;
    live.is_lent = true;
    bench.live.insert(start, len, live);
    if was_lent {
        bench.pool.take_back(DeviceAddress::new(start), stream);
        bench.note_freed(start, stream);
    } else {
        bench.pool.lend(DeviceAddress::new(start));
        assert_eq!(bench.pool.len_of(DeviceAddress::new(start)), None);
    }
}

/// Says how the requests were served.
fn run(setup: Setup, seed: u64, steps: u64) -> StitchCounts {
    let mut trail = Trail::new(setup, seed);
    let mut rng = Rng::new(seed);
    let mut bench = Bench::new(setup);
    let (mut tokens, mut gone) = (Vec::new(), Vec::new());
    for at in 0..steps {
        trail.step = at;
        if setup.faults {
            // One call fails now and then; for a step now and then, all of a kind do.
            match rng.below(100) {
                0..20 => bench.faulty.layer().fail_nth(1 + rng.below(12)),
                20..23 => bench.faulty.layer().fail_always(&[Call::Unmap]),
                23..26 => bench.faulty.layer().fail_always(&[Call::Map, Call::Reserve]),
                _ => bench.faulty.layer().fail_always(&[]),
            }
        }
        step(&mut bench, &mut rng, &mut tokens, &mut gone);
        bench.check();
        if bench.held.len() <= 10 || at % 8 == 0 {
            bench.pool.invariants().unwrap();
        }
    }
    assert!(bench.served > steps / 6, "only {} were served", bench.served);
    let counts = bench.pool.counts();
    let all = [counts.exact, counts.split, counts.joined, counts.grown];
    assert!(all.iter().all(|count| *count > steps / 10_000), "some way was hardly gone: {counts:?}");
    bench.end();
    counts
}

#[test]
fn no_two_live_allocations_share_an_address_or_a_chunk() {
    for seed in crate::times(SEEDS) {
        run(SETUP, seed, 100_000);
    }
}

#[test]
fn the_default_configuration_shares_nothing_either() {
    for seed in crate::times(SEEDS) {
        run(Setup { config: StitchConfig::default(), chunks_max: 40, ..SETUP }, seed, 100_000);
    }
}

#[test]
fn a_pool_of_many_blocks_shares_nothing_either() {
    for seed in crate::times(SEEDS) {
        for alias in [true, false] {
            run(Setup { alias, chunks_max: 420, ..SETUP }, seed, 10_000);
        }
    }
}

/// Where the driver puts reservations is its own choice: what is served by what does not hang on it.
#[test]
fn a_seed_is_the_same_job_on_any_driver() {
    for alias in [true, false] {
        let [host, sim] = [true, false].map(|is_host| run(Setup { is_host, alias, ..SETUP }, 5, 5_000));
        assert_eq!(host, sim);
    }
}

#[test]
fn little_is_remembered_and_stitched_addresses_are_scarce_and_nothing_is_shared() {
    for seed in crate::times(SEEDS) {
        let config = StitchConfig {
            fragmentation_limit: Bytes::mib(2 * seed),
            packed_below: Some(Bytes::ZERO),
            stitch_limit: Bytes::mib(4 * seed),
            remembered_max: seed as usize,
            is_on: true,
        };
        run(Setup { config, ..SETUP }, seed, 100_000);
    }
}

#[test]
fn where_stitching_moves_chunks_nothing_is_shared_or_lost() {
    for seed in crate::times(SEEDS) {
        let config = StitchConfig { fragmentation_limit: Bytes::mib(2 * seed), ..SETUP.config };
        run(Setup { alias: false, config, ..SETUP }, seed, 100_000);
    }
}

#[test]
fn calls_that_fail_lose_nothing_and_show_no_chunk_to_two_owners() {
    for seed in crate::times(SEEDS) {
        for alias in [true, false] {
            let config = StitchConfig { stitch_limit: Bytes::mib(40), remembered_max: 30, ..SETUP.config };
            run(Setup { alias, faults: true, config, ..SETUP }, seed, 50_000);
        }
    }
}

#[test]
fn real_bytes_stay_what_their_owner_wrote() {
    let _alone = alone();
    for seed in crate::times(SEEDS) {
        for alias in [true, false] {
            let config = StitchConfig { stitch_limit: Bytes::mib(40), remembered_max: 30, ..SETUP.config };
            run(Setup { is_host: true, alias, config, ..SETUP }, seed, 5_000);
        }
    }
}

/// What is foretold from the live blocks is what a search would find: the pool itself compares the two in builds with assertions. Jobs that repeat
/// themselves but for one request meet the same states again after splits, joins and stitches.
#[test]
fn what_is_foretold_is_what_a_search_would_find() {
    if !cfg!(debug_assertions) {
        println!("SKIP: the pool compares what it foretells with a search only in builds with assertions");
        return;
    }
    for seed in 1..=600 {
        let mut rng = Rng::new(seed);
        let job: Vec<(u64, usize)> = (0..12).map(|_| (1 + rng.below(6), rng.index(8))).collect();
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(16)])));
        let device = Device::open(sim as Arc<dyn Driver>, DeviceId(0)).unwrap();
        let config = StitchConfig { fragmentation_limit: Bytes::mib(2), remembered_max: 30, ..StitchConfig::default() };
        let mut pool = StitchingPool::new(Arc::clone(&device), Bytes::mib(2), config);
        let mut chunks = 0;
        for iteration in 0..12 {
            let varies = if iteration < 2 { job.len() } else { rng.index(job.len()) };
            let mut live: Vec<(usize, DeviceAddress)> = Vec::new();
            for (now, (granules, life)) in job.iter().enumerate() {
                let granules = if now == varies { 1 + rng.below(6) } else { *granules };
                live.retain(|(end, address)| {
                    *end > now || pool.free(*address, StreamId::DEFAULT).map(|_| false).expect("it is live")
                });
                let bytes = Bytes::mib(2 * granules);
                let address = loop {
                    if let Some(served) = pool.alloc(bytes, StreamId::DEFAULT) {
                        break served.address;
                    }
                    if chunks > 14
                        && let Stitched::Served(served) = pool.stitch(bytes, StreamId::DEFAULT, Effort::Last).unwrap()
                    {
                        break served.address;
                    }
                    let some = (0..granules).map(|_| {
                        chunks += 1;
                        Arc::new(Chunk::create(&device, ChunkId(chunks), Bytes::mib(2)).unwrap())
                    });
                    pool.grow(&some.collect::<Vec<_>>(), StreamId::DEFAULT).unwrap();
                };
                live.push((now + 1 + life, address));
            }
            for (_, address) in live {
                pool.free(address, StreamId::DEFAULT).unwrap();
            }
            pool.invariants().unwrap();
        }
        assert!(pool.counts().searched < 144, "some of the 144 requests are foretold");
    }
}
