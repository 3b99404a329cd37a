//! What a trace says of the iterations that a plan is made from: their allocations, and when each
//! model layer is at work.
//!
//! Not for: which of them are planned ([`super::timeline`]).

use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashMap, HashSet};

use super::modules::{self, DynamicModules};
use super::vary::Asked;
use super::{Lane, race, vary};
use crate::trace::{Context, ContextKey, Event, EventKind, Phase, Trace};
use crate::units::Bytes;

/// An allocation of the iterations that are looked at.
pub(super) struct Allocation {
    pub(super) bytes: Bytes,
    pub(super) lane: Lane,
    /// Which thread asked.
    pub(super) thread: u32,
    pub(super) context: ContextKey,
    pub(super) iteration: u32,
    /// Its place among the events of its iteration.
    pub(super) at: u64,
    /// The iteration of its free and the place there.
    pub(super) freed: Option<(u32, u64)>,
    /// From where in the job it was asked for and freed, as the trace numbers it.
    called_from: Context,
    freed_from: Context,
    pub(super) is_dynamic: bool,
}

impl Allocation {
    /// Its free's place among the events of its iteration, if it does not outlive that.
    pub(super) fn freed_within(&self) -> Option<u64> {
        self.freed.filter(|(freed_in, at)| *freed_in == self.iteration && *at > self.at).map(|(_, at)| at)
    }

    pub(super) fn asked(&self) -> Asked {
        let Allocation { bytes, lane, context, .. } = *self;
        Asked { bytes, lane, context }
    }
}

/// The places among `allocations` of what two iterations ask for, lane by lane.
fn by_lane(allocations: &[Allocation], both: [&[usize]; 2]) -> BTreeMap<Lane, [Vec<usize>; 2]> {
    let mut lanes: BTreeMap<Lane, [Vec<usize>; 2]> = BTreeMap::new();
    for (nth, places) in both.into_iter().enumerate() {
        for at in places {
            lanes.entry(allocations[*at].lane).or_default()[nth].push(*at);
        }
    }
    lanes
}

/// Where among the allocations those of each iteration are.
pub(super) type Places = BTreeMap<u32, Vec<usize>>;

pub(super) fn by_iteration(allocations: &[Allocation]) -> Places {
    let mut places = Places::new();
    for (at, one) in allocations.iter().enumerate() {
        places.entry(one.iteration).or_default().push(at);
    }
    places
}

/// Those of two iterations.
pub(super) fn both(places: &Places, one: u32, other: u32) -> [&[usize]; 2] {
    [one, other].map(|iteration| places.get(&iteration).map_or(&[][..], Vec::as_slice))
}

/// Where threads race on a stream, over these two iterations, each of them is a lane.
pub(super) fn tell_threads_apart(allocations: &mut [Allocation], both: [&[usize]; 2]) {
    let asked = |places: &[usize]| -> Vec<(Asked, u32)> {
        places.iter().map(|at| (allocations[*at].asked(), allocations[*at].thread)).collect()
    };
    let streams = by_lane(allocations, both).into_iter();
    let races = streams.filter(|(_, [one, other])| race::is_on(&asked(one), &asked(other)));
    let races: BTreeSet<Lane> = races.map(|(stream, _)| stream).collect();
    for asked in allocations.iter_mut().filter(|asked| races.contains(&asked.lane)) {
        asked.lane.role = Lane::role_of(asked.thread);
    }
}

/// What has another size in one iteration than in the other, by its places among `allocations` in both.
pub(super) fn varying(allocations: &[Allocation], both: [&[usize]; 2]) -> Vec<(usize, usize)> {
    let of_lane = |[one, other]: [Vec<usize>; 2]| {
        let asked = |places: &[usize]| places.iter().map(|at| allocations[*at].asked()).collect::<Vec<Asked>>();
        let pairs = vary::pairs(&asked(&one), &asked(&other));
        pairs.into_iter().map(|(at, beside)| (one[at], other[beside])).collect::<Vec<_>>()
    };
    by_lane(allocations, both).into_values().flat_map(of_lane).collect()
}

/// The events up to the end of iteration `last` with the iteration of each; `is_first` counts what comes
/// before the first step as iteration 0 and the step as 1.
pub(super) fn iterations(trace: &Trace, last: u32, is_first: bool) -> impl Iterator<Item = (u32, &Event)> {
    let numbered = trace.events.iter().filter_map(move |event| match event.iteration {
        0 if is_first => Some((u32::from(event.context.phase != Phase::Init), event)),
        _ if is_first => None,
        iteration => Some((iteration, event)),
    });
    numbered.filter(move |(iteration, _)| *iteration <= last)
}

/// The time of a problem has a tick for every event of this kind.
pub(super) fn takes_tick(kind: EventKind) -> bool {
    matches!(kind, EventKind::Alloc | EventKind::Free | EventKind::FreeCompleted)
}

/// What a trace says up to the end of some iteration.
pub(super) struct Seen {
    pub(super) allocations: Vec<Allocation>,
    /// Events of each iteration that has any: a number in a file is no reason to count up to it.
    pub(super) lens: HashMap<u32, u64>,
    pub(super) layers: Layers,
}

impl Seen {
    /// Looks at the iterations up to `last` ([`iterations`]). Requests of the modules in `dynamic` are dynamic.
    pub(super) fn collect(trace: &Trace, last: u32, is_first: bool, dynamic: &DynamicModules) -> Seen {
        let layers = Layers::from_paths(&trace.modules);
        let mut seen = Seen { allocations: Vec::new(), lens: HashMap::default(), layers };
        let mut live: HashMap<u64, usize> = HashMap::default();
        let mut keys: HashMap<Context, ContextKey> = HashMap::default();
        // Of most events it is that of the one before.
        let mut before = (Context::default(), trace.key(&Context::default()));
        for (iteration, event) in iterations(trace, last, is_first) {
            let place = seen.lens.entry(iteration).or_default();
            let mut key = || {
                if before.0 != event.context {
                    let key = *keys.entry(event.context).or_insert_with(|| trace.key(&event.context));
                    before = (event.context, key);
                }
                before.1
            };
            match event.kind {
                // No script asks for nothing, and an entry for it would never be matched.
                EventKind::Alloc if event.bytes == Bytes::ZERO => {}
                EventKind::Alloc => {
                    live.insert(event.id, seen.allocations.len());
                    seen.allocations.push(Allocation {
                        bytes: event.bytes,
                        lane: Lane::on(event.stream),
                        thread: event.thread,
                        context: key(),
                        iteration,
                        at: *place,
                        freed: None,
                        called_from: event.context,
                        freed_from: Context::default(),
                        is_dynamic: event.is_dynamic || dynamic.contains(&event.context),
                    });
                }
                // Bytes can be used again at the later of the two.
                EventKind::Free | EventKind::FreeCompleted => {
                    if let Some(one) = live.get(&event.id).and_then(|one| seen.allocations.get_mut(*one)) {
                        one.freed = Some((iteration, *place));
                        one.freed_from = event.context;
                    }
                }
                EventKind::RecordStream | EventKind::Enter | EventKind::Exit | EventKind::Mark => {}
            }
            if event.context.module != 0 && takes_tick(event.kind) {
                seen.layers.note(iteration, &event.context, *place);
            }
            *place += u64::from(takes_tick(event.kind));
        }
        seen
    }
}

/// From where to where in an iteration each model layer is at work, in one computation phase.
///
/// A model layer is a path up to and including its first layer index, as in STAlloc (section 5.2):
/// `model.layers.3` of `model.layers.3.mlp.experts.7.fc1`. A list of one module, as a wrapper is, has no
/// layers. A module that stands in no list is a layer itself.
///
/// Finer groups do not pay. By module qwen-moe-V-last has 12,576 groups and 325.3 GiB in reusable space,
/// moe-top2 8,160 and 188.5; by layer they have 336 and 720, and 325.2 and 188.5, with the same
/// efficiency (99.97 and 99.78 %).
pub(super) struct Layers {
    /// The layer of each module path.
    numbers: Vec<u32>,
    spans: HashMap<(u32, Context), (u64, u64)>,
}

impl Layers {
    fn from_paths(paths: &[String]) -> Layers {
        let mut members: HashMap<&str, HashSet<&str>> = HashMap::default();
        for (list, index) in paths.iter().flat_map(|path| places_in_lists(path)) {
            members.entry(list).or_default().insert(index);
        }
        let mut known: HashMap<&str, u32> = HashMap::default();
        let mut numbers = Vec::with_capacity(paths.len());
        for path in paths {
            let first = places_in_lists(path).find(|(list, _)| members[list].len() > 1);
            let layer = first.map_or(path.as_str(), |(list, index)| &path[..list.len() + index.len()]);
            let count = known.len() as u32;
            numbers.push(*known.entry(layer).or_insert(count));
        }
        Layers { numbers, spans: HashMap::default() }
    }

    /// The context of the layer that a context is in.
    fn layer_of(&self, context: &Context) -> Context {
        let number = self.numbers.get(context.module as usize).copied();
        Context { module: number.unwrap_or(context.module), ..*context }
    }

    fn note(&mut self, iteration: u32, context: &Context, place: u64) {
        let layer = self.layer_of(context);
        self.spans.entry((iteration, layer)).or_insert((place, place)).1 = place;
    }

    /// From the beginning of the layer that asked for an allocation to the end of the one that freed it
    /// (STAlloc, section 5.2). Where it is not known which layer that was the allocation's own places
    /// stand for it. Nothing where another iteration frees it.
    pub(super) fn around(&self, one: &Allocation) -> Option<(u64, u64)> {
        let (_, freed) = one.freed.filter(|(iteration, _)| *iteration == one.iteration)?;
        let layer = |context: &Context| {
            let is_known = context.module != 0;
            is_known.then(|| self.spans.get(&(one.iteration, self.layer_of(context))).copied()).flatten()
        };
        let from = layer(&one.called_from).map_or(one.at, |(first, _)| first.min(one.at));
        let to = layer(&one.freed_from).map_or(freed, |(_, last)| last.max(freed));
        Some((from, to + 1))
    }
}

/// Each list that a path goes through, as the path before the index, and the index.
fn places_in_lists(path: &str) -> impl Iterator<Item = (&str, &str)> {
    let starts = path.split('.').scan(0, |next, part| {
        let start = *next;
        *next += part.len() + 1;
        Some((start, part))
    });
    starts.filter(|(_, part)| modules::is_index(part)).map(|(start, part)| (&path[..start], part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_layer_is_a_path_to_its_first_index() {
        let check = |paths: &[(&str, &str)]| {
            let known: Vec<String> = paths.iter().map(|(path, _)| (*path).to_owned()).collect();
            let numbers = Layers::from_paths(&known).numbers;
            for (at, (path, layer)) in paths.iter().enumerate() {
                for (other, (_, of_other)) in paths.iter().enumerate() {
                    assert_eq!(numbers[at] == numbers[other], layer == of_other, "{path} and {}", paths[other].0);
                }
            }
        };
        check(&[
            ("", ""),
            ("head", "head"),
            ("layers.0", "layers.0"),
            ("layers.0.mlp.experts.0.fc1", "layers.0"),
            ("layers.0.mlp.experts.1.fc1", "layers.0"),
            ("layers.1.mlp.experts.1.fc1", "layers.1"),
            ("layers.10.norm", "layers.10"),
            ("layers", "layers"),
        ]);
        // A wrapper is a list of one.
        check(&[("0.layers.0.fc1", "0"), ("0.layers.0.fc2", "0"), ("0.layers.1.fc1", "1"), ("0.head", "head")]);
    }
}
