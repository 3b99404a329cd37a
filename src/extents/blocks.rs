//! Sorted pairs in blocks of up to 64, so that an insertion moves few of them.
//!
//! Unused slots hold the largest pair. A search of a block therefore always compares the same
//! number of slots, and none of its branches depends on what it finds.
//!
//! Invariant: pairs ascend within a block and from block to block. No block is empty, unless it is
//! the only one.

/// Compared by the first number, then by the second.
pub(super) type Pair = (u64, u64);

/// Slots of the first block until it is full. A power of four, as `rank` needs.
const SMALL: usize = 16;
/// Slots of every other block. A power of four, as `rank` needs.
const LARGE: usize = 64;
/// A block with fewer pairs is merged with a neighbour, if the result has room for more.
const MERGED_BELOW: usize = LARGE / 4;
const MERGED_MAX: usize = LARGE / 4 * 3;
/// What unused slots hold. No free run is this pair.
pub(super) const UNUSED: Pair = (u64::MAX, u64::MAX);

/// Both numbers as one, which compares without a branch.
#[inline]
pub(super) fn as_wide((high, low): Pair) -> u128 {
    u128::from(high) << u64::BITS | u128::from(low)
}

/// Where a pair is, or would be inserted. Valid until the list changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    pub(super) block: usize,
    pub(super) at: usize,
}

/// Some consecutive pairs.
#[derive(Debug, Default)]
struct Block {
    len: usize,
    /// `SMALL` or `LARGE` of them.
    slots: Vec<Pair>,
}

/// A sorted list of pairs.
#[derive(Debug, Default)]
pub(super) struct BlockList {
    /// The first pair of each block.
    firsts: Vec<Pair>,
    blocks: Vec<Block>,
    /// The block that was searched last.
    near: usize,
}

/// How many slots come before the first that is not below. `N` is a power of four.
#[inline]
fn rank<const N: usize>(slots: &[Pair; N], is_below: impl Fn(&Pair) -> bool) -> usize {
    let below = |at: usize| usize::from(is_below(&slots[at % N]));
    let (mut at, mut step) = (0, N / 4);
    // Three comparisons that do not wait for each other take less time than two that do.
    while step > 0 {
        at += (below(at + step - 1) + below(at + 2 * step - 1) + below(at + 3 * step - 1)) * step;
        step /= 4;
    }
    at + below(N - 1)
}

impl Block {
    fn with_slots(slots: usize, pairs: &[Pair]) -> Block {
        let mut block = Block { len: pairs.len(), slots: vec![UNUSED; slots] };
        block.slots[..pairs.len()].copy_from_slice(pairs);
        block
    }

    #[inline]
    fn pairs(&self) -> &[Pair] {
        &self.slots[..self.len]
    }

    /// How many pairs come before the first that is not below.
    #[inline]
    fn rank(&self, is_below: impl Fn(&Pair) -> bool) -> usize {
        let found = if let Some(slots) = self.slots.first_chunk::<LARGE>() {
            rank(slots, is_below)
        } else if let Some(slots) = self.slots.first_chunk::<SMALL>() {
            rank(slots, is_below)
        } else {
            0
        };
        // An unused slot is below the largest keys.
        found.min(self.len)
    }

    /// Needs an unused slot.
    #[inline]
    fn insert(&mut self, at: usize, pair: Pair) {
        self.slots.copy_within(at..self.len, at + 1);
        self.slots[at] = pair;
        self.len += 1;
    }

    #[inline]
    fn remove(&mut self, at: usize) {
        self.slots.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.slots[self.len] = UNUSED;
    }
}

impl BlockList {
    /// The list of these pairs, which ascend and are at most as many as a block has slots.
    pub(super) fn from_few(pairs: &[Pair]) -> BlockList {
        BlockList {
            firsts: pairs.first().copied().into_iter().collect(),
            blocks: vec![Block::with_slots(LARGE, pairs)],
            near: 0,
        }
    }

    /// The list has never had more than 16 pairs.
    #[inline]
    pub(super) fn is_small(&self) -> bool {
        self.blocks.first().is_none_or(|block| block.slots.len() == SMALL)
    }

    /// All pairs, if there is only one block.
    #[inline]
    pub(super) fn only_block(&self) -> Option<&[Pair]> {
        match self.blocks.as_slice() {
            [] => Some(&[]),
            [block] => Some(block.pairs()),
            _ => None,
        }
    }

    /// Behind all pairs that are below. `is_below` holds for a prefix of the list.
    #[inline]
    pub(super) fn position(&self, is_below: impl Fn(&Pair) -> bool) -> Position {
        let block = self.firsts.partition_point(&is_below).saturating_sub(1);
        let at = self.blocks.get(block).map_or(0, |block| block.rank(is_below));
        Position { block, at }
    }

    /// The same, faster where the last search ended in the same block: what is freed lies near what was
    /// allocated last.
    #[inline]
    pub(super) fn position_near(&mut self, is_below: impl Fn(&Pair) -> bool) -> Position {
        let begins = self.firsts.get(self.near).is_some_and(&is_below);
        if begins && !self.firsts.get(self.near + 1).is_some_and(&is_below) {
            return Position { block: self.near, at: self.blocks[self.near].rank(is_below) };
        }
        let position = self.position(is_below);
        self.near = position.block;
        position
    }

    /// The last pair before a position.
    #[inline]
    pub(super) fn before(&self, position: Position) -> Option<(Position, Pair)> {
        let Position { block, at } = position;
        if at > 0 {
            return Some((Position { block, at: at - 1 }, *self.blocks.get(block)?.pairs().get(at - 1)?));
        }
        let block = block.checked_sub(1)?;
        let pairs = self.blocks[block].pairs();
        Some((Position { block, at: pairs.len() - 1 }, *pairs.last()?))
    }

    /// The first pair from a position on.
    #[inline]
    pub(super) fn after(&self, position: Position) -> Option<(Position, Pair)> {
        let Position { block, at } = position;
        if let Some(pair) = self.blocks.get(block)?.pairs().get(at) {
            return Some((position, *pair));
        }
        let block = block + 1;
        Some((Position { block, at: 0 }, *self.firsts.get(block)?))
    }

    pub(super) fn first(&self) -> Option<Pair> {
        self.blocks.first()?.pairs().first().copied()
    }

    pub(super) fn last(&self) -> Option<Pair> {
        self.blocks.last()?.pairs().last().copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Pair> + '_ {
        self.blocks.iter().flat_map(Block::pairs).copied()
    }

    /// Replaces a pair by one that belongs at the same position.
    #[inline]
    pub(super) fn set(&mut self, position: Position, pair: Pair) {
        let Position { block, at } = position;
        self.blocks[block].slots[at] = pair;
        if at == 0 {
            self.firsts[block] = pair;
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, position: Position, pair: Pair) {
        let Position { block, at } = position;
        if self.blocks.get(block).is_none_or(|block| block.len == block.slots.len()) {
            return self.insert_with_room(position, pair);
        }
        self.blocks[block].insert(at, pair);
        if at == 0 {
            self.firsts[block] = pair;
        }
    }

    /// Inserts a pair where no slot is unused.
    #[cold]
    #[inline(never)]
    fn insert_with_room(&mut self, position: Position, pair: Pair) {
        let Position { block, at } = position;
        let Some(lower) = self.blocks.get_mut(block) else {
            self.firsts.push(pair);
            self.blocks.push(Block::with_slots(SMALL, &[pair]));
            return;
        };
        if lower.len < LARGE {
            lower.slots.resize(LARGE, UNUSED);
            return self.insert(position, pair);
        }
        let half = LARGE / 2;
        let upper = Block::with_slots(LARGE, &lower.slots[half..]);
        lower.slots[half..].fill(UNUSED);
        lower.len = half;
        self.firsts.insert(block + 1, upper.slots[0]);
        self.blocks.insert(block + 1, upper);
        let position = if at <= half { position } else { Position { block: block + 1, at: at - half } };
        self.insert(position, pair);
    }

    #[inline]
    pub(super) fn remove(&mut self, position: Position) {
        let Position { block, at } = position;
        let changed = &mut self.blocks[block];
        changed.remove(at);
        let len = changed.len;
        if at == 0 {
            self.firsts[block] = changed.slots[0];
        }
        if len < MERGED_BELOW && self.blocks.len() > 1 {
            self.merge(block);
        }
    }

    /// Merges a block with a neighbour, if they fit or the block is empty.
    #[cold]
    #[inline(never)]
    fn merge(&mut self, block: usize) {
        let left = block.min(self.blocks.len() - 2);
        let (len, more) = (self.blocks[left].len, self.blocks[left + 1].len);
        if len + more > MERGED_MAX && self.blocks[block].len > 0 {
            return;
        }
        let right = self.blocks.remove(left + 1);
        self.firsts.remove(left + 1);
        let merged = &mut self.blocks[left];
        merged.slots[len..len + more].copy_from_slice(right.pairs());
        merged.len = len + more;
        self.firsts[left] = merged.slots[0];
    }

    /// Describes the first broken invariant. An error is a bug in this file.
    pub(super) fn invariants(&self) -> Result<(), String> {
        let mut last = None;
        for (number, block) in self.blocks.iter().enumerate() {
            if block.len == 0 && self.blocks.len() > 1 {
                return Err(format!("block {number} is empty"));
            }
            if block.pairs().first().is_some_and(|first| self.firsts[number] != *first) {
                return Err(format!("block {number} does not begin with {:?}", self.firsts[number]));
            }
            if block.slots[block.len..].iter().any(|slot| *slot != UNUSED) {
                return Err(format!("block {number} has a pair in an unused slot"));
            }
            for pair in block.pairs() {
                if last.is_some_and(|last| last >= *pair) {
                    return Err(format!("{pair:?} is not in order"));
                }
                last = Some(*pair);
            }
        }
        let (firsts, blocks) = (self.firsts.len(), self.blocks.len());
        if firsts == blocks { Ok(()) } else { Err(format!("{blocks} blocks have {firsts} first pairs")) }
    }
}
