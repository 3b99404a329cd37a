//! GMLake as published (ASPLOS 2024): physical blocks of 2 MiB chunks (pBlocks), and stitched blocks (sBlocks) that show those of several at one address.
//!
//! The allocation strategy is section 4.1's S1 to S5 over section 3.3's BestFit, Split, Stitch and StitchFree. Paper and published code are two allocators ([`GmlakeRules`]); what
//! both leave open stands here as:
//!
//! * *The pattern tape.* By the paper S2's extra stitch of the two halves is made, as Figure 9 shows it, so that the whole is an exact match later.
//! * *StitchFree.* By the paper the least recently used idle sBlocks go above the limit; by the code all that serve no allocation do, chunks of theirs in use or not. The default is the published
//!   code's, 1000 GB of addresses ([`GmlakeOptions::stitched_max`]); [`GmlakeOptions::stitches_max`] is this model's own, and is not reached before it unless somebody sets one of them.
//! * *Small requests*, below 2 MiB by the paper (section 3.1), up to 1 MiB by the code, are the caching allocator's.
//! * Set-access is called chunk by chunk, as in the published code; unmap by the code once for what was reserved at once.
//! * *Events.* By the code each free records one on the stream of the allocation, or instead one on each other stream that used it; by the paper the latter alone. Making events and asking for
//!   them, which the code does for every block object, is not counted.
//!
//! Not modelled of the code: its options `reAlloc`, `defragLevel` and `reuseLimit` (off, 0 and 10, as it has them) and those of PyTorch's allocator; CUDA graphs' pools; running out of addresses; streams
//! that lag behind, which keep an sBlock from being dropped, and what frees are late for. Where the code goes on with what is gone — it gives chunks back that an sBlock in use shows and does not use, and
//! reads them when that is freed; it drops several sBlocks of one chunk from the list it walks — the model does what was meant.

mod blocks;

use std::collections::HashMap;

use crate::driver::Call;
use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::replay::allocator::{Allocator, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::models::caching::{CachingAllocator, Conf, Version, rules};
use crate::replay::script::Asked;
use crate::units::{Bytes, DeviceAddress};
use blocks::{Blocks, Member, PBlockId, Released};

/// Whose rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GmlakeRules {
    /// The paper's (sections 3.3 and 4). The fragmentation limit is about blocks: a smaller one is neither stitched nor split, so it
    /// serves exact matches only; the paper's example is 128 MB. S2 stitches the halves, and S4 takes what is idle and creates what it lacks.
    Paper,
    /// The published code's (its options `fragLimit`, 512 MB, and `autoGC`). The limit is about requests: one below it is never stitched. The smallest pBlock that is large enough serves, split where it is,
    /// without a call, and free neighbours become one again as in the caching allocator, stitched or not. Only where there is none does the smallest sBlock of up to ten times the request, with its first bytes.
    /// S4 creates all that is asked for, and at least 20 MiB for less than 10; where there is no memory for it, idle blocks that are as they were created are given back first.
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
    /// S2: one larger pBlock, or by the code's rules sBlock.
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
    physical: Bytes,
    /// Of pBlocks and the caching allocator together.
    total: Reserved,
    small: CachingAllocator,
    blocks: Blocks,
    held: Vec<Option<Held>>,
    /// Streams that used an allocation beside its own, by slot: few have one.
    uses: HashMap<u32, Vec<StreamId>>,
    states: GmlakeStates,
    /// Bytes of sBlocks as the published code has them in its books: what goes with the memory that it shows stays there.
    stitched_noted: u128,
    next_address: u64,
}

#[derive(Clone, Copy, Debug)]
enum Held {
    Small,
    Block {
        block: Member,
        stream: StreamId,
        /// The job has given it back.
        is_freed: bool,
    },
}

/// Chunks are of this size.
pub const CHUNK: Bytes = Bytes::mib(2);

/// By the code's rules an sBlock serves a request of down to one part of so many.
const REUSE_LIMIT: u64 = 10;

impl Gmlake {
    /// One with these knobs on a device that has `capacity` bytes for it, or any number.
    pub fn new(options: GmlakeOptions, capacity: Option<Bytes>, costs: &CostTable) -> Gmlake {
        let capacity = capacity.unwrap_or(Bytes::LARGEST);
        let is_code = options.rules == GmlakeRules::Code;
        // The published code is a patch of PyTorch 2.0. There both pools give back what they can before a request of either fails: the small one must not do so alone.
        let conf = Conf { throws_on_oom: is_code, ..Conf::of(Version(2, 0)) };
        Gmlake {
            options,
            capacity,
            calls: Calls::new(costs),
            physical: Bytes::ZERO,
            total: Reserved::default(),
            small: CachingAllocator::new(conf, Some(capacity), costs),
            blocks: Blocks::new(is_code),
            held: Vec::new(),
            uses: HashMap::new(),
            states: GmlakeStates::default(),
            stitched_noted: 0,
            next_address: FIRST_ADDRESS,
        }
    }

    /// How often each state was met.
    pub fn states(&self) -> GmlakeStates {
        self.states
    }

    /// Sizes of all pBlocks, and of all sBlocks with how many pBlocks each shows: in the order of their addresses.
    pub fn census(&self) -> (Vec<Bytes>, Vec<(Bytes, usize)>) {
        self.blocks.census()
    }

    fn is_code(&self) -> bool {
        self.options.rules == GmlakeRules::Code
    }

    fn serve_by_the_paper(&mut self, stream: StreamId, len: Bytes) -> Result<Member, OutOfMemory> {
        let exact = self.blocks.smallest_p(stream, len).filter(|id| self.blocks.len_of(*id) == len);
        if let Some(found) = exact.map(Member::P).or_else(|| self.blocks.smallest_s(stream, len, len).map(Member::S)) {
            self.states.exact += 1;
            return Ok(found);
        }
        // Smaller blocks serve exact matches only.
        let min = self.options.frag_limit;
        if let Some(larger) = self.blocks.smallest_p(stream, min.max(len)) {
            self.states.single += 1;
            return Ok(Member::P(self.split(stream, larger, len)));
        }
        self.several(stream, len)
    }

    /// S3 and S4 of the paper: the largest idle pBlocks together, and new memory for what they lack.
    fn several(&mut self, stream: StreamId, len: Bytes) -> Result<Member, OutOfMemory> {
        let (mut parts, found) = self.largest(stream, len, self.options.frag_limit);
        if found >= len {
            self.states.multiple += 1;
            if found > len {
                let last = parts.pop().expect("several blocks were found");
                let kept = self.blocks.len_of(last) - (found - len);
                parts.push(self.split(stream, last, kept));
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

    /// The largest idle pBlocks of at least `min`, as many as it takes or all of them, and how many bytes they have.
    fn largest(&self, stream: StreamId, len: Bytes, min: Bytes) -> (Vec<PBlockId>, Bytes) {
        let (mut parts, mut found) = (Vec::new(), Bytes::ZERO);
        for id in self.blocks.largest_first(stream, min) {
            if found >= len {
                break;
            }
            found += self.blocks.len_of(id);
            parts.push(id);
        }
        (parts, found)
    }

    fn serve_by_the_code(&mut self, stream: StreamId, len: Bytes) -> Result<Member, OutOfMemory> {
        if let Some(found) = self.blocks.smallest_p(stream, len) {
            self.note_found(self.blocks.len_of(found) == len);
            return Ok(Member::P(self.front(found, len)));
        }
        let most = len.checked_mul(REUSE_LIMIT).unwrap_or(Bytes::MAX);
        if let Some(found) = self.blocks.smallest_s(stream, len, most) {
            self.note_found(self.blocks.stitched_len_of(found) == len);
            return Ok(Member::S(found));
        }
        if let Some(stitched) = self.stitch_idle(stream, len) {
            return Ok(stitched);
        }
        if let Some(new) = self.create_by_the_code(stream, len) {
            return Ok(new);
        }
        self.release();
        // What that completed is not searched for one block again.
        let served = self.create_by_the_code(stream, len).or_else(|| self.stitch_idle(stream, len));
        served.ok_or(OutOfMemory).inspect_err(|_| self.states.out_of_memory += 1)
    }

    fn note_found(&mut self, is_exact: bool) {
        if is_exact {
            self.states.exact += 1;
        } else {
            self.states.single += 1;
        }
    }

    /// S3 of the code: not for one block alone, nor for a request below the limit.
    fn stitch_idle(&mut self, stream: StreamId, len: Bytes) -> Option<Member> {
        if len < self.options.frag_limit || self.blocks.largest_first(stream, Bytes::ZERO).nth(1).is_none() {
            return None;
        }
        let (mut parts, found) = self.largest(stream, len, Bytes::ZERO);
        if found < len {
            return None;
        }
        let last = parts.pop()?;
        parts.push(self.front(last, self.blocks.len_of(last) - (found - len)));
        self.states.multiple += 1;
        Some(self.stitch(stream, &parts))
    }

    /// S4 of the code: the rest of what is created beyond the request is idle.
    fn create_by_the_code(&mut self, stream: StreamId, len: Bytes) -> Option<Member> {
        let whole = if len.get() < rules::MIN_LARGE_ALLOC { Bytes::new(rules::LARGE_BUFFER) } else { len };
        match self.create(stream, whole) {
            Ok(new) => {
                self.states.insufficient += 1;
                Some(Member::P(self.front(new, len)))
            }
            Err(OutOfMemory) => {
                // It finds out by creating chunks until one fails, and gives those back.
                let room = chunks(self.capacity.saturating_sub(self.total.now));
                self.calls.note(Call::Create, CHUNK, room);
                self.calls.note(Call::Release, CHUNK, room);
                None
            }
        }
    }

    /// The first bytes of an idle pBlock, which is split where it is.
    fn front(&mut self, id: PBlockId, len: Bytes) -> PBlockId {
        if self.blocks.len_of(id) > len { self.blocks.split_in_place(id, len).0 } else { id }
    }

    /// Waits for all streams, and gives back what is idle and as it was created, of every stream and of both pools.
    fn release(&mut self) {
        for held in &mut self.held {
            if let Some(Held::Block { block, is_freed: true, .. }) = *held {
                *held = None;
                let dropped = self.blocks.give_back(block);
                hide_all(&mut self.calls, dropped);
            }
        }
        let Released { p, s } = self.blocks.release();
        for len in &p {
            self.calls.note(Call::Release, CHUNK, chunks(*len));
            self.physical -= *len;
        }
        hide_all(&mut self.calls, p.into_iter().chain(s));
        self.small.release_cached();
        self.settle();
    }

    /// Alloc: a pBlock of new chunks.
    fn create(&mut self, stream: StreamId, len: Bytes) -> Result<PBlockId, OutOfMemory> {
        let has_addresses = self.next_address.checked_add(len.get() + CHUNK.get()).is_some();
        if !has_addresses || !self.total.has_room(len, Some(self.capacity)) {
            return Err(OutOfMemory);
        }
        let address = self.address(len);
        self.show(len);
        self.calls.note(Call::Create, CHUNK, chunks(len));
        self.physical += len;
        self.settle();
        Ok(self.blocks.add_p(stream, len, address))
    }

    /// Split of the paper: two pBlocks where one was, of which the first has `len` bytes. Both have addresses of their own, and are stitched: the tape, by which what was one block is one size
    /// again when both are free.
    fn split(&mut self, stream: StreamId, id: PBlockId, len: Bytes) -> PBlockId {
        let whole = self.blocks.len_of(id);
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
        if self.is_code() {
            self.stitched_noted += u128::from(len.get());
            if self.blocks.stitches() > stitches_max || self.stitched_noted > stitched_max.get().into() {
                let freed = self.blocks.free_unused(made);
                self.states.stitches_freed += freed.len() as u64;
                self.stitched_noted -= freed.iter().map(|len| u128::from(len.get())).sum::<u128>();
                hide_all(&mut self.calls, freed);
            }
            return Member::S(made);
        }
        while self.blocks.stitches() > stitches_max || self.blocks.stitched() > stitched_max.get().into() {
            let Some(freed) = self.blocks.free_least_recent(made) else { break };
            self.hide(freed);
            self.states.stitches_freed += 1;
        }
        Member::S(made)
    }

    /// Addresses that nobody has, with a gap before the next.
    fn address(&mut self, len: Bytes) -> DeviceAddress {
        let address = DeviceAddress::new(self.next_address);
        self.next_address = self.next_address.saturating_add(len.get() + CHUNK.get());
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

    /// Both pools have what the device has: neither can have what the other took.
    fn settle(&mut self) {
        self.small.set_capacity(Some(self.capacity.saturating_sub(self.physical)));
        let now = self.physical + self.small.reserved().now;
        self.total = Reserved { now, peak: self.total.peak.max(now) };
    }

    fn serve_small(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let mut served = self.small.alloc(asked);
        if served.is_err() && self.is_code() {
            self.release();
            served = self.small.alloc(asked);
        }
        self.settle();
        served
    }
}

/// Addresses begin here, above those of the caching allocator.
const FIRST_ADDRESS: u64 = 0x7800_0000_0000;

fn chunks(len: Bytes) -> u64 {
    len.get() / CHUNK.get()
}

/// As the code unmaps: what was reserved at once by one call.
fn hide_all(calls: &mut Calls, lens: impl IntoIterator<Item = Bytes>) {
    for len in lens {
        calls.note_run(Call::Unmap, CHUNK, chunks(len));
        calls.note(Call::Unreserve, CHUNK, 1);
    }
}

impl Allocator for Gmlake {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, None);
        }
        let is_small = if self.is_code() { asked.bytes.get() <= rules::SMALL } else { asked.bytes < CHUNK };
        if is_small {
            let address = self.serve_small(asked)?;
            self.held[slot] = Some(Held::Small);
            return Ok(address);
        }
        let stream = asked.stream;
        let len = asked.bytes.round_up(CHUNK).ok_or(OutOfMemory)?;
        let block = match self.options.rules {
            GmlakeRules::Paper => self.serve_by_the_paper(stream, len)?,
            GmlakeRules::Code => self.serve_by_the_code(stream, len)?,
        };
        self.held[slot] = Some(Held::Block { block, stream, is_freed: false });
        Ok(self.blocks.take(block, len))
    }

    fn free(&mut self, slot: u32) {
        let by_default = u64::from(self.is_code());
        let events = match self.held.get_mut(slot as usize) {
            Some(Some(Held::Small)) => {
                let before = self.small.calls().of(Call::Event);
                self.small.free(slot);
                if self.small.calls().of(Call::Event) == before { by_default } else { 0 }
            }
            Some(Some(Held::Block { is_freed, .. })) => {
                *is_freed = true;
                self.uses.remove(&slot).map_or(by_default, |streams| streams.len() as u64)
            }
            _ => 0,
        };
        self.calls.note(Call::Event, Bytes::ZERO, events);
    }

    fn completed(&mut self, slot: u32) {
        match self.held.get_mut(slot as usize).and_then(Option::take) {
            Some(Held::Small) => self.small.completed(slot),
            Some(Held::Block { block, .. }) => {
                let dropped = self.blocks.give_back(block);
                hide_all(&mut self.calls, dropped);
            }
            None => {}
        }
    }

    fn record_stream(&mut self, slot: u32, stream: StreamId) {
        match self.held.get(slot as usize) {
            Some(Some(Held::Small)) => self.small.record_stream(slot, stream),
            Some(Some(Held::Block { stream: own, .. })) if *own != stream => {
                let streams = self.uses.entry(slot).or_default();
                if !streams.contains(&stream) {
                    streams.push(stream);
                }
            }
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
