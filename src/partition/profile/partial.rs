//! What one file tells of a profile: stages that are not shared may be measured in one, and those that are, with layers that were merged in between, in another (III.A.3).

use super::{Fit, Measurement, Profile, Schedule, batch_of, degree_of};
use crate::limits;
use crate::partition::{Metric, PartitionError};

/// A profile but for this: that pipeline parallelism was measured, another may tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partial(pub(super) Profile);

impl From<Profile> for Partial {
    fn from(profile: Profile) -> Partial {
        Partial(profile)
    }
}

impl Partial {
    /// These measurements, which have an entry for each layer each; `layer_sizes` says of how many layers of the model each of them is.
    ///
    /// # Errors
    ///
    /// They contradict each other, or cannot be.
    pub fn new(
        layer_sizes: Vec<usize>,
        measurements: Vec<Measurement>,
        target_batch_size: u64,
        schedule: Schedule,
        microbatches: u64,
    ) -> Result<Partial, PartitionError> {
        let layers = layer_sizes.len();
        if !(1..=limits::PARTITION_LAYERS_MAX).contains(&layers) {
            return Err(PartitionError::Layers(layers));
        }
        for (at, one) in measurements.iter().enumerate() {
            for (metric, found) in [(Metric::Isolated, one.isolated.len()), (Metric::Added, one.added.len())] {
                if found != layers {
                    return Err(PartitionError::Length { at, metric, found, layers });
                }
            }
            degree_of(at, one.parallelism, u64::from(one.degree))?;
            batch_of("batch_size of a measurement", one.batch_size)?;
        }
        let fit = Fit::default();
        let profile = Profile { layer_sizes, measurements, target_batch_size, schedule, microbatches, fit };
        profile.check_sizes(layers)?;
        Ok(Partial(profile.consistent()?))
    }

    /// The profile that these make together.
    ///
    /// # Errors
    ///
    /// They are of different layers or training runs, contradict each other, or pipeline parallelism is in none of them.
    pub fn joined(parts: impl IntoIterator<Item = Partial>) -> Result<Profile, PartitionError> {
        let mut parts = parts.into_iter().map(|Partial(profile)| profile);
        let mut whole = parts.next().ok_or(PartitionError::NoPipeline)?;
        for part in parts {
            same_run(&whole, &part)?;
            if whole.fit == Fit::default() {
                whole.fit = part.fit;
            }
            whole.measurements.extend(part.measurements);
        }
        whole.checked()
    }
}

fn same_run(first: &Profile, other: &Profile) -> Result<(), PartitionError> {
    let told = |profile: &Profile| {
        [
            ("target_batch_size", profile.target_batch_size.to_string()),
            ("schedule", profile.schedule.name().to_owned()),
            ("microbatches", profile.microbatches.to_string()),
        ]
    };
    for ((what, first), (_, other)) in told(first).into_iter().zip(told(other)) {
        if first != other {
            return Err(PartitionError::Apart { what, first, other });
        }
    }
    let size = |profile: &Profile, layer: usize| profile.layer_sizes.get(layer).copied().unwrap_or(0);
    let layers = first.layers().max(other.layers());
    match (0..layers).find(|layer| size(first, *layer) != size(other, *layer)) {
        Some(layer) => {
            let (first, other) = (size(first, layer), size(other, layer));
            Err(PartitionError::OtherLayers { layer, first, other })
        }
        None => Ok(()),
    }
}
