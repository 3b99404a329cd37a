//! The recommended plan: stages, what each GPU needs and is to be guaranteed, and what there is to say about it, as JSON and for people.

use std::path::Path;

use serde_json::{Value, json};

use super::{FitName, PartitionArgs, ScheduleName, profile, range, usage, usage_of};
use crate::cli::spinner::Spinner;
use crate::cli::table::Table;
use crate::cli::{DONE, Failure, Outcome, print_json, print_out};
use crate::limits;
use crate::partition::{self, Fit, Group, Mesh, Parallelism, Plan, Predictor, Profile, Schedule, Stage, Uniform};
use crate::units::{Bytes, counted};

/// Characters of the longest bar.
const BAR: u64 = 30;

pub(super) fn recommend(args: &PartitionArgs, path: &Path, nodes: usize, gpus_per_node: usize) -> Outcome {
    let mesh = Mesh::new(nodes, gpus_per_node).map_err(|error| usage(&error))?;
    let mut profile = profile::read(path)?;
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
    let profile = profile::merged(profile, args.merge_to)?;
    let spinner = Spinner::of(!args.json);
    spinner.say(format!("predicting stages of {} layers", profile.layer_sizes().len()));
    let table = partition::Table::new(&profile, mesh).map_err(usage_of(path))?;
    spinner.say(format!("looking for the lowest peak on {} GPUs", mesh.gpus()));
    let plan = table.recommend(mesh).map_err(|error| usage(&error))?;
    drop(spinner);
    // Of merged layers as many are not as many of the model's.
    let is_even = profile.layer_sizes().windows(2).all(|pair| pair[0] == pair[1]);
    let uniform = if is_even { partition::uniform(&table, mesh) } else { None };
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
    /// Layers of the model were put together.
    fn is_merged(&self) -> bool {
        self.profile.layer_sizes().iter().any(|size| *size > 1)
    }

    fn notes(&self) -> Vec<String> {
        let predictor = Predictor::new(self.profile);
        let stages = self.plan.stages.iter().filter(|stage| !predictor.is_measured(stage.config)).count() as u64;
        let note = |is: &str| {
            format!(
                "{} {is} shared among a number of GPUs that was not measured, and predicted by a curve ({}): measure that degree before you rely on it",
                counted(stages, "stage"),
                self.profile.fit().name()
            )
        };
        let mut notes = match stages {
            0 => Vec::new(),
            1 => vec![note("is")],
            _ => vec![note("are")],
        };
        if self.is_merged() {
            notes.push("layers are merged, and plans that cut between merged ones were not looked at: the plan is the best of those that are left".to_owned());
        }
        if self.profile.schedule() == Schedule::OneForwardOneBackward && self.profile.microbatches() == 1 {
            notes.push(
                "of one micro-batch every schedule keeps as much: --microbatches says into how many a batch is split"
                    .to_owned(),
            );
        }
        notes
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
            json!({
                "gpu": gpu,
                "node": node,
                "device": device,
                "predicted_peak_bytes": bytes.get(),
                "bytes": Self::guarantee(*bytes).get(),
            })
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
            "proven_optimal": !self.is_merged(),
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
            "{} in {} on {}, {} with a batch of {}{}",
            counted(layers, "layer"),
            counted(stages, "stage"),
            counted(gpus, "GPU"),
            self.profile.schedule().name(),
            self.profile.target_batch_size(),
            match self.profile.microbatches() {
                1 => String::new(),
                several => format!(" in {several} micro-batches"),
            }
        );
        outln!("  peak       {} ({} bytes) on the fullest GPU", self.plan.peak, self.plan.peak.get());
        let considered = match self.plan.considered {
            u64::MAX => "all plans, of which there are more than 64 bits count".to_owned(),
            plans => format!("all {}", counted(plans, "plan")),
        };
        let which = if self.is_merged() { "with these layers, none has less" } else { "none has less" };
        outln!("  of         {considered}; {which}");
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
            None => outln!(
                "  equal      stages of as many layers each, all alike, do not fill these nodes, or cut merged layers"
            ),
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
