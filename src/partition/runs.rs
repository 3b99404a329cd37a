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
//!
//! Where layers were merged in between, each merged one is a layer here, and data and tensor parallelism take so many fewer runs. A partition still says layers of the model, as whoever runs it
//! counts them.

use serde_json::{Value, json};

use super::PartitionError;
use super::profile::{Parallelism, Profile, Schedule, batch_of, degree_of};
use crate::limits;

/// What the runs have of the target batch, and by what it is divided for that. Where one batch size is enough it is the first.
const SHARES: [(&str, u64); 2] = [("1/2", 2), ("1/4", 4)];

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
    /// How many layers of the model each part has, run by run.
    pub partitions: Vec<Vec<usize>>,
}

/// Everything to be run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Runs {
    layer_sizes: Vec<usize>,
    gpus: usize,
    target: Option<u64>,
    schedule: Schedule,
    microbatches: u64,
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
        if !(1..=limits::PARTITION_LAYERS_MAX).contains(&layers) {
            return Err(PartitionError::Layers(layers));
        }
        let mut runs = Runs::none(vec![1; layers], gpus, target)?;
        let degrees = runs.listed(degrees, 1)?;
        let partitions = runs.partitions(1).ok_or(PartitionError::TooFewGpus { layers, gpus, degree: 1 })?;
        runs.add(Parallelism::Pipeline, 1, &partitions);
        runs.add_shared(&degrees)?;
        Ok(runs)
    }

    /// The runs that are left to do when pipeline parallelism was measured and layers were merged by that (III.A.3): data and tensor parallelism of these degrees, with the merged layers of the
    /// profile as layers.
    ///
    /// # Errors
    ///
    /// As of [`Runs::new`]; also where no degree has enough GPUs.
    pub fn merged(profile: &Profile, gpus: usize, degrees: &[u32]) -> Result<Runs, PartitionError> {
        let mut runs = Runs::none(profile.layer_sizes().to_vec(), gpus, Some(profile.target_batch_size()))?;
        (runs.schedule, runs.microbatches) = (profile.schedule(), profile.microbatches());
        let degrees = runs.listed(degrees, 0)?;
        runs.add_shared(&degrees)?;
        match runs.left_out.first() {
            Some(degree) if runs.sets.is_empty() => {
                Err(PartitionError::TooFewGpus { layers: profile.layers(), gpus, degree: *degree })
            }
            _ => Ok(runs),
        }
    }

    fn none(layer_sizes: Vec<usize>, gpus: usize, target: Option<u64>) -> Result<Runs, PartitionError> {
        // A quarter of less than four is none.
        if let Some(target) = target {
            batch_of("a quarter of the target batch size", target / 4)?;
        }
        let (schedule, microbatches) = (Schedule::default(), 1);
        Ok(Runs { layer_sizes, gpus, target, schedule, microbatches, sets: Vec::new(), left_out: Vec::new() })
    }

    /// Each degree once, if all runs of these and of so many kinds more can be listed.
    fn listed(&self, degrees: &[u32], more: usize) -> Result<Vec<u32>, PartitionError> {
        let mut degrees = degrees.to_vec();
        degrees.sort_unstable();
        degrees.dedup();
        let (layers, gpus, max) = (self.layer_sizes.len(), self.gpus, limits::PARTITION_PARTS_MAX);
        let sets = SHARES.len() * (more + 2 * degrees.len());
        let parts = layers.saturating_mul(gpus.min(layers)).saturating_mul(sets);
        if parts > max {
            return Err(PartitionError::TooManyParts { layers, gpus, parts, max });
        }
        Ok(degrees)
    }

    /// The partitionings for groups of so many GPUs; nothing where there are too few groups.
    fn partitions(&self, degree: u32) -> Option<Vec<Vec<usize>>> {
        let partitions = partitions(self.layer_sizes.len(), self.gpus / degree as usize)?;
        Some(partitions.map(|partition| of_model(&self.layer_sizes, &partition)).collect())
    }

    /// Adds the sets of all batch sizes.
    fn add(&mut self, parallelism: Parallelism, degree: u32, partitions: &[Vec<usize>]) {
        for (share, part) in SHARES {
            let batch_size = self.target.map(|target| target / part);
            self.sets.push(RunSet { parallelism, degree, batch_size, share, partitions: partitions.to_vec() });
        }
    }

    fn add_shared(&mut self, degrees: &[u32]) -> Result<(), PartitionError> {
        for (at, degree) in degrees.iter().enumerate() {
            degree_of(at, Parallelism::Data, u64::from(*degree))?;
            // Not shared at all is what pipeline parallelism is.
            if *degree == 1 {
                continue;
            }
            match self.partitions(*degree) {
                Some(partitions) => {
                    self.add(Parallelism::Data, *degree, &partitions);
                    self.add(Parallelism::Tensor, *degree, &partitions);
                }
                None => self.left_out.push(*degree),
            }
        }
        Ok(())
    }

    /// The same with data and tensor parallelism at half of the target batch only. What they need at another batch size is told from what pipeline parallelism does (III.A.3), which is less exact.
    #[must_use]
    pub fn at_one_batch(mut self) -> Runs {
        self.sets.retain(|set| set.parallelism == Parallelism::Pipeline || set.share == SHARES[0].0);
        self
    }

    /// How many runs there are.
    pub fn count(&self) -> usize {
        self.sets.iter().map(|set| set.partitions.len()).sum()
    }

    /// How many the same sets would have if no layers were merged: one for each.
    pub fn count_unmerged(&self) -> usize {
        self.sets.len() * self.layers()
    }

    /// How many layers the model has.
    pub fn layers(&self) -> usize {
        self.layer_sizes.iter().sum()
    }

    /// Of how many of them each is that stays whole: 1 each where none were merged.
    pub fn layer_sizes(&self) -> &[usize] {
        &self.layer_sizes
    }

    /// The most layers that a part has in any run of a set.
    pub fn largest_part(set: &RunSet) -> usize {
        set.partitions.iter().flatten().copied().max().unwrap_or(0)
    }

    /// As the file of results begins: each run is given its `peak_bytes`. Where layers were merged, partitions are of whole merged ones, told in layers of the model.
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
        let mut object = json!({
            "layers": self.layers(),
            "gpus": self.gpus,
            "target_batch_size": self.target,
        });
        if self.layer_sizes.iter().any(|size| *size != 1) {
            object["layer_sizes"] = json!(self.layer_sizes);
        }
        if self.schedule != Schedule::default() || self.microbatches != 1 {
            object["schedule"] = json!(self.schedule.name());
            object["microbatches"] = json!(self.microbatches);
        }
        object["runs"] = runs.collect();
        object
    }
}

/// A partition of merged layers in layers of the model.
pub(super) fn of_model(layer_sizes: &[usize], partition: &[usize]) -> Vec<usize> {
    let mut left = layer_sizes;
    let parts = partition.iter().map(|count| {
        let (part, others) = left.split_at(*count);
        left = others;
        part.iter().sum::<usize>()
    });
    parts.collect()
}

/// The partitionings of so many layers on so many GPUs, or groups of GPUs: how many layers each part has, one after the other. Nothing where there are fewer than two GPUs for several layers.
pub fn partitions(layers: usize, gpus: usize) -> Option<Box<dyn Iterator<Item = Vec<usize>>>> {
    match (layers, gpus.min(layers)) {
        (0, _) | (_, 0) => None,
        (1, _) => Some(Box::new(std::iter::once(vec![1]))),
        (_, 1) => None,
        (_, 2) => {
            let cuts = (1..layers).map(move |front| vec![front, layers - front]);
            Some(Box::new(cuts.chain([vec![layers]])))
        }
        (_, gpus) => Some(Box::new(blocks(layers, gpus))),
    }
}

/// For three GPUs and more.
fn blocks(layers: usize, gpus: usize) -> impl Iterator<Item = Vec<usize>> {
    let block = layers.div_ceil(gpus - 2);
    // Each block has the layers behind its first added, and that of the next.
    let last = (layers - 1).div_ceil(block) - 1;
    (0..=last).flat_map(move |front| {
        let begin = front * block;
        let most = (block + 1).min(layers - begin);
        // Where a block has one layer, the run that has it is the next block's first.
        let sizes = (1..=most).filter(move |size| front == last || *size != block);
        sizes.map(move |size| {
            let mut run = vec![block; front];
            run.push(size);
            let mut left = layers - begin - size;
            if left > 0 {
                run.push(1);
                left -= 1;
            }
            let others = gpus - run.len().min(gpus);
            run.extend(equal(left, others));
            run
        })
    })
}

/// So many layers in as many parts as there can be, equal but for one layer.
fn equal(layers: usize, parts: usize) -> Vec<usize> {
    let parts = parts.min(layers);
    (0..parts).map(|at| layers / parts + usize::from(at < layers % parts)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Measurement;
    use crate::units::Bytes;
    use std::collections::BTreeSet;

    fn runs_of(layers: usize, gpus: usize) -> Option<Vec<Vec<usize>>> {
        Some(partitions(layers, gpus)?.collect())
    }

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
                let Some(runs) = runs_of(layers, gpus) else {
                    assert!(gpus == 1 && layers > 1, "{layers} on {gpus}");
                    continue;
                };
                let here = format!("{layers} on {gpus}: {runs:?}");
                assert_eq!(runs.len(), layers, "{here}");
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
        let runs = runs_of(12, 6).unwrap();
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

    #[test]
    fn merged_layers_stay_whole_and_take_fewer_runs() {
        let of = |sizes: &[usize], target| {
            let (parallelism, degree, batch_size) = (Parallelism::Pipeline, 1, 16);
            let (isolated, added) = (vec![Bytes::new(9); sizes.len()], vec![1; sizes.len()]);
            let measurement = Measurement { parallelism, degree, batch_size, isolated, added };
            Profile::new(sizes.to_vec(), vec![measurement], target).unwrap()
        };
        let profile = |target| of(&[1, 3, 1, 2, 4, 1], target);
        let runs = Runs::merged(&profile(64), 16, &[1, 2, 4]).unwrap();
        let sets: Vec<_> = runs.sets.iter().map(|set| (set.parallelism.name(), set.degree, set.batch_size)).collect();
        assert_eq!((sets[0], sets[7]), (("data", 2, Some(32)), ("tensor", 4, Some(16))));
        assert_eq!((runs.sets.len(), runs.count(), runs.count_unmerged(), runs.layers()), (8, 48, 96, 12));
        for partition in runs.sets.iter().flat_map(|set| &set.partitions) {
            let ends = partition.iter().scan(0, |end, part| {
                *end += part;
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            assert!(ends.iter().all(|end| [1, 4, 5, 7, 11, 12].contains(end)), "{partition:?}");
            assert_eq!(ends.last(), Some(&12), "{partition:?}");
        }
        assert_eq!(runs.sets[0].partitions[..2], [vec![1, 3, 1, 2, 4, 1], vec![5, 2, 4, 1]]);
        let object = runs.to_json();
        assert_eq!((&object["layers"], &object["layer_sizes"]), (&12.into(), &json!([1, 3, 1, 2, 4, 1])));
        assert!(object.get("schedule").is_none());
        assert_eq!(runs.at_one_batch().count(), 24);
        // What the profile says of the training run the results say, too.
        let other = profile(64).scheduled(Schedule::OneForwardOneBackward, 8).unwrap();
        let object = Runs::merged(&other, 16, &[2]).unwrap().to_json();
        assert_eq!((&object["schedule"], &object["microbatches"]), (&"1f1b".into(), &8.into()));
        let error = |target, gpus| Runs::merged(&profile(target), gpus, &[2, 4]).unwrap_err().to_string();
        assert!(error(64, 2).contains("6 layers on 2 GPUs in groups of 2"));
        assert!(error(3, 8).contains("a quarter of the target batch size is 0"));
        // Thirty-two layers on sixteen GPUs: all, those that come first, and those that are left with sixteen layers.
        let count = |degrees: &[u32]| Runs::new(32, 16, degrees, Some(1024)).unwrap().count();
        let shared = Runs::merged(&of(&[2; 16], 1024), 16, &[2, 4]).unwrap();
        assert_eq!((count(&[2, 4]), count(&[1]), shared.count()), (320, 64, 128));
        assert_eq!(shared.at_one_batch().count(), 64);
    }
}
