//! An order as stretches of memory over time: what placing and replaying it need.

use super::graph::Graph;
use crate::ids::StreamId;
use crate::trace::{Context, Event, EventKind, Phase, Trace};
use crate::units::{Bytes, Lifetime, Tick};

/// What is live for some time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Of {
    /// A tensor, or several that are the same memory: their number.
    Storage(u32),
    /// What an operator needs while it runs.
    Workspace(u32),
}

/// Memory that is live from the start of one operator to the end of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// Whose.
    pub of: Of,
    /// Bytes, one at least.
    pub bytes: u64,
    /// Places in the order: from the first that needs it, to one after the last that does.
    pub lifetime: Lifetime,
    /// It is there before the first operator.
    pub is_given: bool,
    /// It is there after the last.
    pub is_kept: bool,
}

/// When everything is live, in the order in which it comes.
pub fn lives(graph: &Graph, order: &[u32]) -> Vec<Life> {
    let end = order.len() as u64;
    let mut spans: Vec<Option<(u64, u64)>> = vec![None; graph.storages.len()];
    let mut lives = Vec::with_capacity(graph.storages.len());
    for (at, node) in order.iter().enumerate() {
        for storage in &graph.nodes[*node as usize].storages {
            let at = at as u64;
            spans[*storage as usize].get_or_insert((at, at)).1 = at;
        }
    }
    for (number, (storage, span)) in graph.storages.iter().zip(&spans).enumerate().filter(|(_, (s, _))| s.bytes > 0) {
        let (first, last) = span.unwrap_or((0, end.saturating_sub(1)));
        let from = if storage.is_given { 0 } else { first };
        let to = if storage.is_kept { end } else { last + 1 };
        lives.push(Life {
            of: Of::Storage(number as u32),
            bytes: storage.bytes,
            lifetime: Lifetime::new(from, to),
            is_given: storage.is_given,
            is_kept: storage.is_kept,
        });
    }
    for (at, node) in order.iter().enumerate() {
        let bytes = graph.nodes[*node as usize].workspace;
        if bytes > 0 {
            let lifetime = Lifetime::new(at as u64, at as u64 + 1);
            lives.push(Life { of: Of::Workspace(*node), bytes, lifetime, is_given: false, is_kept: false });
        }
    }
    lives.sort_by_key(|life| life.lifetime.start);
    lives
}

/// Bytes that are live while each operator runs.
pub fn curve(lives: &[Life], len: usize) -> Vec<u64> {
    let mut changes = vec![0_i128; len + 1];
    for life in lives {
        changes[life.lifetime.start.0 as usize] += i128::from(life.bytes);
        changes[life.lifetime.end.0 as usize] -= i128::from(life.bytes);
    }
    let mut live = 0;
    let running = changes.into_iter().take(len).map(|change| {
        live += change;
        u64::try_from(live).unwrap_or(0)
    });
    running.collect()
}

/// The order as a job: what is there from before and stays (weights) is asked for once, in iteration 0; then it goes through the order so many times.
pub fn trace(lives: &[Life], len: usize, iterations: u32) -> Trace {
    // What comes at a place, and what has gone before it.
    let mut comes: Vec<Vec<usize>> = vec![Vec::new(); len + 1];
    let mut goes: Vec<Vec<usize>> = vec![Vec::new(); len + 1];
    let (stays, passes): (Vec<usize>, Vec<usize>) =
        (0..lives.len()).partition(|number| lives[*number].is_given && lives[*number].is_kept);
    for number in passes {
        let Lifetime { start, end } = lives[number].lifetime;
        comes[start.0 as usize].push(number);
        goes[end.0 as usize].push(number);
    }
    let mut job = Job::default();
    for number in stays {
        job.alloc(lives[number].bytes);
    }
    job.mark();
    let mut ids = vec![0; lives.len()];
    for _ in 0..iterations {
        for at in 0..=len {
            goes[at].iter().for_each(|number| job.event(EventKind::Free, ids[*number], 0));
            comes[at].iter().for_each(|number| ids[*number] = job.alloc(lives[*number].bytes));
            job.tick += 1;
        }
        job.mark();
    }
    Trace { events: job.events, modules: vec![String::new()] }
}

/// A job while it is written down.
#[derive(Default)]
struct Job {
    events: Vec<Event>,
    tick: u64,
    iteration: u32,
    next: u64,
}

impl Job {
    fn event(&mut self, kind: EventKind, id: u64, bytes: u64) {
        self.events.push(Event {
            tick: Tick(self.tick),
            kind,
            id,
            bytes: Bytes::new(bytes),
            stream: StreamId::DEFAULT,
            iteration: self.iteration,
            context: Context {
                phase: if self.iteration == 0 { Phase::Init } else { Phase::Other },
                ..Context::default()
            },
            is_dynamic: false,
            device: 0,
            thread: 0,
        });
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        self.event(EventKind::Alloc, self.next, bytes);
        self.next += 1;
        self.next - 1
    }

    /// An iteration ends here.
    fn mark(&mut self) {
        self.event(EventKind::Mark, 0, 0);
        self.tick += 1;
        self.iteration += 1;
    }
}
