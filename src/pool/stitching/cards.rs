//! What serving a block and taking it back touches, and nothing else: one cache line per block.

use super::blocks::BlockId;
use super::granules::Cells;
use super::sites::SiteId;

pub(super) type CardId = u32;

#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Card {
    /// What the block adds to the tape's state while it serves.
    pub(super) mark: u64,
    /// The pool's moment at which it became idle; 0 as long as it has served nobody. While there is one stream only, uses as a part stand with the SBlock.
    pub(super) idle_since: u64,
    pub(super) cells: Cells,
    /// How many granules it has; 0 where there is no block.
    pub(super) granules: u32,
    pub(super) site: SiteId,
}

const _: () = assert!(size_of::<Card>() == 64);

#[derive(Debug, Default)]
pub(super) struct Cards {
    cards: Vec<Card>,
    /// Whose card it is.
    blocks: Vec<BlockId>,
    vacant: Vec<CardId>,
}

impl Cards {
    /// A card whose block is yet to be named.
    pub(super) fn insert(&mut self, card: Card) -> CardId {
        let unnamed = BlockId::P(usize::MAX);
        match self.vacant.pop() {
            Some(id) => {
                self.cards[id as usize] = card;
                self.blocks[id as usize] = unnamed;
                id
            }
            None => {
                self.cards.push(card);
                self.blocks.push(unnamed);
                self.cards.len() as CardId - 1
            }
        }
    }

    pub(super) fn name(&mut self, id: CardId, block: BlockId) {
        self.blocks[id as usize] = block;
    }

    pub(super) fn remove(&mut self, id: CardId) -> Card {
        self.vacant.push(id);
        let gone = Card { mark: 0, idle_since: 0, cells: Cells::of([]), granules: 0, site: SiteId::MAX };
        std::mem::replace(&mut self.cards[id as usize], gone)
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
        for card in self.cards.iter_mut().filter(|card| card.granules != 0) {
            card.site = moved[card.site as usize];
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Cards::default();
    }
}
