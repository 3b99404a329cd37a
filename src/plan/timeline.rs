//! Draws the time of a problem: the prologue, and the cycle with its two passes ([`super::problem`]).
//!
//! Not for: what is looked at ([`super::seen`]); where buffers lie ([`super::solve`]).

use std::collections::BTreeSet;

use foldhash::HashMap;

use super::habits::{Habits, Nth, Turns, named_from_the_end};
use super::kinds::{self, Came, Cycle, Kind};
use super::modules::DynamicModules;
use super::seen::{self, Allocation, Places, Seen};
use super::vary::Asked;
use super::{Lane, PlanError, Problem};
use crate::ids::StreamId;
use crate::lifetimes;
use crate::trace::Trace;
use crate::units::{Lifetime, Tick};

/// The iterations that a problem is made from, and how they are alike.
pub(super) struct Timeline {
    seen: Seen,
    places: Places,
    /// The iteration that repeats, and those before it that are of the same variant.
    iteration: u32,
    alike: BTreeSet<u32>,
    /// The one whose frees in the next iteration are seen.
    model: u32,
    turns: Turns,
    /// The trace has the first iteration alone: its part before the first step is the prologue, the
    /// step itself the cycle.
    is_first: bool,
    is_cut: bool,
    /// Requests of the cycle that are dynamic though their modules are not.
    irregular_requests: u64,
}

/// A request of the cycle, and the number of its buffer if it has one.
type Numbered = (Asked, Option<usize>);

impl Timeline {
    /// Compares `iteration` with those before it, and says which requests are dynamic.
    pub(super) fn from_trace(trace: &Trace, iteration: u32, is_cut: bool) -> Timeline {
        let is_first = iteration == 0;
        let dynamic =
            if is_first { DynamicModules::default() } else { DynamicModules::between_iterations(trace, iteration) };
        let iteration = iteration.max(1);
        let mut seen = Seen::collect(trace, iteration, is_first, &dynamic);
        let places = seen::by_iteration(&seen.allocations);
        let alike = if is_first { BTreeSet::new() } else { alike(&seen.allocations, &places, iteration) };
        let before = alike.range(..iteration).next_back().copied().unwrap_or(iteration - 1);
        // What an iteration leaves to the next is seen where that is of this kind, too.
        let is_followed = |of: &&u32| **of < iteration && alike.contains(&(**of + 1));
        let model = alike.iter().rev().find(is_followed).copied().unwrap_or(before);
        let count = |seen: &Seen| {
            let of_cycle = places.get(&iteration).into_iter().flatten();
            of_cycle.filter(|at| seen.allocations[**at].is_dynamic).count() as u64
        };
        let known = count(&seen);
        if !is_first {
            seen::tell_threads_apart(&mut seen.allocations, seen::both(&places, before, iteration));
            mark_irregular(&mut seen.allocations, &places, &alike, (before, iteration));
        }
        let (turns, irregular_requests) = (Turns::of(&seen.allocations), count(&seen) - known);
        Timeline { seen, places, iteration, alike, model, turns, is_first, is_cut, irregular_requests }
    }

    pub(super) fn iteration(&self) -> u32 {
        self.iteration
    }

    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    fn len(&self, iteration: u32) -> u64 {
        self.seen.lens.get(&iteration).copied().unwrap_or(0)
    }

    fn prologue_len(&self) -> u64 {
        self.len(0)
    }

    fn cycle_len(&self) -> u64 {
        self.len(self.iteration)
    }

    /// Where the first pass of the cycle ends.
    pub(super) fn pass_end(&self) -> Tick {
        Tick(self.prologue_len() + self.cycle_len())
    }

    fn end(&self) -> u64 {
        self.prologue_len() + 2 * self.cycle_len()
    }

    fn all_of(&self, iteration: u32) -> impl Iterator<Item = &Allocation> {
        self.places.get(&iteration).into_iter().flatten().map(|at| &self.seen.allocations[*at])
    }

    /// The requests of an iteration that are planned.
    fn of(&self, iteration: u32) -> impl Iterator<Item = &Allocation> {
        self.all_of(iteration).filter(|one| !one.is_dynamic)
    }

    fn dynamic_of(&self, iteration: u32) -> impl Iterator<Item = &Allocation> {
        self.all_of(iteration).filter(|one| one.is_dynamic)
    }

    /// Adds the buffers of the prologue.
    pub(super) fn draw_prologue(&self, problem: &mut Problem) -> Result<(), PlanError> {
        let (model, iteration, alike) = (self.model, self.iteration, &self.alike);
        // The first iteration has more before its step, so its requests are told by how many like them come behind.
        let like_last = |iteration: u32| named_from_the_end(self.of(iteration).collect());
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
                None => self.end(),
                Some((0, at)) => at,
                // Freed in a later iteration: all of those before the cycle look like its first pass.
                Some((freed_in, at)) => {
                    let at = self.turns.carry(one.lane, freed_in, at, iteration);
                    self.prologue_len() + at.min(self.cycle_len())
                }
            };
            problem.push(one, Lifetime::new(one.at, end), None)?;
        }
        problem.cycle_start = problem.buffers.len();
        Ok(())
    }

    /// Adds the buffers of the cycle.
    pub(super) fn draw_cycle(&self, problem: &mut Problem) -> Result<Vec<Numbered>, PlanError> {
        let (iteration, model) = (self.iteration, self.model);
        let habits = Habits::of(self.of(model));
        // In the first iteration what comes before the first step may have taken the name of what comes later.
        let names = (self.turns.has_several() && iteration > 1).then(|| Habits::of(self.of(iteration)).counts);
        let mut nth = Nth::default();
        let mut numbers = Vec::new();
        for one in self.of(iteration) {
            let number = problem.buffers.len();
            let carried = |freed_in: u32, at: u64| self.turns.carry(one.lane, freed_in, at, iteration);
            let habit = habits.freed(one, &mut nth);
            let habit = habit.map(|(freed_in, at)| (freed_in + (iteration - model), carried(freed_in, at)));
            // What another lane frees comes now earlier and now later: the later is safe.
            let is_known = names.as_ref().is_some_and(|names| habits.has_as_many(one, names));
            let is_later = |habit: &(u32, u64), freed: (u32, u64)| {
                habit.0 == freed.0 || habit.0 == freed.0 + 1 && habit.1 <= one.at
            };
            let later = |freed| habit.filter(|habit| is_known && is_later(habit, freed)).max(Some(freed));
            self.draw(problem, one, one.freed.map_or(habit, later))?;
            numbers.push((one.asked(), Some(number).filter(|number| *number < problem.buffers.len())));
        }
        Ok(numbers)
    }

    /// Adds the buffer of a request of the cycle that is freed in this iteration and there, if it can
    /// have one.
    fn draw(&self, problem: &mut Problem, one: &Allocation, freed: Option<(u32, u64)>) -> Result<(), PlanError> {
        let (iteration, prologue_len, cycle_len) = (self.iteration, self.prologue_len(), self.cycle_len());
        let start = prologue_len + one.at;
        match freed {
            // A habit may be older than this iteration's order and length.
            Some((freed_in, at)) if freed_in == iteration && at > one.at => {
                let lifetime = Lifetime::new(start, prologue_len + at.min(cycle_len));
                problem.push(one, lifetime, Some(later_pass(lifetime, cycle_len)))
            }
            // Freed in the next iteration, before it is asked for again.
            Some((freed_in, at)) if freed_in == iteration + 1 && at <= one.at => {
                let lifetime = Lifetime::new(start, prologue_len + cycle_len + at);
                problem.push(one, lifetime, Some(Lifetime::new(start + cycle_len, self.end())))
            }
            // One iteration was seen: what it does not free is there for good.
            None if self.is_first || self.is_cut => problem.push(one, Lifetime::new(start, self.end()), None),
            // Live for more than an iteration: every pass would need another address.
            _ => {
                problem.dynamic_requests += 1;
                Ok(())
            }
        }
    }

    /// Adds where dynamic requests are expected.
    pub(super) fn draw_dynamic(&self, problem: &mut Problem) -> Result<(), PlanError> {
        let (layers, cycle_len) = (&self.seen.layers, self.cycle_len());
        for one in self.dynamic_of(0) {
            problem.expect(one, layers.around(one), 0)?;
        }
        problem.dynamic_cycle_start = problem.dynamic.len();
        // Where nothing comes again there is no second pass. Asked once: it may look at every buffer.
        let has_pass = cycle_len == 0 || problem.comes_again();
        for one in self.dynamic_of(self.iteration) {
            let around = layers.around(one).filter(|_| has_pass);
            let in_second_pass = around.map(|(from, to)| (from + cycle_len, to + cycle_len));
            problem.expect(one, in_second_pass, self.prologue_len())?;
        }
        problem.dynamic_requests += problem.dynamic.len() as u64;
        problem.irregular_requests = self.irregular_requests;
        problem.dynamic_percent = self.dynamic_percent();
        Ok(())
    }

    /// The share of dynamic requests at the peak of the planned iteration's requests, in hundredths.
    fn dynamic_percent(&self) -> u64 {
        if self.dynamic_of(self.iteration).next().is_none() {
            return 0;
        }
        let requests: Vec<&Allocation> = self.all_of(self.iteration).collect();
        let lifetime = |one: &&Allocation| Lifetime::new(one.at, one.freed_within().unwrap_or(u64::MAX));
        let lifetimes: Vec<Lifetime> = requests.iter().map(lifetime).collect();
        // Live bytes, of all requests and of dynamic ones.
        let (mut live, mut peak) = ([0_u128; 2], [0_u128; 2]);
        for change in lifetimes::changes(&lifetimes) {
            let one = requests[change.of as usize];
            let bytes = u128::from(one.bytes.get());
            for (live, bytes) in live.iter_mut().zip([bytes, if one.is_dynamic { bytes } else { 0 }]) {
                *live = if change.comes { *live + bytes } else { *live - bytes };
            }
            if live[0] > peak[0] {
                peak = live;
            }
        }
        (peak[1] * 100 / peak[0].max(1)) as u64
    }

    /// The iterations before the planned one that do something else, beside the `numbers` of its requests
    /// in a problem of `count` buffers.
    pub(super) fn variants(&self, numbers: &[Numbered], count: usize) -> Vec<Kind> {
        if self.alike.len() < 2 || self.is_cut {
            return Vec::new();
        }
        let others = (1..self.iteration).rev().take(kinds::LOOKED_AT).filter(|other| self.len(*other) > 0);
        let others = others.map(|other| (self.len(other), asked_in(self.of(other))));
        Cycle::of(numbers, count).others(others)
    }
}

/// Marks requests that have another size in iterations of the same variant. `before` is the last of them
/// that comes before `iteration`.
fn mark_irregular(
    allocations: &mut [Allocation],
    places: &Places,
    alike: &BTreeSet<u32>,
    (before, iteration): (u32, u32),
) {
    let varying = |allocations: &[Allocation], other| seen::varying(allocations, seen::both(places, other, iteration));
    // What varies in iterations further back says nothing of this one, and is of no other kind.
    let others = alike.iter().copied().filter(|other| ![0, before, iteration].contains(other));
    let further_back = others.flat_map(|other| varying(allocations, other)).map(|(one, _)| one);
    further_back.collect::<Vec<_>>().into_iter().for_each(|one| allocations[one].is_dynamic = true);
    // Of two iterations these are one.
    for other in BTreeSet::from([0, before]) {
        for (one, beside) in varying(allocations, other) {
            (allocations[one].is_dynamic, allocations[beside].is_dynamic) = (true, true);
        }
    }
}

/// This iteration, and those before it that ask for most of what it does and little else: two of one
/// kind say what varies, and what one leaves to the next.
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

/// What one iteration asks for, and when each of it is live in that, if it does not outlive it.
fn asked_in<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> Vec<Came> {
    allocations.map(|one| (one.asked(), one.at, one.freed_within())).collect()
}

/// What the one iteration that a trace is of asks for, without what varies, and its length in ticks. On
/// these streams each thread is a lane.
pub(super) fn only_iteration(trace: &Trace, raced: &BTreeSet<StreamId>) -> (u64, Vec<Came>) {
    let Seen { mut allocations, lens, .. } = Seen::collect(trace, u32::MAX, false, &DynamicModules::default());
    for one in allocations.iter_mut().filter(|one| raced.contains(&one.lane.stream)) {
        one.lane.role = Lane::role_of(one.thread);
    }
    (lens.values().sum(), asked_in(allocations.iter().filter(|one| !one.is_dynamic)))
}

fn later_pass(lifetime: Lifetime, cycle_len: u64) -> Lifetime {
    Lifetime::new(lifetime.start.0 + cycle_len, lifetime.end.0 + cycle_len)
}
