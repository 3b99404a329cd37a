//! A graph from an ONNX model (ONNX IR specification, `ModelProto`): operators as they are, tensors by their types and shapes.
//!
//! The model has to say the shape of each tensor, as `onnx.shape_inference` writes it; dimensions that have a name are given from outside.

mod fields;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use prost::Message as _;

use super::OrderError;
use super::graph::{Described, DescribedNode};

/// What of `onnx.proto` is read; everything else in a model is passed over, weights among it.
mod proto {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Model {
        #[prost(message, optional, tag = "7")]
        pub(super) graph: Option<Graph>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Graph {
        #[prost(message, repeated, tag = "1")]
        pub(super) node: Vec<Node>,
        #[prost(message, repeated, tag = "5")]
        pub(super) initializer: Vec<Tensor>,
        #[prost(message, repeated, tag = "11")]
        pub(super) input: Vec<ValueInfo>,
        #[prost(message, repeated, tag = "12")]
        pub(super) output: Vec<ValueInfo>,
        #[prost(message, repeated, tag = "13")]
        pub(super) value_info: Vec<ValueInfo>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Node {
        #[prost(string, repeated, tag = "1")]
        pub(super) input: Vec<String>,
        #[prost(string, repeated, tag = "2")]
        pub(super) output: Vec<String>,
        #[prost(string, tag = "3")]
        pub(super) name: String,
        #[prost(string, tag = "4")]
        pub(super) op_type: String,
        #[prost(message, repeated, tag = "5")]
        pub(super) attribute: Vec<Attribute>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Attribute {
        #[prost(bytes = "vec", optional, tag = "6")]
        pub(super) graph: Option<Vec<u8>>,
        #[prost(bytes = "vec", repeated, tag = "11")]
        pub(super) graphs: Vec<Vec<u8>>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Tensor {
        #[prost(int64, repeated, tag = "1")]
        pub(super) dims: Vec<i64>,
        #[prost(int32, tag = "2")]
        pub(super) data_type: i32,
        #[prost(string, tag = "8")]
        pub(super) name: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ValueInfo {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(message, optional, tag = "2")]
        pub(super) of: Option<Type>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Type {
        #[prost(message, optional, tag = "1")]
        pub(super) tensor: Option<TensorType>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct TensorType {
        #[prost(int32, tag = "1")]
        pub(super) elements: i32,
        #[prost(message, optional, tag = "2")]
        pub(super) shape: Option<Shape>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Shape {
        #[prost(message, repeated, tag = "1")]
        pub(super) dim: Vec<Dimension>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Dimension {
        #[prost(int64, optional, tag = "1")]
        pub(super) value: Option<i64>,
        #[prost(string, optional, tag = "2")]
        pub(super) param: Option<String>,
    }
}

/// Reads a model. `dims` says how large named dimensions are.
///
/// # Errors
///
/// It is no model, has more in it than as many operators as there may be, a shape is missing, or an operator has a graph of its own.
pub fn read_onnx(bytes: &[u8], dims: &BTreeMap<String, u64>) -> Result<Described, OrderError> {
    let refused = |why: String| OrderError::Unreadable(why);
    fields::check(bytes)?;
    let model = proto::Model::decode(bytes).map_err(|error| refused(format!("ONNX: {error}")))?;
    let graph = model.graph.ok_or_else(|| refused("ONNX: the model has no graph".into()))?;
    let mut sizes: HashMap<String, u64> = HashMap::new();
    for tensor in &graph.initializer {
        sizes.insert(tensor.name.clone(), of_weight(tensor)?);
    }
    let weights: HashSet<String> = sizes.keys().cloned().collect();
    let mut named = BTreeSet::new();
    for info in graph.input.iter().chain(&graph.output).chain(&graph.value_info) {
        let shape = info.of.as_ref().and_then(|of| of.tensor.as_ref()?.shape.as_ref());
        named.extend(shape.iter().flat_map(|shape| &shape.dim).filter_map(|dim| dim.param.as_deref()));
        if let Some(bytes) = of_value(info, dims)? {
            sizes.entry(info.name.clone()).or_insert(bytes);
        }
    }
    let mut described = Described::default();
    for unknown in dims.keys().filter(|name| !named.contains(name.as_str())) {
        let there = named.iter().copied().collect::<Vec<_>>().join(", ");
        let there = if there.is_empty() { "none has a name".to_owned() } else { format!("there is {there}") };
        described.notes.push(format!("--dim {unknown}: the model has no dimension of that name; {there}"));
    }
    let mut said = HashSet::new();
    let mut tensor = |tensors: &mut Vec<(String, u64)>, name: &str| {
        if said.insert(name.to_owned()) {
            let missing = || {
                refused(format!(
                    "ONNX: the model does not say the shape of '{name}': `onnx.shape_inference.infer_shapes` writes the shapes into it"
                ))
            };
            tensors.push((name.to_owned(), *sizes.get(name).ok_or_else(missing)?));
        }
        Ok(())
    };
    let mut names = HashSet::new();
    for (number, node) in graph.node.iter().enumerate() {
        let proto::Node { input, output, name, op_type: op, attribute } = node;
        if attribute.iter().any(|attribute| attribute.graph.is_some() || !attribute.graphs.is_empty()) {
            return Err(refused(format!(
                "ONNX: operator {number} ({op}) has a graph of its own, whose memory nobody knows: simplify the model first"
            )));
        }
        let is_new = !name.is_empty() && !names.contains(name);
        let name = if is_new { name.clone() } else { format!("{op}#{number}") };
        names.insert(name.clone());
        // What is optional and left out has no name.
        let named = |names: &[String]| names.iter().filter(|name| !name.is_empty()).cloned().collect::<Vec<_>>();
        let (inputs, outputs) = (named(input), named(output));
        for name in inputs.iter().chain(&outputs) {
            tensor(&mut described.tensors, name)?;
        }
        described.nodes.push(DescribedNode { name, inputs, outputs, ..DescribedNode::default() });
    }
    let is_said = |name: &String| said.contains(name);
    let outputs = graph.output.iter().map(|info| info.name.clone());
    // Weights are there for the next run.
    described.kept = outputs.chain(weights).filter(is_said).collect();
    described.kept.sort_unstable();
    described.kept.dedup();
    Ok(described)
}

/// Bits of an element, by the number of its type (`TensorProto.DataType`); nothing for text and for what has no type.
fn bits(of: i32) -> Option<u64> {
    Some(match of {
        // double, int64, uint64, complex64
        11 | 7 | 13 | 14 => 64,
        // float, int32, uint32
        1 | 6 | 12 => 32,
        // uint16, int16, float16, bfloat16
        4 | 5 | 10 | 16 => 16,
        // complex128
        15 => 128,
        // uint4, int4, float4e2m1
        21..=23 => 4,
        // uint8, int8, bool, the float8s
        2 | 3 | 9 | 17..=20 | 24 => 8,
        _ => return None,
    })
}

fn bytes_of(name: &str, of: i32, elements: Option<u64>) -> Result<u64, OrderError> {
    let wrong = |found: String| OrderError::Size { tensor: name.to_owned(), found };
    let each = bits(of).ok_or_else(|| wrong(format!("a type without a size (number {of})")))?;
    let bits = elements.and_then(|elements| elements.checked_mul(each));
    bits.map(|bits| bits.div_ceil(8)).ok_or_else(|| wrong("a shape beyond any machine".into()))
}

fn of_weight(tensor: &proto::Tensor) -> Result<u64, OrderError> {
    let elements = tensor.dims.iter().try_fold(1_u64, |product, dim| product.checked_mul(u64::try_from(*dim).ok()?));
    bytes_of(&tensor.name, tensor.data_type, elements)
}

/// Nothing where the model does not say.
fn of_value(info: &proto::ValueInfo, dims: &BTreeMap<String, u64>) -> Result<Option<u64>, OrderError> {
    let name = &info.name;
    let Some(tensor) = info.of.as_ref().and_then(|of| of.tensor.as_ref()) else { return Ok(None) };
    let Some(shape) = &tensor.shape else { return Ok(None) };
    let mut elements = Some(1_u64);
    for dim in &shape.dim {
        let size = match (dim.value, &dim.param) {
            (Some(value), _) => u64::try_from(value).ok(),
            (None, Some(param)) => {
                let missing = || {
                    OrderError::Unreadable(format!(
                        "ONNX: '{name}' has a dimension '{param}': --dim '{param}=SIZE' says how large it is"
                    ))
                };
                Some(*dims.get(param).ok_or_else(missing)?)
            }
            (None, None) => return Ok(None),
        };
        elements = elements.zip(size).and_then(|(product, size)| product.checked_mul(size));
    }
    bytes_of(name, tensor.elements, elements).map(Some)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod written;
