//! What mappings and pools owe to the drivers' rules, shown on the drivers: when something is unmapped, and when its memory returns.

use std::any::Any;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use stitchd::clock::SystemClock;
use stitchd::driver::Driver;
use stitchd::driver::gpu::GpuKind;
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::memory::{Chunk, Device, Mapping, Quarantine};
use stitchd::pool::Request;
use stitchd::runtime::{Counters, Runtime, RuntimeConfig};
use stitchd::session::PrivateSource;
use stitchd::store::Store;
use stitchd::units::{Bytes, Span};

use crate::stall::Stalls;
use crate::standin::Machine;
use crate::{conf, host, open, sim};

const DEVICE: DeviceId = DeviceId(0);
/// So long nothing happens that must not happen yet.
const MOMENT: Duration = Duration::from_millis(50);

/// Unmaps a part of a mapping, and then the rest, while a stream of the device is busy: neither comes back before the stream has passed, and until then all is mapped.
fn unmaps_behind(driver: Arc<dyn Driver>, mappings: &(dyn Fn() -> usize + Sync), stall: &dyn Fn() -> Box<dyn Any>) {
    let device = Device::open(driver, DEVICE).unwrap();
    let chunks: Vec<_> =
        (1..=3).map(|n| Arc::new(Chunk::create(&device, ChunkId(n), Bytes::mib(2)).unwrap())).collect();
    let mut mapping = Mapping::stitch(&chunks).unwrap();
    let behind = |left: usize, step: &mut (dyn FnMut() + Send)| {
        let before = mappings();
        let busy = stall();
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                step();
                done.send(()).unwrap();
            });
            let early = is_done.recv_timeout(MOMENT);
            let mapped = mappings();
            // Whatever came of it, the thread must end.
            drop(busy);
            assert!(early.is_err(), "it was unmapped while a stream was busy");
            assert_eq!(mapped, before);
            is_done.recv().unwrap();
        });
        assert_eq!(mappings(), left);
    };
    let first = Span::new(mapping.span().start(), Bytes::mib(2)).unwrap();
    behind(2, &mut || drop(mapping.take(first).unwrap()));
    let mut mapping = Some(mapping);
    behind(0, &mut || drop(mapping.take()));
    assert_eq!(device.quarantine(), Quarantine::default());
}

#[test]
fn nothing_is_unmapped_before_the_streams_of_its_device_have_passed() {
    let stream = StreamId(0);
    let sim = sim(true);
    unmaps_behind(sim.clone(), &|| sim.counts().1, &|| Box::new(sim.stall(DEVICE, stream)));
    let host = host(true);
    unmaps_behind(host.clone(), &|| host.counts().1, &|| Box::new(host.stall(DEVICE, stream)));
    for kind in [GpuKind::Cuda, GpuKind::Hip] {
        let machine = Machine::new(kind, &conf(""));
        let gpu = Arc::new(open(&machine, kind));
        let stalls = Stalls::of(&machine);
        unmaps_behind(gpu.clone(), &|| gpu.counts().1, &|| stalls.stall(DEVICE, stream));
    }
}

#[test]
fn what_is_trimmed_returns_also_where_memory_stays_with_its_addresses() {
    for (kind, quirks, is_whole) in
        [(GpuKind::Cuda, "", false), (GpuKind::Hip, "quirks = memory_stays_with_addresses", true)]
    {
        let machine = Machine::new(kind, &conf(quirks));
        let driver = Arc::new(open(&machine, kind));
        let device = Device::open(driver.clone(), DEVICE).unwrap();
        assert_eq!(device.capabilities().memory_stays_with_addresses, is_whole);
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(store, DEVICE, Ladder::standard()));
        let clock = Arc::new(SystemClock::new());
        let runtime = Runtime::new(device, source, clock, RuntimeConfig::default(), Counters::private());
        let free = || driver.memory(DEVICE).unwrap().free;
        let all = free();
        // Two ranges; of the first one half goes, and of the second all.
        let whole = runtime.alloc(&Request::of(Bytes::mib(8))).unwrap();
        let other = runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
        runtime.free(whole, StreamId::DEFAULT).unwrap();
        let half = runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
        assert_eq!(half, whole);
        runtime.free(other, StreamId::DEFAULT).unwrap();
        let before = free();
        let given = runtime.trim(Bytes::MAX);
        assert_eq!(given, Bytes::mib(if is_whole { 4 } else { 8 }));
        assert_eq!(free() - before, given, "what was given back is there");
        runtime.invariants().unwrap();
        runtime.free(half, StreamId::DEFAULT).unwrap();
        runtime.trim(Bytes::MAX);
        assert_eq!((free(), runtime.stats().held), (all, Bytes::ZERO));
    }
}
