//! Who serves at an address. Several blocks may begin there, one of them serves at a time: so a free finds its block by one look-up in a table that neither
//! allocations nor frees change.
//!
//! The table is open-addressed with linear probing, and its cells are the sites themselves: a look-up is one cache line.

use super::cards::CardId;
use crate::units::{Bytes, DeviceAddress};

/// Which cell of the table; another one after [`Sites::make_room`].
pub(super) type SiteId = u32;

/// An address at which blocks begin.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct Site {
    /// [`NOWHERE`] in a cell that was never used.
    pub(super) address: DeviceAddress,
    /// Bytes as asked for by whoever is served.
    pub(super) bytes: Bytes,
    serving: CardId,
    /// How many blocks begin here. With none the cell is free for the same address, and from the next [`Sites::make_room`] on for any.
    blocks: u32,
    /// The block that serves as a slab of the small pool: a free does not know it, for the first allocation in a slab has its address.
    lent: CardId,
}

const _: () = assert!(size_of::<Site>() == 32);

const NOBODY: CardId = CardId::MAX;
/// Nothing is ever mapped there.
const NOWHERE: DeviceAddress = DeviceAddress::new(0);

impl Site {
    fn new(address: DeviceAddress) -> Site {
        Site { address, bytes: Bytes::ZERO, serving: NOBODY, blocks: 0, lent: NOBODY }
    }

    /// The block that serves here, as a slab or not.
    pub(super) fn serving(&self) -> Option<CardId> {
        let card = if self.serving == NOBODY { self.lent } else { self.serving };
        (card != NOBODY).then_some(card)
    }

    /// The block of this card serves here now; says where that is.
    #[inline]
    pub(super) fn serve(&mut self, card: CardId, bytes: Bytes) -> DeviceAddress {
        (self.serving, self.bytes) = (card, bytes);
        self.address
    }

    /// The block that serves here, slabs apart, serves no longer.
    #[inline]
    pub(super) fn retire(&mut self) -> Option<CardId> {
        let card = std::mem::replace(&mut self.serving, NOBODY);
        (card != NOBODY).then_some(card)
    }

    /// The block that serves here is a slab from now on. False if there is none.
    pub(super) fn lend(&mut self) -> bool {
        self.lent = self.serving;
        self.serving = NOBODY;
        self.lent != NOBODY
    }

    /// The slab serves no longer.
    pub(super) fn take_back(&mut self) -> Option<CardId> {
        self.serving = std::mem::replace(&mut self.lent, NOBODY);
        self.retire()
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent != NOBODY
    }
}

#[derive(Debug)]
pub(super) struct Sites {
    /// A power of two of them, at most half of them used.
    cells: Box<[Site]>,
    shift: u32,
    /// Cells that are or were somebody's.
    used: usize,
}

impl Default for Sites {
    fn default() -> Sites {
        Sites::with(64)
    }
}

impl Sites {
    fn with(len: usize) -> Sites {
        Sites { cells: vec![Site::new(NOWHERE); len].into_boxed_slice(), shift: 64 - len.trailing_zeros(), used: 0 }
    }

    /// The cell of `address`, or the unused one behind all where it could be.
    #[inline]
    fn probe(&self, address: DeviceAddress) -> usize {
        // Chunks are of 64 KiB at least, and blocks begin where one does.
        let mut at = ((address.get() >> 16).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        while self.cells[at].address != address && self.cells[at].address != NOWHERE {
            at = (at + 1) & (self.cells.len() - 1);
        }
        at
    }

    /// Makes room for one more. Where that moved the sites it says where each is now, by where it was.
    pub(super) fn make_room(&mut self) -> Option<Vec<SiteId>> {
        if (self.used + 1) * 2 <= self.cells.len() {
            return None;
        }
        let there = self.cells.iter().filter(|site| site.blocks > 0).count();
        let mut sites = Sites::with(((there + 1) * 4).next_power_of_two());
        let mut moved = vec![SiteId::MAX; self.cells.len()];
        for (from, site) in self.cells.iter().enumerate().filter(|(_, site)| site.blocks > 0) {
            let to = sites.probe(site.address);
            sites.cells[to] = *site;
            sites.used += 1;
            moved[from] = to as SiteId;
        }
        *self = sites;
        Some(moved)
    }

    /// A block begins at `address`; there is room.
    pub(super) fn insert(&mut self, address: DeviceAddress) -> SiteId {
        let at = self.probe(address);
        if self.cells[at].address == NOWHERE {
            self.used += 1;
        }
        if self.cells[at].blocks == 0 {
            self.cells[at] = Site::new(address);
        }
        self.cells[at].blocks += 1;
        at as SiteId
    }

    /// One block less begins there.
    pub(super) fn remove(&mut self, id: SiteId) {
        self.cells[id as usize].blocks -= 1;
    }

    /// The site of an address at which blocks begin, or began.
    #[inline]
    pub(super) fn find(&mut self, address: DeviceAddress) -> Option<&mut Site> {
        let at = self.probe(address);
        Some(&mut self.cells[at]).filter(|site| site.address == address)
    }

    #[inline]
    pub(super) fn get(&self, id: SiteId) -> &Site {
        &self.cells[id as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: SiteId) -> &mut Site {
        &mut self.cells[id as usize]
    }

    /// Who serves at `address`, slabs apart.
    pub(super) fn serving_at(&self, address: DeviceAddress) -> Option<CardId> {
        let site = &self.cells[self.probe(address)];
        Some(site.serving).filter(|card| site.address == address && *card != NOBODY)
    }

    /// Those where somebody is served, slabs among them.
    pub(super) fn live(&self) -> impl Iterator<Item = (&Site, CardId)> {
        self.cells.iter().filter_map(|site| Some((site, site.serving()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u64) -> DeviceAddress {
        DeviceAddress::new(n << 21)
    }

    #[test]
    fn a_site_lasts_as_long_as_a_block_begins_there() {
        let mut sites = Sites::default();
        let id = sites.insert(at(1));
        assert_eq!(sites.insert(at(1)), id);
        sites.get_mut(id).serve(7, Bytes::mib(2));
        assert_eq!(sites.live().map(|(site, card)| (site.address, card)).collect::<Vec<_>>(), [(at(1), 7)]);
        sites.remove(id);
        assert_eq!((sites.serving_at(at(1)), sites.serving_at(at(2))), (Some(7), None));
        sites.get_mut(id).retire();
        sites.remove(id);
        assert_eq!((sites.serving_at(at(1)), sites.live().count()), (None, 0));
    }

    #[test]
    fn many_sites_come_and_go_and_are_found_again() {
        let mut sites = Sites::default();
        // By address, where each is, and that it says so itself.
        let mut known = std::collections::BTreeMap::new();
        let mut rng = crate::rng::Rng::new(3);
        for step in 0..20_000_u32 {
            let address = at(1 + rng.below(500));
            match known.remove(&address) {
                Some((id, card)) => {
                    assert_eq!(sites.serving_at(address), Some(card));
                    sites.get_mut(id).retire();
                    sites.remove(id);
                }
                None => {
                    if let Some(moved) = sites.make_room() {
                        known.values_mut().for_each(|(id, _)| *id = moved[*id as usize]);
                    }
                    let id = sites.insert(address);
                    assert_eq!(sites.get(id).serving(), None);
                    sites.get_mut(id).serve(step, Bytes::mib(2));
                    known.insert(address, (id, step));
                }
            }
            assert!(sites.cells.len() <= 4096, "what went makes room");
        }
        assert_eq!(sites.live().count(), known.len());
        assert!(known.iter().all(|(address, (_, card))| sites.serving_at(*address) == Some(*card)));
    }
}
