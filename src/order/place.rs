//! A place for everything that is live in an order, by the solvers of plans.
//!
//! OLLA splits its problem in two (section 4.4), order and then places, for its places have no gaps. So it is here, and the solvers are those of
//! [`crate::plan::solve`]; among them is first fit by decreasing lifetime, which is the pyramid of section 4.5.

use super::lives::Life;
use crate::ids::StreamId;
use crate::plan::solve;
use crate::plan::{Buffer, Lane, PhasePair, PlanError, Problem, validate};
use crate::trace::ContextKey;
use crate::units::Bytes;
use crate::work::Budget;

/// A place for each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placed {
    /// Where each begins, in the order in which they are given.
    pub offsets: Vec<u64>,
    /// Bytes that they span together.
    pub peak: u64,
    /// Who found it.
    pub solver: &'static str,
    /// Nothing less is possible in this order.
    pub is_optimal: bool,
}

/// Gives everything a place whose beginning is a multiple of `unit`.
///
/// # Errors
///
/// Sums pass any address space, or there is nothing to place.
pub fn place(lives: &[Life], unit: u64, budget: &Budget) -> Result<Placed, PlanError> {
    let buffer = |life: &Life| {
        let len = Bytes::new(life.bytes).round_up(Bytes::new(unit)).ok_or(PlanError::TooLarge)?;
        Ok(Buffer {
            bytes: Bytes::new(life.bytes),
            len,
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey::NONE,
            lifetime: life.lifetime,
            again: None,
            phases: PhasePair::default(),
        })
    };
    let buffers = lives.iter().map(buffer).collect::<Result<Vec<_>, PlanError>>()?;
    let problem = Problem { buffers, ..Problem::default() };
    let solution = solve::solve_with(&problem, budget)?;
    validate::check_offsets(&problem.buffers, &solution.offsets)
        .map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
    Ok(Placed {
        offsets: solution.offsets.iter().map(|offset| offset.get()).collect(),
        peak: solution.peak.get(),
        solver: solution.solver,
        is_optimal: solution.is_optimal(),
    })
}
