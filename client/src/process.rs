//! The session of this process: opened at the first allocation, one runtime per device, there until the process ends.
//!
//! The path of an allocation takes no lock here: a device's runtime is found by one load. Only what has to be set up waits for others that set up the same.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use stitchd::clock::{Clock, SystemClock};
use stitchd::error::chain;
use stitchd::plan::format;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::locate::Environment;
use stitchd::session::{Session, SessionConfig, fork};

/// Devices that a process can use.
const DEVICES_MAX: usize = 64;
/// After a failure so long nothing is tried again: a job without a daemon must not wait for one at every allocation.
const PAUSE: Duration = Duration::from_secs(1);

static RUNTIMES: [OnceLock<Runtime>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];
static SETUP: Mutex<Setup> = Mutex::new(Setup { session: None, clock: None, failed: None });

struct Setup {
    session: Option<Arc<Session>>,
    clock: Option<SystemClock>,
    /// The last try that failed.
    failed: Option<Failure>,
}

/// A try that failed.
struct Failure {
    /// When.
    at: Duration,
    device: u32,
    /// There was no session yet: what failed stands in the way of every device.
    is_everywhere: bool,
    why: String,
}

impl Failure {
    /// Whether nothing is tried now for `device`. What is wrong with one keeps nobody from the others.
    fn holds(&self, now: Duration, device: u32) -> bool {
        now < self.at + PAUSE && (self.is_everywhere || device == self.device)
    }
}

/// The runtime of a device, set up if it is not yet.
#[inline]
pub(crate) fn runtime(device: i32) -> Result<&'static Runtime, String> {
    if fork::is_child() {
        return Err(stitchd::session::SessionError::Forked.to_string());
    }
    let slot = usize::try_from(device).ok().and_then(|device| RUNTIMES.get(device));
    let slot = slot.ok_or_else(|| format!("device {device} is not one that a process can have"))?;
    match slot.get() {
        Some(runtime) => Ok(runtime),
        None => set_up(device as u32, slot),
    }
}

/// The runtime of a device, if there is one already.
#[inline]
pub(crate) fn existing(device: i32) -> Option<&'static Runtime> {
    if fork::is_child() {
        return None;
    }
    usize::try_from(device).ok().and_then(|device| RUNTIMES.get(device)).and_then(OnceLock::get)
}

#[cold]
fn set_up(device: u32, slot: &'static OnceLock<Runtime>) -> Result<&'static Runtime, String> {
    // Before the lock: a child that is forked while another thread holds it must know that it is one.
    fork::watch();
    // A panic under this lock was caught at the border; what it left is no worse than nothing.
    let mut setup = SETUP.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(runtime) = slot.get() {
        return Ok(runtime);
    }
    let now = setup.clock.get_or_insert_with(SystemClock::new).now();
    if let Some(failure) = setup.failed.as_ref().filter(|failure| failure.holds(now, device)) {
        return Err(failure.why.clone());
    }
    match make(&mut setup, device) {
        Ok(runtime) => Ok(slot.get_or_init(|| runtime)),
        Err(why) => {
            let at = setup.clock.as_ref().map_or(Duration::ZERO, SystemClock::now);
            setup.failed = Some(Failure { at, device, is_everywhere: setup.session.is_none(), why: why.clone() });
            Err(why)
        }
    }
}

fn make(setup: &mut Setup, device: u32) -> Result<Runtime, String> {
    let environment = Environment::read();
    let session = match &setup.session {
        Some(session) => Arc::clone(session),
        None => {
            let library = environment.library.clone();
            let config = SessionConfig { library, ..SessionConfig::new(environment.socket(), name()) };
            let session = Session::connect(&config).map_err(|error| chain(&error))?;
            setup.session = Some(Arc::clone(&session));
            session
        }
    };
    let runtime = session.runtime(device, RuntimeConfig::default()).map_err(|error| chain(&error))?;
    if let Some(path) = &environment.plan {
        let path = std::path::Path::new(path);
        let failed = |why: String| format!("STITCHD_PLAN: {}: {why}", path.display());
        let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        let plan = format::read(&bytes).map_err(|error| failed(chain(&error)))?;
        runtime.install_plan(&plan).map_err(|error| failed(chain(&error)))?;
    }
    Ok(runtime)
}

/// What people call this process: its program's name.
fn name() -> String {
    let command = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    format!("{}-{}", command.trim(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_failed_is_let_be_for_a_moment_and_keeps_nobody_from_the_others() {
        let at = Duration::from_secs(7);
        let failure = |is_everywhere| Failure { at, device: 5, is_everywhere, why: String::new() };
        assert!(failure(false).holds(at, 5) && !failure(false).holds(at + PAUSE, 5));
        assert!(!failure(false).holds(at, 0));
        assert!(failure(true).holds(at, 0), "without a session there is no device");
    }
}
