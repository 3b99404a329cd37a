//! Solvers: each gives every buffer of a problem an offset. The best answer wins.
//!
//! Deterministic: the same problem gives the same plan, byte for byte.

pub(super) mod around;
mod best_fit;
mod first_fit;
mod one_pass;
mod phased;
mod reorder;
mod repeats;
mod search;
mod sections;
mod tiles;

use std::collections::BTreeMap;

use super::{Buffer, Lane, PlanError, Problem};
use crate::units::{Bytes, Lifetime, PlanOffset};
use crate::work::{Budget, Work};
use one_pass::OnePass;
use repeats::Repeats;

pub use best_fit::Small;
pub use first_fit::Order;
pub use phased::Transients;

/// An offset for every buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Solution {
    /// In the order of the buffers.
    pub offsets: Vec<PlanOffset>,
    /// Bytes that they span together.
    pub peak: Bytes,
    /// Who found it.
    pub solver: &'static str,
    /// Work that it took: buffers placed, over all tries, and the units of the search.
    pub work_units: u64,
    /// Nothing spans less: what is live at one time, or more where a search has tried all that would be lower.
    pub lower_bound: Bytes,
}

impl Solution {
    /// No other answer spans less.
    pub fn is_optimal(&self) -> bool {
        self.peak <= self.lower_bound
    }
}

/// A way to find offsets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Solver {
    /// Each to the lowest offset that is free for its whole life.
    FirstFit(Order),
    /// Each to the smallest extent that is free when it comes.
    BestFit(Small),
    /// By computation phase, and then by size.
    Phased(Transients),
    /// From the floor up, under what is most pressed: some passes with other priorities.
    Dive,
    /// Buffers that fill a stretch of time and memory without a gap are one, and then such passes.
    Tiles,
    /// Such passes and an exact search in turn, for as long as there is work to do.
    Search,
}

impl Solver {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Solver; 16] = [
        Solver::FirstFit(Order::SizeThenStart),
        Solver::FirstFit(Order::LongThenSize),
        Solver::Dive,
        Solver::Tiles,
        Solver::FirstFit(Order::Area),
        Solver::FirstFit(Order::SizeThenEnd),
        Solver::FirstFit(Order::SizeThenTicks),
        Solver::FirstFit(Order::Ticks),
        Solver::FirstFit(Order::Start),
        Solver::BestFit(Small::Nothing),
        Solver::BestFit(Small::Below256Kib),
        Solver::BestFit(Small::Below1Mib),
        Solver::BestFit(Small::Below2Mib),
        Solver::Phased(Transients::Alone),
        Solver::Phased(Transients::Grouped),
        Solver::Search,
    ];

    /// It has an answer after one pass over the buffers.
    const QUICKEST: Solver = Solver::BestFit(Small::Nothing);

    /// It does what work it may.
    fn searches(self) -> bool {
        matches!(self, Solver::Dive | Solver::Tiles | Solver::Search)
    }

    /// Its name in plans and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Solver::FirstFit(order) => order.name(),
            Solver::BestFit(small) => small.name(),
            Solver::Phased(transients) => transients.name(),
            Solver::Dive => "dive",
            Solver::Tiles => "tiles",
            Solver::Search => "search",
        }
    }
}

/// Steps of first fit in all orders together: some two seconds. Training takes ten to thirty for each buffer in the first order, which meets the bound there; what is stopped
/// has tens of thousands of sizes and lifetimes with nothing in common, and there best fit is as good.
const FIRST_FIT_STEPS_MAX: u64 = 1 << 24;

/// A search in proportion to what is placed, and a quarter of a second at most.
pub fn in_proportion(problem: &Problem) -> Budget {
    const EACH: u64 = 500;
    Budget::of((EACH * problem.buffers.len() as u64).min(4_000_000))
}

/// A search that somebody asks for: a second or two.
pub fn patient() -> Budget {
    Budget::of(16_000_000)
}

/// What a solver may do, and what it did.
struct Effort {
    /// Steps of first fit that are left.
    steps: u64,
    /// Offsets from here on are of no use: there is a plan that ends here.
    top: u64,
    /// Buffers that were placed.
    placed: u64,
    /// The buffer that was placed last, or for which no offset was low enough.
    last: usize,
    /// What a search may do, and what it did.
    search: Work,
    /// What a search of all that is to be placed has found that nothing is below.
    low: u64,
}

impl Effort {
    fn of(steps: u64, top: u64, budget: &Budget) -> Effort {
        let search = Work::of(budget);
        Effort { steps, top, placed: 0, last: 0, search, low: 0 }
    }

    /// Somebody wants an answer now. Asked behind each buffer, and answered now and then.
    fn is_stopped(&self) -> bool {
        const EVERY: u64 = 64;
        self.placed.is_multiple_of(EVERY) && self.search.is_stopped()
    }

    fn units(&self) -> u64 {
        self.placed + self.search.done()
    }
}

/// Why a solver has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stopped {
    /// Offsets pass any address space.
    TooLarge,
    /// It used up its steps, or cannot be the best any more.
    NoUse,
}

/// Tries the solvers one after the other, but for those that search, until one meets the lower bound, and takes the best.
///
/// Each lane has its own part of the pool: bytes that one stream has freed are not another's without an event, which a plan cannot
/// promise, and what one thread has freed may be there still when another that races with it asks. In the plan of a job that repeats itself small buffers have a part of their own in that, where it costs nothing, or what lies free at its end: whoever is not where and when the plan has it, because something
/// came or did not, stands in the way of others until it goes, and a kilobyte should not do so in the middle of the gigabyte that a workspace needs.
pub fn solve(problem: &Problem) -> Result<Solution, PlanError> {
    solve_with(problem, &Budget::default())
}

/// The same, and searches so much.
pub fn solve_with(problem: &Problem, budget: &Budget) -> Result<Solution, PlanError> {
    let changes = super::Changes::of(problem);
    let bound = changes.bound(|_| true);
    let most = bound.get() + bound.get() / APART_COSTS_MAX;
    let mut above_bound: Option<Solution> = None;
    for below in APART_BELOW.into_iter().filter(|_| problem.comes_again()) {
        let is_small = |buffer: &Buffer| buffer.len < below;
        let [small, large] = [true, false].map(|small| changes.bound(|len| (len < below) == small).get());
        if small == 0 || large == 0 || small + large > most {
            continue;
        }
        // What is kept apart is a favour, and not worth a search.
        let unsearched = Budget { stop: budget.stop.clone(), ..Budget::default() };
        let effort = Effort::of(FIRST_FIT_STEPS_MAX, u64::MAX, &unsearched);
        let apart = solve_within(problem, parts(problem, is_small), Bytes::new(small + large), effort)?;
        let is_cheap = apart.peak <= bound || budget.units == 0 && apart.peak.get() <= most;
        let chosen = match is_cheap {
            true => Some(apart.clone()),
            // A job that is planned while it runs may do something else at every step, and a millionth is not too much for that: lowered ones cost one whose sizes vary 1.6 % of its peak.
            false if budget.units == 0 => None,
            false => lowered(problem, &apart, is_small, small, bound),
        };
        if let Some(chosen) = chosen {
            Work::of(budget).tell(chosen.peak.get());
            return Ok(Solution { lower_bound: bound, ..chosen });
        }
        above_bound = above_bound.into_iter().chain([apart]).min_by_key(|apart| apart.peak);
    }
    let effort = Effort::of(FIRST_FIT_STEPS_MAX, u64::MAX, budget);
    let together = solve_within(problem, parts(problem, |_| false), bound, effort)?;
    // What was a favour may be the better answer all the same.
    let better = above_bound.filter(|apart| apart.peak < together.peak);
    Ok(match better {
        Some(apart) => Solution { lower_bound: together.lower_bound, ..apart },
        None => together,
    })
}

/// Small buffers that lie above the others come down into what is free so `deep` below the bound and not deeper, above whatever reaches up there.
fn lowered(
    problem: &Problem,
    apart: &Solution,
    is_small: impl Fn(&Buffer) -> bool,
    deep: u64,
    bound: Bytes,
) -> Option<Solution> {
    let all: Vec<&Buffer> = problem.buffers.iter().collect();
    if all.iter().any(|buffer| buffer.lane != all[0].lane) {
        return None;
    }
    let base = bound.get() - deep;
    let one_pass = OnePass::of(&all);
    // What reaches up is in the way from the floor on, and comes first.
    let (mut lifetimes, mut lens, mut small) = (Vec::new(), Vec::new(), Vec::new());
    for (at, buffer) in all.iter().enumerate() {
        let len = match is_small(buffer) {
            true => buffer.len.get(),
            false => (apart.offsets[at].get() + buffer.len.get()).saturating_sub(base),
        };
        if len > 0 {
            lifetimes.push(one_pass.lifetimes[at]);
            lens.push(len);
            small.push(is_small(buffer).then_some(at));
        }
    }
    let is_first: Vec<bool> = small.iter().map(Option::is_none).collect();
    let mut work = Work::of(&Budget::of(LOWERED_UNITS * lens.len() as u64));
    let found = search::some_first(&lifetimes, &lens, &is_first, deep, &mut work)?;
    let mut offsets = apart.offsets.clone();
    for (low, small) in found.iter().zip(&small) {
        match small {
            Some(at) => offsets[*at] = PlanOffset::new(base + low),
            None if *low == 0 => {}
            None => return None,
        }
    }
    let work_units = apart.work_units + work.done();
    Some(Solution { offsets, peak: bound, work_units, ..apart.clone() })
}

/// Units of work for each buffer: a few passes.
const LOWERED_UNITS: u64 = 100;

/// Buffers below one of these sizes are placed apart from the rest: the largest of them with which the bound is met.
const APART_BELOW: [Bytes; 5] = [Bytes::kib(2049), Bytes::kib(1025), Bytes::kib(1024), Bytes::kib(257), Bytes::kib(33)];
/// What both parts may need more than the bound before small ones come down into the other: one part in so many of it. More of it is no part of their own.
const APART_COSTS_MAX: u64 = 1_000_000;

/// With more buffers than this the quickest answer comes first: the others take seconds each.
const QUICKEST_FIRST: usize = 100_000;

fn solve_within(
    problem: &Problem,
    parts: Vec<Part<'_>>,
    bound: Bytes,
    mut effort: Effort,
) -> Result<Solution, PlanError> {
    let mut best: Option<Solution> = None;
    let is_wanted = |solver: &Solver| !solver.searches() || !effort.search.is_over();
    let mut solvers: Vec<Solver> = Solver::ALL.into_iter().filter(is_wanted).collect();
    if problem.buffers.len() > QUICKEST_FIRST {
        solvers.sort_by_key(|solver| *solver != Solver::QUICKEST);
    }
    for solver in solvers {
        if best.is_none() && solver != Solver::QUICKEST && effort.search.is_stopped() {
            continue;
        }
        effort.top = best.as_ref().map_or(u64::MAX, |best| best.peak.get());
        match place(problem, &parts, solver, &mut effort) {
            Ok(solution) if best.as_ref().is_none_or(|best| solution.peak < best.peak) => {
                effort.search.tell(solution.peak.get());
                best = Some(solution);
            }
            Err(Stopped::TooLarge) if best.is_none() => return Err(PlanError::TooLarge),
            Ok(_) | Err(_) => {}
        }
        if best.as_ref().is_some_and(|best| best.peak <= bound || effort.search.is_stopped()) {
            break;
        }
    }
    let lower_bound = bound.max(Bytes::new(effort.low));
    best.map(|best| Solution { work_units: effort.units(), lower_bound, ..best }).ok_or(PlanError::NothingStatic)
}

/// The answer of one solver, however long it takes, but for a search.
pub fn solve_in(problem: &Problem, solver: Solver) -> Result<Solution, PlanError> {
    solve_in_with(problem, solver, &in_proportion(problem))
}

/// The same with so much of a search.
pub fn solve_in_with(problem: &Problem, solver: Solver, budget: &Budget) -> Result<Solution, PlanError> {
    let mut effort = Effort::of(u64::MAX, u64::MAX, budget);
    let found = place(problem, &parts(problem, |_| false), solver, &mut effort);
    let found = found.map_err(|stopped| match stopped {
        Stopped::TooLarge => PlanError::TooLarge,
        Stopped::NoUse => PlanError::NotFound { solver: solver.name(), work_units: effort.units() },
    })?;
    effort.search.tell(found.peak.get());
    Ok(Solution { lower_bound: super::lower_bound(problem).max(Bytes::new(effort.low)), ..found })
}

/// Offsets that somebody else has for some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Taken {
    pub(super) lifetime: Lifetime,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// Offsets for buffers that live once, around what is taken: the lowest top that first fit finds. Nothing where that takes too many steps or passes any address space.
pub(super) fn place_around(taken: &[Taken], buffers: &[Buffer]) -> Option<(Vec<PlanOffset>, u64)> {
    let mut effort = Effort::of(FIRST_FIT_STEPS_MAX, Bytes::MAX.get(), &Budget::default());
    let mut best = None;
    for order in [Order::SizeThenStart, Order::SizeThenEnd, Order::Area, Order::LongThenSize, Order::Start] {
        let Ok(offsets) = first_fit::place_around(taken, buffers, order, &mut effort) else { continue };
        effort.top = offsets.iter().zip(buffers).map(|(offset, buffer)| offset + buffer.len.get()).max().unwrap_or(0);
        best = Some(offsets);
    }
    best.map(|offsets| (offsets.into_iter().map(PlanOffset::new).collect(), effort.placed))
}

/// The buffers of one lane, or the small ones of them, or the others: those that are placed, and those that are like one of these.
struct Part<'a> {
    /// Where they are in the problem.
    members: Vec<usize>,
    buffers: Vec<&'a Buffer>,
    one_pass: OnePass,
    /// Where others are in the problem, with whose offset each has: where that is among the members.
    alike: Vec<(usize, usize)>,
}

impl<'a> Part<'a> {
    fn of(problem: &'a Problem, all: Vec<usize>) -> Part<'a> {
        let buffers: Vec<&Buffer> = all.iter().map(|at| &problem.buffers[*at]).collect();
        let one_pass = OnePass::of(&buffers);
        let lens: Vec<u64> = buffers.iter().map(|buffer| buffer.len.get()).collect();
        // What is live for longer than it is says nothing of what repeats.
        let repeats = one_pass.is_exact.then(|| Repeats::of(&one_pass.lifetimes, &lens)).flatten();
        let Some(Repeats { like }) = repeats else {
            return Part { members: all, buffers, one_pass, alike: Vec::new() };
        };
        let is_placed = |at: &usize| like[*at] as usize == *at;
        let placed: Vec<usize> = (0..all.len()).filter(is_placed).collect();
        let place = |of: u32| placed.binary_search(&(of as usize)).expect("whoever others are like is placed");
        let alike = (0..all.len()).filter(|at| !is_placed(at)).map(|at| (all[at], place(like[at]))).collect();
        let lifetimes = placed.iter().map(|at| one_pass.lifetimes[*at]).collect();
        Part {
            members: placed.iter().map(|at| all[*at]).collect(),
            buffers: placed.iter().map(|at| buffers[*at]).collect(),
            one_pass: OnePass { lifetimes, is_exact: true },
            alike,
        }
    }

    /// The offsets in the problem of what was placed from `base` up, and where the highest ends. Nothing where that passes any address space.
    fn put(&self, problem: &Problem, base: u64, placed: &[u64], offsets: &mut [PlanOffset]) -> Option<u64> {
        let mut end = base;
        let same = self.alike.iter().map(|(at, like)| (*at, placed[*like]));
        for (at, offset) in self.members.iter().copied().zip(placed.iter().copied()).chain(same) {
            let offset = base.checked_add(offset)?;
            end = end.max(offset.checked_add(problem.buffers[at].len.get())?);
            offsets[at] = PlanOffset::new(offset);
        }
        Some(end)
    }
}

fn parts(problem: &Problem, is_small: impl Fn(&Buffer) -> bool) -> Vec<Part<'_>> {
    let mut by_lane: BTreeMap<(Lane, bool), Vec<usize>> = BTreeMap::new();
    for (at, buffer) in problem.buffers.iter().enumerate() {
        by_lane.entry((buffer.lane, is_small(buffer))).or_default().push(at);
    }
    by_lane.into_values().map(|all| Part::of(problem, all)).collect()
}

fn place(problem: &Problem, parts: &[Part], solver: Solver, effort: &mut Effort) -> Result<Solution, Stopped> {
    let mut offsets = vec![PlanOffset::new(0); problem.buffers.len()];
    let mut base = 0_u64;
    let top = effort.top;
    for (number, part) in parts.iter().enumerate() {
        let Part { buffers, one_pass, .. } = part;
        effort.top = top.saturating_sub(base);
        let placed = match solver {
            Solver::FirstFit(order) => first_fit::place(buffers, one_pass, order, effort)?,
            Solver::BestFit(small) => {
                let lens = buffers.iter().map(|buffer| buffer.len.get());
                effort.placed += buffers.len() as u64;
                best_fit::place(&one_pass.lifetimes.iter().copied().zip(lens).collect::<Vec<_>>(), small)?
            }
            Solver::Phased(transients) => phased::place(buffers, one_pass, transients, effort)?,
            Solver::Dive | Solver::Tiles | Solver::Search => {
                let how: Search = match solver {
                    Solver::Dive => search::dive,
                    Solver::Tiles => tiles::place,
                    _ => search::search,
                };
                // What is longer than it is has a search that may not end, and one that knows better behind it.
                let has_second = solver == Solver::Search && !one_pass.is_exact;
                let units = effort.search.left() / if has_second { 2 } else { 1 };
                let mut placed = searched(buffers, one_pass, effort, units, how);
                if has_second {
                    let end = |placed: &Vec<u64>| {
                        let ends = placed.iter().zip(buffers).map(|(offset, buffer)| offset + buffer.len.get());
                        ends.max().unwrap_or(0)
                    };
                    let top = placed.as_ref().map_or(effort.top, end);
                    // This ends when its work does: the parts behind it have theirs.
                    let share = effort.search.left() / (parts.len() - number) as u64;
                    let lower = effort.search.with(share, |work| reorder::search(buffers, one_pass, top, work));
                    placed = lower.map_or(placed, Ok);
                }
                // Parts are above each other, and what lives longer than it does may be in the way of more.
                if parts.len() > 1 || !one_pass.is_exact {
                    effort.low = 0;
                }
                placed?
            }
        };
        base = part.put(problem, base, &placed, &mut offsets).ok_or(Stopped::TooLarge)?;
    }
    let peak = Bytes::new(base);
    if peak > Bytes::MAX {
        return Err(Stopped::TooLarge);
    }
    Ok(Solution { offsets, peak, solver: solver.name(), work_units: effort.units(), lower_bound: Bytes::ZERO })
}

type Search = fn(&[Lifetime], &[u64], u64, &mut Work) -> search::Answer;

/// What a search finds below the top that is wanted.
fn searched(
    buffers: &[&Buffer],
    one_pass: &OnePass,
    effort: &mut Effort,
    units: u64,
    search: Search,
) -> Result<Vec<u64>, Stopped> {
    let lens: Vec<u64> = buffers.iter().map(|buffer| buffer.len.get()).collect();
    let top = effort.top;
    let answer = match units < effort.search.left() {
        true => effort.search.with(units, |work| search(&one_pass.lifetimes, &lens, top, work)),
        false => search(&one_pass.lifetimes, &lens, top, &mut effort.search),
    };
    effort.low = answer.low;
    answer.found.map(|found| found.offsets).ok_or(Stopped::NoUse)
}

#[cfg(test)]
mod tests;
