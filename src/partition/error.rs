//! Why there is no profile, no prediction or no plan.

use super::Parallelism;
use crate::error::ErrorKind;
use crate::limits::{PARTITION_BATCH_MAX, PARTITION_GPUS_MAX, PARTITION_LAYERS_MAX, PARTITION_MEASUREMENTS_MAX};
use crate::units::Bytes;

/// Which of the two figures of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Metric {
    /// What the layer needs alone on a GPU.
    Isolated,
    /// What it adds to the layers before it on its GPU.
    Added,
}

impl std::fmt::Display for Metric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Metric::Isolated => "isolated_bytes",
            Metric::Added => "added_bytes",
        })
    }
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum PartitionError {
    /// The text is no JSON, or says something that nobody asks for.
    #[error("this is no {what}")]
    Json {
        /// What was expected.
        what: &'static str,
        /// Where it is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// No layers, or too many.
    #[error(
        "{0} layers cannot be cut: 1 to {PARTITION_LAYERS_MAX} can; `stitchd partition merge --merge-to` makes fewer of them"
    )]
    Layers(usize),
    /// No measurements, or too many.
    #[error("{0} measurements make no profile: 1 to {PARTITION_MEASUREMENTS_MAX} do")]
    Measurements(usize),
    /// A batch size or a number of micro-batches is impossible.
    #[error("{what} is {value}: it can be 1 to {PARTITION_BATCH_MAX}")]
    Batch {
        /// Which.
        what: &'static str,
        /// What it is.
        value: u64,
    },
    /// Results of runs that nobody said the target of.
    #[error(
        "target_batch_size is missing: write the samples of a batch of the target run, and the batch_size of each run, which is a half or a quarter of that (`stitchd partition runs --target-batch` fills both in)"
    )]
    NoTarget,
    /// More micro-batches than the batch has samples.
    #[error("a batch of {batch} cannot be split into {microbatches} micro-batches; say fewer")]
    Microbatches {
        /// Samples.
        batch: u64,
        /// Parts.
        microbatches: u64,
    },
    /// A list has an entry for each layer.
    #[error("measurement {at}: {metric} has {found} entries and the profile {layers} layers; one is needed for each")]
    Length {
        /// Which measurement, counted from 0.
        at: usize,
        /// Which list.
        metric: Metric,
        /// Its length.
        found: usize,
        /// How many layers there are.
        layers: usize,
    },
    /// The sizes of merged layers do not fit.
    #[error(
        "layer_sizes has {found} entries for {layers} layers, the smallest {smallest}: one is needed for each, at least 1, {PARTITION_LAYERS_MAX} together"
    )]
    LayerSizes {
        /// Its length.
        found: usize,
        /// How many layers there are.
        layers: usize,
        /// The smallest of it.
        smallest: usize,
    },
    /// A degree that stages cannot have.
    #[error(
        "measurement {at}: a degree of {degree} is not possible with {parallelism} parallelism: it is 1 for pipeline, and a power of two up to {PARTITION_GPUS_MAX} for data and tensor"
    )]
    Degree {
        /// Which measurement or run.
        at: usize,
        /// Its parallelism.
        parallelism: Parallelism,
        /// Its degree.
        degree: u64,
    },
    /// A figure that no measurement gives.
    #[error("measurement {at}, layer {layer}: {metric} is {value}, which cannot be measured{}", match metric {
        Metric::Isolated => ": it is a number of bytes above 0",
        Metric::Added => ": it is a number of bytes, below 0 where memory is saved",
    })]
    Figure {
        /// Which measurement.
        at: usize,
        /// Which layer.
        layer: usize,
        /// Which list.
        metric: Metric,
        /// What it says.
        value: String,
    },
    /// The same was measured twice and came out differently.
    #[error(
        "contradictory measurements: {parallelism} parallelism of degree {degree} at batch size {batch_size} is there twice, and layer {layer} has {metric} {first} and {second}; keep one of them"
    )]
    Twice {
        /// Of which parallelism.
        parallelism: Parallelism,
        /// And degree.
        degree: u32,
        /// At which batch size.
        batch_size: u64,
        /// The first layer that differs.
        layer: usize,
        /// In which figure.
        metric: Metric,
        /// One of them.
        first: i64,
        /// The other.
        second: i64,
    },
    /// Nothing was measured without data and tensor parallelism.
    #[error(
        "there is no measurement with pipeline parallelism, on which all predictions rest; `stitchd partition runs` says which runs give it"
    )]
    NoPipeline,
    /// A straight line has two points.
    #[error(
        "pipeline parallelism was measured at batch size {measured} only, and batch size {wanted} is asked for: measure a second batch size"
    )]
    OneBatch {
        /// Where it was measured.
        measured: u64,
        /// Where it is asked for.
        wanted: f64,
    },
    /// The measurements say that a stage needs no memory.
    #[error(
        "contradictory measurements: by them layers {first} to {last} need {bytes:.0} bytes with {parallelism} parallelism of degree {degree} at batch size {batch}; check isolated_bytes of layer {first} and added_bytes of those after it"
    )]
    Impossible {
        /// First layer.
        first: usize,
        /// Last layer.
        last: usize,
        /// With which parallelism.
        parallelism: Parallelism,
        /// Of which degree.
        degree: u32,
        /// At which batch size.
        batch: f64,
        /// What they would need.
        bytes: f64,
    },
    /// A mesh without GPUs, or with too many.
    #[error("{nodes} nodes of {gpus_per_node} GPUs are no mesh: 1 to {PARTITION_GPUS_MAX} GPUs are")]
    Mesh {
        /// Nodes.
        nodes: usize,
        /// GPUs of each.
        gpus_per_node: usize,
    },
    /// There are GPUs that nobody would use.
    #[error(
        "{gpus} GPUs are more than {layers} layers can use: a stage has at least one layer and at most {degree} GPUs (within a node, and as far as data or tensor parallelism was measured), {most} together; take fewer GPUs"
    )]
    TooManyGpus {
        /// GPUs.
        gpus: usize,
        /// Layers.
        layers: usize,
        /// The most GPUs of a stage.
        degree: u32,
        /// The most that can be used.
        most: usize,
    },
    /// The degrees that there are do not add up to the GPUs of the nodes.
    #[error(
        "no plan fits: {layers} layers in stages of {degrees} GPUs do not fill {nodes} nodes of {gpus_per_node} exactly; take other numbers of nodes or GPUs"
    )]
    NoPlan {
        /// Layers.
        layers: usize,
        /// The degrees that stages can have, in words.
        degrees: String,
        /// Nodes.
        nodes: usize,
        /// GPUs of each.
        gpus_per_node: usize,
    },
    /// More than can be searched.
    #[error(
        "{count} {what} are more than the search takes, {max}; {}",
        if *is_mesh { "nodes with a power of two of GPUs, or smaller degrees, have fewer" } else { "`stitchd partition merge --merge-to` makes fewer layers, and nodes with a power of two of GPUs are easier" }
    )]
    TooLarge {
        /// What there are too many of.
        what: &'static str,
        /// Of nodes and GPUs alone, whatever the layers are.
        is_mesh: bool,
        /// How many.
        count: usize,
        /// How many it takes.
        max: usize,
    },
    /// Layers in the middle are alone only where there is a GPU before and behind them.
    #[error("{layers} layers on {gpus} {}: which of them needs what cannot be told from fewer than 2; profile on more GPUs", if *degree > 1 { format!("GPUs in groups of {degree}") } else { "GPUs".to_owned() })]
    TooFewGpus {
        /// Layers.
        layers: usize,
        /// GPUs.
        gpus: usize,
        /// GPUs of each part.
        degree: u32,
    },
    /// More runs than anybody makes.
    #[error(
        "the runs of {layers} layers on {gpus} GPUs have up to {parts} parts together, more than are listed, {max}: measure on fewer GPUs"
    )]
    TooManyParts {
        /// Layers.
        layers: usize,
        /// GPUs.
        gpus: usize,
        /// Parts of all runs.
        parts: usize,
        /// How many are listed.
        max: usize,
    },
    /// A run's parts are not the model.
    #[error(
        "run {run}: its partition has {sum} layers in {parts} parts, and the model has {layers}; each part has at least one"
    )]
    Partition {
        /// Which run, counted from 0.
        run: usize,
        /// Layers of its parts.
        sum: usize,
        /// How many parts.
        parts: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A run has no peaks, or not one for each part.
    #[error(
        "run {run}: peak_bytes has {found} entries for {parts} parts: write the peak of a GPU of each part, in the order of the parts"
    )]
    Peaks {
        /// Which run.
        run: usize,
        /// How many peaks.
        found: usize,
        /// How many parts.
        parts: usize,
    },
    /// A run has no batch size, or an impossible peak.
    #[error("run {run}: {what} is missing or 0; fill it in")]
    Unfilled {
        /// Which run.
        run: usize,
        /// What is missing.
        what: &'static str,
    },
    /// A run was made twice and came out differently.
    #[error(
        "contradictory measurements: runs {first} and {second} are the same, and part {part} has peaks of {} and {}; keep one of them",
        peaks[0], peaks[1]
    )]
    Runs {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
        /// The part that is furthest apart.
        part: usize,
        /// Its peaks.
        peaks: [Bytes; 2],
    },
    /// A run has a peak that no device has.
    #[error("run {run}: a peak of {bytes} bytes is more than any device has, {}", Bytes::LARGEST)]
    Peak {
        /// Which run.
        run: usize,
        /// What it says.
        bytes: u64,
    },
    /// Merged layers are not those of the model.
    #[error(
        "layer_sizes has {entries} entries, the smallest {smallest}, {sum} together: each is how many of the model's layers were merged, and all are its {layers} layers"
    )]
    Merged {
        /// How many there are.
        entries: usize,
        /// The smallest of them.
        smallest: usize,
        /// Layers of all of them.
        sum: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A run's part ends within layers that stay together.
    #[error(
        "run {run}: a part ends within merged layer {layer}, which stays whole; `stitchd partition runs --merged` lists runs that leave it so"
    )]
    CutThrough {
        /// Which run.
        run: usize,
        /// Which of the merged layers, counted from 0.
        layer: usize,
    },
    /// Files that are to make one profile say different things of the training run.
    #[error("the files are not of one training run: {what} is {first} in one and {other} in another")]
    Apart {
        /// Of which thing.
        what: &'static str,
        /// What one of them says.
        first: String,
        /// What another says.
        other: String,
    },
    /// Files that are to make one profile have other layers.
    #[error(
        "the files are not of the same layers: layer {layer} is {first} of the model's in one and {other} in another; merge layers once, and measure those (`stitchd partition runs --merged`)"
    )]
    OtherLayers {
        /// The first that differs.
        layer: usize,
        /// Of how many it is in one of them.
        first: usize,
        /// And in another; 0 where it has fewer.
        other: usize,
    },
    /// The runs do not tell what a layer needs.
    #[error(
        "no run with {parallelism} parallelism of degree {degree} at batch size {batch_size} tells {metric} of layer {layer}: {wanted} would"
    )]
    Untold {
        /// Of which parallelism.
        parallelism: Parallelism,
        /// And degree.
        degree: u32,
        /// At which batch size.
        batch_size: u64,
        /// Which figure.
        metric: Metric,
        /// Of which layer.
        layer: usize,
        /// The run that tells it.
        wanted: String,
    },
    /// Layers are merged to more than there are.
    #[error("{layers} layers cannot be merged to {wanted}: say 1 to {layers}")]
    MergeTo {
        /// How many there are.
        layers: usize,
        /// How many are asked for.
        wanted: usize,
    },
    /// Layers that were merged have together more bytes than any device.
    #[error("layer {layer}: {bytes} bytes are more than any device has, {}", Bytes::LARGEST)]
    Sum {
        /// The merged layer.
        layer: usize,
        /// Its bytes.
        bytes: i128,
    },
}

impl PartitionError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PartitionError::TooManyGpus { .. } | PartitionError::NoPlan { .. } => ErrorKind::Conflict,
            PartitionError::TooLarge { .. } | PartitionError::TooManyParts { .. } => ErrorKind::Unsupported,
            PartitionError::Untold { .. } => ErrorKind::NotFound,
            PartitionError::Json { .. }
            | PartitionError::Layers(_)
            | PartitionError::Measurements(_)
            | PartitionError::Batch { .. }
            | PartitionError::NoTarget
            | PartitionError::Microbatches { .. }
            | PartitionError::Length { .. }
            | PartitionError::LayerSizes { .. }
            | PartitionError::Degree { .. }
            | PartitionError::Figure { .. }
            | PartitionError::Twice { .. }
            | PartitionError::NoPipeline
            | PartitionError::OneBatch { .. }
            | PartitionError::Impossible { .. }
            | PartitionError::Mesh { .. }
            | PartitionError::TooFewGpus { .. }
            | PartitionError::Partition { .. }
            | PartitionError::Peaks { .. }
            | PartitionError::Unfilled { .. }
            | PartitionError::Runs { .. }
            | PartitionError::Peak { .. }
            | PartitionError::Merged { .. }
            | PartitionError::CutThrough { .. }
            | PartitionError::Apart { .. }
            | PartitionError::OtherLayers { .. }
            | PartitionError::MergeTo { .. }
            | PartitionError::Sum { .. } => ErrorKind::Invalid,
        }
    }
}
