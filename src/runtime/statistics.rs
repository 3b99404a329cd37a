//! The runtime's figures under PyTorch's names, with PyTorch's meanings (`torch.cuda.memory_stats`).
//!
//! Almost all follow from the counters that the runtime keeps anyway. What is counted besides is counted where memory comes and goes, and not where it is served.
//!
//! All have their three pools and four parts, so that whoever prints them in a table finds each. Some differ from what the caching allocator does. A freed allocation that waits for other streams is counted by `allocated_bytes` and `allocation`
//! among the peaks until it is reusable, as `active` does. Peaks and sums of segments are looked at when memory comes or goes. Small and large are who serves: the small pool, which a job with a plan does not use, and all others. Where both serve, the peaks of the large ones are
//! the most that anybody was told of, and so are, always, the most allocations and what is split and idle with all that has come and gone there.

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
    /// Of what nobody counts where it happens.
    seen: Seen,
    /// What sums were when they were last begun anew.
    base: Sums,
}

/// Figures as they were when somebody looked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Seen {
    large_allocations: Mark,
    large_active: Mark,
    large_occupied: Mark,
    large_requested: Mark,
    small_segments: Mark,
    large_segments: Mark,
    small_reserved: Mark,
    large_reserved: Mark,
    /// Of all pools, the small one, and the others.
    split: [Mark; 3],
    split_bytes: [Mark; 3],
}

impl Seen {
    fn all(&mut self) -> impl Iterator<Item = &mut Mark> {
        let Seen { large_allocations, large_active, large_occupied, large_requested, .. } = self;
        let Seen { small_segments, large_segments, small_reserved, large_reserved, split, split_bytes, .. } = self;
        let large = [large_allocations, large_active, large_occupied, large_requested];
        let held = [small_segments, large_segments, small_reserved, large_reserved];
        large.into_iter().chain(held).chain(split).chain(split_bytes)
    }
}

/// Sums that only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sums {
    requests: u64,
    requested: u64,
    occupied: u64,
    reserved: u64,
    segments: u64,
    segments_gone: u64,
    retries: u64,
    out_of_memory: u64,
    small_requests: u64,
    small_requested: u64,
    small_occupied: u64,
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

    /// The figures of both together: peaks are at most so high, as each may have been at another time.
    #[must_use]
    pub fn and(mut self, other: &MemoryStatistics) -> MemoryStatistics {
        for (name, value) in &mut self.0 {
            *value = value.saturating_add(other.get(name).unwrap_or(0));
        }
        self
    }

    fn put(&mut self, name: impl Into<String>, value: u64) {
        self.0.push((name.into(), i64::try_from(value).unwrap_or(i64::MAX)));
    }

    /// A figure in its four parts.
    fn put_four(&mut self, name: &str, Mark { current, peak, came }: Mark) {
        self.put(format!("{name}.current"), current);
        self.put(format!("{name}.peak"), peak);
        self.put(format!("{name}.allocated"), came);
        self.put(format!("{name}.freed"), came.saturating_sub(current));
    }

    /// The same of all pools, the small one, and the others.
    fn put_pools(&mut self, name: &str, [all, small, large]: [Mark; 3]) {
        for (pool, mark) in [("all", all), ("small_pool", small), ("large_pool", large)] {
            self.put_four(&format!("{name}.{pool}"), mark);
        }
    }
}

/// A figure without what is freed and waits for streams.
fn less(mark: Mark, waiting: u64) -> Mark {
    Mark { current: mark.current - waiting, ..mark }
}

/// What is not small: all of it where nothing is small, else as somebody saw it.
fn large(all: Mark, small: Mark, seen: &mut Mark) -> Mark {
    seen.note(all.current.saturating_sub(small.current));
    let peak = if small.peak == 0 { all.peak } else { seen.peak };
    Mark { current: seen.current, peak, came: all.came.saturating_sub(small.came) }
}

impl Runtime {
    /// The figures now. Takes a walk over what is free.
    pub fn memory_statistics(&self) -> MemoryStatistics {
        let mut pools = self.lock();
        let held = pools.held();
        pools.note_marks(held);
        let count = |counter| self.counters.get(counter);
        let (sums, base) = (self.sums(&pools), pools.marks.base);
        let since = |sum: fn(&Sums) -> u64| sum(&sums).saturating_sub(sum(&base));
        let [waiting, small_waiting] = pools.waiting();
        let (live, active) = (pools.live_allocations(), count(Counter::OccupiedBytes));
        let (load, small_live) = (pools.small.load(), pools.small.live_allocations());
        let most = pools.marks.allocations.peak.max(live).max(load.peak_allocations);
        pools.marks.allocations.peak = most;
        let (split, split_bytes) = pools.split_and_idle(active);
        let small_held = (pools.small.slab_count() as u64, pools.small.held().get());
        let Watermarks { reserved, segments, seen, .. } = &mut pools.marks;

        let mark = |current: u64, peak: u64, came: u64| Mark { current, peak, came };
        let small = mark(small_live, load.peak_allocations, since(|sums| sums.small_requests));
        let all = mark(live, most, since(|sums| sums.requests));
        let active_counts = [all, small, large(all, small, &mut seen.large_active)];
        let counts = [less(all, waiting.0), less(small, small_waiting.0)];
        let counts = [counts[0], counts[1], large(counts[0], counts[1], &mut seen.large_allocations)];
        let small = mark(load.occupied.get(), load.peak_occupied.get(), since(|sums| sums.small_occupied));
        let all = mark(active, count(Counter::PeakOccupiedBytes), since(|sums| sums.occupied));
        let active_bytes = [all, small, large(all, small, &mut seen.large_occupied)];
        let large_waiting = waiting.1 - small_waiting.1;
        let allocated = [less(all, waiting.1), less(small, small_waiting.1), less(active_bytes[2], large_waiting)];
        let small_requested = mark(load.requested.get(), load.peak_requested.get(), since(|sums| sums.small_requested));
        let all = mark(count(Counter::LiveBytes), count(Counter::PeakLiveBytes), since(|sums| sums.requested));
        let requested = [all, small_requested, large(all, small_requested, &mut seen.large_requested)];
        seen.small_segments.note(small_held.0);
        seen.large_segments.note(segments.current.saturating_sub(small_held.0));
        seen.small_reserved.note(small_held.1);
        seen.large_reserved.note(reserved.current.saturating_sub(small_held.1));
        seen.split.iter_mut().zip(split).for_each(|(mark, now)| mark.note(now));
        seen.split_bytes.iter_mut().zip(split_bytes).for_each(|(mark, now)| mark.note(now));
        let all_segments = Mark { came: since(|sums| sums.segments), ..*segments };
        let all_reserved = Mark { came: since(|sums| sums.reserved), ..*reserved };

        let mut figures = MemoryStatistics::default();
        figures.put_pools("allocation", counts);
        figures.put_pools("segment", [all_segments, seen.small_segments, seen.large_segments]);
        figures.put_pools("active", active_counts);
        figures.put_pools("inactive_split", seen.split);
        figures.put_pools("allocated_bytes", allocated);
        figures.put_pools("reserved_bytes", [all_reserved, seen.small_reserved, seen.large_reserved]);
        figures.put_pools("active_bytes", active_bytes);
        figures.put_pools("inactive_split_bytes", seen.split_bytes);
        figures.put_pools("requested_bytes", requested);
        // Only where PyTorch's allocator is told not to split what is large.
        figures.put_four("oversize_allocations", Mark::default());
        figures.put_four("oversize_segments", Mark::default());
        figures.put("num_alloc_retries", since(|sums| sums.retries));
        figures.put("num_ooms", since(|sums| sums.out_of_memory));
        figures.put("num_sync_all_streams", since(|sums| sums.retries));
        figures.put("num_device_alloc", since(|sums| sums.segments));
        figures.put("num_device_free", since(|sums| sums.segments_gone));
        figures.0.push(("max_split_size".into(), -1));
        figures
    }

    /// Peaks are counted anew, from what there is now: those of the stats page and of [`super::RuntimeStats`] among them.
    pub fn reset_peaks(&self) {
        let mut pools = self.lock();
        let held = pools.held();
        pools.note_marks(held);
        let Watermarks { reserved, segments, seen, .. } = &mut pools.marks;
        let marks = [reserved, segments].into_iter().chain(seen.all());
        marks.for_each(|mark| mark.peak = mark.current);
        pools.marks.allocations.peak = 0;
        pools.small.reset_peaks();
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
        pools.marks.seen.all().for_each(|mark| mark.came = 0);
    }

    fn sums(&self, pools: &Pools) -> Sums {
        let Watermarks { reserved, segments, retries, out_of_memory, .. } = pools.marks;
        Sums {
            requests: self.counters.sum(&Counter::REQUESTS),
            requested: self.counters.sum(&Counter::BYTES),
            occupied: self.counters.get(Counter::SumOccupiedBytes),
            reserved: reserved.came,
            segments: segments.came,
            segments_gone: segments.came - segments.current,
            retries,
            out_of_memory,
            small_requests: self.counters.get(Counter::RequestsSmall),
            small_requested: self.counters.get(Counter::BytesSmall),
            small_occupied: pools.small.load().came.get(),
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

    /// Allocations that were freed and wait for streams, and the bytes that they occupy: of all pools, and of the small one.
    fn waiting(&self) -> [(u64, u64); 2] {
        let (mut all, mut small) = ((0, 0), (0, 0));
        for address in self.deferred.addresses() {
            let Some(len) = self.len_of(address) else { continue };
            all = (all.0 + 1, all.1 + len.get());
            if self.small.len_of(address).is_some() {
                small = (small.0 + 1, small.1 + len.get());
            }
        }
        [all, small]
    }

    fn segment_count(&self) -> u64 {
        let planned = self.static_pools().count();
        (planned + self.packed.range_count() + self.stitching.range_count() + self.private.range_count()) as u64
    }

    /// Free stretches beside which something is live, and their bytes: of all pools, of slabs, and of the others.
    fn split_and_idle(&self, active: u64) -> ([u64; 3], [u64; 3]) {
        let is_split = |segment: &super::Segment| segment.blocks.len() > 1;
        let (mut count, mut bytes) = ([0; 3], [0; 3]);
        for segment in self.segments().into_iter().filter(is_split) {
            let part = if segment.pool == super::SegmentPool::Slab { 1 } else { 2 };
            for block in segment.blocks.iter().filter(|block| block.state == super::BlockState::Free) {
                count[part] += 1;
                bytes[part] += block.span.len().get();
            }
        }
        // What is shown at two addresses is idle at neither: the sum follows from what is held.
        let idle = self.held().get().saturating_sub(active).saturating_sub(self.idle_chunks().get());
        count[0] = count[1] + count[2];
        ([count[0], count[1], count[2]], [idle, bytes[1].min(idle), idle.saturating_sub(bytes[1])])
    }
}
