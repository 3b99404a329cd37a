//! From what the runs measured to a profile, and from a profile to one of fewer layers.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::profile::{Measurement, Parallelism, Partial, Profile, Schedule, batch_of, degree_of, one};
use super::{Group, Metric, PartitionError, runs};
use crate::limits;
use crate::units::Bytes;

/// A file of results: what [`Runs::to_json`](super::runs::Runs::to_json) gives, with a peak for each part of each run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Of the model.
    layers: usize,
    /// How many of them each is that was merged. All are 1 where the file has none.
    #[serde(default)]
    layer_sizes: Vec<usize>,
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
    /// How many layers of the model each part has.
    partition: Vec<usize>,
    /// The peak of one GPU of each part.
    #[serde(default)]
    pub peak_bytes: Option<Vec<u64>>,
    /// Recorded traces of one GPU of each part, whose peaks are the same thing. Whoever has files reads them and fills in the peaks.
    #[serde(default)]
    pub traces: Option<Vec<String>>,
}

/// A part of a run that peaked elsewhere than what all runs tell of its layers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Disagreement {
    /// Which run, counted from 0.
    pub run: usize,
    /// Which part of it.
    pub part: usize,
    /// Its peak.
    pub measured: Bytes,
    /// What its first layer needs alone and the others add, in bytes.
    pub told: f64,
    /// How far they are apart, as a share of the peak.
    pub share: f64,
}

/// What was measured, by parallelism, degree and batch size.
type Sets = BTreeMap<(Parallelism, u32, u64), Peaks>;

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
        let mut results: Results =
            serde_json::from_slice(text).map_err(|source| PartitionError::Json { what, source })?;
        let layers = results.layers;
        if !(1..=limits::PARTITION_LAYERS_MAX).contains(&layers) {
            return Err(PartitionError::Layers(layers));
        }
        let sizes = &mut results.layer_sizes;
        if sizes.is_empty() {
            *sizes = vec![1; layers];
        }
        let sum = sizes.iter().fold(0_usize, |sum, size| sum.saturating_add(*size));
        let (entries, smallest) = (sizes.len(), sizes.iter().min().copied().unwrap_or(0));
        if sum != layers || smallest == 0 {
            return Err(PartitionError::Merged { entries, smallest, sum, layers });
        }
        Ok(results)
    }

    /// The profile that they make.
    ///
    /// # Errors
    ///
    /// A run is not filled in, or none tells what a layer needs.
    pub fn profile(&self) -> Result<Profile, PartitionError> {
        Partial::joined([self.partial()?])
    }

    /// What they tell of a profile, which others may complete.
    ///
    /// # Errors
    ///
    /// As of [`Results::profile`].
    pub fn partial(&self) -> Result<Partial, PartitionError> {
        let target = self.target_batch_size.ok_or(PartitionError::NoTarget)?;
        let measurements =
            self.sets()?.iter().map(|(key, peaks)| self.measurement(*key, peaks)).collect::<Result<_, _>>()?;
        Partial::new(self.layer_sizes.clone(), measurements, target, self.schedule, self.microbatches)
    }

    /// What was measured of each config at each batch size.
    fn sets(&self) -> Result<Sets, PartitionError> {
        let ends = self.ends();
        let mut sets = Sets::new();
        let mut made = BTreeMap::new();
        for (at, run) in self.runs.iter().enumerate() {
            let set = Results::set_of(at, run)?;
            let (peaks, groups) = (sets.entry(set).or_default(), self.groups(at, run, &ends)?);
            let peaks_of: Vec<Bytes> = groups.iter().map(|(_, bytes)| *bytes).collect();
            // What is made twice is measured better, unless it is something else.
            if let Some((first, before)) = made.insert((set, &run.partition), (at, peaks_of.clone()))
                && let Some((part, peaks)) = furthest_apart(&before, &peaks_of)
            {
                return Err(PartitionError::Runs { first, second: at, part, peaks });
            }
            for (group, bytes) in groups {
                let (mean, count) = peaks.entry((group.first, group.last)).or_default();
                *count += 1;
                *mean += (bytes.get() as f64 - *mean) / f64::from(*count);
            }
        }
        Ok(sets)
    }

    /// Behind how many layers of the model each of those ends that were merged.
    fn ends(&self) -> Vec<usize> {
        let ends = self.layer_sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        ends.collect()
    }

    /// With which of the others a run is taken together.
    fn set_of(at: usize, run: &Run) -> Result<(Parallelism, u32, u64), PartitionError> {
        let batch = run.batch_size.ok_or(PartitionError::Unfilled { run: at, what: "batch_size" })?;
        let batch = batch_of("batch_size of a run", batch)?;
        let degree = degree_of(at, run.parallelism, run.degree)?;
        let parallelism = if degree == 1 { Parallelism::Pipeline } else { run.parallelism };
        Ok((parallelism, degree, batch))
    }

    /// Where a run is furthest from what all of them together tell of its layers. Nothing where they agree.
    ///
    /// # Errors
    ///
    /// As of [`Results::profile`].
    pub fn disagreement(&self) -> Result<Option<Disagreement>, PartitionError> {
        let mut told = BTreeMap::new();
        for (key, peaks) in self.sets()? {
            told.insert(key, self.measurement(key, &peaks)?);
        }
        let ends = self.ends();
        let mut furthest: Option<Disagreement> = None;
        for (run, of) in self.runs.iter().enumerate() {
            let Some(Measurement { isolated, added, .. }) = told.get(&Results::set_of(run, of)?) else { continue };
            for (part, (group, measured)) in self.groups(run, of, &ends)?.into_iter().enumerate() {
                // Sums of impossible figures are no figures any more, and no reason to end here.
                let more: f64 = added[group.first + 1..=group.last].iter().map(|bytes| *bytes as f64).sum();
                let told = isolated[group.first].get() as f64 + more;
                let share = (told - measured.get() as f64).abs() / measured.get() as f64;
                if share > furthest.as_ref().map_or(0.0, |furthest| furthest.share) {
                    furthest = Some(Disagreement { run, part, measured, told, share });
                }
            }
        }
        Ok(furthest)
    }

    /// The parts of a run, as layers that were merged, with their peaks. `ends` says behind how many layers of the model each of those ends.
    fn groups(&self, at: usize, run: &Run, ends: &[usize]) -> Result<Vec<(Group, Bytes)>, PartitionError> {
        let (parts, layers) = (run.partition.len(), self.layers);
        let sum = run.partition.iter().fold(0_usize, |sum, size| sum.saturating_add(*size));
        if sum != layers || run.partition.contains(&0) {
            return Err(PartitionError::Partition { run: at, sum, parts, layers });
        }
        let peaks = run.peak_bytes.as_deref().unwrap_or_default();
        if peaks.len() != parts {
            return Err(PartitionError::Peaks { run: at, found: peaks.len(), parts });
        }
        let (mut next, mut first) = (0, 0);
        let groups = run.partition.iter().zip(peaks).map(|(size, peak)| {
            next += size;
            let last = ends.binary_search(&next).map_err(|layer| PartitionError::CutThrough { run: at, layer })?;
            let group = Group { first, last };
            first = last + 1;
            let bytes = Bytes::new(*peak);
            if bytes.is_zero() {
                return Err(PartitionError::Unfilled { run: at, what: "one of peak_bytes" });
            }
            if bytes > Bytes::LARGEST {
                return Err(PartitionError::Peak { run: at, bytes: *peak });
            }
            Ok((group, bytes))
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
        let layers = self.layer_sizes.len();
        let mut told = vec![(0.0, 0_u32); layers];
        for ((first, last), (mean, _)) in peaks.iter().filter(|((first, last), _)| first < last) {
            if let Some(before) = peak(*first, *last - 1) {
                let (sum, count) = &mut told[*last];
                *sum += mean - before;
                *count += 1;
            }
        }
        if let Some(layer) = (1..layers).find(|layer| told[*layer].1 == 0) {
            return Err(untold(Metric::Added, layer));
        }
        // The first adds to nothing.
        let added: Vec<f64> = told.into_iter().map(|(sum, count)| sum / f64::from(count.max(1))).collect();
        let isolated = (0..layers).map(|layer| {
            // Where it is never alone: with those behind it, without what they add.
            let with_others = || {
                let mut groups = peaks.range((layer, layer)..(layer + 1, 0));
                groups.next().map(|((_, last), (mean, _))| mean - added[layer + 1..=*last].iter().sum::<f64>())
            };
            let bytes = peak(layer, layer).or_else(with_others).ok_or_else(|| untold(Metric::Isolated, layer))?;
            if !(1.0..=Bytes::LARGEST.get() as f64).contains(&bytes.round()) {
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
        let layers = self.layer_sizes.len();
        let gpus = self.gpus.map_or(layers, |gpus| gpus / degree as usize);
        let tells = |partition: &Vec<usize>| {
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
        // One after the other, until one tells: of all there may be millions of parts.
        let planned = runs::partitions(layers, gpus.max(2)).and_then(|mut planned| planned.find(tells));
        match (planned, metric) {
            (Some(partition), _) => {
                format!("one with the partition {:?}", runs::of_model(&self.layer_sizes, &partition))
            }
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

/// How many times the smaller of two peaks of the same part the larger is at most.
const APART_MAX: f64 = 1.25;

/// The part whose two peaks are furthest apart, where that is more than measuring makes.
fn furthest_apart(one: &[Bytes], other: &[Bytes]) -> Option<(usize, [Bytes; 2])> {
    let times = |[one, other]: [Bytes; 2]| one.max(other).get() as f64 / one.min(other).get() as f64;
    let pairs = one.iter().zip(other).map(|(one, other)| [*one, *other]).enumerate();
    pairs.max_by(|one, other| times(one.1).total_cmp(&times(other.1))).filter(|(_, pair)| times(*pair) > APART_MAX)
}
