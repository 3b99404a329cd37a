//! The blocks and the lists that find them: by size for an exact match, by range for neighbours.
//!
//! Invariant: a PBlock stands in the list of its size exactly while it is idle; an SBlock exactly while it serves nobody itself (its parts may).

use super::{Mapping, StitchingPool};
use crate::ids::StreamId;
use crate::units::{Bytes, DeviceAddress};

pub(super) type PBlockId = usize;
pub(super) type SBlockId = usize;
pub(super) type RangeId = usize;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum BlockId {
    P(PBlockId),
    S(SBlockId),
}

/// Chunks mapped back to back, cut into PBlocks.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) mapping: Mapping,
    /// The PBlock at the lowest address. Where chunks were taken out, neighbours in the list are not neighbours in addresses.
    pub(super) first: Option<PBlockId>,
}

#[derive(Debug)]
pub(super) struct PBlock {
    pub(super) range: RangeId,
    /// Which slots of the range's mapping.
    pub(super) slots: std::ops::Range<u32>,
    pub(super) address: DeviceAddress,
    pub(super) len: Bytes,
    pub(super) is_live: bool,
    /// Who used it last.
    pub(super) stream: StreamId,
    /// The pool's moment at which it became idle.
    pub(super) idle_since: u64,
    /// SBlocks that it is a part of.
    pub(super) sblocks: Vec<SBlockId>,
    pub(super) class: u32,
    pub(super) birth: u64,
    pub(super) before: Option<PBlockId>,
    pub(super) after: Option<PBlockId>,
}

#[derive(Debug)]
pub(super) struct SBlock {
    pub(super) address: DeviceAddress,
    pub(super) len: Bytes,
    /// In the order of addresses.
    pub(super) parts: Vec<PBlockId>,
    /// It serves an allocation itself.
    pub(super) is_live: bool,
    pub(super) place: Place,
    /// The pool's moment of its last use.
    pub(super) used: u64,
    pub(super) class: u32,
    pub(super) birth: u64,
}

/// Where an SBlock is visible.
#[derive(Debug)]
pub(super) enum Place {
    /// Where its parts are: they are neighbours in one range.
    InRange,
    /// At addresses of its own.
    Alias(Mapping),
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
    #[inline]
    fn insert(&mut self, birth: u64, block: BlockId) {
        let at = self.by_age.partition_point(|(other, _)| *other > birth);
        self.by_age.insert(at, (birth, block));
    }

    #[inline]
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

    /// Idle PBlocks, the oldest first.
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
    pub(super) fn insert_pblock(&mut self, mut block: PBlock) -> PBlockId {
        block.class = self.class_or_new(block.len);
        let id = self.pblocks.insert(block);
        self.list_pblock(id);
        id
    }

    #[inline]
    pub(super) fn list_pblock(&mut self, id: PBlockId) {
        let PBlock { class, birth, .. } = self.pblocks[id];
        self.classes[class as usize].ready.insert(birth, BlockId::P(id));
    }

    #[inline]
    pub(super) fn unlist_pblock(&mut self, id: PBlockId) {
        let PBlock { class, birth, .. } = self.pblocks[id];
        self.classes[class as usize].ready.remove(birth, BlockId::P(id));
    }

    #[inline]
    pub(super) fn list_sblock(&mut self, id: SBlockId) {
        let SBlock { class, birth, .. } = self.sblocks[id];
        self.classes[class as usize].ready.insert(birth, BlockId::S(id));
    }

    #[inline]
    pub(super) fn unlist_sblock(&mut self, id: SBlockId) {
        let SBlock { class, birth, .. } = self.sblocks[id];
        self.classes[class as usize].ready.remove(birth, BlockId::S(id));
    }

    /// Takes up an SBlock over `parts`.
    pub(super) fn insert_sblock(&mut self, parts: Vec<PBlockId>, place: Place, birth: u64) -> SBlockId {
        let len = parts.iter().map(|part| self.pblocks[*part].len).sum();
        let address = match &place {
            Place::InRange => self.pblocks[parts[0]].address,
            Place::Alias(mapping) => mapping.span().start(),
        };
        let class = self.class_or_new(len);
        let block = SBlock { address, len, parts, is_live: false, place, used: self.moment, class, birth };
        let id = self.sblocks.insert(block);
        for at in 0..self.sblocks[id].parts.len() {
            let part = self.sblocks[id].parts[at];
            self.pblocks[part].sblocks.push(id);
        }
        self.list_sblock(id);
        id
    }

    /// Forgets an SBlock that serves nobody; an alias gives its addresses back. Says which parts it had.
    pub(super) fn remove_sblock(&mut self, id: SBlockId) -> Vec<PBlockId> {
        assert!(!self.sblocks[id].is_live, "nobody uses the addresses any more");
        self.unlist_sblock(id);
        let block = self.sblocks.remove(id);
        for part in &block.parts {
            self.pblocks[*part].sblocks.retain(|of| *of != id);
        }
        if let Place::Alias(mapping) = block.place {
            self.aliased -= mapping.span().len();
        }
        block.parts
    }

    /// A PBlock becomes live, by itself or as a part.
    #[inline]
    pub(super) fn activate(&mut self, id: PBlockId) {
        self.unlist_pblock(id);
        self.pblocks[id].is_live = true;
    }

    /// A PBlock becomes idle.
    #[inline]
    pub(super) fn deactivate(&mut self, id: PBlockId, stream: StreamId) {
        let block = &mut self.pblocks[id];
        block.is_live = false;
        block.stream = stream;
        block.idle_since = self.moment;
        self.list_pblock(id);
    }
}
