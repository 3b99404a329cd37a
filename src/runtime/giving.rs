//! Idle memory that goes back because others wait for it.

use std::sync::{Arc, PoisonError};

use super::installed::IdleChunk;
use super::{Pools, Runtime};
use crate::memory::Chunk;
use crate::units::Bytes;

/// So many chunks are taken down at one time while the job's requests wait: half a millisecond on the host.
const AT_ONCE: u64 = 32;

impl Runtime {
    /// Gives back what lies idle, `wanted` bytes of it at most, and says how much that was: what has been idle longest first, a plan's own places last. The job goes on meanwhile, but for
    /// moments. None while a private pool is open: unmapping would break a capture.
    ///
    /// Streams have passed what is given. What is queued now is waited for before the pools' lock is taken, so that whoever holds it has little left to wait for.
    pub fn give_back_idle(&self, wanted: Bytes) -> Bytes {
        self.give_back_idle_with(&[], wanted)
    }

    /// The same of several runtimes of one device, this one's first. A capture that begins here is none of the others': it waits for the end of all.
    pub fn give_back_idle_with(&self, others: &[&Runtime], wanted: Bytes) -> Bytes {
        // Until the end of it: a capture that begins waits for this, as waiting for the device and letting go of memory would break it.
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.lock().private.is_open() {
            return Bytes::ZERO;
        }
        let mut given = self.give_slices(wanted);
        for other in others.iter().filter(|other| !std::ptr::eq(**other, self)) {
            if given >= wanted {
                break;
            }
            let _giving = other.giving.lock().unwrap_or_else(PoisonError::into_inner);
            given += other.give_slices(wanted - given);
        }
        given
    }

    fn give_slices(&self, wanted: Bytes) -> Bytes {
        let cannot = |pools: &Pools| pools.private.is_open() || pools.asleep.is_some();
        if cannot(&self.lock()) || self.synchronize().is_err() {
            return Bytes::ZERO;
        }
        let slice = self.config.granule().checked_mul(AT_ONCE).unwrap_or(Bytes::MAX);
        let mut given = Bytes::ZERO;
        while given < wanted {
            let chunks = {
                let mut pools = self.lock();
                if pools.private.is_open() {
                    return given;
                }
                let chunks = pools.take_parked((wanted - given).min(slice), self.config.granule());
                self.note_held(&mut pools);
                chunks
            };
            let some = self.give_back(chunks) + self.give_back_spent();
            if some.is_zero() {
                break;
            }
            given += some;
        }
        given
    }
}

impl Pools {
    /// Idle chunks, and at last those that the plan needs later: they are brought again then.
    fn take_parked(&mut self, wanted: Bytes, granule: Bytes) -> Vec<Arc<Chunk>> {
        let mut chunks = self.pages.trim(wanted);
        let found: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        chunks.extend(self.take_planned(wanted.saturating_sub(found), granule));
        chunks
    }

    fn take_planned(&mut self, wanted: Bytes, granule: Bytes) -> Vec<Arc<Chunk>> {
        let Some(installed) = &mut self.planned else { return Vec::new() };
        let mut found = Bytes::ZERO;
        let is_wanted = |chunk: &IdleChunk| {
            let lacks = found < wanted;
            found += chunk.len;
            lacks
        };
        let chunks = installed.idle_chunks(&self.pages, granule);
        let chunks: Vec<IdleChunk> = chunks.into_iter().take_while(is_wanted).collect();
        installed.give_up(&chunks, &mut self.pages)
    }
}
