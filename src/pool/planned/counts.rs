//! How well a job follows its plan: what the planned pool counts of the requests that it gets.

/// What the pool has served and what it has not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PlannedCounts {
    /// Requests served at the cursor.
    pub hits: u64,
    /// Requests served for an entry that the cursor had skipped.
    pub late: u64,
    /// Requests that agreed with an entry whose span was not free.
    pub blocked: u64,
    /// Requests that agree with no entry near the cursor.
    pub unplanned: u64,
    /// Entries that the cursor went over without a request, or back over at a rewind to the start.
    pub skipped: u64,
    /// Times that the cursor was set again, far away.
    pub resynchronised: u64,
    /// Requests for an entry with another size.
    pub resized: u64,
    /// Requests served where the plan leaves bytes idle: dynamic ones, and those whose place was
    /// taken or too small.
    pub reused: u64,
    /// Requests served where a detour has them.
    pub detoured: u64,
}

impl std::ops::Add for PlannedCounts {
    type Output = PlannedCounts;

    fn add(self, other: PlannedCounts) -> PlannedCounts {
        PlannedCounts {
            hits: self.hits + other.hits,
            late: self.late + other.late,
            blocked: self.blocked + other.blocked,
            unplanned: self.unplanned + other.unplanned,
            skipped: self.skipped + other.skipped,
            resynchronised: self.resynchronised + other.resynchronised,
            resized: self.resized + other.resized,
            reused: self.reused + other.reused,
            detoured: self.detoured + other.detoured,
        }
    }
}

impl PlannedCounts {
    /// Requests that the plan did not serve although it might have, and entries without a request.
    pub fn deviations(&self) -> u64 {
        self.late + self.blocked + self.unplanned + self.skipped + self.resized
    }
}
