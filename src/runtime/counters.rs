//! The figures that a runtime keeps for others to see: plain numbers in memory that may be shared with the daemon.
//!
//! Each has one writer: the runtime that holds its pools' lock, and for overdue calls the session's background thread. Anybody may read at any time and sees each number whole, though not all of one
//! moment. Nobody decides anything by them.

use crate::limits::COUNTERS_MAX;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::Bytes;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $at:literal, $text:literal;)*) => {
        /// What is counted. The number is its place in a stats page and never changes its meaning; new ones come behind.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(usize)]
        pub enum Counter {
            $($(#[$doc])* $name = $at,)*
        }

        impl Counter {
            /// All of them with their names.
            pub const ALL: &'static [(&'static str, Counter)] = &[$(($text, Counter::$name),)*];
        }
    };
}

counters! {
    /// Requests served at the address of the plan.
    RequestsPlanned = 0, "requests_planned";
    /// Requests served by the page pool.
    RequestsPool = 1, "requests_pool";
    /// Always 0: what the small pool served, which was a pool of its own.
    RequestsSmall = 2, "requests_small";
    /// Bytes of planned requests, as asked for.
    BytesPlanned = 3, "bytes_planned";
    /// Bytes of those.
    BytesPool = 4, "bytes_pool";
    /// Always 0, as `requests_small` is.
    BytesSmall = 5, "bytes_small";
    /// Bytes of live allocations, as asked for.
    LiveBytes = 6, "live_bytes";
    /// Most live bytes, as long as the process has not begun to count anew. So it is with every peak.
    PeakLiveBytes = 7, "peak_live_bytes";
    /// Bytes of all chunks.
    HeldBytes = 8, "held_bytes";
    /// Most bytes held.
    PeakHeldBytes = 9, "peak_held_bytes";
    /// Requests that failed.
    Failures = 10, "failures";
    /// Iterations marked.
    Iterations = 11, "iterations";
    /// Idle bytes that can be stitched, when last looked at: when something was grown, stitched or given back, at the end of an iteration, and every some thousand operations.
    StitchableBytes = 12, "stitchable_bytes";
    /// The largest contiguous idle run, when last looked at.
    ContiguousBytes = 13, "contiguous_bytes";
    /// Planned requests served late.
    DeviationsLate = 14, "deviations_late";
    /// Planned requests whose place was taken.
    DeviationsBlocked = 15, "deviations_blocked";
    /// Requests that the plan does not have.
    DeviationsUnplanned = 16, "deviations_unplanned";
    /// Planned requests that nobody made.
    DeviationsSkipped = 17, "deviations_skipped";
    /// Bytes served by stitching where no idle block was large enough.
    StitchedBytes = 18, "stitched_bytes";
    /// Chunks that are mapped, each as often as it is.
    Mappings = 19, "mappings";
    /// Bytes of addresses that are reserved.
    AddressBytes = 20, "address_bytes";
    /// Driver calls that have not come back for longer than they should take, now.
    OverdueCalls = 21, "overdue_calls";
    /// Requests served in a space that the plan leaves idle.
    RequestsReuse = 22, "requests_reuse";
    /// Bytes of those.
    BytesReuse = 23, "bytes_reuse";
    /// Planned requests of another size.
    DeviationsResized = 24, "deviations_resized";
    /// Bytes that live allocations occupy.
    OccupiedBytes = 25, "occupied_bytes";
    /// Most occupied bytes.
    PeakOccupiedBytes = 26, "peak_occupied_bytes";
    /// All bytes that allocations have occupied, those among them that are gone.
    SumOccupiedBytes = 27, "sum_occupied_bytes";
    /// Plans that came while the job ran, and were installed.
    PlansInstalled = 28, "plans_installed";
    /// Those that were not: there was no memory for them.
    PlansRefused = 29, "plans_refused";
    /// Iterations that began with their peak guaranteed.
    IterationsAdmitted = 30, "iterations_admitted";
    /// Those that began without, though it was asked for: it could not be had in time.
    IterationsRefused = 31, "iterations_refused";
    /// Microseconds that admissions were waited for.
    AdmissionMicros = 32, "admission_us";
    /// Of the requests that failed, those for which as much lay idle in whole chunks: stitching should have served them.
    FailuresFragmented = 33, "failures_fragmented";
    /// Those that the process's own limit was in the way of.
    FailuresLimit = 34, "failures_limit";
    /// Those for which the driver could not do what it was asked.
    FailuresDriver = 35, "failures_driver";
    /// Those for which the daemon could not be asked, and those of memory that was asleep.
    FailuresUnavailable = 36, "failures_unavailable";
    /// Of the bytes served by stitching, those for which more could not be had: with a contiguous allocator the request would have failed.
    RescuedBytes = 37, "rescued_bytes";
}

impl Counter {
    /// Requests served, by who served them.
    pub const REQUESTS: [Counter; 3] = [Counter::RequestsPlanned, Counter::RequestsReuse, Counter::RequestsPool];
    /// Bytes of each.
    pub const BYTES: [Counter; 3] = [Counter::BytesPlanned, Counter::BytesReuse, Counter::BytesPool];
    /// What two runtimes have counted of this, together. The figures may be another process's word, and anything.
    pub fn both(self, one: u64, other: u64) -> u64 {
        match self {
            // What is contiguous in one is not in the next.
            Counter::ContiguousBytes => one.max(other),
            _ => one.saturating_add(other),
        }
    }

    /// Bytes of what is held now, which is not less than any of them.
    pub const OF_HELD: [Counter; 5] = [
        Counter::LiveBytes,
        Counter::HeldBytes,
        Counter::StitchableBytes,
        Counter::ContiguousBytes,
        Counter::OccupiedBytes,
    ];

    /// What there is now: nothing of it outlives its runtime.
    pub(super) const NOW: [Counter; 7] = [
        Counter::LiveBytes,
        Counter::HeldBytes,
        Counter::StitchableBytes,
        Counter::ContiguousBytes,
        Counter::Mappings,
        Counter::AddressBytes,
        Counter::OccupiedBytes,
    ];
    /// A request that the plan serves, and its bytes.
    pub(super) const PLANNED: (Counter, Counter) = (Counter::RequestsPlanned, Counter::BytesPlanned);
    /// The same of one that the static pool serves out of order.
    pub(super) const REUSED: (Counter, Counter) = (Counter::RequestsReuse, Counter::BytesReuse);
    /// The same of one that the page pool serves.
    pub(super) const POOL: (Counter, Counter) = (Counter::RequestsPool, Counter::BytesPool);
    /// Deviations from the plan, by kind.
    pub const DEVIATIONS: [Counter; 5] = [
        Counter::DeviationsLate,
        Counter::DeviationsBlocked,
        Counter::DeviationsUnplanned,
        Counter::DeviationsSkipped,
        Counter::DeviationsResized,
    ];
}

const _: () = assert!(Counter::ALL.len() <= COUNTERS_MAX);

/// The cells. They live as long as the process: in its memory, or in a page that it shares with the daemon.
#[derive(Clone, Copy, Debug)]
pub struct Counters(&'static [AtomicU64; COUNTERS_MAX]);

impl Counters {
    /// Cells of this process alone: 512 bytes that are never given back, one set per runtime.
    pub fn private() -> Counters {
        Counters(Box::leak(Box::new([const { AtomicU64::new(0) }; COUNTERS_MAX])))
    }

    /// Cells that somebody else keeps.
    pub fn at(cells: &'static [AtomicU64; COUNTERS_MAX]) -> Counters {
        Counters(cells)
    }

    /// Reads some, and adds them up.
    pub fn sum(self, counters: &[Counter]) -> u64 {
        counters.iter().map(|counter| self.get(*counter)).sum()
    }

    /// Reads one.
    pub fn get(self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    /// Writes how many driver calls do not come back: the one figure whose writer is not the runtime.
    pub fn set_overdue(self, count: u64) {
        self.set(Counter::OverdueCalls, count);
    }

    /// Writes one.
    #[inline]
    pub(super) fn set(self, counter: Counter, value: u64) {
        self.0[counter as usize].store(value, Ordering::Relaxed);
    }

    /// Adds to one. Not a read-modify-write: there is one writer.
    #[inline]
    pub(super) fn add(self, counter: Counter, value: u64) {
        self.set(counter, self.get(counter).wrapping_add(value));
    }

    /// Writes one if that makes it larger.
    #[inline]
    pub(super) fn raise(self, counter: Counter, value: u64) {
        if value > self.get(counter) {
            self.set(counter, value);
        }
    }

    /// A request was served.
    #[inline]
    pub(super) fn served(self, (requests, bytes): (Counter, Counter), served: Bytes, occupied: Bytes) {
        self.add(requests, 1);
        self.add(bytes, served.get());
        self.add(Counter::LiveBytes, served.get());
        self.raise(Counter::PeakLiveBytes, self.get(Counter::LiveBytes));
        self.add(Counter::SumOccupiedBytes, occupied.get());
        self.add(Counter::OccupiedBytes, occupied.get());
        self.raise(Counter::PeakOccupiedBytes, self.get(Counter::OccupiedBytes));
    }

    /// An allocation was taken back.
    #[inline]
    pub(super) fn freed(self, freed: Bytes, occupied: Bytes) {
        self.set(Counter::LiveBytes, self.get(Counter::LiveBytes).wrapping_sub(freed.get()));
        self.set(Counter::OccupiedBytes, self.get(Counter::OccupiedBytes).wrapping_sub(occupied.get()));
    }
}
