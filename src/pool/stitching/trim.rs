//! Giving chunks up: idle blocks leave the pool.

use std::sync::Arc;

use super::blocks::{BlockId, PBlockId, Range};
use super::busy::Busy;
use super::cards::Cards;
use super::sites::Sites;
use super::tape::Tape;
use super::{StitchCounts, StitchingPool};
use crate::memory::{Chunk, MemoryError};
use crate::units::Bytes;

impl StitchingPool {
    /// Takes idle blocks out, those that have been idle longest first, until they hold `wanted` bytes or none is left; the chunks are the caller's. What
    /// cannot be unmapped stays.
    ///
    /// Where memory stays with its addresses ([`crate::driver::Capabilities::memory_stays_with_addresses`]) chunks leave with their whole range or not at all: what was taken out of a
    /// range of which something is live would be nobody's until that goes.
    pub fn trim(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        if self.device.capabilities().memory_stays_with_addresses {
            return self.trim_ranges(wanted);
        }
        let idle = self.pblocks.iter().map(|(id, _)| id).filter(|id| !self.is_busy(*id));
        let mut idle: Vec<(u64, PBlockId)> = idle.map(|id| (self.idle_since(id), id)).collect();
        idle.sort_unstable();
        let mut chunks = self.orphans();
        let mut left = wanted.saturating_sub(chunks.iter().map(|chunk| chunk.len()).sum());
        for (_, block) in idle {
            if left.is_zero() {
                break;
            }
            if self.pblock(block).len > left {
                let keep = left.round_up(self.granule).expect("it is less than the block");
                if keep < self.pblock(block).len {
                    self.split(block, keep);
                }
            }
            let len = self.pblock(block).len;
            if let Ok(taken) = self.take_out(block) {
                chunks.extend(taken);
                left = left.saturating_sub(len);
            }
        }
        chunks
    }

    /// The same, range by range.
    fn trim_ranges(&mut self, wanted: Bytes) -> Vec<Arc<Chunk>> {
        let mut idle: Vec<(u64, Vec<PBlockId>)> = Vec::new();
        for (_, range) in &self.ranges {
            let blocks: Vec<PBlockId> = self.blocks_of(range).collect();
            if !blocks.iter().any(|block| self.is_busy(*block)) {
                let since = blocks.iter().map(|block| self.idle_since(*block)).max();
                idle.push((since.unwrap_or(0), blocks));
            }
        }
        idle.sort_unstable();
        let mut chunks = self.orphans();
        let mut left = wanted.saturating_sub(chunks.iter().map(|chunk| chunk.len()).sum());
        for (_, blocks) in idle {
            if left.is_zero() {
                break;
            }
            let Some(range) = blocks.first().map(|block| self.pblock(*block).range) else { continue };
            let taken = blocks.into_iter().filter_map(|block| self.take_out(block).ok());
            let mut taken: Vec<_> = taken.flatten().collect();
            match self.ranges.get_mut(range) {
                // Some block cannot leave, and the memory of the others stays with the addresses that it keeps.
                Some(range) => {
                    self.withheld += taken.iter().map(|chunk| chunk.len()).sum::<Bytes>();
                    range.withheld.append(&mut taken);
                }
                None => {
                    taken.append(&mut self.orphans());
                    left = left.saturating_sub(taken.iter().map(|chunk| chunk.len()).sum());
                    chunks.append(&mut taken);
                }
            }
        }
        chunks
    }

    /// The pool's moment at which the block became idle, by itself or as a part.
    fn idle_since(&self, id: PBlockId) -> u64 {
        let of_parts = self.pblock(id).sblocks.iter().map(|of| self.card(BlockId::S(*of)).idle_since);
        of_parts.fold(self.card(BlockId::P(id)).idle_since, u64::max)
    }

    /// Every chunk that the pool has, live ones included, for the end of its life: all mappings go.
    pub fn take_all(&mut self) -> Vec<Arc<Chunk>> {
        let mut chunks = self.orphans();
        (self.tape, self.counts) = (Tape::default(), StitchCounts::default());
        (self.cards, self.sites, self.busy) = (Cards::default(), Sites::default(), Busy::new());
        self.forget_cells();
        self.classes.clear();
        self.class_of.clear();
        self.class_index.clear();
        self.sblocks.clear();
        self.pblocks.clear();
        for range in self.ranges.drain() {
            chunks.extend(range.mapping.chunks().cloned());
            chunks.extend(range.withheld);
        }
        (self.held, self.withheld, self.aliased) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        (self.live_granules, self.shown_parts) = (0, 0);
        chunks
    }

    /// Unmaps an idle block and drops every SBlock over it. On error the block is still there. With the last block of a range its addresses go, and what was withheld until then is for
    /// whoever asks next ([`StitchingPool::orphans`]).
    pub(super) fn take_out(&mut self, id: PBlockId) -> Result<Vec<Arc<Chunk>>, MemoryError> {
        assert!(!self.is_busy(id), "only an idle block leaves");
        for of in self.pblock(id).sblocks.clone() {
            self.remove_sblock(of);
        }
        let (range, slots) = (self.pblock(id).range, self.pblock(id).slots.clone());
        let chunks = self.ranges[range].mapping.take(slots.start as usize..slots.end as usize)?;
        self.unlist(BlockId::P(id));
        let block = self.pblocks.remove(id);
        self.discard(block.card);
        self.note_taken(&block);
        match block.before {
            Some(before) => self.pblock_mut(before).after = block.after,
            None => self.ranges[range].first = block.after,
        }
        if let Some(after) = block.after {
            self.pblock_mut(after).before = block.before;
        }
        if self.ranges[range].first.is_none() {
            let Range { mapping, withheld, .. } = self.ranges.remove(range);
            drop(mapping);
            self.withheld -= withheld.iter().map(|chunk| chunk.len()).sum::<Bytes>();
            self.orphans.extend(withheld);
        }
        self.held -= block.len;
        Ok(chunks)
    }
}
