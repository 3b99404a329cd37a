//! A job that does not do tomorrow what it did today: a trace with requests dropped, inserted, swapped and resized, one micro-batch more or less, and an evaluation between two
//! iterations; all of it, or some kinds alone. The same seed and kinds give the same trace.
//!
//! Not for: the iterations that a plan was made from; they stay as they were.

use std::collections::{HashMap, HashSet, VecDeque};

use super::fresh::FreshIds;
use crate::rng::Rng;
use crate::trace::{Event, EventKind, Phase, Trace};
use crate::units::{Bytes, Tick};

/// Of a thousand requests so many are disturbed.
const PER_MILLE: u64 = 10;

/// What is done to a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Perturbation {
    seed: u64,
    kinds: Vec<Kind>,
    /// Requests are disturbed in the iteration in the middle only, as micro-batches are.
    is_once: bool,
}

/// One way to differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Dropped,
    Inserted,
    Swapped,
    Resized,
    OneMore,
    OneLess,
    Evaluation,
}

impl Kind {
    const ALL: [(&'static str, Kind); 7] = [
        ("dropped", Kind::Dropped),
        ("inserted", Kind::Inserted),
        ("swapped", Kind::Swapped),
        ("resized", Kind::Resized),
        ("one-more", Kind::OneMore),
        ("one-less", Kind::OneLess),
        ("evaluation", Kind::Evaluation),
    ];
    /// The word by which requests are disturbed in one iteration.
    const ONCE: &'static str = "once";

    fn is_of_requests(self) -> bool {
        matches!(self, Kind::Dropped | Kind::Inserted | Kind::Swapped | Kind::Resized)
    }
}

/// Why a text names no perturbation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoPerturbation {
    /// It does not begin with a number.
    #[error("'{0}' is no seed: a number, and behind a colon the kinds, separated by commas, where not all are wanted")]
    Seed(String),
    /// There is no such kind.
    #[error("there is no kind '{0}'; there are {names}, and once", names = Kind::ALL.map(|(name, _)| name).join(", "))]
    Kind(String),
}

impl std::str::FromStr for Perturbation {
    type Err = NoPerturbation;

    /// `SEED` or `SEED:KIND,KIND`; with the kind `once`, requests are disturbed in one iteration.
    fn from_str(text: &str) -> Result<Perturbation, NoPerturbation> {
        let (seed, names) = text.split_once(':').map_or((text, None), |(seed, names)| (seed, Some(names)));
        let seed = seed.parse().map_err(|_| NoPerturbation::Seed(seed.to_owned()))?;
        let mut wanted = Perturbation { kinds: Vec::new(), ..Perturbation::of_seed(seed) };
        for name in names.into_iter().flat_map(|names| names.split(',')) {
            if name == Kind::ONCE {
                wanted.is_once = true;
                continue;
            }
            let known = Kind::ALL.into_iter().find(|(known, _)| *known == name);
            wanted.kinds.push(known.ok_or_else(|| NoPerturbation::Kind(name.to_owned()))?.1);
        }
        if wanted.kinds.is_empty() {
            wanted.kinds = Perturbation::of_seed(seed).kinds;
        }
        Ok(wanted)
    }
}

impl Perturbation {
    /// What nobody says otherwise: all kinds but one micro-batch less, which would undo the one more.
    pub fn of_seed(seed: u64) -> Perturbation {
        let kinds = Kind::ALL.map(|(_, kind)| kind).into_iter().filter(|kind| *kind != Kind::OneLess);
        Perturbation { seed, kinds: kinds.collect(), is_once: false }
    }

    fn has(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }
}

/// `trace`, disturbed from iteration `from` on.
pub fn perturb(trace: &Trace, how: &Perturbation, from: u32) -> Trace {
    let mut disturbed = Disturbed {
        rng: Rng::new(how.seed),
        kinds: Vec::new(),
        ids: FreshIds::of(trace),
        waiting: trace.waiting(),
        events: Vec::with_capacity(trace.events.len()),
        dropped: HashSet::new(),
        inserted: VecDeque::new(),
    };
    // Events go by the iteration that they name, and iterations in the order in which they begin.
    let mut iterations: Vec<Vec<Event>> = Vec::new();
    let mut places: HashMap<u32, usize> = HashMap::new();
    let mut made: HashMap<u64, u32> = HashMap::new();
    for event in &trace.events {
        // Nothing ends before it began, whatever its row says.
        let mut number = event.iteration;
        if event.kind == EventKind::Alloc {
            made.insert(event.id, number);
        } else if event.kind.has_id() {
            number = made.get(&event.id).map_or(number, |made| number.max(*made));
        }
        if number < from {
            disturbed.events.push(*event);
            continue;
        }
        let place = *places.entry(number).or_insert(iterations.len());
        if place == iterations.len() {
            iterations.push(Vec::new());
        }
        iterations[place].push(*event);
    }
    for (at, iteration) in iterations.iter().enumerate() {
        let is_middle = at == iterations.len() / 2;
        let does = |kind| is_middle && how.has(kind);
        if does(Kind::Evaluation) {
            disturbed.evaluation(iteration);
        }
        let last = last_microbatch(iteration);
        let extra = if does(Kind::OneMore) { last.clone() } else { Vec::new() };
        // Without its only one an iteration would not be there.
        let of_microbatches = || iteration.iter().filter_map(|event| event.context.microbatch);
        if does(Kind::OneLess) && of_microbatches().min() < of_microbatches().max() {
            disturbed.dropped.extend(last.iter().map(|event| event.id));
        }
        let of_requests = how.kinds.iter().filter(|kind| kind.is_of_requests() && (is_middle || !how.is_once));
        disturbed.kinds = of_requests.copied().collect();
        disturbed.iteration(iteration, &extra);
    }
    let mut trace = Trace { events: disturbed.events, modules: trace.modules.clone() };
    for (at, event) in trace.events.iter_mut().enumerate() {
        event.tick = Tick(at as u64);
    }
    trace
}

/// What [`perturb`] cannot add to a trace, because that does not say what is of a micro-batch or of the forward pass.
pub fn lacks(trace: &Trace, how: &Perturbation) -> Option<&'static str> {
    let has = |what: fn(&Event) -> bool| trace.events.iter().any(what);
    let wants_microbatch = how.has(Kind::OneMore) || how.has(Kind::OneLess);
    let has_microbatch = !wants_microbatch || has(|event| event.context.microbatch.is_some());
    let has_forward = !how.has(Kind::Evaluation) || has(|event| event.context.phase == Phase::Forward);
    match (has_microbatch, has_forward) {
        (true, true) => None,
        (false, true) => Some("--perturb adds no micro-batch here: the trace does not say which requests are of one"),
        (true, false) => Some("--perturb adds no evaluation here: the trace does not say what is of the forward pass"),
        (false, false) => Some(
            "--perturb adds no micro-batch and no evaluation here: the trace does not say which requests are of one, or of the forward pass",
        ),
    }
}

struct Disturbed {
    rng: Rng,
    /// What happens to requests.
    kinds: Vec<Kind>,
    ids: FreshIds,
    /// Allocations whose bytes can be used again some time after their free.
    waiting: HashSet<u64>,
    events: Vec<Event>,
    /// Requests that do not come, so that their frees do not either.
    dropped: HashSet<u64>,
    /// Requests that nobody planned, each with the requests after which it is freed.
    inserted: VecDeque<(Event, u32)>,
}

impl Disturbed {
    fn iteration(&mut self, events: &[Event], extra: &[Event]) {
        let mut held: Option<Event> = None;
        for event in events {
            if self.dropped.contains(&event.id) && event.kind.has_id() {
                continue;
            }
            if event.kind != EventKind::Alloc {
                // What was to come later comes before anything else happens to it, and stays in its module.
                let is_for_it = held.is_some_and(|held| !event.kind.has_id() || event.id == held.id);
                self.events.extend(held.take_if(|_| is_for_it));
                self.events.push(*event);
                continue;
            }
            let mut event = *event;
            self.age_inserted();
            if !self.kinds.is_empty() && self.rng.chance(PER_MILLE) {
                let nth = self.rng.index(self.kinds.len());
                match self.kinds[nth] {
                    Kind::Dropped => {
                        self.dropped.insert(event.id);
                        continue;
                    }
                    Kind::Inserted => self.insert(&event),
                    Kind::Swapped if held.is_none() => {
                        held = Some(event);
                        continue;
                    }
                    // Two that are swapped already.
                    Kind::Swapped if !self.kinds.contains(&Kind::Resized) => {}
                    _ => {
                        let per_mille = 500 + self.rng.index(1000) as u64;
                        let resized = u128::from(event.bytes.get()) * u128::from(per_mille) / 1000;
                        event.bytes = Bytes::new((resized as u64).max(1)).min(Bytes::LARGEST);
                    }
                }
            }
            self.events.push(event);
            self.events.extend(held.take());
        }
        self.events.extend(held);
        let last = events.last().copied();
        self.pass(extra, last);
        while let Some((event, _)) = self.inserted.pop_front() {
            self.end(&event, false);
        }
    }

    /// The same allocation once more.
    fn once_more(&mut self, like: &Event) -> Event {
        let made = Event { id: self.ids.take(), ..*like };
        if self.waiting.contains(&like.id) {
            self.waiting.insert(made.id);
        }
        made
    }

    /// A request of a size that somebody else asks for, too.
    fn insert(&mut self, like: &Event) {
        let event = Event { is_dynamic: false, ..self.once_more(like) };
        self.events.push(event);
        self.inserted.push_back((event, INSERTED_LIVE));
    }

    /// A request later: what was inserted long enough ago is freed.
    fn age_inserted(&mut self) {
        self.inserted.iter_mut().for_each(|(_, left)| *left -= 1);
        while let Some((event, 0)) = self.inserted.front().copied() {
            self.inserted.pop_front();
            self.end(&event, false);
        }
    }

    /// Frees what was made, unless it is freed already, and completes it where its free alone does not give bytes back.
    fn end(&mut self, made: &Event, is_freed: bool) {
        let end = Event { bytes: Bytes::ZERO, ..*made };
        if !is_freed {
            self.events.push(Event { kind: EventKind::Free, ..end });
        }
        if self.waiting.contains(&made.id) {
            self.events.push(Event { kind: EventKind::FreeCompleted, ..end });
        }
    }

    /// The forward pass alone, one micro-batch after the other: what each would keep for the backward pass goes at its end.
    fn evaluation(&mut self, iteration: &[Event]) {
        let is_forward = |event: &&Event| event.context.phase == Phase::Forward && event.kind.has_id();
        let forward: Vec<Event> = iteration.iter().filter(is_forward).copied().collect();
        let part = |event: &Event| (event.context.microbatch, event.context.chunk);
        for part in forward.chunk_by(|one, next| part(one) == part(next)) {
            self.pass(part, part.last().copied());
        }
    }

    /// Events once more under names of their own; what they leave live is freed at their end, and what they leave to be completed is completed there.
    fn pass(&mut self, events: &[Event], at: Option<Event>) {
        // Whatever still has to end, and whether it is freed.
        let mut names: HashMap<u64, (Event, bool)> = HashMap::new();
        for event in events {
            match event.kind {
                EventKind::Alloc => {
                    let made = self.once_more(event);
                    names.insert(event.id, (made, false));
                    self.events.push(made);
                }
                EventKind::Free => {
                    if let Some((made, is_freed)) = names.get_mut(&event.id) {
                        *is_freed = true;
                        self.events.push(Event { id: made.id, ..*event });
                        if !self.waiting.contains(&event.id) {
                            names.remove(&event.id);
                        }
                    }
                }
                EventKind::FreeCompleted => {
                    if let Some((made, _)) = names.remove(&event.id) {
                        self.events.push(Event { id: made.id, ..*event });
                    }
                }
                _ => {}
            }
        }
        let mut left: Vec<(Event, bool)> = names.into_values().collect();
        left.sort_unstable_by_key(|(made, _)| made.id);
        let iteration = at.map(|event| event.iteration);
        for (made, is_freed) in left {
            self.end(&Event { iteration: iteration.unwrap_or(made.iteration), ..made }, is_freed);
        }
    }
}

/// What is inserted is freed after so many requests: a workspace that somebody takes and lets go of.
const INSERTED_LIVE: u32 = 4;

/// What the last micro-batch of an iteration asks for, with the frees of it.
fn last_microbatch(iteration: &[Event]) -> Vec<Event> {
    let Some(last) = iteration.iter().filter_map(|event| event.context.microbatch).max() else { return Vec::new() };
    let made: HashSet<u64> = iteration
        .iter()
        .filter(|event| event.kind == EventKind::Alloc && event.context.microbatch == Some(last))
        .map(|event| event.id)
        .collect();
    iteration.iter().filter(|event| event.kind.has_id() && made.contains(&event.id)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::builder::Builder;

    fn trace() -> Trace {
        crate::trace::csv::read(text(false).as_bytes()).unwrap()
    }

    /// Four iterations of two micro-batches; with completions half of them are in the next micro-batch, which may be the next iteration's.
    fn text(completes: bool) -> String {
        let mut text = String::from("tick,event,id,bytes,stream,iteration,phase,microbatch\n");
        let mut id = 0;
        for iteration in 0..4 {
            for microbatch in 0..2 {
                for n in 0..200 {
                    text += &format!("0,alloc,{},{},0,{iteration},forward,{microbatch}\n", id + n, 1000 + n);
                }
                for n in (0..100).filter(|_| completes && id > 0) {
                    text += &format!("0,free_completed,{},,0,{iteration},other,{microbatch}\n", id - 200 + n);
                }
                // Those that wait for longest are freed last.
                for n in (100..200).chain(0..100) {
                    text += &format!("0,free,{},,0,{iteration},backward,{microbatch}\n", id + n);
                }
                for n in (100..200).filter(|_| completes) {
                    text += &format!("0,free_completed,{},,0,{iteration},other,{microbatch}\n", id + n);
                }
                id += 200;
            }
        }
        text
    }

    #[test]
    fn a_disturbed_trace_is_a_trace_the_same_for_the_same_seed_and_untouched_before() {
        let trace = trace();
        let disturbed = perturb(&trace, &Perturbation::of_seed(1), 2);
        let mut builder = Builder::default();
        for name in &trace.modules {
            builder.module(name);
        }
        disturbed.events.iter().for_each(|event| builder.push(*event).unwrap());
        assert_eq!(perturb(&trace, &Perturbation::of_seed(1), 2).events, disturbed.events);
        assert_ne!(perturb(&trace, &Perturbation::of_seed(2), 2).events, disturbed.events);
        let before = |trace: &Trace| {
            let events = trace.events.iter().filter(|event| event.iteration < 2);
            events.map(|event| (event.kind, event.id, event.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(before(&trace), before(&disturbed));
        // One micro-batch and one forward pass more, and a hundredth of the rest changed.
        let allocs = |trace: &Trace| trace.events.iter().filter(|event| event.kind == EventKind::Alloc).count();
        let more = allocs(&disturbed) - allocs(&trace);
        assert!((590..=610).contains(&more), "{more}");
        let sizes: HashSet<Bytes> = trace.events.iter().map(|event| event.bytes).collect();
        assert!(disturbed.events.iter().any(|event| !sizes.contains(&event.bytes)), "some are resized");
    }

    fn asked(trace: &Trace, how: &str, from: u32) -> Trace {
        perturb(trace, &how.parse().unwrap(), from)
    }

    #[test]
    fn each_kind_can_be_had_alone_and_requests_be_disturbed_once() {
        let trace = trace();
        let count = |trace: &Trace| trace.events.iter().filter(|event| event.kind == EventKind::Alloc).count() as i64;
        let of = |trace: &Trace, iteration: u32| -> Vec<Bytes> {
            let of = trace.events.iter().filter(|event| event.kind == EventKind::Alloc && event.iteration == iteration);
            of.map(|event| event.bytes).collect()
        };
        let more = |kind: &str| count(&asked(&trace, &format!("1:{kind}"), 1)) - count(&trace);
        assert_eq!((more("one-more"), more("one-less"), more("evaluation")), (200, -200, 400));
        assert_eq!((more("swapped"), more("resized"), more("one-more,one-less")), (0, 0, 0));
        assert!((-30..0).contains(&more("dropped")) && (1..30).contains(&more("inserted")));
        let swapped = asked(&trace, "1:swapped", 1);
        assert_ne!(of(&swapped, 1), of(&trace, 1));
        let sorted = |trace: &Trace| {
            let mut sizes = of(trace, 1);
            sizes.sort_unstable();
            sizes
        };
        assert_eq!(sorted(&swapped), sorted(&trace), "the same requests in another order");
        // Of iterations 1 to 3 the second is the middle.
        for kind in ["dropped", "inserted", "swapped", "resized", "one-more", "one-less", "evaluation"] {
            let once = asked(&trace, &format!("1:{kind},once"), 1);
            let differs = (0..4).map(|nth| of(&once, nth) != of(&trace, nth)).collect::<Vec<_>>();
            assert_eq!(differs, [false, false, true, false], "{kind}");
            let mut builder = Builder::default();
            once.events.iter().for_each(|event| builder.push(*event).unwrap());
        }
        let alone = text(false).replace(",backward,1\n", ",backward,0\n").replace(",forward,1\n", ",forward,0\n");
        let alone = crate::trace::csv::read(alone.as_bytes()).unwrap();
        assert_eq!(count(&asked(&alone, "1:one-less", 1)), count(&alone), "an iteration has one at least");
        assert_eq!("7:".parse::<Perturbation>(), Err(NoPerturbation::Kind(String::new())));
        assert_eq!("x:once".parse::<Perturbation>(), Err(NoPerturbation::Seed("x".into())));
        assert_eq!("7".parse(), Ok(Perturbation::of_seed(7)));
        assert_eq!("7:once".parse(), Ok(Perturbation { is_once: true, ..Perturbation::of_seed(7) }));
    }

    #[test]
    fn what_is_put_in_is_completed_where_a_free_alone_gives_nothing_back() {
        let trace = crate::trace::csv::read(text(true).as_bytes()).unwrap();
        let unended = |trace: &Trace| {
            let count = |kind| trace.events.iter().filter(|event| event.kind == kind).count();
            (count(EventKind::Alloc) - count(EventKind::Free), count(EventKind::Free) - count(EventKind::FreeCompleted))
        };
        assert_eq!(unended(&trace), (0, 100), "the last ones end after the trace");
        let mut dropped = 0;
        for seed in 0..20 {
            let disturbed = perturb(&trace, &Perturbation::of_seed(seed), 1);
            let mut builder = Builder::default();
            disturbed.events.iter().for_each(|event| builder.push(*event).unwrap());
            let (live, waiting) = unended(&disturbed);
            // Of those a request that does not come is not freed either.
            assert!(live == 0 && waiting <= 100, "{live} and {waiting} of seed {seed}");
            dropped += 100 - waiting;
        }
        assert!((1..40).contains(&dropped), "{dropped}");
    }

    #[test]
    fn a_trace_that_goes_to_the_last_number_is_disturbed_too() {
        let numbered = text(false).replace("0,alloc,0,", &format!("0,alloc,{},", u64::MAX));
        let numbered = numbered.replace("0,free,0,", &format!("0,free,{},", u64::MAX));
        let trace = crate::trace::csv::read(numbered.as_bytes()).unwrap();
        let mut builder = Builder::default();
        perturb(&trace, &Perturbation::of_seed(1), 0).events.iter().for_each(|event| builder.push(*event).unwrap());
    }

    #[test]
    fn an_evaluation_keeps_one_micro_batch_at_a_time() {
        // Two micro-batches whose forward passes both come first would be two at once in training; an evaluation needs one.
        let of_trace = |trace: &Trace| trace.summary().peak_live.get();
        let (before, after) = (of_trace(&trace()), of_trace(&perturb(&trace(), &Perturbation::of_seed(3), 0)));
        assert!(after < before / 5 * 6, "{after} of {before}");
        let both = text(false).replace(",backward,0\n", ",backward,1\n");
        let both = crate::trace::csv::read(both.as_bytes()).unwrap();
        assert!(of_trace(&perturb(&both, &Perturbation::of_seed(3), 0)) < of_trace(&both) / 5 * 6);
    }

    #[test]
    fn a_row_that_names_an_earlier_iteration_than_its_allocation_stays_behind_it() {
        let rows = "tick,event,id,bytes,stream,iteration\n0,alloc,1,100,0,0\n1,alloc,2,5000,0,1\n2,free,2,,0,0\n3,free,1,,0,1\n";
        let trace = crate::trace::csv::read(rows.as_bytes()).unwrap();
        for seed in 0..20 {
            assert_eq!(perturb(&trace, &Perturbation::of_seed(seed), 1).summary().persistent, Bytes::ZERO);
        }
    }

    #[test]
    fn what_is_freed_was_allocated_and_nothing_is_left_that_was_not_left_before() {
        let live = |trace: &Trace| {
            let summary = trace.summary();
            summary.persistent
        };
        assert_eq!(live(&perturb(&trace(), &Perturbation::of_seed(3), 0)), Bytes::ZERO);
    }
}
