//! From what the runs measured to a profile, and from a profile to one of fewer layers.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::profile::{Measurement, Parallelism, Profile, Schedule, batch_of, degree_of, one};
use super::{Group, LAYERS_MAX, Metric, PartitionError, runs};
use crate::units::Bytes;

/// A file of results: what [`Runs::to_json`](super::runs::Runs::to_json) gives, with a peak for each part of each run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    layers: usize,
    #[serde(default)]
    gpus: Option<usize>,
    target_batch_size: Option<u64>,
    #[serde(default)]
    schedule: Schedule,
    #[serde(default = "one")]
    microbatches: u64,
    /// Run by run.
    pub runs: Vec<Run>,
}

/// One run and what it measured.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    parallelism: Parallelism,
    degree: u64,
    batch_size: Option<u64>,
    partition: Vec<usize>,
    /// The peak of one GPU of each part.
    #[serde(default)]
    pub peak_bytes: Option<Vec<u64>>,
    /// Recorded traces of one GPU of each part, whose peaks are the same thing. Whoever has files reads them and fills in the peaks.
    #[serde(default)]
    pub traces: Option<Vec<String>>,
}

/// What was measured of one config at one batch size: the mean of each group's peaks, and how many there are.
type Peaks = BTreeMap<(usize, usize), (f64, u32)>;

impl Results {
    /// Reads results.
    ///
    /// # Errors
    ///
    /// They are none.
    pub fn from_json(text: &[u8]) -> Result<Results, PartitionError> {
        let what = "file of results";
        let results: Results = serde_json::from_slice(text).map_err(|source| PartitionError::Json { what, source })?;
        if !(1..=LAYERS_MAX).contains(&results.layers) {
            return Err(PartitionError::Layers(results.layers));
        }
        Ok(results)
    }

    /// The profile that they make.
    ///
    /// # Errors
    ///
    /// A run is not filled in, or none tells what a layer needs.
    pub fn profile(&self) -> Result<Profile, PartitionError> {
        let unfilled = PartitionError::Batch { what: "target_batch_size", value: 0 };
        let target = self.target_batch_size.ok_or(unfilled)?;
        let mut sets: BTreeMap<(Parallelism, u32, u64), Peaks> = BTreeMap::new();
        for (at, run) in self.runs.iter().enumerate() {
            let batch = run.batch_size.ok_or(PartitionError::Unfilled { run: at, what: "batch_size" })?;
            let batch = batch_of("batch_size of a run", batch)?;
            let degree = degree_of(at, run.parallelism, run.degree)?;
            let parallelism = if degree == 1 { Parallelism::Pipeline } else { run.parallelism };
            let peaks = sets.entry((parallelism, degree, batch)).or_default();
            for (group, bytes) in self.groups(at, run)? {
                let (mean, count) = peaks.entry((group.first, group.last)).or_default();
                *count += 1;
                *mean += (bytes.get() as f64 - *mean) / f64::from(*count);
            }
        }
        let measurements = sets.iter().map(|(key, peaks)| self.measurement(*key, peaks));
        let measurements = measurements.collect::<Result<_, _>>()?;
        Profile::new(vec![1; self.layers], measurements, target)?.scheduled(self.schedule, self.microbatches)
    }

    /// The parts of a run with their peaks.
    fn groups(&self, at: usize, run: &Run) -> Result<Vec<(Group, Bytes)>, PartitionError> {
        let (parts, layers) = (run.partition.len(), self.layers);
        let sum = run.partition.iter().fold(0_usize, |sum, size| sum.saturating_add(*size));
        if sum != layers || run.partition.contains(&0) {
            return Err(PartitionError::Partition { run: at, sum, parts, layers });
        }
        let peaks = run.peak_bytes.as_deref().unwrap_or_default();
        if peaks.len() != parts {
            return Err(PartitionError::Peaks { run: at, found: peaks.len(), parts });
        }
        let mut next = 0;
        let groups = run.partition.iter().zip(peaks).map(|(size, peak)| {
            next += size;
            let bytes = Bytes::new(*peak);
            if bytes.is_zero() || bytes > Bytes::LARGEST {
                return Err(PartitionError::Unfilled { run: at, what: "one of peak_bytes" });
            }
            Ok((Group { first: next - size, last: next - 1 }, bytes))
        });
        groups.collect()
    }

    /// M_i and M_a of each layer: `PM(l; l)`, and `PM(s; l) − PM(s; l−1)`, the mean where several runs tell.
    fn measurement(
        &self,
        (parallelism, degree, batch_size): (Parallelism, u32, u64),
        peaks: &Peaks,
    ) -> Result<Measurement, PartitionError> {
        let untold = |metric, layer| PartitionError::Untold {
            parallelism,
            degree,
            batch_size,
            metric,
            layer,
            wanted: self.wanted(metric, layer, degree, peaks),
        };
        let peak = |first: usize, last: usize| peaks.get(&(first, last)).map(|(mean, _)| *mean);
        let mut added = vec![0.0; self.layers];
        for (layer, added) in added.iter_mut().enumerate().skip(1) {
            let tellers = (0..layer).filter_map(|first| Some(peak(first, layer)? - peak(first, layer - 1)?));
            let tellers: Vec<f64> = tellers.collect();
            if tellers.is_empty() {
                return Err(untold(Metric::Added, layer));
            }
            *added = tellers.iter().sum::<f64>() / tellers.len() as f64;
        }
        let isolated = (0..self.layers).map(|layer| {
            // Where it is never alone: with those behind it, without what they add.
            let with_others = || {
                let mut groups = peaks.range((layer, layer)..(layer + 1, 0));
                groups.next().map(|((_, last), (mean, _))| mean - added[layer + 1..=*last].iter().sum::<f64>())
            };
            let bytes = peak(layer, layer).or_else(with_others).ok_or_else(|| untold(Metric::Isolated, layer))?;
            if bytes.round() < 1.0 {
                let value = format!("{bytes:.0} (the peak of a group without what its other layers add)");
                return Err(PartitionError::Figure { at: 0, layer, metric: Metric::Isolated, value });
            }
            Ok(Bytes::new(bytes.round() as u64))
        });
        let isolated = isolated.collect::<Result<_, _>>()?;
        let added = added.into_iter().map(|bytes| bytes.round() as i64).collect();
        Ok(Measurement { parallelism, degree, batch_size, isolated, added })
    }

    /// A run that tells what none told: of those that would have been made, one that is not there.
    fn wanted(&self, metric: Metric, layer: usize, degree: u32, peaks: &Peaks) -> String {
        let gpus = self.gpus.map_or(self.layers, |gpus| gpus / degree as usize);
        let planned = runs::partitions(self.layers, gpus.max(2)).unwrap_or_default();
        let tells = |partition: &&Vec<usize>| {
            let mut next = 0;
            partition.iter().any(|size| {
                next += size;
                let group = (next - size, next - 1);
                let is_new = !peaks.contains_key(&group);
                let is_own = match metric {
                    Metric::Isolated => group == (layer, layer),
                    Metric::Added => group.0 < layer && (group.1 == layer || group.1 + 1 == layer),
                };
                is_new && is_own
            })
        };
        match (planned.iter().find(tells), metric) {
            (Some(partition), _) => format!("one with the partition {partition:?}"),
            (None, Metric::Isolated) => format!("one with layer {layer} alone on a part"),
            (None, Metric::Added) => {
                format!(
                    "two with the same layers before it on its part, one that ends with layer {layer} and one that ends before it,"
                )
            }
        }
    }
}

/// Merges neighbours until so many layers are left: again and again the two that need least together, unshared and at the largest batch size measured (III.A.3).
///
/// # Errors
///
/// There are fewer layers, or none are asked for.
pub fn merge_layers(profile: &Profile, to: usize) -> Result<Profile, PartitionError> {
    let layers = profile.layers();
    if !(1..=layers).contains(&to) {
        return Err(PartitionError::MergeTo { layers, wanted: to });
    }
    let decides = profile.measurements().iter().filter(|one| one.parallelism == Parallelism::Pipeline);
    let decides = decides.max_by_key(|one| one.batch_size).ok_or(PartitionError::NoPipeline)?;
    // First and last layer of each that is left.
    let mut left: Vec<Group> = (0..layers).map(|layer| Group { first: layer, last: layer }).collect();
    let bytes = |group: Group, of: &Measurement| {
        let added: i128 = of.added[group.first + 1..=group.last].iter().map(|added| i128::from(*added)).sum();
        i128::from(of.isolated[group.first].get()) + added
    };
    while left.len() > to {
        let together = |at: usize| Group { first: left[at].first, last: left[at + 1].last };
        let at = (0..left.len() - 1).min_by_key(|at| bytes(together(*at), decides));
        let at = at.expect("there are two to merge");
        left[at] = together(at);
        left.remove(at + 1);
    }
    let measurements = profile.measurements().iter().map(|of| {
        let checked = |layer: usize, bytes: i128| {
            let largest = i128::from(Bytes::LARGEST.get());
            if bytes.abs() > largest { Err(PartitionError::Sum { layer, bytes }) } else { Ok(bytes as i64) }
        };
        let isolated = left.iter().enumerate().map(|(layer, group)| {
            let bytes = checked(layer, bytes(*group, of))?;
            if bytes < 1 {
                let (Group { first, last }, batch) = (*group, of.batch_size as f64);
                let Measurement { parallelism, degree, .. } = *of;
                let bytes = bytes as f64;
                return Err(PartitionError::Impossible { first, last, parallelism, degree, batch, bytes });
            }
            Ok(Bytes::new(bytes as u64))
        });
        let added = left.iter().enumerate().map(|(layer, group)| match layer {
            0 => Ok(0),
            _ => checked(layer, of.added[group.first..=group.last].iter().map(|added| i128::from(*added)).sum()),
        });
        let (isolated, added) = (isolated.collect::<Result<_, _>>()?, added.collect::<Result<_, _>>()?);
        Ok(Measurement { isolated, added, ..of.clone() })
    });
    let measurements = measurements.collect::<Result<_, PartitionError>>()?;
    let sizes = left.iter().map(|group| profile.layer_sizes()[group.first..=group.last].iter().sum());
    Profile::new(sizes.collect(), measurements, profile.target_batch_size())?
        .fitted(profile.fit())
        .scheduled(profile.schedule(), profile.microbatches())
}
