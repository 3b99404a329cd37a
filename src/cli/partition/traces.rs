//! What recorded traces of a whole model say of its layers: a profile without runs, for pipeline parallelism alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::usage;
use crate::cli::{Failure, trace};
use crate::partition::{Measurement, Parallelism, Profile};
use crate::trace::EventKind;
use crate::units::{Bytes, counted};

/// A profile of recorded traces of the whole model, for pipeline parallelism alone, and what was taken for a layer.
pub(super) fn profile(traces: &[(u64, PathBuf)], target: u64) -> Result<(Profile, String), Failure> {
    let mut measurements: Vec<Measurement> = Vec::new();
    let mut known: Option<Layers> = None;
    for (batch_size, path) in traces {
        let layers = Layers::of(path)?;
        if let Some(first) = known.as_ref().filter(|first| first.names != layers.names) {
            let text = format!(
                "{}: {}, and {} in the first trace: they are of two models",
                path.display(),
                layers.called(),
                first.called()
            );
            return Err(Failure::Usage(text));
        }
        let added = layers.bytes.iter().map(|bytes| bytes.get() as i64).collect();
        let (parallelism, degree, batch_size) = (Parallelism::Pipeline, 1, *batch_size);
        measurements.push(Measurement { parallelism, degree, batch_size, isolated: layers.bytes.clone(), added });
        known.get_or_insert(layers);
    }
    let note = known.as_ref().map_or_else(String::new, Layers::note);
    let layers = known.map_or(0, |first| first.bytes.len());
    let profile = Profile::new(vec![1; layers], measurements, target).map_err(|error| usage(&error))?;
    Ok((profile, note))
}

/// What is live of each layer at the peak of a trace.
struct Layers {
    /// The path of its modules up to the number, as in `decoder.layers.3`: in the order in which those before the numbers first ask for memory, and then by number.
    names: Vec<String>,
    bytes: Vec<Bytes>,
    /// Of modules without a number before the first layer, which stand with it, and of all others, which stand with the last.
    outside: [Bytes; 2],
}

/// A module's layer: what stands before the first number, and the number.
fn layer_of(module: &str) -> Option<(&str, u64)> {
    let mut end = 0;
    for part in module.split('.') {
        if let Ok(number) = part.parse() {
            return Some((&module[..end], number));
        }
        end += part.len() + 1;
    }
    None
}

impl Layers {
    fn of(path: &Path) -> Result<Layers, Failure> {
        let trace = trace::read(path)?.trace;
        // In what order modules first ask for memory.
        let mut asked: BTreeMap<&str, usize> = BTreeMap::new();
        for (at, event) in trace.events.iter().enumerate().filter(|(_, event)| event.kind == EventKind::Alloc) {
            if let Some(name) = trace.modules.get(event.context.module as usize) {
                asked.entry(name.as_str()).or_insert(at);
            }
        }
        let mut begins: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, at) in &asked {
            if let Some((before, _)) = layer_of(name) {
                begins.entry(before).and_modify(|first| *first = (*first).min(*at)).or_insert(*at);
            }
        }
        let Some(first) = begins.values().min().copied() else {
            let text = format!(
                "{}: no module of it has a number, as in layers.3.mlp: nothing tells its layers apart",
                path.display()
            );
            return Err(Failure::Usage(text));
        };
        let place = |(before, number): (&str, u64)| (begins.get(before).copied().unwrap_or(usize::MAX), number);
        let mut layers: BTreeMap<(usize, u64), (String, Bytes)> = BTreeMap::new();
        for layer in asked.keys().filter_map(|name| layer_of(name)) {
            layers.entry(place(layer)).or_insert_with(|| (format!("{}{}", layer.0, layer.1), Bytes::ZERO));
        }
        let (front, back) = (layers.keys().next().copied(), layers.keys().next_back().copied());
        let mut outside = [Bytes::ZERO; 2];
        for part in trace.breakdown().modules {
            let layer = match layer_of(&part.name) {
                Some(layer) => Some(place(layer)),
                None => {
                    let is_before = asked.get(part.name.as_str()).is_some_and(|at| *at < first);
                    outside[usize::from(!is_before)] += part.at_peak;
                    if is_before { front } else { back }
                }
            };
            if let Some((_, bytes)) = layer.and_then(|layer| layers.get_mut(&layer)) {
                *bytes = bytes.saturating_add(part.at_peak);
            }
        }
        if let Some((name, _)) = layers.values().find(|(_, bytes)| bytes.is_zero()) {
            let text =
                format!("{}: nothing of {name} is live at the peak: it cannot be told what it needs", path.display());
            return Err(Failure::Usage(text));
        }
        let (names, bytes) = layers.into_values().unzip();
        Ok(Layers { names, bytes, outside })
    }

    fn called(&self) -> String {
        let (first, last) = (self.names.first().map_or("", |name| name), self.names.last().map_or("", |name| name));
        format!("{}, {first} to {last}", counted(self.names.len() as u64, "layer"))
    }

    fn note(&self) -> String {
        let [before, behind] = self.outside;
        format!(
            "{}; of modules without a number {before} stand with the first and {behind} with the last of them",
            self.called()
        )
    }
}
