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
#[derive(Debug, Default)]
pub(super) struct Holes {
    /// In bytes from the start of the pool.
    free: Extents,
    /// Granules of the pool, those first that the plan needs first.
    order: Vec<u32>,
    granule: u64,
}

impl Holes {
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
    pub(super) fn under(&self, place: PlanSpan, granule: Bytes) -> Vec<PlanSpan> {
        let granule = granule.get();
        let (from, to) = (place.start().get() / granule * granule, place.end().get().next_multiple_of(granule));
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
        while let Some((first, len)) = self.free.at_or_after(at).filter(|(first, _)| *first < to) {
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
