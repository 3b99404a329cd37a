//! A ledger that begins with what another has left: which sessions there are, which chunks exist and whose they are, and which ranges are shared.
//!
//! And what it has to say for the next ([`Ledger::known_chunks`]).
//!
//! Not for: where that is known from (a journal), and what its processes say (the daemon asks them). Nobody waits, nobody was asked for anything, and every session is detached until its process comes again. What lay idle
//! with the former daemon and a session had used counts as that session's: it says itself what it holds.

use std::collections::BTreeMap;

use super::account::Shelf;
use super::session::Session;
use super::{Effect, Holder, Ledger, LedgerError, Record, Refusal, State, Terms};
use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// What is known.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// Every session.
    pub sessions: Vec<SessionFact>,
    /// Every chunk.
    pub chunks: Vec<ChunkFact>,
    /// Every shared range.
    pub ranges: Vec<RangeFact>,
    /// Devices of which nothing more is promised.
    pub draining: Vec<DeviceId>,
    /// The largest number that was ever given to a chunk.
    pub last_chunk: u64,
}

/// A session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionFact {
    /// Which.
    pub session: SessionId,
    /// What it may have.
    pub terms: Terms,
    /// How often that was changed.
    pub revision: u64,
    /// It gets nothing more.
    pub is_evicted: bool,
    /// What it is guaranteed.
    pub guarantees: Vec<(DeviceId, Bytes)>,
}

/// A chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkFact {
    /// Which.
    pub chunk: ChunkId,
    /// Where.
    pub device: DeviceId,
    /// How large.
    pub len: Bytes,
    /// Whose.
    pub owner: Owner,
    /// Only those have it who have mapped it: it can be handed to nobody, and goes back to the driver when it is released.
    pub is_bare: bool,
}

/// Who has a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// It lies with the daemon, and nobody could have imported it.
    Nobody,
    /// A session.
    Session(SessionId),
    /// The job of a plan that has not started.
    Plan(PlanId),
    /// Those who hold a shared range.
    Range(RangeId),
}

/// A shared range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeFact {
    /// Which.
    pub range: RangeId,
    /// In the order of its addresses.
    pub chunks: Vec<ChunkId>,
    /// Who holds it, and how often.
    pub holders: Vec<(SessionId, u32)>,
    /// Who published it, who need not be there any more.
    pub publisher: SessionId,
    /// How long it outlives its last holder, in milliseconds. One that nobody holds begins to do so anew.
    pub linger_ms: u64,
    /// Nobody more may hold it.
    pub is_withdrawn: bool,
}

/// Facts that cannot all be true.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FactsError {
    /// The ledger knows something already.
    #[error("a ledger begins with facts or not at all")]
    Begun,
    /// A session that cannot be.
    #[error("a session that cannot be")]
    Session(#[from] LedgerError),
    /// A chunk is there twice, or is nothing.
    #[error("{chunk} is there twice, or has no bytes")]
    Chunk {
        /// Which.
        chunk: ChunkId,
    },
    /// A chunk or a range is said to be somebody's who is not there.
    #[error("{what} is said to be {whose}'s, which is not there")]
    Unowned {
        /// What.
        what: String,
        /// Whose.
        whose: String,
    },
    /// A range's chunks are not its own, or of several devices.
    #[error("{range} has chunks that are not its own, or of several devices, or none")]
    Range {
        /// Which.
        range: RangeId,
    },
}

impl Ledger {
    /// Begins with what is known: for a ledger that has its devices, and nothing else. One that has refused is of no more use. What is there is there, also where that is more than a device is to have by now: nothing of it is promised until so much has gone.
    ///
    /// # Errors
    ///
    /// What cannot be true beside the rest.
    pub fn begin_with(&mut self, facts: &Facts) -> Result<(), FactsError> {
        if !self.sessions.is_empty() || !self.chunks.is_empty() || self.next_chunk > 0 {
            return Err(FactsError::Begun);
        }
        for known in &facts.sessions {
            self.open(known.session, known.terms)?;
            for (device, bytes) in &known.guarantees {
                if !self.devices.contains_key(device) {
                    return Err(LedgerError::NoDevice(*device).into());
                }
                self.set_guarantee(known.session, *device, *bytes);
            }
            let session = self.sessions.get_mut(&known.session).expect("it was just opened");
            (session.is_attached, session.is_evicted, session.revision) = (false, known.is_evicted, known.revision);
        }
        for known in &facts.chunks {
            self.begin_with_chunk(known)?;
        }
        facts.ranges.iter().try_for_each(|known| self.begin_with_range(known))?;
        let is_shared = |record: &&Record| matches!(record.state, State::Shared { .. });
        let (shared, named) = (self.chunks.values().filter(is_shared).count(), facts.ranges.iter());
        if shared != named.map(|range| range.chunks.len()).sum::<usize>() {
            let unnamed = facts.chunks.iter().find(|known| match known.owner {
                Owner::Range(of) => !facts.ranges.iter().any(|range| range.range == of),
                _ => false,
            });
            let what = unnamed.map_or_else(|| "a chunk".to_owned(), |known| known.chunk.to_string());
            return Err(FactsError::Unowned { what, whose: "a shared range".to_owned() });
        }
        for device in &facts.draining {
            self.devices.get_mut(device).ok_or(LedgerError::NoDevice(*device))?.drain(true);
        }
        self.next_chunk = self.next_chunk.max(facts.last_chunk);
        for (session, known) in &mut self.sessions {
            // What it held above a limit that was set lower it keeps until it gives it back.
            known.set_limit(known.terms.limit);
            if !known.excess().is_zero() {
                self.in_excess.insert(*session);
            }
        }
        Ok(())
    }

    /// Every chunk that exists and is not on its way back to the driver, and whose it is. What lies idle and a session could have imported is that session's.
    pub fn known_chunks(&self) -> impl Iterator<Item = ChunkFact> {
        self.chunks.iter().filter_map(|(chunk, Record { device, len, state, is_bare })| {
            let owner = match *state {
                State::Creating { .. } | State::Quarantined { .. } => return None,
                State::Idle { used_by: None, .. } | State::Claimed { from: Shelf::Pristine, .. } => Owner::Nobody,
                State::Idle { used_by: Some(session), .. }
                | State::Claimed { from: Shelf::Used(session), .. }
                | State::Leased { session } => Owner::Session(session),
                State::Reserved { plan } | State::Claimed { from: Shelf::Reserved(plan), .. } => Owner::Plan(plan),
                State::Shared { range } => Owner::Range(range),
            };
            Some(ChunkFact { chunk: *chunk, device: *device, len: *len, owner, is_bare: *is_bare })
        })
    }

    /// One of them.
    pub fn known_chunk(&self, chunk: ChunkId) -> Option<(DeviceId, Bytes)> {
        self.chunks.get(&chunk).map(|record| (record.device, record.len))
    }

    /// The chunks that a session has leased.
    pub fn leased_by(&self, session: SessionId) -> Vec<ChunkId> {
        self.sessions.get(&session).map_or_else(Vec::new, |known| known.leased.iter().copied().collect())
    }

    /// It gets nothing more, by the word of whoever runs the daemon.
    pub fn is_evicted(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|known| known.is_evicted)
    }

    /// What a session is guaranteed on each device, and goes on to be if what it has asked for beside that is refused.
    pub fn lasting_guarantees(&self, session: SessionId) -> BTreeMap<DeviceId, Bytes> {
        let places = self.sessions.get(&session).into_iter().flat_map(Session::places);
        let mut guarantees: BTreeMap<_, _> = places.map(|(device, place)| (device, place.guarantee)).collect();
        for request in self.requests.values().filter(|request| request.holder == Holder::Session(session)) {
            if let Some(before) = request.guaranteed_before {
                guarantees.insert(request.device, before);
            }
        }
        guarantees
    }

    pub(super) fn reattach(&mut self, session: SessionId) -> Result<(), LedgerError> {
        self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?.is_attached = true;
        Ok(())
    }

    /// What is registered is within the session's limit, and what nobody else has or is to have: as a lease is.
    pub(super) fn register(
        &mut self,
        session: SessionId,
        device: DeviceId,
        len: Bytes,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let known = self.sessions.get(&session).ok_or(LedgerError::NoSession(session))?;
        let account = self.devices.get(&device).ok_or(LedgerError::NoDevice(device))?;
        if len < limits::CHUNK_LEN_MIN || len > limits::CHUNK_LEN_MAX {
            return Err(LedgerError::Parts);
        }
        if self.chunks.len() >= limits::CHUNKS_MAX {
            return Err(LedgerError::TooMany { what: "chunks", limit: limits::CHUNKS_MAX });
        }
        if known.held + len > known.terms.limit {
            let (limit, held) = (known.terms.limit, known.held);
            return Err(Refusal::OverLimit { requested: len, held, limit }.into());
        }
        if let Some(refusal) = self.barred(Holder::Session(session), device) {
            return Err(refusal.into());
        }
        if account.chunks_free() == 0 {
            return Err(LedgerError::TooMany { what: "chunks of the device", limit: account.chunks() });
        }
        // What seems to be others' may be this.
        let room = (account.available() + account.foreign().min(len))
            .saturating_sub(self.withheld_from(Holder::Session(session), device));
        if len > room {
            return Err(Refusal::OverBudget { device, requested: len, budget: room }.into());
        }
        self.next_chunk += 1;
        let chunk = ChunkId(self.next_chunk);
        self.begin_with_chunk(&ChunkFact { chunk, device, len, owner: Owner::Session(session), is_bare: true })
            .map_err(|_| LedgerError::Unasked(chunk))?;
        self.devices.get_mut(&device).expect("looked up above").note_registered(len);
        self.rekey(session, device);
        effects.push(Effect::Registered { session, chunk, len });
        Ok(())
    }

    fn begin_with_chunk(&mut self, known: &ChunkFact) -> Result<(), FactsError> {
        let ChunkFact { chunk, device, len, owner, is_bare } = *known;
        if len.is_zero() || self.chunks.contains_key(&chunk) {
            return Err(FactsError::Chunk { chunk });
        }
        let state = match owner {
            Owner::Nobody => {
                self.moment += 1;
                State::Idle { used_by: None, since: self.moment }
            }
            Owner::Session(session) => State::Leased { session },
            Owner::Plan(plan) => State::Reserved { plan },
            Owner::Range(range) => State::Shared { range },
        };
        match owner {
            Owner::Session(session) => {
                let unowned = || FactsError::Unowned { what: chunk.to_string(), whose: session.to_string() };
                let holder = self.sessions.get_mut(&session).ok_or_else(unowned)?;
                holder.leased.insert(chunk);
                holder.has_already(device, len);
            }
            Owner::Plan(plan) => *self.plans.entry(plan).or_default() += len,
            Owner::Nobody | Owner::Range(_) => {}
        }
        let account = self.devices.get_mut(&device).ok_or(LedgerError::NoDevice(device))?;
        account.enter(chunk, len, state);
        account.allow_what_is_there();
        self.chunks.insert(chunk, Record { device, len, state, is_bare });
        self.next_chunk = self.next_chunk.max(chunk.0);
        Ok(())
    }
}

impl Session {
    /// It has so much, whatever its limit says.
    pub(super) fn has_already(&mut self, device: DeviceId, len: Bytes) {
        self.held += len;
        self.place_mut(device).held += len;
    }
}
