//! Detours at run time: where the job is in what it asks for instead of a part of the cycle.
//!
//! A detour begins where the request at the cursor is not the entry there but the first of a detour from there; then the requests of that are followed one by one, and behind its last one the cursor goes to where it leads. Nobody on a detour is orderly:
//! where it begins to take places, all that is orderly in its lane and not live for good becomes a tenant, and so does what comes. So a place on a detour is free when no tenant is there, and what the plan promises of the entries stays as it is.
//!
//! Not for: surprises, which the matcher finds its way back from.

use super::lanes::Progress;
use super::matcher::NEAR;
use super::{PlannedPool, Request, Served};
use crate::plan::{self, LanePlan, NEVER};
use crate::trace::ContextKey;
use crate::units::{Bytes, PlanSpan};

/// All detours of a plan.
#[derive(Debug, Default)]
pub(super) struct Detours {
    /// In the order of the entries that do not come.
    all: Box<[Detour]>,
    requests: Box<[Expected]>,
}

#[derive(Debug)]
struct Detour {
    /// The entry that does not come, and the one that comes next.
    from: u32,
    to: u32,
    /// The first of its requests, and the first behind them.
    first: u32,
    end: u32,
    lane: u32,
}

#[derive(Clone, Copy, Debug)]
struct Expected {
    bytes: Bytes,
    context: ContextKey,
    span: Option<PlanSpan>,
}

/// Where on a detour a lane is.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnDetour {
    from: u32,
    to: u32,
    first: u32,
    next: u32,
    end: u32,
    /// What was orderly and is not live for good is a tenant by now.
    is_cleared: bool,
    /// Requests in a row that it does not have.
    unfound: u32,
}

/// After so many of those the job is elsewhere.
const UNFOUND_MAX: u32 = 8;

impl Detour {
    fn begun(&self) -> OnDetour {
        let Detour { from, to, first, end, .. } = *self;
        OnDetour { from, to, first, next: first, end, is_cleared: false, unfound: 0 }
    }
}

impl Expected {
    fn asked(&self) -> (Bytes, ContextKey) {
        (self.bytes, self.context)
    }

    fn is_like(&self, request: &Request) -> bool {
        self.bytes == request.bytes && self.context.may_be(request.context)
    }
}

impl Detours {
    pub(super) fn of(lanes: &[LanePlan]) -> Detours {
        let (mut all, mut requests, mut first) = (Vec::new(), Vec::new(), 0);
        for (of, lane) in lanes.iter().zip(0..) {
            let count = of.entries.len() as u32;
            // Behind the last entry the cursor stands at the first of the cycle.
            let number = |own: u32| first + if own < count { own } else { of.plan.cycle_start as u32 };
            for plan::Detour { from, to, requests: expected, .. } in &of.plan.detours {
                let begin = requests.len() as u32;
                requests.extend(expected.iter().map(|of| Expected {
                    bytes: of.bytes,
                    context: of.context,
                    span: of.span(),
                }));
                let end = requests.len() as u32;
                all.push(Detour { from: number(*from), to: number(*to), first: begin, end, lane });
            }
            first += count;
        }
        all.sort_by_key(|detour| detour.from);
        Detours { all: all.into(), requests: requests.into() }
    }

    /// Every place that a request on a detour has, and whose.
    pub(super) fn spans(&self) -> impl Iterator<Item = (u32, PlanSpan)> + '_ {
        self.all.iter().flat_map(|detour| {
            let requests = &self.requests[detour.first as usize..detour.end as usize];
            requests.iter().filter_map(|of| Some((detour.lane, of.span?)))
        })
    }

    /// Those that begin where this entry does not come.
    fn from(&self, entry: u32) -> &[Detour] {
        let first = self.all.partition_point(|detour| detour.from < entry);
        let count = self.all[first..].iter().take_while(|detour| detour.from == entry).count();
        &self.all[first..first + count]
    }

    /// The detour that goes on with a request, of those that begin at one place with the same requests up to there.
    fn like(&self, on: OnDetour, request: &Request) -> Option<OnDetour> {
        let asked = |first: u32, end: u32| self.requests[first as usize..end as usize].iter().map(Expected::asked);
        let goes_on = |next: u32, end: u32| next < end && self.requests[next as usize].is_like(request);
        if goes_on(on.next, on.end) {
            return None;
        }
        let done = on.next - on.first;
        let is_it = |other: &&Detour| {
            goes_on(other.first + done, other.end)
                && asked(on.first, on.next).eq(asked(other.first, other.first + done))
        };
        let other = self.from(on.from).iter().find(is_it)?;
        Some(OnDetour { next: other.first + done, is_cleared: on.is_cleared, ..other.begun() })
    }

    /// The job may go on from one entry to the other, with nothing between.
    pub(super) fn lead(&self, from: u32, to: u32) -> bool {
        self.from(from).iter().any(|detour| detour.to == to && detour.first == detour.end)
    }
}

impl PlannedPool {
    /// Serves a request that is not the entry's at the cursor, if the lane is on a detour or one begins with it. Nothing where it is to be looked for in the cycle.
    pub(super) fn alloc_on_detour(&mut self, lane: usize, request: &Request) -> Option<Served> {
        let on = match self.lanes[lane].detour {
            Some(on) => on,
            None => self.that_begins_with(lane, request)?,
        };
        let on = self.detours.like(on, request).unwrap_or(on);
        let requests = &self.detours.requests[on.next as usize..on.end as usize];
        let Some(ahead) = requests.iter().take(NEAR).position(|expected| expected.is_like(request)) else {
            return self.alloc_off_detour(lane, on, request);
        };
        let at = on.next + ahead as u32;
        self.counts.skipped += ahead as u64;
        self.lanes[lane].matcher.found();
        self.lanes[lane].asked_on_detours += 1;
        let served = self.serve_on_detour(lane, at, on.is_cleared, request);
        let is_cleared = on.is_cleared || self.detours.requests[at as usize].span.is_some();
        // One without memory behind its place comes again.
        let next = at + u32::from(served != Served::Unbacked);
        let on = OnDetour { next, is_cleared, unfound: 0, ..on };
        self.lanes[lane].detour = Some(on);
        if on.next == on.end {
            self.end_detour(lane, on);
        }
        Some(served)
    }

    /// The detour from the cursor on that begins with a request, or leads at once to the entry that it is.
    pub(super) fn that_begins_with(&self, lane: usize, request: &Request) -> Option<OnDetour> {
        let begins = |detour: &&Detour| match self.detours.requests[..detour.end as usize].get(detour.first as usize) {
            Some(first) => first.is_like(request),
            None => self.is_like(detour.to, request),
        };
        let detour = self.detours.from(self.lanes[lane].next()?).iter().find(begins)?;
        Some(detour.begun())
    }

    /// A request that a detour does not have near: it is over before its end, or this is a surprise.
    fn alloc_off_detour(&mut self, lane: usize, on: OnDetour, request: &Request) -> Option<Served> {
        if self.is_like(on.to, request) {
            self.counts.skipped += u64::from(on.end - on.next);
            self.end_detour(lane, on);
            return Some(self.alloc(request));
        }
        let matcher = &mut self.lanes[lane].matcher;
        matcher.note(request);
        let unfound = on.unfound + 1;
        let is_lost = unfound == UNFOUND_MAX
            || self.lanes[lane].matcher.find_again(|entry, asked| self.is_like(entry, asked)).is_some();
        self.lanes[lane].detour = Some(OnDetour { unfound, ..on }).filter(|_| !is_lost);
        if is_lost {
            return Some(self.serve_astray(lane, request));
        }
        self.counts.unplanned += 1;
        Some(Served::Unknown)
    }

    /// Serves the request `at` of a detour.
    fn serve_on_detour(&mut self, lane: usize, at: u32, is_cleared: bool, request: &Request) -> Served {
        let Some(span) = self.detours.requests[at as usize].span else { return Served::Elsewhere };
        if !is_cleared {
            let is_in_the_way = |entry: &u32| self.lane_of(*entry) == lane && self.expiries.death(*entry) != NEVER;
            self.make_tenants(self.orderly.iter().filter(is_in_the_way).collect());
        }
        if self.tenants.has_lent(span) {
            return Served::Unbacked;
        }
        if !self.tenants.is_clear(span) {
            self.counts.blocked += 1;
            return Served::Unknown;
        }
        self.settle(span, request.bytes);
        self.counts.detoured += 1;
        Served::At(self.addresses_of(span).start())
    }

    /// The place of a request that comes next on a detour.
    pub(super) fn next_on_detour(&self, lane: usize, request: &Request) -> Option<PlanSpan> {
        let on = self.lanes[lane].detour?;
        let next = self.detours.requests[..on.end as usize].get(on.next as usize);
        next.filter(|next| next.is_like(request)).and_then(|next| next.span)
    }

    /// What comes on the detour that a lane is on.
    pub(super) fn coming_on_detour(&self, lane: &Progress) -> impl Iterator<Item = PlanSpan> + '_ {
        let left = lane.detour.map_or(0..0, |on| on.next as usize..on.end as usize);
        self.detours.requests[left].iter().filter_map(|expected| expected.span)
    }

    /// The entry of the cycle that comes next, behind the detour if a lane is on one.
    pub(super) fn next_in_cycle(&self, lane: &Progress) -> u32 {
        lane.detour.map_or(lane.matcher.cursor(), |on| on.to)
    }

    /// A lane goes over the request at which it is on a detour; false if it is on none.
    pub(super) fn pass_over_on_detour(&mut self, lane: usize) -> bool {
        let Some(on) = self.lanes[lane].detour else { return false };
        let on = OnDetour { next: on.next + 1, ..on };
        self.lanes[lane].detour = Some(on);
        if on.next >= on.end {
            self.end_detour(lane, on);
        }
        true
    }

    /// An iteration ends, wherever on a detour a lane is.
    pub(super) fn break_off_detour(&mut self, lane: usize) {
        if let Some(on) = self.lanes[lane].detour {
            self.counts.skipped += u64::from(on.end - on.next);
            self.end_detour(lane, on);
        }
    }

    /// The cursor goes to where a detour leads, which is no surprise.
    fn end_detour(&mut self, lane: usize, on: OnDetour) {
        self.lanes[lane].detour = None;
        self.go_over_to(lane, on.to);
    }

    /// The cursor goes on or back to an entry, as the plan knows that it may.
    pub(super) fn go_over_to(&mut self, lane: usize, to: u32) {
        let matcher = &self.lanes[lane].matcher;
        let (cursor, cycle_start) = (matcher.cursor(), matcher.cycle_start());
        if to < cursor && to > cycle_start {
            self.rewind_behind(to - 1);
            return;
        }
        self.go_on_to(to);
    }
}
