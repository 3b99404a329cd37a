//! Who holds what: sessions, chunks, leases, limits and waiting requests of one node, as a pure state machine. [`Command`]s in,
//! [`Effect`]s out; no sockets, no clock of its own, no driver. Same commands, same effects.
//!
//! ## Invariants
//!
//! 1. A chunk has exactly one state, and when it is leased exactly one holder; when it is shared, those who hold its range.
//!    Shared bytes count once against the device, and against each holder's limit.
//! 2. Bytes are promised before they are created, and nothing is promised beyond a device's budget. What was there when the ledger began may be more than a device's total: then nothing is promised until that is gone.
//! 3. A chunk that one session could have imported is never granted to another. What is shared goes back to the driver in the end.
//! 4. A session never gets beyond its limit; what it holds when that is set lower falls with what it gives back.
//! 5. Every request ends: granted, refused with who holds what, timed out, or gone with its session.
//!
//! [`Ledger::invariants`] says them in code; tests call it after every step, and the O(1) parts are asserted always.
//!
//! ## Who is served first
//!
//! Requests wait per device. Those within their session's guarantee come first, then by priority; within one, those of sessions that hold memory there come before those of
//! sessions that start, and then the older first. Nobody passes a request ahead that could be served: a running job grows before a new one
//! starts, and within each class nobody starves.

mod account;
mod asking;
mod audit;
mod command;
mod facts;
mod queue;
mod refusal;
mod session;
mod shared;
mod terms;
mod views;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub use account::{AccountView, DeviceBytes};
pub use command::{Change, Command, Effect, EndReason, Holder, Overstay, Shortage};
pub use facts::{ChunkFact, Facts, FactsError, Owner, RangeFact, SessionFact};
pub use refusal::{Holding, LedgerError, Refusal};
pub use session::{SessionView, Terms};
pub use shared::RangeView;
pub use views::{ChunkIs, ChunkView, RequestView};

use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use crate::ladder::{Part, Stock};
use crate::limits;
use crate::units::Bytes;
use account::{Account, Shelf};
use asking::Questions;
use queue::Request;
use session::Session;
use shared::Shared;

/// Who has the rest of a device is told to whoever is refused: the first few.
const HOLDERS_SHOWN: usize = 8;

/// What a chunk is at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Promised: its bytes count, and the driver is asked to create it. `None` when it is for nobody in particular.
    Creating { request: Option<RequestId> },
    /// With the daemon. `used_by` is the session that could have imported it; `None` when nobody could.
    Idle { used_by: Option<SessionId>, since: u64 },
    /// With the daemon, for the job of this plan; nobody could have imported it.
    Reserved { plan: PlanId },
    /// Set aside for a request whose other chunks are being created, from where it lay.
    Claimed { request: RequestId, from: Shelf },
    /// A session may have it mapped.
    Leased { session: SessionId },
    /// Those who hold its range may have it mapped.
    Shared { range: RangeId },
    /// Being given back to the driver, or it could not be.
    Quarantined { failed: bool },
}

#[derive(Clone, Debug)]
struct Record {
    device: DeviceId,
    len: Bytes,
    state: State,
    /// Nobody can hand it on: it goes back to the driver when it is released.
    is_bare: bool,
}

/// Bytes that came back to the ledger, by how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReturnedBytes {
    /// Released by live sessions, or left behind by those that said goodbye.
    pub release: Bytes,
    /// Released by sessions that were asked for it.
    pub revoke: Bytes,
    /// Left behind by sessions whose process died.
    pub death: Bytes,
}

/// The ledger.
#[derive(Debug, Default)]
pub struct Ledger {
    devices: BTreeMap<DeviceId, Account>,
    sessions: BTreeMap<SessionId, Session>,
    chunks: HashMap<ChunkId, Record>,
    requests: BTreeMap<RequestId, Request>,
    /// What sessions were asked to give back.
    questions: Questions,
    overstay: Overstay,
    /// The largest chunk that is dealt in, where somebody has said.
    chunk_len_max: Option<Bytes>,
    shared: Shared,
    /// Who is guaranteed something, and where.
    guaranteed: BTreeSet<(DeviceId, SessionId)>,
    /// Sessions that were told to hold less, until they do.
    in_excess: BTreeSet<SessionId>,
    /// Bytes reserved per plan.
    plans: BTreeMap<PlanId, Bytes>,
    returned: ReturnedBytes,
    is_closed: bool,
    next_chunk: u64,
    /// Orders idle chunks by when they became so.
    moment: u64,
    now_ms: u64,
}

impl Ledger {
    /// A ledger without devices.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// What becomes of requests within a guarantee whose time is up.
    pub fn set_overstay(&mut self, overstay: Overstay) {
        self.overstay = overstay;
    }

    /// The largest chunk that is dealt in: what can be had is no more than such chunks have, as many as there may be.
    pub fn set_chunk_len_max(&mut self, len: Bytes) {
        self.chunk_len_max = Some(len);
    }

    /// Takes a command. On error nothing has changed.
    pub fn step(&mut self, command: Command) -> Result<Vec<Effect>, LedgerError> {
        let mut effects = Vec::new();
        match command {
            Command::AddDevice { device, total, chunks_max } => self.add_device(device, total, chunks_max)?,
            Command::Lose { device } => self.lose(device, &mut effects)?,
            Command::Observe { device, free } => self.observe(device, free, &mut effects)?,
            Command::Open { session, terms } => self.open(session, terms)?,
            command @ Command::Admit { .. } => self.admit(command, &mut effects)?,
            Command::Change { session, change, revision } => self.change(session, change, revision, &mut effects)?,
            Command::Evict { session } => self.evict(session, &mut effects)?,
            Command::Spare { session } => self.spare(session)?,
            Command::Drain { device, is_draining } => self.drain(device, is_draining, &mut effects)?,
            Command::Trim { device, session, bytes } => self.trim(device, session, bytes, &mut effects)?,
            Command::TrimIdle { device, bytes } => self.trim_idle(device, bytes, &mut effects)?,
            Command::Parked { device, sessions } => self.note_parked(device, &sessions, &mut effects)?,
            Command::Answered { session, device, ask } => self.answered(session, device, ask, &mut effects)?,
            Command::Detach { session } => self.detach(session, &mut effects)?,
            Command::Reattach { session } => self.reattach(session)?,
            Command::Register { session, device, len } => self.register(session, device, len, &mut effects)?,
            Command::End { session, reason } => self.end(session, reason, &mut effects)?,
            Command::Acquire { request, holder, device, parts, plan, wait_ms, waited_ms } => {
                let wanted = Request::new(holder, device, parts, plan, self.now_ms, wait_ms)?.having_waited(waited_ms);
                self.acquire(request, wanted, &mut effects)?;
            }
            Command::Cancel { request } => self.cancel(request, &mut effects),
            Command::Close => self.close(&mut effects),
            Command::Release { session, chunks } => self.release(session, &chunks, &mut effects)?,
            Command::Publish { range, session, chunks, linger_ms } => {
                self.publish(range, session, chunks, linger_ms)?;
            }
            Command::Attach { range, session } => self.attach(range, session, &mut effects)?,
            Command::Leave { range, session } => self.leave(range, session, &mut effects)?,
            Command::Withdraw { range } => self.withdraw(range, &mut effects)?,
            Command::Unreserve { plan } => self.unreserve(plan, &mut effects)?,
            Command::Warm { device, part } => self.warm(device, part, &mut effects)?,
            Command::Created { chunk } => self.created(chunk, &mut effects)?,
            Command::CreateFailed { chunk, why } => self.create_failed(chunk, why, &mut effects)?,
            Command::Destroyed { chunk } => self.destroyed(chunk, &mut effects)?,
            Command::DestroyFailed { chunk } => self.destroy_failed(chunk, &mut effects)?,
            Command::Tick { now_ms } => self.tick(now_ms, &mut effects),
        }
        Ok(effects)
    }

    fn add_device(&mut self, device: DeviceId, total: Bytes, chunks_max: u64) -> Result<(), LedgerError> {
        if self.devices.contains_key(&device) {
            return Err(LedgerError::DeviceExists(device));
        }
        self.devices.insert(device, Account::new(total, chunks_max));
        Ok(())
    }

    fn lose(&mut self, device: DeviceId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        self.devices.get_mut(&device).ok_or(LedgerError::NoDevice(device))?.lose();
        self.let_unheld_go(device, Bytes::MAX, effects);
        self.serve(device, effects);
        Ok(())
    }

    fn observe(&mut self, device: DeviceId, free: Bytes, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        self.devices.get_mut(&device).ok_or(LedgerError::NoDevice(device))?.observe(free);
        self.serve(device, effects);
        Ok(())
    }

    fn open(&mut self, session: SessionId, terms: Terms) -> Result<(), LedgerError> {
        if self.sessions.contains_key(&session) {
            return Err(LedgerError::SessionExists(session));
        }
        if self.sessions.len() >= limits::SESSIONS_MAX {
            return Err(LedgerError::TooMany { what: "sessions", limit: limits::SESSIONS_MAX });
        }
        self.sessions.insert(session, Session::new(terms));
        Ok(())
    }

    fn detach(&mut self, session: SessionId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?.is_attached = false;
        let mut moved = self.drop_requests_of(Holder::Session(session), &Refusal::Cancelled, effects);
        moved.extend(self.forget_questions(session));
        for device in moved {
            self.serve(device, effects);
        }
        Ok(())
    }

    /// Everything of the session goes back to the driver: what it could have imported is never granted to anybody else, and a process
    /// that forked a child may leave a mapping behind.
    fn end(&mut self, session: SessionId, reason: EndReason, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        if !self.sessions.contains_key(&session) {
            return Err(LedgerError::NoSession(session));
        }
        let mut let_go = self.drop_requests_of(Holder::Session(session), &Refusal::Cancelled, effects);
        let_go.extend(self.forget_questions(session));
        self.leave_all(session, effects);
        let ended = self.sessions.remove(&session).expect("looked up above");
        // What it had and was guaranteed others may have.
        self.guaranteed.retain(|(_, of)| *of != session);
        let_go.extend(ended.places().map(|(device, _)| device));
        let mut left_behind = Bytes::ZERO;
        for chunk in ended.leased {
            left_behind += self.chunks[&chunk].len;
            self.destroy(chunk, effects);
        }
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            for chunk in self.devices[&device].idle_of(Some(session)) {
                self.destroy(chunk, effects);
            }
        }
        match reason {
            EndReason::Closed => self.returned.release += left_behind,
            EndReason::Died => self.returned.death += left_behind,
        }
        for device in let_go {
            self.serve(device, effects);
        }
        Ok(())
    }

    /// Nobody waits for answers of a session that will give none. Says where somebody did.
    fn forget_questions(&mut self, session: SessionId) -> Vec<DeviceId> {
        let open: Vec<_> = self.questions.open().filter(|(_, of)| *of == session).map(|(device, _)| device).collect();
        self.questions.forget(session);
        open
    }

    fn release(
        &mut self,
        session: SessionId,
        chunks: &[ChunkId],
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let holder = self.sessions.get(&session).ok_or(LedgerError::NoSession(session))?;
        let mut named = BTreeSet::new();
        for chunk in chunks {
            if !holder.leased.contains(chunk) || !named.insert(*chunk) {
                return Err(LedgerError::NotHeld { session, chunk: *chunk });
            }
        }
        let mut devices = BTreeSet::new();
        for chunk in named {
            let Record { device, len, is_bare, .. } = self.chunks[&chunk];
            self.sessions.get_mut(&session).expect("looked up above").give_back(device, chunk, len);
            // What was asked for is for somebody else, who cannot have it as it is: while the rest comes it goes back to the driver.
            let is_wanted = self.questions.note_released(session, device, len);
            *(if is_wanted { &mut self.returned.revoke } else { &mut self.returned.release }) += len;
            let account = &self.devices[&device];
            if is_wanted || is_bare || account.is_draining() || !account.excess().is_zero() {
                self.destroy(chunk, effects);
            } else {
                self.make_idle(chunk, Some(session));
            }
            devices.insert(device);
        }
        for device in devices {
            self.rekey(session, device);
            self.serve(device, effects);
        }
        Ok(())
    }

    fn unreserve(&mut self, plan: PlanId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let was_asked_for = !self.drop_requests_of(Holder::Plan(plan), &Refusal::Cancelled, effects).is_empty();
        let was_in_use = self.forget_plan_of_claims(plan);
        if self.plans.remove(&plan).is_none() && !was_asked_for && !was_in_use {
            return Err(LedgerError::NoPlan(plan));
        }
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            for chunk in self.devices[&device].reserved_of(plan) {
                self.make_idle(chunk, None);
            }
            self.let_excess_go(device, effects);
            self.serve(device, effects);
        }
        Ok(())
    }

    /// What was there when the ledger began may be more than it is to have: what lies idle of that goes back to the driver.
    fn let_excess_go(&mut self, device: DeviceId, effects: &mut Vec<Effect>) {
        let excess = self.devices[&device].excess();
        self.give_up_idle(device, excess, effects);
    }

    fn warm(&mut self, device: DeviceId, part: Part, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let account = self.devices.get(&device).ok_or(LedgerError::NoDevice(device))?;
        if account.has_waiting() || account.is_draining() || !account.bytes().creating.is_zero() {
            return Ok(());
        }
        let missing = part.count.saturating_sub(account.count_on_shelf(Shelf::Pristine, part.len));
        let count = (account.available().get() / part.len.get().max(1)).min(missing).min(account.chunks_free());
        let count = count.min(limits::CHUNKS_MAX.saturating_sub(self.chunks.len()) as u64);
        for _ in 0..count {
            self.promise(device, part.len, None, effects);
        }
        Ok(())
    }

    fn created(&mut self, chunk: ChunkId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let record = self.chunks.get(&chunk).ok_or(LedgerError::Unasked(chunk))?;
        let State::Creating { request } = record.state else { return Err(LedgerError::Unasked(chunk)) };
        let device = record.device;
        let len = record.len;
        self.devices.get_mut(&device).expect("a chunk has its device").note_created(len);
        let request = request.filter(|request| self.requests.contains_key(request));
        match request {
            Some(request) => self.chunk_ready(request, chunk, effects),
            None => self.make_idle(chunk, None),
        }
        // After the last of a request too: its other chunks may lie idle again, and those who wait may turn out to wait for each other.
        if request.is_none_or(|request| !self.requests.contains_key(&request)) {
            self.serve(device, effects);
        }
        Ok(())
    }

    fn create_failed(&mut self, chunk: ChunkId, why: Shortage, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let record = self.chunks.get(&chunk).ok_or(LedgerError::Unasked(chunk))?;
        let State::Creating { request } = record.state else { return Err(LedgerError::Unasked(chunk)) };
        let device = record.device;
        self.forget(chunk);
        let account = self.devices.get_mut(&device).expect("a chunk has its device");
        account.note_refused_create(why);
        if let Some(request) = request.filter(|request| self.requests.contains_key(request)) {
            self.chunk_missing(request, why, effects);
        }
        self.serve(device, effects);
        Ok(())
    }

    fn destroyed(&mut self, chunk: ChunkId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let record = self.chunks.get(&chunk).ok_or(LedgerError::Unasked(chunk))?;
        let State::Quarantined { .. } = record.state else { return Err(LedgerError::Unasked(chunk)) };
        let device = record.device;
        self.forget(chunk);
        self.serve(device, effects);
        Ok(())
    }

    fn destroy_failed(&mut self, chunk: ChunkId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let record = self.chunks.get(&chunk).ok_or(LedgerError::Unasked(chunk))?;
        if record.state != (State::Quarantined { failed: false }) {
            return Err(LedgerError::Unasked(chunk));
        }
        let device = record.device;
        self.set_state(chunk, State::Quarantined { failed: true });
        // Its bytes will not come: somebody may have waited for them.
        self.serve(device, effects);
        Ok(())
    }

    fn tick(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        self.now_ms = self.now_ms.max(now_ms);
        self.let_questions_go(effects);
        self.let_overdue_go(effects);
        self.ask_for_all_excess(effects);
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            self.let_excess_go(device, effects);
            self.serve(device, effects);
        }
    }

    // === The life of a chunk

    /// Promises a new chunk and asks for it to be created.
    fn promise(
        &mut self,
        device: DeviceId,
        len: Bytes,
        request: Option<RequestId>,
        effects: &mut Vec<Effect>,
    ) -> ChunkId {
        self.next_chunk += 1;
        let chunk = ChunkId(self.next_chunk);
        let state = State::Creating { request };
        self.devices.get_mut(&device).expect("the caller has the device").enter(chunk, len, state);
        self.chunks.insert(chunk, Record { device, len, state, is_bare: false });
        effects.push(Effect::Create { chunk, device, len });
        chunk
    }

    fn set_state(&mut self, chunk: ChunkId, state: State) {
        let record = self.chunks.get_mut(&chunk).expect("the caller has the chunk");
        let account = self.devices.get_mut(&record.device).expect("a chunk has its device");
        account.leave(chunk, record.len, record.state);
        account.enter(chunk, record.len, state);
        record.state = state;
    }

    fn make_idle(&mut self, chunk: ChunkId, used_by: Option<SessionId>) {
        self.moment += 1;
        self.set_state(chunk, State::Idle { used_by, since: self.moment });
    }

    fn lease(&mut self, chunk: ChunkId, session: SessionId) {
        self.set_state(chunk, State::Leased { session });
        self.sessions.get_mut(&session).expect("the caller has the session").leased.insert(chunk);
    }

    /// Asks for a chunk to be given back to the driver.
    fn destroy(&mut self, chunk: ChunkId, effects: &mut Vec<Effect>) {
        self.set_state(chunk, State::Quarantined { failed: false });
        effects.push(Effect::Destroy { chunk });
    }

    /// The chunk does not exist any more; its bytes can be promised again.
    fn forget(&mut self, chunk: ChunkId) {
        let record = self.chunks.remove(&chunk).expect("the caller has the chunk");
        let account = self.devices.get_mut(&record.device).expect("a chunk has its device");
        account.leave(chunk, record.len, record.state);
        account.note_gone();
    }

    // === Looking

    /// Every device with its bytes by state.
    pub fn devices(&self) -> Vec<AccountView> {
        self.devices.keys().filter_map(|device| self.device(*device)).collect()
    }

    /// One device.
    pub fn device(&self, device: DeviceId) -> Option<AccountView> {
        let account = self.devices.get(&device)?;
        let guaranteed = self.guaranteed_on(device).map(|(_, place)| place.guarantee).sum();
        let asked = self.questions.open().filter(|(of, _)| *of == device).count();
        let chunk_len_max = self.chunk_len_max.unwrap_or(limits::CHUNK_LEN_MAX);
        Some(AccountView { guaranteed, asked, chunk_len_max, is_closed: self.is_closed, ..account.view(device) })
    }

    /// Memory that a session can lease on a device.
    pub fn stock(&self, session: SessionId, device: DeviceId) -> Option<Stock> {
        let idle = self.devices.get(&device)?.idle_lens(session);
        let view = self.device(device)?;
        Some(Stock { idle, room: self.room_in_bytes(session, &view)?, chunks_left: view.chunks_left })
    }

    /// What a session could get on a device beside what it holds: what nobody has, or lies idle with the daemon, less what is kept for others, within its limit and as many chunks as there may be.
    pub fn room(&self, session: SessionId, device: DeviceId) -> Option<Bytes> {
        let view = self.device(device)?;
        Some(self.room_in_bytes(session, &view)?.min(view.in_chunks()))
    }

    /// The same, in however many chunks.
    fn room_in_bytes(&self, session: SessionId, view: &AccountView) -> Option<Bytes> {
        let known = self.sessions.get(&session)?;
        let free = view.unpromised().saturating_sub(self.withheld_from(Holder::Session(session), view.device));
        let left = known.terms.limit.saturating_sub(known.held);
        Some(if known.is_evicted { Bytes::ZERO } else { free.min(left) })
    }

    /// Every session.
    pub fn sessions(&self) -> Vec<SessionView> {
        self.sessions.iter().map(|(session, known)| known.view(*session)).collect()
    }

    /// One session.
    pub fn session(&self, session: SessionId) -> Option<SessionView> {
        self.sessions.get(&session).map(|known| known.view(session))
    }

    /// Chunks of a request that are there, and how many it wants. `None` once it is answered.
    pub fn progress(&self, request: RequestId) -> Option<(u64, u64)> {
        self.requests.get(&request).map(Request::progress)
    }

    /// Requests that wait or are being created.
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    /// How many chunks there are, in whatever state.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Bytes that came back, by how.
    pub fn returned(&self) -> ReturnedBytes {
        self.returned
    }

    /// Bytes reserved per plan.
    pub fn reserved(&self) -> Vec<(PlanId, Bytes)> {
        self.plans.iter().map(|(plan, bytes)| (*plan, *bytes)).collect()
    }

    /// The sessions that hold most on a device, the largest first.
    fn holders(&self, device: DeviceId) -> Vec<Holding> {
        let held = |(session, known): (&SessionId, &Session)| {
            let held = known.held_on(device);
            (!held.is_zero()).then_some(Holding { session: *session, held })
        };
        let mut holders: Vec<_> = self.sessions.iter().filter_map(held).collect();
        holders.sort_by_key(|holding| (std::cmp::Reverse(holding.held), holding.session));
        holders.truncate(HOLDERS_SHOWN);
        holders
    }
}

#[cfg(test)]
mod tests;
