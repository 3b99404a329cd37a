//! Planning: every solver on the shared traces and on an iteration of 288,000 requests, in time and in bytes above the lower bound.
//!
//! The floor is what no planner goes without: the starts and ends of all requests in the order of time, one sort. So a ratio that does not grow with the number of requests is n log n, as the
//! floor is.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

#[path = "support/event.rs"]
mod made;
mod support;

use std::hint::black_box;
use std::path::Path;

use stitchd::plan::solve::{Solution, Solver, solve, solve_in};
use stitchd::plan::{Problem, lower_bound};
use stitchd::rng::Rng;
use stitchd::trace::{Context, Event, EventKind, Phase, Trace, import};
use stitchd::units::{Bytes, Tick};
use support::{Compared, compare, timed};

const ROUNDS: usize = 3;

/// Ranks of the pipeline, micro-batches, chunks of the model on a rank, layers of a chunk.
const PIPELINE: u32 = 4;
const MICROBATCHES: u32 = 64;
/// Micro-batches of a series of such jobs, from some ten thousand requests to a million.
const GROWTH: [u32; 4] = [4, 16, 64, 224];
const CHUNKS: u32 = 4;
const LAYERS: usize = 5;
/// Requests of one layer beside its checkpoint: of its forward pass, made again in the backward pass, and of the backward pass itself.
const OF_FORWARD: usize = 60;
const OF_BACKWARD: usize = 104;
/// What is live of a pass's own requests at one time.
const AT_ONCE: usize = 3;
/// KiB of activations, one after the other: the products of sequence, hidden size and heads that come again in every layer.
const ACTIVATIONS: [u64; 12] = [16384, 49152, 16384, 1024, 32768, 16384, 65536, 65536, 16384, 512, 16384, 24576];
const WEIGHTS: u64 = 400;

/// An iteration as Megatron's first rank has it: interleaved virtual pipeline, one forward one backward, all layers but the first of a chunk computed again in the backward pass.
struct Megatron {
    events: Vec<Event>,
    next: u64,
    context: Context,
    /// What each pass that went forward left for its way back, layer by layer.
    kept: Vec<Vec<Vec<u64>>>,
}

impl Megatron {
    fn trace(microbatches: u32) -> Trace {
        let context = Context { phase: Phase::Init, ..Context::default() };
        let kept = vec![Vec::new(); (microbatches * CHUNKS) as usize];
        let mut job = Megatron { events: Vec::new(), next: 0, context, kept };
        (0..WEIGHTS).for_each(|nth| {
            job.alloc(8192 + 1024 * (nth % 7));
        });
        let passes = microbatches * CHUNKS;
        let warm = 2 * (PIPELINE - 1) + (CHUNKS - 1) * PIPELINE;
        for step in 0..passes + warm {
            if step < passes {
                job.forward(step);
            }
            if step >= warm {
                job.backward(step - warm);
            }
        }
        Trace { events: job.events, modules: vec![String::new()] }
    }

    /// The micro-batch and chunk of the so-manieth forward pass.
    fn turn(nth: u32) -> (u32, u32) {
        let round = PIPELINE * CHUNKS;
        (nth / round * PIPELINE + nth % PIPELINE, nth % round / PIPELINE)
    }

    fn forward(&mut self, nth: u32) {
        let (microbatch, chunk) = Self::turn(nth);
        self.context = Context { phase: Phase::Forward, microbatch: Some(microbatch), chunk: Some(chunk), module: 0 };
        let layers = (0..LAYERS).map(|layer| {
            // The checkpoint.
            let mut kept = vec![self.alloc(ACTIVATIONS[0])];
            if layer == 0 {
                kept.extend((0..OF_FORWARD).map(|op| self.alloc(ACTIVATIONS[op % ACTIVATIONS.len()])));
            } else {
                self.transient(OF_FORWARD);
            }
            kept
        });
        let layers = layers.collect();
        self.kept[(microbatch * CHUNKS + chunk) as usize] = layers;
    }

    fn backward(&mut self, nth: u32) {
        let (microbatch, chunk) = Self::turn(nth);
        // The last chunk goes back first.
        let chunk = CHUNKS - 1 - chunk;
        self.context = Context { phase: Phase::Backward, microbatch: Some(microbatch), chunk: Some(chunk), module: 0 };
        let layers = std::mem::take(&mut self.kept[(microbatch * CHUNKS + chunk) as usize]);
        for (layer, mut kept) in layers.into_iter().enumerate().rev() {
            if layer == 0 {
                self.transient(OF_FORWARD);
            } else {
                kept.extend((0..OF_FORWARD).map(|op| self.alloc(ACTIVATIONS[op % ACTIVATIONS.len()])));
            }
            let mut live = Vec::new();
            for op in 0..OF_BACKWARD {
                live.push(self.alloc(ACTIVATIONS[(op * 5 + 1) % ACTIVATIONS.len()]));
                if live.len() > AT_ONCE {
                    let oldest = live.remove(0);
                    self.free(oldest);
                }
                // What the forward pass made goes as it was made last.
                if op % 2 == 1 && kept.len() > 1 {
                    let latest = kept.pop().unwrap();
                    self.free(latest);
                }
            }
            live.into_iter().chain(kept.into_iter().rev()).for_each(|id| self.free(id));
        }
    }

    fn transient(&mut self, count: usize) {
        let mut live = Vec::new();
        for op in 0..count {
            live.push(self.alloc(ACTIVATIONS[op % ACTIVATIONS.len()]));
            if live.len() > AT_ONCE {
                let oldest = live.remove(0);
                self.free(oldest);
            }
        }
        live.into_iter().for_each(|id| self.free(id));
    }

    fn alloc(&mut self, kib: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        self.event(EventKind::Alloc, id, Bytes::kib(kib));
        id
    }

    fn free(&mut self, id: u64) {
        self.event(EventKind::Free, id, Bytes::ZERO);
    }

    fn event(&mut self, kind: EventKind, id: u64, bytes: Bytes) {
        let event = made::event(self.events.len(), kind, id, bytes, 0);
        self.events.push(Event { context: self.context, ..event });
    }
}

fn shared(name: &str) -> Trace {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    import::read_file(&folder.join(format!("{name}.csv.zst"))).unwrap().trace
}

/// All starts and ends in the order of time.
fn sorted(problem: &Problem) -> Vec<(Tick, bool, usize)> {
    let changes = problem.buffers.iter().enumerate().flat_map(|(at, buffer)| {
        buffer.lifetimes().flat_map(move |lifetime| [(lifetime.start, true, at), (lifetime.end, false, at)])
    });
    let mut changes: Vec<_> = changes.collect();
    changes.sort_unstable();
    changes
}

/// Time beside the floor, and bytes.
struct Row {
    compared: Compared,
    seconds: f64,
    peak: Bytes,
    bound: Bytes,
}

fn rows(job: &str, trace: &Trace, iteration: u32) -> Vec<Row> {
    let problem = Problem::from_trace(trace, iteration).unwrap();
    let (bound, count) = (lower_bound(&problem), problem.buffers.len() as u64);
    let floor = || (timed(|| sorted(black_box(&problem))), count);
    let row = |name: String, subject: &mut dyn FnMut(), peak: Bytes| {
        let compared = compare(name, ROUNDS, || (timed(&mut *subject), count), floor);
        Row { seconds: compared.nanos * count as f64 / 1e9, compared, peak, bound }
    };
    let mut rows = Vec::new();
    let name = format!("{job}: the problem itself");
    if support::is_wanted(&name) {
        let mut subject = || drop(black_box(Problem::from_trace(trace, iteration).unwrap()));
        rows.push(row(name, &mut subject, bound));
    }
    for solver in Solver::ALL {
        let name = format!("{job}: {}", solver.name());
        if support::is_wanted(&name) {
            // One that searches may find nothing in its time.
            let Ok(Solution { peak, .. }) = solve_in(&problem, solver) else { continue };
            rows.push(row(name, &mut || drop(black_box(solve_in(&problem, solver).unwrap())), peak));
        }
    }
    rows
}

/// All solvers, until one meets the bound, on jobs that are alike but for their length.
fn growth() -> Vec<Row> {
    let one = |microbatches: &u32| {
        let problem = Problem::from_trace(&Megatron::trace(*microbatches), 0).unwrap();
        let count = problem.buffers.len() as u64;
        let name = format!("{count} requests: all until the bound");
        if !support::is_wanted(&name) {
            return None;
        }
        let (peak, bound) = (solve(&problem).unwrap().peak, lower_bound(&problem));
        let subject = || (timed(|| drop(black_box(solve(&problem).unwrap()))), count);
        let compared = compare(name, ROUNDS, subject, || (timed(|| sorted(black_box(&problem))), count));
        Some(Row { seconds: compared.nanos * count as f64 / 1e9, compared, peak, bound })
    };
    GROWTH.iter().filter_map(one).collect()
}

/// A job of so many micro-batches as a problem, for `stitchd plan`.
fn write(microbatches: u32, path: &Path) {
    let trace = Megatron::trace(microbatches);
    let mut lives: Vec<(Tick, Option<Tick>, Bytes)> = Vec::new();
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc => lives.push((event.tick, None, event.bytes)),
            // Ids count from 0.
            _ => lives[event.id as usize].1 = Some(event.tick),
        }
    }
    let end = trace.events.last().unwrap().tick.0 + 1;
    let row = |(id, (from, to, bytes)): (usize, &(Tick, Option<Tick>, Bytes))| {
        format!("{id},{},{},{}\n", from.0, to.map_or(end, |to| to.0), bytes.get())
    };
    let rows: String = lives.iter().enumerate().map(row).collect();
    std::fs::write(path, format!("id,lower,upper,size\n{rows}")).unwrap();
}

/// A rectangle that is cut into five again and again, four blades around a middle, the largest piece mostly first, until there are so many, as a problem for `stitchd plan`: its rows in no order. Nothing is
/// wasted in the answer, and no cut goes from one side to the other.
fn write_pinwheel(count: usize, path: &Path) {
    const SIDE: u64 = 1 << 30;
    let mut rng = Rng::new(count as u64);
    let mut pieces = vec![(0, SIDE, SIDE)];
    while pieces.len() < count {
        let draws = [(); 4].map(|()| rng.index(pieces.len()));
        let area = |at: &usize| u128::from(pieces[*at].1 - pieces[*at].0) * u128::from(pieces[*at].2);
        let (start, end, len) = pieces.swap_remove(draws.into_iter().max_by_key(area).unwrap());
        if end - start < 3 || len < 3 {
            pieces.push((start, end, len));
            continue;
        }
        let (ticks, blade) = (1 + rng.below((end - start - 1) / 2), 1 + rng.below((len - 1) / 2));
        let (left, right) = (start + ticks, end - ticks);
        pieces.extend([
            (start, right, blade),
            (left, end, blade),
            (start, left, len - blade),
            (right, end, len - blade),
        ]);
        pieces.extend((left < right).then_some((left, right, len - 2 * blade)));
    }
    (1..pieces.len()).rev().for_each(|at| pieces.swap(at, rng.index(at + 1)));
    let row = |(id, (start, end, len)): (usize, &(u64, u64, u64))| format!("{id},{start},{end},{len}\n");
    let rows: String = pieces.iter().enumerate().map(row).collect();
    std::fs::write(path, format!("id,lower,upper,size\n{rows}")).unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--write") {
        return write(arguments[at + 1].parse().unwrap(), Path::new(&arguments[at + 2]));
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--write-pinwheel") {
        return write_pinwheel(arguments[at + 1].parse().unwrap(), Path::new(&arguments[at + 2]));
    }
    let mut all = Vec::new();
    for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "qwen-moe-V-last", "resnet50-olla"] {
        all.extend(rows(name, &shared(name), 1));
    }
    all.extend(rows("288,000 requests", &Megatron::trace(MICROBATCHES), 0));
    all.extend(growth());
    let is_json = std::env::args().any(|argument| argument == "--json");
    if !is_json {
        println!("{:<48} {:>10} {:>16} {:>16} {:>8}", "", "seconds", "peak", "bound", "gap");
    }
    for row in all.iter().filter(|_| !is_json) {
        let gap = (row.peak.get() as f64 / row.bound.get() as f64 - 1.0) * 100.0;
        let (peak, bound) = (row.peak.get(), row.bound.get());
        println!("{:<48} {:>10.4} {peak:>16} {bound:>16} {gap:>6.2} %", row.compared.name, row.seconds);
    }
    let compared: Vec<Compared> = all.into_iter().map(|row| row.compared).collect();
    support::print(("ns/request", 1.0), &compared);
}
