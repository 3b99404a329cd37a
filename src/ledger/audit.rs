//! The invariants of the ledger, counted again from the chunk records.

use std::collections::{BTreeMap, BTreeSet};

use super::account::{DeviceBytes, Shelf};
use super::queue::Phase;
use super::{Holder, Ledger, State};
use crate::ids::{ChunkId, DeviceId, SessionId};
use crate::units::Bytes;

impl Ledger {
    /// Says what is wrong with the books; nothing, unless this module has a bug. Takes time proportional to everything there is, so only tests and
    /// debug builds call it.
    pub fn invariants(&self) -> Result<(), String> {
        self.chunks_have_one_state()?;
        self.sessions_hold_what_they_hold()?;
        self.requests_are_where_they_say()
    }

    /// Invariants 1 and 2: bytes by state and shelves say what the records say, and nothing is promised twice.
    fn chunks_have_one_state(&self) -> Result<(), String> {
        let mut bytes: BTreeMap<DeviceId, DeviceBytes> = BTreeMap::new();
        let mut shelved: BTreeSet<(DeviceId, Shelf, Bytes, ChunkId)> = BTreeSet::new();
        let mut idle: BTreeMap<DeviceId, usize> = BTreeMap::new();
        for (chunk, record) in &self.chunks {
            let counted = bytes.entry(record.device).or_default();
            let (field, shelf) = match record.state {
                State::Creating { .. } => (&mut counted.creating, None),
                State::Claimed { .. } => (&mut counted.claimed, None),
                State::Idle { used_by: None, .. } => (&mut counted.idle, Some(Shelf::Pristine)),
                State::Idle { used_by: Some(session), .. } => (&mut counted.idle, Some(Shelf::Used(session))),
                State::Reserved { plan } => (&mut counted.reserved, Some(Shelf::Reserved(plan))),
                State::Leased { .. } => (&mut counted.leased, None),
                State::Shared { .. } => (&mut counted.shared, None),
                State::Quarantined { failed: false } => (&mut counted.destroying, None),
                State::Quarantined { failed: true } => (&mut counted.quarantined, None),
            };
            *field += record.len;
            if matches!(record.state, State::Idle { .. }) {
                *idle.entry(record.device).or_default() += 1;
            }
            shelved.extend(shelf.map(|shelf| (record.device, shelf, record.len, *chunk)));
            // Invariant 3: an idle chunk that somebody used belongs to somebody who is still there.
            if let State::Idle { used_by: Some(session), .. } = record.state
                && !self.sessions.contains_key(&session)
            {
                return Err(format!("{chunk} was used by {session}, which is gone, and is still there"));
            }
        }
        for (device, account) in &self.devices {
            let counted = bytes.remove(device).unwrap_or_default();
            if *account.bytes() != counted {
                return Err(format!("{device} says {:?} and its chunks say {counted:?}", account.bytes()));
            }
            let of_device = self.chunks.values().filter(|record| record.device == *device);
            let coming = of_device.clone().filter(|record| record.state == State::Quarantined { failed: false });
            let view = account.view(*device);
            if (view.chunks, account.chunks_coming()) != (of_device.count() as u64, coming.count() as u64) {
                return Err(format!(
                    "{device} counts {} chunks, {} on their way back",
                    view.chunks,
                    account.chunks_coming()
                ));
            }
            if view.chunks > view.chunks_max {
                return Err(format!("{device} has {} chunks and may have {}", view.chunks, view.chunks_max));
            }
            if counted.promised() > account.most() {
                return Err(format!("{device} has {} and {} are promised", account.most(), counted.promised()));
            }
            let said: BTreeSet<_> = account.shelved().map(|(shelf, len, chunk)| (*device, shelf, len, chunk)).collect();
            let meant: BTreeSet<_> = shelved.iter().filter(|(of, ..)| of == device).copied().collect();
            if said != meant {
                return Err(format!("the shelves of {device} hold {said:?} and should hold {meant:?}"));
            }
            if account.aged() != idle.get(device).copied().unwrap_or(0) {
                return Err(format!("{device} knows the age of {} idle chunks", account.aged()));
            }
        }
        if bytes.is_empty() { Ok(()) } else { Err(format!("chunks of unknown devices: {bytes:?}")) }
    }

    /// Invariants 1 and 4: every leased chunk has the one holder that says so, and nobody holds more than allowed.
    fn sessions_hold_what_they_hold(&self) -> Result<(), String> {
        let mut leased: BTreeMap<SessionId, BTreeSet<ChunkId>> = BTreeMap::new();
        let mut held: BTreeMap<(SessionId, DeviceId), Bytes> = BTreeMap::new();
        for (chunk, record) in &self.chunks {
            let holder = match record.state {
                State::Leased { session } => {
                    leased.entry(session).or_default().insert(*chunk);
                    Some(session)
                }
                State::Creating { request: Some(request) } | State::Claimed { request, .. } => {
                    self.requests.get(&request).and_then(|request| match request.holder {
                        Holder::Session(session) => Some(session),
                        Holder::Plan(_) => None,
                    })
                }
                _ => None,
            };
            if let Some(session) = holder {
                *held.entry((session, record.device)).or_default() += record.len;
            }
        }
        // A request one of whose creates was refused still counts in full until all its answers are in.
        for (id, request) in &self.requests {
            if let (Holder::Session(session), Phase::Creating { .. }) = (request.holder, &request.phase) {
                let is_its = |record: &&super::Record| match record.state {
                    State::Creating { request } => request == Some(*id),
                    State::Claimed { request, .. } => request == *id,
                    _ => false,
                };
                let there: Bytes = self.chunks.values().filter(is_its).map(|record| record.len).sum();
                *held.entry((session, request.device)).or_default() += request.bytes - there;
            }
        }
        self.count_shared(&mut held)?;
        for (session, holder) in &self.sessions {
            if leased.remove(session).unwrap_or_default() != holder.leased {
                return Err(format!("{session} says it has {:?}", holder.leased));
            }
            let mut sum = Bytes::ZERO;
            for (device, place) in holder.places() {
                let (bytes, counted) = (place.held, held.remove(&(*session, device)).unwrap_or_default());
                if counted != bytes {
                    return Err(format!("{session} says it holds {bytes} on {device} and holds {counted}"));
                }
                sum += bytes;
            }
            if sum != holder.held || sum > holder.most() {
                return Err(format!("{session} holds {sum}, says {} and may hold {}", holder.held, holder.most()));
            }
        }
        held.retain(|_, bytes| !bytes.is_zero());
        if leased.is_empty() && held.is_empty() {
            return Ok(());
        }
        Err(format!("chunks of sessions that are gone: {leased:?} {held:?}"))
    }

    /// Invariant 5, as far as one moment shows it: what waits stands in a queue, what creates has something to wait for.
    fn requests_are_where_they_say(&self) -> Result<(), String> {
        let mut queued = BTreeSet::new();
        for (device, account) in &self.devices {
            let waiting = account.waiting().iter().map(|key| (key, false));
            for (key, is_guarantee) in waiting.chain(account.admissions().iter().map(|key| (key, true))) {
                let there = self.requests.get(&key.request);
                let waits = |request: &super::queue::Request| {
                    request.device == *device
                        && request.is_guarantee == is_guarantee
                        && *key == self.key_of(key.request)
                        && matches!(&request.phase, Phase::Waiting(of) if of == key)
                };
                if !there.is_some_and(waits) || !queued.insert(key.request) {
                    return Err(format!("{} stands in the queue of {device} and does not wait there", key.request));
                }
            }
        }
        for (id, request) in &self.requests {
            let is_fine = match &request.phase {
                Phase::Waiting(_) => queued.contains(id),
                Phase::Creating { missing, ready, .. } => {
                    let creating = |record: &&super::Record| record.state == State::Creating { request: Some(*id) };
                    let is_claimed = |chunk: &ChunkId| matches!(self.chunks[chunk].state, State::Claimed { request, .. } if request == *id);
                    let claimed = self
                        .chunks
                        .values()
                        .filter(|record| matches!(record.state, State::Claimed { request, .. } if request == *id));
                    *missing > 0
                        && self.chunks.values().filter(creating).count() as u64 == *missing
                        && ready.iter().all(is_claimed)
                        && claimed.count() == ready.len()
                }
            };
            if !is_fine {
                return Err(format!("{id} is lost: {request:?}"));
            }
            if let Holder::Session(session) = request.holder
                && !self.sessions.get(&session).is_some_and(|session| session.is_attached)
            {
                return Err(format!("{id} is of {session}, which can ask for nothing"));
            }
        }
        let guaranteed = |(session, known): (&SessionId, &super::Session)| {
            let places = known.places().filter(|(_, place)| !place.guarantee.is_zero());
            places.map(|(device, _)| (device, *session)).collect::<Vec<_>>()
        };
        let guaranteed: BTreeSet<_> = self.sessions.iter().flat_map(guaranteed).collect();
        if guaranteed != self.guaranteed {
            return Err(format!("{guaranteed:?} are guaranteed something, not {:?}", self.guaranteed));
        }
        for (device, session) in self.questions.open() {
            let is_there = |session: &super::Session| session.is_attached && session.terms.answers;
            if !self.devices.contains_key(&device) || !self.sessions.get(&session).is_some_and(is_there) {
                return Err(format!("{session} is waited for on {device}, and will not answer"));
            }
        }
        let mut reserved: BTreeMap<_, Bytes> = BTreeMap::new();
        for record in self.chunks.values() {
            if let State::Reserved { plan } = record.state {
                *reserved.entry(plan).or_default() += record.len;
            }
        }
        if reserved != self.plans {
            return Err(format!("plans say {:?} and their chunks say {reserved:?}", self.plans));
        }
        Ok(())
    }
}
