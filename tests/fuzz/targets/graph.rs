//! Graphs of operators, as JSON and as ONNX models, and the orders of small ones.

use std::collections::{BTreeMap, BTreeSet};

use stitchd::order::{self, Described, Graph};
use stitchd::plan::PlanError;
use stitchd::work::Budget;

use written::{field, node, number, value};

#[path = "../../../src/order/onnx/written.rs"]
mod written;

/// Larger graphs are only read: ordering is for whoever made the graph, and takes longer than its length.
const ORDERED_MAX: usize = 64;

/// Work that a search may do.
const WORK: u64 = 2_000;

pub(crate) fn json(bytes: &[u8]) {
    if let Ok(described) = order::read(bytes) {
        check(&described);
    }
}

/// Once with nothing known of dimensions that have a name.
pub(crate) fn onnx(bytes: &[u8]) {
    for dims in [BTreeMap::new(), BTreeMap::from([("batch".to_owned(), 4)])] {
        if let Ok(described) = order::read_onnx(bytes, &dims) {
            check(&described);
        }
    }
}

fn check(described: &Described) {
    let again = order::read(order::to_json(described).to_string().as_bytes());
    // What means nothing is not written.
    let described = &Described { notes: Vec::new(), ..described.clone() };
    assert_eq!(again.expect("a graph that was read reads again"), *described);
    let Ok(graph) = Graph::of(described) else { return };
    if graph.len() > ORDERED_MAX {
        return;
    }
    let ordered = order::order(&graph, &Budget::of(WORK), |_| {});
    assert!(ordered.lower_bound <= ordered.peak && ordered.peak <= ordered.initial_peak);
    for (order, peak) in [(graph.given(), ordered.initial_peak), (&ordered.order[..], ordered.peak)] {
        let all: BTreeSet<u32> = order.iter().copied().collect();
        assert!(all.len() == graph.len() && order.len() == graph.len());
        let lives = order::lives(&graph, order);
        assert_eq!(order::curve(&lives, graph.len()).into_iter().max(), Some(peak));
    }
    let lives = order::lives(&graph, &ordered.order);
    match order::place(&lives, 512, &Budget::default()) {
        Ok(placed) => assert!(placed.offsets.len() == lives.len() && placed.peak >= ordered.peak),
        Err(error @ PlanError::Wrong { .. }) => panic!("{error:?}"),
        Err(_) => {}
    }
}

pub(crate) fn graphs() -> Vec<Vec<u8>> {
    let step = r#"{"tensors":{"x":100,"w":10,"a":50,"b":60,"y":5,"g":10,"w2":10},"nodes":[
        {"name":"one","inputs":["x","w"],"outputs":["a"],"workspace_bytes":7},
        {"name":"two","inputs":["a","x"],"outputs":["b"]},
        {"name":"loss","inputs":["b"],"outputs":["y"]},
        {"name":"back","inputs":["y","a","w"],"outputs":["g"]},
        {"name":"step","inputs":["g","w"],"outputs":["w2"],"kind":"update"}],
        "control":[["one","loss"]],"aliases":[["w","w2"]],"keep":["y"],"order":["one"],"peak_bytes":3}"#;
    let branches = r#"{"tensors":{"x":1,"a":9,"b":8,"c":1,"d":1,"y":0},"nodes":[
        {"name":"A","inputs":["x"],"outputs":["a"]},{"name":"B","inputs":["x"],"outputs":["b"]},
        {"name":"C","inputs":["a"],"outputs":["c"]},{"name":"D","inputs":["b"],"outputs":["d"]},
        {"name":"Y","inputs":["c","d"],"outputs":["y"]}]}"#;
    let circle = r#"{"tensors":{"a":1,"b":2},"nodes":[
        {"name":"A","inputs":["b"],"outputs":["a"]},{"name":"B","inputs":["a"],"outputs":["b"]}]}"#;
    let large = r#"{"tensors":{"a":9223372036854775295,"b":512},"nodes":[
        {"name":"A","outputs":["a"]},{"name":"B","inputs":["a"],"outputs":["b"]}],"aliases":[["a","b"],["b","a"]]}"#;
    let texts = [step, branches, circle, large, r#"{"tensors":{},"nodes":[{"name":""}]}"#, "{}", "[]"];
    texts.map(|text| text.as_bytes().to_vec()).into()
}

pub(crate) fn models() -> Vec<Vec<u8>> {
    let weight = [number(1, 100), number(1, 10), number(2, 10), field(8, b"w"), field(9, &[7; 20])].concat();
    let graph = [
        node("MatMul", "", &["x", "w"], &["a"]),
        node("Relu", "relu", &["x", ""], &["b"]),
        node("Concat", "relu", &["a", "b"], &["y"]),
        field(5, &weight),
        value(11, "x", 1, &["batch", "100"]),
        value(12, "y", 1, &["batch", "110"]),
        value(13, "a", 1, &["batch", "10"]),
        value(13, "b", 22, &["4", "3"]),
    ]
    .concat();
    // Packed, as most write them.
    let packed = [field(1, &[100, 10]), number(2, 1), field(8, b"w")].concat();
    let fixed = [
        node("Add", "add", &["x", "w"], &["y"]),
        node("Add", "again", &["y", "y"], &["x2"]),
        field(5, &packed),
        value(11, "x", 1, &["18446744073709551615"]),
        value(12, "y", 11, &["9223372036854775807"]),
        value(13, "x2", 2, &[]),
    ]
    .concat();
    let small = [node("A", "", &["x"], &["y"]), value(11, "x", 7, &["5"]), value(12, "y", 1, &["5"])].concat();
    let branch = field(5, &[field(1, b"then_branch"), field(6, &[])].concat());
    let nested = field(1, &[field(2, b"z"), field(4, b"If"), branch].concat());
    let whole = |graph: &[u8]| [number(1, 9), field(2, b"pytorch"), field(7, graph)].concat();
    // An operator is two bytes, if there is nothing to it.
    let empty = field(1, &[]).repeat(500);
    [graph, fixed, small, nested, empty, Vec::new()].iter().map(|graph| whole(graph)).collect()
}
