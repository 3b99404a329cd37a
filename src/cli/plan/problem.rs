//! Problems of placement: rows of lifetimes and sizes, answered with an offset each.

use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::json;

use super::super::interrupt;
use super::search::Searching;
use super::{DONE, Outcome, PlanArgs, print_json, whole_file};
use crate::clock::{Clock as _, SystemClock};
use crate::plan::{Plan, PlanError, Problem, solve, validate};
use crate::trace::import::Rows;
use crate::units::{Tick, counted};

/// An answer is wanted as a problem is.
pub(super) fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("csv"))
}

/// A plan is wanted.
pub(super) fn is_plan(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("plan"))
}

/// One that would be compressed, as no answer is.
pub(super) fn is_compressed(path: &Path) -> bool {
    [".csv.zst", ".csv.gz"].iter().any(|ending| path.to_string_lossy().ends_with(ending))
}

/// A problem of placement is answered as it is: sizes to the byte, and an offset for each row.
pub(super) fn stack(args: &PlanArgs, file: &Path, rows: &Rows, solver: Option<solve::Solver>) -> Outcome {
    let (clock, searching) = (SystemClock::new(), Searching::of(args.json));
    let started = clock.now();
    let (problem, row_of) = Problem::from_rows(rows)?;
    let solution = Plan::solved(&problem, solver, &searching.budget(args, solve::patient(), &problem))?;
    let improvements = searching.improvements();
    let interrupted = searching.is_cut_short(&solution);
    let note = interrupted.then(|| interrupt::NOTE.to_owned());
    let notes: Vec<String> = rows.notes().iter().cloned().chain(note).collect();
    let seconds = (clock.now() - started).as_secs_f64();
    validate::check_offsets(&problem.buffers, &solution.offsets)
        .map_err(|source| PlanError::Wrong { solver: solution.solver, source })?;
    let (bound, is_optimal) = (solution.lower_bound, solution.is_optimal());
    let gap = solution.peak.get() as f64 / bound.get().max(1) as f64 - 1.0;
    if let Some(out) = &args.out {
        // What has no bytes is nowhere, and stands at 0.
        let mut offsets = vec![0; rows.buffers().len()];
        row_of.iter().zip(&solution.offsets).for_each(|(row, offset)| offsets[*row as usize] = offset.get());
        whole_file::write(out, |file| write(file, rows, &offsets))?;
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
            "interrupted": interrupted,
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

/// The answer: a row for each of the problem, in its order and with its id.
fn write(file: &std::fs::File, rows: &Rows, offsets: &[u64]) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 16, file);
    writeln!(file, "id,lower,upper,size,offset")?;
    for ((id, row), offset) in rows.ids().zip(rows.buffers()).zip(offsets) {
        if id.iter().any(|letter| b"\",\n\r".contains(letter)) {
            file.write_all(b"\"")?;
            for letter in id {
                // Two stand for one.
                file.write_all(if *letter == b'"' { b"\"\"" } else { std::slice::from_ref(letter) })?;
            }
            file.write_all(b"\"")?;
        } else {
            file.write_all(id)?;
        }
        file.write_all(b",")?;
        let (Tick(lower), Tick(upper)) = (row.lifetime.start, row.lifetime.end);
        writeln!(file, "{lower},{upper},{},{offset}", row.bytes.get())?;
    }
    file.flush()
}
