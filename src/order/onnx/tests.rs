//! Models as they come, and as they should not.

use super::super::{Graph, order};
use super::written::{field, node, number, value};
use super::*;

/// Two branches of a batch of any size, a weight of half precision, and an operator that has no name.
fn model(middle: &[Vec<u8>]) -> Vec<u8> {
    let weight = [number(1, 100), number(1, 10), number(2, 10), field(8, b"w")].concat();
    let mut graph = vec![
        node("MatMul", "", &["x", "w"], &["a"]),
        node("Relu", "relu", &["x", ""], &["b"]),
        node("Concat", "join", &["a", "b"], &["y"]),
        field(5, &weight),
        value(11, "x", 1, &["batch", "100"]),
        value(12, "y", 1, &["batch", "110"]),
    ];
    graph.extend_from_slice(middle);
    field(7, &graph.concat())
}

#[test]
fn a_model_is_read_with_its_types_shapes_and_named_dimensions() {
    let shapes = [value(13, "a", 1, &["batch", "10"]), value(13, "b", 11, &["batch", "100"])];
    let model = model(&shapes);
    let read = read_onnx(&model, &BTreeMap::from([("batch".to_owned(), 4)])).unwrap();
    let sizes: Vec<(&str, u64)> = read.tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
    assert_eq!(sizes, [("x", 1600), ("w", 2000), ("a", 160), ("b", 3200), ("y", 1760)]);
    assert_eq!(read.notes, [""; 0]);
    let more = BTreeMap::from([("batch".to_owned(), 4), ("bacth".to_owned(), 8)]);
    let notes = read_onnx(&model, &more).unwrap().notes;
    assert_eq!(notes, ["--dim bacth: the model has no dimension of that name; there is batch"]);
    let names: Vec<&str> = read.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["MatMul#0", "relu", "join"]);
    assert_eq!((&read.nodes[1].inputs, &read.kept), (&vec!["x".to_owned()], &vec!["w".to_owned(), "y".to_owned()]));
    let graph = Graph::of(&read).unwrap();
    let best = order(&graph, &crate::work::Budget::of(1000), |_| {});
    assert_eq!(best.peak, 2000 + 160 + 3200 + 1760, "the weight stays, x is gone");
}

#[test]
fn what_a_model_lacks_is_said() {
    let none = BTreeMap::new();
    let refused = |bytes: &[u8], dims: &BTreeMap<String, u64>| read_onnx(bytes, dims).unwrap_err().to_string();
    assert!(refused(b"", &none).contains("no graph"));
    assert!(refused(&[255; 40], &none).contains("ONNX"));
    assert!(refused(&model(&[]), &none).contains("--dim 'batch=SIZE'"));
    let four = BTreeMap::from([("batch".to_owned(), 4)]);
    assert!(refused(&model(&[]), &four).contains("does not say the shape of 'a'"));
    let text = value(13, "a", 8, &["4"]);
    assert!(refused(&model(&[text]), &four).contains("tensor 'a': a type without a size"));
    let large = value(13, "a", 1, &["9223372036854775807", "4"]);
    assert!(refused(&model(&[large]), &four).contains("beyond any machine"));
    // A graph of its own, as of `If`.
    let branch = field(5, &[field(1, b"then_branch"), field(6, &[])].concat());
    let nested = field(1, &[field(2, b"z"), field(4, b"If"), branch].concat());
    let [a, b] = ["a", "b"].map(|name| value(13, name, 1, &["4"]));
    assert!(refused(&model(&[a, b, nested]), &four).contains("(If) has a graph of its own"));
    // Cut anywhere it is refused or something, and never a panic.
    let whole = model(&[]);
    (0..whole.len()).for_each(|len| drop(read_onnx(&whole[..len], &four)));
}

#[test]
fn what_would_be_far_larger_in_memory_than_in_the_file_is_refused_before_it_is_read() {
    let empty = [1, 5, 11, 13].map(|tag| field(tag, &[]));
    let strings = field(1, &field(1, &[]).repeat(1 << 23));
    let dims = field(13, &field(2, &field(1, &field(2, &field(1, &[]).repeat(1 << 23)))));
    let numbers = field(5, &field(1, &vec![1; 1 << 23]));
    for graph in empty.map(|one| one.repeat(1 << 23)).into_iter().chain([strings, dims, numbers]) {
        let refused = read_onnx(&field(7, &graph), &BTreeMap::new()).unwrap_err().to_string();
        assert!(refused.contains("more than 8388608 fields"), "{refused}");
    }
    // What nobody reads costs nothing.
    let weights = field(5, &[field(8, b"w"), number(2, 1), field(9, &vec![0; 1 << 24])].concat());
    assert!(read_onnx(&field(7, &weights), &BTreeMap::new()).is_ok());
}
