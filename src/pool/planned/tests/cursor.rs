//! Jobs that leave requests out, make more, or make them in another order than the plan has.

use super::*;

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

/// How many requests of each iteration the plan serves. Iterations are lists of numbers of 200
/// sizes; the first `marks` of them are marked `early` requests before their end.
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
    let iteration = |bench: &mut Bench, requests: &[(u64, u64)]| {
        for (units, offset) in requests {
            assert_eq!(bench.ask(*units), Some(*offset));
            assert!(bench.free(*offset));
        }
        bench.pool.mark_iteration();
    };
    iteration(&mut bench, &entries);
    for more in [1, 3, 10] {
        let before = bench.pool.counts().deviations();
        iteration(&mut bench, &[&entries, &entries[..more]].concat());
        assert!(bench.pool.counts().deviations() - before <= more as u64, "{more}: {:?}", bench.pool.counts());
    }
    let before = bench.pool.counts();
    iteration(&mut bench, &entries);
    assert_eq!(bench.pool.counts(), PlannedCounts { hits: before.hits + 40, ..before });
    // What an iteration leaves out is counted each time, also where the one before did, too.
    for _ in 0..4 {
        let before = bench.pool.counts();
        iteration(&mut bench, &entries[..10]);
        assert_eq!(bench.pool.counts().skipped, before.skipped + 30);
    }
}
