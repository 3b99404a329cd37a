//! The search against all there is to try, and problems of which the answer is known.

use super::*;
use crate::units::Tick;
use crate::work::Budget;

type Problem = (Vec<Lifetime>, Vec<u64>);

const UNITS: u64 = 400_000;

fn work() -> Work {
    Work::of(&Budget::of(UNITS))
}

/// The lowest below a limit, and whether it is known to be the lowest of all.
fn found(problem: &Problem, limit: u64, work: &mut Work) -> Option<(Found, bool)> {
    let Answer { found, low } = search(&problem.0, &problem.1, limit, work);
    let found = found?;
    let is_best = found.top <= low;
    Some((found, is_best))
}

fn check((lifetimes, lens): &Problem, found: &Found) {
    for one in 0..lens.len() {
        for other in 0..one {
            let apart = found.offsets[one] + lens[one] <= found.offsets[other]
                || found.offsets[other] + lens[other] <= found.offsets[one];
            assert!(apart || !lifetimes[one].overlaps(lifetimes[other]), "{one} and {other} of {lifetimes:?} {lens:?}");
        }
    }
    let top = found.offsets.iter().zip(lens).map(|(offset, len)| offset + len).max();
    assert_eq!(top, Some(found.top));
}

/// The lowest top of all orders in which each comes as low as it can.
fn by_trying_all((lifetimes, lens): &Problem) -> u64 {
    fn lowest((lifetimes, lens): &Problem, placed: &mut Vec<(usize, u64)>, best: &mut u64) {
        if placed.len() == lens.len() {
            *best = placed.iter().map(|(one, offset)| offset + lens[*one]).max().unwrap().min(*best);
            return;
        }
        for one in (0..lens.len()).filter(|one| placed.iter().all(|(other, _)| other != one)).collect::<Vec<_>>() {
            let mut offset = 0;
            let beside = |other: &&(usize, u64)| lifetimes[other.0].overlaps(lifetimes[one]);
            while let Some((other, at)) =
                placed.iter().filter(beside).find(|(other, at)| offset < at + lens[*other] && *at < offset + lens[one])
            {
                offset = at + lens[*other];
            }
            placed.push((one, offset));
            lowest(&(lifetimes.clone(), lens.clone()), placed, best);
            placed.pop();
        }
    }
    let mut best = u64::MAX;
    lowest(&(lifetimes.clone(), lens.clone()), &mut Vec::new(), &mut best);
    best
}

fn random(rng: &mut Rng, count: u64, ticks: u64, most: u64) -> Problem {
    let lifetime = |rng: &mut Rng| {
        let start = rng.below(ticks);
        Lifetime { start: Tick(start), end: Tick(start + 1 + rng.below(ticks - start)) }
    };
    let lifetimes = (0..count).map(|_| lifetime(rng)).collect();
    (lifetimes, (0..count).map(|_| 1 + rng.below(most)).collect())
}

/// A rectangle that is cut into pieces: they fit into it again.
fn cut(rng: &mut Rng, count: usize, ticks: u64, height: u64) -> Problem {
    let mut pieces = vec![(0, ticks, 0, height)];
    while pieces.len() < count {
        let (start, end, low, high) = pieces.swap_remove(rng.index(pieces.len()));
        if rng.chance(500) && end - start > 1 {
            let at = start + 1 + rng.below(end - start - 1);
            pieces.extend([(start, at, low, high), (at, end, low, high)]);
        } else if high - low > 1 {
            let at = low + 1 + rng.below(high - low - 1);
            pieces.extend([(start, end, low, at), (start, end, at, high)]);
        } else {
            pieces.push((start, end, low, high));
        }
    }
    let lifetimes = pieces.iter().map(|(start, end, ..)| Lifetime { start: Tick(*start), end: Tick(*end) });
    (lifetimes.collect(), pieces.iter().map(|(.., low, high)| high - low).collect())
}

#[test]
fn few_blocks_are_stacked_as_low_as_can_be_and_it_is_known_to_be_so() {
    for seed in 0..600 {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.below(6);
        let problem = random(&mut rng, count, 8, 9);
        let (found, is_best) = found(&problem, u64::MAX, &mut work()).unwrap();
        check(&problem, &found);
        let best = by_trying_all(&problem);
        assert_eq!((found.top, is_best), (best, true), "seed {seed}: {problem:?}");
        // Nothing is below that, and it says so.
        let none = search(&problem.0, &problem.1, best, &mut work());
        assert_eq!(none, Answer { found: None, low: best }, "seed {seed}");
    }
}

#[test]
fn every_rule_finds_what_is_there_and_none_says_of_it_that_it_cannot_be() {
    let mut found = [0; 4];
    for seed in 0..120 {
        let mut rng = Rng::new(seed);
        let count = 4 + rng.index(16);
        let (lifetimes, lens) = cut(&mut rng, count, 40, 1000);
        let blocks = Blocks::of(&lifetimes, &lens);
        for (at, (next, looks_ahead)) in RULES.into_iter().enumerate() {
            for value in Value::ALL {
                let mut search = Search::new(&blocks, 1000);
                let rule = Rule { next, looks_ahead, value };
                match search.run(rule, Some(&mut rng), UNITS, &mut work()) {
                    Verdict::Fits(offsets) => {
                        let top = blocks.top(&offsets);
                        let answer = Found { offsets, top };
                        check(&(lifetimes.clone(), lens.clone()), &answer);
                        assert_eq!(top, 1000);
                        found[at] += 1;
                    }
                    Verdict::Impossible => panic!("seed {seed}: {rule:?} says that it does not fit"),
                    Verdict::Unknown => {}
                }
                let impossible = Search::new(&blocks, 999).run(rule, None, UNITS, &mut work());
                assert_eq!(impossible, Verdict::Impossible, "less than is live does not do");
            }
        }
    }
    assert!(found.iter().all(|found| *found > 400), "of 480 each: {found:?}");
}

#[test]
fn a_group_that_is_hard_leaves_the_others_their_work_and_has_what_they_do_not_need() {
    let mut are_hard = 0;
    for seed in 0..4 {
        let mut rng = Rng::new(seed);
        // Nobody finds the best of these in so much.
        let load = 1_000_000_000;
        let hard = cut(&mut rng, 400, 1_000, load);
        let alone = |units| search(&hard.0, &hard.1, u64::MAX, &mut Work::of(&Budget::of(units))).found.unwrap().top;
        let (all, few) = (alone(UNITS), alone(UNITS / 4));
        // Some are not.
        are_hard += u32::from(load < all);
        // Twenty that are live together with none of them, and need somewhat less.
        let (mut lifetimes, mut lens) = hard.clone();
        for at in 1..=20 {
            let (others, of_others) = cut(&mut rng, 30, 100, load - load / 50);
            lifetimes.extend(others.iter().map(|one| Lifetime::new(one.start.0 + 1_000 * at, one.end.0 + 1_000 * at)));
            lens.extend(of_others);
        }
        let problem = (lifetimes, lens);
        let found = search(&problem.0, &problem.1, u64::MAX, &mut Work::of(&Budget::of(4 * UNITS))).found;
        let found = found.expect("all have passes before one has all the work");
        check(&problem, &found);
        assert!(found.top <= few, "seed {seed}: {} where it is {few} alone with little", found.top);
    }
    assert!(are_hard > 0, "the others were never in need");
}

#[test]
fn a_problem_stays_what_it_is_when_it_is_larger_or_runs_backwards() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let (lifetimes, lens) = random(&mut rng, 12, 12, 20);
        let top = |lifetimes: &[Lifetime], lens: &[u64]| {
            let problem = (lifetimes.to_vec(), lens.to_vec());
            let (found, is_best) = found(&problem, u64::MAX, &mut work()).unwrap();
            check(&problem, &found);
            is_best.then_some(found.top)
        };
        let Some(known) = top(&lifetimes, &lens) else { continue };
        let larger: Vec<u64> = lens.iter().map(|len| len * 512).collect();
        assert_eq!(top(&lifetimes, &larger), Some(known * 512), "seed {seed}");
        let turned = |life: &Lifetime| Lifetime { start: Tick(100 - life.end.0), end: Tick(100 - life.start.0) };
        let backwards: Vec<Lifetime> = lifetimes.iter().map(turned).collect();
        assert_eq!(top(&backwards, &lens), Some(known), "seed {seed}");
    }
}

#[test]
fn the_same_work_and_seed_give_the_same_answer() {
    let mut rng = Rng::new(5);
    let (lifetimes, lens) = random(&mut rng, 120, 60, 1000);
    let of = |seed: u64| {
        let mut work = Work::of(&Budget { seed, ..Budget::of(UNITS) });
        let answer = search(&lifetimes, &lens, u64::MAX, &mut work);
        (answer, work.done())
    };
    let all: Vec<_> = (0..4).map(of).collect();
    assert_eq!(all, (0..4).map(of).collect::<Vec<_>>());
    assert!(all.windows(2).any(|pair| pair[0] != pair[1]), "another seed is another search");
}

#[test]
fn groups_that_share_no_time_are_solved_each_by_itself() {
    let mut rng = Rng::new(9);
    let (mut lifetimes, mut lens) = (Vec::new(), Vec::new());
    for group in 0..5 {
        let (lives, heights) = cut(&mut rng, 12, 40, 500 + group * 100);
        let later =
            |life: Lifetime| Lifetime { start: Tick(life.start.0 + group * 100), end: Tick(life.end.0 + group * 100) };
        lifetimes.extend(lives.into_iter().map(later));
        lens.extend(heights);
    }
    let problem = (lifetimes, lens);
    let (found, is_best) = found(&problem, u64::MAX, &mut work()).unwrap();
    check(&problem, &found);
    assert_eq!((found.top, is_best), (900, true));
}

#[test]
fn what_passes_any_sum_is_no_answer_and_nothing_has_none() {
    let life = |start, end| Lifetime { start: Tick(start), end: Tick(end) };
    let nothing = Answer { found: None, low: 0 };
    assert_eq!(search(&[], &[], u64::MAX, &mut work()), nothing);
    assert_eq!(search(&[life(0, 2), life(1, 3)], &[u64::MAX / 2; 2], u64::MAX, &mut work()), nothing);
    let found = search(&[life(0, 2), life(2, 3)], &[7, 9], u64::MAX, &mut work());
    assert_eq!(found, Answer { found: Some(Found { offsets: vec![0, 0], top: 9 }), low: 9 });
}
