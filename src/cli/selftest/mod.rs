//! `stitchd selftest`: whether a driver keeps the rules on this machine, what its calls cost and which ladder follows, and what nobody has written down about it.
//!
//! | part | what it is |
//! |---|---|
//! | [`crate::driver::conformance`] | the checks, which pass or fail |
//! | [`costs`] | what calls take, and the ladder that follows |
//! | [`questions`] | experiments: what they find is an answer, and never a failure |
//! | [`helper`], [`probe`] | the other process that some experiments need, from outside and from inside |

mod costs;
mod fork;
mod helper;
pub(super) mod probe;
mod questions;

use std::sync::Arc;

use clap::Args;
use serde_json::json;

use self::costs::ShownCosts;
use self::questions::Answered;
use super::table::Table;
use super::{Failure, Outcome, print_json};
use crate::driver::conformance::{self, Outcome as Verdict, Subject};
use crate::driver::costs::Effort;
use crate::driver::{DeviceDescription, Driver, DriverName};
use crate::session::locate::Environment;
use crate::units::Bytes;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd selftest --driver host            every rule, on memory of this machine\n  stitchd selftest --driver host --costs    and what each call takes, by chunk size, with the ladder that follows\n  stitchd selftest --driver host --all      and what nobody has written down about the driver, by experiment"
)]
pub(super) struct SelftestArgs {
    /// Which driver: auto, cuda, hip, host or sim
    #[arg(long, value_name = "NAME", default_value = "auto")]
    driver: DriverName,
    /// Only this device [default: all]
    #[arg(long, value_name = "ORDINAL", value_parser = clap::value_parser!(u32).range(..1024))]
    device: Option<u32>,
    /// Measure what the calls cost, too, and print the ladder that follows
    #[arg(long)]
    costs: bool,
    /// Ask, by experiment, what is not written down: what memory holds, who keeps it, when it comes back
    #[arg(long)]
    questions: bool,
    /// Checks, costs and questions; each question has a time limit, all of a device 210 s
    #[arg(long)]
    all: bool,
    /// Measure in half a second, and nothing else: for a daemon that starts
    #[arg(long, hide = true, conflicts_with_all = ["costs", "questions", "all"])]
    only_costs: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What a pretended device has.
const PRETENDED: Bytes = Bytes::gib(8);

/// Opens the driver, with so many devices where they are pretended.
fn open(driver: DriverName, devices: u32) -> Result<Arc<dyn Driver>, Failure> {
    let totals = vec![PRETENDED; devices as usize];
    Ok(crate::driver::open(driver, &totals, &Environment::read().library)?)
}

/// What one device showed.
struct Shown {
    device: DeviceDescription,
    checks: Vec<(&'static str, Verdict)>,
    costs: Option<ShownCosts>,
    questions: Vec<Answered>,
}

/// What long work is about, for whoever waits.
fn progress(device: &DeviceDescription, what: &str) {
    eprintln!("{}: {what}", device.id);
}

pub(super) fn run(args: &SelftestArgs) -> Outcome {
    let driver = open(args.driver, args.device.map_or(1, |device| device + 1))?;
    let mut devices = driver.devices();
    let count = devices.len();
    devices.retain(|device| args.device.is_none_or(|wanted| device.id.0 == wanted));
    if devices.is_empty() {
        let wanted = args.device.map_or_else(String::new, |wanted| format!(" {wanted}"));
        return Err(Failure::Usage(format!("there is no device{wanted}; the {} driver has {count}", driver.name())));
    }
    let shown = devices.into_iter().map(|device| show(args, &driver, device)).collect::<Result<Vec<_>, _>>()?;
    let failed =
        shown.iter().flat_map(|shown| &shown.checks).filter(|(_, verdict)| matches!(verdict, Verdict::Failed(_)));
    let failed = failed.count();
    if args.json {
        print_json(&json!({
            "driver": driver.name(),
            "passed": failed == 0,
            "devices": shown.iter().map(Shown::json).collect::<Vec<_>>(),
        }));
    } else {
        shown.iter().for_each(|shown| shown.print(driver.name()));
    }
    Ok(u8::from(failed > 0))
}

fn show(args: &SelftestArgs, driver: &Arc<dyn Driver>, device: DeviceDescription) -> Result<Shown, Failure> {
    let say = |what: &str| progress(&device, what);
    let is_long = args.costs || args.questions || args.all;
    let mut checks = Vec::new();
    if !args.only_costs {
        if is_long {
            say("checks");
        }
        checks = conformance::run(&Subject { driver: &**driver, device: device.id, stall: None });
    }
    let costs = match (args.only_costs, args.costs || args.all) {
        (true, _) => Some(ShownCosts::measure(&**driver, &device, Effort::QUICK, &|_| ())?),
        (_, true) => Some(ShownCosts::measure(&**driver, &device, Effort::THOROUGH, &say)?),
        _ => None,
    };
    let mut questions = Vec::new();
    if args.questions || args.all {
        questions = questions::ask_all(args.driver, Arc::clone(driver), &device, &say);
    }
    Ok(Shown { device, checks, costs, questions })
}

impl Shown {
    fn json(&self) -> serde_json::Value {
        let check = |(name, verdict): &(&str, Verdict)| match verdict {
            Verdict::Passed => json!({ "check": name, "outcome": "passed" }),
            Verdict::Skipped(why) => json!({ "check": name, "outcome": "skipped", "why": why }),
            Verdict::Failed(why) => json!({ "check": name, "outcome": "failed", "why": why }),
        };
        let mut shown = json!({
            "device": self.device.id.0,
            "uuid": self.device.uuid.to_string(),
            "model": self.device.model,
            "total_bytes": self.device.total.get(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
        });
        if let Some(costs) = &self.costs {
            costs.add_to(&mut shown);
        }
        if !self.questions.is_empty() {
            shown["questions"] = self.questions.iter().map(Answered::json).collect();
        }
        shown
    }

    fn print(&self, driver: &str) {
        outln!("{} on the {driver} driver: {}, {}", self.device.id, self.device.model, self.device.uuid);
        if !self.checks.is_empty() {
            let mut table = Table::new(&["check", "outcome"]);
            for (name, verdict) in &self.checks {
                let outcome = match verdict {
                    Verdict::Passed => "passed".to_owned(),
                    Verdict::Skipped(why) => format!("skipped: {why}"),
                    Verdict::Failed(why) => format!("FAILED: {why}"),
                };
                table.row(vec![name.replace('_', " "), outcome]);
            }
            outln!("\n{table}");
        }
        if let Some(costs) = &self.costs {
            costs.print();
        }
        if !self.questions.is_empty() {
            let mut table = Table::new(&["question", "answer"]);
            self.questions.iter().for_each(|answered| answered.add_to(&mut table));
            outln!("{table}");
        }
    }
}
