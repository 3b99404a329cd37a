//! Orders: the training graphs that ship with the project, in the order that needs the least memory: bytes before and after, and how long it takes.
//!
//! The floor of the time is one walk through the graph in the order as it is: what nobody goes without who says what an order needs.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

mod support;

use std::fs::File;
use std::path::Path;

use stitchd::clock::SystemClock;
use stitchd::driver::cost_table::CostTable;
use stitchd::order::{self, Graph};
use stitchd::plan::solve;
use stitchd::replay::models::caching::{CachingAllocator, Conf, Version};
use stitchd::replay::script::Script;
use stitchd::replay::{Watch, run};
use stitchd::trace::import;
use stitchd::work::Budget;
use support::{Compared, compare, is_wanted, timed};

const ROUNDS: usize = 2;
const BUDGET: Budget = Budget::of(200_000_000);

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/graphs");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "zst"));
    files.sort_unstable();
    let mut compared: Vec<Compared> = Vec::new();
    let mut lines = vec![
        "graph                  nodes   as given MiB   ordered MiB   less %   proven     pool MiB   caching MiB   less %   places s"
            .to_owned(),
    ];
    let mut sums = [(0.0, 0.0, 0.0); 2];
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap().trim_end_matches(".json.zst").to_owned();
        if !is_wanted(&name) {
            continue;
        }
        let described = order::read(import::unpacked(File::open(&path).unwrap()).unwrap()).unwrap();
        let graph = Graph::of(&described).unwrap();
        let len = graph.len() as u64;
        let search = || (timed(|| order::order(&graph, &BUDGET, |_| {})), len);
        let floor = || (timed(|| order::curve(&order::lives(&graph, graph.given()), graph.len())), len);
        compared.push(compare(format!("order/{name}"), ROUNDS, search, floor));
        let ordered = order::order(&graph, &BUDGET, |_| {});
        let after = order::lives(&graph, &ordered.order);
        let placed = order::place(&after, 1, &solve::patient()).unwrap();
        let placing = timed(|| order::place(&after, 1, &solve::patient()).unwrap());
        let trace = order::trace(&order::lives(&graph, graph.given()), graph.len(), 3);
        let mut caching = CachingAllocator::new(Conf::of(Version::NEWEST), None, &CostTable::FREE);
        let script = Script::of(&trace, 0);
        let ran = run(&script, &mut caching, Watch::default(), &SystemClock::new(), &|_| ());
        let less = |now: u64, before: u64| 100.0 * (1.0 - now as f64 / before as f64);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let reserved = ran.peak_reserved.get();
        let (by_order, in_all) = (less(ordered.peak, ordered.initial_peak), less(placed.peak, reserved));
        let sum = &mut sums[usize::from(name.ends_with("-32"))];
        *sum = (sum.0 + 1.0, sum.1 + by_order, sum.2 + in_all);
        lines.push(format!(
            "{name:22} {len:5} {:14.1} {:13.1} {by_order:8.1}   {:6} {:12.1} {:13.1} {in_all:8.1} {:10.3}",
            mib(ordered.initial_peak),
            mib(ordered.peak),
            if ordered.is_proven() { "yes" } else { "no" },
            mib(placed.peak),
            mib(reserved),
            placing.as_secs_f64(),
        ));
    }
    for (batch, (count, by_order, in_all)) in [1, 32].into_iter().zip(sums) {
        let (by_order, in_all) = (by_order / count, in_all / count);
        lines.push(format!(
            "batch {batch}: {by_order:.1} % less by order on average, {in_all:.1} % less than the caching allocator reserves"
        ));
    }
    if !std::env::args().any(|argument| argument == "--json") {
        println!("{}\n", lines.join("\n"));
    }
    support::print(("µs/operator", 1000.0), &compared);
}
