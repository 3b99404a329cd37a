//! The blocks that wait for a place: the best of those that lie within some sections and are live in one of them.
//!
//! A k-d tree over where blocks begin and end; each node knows the best of its blocks that still wait.

use super::blocks::Block;

/// Blocks in a leaf.
const LEAF: usize = 8;
const NOBODY: u32 = u32::MAX;

struct Node {
    /// Of its blocks, whether they wait or not: the first and the last section that one begins in, and the same of ends.
    starts: (u32, u32),
    ends: (u32, u32),
    best: u32,
}

/// Blocks that wait.
pub(super) struct Waiting<'a> {
    blocks: &'a [Block],
    keys: &'a [u64],
    /// The blocks, leaf by leaf, and where each is.
    order: Vec<u32>,
    place: Vec<u32>,
    waits: Vec<bool>,
    /// A whole binary tree: node `n` has `2n` and `2n + 1` below it.
    nodes: Vec<Node>,
    leaves: usize,
}

/// Which blocks are looked for: those that begin in `starts` and end in `ends`, both with their last.
#[derive(Clone, Copy)]
pub(super) struct Within {
    starts: (u32, u32),
    ends: (u32, u32),
}

impl Within {
    /// Inside `from..to` and live in section `at` of it.
    pub(super) fn across(from: u32, at: u32, to: u32) -> Within {
        Within { starts: (from, at), ends: (at + 1, to) }
    }

    /// Inside `from..to`.
    pub(super) fn inside(from: u32, to: u32) -> Within {
        Within { starts: (from, to - 1), ends: (from + 1, to) }
    }
}

impl<'a> Waiting<'a> {
    /// All of them wait; one with a larger key is better, and then the first.
    pub(super) fn all(blocks: &'a [Block], keys: &'a [u64]) -> Waiting<'a> {
        let leaves = blocks.len().div_ceil(LEAF).next_power_of_two().max(1);
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        split(&mut order, blocks, leaves, true);
        let mut place = vec![0; blocks.len()];
        order.iter().enumerate().for_each(|(at, block)| place[*block as usize] = at as u32);
        let none = || Node { starts: (u32::MAX, 0), ends: (u32::MAX, 0), best: NOBODY };
        let nodes = (0..2 * leaves).map(|_| none()).collect();
        let waits = vec![true; blocks.len()];
        let mut waiting = Waiting { blocks, keys, order, place, waits, nodes, leaves };
        for leaf in 0..leaves {
            let node = &mut waiting.nodes[leaves + leaf];
            for at in waiting.order[share(blocks.len(), leaves, leaf)].iter() {
                let Block { start, end, .. } = blocks[*at as usize];
                node.starts = (node.starts.0.min(start), node.starts.1.max(start));
                node.ends = (node.ends.0.min(end), node.ends.1.max(end));
            }
            waiting.look_at_leaf(leaf);
        }
        for node in (1..leaves).rev() {
            let [left, right] =
                [2 * node, 2 * node + 1].map(|below| (waiting.nodes[below].starts, waiting.nodes[below].ends));
            let node_of = &mut waiting.nodes[node];
            node_of.starts = (left.0.0.min(right.0.0), left.0.1.max(right.0.1));
            node_of.ends = (left.1.0.min(right.1.0), left.1.1.max(right.1.1));
            waiting.join(node);
        }
        waiting
    }

    fn better(&self, one: u32, other: u32) -> u32 {
        match (one, other) {
            (NOBODY, other) => other,
            (one, NOBODY) => one,
            _ => {
                let (a, b) = (self.keys[one as usize], self.keys[other as usize]);
                if (b, std::cmp::Reverse(other)) > (a, std::cmp::Reverse(one)) { other } else { one }
            }
        }
    }

    fn look_at_leaf(&mut self, leaf: usize) {
        let members = &self.order[share(self.blocks.len(), self.leaves, leaf)];
        let waiting = members.iter().copied().filter(|at| self.waits[*at as usize]);
        self.nodes[self.leaves + leaf].best = waiting.fold(NOBODY, |best, at| self.better(best, at));
    }

    fn join(&mut self, node: usize) {
        self.nodes[node].best = self.better(self.nodes[2 * node].best, self.nodes[2 * node + 1].best);
    }

    /// A block waits, or does not any more.
    pub(super) fn set(&mut self, block: u32, waits: bool) {
        self.waits[block as usize] = waits;
        let leaf = leaf_of(self.blocks.len(), self.leaves, self.place[block as usize] as usize);
        self.look_at_leaf(leaf);
        let mut node = (self.leaves + leaf) / 2;
        while node > 0 {
            self.join(node);
            node /= 2;
        }
    }

    /// The best of those that wait there.
    pub(super) fn best(&self, within: Within) -> Option<u32> {
        let best = self.best_in(1, &within, NOBODY);
        (best != NOBODY).then_some(best)
    }

    fn best_in(&self, node: usize, within: &Within, known: u32) -> u32 {
        let of = &self.nodes[node];
        let is_apart = |have: (u32, u32), want: (u32, u32)| have.1 < want.0 || want.1 < have.0;
        if of.best == NOBODY
            || self.better(known, of.best) == known
            || is_apart(of.starts, within.starts)
            || is_apart(of.ends, within.ends)
        {
            return known;
        }
        let is_inside = |have: (u32, u32), want: (u32, u32)| want.0 <= have.0 && have.1 <= want.1;
        if is_inside(of.starts, within.starts) && is_inside(of.ends, within.ends) {
            return of.best;
        }
        if node >= self.leaves {
            let members = &self.order[share(self.blocks.len(), self.leaves, node - self.leaves)];
            let holds = |at: &u32| {
                let Block { start, end, .. } = self.blocks[*at as usize];
                self.waits[*at as usize]
                    && is_inside((start, start), within.starts)
                    && is_inside((end, end), within.ends)
            };
            return members.iter().copied().filter(holds).fold(known, |best, at| self.better(best, at));
        }
        let (left, right) = (2 * node, 2 * node + 1);
        let (first, second) = if self.better(self.nodes[left].best, self.nodes[right].best) == self.nodes[left].best {
            (left, right)
        } else {
            (right, left)
        };
        let known = self.best_in(first, within, known);
        self.best_in(second, within, known)
    }
}

/// The places of a leaf, where all have as many as can be.
fn share(blocks: usize, leaves: usize, leaf: usize) -> std::ops::Range<usize> {
    blocks * leaf / leaves..blocks * (leaf + 1) / leaves
}

fn leaf_of(blocks: usize, leaves: usize, place: usize) -> usize {
    ((place + 1) * leaves - 1) / blocks
}

/// Puts blocks into the order of leaves, halves by where they begin and by where they end in turn.
fn split(order: &mut [u32], blocks: &[Block], leaves: usize, by_start: bool) {
    // Shares of the whole are not those of halves: every cut is where the whole has it.
    fn cut(
        order: &mut [u32],
        blocks: &[Block],
        (from, to): (usize, usize),
        (all, leaves): (usize, usize),
        by_start: bool,
    ) {
        if to - from <= 1 {
            return;
        }
        let middle = from.midpoint(to);
        let first = all * from / leaves;
        let at = all * middle / leaves - first;
        if at > 0 && at < order.len() {
            let key = |block: &u32| {
                let Block { start, end, .. } = blocks[*block as usize];
                if by_start { (start, end, *block) } else { (end, start, *block) }
            };
            order.select_nth_unstable_by_key(at, key);
        }
        let (left, right) = order.split_at_mut(at);
        cut(left, blocks, (from, middle), (all, leaves), !by_start);
        cut(right, blocks, (middle, to), (all, leaves), !by_start);
    }
    let all = order.len();
    cut(order, blocks, (0, leaves), (all, leaves), by_start);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn the_best_is_what_a_look_at_all_finds() {
        let mut rng = Rng::new(3);
        for count in [1_u64, 5, 8, 9, 40, 333] {
            let block = |rng: &mut Rng| {
                let start = rng.below(30) as u32;
                Block { start, end: start + 1 + rng.below(10) as u32, len: 1 }
            };
            let blocks: Vec<Block> = (0..count).map(|_| block(&mut rng)).collect();
            let keys: Vec<u64> = (0..count).map(|_| rng.below(20)).collect();
            let mut waiting = Waiting::all(&blocks, &keys);
            let mut waits = vec![true; count as usize];
            for _ in 0..600 {
                let from = rng.below(30) as u32;
                let to = from + 1 + rng.below(12) as u32;
                let at = from + rng.below(u64::from(to - from)) as u32;
                let within = rng.below(2) == 0;
                let holds = |block: &Block| {
                    from <= block.start && block.end <= to && (within || block.start <= at && at < block.end)
                };
                let all = (0..count as usize).filter(|n| waits[*n] && holds(&blocks[*n]));
                let best = all.max_by_key(|n| (keys[*n], std::cmp::Reverse(*n)));
                let asked = if within { Within::inside(from, to) } else { Within::across(from, at, to) };
                assert_eq!(waiting.best(asked), best.map(|n| n as u32));
                let one = rng.below(count) as usize;
                waits[one] = rng.below(3) == 0;
                waiting.set(one as u32, waits[one]);
            }
        }
    }
}
