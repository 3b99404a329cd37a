//! Looking at the stitching pool from outside: which allocation has an address, what is free beside it, what lies where.
//!
//! A table of cells of 2 MiB says whose addresses they are. It changes when something is mapped or unmapped, and not with allocations; which PBlock has a slot of a range changes with cuts and their healing, too.

use super::blocks::{BlockId, PBlockId, Place, RangeId, SBlockId};
use super::{PBlock, StitchingPool};
use crate::limits;
use crate::pool::AddressMap;
use crate::pool::laid::{Found, Laid, LaidState};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// Whose addresses each cell is.
#[derive(Debug, Default)]
pub(super) struct Cells(AddressMap<Cell>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cell {
    /// A slot of a range.
    Home(RangeId, u32),
    /// A stitched block's own.
    Alias(SBlockId),
}

/// Who has an address of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// An allocation.
    Live(Found),
    /// A slab, which begins here.
    Slab(DeviceAddress),
}

impl StitchingPool {
    fn cell_shift(&self) -> u32 {
        self.granule_shift.min(limits::CHUNK_LEN_MIN.get().trailing_zeros())
    }

    /// Notes whose the addresses of `span` are, or that they are nobody's any more.
    fn note_cells(&mut self, span: AddressSpan, cell: impl Fn(u64) -> Option<Cell>) {
        let shift = self.cell_shift();
        for at in 0..span.len().get() >> shift {
            let Some(address) = span.start().checked_add(Bytes::new(at << shift)) else { return };
            match cell(at << shift >> self.granule_shift) {
                Some(cell) => drop(self.cells.0.insert(address, cell)),
                None => drop(self.cells.0.remove(&address)),
            }
        }
    }

    /// A range has come: its slots are all of one PBlock.
    pub(super) fn note_range(&mut self, range: RangeId, block: PBlockId) {
        let mapping = &self.ranges[range].mapping;
        let (span, slots) = (mapping.span(), mapping.slot_count());
        self.note_cells(span, |slot| Some(Cell::Home(range, slot as u32)));
        self.ranges[range].owners = vec![block; slots];
    }

    /// The slots of a PBlock are its own.
    pub(super) fn note_owner(&mut self, block: PBlockId) {
        let PBlock { range, slots, .. } = &self.pblocks[block];
        let slots = slots.start as usize..slots.end as usize;
        self.ranges[*range].owners[slots].fill(block);
    }

    /// The addresses of a PBlock have no memory any more.
    pub(super) fn note_taken(&mut self, block: &PBlock) {
        if let Some(span) = Span::new(block.address, block.len) {
            self.note_cells(span, |_| None);
        }
    }

    /// An SBlock has come or goes: its own addresses, if it has any.
    pub(super) fn note_alias(&mut self, id: SBlockId, is_there: bool) {
        if let Place::Alias(mapping) = &self.sblocks[id].place {
            let span = mapping.span();
            self.note_cells(span, |_| is_there.then_some(Cell::Alias(id)));
        }
    }

    pub(super) fn forget_cells(&mut self) {
        self.cells.0.clear();
    }

    fn serving_span(&self, block: BlockId) -> Option<AddressSpan> {
        let (address, len) = match block {
            BlockId::P(id) => (self.pblocks[id].address, self.pblocks[id].len),
            BlockId::S(id) => (self.sblocks[id].address, self.sblocks[id].len),
        };
        Span::new(address, len).filter(|_| self.is_serving(block))
    }

    /// Who has `address`. The steps do not depend on how many blocks there are: as many as SBlocks show this place, and idle neighbours lie side by side.
    pub fn find(&self, address: DeviceAddress) -> Option<Holder> {
        let shift = self.cell_shift();
        let cell = self.cells.0.get(&DeviceAddress::new(address.get() >> shift << shift))?;
        let block = match *cell {
            Cell::Alias(id) => BlockId::S(id),
            Cell::Home(range, slot) => self.serving_at_home(self.ranges[range].owners[slot as usize])?,
        };
        let span = self.serving_span(block).filter(|span| span.contains(address))?;
        if self.sites.get(self.card(block).site).is_lent() {
            return Some(Holder::Slab(span.start()));
        }
        let (before, after) = self.idle_beside(block);
        Some(Holder::Live(Found { span, before, after }))
    }

    /// The block that serves where this PBlock lies.
    fn serving_at_home(&self, block: PBlockId) -> Option<BlockId> {
        let shown = self.pblocks[block].sblocks.iter().filter(|of| self.sblocks[**of].place.is_in_range());
        let mut all = std::iter::once(BlockId::P(block)).chain(shown.map(|of| BlockId::S(*of)));
        all.find(|block| self.is_serving(*block))
    }

    /// Idle bytes before and behind a block. A stitched block's addresses are all its own.
    fn idle_beside(&self, block: BlockId) -> (Bytes, Bytes) {
        let (first, last) = match block {
            BlockId::P(id) => (id, id),
            BlockId::S(id) => match (&self.sblocks[id].place, self.sblocks[id].parts.as_slice()) {
                (Place::InRange, [first, .., last]) => (*first, *last),
                (Place::InRange, [one]) => (*one, *one),
                _ => return (Bytes::ZERO, Bytes::ZERO),
            },
        };
        let beside = |from: PBlockId, next: fn(&PBlock) -> Option<PBlockId>| {
            let touches = |a: &PBlock, b: &PBlock| a.slots.end == b.slots.start || b.slots.end == a.slots.start;
            let step = |id: &PBlockId| {
                let neighbour = next(&self.pblocks[*id])?;
                let is_free = !self.is_busy(neighbour) && touches(&self.pblocks[*id], &self.pblocks[neighbour]);
                is_free.then_some(neighbour)
            };
            std::iter::successors(step(&from), step).map(|id| self.pblocks[id].len).sum::<Bytes>()
        };
        (beside(first, |block| block.before), beside(last, |block| block.after))
    }

    /// What lies where, range by range, and behind that every stitched block that is live, at its own addresses. Walks over all there is.
    pub fn laid(&self) -> (Vec<Vec<Laid>>, Vec<Vec<Laid>>) {
        let home = self.ranges.iter().map(|(_, range)| {
            let mut laid: Vec<Laid> = Vec::new();
            for id in self.blocks_of(range) {
                let block = &self.pblocks[id];
                // A block that serves in place is met with each of its parts, and told of with the first.
                if laid.last().is_some_and(|last| last.span.contains(block.address)) {
                    continue;
                }
                let serving = self.serving_at_home(id);
                let state = match serving {
                    Some(by) => self.state_of(by),
                    None if self.is_busy(id) => LaidState::Shown,
                    None => LaidState::Free,
                };
                let span = serving.and_then(|by| self.serving_span(by)).or_else(|| Span::new(block.address, block.len));
                laid.extend(span.map(|span| Laid { span, stream: block.stream, state }));
            }
            laid
        });
        let aliases = self.sblocks.iter().filter(|(_, block)| !block.place.is_in_range());
        let stitched = aliases.filter_map(|(id, block)| {
            let span = self.serving_span(BlockId::S(id))?;
            let stream = block.parts.first().map_or(crate::ids::StreamId::DEFAULT, |part| self.pblocks[*part].stream);
            Some(vec![Laid { span, stream, state: self.state_of(BlockId::S(id)) }])
        });
        (home.collect(), stitched.collect())
    }

    /// Ranges that there are.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    fn state_of(&self, serving: BlockId) -> LaidState {
        let site = self.sites.get(self.card(serving).site);
        if site.is_lent() { LaidState::Slab } else { LaidState::Live(site.bytes) }
    }

    /// Says what is wrong with the table; nothing, unless this module has a bug.
    pub(super) fn check_cells(&self) -> Result<(), String> {
        let mut expected = 0;
        for (id, block) in &self.pblocks {
            let owners = &self.ranges[block.range].owners;
            for slot in block.slots.clone() {
                if owners[slot as usize] != id {
                    return Err(format!("slot {slot} of a range is block {id}'s, and the table has another"));
                }
            }
            expected += block.len.get() >> self.cell_shift();
        }
        let aliased: Bytes = self.sblocks.iter().filter(|(_, of)| !of.place.is_in_range()).map(|(_, of)| of.len).sum();
        expected += aliased.get() >> self.cell_shift();
        if self.cells.0.len() as u64 != expected {
            return Err(format!("the table has {} cells, and blocks {expected}", self.cells.0.len()));
        }
        Ok(())
    }
}
