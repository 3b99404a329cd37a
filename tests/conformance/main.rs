//! The driver conformance suite, against every driver and decorator that this build has.

use std::any::Any;
use std::sync::Arc;

use stitchd::clock::SystemClock;
use stitchd::driver::Driver;
use stitchd::driver::conformance::{self, Outcome, Subject};
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::Faults;
use stitchd::driver::layers::limited::{Limiter, Limits};
use stitchd::driver::layers::metered::Meter;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::units::Bytes;

const DEVICES: [Bytes; 2] = [Bytes::gib(80), Bytes::mib(64)];

/// Runs the suite on both devices; `skips` is how many checks may say that the driver cannot do it.
fn check(driver: &dyn Driver, stall: impl Fn(DeviceId, StreamId) -> Box<dyn Any>, skips: usize) {
    for device in [DeviceId(0), DeviceId(1)] {
        let stall = |stream| stall(device, stream);
        let outcomes = conformance::run(&Subject { driver, device, stall: Some(&stall) });
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
        check(&*driver, |device, stream| Box::new(driver.stall(device, stream)), 0);
        assert_eq!(driver.counts(), (0, 0, 0));
    }
}

#[test]
fn sim_driver_conforms() {
    for alias in [true, false] {
        let driver = sim(alias);
        // It has no contents: zeroed memory and read-only mappings cannot be shown.
        check(&*driver, |device, stream| Box::new(driver.stall(device, stream)), 2);
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
    check(&*driver, |device, stream| Box::new(inner.stall(device, stream)), 0);
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
