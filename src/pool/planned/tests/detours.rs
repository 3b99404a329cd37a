//! Jobs that do something else instead of a part of the cycle.

use super::*;
use crate::plan::{Detour, DetourRequest};

/// What comes instead of the entries `from..to`: units, with the offset of each that has a place.
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
    // An iteration that ends early, with a mark and without; one that goes back for more.
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
    // One that does not come, and one that is not planned.
    go(&mut bench, 20..24);
    go(&mut bench, 25..28);
    assert_eq!((bench.ask(39), bench.surprises()), (None, (2, 0)));
    go(&mut bench, 28..32);
    assert_eq!((bench.ask(10), bench.ask(11)), (Some(4), Some(20)));
    bench.let_go(&[4, 20]);
    assert_eq!(bench.surprises(), (2, 0));
    bench.pass();
    // It is over before its end: where it leads comes, or the mark, or eight other requests.
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
