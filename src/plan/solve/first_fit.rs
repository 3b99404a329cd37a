//! First fit over time and space: each buffer, in a given order, goes to the lowest offset that is free for its whole life.
//!
//! A segment tree over the ticks keeps, in every node, two sets of occupied offsets: of buffers that *cover* the node's whole time, and of buffers that
//! *touch* any of it. A buffer's conflicts are then what touches its canonical nodes and what covers their ancestors: about 4 log T sets, each
//! kept short by merging neighbours. One cursor moves up through all of them until nothing is in the way. 18,000 buffers take
//! some 30 ms.

use super::Buffer;
use crate::units::Tick;

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
    /// All of them; the most successful on real traces first.
    pub const ALL: [Order; 5] =
        [Order::SizeThenStart, Order::LongThenSize, Order::Area, Order::SizeThenEnd, Order::Start];

    /// Its name in plans and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Order::SizeThenStart => "first-fit/size-start",
            Order::SizeThenEnd => "first-fit/size-end",
            Order::Area => "first-fit/area",
            Order::LongThenSize => "first-fit/long-size",
            Order::Start => "first-fit/start",
        }
    }

    fn sort(self, buffers: &[&Buffer], indices: &mut [usize]) {
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
    }
}

/// Offsets for `buffers`, in their order; `None` where they pass any address space.
pub(super) fn place(buffers: &[&Buffer], order: Order) -> Option<Vec<u64>> {
    let mut ticks: Vec<Tick> = buffers
        .iter()
        .flat_map(|buffer| buffer.lifetimes())
        .flat_map(|lifetime| [lifetime.start, lifetime.end])
        .collect();
    ticks.sort_unstable();
    ticks.dedup();
    let section = |tick: Tick| ticks.binary_search(&tick).expect("every tick of a lifetime is a boundary");
    let mut tree = Tree::new(ticks.len());
    let mut indices: Vec<usize> = (0..buffers.len()).collect();
    order.sort(buffers, &mut indices);
    let mut offsets = vec![0; buffers.len()];
    for at in indices {
        let buffer = buffers[at];
        let sections: Vec<_> =
            buffer.lifetimes().map(|lifetime| (section(lifetime.start), section(lifetime.end))).collect();
        offsets[at] = tree.place(&sections, buffer.len.get())?;
    }
    Some(offsets)
}

/// Disjoint, sorted, never touching stretches of occupied offsets.
#[derive(Clone, Default)]
struct Occupied(Vec<(u64, u64)>);

impl Occupied {
    fn insert(&mut self, start: u64, end: u64) {
        let first = self.0.partition_point(|(_, to)| *to < start);
        let last = first + self.0[first..].partition_point(|(from, _)| *from <= end);
        let merged =
            self.0[first..last].iter().fold((start, end), |(low, high), (from, to)| (low.min(*from), high.max(*to)));
        self.0.splice(first..last, [merged]);
    }

    /// Where the stretch ends that stands in the way of `[at, at + len)`, if one does. `from` is where the search last stood: it only goes up.
    fn in_the_way(&self, from: &mut usize, at: u64, len: u64) -> Option<u64> {
        *from += self.0[*from..].partition_point(|(_, to)| *to <= at);
        self.0.get(*from).filter(|(start, _)| *start < at.saturating_add(len)).map(|(_, end)| *end)
    }
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
        Tree {
            leaves,
            covering: vec![Occupied::default(); 2 * leaves],
            touching: vec![Occupied::default(); 2 * leaves],
        }
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

    fn place(&mut self, sections: &[(usize, usize)], len: u64) -> Option<u64> {
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
        let offset = self.lowest_free(&nodes, &ancestors, len)?;
        let end = offset.checked_add(len)?;
        for node in &nodes {
            self.covering[*node].insert(offset, end);
            self.touching[*node].insert(offset, end);
        }
        for node in &ancestors {
            self.touching[*node].insert(offset, end);
        }
        Some(offset)
    }

    fn lowest_free(&self, nodes: &[usize], ancestors: &[usize], len: u64) -> Option<u64> {
        let touching = nodes.iter().map(|node| &self.touching[*node]);
        let covering = ancestors.iter().map(|node| &self.covering[*node]);
        let mut sets: Vec<(&Occupied, usize)> =
            touching.chain(covering).filter(|set| !set.0.is_empty()).map(|set| (set, 0)).collect();
        let mut at = 0;
        loop {
            let mut moved = false;
            for (set, from) in &mut sets {
                while let Some(end) = set.in_the_way(from, at, len) {
                    at = end;
                    moved = true;
                }
            }
            if !moved {
                return at.checked_add(len).map(|_| at);
            }
        }
    }
}
