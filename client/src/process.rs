//! The session of this process: opened at the first allocation, one runtime per device, there until the process ends.
//!
//! The path of an allocation takes no lock here: a device's runtime is found by one load. Only what has to be set up waits for others that set up the same.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use stitchd::auto::{AutoPlanner, NoShelf};
use stitchd::clock::{Clock, SystemClock};
use stitchd::error::chain;
use stitchd::plan::Position;
use stitchd::plan::directory::{self, Found};
use stitchd::runtime::{Room, Runtime, RuntimeConfig};
use stitchd::session::auto::{DaemonShelf, DirectoryShelf, PlannerThread};
use stitchd::session::giving::GiverThread;
use stitchd::session::locate::{self, Environment, WithoutDaemon};
use stitchd::session::recording::{FileRecording, Recording};
use stitchd::session::{PrivateProcess, Session, SessionConfig, SessionError, exit, fork};
use stitchd::units::Bytes;

use crate::admission;
use crate::ffi;
use crate::tags;

/// Devices that a process can use.
const DEVICES_MAX: usize = 64;
/// After a failure so long nothing is tried again: a job without a daemon must not wait for one at every allocation.
const PAUSE: Duration = Duration::from_secs(1);

static RUNTIMES: [OnceLock<Runtime>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];
/// One for each device, so that a device which takes long to set up, or cannot be, keeps nobody from the others.
static DEVICES: [Mutex<Pause>; DEVICES_MAX] = [const { Mutex::new(Pause::NONE) }; DEVICES_MAX];
/// The part of each device's memory that the process has set itself as a limit, in bits.
static FRACTIONS: [AtomicU64; DEVICES_MAX] = [const { AtomicU64::new(1.0_f64.to_bits()) }; DEVICES_MAX];
/// The session, and the last try to open one: without it there is no device.
static SESSION: Mutex<(Option<Arc<Origin>>, Pause)> = Mutex::new((None, Pause::NONE));
/// Recordings into files, one for each device, to end when the process does.
static RECORDINGS: Mutex<Vec<FileRecording>> = Mutex::new(Vec::new());
/// Who looks after the plans of runtimes, as long as the process lives.
static PLANNERS: Mutex<Vec<PlannerThread>> = Mutex::new(Vec::new());
/// Who gives idle memory of runtimes back when others wait for it.
static GIVERS: Mutex<Vec<GiverThread>> = Mutex::new(Vec::new());
static CLOCK: LazyLock<SystemClock> = LazyLock::new(SystemClock::new);

/// Where the process has its memory from.
#[derive(Debug)]
enum Origin {
    Daemon(Arc<Session>),
    /// From nobody: it found no daemon, and was told to go on without.
    Private(PrivateProcess),
}

/// How long the end of the process may wait for each of its threads.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// What is not tried again for a moment once it has failed.
struct Pause {
    /// When the last try failed, and why.
    failed: Option<(Duration, String)>,
}

impl Pause {
    const NONE: Pause = Pause { failed: None };

    /// Tries, or says why the last try failed if that was just now.
    fn attempt<T>(&mut self, clock: &dyn Clock, make: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        if let Some((_, why)) = self.failed.as_ref().filter(|(at, _)| clock.now() < *at + PAUSE) {
            return Err(why.clone());
        }
        make().inspect_err(|why| self.failed = Some((clock.now(), why.clone())))
    }
}

/// A panic under one of these locks was caught at the border; what it left is no worse than nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime of a device, set up if it is not yet.
#[inline]
pub(crate) fn runtime(device: i32) -> Result<&'static Runtime, String> {
    check_child()?;
    let slot = usize::try_from(device).ok().and_then(|device| RUNTIMES.get(device));
    let slot = slot.ok_or_else(|| no_such(device))?;
    match slot.get() {
        Some(runtime) => Ok(runtime),
        None => set_up(device as u32, slot),
    }
}

/// Sets up what the first allocation would: the session, and with a number that is not negative a device, too. A plan file that cannot be read is told of here, whatever the device.
pub(crate) fn open(device: i32) -> Result<(), String> {
    check_child()?;
    if device >= 0 {
        return runtime(device).map(drop);
    }
    fork::watch();
    session()?;
    let environment = Environment::read();
    environment.plan_file().map_or(Ok(()), |path| choose_plan(path, environment.position()).map(drop))
}

/// The session with the daemon, opened if it is not yet: a process that is its own daemon shares nothing.
pub(crate) fn daemon_session() -> Result<Arc<Session>, String> {
    check_child()?;
    fork::watch();
    match &*session()? {
        Origin::Daemon(session) => Ok(Arc::clone(session)),
        Origin::Private(_) => Err("this process has its memory from no daemon, and shares nothing".to_owned()),
    }
}

/// A forked child has no part in its parent's memory.
#[inline]
pub(crate) fn check_child() -> Result<(), String> {
    if fork::is_child() { Err(SessionError::Forked.to_string()) } else { Ok(()) }
}

/// The driver that the process has its memory from, once there is a session.
pub(crate) fn driver_name() -> Option<&'static str> {
    let opened = if fork::is_child() { None } else { lock(&SESSION).0.clone() };
    opened.map(|origin| match &*origin {
        Origin::Daemon(session) => session.driver().name(),
        Origin::Private(process) => process.driver_name(),
    })
}

/// The runtime of a device, if there is one already.
#[inline]
pub(crate) fn existing(device: i32) -> Option<&'static Runtime> {
    if fork::is_child() {
        return None;
    }
    usize::try_from(device).ok().and_then(|device| RUNTIMES.get(device)).and_then(OnceLock::get)
}

/// Every device that the process uses.
pub(crate) fn devices() -> Vec<i32> {
    (0..DEVICES_MAX as i32).filter(|device| existing(*device).is_some()).collect()
}

/// The runtimes of a device, those of tags among them.
pub(crate) fn of_device(device: i32) -> Vec<&'static Runtime> {
    existing(device).into_iter().chain(tags::of_device(device)).collect()
}

/// Does something with every runtime of the process, those of tags among them.
pub(crate) fn each(mut with: impl FnMut(&'static Runtime)) {
    each_untagged(&mut with);
    tags::each(with);
}

/// The same without those of tags.
pub(crate) fn each_untagged(with: impl FnMut(&'static Runtime)) {
    (0..DEVICES_MAX as i32).filter_map(existing).for_each(with);
}

/// Something is captured on some device.
pub(crate) fn is_capturing() -> bool {
    let mut is_any = false;
    each_untagged(|runtime| is_any |= runtime.is_capturing());
    is_any
}

/// The time, to wait until.
pub(crate) fn now() -> Duration {
    CLOCK.now()
}

/// The session with the daemon, if one is open.
pub(crate) fn open_session() -> Option<Arc<Session>> {
    if fork::is_child() {
        return None;
    }
    match lock(&SESSION).0.as_deref()? {
        Origin::Daemon(session) => Some(Arc::clone(session)),
        Origin::Private(_) => None,
    }
}

/// One more runtime of a device, beside that which everybody uses: without a plan, and in no recording.
pub(crate) fn another_runtime(device: i32) -> Result<Runtime, String> {
    // What is wrong with the device is found once.
    runtime(device)?;
    limited(&*session()?, device as u32, RuntimeConfig::default())
}

/// A runtime of a device that keeps the limit which the process has set itself.
fn limited(origin: &Origin, device: u32, config: RuntimeConfig) -> Result<Runtime, String> {
    let made = match origin {
        Origin::Daemon(session) => session.runtime(device, RuntimeConfig { wait: session.wait(), ..config }),
        Origin::Private(process) => process.runtime(device, config),
    };
    let runtime = made.map_err(|error| chain(&error))?;
    limit(&runtime, device)?;
    Ok(runtime)
}

/// The most that this process wants to hold on a device, as a part of all that the device has: from now on, and also where it has not used the device yet.
pub(crate) fn set_fraction(device: i32, fraction: f64) -> Result<(), String> {
    let slot = usize::try_from(device).ok().and_then(|device| FRACTIONS.get(device));
    let slot = slot.ok_or_else(|| no_such(device))?;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(format!("{fraction} is no fraction of a device's memory"));
    }
    slot.store(fraction.to_bits(), Ordering::Release);
    existing(device).map_or(Ok(()), |runtime| limit(runtime, device as u32))
}

/// How much memory the process may have on a device, and could get. Sets the device up if it is not yet.
pub(crate) fn room(device: i32) -> Result<Room, String> {
    runtime(device)?.room().map_err(|error| chain(&error))
}

/// Sets a runtime the limit that the process has set for its device.
fn limit(runtime: &Runtime, device: u32) -> Result<(), String> {
    let fraction = f64::from_bits(FRACTIONS[device as usize].load(Ordering::Acquire));
    if fraction >= 1.0 {
        runtime.set_limit(None);
        return Ok(());
    }
    let total = runtime.device_total().map_err(|error| chain(&error))?;
    let most = Bytes::new((total.get() as f64 * fraction) as u64);
    runtime.set_limit(Some(most));
    Ok(())
}

/// An iteration ends on a device, or on all that the process uses.
pub(crate) fn mark_iteration(device: i32) -> Result<(), String> {
    if device >= DEVICES_MAX as i32 || device < -1 {
        return Err(no_such(device));
    }
    let devices = if device == -1 { devices() } else { vec![device] };
    for device in &devices {
        existing(*device).into_iter().for_each(Runtime::mark_iteration);
        tags::of_device(*device).into_iter().for_each(Runtime::turn_peak);
    }
    admission::next_iteration(&devices)
}

pub(crate) fn no_such(device: i32) -> String {
    format!("device {device} is not one that a process can have")
}

#[cold]
fn set_up(device: u32, slot: &'static OnceLock<Runtime>) -> Result<&'static Runtime, String> {
    // Before the locks: a child that is forked while another thread holds one must know that it is one.
    fork::watch();
    let mut pause = lock(&DEVICES[device as usize]);
    if let Some(runtime) = slot.get() {
        return Ok(runtime);
    }
    // What is wrong with the session is no fault of the device.
    let session = session()?;
    let (runtime, planner) = pause.attempt(&*CLOCK, || make(&session, device))?;
    let runtime = slot.get_or_init(|| runtime);
    if let Origin::Daemon(session) = &*session {
        // Without one more thread the daemon hears that there is nothing to give.
        let give = move |bytes| {
            runtime.give_back_idle_with(&tags::of_device(device as i32), bytes);
        };
        let segments = move || of_device(device as i32).iter().flat_map(|runtime| runtime.segments()).collect();
        lock(&GIVERS).extend(GiverThread::with(session, runtime.device().uuid(), give, segments));
        exit::before(end_threads);
    }
    if let Some(planner) = planner {
        // Without one more thread there are no plans, and the job goes on.
        lock(&PLANNERS).extend(look_after(&session, planner, runtime));
        exit::before(end_threads);
    }
    Ok(runtime)
}

fn look_after(origin: &Origin, planner: AutoPlanner, runtime: &'static Runtime) -> std::io::Result<PlannerThread> {
    let environment = Environment::read();
    let position = environment.position();
    match (environment.plan_file(), origin) {
        (Some(directory), _) => {
            PlannerThread::begin(planner, runtime, DirectoryShelf::new(directory.to_owned(), position))
        }
        (None, Origin::Daemon(session)) => {
            PlannerThread::begin(planner, runtime, DaemonShelf::new(Arc::clone(session), position, name()))
        }
        (None, Origin::Private(_)) => PlannerThread::begin(planner, runtime, NoShelf),
    }
}

fn make(origin: &Origin, device: u32) -> Result<(Runtime, Option<AutoPlanner>), String> {
    let environment = Environment::read();
    let chosen = environment.plan_file().map(|path| choose_plan(path, environment.position())).transpose()?;
    let Found { plan: file, is_of_several_jobs, .. } = chosen.unwrap_or_default();
    let plans_itself = environment.plans_itself() || is_of_several_jobs;
    let config = RuntimeConfig::default();
    let runtime = limited(origin, device, config)?;
    if let (Origin::Daemon(session), Some((_, plan))) = (origin, &file) {
        // Before its memory is asked for.
        admission::first_iteration(session, &runtime, plan.pool_len);
    }
    let planner = plans_itself.then(|| AutoPlanner::begin(&runtime));
    if let Some((path, plan)) = file {
        match runtime.install_plan(&plan) {
            Ok(()) => {}
            // There is no memory for it now, as where it is another device's: the job is served as without it.
            Err(error) if error.kind().is_lack() => {
                runtime.note_plan_refused();
                ffi::note(&of_plan(&path, &chain(&error)));
            }
            Err(error) => return Err(of_plan(&path, &chain(&error))),
        }
    }
    if let Some(name) = &environment.record {
        let is_directory = name.as_encoded_bytes().ends_with(b"/") || Path::new(name).is_dir();
        if is_directory {
            return Err(format!("STITCHD_RECORD: {} is a directory; name a file in it", Path::new(name).display()));
        }
        let path = locate::recording_path(name, std::process::id(), device);
        let recording = Recording::to_file(&runtime, &path, environment.record_len_max());
        match recording.map_err(|error| format!("STITCHD_RECORD: {}: {error}", path.display())) {
            Ok(recording) => {
                lock(&RECORDINGS).push(recording);
                exit::before(end_threads);
            }
            // One that is made by the way is missed by nobody.
            Err(why) if environment.record_limit.is_some() => ffi::note(&why),
            Err(why) => return Err(why),
        }
    }
    Ok((runtime, planner))
}

/// The plan of a file; of a directory the one that is for this process, if there is one.
fn choose_plan(path: &Path, position: Option<Position>) -> Result<Found, String> {
    if path.is_dir() {
        let found = directory::find(path, position).map_err(|error| of_plan(path, &error.to_string()))?;
        let unusable = found.unusable.as_ref();
        if found.plan.is_none() && !found.is_of_several_jobs {
            let whose = position.map_or_else(String::new, |position| format!(" for {position}, nor"));
            let unusable = unusable.map_or_else(String::new, |unusable| format!("; {unusable}"));
            let text = format!("there is no plan{whose} for any process: the job goes on without{unusable}");
            ffi::note(&of_plan(path, &text));
        } else if let Some(unusable) = unusable {
            ffi::note(&of_plan(path, unusable));
        }
        return Ok(found);
    }
    let plan = directory::read(path).map_err(|why| of_plan(path, &why))?;
    Ok(Found { plan: Some((path.to_owned(), plan)), ..Found::default() })
}

fn of_plan(path: &Path, why: &str) -> String {
    format!("STITCHD_PLAN: {}: {why}", path.display())
}

/// The process ends: nobody looks after plans any more, and what has been recorded is written to its end. In a forked child there is nothing to write, and nobody who could.
fn end_threads() {
    if fork::is_child() {
        return;
    }
    let planners = std::mem::take(&mut *lock(&PLANNERS));
    planners.into_iter().for_each(|planner| planner.end(END_PATIENCE));
    let givers = std::mem::take(&mut *lock(&GIVERS));
    givers.into_iter().for_each(|giver| giver.end(END_PATIENCE));
    let recordings = std::mem::take(&mut *lock(&RECORDINGS));
    for recording in recordings {
        // Where the file does not get on, it is cut, and its reader says so.
        let _ = recording.end(END_PATIENCE);
    }
}

/// The session, opened by whoever comes first.
fn session() -> Result<Arc<Origin>, String> {
    let mut opened = lock(&SESSION);
    let (session, pause) = &mut *opened;
    if let Some(session) = session {
        return Ok(Arc::clone(session));
    }
    let made = pause.attempt(&*CLOCK, || {
        let environment = Environment::read();
        let (without, terms) = (environment.without_daemon()?, environment.terms()?);
        let config = SessionConfig {
            library: environment.library.clone(),
            tenant: environment.tenant(),
            pod: environment.pod(),
            limit: terms.limit,
            priority: terms.priority,
            guarantee: terms.guarantee,
            ..SessionConfig::new(environment.socket(), name())
        };
        admission::wait_so_long(terms.admit);
        let missing = match Session::connect(&config) {
            Ok(session) => return Ok(Origin::Daemon(session)),
            // One that is there and says no is not gone around.
            Err(error @ SessionError::NoDaemon { .. }) => chain(&error),
            Err(error) => return Err(chain(&error)),
        };
        match without {
            WithoutDaemon::Refuse => Err(format!("{missing}; STITCHD_WITHOUT_DAEMON=private goes on without one")),
            WithoutDaemon::Private => go_private(&environment, &missing),
        }
    })?;
    Ok(Arc::clone(session.insert(Arc::new(made))))
}

/// The process is its own daemon from now on, and its last error says so.
fn go_private(environment: &Environment, missing: &str) -> Result<Origin, String> {
    let driver = environment.driver.as_ref().map(|name| name.to_string_lossy());
    let process = PrivateProcess::open(driver.as_deref(), &environment.library);
    let process = process.map_err(|error| format!("{missing}; and not without one: {}", chain(&error)))?;
    ffi::note(&format!("{missing}; this process takes its memory itself (STITCHD_WITHOUT_DAEMON=private)"));
    Ok(Origin::Private(process))
}

/// What people call this process: its program's name. Its number would make a series of its own in everybody's metrics each time that it is started.
fn name() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use stitchd::clock::ManualClock;

    use super::*;

    #[test]
    fn devices_that_failed_are_let_be_for_a_moment_each_by_itself() {
        let clock = ManualClock::default();
        let mut devices = [Pause::NONE, Pause::NONE];
        let mut attempts = 0;
        let mut alternate = |devices: &mut [Pause; 2]| {
            for _ in 0..5 {
                for (device, pause) in devices.iter_mut().enumerate() {
                    let answer = pause.attempt(&clock, || {
                        attempts += 1;
                        Err::<(), _>(format!("device {device} is no good"))
                    });
                    assert_eq!(answer, Err(format!("device {device} is no good")));
                }
            }
            attempts
        };
        assert_eq!(alternate(&mut devices), 2);
        assert_eq!(alternate(&mut devices), 2);
        clock.advance(PAUSE);
        assert_eq!(alternate(&mut devices), 4);
        // What did not fail is not let be.
        let [first, _] = &mut devices;
        clock.advance(PAUSE);
        assert_eq!([(); 2].map(|()| first.attempt(&clock, || Ok(7))), [Ok(7), Ok(7)]);
    }
}
