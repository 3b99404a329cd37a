//! Orders against every order that there is, and graphs that make no sense.

use super::search::within;
use super::walk::{Walk, peak_of};
use super::*;
use crate::rng::Rng;

const PATIENT: Budget = Budget::of(5_000_000);

fn node(name: &str, inputs: &[&str], outputs: &[&str]) -> DescribedNode {
    let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    DescribedNode { name: name.to_owned(), inputs: all(inputs), outputs: all(outputs), ..DescribedNode::default() }
}

fn described(tensors: &[(&str, u64)], nodes: &[DescribedNode]) -> Described {
    let tensors = tensors.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
    Described { tensors, nodes: nodes.to_vec(), ..Described::default() }
}

/// The most that is live in an order, counted by name from what was said; and whether it is an order.
fn counted(described: &Described, order: &[u32]) -> (u64, bool) {
    let Described { tensors, nodes, control, aliases, kept, .. } = described;
    let at = |name: &str| {
        nodes.iter().position(|node| node.name == name).map(|n| order.iter().position(|o| *o as usize == n).unwrap())
    };
    let mut is_order = order.len() == nodes.len();
    is_order &= control.iter().all(|(before, after)| at(before) < at(after));
    // Tensors that are the same, as sets.
    let mut same: Vec<Vec<&str>> = tensors.iter().map(|(name, _)| vec![name.as_str()]).collect();
    for (one, other) in aliases {
        let find = |same: &Vec<Vec<&str>>, name: &str| same.iter().position(|set| set.contains(&name)).unwrap();
        let (one, other) = (find(&same, one), find(&same, other));
        if one != other {
            let moved = std::mem::take(&mut same[other]);
            same[one].extend(moved);
        }
    }
    let mut live = vec![0_u64; nodes.len()];
    let mut ends = [0, 0];
    for set in same.iter().filter(|set| !set.is_empty()) {
        let bytes =
            tensors.iter().filter(|(name, _)| set.contains(&name.as_str())).map(|(_, bytes)| *bytes).max().unwrap();
        let (mut from, mut to) = (usize::MAX, 0);
        let (mut is_given, mut is_kept) = (false, false);
        for name in set {
            let maker = nodes.iter().find(|node| node.outputs.iter().any(|output| output == name));
            let readers: Vec<_> = nodes.iter().filter(|node| node.inputs.iter().any(|input| input == name)).collect();
            is_given |= maker.is_none();
            is_kept |= readers.is_empty() || kept.iter().any(|kept| kept == name);
            for user in maker.into_iter().chain(readers.iter().copied()) {
                let place = at(&user.name).unwrap();
                (from, to) = (from.min(place), to.max(place));
            }
            if let Some(maker) = maker {
                is_order &= readers.iter().all(|reader| at(&maker.name) < at(&reader.name));
            }
        }
        let from = if is_given { 0 } else { from };
        let to = if is_kept { nodes.len() - 1 } else { to };
        live[from..=to].iter_mut().for_each(|live| *live += bytes);
        ends[0] += if is_given { bytes } else { 0 };
        ends[1] += if is_kept { bytes } else { 0 };
    }
    let during = order.iter().zip(&live).map(|(node, live)| live + nodes[*node as usize].workspace);
    (during.max().unwrap().max(ends[0]).max(ends[1]), is_order)
}

/// A graph of some operators: tensors that one makes and some later ones read, views, updates, workspaces.
pub(super) fn random(rng: &mut Rng, len: usize) -> Described {
    let mut graph = Described::default();
    let tensor = |graph: &mut Described, bytes: u64| {
        let name = format!("t{}", graph.tensors.len());
        graph.tensors.push((name.clone(), bytes));
        name
    };
    for _ in 0..=rng.index(2) {
        let bytes = rng.below(9);
        tensor(&mut graph, bytes);
    }
    let mut overwritten = Vec::new();
    for number in 0..len {
        let mut node = DescribedNode { name: format!("n{number}"), ..DescribedNode::default() };
        for _ in 0..=rng.index(3) {
            let input = graph.tensors[rng.index(graph.tensors.len())].0.clone();
            if !node.inputs.contains(&input) && !overwritten.contains(&input) {
                node.inputs.push(input);
            }
        }
        for _ in 0..rng.index(3) {
            let bytes = rng.below(9);
            node.outputs.push(tensor(&mut graph, bytes));
        }
        if let Some(input) = node.inputs.first().filter(|_| rng.chance(200)).cloned() {
            let bytes = rng.below(9);
            let output = tensor(&mut graph, bytes);
            node.outputs.push(output.clone());
            node.is_update = rng.chance(500);
            if node.is_update {
                overwritten.push(input.clone());
            }
            graph.aliases.push((input, output));
        }
        if rng.chance(200) {
            node.workspace = rng.below(9);
        }
        graph.nodes.push(node);
    }
    if rng.chance(300) {
        graph.kept.push(graph.tensors[rng.index(graph.tensors.len())].0.clone());
    }
    if len > 2 && rng.chance(300) {
        let before = rng.index(len - 1);
        graph.control.push((format!("n{before}"), format!("n{}", before + 1 + rng.index(len - 1 - before))));
    }
    graph
}

/// The lowest peak of all orders.
pub(super) fn least(walk: &mut Walk<'_>, best: &mut u64) {
    if walk.is_over() {
        *best = walk.peak.min(*best);
    }
    for node in walk.ready.clone() {
        let (live, peak) = (walk.live, walk.peak);
        walk.run(node);
        if walk.peak < *best {
            least(walk, best);
        }
        walk.undo(node, live, peak);
    }
}

#[test]
fn the_search_finds_what_trying_every_order_finds() {
    let mut rng = Rng::new(1);
    let (mut better, mut above) = (0, 0);
    for number in 0..2_000 {
        let len = 1 + rng.index(9);
        let described = random(&mut rng, len);
        let graph = Graph::of(&described).unwrap();
        let found = order(&graph, &PATIENT, |_| {});
        let mut best = u64::MAX;
        least(&mut Walk::of(&graph), &mut best);
        assert_eq!((found.peak, found.lower_bound), (best, best), "graph {number}: {described:?}");
        assert_eq!(counted(&described, &found.order), (found.peak, true), "graph {number}: {described:?}");
        assert_eq!(counted(&described, graph.given()).0, found.initial_peak, "graph {number}: {described:?}");
        let bound = super::bound::lower_bound(&graph);
        assert!(bound <= best, "graph {number}: {described:?}");
        better += usize::from(found.peak < found.initial_peak);
        above += usize::from(bound < best);
    }
    assert!(
        better > 300 && above > 100,
        "{better} of the graphs can be better, and of {above} the bound is below the best"
    );
}

#[test]
fn a_walk_goes_back_to_where_it_was() {
    let mut rng = Rng::new(2);
    for _ in 0..200 {
        let described = random(&mut rng, 12);
        let graph = Graph::of(&described).unwrap();
        let mut walk = Walk::of(&graph);
        while !walk.is_over() {
            let before = format!("{walk:?}");
            let (node, live, peak) = (walk.ready[rng.index(walk.ready.len())], walk.live, walk.peak);
            let cost = walk.cost(node);
            walk.run(node);
            assert_eq!((walk.live, walk.peak), (cost.after, cost.during.max(peak)));
            walk.undo(node, live, peak);
            assert_eq!(format!("{walk:?}"), before);
            walk.run(node);
        }
    }
}

#[test]
fn an_update_comes_after_whoever_reads_what_it_overwrites() {
    let mut graph = described(
        &[("w", 8), ("x", 4), ("y", 4), ("g", 8), ("w2", 8), ("z", 2)],
        &[
            node("forward", &["x", "w"], &["y"]),
            node("gradient", &["y"], &["g"]),
            node("backward", &["y", "w"], &["z"]),
            DescribedNode { is_update: true, ..node("update", &["w", "g"], &["w2"]) },
        ],
    );
    let free = Graph::of(&graph).unwrap();
    graph.aliases.push(("w".into(), "w2".into()));
    let tied = Graph::of(&graph).unwrap();
    assert_eq!(free.nodes[3].before, 1);
    assert_eq!(tied.nodes[3].before, 3, "the gradient, and both who read the weight");
    // 8 and 8 of weight and gradient, 4 that backward reads yet; the new weight needs nothing of its own.
    assert_eq!(order(&tied, &PATIENT, |_| {}).peak, peak_of(&tied, &[0, 1, 2, 3]));
    assert_eq!(order(&tied, &PATIENT, |_| {}).peak, 8 + 8 + 4 + 2);
    assert_eq!(order(&free, &PATIENT, |_| {}).peak, 8 + 8 + 8 + 2);
}

#[test]
fn what_makes_no_sense_is_refused_with_its_name() {
    let refused = |graph: &Described| Graph::of(graph).unwrap_err().to_string();
    let good = described(&[("a", 1), ("b", 2)], &[node("one", &["a"], &["b"]), node("two", &["b"], &[])]);
    Graph::of(&good).unwrap();
    assert_eq!(refused(&Described::default()), "the graph has no nodes");
    let mut wrong = good.clone();
    wrong.nodes[1].inputs = vec!["c".into()];
    assert_eq!(refused(&wrong), "node 'two': there is no tensor 'c'");
    let mut wrong = good.clone();
    wrong.nodes[1].outputs = vec!["b".into()];
    assert_eq!(refused(&wrong), "tensor 'b' is made twice, by 'one' and by 'two'");
    let mut wrong = good.clone();
    wrong.nodes[1].name = "one".into();
    assert_eq!(refused(&wrong), "there are two of the node 'one'");
    let mut wrong = good.clone();
    wrong.tensors.push(("a".into(), 3));
    assert_eq!(refused(&wrong), "there are two of the tensor 'a'");
    let mut wrong = good.clone();
    wrong.control = vec![("two".into(), "one".into())];
    assert!(refused(&wrong).ends_with("the first for the last: two -> one"), "{}", refused(&wrong));
    wrong.control = vec![("two".into(), "three".into())];
    assert_eq!(refused(&wrong), "control: there is no node 'three'");
    let mut wrong = good.clone();
    wrong.aliases = vec![("a".into(), "d".into())];
    assert_eq!(refused(&wrong), "aliases: there is no tensor 'd'");
    let mut wrong = good.clone();
    wrong.nodes[0].inputs.push("b".into());
    assert!(refused(&wrong).ends_with("the first for the last: one"), "{}", refused(&wrong));
    let mut wrong = good;
    wrong.tensors[0].1 = u64::MAX;
    assert_eq!(refused(&wrong), "the tensors together are larger than any machine");
}

#[test]
fn an_order_that_is_none_is_brought_into_one() {
    let graph = described(&[("a", 1), ("b", 2)], &[node("two", &["b"], &[]), node("one", &["a"], &["b"])]);
    let graph = Graph::of(&graph).unwrap();
    assert!(!graph.is_given_ordered && graph.given() == [1, 0]);
}

#[test]
fn a_narrow_search_does_not_say_that_there_is_nothing() {
    let mut rng = Rng::new(3);
    let (mut unknown, mut none) = (0, 0);
    for _ in 0..300 {
        let described = random(&mut rng, 10);
        let graph = Graph::of(&described).unwrap();
        let best = order(&graph, &PATIENT, |_| {}).peak;
        let mut work = Work::of(&PATIENT);
        match within(&graph, best, 1, &mut work) {
            Answer::None => panic!("there is one: {described:?}"),
            Answer::Unknown => unknown += 1,
            Answer::Order(order, peak) => assert_eq!((peak_of(&graph, &order), peak), (peak, best)),
        }
        none += usize::from(within(&graph, best - 1, 1 << 20, &mut work) == Answer::None);
        assert_ne!(
            std::mem::discriminant(&within(&graph, best - 1, 1, &mut work)),
            std::mem::discriminant(&Answer::Order(vec![], 0))
        );
    }
    assert!(none == 300, "{unknown} narrow searches did not know");
}

#[test]
fn updates_that_wait_for_too_many_readers_are_refused_before_memory_is_full_of_them() {
    const EACH: usize = 2_100;
    let readers = (0..EACH).map(|n| node(&format!("r{n}"), &["w"], &[]));
    let update = |n: usize| DescribedNode { is_update: true, ..node(&format!("u{n}"), &["w"], &[&format!("w{n}")]) };
    let nodes: Vec<DescribedNode> = readers.chain((0..EACH).map(update)).collect();
    let mut many = described(&[("w", 1)], &nodes);
    many.tensors.extend((0..EACH).map(|n| (format!("w{n}"), 1)));
    many.aliases = (0..EACH).map(|n| ("w".to_owned(), format!("w{n}"))).collect();
    many.control = (1..EACH).map(|n| (format!("u{}", n - 1), format!("u{n}"))).collect();
    assert!(matches!(Graph::of(&many), Err(OrderError::TooManyEdges)));
}

#[test]
fn an_update_comes_after_whoever_reads_its_memory_under_any_name() {
    // The one reads a view of the weight, and the update gives back a third name; the chain of names goes over the view.
    for aliases in [[["w", "v"], ["w", "w2"]], [["w", "v"], ["v", "w2"]], [["v", "w2"], ["w", "v"]]] {
        let nodes = [
            node("view", &["w"], &["v"]),
            node("grad", &["x"], &["g"]),
            node("use", &["v", "x"], &["y"]),
            DescribedNode { is_update: true, ..node("upd", &["w", "g"], &["w2"]) },
            node("next", &["w2"], &["z"]),
        ];
        let mut graph =
            described(&[("w", 100), ("v", 100), ("w2", 100), ("x", 10), ("g", 100), ("y", 80), ("z", 1)], &nodes);
        graph.aliases = aliases.map(|pair| pair.map(str::to_owned)).map(|[one, other]| (one, other)).to_vec();
        let graph = Graph::of(&graph).unwrap();
        let found = order(&graph, &PATIENT, |_| {});
        let at = |name: &str| found.order.iter().position(|node| graph.name(*node) == name).unwrap();
        assert!(at("use") < at("upd") && at("upd") < at("next"), "{aliases:?}: {:?}", found.order);
        assert!(found.is_proven());
    }
}

#[test]
fn long_chains_of_updates_are_read_in_no_time() {
    const EACH: usize = 20_000;
    // Of as many weights, and of one that is updated again and again and looked at in between by another name.
    for is_one in [false, true] {
        let mut tensors = vec![("x0".to_owned(), 1), ("w0".to_owned(), 1)];
        let (mut nodes, mut aliases) = (Vec::new(), Vec::new());
        for n in 0..EACH {
            let (from, weight, to) = (format!("x{n}"), format!("w{n}"), format!("x{}", n + 1));
            let updated = if is_one { format!("w{}", n + 1) } else { format!("u{n}") };
            tensors.extend([&to, &updated].map(|name| (name.clone(), 1)));
            if !is_one && n > 0 {
                tensors.push((weight.clone(), 1));
            }
            nodes.push(node(&format!("f{n}"), &[&from, &weight], &[&to]));
            let update = node(&format!("s{n}"), &[&weight, &to], &[&updated]);
            nodes.push(DescribedNode { is_update: true, ..update });
            aliases.push((weight, updated));
        }
        let chain = Described { tensors, nodes, aliases, ..Described::default() };
        // Quadratic, this would be minutes, and gigabytes.
        let graph = Graph::of(&chain).unwrap();
        assert_eq!(graph.given(), (0..2 * EACH as u32).collect::<Vec<_>>());
    }
}
