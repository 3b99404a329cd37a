//! A plan as it lies in a job that runs: around what lives longer than an iteration.
//!
//! What one iteration leaves to the next (gradients) has its places where the last iteration had them: so
//! it is in no other request's way where the plan is installed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::recorded::{Alive, Recorded};
use crate::lifetimes;
use crate::plan::{Kind, Plan, PlanError, Problem, Stays};
use crate::runtime::Runtime;
use crate::trace::{ContextKey, Event, EventKind, Trace};
use crate::units::{self, AddressSpan, Bytes, Lifetime, Place as _, PlanOffset, PlanSpan, Span};

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

    /// What was live where the last whole iteration of a recording ended, by a known plan of the job. Ends
    /// the recording, which goes on into the next iteration.
    pub(super) fn of_known(plan: &Plan, recorded: Recorded, runtime: &Runtime) -> (Living, Trace) {
        let (alive, whole) = (recorded.alive(runtime), recorded.marks());
        let trace = recorded.end(runtime);
        let births = births(&alive, &trace);
        let carried = plan.carried().into_iter().map(|at| (plan.entries[at].bytes, plan.entries[at].context));
        let left = left_by_iterations(&births, &trace, whole, carried);
        let (mut lasting, mut carried) = (BTreeSet::new(), Vec::new());
        for one in &alive {
            match one.id.and_then(|id| births.get(&id)) {
                // The iteration that goes on frees most of what it has taken.
                Some((_, event)) if event.iteration >= whole => {}
                Some((at, event)) if left.contains(at) && one.is_start => {
                    carried.push((*at, event.bytes, one.span));
                }
                _ => drop(lasting.insert(one.span)),
            }
        }
        (Living::with(lasting, carried), trace)
    }

    fn with(lasting: BTreeSet<AddressSpan>, mut carried: Vec<(usize, Bytes, AddressSpan)>) -> Living {
        carried.sort_unstable();
        Living { lasting, carried: carried.into_iter().map(|(_, bytes, span)| (bytes, span)).collect() }
    }
}

/// Which births are of what an iteration leaves to the next, as a plan has it: the last with the same
/// bytes and context. Weights and what an optimizer keeps have the same bytes: where no contexts tell
/// them apart, and there are more than the plan leaves, none is.
fn left_by_iterations(
    births: &HashMap<u64, (usize, &Event)>,
    trace: &Trace,
    whole: u32,
    carried: impl Iterator<Item = (Bytes, ContextKey)>,
) -> HashSet<usize> {
    let mut by_class: HashMap<(Bytes, ContextKey), Vec<usize>> = HashMap::new();
    for (at, event) in births.values().filter(|(_, event)| event.iteration < whole) {
        by_class.entry((event.bytes, trace.key(&event.context))).or_default().push(*at);
    }
    let mut counts: HashMap<(Bytes, ContextKey), usize> = HashMap::new();
    carried.for_each(|class| *counts.entry(class).or_default() += 1);
    let mut left = HashSet::new();
    for (class, count) in counts {
        let Some(births) = by_class.get_mut(&class) else { continue };
        if births.len() > count && class.1.is_unknown() {
            continue;
        }
        births.sort_unstable();
        left.extend(births.iter().rev().take(count));
    }
    left
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

    /// Bytes that an iteration has live at its peak beside what is live where it begins, all lanes
    /// together: theirs need not come at the same time.
    pub(super) fn adds(&self) -> Bytes {
        let entries = &self.placed.entries;
        let live = entries.iter().flat_map(|entry| {
            let len = entry.span().len();
            [Some(entry.lifetime), entry.again].into_iter().flatten().map(move |lifetime| (lifetime, len))
        });
        let (lifetimes, lens): (Vec<Lifetime>, Vec<Bytes>) = live.unzip();
        let carried = self.placed.carried().into_iter().map(|at| entries[at].span().len()).sum();
        lifetimes::most_live(&lifetimes, &lens).saturating_sub(carried)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::DeviceAddress;

    /// Weights, gradients that the next iteration frees, and an optimizer's states, all as long as others.
    fn job(has_contexts: bool) -> Trace {
        let mut rows = "tick,event,id,bytes,iteration,phase,module\n".to_owned();
        let mut tick = 0;
        let mut row = |event: &str, id: u32, iteration: u32, context: &str| {
            let (bytes, context) =
                (if event == "alloc" { "1048576" } else { "" }, if has_contexts { context } else { "," });
            rows += &format!("{tick},{event},{id},{bytes},{iteration},{context}\n");
            tick += 1;
        };
        (0..2).for_each(|n| row("alloc", n, 0, "init,"));
        for iteration in 0..3 {
            let first = 10 * (iteration + 1);
            let before = if iteration == 0 { 0..0 } else { first - 10..first - 8 };
            before.for_each(|id| row("free", id, iteration, "forward,"));
            row("alloc", first, iteration, "backward,model.0");
            row("alloc", first + 1, iteration, "backward,model.1");
            if iteration == 0 {
                (0..2).for_each(|n| row("alloc", 2 + n, 0, "optimizer,"));
            }
        }
        crate::trace::csv::read(rows.as_bytes()).unwrap()
    }

    #[test]
    fn gradients_are_told_from_weights_and_states_by_where_they_were_asked_for() {
        for has_contexts in [true, false] {
            let trace = job(has_contexts);
            let span = |id: u64| Span::new(DeviceAddress::new(id << 20), Bytes::mib(1)).unwrap();
            let alive = [0, 1, 2, 3, 10, 11].map(|id| Alive { id: Some(id), span: span(id), is_start: true });
            let births = births(&alive, &trace);
            // What the plan has of the gradients that the second iteration leaves.
            let of_plan = trace.events.iter().filter(|event| [20, 21].contains(&event.id));
            let carried = of_plan.map(|event| (Bytes::mib(1), trace.key(&event.context))).take(2);
            let left = left_by_iterations(&births, &trace, 1, carried);
            let left = births.iter().filter(|(_, (at, _))| left.contains(at)).map(|(id, _)| *id);
            let expected = if has_contexts { BTreeSet::from([10, 11]) } else { BTreeSet::new() };
            assert_eq!(left.collect::<BTreeSet<_>>(), expected);
        }
    }
}
