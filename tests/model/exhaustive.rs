//! Every list of up to six operations on tiny pools, with the checks of the random runs.

use stitchd::ids::StreamId;
use stitchd::pool::stitching::Effort;

use crate::job::Job;
use crate::planned::Bench as Planned;
use crate::small::Bench as Small;
use crate::stitching::{Bench as Stitching, GRANULE, SETUP, Setup};

const LEN: u32 = 6;

/// Runs every list of `LEN` operations out of `count`; `new` makes a bench and `act` takes a step. What follows a step is checked where the step
/// ends a list that was not seen before, so each list of up to `LEN` is checked once.
fn every_list<B>(count: u64, new: impl Fn() -> B, act: impl Fn(&mut B, u64), check: impl Fn(&B), end: impl Fn(B)) {
    for number in 0..count.pow(LEN) {
        let list: Vec<u64> = (0..LEN).rev().map(|at| number / count.pow(at) % count).collect();
        let mut bench = new();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for (at, operation) in list.iter().enumerate() {
                act(&mut bench, *operation);
                if list[at + 1..].iter().all(|later| *later == 0) {
                    check(&bench);
                }
            }
            end(bench);
        }));
        if let Err(panic) = outcome {
            eprintln!("failed with the operations {list:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

const ONE: StreamId = StreamId(0);
const TWO: StreamId = StreamId(1);

fn serve(bench: &mut Stitching, chunks: u64, stream: StreamId) {
    if bench.alloc(chunks * GRANULE, stream).is_none() {
        let _ = bench.stitch(chunks * GRANULE, stream, Effort::Last);
    }
}

fn free(bench: &mut Stitching, nth: usize) {
    if let Some((start, stream)) = bench.nth_live(nth) {
        bench.free(start, stream);
    }
}

fn stitching(alias: bool) {
    let new = || {
        let mut bench = Stitching::new(Setup { alias, chunks_max: 4, ..SETUP });
        bench.grow(3, ONE);
        bench
    };
    let act = |bench: &mut Stitching, operation| match operation {
        0 => serve(bench, 1, ONE),
        1 => serve(bench, 2, TWO),
        2 => serve(bench, 3, ONE),
        3 => free(bench, 0),
        4 => free(bench, 1),
        5 => bench.trim(GRANULE),
        6 => {
            bench.pass(ONE);
            bench.pass(TWO);
        }
        _ => drop(bench.grow(1, TWO)),
    };
    every_list(8, new, act, Stitching::check_all, Stitching::end);
}

#[test]
fn no_list_of_six_operations_makes_a_stitching_pool_share_bytes() {
    stitching(true);
}

#[test]
fn no_list_of_six_operations_makes_a_pool_that_moves_chunks_share_bytes() {
    stitching(false);
}

#[test]
fn no_list_of_six_operations_makes_a_small_pool_share_bytes() {
    // A third and a half of a slab on one stream, a half on another; frees from either end and from the middle.
    const SLAB: u64 = 2 << 20;
    let serve = |bench: &mut Small, bytes: u64, stream: StreamId| {
        if bench.alloc(bytes, stream).is_none() && bytes <= SLAB / 2 {
            bench.add_slab(bytes, stream);
            bench.alloc(bytes, stream);
        }
    };
    let act = |bench: &mut Small, operation| match operation {
        0 => serve(bench, SLAB / 3, ONE),
        1 => serve(bench, SLAB / 2, ONE),
        2 => serve(bench, SLAB / 2, TWO),
        3 if !bench.live.is_empty() => bench.free_nth(0),
        4 if bench.live.len() > 1 => bench.free_nth(1),
        5 if bench.live.len() > 2 => bench.free_nth(bench.live.len() - 1),
        6 => bench.trim(),
        _ => {}
    };
    every_list(7, Small::default, act, Small::check_all, Small::end);
}

/// A plan of four requests, of which the first and third, and the second and fourth, can share bytes. Without a prologue the job is in its cycle;
/// with one it is at its beginning.
fn planned(prologue: usize) {
    let new = || {
        let mut bench = Planned::new(Job::small(&[3 << 20, 512, 2 << 20, 700], prologue), 3, 2);
        if prologue == 0 {
            bench.start();
        }
        bench
    };
    let act = |bench: &mut Planned, operation| match operation {
        0..4 => bench.alloc_in_its_phase(operation as usize),
        4 => bench.free_first(),
        5 => bench.free_last(),
        6 => match bench.unknown() {
            Some(start) => bench.vacate(start),
            None => bench.occupy_half(),
        },
        _ => bench.mark(),
    };
    let end = |mut bench: Planned| {
        bench.free_everything();
        bench.mark();
        let before = bench.deviations();
        assert!(bench.clean_cycles(1, true));
        assert_eq!(bench.deviations(), before);
    };
    every_list(8, new, act, Planned::check_all, end);
}

#[test]
fn no_list_of_six_operations_makes_a_planned_pool_share_bytes() {
    planned(0);
}

#[test]
fn no_list_of_six_operations_makes_a_planned_pool_with_a_prologue_share_bytes() {
    planned(1);
}
