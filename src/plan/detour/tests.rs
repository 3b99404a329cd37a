//! Jobs of which some iterations are of another kind.

use super::*;
use crate::ids::StreamId;
use crate::plan::validate::{Wrong, check};
use crate::plan::{Plan, Watch, format};
use crate::trace::{Context, ContextKey, Event, EventKind, Phase, Trace};

/// What an iteration does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Does {
    Step,
    /// A forward pass alone, of so many times the size.
    Evaluation(u64),
    /// A step with so many layers more, of one size.
    More(u64),
    /// A step behind so many evaluations of three times the size, each with a result that goes in the next.
    Behind(u64),
}

const LAYERS: u64 = 40;
const KIB: u64 = 1 << 10;

/// A weight, then iterations: activations that go backwards with the gradients coming, which stay until the next step.
fn job(iterations: &[Does], stream: StreamId) -> Trace {
    let mut trace = Trace { events: Vec::new(), modules: vec![String::new()] };
    let (mut gradients, mut next) = (Vec::new(), 0);
    for (iteration, does) in (0..).zip(iterations) {
        let mut push = |kind, id, bytes, phase| {
            let context = Context { phase, ..Context::default() };
            let (tick, bytes) = (Tick(trace.events.len() as u64), Bytes::new(bytes));
            let event =
                Event { tick, kind, id, bytes, stream, iteration, context, is_dynamic: false, device: 0, thread: 0 };
            trace.events.push(event);
        };
        let mut alloc = |push: &mut dyn FnMut(EventKind, u64, u64, Phase), bytes, phase| {
            next += 1;
            push(EventKind::Alloc, next, bytes, phase);
            next
        };
        if iteration == 0 {
            alloc(&mut push, 700 * KIB, Phase::Init);
        }
        let (rounds, mut result) = (if let Does::Behind(rounds) = does { *rounds } else { 0 }, None);
        for _ in 0..rounds {
            let mut all: Vec<u64> =
                (0..LAYERS).map(|layer| alloc(&mut push, (64 + 4 * layer) * KIB * 3, Phase::Forward)).collect();
            all.extend(result.replace(alloc(&mut push, 5 * KIB, Phase::Forward)));
            all.into_iter().for_each(|id| push(EventKind::Free, id, 0, Phase::Forward));
        }
        result.into_iter().for_each(|id| push(EventKind::Free, id, 0, Phase::Forward));
        let (times, more) = match does {
            Does::Step | Does::Behind(_) => (1, 0),
            Does::Evaluation(times) => (*times, 0),
            Does::More(more) => (1, *more),
        };
        let is_step = !matches!(does, Does::Evaluation(_));
        let went = if is_step { std::mem::take(&mut gradients) } else { Vec::new() };
        went.into_iter().for_each(|id| push(EventKind::Free, id, 0, Phase::Forward));
        let sizes = (0..LAYERS).map(|layer| (64 + 4 * layer) * KIB * times).chain((0..more).map(|_| 333 * KIB));
        let forward: Vec<u64> = sizes.map(|bytes| alloc(&mut push, bytes, Phase::Forward)).collect();
        for id in forward.into_iter().rev() {
            if is_step {
                gradients.push(alloc(&mut push, 8 * KIB, Phase::Backward));
            }
            push(EventKind::Free, id, 0, Phase::Backward);
        }
    }
    trace
}

const DEFAULT: StreamId = StreamId::DEFAULT;
use Does::{Behind, Evaluation, More, Step};

#[test]
fn an_iteration_of_another_kind_has_places_of_its_own_and_the_cycle_stays_as_it_was() {
    let plain = Plan::from_trace(&job(&[Step, Step, Step, Step], DEFAULT), 3).unwrap();
    assert_eq!(plain.detours, []);
    for iterations in [[Step, Evaluation(3), Step, Step], [Step, Step, Evaluation(3), Step]] {
        let plan = Plan::from_trace(&job(&iterations, DEFAULT), 3).unwrap();
        // The one right before the planned one does not say what of that varies, and what it leaves behind.
        assert_eq!((&plan.entries, plan.dynamic.len()), (&plain.entries, 0));
        let [detour] = &plan.detours[..] else { panic!("{:?}", plan.detours) };
        assert_eq!((detour.from as usize, detour.to as usize), (plan.cycle_start, plan.entries.len()));
        // All of it is live at one time, with the weight and the gradients.
        let mut spans: Vec<PlanSpan> = detour.spans().collect();
        assert_eq!((spans.len() as u64, plan.detour_requests()), (LAYERS, LAYERS));
        let carried = |entry: &&crate::plan::Entry| entry.bytes == Bytes::kib(8) || entry.bytes == Bytes::kib(700);
        spans.extend(plan.entries[plan.cycle_start..].iter().filter(carried).map(crate::plan::Entry::span));
        spans.push(plan.entries[0].span());
        spans.sort_unstable_by_key(|span| span.start());
        assert!(spans.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "{spans:?}");
        let live: Bytes = spans.iter().map(|span| span.len()).sum();
        assert!(plan.pool_len > plain.pool_len && plan.pool_len >= live);
        assert!(plan.gap() < 0.05 && plan.pool_len >= plan.provenance.lower_bound, "{}", plan.gap());
        assert_eq!(format::read(&format::write(&plan)), Ok(plan.clone()));
    }
}

#[test]
fn what_fits_beside_the_cycle_takes_no_more_and_what_leaves_something_out_needs_no_place() {
    let steps = [Step, Step, Step, Step];
    let plain = Plan::from_trace(&job(&steps, DEFAULT), 3).unwrap();
    // The same forward pass leaves the cycle for its end; more layers come in its middle, with two more gradients behind.
    let of = |other: Does| Plan::from_trace(&job(&[Step, other, Step, Step], DEFAULT), 3).unwrap();
    let evaluation = of(Evaluation(1));
    let [detour] = &evaluation.detours[..] else { panic!("{:?}", evaluation.detours) };
    assert_eq!((detour.requests.len(), detour.to), (0, evaluation.entries.len() as u32));
    assert_eq!(detour.to - detour.from, LAYERS as u32);
    assert_eq!((evaluation.pool_len, &evaluation.entries), (plain.pool_len, &plain.entries));
    // Fewer than make a detour are a surprise.
    assert_eq!(of(More(3)).detours, []);
    let more = of(More(20));
    let longest = more.detours.iter().max_by_key(|detour| detour.requests.len()).unwrap();
    assert_eq!(longest.spans().count(), 20);
    let gap = more.gap();
    assert!(more.pool_len > plain.pool_len && gap < 0.001, "{gap}");
}

#[test]
fn of_what_comes_again_and_again_before_a_step_one_round_has_places() {
    let of = |rounds| Plan::from_trace(&job(&[Step, Behind(rounds), Step, Step], DEFAULT), 3).unwrap();
    let plan = of(7);
    let [round] = &plan.detours[..] else { panic!("{:?}", plan.detours) };
    assert_eq!((round.from as usize, round.to), (plan.cycle_start, round.from));
    // Its result is there in the next round, too.
    assert_eq!((round.requests.len() as u64, round.spans().count() as u64), (LAYERS + 1, LAYERS));
    assert_eq!(round.requests.last().and_then(DetourRequest::span), None);
    assert_eq!(of(70).detours, plan.detours);
}

#[test]
fn a_kind_is_learned_once_it_came_twice_and_the_job_goes_by_its_plan_again() {
    let plan = Plan::of_cycle(&job(&[Step, Step, Step, Step], DEFAULT), 3).unwrap().0;
    let iterations = [Step, Evaluation(3), Step, Evaluation(5), Step, Evaluation(3), Evaluation(3), Step, Step];
    let learned_of = |plan: &Plan, iterations: &[Does]| {
        let trace = job(iterations, DEFAULT);
        let only = |iteration: usize| {
            let events = trace.events.iter().filter(|event| event.iteration == iteration as u32).copied().collect();
            Trace { events, modules: trace.modules.clone() }
        };
        let mut watch = Watch::of(plan);
        let learn = |kinds: Vec<Kind>| (!kinds.is_empty()).then(|| plan.with_kinds(kinds, &[]).unwrap());
        (1..iterations.len()).map(|nth| learn(watch.look(&only(nth)))).collect::<Vec<Option<Plan>>>()
    };
    let learned = |plan: &Plan| learned_of(plan, &iterations);
    let first = learned(&plan);
    assert_eq!(first.iter().map(Option::is_some).collect::<Vec<_>>(), (1..9).map(|at| at == 7).collect::<Vec<_>>());
    let longer = first.into_iter().flatten().next().unwrap();
    assert_eq!((&longer.entries, longer.detours.len(), longer.detour_requests()), (&plan.entries, 1, LAYERS));
    assert_eq!(longer.cycle_span(), plan.pool_len);
    assert!(longer.pool_len > plan.pool_len && longer.gap() < 0.05, "{}", longer.gap());
    assert_eq!(check(&longer), Ok(()));
    // The same is not learned again, what came once still is not, and what is known stays where it is.
    assert_eq!(learned(&longer).into_iter().flatten().next(), None);
    // What comes every time is learned without.
    let always = learned_of(&plan, &[More(20); 10]);
    assert_eq!(always.iter().position(Option::is_some), Some(7));
}

#[test]
fn a_job_whose_iterations_all_differ_has_no_detours_and_neither_has_one_with_one_iteration() {
    let all_differ = [Step, Evaluation(2), Evaluation(3), Evaluation(5), Evaluation(7)];
    for (iterations, iteration) in [(&all_differ[..], 4), (&all_differ[..1], 0), (&[Step, Evaluation(2), Step], 2)] {
        // In the last one the first iteration says what repeats.
        let plan = Plan::from_trace(&job(iterations, DEFAULT), iteration).unwrap();
        assert_eq!(plan.detours.len(), usize::from(iteration == 2), "{iterations:?}");
    }
}

#[test]
fn a_detour_keeps_out_of_other_lanes_and_out_of_what_is_there_for_good() {
    // Two streams, of which the first has the lower part: its detour lies above the other's.
    let (mut both, other) = (job(&[Step, Evaluation(3), Step, Step], DEFAULT), job(&[Step; 4], StreamId(7)));
    both.events.extend(other.events.iter().map(|event| Event { id: event.id + (1 << 32), ..*event }));
    both.events.sort_by_key(|event| event.iteration);
    (0..).zip(&mut both.events).for_each(|(tick, event)| event.tick = Tick(tick));
    let plan = Plan::from_trace(&both, 3).unwrap();
    assert_eq!((plan.lanes().len(), plan.detours.len()), (2, 1));
    let parts: Vec<PlanSpan> = plan.lanes().iter().filter_map(|of| of.plan.part()).collect();
    assert!(plan.detours[0].spans().any(|span| span.start() >= parts[1].end()));
    check(&plan).unwrap();
    for of in plan.lanes() {
        assert_eq!(of.plan.detours.len(), usize::from(of.lane.stream == DEFAULT));
        check(&of.plan).unwrap();
    }
    let refused = |change: &dyn Fn(&mut Plan)| {
        let mut wrong = plan.clone();
        change(&mut wrong);
        let refused = check(&wrong).unwrap_err();
        assert!(matches!(refused, Wrong::Detour { number: 0, .. }), "{refused:?}");
        assert!(matches!(format::read(&format::write(&wrong)), Err(format::FormatError::Wrong(_))));
        refused.to_string()
    };
    let place = |plan: &mut Plan, offset: u64| plan.detours[0].requests[5].offset = Some(PlanOffset::new(offset));
    let other = plan.lanes()[1].plan.part().unwrap().start().get();
    assert!(refused(&|plan| place(plan, other)).contains("another lane's"));
    assert!(refused(&|plan| place(plan, other - 512)).contains("another lane's"));
    let weight = plan.entries.iter().find(|entry| entry.bytes == Bytes::kib(700)).unwrap().offset.get();
    assert!(refused(&|plan| place(plan, weight + 512)).contains("for good"));
    assert!(refused(&|plan| place(plan, plan.pool_len.get() - 512)).contains("impossible place"));
    assert!(refused(&|plan| place(plan, 100)).contains("impossible place"));
    assert!(refused(&|plan| plan.detours[0].requests[5].bytes = Bytes::MAX).contains("impossible size"));
    assert!(refused(&|plan| plan.detours[0].from = 0).contains("none of its cycle's"));
    assert!(refused(&|plan| plan.detours[0].lane.stream = StreamId(7)).contains("none of its cycle's"));
    assert!(refused(&|plan| plan.detours[0].to = 0).contains("none of its cycle's"));
    // A context says nothing about where it lies.
    let mut other = plan.clone();
    other.detours[0].requests[5].context = ContextKey(9);
    assert_ne!(other.id(), plan.id());
    check(&other).unwrap();
}

/// Blocks of requests from places of their own, each with its size, all live until the iteration ends: block by block how many, from which place on, and of how many KiB.
fn blocks(iterations: &[&[(u32, u32, u64)]]) -> Trace {
    let modules = (0..2000).map(|module| if module == 0 { String::new() } else { format!("m{module}") });
    let mut trace = Trace { events: Vec::new(), modules: modules.collect() };
    for (iteration, of_iteration) in (0..).zip(iterations) {
        let first = trace.events.len() as u64;
        let each = of_iteration.iter().flat_map(|(count, from, kib)| (0..*count).map(move |nth| (from + nth, *kib)));
        let asked: Vec<(u64, (u32, u64))> = (first..).zip(each).collect();
        for (kind, (id, (module, kib))) in asked
            .iter()
            .map(|asked| (EventKind::Alloc, asked))
            .chain(asked.iter().map(|asked| (EventKind::Free, asked)))
        {
            let context = Context { module: *module, ..Context::default() };
            let (tick, bytes) = (Tick(trace.events.len() as u64), Bytes::kib(*kib));
            let (is_dynamic, stream) = (false, DEFAULT);
            let (id, device, thread) = (*id, 0, 0);
            let event = Event { tick, kind, id, bytes, stream, iteration, context, is_dynamic, device, thread };
            trace.events.push(event);
        }
    }
    trace
}

#[test]
fn what_varies_from_step_to_step_is_no_other_kind() {
    let iterations: Vec<Vec<(u32, u32, u64)>> =
        (0..12).map(|at| vec![(200, 1, 64), (24, 500, 1000 + 16 * at), (200, 800, 32)]).collect();
    let trace = blocks(&iterations.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let sizes = [1, 3, 11].map(|iteration| {
        let plan = Plan::from_trace(&trace, iteration).unwrap();
        assert_eq!((plan.detours.len(), plan.dynamic.len()), (0, 48), "from {iteration}");
        plan.pool_len
    });
    assert_eq!(sizes, [sizes[0]; 3]);
}

#[test]
fn a_kind_that_goes_one_way_with_another_has_places_beside_that() {
    let step: &[(u32, u32, u64)] = &[(100, 1, 64), (20, 200, 300), (100, 300, 64), (20, 400, 300), (100, 500, 64)];
    let both: &[(u32, u32, u64)] = &[(100, 1, 64), (20, 200, 600), (100, 300, 64), (20, 400, 600), (100, 500, 64)];
    let one: &[(u32, u32, u64)] = &[(100, 1, 64), (20, 200, 600), (100, 300, 64), (20, 400, 900), (100, 500, 64)];
    let plan = Plan::from_trace(&blocks(&[step, both, one, step, step]), 4).unwrap();
    assert_eq!(plan.detours.iter().map(|detour| detour.spans().count()).collect::<Vec<_>>(), [20; 3]);
    // The one in front goes with either of the two behind it, and all of an iteration is live together.
    let (front, behind): (Vec<&Detour>, Vec<&Detour>) =
        plan.detours.iter().partition(|detour| detour.from == plan.detours[0].from);
    let is_apart = |one: PlanSpan| behind.iter().flat_map(|of| of.spans()).all(|other| !one.overlaps(other));
    assert!(front.len() == 1 && front[0].spans().all(is_apart));
}

#[test]
fn a_lane_of_which_nothing_is_planned_again_has_no_detour_and_long_ago_is_like_now() {
    // Twenty buffers on another stream, each freed two iterations later.
    let mut trace = job(&[Step; 6], DEFAULT);
    let id = |iteration: u32, nth: u64| (1 << 40) + u64::from(iteration) * 100 + nth;
    for iteration in 0..6_u32 {
        let bytes = Bytes::kib(if iteration == 2 { 128 } else { 64 });
        let like = *trace.events.iter().rfind(|event| event.iteration == iteration).unwrap();
        for nth in 0..20 {
            let stream = StreamId(7);
            trace.events.push(Event { kind: EventKind::Alloc, id: id(iteration, nth), bytes, stream, ..like });
            if let Some(before) = iteration.checked_sub(2) {
                let kind = EventKind::Free;
                trace.events.push(Event { kind, id: id(before, nth), bytes: Bytes::ZERO, stream, ..like });
            }
        }
    }
    trace.events.sort_by_key(|event| event.iteration);
    (0..).zip(&mut trace.events).for_each(|(tick, event)| event.tick = Tick(tick));
    assert_eq!(Plan::from_trace(&trace, 4).unwrap().detours, []);
    // What the first iteration leaves to the second does not live through the first pass, however late the planned one is.
    let mut long = blocks(&[&[(60, 1, 64)][..]; 40]);
    let begins = long.events.iter().position(|event| event.iteration == 1).unwrap();
    let (first, of_second) = (long.events[0], long.events[begins]);
    long.events.insert(begins, Event { kind: EventKind::Free, id: 1 << 40, bytes: Bytes::ZERO, ..of_second });
    long.events.insert(0, Event { id: 1 << 40, bytes: Bytes::mib(500), ..first });
    (0..).zip(&mut long.events).for_each(|(tick, event)| event.tick = Tick(tick));
    let pool_len = [1, 20, 39].map(|iteration| Plan::from_trace(&long, iteration).unwrap().pool_len);
    assert_eq!(pool_len, [pool_len[0]; 3]);
}

#[test]
fn an_iteration_with_nothing_in_it_is_no_kind() {
    let mut trace = job(&[Step; 5], DEFAULT);
    trace.events.iter_mut().filter(|event| event.iteration > 1).for_each(|event| event.iteration += 1);
    assert_eq!(Plan::from_trace(&trace, 5).unwrap().detours, []);
}
