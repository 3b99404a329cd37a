//! The plan with the least memory on its fullest GPU, of all plans that there are.

use super::place::place;
use super::profile::Profile;
use super::search::Search;
use super::space::Space;
use super::{Config, Group, Mesh, PartitionError, Table};
use crate::limits;
use crate::units::Bytes;

/// A stage of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stage {
    /// Its layers, as the profile counts them.
    pub group: Group,
    /// How it is shared.
    pub config: Config,
    /// Its GPUs, counted node by node.
    pub gpus: Vec<usize>,
    /// What each of them needs at its peak.
    pub predicted: Bytes,
}

/// Where to cut, how to share, and who does what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// In the order of the layers.
    pub stages: Vec<Stage>,
    /// What the fullest GPU needs.
    pub peak: Bytes,
    /// How many plans there are for these layers on these GPUs, of which none has a lower peak. The largest number stands for more than it.
    pub considered: u64,
}

/// The best that all stages alike can do: as many layers in each, shared in the same way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uniform {
    /// The stages, with their layers and what they need.
    pub stages: Vec<(Group, Bytes)>,
    /// How each is shared.
    pub config: Config,
    /// What the fullest GPU needs.
    pub peak: Bytes,
}

/// Finds the plan whose fullest GPU needs the least; of several the one that needs the least on all other GPUs, and so on, as CAPTURE has it. What is equal by that is decided by a fixed rule: the
/// first stage as long as possible, shared so that it needs least, among as few GPUs as possible; then the second, and so on.
///
/// # Errors
///
/// The profile contradicts itself, the mesh cannot be filled, or both are too large.
pub fn recommend(profile: &Profile, mesh: Mesh) -> Result<Plan, PartitionError> {
    Table::new(profile, mesh)?.recommend(mesh)
}

impl Table {
    /// The same with predictions that were made for this mesh.
    ///
    /// # Errors
    ///
    /// As of [`recommend`].
    pub fn recommend(&self, mesh: Mesh) -> Result<Plan, PartitionError> {
        best(self, mesh)
    }
}

fn best(table: &Table, mesh: Mesh) -> Result<Plan, PartitionError> {
    let layers = table.layers();
    let degree = table.configs().iter().map(|config| config.degree).max().unwrap_or(1);
    let most = layers.saturating_mul(degree as usize);
    if mesh.gpus() > most {
        return Err(PartitionError::TooManyGpus { gpus: mesh.gpus(), layers, degree, most });
    }
    let space = Space::new(mesh, table.configs())?;
    let bits = Search::bits(table, &space);
    if bits > limits::PARTITION_SETS_BITS_MAX {
        let what = "layers, distances from the end and ways to use the GPUs together";
        return Err(PartitionError::TooLarge {
            what,
            is_mesh: false,
            count: bits,
            max: limits::PARTITION_SETS_BITS_MAX,
        });
    }
    let chosen = Search::new(table, &space).best().ok_or_else(|| no_plan(table, mesh))?;
    let degrees: Vec<u32> = chosen.iter().map(|(_, config)| table.configs()[*config].degree).collect();
    let gpus = place(mesh, &degrees).expect("the search counts what fits on nodes");
    let count = chosen.len();
    let stages = chosen.into_iter().zip(gpus).enumerate().map(|(at, ((group, config), gpus))| {
        let rank = table.ranks((count - at).min(table.depths()), group)[config];
        Stage { group, config: table.configs()[config], gpus, predicted: table.values()[rank as usize] }
    });
    let stages: Vec<Stage> = stages.collect();
    let peak = stages.iter().map(|stage| stage.predicted).max().unwrap_or_default();
    Ok(Plan { stages, peak, considered: count_plans(table, &space) })
}

fn no_plan(table: &Table, mesh: Mesh) -> PartitionError {
    let mut degrees: Vec<u32> = table.configs().iter().map(|config| config.degree).collect();
    degrees.sort_unstable();
    degrees.dedup();
    let degrees: Vec<String> = degrees.iter().map(u32::to_string).collect();
    let (nodes, gpus_per_node) = (mesh.nodes(), mesh.gpus_per_node());
    PartitionError::NoPlan { layers: table.layers(), degrees: degrees.join(", "), nodes, gpus_per_node }
}

/// How many plans there are: with n stages, the ways to cut the layers into n times the ways to share n stages so that they fill the mesh.
fn count_plans(table: &Table, space: &Space) -> u64 {
    let steps: Vec<usize> = table.configs().iter().map(|config| space.step(config.degree)).collect();
    let full: Vec<usize> = space.full().collect();
    let mut ways = vec![0_u64; space.bits()];
    ways[0] = 1;
    let mut plans = 0_u64;
    for cuts in binomials(table.layers() - 1) {
        let mut next = vec![0_u64; ways.len()];
        for (at, count) in ways.iter().enumerate().filter(|(_, count)| **count > 0) {
            for step in &steps {
                if space.is_possible(at + step) {
                    next[at + step] = next[at + step].saturating_add(*count);
                }
            }
        }
        ways = next;
        let filled = full.iter().fold(0_u64, |sum, at| sum.saturating_add(ways[*at]));
        plans = plans.saturating_add(filled.saturating_mul(cuts));
    }
    plans
}

/// The ways to choose 0, 1 … n of n, or the largest number for more.
fn binomials(n: usize) -> Vec<u64> {
    let mut row = vec![1_u64];
    for _ in 0..n {
        let middle = row.windows(2).map(|pair| pair[0].saturating_add(pair[1]));
        row = [1].into_iter().chain(middle).chain([1]).collect();
    }
    row
}

/// What systems do that cut by the number of layers (DeepSpeed, Megatron-LM): stages of as many layers, one kind and degree of parallelism. The best of those, by prediction; nothing where
/// no degree divides the mesh into so few stages as there are layers.
pub fn uniform(table: &Table, mesh: Mesh) -> Option<Uniform> {
    let layers = table.layers();
    let all = table.configs().iter().filter_map(|config| {
        let degree = config.degree as usize;
        let count = mesh.gpus() / degree;
        if !mesh.gpus_per_node().is_multiple_of(degree) || count > layers {
            return None;
        }
        // The first of them have one more, as many as are left over.
        let first = |stage: usize| stage * (layers / count) + stage.min(layers % count);
        let stages = (0..count).map(|stage| {
            let group = Group { first: first(stage), last: first(stage + 1) - 1 };
            Some((group, table.bytes(group, *config, count - stage)?))
        });
        let stages: Vec<(Group, Bytes)> = stages.collect::<Option<_>>()?;
        let peak = stages.iter().map(|(_, bytes)| *bytes).max()?;
        Some(Uniform { stages, config: *config, peak })
    });
    all.min_by_key(|uniform| uniform.peak)
}

impl Plan {
    /// The GPUs of all stages with what each needs, in the order of their numbers.
    pub fn gpus(&self) -> Vec<(usize, Bytes)> {
        let gpus = self.stages.iter().flat_map(|stage| stage.gpus.iter().map(|gpu| (*gpu, stage.predicted)));
        let mut gpus: Vec<(usize, Bytes)> = gpus.collect();
        gpus.sort_unstable();
        gpus
    }
}
