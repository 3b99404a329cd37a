//! Dynamic Reusable Space: what of the static pool is idle while a request that varies is live (STAlloc, section 5.2).
//!
//! Requests that are live over the same layers are a HomoLayer group (equation 3). The spaces of a group are the bytes of its lane's part of the pool that no entry
//! has at any time of the group's interval (equations 4 to 6). They are found by one sweep over time: what is idle when an interval begins, less what comes before it ends.
//!
//! Not for: what is idle at run time, which the planned pool looks at when such a request comes (equation 7).

use std::collections::HashMap;

use super::expiry::Times;
use super::{Entry, LanePlan, Plan};
use crate::extents::{Extents, cut};
use crate::limits;
use crate::units::{Lifetime, PlanOffset, PlanSpan, Span, Tick};

/// The spaces of every request of a lane that varies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReuseSpaces {
    groups: Vec<Group>,
    /// The group of each [`super::DynamicEntry`] of the lane.
    group_of: Vec<Option<u32>>,
    /// Start and length in units of allocation; of each group together, the shortest first.
    spaces: Vec<(u32, u32)>,
}

/// Requests that are live over the same layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    /// The entries of the lane that can be next while its spaces are idle: from the first up to and with the last, which is the number of entries where that is the end of a pass.
    pub cursor: (u32, u32),
    /// Where its spaces begin and end in the list of all.
    spaces: (u32, u32),
}

impl ReuseSpaces {
    /// Finds them for a lane of a plan that passes the validator.
    pub fn of(lane: &LanePlan) -> ReuseSpaces {
        let plan = &lane.plan;
        let mut found = ReuseSpaces::default();
        let mut numbers: HashMap<Lifetime, u32> = HashMap::new();
        let mut intervals: Vec<Lifetime> = Vec::new();
        for entry in &plan.dynamic {
            let group = entry.interval.map(|interval| {
                *numbers.entry(interval).or_insert_with(|| {
                    intervals.push(interval);
                    intervals.len() as u32 - 1
                })
            });
            found.group_of.push(group);
        }
        let mut order: Vec<usize> = (0..intervals.len()).collect();
        order.sort_unstable_by_key(|group| intervals[*group].start);
        let mut sweep = Sweep::of(plan);
        let times = Times::of(plan);
        let mut idle: Vec<Vec<(u32, u32)>> = vec![Vec::new(); intervals.len()];
        for group in order {
            idle[group] = sweep.idle(intervals[group]);
        }
        for (interval, mut idle) in intervals.into_iter().zip(idle) {
            idle.sort_unstable_by_key(|(start, len)| (*len, *start));
            let first = found.spaces.len() as u32;
            found.spaces.append(&mut idle);
            let cursor = |tick| times.next_at(times.position(tick)) as u32;
            let cursor = (cursor(interval.start), cursor(interval.end));
            found.groups.push(Group { cursor, spaces: (first, found.spaces.len() as u32) });
        }
        found
    }

    /// The group of a request that varies, by its number in the plan; nothing where no space is known to be idle for as long as it lives.
    #[inline]
    pub fn group(&self, entry: u32) -> Option<&Group> {
        self.group_of[entry as usize].map(|group| &self.groups[group as usize])
    }

    /// The spaces of a group, the shortest first: start and length in units of allocation.
    #[inline]
    pub fn spaces(&self, group: &Group) -> &[(u32, u32)] {
        &self.spaces[group.spaces.0 as usize..group.spaces.1 as usize]
    }
}

/// Which of some spaces, the shortest first, is the first that holds at least so many units; how many they are where none does. Looks around `near`: the lists of a large plan are in nobody's cache, and who asks
/// again asks for about as much as before.
#[inline]
pub fn first_with_room(spaces: &[(u32, u32)], units: u32, near: usize) -> usize {
    let is_short = |at: usize| spaces.get(at).is_some_and(|(_, len)| *len < units);
    // All below `from` are too short, and none from `to` on is.
    let (mut from, mut to, mut step) = (0, spaces.len(), 1);
    if is_short(near) {
        from = near + 1;
        while from + step <= to && is_short(from + step - 1) {
            (from, step) = (from + step, step * 2);
        }
        to = to.min(from + step - 1);
    } else {
        to = near.min(to);
        while step <= to && !is_short(to - step) {
            (to, step) = (to - step, step * 2);
        }
        from = if step <= to { to - step + 1 } else { from };
    }
    from + spaces[from..to].partition_point(|(_, len)| *len < units)
}

/// What is idle in a lane's part of the pool, as time goes on.
struct Sweep<'a> {
    /// Births and deaths by tick; at one tick whoever leaves goes first, because lifetimes are half-open.
    changes: Vec<(Tick, bool, &'a Entry)>,
    /// Those that have happened.
    done: usize,
    idle: Extents,
    /// Entries that outlive the prologue: some go in the first pass of the cycle, which the second does not show.
    left_over: Vec<&'a Entry>,
    cycle_len: u64,
}

impl Sweep<'_> {
    fn of(plan: &Plan) -> Sweep<'_> {
        let mut changes: Vec<(Tick, bool, &Entry)> = plan
            .entries
            .iter()
            .flat_map(|entry| entry.lifetimes().map(move |lifetime| (entry, lifetime)))
            .flat_map(|(entry, lifetime)| [(lifetime.start, true, entry), (lifetime.end, false, entry)])
            .collect();
        changes.sort_unstable_by_key(|(tick, comes, entry)| (*tick, *comes, entry.offset));
        let mut idle = Extents::default();
        if let Some(part) = plan.part() {
            let (start, end) = units(part);
            idle.give(start, end - start);
        }
        let prologue = &plan.entries[..plan.cycle_start];
        let last = prologue.last().map_or(Tick(0), |entry| entry.lifetime.start);
        let stays = |entry: &&Entry| entry.lifetime.end > last;
        let left_over = prologue.iter().filter(stays).collect();
        let cycle_len = plan.cycle_len().unwrap_or(0);
        Sweep { changes, done: 0, idle, left_over, cycle_len }
    }

    /// What nobody has at any time of the interval. Intervals come in the order of their starts.
    fn idle(&mut self, interval: Lifetime) -> Vec<(u32, u32)> {
        while let Some((_, comes, entry)) = self.changes.get(self.done).filter(|(tick, ..)| *tick <= interval.start) {
            let (start, end) = units(entry.span());
            if *comes {
                self.idle.take(start, end - start);
            } else {
                self.idle.give(start, end - start);
            }
            self.done += 1;
        }
        let mut left: Vec<(u64, u64)> = self.idle.iter().map(|(start, len)| (start, start + len)).collect();
        let take = |left: &mut Vec<(u64, u64)>, entry: &Entry| {
            let (start, end) = units(entry.span());
            cut(left, start, end, 1);
        };
        for (tick, comes, entry) in &self.changes[self.done..] {
            if *tick >= interval.end || left.is_empty() {
                break;
            }
            if *comes {
                take(&mut left, entry);
            }
        }
        let pass_before = |tick: Tick| Tick(tick.0.saturating_sub(self.cycle_len));
        let before = Lifetime { start: pass_before(interval.start), end: pass_before(interval.end) };
        for entry in self.left_over.iter().filter(|entry| entry.lifetime.overlaps(before)) {
            take(&mut left, entry);
        }
        left.into_iter().map(|(start, end)| (start as u32, (end - start) as u32)).collect()
    }
}

/// From where to where bytes of the pool reach, in units of allocation: less than 2^32 in a pool that can be served from.
fn units(span: PlanSpan) -> (u64, u64) {
    let unit = limits::ALLOCATION_ALIGNMENT.get();
    (span.start().get() / unit, span.end().get() / unit)
}

/// A space as bytes of the pool.
pub fn span_of((start, len): (u32, u32)) -> PlanSpan {
    let unit = limits::ALLOCATION_ALIGNMENT;
    let len = unit.checked_mul(u64::from(len)).expect("32 bits of units are less than any address");
    Span::new(PlanOffset::new(u64::from(start) * unit.get()), len).expect("32 bits of units are less than any address")
}
