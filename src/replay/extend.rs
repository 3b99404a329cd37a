//! Longer traces from a trace: its last iteration again and again.
//!
//! What an iteration leaves live and what it frees of the one before it are told apart as a job would have it: an allocation of the last iteration that is never freed takes the place of one
//! of the iteration before that was freed in it, size by size, stream by stream, module by module. What has no such counterpart is not made again, or every repetition would hold
//! more than the one before.

use std::collections::{HashMap, VecDeque};

use crate::ids::StreamId;
use crate::trace::{Context, Event, EventKind, Trace};
use crate::units::{Bytes, Tick};

/// What makes two allocations of neighbouring iterations the same one.
type Likeness = (Bytes, StreamId, Context, u32);

/// `trace` with its last iteration `times` more.
pub fn repeat(trace: &Trace, times: u32) -> Trace {
    let mut longer = trace.clone();
    let Some(last) = trace.events.iter().map(|event| event.iteration).max() else { return longer };
    let cycle: Vec<Event> = trace.events.iter().filter(|event| event.iteration == last).copied().collect();
    let carried = Carried::of(trace, last);
    let mut next_id = trace.events.iter().map(|event| event.id).max().unwrap_or(0) + 1;
    let mut tick = trace.events.last().map_or(0, |event| event.tick.0) + 1;
    // The last pass's name of what each allocation of the cycle is.
    let mut names: HashMap<u64, u64> = HashMap::new();
    for round in 1..=times {
        let iteration = last.saturating_add(round).min(u32::MAX - 1);
        let before = std::mem::take(&mut names);
        let first_tick = cycle.first().map_or(0, |event| event.tick.0);
        for event in &cycle {
            let id = match event.kind {
                EventKind::Alloc if carried.is_left_alone(event.id) => continue,
                EventKind::Alloc => {
                    names.insert(event.id, next_id);
                    next_id += 1;
                    next_id - 1
                }
                _ if !event.kind.has_id() => event.id,
                _ => match carried.of_the_pass_before(event.id) {
                    // Of this pass.
                    None => match names.get(&event.id) {
                        Some(name) => *name,
                        None => continue,
                    },
                    // Of the pass before, which in the first repetition is the trace itself.
                    Some(Some(counterpart)) => before.get(&counterpart).copied().unwrap_or(counterpart),
                    Some(None) => continue,
                },
            };
            let tick = Tick(tick + (event.tick.0 - first_tick));
            longer.events.push(Event { id, tick, iteration, ..*event });
        }
        tick = longer.events.last().map_or(tick, |event| event.tick.0) + 1;
    }
    longer
}

/// What crosses the beginning of the last iteration.
#[derive(Default)]
struct Carried {
    /// Allocations of before that the last iteration frees, and which of its own takes their place.
    freed: HashMap<u64, Option<u64>>,
    /// Allocations of the last iteration that stay, and are nobody's counterpart.
    alone: std::collections::HashSet<u64>,
}

impl Carried {
    fn of(trace: &Trace, last: u32) -> Carried {
        let mut carried = Carried::default();
        let mut made: HashMap<u64, &Event> = HashMap::new();
        let mut freed_before: Vec<&Event> = Vec::new();
        let mut freed: std::collections::HashSet<u64> = std::collections::HashSet::new();
        for event in &trace.events {
            match event.kind {
                EventKind::Alloc => {
                    made.insert(event.id, event);
                }
                EventKind::Free => {
                    freed.insert(event.id);
                    freed_before
                        .extend(made.get(&event.id).filter(|made| event.iteration == last && made.iteration < last));
                }
                _ => {}
            }
        }
        let stays =
            |event: &&Event| event.kind == EventKind::Alloc && event.iteration == last && !freed.contains(&event.id);
        let mut staying: HashMap<Likeness, VecDeque<u64>> = HashMap::new();
        for event in trace.events.iter().filter(stays) {
            staying.entry(likeness(event)).or_default().push_back(event.id);
        }
        for event in freed_before {
            let counterpart = staying.get_mut(&likeness(event)).and_then(VecDeque::pop_front);
            carried.freed.insert(event.id, counterpart);
        }
        carried.alone = staying.into_values().flatten().collect();
        carried
    }

    fn is_left_alone(&self, id: u64) -> bool {
        self.alone.contains(&id)
    }

    /// If the allocation is of an earlier iteration: which of the last one stands for it.
    fn of_the_pass_before(&self, id: u64) -> Option<Option<u64>> {
        self.freed.get(&id).copied()
    }
}

fn likeness(event: &Event) -> Likeness {
    (event.bytes, event.stream, event.context, event.device)
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

    #[test]
    fn what_only_one_iteration_freed_is_freed_once() {
        let trace = read(&["0,alloc,1,50,0,0", "1,free,1,,0,1", "2,alloc,2,5,0,1", "3,free,2,,0,1"]);
        let longer = repeat(&trace, 2);
        check(&longer);
        assert_eq!(live_at_the_end(&longer), Vec::<u64>::new());
    }
}
