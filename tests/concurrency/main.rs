//! Threads that meet, one step at a time, in many orders: the code that production runs, over shuttle's threads in place of the system's.
//!
//! `cargo test -p stitchd --features model --test concurrency`. Each model has at most three threads that take part, draws its orders from a
//! seed and ends after a fixed number of them. One that fails prints a schedule; `shuttle::replay` with it in place of `in_many_orders` takes
//! that order again.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod lease;
mod recorder;
mod runtime;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

const SEED: u64 = 0x5717;
/// Orders of each kind. A kind of fault that these models know was found after some hundreds at most.
const ORDERS: usize = 1_500;
/// Changes of mind of the scheduler that gives threads priorities: few faults need more.
const CHANGES: usize = 3;

/// Runs a model in many orders: some that any step may leave, some that keep to one thread but for a few changes.
fn in_many_orders(model: fn()) {
    Runner::new(RandomScheduler::new_from_seed(SEED, ORDERS), Config::default()).run(model);
    Runner::new(PctScheduler::new_from_seed(SEED, CHANGES, ORDERS), Config::default()).run(model);
}
