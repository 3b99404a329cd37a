//! Counts and times every call of a driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Intercept, Layered, Step};
use crate::clock::Clock;
use crate::driver::{Call, Driver, DriverError, Handle};

/// A driver whose calls are counted.
pub type Metered = Layered<Meter>;

/// Calls since the beginning, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallCounts([CallCount; Call::ALL.len()]);

/// Calls of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallCount {
    /// Calls made.
    pub calls: u64,
    /// How many of them failed.
    pub failures: u64,
    /// Time in all of them together.
    pub time: Duration,
}

impl CallCounts {
    /// Calls of one kind.
    pub fn of(&self, call: Call) -> CallCount {
        self.0[call.index()]
    }

    /// Calls that change memory or addresses.
    pub fn memory_calls(&self) -> u64 {
        Call::ALL.into_iter().filter(|call| call.is_memory()).map(|call| self.of(call).calls).sum()
    }

    /// What came since `earlier`.
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        let mut counts = *self;
        for (count, before) in counts.0.iter_mut().zip(earlier.0) {
            count.calls -= before.calls;
            count.failures -= before.failures;
            count.time -= before.time;
        }
        counts
    }
}

/// The counters.
#[derive(Debug)]
pub struct Meter {
    clock: Arc<dyn Clock>,
    cells: [Cell; Call::ALL.len()],
}

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    failures: AtomicU64,
    nanos: AtomicU64,
    /// Calls that are under way.
    running: AtomicU64,
    /// When the first of them began, or the last one before them came back, in nanoseconds of the clock.
    since: AtomicU64,
}

impl Meter {
    /// Puts a meter around `driver`.
    pub fn around(driver: Arc<dyn Driver>, clock: Arc<dyn Clock>) -> Arc<Metered> {
        Arc::new(Layered::new(driver, Meter { clock, cells: Default::default() }))
    }

    /// How many calls are under way of a kind of which none has come back for longer than `limit`, and of which kind longest. Waiting for the job's own work does
    /// not count: that takes as long as the work does.
    pub fn overdue(&self, limit: Duration) -> (u64, Option<(Call, Duration)>) {
        let now = self.clock.now();
        let kinds = Call::ALL.into_iter().filter(|call| !matches!(call, Call::Synchronize | Call::Copy));
        kinds.fold((0, None), |(count, longest), call| {
            let cell = &self.cells[call.index()];
            let running = cell.running.load(Ordering::Relaxed);
            let age = now.saturating_sub(Duration::from_nanos(cell.since.load(Ordering::Relaxed)));
            if running == 0 || age <= limit {
                return (count, longest);
            }
            (count + running, longest.filter(|(_, longest)| *longest >= age).or(Some((call, age))))
        })
    }

    /// The call that is under way for longest, and how long.
    pub fn longest(&self) -> Option<(Call, Duration)> {
        let now = self.clock.now();
        let running = Call::ALL.into_iter().filter_map(|call| {
            let cell = &self.cells[call.index()];
            let since = Duration::from_nanos(cell.since.load(Ordering::Relaxed));
            (cell.running.load(Ordering::Relaxed) > 0).then(|| (call, now.saturating_sub(since)))
        });
        running.max_by_key(|(_, age)| *age)
    }

    /// The counts now.
    pub fn counts(&self) -> CallCounts {
        let read = |cell: &Cell| CallCount {
            calls: cell.calls.load(Ordering::Relaxed),
            failures: cell.failures.load(Ordering::Relaxed),
            time: Duration::from_nanos(cell.nanos.load(Ordering::Relaxed)),
        };
        CallCounts(std::array::from_fn(|at| read(&self.cells[at])))
    }
}

impl Intercept for Meter {
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        _handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        let cell = &self.cells[step.call().index()];
        let nanos_of = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let started = self.clock.now();
        if cell.running.fetch_add(1, Ordering::Relaxed) == 0 {
            cell.since.store(nanos_of(started), Ordering::Relaxed);
        }
        let outcome = run();
        let ended = self.clock.now();
        // One has come back: how long the others take counts from here.
        cell.since.store(nanos_of(ended), Ordering::Relaxed);
        cell.running.fetch_sub(1, Ordering::Relaxed);
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.failures.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        cell.nanos.fetch_add(nanos_of(ended.saturating_sub(started)), Ordering::Relaxed);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{ManualClock, SystemClock};
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::ids::DeviceId;
    use crate::units::Bytes;

    #[test]
    fn calls_and_failures_are_counted_by_kind() {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(4)])));
        let metered = Meter::around(sim, Arc::new(SystemClock::new()));
        let before = metered.layer().counts();
        let handle = metered.create(DeviceId(0), Bytes::mib(4)).unwrap();
        metered.create(DeviceId(0), Bytes::mib(2)).unwrap_err();
        metered.release(handle).unwrap();
        let counts = metered.layer().counts().since(&before);
        assert_eq!((counts.of(Call::Create).calls, counts.of(Call::Create).failures), (2, 1));
        assert_eq!((counts.of(Call::Release).calls, counts.of(Call::Release).failures), (1, 0));
        assert_eq!(counts.memory_calls(), 3);
    }

    #[test]
    fn a_call_that_does_not_come_back_is_seen_while_it_lasts() {
        let clock = Arc::new(ManualClock::default());
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(4)])));
        let metered = Meter::around(sim, Arc::clone(&clock) as Arc<dyn Clock>);
        let meter = metered.layer();
        let limit = Duration::from_secs(30);
        let hangs = |step: Step, seconds: u64| {
            let outcome = meter.around(
                step,
                || {
                    clock.advance(Duration::from_secs(seconds));
                    Ok(meter.overdue(limit))
                },
                |_| None,
            );
            outcome.unwrap()
        };
        let create = Step::Create { device: DeviceId(0), len: Bytes::mib(2) };
        assert_eq!(hangs(create, 30), (0, None));
        assert_eq!(hangs(create, 31), (1, Some((Call::Create, Duration::from_secs(31)))));
        assert_eq!(hangs(Step::Other(Call::Synchronize), 1_000), (0, None));
        let longest = meter.around(Step::Other(Call::Copy), || Ok(meter.longest()), |_| None);
        assert_eq!((longest.unwrap(), meter.longest()), (Some((Call::Copy, Duration::ZERO)), None));
        assert_eq!(meter.overdue(limit), (0, None));
    }
}
