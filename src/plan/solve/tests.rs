//! Each part of the solvers against the slow way to say the same.

use super::super::tests::{random_job, random_problem};
use super::super::{lower_bound, validate};
use super::best_fit;
use super::sections::Sections;
use super::*;
use crate::ids::StreamId;
use crate::plan::Stays;
use crate::rng::Rng;
use crate::units::{Lifetime, PlanSpan, Span};

/// Problems of all kinds: those that repeat, and those that only look like it.
fn problems() -> impl Iterator<Item = (u64, Problem)> {
    (0..300).map(|seed| {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(50);
        let problem = if seed % 3 == 0 { random_problem(&mut rng, count) } else { random_job(&mut rng, count) };
        (seed, problem)
    })
}

fn live_together(one: &Buffer, other: &Buffer) -> bool {
    one.lifetimes().any(|one| other.lifetimes().any(|other| one.overlaps(other)))
}

#[test]
fn one_pass_has_every_pair_in_each_others_way_and_where_it_is_exact_no_other() {
    let (mut exact, mut of_jobs) = (0, 0);
    for (seed, problem) in problems() {
        let buffers: Vec<&Buffer> = problem.buffers.iter().collect();
        let OnePass { lifetimes, is_exact } = OnePass::of(&buffers);
        for (at, one) in buffers.iter().enumerate() {
            for (other_at, other) in buffers.iter().enumerate() {
                let overlap = lifetimes[at].overlaps(lifetimes[other_at]);
                assert!(overlap || !live_together(one, other), "seed {seed}: {at} and {other_at} are live together");
                assert!(!is_exact || overlap == live_together(one, other), "seed {seed}: {at} and {other_at} are not");
            }
        }
        let has_cycle = buffers.iter().any(|buffer| buffer.again.is_some());
        exact += u32::from(is_exact && has_cycle);
        of_jobs += u32::from(has_cycle);
    }
    assert!(exact > 30 && exact + 30 < of_jobs, "{exact} of {of_jobs} are exact");
}

#[test]
fn lifetimes_overlap_where_they_share_a_section() {
    for (seed, problem) in problems() {
        let lifetimes: Vec<Lifetime> = problem.buffers.iter().map(|buffer| buffer.lifetime).collect();
        let sections = Sections::of(&lifetimes);
        for (at, one) in lifetimes.iter().enumerate() {
            let (start, end) = sections.of_lifetime(at);
            assert!(start < end && end <= sections.count(), "seed {seed}");
            for (other_at, other) in lifetimes.iter().enumerate() {
                let (other_start, other_end) = sections.of_lifetime(other_at);
                let share = start < other_end && other_start < end;
                assert_eq!(share, one.overlaps(*other), "seed {seed}: {one:?}, {other:?}");
            }
        }
    }
}

/// The lowest offset above all that are in the way, said the slow way.
fn slow_first_fit(buffers: &[&Buffer], order: Order) -> Vec<u64> {
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::new();
    for at in order.sorted(buffers) {
        let end = |of: usize, offset: u64| offset + buffers[of].len.get();
        let in_the_way = |offset: u64| {
            let clash = |other: usize| {
                live_together(buffers[at], buffers[other])
                    && offsets[other] < end(at, offset)
                    && offset < end(other, offsets[other])
            };
            placed.iter().copied().find(|other| clash(*other))
        };
        let mut offset = 0;
        while let Some(other) = in_the_way(offset) {
            offset = end(other, offsets[other]);
        }
        offsets[at] = offset;
        placed.push(at);
    }
    offsets
}

#[test]
fn first_fit_takes_the_lowest_free_offset() {
    for (seed, problem) in problems() {
        let buffers: Vec<&Buffer> = problem.buffers.iter().collect();
        let one_pass = OnePass::of(&buffers);
        for order in Order::ALL {
            let mut effort = Effort::of(u64::MAX, u64::MAX, &Budget::default());
            let placed = first_fit::place(&buffers, &one_pass, order, &mut effort);
            assert_eq!(placed, Ok(slow_first_fit(&buffers, order)), "seed {seed}, {order:?}");
            assert_eq!(effort.placed, buffers.len() as u64);
        }
    }
}

/// The same in less time: whatever is in the way, from the bottom up.
fn swept_first_fit(buffers: &[&Buffer], order: Order) -> Vec<u64> {
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::new();
    for at in order.sorted(buffers) {
        let others = placed.iter().copied().filter(|other| live_together(buffers[at], buffers[*other]));
        let mut others: Vec<_> =
            others.map(|other| (offsets[other], offsets[other] + buffers[other].len.get())).collect();
        others.sort_unstable();
        let len = buffers[at].len.get();
        let mut offset = 0;
        for (start, end) in others {
            if start >= offset + len {
                break;
            }
            offset = end.max(offset);
        }
        offsets[at] = offset;
        placed.push(at);
    }
    offsets
}

/// Lives of one tick and of all of them, so that every level of the tree is covered, touched and cut.
#[test]
fn first_fit_takes_the_lowest_free_offset_in_problems_of_many_sections() {
    const TICKS: u64 = 6000;
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let mut problem = random_problem(&mut rng, 700 + 90 * seed as usize);
        for buffer in &mut problem.buffers {
            let start = rng.below(TICKS);
            let most = 1 << rng.below(14);
            let len = 1 + rng.below(most);
            buffer.lifetime = Lifetime::new(start, (start + len).min(TICKS));
            buffer.again = rng.chance(100).then(|| Lifetime::new(TICKS, TICKS + 1 + rng.below(50)));
        }
        let buffers: Vec<&Buffer> = problem.buffers.iter().collect();
        let one_pass = OnePass::of(&buffers);
        for order in Order::ALL {
            let mut effort = Effort::of(u64::MAX, u64::MAX, &Budget::default());
            let placed = first_fit::place(&buffers, &one_pass, order, &mut effort);
            assert_eq!(placed, Ok(swept_first_fit(&buffers, order)), "seed {seed}, {order:?}");
        }
    }
}

#[test]
fn what_lives_twice_is_placed_lower_in_other_orders() {
    let mut counts = [0; 4];
    for (seed, problem) in problems() {
        let buffers: Vec<&Buffer> = problem.buffers.iter().collect();
        let one_pass = OnePass::of(&buffers);
        let bound = first_fit::Ground::of(&buffers, &one_pass).bound();
        let top = |placed: &[u64]| {
            let ends = placed.iter().zip(&buffers).map(|(offset, buffer)| offset + buffer.len.get());
            ends.max().unwrap_or(0)
        };
        let least = Order::ALL.iter().map(|order| top(&slow_first_fit(&buffers, *order))).min().unwrap();
        assert!(bound <= least, "seed {seed}");
        if one_pass.is_exact || bound == least {
            continue;
        }
        let find = || reorder::search(&buffers, &one_pass, least, &mut Work::of(&Budget::of(300_000)));
        let found = find();
        assert_eq!(found, find(), "seed {seed}: the same work is the same answer");
        counts[0] += 1;
        if let Some(found) = found {
            let offsets: Vec<PlanOffset> = found.iter().copied().map(PlanOffset::new).collect();
            assert_eq!(validate::check_offsets(&problem.buffers, &offsets), Ok(()), "seed {seed}");
            assert!((bound..least).contains(&top(&found)), "seed {seed}");
            counts[1] += 1;
            counts[2] += u32::from(top(&found) == bound);
        }
        let alone = solve_in_with(&problem, Solver::Search, &Budget::of(600_000));
        counts[3] += u32::from(alone.is_ok_and(|alone| alone.peak.get() < least));
    }
    let [open, better, at_bound, alone] = counts;
    assert!(2 * better > open && 4 * at_bound > open && 2 * alone > better && open > 20, "{counts:?}");
}

#[test]
fn best_fit_takes_the_smallest_extent_that_is_large_enough() {
    let life = Lifetime::new;
    // Ten units, of which [1, 4) and [6, 8) are free from tick 2 on.
    let rows = [(life(0, 9), 1), (life(0, 2), 3), (life(0, 9), 2), (life(0, 2), 2), (life(0, 5), 2)];
    let later = [(life(3, 9), 2), (life(4, 9), 2), (life(4, 9), 1), (life(4, 9), 1), (life(6, 9), 3)];
    let buffers: Vec<_> = rows.into_iter().chain(later).collect();
    let offsets = best_fit::place(&buffers, Small::Nothing).unwrap();
    // The last one begins in what is free right below the top.
    assert_eq!(offsets, [0, 1, 4, 6, 8, 6, 1, 3, 10, 11]);
}

#[test]
fn small_buffers_lie_above_the_others() {
    let (small, large) = (Bytes::mib(1).get() - 512, Bytes::mib(1).get());
    let life = Lifetime::new;
    let buffers = [(life(0, 1), large), (life(0, 9), small), (life(1, 9), large), (life(2, 9), small)];
    let together = best_fit::place(&buffers, Small::Nothing).unwrap();
    assert_eq!(together, [0, large, 0, large + small]);
    let apart = best_fit::place(&buffers, Small::Below1Mib).unwrap();
    assert_eq!(apart, [0, large, 0, large + small]);
    let buffers = [(life(0, 9), small), (life(0, 1), large), (life(1, 9), small), (life(2, 9), large)];
    assert_eq!(best_fit::place(&buffers, Small::Nothing).unwrap(), [0, small, small, 2 * small]);
    assert_eq!(best_fit::place(&buffers, Small::Below1Mib).unwrap(), [large, 0, large + small, 0]);
}

#[test]
fn the_answer_is_the_best_of_all_solvers_and_the_same_each_time() {
    for (seed, problem) in problems() {
        let found = solve_with(&problem, &in_proportion(&problem)).unwrap();
        let least = Solver::ALL.into_iter().map(|solver| solve_in(&problem, solver).unwrap().peak).min();
        assert_eq!(Some(found.peak), least, "seed {seed}");
        assert!(found.peak >= lower_bound(&problem), "seed {seed}");
        assert!(solve(&problem).unwrap().peak >= found.peak, "seed {seed}");
        assert_eq!(solve_with(&problem, &in_proportion(&problem)), Ok(found), "seed {seed}");
    }
}

#[test]
fn first_fit_without_steps_leaves_the_answer_to_the_others() {
    let mut stopped = 0;
    for (seed, problem) in problems() {
        let effort = Effort::of(0, u64::MAX, &Budget::default());
        let found = solve_within(&problem, parts(&problem, |_| false), lower_bound(&problem), effort).unwrap();
        assert!(found.peak >= lower_bound(&problem), "seed {seed}");
        if !found.solver.starts_with("first-fit") {
            let placed = found.offsets.iter().zip(&problem.buffers);
            let peak = placed.map(|(offset, buffer)| offset.get() + buffer.len.get()).max();
            assert_eq!(peak, Some(found.peak.get()), "seed {seed}");
            stopped += 1;
        }
    }
    // A step is taken as soon as anything is in the way.
    assert!(stopped > 200, "{stopped}");
}

#[test]
fn small_buffers_of_a_job_lie_apart_or_at_the_end_where_that_costs_nothing() {
    let buffer = |bytes: Bytes, start, end| Buffer {
        bytes,
        len: bytes,
        lane: Lane::on(StreamId::DEFAULT),
        context: crate::trace::ContextKey::UNKNOWN,
        lifetime: Lifetime::new(start, end),
        again: Some(Lifetime::new(start + 10, end + 10)),
        phases: crate::plan::PhasePair::default(),
    };
    // A workspace, and behind it in time a small tensor that would fit its place.
    let job = |large: u64, small: u64| Problem {
        buffers: vec![
            buffer(Bytes::mib(large), 0, 2),
            buffer(Bytes::kib(small), 2, 9),
            buffer(Bytes::mib(large), 4, 9),
        ],
        ..Problem::default()
    };
    let cheap = solve(&job(4096, 4)).unwrap();
    assert_eq!((cheap.peak, cheap.offsets[1].get()), (Bytes::mib(4096) + Bytes::kib(4), 4 << 30));
    // What nobody is live together with shares, at the end as long as that is a millionth.
    let alone = |large, small| {
        let mut job = job(large, small);
        job.buffers.pop();
        job
    };
    let lowered = solve_with(&alone(4096, 4), &Budget::of(1)).unwrap();
    assert_eq!((lowered.peak, lowered.offsets[1].get()), (Bytes::mib(4096), (4 << 30) - (4 << 10)));
    assert_eq!(solve(&alone(4096, 4)).unwrap().offsets[1].get(), 4 << 30, "while it runs they lie apart");
    let dear = solve(&alone(2048, 4)).unwrap();
    assert_eq!((dear.peak, dear.offsets[1].get()), (Bytes::mib(2048), 0));
    // Without an iteration that comes again nobody can be where the plan does not have it.
    let mut once = alone(4096, 4);
    once.buffers.iter_mut().for_each(|buffer| buffer.again = None);
    assert_eq!(solve(&once).unwrap().offsets[1].get(), 0);
}

#[test]
fn small_buffers_that_come_down_are_in_nobodys_way() {
    let mut rng = Rng::new(41);
    let mut lowered = 0;
    for seed in 0..2_000 {
        let count = 3 + rng.index(10);
        let buffer = |rng: &mut Rng| {
            let bytes = match rng.index(3) {
                0 => Bytes::kib(1 + rng.below(2_000)),
                1 => Bytes::kib(2_100 + rng.below(3_000)),
                _ => Bytes::gib(1_000 + rng.below(30)),
            };
            let (start, len) = (rng.below(40), 1 + rng.below(20));
            let again = Lifetime::new(start + 64, start + len + 64);
            let again = (!rng.chance(200)).then_some(again);
            let (lane, phases) = (Lane::on(StreamId::DEFAULT), crate::plan::PhasePair::default());
            let lifetime = Lifetime::new(start, if again.is_none() { 128 } else { start + len });
            Buffer { bytes, len: bytes, lane, context: crate::trace::ContextKey::UNKNOWN, lifetime, again, phases }
        };
        let buffers = (0..count).map(|_| buffer(&mut rng)).collect();
        let problem = Problem { buffers, ..Problem::default() };
        let found = solve_with(&problem, &Budget::of(1)).unwrap();
        let checked = crate::plan::validate::check_offsets(&problem.buffers, &found.offsets);
        assert!(checked.is_ok(), "seed {seed}: {checked:?}");
        // Some lie at the end, and not above all others.
        let large = |at: &usize| problem.buffers[*at].len >= Bytes::kib(2_049);
        let end = |at: usize| found.offsets[at].get() + problem.buffers[at].len.get();
        let top = (0..count).filter(large).map(end).max().unwrap_or(0);
        lowered += usize::from((0..count).any(|at| {
            !large(&at) && end(at) <= found.peak.get() && found.offsets[at].get() > 1 << 40 && end(at) <= top
        }));
    }
    assert!(lowered > 100, "{lowered}");
}

/// Something is taken below, and one buffer has its offset: above all others, where no pass can help.
#[test]
fn what_stays_is_in_no_buffers_way() {
    for (seed, problem) in problems() {
        let mut rng = Rng::new(seed);
        let compact = solve(&problem).unwrap().offsets;
        let mut taken: Vec<PlanSpan> = Vec::new();
        for _ in 0..rng.index(5) {
            let from = taken.last().map_or(0, |last| last.end().get()) + 512 * rng.below(40);
            taken.extend(Span::new(PlanOffset::new(from), Bytes::new(512 * (1 + rng.below(30)))));
        }
        let high = PlanOffset::new(1 << 40);
        let fixed = rng.chance(500).then(|| (rng.index(problem.buffers.len()), high)).into_iter().collect();
        let stays = Stays { taken, fixed };
        let Solution { offsets, .. } = around::solve(&problem, &compact, &stays, &Budget::default()).unwrap();
        let span = |at: usize| Span::new(offsets[at], problem.buffers[at].len).unwrap();
        for (at, one) in problem.buffers.iter().enumerate() {
            let is_in_the_way = |taken: &PlanSpan| taken.overlaps(span(at));
            assert!(!stays.taken.iter().any(is_in_the_way), "seed {seed}: {at} lies in what is taken");
            for (other_at, other) in problem.buffers.iter().enumerate().skip(at + 1) {
                let is_apart = !live_together(one, other) || !span(at).overlaps(span(other_at));
                assert!(is_apart, "seed {seed}: {at} and {other_at} overlap");
            }
        }
        assert!(stays.fixed.iter().all(|(at, offset)| offsets[*at] == *offset), "seed {seed}: what is fixed moved");
    }
}
