//! A place: free runs of several chunks, shown side by side at addresses of their own.
//!
//! It owns no memory. Its slots are whole chunks; the first piece may begin in the middle of its
//! chunk, and the last may end in the middle of one. A place serves one allocation at a time, from
//! its first unit on.

use super::{UNIT, bytes_of, unit_at};
use crate::memory::Mapping;
use crate::units::{DeviceAddress, Place as _};

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
}

impl Place {
    /// Where it begins.
    pub(super) fn address(&self) -> DeviceAddress {
        let skipped = self.pieces[0].start - self.homes[0];
        let start = self.mapping.span().start();
        start.checked_add(bytes_of(skipped)).expect("the first piece lies in the first slot")
    }

    pub(super) fn units(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.units).sum()
    }

    /// The pieces that its first `units` units lie in.
    pub(super) fn first_pieces(&self, units: u64) -> Vec<Piece> {
        let mut left = units;
        let mut pieces = Vec::new();
        for piece in &self.pieces {
            if left == 0 {
                break;
            }
            let units = piece.units.min(left);
            pieces.push(Piece { units, ..*piece });
            left -= units;
        }
        pieces
    }

    pub(super) fn invariants(&self) -> Result<(), String> {
        if self.pieces.len() != self.homes.len() || self.pieces.is_empty() {
            return Err(format!("{} pieces in {} slots", self.pieces.len(), self.homes.len()));
        }
        let last = self.pieces.len() - 1;
        for (slot, (piece, home)) in self.pieces.iter().zip(&self.homes).enumerate() {
            let chunk = self.mapping.slot_span(slot).len().get() / UNIT;
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
