//! The page pool against a map of live spans and the physical bytes behind them: requests of all
//! sizes on several streams, growth in chunks of several sizes, stitching, moves and trims; with and
//! without aliases, where memory stays with its addresses, with failing calls, and with patterns in
//! real bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Driver, Handle};
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::memory::{Chunk, Device};
use stitchd::pool::pages::{PagePolicy, PagePool};
use stitchd::rng::Rng;
use stitchd::units::{Bytes, DeviceAddress};

use crate::alone;
use crate::reference::{Physical, Spans, Trail};
use crate::watch::{Piece, Watch, check_pattern, write_pattern};

pub(crate) const GRANULE: u64 = 2 << 20;
const UNIT: u64 = 512;
const SEEDS: [u64; 4] = [41, 42, 43, 44];

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) is_host: bool,
    pub(crate) alias: bool,
    pub(crate) stays: bool,
    pub(crate) faults: bool,
    /// Granules that the pool may hold.
    pub(crate) granules_max: u64,
}

pub(crate) const SETUP: Setup = Setup { is_host: false, alias: true, stays: false, faults: false, granules_max: 48 };

#[derive(Clone, Debug)]
struct Live {
    bytes: u64,
    stream: StreamId,
    pieces: Vec<Piece>,
    number: u64,
}

pub(crate) struct Bench {
    setup: Setup,
    watch: Arc<Watch>,
    faulty: Arc<Faulty>,
    device: Arc<Device>,
    pub(crate) pool: PagePool,
    live: Spans<Live>,
    physical: Physical,
    /// Chunks that the pool has: their handles and lengths.
    held: BTreeMap<ChunkId, (Handle, u64)>,
    next: u64,
    served: u64,
    stitched: u64,
}

impl Bench {
    pub(crate) fn new(setup: Setup) -> Bench {
        let driver: Arc<dyn Driver> = if setup.is_host || setup.stays {
            let options = HostOptions {
                alias: setup.alias,
                memory_stays_with_addresses: setup.stays,
                ..HostOptions::with_devices(&[Bytes::gib(4)])
            };
            Arc::new(HostDriver::new(options))
        } else {
            let options = SimOptions { alias: setup.alias, ..SimOptions::with_devices(&[Bytes::gib(4)]) };
            Arc::new(SimDriver::new(options))
        };
        let faulty = Faults::around(driver);
        let watch = Watch::around(faulty.clone());
        let device = Device::open(watch.clone(), DeviceId(0)).unwrap();
        // Small pieces are stitched too, so that places begin and end inside chunks.
        let policy = PagePolicy { piece_min: Bytes::new(GRANULE / 4), ..PagePolicy::default() };
        Bench {
            setup,
            watch,
            faulty,
            pool: PagePool::new(Arc::clone(&device), policy),
            device,
            live: Spans::default(),
            physical: Physical::default(),
            held: BTreeMap::new(),
            next: 0,
            served: 0,
            stitched: 0,
        }
    }

    fn held_bytes(&self) -> u64 {
        self.held.values().map(|(_, len)| len).sum()
    }

    /// Chunks of these lengths, in granules: fewer where there is no room or a create fails.
    fn chunks(&mut self, granules: &[u64]) -> Vec<(Arc<Chunk>, Handle)> {
        let mut made: Vec<(Arc<Chunk>, Handle)> = Vec::new();
        for count in granules {
            let sum: u64 = made.iter().map(|(chunk, _)| chunk.len().get()).sum();
            let len = count * GRANULE;
            if self.held_bytes() + sum + len > self.setup.granules_max * GRANULE {
                break;
            }
            self.next += 1;
            let Ok(chunk) = Chunk::create(&self.device, ChunkId(self.next), Bytes::new(len)) else { break };
            made.push((Arc::new(chunk), self.watch.created()));
        }
        made
    }

    /// Chunks that together have at least so many bytes, of random lengths; fewer where there is no room.
    fn chunks_for(&mut self, bytes: u64, rng: &mut Rng) -> Vec<(Arc<Chunk>, Handle)> {
        let mut left = bytes.div_ceil(GRANULE);
        let mut granules = Vec::new();
        while left > 0 {
            let count = (1 + rng.below(4)).min(left);
            granules.push(count);
            left -= count;
        }
        self.chunks(&granules)
    }

    fn note_came(&mut self, chunks: &[(Arc<Chunk>, Handle)]) {
        self.held.extend(chunks.iter().map(|(chunk, handle)| (chunk.id(), (*handle, chunk.len().get()))));
    }

    pub(crate) fn extend(&mut self, granules: &[u64], stream: StreamId) -> bool {
        let made = self.chunks(granules);
        if made.len() < granules.len() {
            return false;
        }
        let chunks: Vec<Arc<Chunk>> = made.iter().map(|(chunk, _)| Arc::clone(chunk)).collect();
        let extended = self.pool.extend(&chunks, stream);
        assert!(self.setup.faults || extended.is_ok(), "nothing fails here: {extended:?}");
        if extended.is_ok() {
            self.note_came(&made);
        }
        extended.is_ok()
    }

    fn note_served(&mut self, address: DeviceAddress, bytes: u64, stream: StreamId) {
        let len = bytes.div_ceil(UNIT) * UNIT;
        let start = address.get();
        assert!(start.is_multiple_of(UNIT), "allocations are aligned");
        assert_eq!(self.pool.len_of(address), Some(Bytes::new(len)));
        assert_eq!(self.pool.stream_at(address), Some(stream));
        let pieces = self.watch.behind(start, len);
        assert_eq!(pieces.iter().map(|(_, from, to)| to - from).sum::<u64>(), len, "there is memory under every byte");
        // A chunk changes streams only by way of an unmap, after which it is forgotten here.
        self.physical.take(&pieces, stream, |_| 0);
        if self.setup.is_host {
            write_pattern(&*self.watch, start, len, GRANULE, self.next + self.served);
        }
        let number = self.next + self.served;
        self.live.insert(start, len, Live { bytes, stream, pieces, number });
        self.watch.guard(start, len);
        self.served += 1;
    }

    pub(crate) fn alloc(&mut self, bytes: u64, stream: StreamId) -> bool {
        let Some(address) = self.pool.alloc(Bytes::new(bytes), stream) else { return false };
        self.note_served(address, bytes, stream);
        true
    }

    /// Stitches with as many new chunks as lack; true if that served the request.
    pub(crate) fn stitch(&mut self, bytes: u64, stream: StreamId, rng: &mut Rng) -> bool {
        let Some(shortage) = self.pool.shortage(Bytes::new(bytes), stream, rng.below(4) == 0) else {
            return false;
        };
        assert!(self.setup.alias, "nothing is shown twice here");
        let made = self.chunks_for(shortage.lacks.get(), rng);
        let came: u64 = made.iter().map(|(chunk, _)| chunk.len().get()).sum();
        let is_enough = came >= shortage.lacks.get();
        let chunks: Vec<Arc<Chunk>> = made.iter().map(|(chunk, _)| Arc::clone(chunk)).collect();
        match self.pool.stitch(&shortage.pieces, &chunks, Bytes::new(bytes), stream) {
            Ok(served) => {
                self.note_came(&made);
                assert_eq!(served.is_some(), is_enough, "it lacks {} and {came} came", shortage.lacks);
                if let Some(address) = served {
                    self.note_served(address, bytes, stream);
                    self.stitched += 1;
                }
                is_enough
            }
            Err((left, error)) => {
                assert!(self.setup.faults, "nothing fails here: {error:?}");
                if left.is_empty() {
                    self.note_came(&made);
                } else {
                    assert_eq!(left.len(), made.len());
                }
                false
            }
        }
    }

    pub(crate) fn free_nth(&mut self, nth: usize) {
        let Some(start) = self.live.iter().nth(nth).map(|(start, ..)| start) else { return };
        let (len, live) = self.live.remove(start).unwrap();
        assert_eq!(self.watch.behind(start, len), live.pieces, "other bytes than it was given");
        if self.setup.is_host {
            check_pattern(&*self.watch, start, len, GRANULE, live.number);
        }
        let found = self.pool.find(DeviceAddress::new(start + len / 2)).expect("it is live");
        assert_eq!((found.span.start().get(), found.span.len().get()), (start, len));
        let address = DeviceAddress::new(start);
        assert_eq!(self.pool.free(address), Some(Bytes::new(live.bytes)));
        assert_eq!(self.pool.free(address), None, "freed twice");
        self.physical.give(&live.pieces, &[live.stream], 1);
        self.watch.unguard(start);
    }

    pub(crate) fn trim(&mut self, wanted: u64) -> u64 {
        let idle = self.pool.usage().idle_chunks.get();
        let largest = self.held.values().map(|(_, len)| *len).max().unwrap_or(0);
        let chunks = self.pool.trim(Bytes::new(wanted));
        let given: u64 = chunks.iter().map(|chunk| chunk.len().get()).sum();
        if !self.setup.faults && !self.setup.stays {
            assert!(given >= wanted.min(idle) && given < wanted + largest.max(1), "{given} of {wanted}, {idle} idle");
        }
        for chunk in chunks {
            let (handle, _) = self.held.remove(&chunk.id()).expect("it was the pool's");
            assert_eq!(self.watch.mapped_times(handle), 0, "it leaves and is still mapped");
            assert_eq!(Arc::strong_count(&chunk), 1);
            self.physical.forget(handle);
        }
        given
    }

    pub(crate) fn check(&self) {
        self.pool.invariants(None).unwrap();
        self.watch.check();
        let usage = self.pool.usage();
        assert_eq!(usage.held.get(), self.held_bytes());
        assert_eq!(usage.live.get(), self.live.bytes());
        assert_eq!(self.pool.live_allocations(), self.live.len() as u64);
        assert!(usage.idle_chunks <= self.pool.free_bytes());
    }

    pub(crate) fn end(mut self) {
        while self.live.len() > 0 {
            self.free_nth(0);
        }
        self.check();
        if !self.setup.faults {
            assert_eq!(self.pool.usage().idle_chunks, self.pool.held(), "nothing is live");
            self.trim(u64::MAX / 2);
            assert_eq!((self.pool.held(), self.device.mapped().0), (Bytes::ZERO, 0));
        }
        let held = self.pool.held();
        let all = self.pool.take_all();
        assert_eq!(all.iter().map(|chunk| chunk.len()).sum::<Bytes>(), held);
    }

    fn step(&mut self, rng: &mut Rng) {
        if self.setup.faults && rng.chance(40) {
            self.faulty.layer().fail_nth(1 + rng.below(6));
        }
        let stream = StreamId(if rng.chance(750) { 0 } else { 1 + rng.below(2) });
        let shift = rng.below(17);
        let bytes = 1 + rng.below(512 << shift);
        match rng.below(100) {
            0..48 => {
                if self.alloc(bytes, stream) {
                    return;
                }
                // What was brought in vain may be enough.
                if rng.chance(600) && (self.stitch(bytes, stream, rng) || self.alloc(bytes, stream)) {
                    return;
                }
                let lacks = self.pool.lacks_at_end(Bytes::new(bytes), stream).unwrap().get();
                assert!(lacks > 0, "what lacks nothing is served");
                let made = self.chunks_for(lacks, rng);
                let came: u64 = made.iter().map(|(chunk, _)| chunk.len().get()).sum();
                let chunks: Vec<Arc<Chunk>> = made.iter().map(|(chunk, _)| Arc::clone(chunk)).collect();
                if self.pool.extend(&chunks, stream).is_ok() {
                    self.note_came(&made);
                    if came >= lacks {
                        assert!(self.alloc(bytes, stream), "it grew by what was lacking");
                    }
                }
            }
            48..93 => {
                let nth = rng.index(self.live.len().max(1));
                self.free_nth(nth);
            }
            93..97 => drop(self.trim(rng.below(20 * GRANULE))),
            97..98 => {
                let before = self.pool.idle_chunks_of_others(stream);
                let taken = self.pool.trim_others(stream, Bytes::new(rng.below(8 * GRANULE)));
                let given: Bytes = taken.iter().map(|chunk| chunk.len()).sum();
                assert!(given <= before);
                let handles: Vec<Handle> = taken.iter().map(|chunk| self.held[&chunk.id()].0).collect();
                handles.into_iter().for_each(|handle| self.physical.forget(handle));
                if self.pool.extend(&taken, stream).is_err() {
                    assert!(self.setup.faults);
                    self.held.retain(|id, _| taken.iter().all(|chunk| chunk.id() != *id));
                }
            }
            _ => {
                let taken = self.pool.trim_before_end(Bytes::new(bytes), stream, Bytes::new(rng.below(8 * GRANULE)));
                assert!(taken.is_empty() || !self.setup.alias && !self.setup.stays);
                let handles: Vec<Handle> = taken.iter().map(|chunk| self.held[&chunk.id()].0).collect();
                handles.into_iter().for_each(|handle| self.physical.forget(handle));
                if self.pool.extend(&taken, stream).is_err() {
                    assert!(self.setup.faults);
                    self.held.retain(|id, _| taken.iter().all(|chunk| chunk.id() != *id));
                }
            }
        }
        self.check();
    }
}

fn run(setup: Setup, seed: u64, steps: u64) {
    let mut trail = Trail::new(setup, seed);
    let mut rng = Rng::new(seed);
    let (mut served, mut stitched) = (0, 0);
    while trail.step < steps {
        let mut bench = Bench::new(setup);
        for _ in 0..2_500.min(steps) {
            trail.step += 1;
            bench.step(&mut rng);
        }
        served += bench.served;
        stitched += bench.stitched;
        bench.end();
    }
    assert!(served > steps / 6, "{served}");
    assert!(!setup.alias || stitched > steps / 400, "{stitched}");
}

#[test]
fn random_requests_share_no_bytes() {
    for seed in crate::times(SEEDS) {
        run(SETUP, seed, 40_000);
    }
}

#[test]
fn random_requests_without_aliases() {
    for seed in crate::times(SEEDS) {
        run(Setup { alias: false, ..SETUP }, seed + 10, 40_000);
    }
}

#[test]
fn random_requests_where_memory_stays() {
    for seed in crate::times(SEEDS) {
        let _alone = alone();
        run(Setup { stays: true, ..SETUP }, seed + 20, 5_000);
        run(Setup { stays: true, alias: false, ..SETUP }, seed + 30, 5_000);
    }
}

#[test]
fn failing_calls_lose_no_chunk() {
    for seed in crate::times(SEEDS) {
        run(Setup { faults: true, ..SETUP }, seed + 40, 40_000);
        run(Setup { faults: true, alias: false, ..SETUP }, seed + 50, 20_000);
    }
}

#[test]
fn patterns_in_real_bytes_hold() {
    for seed in crate::times(SEEDS) {
        let _alone = alone();
        run(Setup { is_host: true, ..SETUP }, seed + 60, 2_500);
    }
}
