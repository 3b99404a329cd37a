//! The invariants of the stitching pool, counted again from its blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::blocks::{BlockId, PBlockId, Place, Seat};
use super::cards::CardId;
use super::tape::State;
use super::{StitchingPool, tape};
use crate::units::{Bytes, Span};

impl StitchingPool {
    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        self.blocks_partition_their_ranges()?;
        self.sblocks_list_their_parts()?;
        self.cards_are_of_their_blocks()?;
        self.every_block_has_its_seat()?;
        self.check_cells()?;
        self.live_blocks_share_nothing()
    }

    fn blocks_partition_their_ranges(&self) -> Result<(), String> {
        let (mut held, mut withheld) = (Bytes::ZERO, Bytes::ZERO);
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
            withheld += range.withheld.iter().map(|chunk| chunk.len()).sum::<Bytes>();
            let there = range.mapping.chunks().count();
            if slots.len() != there || there == 0 {
                return Err(format!("range {range_id} has {there} chunks and its blocks {}", slots.len()));
            }
        }
        if held != self.held || seen.len() != self.pblocks.len() {
            return Err(format!("blocks hold {held}, the pool says {}", self.held));
        }
        let busy: Bytes = self.pblocks.iter().filter(|(id, _)| self.is_busy(*id)).map(|(_, block)| block.len).sum();
        if busy != self.live_bytes() {
            return Err(format!("{busy} of blocks serve, the pool says {}", self.live_bytes()));
        }
        let in_place = self.sblocks.iter().filter(|(_, block)| block.place.is_in_range());
        let shown: usize = in_place.map(|(_, block)| block.parts.len()).sum();
        if shown != self.shown_parts {
            return Err(format!("SBlocks have {shown} parts, the pool says {}", self.shown_parts));
        }
        if withheld != self.withheld {
            return Err(format!("ranges withhold {withheld}, the pool says {}", self.withheld));
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

    /// Every block, with all that its card must agree with.
    fn blocks(&self) -> impl Iterator<Item = (BlockId, Seat, Bytes, CardId, Vec<PBlockId>)> {
        let pblocks = self.pblocks.iter();
        let pblocks = pblocks.map(|(id, block)| (BlockId::P(id), block.seat, block.len, block.card, vec![id]));
        let sblocks = self.sblocks.iter();
        let sblocks =
            sblocks.map(|(id, block)| (BlockId::S(id), block.seat, block.len, block.card, block.parts.clone()));
        pblocks.chain(sblocks)
    }

    /// What stands on the cards is what the blocks are.
    fn cards_are_of_their_blocks(&self) -> Result<(), String> {
        let mut births = BTreeSet::new();
        for (block, _, len, id, mut parts) in self.blocks() {
            let card = self.cards.get(id);
            let address = match block {
                BlockId::P(id) => self.pblock(id).address,
                BlockId::S(id) => self.sblock(id).address,
            };
            parts.sort_unstable();
            let is_of_it = self.cards.block(id) == block
                && self.sites.get(card.site).address == address
                && Some(len) == self.granule.checked_mul(u64::from(card.granules))
                && card.parts.parts().eq(parts);
            let (_, birth, _) = self.place_of(block);
            if !is_of_it || card.mark != tape::mark(birth) {
                return Err(format!("{block:?} of {len} at {address} has the card {card:?}"));
            }
            births.insert(birth);
        }
        let blocks = self.pblocks.len() + self.sblocks.len();
        if births.len() == blocks { Ok(()) } else { Err(format!("{blocks} blocks have {} numbers", births.len())) }
    }

    /// Every block has one seat, and stands where it says.
    fn every_block_has_its_seat(&self) -> Result<(), String> {
        let mut seated = BTreeSet::new();
        for (number, class) in self.classes.iter().enumerate() {
            for block in class.ready.iter() {
                let ((of, _, seat), len) = (self.place_of(block), self.len_on(self.card(block)));
                if (len, of, seat) != (class.len, number, Seat::Ready) || !seated.insert(block) {
                    return Err(format!("{block:?} stands in the wrong list"));
                }
            }
        }
        let has: BTreeMap<_, _> = self.blocks().map(|(block, seat, .., parts)| (block, (seat, parts))).collect();
        for (part, block) in self.busy.waiting() {
            let (seat, parts) = has.get(&block).ok_or(format!("{block:?} waits and is gone"))?;
            let is_right = *seat == Seat::Waiting(part) && parts.contains(&part) && self.is_busy(part);
            if !is_right || !seated.insert(block) {
                return Err(format!("{block:?} waits for part {part} for nothing"));
            }
        }
        let (there, blocks) = (seated.len(), self.pblocks.len() + self.sblocks.len());
        if there == blocks { Ok(()) } else { Err(format!("there are {blocks} blocks, {there} are listed or wait")) }
    }

    /// Every PBlock serves at most one allocation, and the bits say which serve any.
    fn live_blocks_share_nothing(&self) -> Result<(), String> {
        let of_card: BTreeMap<_, _> = self.blocks().map(|(.., len, card, parts)| (card, (len, parts))).collect();
        let mut serving = BTreeSet::new();
        for (site, card) in self.sites.live() {
            let (len, parts) = of_card.get(&card).ok_or(format!("a block that is gone serves at {}", site.address))?;
            if self.block_len(site.bytes) != Some(*len)
                || self.sites.get(self.cards.get(card).site).address != site.address
            {
                return Err(format!("{} were asked for at {}, which has {len}", site.bytes, site.address));
            }
            if let Some(part) = parts.iter().find(|part| !serving.insert(**part)) {
                return Err(format!("PBlock {part} serves two allocations"));
            }
        }
        let busy = self.busy.count();
        if !serving.iter().all(|part| self.is_busy(*part)) || busy != serving.len() {
            return Err(format!("{} PBlocks serve, {busy} are busy", serving.len()));
        }
        let mut state = State::default();
        self.sites.live().for_each(|(_, card)| state.toggle(self.cards.get(card).mark));
        if state != self.tape.state() {
            return Err(format!("the tape says {:?}, and {state:?} serve", self.tape.state()));
        }
        self.busy.invariants()
    }
}
