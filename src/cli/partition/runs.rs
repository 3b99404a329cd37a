//! `stitchd partition runs`: which runs to make, as a table and as the file that is to be filled in.

use std::path::PathBuf;

use clap::Args;

use super::{profile, range, usage};
use crate::cli::table::Table;
use crate::cli::{DONE, Failure, Outcome, print_json, print_out};
use crate::partition::runs::Runs;
use crate::units::counted;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024 --json > results.json\n\nIn two parts, with fewer runs: pipeline parallelism first, then data and tensor parallelism with layers merged by what it needs:\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024 --degrees 1 --json > alone.json\n  stitchd partition merge alone.json --merge-to 16 -o coarse.json                # once its peaks are filled in\n  stitchd partition runs --merged coarse.json --gpus 16 --json > shared.json\n  stitchd partition merge coarse.json shared.json -o profile.json\n\nA partition [2, 1, 3] puts layers 0 and 1 on the first GPU (or group of GPUs), layer 2 on the second and layers 3 to 5 on the third. Two iterations of each run are enough. The JSON is the file that `partition merge` reads, once each run has its \"peak_bytes\": the peak of one GPU of each part, in order. Or \"traces\": a recorded trace of each, by name."
)]
pub(super) struct RunsArgs {
    /// Layers of the model
    #[arg(long, value_name = "L", required_unless_present = "merged", conflicts_with = "merged")]
    layers: Option<usize>,
    /// Instead: a profile whose layers were merged. Listed are the runs with data and tensor parallelism that it lacks, its merged layers as one each
    #[arg(long, value_name = "PROFILE")]
    merged: Option<PathBuf>,
    /// GPUs of the machine that measures
    #[arg(long, value_name = "G")]
    gpus: usize,
    /// Samples of a batch of the target run; measured are a half and a quarter of it
    #[arg(long, value_name = "B", conflicts_with = "merged")]
    target_batch: Option<u64>,
    /// Degrees of data and tensor parallelism to measure; 1 for none
    #[arg(long, value_name = "D,D", value_delimiter = ',', default_value = "2,4")]
    degrees: Vec<u32>,
    /// Measure data and tensor parallelism with half of the batch only: fewer runs, and what a batch adds is taken from pipeline parallelism
    #[arg(long)]
    one_batch: bool,
}

pub(super) fn list(args: &RunsArgs, json: bool) -> Outcome {
    let runs = match (&args.merged, args.layers) {
        (Some(_), _) if args.degrees.iter().all(|degree| *degree == 1) => {
            let text = "--degrees: with merged layers data and tensor parallelism are measured, of degrees above 1";
            return Err(Failure::Usage(text.into()));
        }
        (Some(path), _) => Runs::merged(&profile::read(path)?, args.gpus, &args.degrees),
        (None, Some(layers)) => Runs::new(layers, args.gpus, &args.degrees, args.target_batch),
        (None, None) => return Err(Failure::Usage("how many layers?".into())),
    };
    let mut runs = runs.map_err(|error| usage(&error))?;
    if args.one_batch {
        runs = runs.at_one_batch();
    }
    let notes = notes(&runs, args.target_batch);
    if json {
        print_json(&runs.to_json());
        notes.iter().for_each(|note| eprintln!("note: {note}"));
    } else {
        show(&runs);
        notes.iter().for_each(|note| outln!("\nnote: {note}"));
        if args.target_batch.is_none() && args.merged.is_none() {
            outln!("\nnote: --target-batch fills in the batch sizes");
        }
        outln!("\n--json prints the file that `partition merge` reads: add \"peak_bytes\" to each run");
    }
    DONE
}

/// What the runs are not, a sentence each.
fn notes(runs: &Runs, target: Option<u64>) -> Vec<String> {
    let mut notes = Vec::new();
    if runs.sets.iter().any(|set| set.partitions.len() > 2 && set.partitions.iter().all(|run| run.len() < 3)) {
        notes.push(
            "in two parts a layer in the middle is never alone: what it would need is worked out from what others add"
                .to_owned(),
        );
    }
    notes.extend(runs.left_out.iter().map(|degree| {
        format!("there are too few GPUs for groups of {degree}: its runs are left out, and so is it from plans")
    }));
    if let Some(target) = target.filter(|target| target % 4 != 0) {
        notes.push(format!("{target} has no whole quarter: measured are batches of {} and {}", target / 2, target / 4));
    }
    notes
}

fn show(runs: &Runs) {
    let (count, all) = (counted(runs.count() as u64, "run"), runs.count_unmerged());
    if all > runs.count() {
        outln!("{count}, two iterations each are enough; with all {} layers it would be {all}", runs.layers());
        outln!("merged layers are on one part: {}", merged(runs).join(", "));
    } else {
        outln!("{count}, two iterations each are enough");
    }
    let mut table = Table::new(&["parallelism", ">degree", ">batch size", ">runs", ">layers on a part, at most"]);
    for set in &runs.sets {
        table.row(vec![
            set.parallelism.name().into(),
            set.degree.to_string(),
            set.batch_size.map_or_else(|| format!("{} of the target", set.share), |batch| batch.to_string()),
            set.partitions.len().to_string(),
            Runs::largest_part(set).to_string(),
        ]);
    }
    print_out(&table);
    let mut degree = None;
    for set in &runs.sets {
        // All sets of a degree have the same.
        if degree.replace(set.degree) == Some(set.degree) {
            continue;
        }
        match set.degree {
            1 => outln!("\nlayers on each GPU, run by run:"),
            degree => outln!("\nlayers on each group of {degree} GPUs, run by run:"),
        }
        set.partitions.iter().for_each(|partition| outln!("  {partition:?}"));
    }
}

/// The layers of the model that each merged one is of.
fn merged(runs: &Runs) -> Vec<String> {
    let mut next = 0;
    let layers = runs.layer_sizes().iter().filter_map(|size| {
        next += size;
        (*size > 1).then(|| range(next - size, next - 1))
    });
    layers.collect()
}
