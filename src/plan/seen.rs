//! What a trace says of the iterations that a plan is made from: their allocations, and when each
//! layer is at work.
//!
//! Not for: which of them are planned ([`super::timeline`]).

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashMap;

use super::modules::DynamicModules;
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
    /// From where in the job it was freed.
    freed_from: ContextKey,
    pub(super) is_dynamic: bool,
}

impl Allocation {
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

/// The events up to the end of iteration `last` with the iteration of each; `is_first` counts what comes before the first step as iteration 0 and the step as 1.
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
        let mut seen = Seen { allocations: Vec::new(), lens: HashMap::default(), layers: Layers::default() };
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
                        freed_from: ContextKey::UNKNOWN,
                        is_dynamic: event.is_dynamic || dynamic.contains(&event.context),
                    });
                }
                // Bytes can be used again at the later of the two.
                EventKind::Free | EventKind::FreeCompleted => {
                    if let Some(one) = live.get(&event.id).and_then(|one| seen.allocations.get_mut(*one)) {
                        one.freed = Some((iteration, *place));
                        one.freed_from = key();
                    }
                }
                EventKind::RecordStream | EventKind::Enter | EventKind::Exit | EventKind::Mark => {}
            }
            if event.context.module != 0 && takes_tick(event.kind) {
                seen.layers.note(iteration, key(), *place);
            }
            *place += u64::from(takes_tick(event.kind));
        }
        seen
    }
}

/// From where to where in an iteration each layer is at work: a module in one computation phase.
#[derive(Default)]
pub(super) struct Layers(HashMap<(u32, ContextKey), (u64, u64)>);

impl Layers {
    fn note(&mut self, iteration: u32, layer: ContextKey, place: u64) {
        self.0.entry((iteration, layer)).or_insert((place, place)).1 = place;
    }

    /// From the beginning of the layer that asked for an allocation to the end of the one that freed it (STAlloc, section 5.2). Where it is not known which layer that was the allocation's own
    /// places stand for it. Nothing where another iteration frees it.
    pub(super) fn around(&self, one: &Allocation) -> Option<(u64, u64)> {
        let (_, freed) = one.freed.filter(|(iteration, _)| *iteration == one.iteration)?;
        let layer = |key: ContextKey| self.0.get(&(one.iteration, key)).copied();
        let from = layer(one.context).map_or(one.at, |(first, _)| first.min(one.at));
        let to = layer(one.freed_from).map_or(freed, |(_, last)| last.max(freed));
        Some((from, to + 1))
    }
}
