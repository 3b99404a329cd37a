//! One node's memory: the ledger that decides and the store that does, put together. It takes a request, steps the ledger, carries the effects
//! out on the store, tells the ledger how that went, and answers whoever asked.
//!
//! Not for: sockets and sessions' processes (the daemon), or policy (the ledger).
//!
//! ## Who may touch what, when
//!
//! * The ledger has one owner: whoever holds the core's lock. Steps are short and make no driver calls.
//! * Creates (with the clearing of new memory), destroys, and asking how much memory is free are *work*: done without the lock, by whatever [`Spawn`] is given. Their answers are steps again.
//! * Answers to requests are given without the lock, after the step that decided them.
//! * A panic inside a step leaves the ledger in no known state. Then the process aborts: better a restart than two holders of one
//!   chunk.

mod chronicle;
mod following;
mod reattach;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use crate::clock::Clock;
use crate::error::chain;
use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use crate::journal::Record;
use crate::ladder::{Part, Stock};
use crate::ledger::{
    AccountView, Change, ChunkView, Command, Effect, EndReason, Facts, Holder, Ledger, LedgerError, Overstay,
    RangeView, Refusal, RequestView, ReturnedBytes, SessionView, Shortage, Terms,
};
use crate::limits;
use crate::mortal::moment;
use crate::store::{Store, StoreError};
use crate::sync::{Mutex, MutexGuard};
use crate::units::Bytes;
pub use chronicle::facts;
use chronicle::{Cause, Chronicle};
pub use following::FollowError;
pub use reattach::{Again, Told};

/// Runs a piece of work, now or soon, on this thread or another.
pub type Spawn = Box<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// How a request ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// These chunks are the session's, in the order of the parts asked for.
    Granted(Vec<(ChunkId, Bytes)>),
    /// Why not.
    Refused(Refusal),
}

type Reply = Box<dyn FnOnce(Answer) + Send>;

/// Is told what sessions are asked and what they answer, and whose process is to end: [`Effect::AskBack`], [`Effect::Gave`], [`Effect::Unanswered`] and [`Effect::EndBorrower`]; and which shared ranges are no more: [`Effect::RangeGone`].
pub type Herald = Box<dyn Fn(Effect) + Send + Sync>;

/// Where nobody tells how much is free, a budget that a refused create has lowered holds so long; then whoever asks may try.
const TRY_MS: u64 = 1_000;

/// A driver that did not take a chunk back is asked again after so long.
const RETRY_MS: u64 = 1_000;

/// What to ask for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// For whom.
    pub holder: Holder,
    /// Where.
    pub device: DeviceId,
    /// Which chunks.
    pub parts: Vec<Part>,
    /// The plan whose reserved chunks may be used.
    pub plan: Option<PlanId>,
    /// How long it may wait, in milliseconds.
    pub wait_ms: u64,
    /// How long it had waited before, for a daemon that was there before this one.
    pub waited_ms: u64,
}

/// One node's memory.
pub struct Steward {
    core: Mutex<Core>,
    store: Store,
    clock: Arc<dyn Clock>,
    spawn: Spawn,
    /// Chunks get their descriptors when they are created.
    exports: bool,
    herald: OnceLock<Herald>,
}

#[derive(Default)]
struct Core {
    ledger: Ledger,
    /// Where another can read what this ledger knows.
    chronicle: Option<Chronicle>,
    replies: HashMap<RequestId, Reply>,
    next_session: u64,
    next_request: u64,
    next_range: u64,
    /// Devices whose driver is being asked how much is free.
    asked: BTreeSet<DeviceId>,
    /// Devices whose driver is being asked again to take chunks back, and when each was asked last, in milliseconds.
    retried: BTreeMap<DeviceId, Retry>,
    /// Devices of which nobody tells how much is free.
    blind: BTreeSet<DeviceId>,
    /// When the driver last refused to create for want of memory, in milliseconds, since its device's budget was last lifted.
    refused: BTreeMap<DeviceId, u64>,
    /// Devices of which it was said that chunks ran out before memory: whoever is refused for it is told each time.
    told_of_chunks: BTreeSet<DeviceId>,
    /// Chunks that began to come or go: while that changes the driver and the ledger speak of different moments.
    transfers: u64,
    /// Chunks that might have been looked at since the last audit.
    #[cfg(debug_assertions)]
    unaudited: usize,
}

#[derive(Clone, Copy)]
enum Retry {
    Asking,
    Asked { at_ms: u64 },
}

/// What a step wants done, sorted by who does it.
#[derive(Default)]
struct Todo {
    work: Vec<Effect>,
    answers: Vec<(Reply, Answer)>,
    news: Vec<Effect>,
    /// What a session has registered.
    registered: Option<(ChunkId, Bytes)>,
}

/// Where a chunk was to be created.
fn device_of(work: &[Effect], wanted: ChunkId) -> Option<DeviceId> {
    work.iter().find_map(|effect| match effect {
        Effect::Create { chunk, device, .. } if *chunk == wanted => Some(*device),
        _ => None,
    })
}

/// A keeper that another has taken the place of lets go in a moment; of one that does not the daemon says so.
fn is_soon_well(error: &StoreError) -> bool {
    matches!(error, StoreError::Held)
}

/// What a create that has failed was short of.
fn shortage(error: &StoreError) -> Shortage {
    match (Store::is_out_of_chunks(error), Store::is_exhaustion(error)) {
        (true, _) => Shortage::Chunks,
        (false, true) => Shortage::Memory,
        (false, false) => Shortage::Nothing,
    }
}

impl std::fmt::Debug for Steward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steward").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Core {
    fn step(&mut self, command: Command, todo: &mut Todo) -> Result<(), LedgerError> {
        self.step_noted(command, None, todo)
    }

    /// The same, with what only the caller knows of it, for the journal.
    fn step_noted(&mut self, command: Command, own: Option<Record>, todo: &mut Todo) -> Result<(), LedgerError> {
        let cause = Cause::of(&command);
        let effects = self.ledger.step(command)?;
        if let Some(chronicle) = &mut self.chronicle {
            chronicle.note(&self.ledger, cause, own, &effects);
        }
        #[cfg(debug_assertions)]
        self.audit();
        for effect in effects {
            match effect {
                Effect::Create { .. } | Effect::Destroy { .. } => {
                    self.transfers += 1;
                    todo.work.push(effect);
                }
                Effect::Registered { chunk, len, .. } => todo.registered = Some((chunk, len)),
                Effect::Grant { request, chunks, .. } => self.answer(request, Answer::Granted(chunks), todo),
                Effect::Refuse { request, refusal, .. } => self.answer(request, Answer::Refused(refusal), todo),
                Effect::AskBack { .. }
                | Effect::Gave { .. }
                | Effect::Unanswered { .. }
                | Effect::EndBorrower { .. }
                | Effect::RangeGone { .. } => todo.news.push(effect),
            }
        }
        Ok(())
    }

    /// After every step, while there are few chunks: it looks at all of them, and where there are many that is for one step in some.
    #[cfg(debug_assertions)]
    fn audit(&mut self) {
        const CHUNKS_EACH_STEP: usize = 1024;
        self.unaudited += CHUNKS_EACH_STEP;
        if self.unaudited < self.ledger.chunk_count() {
            return;
        }
        self.unaudited = 0;
        if let Err(wrong) = self.ledger.invariants() {
            panic!("the ledger is wrong: {wrong}");
        }
    }

    fn answer(&mut self, request: RequestId, answer: Answer, todo: &mut Todo) {
        let reply = self.replies.remove(&request).expect("every request has somebody who waits for its answer");
        todo.answers.push((reply, answer));
    }

    /// Whether the driver told how much is free.
    fn note_source(&mut self, device: DeviceId, is_live: bool) {
        if is_live {
            self.blind.remove(&device);
        } else if self.blind.insert(device) {
            // What was last heard of others may have been true a moment ago: whoever asks may find out.
            self.refused.entry(device).or_insert(0);
            tracing::info!(%device, "nobody tells how much of this device is free: what others hold of it shows when a create is refused");
        }
    }

    /// Nobody tells how much is free, and what the driver refused is so long ago that somebody may try again: the budget is what it would be had it
    /// refused nothing.
    fn lift(&mut self, device: DeviceId, now_ms: u64, todo: &mut Todo) {
        let is_due = |at_ms: &u64| now_ms >= at_ms.saturating_add(TRY_MS);
        if !self.blind.contains(&device) || !self.refused.get(&device).is_some_and(is_due) {
            return;
        }
        let Some(view) = self.ledger.device(device).filter(is_still) else { return };
        self.refused.remove(&device);
        let free = view.total.saturating_sub(view.bytes.promised());
        self.step(Command::Observe { device, free }, todo).expect("the device is the ledger's own");
    }
}

/// Of one that begins with nothing.
fn of_devices(error: FollowError) -> StoreError {
    match error {
        FollowError::Store(error) => error,
        FollowError::Facts(_) => unreachable!("nothing was known before"),
    }
}

/// Nothing is on its way in or out.
fn is_still(view: &AccountView) -> bool {
    view.bytes.creating.is_zero() && view.bytes.destroying.is_zero()
}

impl Steward {
    /// The memory of the devices in `store`, for other processes; `spawn` runs what takes time.
    pub fn new(store: Store, clock: Arc<dyn Clock>, spawn: Spawn) -> Result<Arc<Steward>, StoreError> {
        Steward::open_devices(Steward::over(store, clock, spawn, true), None).map_err(of_devices)
    }

    fn over(store: Store, clock: Arc<dyn Clock>, spawn: Spawn, exports: bool) -> Steward {
        Steward { core: Mutex::default(), store, clock, spawn, exports, herald: OnceLock::new() }
    }

    /// One whose work is done on the thread that causes it, and whose chunks get a descriptor when somebody asks for one: for replay, benches and tests.
    pub fn inline(store: Store, clock: Arc<dyn Clock>) -> Result<Arc<Steward>, StoreError> {
        let spawn: Spawn = Box::new(|work| work());
        Steward::open_devices(Steward::over(store, clock, spawn, false), None).map_err(of_devices)
    }

    fn open_devices(steward: Steward, known: Option<&Facts>) -> Result<Arc<Steward>, FollowError> {
        let mut free = Vec::new();
        for device in steward.store.devices() {
            let memory = steward.store.memory(device.id())?;
            let mut core = steward.lock();
            core.note_source(device.id(), memory.is_live);
            let chunks_max = steward.store.chunks_max(device.id());
            let add = Command::AddDevice { device: device.id(), total: memory.total, chunks_max };
            core.step(add, &mut Todo::default()).map_err(|_| StoreError::NoDevice(device.id()))?;
            drop(core);
            free.push((device.id(), memory.free));
        }
        let mut core = steward.lock();
        if let Some(known) = known {
            core.ledger.begin_with(known)?;
        }
        for (device, free) in free {
            core.step(Command::Observe { device, free }, &mut Todo::default())
                .map_err(|_| StoreError::NoDevice(device))?;
        }
        drop(core);
        Ok(Arc::new(steward))
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|_| {
            tracing::error!("a step of the ledger panicked; who holds what is not known any more");
            std::process::abort()
        })
    }

    fn step(self: &Arc<Self>, command: Command) -> Result<(), LedgerError> {
        let mut todo = Todo::default();
        let outcome = self.lock().step(command, &mut todo);
        self.follow(todo);
        outcome
    }

    /// Gives the answers and starts the work.
    fn follow(self: &Arc<Self>, todo: Todo) {
        if !todo.answers.is_empty() || !todo.work.is_empty() {
            moment();
        }
        for (reply, answer) in todo.answers {
            reply(answer);
        }
        if let Some(herald) = self.herald.get() {
            todo.news.into_iter().for_each(herald);
        }
        if !todo.work.is_empty() {
            let steward = Arc::clone(self);
            (self.spawn)(Box::new(move || steward.work(todo.work)));
        }
    }

    /// Does what takes time, as many chunks at a time as are cleared at once: what is done is in the ledger while the rest is not, for whoever asks how far a request has come.
    fn work(self: Arc<Self>, work: Vec<Effect>) {
        let mut failures = Vec::new();
        let mut kept: u64 = 0;
        for some in work.chunks(limits::FDS_PER_MESSAGE_MAX) {
            let known = failures.len();
            self.let_go(some);
            let mut outcomes: Vec<_> = some.iter().filter_map(|effect| self.carry_out(effect, &mut failures)).collect();
            self.scrub(&mut outcomes);
            self.have_kept(&outcomes);
            // Before the answers: whoever is refused for it shall be told why.
            failures[known..].iter().for_each(|error| self.note_failure(error));
            let mut todo = Todo::default();
            {
                let mut core = self.lock();
                for outcome in outcomes {
                    let failed = match outcome {
                        Command::DestroyFailed { chunk } => Some(chunk),
                        _ => None,
                    };
                    if let Command::CreateFailed { chunk, why: Shortage::Memory } = outcome
                        && let Some(device) = device_of(some, chunk)
                    {
                        core.refused.insert(device, self.now_ms());
                    }
                    core.step(outcome, &mut todo).expect("the answer to an effect is always taken");
                    // Only now: a retry that went well before this step would have the ledger hear of the end first.
                    failed.into_iter().for_each(|chunk| self.store.settle(chunk));
                    kept += u64::from(failed.is_some());
                }
            }
            self.follow(todo);
        }
        if kept > 1 {
            let text = "cannot destroy a chunk, nor the others that went with it: so many stay in quarantine";
            if failures.iter().all(is_soon_well) {
                tracing::info!(chunks = kept, "{text}");
            } else {
                tracing::error!(chunks = kept, "{text}");
            }
        }
    }

    fn carry_out(&self, effect: &Effect, failures: &mut Vec<StoreError>) -> Option<Command> {
        match *effect {
            Effect::Create { chunk, device, len } => Some(match self.create(chunk, device, len) {
                Ok(()) => Command::Created { chunk },
                Err(error) => {
                    let why = shortage(&error);
                    // Of many chunks that fail alike the first is enough to read about.
                    if !failures.contains(&error) {
                        match why {
                            Shortage::Memory => {}
                            Shortage::Chunks if !self.lock().told_of_chunks.insert(device) => {}
                            Shortage::Chunks => {
                                tracing::warn!(%device, error = %chain(&error), "chunks run out before memory does");
                            }
                            Shortage::Nothing => {
                                tracing::error!(%chunk, %device, error = %chain(&error), "cannot create a chunk");
                            }
                        }
                        failures.push(error);
                    }
                    Command::CreateFailed { chunk, why }
                }
            }),
            Effect::Destroy { chunk } => Some(match self.store.destroy(chunk) {
                Ok(()) => Command::Destroyed { chunk },
                Err(error) => {
                    // The first, here too; how many there are is said at the end.
                    let is_like = |known: &StoreError| std::mem::discriminant(known) == std::mem::discriminant(&error);
                    if !failures.iter().any(is_like) {
                        let text = "cannot destroy a chunk: it stays in quarantine until it is free";
                        if is_soon_well(&error) {
                            tracing::info!(%chunk, error = %chain(&error), "{text}");
                        } else {
                            tracing::error!(%chunk, error = %chain(&error), "{text}");
                        }
                        failures.push(error);
                    }
                    Command::DestroyFailed { chunk }
                }
            }),
            Effect::Grant { .. }
            | Effect::Refuse { .. }
            | Effect::AskBack { .. }
            | Effect::Gave { .. }
            | Effect::Unanswered { .. }
            | Effect::EndBorrower { .. }
            | Effect::Registered { .. }
            | Effect::RangeGone { .. } => None,
        }
    }

    /// Clears the chunks that were created, all of a device at once. Those that cannot be cleared were not created.
    fn scrub(&self, outcomes: &mut [Command]) {
        let mut created: BTreeMap<DeviceId, Vec<ChunkId>> = BTreeMap::new();
        for outcome in &*outcomes {
            if let Command::Created { chunk } = outcome {
                let stored = self.store.chunk(*chunk).expect("a chunk that was created is in the store");
                created.entry(stored.device().id()).or_default().push(*chunk);
            }
        }
        for (device, chunks) in created {
            let Err(error) = self.store.scrub(device, &chunks) else { continue };
            tracing::error!(%device, error = %chain(&error), "new chunks are not used");
            for outcome in &mut *outcomes {
                if let Command::Created { chunk } = *outcome
                    && chunks.contains(&chunk)
                {
                    self.discard(chunk);
                    *outcome = Command::CreateFailed { chunk, why: Shortage::Nothing };
                }
            }
        }
    }

    /// Has the descriptors of what was created kept, before anybody is granted it.
    fn have_kept(&self, outcomes: &[Command]) {
        let created = |outcome: &Command| if let Command::Created { chunk } = outcome { Some(*chunk) } else { None };
        let created: Vec<ChunkId> = outcomes.iter().filter_map(created).collect();
        self.store.keep(&created);
    }

    /// Has those of what is about to be destroyed kept no more: it is written down already that they are nobody's. Before that is done, as whoever has a chunk last
    /// frees its memory, which takes its time: here by as many threads as there are, and not by the keeper's one, for which all of them would wait.
    fn let_go(&self, work: &[Effect]) {
        let gone = |effect: &Effect| if let Effect::Destroy { chunk } = effect { Some(*chunk) } else { None };
        self.store.let_go(&work.iter().filter_map(gone).collect::<Vec<_>>());
    }

    /// Gives back a chunk that nobody was told of.
    fn discard(&self, chunk: ChunkId) {
        // A keeper that was filled in this moment has been told of it.
        self.store.let_go(&[chunk]);
        if let Err(error) = self.store.destroy(chunk) {
            tracing::error!(%chunk, error = %chain(&error), "cannot destroy a chunk that nobody can use");
            // The ledger has nothing to write down: it never had the chunk.
            self.store.settle(chunk);
        }
    }

    /// Creates a chunk with the descriptor that its holders will be sent: no lease waits for that, and where descriptors have run out it is known before one is
    /// promised.
    fn create(&self, chunk: ChunkId, device: DeviceId, len: Bytes) -> Result<(), StoreError> {
        self.store.create(chunk, device, len)?;
        if !self.exports {
            return Ok(());
        }
        self.store.descriptor(chunk).map(drop).inspect_err(|_| self.discard(chunk))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.now().as_millis()).unwrap_or(u64::MAX)
    }

    /// Begins a session.
    pub fn open(self: &Arc<Self>, terms: Terms) -> Result<SessionId, LedgerError> {
        self.open_as(terms, |_| None)
    }

    /// The session's connection is gone; what it holds stays its own until its process is gone too.
    pub fn detach(self: &Arc<Self>, session: SessionId) -> Result<(), LedgerError> {
        self.step(Command::Detach { session })
    }

    /// The session is over. Says how many bytes it left behind.
    pub fn end(self: &Arc<Self>, session: SessionId, reason: EndReason) -> Result<Bytes, LedgerError> {
        let mut todo = Todo::default();
        let left_behind = {
            let mut core = self.lock();
            let before = core.ledger.returned();
            // What it held of shared ranges may last from now on.
            core.step(Command::Tick { now_ms: self.now_ms() }, &mut todo)?;
            core.step(Command::End { session, reason }, &mut todo)?;
            let after = core.ledger.returned();
            after.release + after.death - before.release - before.death
        };
        self.follow(todo);
        Ok(left_behind)
    }

    /// Asks for memory. `reply` is called exactly once, perhaps before this returns, unless this is an error.
    pub fn acquire(
        self: &Arc<Self>,
        ask: Ask,
        reply: impl FnOnce(Answer) + Send + 'static,
    ) -> Result<RequestId, LedgerError> {
        let Ask { holder, device, parts, plan, wait_ms, waited_ms } = ask;
        let command = |request| Command::Acquire { request, holder, device, parts, plan, wait_ms, waited_ms };
        self.request(device, command, reply)
    }

    /// Asks that a session be guaranteed so much of a device; the answer is granted with no chunks, or refused. See [`Steward::acquire`].
    pub fn admit(
        self: &Arc<Self>,
        session: SessionId,
        device: DeviceId,
        guarantee: Bytes,
        wait_ms: u64,
        reply: impl FnOnce(Answer) + Send + 'static,
    ) -> Result<RequestId, LedgerError> {
        let command = |request| Command::Admit { request, session, device, guarantee, wait_ms };
        self.request(device, command, reply)
    }

    fn request(
        self: &Arc<Self>,
        device: DeviceId,
        command: impl FnOnce(RequestId) -> Command,
        reply: impl FnOnce(Answer) + Send + 'static,
    ) -> Result<RequestId, LedgerError> {
        let mut todo = Todo::default();
        let now_ms = self.now_ms();
        let request = {
            let mut core = self.lock();
            core.step(Command::Tick { now_ms }, &mut todo)?;
            core.lift(device, now_ms, &mut todo);
            core.next_request += 1;
            let request = RequestId(core.next_request);
            core.replies.insert(request, Box::new(reply));
            if let Err(error) = core.step(command(request), &mut todo) {
                core.replies.remove(&request);
                drop(core);
                self.follow(todo);
                return Err(error);
            }
            request
        };
        self.follow(todo);
        Ok(request)
    }

    /// [`Steward::acquire`] for callers whose work is done inline: the answer itself.
    pub fn acquire_now(self: &Arc<Self>, ask: Ask) -> Result<Answer, LedgerError> {
        let (send, receive) = std::sync::mpsc::channel();
        let request = self.acquire(Ask { wait_ms: 0, ..ask }, move |answer| {
            // The receiver is gone only if the caller is.
            let _ = send.send(answer);
        })?;
        let unanswered = || Answer::Refused(Refusal::Cancelled);
        let answer = receive.try_recv().unwrap_or_else(|_| unanswered());
        if answer == unanswered() {
            self.cancel(request);
        }
        Ok(answer)
    }

    /// How many chunks of a request are there, of how many that it wants. `None` once it is answered.
    pub fn progress(&self, request: RequestId) -> Option<(u64, u64)> {
        self.lock().ledger.progress(request)
    }

    /// Nobody waits for this request any more. Its reply is called if it was not yet.
    pub fn cancel(self: &Arc<Self>, request: RequestId) {
        self.step(Command::Cancel { request }).expect("cancelling is always taken");
    }

    /// Nothing is granted any more, to those that wait neither: they are refused.
    pub fn close(self: &Arc<Self>) {
        self.step(Command::Close).expect("closing is always taken");
    }

    /// A session gives chunks back: all of them or, on error, none.
    pub fn release(self: &Arc<Self>, session: SessionId, chunks: Vec<ChunkId>) -> Result<(), LedgerError> {
        self.step(Command::Release { session, chunks })
    }

    /// Chunks of a session become a shared range, which it holds, and which outlives its last holder by so many milliseconds.
    pub fn publish(
        self: &Arc<Self>,
        session: SessionId,
        chunks: Vec<ChunkId>,
        linger_ms: u64,
    ) -> Result<RangeId, LedgerError> {
        self.publish_as(session, chunks, linger_ms, |_, _| None)
    }

    /// A session holds a shared range once more: here it is.
    pub fn attach(self: &Arc<Self>, session: SessionId, range: RangeId) -> Result<RangeView, LedgerError> {
        let mut todo = Todo::default();
        let view = {
            let mut core = self.lock();
            core.step(Command::Attach { range, session }, &mut todo)?;
            core.ledger.range(range).ok_or(LedgerError::NoRange(range))?
        };
        self.follow(todo);
        Ok(view)
    }

    /// A session holds a shared range once less. One that nobody holds lasts from now for as long as it was published for.
    pub fn leave(self: &Arc<Self>, session: SessionId, range: RangeId) -> Result<(), LedgerError> {
        self.tell_time();
        self.step(Command::Leave { range, session })
    }

    /// A shared range is for nobody more: it goes with its last holder.
    pub fn withdraw(self: &Arc<Self>, range: RangeId) -> Result<(), LedgerError> {
        self.step(Command::Withdraw { range })
    }

    /// Every shared range.
    pub fn ranges(&self) -> Vec<RangeView> {
        self.lock().ledger.ranges()
    }

    /// One shared range.
    pub fn range(&self, range: RangeId) -> Option<RangeView> {
        self.lock().ledger.range(range)
    }

    /// Who is to be told what goes on between sessions. Only the first is.
    pub fn tell(&self, herald: Herald) {
        // Whoever comes second is not told, as it says.
        let _ = self.herald.set(herald);
    }

    /// The largest chunk that is dealt in.
    pub fn set_chunk_len_max(&self, len: Bytes) {
        self.lock().ledger.set_chunk_len_max(len);
    }

    /// What becomes of requests within a guarantee whose time is up.
    pub fn set_overstay(&self, overstay: Overstay) {
        self.lock().ledger.set_overstay(overstay);
    }

    /// What lies idle in sessions, as far as they say.
    pub fn note_parked(self: &Arc<Self>, device: DeviceId, sessions: Vec<(SessionId, Option<Bytes>)>) {
        self.step(Command::Parked { device, sessions }).expect("the device is the ledger's own");
    }

    /// A session has given back what it will of what it was asked for.
    pub fn answered(self: &Arc<Self>, session: SessionId, device: DeviceId, ask: u64) -> Result<(), LedgerError> {
        self.tell_time();
        self.step(Command::Answered { session, device, ask })
    }

    /// Changes a session's terms, and says what they are then.
    pub fn change(
        self: &Arc<Self>,
        session: SessionId,
        change: Change,
        revision: Option<u64>,
    ) -> Result<SessionView, LedgerError> {
        self.step(Command::Change { session, change, revision })?;
        self.lock().ledger.session(session).ok_or(LedgerError::NoSession(session))
    }

    /// A session gets nothing more.
    pub fn evict(self: &Arc<Self>, session: SessionId) -> Result<(), LedgerError> {
        self.tell_time();
        self.step(Command::Evict { session })
    }

    /// The process of a session that was to be ended goes on.
    pub fn spare(self: &Arc<Self>, session: SessionId) {
        // One that has ended meanwhile needs no mercy.
        let _ = self.step(Command::Spare { session });
    }

    /// Nothing more of a device is promised, or it is again.
    pub fn drain(self: &Arc<Self>, device: DeviceId, is_draining: bool) -> Result<(), LedgerError> {
        self.tell_time();
        self.step(Command::Drain { device, is_draining })
    }

    /// Idle memory goes back to the driver: `bytes` of each session's, or of that of one, at most.
    pub fn trim(
        self: &Arc<Self>,
        device: DeviceId,
        session: Option<SessionId>,
        bytes: Bytes,
    ) -> Result<(), LedgerError> {
        self.tell_time();
        self.step(Command::Trim { device, session, bytes })
    }

    /// What lies idle with the daemon goes back to the driver, `bytes` of it at most; nobody is asked.
    pub fn trim_idle(self: &Arc<Self>, device: DeviceId, bytes: Bytes) -> Result<(), LedgerError> {
        self.step(Command::TrimIdle { device, bytes })
    }

    /// The ledger's time is now: how long an answer takes is counted from here.
    fn tell_time(self: &Arc<Self>) {
        self.step(Command::Tick { now_ms: self.now_ms() }).expect("time is always taken");
    }

    /// What a session could get on a device beside what it holds.
    pub fn room(&self, session: SessionId, device: DeviceId) -> Option<Bytes> {
        self.lock().ledger.room(session, device)
    }

    /// Memory that a session can lease on a device; none where one of them is not known.
    pub fn stock(&self, session: SessionId, device: DeviceId) -> Stock {
        self.lock().ledger.stock(session, device).unwrap_or_default()
    }

    /// A plan's reserved chunks are for everybody again.
    pub fn unreserve(self: &Arc<Self>, plan: PlanId) -> Result<(), LedgerError> {
        self.step(Command::Unreserve { plan })
    }

    /// Creates chunks ahead of need, where there is room.
    pub fn warm(self: &Arc<Self>, device: DeviceId, part: Part) -> Result<(), LedgerError> {
        self.step(Command::Warm { device, part })
    }

    /// Time has passed: requests time out, and the driver is asked what others hold.
    pub fn tick(self: &Arc<Self>) {
        self.pass_time();
        for device in self.store.devices() {
            self.observe(device.id());
            self.retry(device.id());
        }
    }

    /// The same, and asks no driver anything: for when it was asked a moment ago and nothing has happened since.
    pub fn pass_time(self: &Arc<Self>) {
        let now_ms = self.now_ms();
        self.step(Command::Tick { now_ms }).expect("time is always taken");
        if let Some(chronicle) = &mut self.lock().chronicle {
            chronicle.mend(now_ms);
        }
    }

    /// Asks the driver again, as work, to take back what it did not: a library that hung may answer now. The bytes count until it does.
    fn retry(self: &Arc<Self>, device: DeviceId) {
        if !self.store.keeps_any(device) {
            return;
        }
        let now_ms = self.now_ms();
        {
            let mut core = self.lock();
            let is_early = match core.retried.get(&device) {
                Some(Retry::Asking) => true,
                Some(Retry::Asked { at_ms }) => now_ms < at_ms.saturating_add(RETRY_MS),
                None => false,
            };
            if is_early || core.ledger.device(device).is_none_or(|view| view.is_lost) {
                return;
            }
            core.retried.insert(device, Retry::Asking);
            // What is being asked how much is free meanwhile is asked too early.
            core.transfers += 1;
        }
        let steward = Arc::clone(self);
        (self.spawn)(Box::new(move || {
            let gone = steward.store.destroy_kept(device);
            if !gone.is_empty() {
                tracing::info!(%device, chunks = gone.len(), "chunks that could not be destroyed are gone now");
            }
            let mut todo = Todo::default();
            {
                let mut core = steward.lock();
                core.transfers += 1;
                core.retried.insert(device, Retry::Asked { at_ms: steward.now_ms() });
                for chunk in gone {
                    // Of those that nobody was ever told of the ledger does not know.
                    let _ = core.step(Command::Destroyed { chunk }, &mut todo);
                }
            }
            steward.follow(todo);
        }));
    }

    /// Asks the driver what others hold of a device, as work: a driver that hangs must not hang the ledger, or the other devices.
    fn observe(self: &Arc<Self>, device: DeviceId) {
        let transfers = {
            let mut core = self.lock();
            let Some(view) = core.ledger.device(device) else { return };
            let is_retried = matches!(core.retried.get(&device), Some(Retry::Asking));
            if view.is_lost || is_retried || !is_still(&view) || !core.asked.insert(device) {
                return;
            }
            core.transfers
        };
        let steward = Arc::clone(self);
        (self.spawn)(Box::new(move || {
            let memory = steward.store.memory(device);
            let mut todo = Todo::default();
            {
                let mut core = steward.lock();
                core.asked.remove(&device);
                if let Ok(memory) = &memory {
                    core.note_source(device, memory.is_live);
                }
                match &memory {
                    // All that is known is in the ledger; whoever waits may try from time to time.
                    Ok(memory) if !memory.is_live => {
                        if core.ledger.device(device).is_some_and(|view| view.waiting > 0) {
                            core.lift(device, steward.now_ms(), &mut todo);
                        }
                    }
                    // What was true when the driver was asked, and is still.
                    Ok(memory) if core.transfers == transfers => {
                        let observe = Command::Observe { device, free: memory.free };
                        core.step(observe, &mut todo).expect("the device is the ledger's own");
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            steward.follow(todo);
            if let Err(error) = memory {
                steward.note_failure(&error);
            }
        }));
    }

    /// If a call has failed because its device is lost, nothing on that device is promised any more.
    fn note_failure(self: &Arc<Self>, error: &StoreError) {
        let Some((device, reason)) = Store::lost_by(error) else { return };
        if self.lock().ledger.device(device).is_some_and(|view| !view.is_lost) {
            tracing::error!(%device, reason, "device lost: its sessions are told, and nothing more of it is leased until this daemon is restarted");
            self.step(Command::Lose { device }).expect("the device is the ledger's own");
        }
    }

    /// A descriptor of a chunk, for the process that it was leased to.
    pub fn descriptor(&self, chunk: ChunkId) -> Result<Arc<OwnedFd>, StoreError> {
        self.store.descriptor(chunk)
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Every device with its bytes by state.
    pub fn devices(&self) -> Vec<AccountView> {
        self.lock().ledger.devices()
    }

    /// One device.
    pub fn device(&self, device: DeviceId) -> Option<AccountView> {
        self.lock().ledger.device(device)
    }

    /// One session.
    pub fn session(&self, session: SessionId) -> Option<SessionView> {
        self.lock().ledger.session(session)
    }

    /// Every session with what it holds.
    pub fn sessions(&self) -> Vec<SessionView> {
        self.lock().ledger.sessions()
    }

    /// Bytes reserved per plan.
    pub fn reserved(&self) -> Vec<(PlanId, Bytes)> {
        self.lock().ledger.reserved()
    }

    /// Requests that wait or are being created.
    pub fn request_count(&self) -> usize {
        self.lock().ledger.request_count()
    }

    /// Every chunk, in no order.
    pub fn chunks(&self) -> Vec<ChunkView> {
        self.lock().ledger.chunks()
    }

    /// Every request that is not answered, the oldest first.
    pub fn requests(&self) -> Vec<RequestView> {
        self.lock().ledger.requests()
    }

    /// Bytes that came back from sessions, by how.
    pub fn returned(&self) -> ReturnedBytes {
        self.lock().ledger.returned()
    }
}

#[cfg(test)]
mod tests;
