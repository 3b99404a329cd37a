//! Jobs for the planned pool: what they do in their first iteration, in the one that is planned, and in iterations of other kinds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::rng::Rng;
use stitchd::trace::{Context, ContextKey, Event, EventKind, Phase, Trace};
use stitchd::units::{Bytes, Tick};

/// One thing that a job does in an iteration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Act {
    Alloc(usize),
    Free(usize),
}

/// What a request of the job is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    pub(crate) thread: u32,
    pub(crate) module: u32,
    pub(crate) is_dynamic: bool,
}

/// A job: what its first iteration does beside the rest, and what every iteration does.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) slots: Vec<Slot>,
    pub(crate) prologue: Vec<Act>,
    /// The first pass of the cycle, in which some of what the prologue asked for goes.
    pub(crate) first: Vec<Act>,
    pub(crate) cycle: Vec<Act>,
    /// What iterations of other kinds do, each seen once before the one that is planned.
    pub(crate) kinds: Vec<Vec<Act>>,
    /// Whether each request can be told from every other.
    pub(crate) has_contexts: bool,
    /// Streams and threads keep their own order, and none with each other: each iteration draws another from here.
    pub(crate) race: Option<u64>,
}

impl Job {
    /// The same job on the default stream alone.
    pub(crate) fn on_one_stream(mut self) -> Job {
        self.slots.iter_mut().for_each(|slot| slot.stream = StreamId(0));
        self.on_one_thread()
    }

    /// The same job from one thread.
    pub(crate) fn on_one_thread(mut self) -> Job {
        self.slots.iter_mut().for_each(|slot| slot.thread = 0);
        self
    }

    pub(crate) fn has_two_threads(&self, stream: StreamId) -> bool {
        let has = |thread| self.slots.iter().any(|slot| slot.stream == stream && slot.thread == thread);
        has(0) && has(1)
    }

    /// What is done, in an order in which each stream and thread has its own.
    pub(crate) fn raced(&self, acts: &[Act], rng: &mut Rng) -> Vec<Act> {
        let mut lanes: BTreeMap<(StreamId, u32), VecDeque<Act>> = BTreeMap::new();
        for act in acts {
            let (Act::Alloc(slot) | Act::Free(slot)) = act;
            let Slot { stream, thread, .. } = self.slots[*slot];
            lanes.entry((stream, thread)).or_default().push_back(*act);
        }
        let mut raced = Vec::new();
        while raced.len() < acts.len() {
            let nth = rng.index(lanes.len());
            let lane = lanes.values_mut().nth(nth).unwrap();
            raced.extend(lane.pop_front());
        }
        raced
    }

    /// The same job, which does everything once.
    pub(crate) fn once(mut self) -> Job {
        self.prologue.append(&mut self.first);
        self.cycle.clear();
        self.kinds.clear();
        self
    }

    pub(crate) fn random(rng: &mut Rng) -> Job {
        let has_contexts = rng.chance(600);
        let sizes: Vec<u64> = (0..1 + rng.below(12)).map(|_| random_size(rng)).collect();
        let dynamic = if rng.chance(300) { 100 } else { 0 };
        let race = (has_contexts && rng.chance(400)).then(|| rng.next_u64());
        // Threads that race do enough to be seen to.
        let default = if race.is_some() && rng.chance(700) { 1000 } else { 800 };
        let mut slots: Vec<Slot> = Vec::new();
        for at in 0..2 + rng.below(50) {
            slots.push(Slot {
                bytes: if rng.chance(700) { sizes[rng.index(sizes.len())] } else { random_size(rng) },
                stream: StreamId(if rng.chance(default) { 0 } else { 7 + rng.below(2) }),
                thread: if race.is_some() { rng.below(2) as u32 } else { 0 },
                module: if has_contexts { 1 + at as u32 } else { 0 },
                is_dynamic: rng.chance(dynamic),
            });
        }
        // A job that loads and warms up before its first step has a long one.
        let most = if rng.chance(300) { slots.len() } else { slots.len().min(8) };
        let of_prologue = rng.index(most);
        // What the prologue asks for stays for good, or goes before the first step or in it.
        let mut prologue = Vec::new();
        for slot in 0..of_prologue {
            prologue.push(Act::Alloc(slot));
            if rng.chance(300) {
                // At once, or when some more has come.
                let earlier = rng.index(slot + 1);
                let is_there = !prologue.contains(&Act::Free(earlier));
                prologue.push(Act::Free(if is_there { earlier } else { slot }));
            }
        }
        let (mut cycle, mut live, mut carried) = (Vec::new(), Vec::new(), Vec::new());
        for slot in of_prologue..slots.len() {
            cycle.push(Act::Alloc(slot));
            if rng.chance(80) {
                carried.push(slot);
            } else {
                live.push(slot);
            }
            while !live.is_empty() && rng.chance(480) {
                cycle.push(Act::Free(live.swap_remove(rng.index(live.len()))));
            }
        }
        cycle.extend(live.into_iter().map(Act::Free));
        // These live on into the next iteration, and go before they are asked for again.
        for slot in carried {
            let before = cycle.iter().position(|act| *act == Act::Alloc(slot)).unwrap();
            cycle.insert(rng.index(before + 1), Act::Free(slot));
        }
        let mut first = cycle.clone();
        for slot in 0..of_prologue {
            if !prologue.contains(&Act::Free(slot)) && rng.chance(300) {
                first.insert(rng.index(first.len() + 1), Act::Free(slot));
            }
        }
        let mut job = Job { slots, prologue, first, cycle, kinds: Vec::new(), has_contexts, race };
        if race.is_none() && rng.chance(400) {
            for _ in 0..1 + rng.below(2) {
                let kind = job.other_kind(rng);
                job.kinds.push(kind);
            }
        }
        job
    }

    /// An iteration that leaves out a stretch of the cycle, or does something in the middle of it that no other does, or both.
    fn other_kind(&mut self, rng: &mut Rng) -> Vec<Act> {
        let mut acts = self.cycle.clone();
        if rng.chance(600) {
            let first = rng.index(acts.len() + 1);
            let end = first + rng.index(acts.len() + 1 - first);
            let slot_of = |act: &Act| match act {
                Act::Alloc(slot) | Act::Free(slot) => *slot,
            };
            let out: BTreeSet<usize> = acts[first..end].iter().map(slot_of).collect();
            acts.retain(|act| !out.contains(&slot_of(act)));
        }
        if rng.chance(700) {
            let (mut own, mut live) = (Vec::new(), Vec::new());
            for _ in 0..10 + rng.below(40) {
                let slot = self.slots.len();
                let module = if self.has_contexts { 1 + slot as u32 } else { 0 };
                let bytes = random_size(rng);
                self.slots.push(Slot { bytes, stream: StreamId(0), thread: 0, module, is_dynamic: false });
                own.push(Act::Alloc(slot));
                live.push(slot);
                while !live.is_empty() && rng.chance(450) {
                    own.push(Act::Free(live.swap_remove(rng.index(live.len()))));
                }
            }
            let at = rng.index(acts.len() + 1);
            // Some of it goes with the rest of the iteration.
            let later: Vec<usize> = live.iter().copied().filter(|_| rng.chance(500)).collect();
            own.extend(live.iter().filter(|slot| !later.contains(slot)).map(|slot| Act::Free(*slot)));
            acts.splice(at..at, own);
            acts.extend(later.into_iter().map(Act::Free));
        }
        acts
    }

    /// The iteration that is planned: the second that is like those behind it.
    pub(crate) fn planned(&self) -> u32 {
        2 + self.kinds.len() as u32
    }

    /// A job that asks for `sizes` in turn, where each is freed by the next; the first `kept` of them are asked for once and stay.
    pub(crate) fn small(sizes: &[u64], kept: usize) -> Job {
        let slot = |(at, bytes): (usize, &u64)| Slot {
            bytes: *bytes,
            stream: StreamId(0),
            thread: 0,
            module: 1 + at as u32,
            is_dynamic: false,
        };
        let mut cycle = Vec::new();
        for at in kept..sizes.len() {
            cycle.push(Act::Alloc(at));
            if at > kept {
                cycle.push(Act::Free(at - 1));
            }
        }
        cycle.push(Act::Free(sizes.len() - 1));
        let prologue = (0..kept).map(Act::Alloc).collect();
        let slots = sizes.iter().enumerate().map(slot).collect();
        Job { slots, prologue, first: cycle.clone(), cycle, kinds: Vec::new(), has_contexts: true, race: None }
    }

    /// The job as a recorder would have seen it.
    pub(crate) fn trace(&self, iterations: u32) -> Trace {
        let modules = (0..=self.slots.len()).map(|at| if at == 0 { String::new() } else { format!("m{at}") });
        let mut trace = Trace { events: Vec::new(), modules: modules.collect() };
        let mut ids: BTreeMap<usize, u64> = BTreeMap::new();
        for iteration in 0..iterations {
            let prologue = self.prologue.iter().filter(|_| iteration == 0).map(|act| (act, Phase::Init));
            let other = (iteration as usize).checked_sub(1).and_then(|nth| self.kinds.get(nth));
            let pass = if iteration == 0 { &self.first } else { other.unwrap_or(&self.cycle) };
            let race = self.race.filter(|_| iteration > 0).map(|seed| Rng::new(seed + u64::from(iteration)));
            let pass = race.map_or_else(|| pass.clone(), |mut rng| self.raced(pass, &mut rng));
            for (act, phase) in prologue.chain(pass.iter().map(|act| (act, Phase::Forward))) {
                let tick = trace.events.len() as u64 + 1;
                let (slot, kind, id) = match act {
                    Act::Alloc(slot) => {
                        ids.insert(*slot, tick);
                        (*slot, EventKind::Alloc, tick)
                    }
                    Act::Free(slot) => {
                        let Some(id) = ids.remove(slot) else { continue };
                        (*slot, EventKind::Free, id)
                    }
                };
                let Slot { bytes, stream, thread, module, is_dynamic } = self.slots[slot];
                trace.events.push(Event {
                    tick: Tick(tick),
                    kind,
                    id,
                    bytes: Bytes::new(bytes),
                    stream,
                    iteration,
                    context: Context { phase, module, ..Context::default() },
                    is_dynamic,
                    device: 0,
                    thread,
                });
            }
        }
        trace
    }

    pub(crate) fn request(&self, slot: usize, trace: &Trace, phase: Phase) -> Request {
        let Slot { bytes, stream, thread, module, is_dynamic } = self.slots[slot];
        // Raw handles differ between the run that was recorded and this one.
        let stream = if stream == StreamId(0) { stream } else { StreamId(0xa000 + stream.0) };
        let context = trace.key(&Context { phase, module, ..Context::default() });
        let context = if self.has_contexts { context } else { ContextKey::UNKNOWN };
        Request { bytes: Bytes::new(bytes), stream, thread: 70 + thread, context, is_dynamic }
    }
}

pub(crate) fn random_size(rng: &mut Rng) -> u64 {
    let shift = rng.below(14);
    1 + rng.below(1 << (10 + shift))
}
