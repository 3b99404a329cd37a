//! Looking for the order with the lowest peak.
//!
//! Whether there is an order that never has more than a limit live is asked again and again, with limits between what is known to be
//! possible and what is known to be impossible. The answer is looked for from the front, level by level: all places that are reached with
//! as many operators run are looked at together, those with least live first, and no more of them than the width. What is live depends on
//! who has run alone, so of the ways to one place one is enough (dynamic programming over sets of operators, as in Serenity; Ahn et al.,
//! MLSys 2020).
//!
//! Most steps are no choice. An operator that frees as much as it makes, and has room now, may run now: whoever has an order without it
//! here has one with it, since later it would free no more and cost no less. The same is true of a few, one waiting for the other, that
//! free as much as they make together. The gradient of a weight and the update that frees it are such a pair.
//!
//! A unit of work is a look at what an operator would do to memory: some twenty million a second on one core.

use std::collections::{BTreeMap, HashSet};

use super::graph::Graph;
use super::walk::Walk;
use crate::work::Work;

/// The answer to whether an order stays below a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// This one does, and has so much live at most.
    Order(Vec<u32>, u64),
    /// None does: every place that can be reached was looked at.
    None,
    /// Nobody knows: places were left out.
    Unknown,
}

/// Operators that are looked at together, at most, each waiting for the one before.
const CHAIN_MAX: usize = 4;
/// What may be kept of one search, in bytes: places are as large as the graph.
const PLACES_LEN_MAX: usize = 1 << 30;

/// A place, and the last step on the way to it.
struct Reached<'a> {
    walk: Walk<'a>,
    step: u32,
}

/// Steps on all ways, each with the one before.
struct Steps(Vec<(u32, u32)>);

const NOWHERE: u32 = u32::MAX;

impl Steps {
    fn add(&mut self, before: u32, node: u32) -> u32 {
        self.0.push((before, node));
        self.0.len() as u32 - 1
    }

    fn order(&self, mut at: u32) -> Vec<u32> {
        let mut order = Vec::new();
        while at != NOWHERE {
            let (before, node) = self.0[at as usize];
            order.push(node);
            at = before;
        }
        order.reverse();
        order
    }
}

/// Looks for an order that has at most `limit` live at any time, with at most `width` places at each level.
pub(super) fn within(graph: &Graph, limit: u64, width: usize, work: &mut Work) -> Answer {
    let start = Walk::of(graph);
    if start.peak > limit {
        return Answer::None;
    }
    let place_len = 4 * (graph.nodes.len() + graph.storages.len());
    let places_max = (PLACES_LEN_MAX / place_len.max(1)).max(1);
    let width = width.min(places_max);
    let mut steps = Steps(Vec::new());
    let mut levels: BTreeMap<u32, Level<'_>> = BTreeMap::new();
    let mut is_all = true;
    // Of all levels together.
    let mut places = 1;
    let mut first = Reached { walk: start, step: NOWHERE };
    if !first.go_on(limit, &mut steps, work) {
        return Answer::Unknown;
    }
    if first.walk.is_over() {
        return Answer::Order(steps.order(first.step), first.walk.peak);
    }
    levels.entry(first.walk.done).or_default().add(first);
    while let Some((_, mut level)) = levels.pop_first() {
        places -= level.places.len();
        is_all &= level.cut(width);
        for reached in level.places {
            for node in reached.walk.ready.clone() {
                if !work.take(1) {
                    return Answer::Unknown;
                }
                if reached.walk.cost(node).during > limit {
                    continue;
                }
                let mut next = Reached { walk: reached.walk.clone(), step: steps.add(reached.step, node) };
                next.walk.run(node);
                if !work.take(place_len as u64 / 256) || !next.go_on(limit, &mut steps, work) {
                    return Answer::Unknown;
                }
                if next.walk.is_over() {
                    return Answer::Order(steps.order(next.step), next.walk.peak);
                }
                if steps.0.len() >= NOWHERE as usize / 2 {
                    return Answer::Unknown;
                }
                let level = levels.entry(next.walk.done).or_default();
                let before = level.places.len();
                level.add(next);
                if level.places.len() >= 2 * width.max(32) {
                    is_all &= level.cut(width);
                }
                places = places + level.places.len() - before;
                // Steps that are no choice lead to many levels: each keeps its best.
                if places > places_max {
                    let each = (places_max / levels.len() / 2).max(1);
                    for level in levels.values_mut() {
                        is_all &= level.cut(each);
                    }
                    places = levels.values().map(|level| level.places.len()).sum();
                }
            }
        }
    }
    if is_all { Answer::None } else { Answer::Unknown }
}

/// Places that are reached with as many operators run.
#[derive(Default)]
struct Level<'a> {
    places: Vec<Reached<'a>>,
    known: HashSet<u128>,
}

impl<'a> Level<'a> {
    fn add(&mut self, reached: Reached<'a>) {
        if self.known.insert(reached.walk.place) {
            self.places.push(reached);
        }
    }

    /// Leaves the best ones; says whether that is all of them.
    fn cut(&mut self, width: usize) -> bool {
        let is_all = self.places.len() <= width;
        // The way that was found first, which is nearest to the order as it is, of equal ones.
        self.places.sort_by_key(|reached| reached.walk.live);
        self.places.truncate(width);
        is_all
    }
}

impl Reached<'_> {
    /// Runs whoever costs nothing. False when the work is over.
    fn go_on(&mut self, limit: u64, steps: &mut Steps, work: &mut Work) -> bool {
        'again: loop {
            for at in 0..self.walk.ready.len() {
                let node = self.walk.ready[at];
                if !work.take(1) {
                    return false;
                }
                let cost = self.walk.cost(node);
                if cost.after <= self.walk.live && cost.during <= limit {
                    self.step = steps.add(self.step, node);
                    self.walk.run(node);
                    continue 'again;
                }
            }
            for at in 0..self.walk.ready.len() {
                let node = self.walk.ready[at];
                let mut chain = Vec::with_capacity(CHAIN_MAX);
                let live = self.walk.live;
                match self.chain(node, live, limit, &mut chain, work) {
                    None => return false,
                    Some(false) => {}
                    Some(true) => {
                        for node in chain {
                            self.step = steps.add(self.step, node);
                            self.walk.run(node);
                        }
                        continue 'again;
                    }
                }
            }
            return true;
        }
    }

    /// Whether a chain that begins with this one comes to have no more than `live` live; it is in `chain` then. Nothing when the work is over.
    fn chain(&mut self, node: u32, live: u64, limit: u64, chain: &mut Vec<u32>, work: &mut Work) -> Option<bool> {
        if !work.take(1) {
            return None;
        }
        let cost = self.walk.cost(node);
        if cost.during > limit {
            return Some(false);
        }
        chain.push(node);
        if cost.after <= live {
            return Some(true);
        }
        if chain.len() < CHAIN_MAX {
            let next: Vec<u32> = self.walk.would_be_ready(node).collect();
            let (before, peak) = (self.walk.live, self.walk.peak);
            self.walk.try_out(node);
            for next in next {
                let found = self.chain(next, live, limit, chain, work);
                if found != Some(false) {
                    self.walk.take_back(node, before, peak);
                    return found;
                }
            }
            self.walk.take_back(node, before, peak);
        }
        chain.pop();
        Some(false)
    }
}
