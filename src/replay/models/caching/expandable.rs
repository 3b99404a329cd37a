//! Expandable segments: an address range larger than the device for each stream and pool, backed page by page.

use super::blocks::{Block, BlockId, Blocks, Kind};
use super::conf::Reserve;
use super::{CachingAllocator, Search, rules};
use crate::driver::Call;
use crate::units::Bytes;

/// The address ranges that there are.
#[derive(Clone, Debug, Default)]
pub(super) struct Expandable {
    ranges: Vec<Range>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    len: u64,
    page: u64,
}

/// Bytes of the device: nobody says how many, and a process may have fewer for itself. An H200's, 141 GiB.
const USUAL_DEVICE: u64 = 141 << 30;

impl CachingAllocator {
    /// A free block of at least the bytes asked for, mapped as far as needed.
    pub(super) fn obtain_expandable(&mut self, search: Search) -> Option<BlockId> {
        let mut candidate = match self.chain(search) {
            Some(found) => found,
            None => self.new_range(search)?,
        };
        if !self.blocks[candidate].is_mapped {
            let len = self.blocks[candidate].len.min(search.len);
            self.map_block(candidate, len)?;
        }
        while self.blocks[candidate].len < search.len {
            let missing = search.len - self.blocks[candidate].len;
            let next =
                self.blocks[candidate].next.expect("the chain is long enough, and it ends in what is not mapped");
            let len = self.blocks[next].len.min(missing);
            self.map_block(next, len)?;
            candidate = next;
        }
        self.blocks.remove(candidate);
        Some(candidate)
    }

    /// The first chain of free and unmapped neighbours that is long enough.
    fn chain(&self, search: Search) -> Option<BlockId> {
        let unmapped = &self.blocks.pool(search.kind).unmapped;
        let from = unmapped.range((search.stream, 0, BlockId::FIRST)..);
        let of_stream = from.take_while(|(stream, ..)| *stream == search.stream);
        let starts = of_stream.map(|(_, _, id)| {
            let before = self.blocks[*id].prev.filter(|before| self.blocks.is_free(*before));
            before.unwrap_or(*id)
        });
        starts.into_iter().find(|start| is_long_enough(&self.blocks, *start, search.len))
    }

    fn new_range(&mut self, search: Search) -> Option<BlockId> {
        let page = match search.kind {
            Kind::Small => rules::SMALL_BUFFER,
            Kind::Large => self.conf.large_segment,
        };
        let device = self.capacity.map_or(USUAL_DEVICE, Bytes::get);
        let most = device.saturating_add(device / 8);
        let wanted = match self.conf.reserve {
            Reserve::Usual => most,
            Reserve::Share(share) => (device as f64 * share) as u64,
            Reserve::Bytes(bytes) => bytes,
        };
        let mut len = wanted.min(most).checked_next_multiple_of(page)?;
        if len < search.len {
            // No range is long enough for the request, and it is refused; but for a device of any size there is one.
            if self.capacity.is_some() || self.conf.reserve != Reserve::Usual {
                return None;
            }
            len = search.len.checked_next_multiple_of(page)?;
        }
        let number = self.expandable.ranges.len() as u32;
        let id = self.new_segment(search, len, false, Some(number))?;
        self.calls.note(Call::Reserve, Bytes::new(page), 1);
        self.expandable.ranges.push(Range { start: self.blocks[id].address, len, page });
        self.blocks.insert_unmapped(id);
        Some(id)
    }

    /// Maps the first `len` bytes of an unmapped block, in whole pages, and merges it with its free neighbours. Nothing has happened where there are not enough pages.
    fn map_block(&mut self, id: BlockId, len: u64) -> Option<()> {
        let block = self.blocks[id];
        let range = self.range(&block);
        let len = len.next_multiple_of(range.page);
        let pages = len / range.page;
        let page = Bytes::new(range.page);
        if !self.has_room(len) {
            // Pages are made one by one until one cannot be, and then all are given back.
            let room = self.capacity.map_or(0, |capacity| capacity.saturating_sub(self.reserved.now).get());
            let made = room / range.page;
            self.calls.note(Call::Create, page, made + 1);
            self.calls.note(Call::Release, page, made);
            return None;
        }
        self.calls.note(Call::Create, page, pages);
        self.calls.note(Call::Map, page, pages);
        self.calls.note_run(Call::SetAccess, page, pages);
        self.reserved.grow(Bytes::new(len));
        self.blocks.remove(id);
        if len < block.len {
            let rest = self.blocks.add(Block { address: block.address + len, len: block.len - len, ..block });
            self.blocks.splice(rest, Some(id), block.next);
            self.blocks.insert_unmapped(rest);
            self.blocks[id].len = len;
        }
        self.blocks[id].is_mapped = true;
        self.merge_with_neighbours(id);
        self.blocks.insert(id);
        Some(())
    }

    /// Unmaps the whole pages of a free block. What of it lies in a page beside stays free.
    pub(super) fn unmap_block(&mut self, id: BlockId) {
        let block = self.blocks[id];
        let range = self.range(&block);
        let start = range.start + (block.address - range.start).next_multiple_of(range.page);
        let end = range.start + (block.address + block.len - range.start) / range.page * range.page;
        if start >= end {
            return;
        }
        self.blocks.remove(id);
        let (before, after) = (start - block.address, block.address + block.len - end);
        if before > 0 {
            let front = self.blocks.add(Block { len: before, ..block });
            self.blocks.splice(front, block.prev, Some(id));
            self.blocks.insert(front);
        }
        if after > 0 {
            let back = self.blocks.add(Block { address: end, len: after, ..block });
            self.blocks.splice(back, Some(id), block.next);
            self.blocks.insert(back);
        }
        let pages = (end - start) / range.page;
        self.calls.note(Call::Unmap, Bytes::new(range.page), pages);
        self.calls.note(Call::Release, Bytes::new(range.page), pages);
        self.reserved.shrink(Bytes::new(end - start));
        let block = &mut self.blocks[id];
        (block.address, block.len, block.is_mapped) = (start, end - start, false);
        self.merge_with_neighbours(id);
        if self.blocks[id].is_split() {
            self.blocks.insert_unmapped(id);
        } else {
            // Nothing of the range is in use.
            debug_assert_eq!(self.blocks[id].len, range.len);
            self.calls.note(Call::Unreserve, Bytes::new(range.page), 1);
            self.blocks.drop(id);
        }
    }

    fn merge_with_neighbours(&mut self, id: BlockId) {
        let prev = self.blocks[id].prev;
        self.blocks.merge(id, prev);
        let next = self.blocks[id].next;
        self.blocks.merge(id, next);
    }

    fn range(&self, block: &Block) -> Range {
        let number = block.expandable.expect("only blocks of expandable segments are mapped and unmapped");
        self.expandable.ranges[number as usize]
    }
}

/// Free and unmapped neighbours from `start` on, together.
fn is_long_enough(blocks: &Blocks, start: BlockId, len: u64) -> bool {
    let (mut at, mut found) = (Some(start), 0);
    while let Some(id) = at.filter(|id| found < len && blocks.is_free(*id)) {
        found += blocks[id].len;
        at = blocks[id].next;
    }
    found >= len
}
