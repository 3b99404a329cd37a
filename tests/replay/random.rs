//! Requests of random sizes and lives, which repeat nothing: no plan helps, and no place is found twice.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use stitchd::replay::PoolName;
use stitchd::rng::Rng;
use stitchd::trace::Trace;

use crate::production::{run, setup};

/// Sizes of requests.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    /// From 512 bytes to 32 MiB, as many of each order: most are small.
    Orders,
    /// Up to 8 MiB.
    Uniform,
}

impl Sizes {
    fn draw(self, rng: &mut Rng) -> u64 {
        match self {
            Sizes::Orders => (512 + rng.below(512)) << rng.below(16),
            Sizes::Uniform => 1 + rng.below(8 << 20),
        }
    }
}

/// A job of so many requests, each of which is freed after up to 2,000 others.
fn random(requests: u64, sizes: Sizes, seed: u64) -> Trace {
    let (mut rng, mut rows, mut tick) = (Rng::new(seed), "tick,event,id,bytes\n".to_owned(), 0_u64);
    let mut ends: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for id in 0..requests {
        for gone in ends.remove(&id).unwrap_or_default() {
            writeln!(rows, "{tick},free,{gone},").unwrap();
            tick += 1;
        }
        writeln!(rows, "{tick},alloc,{id},{}", sizes.draw(&mut rng)).unwrap();
        tick += 1;
        ends.entry(id + 1 + rng.below(2_000)).or_default().push(id);
    }
    stitchd::trace::csv::read(rows.as_bytes()).unwrap()
}

fn takes_no_more_than_caching(requests: u64, sizes: Sizes, seed: u64) {
    let trace = random(requests, sizes, seed);
    let [ours, caching, expandable] = [PoolName::Stitchd, PoolName::Caching, PoolName::Expandable]
        .map(|pool| run(pool, &trace, None, &setup(false)).peak_reserved);
    println!("{requests} {sizes:?} of seed {seed}: {ours}, caching {caching}, expandable {expandable}");
    assert!(ours <= caching, "{requests} {sizes:?} of seed {seed}: {ours}, caching {caching}");
}

#[test]
fn eighty_thousand_random_requests_take_no_more_than_with_the_caching_allocator() {
    for sizes in [Sizes::Orders, Sizes::Uniform] {
        (1..=3).for_each(|seed| takes_no_more_than_caching(80_000, sizes, seed));
    }
}

#[test]
fn as_many_random_requests_as_the_largest_trace_has_take_no_more_either() {
    takes_no_more_than_caching(865_000, Sizes::Orders, 1);
}
