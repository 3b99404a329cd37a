//! Problems of placement: rows of lifetimes and sizes, answered with an offset each.

use std::collections::HashMap;
use std::path::Path;

use serde_json::json;

use super::search::Searching;
use super::{DONE, Outcome, PlanArgs, print_json, whole_file};
use crate::clock::{Clock as _, SystemClock};
use crate::plan::{Plan, PlanError, Problem, solve, validate};
use crate::trace::{EventKind, Trace, import::Imported};
use crate::units::{PlanOffset, counted};

/// An answer is wanted as a problem is.
pub(super) fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "csv")
}

/// One that would be compressed, as no answer is.
pub(super) fn is_compressed(path: &Path) -> bool {
    [".csv.zst", ".csv.gz"].iter().any(|ending| path.to_string_lossy().ends_with(ending))
}

/// A problem of placement is answered as it is: sizes to the byte, and an offset for each row.
pub(super) fn stack(args: &PlanArgs, file: &Path, imported: &Imported, solver: Option<solve::Solver>) -> Outcome {
    let (trace, notes) = (&imported.trace, &imported.notes);
    let (clock, searching) = (SystemClock::new(), Searching::of(args.json));
    let started = clock.now();
    let problem = as_it_is(trace)?;
    let solution = Plan::solved(&problem, solver, &searching.budget(args, solve::patient(), &problem))?;
    let improvements = searching.improvements();
    let seconds = (clock.now() - started).as_secs_f64();
    validate::check_offsets(&problem.buffers, &solution.offsets)
        .map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
    let (bound, is_optimal) = (solution.lower_bound, solution.is_optimal());
    let gap = solution.peak.get() as f64 / bound.get().max(1) as f64 - 1.0;
    if let Some(out) = &args.out {
        let places = places(trace, &solution.offsets);
        whole_file::write(out, |file| write(file, &imported.rows, &places))?;
    }
    if args.json {
        print_json(&json!({
            "buffers": problem.buffers.len(),
            "lower_bound_bytes": bound.get(),
            "peak_bytes": solution.peak.get(),
            "gap": gap,
            "solver": solution.solver,
            "seconds": seconds,
            "work_units": solution.work_units,
            "proven_optimal": is_optimal,
            "improvements": improvements,
            "notes": notes,
        }));
        return DONE;
    }
    outln!("{} of {}", counted(problem.buffers.len() as u64, "buffer"), file.display());
    outln!("  peak       {} ({} bytes)", solution.peak, solution.peak.get());
    outln!("  bound      {bound}, gap {:.3} %{}", gap * 100.0, if is_optimal { ": optimal" } else { "" });
    outln!("  solver     {} in {seconds:.2} s, {} units of work", solution.solver, solution.work_units);
    notes.iter().for_each(|note| outln!("  note       {note}"));
    match &args.out {
        Some(out) => outln!("  written    {}", out.display()),
        None => outln!(
            "  not written; -o FILE.csv writes the offsets, and -o FILE.plan a plan with sizes as pools serve them"
        ),
    }
    DONE
}

/// The problem, with sizes to the byte and nothing that repeats.
pub(super) fn as_it_is(trace: &Trace) -> Result<Problem, PlanError> {
    let mut problem = Problem::from_trace(trace, 0)?;
    for buffer in &mut problem.buffers {
        (buffer.len, buffer.again) = (buffer.bytes, None);
    }
    Ok(problem)
}

/// From when to when a buffer lives, how large it is, and where it lies.
type Placed = [u64; 4];

/// Those of all ids. What has no bytes is nowhere, and stands at 0, as does all without offsets.
pub(super) fn places(trace: &Trace, offsets: &[PlanOffset]) -> HashMap<u64, Placed> {
    let mut offsets = offsets.iter();
    let mut places = HashMap::new();
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc => {
                let offset = if event.bytes.is_zero() { None } else { offsets.next() };
                let offset = offset.map_or(0, |offset| offset.get());
                places.insert(event.id, [event.tick.0, 0, event.bytes.get(), offset]);
            }
            EventKind::Free => places.entry(event.id).or_default()[1] = event.tick.0,
            _ => {}
        }
    }
    places
}

/// The answer: a row for each of the problem, in its order and with its id.
fn write(file: &std::fs::File, rows: &[(u64, Vec<u8>)], places: &HashMap<u64, Placed>) -> std::io::Result<()> {
    let mut file = csv::Writer::from_writer(file);
    file.write_record(["id", "lower", "upper", "size", "offset"])?;
    for (id, name) in rows {
        let place = places.get(id).copied().unwrap_or_default().map(|figure| figure.to_string().into_bytes());
        file.write_record([name].into_iter().chain(&place))?;
    }
    file.flush()
}
