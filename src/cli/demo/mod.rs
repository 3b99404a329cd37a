//! `stitchd demo`: the main job on any machine.
//!
//! A real daemon process on the host driver, and trainer processes that replay real training traces at once against it over its real sockets, each with a plan for
//! its static pool. A last one has to wait: there is not enough left, until another is killed half way and its memory comes back. Every allocation
//! carries a pattern, and at the end every byte must be back.

mod cast;
mod node;
mod show;

use clap::Args;
use serde_json::json;

use self::cast::{Act, CAST};
use self::node::Node;
use self::show::Show;
use super::table::Table;
use super::{Failure, Outcome, print_json};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::{self, DriverName};
use crate::session::locate::Environment;
use crate::units::Bytes;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  stitchd demo\n  stitchd demo --repeat 5 --json")]
pub(super) struct DemoArgs {
    /// Which driver: auto, cuda, hip or host
    #[arg(long, value_name = "NAME", default_value = "host")]
    driver: DriverName,
    /// Replay the last iteration of each trace so many times more
    #[arg(long, value_name = "N", default_value_t = 12)]
    repeat: u32,
    /// Where the daemon's page and metrics are to be; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    http: String,
    /// Keep the scratch directory: traces, plans, the daemon's log
    #[arg(long)]
    keep: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What became of the demo.
#[derive(Debug)]
struct Result {
    acts: Vec<Act>,
    budget: Bytes,
    peak_leased: Bytes,
    returned_after_kill: Bytes,
    reclaim_seconds: f64,
    lost: Bytes,
    resident: Bytes,
    seconds: f64,
}

pub(super) fn run(args: &DemoArgs) -> Outcome {
    // Before anything is started: a driver that is not there is said as everywhere else.
    let Some(opened) = driver::open_shared(args.driver, &[], &Environment::read().library)? else {
        return Err(Failure::Usage(format!(
            "processes cannot share the memory of the {} driver; --help says which the demo takes",
            args.driver.as_str()
        )));
    };
    let driver = args.driver.opened_as(&*opened);
    drop(opened);
    let clock = SystemClock::new();
    let show = Show::new(args.json);
    let result = perform(args, driver, &show, &clock).map_err(Failure::Other)?;
    if args.json {
        print_json(&to_json(&result));
    } else {
        print(&result);
    }
    Ok(u8::from(!result.is_good()))
}

fn perform(args: &DemoArgs, driver: DriverName, show: &Show, clock: &SystemClock) -> anyhow::Result<Result> {
    let mut node = Node::start(driver, &args.http, args.keep, show)?;
    show.say(&node.introduce()?);
    show.say(&format!("daemon    pid {} in {}", node.daemon_pid(), node.directory().display()));
    show.say(&format!("look      http://{}/ or stitchd top --socket {}", node.http(), node.socket().display()));
    let mut acts = Vec::new();
    for role in &CAST {
        let act = Act::prepare(role, node.directory())?;
        show.say(&format!(
            "plan      {:<16} {} requests in {} (bound {}), made in {:.2} s",
            role.name, act.planned_requests, act.pool_len, act.lower_bound, act.plan_seconds
        ));
        acts.push(act);
    }
    for act in acts.iter().filter(|act| !act.role.is_late) {
        let chunks = node.reserve(act)?;
        show.say(&format!("reserved  {:<16} {} in {chunks} chunks", act.role.name, act.pool_len));
    }
    let mut troupe = node.troupe(acts, args.repeat, show)?;
    let killed = troupe.play(&mut node, show)?;
    let acts = troupe.finish();
    let end = node.end(show)?;
    let result = Result {
        acts,
        budget: end.budget,
        peak_leased: end.peak_leased,
        returned_after_kill: killed.returned,
        reclaim_seconds: killed.seconds,
        lost: end.lost,
        resident: killed.resident,
        seconds: clock.now().as_secs_f64(),
    };
    Ok(result)
}

impl Result {
    /// Every pattern held, the killed trainer's bytes came back, and at the end all of them did.
    fn is_good(&self) -> bool {
        let finished = self.acts.iter().filter(|act| !act.was_killed);
        let all_finished =
            finished.clone().count() + 1 == self.acts.len() && finished.clone().all(|act| act.report.is_some());
        all_finished && self.lost.is_zero() && !self.returned_after_kill.is_zero()
    }
}

fn to_json(result: &Result) -> serde_json::Value {
    let process = |act: &Act| {
        let report = act.report.clone().unwrap_or_default();
        let number = |key: &str| report.get(key).cloned().unwrap_or(json!(0));
        let object = |key: &str| report.get(key).cloned().unwrap_or(json!(null));
        json!({
            "name": act.role.name,
            "trace": act.role.trace,
            "allocations": number("allocations"),
            "peak_live_bytes": act.peak_live().get(),
            "peak_leased_bytes": act.peak_leased().get(),
            "patterns_checked": number("patterns_checked"),
            "killed": act.was_killed,
            "waited": act.role.is_late,
            "served": object("served"),
            "served_bytes": object("served_bytes"),
            "deviations": number("deviations"),
            "driver_calls_first_iteration": number("driver_calls_first_iteration"),
            "driver_calls_last_iteration": number("driver_calls_last_iteration"),
            "driver_calls_by_iteration": object("driver_calls_by_iteration"),
            "ns_per_allocation": object("ns_per_allocation"),
        })
    };
    json!({
        "processes": result.acts.iter().map(process).collect::<Vec<_>>(),
        "device_budget_bytes": result.budget.get(),
        "peak_leased_bytes": result.peak_leased.get(),
        "bytes_returned_after_kill": result.returned_after_kill.get(),
        "reclaim_seconds": result.reclaim_seconds,
        "lost_bytes": result.lost.get(),
        "resident_bytes": result.resident.get(),
        "seconds": result.seconds,
    })
}

fn print(result: &Result) {
    let mut table = Table::new(&[
        "process",
        ">allocations",
        ">peak live",
        ">peak leased",
        ">efficiency",
        ">plan",
        ">reuse",
        ">pool",
        ">calls first",
        ">calls last",
        ">ns/alloc",
        ">patterns",
        "",
    ]);
    for act in &result.acts {
        let report = act.report.clone().unwrap_or_default();
        let number = |path: &[&str]| {
            path.iter().try_fold(&report, |value, key| value.get(key)).and_then(serde_json::Value::as_f64)
        };
        let cell = |path: &[&str]| number(path).map_or_else(|| "-".to_owned(), |n| format!("{n:.0}"));
        let efficiency = act.peak_live().get() as f64 / act.peak_leased().get().max(1) as f64;
        let served = |pool: &str| {
            let all: f64 = ["planned", "reuse", "pool"].iter().filter_map(|pool| number(&["served", pool])).sum();
            number(&["served", pool]).map_or_else(|| "-".to_owned(), |n| format!("{:.1} %", 100.0 * n / all.max(1.0)))
        };
        table.row(vec![
            act.role.name.to_owned(),
            cell(&["allocations"]),
            act.peak_live().to_string(),
            act.peak_leased().to_string(),
            format!("{:.1} %", efficiency * 100.0),
            served("planned"),
            served("reuse"),
            served("pool"),
            cell(&["driver_calls_first_iteration"]),
            cell(&["driver_calls_last_iteration"]),
            cell(&["ns_per_allocation"]),
            cell(&["patterns_checked"]),
            if act.was_killed {
                "killed".into()
            } else if act.role.is_late {
                "waited".into()
            } else {
                String::new()
            },
        ]);
    }
    out!("\n");
    out!("{table}");
    out!("\n");
    outln!("node      {} leased at most, of {}", result.peak_leased, result.budget);
    outln!(
        "killed    {} came back {:.0} ms after SIGKILL and went to the one that waited",
        result.returned_after_kill,
        result.reclaim_seconds * 1000.0
    );
    outln!("end       {} lost; {} were really resident; {:.1} s", result.lost, result.resident, result.seconds);
    outln!("{}", if result.is_good() { "every pattern held, every byte came back" } else { "FAILED" });
}
