//! Where in one lane of the plan the job is.
//!
//! The cursor stands at the entry that should be asked for next. When something else is asked for:
//!
//! * it may be an entry that was *missed*: skipped over a moment ago. Two of those in a row, one after the other in the plan, show that the skip was
//!   wrong, and the cursor goes back;
//! * it may be an entry a little *ahead*: the cursor skips to it, and what lies between is missed. Further ahead two in a row must agree: one may be a request that nobody planned and that is like a later one;
//! * after a few requests that are neither, the last four are looked up in the whole lane, and the cursor goes to the nearest place where they are, ahead or back;
//! * else the plan does not have it, and the cursor waits.
//!
//! So one request too many, too few, or out of turn costs itself and nothing that follows.
//!
//! Not for: whether an entry may be served, which the pool checks.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::{Planned, Request};
use crate::rng::mix;
use crate::trace::ContextKey;

/// How far ahead a request is looked for, and how many missed entries are remembered, when its context is known.
pub(super) const WINDOW: usize = 64;
/// The same for a request without context: sizes alone agree by chance too often. And how far one request alone moves the cursor.
pub(super) const NEAR: usize = 8;
/// Requests in a row by which a place in the plan is recognised.
const GRAM: usize = 4;

/// Where the job seems to be, if not at the cursor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Again {
    /// At an entry that comes.
    Ahead(u32),
    /// At one that the cursor went over in this pass.
    Back(u32),
}

#[derive(Debug)]
pub(super) struct Matcher {
    cursor: u32,
    /// How often it went over an entry, less where it stands.
    passed_before: u64,
    /// Passes of the cycle that the cursor has left behind: how far it has come says nothing of that, as it goes back now and then.
    ended: u64,
    /// The same at the last mark, if there was one.
    ended_at_mark: u64,
    is_marked: bool,
    /// The lane's entries are those from here on, and before there.
    first: u32,
    end: u32,
    cycle_start: u32,
    missed: VecDeque<u32>,
    /// The entry that was missed and served last, if nothing was served in order since.
    last_late: Option<u32>,
    /// The last requests that did not agree with the cursor, in a row.
    strays: VecDeque<Request>,
    /// How many there were in a row.
    strayed: u32,
    /// One of the two is something: the one look at every request.
    is_astray: bool,
    /// Where each run of sizes ends, by its hash.
    grams: HashMap<u64, Vec<u32>>,
}

impl Matcher {
    /// That of the entries `of_lane`.
    pub(super) fn new(entries: &[Planned], of_lane: Range<u32>, cycle_start: u32) -> Matcher {
        let mut grams: HashMap<u64, Vec<u32>> = HashMap::new();
        let own = &entries[of_lane.start as usize..of_lane.end as usize];
        for (at, run) in own.windows(GRAM).enumerate() {
            let hash = gram_hash(run.iter().map(|entry| entry.bytes.get()));
            grams.entry(hash).or_default().push(of_lane.start + (at + GRAM - 1) as u32);
        }
        Matcher {
            cursor: of_lane.start,
            passed_before: 0,
            ended: 0,
            ended_at_mark: 0,
            is_marked: false,
            first: of_lane.start,
            end: of_lane.end,
            cycle_start,
            missed: VecDeque::new(),
            last_late: None,
            strays: VecDeque::new(),
            strayed: 0,
            is_astray: false,
            grams,
        }
    }

    /// The entries of the lane.
    #[inline]
    pub(super) fn entries(&self) -> Range<u32> {
        self.first..self.end
    }

    /// The first of those that comes again.
    pub(super) fn cycle_start(&self) -> u32 {
        self.cycle_start
    }

    #[inline]
    pub(super) fn cursor(&self) -> u32 {
        self.cursor
    }

    /// How often the cursor went over an entry.
    pub(super) fn passed(&self) -> u64 {
        self.passed_before + u64::from(self.cursor - self.first)
    }

    /// A pass of the cycle has ended, and the cursor stands in one behind it.
    pub(super) fn has_ended_pass(&self) -> bool {
        self.ended > 0
    }

    /// An iteration ends, and the job has asked for more than the plan's has: a pass has ended since the last mark, and the cursor is nearer to where the next one began than to its end.
    pub(super) fn is_past_mark(&self) -> bool {
        self.has_ended_since_mark() && !self.at_cycle_start() && self.cursor - self.cycle_start < self.end - self.cursor
    }

    fn has_ended_since_mark(&self) -> bool {
        self.ended_at_mark < self.ended
    }

    /// A mark is due, as the cursor has hardly begun another pass, and what comes is more of the iteration that has ended: most of the next one is not left out for it. A job that marks no more comes by there with each iteration, or
    /// has asked for a whole one in vain.
    pub(super) fn expects_mark(&self) -> bool {
        let is_due = self.is_marked && self.has_ended_since_mark();
        is_due && self.cursor - self.cycle_start < NEAR as u32 && self.strayed < self.end - self.cycle_start
    }

    fn half_cycle(&self) -> u32 {
        (self.end - self.cycle_start) / 2
    }

    /// An iteration has ended, and the cursor stands where the next begins.
    pub(super) fn note_mark(&mut self) {
        self.ended_at_mark = self.ended;
        self.is_marked = true;
    }

    pub(super) fn at_cycle_start(&self) -> bool {
        self.cursor == self.cycle_start
    }

    /// The entry behind `entry`. Without a cycle the plan is over behind its last one.
    pub(super) fn next(&self, entry: u32) -> u32 {
        behind(entry, self.end, self.cycle_start)
    }

    /// Moves the cursor on by one.
    #[inline]
    fn advance(&mut self) {
        self.cursor += 1;
        if self.cursor >= self.end && self.cycle_start < self.end {
            self.cursor = self.cycle_start;
            self.passed_before += u64::from(self.end - self.cycle_start);
            self.ended += 1;
            // From here on [`Matcher::since`] would not see all that came after an entry of the prologue.
            self.missed.retain(|entry| *entry >= self.cycle_start);
        }
    }

    /// The entry at the cursor was asked for.
    #[inline]
    pub(super) fn step(&mut self) {
        self.advance();
        self.found();
    }

    /// What was asked for is known, and where it comes, though it is no entry.
    #[inline]
    pub(super) fn found(&mut self) {
        if self.is_astray {
            self.forget_strays();
        }
    }

    /// Takes back that the cursor went over `entry` just now.
    pub(super) fn step_back(&mut self, entry: u32) {
        // At the last of a pass it is further on, or where it was if that is the only one.
        let was_last = entry >= self.cursor;
        self.go_back_to(entry, self.passed() - 1, was_last);
    }

    /// The cursor goes back, perhaps from behind the end of a pass, and has `passed` so many.
    fn go_back_to(&mut self, entry: u32, passed: u64, is_in_pass_before: bool) {
        self.ended = self.ended.saturating_sub(is_in_pass_before.into());
        self.cursor = entry;
        self.passed_before = passed - u64::from(entry - self.first);
    }

    fn forget_strays(&mut self) {
        self.is_astray = false;
        self.last_late = None;
        self.strays.clear();
        self.strayed = 0;
    }

    /// The entry at the cursor was not asked for.
    pub(super) fn skip(&mut self) {
        if self.missed.len() == WINDOW {
            self.missed.pop_front();
        }
        self.missed.push_back(self.cursor);
        self.advance();
    }

    /// A request came that does not agree with the cursor.
    pub(super) fn note(&mut self, request: &Request) {
        if self.strays.len() == GRAM {
            self.strays.pop_front();
        }
        self.strays.push_back(*request);
        self.strayed = self.strayed.saturating_add(1);
        self.is_astray = true;
    }

    /// The missed entry that agrees with the request: the one right behind the last, else the oldest.
    pub(super) fn find_missed(&self, agrees: impl Fn(u32) -> bool) -> Option<u32> {
        let following = self.last_late.map(|last| self.next(last));
        let at = following
            .and_then(|next| self.missed.iter().position(|entry| *entry == next))
            .filter(|at| agrees(self.missed[*at]))
            .or_else(|| self.missed.iter().position(|entry| agrees(*entry)))?;
        Some(self.missed[at])
    }

    /// A missed entry was asked for after all.
    pub(super) fn forget_missed(&mut self, entry: u32) {
        self.missed.retain(|missed| *missed != entry);
    }

    /// Entries from behind the cursor on, as far as it makes sense for this request.
    pub(super) fn look_ahead(&self, request: &Request) -> impl Iterator<Item = u32> + use<> {
        let window = if request.context == ContextKey::UNKNOWN { NEAR } else { WINDOW };
        let (cursor, end, cycle_start) = (self.cursor, self.end, self.cycle_start);
        let next = move |entry| behind(entry, end, cycle_start);
        std::iter::successors(Some(next(cursor)), move |entry| Some(next(*entry)))
            .take(window)
            .take_while(move |entry| *entry < end && *entry != cursor)
    }

    /// The stray before the last.
    pub(super) fn stray_before(&self) -> Option<&Request> {
        self.strays.len().checked_sub(2).map(|at| &self.strays[at])
    }

    /// The place in the whole lane that the last strays agree with, the nearest to the cursor: where the last of them is.
    pub(super) fn find_again(&self, agrees: impl Fn(u32, &Request) -> bool) -> Option<Again> {
        if self.strays.len() < GRAM {
            return None;
        }
        let hash = gram_hash(self.strays.iter().map(|request| request.bytes.get()));
        let fits = |end: &&u32| {
            let start = **end + 1 - GRAM as u32;
            (start..).zip(&self.strays).all(|(entry, request)| agrees(entry, request))
        };
        let ends = self.grams.get(&hash)?;
        let behind = ends.partition_point(|end| *end <= self.cursor);
        // The prologue comes once: from inside the cycle there is no way back to it. Nor past where the pass began: the last one's entries are the next one's.
        let first = if self.cursor >= self.cycle_start { self.cycle_start } else { self.first };
        let around = ends[..behind].iter().filter(|end| **end >= self.cycle_start && **end != self.cursor);
        let ahead = ends[behind..].iter().chain(around).find(fits).copied();
        let ahead = ahead.and_then(|end| Some((self.distance(self.cursor, end)?, Again::Ahead(end))));
        let ahead = ahead.filter(|(distance, _)| !self.expects_mark() || *distance < self.half_cycle());
        let back = ends[..behind].iter().rev().filter(|end| **end != self.cursor).take_while(|end| **end > first);
        let back = { back }.find(fits).map(|end| (self.cursor - end, Again::Back(*end)));
        ahead.into_iter().chain(back).min_by_key(|(distance, _)| *distance).map(|(_, again)| again)
    }

    /// Entries from `from` on before `to` comes; `None` if it never does.
    pub(super) fn distance(&self, from: u32, to: u32) -> Option<u32> {
        let around = || {
            let is_in_cycle = self.cycle_start < self.end && to >= self.cycle_start;
            is_in_cycle.then(|| self.end - from + (to - self.cycle_start))
        };
        to.checked_sub(from).or_else(around)
    }

    /// Entries behind `entry` up to the cursor, which were passed since it was missed.
    pub(super) fn since(&self, entry: u32) -> impl Iterator<Item = u32> + use<> {
        let (cursor, end, cycle_start) = (self.cursor, self.end, self.cycle_start);
        let next = move |entry| behind(entry, end, cycle_start);
        std::iter::successors(Some(next(entry)), move |entry| Some(next(*entry)))
            .take(end as usize)
            .take_while(move |entry| *entry != cursor && *entry < end)
    }

    /// `entry` was missed and is served now. True when the one before it was, too, so that the job seems to be there and not at the cursor.
    pub(super) fn is_behind(&mut self, entry: u32) -> bool {
        let follows = self.last_late.is_some_and(|last| self.next(last) == entry);
        self.last_late = Some(entry);
        self.is_astray = true;
        follows
    }

    /// The cursor goes back to right behind `entry`; nothing from there on was missed.
    pub(super) fn rewind_behind(&mut self, entry: u32) {
        let next = self.next(entry);
        let ahead = self.distance(next, self.cursor);
        let missed = std::mem::take(&mut self.missed);
        self.missed = missed.into_iter().filter(|missed| self.distance(next, *missed) >= ahead).collect();
        self.go_back_to(next, self.passed(), next > self.cursor);
        self.forget_strays();
    }
}

fn behind(entry: u32, end: u32, cycle_start: u32) -> u32 {
    if entry + 1 >= end && cycle_start < end { cycle_start } else { entry + 1 }
}

fn gram_hash(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, |hash, size| mix(hash ^ size))
}
