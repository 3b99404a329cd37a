//! `stitchd order`: the order of a graph's operators that needs the least memory, and places for what is live in it.

mod picture;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::interrupt::{self, Interrupt};
use super::spinner::Spinner;
use super::table::Table;
use super::{DONE, Failure, Outcome, file_error, print_json, whole_file};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::cost_table::CostTable;
use crate::order::{self, Graph, Life, Of, Ordered, Placed};
use crate::plan::solve;
use crate::replay::models::caching::CachingAllocator;
use crate::replay::models::caching::conf::{Conf, Version};
use crate::replay::script::Script;
use crate::replay::{Watch, run as replay};
use crate::trace::export::Form;
use crate::trace::import;
use crate::units::{Bytes, counted};
use crate::work::Budget;

/// Units that are searched for when nobody says how many: some ten seconds.
const WORK: u64 = 200_000_000;
/// Iterations through which PyTorch's allocator goes: from the second on it has what it needs.
const ITERATIONS: u32 = 3;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd order step.json                              # how much less another order needs\n  stitchd order step.json -o ordered.json --html order.html\n  stitchd order step.json --json | jq -r '.order[]'\n  stitchd order step.json --trace ordered.csv.zst && stitchd plan ordered.csv.zst -o job.plan\n\nA graph of a PyTorch model is made by stitchd.torch.graph (Python package), which puts the model's operators into the order, too; an .onnx file is read as it is."
)]
pub(super) struct OrderArgs {
    /// Graph JSON, or an ONNX model (.zst and .gz are read as they are)
    graph: PathBuf,
    /// Write the graph with its order and places here
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a picture here: memory over time before and after, and the places
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write what the order allocates and frees as a trace of some iterations, for `plan` and `replay`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The trace is of the order as it was
    #[arg(long, requires = "trace")]
    as_given: bool,
    /// Iterations of the trace
    #[arg(long, value_name = "N", default_value_t = ITERATIONS, value_parser = clap::value_parser!(u32).range(1..=1000))]
    iterations: u32,
    /// Places are multiples of so many bytes: 512 for what PyTorch would allocate, 1 for what the tensors have
    #[arg(long, value_name = "BYTES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=2_097_152))]
    align: u64,
    /// What dynamic dimensions of an ONNX model are, such as batch=32; may be given several times
    #[arg(long, value_name = "NAME=SIZE")]
    dim: Vec<String>,
    /// Search for so many units of work, some twenty million a second: the same answer on every machine
    #[arg(long, value_name = "UNITS", default_value_t = WORK)]
    work: u64,
    /// Stop after so long with the best that there is, such as 60s; Ctrl-C does, too
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    time_limit: Option<Duration>,
    /// Ask HiGHS for the order, too, with OLLA's integer program: for some tens of operators, a minute at most
    #[cfg(feature = "ilp")]
    #[arg(long)]
    ilp: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// An order, and what came of it.
struct Answer {
    ordered: Ordered,
    before: Vec<Life>,
    after: Vec<Life>,
    placed: Placed,
    /// What PyTorch's allocator reserves for the order as it was.
    caching: Bytes,
    /// What it reserves for this one.
    caching_in_order: Bytes,
    seconds: f64,
    is_interrupted: bool,
    /// What is to be said beside it.
    notes: Vec<String>,
}

pub(super) fn run(args: &OrderArgs) -> Outcome {
    for out in [&args.out, &args.html, &args.trace].into_iter().flatten() {
        whole_file::is_not(out, &args.graph)?;
    }
    let form = args.trace.as_deref().map(form).transpose()?;
    let described = read(args)?;
    let graph = Graph::of(&described).map_err(|source| Failure::Graph { path: args.graph.clone(), source })?;
    let mut answer = answer(args, &graph)?;
    let interrupted = answer.is_interrupted.then(|| interrupt::NOTE.to_owned());
    answer.notes = described.notes.iter().cloned().chain(interrupted).collect();
    if let (Some(out), Some(form)) = (&args.trace, form) {
        let lives = if args.as_given { &answer.before } else { &answer.after };
        let trace = order::trace(lives, graph.len(), args.iterations);
        whole_file::write(out, |file| form.write(file, &trace))?;
    }
    let object = object(&graph, &answer);
    if let Some(out) = &args.out {
        let mut whole = order::to_json(&described);
        if let (Value::Object(whole), Value::Object(more)) = (&mut whole, object.clone()) {
            whole.extend(more);
        }
        whole_file::write(out, |mut file| writeln!(file, "{whole}"))?;
    }
    if let Some(html) = &args.html {
        let page = picture::page(&args.graph, &graph, &answer);
        whole_file::write(html, |mut file| file.write_all(page.as_bytes()))?;
    }
    if args.json {
        print_json(&object)
    } else {
        show(args, &graph, &answer)
    }
    DONE
}

fn form(path: &Path) -> Result<Form, Failure> {
    let unknown = || Failure::Usage(format!("--trace: {} ends in none of {}", path.display(), Form::ENDINGS));
    Form::of(path).ok_or_else(unknown)
}

fn read(args: &OrderArgs) -> Result<order::Described, Failure> {
    let path = &args.graph;
    let file = import::open(path).map_err(|source| Failure::Trace { path: path.clone(), source })?;
    let bytes = import::unpacked(file).map_err(file_error(path))?;
    let is_onnx = path.to_string_lossy().trim_end_matches(".zst").trim_end_matches(".gz").ends_with(".onnx");
    let graph_error = |source| Failure::Graph { path: path.clone(), source };
    if is_onnx {
        let dims = args.dim.iter().map(|dim| dimension(dim)).collect::<Result<_, _>>()?;
        let bytes = order::whole(bytes).map_err(graph_error)?;
        return order::read_onnx(&bytes, &dims).map_err(graph_error);
    }
    if !args.dim.is_empty() {
        return Err(Failure::Usage(format!("--dim is for ONNX models, and {} is called none", path.display())));
    }
    order::read(bytes).map_err(graph_error)
}

fn dimension(text: &str) -> Result<(String, u64), Failure> {
    let parsed = text.split_once('=').and_then(|(name, size)| Some((name.to_owned(), size.parse().ok()?)));
    let parsed = parsed.filter(|(_, size)| *size > 0);
    parsed.ok_or_else(|| Failure::Usage(format!("--dim: '{text}' is no NAME=SIZE, such as batch=32")))
}

fn answer(args: &OrderArgs, graph: &Graph) -> Result<Answer, Failure> {
    let clock = SystemClock::new();
    let started = clock.now();
    let interrupt = Interrupt::listen();
    let stop = Some(interrupt.or_after(args.time_limit));
    let spinner = Spinner::of(!args.json);
    spinner.say("looking");
    let budget = Budget { stop: stop.clone(), ..Budget::of(args.work) };
    #[cfg_attr(not(feature = "ilp"), expect(unused_mut, reason = "nobody else is asked then"))]
    let mut ordered = order::order(graph, &budget, |best| {
        let [peak, bound] = [best.peak, best.lower_bound].map(Bytes::new);
        spinner.say(format!("{peak} so far, no order needs less than {bound}"));
    });
    drop(spinner);
    #[cfg(feature = "ilp")]
    if args.ilp {
        let limit = args.time_limit.unwrap_or(Duration::from_secs(60));
        let solved = order::ilp::order(graph, false, limit);
        let solved = solved.map_err(|source| Failure::Graph { path: args.graph.clone(), source })?;
        if solved.is_proven {
            ordered.lower_bound = ordered.lower_bound.max(solved.peak);
        }
        if solved.peak < ordered.peak {
            (ordered.peak, ordered.order) = (solved.peak, solved.order);
        }
    }
    let [before, after] = [graph.given(), &ordered.order].map(|order| order::lives(graph, order));
    let placing = Budget { stop, ..solve::patient() };
    let placed = order::place(&after, args.align, &placing)?;
    let [caching, caching_in_order] = [&before, &after].map(|lives| {
        let trace = order::trace(lives, graph.len(), ITERATIONS);
        let mut caching = CachingAllocator::new(Conf::of(Version::NEWEST), None, &CostTable::FREE);
        replay(&Script::of(&trace, 0), &mut caching, Watch::default(), &clock, &|_| ()).peak_reserved
    });
    let seconds = (clock.now() - started).as_secs_f64();
    let is_interrupted = interrupt.is_said() && !(ordered.is_proven() && placed.is_optimal);
    Ok(Answer { ordered, before, after, placed, caching, caching_in_order, seconds, is_interrupted, notes: Vec::new() })
}

/// How much less one is than another, from 0 to 1.
fn less(now: u64, before: u64) -> f64 {
    if before == 0 { 0.0 } else { 1.0 - now as f64 / before as f64 }
}

fn object(graph: &Graph, answer: &Answer) -> Value {
    let Answer { ordered, after, placed, caching, caching_in_order, seconds, is_interrupted, notes, .. } = answer;
    let place = |(life, offset): (&Life, &u64)| {
        json!({
            "name": name(graph, life.of),
            "is_workspace": matches!(life.of, Of::Workspace(_)),
            "offset": offset,
            "bytes": life.bytes,
            "from": life.lifetime.start.0,
            "to": life.lifetime.end.0,
        })
    };
    json!({
        "order": ordered.order.iter().map(|node| graph.name(*node)).collect::<Vec<_>>(),
        "peak_bytes": ordered.peak,
        "initial_peak_bytes": ordered.initial_peak,
        "lower_bound_bytes": ordered.lower_bound,
        "proven_optimal": ordered.is_proven(),
        "reduction": less(ordered.peak, ordered.initial_peak),
        "work_units": ordered.work_units,
        "seconds": seconds,
        "interrupted": is_interrupted,
        "notes": notes,
        "is_given_ordered": graph.is_given_ordered,
        "caching_allocator_bytes": caching.get(),
        "caching_allocator_in_order_bytes": caching_in_order.get(),
        "placement": {
            "bytes": placed.peak,
            "fragmentation": less(ordered.peak, placed.peak),
            "solver": placed.solver,
            "proven_optimal": placed.is_optimal,
            "places": after.iter().zip(&placed.offsets).map(place).collect::<Vec<_>>(),
        },
    })
}

/// What people call it.
fn name(graph: &Graph, of: Of) -> &str {
    match of {
        Of::Storage(storage) => graph.storage_name(storage),
        Of::Workspace(node) => graph.name(node),
    }
}

fn show(args: &OrderArgs, graph: &Graph, answer: &Answer) {
    let Answer { ordered, placed, caching, caching_in_order, seconds, .. } = answer;
    outln!("{} of {}", counted(graph.len() as u64, "operator"), args.graph.display());
    if !graph.is_given_ordered {
        outln!(
            "  note: the operators are in no order that the graph allows; the nearest to it that is one counts as the one that is given"
        );
    }
    let mut table = Table::new(&["", ">bytes", ">beside as given", ""]);
    let given = ordered.initial_peak;
    let mut row = |what: &str, bytes: u64, of: u64, more: &str| {
        let share = format!("{:+.1} %", 0.0 - 100.0 * less(bytes, of));
        // Of next to nothing everything is a multiple.
        let share = if bytes / 10 > of { String::new() } else { share };
        table.row(vec![what.into(), Bytes::new(bytes).to_string(), share, more.into()]);
    };
    row("live at the peak, as given", given, given, "");
    let proven = if ordered.is_proven() { "no order needs less" } else { "the best that was found" };
    row("live at the peak, in this order", ordered.peak, given, proven);
    row("no order needs less than", ordered.lower_bound, given, "");
    let pool = format!("{:.3} % fragmentation", 100.0 * less(ordered.peak, placed.peak));
    row("pool for this order", placed.peak, given, &pool);
    row("PyTorch's allocator, as given", caching.get(), given, "as its model reserves it");
    row("PyTorch's allocator, in this order", caching_in_order.get(), given, "the same");
    out!("{table}");
    outln!(
        "the pool is {:.1} % less than what PyTorch's allocator reserves for the order as given",
        100.0 * less(placed.peak, caching.get())
    );
    outln!("{seconds:.2} s, {} units of work", ordered.work_units);
    answer.notes.iter().for_each(|note| outln!("note: {note}"));
    outln!("");
    outln!("{}", picture::lines(answer, graph.len()));
    for (what, path) in [("graph with its order", &args.out), ("picture", &args.html), ("trace", &args.trace)] {
        if let Some(path) = path {
            outln!("{what} written to {}", path.display());
        }
    }
    if args.out.is_none() {
        outln!("the order is not written; -o FILE writes it");
    }
}
