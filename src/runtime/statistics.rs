//! The runtime's figures under PyTorch's names, with PyTorch's meanings (`torch.cuda.memory_stats`).
//!
//! Almost all follow from the counters that the runtime keeps anyway. What is counted besides is counted where memory comes and goes, and not where it is served.
//!
//! All have their three pools and four parts, so that a program that prints them in a table finds each. Everything is
//! counted as large: one pool serves all sizes. Some figures differ from what the caching allocator does: a freed allocation that waits for
//! other streams is counted by `allocated_bytes` and `allocation` among the peaks until it is reusable, as `active` does; peaks and sums of
//! segments are looked at when memory comes or goes.

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
    allocations: Mark,
    split: Mark,
    split_bytes: Mark,
}

impl Seen {
    fn all(&mut self) -> impl Iterator<Item = &mut Mark> {
        [&mut self.allocations, &mut self.split, &mut self.split_bytes].into_iter()
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

    /// The same of all pools, the small one, which serves nothing, and the large one.
    fn put_pools(&mut self, name: &str, mark: Mark) {
        for (pool, mark) in [("all", mark), ("small_pool", Mark::default()), ("large_pool", mark)] {
            self.put_four(&format!("{name}.{pool}"), mark);
        }
    }
}

/// A figure without what is freed and waits for streams.
fn less(mark: Mark, waiting: u64) -> Mark {
    Mark { current: mark.current - waiting, ..mark }
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
        let (waiting, waiting_bytes) = pools.waiting();
        let (live, active) = (pools.live_allocations(), count(Counter::OccupiedBytes));
        let most = pools.marks.allocations.peak.max(live);
        pools.marks.allocations.peak = most;
        let (split, split_bytes) = pools.split_and_idle(active);
        let Watermarks { reserved, segments, seen, .. } = &mut pools.marks;

        let mark = |current: u64, peak: u64, came: u64| Mark { current, peak, came };
        let active_counts = mark(live, most, since(|sums| sums.requests));
        let active_bytes = mark(active, count(Counter::PeakOccupiedBytes), since(|sums| sums.occupied));
        let live_bytes = count(Counter::LiveBytes);
        let requested = mark(live_bytes, count(Counter::PeakLiveBytes), since(|sums| sums.requested));
        let counts = less(active_counts, waiting);
        seen.allocations.note(counts.current);
        seen.split.note(split);
        seen.split_bytes.note(split_bytes);

        let mut figures = MemoryStatistics::default();
        figures.put_pools("allocation", counts);
        figures.put_pools("segment", Mark { came: since(|sums| sums.segments), ..*segments });
        figures.put_pools("active", active_counts);
        figures.put_pools("inactive_split", seen.split);
        figures.put_pools("allocated_bytes", less(active_bytes, waiting_bytes));
        figures.put_pools("reserved_bytes", Mark { came: since(|sums| sums.reserved), ..*reserved });
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
    fn waiting(&self) -> (u64, u64) {
        let lens = self.deferred.addresses().filter_map(|address| self.len_of(address));
        lens.fold((0, 0), |(count, bytes), len| (count + 1, bytes + len.get()))
    }

    fn segment_count(&self) -> u64 {
        (self.pages.range_count() + self.private.range_count()) as u64
    }

    /// Free runs beside which something is live, and their bytes.
    fn split_and_idle(&self, active: u64) -> (u64, u64) {
        let segments = self.segments();
        let split = segments.iter().filter(|segment| segment.blocks.len() > 1);
        let free = split.flat_map(|segment| &segment.blocks).filter(|block| block.state == super::BlockState::Free);
        // What is shown at two addresses is idle at neither: the sum follows from what is held.
        let idle = self.held().get().saturating_sub(active).saturating_sub(self.idle_chunks().get());
        (free.count() as u64, idle)
    }
}
