//! A plan as it lies in a job that runs: around what lives longer than an iteration.
//!
//! What one iteration leaves to the next (gradients) has its places where the last iteration had them: so
//! it is in no other request's way where the plan is installed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::recorded::Alive;
use crate::plan::{Kind, Plan, PlanError, Problem, Stays};
use crate::runtime::Runtime;
use crate::trace::{ContextKey, Event, EventKind, Trace};
use crate::units::{self, AddressSpan, Bytes, Place as _, PlanOffset, PlanSpan, Span};

/// Live allocations of a job at the end of its recording.
#[derive(Debug, Default)]
pub(super) struct Living {
    /// They were there before the iteration that is planned.
    lasting: BTreeSet<AddressSpan>,
    /// That iteration has left them, in this order.
    carried: Vec<(Bytes, AddressSpan)>,
}

impl Living {
    /// What was live at the end of a recording, of which `trace` is made.
    pub(super) fn of(alive: &[Alive], trace: &Trace, iteration: u32) -> Living {
        let births = births(alive, trace);
        let (mut lasting, mut carried) = (BTreeSet::new(), Vec::new());
        for one in alive {
            // What is not in the trace came before it.
            let birth = one.id.and_then(|id| births.get(&id)).filter(|(_, event)| event.iteration >= iteration);
            match birth {
                // What lies in a place is no place of an entry.
                Some((at, event)) if event.iteration == iteration && one.is_start => {
                    carried.push((*at, event.bytes, one.span));
                }
                Some(_) => {}
                None => drop(lasting.insert(one.span)),
            }
        }
        Living::with(lasting, carried)
    }

    /// What was live when the job's first iteration ended, of a recording that ends within the next.
    /// What an iteration leaves is the last that it asked for as `plan` has it: weights and what an
    /// optimizer keeps may be as long.
    pub(super) fn of_first(alive: &[Alive], trace: &Trace, plan: &Plan) -> Living {
        let mut left: HashMap<(Bytes, ContextKey), usize> = HashMap::new();
        for entry in plan.carried().into_iter().map(|at| &plan.entries[at]) {
            *left.entry((entry.bytes, entry.context)).or_default() += 1;
        }
        let births = births(alive, trace);
        let mut alive: Vec<_> = alive.iter().map(|one| (one.id.and_then(|id| births.get(&id)), one)).collect();
        alive.sort_unstable_by_key(|(birth, _)| Reverse(birth.map(|(at, _)| *at)));
        let (mut lasting, mut carried) = (BTreeSet::new(), Vec::new());
        for (birth, one) in alive {
            // The iteration that goes on frees what it has taken.
            if birth.is_some_and(|(_, event)| event.iteration > 0) {
                continue;
            }
            let of_plan = birth.filter(|_| one.is_start).and_then(|(at, event)| {
                let count = left.get_mut(&(event.bytes, trace.key(&event.context))).filter(|count| **count > 0)?;
                *count -= 1;
                Some((*at, event.bytes, one.span))
            });
            match of_plan {
                Some(of_plan) => carried.push(of_plan),
                None => drop(lasting.insert(one.span)),
            }
        }
        Living::with(lasting, carried)
    }

    fn with(lasting: BTreeSet<AddressSpan>, mut carried: Vec<(usize, Bytes, AddressSpan)>) -> Living {
        carried.sort_unstable();
        Living { lasting, carried: carried.into_iter().map(|(_, bytes, span)| (bytes, span)).collect() }
    }
}

/// Where in a trace live allocations were asked for, by their ids.
fn births<'a>(alive: &[Alive], trace: &'a Trace) -> HashMap<u64, (usize, &'a Event)> {
    let ids: HashSet<u64> = alive.iter().filter_map(|one| one.id).collect();
    let births = trace.events.iter().enumerate().filter(|(_, event)| event.kind == EventKind::Alloc);
    births.filter(|(_, event)| ids.contains(&event.id)).map(|(at, event)| (event.id, (at, event))).collect()
}

/// A plan as it is kept, and as it lies in this job.
#[derive(Clone, Debug)]
pub(super) struct InPlace {
    /// For a job that has allocated nothing.
    pub(super) kept: Plan,
    /// Around what this job has allocated.
    pub(super) placed: Plan,
    stays: Stays,
}

impl InPlace {
    /// A plan around live allocations. `problem` is what the plan was made of.
    pub(super) fn around(
        kept: Plan,
        problem: Problem,
        living: &Living,
        runtime: &Runtime,
    ) -> Result<InPlace, PlanError> {
        let stays = runtime.range_for(&kept).map_or_else(Stays::default, |range| {
            let (fixed, others) = fixed(&kept, range, &living.carried);
            let lasting = living.lasting.iter().copied().chain(others).collect();
            Stays { taken: taken(range, &lasting), fixed }
        });
        let placed = kept.around(problem, &stays)?;
        Ok(InPlace { kept, placed, stays })
    }

    /// The same with places for iterations of other kinds.
    pub(super) fn with_kinds(&self, kinds: Vec<Kind>) -> Result<InPlace, PlanError> {
        let placed = self.placed.with_kinds(kinds.clone(), &self.stays.taken)?;
        Ok(InPlace { kept: self.kept.with_kinds(kinds, &[])?, placed, stays: self.stays.clone() })
    }
}

/// The parts of a range that some allocations have, in ascending order, those that touch as one.
fn taken(range: AddressSpan, lasting: &BTreeSet<AddressSpan>) -> Vec<PlanSpan> {
    let part = |span: &AddressSpan| {
        let offset = span.start().checked_distance(range.start())?;
        Span::new(PlanOffset::new(offset.get()), span.len())
    };
    units::joined(lasting.iter().filter(|span| range.contains(span.start())).filter_map(part))
}

/// The entries that live into the next iteration, and the offsets where the last one has left them: of as
/// many bytes, in the order of the requests. And what it has left beside them, which no iteration takes back.
fn fixed(
    plan: &Plan,
    range: AddressSpan,
    carried: &[(Bytes, AddressSpan)],
) -> (BTreeMap<usize, PlanOffset>, Vec<AddressSpan>) {
    let mut left: BTreeMap<Bytes, VecDeque<AddressSpan>> = BTreeMap::new();
    for (bytes, span) in carried.iter().filter(|(_, span)| range.contains(span.start())) {
        left.entry(*bytes).or_default().push_back(*span);
    }
    let offset = |at: usize| {
        let span = left.get_mut(&plan.entries[at].bytes)?.pop_front()?;
        Some((at, PlanOffset::new(span.start().checked_distance(range.start())?.get())))
    };
    let fixed = plan.carried().into_iter().filter_map(offset).collect();
    (fixed, left.into_values().flatten().collect())
}
