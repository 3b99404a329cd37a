//! Asking back: memory that lies idle in one session, for another that waits.
//!
//! Who waits first on a device is short of so many bytes once all that lies with the daemon is given up. Sessions are asked for that much together, as far as they have it
//! parked: those above their guarantee first, then low priority, then who has most. One session has one question at a time on a device, and answers it when it has released what it
//! will. Nobody is asked where all of it would not do.
//!
//! What a session got so is not asked back from it for a while, and for longer where memory goes to and fro: two jobs that want the same bytes all the time take turns, and do
//! not spend their time on moving them. A guarantee, and a higher priority, do not wait for that.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::session::Dry;
use super::{Effect, Holder, Ledger, LedgerError};
use crate::ids::{DeviceId, RequestId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// A session that gave less than it was asked for is let be for so long, unless it parks more.
const DRY_MS: u64 = 500;
/// One that has not answered at all is let be for so long, or until it answers.
const SILENT_MS: u64 = 10_000;
/// So long stays with a session what it got by asking others, the first time.
const SETTLE_MS: u64 = 50;
/// And so long at most.
const SETTLE_MS_MAX: u64 = 2_000;
/// It is the first time again after so many times as long.
const SETTLE_TIMES: u64 = 4;

/// What a session was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    number: u64,
    bytes: Bytes,
    /// What it has released since.
    given: Bytes,
    at_ms: u64,
    /// For whom.
    request: Option<RequestId>,
    waiting: Option<Holder>,
    /// Its time is up: nobody waits for the answer any more.
    is_late: bool,
}

/// Every question that is not answered, by device.
#[derive(Debug, Default)]
pub(super) struct Questions {
    by_place: BTreeMap<(DeviceId, SessionId), Asked>,
    last: u64,
}

impl Questions {
    fn on(&self, device: DeviceId) -> impl Iterator<Item = (SessionId, &Asked)> {
        let all = (device, SessionId(0))..=(device, SessionId(u64::MAX));
        self.by_place.range(all).map(|((_, session), asked)| (*session, asked))
    }

    /// Bytes that may still come on a device.
    fn coming(&self, device: DeviceId) -> Bytes {
        self.on(device)
            .filter(|(_, asked)| !asked.is_late)
            .map(|(_, asked)| asked.bytes.saturating_sub(asked.given))
            .sum()
    }

    /// Somebody is waited for on a device.
    pub(super) fn are_open(&self, device: DeviceId) -> bool {
        self.on(device).any(|(_, asked)| !asked.is_late)
    }

    /// Somebody is waited for on behalf of a request.
    pub(super) fn are_open_for(&self, device: DeviceId, request: RequestId) -> bool {
        self.on(device).any(|(_, asked)| !asked.is_late && asked.request == Some(request))
    }

    /// Sessions that are waited for.
    pub(super) fn open(&self) -> impl Iterator<Item = (DeviceId, SessionId)> + '_ {
        self.by_place.iter().filter(|(_, asked)| !asked.is_late).map(|(place, _)| *place)
    }

    /// A session has released so much. Says whether that was asked for.
    pub(super) fn note_released(&mut self, session: SessionId, device: DeviceId, len: Bytes) -> bool {
        let Some(asked) = self.by_place.get_mut(&(device, session)) else { return false };
        let is_wanted = !asked.is_late && asked.given < asked.bytes;
        asked.given += len;
        is_wanted
    }

    /// A session is gone, and answers nothing.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.by_place.retain(|(_, of), _| *of != session);
    }
}

/// Who may be asked for how much, and in which order.
struct Candidate {
    session: SessionId,
    bytes: Bytes,
    /// Within its guarantee, priority, and how little it has.
    order: (bool, u32, Reverse<Bytes>, SessionId),
}

/// Whether a session can be asked.
enum Askable {
    Now(Bytes),
    /// Not yet: what it has it got a moment ago.
    Later,
    No,
}

impl Ledger {
    /// Asks other sessions for what a request lacks, if together they may have it.
    pub(super) fn ask_back(&mut self, request: RequestId, lacking: Bytes, effects: &mut Vec<Effect>) {
        let waiting = &self.requests[&request];
        let (device, holder) = (waiting.device, waiting.holder);
        let coming = self.questions.coming(device);
        if lacking <= coming || waiting.deadline_ms <= self.now_ms {
            return;
        }
        let (mut candidates, _) = self.candidates(request);
        let there: Bytes = candidates.iter().map(|candidate| candidate.bytes).sum();
        let mut left = lacking - coming;
        if there < left {
            return;
        }
        candidates.sort_by_key(|candidate| candidate.order);
        for candidate in candidates {
            if left.is_zero() {
                break;
            }
            let bytes = candidate.bytes.min(left);
            left -= bytes;
            self.ask(candidate.session, device, bytes, Some((request, holder)), effects);
        }
        self.requests.get_mut(&request).expect("looked up above").has_asked = true;
    }

    pub(super) fn ask(
        &mut self,
        session: SessionId,
        device: DeviceId,
        bytes: Bytes,
        waiting: Option<(RequestId, Holder)>,
        effects: &mut Vec<Effect>,
    ) {
        self.questions.last += 1;
        let number = self.questions.last;
        let (request, waiting) = waiting.unzip();
        let asked = Asked { number, bytes, given: Bytes::ZERO, at_ms: self.now_ms, request, waiting, is_late: false };
        self.questions.by_place.insert((device, session), asked);
        effects.push(Effect::AskBack { session, device, ask: number, bytes, request });
    }

    /// Whoever may be asked for the sake of a request, and whether there are some that may be later.
    fn candidates(&self, request: RequestId) -> (Vec<Candidate>, bool) {
        let (device, mut is_later) = (self.requests[&request].device, false);
        let mut candidates = Vec::new();
        for (session, other) in &self.sessions {
            match self.askable(*session, request) {
                Askable::Now(bytes) => {
                    let place = other.place(device);
                    let order = (place.borne() <= place.guarantee, other.terms.priority, Reverse(bytes), *session);
                    candidates.push(Candidate { session: *session, bytes, order });
                }
                Askable::Later => is_later = true,
                Askable::No => {}
            }
        }
        (candidates, is_later)
    }

    fn askable(&self, session: SessionId, request: RequestId) -> Askable {
        let waiting = &self.requests[&request];
        let (other, place) = (&self.sessions[&session], self.sessions[&session].place(waiting.device));
        if waiting.holder == Holder::Session(session) {
            return Askable::No;
        }
        let Some(bytes) = self.may_give(session, waiting.device, false) else { return Askable::No };
        let outranks = self.is_within_guarantee(request) || self.priority_of(waiting.holder) > other.terms.priority;
        if self.now_ms < place.settled_until_ms && !outranks { Askable::Later } else { Askable::Now(bytes) }
    }

    /// What a session may be asked for at this moment: by others, not what it is guaranteed and does not lend; by whoever runs the daemon, all.
    pub(super) fn may_give(&self, session: SessionId, device: DeviceId, is_by_hand: bool) -> Option<Bytes> {
        let other = &self.sessions[&session];
        let place = other.place(device);
        let is_asked = self.questions.by_place.get(&(device, session)).is_some_and(|asked| {
            // One that was silent is asked again some time.
            !asked.is_late || self.now_ms < asked.at_ms.saturating_add(SILENT_MS)
        });
        if is_asked || !other.is_attached || !other.terms.answers {
            return None;
        }
        let parked = place.parked();
        if place.dry.is_some_and(|dry| parked <= dry.parked && self.now_ms < dry.until_ms) {
            return None;
        }
        let bytes = if other.terms.lends || is_by_hand {
            parked
        } else {
            parked.min(place.borne().saturating_sub(place.guarantee))
        };
        (!bytes.is_zero()).then_some(bytes)
    }

    /// Whoever waits first on a device may be helped by asking, now or later.
    pub(super) fn may_ask_later(&self, request: RequestId) -> bool {
        self.candidates(request).1
    }

    pub(super) fn priority_of(&self, holder: Holder) -> u32 {
        match holder {
            Holder::Session(session) => self.sessions.get(&session).map_or(0, |session| session.terms.priority),
            Holder::Plan(_) => 0,
        }
    }

    /// A request was granted that others were asked for: what it got stays for a while.
    pub(super) fn settle(&mut self, holder: Holder, device: DeviceId) {
        let Holder::Session(session) = holder else { return };
        let now_ms = self.now_ms;
        let Some(session) = self.sessions.get_mut(&session) else { return };
        let place = session.place_mut(device);
        let again_ms = place.settled_until_ms.saturating_add(place.settle_ms * SETTLE_TIMES);
        let is_again = place.settle_ms > 0 && now_ms < again_ms;
        place.settle_ms = if is_again { (place.settle_ms * 2).min(SETTLE_MS_MAX) } else { SETTLE_MS };
        place.settled_until_ms = now_ms + place.settle_ms;
    }

    pub(super) fn answered(
        &mut self,
        session: SessionId,
        device: DeviceId,
        ask: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let answering = self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?;
        if !self.devices.contains_key(&device) {
            return Err(LedgerError::NoDevice(device));
        }
        let is_it = |asked: &&Asked| asked.number == ask;
        let Some(asked) = self.questions.by_place.get(&(device, session)).filter(is_it).copied() else {
            // It was asked again meanwhile, or says something that nobody asked.
            return Ok(());
        };
        self.questions.by_place.remove(&(device, session));
        let place = answering.place_mut(device);
        if asked.given < asked.bytes {
            place.dry = Some(Dry { parked: place.parked(), until_ms: self.now_ms + DRY_MS });
        }
        let took_ms = self.now_ms - asked.at_ms;
        let Asked { waiting, bytes, given, .. } = asked;
        effects.push(Effect::Gave { session, device, waiting, asked: bytes, given, took_ms });
        self.serve(device, effects);
        Ok(())
    }

    pub(super) fn note_parked(
        &mut self,
        device: DeviceId,
        sessions: &[(SessionId, Option<Bytes>)],
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        if !self.devices.contains_key(&device) {
            return Err(LedgerError::NoDevice(device));
        }
        for (session, parked) in sessions {
            // One that has ended in the same moment has nothing.
            let Some(known) = self.sessions.get_mut(session) else { continue };
            known.place_mut(device).parked = *parked;
        }
        self.serve(device, effects);
        Ok(())
    }

    /// Questions whose time is up: nobody waits for their answers any more.
    pub(super) fn let_questions_go(&mut self, effects: &mut Vec<Effect>) {
        let now_ms = self.now_ms;
        for ((device, session), asked) in &mut self.questions.by_place {
            if !asked.is_late && now_ms >= asked.at_ms.saturating_add(limits::ANSWER_MS_MAX) {
                asked.is_late = true;
                effects.push(Effect::Unanswered { session: *session, device: *device, asked: asked.bytes });
            }
        }
    }

    pub(super) fn trim_idle(
        &mut self,
        device: DeviceId,
        bytes: Bytes,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        if !self.devices.contains_key(&device) {
            return Err(LedgerError::NoDevice(device));
        }
        self.give_up_idle(device, bytes, effects);
        Ok(())
    }

    /// Gives idle chunks back to the driver, the longest idle first, until that is so much or there is no other.
    pub(super) fn give_up_idle(&mut self, device: DeviceId, bytes: Bytes, effects: &mut Vec<Effect>) {
        let mut left = bytes;
        let mut given_up = Vec::new();
        for (chunk, len, _) in self.devices[&device].oldest_idle() {
            if left.is_zero() {
                break;
            }
            left = left.saturating_sub(len);
            given_up.push(chunk);
        }
        for chunk in given_up {
            self.destroy(chunk, effects);
        }
    }

    pub(super) fn trim(
        &mut self,
        device: DeviceId,
        only: Option<SessionId>,
        bytes: Bytes,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        if !self.devices.contains_key(&device) {
            return Err(LedgerError::NoDevice(device));
        }
        if let Some(session) = only.filter(|session| !self.sessions.contains_key(session)) {
            return Err(LedgerError::NoSession(session));
        }
        let sessions: Vec<_> =
            self.sessions.keys().copied().filter(|session| only.is_none_or(|only| only == *session)).collect();
        for session in sessions {
            // Whoever runs the daemon asks, so whoever gave nothing a moment ago is asked again.
            if let Some(session) = self.sessions.get_mut(&session) {
                session.place_mut(device).dry = None;
            }
            if let Some(there) = self.may_give(session, device, true).filter(|_| !bytes.is_zero()) {
                self.ask(session, device, there.min(bytes), None, effects);
            }
        }
        self.serve(device, effects);
        Ok(())
    }
}
