//! Fusing local plans that meet in a computation phase.
//!
//! Where one plan ends and another begins each has bytes that it does not use yet, or any more. The smaller is inserted into the larger: a cursor goes up through the larger plan; at each place the request of
//! the smaller that begins first of all that fit there is placed, and the cursor moves behind it; where none fits it moves to the next request of the larger. Above the larger everything fits.
//!
//! The result is taken if its time-memory product, used over reserved bytes × ticks, is above the average of the two, weighted by what each reserves:
//!
//! ```text
//!   u₁ + u₂     r₁·(u₁/r₁) + r₂·(u₂/r₂)
//!   ───────  >  ───────────────────────    that is    r < r₁ + r₂
//!      r                r₁ + r₂
//! ```
//!
//! so it is whole numbers that are compared, and how far up the cursor may go is known before it starts.
//!
//! Not for: moving what the larger plan has placed.
//!
//! Invariant: an answer keeps that of a local plan, and its product is above the average. Work is counted, and ends when the steps are used up.

use std::collections::BTreeMap;

use super::Request;
use super::homo_phase::LocalPlan;
use crate::plan::PhasePair;
use crate::units::Lifetime;

/// The groups with those fused that gain by it. `groups` come in the order of their phases.
pub(super) fn fuse_adjacent(requests: &[Request], groups: Vec<LocalPlan>, steps: &mut u64) -> Vec<LocalPlan> {
    let mut beginning: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (at, group) in groups.iter().enumerate() {
        beginning.entry(group.phases.asked).or_default().push(at);
    }
    let mut groups: Vec<Option<LocalPlan>> = groups.into_iter().map(Some).collect();
    let mut plans = Vec::new();
    for at in 0..groups.len() {
        let Some(mut plan) = groups[at].take() else { continue };
        let mut tried = 0;
        while let Some(other) = beginning.get(&plan.phases.freed).and_then(|list| list.get(tried)) {
            tried += 1;
            let Some(fused) = groups[*other].as_ref().and_then(|other| fuse(requests, &plan, other, steps)) else {
                continue;
            };
            if fused.phases.freed != plan.phases.freed {
                tried = 0;
            }
            groups[*other] = None;
            plan = fused;
        }
        plans.push(plan);
    }
    plans
}

/// The two in one, if that is better: `first` ends in the phase in which `second` begins.
pub(super) fn fuse(requests: &[Request], first: &LocalPlan, second: &LocalPlan, steps: &mut u64) -> Option<LocalPlan> {
    let lifetime = Lifetime {
        start: first.lifetime.start.min(second.lifetime.start),
        end: first.lifetime.end.max(second.lifetime.end),
    };
    // The longest block that is still worth it: more and it takes as much as the two.
    let longest = (first.reserved() + second.reserved()).checked_sub(1)? / u128::from(lifetime.ticks().max(1));
    let (large, small) = if first.len >= second.len { (first, second) } else { (second, first) };
    *steps = steps.checked_sub(1)?;
    if u128::from(large.len) > longest {
        return None;
    }
    let inserted = Insertion::of(requests, large, small).run(longest, steps)?;
    let mut placed = [&large.placed[..], &inserted].concat();
    placed.sort_unstable_by_key(|(at, offset)| (*offset, *at));
    let end = inserted.iter().map(|(at, offset)| offset + requests[*at].len).max()?;
    let phases = PhasePair { asked: first.phases.asked, freed: second.phases.freed };
    let used = first.used + second.used;
    Some(LocalPlan { placed, len: large.len.max(end), lifetime, phases, used })
}

/// One plan on its way into another.
struct Insertion<'a> {
    requests: &'a [Request],
    /// The larger plan's requests in the order of offsets.
    larger: &'a [(usize, u64)],
    /// The smaller plan's in the order in which they begin.
    smaller: Vec<usize>,
    /// Those of them that are not placed.
    waiting: Waiting,
    /// Where in the larger plan the cursor is: everything before this one begins at the cursor or below.
    next: usize,
    /// Those of the larger plan that have bytes at the cursor.
    here: Vec<(usize, u64)>,
}

impl<'a> Insertion<'a> {
    fn of(requests: &'a [Request], large: &'a LocalPlan, small: &LocalPlan) -> Insertion<'a> {
        let mut smaller: Vec<usize> = small.placed.iter().map(|(at, _)| *at).collect();
        smaller.sort_unstable_by_key(|at| (requests[*at].lifetime.start, *at));
        let ends: Vec<u64> = smaller.iter().map(|at| requests[*at].lifetime.end.0).collect();
        Insertion { requests, larger: &large.placed, smaller, waiting: Waiting::of(&ends), next: 0, here: Vec::new() }
    }

    /// Where each request of the smaller plan goes, if none ends above `longest`.
    fn run(mut self, longest: u128, steps: &mut u64) -> Option<Vec<(usize, u64)>> {
        let mut placed = Vec::with_capacity(self.smaller.len());
        let mut cursor = 0_u64;
        while placed.len() < self.smaller.len() {
            self.arrive(cursor);
            *steps = steps.checked_sub(1 + self.here.len() as u64)?;
            cursor = match self.earliest_that_fits(cursor, steps)? {
                Some(nth) => {
                    let at = self.smaller[nth];
                    placed.push((at, cursor));
                    self.waiting.remove(nth);
                    cursor.checked_add(self.requests[at].len)?
                }
                None => match self.larger.get(self.next) {
                    Some((_, offset)) => *offset,
                    // Above all of it.
                    None => self.here.iter().map(|one| self.end(*one)).max()?,
                },
            };
            if u128::from(cursor) > longest {
                return None;
            }
        }
        Some(placed)
    }

    fn end(&self, (at, offset): (usize, u64)) -> u64 {
        offset + self.requests[at].len
    }

    /// Notes what has bytes at the cursor.
    fn arrive(&mut self, cursor: u64) {
        let requests = self.requests;
        self.here.retain(|(at, offset)| offset + requests[*at].len > cursor);
        while let Some(one) = self.larger.get(self.next).copied().filter(|(_, offset)| *offset <= cursor) {
            self.next += 1;
            if self.end(one) > cursor {
                self.here.push(one);
            }
        }
    }

    /// The first to begin of all that are in nobody's way at `cursor`. The outer `None`: no steps are left.
    fn earliest_that_fits(&self, cursor: u64, steps: &mut u64) -> Option<Option<usize>> {
        // Who is here for long keeps most away, and those need not be looked at.
        let lifetime = |one: &&(usize, u64)| self.requests[one.0].lifetime;
        let longest = self.here.iter().max_by_key(|one| lifetime(one).ticks()).map(|one| lifetime(&one));
        let begins_at = |tick| self.smaller.partition_point(|at| self.requests[*at].lifetime.start < tick);
        let after = longest.map_or(0, |longest| begins_at(longest.end));
        let mut from = 0;
        while let Some(nth) = match longest {
            None => self.waiting.first(from, u64::MAX - 1),
            Some(longest) => {
                let before = self.waiting.first(from, longest.start.0);
                let later = self.waiting.first(from.max(after), u64::MAX - 1);
                [before, later].into_iter().flatten().min()
            }
        } {
            if self.fits(nth, cursor, steps)? {
                return Some(Some(nth));
            }
            from = nth + 1;
        }
        Some(None)
    }

    fn fits(&self, nth: usize, cursor: u64, steps: &mut u64) -> Option<bool> {
        let Request { len, lifetime, .. } = self.requests[self.smaller[nth]];
        let above = self.larger[self.next..].iter().take_while(|(_, offset)| *offset < cursor.saturating_add(len));
        for (at, _) in self.here.iter().chain(above) {
            *steps = steps.checked_sub(1)?;
            if self.requests[*at].lifetime.overlaps(lifetime) {
                return Some(false);
            }
        }
        Some(true)
    }
}

/// Ends of the requests that wait, in the order in which they begin: a tree of minima.
struct Waiting {
    leaves: usize,
    least: Vec<u64>,
}

impl Waiting {
    fn of(ends: &[u64]) -> Waiting {
        let leaves = ends.len().max(1).next_power_of_two();
        let mut least = vec![u64::MAX; 2 * leaves];
        least[leaves..leaves + ends.len()].copy_from_slice(ends);
        for node in (1..leaves).rev() {
            least[node] = least[2 * node].min(least[2 * node + 1]);
        }
        Waiting { leaves, least }
    }

    fn remove(&mut self, nth: usize) {
        let mut node = nth + self.leaves;
        self.least[node] = u64::MAX;
        while node > 1 {
            node /= 2;
            self.least[node] = self.least[2 * node].min(self.least[2 * node + 1]);
        }
    }

    /// The first from `from` on that waits and ends at `end` or before.
    fn first(&self, from: usize, end: u64) -> Option<usize> {
        if from >= self.leaves {
            return None;
        }
        let mut node = from + self.leaves;
        while self.least[node] > end {
            // To the next subtree on the right, above which everything to the left was looked at.
            while node % 2 == 1 {
                node /= 2;
            }
            if node == 0 {
                return None;
            }
            node += 1;
        }
        while node < self.leaves {
            node = if self.least[2 * node] <= end { 2 * node } else { 2 * node + 1 };
        }
        Some(node - self.leaves)
    }
}
