//! What happens to the ledger, and what is to be done about it.

use super::refusal::Refusal;
use super::session::Terms;
use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use crate::ladder::Part;
use crate::units::Bytes;

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
        /// What it may have.
        terms: Terms,
    },
    /// A session is to be guaranteed so much of a device. What it is guaranteed already is kept meanwhile; less than that is granted at once.
    Admit {
        /// The request's name; never used before.
        request: RequestId,
        /// For whom.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// How much, of what it holds and will hold.
        guarantee: Bytes,
        /// How long it may wait for others' guarantees to end, in milliseconds.
        wait_ms: u64,
    },
    /// A session's terms are changed. What it holds above a new limit is asked back, and stays until it is given.
    Change {
        /// Which.
        session: SessionId,
        /// What is to be otherwise.
        change: Change,
        /// The change is meant for the terms as they were after so many; none where it is for whatever they are.
        revision: Option<u64>,
    },
    /// A session gets nothing more, and is asked for everything that lies idle in it.
    Evict {
        /// Which.
        session: SessionId,
    },
    /// What [`Effect::EndBorrower`] asked for cannot be done.
    Spare {
        /// Whose process goes on.
        session: SessionId,
    },
    /// Nothing more of a device is promised, and all idle memory is asked back; or that ends.
    Drain {
        /// Which.
        device: DeviceId,
        /// Whether it begins.
        is_draining: bool,
    },
    /// Sessions are asked for what they have parked.
    Trim {
        /// Where.
        device: DeviceId,
        /// Only this one; all where there is none.
        session: Option<SessionId>,
        /// How much of each, at most.
        bytes: Bytes,
    },
    /// What lies with the daemon goes back to the driver.
    TrimIdle {
        /// Where.
        device: DeviceId,
        /// How much, at most.
        bytes: Bytes,
    },
    /// What lies idle in sessions, as far as they say. Nothing is accounted by it: it says whom to ask.
    Parked {
        /// Where.
        device: DeviceId,
        /// How much of whose; nothing where nobody knows.
        sessions: Vec<(SessionId, Option<Bytes>)>,
    },
    /// A session has given back what it will of what [`Effect::AskBack`] asked for.
    Answered {
        /// Which session.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// The number of the question.
        ask: u64,
    },
    /// The session's connection is gone, its process may live: it asks for nothing more and keeps what it has.
    Detach {
        /// Which.
        session: SessionId,
    },
    /// The session's connection is there again: it may ask for more.
    Reattach {
        /// Which.
        session: SessionId,
    },
    /// A session has memory mapped that nobody knows of any more, and says so: from here on it counts as leased.
    Register {
        /// Which.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// How much: one chunk.
        len: Bytes,
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
        /// How long it had waited before, where there was another ledger then.
        waited_ms: u64,
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
    /// Chunks of a session become a shared range, which others may hold as well. It holds it itself.
    Publish {
        /// The range's name in the ledger; never used before.
        range: RangeId,
        /// Whose chunks.
        session: SessionId,
        /// Which, in the order of the range's addresses: of one device, and all of them or, on error, none.
        chunks: Vec<ChunkId>,
        /// How long it outlives its last holder, in milliseconds.
        linger_ms: u64,
    },
    /// A session holds a shared range once more.
    Attach {
        /// Which.
        range: RangeId,
        /// Who.
        session: SessionId,
    },
    /// A session holds a shared range once less.
    Leave {
        /// Which.
        range: RangeId,
        /// Who.
        session: SessionId,
    },
    /// A shared range is for nobody more: it goes with its last holder.
    Withdraw {
        /// Which.
        range: RangeId,
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
    /// Ask a session for idle memory, and tell when it has answered.
    AskBack {
        /// Whom.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// The number of the question.
        ask: u64,
        /// How much.
        bytes: Bytes,
        /// What waits for it; nothing where whoever runs the daemon wants it.
        request: Option<RequestId>,
    },
    /// A session has answered, in time or not; for whoever keeps the record.
    Gave {
        /// Who.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// Who waited for it; nobody where memory was trimmed.
        waiting: Option<Holder>,
        /// How much was asked for.
        asked: Bytes,
        /// How much came.
        given: Bytes,
        /// How long that took, in milliseconds.
        took_ms: u64,
    },
    /// A session has not answered in time. It is not asked again for a while.
    Unanswered {
        /// Who.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// How much was asked for.
        asked: Bytes,
    },
    /// End the process of a session: it uses what another is guaranteed.
    EndBorrower {
        /// Whose.
        session: SessionId,
        /// Where.
        device: DeviceId,
        /// For whom.
        waiting: SessionId,
    },
    /// What a session has registered is known by this name from here on.
    Registered {
        /// Whose.
        session: SessionId,
        /// Its name.
        chunk: ChunkId,
        /// How large.
        len: Bytes,
    },
    /// A shared range is no more.
    RangeGone {
        /// Which.
        range: RangeId,
    },
    /// A request is granted.
    Grant {
        /// Which.
        request: RequestId,
        /// Whose.
        holder: Holder,
        /// Its chunks with their sizes, in the order of the parts asked for; none for a guarantee.
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

/// What of a session's terms is to be otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// Bytes that it may never pass.
    pub limit: Option<Bytes>,
    /// Its place among others.
    pub priority: Option<u32>,
    /// Whether what it does not use of its guarantees is lent.
    pub lends: Option<bool>,
}

/// What a request that is within its session's guarantee gets when its time is up and others still use what was lent to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Overstay {
    /// It is refused, with who has what.
    #[default]
    Refuse,
    /// It waits on, as long as any request may.
    Wait,
    /// The borrowers' processes are ended.
    End,
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
