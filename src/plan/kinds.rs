//! Iterations of another kind than the one that is planned: which of a job's are that, and where they leave its path.
//!
//! One iteration is read beside the cycle. As long as both ask for the same they are on one path. Where they part, the next four requests in a row are looked for that the cycle has somewhere, the nearest place behind first: what the
//! iteration asks for until then, it asks for instead of what the cycle has up to there. What is shorter than [`DETOUR_MIN`] on both sides is a surprise, and no detour: the matcher finds its way back by itself.
//!
//! What is longer than the cycle and comes again and again, as the batches of an evaluation between two steps, is one round of that: a detour to where it begins, taken as often as the job likes.
//!
//! Not for: jobs whose iterations all differ, where nothing says that what differed will come again; where the requests of a detour lie ([`super::detour`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;

use super::Lane;
use super::vary::Asked;
use crate::limits;
use crate::rng::mix;
use crate::units::{Bytes, Lifetime};

/// So many requests that come, or do not, make a detour.
pub(super) const DETOUR_MIN: usize = 16;
/// A detour has no more requests than so many times those of the plan.
const LONGER_MAX: usize = 4;
/// Iterations before the planned one that are looked at.
pub(super) const LOOKED_AT: usize = 32;
/// Kinds that a plan has.
pub(super) const KINDS_MAX: usize = 8;
/// An iteration is like another if it has this share of that one's requests.
const LIKE_MIN: f64 = 0.9;
/// Requests in a row by which a place of the cycle is known.
const IN_A_ROW: usize = 4;
/// What comes again and again is looked for with so many comparisons for each request.
const LOOKS_PER_REQUEST: usize = 16;

/// An iteration of another kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Kind {
    /// Its length in ticks of its own.
    pub(super) len: u64,
    /// Buffers of the cycle that it asks for, too, by their numbers in the problem, and when they are live there.
    pub(super) kept: Vec<(usize, Lifetime)>,
    pub(super) partings: Vec<Parting>,
    /// It has others, which are too long.
    pub(super) lacks: bool,
}

/// Where it does something else than the cycle.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Parting {
    pub(super) lane: Lane,
    /// The buffer that does not come, by its number in the problem, and the one that comes next; the number of all of them where that is the end of the iteration.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) requests: Vec<Other>,
}

/// A request that the cycle does not have there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Other {
    pub(super) asked: Asked,
    pub(super) len: Bytes,
    /// When it is live, in the iteration's own ticks; nothing where it outlives it.
    pub(super) lifetime: Option<Lifetime>,
}

/// `one` asks for most of what `other` does, in whatever order.
pub(super) fn has_most_of(one: &[Asked], other: &[Asked]) -> bool {
    let mut left: HashMap<Asked, usize> = HashMap::new();
    one.iter().for_each(|asked| *left.entry(*asked).or_default() += 1);
    let is_there = |asked: &&Asked| left.get_mut(*asked).filter(|left| **left > 0).map(|left| *left -= 1).is_some();
    let common = other.iter().filter(is_there).count();
    common as f64 >= LIKE_MIN * other.len() as f64
}

/// A request of an iteration: when it comes, in ticks of that, and when it goes, if it does not outlive it.
pub(super) type Came = (Asked, u64, Option<u64>);

/// What the iterations of a job are read beside.
#[derive(Debug)]
pub(super) struct Cycle {
    lanes: Vec<LaneCycle>,
    /// Buffers of the problem.
    count: usize,
}

#[derive(Debug)]
struct LaneCycle {
    lane: Lane,
    asked: Vec<Asked>,
    /// The buffer that stands for each request, if one does, and the next from there on.
    numbers: Vec<(Option<usize>, usize)>,
}

impl Cycle {
    /// That of these requests, which have the numbers of their buffers, of which there are `count`.
    pub(super) fn of(requests: &[(Asked, Option<usize>)], count: usize) -> Cycle {
        // A lane of which nothing is planned again has no path to leave.
        let planned = requests.iter().filter(|(_, number)| number.is_some());
        let lanes: BTreeSet<Lane> = planned.map(|(asked, _)| asked.lane).collect();
        let lanes = lanes.into_iter().map(|lane| {
            let of_lane = || requests.iter().filter(|(asked, _)| asked.lane == lane);
            let (mut next, mut numbers) = (count, Vec::new());
            for (_, number) in of_lane().collect::<Vec<_>>().into_iter().rev() {
                next = number.unwrap_or(next);
                numbers.push((*number, next));
            }
            numbers.reverse();
            LaneCycle { lane, asked: of_lane().map(|(asked, _)| *asked).collect(), numbers }
        });
        Cycle { lanes: lanes.collect(), count }
    }

    /// What an iteration of `len` ticks that asks for this does else.
    pub(super) fn beside(&self, len: u64, requests: &[Came]) -> Kind {
        let mut kind = Kind { len, ..Kind::default() };
        for LaneCycle { lane, asked: cycle, numbers } in &self.lanes {
            let own: Vec<&Came> = requests.iter().filter(|(asked, ..)| asked.lane == *lane).collect();
            let Paths { together, apart } = paths(cycle, &own.iter().map(|(asked, ..)| *asked).collect::<Vec<_>>());
            let live = |beside: usize| Lifetime::new(own[beside].1, own[beside].2.unwrap_or(len));
            kind.kept.extend(together.iter().filter_map(|(at, beside)| Some((numbers[*at].0?, live(*beside)))));
            let number = |at: usize| numbers.get(at).map_or(self.count, |(_, next)| *next);
            for (from, to, beside) in apart {
                let asked: Vec<Asked> = own[beside.clone()].iter().map(|(asked, ..)| *asked).collect();
                for Part { requests, is_last } in parts(&asked, cycle.len()) {
                    let requests = beside.start + requests.start..beside.start + requests.end;
                    // What is there in the next round, too, is in the way of itself.
                    let over = own.get(requests.end).filter(|_| !is_last).map(|(_, start, _)| *start);
                    let requests = own[requests].iter().filter_map(|(asked, start, end)| {
                        let end = end.filter(|end| over.is_none_or(|over| *end <= over));
                        let lifetime = end.map(|end| Lifetime::new(*start, end));
                        Some(Other { asked: *asked, len: limits::allocation_len(asked.bytes)?, lifetime })
                    });
                    let (from, to) = (number(from), number(if is_last { to } else { from }));
                    kind.partings.push(Parting { lane: *lane, from, to, requests: requests.collect() });
                }
            }
        }
        kind.leave_out(self.count);
        kind
    }

    /// The iterations that do something else, of some whose lengths and requests these are, the latest first.
    pub(super) fn others(&self, iterations: impl Iterator<Item = (u64, Vec<Came>)>) -> Vec<Kind> {
        let mut known = HashSet::new();
        let kinds = iterations.map(|(len, requests)| self.beside(len, &requests));
        let has_news = |kind: &Kind| kind.partings.iter().filter(|parting| known.insert(parting.key())).count() > 0;
        kinds.filter(has_news).take(KINDS_MAX).collect()
    }
}

/// Places of `cycle` and `other` that are on one path, and where they part: from where to where in the cycle, and what of `other` lies between.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct Paths {
    pub(super) together: Vec<(usize, usize)>,
    pub(super) apart: Vec<(usize, usize, Range<usize>)>,
}

/// Reads one iteration beside the cycle.
pub(super) fn paths(cycle: &[Asked], other: &[Asked]) -> Paths {
    let mut found = Paths::default();
    let mut runs: Option<HashMap<u64, Vec<usize>>> = None;
    let (mut at, mut beside) = (0, 0);
    while beside < other.len() {
        if cycle.get(at) == other.get(beside) {
            found.together.push((at, beside));
            (at, beside) = (at + 1, beside + 1);
            continue;
        }
        let runs = runs.get_or_insert_with(|| runs_of(cycle));
        let again = (beside..other.len()).find_map(|begin| Some((nearest(runs, cycle, &other[begin..], at)?, begin)));
        let (to, begin) = again.unwrap_or((cycle.len(), other.len()));
        found.apart.push((at, to, beside..begin));
        (at, beside) = (to, begin);
    }
    if at < cycle.len() {
        found.apart.push((at, cycle.len(), other.len()..other.len()));
    }
    found
}

/// Where runs of [`IN_A_ROW`] begin, by their hashes.
fn runs_of(cycle: &[Asked]) -> HashMap<u64, Vec<usize>> {
    let mut runs: HashMap<u64, Vec<usize>> = HashMap::new();
    cycle.windows(IN_A_ROW).enumerate().for_each(|(at, run)| runs.entry(hash(run)).or_default().push(at));
    runs
}

fn hash(run: &[Asked]) -> u64 {
    run.iter().fold(0, |hash, asked| mix(mix(hash ^ asked.bytes.get()) ^ asked.context.0))
}

/// The place of the cycle from which it asks for what `other` begins with: the next behind `at`, else the last before it.
fn nearest(runs: &HashMap<u64, Vec<usize>>, cycle: &[Asked], other: &[Asked], at: usize) -> Option<usize> {
    let run = other.get(..IN_A_ROW)?;
    let places = runs.get(&hash(run))?;
    let is_it = |place: &&usize| cycle[**place..].starts_with(run);
    let behind = places.partition_point(|place| *place < at);
    places[behind..].iter().find(is_it).or_else(|| places[..behind].iter().rev().find(is_it)).copied()
}

/// A part of what is asked for instead of the cycle's: one behind which the job is where it was, or the last.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    requests: Range<usize>,
    is_last: bool,
}

/// Cuts what is longer than the cycle, of `longest` requests, where it comes again and again: one round of that stands for all.
fn parts(asked: &[Asked], longest: usize) -> Vec<Part> {
    let (mut parts, mut done) = (Vec::new(), 0);
    let mut rounds = (asked.len() > longest).then(|| Rounds::of(asked));
    while asked.len() - done > longest
        && let Some((begin, round, end)) = rounds.as_mut().and_then(|rounds| rounds.next(done))
    {
        let before = Some(done..begin).filter(|before| !before.is_empty());
        let requests = before.into_iter().chain(std::iter::once(begin..begin + round));
        parts.extend(requests.map(|requests| Part { requests, is_last: false }));
        done = end;
    }
    parts.push(Part { requests: done..asked.len(), is_last: true });
    parts
}

/// Looks for what comes at least twice in a row.
struct Rounds<'a> {
    asked: &'a [Asked],
    /// The next place behind each, from which as much is asked for in a row.
    again: Vec<Option<usize>>,
    /// So much is yet looked at.
    looks: usize,
}

impl<'a> Rounds<'a> {
    fn of(asked: &'a [Asked]) -> Rounds<'a> {
        let mut known: HashMap<u64, usize> = HashMap::new();
        let runs = asked.windows(DETOUR_MIN).map(hash).enumerate().rev();
        let mut again: Vec<Option<usize>> = runs.map(|(at, run)| known.insert(run, at)).collect();
        again.reverse();
        Rounds { asked, again, looks: LOOKS_PER_REQUEST * asked.len() }
    }

    /// The first from a place on: where it begins, how long it is, and where it comes no more.
    fn next(&mut self, from: usize) -> Option<(usize, usize, usize)> {
        for begin in from..self.again.len() {
            let mut place = self.again[begin];
            while let Some(again) = place {
                self.looks = self.looks.checked_sub(1)?;
                let round = again - begin;
                let same = self.asked[begin..].iter().zip(&self.asked[again..]).take(self.looks);
                let same = if round < DETOUR_MIN { 0 } else { same.take_while(|(one, again)| one == again).count() };
                self.looks -= same;
                if round >= DETOUR_MIN && same >= round {
                    return Some((begin, round, begin + (same / round + 1) * round));
                }
                place = self.again[again];
            }
        }
        None
    }
}

impl Parting {
    pub(super) fn key(&self) -> PartingKey {
        (self.from, self.to, self.requests.iter().map(|other| other.asked).collect())
    }

    /// The requests that get places. A few between the cycle's own would make it look at every place until they are gone.
    pub(super) fn placed(&self) -> impl Iterator<Item = &Other> {
        let has_places = self.requests.len() >= DETOUR_MIN;
        self.requests.iter().filter(move |of| has_places && of.lifetime.is_some())
    }
}

impl Kind {
    /// Buffers before the cycle are no more.
    pub(super) fn begin_at(&mut self, cycle_start: usize) {
        self.kept.iter_mut().for_each(|(number, _)| *number -= cycle_start);
        for parting in &mut self.partings {
            (parting.from, parting.to) = (parting.from - cycle_start, parting.to - cycle_start);
        }
    }

    /// Leaves out what is too short for a detour and what comes a second time, and what would make it too long for the file of a plan of `count` buffers.
    fn leave_out(&mut self, count: usize) {
        let mut left = LONGER_MAX * count.max(DETOUR_MIN);
        let mut known = HashSet::new();
        let mut lacks = false;
        self.partings.retain(|parting| {
            let over = parting.from.abs_diff(parting.to);
            if over.max(parting.requests.len()) < DETOUR_MIN || !known.insert(parting.key()) {
                return false;
            }
            let rest = left.checked_sub(parting.requests.len());
            lacks |= rest.is_none();
            left = rest.unwrap_or(left);
            rest.is_some()
        });
        self.lacks = lacks;
    }

    /// It leaves the cycle where the other does, and asks for the same instead.
    pub(super) fn is_like(&self, other: &Kind) -> bool {
        self.partings.iter().map(Parting::key).eq(other.partings.iter().map(Parting::key))
    }
}

/// By which two partings are one.
pub(super) type PartingKey = (usize, usize, Vec<Asked>);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StreamId;
    use crate::trace::ContextKey;

    fn asked(sizes: impl IntoIterator<Item = u64>) -> Vec<Asked> {
        let one =
            |bytes| Asked { bytes: Bytes::new(bytes), lane: Lane::on(StreamId::DEFAULT), context: ContextKey::UNKNOWN };
        sizes.into_iter().map(one).collect()
    }

    fn apart(cycle: &[Asked], other: &[Asked]) -> Vec<(usize, usize, Range<usize>)> {
        let found = paths(cycle, other);
        assert!(found.together.iter().all(|(at, beside)| cycle[*at] == other[*beside]));
        // Every request of the other is on one path or the other.
        let own: usize = found.apart.iter().map(|(.., own)| own.len()).sum();
        assert_eq!(found.together.len() + own, other.len());
        found.apart
    }

    #[test]
    fn iterations_of_one_kind_do_not_part() {
        let cycle = asked(1..100);
        assert_eq!(apart(&cycle, &cycle), []);
        assert_eq!(apart(&cycle, &asked(1..50)), [(49, 99, 49..49)]);
        assert_eq!(apart(&cycle, &[]), [(0, 99, 0..0)]);
        assert_eq!(apart(&[], &cycle), [(0, 0, 0..99)]);
    }

    #[test]
    fn what_is_left_out_what_comes_instead_and_what_comes_again_are_told() {
        let cycle = asked(1..100);
        // A part of the cycle does not come, as the backward pass of an evaluation.
        assert_eq!(apart(&cycle, &asked((1..40).chain(60..100))), [(39, 59, 39..39)]);
        // Something else comes in its place, as where a batch is larger.
        assert_eq!(apart(&cycle, &asked((1..40).chain(540..560).chain(60..100))), [(39, 59, 39..59)]);
        // One more of the same, as a micro-batch: back to where it began.
        assert_eq!(apart(&cycle, &asked((1..40).chain(20..100))), [(39, 19, 39..39)]);
        // All of it is other.
        assert_eq!(apart(&cycle, &asked(500..600)), [(0, 99, 0..100)]);
        // Less than four in a row are chance.
        assert_eq!(apart(&cycle, &asked((500..550).chain(7..10).chain(550..600))), [(0, 99, 0..103)]);
    }

    /// Where parts begin and end, and which is the last.
    fn cut(sizes: impl IntoIterator<Item = u64>, longest: usize) -> Vec<(usize, usize)> {
        let parts = parts(&asked(sizes), longest);
        let (last, others) = parts.split_last().unwrap();
        assert!(last.is_last && others.iter().all(|part| !part.is_last));
        parts.into_iter().map(|part| (part.requests.start, part.requests.end)).collect()
    }

    #[test]
    fn what_comes_again_and_again_is_one_round_of_it() {
        let round = || 1..41;
        let rounds = |count| (0..count).flat_map(move |_| round());
        assert_eq!(cut(rounds(5), 100), [(0, 40), (200, 200)]);
        // As long as the cycle it may as well be one.
        assert_eq!((cut(rounds(5), 200), cut([], 0)), (vec![(0, 200)], vec![(0, 0)]));
        // Something before, a shorter one behind, and one that is cut.
        let others = (500..520).chain(rounds(4)).chain(600..630);
        assert_eq!(cut(others, 100), [(0, 20), (20, 60), (180, 210)]);
        assert_eq!(cut(rounds(4).chain(1..21), 100), [(0, 40), (160, 180)]);
        // One kind of round behind the other.
        assert_eq!(cut(rounds(4).chain((0..4).flat_map(|_| 70..120)), 100), [(0, 40), (160, 210), (360, 360)]);
        // Of what is short a round is several, and where nothing comes again there is none.
        assert_eq!(cut((0..400).map(|n| n % 10), 100), [(0, 20), (400, 400)]);
        assert_eq!(cut(0..400, 100), [(0, 400)]);
    }

    #[test]
    fn what_asks_for_most_of_another_is_like_it() {
        let cycle = asked(1..101);
        assert!(
            has_most_of(&cycle, &cycle) && has_most_of(&cycle, &asked(50..90)) && has_most_of(&asked(1..95), &cycle)
        );
        assert!(!has_most_of(&asked(1..81), &cycle) && !has_most_of(&[], &cycle));
        // Of one size as many count as both have.
        assert!(!has_most_of(&asked([7; 5]), &asked([7; 10])));
    }
}
