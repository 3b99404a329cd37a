//! Longer traces from a trace: its last iteration again and again.
//!
//! What an iteration leaves behind and what it ends of those before it are told apart as a job would have it: an allocation that is live at the end takes the place of one
//! that was live at the beginning and is freed in between, and one that waits for its completion that of one that waited and is completed, size by size, stream by stream, module by
//! module. What has no such counterpart is not made again, or every repetition would hold more than the one before.

use std::collections::{HashMap, HashSet, VecDeque};

use super::fresh::FreshIds;
use crate::ids::StreamId;
use crate::trace::{Context, Event, EventKind, Trace};
use crate::units::{Bytes, Tick};

/// What makes two allocations of neighbouring iterations the same one.
type Likeness = (Bytes, StreamId, Context, u32, Life);

/// `trace` with its last iteration `times` more.
pub fn repeat(trace: &Trace, times: u32) -> Trace {
    let mut longer = trace.clone();
    let Some(last) = trace.events.iter().map(|event| event.iteration).max() else { return longer };
    let cycle: Vec<Event> = trace.events.iter().filter(|event| event.iteration == last).copied().collect();
    let carried = Carried::of(trace, last);
    let mut ids = FreshIds::of(trace);
    let mut tick = trace.events.last().map_or(0, |event| event.tick.0).saturating_add(1);
    // What each allocation of the cycle was called in the last pass; in the trace itself, as it is.
    let mut names: HashMap<u64, u64> = HashMap::new();
    for round in 1..=times {
        let iteration = last.saturating_add(round).min(u32::MAX - 1);
        let before = std::mem::take(&mut names);
        let first_tick = cycle.first().map_or(0, |event| event.tick.0);
        for event in &cycle {
            let id = match event.kind {
                _ if !event.kind.has_id() => event.id,
                EventKind::Alloc if carried.alone.contains(&event.id) => continue,
                EventKind::Alloc => *names.entry(event.id).or_insert_with(|| ids.take()),
                _ => {
                    let taken = carried.places.get(&event.id).map(|place| *before.get(place).unwrap_or(place));
                    let Some(name) = names.get(&event.id).copied().or(taken) else { continue };
                    // Who takes its own place in the next pass asks for it.
                    names.insert(event.id, name);
                    name
                }
            };
            let tick = Tick(tick.saturating_add(event.tick.0 - first_tick));
            longer.events.push(Event { id, tick, iteration, ..*event });
        }
        tick = longer.events.last().map_or(tick, |event| event.tick.0).saturating_add(1);
    }
    longer
}

/// What an allocation is at a point of the trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Life {
    Live,
    /// Given back, and a stream may still use it.
    Freed,
    Gone,
}

/// What crosses the beginning of the last iteration.
#[derive(Default)]
struct Carried {
    /// Allocations of before that the last iteration has to do with, and which of those at its end has their place in the next.
    places: HashMap<u64, u64>,
    /// Allocations of the last iteration that it leaves behind, and that are nobody's counterpart.
    alone: HashSet<u64>,
}

impl Carried {
    fn of(trace: &Trace, last: u32) -> Carried {
        let waiting = trace.waiting();
        let mut made: HashMap<u64, (&Event, Life)> = HashMap::new();
        // Those of before, as they were at the beginning; in the order in which the last iteration comes to them.
        let mut begun: Vec<(u64, Life)> = Vec::new();
        let mut seen: HashSet<u64> = HashSet::new();
        for event in &trace.events {
            if event.kind == EventKind::Alloc {
                made.insert(event.id, (event, Life::Live));
            } else if event.kind.has_id()
                && let Some((alloc, life)) = made.get_mut(&event.id)
            {
                if event.iteration == last && alloc.iteration != last && seen.insert(event.id) {
                    begun.push((event.id, *life));
                }
                *life = match event.kind {
                    EventKind::Free if waiting.contains(&alloc.id) => Life::Freed,
                    EventKind::Free | EventKind::FreeCompleted => Life::Gone,
                    _ => *life,
                };
            }
        }
        Carried::matched(trace, last, &made, &begun)
    }

    fn matched(trace: &Trace, last: u32, made: &HashMap<u64, (&Event, Life)>, begun: &[(u64, Life)]) -> Carried {
        let mut carried = Carried::default();
        let mut left: HashMap<Likeness, VecDeque<u64>> = HashMap::new();
        let end = |id: &u64| made.get(id).filter(|(_, life)| *life != Life::Gone);
        let older = begun.iter().filter(|(id, life)| end(id).is_some_and(|(_, after)| after != life));
        let of_last = trace.events.iter().filter(|event| event.kind == EventKind::Alloc && event.iteration == last);
        for id in older.map(|(id, _)| *id).chain(of_last.map(|event| event.id)) {
            if let Some((alloc, life)) = end(&id) {
                left.entry(likeness(alloc, *life)).or_default().push_back(id);
            }
        }
        for (id, life) in begun {
            let Some((alloc, after)) = made.get(id) else { continue };
            // What only used it leaves it as it was.
            let place = if after == life {
                Some(*id)
            } else {
                left.get_mut(&likeness(alloc, *life)).and_then(VecDeque::pop_front)
            };
            carried.places.extend(place.map(|place| (*id, place)));
        }
        carried.alone = left.into_values().flatten().collect();
        carried
    }
}

fn likeness(event: &Event, life: Life) -> Likeness {
    (event.bytes, event.stream, event.context, event.device, life)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::builder::Builder;

    const NAMES: &[u8] = b"tick,event,id,bytes,stream,iteration\n";

    fn read(rows: &[&str]) -> Trace {
        let text = [std::str::from_utf8(NAMES).unwrap(), &rows.join("\n")].concat();
        crate::trace::csv::read(text.as_bytes()).unwrap()
    }

    /// The rules of a trace hold for what was made.
    fn check(trace: &Trace) {
        let mut builder = Builder::default();
        for name in &trace.modules {
            builder.module(name);
        }
        trace.events.iter().for_each(|event| builder.push(*event).unwrap());
    }

    fn live_at_the_end(trace: &Trace) -> Vec<u64> {
        let mut live: Vec<u64> = Vec::new();
        for event in &trace.events {
            match event.kind {
                EventKind::Alloc => live.push(event.bytes.get()),
                EventKind::Free => {
                    let made = trace.events.iter().find(|made| made.id == event.id).unwrap();
                    let at = live.iter().position(|bytes| *bytes == made.bytes.get()).unwrap();
                    live.remove(at);
                }
                _ => {}
            }
        }
        live.sort_unstable();
        live
    }

    #[test]
    fn an_iteration_is_repeated_with_names_of_its_own() {
        let trace = read(&["0,alloc,1,100,0,0", "1,alloc,2,7,0,1", "2,free,2,,0,1"]);
        let longer = repeat(&trace, 3);
        check(&longer);
        assert_eq!((longer.iterations(), longer.events.len()), (5, 3 + 3 * 2));
        assert_eq!(live_at_the_end(&longer), [100]);
        assert!(longer.events.is_sorted_by_key(|event| event.tick));
    }

    #[test]
    fn what_one_iteration_leaves_the_next_one_frees() {
        // A gradient that is freed in the next iteration, and something that every iteration leaks.
        let trace = read(&["0,alloc,1,50,0,0", "1,free,1,,0,1", "2,alloc,2,50,0,1", "3,alloc,3,9,0,1"]);
        let longer = repeat(&trace, 4);
        check(&longer);
        assert_eq!(live_at_the_end(&longer), [9, 50], "one gradient, and what was leaked once");
    }

    /// Allocations by what has become of them at the end: live, or freed and not completed.
    fn left_behind(trace: &Trace) -> [usize; 2] {
        let count = |kind| trace.events.iter().filter(|event| event.kind == kind).count();
        let (made, freed) = (count(EventKind::Alloc), count(EventKind::Free));
        [made - freed, freed - count(EventKind::FreeCompleted)]
    }

    #[test]
    fn what_one_iteration_frees_the_next_one_completes() {
        let trace = read(&[
            "0,alloc,1,50,0,0",
            "1,free,1,,0,0",
            "2,free_completed,1,,0,1",
            "3,alloc,2,50,0,1",
            "4,record_stream,2,,9,1",
            "5,free,2,,0,1",
        ]);
        let longer = repeat(&trace, 4);
        check(&longer);
        assert_eq!((longer.events.len(), left_behind(&longer)), (6 + 4 * 4, [0, 1]));
        // Each is completed in the iteration after its own.
        let when = |kind| longer.events.iter().filter(move |event| event.kind == kind).map(|event| event.iteration);
        assert!(when(EventKind::Alloc).map(|iteration| iteration + 1).take(5).eq(when(EventKind::FreeCompleted)));
    }

    #[test]
    fn what_takes_three_iterations_to_end_goes_from_hand_to_hand() {
        // Made in one, freed in the next, completed in the third.
        let trace = read(&[
            "0,alloc,1,50,0,0",
            "1,free,1,,0,1",
            "2,alloc,2,50,0,1",
            "3,free_completed,1,,0,2",
            "4,free,2,,0,2",
            "5,alloc,3,50,0,2",
        ]);
        let longer = repeat(&trace, 5);
        check(&longer);
        assert_eq!((longer.events.len(), left_behind(&longer)), (6 + 5 * 3, [1, 1]));
    }

    #[test]
    fn what_lives_on_is_used_again_and_what_is_never_completed_is_made_once() {
        let trace = read(&[
            "0,alloc,1,50,0,0",
            "1,record_stream,1,,9,1",
            "2,alloc,2,7,0,1",
            "3,free,2,,0,1",
            "4,free_completed,2,,0,1",
            "5,alloc,3,8,0,1",
            "6,free,3,,0,1",
        ]);
        let longer = repeat(&trace, 3);
        check(&longer);
        assert_eq!((longer.events.len(), left_behind(&longer)), (7 + 3 * 4, [1, 1]));
        assert_eq!(
            longer.events.iter().filter(|event| event.kind == EventKind::RecordStream && event.id == 1).count(),
            4
        );
    }

    #[test]
    fn a_trace_that_goes_to_the_last_number_is_repeated_too() {
        let id = u64::MAX;
        let trace = read(&[
            &format!("0,alloc,{id},50,0,0"),
            &format!("{id},free,{id},,0,0"),
            &format!("{id},alloc,0,50,0,1"),
            &format!("{id},free,0,,0,1"),
        ]);
        let longer = repeat(&trace, 3);
        check(&longer);
        assert_eq!((longer.events.len(), live_at_the_end(&longer)), (4 + 3 * 2, vec![]));
    }

    #[test]
    fn what_only_one_iteration_freed_is_freed_once() {
        let trace = read(&["0,alloc,1,50,0,0", "1,free,1,,0,1", "2,alloc,2,5,0,1", "3,free,2,,0,1"]);
        let longer = repeat(&trace, 2);
        check(&longer);
        assert_eq!(live_at_the_end(&longer), Vec::<u64>::new());
    }
}
