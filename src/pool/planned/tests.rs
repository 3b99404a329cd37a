//! One behaviour each; long random runs with everything that can go wrong are in `tests/model`.

mod cursor;
mod detours;
mod dynamic;
mod race;

use super::*;
use crate::ids::StreamId;
use crate::plan::{DynamicEntry, Entry, Lane, Plan};
use crate::trace::ContextKey;
use crate::units::Lifetime;

const BASE: u64 = 0x10_0000_0000;
const UNIT: u64 = 512;

/// A plan of entries with `(units, offset in units)`, of which each is asked for every other tick. What an entry of the cycle lies over is gone when that comes; the prologue stays.
fn plan(entries: &[(u64, u64)], cycle_start: usize) -> Plan {
    let count = entries.len();
    let has_cycle = cycle_start < count;
    let cycle_ticks = 2 * (count - cycle_start) as u64;
    let end = 2 * cycle_start as u64 + 2 * cycle_ticks;
    let overlap = |one: usize, other: usize| {
        let ((len, start), (other_len, other_start)) = (entries[one], entries[other]);
        start < other_start + other_len && other_start < start + len
    };
    let entry = |(at, (units, offset)): (usize, &(u64, u64))| {
        let start = 2 * at as u64;
        let next = (at + 1..count).find(|next| overlap(at, *next)).map(|next| 2 * next as u64);
        let lifetime = match next {
            Some(next) => Lifetime::new(start, next),
            None if at < cycle_start => Lifetime::new(start, end),
            None => Lifetime::new(start, 2 * cycle_start as u64 + cycle_ticks),
        };
        let again = Lifetime::new(lifetime.start.0 + cycle_ticks, lifetime.end.0 + cycle_ticks);
        Entry {
            bytes: Bytes::new(units * UNIT),
            offset: PlanOffset::new(offset * UNIT),
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey(1 + 2 * at as u64),
            lifetime,
            again: Some(again).filter(|_| has_cycle && at >= cycle_start),
        }
    };
    let pool_len = entries.iter().map(|(units, offset)| (units + offset) * UNIT).max().unwrap();
    Plan {
        pool_len: Bytes::new(pool_len),
        entries: entries.iter().enumerate().map(entry).collect(),
        cycle_start,
        ..Plan::default()
    }
}

struct Bench {
    pool: PlannedPool,
}

impl Bench {
    fn new(entries: &[(u64, u64)], cycle_start: usize) -> Bench {
        Bench::of(&plan(entries, cycle_start))
    }

    fn of(plan: &Plan) -> Bench {
        let span = Span::new(DeviceAddress::new(BASE), plan.pool_len).unwrap();
        Bench { pool: PlannedPool::new(plan, span).unwrap() }
    }

    fn with_dynamic(entries: &[(u64, u64)], cycle_start: usize, dynamic: &[DynamicEntry]) -> Bench {
        Bench::of(&Plan { dynamic: dynamic.to_vec(), ..plan(entries, cycle_start) })
    }

    /// The same for one that its module says will vary, or that only comes from where the plan knows it to.
    fn ask_varying(&mut self, units: u64, context: u64, is_dynamic: bool) -> Served {
        let request = Request { context: ContextKey(context), is_dynamic, ..Request::of(Bytes::new(units * UNIT)) };
        let served = self.pool.alloc(&request);
        self.pool.invariants().unwrap();
        served
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
            Served::At(address) | Served::Reused(address) => Some((address.get() - BASE) / UNIT),
            Served::Elsewhere | Served::Unknown | Served::Unbacked | Served::HeldUp => None,
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
    let mut plan = plan(&[(1, 0), (2, 1), (3, 7), (4, 3)], 0);
    for (entry, stream) in plan.entries.iter_mut().zip([0, 7, 9, 7]) {
        entry.lane = Lane::on(StreamId(stream));
    }
    let mut bench = Bench::of(&plan);
    assert_eq!(bench.ask_on(1, StreamId(0xaa)), None, "the default stream is itself");
    assert_eq!(bench.ask_on(1, StreamId(0)), Some(0));
    assert_eq!(bench.ask_on(2, StreamId(0xaa)), Some(1));
    assert_eq!(bench.ask_on(3, StreamId(0xaa)), None, "that one is another stream of the plan");
    assert_eq!(bench.ask_on(3, StreamId(0xbb)), Some(7));
    assert_eq!(bench.ask_on(4, StreamId(0xaa)), Some(3));
}

/// Two lanes of two requests each, one after the other in the plan and at one place of the lane's part.
fn two_lanes(lanes: [Lane; 2]) -> Bench {
    let mut plan = plan(&[(2, 0), (2, 0), (3, 2), (3, 2)], 0);
    for (entry, lane) in plan.entries.iter_mut().zip([lanes[0], lanes[0], lanes[1], lanes[1]]) {
        entry.lane = lane;
    }
    Bench::of(&plan)
}

#[test]
fn lanes_come_between_each_other_in_any_order() {
    let default = StreamId::DEFAULT;
    for orders in [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]] {
        let streams = [Lane::on(default), Lane::on(StreamId(7))];
        let threads = [1, 2].map(|role| Lane { stream: default, role });
        for lanes in [streams, threads] {
            let mut bench = two_lanes(lanes);
            for _ in 0..3 {
                for lane in orders {
                    let (units, offset) = [(2, 0), (3, 2)][lane];
                    let stream = if lanes == streams { StreamId(77 * lane as u64) } else { default };
                    let thread = if lanes == threads { 40 + lane as u32 } else { 0 };
                    let request = Request { stream, thread, ..Request::of(Bytes::new(units * UNIT)) };
                    let served = bench.pool.alloc(&request);
                    assert_eq!(served, Served::At(DeviceAddress::new(BASE + offset * UNIT)), "{orders:?}");
                    bench.pool.invariants().unwrap();
                    assert!(bench.free(offset));
                }
            }
            assert_eq!((bench.pool.counts().hits, bench.pool.counts().deviations()), (12, 0));
        }
    }
}

#[test]
fn a_pool_that_is_too_small_for_its_plan_is_refused() {
    let plan = plan(JOB, 1);
    let span = Span::new(DeviceAddress::new(BASE), Bytes::new(UNIT)).unwrap();
    assert!(matches!(PlannedPool::new(&plan, span), Err(InstallError::TooSmall { .. })));
}

fn at(offset: u64) -> Served {
    Served::Reused(DeviceAddress::new(BASE + offset * UNIT))
}

#[test]
fn a_plan_that_contradicts_itself_is_not_served_from() {
    let mut plan = plan(JOB, 1);
    plan.entries[2].lifetime = plan.entries[1].lifetime;
    plan.entries[2].again = plan.entries[1].again;
    let span = Span::new(DeviceAddress::new(BASE), plan.pool_len).unwrap();
    assert!(matches!(PlannedPool::new(&plan, span), Err(InstallError::Wrong(_))));
}

/// Units in a cell of 2 MiB.
const CELL: u64 = (2 << 20) / UNIT;

/// Lends some units of the pool, or takes them back.
fn set_lent(bench: &mut Bench, first: u64, units: u64, is_lent: bool) {
    let span = Span::new(PlanOffset::new(first * UNIT), Bytes::new(units * UNIT)).unwrap();
    if is_lent {
        bench.pool.lend(span)
    } else {
        bench.pool.take_back(span)
    }
    bench.pool.invariants().unwrap();
}

#[test]
fn a_place_that_is_lent_serves_nothing_until_taken_back() {
    // Two entries of a cell and a half each, one behind the other.
    let long = CELL * 3 / 2;
    let mut bench = Bench::new(&[(long, 0), (long, long)], 2);
    set_lent(&mut bench, CELL, CELL, true);
    let asked = |bench: &Bench, units: u64| bench.pool.lacks(&Request::of(Bytes::new(units * UNIT)));
    assert!(asked(&bench, long).is_some() && asked(&bench, 1).is_none());
    assert_eq!(bench.pool.alloc(&Request::of(Bytes::new(long * UNIT))), Served::Unbacked);
    assert_eq!((bench.pool.counts(), bench.pool.live_allocations()), (PlannedCounts::default(), 0));
    // Nothing is there that could be freed, or found.
    assert!(!bench.free(CELL) && bench.pool.find(DeviceAddress::new(BASE + CELL * UNIT)).is_none());
    set_lent(&mut bench, CELL, CELL, false);
    assert_eq!(bench.ask(long), Some(0));
    assert_eq!((bench.pool.counts().hits, bench.pool.counts().deviations()), (1, 0));
    // The end of the next is lent, and stays so.
    set_lent(&mut bench, 2 * CELL, CELL, true);
    assert_eq!(bench.pool.alloc(&Request::of(Bytes::new(long * UNIT))), Served::Unbacked);
    let free = bench.pool.find(DeviceAddress::new(BASE)).unwrap();
    assert_eq!((free.span.len().get() / UNIT, free.after.get() / UNIT), (long, 2 * CELL - long));
    let laid = bench.pool.laid();
    assert_eq!(laid.iter().map(|laid| laid.span.len().get() / UNIT).collect::<Vec<_>>(), [long, 2 * CELL - long]);
    bench.pool.pass_over(&Request::of(Bytes::new(long * UNIT)));
    assert_eq!((bench.pool.counts().blocked, bench.pool.counts().hits), (1, 1));
    assert!(bench.pool.lacks(&Request::of(Bytes::new(long * UNIT))).is_none());
}

#[test]
fn a_request_of_another_size_has_its_entrys_place_or_room_for_as_long() {
    // In units of 512: weights, a workspace of 512 KiB, and behind it in time and place two halves.
    let entries = [(8, 0), (1024, 8), (512, 8), (512, 520), (8, 8), (1024, 1032)];
    let mut bench = Bench::new(&entries, 1);
    let resized = |bench: &mut Bench, entry: u64, units| bench.ask_varying(units, 1 + 2 * entry, false);
    bench.ask(8);
    assert_eq!(resized(&mut bench, 1, 700), at(8));
    assert!(bench.free(8));
    assert_eq!(
        resized(&mut bench, 2, 600),
        at(1032),
        "its place has not room for it, and it is gone before the last comes"
    );
    assert_eq!(bench.ask(512), Some(520));
    // More than twice as large is another request.
    assert_eq!(resized(&mut bench, 4, 17), Served::Unknown);
    assert_eq!(bench.ask(8), Some(8));
    assert!(bench.free(1032));
    assert_eq!(bench.ask(1024), Some(1032));
    assert_eq!(bench.pool.counts().resized, 2);
    assert_eq!(bench.pool.counts().deviations(), 3);
}

#[test]
fn whose_place_is_taken_goes_where_nobody_comes_before_it_is_gone() {
    let entries = [(8, 0), (1024, 8), (1024, 1032), (1024, 8), (8, 0)];
    let mut bench = Bench::new(&entries, 1);
    bench.ask(8);
    bench.ask(1024);
    // The first is late: its heir's place is taken, and the second is in the only other room.
    assert_eq!(bench.ask(1024), Some(1032));
    assert_eq!(bench.ask(1024), None);
    assert!(bench.free(1032) && bench.free(8));
    bench.pool.mark_iteration();
    bench.ask(1024);
    assert_eq!(bench.ask(1024), Some(1032));
    assert!(bench.free(1032));
    assert_eq!(bench.ask(1024), Some(1032), "the second is gone, and does not come before this one goes");
    assert_eq!((bench.pool.counts().blocked, bench.pool.counts().reused), (2, 1));
}

#[test]
fn what_the_plan_does_not_know_goes_where_nobody_comes_for_long_if_it_must() {
    let mut entries = vec![(8, 0), (1024, 8)];
    entries.extend((0..200).map(|n| (1, 1032 + n)));
    let mut bench = Bench::new(&entries, 1);
    bench.ask(8);
    bench.ask(1024);
    bench.free(8);
    let request = Request { context: ContextKey(9999), ..Request::of(Bytes::new(600 * UNIT)) };
    assert_eq!(bench.pool.alloc(&request), Served::Unknown);
    assert_eq!(bench.pool.alloc_anywhere(&request), Some(DeviceAddress::new(BASE + 8 * UNIT)));
    bench.pool.invariants().unwrap();
    let small = Request { bytes: Bytes::new(UNIT), ..request };
    assert_eq!(bench.pool.alloc_anywhere(&small), None, "elsewhere it costs less than it might here");
    let elsewhere = Request { stream: StreamId(5), ..request };
    assert_eq!(bench.pool.alloc_anywhere(&elsewhere), None, "bytes are one stream's");
    assert!(bench.free(8));
    // Near the end of the iteration the workspace comes again soon.
    assert!((0..199).all(|n| bench.ask(1) == Some(1032 + n)));
    assert_eq!(bench.pool.alloc_anywhere(&request), None);
}

#[test]
fn of_the_parts_that_are_free_the_one_that_the_plan_needs_last_is_lent() {
    // Three parts of a hundred units and more: the shortest comes next, then the middle, then the longest.
    let mut bench = Bench::new(&[(8, 0), (100, 8), (110, 108), (120, 218)], 1);
    bench.ask(8);
    let request = Request { context: ContextKey(9999), ..Request::of(Bytes::new(90 * UNIT)) };
    let of =
        |bench: &Bench| bench.pool.left_alone_longest(&request, request.bytes).map(|part| part.start().get() / UNIT);
    assert_eq!(of(&bench), Some(218));
    assert_eq!((bench.ask(100), of(&bench)), (Some(8), Some(218)));
    assert_eq!((bench.ask(110), bench.ask(120), of(&bench)), (Some(108), Some(218), None), "nothing is free");
    assert!(bench.free(108));
    assert_eq!(of(&bench), Some(108));
}

#[test]
fn what_is_idle_of_one_stream_is_told_from_what_another_has_freed() {
    let mut plan = plan(&[(4, 0), (8, 4), (6, 12), (5, 18)], 0);
    (2..4).for_each(|entry| plan.entries[entry].lane = Lane::on(StreamId(7)));
    let mut bench = Bench::of(&plan);
    let of = |bench: &Bench, stream| {
        let parts = bench.pool.idle_parts_of(StreamId(stream)).into_iter();
        parts.map(|part| (part.start().get() / UNIT, part.len().get() / UNIT)).collect::<Vec<_>>()
    };
    assert_eq!((of(&bench, 0), of(&bench, 9)), (vec![(0, 12)], vec![]), "no lane is of stream 9 yet");
    assert_eq!((bench.ask(4), bench.ask_on(6, StreamId(9))), (Some(0), Some(12)));
    assert_eq!((of(&bench, 0), of(&bench, 9)), (vec![(4, 8)], vec![(18, 5)]));
}
