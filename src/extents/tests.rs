//! Random operations, compared with two B-trees after every step, and the edges of both indexes.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::rng::Rng;

/// The first of those that are long enough: its length and its start.
fn best_fit(extents: &Extents, len: u64) -> Option<(u64, u64)> {
    match &extents.by_len {
        Some(bins) => bins.find(len).map(|(_, run)| run),
        None => extents.best_of_few(len),
    }
}

/// The same runs in two trees, as plainly as possible.
#[derive(Default)]
struct Model {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Model {
    fn insert(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u64) -> u64 {
        let len = self.by_start.remove(&start).unwrap();
        self.by_len.remove(&(len, start));
        len
    }

    fn best_fit(&self, len: u64) -> Option<(u64, u64)> {
        self.by_len.range((len, 0)..).next().copied()
    }

    /// The last run that begins at `place` or before.
    fn at_or_before(&self, place: u64) -> Option<(u64, u64)> {
        self.by_start.range(..=place).next_back().map(|(start, len)| (*start, *len))
    }

    fn ending_at(&self, end: u64) -> Option<u64> {
        let (start, len) = self.at_or_before(end.checked_sub(1)?)?;
        (start + len == end).then_some(start)
    }

    fn at_or_after(&self, place: u64) -> Option<(u64, u64)> {
        let around = self.at_or_before(place).filter(|(start, len)| start + len > place);
        around.or_else(|| self.by_start.range(place..).next().map(|(start, len)| (*start, *len)))
    }

    fn take(&mut self, start: u64, wanted: u64) {
        let (from, _) = self.at_or_before(start).unwrap();
        let end = from + self.remove(from);
        if start > from {
            self.insert(from, start - from);
        }
        if end > start + wanted {
            self.insert(start + wanted, end - start - wanted);
        }
    }

    fn give(&mut self, start: u64, len: u64) {
        let (mut from, mut to) = (start, start + len);
        if let Some(before) = self.ending_at(start) {
            self.remove(before);
            from = before;
        }
        if self.by_start.contains_key(&to) {
            to += self.remove(to);
        }
        self.insert(from, to - from);
    }
}

/// Compares every query, those with an argument at `place` and for `len`.
fn compare(extents: &Extents, model: &Model, place: u64, len: u64) {
    extents.invariants().unwrap();
    assert!(extents.iter().eq(model.by_start.iter().map(|(start, len)| (*start, *len))));
    assert_eq!(extents.longest(), model.by_len.last().map_or(0, |(len, _)| *len));
    assert_eq!(extents.last(), model.by_start.last_key_value().map(|(start, len)| (*start, *len)));
    for len in [0, 1, len, extents.longest(), extents.longest() + 1, u64::MAX] {
        assert_eq!(best_fit(extents, len), model.best_fit(len));
        let at_least = model.by_start.iter().map(|(start, has)| (*start, *has)).filter(|(_, has)| *has >= len);
        assert!(extents.at_least(len).eq(at_least), "at least {len}");
    }
    let (start, has) = model.at_or_before(place).unwrap_or((place, len));
    for place in [0, place, start, start + has, start + has / 2, u64::MAX] {
        assert_eq!(extents.ending_at(place), model.ending_at(place));
        assert_eq!(extents.len_at(place), model.by_start.get(&place).copied());
        assert_eq!(extents.at_or_after(place), model.at_or_after(place));
    }
    for (start, len) in [(place, len), (start, has), (start, has + 1), (start + has / 2, has / 2)] {
        let is_covered = model.at_or_before(start).is_some_and(|(from, has)| start + len <= from + has);
        assert_eq!(extents.covers(start, len), is_covered);
    }
}

/// Few lengths are frequent, some are any number up to 2^`bits`.
fn random_len(rng: &mut Rng, bits: u64) -> u64 {
    match rng.below(4) {
        0 => 1,
        1 => 1 << rng.below(bits.min(6)),
        2 => 1 + rng.below(40),
        _ => {
            let bits = rng.below(bits);
            (1 << bits) + rng.below(1 << bits)
        }
    }
}

/// Random changes to runs in `len` from `origin` on. The number of live parts goes up and down.
fn check_random_changes(seed: u64, origin: u64, len: u64, bits: u64, live_max: u64) {
    let mut rng = Rng::new(seed);
    let (mut extents, mut model) = (Extents::default(), Model::default());
    let mut live = Vec::new();
    extents.give(origin, len);
    model.give(origin, len);
    for step in 0..4 * live_max {
        let is_growing = (step / live_max).is_multiple_of(2);
        let wanted = random_len(&mut rng, bits);
        if live.is_empty() || rng.chance(if is_growing { 800 } else { 200 }) {
            let place = origin + rng.below(len);
            let inside = model.at_or_after(place).filter(|(_, has)| *has >= wanted);
            if let Some((start, has)) = inside.filter(|_| rng.chance(600)) {
                let start = start + [0, has - wanted, rng.below(has - wanted + 1)][rng.index(3)];
                extents.take(start, wanted);
                model.take(start, wanted);
                live.push((start, wanted));
            } else {
                let best = model.best_fit(wanted).map(|(_, start)| start);
                assert_eq!(extents.take_best_fit(wanted), best);
                live.extend(best.map(|start| (start, wanted)));
                best.into_iter().for_each(|start| model.take(start, wanted));
            }
        } else {
            let (start, len) = live.swap_remove(rng.index(live.len()));
            extents.give(start, len);
            model.give(start, len);
        }
        compare(&extents, &model, origin + rng.below(len), wanted);
    }
    live.into_iter().for_each(|(start, len)| extents.give(start, len));
    assert!(extents.iter().eq([(origin, len)]));
    extents.take(origin, len);
    assert_eq!((extents.longest(), extents.last(), best_fit(&extents, 0)), (0, None, None));
    extents.invariants().unwrap();
}

#[test]
fn few_runs_match_model() {
    (0..20).for_each(|seed| check_random_changes(seed, 0, 1 << 12, 6, 60));
}

#[test]
fn many_runs_match_model() {
    (0..3).for_each(|seed| check_random_changes(seed, 0, 1 << 20, 12, 1500));
}

#[test]
fn long_runs_at_high_starts_match_model() {
    let origin = (1 << 50) - (1 << 39);
    (0..3).for_each(|seed| check_random_changes(seed, origin, 1 << 50, 40, 800));
}

#[test]
fn equal_runs_match_model() {
    let (mut extents, mut model) = (Extents::default(), Model::default());
    let starts: Vec<u64> = (0..1000).map(|at| at * 977 % 1000 * 3).collect();
    for (at, start) in starts.iter().enumerate() {
        extents.give(*start, 1);
        model.give(*start, 1);
        compare(&extents, &model, starts[at / 2], 1);
    }
    for start in starts {
        extents.take(start, 1);
        model.take(start, 1);
        compare(&extents, &model, start, 1);
    }
}

#[test]
fn lengths_use_all_bits() {
    let mut extents = Extents::default();
    (0..20).for_each(|at| extents.give(at * 2, 1));
    extents.give(100, u64::MAX - 100);
    extents.invariants().unwrap();
    assert_eq!(best_fit(&extents, 2), Some((u64::MAX - 100, 100)));
    assert_eq!(best_fit(&extents, u64::MAX), None);
    assert_eq!(extents.longest(), u64::MAX - 100);
}

#[test]
fn empty_requests_change_nothing() {
    let mut extents = Extents::default();
    extents.give(5, 0);
    assert_eq!((extents.last(), extents.take_best_fit(0)), (None, None));
    extents.give(0, 10);
    extents.take(5, 0);
    assert_eq!(extents.take_best_fit(0), Some(0));
    assert!(extents.iter().eq([(0, 10)]));
    extents.invariants().unwrap();
}

#[test]
#[should_panic(expected = "only what is free is taken")]
fn taking_beyond_a_run_panics() {
    let mut extents = Extents::default();
    extents.give(0, 10);
    extents.take(5, 6);
}

#[test]
fn what_is_cut_leaves_what_is_long_enough() {
    let whole = vec![(0, 10), (20, 30), (40, 50)];
    let after = |from, to, len| {
        let mut room = whole.clone();
        cut(&mut room, from, to, len);
        room
    };
    assert_eq!(after(10, 20, 1), whole);
    assert_eq!(after(3, 5, 2), [(0, 3), (5, 10), (20, 30), (40, 50)]);
    assert_eq!(after(3, 5, 4), [(5, 10), (20, 30), (40, 50)]);
    assert_eq!(after(5, 45, 5), [(0, 5), (45, 50)]);
    assert_eq!(after(5, 45, 6), []);
    assert_eq!(after(0, 60, 1), []);
}
