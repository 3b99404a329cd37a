//! The prediction for every stage that a plan can have: every group of layers, every config, every distance from the end. As ranks: the number of a prediction among all different ones.

use super::space::Space;
use super::{Config, Group, Mesh, PartitionError, Predictor, Profile};
use crate::limits;
use crate::units::Bytes;

/// The rank of what no plan has.
const NEVER: u32 = u32::MAX;

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
        let ranks = vec![NEVER; cells];
        let mut table = Table { layers, configs: Vec::new(), depths, ranks, least: Vec::new(), values: Vec::new() };
        // With where it goes: to find each among the sorted ones afterwards takes four times as long.
        let possible = |depth: usize| (layers + 1 - depth) * (layers + 2 - depth) / 2;
        let mut bytes: Vec<(Bytes, u32)> =
            Vec::with_capacity((1..=depths).map(possible).sum::<usize>() * configs.len());
        for depth in 1..=depths {
            for first in 0..layers {
                // Each stage behind has a layer.
                for last in first..(layers + 1).saturating_sub(depth) {
                    let group = Group { first, last };
                    let cell = table.at(depth, group) * configs.len();
                    for (config, at) in configs.iter().zip(cell..) {
                        bytes.push((predictor.stage(group, *config, depth as u64)?, at as u32));
                    }
                }
            }
        }
        bytes.sort_unstable_by_key(|(bytes, _)| *bytes);
        for same in bytes.chunk_by(|one, next| one.0 == next.0) {
            same.iter().for_each(|(_, at)| table.ranks[*at as usize] = table.values.len() as u32);
            table.values.push(same[0].0);
        }
        let least = |of: &[u32]| of.iter().min().copied().unwrap_or(NEVER);
        table.least = table.ranks.chunks(configs.len()).map(least).collect();
        table.configs = configs;
        Ok(table)
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// How a stage can be shared.
    pub fn configs(&self) -> &[Config] {
        &self.configs
    }

    /// What one GPU of a stage needs that is the so-manieth from the end, counted from 1; nothing where too few layers are behind it for that.
    pub fn bytes(&self, group: Group, config: Config, from_end: usize) -> Option<Bytes> {
        let at = self.configs.iter().position(|one| *one == config)?;
        let depth = from_end.clamp(1, self.depths);
        self.values.get(self.ranks(depth, group)[at] as usize).copied()
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
