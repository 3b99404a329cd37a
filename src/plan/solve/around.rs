//! Offsets around what has offsets already and stays there: a plan for a job that runs.
//!
//! First fit, in all of its orders and in the order of the offsets that the same buffers have where
//! nothing is in the way. The best of these is improved: passes aim at a lower top, and what does not
//! fit below that is placed first in the next pass.

use std::collections::BTreeMap;

use super::first_fit::{Ground, Order};
use super::one_pass::OnePass;
use super::{Effort, FIRST_FIT_STEPS_MAX, Part, Solution, parts};
use crate::plan::{Lane, PlanError, Problem, Stays};
use crate::units::{Bytes, PlanOffset, PlanSpan};
use crate::work::Budget;

/// Passes aim at this part of what lies between the bound and the lowest top: at less where that fails.
const SHARES: [u64; 2] = [8, 32];
/// Passes that fail one after the other before less is aimed at.
const FAILED_MAX: u32 = 16;
/// A top that is this part of the bound above it is low enough.
const NEAR: u64 = 4096;

/// Places the buffers of a problem around what stays. `compact` has their offsets where nothing does. Each
/// lane lies behind the one before it.
pub(in crate::plan) fn solve(
    problem: &Problem,
    compact: &[PlanOffset],
    stays: &Stays,
    budget: &Budget,
) -> Result<Solution, PlanError> {
    let mut work_units = 0;
    let mut offsets = vec![PlanOffset::new(0); problem.buffers.len()];
    let mut base = 0;
    let parts = if stays.fixed.is_empty() { parts(problem, |_| false) } else { lanes(problem) };
    for part in parts {
        let offset = |at: &usize| stays.fixed.get(at).and_then(|offset| offset.get().checked_sub(base));
        let fixed: Vec<Option<u64>> = part.members.iter().map(offset).collect();
        let mut effort = Effort::of(FIRST_FIT_STEPS_MAX, u64::MAX, budget);
        let placed = place(&part, compact, &above(&stays.taken, base), &fixed, &mut effort);
        work_units += effort.units();
        let placed = placed.unwrap_or_else(|| behind(&part, compact, &stays.taken, base));
        base = part.put(problem, base, &placed, &mut offsets).ok_or(PlanError::TooLarge)?;
    }
    let peak = Bytes::new(base);
    if peak > Bytes::MAX {
        return Err(PlanError::TooLarge);
    }
    let lower_bound = crate::plan::lower_bound(problem);
    Ok(Solution { offsets, peak, solver: "around", work_units, lower_bound })
}

/// The buffers lane by lane, each of them placed by itself.
fn lanes(problem: &Problem) -> Vec<Part<'_>> {
    let mut by_lane: BTreeMap<Lane, Vec<usize>> = BTreeMap::new();
    for (at, buffer) in problem.buffers.iter().enumerate() {
        by_lane.entry(buffer.lane).or_default().push(at);
    }
    let part = |members: Vec<usize>| {
        let buffers: Vec<_> = members.iter().map(|at| &problem.buffers[*at]).collect();
        Part { one_pass: OnePass::of(&buffers), members, buffers, alike: Vec::new() }
    };
    by_lane.into_values().map(part).collect()
}

/// The offsets that a part has where nothing is taken, behind all that is: for one that takes too many steps.
fn behind(part: &Part<'_>, compact: &[PlanOffset], taken: &[PlanSpan], base: u64) -> Vec<u64> {
    let own: Vec<u64> = part.members.iter().map(|at| compact[*at].get()).collect();
    let first = own.iter().copied().min().unwrap_or(0);
    let end = taken.last().map_or(0, |last| last.end().get()).saturating_sub(base);
    own.into_iter().map(|offset| end + (offset - first)).collect()
}

/// What is taken from `base` up, counted from there.
fn above(taken: &[PlanSpan], base: u64) -> Vec<(u64, u64)> {
    let from_base = |offset: PlanOffset| offset.get().saturating_sub(base);
    let above = taken.iter().map(|span| (from_base(span.start()), from_base(span.end())));
    above.filter(|(from, to)| from < to).collect()
}

fn place(
    part: &Part<'_>,
    compact: &[PlanOffset],
    taken: &[(u64, u64)],
    fixed: &[Option<u64>],
    effort: &mut Effort,
) -> Option<Vec<u64>> {
    let ground = Ground::of(&part.buffers, &part.one_pass);
    let end = |at: usize, placed: &[u64]| placed[at] + part.buffers[at].len.get();
    let top = |placed: &[u64]| (0..placed.len()).map(|at| end(at, placed)).max().unwrap_or(0);
    let mut as_compact: Vec<usize> = (0..part.buffers.len()).collect();
    as_compact.sort_by_key(|at| compact[part.members[*at]]);
    let orders = Order::ALL.iter().map(|order| order.sorted(&part.buffers));
    let mut best: Option<(u64, Vec<usize>, Vec<u64>)> = None;
    for order in [as_compact].into_iter().chain(orders) {
        effort.top = best.as_ref().map_or(u64::MAX, |(top, ..)| *top);
        if let Ok(placed) = ground.place_around(taken, fixed, &order, effort) {
            best = Some((top(&placed), order, placed));
        } else if effort.steps == 0 {
            break;
        }
    }
    let (_, order, placed) = best?;
    if effort.steps == 0 {
        return Some(placed);
    }
    let lowest = top(&placed);
    let below = taken.iter().filter(|(from, _)| *from < lowest).map(|(from, to)| to.min(&lowest) - from);
    let fixed_end =
        |(at, offset): (usize, &Option<u64>)| offset.map_or(0, |offset| offset + part.buffers[at].len.get());
    let bound = (ground.bound() + below.sum::<u64>()).max(fixed.iter().enumerate().map(fixed_end).max().unwrap_or(0));
    effort.steps = FIRST_FIT_STEPS_MAX;
    Some(squeeze(&ground, (taken, fixed), (order, placed), (bound, &top), effort))
}

/// Lowers the top of a placement: passes aim below it, and the buffer that does not fit is placed first
/// in the next pass. What fails again and again is aimed at less.
fn squeeze(
    ground: &Ground<'_>,
    (taken, fixed): (&[(u64, u64)], &[Option<u64>]),
    (order, mut placed): (Vec<usize>, Vec<u64>),
    (bound, top): (u64, &impl Fn(&[u64]) -> u64),
    effort: &mut Effort,
) -> Vec<u64> {
    let mut lowest = top(&placed);
    let mut best = order;
    for share in SHARES {
        let (mut order, mut failed) = (best.clone(), 0);
        while failed < FAILED_MAX && lowest > bound + bound / NEAR {
            effort.top = lowest - (lowest - bound) / share;
            if let Ok(again) = ground.place_around(taken, fixed, &order, effort) {
                if top(&again) >= lowest {
                    return placed;
                }
                (lowest, placed, failed) = (top(&again), again, 0);
                best.clone_from(&order);
                continue;
            }
            if effort.steps == 0 || effort.is_stopped() {
                return placed;
            }
            failed += 1;
            order.retain(|at| *at != effort.last);
            order.insert(0, effort.last);
        }
    }
    placed
}
