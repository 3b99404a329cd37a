//! What calls cost, as it is shown, with the ladder that follows.

use serde_json::{Map, Value, json};

use crate::cli::Failure;
use crate::cli::table::Table;
use crate::driver::costs::{self, Costs, Effort};
use crate::driver::{DeviceDescription, Driver, DriverError};
use crate::error::chain;
use crate::ladder::Ladder;

/// The costs on a device, and the ladder that follows.
pub(super) struct ShownCosts {
    costs: Costs,
    ladder: Ladder,
}

impl ShownCosts {
    pub(super) fn measure(
        driver: &dyn Driver,
        device: &DeviceDescription,
        effort: Effort,
        progress: &dyn Fn(&str),
    ) -> Result<ShownCosts, Failure> {
        let failed = |error: DriverError| {
            Failure::Other(anyhow::anyhow!("the driver failed while its calls were timed: {}", chain(&error)))
        };
        let granularity = driver.capabilities(device.id).map_err(failed)?.granularity;
        let costs = costs::measure(driver, device.id, effort, progress).map_err(failed)?;
        let ladder = Ladder::following(&costs.of_chunks(), granularity, device.total);
        Ok(ShownCosts { costs, ladder })
    }

    pub(super) fn add_to(&self, shown: &mut Value) {
        let cost = |cost: &costs::Cost| {
            let calls = cost.calls.iter().map(|(call, nanos)| (call.name().to_owned(), json!(nanos)));
            json!({
                "chunk_bytes": cost.len.get(),
                "rounds": cost.rounds,
                "chunk_nanoseconds": cost.of_chunk().nanos,
                "nanoseconds": calls.collect::<Map<_, _>>(),
            })
        };
        shown["costs"] = self.costs.chunks.iter().map(cost).collect();
        shown["run"] = self.costs.run.map_or(Value::Null, |run| {
            json!({
                "chunk_bytes": run.len.get(),
                "chunks": run.count,
                "nanoseconds": {
                    "set_access_once": run.set_access_once,
                    "set_access_each": run.set_access_each,
                    "unmap_once": run.unmap_once,
                    "unmap_each": run.unmap_each,
                },
            })
        });
        shown["ladder_bytes"] = self.ladder.steps().iter().map(|step| step.get()).collect();
    }

    pub(super) fn print(&self) {
        let micros = |nanos: u64| format!("{:.1}", nanos as f64 / 1000.0);
        let Some(first) = self.costs.chunks.first() else {
            return outln!("there is no room for a chunk: nothing was measured");
        };
        let calls = first.calls.iter().map(|(call, _)| format!(">{call}"));
        let headers: Vec<String> =
            ["chunk".to_owned()].into_iter().chain(calls).chain([">of a MiB".to_owned()]).collect();
        let mut table = Table::new(&headers.iter().map(String::as_str).collect::<Vec<_>>());
        for cost in &self.costs.chunks {
            let calls = cost.calls.iter().map(|(_, nanos)| micros(*nanos));
            let of_chunk = cost.of_chunk();
            let of_a_mib = format!("{:.2}", of_chunk.nanos as f64 / 1000.0 / (of_chunk.len.get() >> 20) as f64);
            table.row([cost.len.to_string()].into_iter().chain(calls).chain([of_a_mib]).collect());
        }
        outln!("µs for each call, medians; the last column is what a MiB costs in chunks of that size\n\n{table}");
        if let Some(run) = self.costs.run {
            let mut table = Table::new(&["a run", ">one call", ">single calls"]);
            table.row(vec!["set_access".to_owned(), micros(run.set_access_once), micros(run.set_access_each)]);
            table.row(vec!["unmap".to_owned(), micros(run.unmap_once), micros(run.unmap_each)]);
            outln!("µs for {} chunks of {}\n\n{table}", run.count, run.len);
        }
        outln!("the ladder that follows, as the configuration takes it:\n\nladder = {}\n", self.ladder.to_toml());
    }
}
