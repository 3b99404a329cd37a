//! PyTorch's CUDACachingAllocator, rule by rule: with plain segments, and with expandable ones.
//!
//! Source: the rules of c10's allocator from 2.5 to 2.15 (the same in all of them, but for what [`Conf::version`] switches).
//! Held against PyTorch's own allocator by golden figures: it reserves the same bytes and gives up at the same request.
//!
//! Not modelled: private pools of CUDA graphs and MemPools, callbacks that free memory, races of several threads.

mod blocks;
pub mod conf;
mod expandable;
pub mod rules;

use std::collections::{BTreeSet, VecDeque};

pub use self::conf::{Conf, ConfError, Version};
use crate::driver::Call;
use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::replay::allocator::{Allocator, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::script::Asked;
use crate::units::{Bytes, DeviceAddress};
use blocks::{Block, BlockId, Blocks, Kind};
use expandable::Expandable;

/// The caching allocator of one device in one process.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    conf: Conf,
    /// Bytes that the device has for this process.
    capacity: Option<Bytes>,
    calls: Calls,
    reserved: Reserved,
    blocks: Blocks,
    /// By slot of the script.
    held: Vec<Option<Held>>,
    /// Given back and not completed, oldest first; those that were completed since are skipped.
    pending: VecDeque<(u32, BlockId)>,
    /// Sets of streams that used an allocation beside its own: few allocations have one. Those that nobody has are used again.
    uses: Vec<BTreeSet<u64>>,
    idle_uses: Vec<u32>,
    expandable: Expandable,
    segments: u64,
    next_address: u64,
}

/// What a slot holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    block: BlockId,
    /// Streams that used it beside its own, in [`CachingAllocator::uses`].
    uses: Option<u32>,
    /// The job has given it back.
    is_freed: bool,
}

/// What a search is for.
#[derive(Clone, Copy, Debug)]
struct Search {
    kind: Kind,
    stream: u64,
    /// As asked for, rounded.
    len: u64,
    /// Of a new segment.
    segment_len: u64,
}

/// Segments begin here: far from zero, and each beyond the one before it.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

impl CachingAllocator {
    /// One with these options on a device that has `capacity` bytes for it, or any number.
    pub fn new(conf: Conf, capacity: Option<Bytes>, costs: &CostTable) -> CachingAllocator {
        CachingAllocator {
            blocks: Blocks::new(conf.version >= Version(2, 13)),
            conf,
            capacity,
            calls: Calls::new(costs),
            reserved: Reserved::default(),
            held: Vec::new(),
            pending: VecDeque::new(),
            uses: Vec::new(),
            idle_uses: Vec::new(),
            expandable: Expandable::default(),
            segments: 0,
            next_address: FIRST_ADDRESS,
        }
    }

    /// Changes how many bytes the device has for it: somebody else took or gave back the difference.
    pub(in crate::replay) fn set_capacity(&mut self, capacity: Option<Bytes>) {
        self.capacity = capacity;
    }

    fn search(&self, asked: &Asked) -> Search {
        let len = rules::round(&self.conf, asked.bytes.get());
        let kind = if len <= rules::SMALL { Kind::Small } else { Kind::Large };
        Search { kind, stream: asked.stream.0, len, segment_len: rules::segment(&self.conf, len) }
    }

    /// The share of the device that it may reserve. From 2.10 a share of one is no limit.
    fn limit(&self) -> Option<u64> {
        let fraction = self.conf.memory_fraction.filter(|share| *share < 1.0)?;
        Some((self.capacity?.get() as f64 * fraction) as u64)
    }

    fn is_over_limit(&self, len: u64) -> bool {
        self.limit().is_some_and(|limit| self.reserved.now.get() + len > limit)
    }

    /// Whether the device has `len` bytes more.
    fn has_room(&self, len: u64) -> bool {
        self.reserved.has_room(Bytes::new(len), self.capacity)
    }

    /// A free block of the pool: the best fit, unless it is too large for its own good.
    fn find(&mut self, search: Search) -> Option<BlockId> {
        if self.conf.garbage_collection_threshold > 0.0 && self.limit().is_some() {
            self.blocks.pool_mut(search.kind).searches += 1;
        }
        let mut found = self.blocks.first_fit(search.kind, search.stream, search.len)?;
        if self.blocks[found].expandable.is_some() {
            // The block that can grow least is taken: room to grow is kept for those who need it.
            while let Some(next) = self.blocks.after(found)
                && self.reach(next) < self.reach(found)
            {
                found = next;
            }
        }
        let len = self.blocks[found].len;
        let is_oversize = len >= self.conf.max_split;
        if search.len < self.conf.max_split && is_oversize {
            return None;
        }
        if search.len >= self.conf.max_split && len >= search.len.saturating_add(self.conf.max_non_split_rounding) {
            return None;
        }
        self.blocks.remove(found);
        Some(found)
    }

    /// How large the block could become.
    fn reach(&self, id: BlockId) -> u64 {
        let block = &self.blocks[id];
        let unmapped = block.next.map(|next| &self.blocks[next]).filter(|next| !next.is_mapped);
        block.len + unmapped.map_or(0, |next| next.len)
    }

    /// A block of new memory.
    fn obtain(&mut self, search: Search) -> Option<BlockId> {
        if self.is_over_limit(search.segment_len) {
            return None;
        }
        if self.conf.expandable_segments {
            return self.obtain_expandable(search);
        }
        if !self.has_room(search.segment_len) {
            return None;
        }
        let len = search.segment_len;
        let segment = self.new_segment(search, len, true, None)?;
        self.calls.malloc(Bytes::new(len));
        self.reserved.grow(Bytes::new(len));
        Some(segment)
    }

    /// Nothing where there are no more addresses.
    fn new_segment(&mut self, search: Search, len: u64, is_mapped: bool, expandable: Option<u32>) -> Option<BlockId> {
        let address = self.next_address;
        self.next_address = address.checked_add(len)?;
        self.segments += 1;
        Some(self.blocks.add(Block {
            address,
            len,
            stream: search.stream,
            kind: search.kind,
            is_allocated: false,
            is_pending: false,
            is_mapped,
            expandable,
            segment: self.segments,
            prev: None,
            next: None,
            freed_at: 0,
        }))
    }

    /// What is tried when nothing cached fits, in PyTorch's order.
    fn miss(&mut self, search: Search) -> Option<BlockId> {
        self.collect_garbage();
        if self.conf.throws_on_oom && (self.is_over_limit(search.segment_len) || !self.has_room(search.segment_len)) {
            return None;
        }
        if let Some(block) = self.obtain(search) {
            return Some(block);
        }
        if self.release_oversize(search)
            && let Some(block) = self.obtain(search)
        {
            return Some(block);
        }
        // The pool is not searched again, though what this completes might fit.
        self.release_cached();
        self.obtain(search)
    }

    /// Gives cached blocks back by their age, if much is reserved.
    fn collect_garbage(&mut self) {
        let Some(limit) = self.limit().filter(|_| self.conf.garbage_collection_threshold > 0.0) else { return };
        let threshold = (self.conf.garbage_collection_threshold * limit as f64) as u64;
        let Some(target) = self.reserved.now.get().checked_sub(threshold).filter(|target| *target > 0) else { return };
        let searches = self.blocks.pool(Kind::Large).searches;
        let candidates = |blocks: &Blocks| -> Vec<(BlockId, u64)> {
            let free = blocks.pool(Kind::Large).free();
            let whole = free.filter(|id| !blocks[*id].is_split());
            whole.map(|id| (id, searches - blocks[id].freed_at)).collect()
        };
        let listed = candidates(&self.blocks);
        let (mut ages, mut count) = (listed.iter().map(|(_, age)| age).sum::<u64>() as f64, listed.len());
        let (mut given, mut gave_any) = (0, true);
        while given < target && gave_any && count > 0 {
            let least = ages / count as f64;
            gave_any = false;
            for (id, age) in candidates(&self.blocks) {
                if self.blocks[id].expandable.is_some() || (age as f64) < least {
                    continue;
                }
                gave_any = true;
                given += self.blocks[id].len;
                ages -= age as f64;
                count -= 1;
                self.release_segment(id);
            }
        }
    }

    /// Gives back one cached block that is large enough, or several of the largest that are together: only blocks that are never split.
    fn release_oversize(&mut self, search: Search) -> bool {
        let max_split = self.conf.max_split;
        if max_split == u64::MAX {
            return false;
        }
        let wanted = search.len.max(max_split);
        if let Some(block) = self.blocks.first_fit(search.kind, search.stream, wanted)
            && self.blocks[block].expandable.is_none()
        {
            self.release_segment(block);
            return true;
        }
        let below: Vec<BlockId> = self.blocks.below(search.kind, search.stream, wanted).collect();
        let mut given = 0;
        for id in below {
            let block = self.blocks[id];
            if given >= wanted || block.len < max_split {
                break;
            }
            if block.expandable.is_none() {
                self.release_segment(id);
                given += block.len;
            }
        }
        given >= wanted
    }

    /// Waits for all streams, and gives back every segment, and every page of an expandable one, of which nothing is in use.
    pub(in crate::replay) fn release_cached(&mut self) {
        for (slot, block) in std::mem::take(&mut self.pending) {
            if self.blocks[block].is_pending && self.held[slot as usize].is_some_and(|held| held.block == block) {
                self.complete(slot);
            }
        }
        for kind in [Kind::Large, Kind::Small] {
            let free: Vec<BlockId> = self.blocks.pool(kind).free().collect();
            let (expandable, plain): (Vec<_>, Vec<_>) =
                free.into_iter().partition(|id| self.blocks[*id].expandable.is_some());
            for id in plain {
                if !self.blocks[id].is_split() {
                    self.release_segment(id);
                }
            }
            for id in expandable {
                self.unmap_block(id);
            }
        }
    }

    fn release_segment(&mut self, id: BlockId) {
        self.blocks.remove(id);
        let len = Bytes::new(self.blocks[id].len);
        self.calls.free(len);
        self.reserved.shrink(len);
        self.blocks.drop(id);
    }

    /// Gives the block, or its first bytes, to a request.
    fn hand_out(&mut self, search: Search, block: BlockId) -> BlockId {
        let rest = self.blocks[block].len - search.len;
        let splits = if search.kind == Kind::Small || self.conf.expandable_segments {
            rest >= rules::MIN_BLOCK
        } else {
            search.len < self.conf.max_split && rest > rules::SMALL
        };
        let taken = if splits {
            let front = self.blocks.split_front(block, search.len);
            self.blocks.insert(block);
            front
        } else {
            block
        };
        self.blocks[taken].is_allocated = true;
        taken
    }

    /// The bytes of what was freed can be used again.
    fn complete(&mut self, slot: u32) {
        let Some(held) = self.held[slot as usize].take() else { return };
        let id = held.block;
        let block = &mut self.blocks[id];
        (block.is_allocated, block.is_pending) = (false, false);
        let (prev, next) = (block.prev, block.next);
        self.blocks.merge(id, prev);
        self.blocks.merge(id, next);
        self.blocks.insert(id);
    }

    /// Says what is wrong; nothing, unless there is a bug.
    #[cfg(test)]
    fn invariants(&self) -> Result<(), String> {
        let held = self.held.iter().flatten();
        let live: Vec<BlockId> = held.filter(|held| !held.is_freed).map(|held| held.block).collect();
        self.blocks.invariants(&live)
    }
}

impl Allocator for CachingAllocator {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let search = self.search(asked);
        let found = self.find(search).or_else(|| self.miss(search)).ok_or(OutOfMemory)?;
        let block = self.hand_out(search, found);
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, None);
        }
        self.held[slot] = Some(Held { block, uses: None, is_freed: false });
        Ok(DeviceAddress::new(self.blocks[block].address))
    }

    fn free(&mut self, slot: u32) {
        let Some(held) = self.held.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        held.is_freed = true;
        let id = held.block;
        if let Some(uses) = held.uses.take() {
            let streams = &mut self.uses[uses as usize];
            self.calls.note(Call::Event, Bytes::ZERO, streams.len() as u64);
            streams.clear();
            self.idle_uses.push(uses);
        }
        let block = &mut self.blocks[id];
        (block.is_allocated, block.is_pending) = (false, true);
        // Asked for and completed in one is the rule; only what is not has to be found again.
        self.pending.push_back((slot, id));
    }

    fn completed(&mut self, slot: u32) {
        if self.pending.back().is_some_and(|(last, _)| *last == slot) {
            self.pending.pop_back();
        } else if self.pending.front().is_some_and(|(first, _)| *first == slot) {
            self.pending.pop_front();
        }
        self.complete(slot);
    }

    fn record_stream(&mut self, slot: u32, stream: StreamId) {
        let Some(held) = self.held.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if self.blocks[held.block].stream == stream.0 {
            return;
        }
        let uses = *held.uses.get_or_insert_with(|| {
            self.idle_uses.pop().unwrap_or_else(|| {
                self.uses.push(BTreeSet::new());
                self.uses.len() as u32 - 1
            })
        });
        self.uses[uses as usize].insert(stream.0);
    }

    fn reserved(&self) -> Reserved {
        self.reserved
    }

    fn calls(&self) -> CallSum {
        self.calls.sum()
    }
}

#[cfg(test)]
mod tests;
