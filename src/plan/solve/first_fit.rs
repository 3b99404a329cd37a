//! First fit over time and space: each buffer, in a given order, goes to the lowest offset that is free for its whole life.
//!
//! A segment tree over the sections of time keeps, in every node, two sets of occupied offsets: of buffers that *cover* the node's whole time, and of buffers
//! that *touch* any of it. A buffer's conflicts are then what touches its canonical nodes and what covers their ancestors: about 4 log T sets, each
//! kept short by merging neighbours. One cursor moves up through all of them, from stretch to stretch, until nothing is in the way. 18,000 buffers take
//! some 30 ms where sizes repeat, as in training. Where nothing repeats nothing merges, and the stretches on the way are as many as the buffers that are
//! live together: the square of the job, which is why somebody counts the steps.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::one_pass::OnePass;
use super::sections::Sections;
use super::{Buffer, Effort, Stopped};

/// In which order buffers are placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Large ones first; among equals, those that begin first.
    SizeThenStart,
    /// Large ones first; among equals, those that end last.
    SizeThenEnd,
    /// Large areas (bytes × ticks) first.
    Area,
    /// Those that live long first, then large ones: two classes, at a tenth of all ticks.
    LongThenSize,
    /// As they are asked for.
    Start,
}

impl Order {
    /// Its name in plans and on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Order::SizeThenStart => "first-fit/size-start",
            Order::SizeThenEnd => "first-fit/size-end",
            Order::Area => "first-fit/area",
            Order::LongThenSize => "first-fit/long-size",
            Order::Start => "first-fit/start",
        }
    }

    /// The indices of `buffers` in this order.
    pub(super) fn sorted(self, buffers: &[&Buffer]) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..buffers.len()).collect();
        let ticks = |buffer: &Buffer| buffer.lifetimes().map(|lifetime| lifetime.ticks()).sum::<u64>();
        let end =
            buffers.iter().flat_map(|buffer| buffer.lifetimes()).map(|lifetime| lifetime.end.0).max().unwrap_or(0);
        let descending = |n: u128| u128::MAX - n;
        // Every key ends in the index, so that the order is one only.
        indices.sort_by_cached_key(|at| {
            let buffer = buffers[*at];
            let size = descending(u128::from(buffer.len.get()));
            let start = u128::from(buffer.lifetime.start.0);
            match self {
                Order::SizeThenStart => (size, start, *at),
                Order::SizeThenEnd => (size, descending(u128::from(buffer.lifetime.end.0)), *at),
                Order::Area => (descending(u128::from(buffer.len.get()) * u128::from(ticks(buffer))), start, *at),
                Order::LongThenSize => {
                    let is_short = ticks(buffer) * 10 < end;
                    let class = if is_short { 1_u128 << 127 } else { 0 };
                    (class + (size >> 1), start, *at)
                }
                Order::Start => (start, size, *at),
            }
        });
        indices
    }
}

/// Offsets for `buffers`, in their order.
pub(super) fn place(
    buffers: &[&Buffer],
    one_pass: &OnePass,
    order: Order,
    effort: &mut Effort,
) -> Result<Vec<u64>, Stopped> {
    let lifetimes = |at: usize| {
        let (one, both) = (Some(one_pass.lifetimes[at]), buffers[at].lifetimes());
        one.into_iter().filter(|_| one_pass.is_exact).chain(both.filter(|_| !one_pass.is_exact))
    };
    let sections = Sections::of((0..buffers.len()).flat_map(lifetimes));
    let mut tree = Tree::new(sections.count());
    let mut offsets = vec![0; buffers.len()];
    for at in order.sorted(buffers) {
        let stretches: Vec<_> = lifetimes(at).map(|lifetime| sections.of_lifetime(lifetime)).collect();
        let len = buffers[at].len.get();
        offsets[at] = tree.place(&stretches, len, &mut effort.steps)?;
        effort.placed += 1;
        if offsets[at] + len >= effort.top {
            return Err(Stopped::NoUse);
        }
    }
    Ok(offsets)
}

/// Disjoint, sorted, never touching stretches of occupied offsets.
#[derive(Clone, Default)]
struct Occupied(Vec<(u64, u64)>);

impl Occupied {
    fn insert(&mut self, start: u64, end: u64) {
        let first = self.0.partition_point(|(_, to)| *to < start);
        let last = first + gallop(&self.0[first..], |(from, _)| *from <= end);
        let merged =
            self.0[first..last].iter().fold((start, end), |(low, high), (from, to)| (low.min(*from), high.max(*to)));
        self.0.splice(first..last, [merged]);
    }
}

/// How many stretches from the first on are so, found in few looks where they are few.
fn gallop(stretches: &[(u64, u64)], is_so: impl Fn(&(u64, u64)) -> bool) -> usize {
    let mut step = 1;
    while step <= stretches.len() && is_so(&stretches[step - 1]) {
        step *= 2;
    }
    let known = step / 2;
    known + stretches[known..stretches.len().min(step)].partition_point(is_so)
}

struct Tree {
    /// Number of leaves: a power of two.
    leaves: usize,
    covering: Vec<Occupied>,
    touching: Vec<Occupied>,
}

impl Tree {
    fn new(sections: usize) -> Tree {
        let leaves = sections.max(1).next_power_of_two();
        Tree { leaves, covering: vec![Occupied::default(); leaves], touching: vec![Occupied::default(); 2 * leaves] }
    }

    /// The nodes that together cover exactly `[start, end)`.
    fn canonical(&self, start: usize, end: usize, nodes: &mut Vec<usize>) {
        let (mut low, mut high) = (start + self.leaves, end + self.leaves);
        while low < high {
            if low % 2 == 1 {
                nodes.push(low);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                nodes.push(high);
            }
            low /= 2;
            high /= 2;
        }
    }

    fn place(&mut self, sections: &[(usize, usize)], len: u64, steps: &mut u64) -> Result<u64, Stopped> {
        let mut nodes = Vec::new();
        for (start, end) in sections {
            self.canonical(*start, *end, &mut nodes);
        }
        let mut ancestors: Vec<usize> = nodes
            .iter()
            .flat_map(|node| std::iter::successors(Some(node / 2), |up| Some(up / 2)).take_while(|up| *up > 0))
            .collect();
        ancestors.sort_unstable();
        ancestors.dedup();
        let offset = self.lowest_free(&nodes, &ancestors, len, steps)?;
        let end = offset + len;
        for node in &nodes {
            if let Some(covering) = self.covering.get_mut(*node) {
                covering.insert(offset, end);
            }
        }
        for node in nodes.iter().chain(&ancestors) {
            self.touching[*node].insert(offset, end);
        }
        Ok(offset)
    }

    fn lowest_free(&self, nodes: &[usize], ancestors: &[usize], len: u64, steps: &mut u64) -> Result<u64, Stopped> {
        let touching = nodes.iter().map(|node| &self.touching[*node]);
        let covering = ancestors.iter().map(|node| &self.covering[*node]);
        // What is left of every set above the cursor.
        let mut sets: Vec<&[(u64, u64)]> =
            touching.chain(covering).map(|set| &set.0[..]).filter(|set| !set.is_empty()).collect();
        let mut lowest: BinaryHeap<_> = sets.iter().enumerate().map(|(at, set)| Reverse((set[0].0, at))).collect();
        let mut offset = 0_u64;
        while let Some(mut next) = lowest.peek_mut() {
            let Reverse((start, at)) = *next;
            if start >= offset.checked_add(len).ok_or(Stopped::TooLarge)? {
                break;
            }
            *steps = steps.checked_sub(1).ok_or(Stopped::NoUse)?;
            let set = &mut sets[at];
            offset = offset.max(set[0].1);
            *set = &set[gallop(set, |(_, end)| *end <= offset)..];
            match set.first() {
                Some((start, _)) => *next = Reverse((*start, at)),
                None => drop(PeekMut::pop(next)),
            }
        }
        offset.checked_add(len).map(|_| offset).ok_or(Stopped::TooLarge)
    }
}
