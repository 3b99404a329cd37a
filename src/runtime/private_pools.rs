//! Private pools: memory for what a captured graph will replay. A graph keeps the addresses that it was captured with, and writes there whenever it is replayed, whoever has them then.
//!
//! So each is a page pool with chunks of its own, which grows at its end and is never stitched. Its
//! memory stays where it is until the pool is released as often as it was begun and nothing in it is
//! live; until then what is freed inside serves that pool alone.
//!
//! Not for: who asks for such memory. The caller says for each request ([`Runtime::alloc_private`]).
//!
//! While any pool is open a capture may be under way, and a driver answers no questions about events then, nor lets itself be waited for, without breaking it: frees that wait for streams wait until the last pool is
//! closed, nothing is unmapped, and a request fails rather than wait for streams.
//!
//! Invariant: no chunk is in two private pools, nor in one and elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::fallback::ROUNDS_MAX;
use super::{AllocError, Counter, NotLive, Pools, Runtime, SourceError};
use crate::error::ErrorKind;
use crate::ids::StreamId;
use crate::limits;
use crate::memory::{Chunk, Device};
use crate::pool::pages::{PagePolicy, PagePool};
use crate::pool::{Found, Laid, Request};
use crate::units::{Bytes, DeviceAddress};

/// A private pool, by the two numbers that whoever captures gives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PrivatePoolId(pub u64, pub u64);

/// What private pools hold now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrivateUse {
    /// Pools that there are, those among them that only wait for the last free.
    pub pools: usize,
    /// Bytes of all their chunks.
    pub held: Bytes,
    /// Bytes of live allocations, rounded to the unit.
    pub live: Bytes,
}

/// All private pools of one runtime.
#[derive(Debug, Default)]
pub(super) struct PrivatePools {
    pools: BTreeMap<PrivatePoolId, PrivatePool>,
    /// Pools that are open, each as often as it is.
    open: u32,
    /// Released, and nothing in them is live: their chunks are to be given back, outside of the lock.
    spent: Vec<PagePool>,
}

#[derive(Debug)]
struct PrivatePool {
    memory: PagePool,
    /// How often it was begun and not ended.
    open: u32,
    /// How often it was begun and not released.
    uses: u32,
}

impl PrivatePools {
    /// A capture may be under way.
    pub(super) fn is_open(&self) -> bool {
        self.open > 0
    }

    fn begin(&mut self, id: PrivatePoolId, device: &Arc<Device>, policy: PagePolicy) {
        let new = || {
            let memory = PagePool::new(Arc::clone(device), policy).with_range_len(limits::SIDE_RANGE_LEN);
            PrivatePool { memory, open: 0, uses: 0 }
        };
        let pool = self.pools.entry(id).or_insert_with(new);
        pool.open += 1;
        pool.uses += 1;
        self.open += 1;
    }

    /// False if it was not open.
    fn end(&mut self, id: PrivatePoolId) -> bool {
        let Some(pool) = self.pools.get_mut(&id).filter(|pool| pool.open > 0) else { return false };
        pool.open -= 1;
        self.open -= 1;
        self.drop_if_spent(id);
        true
    }

    /// False if there is nothing to release.
    fn release(&mut self, id: PrivatePoolId) -> bool {
        let Some(pool) = self.pools.get_mut(&id).filter(|pool| pool.uses > 0) else { return false };
        pool.uses -= 1;
        self.drop_if_spent(id);
        true
    }

    fn drop_if_spent(&mut self, id: PrivatePoolId) {
        let is_spent = |pool: &PrivatePool| pool.uses == 0 && pool.open == 0 && pool.memory.live_allocations() == 0;
        if self.pools.get(&id).is_some_and(is_spent) {
            self.spent.extend(self.pools.remove(&id).map(|pool| pool.memory));
        }
    }

    /// Takes an allocation back, and says how many bytes had been asked for. `None` if it is in no private pool.
    pub(super) fn free(&mut self, address: DeviceAddress) -> Option<Bytes> {
        let (id, bytes) = self.pools.iter_mut().find_map(|(id, pool)| Some((*id, pool.memory.free(address)?)))?;
        self.drop_if_spent(id);
        Some(bytes)
    }

    /// Every pool's memory, those among them that are to be given back.
    fn memories(&self) -> impl Iterator<Item = &PagePool> {
        self.pools.values().map(|pool| &pool.memory).chain(&self.spent)
    }

    pub(super) fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.memories().find_map(|memory| memory.stream_at(address))
    }

    pub(super) fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.memories().find_map(|memory| memory.len_of(address))
    }

    pub(super) fn chunks_at(&self, address: DeviceAddress) -> Vec<(DeviceAddress, Arc<Chunk>)> {
        let holder = self.memories().find(|memory| memory.len_of(address).is_some());
        holder.map_or_else(Vec::new, |memory| memory.chunks_at(address))
    }

    /// What lies where, range by range, each with its pool.
    pub(super) fn laid(&self) -> Vec<(PrivatePoolId, Vec<Laid>)> {
        let of = |(id, pool): (&PrivatePoolId, &PrivatePool)| {
            let id = *id;
            pool.memory.laid().0.into_iter().map(move |range| (id, range))
        };
        self.pools.iter().flat_map(of).collect()
    }

    pub(super) fn find(&self, address: DeviceAddress) -> Option<Found> {
        self.pools.values().find_map(|pool| pool.memory.find(address))
    }

    pub(super) fn range_count(&self) -> usize {
        self.memories().map(PagePool::range_count).sum()
    }

    pub(super) fn held(&self) -> Bytes {
        self.memories().map(PagePool::held).sum()
    }

    pub(super) fn live_allocations(&self) -> u64 {
        self.memories().map(PagePool::live_allocations).sum()
    }

    pub(super) fn live_bytes(&self) -> Bytes {
        self.memories().map(PagePool::live_bytes).sum()
    }

    pub(super) fn usage(&self) -> PrivateUse {
        let free: Bytes = self.memories().map(PagePool::free_bytes).sum();
        let held = self.held();
        PrivateUse { pools: self.pools.len(), held, live: held - free }
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        let open: u32 = self.pools.values().map(|pool| pool.open).sum();
        if open != self.open {
            return Err(format!("{} private pools are counted as open, and {open} are", self.open));
        }
        self.memories().try_for_each(|pool| pool.invariants(None))
    }

    /// The chunks of pools that are over: their mappings go.
    fn take_spent(&mut self) -> Vec<Arc<Chunk>> {
        // Unmapping waits for the device, which would break a capture.
        if self.is_open() {
            return Vec::new();
        }
        self.spent.drain(..).flat_map(|mut memory| memory.take_all()).collect()
    }

    /// Every chunk, live ones included, for the end of the runtime's life.
    pub(super) fn take_all(&mut self) -> Vec<Arc<Chunk>> {
        let all = std::mem::take(&mut self.pools).into_values().map(|pool| pool.memory);
        all.chain(self.spent.drain(..)).flat_map(|mut memory| memory.take_all()).collect()
    }
}

impl Runtime {
    /// Opens a private pool, which is made if it is not there: from now on a capture may be under way. To be ended, and released, once for each time.
    pub fn begin_private(&self, id: PrivatePoolId) {
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pools = self.lock();
        pools.private.begin(id, &self.device, PagePolicy { stitches: false, ..self.config.pages });
    }

    /// A private pool is open.
    pub fn is_capturing(&self) -> bool {
        self.lock().private.is_open()
    }

    /// Closes a private pool: its memory stays. False if it is not open.
    pub fn end_private(&self, id: PrivatePoolId) -> bool {
        let was_open = {
            let mut pools = self.lock();
            let was_open = pools.private.end(id);
            self.finish_deferred(&mut pools);
            was_open
        };
        self.give_back_spent();
        was_open
    }

    /// Lets a private pool go: what captured into it is not replayed again. Its memory is given back once nothing in it is live. False if it is not there.
    pub fn release_private(&self, id: PrivatePoolId) -> bool {
        let was_there = self.lock().private.release(id);
        self.give_back_spent();
        was_there
    }

    /// Serves a request from a private pool that is open.
    pub fn alloc_private(&self, id: PrivatePoolId, request: &Request) -> Result<DeviceAddress, AllocError> {
        if self.lock().asleep.is_some() {
            return Err(AllocError::Asleep { requested: request.bytes });
        }
        let Request { bytes, stream, .. } = *request;
        let served = self.serve_private(id, bytes, stream);
        let mut pools = self.lock();
        match &served {
            Ok(_) => {
                let len = limits::occupied_len(bytes);
                self.counters.served(Counter::POOL, bytes, len);
                pools.note(|tap| tap.left_out(request));
            }
            Err(error) => self.count_failure(&mut pools, error),
        }
        self.note_held(&mut pools);
        served
    }

    fn serve_private(&self, id: PrivatePoolId, bytes: Bytes, stream: StreamId) -> Result<DeviceAddress, AllocError> {
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = self.lock();
                pools.has_streams |= stream != StreamId::DEFAULT;
                let Some(pool) = pools.private.pools.get_mut(&id) else { break };
                if let Some(address) = pool.memory.alloc(bytes, stream) {
                    return Ok(address);
                }
                pool.memory.lacks_at_end(bytes, stream).ok_or(AllocError::TooLarge { requested: bytes })?
            };
            // Outside the lock: others go on.
            let chunks = match self.acquire(lacks, Duration::ZERO) {
                Ok(chunks) => chunks,
                Err(error) => return Err(self.out_of_memory(bytes, error)),
            };
            let mut pools = self.lock();
            let grown = pools.private.pools.get_mut(&id).map(|pool| pool.memory.extend(&chunks, stream));
            if let Some(Ok(())) = grown {
                // Under the lock: another thread may give them back at once, and gives up handles that are its alone.
                drop(chunks);
                continue;
            }
            drop(pools);
            self.give_back(chunks);
            let Some(Err(source)) = grown else { break };
            return Err(AllocError::Memory { requested: bytes, source });
        }
        let message = format!("the private pool {}.{} was released while memory was asked for it", id.0, id.1);
        Err(self.out_of_memory(bytes, SourceError { kind: ErrorKind::Conflict, message }))
    }

    /// Takes an allocation of a private pool back; true if that was the last of a pool that is over.
    #[cold]
    pub(super) fn free_private(&self, pools: &mut Pools, address: DeviceAddress) -> Result<bool, NotLive> {
        let bytes = pools.private.free(address).ok_or(NotLive(address))?;
        self.counters.freed(bytes, limits::occupied_len(bytes));
        Ok(!pools.private.spent.is_empty())
    }

    /// Gives the memory of pools that are over to whoever owns it.
    #[cold]
    pub(super) fn give_back_spent(&self) -> Bytes {
        let chunks = {
            let mut pools = self.lock();
            // What sleeps goes when it is awake again: until then its addresses stay.
            if pools.asleep.is_some() {
                return Bytes::ZERO;
            }
            let chunks = pools.private.take_spent();
            if !chunks.is_empty() {
                self.note_held(&mut pools);
            }
            chunks
        };
        self.give_back(chunks)
    }
}
