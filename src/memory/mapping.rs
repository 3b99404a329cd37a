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
/// Slots can be taken out one run at a time, which leaves holes, and chunks of the same size put into holes; addresses stay where they are. A mapping that is made empty ([`Mapping::empty`]) has a hole for
/// every granule. Dropping the mapping unmaps what is left and
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
    /// [`Mapping::stitch_as`] with read and write access.
    pub fn stitch(chunks: &[Arc<Chunk>]) -> Result<Mapping, MemoryError> {
        Mapping::stitch_as(chunks, Access::ReadWrite)
    }

    /// Stitches `chunks`, in their order, into fresh addresses that may be used so. All chunks are of one device, and there is at least
    /// one.
    ///
    /// reserve → map chunk 0 … n−1 → one set-access over the whole run; a failure undoes what came before it.
    pub fn stitch_as(chunks: &[Arc<Chunk>], access: Access) -> Result<Mapping, MemoryError> {
        let mut len = Bytes::ZERO;
        for chunk in chunks {
            len = len.checked_add(chunk.len()).ok_or(MemoryError::Unstitchable(len))?;
        }
        let device = chunks.first().ok_or(MemoryError::Unstitchable(len))?.device();
        let mut mapping =
            Mapping { reservation: Reservation::new(device, len)?, slots: Vec::with_capacity(chunks.len()) };
        let mut at = mapping.span().start();
        wait_where_needed(device, len)?;
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
            .set_access(mapping.span(), device.id(), access)
            .map_err(MemoryError::of("set access to", len))?;
        Ok(mapping)
    }

    /// Addresses for `len` bytes with no slots yet: [`Mapping::put`] makes them, one behind the other.
    pub fn empty(device: &Arc<Device>, len: Bytes) -> Result<Mapping, MemoryError> {
        Ok(Mapping { reservation: Reservation::new(device, len)?, slots: Vec::new() })
    }

    /// Addresses for `count` slots of `len` bytes each, all of them holes, and behind them for `room` bytes with no slots yet.
    pub fn hollow(device: &Arc<Device>, len: Bytes, count: usize, room: Bytes) -> Result<Mapping, MemoryError> {
        let whole = len.checked_mul(count as u64).and_then(|slots| slots.checked_add(room));
        let whole = whole.ok_or(MemoryError::Unstitchable(Bytes::LARGEST))?;
        let reservation = Reservation::new(device, whole)?;
        let start = |slot: usize| reservation.span().start().checked_add(Bytes::new(slot as u64 * len.get()));
        let slot = |slot| Slot { start: start(slot).expect("it lies in the reservation"), len, chunk: None };
        let slots = (0..count).map(slot).collect();
        Ok(Mapping { reservation, slots })
    }

    /// Maps chunks into slots that were taken, or behind the last, from slot `first` on, with read and write access. All are of the size of the slots, and they fit the addresses. On failure nothing has
    /// changed, but for chunks that could not be unmapped again: those are stuck.
    pub fn put(&mut self, first: usize, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        self.put_as(first, chunks, Access::ReadWrite)
    }

    /// [`Mapping::put`], for chunks that may be used so.
    pub fn put_as(&mut self, first: usize, chunks: &[Arc<Chunk>], access: Access) -> Result<(), MemoryError> {
        let slots = first..first + chunks.len();
        let count = self.slots.len();
        for chunk in chunks.iter().skip(count - first) {
            let start = self.slots.last().map_or(self.span().start(), |last| {
                last.start.checked_add(last.len).expect("it lies in the reservation")
            });
            let ends = start.checked_add(chunk.len()).is_some_and(|end| end <= self.span().end());
            assert!(ends, "the slots fit the reservation");
            self.slots.push(Slot { start, len: chunk.len(), chunk: None });
        }
        let fits = |(slot, chunk): (&Slot, &Arc<Chunk>)| slot.chunk.is_none() && slot.len == chunk.len();
        assert!(self.slots[slots.clone()].iter().zip(chunks).all(fits), "chunks go into holes of their size");
        self.fill(slots.clone(), chunks, access).inspect_err(|_| {
            let done = slots.clone().take_while(|slot| self.slots[*slot].chunk.is_some()).count();
            self.take_back(first..first + done);
            self.slots.iter_mut().skip(first).take(done).for_each(|slot| slot.chunk = None);
            self.slots.truncate(count);
        })
    }

    /// Maps chunks into slots that have none, and lets them be used.
    fn fill(&mut self, slots: Range<usize>, chunks: &[Arc<Chunk>], access: Access) -> Result<(), MemoryError> {
        let device = Arc::clone(self.device());
        let run = self.run(slots.clone());
        wait_where_needed(&device, run.len())?;
        for (slot, chunk) in slots.zip(chunks) {
            let mapped = device.driver().map(self.slots[slot].start, chunk.handle());
            mapped.map_err(MemoryError::of("map a chunk of", chunk.len()))?;
            device.note_mapped(1);
            self.slots[slot].chunk = Some(Arc::clone(chunk));
        }
        let allowed = device.driver().set_access(run, device.id(), access);
        allowed.map_err(MemoryError::of("set access to", run.len()))
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

    /// The chunks of all slots that were not taken.
    pub fn chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.slots.iter().filter_map(|slot| slot.chunk.as_ref())
    }

    /// The chunks of a run of slots that were not taken: where each is, and the chunk.
    pub fn chunks_in(&self, slots: Range<usize>) -> Vec<(DeviceAddress, Arc<Chunk>)> {
        self.slots[slots].iter().filter_map(|slot| Some((slot.start, Arc::clone(slot.chunk.as_ref()?)))).collect()
    }

    /// The addresses of a slot.
    pub fn slot_span(&self, slot: usize) -> AddressSpan {
        Span::new(self.slots[slot].start, self.slots[slot].len).expect("a slot lies in the reservation")
    }

    /// The slots that a part of the addresses lies in.
    pub fn slots_at(&self, span: AddressSpan) -> Range<usize> {
        let first = self.slots.partition_point(|slot| slot.start <= span.start()).saturating_sub(1);
        first..self.slots.partition_point(|slot| slot.start < span.end())
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

    /// Forgets slots at the end whose chunks were taken: their addresses are for new slots.
    pub fn forget_last_holes(&mut self) {
        let holes = self.slots.iter().rev().take_while(|slot| slot.chunk.is_none()).count();
        self.slots.truncate(self.slots.len() - holes);
    }

    /// The addresses of a run of slots.
    fn run(&self, slots: Range<usize>) -> AddressSpan {
        let start = self.slots[slots.start].start;
        let last = self.slot_span(slots.end - 1);
        let len = last.end().checked_distance(start).expect("slots lie in order");
        Span::new(start, len).expect("a run lies in the reservation")
    }

    /// Unmaps a run of slots, none of them taken, for whom no failure may stop: what may still be visible is never released, so that nobody else gets it from us.
    fn take_back(&mut self, slots: Range<usize>) {
        if slots.is_empty() {
            return;
        }
        let run = self.run(slots.clone());
        if let Err(error) = self.unmap(run, slots.len()) {
            self.device().note_quarantined(run.len(), &error);
            for chunk in self.slots[slots].iter_mut().filter_map(|slot| slot.chunk.take()) {
                chunk.note_stuck();
                std::mem::forget(chunk);
            }
        }
    }

    /// Unmaps a run of so many slots.
    fn unmap(&self, span: AddressSpan, slots: usize) -> Result<(), DriverError> {
        self.device().driver().synchronize(self.device().id())?;
        self.device().driver().unmap(span)?;
        self.device().note_unmapped(slots);
        Ok(())
    }
}

/// Some devices take memory only while nothing runs.
fn wait_where_needed(device: &Arc<Device>, len: Bytes) -> Result<(), MemoryError> {
    if device.capabilities().maps_when_quiet {
        let waited = device.driver().synchronize(device.id());
        waited.map_err(MemoryError::of("wait for what runs before mapping", len))?;
    }
    Ok(())
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
            self.take_back(at..at + len);
            at += len;
        }
    }
}
