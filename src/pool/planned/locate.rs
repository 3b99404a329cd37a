//! Looking at the planned pool from outside: which allocation has an address, what is free beside it, what lies where.
//!
//! A plan does not change, so where its entries begin is put into cells of 2 MiB once, when somebody first asks; serving and taking back do nothing for it. A look goes over the entries of one cell.

use super::PlannedPool;
use super::places::Occupant;
use super::tenants::{self, LENT, whole_cell};
use crate::ids::StreamId;
use crate::limits;
use crate::pool::laid::{Found, Laid, LaidState, fill_gaps};
use crate::units::{Bytes, DeviceAddress, Place as _, PlanOffset, PlanSpan, Span};

/// A cell in units of allocation.
const CELL: u64 = tenants::CELL / limits::ALLOCATION_ALIGNMENT.get();

/// Where entries begin that have bytes of a cell, for each cell; in units of allocation, in order, each once.
#[derive(Debug)]
pub(super) struct Cells {
    firsts: Box<[u32]>,
    offsets: Box<[u32]>,
}

impl Cells {
    fn new(pool_len: Bytes, entries: impl Iterator<Item = (u32, u64)>) -> Cells {
        let mut longest: std::collections::BTreeMap<u32, u64> = std::collections::BTreeMap::new();
        for (offset, units) in entries {
            let known = longest.entry(offset).or_default();
            *known = units.max(*known);
        }
        let count = (pool_len.get() / limits::ALLOCATION_ALIGNMENT.get()).div_ceil(CELL) as usize;
        let mut lists = vec![Vec::new(); count];
        for (offset, units) in longest {
            let (first, last) = (u64::from(offset) / CELL, (u64::from(offset) + units.max(1) - 1) / CELL);
            (first..=last).for_each(|cell| lists[cell as usize].push(offset));
        }
        let mut firsts = vec![0_u32];
        firsts.extend(lists.iter().scan(0, |sum, list| {
            *sum += list.len() as u32;
            Some(*sum)
        }));
        Cells { firsts: firsts.into(), offsets: lists.concat().into() }
    }

    fn of(&self, cell: usize) -> &[u32] {
        &self.offsets[self.firsts[cell] as usize..self.firsts[cell + 1] as usize]
    }
}

impl PlannedPool {
    /// The stream that has the part of the pool at an address, once a request came on it.
    pub fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        let offset = address.checked_distance(self.span.start())?.get();
        let behind = self.parts.partition_point(|(part, _)| part.start <= offset);
        let (_, lane) = self.parts[..behind].last().filter(|(part, _)| offset < part.end)?;
        self.lanes.bound_stream(*lane as usize)
    }

    /// A lane is of another stream than this, or may come to be.
    pub fn has_other_streams(&self, stream: StreamId) -> bool {
        (0..self.lanes.count()).any(|lane| self.lanes.bound_stream(lane) != Some(stream))
    }

    /// Bytes of the parts of lanes that are of other streams than this, or may come to be.
    pub fn bytes_of_others(&self, stream: StreamId) -> Bytes {
        let is_other = |lane: u32| self.lanes.bound_stream(lane as usize) != Some(stream);
        let others = self.parts.iter().filter(|(_, lane)| is_other(*lane));
        Bytes::new(others.map(|(part, _)| part.end - part.start).sum())
    }

    /// Bytes that an allocation at `address` has, if it is a live one of this pool's.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        let offset = self.offset_of(address)?;
        let Some(place) = self.places.find(offset) else { return self.tenants.len_at(self.plan_offset(offset)) };
        match self.places.at(place) {
            Occupant::Nobody => None,
            Occupant::Entry(entry) => Some(self.offsets_of(entry).len()),
            Occupant::Tenant => self.tenants.len_at(self.plan_offset(offset)),
        }
    }

    /// The live allocation that has `address`: over the entries and tenants of its cell; what is free beside it takes a look at each cell that is free. The first time all of the plan is gone over.
    pub fn find(&mut self, address: DeviceAddress) -> Option<Found> {
        let offset = PlanOffset::new(address.checked_distance(self.span.start())?.get());
        if !self.span.contains(address) {
            return None;
        }
        if self.cells.is_none() {
            let units = |at: u32| self.offsets_of(at).len().get() / limits::ALLOCATION_ALIGNMENT.get();
            let offset = |at: u32| self.places.offset(self.entries[at as usize].place);
            let entries = (0..self.entries.len() as u32).map(|at| (offset(at), units(at)));
            self.cells = Some(Box::new(Cells::new(self.span.len(), entries)));
        }
        let cell = self.cell_of(offset);
        let span = self.live_in(cell).find(|span| span.contains(offset))?;
        // Nobody is served at what is lent.
        if self.tenants.has_lent(span) {
            return None;
        }
        let before = (0..=self.cell_of(span.start())).rev().find_map(|cell| {
            self.live_in(cell).filter(|other| other.end() <= span.start()).map(|other| other.end()).max()
        });
        let last = PlanOffset::new(span.end().get().saturating_sub(1));
        let after = (self.cell_of(last)..self.cell_count()).find_map(|cell| {
            self.live_in(cell).filter(|other| other.start() >= span.end()).map(|other| other.start()).min()
        });
        let start = before.unwrap_or(PlanOffset::new(0));
        let end = after.unwrap_or(PlanOffset::new(self.span.len().get()));
        let (before, after) = (span.start().checked_distance(start)?, end.checked_distance(span.end())?);
        Some(Found { span: self.addresses_of(span), before, after })
    }

    fn cell_of(&self, offset: PlanOffset) -> usize {
        (offset.get() / limits::ALLOCATION_ALIGNMENT.get() / CELL) as usize
    }

    fn cell_count(&self) -> usize {
        self.cells.as_ref().map_or(0, |cells| cells.firsts.len() - 1)
    }

    /// Live allocations that have bytes of a cell, in no order.
    fn live_in(&self, cell: usize) -> impl Iterator<Item = PlanSpan> + '_ {
        let offsets = self.cells.as_ref().map_or(&[][..], |cells| cells.of(cell));
        let orderly = offsets.iter().filter_map(|offset| match self.places.at(self.places.of(*offset)) {
            Occupant::Entry(entry) => Some(self.offsets_of(entry)),
            Occupant::Nobody | Occupant::Tenant => None,
        });
        let whole = whole_cell(cell as u32);
        orderly.filter(move |span| span.overlaps(whole)).chain(self.tenants.overlapping(whole))
    }

    /// What lies where, without what is not the pool's. Walks over all there is.
    pub fn laid(&self) -> Vec<Laid> {
        let stream = |lane: u32| self.lanes.stream(lane as usize);
        let orderly = self.orderly.iter().map(|at| {
            let entry = &self.entries[at as usize];
            (self.offsets_of(at), stream(entry.lane), entry.bytes)
        });
        let tenants = self.tenants.iter().map(|(span, bytes)| (span, StreamId::DEFAULT, bytes));
        let live = orderly.chain(tenants).map(|(span, stream, bytes)| Laid {
            span: self.addresses_of(span),
            stream,
            state: if bytes == LENT { LaidState::Shown } else { LaidState::Live(bytes) },
        });
        let mut live: Vec<Laid> = live.collect();
        live.sort_unstable_by_key(|laid| laid.span.start());
        let mut all = fill_gaps(self.span.start(), self.span.end(), live.into_iter(), |from, to| {
            let span = Span::new(from, to.checked_distance(from)?).filter(|span| !span.is_empty())?;
            Some(Laid { span, stream: StreamId::DEFAULT, state: LaidState::Free })
        });
        all.retain(|laid| laid.state != LaidState::Shown);
        all
    }
}
