//! Phases that a trace says, and phases that it does not.

use super::*;
use crate::plan::Problem;
use crate::trace::Event;
use crate::units::{Bytes, Tick};

fn event(id: u64, kind: EventKind, bytes: u64, iteration: u32, phase: Phase, microbatch: Option<u32>) -> Event {
    Event {
        tick: Tick(0),
        kind,
        id,
        bytes: Bytes::new(bytes),
        stream: crate::ids::StreamId(0),
        iteration,
        context: Context { phase, microbatch, ..Context::default() },
        is_dynamic: false,
        device: 0,
        thread: 0,
    }
}

fn trace(events: Vec<Event>) -> Trace {
    Trace { events, modules: vec![String::new()] }
}

fn pairs(trace: &Trace, iteration: u32) -> Vec<(u32, u32)> {
    let problem = Problem::from_trace(trace, iteration).unwrap();
    problem.buffers.iter().map(|buffer| (buffer.phases.asked, buffer.phases.freed)).collect()
}

/// A weight, and then for each of two micro-batches an activation, freed backwards; one gradient stays until the next iteration.
fn job() -> Trace {
    let mut events = vec![event(0, EventKind::Alloc, 4096, 0, Phase::Init, None)];
    for iteration in 0..3 {
        let id = 10 + 10 * u64::from(iteration);
        let mut add =
            |id, kind, bytes, phase, batch| events.push(event(id, kind, bytes, iteration, phase, Some(batch)));
        if iteration > 0 {
            add(id - 10 + 2, EventKind::Free, 0, Phase::Forward, 0);
        }
        add(id, EventKind::Alloc, 1024, Phase::Forward, 0);
        add(id + 1, EventKind::Alloc, 1024, Phase::Forward, 1);
        add(id + 2, EventKind::Alloc, 512, Phase::Backward, 0);
        add(id, EventKind::Free, 0, Phase::Backward, 0);
        add(id + 3, EventKind::Alloc, 512, Phase::Backward, 1);
        add(id + 3, EventKind::Free, 0, Phase::Backward, 1);
        add(id + 1, EventKind::Free, 0, Phase::Backward, 1);
    }
    trace(events)
}

#[test]
fn phases_are_numbered_as_they_first_appear_and_those_of_the_cycle_are_others() {
    // Prologue: init 0, forward 0 and 1 are 1 and 2, backward 0 and 1 are 3 and 4. Cycle: 5 to 8.
    let prologue = [(0, 8), (1, 3), (2, 4), (3, 5), (4, 4)];
    // The gradient lives into the next iteration: to the last phase.
    let cycle = [(5, 7), (6, 8), (7, 8), (8, 8)];
    assert_eq!(pairs(&job(), 1), [&prologue[..], &cycle].concat());
    assert_eq!(pairs(&job(), 2), pairs(&job(), 1));
    // Of one iteration initialisation is the prologue, and what it leaves behind lives to the end.
    let mut one = job();
    one.events.retain(|event| event.iteration == 0);
    assert_eq!(pairs(&one, 0), [(0, 4), (1, 3), (2, 4), (3, 4), (4, 4)]);
}

/// The same without phases and micro-batches.
fn without_phases(mut trace: Trace) -> Trace {
    for event in &mut trace.events {
        let phase = if event.context.phase == Phase::Init { Phase::Init } else { Phase::Other };
        event.context = Context { phase, module: event.context.module, ..Context::default() };
    }
    trace
}

#[test]
fn without_phases_outermost_modules_are_phases() {
    let other = |id, kind, bytes| event(id, kind, bytes, 0, Phase::Other, None);
    let mark = |kind| other(0, kind, 0);
    let mut modules = trace(vec![
        mark(EventKind::Enter),
        other(1, EventKind::Alloc, 100),
        mark(EventKind::Enter),
        other(2, EventKind::Alloc, 100),
        mark(EventKind::Exit),
        other(3, EventKind::Alloc, 100),
        mark(EventKind::Exit),
        other(4, EventKind::Alloc, 100),
        other(4, EventKind::Free, 0),
        other(3, EventKind::Free, 0),
        mark(EventKind::Enter),
        other(2, EventKind::Free, 0),
        other(1, EventKind::Free, 0),
        mark(EventKind::Exit),
        mark(EventKind::Mark),
    ]);
    assert_eq!(pairs(&modules, 0), [(0, 2), (0, 2), (0, 1), (1, 1)]);
    // What the trace says itself goes first.
    modules.events[1].context.microbatch = Some(0);
    assert_eq!(pairs(&modules, 0), [(0, 1), (1, 1), (1, 1), (1, 1)]);
}

#[test]
fn without_phases_and_marks_the_live_curve_tells() {
    let bare = without_phases(job());
    // Up with two activations and a gradient, down with one, up and down with a gradient of the second batch, down with the rest: the last waves are a quarter of it each.
    let found = pairs(&bare, 1);
    assert_eq!(found.len(), pairs(&job(), 1).len());
    assert!(found[5] == (found[6].0, found[5].1) && found[5].1 > found[5].0, "{found:?}");
}

#[test]
fn a_curve_turns_where_it_goes_back_by_enough() {
    let rise_and_fall = [1, 5, 4, 9, 8, 9, 3, 4, 1, 6];
    assert_eq!(turns(&rise_and_fall, 3), [6, 9]);
    // A plateau belongs to what comes before it; a dip of one is a turn as well.
    assert_eq!(turns(&[1, 5, 5, 4, 9], 1), [3, 4]);
    assert_eq!(turns(&rise_and_fall, 9), [0; 0]);
    // It may begin by falling.
    assert_eq!(turns(&[9, 5, 1, 7], 4), [1, 3]);
    assert_eq!(turns(&[], 1), [0; 0]);
}

#[cfg(feature = "daemon")]
mod shared_traces {
    use std::hash::Hash;

    use super::*;
    use crate::plan::solve::{Solver, Transients, solve_in};
    use crate::plan::{Buffer, lower_bound};

    /// The share of `rows` whose first says the second, if each first stands for the second that it is most often with.
    fn said<A: Hash + Eq + Copy, B: Hash + Eq + Copy>(rows: impl Iterator<Item = (A, B)>) -> f64 {
        let (mut counts, mut most) = (HashMap::new(), HashMap::<A, u32>::new());
        for row in rows {
            let count = counts.entry(row).or_insert(0);
            *count += 1;
            let most = most.entry(row.0).or_default();
            *most = (*most).max(*count);
        }
        f64::from(most.values().sum::<u32>()) / f64::from(counts.values().sum::<u32>())
    }

    /// For each trace the least share of requests, in percent, whose inferred phase says the true one, and the other way round; and what the plan takes above the bound with either, in parts of ten thousand at most.
    #[test]
    fn the_phases_that_are_inferred_are_like_those_that_were_taken_away() {
        let rows = [
            ("gpt2-345m-VR", (79, 52), 1458),
            ("gpt2-medium-hf", (90, 99), 1579),
            ("opt-13b-Z3-RO", (96, 99), 2090),
            ("qwen-moe-V-last", (52, 99), 2566),
            ("resnet50-olla", (88, 98), 1142),
        ];
        for (name, least, most) in rows {
            let path = format!("{}/tests/data/{name}.csv.zst", env!("CARGO_MANIFEST_DIR"));
            let trace = crate::trace::import::read_file(std::path::Path::new(&path)).unwrap().trace;
            let truth = Problem::from_trace(&trace, 1).unwrap();
            let inferred = Problem::from_trace(&without_phases(trace), 1).unwrap();
            // With other phases other modules are dynamic.
            let by_start: HashMap<Tick, PhasePair> =
                truth.buffers.iter().map(|buffer| (buffer.lifetime.start, buffer.phases)).collect();
            let of_truth = |buffer: &Buffer| by_start.get(&buffer.lifetime.start).copied();
            let rows = || inferred.buffers.iter().filter_map(|one| Some((one.phases, of_truth(one)?)));
            let pure = said(rows().map(|(inferred, truth)| (inferred.asked, truth.asked))) * 100.0;
            let whole = said(rows().map(|(inferred, truth)| (truth.asked, inferred.asked))) * 100.0;
            let peak = |problem| solve_in(problem, Solver::Phased(Transients::Alone)).unwrap().peak.get() as f64;
            let bound = lower_bound(&truth).get() as f64;
            let above = |problem| (peak(problem) / bound - 1.0) * 10_000.0;
            let (with_truth, with_inferred) = (above(&truth), above(&inferred));
            println!("{name}: {pure:.1} % pure, {whole:.1} % whole, plan {with_inferred:.1} for {with_truth:.1}");
            assert!(pure >= f64::from(least.0) && whole >= f64::from(least.1), "{name}: {pure:.1}, {whole:.1}");
            assert!(
                with_inferred <= f64::from(most),
                "{name}: {with_inferred:.1}, with its own phases {with_truth:.1}"
            );
        }
    }
}
