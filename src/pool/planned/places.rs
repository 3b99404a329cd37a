//! Who is at each offset of the plan: an open-addressed table with linear probing, made once. The key is the offset in units of allocation.
//!
//! Not for: whom the plan does not know, who may be anywhere ([`super::tenants`]).

/// Who is at an offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Occupant {
    Nobody,
    /// An orderly allocation, served for this entry.
    Entry(u32),
    Tenant,
}

pub(super) const NOBODY: u32 = u32::MAX;
pub(super) const TENANT: u32 = u32::MAX - 1;
pub(super) const NO_KEY: u32 = u32::MAX;

/// The table.
#[derive(Debug)]
pub(super) struct Places {
    cells: Box<[(u32, u32)]>,
    shift: u32,
}

impl Places {
    pub(super) fn new(offsets: impl Iterator<Item = u32> + Clone) -> Places {
        let count = offsets.clone().collect::<std::collections::BTreeSet<_>>().len();
        let len = (count * 2).next_power_of_two().max(2);
        let mut places =
            Places { cells: vec![(NO_KEY, NOBODY); len].into_boxed_slice(), shift: 32 - len.trailing_zeros() };
        for offset in offsets {
            let at = places.probe(offset);
            places.cells[at].0 = offset;
        }
        places
    }

    /// The cell of `offset`, or the empty one where it would go.
    #[inline]
    fn probe(&self, offset: u32) -> usize {
        let mut at = (offset.wrapping_mul(0x9e37_79b1) >> self.shift) as usize;
        while self.cells[at].0 != offset && self.cells[at].0 != NO_KEY {
            at = (at + 1) & (self.cells.len() - 1);
        }
        at
    }

    pub(super) fn find(&self, offset: u32) -> Option<u32> {
        let at = self.probe(offset);
        (self.cells[at].0 == offset).then_some(at as u32)
    }

    /// The cell of an offset of the plan.
    pub(super) fn of(&self, offset: u32) -> u32 {
        self.probe(offset) as u32
    }

    /// The cell of an offset: that, and who is there, [`NOBODY`], [`TENANT`] or an entry. Some other one where the plan has no such offset.
    #[inline]
    pub(super) fn near(&mut self, offset: u32) -> &mut (u32, u32) {
        let at = self.probe(offset);
        &mut self.cells[at]
    }

    pub(super) fn offset(&self, place: u32) -> u32 {
        self.cells[place as usize].0
    }

    pub(super) fn at(&self, place: u32) -> Occupant {
        match self.cells[place as usize].1 {
            NOBODY => Occupant::Nobody,
            TENANT => Occupant::Tenant,
            entry => Occupant::Entry(entry),
        }
    }

    pub(super) fn set(&mut self, place: u32, occupant: Occupant) {
        self.cells[place as usize].1 = match occupant {
            Occupant::Nobody => NOBODY,
            Occupant::Tenant => TENANT,
            Occupant::Entry(entry) => entry,
        };
    }
}
