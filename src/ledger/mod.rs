//! Who holds what: sessions, chunks, leases, limits and waiting requests of one node, as a pure state machine. [`Command`]s in,
//! [`Effect`]s out; no sockets, no clock of its own, no driver. Same commands, same effects.
//!
//! ## Invariants
//!
//! 1. A chunk has exactly one state, and when it is leased exactly one holder.
//! 2. Bytes are promised before they are created, and nothing is promised beyond a device's budget.
//! 3. A chunk that one tenant could have imported is never granted to another. For now every session is its own tenant.
//! 4. A session never holds more than its limit.
//! 5. Every request ends: granted, refused with who holds what, timed out, or gone with its session.
//!
//! [`Ledger::invariants`] says them in code; tests call it after every step, and the O(1) parts are asserted always.
//!
//! ## Who is served first
//!
//! Requests wait per device, by priority; within one, those of sessions that hold memory there come before those of
//! sessions that start, and then the older first. Nobody passes a request ahead that could be served: a running job grows before a new one
//! starts, and within each class nobody starves.

mod account;
mod audit;
mod queue;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub use account::{AccountView, DeviceBytes};

use crate::error::ErrorKind;
use crate::ids::{ChunkId, DeviceId, PlanId, RequestId, SessionId};
use crate::ladder::Part;
use crate::limits;
use crate::units::Bytes;
use account::{Account, Shelf};
use queue::Request;

/// What the driver was short of when it refused a create.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortage {
    /// Memory of the device: there is no more than what exists already.
    Memory,
    /// Descriptors of this process, or exports of the machine: the memory is there.
    Chunks,
    /// Nothing that is known of: something is broken.
    Nothing,
}

/// What happens to the ledger.
#[derive(Clone, Debug)]
pub enum Command {
    /// A device appears, empty.
    AddDevice {
        /// Its ordinal.
        device: DeviceId,
        /// Its bytes.
        total: Bytes,
        /// How many chunks of it there may be at one time: each takes descriptors, and an export.
        chunks_max: u64,
    },
    /// The device is gone: nothing on it works any more.
    Lose {
        /// Which.
        device: DeviceId,
    },
    /// The driver told how much of a device nobody holds.
    Observe {
        /// Which.
        device: DeviceId,
        /// Bytes that a create could still get.
        free: Bytes,
    },
    /// A session begins.
    Open {
        /// Its name in the ledger; never used before.
        session: SessionId,
        /// Bytes that it may never pass, on all devices together.
        limit: Bytes,
        /// Higher is served first.
        priority: u32,
    },
    /// The session's connection is gone, its process may live: it asks for nothing more and keeps what it has.
    Detach {
        /// Which.
        session: SessionId,
    },
    /// The session is over: it said so, or its process is gone.
    End {
        /// Which.
        session: SessionId,
        /// How it ended.
        reason: EndReason,
    },
    /// Somebody wants memory.
    Acquire {
        /// The request's name; never used before.
        request: RequestId,
        /// For whom.
        holder: Holder,
        /// Where.
        device: DeviceId,
        /// How much, in which chunks.
        parts: Vec<Part>,
        /// The plan whose reserved chunks may be used for it.
        plan: Option<PlanId>,
        /// How long it may wait for others to release, in milliseconds; 0 for not at all.
        wait_ms: u64,
    },
    /// Nobody waits for this request any more.
    Cancel {
        /// Which.
        request: RequestId,
    },
    /// Nothing is granted any more: who waits is refused, and whoever asks after this.
    Close,
    /// A session gives chunks back.
    Release {
        /// Which session.
        session: SessionId,
        /// Which chunks; all of them or, on error, none.
        chunks: Vec<ChunkId>,
    },
    /// A plan's reserved chunks are for everybody again.
    Unreserve {
        /// Which plan.
        plan: PlanId,
    },
    /// So many chunks that nobody could have imported are to lie idle: what is missing is created ahead of need, in room that nobody needs. Nothing
    /// happens while other chunks are being created.
    Warm {
        /// Where.
        device: DeviceId,
        /// Which.
        part: Part,
    },
    /// An [`Effect::Create`] was carried out.
    Created {
        /// Which.
        chunk: ChunkId,
    },
    /// An [`Effect::Create`] was refused by the driver.
    CreateFailed {
        /// Which.
        chunk: ChunkId,
        /// What the driver was short of.
        why: Shortage,
    },
    /// An [`Effect::Destroy`] was carried out, perhaps after it had failed.
    Destroyed {
        /// Which.
        chunk: ChunkId,
    },
    /// An [`Effect::Destroy`] failed: the chunk stays in quarantine, and nobody waits for its bytes, until it is [`Command::Destroyed`] after all.
    DestroyFailed {
        /// Which.
        chunk: ChunkId,
    },
    /// Time has passed.
    Tick {
        /// Milliseconds since the ledger began.
        now_ms: u64,
    },
}

/// What is to be done about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Create this chunk and say how it went.
    Create {
        /// Its name.
        chunk: ChunkId,
        /// Where.
        device: DeviceId,
        /// How large.
        len: Bytes,
    },
    /// Give this chunk back to the driver and say how it went.
    Destroy {
        /// Its name.
        chunk: ChunkId,
    },
    /// A request is granted.
    Grant {
        /// Which.
        request: RequestId,
        /// Whose.
        holder: Holder,
        /// Its chunks with their sizes, in the order of the parts asked for.
        chunks: Vec<(ChunkId, Bytes)>,
    },
    /// A request is refused.
    Refuse {
        /// Which.
        request: RequestId,
        /// Whose.
        holder: Holder,
        /// Why.
        refusal: Refusal,
    },
}

/// For whom memory is held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// A session: leased.
    Session(SessionId),
    /// A plan whose job has not started: reserved.
    Plan(PlanId),
}

/// How a session ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// It said goodbye.
    Closed,
    /// Its process is gone.
    Died,
}

/// One session with what it holds, for people who wonder where the memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Who.
    pub session: SessionId,
    /// How much, on the device in question.
    pub held: Bytes,
}

/// Why a request was not granted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The session's own limit.
    #[error("{requested} asked for, {held} held, and the session's limit is {limit}")]
    OverLimit {
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes held and promised.
        held: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// More than the device could ever give.
    #[error("{requested} asked for, and the whole budget of {device} is {budget}")]
    OverBudget {
        /// Where.
        device: DeviceId,
        /// Bytes asked for.
        requested: Bytes,
        /// All that there is.
        budget: Bytes,
    },
    /// Not enough is left now, and the request was not to wait, or has waited as long as it was to.
    #[error(
        "{requested} asked for on {device}, {available} of {budget} available after {waited_ms} ms, {ahead} requests ahead; held by {}",
        list(holders, *reserved)
    )]
    Exhausted {
        /// Where.
        device: DeviceId,
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes that could be had.
        available: Bytes,
        /// All that there is.
        budget: Bytes,
        /// Who has the rest: the largest first.
        holders: Vec<Holding>,
        /// What is kept for the jobs of plans.
        reserved: Bytes,
        /// How long the request has waited.
        waited_ms: u64,
        /// Requests that were to be served first.
        ahead: usize,
    },
    /// The bytes are there, and the chunks are not: each takes descriptors, and an export.
    #[error(
        "{requested} chunks asked for on {device}, {available} of {limit} can be had; each takes open files of the daemon and an export of the machine: raise its limit of open files (LimitNOFILE), or make the ladder's sizes larger"
    )]
    Chunks {
        /// Where.
        device: DeviceId,
        /// Chunks asked for.
        requested: u64,
        /// Chunks that could be had.
        available: u64,
        /// How many there may be.
        limit: u64,
    },
    /// The device is gone.
    #[error("{device} is lost: nothing on it works any more; the daemon's log says since when and why")]
    Lost {
        /// Where.
        device: DeviceId,
    },
    /// Everybody who holds memory waits for more of it, so nobody will release any; this request came last.
    #[error("every session that holds memory on {device} waits for more: {}", list(cycle, Bytes::ZERO))]
    Deadlock {
        /// Where.
        device: DeviceId,
        /// Who waits for whom.
        cycle: Vec<Holding>,
    },
    /// The driver could not create a chunk for a reason other than memory.
    #[error("the driver cannot create chunks on {device}; the daemon's log says why")]
    Driver {
        /// Where.
        device: DeviceId,
    },
    /// The session ended, lost its connection, or took the request back.
    #[error("the request was given up")]
    Cancelled,
    /// The ledger is closed ([`Command::Close`]).
    #[error("the daemon is shutting down")]
    Closed,
}

fn list(holders: &[Holding], reserved: Bytes) -> String {
    let sessions = holders.iter().map(|holding| format!("{} ({})", holding.session, holding.held));
    let plans = (!reserved.is_zero()).then(|| format!("plans whose jobs are to come ({reserved})"));
    let all: Vec<_> = sessions.chain(plans).collect();
    if all.is_empty() { "nobody".into() } else { all.join(", ") }
}

impl Refusal {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Refusal::OverLimit { .. } => ErrorKind::OverLimit,
            Refusal::OverBudget { .. } | Refusal::Exhausted { .. } | Refusal::Chunks { .. } => ErrorKind::Exhausted,
            Refusal::Lost { .. } => ErrorKind::Unavailable,
            Refusal::Deadlock { .. } => ErrorKind::Conflict,
            Refusal::Driver { .. } => ErrorKind::Broken,
            Refusal::Cancelled | Refusal::Closed => ErrorKind::Unavailable,
        }
    }
}

/// A command that makes no sense. The ledger is as before.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LedgerError {
    /// Nobody added this device.
    #[error("there is no {0}")]
    NoDevice(DeviceId),
    /// It exists already.
    #[error("{0} exists already")]
    DeviceExists(DeviceId),
    /// Nobody opened this session, or it is over.
    #[error("there is no {0}")]
    NoSession(SessionId),
    /// The session exists already.
    #[error("{0} exists already")]
    SessionExists(SessionId),
    /// The session lost its connection and can ask for nothing.
    #[error("{0} is no longer connected")]
    Detached(SessionId),
    /// The request exists already.
    #[error("{0} exists already")]
    RequestExists(RequestId),
    /// Nobody holds anything for this plan.
    #[error("nothing is reserved for plan {}", .0.to_hex())]
    NoPlan(PlanId),
    /// The session does not hold this chunk, or named it twice.
    #[error("{session} does not hold {chunk}")]
    NotHeld {
        /// Who.
        session: SessionId,
        /// What.
        chunk: ChunkId,
    },
    /// The answer does not fit what was asked.
    #[error("nobody asked for that to be done to {0}")]
    Unasked(ChunkId),
    /// Nothing, or more than one request can be for.
    #[error("an acquire is for 1 to {chunks} chunks of {smallest} to {largest} and at most {bytes} in all", chunks = limits::ACQUIRE_CHUNKS_MAX,
        smallest = limits::CHUNK_LEN_MIN, largest = limits::CHUNK_LEN_MAX, bytes = limits::ACQUIRE_BYTES_MAX)]
    Parts,
    /// A maximum of the daemon is reached.
    #[error("all {limit} {what} are in use")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
}

impl LedgerError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            LedgerError::NoDevice(_) | LedgerError::NoSession(_) | LedgerError::NoPlan(_) => ErrorKind::NotFound,
            LedgerError::DeviceExists(_) | LedgerError::SessionExists(_) | LedgerError::RequestExists(_) => {
                ErrorKind::Conflict
            }
            LedgerError::Detached(_) => ErrorKind::Conflict,
            LedgerError::NotHeld { .. } | LedgerError::Unasked(_) | LedgerError::Parts => ErrorKind::Invalid,
            LedgerError::TooMany { .. } => ErrorKind::Exhausted,
        }
    }
}

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
    /// Being given back to the driver, or it could not be.
    Quarantined { failed: bool },
}

#[derive(Clone, Debug)]
struct Record {
    device: DeviceId,
    len: Bytes,
    state: State,
}

#[derive(Debug)]
struct Session {
    limit: Bytes,
    priority: u32,
    is_attached: bool,
    /// Leased, and promised to requests that are being created.
    held: Bytes,
    leased: BTreeSet<ChunkId>,
    held_by_device: BTreeMap<DeviceId, Bytes>,
}

/// A session as the ledger sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionView {
    /// Which.
    pub session: SessionId,
    /// Bytes that it may never pass.
    pub limit: Bytes,
    /// Higher is served first.
    pub priority: u32,
    /// Bytes leased and promised, by device.
    pub held: Vec<(DeviceId, Bytes)>,
    /// Chunks leased.
    pub chunks: usize,
    /// Its connection is there.
    pub is_attached: bool,
}

/// Bytes that came back to the ledger, by how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReturnedBytes {
    /// Released by live sessions, or left behind by those that said goodbye.
    pub release: Bytes,
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

    /// Takes a command. On error nothing has changed.
    pub fn step(&mut self, command: Command) -> Result<Vec<Effect>, LedgerError> {
        let mut effects = Vec::new();
        match command {
            Command::AddDevice { device, total, chunks_max } => self.add_device(device, total, chunks_max)?,
            Command::Lose { device } => self.lose(device, &mut effects)?,
            Command::Observe { device, free } => self.observe(device, free, &mut effects)?,
            Command::Open { session, limit, priority } => self.open(session, limit, priority)?,
            Command::Detach { session } => self.detach(session, &mut effects)?,
            Command::End { session, reason } => self.end(session, reason, &mut effects)?,
            Command::Acquire { request, holder, device, parts, plan, wait_ms } => {
                let wanted = Request::new(holder, device, parts, plan, self.now_ms, wait_ms)?;
                self.acquire(request, wanted, &mut effects)?;
            }
            Command::Cancel { request } => self.cancel(request, &mut effects),
            Command::Close => self.close(&mut effects),
            Command::Release { session, chunks } => self.release(session, &chunks, &mut effects)?,
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
        self.serve(device, effects);
        Ok(())
    }

    fn observe(&mut self, device: DeviceId, free: Bytes, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        self.devices.get_mut(&device).ok_or(LedgerError::NoDevice(device))?.observe(free);
        self.serve(device, effects);
        Ok(())
    }

    fn open(&mut self, session: SessionId, limit: Bytes, priority: u32) -> Result<(), LedgerError> {
        if self.sessions.contains_key(&session) {
            return Err(LedgerError::SessionExists(session));
        }
        if self.sessions.len() >= limits::SESSIONS_MAX {
            return Err(LedgerError::TooMany { what: "sessions", limit: limits::SESSIONS_MAX });
        }
        let opened = Session {
            limit,
            priority,
            is_attached: true,
            held: Bytes::ZERO,
            leased: BTreeSet::new(),
            held_by_device: BTreeMap::new(),
        };
        self.sessions.insert(session, opened);
        Ok(())
    }

    fn detach(&mut self, session: SessionId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        self.sessions.get_mut(&session).ok_or(LedgerError::NoSession(session))?.is_attached = false;
        for device in self.drop_requests_of(Holder::Session(session), effects) {
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
        let let_go = self.drop_requests_of(Holder::Session(session), effects);
        let ended = self.sessions.remove(&session).expect("looked up above");
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
            let Record { device, len, .. } = self.chunks[&chunk];
            self.sessions.get_mut(&session).expect("looked up above").give_back(device, chunk, len);
            self.returned.release += len;
            self.make_idle(chunk, Some(session));
            devices.insert(device);
        }
        for device in devices {
            self.serve(device, effects);
        }
        Ok(())
    }

    fn unreserve(&mut self, plan: PlanId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let was_asked_for = !self.drop_requests_of(Holder::Plan(plan), effects).is_empty();
        let was_in_use = self.forget_plan_of_claims(plan);
        if self.plans.remove(&plan).is_none() && !was_asked_for && !was_in_use {
            return Err(LedgerError::NoPlan(plan));
        }
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            for chunk in self.devices[&device].reserved_of(plan) {
                self.make_idle(chunk, None);
            }
            self.serve(device, effects);
        }
        Ok(())
    }

    fn warm(&mut self, device: DeviceId, part: Part, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let account = self.devices.get(&device).ok_or(LedgerError::NoDevice(device))?;
        if account.has_waiting() || !account.bytes().creating.is_zero() {
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
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
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
        self.chunks.insert(chunk, Record { device, len, state });
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
    }

    // === Looking

    /// Every device with its bytes by state.
    pub fn devices(&self) -> Vec<AccountView> {
        self.devices.iter().map(|(device, account)| account.view(*device)).collect()
    }

    /// One device.
    pub fn device(&self, device: DeviceId) -> Option<AccountView> {
        self.devices.get(&device).map(|account| account.view(device))
    }

    /// Every session.
    pub fn sessions(&self) -> Vec<SessionView> {
        let view = |(session, held): (&SessionId, &Session)| SessionView {
            session: *session,
            limit: held.limit,
            priority: held.priority,
            held: held.held_by_device.iter().map(|(device, bytes)| (*device, *bytes)).collect(),
            chunks: held.leased.len(),
            is_attached: held.is_attached,
        };
        self.sessions.iter().map(view).collect()
    }

    /// Chunks of a request that are there, and how many it wants. `None` once it is answered.
    pub fn progress(&self, request: RequestId) -> Option<(u64, u64)> {
        self.requests.get(&request).map(Request::progress)
    }

    /// Requests that wait or are being created.
    pub fn request_count(&self) -> usize {
        self.requests.len()
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
        const SHOWN: usize = 8;
        let held = |(session, held): (&SessionId, &Session)| {
            let held = held.held_by_device.get(&device).copied().filter(|held| !held.is_zero())?;
            Some(Holding { session: *session, held })
        };
        let mut holders: Vec<_> = self.sessions.iter().filter_map(held).collect();
        holders.sort_by_key(|holding| (std::cmp::Reverse(holding.held), holding.session));
        holders.truncate(SHOWN);
        holders
    }
}

impl Session {
    fn take(&mut self, device: DeviceId, len: Bytes) {
        self.held += len;
        assert!(self.held <= self.limit, "a session never holds more than its limit");
        *self.held_by_device.entry(device).or_default() += len;
    }

    fn untake(&mut self, device: DeviceId, len: Bytes) {
        self.held -= len;
        let on_device = self.held_by_device.get_mut(&device).expect("what was taken is on record");
        *on_device -= len;
        if on_device.is_zero() {
            self.held_by_device.remove(&device);
        }
    }

    fn give_back(&mut self, device: DeviceId, chunk: ChunkId, len: Bytes) {
        assert!(self.leased.remove(&chunk), "the caller looked the chunk up");
        self.untake(device, len);
    }

    fn holds_on(&self, device: DeviceId) -> bool {
        self.held_by_device.contains_key(&device)
    }
}

#[cfg(test)]
mod tests;
