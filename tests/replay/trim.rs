//! What a trim returns in the middle of a job: idle memory that large chunks must not hold back.

use std::time::Duration;

use stitchd::clock::SystemClock;
use stitchd::ids::StreamId;
use stitchd::replay::allocator::{Allocator, More, OutOfMemory, Reserved};
use stitchd::replay::calls::CallSum;
use stitchd::replay::production::{Production, ProductionOptions};
use stitchd::replay::script::{Asked, Script};
use stitchd::replay::{Watch, run};
use stitchd::rng::Rng;
use stitchd::trace::Trace;
use stitchd::units::{Bytes, DeviceAddress};

use super::production::{TRACES, setup};
use super::shipped;

/// Moments of each trace at which memory is trimmed.
const MOMENTS: u64 = 10;

/// A job whose idle memory is trimmed before some of its requests.
struct Trimmed {
    production: Production,
    requests: u64,
    /// The requests before which that happens, the last first.
    moments: Vec<u64>,
    /// Idle bytes, and how many of them were returned.
    returned: Vec<(Bytes, Bytes)>,
}

impl Allocator for Trimmed {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        if self.moments.last() == Some(&self.requests) {
            self.moments.pop();
            let stats = self.production.stats();
            self.returned.push((stats.held - stats.live, self.production.runtime().trim(Bytes::MAX)));
            self.production.invariants().unwrap();
        }
        self.requests += 1;
        self.production.alloc(asked)
    }

    fn free(&mut self, slot: u32) {
        self.production.free(slot);
    }

    fn completed(&mut self, slot: u32) {
        self.production.completed(slot);
    }

    fn record_stream(&mut self, slot: u32, stream: StreamId) {
        self.production.record_stream(slot, stream);
    }

    fn begin_iteration(&mut self, iteration: u32) {
        self.production.begin_iteration(iteration);
    }

    fn reserved(&self) -> Reserved {
        self.production.reserved()
    }

    fn calls(&self) -> CallSum {
        self.production.calls()
    }

    fn beside(&self) -> Duration {
        self.production.beside()
    }

    fn more(&self) -> More {
        self.production.more()
    }
}

/// Idle and returned bytes at some moments of a job.
fn returned(trace: &Trace, seed: u64) -> Vec<(Bytes, Bytes)> {
    let setup = setup(false);
    let options = ProductionOptions {
        capacity: ProductionOptions::UNLIMITED,
        ladder: setup.ladder,
        runtime: setup.runtime,
        costs: setup.costs,
        auto: None,
    };
    let script = Script::of(trace, 0);
    let mut rng = Rng::new(seed);
    let mut moments: Vec<u64> = (0..MOMENTS).map(|_| rng.below(script.requests)).collect();
    moments.sort_unstable_by(|one, other| other.cmp(one));
    moments.dedup();
    let (production, _) = Production::new(&options, None);
    let mut job = Trimmed { production, requests: 0, moments, returned: Vec::new() };
    let done = run(&script, &mut job, Watch::default(), &SystemClock::new(), &|_| ());
    assert_eq!(done.out_of_memory, None);
    job.returned
}

/// Large chunks cost fewer calls and hold back more: what is live in a part of one keeps it.
#[test]
fn a_trim_returns_most_of_what_is_idle() {
    for name in shipped::all() {
        let returned = returned(&super::trace(name), 1);
        let sum = |of: fn(&(Bytes, Bytes)) -> Bytes| returned.iter().map(of).sum::<Bytes>().get() as f64;
        let share = sum(|(_, returned)| *returned) / sum(|(idle, _)| *idle);
        println!("{name}: {share:.4} of {} idle bytes at {} moments", sum(|(idle, _)| *idle), returned.len());
        let least = if TRACES.contains(&name) { 0.8 } else { 0.7 };
        assert!(share > least, "{name}: {share}");
    }
}
