//! One behaviour each; long random runs with everything that can go wrong are in `tests/model`.

mod race;

use super::*;
use crate::ids::StreamId;
use crate::plan::{Detour, DetourRequest, DynamicEntry, Entry, Lane, Provenance};
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
        dynamic: Vec::new(),
        dynamic_cycle_start: 0,
        provenance: Provenance::default(),
        ..Plan::default()
    }
}

/// What is asked for before entry `before` and varies, live in `[from, to)`.
fn varies(before: u32, context: u64, from: u64, to: u64) -> DynamicEntry {
    let interval = Some(Lifetime::new(from, to));
    DynamicEntry { before, lane: Lane::on(StreamId::DEFAULT), context: ContextKey(context), interval }
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

/// Weights, then in each iteration a workspace of eight units, two of four that follow it, and one of two at the end.
const LAYERS: &[(u64, u64)] = &[(4, 0), (8, 4), (4, 4), (4, 8), (2, 12)];
/// Between the workspace and the end of the iteration.
const EXPERT: u64 = 77;

fn at(offset: u64) -> Served {
    Served::Reused(DeviceAddress::new(BASE + offset * UNIT))
}

/// In the second pass, which begins at tick 10, the workspace is there from 10, its heirs from 12 and 14, the last from 16; all are gone at 18.
fn experts() -> [DynamicEntry; 2] {
    [varies(2, EXPERT, 11, 12), varies(4, EXPERT + 2, 16, 18)]
}

#[test]
fn what_varies_is_served_where_the_plan_leaves_room_for_as_long_as_it_lives() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &experts());
    bench.ask(4);
    for pass in 0..3 {
        bench.ask(8);
        // While the workspace is there only what is behind it is free, and two units of that are nobody's.
        let behind = bench.ask_varying(2, EXPERT, true);
        assert_eq!(behind, at(12), "pass {pass}");
        assert!(bench.free(12));
        assert!(bench.free(4));
        assert_eq!((bench.ask(4), bench.ask(4)), (Some(4), Some(8)));
        // Where the last one comes is not idle over the second expert's life.
        assert_eq!(bench.ask_varying(1, EXPERT + 2, true), Served::Elsewhere);
        assert_eq!(bench.ask(2), Some(12));
        [4, 8, 12].into_iter().for_each(|offset| assert!(bench.free(offset)));
        bench.pool.mark_iteration();
    }
    assert_eq!((bench.pool.counts().reused, bench.pool.counts().deviations()), (3, 0));
}

#[test]
fn what_varies_keeps_away_from_whoever_is_late_and_from_each_other() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &[varies(2, EXPERT, 12, 14), varies(2, EXPERT, 12, 14)]);
    bench.ask(4);
    bench.ask(8);
    // The plan has the workspace gone now, and room from 8 to 14 in its place; it is still there.
    assert_eq!(bench.ask_varying(4, EXPERT, true), Served::Elsewhere);
    bench.pool.mark_iteration();
    assert!(bench.free(4));
    bench.ask(8);
    assert!(bench.free(4));
    assert_eq!(bench.ask_varying(3, EXPERT, true), at(8));
    assert_eq!(bench.ask_varying(3, EXPERT, true), at(11));
    // Who comes there by the plan goes elsewhere while they are there.
    assert_eq!((bench.ask(4), bench.ask(4)), (Some(4), None));
    assert!(bench.free(8) && bench.free(11));
    assert_eq!(bench.ask(2), Some(12));
}

#[test]
fn what_varies_is_known_by_its_place_where_nobody_says_so() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &experts());
    bench.ask(4);
    // Not yet: it comes behind the workspace.
    assert_eq!(bench.ask_varying(2, EXPERT, false), Served::Unknown);
    bench.ask(8);
    assert_eq!(bench.ask_varying(2, 0, false), at(12));
    bench.free(12);
    assert_eq!(bench.ask_varying(2, EXPERT, false), Served::Unknown, "it comes once");
    bench.pool.mark_iteration();
    bench.free(4);
    bench.ask(8);
    assert_eq!(bench.ask_varying(2, EXPERT, false), at(12));
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
    // The first is late: its heir's place is taken, and the only other room is the second's, who is there.
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
fn what_the_prologue_leaves_idle_is_not_idle_when_a_later_pass_begins() {
    let base = plan(&[(1, 100), (4, 0), (4, 50)], 1);
    let plan = Plan { dynamic: vec![varies(1, EXPERT, 1, 2)], dynamic_cycle_start: 1, ..base };
    let mut bench = Bench::of(&plan);
    bench.ask(1);
    assert_eq!(bench.ask_varying(60, EXPERT, true), at(0));
    assert!(bench.free(0));
    assert_eq!((bench.ask(4), bench.ask(4)), (Some(0), Some(50)));
    assert!(bench.free(0));
    // Where the next pass begins the last of this one is live, which the prologue knew nothing of.
    bench.pool.mark_iteration();
    assert_eq!(bench.ask_varying(60, EXPERT, true), Served::Elsewhere);
}

#[test]
fn what_is_idle_where_a_pass_ends_is_not_idle_where_the_first_begins() {
    let mut plan = plan(&[(10, 0), (4, 50), (4, 60)], 1);
    // The first is gone in the middle of the first pass.
    plan.entries[0].lifetime = Lifetime::new(0, 4);
    plan.dynamic = vec![varies(3, EXPERT, 9, 10)];
    let mut bench = Bench::of(&plan);
    assert_eq!(bench.ask(10), Some(0));
    assert_eq!(bench.ask_varying(20, EXPERT, true), Served::Elsewhere);
    assert!(bench.free(0));
    assert_eq!((bench.ask(4), bench.ask(4)), (Some(50), Some(60)));
    assert_eq!(bench.ask_varying(20, EXPERT, true), at(0));
}

#[test]
fn what_is_idle_where_a_pass_ends_is_not_idle_where_the_first_begins_for_a_job_that_went_back() {
    let mut plan = plan(&[(10, 0), (1, 100), (2, 101), (3, 103), (4, 50), (5, 60)], 4);
    // The first is gone in the middle of the first pass.
    plan.entries[0].lifetime = Lifetime::new(0, 10);
    plan.dynamic = vec![varies(6, EXPERT, 17, 18)];
    let mut bench = Bench::of(&plan);
    assert_eq!(bench.ask(10), Some(0));
    // Two that come late in a row: the cursor goes back to the third, and over it once more.
    assert_eq!([3, 1, 2].map(|units| bench.ask(units)), [Some(103), Some(100), Some(101)]);
    bench.pool.mark_iteration();
    assert_eq!(bench.ask_varying(20, EXPERT, true), Served::Elsewhere);
    assert!(bench.free(0));
    assert_eq!([4, 5].map(|units| bench.ask(units)), [Some(50), Some(60)]);
    assert_eq!(bench.ask_varying(20, EXPERT, true), at(0));
}

#[test]
fn a_plan_without_contexts_is_followed_by_a_job_that_has_some() {
    let mut plan = plan(&[(1, 0), (2, 1), (3, 3), (2, 6)], 0);
    plan.entries.iter_mut().for_each(|entry| entry.context = ContextKey::NONE);
    plan.dynamic = vec![DynamicEntry { context: ContextKey::NONE, ..varies(2, 0, 11, 12) }];
    let mut bench = Bench::of(&plan);
    for iteration in 0..3 {
        for (at, (units, offset)) in [(1, 0), (2, 1), (3, 3), (2, 6)].into_iter().enumerate() {
            if at == 2 && iteration > 0 {
                // What varies is known by its place.
                let Served::Reused(address) = bench.ask_varying(1, EXPERT, true) else { panic!("the plan expects it") };
                assert!(bench.free((address.get() - BASE) / UNIT));
            }
            assert_eq!(
                bench.ask_varying(units, 1000 + at as u64, false),
                Served::At(DeviceAddress::new(BASE + offset * UNIT))
            );
        }
        [0, 1, 3, 6].into_iter().for_each(|offset| assert!(bench.free(offset)));
        bench.pool.mark_iteration();
    }
    assert_eq!(bench.pool.counts().deviations(), 0);
}

/// What comes instead of the entries from `from` to `to`: units, with the offset of each that has a place.
fn detour(from: u32, to: u32, requests: &[(u64, Option<u64>)]) -> Detour {
    let request = |(units, offset): &(u64, Option<u64>)| DetourRequest {
        bytes: Bytes::new(units * UNIT),
        context: ContextKey::NONE,
        offset: offset.map(|offset| PlanOffset::new(offset * UNIT)),
    };
    Detour { lane: Lane::on(StreamId::DEFAULT), from, to, requests: requests.iter().map(request).collect() }
}

/// A parameter and a cycle of four, in a pool of 40 units, with these detours.
fn with_detours(detours: &[Detour]) -> Bench {
    let mut plan = plan(&[(4, 0), (8, 4), (6, 12), (5, 4), (7, 18)], 1);
    (plan.pool_len, plan.detours) = (Bytes::new(40 * UNIT), detours.to_vec());
    Bench::of(&plan)
}

impl Bench {
    /// The cycle of [`with_detours`], by the plan.
    fn pass(&mut self) {
        for (units, offset) in [(8, 4), (6, 12), (5, 4), (7, 18)] {
            assert_eq!(self.ask(units), Some(offset));
            if units == 8 {
                self.free(4);
            }
        }
        self.let_go(&[12, 4, 18]);
    }

    fn let_go(&mut self, offsets: &[u64]) {
        offsets.iter().for_each(|offset| assert!(self.free(*offset)));
    }

    fn surprises(&self) -> (u64, u64) {
        (self.pool.counts().deviations(), self.pool.counts().resynchronised)
    }
}

#[test]
fn what_comes_on_a_detour_has_its_place_and_behind_it_the_cycle_goes_on() {
    let mut bench = with_detours(&[detour(2, 4, &[(10, Some(12)), (9, None), (11, Some(22))])]);
    assert_eq!(bench.ask(4), Some(0));
    bench.pass();
    for _ in 0..3 {
        assert_eq!(bench.ask(8), Some(4));
        assert_eq!(bench.ask(10), Some(12));
        assert_eq!(bench.ask(9), None);
        assert_eq!(bench.ask(11), Some(22));
        assert_eq!(bench.pool.len_of(DeviceAddress::new(BASE + 22 * UNIT)), Some(Bytes::new(11 * UNIT)));
        bench.let_go(&[4, 12, 22]);
        // What is there for good stays what it was, and the detour leads here.
        assert_eq!(bench.ask(7), Some(18));
        bench.free(18);
        bench.pass();
    }
    let counts = bench.pool.counts();
    assert_eq!((counts.hits, counts.detoured, bench.surprises()), (1 + 4 * 4 + 3 * 2, 6, (0, 0)));
}

#[test]
fn a_detour_of_nothing_leads_on_or_back_without_a_surprise() {
    // An iteration that ends early, with a mark and without; one that goes back for more of the same.
    let mut bench = with_detours(&[detour(3, 5, &[]), detour(4, 2, &[])]);
    bench.ask(4);
    for is_marked in [true, false] {
        bench.pass();
        assert_eq!((bench.ask(8), bench.ask(6)), (Some(4), Some(12)));
        bench.let_go(&[4, 12]);
        if is_marked {
            bench.pool.mark_iteration();
        }
    }
    assert_eq!((bench.ask(8), bench.ask(6)), (Some(4), Some(12)));
    bench.free(4);
    assert_eq!(bench.ask(5), Some(4));
    bench.let_go(&[12, 4]);
    assert_eq!((bench.ask(6), bench.ask(5), bench.ask(7)), (Some(12), Some(4), Some(18)));
    assert_eq!(bench.surprises(), (0, 0));
    bench.let_go(&[12, 4, 18]);
    bench.pass();
    assert_eq!(bench.surprises(), (0, 0));
}

#[test]
fn whoever_is_in_the_way_of_a_detour_is_seen_and_whoever_comes_on_one_is_seen_behind_it() {
    let mut bench = with_detours(&[detour(3, 5, &[(10, Some(4)), (3, Some(20))])]);
    bench.ask(4);
    assert_eq!((bench.ask(8), bench.ask(6)), (Some(4), Some(12)));
    // The first of the cycle should be gone where this lies, and is not.
    assert_eq!(bench.ask(10), None);
    assert_eq!(bench.ask(3), Some(20));
    assert_eq!(bench.pool.counts().blocked, 1);
    bench.free(4);
    // What came on the detour and stays is where the last of the cycle wants to be.
    bench.free(12);
    assert_eq!((bench.ask(8), bench.ask(6)), (Some(4), Some(12)));
    bench.free(4);
    assert_eq!((bench.ask(5), bench.ask(7)), (Some(4), None));
    assert!(bench.free(20) && !bench.free(20));
}

#[test]
fn surprises_on_a_detour_cost_themselves_and_an_end_of_the_iteration_ends_it() {
    let on: Vec<(u64, Option<u64>)> =
        (0..12).map(|at| (20 + at, None)).chain([(10, Some(4)), (11, Some(20))]).collect();
    let mut bench = with_detours(&[detour(1, 5, &on)]);
    let go =
        |bench: &mut Bench, sizes: std::ops::Range<u64>| sizes.for_each(|units| assert_eq!(bench.ask(units), None));
    bench.ask(4);
    bench.pass();
    go(&mut bench, 20..32);
    assert_eq!((bench.ask(10), bench.ask(11)), (Some(4), Some(20)));
    bench.let_go(&[4, 20]);
    assert_eq!(bench.surprises(), (0, 0));
    // One that does not come, and one that nobody planned.
    go(&mut bench, 20..24);
    go(&mut bench, 25..28);
    assert_eq!((bench.ask(39), bench.surprises()), (None, (2, 0)));
    go(&mut bench, 28..32);
    assert_eq!((bench.ask(10), bench.ask(11)), (Some(4), Some(20)));
    bench.let_go(&[4, 20]);
    assert_eq!(bench.surprises(), (2, 0));
    bench.pass();
    // It is over before its end: where it leads comes, or the mark, or something else again and again.
    go(&mut bench, 20..30);
    bench.pass();
    assert_eq!(bench.surprises(), (2 + 4, 0));
    go(&mut bench, 20..30);
    bench.pool.mark_iteration();
    assert_eq!(bench.surprises(), (6 + 4, 0));
    bench.pass();
    go(&mut bench, 20..25);
    for _ in 0..8 {
        assert_eq!(bench.ask(39), None);
    }
    assert_eq!(bench.surprises(), (10 + 8, 0));
    bench.pass();
    assert_eq!(bench.surprises(), (18, 0));
}

#[test]
fn of_detours_that_begin_alike_the_one_that_goes_on_with_a_request_is_followed() {
    let long: Vec<(u64, Option<u64>)> = (0..12).map(|at| (20 + at, None)).chain([(10, Some(4))]).collect();
    let short: Vec<(u64, Option<u64>)> = (0..6).map(|at| (20 + at, None)).chain([(11, Some(4))]).collect();
    let mut bench = with_detours(&[detour(1, 5, &long), detour(1, 5, &short)]);
    bench.ask(4);
    for (alike, units) in [(12, 10), (6, 11), (12, 10)] {
        (20..20 + alike).for_each(|units| assert_eq!(bench.ask(units), None));
        assert_eq!(bench.ask(units), Some(4));
        bench.free(4);
        bench.pass();
    }
    assert_eq!(bench.surprises(), (0, 0));
    // One that ends early at the mark leads to the end all the same.
    let mut bench = with_detours(&[detour(3, 5, &long)]);
    bench.ask(4);
    assert_eq!((bench.ask(8), bench.ask(6)), (Some(4), Some(12)));
    bench.let_go(&[4, 12]);
    (20..31).for_each(|units| assert_eq!(bench.ask(units), None));
    bench.pool.mark_iteration();
    assert_eq!(bench.surprises(), (2, 0));
    bench.pass();
    assert_eq!(bench.surprises(), (2, 0));
}

#[test]
fn a_place_on_a_detour_that_is_lent_is_told() {
    let mut plan = plan(&[(4, 0), (8, 4), (6, 12)], 1);
    plan.pool_len = Bytes::new(2 * CELL * UNIT);
    plan.detours = vec![detour(2, 3, &[(9, Some(CELL)), (5, Some(4))])];
    let mut bench = Bench::of(&plan);
    let request = Request::of(Bytes::new(9 * UNIT));
    bench.ask(4);
    for is_backed in [true, false] {
        set_lent(&mut bench, CELL, CELL - 1, true);
        assert_eq!(bench.ask(8), Some(4));
        bench.free(4);
        assert_eq!(bench.pool.alloc(&request), Served::Unbacked);
        assert_eq!(bench.pool.lacks(&request).map(|span| span.start()), Some(PlanOffset::new(CELL * UNIT)));
        if is_backed {
            set_lent(&mut bench, CELL, CELL - 1, false);
            assert_eq!(bench.ask(9), Some(CELL));
            bench.free(CELL);
        } else {
            bench.pool.pass_over(&request);
        }
        assert_eq!(bench.ask(5), Some(4));
        bench.free(4);
    }
    assert_eq!(bench.surprises(), (1, 0));
}

#[test]
fn what_an_iteration_repeats_of_its_end_is_not_taken_for_the_end_of_the_next() {
    let entries: Vec<(u64, u64)> = (0..200).map(|at| (10 + at, 300 * at)).collect();
    let mut bench = Bench::new(&entries, 0);
    let mut deviations = Vec::new();
    for more in [0, 10, 0] {
        let before = bench.pool.counts().deviations();
        let again = &entries[150..150 + more];
        for (at, (units, offset)) in entries.iter().chain(again).enumerate() {
            let served = bench.ask(*units);
            assert!(served == Some(*offset) || at >= entries.len(), "{units} at {served:?}");
            assert!(served.is_none_or(|offset| bench.free(offset)));
        }
        bench.pool.mark_iteration();
        deviations.push(bench.pool.counts().deviations() - before);
    }
    assert_eq!(deviations, [0, 10, 0]);
}

/// Of 200 requests of different sizes, iterations as lists of which of them come. Each is marked as many requests before its end, while `marks` last. What the plan serves of each iteration.
fn served_of(iterations: &[Vec<u64>], early: usize, marks: usize) -> Vec<usize> {
    let entries: Vec<(u64, u64)> = (0..200).map(|at| (10 + at, 4000 * at)).collect();
    let mut bench = Bench::new(&entries, 0);
    let mut all = Vec::new();
    for (number, iteration) in iterations.iter().enumerate() {
        let mut served = 0;
        for (at, one) in iteration.iter().enumerate() {
            if number < marks && early > 0 && at + early == iteration.len() {
                bench.pool.mark_iteration();
            }
            let offset = bench.ask(10 + one);
            served += usize::from(offset.is_some());
            offset.into_iter().for_each(|offset| assert!(bench.free(offset)));
        }
        if number < marks && early == 0 {
            bench.pool.mark_iteration();
        }
        all.push(served);
    }
    all
}

#[test]
fn an_iteration_that_leaves_out_most_is_followed_whenever_marks_come_and_when_none_do() {
    let (whole, short): (Vec<u64>, Vec<u64>) = ((0..200).collect(), (0..20).chain(140..200).collect());
    let iterations = [vec![whole; 2], vec![short; 5]].concat();
    for (early, marks) in [(0, 99), (1, 99), (3, 99), (8, 99), (0, 2), (0, 0)] {
        let served = served_of(&iterations, early, marks);
        // Four in a row say where the job is.
        assert!(served[2..].iter().all(|served| *served >= 75), "marks {early} early, {marks} of them: {served:?}");
    }
}

#[test]
fn what_is_asked_for_beyond_an_iteration_costs_itself_and_not_the_next_one() {
    let entries: Vec<(u64, u64)> = (0..40).map(|at| (10 + at, 100 * at)).collect();
    let mut bench = Bench::new(&entries, 0);
    let iteration = |bench: &mut Bench, more: usize| {
        for (units, offset) in entries.iter().chain(&entries[..more]) {
            assert_eq!(bench.ask(*units), Some(*offset));
            assert!(bench.free(*offset));
        }
        bench.pool.mark_iteration();
    };
    iteration(&mut bench, 0);
    for more in [1, 3, 10] {
        let before = bench.pool.counts().deviations();
        iteration(&mut bench, more);
        assert!(bench.pool.counts().deviations() - before <= more as u64, "{more}: {:?}", bench.pool.counts());
    }
    let before = bench.pool.counts();
    iteration(&mut bench, 0);
    assert_eq!(bench.pool.counts(), PlannedCounts { hits: before.hits + 40, ..before });
    // What an iteration leaves out is counted each time, also where the one before did, too.
    for _ in 0..4 {
        let before = bench.pool.counts();
        for (units, offset) in &entries[..10] {
            assert_eq!(bench.ask(*units), Some(*offset));
            assert!(bench.free(*offset));
        }
        bench.pool.mark_iteration();
        assert_eq!(bench.pool.counts().skipped, before.skipped + 30);
    }
}
