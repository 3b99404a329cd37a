//! The packed pool against a map of live spans and a count of chunks, on a driver whose calls fail now and then: requests, frees, growing by what lacks, by more and by less, moves and trims, on several
//! streams.

use std::collections::BTreeMap;
use std::sync::Arc;

use stitchd::driver::Driver;
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::memory::{Chunk, Device};
use stitchd::pool::packed::{PackedPool, Prefer};
use stitchd::rng::Rng;
use stitchd::units::{Bytes, DeviceAddress};

use crate::reference::{Spans, Trail};

const GRANULE: u64 = 2 << 20;
const UNIT: u64 = 512;
const SEEDS: [u64; 4] = [41, 42, 43, 44];
/// Chunks that exist at most.
const CHUNKS: u64 = 400;

struct Bench {
    faulty: Arc<Faulty>,
    device: Arc<Device>,
    pool: PackedPool,
    /// With the stream that each was served on.
    live: Spans<StreamId>,
    /// Chunks that are nobody's now.
    spare: Vec<Arc<Chunk>>,
    made: u64,
    /// Who was served in each granule of addresses so far: nobody else may be.
    users: BTreeMap<u64, StreamId>,
    moved: u64,
}

impl Bench {
    fn new() -> Bench {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(4)])));
        let faulty = Faults::around(sim);
        let device = Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DeviceId(0)).unwrap();
        let pool = PackedPool::new(Arc::clone(&device), Bytes::new(GRANULE));
        Bench {
            faulty,
            device,
            pool,
            live: Spans::default(),
            spare: Vec::new(),
            made: 0,
            users: BTreeMap::new(),
            moved: 0,
        }
    }

    fn chunks(&mut self, count: u64) -> Vec<Arc<Chunk>> {
        while (self.spare.len() as u64) < count && self.made < CHUNKS {
            let chunk = Chunk::create(&self.device, ChunkId(self.made), Bytes::new(GRANULE));
            self.spare.extend(chunk.ok().map(Arc::new));
            self.made += 1;
        }
        self.spare.split_off(self.spare.len() - self.spare.len().min(count as usize))
    }

    fn alloc(&mut self, bytes: u64, stream: StreamId) -> bool {
        let Some(address) = self.pool.alloc(Bytes::new(bytes), stream) else { return false };
        let len = bytes.div_ceil(UNIT) * UNIT;
        let start = address.get();
        assert!(start.is_multiple_of(UNIT));
        self.live.insert(start, len, stream);
        for granule in start / GRANULE..(start + len).div_ceil(GRANULE) {
            assert_eq!(*self.users.entry(granule).or_insert(stream), stream, "a range is one stream's");
        }
        assert_eq!(self.pool.len_of(address), Some(Bytes::new(len)));
        let chunks = self.pool.chunks_at(address);
        let covered = chunks.iter().map(|(at, _)| at.get()).collect::<Vec<_>>();
        assert!(covered[0] <= start && covered[covered.len() - 1] + GRANULE >= start + len);
        assert!(covered.windows(2).all(|pair| pair[0] + GRANULE == pair[1]), "there is a chunk under every byte");
        true
    }

    fn grow(&mut self, chunks: Vec<Arc<Chunk>>, bytes: u64, stream: StreamId) -> bool {
        let before = self.pool.held();
        if self.pool.grow(&chunks, Bytes::new(bytes), stream).is_ok() {
            assert_eq!(self.pool.held(), before + Bytes::new(chunks.len() as u64 * GRANULE));
            return true;
        }
        assert_eq!(self.pool.held(), before, "what cannot be mapped changes nothing");
        self.spare.extend(chunks.into_iter().filter(|chunk| !chunk.is_stuck()));
        false
    }

    fn step(&mut self, rng: &mut Rng, fails: bool) {
        if fails && rng.chance(30) {
            self.faulty.layer().fail_nth(1 + rng.below(4));
        }
        let stream = StreamId(if rng.chance(700) { 0 } else { 1 + rng.below(2) });
        let shift = rng.below(17);
        let bytes = 1 + rng.below(512 << shift);
        match rng.below(100) {
            0..45 => {
                if !self.alloc(bytes, stream) {
                    let lacks = self.pool.lacks(Bytes::new(bytes), stream, Prefer::FewChunks).unwrap().get() / GRANULE;
                    assert!(lacks > 0, "what lacks nothing is served");
                    // As it should be, or as it is when another thread was there meanwhile.
                    let count = if rng.chance(850) { lacks } else { rng.below(2 * lacks + 1) };
                    let chunks = self.chunks(count);
                    let is_enough = chunks.len() as u64 == lacks;
                    if self.grow(chunks, bytes, stream) && is_enough {
                        assert!(self.alloc(bytes, stream), "it grew by what was lacking");
                    }
                }
            }
            45..90 => {
                let nth = rng.index(self.live.len().max(1));
                let Some(start) = self.live.iter().nth(nth).map(|(start, ..)| start) else { return };
                let (len, _) = self.live.remove(start).unwrap();
                let freed = self.pool.free(DeviceAddress::new(start)).expect("it is live");
                assert_eq!(freed.get().div_ceil(UNIT) * UNIT, len);
                assert_eq!(self.pool.free(DeviceAddress::new(start)), None);
            }
            90..96 => {
                if self.pool.alloc(Bytes::new(bytes), stream).map(|address| self.pool.free(address)).is_none() {
                    let outside = self.chunks(rng.below(3));
                    let (held, came) = (self.pool.held(), outside.len() as u64);
                    let lacks = self.pool.lacks(Bytes::new(bytes), stream, Prefer::FewNew(came)).unwrap();
                    let idle = self.pool.usage().idle_chunks;
                    match self.pool.grow_by_moving(outside, Bytes::new(bytes), stream) {
                        Ok(moved) => {
                            self.moved += moved as u64;
                            assert_eq!(self.pool.held(), held + Bytes::new(came * GRANULE));
                            assert!(moved as u64 >= came && (moved as u64 - came) * GRANULE <= idle.get());
                            assert!(moved as u64 * GRANULE <= lacks.get().max(came * GRANULE));
                        }
                        Err((chunks, _)) => {
                            assert!(fails);
                            self.spare.extend(chunks.into_iter().filter(|chunk| !chunk.is_stuck()));
                        }
                    }
                }
            }
            _ => {
                let wanted = Bytes::new(rng.below(40 * GRANULE));
                let chunks = self.pool.trim(wanted);
                assert!(chunks.len() as u64 <= wanted.get().div_ceil(GRANULE));
                self.spare.extend(chunks);
            }
        }
        self.pool.invariants().unwrap();
        let usage = self.pool.usage();
        assert_eq!(usage.live, Bytes::new(self.live.bytes()));
        assert_eq!(self.pool.live_allocations(), self.live.len() as u64);
        assert!(usage.idle_chunks <= self.pool.free_bytes());
    }
}

fn run(seed: u64, steps: u64, fails: bool) {
    let mut trail = Trail::new("packed pool", seed);
    let mut rng = Rng::new(seed);
    let mut moved = 0;
    while trail.step < steps {
        let mut bench = Bench::new();
        for _ in 0..5_000 {
            trail.step += 1;
            bench.step(&mut rng, fails);
        }
        moved += bench.moved;
        let stuck = bench.device.quarantine().bytes;
        let held = bench.pool.held();
        let all = bench.pool.take_all();
        assert_eq!(Bytes::new(all.len() as u64 * GRANULE), held);
        assert!(fails || stuck.is_zero() && bench.device.mapped().0 == 0, "{stuck}");
    }
    assert!(moved > steps / 200, "{moved}");
}

#[test]
fn requests_never_overlap_and_every_chunk_is_where_the_books_say() {
    for seed in crate::times(SEEDS) {
        run(seed, 60_000, false);
    }
}

#[test]
fn calls_that_fail_lose_no_chunk_and_serve_nothing_twice() {
    for seed in crate::times(SEEDS) {
        run(seed + 100, 60_000, true);
    }
}
