//! What serving a block and taking it back touches, and nothing else: one cache line per block.

use slab::Slab;

use super::blocks::BlockId;
use super::busy::PartSet;
use super::sites::SiteId;

pub(super) type CardId = u32;

#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Card {
    /// What the block adds to the tape's state while it serves.
    pub(super) mark: u64,
    /// The pool's moment at which it became idle; 0 as long as it has served nobody. While there is one stream only, uses as a part stand with the SBlock.
    pub(super) idle_since: u64,
    pub(super) parts: PartSet,
    /// How many granules it has.
    pub(super) granules: u32,
    pub(super) site: SiteId,
}

const _: () = assert!(size_of::<Option<Card>>() == 64, "a slab of cards has one in each line");

#[derive(Debug, Default)]
pub(super) struct Cards {
    cards: Slab<Card>,
    /// Whose card each is.
    blocks: Vec<BlockId>,
}

impl Cards {
    pub(super) fn insert(&mut self, card: Card, block: BlockId) -> CardId {
        let id = self.cards.insert(card);
        if self.blocks.len() == id {
            self.blocks.push(block);
        }
        self.blocks[id] = block;
        id as CardId
    }

    pub(super) fn remove(&mut self, id: CardId) -> Card {
        self.cards.remove(id as usize)
    }

    #[inline]
    pub(super) fn get(&self, id: CardId) -> &Card {
        &self.cards[id as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: CardId) -> &mut Card {
        &mut self.cards[id as usize]
    }

    pub(super) fn block(&self, id: CardId) -> BlockId {
        self.blocks[id as usize]
    }

    /// The sites are elsewhere now.
    pub(super) fn move_sites(&mut self, moved: &[SiteId]) {
        for (_, card) in &mut self.cards {
            card.site = moved[card.site as usize];
        }
    }
}
