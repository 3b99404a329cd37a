//! Looking for a stacking that meets the bound: many passes with other keys, and a search that can prove that there is none.

mod blocks;
mod dive;
mod exact;
mod load_tree;
mod waiting;

use std::rc::Rc;

use blocks::Blocks;
use dive::Stopped;
use exact::{Next, Rule, Search, Value, Verdict};

use crate::rng::Rng;
use crate::units::Lifetime;

/// Units of work that may yet be done: an eighth of a step of a pass, or a look at sixteen blocks of a section, a seventh of a microsecond or so. The same everywhere for the same problem.
#[derive(Clone)]
pub(super) struct Work {
    left: u64,
    done: u64,
    /// Asked now and then: whether it is to end, though there is work left.
    stop: Option<Stop>,
    /// Asked again when so many are done.
    asked_at: u64,
}

/// Whether somebody wants an answer now.
pub(super) type Stop = Rc<dyn Fn() -> bool>;

/// It is asked each time that so many units are done.
const ASKED_EVERY: u64 = 1 << 16;

impl Work {
    pub(super) fn of(units: u64, stop: Option<Stop>) -> Work {
        Work { left: units, done: 0, stop, asked_at: ASKED_EVERY }
    }

    /// Does so much of it; says whether there was as much.
    fn take(&mut self, units: u64) -> bool {
        self.done += units;
        let is_there = self.left >= units;
        self.left = self.left.saturating_sub(units);
        if self.done >= self.asked_at {
            self.asked_at = self.done + ASKED_EVERY;
            if self.stop.as_ref().is_some_and(|stop| stop()) {
                self.left = 0;
            }
        }
        is_there
    }

    pub(super) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Does something with so much of it at most.
    fn with<T>(&mut self, units: u64, does: impl FnOnce(&mut Work) -> T) -> T {
        let mut part = Work::of(units.min(self.left), self.stop.clone());
        let answer = does(&mut part);
        self.take(part.done);
        if part.stop.as_ref().is_some_and(|stop| part.left == 0 && stop()) {
            self.left = 0;
        }
        answer
    }

    pub(super) fn done(&self) -> u64 {
        self.done
    }
}

/// Offsets that were found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    pub(super) offsets: Vec<u64>,
    pub(super) top: u64,
    /// No others end lower.
    pub(super) is_best: bool,
}

/// Blocks of a group that are searched exactly, and pairs of them that are live together.
const EXACT_MAX: usize = 4_096;
const PAIRS_MAX: u64 = 1 << 21;
/// Passes before anything else is tried.
const KEYS_TRIED: usize = 8;
/// Units in which the bound is met, if it is at all, but for luck: half of what there is, and no more than this or an eighth of it.
const AT_BOUND: u64 = 1 << 22;
/// Units of the first search at a height between.
const CLOSE_IN: u64 = 1 << 21;
/// Units of the first turn of each.
const SLICE: u64 = 1 << 15;

/// The lowest stacking below `limit` that some passes find, or nothing.
pub(super) fn dive(lifetimes: &[Lifetime], lens: &[u64], limit: u64, work: &mut Work) -> Option<Found> {
    find(lifetimes, lens, limit, work, |group, work| group.dive(work, KEYS_TRIED))
}

/// The lowest stacking below `limit` that the work finds; nothing if none does.
pub(super) fn search(lifetimes: &[Lifetime], lens: &[u64], limit: u64, work: &mut Work) -> Option<Found> {
    find(lifetimes, lens, limit, work, |group, work| group.find(work))
}

fn find(
    lifetimes: &[Lifetime],
    lens: &[u64],
    limit: u64,
    work: &mut Work,
    how: impl Fn(&mut Group<'_>, &mut Work),
) -> Option<Found> {
    if lens.is_empty() {
        return None;
    }
    // Sums have room for signs.
    if lens.iter().try_fold(0_u64, |sum, len| sum.checked_add(*len)).is_none_or(|sum| sum > u64::MAX / 8) {
        return None;
    }
    let all = Blocks::of(lifetimes, lens);
    let bound = all.loads().into_iter().max().unwrap_or(0);
    let mut found = Found { offsets: vec![0; lens.len()], top: bound, is_best: true };
    // Those that are live most first: what they need is allowed to all.
    let mut groups: Vec<(u64, Vec<usize>, Blocks)> = all
        .groups()
        .into_iter()
        .map(|members| {
            let blocks = all.only(&members);
            (blocks.loads().into_iter().max().unwrap_or(0), members, blocks)
        })
        .collect();
    groups.sort_by_key(|(load, ..)| std::cmp::Reverse(*load));
    for (load, members, blocks) in groups {
        let one = of_group(&blocks, found.top.max(load), limit, work, &how)?;
        members.iter().zip(&one.offsets).for_each(|(at, offset)| found.offsets[*at] = *offset);
        if one.top > found.top {
            (found.top, found.is_best) = (one.top, one.is_best);
        }
    }
    Some(found)
}

/// The lowest for one group, of which nothing below `bound` is wanted.
fn of_group(
    blocks: &Blocks,
    bound: u64,
    limit: u64,
    work: &mut Work,
    how: &impl Fn(&mut Group<'_>, &mut Work),
) -> Option<Found> {
    let mut group = Group {
        blocks,
        bound,
        limit,
        best: None,
        low: bound,
        of_passes: Rng::new(blocks.blocks.len() as u64),
        of_restarts: Rng::new(!(blocks.blocks.len() as u64)),
        keys: Value::ALL.map(|value| keys(blocks, value)),
        dives: 0,
    };
    how(&mut group, work);
    group.best
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
}

impl Group<'_> {
    /// What is looked for ends below this.
    fn top(&self) -> u64 {
        self.best.as_ref().map_or(self.limit, |best| best.top)
    }

    fn is_over(&self, work: &Work) -> bool {
        self.top() <= self.low || work.is_done()
    }

    fn keep(&mut self, offsets: Vec<u64>) {
        let top = self.blocks.top(&offsets);
        if top < self.top() {
            self.best = Some(Found { top, offsets, is_best: top <= self.low });
        }
    }

    /// Passes and the search take turns, each longer than the last: what one finds at once may take the other for ever.
    fn find(&mut self, work: &mut Work) {
        self.dive(work, KEYS_TRIED);
        if self.is_over(work) {
            return;
        }
        let is_small = self.blocks.blocks.len() <= EXACT_MAX && self.blocks.pairs() <= PAIRS_MAX;
        let mut at_bound = is_small.then(|| Restarts::at(self.blocks, self.bound));
        let until = work.left - (work.left / 2).min(AT_BOUND.max(work.left / 8));
        let mut slice = SLICE;
        while !self.is_over(work) && work.left > until {
            if !at_bound.as_ref().is_some_and(|search| search.is_tight) {
                // Passes are the smaller part: what they find at all, they mostly find at once.
                work.with(slice / 4, |share| self.dive(share, usize::MAX));
            }
            self.search_at_bound(&mut at_bound, slice, work);
            slice *= 2;
        }
        // Then also between what nothing is below and what is known.
        while is_small && !self.is_over(work) {
            work.with((work.left / 4).max(SLICE), |share| self.close_in(share));
            self.search_at_bound(&mut at_bound, work.left / 16, work);
            work.with((work.left / 32).max(SLICE), |share| self.dive(share, usize::MAX));
        }
        self.dive(work, usize::MAX);
    }

    /// Goes on with the search at the bound, if there is one yet.
    fn search_at_bound(&mut self, at_bound: &mut Option<Restarts<'_>>, units: u64, work: &mut Work) {
        if let Some(restarts) = at_bound.as_mut().filter(|_| !self.is_over(work)) {
            let verdict = restarts.go_on(&mut self.of_restarts, units, work);
            if self.take(self.bound, verdict) {
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
                Ok(offsets) => self.keep(offsets),
                Err(Stopped::TooHigh) => {}
                Err(Stopped::OutOfWork) => return,
            }
        }
    }

    /// Halves what is between what was too low in so much time and what was found, again and again, each time with more time for each.
    fn close_in(&mut self, work: &mut Work) {
        let mut slice = CLOSE_IN;
        while !self.is_over(work) {
            let mut too_low = self.low.saturating_sub(1);
            while !self.is_over(work) && too_low + 1 < self.top() {
                let cap = too_low + (self.top() - too_low) / 2;
                let mut restarts = Restarts::shuffled_at(self.blocks, cap);
                let verdict = work.with(slice, |share| restarts.go_on(&mut self.of_restarts, u64::MAX, share));
                if verdict == Verdict::Unknown {
                    too_low = cap;
                }
                self.take(cap, verdict);
                too_low = too_low.max(self.low.saturating_sub(1));
                // What little is left is for when there is more time.
                if (self.top() - too_low) * 256 < self.top() - self.low {
                    break;
                }
            }
            slice *= 2;
        }
    }

    /// Hears what a search below `cap` has said; says whether that is all there is to say.
    fn take(&mut self, cap: u64, verdict: Verdict) -> bool {
        match verdict {
            Verdict::Fits(offsets) => self.keep(offsets),
            Verdict::Impossible => {
                self.low = self.low.max(cap + 1);
                if let Some(best) = self.best.as_mut().filter(|best| best.top <= self.low) {
                    best.is_best = true;
                }
            }
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
}

/// Rules of a search, from the one that costs least.
const RULES: [(Next, bool); 4] =
    [(Next::Lowest, false), (Next::Fewest, false), (Next::Lowest, true), (Next::Fewest, true)];
/// Those where every section is full: there is little to choose, and what is decided from the floor up shows soon whether it was right.
const TIGHT: [(Next, bool); 1] = [(Next::Lowest, false)];

impl<'a> Restarts<'a> {
    fn at(blocks: &'a Blocks, cap: u64) -> Restarts<'a> {
        let is_tight = blocks.loads().iter().all(|load| *load == cap);
        Restarts { search: Search::new(blocks, cap), turn: 0, is_tight }
    }

    /// One that does not try blocks as they are first.
    fn shuffled_at(blocks: &'a Blocks, cap: u64) -> Restarts<'a> {
        let restarts = Restarts::at(blocks, cap);
        Restarts { turn: 2 * RULES.len() * Value::ALL.len(), ..restarts }
    }

    /// Until so many units are done, and then to where it begins again.
    fn go_on(&mut self, rng: &mut Rng, units: u64, work: &mut Work) -> Verdict {
        let until = work.done.saturating_add(units);
        while !work.is_done() && work.done < until {
            let (rules, first, longer): (&[(Next, bool)], u64, u32) =
                if self.is_tight { (&TIGHT, 200_000, 3) } else { (&RULES, 40_000, 2) };
            let tries = rules.len() * Value::ALL.len();
            let (round, at) = (self.turn / tries, self.turn % tries);
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
