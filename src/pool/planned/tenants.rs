//! Who is in the way inside the planned pool: allocations that the plan's own order says nothing about, kept exactly, and cells behind which there is no memory yet.

use std::collections::BTreeMap;

use super::bits::Bits;
use crate::extents::cut;
use crate::limits;
use crate::units::{Bytes, PlanOffset, PlanSpan, Span};

/// Bytes in one cell: as the smallest chunk.
pub(super) const CELL: u64 = 2 << 20;

/// What stands for the bytes of a part that is lent: no request is so large.
pub(super) const LENT: Bytes = Bytes::MAX;

/// Spans that are taken, with a count per cell in front: a look-up touches the exact spans only where a cell is not empty.
#[derive(Debug)]
pub(super) struct Tenants {
    /// The end of each by its start, and the bytes that were asked for, or [`LENT`] where a part of the pool is lent to somebody elsewhere.
    spans: BTreeMap<u64, (u64, Bytes)>,
    /// Tenants that touch each cell.
    counts: Box<[u32]>,
    /// One bit per cell: whether the count is not zero, or the cell is a hole. A gigabyte is eight words.
    busy: Bits,
    /// Cells without memory, and how many there are.
    holes: Bits,
    hole_count: u32,
}

impl Tenants {
    pub(super) fn new(len: Bytes) -> Tenants {
        let cells = len.get().div_ceil(CELL) as usize;
        Tenants {
            spans: BTreeMap::new(),
            counts: vec![0; cells].into_boxed_slice(),
            busy: Bits::new(cells),
            holes: Bits::new(cells),
            hole_count: 0,
        }
    }

    /// Nobody and nothing is in the way, as in every job that goes by its plan.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.hole_count == 0
    }

    /// There is no memory behind `span`, which is whole cells, or there is. Nobody is there.
    pub(super) fn set_hole(&mut self, span: PlanSpan, is_hole: bool) {
        let whole = |offset: PlanOffset| offset.get().is_multiple_of(CELL);
        assert!(whole(span.start()) && whole(span.end()), "holes are whole cells");
        for cell in cells(span) {
            if self.holes.is_set(cell) == is_hole {
                continue;
            }
            assert!(self.counts[cell as usize] == 0, "nobody is where no memory is");
            if is_hole {
                self.holes.set(cell);
                self.busy.set(cell);
                self.hole_count += 1;
            } else {
                self.holes.clear(cell);
                self.busy.clear(cell);
                self.hole_count -= 1;
            }
        }
    }

    /// There is no memory behind a part of `span`, or all of it.
    pub(super) fn has_hole(&self, span: PlanSpan) -> bool {
        self.hole_count > 0 && self.holes.any_of(cells(span))
    }

    /// Nobody has a byte of `span`, and there is memory behind it.
    pub(super) fn is_clear(&self, span: PlanSpan) -> bool {
        if !self.busy.any_of(cells(span)) {
            return true;
        }
        if self.has_hole(span) {
            return false;
        }
        let (start, end) = (span.start().get(), span.end().get());
        let before = self.spans.range(..=start).next_back();
        before.is_none_or(|(_, (reach, _))| *reach <= start) && self.spans.range(start..end).next().is_none()
    }

    /// Where in `space`, which is aligned, the smallest stretch begins that nobody has and that is at least `len` long from an aligned place on.
    pub(super) fn gap(&self, space: PlanSpan, len: Bytes) -> Option<PlanOffset> {
        if !self.busy.any_of(cells(space)) {
            return (space.len() >= len).then(|| space.start());
        }
        let (mut at, end) = (space.start().get(), space.end().get());
        if let Some((_, (reach, _))) = self.spans.range(..=at).next_back() {
            at = at.max(*reach);
        }
        let mut best: Option<(u64, u64)> = None;
        let mut consider = |from: u64, to: u64| {
            if let Some(room) = to.checked_sub(from).filter(|room| *room >= len.get()) {
                best = Some(best.map_or((room, from), |best| best.min((room, from))));
            }
        };
        let mut look = |from: u64, to: u64| match self.hole_count {
            0 => consider(from, to),
            _ => self.without_holes(from, to).into_iter().for_each(|(from, to)| consider(from, to)),
        };
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        at = at.next_multiple_of(unit);
        for (start, (reach, _)) in self.spans.range(at.min(end)..end) {
            look(at, *start);
            at = reach.next_multiple_of(unit);
        }
        look(at, end);
        best.map(|(_, start)| PlanOffset::new(start))
    }

    /// What of a stretch has memory behind it.
    pub(super) fn without_holes(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut stretches = vec![(from, to)];
        if self.hole_count > 0 && from < to {
            let holes = (from / CELL..to.div_ceil(CELL)).filter(|cell| self.holes.is_set(*cell as u32));
            holes.for_each(|cell| cut(&mut stretches, cell * CELL, (cell + 1) * CELL, 1));
        }
        stretches
    }

    pub(super) fn insert(&mut self, span: PlanSpan, bytes: Bytes) {
        assert!(self.is_clear(span), "two tenants never overlap");
        self.spans.insert(span.start().get(), (span.end().get(), bytes));
        for cell in cells(span) {
            self.counts[cell as usize] += 1;
            self.busy.set(cell);
        }
    }

    /// Takes out the tenant that begins at `start`, if there is one, and says how many bytes it had asked for.
    pub(super) fn remove(&mut self, start: PlanOffset) -> Option<Bytes> {
        let (end, bytes) = self.served_at(start)?;
        self.take_out(start, end);
        Some(bytes)
    }

    /// The end of the tenant that begins at `start`, and the bytes that were asked for.
    fn served_at(&self, start: PlanOffset) -> Option<(u64, Bytes)> {
        self.spans.get(&start.get()).copied().filter(|(_, bytes)| *bytes != LENT)
    }

    /// A part of the pool is lent that begins at `start`.
    pub(super) fn is_lent(&self, start: PlanOffset) -> bool {
        self.spans.get(&start.get()).is_some_and(|(_, bytes)| *bytes == LENT)
    }

    /// Takes out the part that is lent and begins at `start`; false if there is none.
    pub(super) fn remove_lent(&mut self, start: PlanOffset) -> bool {
        let lent = self.spans.get(&start.get()).filter(|(_, bytes)| *bytes == LENT);
        let Some((end, _)) = lent.copied() else { return false };
        self.take_out(start, end);
        true
    }

    fn take_out(&mut self, start: PlanOffset, end: u64) {
        self.spans.remove(&start.get());
        let len = Bytes::new(end - start.get());
        for cell in cells(Span::new(start, len).expect("it was inserted")) {
            self.counts[cell as usize] -= 1;
            if self.counts[cell as usize] == 0 {
                self.busy.clear(cell);
            }
        }
    }

    /// The pool has another length; nobody is behind it.
    pub(super) fn resize(&mut self, len: Bytes) {
        let cells = len.get().div_ceil(CELL) as usize;
        let mut counts = std::mem::take(&mut self.counts).into_vec();
        assert!(counts[cells.min(counts.len())..].iter().all(|count| *count == 0), "nobody is where no memory is");
        counts.resize(cells, 0);
        self.counts = counts.into_boxed_slice();
        self.busy.resize(cells);
        self.holes.resize(cells);
    }

    /// Bytes of the tenant that begins at `start`.
    pub(super) fn len_at(&self, start: PlanOffset) -> Option<Bytes> {
        self.served_at(start).map(|(end, _)| Bytes::new(end - start.get()))
    }

    pub(super) fn spans(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.spans.iter().map(span_of)
    }

    /// Everything that is in the way: tenants and holes.
    pub(super) fn obstacles(&self) -> impl Iterator<Item = PlanSpan> + '_ {
        self.spans().chain(self.holes.iter().map(whole_cell))
    }

    /// The tenants, with the bytes that were asked for.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PlanSpan, Bytes)> + '_ {
        self.spans().zip(self.spans.values().map(|(_, bytes)| *bytes))
    }

    /// Tenants that have bytes of `span`.
    pub(super) fn overlapping(&self, span: PlanSpan) -> impl Iterator<Item = PlanSpan> + '_ {
        let (start, end) = (span.start().get(), span.end().get());
        let before = self.spans.range(..start).next_back().filter(|(_, (reach, _))| *reach > start);
        let all = before.into_iter().chain(self.spans.range(start..end));
        all.map(span_of)
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        let mut counts = vec![0_u32; self.counts.len()];
        self.spans().flat_map(cells).for_each(|cell| counts[cell as usize] += 1);
        let busy = |cell: usize| self.busy.is_set(cell as u32);
        let is_hole = |cell: usize| self.holes.is_set(cell as u32);
        if let Some(cell) = (0..counts.len()).find(|cell| counts[*cell] > 0 && is_hole(*cell)) {
            return Err(format!("cell {cell} has no memory and {} tenants", counts[cell]));
        }
        let is_right =
            |cell: usize| counts[cell] == self.counts[cell] && busy(cell) == (counts[cell] > 0 || is_hole(cell));
        let wrong = (0..counts.len()).find(|cell| !is_right(*cell));
        wrong.map_or(Ok(()), |cell| Err(format!("cell {cell} counts {} and has {}", self.counts[cell], counts[cell])))
    }
}

fn span_of((start, (end, _)): (&u64, &(u64, Bytes))) -> PlanSpan {
    Span::new(PlanOffset::new(*start), Bytes::new(end - start)).expect("it was inserted")
}

/// The bytes of a cell.
pub(super) fn whole_cell(cell: u32) -> PlanSpan {
    Span::new(PlanOffset::new(u64::from(cell) * CELL), Bytes::new(CELL)).expect("a cell of a pool")
}

/// The cells that a span, not empty, touches.
fn cells(span: PlanSpan) -> std::ops::Range<u32> {
    (span.start().get() / CELL) as u32..((span.end().get() - 1) / CELL) as u32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Where the smallest stretch of `space` begins that nobody has, said the slow way.
    fn slow_gap(list: &[PlanSpan], space: PlanSpan) -> Option<u64> {
        let mut inside: Vec<(u64, u64)> = list.iter().map(|span| (span.start().get(), span.end().get())).collect();
        inside.push((space.end().get(), u64::MAX));
        inside.sort_unstable();
        let (mut at, mut gaps) = (space.start().get(), Vec::new());
        for (start, end) in inside {
            let to = start.min(space.end().get());
            if to > at {
                gaps.push((to - at, at));
            }
            at = at.max(end);
        }
        gaps.into_iter().min().map(|(_, start)| start)
    }

    #[test]
    fn look_ups_agree_with_a_plain_list() {
        let mut rng = Rng::new(1);
        let mut tenants = Tenants::new(Bytes::mib(400));
        let mut list: Vec<PlanSpan> = Vec::new();
        let mut clear = 0;
        for _ in 0..20_000 {
            let start = rng.below(300 << 11) * 512;
            let shift = 10 + rng.below(16);
            let len = 512 + rng.below(1 << shift) / 512 * 512;
            let span = Span::new(PlanOffset::new(start), Bytes::new(len)).unwrap();
            let expected = !list.iter().any(|other| other.overlaps(span));
            assert_eq!(tenants.is_clear(span), expected, "{span}");
            let gap = tenants.gap(span, Bytes::new(512));
            assert_eq!(gap.is_some(), slow_gap(&list, span).is_some(), "{span}");
            assert_eq!(gap.map(PlanOffset::get), slow_gap(&list, span), "{span}");
            if expected {
                clear += 1;
                tenants.insert(span, span.len());
                list.push(span);
            }
            if list.len() > 20 {
                let gone = list.swap_remove(rng.index(list.len()));
                assert_eq!(tenants.len_at(gone.start()), Some(gone.len()));
                assert_eq!(tenants.remove(gone.start()), Some(gone.len()));
            }
        }
        tenants.invariants().unwrap();
        assert!(clear > 1000);
    }
}
