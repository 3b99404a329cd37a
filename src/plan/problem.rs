//! Which requests of a trace are planned, and when each is live.
//!
//! ## Time
//!
//! A job asks once for what its first iteration needs (the *prologue*) and then, iteration after iteration, for the same things again (the
//! *cycle*). An address that works in every pass works for ever, so the time of a problem is
//!
//! ```text
//!   | prologue (iteration 0) | cycle, first pass | cycle, a later pass |
//!   0                        P                   P+C                   P+2C
//! ```
//!
//! with one tick per event of the trace. What the prologue leaves live reaches into the first pass, or to the end when it is never freed. A
//! request of the cycle is live at the same place in both passes; one that is freed only in the next iteration (a gradient, say) is live
//! from its place in the first pass into the second, and from its place in the second to the end. Later passes look like the
//! second, so nothing is gained by drawing them.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashMap;

use super::kinds::{self, Came, Cycle, Kind};
use super::phases::{PhasePair, Phases};
use super::vary::{self, Asked};
use super::{DynamicEntry, Entry, Lane, Plan, PlanError, race};
use crate::ids::StreamId;
#[cfg(feature = "daemon")]
use crate::lifetimes::Change;
use crate::limits;
#[cfg(feature = "daemon")]
use crate::trace::import::Rows;
use crate::trace::{Context, ContextKey, Cut, Event, EventKind, Phase, Trace};
use crate::units::{Bytes, Lifetime, PlanOffset, PlanSpan, Tick};

/// Requests with their lifetimes, to be given addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Problem {
    /// In the order in which they are asked for.
    pub buffers: Vec<Buffer>,
    /// Buffers before this one belong to the prologue.
    pub cycle_start: usize,
    /// Requests that vary, in the order in which they are asked for, with the buffer that each comes before.
    pub dynamic: Vec<DynamicEntry>,
    /// Those before this one belong to the prologue.
    pub dynamic_cycle_start: usize,
    /// Requests that vary and were left out.
    pub dynamic_requests: u64,
    /// The iteration that repeats.
    pub iteration: u32,
    /// Where that is cut.
    pub cut: Option<Cut>,
    /// Where its first pass ends: what lives on is there when another begins.
    pub pass_end: Tick,
    /// Iterations before it that do something else.
    pub kinds: Vec<Kind>,
    /// Offsets that are not to be had, in ascending order: of what the job has allocated already.
    pub taken: Vec<PlanSpan>,
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// Bytes as asked for.
    pub bytes: Bytes,
    /// Bytes that it occupies.
    pub len: Bytes,
    /// Among whose requests it is.
    pub lane: Lane,
    /// From where in the job it is asked for.
    pub context: ContextKey,
    /// When it is live.
    pub lifetime: Lifetime,
    /// When it is live again.
    pub again: Option<Lifetime>,
    /// In which computation phases it comes and goes.
    pub phases: PhasePair,
}

impl Buffer {
    /// Every stretch of ticks in which it is live.
    pub fn lifetimes(&self) -> impl Iterator<Item = Lifetime> {
        [Some(self.lifetime), self.again].into_iter().flatten()
    }

    pub(super) fn placed_at(&self, offset: PlanOffset) -> Entry {
        let Buffer { bytes, lane, context, lifetime, again, .. } = *self;
        Entry { bytes, offset, lane, context, lifetime, again }
    }
}

/// An allocation of the iterations that are looked at.
struct Allocation {
    bytes: Bytes,
    lane: Lane,
    /// Which thread asked.
    thread: u32,
    context: ContextKey,
    iteration: u32,
    /// Its place among the events of its iteration.
    at: u64,
    /// The iteration of its free and the place there.
    freed: Option<(u32, u64)>,
    /// From where in the job it was freed.
    freed_from: ContextKey,
    is_dynamic: bool,
}

impl Problem {
    /// The requests of the first iteration and of `iteration`, from what the trace says up to the end of `iteration`: what comes later is
    /// not known when a job is planned.
    ///
    /// A request of the cycle that is still live then is taken to be freed where the same request of the iteration before was freed; if that
    /// is not known either, it is left out, as a varying one.
    pub fn from_trace(trace: &Trace, iteration: u32) -> Result<Problem, PlanError> {
        Problem::of(trace, iteration, None)
    }

    /// The requests of the first iteration and of one that is cut, as far as it goes. What lives at the cut, and nobody knows how long it would have, lives on.
    pub fn from_cut(trace: &Trace, cut: Cut) -> Result<Problem, PlanError> {
        Problem::of(&trace.before(&cut), cut.iteration, Some(cut))
    }

    /// A problem of placement as it is: sizes to the byte, and nothing that repeats. Of each buffer the row that it is, as what has no bytes is none.
    #[cfg(feature = "daemon")]
    pub fn from_rows(rows: &Rows) -> Result<(Problem, Vec<u32>), PlanError> {
        let all = rows.buffers();
        let asked = all.iter().try_fold(Bytes::ZERO, |sum, row| sum.checked_add(row.bytes));
        asked.ok_or(PlanError::TooLarge)?;
        let changes = rows.changes();
        let mut ends = vec![0; all.len()];
        changes
            .iter()
            .zip(0..)
            .filter(|(change, _)| !change.comes)
            .for_each(|(change, at)| ends[change.of as usize] = at);
        let is_placed = |change: &Change| change.comes && !all[change.of as usize].bytes.is_zero();
        let (buffers, rows): (Vec<Buffer>, Vec<u32>) = changes
            .iter()
            .zip(0..)
            .filter(|(change, _)| is_placed(change))
            .map(|(Change { of, .. }, at)| {
                let (bytes, lifetime) = (all[*of as usize].bytes, Lifetime::new(at, ends[*of as usize]));
                let (lane, context) = (Lane::on(StreamId(0)), ContextKey::UNKNOWN);
                (Buffer { bytes, len: bytes, lane, context, lifetime, again: None, phases: PhasePair::default() }, *of)
            })
            .unzip();
        match buffers.len() {
            0 => Err(PlanError::NothingStatic),
            count if count > limits::PLAN_ENTRIES_MAX => Err(PlanError::TooManyRequests(count)),
            _ => Ok((Problem { buffers, pass_end: Tick(changes.len() as u64), ..Problem::default() }, rows)),
        }
    }

    fn of(trace: &Trace, iteration: u32, cut: Option<Cut>) -> Result<Problem, PlanError> {
        let asked_for = iteration;
        let iterations = trace.iterations();
        if iteration >= iterations {
            return Err(PlanError::NoIteration { wanted: iteration, iterations });
        }
        // A job that was seen for one iteration only: what comes before its first step is the prologue, the step itself the cycle.
        let is_first = iteration == 0;
        let iteration = iteration.max(1);
        let Seen { mut allocations, lens, layers } = Seen::collect(trace, iteration, is_first);
        let places = by_iteration(&allocations);
        let alike = if is_first { BTreeSet::new() } else { alike(&allocations, &places, iteration) };
        let before = alike.range(..iteration).next_back().copied().unwrap_or(iteration - 1);
        // What an iteration leaves to the next is seen where that is of this kind, too.
        let is_followed = |of: &&u32| **of < iteration && alike.contains(&(**of + 1));
        let model = alike.iter().rev().find(is_followed).copied().unwrap_or(before);
        if !is_first {
            tell_threads_apart(&mut allocations, both(&places, before, iteration));
            // What varies in iterations further back says nothing of this one, and is of no other kind.
            let others = alike.iter().copied().filter(|other| ![0, before, iteration].contains(other));
            let varying = |allocations: &[Allocation], other| varying(allocations, both(&places, other, iteration));
            let further_back = others.flat_map(|other| varying(&allocations, other)).map(|(one, _)| one);
            further_back.collect::<Vec<_>>().into_iter().for_each(|one| allocations[one].is_dynamic = true);
            // Of two iterations these are one.
            for other in BTreeSet::from([0, before]) {
                for (one, beside) in varying(&allocations, other) {
                    (allocations[one].is_dynamic, allocations[beside].is_dynamic) = (true, true);
                }
            }
        }
        let len = |iteration: u32| lens.get(&iteration).copied().unwrap_or(0);
        let (prologue_len, cycle_len) = (len(0), len(iteration));
        let all_of = |iteration: u32| places.get(&iteration).into_iter().flatten().map(|at| &allocations[*at]);
        let of = |iteration: u32| all_of(iteration).filter(|one| !one.is_dynamic);
        let (habits, turns) = (Habits::of(of(model)), Turns::of(&allocations));
        // In the first iteration what comes before the first step may have taken the name of what comes later.
        let names = (turns.has_several() && iteration > 1).then(|| Habits::of(of(iteration)).counts);

        let pass_end = Tick(prologue_len + cycle_len);
        let mut problem = Problem { iteration: asked_for, cut, pass_end, ..Problem::default() };
        let end = prologue_len + 2 * cycle_len;
        // The first iteration has more before its step, so its requests are told by how many like them come behind.
        let like_last = |iteration: u32| named_from_the_end(of(iteration).collect());
        let left =
            like_last(model).into_iter().filter(|(_, one)| one.freed.is_some_and(|(freed, _)| freed == model + 1));
        let left: HashMap<(Asked, u32), &Allocation> = left.collect();
        for (name, one) in like_last(0) {
            // What is freed in an iteration that is not the planned one goes when what is like it does in that.
            let habit = || left.get(&name).and_then(|like| like.freed);
            let was_looked_at = |freed_in: u32| freed_in as usize + kinds::LOOKED_AT >= iteration as usize;
            let is_like = |freed_in: u32| alike.len() < 2 || !was_looked_at(freed_in) || alike.contains(&freed_in);
            let freed = one.freed.map(|freed| match freed.0 {
                0 => freed,
                freed_in if freed_in == iteration => freed,
                freed_in => habit().unwrap_or(if is_like(freed_in) { freed } else { (freed_in, u64::MAX) }),
            });
            let end = match freed {
                None => end,
                Some((0, at)) => at,
                // Freed in a later iteration: all of those before the cycle look like its first pass.
                Some((freed_in, at)) => prologue_len + turns.carry(one.lane, freed_in, at, iteration).min(cycle_len),
            };
            problem.push(one, Lifetime::new(one.at, end), None)?;
        }
        problem.cycle_start = problem.buffers.len();
        let mut nth = Nth::default();
        // The buffer of each request of the cycle, if it is one.
        let mut numbers = Vec::new();
        for one in of(iteration) {
            let number = problem.buffers.len();
            let habit = habits.freed(one, &mut nth);
            let habit = habit
                .map(|(freed_in, at)| (freed_in + (iteration - model), turns.carry(one.lane, freed_in, at, iteration)));
            // What another lane frees comes now earlier and now later: the later is safe.
            let is_known = names.as_ref().is_some_and(|names| habits.has_as_many(one, names));
            let is_later = |habit: &(u32, u64), freed: (u32, u64)| {
                habit.0 == freed.0 || habit.0 == freed.0 + 1 && habit.1 <= one.at
            };
            let later = |freed| habit.filter(|habit| is_known && is_later(habit, freed)).max(Some(freed));
            let freed = one.freed.map_or(habit, later);
            let start = prologue_len + one.at;
            match freed {
                // A habit may be older than this iteration's order and length.
                Some((freed_in, at)) if freed_in == iteration && at > one.at => {
                    let lifetime = Lifetime::new(start, prologue_len + at.min(cycle_len));
                    problem.push(one, lifetime, Some(later_pass(lifetime, cycle_len)))?;
                }
                // Freed in the next iteration, before it is asked for again.
                Some((freed_in, at)) if freed_in == iteration + 1 && at <= one.at => {
                    let lifetime = Lifetime::new(start, prologue_len + cycle_len + at);
                    problem.push(one, lifetime, Some(Lifetime::new(start + cycle_len, end)))?;
                }
                // One iteration was seen: what it does not free is there for good.
                None if is_first || cut.is_some() => problem.push(one, Lifetime::new(start, end), None)?,
                // Live for more than an iteration: every pass would need another address.
                _ => problem.dynamic_requests += 1,
            }
            numbers.push((one.asked(), Some(number).filter(|number| *number < problem.buffers.len())));
        }
        if problem.buffers.is_empty() {
            return Err(PlanError::NothingStatic);
        }
        for one in all_of(0).filter(|one| one.is_dynamic) {
            problem.expect(one, layers.around(one), 0)?;
        }
        problem.dynamic_cycle_start = problem.dynamic.len();
        // Where nothing comes again there is no second pass. Asked once: it may look at every buffer.
        let has_pass = cycle_len == 0 || problem.comes_again();
        for one in all_of(iteration).filter(|one| one.is_dynamic) {
            let around = layers.around(one).filter(|_| has_pass);
            problem.expect(one, around.map(|(from, to)| (from + cycle_len, to + cycle_len)), prologue_len)?;
        }
        problem.dynamic_requests += problem.dynamic.len() as u64;
        if alike.len() > 1 && cut.is_none() {
            let others = (1..iteration).rev().take(kinds::LOOKED_AT).filter(|other| len(*other) > 0);
            let others = others.map(|other| (len(other), asked_in(of(other))));
            problem.kinds = Cycle::of(&numbers, problem.buffers.len()).others(others);
        }
        let phases = Phases::of(trace, iteration, is_first);
        problem.buffers.iter_mut().for_each(|buffer| buffer.phases = phases.pair(buffer.lifetime));
        Ok(problem)
    }

    /// The requests of a plan, with kinds of iterations that it may not have yet.
    pub(super) fn of_plan(plan: &Plan, kinds: Vec<Kind>) -> Problem {
        let buffer = |entry: &Entry| {
            let Entry { bytes, lane, context, lifetime, again, .. } = *entry;
            Buffer { bytes, len: entry.span().len(), lane, context, lifetime, again, phases: PhasePair::default() }
        };
        let buffers = plan.entries.iter().map(buffer).collect();
        let problem = Problem { buffers, cycle_start: plan.cycle_start, kinds, ..Problem::default() };
        // What lives on into the next pass lives to the end in that.
        let pass_end = Tick(problem.end().0.saturating_sub(plan.cycle_len().unwrap_or(0)));
        Problem { pass_end, ..problem }
    }

    /// What comes again and again, without what comes once before it.
    pub fn without_prologue(mut self) -> Result<Problem, PlanError> {
        self.buffers.drain(..self.cycle_start);
        self.dynamic.drain(..self.dynamic_cycle_start);
        // Those of the cycle come behind all of the prologue.
        self.dynamic.iter_mut().for_each(|entry| entry.before -= self.cycle_start as u32);
        self.kinds.iter_mut().for_each(|kind| kind.begin_at(self.cycle_start));
        (self.cycle_start, self.dynamic_cycle_start) = (0, 0);
        self.dynamic_requests = self.dynamic.len() as u64;
        if self.buffers.is_empty() { Err(PlanError::NothingStatic) } else { Ok(self) }
    }

    fn push(&mut self, one: &Allocation, lifetime: Lifetime, again: Option<Lifetime>) -> Result<(), PlanError> {
        if self.buffers.len() >= limits::PLAN_ENTRIES_MAX {
            return Err(PlanError::TooManyRequests(self.buffers.len() + 1));
        }
        let Allocation { bytes, lane, context, .. } = *one;
        let len = limits::allocation_len(bytes).ok_or(PlanError::TooLarge)?;
        self.buffers.push(Buffer { bytes, len, lane, context, lifetime, again, phases: PhasePair::default() });
        Ok(())
    }

    /// A request that varies, of the prologue or of the cycle, which begins at `first`; and from where to
    /// where it is expected, from there.
    fn expect(&mut self, one: &Allocation, around: Option<(u64, u64)>, first: u64) -> Result<(), PlanError> {
        if self.dynamic.len() >= limits::PLAN_ENTRIES_MAX {
            return Err(PlanError::TooManyRequests(self.dynamic.len() + 1));
        }
        let before = self.buffers.partition_point(|buffer| buffer.lifetime.start.0 < first + one.at);
        self.dynamic.push(DynamicEntry {
            before: before as u32,
            lane: one.lane,
            context: one.context,
            interval: around.map(|(from, to)| Lifetime::new(first + from, first + to)),
        });
        Ok(())
    }

    /// It is of a job that repeats itself.
    pub fn comes_again(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.again.is_some())
    }

    /// One more than the last tick.
    pub fn end(&self) -> Tick {
        self.buffers.iter().flat_map(Buffer::lifetimes).map(|lifetime| lifetime.end).max().unwrap_or_default()
    }
}

impl Allocation {
    fn asked(&self) -> Asked {
        let Allocation { bytes, lane, context, .. } = *self;
        Asked { bytes, lane, context }
    }
}

/// The places among `allocations` of what two iterations ask for, lane by lane.
fn by_lane(allocations: &[Allocation], both: [&[usize]; 2]) -> BTreeMap<Lane, [Vec<usize>; 2]> {
    let mut lanes: BTreeMap<Lane, [Vec<usize>; 2]> = BTreeMap::new();
    for (nth, places) in both.into_iter().enumerate() {
        for at in places {
            lanes.entry(allocations[*at].lane).or_default()[nth].push(*at);
        }
    }
    lanes
}

/// Allocations of one iteration in their order, each with the name that [`Allocation::name`] would give it if the last were the first.
fn named_from_the_end(mut allocations: Vec<&Allocation>) -> Vec<((Asked, u32), &Allocation)> {
    let mut nth = Nth::default();
    allocations.reverse();
    let mut named: Vec<_> = allocations.into_iter().map(|one| (one.name(&mut nth), one)).collect();
    named.reverse();
    named
}

/// This iteration, and those before it that ask for most of what it does and little else: two of one kind say what varies, and what one leaves to the next.
fn alike(allocations: &[Allocation], places: &Places, iteration: u32) -> BTreeSet<u32> {
    let of = |iteration: u32| -> Vec<Asked> {
        let of = places.get(&iteration).into_iter().flatten().map(|at| &allocations[*at]);
        of.filter(|one| !one.is_dynamic).map(Allocation::asked).collect()
    };
    let planned = of(iteration);
    // The first may have much before its step; of others that is of another kind.
    let is_like = |number: &u32| {
        let other = of(*number);
        kinds::has_most_of(&other, &planned) && (*number == 0 || kinds::has_most_of(&planned, &other))
    };
    (0..iteration).rev().take(kinds::LOOKED_AT).filter(is_like).chain([iteration]).collect()
}

/// Where among the allocations those of each iteration are.
type Places = BTreeMap<u32, Vec<usize>>;

fn by_iteration(allocations: &[Allocation]) -> Places {
    let mut places = Places::new();
    for (at, one) in allocations.iter().enumerate() {
        places.entry(one.iteration).or_default().push(at);
    }
    places
}

/// Those of two iterations.
fn both(places: &Places, one: u32, other: u32) -> [&[usize]; 2] {
    [one, other].map(|iteration| places.get(&iteration).map_or(&[][..], Vec::as_slice))
}

/// What one iteration asks for, and when each of it is live in that, if it does not outlive it.
fn asked_in<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> Vec<Came> {
    let freed = |one: &Allocation| one.freed.filter(|(freed_in, at)| *freed_in == one.iteration && *at > one.at);
    allocations.map(|one| (one.asked(), one.at, freed(one).map(|(_, at)| at))).collect()
}

/// What the one iteration that a trace is of asks for, without what varies, and its length in ticks. On these streams each thread is a lane.
pub(super) fn only_iteration(trace: &Trace, raced: &BTreeSet<StreamId>) -> (u64, Vec<Came>) {
    let Seen { mut allocations, lens, .. } = Seen::collect(trace, u32::MAX, false);
    for one in allocations.iter_mut().filter(|one| raced.contains(&one.lane.stream)) {
        one.lane.role = Lane::role_of(one.thread);
    }
    (lens.values().sum(), asked_in(allocations.iter().filter(|one| !one.is_dynamic)))
}

/// Where threads race on a stream, over these two iterations, each of them is a lane.
fn tell_threads_apart(allocations: &mut [Allocation], both: [&[usize]; 2]) {
    let asked = |places: &[usize]| -> Vec<(Asked, u32)> {
        places.iter().map(|at| (allocations[*at].asked(), allocations[*at].thread)).collect()
    };
    let streams = by_lane(allocations, both).into_iter();
    let races = streams.filter(|(_, [one, other])| race::is_on(&asked(one), &asked(other)));
    let races: BTreeSet<Lane> = races.map(|(stream, _)| stream).collect();
    for asked in allocations.iter_mut().filter(|asked| races.contains(&asked.lane)) {
        asked.lane.role = Lane::role_of(asked.thread);
    }
}

/// What has another size in one iteration than in the other, by its places among `allocations` in both.
fn varying(allocations: &[Allocation], both: [&[usize]; 2]) -> Vec<(usize, usize)> {
    let of_lane = |[one, other]: [Vec<usize>; 2]| {
        let asked = |places: &[usize]| places.iter().map(|at| allocations[*at].asked()).collect::<Vec<Asked>>();
        let pairs = vary::pairs(&asked(&one), &asked(&other));
        pairs.into_iter().map(|(at, beside)| (one[at], other[beside])).collect::<Vec<_>>()
    };
    by_lane(allocations, both).into_values().flat_map(of_lane).collect()
}

fn later_pass(lifetime: Lifetime, cycle_len: u64) -> Lifetime {
    Lifetime::new(lifetime.start.0 + cycle_len, lifetime.end.0 + cycle_len)
}

/// Where the requests of an iteration were freed, for those of the next that were not yet.
struct Habits {
    freed: HashMap<(Asked, u32), Option<(u32, u64)>>,
    counts: Nth,
}

/// How many requests for as much from the same place came before.
type Nth = HashMap<Asked, u32>;

impl Allocation {
    /// Its name in its iteration: size, lane, context, and the how-manieth of them it is. Other requests that come or go do not change it.
    fn name(&self, nth: &mut Nth) -> (Asked, u32) {
        let count = nth.entry(self.asked()).or_default();
        *count += 1;
        (self.asked(), *count)
    }
}

impl Habits {
    fn of<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> Habits {
        let mut nth = Nth::default();
        let freed = allocations.map(|one| (one.name(&mut nth), one.freed)).collect();
        Habits { freed, counts: nth }
    }

    fn freed(&self, one: &Allocation, nth: &mut Nth) -> Option<(u32, u64)> {
        self.freed.get(&one.name(nth)).copied().flatten()
    }

    /// As many of this name were asked for as in another iteration: the how-manieth is the same request.
    fn has_as_many(&self, one: &Allocation, other: &Nth) -> bool {
        self.counts.get(&one.asked()) == other.get(&one.asked())
    }
}

/// At which places of an iteration each lane asks, where there are several: what a lane's request is freed between is told by its own requests, as in time others come anywhere.
struct Turns(HashMap<(u32, Lane), Vec<u64>>);

impl Turns {
    fn of(allocations: &[Allocation]) -> Turns {
        let mut turns = Turns(HashMap::default());
        if allocations.windows(2).any(|pair| pair[0].lane != pair[1].lane) {
            for one in allocations {
                turns.0.entry((one.iteration, one.lane)).or_default().push(one.at);
            }
        }
        turns
    }

    fn has_several(&self) -> bool {
        !self.0.is_empty()
    }

    /// The place in iteration `to` behind which as many requests of a lane come as behind `place` in iteration `from`; the first has more before them than others.
    fn carry(&self, lane: Lane, from: u32, place: u64, to: u32) -> u64 {
        let turns = |iteration: u32| self.0.get(&(iteration, lane)).filter(|_| from != to);
        let (Some(there), Some(here)) = (turns(from), turns(to)) else { return place };
        let left = there.len() - there.partition_point(|at| *at < place);
        if left == 0 { u64::MAX } else { here[here.len().saturating_sub(left)] }
    }
}

/// The events up to the end of iteration `last` with the iteration of each; `is_first` counts what comes before the first step as iteration 0 and the step as 1.
pub(super) fn iterations(trace: &Trace, last: u32, is_first: bool) -> impl Iterator<Item = (u32, &Event)> {
    let numbered = trace.events.iter().filter_map(move |event| match event.iteration {
        0 if is_first => Some((u32::from(event.context.phase != Phase::Init), event)),
        _ if is_first => None,
        iteration => Some((iteration, event)),
    });
    numbered.filter(move |(iteration, _)| *iteration <= last)
}

/// The time of a problem has a tick for every event of this kind.
pub(super) fn takes_tick(kind: EventKind) -> bool {
    matches!(kind, EventKind::Alloc | EventKind::Free | EventKind::FreeCompleted)
}

/// What a trace says up to the end of some iteration.
struct Seen {
    allocations: Vec<Allocation>,
    /// Events of each iteration that has any: a number in a file is no reason to count up to it.
    lens: HashMap<u32, u64>,
    layers: Layers,
}

impl Seen {
    /// Looks at the iterations up to `last` ([`iterations`]).
    fn collect(trace: &Trace, last: u32, is_first: bool) -> Seen {
        let mut seen = Seen { allocations: Vec::new(), lens: HashMap::default(), layers: Layers::default() };
        let mut live: HashMap<u64, usize> = HashMap::default();
        let mut keys: HashMap<Context, ContextKey> = HashMap::default();
        // Of most events it is that of the one before.
        let mut before = (Context::default(), trace.key(&Context::default()));
        for (iteration, event) in iterations(trace, last, is_first) {
            let place = seen.lens.entry(iteration).or_default();
            let mut key = || {
                if before.0 != event.context {
                    let key = *keys.entry(event.context).or_insert_with(|| trace.key(&event.context));
                    before = (event.context, key);
                }
                before.1
            };
            match event.kind {
                // No script asks for nothing, and an entry for it would never be matched.
                EventKind::Alloc if event.bytes == Bytes::ZERO => {}
                EventKind::Alloc => {
                    live.insert(event.id, seen.allocations.len());
                    seen.allocations.push(Allocation {
                        bytes: event.bytes,
                        lane: Lane::on(event.stream),
                        thread: event.thread,
                        context: key(),
                        iteration,
                        at: *place,
                        freed: None,
                        freed_from: ContextKey::UNKNOWN,
                        is_dynamic: event.is_dynamic,
                    });
                }
                // Bytes can be used again at the later of the two.
                EventKind::Free | EventKind::FreeCompleted => {
                    if let Some(one) = live.get(&event.id).and_then(|one| seen.allocations.get_mut(*one)) {
                        one.freed = Some((iteration, *place));
                        one.freed_from = key();
                    }
                }
                EventKind::RecordStream | EventKind::Enter | EventKind::Exit | EventKind::Mark => {}
            }
            if event.context.module != 0 && takes_tick(event.kind) {
                seen.layers.note(iteration, key(), *place);
            }
            *place += u64::from(takes_tick(event.kind));
        }
        seen
    }
}

/// From where to where in an iteration each layer is at work: a module in one computation phase.
#[derive(Default)]
struct Layers(HashMap<(u32, ContextKey), (u64, u64)>);

impl Layers {
    fn note(&mut self, iteration: u32, layer: ContextKey, place: u64) {
        self.0.entry((iteration, layer)).or_insert((place, place)).1 = place;
    }

    /// From the beginning of the layer that asked for an allocation to the end of the one that freed it (STAlloc, section 5.2). Where it is not known which layer that was the allocation's own
    /// places stand for it. Nothing where another iteration frees it.
    fn around(&self, one: &Allocation) -> Option<(u64, u64)> {
        let (_, freed) = one.freed.filter(|(iteration, _)| *iteration == one.iteration)?;
        let layer = |key: ContextKey| self.0.get(&(one.iteration, key)).copied();
        let from = layer(one.context).map_or(one.at, |(first, _)| first.min(one.at));
        let to = layer(one.freed_from).map_or(freed, |(_, last)| last.max(freed));
        Some((from, to + 1))
    }
}
