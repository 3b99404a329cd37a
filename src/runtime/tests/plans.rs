//! Requests of a job with a plan, and plans that cannot be installed.

use super::*;

#[test]
fn a_request_goes_to_the_plan_and_else_to_the_page_pool() {
    let bench = Bench::new(64, RuntimeConfig::default());
    bench.runtime.install_plan(&plan()).unwrap();
    let planned = bench.alloc(Bytes::mib(3)).unwrap();
    let again = bench.alloc(Bytes::mib(3)).unwrap();
    let small = bench.alloc(Bytes::kib(1)).unwrap();
    let unplanned = bench.alloc(Bytes::kib(7)).unwrap();
    let stats = bench.runtime.stats();
    assert_eq!((stats.served.planned, stats.served.pool), (2, 2));
    assert_eq!((stats.static_pool, stats.live_allocations), (Bytes::mib(4), 4));
    assert_eq!(stats.live, Bytes::mib(6) + Bytes::kib(8));
    for address in [planned, again, small, unplanned] {
        bench.free(address);
        assert_eq!(bench.runtime.free(address, STREAM), Err(NotLive(address)));
    }
    let stats = bench.runtime.stats();
    assert_eq!((stats.live, stats.live_allocations, stats.peak_live), (Bytes::ZERO, 0, Bytes::mib(6) + Bytes::kib(8)));
}

#[test]
fn a_plan_whose_pool_cannot_be_had_is_refused_and_the_job_runs_without() {
    let bench = Bench::new(2, RuntimeConfig::default());
    assert!(matches!(bench.runtime.install_plan(&plan()), Err(PlanInstallError::Source { .. })));
    bench.alloc(Bytes::kib(1)).unwrap();
    let bench = Bench::new(64, RuntimeConfig::default());
    bench.runtime.install_plan(&plan()).unwrap();
    assert_eq!(bench.runtime.install_plan(&plan()), Err(PlanInstallError::Installed));
}

#[test]
fn a_request_whose_place_is_partly_taken_has_the_rest_of_it() {
    const LARGE: Bytes = Bytes::mib(64);
    let bench = Bench::new(128, RuntimeConfig::default());
    let mut entries = vec![entry(Bytes::mib(1), 0, 0, 1), entry(LARGE, 0, 2, 3)];
    (entries[0].again, entries[1].again) = (Some(Lifetime::new(10, 11)), Some(Lifetime::new(12, 13)));
    bench.runtime.install_plan(&Plan { pool_len: LARGE, entries, ..Plan::default() }).unwrap();
    let is_inside =
        |address: DeviceAddress| bench.runtime.lock().planned.as_ref().unwrap().pool.span().contains(address);
    let small = bench.alloc(Bytes::mib(1)).unwrap();
    let host = &bench.host;
    host.write(small, &[7]).unwrap();
    // The plan has the small one gone by now, and it is live: a new chunk continues the rest.
    let large = bench.alloc(LARGE).unwrap();
    assert!(is_inside(small) && is_inside(large));
    let stats = bench.runtime.stats();
    assert_eq!((stats.held, stats.live_allocations, stats.served.pool), (Bytes::mib(66), 2, 1));
    host.fill(DeviceId(0), STREAM, Span::new(large, LARGE).unwrap(), 9).unwrap();
    let mut byte = [0];
    host.read(small, &mut byte).unwrap();
    assert_eq!(byte, [7], "the two overlap");
    assert_eq!(bench.runtime.len_of(large), Some(LARGE));
    let pieces = bench.runtime.manifest(large).unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.span.len()).sum::<Bytes>(), LARGE);
    let inside = large.checked_add(Bytes::mib(40)).unwrap();
    assert_eq!(bench.runtime.block_of(inside).map(|found| found.span), Span::new(large, LARGE));
    let segments = bench.runtime.segments();
    assert_eq!(segments.iter().map(|segment| segment.span.len()).sum::<Bytes>(), Bytes::mib(66));
    bench.runtime.invariants().unwrap();
    bench.free(large);
    assert_eq!(bench.runtime.free(large, STREAM), Err(NotLive(large)));
    // Once more, the same; and nothing is mapped for it.
    let before = bench.runtime.device.mapped();
    bench.runtime.mark_iteration();
    let again = bench.alloc(LARGE).unwrap();
    assert_eq!((again, bench.runtime.device.mapped()), (large, before));
    bench.free(again);
    bench.runtime.invariants().unwrap();
    assert_eq!(bench.runtime.trim(Bytes::gib(1)), Bytes::mib(34), "of two chunks of 32 MiB one has the small one");
    bench.runtime.invariants().unwrap();
    bench.free(small);
    assert_eq!(bench.runtime.stats().live_allocations, 0);
}

#[test]
fn where_nothing_is_left_a_request_has_what_the_plan_has_idle_whoever_it_is_in_the_way_of() {
    const POOL: Bytes = Bytes::mib(128);
    let bench = Bench::new(POOL.get() >> 20, RuntimeConfig::default());
    let first = Bytes::new(512);
    let entries = vec![entry(first, 0, 0, 10), entry(POOL - first, first.get(), 2, 10)];
    bench.runtime.install_plan(&Plan { pool_len: POOL, cycle_start: 2, entries, ..Plan::default() }).unwrap();
    let planned = bench.alloc(first).unwrap();
    // What comes next has all the rest, and there is no memory beside the plan's.
    for (bytes, is_dynamic) in
        [(90, false), (90, true), (4, false), (4, true), (1, false)].map(|(mib, is)| (Bytes::mib(mib), is))
    {
        let served = bench.runtime.alloc(&Request { is_dynamic, ..Request::of(bytes) }).unwrap();
        bench.runtime.invariants().unwrap();
        bench.host.fill(DeviceId(0), STREAM, Span::new(served, bytes).unwrap(), 9).unwrap();
        bench.free(served);
    }
    assert_eq!(bench.runtime.stats().served.pool, 5);
    let error = bench.alloc(POOL).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory { .. }), "{error}");
    bench.free(planned);
}

#[test]
fn a_late_plan_lies_where_the_job_has_its_memory() {
    let bench = Bench::new(400, RuntimeConfig::default());
    let large = |mib: u64| {
        let mut plan = plan();
        plan.entries[0].bytes = Bytes::mib(mib);
        plan.entries[1].offset = PlanOffset::new(mib << 20);
        plan.pool_len = Bytes::mib(mib) + Bytes::kib(1);
        plan
    };
    let offer = |plan: &Plan| {
        bench.runtime.offer(Some(bench.runtime.prepare(plan, Bytes::ZERO).unwrap()));
        bench.runtime.mark_iteration();
    };
    let block = bench.alloc(Bytes::mib(100)).unwrap();
    bench.free(block);
    bench.runtime.trim(Bytes::mib(96));
    offer(&plan());
    // What is beside the plan is idle where the next one lies.
    let blocks: Vec<_> = (0..5).map(|_| bench.alloc(Bytes::mib(7)).unwrap()).collect();
    blocks.into_iter().for_each(|block| bench.free(block));
    offer(&large(41));
    bench.runtime.invariants().unwrap();
    let block = bench.alloc(Bytes::mib(41)).unwrap();
    bench.runtime.invariants().unwrap();
    bench.free(block);
}

#[test]
fn a_late_plan_is_suspended_before_the_process_holds_more_than_without_it() {
    const HELD: Bytes = Bytes::mib(200);
    let bench = Bench::new(400, RuntimeConfig::default());
    let block = bench.alloc(HELD).unwrap();
    bench.free(block);
    let mut plan = plan();
    let large = Bytes::mib(190);
    plan.entries[0].bytes = large;
    plan.entries[1].offset = PlanOffset::new(large.get());
    plan.pool_len = large + Bytes::kib(1);
    bench.runtime.offer(Some(bench.runtime.prepare(&plan, Bytes::ZERO).unwrap()));
    for _ in 0..2 {
        bench.runtime.mark_iteration();
        // The end of its life is unknown, so a plan that is followed lends it nothing.
        let dynamic = Request { is_dynamic: true, ..Request::of(Bytes::mib(150)) };
        let served = bench.runtime.alloc(&dynamic).unwrap();
        bench.runtime.invariants().unwrap();
        assert!(bench.runtime.lock().planned.as_ref().unwrap().is_suspended());
        assert_eq!(bench.runtime.stats().held, HELD);
        bench.free(served);
    }
    bench.runtime.mark_iteration();
    let planned = bench.alloc(large).unwrap();
    assert_eq!(bench.runtime.stats().served.planned, 1, "the next iteration goes by the plan");
    bench.free(planned);
    bench.runtime.invariants().unwrap();
}

#[test]
fn a_late_plan_of_several_streams_ends_before_the_process_holds_more_than_without_it() {
    const HELD: Bytes = Bytes::mib(300);
    let bench = Bench::new(600, RuntimeConfig::default());
    let other = bench.host.create_stream(DeviceId(0)).unwrap();
    for (mib, stream) in [(200, STREAM), (100, other)] {
        let block = bench.alloc_on(Bytes::mib(mib), stream).unwrap();
        bench.runtime.free(block, stream).unwrap();
    }
    let mut plan = plan();
    let (large, of_other) = (Bytes::mib(190), Bytes::mib(90));
    plan.entries[0].bytes = large;
    plan.entries[1] =
        Entry { bytes: of_other, offset: PlanOffset::new(large.get()), lane: Lane::on(other), ..plan.entries[1] };
    plan.pool_len = large + of_other;
    bench.runtime.offer(Some(bench.runtime.prepare(&plan, Bytes::ZERO).unwrap()));
    bench.runtime.mark_iteration();
    let planned = bench.alloc_on(of_other, other).unwrap();
    assert_eq!((bench.runtime.stats().served.planned, bench.runtime.plan().is_some()), (1, true));
    // More than is idle beside the plan and there.
    let dynamic = Request { is_dynamic: true, ..Request::of(Bytes::mib(195)) };
    let served = bench.runtime.alloc(&dynamic).unwrap();
    bench.runtime.invariants().unwrap();
    let stats = bench.runtime.stats();
    assert_eq!(bench.runtime.plan(), None);
    assert!(stats.held <= HELD + Bytes::mib(8), "{stats:?}");
    bench.free(served);
    bench.runtime.free(planned, other).unwrap();
    bench.runtime.invariants().unwrap();
}
