//! Graph JSON: what is read and what is written.

use std::io::Read;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::OrderError;
use super::graph::{Described, DescribedNode};
use crate::limits;
use crate::units::counted;

/// The file, as it is written. What an answer adds to it may be there.
#[derive(Deserialize)]
struct Written {
    #[serde(deserialize_with = "each_once")]
    tensors: Map<String, Value>,
    nodes: Vec<WrittenNode>,
    #[serde(default)]
    control: Vec<(String, String)>,
    #[serde(default)]
    aliases: Vec<(String, String)>,
    #[serde(default)]
    keep: Vec<String>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// What an answer adds to a graph.
const OF_ANSWERS: [&str; 14] = [
    "order",
    "peak_bytes",
    "initial_peak_bytes",
    "lower_bound_bytes",
    "proven_optimal",
    "reduction",
    "work_units",
    "seconds",
    "interrupted",
    "is_given_ordered",
    "caching_allocator_bytes",
    "caching_allocator_in_order_bytes",
    "placement",
    "notes",
];

/// A map in which no name comes twice.
fn each_once<'de, D: Deserializer<'de>>(map: D) -> Result<Map<String, Value>, D::Error> {
    struct Once;
    impl<'de> Visitor<'de> for Once {
        type Value = Map<String, Value>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object with the bytes of each tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut once = Map::new();
            while let Some((name, bytes)) = map.next_entry::<String, Value>()? {
                if once.contains_key(&name) {
                    return Err(A::Error::custom(format!("there are two of the tensor '{name}'")));
                }
                once.insert(name, bytes);
            }
            Ok(once)
        }
    }
    map.deserialize_map(Once)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenNode {
    name: String,
    #[serde(default)]
    inputs: Vec<String>,
    #[serde(default)]
    outputs: Vec<String>,
    #[serde(default)]
    kind: Option<String>,
    #[serde(default)]
    workspace_bytes: u64,
}

/// The kind of a node that writes a weight.
const UPDATE: &str = "update";

/// Reads a graph.
///
/// # Errors
///
/// It is no JSON of this form, which is said with line and column, or longer than any.
pub fn read(text: impl Read) -> Result<Described, OrderError> {
    let bytes = whole(text)?;
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let written: Written = serde_json::from_slice(text).map_err(|error| OrderError::Unreadable(error.to_string()))?;
    of_written(written)
}

/// All of it, if that is no more than any graph has.
///
/// # Errors
///
/// It cannot be read, or is longer.
pub fn whole(text: impl Read) -> Result<Vec<u8>, OrderError> {
    let mut bytes = Vec::new();
    let most = limits::GRAPH_FILE_LEN_MAX;
    text.take(most + 1).read_to_end(&mut bytes).map_err(|error| OrderError::Unreadable(error.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(OrderError::Unreadable(format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

fn of_written(written: Written) -> Result<Described, OrderError> {
    let notes = notes(&written);
    let tensor = |(name, bytes): (String, Value)| {
        let wrong = || OrderError::Size { tensor: name.clone(), found: bytes.to_string() };
        Ok((name.clone(), bytes.as_u64().ok_or_else(wrong)?))
    };
    let node = |node: WrittenNode| DescribedNode {
        is_update: node.kind.as_deref() == Some(UPDATE),
        name: node.name,
        inputs: node.inputs,
        outputs: node.outputs,
        workspace: node.workspace_bytes,
    };
    Ok(Described {
        tensors: written.tensors.into_iter().map(tensor).collect::<Result<_, OrderError>>()?,
        nodes: written.nodes.into_iter().map(node).collect(),
        control: written.control,
        aliases: written.aliases,
        kept: written.keep,
        notes,
    })
}

/// Keys that are named which mean nothing.
const SAID_MAX: usize = 10;

/// What is said and means nothing: misspelt, perhaps.
fn notes(written: &Written) -> Vec<String> {
    let unknown = written.others.keys().filter(|key| !OF_ANSWERS.contains(&key.as_str())).take(SAID_MAX);
    let unknown = unknown.map(|key| {
        let key = key.escape_debug();
        format!("'{key}' means nothing here: a graph has tensors, nodes, control, aliases and keep")
    });
    let kinds = || written.nodes.iter().filter_map(|node| Some((&node.name, node.kind.as_deref()?)));
    let strange: Vec<_> = kinds().filter(|(_, kind)| *kind != UPDATE).collect();
    let of_kinds = strange.first().map(|(node, kind)| {
        let (count, kind, node) = (counted(strange.len() as u64, "node"), kind.escape_debug(), node.escape_debug());
        format!("the kinds of {count} mean nothing here ('{kind}' of '{node}'): the only one is '{UPDATE}'")
    });
    unknown.chain(of_kinds).collect()
}

/// A graph as it is read.
pub fn to_json(described: &Described) -> Value {
    let tensors: Map<String, Value> =
        described.tensors.iter().map(|(name, bytes)| (name.clone(), json!(bytes))).collect();
    let node = |node: &DescribedNode| {
        let mut object = json!({ "name": node.name, "inputs": node.inputs, "outputs": node.outputs });
        if node.is_update {
            object["kind"] = json!(UPDATE);
        }
        if node.workspace > 0 {
            object["workspace_bytes"] = json!(node.workspace);
        }
        object
    };
    json!({
        "tensors": tensors,
        "nodes": described.nodes.iter().map(node).collect::<Vec<_>>(),
        "control": described.control,
        "aliases": described.aliases,
        "keep": described.kept,
    })
}
