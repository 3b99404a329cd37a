//! The in-process side of the wire: finds the daemon, opens a session, leases chunks, and gives runtimes their memory.
//!
//! Control goes over gRPC on a background thread ([`control`]); chunks go over the chunk socket in the thread that needs them ([`link`]). Without a daemon
//! a process can be its own ([`private`]).
//!
//! Not for: deciding anything about memory. It is thin.
//!
//! A daemon that is away, restarts or refuses is an error with a reason, after a bounded time; what is leased already stays. A forked child is inert
//! ([`fork`]).

mod aside;
pub mod auto;
mod background;
mod claim;
mod control;
pub mod exit;
pub mod fork;
pub mod giving;
pub mod holdings;
mod line;
mod link;
pub mod locate;
pub mod opening;
mod private;
mod quiet_stream;
pub mod recording;
mod returning;
pub mod shared;
mod showing;
mod signals;
mod source;
mod stats_page;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use control::dial;
pub use private::{PrivateProcess, PrivateSource};

use crate::clock::{Clock, SystemClock};
use crate::driver::layers::metered::{CallCounts, Meter, Metered};
use crate::driver::layers::sleeping::Sleeping;
use crate::driver::{self, Driver, DriverError, DriverName, LibraryPlace, OpenError};
use crate::error::ErrorKind;
use crate::ids::{DeviceId, DeviceUuid, PlanId, SessionId};
use crate::ladder::{Ladder, LadderError};
use crate::memory::Device;
use crate::plan::format::{self, FormatError};
use crate::plan::{Fingerprint, Plan, Position};
use crate::runtime::{Counters, Need, Runtime, RuntimeConfig};
use crate::units::Bytes;
use crate::wire::convert::{Malformed, WantedPlans, malformed};
use crate::wire::fd_channel::ChannelError;
use crate::wire::peer::{SocketType, listener_at};
use crate::wire::stats_page::StatsPageError;
use crate::wire::v1;
use control::{Control, Seen, Watched};
use giving::Givers;
use line::Line;
use link::Link;
use source::DaemonSource;

/// How a session is opened.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The daemon's gRPC socket.
    pub socket: PathBuf,
    /// What people call the session.
    pub name: String,
    /// Bytes that it may never pass; `None` for the daemon's default.
    pub limit: Option<Bytes>,
    /// Higher is served first.
    pub priority: u32,
    /// Whose memory it is; empty for what the daemon takes this process for.
    pub tenant: String,
    /// Where this process runs, as Kubernetes calls it, if it does.
    pub pod: Option<v1::Pod>,
    /// What it is to be guaranteed of each device that it uses; `None` for what its tenant has.
    pub guarantee: Option<Bytes>,
    /// How long its guarantee may be waited for where it has one, when a device is first used.
    pub admission_wait: Duration,
    /// How long the daemon may be silent while it owes an answer. One that works on a request, or has it wait for memory, says so more often than that.
    pub patience: Duration,
    /// Where the library of the daemon's driver is.
    pub library: LibraryPlace,
}

impl SessionConfig {
    /// A session called `name` with the daemon at `socket`.
    pub fn new(socket: PathBuf, name: impl Into<String>) -> SessionConfig {
        SessionConfig {
            socket,
            name: name.into(),
            limit: None,
            priority: 0,
            tenant: String::new(),
            pod: None,
            guarantee: None,
            admission_wait: Duration::from_secs(60),
            patience: Duration::from_secs(5),
            library: LibraryPlace::default(),
        }
    }
}

/// Why the daemon could not be asked, or said no.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Nobody answers at the socket.
    #[error("no stitchd daemon answers at {socket}: {reason}; {}", remedy(*listener))]
    NoDaemon {
        /// Where.
        socket: PathBuf,
        /// What the system says.
        reason: String,
        /// The process that listens there, where one does and says nothing.
        listener: Option<i32>,
    },
    /// The socket is there, and not for this user.
    #[error(
        "{socket} may not be connected to: its owner and mode do not let this user. The daemon's `socket_group` says which group may, and this process is to be in it (in a pod: supplementalGroups)"
    )]
    Forbidden {
        /// Where.
        socket: PathBuf,
    },
    /// The daemon said no.
    #[error("the daemon refuses: {message}")]
    Refused {
        /// What can be done about it.
        kind: ErrorKind,
        /// Its words.
        message: String,
    },
    /// The daemon speaks another protocol.
    #[error("the daemon speaks protocol {daemon}, this client {client}; install the same version of both")]
    Protocol {
        /// Its protocol.
        daemon: u32,
        /// Ours.
        client: u32,
    },
    /// The daemon's driver cannot be used from another process.
    #[error("the daemon uses the '{0}' driver, whose memory other processes cannot have")]
    Driver(String),
    /// The daemon's driver does not open in this process.
    #[error("the daemon's driver cannot be used by this process")]
    Open(#[from] OpenError),
    /// A process without a daemon is told to use a driver that there is not, or that is of no use to it.
    #[error("STITCHD_DRIVER: there is no driver '{0}' for a process without a daemon; there are {names}", names = DriverName::of_processes())]
    PrivateDriver(String),
    /// The driver of a process without a daemon does not open.
    #[error(
        "without a daemon this process takes memory by itself (STITCHD_WITHOUT_DAEMON=private), and cannot; STITCHD_DRIVER=host works on a machine without a GPU"
    )]
    PrivateOpen(#[source] OpenError),
    /// This process has no such device.
    #[error(
        "this process has no device {ordinal}: its driver shows it {count} (which ones and in what order is for its environment to say){}",
        lost_too(lost)
    )]
    NoDevice {
        /// As asked for: the process's own ordinal.
        ordinal: u32,
        /// How many it has.
        count: usize,
        /// Devices that the daemon says are gone: it may be one of them.
        lost: Vec<DeviceUuid>,
    },
    /// The daemon does not lease the device.
    #[error("the daemon has no device {uuid}, which is device {ordinal} of this process; it has {}", names_of(there))]
    NotServed {
        /// The process's own ordinal.
        ordinal: u32,
        /// Its name everywhere.
        uuid: DeviceUuid,
        /// The daemon's devices.
        there: Vec<DeviceUuid>,
    },
    /// The daemon's answer makes no sense.
    #[error("the daemon's answer makes no sense")]
    Malformed(#[from] Malformed),
    /// The daemon's chunk sizes make no ladder.
    #[error("the daemon's answer makes no sense")]
    Ladder(#[from] LadderError),
    /// The chunk socket failed.
    #[error("the chunk socket failed")]
    Channel(#[from] ChannelError),
    /// The stats page is unusable.
    #[error("the stats page is unusable")]
    StatsPage(#[from] StatsPageError),
    /// The plan that the daemon stores is unusable.
    #[error("the plan is unusable")]
    Plan(#[from] FormatError),
    /// The driver failed here.
    #[error("the driver failed")]
    Device(#[from] DriverError),
    /// The device is gone.
    #[error("device {0} is lost: nothing on it works any more; restart this process on another device")]
    DeviceLost(DeviceUuid),
    /// The daemon went away.
    #[error(
        "the daemon went away; what is leased already can be used on, more cannot be leased before a daemon is there again (`stitchd serve`)"
    )]
    DaemonGone,
    /// This process was forked from the one that has the session.
    #[error(
        "this process was forked from one with a session; a child must not use its parent's GPU memory (start it with exec or spawn)"
    )]
    Forked,
}

/// What can be done where no daemon answers.
fn remedy(listener: Option<i32>) -> String {
    match listener {
        None => "start one with `stitchd serve`, or say where it is with STITCHD_SOCKET or STITCHD_RUNTIME_DIR".into(),
        Some(pid) => format!(
            "process {pid} listens there, and is stopped (`kill -CONT {pid}` has it go on) or hangs (its log may say in what). Its service manager may start it again, or `kill -9 {pid}` and another `stitchd serve`: with its keeper nothing is lost, and what is leased can be used meanwhile"
        ),
    }
}

impl SessionError {
    /// Nobody is there.
    pub(crate) fn no_daemon(socket: &Path, reason: impl Into<String>) -> SessionError {
        SessionError::NoDaemon { socket: socket.to_owned(), reason: reason.into(), listener: None }
    }

    /// Somebody is there, perhaps, and has not said anything in time.
    pub(crate) fn no_answer(socket: &Path) -> SessionError {
        let (socket, reason) = (socket.to_owned(), "no answer in time".to_owned());
        SessionError::NoDaemon { listener: listener_at(&socket, SocketType::STREAM), socket, reason }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SessionError::NoDaemon { .. }
            | SessionError::Forbidden { .. }
            | SessionError::DeviceLost(_)
            | SessionError::DaemonGone => ErrorKind::Unavailable,
            SessionError::Refused { kind, .. } => *kind,
            SessionError::Protocol { .. } | SessionError::Driver(_) | SessionError::PrivateDriver(_) => {
                ErrorKind::Unsupported
            }
            SessionError::Open(_) | SessionError::PrivateOpen(_) => ErrorKind::Unavailable,
            SessionError::NoDevice { .. } | SessionError::NotServed { .. } => ErrorKind::NotFound,
            SessionError::Malformed(_) | SessionError::Ladder(_) => ErrorKind::Broken,
            SessionError::Channel(error) => error.kind(),
            SessionError::StatsPage(_) => ErrorKind::Unsupported,
            SessionError::Plan(error) => error.kind(),
            SessionError::Device(error) => error.kind(),
            SessionError::Forked => ErrorKind::Conflict,
        }
    }
}

fn names_of(devices: &[DeviceUuid]) -> String {
    let names: Vec<String> = devices.iter().map(DeviceUuid::to_string).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn lost_too(lost: &[DeviceUuid]) -> String {
    if lost.is_empty() { String::new() } else { format!("; the daemon says that {} is lost", names_of(lost)) }
}

/// A device of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteDevice {
    /// Its name everywhere.
    pub uuid: DeviceUuid,
    /// Its model.
    pub model: String,
    /// All its memory.
    pub total: Bytes,
    /// The daemon's ordinal: what this process calls the device is another thing.
    pub ordinal: u32,
}

/// What a session is guaranteed of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Guaranteed {
    /// By its terms, or because somebody has asked for it.
    own: Bytes,
    /// For the iteration that goes on.
    iteration: Bytes,
}

impl Guaranteed {
    fn now(&self) -> Bytes {
        self.own.max(self.iteration)
    }
}

/// A session with the daemon. It ends when the last reference goes: what it leased is given back.
#[derive(Debug)]
pub struct Session {
    devices: Vec<RemoteDevice>,
    ladder: Ladder,
    limit: Bytes,
    tenant: String,
    wait: Duration,
    /// What it is to be guaranteed of each device that it uses.
    guarantee: Bytes,
    /// The most that it can be of one.
    guarantee_max: Bytes,
    /// Held by whoever asks for another guarantee: of two wishes at once the daemon takes the last.
    asking: Mutex<()>,
    admission_wait: Duration,
    driver: Arc<Metered>,
    /// Below it: chunks that can be put down and taken up.
    sleeping: Arc<Sleeping>,
    clock: Arc<dyn Clock>,
    page: stats_page::Page,
    /// The way to the daemon, and to those that follow it.
    line: Arc<Line>,
    /// How long the daemon is waited for, for a word.
    patience: Duration,
    control: Control,
}

impl Session {
    /// Opens a session. Takes at most a few times `config.patience` and, where the driver's library has to be opened for it, what that takes: two minutes at most.
    pub fn connect(config: &SessionConfig) -> Result<Arc<Session>, SessionError> {
        if fork::is_child() {
            return Err(SessionError::Forked);
        }
        fork::watch();
        let watched = Watched::default();
        let (control, opened) = Control::open(config, Arc::clone(&watched))?;
        let driver = driver_like(&opened.driver, &opened.devices, &config.library)?;
        let directory = config.socket.parent().map(PathBuf::from).unwrap_or_default();
        let chunk_socket = directory.join(&opened.chunk_socket);
        let (link, page_fd) = Link::open(&chunk_socket, opened.ticket, config.patience, None)?;
        let page = stats_page::map(&page_fd)?;
        let counters = page.first();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let sleeping = Sleeping::over(driver);
        let driver = Meter::around(Arc::clone(&sleeping) as Arc<dyn Driver>, Arc::clone(&clock));
        let line = Line::new(link, opened.session, page_fd, chunk_socket, config.patience, Arc::clone(&clock));
        let line = Arc::new(line);
        // Nobody else sets it.
        let _ = watched.set(Seen { driver: Arc::clone(&driver), counters, line: Arc::downgrade(&line) });
        Ok(Arc::new(Session {
            devices: opened.devices,
            ladder: opened.ladder,
            limit: opened.limit,
            tenant: opened.tenant,
            wait: opened.wait,
            guarantee: opened.guarantee,
            guarantee_max: opened.guarantee_max,
            asking: Mutex::new(()),
            admission_wait: config.admission_wait,
            driver,
            sleeping,
            clock,
            page,
            line,
            patience: config.patience,
            control,
        }))
    }

    /// The session's number at the daemon: another one after a daemon that could not know it.
    pub fn id(&self) -> SessionId {
        self.line.session()
    }

    /// The daemon's devices.
    pub fn devices(&self) -> &[RemoteDevice] {
        &self.devices
    }

    /// The chunk sizes that the daemon deals in.
    pub fn ladder(&self) -> &Ladder {
        &self.ladder
    }

    /// Bytes that the session may never pass.
    pub fn limit(&self) -> Bytes {
        self.limit
    }

    /// Whose memory it is, as the daemon sees it.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// How long a runtime's request should wait for others, as the daemon is configured.
    pub fn wait(&self) -> Duration {
        self.wait
    }

    fn givers(&self) -> Arc<Givers> {
        self.control.givers()
    }

    /// Has the session guaranteed so much of a device, in place of what it is: what it holds up to there comes when it asks. Waits as long as it may for the guarantees of others to end. What an iteration is admitted with stays until that ends.
    ///
    /// # Errors
    ///
    /// More than its tenant may have, or no room beside the guarantees of others, with who has them.
    pub fn admit(&self, device: DeviceUuid, guarantee: Bytes, wait: Duration) -> Result<(), SessionError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let iteration = self.guaranteed().get(&device).map_or(Bytes::ZERO, |known| known.iteration);
        self.control.admit(device, guarantee.max(iteration), wait)?;
        self.guaranteed().entry(device).or_default().own = guarantee;
        Ok(())
    }

    fn guaranteed(&self) -> MutexGuard<'_, BTreeMap<DeviceUuid, Guaranteed>> {
        self.line.guaranteed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the session guaranteed of a device what it is to be, as far as its limit goes beyond what it is guaranteed elsewhere.
    fn be_guaranteed(&self, device: DeviceUuid) -> Result<(), SessionError> {
        let wanted = {
            let mut guaranteed = self.guaranteed();
            if guaranteed.contains_key(&device) {
                return Ok(());
            }
            let wanted = self.guarantee.min(self.left_for(device, &guaranteed));
            // Before it is asked for: another thread may use another device at the same moment, and the limit is for both.
            guaranteed.insert(device, Guaranteed { own: wanted, iteration: Bytes::ZERO });
            wanted
        };
        if wanted.is_zero() {
            return Ok(());
        }
        let admitted = self.control.admit(device, wanted, self.admission_wait);
        admitted.inspect_err(|_| {
            self.guaranteed().remove(&device);
        })
    }

    /// What its limit leaves for a guarantee on a device.
    fn left_for(&self, device: DeviceUuid, guaranteed: &BTreeMap<DeviceUuid, Guaranteed>) -> Bytes {
        let elsewhere = guaranteed.iter().filter(|(other, _)| **other != device).map(|(_, known)| known.now()).sum();
        self.limit.saturating_sub(elsewhere)
    }

    /// Between two iterations: what each device needs while the session rests stays guaranteed, and what it needs at the peak of the next one is waited for, behind those who wait already. So sessions whose peaks are more than a device has
    /// take turns, and none of them stops in the middle of an iteration. Its own guarantee is the least that it keeps.
    ///
    /// Devices are asked for in the order of their uuid, the same in every session, after all have been given up: sessions that name all their devices at once do not wait for each other.
    ///
    /// # Errors
    ///
    /// What cannot be had in that time, or at all: the next iteration begins without it, and with what could be had.
    pub fn admit_iteration(&self, needs: &[(DeviceUuid, Need)], wait: Duration) -> Result<(), SessionError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        self.give_up_peaks(needs)?;
        let mut needs = needs.to_vec();
        needs.sort_by_key(|(device, _)| *device);
        let until = self.clock.now().saturating_add(wait);
        for (device, need) in needs {
            let most = self.guarantee_max.min(self.left_for(device, &self.guaranteed()));
            self.set_iteration(device, need.peak.min(most), until.saturating_sub(self.clock.now()))?;
            if need.peak > most {
                let message = format!(
                    "an iteration needs {} at its peak, and by its limit and its tenant this session can be guaranteed {most} of the device",
                    need.peak
                );
                return Err(SessionError::Refused { kind: ErrorKind::OverLimit, message });
            }
        }
        Ok(())
    }

    /// No iteration goes on: what it was admitted with beyond what is needed at rest is for others.
    ///
    /// # Errors
    ///
    /// The daemon cannot be told.
    pub fn rest(&self, needs: &[(DeviceUuid, Need)]) -> Result<(), SessionError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        self.give_up_peaks(needs)
    }

    fn give_up_peaks(&self, needs: &[(DeviceUuid, Need)]) -> Result<(), SessionError> {
        for (device, need) in needs {
            let iteration = self.guaranteed().get(device).map_or(Bytes::ZERO, |known| known.iteration);
            // Less is granted at once. More is asked for with the peak.
            if need.at_rest < iteration {
                self.set_iteration(*device, need.at_rest, Duration::ZERO)?;
            }
        }
        Ok(())
    }

    /// Has so much guaranteed for an iteration. Only for whoever asks alone.
    fn set_iteration(&self, device: DeviceUuid, iteration: Bytes, wait: Duration) -> Result<(), SessionError> {
        let known = self.guaranteed().get(&device).copied().unwrap_or_default();
        let wanted = Guaranteed { iteration, ..known }.now();
        if wanted != known.now() {
            self.control.admit(device, wanted, wait)?;
        }
        self.guaranteed().entry(device).or_default().iteration = iteration;
        Ok(())
    }

    /// Driver calls that this process has made for the session.
    pub fn calls(&self) -> CallCounts {
        self.driver.layer().counts()
    }

    /// The session's driver, for whoever wants to read and write what is allocated.
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver) as Arc<dyn Driver>
    }

    /// A runtime for this process's device `ordinal`: the process's own ordinal, as its other libraries count, which its environment may have hidden and put in another order than
    /// the daemon's. The two meet by uuid. A runtime writes its figures to the stats page, as long as that has room for one more.
    pub fn runtime(self: &Arc<Session>, ordinal: u32, config: RuntimeConfig) -> Result<Runtime, SessionError> {
        let (device, uuid) = self.device_here(ordinal)?;
        self.be_guaranteed(uuid)?;
        let theirs = self.devices.iter().find(|remote| remote.uuid == uuid).map(|remote| remote.ordinal);
        let (set, counters) = theirs.and_then(|theirs| self.page.take(theirs)).unzip();
        let counters = counters.unwrap_or_else(Counters::private);
        let session = Arc::clone(self);
        let source = DaemonSource::new(session, Arc::clone(&device), uuid, set);
        let config = config.on(&self.ladder);
        Ok(Runtime::new(device, Arc::new(source), Arc::clone(&self.clock), config, counters))
    }

    /// A device of this process that the daemon leases.
    fn device_here(&self, ordinal: u32) -> Result<(Arc<Device>, DeviceUuid), SessionError> {
        let here = self.driver.devices();
        let Some(local) = here.iter().find(|device| device.id == DeviceId(ordinal)) else {
            return Err(SessionError::NoDevice { ordinal, count: here.len(), lost: self.control.lost() });
        };
        if !self.devices.iter().any(|remote| remote.uuid == local.uuid) {
            let there = self.devices.iter().map(|remote| remote.uuid).collect();
            return Err(SessionError::NotServed { ordinal, uuid: local.uuid, there });
        }
        if self.control.is_lost(local.uuid) {
            return Err(SessionError::DeviceLost(local.uuid));
        }
        Ok((Device::open(self.driver(), local.id)?, local.uuid))
    }

    /// A plan that the daemon stores.
    pub fn plan(&self, plan: PlanId) -> Result<Plan, SessionError> {
        let wanted = v1::GetPlanRequest { plan_id: plan.0, job: None };
        Ok(format::read(&self.control.plan(wanted)?.plan)?)
    }

    /// The plan that the daemon stores for a job: of those for this process of it the newest, else of those for no particular process. Nothing where it has none.
    pub fn plan_for(&self, fingerprint: Fingerprint, position: Option<Position>) -> Result<Option<Plan>, SessionError> {
        let wanted = WantedPlans {
            fingerprint: Some(fingerprint.0),
            rank: position.map(Position::rank),
            world_size: position.map(Position::world_size),
        };
        let reply = match self.control.plan(v1::GetPlanRequest { plan_id: 0, job: Some(wanted.into()) }) {
            Err(SessionError::Refused { kind: ErrorKind::NotFound, .. }) => return Ok(None),
            reply => reply?,
        };
        let plan = format::read(&reply.plan)?;
        if plan.job.fingerprint != fingerprint {
            let what = format!("of job {}, and {fingerprint} was asked for", plan.job.fingerprint);
            return Err(malformed("plan", what).into());
        }
        Ok(Some(plan))
    }

    /// Stores a plan with the daemon.
    pub fn put_plan(&self, plan: &Plan, name: &str) -> Result<PlanId, SessionError> {
        self.control.put_plan(format::write(plan), name)
    }

    /// True once the daemon has said that the device is gone.
    pub fn is_lost(&self, device: DeviceUuid) -> bool {
        self.control.is_lost(device)
    }

    /// False while the daemon is away: until the next one is there.
    pub fn is_attached(&self) -> bool {
        self.line.is_attached()
    }
}

/// The driver that fits the daemon's: its memory can be imported here. Devices that are pretended have here the ordinals that they have at the daemon; those that it leaves out are
/// there and have no memory.
fn driver_like(name: &str, devices: &[RemoteDevice], library: &LibraryPlace) -> Result<Arc<dyn Driver>, SessionError> {
    let unusable = || SessionError::Driver(name.to_owned());
    let known: DriverName = name.parse().map_err(|_| unusable())?;
    let count = devices.iter().map(|device| device.ordinal as usize + 1).max().unwrap_or(0);
    let mut totals = vec![Bytes::ZERO; count];
    for device in devices {
        totals[device.ordinal as usize] = device.total;
    }
    let library = library.clone();
    let opened = opening::in_time(name, opening::OPENING_MAX, move || driver::open_shared(known, &totals, &library));
    opened?.ok_or_else(unusable)
}
