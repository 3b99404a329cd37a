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
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use self::costs::ShownCosts;
use self::questions::{Answered, Beside};
use super::serve::OPENING_CALLS;
use super::table::Table;
use super::{Failure, Outcome, print_json};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::conformance::{self, Outcome as Verdict, Subject};
use crate::driver::costs::Effort;
use crate::driver::layers::metered::{Meter, Metered};
use crate::driver::{DeviceDescription, Driver, DriverName, OpenError};
use crate::ids::DeviceId;
use crate::session::locate::Environment;
use crate::session::opening;
use crate::units::Bytes;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd selftest --driver host            # every rule, on memory of this machine\n  stitchd selftest --driver host --costs    # and what each call takes; the ladder\n  stitchd selftest --driver host --all      # and questions, by experiment"
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
    /// Checks, costs and questions; each part has a time limit, all of a device together five minutes
    #[arg(long)]
    all: bool,
    /// Measure in half a second, and nothing else: for a daemon that starts
    #[arg(long, hide = true, conflicts_with_all = ["costs", "questions", "all"])]
    only_costs: bool,
    /// A driver call that takes longer than this, in a check or while it is timed, hangs: it is named, and the test is over
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=60))]
    call_limit: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks and measuring take so long at most: with the questions' own limit a device is done in five minutes.
const CHECKS_MAX: Duration = Duration::from_secs(30);
const MEASURING_MAX: Duration = Duration::from_secs(60);

/// What a pretended device has.
const PRETENDED: Bytes = Bytes::gib(8);

/// Opens the driver, with so many devices where they are pretended.
fn open(driver: DriverName, devices: u32) -> Result<Arc<dyn Driver>, OpenError> {
    let totals = vec![PRETENDED; devices as usize];
    crate::driver::open(driver, &totals, &Environment::read().library)
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
    let limit = args.call_limit() * OPENING_CALLS;
    let asks = args.questions || args.all;
    let first = DeviceId(args.device.unwrap_or(0));
    let mut before = asks.then(|| questions::ask_before_opening(args.driver, first, limit));
    let (name, count) = (args.driver, args.device.map_or(1, |device| device + 1));
    let driver = opening::in_time(name.as_str(), limit, move || open(name, count))?;
    let driver = Meter::around(driver, Arc::new(SystemClock::new()));
    let mut devices = driver.devices();
    let count = devices.len();
    devices.retain(|device| args.device.is_none_or(|wanted| device.id.0 == wanted));
    if devices.is_empty() {
        let wanted = args.device.map_or_else(String::new, |wanted| format!(" {wanted}"));
        return Err(Failure::Usage(format!("there is no device{wanted}; the {} driver has {count}", driver.name())));
    }
    let show = |(place, device)| show(args, &driver, device, place == 0);
    let mut shown = devices.into_iter().enumerate().map(show).collect::<Result<Vec<_>, _>>()?;
    if let Some(shown) = shown.iter_mut().find(|shown| shown.device.id == first) {
        shown.questions.splice(0..0, before.take());
    }
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

impl SelftestArgs {
    fn call_limit(&self) -> Duration {
        Duration::from_secs(self.call_limit)
    }

    /// Does a part of the test on a thread of its own, because a call that hangs cannot be interrupted. A part with such a call is given up, and with it the test: nothing that came
    /// after could be believed.
    fn in_time<T: Send + 'static>(
        &self,
        driver: &Arc<Metered>,
        device: &DeviceDescription,
        (part, limit): (&'static str, Duration),
        work: impl FnOnce(&Metered, &DeviceDescription) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        const LOOK: Duration = Duration::from_millis(100);
        let (send, receive) = channel();
        let (worker, described) = (Arc::clone(driver), device.clone());
        // If it has been given up nobody listens any more.
        let thread = std::thread::Builder::new().spawn(move || drop(send.send(work(&worker, &described))));
        thread.context("a thread for the test").map_err(Failure::Other)?;
        let clock = SystemClock::new();
        let given_up = |why: String| Err(Failure::Other(anyhow::anyhow!("{}: {why}", device.id)));
        loop {
            match receive.recv_timeout(LOOK) {
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Disconnected) => return given_up(format!("{part} have panicked")),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let call = driver.layer().longest();
            if let Some((call, age)) = call.filter(|(_, age)| *age > self.call_limit()) {
                let seconds = age.as_secs();
                let why = format!(
                    "a {call} in the {part} has not come back for {seconds} s: the driver hangs (`dmesg` may say why); the rest was not tried"
                );
                return given_up(why);
            }
            if clock.now() > limit {
                let call = call.map_or_else(|| "none".to_owned(), |(call, _)| call.to_string());
                return given_up(format!(
                    "the {part} have not ended in {} s; the call under way is {call}",
                    limit.as_secs()
                ));
            }
        }
    }
}

/// Tests one device; with the first goes what is asked about all.
fn show(
    args: &SelftestArgs,
    driver: &Arc<Metered>,
    device: DeviceDescription,
    is_first: bool,
) -> Result<Shown, Failure> {
    let say = |what: &str| progress(&device, what);
    let is_long = args.costs || args.questions || args.all;
    let mut checks = Vec::new();
    if !args.only_costs {
        if is_long {
            say("checks");
        }
        checks = args.in_time(driver, &device, ("checks", CHECKS_MAX), |driver, device| {
            conformance::run(&Subject { driver, device: device.id, stall: None })
        })?;
    }
    let (effort, is_quiet) = if args.only_costs { (Effort::QUICK, true) } else { (Effort::THOROUGH, false) };
    let mut costs = None;
    if args.only_costs || args.costs || args.all {
        let measured = args.in_time(driver, &device, ("measurements", MEASURING_MAX), move |driver, device| {
            let say = |what: &str| {
                if !is_quiet {
                    progress(device, what)
                }
            };
            ShownCosts::measure(driver, device, effort, &say)
        })?;
        costs = Some(measured?);
    }
    let mut questions = Vec::new();
    if args.questions || args.all {
        let beside = Beside { of_all_devices: is_first, taking: args.all };
        let name = args.driver.opened_as(&**driver);
        questions = questions::ask_all(name, Arc::clone(driver) as Arc<dyn Driver>, &device, beside, &say);
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
