//! The invariants of the stitching pool, counted again from its blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::StitchingPool;
use super::blocks::{BlockId, Place, Seat};
use crate::units::{Bytes, Span};

impl StitchingPool {
    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        self.blocks_partition_their_ranges()?;
        self.sblocks_list_their_parts()?;
        self.every_block_has_its_seat()?;
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

    fn granules_of(&self, id: usize) -> impl Iterator<Item = (usize, u32)> + use<'_> {
        let block = self.pblock(id);
        block.slots.clone().map(|slot| (block.range, slot))
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
            let granules: Vec<_> = block.parts.iter().flat_map(|part| self.granules_of(*part)).collect();
            let in_runs = block.runs.iter().flat_map(|run| run.slots.clone().map(|slot| (run.range, slot)));
            if len != block.len || !granules.iter().copied().eq(in_runs) {
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

    /// Every block has one seat, and stands where it says.
    fn every_block_has_its_seat(&self) -> Result<(), String> {
        let mut seated = 0;
        for (number, class) in self.classes.iter().enumerate() {
            for block in class.ready.iter() {
                seated += 1;
                let (len, of, seat) = match block {
                    BlockId::P(id) => (self.pblock(id).len, self.pblock(id).class, self.pblock(id).seat),
                    BlockId::S(id) => (self.sblock(id).len, self.sblock(id).class, self.sblock(id).seat),
                };
                if (len, of as usize, seat) != (class.len, number, Seat::Ready) {
                    return Err(format!("{block:?} stands in the wrong list"));
                }
            }
        }
        for (range_id, range) in &self.ranges {
            for (at, block) in range.granules.waiting() {
                seated += 1;
                let (seat, has_it) = match block {
                    BlockId::P(id) => {
                        (self.pblock(id).seat, self.pblock(id).range == range_id && self.pblock(id).slots.contains(&at))
                    }
                    BlockId::S(id) => (
                        self.sblock(id).seat,
                        self.sblock(id).runs.iter().any(|run| run.range == range_id && run.slots.contains(&at)),
                    ),
                };
                if seat != Seat::Waiting(range_id, at) || !has_it || !range.granules.is_busy(at) {
                    return Err(format!("{block:?} waits for granule {at} of range {range_id} for nothing"));
                }
            }
        }
        let seats =
            self.pblocks.iter().map(|(_, block)| block.seat).chain(self.sblocks.iter().map(|(_, block)| block.seat));
        let idle = seats.filter(|seat| *seat != Seat::Serving).count();
        if seated == idle { Ok(()) } else { Err(format!("{idle} blocks serve nobody, {seated} are listed or wait")) }
    }

    /// Every granule serves at most one allocation, and the bits say which serve any.
    fn live_blocks_share_nothing(&self) -> Result<(), String> {
        let mut serving: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        let mut live = Bytes::ZERO;
        for (address, served) in self.live.iter().chain(&self.lent) {
            let (at, len, seat, parts) = match served.block {
                BlockId::P(id) => (self.pblock(id).address, self.pblock(id).len, self.pblock(id).seat, vec![id]),
                BlockId::S(id) => {
                    (self.sblock(id).address, self.sblock(id).len, self.sblock(id).seat, self.sblock(id).parts.clone())
                }
            };
            if Some(len) != self.block_len(served.bytes) {
                return Err(format!("{} were asked for at {address}, which has {len}", served.bytes));
            }
            if at != *address || seat != Seat::Serving {
                return Err(format!("the block at {address} says it is at {at}, with {seat:?}"));
            }
            live += len;
            for part in parts {
                let block = self.pblock(part);
                for slot in block.slots.clone() {
                    *serving.entry((block.range, slot)).or_default() += 1;
                }
            }
        }
        let seats =
            self.pblocks.iter().map(|(_, block)| block.seat).chain(self.sblocks.iter().map(|(_, block)| block.seat));
        let serving_blocks = seats.filter(|seat| *seat == Seat::Serving).count();
        if live != self.live_bytes || serving_blocks != self.live.len() + self.lent.len() {
            return Err(format!("{live} are live in {serving_blocks} blocks, the pool says {}", self.live_bytes));
        }
        if let Some((granule, count)) = serving.iter().find(|(_, count)| **count != 1) {
            return Err(format!("granule {granule:?} serves {count} allocations"));
        }
        let is_busy = |(range, slot): &(usize, u32)| self.ranges[*range].granules.is_busy(*slot);
        let busy: u64 = self.ranges.iter().map(|(_, range)| range.granules.busy_count()).sum();
        if !serving.keys().all(is_busy) || busy != serving.len() as u64 {
            return Err(format!("{} granules serve, {busy} are busy", serving.len()));
        }
        Ok(())
    }
}
