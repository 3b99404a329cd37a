//! Solvers: each gives every buffer of a problem an offset. The best answer wins.
//!
//! Deterministic: the same problem gives the same plan, byte for byte.

mod best_fit;
mod first_fit;
mod one_pass;
mod phased;
mod search;
mod sections;

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Buffer, Lane, PlanError, Problem};
use crate::units::{Bytes, Lifetime, PlanOffset};

use one_pass::OnePass;
use search::Work;

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
    /// No other answer spans less: it meets the bound, or everything else was tried.
    pub is_optimal: bool,
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
    /// Such passes and an exact search in turn, for as long as there is work to do.
    Search,
}

impl Solver {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Solver; 13] = [
        Solver::FirstFit(Order::SizeThenStart),
        Solver::FirstFit(Order::LongThenSize),
        Solver::Dive,
        Solver::FirstFit(Order::Area),
        Solver::FirstFit(Order::SizeThenEnd),
        Solver::FirstFit(Order::Start),
        Solver::BestFit(Small::Nothing),
        Solver::BestFit(Small::Below256Kib),
        Solver::BestFit(Small::Below1Mib),
        Solver::BestFit(Small::Below2Mib),
        Solver::Phased(Transients::Alone),
        Solver::Phased(Transients::Grouped),
        Solver::Search,
    ];

    /// It does what work it may.
    fn searches(self) -> bool {
        matches!(self, Solver::Dive | Solver::Search)
    }

    /// Its name in plans and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Solver::FirstFit(order) => order.name(),
            Solver::BestFit(small) => small.name(),
            Solver::Phased(transients) => transients.name(),
            Solver::Dive => "dive",
            Solver::Search => "search",
        }
    }
}

/// Steps of first fit in all orders together: some two seconds. Training takes ten to thirty for each buffer in the first order, which meets the bound there; what is stopped
/// has tens of thousands of sizes and lifetimes with nothing in common, and there best fit is as good.
const FIRST_FIT_STEPS_MAX: u64 = 1 << 24;

/// What a search may do.
#[derive(Clone)]
pub struct Budget {
    /// Units of work, some seven million a second on one core; the same everywhere for the same problem.
    pub units: u64,
    /// Asked many times a second: whether to stop with what there is. What is found then depends on when.
    pub stop: Option<Rc<dyn Fn() -> bool>>,
}

impl Budget {
    /// Nothing is searched: a plan that is made while a job runs, or many of them.
    pub fn none() -> Budget {
        Budget { units: 0, stop: None }
    }

    /// In proportion to what is placed, and half a second at most.
    pub fn of(problem: &Problem) -> Budget {
        const EACH: u64 = 500;
        Budget { units: (EACH * problem.buffers.len() as u64).min(4_000_000), stop: None }
    }

    /// For one that somebody asks for: a second or two.
    pub fn patient() -> Budget {
        Budget { units: 8_000_000, stop: None }
    }
}

/// What a solver may do, and what it did.
struct Effort {
    /// Steps of first fit that are left.
    steps: u64,
    /// Offsets from here on are of no use: there is a plan that ends here.
    top: u64,
    /// Buffers that were placed.
    placed: u64,
    /// What a search may do, and what it did.
    search: Work,
    /// The last answer of a search is the best that there is.
    is_proven: bool,
}

impl Effort {
    fn of(steps: u64, top: u64, budget: &Budget) -> Effort {
        let search = Work::of(budget.units, budget.stop.clone());
        Effort { steps, top, placed: 0, search, is_proven: false }
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
/// promise, and what one thread has freed may be there still when another that races with it asks. In the plan of a job that repeats itself small buffers have a part of their own in that, where it costs next to nothing: whoever is not where and when the plan has it, because something
/// came or did not, stands in the way of others until it goes, and a kilobyte should not do so in the middle of the gigabyte that a workspace needs.
pub fn solve(problem: &Problem) -> Result<Solution, PlanError> {
    solve_with(problem, &Budget::none())
}

/// The same, and searches so much.
pub fn solve_with(problem: &Problem, budget: &Budget) -> Result<Solution, PlanError> {
    let changes = super::Changes::of(problem);
    let bound = changes.bound(|_| true);
    let most = bound.get() + bound.get() / APART_COSTS_MAX;
    for below in APART_BELOW.into_iter().filter(|_| problem.comes_again()) {
        let is_small = |buffer: &Buffer| buffer.len < below;
        let bounds = [true, false].map(|small| changes.bound(|len| (len < below) == small).get());
        if bounds.contains(&0) || bounds[0] + bounds[1] > most {
            continue;
        }
        // What is kept apart is a favour, and not worth a search.
        let apart = solve_within(
            problem,
            parts(problem, is_small),
            Bytes::new(bounds[0] + bounds[1]),
            Effort::of(FIRST_FIT_STEPS_MAX, u64::MAX, &Budget::none()),
        )?;
        if apart.peak.get() <= most {
            // It may meet the bounds of both, and another be below their sum.
            return Ok(Solution { is_optimal: apart.peak <= bound, ..apart });
        }
    }
    solve_within(problem, parts(problem, |_| false), bound, Effort::of(FIRST_FIT_STEPS_MAX, u64::MAX, budget))
}

/// Buffers below one of these sizes are placed apart from the rest: the largest of them that costs little enough.
const APART_BELOW: [Bytes; 5] = [Bytes::kib(2049), Bytes::kib(1025), Bytes::kib(1024), Bytes::kib(257), Bytes::kib(33)];
/// What that may cost: one part in so many of the bound.
const APART_COSTS_MAX: u64 = 1_000_000;

fn solve_within(
    problem: &Problem,
    parts: Vec<Part<'_>>,
    bound: Bytes,
    mut effort: Effort,
) -> Result<Solution, PlanError> {
    let mut best: Option<Solution> = None;
    let is_wanted = |solver: &Solver| !solver.searches() || !effort.search.is_done();
    for solver in Solver::ALL.into_iter().filter(is_wanted).collect::<Vec<_>>() {
        effort.top = best.as_ref().map_or(u64::MAX, |best| best.peak.get());
        match place(problem, &parts, solver, &mut effort) {
            Ok(solution) if best.as_ref().is_none_or(|best| solution.peak < best.peak) => best = Some(solution),
            Err(Stopped::TooLarge) if best.is_none() => return Err(PlanError::TooLarge),
            Ok(_) | Err(_) => {}
        }
        if best.as_ref().is_some_and(|best| best.peak <= bound) {
            break;
        }
    }
    let optimal = |best: &Solution| best.peak <= bound || best.is_optimal;
    best.map(|best| Solution { work_units: effort.units(), is_optimal: optimal(&best), ..best })
        .ok_or(PlanError::NothingStatic)
}

/// The answer of one solver, however long it takes, but for a search.
pub fn solve_in(problem: &Problem, solver: Solver) -> Result<Solution, PlanError> {
    solve_in_with(problem, solver, &Budget::of(problem))
}

/// The same with so much of a search.
pub fn solve_in_with(problem: &Problem, solver: Solver, budget: &Budget) -> Result<Solution, PlanError> {
    let mut effort = Effort::of(u64::MAX, u64::MAX, budget);
    let found = place(problem, &parts(problem, |_| false), solver, &mut effort);
    let found = found.map_err(|_| PlanError::TooLarge)?;
    let is_optimal = found.is_optimal || found.peak <= super::lower_bound(problem);
    Ok(Solution { is_optimal, ..found })
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
    let mut effort = Effort::of(FIRST_FIT_STEPS_MAX, Bytes::MAX.get(), &Budget::none());
    let mut best = None;
    for order in [Order::SizeThenStart, Order::SizeThenEnd, Order::Area, Order::LongThenSize, Order::Start] {
        let Ok(offsets) = first_fit::place_around(taken, buffers, order, &mut effort) else { continue };
        effort.top = offsets.iter().zip(buffers).map(|(offset, buffer)| offset + buffer.len.get()).max().unwrap_or(0);
        best = Some(offsets);
    }
    best.map(|offsets| (offsets.into_iter().map(PlanOffset::new).collect(), effort.placed))
}

/// The buffers of one lane, or the small ones of them, or the others.
struct Part<'a> {
    /// Where they are in the problem.
    members: Vec<usize>,
    buffers: Vec<&'a Buffer>,
    one_pass: OnePass,
}

fn parts(problem: &Problem, is_small: impl Fn(&Buffer) -> bool) -> Vec<Part<'_>> {
    let mut by_lane: BTreeMap<(Lane, bool), Vec<usize>> = BTreeMap::new();
    for (at, buffer) in problem.buffers.iter().enumerate() {
        by_lane.entry((buffer.lane, is_small(buffer))).or_default().push(at);
    }
    let part = |members: Vec<usize>| {
        let buffers: Vec<&Buffer> = members.iter().map(|at| &problem.buffers[*at]).collect();
        Part { one_pass: OnePass::of(&buffers), members, buffers }
    };
    by_lane.into_values().map(part).collect()
}

fn place(problem: &Problem, parts: &[Part], solver: Solver, effort: &mut Effort) -> Result<Solution, Stopped> {
    let mut offsets = vec![PlanOffset::new(0); problem.buffers.len()];
    let mut base = 0_u64;
    let top = effort.top;
    for Part { members, buffers, one_pass } in parts {
        effort.top = top.saturating_sub(base);
        let placed = match solver {
            Solver::FirstFit(order) => first_fit::place(buffers, one_pass, order, effort)?,
            Solver::BestFit(small) => {
                let lens = buffers.iter().map(|buffer| buffer.len.get());
                effort.placed += buffers.len() as u64;
                best_fit::place(&one_pass.lifetimes.iter().copied().zip(lens).collect::<Vec<_>>(), small)?
            }
            Solver::Phased(transients) => phased::place(buffers, one_pass, transients, effort)?,
            Solver::Dive => searched(buffers, one_pass, effort, search::dive)?,
            Solver::Search => searched(buffers, one_pass, effort, search::search)?,
        };
        let mut end = base;
        for (at, offset) in members.iter().zip(placed) {
            let offset = base.checked_add(offset).ok_or(Stopped::TooLarge)?;
            end = end.max(offset.checked_add(problem.buffers[*at].len.get()).ok_or(Stopped::TooLarge)?);
            offsets[*at] = PlanOffset::new(offset);
        }
        base = end;
    }
    let peak = Bytes::new(base);
    if peak > Bytes::MAX {
        return Err(Stopped::TooLarge);
    }
    // Parts are above each other: of several none is known to be the best.
    let is_optimal = solver == Solver::Search && effort.is_proven && parts.len() == 1 && parts[0].one_pass.is_exact;
    Ok(Solution { offsets, peak, solver: solver.name(), work_units: effort.units(), is_optimal })
}

type Search = fn(&[Lifetime], &[u64], u64, &mut Work) -> Option<search::Found>;

/// What a search finds below the top that is wanted.
fn searched(buffers: &[&Buffer], one_pass: &OnePass, effort: &mut Effort, search: Search) -> Result<Vec<u64>, Stopped> {
    let lens: Vec<u64> = buffers.iter().map(|buffer| buffer.len.get()).collect();
    let found = search(&one_pass.lifetimes, &lens, effort.top, &mut effort.search).ok_or(Stopped::NoUse)?;
    effort.is_proven = found.is_best;
    Ok(found.offsets)
}

#[cfg(test)]
mod tests;
