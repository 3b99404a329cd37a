//! The stitching pool: everything from 2 MiB up that no plan foresaw (GMLake, ASPLOS'24, sections 3 and 4).
//!
//! A **PBlock** is a stretch of whole chunks, contiguous in a range of addresses; PBlocks together are exactly what the pool holds. An **SBlock** is a run
//! of addresses over chunks that PBlocks own; it owns no memory. A block serves one allocation at a time, and an SBlock only while none of its
//! PBlocks serves another.
//!
//! A request is served in the first of these ways that can:
//!
//! | way | what happens | driver calls |
//! |---|---|---|
//! | **S1** | a PBlock or SBlock of exactly this size is idle | none |
//! | **S2** | a larger PBlock is split in place; the whole stays known as an SBlock, so that its old size is matched again | none |
//! | | neighbouring PBlocks that are idle together are large enough | none |
//! | **S4** | within the soft budget: the pool grows by exactly this | acquire, map |
//! | **S3** | under pressure: idle PBlocks are stitched into an SBlock at new addresses | map |
//! | **S4** | under pressure: the pool grows by what is missing, and stitches | acquire, map |
//! | **S5** | out of memory | |
//!
//! S1 to S3 are this pool's ([`StitchingPool::alloc`], [`StitchingPool::stitch`]); growing is the runtime's, which hands chunks over
//! ([`StitchingPool::grow`]). The paper splits by remapping; here a split keeps addresses, so it costs nothing, and so does its extra stitch. Idle SBlocks
//! are kept: a job that repeats itself finds the same sizes again, and after a few iterations only S1 is left. Then nothing is searched for either: it
//! is known what served when the same blocks were live ([`tape`]).
//!
//! Where the device cannot map a chunk twice ([`crate::driver::Capabilities::alias`]), stitching *moves* chunks: they leave their old addresses and become one
//! PBlock at new ones.
//!
//! ## Streams
//!
//! Bytes that one stream used last are another's only once the first has *passed*: the pool numbers its frees, and is told up to which number a stream is
//! known to be done ([`StitchingPool::note_passed`]).

mod audit;
mod blocks;
mod busy;
mod cards;
mod cut;
mod locate;
mod sites;
mod stitch;
mod tape;
mod trim;

use std::collections::BTreeMap;
use std::sync::Arc;

use slab::Slab;

use self::blocks::{BlockId, Class, PBlock, PBlockId, Range, SBlock, Seat};
use self::busy::Busy;
use self::cards::{Card, CardId, Cards};
use self::locate::Cells;
pub use self::locate::Holder;
use self::sites::{Site, Sites};
pub use self::stitch::{Effort, Stitched};
use self::tape::Tape;
use crate::ids::StreamId;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::units::{Bytes, DeviceAddress, Place as _, Span};

/// Of a block that is not stitched so much may be left over, as a part of what is asked for. Without that bound, or with an eighth, gpt2-small takes as much and qwen-moe 0.1 and 0.5 % more.
const WASTE_PART: u64 = 16;

/// What is smaller than so many chunks is left to the packed pool, if nobody says otherwise.
const PACKED_GRANULES: u64 = 4;

/// How much a stitching pool may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StitchConfig {
    /// Blocks smaller than this are not stitched, and requests smaller than this are not served by stitching, unless the alternative is to be out of memory:
    /// it would cost more calls than it saves memory.
    pub fragmentation_limit: Bytes,
    /// A smaller request is left to the packed pool, where its block would leave more than a sixteenth of its size over. The larger the requests that are, the more memory goes to and fro between the pools before a job
    /// has settled. Four chunks if nobody says: 8 MiB where they are of 2.
    pub packed_below: Option<Bytes>,
    /// Addresses that idle and live stitched blocks may take together; above it the least recently used idle ones go.
    pub stitch_limit: Bytes,
    /// SBlocks that cost nothing (in place) to remember.
    pub remembered_max: usize,
    /// Blocks are stitched at all. Turned off to measure what that is worth.
    pub is_on: bool,
}

impl Default for StitchConfig {
    fn default() -> StitchConfig {
        StitchConfig {
            fragmentation_limit: Bytes::mib(8),
            packed_below: None,
            stitch_limit: Bytes::gib(1024),
            remembered_max: 4096,
            is_on: true,
        }
    }
}

/// How requests were served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StitchCounts {
    /// S1: exactly this size was idle.
    pub exact: u64,
    /// S2: one larger block was split.
    pub split: u64,
    /// S2: idle neighbours were put together in place.
    pub joined: u64,
    /// S3: blocks were stitched at new addresses.
    pub stitched: u64,
    /// Bytes served by S3, where no contiguous block could.
    pub stitched_bytes: Bytes,
    /// Ranges that the pool grew by.
    pub grown: u64,
    /// Stitched blocks that were dropped to stay within the limit.
    pub evicted: u64,
    /// Requests whose block had to be searched for: all but those that find the same blocks live as once before.
    pub searched: u64,
}

/// What the pool holds now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StitchUse {
    /// Bytes of all its chunks.
    pub held: Bytes,
    /// Bytes of live blocks.
    pub live: Bytes,
    /// The largest run of idle bytes that are contiguous in addresses already.
    pub largest_contiguous: Bytes,
    /// Idle bytes that can be stitched into one range.
    pub stitchable: Bytes,
}

/// An allocation of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StitchAllocation {
    /// Where.
    pub address: DeviceAddress,
    /// Bytes that it occupies: as asked for, rounded up to whole chunks.
    pub len: Bytes,
}

/// The stitching pool of one device.
#[derive(Debug)]
pub struct StitchingPool {
    device: Arc<Device>,
    /// Size of its chunks: every block is a multiple.
    granule: Bytes,
    granule_shift: u32,
    config: StitchConfig,
    /// The configured limit, or what half of the process's mappings reach.
    packed_below: Bytes,
    stitch_limit: Bytes,
    /// Nothing is unmapped to serve a request.
    keeps_mapped: bool,
    ranges: Slab<Range>,
    cells: Cells,
    pblocks: Slab<PBlock>,
    sblocks: Slab<SBlock>,
    classes: Vec<Class>,
    class_of: BTreeMap<Bytes, u32>,
    /// The class of each size, by granules.
    class_index: Vec<u32>,
    cards: Cards,
    sites: Sites,
    busy: Busy,
    tape: Tape,
    streams: Passed,
    /// Bytes of all blocks.
    held: Bytes,
    /// Granules of all that serves.
    live_granules: u64,
    /// Parts of all SBlocks in place together.
    shown_parts: usize,
    /// Bytes of chunks that wait for the end of their range ([`Range::withheld`]).
    withheld: Bytes,
    aliased: Bytes,
    /// Counts frees, to know which block has been idle longest.
    moment: u64,
    /// Numbers blocks by age.
    births: u64,
    /// Chunks that left their place and found no other.
    orphans: Vec<Arc<Chunk>>,
    /// All but the exact matches, which are the rest of what was served.
    counts: StitchCounts,
}

/// Up to which free each stream is known to have passed.
#[derive(Debug, Default)]
struct Passed {
    /// Streams in the order in which they were first seen; hardly ever more than a handful.
    streams: Vec<(StreamId, u64)>,
    /// The first, as long as there is no other.
    only: Option<StreamId>,
}

impl Passed {
    fn note_used(&mut self, stream: StreamId) {
        if !self.streams.iter().any(|(known, _)| *known == stream) {
            self.streams.push((stream, 0));
            self.only = Some(stream).filter(|_| self.streams.len() == 1);
        }
    }

    /// There is no other.
    #[inline]
    fn is_only(&self, stream: StreamId) -> bool {
        self.only == Some(stream)
    }

    fn up_to(&self, stream: StreamId) -> u64 {
        self.streams.iter().find(|(known, _)| *known == stream).map_or(0, |(_, moment)| *moment)
    }
}

impl StitchingPool {
    /// A request that is too small to be stitched, and of whose block too much would be left over: it is better off beside others. Those of the default stream alone: what is packed is its stream's, and streams that take turns
    /// would move chunks, and wait for the device, at each turn, where blocks change hands behind an event.
    #[inline]
    pub fn leaves_to_packing(&self, bytes: Bytes, stream: StreamId) -> bool {
        self.config.is_on
            && stream == StreamId::DEFAULT
            && bytes < self.packed_below
            && self.block_len(bytes).is_some_and(|len| (len - bytes).get() > bytes.get() / WASTE_PART)
    }

    /// An empty pool whose chunks will be of `granule` bytes, a power of two.
    pub fn new(device: Arc<Device>, granule: Bytes, config: StitchConfig) -> StitchingPool {
        assert!(granule.get().is_power_of_two(), "chunk sizes are powers of two");
        let reachable = granule.checked_mul(device.capabilities().mappings_max / 2).unwrap_or(Bytes::MAX);
        StitchingPool {
            device,
            granule,
            granule_shift: granule.get().trailing_zeros(),
            config,
            stitch_limit: config.stitch_limit.min(reachable),
            packed_below: config.packed_below.or(granule.checked_mul(PACKED_GRANULES)).unwrap_or(Bytes::MAX),
            keeps_mapped: false,
            ranges: Slab::new(),
            cells: Cells::default(),
            pblocks: Slab::new(),
            sblocks: Slab::new(),
            classes: Vec::new(),
            class_of: BTreeMap::new(),
            class_index: Vec::new(),
            cards: Cards::default(),
            sites: Sites::default(),
            busy: Busy::new(),
            tape: Tape::default(),
            streams: Passed::default(),
            held: Bytes::ZERO,
            withheld: Bytes::ZERO,
            live_granules: 0,
            shown_parts: 0,
            aliased: Bytes::ZERO,
            moment: 0,
            births: 0,
            orphans: Vec::new(),
            counts: StitchCounts::default(),
        }
    }

    /// What a request for `bytes` occupies; `None` where that is more than any device has.
    pub fn block_len(&self, bytes: Bytes) -> Option<Bytes> {
        Bytes::new(self.granule_count(bytes)).checked_mul(self.granule.get())
    }

    /// How many granules hold `bytes`: rounded up without a division.
    #[inline]
    fn granule_count(&self, bytes: Bytes) -> u64 {
        ((bytes.get().max(1) - 1) >> self.granule_shift) + 1
    }

    /// Size of the pool's chunks.
    pub fn granule(&self) -> Bytes {
        self.granule
    }

    /// How requests were served.
    pub fn counts(&self) -> StitchCounts {
        let StitchCounts { split, joined, stitched, .. } = self.counts;
        StitchCounts { exact: self.tape.served() - split - joined - stitched, ..self.counts }
    }

    /// Bytes of all its chunks.
    pub fn held(&self) -> Bytes {
        self.held + self.withheld
    }

    /// Bytes of live blocks.
    pub fn live_bytes(&self) -> Bytes {
        Bytes::new(self.live_granules << self.granule_shift)
    }

    /// Bytes of blocks that serve nobody, all of which can be stitched.
    pub fn idle_bytes(&self) -> Bytes {
        self.held - self.live_bytes()
    }

    /// Blocks, those apart that show others.
    pub fn block_count(&self) -> usize {
        self.pblocks.len()
    }

    /// Serves a request without a driver call: S1 or S2.
    #[inline]
    pub fn alloc(&mut self, bytes: Bytes, stream: StreamId) -> Option<StitchAllocation> {
        self.note_stream(stream);
        match self.serve_expected(bytes, stream) {
            Some(allocation) => Some(allocation),
            None => self.search(bytes, stream),
        }
    }

    /// S1 without a search: the block that served this size when the same blocks were live as are now.
    #[inline]
    fn serve_expected(&mut self, bytes: Bytes, stream: StreamId) -> Option<StitchAllocation> {
        let id = self.tape.expected()?;
        let card = self.cards.get(id);
        debug_assert!(self.is_found_by_a_search(id, bytes, stream), "another block is older");
        let can_serve = u64::from(card.granules) == self.granule_count(bytes)
            && (self.streams.is_only(stream) || self.is_for(self.cards.block(id), stream))
            && self.busy.try_occupy(&card.parts);
        if !can_serve {
            return None;
        }
        self.tape.push(id, card.mark);
        self.live_granules += u64::from(card.granules);
        let address = self.sites.get_mut(card.site).serve(id, bytes);
        Some(StitchAllocation { address, len: self.len_on(card) })
    }

    /// If this block can serve, then a search would find it, too: no older one of its size is idle. Who may use what on several streams changes with time.
    fn is_found_by_a_search(&self, id: CardId, bytes: Bytes, stream: StreamId) -> bool {
        let card = self.cards.get(id);
        let can_serve = u64::from(card.granules) == self.granule_count(bytes) && self.busy.is_idle(&card.parts);
        let Some(class) = self.class(self.len_on(card)) else { return !can_serve };
        let mut ready = self.classes[class as usize].ready.iter();
        let oldest = ready.find(|block| self.obstacle(*block).is_none());
        !can_serve || !self.streams.is_only(stream) || oldest.is_some_and(|oldest| self.card_id(oldest) == id)
    }

    /// S1 or S2, where nobody knows what served last time or that cannot serve now.
    #[cold]
    fn search(&mut self, bytes: Bytes, stream: StreamId) -> Option<StitchAllocation> {
        let granules = u32::try_from(self.granule_count(bytes)).ok()?;
        if self.tape.realign(granules)
            && let Some(allocation) = self.serve_expected(bytes, stream)
        {
            return Some(allocation);
        }
        let len = self.block_len(bytes)?;
        let block = match self.find_exact(len, stream) {
            Some(block) => block,
            None => self.cut(len, stream)?,
        };
        Some(self.serve_anew(block, bytes))
    }

    /// S1: the oldest block of exactly this size that is idle in all its parts.
    fn find_exact(&mut self, len: Bytes, stream: StreamId) -> Option<BlockId> {
        /// Idle blocks that are looked at and left, because another stream may still use them.
        const TRIES: usize = 64;
        let class = self.class(len)? as usize;
        self.oldest_idle(class, TRIES, |pool, block| pool.is_for(block, stream))
    }

    /// `stream` may use the idle block and all its parts.
    #[inline]
    fn is_for(&self, block: BlockId, stream: StreamId) -> bool {
        self.streams.is_only(stream)
            || match block {
                BlockId::P(id) => self.is_usable(id, stream),
                BlockId::S(id) => self.sblock(id).parts.iter().all(|part| self.is_usable(*part, stream)),
            }
    }

    /// The block is idle, and `stream` may use it.
    fn is_idle_for(&self, block: PBlockId, stream: StreamId) -> bool {
        !self.is_busy(block) && self.is_usable(block, stream)
    }

    /// `stream` used the idle block last, or whoever did has passed.
    fn is_usable(&self, block: PBlockId, stream: StreamId) -> bool {
        self.pblock(block).stream == stream || self.has_passed(block)
    }

    /// Whoever used the idle block last has passed: it is for any stream.
    fn has_passed(&self, block: PBlockId) -> bool {
        let PBlock { card, stream, .. } = self.pblock(block);
        self.cards.get(*card).idle_since <= self.streams.up_to(*stream)
    }

    /// Takes note of a stream. With the second one it begins to matter who used a part last: until now it was the first.
    #[inline]
    fn note_stream(&mut self, stream: StreamId) {
        if !self.streams.is_only(stream) {
            self.note_other_stream(stream);
        }
    }

    #[cold]
    fn note_other_stream(&mut self, stream: StreamId) {
        if self.streams.only.is_some() {
            for (_, block) in &self.sblocks {
                let idle_since = self.cards.get(block.card).idle_since;
                for part in &block.parts {
                    let part = self.cards.get_mut(self.pblocks[*part].card);
                    part.idle_since = part.idle_since.max(idle_since);
                }
            }
        }
        self.streams.note_used(stream);
    }

    /// Makes an idle block live that was found by searching, and remembers it for the next time.
    fn serve_anew(&mut self, block: BlockId, bytes: Bytes) -> StitchAllocation {
        self.counts.searched += 1;
        let id = self.card_id(block);
        let card = self.cards.get(id);
        assert!(self.busy.try_occupy(&card.parts), "no byte serves two allocations");
        self.tape.record(id, card.mark, card.granules);
        self.live_granules += u64::from(card.granules);
        let address = self.sites.get_mut(card.site).serve(id, bytes);
        StitchAllocation { address, len: self.len_on(card) }
    }

    /// Bytes of the block of this card.
    #[inline]
    fn len_on(&self, card: &Card) -> Bytes {
        Bytes::new(u64::from(card.granules) << self.granule_shift)
    }

    /// Takes an allocation back that was last used on `stream`, and says how many bytes had been asked for. `None` if it is not one of this
    /// pool's.
    #[inline]
    pub fn free(&mut self, address: DeviceAddress, stream: StreamId) -> Option<Bytes> {
        let site = self.sites.find(address)?;
        let card = site.retire()?;
        let bytes = site.bytes;
        self.retire(card, stream);
        Some(bytes)
    }

    /// A live block becomes a slab of another pool.
    pub fn lend(&mut self, address: DeviceAddress) {
        let is_lent = self.sites.find(address).is_some_and(|site| site.lend());
        assert!(is_lent, "only a live block is lent");
    }

    /// A slab comes back, which `stream` used last.
    pub fn take_back(&mut self, address: DeviceAddress, stream: StreamId) {
        let card = self.sites.find(address).and_then(|site| site.take_back());
        let card = card.expect("only a slab that was lent comes back");
        self.retire(card, stream);
    }

    /// The block of this card serves no longer.
    #[inline]
    fn retire(&mut self, id: CardId, stream: StreamId) {
        self.moment += 1;
        let card = self.cards.get_mut(id);
        card.idle_since = self.moment;
        self.tape.retire(card.mark);
        self.live_granules -= u64::from(card.granules);
        let is_awaited = self.busy.vacate(&card.parts);
        if !self.streams.is_only(stream) {
            self.note_user(id, stream);
        }
        if is_awaited {
            self.wake(id);
        }
    }

    /// `stream` used the block last, which has just become idle, and so all its parts.
    #[cold]
    fn note_user(&mut self, id: CardId, stream: StreamId) {
        self.note_stream(stream);
        match self.cards.block(id) {
            BlockId::P(block) => self.pblocks[block].stream = stream,
            BlockId::S(block) => {
                for part in &self.sblocks[block].parts {
                    let part = &mut self.pblocks[*part];
                    part.stream = stream;
                    self.cards.get_mut(part.card).idle_since = self.moment;
                }
            }
        }
    }

    /// Bytes that an allocation at `address` occupies, if it is a live one of this pool's.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        let card = self.sites.serving_at(address)?;
        Some(self.len_on(self.cards.get(card)))
    }

    /// The chunks of the live block that `address` lies in, slabs among them, each with where it begins. Walks over all that is live.
    pub fn chunks_at(&self, address: DeviceAddress) -> Vec<(DeviceAddress, Arc<Chunk>)> {
        let holds = |site: &Site, card| {
            Span::new(site.address, self.len_on(self.cards.get(card))).is_some_and(|span| span.contains(address))
        };
        let Some((site, card)) = self.sites.live().find(|(site, card)| holds(site, *card)) else { return Vec::new() };
        let parts = match self.cards.block(card) {
            BlockId::P(block) => vec![block],
            BlockId::S(block) => self.sblocks[block].parts.clone(),
        };
        let starts = (site.address.get()..).step_by(self.granule.get() as usize).map(DeviceAddress::new);
        starts.zip(parts.iter().flat_map(|part| self.chunks_of(*part)).cloned()).collect()
    }

    /// S4: maps chunks that were acquired as one idle block. On error nothing has changed, and the chunks are still the caller's.
    pub fn grow(&mut self, chunks: &[Arc<Chunk>], stream: StreamId) -> Result<(), MemoryError> {
        assert!(chunks.iter().all(|chunk| chunk.len() == self.granule), "the pool is made of chunks of one size");
        let mapping = self.map(chunks)?;
        self.add_range(mapping, stream, 0);
        self.counts.grown += 1;
        Ok(())
    }

    /// Takes a mapping up as one idle block. Its bytes are for any stream once `stream` has passed `idle_since`; 0 stands for bytes that nobody
    /// has used.
    fn add_range(&mut self, mapping: Mapping, stream: StreamId, idle_since: u64) -> PBlockId {
        let (span, slots) = (mapping.span(), mapping.slot_count() as u32);
        self.held += span.len();
        self.note_stream(stream);
        let range = self.ranges.insert(Range { mapping, first: None, owners: Vec::new(), withheld: Vec::new() });
        let birth = self.next_birth();
        let block = PBlock {
            range,
            slots: 0..slots,
            address: span.start(),
            len: span.len(),
            seat: Seat::Ready,
            stream,
            sblocks: Vec::new(),
            class: 0,
            birth,
            card: 0,
            before: None,
            after: None,
        };
        let block = self.insert_pblock(block, idle_since);
        self.ranges[range].first = Some(block);
        self.note_range(range, block);
        block
    }

    /// The moment up to which frees have happened: what an event that is recorded now stands for.
    pub fn moment(&self) -> u64 {
        self.moment
    }

    /// All that `stream` had queued when the pool was at `moment` has run.
    pub fn note_passed(&mut self, stream: StreamId, moment: u64) {
        self.note_stream(stream);
        let known = self.streams.streams.iter_mut().find(|(known, _)| *known == stream);
        let (_, passed) = known.expect("noted just now");
        *passed = (*passed).max(moment);
    }

    /// Other streams that used idle blocks and are not known to have passed: what stands between `stream` and their bytes.
    pub fn unpassed_streams(&self, stream: StreamId) -> Vec<StreamId> {
        let mut streams = Vec::new();
        for (id, block) in &self.pblocks {
            if !self.is_busy(id) && block.stream != stream && !streams.contains(&block.stream) && !self.has_passed(id) {
                streams.push(block.stream);
            }
        }
        streams
    }

    /// What the pool holds now. Walks over all blocks.
    pub fn usage(&self) -> StitchUse {
        let mut usage = StitchUse { held: self.held(), live: self.live_bytes(), ..StitchUse::default() };
        for (_, range) in &self.ranges {
            let mut run = Bytes::ZERO;
            let mut end = None;
            for id in self.blocks_of(range) {
                let block = self.pblock(id);
                let is_next = end == Some(block.address);
                run = match (self.is_busy(id), is_next) {
                    (true, _) => Bytes::ZERO,
                    (false, true) => run + block.len,
                    (false, false) => block.len,
                };
                end = block.address.checked_add(block.len);
                usage.largest_contiguous = usage.largest_contiguous.max(run);
            }
        }
        usage.stitchable = self.idle_bytes();
        usage
    }

    /// Live allocations, slabs apart.
    pub fn live_allocations(&self) -> u64 {
        self.sites.live().filter(|(site, _)| !site.is_lent()).count() as u64
    }
}

#[cfg(test)]
mod tests;
