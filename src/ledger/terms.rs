//! What sessions are promised: guarantees, and terms that change while they run.
//!
//! The guarantees of a device together are never more than its budget was when the last one was made. One that is not lent is kept: others are granted only what leaves room for it.

use super::queue::Request;
use super::session::Place;
use super::{Change, Command, Effect, Holder, Holding, Ledger, LedgerError, Overstay, Refusal};
use crate::ids::{DeviceId, RequestId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// What a borrower's end may take: its process is killed, and the kernel takes its mappings down.
const END_MS_MAX: u64 = 10_000;
/// Nobody is ended for a request that has waited less than that: borrowers are asked first, and have a second to answer.
const END_AFTER_MS: u64 = 2 * limits::ANSWER_MS_MAX;

impl Ledger {
    /// Asks for a guarantee.
    pub(super) fn admit(&mut self, command: Command, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let Command::Admit { request, session, device, guarantee, wait_ms } = command else { return Ok(()) };
        let holder = self.check_asking(request, Holder::Session(session), device)?;
        // The last wish counts.
        let is_older = |(_, older): &(&RequestId, &Request)| {
            older.is_guarantee && older.holder == holder && older.device == device
        };
        let older: Vec<_> = self.requests.iter().filter(is_older).map(|(id, _)| *id).collect();
        for request in older {
            self.refuse(request, Refusal::Cancelled, effects);
        }
        let account = &self.devices[&device];
        let refusal = if guarantee > account.total() {
            Some(Refusal::OverBudget { device, requested: guarantee, budget: account.budget() })
        } else {
            self.guaranteed_over_limit(session, device, guarantee).or_else(|| self.barred(holder, device))
        };
        if guarantee <= self.sessions[&session].place(device).guarantee {
            self.set_guarantee(session, device, guarantee);
            effects.push(Effect::Grant { request, holder, chunks: Vec::new() });
        } else if let Some(refusal) = refusal {
            effects.push(Effect::Refuse { request, holder, refusal });
        } else {
            self.requests.insert(request, Request::guarantee(session, device, guarantee, self.now_ms, wait_ms));
            self.enqueue(request);
        }
        // In any case: what was kept for an older wish is not any more.
        self.serve(device, effects);
        Ok(())
    }

    /// So much of a device would be beyond a session's limit, with what it is guaranteed of others.
    fn guaranteed_over_limit(&self, session: SessionId, device: DeviceId, guarantee: Bytes) -> Option<Refusal> {
        let asking = &self.sessions[&session];
        let places = asking.places().filter(|(other, _)| *other != device);
        let (held, limit) = (places.map(|(_, place)| place.guarantee).sum::<Bytes>(), asking.terms.limit);
        let fits = held.checked_add(guarantee).is_some_and(|sum| sum <= limit);
        (!fits).then_some(Refusal::OverLimit { requested: guarantee, held, limit })
    }

    /// What others are guaranteed of a device.
    fn promised_to_others(&self, session: SessionId, device: DeviceId) -> Bytes {
        self.guaranteed_on(device).filter(|(other, _)| *other != session).map(|(_, place)| place.guarantee).sum()
    }

    /// Sessions that are guaranteed something of a device.
    pub(super) fn guaranteed_on(&self, device: DeviceId) -> impl Iterator<Item = (SessionId, Place)> + '_ {
        let all = (device, SessionId(0))..=(device, SessionId(u64::MAX));
        self.guaranteed.range(all).map(move |(_, session)| (*session, self.sessions[session].place(device)))
    }

    pub(super) fn set_guarantee(&mut self, session: SessionId, device: DeviceId, guarantee: Bytes) {
        let Some(known) = self.sessions.get_mut(&session) else { return };
        known.place_mut(device).guarantee = guarantee;
        match guarantee.is_zero() {
            true => self.guaranteed.remove(&(device, session)),
            false => self.guaranteed.insert((device, session)),
        };
        self.rekey(session, device);
    }

    /// Makes a guarantee, if it fits beside those of others; says whether the request has its answer. One that is to be there at once is kept from others from here on, and answered when
    /// it is there.
    pub(super) fn try_admit(&mut self, request: RequestId, effects: &mut Vec<Effect>) -> bool {
        let waiting = &self.requests[&request];
        let (holder, device, guarantee) = (waiting.holder, waiting.device, waiting.bytes);
        let Holder::Session(session) = holder else { panic!("only a session is guaranteed anything") };
        if let Some(refusal) = self.barred(holder, device) {
            self.refuse(request, refusal, effects);
            return true;
        }
        let (is_kept, may_wait) = (waiting.guaranteed_before.is_some(), waiting.deadline_ms > self.now_ms);
        let (asking, place) = (&self.sessions[&session], self.sessions[&session].place(device));
        // What is kept for others is none of it.
        let lacking = match asking.terms.lends {
            true => Bytes::ZERO,
            false => self.lacking(holder, device, guarantee.saturating_sub(place.borne()), Bytes::ZERO),
        };
        if !is_kept {
            // Its limit, and what it is guaranteed elsewhere, may be others by now.
            if let Some(refusal) = self.guaranteed_over_limit(session, device, guarantee) {
                self.refuse(request, refusal, effects);
                return true;
            }
            let after = self.promised_to_others(session, device) + guarantee;
            // For one that may not wait nothing is kept that is not there.
            if after > self.devices[&device].budget() || !lacking.is_zero() && !may_wait {
                return false;
            }
            self.requests.get_mut(&request).expect("looked up above").guaranteed_before = Some(place.guarantee);
            self.set_guarantee(session, device, guarantee);
        }
        if !lacking.is_zero() {
            if !self.let_unheld_go(device, lacking, effects) {
                self.ask_back(request, lacking, effects);
            }
            return false;
        }
        self.leave_queue(request);
        self.requests.remove(&request);
        effects.push(Effect::Grant { request, holder, chunks: Vec::new() });
        true
    }

    pub(super) fn guarantee_refused(&self, request: RequestId) -> Refusal {
        let waiting = &self.requests[&request];
        let (device, requested) = (waiting.device, waiting.bytes);
        let Holder::Session(session) = waiting.holder else { panic!("only a session is guaranteed anything") };
        let others = self.guaranteed_on(device).filter(|(other, _)| *other != session);
        let mut holders: Vec<_> = others.map(|(session, place)| Holding { session, held: place.guarantee }).collect();
        holders.sort_by_key(|holding| (std::cmp::Reverse(holding.held), holding.session));
        let promised = holders.iter().map(|holding| holding.held).sum();
        holders.truncate(super::HOLDERS_SHOWN);
        let (budget, waited_ms) = (self.devices[&device].budget(), waiting.waited_ms(self.now_ms));
        Refusal::Guarantee { device, requested, promised, budget, holders, waited_ms }
    }

    /// Unfilled guarantees of others that they do not lend.
    pub(super) fn withheld_from(&self, holder: Holder, device: DeviceId) -> Bytes {
        let others = self.guaranteed_on(device).filter(|(session, _)| holder != Holder::Session(*session));
        others.filter(|(session, _)| !self.sessions[session].terms.lends).map(|(_, place)| place.unfilled()).sum()
    }

    /// What `bytes` more for a holder lack beside what others use and are kept, whatever lies idle with the daemon. `of_plan` of them come from chunks that are reserved for it.
    pub(super) fn lacking(&self, holder: Holder, device: DeviceId, bytes: Bytes, of_plan: Bytes) -> Bytes {
        let withheld = self.withheld_from(holder, device);
        let account = &self.devices[&device];
        let bound = account.bytes().promised() - account.bytes().idle - account.bytes().destroying;
        (bound + bytes + withheld).saturating_sub(of_plan).saturating_sub(account.budget())
    }

    /// The request leaves its session within what it is guaranteed.
    pub(super) fn is_within_guarantee(&self, request: RequestId) -> bool {
        let waiting = &self.requests[&request];
        let Holder::Session(session) = waiting.holder else { return false };
        if waiting.is_guarantee {
            return true;
        }
        let Some(asking) = self.sessions.get(&session) else { return false };
        let place = asking.place(waiting.device);
        place.borne().checked_add(waiting.bytes).is_some_and(|after| after <= place.guarantee)
    }

    /// The time of a request is up that was guaranteed what it waits for. Says whether it may wait on.
    pub(super) fn overstayed(&mut self, request: RequestId, effects: &mut Vec<Effect>) -> bool {
        let waiting = &self.requests[&request];
        // One that was not to wait asked nobody, and hears at once that there is nothing.
        if waiting.is_guarantee || waiting.is_extended || !waiting.waits || !self.is_within_guarantee(request) {
            return false;
        }
        let (device, holder, bytes) = (waiting.device, waiting.holder, waiting.bytes);
        let extended_ms = match self.overstay {
            Overstay::Refuse => return false,
            Overstay::Wait => waiting.asked_ms.saturating_add(limits::WAIT_MS_MAX),
            Overstay::End => {
                let Holder::Session(waiting) = holder else { return false };
                let lacking = self.lacking(holder, device, bytes, Bytes::ZERO);
                let not_before_ms = self.requests[&request].asked_ms.saturating_add(END_AFTER_MS);
                if self.now_ms < not_before_ms {
                    // Whatever lies idle in them comes without that.
                    self.ask_borrowers(waiting, device, effects);
                    self.requests.get_mut(&request).expect("looked up above").deadline_ms = not_before_ms;
                    return true;
                }
                if !self.end_borrowers(waiting, device, lacking, effects) {
                    return false;
                }
                self.now_ms.saturating_add(END_MS_MAX)
            }
        };
        let extended = self.requests.get_mut(&request).expect("looked up above");
        (extended.deadline_ms, extended.is_extended) = (extended_ms, true);
        true
    }

    /// Sessions that hold more of a device than they are guaranteed.
    fn borrowers(&self, waiting: SessionId, device: DeviceId) -> impl Iterator<Item = (SessionId, &super::Session)> {
        let others = self.sessions.iter().filter(move |(session, _)| **session != waiting);
        let others = others.filter(move |(_, other)| other.place(device).borne() > other.place(device).guarantee);
        others.map(|(session, other)| (*session, other))
    }

    fn ask_borrowers(&mut self, waiting: SessionId, device: DeviceId, effects: &mut Vec<Effect>) {
        let borrowers: Vec<_> = self.borrowers(waiting, device).map(|(session, _)| session).collect();
        for session in borrowers {
            if let Some(there) = self.may_give(session, device, false) {
                self.ask(session, device, there, None, effects);
            }
        }
    }

    /// The process of a session could not be ended: it goes on as before, and is not tried again.
    pub(super) fn spare(&mut self, session: SessionId) -> Result<(), LedgerError> {
        let spared = self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?;
        (spared.is_ending, spared.is_spared) = (false, true);
        Ok(())
    }

    /// Ends those who have borrowed most, of the lowest priority first, until that is enough. None where all would not do.
    fn end_borrowers(
        &mut self,
        waiting: SessionId,
        device: DeviceId,
        lacking: Bytes,
        effects: &mut Vec<Effect>,
    ) -> bool {
        // What comes of those that end already is not asked of more.
        let ending: Bytes =
            self.sessions.values().filter(|other| other.is_ending).map(|other| other.place(device).own()).sum();
        let mut borrowers: Vec<_> = self
            .borrowers(waiting, device)
            .filter(|(_, other)| !other.is_ending && !other.is_spared)
            .map(|(session, other)| (other.terms.priority, session, other.place(device)))
            .collect();
        borrowers.sort_by_key(|(priority, session, place)| {
            (*priority, std::cmp::Reverse(place.borne().saturating_sub(place.guarantee)), *session)
        });
        let mut left = lacking.saturating_sub(ending);
        if left.is_zero() {
            return !ending.is_zero();
        }
        let mut ended = Vec::new();
        for (_, session, place) in borrowers {
            if left.is_zero() {
                break;
            }
            left = left.saturating_sub(place.own());
            ended.push(session);
        }
        if !left.is_zero() || ended.is_empty() {
            return false;
        }
        for session in ended {
            self.sessions.get_mut(&session).expect("looked up above").is_ending = true;
            effects.push(Effect::EndBorrower { session, device, waiting });
        }
        true
    }

    pub(super) fn change(
        &mut self,
        session: SessionId,
        change: Change,
        meant: Option<u64>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let known = self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?;
        let revision = known.revision;
        if let Some(meant) = meant.filter(|meant| *meant != revision) {
            return Err(LedgerError::Stale { session, revision, meant });
        }
        let guaranteed: Bytes = known.places().map(|(_, place)| place.guarantee).sum();
        if let Some(limit) = change.limit.filter(|limit| *limit < guaranteed) {
            return Err(LedgerError::BelowGuarantee { session, guaranteed, limit });
        }
        known.revision += 1;
        known.terms.priority = change.priority.unwrap_or(known.terms.priority);
        known.terms.lends = change.lends.unwrap_or(known.terms.lends);
        if let Some(limit) = change.limit {
            known.set_limit(limit);
            self.forget_dry(session);
            self.ask_for_excess(session, effects);
        }
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            self.rekey(session, device);
            self.serve(device, effects);
        }
        Ok(())
    }

    /// Whoever runs the daemon asks: one that gave little a moment ago is asked again.
    fn forget_dry(&mut self, session: SessionId) {
        let Some(known) = self.sessions.get_mut(&session) else { return };
        let places: Vec<_> = known.places().map(|(device, _)| device).collect();
        places.into_iter().for_each(|device| known.place_mut(device).dry = None);
    }

    /// Asks those again that hold more than they may, or that are to give everything.
    pub(super) fn ask_for_all_excess(&mut self, effects: &mut Vec<Effect>) {
        let sessions = &self.sessions;
        self.in_excess.retain(|session| sessions.get(session).is_some_and(|known| !known.excess().is_zero()));
        for session in self.in_excess.clone() {
            self.ask_for_excess(session, effects);
        }
    }

    /// Asks a session for what it holds above its limit, wherever it has it parked; one that was evicted for everything.
    fn ask_for_excess(&mut self, session: SessionId, effects: &mut Vec<Effect>) {
        let known = &self.sessions[&session];
        let mut left = known.excess();
        self.in_excess.insert(session);
        let places: Vec<_> = known.places().map(|(device, _)| device).collect();
        for device in places {
            if left.is_zero() {
                return;
            }
            if let Some(there) = self.may_give(session, device, true) {
                let bytes = there.min(left);
                left -= bytes;
                self.ask(session, device, bytes, None, effects);
            }
        }
    }

    pub(super) fn evict(&mut self, session: SessionId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let known = self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?;
        known.is_evicted = true;
        let places: Vec<_> = known.places().map(|(device, _)| device).collect();
        let let_go = self.drop_requests_of(Holder::Session(session), &Refusal::Evicted, effects);
        for device in &places {
            // What it is not to get any more is for others.
            self.set_guarantee(session, *device, Bytes::ZERO);
        }
        self.forget_dry(session);
        self.ask_for_excess(session, effects);
        for device in places.into_iter().chain(let_go) {
            self.serve(device, effects);
        }
        Ok(())
    }

    pub(super) fn drain(
        &mut self,
        device: DeviceId,
        is_draining: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        self.devices.get_mut(&device).ok_or(LedgerError::NoDevice(device))?.drain(is_draining);
        if is_draining {
            self.let_unheld_go(device, Bytes::MAX, effects);
            self.trim(device, None, Bytes::MAX, effects)
        } else {
            self.serve(device, effects);
            Ok(())
        }
    }

    /// Nobody may ask for anything there, or it may not.
    pub(super) fn barred(&self, holder: Holder, device: DeviceId) -> Option<Refusal> {
        let account = &self.devices[&device];
        let is_evicted = |session: SessionId| {
            self.sessions.get(&session).is_some_and(|session| session.is_evicted || session.is_ending)
        };
        if self.is_closed {
            Some(Refusal::Closed)
        } else if account.is_lost() {
            Some(Refusal::Lost { device })
        } else if account.is_draining() {
            Some(Refusal::Draining { device })
        } else if let Holder::Session(session) = holder
            && is_evicted(session)
        {
            Some(Refusal::Evicted)
        } else {
            None
        }
    }
}
