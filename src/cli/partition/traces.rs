//! What recorded traces of a whole model say of its layers: a profile without runs, for pipeline parallelism alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::usage;
use crate::cli::{Failure, trace};
use crate::partition::{Measurement, Parallelism, Profile};
use crate::trace::EventKind;
use crate::units::Bytes;

/// A profile of recorded traces of the whole model, for pipeline parallelism alone.
pub(super) fn profile(traces: &[(u64, PathBuf)], target: u64) -> Result<Profile, Failure> {
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
