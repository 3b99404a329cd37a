//! Solvers: each gives every buffer of a problem an offset. The best answer wins.
//!
//! Deterministic: the same problem gives the same plan, byte for byte.

mod best_fit;
mod first_fit;
mod one_pass;
mod phased;
mod sections;

use std::collections::BTreeMap;

use super::{Buffer, Lane, PlanError, Problem};
use crate::units::{Bytes, Lifetime, PlanOffset};

use one_pass::OnePass;

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
    /// Buffers placed on the way, over all tries.
    pub work_units: u64,
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
}

impl Solver {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Solver; 11] = [
        Solver::FirstFit(Order::SizeThenStart),
        Solver::FirstFit(Order::LongThenSize),
        Solver::FirstFit(Order::Area),
        Solver::FirstFit(Order::SizeThenEnd),
        Solver::FirstFit(Order::Start),
        Solver::BestFit(Small::Nothing),
        Solver::BestFit(Small::Below256Kib),
        Solver::BestFit(Small::Below1Mib),
        Solver::BestFit(Small::Below2Mib),
        Solver::Phased(Transients::Alone),
        Solver::Phased(Transients::Grouped),
    ];

    /// Its name in plans and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Solver::FirstFit(order) => order.name(),
            Solver::BestFit(small) => small.name(),
            Solver::Phased(transients) => transients.name(),
        }
    }
}

/// Steps of first fit in all orders together: some two seconds. Training takes ten to thirty for each buffer in the first order, which meets the bound there; what is stopped
/// has tens of thousands of sizes and lifetimes with nothing in common, and there best fit is as good.
const FIRST_FIT_STEPS_MAX: u64 = 1 << 24;

/// What a solver may do, and what it did.
struct Effort {
    /// Steps of first fit that are left.
    steps: u64,
    /// Offsets from here on are of no use: there is a plan that ends here.
    top: u64,
    /// Buffers that were placed.
    placed: u64,
}

/// Why a solver has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stopped {
    /// Offsets pass any address space.
    TooLarge,
    /// It used up its steps, or cannot be the best any more.
    NoUse,
}

/// Tries the solvers one after the other until one meets the lower bound, and takes the best.
///
/// Each lane has its own part of the pool: bytes that one stream has freed are not another's without an event, which a plan cannot
/// promise, and what one thread has freed may be there still when another that races with it asks. In the plan of a job that repeats itself small buffers have a part of their own in that, where it costs next to nothing: whoever is not where and when the plan has it, because something
/// came or did not, stands in the way of others until it goes, and a kilobyte should not do so in the middle of the gigabyte that a workspace needs.
pub fn solve(problem: &Problem) -> Result<Solution, PlanError> {
    let changes = super::Changes::of(problem);
    let bound = changes.bound(|_| true);
    let most = bound.get() + bound.get() / APART_COSTS_MAX;
    for below in APART_BELOW.into_iter().filter(|_| problem.comes_again()) {
        let is_small = |buffer: &Buffer| buffer.len < below;
        let bounds = [true, false].map(|small| changes.bound(|len| (len < below) == small).get());
        if bounds.contains(&0) || bounds[0] + bounds[1] > most {
            continue;
        }
        let apart =
            solve_within(problem, parts(problem, is_small), Bytes::new(bounds[0] + bounds[1]), FIRST_FIT_STEPS_MAX)?;
        if apart.peak.get() <= most {
            return Ok(apart);
        }
    }
    solve_within(problem, parts(problem, |_| false), bound, FIRST_FIT_STEPS_MAX)
}

/// Buffers below one of these sizes are placed apart from the rest: the largest of them that costs little enough.
const APART_BELOW: [Bytes; 5] = [Bytes::kib(2049), Bytes::kib(1025), Bytes::kib(1024), Bytes::kib(257), Bytes::kib(33)];
/// What that may cost: one part in so many of the bound.
const APART_COSTS_MAX: u64 = 1_000_000;

fn solve_within(problem: &Problem, parts: Vec<Part<'_>>, bound: Bytes, steps: u64) -> Result<Solution, PlanError> {
    let mut effort = Effort { steps, top: u64::MAX, placed: 0 };
    let mut best: Option<Solution> = None;
    for solver in Solver::ALL {
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
    best.map(|best| Solution { work_units: effort.placed, ..best }).ok_or(PlanError::NothingStatic)
}

/// The answer of one solver, however long it takes.
pub fn solve_in(problem: &Problem, solver: Solver) -> Result<Solution, PlanError> {
    let mut effort = Effort { steps: u64::MAX, top: u64::MAX, placed: 0 };
    place(problem, &parts(problem, |_| false), solver, &mut effort).map_err(|_| PlanError::TooLarge)
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
    let mut effort = Effort { steps: FIRST_FIT_STEPS_MAX, top: Bytes::MAX.get(), placed: 0 };
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
    Ok(Solution { offsets, peak, solver: solver.name(), work_units: effort.placed })
}

#[cfg(test)]
mod tests;
