//! Small changes to an order, each for the better: where most is live something that came before comes after, with all that waits for it, or something that comes after comes before, with all that it
//! waits for. The second is the first from the other end.
//!
//! A unit of work is a look at what an operator does to memory.

use super::view::View;
use crate::work::Work;

/// Makes an order better as long as a small change does.
pub(super) fn improve(forward: &View, backward: &View, order: &[u32], work: &mut Work) -> Vec<u32> {
    let (mut there, mut back) = (Course::of(forward, order.to_vec()), Course::of(backward, Vec::new()));
    loop {
        while there.lower(work) {}
        back.take(there.order.iter().rev().copied().collect());
        if !back.lower(work) {
            return there.order;
        }
        while back.lower(work) {}
        there.take(back.order.iter().rev().copied().collect());
    }
}

/// An order of a view, and what is live in it.
struct Course<'a> {
    view: &'a View,
    order: Vec<u32>,
    /// Where each operator stands.
    at: Vec<usize>,
    /// Live before each step, and while it runs.
    before: Vec<u64>,
    during: Vec<u64>,
    /// At which step each memory is used first, and last.
    first: Vec<usize>,
    last: Vec<usize>,
    /// Of each memory how many users are in the stretch that is looked at, and whether one was met; nothing in between.
    users: Vec<u32>,
    is_met: Vec<bool>,
    /// Operators that are to move; none in between.
    moves: Vec<bool>,
}

impl<'a> Course<'a> {
    fn of(view: &'a View, order: Vec<u32>) -> Course<'a> {
        let (len, memory) = (view.len(), view.memory.len());
        let mut course = Course {
            view,
            order: Vec::new(),
            at: vec![0; len],
            before: vec![0; len],
            during: vec![0; len],
            first: vec![0; memory],
            last: vec![0; memory],
            users: vec![0; memory],
            is_met: vec![false; memory],
            moves: vec![false; len],
        };
        course.take(order);
        course
    }

    /// Goes by another order.
    fn take(&mut self, order: Vec<u32>) {
        self.order = order;
        for (step, node) in self.order.iter().enumerate() {
            self.at[*node as usize] = step;
        }
        for (number, memory) in self.view.memory.iter().enumerate() {
            let steps = || memory.users.iter().map(|user| self.at[*user as usize]);
            (self.first[number], self.last[number]) = (steps().min().unwrap_or(0), steps().max().unwrap_or(0));
        }
        let mut live = self.view.live_at_start();
        for (step, node) in self.order.iter().enumerate() {
            self.before[step] = live;
            let of = || self.view.storages[*node as usize].iter().map(|storage| *storage as usize);
            let bytes = |storage: usize| self.view.memory[storage].bytes;
            let comes = of().filter(|storage| self.first[*storage] == step && !self.view.memory[*storage].is_there);
            live += comes.map(bytes).sum::<u64>();
            self.during[step] = live + self.view.workspace[*node as usize];
            let goes = of().filter(|storage| self.last[*storage] == step && !self.view.memory[*storage].stays);
            live -= goes.map(bytes).sum::<u64>();
        }
    }

    /// Finds a change after which less is live where it is most, and nowhere as much on the way. False where there is none, or the work is over.
    fn lower(&mut self, work: &mut Work) -> bool {
        let Some(peak) = self.during.iter().copied().max() else { return false };
        let Some(top) = self.during.iter().position(|during| *during == peak) else { return false };
        for step in (0..top).rev() {
            let mut looks = 1;
            let moved = self.behind(step, top, &mut looks);
            let mut order = None;
            if let Some(moved) = &moved
                && self.spares(moved, top, &mut looks)
            {
                looks += (top - step) as u64;
                let stay = self.order[step..=top].iter().copied().filter(|node| !self.moves[*node as usize]);
                let stretch: Vec<u32> = stay.chain(moved.iter().copied()).collect();
                order = (self.most(step, &stretch, peak) < peak).then_some(stretch);
            }
            moved.into_iter().flatten().for_each(|node| self.moves[node as usize] = false);
            if let Some(stretch) = order {
                self.order[step..=top].copy_from_slice(&stretch);
                let order = std::mem::take(&mut self.order);
                self.take(order);
                return work.take(looks + self.view.looks());
            }
            if !work.take(looks) {
                return false;
            }
        }
        false
    }

    /// The operator at a step and all that wait for it up to another, in their order; nothing where the one at that other does, too.
    fn behind(&mut self, step: usize, top: usize, looks: &mut u64) -> Option<Vec<u32>> {
        let mut found = vec![self.order[step]];
        self.moves[found[0] as usize] = true;
        let mut open = 0;
        let mut is_free = true;
        while let Some(node) = found.get(open).copied().filter(|_| is_free) {
            open += 1;
            for next in &self.view.next[node as usize] {
                *looks += 1;
                let at = self.at[*next as usize];
                if at == top {
                    is_free = false;
                    break;
                }
                if at < top && !std::mem::replace(&mut self.moves[*next as usize], true) {
                    found.push(*next);
                }
            }
        }
        if !is_free {
            found.iter().for_each(|node| self.moves[*node as usize] = false);
            return None;
        }
        found.sort_unstable_by_key(|node| self.at[*node as usize]);
        Some(found)
    }

    /// Whether less is live at a step where these, before it, come after it.
    fn spares(&self, moved: &[u32], top: usize, looks: &mut u64) -> bool {
        let (mut spared, mut kept) = (0, 0);
        for node in moved {
            for storage in self.view.storages[*node as usize].iter().map(|storage| *storage as usize) {
                let memory = &self.view.memory[storage];
                let (first, last) = (self.order[self.first[storage]], self.last[storage]);
                let comes_later = first == *node && !memory.is_there && (last > top || memory.stays);
                let moves = |user: &u32| self.at[*user as usize] > top || self.moves[*user as usize];
                *looks += if comes_later { memory.users.len() as u64 } else { 1 };
                if comes_later && memory.users.iter().all(moves) {
                    spared += memory.bytes;
                }
                let is_last = last < top && self.order[last] == *node && !memory.stays;
                if is_last && (memory.is_there || !self.moves[first as usize]) {
                    kept += memory.bytes;
                }
            }
        }
        spared > kept
    }

    /// The most that is live where these stand from a step on, in the place of themselves in another order; or so much that it is of no use.
    fn most(&mut self, step: usize, stretch: &[u32], limit: u64) -> u64 {
        let end = step + stretch.len();
        for node in stretch {
            self.view.storages[*node as usize].iter().for_each(|storage| self.users[*storage as usize] += 1);
        }
        let (mut live, mut most) = (self.before[step], 0);
        for node in stretch {
            let mut goes = 0;
            for storage in self.view.storages[*node as usize].iter().map(|storage| *storage as usize) {
                let memory = &self.view.memory[storage];
                if !std::mem::replace(&mut self.is_met[storage], true)
                    && self.first[storage] >= step
                    && !memory.is_there
                {
                    live += memory.bytes;
                }
                self.users[storage] -= 1;
                if self.users[storage] == 0 && self.last[storage] < end && !memory.stays {
                    goes += memory.bytes;
                }
            }
            most = most.max(live + self.view.workspace[*node as usize]);
            live -= goes;
            if most >= limit {
                break;
            }
        }
        for storage in stretch.iter().flat_map(|node| &self.view.storages[*node as usize]) {
            (self.users[*storage as usize], self.is_met[*storage as usize]) = (0, false);
        }
        most
    }
}
