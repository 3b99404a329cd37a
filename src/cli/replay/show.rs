//! What a replay found, as JSON, as a table and as a picture.

use std::path::Path;

use serde_json::{Value, json};

use super::super::table::Table;
use super::super::{Failure, Outcome, print_json, print_out, whole_file};
use super::{ReplayArgs, Replayed, Result};
use crate::driver::cost_table::CostTable;
use crate::replay::calls::{CallSum, SHOWN};
use crate::replay::script::{Asked, Script, Step};
use crate::replay::{PoolName, PoolReport, Record, Report, Setup};
use crate::trace::Trace;
use crate::units::Bytes;

/// Prints it all. With a capacity the answer is no where a pool ran out of memory.
pub(super) fn print(args: &ReplayArgs, replayed: &Replayed, setup: &Setup) -> Outcome {
    let Replayed { trace, script, recorded, notes, results, has_plan } = replayed;
    if args.json {
        let pools: Vec<Value> =
            results.iter().map(|result| pool_json(trace, *has_plan, result, &setup.costs)).collect();
        print_json(&json!({
            "trace": trace_json(script),
            "recorded": recorded.as_ref().map(|record| json!({ "peak_reserved_bytes": most_reserved(record).get() })),
            "pools": pools,
            "notes": notes,
            "verdict": verdict(results, script.iterations),
        }));
    } else {
        outln!("{} requests in {} iterations, peak live {}", script.requests, script.iterations, script.peak_live);
        print_out(&table(replayed));
        outln!("driver seconds are modelled: {}", setup.costs.source);
        notes.iter().for_each(|note| outln!("note: {note}"));
        for result in results {
            if let Some(refused) = result.done.run.out_of_memory {
                outln!(
                    "{}: out of memory at tick {}: {} asked for, after {} requests",
                    result.pool.as_str(),
                    Script::tick(trace, refused.event),
                    refused.requested,
                    result.done.run.served
                );
            }
            let overlapped = result.done.run.more.overlapped;
            if overlapped > Bytes::ZERO {
                outln!(
                    "{}: handed out {overlapped} that were live already: a job's tensors would have been overwritten",
                    result.pool.as_str()
                );
            }
        }
        outln!("{}", verdict(results, script.iterations));
    }
    Ok(u8::from(results.iter().any(|result| result.done.run.out_of_memory.is_some())))
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
    let mut value = json!({
        "name": result.pool.as_str(),
        "peak_reserved_bytes": run.peak_reserved.get(),
        "peak_live_bytes": run.peak_live.get(),
        "efficiency": run.efficiency(),
        "out_of_memory": refused,
        "driver_calls": calls_json(&run.calls),
        "steady_driver_calls_per_iteration": run.last_iteration.total(),
        "steady_modelled_driver_seconds_per_iteration": run.last_iteration.seconds,
        "lease_rpcs": run.more.lease_rpcs,
        "modelled_driver_seconds": run.calls.seconds,
        "cost_table": { "name": costs.name, "source": costs.source },
        "served_bytes": {
            "planned": run.more.served.planned.get(),
            "reuse": run.more.served.reuse.get(),
            "stitching": run.more.served.stitching.get(),
            "small": run.more.served.small.get(),
        },
        "deviations": run.more.deviations,
        "overlapped_bytes": run.more.overlapped.get(),
        "ns_per_operation": result.ns_per_operation,
    });
    let fields = value.as_object_mut().expect("it was just made an object");
    if has_plan {
        fields.insert("efficiency_after_plan".into(), json!(run.efficiency_after()));
    }
    if let Some(least) = result.min_capacity {
        fields.insert("min_capacity_bytes".into(), json!(least.map(Bytes::get)));
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

fn table(replayed: &Replayed) -> Table {
    let results = &replayed.results;
    let has_least = results.iter().any(|result| result.min_capacity.is_some());
    let has_time = results.iter().any(|result| result.ns_per_operation.is_some());
    let mut headers = vec!["pool", ">reserved", ">efficiency"];
    if replayed.has_plan {
        headers.push(">after plan");
    }
    headers.extend([">driver calls", ">per iteration", ">driver seconds"]);
    if has_least {
        headers.push(">needs");
    }
    if has_time {
        headers.push(">ns/operation");
    }
    headers.push("");
    let columns = headers.len();
    let mut table = Table::new(&headers);
    if let Some(record) = &replayed.recorded {
        let reserved = most_reserved(record);
        let mut row = vec!["(recorded)".to_owned(), reserved.to_string()];
        row.resize(columns, String::new());
        table.row(row);
    }
    for result in results {
        let run = &result.done.run;
        let mut row = vec![result.pool.as_str().to_owned(), run.peak_reserved.to_string(), percent(run.efficiency())];
        if replayed.has_plan {
            row.push(run.efficiency_after().map_or_else(String::new, percent));
        }
        row.push(run.calls.total().to_string());
        row.push(run.last_iteration.total().to_string());
        row.push(format!("{:.3}", run.calls.seconds));
        if has_least {
            row.push(result.min_capacity.flatten().map_or_else(|| "-".to_owned(), |least| least.to_string()));
        }
        if has_time {
            row.push(result.ns_per_operation.map_or_else(|| "-".to_owned(), |nanos| format!("{nanos:.1}")));
        }
        row.push(if run.out_of_memory.is_some() { "out of memory".into() } else { String::new() });
        table.row(row);
    }
    table
}

/// One sentence to act on.
pub(super) fn verdict(results: &[Result], iterations: u32) -> String {
    let of = |pool: PoolName| results.iter().find(|result| result.pool == pool);
    let needs = |result: &Result| match result.min_capacity {
        Some(least) => least.map_or_else(|| "more than any device has".to_owned(), |least| least.to_string()),
        None if result.done.run.out_of_memory.is_some() => "more than there is".to_owned(),
        None => result.done.run.peak_reserved.to_string(),
    };
    let mut parts = Vec::new();
    if let Some(ours) = of(PoolName::Stitchd) {
        parts.push(if ours.done.run.out_of_memory.is_some() && ours.min_capacity.is_none() {
            "does not fit".to_owned()
        } else {
            format!("fits in {}", needs(ours))
        });
    }
    let mut others = Vec::new();
    if let Some(caching) = of(PoolName::Caching) {
        others.push(format!("PyTorch's allocator needs {}", needs(caching)));
    }
    if let Some(expandable) = of(PoolName::Expandable) {
        let run = &expandable.done.run;
        let calls = if iterations > 1 {
            format!("{} driver calls per iteration", run.last_iteration.total())
        } else {
            format!("{} driver calls", run.calls.total())
        };
        others.push(format!("expandable segments {} with {calls}", needs(expandable)));
    }
    if !others.is_empty() {
        parts.push(others.join(", "));
    }
    if parts.is_empty() {
        let each = results.iter().map(|result| format!("{} needs {}", result.pool.as_str(), needs(result)));
        parts.push(each.collect::<Vec<_>>().join(", "));
    }
    parts.join("; ")
}

/// Writes the picture, whole or not at all.
pub(super) fn report(args: &ReplayArgs, replayed: &Replayed, out: &Path) -> std::result::Result<(), Failure> {
    let Replayed { trace, script, recorded, notes, results, .. } = replayed;
    let title = args.file.file_name().unwrap_or(args.file.as_os_str()).to_string_lossy();
    let iterations = iterations(script);
    let real = recorded.iter().map(|record| PoolReport {
        name: "recorded",
        figures: vec![("peak reserved", most_reserved(record).to_string())],
        out_of_memory: None,
        record,
    });
    let pools = results.iter().filter_map(|result| {
        Some(PoolReport {
            name: result.pool.as_str(),
            figures: figures(replayed, result),
            out_of_memory: result.done.run.out_of_memory.map(|refused| (refused.event, refused.requested)),
            record: result.done.run.record.as_ref()?,
        })
    });
    let report = Report {
        title: &title,
        trace,
        notes,
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

/// What the page says of a pool.
fn figures(replayed: &Replayed, result: &Result) -> Vec<(&'static str, String)> {
    let run = &result.done.run;
    let mut figures = vec![
        ("peak reserved", run.peak_reserved.to_string()),
        ("peak live", run.peak_live.to_string()),
        ("efficiency", percent(run.efficiency())),
    ];
    if replayed.has_plan {
        figures.push(("efficiency after the plan", run.efficiency_after().map_or_else(String::new, percent)));
    }
    if let Some(least) = result.min_capacity.flatten() {
        figures.push(("needs", least.to_string()));
    }
    figures.extend([
        ("driver calls", run.calls.total().to_string()),
        ("driver calls in the last iteration", run.last_iteration.total().to_string()),
        ("modelled driver seconds", format!("{:.3}", run.calls.seconds)),
    ]);
    figures
}
