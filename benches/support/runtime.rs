//! A runtime without a daemon, over simulated memory.

use std::sync::Arc;

use stitchd::clock::SystemClock;
use stitchd::driver::Driver;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::DeviceId;
use stitchd::ladder::Ladder;
use stitchd::memory::Device;
use stitchd::runtime::{Counters, Runtime, RuntimeConfig};
use stitchd::session::PrivateSource;
use stitchd::store::Store;
use stitchd::units::Bytes;

pub(crate) fn runtime() -> Runtime {
    const DEVICE: DeviceId = DeviceId(0);
    let driver = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(141)])));
    let device = Device::open(driver as Arc<dyn Driver>, DEVICE).unwrap();
    let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
    let source = Arc::new(PrivateSource::new(store, DEVICE, Ladder::standard()));
    Runtime::new(device, source, Arc::new(SystemClock::new()), RuntimeConfig::default(), Counters::private())
}
