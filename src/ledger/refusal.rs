//! Why the ledger says no: to a request, with who has what, and to a command that makes no sense.

use crate::error::ErrorKind;
use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use crate::limits;
use crate::units::Bytes;

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
        "{requested} asked for on {device}, {available} of {budget} available after {waited_ms} ms{}, {ahead} requests ahead; held by {}",
        kept(*withheld),
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
        /// What is kept for the guarantees of others, which do not lend it.
        withheld: Bytes,
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
    /// A guarantee that does not fit beside those of others, or could not be made good in time.
    #[error(
        "a guarantee of {requested} asked for on {device}: {promised} of {budget} are guaranteed to others, after {waited_ms} ms; to {}",
        list(holders, Bytes::ZERO)
    )]
    Guarantee {
        /// Where.
        device: DeviceId,
        /// Bytes that were to be guaranteed.
        requested: Bytes,
        /// Bytes that are to others.
        promised: Bytes,
        /// All that there is.
        budget: Bytes,
        /// Whom: the largest guarantees first.
        holders: Vec<Holding>,
        /// How long the request has waited.
        waited_ms: u64,
    },
    /// Nothing more of the device is promised.
    #[error("{device} is being drained: nothing more of it is leased until `stitchd drain --undo {}`", device.0)]
    Draining {
        /// Which.
        device: DeviceId,
    },
    /// The session gets nothing more.
    #[error("the session was evicted by whoever runs this daemon: it keeps what is live in it, and gets nothing more")]
    Evicted,
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
    /// The ledger is closed ([`super::Command::Close`]).
    #[error("the daemon is shutting down")]
    Closed,
}

fn kept(withheld: Bytes) -> String {
    if withheld.is_zero() { String::new() } else { format!(", {withheld} of that kept for the guarantees of others") }
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
            Refusal::OverBudget { .. }
            | Refusal::Exhausted { .. }
            | Refusal::Chunks { .. }
            | Refusal::Guarantee { .. }
            // Everybody who has memory waits for more, on a device that one has for itself, too: there is none.
            | Refusal::Deadlock { .. } => ErrorKind::Exhausted,
            Refusal::Lost { .. } => ErrorKind::Unavailable,
            Refusal::Draining { .. } | Refusal::Evicted => ErrorKind::OverLimit,
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
    /// The terms were changed since somebody looked.
    #[error("{session} is at revision {revision} of its terms, not at {meant}: look again")]
    Stale {
        /// Whose.
        session: SessionId,
        /// How often they were changed.
        revision: u64,
        /// As the change believed.
        meant: u64,
    },
    /// A limit below what the session is guaranteed.
    #[error("{session} is guaranteed {guaranteed}, and a limit of {limit} would break that")]
    BelowGuarantee {
        /// Whose.
        session: SessionId,
        /// On all devices together.
        guaranteed: Bytes,
        /// The limit.
        limit: Bytes,
    },
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
    /// Nobody published this range, or it is no more.
    #[error("there is no {0}")]
    NoRange(RangeId),
    /// It exists already.
    #[error("{0} exists already")]
    RangeExists(RangeId),
    /// The session does not hold this range.
    #[error("{session} does not hold {range}")]
    NotHolding {
        /// Who.
        session: SessionId,
        /// What.
        range: RangeId,
    },
    /// A range of no chunks, or of chunks of several devices.
    #[error("a shared range is made of chunks of one device, and of one at least")]
    NoRun,
    /// The session may not hold the range.
    #[error(transparent)]
    Refused(#[from] Refusal),
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
            LedgerError::NoDevice(_) | LedgerError::NoSession(_) | LedgerError::NoPlan(_) | LedgerError::NoRange(_) => {
                ErrorKind::NotFound
            }
            LedgerError::DeviceExists(_)
            | LedgerError::SessionExists(_)
            | LedgerError::RequestExists(_)
            | LedgerError::RangeExists(_) => ErrorKind::Conflict,
            LedgerError::Detached(_) | LedgerError::Stale { .. } | LedgerError::BelowGuarantee { .. } => {
                ErrorKind::Conflict
            }
            LedgerError::NotHeld { .. }
            | LedgerError::NotHolding { .. }
            | LedgerError::NoRun
            | LedgerError::Unasked(_)
            | LedgerError::Parts => ErrorKind::Invalid,
            LedgerError::Refused(refusal) => refusal.kind(),
            LedgerError::TooMany { .. } => ErrorKind::Exhausted,
        }
    }
}
