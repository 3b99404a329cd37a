//! HomoPhase groups and their local plans.
//!
//! A group is what is asked for in the same computation phase and freed in the same: lives that are much alike. Its local plan is one block, each request at an offset of its own.
//!
//! Not for: how groups share bytes (`fusion`), or where the block goes (`homo_size`).
//!
//! Invariant of a [`LocalPlan`]: no two of its requests that are live together share a byte; `placed` is in the order of offsets.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Request, Transients};
use crate::plan::PhasePair;
use crate::units::Lifetime;

/// Offsets of some requests within a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LocalPlan {
    /// Which requests, and the offset of each.
    pub(super) placed: Vec<(usize, u64)>,
    /// Bytes of the block.
    pub(super) len: u64,
    /// From its first request's start to its last one's end.
    pub(super) lifetime: Lifetime,
    /// Where it begins and ends.
    pub(super) phases: PhasePair,
    /// Bytes × ticks that its requests use.
    pub(super) used: u128,
}

impl LocalPlan {
    /// One after the other, those that end last at the bottom. `None` past any address space.
    pub(super) fn contiguous(requests: &[Request], phases: PhasePair, mut members: Vec<usize>) -> Option<LocalPlan> {
        let lifetime = |at: usize| requests[at].lifetime;
        members.sort_by_key(|at| (Reverse(lifetime(*at).end), lifetime(*at).start, *at));
        let mut len = 0_u64;
        let mut placed = Vec::with_capacity(members.len());
        for at in &members {
            placed.push((*at, len));
            len = len.checked_add(requests[*at].len).filter(|len| *len <= i64::MAX as u64)?;
        }
        let start = members.iter().map(|at| lifetime(*at).start).min()?;
        let end = members.iter().map(|at| lifetime(*at).end).max()?;
        let used = members.iter().map(|at| area(requests[*at].len, lifetime(*at))).sum();
        Some(LocalPlan { placed, len, lifetime: Lifetime { start, end }, phases, used })
    }

    /// Bytes × ticks that the block takes: the time-memory product of the paper is `used / reserved`.
    pub(super) fn reserved(&self) -> u128 {
        area(self.len, self.lifetime)
    }
}

/// Bytes × ticks. Neither is above 2^63, so sums of two fit.
pub(super) fn area(len: u64, lifetime: Lifetime) -> u128 {
    u128::from(len) * u128::from(lifetime.ticks())
}

/// The groups, in the order of their phases, and the requests that are in none. `None` past any address space.
pub(super) fn groups(requests: &[Request], transients: Transients) -> Option<(Vec<LocalPlan>, Vec<usize>)> {
    let mut groups: BTreeMap<PhasePair, Vec<usize>> = BTreeMap::new();
    let mut alone = Vec::new();
    for (at, request) in requests.iter().enumerate() {
        if transients == Transients::Alone && request.phases.asked == request.phases.freed {
            alone.push(at);
        } else {
            groups.entry(request.phases).or_default().push(at);
        }
    }
    let plan = |(phases, members)| LocalPlan::contiguous(requests, phases, members);
    Some((groups.into_iter().map(plan).collect::<Option<_>>()?, alone))
}
