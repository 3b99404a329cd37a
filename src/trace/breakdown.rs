//! A trace in all its numbers: sizes, iterations, and what holds the bytes at the peak.

use std::collections::HashMap;

use super::{Event, EventKind, Phase, Summary, Trace};
use crate::units::{Bytes, Tick};

/// A trace in numbers. All bytes are those asked for, unrounded, of all devices together.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Breakdown {
    /// The few that matter most.
    pub summary: Summary,
    /// Bytes of all requests.
    pub asked: Bytes,
    /// Those of requests that are marked as varying.
    pub dynamic: Bytes,
    /// When most was live.
    pub peak_tick: Tick,
    /// In which iteration.
    pub peak_iteration: u32,
    /// Smallest request.
    pub smallest: Bytes,
    /// The middle one; of an even number the larger of two.
    pub median: Bytes,
    /// Largest request.
    pub largest: Bytes,
    /// Requests by size, in powers of two, without those that nobody made.
    pub sizes: Vec<SizeClass>,
    /// One for each iteration.
    pub iterations: Vec<IterationFigures>,
    /// By phase of the request; most bytes at the peak first.
    pub phases: Vec<Part>,
    /// By module of the request; most bytes at the peak first.
    pub modules: Vec<Part>,
    /// Streams, devices and threads that requests name.
    pub streams: usize,
    /// Devices.
    pub devices: usize,
    /// Threads.
    pub threads: usize,
}

/// Requests of about one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SizeClass {
    /// The least: a power of two, or zero.
    pub from: Bytes,
    /// How many.
    pub requests: u64,
    /// Their bytes.
    pub asked: Bytes,
}

/// One iteration in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IterationFigures {
    /// Allocations.
    pub requests: u64,
    /// How many of them are marked as varying.
    pub dynamic_requests: u64,
    /// Bytes of all.
    pub asked: Bytes,
    /// Most bytes live at any time of it.
    pub peak_live: Bytes,
}

/// What one phase or module has of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Allocations.
    pub requests: u64,
    /// How many of them are marked as varying.
    pub dynamic_requests: u64,
    /// Bytes of all.
    pub asked: Bytes,
    /// Bytes of those live when most was live in the whole trace.
    pub at_peak: Bytes,
    /// Most bytes of its own live at any time.
    pub peak_live: Bytes,
}

/// A part while it is counted.
#[derive(Clone, Copy, Default)]
struct Count {
    requests: u64,
    dynamic_requests: u64,
    asked: Bytes,
    live: Bytes,
    at_peak: Bytes,
    peak_live: Bytes,
}

impl Count {
    fn alloc(&mut self, event: &Event, is_before_peak: bool) {
        self.requests += 1;
        self.dynamic_requests += u64::from(event.is_dynamic);
        self.asked = self.asked.saturating_add(event.bytes);
        self.live = self.live.saturating_add(event.bytes);
        self.peak_live = self.peak_live.max(self.live);
        if is_before_peak {
            self.at_peak = self.at_peak.saturating_add(event.bytes);
        }
    }

    fn free(&mut self, bytes: Bytes, is_before_peak: bool) {
        self.live = self.live.saturating_sub(bytes);
        if is_before_peak {
            self.at_peak = self.at_peak.saturating_sub(bytes);
        }
    }

    fn part(self, name: &str) -> Part {
        Part {
            name: name.to_owned(),
            requests: self.requests,
            dynamic_requests: self.dynamic_requests,
            asked: self.asked,
            at_peak: self.at_peak,
            peak_live: self.peak_live,
        }
    }
}

impl Trace {
    /// Counts everything.
    pub fn breakdown(&self) -> Breakdown {
        let summary = self.summary();
        let mut breakdown = Breakdown { summary, ..Breakdown::default() };
        let peak = self.timeline(&mut breakdown);
        self.parts(&mut breakdown, peak);
        self.sizes(&mut breakdown);
        breakdown
    }

    fn requests(&self) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(|event| event.kind == EventKind::Alloc)
    }

    /// What happens in the course of time. The index of the event with which the most is live.
    fn timeline(&self, breakdown: &mut Breakdown) -> usize {
        // Iterations that nothing says anything about are not worth memory, whatever their numbers claim.
        let most = self.events.len();
        breakdown.iterations.resize((breakdown.summary.iterations as usize).min(most), IterationFigures::default());
        let mut live: HashMap<u64, Bytes> = HashMap::new();
        let (mut live_bytes, mut peak, mut peak_at) = (Bytes::ZERO, Bytes::ZERO, 0);
        for (at, event) in self.events.iter().enumerate() {
            let mut unlisted = IterationFigures::default();
            let figures = breakdown.iterations.get_mut(event.iteration as usize).unwrap_or(&mut unlisted);
            // What was live when an iteration began, was live in it.
            figures.peak_live = figures.peak_live.max(live_bytes);
            match event.kind {
                EventKind::Alloc => {
                    figures.requests += 1;
                    figures.dynamic_requests += u64::from(event.is_dynamic);
                    figures.asked = figures.asked.saturating_add(event.bytes);
                    breakdown.asked = breakdown.asked.saturating_add(event.bytes);
                    if event.is_dynamic {
                        breakdown.dynamic = breakdown.dynamic.saturating_add(event.bytes);
                    }
                    live.insert(event.id, event.bytes);
                    live_bytes = live_bytes.saturating_add(event.bytes);
                    figures.peak_live = figures.peak_live.max(live_bytes);
                    if live_bytes > peak {
                        (peak, peak_at) = (live_bytes, at);
                        (breakdown.peak_tick, breakdown.peak_iteration) = (event.tick, event.iteration);
                    }
                }
                EventKind::Free => {
                    live_bytes = live_bytes.saturating_sub(live.remove(&event.id).unwrap_or(Bytes::ZERO));
                }
                _ => {}
            }
        }
        peak_at
    }

    fn parts(&self, breakdown: &mut Breakdown, peak: usize) {
        let mut modules = vec![Count::default(); self.modules.len()];
        let mut phases: HashMap<Phase, Count> = HashMap::new();
        let mut live: HashMap<u64, &Event> = HashMap::new();
        for (at, event) in self.events.iter().enumerate() {
            let is_before_peak = at <= peak;
            let alloc = match event.kind {
                EventKind::Alloc => event,
                EventKind::Free => match live.remove(&event.id) {
                    Some(alloc) => alloc,
                    None => continue,
                },
                _ => continue,
            };
            let phase = phases.entry(alloc.context.phase).or_default();
            let module = modules.get_mut(alloc.context.module as usize);
            for count in module.into_iter().chain([phase]) {
                match event.kind {
                    EventKind::Alloc => count.alloc(event, is_before_peak),
                    _ => count.free(alloc.bytes, is_before_peak),
                }
            }
            if event.kind == EventKind::Alloc {
                live.insert(event.id, event);
            }
        }
        let modules = modules.iter().zip(&self.modules).filter(|(count, _)| count.requests > 0);
        breakdown.modules = sorted(modules.map(|(count, name)| count.part(name)).collect());
        breakdown.phases = sorted(phases.iter().map(|(phase, count)| count.part(phase.name())).collect());
    }

    fn sizes(&self, breakdown: &mut Breakdown) {
        let mut sizes: Vec<Bytes> = self.requests().map(|event| event.bytes).collect();
        sizes.sort_unstable();
        breakdown.smallest = sizes.first().copied().unwrap_or_default();
        breakdown.median = sizes.get(sizes.len() / 2).copied().unwrap_or_default();
        breakdown.largest = sizes.last().copied().unwrap_or_default();
        for bytes in sizes {
            let from = Bytes::new(bytes.get().checked_ilog2().map_or(0, |power| 1 << power));
            if breakdown.sizes.last().is_none_or(|class| class.from != from) {
                breakdown.sizes.push(SizeClass { from, ..SizeClass::default() });
            }
            if let Some(class) = breakdown.sizes.last_mut() {
                class.requests += 1;
                class.asked = class.asked.saturating_add(bytes);
            }
        }
        breakdown.streams = distinct(self.requests().map(|event| event.stream.0));
        breakdown.devices = distinct(self.requests().map(|event| u64::from(event.device)));
        breakdown.threads = distinct(self.requests().map(|event| u64::from(event.thread)));
    }
}

fn sorted(mut parts: Vec<Part>) -> Vec<Part> {
    parts.sort_by(|a, b| (b.at_peak, b.asked, &a.name).cmp(&(a.at_peak, a.asked, &b.name)));
    parts
}

fn distinct(all: impl Iterator<Item = u64>) -> usize {
    all.collect::<std::collections::HashSet<_>>().len()
}

#[cfg(all(test, feature = "daemon"))]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_counted_by_hand() {
        let text = "tick,event,id,bytes,stream,iteration,phase,module,dynamic\n\
            0,alloc,1,100,0,0,init,w,0\n\
            1,alloc,2,40,0,0,forward,a,1\n\
            2,free,2,,0,0,backward,,\n\
            3,alloc,3,64,0,1,forward,a,0\n\
            4,alloc,4,0,7,1,forward,b,0\n\
            5,free,3,,0,1,backward,,\n\
            6,alloc,5,60,0,1,forward,b,0\n";
        let breakdown = crate::trace::csv::read(text.as_bytes()).unwrap().breakdown();
        let bytes = |n| Bytes::new(n);
        assert_eq!((breakdown.asked, breakdown.dynamic), (bytes(264), bytes(40)));
        assert_eq!((breakdown.peak_tick, breakdown.peak_iteration), (Tick(3), 1));
        assert_eq!((breakdown.smallest, breakdown.median, breakdown.largest), (bytes(0), bytes(60), bytes(100)));
        let classes: Vec<_> = breakdown.sizes.iter().map(|c| (c.from.get(), c.requests, c.asked.get())).collect();
        assert_eq!(classes, [(0, 1, 0), (32, 2, 100), (64, 2, 164)]);
        let iterations: Vec<_> = breakdown.iterations.iter().map(|i| (i.requests, i.peak_live.get())).collect();
        assert_eq!(iterations, [(2, 140), (3, 164)]);
        let part = |part: &Part| {
            (part.name.clone(), part.requests, part.asked.get(), part.at_peak.get(), part.peak_live.get())
        };
        let modules: Vec<_> = breakdown.modules.iter().map(part).collect();
        assert_eq!(modules, [("w".into(), 1, 100, 100, 100), ("a".into(), 2, 104, 64, 64), ("b".into(), 2, 60, 0, 60)]);
        let phases: Vec<_> = breakdown.phases.iter().map(|part| (part.name.as_str(), part.at_peak.get())).collect();
        assert_eq!(phases, [("init", 100), ("forward", 64)]);
        assert_eq!((breakdown.streams, breakdown.devices, breakdown.modules[1].dynamic_requests), (2, 1, 1));
    }
}
