//! Lanes: the sequences in which a job asks for memory.
//!
//! What is asked for on one stream comes in the same order in every iteration, whatever comes in between for other streams. Where threads race on one stream, only what each of them asks for is in order.
//! So each stream is a lane, or each thread on it: with a part of the pool that is nobody else's, and a place in the plan that moves on with its own requests alone.
//!
//! Not for: deciding which threads race, which [`super::Problem`] does.
//!
//! Invariant: the entries of a plan that are of one lane, and what varies there, are a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Entry, Plan};
use crate::ids::StreamId;
use crate::units::{Bytes, Place as _, PlanSpan, Span};

/// One of a plan's lanes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lane {
    /// The stream on which the memory is used first.
    pub stream: StreamId,
    /// Which of the threads that race on it: one more than its number where the plan was made; 0 for all of them together, where they do not.
    pub role: u32,
}

impl Lane {
    /// All that is asked for on a stream.
    pub const fn on(stream: StreamId) -> Lane {
        Lane { stream, role: 0 }
    }

    /// The role of a thread where threads race.
    pub const fn role_of(thread: u32) -> u32 {
        thread.saturating_add(1)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            0 => write!(f, "{}", self.stream),
            role => write!(f, "{}, thread {role}", self.stream),
        }
    }
}

/// What a plan has of one lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LanePlan {
    /// Which.
    pub lane: Lane,
    /// Its entries, in the places and at the times of the whole plan.
    pub plan: Plan,
    /// The number in the whole plan of each entry.
    pub entries: Vec<u32>,
}

impl Plan {
    /// The plan lane by lane, without lanes that have no entry.
    pub fn lanes(&self) -> Vec<LanePlan> {
        let mut lanes: BTreeMap<Lane, LanePlan> = BTreeMap::new();
        let empty = Plan { pool_len: self.pool_len, job: self.job, ..Plan::default() };
        for (entry, number) in self.entries.iter().zip(0..) {
            let of_lane = lanes.entry(entry.lane).or_insert_with(|| LanePlan {
                lane: entry.lane,
                plan: empty.clone(),
                entries: Vec::new(),
            });
            of_lane.plan.entries.push(*entry);
            of_lane.plan.cycle_start += usize::from((number as usize) < self.cycle_start);
            of_lane.entries.push(number);
        }
        let repeats = lanes.iter().filter(|(_, of)| of.plan.cycle_len().is_some());
        let repeating: BTreeSet<Lane> = repeats.map(|(lane, _)| *lane).collect();
        for (number, entry) in self.dynamic.iter().enumerate() {
            let Some(of_lane) = lanes.get_mut(&entry.lane) else { continue };
            let is_of_cycle = number >= self.dynamic_cycle_start;
            // Where nothing of the lane comes again nothing says when its bytes are idle.
            let interval = entry.interval.filter(|_| !is_of_cycle || repeating.contains(&entry.lane));
            let before = of_lane.entries.partition_point(|known| *known < entry.before) as u32;
            of_lane.plan.dynamic.push(super::DynamicEntry { before, interval, ..*entry });
            of_lane.plan.dynamic_cycle_start += usize::from(!is_of_cycle);
        }
        for detour in &self.detours {
            let Some(of_lane) = lanes.get_mut(&detour.lane) else { continue };
            let own = |number: u32| of_lane.entries.partition_point(|known| *known < number) as u32;
            let (from, to) = (own(detour.from), own(detour.to));
            of_lane.plan.detours.push(super::Detour { from, to, ..detour.clone() });
        }
        lanes.into_values().collect()
    }

    /// The bytes of the pool from the first that an entry has to the last.
    pub fn part(&self) -> Option<PlanSpan> {
        let spans = || self.entries.iter().map(Entry::span);
        let (start, end) = (spans().map(|span| span.start()).min()?, spans().map(|span| span.end()).max()?);
        Span::new(start, end.checked_distance(start).unwrap_or(Bytes::ZERO))
    }
}
