//! What people look at beside the accounts: who waits for what, and whose each chunk is.
//!
//! Not for: anything that decides.

use super::queue::Phase;
use super::{Holder, Ledger, State};
use crate::ids::{ChunkId, DeviceId, RequestId, SessionId};
use crate::units::Bytes;

/// A request that is not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestView {
    /// Which.
    pub request: RequestId,
    /// For whom.
    pub holder: Holder,
    /// Where.
    pub device: DeviceId,
    /// How much.
    pub bytes: Bytes,
    /// It waits for others; else its chunks are being created.
    pub is_waiting: bool,
    /// For how long it has been there, in milliseconds.
    pub age_ms: u64,
}

/// What a chunk is to who looks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ChunkIs {
    /// Promised, or set aside for a request.
    Creating,
    /// With the daemon.
    Idle,
    /// With the daemon, for the job of a plan.
    Reserved,
    /// This session may have it mapped.
    Leased(SessionId),
    /// Of a shared range.
    Shared,
    /// Being given back to the driver, or it could not be.
    Quarantined,
}

/// A chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkView {
    /// Which.
    pub chunk: ChunkId,
    /// Where.
    pub device: DeviceId,
    /// How large.
    pub len: Bytes,
    /// Whose.
    pub is: ChunkIs,
}

impl Ledger {
    /// Every chunk, in no order: sorting is for whoever has the time.
    pub fn chunks(&self) -> Vec<ChunkView> {
        let is = |state: &State| match state {
            State::Creating { .. } | State::Claimed { .. } => ChunkIs::Creating,
            State::Idle { .. } => ChunkIs::Idle,
            State::Reserved { .. } => ChunkIs::Reserved,
            State::Leased { session } => ChunkIs::Leased(*session),
            State::Shared { .. } => ChunkIs::Shared,
            State::Quarantined { .. } => ChunkIs::Quarantined,
        };
        let view = |(chunk, record): (&ChunkId, &super::Record)| ChunkView {
            chunk: *chunk,
            device: record.device,
            len: record.len,
            is: is(&record.state),
        };
        self.chunks.iter().map(view).collect()
    }

    /// Every request that is not answered, the oldest first.
    pub fn requests(&self) -> Vec<RequestView> {
        let view = |(request, known): (&RequestId, &super::Request)| RequestView {
            request: *request,
            holder: known.holder,
            device: known.device,
            bytes: known.bytes,
            is_waiting: matches!(known.phase, Phase::Waiting(_)),
            age_ms: known.waited_ms(self.now_ms),
        };
        self.requests.iter().map(view).collect()
    }
}
