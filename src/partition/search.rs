//! Whether a plan exists whose stages need only certain amounts, and the plan for which those amounts are the least.
//!
//! From the last layer to the first, it keeps for each layer which GPUs can be used by stages that cover it and all behind it, as a set of bits ([`Space`]); one stage more is one shift of a set. That
//! says yes or no for certain amounts; halving the amounts finds the lowest peak.
//!
//! Equal peaks are told apart as the paper has it (III.C): the GPUs that need most are left out, and the lowest peak of the others wins, again and again. So what is least is the list of a plan's
//! different amounts, the largest first, and a list that ends is less than one that goes on. Each amount of it is found in the same way, with those before it allowed.

use super::space::Space;
use super::{Group, Table};

/// Which ranks stages may have.
#[derive(Debug)]
struct Allowed {
    /// All below this one,
    below: u32,
    /// and these, the largest first.
    fixed: Vec<u32>,
}

impl Allowed {
    fn has(&self, rank: u32) -> bool {
        rank < self.below || self.fixed.binary_search_by(|fixed| rank.cmp(fixed)).is_ok()
    }

    /// No rank above is allowed.
    fn largest(&self) -> u32 {
        self.fixed.first().copied().unwrap_or(0).max(self.below.saturating_sub(1))
    }
}

/// A stage of a plan: its layers, and which of the table's configs.
pub(super) type Chosen = (Group, usize);

/// Where a walk can be: how many stages are left, and which GPUs they use.
type States = Vec<(usize, usize)>;

/// The search on one table.
pub(super) struct Search<'a> {
    table: &'a Table,
    space: &'a Space,
    /// What each config adds to the GPUs in use.
    steps: Vec<usize>,
    /// By depth (none, one … all more) and first layer: what stages from there on can use.
    sets: Vec<u64>,
    /// Which of the sets have anything.
    any: Vec<bool>,
    /// Of each, the layer before which a stage ends at the latest that begins there: all that is longer needs too much.
    ends: Vec<usize>,
}

impl<'a> Search<'a> {
    /// How many bits its sets have together.
    pub(super) fn bits(table: &Table, space: &Space) -> usize {
        space.words().saturating_mul(64).saturating_mul((table.depths() + 1) * (table.layers() + 1))
    }

    pub(super) fn new(table: &'a Table, space: &'a Space) -> Search<'a> {
        let steps = table.configs().iter().map(|config| space.step(config.degree)).collect();
        let count = (table.depths() + 1) * (table.layers() + 1);
        let (mut sets, mut any) = (vec![0; count * space.words()], vec![false; count]);
        // No stage covers no layer, and uses nothing.
        (sets[table.layers() * space.words()], any[table.layers()]) = (1, true);
        Search { table, space, steps, sets, any, ends: vec![table.layers(); count] }
    }

    /// The plan whose list of different amounts is the least.
    pub(super) fn best(mut self) -> Option<Vec<Chosen>> {
        let mut allowed = Allowed { below: self.table.values().len() as u32, fixed: Vec::new() };
        if !self.decide(&allowed) {
            return None;
        }
        let mut known = self.amounts(&allowed);
        loop {
            let at = allowed.fixed.len();
            // The next amount of the best plan so far is enough; how little is?
            let (mut enough, mut too_little) = (known.get(at).map_or(0, |rank| rank + 1), None::<u32>);
            while too_little.map_or(0, |below| below + 1) < enough {
                let from = too_little.map_or(0, |below| below + 1);
                // What is known is often the best already.
                let is_first = at > 0 && too_little.is_none();
                allowed.below = if is_first { enough - 1 } else { from + (enough - 1 - from) / 2 };
                if self.decide(&allowed) {
                    known = self.amounts(&allowed);
                    enough = known.get(at).map_or(0, |rank| rank + 1);
                } else {
                    too_little = Some(allowed.below);
                }
            }
            match enough.checked_sub(1) {
                Some(rank) => {
                    allowed.fixed.push(rank);
                    if at == 0 {
                        self.narrow(rank);
                    }
                }
                None => break,
            }
        }
        allowed.below = 0;
        self.decide(&allowed).then(|| self.walk(&allowed))
    }

    /// From now on nothing above this rank is allowed, and what is longer need not be looked at.
    fn narrow(&mut self, peak: u32) {
        for depth in 1..=self.table.depths() {
            for first in 0..self.table.layers() {
                let is_little = |last: &usize| self.table.least(depth, Group { first, last: *last }) <= peak;
                let last = (first..self.table.layers()).rev().find(is_little);
                let at = self.at(depth, first);
                self.ends[at] = last.map_or(first, |last| last + 1);
            }
        }
    }

    /// Whether there is a plan.
    fn decide(&mut self, allowed: &Allowed) -> bool {
        let (layers, depths) = (self.table.layers(), self.table.depths());
        let words = self.space.words();
        let mut set = vec![0; words];
        for first in (0..layers).rev() {
            for depth in 1..=depths {
                let at = self.at(depth, first);
                let mut any = false;
                if self.is_of_use(depth, first) {
                    for last in first..self.ends[at] {
                        if self.table.least(depth, Group { first, last }) <= allowed.largest() {
                            if !any {
                                set.fill(0);
                            }
                            any |= self.extend(&mut set, depth, Group { first, last }, allowed);
                        }
                    }
                }
                self.any[at] = any && self.space.keep_possible(&mut set);
                if self.any[at] {
                    self.sets[at * words..(at + 1) * words].copy_from_slice(&set);
                }
            }
        }
        (1..=depths).any(|depth| self.space.full().any(|full| self.can(depth, 0, full)))
    }

    /// There are layers for so many stages from here on, and those before can use all other GPUs, each with one layer at least.
    fn is_of_use(&self, depth: usize, first: usize) -> bool {
        let stages = if depth == self.table.depths() { self.table.layers() - first } else { depth };
        let most = self.table.configs().iter().map(|config| config.degree as usize).max().unwrap_or(1);
        depth <= self.table.layers() - first && (first + stages).saturating_mul(most) >= self.space.gpus()
    }

    /// Adds to a set what can be used with this group as the next stage.
    fn extend(&self, set: &mut [u64], depth: usize, group: Group, allowed: &Allowed) -> bool {
        let mut any = false;
        for behind in self.behind(depth) {
            let at = self.at(behind, group.last + 1);
            if !self.any[at] {
                continue;
            }
            let from = &self.sets[at * self.space.words()..(at + 1) * self.space.words()];
            let mut done = 0;
            for (config, rank) in self.table.ranks(depth, group).iter().enumerate() {
                let step = self.steps[config];
                // Two ways to share among as many GPUs are one here.
                let degree = u64::from(self.table.configs()[config].degree);
                if allowed.has(*rank) && done & degree == 0 {
                    done |= degree;
                    any = true;
                    self.space.or_shifted(set, from, step);
                }
            }
        }
        any
    }

    /// How many stages can be behind one that is the `depth`-th from the end, where the last number stands for all more.
    fn behind(&self, depth: usize) -> std::ops::RangeInclusive<usize> {
        depth - 1..=if depth == self.table.depths() { depth } else { depth - 1 }
    }

    fn at(&self, depth: usize, first: usize) -> usize {
        depth * (self.table.layers() + 1) + first
    }

    fn can(&self, depth: usize, first: usize, used: usize) -> bool {
        let at = self.at(depth, first);
        self.any[at] && self.sets[at * self.space.words() + used / 64] >> (used % 64) & 1 == 1
    }

    /// A plan of what was decided last, always the same: the first stage as long as possible, shared so that it needs least, among as few GPUs as possible; then the second, and so on.
    fn walk(&self, allowed: &Allowed) -> Vec<Chosen> {
        let layers = self.table.layers();
        let depths = 1..=self.table.depths();
        let mut states: States = depths
            .flat_map(|depth| {
                self.space.full().filter(move |full| self.can(depth, 0, *full)).map(move |full| (depth, full))
            })
            .collect();
        let (mut stages, mut first) = (Vec::new(), 0);
        while first < layers {
            let end = states.iter().map(|(depth, _)| self.ends[self.at(*depth, first)]).max().unwrap_or(first);
            let groups = (first..end).rev().map(|last| Group { first, last });
            let next = groups.into_iter().find_map(|group| self.next(&states, group, allowed));
            let (stage, left) = next.expect("what was decided can be walked");
            stages.push(stage);
            (states, first) = (left, stage.0.last + 1);
        }
        stages
    }

    /// With this group as the next stage: shared how, and what is left then.
    fn next(&self, states: &[(usize, usize)], group: Group, allowed: &Allowed) -> Option<(Chosen, States)> {
        let mut configs: Vec<usize> = (0..self.steps.len()).collect();
        let (deepest, _) = *states.first()?;
        let ranks = self.table.ranks(deepest, group);
        configs.sort_by_key(|config| (ranks[*config], self.table.configs()[*config].degree, *config));
        configs.into_iter().find_map(|config| {
            let mut left = Vec::new();
            for &(depth, used) in states {
                if !allowed.has(self.table.ranks(depth, group)[config]) {
                    continue;
                }
                let Some(used) = used.checked_sub(self.steps[config]) else { continue };
                left.extend(
                    self.behind(depth)
                        .filter(|behind| self.can(*behind, group.last + 1, used))
                        .map(|behind| (behind, used)),
                );
            }
            left.sort_unstable();
            left.dedup();
            (!left.is_empty()).then_some(((group, config), left))
        })
    }

    /// The different amounts of a plan of what was decided last, the largest first.
    fn amounts(&self, allowed: &Allowed) -> Vec<u32> {
        let stages = self.walk(allowed);
        let depth = |at: usize| (stages.len() - at).min(self.table.depths());
        let ranks = stages.iter().enumerate().map(|(at, (group, config))| self.table.ranks(depth(at), *group)[*config]);
        let mut ranks: Vec<u32> = ranks.collect();
        ranks.sort_unstable_by_key(|rank| std::cmp::Reverse(*rank));
        ranks.dedup();
        ranks
    }
}
