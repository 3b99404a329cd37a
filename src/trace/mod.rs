//! Recorded sequences of allocations and frees, as a job made them.
//!
//! Not for: what an allocator makes of them. A trace knows sizes, order and context; addresses come later.
//!
//! Invariant of every [`Trace`] that a reader gives: ticks never go back, an id is allocated before it is used and freed at most once.

pub mod binary;
mod breakdown;
pub mod builder;
#[cfg(feature = "daemon")]
pub mod csv;
mod cut;
mod error;
#[cfg(feature = "daemon")]
pub mod export;
#[cfg(feature = "daemon")]
pub mod import;
pub mod period;
mod summary;
#[cfg(feature = "daemon")]
mod unpack;

pub use breakdown::{Breakdown, IterationFigures, Part, SizeClass};
pub(crate) use cut::live_after;
pub use cut::{Cut, Ending};
pub use error::{Flaw, TraceError};
pub use summary::Summary;

use std::collections::{BTreeMap, HashSet};

use crate::ids::StreamId;
use crate::rng::mix;
use crate::units::{Bytes, Tick};

/// A whole trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// In the order in which they happened.
    pub events: Vec<Event>,
    /// Names of modules; events point here. The first is the empty name.
    pub modules: Vec<String>,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, in operations. Several events may share a tick; their order decides.
    pub tick: Tick,
    /// What.
    pub kind: EventKind,
    /// Of which allocation; 0 where the kind has none.
    pub id: u64,
    /// Bytes as asked for; zero where the kind has none.
    pub bytes: Bytes,
    /// On which stream.
    pub stream: StreamId,
    /// In which iteration, counted from 0.
    pub iteration: u32,
    /// In what context.
    pub context: Context,
    /// The request came from a module whose sizes vary at run time.
    pub is_dynamic: bool,
    /// On which device of the job.
    pub device: u32,
    /// From which thread.
    pub thread: u32,
}

/// What an event is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EventKind {
    /// Bytes were asked for.
    Alloc,
    /// They were given back.
    Free,
    /// They could be used again, once the streams that used them had passed.
    FreeCompleted,
    /// Another stream uses the allocation, too.
    RecordStream,
    /// A module begins.
    Enter,
    /// A module ends.
    Exit,
    /// An iteration ends here.
    Mark,
}

impl EventKind {
    /// Every kind with its name in files.
    pub const ALL: [(&'static str, EventKind); 7] = [
        ("alloc", EventKind::Alloc),
        ("free", EventKind::Free),
        ("free_completed", EventKind::FreeCompleted),
        ("record_stream", EventKind::RecordStream),
        ("enter", EventKind::Enter),
        ("exit", EventKind::Exit),
        ("mark", EventKind::Mark),
    ];

    /// Its name in files.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).expect("every kind has a name").0
    }

    /// The event is about one allocation.
    pub fn has_id(self) -> bool {
        !matches!(self, EventKind::Enter | EventKind::Exit | EventKind::Mark)
    }
}

/// A named part of an iteration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum Phase {
    /// Before the first step.
    Init,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// Forward pass made again for the backward pass.
    Recompute,
    /// Optimizer step.
    Optimizer,
    /// Anything else.
    #[default]
    Other,
}

impl Phase {
    /// Every phase with its name in files.
    pub const ALL: [(&'static str, Phase); 6] = [
        ("init", Phase::Init),
        ("forward", Phase::Forward),
        ("backward", Phase::Backward),
        ("recompute", Phase::Recompute),
        ("optimizer", Phase::Optimizer),
        ("other", Phase::Other),
    ];

    /// Its name in files.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, phase)| *phase == self).expect("every phase has a name").0
    }
}

/// Where in a job a request comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Context {
    /// Part of the iteration.
    pub phase: Phase,
    /// Micro-batch.
    pub microbatch: Option<u32>,
    /// Model chunk of a virtual pipeline.
    pub chunk: Option<u32>,
    /// Index into [`Trace::modules`].
    pub module: u32,
}

/// A context as the request matcher compares it: equal contexts have equal keys, in every process and version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct ContextKey(pub u64);

impl ContextKey {
    /// The caller does not say where it is; matches any context.
    pub const UNKNOWN: ContextKey = ContextKey(0);

    /// Where nothing was recorded, as in all of a trace without contexts: the key of [`Context::default`] in no module.
    pub const NONE: ContextKey = ContextKey(0x3a56_f854_ae9e_add7);

    /// It says nothing.
    #[inline]
    pub fn is_unknown(self) -> bool {
        self == ContextKey::UNKNOWN || self == ContextKey::NONE
    }

    /// A request that comes from `asked` may be the one that a plan has from here: they are the same, or one of the two says nothing.
    #[inline]
    pub fn may_be(self, asked: ContextKey) -> bool {
        self == asked || asked == ContextKey::UNKNOWN || self == ContextKey::NONE
    }

    /// The key of a context in the module called `module`.
    pub fn of(context: &Context, module: &str) -> ContextKey {
        // FNV-1a over the name, then each field mixed in; +1 keeps "none" apart from 0.
        let mut hash = module
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        let phase = Phase::ALL.iter().position(|(_, phase)| *phase == context.phase).map_or(0, |at| at as u64);
        let number = |n: Option<u32>| n.map_or(0, |n| u64::from(n) + 1);
        for field in [phase, number(context.microbatch), number(context.chunk)] {
            hash = mix(hash ^ field.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        ContextKey(hash | 1)
    }
}

impl Trace {
    /// The matcher's key of every module context, computed once per distinct context by the caller's cache.
    pub fn key(&self, context: &Context) -> ContextKey {
        ContextKey::of(context, self.modules.get(context.module as usize).map_or("", String::as_str))
    }

    /// Allocations whose bytes can be used again only some time after their free: those of which the trace says when. And of each device those that were freed last, where it says it of all before, and those are more: a snapshot
    /// has a completion for each free but what comes after it. Not where it says it only of what other streams use, as our own recordings do.
    pub fn waiting(&self) -> HashSet<u64> {
        let of = |kind| self.events.iter().filter(move |event| event.kind == kind);
        let recorded: HashSet<u64> = of(EventKind::RecordStream).map(|event| event.id).collect();
        let mut waiting: HashSet<u64> = of(EventKind::FreeCompleted).map(|event| event.id).collect();
        let mut frees: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        of(EventKind::Free).for_each(|event| frees.entry(event.device).or_default().push(event.id));
        for frees in frees.values() {
            let (told, last) = frees.split_at(frees.iter().take_while(|id| waiting.contains(id)).count());
            let is_all = last.len() <= told.len() && !last.iter().any(|id| waiting.contains(id));
            if is_all && !told.iter().all(|id| recorded.contains(id)) {
                waiting.extend(last);
            }
        }
        waiting
    }

    /// One more than the highest iteration of any event.
    pub fn iterations(&self) -> u32 {
        self.events.iter().map(|event| event.iteration + 1).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "daemon")]
    #[test]
    fn what_waits_is_what_is_told_of_and_what_comes_behind_the_last_of_all() {
        let waiting = |rows: &str| {
            let mut all: Vec<u64> =
                csv::read(format!("tick,event,id,bytes\n{rows}").as_bytes()).unwrap().waiting().into_iter().collect();
            all.sort_unstable();
            all
        };
        let made: String = (1..=4).map(|id| format!("0,alloc,{id},8\n")).collect();
        let all_told = format!("{made}1,free,1,\n2,free,2,\n3,free_completed,1,\n3,free_completed,2,\n4,free,3,\n");
        assert_eq!(waiting(&all_told), [1, 2, 3], "the third is completed after the end");
        let some_told = format!("{made}1,free,1,\n2,free,2,\n3,free_completed,2,\n4,free,3,\n5,free,4,\n");
        assert_eq!(waiting(&some_told), [2], "the others did not wait");
        assert!(waiting(&format!("{made}1,free,1,\n")).is_empty());
    }

    #[test]
    fn where_nothing_was_recorded_has_a_key_of_its_own() {
        assert_eq!(ContextKey::of(&Context::default(), ""), ContextKey::NONE);
        assert!(ContextKey::NONE.may_be(ContextKey(1)) && ContextKey(1).may_be(ContextKey::UNKNOWN));
        assert!(!ContextKey(1).may_be(ContextKey::NONE) && !ContextKey(1).may_be(ContextKey(3)));
    }
}
