//! Time that a replay spends beside the allocator: in the simulated driver, whose calls have modelled
//! costs instead, in the daemon's half of a lease, and in planning, which a job leaves to a thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::driver::layers::{Intercept, Step};
use crate::driver::{DriverError, Handle};

/// The sum of such times. One thread at a time runs what is timed.
#[derive(Debug)]
pub(super) struct Beside {
    clock: SystemClock,
    nanos: AtomicU64,
    is_running: AtomicBool,
    /// What one look at the clock takes. Of the two around a part one is not between them.
    look: Duration,
}

impl Beside {
    pub(super) fn new() -> Arc<Beside> {
        let clock = SystemClock::new();
        let look = shortest_look(&clock);
        Arc::new(Beside { clock, nanos: AtomicU64::new(0), is_running: AtomicBool::new(false), look })
    }

    /// Runs something whose time counts here. Within another such part it counts once.
    pub(super) fn run<T>(&self, part: impl FnOnce() -> T) -> T {
        if self.is_running.swap(true, Ordering::Relaxed) {
            return part();
        }
        let started = self.clock.now();
        let done = part();
        let nanos = (self.clock.now() - started + self.look).as_nanos() as u64;
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.is_running.store(false, Ordering::Relaxed);
        done
    }

    /// All of it until now.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}

/// The least that two looks in a row lie apart.
fn shortest_look(clock: &SystemClock) -> Duration {
    const LOOKS: usize = 1000;
    let apart = (0..LOOKS).map(|_| {
        let before = clock.now();
        clock.now() - before
    });
    apart.min().unwrap_or_default()
}

impl Intercept for Arc<Beside> {
    #[inline]
    fn around<T>(
        &self,
        _: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        _: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        self.run(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_within_another_counts_once() {
        let beside = Beside::new();
        let nap = || std::thread::sleep(Duration::from_millis(2));
        let started = beside.clock.now();
        assert_eq!(beside.run(|| beside.run(|| (nap(), 7).1)), 7);
        let took = beside.clock.now() - started;
        let most = took + beside.look;
        assert!((Duration::from_millis(2)..=most).contains(&beside.time()), "{:?} of {took:?}", beside.time());
        nap();
        assert!(beside.time() <= most, "what is not told does not count");
    }
}
