//! `stitchd selftest`: whether a driver keeps the rules on this machine, and what its calls cost.

use clap::Args;
use serde_json::json;

use super::table::Table;
use super::{Failure, Outcome, print_json};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::conformance::{self, Outcome as Verdict, Subject};
use crate::driver::{Access, Call, Driver, DriverError, DriverName};
use crate::error::chain;
use crate::ids::DeviceId;
use crate::ladder::Ladder;
use crate::session::locate::Environment;
use crate::units::{Bytes, Span};

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd selftest --driver host            every rule, on memory of this machine\n  stitchd selftest --driver host --costs    and what each call takes, by chunk size"
)]
pub(super) struct SelftestArgs {
    /// Which driver: auto, cuda, hip, host or sim
    #[arg(long, value_name = "NAME", default_value = "auto")]
    driver: DriverName,
    /// Only this device [default: all]
    #[arg(long, value_name = "ORDINAL")]
    device: Option<u32>,
    /// Measure what the calls cost, too
    #[arg(long)]
    costs: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What pretended devices have.
const PRETENDED: [Bytes; 1] = [Bytes::gib(8)];

impl SelftestArgs {
    fn open(&self) -> Result<std::sync::Arc<dyn Driver>, Failure> {
        Ok(crate::driver::open(self.driver, &PRETENDED, &Environment::read().library)?)
    }
}

/// What one device showed.
struct Shown {
    device: DeviceId,
    model: String,
    uuid: String,
    checks: Vec<(&'static str, Verdict)>,
    costs: Vec<Cost>,
}

pub(super) fn run(args: &SelftestArgs) -> Outcome {
    let driver = args.open()?;
    let mut devices = driver.devices();
    let count = devices.len();
    devices.retain(|device| args.device.is_none_or(|wanted| device.id.0 == wanted));
    if devices.is_empty() {
        let wanted = args.device.map_or_else(String::new, |wanted| format!(" {wanted}"));
        return Err(Failure::Usage(format!("there is no device{wanted}; the {} driver has {count}", driver.name())));
    }
    let mut shown = Vec::new();
    for device in devices {
        let subject = Subject { driver: &*driver, device: device.id, stall: None };
        let checks = conformance::run(&subject);
        let costs = if args.costs { costs(&*driver, device.id)? } else { Vec::new() };
        shown.push(Shown { device: device.id, model: device.model, uuid: device.uuid.to_string(), checks, costs });
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

impl Shown {
    fn json(&self) -> serde_json::Value {
        let check = |(name, verdict): &(&str, Verdict)| match verdict {
            Verdict::Passed => json!({ "check": name, "outcome": "passed" }),
            Verdict::Skipped(why) => json!({ "check": name, "outcome": "skipped", "why": why }),
            Verdict::Failed(why) => json!({ "check": name, "outcome": "failed", "why": why }),
        };
        let cost = |cost: &Cost| {
            let calls = cost.calls.iter().map(|(call, nanos)| (call.name().to_owned(), json!(nanos)));
            json!({ "chunk_bytes": cost.len.get(), "nanoseconds": calls.collect::<serde_json::Map<_, _>>() })
        };
        json!({
            "device": self.device.0,
            "uuid": self.uuid,
            "model": self.model,
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
            "costs": self.costs.iter().map(cost).collect::<Vec<_>>(),
        })
    }

    fn print(&self, driver: &str) {
        outln!("{} on the {driver} driver: {}, {}", self.device, self.model, self.uuid);
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
        if self.costs.is_empty() {
            return;
        }
        let calls = self.costs[0].calls.iter().map(|(call, _)| format!(">{call}"));
        let headers: Vec<String> = ["chunk".to_owned()].into_iter().chain(calls).collect();
        let mut table = Table::new(&headers.iter().map(String::as_str).collect::<Vec<_>>());
        for cost in &self.costs {
            let micros = cost.calls.iter().map(|(_, nanos)| format!("{:.1}", *nanos as f64 / 1000.0));
            table.row([cost.len.to_string()].into_iter().chain(micros).collect());
        }
        outln!("µs for each call, median of {ROUNDS}\n\n{table}");
    }
}

/// What the calls for chunks of one size take.
struct Cost {
    len: Bytes,
    /// Nanoseconds, the median.
    calls: Vec<(Call, u64)>,
}

const ROUNDS: usize = 21;

fn costs(driver: &dyn Driver, device: DeviceId) -> Result<Vec<Cost>, Failure> {
    let free = driver.memory(device).map_err(failed)?.free;
    let sizes = Ladder::standard();
    let sizes = sizes.steps().iter().filter(|len| **len <= free);
    sizes.map(|len| cost(driver, device, *len).map_err(failed)).collect()
}

fn failed(error: DriverError) -> Failure {
    Failure::Other(anyhow::anyhow!("the driver failed while its calls were timed: {}", chain(&error)))
}

fn cost(driver: &dyn Driver, device: DeviceId, len: Bytes) -> Result<Cost, DriverError> {
    let granularity = driver.capabilities(device)?.granularity;
    let mut times: Vec<(Call, Vec<u64>)> = Vec::new();
    for _ in 0..ROUNDS {
        let mut clock = Stopwatch { times: &mut times, at: 0 };
        let handle = clock.time(Call::Create, || driver.create(device, len))?;
        let fd = clock.time(Call::Export, || driver.export(handle))?;
        let imported = clock.time(Call::Import, || driver.import(device, fd, len))?;
        let start = clock.time(Call::Reserve, || driver.reserve(device, len, granularity))?;
        let span = Span::new(start, len).expect("a reserved span fits");
        clock.time(Call::Map, || driver.map(start, imported))?;
        clock.time(Call::SetAccess, || driver.set_access(span, device, Access::ReadWrite))?;
        clock.time(Call::Synchronize, || driver.synchronize(device))?;
        clock.time(Call::Unmap, || driver.unmap(span))?;
        clock.time(Call::Unreserve, || driver.unreserve(span))?;
        driver.release(imported)?;
        clock.time(Call::Release, || driver.release(handle))?;
    }
    let median = |(call, mut nanos): (Call, Vec<u64>)| {
        nanos.sort_unstable();
        (call, nanos[nanos.len() / 2])
    };
    Ok(Cost { len, calls: times.into_iter().map(median).collect() })
}

/// Times the calls of one round, in the order in which they come.
struct Stopwatch<'a> {
    times: &'a mut Vec<(Call, Vec<u64>)>,
    at: usize,
}

impl Stopwatch<'_> {
    fn time<T>(&mut self, call: Call, run: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let clock = SystemClock::new();
        let outcome = run()?;
        let took = u64::try_from(clock.now().as_nanos()).unwrap_or(u64::MAX);
        if self.at == self.times.len() {
            self.times.push((call, Vec::new()));
        }
        self.times[self.at].1.push(took);
        self.at += 1;
        Ok(outcome)
    }
}
