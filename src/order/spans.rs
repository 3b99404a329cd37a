//! When each operator can run at all, and what that says of memory: what makes OLLA's program small (sections 4.1 to 4.3 of the paper).

use std::collections::{BTreeSet, VecDeque};

use super::graph::Graph;

/// The steps at which each operator can run: as soon as possible, and as late as possible.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spans {
    /// From which on: so many run before it at least, one after the other.
    pub asap: Vec<u32>,
    /// Up to which, of as many steps as there are operators.
    pub alap: Vec<u32>,
}

impl Spans {
    /// Those of a graph (equation 10).
    pub fn of(graph: &Graph) -> Spans {
        let len = graph.len();
        let mut asap = vec![0; len];
        for node in &graph.given {
            for next in &graph.nodes[*node as usize].next {
                asap[*next as usize] = asap[*next as usize].max(asap[*node as usize] + 1);
            }
        }
        let mut alap = vec![len as u32 - 1; len];
        for node in graph.given.iter().rev() {
            for next in &graph.nodes[*node as usize].next {
                alap[*node as usize] = alap[*node as usize].min(alap[*next as usize] - 1);
            }
        }
        Spans { asap, alap }
    }

    /// How long the way from an operator to the end is, at least: its level from behind.
    fn levels_from_behind(&self) -> Vec<u32> {
        self.alap.iter().map(|alap| self.alap.len() as u32 - 1 - alap).collect()
    }

    /// The longest stretch of steps in which memory of these users can be of use (equation 11): from the first that can use it to the last that can.
    pub fn useful(&self, users: &[u32]) -> Option<(u32, u32)> {
        let first = users.iter().map(|user| self.asap[*user as usize]).min()?;
        let last = users.iter().map(|user| self.alap[*user as usize]).max()?;
        Some((first, last))
    }
}

/// Edges that have updates of weights run early (section 4.3): from each update to an operator that runs early itself, after what the update needs and not before it.
///
/// They leave orders out, and seldom the best: nothing is gained by a late update.
pub fn anchors(graph: &Graph) -> Vec<(u32, u32)> {
    let spans = Spans::of(graph);
    let behind = spans.levels_from_behind();
    let before = graph.before();
    let mut edges = Vec::new();
    for update in (0..graph.len() as u32).filter(|node| graph.nodes[*node as usize].is_update) {
        let mut seen = BTreeSet::from([update]);
        let mut open = VecDeque::from(before[update as usize].clone());
        // Nearest first; the whole radius is looked at before the next.
        while !open.is_empty() {
            let ring: Vec<u32> = open.drain(..).filter(|node| seen.insert(*node)).collect();
            let around = ring.iter().flat_map(|node| &graph.nodes[*node as usize].next);
            let later = around.filter(|node| {
                **node != update
                    && spans.asap[**node as usize] > spans.asap[update as usize]
                    && !graph.nodes[**node as usize].is_update
            });
            if let Some(anchor) = later.max_by_key(|node| (behind[**node as usize], std::cmp::Reverse(**node))) {
                edges.push((update, *anchor));
                break;
            }
            let beside = |node: &u32| before[*node as usize].iter().chain(&graph.nodes[*node as usize].next).copied();
            open.extend(ring.iter().flat_map(beside));
        }
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::super::{Described, DescribedNode};
    use super::*;

    fn node(name: &str, inputs: &[&str], outputs: &[&str], is_update: bool) -> DescribedNode {
        let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        DescribedNode { name: name.into(), inputs: all(inputs), outputs: all(outputs), is_update, workspace: 0 }
    }

    #[test]
    fn spans_and_useful_lives_are_those_of_the_longest_ways() {
        let tensors = ["x", "a", "b", "c", "d"].map(|name| (name.to_owned(), 1));
        let nodes = vec![
            node("one", &["x"], &["a"], false),
            node("long", &["a"], &["b"], false),
            node("longer", &["b"], &["c"], false),
            node("short", &["a"], &["d"], false),
            node("last", &["c", "d"], &[], false),
        ];
        let graph = Graph::of(&Described { tensors: tensors.to_vec(), nodes, ..Described::default() }).unwrap();
        let spans = Spans::of(&graph);
        assert_eq!(spans.asap, [0, 1, 2, 1, 3]);
        assert_eq!(spans.alap, [1, 2, 3, 3, 4]);
        assert_eq!(spans.useful(&[0, 1, 3]), Some((0, 3)));
    }

    #[test]
    fn an_update_is_tied_to_an_early_operator_that_is_none_before_it() {
        // Backward of three layers: each gradient of a weight is ready long before the last operator.
        let mut tensors: Vec<(String, u64)> = ["g3", "w3", "w2", "w1"].map(|name| (name.to_owned(), 1)).to_vec();
        let mut nodes = Vec::new();
        for layer in [3, 2, 1] {
            for name in [format!("g{}", layer - 1), format!("d{layer}"), format!("n{layer}")] {
                tensors.push((name, 1));
            }
            let [g, below, d, w, n] = [
                format!("g{layer}"),
                format!("g{}", layer - 1),
                format!("d{layer}"),
                format!("w{layer}"),
                format!("n{layer}"),
            ];
            nodes.push(node(&format!("back{layer}"), &[&g], &[&below, &d], false));
            nodes.push(node(&format!("update{layer}"), &[&w, &d], &[&n], true));
        }
        let graph = Graph::of(&Described { tensors, nodes, ..Described::default() }).unwrap();
        let name = |node: u32| graph.name(node).to_owned();
        let found: Vec<(String, String)> = anchors(&graph).into_iter().map(|(a, b)| (name(a), name(b))).collect();
        let expected = [("update3", "back1")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(found, expected, "what comes after an update of the second layer is as late as that");
    }
}
