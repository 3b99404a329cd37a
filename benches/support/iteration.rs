//! One iteration of a real trace, to be run again and again.

use std::collections::HashMap;
use std::path::Path;

use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::Runtime;
use stitchd::trace::{EventKind, Trace};
use stitchd::units::{Bytes, DeviceAddress};

#[derive(Clone, Copy)]
pub(crate) enum Step {
    Alloc(usize, Request),
    Free(usize),
}

/// The last iteration of a trace: what it allocates and frees again. It begins and ends with the same allocations live.
pub(crate) struct Iteration {
    pub(crate) first: Vec<Step>,
    pub(crate) steps: Vec<Step>,
    pub(crate) slots: usize,
    pub(crate) pairs: u64,
}

impl Iteration {
    /// Of requests from `bytes_min` up.
    pub(crate) fn of(trace: &Trace, bytes_min: Bytes) -> Iteration {
        let last = trace.events.last().unwrap().iteration;
        let (mut first, mut steps) = (Vec::new(), Vec::new());
        let mut slots: HashMap<u64, (usize, u32)> = HashMap::new();
        let frees: HashMap<u64, u32> = trace
            .events
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Free))
            .map(|event| (event.id, event.iteration))
            .collect();
        let mut keys = HashMap::new();
        for event in &trace.events {
            let into = if event.iteration == last { &mut steps } else { &mut first };
            match event.kind {
                EventKind::Alloc if event.bytes >= bytes_min => {
                    // What the last iteration leaves behind would be more with every repetition.
                    if event.iteration == last && !frees.contains_key(&event.id) {
                        continue;
                    }
                    let slot = slots.len();
                    slots.insert(event.id, (slot, event.iteration));
                    let context = *keys.entry(event.context).or_insert_with(|| trace.key(&event.context));
                    into.push(Step::Alloc(slot, Request::recorded(event, context)));
                }
                EventKind::Free => {
                    // What an earlier iteration left is freed once, before the first repetition.
                    match slots.get(&event.id) {
                        Some((slot, made)) if *made == event.iteration => into.push(Step::Free(*slot)),
                        Some((slot, _)) => first.push(Step::Free(*slot)),
                        None => {}
                    }
                }
                _ => {}
            }
        }
        let pairs = steps.iter().filter(|step| matches!(step, Step::Alloc(..))).count() as u64;
        Iteration { first, steps, slots: slots.len(), pairs }
    }
}

pub(crate) fn run(runtime: &Runtime, steps: &[Step], addresses: &mut [DeviceAddress]) {
    for step in steps {
        match step {
            Step::Alloc(slot, request) => addresses[*slot] = runtime.alloc(request).unwrap(),
            Step::Free(slot) => runtime.free(addresses[*slot], StreamId::DEFAULT).unwrap(),
        }
    }
}

pub(crate) fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.csv.zst"));
    stitchd::trace::csv::read_file(&path).unwrap()
}
