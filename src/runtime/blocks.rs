//! Looking at live allocations from outside: which one has an address, what is free beside it, whose freeing would make room, and what lies where altogether.
//!
//! Not for: serving. Nothing here changes anything.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{Pools, PrivatePoolId, Runtime};
use crate::ids::StreamId;
use crate::pool::{Found, Laid, LaidState};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// Contiguous addresses of one pool, all of them with memory behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where.
    pub span: AddressSpan,
    /// Whose.
    pub pool: SegmentPool,
    /// It is a place at addresses of its own: its memory is other segments', where it is [`BlockState::Shown`].
    pub is_stitched: bool,
    /// The stream of its first block.
    pub stream: StreamId,
    /// What lies in it, from its first byte to its last.
    pub blocks: Vec<Block>,
}

/// Who serves from a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentPool {
    /// The plan's static pool.
    Planned,
    /// The page pool, where its chunks have their homes.
    Pool,
    /// A live place of the page pool, at addresses of its own.
    Stitched,
    /// A private pool.
    Private(PrivatePoolId),
}

/// A part of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Where.
    pub span: AddressSpan,
    /// Bytes as asked for; none where nobody is served.
    pub requested: Bytes,
    /// Whom it serves.
    pub state: BlockState,
}

/// Whom a block serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockState {
    /// A live allocation.
    Live,
    /// One that was freed, and that waits for streams.
    Waiting,
    /// Nobody.
    Free,
    /// A live allocation at other addresses.
    Shown,
}

/// A live allocation whose freeing would make room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// It, and what is free beside it.
    pub found: Found,
}

impl Candidate {
    /// Contiguous bytes that would be free without it.
    pub fn room(&self) -> Bytes {
        self.found.before + self.found.span.len() + self.found.after
    }

    /// Puts some in the order in which they make room for `bytes`.
    pub fn rank(candidates: &mut [Candidate], bytes: Bytes) {
        candidates.sort_by_key(|candidate| {
            let (room, own) = (candidate.room(), candidate.found.span.len());
            let is_enough = room >= bytes;
            let rank = if is_enough { (room, Reverse(Bytes::ZERO)) } else { (Bytes::ZERO, Reverse(room)) };
            (!is_enough, rank, own, candidate.found.span.start())
        });
    }
}

impl Runtime {
    /// The live allocation that has `address`, which may be any of its bytes, and what is free beside it.
    /// The time that takes grows with what lies near, and where stitched allocations or a plan's pool
    /// lie between with all live allocations: the modules `locate` of the pools say how. Neighbours count where one stretch of addresses has both, whatever stream they are for.
    pub fn block_of(&self, address: DeviceAddress) -> Option<Found> {
        self.lock().find(address)
    }

    /// Everything that the runtime holds, and every stitched block. Takes time proportional to that, under the lock.
    pub fn segments(&self) -> Vec<Segment> {
        let pools = self.lock();
        let waiting: BTreeSet<DeviceAddress> = pools.deferred.addresses().collect();
        let mut segments = pools.segments();
        for block in segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
            if block.state == BlockState::Live && waiting.contains(&block.span.start()) {
                block.state = BlockState::Waiting;
            }
        }
        segments.sort_unstable_by_key(|segment| segment.span.start());
        segments
    }

    /// Live allocations, ranked by what would be contiguous without them: those that would make room for `bytes`, the smallest room first, and then the others, the largest room first. Takes a walk over all there is.
    pub fn release_candidates(&self, bytes: Bytes) -> Vec<Candidate> {
        let segments = self.segments();
        let mut candidates: Vec<Candidate> =
            segments.iter().flat_map(|segment| candidates_of(&segment.blocks)).collect();
        Candidate::rank(&mut candidates, bytes);
        candidates
    }
}

/// Live blocks of a segment, with what is free beside each.
fn candidates_of(blocks: &[Block]) -> Vec<Candidate> {
    let free = |block: Option<&Block>| {
        block.filter(|block| block.state == BlockState::Free).map_or(Bytes::ZERO, |block| block.span.len())
    };
    let live = blocks.iter().enumerate().filter(|(_, block)| block.state == BlockState::Live);
    live.map(|(at, block)| {
        let before = free(at.checked_sub(1).and_then(|at| blocks.get(at)));
        Candidate { found: Found { span: block.span, before, after: free(blocks.get(at + 1)) } }
    })
    .collect()
}

impl Pools {
    fn find(&mut self, address: DeviceAddress) -> Option<Found> {
        let found = self.pages.find(address).or_else(|| self.private.find(address));
        found.or_else(|| self.planned.as_mut().and_then(|installed| installed.pool.find(address)))
    }

    /// What lies where, pool by pool.
    pub(super) fn segments(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        if let Some(installed) = &self.planned {
            cut(SegmentPool::Planned, &installed.pool.laid(), &mut segments);
        }
        let (homes, places) = self.pages.laid();
        let homes = homes.into_iter().map(|range| (SegmentPool::Pool, range));
        let places = places.into_iter().map(|range| (SegmentPool::Stitched, range));
        let private = self.private.laid().into_iter().map(|(id, range)| (SegmentPool::Private(id), range));
        for (pool, range) in homes.chain(places).chain(private) {
            cut(pool, &range, &mut segments);
        }
        segments
    }
}

/// Makes segments of what lies in one range: one ends where memory does. Free neighbours are one block.
fn cut(pool: SegmentPool, range: &[Laid], segments: &mut Vec<Segment>) {
    let mut open: Option<Segment> = None;
    let is_stitched = pool == SegmentPool::Stitched;
    for laid in range {
        if open.as_ref().is_some_and(|open| open.span.end() != laid.span.start()) {
            segments.extend(open.take());
        }
        let new = || Segment { span: laid.span, pool, is_stitched, stream: laid.stream, blocks: Vec::new() };
        let segment = open.get_or_insert_with(new);
        segment.span = joined(segment.span, laid.span);
        let (state, requested) = match laid.state {
            LaidState::Live(bytes) => (BlockState::Live, bytes),
            LaidState::Free => (BlockState::Free, Bytes::ZERO),
            LaidState::Shown => (BlockState::Shown, Bytes::ZERO),
        };
        match segment.blocks.last_mut().filter(|last| last.state == state && state == BlockState::Free) {
            Some(last) => last.span = joined(last.span, laid.span),
            None => segment.blocks.push(Block { span: laid.span, requested, state }),
        }
    }
    segments.extend(open);
}

/// From the start of one to the end of another behind it.
fn joined(first: AddressSpan, last: AddressSpan) -> AddressSpan {
    let len = last.end().checked_distance(first.start()).expect("they lie in order");
    Span::new(first.start(), len).expect("both lie in the address space")
}
