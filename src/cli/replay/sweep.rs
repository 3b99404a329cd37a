//! `--set KEY=VALUE`, and `--sweep KEY=A,B,C`: the same replay once for each value of a setting.

use serde_json::{Value, json};

use super::super::table::Table;
use super::super::{Failure, Outcome, print_json, print_out};
use super::{ReplayArgs, all, show};
use crate::ladder::Ladder;
use crate::replay::models::gmlake::GmlakeRules;
use crate::replay::{Job, PoolName, Setup};
use crate::units::Bytes;

/// A setting and its values.
#[derive(Debug)]
pub(super) struct Sweep {
    key: String,
    values: Vec<String>,
}

/// Every setting, with its unit and what it is.
const KEYS: [(&str, &str); 15] = [
    ("capacity", "bytes that the device has for this process"),
    ("gmlake.frag_limit", "bytes; GMLake's fragmentation limit (512MiB)"),
    ("gmlake.rules", "code or paper; the limit is about requests in the code, and about blocks in the paper (code)"),
    ("gmlake.stitched_max", "bytes of addresses that GMLake's stitched blocks may take (1000GiB)"),
    ("gmlake.stitches_max", "stitched blocks of GMLake before idle ones go (10000)"),
    ("stitchd.granule", "bytes; smallest chunk, of which all others are multiples, a power of two (2MiB)"),
    ("stitchd.chunk_per_mille", "a chunk has at most so many thousandths of what is held; 0: all of one granule (17)"),
    ("stitchd.request_chunks", "what one request lacks comes in about so many chunks at least (4)"),
    ("stitchd.chunk_max", "bytes; largest chunk (512MiB)"),
    ("stitchd.chunk_least", "bytes; smallest chunk from 1 GiB held on, before by the root of what is held (32MiB)"),
    ("stitchd.soft_budget", "bytes; up to which the pool grows rather than stitches (0)"),
    ("stitchd.slack_per_mille", "above it it still grows while at most so many thousandths are idle (2)"),
    ("stitchd.piece_min", "bytes; a part of a chunk is stitched if it saves as much new memory (8MiB)"),
    ("stitchd.stitch_min", "bytes; smaller requests are stitched only if memory runs out (2MiB)"),
    ("caching.OPTION", "any option of PyTorch's, such as caching.max_split_size_mb=128; expandable has it, too"),
];

/// Settings of the pools before this version, and what has their place. They are read for one version.
const OLD_KEYS: [(&str, Option<&str>); 3] = [
    ("stitchd.fragmentation_limit", Some("stitchd.stitch_min")),
    ("stitchd.packed_below", None),
    ("stitchd.stitch_limit", None),
];

/// An old setting by its key.
fn of_old(key: &str) -> Option<&'static (&'static str, Option<&'static str>)> {
    OLD_KEYS.iter().find(|(old, _)| *old == key)
}

/// What there is to say of old settings among some, given as `KEY=…`.
pub(super) fn about_old_keys<'a>(given: impl Iterator<Item = &'a str>) -> Vec<String> {
    let old = |text: &str| {
        let (old, new) = of_old(text.split_once('=')?.0.trim())?;
        Some(match new {
            Some(new) => format!("{old} is called {new} now; the next version will not know it"),
            None => format!("{old} changes nothing: the pool that had it is gone; the next version will not know it"),
        })
    };
    given.filter_map(old).collect()
}

/// Says what can be set.
pub(super) fn print_keys() {
    let mut table = Table::new(&["setting", "what it is"]);
    KEYS.iter().for_each(|(key, what)| table.row(vec![(*key).to_owned(), (*what).to_owned()]));
    print_out(&table);
}

/// Refuses a capacity that is given twice.
pub(super) fn check_capacity(args: &ReplayArgs, sweep: Option<&Sweep>) -> Result<(), Failure> {
    let is_set = args.set.iter().any(|set| set.trim_start().starts_with("capacity="));
    let is_swept = sweep.is_some_and(|sweep| sweep.key == "capacity");
    let asked = [args.capacity.is_some(), args.min_capacity, is_set, is_swept];
    if asked.into_iter().filter(|is_asked| *is_asked).count() > 1 {
        let text =
            "only one of --capacity, --min-capacity, --set capacity=… and --sweep capacity=… says what the device has";
        return Err(Failure::Usage(text.to_owned()));
    }
    Ok(())
}

/// The names alone.
fn keys() -> String {
    KEYS.map(|(key, _)| key).join(", ")
}

/// `KEY=VALUE` as `--set` takes it.
pub(super) fn set(text: &str, setup: &Setup) -> Result<Setup, Failure> {
    let wrong = || Failure::Usage(format!("--set takes KEY=VALUE, not '{text}'; keys are {}", keys()));
    let (key, value) = text.split_once('=').ok_or_else(wrong)?;
    with(setup, key.trim(), value.trim())
}

/// The same with one setting changed.
fn with(setup: &Setup, key: &str, value: &str) -> Result<Setup, Failure> {
    let mut setup = setup.clone();
    let wrong = |why: String| Failure::Usage(format!("{key}={value}: {why}"));
    let bytes = || value.parse::<Bytes>().map_err(|error| wrong(error.to_string()));
    let number = || value.parse::<usize>().map_err(|_| wrong("not a number".to_owned()));
    let key = match of_old(key) {
        Some((_, Some(new))) => new,
        Some((_, None)) => return bytes().map(|_| setup.clone()),
        None => key,
    };
    match key {
        "capacity" => setup.capacity = Some(bytes()?),
        "gmlake.frag_limit" => setup.gmlake.frag_limit = bytes()?,
        "gmlake.rules" => {
            setup.gmlake.rules = match value {
                "code" => GmlakeRules::Code,
                "paper" => GmlakeRules::Paper,
                _ => return Err(wrong("they are code or paper".to_owned())),
            }
        }
        "gmlake.stitched_max" => setup.gmlake.stitched_max = bytes()?,
        "gmlake.stitches_max" => setup.gmlake.stitches_max = number()?,
        "stitchd.granule" => {
            let granule = bytes()?;
            if !setup.ladder.steps().contains(&granule) {
                // As on a daemon that is told so.
                let larger = setup.ladder.steps().iter().copied().filter(|step| *step > granule);
                let steps = [granule].into_iter().chain(larger).collect();
                setup.ladder = Ladder::new(steps).map_err(|error| wrong(error.to_string()))?;
            }
            setup.runtime.pages.granule = granule;
        }
        "stitchd.soft_budget" => setup.runtime.soft_budget = bytes()?,
        "stitchd.chunk_per_mille" => setup.runtime.pages.chunk_per_mille = number()? as u64,
        "stitchd.request_chunks" => setup.runtime.pages.request_chunks = number()? as u64,
        "stitchd.chunk_max" => setup.runtime.pages.chunk_max = bytes()?,
        "stitchd.chunk_least" => setup.runtime.pages.chunk_least = bytes()?,
        "stitchd.slack_per_mille" => setup.runtime.pages.slack_per_mille = number()? as u64,
        "stitchd.piece_min" => setup.runtime.pages.piece_min = bytes()?,
        "stitchd.stitch_min" => setup.runtime.pages.stitch_min = bytes()?,
        key => {
            let unknown = || Failure::Usage(format!("there is no setting '{key}'; there are {}", keys()));
            let option = key.strip_prefix("caching.").ok_or_else(unknown)?;
            setup.conf = setup.conf.and(&format!("{option}:{value}")).map_err(|error| wrong(error.to_string()))?;
        }
    }
    Ok(setup)
}

impl Sweep {
    pub(super) fn parse(text: &str) -> Result<Sweep, Failure> {
        let wrong = || Failure::Usage(format!("--sweep takes KEY=A,B,C; keys are {}", keys()));
        let (key, values) = text.split_once('=').ok_or_else(wrong)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if values.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(Sweep { key: key.trim().to_owned(), values })
    }

    pub(super) fn run(
        &self,
        args: &ReplayArgs,
        pools: &[PoolName],
        job: Job<'_>,
        setup: &Setup,
        mut notes: Vec<String>,
    ) -> Outcome {
        // All values first: one that is wrong must not cost the others' work.
        let setups = self.values.iter().map(|value| with(setup, &self.key, value));
        let setups = setups.collect::<Result<Vec<_>, _>>()?;
        let (has_plan, iterations) = (job.plan.is_some(), job.script.iterations);
        let (mut table, mut swept, mut is_enough) = (None, Vec::new(), true);
        let mut said_of: Vec<Vec<String>> = Vec::new();
        for (value, setup) in self.values.iter().zip(&setups) {
            let mut said = Vec::new();
            let results = all(args, pools, job, setup, &mut said)?;
            said_of.push(said);
            let columns = show::Columns::of(&results, has_plan, iterations);
            let table = table.get_or_insert_with(|| columns.table(&[&self.key]));
            let mut shown: Vec<Value> = Vec::new();
            for result in &results {
                table.row([vec![value.clone()], columns.row(result)].concat());
                shown.push(show::pool_json(job.trace, has_plan, result, &setup.costs));
                is_enough &= result.done.run.out_of_memory.is_none();
            }
            swept.push(json!({ "key": self.key, "value": value, "pools": shown }));
        }
        // What is so for every value is said once.
        let (first, others) = said_of.split_first().map(|(first, others)| (first.clone(), others)).unwrap_or_default();
        let of_all = |note: &String| others.iter().all(|said| said.contains(note));
        notes.extend(first.iter().filter(|note| of_all(note)).cloned());
        for (value, said) in self.values.iter().zip(&said_of) {
            let own = said.iter().filter(|note| !(first.contains(note) && of_all(note)));
            notes.extend(own.map(|note| format!("{}={value}: {note}", self.key)));
        }
        if args.json {
            print_json(
                &json!({ "trace": show::trace_json(job.script), "sweep": swept, "notes": notes, "command": show::command_line() }),
            );
        } else {
            outln!("{}", show::summary(job.script, setup));
            table.iter().for_each(print_out);
            outln!("driver seconds are modelled: {}", setup.costs.source);
            notes.iter().for_each(|note| outln!("note: {note}"));
        }
        Ok(u8::from(!is_enough))
    }
}
