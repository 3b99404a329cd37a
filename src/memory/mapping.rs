//! Chunks made visible back to back at one range of addresses.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Chunk, Device, MemoryError, Reservation};
use crate::driver::{Access, DriverError};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, Span};

/// Chunks stitched into one range of addresses.
///
/// ```text
///   addresses   |  8 MiB  |       24 MiB       |  (hole)  |  8 MiB  |
///   chunks        chunk 17       chunk 4                    chunk 90
/// ```
///
/// Runs of chunks can be taken out, which leaves holes, and others of any length put into holes;
/// addresses stay where they are. A mapping that is made by [`Mapping::reserve`] is all hole.
/// Dropping the mapping unmaps what is left and gives the addresses back.
///
/// Before anything is unmapped the device is synchronised, because drivers do not do that reliably
/// themselves. That is the device that owns the chunks, and no other: a peer that reaches them may
/// have work queued, which the caller waits for before it frees the allocation.
#[derive(Debug)]
pub struct Mapping {
    reservation: Reservation,
    /// By the address where each begins. Dropped after the reservation: what is unmapped is released
    /// last.
    chunks: BTreeMap<DeviceAddress, Arc<Chunk>>,
}

impl Mapping {
    /// [`Mapping::stitch_as`] with read and write access.
    pub fn stitch(chunks: &[Arc<Chunk>]) -> Result<Mapping, MemoryError> {
        Mapping::stitch_as(chunks, Access::ReadWrite)
    }

    /// Stitches `chunks`, in their order, into fresh addresses with this access. All chunks are of one
    /// device, and there is at least one.
    ///
    /// reserve → map chunk 0 … n−1 → one set-access over the whole run; a failure undoes what came before it.
    pub fn stitch_as(chunks: &[Arc<Chunk>], access: Access) -> Result<Mapping, MemoryError> {
        let mut len = Bytes::ZERO;
        for chunk in chunks {
            len = len.checked_add(chunk.len()).ok_or(MemoryError::Unstitchable(len))?;
        }
        let device = chunks.first().ok_or(MemoryError::Unstitchable(len))?.device();
        let mut mapping = Mapping::reserve(device, len)?;
        // An early return drops `mapping`, which unmaps what was mapped and gives the addresses back.
        mapping.map(mapping.span(), chunks, access)?;
        Ok(mapping)
    }

    /// Addresses for `len` bytes, without memory: [`Mapping::put`] brings it.
    pub fn reserve(device: &Arc<Device>, len: Bytes) -> Result<Mapping, MemoryError> {
        Ok(Mapping { reservation: Reservation::new(device, len)?, chunks: BTreeMap::new() })
    }

    /// Maps chunks side by side from `start` on, with read and write access. They fit into a hole
    /// there. On failure nothing has changed, but for chunks that could not be unmapped again: those
    /// are stuck.
    pub fn put(&mut self, start: DeviceAddress, chunks: &[Arc<Chunk>]) -> Result<(), MemoryError> {
        self.put_as(start, chunks, Access::ReadWrite)
    }

    /// [`Mapping::put`] with this access.
    pub fn put_as(&mut self, start: DeviceAddress, chunks: &[Arc<Chunk>], access: Access) -> Result<(), MemoryError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let run = Span::new(start, len).filter(|run| self.is_hole(*run)).expect("chunks go into a hole");
        self.map(run, chunks, access).inspect_err(|_| {
            self.take_back(run);
            self.remove(run);
        })
    }

    /// Maps chunks, which fill the run, and lets them be used.
    fn map(&mut self, run: AddressSpan, chunks: &[Arc<Chunk>], access: Access) -> Result<(), MemoryError> {
        let device = Arc::clone(self.device());
        wait_where_needed(&device, run.len())?;
        let mut at = run.start();
        for chunk in chunks {
            let mapped = device.driver().map(at, chunk.handle());
            mapped.map_err(MemoryError::of("map a chunk of", chunk.len()))?;
            device.note_mapped(1);
            self.chunks.insert(at, Arc::clone(chunk));
            at = at.checked_add(chunk.len()).expect("the run holds all chunks");
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

    /// The chunk that begins at this address.
    pub fn chunk(&self, start: DeviceAddress) -> Option<&Arc<Chunk>> {
        self.chunks.get(&start)
    }

    /// All chunks, by the addresses where they begin.
    pub fn chunks(&self) -> impl DoubleEndedIterator<Item = (DeviceAddress, &Arc<Chunk>)> {
        self.chunks.iter().map(|(start, chunk)| (*start, chunk))
    }

    /// The chunks that have a part of `span`: where each begins, and the chunk.
    pub fn chunks_in(&self, span: AddressSpan) -> impl Iterator<Item = (DeviceAddress, &Arc<Chunk>)> {
        let first = self.chunks.range(..=span.start()).next_back();
        let first = first.filter(|(start, chunk)| span_of(**start, chunk).contains(span.start()));
        let from = first.map_or(span.start(), |(start, _)| *start);
        self.chunks.range(from..span.end()).map(|(start, chunk)| (*start, chunk))
    }

    /// The address behind the last chunk; the first one where there is none.
    pub fn chunks_end(&self) -> DeviceAddress {
        let last = self.chunks.last_key_value();
        last.map_or(self.span().start(), |(start, chunk)| span_of(*start, chunk).end())
    }

    /// It has no chunk.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// How many chunks it has.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    fn is_hole(&self, span: AddressSpan) -> bool {
        let is_inside = self.span().start() <= span.start() && span.end() <= self.span().end();
        is_inside && self.chunks_in(span).next().is_none()
    }

    /// Unmaps a run, which begins and ends with a chunk and has no hole, and hands its chunks over.
    /// Nothing live may be in them. On failure nothing has changed.
    pub fn take(&mut self, run: AddressSpan) -> Result<Vec<Arc<Chunk>>, MemoryError> {
        let count = self.chunks_in(run).count();
        self.unmap(run, count).map_err(MemoryError::of("unmap", run.len()))?;
        Ok(self.remove(run))
    }

    /// [`Mapping::take`] of everything, for a mapping without holes.
    pub fn take_all(&mut self) -> Result<Vec<Arc<Chunk>>, MemoryError> {
        self.take(self.span())
    }

    fn remove(&mut self, run: AddressSpan) -> Vec<Arc<Chunk>> {
        let starts: Vec<DeviceAddress> = self.chunks.range(run.start()..run.end()).map(|(start, _)| *start).collect();
        starts.iter().filter_map(|start| self.chunks.remove(start)).collect()
    }

    /// Runs without holes that all chunks are in.
    fn runs(&self) -> Vec<AddressSpan> {
        let mut runs: Vec<AddressSpan> = Vec::new();
        for (start, chunk) in self.chunks() {
            match runs.last_mut().filter(|last| last.end() == start) {
                Some(last) => *last = Span::new(last.start(), last.len() + chunk.len()).expect("runs end"),
                None => runs.push(span_of(start, chunk)),
            }
        }
        runs
    }

    /// Unmaps the chunks at the start of a run, as far as they were mapped, whatever fails. What may
    /// still be visible is never released: its next owner's bytes would be visible here.
    fn take_back(&mut self, run: AddressSpan) {
        let chunks = self.chunks.range(run.start()..run.end());
        let (count, len) = chunks.fold((0, Bytes::ZERO), |(count, len), (_, chunk)| (count + 1, len + chunk.len()));
        let Some(mapped) = Span::new(run.start(), len).filter(|_| count > 0) else { return };
        if let Err(error) = self.unmap(mapped, count) {
            self.device().note_quarantined(len, &error);
            for chunk in self.remove(mapped) {
                chunk.note_stuck();
                std::mem::forget(chunk);
            }
        }
    }

    /// Unmaps a run of so many chunks.
    fn unmap(&self, span: AddressSpan, chunks: usize) -> Result<(), DriverError> {
        self.device().driver().synchronize(self.device().id())?;
        self.device().driver().unmap(span)?;
        self.device().note_unmapped(chunks);
        Ok(())
    }
}

fn span_of(start: DeviceAddress, chunk: &Chunk) -> AddressSpan {
    Span::new(start, chunk.len()).expect("a chunk lies in the reservation")
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
        for run in self.runs() {
            self.take_back(run);
        }
    }
}
