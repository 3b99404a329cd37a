//! Fails chosen calls of a driver, before they change anything: the n-th call of whatever kind but questions, or every call of a kind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{Intercept, Layered, Step};
use crate::driver::{Call, Cause, Driver, DriverError, Handle};

/// A driver that fails on purpose.
pub type Faulty = Layered<Faults>;

/// Which calls fail. None, until told.
#[derive(Debug, Default)]
pub struct Faults {
    /// Calls still to come before one fails; 0 for none.
    countdown: AtomicU64,
    kinds: Mutex<Vec<Call>>,
    injected: AtomicU64,
}

impl Faults {
    /// Puts faults around `driver`.
    pub fn around(driver: Arc<dyn Driver>) -> Arc<Faulty> {
        Arc::new(Layered::new(driver, Faults::default()))
    }

    /// Lets the `n`-th call from now fail, once: of memory, addresses, streams, events, copies, or waiting for the device. Questions do not count. 0 lets none fail.
    pub fn fail_nth(&self, n: u64) {
        self.countdown.store(n, Ordering::Relaxed);
    }

    /// Lets every call of these kinds fail, until told otherwise.
    pub fn fail_always(&self, kinds: &[Call]) {
        *self.kinds.lock().expect("nothing panics while it holds this lock") = kinds.to_vec();
    }

    /// How many calls have failed on purpose.
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }

    fn is_due(&self, call: Call) -> bool {
        if self.kinds.lock().expect("nothing panics while it holds this lock").contains(&call) {
            return true;
        }
        let count = |left: u64| left.checked_sub(1);
        call != Call::Query && self.countdown.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) == Ok(1)
    }
}

impl Intercept for Faults {
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        _handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        if self.is_due(step.call()) {
            let number = self.injected.fetch_add(1, Ordering::Relaxed) + 1;
            return Err(DriverError::new(step.call(), Cause::Injected(number)));
        }
        run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::ids::DeviceId;
    use crate::units::Bytes;

    #[test]
    fn the_chosen_call_fails_once_and_changes_nothing() {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(8)])));
        let faulty = Faults::around(Arc::clone(&sim) as Arc<dyn Driver>);
        let device = DeviceId(0);
        faulty.layer().fail_nth(2);
        let handle = faulty.create(device, Bytes::mib(2)).unwrap();
        let free = faulty.memory(device).unwrap().free;
        assert_eq!(faulty.create(device, Bytes::mib(2)).unwrap_err().cause, Cause::Injected(1));
        assert_eq!(faulty.memory(device).unwrap().free, free);
        faulty.create(device, Bytes::mib(2)).unwrap();
        faulty.layer().fail_always(&[Call::Release]);
        faulty.release(handle).unwrap_err();
        faulty.release(handle).unwrap_err();
        faulty.layer().fail_always(&[]);
        faulty.release(handle).unwrap();
        assert_eq!(faulty.layer().injected(), 3);
    }
}
