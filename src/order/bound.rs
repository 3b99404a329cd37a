//! Bytes below which no order can go.

use super::graph::Graph;

/// Operators up to which it is known who runs before whom at all: as many bits, squared, twice.
const CLOSURE_MAX: usize = 1 << 14;

/// For each operator, what is live while it runs whatever the order is: memory that somebody before it (or itself) uses first and somebody after it (or itself) uses too.
pub(super) fn lower_bound(graph: &Graph) -> u64 {
    let given: u64 = graph.storages.iter().filter(|storage| storage.is_given).map(|storage| storage.bytes).sum();
    let kept: u64 = graph.storages.iter().filter(|storage| storage.is_kept).map(|storage| storage.bytes).sum();
    let mut during: Vec<u64> = graph.nodes.iter().map(|node| node.workspace).collect();
    if graph.len() <= CLOSURE_MAX {
        let (after, before) = (Reach::after(graph), Reach::before(graph));
        let users = graph.users();
        let words = graph.len().div_ceil(64);
        let (mut begun, mut wanted) = (vec![0_u64; words], vec![0_u64; words]);
        for (storage, users) in graph.storages.iter().zip(&users).filter(|(storage, _)| storage.bytes > 0) {
            for (set, always, reach) in
                [(&mut begun, storage.is_given, &after), (&mut wanted, storage.is_kept, &before)]
            {
                set.fill(if always { u64::MAX } else { 0 });
                for user in users.iter().filter(|_| !always) {
                    set.iter_mut().zip(reach.of(*user)).for_each(|(word, more)| *word |= more);
                }
            }
            for (at, word) in begun.iter().zip(&wanted).map(|(begun, wanted)| begun & wanted).enumerate() {
                let mut word = word;
                while word != 0 {
                    let node = 64 * at + word.trailing_zeros() as usize;
                    word &= word - 1;
                    if let Some(during) = during.get_mut(node) {
                        *during += storage.bytes;
                    }
                }
            }
        }
    } else {
        for (node, during) in graph.nodes.iter().zip(&mut during) {
            *during += node.storages.iter().map(|storage| graph.storages[*storage as usize].bytes).sum::<u64>();
        }
    }
    during.into_iter().fold(given.max(kept), u64::max)
}

/// Who runs after, or before, whom: a row of bits for each, itself among them.
struct Reach {
    words: usize,
    bits: Vec<u64>,
}

impl Reach {
    fn after(graph: &Graph) -> Reach {
        let mut reach = Reach::nobody(graph.len());
        for node in graph.given.iter().rev() {
            graph.nodes[*node as usize].next.iter().for_each(|next| reach.add(*node, *next));
        }
        reach
    }

    fn before(graph: &Graph) -> Reach {
        let mut reach = Reach::nobody(graph.len());
        for node in &graph.given {
            graph.nodes[*node as usize].next.iter().for_each(|next| reach.add(*next, *node));
        }
        reach
    }

    fn nobody(nodes: usize) -> Reach {
        let words = nodes.div_ceil(64);
        let mut reach = Reach { words, bits: vec![0; words * nodes] };
        for node in 0..nodes {
            reach.bits[words * node + node / 64] |= 1 << (node % 64);
        }
        reach
    }

    fn of(&self, node: u32) -> &[u64] {
        &self.bits[self.words * node as usize..][..self.words]
    }

    /// Whom one reaches the other does, too.
    fn add(&mut self, node: u32, other: u32) {
        let (to, from) = (self.words * node as usize, self.words * other as usize);
        for word in 0..self.words {
            self.bits[to + word] |= self.bits[from + word];
        }
    }
}
