//! The runtime's figures under PyTorch's names, with PyTorch's meanings (`torch.cuda.memory_stats`).
//!
//! Almost all follow from the counters that the runtime keeps anyway. What is counted besides is counted where memory comes and goes, and not where it is served.
//!
//! Three differ from what the caching allocator does. A freed allocation that waits for other streams is counted by `allocated_bytes.all.peak` and by `allocation.all.peak` until it is reusable, as `active` does. Peaks and sums
//! of segments are looked at when memory comes or goes, and the most allocations are the most that anybody was told of. And small and large are who serves, so they have current values only, as has what is split and idle.

use super::{Counter, Pools, Runtime};
use crate::units::Bytes;

/// A figure that goes up and down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Mark {
    current: u64,
    peak: u64,
    /// All that has come.
    came: u64,
}

impl Mark {
    fn note(&mut self, current: u64) {
        self.came += current.saturating_sub(self.current);
        self.current = current;
        self.peak = self.peak.max(current);
    }
}

/// What statistics count that no pool does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Watermarks {
    reserved: Mark,
    segments: Mark,
    /// Only the most that anybody saw.
    allocations: Mark,
    retries: u64,
    out_of_memory: u64,
    /// What sums were when they were last begun anew.
    base: Sums,
}

/// Sums that only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sums {
    requests: u64,
    requested: u64,
    occupied: u64,
    reserved: u64,
    segments: u64,
    retries: u64,
    out_of_memory: u64,
}

impl Watermarks {
    /// Streams were waited for, and everything tried again.
    pub(super) fn note_retry(&mut self) {
        self.retries += 1;
    }

    /// A request failed for want of memory.
    pub(super) fn note_out_of_memory(&mut self) {
        self.out_of_memory += 1;
    }
}

/// The figures, each by its name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryStatistics(Vec<(String, i64)>);

impl MemoryStatistics {
    /// All of them, in PyTorch's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// One of them.
    pub fn get(&self, name: &str) -> Option<i64> {
        self.iter().find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    fn put(&mut self, name: impl Into<String>, value: u64) {
        self.0.push((name.into(), i64::try_from(value).unwrap_or(i64::MAX)));
    }

    /// A figure of all pools, in its four parts.
    fn put_all(&mut self, name: &str, current: u64, peak: u64, came: u64) {
        self.put(format!("{name}.all.current"), current);
        self.put(format!("{name}.all.peak"), peak);
        self.put(format!("{name}.all.allocated"), came);
        self.put(format!("{name}.all.freed"), came.saturating_sub(current));
    }

    fn put_pools(&mut self, name: &str, small: u64, all: u64) {
        self.put(format!("{name}.small_pool.current"), small);
        self.put(format!("{name}.large_pool.current"), all.saturating_sub(small));
    }
}

impl Runtime {
    /// The figures now. Takes a walk over what is free.
    pub fn memory_statistics(&self) -> MemoryStatistics {
        let mut pools = self.lock();
        let held = pools.held();
        pools.note_marks(held);
        let count = |counter| self.counters.get(counter);
        let (marks, sums) = (pools.marks, self.sums(&pools));
        let base = marks.base;
        let since = |now: u64, then: u64| now.saturating_sub(then);
        let (waiting, waiting_bytes) = pools.waiting();
        let active = count(Counter::OccupiedBytes);
        let live = pools.live_allocations();
        let most = marks.allocations.peak.max(live);
        pools.marks.allocations.peak = most;
        let mut all = MemoryStatistics::default();
        let requests = since(sums.requests, base.requests);
        all.put_all("allocation", live - waiting, most, requests);
        all.put_pools("allocation", pools.small.live_allocations(), live - waiting);
        all.put_all("segment", marks.segments.current, marks.segments.peak, since(sums.segments, base.segments));
        all.put_pools("segment", pools.small.slab_count() as u64, marks.segments.current);
        all.put_all("active", live, most, requests);
        all.put("inactive_split.all.current", pools.free_stretches());
        let occupied = since(sums.occupied, base.occupied);
        let allocated = active - waiting_bytes.get();
        all.put_all("allocated_bytes", allocated, count(Counter::PeakOccupiedBytes), occupied);
        all.put_pools("allocated_bytes", pools.small.live_bytes().get(), allocated);
        all.put_all("reserved_bytes", marks.reserved.current, marks.reserved.peak, since(sums.reserved, base.reserved));
        all.put_pools("reserved_bytes", pools.small.held().get(), marks.reserved.current);
        all.put_all("active_bytes", active, count(Counter::PeakOccupiedBytes), occupied);
        let idle = pools.held().get().saturating_sub(active);
        all.put("inactive_split_bytes.all.current", idle.saturating_sub(pools.idle_chunks().get()));
        let requested = since(sums.requested, base.requested);
        all.put_all("requested_bytes", count(Counter::LiveBytes), count(Counter::PeakLiveBytes), requested);
        all.put("num_alloc_retries", since(marks.retries, base.retries));
        all.put("num_ooms", since(marks.out_of_memory, base.out_of_memory));
        all.put("num_sync_all_streams", since(marks.retries, base.retries));
        all.0.push(("max_split_size".into(), -1));
        all
    }

    /// Peaks are counted anew, from what there is now: those of the stats page and of [`super::RuntimeStats`] among them.
    pub fn reset_peaks(&self) {
        let mut pools = self.lock();
        let held = pools.held();
        pools.note_marks(held);
        let Watermarks { reserved, segments, .. } = &mut pools.marks;
        (reserved.peak, segments.peak) = (reserved.current, segments.current);
        pools.marks.allocations.peak = 0;
        for (peak, current) in [
            (Counter::PeakLiveBytes, Counter::LiveBytes),
            (Counter::PeakHeldBytes, Counter::HeldBytes),
            (Counter::PeakOccupiedBytes, Counter::OccupiedBytes),
        ] {
            self.counters.set(peak, self.counters.get(current));
        }
    }

    /// Sums are counted anew. As for PyTorch a sum begins at nothing, whatever is live.
    pub fn reset_accumulated(&self) {
        let mut pools = self.lock();
        let held = pools.held();
        pools.note_marks(held);
        pools.marks.base = self.sums(&pools);
    }

    fn sums(&self, pools: &Pools) -> Sums {
        let Watermarks { reserved, segments, retries, out_of_memory, .. } = pools.marks;
        Sums {
            requests: self.counters.sum(&Counter::REQUESTS),
            requested: self.counters.sum(&Counter::BYTES),
            occupied: self.counters.get(Counter::SumOccupiedBytes),
            reserved: reserved.came,
            segments: segments.came,
            retries,
            out_of_memory,
        }
    }
}

impl Pools {
    /// Memory may have come or gone: so much is held now.
    pub(super) fn note_marks(&mut self, held: Bytes) {
        let segments = self.segment_count();
        self.marks.reserved.note(held.get());
        self.marks.segments.note(segments);
    }

    /// Allocations that were freed and wait for streams, and the bytes that they occupy.
    fn waiting(&self) -> (u64, Bytes) {
        let lens = self.deferred.addresses().filter_map(|address| self.len_of(address));
        lens.fold((0, Bytes::ZERO), |(count, bytes), len| (count + 1, bytes + len))
    }

    fn segment_count(&self) -> u64 {
        let planned = self.static_pools().count();
        (planned + self.packed.range_count() + self.stitching.range_count() + self.private.range_count()) as u64
    }

    /// Free stretches beside which something is live.
    fn free_stretches(&self) -> u64 {
        let is_split = |segment: &super::Segment| segment.blocks.len() > 1;
        let free = |segment: super::Segment| {
            segment.blocks.iter().filter(|block| block.state == super::BlockState::Free).count() as u64
        };
        self.segments().into_iter().filter(is_split).map(free).sum()
    }
}
