//! Leases of new chunks: how much is asked for, in which lengths, and when nothing is.
//!
//! A request that no pool serves lacks some bytes. While the process grows and frees next to nothing
//! (weights, optimizer states), each lease brings more than that, so 64 GiB of small requests are
//! some hundred leases: see [`PagePolicy::lease_len`](crate::pool::pages::PagePolicy::lease_len).
//!
//! Invariant: all chunks that a request lacks come, or none.

use std::sync::Arc;
use std::time::Duration;

use super::{Counter, Pools, Runtime, SourceError, Want, installed};
use crate::error::ErrorKind;
use crate::ladder::{self, Shape};
use crate::limits;
use crate::memory::Chunk;
use crate::units::Bytes;

/// After a refusal no lease is asked for during this time: a job under pressure stitches what it has.
const REFUSAL_HOLDS: Duration = Duration::from_millis(20);

/// A process that has grown by so much gets chunks as long as it wants until its memory ends: what
/// stays live leaves nothing of them unused.
const LONG_GROWTH: Bytes = Bytes::gib(4);

/// A growth ends where between two leases more than one request in so many was freed.
const FREED_PART: u64 = 8;

/// What the process has grown by while it freed next to nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Growth {
    /// What was leased for its requests.
    leased: Bytes,
    /// Requests served and freed until the last lease.
    served: u64,
    freed: u64,
}

impl Growth {
    /// Bytes that the process has grown by, now that it has served and freed so many requests.
    fn bytes(&mut self, served: u64, freed: u64) -> Bytes {
        let is_over = freed.saturating_sub(self.freed) * FREED_PART > served.saturating_sub(self.served);
        let leased = if is_over { Bytes::ZERO } else { self.leased };
        *self = Growth { leased, served, freed };
        leased
    }
}

impl Runtime {
    /// The source refuses: it is not asked again for a while.
    pub(super) fn note_refused(&self, pools: &mut Pools) {
        pools.refused_until = self.clock.now() + REFUSAL_HOLDS;
    }

    /// The source has refused a short time ago.
    pub(super) fn was_refused(&self, pools: &Pools) -> bool {
        self.clock.now() < pools.refused_until
    }

    /// What is leased for a request of `bytes` that lacks `lacks`, while memory can be had.
    pub(super) fn ahead(&self, bytes: Bytes, lacks: Bytes) -> Bytes {
        let mut pools = self.lock();
        let served: u64 = Counter::REQUESTS.into_iter().map(|counter| self.counters.get(counter)).sum();
        let freed = served.saturating_sub(pools.live_allocations());
        let grown = pools.growth.bytes(served, freed);
        let len = self.config.pages.lease_len(pools.held(), grown, lacks, bytes);
        let left = pools.left_with_plan().into_iter().chain(pools.left()).min();
        let len = left.map_or(len, |left| len.min(left)).max(lacks);
        pools.growth.leased = pools.growth.leased.saturating_add(len);
        len
    }

    /// Chunks of at least `len` bytes together, in as many leases as that takes: all of them, or none
    /// and why. Their length follows from what is held; the last may be shorter.
    pub(super) fn acquire(&self, len: Bytes, wait: Duration) -> Result<Vec<Arc<Chunk>>, SourceError> {
        // What a private pool has left may be what is asked for.
        self.give_back_spent();
        let (each, grows) = self.new_chunk_len(len)?;
        let most = each.checked_mul(limits::ACQUIRE_CHUNKS_MAX).unwrap_or(Bytes::LARGEST);
        let most = most.min(limits::ACQUIRE_BYTES_MAX);
        let shape = if grows && wait.is_zero() { Shape::Exactly(each) } else { Shape::Fitted(each) };
        let (mut chunks, mut left) = (Vec::new(), len);
        while left > Bytes::ZERO {
            let part = left.min(most);
            match self.source.acquire(Want { len: part, shape, plan: None, wait }) {
                Ok(some) => chunks.extend(some),
                Err(error) => {
                    if !chunks.is_empty() {
                        self.give_back(chunks);
                    }
                    return Err(error);
                }
            }
            left -= part;
        }
        Ok(chunks)
    }

    /// The length of new chunks for `len` bytes, if the process may have them. The daemon makes them
    /// smaller where its memory ends, unless the process is in a long growth: the second.
    fn new_chunk_len(&self, len: Bytes) -> Result<(Bytes, bool), SourceError> {
        let pools = self.lock();
        pools.check_limit(len)?;
        let each = self.config.pages.chunk_len(pools.held(), len);
        let most = pools.left().map_or(each, ladder::chunk_len_max);
        Ok((each.min(most).max(self.config.granule()), pools.growth.leased >= LONG_GROWTH))
    }

    /// Whether the process may hold this much more, by the limit that it has set itself.
    pub(super) fn check_limit(&self, more: Bytes) -> Result<(), SourceError> {
        self.lock().check_limit(more)
    }
}

impl Pools {
    /// Bytes up to `usual`, where requests begin to take the plan's idle parts, and from there up to the
    /// most that was held before the plan came. `None` once the process holds some more than that: the
    /// job grows, and short leases would not change that.
    fn left_with_plan(&self) -> Option<Bytes> {
        let installed = self.planned.as_ref()?;
        let (held, most) = (self.held(), installed.most?);
        let end = if held < installed.usual { installed.usual } else { most };
        (held <= most.saturating_add(installed::growth_margin(most))).then(|| end.saturating_sub(held))
    }

    /// Threads that grow at the same time may pass the limit by what each asks for.
    fn check_limit(&self, more: Bytes) -> Result<(), SourceError> {
        let held = self.held();
        let Some(limit) = self.limit.filter(|limit| held.checked_add(more).is_none_or(|after| after > *limit)) else {
            return Ok(());
        };
        let message = format!(
            "{more} more are not asked for: this process has set itself a limit of {limit} on this device, \
             and holds {held}"
        );
        Err(SourceError { kind: ErrorKind::OverLimit, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growth_ends_with_one_free_in_eight_requests() {
        let mut growth = Growth::default();
        let mut grown = |served, freed| {
            let grown = growth.bytes(served, freed).get() >> 30;
            growth.leased += Bytes::gib(1);
            grown
        };
        assert_eq!([grown(100, 0), grown(200, 10), grown(300, 10)], [0, 1, 2]);
        assert_eq!([grown(308, 12), grown(400, 12)], [0, 1], "two of eight");
    }
}
