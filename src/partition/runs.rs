//! Which short training runs to make, so that every layer is alone on a GPU once, and is added once to layers that were measured without it (CAPTURE, Description 1).
//!
//! The paper gives the partitionings for layers that GPUs divide evenly, and its last lines do not add up there either. This is the same idea for any numbers. With b layers to a block,
//! as many blocks as there are GPUs but two, and k blocks in front:
//!
//! ```text
//!   [b … b  1  1  the others]     the layer behind the blocks alone, and the next alone
//!   [b … b  2  1  the others]     one is added; the third alone
//!   [b … b  3  1  the others]     …
//!   [b … b  b+1  1  the others]   the first layer of the next block is added, too
//!   [b … b  b  1  1  the others]  the next block is in front: the run that has b of it is its first
//! ```
//!
//! That makes as many runs as there are layers; no part has more than b + 1 layers. With two GPUs a layer in the middle is never alone; every cut in two, and the whole, still tell what the
//! [`merge`](super::merge) needs.

use serde_json::{Value, json};

use super::profile::{Parallelism, batch_of, degree_of};
use super::{LAYERS_MAX, PartitionError};

/// Parts of all runs together: ten times what a thousand layers on sixteen GPUs have.
const PARTS_MAX: usize = 1 << 22;

/// A set of runs: the same parallelism and degree, at one batch size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunSet {
    /// How the parts are shared.
    pub parallelism: Parallelism,
    /// Among how many GPUs each.
    pub degree: u32,
    /// Samples of a batch; nothing where the target is not known.
    pub batch_size: Option<u64>,
    /// What that is of the target: `1/2`.
    pub share: &'static str,
    /// How many layers each part has, run by run.
    pub partitions: Vec<Vec<usize>>,
}

/// Everything to be run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Runs {
    layers: usize,
    gpus: usize,
    target: Option<u64>,
    /// Set by set.
    pub sets: Vec<RunSet>,
    /// Degrees that there are too few GPUs for.
    pub left_out: Vec<u32>,
}

impl Runs {
    /// The runs for a model with so many layers on so many GPUs: pipeline parallelism, then data and tensor parallelism of these degrees, each with half and a quarter of the target batch.
    ///
    /// # Errors
    ///
    /// There are too few GPUs, the numbers are impossible, or a batch is too small to be halved twice.
    pub fn new(layers: usize, gpus: usize, degrees: &[u32], target: Option<u64>) -> Result<Runs, PartitionError> {
        if !(1..=LAYERS_MAX).contains(&layers) {
            return Err(PartitionError::Layers(layers));
        }
        // A quarter of less than four is none.
        if let Some(target) = target {
            batch_of("a quarter of the target batch size", target / 4)?;
        }
        let mut degrees = degrees.to_vec();
        degrees.sort_unstable();
        degrees.dedup();
        let parts = layers.saturating_mul(gpus.min(layers)).saturating_mul(2 + 4 * degrees.len());
        if parts > PARTS_MAX {
            return Err(PartitionError::TooManyParts { layers, gpus, parts, max: PARTS_MAX });
        }
        let mut sets = Vec::new();
        let mut add = |parallelism, degree: u32, partitions: &[Vec<usize>]| {
            for (share, part) in [("1/2", 2), ("1/4", 4)] {
                let batch_size = target.map(|target| target / part);
                sets.push(RunSet { parallelism, degree, batch_size, share, partitions: partitions.to_vec() });
            }
        };
        add(Parallelism::Pipeline, 1, &partitions_on(layers, gpus, 1)?);
        let mut left_out = Vec::new();
        for (at, degree) in degrees.iter().enumerate() {
            degree_of(at, Parallelism::Data, u64::from(*degree))?;
            // Not shared at all is what the first two sets are.
            match partitions_on(layers, gpus / *degree as usize, *degree) {
                Ok(partitions) if *degree > 1 => {
                    add(Parallelism::Data, *degree, &partitions);
                    add(Parallelism::Tensor, *degree, &partitions);
                }
                Ok(_) => {}
                Err(_) => left_out.push(*degree),
            }
        }
        Ok(Runs { layers, gpus, target, sets, left_out })
    }

    /// How many runs there are.
    pub fn count(&self) -> usize {
        self.sets.iter().map(|set| set.partitions.len()).sum()
    }

    /// The most layers that a part has in any run of a set.
    pub fn largest_part(set: &RunSet) -> usize {
        set.partitions.iter().flatten().copied().max().unwrap_or(0)
    }

    /// As the file of results begins: each run is given its `peak_bytes`.
    pub fn to_json(&self) -> Value {
        let runs = self.sets.iter().flat_map(|set| {
            set.partitions.iter().map(move |partition| {
                json!({
                    "parallelism": set.parallelism.name(),
                    "degree": set.degree,
                    "batch_size": set.batch_size,
                    "partition": partition,
                })
            })
        });
        json!({
            "layers": self.layers,
            "gpus": self.gpus,
            "target_batch_size": self.target,
            "runs": runs.collect::<Vec<_>>(),
        })
    }
}

/// The partitionings for groups of `degree` GPUs, or that there are too few groups.
fn partitions_on(layers: usize, parts: usize, degree: u32) -> Result<Vec<Vec<usize>>, PartitionError> {
    let too_few = || PartitionError::TooFewGpus { layers, gpus: parts * degree as usize, degree };
    partitions(layers, parts).ok_or_else(too_few)
}

/// The partitionings of so many layers on so many GPUs, or groups of GPUs: how many layers each part has. Nothing where there are fewer than two GPUs for several layers.
pub fn partitions(layers: usize, gpus: usize) -> Option<Vec<Vec<usize>>> {
    match (layers, gpus.min(layers)) {
        (0, _) | (_, 0) => None,
        (1, _) => Some(vec![vec![1]]),
        (_, 1) => None,
        (_, 2) => {
            let cuts = (1..layers).map(|front| vec![front, layers - front]);
            Some(cuts.chain([vec![layers]]).collect())
        }
        (_, gpus) => Some(blocks(layers, gpus)),
    }
}

/// For three GPUs and more.
fn blocks(layers: usize, gpus: usize) -> Vec<Vec<usize>> {
    let block = layers.div_ceil(gpus - 2);
    // Each block has the layers behind its first added, and that of the next.
    let last = (layers - 1).div_ceil(block) - 1;
    let mut runs = Vec::new();
    for front in 0..=last {
        let begin = front * block;
        let most = (block + 1).min(layers - begin);
        for size in (1..=most).filter(|size| front == last || *size != block) {
            let mut run = vec![block; front];
            run.push(size);
            let mut left = layers - begin - size;
            if left > 0 {
                run.push(1);
                left -= 1;
            }
            let others = gpus - run.len().min(gpus);
            run.extend(equal(left, others));
            runs.push(run);
        }
        // Where a block has one layer, the run that has it is the next block's first.
    }
    runs
}

/// So many layers in as many parts as there can be, equal but for one layer.
fn equal(layers: usize, parts: usize) -> Vec<usize> {
    let parts = parts.min(layers);
    (0..parts).map(|at| layers / parts + usize::from(at < layers % parts)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every group of layers that any run has, by its first and last.
    pub(super) fn groups(runs: &[Vec<usize>]) -> BTreeSet<(usize, usize)> {
        let of = |run: &Vec<usize>| {
            let mut next = 0;
            let groups = run.iter().map(|size| {
                next += size;
                (next - size, next - 1)
            });
            groups.collect::<Vec<_>>()
        };
        runs.iter().flat_map(of).collect()
    }

    #[test]
    fn every_layer_is_alone_once_and_added_once() {
        for layers in 1..=40 {
            for gpus in 1..=layers {
                let Some(runs) = partitions(layers, gpus) else {
                    assert!(gpus == 1 && layers > 1, "{layers} on {gpus}");
                    continue;
                };
                let here = format!("{layers} on {gpus}: {runs:?}");
                assert!(runs.len() <= layers + 1, "{here}");
                assert!(runs.iter().all(|run| run.iter().sum::<usize>() == layers), "{here}");
                assert!(runs.iter().all(|run| run.len() <= gpus && !run.contains(&0)), "{here}");
                let groups = groups(&runs);
                for layer in 0..layers {
                    // In the middle of two parts nobody is alone.
                    let is_told = (layer..layers).any(|last| groups.contains(&(layer, last)));
                    assert!(groups.contains(&(layer, layer)) || gpus == 2 && is_told, "layer {layer} of {here}");
                    let is_added = |first| groups.contains(&(first, layer)) && groups.contains(&(first, layer - 1));
                    assert!(layer == 0 || (0..layer).any(is_added), "layer {layer} of {here}");
                }
                if gpus > 3 {
                    let most = layers.div_ceil(gpus - 2) + 1;
                    assert!(runs.iter().flatten().all(|size| *size <= most), "{here}");
                }
            }
        }
    }

    #[test]
    fn the_runs_of_twelve_layers_on_six_gpus() {
        let runs = partitions(12, 6).unwrap();
        assert_eq!(
            runs[..4],
            [vec![1, 1, 3, 3, 2, 2], vec![2, 1, 3, 2, 2, 2], vec![4, 1, 2, 2, 2, 1], vec![3, 1, 1, 3, 2, 2]]
        );
        assert_eq!(*runs.last().unwrap(), [3, 3, 3, 3]);
        assert_eq!(runs.len(), 12);
    }

    #[test]
    fn degrees_have_groups_of_gpus_and_two_batch_sizes() {
        let runs = Runs::new(12, 8, &[1, 2, 4, 8], Some(64)).unwrap();
        let sets: Vec<_> = runs.sets.iter().map(|set| (set.parallelism.name(), set.degree, set.batch_size)).collect();
        assert_eq!(sets.len(), 10);
        assert_eq!(
            (sets[0], sets[1], sets[2]),
            (("pipeline", 1, Some(32)), ("pipeline", 1, Some(16)), ("data", 2, Some(32)))
        );
        assert_eq!((runs.left_out, runs.sets[9].partitions.len()), (vec![8], 12));
        assert!(runs.sets[2].partitions.iter().all(|run| run.len() <= 4));
        let error =
            |layers, gpus, degrees: &[u32], target| Runs::new(layers, gpus, degrees, target).unwrap_err().to_string();
        assert!(error(4, 1, &[], None).contains("4 layers on 1 GPUs"));
        assert!(error(4, 4, &[3], None).contains("a degree of 3 is not possible"));
        assert!(error(4, 4, &[], Some(3)).contains("a quarter of the target batch size is 0"));
        assert!(error(0, 4, &[], None).contains("0 layers"));
        assert!(
            error(4096, 4096, &[2, 2], None).contains("4096 layers on 4096 GPUs have up to 100663296 parts together")
        );
    }
}
