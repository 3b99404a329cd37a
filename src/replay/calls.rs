//! Driver calls of an allocator, counted and priced.

use crate::driver::Call;
use crate::driver::cost_table::CostTable;
use crate::units::Bytes;

/// What an allocator asked of its driver.
#[derive(Clone, Debug)]
pub struct Calls {
    costs: CostTable,
    counts: CallSum,
}

/// Calls by kind, and what they would have cost.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct CallSum {
    by_kind: [u64; Call::ALL.len()],
    /// Calls of cudaMalloc.
    pub malloc: u64,
    /// Calls of cudaFree.
    pub free: u64,
    /// Modelled seconds of all of them.
    pub seconds: f64,
}

/// The kinds that reports show.
pub const SHOWN: [Call; 10] = [
    Call::Create,
    Call::Release,
    Call::Reserve,
    Call::Unreserve,
    Call::Map,
    Call::Unmap,
    Call::SetAccess,
    Call::Export,
    Call::Import,
    Call::Event,
];

impl CallSum {
    /// Calls of one kind.
    pub fn of(&self, call: Call) -> u64 {
        self.by_kind[call.index()]
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        SHOWN.into_iter().map(|call| self.of(call)).sum::<u64>() + self.malloc + self.free
    }

    /// What came since `earlier`.
    pub fn since(&self, earlier: &CallSum) -> CallSum {
        let mut since = *self;
        for (count, before) in since.by_kind.iter_mut().zip(earlier.by_kind) {
            *count -= before;
        }
        since.malloc -= earlier.malloc;
        since.free -= earlier.free;
        since.seconds -= earlier.seconds;
        since
    }

    /// Both together.
    pub fn plus(&self, other: &CallSum) -> CallSum {
        let mut sum = *self;
        for (count, more) in sum.by_kind.iter_mut().zip(other.by_kind) {
            *count += more;
        }
        sum.malloc += other.malloc;
        sum.free += other.free;
        sum.seconds += other.seconds;
        sum
    }

    /// Adds `count` calls of one kind.
    pub fn add(&mut self, call: Call, count: u64) {
        self.by_kind[call.index()] += count;
    }
}

impl Calls {
    /// None yet; each costs what `costs` says.
    pub fn new(costs: &CostTable) -> Calls {
        Calls { costs: costs.clone(), counts: CallSum::default() }
    }

    /// `count` calls, each on a chunk of `len`.
    pub fn note(&mut self, call: Call, len: Bytes, count: u64) {
        self.counts.add(call, count);
        self.counts.seconds += self.costs.seconds(call, len) * count as f64;
    }

    /// One call over a run of `chunks` chunks of `len` each. It is charged as one per chunk: nobody has published what a run saves.
    pub fn note_run(&mut self, call: Call, len: Bytes, chunks: u64) {
        self.counts.add(call, 1);
        self.counts.seconds += self.costs.seconds(call, len) * chunks as f64;
    }

    /// A cudaMalloc.
    pub fn malloc(&mut self, len: Bytes) {
        self.counts.malloc += 1;
        self.counts.seconds += self.costs.malloc_seconds(len);
    }

    /// A cudaFree.
    pub fn free(&mut self, len: Bytes) {
        self.counts.free += 1;
        self.counts.seconds += self.costs.free_seconds(len);
    }

    /// What was called until now.
    pub fn sum(&self) -> CallSum {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_charged_what_their_table_says() {
        let mut calls = Calls::new(&CostTable::A100);
        let chunk = Bytes::mib(2);
        let mut expected = 0.0;
        let mut check = |calls: &Calls, micros: f64, total| {
            expected += micros;
            let found = calls.sum().seconds * 1e6;
            assert!((found - expected).abs() < 1e-6, "{found} and not {expected} µs");
            assert_eq!(calls.sum().total(), total);
        };
        calls.note(Call::Create, chunk, 3);
        check(&calls, 3.0 * 193.0, 3);
        // A run of chunks is one call that costs as much as one for each.
        calls.note_run(Call::SetAccess, chunk, 4);
        check(&calls, 4.0 * 36.0, 4);
        let before = calls.sum();
        calls.malloc(Bytes::mib(20));
        check(&calls, 193.0 + 19.0 + 1.45 + 36.0, 5);
        calls.free(Bytes::mib(20));
        check(&calls, 26.0 + 26.0 + 19.0, 6);
        // Nobody has measured an event.
        calls.note(Call::Event, Bytes::ZERO, 2);
        check(&calls, 0.0, 8);
        let since = calls.sum().since(&before);
        assert_eq!((since.malloc, since.free, since.of(Call::Event), since.of(Call::Create)), (1, 1, 2, 0));
        assert!((since.seconds * 1e6 - 320.45).abs() < 1e-6, "{}", since.seconds);
        let sum = before.plus(&since);
        assert_eq!((sum.total(), sum.of(Call::Create)), (8, 3));
        assert!((sum.seconds - calls.sum().seconds).abs() < 1e-12);
    }
}
