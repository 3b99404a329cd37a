//! GMLake as published (ASPLOS 2024): physical blocks of 2 MiB chunks (pBlocks), and stitched blocks (sBlocks) that show those of several at one address.
//!
//! The allocation strategy is section 4.1's S1 to S5 over section 3.3's BestFit, Split, Stitch and StitchFree. Paper and published code are two allocators ([`GmlakeRules`]); what
//! both leave open stands here as:
//!
//! * *The pattern tape.* By the paper S2's extra stitch of the two halves is made, as Figure 9 shows it, so that the whole is an exact match later.
//! * *StitchFree.* Above its limit the least recently used idle sBlocks go. The default is the published code's, 1000 GB of addresses
//!   ([`GmlakeOptions::stitched_max`]); [`GmlakeOptions::stitches_max`] is this model's own, and is not reached before it unless somebody sets one of them.
//! * *Below 2 MiB* the caching allocator serves, section 3.1.
//! * Set-access is called chunk by chunk, as in the published code.

mod blocks;

use crate::driver::Call;
use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::replay::allocator::{Allocator, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::models::caching::{CachingAllocator, Conf, Version};
use crate::replay::script::Asked;
use crate::units::{Bytes, DeviceAddress, Place as _};
use blocks::{Blocks, Member, PBlockId};

/// Whose rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GmlakeRules {
    /// The paper's (sections 3.3 and 4). The fragmentation limit is about blocks: a smaller one is neither stitched nor split, so it
    /// serves exact matches only; the paper's example is 128 MB. S2 stitches the halves, and S4 takes what is idle and creates what it lacks.
    Paper,
    /// The published code's (its options `fragLimit`, 512 MB, and `autoGC`). The limit is about requests: one below it is never stitched. Blocks of any size are split where they are,
    /// without a call, and free neighbours become one again as in the caching allocator; S4 creates all that is asked for. Not modelled: the use of a stitched block for
    /// requests of down to a tenth of it.
    #[default]
    Code,
}

/// GMLake's knobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GmlakeOptions {
    /// The fragmentation limit.
    pub frag_limit: Bytes,
    /// Whose rules.
    pub rules: GmlakeRules,
    /// So many sBlocks are kept.
    pub stitches_max: usize,
    /// So many bytes of addresses do sBlocks keep, all together.
    pub stitched_max: Bytes,
}

impl Default for GmlakeOptions {
    fn default() -> GmlakeOptions {
        let rules = GmlakeRules::default();
        GmlakeOptions { frag_limit: Bytes::mib(512), rules, stitches_max: 10_000, stitched_max: Bytes::gib(1000) }
    }
}

/// How often each state of the strategy was met.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GmlakeStates {
    /// S1: a block of exactly this size.
    pub exact: u64,
    /// S2: one larger pBlock.
    pub single: u64,
    /// S3: several pBlocks.
    pub multiple: u64,
    /// S4: not enough, so new memory.
    pub insufficient: u64,
    /// S5: no new memory either.
    pub out_of_memory: u64,
    /// sBlocks that StitchFree took.
    pub stitches_freed: u64,
}

/// GMLake's allocator of one device in one process.
#[derive(Clone, Debug)]
pub struct Gmlake {
    options: GmlakeOptions,
    capacity: Bytes,
    calls: Calls,
    /// Bytes of the pBlocks.
    physical: Reserved,
    /// Of pBlocks and the caching allocator together.
    total: Reserved,
    small: CachingAllocator,
    blocks: Blocks,
    held: Vec<Option<Held>>,
    states: GmlakeStates,
    next_address: u64,
}

#[derive(Clone, Copy, Debug)]
enum Held {
    Small,
    Block(Member),
}

/// Chunks are of this size.
pub const CHUNK: Bytes = Bytes::mib(2);

impl Gmlake {
    /// One with these knobs on a device that has `capacity` bytes for it, or any number.
    pub fn new(options: GmlakeOptions, capacity: Option<Bytes>, costs: &CostTable) -> Gmlake {
        let capacity = capacity.unwrap_or(Bytes::LARGEST);
        // The published code is a patch of PyTorch 2.0.
        let small = CachingAllocator::new(Conf::of(Version(2, 0)), Some(capacity), costs);
        Gmlake {
            options,
            capacity,
            calls: Calls::new(costs),
            physical: Reserved::default(),
            total: Reserved::default(),
            small,
            blocks: Blocks::new(options.rules == GmlakeRules::Code),
            held: Vec::new(),
            states: GmlakeStates::default(),
            next_address: FIRST_ADDRESS,
        }
    }

    /// How often each state was met.
    pub fn states(&self) -> GmlakeStates {
        self.states
    }

    /// Sizes of all pBlocks, and of all sBlocks with how many pBlocks each shows: in the order in which they were made.
    pub fn census(&self) -> (Vec<Bytes>, Vec<(Bytes, usize)>) {
        self.blocks.census()
    }

    fn serve(&mut self, asked: &Asked) -> Result<Member, OutOfMemory> {
        let len = asked.bytes.round_up(CHUNK).ok_or(OutOfMemory)?;
        let stream = asked.stream;
        if let Some(found) = self.blocks.exact(stream, len) {
            self.states.exact += 1;
            return Ok(found);
        }
        if let Some(larger) = self.blocks.best_fit(stream, len, self.block_len_min()) {
            self.states.single += 1;
            return Ok(Member::P(self.split(stream, larger, len)));
        }
        self.several(stream, len)
    }

    /// Smaller blocks serve exact matches only.
    fn block_len_min(&self) -> Bytes {
        match self.options.rules {
            GmlakeRules::Paper => self.options.frag_limit,
            GmlakeRules::Code => Bytes::ZERO,
        }
    }

    /// S3 and S4: the largest idle pBlocks together, and new memory for what they lack.
    fn several(&mut self, stream: StreamId, len: Bytes) -> Result<Member, OutOfMemory> {
        let mut parts = Vec::new();
        let mut found = Bytes::ZERO;
        let is_code = self.options.rules == GmlakeRules::Code;
        if !is_code || len >= self.options.frag_limit {
            for id in self.blocks.largest_first(stream, self.block_len_min()) {
                if found >= len {
                    break;
                }
                found += self.blocks.len_of(id);
                parts.push(id);
            }
        }
        if is_code && found < len {
            (parts, found) = (Vec::new(), Bytes::ZERO);
        }
        if found >= len {
            self.states.multiple += 1;
            let last = parts.pop().expect("several blocks were found");
            let before = found - self.blocks.len_of(last);
            if found > len && self.blocks.len_of(last) >= self.block_len_min() {
                parts.push(self.split(stream, last, len - before));
            } else {
                parts.push(last);
            }
        } else {
            let new = self.create(stream, len - found).inspect_err(|_| self.states.out_of_memory += 1)?;
            self.states.insufficient += 1;
            if parts.is_empty() {
                return Ok(Member::P(new));
            }
            parts.push(new);
        }
        Ok(self.stitch(stream, &parts))
    }

    /// Alloc: a pBlock of new chunks.
    fn create(&mut self, stream: StreamId, len: Bytes) -> Result<PBlockId, OutOfMemory> {
        if !self.total.has_room(len, Some(self.capacity)) {
            return Err(OutOfMemory);
        }
        let address = self.address(len);
        self.show(len);
        self.calls.note(Call::Create, CHUNK, chunks(len));
        self.physical.grow(len);
        self.total.grow(len);
        self.small.set_capacity(Some(self.capacity.saturating_sub(self.physical.now)));
        Ok(self.blocks.add_p(stream, len, address))
    }

    /// Split: two pBlocks where one was, of which the first has `len` bytes. By the paper both have addresses of their own, and are stitched: the tape, by which what was one block is one size
    /// again when both are free.
    fn split(&mut self, stream: StreamId, id: PBlockId, len: Bytes) -> PBlockId {
        let whole = self.blocks.len_of(id);
        if self.options.rules == GmlakeRules::Code {
            let start = self.blocks.address_of(id);
            let rest = start.checked_add(len).expect("the block is longer than that");
            return self.blocks.split(id, len, (start, rest)).0;
        }
        let addresses = (self.address(len), self.address(whole - len));
        self.show(len);
        self.show(whole - len);
        self.hide(whole);
        let (front, rest) = self.blocks.split(id, len, addresses);
        self.stitch(stream, &[front, rest]);
        front
    }

    /// Stitch: an sBlock over these pBlocks.
    fn stitch(&mut self, stream: StreamId, parts: &[PBlockId]) -> Member {
        let len = parts.iter().map(|id| self.blocks.len_of(*id)).sum();
        let address = self.address(len);
        self.show(len);
        let made = self.blocks.add_s(stream, parts, address);
        let GmlakeOptions { stitches_max, stitched_max, .. } = self.options;
        while self.blocks.stitches() > stitches_max || self.blocks.stitched() > stitched_max.get().into() {
            let Some(freed) = self.blocks.free_least_recent(made) else { break };
            self.hide(freed);
            self.states.stitches_freed += 1;
        }
        Member::S(made)
    }

    fn address(&mut self, len: Bytes) -> DeviceAddress {
        let address = DeviceAddress::new(self.next_address);
        self.next_address = self.next_address.saturating_add(len.get());
        address
    }

    /// Addresses are reserved, and chunks mapped there one by one.
    fn show(&mut self, len: Bytes) {
        self.calls.note(Call::Reserve, CHUNK, 1);
        self.calls.note(Call::Map, CHUNK, chunks(len));
        self.calls.note(Call::SetAccess, CHUNK, chunks(len));
    }

    fn hide(&mut self, len: Bytes) {
        self.calls.note(Call::Unmap, CHUNK, chunks(len));
        self.calls.note(Call::Unreserve, CHUNK, 1);
    }

    fn serve_small(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let before = self.small.reserved().now;
        let served = self.small.alloc(asked);
        let after = self.small.reserved().now;
        self.total.shrink(before);
        self.total.grow(after);
        served
    }
}

/// Addresses begin here, above those of the caching allocator.
const FIRST_ADDRESS: u64 = 0x7800_0000_0000;

fn chunks(len: Bytes) -> u64 {
    len.get() / CHUNK.get()
}

impl Allocator for Gmlake {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, None);
        }
        if asked.bytes < CHUNK {
            let address = self.serve_small(asked)?;
            self.held[slot] = Some(Held::Small);
            return Ok(address);
        }
        let block = self.serve(asked)?;
        self.held[slot] = Some(Held::Block(block));
        Ok(self.blocks.take(block))
    }

    fn free(&mut self, slot: u32) {
        if let Some(Some(Held::Small)) = self.held.get(slot as usize) {
            self.small.free(slot);
        }
    }

    fn completed(&mut self, slot: u32) {
        match self.held.get_mut(slot as usize).and_then(Option::take) {
            Some(Held::Small) => self.small.completed(slot),
            Some(Held::Block(block)) => self.blocks.give_back(block),
            None => {}
        }
    }

    fn record_stream(&mut self, slot: u32, stream: StreamId) {
        match self.held.get(slot as usize) {
            Some(Some(Held::Small)) => self.small.record_stream(slot, stream),
            Some(Some(Held::Block(_))) => self.calls.note(Call::Event, Bytes::ZERO, 1),
            _ => {}
        }
    }

    fn reserved(&self) -> Reserved {
        self.total
    }

    fn calls(&self) -> CallSum {
        self.calls.sum().plus(&self.small.calls())
    }
}

#[cfg(test)]
mod tests;
