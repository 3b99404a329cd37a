//! What a replay asks of whatever it measures.

use std::time::Duration;

use super::calls::CallSum;
use super::script::Asked;
use crate::ids::StreamId;
use crate::units::{Bytes, DeviceAddress};

/// An allocator: a model of somebody's, or the production pools.
///
/// The replay keeps its side: it frees what is live, once, and completes what was freed, once.
pub trait Allocator {
    /// Serves a request. The address is the allocator's own idea of one; live allocations do not overlap, unless the allocator that is modelled lets them.
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory>;

    /// The job gives an allocation back. Its bytes may still be in use by a stream until [`Allocator::completed`].
    fn free(&mut self, slot: u32);

    /// No stream uses the bytes any more.
    fn completed(&mut self, slot: u32);

    /// Another stream uses the allocation, too.
    fn record_stream(&mut self, slot: u32, stream: StreamId);

    /// The iteration of this number begins.
    fn begin_iteration(&mut self, _iteration: u32) {}

    /// Device memory kept from others: now, and the most of it so far.
    fn reserved(&self) -> Reserved;

    /// Driver calls until now.
    fn calls(&self) -> CallSum;

    /// Time until now that went into what an allocator is not: simulated drivers, daemons, planning.
    fn beside(&self) -> Duration {
        Duration::ZERO
    }

    /// Why the last request was not served, where more is known than that memory ran out.
    fn refusal(&self) -> Option<String> {
        None
    }

    /// What only some allocators have to tell.
    fn more(&self) -> More {
        More::default()
    }
}

/// Bytes reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reserved {
    /// Now.
    pub now: Bytes,
    /// Most of it until now.
    pub peak: Bytes,
}

impl Reserved {
    /// Whether a device of `capacity`, or the largest that anybody could have, has `bytes` more. What fits can be added.
    pub fn has_room(&self, bytes: Bytes, capacity: Option<Bytes>) -> bool {
        self.now.checked_add(bytes).is_some_and(|sum| sum <= capacity.unwrap_or(Bytes::LARGEST))
    }

    /// More is kept, for which there is room.
    pub fn grow(&mut self, bytes: Bytes) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    /// Some is given back.
    pub fn shrink(&mut self, bytes: Bytes) {
        self.now -= bytes;
    }
}

/// There is no memory for a request, and there will be none: a job would end here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("out of memory")]
pub struct OutOfMemory;

/// What only some allocators have to tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct More {
    /// Requests for memory to the daemon.
    pub lease_rpcs: u64,
    /// Bytes asked for, by who served them.
    pub served: ServedBytes,
    /// Requests that a plan did not foresee, or that it foresaw and that did not come.
    pub deviations: u64,
    /// Plans that were made while the job ran, if that was wanted.
    pub auto: Option<AutoPlans>,
    /// Bytes handed out while they were live already: corruption, in an allocator that does not guard its plan.
    pub overlapped: Bytes,
}

/// Plans that were made while the job ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AutoPlans {
    /// Plans that were made.
    pub made: u32,
    /// Plans that were installed.
    pub installed: u64,
    /// Times that there was no memory for one.
    pub refused: u64,
    /// Time that a thread beside the job would spend on recordings and plans, where that delays them.
    pub planning: Option<Duration>,
    /// The first iteration that was served from one.
    pub from_iteration: Option<u32>,
    /// Most bytes that the job has held from there on; what it held before and gave back is the daemon's, and reserved all the same.
    pub peak_held: Bytes,
}

/// Bytes asked for, by who served them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServedBytes {
    /// At the address of a plan.
    pub planned: Bytes,
    /// In idle bytes of a plan's pool.
    pub reuse: Bytes,
    /// By the pool that serves what no plan does.
    pub pool: Bytes,
}
