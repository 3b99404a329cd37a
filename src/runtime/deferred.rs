//! Frees that wait for streams: an allocation that other streams use, too, is taken back only when those have passed the free.

use super::{NotLive, Pools, Runtime};
use crate::driver::Driver;
use crate::driver::EventId;
use crate::ids::StreamId;
use crate::pool::AddressMap;
use crate::pool::Request;
use crate::units::DeviceAddress;

#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// In the order in which they were freed.
    waiting: Vec<Waiting>,
    /// Where those are.
    addresses: AddressMap<()>,
    /// Events that nobody asks about, and that the driver has not taken back.
    spent: Vec<EventId>,
}

#[derive(Debug)]
struct Waiting {
    address: DeviceAddress,
    stream: StreamId,
    events: Vec<(StreamId, EventId)>,
    /// Streams of which no event could be had, while the device could not be waited for either. It is tried again.
    unknown: Vec<StreamId>,
}

impl Deferred {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Nobody asks about an event any more. One that the driver does not take back now is given back later.
    fn forget(&mut self, driver: &dyn Driver, event: EventId) {
        if driver.destroy_event(event).is_err() {
            self.spent.push(event);
        }
    }

    fn forget_spent(&mut self, driver: &dyn Driver) {
        for event in std::mem::take(&mut self.spent) {
            self.forget(driver, event);
        }
    }

    /// Gives every event back, at the end.
    pub(super) fn end(&mut self, driver: &dyn Driver) {
        let waiting = self.waiting.drain(..).flat_map(|waiting| waiting.events);
        self.spent.extend(waiting.map(|(_, event)| event));
        self.addresses.clear();
        self.forget_spent(driver);
    }

    /// Allocations that were freed and wait.
    pub(super) fn addresses(&self) -> impl Iterator<Item = DeviceAddress> + '_ {
        self.waiting.iter().map(|waiting| waiting.address)
    }

    fn wait(&mut self, waiting: Waiting) {
        self.addresses.insert(waiting.address, ());
        self.waiting.push(waiting);
    }

    /// The allocation was freed, and waits.
    pub(super) fn has(&self, address: DeviceAddress) -> bool {
        self.addresses.contains_key(&address)
    }
}

impl Runtime {
    /// A free while some allocations are recorded on other streams, or wait for them, or of what no pool but a private one has.
    #[cold]
    pub(super) fn free_otherwise(&self, address: DeviceAddress, stream: StreamId) -> Result<(), NotLive> {
        let is_spent = self.free_recorded(&mut self.lock(), address, stream)?;
        if is_spent {
            self.give_back_spent();
        }
        Ok(())
    }

    /// True as for [`Runtime::free_at_once`].
    fn free_recorded(&self, pools: &mut Pools, address: DeviceAddress, stream: StreamId) -> Result<bool, NotLive> {
        if pools.deferred.has(address) {
            return Err(NotLive(address));
        }
        let mut streams = pools.recorded.remove(&address).unwrap_or_default();
        if pools.may_be_of_another(stream) && pools.is_of_another(address, stream) && pools.is_live(address) {
            streams.insert(stream);
            pools.note_recorded(address, stream);
        }
        if streams.is_empty() {
            return self.free_at_once(pools, address, stream);
        }
        let mut waiting = Waiting {
            address,
            stream,
            events: Vec::with_capacity(streams.len()),
            unknown: streams.into_iter().collect(),
        };
        // An event of a stream that is captured is a part of the capture, and tells nothing.
        if pools.private.is_open() {
            self.wait(pools, waiting);
            return Ok(false);
        }
        self.record(&mut waiting);
        // Without an event nobody can know when a stream has passed; waiting for all of them is slow and right.
        if !waiting.unknown.is_empty() && self.device.driver().synchronize(self.device.id()).is_ok() {
            for (_, event) in waiting.events {
                pools.deferred.forget(self.device.driver(), event);
            }
            return self.free_at_once(pools, address, stream);
        }
        self.wait(pools, waiting);
        Ok(self.finish_deferred(pools))
    }

    /// A free begins to wait. What is private is in no recording.
    fn wait(&self, pools: &mut Pools, waiting: Waiting) {
        let Waiting { address, stream, .. } = waiting;
        if pools.private.len_of(address).is_none() {
            pools.note(|tap| tap.free(address, stream, true));
        }
        pools.deferred.wait(waiting);
        pools.expect_frees();
    }

    /// True if that was the last of a private pool that is over: its memory is to be given back, outside of the lock.
    fn free_at_once(&self, pools: &mut Pools, address: DeviceAddress, stream: StreamId) -> Result<bool, NotLive> {
        if self.free_shared(pools, address, stream) { Ok(false) } else { self.free_private(pools, address) }
    }

    /// Takes back what is in no private pool; false where nobody has it.
    #[inline]
    pub(super) fn free_shared(&self, pools: &mut Pools, address: DeviceAddress, stream: StreamId) -> bool {
        let is_freed = pools.free(address, self.counters).is_ok();
        if is_freed {
            pools.note(|tap| tap.free(address, stream, false));
        }
        is_freed
    }

    /// Records an event on each stream that has none yet. What it stands for is later than the free then, and so covers it.
    fn record(&self, waiting: &mut Waiting) {
        let Waiting { events, unknown, .. } = waiting;
        unknown.retain(|stream| match self.device.driver().record_event(self.device.id(), *stream) {
            Ok(event) => {
                events.push((*stream, event));
                false
            }
            Err(_) => true,
        });
    }

    /// Takes back whatever its streams have passed. True as for [`Runtime::free_at_once`].
    pub(super) fn finish_deferred(&self, pools: &mut Pools) -> bool {
        if pools.private.is_open() {
            return false;
        }
        let driver = self.device.driver();
        let mut is_spent = false;
        pools.deferred.forget_spent(driver);
        let waiting = std::mem::take(&mut pools.deferred.waiting);
        // A stream passes events in the order in which they came: what comes behind one that it has not passed is not asked about.
        let mut busy: Vec<StreamId> = Vec::new();
        for mut one in waiting {
            self.record(&mut one);
            one.events.retain(|(stream, event)| {
                if busy.contains(stream) {
                    return true;
                }
                match driver.query_event(*event) {
                    Ok(true) => {
                        pools.deferred.forget(driver, *event);
                        return false;
                    }
                    Ok(false) => busy.push(*stream),
                    // It says nothing of the others.
                    Err(_) => {}
                }
                true
            });
            if one.events.is_empty() && one.unknown.is_empty() {
                pools.deferred.addresses.remove(&one.address);
                if pools.free(one.address, self.counters).is_ok() {
                    pools.note(|tap| tap.free_completed(one.address, one.stream));
                } else {
                    is_spent |= self.free_private(pools, one.address).expect("it was live when its free came");
                }
            } else {
                pools.deferred.waiting.push(one);
            }
        }
        pools.expect_frees();
        is_spent
    }

    /// Serves a request whose place in the plan somebody has who may be freed: if he is, and his streams have passed that, it has its place.
    #[cold]
    pub(super) fn alloc_held_up(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        pools.is_held_up = false;
        self.finish_deferred(pools);
        // Who is in the way now stays there for longer.
        if let Some(installed) = &mut pools.planned {
            installed.pool.expect_frees(false);
        }
        let served = pools.alloc(request, self.counters);
        pools.expect_frees();
        served
    }
}

impl Pools {
    /// Tells the planned pool whether frees wait: whoever is in the way of a request may be gone as soon as somebody asks.
    fn expect_frees(&mut self) {
        let waits = !self.deferred.is_empty();
        if let Some(installed) = &mut self.planned {
            installed.pool.expect_frees(waits);
        }
    }
}
