//! Iterations that begin when their peak is guaranteed: jobs whose peaks are together more than a device has take turns.
//!
//! Only where the environment says so (`STITCHD_ADMIT`). A job that is not admitted in time goes on without: a request may have to wait in the middle of its iteration then, as without all this. What is refused
//! again and again is waited for half as long each time, and a daemon that does not answer is let be for a while: nobody's job stands still for what does not come.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use stitchd::error::{ErrorKind, chain};
use stitchd::ids::DeviceUuid;
use stitchd::runtime::{Need, Runtime};
use stitchd::session::{Session, SessionError};
use stitchd::units::Bytes;

use crate::process;

/// How long an iteration waits; nothing where it does not. Said once, with the session.
static WAIT: OnceLock<Option<Duration>> = OnceLock::new();
/// Refusals since an iteration was admitted.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Until then the daemon is not asked: it did not answer.
static SILENT_UNTIL: Mutex<Duration> = Mutex::new(Duration::ZERO);
/// For so long.
const SILENCE: Duration = Duration::from_secs(60);

pub(crate) fn wait_so_long(wait: Option<Duration>) {
    // Another session of this process is asked for with the same environment.
    let _ = WAIT.set(wait);
}

/// How long the next iteration waits: half as long with each refusal, at last not at all.
fn wait() -> Option<Duration> {
    let wait = WAIT.get().copied().flatten()?;
    Some(wait / 2_u32.saturating_pow(REFUSED.load(Ordering::Relaxed)))
}

/// What each of the devices needs that the process uses, of some.
fn needs_of(devices: &[i32]) -> Vec<(&'static Runtime, (DeviceUuid, Need))> {
    let need = |device: &i32| {
        let runtime = process::existing(*device)?;
        let needs = process::of_device(*device).into_iter().map(Runtime::need);
        Some((runtime, (runtime.device().uuid(), needs.fold(Need::default(), Need::and))))
    };
    devices.iter().filter_map(need).collect()
}

/// An iteration begins on some devices, of which one ends.
pub(crate) fn next_iteration(devices: &[i32]) -> Result<(), String> {
    let Some(wait) = wait() else { return Ok(()) };
    let Some(session) = process::open_session() else { return Ok(()) };
    let (runtimes, needs): (Vec<&Runtime>, Vec<_>) = needs_of(devices).into_iter().unzip();
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

/// No iteration goes on for a while: what it was admitted with is for others.
pub(crate) fn rest(devices: &[i32]) {
    let (Some(_), Some(session)) = (wait(), process::open_session()) else { return };
    let (_, needs): (Vec<&Runtime>, Vec<_>) = needs_of(devices).into_iter().unzip();
    // One that does not hear it hears it with the next mark.
    let _ = session.rest(&needs);
}

fn admit(
    session: &Session,
    runtimes: &[&Runtime],
    needs: &[(DeviceUuid, Need)],
    wait: Duration,
) -> Result<(), SessionError> {
    let begun = process::now();
    let silent_until = || SILENT_UNTIL.lock().unwrap_or_else(PoisonError::into_inner);
    let is_silent = !session.is_attached() || begun < *silent_until();
    let admitted = if is_silent { Err(SessionError::DaemonGone) } else { session.admit_iteration(needs, wait) };
    let now = process::now();
    match &admitted {
        Ok(()) => REFUSED.store(0, Ordering::Relaxed),
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            if !is_silent {
                *silent_until() = now + SILENCE;
            }
        }
        Err(_) => drop(REFUSED.fetch_add(1, Ordering::Relaxed)),
    }
    runtimes.iter().for_each(|runtime| runtime.note_admission(admitted.is_ok(), now.saturating_sub(begun)));
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
