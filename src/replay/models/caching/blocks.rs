//! The blocks of the caching allocator: neighbours in their segment, and sorted sets of those that are free.
//!
//! Not for: when to split, merge or give back. The allocator decides.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// A block, by its place in [`Blocks`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct BlockId(u32);

impl BlockId {
    /// None is before this one.
    pub(super) const FIRST: BlockId = BlockId(0);
}

/// Which of the two pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Small,
    Large,
}

/// A stretch of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) stream: u64,
    pub(super) kind: Kind,
    /// In use by the job.
    pub(super) is_allocated: bool,
    /// Given back, and a stream may still use it.
    pub(super) is_pending: bool,
    /// There is memory behind it: always, but in expandable segments.
    pub(super) is_mapped: bool,
    /// The expandable segment that it lies in.
    pub(super) expandable: Option<u32>,
    /// Counts the segments, in the order in which they came.
    pub(super) segment: u64,
    pub(super) prev: Option<BlockId>,
    pub(super) next: Option<BlockId>,
    /// How many searches its pool had seen when it was freed.
    pub(super) freed_at: u64,
}

impl Block {
    /// It shares its segment with others.
    pub(super) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }
}

/// Where a free block stands among those of its stream: size, order of segment, address.
type FreeKey = (u64, u64, u64);

/// One of the two pools.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    /// Free blocks with memory behind them, by stream: a search is in one, and the key is shorter by it.
    free: BTreeMap<u64, BTreeMap<FreeKey, BlockId>>,
    /// Stretches of expandable segments without, by stream and address.
    pub(super) unmapped: BTreeSet<(u64, u64, BlockId)>,
    /// Searches until now; counted where age matters.
    pub(super) searches: u64,
}

impl Pool {
    /// Free blocks with memory behind them, by stream, size, and age or address.
    pub(super) fn free(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.values().flat_map(|of_stream| of_stream.values().copied())
    }
}

/// All blocks.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    slab: Vec<Block>,
    unused: Vec<BlockId>,
    small: Pool,
    large: Pool,
    /// Blocks of equal size are taken by the age of their segment before their address: from 2.13. Where addresses only grow, as the allocator's do here, both are the same block.
    by_segment: bool,
}

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;

    fn index(&self, id: BlockId) -> &Block {
        &self.slab[id.0 as usize]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.slab[id.0 as usize]
    }
}

impl Blocks {
    pub(super) fn new(by_segment: bool) -> Blocks {
        Blocks { slab: Vec::new(), unused: Vec::new(), small: Pool::default(), large: Pool::default(), by_segment }
    }

    pub(super) fn add(&mut self, block: Block) -> BlockId {
        if let Some(id) = self.unused.pop() {
            self[id] = block;
            return id;
        }
        self.slab.push(block);
        BlockId(self.slab.len() as u32 - 1)
    }

    pub(super) fn drop(&mut self, id: BlockId) {
        self.unused.push(id);
    }

    pub(super) fn pool(&self, kind: Kind) -> &Pool {
        match kind {
            Kind::Small => &self.small,
            Kind::Large => &self.large,
        }
    }

    pub(super) fn pool_mut(&mut self, kind: Kind) -> &mut Pool {
        match kind {
            Kind::Small => &mut self.small,
            Kind::Large => &mut self.large,
        }
    }

    fn key(&self, id: BlockId) -> FreeKey {
        let block = &self[id];
        (block.len, if self.by_segment { block.segment } else { 0 }, block.address)
    }

    /// Puts a free block where searches find it.
    pub(super) fn insert(&mut self, id: BlockId) {
        let key = self.key(id);
        let Block { stream, kind, .. } = self[id];
        let pool = self.pool_mut(kind);
        pool.free.entry(stream).or_default().insert(key, id);
        let searches = pool.searches;
        self[id].freed_at = searches;
    }

    /// Takes a block out of its set, before its size, address or neighbours change.
    pub(super) fn remove(&mut self, id: BlockId) {
        let key = self.key(id);
        let Block { stream, kind, is_mapped, address, .. } = self[id];
        let pool = self.pool_mut(kind);
        if !is_mapped {
            pool.unmapped.remove(&(stream, address, id));
        } else if let Some(of_stream) = pool.free.get_mut(&stream) {
            of_stream.remove(&key);
        }
    }

    pub(super) fn insert_unmapped(&mut self, id: BlockId) {
        let block = self[id];
        self.pool_mut(block.kind).unmapped.insert((block.stream, block.address, id));
    }

    /// The first free block of `stream` with at least `len` bytes.
    pub(super) fn first_fit(&self, kind: Kind, stream: u64, len: u64) -> Option<BlockId> {
        self.next_fit(kind, stream, Bound::Included((len, 0, 0)))
    }

    /// The free block after `id`, of the same stream.
    pub(super) fn after(&self, id: BlockId) -> Option<BlockId> {
        self.next_fit(self[id].kind, self[id].stream, Bound::Excluded(self.key(id)))
    }

    fn next_fit(&self, kind: Kind, stream: u64, from: Bound<FreeKey>) -> Option<BlockId> {
        self.pool(kind).free.get(&stream)?.range((from, Bound::Unbounded)).next().map(|(_, id)| *id)
    }

    /// The free blocks of `stream` with less than `len` bytes, the largest first.
    pub(super) fn below(&self, kind: Kind, stream: u64, len: u64) -> impl Iterator<Item = BlockId> + '_ {
        let of_stream = self.pool(kind).free.get(&stream).into_iter();
        of_stream.flat_map(move |of_stream| of_stream.range(..(len, 0, 0)).rev().map(|(_, id)| *id))
    }

    /// The block can be given to a request, or be merged.
    pub(super) fn is_free(&self, id: BlockId) -> bool {
        let block = &self[id];
        !block.is_allocated && !block.is_pending
    }

    /// Puts `id` between two neighbours.
    pub(super) fn splice(&mut self, id: BlockId, prev: Option<BlockId>, next: Option<BlockId>) {
        (self[id].prev, self[id].next) = (prev, next);
        if let Some(prev) = prev {
            self[prev].next = Some(id);
        }
        if let Some(next) = next {
            self[next].prev = Some(id);
        }
    }

    /// Makes `src` part of its neighbour `dst`, which is in no set, if both are free and alike.
    pub(super) fn merge(&mut self, dst: BlockId, src: Option<BlockId>) {
        let Some(src) = src.filter(|src| self.is_free(*src) && self[*src].is_mapped == self[dst].is_mapped) else {
            return;
        };
        self.remove(src);
        let taken = self[src];
        if self[dst].prev == Some(src) {
            self[dst].address = taken.address;
            let next = self[dst].next;
            self.splice(dst, taken.prev, next);
        } else {
            let prev = self[dst].prev;
            self.splice(dst, prev, taken.next);
        }
        self[dst].len += taken.len;
        self.drop(src);
    }

    /// Cuts the first `len` bytes off `id`, which is in no set: a new block with them, before the rest.
    pub(super) fn split_front(&mut self, id: BlockId, len: u64) -> BlockId {
        let whole = self[id];
        let front = self.add(Block { len, ..whole });
        self.splice(front, whole.prev, Some(id));
        let rest = &mut self[id];
        rest.address += len;
        rest.len -= len;
        front
    }

    /// Says what is wrong with the sets and neighbours; nothing, unless there is a bug.
    #[cfg(test)]
    pub(super) fn invariants(&self, live: &[BlockId]) -> Result<(), String> {
        let unused: std::collections::HashSet<u32> = self.unused.iter().map(|id| id.0).collect();
        for (at, block) in self.slab.iter().enumerate().filter(|(at, _)| !unused.contains(&(*at as u32))) {
            let id = BlockId(at as u32);
            if let Some(next) = block.next {
                let after = &self[next];
                if after.prev != Some(id) || after.address != block.address + block.len {
                    return Err(format!("{block:?} is followed by {after:?}"));
                }
                if self.is_free(id) && self.is_free(next) && block.is_mapped == after.is_mapped {
                    return Err(format!("{block:?} and {after:?} are not merged"));
                }
            }
            let pool = self.pool(block.kind);
            let is_listed = if block.is_mapped {
                pool.free.get(&block.stream).is_some_and(|of_stream| of_stream.get(&self.key(id)) == Some(&id))
            } else {
                pool.unmapped.contains(&(block.stream, block.address, id))
            };
            if is_listed != self.is_free(id) {
                return Err(format!("{block:?} is in the set of free blocks: {is_listed}"));
            }
            if block.is_allocated != live.contains(&id) {
                return Err(format!("{block:?} is live: {}", live.contains(&id)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_blocks_of_one_size_the_lowest_is_taken_or_from_2_13_that_of_the_oldest_segment() {
        for (by_segment, expected) in [(false, [2, 1]), (true, [1, 2])] {
            let mut blocks = Blocks::new(by_segment);
            for (segment, address) in [(1, 8192), (2, 4096)] {
                let id = blocks.add(Block {
                    address,
                    len: 512,
                    stream: 0,
                    kind: Kind::Small,
                    is_allocated: false,
                    is_pending: false,
                    is_mapped: true,
                    expandable: None,
                    segment,
                    prev: None,
                    next: None,
                    freed_at: 0,
                });
                blocks.insert(id);
            }
            let first = blocks.first_fit(Kind::Small, 0, 512).unwrap();
            let second = blocks.after(first).unwrap();
            assert_eq!([blocks[first].segment, blocks[second].segment], expected);
            assert_eq!(blocks.after(second), None);
        }
    }
}
