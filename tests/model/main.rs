//! Random and exhaustive lists of operations, each against a reference that is written for the purpose: lists, no cleverness, nothing of the code
//! under test.
//!
//! Every test is the same in every run. One that fails prints its seed and step; to look at that seed alone, make it the only one in the
//! list of the test. `STITCHD_MODEL_TIMES=5 cargo test --test model` goes on with four times as many seeds.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod driver;
mod exhaustive;
mod faulty;
mod job;
mod ledger;
mod memory;
mod pages;
mod planned;
mod private_pools;
mod recording;
mod reference;
mod runtime;
#[path = "../support/standin.rs"]
mod standin;
mod store;
mod watch;

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by tests whose chunks have descriptors and that count bytes: whoever looks at all descriptors of this process, as the store's tests do, holds
/// each of them open for a moment, and its bytes with it.
fn alone() -> MutexGuard<'static, ()> {
    static DESCRIPTORS: Mutex<()> = Mutex::new(());
    DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The seeds of a test, and as many others as it is told to go on with.
#[expect(clippy::disallowed_methods, reason = "how long to go on is said by whoever runs the test")]
fn times(seeds: impl IntoIterator<Item = u64> + Clone) -> impl Iterator<Item = u64> {
    let times: u64 = std::env::var("STITCHD_MODEL_TIMES").map_or(1, |times| times.parse().unwrap());
    (0..times).flat_map(move |round| seeds.clone().into_iter().map(move |seed| seed + 100_000 * round))
}

/// Where a test is, printed if it fails.
struct At {
    what: &'static str,
    seed: u64,
    step: Cell<u64>,
}

impl At {
    fn new(what: &'static str, seed: u64) -> At {
        At { what, seed, step: Cell::new(0) }
    }
}

impl Drop for At {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} failed with seed {} at step {}", self.what, self.seed, self.step.get());
        }
    }
}
