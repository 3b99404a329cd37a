//! What a runtime has of the process's own memory for each live block, by the pool that serves it, and a daemon for each chunk. What the simulated driver keeps of a chunk is in it.
//!
//! The floor is a hash table of addresses with a size and a stream each: what anybody keeps who is to take a block back.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

#[path = "../tests/fuzz/allocations.rs"]
mod allocations;
#[path = "support/event.rs"]
mod made;
#[path = "support/runtime.rs"]
mod subject;

use std::sync::Arc;

use allocations::{Counting, peak_of};
use made::event;
use stitchd::clock::SystemClock;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Access, Driver, Handle};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::ladder::Part;
use stitchd::ledger::{Holder, Terms};
use stitchd::memory::Device;
use stitchd::plan::Plan;
use stitchd::pool::{AddressMap, Request};
use stitchd::runtime::Runtime;
use stitchd::steward::{Answer, Ask, Steward};
use stitchd::store::Store;
use stitchd::trace::{EventKind, Trace};
use stitchd::units::{Bytes, DeviceAddress, Place as _, Span};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes for each block.
struct Row {
    name: &'static str,
    blocks: usize,
    left: f64,
    /// The most that there was at one time, while the blocks came.
    most: f64,
    floor: f64,
}

fn filled(runtime: &Runtime, count: usize, bytes: Bytes) {
    for _ in 0..count {
        runtime.alloc(&Request::of(bytes)).unwrap();
    }
}

/// The simulated driver alone, with as many chunks, mapped in the same ranges. On a device this is the vendor's library's, and nobody sees it.
fn mapped(count: usize, chunks: u64) -> SimDriver {
    let device = DeviceId(0);
    let driver = SimDriver::new(SimOptions::with_devices(&[Bytes::gib(141)]));
    for _ in 0..count {
        let len = Bytes::mib(2 * chunks);
        let start = driver.reserve(device, len, Bytes::mib(2)).unwrap();
        for at in 0..chunks {
            let handle = driver.create(device, Bytes::mib(2)).unwrap();
            driver.map(start.checked_add(Bytes::mib(2 * at)).unwrap(), handle).unwrap();
        }
        driver.set_access(Span::new(start, len).unwrap(), device, Access::ReadWrite).unwrap();
    }
    driver
}

fn measure<T>(name: &'static str, blocks: usize, make: impl FnOnce() -> T) -> Row {
    let each = |bytes: isize| bytes as f64 / blocks as f64;
    let before = Counting::now();
    let table: AddressMap<(Bytes, StreamId)> =
        (0..blocks as u64).map(|at| (DeviceAddress::new(512 * at), (Bytes::new(at), StreamId::DEFAULT))).collect();
    let floor = each(Counting::now() - before);
    drop(table);
    let before = Counting::now();
    let (made, most) = peak_of(make);
    let left = each(Counting::now() - before);
    drop(made);
    Row { name, blocks, left, most: each(most as isize), floor }
}

/// A job with so many blocks live at once.
fn plan(count: usize, bytes: Bytes) -> Plan {
    let mut events = Vec::new();
    for iteration in 0..2 {
        for (kind, bytes) in [(EventKind::Alloc, bytes), (EventKind::Free, Bytes::ZERO)] {
            for at in 0..count {
                events.push(event(events.len(), kind, (iteration * count + at) as u64, bytes, iteration as u32));
            }
        }
    }
    Plan::from_trace(&Trace { events, modules: vec![String::new()] }, 1).unwrap()
}

fn main() {
    let mut rows = Vec::new();
    const PLANNED: usize = 100_000;
    let plan = plan(PLANNED, Bytes::kib(64));
    rows.push(measure("block of a plan", PLANNED, || {
        let runtime = subject::runtime();
        runtime.install_plan(&plan).unwrap();
        filled(&runtime, PLANNED, Bytes::kib(64));
        runtime
    }));
    const SMALL: usize = 500_000;
    rows.push(measure("small block, of 64 KiB", SMALL, || {
        let runtime = subject::runtime();
        filled(&runtime, SMALL, Bytes::kib(64));
        runtime
    }));
    for (name, driver_name, count, chunks) in [
        ("stitched block, of one chunk", "  of that the simulated driver", 50_000, 1),
        ("stitched block, of ten chunks", "  of that the simulated driver", 5_000, 10),
    ] {
        rows.push(measure(name, count, || {
            let runtime = subject::runtime();
            filled(&runtime, count, Bytes::mib(2 * chunks));
            runtime
        }));
        rows.push(measure(driver_name, count, || mapped(count, chunks)));
    }
    const LEASED: u64 = 100_000;
    rows.push(measure("chunk of a daemon, of 1,000 sessions", LEASED as usize, || leased(LEASED, 1_000)));
    rows.push(measure("  of that the simulated driver", LEASED as usize, || created(LEASED)));
    print(&rows);
}

/// A daemon's ledger and store, all of whose chunks are leased. The descriptor of each, which a daemon has, too, is the kernel's.
fn leased(chunks: u64, sessions: u64) -> Arc<Steward> {
    let device = Device::open(Arc::new(node()) as Arc<dyn Driver>, DeviceId(0)).unwrap();
    let steward = Steward::inline(Store::new(vec![device]), Arc::new(SystemClock::new())).unwrap();
    for _ in 0..sessions {
        let session = steward.open(Terms::new(Bytes::gib(400), 0)).unwrap();
        let parts = vec![Part { len: Bytes::mib(2), count: chunks / sessions }];
        let ask =
            Ask { holder: Holder::Session(session), device: DeviceId(0), parts, plan: None, wait_ms: 0, waited_ms: 0 };
        assert!(matches!(steward.acquire_now(ask), Ok(Answer::Granted(_))));
    }
    steward
}

fn node() -> SimDriver {
    SimDriver::new(SimOptions::with_devices(&[Bytes::gib(400)]))
}

/// The simulated driver alone with as many chunks, and the list of them.
fn created(chunks: u64) -> (SimDriver, Vec<Handle>) {
    let driver = node();
    let handles = (0..chunks).map(|_| driver.create(DeviceId(0), Bytes::mib(2)).unwrap()).collect();
    (driver, handles)
}

fn print(rows: &[Row]) {
    if std::env::args().any(|argument| argument == "--json") {
        let rows: Vec<_> = rows
            .iter()
            .map(|Row { name, blocks, left, most, floor }| {
                serde_json::json!({ "name": name, "blocks": blocks, "bytes": left, "most_bytes": most, "floor_bytes": floor })
            })
            .collect();
        return println!("{}", serde_json::json!({ "measurements": rows }));
    }
    println!("{:<32} {:>8} {:>12} {:>12} {:>8}", "bytes for each block", "blocks", "live", "while made", "floor");
    for Row { name, blocks, left, most, floor } in rows {
        println!("{name:<32} {blocks:>8} {left:>12.1} {most:>12.1} {floor:>8.1}");
    }
}
