//! Chunks made visible back to back at one range of addresses.

use std::ops::Range;
use std::sync::Arc;

use super::{Chunk, Device, MemoryError, Reservation};
use crate::driver::{Access, DriverError};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, Span};

/// A run of chunks stitched into one range of addresses.
///
/// ```text
///   addresses   |   slot 0    |   slot 1    | slot 2 (taken) |   slot 3    |
///   chunks         chunk 17      chunk 4           –            chunk 90
/// ```
///
/// Slots can be taken out one run at a time, which leaves holes; addresses stay where they are. Dropping the mapping unmaps what is left and
/// gives the addresses back. Before anything is unmapped the device is synchronised, because drivers do not do that
/// reliably themselves. That is the device that owns the chunks, and no other: a peer that reaches them may have work queued, for which nobody waits here. Whoever has a peer use an
/// allocation waits for that before it frees it.
#[derive(Debug)]
pub struct Mapping {
    reservation: Reservation,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    start: DeviceAddress,
    len: Bytes,
    chunk: Option<Arc<Chunk>>,
}

impl Mapping {
    /// Stitches `chunks`, in their order, into fresh addresses with read and write access. All chunks are of one device, and there is at least
    /// one.
    ///
    /// reserve → map chunk 0 … n−1 → one set-access over the whole run; a failure undoes what came before it.
    pub fn stitch(chunks: &[Arc<Chunk>]) -> Result<Mapping, MemoryError> {
        let mut len = Bytes::ZERO;
        for chunk in chunks {
            len = len.checked_add(chunk.len()).ok_or(MemoryError::Unstitchable(len))?;
        }
        let device = chunks.first().ok_or(MemoryError::Unstitchable(len))?.device();
        let mut mapping =
            Mapping { reservation: Reservation::new(device, len)?, slots: Vec::with_capacity(chunks.len()) };
        let mut at = mapping.span().start();
        if device.capabilities().maps_when_quiet {
            device
                .driver()
                .synchronize(device.id())
                .map_err(MemoryError::of("wait for what runs before mapping", len))?;
        }
        for chunk in chunks {
            // An early return drops `mapping`, which unmaps the slots until here and gives the addresses back.
            device.driver().map(at, chunk.handle()).map_err(MemoryError::of("map a chunk of", chunk.len()))?;
            device.note_mapped(1);
            mapping.slots.push(Slot { start: at, len: chunk.len(), chunk: Some(Arc::clone(chunk)) });
            at = at.checked_add(chunk.len()).expect("the reservation holds all chunks");
        }
        assert_eq!(at, mapping.span().end(), "the slots fill the reservation");
        device
            .driver()
            .set_access(mapping.span(), device.id(), Access::ReadWrite)
            .map_err(MemoryError::of("set access to", len))?;
        Ok(mapping)
    }

    /// The addresses, holes included.
    pub fn span(&self) -> AddressSpan {
        self.reservation.span()
    }

    /// Where it lives.
    pub fn device(&self) -> &Arc<Device> {
        self.reservation.device()
    }

    /// Slots, taken ones included.
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// The chunk in a slot, unless it was taken.
    pub fn chunk(&self, slot: usize) -> Option<&Arc<Chunk>> {
        self.slots[slot].chunk.as_ref()
    }

    /// The addresses of a slot.
    pub fn slot_span(&self, slot: usize) -> AddressSpan {
        Span::new(self.slots[slot].start, self.slots[slot].len).expect("a slot lies in the reservation")
    }

    /// True when every slot was taken.
    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.chunk.is_none())
    }

    /// Unmaps a run of slots, none of them taken, and hands their chunks over. Nothing live may be in them. On failure nothing has changed.
    pub fn take(&mut self, slots: Range<usize>) -> Result<Vec<Arc<Chunk>>, MemoryError> {
        let run = self.run(slots.clone());
        self.unmap(run, slots.len()).map_err(MemoryError::of("unmap", run.len()))?;
        let taken = self.slots[slots].iter_mut();
        Ok(taken.map(|slot| slot.chunk.take().expect("no slot of the run was taken before")).collect())
    }

    /// The addresses of a run of slots.
    fn run(&self, slots: Range<usize>) -> AddressSpan {
        let start = self.slots[slots.start].start;
        let last = self.slot_span(slots.end - 1);
        let len = last.end().checked_distance(start).expect("slots lie in order");
        Span::new(start, len).expect("a run lies in the reservation")
    }

    /// Unmaps a run of so many slots.
    fn unmap(&self, span: AddressSpan, slots: usize) -> Result<(), DriverError> {
        self.device().driver().synchronize(self.device().id())?;
        self.device().driver().unmap(span)?;
        self.device().note_unmapped(slots);
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut at = 0;
        while at < self.slots.len() {
            let is_mapped = |slot: &Slot| slot.chunk.is_some();
            let len = self.slots[at..].iter().take_while(|slot| is_mapped(slot)).count();
            if len == 0 {
                at += 1;
                continue;
            }
            let run = self.run(at..at + len);
            if let Err(error) = self.unmap(run, len) {
                self.device().note_quarantined(run.len(), &error);
                // The chunks may still be visible: never release them, so that nobody else gets them from us.
                for chunk in self.slots[at..at + len].iter_mut().filter_map(|slot| slot.chunk.take()) {
                    chunk.note_stuck();
                    std::mem::forget(chunk);
                }
            }
            at += len;
        }
    }
}
