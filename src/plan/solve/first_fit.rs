//! First fit over time and space: each buffer, in a given order, goes to the lowest offset that is free for its whole life.
//!
//! A tree over the sections of time, of eight children a node, keeps in every node two sets of occupied offsets: of buffers that *cover* the node's whole time, and of buffers
//! that *touch* any of it. A buffer's conflicts are then what touches its canonical nodes and what covers those that its life cuts: some ten sets, each kept short by merging neighbours.
//! The lowest offset that nothing known is in the way of climbs: whichever set has a stretch that overlaps it raises it above that, until none has. 288,000 buffers take about half a second
//! where sizes repeat, as in training. Where nothing repeats nothing merges, and the stretches on the way are as many as the buffers that are
//! live together: the square of the job, which is why somebody counts the steps.

use super::one_pass::OnePass;
use super::sections::Sections;
use super::{Buffer, Effort, Stopped, Taken};
use crate::units::Lifetime;

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
    /// Large ones first; among equals, those that live long.
    SizeThenTicks,
    /// Those that live long first: the pyramid of OLLA.
    Ticks,
    /// As they are asked for.
    Start,
}

impl Order {
    pub(super) const ALL: [Order; 7] = [
        Order::SizeThenStart,
        Order::LongThenSize,
        Order::Area,
        Order::SizeThenEnd,
        Order::SizeThenTicks,
        Order::Ticks,
        Order::Start,
    ];

    /// Its name in plans and on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Order::SizeThenStart => "first-fit/size-start",
            Order::SizeThenEnd => "first-fit/size-end",
            Order::Area => "first-fit/area",
            Order::LongThenSize => "first-fit/long-size",
            Order::SizeThenTicks => "first-fit/size-ticks",
            Order::Ticks => "first-fit/ticks",
            Order::Start => "first-fit/start",
        }
    }

    /// The indices of `buffers` in this order.
    pub(super) fn sorted(self, buffers: &[&Buffer]) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..buffers.len()).collect();
        let ticks = |buffer: &Buffer| buffer.lifetimes().map(|lifetime| lifetime.ticks()).sum::<u64>();
        let end =
            buffers.iter().flat_map(|buffer| buffer.lifetimes()).map(|lifetime| lifetime.end.0).max().unwrap_or(0);
        let descending = |n: u64| u64::MAX - n;
        // Sizes are few mostly, and buffers are in the order in which they begin: sorted by size alone they stay in it.
        if self == Order::SizeThenStart && buffers.is_sorted_by_key(|buffer| buffer.lifetime.start) {
            indices.sort_by_key(|at| descending(buffers[*at].len.get()));
            return indices;
        }
        // The sort is stable, so that the order is one only.
        indices.sort_by_cached_key(|at| {
            let buffer = buffers[*at];
            let size = descending(buffer.len.get());
            let start = buffer.lifetime.start.0;
            match self {
                Order::SizeThenStart => (u128::from(size), start),
                Order::SizeThenEnd => (u128::from(size), descending(buffer.lifetime.end.0)),
                Order::Area => (u128::MAX - u128::from(buffer.len.get()) * u128::from(ticks(buffer)), start),
                Order::LongThenSize => {
                    let is_short = ticks(buffer) * 10 < end;
                    (u128::from(is_short) << u64::BITS | u128::from(size), start)
                }
                Order::SizeThenTicks => (u128::from(size), descending(ticks(buffer))),
                Order::Ticks => (u128::from(descending(ticks(buffer))), size),
                Order::Start => (u128::from(start), size),
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
    Ground::of(buffers, one_pass).place(&order.sorted(buffers), effort)
}

/// Buffers and the sections in which they live, to be placed in any order.
pub(super) struct Ground<'a> {
    buffers: &'a [&'a Buffer],
    sections: Sections,
    /// Where the lifetimes of each begin among those of all, one or two; nothing where each has one.
    places: Vec<usize>,
}

impl<'a> Ground<'a> {
    pub(super) fn of(buffers: &'a [&'a Buffer], one_pass: &OnePass) -> Ground<'a> {
        if one_pass.is_exact {
            return Ground { buffers, sections: Sections::of(&one_pass.lifetimes), places: Vec::new() };
        }
        let both: Vec<Lifetime> = buffers.iter().flat_map(|buffer| buffer.lifetimes()).collect();
        let next =
            |next: &mut usize, buffer: &&Buffer| Some(std::mem::replace(next, *next + buffer.lifetimes().count()));
        Ground { buffers, sections: Sections::of(&both), places: buffers.iter().scan(0, next).collect() }
    }

    fn stretches(&self, at: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let lifetimes = match self.places.get(at) {
            None => at..at + 1,
            Some(place) => *place..place + self.buffers[at].lifetimes().count(),
        };
        lifetimes.map(|lifetime| self.sections.of_lifetime(lifetime))
    }

    /// What is live at one time.
    pub(super) fn bound(&self) -> u64 {
        let mut changes = vec![0_i64; self.sections.count() + 1];
        for (at, buffer) in self.buffers.iter().enumerate() {
            for (from, to) in self.stretches(at) {
                changes[from] += buffer.len.get().cast_signed();
                changes[to] -= buffer.len.get().cast_signed();
            }
        }
        let live = changes.into_iter().scan(0, |live, change| {
            *live += change;
            Some(*live)
        });
        live.max().unwrap_or(0).cast_unsigned()
    }

    pub(super) fn place(&self, order: &[usize], effort: &mut Effort) -> Result<Vec<u64>, Stopped> {
        self.place_around(&[], &[], order, effort)
    }

    /// The same around offsets that are taken throughout. Buffers that have `fixed` offsets, which no two
    /// have that are live together, keep them.
    pub(super) fn place_around(
        &self,
        taken: &[(u64, u64)],
        fixed: &[Option<u64>],
        order: &[usize],
        effort: &mut Effort,
    ) -> Result<Vec<u64>, Stopped> {
        let mut tree = Tree::new(self.sections.count());
        for (from, to) in taken {
            tree.locate_all(&[(0, self.sections.count())]);
            tree.occupy(*from, *to);
        }
        let mut stretches = Vec::new();
        let mut offsets = vec![0; self.buffers.len()];
        for (at, offset) in fixed.iter().enumerate().filter_map(|(at, offset)| Some((at, (*offset)?))) {
            tree.locate_all(&self.stretches(at).collect::<Vec<_>>());
            tree.occupy(offset, offset + self.buffers[at].len.get());
            offsets[at] = offset;
        }
        let is_free = |at: &usize| fixed.get(*at).copied().flatten().is_none();
        for at in order.iter().copied().filter(is_free) {
            stretches.clear();
            stretches.extend(self.stretches(at));
            let len = self.buffers[at].len.get();
            offsets[at] = tree.place(&stretches, len, &mut effort.steps)?;
            effort.placed += 1;
            effort.last = at;
            if offsets[at] + len >= effort.top || effort.is_stopped() {
                return Err(Stopped::NoUse);
            }
        }
        Ok(offsets)
    }
}

/// Offsets for `buffers`, in their order, around what is taken.
pub(super) fn place_around(
    taken: &[Taken],
    buffers: &[Buffer],
    order: Order,
    effort: &mut Effort,
) -> Result<Vec<u64>, Stopped> {
    let lifetimes = taken.iter().map(|taken| taken.lifetime).chain(buffers.iter().map(|buffer| buffer.lifetime));
    let sections = Sections::of(&lifetimes.collect::<Vec<_>>());
    let mut tree = Tree::new(sections.count());
    for (at, Taken { from, to, .. }) in taken.iter().enumerate() {
        tree.locate_all(&[sections.of_lifetime(at)]);
        tree.occupy(*from, *to);
    }
    let mut offsets = vec![0; buffers.len()];
    for at in order.sorted(&buffers.iter().collect::<Vec<_>>()) {
        let len = buffers[at].len;
        offsets[at] = tree.place(&[sections.of_lifetime(taken.len() + at)], len.get(), &mut effort.steps)?;
        effort.placed += 1;
        if offsets[at] + len.get() >= effort.top {
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
        if first == last {
            self.0.insert(first, (start, end));
            return;
        }
        // Those between are in the first of them now.
        self.0[first] = (self.0[first].0.min(start), self.0[last - 1].1.max(end));
        if last > first + 1 {
            self.0.drain(first + 1..last);
        }
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

/// A set that is put in order when somebody looks: short lives touch every node above them, and only long ones look there.
#[derive(Clone, Default)]
struct Touching {
    set: Occupied,
    later: Vec<(u64, u64)>,
}

impl Touching {
    /// So many wait at least before they are put in order unasked.
    const WAITING: usize = 32;

    fn insert(&mut self, start: u64, end: u64) {
        self.later.push((start, end));
        if self.later.len() > self.set.0.len().max(Self::WAITING) {
            self.settle();
        }
    }

    fn settle(&mut self) {
        const FEW: usize = 4;
        if self.later.len() <= FEW {
            self.later.drain(..).for_each(|(start, end)| self.set.insert(start, end));
            return;
        }
        self.later.append(&mut self.set.0);
        self.later.sort_unstable();
        for (start, end) in self.later.drain(..) {
            match self.set.0.last_mut() {
                Some((_, last)) if start <= *last => *last = end.max(*last),
                _ => self.set.0.push((start, end)),
            }
        }
    }
}

/// Children of a node, as a power of two.
const SHIFT: usize = 3;
const CHILDREN: usize = 1 << SHIFT;

/// Sections are the leaves; nodes above them are numbered level by level.
struct Tree {
    /// What touches each section.
    leaves: Vec<Occupied>,
    covering: Vec<Occupied>,
    touching: Vec<Touching>,
    /// The number of the first node of each level above the leaves, and one more.
    levels: Vec<usize>,
    /// Where the buffer in hand lives: leaves, whole nodes, and nodes of which it has a part.
    whole_leaves: Vec<usize>,
    whole: Vec<usize>,
    parts: Vec<usize>,
    /// Where each set that is looked at begins above what was climbed.
    starts: Vec<u64>,
    /// Room for what is left of those sets.
    left: Vec<&'static [(u64, u64)]>,
}

impl Tree {
    fn new(sections: usize) -> Tree {
        let (mut levels, mut count) = (vec![0], sections.max(1));
        let mut nodes = 0;
        while count > 1 || nodes == 0 {
            count = count.div_ceil(CHILDREN);
            nodes += count;
            levels.push(nodes);
        }
        Tree {
            leaves: vec![Occupied::default(); sections],
            covering: vec![Occupied::default(); nodes],
            touching: vec![Touching::default(); nodes],
            levels,
            whole_leaves: Vec::new(),
            whole: Vec::new(),
            parts: Vec::new(),
            starts: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Finds the nodes that together are exactly `[from, to)`, as large as can be, and those above them.
    fn locate(&mut self, from: usize, to: usize) {
        let (mut start, mut end) = (from, to);
        Tree::edges(&mut start, &mut end, |leaf| self.whole_leaves.push(leaf));
        let (mut first, mut last) = (from >> SHIFT, (to - 1) >> SHIFT);
        for (level, base) in (1..).zip(&self.levels[..self.levels.len() - 1]) {
            let is_part = |node: usize| node << (SHIFT * level) < from || (node + 1) << (SHIFT * level) > to;
            self.parts.extend(Some(base + first).filter(|_| is_part(first)));
            self.parts.extend(Some(base + last).filter(|_| first != last && is_part(last)));
            (start, end) = (start >> SHIFT, end >> SHIFT);
            let whole = &mut self.whole;
            if first == last {
                // All that is left of it is below one node, or is that.
                (start..end).for_each(|node| whole.push(base + node));
                end = start;
            } else {
                Tree::edges(&mut start, &mut end, |node| whole.push(base + node));
            }
            (first, last) = (first >> SHIFT, last >> SHIFT);
        }
    }

    /// Takes from both ends of a stretch what does not fill a node above.
    fn edges(start: &mut usize, end: &mut usize, mut take: impl FnMut(usize)) {
        while start < end && !start.is_multiple_of(CHILDREN) {
            take(*start);
            *start += 1;
        }
        while start < end && !end.is_multiple_of(CHILDREN) {
            *end -= 1;
            take(*end);
        }
    }

    fn place(&mut self, sections: &[(usize, usize)], len: u64, steps: &mut u64) -> Result<u64, Stopped> {
        self.locate_all(sections);
        for node in &self.whole {
            self.touching[*node].settle();
        }
        let offset = self.lowest_free(len, steps)?;
        self.occupy(offset, offset + len);
        Ok(offset)
    }

    /// The same for several stretches of sections, instead of what was found before.
    fn locate_all(&mut self, sections: &[(usize, usize)]) {
        self.whole_leaves.clear();
        self.whole.clear();
        self.parts.clear();
        for (start, end) in sections {
            self.locate(*start, *end);
        }
    }

    /// Whoever lives where was located last has these offsets.
    fn occupy(&mut self, offset: u64, end: u64) {
        for leaf in &self.whole_leaves {
            self.leaves[*leaf].insert(offset, end);
        }
        for node in &self.whole {
            self.covering[*node].insert(offset, end);
        }
        for node in self.whole.iter().chain(&self.parts) {
            self.touching[*node].insert(offset, end);
        }
    }

    fn lowest_free(&mut self, len: u64, steps: &mut u64) -> Result<u64, Stopped> {
        let leaves = self.whole_leaves.iter().map(|leaf| &self.leaves[*leaf]);
        let touching = self.whole.iter().map(|node| &self.touching[*node].set);
        let covering = self.parts.iter().map(|node| &self.covering[*node]);
        // What is left of every set above the offset.
        let sets = leaves.chain(touching).chain(covering).map(|set| &set.0[..]).filter(|set| !set.is_empty());
        let mut left: Vec<&[(u64, u64)]> = emptied(std::mem::take(&mut self.left));
        left.extend(sets);
        self.starts.clear();
        self.starts.extend(left.iter().map(|set| set[0].0));
        let mut offset = 0_u64;
        let mut end = len;
        // Sets one after the other that had nothing in the way.
        let (mut at, mut quiet) = (0, 0);
        while quiet < left.len() {
            let before = offset;
            while self.starts[at] < end {
                *steps = steps.checked_sub(1).ok_or(Stopped::NoUse)?;
                let set = &mut left[at];
                offset = offset.max(set[0].1);
                end = offset.checked_add(len).ok_or(Stopped::TooLarge)?;
                *set = &set[gallop(set, |(_, end)| *end <= offset)..];
                self.starts[at] = set.first().map_or(u64::MAX, |(start, _)| *start);
            }
            quiet = if offset > before { 1 } else { quiet + 1 };
            at = if at + 1 == left.len() { 0 } else { at + 1 };
        }
        self.left = emptied(left);
        Ok(offset)
    }
}

/// The same room, with nothing in it: it is needed for every buffer.
fn emptied<'a>(mut left: Vec<&[(u64, u64)]>) -> Vec<&'a [(u64, u64)]> {
    left.clear();
    left.into_iter().map(|_| &[][..]).collect()
}
