//! The parts of a static pool that have no memory yet, and which chunk goes where.
//!
//! Chunks are of any length, and so are holes. The part that the plan needs first is filled first, by
//! the longest chunk that fits; a chunk begins at a multiple of its own length where it can, so that
//! what is left of a hole takes others of that length.

use std::cmp::Reverse;
use std::sync::Arc;

use crate::extents::Extents;
use crate::memory::Chunk;
use crate::plan::Plan;
use crate::units::{Bytes, PlanOffset, PlanSpan, Span};

/// Parts of one static pool without memory.
#[derive(Debug)]
pub(super) struct Holes {
    /// In bytes from the start of the pool.
    free: Extents,
    /// Granules of the pool, those first that the plan needs first. None for a pool that had all its
    /// memory: its holes are filled from the lowest on.
    order: Vec<u32>,
    granule: u64,
}

impl Holes {
    /// A pool with all its memory.
    pub(super) fn none(granule: Bytes) -> Holes {
        Holes { free: Extents::default(), order: Vec::new(), granule: granule.get() }
    }

    /// The whole pool of a plan.
    pub(super) fn for_plan(plan: &Plan, granule: Bytes, len: Bytes) -> Holes {
        let granule = granule.get();
        let mut free = Extents::default();
        free.give(0, len.get());
        Holes { free, order: order_of_need(plan, granule, len.get() / granule), granule }
    }

    /// Bytes of holes before `end`.
    pub(super) fn bytes_until(&self, end: Bytes) -> Bytes {
        let before = |(start, len): (u64, u64)| (start + len).min(end.get()).saturating_sub(start);
        Bytes::new(self.free.iter().map(before).sum())
    }

    /// Every hole, in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.free.iter().map(|(start, len)| span(start, len))
    }

    /// The holes under a place, as far as the granules reach that it has a part of.
    pub(super) fn under(&self, place: PlanSpan) -> Vec<PlanSpan> {
        let from = place.start().get() / self.granule * self.granule;
        let to = place.end().get().next_multiple_of(self.granule);
        let cut = |(start, len): (u64, u64)| {
            let (first, end) = (start.max(from), (start + len).min(to));
            (first < end).then(|| span(first, end - first))
        };
        self.free.iter().filter_map(cut).collect()
    }

    /// A part of the pool has no memory any more.
    pub(super) fn add(&mut self, part: PlanSpan) {
        self.free.give(part.start().get(), part.len().get());
    }

    /// Finds places for chunks, under `first` before elsewhere: where each goes, in order, which is no
    /// hole any more; and the chunks that fit nowhere.
    #[expect(clippy::type_complexity, reason = "chunks with places, and chunks without")]
    pub(super) fn place(
        &mut self,
        first: &[PlanSpan],
        mut chunks: Vec<Arc<Chunk>>,
    ) -> (Vec<(PlanOffset, Arc<Chunk>)>, Vec<Arc<Chunk>>) {
        // From the end, where the longest are.
        chunks.sort_by_key(|chunk| (chunk.len(), Reverse(chunk.id())));
        let mut placed = Vec::new();
        for part in first {
            self.fill_part(*part, true, &mut chunks, &mut placed);
        }
        let order = std::mem::take(&mut self.order);
        for granule in &order {
            let is_too_long = |chunk: &Arc<Chunk>| chunk.len().get() > self.free.longest();
            if chunks.first().is_none_or(is_too_long) {
                break;
            }
            let part = span(u64::from(*granule) * self.granule, self.granule);
            self.fill_part(part, false, &mut chunks, &mut placed);
        }
        self.order = order;
        if let Some((start, len)) = self.free.last() {
            self.fill_part(span(0, start + len), false, &mut chunks, &mut placed);
        }
        placed.sort_unstable_by_key(|(start, _)| *start);
        (placed, chunks)
    }

    /// Finds chunks for what of a part is a hole: the longest that do not reach beyond it, if
    /// `is_exact` and there are such; otherwise the longest for the hole.
    fn fill_part(
        &mut self,
        part: PlanSpan,
        is_exact: bool,
        chunks: &mut Vec<Arc<Chunk>>,
        placed: &mut Vec<(PlanOffset, Arc<Chunk>)>,
    ) {
        let (mut at, to) = (part.start().get(), part.end().get());
        while let Some((first, len)) = self.free.at_or_after(at).filter(|(first, _)| *first < to && !chunks.is_empty())
        {
            let end = first + len;
            at = at.max(first);
            let fitting = |room: u64| chunks.partition_point(|chunk| chunk.len().get() <= room);
            let inside = if is_exact { fitting(to.min(end) - at) } else { 0 };
            let count = if inside > 0 { inside } else { fitting(len) };
            if count == 0 {
                at = end;
                continue;
            }
            let chunk = chunks.remove(count - 1);
            let chunk_len = chunk.len().get();
            let aligned = at / chunk_len * chunk_len;
            let start = if inside > 0 { at } else { aligned.clamp(first, end - chunk_len) };
            self.free.take(start, chunk_len);
            placed.push((PlanOffset::new(start), chunk));
            at = start + chunk_len;
        }
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        self.free.invariants()
    }
}

fn span(start: u64, len: u64) -> PlanSpan {
    Span::new(PlanOffset::new(start), Bytes::new(len)).expect("a hole lies in the pool")
}

/// The granules of a plan's pool, those first that it needs first.
fn order_of_need(plan: &Plan, granule: u64, count: u64) -> Vec<u32> {
    let mut is_listed = vec![false; count as usize];
    let mut order = Vec::with_capacity(count as usize);
    let of_entries = plan.entries.iter().flat_map(|entry| {
        let span = entry.span();
        span.start().get() / granule..span.end().get().div_ceil(granule)
    });
    for at in of_entries.chain(0..count) {
        if !std::mem::replace(&mut is_listed[at as usize], true) {
            order.push(at as u32);
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::ids::{ChunkId, DeviceId};
    use crate::memory::Device;

    fn chunks(mib: &[u64]) -> Vec<Arc<Chunk>> {
        let sim = SimDriver::new(SimOptions::with_devices(&[Bytes::gib(1)]));
        let device = Device::open(Arc::new(sim), DeviceId(0)).unwrap();
        let chunk = |(id, mib): (u64, &u64)| Chunk::create(&device, ChunkId(id), Bytes::mib(*mib)).unwrap();
        (1..).zip(mib).map(chunk).map(Arc::new).collect()
    }

    fn mib(start: u64, len: u64) -> PlanSpan {
        span(start << 20, len << 20)
    }

    /// Holes of these starts and lengths, in MiB.
    fn holes(parts: &[(u64, u64)]) -> Holes {
        let mut holes = Holes::none(Bytes::mib(2));
        parts.iter().for_each(|(start, len)| holes.add(mib(*start, *len)));
        holes
    }

    /// Where chunks of these lengths go, and how many fit nowhere.
    fn place(holes: &mut Holes, first: &[PlanSpan], lens: &[u64]) -> (Vec<(u64, u64)>, usize) {
        let (placed, rest) = holes.place(first, chunks(lens));
        holes.invariants().unwrap();
        let in_mib = |(start, chunk): &(PlanOffset, Arc<Chunk>)| (start.get() >> 20, chunk.len().get() >> 20);
        (placed.iter().map(in_mib).collect(), rest.len())
    }

    #[test]
    fn longest_chunks_that_fit_go_first() {
        let mut holes = holes(&[(0, 8), (16, 4)]);
        assert_eq!(place(&mut holes, &[], &[2, 4, 16, 8]), (vec![(0, 8), (16, 4)], 2), "2 and 16 MiB are left");
        assert_eq!(holes.bytes_until(Bytes::MAX), Bytes::ZERO);
    }

    #[test]
    fn wanted_parts_are_filled_before_others() {
        let mut holes = holes(&[(0, 32)]);
        let wanted = holes.under(mib(13, 2));
        assert_eq!(wanted, [mib(12, 4)], "whole granules");
        // Nothing fits inside: the chunk begins at a multiple of its length.
        assert_eq!(place(&mut holes, &wanted, &[8]), (vec![(8, 8)], 0));
        assert_eq!(place(&mut holes, &[mib(20, 4)], &[4]), (vec![(20, 4)], 0));
        assert_eq!(holes.bytes_until(Bytes::mib(20)), Bytes::mib(12));
    }
}
