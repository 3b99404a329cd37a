//! The driver conformance suite, against every driver and decorator that this build has.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod alone;
mod mappings;
mod stall;
#[path = "../support/standin.rs"]
mod standin;
mod standin_machine;

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use stall::Stalls;
use standin::Machine;
use stitchd::clock::SystemClock;
use stitchd::driver::conformance::{self, Outcome, Subject};
use stitchd::driver::gpu::{GpuDriver, GpuKind, OpenError};
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::Faults;
use stitchd::driver::layers::limited::{Limiter, Limits};
use stitchd::driver::layers::metered::Meter;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{self, Access, Driver, DriverError, DriverName, LibraryPlace};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::units::{Bytes, Place as _, Span};

const DEVICES: [Bytes; 2] = [Bytes::gib(80), Bytes::mib(64)];

/// Makes a stream of a device busy.
type Stall<'a> = &'a dyn Fn(DeviceId, StreamId) -> Box<dyn Any>;

/// Runs the suite on both devices; `skips` is how many checks may say that the driver cannot do it.
fn check(driver: &dyn Driver, stall: Option<Stall<'_>>, skips: usize) {
    for device in [DeviceId(0), DeviceId(1)] {
        let on_device = stall.map(|stall| move |stream| stall(device, stream));
        let stall = on_device.as_ref().map(|stall| stall as &dyn Fn(StreamId) -> Box<dyn Any>);
        let outcomes = conformance::run(&Subject { driver, device, stall });
        assert_eq!(outcomes.len(), conformance::CHECKS.len());
        let failed: Vec<_> = outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Failed(_))).collect();
        assert!(failed.is_empty(), "{} breaks: {failed:#?}", driver.name());
        let skipped = outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Skipped(_))).count();
        assert_eq!(skipped, skips, "{} skips: {outcomes:#?}", driver.name());
    }
}

fn host(alias: bool) -> Arc<HostDriver> {
    Arc::new(HostDriver::new(HostOptions { alias, ..HostOptions::with_devices(&DEVICES) }))
}

fn sim(alias: bool) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimOptions { alias, ..SimOptions::with_devices(&DEVICES) }))
}

#[test]
fn host_driver_conforms() {
    for alias in [true, false] {
        let driver = host(alias);
        check(&*driver, Some(&|device, stream| Box::new(driver.stall(device, stream))), 0);
        assert_eq!(driver.counts(), (0, 0, 0));
    }
}

#[test]
fn sim_driver_conforms() {
    for alias in [true, false] {
        let driver = sim(alias);
        // It has no contents: zeroed memory and read-only mappings cannot be shown. Nor has it a vendor's handles.
        check(&*driver, Some(&|device, stream| Box::new(driver.stall(device, stream))), 3);
        assert_eq!(driver.counts(), (0, 0, 0));
        assert!(driver.modelled_seconds() > 0.0);
    }
}

#[test]
fn decorated_drivers_conform() {
    let inner = host(true);
    let driver: Arc<dyn Driver> = inner.clone();
    let driver =
        Faults::around(Limiter::around(Meter::around(driver, Arc::new(SystemClock::new())), Limits::default()));
    check(&*driver, Some(&|device, stream| Box::new(inner.stall(device, stream))), 0);
}

/// The suite itself must be able to fail: a driver whose maps all fail breaks it.
#[test]
fn a_broken_driver_does_not_conform() {
    let inner = host(true);
    let driver = Faults::around(inner.clone());
    driver.layer().fail_always(&[stitchd::driver::Call::Map]);
    let outcomes = conformance::run(&Subject { driver: &*driver, device: DeviceId(0), stall: None });
    assert!(outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Failed(_))));
}

/// Two devices, as the other drivers have them.
fn conf(more: &str) -> String {
    format!("devices = {}, {}\n{more}", DEVICES[0].get(), DEVICES[1].get())
}

fn open(machine: &Machine, kind: GpuKind) -> GpuDriver {
    GpuDriver::open_library(kind, machine.library()).unwrap()
}

#[test]
fn gpu_drivers_conform_on_the_stand_in() {
    // Everything that is known to be wrong with HIP, at once. How setting access fails is told in two ways.
    let all = "unmap_run_breaks_free, ignores_alignment, map_lies, fd_per_handle";
    let all = ["access_run_fails", "access_sums_from_first"].map(|access| format!("quirks = {all}, {access}"));
    let old = "version = 60443482";
    for (kind, more) in [
        (GpuKind::Cuda, ""),
        (GpuKind::Cuda, "context_bytes = 20971520"),
        (GpuKind::Cuda, "peers = none\nexport_slots = 4\nmappings = 8"),
        (GpuKind::Cuda, "rdma = 1\nfabric = 1\nmps = 1\nmig = 1"),
        (GpuKind::Cuda, "granularity = 2097152, 4194304"),
        (GpuKind::Hip, "granularity = 4096"),
        (GpuKind::Hip, "granularity = 65536, 4096\nquirks = memory_stays_with_addresses"),
        (GpuKind::Hip, ""),
        (GpuKind::Hip, "peers = none"),
        (GpuKind::Hip, old),
        (GpuKind::Hip, &all[0]),
        (GpuKind::Hip, &format!("{old}\n{}", all[0])),
        (GpuKind::Hip, &format!("{old}\n{}", all[1])),
    ] {
        let machine = Machine::new(kind, &conf(more));
        let driver = open(&machine, kind);
        let stalls = Stalls::of(&machine);
        // Memory that is not known to be cleared, and access that the importer chooses.
        check(&driver, Some(&|device, stream| stalls.stall(device, stream)), 2);
        assert_eq!(driver.counts(), (0, 0, 0));
        // Its contexts go with it; the machine looks who is left when it is asked.
        drop(driver);
        let another = open(&machine, kind);
        DEVICES.iter().zip(0..).for_each(|(bytes, at)| assert_eq!(another.memory(DeviceId(at)).unwrap().free, *bytes));
        assert_eq!(machine.chunk_files(), 0, "every byte came back");
    }
}

#[test]
fn a_gpu_driver_that_only_holds_chunks_takes_no_context() {
    let machine = Machine::new(GpuKind::Cuda, &conf("context_bytes = 524288000"));
    let driver = open(&machine, GpuKind::Cuda);
    let device = DeviceId(0);
    let before = driver.memory(device).unwrap().free;
    let len = Bytes::mib(32);
    let handle = driver.create(device, len).unwrap();
    let fd = driver.export(handle).unwrap();
    let imported = driver.import(device, fd, len).unwrap();
    assert_eq!(before - driver.memory(device).unwrap().free, len, "a chunk takes its bytes and nothing beside them");
    driver.synchronize(device).unwrap();
    assert_eq!(before - driver.memory(device).unwrap().free, len + Bytes::mib(500), "now there is a context");
    driver.release(handle).unwrap();
    driver.release(imported).unwrap();
}

/// Three chunks side by side, used and taken apart; each call is tried twice. Says whether one failed.
fn use_three_chunks(driver: &GpuDriver) -> bool {
    let (device, granule) = (DeviceId(0), Bytes::mib(2));
    let failed = std::cell::Cell::new(false);
    fn twice<T>(failed: &std::cell::Cell<bool>, mut call: impl FnMut() -> Result<T, DriverError>) -> T {
        call().unwrap_or_else(|_| {
            failed.set(true);
            call().unwrap()
        })
    }
    let at = twice(&failed, || driver.reserve(device, Bytes::mib(6), granule));
    let span = |from: u64, chunks: u64| {
        Span::new(at.checked_add(Bytes::mib(2 * from)).unwrap(), Bytes::mib(2 * chunks)).unwrap()
    };
    let mut handles = Vec::new();
    for place in 0..3 {
        let made = twice(&failed, || driver.create(device, granule));
        let fd = twice(&failed, || driver.export(made));
        handles.push(twice(&failed, || driver.import(device, fd.try_clone().unwrap(), granule)));
        twice(&failed, || driver.release(made));
        twice(&failed, || driver.map(span(place, 1).start(), handles[place as usize]));
    }
    twice(&failed, || driver.set_access(span(0, 3), device, Access::ReadWrite));
    let border = span(1, 1).start();
    twice(&failed, || driver.write(border, &[1, 2, 3]));
    let unmapped = driver.unmap(span(0, 3));
    if unmapped.is_err() {
        failed.set(true);
        // A failed unmap has changed nothing: what was written is there, and the next try works.
        let mut bytes = [0; 3];
        driver.read(border, &mut bytes).unwrap();
        assert_eq!((bytes, driver.counts()), ([1, 2, 3], (3, 3, 1)));
        driver.unmap(span(0, 3)).unwrap();
    }
    twice(&failed, || driver.unreserve(span(0, 3)));
    handles.into_iter().for_each(|handle| twice(&failed, || driver.release(handle)));
    failed.get()
}

#[test]
fn whatever_library_call_fails_once_nothing_is_lost_and_the_next_try_works() {
    for kind in [GpuKind::Cuda, GpuKind::Hip] {
        let mut failures = 0;
        // More than there are calls; HIP's access is tried again by the driver itself, a failure that nobody sees.
        for n in 1..=45 {
            let machine = Machine::new(kind, &conf(&format!("fail = {n}")));
            let driver = open(&machine, kind);
            failures += u64::from(use_three_chunks(&driver));
            assert_eq!(driver.counts(), (0, 0, 0), "call {n} of {kind:?} failed");
            assert_eq!(driver.memory(DeviceId(0)).unwrap().free, DEVICES[0], "call {n} of {kind:?} failed");
        }
        assert!((20..40).contains(&failures), "{failures} calls of {kind:?} failed");
    }
}

#[test]
fn auto_is_the_gpus_driver_where_there_is_one_and_memory_of_the_machine_where_there_is_none() {
    let totals = [Bytes::mib(64)];
    let auto = |library: &Path| driver::open(DriverName::Auto, &totals, &LibraryPlace::at(library));
    let machine = Machine::new(GpuKind::Cuda, "devices = 268435456");
    assert_eq!(auto(machine.library()).unwrap().name(), "cuda");
    let none = auto(Path::new("/nowhere/libcuda.so.1")).unwrap();
    assert_eq!((none.name(), none.devices()[0].total), ("host", totals[0]));
    // A driver that is there and cannot be used: its memory is what was meant.
    let old = Machine::new(GpuKind::Cuda, "version = 10020");
    assert!(matches!(auto(old.library()), Err(OpenError::TooOld { .. })));
}

#[test]
fn a_machine_without_the_library_or_with_an_old_one_is_told_what_to_do() {
    let nowhere = GpuDriver::open_library(GpuKind::Cuda, Path::new("/nowhere/libcuda.so.1")).unwrap_err();
    assert!(matches!(nowhere, OpenError::Missing { .. }), "{nowhere:?}");
    assert!(nowhere.to_string().contains("there is no cuda driver on this machine"), "{nowhere}");
    let old = Machine::new(GpuKind::Cuda, "version = 10020");
    let old = GpuDriver::open_library(GpuKind::Cuda, old.library()).unwrap_err();
    assert!(matches!(old, OpenError::TooOld { .. }) && old.to_string().contains("10020"), "{old}");
    // A library that is another vendor's has none of the functions.
    let other = Machine::new(GpuKind::Hip, "");
    let other = GpuDriver::open_library(GpuKind::Cuda, other.library()).unwrap_err();
    assert!(other.to_string().contains("has no cuInit") || other.to_string().contains("has no cuDevice"), "{other}");
}
