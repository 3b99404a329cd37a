//! Buffers as rectangles over sections of time.

use super::super::sections::Sections;
use crate::units::Lifetime;

/// A buffer: live in sections `start..end`, `len` bytes high.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Block {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) len: u64,
}

impl Block {
    pub(super) fn sections(&self) -> std::ops::Range<usize> {
        self.start as usize..self.end as usize
    }
}

/// Blocks to be stacked.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    pub(super) blocks: Vec<Block>,
    /// How many sections there are.
    pub(super) sections: usize,
}

impl Blocks {
    pub(super) fn of(lifetimes: &[Lifetime], lens: &[u64]) -> Blocks {
        let sections = Sections::of(lifetimes);
        let block = |(at, len): (usize, &u64)| {
            let (start, end) = sections.of_lifetime(at);
            Block { start: start as u32, end: end as u32, len: *len }
        };
        Blocks { blocks: lens.iter().enumerate().map(block).collect(), sections: sections.count() }
    }

    /// Bytes that are live in each section.
    pub(super) fn loads(&self) -> Vec<u64> {
        let mut changes = vec![0_i128; self.sections + 1];
        for block in &self.blocks {
            changes[block.start as usize] += i128::from(block.len);
            changes[block.end as usize] -= i128::from(block.len);
        }
        let mut live = 0;
        let mut load = |change: &i128| {
            live += change;
            live as u64
        };
        changes[..self.sections].iter().map(&mut load).collect()
    }

    /// Groups of blocks that share no section with those of others, in the order of time.
    pub(super) fn groups(&self) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.blocks.len()).collect();
        order.sort_by_key(|at| self.blocks[*at].start);
        let (mut groups, mut end) = (Vec::<Vec<usize>>::new(), 0);
        for at in order {
            let block = &self.blocks[at];
            match groups.last_mut() {
                Some(group) if block.start < end => group.push(at),
                _ => groups.push(vec![at]),
            }
            end = end.max(block.end);
        }
        groups
    }

    /// Some of them, in sections of their own.
    pub(super) fn only(&self, members: &[usize]) -> Blocks {
        let first = members.iter().map(|at| self.blocks[*at].start).min().unwrap_or(0);
        let last = members.iter().map(|at| self.blocks[*at].end).max().unwrap_or(0);
        let block = |at: &usize| {
            let block = self.blocks[*at];
            Block { start: block.start - first, end: block.end - first, ..block }
        };
        Blocks { blocks: members.iter().map(block).collect(), sections: (last - first) as usize }
    }

    /// Pairs of blocks that are live together, or somewhat more: each with those that live where it begins.
    pub(super) fn pairs(&self) -> u64 {
        let mut live = vec![0_i64; self.sections + 1];
        for block in &self.blocks {
            live[block.start as usize] += 1;
            live[block.end as usize] -= 1;
        }
        let mut now = 0;
        live.iter_mut().for_each(|change| {
            now += *change;
            *change = now;
        });
        self.blocks.iter().map(|block| live[block.start as usize] as u64).sum()
    }

    /// Where the highest of them ends.
    pub(super) fn top(&self, offsets: &[u64]) -> u64 {
        self.blocks.iter().zip(offsets).map(|(block, offset)| offset + block.len).max().unwrap_or(0)
    }
}
