//! Makes a driver run out early: of bytes, handles, exported chunks or mappings.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::{Intercept, Layered, Step};
use crate::driver::{Cause, Driver, DriverError, Handle};
use crate::ids::DeviceId;
use crate::units::{Bytes, DeviceAddress, Place};

/// A driver that runs out early.
pub type Limited = Layered<Limiter>;

/// How much there is. Everything is unlimited by default.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all handles that were created and not released.
    pub created: Bytes,
    /// Handles, created and imported.
    pub handles: u64,
    /// Handles that were exported.
    pub exported: u64,
    /// Mappings.
    pub mappings: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { created: Bytes::MAX, handles: u64::MAX, exported: u64::MAX, mappings: u64::MAX }
    }
}

/// Holds the limits.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    /// Every handle with the bytes that it counts for: none for an import.
    handles: HashMap<Handle, Bytes>,
    created: Bytes,
    exported: HashSet<Handle>,
    mappings: BTreeSet<DeviceAddress>,
}

impl Limiter {
    /// Puts limits around `driver`.
    pub fn around(driver: Arc<dyn Driver>, limits: Limits) -> Arc<Limited> {
        Arc::new(Layered::new(driver, Limiter { limits, used: Mutex::default() }))
    }

    fn check(&self, used: &Used, step: &Step) -> Result<(), Cause> {
        let count = |what, used: usize, limit| {
            let too_many = Cause::TooMany { what, limit, remedy: "raise the limit of this driver layer" };
            if (used as u64) < limit { Ok(()) } else { Err(too_many) }
        };
        match step {
            Step::Create { device, len } => {
                count("handles", used.handles.len(), self.limits.handles)?;
                self.check_created(used, *device, *len)
            }
            Step::Import { .. } => count("handles", used.handles.len(), self.limits.handles),
            Step::Export { handle } if !used.exported.contains(handle) => {
                count("exported chunks", used.exported.len(), self.limits.exported)
            }
            Step::Map { .. } => count("mappings", used.mappings.len(), self.limits.mappings),
            _ => Ok(()),
        }
    }

    fn check_created(&self, used: &Used, device: DeviceId, requested: Bytes) -> Result<(), Cause> {
        let total = self.limits.created;
        let available = total.saturating_sub(used.created);
        if requested > available {
            return Err(Cause::Exhausted { device, requested, available, total });
        }
        Ok(())
    }
}

impl Used {
    fn note(&mut self, step: &Step, handle: Option<Handle>) {
        match *step {
            Step::Create { len, .. } => {
                self.created += len;
                self.handles.extend(handle.map(|handle| (handle, len)));
            }
            Step::Import { .. } => self.handles.extend(handle.map(|handle| (handle, Bytes::ZERO))),
            Step::Release { handle } => {
                self.created -= self.handles.remove(&handle).unwrap_or(Bytes::ZERO);
                self.exported.remove(&handle);
            }
            Step::Export { handle } => {
                self.exported.insert(handle);
            }
            Step::Map { at } => {
                self.mappings.insert(at);
            }
            Step::Unmap { span } => {
                let end = DeviceAddress::from_raw(span.end().raw());
                self.mappings.retain(|at| *at < span.start() || *at >= end);
            }
            Step::Other(_) => {}
        }
    }
}

impl Intercept for Limiter {
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        // Held over the call: two calls together must not pass a limit that each alone keeps.
        let mut used = self.used.lock().expect("nothing panics while it holds this lock");
        self.check(&used, &step).map_err(|cause| DriverError::new(step.call(), cause))?;
        let answer = run()?;
        used.note(&step, handle(&answer));
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::error::ErrorKind;

    const DEVICE: DeviceId = DeviceId(0);

    fn limited(limits: Limits) -> Arc<Limited> {
        Limiter::around(Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(1)]))), limits)
    }

    #[test]
    fn each_limit_is_met_and_freed_again() {
        let driver = limited(Limits { created: Bytes::mib(4), handles: 2, ..Limits::default() });
        let first = driver.create(DEVICE, Bytes::mib(4)).unwrap();
        assert_eq!(driver.create(DEVICE, Bytes::mib(2)).unwrap_err().kind(), ErrorKind::Exhausted);
        driver.release(first).unwrap();
        let handles = [driver.create(DEVICE, Bytes::mib(2)).unwrap(), driver.create(DEVICE, Bytes::mib(2)).unwrap()];
        assert!(matches!(driver.create(DEVICE, Bytes::mib(2)).unwrap_err().cause, Cause::TooMany { .. }));
        driver.release(handles[0]).unwrap();

        let driver = limited(Limits { mappings: 1, exported: 1, ..Limits::default() });
        let handle = driver.create(DEVICE, Bytes::mib(2)).unwrap();
        let other = driver.create(DEVICE, Bytes::mib(2)).unwrap();
        let base = driver.reserve(DEVICE, Bytes::mib(4), Bytes::mib(2)).unwrap();
        let next = base.checked_add(Bytes::mib(2)).unwrap();
        driver.map(base, handle).unwrap();
        assert!(matches!(driver.map(next, handle).unwrap_err().cause, Cause::TooMany { .. }));
        driver.unmap(crate::units::Span::new(base, Bytes::mib(2)).unwrap()).unwrap();
        driver.map(next, handle).unwrap();
        driver.export(handle).unwrap();
        driver.export(handle).unwrap();
        assert!(matches!(driver.export(other).unwrap_err().cause, Cause::TooMany { .. }));
    }
}
