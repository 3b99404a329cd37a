//! What was measured of a model: for each layer what it needs alone on a GPU and what it adds to others, with several kinds of parallelism and batch sizes.
//!
//! Invariant of a [`Profile`]: every list has an entry for each layer, degrees are powers of two, no two measurements are of the same thing, and pipeline parallelism was measured.

mod partial;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use partial::Partial;

use super::{Metric, PartitionError};
use crate::limits;
use crate::units::Bytes;

/// How the GPUs of a stage share its work.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Parallelism {
    /// There is one GPU, and nothing to share.
    Pipeline,
    /// Each has all weights and a part of the batch.
    Data,
    /// Each has a part of the weights.
    Tensor,
}

impl Parallelism {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Parallelism::Pipeline => "pipeline",
            Parallelism::Data => "data",
            Parallelism::Tensor => "tensor",
        }
    }
}

impl std::fmt::Display for Parallelism {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// In which order the micro-batches of a batch go forward and back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Schedule {
    /// All go forward, then all go back: every stage keeps the activations of all.
    #[default]
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: the p-th stage from the end keeps the activations of p micro-batches.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
}

impl Schedule {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
        }
    }
}

/// Which curve goes through the two largest degrees measured, for those above.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    /// `a + b ln d`, as CAPTURE has it: too little where much is fixed.
    #[default]
    Logarithm,
    /// `a + b / d`, which is what the paper's formulas of memory are: fixed parts, and parts that are divided.
    Inverse,
}

impl Fit {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Fit::Logarithm => "logarithm",
            Fit::Inverse => "inverse",
        }
    }
}

/// What one set of runs gave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Measurement {
    /// How stages were shared.
    pub parallelism: Parallelism,
    /// Among how many GPUs.
    pub degree: u32,
    /// Samples of a batch.
    pub batch_size: u64,
    /// What each layer needs alone on its GPUs, of one of them.
    pub isolated: Vec<Bytes>,
    /// What each adds to layers before it; may be negative. That of the first has no meaning.
    pub added: Vec<i64>,
}

/// All measurements of a model, and what it is to be trained with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    layer_sizes: Vec<usize>,
    measurements: Vec<Measurement>,
    target_batch_size: u64,
    schedule: Schedule,
    microbatches: u64,
    fit: Fit,
}

/// A profile as a file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    layers: usize,
    #[serde(default)]
    layer_sizes: Option<Vec<usize>>,
    measurements: Vec<FileMeasurement>,
    target_batch_size: u64,
    #[serde(default)]
    schedule: Schedule,
    #[serde(default = "one")]
    microbatches: u64,
    #[serde(default)]
    fit: Fit,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileMeasurement {
    parallelism: Parallelism,
    degree: u64,
    batch_size: u64,
    isolated_bytes: Vec<Option<f64>>,
    added_bytes: Vec<Option<f64>>,
}

pub(super) fn one() -> u64 {
    1
}

/// The degree, if a stage with this parallelism can have it.
pub(super) fn degree_of(at: usize, parallelism: Parallelism, degree: u64) -> Result<u32, PartitionError> {
    let is_possible = match parallelism {
        Parallelism::Pipeline => degree == 1,
        Parallelism::Data | Parallelism::Tensor => {
            degree.is_power_of_two() && degree <= limits::PARTITION_GPUS_MAX as u64
        }
    };
    let degree32 = u32::try_from(degree).ok().filter(|_| is_possible);
    degree32.ok_or(PartitionError::Degree { at, parallelism, degree })
}

/// The number, if a batch can have so many samples or parts.
pub(super) fn batch_of(what: &'static str, value: u64) -> Result<u64, PartitionError> {
    let range = 1..=limits::PARTITION_BATCH_MAX;
    if range.contains(&value) { Ok(value) } else { Err(PartitionError::Batch { what, value }) }
}

impl FileMeasurement {
    fn checked(self, at: usize, layers: usize) -> Result<Measurement, PartitionError> {
        let degree = degree_of(at, self.parallelism, self.degree)?;
        let batch_size = batch_of("batch_size of a measurement", self.batch_size)?;
        let largest = Bytes::LARGEST.get() as f64;
        let figure = |layer: usize, metric: Metric, value: Option<f64>, range: std::ops::RangeInclusive<f64>| {
            let shown = || value.map_or_else(|| "null".to_owned(), |value| value.to_string());
            let wrong = || PartitionError::Figure { at, layer, metric, value: shown() };
            value.map(f64::round).filter(|bytes| range.contains(bytes)).ok_or_else(wrong)
        };
        for (metric, list) in [(Metric::Isolated, &self.isolated_bytes), (Metric::Added, &self.added_bytes)] {
            if list.len() != layers {
                return Err(PartitionError::Length { at, metric, found: list.len(), layers });
            }
        }
        let isolated = self.isolated_bytes.into_iter().enumerate();
        let isolated = isolated.map(|(layer, value)| {
            figure(layer, Metric::Isolated, value, 1.0..=largest).map(|bytes| Bytes::new(bytes as u64))
        });
        let added = self.added_bytes.into_iter().enumerate();
        let added = added.map(|(layer, value)| match layer {
            0 => Ok(0),
            _ => figure(layer, Metric::Added, value, -largest..=largest).map(|bytes| bytes as i64),
        });
        Ok(Measurement {
            // Shared among one, it is not shared.
            parallelism: if degree == 1 { Parallelism::Pipeline } else { self.parallelism },
            degree,
            batch_size,
            isolated: isolated.collect::<Result<_, _>>()?,
            added: added.collect::<Result<_, _>>()?,
        })
    }
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    ///
    /// It is none, or says what cannot be, or two things that cannot both be.
    pub fn from_json(text: &[u8]) -> Result<Profile, PartitionError> {
        let file: File =
            serde_json::from_slice(text).map_err(|source| PartitionError::Json { what: "profile", source })?;
        if !(1..=limits::PARTITION_LAYERS_MAX).contains(&file.layers) {
            return Err(PartitionError::Layers(file.layers));
        }
        if !(1..=limits::PARTITION_MEASUREMENTS_MAX).contains(&file.measurements.len()) {
            return Err(PartitionError::Measurements(file.measurements.len()));
        }
        let measurements = file.measurements.into_iter().enumerate();
        let measurements = measurements.map(|(at, measurement)| measurement.checked(at, file.layers));
        let profile = Profile {
            layer_sizes: file.layer_sizes.unwrap_or_else(|| vec![1; file.layers]),
            measurements: measurements.collect::<Result<_, _>>()?,
            target_batch_size: file.target_batch_size,
            schedule: file.schedule,
            microbatches: file.microbatches,
            fit: file.fit,
        };
        profile.check_sizes(file.layers)?;
        profile.checked()
    }

    /// A profile of these measurements, which have an entry for each layer each; `layer_sizes` says of how many layers of the model each of them is.
    ///
    /// # Errors
    ///
    /// They contradict each other, or do not make a profile.
    pub fn new(
        layer_sizes: Vec<usize>,
        measurements: Vec<Measurement>,
        target_batch_size: u64,
    ) -> Result<Profile, PartitionError> {
        Partial::new(layer_sizes, measurements, target_batch_size, Schedule::default(), 1)?.0.with_pipeline()
    }

    fn check_sizes(&self, layers: usize) -> Result<(), PartitionError> {
        let (found, smallest) = (self.layer_sizes.len(), self.layer_sizes.iter().min().copied().unwrap_or(0));
        let sum = self.layer_sizes.iter().fold(0_usize, |sum, size| sum.saturating_add(*size));
        if found == layers && smallest > 0 && sum <= limits::PARTITION_LAYERS_MAX {
            return Ok(());
        }
        Err(PartitionError::LayerSizes { found, layers, smallest })
    }

    /// The same with each thing once, if all of it can be and there is all of it.
    fn checked(self) -> Result<Profile, PartitionError> {
        self.consistent()?.with_pipeline()
    }

    fn with_pipeline(self) -> Result<Profile, PartitionError> {
        let has_pipeline = self.measurements.iter().any(|one| one.parallelism == Parallelism::Pipeline);
        if has_pipeline { Ok(self) } else { Err(PartitionError::NoPipeline) }
    }

    /// The same with each thing once, if all of it can be.
    fn consistent(mut self) -> Result<Profile, PartitionError> {
        if self.measurements.len() > limits::PARTITION_MEASUREMENTS_MAX {
            return Err(PartitionError::Measurements(self.measurements.len()));
        }
        batch_of("target_batch_size", self.target_batch_size)?;
        batch_of("microbatches", self.microbatches)?;
        // Where it makes a difference.
        if self.schedule == Schedule::OneForwardOneBackward && self.microbatches > self.target_batch_size {
            let (batch, microbatches) = (self.target_batch_size, self.microbatches);
            return Err(PartitionError::Microbatches { batch, microbatches });
        }
        self.measurements.iter_mut().for_each(|one| one.added[0] = 0);
        let of = |one: &Measurement| (one.parallelism, one.degree, one.batch_size);
        self.measurements.sort_by_key(of);
        for pair in self.measurements.windows(2) {
            if let [first, second] = pair
                && of(first) == of(second)
            {
                agree(first, second)?;
            }
        }
        self.measurements.dedup_by_key(|one| of(one));
        Ok(self)
    }

    /// The same for another schedule, with so many micro-batches of a batch.
    ///
    /// # Errors
    ///
    /// The batch has fewer samples.
    pub fn scheduled(mut self, schedule: Schedule, microbatches: u64) -> Result<Profile, PartitionError> {
        (self.schedule, self.microbatches) = (schedule, microbatches);
        self.checked()
    }

    /// The same with another curve for degrees above those measured.
    #[must_use]
    pub fn fitted(mut self, fit: Fit) -> Profile {
        self.fit = fit;
        self
    }

    /// How many layers it has, merged ones counted once.
    pub fn layers(&self) -> usize {
        self.layer_sizes.len()
    }

    /// Of how many layers of the model each is.
    pub fn layer_sizes(&self) -> &[usize] {
        &self.layer_sizes
    }

    /// By parallelism, degree and batch size.
    pub fn measurements(&self) -> &[Measurement] {
        &self.measurements
    }

    /// Samples of a batch of the target run.
    pub fn target_batch_size(&self) -> u64 {
        self.target_batch_size
    }

    /// In which order micro-batches go.
    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Into how many a batch is split.
    pub fn microbatches(&self) -> u64 {
        self.microbatches
    }

    /// Which curve is for degrees above those measured.
    pub fn fit(&self) -> Fit {
        self.fit
    }

    /// As a file has it.
    pub fn to_json(&self) -> Value {
        let measurement = |one: &Measurement| {
            json!({
                "parallelism": one.parallelism.name(),
                "degree": one.degree,
                "batch_size": one.batch_size,
                "isolated_bytes": one.isolated.iter().map(|bytes| bytes.get()).collect::<Vec<_>>(),
                "added_bytes": one.added,
            })
        };
        let mut object = json!({ "layers": self.layers() });
        if self.layer_sizes.iter().any(|size| *size != 1) {
            object["layer_sizes"] = json!(self.layer_sizes);
        }
        object["measurements"] = self.measurements.iter().map(measurement).collect();
        object["target_batch_size"] = json!(self.target_batch_size);
        object["schedule"] = json!(self.schedule.name());
        object["microbatches"] = json!(self.microbatches);
        if self.fit != Fit::default() {
            object["fit"] = json!(self.fit.name());
        }
        object
    }
}

/// Two measurements of the same thing, which say the same.
fn agree(first: &Measurement, second: &Measurement) -> Result<(), PartitionError> {
    let isolated = first.isolated.iter().zip(&second.isolated);
    let isolated = isolated.map(|(one, other)| (one.get() as i64, other.get() as i64)).enumerate();
    let added = first.added.iter().copied().zip(second.added.iter().copied()).enumerate();
    let all = isolated.map(|pair| (Metric::Isolated, pair)).chain(added.map(|pair| (Metric::Added, pair)));
    for (metric, (layer, (one, other))) in all {
        if one != other {
            let Measurement { parallelism, degree, batch_size, .. } = *first;
            return Err(PartitionError::Twice {
                parallelism,
                degree,
                batch_size,
                layer,
                metric,
                first: one,
                second: other,
            });
        }
    }
    Ok(())
}
