//! What both sides of a binary trace know at any event: the lines so far, and what came after what.
//!
//! Invariant: the same events noted in the same order make the same book. How it foretells is part of the format: a change here is a new version.

use crate::ids::StreamId;
use crate::rng::mix;
use crate::trace::{Context, Event, EventKind};
use crate::units::{Bytes, Tick};

/// Different lines that a book holds before it is begun anew: more than the iterations of today's largest jobs have, in five megabytes.
pub(super) const LINES_MAX: usize = 1 << 16;
/// Places for "after these came that".
const NEXT_BITS: u32 = 16;

/// An event relative to the one before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Line {
    /// Ticks since.
    pub(super) ticks: u64,
    /// Of an allocation, from the id after the last allocation's; of others, back from the last allocation's; wrapping.
    pub(super) distance: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// Iterations since, wrapping.
    pub(super) iterations: u32,
    pub(super) context: Context,
    pub(super) device: u32,
    pub(super) thread: u32,
    pub(super) kind: EventKind,
    pub(super) is_dynamic: bool,
}

/// The lines, and where the trace is.
pub(super) struct Book {
    lines: Vec<Line>,
    /// After the three lines that hash to the index, one more than the line that came last; 0 for none.
    next: Vec<u32>,
    past: [u32; 3],
    /// The line of the last event.
    last: Line,
    tick: u64,
    iteration: u32,
    /// The id that the next allocation has if all goes on as before.
    id: u64,
}

impl Default for Book {
    fn default() -> Book {
        let last = Line {
            ticks: 0,
            distance: 0,
            bytes: 0,
            stream: 0,
            iterations: 0,
            context: Context::default(),
            device: 0,
            thread: 0,
            kind: EventKind::Alloc,
            is_dynamic: false,
        };
        Book { lines: Vec::new(), next: vec![0; 1 << NEXT_BITS], past: [0; 3], last, tick: 0, iteration: 0, id: 0 }
    }
}

impl Book {
    /// The line of the event before, or of none: what a new line is written against.
    pub(super) fn last(&self) -> &Line {
        &self.last
    }

    /// How many lines it has.
    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn line(&self, index: usize) -> Option<Line> {
        self.lines.get(index).copied()
    }

    /// The line that should come next.
    pub(super) fn foretold(&self) -> Option<u32> {
        self.next.get(self.place()).and_then(|next| next.checked_sub(1))
    }

    fn place(&self) -> usize {
        let hash = self.past.iter().fold(0, |hash, line| mix(hash ^ u64::from(*line)));
        (hash >> (64 - NEXT_BITS)) as usize
    }

    /// The event as a line; none if its tick lies before the last one's.
    pub(super) fn line_of(&self, event: &Event) -> Option<Line> {
        Some(Line {
            ticks: event.tick.0.checked_sub(self.tick)?,
            distance: match event.kind {
                EventKind::Alloc => event.id.wrapping_sub(self.id),
                kind if kind.has_id() => self.id.wrapping_sub(1).wrapping_sub(event.id),
                _ => event.id,
            },
            bytes: event.bytes.get(),
            stream: event.stream.0,
            iterations: event.iteration.wrapping_sub(self.iteration),
            context: event.context,
            device: event.device,
            thread: event.thread,
            kind: event.kind,
            is_dynamic: event.is_dynamic,
        })
    }

    /// The line as the next event; none if there is no tick so late.
    pub(super) fn event(&self, line: &Line) -> Option<Event> {
        Some(Event {
            tick: Tick(self.tick.checked_add(line.ticks)?),
            kind: line.kind,
            id: match line.kind {
                EventKind::Alloc => self.id.wrapping_add(line.distance),
                kind if kind.has_id() => self.id.wrapping_sub(1).wrapping_sub(line.distance),
                _ => line.distance,
            },
            bytes: Bytes::new(line.bytes),
            stream: StreamId(line.stream),
            iteration: self.iteration.wrapping_add(line.iterations),
            context: line.context,
            is_dynamic: line.is_dynamic,
            device: line.device,
            thread: line.thread,
        })
    }

    /// Adds a line and gives its index. True if the book was full and has been begun anew before.
    pub(super) fn add(&mut self, line: Line) -> (u32, bool) {
        let is_full = self.lines.len() >= LINES_MAX;
        if is_full {
            self.lines.clear();
            self.next.fill(0);
            self.past = [0; 3];
        }
        self.lines.push(line);
        (self.lines.len() as u32 - 1, is_full)
    }

    /// The event has come, and `index` is its line.
    pub(super) fn note(&mut self, index: u32, line: &Line, event: &Event) {
        let place = self.place();
        if let Some(next) = self.next.get_mut(place) {
            *next = index + 1;
        }
        self.past = [self.past[1], self.past[2], index + 1];
        self.last = *line;
        self.tick = event.tick.0;
        self.iteration = event.iteration;
        if event.kind == EventKind::Alloc {
            self.id = event.id.wrapping_add(1);
        }
    }
}
