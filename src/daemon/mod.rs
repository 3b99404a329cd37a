//! The daemon: sessions over gRPC, chunks over the chunk socket, one node's memory behind both.
//!
//! Everything that it needs comes from outside ([`Daemon::build`]); [`Daemon::serve`] runs it until it is told to end. This is the only place that knows
//! tokio, besides the session's control thread.
//!
//! | part | what it does |
//! |---|---|
//! | [`config`] | flags and file to one typed configuration |
//! | [`keeping`], [`takeover`], [`elsewhere`], [`reattach`] | who holds what outlives this process; what is taken over from the daemon before, and what it has left in another place; its sessions, when they are there again |
//! | [`listener`] | the lock on the runtime directory, the sockets, who connected |
//! | [`connections`] | what a process may have of connections, sessions, and descriptors that it has not read |
//! | [`registry`] | sessions, their secrets and tickets, and what becomes of them when their process goes |
//! | [`tenants`], [`pods`] | whose a session is, and what it may have; where its process runs |
//! | [`service`], [`admin`], [`gate`] | gRPC, and what keeps its large messages few |
//! | [`revocations`] | memory that is asked back |
//! | [`ranges`] | memory that is shared, by name |
//! | [`refusals`] | what was not for whoever asked: counted, and in the log |
//! | [`chunk_server`] | the chunk socket |
//! | [`measured`] | the process that measures what calls cost, where the ladder is to follow from that |
//! | [`deadline`] | driver calls that end in time |
//! | [`scrubber`] | the process that clears new memory, where the driver does not |
//! | [`plans`] | stored plans |
//! | [`tick`] | time that moves on |
//! | [`metrics`], [`live`], [`http`] | what people watch |
//! | [`heap`] | the memory of the process itself |
//! | [`paced`] | pages of it, one made at a time |

mod admin;
mod chunk_server;
mod claims;
pub mod config;
mod connections;
mod deadline;
mod elsewhere;
mod error;
mod gate;
pub mod heap;
mod http;
mod keeping;
mod listener;
pub mod live;
mod measured;
mod metrics;
mod paced;
mod plans;
mod pods;
mod ranges;
mod reattach;
mod refusals;
mod registry;
mod revocations;
pub mod scrubber;
mod service;
pub mod takeover;
mod tenants;
mod tick;
mod watched;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::{Clock, SystemClock};
use crate::driver::layers::Layered;
use crate::driver::layers::metered::{Meter, Metered};
use crate::driver::{DeviceDescription, Driver};
use crate::error::chain;
use crate::ids::{DeviceId, DeviceUuid, SessionId};
use crate::journal::Book;
use crate::keeper::link::has_ended;
use crate::keeper::{self, Key, Link, manager};
use crate::ladder::{Ladder, Part};
use crate::ledger::AccountView;
use crate::limits;
use crate::memory::Device;
use crate::mortal::moment;
use crate::steward::{FollowError, Steward};
use crate::store::{Keep, Store};
use crate::units::{Bytes, counted};
use crate::wire::v1::event::Kind;
use config::{Config, KeeperIs, LadderIs};
use connections::Connections;
use deadline::Deadline;
pub use error::DaemonError;
use keeping::Keeping;
use listener::RuntimeLock;
pub use listener::{ListenError, Listeners, Ousted};
use live::Live;
use metrics::{CallTimes, Latencies, SessionCounts, Tally};
use paced::Paced;
use plans::PlanStore;
use ranges::Names;
use refusals::Refusals;
use registry::Registry;
use revocations::Revocations;
use scrubber::Scrubber;
use takeover::{Begun, Following, Left};
use tick::Stirrer;

/// A daemon, ready to serve.
pub struct Daemon {
    config: Config,
    driver: Arc<Metered>,
    devices: Vec<NodeDevice>,
    ladder: Ladder,
    steward: Arc<Steward>,
    registry: Registry,
    connections: Arc<Connections>,
    plans: PlanStore,
    latencies: Arc<Latencies>,
    tally: Tally,
    session_counts: SessionCounts,
    revocations: Revocations,
    names: Names,
    refusals: Refusals,
    /// Where connections of the chunk socket are served.
    chunk_tasks: std::sync::OnceLock<tokio::runtime::Handle>,
    clock: Arc<dyn Clock>,
    /// Who holds what is to outlive this process.
    keeping: Option<Arc<Keeping>>,
    /// Chunks that sessions have said they hold, and have not said all.
    told: Arc<AtomicUsize>,
    started: Duration,
    draining: AtomicBool,
    /// Becomes true when the daemon is to end.
    ending: watch::Sender<bool>,
    /// Devices that are gone.
    lost: watch::Sender<Vec<DeviceUuid>>,
    /// What people look at that is nowhere else.
    live: Live,
    paced: Paced,
    stirrer: Stirrer,
}

/// A device as the daemon shows it.
#[derive(Clone, Debug)]
struct NodeDevice {
    id: DeviceId,
    uuid: DeviceUuid,
    model: String,
    total: Bytes,
    is_mps: bool,
}

/// Runs this very file again, as another process: also where an update has put another file in its place.
pub(crate) fn this_file_again() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("stitchd");
    command
}

impl Daemon {
    /// Puts a daemon together over `driver`. Must be called inside a tokio runtime, which does its work.
    pub fn build(mut config: Config, driver: Arc<dyn Driver>) -> Result<Arc<Daemon>, DaemonError> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let (nodes, is_shared) = (driver.nodes(), driver.is_shared());
        let latencies = Arc::new(Latencies::new());
        let times = CallTimes { latencies: Arc::clone(&latencies), clock: SystemClock::new() };
        let driver = Arc::new(Layered::new(Deadline::around(driver, config.driver_deadline), times));
        let driver = Meter::around(driver, Arc::clone(&clock));
        let listed = driver.devices();
        let mut devices = Vec::new();
        let chosen = config.choose(&listed).map_err(|wanted| DaemonError::NoDevice {
            wanted,
            there: listed
                .iter()
                .map(|device| format!("{} ({})", device.id.0, device.uuid))
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        for (found, cap) in chosen {
            devices.push(NodeDevice {
                id: found.id,
                uuid: found.uuid,
                model: found.model.clone(),
                total: cap.map_or(found.total, |cap| found.total.min(cap)),
                is_mps: driver.capabilities(found.id)?.mps,
            });
        }
        for device in devices.iter().filter(|device| device.is_mps) {
            tracing::info!(
                device = device.id.0,
                "processes share the device through MPS: a fatal fault of one of them ends the others' work on it, too; this daemon has no work there, and keeps its chunks"
            );
        }
        if config.ladder_is == LadderIs::Measured {
            config.ladder = measured::ladder(&*driver, &devices)?;
        }
        let (devices, scrubbers) = with_scrubbers(&driver, devices, config.driver_deadline)?;
        // Before the descriptors of a keeper are here: they are chunks' already.
        let fds_for_chunks = Daemon::fds_for_chunks(&config, nodes.len() as u64);
        if config.keeper != KeeperIs::Manager {
            // What it holds of a daemon that was configured so is nothing to this one, and would stay for ever.
            manager::give_up(&config.manager).map_err(DaemonError::Keeper)?;
        }
        let left = match config.keeper {
            KeeperIs::Process | KeeperIs::Manager if is_shared => Some(leave(&config)?),
            KeeperIs::Process | KeeperIs::Manager | KeeperIs::None => None,
        };
        if let Some((_, left)) = &left {
            let is_left_out = |device: &&DeviceDescription| !devices.iter().any(|own| own.uuid == device.uuid);
            for device in listed.iter().filter(is_left_out) {
                let sessions = left.sessions_on(device.uuid);
                if sessions > 0 {
                    return Err(DaemonError::LeftOut { device: device.id.0, uuid: device.uuid, sessions });
                }
            }
        }
        if !is_shared {
            check_followers(&config)?;
        }
        if config.keeper != KeeperIs::Process && is_shared {
            end_keeper(&config);
        }
        let open = |device: &NodeDevice| Device::open(Arc::clone(&driver) as Arc<dyn Driver>, device.id);
        let mut store = Store::new(devices.iter().map(open).collect::<Result<_, _>>()?);
        for (device, scrubber) in devices.iter().zip(scrubbers) {
            store = store.with_cap(device.id, device.total);
            if let Some(scrubber) = scrubber {
                store = store.with_scrubber(device.id, Arc::new(scrubber));
            }
        }
        store = store.with_descriptors(fds_for_chunks);
        if let Some((keeping, _)) = &left {
            store = store.with_keeper(Arc::clone(keeping) as Arc<dyn Keep>);
        }
        if devices.iter().any(|device| store.chunks_max(device.id) == 0) {
            let (limit, reserve) = (Daemon::open_fds_max(), Daemon::fds_for_connections());
            return Err(DaemonError::TooFewFiles { limit, reserve });
        }
        let granularity = store.devices().iter().map(|device| device.capabilities().granularity).max();
        if let Some(granularity) = granularity.filter(|granularity| *granularity > config.ladder.smallest()) {
            config.ladder = config.ladder.raised_to(granularity)?;
            tracing::info!(ladder = %config.ladder.to_toml(), %granularity, "chunks are not smaller than the devices can make them");
        }
        if config.ladder_is == LadderIs::Auto {
            let kept_max = if config.keeper == KeeperIs::Manager { manager::CHUNKS_MAX } else { u64::MAX };
            config.ladder = reaching(config.ladder, &devices, &store, kept_max);
        }
        // Pools of sessions that are there have chunks of these sizes, and take no others.
        let dealt = left.as_ref().and_then(|(_, left)| left.ladder()).and_then(|steps| Ladder::new(steps).ok());
        if let Some(dealt) = dealt.filter(|dealt| *dealt != config.ladder) {
            tracing::info!(ladder = %dealt.to_toml(), "chunks are of the sizes that sessions of the daemon before were told of, as long as there are such sessions when a daemon begins");
            config.ladder = dealt;
        }
        for device in &devices {
            warn_of_few_chunks(device, store.chunks_max(device.id), config.ladder.steps());
            warn_of_too_much(device, &config);
        }
        let runtime = tokio::runtime::Handle::current();
        let spawn =
            Box::new(move |work: Box<dyn FnOnce() + Send>| drop(runtime.spawn_blocking(move || or_abort(work))));
        let keeping = left.as_ref().map(|(keeping, _)| Arc::clone(keeping));
        let (steward, begun) = follow(left, &devices, &config.ladder, store, &clock, spawn)?;
        if let Some(keeping) = &keeping {
            keeping.set_steward(&steward);
            keep_nodes(keeping, &nodes);
        }
        let plans = PlanStore::open(config.plan_dir(), config.plans_max)?;
        let started = clock.now();
        let daemon = Daemon {
            ladder: config.ladder.clone(),
            config,
            driver,
            devices,
            steward,
            registry: Registry::default(),
            connections: Connections::new(Daemon::fds_for_connections(), Daemon::open_fds_max()),
            plans,
            latencies,
            tally: Tally::default(),
            session_counts: SessionCounts::default(),
            revocations: Revocations::default(),
            names: Names::default(),
            refusals: Refusals::default(),
            chunk_tasks: std::sync::OnceLock::new(),
            paced: Paced::new(Arc::clone(&clock)),
            clock,
            keeping,
            told: Arc::default(),
            started,
            draining: AtomicBool::new(false),
            ending: watch::Sender::new(false),
            lost: watch::Sender::new(Vec::new()),
            live: Live::default(),
            stirrer: Stirrer::default(),
        };
        let daemon = Arc::new(daemon);
        daemon.steward.set_overstay(daemon.config.borrowed);
        let largest = daemon.ladder.steps().last().copied();
        daemon.steward.set_chunk_len_max(largest.unwrap_or(limits::CHUNK_LEN_MAX));
        let hears = Arc::downgrade(&daemon);
        daemon.steward.tell(Box::new(move |news| {
            if let Some(daemon) = hears.upgrade() {
                daemon.hear(&news);
            }
        }));
        if let Some(begun) = begun {
            daemon.resume(begun);
        }
        Ok(daemon)
    }

    /// The sessions and ranges of the daemon before are this one's.
    fn resume(self: &Arc<Daemon>, begun: Resumed) {
        let Resumed { book, mut processes } = begun;
        // Before sessions that are over give back what they had.
        let store = self.steward.store();
        let bare = book.chunks().keys().filter(|chunk| !store.can_hand_on(**chunk)).count();
        self.names.resume(&book);
        for (session, known) in book.sessions() {
            self.resume_session(known, processes.remove(session));
        }
        if !book.sessions().is_empty() || !book.chunks().is_empty() {
            let bytes: Bytes = book.chunks().values().map(|known| known.len).sum();
            if bare > 0 {
                tracing::warn!(
                    chunks = bare,
                    "nobody has kept these chunks: they stay with who has them mapped, and cannot be handed on or published"
                );
            }
            tracing::info!(
                sessions = self.registry.count(),
                chunks = book.chunks().len(),
                bytes = bytes.get(),
                ranges = book.ranges().len(),
                took_ms = self.uptime().as_millis(),
                "taken over from the daemon before"
            );
            for account in self.steward.devices() {
                let (device, held, total) = (account.device.0, account.bytes.promised(), account.total);
                if held > total {
                    tracing::info!(device, %held, %total, "the daemon before could lease more of the device: nothing more of it is leased until what is beyond the total has come back");
                }
            }
            let (sessions, chunks) = (self.registry.count() as u64, book.chunks().len() as u64);
            let text = format!(
                "{} and {bytes} in {} from the daemon before",
                counted(sessions, "session"),
                counted(chunks, "chunk")
            );
            self.note_event(Kind::TakenOver, text);
        }
    }

    /// Serves until [`Daemon::end`], then lets sessions finish for as long as the configuration says.
    pub async fn serve(self: Arc<Daemon>, listeners: Listeners) -> Result<(), DaemonError> {
        let Listeners { lock, state_lock, grpc, chunks, http } = listeners;
        let mut parts = tokio::task::JoinSet::new();
        let chunks = chunk_server::start(Arc::clone(&self), chunks).map_err(DaemonError::Thread)?;
        let locks = std::iter::once(lock).chain(state_lock).collect();
        let (ticking, ousted) = tick::start(Arc::clone(&self), locks).map_err(DaemonError::Thread)?;
        if let Some(http) = http {
            parts.spawn(http::run(Arc::clone(&self), http));
        }
        tracing::info!(
            driver = self.driver.name(),
            devices = self.devices.len(),
            runtime_dir = %self.config.runtime_dir.display(),
            version = env!("CARGO_PKG_VERSION"),
            "serving"
        );
        // A connection that says nothing, or never stops, does not keep the daemon from ending.
        const GRACE: Duration = Duration::from_millis(500);
        let is_over = async {
            Arc::clone(&self).ended().await;
            tokio::time::sleep(GRACE).await;
        };
        let served = tokio::select! {
            served = service::run(Arc::clone(&self), grpc) => served,
            () = is_over => Ok(()),
            Ok(ousted) = ousted => Err(DaemonError::Ousted(ousted)),
        };
        parts.shutdown().await;
        let locks = ticking.stop();
        drop(chunks);
        // Where the directory is another's, or none, what is there is not this daemon's to end.
        let is_others = match &served {
            Err(DaemonError::Ousted(Ousted::Another(_))) => true,
            Err(DaemonError::Ousted(Ousted::Unreachable(_))) => !locks.iter().all(RuntimeLock::is_own),
            _ => false,
        };
        match &self.keeping {
            Some(keeping) if is_others => {
                self.steward.stop_journal();
                keeping.abandon();
            }
            _ => self.leave_or_end(),
        }
        // Dropped last: until here a second daemon is kept away.
        drop(locks);
        served
    }

    /// Where somebody has something still, that is held for the daemon that follows; else nobody need follow.
    fn leave_or_end(&self) {
        let (sessions, ranges) = (self.registry.count(), self.steward.ranges().len());
        let Some(keeping) = &self.keeping else {
            if sessions > 0 {
                tracing::info!(sessions, "ending with sessions open; what they have mapped stays theirs");
            }
            return;
        };
        let reserved = self.steward.reserved().len();
        // Drained and empty is what a device is before somebody works on it.
        let drained = self.steward.devices().iter().filter(|device| device.is_draining).count();
        if sessions + ranges + reserved + drained == 0 {
            self.steward.end_journal();
            keeping.end();
            return;
        }
        tracing::info!(
            sessions,
            ranges,
            reserved_plans = reserved,
            drained_devices = drained,
            keeper = keeping.pid().unwrap_or(0),
            "a daemon that follows in this directory takes over what is held"
        );
        moment();
        self.steward.stop_journal();
        moment();
        if !keeping.leave() {
            tracing::error!(
                "nobody holds what is to be taken over: it lives on where sessions have it mapped, and what they do not have is lost"
            );
        }
    }

    /// Tells the daemon to end: no new sessions, no more memory, and soon nobody there.
    pub fn end(&self) {
        if !self.draining.swap(true, Ordering::Relaxed) {
            tracing::info!(sessions = self.registry.count(), "shutting down");
            self.ending.send_replace(true);
            // Who waits for memory hears it now, and not that nobody is there in the end.
            self.steward.close();
        }
    }

    /// What the daemon does at one time: tasks that wait or work, whoever they serve.
    fn tasks(&self) -> u64 {
        let here = tokio::runtime::Handle::try_current().map_or(0, |handle| handle.metrics().num_alive_tasks());
        let chunks = self.chunk_tasks.get().map_or(0, |handle| handle.metrics().num_alive_tasks());
        (here + chunks) as u64
    }

    /// Completes once [`Daemon::end`] was called and the sessions have finished, or their time is up.
    async fn ended(self: Arc<Daemon>) {
        let mut ending = self.ending.subscribe();
        // The sender lives in the daemon that this holds.
        let _ = ending.wait_for(|ending| *ending).await;
        // Who is taken over by another daemon need not finish before.
        let drain = if self.keeping.is_some() { Duration::ZERO } else { self.config.drain };
        let patience = tokio::time::sleep(drain);
        tokio::pin!(patience);
        loop {
            tokio::select! {
                () = &mut patience => break,
                () = tokio::time::sleep(Duration::from_millis(20)) => {
                    if self.registry.count() == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// Sees to it that the chunks by which sessions grow lie there before they are asked for. `failures` is what it remembers of creates that failed, by device: after one it
    /// lets the device be for a while, for nobody waits for these.
    fn keep_warm(&self, accounts: &[AccountView], failures: &mut WarmFailures) {
        const PAUSE: Duration = Duration::from_secs(5);
        let len = self.ladder.smallest();
        let part = Part { len, count: self.config.warm.get() / len.get() };
        if part.count == 0 || self.is_draining() {
            return;
        }
        let now = self.clock.now();
        for account in accounts {
            let (known, until) = failures.entry(account.device).or_default();
            if *known != account.refused_creates {
                (*known, *until) = (account.refused_creates, now + PAUSE);
            }
            if now >= *until {
                self.steward.warm(account.device, part).expect("the device is the ledger's own");
            }
        }
    }

    /// Tells sessions of devices that are gone.
    fn note_lost(&self, accounts: &[AccountView]) {
        let is_lost =
            |device: &&NodeDevice| accounts.iter().any(|account| account.device == device.id && account.is_lost);
        let lost: Vec<_> = self.devices.iter().filter(is_lost).map(|device| device.uuid).collect();
        self.lost.send_if_modified(|known| {
            // Appended, so that who has heard of some hears of the others.
            let more: Vec<_> = lost.into_iter().filter(|uuid| !known.contains(uuid)).collect();
            known.extend(&more);
            more.iter().for_each(|uuid| {
                self.note_event(
                    Kind::DeviceLost,
                    format!("{uuid}: nothing more of it is leased until the daemon is started again"),
                )
            });
            !more.is_empty()
        });
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn device(&self, uuid: DeviceUuid) -> Option<&NodeDevice> {
        self.devices.iter().find(|device| device.uuid == uuid)
    }

    fn uptime(&self) -> Duration {
        self.clock.now().saturating_sub(self.started)
    }

    /// Descriptors that this process has open.
    fn open_fds() -> u64 {
        const DIRECTORY: &str = "/proc/self/fd";
        // Its size is their number from Linux 6.2 on. Before that they are counted, which for thousands takes longer than all else of a scrape.
        match std::fs::metadata(DIRECTORY).map_or(0, |directory| directory.len()) {
            0 => std::fs::read_dir(DIRECTORY).map_or(0, |entries| entries.count() as u64),
            count => count,
        }
    }

    /// Descriptors that this process may have open.
    fn open_fds_max() -> u64 {
        keeper::files_max()
    }

    /// Descriptors that are kept for connections and sessions.
    fn fds_for_connections() -> u64 {
        const MIN: u64 = 128;
        const MAX: u64 = 16_384;
        (Daemon::open_fds_max() / 4).clamp(MIN, MAX)
    }

    /// Descriptors that chunks may take: not those of connections, or nobody could connect to a daemon that has leased what it has, nor those with which chunks and
    /// the devices' nodes are kept. What a service manager has passed on is chunks' already.
    fn fds_for_chunks(config: &Config, nodes: u64) -> u64 {
        /// The keeper's socket and process, the journal (and the one that takes its place), and the witness.
        const KEEPING: u64 = 8;
        // A service manager may have passed a port on.
        let is_http = config.http.is_some() || !config.manager.names.is_empty();
        let http = if is_http { limits::HTTP_CONNECTIONS_MAX as u64 } else { 0 };
        let open = Daemon::open_fds().saturating_sub(config.manager.names.len() as u64);
        let kept = open + KEEPING + nodes + Daemon::fds_for_connections() + http;
        Daemon::open_fds_max().saturating_sub(kept)
    }
}

/// Creates that failed by device, and until when none is tried ahead of need.
type WarmFailures = BTreeMap<DeviceId, (u64, Duration)>;

/// What a daemon has taken over beside its ledger.
struct Resumed {
    book: Book,
    processes: BTreeMap<SessionId, OwnedFd>,
}

/// Finds or starts the keeper, and what was left with it.
fn leave(config: &Config) -> Result<(Arc<Keeping>, Left), DaemonError> {
    elsewhere::check(config)?;
    if config.keeper == KeeperIs::Manager && config.manager.socket.is_none() {
        return Err(DaemonError::NoManager);
    }
    let manager = (config.keeper == KeeperIs::Manager).then(|| config.manager.clone());
    keeper::prepare(config.state_dir()).map_err(DaemonError::Keeper)?;
    let begun = Keeping::begin(config.state_dir(), config.keeper_linger, manager);
    let (keeping, held) = begun.map_err(DaemonError::Keeper)?;
    let left = Left::find(config.state_dir(), held)?;
    Ok((keeping, left))
}

/// A driver whose memory is for one process follows nobody.
fn check_followers(config: &Config) -> Result<(), DaemonError> {
    let Some((link, _, processes)) = kept_in(config.state_dir())?.filter(|(.., processes)| *processes > 0) else {
        return Ok(());
    };
    let (pid, state_dir) = (link.pid(), config.state_dir().to_owned());
    Err(DaemonError::OtherDriver { pid, state_dir, processes, driver: config.driver.as_str() })
}

/// The keeper of a directory, if there is one, with how much it holds, and how many processes of sessions that live are among it.
fn kept_in(state_dir: &Path) -> Result<Option<(Link, usize, usize)>, DaemonError> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let Some(link) = Link::connect(state_dir, PATIENCE).map_err(DaemonError::Keeper)? else { return Ok(None) };
    let held = link.list().map_err(DaemonError::Keeper)?;
    let living = held.iter().filter(|(key, fd)| matches!(key, Key::Process(_)) && !has_ended(fd)).count();
    Ok(Some((link, held.len(), living)))
}

/// Ends the keeper of a daemon that was configured to have one. Where nobody keeps at all the journal goes too: one day it would be believed.
fn end_keeper(config: &Config) {
    const PATIENCE: Duration = Duration::from_secs(2);
    let ended = match Link::connect(config.state_dir(), PATIENCE) {
        Ok(Some(link)) => link.end(),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        tracing::warn!(error = %chain(&error), "the keeper of a former daemon cannot be ended: what it holds stays taken");
    }
    if config.keeper == KeeperIs::None {
        let removed = std::fs::remove_file(config.state_dir().join(takeover::JOURNAL_NAME));
        if let Err(error) = removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "the journal of a former daemon stays, and is wrong by now");
        }
    }
}

/// A steward that goes on from what was left.
fn follow(
    left: Option<(Arc<Keeping>, Left)>,
    devices: &[NodeDevice],
    ladder: &Ladder,
    store: Store,
    clock: &Arc<dyn Clock>,
    spawn: crate::steward::Spawn,
) -> Result<(Arc<Steward>, Option<Resumed>), DaemonError> {
    let Some((keeping, left)) = left else { return Ok((Steward::new(store, Arc::clone(clock), spawn)?, None)) };
    let following = |device: &NodeDevice| Following { id: device.id, uuid: device.uuid, total: device.total };
    let following: Vec<Following> = devices.iter().map(following).collect();
    let Begun { journal, processes, useless, witness } = left.begin(&following, ladder, &store)?;
    moment();
    keeping.let_go_of(&useless);
    moment();
    keeping.keep_other(Key::Witness, Arc::new(witness));
    moment();
    let book = journal.book().clone();
    let uuids = devices.iter().map(|device| (device.id, device.uuid)).collect();
    let steward = Steward::following(store, Arc::clone(clock), spawn, journal, uuids).map_err(|error| match error {
        FollowError::Store(error) => DaemonError::Store(error),
        FollowError::Facts(error) => DaemonError::Follow(error),
    })?;
    Ok((steward, Some(Resumed { book, processes })))
}

/// Has the nodes of the devices kept open: where nobody has, the driver takes a device down, and what is on it with it.
fn keep_nodes(keeping: &Keeping, nodes: &[PathBuf]) {
    for (number, node) in nodes.iter().enumerate() {
        match std::fs::File::options().read(true).write(true).open(node) {
            Ok(file) => keeping.keep_other(Key::Node(number as u64), Arc::new(file.into())),
            Err(error) => tracing::warn!(node = %node.display(), %error, "a device's node cannot be kept open"),
        }
    }
}

/// Does a piece of the steward's work. One that panics has not told the ledger how it went, and whoever waits for that would wait for ever: as with the ledger's own steps, better a restart.
fn or_abort(work: Box<dyn FnOnce() + Send>) {
    // Nothing of it is used afterwards.
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!(
            "a part of the daemon that others wait for has panicked; what became of what it did is not known"
        );
        std::process::abort();
    }
}

/// The devices whose new memory is clear, with who clears it where the driver does not. One that cannot be cleared (no context can be had, say) keeps nobody from
/// the others.
fn with_scrubbers(
    driver: &Metered,
    devices: Vec<NodeDevice>,
    deadline: Duration,
) -> Result<(Vec<NodeDevice>, Vec<Option<Scrubber>>), DaemonError> {
    let mut usable = Vec::new();
    let mut refusal = None;
    for device in devices {
        let capabilities = driver.capabilities(device.id)?;
        // Sim has no contents that could be seen.
        let is_dirty = capabilities.contents && !capabilities.clears_memory;
        match is_dirty.then(|| Scrubber::start(driver.name(), device.uuid, deadline)).transpose() {
            Ok(scrubber) => usable.push((device, scrubber)),
            Err(source) => {
                let error = DaemonError::Uncleared { device: device.id.0, source };
                tracing::error!(error = %chain(&error), "the device is left out");
                refusal = refusal.or(Some(error));
            }
        }
    }
    match refusal {
        Some(error) if usable.is_empty() => Err(error),
        _ => Ok(usable.into_iter().unzip()),
    }
}

/// The ladder without the steps that are too small: a job without a plan takes the smallest chunks, and is to have all of a device that nobody else uses.
fn reaching(ladder: Ladder, devices: &[NodeDevice], store: &Store, kept_max: u64) -> Ladder {
    let of_each: Vec<_> = devices.iter().map(|device| (device.total, store.chunks_max(device.id))).collect();
    let smallest = suffices(&of_each, kept_max);
    if kept_max < u64::MAX && ladder.steps().last().is_some_and(|largest| smallest > *largest) {
        tracing::warn!(
            "systemd has no room for as many chunks as the devices have, also in the largest: what it does not hold is lost with this daemon, but for what processes have mapped"
        );
    }
    // Where not even the largest would do that is said of each device.
    if smallest <= ladder.smallest() || ladder.steps().last().is_none_or(|largest| smallest > *largest) {
        return ladder;
    }
    match ladder.clone().raised_to(smallest) {
        Ok(raised) => {
            tracing::info!(
                ladder = %raised.to_toml(),
                open_files_max = Daemon::open_fds_max(),
                "chunks are of {smallest} and more, so that as many as there may be suffice for all of a device: each takes open files (LimitNOFILE), one of {} exports of the machine, and a place in systemd's store where that is the keeper; `ladder` in the configuration makes for whichever you like",
                limits::EXPORTS_MAX
            );
            raised
        }
        Err(_) => ladder,
    }
}

/// Chunks of which so many as there may be of each device are all of it, where so many of all devices are kept.
fn suffices(of_each: &[(Bytes, u64)], kept_max: u64) -> Bytes {
    let fits = |len: &u64| {
        let chunks = |(total, _): &(Bytes, u64)| total.get().div_ceil(*len);
        let all: u64 = of_each.iter().map(chunks).sum();
        all <= kept_max && of_each.iter().all(|of| chunks(of) <= of.1)
    };
    Bytes::new((0..u64::BITS - 1).map(|power| 1 << power).find(fits).unwrap_or(1 << (u64::BITS - 1)))
}

/// Says so where not even the largest chunks could cover a device, as each takes descriptors, or where the smallest, which jobs without a plan take, cannot.
fn warn_of_few_chunks(device: &NodeDevice, chunks_max: u64, steps: &[Bytes]) {
    let in_chunks_of = |len: Option<&Bytes>| Bytes::new(chunks_max.saturating_mul(len.map_or(0, |len| len.get())));
    let (all_small, all_large) = (in_chunks_of(steps.first()), in_chunks_of(steps.last()));
    if all_small < device.total && all_large >= device.total {
        tracing::info!(
            device = device.id.0,
            chunks_max,
            open_files_max = Daemon::open_fds_max(),
            "jobs without a plan take the ladder's smallest chunks, and so have {all_small} of {} together at most: raise the limit of open files (LimitNOFILE), or leave the smallest size out of the ladder",
            device.total
        );
    }
    if all_large < device.total {
        tracing::warn!(
            device = device.id.0,
            chunks_max,
            open_files_max = Daemon::open_fds_max(),
            "too few open files for all of the device's memory, {} of {} in the largest chunks: raise the limit (LimitNOFILE), or make the ladder's sizes larger",
            all_large,
            device.total
        );
    }
}

/// Says so where the configuration has more than the device.
fn warn_of_too_much(device: &NodeDevice, config: &Config) {
    let (number, total) = (device.id.0, device.total);
    if config.warm > total {
        tracing::warn!(device = number, warm = %config.warm, %total, "`warm` is more than the device lends: all of it is created now, and nobody beside the daemon has any");
    }
    for tenant in config.tenants.iter().filter(|tenant| tenant.guarantee > total) {
        tracing::warn!(device = number, tenant = %tenant.name, guarantee = %tenant.guarantee, %total, "a tenant's guarantee is more than the device lends: it is never given there");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_so_large_that_as_many_as_are_kept_are_all_of_the_devices() {
        let device = (Bytes::gib(80), 500_000);
        assert_eq!(suffices(&[device], u64::MAX), Bytes::kib(256));
        assert_eq!(suffices(&[device], manager::CHUNKS_MAX), Bytes::mib(8));
        assert_eq!(suffices(&[device, device], manager::CHUNKS_MAX), Bytes::mib(16));
        assert_eq!(suffices(&[device, (Bytes::gib(1), 500_000)], manager::CHUNKS_MAX), Bytes::mib(8));
        assert_eq!(suffices(&[(Bytes::gib(80), 1_000), (Bytes::gib(1), 1_000)], u64::MAX), Bytes::mib(128));
    }
}
