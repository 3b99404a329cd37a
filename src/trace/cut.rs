//! Whether the last iteration of a trace is a whole one: a run that ended in out of memory, or was killed, ends in the middle of one.
//!
//! Three things tell. Its source may say so: memory ran out there ([`Ending::refused`]), or the file ends before its process did ([`Ending::is_cut`]). Else the iteration before it does: of one that is
//! cut there are fewer requests, the last of them are not those with which an iteration ends, and more is live than an iteration leaves behind. An iteration that a mark ends is whole.
//!
//! Not for: whether an iteration is like the others. A shorter accumulation or an evaluation is whole.
//!
//! Invariant: what lies before a cut is a trace, with the last iteration cut and the others as they were.

use std::collections::{HashMap, HashSet};

use super::{Event, EventKind, Trace};
use crate::ids::StreamId;
use crate::units::Bytes;

/// What the source of a trace says of its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ending {
    /// Memory ran out, for a request of so much: the last, or the largest. It is in the trace as if it had been served, and given back at once.
    pub refused: Option<Bytes>,
    /// The file ends before the job did.
    pub is_cut: bool,
}

/// Where the last iteration of a trace is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cut {
    /// Which iteration.
    pub iteration: u32,
    /// Events of the trace before the cut.
    pub events: u64,
    /// Requests of the iteration before the cut.
    pub requests: u64,
    /// Bytes live at the cut, of all iterations.
    pub live: Bytes,
}

/// Requests at the end of an iteration by which another ends alike.
const TAIL: usize = 8;
/// An iteration that leaves no more than one part in so many of the peak behind, above what the one before left, may be whole.
const LEFT_SHARE: u64 = 64;

impl Trace {
    /// Where its last iteration is cut; nothing where nothing says that it is.
    pub fn cut(&self, ending: Ending) -> Option<Cut> {
        let requests = || self.events.iter().enumerate().filter(|(_, event)| is_request(event));
        let (last, iteration) = requests().next_back().map(|(at, event)| (at, event.iteration))?;
        if self.events.get(last..)?.iter().any(|event| event.kind == EventKind::Mark) {
            return None;
        }
        let of_last = || requests().filter(|(_, event)| event.iteration == iteration);
        // After a request that was refused a job may try again and go on; one that fails ends its business.
        let refused = ending.refused.and_then(|bytes| self.last_refused(bytes)).filter(|at| {
            let before = of_last().filter(|(place, _)| place < at).count();
            self.events[*at].iteration == iteration && of_last().count() - before - 1 < before
        });
        let is_cut = refused.is_some() || ending.is_cut || self.ends_short(iteration);
        let events = refused.unwrap_or(self.events.len());
        is_cut.then(|| Cut {
            iteration,
            events: events as u64,
            requests: of_last().filter(|(place, _)| *place < events).count() as u64,
            live: live_after(self.events.get(..events).unwrap_or_default()),
        })
    }

    /// What there is before a cut.
    pub fn before(&self, cut: &Cut) -> Trace {
        let events = usize::try_from(cut.events).unwrap_or(usize::MAX).min(self.events.len());
        Trace { events: self.events[..events].to_vec(), modules: self.modules.clone() }
    }

    /// What was served: without requests of a recording that were refused, each of which was given back in its own tick.
    #[must_use]
    pub fn without_refused(mut self) -> Trace {
        let is_refused = |pair: &&[Event]| is_given_back_at_once(pair) && pair[0].tick == pair[1].tick;
        let refused: HashSet<u64> = self.events.windows(2).filter(is_refused).map(|pair| pair[0].id).collect();
        self.events.retain(|event| event.kind == EventKind::Mark || !refused.contains(&event.id));
        self
    }

    /// The last request for so much that was given back at once.
    fn last_refused(&self, bytes: Bytes) -> Option<usize> {
        let is_refused = |pair: &[Event]| is_given_back_at_once(pair) && pair[0].bytes == bytes;
        self.events.windows(2).rposition(is_refused)
    }

    /// The iteration ends where the one before it did not.
    fn ends_short(&self, iteration: u32) -> bool {
        let Some(before) = iteration.checked_sub(1) else { return false };
        let asked = |wanted: u32| -> Vec<(Bytes, StreamId)> {
            let of = self.events.iter().filter(|event| is_request(event) && event.iteration == wanted);
            of.filter(|event| !event.is_dynamic).map(|event| (event.bytes, event.stream)).collect()
        };
        let (one, other) = (asked(before), asked(iteration));
        if other.len() >= one.len() || one.iter().rev().take(TAIL).eq(other.iter().rev().take(TAIL)) {
            return false;
        }
        // Events go by the iteration that they name, which is theirs wherever their row stands.
        let begins = self.events.iter().position(|event| event.iteration == iteration).unwrap_or(0);
        let left = live_after(&self.events[..begins]);
        let allowed = left.get().saturating_add(self.summary().peak_live.get() / LEFT_SHARE);
        live_after(&self.events).get() > allowed
    }
}

/// Of two events that follow each other the second frees what the first has allocated.
fn is_given_back_at_once(pair: &[Event]) -> bool {
    pair[0].kind == EventKind::Alloc && pair[1].kind == EventKind::Free && pair[1].id == pair[0].id
}

fn is_request(event: &Event) -> bool {
    event.kind == EventKind::Alloc && event.bytes != Bytes::ZERO
}

/// Bytes live behind the last of these events.
pub(crate) fn live_after(events: &[Event]) -> Bytes {
    let mut live: HashMap<u64, Bytes> = HashMap::new();
    for event in events {
        match event.kind {
            EventKind::Alloc => drop(live.insert(event.id, event.bytes)),
            EventKind::Free | EventKind::FreeCompleted => drop(live.remove(&event.id)),
            _ => {}
        }
    }
    live.into_values().fold(Bytes::ZERO, |sum, bytes| sum.checked_add(bytes).unwrap_or(Bytes::MAX))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::trace::builder::Builder;
    use crate::trace::import::read_file;

    fn shared(name: &str) -> Trace {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        read_file(&folder.join(format!("{name}.csv.zst"))).unwrap().trace
    }

    /// The events up to a share of an iteration.
    fn cut_at(trace: &Trace, iteration: u32, per_cent: usize) -> Trace {
        let of = |(_, event): &(usize, &Event)| event.iteration == iteration;
        let places: Vec<usize> = trace.events.iter().enumerate().filter(of).map(|(at, _)| at).collect();
        let end = places[places.len() * per_cent / 100];
        Trace { events: trace.events[..end].to_vec(), modules: trace.modules.clone() }
    }

    const JOBS: [&str; 5] = ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "qwen-moe-V-last", "resnet50-olla"];

    #[test]
    fn a_real_job_that_stops_in_the_middle_of_an_iteration_is_cut_there_and_a_whole_one_is_not() {
        for name in JOBS {
            let trace = shared(name);
            assert_eq!(trace.cut(Ending::default()), None, "{name}");
            for iteration in [1, 2] {
                for per_cent in [30, 50, 70] {
                    let short = cut_at(&trace, iteration, per_cent);
                    let cut =
                        short.cut(Ending::default()).unwrap_or_else(|| panic!("{name}, {iteration}, {per_cent} %"));
                    let requests =
                        short.events.iter().filter(|event| is_request(event) && event.iteration == iteration);
                    assert_eq!((cut.iteration, cut.events), (iteration, short.events.len() as u64), "{name}");
                    assert_eq!(cut.requests, requests.count() as u64, "{name}");
                    assert_eq!(cut.live, short.summary().persistent, "{name}");
                }
            }
            // Of the first iteration nobody can tell but who made the file.
            let first = cut_at(&trace, 0, 50);
            assert_eq!(first.cut(Ending::default()), None, "{name}");
            let cut = first.cut(Ending { is_cut: true, refused: None }).unwrap();
            assert_eq!((cut.iteration, cut.events), (0, first.events.len() as u64), "{name}");
        }
    }

    #[test]
    fn where_memory_ran_out_is_the_cut_and_what_is_given_back_then_is_not_the_jobs() {
        let trace = shared("gpt2-medium-hf");
        let mut short = cut_at(&trace, 1, 50);
        let expected = short.cut(Ending::default()).unwrap();
        let wanted = Bytes::gib(77);
        let last = *short.events.last().unwrap();
        let alloc = Event { kind: EventKind::Alloc, id: u64::MAX, bytes: wanted, ..last };
        short.events.extend([alloc, Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..alloc }]);
        // The program ends, and gives everything back.
        let live: Vec<Event> = {
            let mut live: HashMap<u64, Event> = HashMap::new();
            for event in &short.events {
                match event.kind {
                    EventKind::Alloc => drop(live.insert(event.id, *event)),
                    _ => drop(live.remove(&event.id)),
                }
            }
            live.into_values().collect()
        };
        short.events.extend(live.iter().map(|event| Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..*event }));
        assert_eq!(short.cut(Ending { refused: Some(wanted), is_cut: false }), Some(expected));
        let mut builder = Builder::default();
        for name in short.modules.iter().skip(1) {
            builder.module(name);
        }
        short.before(&expected).events.iter().for_each(|event| builder.push(*event).unwrap());
        // Without a word it looks like one that ended.
        assert_eq!(short.cut(Ending::default()), None);
        // A job that goes on has the rest of its iteration behind it.
        let mut whole = cut_at(&trace, 1, 30);
        whole.events.extend([alloc, Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..alloc }]);
        let rest = trace.events.iter().skip(whole.events.len() - 2).take_while(|event| event.iteration <= 1);
        whole.events.extend(rest.copied());
        assert_eq!(whole.cut(Ending { refused: Some(wanted), is_cut: false }), None);
    }

    #[test]
    fn what_a_mark_ends_and_what_is_only_shorter_is_whole() {
        let mut marked = cut_at(&shared("resnet50-olla"), 1, 50);
        let mark = Event { kind: EventKind::Mark, id: 0, bytes: Bytes::ZERO, ..*marked.events.last().unwrap() };
        marked.events.push(mark);
        assert_eq!(marked.cut(Ending { is_cut: true, refused: None }), None);
        // Half of the micro-batches, and then all that ends an iteration.
        let trace = shared("gpt2-medium-hf");
        let is_later = |event: &Event| event.iteration == 2 && event.context.microbatch.is_some_and(|nth| nth >= 2);
        let dropped: std::collections::HashSet<u64> =
            trace.events.iter().filter(|event| is_request(event) && is_later(event)).map(|event| event.id).collect();
        let mut shorter = trace.clone();
        shorter.events.retain(|event| !dropped.contains(&event.id));
        assert!(shorter.events.len() < trace.events.len());
        assert_eq!(shorter.cut(Ending::default()), None);
        assert_eq!(Trace::default().cut(Ending { is_cut: true, refused: Some(Bytes::mib(1)) }), None);
    }
}
