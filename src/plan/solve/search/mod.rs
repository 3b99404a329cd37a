//! Looking for a stacking that meets the bound: many passes with other keys, and a search that can prove that there is none.
//!
//! A unit of work is an eighth of a step of a pass, or a look at sixteen blocks of a section: a seventh of a microsecond or so.

mod blocks;
mod dive;
mod exact;
mod load_tree;
mod waiting;

use blocks::Blocks;
use dive::Stopped;
use exact::{Next, Rule, Search, Value, Verdict};

use crate::rng::Rng;
use crate::units::Lifetime;
use crate::work::Work;

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    /// The lowest stacking that was found, if one was below the limit.
    pub(super) found: Option<Found>,
    /// No stacking ends below this.
    pub(super) low: u64,
}

/// Offsets that were found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    pub(super) offsets: Vec<u64>,
    pub(super) top: u64,
}

/// Blocks of a group that are searched exactly, and pairs of them that are live together.
const EXACT_MAX: usize = 4_096;
const PAIRS_MAX: u64 = 1 << 21;
/// Passes before anything else is tried.
const KEYS_TRIED: usize = 8;
/// Units in which the bound is met, if it is at all, but for luck: half of what there is, and no more than this or one part in 32 of it.
const AT_BOUND: u64 = 1 << 22;
/// Units of the first search at a height between: what is found at all is mostly found in the larger.
const CLOSE_IN: u64 = 1 << 20;
const CLOSE_IN_MAX: u64 = 1 << 24;
/// Units of the first turn of each.
const SLICE: u64 = 1 << 15;
/// Seeds that are neighbours are far from each other.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The lowest stacking below `limit` that some passes find.
pub(super) fn dive(lifetimes: &[Lifetime], lens: &[u64], limit: u64, work: &mut Work) -> Answer {
    find(lifetimes, lens, limit, 0, work, |_, _| {})
}

/// A stacking that ends at `bound`, with some blocks as low as can be: those come before all others wherever they fit. Nothing where a few passes find none.
pub(super) fn some_first(
    lifetimes: &[Lifetime],
    lens: &[u64],
    is_first: &[bool],
    bound: u64,
    work: &mut Work,
) -> Option<Vec<u64>> {
    const FIRST: u64 = 1 << 60;
    let blocks = Blocks::of(lifetimes, lens);
    let of = |value: Value| {
        let mut keys = keys(&blocks, value);
        keys.iter_mut().zip(is_first).filter(|(_, is_first)| **is_first).for_each(|(key, _)| *key += FIRST);
        dive::dive(&blocks, &keys, bound, bound + 1, work).ok()
    };
    Value::ALL.into_iter().find_map(of)
}

/// A stacking that ends at `bound` or below. Nobody is told of it: it is a part of another.
pub(super) fn within(lifetimes: &[Lifetime], lens: &[u64], bound: u64, work: &mut Work) -> Option<Vec<u64>> {
    let blocks = Blocks::of(lifetimes, lens);
    let mut group = Group::of(&blocks, bound, bound + 1, 0, work.seed());
    group.dive(work, KEYS_TRIED);
    group.find(work);
    group.best.map(|best| best.offsets)
}

/// The lowest stacking below `limit` that the work finds. Two look for it at the same time, each with a luck of its own.
pub(super) fn search(lifetimes: &[Lifetime], lens: &[u64], limit: u64, work: &mut Work) -> Answer {
    let answers = work.race(|lane, work| {
        let answer = find(lifetimes, lens, limit, lane, work, |group, work| group.find(work));
        let is_in = answer.found.as_ref().map_or(limit, |found| found.top) <= answer.low;
        (answer, is_in)
    });
    let low = answers.iter().map(|answer| answer.low).max().unwrap_or(0);
    let found = answers.into_iter().filter_map(|answer| answer.found);
    Answer { low, found: found.reduce(|one, other| if other.top < one.top { other } else { one }) }
}

fn find(
    lifetimes: &[Lifetime],
    lens: &[u64],
    limit: u64,
    lane: usize,
    work: &mut Work,
    how: impl Fn(&mut Group<'_>, &mut Work),
) -> Answer {
    // Sums have room for signs.
    let sum = lens.iter().try_fold(0_u64, |sum, len| sum.checked_add(*len));
    if lens.is_empty() || sum.is_none_or(|sum| sum > u64::MAX / 8) {
        return Answer { found: None, low: 0 };
    }
    let all = Blocks::of(lifetimes, lens);
    // Those that are live most first: what they need is allowed to all.
    let mut parts: Vec<(u64, Vec<usize>, Blocks)> = all
        .groups()
        .into_iter()
        .map(|members| {
            let blocks = all.only(&members);
            (blocks.loads().into_iter().max().unwrap_or(0), members, blocks)
        })
        .collect();
    parts.sort_by_key(|(load, ..)| std::cmp::Reverse(*load));
    let low = parts.first().map_or(0, |(load, ..)| *load);
    // All have had their passes before one is searched, which may take what work there is.
    let (mut groups, mut top) = (Vec::new(), low);
    for (load, members, blocks) in &parts {
        let mut group = Group::of(blocks, (*load).max(top), limit, lane, work.seed());
        group.is_all = parts.len() == 1;
        group.dive(work, KEYS_TRIED);
        top = group.best.as_ref().map_or(top, |best| top.max(best.top));
        groups.push((group, *load, members));
    }
    // The one that is highest decides, or has no answer yet: it is searched, and again as long as it is. Half of the work each time is for those that are highest then.
    loop {
        groups.sort_by_key(|(group, ..)| std::cmp::Reverse(group.top()));
        let is_other_open = groups.iter().skip(1).any(|(group, ..)| group.top() > low);
        let Some((group, load, _)) = groups.first_mut() else { break };
        group.aim_at((*load).max(low));
        if group.is_over(work) {
            break;
        }
        let before = work.done();
        match work.left() {
            left @ SLICE.. if is_other_open => work.with(left / 2, |work| how(group, work)),
            _ => how(group, work),
        }
        // Whoever searches does some work.
        if work.done() == before {
            break;
        }
    }
    let least = low;
    let (mut offsets, mut top, mut low) = (vec![0; lens.len()], least, least);
    for (group, load, members) in groups {
        // What a group is allowed because of another is no bound.
        low = low.max(if group.bound == load.max(least) { group.low } else { 0 });
        let Some(one) = group.best else { return Answer { found: None, low } };
        members.iter().zip(&one.offsets).for_each(|(at, offset)| offsets[*at] = *offset);
        top = top.max(one.top);
    }
    Answer { found: Some(Found { offsets, top }), low }
}

/// Blocks that share sections, and what is known of them.
struct Group<'a> {
    blocks: &'a Blocks,
    /// As low as is wanted.
    bound: u64,
    /// Only what ends below this is wanted.
    limit: u64,
    best: Option<Found>,
    /// Nothing ends below this.
    low: u64,
    /// Chance for each by itself, so that what one does is not the other's luck.
    of_passes: Rng,
    of_restarts: Rng,
    keys: [Vec<u64>; Value::ALL.len()],
    /// Passes so far.
    dives: usize,
    /// Which of those that race: the first tries everything as it is before chance has a say.
    lane: usize,
    /// There is no other group, and what is found for this one is the answer.
    is_all: bool,
}

impl<'a> Group<'a> {
    /// Nothing below `bound` is wanted.
    fn of(blocks: &'a Blocks, bound: u64, limit: u64, lane: usize, seed: u64) -> Group<'a> {
        let luck = blocks.blocks.len() as u64 ^ seed.wrapping_mul(SPREAD);
        Group {
            blocks,
            bound,
            limit,
            best: None,
            low: bound,
            of_passes: Rng::new(luck),
            of_restarts: Rng::new(!luck),
            keys: Value::ALL.map(|value| keys(blocks, value)),
            dives: if lane == 0 { 0 } else { Value::ALL.len() },
            lane,
            is_all: false,
        }
    }

    /// What is looked for ends below this.
    fn top(&self) -> u64 {
        self.best.as_ref().map_or(self.limit, |best| best.top)
    }

    fn is_over(&self, work: &Work) -> bool {
        self.top() <= self.low || work.is_over()
    }

    fn keep(&mut self, offsets: Vec<u64>, work: &Work) {
        let top = self.blocks.top(&offsets);
        if top < self.top() {
            if self.is_all {
                work.tell(top);
            }
            self.best = Some(Found { top, offsets });
        }
    }

    /// Nothing below this is wanted from now on.
    fn aim_at(&mut self, bound: u64) {
        if self.bound != bound {
            (self.bound, self.low) = (bound, bound);
        }
    }

    /// Passes and the search take turns, each longer than the last: what one finds at once may take the other for ever.
    fn find(&mut self, work: &mut Work) {
        if self.is_over(work) {
            return;
        }
        let is_small = self.blocks.blocks.len() <= EXACT_MAX && self.blocks.pairs() <= PAIRS_MAX;
        let mut at_bound = is_small.then(|| Restarts::at(self.blocks, self.bound, Begin::of_lane(self.lane)));
        let until = work.left() - (work.left() / 2).min(AT_BOUND.max(work.left() / 32));
        let mut slice = SLICE;
        while !self.is_over(work) && work.left() > until {
            if !at_bound.as_ref().is_some_and(|search| search.is_tight) {
                // Passes are the smaller part: what they find at all, they mostly find at once.
                work.with(slice / 4, |share| self.dive(share, usize::MAX));
            }
            self.search_at_bound(&mut at_bound, slice, work);
            slice *= 2;
        }
        // Then also between what nothing is below and what is known.
        while is_small && !self.is_over(work) {
            work.with((work.left() / 2).max(SLICE), |share| self.close_in(share));
            self.search_at_bound(&mut at_bound, work.left() / 16, work);
            work.with((work.left() / 32).max(SLICE), |share| self.dive(share, usize::MAX));
        }
        self.dive(work, usize::MAX);
    }

    /// Goes on with the search at the bound, if there is one yet.
    fn search_at_bound(&mut self, at_bound: &mut Option<Restarts<'_>>, units: u64, work: &mut Work) {
        if let Some(restarts) = at_bound.as_mut().filter(|_| !self.is_over(work)) {
            let verdict = restarts.go_on(&mut self.of_restarts, units, work);
            if self.take(self.bound, verdict, work) {
                *at_bound = None;
            }
        }
    }

    /// So many passes at most, each with other keys than those before.
    fn dive(&mut self, work: &mut Work, passes: usize) {
        for _ in 0..passes {
            if self.is_over(work) {
                return;
            }
            let base = &self.keys[self.dives % Value::ALL.len()];
            let (spread, share) =
                ([20, 100, 300, 600][self.of_passes.index(4)], [20, 100, 500, 1000][self.of_passes.index(4)]);
            let rng = &mut self.of_passes;
            let mut vary = |key: &u64| {
                if rng.chance(share) { key / 1000 * (1000 - spread + rng.below(2 * spread)) + 1 } else { *key }
            };
            let varied: Vec<u64>;
            let keys = if self.dives < Value::ALL.len() {
                base
            } else {
                varied = base.iter().map(&mut vary).collect();
                &varied
            };
            self.dives += 1;
            match dive::dive(self.blocks, keys, self.bound, self.top(), work) {
                Ok(offsets) => self.keep(offsets, work),
                Err(Stopped::TooHigh) => {}
                Err(Stopped::OutOfWork) => return,
            }
        }
    }

    /// Halves what is between what was too low in so much time and what was found, again and again, each time with more time for each.
    fn close_in(&mut self, work: &mut Work) {
        let mut slice = (work.left() / 4).clamp(CLOSE_IN, CLOSE_IN_MAX);
        while !self.is_over(work) {
            let mut too_low = self.low.saturating_sub(1);
            while !self.is_over(work) && too_low + 1 < self.top() {
                let cap = too_low + (self.top() - too_low) / 2;
                let mut restarts = Restarts::at(self.blocks, cap, Begin::Shuffled);
                let verdict = work.with(slice, |share| restarts.go_on(&mut self.of_restarts, u64::MAX, share));
                if verdict == Verdict::Unknown {
                    too_low = cap;
                }
                self.take(cap, verdict, work);
                too_low = too_low.max(self.low.saturating_sub(1));
                // What little is left is for when there is more time.
                if (self.top() - too_low) * 16 < self.top() - self.low {
                    break;
                }
            }
            slice *= 2;
        }
    }

    /// Hears what a search below `cap` has said; says whether that is all there is to say.
    fn take(&mut self, cap: u64, verdict: Verdict, work: &Work) -> bool {
        match verdict {
            Verdict::Fits(offsets) => self.keep(offsets, work),
            Verdict::Impossible => self.low = self.low.max(cap + 1),
            Verdict::Unknown => return false,
        }
        true
    }
}

/// A search that begins again and again, by other rules, and each time works longer before it does.
struct Restarts<'a> {
    search: Search<'a>,
    turn: usize,
    /// Nothing may be wasted anywhere.
    is_tight: bool,
    is_backwards: bool,
}

/// With what it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Begin {
    /// Blocks as they are, by all rules.
    Plain,
    /// The same from the last rule to the first: of two that race one finds at once what the other comes to late.
    Backwards,
    /// Other orders of blocks.
    Shuffled,
}

impl Begin {
    fn of_lane(lane: usize) -> Begin {
        if lane == 0 { Begin::Plain } else { Begin::Backwards }
    }
}

/// Rules of a search, from the one that costs least.
const RULES: [(Next, bool); 4] =
    [(Next::Lowest, false), (Next::Fewest, false), (Next::Lowest, true), (Next::Fewest, true)];
/// Those where every section is full: there is little to choose, and what is decided from the floor up shows soon whether it was right.
const TIGHT: [(Next, bool); 1] = [(Next::Lowest, false)];

impl<'a> Restarts<'a> {
    fn at(blocks: &'a Blocks, cap: u64, begin: Begin) -> Restarts<'a> {
        let is_tight = blocks.loads().iter().all(|load| *load == cap);
        // Those where nothing may be wasted have few rules to go through backwards.
        let is_backwards = begin == Begin::Backwards && !is_tight;
        let turn = if begin == Begin::Plain || is_backwards { 0 } else { 2 * RULES.len() * Value::ALL.len() };
        Restarts { search: Search::new(blocks, cap), turn, is_tight, is_backwards }
    }

    /// Until so many units are done, and then to where it begins again.
    fn go_on(&mut self, rng: &mut Rng, units: u64, work: &mut Work) -> Verdict {
        let until = work.done().saturating_add(units);
        while !work.is_over() && work.done() < until {
            let (rules, first, longer): (&[(Next, bool)], u64, u32) =
                if self.is_tight { (&TIGHT, 200_000, 3) } else { (&RULES, 40_000, 2) };
            let tries = rules.len() * Value::ALL.len();
            let (round, at) = (self.turn / tries, self.turn % tries);
            let at = if self.is_backwards { tries - 1 - at } else { at };
            let (next, looks_ahead) = rules[at % rules.len()];
            let rule = Rule { next, looks_ahead, value: Value::ALL[at / rules.len()] };
            self.turn += 1;
            // As they are, and then in other orders.
            let noise = (round > usize::from(self.is_tight)).then_some(&mut *rng);
            let turns =
                if self.is_tight { round.min(10) as u32 } else { luby(round as u64 + 1).trailing_zeros().min(10) };
            let verdict = self.search.run(rule, noise, first << (longer * turns), work);
            if verdict != Verdict::Unknown {
                return verdict;
            }
        }
        Verdict::Unknown
    }
}

/// The sequence 1, 1, 2, 1, 1, 2, 4, 1 … of Luby, Sinclair and Zuckerman (1993): restarts as good as any for who does not know how long it takes.
fn luby(n: u64) -> u64 {
    let power = 64 - n.leading_zeros();
    if n + 1 == 1 << power { 1 << (power - 1) } else { luby(n + 1 - (1 << (power - 1))) }
}

fn keys(blocks: &Blocks, value: Value) -> Vec<u64> {
    let most = blocks.blocks.iter().map(|block| block.len).max().unwrap_or(1) as f64;
    let key = |block: &blocks::Block| {
        let (ticks, len) = (f64::from(block.end - block.start), block.len as f64 / most);
        let sections = blocks.sections as f64;
        let score = match value {
            Value::Long => ticks / sections + len * 1e-6,
            Value::Area => ticks / sections * len,
            Value::LongLarge => ticks / sections * (ticks / sections) * len,
            Value::Large => len + ticks / sections * 1e-6,
        };
        (score * 1e15) as u64 + 1
    };
    blocks.blocks.iter().map(key).collect()
}

#[cfg(test)]
mod tests;
