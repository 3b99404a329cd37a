//! The small pool: everything below 2 MiB, in slabs of the stitching pool. Rounding to 512 bytes, best fit, coalescing: what PyTorch's caching
//! allocator does for small requests, in constant time.
//!
//! A slab is all of a block: where chunks are larger than it need be, it is as large as they are. It belongs to one stream. Its free extents hang in bins, one bin per length in units of 512 bytes, and a bitmap over the bins finds the smallest
//! that is large enough. Extents know their neighbours, so a free merges with both at once.
//!
//! Not for: making or keeping slabs. The caller brings them ([`SmallPool::add_slab`]), and takes back those that are empty.
//!
//! Invariant: extents of a slab lie side by side and cover it; no two free ones are neighbours.

mod locate;

use std::collections::BTreeMap;

use slab::Slab;

use super::AddressMap;
use crate::ids::StreamId;
use crate::limits;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, Span};

/// Requests up to this share slabs of 2 MiB; larger ones, which would waste those, share slabs of ten times that (PyTorch's small and large
/// buffers).
const SMALL_MAX: Bytes = Bytes::mib(1);
const SMALL_SLAB: Bytes = Bytes::mib(2);
const MEDIUM_SLAB: Bytes = Bytes::mib(20);

/// Bytes of a slab where chunks are no larger than it need be.
fn least_slab_len(bytes: Bytes) -> Bytes {
    if bytes <= SMALL_MAX { SMALL_SLAB } else { MEDIUM_SLAB }
}

/// The small pool of one device.
#[derive(Debug)]
pub struct SmallPool {
    /// Size of the chunks that slabs are made of.
    granule: Bytes,
    arenas: BTreeMap<ArenaKey, Arena>,
    extents: Slab<Extent>,
    live: AddressMap<usize>,
    /// The first extent of each slab, by where it begins.
    slabs: AddressMap<usize>,
    held: Bytes,
    load: SmallLoad,
}

/// What is live in the small pool, what was at most, and what has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SmallLoad {
    /// Bytes of live allocations, rounded to the unit, and as asked for.
    pub occupied: Bytes,
    /// See `occupied`.
    pub requested: Bytes,
    /// The most live allocations, and the most bytes that they had, since peaks were last counted anew.
    pub peak_allocations: u64,
    /// See `peak_allocations`.
    pub peak_occupied: Bytes,
    /// See `peak_allocations`.
    pub peak_requested: Bytes,
    /// Bytes of all allocations that there ever were, rounded to the unit.
    pub came: Bytes,
}

/// Extents that may serve the same requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ArenaKey {
    stream: StreamId,
    is_medium: bool,
}

#[derive(Debug)]
struct Arena {
    bins: Bins,
    /// Slabs that are all free, and kept for the next request.
    empty_slabs: usize,
}

#[derive(Debug)]
struct Extent {
    arena: ArenaKey,
    start: DeviceAddress,
    units: u32,
    /// Bytes as asked for, while live.
    bytes: Bytes,
    is_live: bool,
    /// Neighbours in the slab.
    before: Option<usize>,
    after: Option<usize>,
    /// Neighbours in the bin, while free.
    bin_before: Option<usize>,
    bin_after: Option<usize>,
}

/// Free extents by length. What is longer than any request shares the last bin.
#[derive(Debug)]
struct Bins {
    heads: Box<[Option<usize>]>,
    /// One bit per bin that is not empty, and one bit per word of those.
    words: Box<[u64]>,
    summary: Box<[u64]>,
}

impl Bins {
    fn new(units_max: usize) -> Bins {
        let words = (units_max + 1).div_ceil(64);
        Bins {
            heads: vec![None; units_max + 1].into_boxed_slice(),
            words: vec![0; words].into_boxed_slice(),
            summary: vec![0; words.div_ceil(64)].into_boxed_slice(),
        }
    }

    /// The smallest bin that is not empty, from `units` on.
    fn at_least(&self, units: usize) -> Option<usize> {
        let word = units / 64;
        let here = self.words.get(word)? & (u64::MAX << (units % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let next = next_set(&self.summary, word + 1)?;
        Some(next * 64 + self.words[next].trailing_zeros() as usize)
    }

    /// The bin of an extent of so many units.
    fn of(&self, units: u32) -> usize {
        (units as usize).min(self.heads.len() - 1)
    }

    fn set(&mut self, units: usize, head: Option<usize>) {
        self.heads[units] = head;
        let (word, bit) = (units / 64, 1 << (units % 64));
        if head.is_some() {
            self.words[word] |= bit;
        } else {
            self.words[word] &= !bit;
        }
        let summary = &mut self.summary[word / 64];
        if self.words[word] != 0 {
            *summary |= 1 << (word % 64);
        } else {
            *summary &= !(1 << (word % 64));
        }
    }
}

/// The first bit that is set, from `from` on.
fn next_set(words: &[u64], from: usize) -> Option<usize> {
    let first = from / 64;
    let mut bits = words.get(first)? & (u64::MAX.checked_shl((from % 64) as u32).unwrap_or(0));
    for (word, later) in words.iter().enumerate().skip(first) {
        if word > first {
            bits = *later;
        }
        if bits != 0 {
            return Some(word * 64 + bits.trailing_zeros() as usize);
        }
    }
    None
}

/// What a free gave back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SmallFreed {
    /// Bytes that were asked for.
    pub bytes: Bytes,
    /// A slab that became empty and that the pool does not keep, and the stream that had it: it is the caller's again.
    pub slab: Option<(DeviceAddress, StreamId)>,
}

impl SmallPool {
    /// True where this pool serves a request for so many bytes.
    pub fn serves(bytes: Bytes) -> bool {
        bytes < limits::STITCH_LEN_MIN
    }

    /// An empty pool whose slabs will be of chunks of `granule` bytes.
    pub fn new(granule: Bytes) -> SmallPool {
        SmallPool {
            granule,
            arenas: BTreeMap::new(),
            extents: Slab::new(),
            live: AddressMap::default(),
            slabs: AddressMap::default(),
            held: Bytes::ZERO,
            load: SmallLoad::default(),
        }
    }

    /// Bytes of the slab that a request for so many bytes needs when none has room: whole chunks, as the rest of one would be nobody's.
    pub fn slab_len(&self, bytes: Bytes) -> Bytes {
        let least = least_slab_len(bytes);
        least.round_up(self.granule).unwrap_or(least)
    }

    /// Serves a request from the slabs that are there.
    pub fn alloc(&mut self, bytes: Bytes, stream: StreamId) -> Option<DeviceAddress> {
        let arena = ArenaKey { stream, is_medium: bytes > SMALL_MAX };
        let units = units_of(bytes);
        let bin = self.arenas.get(&arena)?.bins.at_least(units as usize)?;
        let found = self.arenas[&arena].bins.heads[bin].expect("a bin whose bit is set is not empty");
        if self.is_whole_slab(found) {
            self.arenas.get_mut(&arena).expect("looked up above").empty_slabs -= 1;
        }
        self.unbin(found);
        if self.extents[found].units > units {
            self.cut(found, units);
        }
        let extent = &mut self.extents[found];
        extent.is_live = true;
        extent.bytes = bytes;
        let start = extent.start;
        self.live.insert(start, found);
        let load = &mut self.load;
        load.occupied += bytes_of(units);
        load.requested += bytes;
        load.came = load.came.checked_add(bytes_of(units)).unwrap_or(Bytes::LARGEST);
        load.peak_allocations = load.peak_allocations.max(self.live.len() as u64);
        load.peak_occupied = load.peak_occupied.max(load.occupied);
        load.peak_requested = load.peak_requested.max(load.requested);
        Some(start)
    }

    /// Takes a slab up for requests like the one that found no room.
    pub fn add_slab(&mut self, span: AddressSpan, bytes: Bytes, stream: StreamId) {
        let arena = ArenaKey { stream, is_medium: bytes > SMALL_MAX };
        let units = units_of(span.len());
        let bins = || Arena { bins: Bins::new(units_of(least_slab_len(bytes)) as usize), empty_slabs: 0 };
        self.arenas.entry(arena).or_insert_with(bins).empty_slabs += 1;
        let extent = Extent {
            arena,
            start: span.start(),
            units,
            bytes: Bytes::ZERO,
            is_live: false,
            before: None,
            after: None,
            bin_before: None,
            bin_after: None,
        };
        let extent = self.extents.insert(extent);
        self.slabs.insert(span.start(), extent);
        self.bin(extent);
        self.held += span.len();
    }

    /// The stream that a live allocation was made on.
    pub fn stream_at(&self, address: DeviceAddress) -> Option<StreamId> {
        self.live.get(&address).map(|extent| self.extents[*extent].arena.stream)
    }

    /// Takes an allocation back. `None` if it is not one of this pool's.
    pub fn free(&mut self, address: DeviceAddress) -> Option<SmallFreed> {
        let freed = self.live.remove(&address)?;
        let bytes = self.extents[freed].bytes;
        self.load.occupied -= bytes_of(self.extents[freed].units);
        self.load.requested -= bytes;
        self.extents[freed].is_live = false;
        let merged = self.merge(freed);
        self.bin(merged);
        let mut slab = None;
        if self.is_whole_slab(merged) {
            let arena = self.arenas.get_mut(&self.extents[merged].arena).expect("an extent has its arena");
            arena.empty_slabs += 1;
            // One is kept, or a request at the edge would make and drop a slab again and again.
            if arena.empty_slabs > 1 {
                let stream = self.extents[merged].arena.stream;
                slab = Some((self.drop_slab(merged), stream));
            }
        }
        Some(SmallFreed { bytes, slab })
    }

    /// Gives up every slab that is empty; says where each is and which stream used it last.
    pub fn trim(&mut self) -> Vec<(DeviceAddress, StreamId)> {
        let empty: Vec<usize> = self.extents.iter().map(|(id, _)| id).filter(|id| self.is_whole_slab(*id)).collect();
        let stream = |pool: &SmallPool, slab: usize| pool.extents[slab].arena.stream;
        empty.into_iter().map(|slab| (stream(self, slab), self.drop_slab(slab))).map(|(of, at)| (at, of)).collect()
    }

    /// An extent that is free and has no neighbours is its whole slab.
    fn is_whole_slab(&self, id: usize) -> bool {
        let extent = &self.extents[id];
        !extent.is_live && extent.before.is_none() && extent.after.is_none()
    }

    fn drop_slab(&mut self, id: usize) -> DeviceAddress {
        self.unbin(id);
        let extent = self.extents.remove(id);
        self.slabs.remove(&extent.start);
        self.arenas.get_mut(&extent.arena).expect("an extent has its arena").empty_slabs -= 1;
        self.held -= bytes_of(extent.units);
        extent.start
    }

    /// Cuts an extent after `units`; the rest is free.
    fn cut(&mut self, id: usize, units: u32) {
        let extent = &mut self.extents[id];
        let rest = Extent {
            arena: extent.arena,
            start: extent.start.checked_add(bytes_of(units)).expect("the cut lies in the extent"),
            units: extent.units - units,
            bytes: Bytes::ZERO,
            is_live: false,
            before: Some(id),
            after: extent.after,
            bin_before: None,
            bin_after: None,
        };
        extent.units = units;
        let after = rest.after;
        let rest = self.extents.insert(rest);
        self.extents[id].after = Some(rest);
        if let Some(after) = after {
            self.extents[after].before = Some(rest);
        }
        self.bin(rest);
    }

    /// Merges a free extent with its free neighbours; the one at the lowest address remains.
    fn merge(&mut self, id: usize) -> usize {
        if let Some(after) = self.extents[id].after.filter(|after| !self.extents[*after].is_live) {
            self.unbin(after);
            self.absorb(id, after);
        }
        let Some(before) = self.extents[id].before.filter(|before| !self.extents[*before].is_live) else { return id };
        self.unbin(before);
        self.absorb(before, id);
        before
    }

    fn absorb(&mut self, into: usize, after: usize) {
        let gone = self.extents.remove(after);
        self.extents[into].units += gone.units;
        self.extents[into].after = gone.after;
        if let Some(next) = gone.after {
            self.extents[next].before = Some(into);
        }
    }

    /// Hangs a free extent into its bin.
    fn bin(&mut self, id: usize) {
        let Extent { arena, units, .. } = self.extents[id];
        let bins = &mut self.arenas.get_mut(&arena).expect("an extent has its arena").bins;
        let bin = bins.of(units);
        let head = bins.heads[bin];
        bins.set(bin, Some(id));
        self.extents[id].bin_before = None;
        self.extents[id].bin_after = head;
        if let Some(head) = head {
            self.extents[head].bin_before = Some(id);
        }
    }

    /// Takes a free extent out of its bin.
    fn unbin(&mut self, id: usize) {
        let Extent { arena, units, bin_before, bin_after, .. } = self.extents[id];
        match bin_before {
            Some(before) => self.extents[before].bin_after = bin_after,
            None => {
                let bins = &mut self.arenas.get_mut(&arena).expect("an extent has its arena").bins;
                bins.set(bins.of(units), bin_after);
            }
        }
        if let Some(after) = bin_after {
            self.extents[after].bin_before = bin_before;
        }
    }

    /// Bytes that an allocation at `address` occupies, if it is a live one of this pool's.
    pub fn len_of(&self, address: DeviceAddress) -> Option<Bytes> {
        self.live.get(&address).map(|id| bytes_of(self.extents[*id].units))
    }

    /// Bytes of all slabs.
    pub fn held(&self) -> Bytes {
        self.held
    }

    /// Bytes of live allocations, rounded.
    pub fn live_bytes(&self) -> Bytes {
        self.load.occupied
    }

    /// What is live, what was at most, and what has come.
    pub fn load(&self) -> SmallLoad {
        self.load
    }

    /// The most that was live is counted anew.
    pub fn reset_peaks(&mut self) {
        let SmallLoad { occupied, requested, .. } = self.load;
        self.load.peak_allocations = self.live.len() as u64;
        (self.load.peak_occupied, self.load.peak_requested) = (occupied, requested);
    }

    /// Live allocations.
    pub fn live_allocations(&self) -> u64 {
        self.live.len() as u64
    }

    /// Says what is wrong with the pool; nothing, unless this module has a bug. Takes time proportional to everything there is.
    pub fn invariants(&self) -> Result<(), String> {
        let (mut held, mut live, mut seen) = (Bytes::ZERO, 0, 0);
        let mut slabs: Vec<AddressSpan> = Vec::new();
        for (first, _) in self.extents.iter().filter(|(_, extent)| extent.before.is_none()) {
            let start = self.extents[first].start;
            let mut end = start;
            let mut was_free = false;
            let mut at = Some(first);
            while let Some(id) = at {
                let extent = &self.extents[id];
                if extent.start != end || extent.units == 0 || (was_free && !extent.is_live) {
                    return Err(format!("extent {id} is not where its neighbours end: {extent:?}"));
                }
                if extent.is_live && self.live.get(&extent.start) != Some(&id) {
                    return Err(format!("extent {id} is live and nobody can free it"));
                }
                end = end.checked_add(bytes_of(extent.units)).ok_or("an extent leaves the address space")?;
                was_free = !extent.is_live;
                live += u64::from(extent.is_live);
                seen += 1;
                if extent.after.is_some_and(|after| self.extents[after].before != Some(id)) {
                    return Err(format!("the neighbour of extent {id} does not know it"));
                }
                at = extent.after;
            }
            let len = end.checked_distance(start).ok_or("a slab ends before it begins")?;
            slabs.push(Span::new(start, len).ok_or("a slab leaves the address space")?);
            held += len;
        }
        slabs.sort_unstable_by_key(|slab| slab.start());
        if slabs.windows(2).any(|pair| pair[0].overlaps(pair[1])) {
            return Err("two slabs overlap".into());
        }
        if held != self.held || live != self.live_allocations() || seen != self.extents.len() {
            return Err(format!("slabs hold {held} in {seen} extents, {live} live; the pool says {}", self.held));
        }
        self.bins_hold_what_is_free()
    }

    fn bins_hold_what_is_free(&self) -> Result<(), String> {
        let mut binned = 0;
        for (key, arena) in &self.arenas {
            for (units, head) in arena.bins.heads.iter().enumerate() {
                let is_marked = arena.bins.words[units / 64] >> (units % 64) & 1 == 1;
                if is_marked != head.is_some() {
                    return Err(format!("bin {units} of {key:?} is marked wrong"));
                }
                let mut at = *head;
                while let Some(id) = at {
                    let extent = &self.extents[id];
                    if extent.is_live || arena.bins.of(extent.units) != units || extent.arena != *key {
                        return Err(format!("extent {id} hangs in the wrong bin"));
                    }
                    binned += 1;
                    at = extent.bin_after;
                }
            }
            let empty =
                self.extents.iter().filter(|(id, extent)| extent.arena == *key && self.is_whole_slab(*id)).count();
            if empty != arena.empty_slabs {
                return Err(format!("{empty} slabs of {key:?} are empty, it says {}", arena.empty_slabs));
            }
        }
        let free = self.extents.iter().filter(|(_, extent)| !extent.is_live).count();
        if binned == free { Ok(()) } else { Err(format!("{free} extents are free and {binned} hang in bins")) }
    }
}

fn units_of(bytes: Bytes) -> u32 {
    (bytes.get().max(1)).div_ceil(limits::ALLOCATION_ALIGNMENT.get()) as u32
}

fn bytes_of(units: u32) -> Bytes {
    Bytes::new(u64::from(units) * limits::ALLOCATION_ALIGNMENT.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: StreamId = StreamId(0);

    fn pool_with_slab(bytes: Bytes) -> SmallPool {
        let mut pool = SmallPool::new(limits::CHUNK_LEN_MIN);
        pool.add_slab(slab(1, bytes), bytes, STREAM);
        pool
    }

    fn slab(number: u64, bytes: Bytes) -> AddressSpan {
        let len = SmallPool::new(limits::CHUNK_LEN_MIN).slab_len(bytes);
        Span::new(DeviceAddress::new(number << 30), len).unwrap()
    }

    fn checked(pool: &SmallPool) {
        pool.invariants().unwrap();
    }

    #[test]
    fn requests_are_rounded_to_512_bytes_and_packed() {
        let mut pool = pool_with_slab(Bytes::new(1));
        let first = pool.alloc(Bytes::new(1), STREAM).unwrap();
        let second = pool.alloc(Bytes::new(513), STREAM).unwrap();
        let third = pool.alloc(Bytes::new(512), STREAM).unwrap();
        assert_eq!((second.get() - first.get(), third.get() - second.get()), (512, 1024));
        assert_eq!(pool.live_bytes(), Bytes::new(2048));
        assert_eq!(pool.len_of(second), Some(Bytes::new(1024)));
        checked(&pool);
    }

    #[test]
    fn a_hole_of_the_right_size_is_used_before_a_larger_one() {
        let mut pool = pool_with_slab(Bytes::new(1));
        let sizes = [4096, 512, 1024, 512, 2048, 512];
        let at: Vec<_> = sizes.iter().map(|size| pool.alloc(Bytes::new(*size), STREAM).unwrap()).collect();
        for hole in [0, 2, 4] {
            pool.free(at[hole]).unwrap();
        }
        checked(&pool);
        assert_eq!(pool.alloc(Bytes::new(1000), STREAM), Some(at[2]));
        assert_eq!(pool.alloc(Bytes::new(1100), STREAM), Some(at[4]));
        checked(&pool);
    }

    #[test]
    fn freed_neighbours_become_one_again_in_any_order() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut pool = pool_with_slab(Bytes::new(1));
            let at: Vec<_> = (0..3).map(|_| pool.alloc(Bytes::new(700 << 10), STREAM)).collect();
            let at: Vec<_> = at.into_iter().flatten().collect();
            assert_eq!(at.len(), 2);
            let rest = pool.alloc(Bytes::kib(600), STREAM).unwrap();
            let all = [at[0], at[1], rest];
            for which in order {
                assert_eq!(pool.free(all[which]).unwrap().slab, None);
                checked(&pool);
            }
            assert_eq!(pool.alloc(Bytes::mib(1), STREAM), Some(at[0]));
        }
    }

    #[test]
    fn one_empty_slab_is_kept_and_others_are_given_up() {
        let mut pool = pool_with_slab(Bytes::new(1));
        pool.add_slab(slab(2, Bytes::new(1)), Bytes::new(1), STREAM);
        let big: Vec<_> = (0..4).map(|_| pool.alloc(SMALL_MAX, STREAM).unwrap()).collect();
        assert_eq!(pool.alloc(Bytes::new(1), STREAM), None);
        let slabs: Vec<_> = big.iter().filter_map(|address| pool.free(*address).unwrap().slab).collect();
        assert_eq!(slabs.len(), 1);
        checked(&pool);
        assert_eq!(pool.held(), SMALL_SLAB);
        assert_eq!(pool.trim().len(), 1);
        assert_eq!(pool.held(), Bytes::ZERO);
        checked(&pool);
    }

    #[test]
    fn streams_and_size_classes_do_not_share_slabs() {
        let mut pool = pool_with_slab(Bytes::new(1));
        assert_eq!(pool.alloc(Bytes::new(1), StreamId(7)), None);
        assert_eq!(pool.alloc(Bytes::kib(1025), STREAM), None);
        pool.add_slab(slab(2, Bytes::kib(1025)), Bytes::kib(1025), STREAM);
        assert!(pool.alloc(Bytes::new((2 << 20) - 1), STREAM).is_some());
        checked(&pool);
    }

    #[test]
    fn what_is_not_live_is_not_freed() {
        let mut pool = pool_with_slab(Bytes::new(1));
        let at = pool.alloc(Bytes::new(1), STREAM).unwrap();
        assert_eq!(pool.free(DeviceAddress::new(at.get() + 512)), None);
        assert!(pool.free(at).is_some());
        assert_eq!(pool.free(at), None);
        checked(&pool);
    }
}
