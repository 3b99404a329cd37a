//! Detours: what a job asks for instead of a part of its cycle, in iterations of another kind.
//!
//! An evaluation leaves out the backward passes, and may have other sizes; the last batch of an epoch is smaller; the last accumulation is shorter. Each is the cycle but for some stretches, and each of those is a detour: from an entry that
//! does not come to the one that comes next, with what is asked for between the two. Where that is nothing, a detour says only that the job may go on elsewhere, and that this is no surprise. One that leads to where it begins is a round, as of an evaluation between two steps: as many come as come.
//!
//! What is asked for on a detour has places in the same pool, where the iteration that it was seen in leaves room: around what that asks for in common with the cycle, and around all that is live between two iterations. They are hints even more than the
//! entries are: the runtime looks at each exactly. So the validator asks only that they keep out of what is there for good, and out of what is another lane's.
//!
//! Not for: finding them ([`super::kinds`]).
//!
//! Invariant of a plan that passes the validator: a place on a detour shares no byte with an entry that is live for good, nor with entries or detours of another lane.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::kinds::{Kind, Other, Parting, PartingKey};
use super::solve::{self, Solution, Taken};
use super::vary::Asked;
use super::{Buffer, Entry, Lane, PhasePair, Plan, Problem};
use crate::lifetimes;
use crate::limits;
use crate::trace::ContextKey;
use crate::units::{Bytes, Lifetime, PlanOffset, PlanSpan, Span, Tick};

/// One detour.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Detour {
    /// Whose it is.
    pub lane: Lane,
    /// The entry of the cycle that does not come, and the one that comes next: both of the lane, or the number of all entries where that is the end of a pass.
    pub from: u32,
    /// See `from`.
    pub to: u32,
    /// What comes between.
    pub requests: Vec<DetourRequest>,
}

/// A request on a detour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DetourRequest {
    /// Bytes as asked for.
    pub bytes: Bytes,
    /// From where in the job it is asked for.
    pub context: ContextKey,
    /// Where it lies in the pool; nothing where it outlives its iteration, or has no place.
    pub offset: Option<PlanOffset>,
}

impl DetourRequest {
    /// The bytes of the pool that it has while it is live.
    pub fn span(&self) -> Option<PlanSpan> {
        let len = limits::allocation_len(self.bytes)?;
        self.offset.and_then(|offset| Span::new(offset, len))
    }
}

impl Detour {
    pub(super) fn key(&self) -> PartingKey {
        let asked = |of: &DetourRequest| Asked { bytes: of.bytes, lane: self.lane, context: of.context };
        (self.from as usize, self.to as usize, self.requests.iter().map(asked).collect())
    }

    /// The bytes of the pool that it has, one request after the other.
    pub fn spans(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.requests.iter().filter_map(DetourRequest::span)
    }
}

/// Detours with their places.
#[derive(Debug, Default)]
pub(super) struct Placed {
    pub(super) detours: Vec<Detour>,
    /// How long the pool has to be.
    pub(super) pool_len: Bytes,
    /// What of it is live at one time in some iteration of another kind: no pool for that is shorter.
    pub(super) bound: Bytes,
    /// The work that went into it.
    pub(super) work_units: u64,
}

/// Finds places for what the iterations of other kinds ask for, in the pool of `solution` and behind it, beside the detours that are `there`.
pub(super) fn place(problem: &Problem, solution: &Solution, there: Vec<Detour>) -> Placed {
    // Where each detour is that has been placed.
    let mut known: HashMap<PartingKey, usize> = there.iter().map(Detour::key).zip(0..).collect();
    let mut placed = Placed { detours: there, pool_len: solution.peak, ..Placed::default() };
    let lanes: BTreeSet<Lane> = problem.buffers.iter().map(|buffer| buffer.lane).collect();
    for kind in &problem.kinds {
        let mut live = Vec::new();
        for lane in &lanes {
            let mut kept = kept(problem, solution, kind, *lane);
            let of_lane = kind.partings.iter().filter(|parting| parting.lane == *lane);
            let mut new = Vec::new();
            for (key, parting) in of_lane.map(|parting| (parting.key(), parting)) {
                match known.get(&key) {
                    Some(old) => kept.extend(again(parting, &placed.detours[*old])),
                    None => new.push((key, parting)),
                }
            }
            let buffers: Vec<Buffer> = new.iter().flat_map(|(_, parting)| parting.placed()).map(buffer).collect();
            let mut offsets = Vec::new();
            if !buffers.is_empty() {
                let taken = taken_by(problem, solution, kind, *lane, &placed.detours);
                let (found, work_units) =
                    solve::place_around(&[taken, kept.clone()].concat(), &buffers).unwrap_or_default();
                placed.work_units += work_units;
                offsets = found;
            }
            live.extend(kept);
            live.extend(offsets.iter().zip(&buffers).map(|(offset, buffer)| {
                let from = offset.get();
                Taken { lifetime: buffer.lifetime, from, to: from + buffer.len.get() }
            }));
            let mut offsets = offsets.into_iter();
            for (key, parting) in new {
                known.insert(key, placed.detours.len());
                placed.detours.push(detour(parting, &mut offsets));
            }
        }
        placed.bound = placed.bound.max(most_live(&live));
    }
    let ends = placed.detours.iter().flat_map(Detour::spans).map(|span| Bytes::new(span.end().get()));
    placed.pool_len = ends.max().unwrap_or_default().max(placed.pool_len);
    // What is tried first is the longest of those that begin at one place.
    placed.detours.sort_by_key(|detour| (detour.from, std::cmp::Reverse(detour.requests.len())));
    placed
}

/// New places for the detours of a plan whose entries have new offsets, around what is `taken`. How long
/// their requests live is not known: until a later one of the detour has bytes of its old place, at most.
pub(super) fn place_again(plan: &Plan, solution: &Solution, taken: &[PlanSpan]) -> Vec<Detour> {
    let problem = Problem { taken: taken.to_vec(), ..Problem::of_plan(plan, Vec::new()) };
    let mut placed: Vec<Detour> = Vec::with_capacity(plan.detours.len());
    for detour in &plan.detours {
        if detour.spans().next().is_none() {
            placed.push(detour.clone());
            continue;
        }
        let kind = Kind { len: detour.requests.len() as u64, ..Kind::default() };
        let mut taken = taken_by(&problem, solution, &kind, detour.lane, &placed);
        let lifetime = Lifetime::new(0, kind.len);
        taken.extend(live_at(plan, detour).map(|at| {
            let from = solution.offsets[at].get();
            Taken { lifetime, from, to: from + plan.entries[at].span().len().get() }
        }));
        let buffers: Vec<Buffer> = until_replaced(detour).map(|of| buffer(&of)).collect();
        let offsets = solve::place_around(&taken, &buffers).unwrap_or_default().0;
        let mut offsets = offsets.into_iter();
        let requests = detour.requests.iter().map(|of| {
            let offset = of.offset.and_then(|_| offsets.next());
            DetourRequest { offset, ..*of }
        });
        placed.push(Detour { requests: requests.collect(), ..detour.clone() });
    }
    placed
}

/// The entries of a detour's lane that are live where it begins.
fn live_at<'a>(plan: &'a Plan, detour: &Detour) -> impl Iterator<Item = usize> + 'a {
    let lane = detour.lane;
    let first = plan.entries.get(detour.from as usize).map(|entry| entry.lifetime.start.0);
    let last = || plan.entries.iter().map(|entry| entry.lifetime.start.0 + 1).max().unwrap_or(0);
    let tick = first.unwrap_or_else(last);
    let ticks = [Some(tick), plan.cycle_len().map(|len| tick + len)];
    let is_live = move |entry: &Entry| {
        let has = |tick: u64| entry.lifetimes().any(|lifetime| lifetime.start.0 < tick && tick < lifetime.end.0);
        entry.lane == lane && ticks.into_iter().flatten().any(has)
    };
    plan.entries.iter().enumerate().filter(move |(_, entry)| is_live(entry)).map(|(at, _)| at)
}

/// The requests of a detour that have places, each live until a later one has bytes of its place.
fn until_replaced(detour: &Detour) -> impl Iterator<Item = Other> + '_ {
    detour.requests.iter().enumerate().filter_map(|(at, of)| {
        let span = of.span()?;
        let later = detour.requests.iter().enumerate().skip(at + 1);
        let replaced = later.filter_map(|(later, of)| Some((later, of.span()?)));
        let end = replaced.into_iter().find(|(_, other)| other.overlaps(span)).map(|(later, _)| later);
        let end = end.unwrap_or(detour.requests.len());
        let asked = Asked { bytes: of.bytes, lane: detour.lane, context: of.context };
        Some(Other { asked, len: span.len(), lifetime: Some(Lifetime::new(at as u64, end as u64)) })
    })
}

/// What of the pool a detour has that another kind has placed, while this one is on it.
fn again<'a>(parting: &'a Parting, detour: &'a Detour) -> impl Iterator<Item = Taken> + 'a {
    let both = parting.requests.iter().zip(&detour.requests);
    both.filter_map(|(of, placed)| {
        let (lifetime, span) = (of.lifetime?, placed.span()?);
        Some(Taken { lifetime, from: span.start().get(), to: span.end().get() })
    })
}

fn detour(parting: &Parting, offsets: &mut impl Iterator<Item = PlanOffset>) -> Detour {
    let mut placed = parting.placed().peekable();
    let requests = parting.requests.iter().map(|of| {
        let offset = placed.next_if(|next| std::ptr::eq(*next, of)).and_then(|_| offsets.next());
        DetourRequest { bytes: of.asked.bytes, context: of.asked.context, offset }
    });
    Detour { lane: parting.lane, from: parting.from as u32, to: parting.to as u32, requests: requests.collect() }
}

fn buffer(of: &Other) -> Buffer {
    let Asked { bytes, lane, context } = of.asked;
    let lifetime = of.lifetime.expect("what has a place does not outlive its iteration");
    Buffer { bytes, len: of.len, lane, context, lifetime, again: None, phases: PhasePair::default() }
}

/// What is where the plan has it while an iteration of this kind goes on: for good, and in common with the cycle. Of two that are live together there and not in the cycle the second goes elsewhere.
fn kept(problem: &Problem, solution: &Solution, kind: &Kind, lane: Lane) -> Vec<Taken> {
    let end = problem.end();
    let is_for_good = |buffer: &Buffer| buffer.lifetimes().all(|lifetime| lifetime.end >= end);
    let for_good = (0..problem.buffers.len()).filter(|at| is_for_good(&problem.buffers[*at]));
    let for_good = for_good.map(|at| (Lifetime::new(0, kind.len), at));
    let in_common = kind.kept.iter().map(|(at, lifetime)| (*lifetime, *at));
    let mut all: Vec<(Lifetime, usize)> = for_good.chain(in_common).collect();
    all.retain(|(_, at)| problem.buffers[*at].lane == lane);
    all.sort_by_key(|(lifetime, at)| (lifetime.start, *at));
    let mut live: BTreeMap<u64, (u64, Tick)> = BTreeMap::new();
    let mut kept = Vec::with_capacity(all.len());
    for (lifetime, at) in all {
        let from = solution.offsets[at].get();
        let to = from + problem.buffers[at].len.get();
        // Whoever reaches into it begins before it and behind all others, or in it.
        let before = live.range(..=from).next_back().map(|(start, _)| *start);
        let mut near: Vec<u64> = before.into_iter().chain(live.range(from..to).map(|(start, _)| *start)).collect();
        near.retain(|start| live[start].0 > from);
        if near.iter().any(|start| live[start].1 > lifetime.start) {
            continue;
        }
        for gone in near {
            live.remove(&gone);
        }
        live.insert(from, (to, lifetime.end));
        kept.push(Taken { lifetime, from, to });
    }
    kept
}

/// What else of the pool is not for a detour of `lane` in an iteration of this kind: what one pass leaves to the next is there when it begins, and the parts of other lanes.
fn taken_by(problem: &Problem, solution: &Solution, kind: &Kind, lane: Lane, detours: &[Detour]) -> Vec<Taken> {
    let lifetime = Lifetime::new(0, kind.len);
    let mut parts: BTreeMap<Lane, (u64, u64)> = BTreeMap::new();
    let mut taken = Vec::new();
    for (buffer, offset) in problem.buffers.iter().zip(&solution.offsets) {
        let (from, to) = (offset.get(), offset.get() + buffer.len.get());
        let part = parts.entry(buffer.lane).or_insert((from, to));
        *part = (part.0.min(from), part.1.max(to));
        let is_carried = buffer.again.is_some() && buffer.lifetime.end >= problem.pass_end;
        taken.extend(Some(Taken { lifetime, from, to }).filter(|_| buffer.lane == lane && is_carried));
    }
    let parts = parts.into_iter().filter(|(of, _)| *of != lane).map(|(_, part)| part);
    taken.extend(problem.taken.iter().map(|span| Taken { lifetime, from: span.start().get(), to: span.end().get() }));
    let spans = detours.iter().filter(|detour| detour.lane != lane).flat_map(Detour::spans);
    let others = parts.chain(spans.map(|span| (span.start().get(), span.end().get())));
    taken.extend(others.map(|(from, to)| Taken { lifetime, from, to }));
    taken
}

/// The most bytes that are live at one time, of what shares none.
fn most_live(live: &[Taken]) -> Bytes {
    let of = |taken: &Taken| (taken.lifetime, Bytes::new(taken.to - taken.from));
    let (lifetimes, lens): (Vec<Lifetime>, Vec<Bytes>) = live.iter().map(of).unzip();
    lifetimes::most_live(&lifetimes, &lens)
}

#[cfg(test)]
mod tests;
