//! What a runtime holds and has done, in figures of one moment.

use super::{Counter, Installed, PrivateUse, Runtime};
use crate::pool::pages::{PageCounts, PageUse};
use crate::pool::planned::PlannedCounts;
use crate::units::Bytes;

/// What the runtime holds and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuntimeStats {
    /// Bytes of all chunks: static pools, page pool and private pools.
    pub held: Bytes,
    /// Most of them at one time.
    pub peak_held: Bytes,
    /// Bytes of live allocations, as asked for.
    pub live: Bytes,
    /// Most of them at one time.
    pub peak_live: Bytes,
    /// Bytes of the static pool.
    pub static_pool: Bytes,
    /// Live allocations.
    pub live_allocations: u64,
    /// Requests and bytes served by each pool.
    pub served: ServedCounts,
    /// The plan's side of it.
    pub planned: PlannedCounts,
    /// The page pool's side of it.
    pub pages: PageCounts,
    /// What the page pool holds.
    pub page_use: PageUse,
    /// What private pools hold.
    pub private_use: PrivateUse,
    /// Requests that failed.
    pub failures: u64,
}

/// Requests served, by pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServedCounts {
    /// At the address of the plan.
    pub planned: u64,
    /// In a space that the plan leaves idle.
    pub reuse: u64,
    /// By the page pool.
    pub pool: u64,
    /// Bytes of each, as asked for.
    pub planned_bytes: Bytes,
    /// See above.
    pub reuse_bytes: Bytes,
    /// See above.
    pub pool_bytes: Bytes,
}

impl Runtime {
    /// What it holds and has done.
    pub fn stats(&self) -> RuntimeStats {
        let pools = self.lock();
        let count = |counter| self.counters.get(counter);
        let bytes = |counter| Bytes::new(self.counters.get(counter));
        RuntimeStats {
            held: pools.held(),
            peak_held: bytes(Counter::PeakHeldBytes),
            live: bytes(Counter::LiveBytes),
            peak_live: bytes(Counter::PeakLiveBytes),
            static_pool: pools.planned.as_ref().map_or(Bytes::ZERO, Installed::held),
            live_allocations: pools.live_allocations(),
            served: ServedCounts {
                planned: count(Counter::RequestsPlanned),
                reuse: count(Counter::RequestsReuse),
                pool: count(Counter::RequestsPool),
                planned_bytes: bytes(Counter::BytesPlanned),
                reuse_bytes: bytes(Counter::BytesReuse),
                pool_bytes: bytes(Counter::BytesPool),
            },
            planned: pools.planned_counts(),
            pages: pools.pages.counts(),
            page_use: pools.pages.usage(),
            private_use: pools.private.usage(),
            failures: count(Counter::Failures),
        }
    }
}
