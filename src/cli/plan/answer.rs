//! `stitchd plan check ANSWER.csv PROBLEM.csv`: whether an answer, of whatever solver, is one.
//!
//! Not for: plans, which are checked against a trace ([`super::look`]).

use std::path::Path;

use foldhash::HashMap;
use serde_json::json;

use super::{Failure, Outcome, print_json, trace};
use crate::plan::validate::{self, Wrong};
use crate::plan::{PlanError, Problem, lower_bound};
use crate::trace::import::{Contents, Placed, Rows, read_answer};
use crate::units::{Bytes, Lifetime, Tick, counted};

/// Lines that are shown of what is wrong.
const SHOWN: usize = 20;

const COLUMNS: [&str; 3] = ["lower", "upper", "size"];

pub(super) fn check(answer_file: &Path, problem_file: &Path, device: Option<u32>, json: bool) -> Outcome {
    trace::check_device_of_problem(device, problem_file)?;
    let Contents::Problem(problem) = trace::read_contents(problem_file)? else {
        return Err(Failure::Usage(format!(
            "{}: not a problem of placement, which an answer in CSV would be for; a plan file is checked against a trace",
            problem_file.display()
        )));
    };
    let answer = read_answer(answer_file).map_err(|source| Failure::Trace { path: answer_file.to_owned(), source })?;
    let (peak, wrong) = differences(&answer, &problem);
    let bound = match Problem::from_rows(&problem) {
        Ok((problem, _)) => lower_bound(&problem),
        // All are nowhere.
        Err(PlanError::NothingStatic) => Bytes::ZERO,
        Err(error) => return Err(error.into()),
    };
    // Of what is no answer there is none.
    let peak = Some(peak).filter(|_| wrong.is_empty());
    let over = |peak: Bytes| peak.get() as f64 / bound.get() as f64 - 1.0;
    let gap = peak.map(|peak| if bound.is_zero() { 0.0 } else { over(peak) });
    if json {
        print_json(&json!({
            "valid": wrong.is_empty(),
            "wrong": wrong,
            "buffers": problem.buffers().len(),
            "peak_bytes": peak.map(Bytes::get),
            "lower_bound_bytes": bound.get(),
            "gap": gap,
        }));
    } else if let (Some(peak), Some(gap)) = (peak, gap) {
        let is_optimal = if peak == bound { ": optimal" } else { "" };
        outln!(
            "the answer is right: {} in {peak} ({} bytes)",
            counted(problem.buffers().len() as u64, "buffer"),
            peak.get()
        );
        outln!("  bound      {bound}, gap {:.3} %{is_optimal}", gap * 100.0);
    } else {
        wrong.iter().for_each(|line| outln!("{line}"));
    }
    Ok(u8::from(!wrong.is_empty()))
}

/// As it can be shown.
fn name_of(id: &[u8]) -> String {
    String::from_utf8_lossy(id).escape_debug().to_string()
}

/// The answer's peak, and what keeps it from being one. At most a screen of it.
fn differences(answer: &HashMap<Vec<u8>, Placed>, problem: &Rows) -> (Bytes, Vec<String>) {
    let (mut wrong, mut peak) = (Vec::new(), Bytes::ZERO);
    let mut placed: Vec<(&[u8], [u64; 3], u64)> = Vec::new();
    for (name, asked) in problem.ids().zip(problem.buffers()) {
        let (Tick(lower), Tick(upper), len) = (asked.lifetime.start, asked.lifetime.end, asked.bytes.get());
        let figures = [lower, upper, len];
        let shown = name_of(name);
        let Some(row) = answer.get(name) else {
            wrong.push(format!("{shown}: the answer has no place for it"));
            continue;
        };
        for ((column, said), asked) in COLUMNS.iter().zip(row.figures).zip(figures) {
            if let Some(said) = said.filter(|said| *said != asked) {
                wrong.push(format!("{shown}: the answer has {said} for its {column}, the problem {asked}"));
            }
        }
        match row.offset.checked_add(len) {
            // What has no bytes is nowhere.
            Some(end) => peak = peak.max(if len > 0 { Bytes::new(end) } else { Bytes::ZERO }),
            None => wrong.push(format!("{shown}: it would end behind 2^64")),
        }
        placed.push((name, figures, row.offset));
    }
    if let Some(more) = answer.len().checked_sub(problem.buffers().len()).filter(|more| *more > 0 && wrong.is_empty()) {
        wrong.push(format!("the answer has {} that the problem does not know", counted(more as u64, "buffer")));
    }
    let lives =
        placed.iter().enumerate().filter(|(_, (_, [.., len], _))| *len > 0).map(|(number, (_, figures, offset))| {
            let [lower, upper, len] = *figures;
            (number, Lifetime { start: Tick(lower), end: Tick(upper) }, *offset, offset.saturating_add(len))
        });
    if wrong.is_empty()
        && let Err(Wrong::Overlap { first, second, tick, offset }) = validate::check_apart(lives)
    {
        let [first, second] = [first.min(second), first.max(second)].map(|number| name_of(placed[number].0));
        wrong.push(format!("{first} and {second} are both live at {tick} and share the byte {offset}"));
    }
    if wrong.len() > SHOWN {
        wrong.truncate(SHOWN);
        wrong.push("and more".into());
    }
    (peak, wrong)
}
