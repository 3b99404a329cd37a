//! What a replay found, as JSON, as a table and as a picture.

use std::path::Path;

use serde_json::{Value, json};

use super::super::table::Table;
use super::super::{Failure, Outcome, print_json, print_out, whole_file};
use super::{Least, ReplayArgs, Replayed, Result};
use crate::driver::cost_table::CostTable;
use crate::replay::calls::{CallSum, SHOWN};
use crate::replay::script::{Asked, Script, Step};
use crate::replay::{PoolName, PoolReport, Record, Report, Run, Setup, grouped};
use crate::trace::Trace;
use crate::units::{Bytes, counted};

/// Prints it all. With a capacity the answer is no where a pool ran out of memory.
pub(super) fn print(args: &ReplayArgs, replayed: &Replayed<'_>, setup: &Setup) -> Outcome {
    let Replayed { trace, script, recorded, notes, results, has_plan, floor_ns } = replayed;
    if args.json {
        let pools: Vec<Value> =
            results.iter().map(|result| pool_json(trace, *has_plan, result, &setup.costs)).collect();
        print_json(&json!({
            "trace": trace_json(script),
            "recorded": recorded.as_ref().map(|record| json!({ "peak_reserved_bytes": most_reserved(record).get() })),
            "pools": pools,
            "floor_ns_per_operation": floor_ns,
            "notes": notes,
            "command": command_line(),
            "verdict": verdict(results, script.iterations),
        }));
    } else {
        outln!("{}", summary(script, setup));
        let columns = Columns::of(results, *has_plan, script.iterations);
        let mut table = columns.table(&[]);
        if let Some(record) = recorded {
            let mut row = vec!["(recorded)".to_owned(), most_reserved(record).to_string()];
            row.resize(table.columns(), String::new());
            table.row(row);
        }
        results.iter().for_each(|result| table.row(columns.row(result)));
        print_out(&table);
        outln!("driver seconds are modelled: {}", setup.costs.source);
        if let Some(floor_ns) = floor_ns {
            outln!(
                "floor: {floor_ns:.1} ns/operation for the replay's own books, a lock and a look at a table by address"
            );
        }
        notes.iter().for_each(|note| outln!("note: {note}"));
        results.iter().for_each(|result| warnings(trace, result).iter().for_each(|line| outln!("{line}")));
        outln!("{}", verdict(results, script.iterations));
    }
    Ok(u8::from(results.iter().any(|result| result.done.run.out_of_memory.is_some())))
}

/// What was replayed, in a line.
pub(super) fn summary(script: &Script, setup: &Setup) -> String {
    let capacity = setup.capacity.map_or_else(String::new, |capacity| format!(", on a device of {capacity}"));
    format!(
        "{} in {}, peak live {}{capacity}",
        counted(script.requests, "request"),
        counted(script.iterations, "iteration"),
        script.peak_live
    )
}

/// What was asked for, so that it can be asked for again.
pub(super) fn command_line() -> String {
    let quoted = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=,:%+@".contains(letter);
        if !word.is_empty() && word.chars().all(is_plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    let words: Vec<String> = std::env::args_os().skip(1).map(quoted).collect();
    format!("stitchd {}: stitchd {}", env!("CARGO_PKG_VERSION"), words.join(" "))
}

/// What went wrong in a pool's replay, a sentence each.
fn warnings(trace: &Trace, result: &Result) -> Vec<String> {
    let (name, run) = (result.pool.as_str(), &result.done.run);
    let mut lines = Vec::new();
    if let Some(refused) = run.out_of_memory {
        let why = run.refusal.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        lines.push(format!(
            "{name}: out of memory at tick {}: {} asked for, after {}{why}",
            Script::tick(trace, refused.event),
            refused.requested,
            counted(run.served, "request")
        ));
    }
    let overlapped = run.more.overlapped;
    if overlapped > Bytes::ZERO {
        lines.push(format!(
            "{name}: handed out {overlapped} that were live already: a job's tensors would have been overwritten"
        ));
    }
    lines
}

pub(super) fn trace_json(script: &Script) -> Value {
    json!({
        "requests": script.requests,
        "iterations": script.iterations,
        "peak_live_bytes": script.peak_live.get(),
    })
}

/// One pool as checks read it.
pub(super) fn pool_json(trace: &Trace, has_plan: bool, result: &Result, costs: &CostTable) -> Value {
    let run = &result.done.run;
    let refused = run.out_of_memory.map(|refused| {
        json!({
            "tick": Script::tick(trace, refused.event).0,
            "requested_bytes": refused.requested.get(),
            "served_requests": run.served,
        })
    });
    let steady = Some(&run.last_iteration).filter(|_| run.out_of_memory.is_none());
    let mut value = json!({
        "name": result.pool.as_str(),
        "peak_reserved_bytes": run.peak_reserved.get(),
        "peak_live_bytes": run.peak_live.get(),
        "efficiency": Some(run.efficiency()).filter(|_| has_share(run)),
        "out_of_memory": refused,
        "driver_calls": calls_json(&run.calls),
        "driver_calls_by_iteration": run.calls_by_iteration,
        "steady_driver_calls_per_iteration": steady.map(|calls| calls.total()),
        "steady_modelled_driver_seconds_per_iteration": steady.map(|calls| calls.seconds),
        "lease_rpcs": run.more.lease_rpcs,
        "modelled_driver_seconds": run.calls.seconds,
        "cost_table": { "name": costs.name, "source": costs.source },
        "served_bytes": {
            "planned": run.more.served.planned.get(),
            "reuse": run.more.served.reuse.get(),
            "pool": run.more.served.pool.get(),
            // The names of one version ago.
            "stitching": run.more.served.pool.get(),
            "small": 0,
        },
        "deviations": run.more.deviations,
        "auto": run.more.auto.map(|auto| json!({
            "made": auto.made,
            "installed": auto.installed,
            "refused": auto.refused,
            "planning_seconds": auto.planning.map(|planning| planning.as_secs_f64()),
            "from_iteration": auto.from_iteration,
            "peak_held_bytes": auto.peak_held.get(),
        })),
        "deviations_per_iteration": run.deviations,
        "overlapped_bytes": run.more.overlapped.get(),
        "ns_per_operation": result.time.map(|time| time.own),
        "beside_ns_per_operation": result.time.map(|time| time.beside),
    });
    let fields = value.as_object_mut().expect("it was just made an object");
    if has_plan {
        fields.insert("efficiency_after_plan".into(), json!(run.efficiency_after().filter(|_| has_share(run))));
    }
    if let Some(least) = &result.least {
        fields.insert("min_capacity_bytes".into(), json!(least.as_ref().map(|least| least.capacity.get())));
        let there = least.as_ref().map(|least| {
            let run = &least.done.run;
            json!({
                "driver_calls": run.calls.total(),
                "steady_driver_calls_per_iteration": run.last_iteration.total(),
                "modelled_driver_seconds": run.calls.seconds,
            })
        });
        fields.insert("at_min_capacity".into(), json!(there));
    }
    value
}

/// The peak of what the allocator that was recorded had reserved.
fn most_reserved(record: &Record) -> Bytes {
    record.curve.iter().map(|point| point.reserved).max().unwrap_or(Bytes::ZERO)
}

fn calls_json(calls: &CallSum) -> Value {
    let mut fields: serde_json::Map<String, Value> =
        SHOWN.into_iter().map(|call| (call.name().to_owned(), json!(calls.of(call)))).collect();
    fields.insert("malloc".into(), json!(calls.malloc));
    fields.insert("free".into(), json!(calls.free));
    Value::Object(fields)
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// Rounded up to what is shown: a device of so much is enough.
pub(super) fn at_least(bytes: Bytes) -> String {
    let up = |unit: u64, parts: u64| bytes.get().saturating_mul(parts).div_ceil(unit) as f64 / parts as f64;
    match bytes.get() {
        small if small < 1 << 20 => bytes.to_string(),
        medium if medium < 1 << 30 => format!("{:.1} MiB", up(1 << 20, 10)),
        _ => format!("{:.2} GiB", up(1 << 30, 100)),
    }
}

/// The columns of a table of results.
pub(super) struct Columns {
    has_plan: bool,
    has_least: bool,
    has_time: bool,
    has_iterations: bool,
}

impl Columns {
    pub(super) fn of(results: &[Result], has_plan: bool, iterations: u32) -> Columns {
        Columns {
            has_plan,
            has_least: results.iter().any(|result| result.least.is_some()),
            has_time: results.iter().any(|result| result.time.is_some()),
            has_iterations: iterations > 1,
        }
    }

    /// A table with them, `before` first.
    pub(super) fn table(&self, before: &[&str]) -> Table {
        let mut headers = before.to_vec();
        headers.extend(["pool", ">reserved", ">efficiency"]);
        let more = [
            (self.has_plan, ">after plan"),
            (true, ">driver calls"),
            (self.has_iterations, ">first iteration"),
            (self.has_iterations, ">last iteration"),
            (true, ">driver seconds"),
            (self.has_least, ">needs"),
            (self.has_least, ">driver calls then"),
            (self.has_time, ">ns/operation"),
            (true, ""),
        ];
        headers.extend(more.into_iter().filter_map(|(is_there, header)| is_there.then_some(header)));
        Table::new(&headers)
    }

    pub(super) fn row(&self, result: &Result) -> Vec<String> {
        let run = &result.done.run;
        let is_done = run.out_of_memory.is_none();
        let nothing = || "-".to_owned();
        let share = |share: Option<f64>| share.filter(|_| has_share(run)).map_or_else(nothing, percent);
        let least = result.least.as_ref().and_then(Option::as_ref);
        let status = match (is_done, run.more.overlapped) {
            (false, _) => "out of memory".to_owned(),
            (true, Bytes::ZERO) => String::new(),
            (true, overlapped) => format!("overwrites {overlapped}"),
        };
        let mut row = vec![result.pool.as_str().to_owned(), at_least(run.peak_reserved), share(Some(run.efficiency()))];
        let more = [
            (self.has_plan, share(run.efficiency_after())),
            (true, run.calls.total().to_string()),
            (self.has_iterations, run.calls_by_iteration.first().map_or_else(nothing, u64::to_string)),
            (self.has_iterations, if is_done { run.last_iteration.total().to_string() } else { nothing() }),
            (true, format!("{:.3}", run.calls.seconds)),
            (self.has_least, least.map_or_else(nothing, |least| at_least(least.capacity))),
            (self.has_least, least.map_or_else(nothing, |least| least.done.run.calls.total().to_string())),
            (self.has_time, result.time.map_or_else(nothing, |time| format!("{:.1}", time.own))),
            (true, status),
        ];
        row.extend(more.into_iter().filter_map(|(is_there, cell)| is_there.then_some(cell)));
        row
    }
}

/// One sentence to act on. What a pool reserved without a limit is enough for it, and others do with less when they must: only what was looked for is called a need.
pub(super) fn verdict<'a>(results: &'a [Result], iterations: u32) -> String {
    let of = |pool: PoolName| results.iter().find(|result| result.pool == pool);
    let takes = |result: &Result| match &result.least {
        Some(Some(least)) => format!("needs {}", at_least(least.capacity)),
        Some(None) => "needs more than any device has".to_owned(),
        None if result.done.run.out_of_memory.is_some() => "runs out of memory".to_owned(),
        None => format!("takes {}", at_least(result.done.run.peak_reserved)),
    };
    let calls = |result: &'a Result| {
        let least = |least: &'a Option<Least>| least.as_ref().map(|least| &least.done.run);
        let run = result.least.as_ref().map_or(Some(&result.done.run), least);
        let run = run.filter(|run| run.out_of_memory.is_none())?;
        Some(if iterations > 1 {
            format!(" ({} in the last iteration)", counted(run.last_iteration.total(), "driver call"))
        } else {
            format!(" ({})", counted(run.calls.total(), "driver call"))
        })
    };
    let mut parts = Vec::new();
    parts.extend(ours(results, &calls));
    let mut others = Vec::new();
    if let Some(caching) = of(PoolName::Caching) {
        others.push(format!("PyTorch's allocator {}", takes(caching)));
    }
    if let Some(expandable) = of(PoolName::Expandable) {
        let calls = calls(expandable).unwrap_or_default();
        others.push(format!("with expandable segments it {}{calls}", takes(expandable)));
    }
    if !others.is_empty() {
        parts.push(others.join(", "));
    }
    if parts.is_empty() {
        let each = results.iter().map(|result| format!("{} {}", result.pool.as_str(), takes(result)));
        parts.push(each.collect::<Vec<_>>().join(", "));
    }
    parts.join("; ")
}

/// What the job fits in with each of our pools; driver calls are those of the first of them.
fn ours<'a>(results: &'a [Result], calls: &dyn Fn(&'a Result) -> Option<String>) -> Option<String> {
    let enough = |result: &Result| match (&result.least, result.done.run.out_of_memory) {
        (Some(Some(least)), _) => Some(at_least(least.capacity)),
        (None, None) => Some(at_least(result.done.run.peak_reserved)),
        (Some(None), _) | (None, Some(_)) => None,
    };
    let mut parts: Vec<String> = Vec::new();
    for result in results.iter().filter(|result| PoolName::OURS.contains(&result.pool)) {
        let (name, is_first) = (result.pool.as_str(), parts.is_empty());
        let calls = if is_first { calls(result).unwrap_or_default() } else { String::new() };
        let fits = if parts.iter().any(|part| part.starts_with("fits")) { "in" } else { "fits in" };
        parts.push(match enough(result) {
            Some(bytes) => format!("{fits} {bytes} with {name}{calls}"),
            None => format!("does not fit with {name}"),
        });
    }
    Some(parts.join(", ")).filter(|text| !text.is_empty())
}

/// Writes the picture, whole or not at all.
pub(super) fn report(
    args: &ReplayArgs,
    replayed: &Replayed<'_>,
    setup: &Setup,
    out: &Path,
) -> std::result::Result<(), Failure> {
    let Replayed { trace, script, recorded, notes, results, .. } = replayed;
    let title = args.file.file_name().unwrap_or(args.file.as_os_str()).to_string_lossy();
    let iterations = iterations(script);
    let real = recorded.iter().map(|record| {
        let live = record.curve.iter().map(|point| point.live).max().unwrap_or(Bytes::ZERO);
        PoolReport {
            name: "recorded",
            figures: vec![("peak reserved", most_reserved(record).to_string()), ("peak live", live.to_string())],
            out_of_memory: None,
            record,
        }
    });
    let pools = results.iter().filter_map(|result| {
        Some(PoolReport {
            name: result.pool.as_str(),
            figures: figures(replayed, result),
            out_of_memory: result.done.run.out_of_memory.map(|refused| (refused.event, refused.requested)),
            record: result.done.run.record.as_ref()?,
        })
    });
    let mut said = vec![
        format!("{}; driver seconds are modelled: {}", summary(script, setup), setup.costs.source),
        format!("made by {}", command_line()),
    ];
    said.extend(notes.iter().cloned());
    said.extend(results.iter().flat_map(|result| warnings(trace, result)));
    let report = Report {
        title: &title,
        trace,
        notes: &said,
        verdict: &verdict(results, script.iterations),
        iterations: &iterations,
        events: u32::try_from(trace.events.len()).unwrap_or(u32::MAX),
        pools: real.chain(pools).collect(),
    };
    whole_file::write(out, |file| report.write(std::io::BufWriter::new(file))).map(drop)
}

/// Where each iteration begins: its first event, and its number.
fn iterations(script: &Script) -> Vec<(u32, u32)> {
    let mut begun = Vec::new();
    let mut number = None;
    for step in &script.steps {
        match (*step, number) {
            (Step::Iteration(next), _) => number = Some(next),
            (Step::Alloc(Asked { event, .. }) | Step::Free { event, .. }, Some(begins)) => {
                begun.push((event, begins));
                number = None;
            }
            _ => {}
        }
    }
    begun
}

/// Whether an efficiency says anything: half a job's does not, and bytes that are handed out twice make a share of nothing.
fn has_share(run: &Run) -> bool {
    run.out_of_memory.is_none() && run.more.overlapped == Bytes::ZERO
}

/// What the page says of a pool.
fn figures(replayed: &Replayed<'_>, result: &Result) -> Vec<(&'static str, String)> {
    let run = &result.done.run;
    let share = |text: String| if has_share(run) { text } else { "-".to_owned() };
    let mut figures = vec![
        ("peak reserved", at_least(run.peak_reserved)),
        ("peak live", run.peak_live.to_string()),
        ("efficiency", share(percent(run.efficiency()))),
    ];
    if replayed.has_plan {
        figures.push(("efficiency after the plan", share(run.efficiency_after().map_or_else(String::new, percent))));
    }
    if let Some(Some(least)) = &result.least {
        figures.push(("needs", at_least(least.capacity)));
        figures.push(("driver calls then", grouped(least.done.run.calls.total())));
    }
    figures.push(("driver calls", grouped(run.calls.total())));
    if replayed.script.iterations > 1 {
        let first = run.calls_by_iteration.first().copied().unwrap_or(0);
        figures.push(("driver calls in the first iteration", grouped(first)));
        let is_done = run.out_of_memory.is_none();
        let calls = if is_done { grouped(run.last_iteration.total()) } else { "-".to_owned() };
        figures.push(("driver calls in the last iteration", calls));
    }
    figures.push(("modelled driver seconds", format!("{:.3}", run.calls.seconds)));
    if run.more.overlapped > Bytes::ZERO {
        figures.push(("overwrites", run.more.overlapped.to_string()));
    }
    figures
}
