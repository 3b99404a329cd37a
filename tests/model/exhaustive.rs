//! Every list of up to six operations on tiny pools, with the checks of the random runs.

use stitchd::ids::StreamId;
use stitchd::rng::Rng;

use crate::alone;
use crate::job::Job;
use crate::pages::{Bench as Pages, GRANULE, SETUP, Setup};
use crate::planned::Bench as Planned;

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

/// Requests of a half, one and a half and three granules in a pool of four, whose chunks are of one and
/// of two; frees from either end; trims.
fn pages(alias: bool, stays: bool) {
    let new = || {
        let mut bench = Pages::new(Setup { alias, stays, granules_max: 5, ..SETUP });
        bench.extend(&[1, 2], ONE);
        bench
    };
    let serve = |bench: &mut Pages, bytes: u64, stream: StreamId| {
        let mut rng = Rng::new(1);
        let is_served = bench.alloc(bytes, stream) || bench.stitch(bytes, stream, &mut rng);
        if !is_served && bench.extend(&[bytes.div_ceil(GRANULE)], stream) {
            bench.alloc(bytes, stream);
        }
    };
    let act = move |bench: &mut Pages, operation| match operation {
        0 => serve(bench, GRANULE / 2, ONE),
        1 => serve(bench, GRANULE + GRANULE / 2, ONE),
        2 => serve(bench, 3 * GRANULE, ONE),
        3 => serve(bench, GRANULE, TWO),
        4 => bench.free_nth(0),
        5 => bench.free_nth(1),
        6 => drop(bench.trim(GRANULE)),
        _ => drop(bench.extend(&[1], ONE)),
    };
    every_list(8, new, act, Pages::check, Pages::end);
}

#[test]
fn every_list_of_operations_on_pages() {
    pages(true, false);
}

#[test]
fn every_list_of_operations_on_pages_without_aliases() {
    pages(false, false);
}

#[test]
fn every_list_of_operations_on_pages_where_memory_stays_with_its_addresses() {
    let _alone = alone();
    pages(false, true);
    pages(true, true);
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
