//! When the plan has each entry gone: what must have been freed before an entry is asked for.
//!
//! The runtime keeps one promise by this: an allocation that it believes to be where and when the plan has it is one that the plan has live at the cursor. Whoever outlives
//! its entry is told apart as soon as the cursor comes to the next request behind that end. So an entry whose turn it is can only meet those, and a space that the
//! plan leaves idle is idle but for those.

use super::{LanePlan, Plan};
use crate::units::Tick;

/// For every entry the entries of its lane whose lifetimes end between it and the one asked for before it there, over the prologue, the first pass of the cycle and every later one. Entries have numbers lane by
/// lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expiries {
    /// Where those of each entry begin; one more at the end.
    starts: Vec<u32>,
    entries: Vec<u32>,
    deaths: Vec<u32>,
}

/// What the plan has live for good.
pub const NEVER: u32 = u32::MAX;

impl Expiries {
    /// Finds them for every entry of the lanes of a plan.
    pub fn of(lanes: &[LanePlan]) -> Expiries {
        let mut all = Expiries { starts: vec![0], entries: Vec::new(), deaths: Vec::new() };
        let times: Vec<Times> = lanes.iter().map(|of| Times::of(&of.plan)).collect();
        let end = times.iter().map(|times| times.end).max().unwrap_or_default();
        for (of, times) in lanes.iter().zip(&times) {
            all.append(&of.plan, times, end);
        }
        all
    }

    /// Adds those of a lane of a plan that ends at `end`.
    fn append(&mut self, plan: &Plan, times: &Times, end: Tick) {
        let first = self.deaths.len() as u32;
        let mut pairs = Vec::with_capacity(plan.entries.len() * 2);
        for (entry, of) in plan.entries.iter().enumerate() {
            // What the plan has live at its end is live for good, or it is gone in a pass that looks like the one before.
            let ends = of.lifetimes().map(|lifetime| lifetime.end).filter(|tick| *tick < end);
            // Behind the last entry of a plan without a cycle nobody is asked for.
            let before = ends.map(|tick| times.entry_at(times.position(tick)));
            pairs.extend(before.filter(|next| (*next as usize) < plan.entries.len()).map(|next| (next, entry as u32)));
        }
        pairs.sort_unstable();
        pairs.dedup();
        let mut at = 0;
        for entry in 0..plan.entries.len() as u32 {
            at += pairs[at..].iter().take_while(|(of, _)| *of == entry).count();
            self.starts.push((self.entries.len() + at) as u32);
        }
        self.deaths.resize(self.deaths.len() + plan.entries.len(), NEVER);
        for (next, gone) in pairs {
            self.deaths[(first + gone) as usize] = first + next;
            self.entries.push(first + gone);
        }
    }

    /// The first entry that is asked for when this one is gone, or [`NEVER`].
    pub fn death(&self, entry: u32) -> u32 {
        self.deaths[entry as usize]
    }

    /// The entries that are gone when this one is asked for, and were not at the one before.
    #[inline]
    pub fn before(&self, entry: u32) -> &[u32] {
        let (start, end) = (self.starts[entry as usize], self.starts[entry as usize + 1]);
        &self.entries[start as usize..end as usize]
    }
}

/// When the entries of a plan are asked for: a position is a place in the row of prologue, first pass and second pass of the cycle.
#[derive(Debug)]
pub(super) struct Times {
    starts: Vec<Tick>,
    count: usize,
    cycle_start: usize,
    /// One more than the last tick.
    pub(super) end: Tick,
}

impl Times {
    pub(super) fn of(plan: &Plan) -> Times {
        let count = plan.entries.len();
        let mut starts: Vec<Tick> = plan.entries.iter().map(|entry| entry.lifetime.start).collect();
        if let Some(cycle_len) = plan.cycle_len() {
            starts.extend(
                plan.entries[plan.cycle_start..]
                    .iter()
                    .map(|entry| Tick(entry.lifetime.start.0.saturating_add(cycle_len))),
            );
        }
        let ends = plan.entries.iter().flat_map(super::Entry::lifetimes).map(|lifetime| lifetime.end);
        Times { starts, count, cycle_start: plan.cycle_start, end: ends.max().unwrap_or_default() }
    }

    /// The first position that is not before `tick`.
    pub(super) fn position(&self, tick: Tick) -> usize {
        self.starts.partition_point(|start| *start < tick)
    }

    /// The entry that is asked for at a position: behind the second pass the cycle begins again.
    pub(super) fn entry_at(&self, position: usize) -> u32 {
        let entry = self.next_at(position);
        if entry == self.count && self.cycle_start < self.count { self.cycle_start as u32 } else { entry as u32 }
    }

    /// The same, where the end of a pass is behind its last entry.
    pub(super) fn next_at(&self, position: usize) -> usize {
        if position < self.count { position } else { self.cycle_start + (position - self.count) }
    }

    /// The tick is one of the second pass, by all that can be told: behind the last request of the first, and a pass later than any that comes before the cycle.
    pub(super) fn is_second_pass(&self, tick: Tick) -> bool {
        let Some((of_first, of_second)) = self.starts.get(self.cycle_start).zip(self.starts.get(self.count)) else {
            return false;
        };
        let last_before = self.cycle_start.checked_sub(1).map_or(Tick(0), |last| self.starts[last]);
        let pass_before = (tick.0 + of_first.0).checked_sub(of_second.0);
        self.position(tick) >= self.count && pass_before.is_some_and(|before| before >= last_before.0)
    }
}
