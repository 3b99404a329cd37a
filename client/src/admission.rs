//! Iterations that begin when their peak is guaranteed: jobs whose peaks are together more than a device has take turns.
//!
//! Only where the environment says so (`STITCHD_ADMIT`). A job that is not admitted in time goes on without: a request may have to wait in the middle of its iteration then, as without all this.

use std::sync::OnceLock;
use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};
use stitchd::error::chain;
use stitchd::ids::DeviceUuid;
use stitchd::runtime::{Need, Runtime};
use stitchd::session::{Session, SessionError};
use stitchd::units::Bytes;

use crate::process;

/// How long an iteration waits; nothing where it does not. Said once, with the session.
static WAIT: OnceLock<Option<Duration>> = OnceLock::new();

pub(crate) fn wait_so_long(wait: Option<Duration>) {
    // Another session of this process is asked for with the same environment.
    let _ = WAIT.set(wait);
}

fn wait() -> Option<Duration> {
    WAIT.get().copied().flatten()
}

/// An iteration begins on some devices, of which one ends.
pub(crate) fn next_iteration(devices: &[i32]) -> Result<(), String> {
    let Some(wait) = wait() else { return Ok(()) };
    let Some(session) = process::open_session() else { return Ok(()) };
    let runtimes: Vec<(i32, &Runtime)> =
        devices.iter().filter_map(|device| Some((*device, process::existing(*device)?))).collect();
    let needs: Vec<(DeviceUuid, Need)> = runtimes
        .iter()
        .map(|(device, runtime)| {
            let needs = process::of_device(*device).into_iter().map(Runtime::need);
            (runtime.device().uuid(), needs.fold(Need::default(), Need::and))
        })
        .collect();
    let runtimes: Vec<&Runtime> = runtimes.into_iter().map(|(_, runtime)| runtime).collect();
    admit(&session, &runtimes, &needs, wait).map_err(|error| not_admitted(&error))
}

/// The first iteration is about to begin, with a plan that needs so much.
pub(crate) fn first_iteration(session: &Session, runtime: &Runtime, plan: Bytes) {
    let Some(wait) = wait() else { return };
    let need = Need { at_rest: Bytes::ZERO, peak: plan };
    if let Err(error) = admit(session, &[runtime], &[(runtime.device().uuid(), need)], wait) {
        crate::ffi::note(&not_admitted(&error));
    }
}

fn admit(
    session: &Session,
    runtimes: &[&Runtime],
    needs: &[(DeviceUuid, Need)],
    wait: Duration,
) -> Result<(), SessionError> {
    let clock = SystemClock::new();
    let admitted = session.admit_iteration(needs, wait);
    let took = clock.now();
    runtimes.iter().for_each(|runtime| runtime.note_admission(admitted.is_ok(), took));
    admitted
}

fn not_admitted(error: &SessionError) -> String {
    format!("the next iteration begins without its peak guaranteed (STITCHD_ADMIT): {}", chain(error))
}

/// Has this process guaranteed so much of a device, in place of what it is.
pub(crate) fn guarantee(device: i32, bytes: Bytes, wait: Duration) -> Result<(), String> {
    let runtime = process::runtime(device)?;
    let session = process::daemon_session()?;
    session.admit(runtime.device().uuid(), bytes, wait).map_err(|error| chain(&error))
}
