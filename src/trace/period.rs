//! Iterations of a trace that names none: what repeats, and where it begins.
//!
//! The requests of a job are a word over (bytes, stream, device); requests that vary by their own account are left out. Windows of several lengths are hashed, and
//! the distances between one window and its next equal are candidates for the period. A candidate is checked by comparing the word with itself that far on, where a few
//! requests more or fewer shift the comparison. The stretch where most requests agree is what repeats. Everything is linear in the length but for the number of window
//! lengths, which is logarithmic.
//!
//! Not for: jobs whose iterations differ by more than [`SHARE_MIN`], or that repeat in two ways at once: then nothing is found rather than something.

use std::collections::BTreeSet;

use foldhash::{HashMap, HashMapExt as _};

use super::{EventKind, Phase, Trace};
use crate::rng::mix;

/// Share of requests that must be equal one period on.
pub const SHARE_MIN: f64 = 0.95;
/// Shorter periods are loops inside an iteration, not iterations.
const PERIOD_MIN: usize = 8;
/// Candidates of each window length, and those of all that are compared in full.
const CANDIDATES: usize = 4;
const COMPARED: usize = 4;
/// How far requests more or fewer may shift the comparison at one place, and how many must agree for it.
const SHIFT_MAX: usize = 64;
const AGREE: usize = 6;
/// Outside of a stretch, after so many places at which no shift makes them agree, only one in so many
/// places is looked at: where nothing repeats such looks are nearly all the work.
const FRUITLESS: usize = 4096;
const SELDOM: usize = 16;
/// What a request that is not the same takes from a stretch, where each that is gives one: so that it shrinks below a share of 12 in 13, a little less than
/// [`SHARE_MIN`], and a place with many misses does not cut it in two.
const MISS: i64 = 12;
/// Iterations begin with about the same live bytes: at most one part in so many of the peak apart.
const BEGUN_WITH_MAX: i128 = 20;

/// What repeats in a trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Period {
    /// Index of the event with which the first whole iteration begins.
    pub first: usize,
    /// Indices of the events with which iterations begin, the first one included; the last iteration may be cut.
    pub starts: Vec<usize>,
    /// Share of requests that are equal one iteration on.
    pub match_share: f64,
}

/// Where the numbers of iterations come from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Numbering {
    /// The trace has them.
    Column,
    /// Marks between them.
    Marks,
    /// What repeats, with its share of equal requests.
    Period(f64),
    /// Nowhere: all is iteration 0.
    None,
}

/// Numbers the iterations of a trace, if it does not do so itself: by its marks, else by what repeats.
pub fn number(trace: &mut Trace) -> Numbering {
    if trace.iterations() > 1 {
        return Numbering::Column;
    }
    if trace.events.iter().any(|event| event.kind == EventKind::Mark) {
        let mut iteration = 0;
        for event in &mut trace.events {
            event.iteration = iteration;
            iteration += u32::from(event.kind == EventKind::Mark);
        }
        return Numbering::Marks;
    }
    match find_job(trace) {
        Some(period) => {
            assign(trace, &period);
            Numbering::Period(period.match_share)
        }
        None => Numbering::None,
    }
}

/// What repeats, if it is the iterations of a job.
pub fn find_job(trace: &Trace) -> Option<Period> {
    find(trace).filter(|period| is_job(trace, period))
}

/// Whether what repeats is the job, and not a part of its only iteration that repeats there (the layers of a model, the steps of its optimizer): most requests are in it, memory is as full
/// as anywhere, what is taken is given back, and one iteration begins with as much as another. Layers that keep what they made for the backward pass begin with more each time.
fn is_job(trace: &Trace, period: &Period) -> bool {
    let [.., before, last] = period.starts[..] else { return false };
    // The last one may be cut, or followed by what is no iteration.
    let inside = period.first..last + (last - before);
    let mut starts = period.starts.iter().copied().peekable();
    let mut begun_with = Vec::with_capacity(period.starts.len());
    let mut sizes: HashMap<u64, i128> = HashMap::new();
    let (mut live, mut peak, mut peak_inside, mut gives_back) = (0_i128, 0, 0, false);
    let (mut requests, mut requests_inside) = (0_u64, 0_u64);
    for (at, event) in trace.events.iter().enumerate() {
        if starts.next_if_eq(&at).is_some() {
            begun_with.push(live);
        }
        match event.kind {
            EventKind::Alloc => {
                let bytes = i128::from(event.bytes.get());
                sizes.insert(event.id, bytes);
                live += bytes;
                requests += u64::from(event.context.phase != Phase::Init);
                requests_inside += u64::from(inside.contains(&at));
            }
            EventKind::Free => {
                live -= sizes.remove(&event.id).unwrap_or(0);
                gives_back = true;
            }
            _ => continue,
        }
        peak = peak.max(live);
        if inside.contains(&at) {
            peak_inside = peak_inside.max(live);
        }
    }
    // In the first that is found an optimizer may make its state.
    let settled = begun_with.get(usize::from(begun_with.len() > 2)..).unwrap_or_default();
    let (least, most) = settled.iter().fold((i128::MAX, 0), |(least, most), live| (least.min(*live), most.max(*live)));
    let is_level = (most - least) * BEGUN_WITH_MAX <= peak;
    gives_back && is_level && peak_inside * 20 >= peak * 19 && requests_inside * 2 >= requests
}

/// Sets the iteration of every event.
///
/// What comes before the first found iteration is iteration 0, with the first found one too if there is no room for a step before it. Of that, what comes before
/// the step gets the phase [`Phase::Init`] where it has none.
pub fn assign(trace: &mut Trace, period: &Period) {
    let is_request = |event: &super::Event| event.kind == EventKind::Alloc;
    let count = |events: &[super::Event]| events.iter().filter(|event| is_request(event)).count();
    let before = trace.events.get(..period.first).unwrap_or_default();
    let until = period.starts.get(1).copied().unwrap_or(trace.events.len());
    let step = count(trace.events.get(period.first..until).unwrap_or_default());
    // A first step is seldom shorter than the others: it makes what they find.
    let has_step = count(before) >= step;
    let skipped = if has_step { count(before) - step } else { count(before) };
    let (mut requests, mut iteration) = (0, 0);
    let mut starts = period.starts.iter().skip(usize::from(!has_step)).peekable();
    for (at, event) in trace.events.iter_mut().enumerate() {
        if starts.next_if(|start| **start <= at).is_some() {
            iteration += 1;
        }
        event.iteration = iteration;
        requests += usize::from(is_request(event));
        let is_init = at < period.first && requests <= skipped;
        if is_init && event.context.phase == Phase::Other {
            event.context.phase = Phase::Init;
        }
    }
}

/// Finds what repeats; nothing where less than two iterations do, where they differ too much, or where it may be chance.
pub fn find(trace: &Trace) -> Option<Period> {
    let (word, places) = word(trace);
    let mut candidates = candidates(&word);
    candidates.sort_by_cached_key(|period| std::cmp::Reverse((matches_at(&word, *period), std::cmp::Reverse(*period))));
    let enough = pairs_that_are_no_chance(&word);
    // Where requests come and go, two iterations may by chance agree better than one.
    let parts = |period: usize| (1..=4).map(move |part| period.div_ceil(part)).filter(|part| *part >= PERIOD_MIN);
    let periods: BTreeSet<usize> = candidates.into_iter().take(COMPARED).flat_map(parts).collect();
    let found = periods.into_iter().filter_map(|period| Repeat::of(&word, period, enough));
    let found: Vec<Repeat> = found.filter(|repeat| repeat.span() * 5 >= word.len() * 2).collect();
    let most = found.iter().map(Repeat::value).max()?;
    // Twice a period is one, too: the shortest of those that are about as good.
    let is_good = |repeat: &&Repeat| repeat.value() * 20 >= most * 17;
    let best = found.iter().filter(is_good).min_by_key(|repeat| repeat.period)?;
    let begin = best.begin(trace, &places);
    let mut starts = Vec::new();
    let mut next = Some(begin);
    while let Some(at) = next {
        starts.push(*places.get(at)?);
        next = best.next(at);
    }
    let first = *starts.first()?;
    (starts.len() >= 2).then(|| Period { first, starts, match_share: 1.0 - best.misses() })
}

/// How many places in a row agree with others by chance once in a million traces like this one.
fn pairs_that_are_no_chance(word: &[u64]) -> usize {
    let mut counts: HashMap<u64, f64> = HashMap::new();
    word.iter().for_each(|letter| *counts.entry(*letter).or_default() += 1.0);
    let len = word.len() as f64;
    // The bits that one agreement is worth: none where all letters are the same.
    let bits = -counts.values().map(|count| (count / len) * (count / len)).sum::<f64>().log2();
    let needed = (20.0 + 2.0 * len.log2()) / bits.max(1e-9);
    needed.min(1e18) as usize
}

/// The requests that should repeat, and the events that they are.
fn word(trace: &Trace) -> (Vec<u64>, Vec<usize>) {
    let requests = || trace.events.iter().enumerate().filter(|(_, event)| event.kind == EventKind::Alloc);
    let letter = |event: &super::Event| {
        [event.stream.0, u64::from(event.device)].iter().fold(mix(event.bytes.get()), |hash, n| mix(hash ^ n))
    };
    let are_all_dynamic = requests().all(|(_, event)| event.is_dynamic);
    requests().filter(|(_, event)| are_all_dynamic || !event.is_dynamic).map(|(at, event)| (letter(event), at)).unzip()
}

/// Distances that are frequent between windows and their next equals, for windows of every length.
fn candidates(word: &[u64]) -> Vec<usize> {
    let mut found = Vec::new();
    let mut hashes = word.to_vec();
    let mut len = 1;
    // Hashes of windows of twice the length come from those of two halves.
    while len <= word.len() / 2 {
        let mut distances: HashMap<usize, usize> = HashMap::new();
        let mut last: HashMap<u64, usize> = HashMap::with_capacity(hashes.len());
        for (at, hash) in hashes.iter().enumerate() {
            if let Some(before) = last.insert(*hash, at)
                && at - before >= PERIOD_MIN
            {
                *distances.entry(at - before).or_default() += 1;
            }
        }
        if distances.is_empty() {
            // Nor is a longer window there again: its halves would be.
            break;
        }
        let mut distances: Vec<(usize, usize)> =
            distances.into_iter().map(|(distance, count)| (count, distance)).collect();
        distances.sort_unstable_by(|a, b| b.cmp(a));
        found.extend(distances.into_iter().take(CANDIDATES).map(|(_, distance)| distance));
        let halves = hashes.iter().zip(hashes.get(len..).unwrap_or_default());
        hashes = halves.map(|(left, right)| mix(left.rotate_left(1) ^ mix(*right))).collect();
        len *= 2;
    }
    found.sort_unstable();
    found.dedup();
    found.retain(|period| period * 2 <= word.len());
    found
}

/// How many letters are the same so far on, less what the others spoil, in the best stretch: cheap, and blind to shifts.
fn matches_at(word: &[u64], period: usize) -> i64 {
    let (mut best, mut sum) = (0, 0_i64);
    for (left, right) in word.iter().zip(word.get(period..).unwrap_or_default()) {
        sum = (sum + gain(left == right)).max(0);
        best = best.max(sum);
    }
    best
}

/// What one comparison adds to a stretch.
fn gain(is_same: bool) -> i64 {
    if is_same { 1 } else { -MISS }
}

/// A stretch that repeats.
struct Repeat {
    period: usize,
    /// What [`gain`] gives for all its pairs.
    sum: i64,
    /// Pairs of places that are one iteration apart, in order, and whether their letters are the same.
    pairs: Vec<(u32, u32, bool)>,
}

impl Repeat {
    /// Compares the word with itself one period on.
    fn of(word: &[u64], period: usize, enough: usize) -> Option<Repeat> {
        let mut pairs: Vec<(u32, u32, bool)> = Vec::new();
        let (mut left, mut right) = (0, period);
        let (mut sum, mut begin, mut best, mut fruitless) = (0_i64, 0, (0, 0..0), 0_usize);
        while right < word.len() {
            if sum <= 0 {
                // A new stretch, with all shifts undone.
                (sum, begin, right) = (0, pairs.len(), left + period);
            }
            let is_same = word.get(left) == word.get(right);
            let is_seldom = sum == 0 && fruitless >= FRUITLESS;
            let is_looked_at = !is_same && (!is_seldom || left.is_multiple_of(SELDOM));
            fruitless += usize::from(is_looked_at && sum == 0);
            if is_looked_at && let Some((skip_left, skip_right)) = shift(word, left, right, period) {
                if is_seldom {
                    // It may have begun since the last look.
                    (left, fruitless) = (left.saturating_sub(SELDOM - 1), 0);
                    continue;
                }
                // What is only on one side is a miss, and a stretch pays for it with what it has; a new one
                // begins where it likes.
                let paid = sum - MISS * (skip_left + skip_right) as i64;
                if paid > 0 || sum == 0 {
                    fruitless = 0;
                    (sum, left, right) = (paid.max(1), left + skip_left, right + skip_right);
                    continue;
                }
            }
            sum += gain(is_same);
            if sum >= AGREE as i64 {
                fruitless = 0;
            }
            pairs.push((left as u32, right as u32, is_same));
            if sum > best.0 {
                best = (sum, begin..pairs.len());
            }
            left += 1;
            right += 1;
        }
        let repeat = Repeat { period, sum: best.0, pairs: pairs.get(best.1)?.to_vec() };
        // Two iterations at least: as many pairs as one of them has requests.
        let (first, last) = (repeat.pairs.first()?, repeat.pairs.last()?);
        let is_whole = last.0 >= first.1.saturating_sub(1 + period as u32 / 50);
        let is_same_enough = repeat.misses() <= 1.0 - SHARE_MIN && repeat.pairs.len() >= enough;
        (is_whole && is_same_enough).then_some(repeat)
    }

    /// From the first place to the last.
    fn span(&self) -> usize {
        let ends = self.pairs.first().zip(self.pairs.last());
        ends.map_or(0, |((first, ..), (_, last, _))| (last - first) as usize + 1)
    }

    /// How much of the word it explains, less what it does not.
    fn value(&self) -> i64 {
        self.sum + self.period as i64
    }

    /// The share of requests in the stretch that are not the same, or not there, one iteration on.
    fn misses(&self) -> f64 {
        let (Some(first), Some(last)) = (self.pairs.first(), self.pairs.last()) else { return 1.0 };
        let spanned = (last.0 - first.0).max(last.1 - first.1) as f64 + 1.0;
        let same = self.pairs.iter().filter(|(_, _, is_same)| *is_same).count() as f64;
        1.0 - same / spanned
    }

    /// The place one iteration on.
    fn next(&self, place: usize) -> Option<usize> {
        let at = self.pairs.partition_point(|(left, ..)| (*left as usize) < place);
        self.pairs.get(at).map(|(_, right, _)| *right as usize)
    }

    /// Where iterations begin. A stretch that repeats does so from any of its places on; a step begins after the optimizer, if phases are known. If not, the
    /// first place is as good as any: what differs in a first step, it does when the optimizer makes its state.
    fn begin(&self, trace: &Trace, places: &[usize]) -> usize {
        let (from, until) = self.pairs.first().map_or((0, 0), |(left, right, _)| (*left as usize, *right as usize));
        let phase = |at: usize| places.get(at).and_then(|at| trace.events.get(*at)).map(|event| event.context.phase);
        let is_begin = |at: usize| {
            let before = at.checked_sub(1).and_then(phase);
            before == Some(Phase::Optimizer) && phase(at).is_some_and(|phase| phase != Phase::Optimizer)
        };
        (from..until).find(|at| is_begin(*at)).unwrap_or(from)
    }
}

/// How many requests more on either side make the next few agree again; the fewest. None if as many others on both sides do, or if nothing does.
fn shift(word: &[u64], left: usize, right: usize, period: usize) -> Option<(usize, usize)> {
    let agree = |skip_left: usize, skip_right: usize| {
        let (left, right) = (left + skip_left, right + skip_right);
        // All shifts together never take the two sides near each other, or to the next iteration but one.
        let is_near = (right.saturating_sub(left)).abs_diff(period) <= period / 4;
        // One look is enough for nearly all.
        let may_be = is_near && word.get(left) == word.get(right);
        let (left, right) = (word.get(left..left + AGREE), word.get(right..right + AGREE));
        may_be && left.is_some() && left == right
    };
    for by in 1..=SHIFT_MAX.min(period / 4) {
        let found = [(by, by), (0, by), (by, 0)].into_iter().find(|(left, right)| agree(*left, *right));
        if let Some(skips) = found {
            return Some(skips).filter(|(left, right)| left != right);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StreamId;
    use crate::rng::Rng;
    use crate::trace::{Context, Event};
    use crate::units::{Bytes, Tick};

    fn trace(sizes: &[u64]) -> Trace {
        let event = |(at, bytes): (usize, &u64)| Event {
            tick: Tick(at as u64),
            kind: EventKind::Alloc,
            id: at as u64,
            bytes: Bytes::new(*bytes),
            stream: StreamId(0),
            iteration: 0,
            context: Context::default(),
            is_dynamic: false,
            device: 0,
            thread: 0,
        };
        Trace { events: sizes.iter().enumerate().map(event).collect(), modules: vec![String::new()] }
    }

    /// The same with frees: each request but the first `kept` is freed behind the one that comes `after` less one behind it.
    fn given_back(taken: &Trace, kept: usize, after: usize) -> Trace {
        let mut events = Vec::new();
        for (at, event) in taken.events.iter().enumerate() {
            events.push(*event);
            let freed = (at + 1).checked_sub(after).filter(|freed| *freed >= kept);
            let freed = freed.and_then(|freed| taken.events.get(freed));
            events.extend(freed.map(|freed| Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..*freed }));
        }
        Trace { events, ..taken.clone() }
    }

    fn random(rng: &mut Rng, len: usize, kinds: u64) -> Vec<u64> {
        (0..len).map(|_| 512 * (1 + rng.below(kinds))).collect()
    }

    #[test]
    fn a_repeated_step_is_found_behind_any_beginning_and_with_a_cut_end() {
        let mut rng = Rng::new(1);
        for _ in 0..40 {
            let len = 20 + rng.index(400);
            let step = random(&mut rng, len, 12);
            let before = rng.index(len);
            let mut sizes = random(&mut rng, before, 1000);
            let times = 2 + rng.index(4);
            (0..times).for_each(|_| sizes.extend(&step));
            let cut = rng.index(len);
            sizes.extend(&step[..cut]);
            let period = find(&trace(&sizes)).unwrap();
            // What comes before may by chance end as the step does.
            assert!(period.first.abs_diff(before) <= 4, "{} for {before}", period.first);
            assert!(period.starts.windows(2).all(|pair| pair[1] - pair[0] == len), "{:?} for {len}", period.starts);
            let begun = if cut == 0 { times } else { times + 1 };
            assert!(period.starts.len() >= times && period.starts.len() <= begun, "{:?} of {times}", period.starts);
            assert!(period.match_share > 0.999);
        }
    }

    #[test]
    fn inner_loops_are_not_taken_for_iterations() {
        let mut rng = Rng::new(2);
        let (layer, optimizer) = (random(&mut rng, 20, 30), random(&mut rng, 60, 40));
        let step = [layer.repeat(24), optimizer].concat();
        let period = find(&trace(&step.repeat(4))).unwrap();
        assert_eq!(period.starts.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>(), [step.len(); 3]);
    }

    #[test]
    fn a_few_deviating_requests_move_boundaries_with_them() {
        let mut rng = Rng::new(3);
        let step = random(&mut rng, 1000, 50);
        for _ in 0..10 {
            let mut sizes = random(&mut rng, 200, 1000);
            let mut truth = Vec::new();
            for _ in 0..5 {
                truth.push(sizes.len());
                for bytes in &step {
                    match rng.below(300) {
                        0 => {}
                        1 => sizes.extend([7, *bytes]),
                        2 => sizes.push(9),
                        _ => sizes.push(*bytes),
                    }
                }
            }
            let period = find(&trace(&sizes)).unwrap();
            assert_eq!(period.starts.len(), truth.len(), "{:?} for {truth:?}", period.starts);
            // A stretch does not begin with misses.
            let near = period.starts.iter().zip(&truth).all(|(found, truth)| found.abs_diff(*truth) <= 40);
            assert!(near, "{:?} for {truth:?}", period.starts);
        }
    }

    #[test]
    fn nothing_is_found_where_nothing_repeats() {
        let mut rng = Rng::new(4);
        for kinds in [2, 3, 10, 100, 10_000] {
            for _ in 0..20 {
                let len = rng.index(3000);
                let found = find(&trace(&random(&mut rng, len, kinds)));
                assert_eq!(found, None, "{len} of {kinds} kinds");
            }
        }
        let step = random(&mut rng, 500, 40);
        // Once and most of another time is no repetition.
        assert_eq!(find(&trace(&[&step[..], &step[..400]].concat())), None);
        assert_eq!(find(&trace(&[])), None);
    }

    #[test]
    fn what_comes_before_the_first_step_is_initialisation() {
        let mut rng = Rng::new(5);
        let (before, step) = (random(&mut rng, 30, 1000), random(&mut rng, 100, 40));
        let given_back = |sizes: &[u64]| given_back(&trace(sizes), before.len(), 1);
        let mut short = given_back(&[&before[..], &step.repeat(3)].concat());
        assert!(matches!(number(&mut short), Numbering::Period(_)));
        let phases = |trace: &Trace| {
            trace.events.iter().filter(|e| e.kind == EventKind::Alloc && e.context.phase == Phase::Init).count()
        };
        assert_eq!((short.iterations(), phases(&short), short.events[30 + 2 * 99].iteration), (3, 30, 0));
        // A first step that differs is one all the same.
        let first = random(&mut rng, 110, 40);
        let mut long = given_back(&[&before[..], &first, &step.repeat(2)].concat());
        assert!(matches!(number(&mut long), Numbering::Period(_)));
        assert_eq!((long.iterations(), phases(&long), long.events[30 + 2 * 110].iteration), (3, 40, 1));
    }

    #[test]
    fn marks_number_iterations() {
        let mut marked = trace(&[1, 2, 3, 4]);
        marked.events[1].kind = EventKind::Mark;
        assert_eq!(number(&mut marked), Numbering::Marks);
        assert_eq!(marked.events.iter().map(|event| event.iteration).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(number(&mut marked), Numbering::Column);
    }

    #[test]
    fn parts_of_an_only_iteration_that_repeat_are_no_iterations() {
        let layers: Vec<u64> = (0..20_u64).flat_map(|_| (1..30_u64).map(|size| (size * size) << 9)).collect();
        let mut kept = trace(&layers);
        assert!(find(&kept).is_some());
        assert_eq!(number(&mut kept), Numbering::None);
        // Activations are there until the backward pass frees them, the last first.
        let given = kept.events.iter().rev().map(|event| Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..*event });
        let mut forward = Trace { events: kept.events.iter().copied().chain(given).collect(), ..kept.clone() };
        assert_eq!(number(&mut forward), Numbering::None);
        let taken = given_back(&kept, 0, 20);
        assert!(matches!(number(&mut taken.clone()), Numbering::Period(_)));
        // Memory was fuller before it, as in a forward pass before an optimizer.
        let most = Event { id: 1 << 20, bytes: Bytes::gib(1), ..taken.events[0] };
        let over = [most, Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..most }];
        let mut late = Trace { events: [&over[..], &taken.events].concat(), ..taken.clone() };
        assert_eq!(number(&mut late), Numbering::None);
        // Most requests were before it.
        let other: Vec<u64> = (0..700_u64).map(|n| (1 + n * n) << 3).collect();
        let mut other = trace(&other).events;
        other.iter_mut().for_each(|event| event.id += 1 << 20);
        let given = other.iter().map(|event| Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..*event });
        let mut small = Trace { events: [other.clone(), given.collect(), taken.events].concat(), ..late };
        small.events.iter_mut().for_each(|event| event.iteration = 0);
        assert_eq!(number(&mut small), Numbering::None);
    }

    #[cfg(feature = "daemon")]
    #[test]
    fn real_jobs_have_the_iterations_that_their_traces_name() {
        for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "qwen-moe-V-last", "resnet50-olla"] {
            let path = format!("{}/tests/data/{name}.csv.zst", env!("CARGO_MANIFEST_DIR"));
            let real = crate::trace::csv::read_file(path.as_ref()).unwrap();
            let counts = |trace: &Trace| {
                let mut counts = vec![0; trace.iterations() as usize];
                let requests = trace.events.iter().filter(|event| event.kind == EventKind::Alloc);
                requests.for_each(|event| counts[event.iteration as usize] += 1);
                counts
            };
            let mut erased = real.clone();
            erased.events.iter_mut().for_each(|event| event.iteration = 0);
            let Numbering::Period(share) = number(&mut erased) else { panic!("{name} repeats itself") };
            assert_eq!(counts(&erased), counts(&real), "{name}, {share}");
            // Without phases it is unknown where in the circle a step begins, and only the lengths are right.
            for event in &mut erased.events {
                (event.iteration, event.context.phase) = (0, Phase::Other);
            }
            let Numbering::Period(share) = number(&mut erased) else { panic!("{name} repeats itself") };
            let (found, truth) = (counts(&erased), counts(&real));
            println!("{name} {share} {found:?} {truth:?}");
            assert_eq!(found[1], truth[1], "{name}, {share}");
        }
    }
}
