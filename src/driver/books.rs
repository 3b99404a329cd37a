//! The rules of a virtual memory driver as a table: which addresses are reserved, which chunk is mapped where with what access, who
//! still refers to a chunk. The drivers without hardware keep it and ask it before they touch anything.
//!
//! Not for: memory itself. Each action comes in two steps, a check that changes nothing and a commit that cannot fail, so that a
//! driver can do the real work in between and leave no trace when that fails.
//!
//! Invariant: mappings never overlap, and each lies inside exactly one reservation.

use std::collections::{BTreeMap, HashMap};

use super::{Access, Cause, Handle};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

/// A chunk inside one driver. It outlives its handles while mappings remain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct ChunkKey(pub(super) u64);

#[derive(Debug)]
struct Refs {
    len: Bytes,
    handles: u64,
    mappings: u64,
}

#[derive(Debug)]
struct Mapped {
    len: Bytes,
    chunk: ChunkKey,
    access: Access,
}

/// The table.
#[derive(Debug)]
pub(super) struct Books {
    granularity: Bytes,
    alias: bool,
    mappings_max: u64,
    reservations: BTreeMap<u64, Bytes>,
    mappings: BTreeMap<u64, Mapped>,
    handles: HashMap<Handle, ChunkKey>,
    chunks: HashMap<ChunkKey, Refs>,
    next: u64,
}

fn span(start: u64, len: Bytes) -> AddressSpan {
    Span::new(DeviceAddress::new(start), len).expect("what the books hold fits the address space")
}

impl Books {
    pub(super) fn new(granularity: Bytes, alias: bool, mappings_max: u64) -> Books {
        Books {
            granularity,
            alias,
            mappings_max,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            handles: HashMap::new(),
            chunks: HashMap::new(),
            next: 1,
        }
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// `len` is a size that a chunk, reservation or mapping can have.
    pub(super) fn check_len(&self, what: &'static str, len: Bytes) -> Result<(), Cause> {
        if len.is_zero() || !len.is_multiple_of(self.granularity) || len > Bytes::MAX.round_down(self.granularity) {
            return Err(Cause::Misaligned { what, value: len.get(), unit: self.granularity });
        }
        Ok(())
    }

    /// A new chunk with its first handle.
    pub(super) fn add_chunk(&mut self, len: Bytes) -> (Handle, ChunkKey) {
        let chunk = ChunkKey(self.next());
        let handle = Handle(self.next());
        self.chunks.insert(chunk, Refs { len, handles: 1, mappings: 0 });
        self.handles.insert(handle, chunk);
        (handle, chunk)
    }

    /// One more handle of a chunk that the books have.
    pub(super) fn add_handle(&mut self, chunk: ChunkKey) -> Handle {
        let handle = Handle(self.next());
        self.chunks.get_mut(&chunk).expect("the caller looked the chunk up").handles += 1;
        self.handles.insert(handle, chunk);
        handle
    }

    /// The chunk behind a handle, and its length.
    pub(super) fn chunk(&self, handle: Handle) -> Result<(ChunkKey, Bytes), Cause> {
        let chunk = *self.handles.get(&handle).ok_or(Cause::UnknownHandle(handle))?;
        Ok((chunk, self.chunks[&chunk].len))
    }

    /// Drops a handle. The chunk comes back when nothing refers to it any more.
    pub(super) fn release(&mut self, handle: Handle) -> Result<Option<ChunkKey>, Cause> {
        let chunk = self.handles.remove(&handle).ok_or(Cause::UnknownHandle(handle))?;
        self.chunks.get_mut(&chunk).expect("a handle has its chunk").handles -= 1;
        Ok(self.drop_if_unused(chunk))
    }

    fn drop_if_unused(&mut self, chunk: ChunkKey) -> Option<ChunkKey> {
        let refs = &self.chunks[&chunk];
        if refs.handles > 0 || refs.mappings > 0 {
            return None;
        }
        self.chunks.remove(&chunk);
        Some(chunk)
    }

    /// Commits a reservation of fresh addresses.
    pub(super) fn reserve(&mut self, start: DeviceAddress, len: Bytes) {
        let overlapping = self.reservation_of(span(start.get(), len).end().get() - 1);
        assert!(overlapping.is_none(), "fresh addresses {start} overlap reservation {overlapping:?}");
        self.reservations.insert(start.get(), len);
    }

    /// The reservation that the byte at `address` lies in.
    fn reservation_of(&self, address: u64) -> Option<AddressSpan> {
        let (start, len) = self.reservations.range(..=address).next_back()?;
        let found = span(*start, *len);
        (address < found.end().get()).then_some(found)
    }

    pub(super) fn check_unreserve(&self, wanted: AddressSpan) -> Result<(), Cause> {
        if self.reservations.get(&wanted.start().get()) != Some(&wanted.len()) {
            return Err(Cause::NotAReservation(wanted));
        }
        match self.first_mapping_in(wanted) {
            Some(mapped) => Err(Cause::AlreadyMapped(mapped)),
            None => Ok(()),
        }
    }

    pub(super) fn unreserve(&mut self, gone: AddressSpan) {
        self.reservations.remove(&gone.start().get()).expect("checked before");
    }

    fn first_mapping_in(&self, wanted: AddressSpan) -> Option<AddressSpan> {
        let before = self.mappings.range(..wanted.start().get()).next_back();
        let inside = self.mappings.range(wanted.start().get()..wanted.end().get()).next();
        before
            .into_iter()
            .chain(inside)
            .map(|(start, mapped)| span(*start, mapped.len))
            .find(|mapped| mapped.overlaps(wanted))
    }

    /// Where mapping the chunk at `at` would put it.
    pub(super) fn check_map(&self, at: DeviceAddress, handle: Handle) -> Result<(AddressSpan, ChunkKey), Cause> {
        let (chunk, len) = self.chunk(handle)?;
        if !at.get().is_multiple_of(self.granularity.get()) {
            return Err(Cause::Misaligned { what: "address", value: at.get(), unit: self.granularity });
        }
        let Some(wanted) = Span::new(at, len) else {
            return Err(Cause::Misaligned { what: "address", value: at.get(), unit: self.granularity });
        };
        if !self.reservation_of(at.get()).is_some_and(|reserved| reserved.contains_span(wanted)) {
            return Err(Cause::NotReserved(wanted));
        }
        if let Some(mapped) = self.first_mapping_in(wanted) {
            return Err(Cause::AlreadyMapped(mapped));
        }
        if !self.alias && self.chunks[&chunk].mappings > 0 {
            return Err(Cause::NoAlias);
        }
        if self.mappings.len() as u64 >= self.mappings_max {
            return Err(Cause::TooMany {
                what: "mappings of this process",
                limit: self.mappings_max,
                remedy: "use larger chunks, or raise vm.max_map_count",
            });
        }
        Ok((wanted, chunk))
    }

    pub(super) fn map(&mut self, wanted: AddressSpan, chunk: ChunkKey) {
        self.chunks.get_mut(&chunk).expect("checked before").mappings += 1;
        self.mappings.insert(wanted.start().get(), Mapped { len: wanted.len(), chunk, access: Access::None });
    }

    /// The mappings that exactly cover `wanted`.
    pub(super) fn check_covered(&self, wanted: AddressSpan) -> Result<Vec<AddressSpan>, Cause> {
        let mut at = wanted.start().get();
        let mut found = Vec::new();
        for (start, mapped) in self.mappings.range(at..wanted.end().get()) {
            if *start != at {
                return Err(Cause::NotMapped(wanted));
            }
            found.push(span(*start, mapped.len));
            at += mapped.len.get();
        }
        if at != wanted.end().get() || wanted.is_empty() {
            return Err(Cause::NotMapped(wanted));
        }
        Ok(found)
    }

    /// A handle of the chunk that is mapped there, if it has one, and the mapping's access.
    pub(super) fn mapped_as(&self, part: AddressSpan) -> (Option<Handle>, Access) {
        let mapped = &self.mappings[&part.start().get()];
        let handle = self.handles.iter().find(|(_, chunk)| **chunk == mapped.chunk).map(|(handle, _)| *handle);
        (handle, mapped.access)
    }

    /// Drops mappings that [`Books::check_covered`] found; says which chunks are gone with them.
    pub(super) fn unmap(&mut self, mapped: &[AddressSpan]) -> Vec<ChunkKey> {
        let mut gone = Vec::new();
        for span in mapped {
            let removed = self.mappings.remove(&span.start().get()).expect("checked before");
            self.chunks.get_mut(&removed.chunk).expect("a mapping has its chunk").mappings -= 1;
            gone.extend(self.drop_if_unused(removed.chunk));
        }
        gone
    }

    pub(super) fn set_access(&mut self, mapped: &[AddressSpan], access: Access) {
        for span in mapped {
            self.mappings.get_mut(&span.start().get()).expect("checked before").access = access;
        }
    }

    /// `wanted` may be used: every byte of it is mapped with at least this access.
    pub(super) fn check_use(&self, wanted: AddressSpan, writes: bool) -> Result<(), Cause> {
        let mut at = wanted.start().get();
        while at < wanted.end().get() {
            let mapped = self
                .mappings
                .range(..=at)
                .next_back()
                .map(|(start, mapped)| (span(*start, mapped.len), mapped.access))
                .filter(|(mapped, _)| mapped.contains(DeviceAddress::new(at)));
            let allowed = match mapped {
                None => return Err(Cause::NotMapped(wanted)),
                Some((_, Access::ReadWrite)) => true,
                Some((_, Access::Read)) => !writes,
                Some((_, Access::None)) => false,
            };
            if !allowed {
                return Err(Cause::NoAccess(wanted));
            }
            at = mapped.map_or(at, |(mapped, _)| mapped.end().get());
        }
        Ok(())
    }

    /// Chunks that are still referred to, for tests and end-of-life checks.
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Mappings there are.
    pub(super) fn mapping_count(&self) -> usize {
        self.mappings.len()
    }

    /// Reservations there are.
    pub(super) fn reservation_count(&self) -> usize {
        self.reservations.len()
    }
}
