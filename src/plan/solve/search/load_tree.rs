//! Bytes that are still to be placed, by section: what a stretch of sections has at most, and where.

/// A tree of sums that a whole stretch changes by at once.
pub(super) struct LoadTree {
    leaves: usize,
    /// What was added to all of a node's sections, below what its ancestors add.
    added: Vec<i64>,
    /// The largest of a node's sections, with what was added to it, and the first section that has it.
    largest: Vec<(i64, u32)>,
}

impl LoadTree {
    pub(super) fn of(loads: &[u64]) -> LoadTree {
        let leaves = loads.len().next_power_of_two().max(1);
        let mut largest = vec![(i64::MIN / 2, 0); 2 * leaves];
        for (at, leaf) in largest[leaves..].iter_mut().enumerate() {
            *leaf = (loads.get(at).map_or(i64::MIN / 2, |load| *load as i64), at as u32);
        }
        let mut tree = LoadTree { leaves, added: vec![0; 2 * leaves], largest };
        (1..leaves).rev().for_each(|node| tree.join(node));
        tree
    }

    fn join(&mut self, node: usize) {
        let (left, right) = (self.largest[2 * node], self.largest[2 * node + 1]);
        let (most, at) = if right.0 > left.0 { right } else { left };
        self.largest[node] = (most + self.added[node], at);
    }

    /// So many bytes less in `start..end`.
    pub(super) fn take(&mut self, start: u32, end: u32, len: u64) {
        self.change(1, 0, self.leaves, (start as usize, end as usize), -(len as i64));
    }

    fn change(&mut self, node: usize, from: usize, to: usize, of: (usize, usize), by: i64) {
        if of.0 >= to || of.1 <= from {
            return;
        }
        if of.0 <= from && to <= of.1 {
            self.added[node] += by;
            self.largest[node].0 += by;
            return;
        }
        let middle = from.midpoint(to);
        self.change(2 * node, from, middle, of, by);
        self.change(2 * node + 1, middle, to, of, by);
        self.join(node);
    }

    /// The most that a section of `start..end`, which is not empty, has; and the first that has it.
    pub(super) fn most(&self, start: u32, end: u32) -> (u64, u32) {
        let (most, at) = self.most_in(1, 0, self.leaves, (start as usize, end as usize));
        (most as u64, at)
    }

    fn most_in(&self, node: usize, from: usize, to: usize, of: (usize, usize)) -> (i64, u32) {
        if of.0 <= from && to <= of.1 {
            return self.largest[node];
        }
        let middle = from.midpoint(to);
        let left = (of.0 < middle).then(|| self.most_in(2 * node, from, middle, of));
        let right = (of.1 > middle).then(|| self.most_in(2 * node + 1, middle, to, of));
        let (most, at) = match (left, right) {
            (Some(left), Some(right)) => {
                if right.0 > left.0 {
                    right
                } else {
                    left
                }
            }
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => (i64::MIN / 2, 0),
        };
        (most + self.added[node], at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn it_finds_what_a_look_at_every_section_finds() {
        let mut rng = Rng::new(7);
        for sections in [1_u64, 2, 7, 33] {
            let mut loads: Vec<u64> = (0..sections).map(|_| 1000 + rng.below(50)).collect();
            let mut tree = LoadTree::of(&loads);
            for _ in 0..300 {
                let start = rng.below(sections);
                let end = start + 1 + rng.below(sections - start);
                let of = start as usize..end as usize;
                let most = *loads[of.clone()].iter().max().unwrap();
                let at = start + loads[of.clone()].iter().position(|load| *load == most).unwrap() as u64;
                assert_eq!(tree.most(start as u32, end as u32), (most, at as u32));
                tree.take(start as u32, end as u32, 2);
                loads[of].iter_mut().for_each(|load| *load -= 2);
            }
        }
    }
}
