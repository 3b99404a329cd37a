//! Requests whose place in the static pool is taken, served from what lies idle there: chunks of which nobody has a byte are mapped side by side at addresses of their own, a second time, and their places
//! count as taken until the request is freed (GMLake's stitching, on the memory of a plan).
//!
//! Small surprises so cost little memory: a tensor of 256 MiB in whose place 2 MiB linger takes the rest of its place, and a chunk from elsewhere. Where the plan leaves too little alone for long enough, the
//! pool grows at its end by chunks that no entry has.
//!
//! What is freed stays mapped, and serves the next request that it is as long as; its memory goes back to the plan at once. So nothing is unmapped while the device may use it: whoever has the place next comes later
//! on the same stream.
//!
//! Not for: which parts of the pool may be had ([`PlannedPool::lendable`]).
//!
//! Invariant: the parts of a live block are lent by the planned pool, and no two live blocks have one in common.
//!
//! [`PlannedPool::lendable`]: crate::pool::planned::PlannedPool::lendable

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::installed::Installed;
use crate::ids::StreamId;
use crate::limits;
use crate::memory::{Chunk, Mapping, MemoryError};
use crate::pool::planned::Lendable;
use crate::pool::{Found, Laid, LaidState, Request};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, PlanOffset, PlanSpan, Span};

/// Idle blocks that are kept. Above it those go that have been idle for the longest.
const IDLE_MAX: usize = 256;
/// Parts of all idle blocks together: each is a mapping, of which a process has some tens of thousands on some devices.
const IDLE_PARTS_MAX: usize = 4096;

/// Blocks of one static pool.
#[derive(Debug, Default)]
pub(super) struct LentBlocks {
    blocks: BTreeMap<DeviceAddress, Block>,
    /// How many have been served.
    served: u64,
}

#[derive(Debug)]
struct Block {
    mapping: Mapping,
    /// The chunks' parts of the static pool, in the order in which they lie here.
    parts: Vec<PlanSpan>,
    stream: StreamId,
    /// What was asked for, while it is live.
    live: Option<Bytes>,
    /// The number of the request that it served last.
    used: u64,
}

impl Block {
    fn span(&self, bytes: Bytes) -> AddressSpan {
        let len = limits::occupied_len(bytes);
        Span::new(self.mapping.span().start(), len).expect("it was served")
    }
}

/// What comes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lent {
    /// It is served here.
    At(DeviceAddress),
    /// So many bytes more are needed at the end of the pool, where there are addresses for them.
    Lacks(Bytes),
}

impl LentBlocks {
    fn live(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().filter(|block| block.live.is_some())
    }

    pub(super) fn live_count(&self) -> u64 {
        self.live().count() as u64
    }

    fn live_at(&self, address: DeviceAddress) -> Option<(&Block, Bytes)> {
        let block = self.blocks.get(&address)?;
        Some((block, block.live?))
    }

    pub(super) fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.live_at(address).map(|(block, bytes)| block.span(bytes).len())
    }

    pub(super) fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.live_at(address).map(|(block, _)| block.stream)
    }

    /// The chunks of a live block: where each is, and the chunk.
    pub(super) fn chunks_at(&self, address: DeviceAddress) -> Option<Vec<(DeviceAddress, Arc<Chunk>)>> {
        let (block, _) = self.live_at(address)?;
        Some(block.mapping.chunks().map(|(start, chunk)| (start, Arc::clone(chunk))).collect())
    }

    /// The live block that has this address.
    pub(super) fn find(&self, address: DeviceAddress) -> Option<Found> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        let span = block.span(block.live?);
        let found = || {
            let after = block.mapping.span().end().checked_distance(span.end())?;
            Some(Found { span, before: Bytes::ZERO, after })
        };
        span.contains(address).then(found).flatten()
    }

    /// What lies where, live block by live block.
    pub(super) fn laid(&self) -> Vec<Vec<Laid>> {
        let laid = |block: &Block| {
            let bytes = block.live?;
            let live = Laid { span: block.span(bytes), stream: block.stream, state: LaidState::Live(bytes) };
            let end = block.mapping.span().end();
            let rest = Span::new(live.span.end(), end.checked_distance(live.span.end())?)?;
            let rest = Laid { span: rest, state: LaidState::Free, ..live };
            Some(vec![live].into_iter().chain(Some(rest).filter(|rest| !rest.span.is_empty())).collect())
        };
        self.blocks.values().filter_map(laid).collect()
    }

    /// Unmaps the idle blocks that show this part of the pool.
    pub(super) fn forget_idle(&mut self, part: PlanSpan) {
        self.blocks.retain(|_, block| block.live.is_some() || !block.parts.contains(&part));
    }

    /// The idle block that was used last and has room for `len` in such parts, and not much more.
    fn ready(&self, len: Bytes, stream: StreamId, may_have: impl Fn(PlanSpan) -> bool) -> Option<DeviceAddress> {
        let most = len.get().saturating_add(len.get() / 4);
        let fits = |block: &Block| {
            let room = block.mapping.span().len();
            block.live.is_none()
                && block.stream == stream
                && (len.get()..=most.max(len.get())).contains(&room.get())
                && block.parts.iter().all(|part| may_have(*part))
        };
        let ready = self.blocks.iter().filter(|(_, block)| fits(block));
        ready.max_by_key(|(_, block)| block.used).map(|(address, _)| *address)
    }

    /// Unmaps the blocks that have been idle for the longest, so that one more of so many parts can be.
    fn make_room(&mut self, parts: usize) {
        loop {
            let idle = self.blocks.iter().filter(|(_, block)| block.live.is_none());
            let (count, shown) =
                idle.clone().fold((0, parts), |(count, sum), (_, of)| (count + 1, sum + of.parts.len()));
            let oldest = idle.min_by_key(|(_, block)| block.used).map(|(address, _)| *address);
            let Some(oldest) = oldest.filter(|_| count >= IDLE_MAX || shown > IDLE_PARTS_MAX) else { break };
            self.blocks.remove(&oldest);
        }
    }

    pub(super) fn invariants(&self, is_lent: impl Fn(PlanSpan) -> bool) -> Result<(), String> {
        let mut parts: Vec<PlanSpan> = self.live().flat_map(|block| block.parts.iter().copied()).collect();
        parts.sort_unstable_by_key(|part| part.start());
        if let Some(pair) = parts.windows(2).find(|pair| pair[0].end() > pair[1].start()) {
            return Err(format!("{:?} is lent twice", pair[1]));
        }
        let unknown = parts.into_iter().find(|part| !is_lent(*part));
        unknown.map_or(Ok(()), |part| Err(format!("{part:?} serves a lent block, and the plan does not know")))
    }
}

impl Installed {
    /// Serves a request from some of these parts, which are idle. While a graph is captured nothing may
    /// be unmapped, and so no block makes room for another.
    pub(super) fn serve_lent(
        &mut self,
        request: &Request,
        idle: Vec<Lendable>,
        may_unmap: bool,
    ) -> Result<Option<Lent>, MemoryError> {
        let Some(len) = limits::allocation_len(request.bytes) else { return Ok(None) };
        let is_idle: BTreeSet<PlanOffset> = idle.iter().map(|one| one.part.start()).collect();
        if let Some(address) = self.lent.ready(len, request.stream, |part| is_idle.contains(&part.start())) {
            return Ok(Some(self.serve_at(address, request)));
        }
        let parts = match self.chosen(len, idle) {
            Ok(parts) => parts,
            Err(lacks) => {
                let lacks = lacks.round_up(self.granule).filter(|lacks| *lacks <= self.tail_room());
                return Ok(lacks.map(Lent::Lacks));
            }
        };
        if may_unmap {
            self.lent.make_room(parts.len());
        }
        let chunks = parts.iter().filter_map(|part| self.chunk_of(*part).cloned()).collect::<Vec<_>>();
        let mapping = Mapping::stitch(&chunks)?;
        let address = mapping.span().start();
        let block = Block { mapping, parts, stream: request.stream, live: None, used: 0 };
        self.lent.blocks.insert(address, block);
        Ok(Some(self.serve_at(address, request)))
    }

    /// Parts with room for `len`: as few of them as can be, those first that the plan needs last. Or
    /// the missing bytes.
    fn chosen(&self, len: Bytes, mut idle: Vec<Lendable>) -> Result<Vec<PlanSpan>, Bytes> {
        // What no entry has is there at the peak, too, where the plan leaves little alone.
        idle.sort_by_key(|one| {
            let is_of_plan = !self.is_tail(one.part);
            (!one.is_left_alone, !is_of_plan, std::cmp::Reverse((one.part.len(), one.next)))
        });
        let (mut parts, mut found) = (Vec::new(), Bytes::ZERO);
        for one in &idle {
            if found >= len {
                break;
            }
            found += one.part.len();
            parts.push(one.part);
        }
        if found < len {
            return Err(len - found);
        }
        // A smaller one may do as the last, or none.
        parts.retain(|part| {
            let is_spare = found - part.len() >= len;
            if is_spare {
                found -= part.len();
            }
            !is_spare
        });
        parts.sort_unstable_by_key(|part| part.start());
        Ok(parts)
    }

    fn serve_at(&mut self, address: DeviceAddress, request: &Request) -> Lent {
        self.lent.served += 1;
        let served = self.lent.served;
        let block = self.lent.blocks.get_mut(&address).expect("it was just found, or made");
        (block.live, block.used) = (Some(request.bytes), served);
        let parts = block.parts.clone();
        self.pool.lend(parts.into_iter());
        Lent::At(address)
    }

    /// Takes back a request that was served so, and says how many bytes had been asked for. `None` if it is none of these.
    #[cold]
    pub(super) fn free_lent(&mut self, address: DeviceAddress) -> Option<Bytes> {
        let block = self.lent.blocks.get_mut(&address)?;
        let bytes = block.live.take()?;
        let parts = block.parts.clone();
        parts.into_iter().for_each(|part| self.pool.take_back(part));
        Some(bytes)
    }
}
