//! Requests that vary: which of those that the plan expects a request is, and where in the static pool it may go.
//!
//! A cursor of its own runs over those of a lane beside the one over its entries. Which request is which follows from the context, and without a context from the place: between
//! which two entries it comes. What it gives is a hint, as all of a plan: the pool checks that the space is free.

use super::Request;
use crate::plan::{LanePlan, ReuseSpaces};
use crate::trace::ContextKey;

/// How far ahead a request is looked for.
const WINDOW: u32 = 64;

#[derive(Debug)]
pub(super) struct Dynamic {
    expected: Box<[Expected]>,
    cycle_start: u32,
    cursor: u32,
    pub(super) spaces: ReuseSpaces,
    /// Where among the spaces of its group the first was that held it last time.
    pub(super) near: Box<[u32]>,
}

#[derive(Clone, Copy, Debug)]
struct Expected {
    context: ContextKey,
    /// The entry that it comes before, by its number among the lane's own.
    before: u32,
}

impl Dynamic {
    /// Those of a lane.
    pub(super) fn new(lane: &LanePlan) -> Dynamic {
        let plan = &lane.plan;
        let expected = plan.dynamic.iter().map(|entry| Expected { context: entry.context, before: entry.before });
        Dynamic {
            expected: expected.collect(),
            cycle_start: plan.dynamic_cycle_start as u32,
            cursor: 0,
            spaces: ReuseSpaces::of(lane),
            near: vec![0; plan.dynamic.len()].into_boxed_slice(),
        }
    }

    /// None at all.
    pub(super) fn none() -> Dynamic {
        Dynamic {
            expected: Box::default(),
            cycle_start: 0,
            cursor: 0,
            spaces: ReuseSpaces::default(),
            near: Box::default(),
        }
    }

    /// It expects one from there soon, and somebody said where that is.
    pub(super) fn knows(&self, request: &Request) -> bool {
        let is_it = |number: u32| self.expected[number as usize].context == request.context;
        !request.context.is_unknown() && self.from(self.cursor).any(is_it)
    }

    /// It comes before the cycle does.
    pub(super) fn is_of_prologue(&self, number: u32) -> bool {
        number < self.cycle_start
    }

    /// The one that a request of a module that varies is, where `next` is the entry of the lane that is asked for next; the cursor goes behind it.
    pub(super) fn find(&mut self, request: &Request, next: u32) -> Option<u32> {
        if self.expected.is_empty() {
            return None;
        }
        if request.context == ContextKey::UNKNOWN {
            return self.find_at(request, next);
        }
        let is_it = |number: &u32| self.expected[*number as usize].context == request.context;
        // Most often it is the next. Where the job has jumped the entries know it first.
        let next_one = Some(self.cursor).filter(|one| *one < self.expected.len() as u32 && is_it(one));
        let found = next_one
            .or_else(|| self.from(self.cursor).find(is_it))
            .or_else(|| self.from(self.first_before(next)).find(is_it));
        let Some(found) = found else {
            // It may be one of which the plan does not know where it comes from.
            return self.find_at(request, next);
        };
        self.cursor = found + 1;
        Some(found)
    }

    /// The one that a request is which comes right before `next`; the cursor goes behind it.
    pub(super) fn find_at(&mut self, request: &Request, next: u32) -> Option<u32> {
        if self.expected.is_empty() {
            return None;
        }
        let (first, end) = (self.first_before(next), self.first_before(next + 1));
        let start = if (first..=end).contains(&self.cursor) { self.cursor } else { first };
        let is_it = |number: &u32| self.expected[*number as usize].context.may_be(request.context);
        let found = (start..end).take(WINDOW as usize).find(is_it)?;
        self.cursor = found + 1;
        Some(found)
    }

    /// The first one that comes before `next` and not before an earlier entry.
    fn first_before(&self, next: u32) -> u32 {
        self.expected.partition_point(|expected| expected.before < next) as u32
    }

    /// So many from `start` on as make sense; behind the last the cycle begins again.
    fn from(&self, start: u32) -> impl Iterator<Item = u32> + use<> {
        let (count, cycle_start) = (self.expected.len() as u32, self.cycle_start);
        let wrap = move |number: u32| if number >= count && cycle_start < count { cycle_start } else { number };
        let first = wrap(start);
        std::iter::successors(Some(first), move |number| Some(wrap(number + 1)))
            .take(WINDOW as usize)
            .take_while(move |number| *number < count)
    }

    /// An iteration begins.
    pub(super) fn begin_cycle(&mut self) {
        self.cursor = self.cycle_start;
    }
}
