//! The invariants of the stitching pool, counted again from its blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::StitchingPool;
use super::blocks::{BlockId, Place};
use crate::units::{Bytes, Span};

impl StitchingPool {
    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        self.blocks_partition_their_ranges()?;
        self.sblocks_list_their_parts()?;
        self.idle_lists_hold_what_is_idle()?;
        self.live_blocks_share_nothing()
    }

    fn blocks_partition_their_ranges(&self) -> Result<(), String> {
        let mut held = Bytes::ZERO;
        let mut seen = BTreeSet::new();
        for (range_id, range) in &self.ranges {
            let mut slots = BTreeSet::new();
            let mut before = None;
            for id in self.blocks_of(range) {
                let block = self.pblock(id);
                let wanted = self.granule.checked_mul(u64::from(block.slots.end - block.slots.start));
                let starts_at = range.mapping.slot_span(block.slots.start as usize).start();
                if block.range != range_id
                    || block.before != before
                    || wanted != Some(block.len)
                    || starts_at != block.address
                {
                    return Err(format!("block {id} does not lie where it says: {block:?}"));
                }
                for slot in block.slots.clone() {
                    if range.mapping.chunk(slot as usize).is_none() || !slots.insert(slot) {
                        return Err(format!("slot {slot} of range {range_id} is taken or in two blocks"));
                    }
                }
                seen.insert(id);
                held += block.len;
                before = Some(id);
            }
            let there = (0..range.mapping.slot_count()).filter(|slot| range.mapping.chunk(*slot).is_some()).count();
            if slots.len() != there || there == 0 {
                return Err(format!("range {range_id} has {there} chunks and its blocks {}", slots.len()));
            }
        }
        if held != self.held || seen.len() != self.pblocks.len() {
            return Err(format!("blocks hold {held}, the pool says {}", self.held));
        }
        Ok(())
    }

    fn sblocks_list_their_parts(&self) -> Result<(), String> {
        let mut aliased = Bytes::ZERO;
        for (id, block) in &self.sblocks {
            let mut len = Bytes::ZERO;
            let mut chunks = Vec::new();
            for part in &block.parts {
                let part_block = self.pblocks.get(*part).ok_or(format!("SBlock {id} has a part that is gone"))?;
                if part_block.sblocks.iter().filter(|of| **of == id).count() != 1 {
                    return Err(format!("part {part} does not know SBlock {id}"));
                }
                len += part_block.len;
                let mapping = &self.ranges[part_block.range].mapping;
                chunks
                    .extend(part_block.slots.clone().map(|slot| mapping.chunk(slot as usize).map(|chunk| chunk.id())));
            }
            if len != block.len {
                return Err(format!("SBlock {id} is {len} long: {block:?}"));
            }
            match &block.place {
                Place::InRange => {
                    let follow =
                        block.parts.windows(2).all(|pair| self.end_of(pair[0]) == self.pblock(pair[1]).address);
                    if !follow || self.pblock(block.parts[0]).address != block.address {
                        return Err(format!("SBlock {id} is in place and its parts are not neighbours"));
                    }
                }
                Place::Alias(mapping) => {
                    let shown: Vec<_> =
                        (0..mapping.slot_count()).map(|slot| mapping.chunk(slot).map(|chunk| chunk.id())).collect();
                    if shown != chunks || mapping.span() != Span::new(block.address, block.len).ok_or("span")? {
                        return Err(format!("SBlock {id} shows other chunks than its parts"));
                    }
                    aliased += block.len;
                }
            }
        }
        for (id, block) in &self.pblocks {
            if !block.sblocks.iter().all(|of| self.sblocks.get(*of).is_some_and(|of| of.parts.contains(&id))) {
                return Err(format!("block {id} names an SBlock that does not have it"));
            }
        }
        if aliased == self.aliased {
            Ok(())
        } else {
            Err(format!("{aliased} are stitched, the pool says {}", self.aliased))
        }
    }

    fn idle_lists_hold_what_is_idle(&self) -> Result<(), String> {
        let (mut listed_p, mut listed_s) = (0, 0);
        for (number, class) in self.classes.iter().enumerate() {
            for block in class.ready.iter() {
                let (is_listed_right, count) = match block {
                    BlockId::P(id) => {
                        let block = self.pblock(id);
                        (!block.is_live && block.len == class.len && block.class as usize == number, &mut listed_p)
                    }
                    BlockId::S(id) => {
                        let block = self.sblock(id);
                        (!block.is_live && block.len == class.len && block.class as usize == number, &mut listed_s)
                    }
                };
                *count += 1;
                if !is_listed_right {
                    return Err(format!("{block:?} stands in the wrong list"));
                }
            }
        }
        let idle_p = self.pblocks.iter().filter(|(_, block)| !block.is_live).count();
        let idle_s = self.sblocks.iter().filter(|(_, block)| !block.is_live).count();
        if (listed_p, listed_s) == (idle_p, idle_s) {
            return Ok(());
        }
        Err(format!("{idle_p} and {idle_s} blocks are idle, {listed_p} and {listed_s} are listed"))
    }

    /// Every live PBlock serves exactly one allocation, alone or as a part.
    fn live_blocks_share_nothing(&self) -> Result<(), String> {
        let mut serving: BTreeMap<usize, u32> = BTreeMap::new();
        let mut live = Bytes::ZERO;
        for (address, served) in self.live.iter().chain(&self.lent) {
            let (at, len, parts) = match served.block {
                BlockId::P(id) => (self.pblock(id).address, self.pblock(id).len, vec![id]),
                BlockId::S(id) => (self.sblock(id).address, self.sblock(id).len, self.sblock(id).parts.clone()),
            };
            if Some(len) != self.block_len(served.bytes) {
                return Err(format!("{} were asked for at {address}, which has {len}", served.bytes));
            }
            if at != *address {
                return Err(format!("the block at {address} says it is at {at}"));
            }
            live += len;
            for part in parts {
                *serving.entry(part).or_default() += 1;
            }
        }
        let live_s = self.sblocks.iter().filter(|(_, block)| block.is_live).count();
        let served_s =
            self.live.values().chain(self.lent.values()).filter(|served| matches!(served.block, BlockId::S(_))).count();
        if live != self.live_bytes || live_s != served_s {
            return Err(format!("{live} are live, the pool says {}", self.live_bytes));
        }
        for (id, block) in &self.pblocks {
            let count = serving.get(&id).copied().unwrap_or(0);
            if count != u32::from(block.is_live) {
                return Err(format!("block {id} serves {count} allocations, live: {}", block.is_live));
            }
        }
        Ok(())
    }
}
