//! What people look at beside the accounts: who waits for what.
//!
//! Not for: anything that decides.

use super::queue::Phase;
use super::{Holder, Ledger};
use crate::ids::{DeviceId, RequestId};
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

impl Ledger {
    /// Every request that is not answered, the oldest first.
    pub fn requests(&self) -> Vec<RequestView> {
        let view = |(request, known): (&RequestId, &super::Request)| RequestView {
            request: *request,
            holder: known.holder,
            device: known.device,
            bytes: known.bytes,
            is_waiting: matches!(known.phase, Phase::Waiting(_)),
            age_ms: self.now_ms.saturating_sub(known.asked_ms),
        };
        self.requests.iter().map(view).collect()
    }
}
