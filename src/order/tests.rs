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
pub(super) fn least(walk: &Walk<'_>, best: &mut u64) {
    if walk.is_over() {
        *best = walk.peak.min(*best);
    }
    for node in &walk.ready {
        let mut next = walk.clone();
        next.run(*node);
        if next.peak < *best {
            least(&next, best);
        }
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
        least(&Walk::of(&graph), &mut best);
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
            let next = walk.would_be_ready(node).next();
            walk.try_out(node);
            assert_eq!((walk.live, walk.peak), (cost.after, cost.during.max(peak)));
            let then = next.map(|next| (next, walk.live, walk.peak));
            then.iter().for_each(|(next, ..)| walk.try_out(*next));
            then.iter().for_each(|(next, live, peak)| walk.take_back(*next, *live, *peak));
            walk.take_back(node, live, peak);
            assert_eq!(format!("{walk:?}"), before);
            walk.run(node);
            assert_eq!((walk.live, walk.peak), (cost.after, cost.during.max(peak)));
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

fn is_order_of(graph: &Graph, order: &[u32]) -> bool {
    let mut at = vec![usize::MAX; graph.len()];
    order.iter().enumerate().for_each(|(step, node)| at[*node as usize] = step);
    let follows = |node: u32| graph.nodes[node as usize].next.iter().all(|next| at[node as usize] < at[*next as usize]);
    order.len() == graph.len() && order.iter().all(|node| follows(*node))
}

#[test]
fn orders_to_begin_with_are_orders_and_small_changes_make_none_worse() {
    let mut rng = Rng::new(5);
    let mut improved = 0;
    for _ in 0..400 {
        let len = 2 + rng.index(40);
        let described = random(&mut rng, len);
        let Ok(graph) = Graph::of(&described) else { continue };
        let forward = view::View::of(&graph);
        let backward = forward.reversed();
        let mut work = Work::of(&Budget::of(1 << 40));
        let seeds = seeds::orders(&forward, &backward, &mut work);
        assert_eq!(seeds.len(), 10);
        for order in seeds.into_iter().chain([graph.given().to_vec()]) {
            let before = counted(&described, &order).0;
            let better = moves::improve(&forward, &backward, &order, &mut work);
            let after = counted(&described, &better).0;
            assert!(is_order_of(&graph, &order) && is_order_of(&graph, &better), "{described:?}");
            assert!(after <= before && after == peak_of(&graph, &better), "{described:?}");
            improved += usize::from(after < before);
        }
    }
    assert!(improved > 300, "{improved}");
}

/// Nodes said in another order.
fn mixed(described: &Described, rng: &mut Rng) -> Described {
    let mut mixed = described.clone();
    for last in (1..mixed.nodes.len()).rev() {
        mixed.nodes.swap(last, rng.index(last + 1));
    }
    mixed
}

/// A step whose gradients are those of several micro-batches, all of which go forward before any goes back; and their nodes one micro-batch after the other.
fn accumulated(layers: usize, batches: usize, rng: &mut Rng) -> [Described; 2] {
    let mut described = Described::default();
    let (mut forward, mut back) = (vec![Vec::new(); batches], vec![Vec::new(); batches]);
    let sizes: Vec<[u64; 2]> = (0..layers).map(|_| [200 + rng.below(800), 100 + rng.below(900)]).collect();
    let mut tensor = |name: String, bytes: u64| described.tensors.push((name, bytes));
    let mut aliases = Vec::new();
    for (layer, [_, weight]) in sizes.iter().enumerate() {
        tensor(format!("w{layer}"), *weight);
    }
    for batch in 0..batches {
        tensor(format!("a{batch}.0"), 50);
        for (layer, [activation, _]) in sizes.iter().enumerate() {
            let (input, output) = (format!("a{batch}.{layer}"), format!("a{batch}.{}", layer + 1));
            tensor(output.clone(), *activation);
            forward[batch].push(node(&format!("f{batch}.{layer}"), &[&format!("w{layer}"), &input], &[&output]));
        }
        tensor(format!("g{batch}.{layers}"), 10);
        let last = [format!("a{batch}.{layers}"), format!("g{batch}.{layers}")];
        back[batch].push(node(&format!("l{batch}"), &[&last[0]], &[&last[1]]));
        for (layer, [_, weight]) in sizes.iter().enumerate().rev() {
            let [gradient, input, made] =
                [format!("g{batch}.{}", layer + 1), format!("a{batch}.{layer}"), format!("d{batch}.{layer}")];
            tensor(made.clone(), *weight);
            back[batch].push(node(&format!("bw{batch}.{layer}"), &[&gradient, &input], &[&made]));
            if layer > 0 {
                let output = format!("g{batch}.{layer}");
                tensor(output.clone(), sizes[layer - 1][0]);
                let weight = format!("w{layer}");
                back[batch].push(node(&format!("bi{batch}.{layer}"), &[&gradient, &weight], &[&output]));
            }
            if batch > 0 {
                let (before, sum) = (format!("s{}.{layer}", batch - 1), format!("s{batch}.{layer}"));
                let before = if batch == 1 { format!("d0.{layer}") } else { before };
                tensor(sum.clone(), *weight);
                back[batch].push(node(&format!("acc{batch}.{layer}"), &[&before, &made], &[&sum]));
                aliases.push((before, sum));
            }
        }
    }
    let mut updates = Vec::new();
    for (layer, [_, weight]) in sizes.iter().enumerate() {
        tensor(format!("v{layer}"), *weight);
        let (old, new, sum) = (format!("w{layer}"), format!("v{layer}"), format!("s{}.{layer}", batches - 1));
        updates.push(DescribedNode { is_update: true, ..node(&format!("u{layer}"), &[&old, &sum], &[&new]) });
        aliases.push((old, new));
    }
    described.aliases = aliases;
    let together = forward.iter().chain(&back).flatten().chain(&updates).cloned().collect();
    let in_turn = forward.iter().zip(&back).flat_map(|(there, back)| there.iter().chain(back)).chain(&updates);
    let in_turn = in_turn.cloned().collect();
    [Described { nodes: together, ..described.clone() }, Described { nodes: in_turn, ..described }]
}

#[test]
fn micro_batches_go_one_after_the_other_however_they_are_said() {
    let mut rng = Rng::new(8);
    let [together, in_turn] = accumulated(16, 6, &mut rng);
    let peak = |described: &Described| {
        let found = order(&Graph::of(described).unwrap(), &Budget::of(20_000_000), |_| {});
        assert_eq!(counted(described, &found.order), (found.peak, true));
        (found.peak, found.initial_peak)
    };
    let (_, one_by_one) = peak(&in_turn);
    assert!(2 * one_by_one < peak(&together).1, "there is something to gain");
    for described in [together.clone(), in_turn, mixed(&together, &mut rng), mixed(&together, &mut rng)] {
        let (found, _) = peak(&described);
        assert!(found <= one_by_one, "{found} and {one_by_one}");
    }
}

#[test]
fn a_tree_is_walked_no_worse_than_a_part_after_the_other_however_it_is_said() {
    let mut rng = Rng::new(9);
    for leaves in [64, 500] {
        let mut described = Described::default();
        // Each is made of two that are there, until there is one: with its size, and the best that can be done a part after the other.
        let mut open: Vec<(String, u64, u64)> = Vec::new();
        for number in 0..2 * leaves - 1 {
            let (name, bytes) = (format!("t{number}"), 1 + rng.below(1_000));
            let mut parts = Vec::new();
            if number >= leaves {
                parts = (0..2).map(|_| open.swap_remove(rng.index(open.len()))).collect();
            }
            parts.sort_by_key(|(_, stays, peak)| std::cmp::Reverse(peak - stays));
            let (mut live, mut most) = (0, 0);
            for (_, stays, peak) in &parts {
                most = most.max(live + peak);
                live += stays;
            }
            let inputs: Vec<&str> = parts.iter().map(|(name, ..)| name.as_str()).collect();
            described.nodes.push(node(&format!("n{number}"), &inputs, &[&name]));
            described.tensors.push((name.clone(), bytes));
            open.push((name, bytes, most.max(live + bytes)));
        }
        let part_by_part = open[0].2;
        for described in [described.clone(), mixed(&described, &mut rng)] {
            let found = order(&Graph::of(&described).unwrap(), &Budget::of(4_000_000), |_| {});
            assert!(found.peak <= part_by_part, "{leaves}: {} and {part_by_part}", found.peak);
        }
    }
}
