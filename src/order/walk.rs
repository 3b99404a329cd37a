//! Some operators have run: what is live, who may run next, and what that costs.

use super::graph::Graph;
use crate::rng::mix;

/// What an operator does to memory, were it to run now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cost {
    /// Live while it runs.
    pub(super) during: u64,
    /// Live once it has run.
    pub(super) after: u64,
}

/// Where one is on the way through a graph. What is live depends on who has run, and not on the order.
#[derive(Clone, Debug)]
pub(super) struct Walk<'a> {
    graph: &'a Graph,
    /// Operators that are to run before each.
    waits: Box<[u32]>,
    /// Users of each storage that have not run.
    left: Box<[u32]>,
    /// Live now.
    pub(super) live: u64,
    /// The most that was live at one time.
    pub(super) peak: u64,
    /// Those that may run, in the order in which they were said.
    pub(super) ready: Vec<u32>,
    /// Who has run, as a hash: two walks of one hash are at the same place.
    pub(super) place: u128,
    pub(super) done: u32,
}

impl<'a> Walk<'a> {
    pub(super) fn of(graph: &'a Graph) -> Walk<'a> {
        let given = graph.storages.iter().filter(|storage| storage.is_given).map(|storage| storage.bytes).sum();
        Walk {
            graph,
            waits: graph.nodes.iter().map(|node| node.before).collect(),
            left: graph.storages.iter().map(|storage| storage.users).collect(),
            live: given,
            peak: given,
            ready: (0..graph.nodes.len() as u32).filter(|node| graph.nodes[*node as usize].before == 0).collect(),
            place: 0,
            done: 0,
        }
    }

    pub(super) fn cost(&self, node: u32) -> Cost {
        let node = &self.graph.nodes[node as usize];
        let (mut comes, mut goes) = (0, 0);
        for number in &node.storages {
            let (storage, left) = (&self.graph.storages[*number as usize], self.left[*number as usize]);
            if left == storage.users && !storage.is_given {
                comes += storage.bytes;
            }
            if left == 1 && !storage.is_kept {
                goes += storage.bytes;
            }
        }
        Cost { during: self.live + comes + node.workspace, after: self.live + comes - goes }
    }

    /// Runs one that is ready.
    pub(super) fn run(&mut self, node: u32) {
        self.try_out(node);
        let at = self.ready.binary_search(&node).expect("who runs is ready");
        self.ready.remove(at);
        for next in &self.graph.nodes[node as usize].next {
            if self.waits[*next as usize] == 0
                && let Err(at) = self.ready.binary_search(next)
            {
                self.ready.insert(at, *next);
            }
        }
        self.place ^= hash(node);
        self.done += 1;
    }

    /// Runs one that is ready, or would be, for as long as [`Walk::take_back`] is not called: who is ready
    /// stays as it was, as thousands may be.
    pub(super) fn try_out(&mut self, node: u32) {
        let Cost { during, after } = self.cost(node);
        self.peak = self.peak.max(during);
        self.live = after;
        for storage in &self.graph.nodes[node as usize].storages {
            self.left[*storage as usize] -= 1;
        }
        for next in &self.graph.nodes[node as usize].next {
            self.waits[*next as usize] -= 1;
        }
    }

    /// Takes back the last that was tried out.
    pub(super) fn take_back(&mut self, node: u32, live: u64, peak: u64) {
        for next in &self.graph.nodes[node as usize].next {
            self.waits[*next as usize] += 1;
        }
        for storage in &self.graph.nodes[node as usize].storages {
            self.left[*storage as usize] += 1;
        }
        (self.live, self.peak) = (live, peak);
    }

    /// Those that would be ready once a ready one has run.
    pub(super) fn would_be_ready(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let next = self.graph.nodes[node as usize].next.iter().copied();
        next.filter(|next| self.waits[*next as usize] == 1)
    }

    pub(super) fn is_over(&self) -> bool {
        self.done as usize == self.graph.nodes.len()
    }
}

fn hash(node: u32) -> u128 {
    let node = u64::from(node) + 1;
    u128::from(mix(node)) << 64 | u128::from(mix(!node))
}

/// The most that is live at one time in an order, which must be one.
pub(super) fn peak_of(graph: &Graph, order: &[u32]) -> u64 {
    let mut walk = Walk::of(graph);
    order.iter().for_each(|node| walk.run(*node));
    walk.peak
}
