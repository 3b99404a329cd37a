//! Whether everything fits below a height: a search over all canonical ways to stack it.
//!
//! In a canonical stacking every block rests on the floor or on another, and blocks are placed in the order of their offsets, lowest first. So all there is to a state is how low each block that
//! waits can yet come (its *base*). The section whose lowest base is lowest, and of those the one with the least slack, is decided next: one of the blocks that could begin there does,
//! or none does and all of them rise to the next height at which something ends that they could rest on.
//!
//! A state is hopeless when in some section the blocks whose bases are at or above some height do not fit between it and the cap. What was tried and failed weighs on the section that it failed in,
//! and those are decided first after a restart.

use super::blocks::Blocks;
use crate::rng::Rng;
use crate::work::Work;

/// What a search has to say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// It fits so.
    Fits(Vec<u64>),
    /// Nothing of the kind exists.
    Impossible,
    /// Nobody knows: it has done the work that it may do.
    Unknown,
}

/// By what blocks that could come are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Value {
    Long,
    Area,
    Large,
    LongLarge,
}

impl Value {
    pub(super) const ALL: [Value; 4] = [Value::Long, Value::Area, Value::LongLarge, Value::Large];
}

/// Which section is decided next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// The one whose floor is lowest, and then the one with the least slack.
    Lowest,
    /// The one with the fewest choices, of those that nothing can yet come below.
    Fewest,
}

/// How a search goes about it. None is the best for all problems, and each finds in milliseconds what takes another hours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    pub(super) next: Next,
    /// Blocks are tried before they are chosen: what cannot be is left out, and what wastes least comes first.
    pub(super) looks_ahead: bool,
    pub(super) value: Value,
}

const NOT_PLACED: u64 = u64::MAX;
/// So many sections that have something below them are passed before the lowest of all is taken, which never has.
const PASSED_MAX: usize = 16;
/// What waits can rise no further.
const NEVER: u64 = u64::MAX / 4;

/// A change that can be taken back.
enum Change {
    Placed(u32),
    Base(u32, u64),
    Floor(u32, u64, u32),
}

/// A choice, and what is left of it.
struct Choice {
    candidates: Vec<u32>,
    next: usize,
    /// None of them is next, once.
    can_rise: bool,
    section: u32,
    /// Changes before this are of those above.
    changes: usize,
}

/// The search for one set of blocks.
pub(super) struct Search<'a> {
    blocks: &'a Blocks,
    cap: u64,
    /// Blocks that are live together with one.
    beside: Vec<Vec<u32>>,
    /// Blocks that are live in a section.
    crossing: Vec<Vec<u32>>,
    base: Vec<u64>,
    offsets: Vec<u64>,
    /// By section: what waits, and the lowest base of that.
    load: Vec<u64>,
    floor: Vec<u64>,
    /// How many of what waits could begin there.
    count: Vec<u32>,
    changes: Vec<Change>,
    /// How much a section has weighed so far.
    weight: Vec<u32>,
    is_touched: Vec<bool>,
    touched: Vec<u32>,
    scratch: Vec<(u64, u64)>,
    passed: Vec<u32>,
    keys: Vec<u64>,
    rule: Rule,
}

impl<'a> Search<'a> {
    pub(super) fn new(blocks: &'a Blocks, cap: u64) -> Search<'a> {
        let mut crossing = vec![Vec::new(); blocks.sections];
        for (at, block) in blocks.blocks.iter().enumerate() {
            block.sections().for_each(|section| crossing[section].push(at as u32));
        }
        let mut order: Vec<u32> = (0..blocks.blocks.len() as u32).collect();
        order.sort_by_key(|at| blocks.blocks[*at as usize].start);
        let mut beside = vec![Vec::new(); blocks.blocks.len()];
        for (place, one) in order.iter().enumerate() {
            let block = &blocks.blocks[*one as usize];
            for other in &order[place + 1..] {
                if blocks.blocks[*other as usize].start >= block.end {
                    break;
                }
                beside[*one as usize].push(*other);
                beside[*other as usize].push(*one);
            }
        }
        let len = blocks.blocks.len();
        let count = crossing.iter().map(|all| all.len() as u32).collect();
        Search {
            blocks,
            cap,
            beside,
            crossing,
            base: vec![0; len],
            offsets: vec![NOT_PLACED; len],
            load: blocks.loads(),
            floor: vec![0; blocks.sections],
            changes: Vec::new(),
            weight: vec![0; blocks.sections],
            is_touched: vec![false; blocks.sections],
            touched: Vec::new(),
            scratch: Vec::new(),
            passed: Vec::new(),
            count,
            keys: vec![0; len],
            rule: Rule { next: Next::Lowest, looks_ahead: false, value: Value::Long },
        }
    }

    /// Searches from the beginning by this rule, with blocks in another order where there is `noise`, for so many units at most.
    pub(super) fn run(&mut self, rule: Rule, noise: Option<&mut Rng>, units: u64, work: &mut Work) -> Verdict {
        let until = work.done().saturating_add(units);
        self.rule = rule;
        self.set_keys(rule.value, noise);
        self.undo(0);
        let mut choices: Vec<Choice> = Vec::new();
        if self.load.iter().any(|load| *load > self.cap) {
            return Verdict::Impossible;
        }
        loop {
            let Some(section) = self.next_section() else {
                return Verdict::Fits(self.offsets.clone());
            };
            let choice = self.choice(section, work);
            choices.push(choice);
            // The next that holds.
            loop {
                // Also where all that is tried holds: without work left nothing is looked ahead at, and nothing fails.
                if work.done() >= until || work.is_over() {
                    return Verdict::Unknown;
                }
                let Some(choice) = choices.last_mut() else { return Verdict::Impossible };
                let (from, section) = (choice.changes, choice.section);
                let step = if let Some(block) = choice.candidates.get(choice.next) {
                    choice.next += 1;
                    Some(Ok(*block))
                } else if choice.can_rise {
                    choice.can_rise = false;
                    Some(Err(()))
                } else {
                    None
                };
                self.undo(from);
                let holds = match step {
                    None => {
                        choices.pop();
                        continue;
                    }
                    Some(Ok(block)) => self.place(block, work),
                    Some(Err(())) => {
                        let candidates = std::mem::take(&mut choices.last_mut().expect("it is there").candidates);
                        let holds = self.rise(section, work);
                        choices.last_mut().expect("it is there").candidates = candidates;
                        holds
                    }
                };
                if holds {
                    break;
                }
            }
        }
    }

    fn set_keys(&mut self, value: Value, mut noise: Option<&mut Rng>) {
        for (key, block) in self.keys.iter_mut().zip(&self.blocks.blocks) {
            let ticks = f64::from(block.end - block.start);
            let len = block.len as f64;
            let score = match value {
                Value::Long => ticks * 1e6 + len / (self.cap as f64 + 1.0),
                Value::Area => ticks * len,
                Value::LongLarge => ticks * ticks * len,
                Value::Large => len * 1e3 + ticks / (self.blocks.sections as f64 + 1.0),
            };
            let factor = noise.as_mut().map_or(1.0, |rng| 0.6 + rng.below(1000) as f64 / 1000.0);
            *key = (score * factor).min(1e18) as u64;
        }
    }

    fn fewest(&mut self) -> Option<u32> {
        self.passed.clear();
        while self.passed.len() < PASSED_MAX {
            let mut best: Option<(u64, u64, u32)> = None;
            for (section, load) in self.load.iter().enumerate().filter(|(_, load)| **load > 0) {
                let slack = self.cap - self.floor[section] - load;
                let choices = u64::from(self.count[section]) + u64::from(slack > 0);
                let this = (choices * 1024 / (1 + u64::from(self.weight[section])), slack, section as u32);
                if best.is_none_or(|best| this < best) && !self.passed.contains(&(section as u32)) {
                    best = Some(this);
                }
            }
            let (.., section) = best?;
            if self.is_lowest(section) {
                return Some(section);
            }
            self.passed.push(section);
        }
        self.lowest()
    }

    /// Nothing that waits can come below what could begin at the floor of a section.
    fn is_lowest(&self, section: u32) -> bool {
        let floor = self.floor[section as usize];
        let mut could = self.crossing[section as usize]
            .iter()
            .filter(|at| self.offsets[**at as usize] == NOT_PLACED && self.base[**at as usize] == floor);
        could.all(|block| {
            self.beside[*block as usize].iter().all(|other| {
                let o = *other as usize;
                self.offsets[o] != NOT_PLACED || self.base[o] + self.blocks.blocks[o].len > floor
            })
        })
    }

    /// The one that is decided next; nothing where all is placed.
    fn next_section(&mut self) -> Option<u32> {
        match self.rule.next {
            Next::Lowest => self.lowest(),
            Next::Fewest => self.fewest(),
        }
    }

    fn lowest(&self) -> Option<u32> {
        let mut best: Option<(u64, u64, u32)> = None;
        for (section, load) in self.load.iter().enumerate() {
            if *load == 0 {
                continue;
            }
            let floor = self.floor[section];
            if best.is_some_and(|best| floor > best.0) {
                continue;
            }
            let slack = (self.cap - floor - load) / (1 + u64::from(self.weight[section]));
            let this = (floor, slack, section as u32);
            if best.is_none_or(|best| this < best) {
                best = Some(this);
            }
        }
        best.map(|(.., section)| section)
    }

    /// What the changes since have wasted: of the slack of each section, how large a part.
    fn waste(&self, from: usize) -> u64 {
        let mut waste = 0.0;
        let mut placed = None;
        for change in &self.changes[from..] {
            match change {
                Change::Placed(block) => placed = Some(self.blocks.blocks[*block as usize]),
                Change::Floor(section, before, _) => {
                    let s = *section as usize;
                    let now = self.floor[s];
                    let len = placed.filter(|b| b.sections().contains(&s)).map_or(0, |b| b.len);
                    let lost = (now - before).saturating_sub(len);
                    let left = self.cap - now - self.load[s];
                    waste += lost as f64 / (left + lost + 1) as f64;
                }
                Change::Base(..) => {}
            }
        }
        (waste * 1e6) as u64
    }

    fn choice(&mut self, section: u32, work: &mut Work) -> Choice {
        let floor = self.floor[section as usize];
        let could = |at: &u32| self.offsets[*at as usize] == NOT_PLACED && self.base[*at as usize] == floor;
        let mut candidates: Vec<u32> = self.crossing[section as usize].iter().copied().filter(could).collect();
        let of = |at: u32| self.blocks.blocks[at as usize];
        candidates.sort_by_key(|at| {
            let block = of(*at);
            (std::cmp::Reverse(self.keys[*at as usize]), block.start, block.end, block.len, *at)
        });
        // Which of two that are alike comes first is all the same.
        let mut known = std::collections::HashSet::new();
        candidates.retain(|at| known.insert(of(*at)));
        if self.rule.looks_ahead && candidates.len() > 1 {
            let from = self.changes.len();
            let mut scored: Vec<(u64, u32)> = Vec::new();
            for block in candidates {
                if !work.is_over() && self.place(block, work) {
                    scored.push((self.waste(from), block));
                }
                self.undo(from);
            }
            scored.sort_by_key(|(waste, _)| *waste);
            candidates = scored.into_iter().map(|(_, block)| block).collect();
        }
        let slack = self.cap - floor - self.load[section as usize];
        Choice { candidates, next: 0, can_rise: slack > 0, section, changes: self.changes.len() }
    }

    fn undo(&mut self, to: usize) {
        while self.changes.len() > to {
            match self.changes.pop().expect("there are more") {
                Change::Base(block, base) => self.base[block as usize] = base,
                Change::Floor(section, floor, count) => {
                    (self.floor[section as usize], self.count[section as usize]) = (floor, count);
                }
                Change::Placed(block) => {
                    self.offsets[block as usize] = NOT_PLACED;
                    let of = self.blocks.blocks[block as usize];
                    of.sections().for_each(|section| self.load[section] += of.len);
                }
            }
        }
    }

    fn touch(&mut self, block: u32) {
        for section in self.blocks.blocks[block as usize].sections() {
            if !self.is_touched[section] {
                self.is_touched[section] = true;
                self.touched.push(section as u32);
            }
        }
    }

    fn place(&mut self, block: u32, work: &mut Work) -> bool {
        let of = self.blocks.blocks[block as usize];
        let offset = self.base[block as usize];
        self.offsets[block as usize] = offset;
        self.changes.push(Change::Placed(block));
        of.sections().for_each(|section| self.load[section] -= of.len);
        self.touch(block);
        let top = offset + of.len;
        for n in 0..self.beside[block as usize].len() {
            let other = self.beside[block as usize][n];
            if self.offsets[other as usize] == NOT_PLACED && self.base[other as usize] < top {
                self.changes.push(Change::Base(other, self.base[other as usize]));
                self.base[other as usize] = top;
                self.touch(other);
            }
        }
        self.hold(work)
    }

    /// None of those that could begin at the floor of a section does.
    fn rise(&mut self, section: u32, work: &mut Work) -> bool {
        let floor = self.floor[section as usize];
        for n in 0..self.crossing[section as usize].len() {
            let block = self.crossing[section as usize][n];
            if self.offsets[block as usize] != NOT_PLACED || self.base[block as usize] != floor {
                continue;
            }
            let waits = |other: &&u32| self.offsets[**other as usize] == NOT_PLACED;
            let tops = self.beside[block as usize].iter().filter(waits);
            let next = tops.map(|other| self.base[*other as usize] + self.blocks.blocks[*other as usize].len);
            let next = next.min().unwrap_or(NEVER);
            self.changes.push(Change::Base(block, floor));
            self.base[block as usize] = next;
            self.touch(block);
        }
        self.hold(work)
    }

    /// Whether what waits can yet fit, as far as each section that has changed tells by itself.
    fn hold(&mut self, work: &mut Work) -> bool {
        let mut failed = None;
        let mut looked = 0;
        while let Some(section) = self.touched.pop() {
            self.is_touched[section as usize] = false;
            if failed.is_some() || self.load[section as usize] == 0 {
                continue;
            }
            self.scratch.clear();
            for block in &self.crossing[section as usize] {
                if self.offsets[*block as usize] == NOT_PLACED {
                    self.scratch.push((self.base[*block as usize], self.blocks.blocks[*block as usize].len));
                }
            }
            looked += self.scratch.len() as u64;
            self.scratch.sort_unstable_by_key(|(base, _)| std::cmp::Reverse(*base));
            let mut above = 0;
            for (base, len) in &self.scratch {
                above += len;
                if base + above > self.cap {
                    failed = Some(section);
                    break;
                }
            }
            let floor = self.scratch.last().map_or(0, |(base, _)| *base);
            let count = self.scratch.iter().rev().take_while(|(base, _)| *base == floor).count() as u32;
            let at = section as usize;
            if failed.is_none() && (floor, count) != (self.floor[at], self.count[at]) {
                self.changes.push(Change::Floor(section, self.floor[at], self.count[at]));
                (self.floor[at], self.count[at]) = (floor, count);
            }
        }
        work.take(1 + looked / 16);
        if let Some(section) = failed {
            self.weight[section as usize] = self.weight[section as usize].saturating_add(1);
        }
        failed.is_none()
    }
}
