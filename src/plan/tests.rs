//! Plans of small problems against brute force, of real traces against their bounds, and of broken files.

use std::collections::BTreeSet;

use super::solve::{Solver, solve, solve_in};
use super::validate::{Wrong, check, check_placements};
use super::*;
use crate::ids::StreamId;
use crate::rng::Rng;
use crate::trace::import::{self, Contents};
use crate::trace::{Context, Ending, Event, EventKind, Phase};
use crate::units::Tick;

fn lane(stream: u64) -> Lane {
    Lane::on(StreamId(stream))
}

fn buffer(bytes: u64, lifetime: Lifetime, again: Option<Lifetime>) -> Buffer {
    let bytes = Bytes::new(bytes);
    let len = limits::allocation_len(bytes).unwrap();
    let phases = PhasePair::default();
    Buffer { bytes, len, lane: lane(0), context: ContextKey::UNKNOWN, lifetime, again, phases }
}

fn plan_of(problem: &Problem, solution: &solve::Solution) -> Plan {
    let placed = problem.buffers.iter().zip(&solution.offsets);
    Plan {
        pool_len: solution.peak,
        entries: placed.map(|(buffer, offset)| buffer.placed_at(*offset)).collect(),
        cycle_start: problem.cycle_start,
        ..Plan::default()
    }
}

/// Whether two entries can be live together and share bytes, said the slow way.
fn clash(a: &Entry, b: &Entry) -> bool {
    let live_together = a.lifetimes().any(|one| b.lifetimes().any(|other| one.overlaps(other)));
    (live_together || a.lane != b.lane) && a.span().overlaps(b.span())
}

pub(super) fn random_problem(rng: &mut Rng, count: usize) -> Problem {
    let mut problem = Problem::default();
    for _ in 0..count {
        let start = rng.below(30);
        let end = start + 1 + rng.below(12);
        let again = rng.chance(200).then(|| Lifetime::new(end + rng.below(5), end + 6 + rng.below(9)));
        let mut one = buffer(1 + rng.below(5000), Lifetime::new(start, end), again);
        one.lane = lane(rng.below(8) / 7);
        problem.buffers.push(one);
    }
    problem
}

/// A prologue of ten ticks and a cycle of thirty, as [`Problem::from_trace`] draws them.
pub(super) fn random_job(rng: &mut Rng, count: usize) -> Problem {
    const FIRST: u64 = 10;
    const LEN: u64 = 30;
    let mut problem = Problem::default();
    // In one job of two something lives on into the next iteration.
    let has_gradients = rng.chance(500);
    for _ in 0..count {
        let in_prologue = rng.below(FIRST);
        let start = FIRST + rng.below(LEN);
        let end = start + 1 + rng.below(FIRST + LEN - start);
        let stop = FIRST + LEN + 1 + rng.below(start - FIRST + 1);
        let (lifetime, again) = match rng.below(9) {
            // Of the prologue: what stays, and what goes in it or in the first pass.
            0 => (Lifetime::new(in_prologue, FIRST + 2 * LEN), None),
            1 => (Lifetime::new(in_prologue, FIRST), None),
            2 if has_gradients => (Lifetime::new(in_prologue, end), None),
            3 if has_gradients && stop <= start + LEN => {
                (Lifetime::new(start, stop), Some(Lifetime::new(start + LEN, FIRST + 2 * LEN)))
            }
            // Of the only iteration that was seen, and not freed in it.
            4 => (Lifetime::new(start, FIRST + 2 * LEN), None),
            _ => (Lifetime::new(start, end), Some(Lifetime::new(start + LEN, end + LEN))),
        };
        problem.buffers.push(buffer(1 + rng.below(5000), lifetime, again));
    }
    problem
}

#[test]
fn every_solver_gives_a_plan_without_a_clash() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(60);
        let problem = if seed % 2 == 0 { random_problem(&mut rng, count) } else { random_job(&mut rng, count) };
        let bound = lower_bound(&problem);
        for solver in Solver::ALL {
            let plan = plan_of(&problem, &solve_in(&problem, solver).unwrap());
            assert!(plan.pool_len >= bound, "seed {seed}, {solver:?}: {} is below the bound {bound}", plan.pool_len);
            assert_eq!(check_placements(&plan), Ok(()), "seed {seed}, {solver:?}");
            for (at, one) in plan.entries.iter().enumerate() {
                assert!(!plan.entries[..at].iter().any(|other| clash(one, other)), "seed {seed}, {solver:?}");
            }
        }
    }
}

#[test]
fn the_validator_agrees_with_comparing_all_pairs() {
    let (mut right, mut wrong) = (0, 0);
    for seed in 0..2000 {
        let mut rng = Rng::new(seed);
        let count = 2 + rng.index(5);
        let problem = random_problem(&mut rng, count);
        let mut plan = plan_of(&problem, &solve(&problem).unwrap());
        // Move one entry somewhere else inside the pool.
        let moved = rng.index(plan.entries.len());
        let room = plan.pool_len - plan.entries[moved].span().len();
        plan.entries[moved].offset = PlanOffset::new(rng.below(room.get() / 512 + 1) * 512);
        let clashes =
            plan.entries.iter().enumerate().any(|(at, one)| plan.entries[..at].iter().any(|two| clash(one, two)));
        let answer = check_placements(&plan);
        assert_eq!(answer.is_err(), clashes, "seed {seed}: {answer:?}");
        if clashes { wrong += 1 } else { right += 1 }
    }
    assert!(right > 100 && wrong > 100, "{right} right, {wrong} wrong");
}

/// The lowest peak of all placements in all orders, each buffer at the lowest free offset: for so few buffers one of them is optimal.
fn brute_force(problem: &Problem) -> u64 {
    fn go(buffers: &[Buffer], placed: &mut Vec<(usize, u64)>, best: &mut u64) {
        if placed.len() == buffers.len() {
            let peak = placed.iter().map(|(at, offset)| offset + buffers[*at].len.get()).max().unwrap_or(0);
            *best = peak.min(*best);
            return;
        }
        for at in (0..buffers.len()).filter(|at| !placed.iter().any(|(there, _)| there == at)).collect::<Vec<_>>() {
            let overlaps = |other: usize| {
                buffers[at].lifetimes().any(|one| buffers[other].lifetimes().any(|two| one.overlaps(two)))
            };
            let mut offset = 0;
            while let Some((there, low)) = placed.iter().find(|(there, low)| {
                overlaps(*there) && *low < offset + buffers[at].len.get() && offset < low + buffers[*there].len.get()
            }) {
                offset = low + buffers[*there].len.get();
            }
            placed.push((at, offset));
            go(buffers, placed, best);
            placed.pop();
        }
    }
    let mut best = u64::MAX;
    go(&problem.buffers, &mut Vec::new(), &mut best);
    best
}

#[test]
fn small_plans_lie_between_the_bound_and_twice_the_optimum() {
    let mut optimal = 0;
    const SEEDS: u64 = 300;
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(6);
        let mut problem = random_problem(&mut rng, count);
        problem.buffers.iter_mut().for_each(|buffer| buffer.lane = lane(0));
        let best = brute_force(&problem);
        let found = solve(&problem).unwrap().peak.get();
        assert!(lower_bound(&problem).get() <= best && best <= found && found < 2 * best, "seed {seed}");
        optimal += u64::from(found == best);
    }
    assert!(optimal * 10 >= SEEDS * 9, "only {optimal} of {SEEDS} are optimal");
}

fn event(id: u64, kind: EventKind, bytes: u64, iteration: u32, phase: Phase) -> Event {
    Event {
        tick: Tick(0),
        kind,
        id,
        bytes: Bytes::new(bytes),
        stream: StreamId::DEFAULT,
        iteration,
        context: Context { phase, ..Context::default() },
        is_dynamic: false,
        device: 0,
        thread: 0,
    }
}

/// A job with a parameter, an activation and a gradient that lives into the next iteration.
fn small_job(iterations: u32) -> Trace {
    let mut events = vec![event(0, EventKind::Alloc, 1000, 0, Phase::Init)];
    for iteration in 0..iterations {
        let id = u64::from(iteration) * 10;
        if iteration > 0 {
            events.push(event(id - 8, EventKind::Free, 0, iteration, Phase::Forward));
        }
        events.push(event(id + 1, EventKind::Alloc, 2000, iteration, Phase::Forward));
        events.push(event(id + 2, EventKind::Alloc, 3000, iteration, Phase::Backward));
        events.push(event(id + 1, EventKind::Free, 0, iteration, Phase::Backward));
    }
    Trace { events, modules: vec![String::new()] }
}

#[test]
fn a_request_that_lives_into_the_next_iteration_is_live_in_two_stretches() {
    let problem = Problem::from_trace(&small_job(3), 1).unwrap();
    assert_eq!(problem.cycle_start, 3);
    let lives: Vec<_> = problem.buffers.iter().map(|buffer| (buffer.lifetime, buffer.again)).collect();
    let (life, passes) = (Lifetime::new, |a, b, c, d| (Lifetime::new(a, b), Some(Lifetime::new(c, d))));
    // Four events in the prologue, four in each pass.
    let expected = [
        (life(0, 12), None),
        (life(1, 3), None),
        // The first gradient is freed at the beginning of the first pass.
        (life(2, 4), None),
        passes(5, 7, 9, 11),
        // The gradient of the cycle: it is not freed before the end of iteration 1, so it is taken to be freed where the one before it was.
        passes(6, 8, 10, 12),
    ];
    assert_eq!(lives, expected);
    assert_eq!(problem.dynamic_requests, 0);
    // The gradients of prologue and cycle are never live together, so they can share.
    assert_eq!(solve(&problem).unwrap().peak.get(), 1024 + 2048 + 3072);
}

#[test]
fn bytes_that_wait_for_a_stream_are_nobody_elses_until_that_has_passed() {
    let mut events = Vec::new();
    for iteration in 0..3 {
        let id = u64::from(iteration) * 10;
        events.push(event(id, EventKind::Alloc, 2000, iteration, Phase::Forward));
        events.push(event(id, EventKind::Free, 0, iteration, Phase::Forward));
        events.push(event(id + 1, EventKind::Alloc, 3000, iteration, Phase::Forward));
        events.push(event(id, EventKind::FreeCompleted, 0, iteration, Phase::Backward));
        events.push(event(id + 1, EventKind::Free, 0, iteration, Phase::Backward));
    }
    let peak = |events| {
        let problem = Problem::from_trace(&Trace { events, modules: vec![String::new()] }, 1).unwrap();
        solve(&problem).unwrap().peak.get()
    };
    assert_eq!(peak(events.clone()), 2048 + 3072);
    events.retain(|event| event.kind != EventKind::FreeCompleted);
    assert_eq!(peak(events), 3072, "free at once, the two share");
}

#[test]
fn one_iteration_is_enough_for_a_plan() {
    let problem = Problem::from_trace(&small_job(1), 0).unwrap();
    assert_eq!((problem.cycle_start, problem.buffers.len()), (1, 3));
    assert!(matches!(Plan::from_trace(&small_job(1), 1), Err(PlanError::NoIteration { wanted: 1, iterations: 1 })));
}

#[test]
fn what_lives_at_a_cut_lives_on() {
    let mut trace = small_job(2);
    // Out of memory behind a request of a kind that no iteration had before: the rest did not happen.
    trace.events.truncate(6);
    trace.events.push(event(13, EventKind::Alloc, 5000, 1, Phase::Backward));
    let cut = trace.cut(Ending { is_cut: true, refused: None }).unwrap();
    assert_eq!(cut, Cut { iteration: 1, events: 7, requests: 2, live: Bytes::new(8000) });
    let problem = Problem::from_cut(&trace, cut).unwrap();
    let lives: Vec<_> = problem.buffers[3..].iter().map(|buffer| (buffer.lifetime, buffer.again)).collect();
    let life = Lifetime::new;
    // Four events in the prologue, three in each pass: the iteration before freed the first of the two later than the cut, and nobody has seen the other freed.
    assert_eq!(lives, [(life(5, 7), Some(life(8, 10))), (life(6, 10), None)]);
    assert_eq!(problem.dynamic_requests, 0);
    let plan = Plan::of(&trace, &problem, None).unwrap();
    assert_eq!((plan.provenance.cut, plan.provenance.iteration), (Some(cut), 1));
    assert_eq!(format::read(&format::write(&plan)), Ok(plan.clone()));
    assert_eq!(plan.job.fingerprint, Fingerprint::of(&small_job(1)), "the first iteration is whole");
    // Without a word on the cut the request that nobody frees is left out.
    assert_eq!(Problem::from_trace(&trace, 1).unwrap().dynamic_requests, 1);
    // A first iteration that is cut is another job's, and a place behind the end is the end.
    let cut = Cut { iteration: 0, events: 2, requests: 2, live: Bytes::new(3000) };
    let plan = Plan::of(&trace, &Problem::from_cut(&trace, cut).unwrap(), None).unwrap();
    assert_ne!(plan.job.fingerprint, Fingerprint::of(&trace));
    assert_eq!(plan.entries.len(), 2);
    let beyond = Cut { iteration: 9, events: u64::MAX, ..cut };
    assert_eq!(Problem::from_cut(&trace, beyond), Err(PlanError::NoIteration { wanted: 9, iterations: 2 }));
}

#[test]
fn a_job_in_which_everything_varies_has_no_plan() {
    let mut trace = small_job(2);
    trace.events.iter_mut().for_each(|event| event.is_dynamic = true);
    assert_eq!(Plan::from_trace(&trace, 1), Err(PlanError::NothingStatic));
}

/// Jobs with their plans, entries in the order in which they are asked for.
fn random_plans() -> impl Iterator<Item = (u64, Rng, Plan)> {
    (0..300).map(|seed| {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(40);
        let mut problem = random_job(&mut rng, count);
        problem.buffers.sort_by_key(|buffer| buffer.lifetime.start);
        problem.cycle_start = problem.buffers.partition_point(|buffer| buffer.lifetime.start < Tick(10));
        problem.buffers.iter_mut().for_each(|buffer| buffer.lane = lane(rng.below(8) / 7));
        let plan = plan_of(&problem, &solve(&problem).unwrap());
        assert_eq!(check(&plan), Ok(()), "seed {seed}");
        (seed, rng, plan)
    })
}

#[test]
fn who_is_not_expired_is_who_the_plan_has_live() {
    let mut expired = 0;
    for (seed, _, plan) in random_plans() {
        let lanes = plan.lanes();
        let expiries = Expiries::of(&lanes);
        // Entries have numbers lane by lane.
        let firsts = lanes.iter().scan(0, |next, of| Some(std::mem::replace(next, *next + of.entries.len())));
        for (of, first) in lanes.iter().zip(firsts) {
            assert_eq!(check(&of.plan), Ok(()), "seed {seed}: {}", of.lane);
            expired += expired_by(&of.plan, &expiries, first, seed);
        }
    }
    assert!(expired > 5000, "{expired}");
}

/// Goes four times around a lane whose entries have the numbers from `first_number` on, and counts who was gone.
fn expired_by(plan: &Plan, expiries: &Expiries, first_number: usize, seed: u64) -> u64 {
    let mut expired = 0;
    let (count, cycle_len) = (plan.entries.len(), plan.cycle_len().unwrap_or(0));
    let cycle = plan.cycle_start..count;
    let number = |entry: usize| (first_number + entry) as u32;
    let passes = if cycle_len == 0 { 1 } else { 4 };
    let mut kept: BTreeSet<u32> = BTreeSet::new();
    for pass in 0..passes {
        let first = if pass == 0 { 0 } else { cycle.start };
        for entry in first..count {
            // Later passes look like the second.
            let now = Tick(plan.entries[entry].lifetime.start.0 + cycle_len * pass.min(1));
            for gone in expiries.before(number(entry)) {
                expired += u64::from(kept.remove(gone));
            }
            for one in &kept {
                let lives = plan.entries[*one as usize - first_number]
                    .lifetimes()
                    .any(|life| life.start <= now && now < life.end);
                assert!(lives, "seed {seed}, pass {pass}: {one} is gone when {entry} comes");
            }
            if cycle_len > 0 && !plan.entries[entry].lifetimes().any(|life| life.end.0 >= 70) {
                assert_ne!(expiries.death(number(entry)), NEVER, "seed {seed}: {entry}");
            }
            kept.insert(number(entry));
        }
    }
    expired
}

/// What nobody of a lane has in the interval nor, where the plan has a second pass, in the pass before: unit by unit.
fn slow_spaces(plan: &Plan, varies: &DynamicEntry) -> Vec<bool> {
    let interval = varies.interval.unwrap();
    let before = plan.cycle_len().filter(|_| interval.start.0 >= 40);
    let times = [Some(interval), before.map(|len| Lifetime::new(interval.start.0 - len, interval.end.0 - len))];
    let of_lane = || plan.entries.iter().filter(|entry| entry.lane == varies.lane).map(Entry::span);
    let part = of_lane().map(|span| span.start()).min()..of_lane().map(|span| span.end()).max();
    let is_idle = |unit: u64| {
        let at = PlanOffset::new(unit * 512);
        let has = |entry: &Entry| {
            let lives = |time: Lifetime| entry.lifetimes().any(|life| life.overlaps(time));
            entry.span().contains(at) && times.into_iter().flatten().any(lives)
        };
        part.contains(&Some(at)) && !plan.entries.iter().any(has)
    };
    (0..plan.pool_len.get() / 512).map(is_idle).collect()
}

#[test]
fn spaces_are_what_nobody_has_over_the_interval() {
    let (mut idle, mut none) = (0, 0);
    for (seed, mut rng, mut plan) in random_plans().filter(|(.., plan)| plan.cycle_len().is_some()) {
        plan.dynamic_cycle_start = 3;
        for number in 0..8 {
            let start = if number < 3 { rng.below(9) } else { 40 + rng.below(25) };
            let len = 1 + if number < 3 { 0 } else { rng.below(8) };
            let interval = Lifetime::new(start, (start + len).min(70));
            let first = if number < 3 { 0 } else { 30 };
            let before = plan.entries.partition_point(|entry| entry.lifetime.start.0 + first < start) as u32;
            let lane = plan.entries[rng.index(plan.entries.len())].lane;
            plan.dynamic.push(DynamicEntry { before, lane, context: ContextKey(1), interval: Some(interval) });
        }
        plan.dynamic[..3].sort_by_key(|entry| entry.before);
        plan.dynamic[3..].sort_by_key(|entry| entry.before);
        if check(&plan).is_err() {
            continue;
        }
        for of in plan.lanes() {
            let spaces = ReuseSpaces::of(&of);
            // Where there is no interval nothing of the lane comes again.
            let varying = of.plan.dynamic.iter().enumerate().filter(|(_, varies)| varies.interval.is_some());
            for (number, varies) in varying {
                let group = spaces.group(number as u32).unwrap();
                let mut found = vec![false; (plan.pool_len.get() / 512) as usize];
                for (start, len) in spaces.spaces(group) {
                    found[*start as usize..(start + len) as usize].fill(true);
                }
                let slow = slow_spaces(&plan, varies);
                assert_eq!(found, slow, "seed {seed}: {varies:?}");
                let lens: Vec<u32> = spaces.spaces(group).iter().map(|(_, len)| *len).collect();
                assert!(lens.is_sorted(), "seed {seed}");
                if slow.contains(&true) { idle += 1 } else { none += 1 }
            }
        }
    }
    assert!(idle > 300 && none > 20, "{idle}, {none}");
}

#[test]
fn the_first_space_that_holds_a_request_is_found_from_wherever_the_search_begins() {
    let mut rng = Rng::new(5);
    for count in 0..40 {
        let mut spaces: Vec<(u32, u32)> = (0..count).map(|at| (at, 1 + rng.below(20) as u32)).collect();
        spaces.sort_unstable_by_key(|(start, len)| (*len, *start));
        for units in 0..23 {
            let slow = spaces.iter().filter(|(_, len)| *len < units).count();
            for near in 0..count as usize + 3 {
                assert_eq!(reuse::first_with_room(&spaces, units, near), slow, "{units} near {near} of {spaces:?}");
            }
        }
    }
}

#[test]
fn a_plan_survives_being_written_and_read() {
    let mut plan = Plan::from_trace(&small_job(3), 1).unwrap();
    let mut ids = BTreeSet::new();
    for position in [None, Position::new(0, 1), Position::new(6, 7), Position::new(6, limits::WORLD_SIZE_MAX)] {
        plan.job.position = position;
        let bytes = format::write(&plan);
        assert_eq!(format::read(&bytes), Ok(plan.clone()));
        assert_eq!(plan.id(), format::read(&bytes).unwrap().id());
        ids.insert(plan.id());
    }
    assert_eq!((ids.len(), plan.job.fingerprint), (4, Fingerprint::of(&small_job(1))));
}

#[test]
fn a_broken_plan_file_is_refused_wherever_it_is_broken() {
    let plan = Plan::from_trace(&small_job(3), 1).unwrap();
    let bytes = format::write(&plan);
    for len in 0..bytes.len() {
        format::read(&bytes[..len]).unwrap_err();
    }
    for at in 0..bytes.len() {
        for flip in [1, 0x80] {
            let mut broken = bytes.clone();
            broken[at] ^= flip;
            format::read(&broken).unwrap_err();
        }
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(matches!(format::read(&longer), Err(format::FormatError::Length { .. })));
    let mut newer = bytes;
    for found in [1, 2, format::VERSION + 1] {
        newer[6] = found as u8;
        let error = format::read(&newer).unwrap_err();
        assert_eq!(error, format::FormatError::Version { found });
        assert!(error.to_string().contains("make it again with `stitchd plan`"), "{error}");
    }
}

/// Each of these was served with two live allocations at one address.
#[test]
fn a_plan_that_would_be_followed_into_an_overlap_is_refused() {
    let entry = |kib: u64, at_kib: u64, stream, lifetime: (u64, u64), again: Option<(u64, u64)>| Entry {
        bytes: Bytes::kib(kib),
        offset: PlanOffset::new(at_kib << 10),
        lane: lane(stream),
        context: ContextKey(1),
        lifetime: Lifetime::new(lifetime.0, lifetime.1),
        again: again.map(|(from, until)| Lifetime::new(from, until)),
    };
    let of =
        |entries: Vec<Entry>, cycle_start| Plan { pool_len: Bytes::mib(1), entries, cycle_start, ..Plan::default() };
    let refused = |plan: &Plan| validate::check(plan).unwrap_err();
    // A stream's part is from its first byte to its last, and here another's lie between.
    let apart = |places: [u64; 3]| {
        let entries = places.into_iter().zip([0, 0, 7]).map(|(at, stream)| entry(2, at, stream, (0, 10), None));
        of(entries.collect(), 3)
    };
    assert_eq!(refused(&apart([0, 4, 2])), Wrong::Lanes { first: 2, second: 1, offset: 4 << 10 });
    validate::check(&apart([0, 2, 4])).unwrap();
    // The first is asked for again in every pass, and the plan does not say that it is there while the last of the pass before is.
    let again = |again| of(vec![entry(2, 0, 0, (0, 2), again), entry(2, 1, 0, (4, 13), Some((14, 20)))], 0);
    assert_eq!(refused(&again(None)), Wrong::Lifetime { entry: 0 });
    assert!(matches!(refused(&again(Some((10, 12)))), Wrong::Overlap { tick: 10, .. }));
    // A request that varies is looked at in the second pass; this interval is of the first, where the prologue's is still there.
    let varies = |from, until| {
        let interval = Some(Lifetime::new(from, until));
        let dynamic = vec![DynamicEntry { before: 1, lane: lane(0), context: ContextKey(3), interval }];
        let entries = vec![entry(9, 0, 0, (5, 11), None), entry(1, 10, 0, (10, 12), Some((20, 22)))];
        Plan { dynamic, ..of(entries, 1) }
    };
    assert_eq!(refused(&varies(13, 14)), Wrong::Dynamic { number: 0 });
    validate::check(&varies(18, 19)).unwrap();
    validate::check(&varies(23, 24)).unwrap();
}

/// With its checksum made right again, a body that says something impossible is refused for that.
#[test]
fn a_plan_file_that_lies_is_refused() {
    let mut plan = Plan::from_trace(&small_job(3), 1).unwrap();
    plan.entries[0].offset = plan.entries[1].offset;
    let error = format::read(&format::write(&plan)).unwrap_err();
    assert!(matches!(error, format::FormatError::Wrong(Wrong::Overlap { first: 0, second: 1, .. })), "{error:?}");

    let good = format::write(&Plan::from_trace(&small_job(3), 1).unwrap());
    let (mut refused, mut lies) = (0, 0);
    for at in 16..good.len() - 4 {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut lie = good.clone();
            lie[at] = value;
            lies += u32::from(lie != good);
            let body_end = lie.len() - 4;
            let checksum = crc32fast::hash(&lie[..body_end]);
            lie[body_end..].copy_from_slice(&checksum.to_le_bytes());
            // Whatever is read must be a plan that holds together; most lies are none.
            match format::read(&lie) {
                Ok(read) => assert_eq!(check(&read), Ok(())),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused * 4 > lies, "only {refused} of {lies} lies were refused");
}

#[test]
fn what_comes_before_the_first_step_is_not_taken_for_varying_where_no_request_has_a_context() {
    let asked = |bytes: u64| vary::Asked { bytes: Bytes::new(bytes), lane: lane(0), context: ContextKey::NONE };
    let step: Vec<vary::Asked> = (0..400).map(|at| asked(1000 + at % 40)).collect();
    let first: Vec<vary::Asked> = (0..300).map(asked).chain(step.iter().copied()).collect();
    assert_eq!(vary::pairs(&first, &step), []);
    // As many in both are the same requests, whatever their sizes.
    let longer: Vec<vary::Asked> = step.iter().map(|one| asked(one.bytes.get() * 3)).collect();
    assert_eq!(vary::pairs(&step, &longer).len(), 400);
}

/// A hundred times something long and something short of one size, beside another stream. In one iteration one more of them comes first.
#[test]
fn one_request_more_beside_another_stream_costs_what_it_takes() {
    let mut trace = Trace { events: Vec::new(), modules: vec![String::new()] };
    let mut next = 0;
    let mut alloc = |trace: &mut Trace, bytes, iteration, stream| {
        next += 1;
        let one = event(next, EventKind::Alloc, bytes, iteration, Phase::Other);
        trace.events.push(Event { stream: StreamId(stream), ..one });
        next
    };
    let free =
        |trace: &mut Trace, id, iteration| trace.events.push(event(id, EventKind::Free, 0, iteration, Phase::Other));
    for iteration in 0..4 {
        let first = (iteration == 2).then_some((1 << 20, 0));
        for (bytes, stream) in first.into_iter().chain([(512, 7)]) {
            let id = alloc(&mut trace, bytes, iteration, stream);
            free(&mut trace, id, iteration);
        }
        let long = (0..100).map(|_| {
            let long = alloc(&mut trace, 1 << 20, iteration, 0);
            let short = alloc(&mut trace, 1 << 20, iteration, 0);
            free(&mut trace, short, iteration);
            long
        });
        let long: Vec<u64> = long.collect();
        long.into_iter().for_each(|id| free(&mut trace, id, iteration));
    }
    (0..).zip(&mut trace.events).for_each(|(tick, event)| event.tick = Tick(tick));
    let plan = Plan::from_trace(&trace, 2).unwrap();
    assert_eq!((plan.lanes().len(), plan.pool_len), (2, Bytes::new((101 << 20) + 512)));
}

#[test]
fn the_rows_of_a_problem_are_what_a_job_that_asks_for_them_would_have() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let row = |id: u64| {
            let lower = 7 + rng.below(30);
            format!("{id},{lower},{},{}\n", lower + 1 + rng.below(9), rng.below(4) * 300)
        };
        // One at least asks for something.
        let rows: String = (0..1 + seed % 40).map(row).chain(["1000,3,9,5\n".to_owned()]).collect();
        let text = format!("id,lower,upper,size\n{rows}");
        let Contents::Problem(rows) = import::read_contents(text.as_bytes()).unwrap() else { panic!("seed {seed}") };
        let (problem, of_rows) = Problem::from_rows(&rows).unwrap();
        let mut job = Problem::from_trace(&import::read(text.as_bytes()).unwrap().trace, 0).unwrap();
        for buffer in &mut job.buffers {
            (buffer.len, buffer.again) = (buffer.bytes, None);
            buffer.context = ContextKey::UNKNOWN;
            buffer.phases = PhasePair::default();
        }
        assert_eq!(problem, job, "seed {seed}: {text}");
        for (buffer, row) in problem.buffers.iter().zip(&of_rows) {
            assert_eq!(buffer.bytes, rows.buffers()[*row as usize].bytes, "seed {seed}");
        }
        assert!(of_rows.iter().collect::<BTreeSet<_>>().len() == of_rows.len());
    }
}

#[test]
fn a_solver_that_is_alone_and_finds_nothing_in_its_time_says_so() {
    let problem = random_problem(&mut Rng::new(1), 100);
    for solver in [Solver::Dive, Solver::Search] {
        let found = solve::solve_in_with(&problem, solver, &Budget::of(1));
        assert!(matches!(found, Err(PlanError::NotFound { .. })), "{found:?}");
        assert!(solve::solve_in_with(&problem, solver, &solve::patient()).is_ok());
    }
}

#[test]
fn whoever_says_stop_has_an_answer_of_another_solver_or_none_of_one_alone() {
    let problem = random_problem(&mut Rng::new(2), 2_000);
    let stop: crate::work::Stop = std::sync::Arc::new(|| true);
    let stopped = Budget { stop: Some(stop), ..solve::patient() };
    let alone = solve::solve_in_with(&problem, Solver::ALL[0], &stopped);
    assert!(matches!(alone, Err(PlanError::NotFound { .. })), "{alone:?}");
    let solution = solve::solve_with(&problem, &stopped).unwrap();
    assert!(!solution.solver.starts_with("first-fit"), "{}", solution.solver);
    validate::check_offsets(&problem.buffers, &solution.offsets).unwrap();
}

/// Without the column and with names that say nothing: an expert that gets as many tokens twice is one.
#[test]
fn dynamic_modules_are_found_without_the_column() {
    let rows = |iteration, tokens| super::modules::tests::experts(iteration, tokens);
    let trace = super::modules::tests::trace(&[rows(0, [7, 8, 9, 3]), rows(1, [7, 8, 6, 3])].concat());
    let plan = Plan::from_trace(&trace, 1).unwrap();
    assert_eq!((plan.entries.len(), plan.dynamic.len(), plan.dynamic_cycle_start), (6, 8, 4));
    // One for each of two layers, in the prologue and in the cycle.
    assert_eq!(plan.reuse_groups(), 4);
    let problem = Problem::from_trace(&trace, 1).unwrap();
    assert_eq!((problem.dynamic_requests, problem.irregular_requests), (8, 0));
    // The largest expert has 8,000 bytes and the attention 4,096,000; or 5,120,000.
    assert_eq!(problem.dynamic_percent, 0);
    let many = [rows(0, [7, 5120, 9, 3]), rows(1, [7, 5120, 6, 3])].concat();
    let problem = Problem::from_trace(&super::modules::tests::trace(&many), 1).unwrap();
    assert_eq!((problem.dynamic_requests, problem.dynamic_percent), (8, 100));
}
