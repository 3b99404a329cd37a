//! Where to cut a model for pipelined training, and how to share each piece among GPUs, so that the fullest GPU holds as little as possible: CAPTURE (Dreuning, Bal and
//! van Nieuwpoort), on profiles of memory.
//!
//! `runs → profile → predictor → table → plan`: [`runs`] says which short training runs to make, [`merge`] turns what they measured into a [`Profile`], [`Predictor`] says what any stage
//! would need, and [`recommend()`] finds the plan. Where the paper's recommender walks through all plans ([`enumerate`]), ours decides by dynamic programming whether a plan with
//! given memory exists, and so is exact at a thousand GPUs.
//!
//! Not for: speed. Nothing here knows how long a stage takes or what travels between GPUs.
//!
//! Invariant of every [`Plan`]: its stages cover the layers in order, each GPU is of exactly one stage, and no stage spans nodes.

pub mod enumerate;
mod error;
pub mod merge;
mod place;
mod predict;
mod profile;
mod recommend;
pub mod runs;
mod search;
mod space;
mod table;
#[cfg(test)]
mod tests;

pub use error::{Metric, PartitionError};
pub use predict::{Config, Group, Predictor};
pub use profile::{Fit, Measurement, Parallelism, Partial, Profile, Schedule};
pub use recommend::{Plan, Stage, Uniform, recommend, uniform};
pub use table::Table;

use crate::limits;

/// The machines of the target run: nodes that are all alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mesh {
    nodes: usize,
    gpus_per_node: usize,
}

impl Mesh {
    /// So many nodes with so many GPUs each.
    ///
    /// # Errors
    ///
    /// There are none, or more than [`limits::PARTITION_GPUS_MAX`].
    pub fn new(nodes: usize, gpus_per_node: usize) -> Result<Mesh, PartitionError> {
        let gpus = nodes.saturating_mul(gpus_per_node);
        if gpus == 0 || gpus > limits::PARTITION_GPUS_MAX {
            return Err(PartitionError::Mesh { nodes, gpus_per_node });
        }
        Ok(Mesh { nodes, gpus_per_node })
    }

    /// How many nodes.
    pub fn nodes(self) -> usize {
        self.nodes
    }

    /// How many GPUs each has.
    pub fn gpus_per_node(self) -> usize {
        self.gpus_per_node
    }

    /// How many GPUs all have.
    pub fn gpus(self) -> usize {
        self.nodes * self.gpus_per_node
    }

    /// The most GPUs that a stage can have: a power of two, within a node.
    pub fn degree_max(self) -> u32 {
        1 << self.gpus_per_node.ilog2()
    }
}
