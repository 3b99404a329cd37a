//! A steward that follows another, and what it writes down for the one that follows it.
//!
//! Not for: what is in the journal ([`super::chronicle`]); sessions that are there again ([`super::reattach`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::chronicle::{Chronicle, facts};
use super::{Spawn, Steward, Todo};
use crate::clock::Clock;
use crate::ids::{ChunkId, DeviceId, DeviceUuid, RangeId, SessionId};
use crate::journal::{Journal, PublishedRange, Record, SessionRecord};
use crate::ledger::{Command, FactsError, LedgerError, Terms};
use crate::store::{Store, StoreError};

/// Why a steward cannot begin with what another has left.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// The devices cannot be looked at.
    #[error("cannot look at the devices")]
    Store(#[from] StoreError),
    /// What is known cannot be.
    #[error("what a former daemon has left cannot be")]
    Facts(#[from] FactsError),
}

impl Steward {
    /// One that begins with what `journal` says, and goes on writing it. What of it lies with the daemon is in `store` already ([`Store::adopt`]). The devices are known by `uuids`, and the journal says nothing of others.
    ///
    /// # Errors
    ///
    /// The driver's, of the devices; what the journal says cannot be ([`crate::ledger::Ledger::begin_with`]).
    pub fn following(
        store: Store,
        clock: Arc<dyn Clock>,
        spawn: Spawn,
        journal: Journal,
        uuids: BTreeMap<DeviceId, DeviceUuid>,
    ) -> Result<Arc<Steward>, FollowError> {
        let devices = uuids.iter().map(|(device, uuid)| (*uuid, *device)).collect();
        let known = facts(journal.book(), &devices, |chunk| !store.can_hand_on(chunk));
        let (session, _, range, _) = journal.book().last_numbers();
        let steward = Steward::open_devices(Steward::over(store, clock, spawn, true), Some(&known))?;
        {
            let mut core = steward.lock();
            (core.next_session, core.next_range) = (session, range);
            core.chronicle = Some(Chronicle::new(journal, uuids));
        }
        Ok(steward)
    }

    /// [`Steward::open`], with what the journal is to say of it.
    pub fn open_as(
        self: &Arc<Self>,
        terms: Terms,
        of: impl FnOnce(SessionId) -> Option<SessionRecord>,
    ) -> Result<SessionId, LedgerError> {
        let mut core = self.lock();
        core.next_session += 1;
        let session = SessionId(core.next_session);
        let own = of(session).map(Record::Opened);
        core.step_noted(Command::Open { session, terms }, own, &mut Todo::default())?;
        Ok(session)
    }

    /// How often the session holds each range.
    pub fn holds_of(&self, session: SessionId) -> Vec<(RangeId, u32)> {
        self.lock().ledger.holds_of(session)
    }

    /// Bytes of the journal; nothing where there is none.
    pub fn journal_len(&self) -> Option<u64> {
        self.lock().chronicle.as_ref().and_then(Chronicle::journal).map(Journal::len)
    }

    /// The journal says from here on what it says now: what this process does to what it holds while it ends is not for those who follow.
    pub fn stop_journal(&self) {
        if let Some(mut chronicle) = self.lock().chronicle.take() {
            chronicle.mend_now();
        }
    }

    /// Nobody is to follow: the journal goes.
    pub fn end_journal(&self) {
        if let Some(chronicle) = &mut self.lock().chronicle {
            chronicle.end();
        }
    }

    /// [`Steward::publish`], with what the journal is to say of it.
    pub fn publish_as(
        self: &Arc<Self>,
        session: SessionId,
        chunks: Vec<ChunkId>,
        linger_ms: u64,
        of: impl FnOnce(RangeId, Vec<ChunkId>) -> Option<PublishedRange>,
    ) -> Result<RangeId, LedgerError> {
        let mut core = self.lock();
        core.next_range += 1;
        let range = RangeId(core.next_range);
        let own = of(range, chunks.clone()).map(Record::Published);
        // Nobody is served by it: nothing comes free.
        core.step_noted(Command::Publish { range, session, chunks, linger_ms }, own, &mut Todo::default())?;
        Ok(range)
    }

    /// Nobody can write a range any more.
    pub fn note_sealed(&self, range: RangeId) {
        let mut core = self.lock();
        // It may have gone meanwhile.
        let is_there = core.ledger.range(range).is_some();
        if let (true, Some(chronicle)) = (is_there, &mut core.chronicle) {
            chronicle.add(Record::Sealed { range });
        }
    }
}
