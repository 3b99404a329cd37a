//! Dynamic modules: found by what two iterations ask for, without names of classes.
//!
//! A module is dynamic in a computation phase if one iteration asks there for sizes that the other
//! does not, and the other way round. With it all modules of its class are: those whose paths differ
//! in layer indices alone, in every micro-batch. Two experts may get as many tokens twice by chance,
//! or none at all, and are experts all the same.
//!
//! ```text
//!   iteration 0   layers.0.mlp.experts.3.fc1   7 MiB, 9 MiB  \  sizes differ: the class
//!   iteration 1   layers.0.mlp.experts.3.fc1   7 MiB, 8 MiB  /  layers.*.mlp.experts.*.fc1 is dynamic
//! ```
//!
//! Few modules of a class that differ are accidents, and neither they nor the class are dynamic.
//!
//! Requests that only come or only do not come are no evidence: the first step makes gradients and
//! optimizer state that later steps keep. Neither are variants of the iteration ([`super::kinds`]):
//! those in which most classes differ, as where a batch has another length, and those that differ where
//! the planned iteration repeats another one exactly.
//!
//! Not for: requests outside of any module, which [`super::vary`] compares one by one.

use std::cmp::Ordering;
use std::ops::RangeInclusive;

use foldhash::{HashMap, HashSet};

use super::kinds::LOOKED_AT;
use crate::trace::{Context, EventKind, Phase, Trace};
use crate::units::Bytes;

/// Two iterations are of one variant if at most this share of the classes differs, as numerator and
/// denominator.
///
/// Of the traces with experts 24 % (qwen-moe-V-last) and 29 % (moe-top2) do. Where all sizes change a
/// plan of what is left is worse than one of a longer iteration: without the limit bert-lengths (100 %)
/// falls from 99.4 to 93.6 % and llama7b-lora (100 %) from 99.998 to 99.5 %. With targets of another
/// length (t5-large-targets, 57 %) efficiency is the same, and 21,994 deviations become 4.
const DIFFERING_MAX: (usize, usize) = (2, 3);

/// Where fewer than one module of a class in so many differs, that is an accident: the class repeats.
const ACCIDENT_PART: usize = 16;

/// A class of modules, in one phase: the number of its path.
type Class = (Phase, u32);

/// Bytes of each request that a module makes in one computation phase.
type Sizes = HashMap<Context, Vec<Bytes>>;

/// The modules of a trace whose requests are dynamic.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DynamicModules {
    classes: Classes,
    dynamic: HashSet<Class>,
}

/// The class of each module path of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Classes(Vec<u32>);

impl DynamicModules {
    /// Compares `iteration` with those before it, as far back as iteration variants are looked for.
    pub(crate) fn between_iterations(trace: &Trace, iteration: u32) -> DynamicModules {
        DynamicModules::between(trace, iteration.saturating_sub(LOOKED_AT as u32)..=iteration)
    }

    /// Compares the last of some iterations with the others.
    pub(crate) fn between(trace: &Trace, iterations: RangeInclusive<u32>) -> DynamicModules {
        let last = *iterations.end();
        let mut by_iteration = sizes_by_iteration(trace, iterations);
        let planned = by_iteration.remove(&last).unwrap_or_default();
        let classes = Classes::from_paths(&trace.modules);
        let compared = by_iteration.values().map(|other| {
            let both = planned.iter().filter_map(|(context, sizes)| Some((context, sizes, other.get(context)?)));
            Compared::new(both.map(|(context, sizes, others)| (classes.class(context), has_other_sizes(sizes, others))))
        });
        let compared: Vec<Compared> = compared.collect();
        let repeats = |class: &Class| compared.iter().any(|one| one.repeats(class));
        let differing = compared.iter().flat_map(|one| &one.differing);
        let dynamic = differing.filter(|class| !repeats(class)).copied().collect();
        DynamicModules { classes, dynamic }
    }

    /// Compares the modules of each class within the first iteration, which is all that a process
    /// has seen when it looks for the plan of an earlier run.
    pub(crate) fn within_first_iteration(trace: &Trace) -> DynamicModules {
        let sizes = sizes_by_iteration(trace, 0..=0).remove(&0).unwrap_or_default();
        let classes = Classes::from_paths(&trace.modules);
        let mut firsts: HashMap<Class, (Context, &[Bytes])> = HashMap::default();
        for (context, sizes) in &sizes {
            let first = firsts.entry(classes.class(context)).or_insert((*context, sizes));
            if place(context) < place(&first.0) {
                *first = (*context, sizes);
            }
        }
        let of_class = |(context, sizes): (&Context, &Vec<Bytes>)| {
            let class = classes.class(context);
            (class, has_other_sizes(sizes, firsts[&class].1))
        };
        let dynamic = Compared::new(sizes.iter().map(of_class)).differing;
        DynamicModules { classes, dynamic }
    }

    /// Requests of this context are dynamic.
    pub(crate) fn contains(&self, context: &Context) -> bool {
        !self.dynamic.is_empty() && self.dynamic.contains(&self.classes.class(context))
    }
}

impl Classes {
    fn from_paths(paths: &[String]) -> Classes {
        let mut numbers: HashMap<String, u32> = HashMap::default();
        let class = |path: &String| {
            let count = numbers.len() as u32;
            *numbers.entry(without_indices(path)).or_insert(count)
        };
        Classes(paths.iter().map(class).collect())
    }

    fn class(&self, context: &Context) -> Class {
        (context.phase, self.0.get(context.module as usize).copied().unwrap_or(u32::MAX))
    }
}

/// A path with a star in place of each layer index: `layers.3.mlp` is `layers.*.mlp`.
fn without_indices(path: &str) -> String {
    let parts: Vec<&str> = path.split('.').map(|part| if is_index(part) { "*" } else { part }).collect();
    parts.join(".")
}

/// The part of a path is the place of a module in a `ModuleList` or `Sequential`.
pub(super) fn is_index(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Iteration, context and bytes of each request that a module makes once the job has begun.
fn module_requests(trace: &Trace) -> impl Iterator<Item = (u32, Context, Bytes)> {
    let has_path = |module: u32| trace.modules.get(module as usize).is_some_and(|path| !path.is_empty());
    let requests = trace.events.iter().filter(move |event| {
        let Context { module, phase, .. } = event.context;
        event.kind == EventKind::Alloc && !event.bytes.is_zero() && phase != Phase::Init && has_path(module)
    });
    requests.map(|event| (event.iteration, event.context, event.bytes))
}

/// What modules ask for in each of some iterations, their sizes in ascending order.
fn sizes_by_iteration(trace: &Trace, iterations: RangeInclusive<u32>) -> HashMap<u32, Sizes> {
    let mut found: HashMap<u32, Sizes> = HashMap::default();
    for (iteration, context, bytes) in module_requests(trace) {
        if iterations.contains(&iteration) {
            found.entry(iteration).or_default().entry(context).or_default().push(bytes);
        }
    }
    found.values_mut().flat_map(Sizes::values_mut).for_each(|sizes| sizes.sort_unstable());
    found
}

/// Some total order of the contexts of one class.
fn place(context: &Context) -> (u32, Option<u32>, Option<u32>) {
    (context.module, context.microbatch, context.chunk)
}

/// Of sorted sizes: each has some that the other does not have as often.
fn has_other_sizes(one: &[Bytes], other: &[Bytes]) -> bool {
    let (mut at, mut beside) = (0, 0);
    let (mut own, mut others) = (false, false);
    while at < one.len() && beside < other.len() && !(own && others) {
        match one[at].cmp(&other[beside]) {
            Ordering::Less => (own, at) = (true, at + 1),
            Ordering::Greater => (others, beside) = (true, beside + 1),
            Ordering::Equal => (at, beside) = (at + 1, beside + 1),
        }
    }
    (own || at < one.len()) && (others || beside < other.len())
}

/// What comparing two iterations of one variant says of classes; nothing of two variants.
#[derive(Default)]
struct Compared {
    all: HashSet<Class>,
    /// Those of which modules differ.
    differing: HashSet<Class>,
}

impl Compared {
    fn new(modules: impl Iterator<Item = (Class, bool)>) -> Compared {
        let mut counts: HashMap<Class, (usize, usize)> = HashMap::default();
        for (class, differs) in modules {
            let (all, differing) = counts.entry(class).or_default();
            (*all, *differing) = (*all + 1, *differing + usize::from(differs));
        }
        let differs = |(all, differing): &(usize, usize)| *differing > 0 && differing * ACCIDENT_PART >= *all;
        let differing = counts.iter().filter(|(_, counts)| differs(counts)).map(|(class, _)| *class).collect();
        let compared = Compared { all: counts.keys().copied().collect(), differing };
        let (share, of_all) = DIFFERING_MAX;
        let is_one_variant = compared.differing.len() * of_all <= compared.all.len() * share;
        if is_one_variant { compared } else { Compared::default() }
    }

    /// No module of the class differs.
    fn repeats(&self, class: &Class) -> bool {
        self.all.contains(class) && !self.differing.contains(class)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ids::StreamId;
    use crate::trace::Event;
    use crate::units::Tick;

    /// A module's request: its iteration, phase and path, and bytes.
    pub(in crate::plan) type Row<'a> = (u32, Phase, &'a str, u64);

    /// Allocations that are freed at once, in this order.
    pub(in crate::plan) fn trace(rows: &[Row<'_>]) -> Trace {
        let mut trace = Trace { events: Vec::new(), modules: vec![String::new()] };
        for (id, (iteration, phase, path, bytes)) in (0..).zip(rows) {
            let known = trace.modules.iter().position(|known| known == path);
            let module = known.unwrap_or(trace.modules.len()) as u32;
            if known.is_none() {
                trace.modules.push((*path).to_owned());
            }
            for kind in [EventKind::Alloc, EventKind::Free] {
                trace.events.push(Event {
                    tick: Tick(0),
                    kind,
                    id,
                    bytes: Bytes::new(if kind == EventKind::Alloc { *bytes } else { 0 }),
                    stream: StreamId::DEFAULT,
                    iteration: *iteration,
                    context: Context { phase: *phase, microbatch: None, chunk: None, module },
                    is_dynamic: false,
                    device: 0,
                    thread: 0,
                });
            }
        }
        trace
    }

    /// Two layers of attention and two experts, which get so many tokens; from where each asks.
    pub(in crate::plan) fn experts(iteration: u32, tokens: [u64; 4]) -> Vec<Row<'static>> {
        const PATHS: [[&str; 3]; 2] = [
            ["layers.0.attn", "layers.0.experts.0", "layers.0.experts.1"],
            ["layers.1.attn", "layers.1.experts.0", "layers.1.experts.1"],
        ];
        let mut rows = Vec::new();
        for (paths, tokens) in PATHS.iter().zip(tokens.chunks(2)) {
            for (path, tokens) in paths.iter().zip([4096].iter().chain(tokens)) {
                rows.push((iteration, Phase::Forward, *path, 1000 * tokens));
            }
        }
        rows.push((iteration, Phase::Forward, "head", 9000));
        rows
    }

    fn dynamic_paths<'a>(trace: &'a Trace, found: &DynamicModules) -> Vec<&'a str> {
        let contexts = module_requests(trace).map(|(_, context, _)| context).filter(|one| found.contains(one));
        let mut paths: Vec<&str> = contexts.map(|context| trace.modules[context.module as usize].as_str()).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }

    fn found(rows: &[Row<'_>]) -> Vec<String> {
        let (trace, last) = (trace(rows), rows.last().unwrap().0);
        let found = DynamicModules::between_iterations(&trace, last);
        dynamic_paths(&trace, &found).into_iter().map(str::to_owned).collect()
    }

    const EXPERTS: [&str; 4] = ["layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0", "layers.1.experts.1"];

    #[test]
    fn one_module_marks_its_class() {
        let rows = |tokens| [experts(0, [7, 8, 9, 3]), experts(1, tokens)].concat();
        assert_eq!(found(&rows([7, 8, 9, 4])), EXPERTS);
        assert_eq!(found(&rows([7, 8, 9, 3])), [""; 0]);
        // Of three that differ, too, and not where two are the same: the other is a variant.
        let three = |tokens| [rows([7, 8, 9, 4]), experts(2, tokens)].concat();
        assert_eq!(
            (found(&three([7, 8, 9, 5])), found(&three([7, 8, 9, 4]))),
            (EXPERTS.map(str::to_owned).into(), vec![])
        );
    }

    #[test]
    fn few_modules_of_a_class_that_differ_are_accidents() {
        let paths: Vec<String> =
            (0..20).map(|layer| format!("layers.{layer}.mlp")).chain(["head".to_owned()]).collect();
        let found = |differing: usize| {
            let rows = |iteration: u32| {
                let of = move |layer| if layer < differing { 100 + u64::from(iteration) } else { 50 };
                paths.iter().zip(0..).map(move |(path, n)| (iteration, Phase::Forward, path.as_str(), of(n)))
            };
            found(&rows(0).chain(rows(1)).collect::<Vec<Row<'_>>>()).len()
        };
        assert_eq!([0, 1, 2, 20].map(found), [0, 0, 20, 20]);
    }

    #[test]
    fn another_phase_is_another_class() {
        let both = |iteration, tokens| {
            let backward = (iteration, Phase::Backward, "layers.0.experts.0", 77);
            let weights = (iteration, Phase::Init, "layers.0.experts.0", 100 + tokens);
            [experts(iteration, [tokens, 8, 9, 3]), vec![backward, weights]].concat()
        };
        let trace = trace(&[both(0, 5), both(1, 6)].concat());
        let found = DynamicModules::between_iterations(&trace, 1);
        let phases: Vec<Phase> = trace
            .events
            .iter()
            .map(|event| event.context)
            .filter(|one| found.contains(one))
            .map(|one| one.phase)
            .collect();
        assert!(!phases.is_empty() && phases.iter().all(|phase| *phase == Phase::Forward), "{phases:?}");
    }

    #[test]
    fn requests_that_only_come_are_no_evidence() {
        let first = [experts(0, [7, 8, 9, 3]), vec![(0, Phase::Forward, "layers.0.attn", 55)]].concat();
        assert_eq!(found(&[first.clone(), experts(1, [7, 8, 9, 3])].concat()), [""; 0]);
        let other = [experts(1, [7, 8, 9, 3]), vec![(1, Phase::Forward, "layers.0.attn", 56)]].concat();
        assert_eq!(found(&[first, other].concat()), ["layers.0.attn", "layers.1.attn"]);
    }

    #[test]
    fn where_most_classes_differ_none_is_dynamic() {
        let scaled = |iteration, by| {
            let rows = experts(iteration, [7, 8, 9, 3]).into_iter();
            rows.map(|(iteration, phase, path, bytes)| (iteration, phase, path, bytes * by)).collect::<Vec<Row<'_>>>()
        };
        assert_eq!(found(&[scaled(0, 2), scaled(1, 3)].concat()), [""; 0]);
    }

    #[test]
    fn one_iteration_shows_which_siblings_differ() {
        let of = |rows: &[Row<'_>]| {
            let trace = trace(rows);
            let found = DynamicModules::within_first_iteration(&trace);
            dynamic_paths(&trace, &found).into_iter().map(str::to_owned).collect::<Vec<String>>()
        };
        assert_eq!(of(&experts(0, [7, 8, 9, 3])), EXPERTS);
        assert_eq!(of(&experts(0, [7; 4])), [""; 0]);
        assert_eq!(of(&experts(1, [7, 8, 9, 3])), [""; 0], "that is not the first");
    }
}
