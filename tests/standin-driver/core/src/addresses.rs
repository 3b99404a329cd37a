//! Addresses of one process: reserved, mapped, used.

#![expect(unsafe_code, reason = "reserves addresses")]

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::chunks::Chunk;
use crate::process::Process;
use crate::streams::Fill;
use crate::{Called, Quirk, code};

/// Bytes that read as zero, and are nowhere.
const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

#[derive(Debug)]
struct Mapping {
    len: u64,
    chunk: Arc<Chunk>,
    /// What each device may do.
    access: HashMap<usize, u32>,
}

#[derive(Debug)]
struct Reservation {
    len: u64,
    /// Several of its mappings were unmapped with one call.
    is_broken: bool,
    /// Chunks that were mapped in it, where their memory stays as long as the addresses do.
    kept: Vec<Arc<Chunk>>,
}

/// What is reserved and what is mapped.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
}

impl Addresses {
    fn map(&mut self, at: u64, len: u64, chunk: &Arc<Chunk>, granularity: u64) -> Called<()> {
        let end = at.checked_add(len).ok_or(code::INVALID_VALUE)?;
        let reserved = self.reservations.range(..=at).next_back();
        let is_inside = reserved.is_some_and(|(start, reserved)| end <= start + reserved.len);
        let before = self.mappings.range(..end).next_back();
        let is_free = before.is_none_or(|(start, mapping)| start + mapping.len <= at);
        if !is_inside || !is_free || len != chunk.len || !at.is_multiple_of(granularity) {
            return Err(code::INVALID_VALUE);
        }
        self.mappings.insert(at, Mapping { len, chunk: Arc::clone(chunk), access: HashMap::new() });
        Ok(())
    }

    /// The mappings that cover a span exactly, without a hole.
    fn covered(&self, start: u64, len: u64) -> Called<Vec<u64>> {
        let end = start.checked_add(len).filter(|end| *end > start).ok_or(code::INVALID_VALUE)?;
        let mut at = start;
        let mut covered = Vec::new();
        for (begin, mapping) in self.mappings.range(start..end) {
            if *begin != at {
                return Err(code::INVALID_VALUE);
            }
            covered.push(*begin);
            at += mapping.len;
        }
        if at == end { Ok(covered) } else { Err(code::INVALID_VALUE) }
    }

    /// The mappings that lie in a span, of which there is one and none is cut by it.
    fn inside(&self, start: u64, len: u64) -> Called<Vec<u64>> {
        let end = start.checked_add(len).ok_or(code::INVALID_VALUE)?;
        let inside: Vec<u64> = self.mappings.range(start..end).map(|(begin, _)| *begin).collect();
        let before = self.mappings.range(..start).next_back();
        let is_cut = before.is_some_and(|(begin, mapping)| begin + mapping.len > start)
            || inside.last().is_some_and(|last| last + self.mappings[last].len > end);
        if inside.is_empty() || is_cut { Err(code::INVALID_VALUE) } else { Ok(inside) }
    }

    /// Sizes from the first mapping of the reservation, added up, pass through `len`.
    fn sums_from_first(&self, start: u64, len: u64) -> bool {
        let Some((first, _)) = self.reservations.range(..=start).next_back() else { return false };
        let mut sum = 0;
        self.mappings.range(first..).any(|(_, mapping)| {
            sum += mapping.len;
            sum == len
        })
    }

    /// Calls `step` for each piece of a span that `device` uses: the file, where in it, and which of the span's bytes. `needs` is a bit of the access: 1 to read, 2 to write.
    fn each(
        &self,
        device: usize,
        (start, len): (u64, u64),
        needs: u32,
        mut step: impl FnMut(&File, u64, Range<usize>) -> std::io::Result<()>,
    ) -> Called<()> {
        let (mut at, end) = (start, start + len);
        while at < end {
            let found = self.mappings.range(..=at).next_back();
            let may = |mapping: &Mapping| mapping.access.get(&device).is_some_and(|access| access & needs != 0);
            let is_right = |mapping: &Mapping| mapping.chunk.device == mapping.chunk.home;
            let found = found.filter(|(begin, mapping)| at < *begin + mapping.len && may(mapping) && is_right(mapping));
            let (begin, mapping) = found.ok_or(code::ILLEGAL_ADDRESS)?;
            let until = (begin + mapping.len).min(end);
            let range = (at - start) as usize..(until - start) as usize;
            step(&mapping.chunk.file, at - begin, range).map_err(|_| code::OPERATING_SYSTEM)?;
            at = until;
        }
        Ok(())
    }

    /// Bytes from `at` to the end of what is mapped there.
    pub(crate) fn until_end_of_mapping(&self, at: u64) -> Called<u64> {
        let found = self.mappings.range(..=at).next_back().map(|(begin, mapping)| begin + mapping.len);
        found.filter(|end| *end > at).map(|end| end - at).ok_or(code::ILLEGAL_ADDRESS)
    }

    pub(crate) fn fill(&self, fill: Fill) -> Called<()> {
        let Fill { device, start, len, value } = fill;
        self.each(device, (start, len), 2, |file, at, range| match value {
            // What is zero takes no memory of the host's.
            0 => rustix::fs::fallocate(file, HOLE, at, range.len() as u64).map_err(std::io::Error::from),
            _ => file.write_all_at(&vec![value; range.len()], at),
        })
    }

    pub(crate) fn read(&self, device: usize, from: u64, into: &mut [u8]) -> Called<()> {
        self.each(device, (from, into.len() as u64), 1, |file, at, range| file.read_exact_at(&mut into[range], at))
    }

    pub(crate) fn write(&self, device: usize, to: u64, from: &[u8]) -> Called<()> {
        self.each(device, (to, from.len() as u64), 2, |file, at, range| file.write_all_at(&from[range], at))
    }
}

impl Process {
    /// Addresses.
    pub fn reserve(&self, len: u64, alignment: u64, flags: u64) -> Called<u64> {
        let mut state = self.begin_in_context("reserve")?;
        let granularity = self.machine().conf.granularity_min();
        let alignment = match (alignment, self.machine().has(Quirk::IgnoresAlignment)) {
            (0, _) | (_, true) => granularity,
            (alignment, false) => alignment.max(granularity),
        };
        if len == 0 || !len.is_multiple_of(granularity) || !alignment.is_power_of_two() || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let padded = len.checked_add(alignment).ok_or(code::INVALID_VALUE)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED mmap disturbs nothing that exists; the addresses stay reserved until the process ends.
        let raw =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), padded as usize, ProtFlags::empty(), flags) };
        let start = (raw.map_err(|_| code::OUT_OF_MEMORY)?.addr() as u64).next_multiple_of(alignment);
        state.addresses.reservations.insert(start, Reservation { len, is_broken: false, kept: Vec::new() });
        Ok(start)
    }

    /// Gives addresses back: exactly what one reserve gave.
    pub fn unreserve(&self, start: u64, len: u64) -> Called<()> {
        let mut state = self.begin_in_context("unreserve")?;
        let addresses = &mut state.addresses;
        let is_mapped = addresses.mappings.range(start..start.saturating_add(len)).next().is_some();
        match addresses.reservations.get(&start) {
            Some(found) if found.len == len && !found.is_broken && !is_mapped => {
                addresses.reservations.remove(&start);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Makes a whole chunk visible.
    pub fn map(&self, at: u64, len: u64, offset: u64, handle: u64, flags: u64) -> Called<()> {
        let mut state = self.begin_in_context("map")?;
        let chunk = Arc::clone(self.chunk(&state, handle)?);
        self.check(chunk.home)?;
        if state.addresses.mappings.len() >= self.machine().conf.mappings {
            return Err(code::OUT_OF_MEMORY);
        }
        if self.machine().conf.volta && !state.streams.is_idle(chunk.home) {
            return state.used(Err(code::ILLEGAL_ADDRESS));
        }
        let granularity = self.machine().conf.granularity_of(chunk.home);
        // What CUDA's says of less than a chunk.
        let is_part = self.has_contexts() && 0 < len && len < chunk.len;
        let mapped = match (offset, flags) {
            (0, 0) if is_part => Err(code::NOT_SUPPORTED),
            (0, 0) => state.addresses.map(at, len, &chunk, granularity),
            _ => Err(code::INVALID_VALUE),
        };
        if mapped.is_err() && self.machine().has(Quirk::MapLies) { Ok(()) } else { mapped }
    }

    /// Removes mappings.
    pub fn unmap(&self, start: u64, len: u64) -> Called<()> {
        let mut state = self.begin_in_context("unmap")?;
        let addresses = &mut state.addresses;
        // CUDA's steps over holes.
        let found = if self.has_contexts() { addresses.inside(start, len) } else { addresses.covered(start, len) };
        let covered = match found {
            // Those versions follow a pointer that is not there.
            Err(_) if self.machine().has(Quirk::MapLies) => std::process::abort(),
            covered => covered?,
        };
        let reservation = addresses.reservations.range_mut(..=start).next_back();
        let (_, reservation) = reservation.ok_or(code::INVALID_VALUE)?;
        reservation.is_broken |= covered.len() > 1 && self.machine().has(Quirk::UnmapRunBreaksFree);
        let gone = covered.iter().filter_map(|at| addresses.mappings.remove(at));
        if self.machine().has(Quirk::MemoryStaysWithAddresses) {
            reservation.kept.extend(gone.map(|mapping| mapping.chunk));
        } else {
            gone.for_each(drop);
        }
        Ok(())
    }

    /// Sets who may use mappings: a list of devices with flags.
    pub fn set_access(&self, start: u64, len: u64, who: &[(u32, i32, u32)]) -> Called<()> {
        let mut state = self.begin_in_context("set_access")?;
        let addresses = &mut state.addresses;
        let covered = addresses.covered(start, len)?;
        let is_known = |(kind, _, flags): &(u32, i32, u32)| *kind == 1 && [0, 1, 3].contains(flags);
        if who.is_empty() || !who.iter().all(is_known) {
            return Err(code::INVALID_VALUE);
        }
        let has = |quirk| self.machine().has(quirk);
        if has(Quirk::AccessRunFails) && covered.len() > 1
            || has(Quirk::AccessSumsFromFirst) && !addresses.sums_from_first(start, len)
        {
            return Err(code::UNKNOWN);
        }
        let who: Vec<(usize, u32)> =
            who.iter().map(|(_, device, flags)| Ok((self.seen(*device)?, *flags))).collect::<Called<_>>()?;
        who.iter().try_for_each(|(device, _)| self.check(*device))?;
        let reaches = |at: &u64, device| self.machine().conf.peers.reach(device, addresses.mappings[at].chunk.home);
        if !covered.iter().all(|at| who.iter().all(|(device, _)| reaches(at, *device))) {
            return Err(code::INVALID_DEVICE);
        }
        for at in covered {
            let mapping = addresses.mappings.get_mut(&at).expect("covered by it");
            mapping.access.extend(who.iter().copied());
        }
        Ok(())
    }
}
