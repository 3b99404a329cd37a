//! The slow path beside a plan: a request that the plan does not serve, no idle space of its pool has room for, and the packed pool cannot serve as it is.
//!
//! The packed pool grows. While little of what the process holds is idle, or within the soft budget, by new chunks; else by chunks that lie idle in it, or in the stitching pool from
//! before the plan came. What still lacks is asked for.

use std::sync::Arc;
use std::time::Duration;

use super::grow::{REFUSAL_HOLDS, ROUNDS_MAX};
use super::{AllocError, Counter, Pools, Runtime};
use crate::memory::Chunk;
use crate::pool::Request;
use crate::units::{Bytes, DeviceAddress};

impl Runtime {
    /// Serves a request from the packed pool; nothing where there is no memory for it to grow by.
    pub(super) fn serve_packed(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        let Request { bytes, stream, .. } = *request;
        let mut is_refused = false;
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = self.lock();
                self.finish_deferred(&mut pools);
                if let Some(address) = self.alloc_packed(&mut pools, request) {
                    return Ok(Some(address));
                }
                let lacks = pools.packed.lacks(bytes, stream).ok_or(AllocError::TooLarge { requested: bytes })?;
                if (is_refused || !self.may_grow(&pools, lacks)) && self.gather(&mut pools, request, lacks)? {
                    continue;
                }
                lacks
            };
            if is_refused {
                return Ok(None);
            }
            // Outside the lock: others go on.
            match self.acquire(lacks, Duration::ZERO) {
                Ok(chunks) => self.pack(&mut self.lock(), chunks, request)?,
                Err(_) => {
                    self.lock().refused_until = self.clock.now() + REFUSAL_HOLDS;
                    is_refused = true;
                }
            }
        }
        Ok(None)
    }

    pub(super) fn alloc_packed(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = pools.packed.alloc(request.bytes, request.stream)?;
        self.counters.served(Counter::RequestsStitching, Counter::BytesStitching, request.bytes);
        pools.note(|tap| tap.alloc(request, address));
        self.note_held(pools);
        Some(address)
    }

    /// Moves idle chunks to where the packed pool grows, and says whether there were any.
    fn gather(&self, pools: &mut Pools, request: &Request, lacks: Bytes) -> Result<bool, AllocError> {
        pools.empty_small_slabs();
        let mut chunks = pools.stitching.trim(lacks);
        let found: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        chunks.extend(pools.packed.gather(request.bytes, request.stream, lacks.saturating_sub(found)));
        if chunks.is_empty() {
            return Ok(false);
        }
        self.pack(pools, chunks, request)?;
        Ok(true)
    }

    /// Maps chunks into the packed pool; where that fails they go back to whoever owns them.
    fn pack(&self, pools: &mut Pools, chunks: Vec<Arc<Chunk>>, request: &Request) -> Result<(), AllocError> {
        let Request { bytes, stream, .. } = *request;
        let grown = pools.packed.grow(&chunks, bytes, stream);
        self.note_held(pools);
        grown.map_err(|source| {
            // Only after a failing driver; a round trip under the lock is the least of it.
            self.give_back(chunks);
            AllocError::Memory { requested: bytes, source }
        })
    }
}
