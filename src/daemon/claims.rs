//! Open claims: what was leased or attached over gRPC, and whose descriptors were not fetched yet.
//!
//! What is not fetched goes back. But a chunk that a session has released it may get again, under the same
//! number: so a claim has only what the session has not given up since. A release, a publication and a
//! detach take that out of it, under one lock with the ledger's step, and what goes back is what is left.
//!
//! Invariant: whatever an open claim has, its session still has from the lease that the claim is of.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Daemon;
use super::chunk_server::give_back;
use super::registry::{Claim, Entry};
use crate::error::chain;
use crate::ids::{ChunkId, RangeId};
use crate::ledger::LedgerError;
use crate::units::Bytes;

/// Those of a session, by their numbers.
#[derive(Debug, Default)]
pub(super) struct OpenClaims(Mutex<Open>);

#[derive(Debug, Default)]
struct Open {
    last: u64,
    leases: BTreeMap<u64, Vec<(ChunkId, Bytes)>>,
    holds: BTreeMap<u64, RangeId>,
}

impl Open {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn forget(&mut self, chunks: &[ChunkId]) {
        self.leases.values_mut().for_each(|lease| lease.retain(|(chunk, _)| !chunks.contains(chunk)));
    }

    /// The oldest claim of a range ends, if there is one: a session that detaches has no use
    /// for what it has not fetched.
    fn end_one(&mut self, range: RangeId) {
        let oldest = self.holds.iter().find(|(_, held)| **held == range).map(|(number, _)| *number);
        oldest.map(|number| self.holds.remove(&number));
    }
}

impl OpenClaims {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim of chunks that were just leased.
    pub(super) fn of_lease(&self, entry: &Entry, chunks: Vec<(ChunkId, Bytes)>) -> Claim {
        let mut open = self.lock();
        let number = open.next();
        open.leases.insert(number, chunks);
        Claim { session: entry.id, number, range: None }
    }

    /// A claim of a hold of a range, which was just attached or published.
    pub(super) fn of_hold(&self, entry: &Entry, range: RangeId) -> Claim {
        let mut open = self.lock();
        let number = open.next();
        open.holds.insert(number, range);
        Claim { session: entry.id, number, range: Some(range) }
    }

    /// The chunks that a claim of a lease still has.
    pub(super) fn lease(&self, claim: &Claim) -> Vec<(ChunkId, Bytes)> {
        self.lock().leases.get(&claim.number).cloned().unwrap_or_default()
    }

    /// All end: their tickets are gone, and what they had goes back otherwise.
    pub(super) fn end_all(&self) {
        let mut open = self.lock();
        open.leases.clear();
        open.holds.clear();
    }

    /// All of it was fetched.
    pub(super) fn close(&self, claim: &Claim) {
        let mut open = self.lock();
        open.leases.remove(&claim.number);
        open.holds.remove(&claim.number);
    }
}

impl Daemon {
    /// A session releases chunks: all, or none and why.
    pub(super) fn release(&self, entry: &Entry, chunks: Vec<ChunkId>) -> Result<(), LedgerError> {
        let mut open = entry.claims.lock();
        let released = if open.leases.is_empty() { Vec::new() } else { chunks.clone() };
        self.steward.release(entry.id, chunks)?;
        open.forget(&released);
        Ok(())
    }

    /// What `publish` makes of chunks of a session is a shared range, if it succeeds.
    pub(super) fn publish_chunks<T, E>(
        &self,
        entry: &Entry,
        chunks: &[ChunkId],
        publish: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut open = entry.claims.lock();
        let published = publish()?;
        open.forget(chunks);
        Ok(published)
    }

    /// A session holds a shared range once less.
    pub(super) fn detach(&self, entry: &Entry, range: RangeId) -> Result<(), LedgerError> {
        let mut open = entry.claims.lock();
        self.steward.leave(entry.id, range)?;
        open.end_one(range);
        Ok(())
    }

    /// What a claim is for was not fetched: what is left of the lease goes back, and a shared range is held
    /// once less.
    pub(super) fn take_back(&self, claim: &Claim) {
        // Of a session that is over everything has gone back.
        let Some(entry) = self.registry.get(claim.session) else { return };
        let mut open = entry.claims.lock();
        let lease = open.leases.remove(&claim.number).unwrap_or_default();
        if !lease.is_empty() {
            give_back(self, entry.id, &lease);
        }
        if let Some(range) = open.holds.remove(&claim.number)
            && let Err(error) = self.steward.leave(entry.id, range)
        {
            tracing::debug!(session = %entry.id, error = %chain(&error), "a shared range is held no more already");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_is_in_no_claim() {
        let mut open = Open::default();
        let chunk = |n| (ChunkId(n), Bytes::mib(2));
        open.leases.insert(1, vec![chunk(7), chunk(8)]);
        open.leases.insert(2, vec![chunk(9)]);
        open.forget(&[ChunkId(8), ChunkId(9)]);
        assert_eq!(open.leases.values().cloned().collect::<Vec<_>>(), [vec![chunk(7)], vec![]]);
        open.holds = [(3, RangeId(5)), (4, RangeId(6)), (5, RangeId(5))].into();
        open.end_one(RangeId(5));
        assert_eq!(open.holds, [(4, RangeId(6)), (5, RangeId(5))].into());
        open.end_one(RangeId(7));
        assert_eq!(open.holds.len(), 2);
    }
}
