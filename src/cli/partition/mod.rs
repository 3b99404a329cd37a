//! `stitchd partition`: where to cut a model for pipelined training and how to share each stage; `runs` and `merge` say what to measure, and make a profile of it.

mod answer;
mod profile;
mod runs;
mod traces;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use super::{Failure, Outcome};
use crate::error::chain;
use crate::partition::PartitionError;
use crate::units::Bytes;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024        # what to measure\n  stitchd partition merge results.json -o profile.json                    # with peaks filled in\n  stitchd partition profile.json --nodes 4 --gpus-per-node 4              # where to cut\n  stitchd partition profile.json --nodes 4 --gpus-per-node 4 --memory 40GiB\n\nThe plan is the one with the least memory on its fullest GPU, of all there are; it says nothing of speed. Exit code 1 when it needs more than --memory."
)]
pub(super) struct PartitionArgs {
    #[command(subcommand)]
    command: Option<PartitionCommand>,
    /// A profile: for each layer what it needs alone on a GPU and what it adds to others (`partition merge` makes one)
    #[arg(required = true)]
    profile: Option<PathBuf>,
    /// How many machines the model is trained on
    #[arg(long, value_name = "N", required = true)]
    nodes: Option<usize>,
    /// How many GPUs each has
    #[arg(long, value_name = "G", required = true)]
    gpus_per_node: Option<usize>,
    /// The order of micro-batches, if not the profile's
    #[arg(long, value_name = "NAME")]
    schedule: Option<ScheduleName>,
    /// Into how many micro-batches a batch is split, if not as the profile says
    #[arg(long, value_name = "M")]
    microbatches: Option<u64>,
    /// The curve for degrees above those measured, if not the profile's: logarithm, as CAPTURE has it, or inverse (a + b / degree), which says more where much is the same on every GPU
    #[arg(long, value_name = "CURVE")]
    fit: Option<FitName>,
    /// What each GPU has: says whether the plan fits, and ends with exit code 1 if not
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Merge layers first until so many are left: coarser, and faster
    #[arg(long, value_name = "N")]
    merge_to: Option<usize>,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

/// Names of schedules, as profiles have them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleName {
    #[value(name = "gpipe")]
    GPipe,
    #[value(name = "1f1b")]
    OneForwardOneBackward,
}

/// Names of curves, as profiles have them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FitName {
    Logarithm,
    Inverse,
}

#[derive(Debug, Subcommand)]
enum PartitionCommand {
    /// Says which short training runs to make so that every layer is measured
    Runs(runs::RunsArgs),
    /// Makes a profile of what the runs measured, or a coarser one of a profile
    Merge(profile::MergeArgs),
}

pub(super) fn run(args: &PartitionArgs) -> Outcome {
    match (&args.command, &args.profile, args.nodes, args.gpus_per_node) {
        (Some(PartitionCommand::Runs(of)), ..) => runs::list(of, args.json),
        (Some(PartitionCommand::Merge(of)), ..) => profile::merge(of, args.json),
        (None, Some(profile), Some(nodes), Some(gpus_per_node)) => {
            answer::recommend(args, profile, nodes, gpus_per_node)
        }
        (None, ..) => Err(Failure::Usage("which profile, on how many nodes and GPUs?".into())),
    }
}

fn usage(error: &PartitionError) -> Failure {
    Failure::Usage(chain(error))
}

/// The same of something in a file.
fn usage_of(path: &Path) -> impl FnOnce(PartitionError) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::Usage(format!("{path}: {}", chain(&error)))
}

/// Layers from the first to the last, for people.
fn range(first: usize, last: usize) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}
