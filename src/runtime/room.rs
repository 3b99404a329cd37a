//! How much memory a process may have: what the device has, what the source gives, and the limit that the process sets itself.

use super::{Pools, Room, Runtime, SourceError};
use crate::driver::DriverError;
use crate::units::Bytes;

impl Runtime {
    /// All memory of the device, whoever has it.
    pub fn device_total(&self) -> Result<Bytes, DriverError> {
        Ok(self.device.driver().memory(self.device.id())?.total)
    }

    /// Sets the most that the process wants to hold here, or none. What it holds already it keeps; above it requests fail that need more.
    pub fn set_limit(&self, limit: Option<Bytes>) {
        self.lock().limit = limit;
    }

    /// How much memory there is for this process: what the source says, within the process's own limit. May take a round trip.
    pub fn room(&self) -> Result<Room, SourceError> {
        let room = self.source.room()?;
        let pools = self.lock();
        let Some((limit, left)) = pools.limit.zip(pools.left()) else { return Ok(room) };
        Ok(Room { most: room.most.min(limit), free: room.free.min(left) })
    }
}

impl Pools {
    /// Bytes below the limit that the process has set itself, if it has.
    pub(super) fn left(&self) -> Option<Bytes> {
        self.limit.map(|limit| limit.saturating_sub(self.held()))
    }
}
