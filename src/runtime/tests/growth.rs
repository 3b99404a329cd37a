//! When the source is asked for memory, how much it is asked for, and when idle memory is stitched.

use super::*;
use crate::driver::sim::{SimDriver, SimOptions};

#[test]
fn a_request_of_more_than_one_lease_takes_several_or_none() {
    let sim = SimDriver::new(SimOptions::with_devices(&[Bytes::gib(512)]));
    let bench = Bench::over(Arc::new(sim), 150 << 10, RuntimeConfig::default().with_uniform_chunks());
    // 128 GiB come, 72 do not, and those that came go back.
    let error = bench.alloc(Bytes::gib(200)).unwrap_err();
    assert!(crate::error::chain(&error).contains("only 22.00 GiB left"), "{}", crate::error::chain(&error));
    assert_eq!(bench.source.state.lock().unwrap().left, Bytes::gib(150));
    let before = bench.acquires();
    let address = bench.alloc(Bytes::gib(140)).unwrap();
    assert_eq!((bench.acquires() - before, bench.runtime.stats().held), (2, Bytes::gib(140)));
    bench.free(address);
}

#[test]
fn a_regular_job_asks_for_nothing_after_its_first_iteration() {
    let bench = Bench::new(256, RuntimeConfig::default());
    let iteration = || {
        let kept: Vec<_> = [5, 9, 2, 17].map(|mib| bench.alloc(Bytes::mib(mib)).unwrap()).into();
        let small: Vec<_> = (1..50).map(|n| bench.alloc(Bytes::new(n * 700)).unwrap()).collect();
        kept.into_iter().chain(small).for_each(|address| bench.free(address));
    };
    iteration();
    let acquires = bench.acquires();
    for _ in 0..5 {
        iteration();
    }
    assert_eq!(bench.acquires(), acquires);
}

#[test]
fn under_pressure_idle_pieces_are_stitched_and_only_then_is_it_out_of_memory() {
    let bench = Bench::new(16, RuntimeConfig::default());
    let blocks: Vec<_> = (0..8).map(|_| bench.alloc(Bytes::mib(2)).unwrap()).collect();
    bench.alloc(Bytes::mib(2)).unwrap_err();
    for at in [0, 2, 4, 6] {
        bench.free(blocks[at]);
    }
    let stitched = bench.alloc(Bytes::mib(8)).unwrap();
    assert_eq!(bench.runtime.stats().pages.new_places, 1);
    assert_eq!(bench.runtime.counters.get(Counter::RescuedBytes), 8 << 20);
    let error = bench.alloc(Bytes::mib(2)).unwrap_err();
    let AllocError::OutOfMemory { requested, held, live, stitchable, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*requested, *held, *live, *stitchable), (Bytes::mib(2), Bytes::mib(16), Bytes::mib(16), Bytes::ZERO));
    assert_eq!(bench.runtime.stats().failures, 2);
    bench.free(stitched);
    bench.alloc(Bytes::mib(2)).unwrap();
}

#[test]
fn beyond_the_soft_budget_only_what_is_missing_is_asked_for() {
    let config = RuntimeConfig { soft_budget: Bytes::mib(8), ..RuntimeConfig::default() };
    let bench = Bench::new(64, config);
    let blocks: Vec<_> = (0..4).map(|_| bench.alloc(Bytes::mib(2)).unwrap()).collect();
    bench.free(blocks[0]);
    bench.free(blocks[2]);
    bench.alloc(Bytes::mib(6)).unwrap();
    assert_eq!(bench.runtime.stats().held, Bytes::mib(10));
    // It was stitched, and need not have been.
    let counted = [Counter::StitchedBytes, Counter::RescuedBytes].map(|counter| bench.runtime.counters.get(counter));
    assert_eq!(counted, [6 << 20, 0]);
}

#[test]
fn after_a_refusal_the_source_is_left_alone_for_a_moment() {
    let bench = Bench::new(8, RuntimeConfig::default());
    let first = bench.alloc(Bytes::mib(8)).unwrap();
    bench.alloc(Bytes::mib(2)).unwrap_err();
    bench.free(first);
    let acquires = bench.acquires();
    let small: Vec<_> = (0..4).map(|_| bench.alloc(Bytes::mib(2)).unwrap()).collect();
    assert_eq!(bench.acquires(), acquires);
    bench.free(small[0]);
    bench.free(small[2]);
    bench.alloc(Bytes::mib(4)).unwrap();
    assert_eq!(bench.acquires(), acquires, "stitched without asking");
    bench.clock.advance(Duration::from_secs(1));
    bench.alloc(Bytes::mib(2)).unwrap_err();
    assert!(bench.acquires() > acquires);
}

#[test]
fn where_no_large_chunks_are_left_nobody_is_asked_for_one_with_each_request() {
    let bench = Bench::new(4 + 20, RuntimeConfig::default());
    bench.runtime.install_plan(&plan()).unwrap();
    let mut acquires = Vec::new();
    for _ in 0..3 {
        let before = bench.acquires();
        let blocks: Vec<_> = (0..100).map(|n| bench.alloc(Bytes::kib(40 + n)).unwrap()).collect();
        blocks.into_iter().for_each(|block| bench.free(block));
        bench.runtime.mark_iteration();
        acquires.push(bench.acquires() - before);
    }
    assert!(acquires[0] <= 10 && acquires[1..] == [0, 0], "{acquires:?}");
}

#[test]
fn where_chunks_are_large_what_is_small_lies_beside_others_and_fills_them() {
    // Where open files are few the smallest chunk is one of these.
    let granule = Bytes::mib(32);
    let bench = Bench::new(
        1024,
        RuntimeConfig { pages: PagePolicy { granule, ..PagePolicy::default() }, ..RuntimeConfig::default() },
    );
    let mut live = Bytes::ZERO;
    // To 1 MiB, to 2, and what is stitched where chunks are small: nothing of it fills a chunk.
    for (count, kib) in [(300, 100), (100, 1000), (40, 1800), (30, 2500), (6, 20_000), (2, 70_000)] {
        for _ in 0..count {
            bench.alloc(Bytes::kib(kib)).unwrap();
            live += Bytes::kib(kib);
        }
    }
    bench.runtime.invariants().unwrap();
    let held = bench.runtime.stats().held;
    // One chunk may be begun.
    assert!(held <= live.round_up(granule).unwrap() + granule, "{held} for {live}");
}
