//! `--set KEY=VALUE`, and `--sweep KEY=A,B,C`: the same replay once for each value of a setting.

use serde_json::{Value, json};

use super::super::table::Table;
use super::super::{Failure, Outcome, print_json, print_out};
use super::{ReplayArgs, all, show};
use crate::replay::{Job, PoolName, Setup};
use crate::units::Bytes;

/// A setting and its values.
#[derive(Debug)]
pub(super) struct Sweep {
    key: String,
    values: Vec<String>,
}

const KEYS: &str = "capacity, gmlake.frag_limit, gmlake.stitches_max, stitchd.granule, stitchd.soft_budget, stitchd.slack_per_mille, stitchd.fragmentation_limit, stitchd.stitch_limit, and caching.OPTION for any option of PyTorch";

/// `KEY=VALUE` as `--set` takes it.
pub(super) fn set(text: &str, setup: &Setup) -> Result<Setup, Failure> {
    let wrong = || Failure::Usage(format!("--set takes KEY=VALUE, not '{text}'; keys are {KEYS}"));
    let (key, value) = text.split_once('=').ok_or_else(wrong)?;
    with(setup, key.trim(), value.trim())
}

/// The same with one setting changed.
fn with(setup: &Setup, key: &str, value: &str) -> Result<Setup, Failure> {
    let mut setup = setup.clone();
    let wrong = |why: String| Failure::Usage(format!("{key}={value}: {why}"));
    let bytes = || value.parse::<Bytes>().map_err(|error| wrong(error.to_string()));
    let number = || value.parse::<usize>().map_err(|_| wrong("not a number".to_owned()));
    match key {
        "capacity" => setup.capacity = Some(bytes()?),
        "gmlake.frag_limit" => setup.gmlake.frag_limit = bytes()?,
        "gmlake.stitches_max" => setup.gmlake.stitches_max = number()?,
        "stitchd.granule" => setup.runtime.granule = bytes()?,
        "stitchd.soft_budget" => setup.runtime.soft_budget = bytes()?,
        "stitchd.slack_per_mille" => setup.runtime.slack_per_mille = number()? as u64,
        "stitchd.fragmentation_limit" => setup.runtime.stitch.fragmentation_limit = bytes()?,
        "stitchd.stitch_limit" => setup.runtime.stitch.stitch_limit = bytes()?,
        key => {
            let unknown = || Failure::Usage(format!("there is no setting '{key}'; there are {KEYS}"));
            let option = key.strip_prefix("caching.").ok_or_else(unknown)?;
            setup.conf = setup.conf.and(&format!("{option}:{value}")).map_err(|error| wrong(error.to_string()))?;
        }
    }
    Ok(setup)
}

impl Sweep {
    pub(super) fn parse(text: &str) -> Result<Sweep, Failure> {
        let wrong = || Failure::Usage(format!("--sweep takes KEY=A,B,C; keys are {KEYS}"));
        let (key, values) = text.split_once('=').ok_or_else(wrong)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if values.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(Sweep { key: key.trim().to_owned(), values })
    }

    pub(super) fn run(&self, args: &ReplayArgs, pools: &[PoolName], job: Job<'_>, setup: &Setup) -> Outcome {
        // All values first: one that is wrong must not cost the others' work.
        let setups = self.values.iter().map(|value| with(setup, &self.key, value));
        let setups = setups.collect::<Result<Vec<_>, _>>()?;
        let mut table = Table::new(&[
            &self.key,
            "pool",
            ">reserved",
            ">efficiency",
            ">driver calls",
            ">per iteration",
            ">driver seconds",
            "",
        ]);
        let mut swept = Vec::new();
        for (value, setup) in self.values.iter().zip(&setups) {
            let results = all(args, pools, job, setup)?;
            let mut shown: Vec<Value> = Vec::new();
            for result in &results {
                let run = &result.done.run;
                table.row(vec![
                    value.clone(),
                    result.pool.as_str().to_owned(),
                    run.peak_reserved.to_string(),
                    format!("{:.2} %", run.efficiency() * 100.0),
                    run.calls.total().to_string(),
                    run.last_iteration.total().to_string(),
                    format!("{:.3}", run.calls.seconds),
                    if run.out_of_memory.is_some() { "out of memory".into() } else { String::new() },
                ]);
                shown.push(show::pool_json(job.trace, job.plan.is_some(), result, &setup.costs));
            }
            swept.push(json!({ "key": self.key, "value": value, "pools": shown }));
        }
        if args.json {
            print_json(&json!({ "trace": show::trace_json(job.script), "sweep": swept }));
        } else {
            print_out(&table);
        }
        Ok(0)
    }
}
