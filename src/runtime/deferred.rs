//! Frees that wait for streams: an allocation that other streams use, too, is taken back only when those have passed the free.

use super::{NotLive, Pools, Runtime};
use crate::driver::EventId;
use crate::ids::StreamId;
use crate::units::DeviceAddress;

#[derive(Debug, Default)]
pub(super) struct Deferred {
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    address: DeviceAddress,
    stream: StreamId,
    events: Vec<EventId>,
}

impl Deferred {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The allocation was freed, and waits.
    pub(super) fn has(&self, address: DeviceAddress) -> bool {
        self.waiting.iter().any(|waiting| waiting.address == address)
    }
}

impl Runtime {
    /// A free while some allocations are recorded on other streams, or wait for them.
    #[cold]
    pub(super) fn free_recorded(
        &self,
        pools: &mut Pools,
        address: DeviceAddress,
        stream: StreamId,
    ) -> Result<(), NotLive> {
        if pools.deferred.has(address) {
            return Err(NotLive(address));
        }
        let Some(streams) = pools.recorded.remove(&address) else {
            return pools.free(address, stream, self.counters);
        };
        let driver = self.device.driver();
        let record = |of: StreamId| driver.record_event(self.device.id(), of);
        let mut events = Vec::with_capacity(streams.len());
        match streams.iter().try_for_each(|of| record(*of).map(|event| events.push(event))) {
            Ok(()) => pools.deferred.waiting.push(Waiting { address, stream, events }),
            // Without an event nobody can know when the streams have passed; waiting for all of them is slow and right. If not even that works, the
            // device is lost, and with it whoever could be disturbed.
            Err(_) => {
                for event in events {
                    // It is forgotten either way.
                    let _ = driver.destroy_event(event);
                }
                let _ = driver.synchronize(self.device.id());
                return pools.free(address, stream, self.counters);
            }
        }
        self.finish_deferred(pools);
        Ok(())
    }

    /// Takes back whatever its streams have passed.
    pub(super) fn finish_deferred(&self, pools: &mut Pools) {
        let driver = self.device.driver();
        let waiting = std::mem::take(&mut pools.deferred.waiting);
        for mut one in waiting {
            one.events.retain(|event| {
                let is_complete = driver.query_event(*event).unwrap_or(false);
                if is_complete {
                    // It is forgotten either way.
                    let _ = driver.destroy_event(*event);
                }
                !is_complete
            });
            if one.events.is_empty() {
                pools.free(one.address, one.stream, self.counters).expect("it was live when its free came");
            } else {
                pools.deferred.waiting.push(one);
            }
        }
    }

    /// Asks about other streams that used idle blocks last: what they have passed is for `stream`, too.
    pub(super) fn pass_streams(&self, pools: &mut Pools, stream: StreamId) -> bool {
        let driver = self.device.driver();
        let mut any = false;
        for other in pools.stitching.unpassed_streams(stream) {
            let moment = pools.stitching.moment();
            let Ok(event) = driver.record_event(self.device.id(), other) else { continue };
            if driver.query_event(event).unwrap_or(false) {
                pools.stitching.note_passed(other, moment);
                any = true;
            }
            let _ = driver.destroy_event(event);
        }
        any
    }
}
