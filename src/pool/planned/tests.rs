//! One behaviour each; long random runs with everything that can go wrong are in `tests/model`.

use super::*;
use crate::plan::{Entry, Provenance};
use crate::trace::ContextKey;
use crate::units::Lifetime;

const BASE: u64 = 0x10_0000_0000;
const UNIT: u64 = 512;

/// A plan of entries with `(units, offset in units)`; its lifetimes are not looked at by the pool.
fn plan(entries: &[(u64, u64)], cycle_start: usize) -> Plan {
    let entry = |(at, (units, offset)): (usize, &(u64, u64))| Entry {
        bytes: Bytes::new(units * UNIT),
        offset: PlanOffset::new(offset * UNIT),
        stream: StreamId(0),
        context: ContextKey(1 + 2 * at as u64),
        lifetime: Lifetime::new(0, 1),
        again: None,
    };
    let pool_len = entries.iter().map(|(units, offset)| (units + offset) * UNIT).max().unwrap();
    Plan {
        pool_len: Bytes::new(pool_len),
        entries: entries.iter().enumerate().map(entry).collect(),
        cycle_start,
        provenance: Provenance::default(),
    }
}

struct Bench {
    pool: PlannedPool,
}

impl Bench {
    fn new(entries: &[(u64, u64)], cycle_start: usize) -> Bench {
        let plan = plan(entries, cycle_start);
        let span = Span::new(DeviceAddress::new(BASE), plan.pool_len).unwrap();
        Bench { pool: PlannedPool::new(&plan, span).unwrap() }
    }

    /// The offset in units at which a request for `units` is served.
    fn ask(&mut self, units: u64) -> Option<u64> {
        self.ask_on(units, StreamId(0))
    }

    fn ask_on(&mut self, units: u64, stream: StreamId) -> Option<u64> {
        let request = Request { stream, ..Request::of(Bytes::new(units * UNIT)) };
        let served = self.pool.alloc(&request);
        self.pool.invariants().unwrap();
        match served {
            Served::At(address) => Some((address.get() - BASE) / UNIT),
            Served::Elsewhere => None,
        }
    }

    fn free(&mut self, offset: u64) -> bool {
        let freed = self.pool.free(DeviceAddress::new(BASE + offset * UNIT)).is_some();
        self.pool.invariants().unwrap();
        freed
    }
}

/// A parameter, then in each iteration two that follow each other at one place.
const JOB: &[(u64, u64)] = &[(4, 0), (8, 4), (6, 4)];

#[test]
fn requests_in_order_are_served_at_their_offsets_again_and_again() {
    let mut bench = Bench::new(JOB, 1);
    assert_eq!(bench.ask(4), Some(0));
    for _ in 0..3 {
        assert_eq!(bench.ask(8), Some(4));
        assert!(bench.free(4));
        assert_eq!(bench.ask(6), Some(4));
        assert!(bench.free(4));
    }
    let counts = bench.pool.counts();
    assert_eq!((counts.hits, counts.deviations()), (7, 0));
    assert_eq!(bench.pool.live_allocations(), 1);
}

#[test]
fn a_late_free_sends_the_next_holder_elsewhere_and_hurts_nobody_else() {
    let mut bench = Bench::new(&[(4, 0), (8, 4), (6, 4), (2, 20)], 1);
    bench.ask(4);
    assert_eq!(bench.ask(8), Some(4));
    // Its bytes are planned for the next request, and it is still there.
    assert_eq!(bench.ask(6), None);
    assert_eq!(bench.ask(2), Some(20));
    bench.free(20);
    // A whole iteration later it is still there, and known exactly.
    assert_eq!(bench.ask(8), None);
    assert!(bench.free(4));
    assert_eq!(bench.ask(6), Some(4));
    assert_eq!(bench.pool.counts().blocked, 2);
}

#[test]
fn a_missing_request_shifts_nothing() {
    let mut bench = Bench::new(&[(1, 0), (2, 1), (3, 3), (4, 6), (5, 10)], 0);
    assert_eq!(bench.ask(1), Some(0));
    assert_eq!(bench.ask(3), Some(3));
    assert_eq!(bench.ask(4), Some(6));
    assert_eq!(bench.ask(5), Some(10));
    assert_eq!(bench.pool.counts().skipped, 1);
    assert_eq!(bench.pool.counts().hits, 4);
}

#[test]
fn an_extra_request_is_left_to_others_and_shifts_nothing() {
    let mut bench = Bench::new(&[(1, 0), (2, 1), (3, 3)], 0);
    assert_eq!(bench.ask(1), Some(0));
    assert_eq!(bench.ask(77), None);
    assert_eq!(bench.ask(2), Some(1));
    assert_eq!(bench.ask(3), Some(3));
    assert_eq!(bench.pool.counts().unplanned, 1);
}

#[test]
fn swapped_requests_are_both_served() {
    let mut bench = Bench::new(&[(1, 0), (2, 1), (3, 3), (4, 6)], 0);
    assert_eq!(bench.ask(2), Some(1));
    assert_eq!(bench.ask(1), Some(0));
    assert_eq!(bench.ask(3), Some(3));
    let counts = bench.pool.counts();
    assert_eq!((counts.hits, counts.late, counts.blocked, counts.unplanned), (2, 1, 0, 0));
}

#[test]
fn a_wrong_skip_is_taken_back() {
    let mut bench = Bench::new(&[(1, 0), (2, 1), (3, 3), (4, 6), (5, 10), (6, 15), (7, 21)], 0);
    // An extra request happens to have the size of one ahead.
    assert_eq!(bench.ask(6), Some(15));
    assert_eq!(bench.ask(1), Some(0));
    assert_eq!(bench.ask(2), Some(1));
    // Two missed ones in a row: the cursor is back.
    assert_eq!(bench.ask(3), Some(3));
    assert_eq!(bench.ask(4), Some(6));
    assert_eq!(bench.ask(5), Some(10));
    // This one's place is taken by the extra request.
    assert_eq!(bench.ask(6), None);
    assert_eq!(bench.ask(7), Some(21));
    let counts = bench.pool.counts();
    assert_eq!((counts.late, counts.blocked), (2, 1));
}

#[test]
fn a_job_that_is_somewhere_else_is_found_again() {
    let entries: Vec<_> = (0..200).map(|n| (1 + n, n * (n + 1) / 2)).collect();
    let mut bench = Bench::new(&entries, 0);
    assert_eq!(bench.ask(1), Some(0));
    // Far outside the window: three requests go elsewhere, from the fourth on the place is known.
    assert_eq!([bench.ask(120), bench.ask(121), bench.ask(122)], [None; 3]);
    for n in 122..=200 {
        assert_eq!(bench.ask(n + 1 - u64::from(n == 200)), if n < 200 { Some(n * (n + 1) / 2) } else { None }, "{n}");
    }
    assert_eq!(bench.pool.counts().resynchronised, 1);
}

#[test]
fn a_mark_sets_the_cursor_to_the_next_iteration() {
    let mut bench = Bench::new(&[(9, 20), (1, 0), (2, 1), (3, 3)], 1);
    bench.ask(9);
    bench.ask(1);
    bench.pool.mark_iteration();
    bench.pool.invariants().unwrap();
    // The first of the last iteration is still live: the place is not free.
    assert_eq!(bench.ask(1), None);
    assert_eq!(bench.ask(2), Some(1));
    bench.pool.mark_iteration();
    bench.pool.mark_iteration();
    bench.free(0);
    assert_eq!(bench.ask(1), Some(0));
}

#[test]
fn unknown_tenants_are_stepped_around() {
    let mut bench = Bench::new(JOB, 1);
    bench.ask(4);
    let span = |offset: u64, units: u64| {
        Span::new(DeviceAddress::new(BASE + offset * UNIT), Bytes::new(units * UNIT)).unwrap()
    };
    assert!(!bench.pool.occupy(span(3, 2)), "overlaps a live allocation");
    assert!(!bench.pool.occupy(span(11, 2)), "reaches over the end");
    assert!(bench.pool.occupy(span(10, 2)));
    assert!(!bench.pool.occupy(span(11, 1)));
    assert_eq!(bench.ask(8), None);
    assert_eq!(bench.ask(6), Some(4));
    assert!(bench.pool.vacate(DeviceAddress::new(BASE + 10 * UNIT)));
    assert!(!bench.pool.vacate(DeviceAddress::new(BASE + 10 * UNIT)));
    bench.free(4);
    assert_eq!(bench.ask(8), Some(4));
}

#[test]
fn a_free_of_what_is_not_live_is_not_taken() {
    let mut bench = Bench::new(JOB, 1);
    assert!(!bench.free(0));
    bench.ask(4);
    assert!(!bench.free(1));
    assert_eq!(bench.pool.free(DeviceAddress::new(BASE + 1)), None);
    assert_eq!(bench.pool.free(DeviceAddress::new(BASE - 512)), None);
    assert_eq!(bench.pool.free(DeviceAddress::new(BASE + (1 << 30))), None);
    assert!(bench.free(0));
    assert!(!bench.free(0));
}

#[test]
fn streams_are_bound_where_they_are_first_seen() {
    let mut plan = plan(&[(1, 0), (2, 1), (3, 3), (4, 6)], 0);
    for (entry, stream) in plan.entries.iter_mut().zip([0, 7, 9, 7]) {
        entry.stream = StreamId(stream);
    }
    let span = Span::new(DeviceAddress::new(BASE), plan.pool_len).unwrap();
    let mut bench = Bench { pool: PlannedPool::new(&plan, span).unwrap() };
    assert_eq!(bench.ask_on(1, StreamId(0xaa)), None, "the default stream is itself");
    assert_eq!(bench.ask_on(1, StreamId(0)), Some(0));
    assert_eq!(bench.ask_on(2, StreamId(0xaa)), Some(1));
    assert_eq!(bench.ask_on(3, StreamId(0xaa)), None, "that one is another stream of the plan");
    assert_eq!(bench.ask_on(3, StreamId(0xbb)), Some(3));
    assert_eq!(bench.ask_on(4, StreamId(0xaa)), Some(6));
}

#[test]
fn a_pool_that_is_too_small_for_its_plan_is_refused() {
    let plan = plan(JOB, 1);
    let span = Span::new(DeviceAddress::new(BASE), Bytes::new(UNIT)).unwrap();
    assert!(matches!(PlannedPool::new(&plan, span), Err(InstallError::TooSmall { .. })));
}
