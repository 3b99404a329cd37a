//! S3: making one range of addresses out of idle blocks that are not neighbours.

use super::blocks::{BlockId, PBlockId, Place};
use super::{StitchAllocation, StitchingPool};
use crate::error::ErrorKind;
use crate::ids::StreamId;
use crate::memory::{Chunk, Mapping, MemoryError};
use crate::units::{Bytes, Place as _};
use std::sync::Arc;

/// How hard to try.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effort {
    /// Within the fragmentation limit.
    Usual,
    /// With every idle chunk: the alternative is to be out of memory.
    Last,
}

/// What stitching came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stitched {
    /// The request is served.
    Served(StitchAllocation),
    /// All idle blocks together lack this much.
    Lacks(Bytes),
}

impl StitchingPool {
    /// Serves a request by stitching idle blocks, the largest first; says how much is missing where all of them are too little. On error nothing that was
    /// idle is lost. The fragmentation limit holds as long as there is another way; when there is none `effort` says so.
    pub fn stitch(&mut self, bytes: Bytes, stream: StreamId, effort: Effort) -> Result<Stitched, MemoryError> {
        // Something may have become idle since the caller tried.
        if let Some(allocation) = self.alloc(bytes, stream) {
            return Ok(Stitched::Served(allocation));
        }
        let Some(len) = self.block_len(bytes) else { return Ok(Stitched::Lacks(bytes)) };
        let limit = match effort {
            Effort::Usual => self.config.fragmentation_limit,
            Effort::Last => self.granule,
        };
        if len < limit || !self.config.is_on {
            return Ok(Stitched::Lacks(len));
        }
        if self.keeps_mapped && !self.device.capabilities().alias {
            // Chunks would have to move.
            return Ok(Stitched::Lacks(len));
        }
        let (parts, sum) = self.largest_idle(len, limit, stream);
        if sum < len {
            // What is brought must be large enough to be stitched itself.
            return Ok(Stitched::Lacks((len - sum).max(limit).min(len)));
        }
        if sum > len {
            let last = *parts.last().expect("some bytes are there, so some block is");
            let keep = self.pblock(last).len - (sum - len);
            self.split(last, keep);
        }
        let block = if self.device.capabilities().alias {
            self.make_room_for_alias(len);
            // Making room forgets SBlocks only; the parts are as they were.
            self.alias(&parts, len)?
        } else {
            self.move_together(&parts, stream)?
        };
        self.counts.stitched += 1;
        self.counts.stitched_bytes += len;
        Ok(Stitched::Served(self.serve_anew(block, bytes)))
    }

    /// Idle blocks of at least `limit`, from the largest down until they hold `len` bytes, and what they hold.
    fn largest_idle(&self, len: Bytes, limit: Bytes, stream: StreamId) -> (Vec<PBlockId>, Bytes) {
        let mut parts = Vec::new();
        let mut sum = Bytes::ZERO;
        let stitchable = self.class_of.range(limit..).rev();
        for block in stitchable.flat_map(|(_, class)| self.classes[*class as usize].ready.pblocks()) {
            if sum >= len {
                break;
            }
            if self.is_idle_for(block, stream) {
                parts.push(block);
                sum += self.pblock(block).len;
            }
        }
        (parts, sum)
    }

    /// The chunks of a block, in the order of addresses.
    pub(super) fn chunks_of(&self, block: PBlockId) -> impl Iterator<Item = &Arc<Chunk>> {
        let block = self.pblock(block);
        let mapping = &self.ranges[block.range].mapping;
        block.slots.clone().map(|slot| mapping.chunk(slot as usize).expect("a block's chunks are there"))
    }

    /// Maps the chunks of `parts` a second time, side by side. What is written at one address and read at another *within one running kernel* need not agree (`fence.proxy.alias`); from
    /// one kernel or copy to the next it does, and an allocation is only known by one of its addresses.
    fn alias(&mut self, parts: &[PBlockId], len: Bytes) -> Result<BlockId, MemoryError> {
        let chunks: Vec<_> = parts.iter().flat_map(|part| self.chunks_of(*part).cloned()).collect();
        let mapping = self.map(&chunks)?;
        self.aliased += len;
        let birth = self.next_birth();
        Ok(BlockId::S(self.insert_sblock(parts.to_vec(), Place::Alias(mapping), birth)))
    }

    /// Moves the chunks of `parts` to new addresses, where they are one block.
    fn move_together(&mut self, parts: &[PBlockId], stream: StreamId) -> Result<BlockId, MemoryError> {
        let mut chunks = Vec::new();
        for part in parts {
            match self.take_out(*part) {
                Ok(taken) => chunks.extend(taken),
                Err(error) => {
                    self.put_back(chunks, stream);
                    return Err(error);
                }
            }
        }
        match self.map(&chunks) {
            Ok(mapping) => Ok(BlockId::P(self.add_range(mapping, stream, self.moment))),
            Err(error) => {
                self.put_back(chunks, stream);
                Err(error)
            }
        }
    }

    /// Chunks that were taken out and could not be stitched come back at addresses of their own; what not even that works for is orphaned
    /// and handed to whoever asks next ([`StitchingPool::orphans`]).
    fn put_back(&mut self, chunks: Vec<Arc<Chunk>>, stream: StreamId) {
        for chunk in chunks {
            match Mapping::stitch(std::slice::from_ref(&chunk)) {
                Ok(mapping) => {
                    self.add_range(mapping, stream, self.moment);
                }
                Err(_) => self.orphans.push(chunk),
            }
        }
    }

    /// Chunks that the pool holds no longer and the caller must give back.
    pub fn orphans(&mut self) -> Vec<Arc<Chunk>> {
        std::mem::take(&mut self.orphans)
    }

    /// Maps chunks side by side. Where mappings have run out, stitched blocks that were not used for longest make room.
    pub(super) fn map(&mut self, chunks: &[Arc<Chunk>]) -> Result<Mapping, MemoryError> {
        let len = chunks.iter().map(|chunk| chunk.len()).sum();
        loop {
            match Mapping::stitch(chunks) {
                Err(error) if error.kind() == ErrorKind::Exhausted && self.evict(len) => {}
                outcome => return outcome,
            }
        }
    }

    /// Drops stitched blocks until `len` more addresses are within the limit, or none that is idle is left.
    fn make_room_for_alias(&mut self, len: Bytes) {
        let after = self.aliased.checked_add(len).unwrap_or(Bytes::MAX);
        let surplus = after.saturating_sub(self.stitch_limit);
        if !surplus.is_zero() {
            self.evict(surplus);
        }
    }

    /// From now on nothing is unmapped to serve a request, or it may be again: while a graph is captured that would break the capture. Meanwhile there may be more stitched blocks than the limit.
    pub fn keep_mapped(&mut self, is_kept: bool) {
        self.keeps_mapped = is_kept;
    }

    /// Drops idle stitched blocks, the least recently used first, until `len` bytes of addresses are free. False if there was none.
    fn evict(&mut self, len: Bytes) -> bool {
        if self.keeps_mapped {
            return false;
        }
        let idle = self.least_recently_used(|block| matches!(block.place, Place::Alias(_)));
        let mut freed = Bytes::ZERO;
        for oldest in idle {
            if freed >= len {
                break;
            }
            freed += self.sblock(oldest).len;
            self.remove_sblock(oldest);
            self.counts.evicted += 1;
        }
        !freed.is_zero()
    }

    /// The end of a block's addresses.
    pub(super) fn end_of(&self, block: PBlockId) -> crate::units::DeviceAddress {
        let block = self.pblock(block);
        block.address.checked_add(block.len).expect("a block lies in its range")
    }
}
