//! The lanes of a plan at run time: which stream and thread of this process each of them is, and how far each has come.
//!
//! Raw handles of streams and numbers of threads differ between runs, so a lane is bound when something comes that it wants; the default stream is always itself. A stream once bound stays so: what it has
//! freed may still be in use there. All threads of a stream see its bytes in one order, so a lane can change its thread: where what that asks for is nowhere in the lane, and where it has asked for nothing in a
//! whole iteration, as one that has ended.
//!
//! Not for: whether an entry may be served, which the pool checks.

use std::ops::Range;

use super::Request;
use super::detours::OnDetour;
use super::dynamic::Dynamic;
use super::matcher::Matcher;
use super::relocate::Displaced;
use crate::ids::StreamId;
use crate::plan::Lane;

/// All lanes of a plan.
#[derive(Debug)]
pub(super) struct Lanes {
    /// By number, apart from the rest: every request looks here.
    bindings: Box<[Binding]>,
    all: Box<[Progress]>,
    /// Requests in a row of which no lane is, of a thread that is refused the one that it had.
    turned_away: u32,
}

/// Who a lane is in this process.
#[derive(Clone, Copy, Debug)]
struct Binding {
    of_plan: Lane,
    stream: Option<StreamId>,
    /// Nothing where all threads are one.
    thread: Option<u32>,
    /// The thread that had it last and did not ask for what it has.
    unlike: Option<u32>,
}

/// So many requests in a row that a lane does not have are another lane's.
const UNFOUND_MAX: u32 = 8;

impl Binding {
    #[inline]
    fn is(&self, request: &Request) -> bool {
        self.stream == Some(request.stream) && (self.of_plan.role == 0 || self.thread == Some(request.thread))
    }
}

/// How far a lane has come.
#[derive(Debug)]
pub(super) struct Progress {
    /// The numbers in the whole plan of its first entry and of the first that comes again: what the lane begins with, and when.
    begins: (u32, u32),
    pub(super) matcher: Matcher,
    pub(super) dynamic: Dynamic,
    /// The bytes of the pool that its entries have.
    pub(super) part: Range<u64>,
    /// Where it is, if it is not in the cycle or before it.
    pub(super) detour: Option<OnDetour>,
    /// Requests that a detour had.
    pub(super) asked_on_detours: u64,
    /// Its last request that was not served where the plan has it.
    pub(super) displaced: Option<Displaced>,
    /// Requests in a row that it does not have, and how far it had come at the last of them.
    unfound: u32,
    passed_at_unfound: u64,
    /// How far it had come at the last mark.
    passed_at_mark: u64,
}

impl Progress {
    /// One that has not begun.
    pub(super) fn new(matcher: Matcher, dynamic: Dynamic, part: Range<u64>, begins: (u32, u32)) -> Progress {
        let (displaced, unfound, passed_at_unfound, passed_at_mark) = (None, 0, 0, 0);
        let (detour, asked_on_detours) = (None, 0);
        Progress {
            begins,
            matcher,
            dynamic,
            part,
            detour,
            asked_on_detours,
            displaced,
            unfound,
            passed_at_unfound,
            passed_at_mark,
        }
    }

    /// The entry that is asked for next; `None` behind the end of a plan without a cycle.
    #[inline]
    pub(super) fn next(&self) -> Option<u32> {
        Some(self.matcher.cursor()).filter(|cursor| *cursor < self.matcher.entries().end)
    }

    /// The number in the whole plan of what it begins with, as long as it has not begun.
    fn begins(&self) -> u32 {
        let (once, again) = self.begins;
        if self.matcher.cursor() < self.matcher.cycle_start() { once } else { again }
    }

    /// The number of that among the lane's own.
    pub(super) fn own_next(&self) -> u32 {
        self.matcher.cursor() - self.matcher.entries().start
    }
}

impl Lanes {
    pub(super) fn new(lanes: impl Iterator<Item = (Lane, Progress)>) -> Lanes {
        let binding = |of_plan: Lane| Binding {
            of_plan,
            stream: Some(StreamId::DEFAULT).filter(|default| *default == of_plan.stream),
            thread: None,
            unlike: None,
        };
        let (bindings, all): (Vec<Binding>, Vec<Progress>) = lanes.map(|(of_plan, of)| (binding(of_plan), of)).unzip();
        Lanes { bindings: bindings.into(), all: all.into(), turned_away: 0 }
    }

    /// The lane of a request, if that is known.
    #[inline]
    pub(super) fn of(&self, request: &Request) -> Option<usize> {
        self.bindings.iter().position(|binding| binding.is(request))
    }

    /// Lanes that the request of a stream or thread may be of that has none yet. First what was recorded by such a name, as in the process that goes on; then in the order in which the plan begins them.
    pub(super) fn that_may_begin(&self, request: &Request) -> Vec<usize> {
        let is_known = self.on_stream(request.stream).is_some();
        let is_new = request.stream != StreamId::DEFAULT && !is_known;
        let may_be = |binding: &Binding| match binding.stream {
            Some(bound) => {
                bound == request.stream && binding.thread.is_none() && binding.unlike != Some(request.thread)
            }
            None => is_new,
        };
        let mut lanes: Vec<usize> = (0..self.all.len()).filter(|lane| may_be(&self.bindings[*lane])).collect();
        let is_other =
            |of_plan: Lane| (of_plan.stream != request.stream, of_plan.role != Lane::role_of(request.thread));
        lanes.sort_by_cached_key(|lane| (is_other(self.bindings[*lane].of_plan), self.all[*lane].begins()));
        lanes
    }

    /// The request is dynamic, in whichever lane.
    pub(super) fn has_dynamic(&self, request: &Request) -> bool {
        request.is_dynamic || self.all.iter().any(|lane| lane.dynamic.is_dynamic(request))
    }

    /// The lane of a request, or another of its stream: whose room it may have.
    pub(super) fn with_room(&self, request: &Request) -> Option<usize> {
        self.of(request).or_else(|| self.on_stream(request.stream))
    }

    /// Some lane of a stream of which something has come.
    fn on_stream(&self, stream: StreamId) -> Option<usize> {
        self.bindings.iter().position(|binding| binding.stream == Some(stream))
    }

    /// What a thread asks for is nowhere in its lane, time after time, or seems to have another size each time: the lane is another's.
    pub(super) fn note_unfound(&mut self, lane: usize, goes_over: bool) {
        let (binding, progress) = (&mut self.bindings[lane], &mut self.all[lane]);
        let passed = progress.matcher.passed();
        progress.unfound = if passed > progress.passed_at_unfound { 1 } else { progress.unfound + 1 };
        progress.passed_at_unfound = passed + u64::from(goes_over);
        if progress.unfound >= UNFOUND_MAX && binding.thread.is_some() && !progress.matcher.expects_mark() {
            binding.unlike = binding.thread.take();
            progress.unfound = 0;
            self.turned_away = 0;
        }
    }

    /// Nobody's lane has what was asked for. After as many of these as lose a lane whoever had one may have it again: a job that marks no iterations would never say so. But not while others come for it.
    pub(super) fn note_turned_away(&mut self, request: &Request) {
        let is_refused = self.bindings.iter().any(|binding| binding.unlike == Some(request.thread));
        self.turned_away = if is_refused { self.turned_away + 1 } else { 0 };
        if self.turned_away >= UNFOUND_MAX {
            self.turned_away = 0;
            self.bindings.iter_mut().for_each(|binding| binding.unlike = None);
        }
    }

    /// An iteration ends: whose thread has asked for nothing in it has another soon, or never.
    pub(super) fn note_mark(&mut self) {
        for (binding, progress) in self.bindings.iter_mut().zip(&mut self.all) {
            let passed = progress.matcher.passed() + progress.asked_on_detours;
            if passed == progress.passed_at_mark {
                binding.thread = None;
            }
            progress.passed_at_mark = passed;
            progress.unfound = 0;
            binding.unlike = None;
        }
    }

    /// The request is the lane's, and so is what comes from its stream and thread.
    pub(super) fn bind(&mut self, lane: usize, request: &Request) {
        let of_plan = self.bindings[lane].of_plan;
        for binding in self.bindings.iter_mut().filter(|binding| binding.of_plan.stream == of_plan.stream) {
            binding.stream = Some(request.stream);
        }
        self.bindings[lane].thread = Some(request.thread).filter(|_| of_plan.role > 0);
    }

    /// The stream of this process that a lane's memory is used on.
    pub(super) fn stream(&self, lane: usize) -> StreamId {
        self.bound_stream(lane).unwrap_or(StreamId::DEFAULT)
    }

    /// The same, once something has come on it.
    pub(super) fn bound_stream(&self, lane: usize) -> Option<StreamId> {
        self.bindings[lane].stream
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Progress> {
        self.all.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Progress> {
        self.all.iter_mut()
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }
}

impl std::ops::Index<usize> for Lanes {
    type Output = Progress;

    #[inline]
    fn index(&self, lane: usize) -> &Progress {
        &self.all[lane]
    }
}

impl std::ops::IndexMut<usize> for Lanes {
    #[inline]
    fn index_mut(&mut self, lane: usize) -> &mut Progress {
        &mut self.all[lane]
    }
}
