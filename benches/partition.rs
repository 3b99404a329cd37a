//! Partitioning on synthetic models: what CAPTURE's plan needs beside equal splits, how far predictions are off, what pruner and merger spare, and how long a thousand GPUs take.
//!
//! **Synthetic**: nothing here ran on a GPU. A model of memory (weights, gradients and optimizer state, activations, buffers, allocators that round, and peaks that do not simply add up) stands for
//! the machine. It is profiled as a machine would be, by the runs that `partition runs` lists; all bytes shown are the model's, not the prediction's, unless it says so.
//!
//! The floor of a time is its predictions alone, which no planner goes without.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

mod support;

use std::hint::black_box;

use serde_json::json;
use stitchd::partition::enumerate::enumerate;
use stitchd::partition::merge::{Results, merge_layers};
use stitchd::partition::runs::Runs;
use stitchd::partition::{Config, Fit, Group, Mesh, Parallelism, Predictor, Profile, Schedule, Table, recommend};
use stitchd::rng::{Rng, mix};
use support::{Compared, compare, is_wanted, timed};

const ROUNDS: usize = 5;
const GIB: f64 = (1_u64 << 30) as f64;
/// Bytes for each parameter: half-precision weight and gradient, and what Adam keeps in single precision.
const STATE: f64 = 16.0;
/// What an allocator hands out is whole pages of its own.
const PAGE: f64 = (2 << 20) as f64;
/// Stages that Algorithm 4 may place before it is stopped.
const PLACED_MAX: u64 = 10_000_000;

/// One layer.
#[derive(Clone, Copy)]
struct Layer {
    parameters: f64,
    /// Bytes of a sample that are kept for the backward pass.
    kept: f64,
    /// Bytes of a sample while its micro-batch is computed.
    scratch: f64,
    /// Bytes of a sample that go to the next layer.
    output: f64,
}

struct Model {
    name: &'static str,
    layers: Vec<Layer>,
    batch: u64,
    microbatches: u64,
}

fn transformer(hidden: f64, sequence: f64, parameters: f64) -> Layer {
    let activation = sequence * hidden * 2.0;
    Layer { parameters, kept: activation, scratch: 17.0 * activation, output: activation }
}

/// As GPT-3: layers alike, and a vocabulary before and behind them.
fn gpt(name: &'static str, hidden: f64, microbatches: u64) -> Model {
    let mut layers = vec![transformer(hidden, 1024.0, 12.0 * hidden * hidden); 32];
    let vocabulary = 51200.0;
    layers[0].parameters += vocabulary * hidden;
    layers[31].parameters += vocabulary * hidden;
    layers[31].scratch += 1024.0 * vocabulary * 2.0;
    Model { name, layers, batch: 1024, microbatches }
}

/// As `GShard`: every other layer has experts.
fn moe(name: &'static str, hidden: f64, experts: f64) -> Model {
    let layer = |at: usize| {
        let square = hidden * hidden;
        let mut layer =
            transformer(hidden, 1024.0, if at % 2 == 1 { (4.0 + 8.0 * experts) * square } else { 12.0 * square });
        layer.kept *= if at % 2 == 1 { 2.5 } else { 1.0 };
        layer
    };
    Model { name, layers: (0..16).map(layer).collect(), batch: 1024, microbatches: 32 }
}

/// As Wide-ResNet: large pictures with few weights first, the other way around last.
fn wide_resnet(name: &'static str, factor: f64) -> Model {
    let layer = |at: usize| {
        let step = at / 8;
        let kept = [14e6, 8e6, 4.5e6, 2.5e6][step] * factor.sqrt() * if at.is_multiple_of(8) { 1.4 } else { 1.0 };
        let parameters = [2e6, 8e6, 33e6, 82e6][step] * factor * if at.is_multiple_of(8) { 0.6 } else { 1.0 };
        Layer { parameters, kept, scratch: 3.0 * kept, output: kept / 3.0 }
    };
    Model { name, layers: (0..32).map(layer).collect(), batch: 768, microbatches: 24 }
}

fn models() -> [Model; 6] {
    [
        gpt("GPT-3-like 2.6B", 2560.0, 64),
        gpt("GPT-3-like 6.7B", 4096.0, 32),
        moe("MoE-like 2.4B", 1900.0, 10.0),
        moe("MoE-like 7.1B", 2700.0, 14.0),
        wide_resnet("Wide-ResNet-like 1B", 1.0),
        wide_resnet("Wide-ResNet-like 2B", 2.0),
    ]
}

impl Model {
    /// What one GPU of a stage holds at its peak, with GPipe.
    fn bytes(&self, group: Group, config: Config, batch: u64) -> u64 {
        let layers = &self.layers[group.first..=group.last];
        let (degree, batch) = (f64::from(config.degree), batch as f64);
        let sum = |of: fn(&Layer) -> f64| layers.iter().map(of).sum::<f64>();
        let largest = |of: fn(&Layer) -> f64| layers.iter().map(of).fold(0.0, f64::max);
        let round = |bytes: f64| (bytes / PAGE).ceil() * PAGE;
        // Of what layers keep, a part is on every GPU with tensor parallelism.
        let (weights_in, kept_in) = match config.parallelism {
            Parallelism::Tensor => (degree, 1.0 / (0.12 + 0.88 / degree)),
            _ => (1.0, degree),
        };
        let micro = batch / self.microbatches as f64;
        let state: f64 = layers.iter().map(|layer| round(layer.parameters * STATE / weights_in)).sum();
        let kept: f64 = layers.iter().map(|layer| round(layer.kept * batch / kept_in)).sum();
        let received = group.first.checked_sub(1).map_or(0.0, |before| self.layers[before].output);
        let stage_buffers = 2.0 * (received + layers[layers.len() - 1].output) * micro / degree.min(kept_in);
        let all_reduce = match config.parallelism {
            Parallelism::Pipeline => 0.0,
            // Buckets of gradients, and of what layers give.
            Parallelism::Data => (sum(|layer| layer.parameters) * 2.0).min(0.4e9),
            Parallelism::Tensor => 2.0 * largest(|layer| layer.output) * micro,
        };
        // The peak is in the backward pass or in the optimizer's step: whichever needs more.
        let backward = kept + largest(|layer| layer.scratch) * micro / degree;
        let step = 0.2 * kept + 4.0 * largest(|layer| layer.parameters) / weights_in;
        let bytes = state + backward.max(step) + stage_buffers + all_reduce + 0.6e9;
        // What lies between blocks: up to two hundredths, in no order.
        let seed = (group.first as u64) << 40 | (group.last as u64) << 20 | u64::from(config.degree);
        let gaps = (mix(seed) % 1000) as f64 / 1000.0 * 0.02;
        round(bytes * (1.0 + gaps)) as u64
    }

    /// Profiled by its runs.
    fn profile(&self, gpus: usize, fit: Fit) -> Profile {
        let mut results = Runs::new(self.layers.len(), gpus, &[2, 4], Some(self.batch)).unwrap().to_json();
        for run in results["runs"].as_array_mut().unwrap() {
            let parallelism = serde_json::from_value(run["parallelism"].clone()).unwrap();
            let config = Config { parallelism, degree: run["degree"].as_u64().unwrap() as u32 };
            let (batch, mut next) = (run["batch_size"].as_u64().unwrap(), 0);
            let peaks = run["partition"].as_array().unwrap().iter().map(|size| {
                let first = next;
                next += size.as_u64().unwrap() as usize;
                self.bytes(Group { first, last: next - 1 }, config, batch)
            });
            let peaks: Vec<u64> = peaks.collect();
            run["peak_bytes"] = json!(peaks);
        }
        Results::from_json(results.to_string().as_bytes()).unwrap().profile().unwrap().fitted(fit)
    }

    /// The fullest GPU of a plan whose stages are all shared alike, for the best way to share them. `weight` says what stages have as much of as each other.
    fn split(&self, mesh: Mesh, configs: &[Config], weight: fn(&Layer) -> f64) -> u64 {
        let total: f64 = self.layers.iter().map(weight).sum();
        let peak = |config: &Config| {
            let count = mesh.gpus() / config.degree as usize;
            let (mut ends, mut sum) = (Vec::new(), 0.0);
            for (at, layer) in self.layers.iter().enumerate() {
                sum += weight(layer);
                let (stage, left) = (ends.len(), self.layers.len() - at - 1);
                let is_enough = sum + 1e-6 * total >= total * (stage + 1) as f64 / count as f64;
                // Every stage has a layer.
                if stage + 1 < count && (is_enough || left < count - stage) {
                    ends.push(at + 1);
                }
            }
            ends.push(self.layers.len());
            let starts = [0].into_iter().chain(ends.clone());
            let groups = starts.zip(&ends).map(|(first, end)| Group { first, last: end - 1 });
            groups.map(|group| self.bytes(group, *config, self.batch)).max().unwrap()
        };
        let is_possible = |config: &&Config| {
            mesh.gpus_per_node().is_multiple_of(config.degree as usize)
                && mesh.gpus() / config.degree as usize <= self.layers.len()
        };
        configs.iter().filter(is_possible).map(peak).min().unwrap()
    }
}

/// What plans need that were found in different ways.
fn peaks(models: &[Model], mesh: Mesh, fit: Fit) {
    println!(
        "\nfullest GPU in GiB, {} nodes of {}; GPipe; {}; by the synthetic model",
        mesh.nodes(),
        mesh.gpus_per_node(),
        fit.name()
    );
    println!(
        "{:<22} {:>9} {:>13} {:>13} {:>17} {:>9}",
        "", "CAPTURE", "predicted", "equal layers", "equal parameters", "less"
    );
    for model in models {
        let profile = model.profile(mesh.gpus(), fit);
        let plan = recommend(&profile, mesh).unwrap();
        let real = plan.stages.iter().map(|stage| model.bytes(stage.group, stage.config, model.batch)).max().unwrap();
        let configs = Predictor::new(&profile).configs(mesh.degree_max());
        let splits = [model.split(mesh, &configs, |_| 1.0), model.split(mesh, &configs, |layer| layer.parameters)];
        let [layers, parameters] = splits.map(|bytes| bytes as f64 / GIB);
        let (real, predicted) = (real as f64 / GIB, plan.peak.get() as f64 / GIB);
        let less = (1.0 - real / layers.min(parameters)) * 100.0;
        println!("{:<22} {real:>9.2} {predicted:>13.2} {layers:>13.2} {parameters:>17.2} {less:>7.1} %", model.name);
    }
}

/// A plan at random: nodes filled with stages, in any order, layers cut anywhere.
fn random_plan(rng: &mut Rng, layers: usize, mesh: Mesh) -> Option<Vec<(Group, Config)>> {
    let mut configs = Vec::new();
    for _ in 0..mesh.nodes() {
        let mut room = mesh.gpus_per_node();
        while room > 0 {
            let degree = 1_usize << rng.index(room.ilog2() as usize + 1);
            let shared = if rng.chance(500) { Parallelism::Data } else { Parallelism::Tensor };
            let parallelism = if degree == 1 { Parallelism::Pipeline } else { shared };
            configs.push(Config { parallelism, degree: degree as u32 });
            room -= degree;
        }
    }
    (1..configs.len()).for_each(|at| configs.swap(at, rng.index(at + 1)));
    let mut cuts: Vec<usize> = (1..layers).collect();
    (1..cuts.len()).for_each(|at| cuts.swap(at, rng.index(at + 1)));
    cuts.truncate(configs.len() - 1);
    cuts.sort_unstable();
    let ends = cuts.iter().copied().chain([layers]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let groups = starts.zip(ends).map(|(first, end)| Group { first, last: end - 1 });
    (configs.len() <= layers).then(|| groups.zip(configs).collect())
}

/// How far predictions are off for plans that were not profiled.
fn errors(models: &[Model], mesh: Mesh, fit: Fit) {
    const PLANS: usize = 500;
    println!(
        "\npredictions of {PLANS} random plans within 2, 5 and 11 % of the model, {} nodes of {}; {}",
        mesh.nodes(),
        mesh.gpus_per_node(),
        fit.name()
    );
    println!("{:<22} {:>25} {:>25}", "", "of GPUs", "of plans");
    let shares = |errors: &[f64]| {
        let within =
            |limit: f64| errors.iter().filter(|error| **error <= limit).count() as f64 * 100.0 / errors.len() as f64;
        format!("{:>6.1} {:>6.1} {:>6.1} %", within(0.02), within(0.05), within(0.11))
    };
    println!("{:<22} {:>25} {:>25}", "the paper, on GPUs", "44.8   65.5   97.1 %", "45.4   69.6   97.8 %");
    for model in models {
        let profile = model.profile(mesh.gpus(), fit);
        let (predictor, best) = (Predictor::new(&profile), recommend(&profile, mesh).unwrap().peak.get());
        let (mut rng, mut of_gpus, mut of_plans) = (Rng::new(500), Vec::new(), Vec::new());
        for _ in 0..100 * PLANS {
            let Some(plan) = random_plan(&mut rng, model.layers.len(), mesh) else { continue };
            let both = plan.iter().map(|(group, config)| {
                let predicted = predictor.stage(*group, *config, 1).unwrap().get();
                (config.degree as usize, predicted, model.bytes(*group, *config, model.batch))
            });
            let both: Vec<(usize, u64, u64)> = both.collect();
            let (predicted, real) = both.iter().fold((0, 0), |(most, real), one| (most.max(one.1), real.max(one.2)));
            // As there, what would run out of memory is left out: here, more than three times what is possible.
            if predicted > best * 3 {
                continue;
            }
            let off = |predicted: u64, real: u64| (predicted as f64 / real as f64 - 1.0).abs();
            of_gpus.extend(both.iter().flat_map(|(gpus, predicted, real)| vec![off(*predicted, *real); *gpus]));
            of_plans.push(off(predicted, real));
            if of_plans.len() == PLANS {
                break;
            }
        }
        let (gpus, plans) = (shares(&of_gpus), shares(&of_plans));
        let few = if of_plans.len() < PLANS { format!(" ({} plans)", of_plans.len()) } else { String::new() };
        println!("{:<22} {gpus:>25} {plans:>25}{few}", model.name);
    }
}

/// What Algorithm 4 walks through, and how long the search takes for the same.
fn walks(models: &[Model], mesh: Mesh) {
    println!(
        "\nstages placed by Algorithm 4 (stopped at {PLACED_MAX}), {} nodes of {}",
        mesh.nodes(),
        mesh.gpus_per_node()
    );
    println!(
        "{:<22} {:>6} {:>20} {:>12} {:>9} {:>12} {:>9} {:>9} {:>9}",
        "", "layers", "plans", "all", "s", "pruned", "s", "ours, s", "peak"
    );
    for model in models {
        let whole = model.profile(mesh.gpus(), Fit::Logarithm);
        for layers in [8, 10, 12, 16, 32].into_iter().filter(|layers| *layers <= model.layers.len()) {
            let profile = merge_layers(&whole, layers).unwrap();
            let table = Table::new(&profile, mesh).unwrap();
            let Ok(plan) = table.recommend(mesh) else { continue };
            let walk = |prunes: bool| {
                let mut found = None;
                let time = timed(|| found = Some(enumerate(&table, mesh, prunes, PLACED_MAX).unwrap()));
                let found = found.unwrap();
                assert!(found.is_stopped || found.amounts[0] == plan.peak, "both find the same");
                let placed = if found.is_stopped { "stopped".to_owned() } else { found.placed.to_string() };
                format!("{placed:>12} {:>9.3}", time.as_secs_f64())
            };
            let ours = timed(|| black_box(recommend(&profile, mesh))).as_secs_f64();
            let peak = plan.peak.get() as f64 / GIB;
            let plans = plan.considered as f64;
            println!(
                "{:<22} {layers:>6} {plans:>20.3e} {} {} {ours:>9.4} {peak:>9.2}",
                model.name,
                walk(false),
                walk(true)
            );
        }
    }
}

/// A hundred and twenty-eight layers on a thousand GPUs, layers alike and layers of all sorts.
fn times() -> Vec<Compared> {
    let mut all = Vec::new();
    let mut large = [gpt("layers alike", 12288.0, 64), wide_resnet("layers of all sorts", 8.0)];
    for model in &mut large {
        model.layers = (0..128).map(|at| model.layers[at / 4]).collect();
        // Sorts differ a little from each other.
        if model.name != "layers alike" {
            model.layers.iter_mut().enumerate().for_each(|(at, layer)| layer.kept *= 1.0 + at as f64 / 1000.0);
        }
        let profile = model.profile(64, Fit::Logarithm);
        for (schedule, microbatches) in
            [(Schedule::GPipe, 1), (Schedule::OneForwardOneBackward, 16), (Schedule::OneForwardOneBackward, 512)]
        {
            let profile = profile.clone().scheduled(schedule, microbatches).unwrap();
            for (nodes, gpus) in [(128, 8), (64, 16), (32, 32), (60, 6)] {
                let of = if schedule == Schedule::GPipe { String::new() } else { format!(" of {microbatches}") };
                let name = format!("{}, {}{of}, {nodes} x {gpus}", model.name, schedule.name());
                let mesh = Mesh::new(nodes, gpus).unwrap();
                if is_wanted(&name) {
                    let subject = || (timed(|| recommend(&profile, mesh).unwrap()), 1);
                    let rounds = if schedule == Schedule::GPipe { ROUNDS } else { 1 };
                    all.push(compare(name, rounds, subject, || (timed(|| Table::new(&profile, mesh).unwrap()), 1)));
                }
            }
        }
    }
    all
}

fn main() {
    if !std::env::args().any(|argument| argument == "--json") {
        let models = models();
        let [small, wide] = [(4, 4), (2, 8)].map(|(nodes, gpus)| Mesh::new(nodes, gpus).unwrap());
        // Degrees up to four are measured; eight is not.
        let all = [(small, Fit::Logarithm), (wide, Fit::Logarithm), (wide, Fit::Inverse)];
        if is_wanted("peaks") {
            all.into_iter().for_each(|(mesh, fit)| peaks(&models, mesh, fit));
        }
        if is_wanted("errors") {
            all.into_iter().for_each(|(mesh, fit)| errors(&models, mesh, fit));
        }
        if is_wanted("walks") {
            walks(&models, small);
        }
        println!();
    }
    support::print(("ms", 1e6), &times());
}
