//! Solvers: each gives every buffer of a problem an offset. The best answer wins.
//!
//! Deterministic: the same problem gives the same plan, byte for byte.

mod first_fit;

use std::collections::BTreeMap;

use super::{Buffer, PlanError, Problem};
use crate::ids::StreamId;
use crate::units::{Bytes, PlanOffset};

pub use first_fit::Order;

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

/// Tries the greedy orders one after the other until one meets the lower bound, and takes the best.
///
/// Each stream has its own part of the pool: bytes that one stream has freed are not another's without an event, which a plan cannot
/// promise.
pub fn solve(problem: &Problem) -> Result<Solution, PlanError> {
    let bound = super::lower_bound(problem);
    let mut best: Option<Solution> = None;
    let mut work_units = 0;
    for order in Order::ALL {
        let solution = solve_in(problem, order)?;
        work_units += solution.work_units;
        let is_better = best.as_ref().is_none_or(|best| solution.peak < best.peak);
        if is_better {
            best = Some(solution);
        }
        if best.as_ref().is_some_and(|best| best.peak <= bound) {
            break;
        }
    }
    best.map(|best| Solution { work_units, ..best }).ok_or(PlanError::NothingStatic)
}

/// First fit in one order.
pub fn solve_in(problem: &Problem, order: Order) -> Result<Solution, PlanError> {
    let mut by_stream: BTreeMap<StreamId, Vec<usize>> = BTreeMap::new();
    for (at, buffer) in problem.buffers.iter().enumerate() {
        by_stream.entry(buffer.stream).or_default().push(at);
    }
    let mut offsets = vec![PlanOffset::new(0); problem.buffers.len()];
    let mut base = 0_u64;
    for members in by_stream.into_values() {
        let buffers: Vec<&Buffer> = members.iter().map(|at| &problem.buffers[*at]).collect();
        let placed = first_fit::place(&buffers, order).ok_or(PlanError::TooLarge)?;
        let mut top = base;
        for (at, offset) in members.iter().zip(placed) {
            let offset = base.checked_add(offset).ok_or(PlanError::TooLarge)?;
            let end = offset.checked_add(problem.buffers[*at].len.get()).ok_or(PlanError::TooLarge)?;
            top = top.max(end);
            offsets[*at] = PlanOffset::new(offset);
        }
        base = top;
    }
    let peak = Bytes::new(base);
    if peak > Bytes::MAX {
        return Err(PlanError::TooLarge);
    }
    let work_units = problem.buffers.len() as u64;
    Ok(Solution { offsets, peak, solver: order.name(), work_units })
}
