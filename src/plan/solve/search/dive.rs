//! Stacking from the floor up: always on the lowest stretch of the skyline, there under what is most pressed, there the best block.
//!
//! What is most pressed is the section of the stretch in which most is still to be placed: what is wasted below it shows at the top. A block is taken only if what it leaves beside itself can be
//! filled, or has room to be wasted. One pass has no way back; many with other keys find what one does not.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::blocks::Blocks;
use super::load_tree::LoadTree;
use super::waiting::{Waiting, Within};
use crate::work::Work;

/// So many blocks are looked at before one is taken that leaves what cannot be filled.
const LOOKS: usize = 24;
/// Units of work for each step: some twenty nodes of trees are looked at.
const STEP: u64 = 8;
/// A stretch on which nothing more comes.
const CLOSED: u64 = u64::MAX;

/// Why there is no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stopped {
    /// It would not be below the limit.
    TooHigh,
    /// The work that it may do is done.
    OutOfWork,
}

/// The tops of what is placed: stretches of sections, each at one height.
struct Skyline {
    /// Of a stretch that begins in a section: where it ends, how high it is, and where the one before begins.
    end: Vec<u32>,
    height: Vec<u64>,
    before: Vec<u32>,
    is_stretch: Vec<bool>,
    lowest: BinaryHeap<(Reverse<u64>, Reverse<u32>)>,
}

impl Skyline {
    fn flat(sections: usize) -> Skyline {
        let mut skyline = Skyline {
            end: vec![0; sections + 1],
            height: vec![0; sections + 1],
            before: vec![0; sections + 1],
            is_stretch: vec![false; sections + 1],
            lowest: BinaryHeap::new(),
        };
        skyline.put(0, sections as u32, 0, 0);
        skyline
    }

    fn put(&mut self, start: u32, end: u32, height: u64, before: u32) {
        let at = start as usize;
        (self.end[at], self.height[at], self.before[at], self.is_stretch[at]) = (end, height, before, true);
        if height != CLOSED {
            self.lowest.push((Reverse(height), Reverse(start)));
        }
    }

    fn sections(&self) -> u32 {
        self.end.len() as u32 - 1
    }

    /// The lowest stretch, and of those the first.
    fn lowest(&mut self) -> Option<(u32, u32, u64)> {
        while let Some((Reverse(height), Reverse(start))) = self.lowest.peek().copied() {
            let at = start as usize;
            if self.is_stretch[at] && self.height[at] == height {
                return Some((start, self.end[at], height));
            }
            self.lowest.pop();
        }
        None
    }

    /// Of the stretches beside one.
    fn heights_beside(&self, start: u32) -> (u64, u64) {
        let end = self.end[start as usize];
        let left = if start == 0 { CLOSED } else { self.height[self.before[start as usize] as usize] };
        let right = if end == self.sections() { CLOSED } else { self.height[end as usize] };
        (left, right)
    }

    /// A part of a stretch has another height.
    fn raise(&mut self, stretch: u32, from: u32, to: u32, height: u64) {
        let (end, old, before) =
            (self.end[stretch as usize], self.height[stretch as usize], self.before[stretch as usize]);
        self.is_stretch[stretch as usize] = false;
        let mut last = before;
        if stretch < from {
            self.put(stretch, from, old, before);
            last = stretch;
        }
        self.put(from, to, height, last);
        last = from;
        if to < end {
            self.put(to, end, old, from);
            last = to;
        }
        if end < self.sections() {
            self.before[end as usize] = last;
        }
        // Those that are as high as their neighbours are one with them.
        if to < self.sections() && self.height[to as usize] == height {
            self.join(from, to);
        }
        if from > 0 && self.height[self.before[from as usize] as usize] == height {
            self.join(self.before[from as usize], from);
        }
    }

    fn join(&mut self, left: u32, right: u32) {
        let end = self.end[right as usize];
        self.is_stretch[right as usize] = false;
        self.end[left as usize] = end;
        if end < self.sections() {
            self.before[end as usize] = left;
        }
    }
}

/// Places every block by these keys, below `limit`, as if everything could end at `cap`.
pub(super) fn dive(blocks: &Blocks, keys: &[u64], cap: u64, limit: u64, work: &mut Work) -> Result<Vec<u64>, Stopped> {
    let mut dive = Dive {
        blocks,
        skyline: Skyline::flat(blocks.sections),
        loads: LoadTree::of(&blocks.loads()),
        waiting: Waiting::all(&blocks.blocks, keys),
        cap,
    };
    let mut offsets = vec![0; blocks.blocks.len()];
    let mut left = blocks.blocks.len();
    while left > 0 {
        let Some((start, end, height)) = dive.skyline.lowest() else { break };
        if !work.take(STEP) {
            return Err(Stopped::OutOfWork);
        }
        let (load, at) = dive.loads.most(start, end);
        if load == 0 {
            dive.skyline.raise(start, start, end, CLOSED);
            continue;
        }
        // Whatever happens, this is how high it becomes there.
        dive.cap = dive.cap.max(height + load);
        if dive.cap >= limit {
            return Err(Stopped::TooHigh);
        }
        match dive.choose(start, end, height, at) {
            Some(block) => {
                dive.place(block, start, height);
                offsets[block as usize] = height;
                left -= 1;
            }
            None => {
                let (before, behind) = dive.skyline.heights_beside(start);
                dive.skyline.raise(start, start, end, before.min(behind));
            }
        }
    }
    Ok(offsets)
}

struct Dive<'a> {
    blocks: &'a Blocks,
    skyline: Skyline,
    /// What is still to be placed.
    loads: LoadTree,
    waiting: Waiting<'a>,
    /// Where everything ends, as far as can be told.
    cap: u64,
}

impl Dive<'_> {
    /// What comes next on a stretch that is most pressed at `at`; nothing where nothing fits there.
    fn choose(&mut self, start: u32, end: u32, height: u64, at: u32) -> Option<u32> {
        let beside = self.skyline.heights_beside(start);
        let across = self.choose_of(Within::across(start, at, end), (start, end), height, beside);
        let (fit, first) = across;
        if fit.is_some() || first.is_some() {
            return fit.or(first);
        }
        // Something is wasted below what is most pressed. What comes beside it first makes that less only if it wastes nothing more.
        self.choose_of(Within::inside(start, end), (start, end), height, beside).0
    }

    /// The best that leaves nothing unfilled, and the best of all.
    fn choose_of(
        &mut self,
        within: Within,
        stretch: (u32, u32),
        height: u64,
        beside: (u64, u64),
    ) -> (Option<u32>, Option<u32>) {
        let (mut first, mut found) = (None, None);
        let mut passed = [0; LOOKS];
        let mut count = 0;
        while count < LOOKS {
            let Some(block) = self.waiting.best(within) else { break };
            first = first.or(Some(block));
            if self.leaves_nothing(block, stretch, height, beside) {
                found = Some(block);
                break;
            }
            self.waiting.set(block, false);
            passed[count] = block;
            count += 1;
        }
        passed[..count].iter().for_each(|block| self.waiting.set(*block, true));
        (found, first)
    }

    fn leaves_nothing(&self, block: u32, (start, end): (u32, u32), height: u64, beside: (u64, u64)) -> bool {
        let block = self.blocks.blocks[block as usize];
        let top = height + block.len;
        let can_be = |from: u32, to: u32, other: u64| {
            if from == to {
                return true;
            }
            let (load, at) = self.loads.most(from, to);
            // It would be raised to the lower of its neighbours.
            let slack = self.cap.saturating_sub(height + load);
            load == 0 || slack >= other.min(top) - height || self.waiting.best(Within::across(from, at, to)).is_some()
        };
        can_be(start, block.start, beside.0) && can_be(block.end, end, beside.1)
    }

    fn place(&mut self, block: u32, stretch: u32, height: u64) {
        let of = self.blocks.blocks[block as usize];
        self.waiting.set(block, false);
        self.loads.take(of.start, of.end, of.len);
        self.skyline.raise(stretch, of.start, of.end, height + of.len);
    }
}
