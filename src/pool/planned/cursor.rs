//! Moves of a lane's cursor other than one step: over entries without a request, back behind an
//! entry, and to the start of the cycle at a mark.

use super::{PlannedPool, matcher};

impl PlannedPool {
    /// An iteration ends: the next request is the first of the cycle.
    pub fn mark_iteration(&mut self) {
        self.lanes.note_mark();
        for number in 0..self.lanes.count() {
            self.break_off_detour(number);
            let lane = &mut self.lanes[number];
            lane.dynamic.begin_cycle();
            let (cursor, cycle_start) = (lane.matcher.cursor(), lane.matcher.cycle_start());
            if cycle_start == lane.matcher.entries().end {
                continue;
            }
            if self.detours.lead(cursor, cycle_start) {
                self.go_over_to(number, cycle_start);
            } else if lane.matcher.is_past_mark() {
                self.rewind_to_start(number);
            } else {
                self.skip_to(cycle_start);
            }
            self.lanes[number].matcher.note_mark();
        }
    }

    /// The cursor goes over the entry at which it stands.
    pub(super) fn skip(&mut self, entry: u32) {
        let planned = self.entries[entry as usize];
        self.lanes[planned.lane as usize].matcher.skip();
        self.passed_unserved += 1;
        self.expire(entry, &planned);
    }

    /// Moves the cursor to `entry`, over all entries between, none of which was requested.
    pub(super) fn skip_to(&mut self, entry: u32) {
        let skipped = self.go_on_to(entry);
        self.counts.skipped += skipped;
        self.counts.resynchronised += u64::from(skipped > matcher::WINDOW as u64);
    }

    /// Moves the cursor to `entry`, and says over how many others.
    pub(super) fn go_on_to(&mut self, entry: u32) -> u64 {
        let lane = self.lane_of(entry);
        let mut over = 0;
        while let Some(next) = self.lanes[lane].next().filter(|next| *next != entry) {
            self.skip(next);
            over += 1;
        }
        over
    }

    /// The job is not where the cursor is but just behind `entry`: the cursor goes back, and what
    /// was served ahead of it is no longer orderly.
    pub(super) fn rewind_behind(&mut self, entry: u32) {
        let lane = self.lane_of(entry);
        self.make_tenants(self.lanes[lane].matcher.since(entry).collect());
        self.lanes[lane].matcher.rewind_behind(entry);
    }

    /// The job has requested more than an iteration has, and the surplus was like the start of the
    /// next one: the cursor goes back to that start.
    fn rewind_to_start(&mut self, lane: usize) {
        let matcher = &self.lanes[lane].matcher;
        let last = matcher.entries().end - 1;
        self.counts.skipped += matcher.since(last).count() as u64;
        self.rewind_behind(last);
    }
}
