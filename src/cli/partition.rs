//! `stitchd partition`: where to cut a model for pipelined training and how to share each stage; `runs` and `merge` say what to measure, and make a profile of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use super::table::Table;
use super::{DONE, Failure, Outcome, file_error, print_json, print_out, trace, whole_file};
use crate::error::chain;
use crate::limits;
use crate::partition::merge::{Results, merge_layers};
use crate::partition::runs::Runs;
use crate::partition::{
    FILE_LEN_MAX, Fit, Group, Measurement, Mesh, Parallelism, PartitionError, Plan, Predictor, Profile, Schedule,
    Stage, Uniform,
};
use crate::trace::EventKind;
use crate::units::{Bytes, counted};

/// Characters of the longest bar.
const BAR: u64 = 30;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024        # what to measure\n  stitchd partition merge results.json -o profile.json                    # with peaks filled in\n  stitchd partition profile.json --nodes 4 --gpus-per-node 4              # where to cut\n  stitchd partition profile.json --nodes 4 --gpus-per-node 4 --memory 40GiB\n\nThe plan is the one with the least memory on its fullest GPU, of all there are; it says nothing of speed. Exit code 1 when it needs more than --memory."
)]
pub(super) struct PartitionArgs {
    #[command(subcommand)]
    command: Option<PartitionCommand>,
    /// A profile: for each layer what it needs alone on a GPU and what it adds to others (`partition merge` makes one)
    #[arg(required = true)]
    profile: Option<PathBuf>,
    /// How many machines the model is trained on
    #[arg(long, value_name = "N", required = true)]
    nodes: Option<usize>,
    /// How many GPUs each has
    #[arg(long, value_name = "G", required = true)]
    gpus_per_node: Option<usize>,
    /// The order of micro-batches, if not the profile's
    #[arg(long, value_name = "NAME")]
    schedule: Option<ScheduleName>,
    /// Into how many micro-batches a batch is split, if not as the profile says
    #[arg(long, value_name = "M")]
    microbatches: Option<u64>,
    /// The curve for degrees above those measured, if not the profile's: logarithm, as CAPTURE has it, or inverse (a + b / degree), which says more where much is the same on every GPU
    #[arg(long, value_name = "CURVE")]
    fit: Option<FitName>,
    /// What each GPU has: says whether the plan fits, and ends with exit code 1 if not
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Merge layers first until so many are left: coarser, and faster
    #[arg(long, value_name = "N")]
    merge_to: Option<usize>,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

/// Names of schedules, as profiles have them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleName {
    #[value(name = "gpipe")]
    GPipe,
    #[value(name = "1f1b")]
    OneForwardOneBackward,
}

/// Names of curves, as profiles have them.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FitName {
    Logarithm,
    Inverse,
}

#[derive(Debug, Subcommand)]
enum PartitionCommand {
    /// Says which short training runs to make so that every layer is measured
    #[command(
        after_help = "Examples:\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024\n  stitchd partition runs --layers 32 --gpus 16 --target-batch 1024 --json > results.json\n\nA partition [2, 1, 3] puts layers 0 and 1 on the first GPU (or group of GPUs), layer 2 on the second and layers 3 to 5 on the third. Two iterations of each run are enough. The JSON is the file that `partition merge` reads, once each run has its \"peak_bytes\": the peak of one GPU of each part, in order. Or \"traces\": a recorded trace of each, by name."
    )]
    Runs {
        /// Layers of the model
        #[arg(long, value_name = "L")]
        layers: usize,
        /// GPUs of the machine that measures
        #[arg(long, value_name = "G")]
        gpus: usize,
        /// Samples of a batch of the target run; measured are a half and a quarter of it
        #[arg(long, value_name = "B")]
        target_batch: Option<u64>,
        /// Degrees of data and tensor parallelism to measure
        #[arg(long, value_name = "D,D", value_delimiter = ',', default_value = "2,4")]
        degrees: Vec<u32>,
    },
    /// Makes a profile of what the runs measured, or a coarser one of a profile
    #[command(
        after_help = "Examples:\n  stitchd partition merge results.json -o profile.json\n  stitchd partition merge profile.json --merge-to 16 -o coarse.json\n  stitchd partition merge --trace 512=half.stitchtrace --trace 256=quarter.stitchtrace --target-batch 1024 -o profile.json\n\nWith --trace the whole model was recorded on one GPU, with modules. A layer is what is live at the peak of all modules with its number (the first in `transformer.h.3.mlp`); what has none goes to the first or the last layer, by when it is first asked for. That is an estimate: it does not know buffers for communication, what a layer needs at a peak of its own, nor what data and tensor parallelism would change, and the plan has pipeline stages of one GPU only."
    )]
    Merge {
        /// What `partition runs --json` gave, with the peaks of each run; or a profile
        #[arg(required_unless_present = "trace", conflicts_with = "trace")]
        results: Option<PathBuf>,
        /// Instead: a trace of the whole model at this batch size
        #[arg(long, value_name = "BATCH=FILE", value_parser = batch_and_file, requires = "target_batch")]
        trace: Vec<(u64, PathBuf)>,
        /// Samples of a batch of the target run
        #[arg(long, value_name = "B", requires = "trace")]
        target_batch: Option<u64>,
        /// Merge layers until so many are left, those first that need least
        #[arg(long, value_name = "N")]
        merge_to: Option<usize>,
        /// Write the profile here, and not on standard output
        #[arg(short, long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

fn batch_and_file(text: &str) -> Result<(u64, PathBuf), String> {
    let (batch, file) = text.split_once('=').ok_or("write the batch size, '=' and the trace, such as 512=a.csv")?;
    let batch = batch.parse().map_err(|_| format!("'{batch}' is no batch size"))?;
    Ok((batch, PathBuf::from(file)))
}

pub(super) fn run(args: &PartitionArgs) -> Outcome {
    match (&args.command, &args.profile, args.nodes, args.gpus_per_node) {
        (Some(PartitionCommand::Runs { layers, gpus, target_batch, degrees }), ..) => {
            let runs = Runs::new(*layers, *gpus, degrees, *target_batch).map_err(|error| usage(&error))?;
            if args.json {
                print_json(&runs.to_json());
            } else {
                show_runs(&runs, target_batch.is_some());
            }
            DONE
        }
        (Some(PartitionCommand::Merge { results, trace, target_batch, merge_to, out }), ..) => {
            let profile = match (results, target_batch) {
                (Some(results), _) => of_results(results)?,
                (None, Some(target)) => of_traces(trace, *target)?,
                (None, None) => return Err(Failure::Usage("which results?".into())),
            };
            write(&merged(profile, *merge_to)?, results.as_deref(), out.as_deref(), args.json)
        }
        (None, Some(profile), Some(nodes), Some(gpus_per_node)) => recommend(args, profile, nodes, gpus_per_node),
        (None, ..) => Err(Failure::Usage("which profile, on how many nodes and GPUs?".into())),
    }
}

fn usage(error: &PartitionError) -> Failure {
    Failure::Usage(chain(error))
}

/// The same of something in a file.
fn usage_of(path: &Path) -> impl FnOnce(PartitionError) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::Usage(format!("{path}: {}", chain(&error)))
}

/// A whole file, if it is no longer than one can be.
fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(file_error(path))?;
    file.take(FILE_LEN_MAX + 1).read_to_end(&mut bytes).map_err(file_error(path))?;
    if bytes.len() as u64 > FILE_LEN_MAX {
        let most = Bytes::new(FILE_LEN_MAX);
        return Err(Failure::Usage(format!("{} is longer than a profile or results can be, {most}", path.display())));
    }
    Ok(bytes)
}

fn merged(profile: Profile, merge_to: Option<usize>) -> Result<Profile, Failure> {
    match merge_to {
        Some(wanted) => merge_layers(&profile, wanted).map_err(|error| usage(&error)),
        None => Ok(profile),
    }
}

/// The profile of a file of results, or of a profile.
fn of_results(path: &Path) -> Result<Profile, Failure> {
    let text = read(path)?;
    let is_profile = serde_json::from_slice::<Value>(&text).is_ok_and(|value| value.get("measurements").is_some());
    if is_profile {
        return Profile::from_json(&text).map_err(usage_of(path));
    }
    let mut results = Results::from_json(&text).map_err(usage_of(path))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for (at, run) in results.runs.iter_mut().enumerate() {
        match (&run.traces, &run.peak_bytes) {
            (Some(_), Some(_)) => {
                let text = format!("{}: run {at} has both peak_bytes and traces; keep one of them", path.display());
                return Err(Failure::Usage(text));
            }
            (Some(traces), None) => {
                let peaks =
                    traces.iter().map(|trace| Ok(trace::read(&folder.join(trace))?.trace.summary().peak_live.get()));
                run.peak_bytes = Some(peaks.collect::<Result<_, Failure>>()?);
            }
            (None, _) => {}
        }
    }
    results.profile().map_err(usage_of(path))
}

/// A profile of recorded traces of the whole model, for pipeline parallelism alone.
fn of_traces(traces: &[(u64, PathBuf)], target: u64) -> Result<Profile, Failure> {
    let mut measurements: Vec<Measurement> = Vec::new();
    for (batch_size, path) in traces {
        let layers = layers_of(path)?;
        if let Some(first) = measurements.first().filter(|first| first.isolated.len() != layers.len()) {
            let (found, expected) = (layers.len(), first.isolated.len());
            let text = format!(
                "{}: {found} layers, and {expected} in the first trace: they are of two models",
                path.display()
            );
            return Err(Failure::Usage(text));
        }
        let added = layers.iter().map(|bytes| bytes.get() as i64).collect();
        let (parallelism, degree, batch_size) = (Parallelism::Pipeline, 1, *batch_size);
        measurements.push(Measurement { parallelism, degree, batch_size, isolated: layers, added });
    }
    let layers = measurements.first().map_or(0, |first| first.isolated.len());
    Profile::new(vec![1; layers], measurements, target).map_err(|error| usage(&error))
}

/// What is live of each layer at the peak of a trace, in the order of their numbers.
fn layers_of(path: &Path) -> Result<Vec<Bytes>, Failure> {
    let trace = trace::read(path)?.trace;
    let number = |name: &str| name.split('.').find_map(|part| part.parse::<u64>().ok());
    // In what order modules first ask for memory.
    let mut first: BTreeMap<u32, usize> = BTreeMap::new();
    for (at, event) in trace.events.iter().enumerate().filter(|(_, event)| event.kind == EventKind::Alloc) {
        first.entry(event.context.module).or_insert(at);
    }
    let asked: BTreeMap<&str, usize> =
        first.iter().filter_map(|(module, at)| Some((trace.modules.get(*module as usize)?.as_str(), *at))).collect();
    let numbered = asked.iter().filter_map(|(name, at)| Some((number(name)?, *at)));
    let Some((_, begins)) = numbered.min() else {
        let text = format!(
            "{}: no module of it has a number, as in layers.3.mlp: nothing tells its layers apart",
            path.display()
        );
        return Err(Failure::Usage(text));
    };
    let mut layers: BTreeMap<u64, Bytes> = asked.keys().filter_map(|name| Some((number(name)?, Bytes::ZERO))).collect();
    let (front, back) = (layers.keys().next().copied(), layers.keys().next_back().copied());
    for part in trace.breakdown().modules {
        let is_before = asked.get(part.name.as_str()).is_some_and(|at| *at < begins);
        let layer = number(&part.name).or(if is_before { front } else { back });
        if let Some(bytes) = layer.and_then(|layer| layers.get_mut(&layer)) {
            *bytes = bytes.saturating_add(part.at_peak);
        }
    }
    if let Some((layer, _)) = layers.iter().find(|(_, bytes)| bytes.is_zero()) {
        let text = format!(
            "{}: nothing of layer {layer} is live at the peak: it cannot be told what it needs",
            path.display()
        );
        return Err(Failure::Usage(text));
    }
    Ok(layers.into_values().collect())
}

fn write(profile: &Profile, input: Option<&Path>, out: Option<&Path>, json: bool) -> Outcome {
    let object = profile.to_json();
    let Some(out) = out else {
        print_json(&object);
        return DONE;
    };
    if let Some(input) = input {
        whole_file::is_not(out, input)?;
    }
    let text = format!("{object}\n");
    let len = whole_file::write(out, |mut file| std::io::Write::write_all(&mut file, text.as_bytes()))?;
    let (layers, measurements) = (profile.layers(), profile.measurements().len());
    if json {
        let out = out.display().to_string();
        print_json(&json!({ "out": out, "written_bytes": len, "layers": layers, "measurements": measurements }));
    } else {
        let (layers, measurements) = (counted(layers as u64, "layer"), counted(measurements as u64, "measurement"));
        outln!("{}: a profile of {layers} with {measurements}", out.display());
    }
    DONE
}

fn show_runs(runs: &Runs, has_target: bool) {
    outln!("{}, two iterations each are enough", counted(runs.count() as u64, "run"));
    let mut table = Table::new(&["parallelism", ">degree", ">batch size", ">runs", ">layers on a part, at most"]);
    for set in &runs.sets {
        table.row(vec![
            set.parallelism.name().into(),
            set.degree.to_string(),
            set.batch_size.map_or_else(|| format!("{} of the target", set.share), |batch| batch.to_string()),
            set.partitions.len().to_string(),
            Runs::largest_part(set).to_string(),
        ]);
    }
    print_out(&table);
    let mut degree = None;
    for set in &runs.sets {
        // All sets of a degree have the same.
        if degree.replace(set.degree) == Some(set.degree) {
            continue;
        }
        match set.degree {
            1 => outln!("\nlayers on each GPU, run by run:"),
            degree => outln!("\nlayers on each group of {degree} GPUs, run by run:"),
        }
        set.partitions.iter().for_each(|partition| outln!("  {partition:?}"));
    }
    if runs.sets.iter().any(|set| set.partitions.len() > 2 && set.partitions.iter().all(|run| run.len() < 3)) {
        outln!(
            "\nnote: in two parts a layer in the middle is never alone: what it would need is worked out from what others add"
        );
    }
    for degree in &runs.left_out {
        outln!("\nnote: there are too few GPUs for groups of {degree}: its runs are left out, and so is it from plans");
    }
    if !has_target {
        outln!("\nnote: --target-batch fills in the batch sizes");
    }
    outln!("\n--json prints the file that `partition merge` reads: add \"peak_bytes\" to each run");
}

fn recommend(args: &PartitionArgs, path: &Path, nodes: usize, gpus_per_node: usize) -> Outcome {
    let mesh = Mesh::new(nodes, gpus_per_node).map_err(|error| usage(&error))?;
    let mut profile = Profile::from_json(&read(path)?).map_err(usage_of(path))?;
    if args.schedule.is_some() || args.microbatches.is_some() {
        let schedule = match args.schedule {
            Some(ScheduleName::GPipe) => Schedule::GPipe,
            Some(ScheduleName::OneForwardOneBackward) => Schedule::OneForwardOneBackward,
            None => profile.schedule(),
        };
        let microbatches = args.microbatches.unwrap_or(profile.microbatches());
        profile = profile.scheduled(schedule, microbatches).map_err(|error| usage(&error))?;
    }
    profile = match args.fit {
        Some(FitName::Logarithm) => profile.fitted(Fit::Logarithm),
        Some(FitName::Inverse) => profile.fitted(Fit::Inverse),
        None => profile,
    };
    let profile = merged(profile, args.merge_to)?;
    let table = crate::partition::Table::new(&profile, mesh).map_err(usage_of(path))?;
    let plan = table.recommend(mesh).map_err(|error| usage(&error))?;
    let uniform = crate::partition::uniform(&table, mesh);
    let answer = Answer { profile: &profile, mesh, plan: &plan, uniform: uniform.as_ref(), memory: args.memory };
    if args.json {
        print_json(&answer.object());
    } else {
        answer.show();
    }
    if answer.fits() == Some(false) { Ok(Failure::NO) } else { DONE }
}

/// A plan and what there is to say about it.
struct Answer<'a> {
    profile: &'a Profile,
    mesh: Mesh,
    plan: &'a Plan,
    uniform: Option<&'a Uniform>,
    memory: Option<Bytes>,
}

impl Answer<'_> {
    /// Whether each GPU has what it needs, if it was said what it has.
    fn fits(&self) -> Option<bool> {
        self.memory.map(|memory| self.plan.peak <= memory)
    }

    /// The first and last layer, as the model counts them.
    fn layers(&self, group: Group) -> [usize; 2] {
        let before = |layer: usize| self.profile.layer_sizes()[..layer].iter().sum::<usize>();
        [before(group.first), before(group.last + 1) - 1]
    }

    /// What a reader of predictions had better know.
    fn notes(&self) -> Vec<String> {
        let predictor = Predictor::new(self.profile);
        let stages = self.plan.stages.iter().filter(|stage| !predictor.is_measured(stage.config)).count() as u64;
        let note = |is: &str| {
            format!(
                "{} {is} shared among more GPUs than was measured, and predicted by a curve ({}): measure that degree before you rely on it",
                counted(stages, "stage"),
                self.profile.fit().name()
            )
        };
        match stages {
            0 => Vec::new(),
            1 => vec![note("is")],
            _ => vec![note("are")],
        }
    }

    fn node(&self, gpu: usize) -> usize {
        gpu / self.mesh.gpus_per_node()
    }

    /// What to ask for: whole chunks.
    fn guarantee(bytes: Bytes) -> Bytes {
        bytes.round_up(limits::CHUNK_LEN_MIN).unwrap_or(bytes)
    }

    fn object(&self) -> Value {
        let stage = |stage: &Stage| {
            json!({
                "layers": self.layers(stage.group),
                "parallelism": stage.config.parallelism.name(),
                "degree": stage.config.degree,
                "gpus": stage.gpus,
                "predicted_peak_bytes": stage.predicted.get(),
            })
        };
        let gpus = self.plan.gpus();
        let nodes = gpus.chunks(self.mesh.gpus_per_node()).enumerate().map(|(node, gpus)| {
            json!({
                "node": node,
                "peak_bytes": gpus.iter().map(|(_, bytes)| bytes.get()).max(),
                "total_bytes": gpus.iter().fold(Bytes::ZERO, |sum, (_, bytes)| sum.saturating_add(*bytes)).get(),
            })
        });
        let guarantees = gpus.iter().map(|(gpu, bytes)| {
            let (node, device) = (self.node(*gpu), gpu % self.mesh.gpus_per_node());
            json!({ "gpu": gpu, "node": node, "device": device, "bytes": Self::guarantee(*bytes).get() })
        });
        let uniform = self.uniform.map(|uniform| {
            json!({
                "stages": uniform.stages.len(),
                "parallelism": uniform.config.parallelism.name(),
                "degree": uniform.config.degree,
                "peak_bytes": uniform.peak.get(),
            })
        });
        json!({
            "layers": self.profile.layer_sizes().iter().sum::<usize>(),
            "nodes": self.mesh.nodes(),
            "gpus_per_node": self.mesh.gpus_per_node(),
            "target_batch_size": self.profile.target_batch_size(),
            "schedule": self.profile.schedule().name(),
            "microbatches": self.profile.microbatches(),
            "stages": self.plan.stages.iter().map(stage).collect::<Vec<_>>(),
            "peak_bytes": self.plan.peak.get(),
            "plans_considered": self.plan.considered,
            "proven_optimal": true,
            "equal_layers": uniform,
            "memory_bytes": self.memory.map(Bytes::get),
            "fits": self.fits(),
            "per_node": nodes.collect::<Vec<_>>(),
            "guarantees": guarantees.collect::<Vec<_>>(),
            "fit": self.profile.fit().name(),
            "notes": self.notes(),
        })
    }

    fn show(&self) {
        let (stages, gpus) = (self.plan.stages.len() as u64, self.mesh.gpus() as u64);
        let layers = self.profile.layer_sizes().iter().sum::<usize>() as u64;
        outln!(
            "{} in {} on {}, {} with a batch of {}",
            counted(layers, "layer"),
            counted(stages, "stage"),
            counted(gpus, "GPU"),
            self.profile.schedule().name(),
            self.profile.target_batch_size()
        );
        outln!("  peak       {} ({} bytes) on the fullest GPU", self.plan.peak, self.plan.peak.get());
        let considered = match self.plan.considered {
            u64::MAX => format!("all plans, more than {}", u64::MAX),
            plans => format!("all {}", counted(plans, "plan")),
        };
        outln!("  of         {considered}; none has less");
        match self.uniform {
            Some(uniform) => {
                let more = (uniform.peak.get() as f64 / self.plan.peak.get() as f64 - 1.0) * 100.0;
                let (count, degree) = (counted(uniform.stages.len() as u64, "stage"), uniform.config.degree);
                let how = match degree {
                    1 => "one GPU each".to_owned(),
                    _ => format!("{} parallelism of {degree}", uniform.config.parallelism),
                };
                outln!("  equal      {} with as many layers in each of {count}, {how}: {more:.1} % more", uniform.peak);
            }
            None => outln!("  equal      stages alike do not fill these nodes"),
        }
        match (self.memory, self.fits()) {
            (Some(memory), Some(true)) => outln!("  memory     it fits: each GPU has {memory}"),
            (Some(memory), _) => {
                let lack = self.plan.peak.saturating_sub(memory);
                outln!(
                    "  memory     it does not fit: each GPU has {memory}, {lack} too little; use more GPUs or a smaller batch"
                );
            }
            (None, _) => {}
        }
        self.notes().iter().for_each(|note| outln!("  note       {note}"));
        outln!("");
        let mut table = Table::new(&[">stage", ">layers", "shared", "GPUs", ">node", ">predicted", "", ">guarantee"]);
        for (at, stage) in self.plan.stages.iter().enumerate() {
            let [first, last] = self.layers(stage.group);
            let range =
                |first: usize, last: usize| if first == last { first.to_string() } else { format!("{first}-{last}") };
            let (front, back) = (stage.gpus.first().copied().unwrap_or(0), stage.gpus.last().copied().unwrap_or(0));
            let shared = match stage.config.parallelism {
                Parallelism::Pipeline => String::new(),
                parallelism => format!("{parallelism} {}", stage.config.degree),
            };
            let bar = u128::from(stage.predicted.get()) * u128::from(BAR) / u128::from(self.plan.peak.get().max(1));
            table.row(vec![
                at.to_string(),
                range(first, last),
                shared,
                range(front, back),
                self.node(front).to_string(),
                stage.predicted.to_string(),
                "#".repeat(bar as usize),
                format!("{}MiB", Self::guarantee(stage.predicted).get() >> 20),
            ]);
        }
        print_out(&table);
        let most = Self::guarantee(self.plan.peak).get() >> 20;
        outln!(
            "\nTo hold each process to its part: `stitchd run --guarantee` (or STITCHD_GUARANTEE) with the last column, and guarantee_max = \"{most}MiB\" or more in the configuration of each daemon."
        );
    }
}
