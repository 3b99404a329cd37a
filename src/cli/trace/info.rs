//! `stitchd trace info`: a trace in numbers, for people and for scripts.

use std::path::Path;

use serde_json::json;

use super::word;
use crate::cli::table::Table;
use crate::cli::{DONE, Outcome, print_json, print_out};
use crate::trace::import::Imported;
use crate::trace::period::Numbering;
use crate::trace::{Breakdown, IterationFigures, Part};
use crate::units::{Bytes, counted};

/// Rows of a table that would not end.
const SHOWN: usize = 10;

pub(super) fn run(file: &Path, layers: bool, json: bool) -> Outcome {
    let mut imported = super::read(file)?;
    let numbering = imported.number();
    let breakdown = imported.trace.breakdown();
    if json {
        print_json(&object(&imported, &breakdown, numbering, layers));
    } else {
        show(file, &imported, &breakdown, numbering, layers);
    }
    DONE
}

fn object(imported: &Imported, breakdown: &Breakdown, numbering: Numbering, layers: bool) -> serde_json::Value {
    let summary = &breakdown.summary;
    let iteration = |figures: &IterationFigures| {
        json!({
            "requests": figures.requests,
            "dynamic_requests": figures.dynamic_requests,
            "asked_bytes": figures.asked.get(),
            "peak_live_bytes": figures.peak_live.get(),
        })
    };
    let part = |part: &Part| {
        json!({
            "name": part.name,
            "requests": part.requests,
            "dynamic_requests": part.dynamic_requests,
            "asked_bytes": part.asked.get(),
            "at_peak_bytes": part.at_peak.get(),
            "peak_live_bytes": part.peak_live.get(),
        })
    };
    let sizes = breakdown.sizes.iter().map(
        |class| json!({ "from_bytes": class.from.get(), "requests": class.requests, "asked_bytes": class.asked.get() }),
    );
    let mut object = json!({
        "events": imported.trace.events.len(),
        "requests": summary.requests,
        "dynamic_requests": summary.dynamic_requests,
        "asked_bytes": breakdown.asked.get(),
        "dynamic_bytes": breakdown.dynamic.get(),
        "iterations": summary.iterations,
        "iterations_from": word(numbering),
        "iterations_match": match numbering {
            Numbering::Period(share) => Some(share),
            _ => None,
        },
        "peak_live_bytes": summary.peak_live.get(),
        "peak_tick": breakdown.peak_tick.0,
        "peak_iteration": breakdown.peak_iteration,
        "persistent_bytes": summary.persistent.get(),
        "smallest_bytes": breakdown.smallest.get(),
        "median_bytes": breakdown.median.get(),
        "largest_bytes": breakdown.largest.get(),
        "streams": breakdown.streams,
        "devices": breakdown.devices,
        "threads": breakdown.threads,
        "sizes": sizes.collect::<Vec<_>>(),
        "per_iteration": breakdown.iterations.iter().map(iteration).collect::<Vec<_>>(),
        "phases": breakdown.phases.iter().map(part).collect::<Vec<_>>(),
        "top_modules": breakdown.modules.iter().take(SHOWN).map(part).collect::<Vec<_>>(),
        "top_modules_asked": most_asked(&breakdown.modules).into_iter().take(SHOWN).map(part).collect::<Vec<_>>(),
        "notes": imported.notes,
    });
    if layers {
        object["layers"] = breakdown.modules.iter().map(part).collect();
    }
    object
}

/// The same parts, most bytes asked for first.
fn most_asked(parts: &[Part]) -> Vec<&Part> {
    let mut sorted: Vec<&Part> = parts.iter().collect();
    sorted.sort_by_key(|part| std::cmp::Reverse(part.asked));
    sorted
}

fn show(file: &Path, imported: &Imported, breakdown: &Breakdown, numbering: Numbering, layers: bool) {
    let summary = &breakdown.summary;
    let from = match numbering {
        Numbering::Column => "as the trace numbers them".to_owned(),
        Numbering::Marks => "by the marks between them".to_owned(),
        Numbering::Period(share) => format!("by what repeats: {:.1} % of requests are equal", share * 100.0),
        Numbering::None => "nothing says where others begin".to_owned(),
    };
    outln!("{}", file.display());
    outln!("  events      {}", imported.trace.events.len());
    outln!("  requests    {}, {} in all", summary.requests, breakdown.asked);
    let share = |part: u64, whole: u64| part as f64 * 100.0 / (whole.max(1)) as f64;
    outln!(
        "  varying     {} requests ({:.1} %), {} ({:.1} %)",
        summary.dynamic_requests,
        share(summary.dynamic_requests, summary.requests),
        breakdown.dynamic,
        share(breakdown.dynamic.get(), breakdown.asked.get())
    );
    outln!("  sizes       {} to {}, median {}", breakdown.smallest, breakdown.largest, breakdown.median);
    outln!("  iterations  {}, {from}", summary.iterations);
    outln!(
        "  peak        {} ({} bytes) live at tick {} in iteration {}",
        summary.peak_live,
        summary.peak_live.get(),
        breakdown.peak_tick,
        breakdown.peak_iteration
    );
    outln!("  persistent  {} are never given back", summary.persistent);
    outln!(
        "  from        {}, {}, {}",
        counted(breakdown.streams as u64, "stream"),
        counted(breakdown.devices as u64, "device"),
        counted(breakdown.threads as u64, "thread")
    );
    imported.notes.iter().for_each(|note| outln!("  note        {note}"));
    show_iterations(&breakdown.iterations);
    show_sizes(breakdown);
    show_parts("phase", &breakdown.phases.iter().collect::<Vec<_>>(), usize::MAX);
    if layers {
        show_parts("module", &breakdown.modules.iter().collect::<Vec<_>>(), usize::MAX);
    } else {
        show_parts("module, by bytes live at the peak", &breakdown.modules.iter().collect::<Vec<_>>(), SHOWN);
        show_parts("module, by bytes asked for", &most_asked(&breakdown.modules), SHOWN);
    }
}

fn show_iterations(iterations: &[IterationFigures]) {
    let mut table = Table::new(&[">iteration", ">requests", ">varying", ">asked for", ">peak live"]);
    for (at, figures) in iterations.iter().enumerate().take(SHOWN) {
        table.row(vec![
            at.to_string(),
            figures.requests.to_string(),
            figures.dynamic_requests.to_string(),
            figures.asked.to_string(),
            figures.peak_live.to_string(),
        ]);
    }
    print_table(&table, iterations.len());
}

fn show_sizes(breakdown: &Breakdown) {
    let mut table = Table::new(&[">size from", ">requests", ">asked for"]);
    for class in &breakdown.sizes {
        table.row(vec![class.from.to_string(), class.requests.to_string(), class.asked.to_string()]);
    }
    print_table(&table, 0);
}

fn show_parts(header: &str, parts: &[&Part], most: usize) {
    let mut table = Table::new(&[header, ">at the peak", ">own peak", ">asked for", ">requests", ">varying"]);
    for part in parts.iter().take(most) {
        let bytes = |bytes: Bytes| bytes.to_string();
        table.row(vec![
            // A name can be anything, and a terminal takes some of it for orders.
            if part.name.is_empty() { "(none)".into() } else { part.name.escape_debug().to_string() },
            bytes(part.at_peak),
            bytes(part.peak_live),
            bytes(part.asked),
            part.requests.to_string(),
            format!("{:.1} %", part.dynamic_requests as f64 * 100.0 / part.requests.max(1) as f64),
        ]);
    }
    print_table(&table, if most == usize::MAX { 0 } else { parts.len() });
}

/// A table, and how many rows more there would be.
fn print_table(table: &Table, rows: usize) {
    outln!("");
    print_out(table);
    if rows > SHOWN {
        outln!("and {} more; --json --layers has them all", rows - SHOWN);
    }
}
