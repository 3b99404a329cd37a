//! The blocks and the lists that find them: by size for an exact match, by range for neighbours.
//!
//! Invariant: a block stands in the list of its size, or waits for a part of its own that serves somebody ([`Seat`]). One that serves stays where it
//! is: it takes a seat when somebody finds it in the list.

use std::sync::Arc;

use super::busy::PartSet;
use super::cards::{Card, CardId};
use super::{Mapping, StitchingPool, tape};
use crate::ids::StreamId;
use crate::memory::Chunk;
use crate::units::{Bytes, DeviceAddress};

pub(super) type PBlockId = usize;
pub(super) type SBlockId = usize;
pub(super) type RangeId = usize;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum BlockId {
    P(PBlockId),
    S(SBlockId),
}

/// Where a block is to be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seat {
    /// In the list of its size: it may be able to serve.
    Ready,
    /// It cannot serve before this part of it, which may be itself, is idle.
    Waiting(PBlockId),
}

/// Chunks mapped back to back, cut into PBlocks.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) mapping: Mapping,
    /// The PBlock at the lowest address. Where chunks were taken out, neighbours in the list are not neighbours in addresses.
    pub(super) first: Option<PBlockId>,
    /// The PBlock of each slot.
    pub(super) owners: Vec<PBlockId>,
    /// Chunks that were taken out and cannot leave before the range goes, where memory stays with its addresses: whoever got them would get no memory with them.
    pub(super) withheld: Vec<Arc<Chunk>>,
}

#[derive(Debug)]
pub(super) struct PBlock {
    pub(super) range: RangeId,
    /// Which slots of the range's mapping.
    pub(super) slots: std::ops::Range<u32>,
    pub(super) address: DeviceAddress,
    pub(super) len: Bytes,
    pub(super) seat: Seat,
    /// Who used it last.
    pub(super) stream: StreamId,
    /// SBlocks that it is a part of.
    pub(super) sblocks: Vec<SBlockId>,
    pub(super) class: u32,
    /// The number of the block, which no other has had: the larger the younger.
    pub(super) birth: u64,
    pub(super) card: CardId,
    pub(super) before: Option<PBlockId>,
    pub(super) after: Option<PBlockId>,
}

#[derive(Debug)]
pub(super) struct SBlock {
    pub(super) address: DeviceAddress,
    pub(super) len: Bytes,
    /// In the order of addresses.
    pub(super) parts: Vec<PBlockId>,
    pub(super) seat: Seat,
    pub(super) place: Place,
    /// The pool's moment at which it was made.
    pub(super) made: u64,
    pub(super) class: u32,
    pub(super) birth: u64,
    pub(super) card: CardId,
}

/// Where an SBlock is visible.
#[derive(Debug)]
pub(super) enum Place {
    /// Where its parts are: they are neighbours in one range.
    InRange,
    /// At addresses of its own.
    Alias(Mapping),
}

impl Place {
    pub(super) fn is_in_range(&self) -> bool {
        matches!(self, Place::InRange)
    }
}

/// All blocks of one size.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) len: Bytes,
    pub(super) ready: Ready,
}

/// Blocks of one size that could serve, the oldest first.
///
/// Age is what makes a regular job settle. An iteration that finds no exact match makes a new block; in the next iteration everything before that point is served
/// by the same, older blocks as before, so the new one is free when its turn comes. By the second iteration at the latest every request has its
/// block. (Any order that lets new blocks serve before old ones moves earlier requests to other bytes, and new conflicts arise for ever.)
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// Youngest first: the oldest is taken from the end.
    by_age: Vec<(u64, BlockId)>,
}

impl Ready {
    pub(super) fn insert(&mut self, birth: u64, block: BlockId) {
        // Most often it is the one that was taken last, and older than the rest.
        if self.by_age.last().is_none_or(|(other, _)| *other > birth) {
            self.by_age.push((birth, block));
            return;
        }
        let at = self.by_age.partition_point(|(other, _)| *other > birth);
        self.by_age.insert(at, (birth, block));
    }

    fn remove(&mut self, birth: u64, block: BlockId) {
        // Most often it is the one that was just found, at the end.
        if self.by_age.last() == Some(&(birth, block)) {
            self.by_age.pop();
            return;
        }
        let same = self.by_age.partition_point(|(other, _)| *other > birth);
        let at = self.by_age[same..].iter().position(|entry| *entry == (birth, block));
        self.by_age.remove(same + at.expect("a block that could serve stands in the list of its size"));
    }

    /// The oldest first.
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.by_age.iter().rev().map(|(_, block)| *block)
    }

    /// The oldest but `skipped`.
    #[inline]
    pub(super) fn oldest(&self, skipped: usize) -> Option<BlockId> {
        let at = self.by_age.len().checked_sub(skipped + 1)?;
        Some(self.by_age[at].1)
    }

    /// PBlocks among them, the oldest first.
    pub(super) fn pblocks(&self) -> impl Iterator<Item = PBlockId> + '_ {
        self.iter().filter_map(|block| if let BlockId::P(id) = block { Some(id) } else { None })
    }
}

/// Marks sizes without a class.
pub(super) const NO_CLASS: u32 = u32::MAX;

impl StitchingPool {
    pub(super) fn pblock(&self, id: PBlockId) -> &PBlock {
        &self.pblocks[id]
    }

    pub(super) fn pblock_mut(&mut self, id: PBlockId) -> &mut PBlock {
        &mut self.pblocks[id]
    }

    pub(super) fn sblock(&self, id: SBlockId) -> &SBlock {
        &self.sblocks[id]
    }

    pub(super) fn sblock_mut(&mut self, id: SBlockId) -> &mut SBlock {
        &mut self.sblocks[id]
    }

    /// A number that no block has had.
    pub(super) fn next_birth(&mut self) -> u64 {
        self.births += 1;
        self.births
    }

    /// The class of a size, if there is one: an index by granules, as direct as a table can be.
    #[inline]
    pub(super) fn class(&self, len: Bytes) -> Option<u32> {
        self.class_index.get((len.get() >> self.granule_shift) as usize).copied().filter(|class| *class != NO_CLASS)
    }

    pub(super) fn class_or_new(&mut self, len: Bytes) -> u32 {
        if let Some(class) = self.class(len) {
            return class;
        }
        let class = self.classes.len() as u32;
        self.classes.push(Class { len, ready: Ready::default() });
        let at = (len.get() >> self.granule_shift) as usize;
        if self.class_index.len() <= at {
            self.class_index.resize(at + 1, NO_CLASS);
        }
        self.class_index[at] = class;
        self.class_of.insert(len, class);
        class
    }

    /// PBlocks of a range, from low to high addresses.
    pub(super) fn blocks_of<'a>(&'a self, range: &Range) -> impl Iterator<Item = PBlockId> + 'a {
        std::iter::successors(range.first, |block| self.pblocks[*block].after)
    }

    /// Takes up a new idle PBlock. Its neighbours are the caller's to link.
    pub(super) fn insert_pblock(&mut self, mut block: PBlock, idle_since: u64) -> PBlockId {
        let id = self.pblocks.vacant_key();
        block.class = self.class_or_new(block.len);
        self.busy.insert(id);
        block.card = self.deal(BlockId::P(id), block.address, block.len, &[id], block.birth, idle_since);
        self.pblocks.insert(block);
        self.list(BlockId::P(id));
        id
    }

    /// A card for a block.
    fn deal(
        &mut self,
        block: BlockId,
        address: DeviceAddress,
        len: Bytes,
        parts: &[PBlockId],
        birth: u64,
        idle_since: u64,
    ) -> CardId {
        let granules = (len.get() >> self.granule_shift) as u32;
        if let Some(moved) = self.sites.make_room() {
            self.cards.move_sites(&moved);
        }
        let site = self.sites.insert(address);
        let card = Card { mark: tape::mark(birth), idle_since, parts: PartSet::of(parts), granules, site };
        self.cards.insert(card, block)
    }

    /// A block is gone: its card, too.
    pub(super) fn discard(&mut self, card: CardId) -> Card {
        self.tape.forget();
        let card = self.cards.remove(card);
        self.sites.remove(card.site);
        card
    }

    pub(super) fn card_id(&self, block: BlockId) -> CardId {
        match block {
            BlockId::P(id) => self.pblocks[id].card,
            BlockId::S(id) => self.sblocks[id].card,
        }
    }

    pub(super) fn card(&self, block: BlockId) -> &Card {
        self.cards.get(self.card_id(block))
    }

    /// It serves an allocation itself.
    pub(super) fn is_serving(&self, block: BlockId) -> bool {
        let card = self.card_id(block);
        self.sites.get(self.cards.get(card).site).serving() == Some(card)
    }

    /// Class, age and seat of a block.
    pub(super) fn place_of(&self, block: BlockId) -> (usize, u64, Seat) {
        match block {
            BlockId::P(id) => {
                let block = &self.pblocks[id];
                (block.class as usize, block.birth, block.seat)
            }
            BlockId::S(id) => {
                let block = &self.sblocks[id];
                (block.class as usize, block.birth, block.seat)
            }
        }
    }

    pub(super) fn seat(&mut self, block: BlockId, seat: Seat) {
        match block {
            BlockId::P(id) => self.pblocks[id].seat = seat,
            BlockId::S(id) => self.sblocks[id].seat = seat,
        }
    }

    /// A block that has no seat takes one in the list of its size.
    pub(super) fn list(&mut self, block: BlockId) {
        let (class, birth, _) = self.place_of(block);
        self.seat(block, Seat::Ready);
        self.classes[class].ready.insert(birth, block);
    }

    /// A block leaves its seat.
    pub(super) fn unlist(&mut self, block: BlockId) {
        match self.place_of(block) {
            (class, birth, Seat::Ready) => self.classes[class].ready.remove(birth, block),
            (_, _, Seat::Waiting(part)) => self.busy.leave(part, block),
        }
    }

    /// The oldest block in a list of which all is idle and that `fits`, of the first `tries` idle ones. Those that are not idle wait for what they lack, so
    /// that each obstacle is met once, and not by every search.
    pub(super) fn oldest_idle(
        &mut self,
        class: usize,
        tries: usize,
        fits: impl Fn(&StitchingPool, BlockId) -> bool,
    ) -> Option<BlockId> {
        let mut skipped = 0;
        while skipped < tries {
            let block = self.classes[class].ready.oldest(skipped)?;
            match self.obstacle(block) {
                Some(part) => self.wait(block, part),
                None if fits(self, block) => return Some(block),
                None => skipped += 1,
            }
        }
        None
    }

    /// A block that was found to lack a part waits for it.
    fn wait(&mut self, block: BlockId, part: PBlockId) {
        self.unlist(block);
        self.seat(block, Seat::Waiting(part));
        self.busy.wait(part, block);
    }

    /// Some allocation uses its bytes, through itself or an SBlock.
    #[inline]
    pub(super) fn is_busy(&self, id: PBlockId) -> bool {
        self.busy.is_busy(id)
    }

    /// A part of the block that serves somebody, or the PBlock itself.
    pub(super) fn obstacle(&self, block: BlockId) -> Option<PBlockId> {
        self.busy.first_busy(&self.card(block).parts)
    }

    /// Whoever waited for a part of the block, which is idle again, may be able to serve.
    #[cold]
    pub(super) fn wake(&mut self, card: CardId) {
        for block in self.busy.woken(&self.cards.get(card).parts) {
            self.list(block);
        }
    }

    /// Takes up an SBlock over `parts`.
    pub(super) fn insert_sblock(&mut self, parts: Vec<PBlockId>, place: Place, birth: u64) -> SBlockId {
        let len = parts.iter().map(|part| self.pblocks[*part].len).sum();
        let address = match &place {
            Place::InRange => self.pblocks[parts[0]].address,
            Place::Alias(mapping) => mapping.span().start(),
        };
        let class = self.class_or_new(len);
        let id = self.sblocks.vacant_key();
        let card = self.deal(BlockId::S(id), address, len, &parts, birth, 0);
        let (seat, made) = (Seat::Ready, self.moment);
        self.shown_parts += if place.is_in_range() { parts.len() } else { 0 };
        self.sblocks.insert(SBlock { address, len, parts, seat, place, made, class, birth, card });
        for at in 0..self.sblocks[id].parts.len() {
            let part = self.sblocks[id].parts[at];
            self.pblocks[part].sblocks.push(id);
        }
        self.note_alias(id, true);
        self.list(BlockId::S(id));
        id
    }

    /// Forgets an SBlock that serves nobody; an alias gives its addresses back. Says which parts it had.
    pub(super) fn remove_sblock(&mut self, id: SBlockId) -> Vec<PBlockId> {
        assert!(!self.is_serving(BlockId::S(id)), "nobody uses the addresses any more");
        self.unlist(BlockId::S(id));
        self.note_alias(id, false);
        let block = self.sblocks.remove(id);
        self.shown_parts -= if block.place.is_in_range() { block.parts.len() } else { 0 };
        let card = self.discard(block.card);
        for part in &block.parts {
            let part = &mut self.pblocks[*part];
            part.sblocks.retain(|of| *of != id);
            let of_part = self.cards.get_mut(part.card);
            of_part.idle_since = of_part.idle_since.max(card.idle_since);
        }
        if let Place::Alias(mapping) = block.place {
            self.aliased -= mapping.span().len();
        }
        block.parts
    }
}
