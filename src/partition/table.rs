//! The prediction for every stage that a plan can have: every group of layers, every config, every distance from the end. As ranks: the number of a prediction among all different ones.

use super::space::Space;
use super::{Config, Group, Mesh, PartitionError, Predictor, Profile};
use crate::limits;
use crate::units::Bytes;

/// Every stage and what it would need.
#[derive(Debug)]
pub struct Table {
    layers: usize,
    configs: Vec<Config>,
    depths: usize,
    /// By depth, group and config.
    ranks: Vec<u32>,
    /// Of each depth and group, the least.
    least: Vec<u32>,
    /// The different predictions, the smallest first.
    values: Vec<Bytes>,
}

impl Table {
    /// Predicts everything for a mesh.
    ///
    /// # Errors
    ///
    /// A prediction is impossible, or there are too many.
    pub fn new(profile: &Profile, mesh: Mesh) -> Result<Table, PartitionError> {
        let predictor = Predictor::new(profile);
        let layers = profile.layers();
        let configs = predictor.configs(mesh.degree_max());
        // Before all is predicted, which takes longer.
        Space::new(mesh, &configs)?;
        let depths = predictor.depths().min(layers as u64) as usize;
        let groups = layers * (layers + 1) / 2;
        let cells = depths.saturating_mul(groups).saturating_mul(configs.len());
        if cells > limits::PARTITION_PREDICTIONS_MAX {
            let (what, max) = ("predictions", limits::PARTITION_PREDICTIONS_MAX);
            return Err(PartitionError::TooLarge { what, is_mesh: false, count: cells, max });
        }
        let mut bytes = Vec::with_capacity(cells);
        for depth in 1..=depths as u64 {
            for first in 0..layers {
                for last in first..layers {
                    for config in &configs {
                        bytes.push(predictor.stage(Group { first, last }, *config, depth)?);
                    }
                }
            }
        }
        let mut values = bytes.clone();
        values.sort_unstable();
        values.dedup();
        let rank = |bytes: &Bytes| values.partition_point(|value| value < bytes) as u32;
        let ranks: Vec<u32> = bytes.iter().map(rank).collect();
        let least = ranks.chunks(configs.len()).map(|of| of.iter().min().copied().unwrap_or(0)).collect();
        Ok(Table { layers, configs, depths, ranks, least, values })
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// How a stage can be shared.
    pub fn configs(&self) -> &[Config] {
        &self.configs
    }

    /// What one GPU of a stage needs that is the so-manieth from the end, counted from 1.
    pub fn bytes(&self, group: Group, config: Config, from_end: usize) -> Option<Bytes> {
        let at = self.configs.iter().position(|one| *one == config)?;
        let depth = from_end.clamp(1, self.depths);
        Some(self.values[self.ranks(depth, group)[at] as usize])
    }

    /// How many stages from the end differ; all before those are alike.
    pub(super) fn depths(&self) -> usize {
        self.depths
    }

    /// The different predictions, the smallest first.
    pub(super) fn values(&self) -> &[Bytes] {
        &self.values
    }

    /// The ranks of a stage, for each config.
    pub(super) fn ranks(&self, depth: usize, group: Group) -> &[u32] {
        let at = self.at(depth, group) * self.configs.len();
        &self.ranks[at..at + self.configs.len()]
    }

    /// The lowest of them.
    pub(super) fn least(&self, depth: usize, group: Group) -> u32 {
        self.least[self.at(depth, group)]
    }

    fn at(&self, depth: usize, Group { first, last }: Group) -> usize {
        let groups = self.layers * (self.layers + 1) / 2;
        // Groups that begin before `first`: layers + (layers − 1) + …
        let before = first * (2 * self.layers + 1 - first) / 2;
        (depth - 1) * groups + before + last - first
    }
}
