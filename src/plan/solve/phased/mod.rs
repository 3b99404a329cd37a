//! STAlloc's static planner (section 5.1 of its paper): plans by phase, and plans of those by size.
//!
//! ```text
//!   requests → HomoPhase groups: same phases, each packed contiguously      homo_phase
//!            → two groups that meet in a phase are fused where that helps   fusion
//!            → each is one large request; by size, large ones first:        homo_size
//!                into what is free in time and space beside larger ones     free_space
//!                the others into layers, by Algorithm 1                     layers
//! ```
//!
//! Where the paper leaves a choice: a group is packed with those that end last at the bottom, the order in which the paper sorts a group that another is inserted into; groups are
//! tried in the order of their phases, and a fused one goes on looking for the next; the weights of the average in the test of a fusion are reserved bytes × ticks.
//! Lifetimes are half-open here, so who ends at a tick makes room for who begins at it: Algorithm 1's `<` is a `<=`.
//!
//! To the letter, what comes and goes within one phase is a group as well and is packed contiguously, as if it were live together. It never is, and such a block is many times of what is live in it. The
//! authors' published program groups only what passes from one phase to another and places the rest request by request. Both are here ([`Transients`]).
//!
//! Not for: streams, and the cycle's second pass; each part of a problem comes as one pass of one stream.
//!
//! Invariant: n log n. Fusing is what could take more, and it has a number of steps.

mod free_space;
mod fusion;
mod homo_phase;
mod homo_size;
mod layers;

use super::one_pass::OnePass;
use super::{Buffer, Effort, Stopped};
use crate::plan::PhasePair;
use crate::units::Lifetime;

/// What becomes of requests that come and go within one computation phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transients {
    /// Each is placed by itself among the groups.
    Alone,
    /// They are HomoPhase groups like others.
    Grouped,
}

impl Transients {
    /// Its name in plans and on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Transients::Alone => "phased",
            Transients::Grouped => "phased/all-grouped",
        }
    }
}

/// Steps of fusing for each request. Training takes some tens; what takes more keeps the groups that it has.
const FUSION_STEPS_PER_REQUEST: u64 = 256;

/// A buffer in one pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    len: u64,
    lifetime: Lifetime,
    phases: PhasePair,
}

/// Offsets for `buffers`, in their order.
pub(super) fn place(
    buffers: &[&Buffer],
    one_pass: &OnePass,
    transients: Transients,
    effort: &mut Effort,
) -> Result<Vec<u64>, Stopped> {
    let request = |(buffer, lifetime): (&&Buffer, &Lifetime)| Request {
        len: buffer.len.get(),
        lifetime: *lifetime,
        phases: buffer.phases,
    };
    let requests: Vec<Request> = buffers.iter().zip(&one_pass.lifetimes).map(request).collect();
    effort.placed += requests.len() as u64;
    offsets(&requests, transients, effort.top)
}

/// Offsets for `requests`, in their order. [`Stopped::NoUse`] when they come to `top`.
fn offsets(requests: &[Request], transients: Transients, top: u64) -> Result<Vec<u64>, Stopped> {
    let (groups, alone) = homo_phase::groups(requests, transients).ok_or(Stopped::TooLarge)?;
    let mut steps = FUSION_STEPS_PER_REQUEST.saturating_mul(requests.len() as u64);
    let plans = fusion::fuse_adjacent(requests, groups, &mut steps);
    let of_plans = plans.iter().map(|plan| (plan.len, plan.lifetime));
    let of_others = alone.iter().map(|at| (requests[*at].len, requests[*at].lifetime));
    let bases = homo_size::stack(&of_plans.chain(of_others).collect::<Vec<_>>(), top)?;
    let mut offsets = vec![0; requests.len()];
    for (plan, base) in plans.iter().zip(&bases) {
        plan.placed.iter().for_each(|(at, offset)| offsets[*at] = base + offset);
    }
    for (at, base) in alone.iter().zip(&bases[plans.len()..]) {
        offsets[*at] = *base;
    }
    Ok(offsets)
}

#[cfg(test)]
mod tests;
