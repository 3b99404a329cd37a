//! The recording that a plan is made of, and when there is enough of it.
//!
//! With marks that is when two whole iterations are there: one that repeats, and one before it that
//! says what varies and where things are freed. Marked iterations are believed, however long they are.
//! Where the two differ, as a first step does from others, the recording goes on.
//!
//! Without marks the recording is searched for what repeats, each time that it has doubled. A job that
//! says in which context its requests are made marks its iterations, too: there a repetition without
//! marks is a micro-batch, and the search waits until the recording is full. While a plan is followed
//! iterations are taken out one by one.
//!
//! Not for: planning.
//!
//! Invariant: it takes no more events of memory than there is room for, whatever the job does.

use std::collections::{BTreeSet, HashMap};

use crate::ids::StreamId;
use crate::limits;
use crate::plan::DynamicModules;
use crate::record::{self, Collected, Recorder};
use crate::runtime::{Counter, Runtime, TapNumber};
use crate::trace::period::{self, Period};
use crate::trace::{Context, Event, EventKind, Trace, live_after};
use crate::units::{AddressSpan, Bytes, DeviceAddress};

/// A recording under way.
#[derive(Debug)]
pub(super) struct Recorded {
    recorder: Recorder<Collected>,
    tap: TapNumber,
    /// Events that were looked through for marks, and the marks among them.
    seen: usize,
    marks: u32,
    /// As many events as there were when it was last looked for what repeats.
    searched: usize,
    is_later: bool,
    /// Whole iterations that are wanted.
    wanted: u32,
    /// The last that was compared with the one before, and how many in a row up to that repeat the one before.
    compared: u32,
    alike: u32,
    /// Requests name their contexts, so marks will come.
    has_contexts: bool,
    /// Bytes that were live when it began.
    live_at_begin: Bytes,
    /// What was live when it began.
    began_with: BTreeSet<DeviceAddress>,
}

/// A live allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alive {
    /// Its id in the recording, if it came during that.
    pub(super) id: Option<u64>,
    /// What it has of the addresses in which a plan may come to lie.
    pub(super) span: AddressSpan,
    /// It begins there.
    pub(super) is_start: bool,
}

/// Why a recording goes no further.
#[derive(Debug)]
pub(super) enum Ended {
    /// There are whole iterations, by their marks.
    Marked,
    /// There are whole iterations, by what repeats.
    Repeats(Period),
    /// It is as long as it may be, and nothing repeats.
    NoPeriod,
    /// It lacks events.
    Torn,
}

/// Fewer events are not looked through for what repeats: a mark may come, and what repeats before the first of them are the micro-batches of an iteration.
const SEARCHED_MIN: usize = 1 << 16;
/// An iteration does not repeat the one before where more than one request is new and one in so many:
/// the next would differ as much, and a plan that is left in each iteration takes more memory than none.
const NEW_PART: u32 = 256;
/// Whole iterations that are wanted at first.
const WHOLE: u32 = 2;

impl Recorded {
    /// Begins it: `is_later` in the middle of the job, which is in the middle of an iteration.
    pub(super) fn begin(runtime: &Runtime, is_later: bool, events_max: usize) -> Recorded {
        let sink = Collected::up_to(events_max);
        let (tap, recorder) = record::begin(runtime.device().id().0, sink, limits::RECORD_AHEAD_MAX);
        let tap = runtime.record_into(tap);
        let live_at_begin = Bytes::new(runtime.counters().get(Counter::LiveBytes));
        let began_with = if is_later {
            runtime.live_spans().into_iter().map(|(address, _)| address).collect()
        } else {
            BTreeSet::new()
        };
        Recorded {
            began_with,
            recorder,
            tap,
            seen: 0,
            marks: 0,
            searched: SEARCHED_MIN / 2,
            is_later,
            wanted: WHOLE,
            compared: 0,
            alike: 0,
            has_contexts: false,
            live_at_begin,
        }
    }

    /// Bytes that are live where an iteration of its trace begins. What was freed of the time before is not
    /// known, so this may be too much, which is the safe side.
    pub(super) fn live_before(&self, trace: &Trace, iteration: u32) -> Bytes {
        self.live_at_begin.saturating_add(live_before(trace, iteration))
    }

    /// What there is so far.
    pub(super) fn trace(&self) -> &Trace {
        self.recorder.sink().trace()
    }

    /// Iterations that have ended in it.
    pub(super) fn marks(&self) -> u32 {
        self.marks
    }

    /// It has the first iteration of the job from its beginning to its mark.
    pub(super) fn has_first_iteration(&self) -> bool {
        !self.is_later && self.marks > 0
    }

    /// Takes what has come, and says whether that is all that is wanted.
    pub(super) fn look(&mut self) -> Option<Ended> {
        let goes_on = self.recorder.drain(limits::RECORD_AHEAD_MAX).goes_on;
        if self.recorder.remarks().dropped > 0 {
            return Some(Ended::Torn);
        }
        let events = &self.trace().events;
        let (count, news) = (events.len(), &events[self.seen..]);
        let marks = news.iter().filter(|event| event.kind == EventKind::Mark).count();
        let has_contexts = news.iter().any(|event| event.context != Context::default());
        self.has_contexts |= has_contexts;
        self.marks += marks as u32;
        self.seen = count;
        if self.is_later && self.marks > 0 {
            self.drop_part();
        }
        if self.whole() >= self.wanted {
            return Some(Ended::Marked);
        }
        if self.marks == 0
            && (!self.has_contexts && self.seen >= 2 * self.searched || !goes_on)
            && let Some(period) = self.search()
        {
            return Some(Ended::Repeats(period));
        }
        (!goes_on).then_some(Ended::NoPeriod)
    }

    /// What is later begins with a part of an iteration, which says nothing of a whole one.
    fn drop_part(&mut self) {
        let count = self.trace().events.partition_point(|event| event.iteration == 0);
        if count > 0 {
            let part = self.recorder.sink_mut().take_first(count);
            let live = live_after(&part.events);
            self.live_at_begin = self.live_at_begin.saturating_add(live);
            self.seen = self.trace().events.len();
        }
    }

    /// Whole iterations that it has.
    fn whole(&self) -> u32 {
        self.marks.saturating_sub(u32::from(self.is_later))
    }

    /// Compares the iterations that have ended since with those before them, and says how many differ.
    pub(super) fn compare(&mut self) -> u32 {
        let last = self.marks.saturating_sub(1);
        let from = self.compared.max(u32::from(self.is_later)) + 1;
        let mut differ = 0;
        for iteration in from..=last {
            let is_alike = repeats(self.trace(), iteration);
            self.alike = if is_alike { self.alike + 1 } else { 0 };
            differ += u32::from(!is_alike);
        }
        self.compared = last;
        differ
    }

    /// So many iterations in a row, up to the last whole one, repeat the one before.
    pub(super) fn alike(&self) -> u32 {
        self.alike
    }

    /// One more iteration is wanted. False where there is no room for it.
    pub(super) fn go_on(&mut self, events_max: usize) -> bool {
        self.wanted = self.whole() + 1;
        self.seen / self.whole().max(1) as usize <= events_max.saturating_sub(self.seen)
    }

    /// The iterations that are alike, with what has come since; which of them is planned, and what is live
    /// where that begins. What came before those says nothing of them.
    pub(super) fn last_alike(&self) -> (Trace, u32, Bytes) {
        let (all, last) = (self.trace(), self.marks.saturating_sub(1));
        let first = last.saturating_sub(self.alike);
        let mut events = all.events[all.events.partition_point(|event| event.iteration < first)..].to_vec();
        events.iter_mut().for_each(|event| event.iteration = event.iteration.saturating_sub(first));
        (Trace { events, modules: all.modules.clone() }, last - first, self.live_before(all, last))
    }

    /// Takes what has come, for a recording that goes on beside a plan. False once nothing more can
    /// come: then it lacks events, or is as long as it may be.
    pub(super) fn keep_up(&mut self) -> bool {
        self.recorder.drain(limits::RECORD_AHEAD_MAX).goes_on && self.recorder.remarks().dropped == 0
    }

    /// Takes out the iterations that marks have ended since; of one that was going on when it began there is no whole. And whether more may come: not where it lacks events or is as long as it may be.
    pub(super) fn ended(&mut self) -> (Vec<Trace>, bool) {
        let goes_on = self.recorder.drain(limits::RECORD_AHEAD_MAX).goes_on && self.recorder.remarks().dropped == 0;
        let is_mark = |event: &Event| event.kind == EventKind::Mark;
        let last = self.trace().events[self.seen..].iter().rposition(is_mark).map(|mark| self.seen + mark);
        let taken = last.map(|last| self.recorder.sink_mut().take_first(last + 1)).unwrap_or_default();
        self.seen = self.trace().events.len();
        let mut whole = Vec::new();
        for events in taken.events.split_inclusive(is_mark) {
            // What asks for nothing is no iteration.
            if self.marks > 0 && events.len() > 1 {
                whole.push(Trace { events: events.to_vec(), modules: taken.modules.clone() });
            }
            self.marks = self.marks.saturating_add(1);
        }
        (whole, goes_on)
    }

    /// What repeats, if that is there as often as is wanted.
    fn search(&mut self) -> Option<Period> {
        self.searched = self.seen;
        let period = period::find_job(self.trace())?;
        (period.starts.len() > WHOLE as usize).then_some(period)
    }

    /// The allocations that are live now: those that it has seen come, and those that it began with.
    pub(super) fn alive(&self, runtime: &Runtime) -> Vec<Alive> {
        let ids: HashMap<DeviceAddress, u64> = self.recorder.live().collect();
        let alive = |(address, span): (DeviceAddress, AddressSpan)| {
            let id = ids.get(&address).copied();
            let is_known = id.is_some() || self.began_with.contains(&address);
            is_known.then_some(Alive { id, span, is_start: address == span.start() })
        };
        runtime.live_spans().into_iter().filter_map(alive).collect()
    }

    /// No more is recorded.
    pub(super) fn stop(&self, runtime: &Runtime) {
        runtime.stop_recording(self.tap);
    }

    /// Ends it: with what has come since it was last looked.
    pub(super) fn end(self, runtime: &Runtime) -> Trace {
        self.stop(runtime);
        self.recorder.finish().0.into_trace()
    }
}

/// The same by what repeats: the last iteration may be cut.
pub(super) fn repeating(mut trace: Trace, period: &Period) -> (Trace, u32) {
    period::assign(&mut trace, period);
    let last = trace.iterations().saturating_sub(1);
    (trace, last.saturating_sub(1))
}

/// Nearly all requests of an iteration were made in the one before, with the same size and from the same
/// place of the job, in whatever order, and the other way round. Dynamic requests do not count, nor does what
/// the first iteration has alone: a first step makes gradients and an optimizer's states.
pub(super) fn repeats(trace: &Trace, iteration: u32) -> bool {
    let Some(before) = iteration.checked_sub(1) else { return true };
    let dynamic = DynamicModules::between(trace, before..=iteration);
    let is_static = |event: &Event| !event.is_dynamic && !dynamic.contains(&event.context);
    let requests = |of: u32| {
        let allocs = trace.events.iter().filter(move |event| event.iteration == of && is_static(event));
        allocs.filter(|event| event.kind == EventKind::Alloc).map(|event| (event.bytes, event.stream, event.context))
    };
    let mut left: HashMap<(Bytes, StreamId, Context), u32> = HashMap::new();
    requests(before).for_each(|request| *left.entry(request).or_default() += 1);
    let (mut all, mut new) = (0, 0);
    for request in requests(iteration) {
        all += 1;
        match left.get_mut(&request).filter(|count| **count > 0) {
            Some(count) => *count -= 1,
            None => new += 1,
        }
    }
    let gone = if before == 0 { 0 } else { left.values().sum() };
    all > 0 && new.max(gone) <= 1 + all / NEW_PART
}

/// Bytes that are live where an iteration begins, of what the trace has.
pub(super) fn live_before(trace: &Trace, iteration: u32) -> Bytes {
    let begins = trace.events.iter().position(|event| event.iteration >= iteration);
    live_after(&trace.events[..begins.unwrap_or(trace.events.len())])
}
