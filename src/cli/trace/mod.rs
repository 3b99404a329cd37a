//! `stitchd trace`: what a trace is in numbers (`info`), other people's records as traces (`import`), one form of trace into another (`convert`).

mod info;
mod target;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{DONE, Failure, Outcome, print_json};
use crate::trace::EventKind;
use crate::trace::import;
use crate::trace::import::{Contents, Imported};
use crate::trace::period::Numbering;
use crate::units::{Bytes, counted};
use target::Target;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd trace info job.csv.zst                      # requests, sizes, iterations\n  stitchd trace import rmm_log.csv -o job.stitchtrace  # a log of RMM as a trace\n  stitchd trace convert job.stitchtrace -o job.csv     # and as text"
)]
pub(super) struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    /// Says what a trace is in numbers: requests, sizes, iterations, and what is live at the peak
    #[command(
        after_help = "Examples:\n  stitchd trace info job.csv.zst\n  stitchd trace info job.stitchtrace --layers | less\n  stitchd trace info job.csv.zst --json | jq .peak_live_bytes"
    )]
    Info {
        /// A trace, or anything that can be imported (.zst and .gz are read as they are)
        file: PathBuf,
        /// Also every module: requests, bytes, its own peak, and how much of it varies
        #[arg(long)]
        layers: bool,
    },
    /// Reads what others recorded, numbers its iterations if nobody did, says what is missing, and writes a trace
    #[command(
        after_help = "Examples:\n  stitchd trace import rmm_log.csv -o job.stitchtrace.zst\n  stitchd trace import problem.csv                   # only says what would become of it"
    )]
    Import {
        /// A trace, a PyTorch memory snapshot, a log of RMM or a problem CSV, told by its first bytes
        file: PathBuf,
        /// Write the trace here: .csv or .stitchtrace, also with .zst or .gz after it
        #[arg(short, long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Writes a trace in another form, without loss
    #[command(
        after_help = "Examples:\n  stitchd trace convert job.csv.zst -o job.stitchtrace\n  stitchd trace convert job.stitchtrace -o job.csv.gz"
    )]
    Convert {
        /// A trace, or anything that can be imported
        file: PathBuf,
        /// Write the trace here: .csv or .stitchtrace, also with .zst or .gz after it
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
    },
}

pub(super) fn run(args: &TraceArgs) -> Outcome {
    match &args.command {
        TraceCommand::Info { file, layers } => info::run(file, *layers, args.json),
        TraceCommand::Import { file, out } => {
            let target = out.as_deref().map(|out| Target::of(out, file)).transpose()?;
            let (imported, numbering) = read_numbered(file)?;
            write(file, &imported, numbering, target, args.json)
        }
        TraceCommand::Convert { file, out } => {
            let target = Target::of(out, file)?;
            let imported = read(file)?;
            let has_column = imported.trace.iterations() > 1;
            let numbering = if has_column { Numbering::Column } else { Numbering::None };
            write(file, &imported, numbering, Some(target), args.json)
        }
    }
}

/// Reads a file as a job, with a bar, where somebody looks.
pub(super) fn read(path: &Path) -> Result<Imported, Failure> {
    imported(read_contents(path)?, path)
}

fn imported(contents: Contents, path: &Path) -> Result<Imported, Failure> {
    contents.into_imported().map_err(|source| Failure::Trace { path: path.to_owned(), source })
}

/// Reads a file with a bar, where somebody looks.
pub(super) fn read_contents(path: &Path) -> Result<Contents, Failure> {
    let wrong = |source| Failure::Trace { path: path.to_owned(), source };
    let file = import::open(path).map_err(wrong)?;
    // A pipe has no length, and a bar without one only moves.
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    let style = ProgressStyle::with_template("reading [{bar:32}] {percent:>3} %").expect("the template is right");
    let bar = ProgressBar::new(len).with_style(style.progress_chars("=> "));
    let contents = import::read_contents(bar.wrap_read(file));
    bar.finish_and_clear();
    contents.map_err(wrong)
}

/// Reads a file, and numbers its iterations if nobody did. A note says where the numbers are from.
pub(super) fn read_numbered(path: &Path) -> Result<(Imported, Numbering), Failure> {
    let mut imported = read(path)?;
    let numbering = number(&mut imported);
    Ok((imported, numbering))
}

fn number(imported: &mut Imported) -> Numbering {
    let numbering = imported.number();
    imported.notes.extend(numbered(numbering, imported.trace.iterations()));
    numbering
}

/// Reads a file as the job of one device, by default the first that it allocates on, with iterations. Says which device.
pub(super) fn read_job(path: &Path, device: Option<u32>) -> Result<(Imported, u32), Failure> {
    job_of(read_contents(path)?, path, device)
}

/// The same of what was read of it.
pub(super) fn job_of(contents: Contents, path: &Path, device: Option<u32>) -> Result<(Imported, u32), Failure> {
    let mut imported = imported(contents, path)?;
    let device = device.unwrap_or_else(|| imported.first_device());
    let left_out = imported.keep_device(device);
    if !imported.trace.events.iter().any(|event| event.kind == EventKind::Alloc && event.device == device) {
        return Err(nothing_on(device, path));
    }
    number(&mut imported);
    if left_out > 0 {
        let left_out = counted(left_out as u64, "event");
        let note = format!("{left_out} of other devices than {device} left out; --device chooses another");
        imported.notes.push(note);
    }
    Ok((imported, device))
}

/// A problem of placement is of the first device.
pub(super) fn check_device_of_problem(device: Option<u32>, path: &Path) -> Result<(), Failure> {
    device.filter(|device| *device > 0).map_or(Ok(()), |device| Err(nothing_on(device, path)))
}

fn nothing_on(device: u32, path: &Path) -> Failure {
    Failure::Usage(format!("{}: nothing is allocated on device {device}", path.display()))
}

/// What the numbers of iterations are worth, where the file had none.
fn numbered(numbering: Numbering, iterations: u32) -> Option<String> {
    match numbering {
        Numbering::Column => None,
        Numbering::Marks => Some(format!("{}, numbered by the marks between them", counted(iterations, "iteration"))),
        Numbering::Period(share) => Some(format!(
            "{iterations} iterations, numbered by what repeats: {:.1} % of requests are equal one iteration on",
            share * 100.0
        )),
        Numbering::None => Some("no iterations are found: all is iteration 0".to_owned()),
    }
}

fn word(numbering: Numbering) -> Option<&'static str> {
    match numbering {
        Numbering::Column => Some("column"),
        Numbering::Marks => Some("marks"),
        Numbering::Period(_) => Some("period"),
        Numbering::None => None,
    }
}

fn write(file: &Path, imported: &Imported, numbering: Numbering, target: Option<Target<'_>>, json: bool) -> Outcome {
    let trace = &imported.trace;
    let summary = trace.summary();
    let written = target.as_ref().map(|target| target.write(trace)).transpose()?;
    let mut notes = imported.notes.clone();
    if target.is_some() && (imported.settings.is_some() || !imported.reserved.is_empty()) {
        notes.push(
            "a trace has no place for what the recorded allocator reserved and how it was set: replay the snapshot itself where that matters"
                .to_owned(),
        );
    }
    if json {
        print_json(&json!({
            "file": file.display().to_string(),
            "out": target.map(|target| target.path().display().to_string()),
            "written_bytes": written,
            "events": trace.events.len(),
            "requests": summary.requests,
            "iterations": summary.iterations,
            "iterations_from": word(numbering),
            "peak_live_bytes": summary.peak_live.get(),
            "notes": notes,
        }));
        return DONE;
    }
    outln!(
        "{}: {}, {}, {} at the peak, {}",
        file.display(),
        counted(trace.events.len() as u64, "event"),
        counted(summary.requests, "request"),
        summary.peak_live,
        if numbering == Numbering::None {
            "iterations not numbered".into()
        } else {
            counted(summary.iterations, "iteration")
        }
    );
    notes.iter().for_each(|note| outln!("  note     {note}"));
    match (target, written) {
        (Some(target), Some(len)) => {
            let per_event = len as f64 / trace.events.len() as f64;
            outln!("  written  {} ({}, {per_event:.2} bytes per event)", target.path().display(), Bytes::new(len));
        }
        _ => outln!("  not written; -o FILE writes it"),
    }
    DONE
}
