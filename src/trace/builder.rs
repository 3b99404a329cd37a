//! Puts a trace together event by event, and refuses what cannot have happened. Every reader of a format builds its traces here, so
//! that the invariant of [`Trace`] has one home.

use foldhash::HashMap;

use super::{Event, EventKind, Trace};
use crate::limits;
use crate::units::{Bytes, Tick};

/// Why an event cannot come next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// More than a trace can have.
    #[error("there are more than {} events", limits::TRACE_EVENTS_MAX)]
    TooLong,
    /// More bytes than any machine has.
    #[error("no machine could have this many bytes")]
    Bytes,
    /// The highest number means that there is none.
    #[error("no iteration has this number")]
    Iteration,
    /// The event names a module that the trace does not have.
    #[error("there is no such module")]
    Module,
    /// Time goes back.
    #[error("{tick} comes after {last}; ticks never go back")]
    Tick {
        /// The event's.
        tick: Tick,
        /// That of the event before it.
        last: Tick,
    },
    /// The id is in no state for this event.
    #[error("{id} {what}")]
    Id {
        /// Which.
        id: u64,
        /// What it is instead.
        what: &'static str,
    },
}

/// A trace in the making.
#[derive(Debug)]
pub struct Builder {
    trace: Trace,
    modules: HashMap<String, u32>,
    lives: HashMap<u64, Life>,
    /// Bytes ever asked for: what is live can only be less.
    asked: Bytes,
}

/// What an id is at some point of the trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Live,
    Freed,
    Completed,
}

impl Default for Builder {
    fn default() -> Builder {
        let trace = Trace { events: Vec::new(), modules: vec![String::new()] };
        Builder {
            trace,
            modules: [(String::new(), 0)].into_iter().collect(),
            lives: HashMap::default(),
            asked: Bytes::ZERO,
        }
    }
}

impl Builder {
    /// The index of the module called `name`, for [`super::Context::module`].
    pub fn module(&mut self, name: &str) -> u32 {
        if let Some(module) = self.modules.get(name) {
            return *module;
        }
        let module = self.trace.modules.len() as u32;
        self.trace.modules.push(name.to_owned());
        self.modules.insert(name.to_owned(), module);
        module
    }

    /// Adds an event, or says why it cannot come next; then nothing has changed.
    pub fn push(&mut self, event: Event) -> Result<(), RuleError> {
        if self.trace.events.len() >= limits::TRACE_EVENTS_MAX {
            return Err(RuleError::TooLong);
        }
        if let Some(last) = self.trace.events.last().filter(|last| last.tick > event.tick) {
            return Err(RuleError::Tick { tick: event.tick, last: last.tick });
        }
        if event.iteration == u32::MAX {
            return Err(RuleError::Iteration);
        }
        if event.context.module as usize >= self.trace.modules.len() {
            return Err(RuleError::Module);
        }
        let mut asked = self.asked;
        if event.kind == EventKind::Alloc {
            let sum = Some(event.bytes).filter(|bytes| *bytes <= Bytes::LARGEST);
            asked = sum.and_then(|bytes| asked.checked_add(bytes)).ok_or(RuleError::Bytes)?;
        }
        if event.kind.has_id() {
            self.live_on(event.id, event.kind)?;
        }
        self.asked = asked;
        self.trace.events.push(event);
        Ok(())
    }

    /// What becomes of `id`.
    fn live_on(&mut self, id: u64, kind: EventKind) -> Result<(), RuleError> {
        let wrong = |what| Err(RuleError::Id { id, what });
        let next = match (kind, self.lives.get(&id)) {
            (EventKind::Alloc, None) | (EventKind::RecordStream, Some(Life::Live)) => Life::Live,
            (EventKind::Free, Some(Life::Live)) => Life::Freed,
            (EventKind::FreeCompleted, Some(Life::Freed)) => Life::Completed,
            (EventKind::Alloc, Some(_)) => return wrong("was allocated before"),
            (EventKind::FreeCompleted, Some(Life::Live)) => return wrong("is completed before it is freed"),
            (_, None) => return wrong("was never allocated"),
            (_, Some(_)) => return wrong("is freed already"),
        };
        self.lives.insert(id, next);
        Ok(())
    }

    /// The trace; nothing where no event came.
    pub fn finish(self) -> Option<Trace> {
        Some(self.trace).filter(|trace| !trace.events.is_empty())
    }
}
