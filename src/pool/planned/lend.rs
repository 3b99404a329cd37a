//! Parts of the pool for a request that cannot have its place: what nobody has now and the plan leaves alone for long enough, wherever it lies. Whoever maps the memory of such parts side by side can serve
//! the request from them; until it is freed they are tenants here, though nobody is at these addresses.
//!
//! As in [`super::relocate`] everything that is live is looked at, and every entry that comes before the free.
//!
//! Not for: mapping, which is the runtime's.

use std::ops::Range;

use super::tenants::LENT;
use super::{PlannedPool, Request};
use crate::units::{AddressSpan, Bytes, PlanSpan, Span};

/// Entries that are looked at; what comes behind them is far enough.
const AHEAD_MAX: u32 = 1 << 14;
/// A request of which nothing is known is taken to be gone after so many entries.
const AHEAD_UNKNOWN: u32 = 64;
/// Parts that the plan wants before that are ranked by when, up to so many entries ahead.
const AHEAD_RANKED: u32 = 1024;

/// A part of the pool that nobody has now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lendable {
    /// Where it lies.
    pub part: PlanSpan,
    /// The plan sends nobody there before the request is freed.
    pub is_left_alone: bool,
    /// Entries until it does.
    pub next: u32,
}

/// Which of `parts` have bytes of a span. They lie in the order of their places and do not overlap.
pub fn overlapped(parts: &[PlanSpan], span: PlanSpan) -> Range<usize> {
    let first = parts.partition_point(|part| part.end() <= span.start());
    first..first + parts[first..].partition_point(|part| part.start() < span.end())
}

impl PlannedPool {
    /// Those of `parts` that are free now, and that may serve a request which was not served: no other
    /// lane's entries come there. `parts` lie in the order of their places and do not overlap. Nothing
    /// for a stream that the plan does not know, or that has requested nothing yet.
    pub fn lendable(&self, request: &Request, parts: &[PlanSpan]) -> Option<Vec<Lendable>> {
        // Behind the last lane's part the plan's own bytes are that lane's, too, unless another's detours are there; further on whoever asks knows whose they are.
        let lane = self.lanes.with_room(request)?;
        let own = &self.lanes[lane].part;
        let is_alone = self.lanes.count() == 1 || self.detours.is_empty();
        let is_last = is_alone && self.lanes.iter().all(|other| other.part.end <= own.end);
        let end = if is_last { self.plan_end } else { own.end };
        let is_own = |part: &PlanSpan| own.start <= part.start().get() && part.end().get() <= end;
        let may_have = |part: &PlanSpan| part.start().get() >= self.plan_end || is_own(part);
        let mut next: Vec<Option<u32>> = parts.iter().map(|part| may_have(part).then_some(u32::MAX)).collect();
        for taken in self.live_spans().chain(self.tenants.obstacles()) {
            next[overlapped(parts, taken)].fill(None);
        }
        let life = self.expected_life(lane, request).unwrap_or(AHEAD_UNKNOWN).min(AHEAD_MAX);
        for (span, ahead) in self.coming(lane).zip(0..life.max(AHEAD_RANKED)) {
            for next in next[overlapped(parts, span)].iter_mut().flatten() {
                *next = ahead.min(*next);
            }
        }
        let lendable = |(part, next): (&PlanSpan, Option<u32>)| {
            next.map(|next| Lendable { part: *part, is_left_alone: next >= life, next })
        };
        Some(parts.iter().zip(next).filter_map(lendable).collect())
    }

    /// A request at other addresses has these parts of the pool, which nobody had.
    pub fn lend(&mut self, parts: impl Iterator<Item = PlanSpan>) {
        for part in parts {
            self.settle(part, LENT);
        }
        self.counts.reused += 1;
    }

    /// A part that begins there is lent.
    pub fn is_lent(&self, part: PlanSpan) -> bool {
        self.tenants.is_lent(part.start())
    }

    /// Nobody whom the plan does not know has a byte of this part of the pool.
    pub fn is_clear(&self, part: PlanSpan) -> bool {
        self.tenants.is_clear(part)
    }

    /// Takes back what was lent.
    pub fn take_back(&mut self, part: PlanSpan) {
        if self.tenants.remove_lent(part.start()) {
            self.vacate_place(part.start());
        }
    }

    /// Bytes of the pool without what it was extended by.
    pub fn plan_len(&self) -> Bytes {
        Bytes::new(self.plan_end)
    }

    /// Makes the pool longer: there is memory behind its end that no entry has.
    pub fn extend(&mut self, len: Bytes) {
        let longer = self.span.len().checked_add(len).and_then(|len| Span::new(self.span.start(), len));
        self.resize(longer.expect("the addresses are there"));
    }

    /// Makes the pool shorter, by what [`PlannedPool::extend`] made it longer; nobody is there.
    pub fn shorten(&mut self, len: Bytes) {
        let shorter = Span::new(self.span.start(), self.span.len() - len);
        self.resize(shorter.expect("the addresses are there"));
    }

    fn resize(&mut self, span: AddressSpan) {
        self.span = span;
        self.tenants.resize(span.len());
        // They are counted up to the end.
        self.cells = None;
    }
}
