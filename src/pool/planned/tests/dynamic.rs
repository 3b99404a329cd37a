//! Requests of which the plan knows when they come and not how large they are.

use super::*;

/// Weights, then in each iteration eight units of workspace, its two heirs, and two units more.
const LAYERS: &[(u64, u64)] = &[(4, 0), (8, 4), (4, 4), (4, 8), (2, 12)];
/// Between the workspace and the end of the iteration.
const EXPERT: u64 = 77;

/// What is asked for before entry `before` and varies, live in `[from, to)`.
fn varies(before: u32, context: u64, from: u64, to: u64) -> DynamicEntry {
    let interval = Some(Lifetime::new(from, to));
    DynamicEntry { before, lane: Lane::on(StreamId::DEFAULT), context: ContextKey(context), interval }
}

/// In the second pass the workspace is live from tick 10, its heirs from 12 and 14, the last from
/// 16; all are gone at 18.
fn experts() -> [DynamicEntry; 2] {
    [varies(2, EXPERT, 11, 12), varies(4, EXPERT + 2, 16, 18)]
}

#[test]
fn what_varies_is_served_where_the_plan_leaves_room_for_as_long_as_it_lives() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &experts());
    bench.ask(4);
    for pass in 0..3 {
        bench.ask(8);
        // While the workspace is there only what is behind it is free, two units of which stay so.
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
    // A planned request for that place goes elsewhere while they are there.
    assert_eq!((bench.ask(4), bench.ask(4)), (Some(4), None));
    assert!(bench.free(8) && bench.free(11));
    assert_eq!(bench.ask(2), Some(12));
}

#[test]
fn what_varies_is_known_by_its_place_where_nobody_says_so() {
    // Of a module that asks for something else, too, which is planned.
    let mut plan = plan(LAYERS, 1);
    plan.entries[3].context = ContextKey(EXPERT);
    let mut bench = Bench::of(&Plan { dynamic: experts().to_vec(), ..plan });
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
fn what_varies_may_be_as_large_as_the_entry_behind_it() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &experts());
    bench.ask(4);
    bench.ask(8);
    // It has no room while the workspace is there, and is not taken for one of the two heirs.
    assert_eq!(bench.ask_varying(4, 0, false), Served::Elsewhere);
    assert!(bench.pool.is_dynamic(&Request::of(Bytes::new(4 * UNIT))), "the next pool must know it");
    bench.free(4);
    assert_eq!((bench.ask(4), bench.ask(4)), (Some(4), Some(8)));
    assert_eq!(bench.pool.counts().deviations(), 0);
}

#[test]
fn a_dynamic_module_is_known_by_its_context() {
    let mut bench = Bench::with_dynamic(LAYERS, 1, &experts());
    bench.ask(4);
    bench.ask(8);
    assert_eq!(bench.ask_varying(2, EXPERT, false), at(12));
    // More than the plan expects are no surprise, nor are they where it is suspended.
    assert_eq!(bench.ask_varying(2, EXPERT, false), Served::Elsewhere);
    let request = Request { context: ContextKey(EXPERT), ..Request::of(Bytes::new(UNIT)) };
    bench.pool.note_suspended(&request);
    assert!(bench.pool.is_dynamic(&request));
    assert_eq!(bench.pool.counts().deviations(), 0);
    // Without room to expect, too.
    bench.pool.stop_reusing();
    assert_eq!(bench.ask_varying(2, EXPERT, false), Served::Elsewhere);
    assert_eq!(bench.pool.counts().deviations(), 0);
    // A module that the plan has other requests from is not.
    let mut shared = plan(LAYERS, 1);
    shared.entries[2].context = ContextKey(EXPERT);
    let shared = Bench::of(&Plan { dynamic: experts().to_vec(), ..shared });
    assert!(!shared.pool.is_dynamic(&request));
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
