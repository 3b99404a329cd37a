//! The cost table of an H200 against what growth took on the device (src/DESIGN.md, README).

use std::fmt::Write as _;

use stitchd::driver::Call;
use stitchd::driver::cost_table::CostTable;
use stitchd::ladder::Ladder;
use stitchd::replay::{PoolName, Run, Setup};
use stitchd::trace::Trace;
use stitchd::units::Bytes;

use crate::production::{run, setup};

const GIB: u64 = 64;

/// A job that grows to 64 GiB by requests of one size, and frees nothing.
fn growth(request_mib: u64) -> Trace {
    let mut rows = "tick,event,id,bytes\n".to_owned();
    for id in 0..GIB * 1024 / request_mib {
        writeln!(rows, "{id},alloc,{id},{}", request_mib << 20).unwrap();
    }
    stitchd::trace::csv::read(rows.as_bytes()).unwrap()
}

/// The production pools with all chunks of one size, as release 9c968ab had them.
fn uniform(chunk_mib: u64) -> Setup {
    let mut setup = Setup { costs: CostTable::H200, ..setup(false) };
    setup.ladder = Ladder::new(vec![Bytes::mib(chunk_mib)]).unwrap();
    setup.runtime.pages = setup.runtime.pages.with_uniform_chunks();
    setup.runtime.pages.granule = Bytes::mib(chunk_mib);
    setup
}

fn millis_per_gib(run: &Run) -> f64 {
    run.calls.seconds * 1e3 / GIB as f64
}

/// 2.8 ms a GiB were measured. Pages of 20 MiB, each made, mapped and given access, are 2.25 by the
/// table, a fifth less: what PyTorch does between its calls is not in it.
#[test]
fn h200_reproduces_expandable_within_a_fifth() {
    let setup = Setup { costs: CostTable::H200, ..setup(false) };
    let done = run(PoolName::Expandable, &growth(1024), None, &setup);
    let millis = millis_per_gib(&done);
    println!("expandable: {millis:.2} ms a GiB, 2.8 measured, {} pages", done.calls.of(Call::Create));
    assert!((millis / 2.8 - 1.0).abs() <= 0.2, "{millis}");
}

/// 8 to 13 ms a GiB were measured, with a daemon that made chunks of 16 MiB. 100 GiB in chunks of
/// 32 MiB took 11.1 ms a GiB, for which the table has 6.3.
#[test]
fn h200_reproduces_release_9c968ab() {
    let of = |chunk_mib| {
        let done = run(PoolName::Stitchd, &growth(1024), None, &uniform(chunk_mib));
        assert_eq!(done.calls.of(Call::Create), GIB * 1024 / chunk_mib);
        millis_per_gib(&done)
    };
    let [small, measured, large] = [2, 16, 32].map(of);
    println!("chunks of 2, 16 and 32 MiB: {small:.1}, {measured:.1} and {large:.1} ms a GiB");
    assert!((8.0..=13.0).contains(&measured), "{measured}");
    // 0.2 ms a chunk, as src/DESIGN.md has it: 0.19 by the table.
    assert!((90.0..=105.0).contains(&small), "{small}");
}

/// What a job without a plan waits for on its way to 64 GiB, beside expandable segments: on a device
/// without an end, and on one of 80 GiB.
#[test]
fn h200_growth_is_cheap_in_requests_of_any_size() {
    for capacity in [None, Some(Bytes::gib(80))] {
        let mut setup = Setup { costs: CostTable::H200, ..setup(false) };
        setup.capacity = capacity;
        let seconds = |pool, trace: &Trace| run(pool, trace, None, &setup).calls.seconds;
        for request_mib in [1024, 256, 100, 64, 20, 16, 2] {
            let trace = growth(request_mib);
            let [ours, expandable] = [PoolName::Stitchd, PoolName::Expandable].map(|pool| seconds(pool, &trace));
            println!(
                "{capacity:?}, requests of {request_mib} MiB: {ours:.3} s, {expandable:.3} s with expandable segments"
            );
            assert!(ours <= 1.5 * expandable, "{request_mib}: {ours} and {expandable}");
        }
    }
}
