//! The small pool against a map of live spans in slabs: who overlaps, what is rounded to what, which gap is the best fit, which slabs are empty.

use std::collections::BTreeMap;

use stitchd::ids::StreamId;
use stitchd::pool::small::SmallPool;
use stitchd::rng::Rng;
use stitchd::units::{Bytes, DeviceAddress};

use crate::reference::{Spans, Trail};
use crate::watch::span;

const UNIT: u64 = 512;
const MIB: u64 = 1 << 20;
const SEEDS: [u64; 4] = [11, 12, 13, 14];

/// The pool and the reference.
pub(crate) struct Bench {
    pub(crate) pool: SmallPool,
    slabs: BTreeMap<u64, Slab>,
    next_slab: u64,
    /// Where each live allocation is, in the order in which they were made: the slab and the address.
    pub(crate) live: Vec<(u64, u64)>,
    served: u64,
}

impl Default for Bench {
    fn default() -> Bench {
        let pool = SmallPool::new(Bytes::mib(2));
        Bench { pool, slabs: BTreeMap::new(), next_slab: 0, live: Vec::new(), served: 0 }
    }
}

struct Slab {
    len: u64,
    stream: StreamId,
    /// For requests above a mebibyte.
    is_medium: bool,
    /// With the bytes that were asked for.
    live: Spans<u64>,
}

impl Slab {
    /// The gaps between live allocations.
    fn gaps(&self, at: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut from = at;
        for (start, len, _) in self.live.iter() {
            gaps.push((from, start - from));
            from = start + len;
        }
        gaps.push((from, at + self.len - from));
        gaps.retain(|(_, len)| *len > 0);
        gaps
    }
}

impl Bench {
    pub(crate) fn alloc(&mut self, bytes: u64, stream: StreamId) -> Option<u64> {
        let len = bytes.div_ceil(UNIT) * UNIT;
        let is_medium = bytes > MIB;
        let fits = |slab: &&Slab| slab.stream == stream && slab.is_medium == is_medium;
        let gaps = self.slabs.iter().filter(|(_, slab)| fits(slab)).flat_map(|(at, slab)| slab.gaps(*at));
        let fitting: Vec<(u64, u64)> = gaps.filter(|(_, gap)| *gap >= len).collect();
        let best = fitting.iter().map(|(_, gap)| *gap).min();
        let served = self.pool.alloc(Bytes::new(bytes), stream).map(DeviceAddress::get);
        assert_eq!(served.is_some(), best.is_some(), "gaps {fitting:?} for {bytes}");
        let start = served?;
        assert!(fitting.iter().any(|(at, gap)| *at == start && Some(*gap) == best), "{start:#x} of {fitting:?}");
        let (at, slab) = self.slabs.range_mut(..=start).next_back().unwrap();
        slab.live.insert(start, len, bytes);
        self.live.push((*at, start));
        self.served += 1;
        Some(start)
    }

    /// Brings a slab for requests of so many bytes.
    pub(crate) fn add_slab(&mut self, bytes: u64, stream: StreamId) {
        // Slabs may lie side by side: they are no neighbours all the same.
        let len = if bytes > MIB { 20 * MIB } else { 2 * MIB };
        assert_eq!(self.pool.slab_len(Bytes::new(bytes)).get(), len);
        let at = (1 << 40) + self.next_slab;
        self.next_slab += len;
        self.pool.add_slab(span(at, len), Bytes::new(bytes), stream);
        self.slabs.insert(at, Slab { len, stream, is_medium: bytes > MIB, live: Spans::default() });
    }

    pub(crate) fn free_nth(&mut self, n: usize) {
        let (at, start) = self.live.remove(n);
        let slab = self.slabs.get_mut(&at).unwrap();
        let (_, bytes) = slab.live.remove(start).unwrap();
        let (stream, is_medium) = (slab.stream, slab.is_medium);
        let alike = |slab: &&Slab| slab.stream == stream && slab.is_medium == is_medium && slab.live.len() == 0;
        // One empty slab of a kind is kept.
        let is_given_up = self.slabs[&at].live.len() == 0 && self.slabs.values().filter(alike).count() > 1;
        let freed = self.pool.free(DeviceAddress::new(start)).expect("it was live");
        assert_eq!(freed.bytes.get(), bytes);
        assert_eq!(freed.slab, is_given_up.then_some((DeviceAddress::new(at), stream)));
        if is_given_up {
            self.slabs.remove(&at);
        }
    }

    /// Frees what is not live.
    fn free_wrong(&mut self, address: u64) {
        if !self.live.iter().any(|(_, start)| *start == address) {
            assert_eq!(self.pool.free(DeviceAddress::new(address)), None);
        }
    }

    pub(crate) fn trim(&mut self) {
        let is_empty = |(_, slab): &(&u64, &Slab)| slab.live.len() == 0;
        let expected: Vec<_> = self.slabs.iter().filter(is_empty).map(|(at, slab)| (*at, slab.stream)).collect();
        let mut given: Vec<_> = self.pool.trim().into_iter().map(|(at, stream)| (at.get(), stream)).collect();
        given.sort_unstable();
        assert_eq!(given, expected);
        self.slabs.retain(|_, slab| slab.live.len() > 0);
    }

    pub(crate) fn check(&self) {
        assert_eq!(self.pool.held().get(), self.slabs.values().map(|slab| slab.len).sum::<u64>());
        assert_eq!(self.pool.live_bytes().get(), self.slabs.values().map(|slab| slab.live.bytes()).sum::<u64>());
        assert_eq!(self.pool.live_allocations(), self.live.len() as u64);
    }

    pub(crate) fn check_all(&self) {
        self.check();
        for slab in self.slabs.values() {
            for (start, len, _) in slab.live.iter() {
                assert_eq!(self.pool.len_of(DeviceAddress::new(start)), Some(Bytes::new(len)));
            }
        }
        self.pool.invariants().unwrap();
    }

    pub(crate) fn end(mut self) {
        while !self.live.is_empty() {
            self.free_nth(0);
            self.check();
        }
        self.check_all();
        self.trim();
        assert_eq!(self.pool.held(), Bytes::ZERO);
        self.check_all();
    }
}

fn size(rng: &mut Rng) -> u64 {
    match rng.below(10) {
        0..5 => 1 + rng.below(8 << 10),
        5..8 => 1 + rng.below(MIB),
        8 => *[1, UNIT, UNIT + 1, MIB, MIB + 1, 2 * MIB - 1].get(rng.index(6)).unwrap(),
        _ => 1 + rng.below(2 * MIB - 1),
    }
}

fn run(seed: u64, steps: u64) {
    let mut trail = Trail::new("small pool", seed);
    let mut rng = Rng::new(seed);
    let mut bench = Bench::default();
    // The crowd grows and shrinks again, so that slabs fill up and become empty.
    let mut crowd = 0;
    for at in 0..steps {
        trail.step = at;
        if at % 500 == 0 {
            crowd = rng.below(80);
        }
        let stream = StreamId(rng.below(3));
        match rng.below(1000) {
            0..10 => bench.trim(),
            10..30 => {
                let address = (1 << 40) + rng.below(64 * MIB) / UNIT * UNIT;
                bench.free_wrong(address + rng.below(2));
            }
            _ if (bench.live.len() as u64) < rng.below(2 * crowd + 1) => {
                let bytes = size(&mut rng);
                if bench.alloc(bytes, stream).is_none() {
                    bench.add_slab(bytes, stream);
                    bench.alloc(bytes, stream).expect("an empty slab has room");
                }
            }
            _ if !bench.live.is_empty() => {
                let nth = rng.index(bench.live.len());
                let (_, start) = bench.live[nth];
                bench.free_nth(nth);
                bench.free_wrong(start);
            }
            _ => {}
        }
        bench.check();
        if at % 100 == 0 {
            bench.check_all();
        }
    }
    assert!(bench.served > steps / 4, "only {} were served", bench.served);
    bench.end();
}

#[test]
fn every_request_gets_the_best_gap_and_nobody_elses_bytes() {
    for seed in crate::times(SEEDS) {
        run(seed, 100_000);
    }
}
