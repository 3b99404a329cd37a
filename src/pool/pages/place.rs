//! A place: free runs of several chunks, shown side by side at addresses of their own.
//!
//! It owns no memory. Its slots are whole chunks; the first piece may begin in the middle of its
//! chunk, and the last may end in the middle of one. A place serves one allocation at a time, from
//! its first unit on.

use super::{UNIT, bytes_of, unit_at};
use crate::extents::Extents;
use crate::memory::Mapping;
use crate::units::{AddressSpan, DeviceAddress, Place as _, Span};

/// A part of a home, in units.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) units: u64,
}

#[derive(Debug)]
pub(super) struct Place {
    pub(super) mapping: Mapping,
    /// One for each slot, in the order of addresses.
    pub(super) pieces: Vec<Piece>,
    /// Where each slot's chunk has its home.
    pub(super) homes: Vec<u64>,
    pub(super) is_live: bool,
    /// The number of its last use.
    pub(super) used: u64,
    /// The piece that was not free when the place was last looked at, and the units before it.
    pub(super) busy: (usize, u64),
    /// The place that was occupied after this one the last time, which may be gone.
    pub(super) next: Option<usize>,
}

impl Place {
    /// Where it begins.
    pub(super) fn address(&self) -> DeviceAddress {
        let skipped = self.pieces[0].start - self.homes[0];
        let start = self.mapping.span().start();
        start.checked_add(bytes_of(skipped)).expect("the first piece lies in the first slot")
    }

    /// The addresses of its slots from this one on.
    pub(super) fn span_from(&self, slot: usize) -> AddressSpan {
        let start = self.mapping.chunks().nth(slot).map_or(self.mapping.span().end(), |(start, _)| start);
        let len = self.mapping.chunks_end().checked_distance(start).unwrap_or_default();
        Span::new(start, len).expect("slots lie in the mapping")
    }

    pub(super) fn units(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.units).sum()
    }

    /// The pieces that its first `units` units lie in.
    pub(super) fn first_pieces(&self, units: u64) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.iter().scan(units, |left, piece| {
            let units = piece.units.min(*left);
            *left -= units;
            (units > 0).then_some(Piece { units, ..*piece })
        })
    }

    /// Whether its first `units` units are free. The piece that was not the last time is looked at first.
    pub(super) fn is_free(&mut self, units: u64, free: &Extents) -> bool {
        let is_taken =
            |piece: &Piece, before| before < units && !free.covers(piece.start, piece.units.min(units - before));
        let (busy, before) = self.busy;
        if self.is_live || self.pieces.get(busy).is_some_and(|piece| is_taken(piece, before)) {
            return false;
        }
        let mut before = 0;
        for (at, piece) in self.pieces.iter().enumerate() {
            if is_taken(piece, before) {
                self.busy = (at, before);
                return false;
            }
            before += piece.units;
        }
        true
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        let slots = self.mapping.chunk_count();
        if self.pieces.len() != slots || self.homes.len() != slots || slots == 0 {
            return Err(format!("{} pieces and {} homes in {slots} slots", self.pieces.len(), self.homes.len()));
        }
        let last = self.pieces.len() - 1;
        let chunks = self.mapping.chunks().map(|(_, chunk)| chunk.len().get() / UNIT);
        for (slot, ((piece, home), chunk)) in self.pieces.iter().zip(&self.homes).zip(chunks).enumerate() {
            let begins = piece.start == *home || slot == 0 && piece.start > *home;
            let ends =
                piece.start + piece.units == home + chunk || slot == last && piece.start + piece.units < home + chunk;
            if !begins || !ends || piece.units == 0 {
                return Err(format!("piece {slot} leaves a gap"));
            }
        }
        let from = unit_at(self.address());
        let slots = unit_at(self.mapping.span().end()) - from;
        if self.units() > slots { Err("it is longer than its addresses".to_owned()) } else { Ok(()) }
    }
}
