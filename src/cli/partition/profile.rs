//! `stitchd partition merge`: profiles, from what runs and recorded traces measured, read and written.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::{traces, usage, usage_of};
use crate::cli::{DONE, Failure, Outcome, file_error, print_json, trace, whole_file};
use crate::error::chain;
use crate::limits;
use crate::partition::merge::{Disagreement, Results, merge_layers};
use crate::partition::{Partial, Profile};
use crate::units::{Bytes, counted};

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd partition merge results.json -o profile.json\n  stitchd partition merge profile.json --merge-to 16 -o coarse.json\n  stitchd partition merge coarse.json shared.json -o profile.json                 # runs in two parts, see `partition runs`\n  stitchd partition merge --trace 512=half.stitchtrace --trace 256=quarter.stitchtrace --target-batch 1024 -o profile.json\n\nWith --trace the whole model was recorded on one GPU, with modules. A layer is what is live at the peak of all modules with its number (the first in `transformer.h.3.mlp`); what has none goes to the first or the last layer, by when it is first asked for. That is an estimate: it does not know buffers for communication, what a layer needs at a peak of its own, nor what data and tensor parallelism would change, and the plan has pipeline stages of one GPU only."
)]
pub(super) struct MergeArgs {
    /// What `partition runs --json` gave, with the peaks of each run; or a profile. Several make one profile together
    #[arg(value_name = "FILE", required_unless_present = "trace", conflicts_with = "trace")]
    results: Vec<PathBuf>,
    /// Instead: a trace of the whole model at this batch size
    #[arg(long, value_name = "BATCH=FILE", value_parser = batch_and_file, requires = "target_batch")]
    trace: Vec<(u64, PathBuf)>,
    /// Samples of a batch of the target run
    #[arg(long, value_name = "B", requires = "trace")]
    target_batch: Option<u64>,
    /// Merge layers until so many are left, those first that need least
    #[arg(long, value_name = "N")]
    merge_to: Option<usize>,
    /// Write the profile here, and not on standard output
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn batch_and_file(text: &str) -> Result<(u64, PathBuf), String> {
    let (batch, file) = text.split_once('=').ok_or("write the batch size, '=' and the trace, such as 512=a.csv")?;
    let batch = batch.parse().map_err(|_| format!("'{batch}' is no batch size"))?;
    Ok((batch, PathBuf::from(file)))
}

pub(super) fn merge(args: &MergeArgs, json: bool) -> Outcome {
    if let Some(out) = &args.out {
        let traces = args.trace.iter().map(|(_, path)| path);
        args.results.iter().chain(traces).try_for_each(|input| whole_file::is_not(out, input))?;
    }
    if args.target_batch.is_some() && args.trace.is_empty() {
        let text = "--target-batch is for --trace: a file of results says its own, as target_batch_size";
        return Err(Failure::Usage(text.into()));
    }
    let (profile, notes) = match args.target_batch {
        Some(target) => traces::profile(&args.trace, target).map(|(profile, note)| (profile, vec![note]))?,
        None => of_results(&args.results)?,
    };
    write(&merged(profile, args.merge_to)?, &notes, args.out.as_deref(), json)
}

/// Reads a profile.
pub(super) fn read(path: &Path) -> Result<Profile, Failure> {
    let text = whole(path)?;
    if serde_json::from_slice::<Kind>(&text).is_ok_and(|kind| kind.measurements.is_none() && kind.runs.is_some()) {
        let path = path.display();
        return Err(Failure::Usage(format!(
            "{path} is a file of results: `stitchd partition merge {path} -o profile.json` makes a profile of it"
        )));
    }
    Profile::from_json(&text).map_err(usage_of(path))
}

/// The same with so many layers, if somebody wants fewer.
pub(super) fn merged(profile: Profile, merge_to: Option<usize>) -> Result<Profile, Failure> {
    match merge_to {
        Some(wanted) => merge_layers(&profile, wanted).map_err(|error| usage(&error)),
        None => Ok(profile),
    }
}

/// A whole file, if it is no longer than one can be.
fn whole(path: &Path) -> Result<Vec<u8>, Failure> {
    let (mut bytes, most) = (Vec::new(), limits::PARTITION_FILE_LEN_MAX);
    let file = File::open(path).map_err(file_error(path))?;
    file.take(most + 1).read_to_end(&mut bytes).map_err(file_error(path))?;
    if bytes.len() as u64 > most {
        let most = Bytes::new(most);
        return Err(Failure::Usage(format!("{} is longer than a profile or results can be, {most}", path.display())));
    }
    Ok(bytes)
}

/// The profile of files of results and of profiles, and what is to be said of it.
fn of_results(paths: &[PathBuf]) -> Result<(Profile, Vec<String>), Failure> {
    let parts = paths.iter().map(|path| partial(path)).collect::<Result<Vec<_>, _>>()?;
    let (parts, notes): (Vec<Partial>, Vec<Option<String>>) = parts.into_iter().unzip();
    let profile = Partial::joined(parts).map_err(|error| {
        let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        Failure::Usage(format!("{}: {}", paths.join(", "), chain(&error)))
    })?;
    Ok((profile, notes.into_iter().flatten().collect()))
}

/// How far runs are from what they tell together, if that is more than little: no prediction is better than that.
fn disagreement(path: &Path, results: &Results) -> Result<Option<String>, Failure> {
    const SAID_FROM: f64 = 0.01;
    let furthest = results.disagreement().map_err(usage_of(path))?.filter(|furthest| furthest.share >= SAID_FROM);
    Ok(furthest.map(|Disagreement { run, part, measured, told, share }| {
        let told = Bytes::new(told.max(0.0) as u64);
        format!(
            "note: {}: the runs do not agree: part {part} of run {run} peaked at {measured}, and by what all of them tell of its layers it would be {told}, {:.0} % apart. Measure it again; predictions may be as far off, and the plan that looks best is one whose are too low",
            path.display(),
            share * 100.0
        )
    }))
}

/// What tells a profile from results.
#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    measurements: Option<IgnoredAny>,
    #[serde(default)]
    runs: Option<IgnoredAny>,
}

fn partial(path: &Path) -> Result<(Partial, Option<String>), Failure> {
    let text = whole(path)?;
    let is_profile = serde_json::from_slice::<Kind>(&text).is_ok_and(|kind| kind.measurements.is_some());
    if is_profile {
        let profile = Profile::from_json(&text).map_err(usage_of(path))?;
        return Ok((Partial::from(profile), None));
    }
    let mut results = Results::from_json(&text).map_err(usage_of(path))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for (at, run) in results.runs.iter_mut().enumerate() {
        match (&run.traces, &run.peak_bytes) {
            (Some(_), Some(_)) => {
                let text = format!("{}: run {at} has both peak_bytes and traces; keep one of them", path.display());
                return Err(Failure::Usage(text));
            }
            (Some(traces), None) => {
                let peaks =
                    traces.iter().map(|trace| Ok(trace::read(&folder.join(trace))?.trace.summary().peak_live.get()));
                run.peak_bytes = Some(peaks.collect::<Result<_, Failure>>()?);
            }
            (None, _) => {}
        }
    }
    let partial = results.partial().map_err(usage_of(path))?;
    Ok((partial, disagreement(path, &results)?))
}

fn write(profile: &Profile, notes: &[String], out: Option<&Path>, json: bool) -> Outcome {
    let object = profile.to_json();
    let Some(out) = out else {
        // What stands there is the profile and nothing else.
        notes.iter().for_each(|note| eprintln!("{note}"));
        print_json(&object);
        return DONE;
    };
    let text = format!("{object}\n");
    let len = whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, text.as_bytes()))?;
    let (layers, measurements) = (profile.layers(), profile.measurements().len());
    if json {
        let out = out.display().to_string();
        print_json(
            &json!({ "out": out, "written_bytes": len, "layers": layers, "measurements": measurements, "notes": notes }),
        );
    } else {
        let (layers, measurements) = (counted(layers as u64, "layer"), counted(measurements as u64, "measurement"));
        outln!("{}: a profile of {layers} with {measurements}", out.display());
        notes.iter().for_each(|note| outln!("{note}"));
    }
    DONE
}
