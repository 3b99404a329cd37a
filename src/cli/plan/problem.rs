//! Problems of placement: rows of lifetimes and sizes, answered with an offset each.

use std::collections::HashMap;
use std::fmt::Write as _;
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
    let mut problem = Problem::from_trace(trace, 0)?;
    for buffer in &mut problem.buffers {
        (buffer.len, buffer.again) = (buffer.bytes, None);
    }
    let solution = Plan::solved(&problem, solver, &searching.budget(args, solve::patient(), &problem))?;
    let improvements = searching.improvements();
    let seconds = (clock.now() - started).as_secs_f64();
    validate::check_offsets(&problem.buffers, &solution.offsets)
        .map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
    let (bound, is_optimal) = (solution.lower_bound, solution.is_optimal());
    let gap = solution.peak.get() as f64 / bound.get().max(1) as f64 - 1.0;
    if let Some(out) = &args.out {
        let rows = rows(trace, &solution.offsets);
        whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, rows.as_bytes()))?;
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

/// The problem with its answer, in the order of time. What has no bytes is nowhere, and stands at 0.
fn rows(trace: &Trace, offsets: &[PlanOffset]) -> String {
    let frees = trace.events.iter().filter(|event| event.kind == EventKind::Free);
    let freed: HashMap<u64, u64> = frees.map(|event| (event.id, event.tick.0)).collect();
    let allocs = trace.events.iter().filter(|event| event.kind == EventKind::Alloc);
    let mut offsets = offsets.iter();
    let mut text = "id,lower,upper,size,offset\n".to_owned();
    for event in allocs {
        let offset = if event.bytes.is_zero() { None } else { offsets.next() };
        let offset = offset.map_or(0, |offset| offset.get());
        let upper = freed.get(&event.id).copied().unwrap_or_default();
        let _ = writeln!(text, "{},{},{upper},{},{}", event.id, event.tick.0, event.bytes.get(), offset);
    }
    text
}
