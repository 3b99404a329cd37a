//! Looking at the small pool from outside: which allocation has an address, what is free beside it, what lies where.

use super::{Extent, SmallPool, bytes_of};
use crate::pool::laid::{Found, Laid, LaidState};
use crate::units::{Bytes, DeviceAddress, Span};

impl SmallPool {
    /// The live allocation of the slab at `slab` that has `address`: one step for its first byte, and for those behind as many as its slab has pieces, at most.
    pub fn find(&self, slab: DeviceAddress, address: DeviceAddress) -> Option<Found> {
        let of_first_byte = self.live.get(&address).copied();
        let id =
            of_first_byte.or_else(|| self.pieces(slab).find(|id| span_of(&self.extents[*id]).contains(address)))?;
        let extent = &self.extents[id];
        let free = |id: Option<usize>| {
            let neighbour = id.map(|id| &self.extents[id]).filter(|extent| !extent.is_live);
            neighbour.map_or(Bytes::ZERO, |extent| bytes_of(extent.units))
        };
        let found = Found { span: span_of(extent), before: free(extent.before), after: free(extent.after) };
        Some(found).filter(|_| extent.is_live)
    }

    /// What lies in the slab at `slab`.
    pub fn laid(&self, slab: DeviceAddress) -> Vec<Laid> {
        let laid = |id: usize| {
            let extent = &self.extents[id];
            let state = if extent.is_live { LaidState::Live(extent.bytes) } else { LaidState::Free };
            Laid { span: span_of(extent), stream: extent.arena.stream, state }
        };
        self.pieces(slab).map(laid).collect()
    }

    /// Slabs that there are.
    pub fn slab_count(&self) -> usize {
        self.slabs.len()
    }

    /// The extents of a slab, in the order of addresses.
    fn pieces(&self, slab: DeviceAddress) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.slabs.get(&slab).copied(), |id| self.extents[*id].after)
    }
}

fn span_of(extent: &Extent) -> crate::units::AddressSpan {
    Span::new(extent.start, bytes_of(extent.units)).expect("an extent lies in its slab")
}
