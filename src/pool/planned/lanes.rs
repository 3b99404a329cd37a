//! The lanes of a plan at run time: which stream and thread of this process each of them is, and how far each has come.
//!
//! Raw handles of streams and numbers of threads differ between runs, so a lane is bound when something comes that it wants; the default stream is always itself. A stream once bound stays so: what it has
//! freed may still be in use there. A thread may end, and another do its work: a thread that nobody knows gets the lane whose next request it asks for.
//!
//! Not for: whether an entry may be served, which the pool checks.

use std::ops::Range;

use super::Request;
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
}

/// Who a lane is in this process.
#[derive(Clone, Copy, Debug)]
struct Binding {
    of_plan: Lane,
    stream: Option<StreamId>,
    /// Nothing where all threads are one.
    thread: Option<u32>,
}

impl Binding {
    #[inline]
    fn is(&self, request: &Request) -> bool {
        self.stream == Some(request.stream) && (self.of_plan.role == 0 || self.thread == Some(request.thread))
    }
}

/// How far a lane has come.
#[derive(Debug)]
pub(super) struct Progress {
    /// Its entries.
    pub(super) entries: Range<u32>,
    /// The first that comes again.
    pub(super) cycle_start: u32,
    /// The numbers of the first entry and of that one in the whole plan: what the lane begins with, and when.
    pub(super) begins: (u32, u32),
    pub(super) matcher: Matcher,
    pub(super) dynamic: Dynamic,
    /// The bytes of the pool that its entries have.
    pub(super) part: Range<u64>,
    /// Its last request that was not served where the plan has it.
    pub(super) displaced: Option<Displaced>,
}

impl Progress {
    /// The entry that is asked for next; `None` behind the end of a plan without a cycle.
    #[inline]
    pub(super) fn next(&self) -> Option<u32> {
        Some(self.matcher.cursor()).filter(|cursor| *cursor < self.entries.end)
    }

    /// The number in the whole plan of what it begins with, as long as it has not begun.
    fn begins(&self) -> u32 {
        let (once, again) = self.begins;
        if self.matcher.cursor() < self.cycle_start { once } else { again }
    }

    /// The number of that among the lane's own.
    pub(super) fn own_next(&self) -> u32 {
        self.matcher.cursor() - self.entries.start
    }
}

impl Lanes {
    pub(super) fn new(lanes: impl Iterator<Item = (Lane, Progress)>) -> Lanes {
        let binding = |of_plan: Lane| Binding {
            of_plan,
            stream: Some(StreamId::DEFAULT).filter(|default| *default == of_plan.stream),
            thread: None,
        };
        let (bindings, all): (Vec<Binding>, Vec<Progress>) = lanes.map(|(of_plan, of)| (binding(of_plan), of)).unzip();
        Lanes { bindings: bindings.into(), all: all.into() }
    }

    /// The lane of a request, if that is known.
    #[inline]
    pub(super) fn of(&self, request: &Request) -> Option<usize> {
        self.bindings.iter().position(|binding| binding.is(request))
    }

    /// Lanes of which the first request may be this, of one that belongs to none yet; what the plan has begin first comes first.
    pub(super) fn that_may_begin(&self, request: &Request) -> Vec<usize> {
        let is_new = |binding: &Binding| binding.of_plan.role == 0 || binding.thread.is_none();
        let lanes = (0..self.all.len()).filter(|lane| self.may_be(*lane, request) && is_new(&self.bindings[*lane]));
        let mut lanes: Vec<usize> = lanes.collect();
        lanes.sort_by_key(|lane| self.all[*lane].begins());
        lanes
    }

    /// Lanes of its stream that another thread has, which may have ended.
    pub(super) fn that_may_go_on(&self, request: &Request) -> Vec<usize> {
        let is_taken = |binding: &Binding| binding.of_plan.role > 0 && binding.thread.is_some();
        (0..self.all.len()).filter(|lane| self.may_be(*lane, request) && is_taken(&self.bindings[*lane])).collect()
    }

    /// The lane's stream may be that of the request.
    fn may_be(&self, lane: usize, request: &Request) -> bool {
        match self.bindings[lane].stream {
            Some(bound) => bound == request.stream,
            None => {
                let is_known = self.bindings.iter().any(|binding| binding.stream == Some(request.stream));
                request.stream != StreamId::DEFAULT && !is_known
            }
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
        self.bindings[lane].stream.unwrap_or(StreamId::DEFAULT)
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
