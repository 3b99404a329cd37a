//! A trace as a replay runs it: the events of one device, each live allocation in a slot of its own.
//!
//! Not for: what allocators make of it. A script is the same for all of them.
//!
//! Invariant: a slot holds one allocation at a time, from its [`Step::Alloc`] to its last step, and every step names a slot below [`Script::slots`].

use std::collections::HashMap;

use crate::ids::StreamId;
use crate::trace::{Context, ContextKey, Event, EventKind, Trace};
use crate::units::{Bytes, Tick};

/// What is asked of an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Where the allocation is kept while it lives.
    pub slot: u32,
    /// The event of the trace that this is.
    pub event: u32,
    /// Bytes, not zero.
    pub bytes: Bytes,
    /// The stream it is for.
    pub stream: StreamId,
    /// Which thread asks.
    pub thread: u32,
    /// From where in the job.
    pub context: ContextKey,
    /// It varies from iteration to iteration.
    pub is_dynamic: bool,
}

/// One step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Memory is asked for.
    Alloc(Asked),
    /// It is given back.
    Free {
        /// Which.
        slot: u32,
        /// The event of the trace that this is.
        event: u32,
        /// Its bytes can be used again only when a [`Step::Completed`] says so, and not at once.
        waits: bool,
    },
    /// Its bytes can be used again.
    Completed {
        /// Which.
        slot: u32,
    },
    /// Another stream uses it, too.
    RecordStream {
        /// Which.
        slot: u32,
        /// The other stream.
        stream: StreamId,
    },
    /// The iteration of this number begins.
    Iteration(u32),
}

/// A trace, ready to run.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// In the order of the trace.
    pub steps: Vec<Step>,
    /// One more than the highest slot.
    pub slots: u32,
    /// Allocations.
    pub requests: u64,
    /// Requests for nothing, which are left out.
    pub empty: u64,
    /// Iterations that it begins; at least one.
    pub iterations: u32,
    /// Most bytes live at one time.
    pub peak_live: Bytes,
}

/// Slots that are free, and those of live ids.
#[derive(Default)]
struct Slots {
    by_id: HashMap<u64, u32>,
    free: Vec<u32>,
    count: u32,
}

impl Slots {
    fn take(&mut self, id: u64) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        });
        self.by_id.insert(id, slot);
        slot
    }

    fn of(&self, id: u64) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    fn give_back(&mut self, id: u64) {
        self.free.extend(self.by_id.remove(&id));
    }
}

impl Script {
    /// The events of `device`. Requests for nothing are left out: no allocator does anything for them.
    pub fn of(trace: &Trace, device: u32) -> Script {
        let mut script = Script::default();
        let mut slots = Slots::default();
        let mut keys: HashMap<Context, ContextKey> = HashMap::new();
        let mut live: HashMap<u64, Bytes> = HashMap::new();
        let mut live_bytes = Bytes::ZERO;
        let mut iteration = None;
        let waiting = trace.waiting();
        for (at, event) in trace.events.iter().enumerate() {
            if event.device != device {
                continue;
            }
            if event.kind.has_id() && iteration.is_none_or(|last| event.iteration > last) {
                iteration = Some(event.iteration);
                script.iterations += 1;
                script.steps.push(Step::Iteration(event.iteration));
            }
            let number = at as u32;
            match event.kind {
                EventKind::Alloc if event.bytes > Bytes::ZERO => {
                    live.insert(event.id, event.bytes);
                    live_bytes = live_bytes.saturating_add(event.bytes);
                    script.peak_live = script.peak_live.max(live_bytes);
                    script.requests += 1;
                    let context = *keys.entry(event.context).or_insert_with(|| trace.key(&event.context));
                    let slot = slots.take(event.id);
                    script.steps.push(Step::Alloc(asked(event, slot, number, context)));
                }
                EventKind::Free => {
                    let Some(slot) = slots.of(event.id) else { continue };
                    live_bytes = live_bytes.saturating_sub(live.remove(&event.id).unwrap_or(Bytes::ZERO));
                    let waits = waiting.contains(&event.id);
                    script.steps.push(Step::Free { slot, event: number, waits });
                    if !waits {
                        slots.give_back(event.id);
                    }
                }
                EventKind::FreeCompleted => {
                    let Some(slot) = slots.of(event.id) else { continue };
                    script.steps.push(Step::Completed { slot });
                    slots.give_back(event.id);
                }
                EventKind::RecordStream => {
                    let Some(slot) = slots.of(event.id) else { continue };
                    script.steps.push(Step::RecordStream { slot, stream: event.stream });
                }
                EventKind::Alloc => script.empty += 1,
                EventKind::Enter | EventKind::Exit | EventKind::Mark => {}
            }
        }
        script.slots = slots.count;
        script
    }

    /// When the event of this number happened.
    pub fn tick(trace: &Trace, event: u32) -> Tick {
        trace.events.get(event as usize).map_or(Tick(0), |event| event.tick)
    }
}

fn asked(event: &Event, slot: u32, number: u32, context: ContextKey) -> Asked {
    let Event { bytes, stream, thread, is_dynamic, .. } = *event;
    Asked { slot, event: number, bytes, stream, thread, context, is_dynamic }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(rows: &str, device: u32) -> Script {
        let text = format!("tick,event,id,bytes,stream,iteration,device\n{rows}");
        Script::of(&crate::trace::csv::read(text.as_bytes()).unwrap(), device)
    }

    /// Letters of the steps, with their slots or iterations.
    fn letters(script: &Script) -> Vec<(char, u32)> {
        let letter = |step: &Step| match *step {
            Step::Alloc(asked) => ('a', asked.slot),
            Step::Free { slot, .. } => ('f', slot),
            Step::Completed { slot } => ('c', slot),
            Step::RecordStream { slot, .. } => ('r', slot),
            Step::Iteration(number) => ('i', number),
        };
        script.steps.iter().map(letter).collect()
    }

    /// Device 1 says when bytes can be used again, and device 0 does not.
    const TWO_DEVICES: &str = "0,alloc,1,100,0,0,0\n1,alloc,2,30,0,0,1\n2,free,1,,0,0,0\n3,alloc,3,50,0,1,0\n\
        4,free,2,,0,1,1\n5,alloc,4,40,0,1,1\n6,free_completed,2,,0,1,1\n7,alloc,5,10,0,1,1\n8,free,3,,0,2,0\n";

    #[test]
    fn the_events_of_one_device_are_run_and_no_others() {
        let first = steps(TWO_DEVICES, 0);
        assert_eq!(letters(&first), [('i', 0), ('a', 0), ('f', 0), ('i', 1), ('a', 0), ('i', 2), ('f', 0)]);
        assert_eq!((first.slots, first.requests, first.iterations), (1, 2, 3));
        assert_eq!(first.peak_live, Bytes::new(100));
    }

    #[test]
    fn a_slot_is_given_out_again_when_its_bytes_can_be_used_again() {
        let second = steps(TWO_DEVICES, 1);
        let expected = [('i', 0), ('a', 0), ('i', 1), ('f', 0), ('a', 1), ('c', 0), ('a', 0)];
        assert_eq!(letters(&second), expected);
        assert_eq!((second.slots, second.peak_live), (2, Bytes::new(50)));
    }

    #[test]
    fn what_no_completion_is_told_of_is_over_with_its_free_whatever_others_wait_for() {
        let rows = "0,alloc,1,100,0,0,0\n1,alloc,2,30,0,0,0\n2,free,1,,0,0,0\n3,free,2,,0,0,0\n4,alloc,3,50,0,0,0\n\
            5,free_completed,2,,0,0,0\n6,alloc,4,40,0,0,0\n";
        let script = steps(rows, 0);
        let waits = |step: &Step| matches!(step, Step::Free { waits: true, .. });
        let expected = [('i', 0), ('a', 0), ('a', 1), ('f', 0), ('f', 1), ('a', 0), ('c', 1), ('a', 1)];
        assert_eq!(letters(&script), expected);
        assert_eq!(script.steps.iter().map(waits).filter(|waits| *waits).count(), 1);
        assert_eq!(script.slots, 2);
    }

    #[test]
    fn requests_for_nothing_and_what_becomes_of_them_are_left_out() {
        let script = steps("0,alloc,1,0,0,0,0\n1,record_stream,1,,7,0,0\n2,alloc,2,8,0,0,0\n3,free,1,,0,0,0\n", 0);
        assert_eq!((letters(&script), script.requests), (vec![('i', 0), ('a', 0)], 1));
    }
}
