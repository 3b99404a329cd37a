//! Checks a plan without knowing how it was made: it shares only the vocabulary with the solvers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::expiry::Times;
use super::{Buffer, Detour, Entry, Lane, Plan};
use crate::ids::StreamId;
use crate::limits;
use crate::units::{Bytes, Lifetime, Place, PlanOffset, PlanSpan, Tick};

/// What is wrong with a plan.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Wrong {
    /// An entry's size is impossible.
    #[error("entry {entry}: {bytes:?} is not a possible size")]
    Size {
        /// Which.
        entry: usize,
        /// Its size.
        bytes: Bytes,
    },
    /// An entry's place is not aligned.
    #[error("entry {entry} lies at {offset:#x}, which is not a multiple of {}", limits::ALLOCATION_ALIGNMENT)]
    Alignment {
        /// Which.
        entry: usize,
        /// Where it lies.
        offset: u64,
    },
    /// An entry lies outside the pool.
    #[error("entry {entry} ends at {end:#x} and the pool at {pool:#x}")]
    Outside {
        /// Which.
        entry: usize,
        /// Where it ends.
        end: u64,
        /// Where the pool ends.
        pool: u64,
    },
    /// An entry is live for no time, or its times overlap.
    #[error("entry {entry} is live at impossible times")]
    Lifetime {
        /// Which.
        entry: usize,
    },
    /// Two entries that are live together share bytes.
    #[error("entries {first} and {second} are both live at tick {tick} and share bytes at {offset:#x}")]
    Overlap {
        /// One.
        first: usize,
        /// The other.
        second: usize,
        /// When.
        tick: u64,
        /// Where.
        offset: u64,
    },
    /// Some entries of a stream tell threads apart and others do not.
    #[error("entry {entry} is of {lane}, where other entries tell threads apart, or do not")]
    Roles {
        /// Which.
        entry: usize,
        /// Whose it is.
        lane: Lane,
    },
    /// Entries of one lane lie on both sides of one of another, or share bytes with it.
    #[error(
        "entry {second} at {offset:#x} is of another stream or thread than entry {first}, and does not lie apart from all of that one's"
    )]
    Lanes {
        /// One.
        first: usize,
        /// The other.
        second: usize,
        /// Where that lies.
        offset: u64,
    },
    /// The entries are not in the order in which they are asked for, or not all of them come again after the same time.
    #[error("entry {entry} is asked for at tick {tick}, out of turn")]
    Order {
        /// Which.
        entry: usize,
        /// When.
        tick: u64,
    },
    /// A request that varies is expected at an impossible place or time.
    #[error("varying request {number} is expected at an impossible place or time")]
    Dynamic {
        /// Which.
        number: usize,
    },
    /// A detour leads from or to where its lane is not, or what it asks for lies where it must not.
    #[error("detour {number} {what}")]
    Detour {
        /// Which.
        number: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// The cycle does not begin inside the plan.
    #[error("the cycle begins at entry {start} of {count}")]
    Cycle {
        /// Where it says it begins.
        start: usize,
        /// Entries there are.
        count: usize,
    },
}

/// Says the first thing that is wrong, if anything is.
pub fn check(plan: &Plan) -> Result<(), Wrong> {
    check_placements(plan)?;
    let times = Times::of(plan);
    check_order(plan, &times)?;
    check_dynamic(plan, &times)?;
    check_detours(plan, &times)
}

/// Says the first thing that is wrong with where the entries are, and when.
pub fn check_placements(plan: &Plan) -> Result<(), Wrong> {
    if plan.cycle_start > plan.entries.len() {
        return Err(Wrong::Cycle { start: plan.cycle_start, count: plan.entries.len() });
    }
    for (number, entry) in plan.entries.iter().enumerate() {
        check_entry(plan, number, entry)?;
    }
    check_roles(plan)?;
    check_lanes(plan)?;
    check_overlaps(plan)
}

/// Entries stand in the order in which they are asked for, and the second pass of the cycle begins behind the first, the same time later for each.
fn check_order(plan: &Plan, times: &Times) -> Result<(), Wrong> {
    let out_of_turn = |entry: usize| Wrong::Order { entry, tick: plan.entries[entry].lifetime.start.0 };
    let starts: Vec<Tick> = plan.entries.iter().map(|entry| entry.lifetime.start).collect();
    if let Some(at) = starts.windows(2).position(|pair| pair[0] > pair[1]) {
        return Err(out_of_turn(at + 1));
    }
    if let Some(entry) = plan.entries[..plan.cycle_start].iter().position(|entry| entry.again.is_some()) {
        return Err(out_of_turn(entry));
    }
    // What has no second time is asked for again all the same, and must be there from the first.
    let is_gone = |entry: &Entry| entry.again.is_none() && entry.lifetime.end < times.end;
    if let Some(entry) = plan.entries[plan.cycle_start..].iter().position(is_gone) {
        return Err(Wrong::Lifetime { entry: plan.cycle_start + entry });
    }
    let Some(of_first) = starts.get(plan.cycle_start) else { return Ok(()) };
    let Some(cycle_len) = plan.cycle_len() else { return Ok(()) };
    for (number, entry) in plan.entries.iter().enumerate().skip(plan.cycle_start) {
        let comes_later =
            entry.again.is_some_and(|again| again.start.0.checked_sub(cycle_len) != Some(entry.lifetime.start.0));
        if comes_later || entry.lifetime.start.0 - of_first.0 >= cycle_len {
            return Err(out_of_turn(number));
        }
    }
    Ok(())
}

/// Requests that vary stand in order, too, and their intervals lie in the prologue or in the second pass.
fn check_dynamic(plan: &Plan, times: &Times) -> Result<(), Wrong> {
    let mut last = 0;
    for (number, entry) in plan.dynamic.iter().enumerate() {
        let of_cycle = number >= plan.dynamic_cycle_start;
        let before = entry.before as usize;
        let is_in_order = before >= last
            && before <= plan.entries.len()
            && (of_cycle == (before >= plan.cycle_start) || before == plan.cycle_start);
        let is_in_time = |interval: Lifetime| {
            let is_before_cycle = || times.position(interval.end) <= plan.cycle_start;
            let fits = if of_cycle { times.is_second_pass(interval.start) } else { is_before_cycle() };
            interval.start < interval.end && fits
        };
        if !is_in_order || !entry.interval.is_none_or(is_in_time) {
            return Err(Wrong::Dynamic { number });
        }
        last = before;
    }
    if plan.dynamic_cycle_start > plan.dynamic.len() {
        return Err(Wrong::Dynamic { number: plan.dynamic_cycle_start });
    }
    Ok(())
}

/// Detours lead from the cycle back into it, and what they ask for keeps out of what is live for good, and of other lanes.
fn check_detours(plan: &Plan, times: &Times) -> Result<(), Wrong> {
    if plan.detours.is_empty() {
        return Ok(());
    }
    let wrong = |number: usize, what: &'static str| Err(Wrong::Detour { number, what });
    let comes_again = plan.entries.iter().filter(|entry| entry.again.is_some());
    let repeating: HashSet<Lane> = comes_again.map(|entry| entry.lane).collect();
    let requests: usize = plan.detours.iter().map(|detour| detour.requests.len()).sum();
    if requests > limits::PLAN_ENTRIES_MAX {
        return wrong(0, "and the others ask for more than a plan can have");
    }
    let mut last = 0;
    for (number, detour) in plan.detours.iter().enumerate() {
        let is_end = |entry: u32| {
            let of = plan.entries.get(entry as usize);
            let is_of_lane = of.is_none_or(|of| of.lane == detour.lane);
            (plan.cycle_start..=plan.entries.len()).contains(&(entry as usize)) && is_of_lane
        };
        if detour.from < last || !is_end(detour.from) || !is_end(detour.to) {
            return wrong(number, "leads from or to an entry that is none of its cycle's");
        }
        if !repeating.contains(&detour.lane) {
            return wrong(number, "is of a lane of which nothing comes again");
        }
        last = detour.from;
        for request in &detour.requests {
            let Some(len) = limits::allocation_len(request.bytes) else {
                return wrong(number, "asks for an impossible size");
            };
            let Some(offset) = request.offset else { continue };
            let end = offset.get().saturating_add(len.get());
            if !offset.get().is_multiple_of(limits::ALLOCATION_ALIGNMENT.get()) || end > plan.pool_len.get() {
                return wrong(number, "has an impossible place");
            }
        }
    }
    check_detour_places(plan, times)
}

/// Sweeps over the pool: of what lies at one place, and is of a detour, all is of one lane and nothing there for good.
fn check_detour_places(plan: &Plan, times: &Times) -> Result<(), Wrong> {
    let is_for_good = |entry: &Entry| entry.lifetimes().all(|lifetime| lifetime.end >= times.end);
    let mut parts: BTreeMap<Lane, (u64, u64)> = BTreeMap::new();
    // From where to where, of whom, which detour if it is of one, and whether nobody else may be there.
    let mut spans: Vec<(u64, u64, Lane, Option<usize>, bool)> = Vec::new();
    for entry in &plan.entries {
        let (start, end) = (entry.span().start().get(), entry.span().end().get());
        let part = parts.entry(entry.lane).or_insert((start, end));
        *part = (part.0.min(start), part.1.max(end));
        spans.extend(is_for_good(entry).then_some((start, end, entry.lane, None, true)));
    }
    spans.extend(parts.into_iter().map(|(lane, (start, end))| (start, end, lane, None, false)));
    for (number, detour) in plan.detours.iter().enumerate() {
        let of = |span: PlanSpan| (span.start().get(), span.end().get(), detour.lane, Some(number), false);
        spans.extend(detour.spans().map(of));
    }
    spans.sort_unstable();
    // How far what began so far reaches: of parts and of detours, each with that of the lane that reaches furthest and that of all others; what is there for good; and all detours.
    let (mut parts, mut detours) = (Reach::default(), Reach::default());
    let (mut good, mut detoured) = (0, 0);
    for (start, end, lane, detour, is_for_good) in spans {
        let is_others = detour.is_some() && parts.of_others(lane) > start || detours.of_others(lane) > start;
        let reaches = |of: &Detour| of.spans().any(|span| span.start().get() <= start && start < span.end().get());
        let wrong = |what: &'static str| {
            let number = detour.or_else(|| plan.detours.iter().position(reaches)).unwrap_or(0);
            Err(Wrong::Detour { number, what })
        };
        if is_others {
            return wrong("has a place that is another lane's");
        }
        if detour.is_some() && good > start || is_for_good && detoured > start {
            return wrong("has a place where something is for good");
        }
        match detour {
            None => parts.note(lane, end),
            Some(_) => detours.note(lane, end),
        }
        good = good.max(if is_for_good { end } else { 0 });
        detoured = detoured.max(if detour.is_some() { end } else { 0 });
    }
    Ok(())
}

/// How far spans reach, of the lane that reaches furthest and of all others.
#[derive(Default)]
struct Reach {
    furthest: Option<(Lane, u64)>,
    others: u64,
}

impl Reach {
    fn of_others(&self, lane: Lane) -> u64 {
        self.furthest.map_or(0, |(furthest, end)| if furthest == lane { self.others } else { end })
    }

    fn note(&mut self, lane: Lane, end: u64) {
        match &mut self.furthest {
            Some((furthest, reach)) if *furthest == lane => *reach = end.max(*reach),
            Some((_, reach)) if end <= *reach => self.others = end.max(self.others),
            furthest => {
                self.others = furthest.map_or(0, |(_, reach)| reach).max(self.others);
                *furthest = Some((lane, end));
            }
        }
    }
}

fn check_entry(plan: &Plan, entry: usize, of: &Entry) -> Result<(), Wrong> {
    let offset = of.offset.raw();
    let Some(len) = limits::allocation_len(of.bytes) else { return Err(Wrong::Size { entry, bytes: of.bytes }) };
    if !offset.is_multiple_of(limits::ALLOCATION_ALIGNMENT.get()) {
        return Err(Wrong::Alignment { entry, offset });
    }
    let end = offset.saturating_add(len.get());
    if end > plan.pool_len.get() {
        return Err(Wrong::Outside { entry, end, pool: plan.pool_len.get() });
    }
    let is_time = |lifetime: Lifetime| lifetime.start < lifetime.end;
    let times_fit =
        is_time(of.lifetime) && of.again.is_none_or(|again| is_time(again) && again.start >= of.lifetime.end);
    if times_fit { Ok(()) } else { Err(Wrong::Lifetime { entry }) }
}

/// On a stream all entries tell threads apart, or none does.
fn check_roles(plan: &Plan) -> Result<(), Wrong> {
    let mut apart: HashMap<StreamId, bool> = HashMap::new();
    let lanes = plan.entries.iter().map(|entry| entry.lane);
    let is_other = |lane: Lane| *apart.entry(lane.stream).or_insert(lane.role > 0) != (lane.role > 0);
    match lanes.map(is_other).position(|is_other| is_other) {
        Some(entry) => Err(Wrong::Roles { entry, lane: plan.entries[entry].lane }),
        None => Ok(()),
    }
}

/// Sweeps over the pool: each lane has a part of its own, in which nobody else is.
fn check_lanes(plan: &Plan) -> Result<(), Wrong> {
    // One lane alone has the pool to itself.
    if plan.entries.windows(2).all(|pair| pair[0].lane == pair[1].lane) {
        return Ok(());
    }
    let mut by_place: Vec<_> = plan.entries.iter().enumerate().collect();
    by_place.sort_by_key(|(number, entry)| (entry.offset, *number));
    // The entry that reaches furthest. Of all lanes it is the only one that can reach beyond the start of the next: whoever changed the lane began
    // behind all others.
    let mut furthest: Option<(u64, usize)> = None;
    let mut done: BTreeSet<Lane> = BTreeSet::new();
    for (number, entry) in by_place {
        let (start, end) = (entry.span().start().get(), entry.span().end().get());
        if let Some((reach, other)) = furthest
            && plan.entries[other].lane != entry.lane
        {
            done.insert(plan.entries[other].lane);
            if reach > start || done.contains(&entry.lane) {
                return Err(Wrong::Lanes { first: other, second: number, offset: start });
            }
        }
        furthest = furthest.filter(|(reach, _)| *reach >= end).or(Some((end, number)));
    }
    Ok(())
}

/// Sweeps over time with the set of live spans: whoever comes must not touch its neighbours.
fn check_overlaps(plan: &Plan) -> Result<(), Wrong> {
    let lives = plan.entries.iter().enumerate().flat_map(|(number, entry)| {
        let span = entry.span();
        entry.lifetimes().map(move |lifetime| (number, lifetime, span.start().get(), span.end().get()))
    });
    check_apart(lives)
}

/// Says the first two buffers that are live together and share a byte, where each lies at the offset of its number.
pub fn check_offsets(buffers: &[Buffer], offsets: &[PlanOffset]) -> Result<(), Wrong> {
    let lives = buffers.iter().zip(offsets).enumerate().flat_map(|(number, (buffer, offset))| {
        let (start, end) = (offset.get(), offset.get().saturating_add(buffer.len.get()));
        buffer.lifetimes().map(move |lifetime| (number, lifetime, start, end))
    });
    check_apart(lives)
}

/// Says the first two that are live together and share a byte. Of each its number, when it is live, and from where to where it lies.
pub fn check_apart(lives: impl Iterator<Item = (usize, Lifetime, u64, u64)>) -> Result<(), Wrong> {
    let lives: Vec<(usize, Lifetime, u64, u64)> = lives.collect();
    // At one tick whoever leaves goes first: lifetimes are half-open. Each change in one number, which sorts in half the time.
    let change = |tick: Tick, comes: bool, at: usize| {
        u128::from(tick.0) << u64::BITS | u128::from(comes) << (u64::BITS - 1) | at as u128
    };
    let both = |(at, (_, lifetime, ..)): (usize, &(usize, Lifetime, u64, u64))| {
        [change(lifetime.start, true, at), change(lifetime.end, false, at)]
    };
    let mut changes: Vec<u128> = lives.iter().enumerate().flat_map(both).collect();
    changes.sort_unstable();
    let mut live: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for change in changes {
        let (tick, comes) = (Tick((change >> u64::BITS) as u64), change >> (u64::BITS - 1) & 1 == 1);
        let (number, _, start, end) = lives[(change as u64 & u64::MAX >> 1) as usize];
        if !comes {
            live.remove(&start);
            continue;
        }
        let before = live.range(..start).next_back().filter(|(_, (reach, _))| *reach > start);
        let inside = live.range(start..end).next();
        if let Some((offset, (_, other))) = before.or(inside) {
            let offset = start.max(*offset);
            return Err(Wrong::Overlap { first: *other, second: number, tick: tick.0, offset });
        }
        live.insert(start, (end, number));
    }
    Ok(())
}
