//! CAPTURE's own recommender (Algorithm 4): every plan, one after the other, and its pruner. What [`recommend`](super::recommend()) is held against, and what it spares.
//!
//! It is as the paper has it: for GPipe, where a stage needs the same wherever it is. The paper does not say how it sees what fits on a mesh; here that is counted as it is for the other.

use super::space::Space;
use super::{Group, Mesh, PartitionError, Table};
use crate::units::Bytes;

/// What walking through all plans came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Enumerated {
    /// Plans that were complete.
    pub plans: u64,
    /// Stages that were placed.
    pub placed: u64,
    /// The different predictions of the best plan, the largest first.
    pub amounts: Vec<Bytes>,
    /// It was stopped before its end.
    pub is_stopped: bool,
}

struct Walk<'a> {
    table: &'a Table,
    space: Space,
    mesh: Mesh,
    degree_max: usize,
    prunes: bool,
    placed_max: u64,
    /// Ranks of the plan that is being made.
    plan: Vec<u32>,
    best: Vec<u32>,
    found: Enumerated,
}

/// Walks through all plans, or until so many stages were placed. With the pruner, a stage that needs more than the best plan so far is left out.
///
/// # Errors
///
/// The mesh is too large.
pub fn enumerate(table: &Table, mesh: Mesh, prunes: bool, placed_max: u64) -> Result<Enumerated, PartitionError> {
    let space = Space::new(mesh, table.configs())?;
    let degree_max = table.configs().iter().map(|config| config.degree as usize).max().unwrap_or(1);
    let found = Enumerated::default();
    let mut walk =
        Walk { table, space, mesh, degree_max, prunes, placed_max, plan: Vec::new(), best: Vec::new(), found };
    walk.place(0, 0, 0);
    walk.found.amounts = walk.best.iter().map(|rank| table.values()[*rank as usize]).collect();
    Ok(walk.found)
}

impl Walk<'_> {
    /// `place_layer_group`, for every group that begins with layer `first`.
    fn place(&mut self, first: usize, used: usize, gpus: usize) {
        let layers = self.table.layers();
        // Not enough groups left for the GPUs that are left, or complete.
        if gpus + (layers - first) * self.degree_max < self.mesh.gpus() {
            return;
        }
        if first == layers {
            if gpus == self.mesh.gpus() {
                self.complete();
            }
            return;
        }
        for last in first..layers {
            for config in 0..self.table.configs().len() {
                let rank = self.table.ranks(1, Group { first, last })[config];
                if self.prunes && self.best.first().is_some_and(|peak| rank > *peak) {
                    continue;
                }
                let degree = self.table.configs()[config].degree;
                let next = used + self.space.step(degree);
                if !self.space.is_possible(next) {
                    continue;
                }
                if self.found.placed == self.placed_max {
                    self.found.is_stopped = true;
                    return;
                }
                self.found.placed += 1;
                self.plan.push(rank);
                self.place(last + 1, next, gpus + degree as usize);
                self.plan.pop();
            }
        }
    }

    fn complete(&mut self) {
        self.found.plans += 1;
        // Most are worse, which one look tells.
        let peak = self.plan.iter().max();
        if peak > self.best.first() && !self.best.is_empty() {
            return;
        }
        let mut amounts = self.plan.clone();
        amounts.sort_unstable_by_key(|rank| std::cmp::Reverse(*rank));
        amounts.dedup();
        if self.best.is_empty() || amounts < self.best {
            self.best = amounts;
        }
    }
}
