//! Graph JSON: what is read and what is written.

use std::io::Read;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::OrderError;
use super::graph::{Described, DescribedNode};
use crate::limits;

/// The file, as it is written. What an answer adds to it may be there.
#[derive(Deserialize)]
struct Written {
    tensors: Map<String, Value>,
    nodes: Vec<WrittenNode>,
    #[serde(default)]
    control: Vec<(String, String)>,
    #[serde(default)]
    aliases: Vec<(String, String)>,
    #[serde(default)]
    keep: Vec<String>,
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
    let written: Written = serde_json::from_slice(&bytes).map_err(|error| OrderError::Unreadable(error.to_string()))?;
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
    })
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
