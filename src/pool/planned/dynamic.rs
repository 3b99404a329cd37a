//! Requests that vary: which of those that the plan expects a request is, and where in the static pool it may go.
//!
//! A cursor of its own runs over those of a lane beside the one over its entries. Which request is which follows from the context, and without a context from the place: between
//! which two entries it comes. What it gives is a hint, as all of a plan: the pool checks that the space is free.

use foldhash::HashSet;

use super::{PlannedPool, Request, Served};
use crate::limits;
use crate::plan::{self, LanePlan, ReuseSpaces};
use crate::trace::ContextKey;
use crate::units::{DeviceAddress, PlanSpan, Span};

/// How far ahead a request is looked for.
const WINDOW: u32 = 64;

#[derive(Debug)]
pub(super) struct Dynamic {
    expected: Box<[Expected]>,
    /// Contexts of dynamic modules: those of expected requests alone.
    contexts: HashSet<ContextKey>,
    cycle_start: u32,
    cursor: u32,
    pub(super) spaces: ReuseSpaces,
    /// Which of the spaces of its group served it the last time.
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
        let mut contexts: HashSet<ContextKey> = plan.dynamic.iter().map(|entry| entry.context).collect();
        contexts.retain(|context| !context.is_unknown());
        for entry in &plan.entries {
            contexts.remove(&entry.context);
        }
        Dynamic {
            expected: expected.collect(),
            contexts,
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
            contexts: HashSet::default(),
            cycle_start: 0,
            cursor: 0,
            spaces: ReuseSpaces::default(),
            near: Box::default(),
        }
    }

    /// Knows which requests are dynamic, and expects none.
    pub(super) fn expect_none(&mut self) {
        *self = Dynamic { contexts: std::mem::take(&mut self.contexts), ..Dynamic::none() };
    }

    /// The request is dynamic: it says so, or the plan has nothing but dynamic requests from its context.
    pub(super) fn is_dynamic(&self, request: &Request) -> bool {
        request.is_dynamic || !self.contexts.is_empty() && self.contexts.contains(&request.context)
    }

    /// One more than the plan expects of a module that it knows.
    pub(super) fn is_surplus(&self, request: &Request) -> bool {
        !self.expected.is_empty() && self.contexts.contains(&request.context)
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

    /// One of them comes before `next`. Without a context its place alone says which request it is, of
    /// whatever size.
    #[inline]
    pub(super) fn expects_before(&self, next: u32) -> bool {
        let before = |number: u32| self.expected.get(number as usize).map(|expected| expected.before);
        match before(self.cursor) {
            // Some were left out, or the job has jumped.
            Some(left_out) if left_out < next => before(self.first_before(next)) == Some(next),
            expected => expected == Some(next),
        }
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

impl PlannedPool {
    /// Dynamic requests are served elsewhere from now on, whatever the plan leaves idle.
    pub fn stop_reusing(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.dynamic.expect_none());
    }

    /// Serves a dynamic request in a free space that the plan leaves idle for as long as it lives.
    #[inline]
    pub(super) fn alloc_dynamic(&mut self, number: usize, request: &Request) -> Served {
        let lane = &mut self.lanes[number];
        let next = lane.own_next();
        let Some(expected) = lane.dynamic.find(request, next) else {
            self.unexpected += u64::from(lane.dynamic.is_surplus(request));
            return Served::Elsewhere;
        };
        self.reuse(number, expected, request).map_or(Served::Elsewhere, Served::Reused)
    }

    /// A request that is not the entry at the cursor. The plan may expect one of unknown size here.
    pub(super) fn alloc_unlike_before(&mut self, number: usize, request: &Request) -> Option<Served> {
        let lane = &mut self.lanes[number];
        let next = lane.own_next();
        let found = lane.dynamic.find_at(request, next)?;
        let reused = self.reuse(number, found, request);
        if reused.is_none() {
            self.unserved_dynamic = Some(*request);
        }
        Some(reused.map_or(Served::Elsewhere, Served::Reused))
    }

    /// Serves a dynamic request in the space that served it the last time, or in the shortest of its
    /// spaces that has room for it now (STAlloc, equation 7): best fit, but for spaces of which a part
    /// is taken.
    fn reuse(&mut self, number: usize, expected: u32, request: &Request) -> Option<DeviceAddress> {
        let lane = &self.lanes[number];
        let group = lane.dynamic.spaces.group(expected)?;
        let (first, last) = group.cursor;
        // Behind the last entry of a pass the cursor stands at the first of the next. Before the
        // first pass it does, too, and that is not the same.
        let has_ended_pass = lane.matcher.has_ended_pass();
        let is_behind_last =
            last as usize == lane.matcher.entries().len() && lane.matcher.at_cycle_start() && has_ended_pass;
        // An entry of the cycle may occupy from then on what is idle in the prologue.
        let is_over = has_ended_pass && lane.dynamic.is_of_prologue(expected);
        if is_over || !(first..=last).contains(&lane.own_next()) && !is_behind_last {
            return None;
        }
        let len = limits::allocation_len(request.bytes)?;
        let units = u32::try_from(len.get() / limits::ALLOCATION_ALIGNMENT.get()).ok()?;
        let spaces = lane.dynamic.spaces.spaces(group);
        let near = lane.dynamic.near[expected as usize] as usize;
        let first = plan::first_with_room(spaces, units, near);
        let next = lane.next();
        let is_free = |span: PlanSpan| {
            let is_there = |entry: u32| self.orderly.is_set(entry) && self.offsets_of(entry).overlaps(span);
            match next {
                // Behind the end of a plan without a cycle no entry comes, so none has expired.
                None => !self.orderly.iter().any(is_there),
                // The plan has these gone when the next entry comes, which checks whether they are.
                Some(next) => !self.expiries.before(next).iter().copied().any(is_there),
            }
        };
        let gap = |space: &(u32, u32)| {
            let start = self.tenants.gap(plan::span_of(*space), len)?;
            Span::new(start, len).filter(|span| is_free(*span))
        };
        // The spaces before it were too full for it the last time, too.
        let again = spaces.get(near).filter(|_| near > first).and_then(gap).map(|found| (near, found));
        let all = || (first..).zip(&spaces[first..]).find_map(|(at, space)| Some((at, gap(space)?)));
        let found = again.or_else(all);
        self.lanes[number].dynamic.near[expected as usize] = found.map_or(first, |(at, _)| at) as u32;
        Some(self.serve_tenant(found?.1, request))
    }
}
