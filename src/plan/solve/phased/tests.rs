//! Each part of the phased solver against the slow way to say the same, the examples of the paper's figures, and plans of the shared traces.
//!
//! Figures 6 and 7 have no number in their captions or in the text; the cases here are made to show what the captions say.

use super::fusion::{fuse, fuse_adjacent};
use super::homo_phase::LocalPlan;
use super::*;
use crate::rng::Rng;

fn request(len: u64, start: u64, end: u64, phases: (u32, u32)) -> Request {
    let (asked, freed) = phases;
    Request { len, lifetime: Lifetime::new(start, end), phases: PhasePair { asked, freed } }
}

fn group(requests: &[Request], members: std::ops::Range<usize>) -> LocalPlan {
    LocalPlan::contiguous(requests, requests[members.start].phases, members.collect()).unwrap()
}

/// The time-memory product, as equation 2 says it.
fn product(requests: &[Request], plan: &LocalPlan) -> f64 {
    let used: u64 = plan.placed.iter().map(|(at, _)| requests[*at].len * requests[*at].lifetime.ticks()).sum();
    let len = plan.placed.iter().map(|(at, offset)| offset + requests[*at].len).max().unwrap();
    let start = plan.placed.iter().map(|(at, _)| requests[*at].lifetime.start.0).min().unwrap();
    let end = plan.placed.iter().map(|(at, _)| requests[*at].lifetime.end.0).max().unwrap();
    used as f64 / (len * (end - start)) as f64
}

fn weighted_average(requests: &[Request], one: &LocalPlan, other: &LocalPlan) -> f64 {
    let weight = |plan: &LocalPlan| (plan.len * plan.lifetime.ticks()) as f64;
    let sum = weight(one) * product(requests, one) + weight(other) * product(requests, other);
    sum / (weight(one) + weight(other))
}

/// The first two that are live together and share bytes.
fn clash(requests: &[Request], placed: &[(usize, u64)]) -> Option<(usize, usize)> {
    let share = |(one, low): (usize, u64), (other, floor): (usize, u64)| {
        requests[one].lifetime.overlaps(requests[other].lifetime)
            && low < floor + requests[other].len
            && floor < low + requests[one].len
    };
    let pairs = placed.iter().enumerate().flat_map(|(nth, one)| placed[..nth].iter().map(move |other| (*one, *other)));
    pairs.into_iter().find(|(one, other)| share(*one, *other)).map(|(one, other)| (one.0, other.0))
}

/// A forward pass leaves two activations behind, and the backward pass frees the later one first.
const ACTIVATIONS: [(u64, u64, u64, (u32, u32)); 2] = [(4, 0, 10, (0, 1)), (4, 2, 8, (0, 1))];

#[test]
fn figure_7_left_a_fusion_that_raises_the_product_is_taken() {
    let [first, second] = ACTIVATIONS.map(|(len, start, end, phases)| request(len, start, end, phases));
    // What the backward pass needs once the second activation is gone.
    let requests = [first, second, request(4, 8, 10, (1, 1))];
    let (forward, backward) = (group(&requests, 0..2), group(&requests, 2..3));
    assert_eq!((product(&requests, &forward), product(&requests, &backward)), (0.8, 1.0));
    let fused = fuse(&requests, &forward, &backward, &mut u64::MAX.clone()).unwrap();
    assert_eq!(fused.placed, [(0, 0), (1, 4), (2, 4)]);
    assert_eq!((fused.len, fused.phases), (8, PhasePair { asked: 0, freed: 1 }));
    // 72 of 80 are used, where two blocks take 88.
    assert_eq!(product(&requests, &fused), 0.9);
    assert!(product(&requests, &fused) > weighted_average(&requests, &forward, &backward));
}

#[test]
fn figure_7_right_a_fusion_that_lowers_the_product_is_not() {
    let [first, second] = ACTIVATIONS.map(|(len, start, end, phases)| request(len, start, end, phases));
    // It fits just as well, but lives on for long, and the whole block with it.
    let requests = [first, second, request(4, 8, 30, (1, 1))];
    let (forward, backward) = (group(&requests, 0..2), group(&requests, 2..3));
    // To see that costs one step, so that many pairs do not cost nothing.
    let mut steps = 1;
    assert_eq!(fuse(&requests, &forward, &backward, &mut steps), None);
    assert_eq!(steps, 0);
    let together = LocalPlan { placed: vec![(0, 0), (1, 4), (2, 4)], ..forward.clone() };
    assert!(product(&requests, &together) < weighted_average(&requests, &forward, &backward));
    // Nor one that changes nothing: it must increase.
    let requests = [first, second, request(4, 8, 12, (1, 1))];
    let (forward, backward) = (group(&requests, 0..2), group(&requests, 2..3));
    assert_eq!(fuse(&requests, &forward, &backward, &mut u64::MAX.clone()), None);
}

/// Two micro-batches: forward 0, forward 1, backward 0, backward 1.
fn two_microbatches() -> Vec<Request> {
    vec![
        request(4, 0, 30, (0, 2)),
        request(4, 5, 25, (0, 2)),
        request(4, 10, 40, (1, 3)),
        request(4, 15, 35, (1, 3)),
        // Of backward 0, into backward 1.
        request(6, 28, 34, (2, 3)),
        // Transient: of backward 0, forward 0 and backward 1.
        request(4, 26, 29, (2, 2)),
        request(2, 1, 3, (0, 0)),
        request(2, 31, 33, (3, 3)),
    ]
}

#[test]
fn figure_6_groups_by_phase_become_layers_by_size_and_smaller_ones_fill_their_gaps() {
    let requests = two_microbatches();
    let (groups, alone) = homo_phase::groups(&requests, Transients::Alone).unwrap();
    let members: Vec<Vec<usize>> =
        groups.iter().map(|group| group.placed.iter().map(|(at, _)| *at).collect()).collect();
    assert_eq!((members, alone), (vec![vec![0, 1], vec![2, 3], vec![4]], vec![5, 6, 7]));
    // Two layers of 8 for the micro-batches, which live together; one of 6; one of 4. What is left lies in gaps of the layers of 8, in time before one and after the other.
    let offsets = offsets(&requests, Transients::Alone, u64::MAX).unwrap();
    assert_eq!(offsets, [0, 4, 8, 12, 16, 22, 8, 0]);
}

#[test]
fn figure_6_a_group_of_the_phase_in_which_another_ends_is_fused_into_it() {
    let requests = two_microbatches();
    let (groups, alone) = homo_phase::groups(&requests, Transients::Grouped).unwrap();
    assert_eq!((groups.len(), alone.len()), (6, 0));
    let fused = fuse_adjacent(&requests, groups, &mut u64::MAX.clone());
    let of_0 = fused.iter().find(|plan| plan.placed.contains(&(0, 0))).unwrap();
    // Where request 1 was until tick 25 lies request 5 from 26 on.
    assert!(of_0.placed.contains(&(1, 4)) && of_0.placed.contains(&(5, 4)), "{of_0:?}");
    let offsets = offsets(&requests, Transients::Grouped, u64::MAX).unwrap();
    assert_eq!(clash(&requests, &offsets.into_iter().enumerate().collect::<Vec<_>>()), None);
}

fn random_lifetime(rng: &mut Rng, ticks: u64) -> Lifetime {
    let start = rng.below(ticks);
    Lifetime::new(start, start + 1 + rng.below(ticks / 2))
}

/// Whether `count` layers are enough, by trying everything.
fn can_be_layered(lifetimes: &[Lifetime], count: usize, layers: &mut Vec<usize>) -> bool {
    let nth = layers.len();
    nth == lifetimes.len()
        || (0..count).any(|layer| {
            let is_free = (0..nth).all(|other| layers[other] != layer || !lifetimes[other].overlaps(lifetimes[nth]));
            is_free && {
                layers.push(layer);
                let can = can_be_layered(lifetimes, count, layers);
                layers.pop();
                can
            }
        })
}

#[test]
fn algorithm_1_makes_as_few_layers_as_can_be() {
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let mut lifetimes: Vec<Lifetime> = (0..1 + rng.index(9)).map(|_| random_lifetime(&mut rng, 12)).collect();
        lifetimes.sort_by_key(|lifetime| lifetime.start);
        let found = layers::layers(&lifetimes);
        let count = found.iter().max().unwrap() + 1;
        for (nth, one) in lifetimes.iter().enumerate() {
            let others = lifetimes[..nth].iter().zip(&found);
            assert!(
                !others.into_iter().any(|(other, layer)| *layer == found[nth] && one.overlaps(*other)),
                "seed {seed}"
            );
        }
        assert!(!can_be_layered(&lifetimes, count - 1, &mut Vec::new()), "seed {seed}: {count} layers are too many");
        let live = |tick: u64| lifetimes.iter().filter(|life| life.start.0 <= tick && tick < life.end.0).count();
        assert_eq!(Some(count), (0..30).map(live).max(), "seed {seed}");
    }
}

#[test]
fn algorithm_1_goes_behind_the_one_that_ended_last() {
    let life = Lifetime::new;
    assert_eq!(layers::layers(&[life(0, 3), life(1, 5), life(6, 9), life(7, 8)]), [0, 1, 1, 0]);
    // Who ends where another begins is out of its way.
    assert_eq!(layers::layers(&[life(0, 5), life(1, 3), life(5, 9)]), [0, 1, 0]);
}

/// Two groups that meet in a phase.
fn random_pair(rng: &mut Rng) -> (Vec<Request>, LocalPlan, LocalPlan) {
    let (of_first, of_second) = (1 + rng.index(9), 1 + rng.index(9));
    let largest = [3, 8, 30][rng.index(3)];
    let mut random = |phases, from: u64, width: u64| {
        let start = from + rng.below(width);
        request(1 + rng.below(largest), start, start + 1 + rng.below(from + width + 8 - start), phases)
    };
    let mut requests: Vec<Request> = (0..of_first).map(|_| random((0, 1), 0, 20)).collect();
    requests.extend((0..of_second).map(|_| random((1, 2), 16, 12)));
    let (first, second) = (group(&requests, 0..of_first), group(&requests, of_first..requests.len()));
    (requests, first, second)
}

/// Section 5.1's two steps, word for word.
fn slow_insertion(requests: &[Request], large: &LocalPlan, small: &LocalPlan) -> Vec<(usize, u64)> {
    let mut waiting: Vec<usize> = small.placed.iter().map(|(at, _)| *at).collect();
    waiting.sort_by_key(|at| (requests[*at].lifetime.start, *at));
    let mut placed = large.placed.clone();
    let mut cursor = 0;
    while !waiting.is_empty() {
        let fits = |at: &usize| {
            let with: Vec<_> = placed.iter().copied().chain([(*at, cursor)]).collect();
            clash(requests, &with).is_none()
        };
        if let Some(nth) = waiting.iter().position(fits) {
            let at = waiting.remove(nth);
            placed.push((at, cursor));
            cursor += requests[at].len;
        } else {
            let above = large.placed.iter().map(|(_, offset)| *offset).filter(|offset| *offset > cursor).min();
            let ends = large.placed.iter().map(|(at, offset)| offset + requests[*at].len);
            cursor = above.unwrap_or_else(|| ends.max().unwrap().max(cursor));
        }
    }
    placed.sort_by_key(|(at, offset)| (*offset, *at));
    placed
}

#[test]
fn a_fusion_does_the_two_steps_of_the_paper_and_raises_the_product() {
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..3000 {
        let mut rng = Rng::new(seed);
        let (requests, mut first, mut second) = random_pair(&mut rng);
        let fused = fuse(&requests, &first, &second, &mut u64::MAX.clone());
        if first.len < second.len {
            std::mem::swap(&mut first, &mut second);
        }
        let placed = slow_insertion(&requests, &first, &second);
        let average = weighted_average(&requests, &first, &second);
        let by_hand = product(&requests, &LocalPlan { placed: placed.clone(), ..first });
        match fused {
            Some(fused) => {
                assert_eq!(fused.placed, placed, "seed {seed}");
                assert_eq!(clash(&requests, &fused.placed), None, "seed {seed}");
                assert!(product(&requests, &fused) > average, "seed {seed}: {by_hand} is not above {average}");
                assert_eq!(fused.used as f64 / fused.reserved() as f64, by_hand, "seed {seed}");
                taken += 1;
            }
            None => {
                assert!(by_hand <= average * (1.0 + 1e-12), "seed {seed}: {by_hand} is above {average}");
                refused += 1;
            }
        }
    }
    assert!(taken > 300 && refused > 300, "{taken} taken, {refused} refused");
}

/// Groups of five phases, some of which meet.
fn random_requests(rng: &mut Rng, count: usize) -> Vec<Request> {
    let mut random = || {
        let start = rng.below(50);
        let end = start + 1 + if rng.chance(500) { rng.below(6) } else { rng.below(51 - start) };
        request(1 + rng.below(12), start, end, ((start / 10) as u32, (end.min(49) / 10) as u32))
    };
    (0..count).map(|_| random()).collect()
}

#[test]
fn fused_groups_hold_every_request_once_and_reserve_less() {
    let mut fewer = 0;
    for seed in 0..500 {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(40);
        let requests = random_requests(&mut rng, count);
        for transients in [Transients::Alone, Transients::Grouped] {
            let (groups, alone) = homo_phase::groups(&requests, transients).unwrap();
            let (before, reserved) = (groups.len(), groups.iter().map(LocalPlan::reserved).sum::<u128>());
            let fused = fuse_adjacent(&requests, groups.clone(), &mut u64::MAX.clone());
            let mut members: Vec<usize> =
                fused.iter().flat_map(|plan| plan.placed.iter().map(|(at, _)| *at)).chain(alone).collect();
            members.sort_unstable();
            assert_eq!(members, (0..count).collect::<Vec<_>>(), "seed {seed}");
            let after = fused.iter().map(LocalPlan::reserved).sum::<u128>();
            assert!(after + ((before - fused.len()) as u128) <= reserved, "seed {seed}: {after} of {reserved}");
            for plan in &fused {
                assert_eq!(clash(&requests, &plan.placed), None, "seed {seed}");
            }
            fewer += before - fused.len();
            // Without steps they stay as they are.
            assert_eq!(fuse_adjacent(&requests, groups.clone(), &mut 0), groups, "seed {seed}");
        }
    }
    assert!(fewer > 300, "{fewer} fusions");
}

#[test]
fn what_is_stacked_shares_no_byte_with_what_is_live_beside_it() {
    let mut in_gaps = 0;
    for seed in 0..1000 {
        let mut rng = Rng::new(seed);
        let sizes = 1 + rng.below(9);
        let count = 1 + rng.index(40);
        let requests: Vec<(u64, Lifetime)> =
            (0..count).map(|_| (1 + rng.below(sizes), random_lifetime(&mut rng, 30))).collect();
        let offsets = homo_size::stack(&requests, u64::MAX).unwrap();
        let as_requests: Vec<Request> =
            requests.iter().map(|(len, life)| request(*len, life.start.0, life.end.0, (0, 0))).collect();
        let placed: Vec<(usize, u64)> = offsets.iter().copied().enumerate().collect();
        assert_eq!(clash(&as_requests, &placed), None, "seed {seed}");
        let end = placed.iter().map(|(at, offset)| offset + requests[*at].0).max().unwrap();
        // Layers alone, size by size.
        let mut alone = 0;
        for size in 1..=sizes {
            let mut lives: Vec<Lifetime> =
                requests.iter().filter(|(len, _)| *len == size).map(|(_, life)| *life).collect();
            lives.sort_by_key(|life| life.start);
            alone += size * layers::layers(&lives).iter().max().map_or(0, |last| *last as u64 + 1);
        }
        assert!(end <= alone, "seed {seed}: {end} is above {alone}");
        in_gaps += u32::from(end < alone);
        assert_eq!(homo_size::stack(&requests, end), Err(Stopped::NoUse), "seed {seed}");
        assert_eq!(homo_size::stack(&requests, end + 1), Ok(offsets), "seed {seed}");
    }
    assert!(in_gaps > 300, "{in_gaps}");
}

#[test]
fn a_gap_is_taken_in_time_and_space_and_what_is_left_of_it_serves_others() {
    let life = Lifetime::new;
    // One layer of 8 with [10, 20) between two requests; 5 of it are taken for [12, 15).
    let requests = [
        (8, life(0, 10)),
        (8, life(20, 30)),
        (5, life(12, 15)),
        // Beside it in time, in the same 5.
        (5, life(15, 20)),
        // Above it, for all of the time.
        (3, life(10, 20)),
        // Nothing is left at 15.
        (2, life(14, 16)),
    ];
    assert_eq!(homo_size::stack(&requests, u64::MAX), Ok(vec![0, 0, 0, 0, 5, 8]));
}

#[cfg(feature = "daemon")]
mod shared_traces {
    use crate::plan::solve::{Solver, Transients, solve_in};
    use crate::plan::{Plan, Problem, lower_bound};
    use crate::trace::{Trace, import};

    fn trace(name: &str) -> Trace {
        let path = format!("{}/tests/data/{name}.csv.zst", env!("CARGO_MANIFEST_DIR"));
        import::read_file(std::path::Path::new(&path)).unwrap().trace
    }

    /// Parts in ten thousand above the bound, at most; it is what there is, rounded up.
    #[test]
    fn plans_of_the_shared_traces_are_right_and_near_the_bound() {
        let most = [
            ("gpt2-345m-VR", 154),
            ("gpt2-medium-hf", 527),
            ("opt-13b-Z3-RO", 153),
            ("qwen-moe-V-last", 373),
            ("resnet50-olla", 1052),
        ];
        for (name, most) in most {
            let trace = trace(name);
            // Whatever a plan is made by, it is validated when it is made.
            let problem = Problem::from_trace(&trace, 1).unwrap();
            let plan = Plan::of(&trace, &problem, Some(Solver::Phased(Transients::Alone))).unwrap();
            assert!(plan.gap() * 10_000.0 <= f64::from(most), "{name}: {:.2} %", plan.gap() * 100.0);
            // To the letter what lives for a moment is packed side by side, and takes half as much again and more.
            let problem = Problem::from_trace(&trace, 1).unwrap();
            let grouped = solve_in(&problem, Solver::Phased(Transients::Grouped)).unwrap();
            assert!(grouped.peak > plan.pool_len && lower_bound(&problem) <= plan.pool_len, "{name}");
        }
    }
}
