//! What one stream frees and another may still use.

use super::*;

#[test]
fn bytes_recorded_on_a_busy_stream_wait_for_it() {
    let bench = Bench::new(16, RuntimeConfig::default());
    let device = DeviceId(0);
    let busy = bench.host.create_stream(device).unwrap();
    let block = bench.alloc(Bytes::mib(16)).unwrap();
    bench.runtime.record_stream(block, busy);
    bench.runtime.record_stream(DeviceAddress::new(4096), busy);
    let stall = bench.host.stall(device, busy);
    bench.free(block);
    assert_eq!(bench.runtime.free(block, STREAM), Err(NotLive(block)));
    // A request that could only be served by these bytes waits for the stream, as cudaFree would.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bench.alloc(Bytes::mib(16)).unwrap());
        assert!(!waiting.is_finished());
        drop(stall);
        assert_eq!(waiting.join().unwrap(), block);
    });
}

#[test]
fn bytes_recorded_on_their_own_stream_do_not_wait() {
    for (plan_of, bytes) in [(None, Bytes::mib(16)), (Some(plan()), Bytes::mib(3))] {
        let bench = Bench::new(16, RuntimeConfig::default());
        plan_of.iter().for_each(|plan| bench.runtime.install_plan(plan).unwrap());
        let block = bench.alloc(bytes).unwrap();
        bench.runtime.record_stream(block, STREAM);
        let stall = bench.host.stall(DeviceId(0), STREAM);
        bench.free(block);
        bench.runtime.mark_iteration();
        assert_eq!(bench.alloc(bytes).unwrap(), block);
        drop(stall);
    }
}

/// A job that knows one stream more.
fn bench_with_stream() -> (Bench, StreamId) {
    let bench = Bench::new(64, RuntimeConfig::default());
    let stream = bench.host.create_stream(DeviceId(0)).unwrap();
    (bench, stream)
}

#[test]
fn what_is_freed_on_another_stream_than_its_own_waits_for_that_in_every_pool() {
    let private = PrivatePoolId(7, 1);
    for (plan_of, bytes) in [(None, Bytes::kib(4)), (Some(plan()), Bytes::mib(3)), (Some(plan()), Bytes::mib(5))] {
        let (bench, busy) = bench_with_stream();
        let stall = bench.host.stall(DeviceId(0), busy);
        plan_of.iter().for_each(|plan| bench.runtime.install_plan(plan).unwrap());
        let block = bench.alloc(bytes).unwrap();
        bench.runtime.free(block, busy).unwrap();
        bench.runtime.invariants().unwrap();
        assert_eq!(bench.runtime.free(block, STREAM), Err(NotLive(block)), "freed twice");
        bench.runtime.mark_iteration();
        let other = bench.alloc(bytes).unwrap();
        assert_ne!(other, block, "the other stream may still write there");
        drop(stall);
        bench.runtime.synchronize().unwrap();
        assert_eq!(bench.runtime.stats().live_allocations, 1);
    }
    let (bench, busy) = bench_with_stream();
    let stall = bench.host.stall(DeviceId(0), busy);
    bench.runtime.begin_private(private);
    let of_private = || bench.runtime.alloc_private(private, &Request::of(Bytes::mib(1))).unwrap();
    let block = of_private();
    bench.runtime.end_private(private);
    bench.runtime.free(block, busy).unwrap();
    assert_ne!(of_private(), block);
    drop(stall);
    bench.runtime.synchronize().unwrap();
    assert_eq!(of_private(), block);
}

#[test]
fn a_slab_that_another_stream_has_emptied_is_still_its_own_streams() {
    let (bench, busy) = bench_with_stream();
    // Two slabs of which one allocation each is left.
    let blocks: Vec<DeviceAddress> = (0..4).map(|_| bench.alloc(Bytes::mib(1)).unwrap()).collect();
    let stall = bench.host.stall(DeviceId(0), STREAM);
    blocks[1..].iter().for_each(|block| bench.free(*block));
    bench.runtime.free(blocks[0], busy).unwrap();
    let other = bench.alloc_on(Bytes::mib(2), busy).unwrap();
    assert!(!blocks.contains(&other), "its own stream may still write there");
    drop(stall);
    bench.runtime.synchronize().unwrap();
}

#[test]
fn a_request_whose_place_waits_for_a_stream_has_it_as_soon_as_that_has_passed() {
    let (bench, busy) = bench_with_stream();
    let stall = bench.host.stall(DeviceId(0), busy);
    bench.runtime.install_plan(&plan()).unwrap();
    let iteration = || [Bytes::mib(3), Bytes::kib(1)].map(|bytes| bench.alloc(bytes).unwrap());
    let first = iteration();
    first.iter().for_each(|block| bench.runtime.record_stream(*block, busy));
    first.iter().for_each(|block| bench.free(*block));
    let second = iteration();
    assert!(second.iter().all(|block| !first.contains(block)), "the stream has not passed");
    assert_eq!(bench.runtime.stats().planned.blocked, 2);
    second.iter().for_each(|block| bench.free(*block));
    bench.runtime.mark_iteration();
    drop(stall);
    // Whether it has passed is asked when a request needs that.
    assert_eq!(iteration(), first);
    assert_eq!(bench.runtime.stats().planned.blocked, 2);
}

#[test]
fn bytes_of_a_stream_that_cannot_be_asked_nor_waited_for_are_nobodys_until_it_can() {
    let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(64)])));
    let faulty = Faults::around(host.clone());
    let Bench { runtime, .. } = Bench::over(faulty.clone(), 4, RuntimeConfig::default());
    let busy = host.create_stream(DeviceId(0)).unwrap();
    let block = runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    runtime.record_stream(block, busy);
    let stall = host.stall(DeviceId(0), busy);
    faulty.layer().fail_always(&[Call::Event, Call::Synchronize]);
    runtime.free(block, STREAM).unwrap();
    assert_eq!(runtime.free(block, STREAM), Err(NotLive(block)));
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap_err();
    faulty.layer().fail_always(&[Call::Synchronize]);
    // Now the stream can be asked, and has not passed.
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap_err();
    drop(stall);
    assert_eq!(runtime.alloc(&Request::of(Bytes::mib(4))).unwrap(), block);
}

/// Found by `tests/model`: the record outlived the allocation, and a second free succeeded.
#[test]
fn a_stream_that_is_recorded_after_the_free_is_ignored() {
    let bench = Bench::new(16, RuntimeConfig::default());
    let device = DeviceId(0);
    let busy = bench.host.create_stream(device).unwrap();
    let block = bench.alloc(Bytes::mib(4)).unwrap();
    bench.runtime.record_stream(block, busy);
    let stall = bench.host.stall(device, busy);
    bench.free(block);
    bench.runtime.record_stream(block, busy);
    drop(stall);
    bench.runtime.synchronize().unwrap();
    assert_eq!(bench.runtime.free(block, STREAM), Err(NotLive(block)));
    assert_eq!(bench.runtime.stats().live, Bytes::ZERO);
}

#[test]
fn chunks_of_one_stream_move_to_another_when_memory_is_out() {
    let bench = Bench::new(32, RuntimeConfig::default());
    let device = DeviceId(0);
    let (one, two) = (bench.host.create_stream(device).unwrap(), bench.host.create_stream(device).unwrap());
    let block = bench.alloc_on(Bytes::mib(16), one).unwrap();
    let stall = bench.host.stall(device, one);
    bench.runtime.free(block, one).unwrap();
    let other = bench.alloc_on(Bytes::mib(16), two).unwrap();
    assert_ne!(other, block, "the first stream may still write there");
    bench.runtime.free(other, two).unwrap();
    drop(stall);
    assert_eq!(bench.alloc_on(Bytes::mib(16), two), Ok(other));
    // There is no more: the first stream's chunks move, and unmapping waits for it.
    assert!(bench.alloc_on(Bytes::mib(16), two).is_ok());
    assert_eq!(bench.runtime.stats().held, Bytes::mib(32));
}

#[test]
fn a_private_pool_that_is_released_before_it_is_ended_gives_its_memory_back() {
    let bench = Bench::new(16, RuntimeConfig::default());
    let id = PrivatePoolId(7, 1);
    bench.runtime.begin_private(id);
    let block = bench.runtime.alloc_private(id, &Request::of(Bytes::mib(4))).unwrap();
    bench.free(block);
    assert!(bench.runtime.release_private(id) && bench.runtime.end_private(id));
    assert_eq!(bench.runtime.stats().held, Bytes::ZERO);
}
