//! Private pools of a runtime against plain maps: which chunk served whom, who is live where, what is given back. Several pools open, closed and released in any order, beside requests of the job itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use stitchd::clock::ManualClock;
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::memory::Device;
use stitchd::pool::Request;
use stitchd::rng::Rng;
use stitchd::runtime::{Counters, PrivatePoolId, Runtime, RuntimeConfig};
use stitchd::session::PrivateSource;
use stitchd::store::Store;
use stitchd::units::{Bytes, DeviceAddress};

use crate::reference::Spans;
use crate::{At, alone};

const SEEDS: [u64; 4] = [51, 52, 53, 54];
const POOLS: u64 = 3;
const DEVICE: DeviceId = DeviceId(0);

/// Whose memory: a private pool's, by its number, or the job's own.
type Owner = Option<u64>;

#[derive(Clone, Debug)]
struct Live {
    owner: Owner,
    stream: StreamId,
    /// Another stream uses it.
    is_recorded: bool,
    /// It was freed, and waits for the end of what may be a capture.
    is_freed: bool,
}

#[derive(Default, Clone, Copy, Debug)]
struct Uses {
    open: u32,
    uses: u32,
}

struct Bench {
    store: Arc<Store>,
    runtime: Runtime,
    live: Spans<Live>,
    /// Every chunk that serves a private pool which is not over.
    owners: BTreeMap<ChunkId, u64>,
    uses: BTreeMap<u64, Uses>,
}

impl Bench {
    fn new() -> Bench {
        let host = HostDriver::new(HostOptions::with_devices(&[Bytes::mib(512)]));
        let device = Device::open(Arc::new(host), DEVICE).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(Arc::clone(&store), DEVICE, Ladder::standard()));
        let config = RuntimeConfig { soft_budget: Bytes::mib(100), ..RuntimeConfig::default().with_uniform_chunks() };
        let clock = Arc::new(ManualClock::default());
        let runtime = Runtime::new(device, source, clock, config, Counters::private());
        Bench { store, runtime, live: Spans::default(), owners: BTreeMap::new(), uses: BTreeMap::new() }
    }

    fn is_open(&self) -> bool {
        self.uses.values().any(|uses| uses.open > 0)
    }

    fn alloc(&mut self, owner: Owner, bytes: u64, stream: StreamId) {
        let request = Request { stream, ..Request::of(Bytes::new(bytes)) };
        let served = match owner {
            Some(pool) => self.runtime.alloc_private(PrivatePoolId(pool, 7), &request),
            None => self.runtime.alloc(&request),
        };
        let Ok(address) = served else { return };
        let len = self.runtime.len_of(address).unwrap().get();
        assert!(len >= bytes);
        // The map refuses what overlaps.
        self.live.insert(address.get(), len, Live { owner, stream, is_recorded: false, is_freed: false });
        for piece in self.runtime.manifest(address).unwrap() {
            match owner {
                Some(pool) => assert_eq!(*self.owners.entry(piece.chunk).or_insert(pool), pool, "{:?}", piece.chunk),
                None => assert!(!self.owners.contains_key(&piece.chunk), "{:?} is a private pool's", piece.chunk),
            }
        }
    }

    fn free(&mut self, start: u64) {
        let (len, live) = self.live.remove(start).unwrap();
        let address = DeviceAddress::new(start);
        self.runtime.free(address, live.stream).unwrap();
        assert!(self.runtime.free(address, live.stream).is_err(), "freed twice");
        if live.is_recorded && self.is_open() {
            assert!(self.runtime.len_of(address).is_some(), "no event is asked about while a capture may be under way");
            self.live.insert(start, len, Live { is_freed: true, ..live });
        }
        self.forget_over();
    }

    fn record(&mut self, start: u64) {
        let (len, live) = self.live.remove(start).unwrap();
        self.runtime.record_stream(DeviceAddress::new(start), StreamId(live.stream.0 + 1));
        self.live.insert(start, len, Live { is_recorded: true, ..live });
    }

    fn end(&mut self, pool: u64) {
        let uses = self.uses.entry(pool).or_default();
        assert_eq!(self.runtime.end_private(PrivatePoolId(pool, 7)), uses.open > 0);
        uses.open = uses.open.saturating_sub(1);
        if !self.is_open() {
            let freed: Vec<u64> = self.live.iter().filter(|(.., live)| live.is_freed).map(|(at, ..)| at).collect();
            for start in freed {
                assert_eq!(self.runtime.len_of(DeviceAddress::new(start)), None, "nobody keeps it any more");
                self.live.remove(start).unwrap();
            }
        }
        self.forget_over();
    }

    /// Pools that were released as often as begun, and of which nothing is live, have no memory any more.
    fn forget_over(&mut self) {
        let is_over = |pool: &u64| {
            let uses = self.uses.get(pool).copied().unwrap_or_default();
            uses.uses == 0 && uses.open == 0 && !self.live.iter().any(|(.., live)| live.owner == Some(*pool))
        };
        let over: Vec<u64> = (0..POOLS).filter(is_over).collect();
        self.owners.retain(|_, pool| !over.contains(pool));
    }

    fn step(&mut self, rng: &mut Rng) {
        let pool = rng.below(POOLS);
        let stream = StreamId(rng.below(2));
        let shift = rng.below(15);
        let bytes = 1 + rng.below(512 << shift);
        let pick = |bench: &Bench, rng: &mut Rng| {
            let live: Vec<u64> = bench.live.iter().filter(|(.., live)| !live.is_freed).map(|(at, ..)| at).collect();
            (!live.is_empty()).then(|| live[rng.index(live.len())])
        };
        match rng.below(100) {
            0..20 => self.alloc(None, bytes, stream),
            20..45 => {
                if self.uses.get(&pool).is_some_and(|uses| uses.open > 0) {
                    self.alloc(Some(pool), bytes, stream);
                }
            }
            45..84 => {
                if let Some(start) = pick(self, rng) {
                    self.free(start);
                }
            }
            84..88 => {
                if let Some(start) = pick(self, rng) {
                    self.record(start);
                }
            }
            88..91 => {
                self.runtime.begin_private(PrivatePoolId(pool, 7));
                let uses = self.uses.entry(pool).or_default();
                (uses.open, uses.uses) = (uses.open + 1, uses.uses + 1);
            }
            91..95 => self.end(pool),
            95..98 => {
                let uses = self.uses.entry(pool).or_default();
                assert_eq!(self.runtime.release_private(PrivatePoolId(pool, 7)), uses.uses > 0);
                uses.uses = uses.uses.saturating_sub(1);
                self.forget_over();
            }
            _ => {
                let given = self.runtime.trim(Bytes::MAX);
                assert!(given.is_zero() || !self.is_open(), "nothing is unmapped while a capture may be under way");
            }
        }
    }

    fn check(&self) {
        self.runtime.invariants().unwrap();
        let stats = self.runtime.stats();
        assert_eq!(stats.live_allocations, self.live.iter().count() as u64);
        let private = self.owners.len() as u64 * Bytes::mib(2).get();
        // Chunks that a pool has and nobody was served from yet are its own, too.
        assert!(stats.private_use.held.get() >= private);
        let (chunks, _) = self.store.counts();
        assert_eq!(chunks * Bytes::mib(2).get(), stats.held.get(), "every chunk is held by somebody");
        if !self.is_open() && self.owners.is_empty() && self.uses.values().all(|uses| uses.uses == 0) {
            assert_eq!(stats.private_use.held, Bytes::ZERO, "what is over has given its memory back");
        }
    }
}

#[test]
fn memory_of_a_private_pool_serves_that_pool_alone_until_it_is_released() {
    let _alone = alone();
    let mut was_private = 0;
    for seed in crate::times(SEEDS) {
        let mut rng = Rng::new(seed);
        let mut bench = Bench::new();
        let at = At::new("private pools", seed);
        for step in 0..6_000 {
            at.step.set(step);
            bench.step(&mut rng);
            was_private += u64::from(!bench.owners.is_empty());
            if step % 16 == 0 {
                bench.check();
            }
        }
        // All over: everything comes back.
        for pool in 0..POOLS {
            while bench.uses.get(&pool).is_some_and(|uses| uses.open > 0) {
                bench.end(pool);
            }
            while bench.runtime.release_private(PrivatePoolId(pool, 7)) {}
            bench.uses.remove(&pool);
        }
        let starts: Vec<u64> = bench.live.iter().map(|(start, ..)| start).collect();
        starts.into_iter().for_each(|start| bench.free(start));
        bench.check();
        assert_eq!(bench.runtime.stats().private_use.held, Bytes::ZERO);
        bench.runtime.trim(Bytes::MAX);
        assert_eq!(bench.store.counts().0, 0);
    }
    assert!(was_private > 1000, "{was_private}");
}
