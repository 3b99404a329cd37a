//! The world: what there is, what may happen next, and what must hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stitchd::clock::Clock;
use stitchd::daemon::takeover::{Begun, Following, JOURNAL_NAME, Left};
use stitchd::driver::Driver;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{ChunkId, DeviceId, DeviceUuid, SessionId};
use stitchd::journal::{Process, SessionRecord};
use stitchd::keeper::process::Keeper;
use stitchd::keeper::{Key, Link, SOCKET_NAME};
use stitchd::ladder::{Ladder, Part};
use stitchd::ledger::{EndReason, Holder, Terms};
use stitchd::memory::Device;
use stitchd::rng::Rng;
use stitchd::steward::{Answer, Ask, Steward};
use stitchd::store::{Keep, Store};
use stitchd::units::Bytes;

const DEVICE: DeviceId = DeviceId(0);
const DEVICE_MIB: u64 = 64;
const CLIENTS: usize = 4;
/// What a client may have.
const LIMIT: Bytes = Bytes::mib(32);

/// A mistake that is built in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plant {
    /// A client leaves out one chunk when it says what it holds.
    Forgets,
    /// What a client does not name stays leased.
    Keeps,
    /// An older journal in the place of the last is believed: its witness is lost.
    Believes,
    /// The keeper hears of new chunks after they were granted, if at all.
    KeepsLate,
    /// A chunk that nobody can hand on is named by its old number.
    OldNames,
}

impl Plant {
    pub(crate) const ALL: [Plant; 5] =
        [Plant::Forgets, Plant::Keeps, Plant::Believes, Plant::KeepsLate, Plant::OldNames];

    pub(crate) fn of(number: u64) -> Plant {
        Plant::ALL[number as usize % Plant::ALL.len()]
    }
}

/// What has happened.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) steps: u64,
    pub(crate) grants: u64,
    pub(crate) refused: u64,
    pub(crate) kills: u64,
    pub(crate) keeper_kills: u64,
    pub(crate) damaged: u64,
    pub(crate) takeovers: u64,
    pub(crate) reattached: u64,
    pub(crate) registered: u64,
    pub(crate) deaths: u64,
    pub(crate) lost_messages: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, more: &Counts) {
        self.steps += more.steps;
        self.grants += more.grants;
        self.refused += more.refused;
        self.kills += more.kills;
        self.keeper_kills += more.keeper_kills;
        self.damaged += more.damaged;
        self.takeovers += more.takeovers;
        self.reattached += more.reattached;
        self.registered += more.registered;
        self.deaths += more.deaths;
        self.lost_messages += more.lost_messages;
    }
}

/// Time that passes when somebody says so.
#[derive(Debug, Default)]
struct VirtualClock(AtomicU64);

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

/// Chunks with their descriptors.
type Kept = Vec<(ChunkId, Arc<OwnedFd>)>;

/// The keeper, which runs when somebody waits for it.
type Shared = Arc<Mutex<Option<Keeper>>>;

fn serve_now(keeper: &Shared) {
    if let Some(keeper) = &mut *keeper.lock().unwrap() {
        keeper.serve_now();
    }
}

/// The daemon's end of the keeper, as `daemon/keeping.rs` has it.
#[derive(Debug, Default)]
struct Keeping {
    link: Mutex<Option<Link>>,
    keeper: Shared,
    /// What is told late, where that is the mistake.
    late: Mutex<Option<Kept>>,
}

impl Keeping {
    fn tell(&self, what: impl FnOnce(&Link) -> bool) {
        let mut link = self.link.lock().unwrap();
        if !link.as_ref().is_none_or(what) {
            *link = None;
        }
    }
}

impl Keep for Keeping {
    fn keep(&self, chunks: &[(ChunkId, Arc<OwnedFd>)]) {
        if let Some(late) = &mut *self.late.lock().unwrap() {
            late.extend(chunks.iter().cloned());
            return;
        }
        let fds: Vec<_> = chunks.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd())).collect();
        self.tell(|link| link.keep(&fds).is_ok());
    }

    fn let_go(&self, chunks: &[ChunkId]) {
        let keys: Vec<Key> = chunks.iter().map(|chunk| Key::Chunk(*chunk)).collect();
        self.tell(|link| let_go(link, &self.keeper, &keys));
    }
}

fn let_go(link: &Link, keeper: &Shared, keys: &[Key]) -> bool {
    keys.chunks(1_000).all(|some| {
        let is_said = link.say_let_go(some).is_ok();
        serve_now(keeper);
        is_said && link.hear_let_go().is_ok()
    })
}

type Work = Arc<Mutex<Vec<Box<dyn FnOnce() + Send>>>>;
type Outbox = Arc<Mutex<Vec<(usize, ToClient)>>>;

/// A daemon.
struct Daemon {
    steward: Arc<Steward>,
    keeping: Arc<Keeping>,
    /// What is to be done on other threads.
    work: Work,
    /// What is to be sent, and was not yet: lost with the daemon.
    outbox: Outbox,
    sessions: BTreeMap<SessionId, (usize, [u8; 16])>,
    /// Sessions that have leased something from this daemon.
    has_leased: Arc<Mutex<BTreeSet<SessionId>>>,
    witness: Option<OwnedFd>,
}

#[derive(Debug)]
enum ToDaemon {
    Open,
    Acquire { session: SessionId, mib: u64 },
    Release { session: SessionId, chunks: Vec<ChunkId> },
    Reattach { session: SessionId, secret: [u8; 16], held: Vec<(ChunkId, Bytes)> },
}

#[derive(Debug)]
enum ToClient {
    Opened { session: SessionId, secret: [u8; 16] },
    Granted { chunks: Vec<(ChunkId, Bytes, u64)> },
    Refused,
    Reattached { renamed: BTreeMap<ChunkId, ChunkId>, unknown: BTreeSet<ChunkId> },
    Unknown,
}

/// A chunk that a client has mapped.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    now: Option<ChunkId>,
    len: Bytes,
    inode: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has no session.
    New,
    /// Waits for an answer to what opens or reattaches it.
    Asks,
    Attached,
    /// The daemon is gone.
    Away,
}

#[derive(Debug)]
struct Client {
    me: Option<(SessionId, [u8; 16])>,
    state: State,
    held: BTreeMap<u64, Mapped>,
    next: u64,
    /// It waits for memory.
    is_asking: bool,
    /// The daemon that it was connected to is gone: it notices when it has read all that came.
    is_cut: bool,
    up: VecDeque<ToDaemon>,
    down: VecDeque<ToClient>,
}

impl Client {
    fn new() -> Client {
        Client {
            me: None,
            state: State::New,
            held: BTreeMap::new(),
            next: 0,
            is_asking: false,
            is_cut: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
        }
    }
}

/// Everything.
pub(crate) struct World {
    rng: Rng,
    plant: Option<Plant>,
    clock: Arc<VirtualClock>,
    dir: tempfile::TempDir,
    keeper: Shared,
    daemon: Option<Daemon>,
    /// The keeper was told everything, and has not died since.
    is_kept: bool,
    /// Chunks that nobody can hand on, and that is known.
    bare: BTreeSet<ChunkId>,
    clients: Vec<Client>,
    /// An older copy of the journal.
    older: Option<Vec<u8>>,
    secrets: u64,
    pub(crate) counts: Counts,
}

fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

impl World {
    pub(crate) fn new(seed: u64, plant: Option<Plant>) -> World {
        let dir = tempfile::tempdir().unwrap();
        let mut world = World {
            rng: Rng::new(seed),
            plant,
            clock: Arc::default(),
            dir,
            keeper: Shared::default(),
            daemon: None,
            is_kept: true,
            bare: BTreeSet::new(),
            clients: (0..CLIENTS).map(|_| Client::new()).collect(),
            older: None,
            secrets: 0,
            counts: Counts::default(),
        };
        world.start_keeper();
        world.start_daemon();
        world
    }

    fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    // === Daemon and keeper

    fn start_keeper(&mut self) {
        *self.keeper.lock().unwrap() = Some(Keeper::new(self.dir.path(), true).unwrap());
    }

    fn serve_keeper(&self) {
        serve_now(&self.keeper);
    }

    fn has_keeper(&self) -> bool {
        self.keeper.lock().unwrap().is_some()
    }

    /// A link to the keeper that is there, which it has answered.
    fn link(&mut self) -> Option<Link> {
        if !self.has_keeper() {
            return None;
        }
        let link = Link::call(self.dir.path(), Duration::from_secs(1)).ok().flatten()?;
        self.serve_keeper();
        Some(link.greeted(&self.dir.path().join(SOCKET_NAME)).unwrap())
    }

    fn start_daemon(&mut self) {
        self.counts.takeovers += 1;
        if !self.has_keeper() {
            self.start_keeper();
        }
        let link = self.link().unwrap();
        link.ask().unwrap();
        self.serve_keeper();
        let mut held = link.answer().unwrap();
        if self.has(Plant::Believes) {
            held.retain(|(key, _)| *key != Key::Witness);
        }
        let left = Left::find(self.dir.path(), held).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(DEVICE_MIB)])));
        let device = Device::open(Arc::clone(&driver), DEVICE).unwrap();
        let uuid: DeviceUuid = device.uuid();
        let keeping = Arc::new(Keeping { keeper: Arc::clone(&self.keeper), ..Keeping::default() });
        if self.has(Plant::KeepsLate) {
            *keeping.late.lock().unwrap() = Some(Vec::new());
        }
        let store = Store::new(vec![device]).with_keeper(Arc::clone(&keeping) as Arc<dyn Keep>);
        let following = Following { id: DEVICE, uuid, total: Bytes::mib(DEVICE_MIB) };
        let Begun { journal, useless, witness, .. } = left.begin(&[following], &Ladder::standard(), &store).unwrap();
        let bare = journal.book().chunks().keys().filter(|chunk| !store.can_hand_on(**chunk)).copied();
        let bare: BTreeSet<ChunkId> = bare.collect();
        let lost = bare.difference(&self.bare).next();
        assert!(!self.is_kept || lost.is_none(), "the keeper has lived, and has not what the journal says: {lost:?}");
        (self.is_kept, self.bare) = (true, bare);
        assert!(let_go(&link, &self.keeper, &useless));
        link.keep(&[(Key::Witness, witness.as_fd())]).unwrap();
        *keeping.link.lock().unwrap() = Some(link);
        self.serve_keeper();
        let book = journal.book().clone();
        let work = Work::default();
        let queue = Arc::clone(&work);
        let spawn = Box::new(move |piece| queue.lock().unwrap().push(piece));
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let uuids = BTreeMap::from([(DEVICE, uuid)]);
        let steward = Steward::following(store, clock, spawn, journal, uuids).unwrap();
        let mut sessions = BTreeMap::new();
        for (session, known) in book.sessions() {
            let whose = known.of.process.pid as usize;
            let is_alive = self.clients.get(whose).is_some_and(|client| {
                // Of a process that has died since another has its place.
                client.me.is_some_and(|(_, secret)| secret == known.of.secret)
            });
            match is_alive {
                true => drop(sessions.insert(*session, (whose, known.of.secret))),
                false => drop(steward.end(*session, EndReason::Died)),
            }
        }
        let (outbox, has_leased) = (Outbox::default(), Arc::default());
        let witness = Some(witness);
        self.daemon = Some(Daemon { steward, keeping, work, outbox, sessions, has_leased, witness });
    }

    /// The daemon is gone at once: with what it had not sent, and what was on its way to it. What it had sent is still read.
    fn kill_daemon(&mut self) {
        let Some(daemon) = self.daemon.take() else { return };
        self.counts.kills += 1;
        self.counts.lost_messages += daemon.outbox.lock().unwrap().len() as u64;
        // What others hold of it they hold on; nothing is tidied up.
        daemon.work.lock().unwrap().clear();
        *daemon.keeping.link.lock().unwrap() = None;
        drop(daemon);
        for client in &mut self.clients {
            self.counts.lost_messages += client.up.len() as u64;
            client.up.clear();
            client.is_cut = true;
        }
    }

    fn kill_keeper(&mut self) {
        self.counts.keeper_kills += u64::from(self.keeper.lock().unwrap().take().is_some());
        self.is_kept = false;
    }

    /// The daemon starts another keeper, and tells it everything.
    fn mend(&mut self) {
        if self.daemon.is_none() || self.has_keeper() {
            return;
        }
        self.start_keeper();
        let link = self.link().unwrap();
        let daemon = self.daemon.as_ref().unwrap();
        let chunks = daemon.steward.store().exported();
        let mut all: Vec<_> = chunks.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd())).collect();
        all.extend(daemon.witness.as_ref().map(|witness| (Key::Witness, witness.as_fd())));
        link.keep(&all).unwrap();
        self.is_kept = true;
        *daemon.keeping.link.lock().unwrap() = Some(link);
        self.serve_keeper();
    }

    fn journal(&self) -> std::path::PathBuf {
        self.dir.path().join(JOURNAL_NAME)
    }

    /// Somebody puts an older copy of the journal in its place, or takes it away, while no daemon looks.
    fn damage(&mut self) {
        if self.daemon.is_some() {
            return;
        }
        self.counts.damaged += 1;
        match self.older.take() {
            Some(older) if self.rng.below(2) == 0 => std::fs::write(self.journal(), older).unwrap(),
            _ => drop(std::fs::remove_file(self.journal())),
        }
    }

    // === What a daemon does with a message

    fn serve(&mut self, whose: usize, message: ToDaemon) {
        let has_keeps = self.has(Plant::Keeps);
        let has_old_names = self.has(Plant::OldNames);
        let Some(daemon) = &mut self.daemon else { return };
        let outbox = Arc::clone(&daemon.outbox);
        let say = move |what| outbox.lock().unwrap().push((whose, what));
        match message {
            ToDaemon::Open => {
                self.secrets += 1;
                let mut secret = [0; 16];
                secret[..8].copy_from_slice(&self.secrets.to_le_bytes());
                let terms = Terms::new(LIMIT, 0);
                let record = |session| {
                    Some(SessionRecord {
                        session,
                        secret,
                        process: Process { pid: whose as i32, pidfs: 0, start: 1 },
                        name: String::new(),
                        tenant: String::new(),
                        terms,
                        guarantee_max: Bytes::ZERO,
                    })
                };
                let session = daemon.steward.open_as(terms, record).unwrap();
                daemon.sessions.insert(session, (whose, secret));
                say(ToClient::Opened { session, secret });
            }
            ToDaemon::Acquire { session, mib } => {
                let parts = vec![Part { len: Bytes::mib(2), count: mib / 2 }];
                let (holder, plan) = (Holder::Session(session), None);
                let ask = Ask { holder, device: DEVICE, parts, plan, wait_ms: 50 };
                let (steward, answers) = (Arc::downgrade(&daemon.steward), say.clone());
                let has_leased = Arc::clone(&daemon.has_leased);
                let asked = daemon.steward.acquire(ask, move |answer| match (answer, steward.upgrade()) {
                    (Answer::Granted(chunks), Some(steward)) => {
                        has_leased.lock().unwrap().insert(session);
                        let with_inode =
                            |(chunk, len): (ChunkId, Bytes)| (chunk, len, inode(&steward.descriptor(chunk).unwrap()));
                        answers(ToClient::Granted { chunks: chunks.into_iter().map(with_inode).collect() });
                    }
                    _ => answers(ToClient::Refused),
                });
                if asked.is_err() {
                    say(ToClient::Refused);
                }
            }
            ToDaemon::Release { session, chunks } => {
                let _ = daemon.steward.release(session, chunks);
            }
            ToDaemon::Reattach { session, secret, held } => {
                if daemon.sessions.get(&session) != Some(&(whose, secret)) {
                    return say(ToClient::Unknown);
                }
                let names: BTreeSet<ChunkId> = held.iter().map(|(chunk, _)| *chunk).collect();
                let unknown: BTreeSet<ChunkId> = if has_keeps {
                    let all = names.clone();
                    let mine = daemon.steward.reattach(session, &all);
                    drop(mine);
                    BTreeSet::new()
                } else {
                    daemon.steward.reattach(session, &names).unwrap().into_iter().collect()
                };
                let may_register = !daemon.has_leased.lock().unwrap().contains(&session);
                let (mut renamed, mut uncounted) = (BTreeMap::new(), BTreeSet::new());
                for (chunk, len) in held.iter().filter(|(chunk, _)| unknown.contains(chunk)) {
                    let registered = may_register.then(|| daemon.steward.register(session, DEVICE, *len));
                    match registered {
                        Some(Ok(now)) => {
                            self.counts.registered += 1;
                            self.bare.insert(now);
                            renamed.insert(*chunk, if has_old_names { *chunk } else { now });
                        }
                        _ => drop(uncounted.insert(*chunk)),
                    }
                }
                self.counts.reattached += 1;
                say(ToClient::Reattached { renamed, unknown: uncounted });
            }
        }
    }

    // === What a client does with a message

    fn hear(&mut self, whose: usize, message: ToClient) {
        let is_there = self.daemon.is_some();
        match message {
            ToClient::Granted { chunks } => {
                self.counts.grants += 1;
                for (now, len, inode) in chunks {
                    // The one thing that must never be otherwise.
                    for (other, client) in self.clients.iter().enumerate() {
                        let has_it = client.held.values().any(|mapped| mapped.inode == inode);
                        assert!(!has_it, "{now} is granted to client {whose} while client {other} has it mapped");
                    }
                    let client = &mut self.clients[whose];
                    client.next += 1;
                    client.held.insert(client.next, Mapped { now: Some(now), len, inode });
                }
                self.clients[whose].is_asking = false;
            }
            ToClient::Refused => {
                self.counts.refused += 1;
                self.clients[whose].is_asking = false;
            }
            ToClient::Opened { session, secret } => {
                let client = &mut self.clients[whose];
                client.me = Some((session, secret));
                // One that has something says so to a daemon that did not know it.
                client.state = State::Away;
                if client.held.is_empty() && is_there {
                    client.state = State::Attached;
                }
            }
            ToClient::Reattached { renamed, unknown } => {
                let client = &mut self.clients[whose];
                for mapped in client.held.values_mut() {
                    let Some(now) = mapped.now else { continue };
                    if let Some(name) = renamed.get(&now) {
                        mapped.now = Some(*name);
                    } else if unknown.contains(&now) {
                        mapped.now = None;
                    }
                }
                client.state = State::Attached;
            }
            ToClient::Unknown => {
                let client = &mut self.clients[whose];
                client.state = State::Asks;
                client.me = None;
                client.up.push_back(ToDaemon::Open);
            }
        }
    }

    /// The daemon's end of the connection is closed, and all that it had sent is read.
    fn note_gone(&mut self, whose: usize) {
        let client = &mut self.clients[whose];
        (client.is_asking, client.is_cut) = (false, false);
        // What it has said since nobody hears.
        client.up.clear();
        client.state = if client.me.is_some() { State::Away } else { State::New };
    }

    // === What happens

    /// Something happens.
    pub(crate) fn step(&mut self) {
        self.counts.steps += 1;
        let whose = self.rng.index(CLIENTS);
        match self.rng.below(1_000) {
            0..3 => self.kill_daemon(),
            3..5 => self.kill_keeper(),
            5 => {
                self.kill_daemon();
                self.kill_keeper();
            }
            6..8 => self.damage(),
            8..40 => {
                if self.daemon.is_none() {
                    self.start_daemon();
                }
            }
            40..60 => self.mend(),
            60..64 => self.die(whose),
            64..70 => self.older = std::fs::read(self.journal()).ok().or(self.older.take()),
            70..200 => self.tick(),
            200..400 => self.work(),
            400..500 => self.send(),
            500..650 => self.deliver_up(whose),
            650..800 => self.deliver_down(whose),
            _ => self.act(whose),
        }
        self.serve_keeper();
    }

    fn tick(&mut self) {
        self.clock.0.fetch_add(self.rng.below(20), Ordering::Relaxed);
        let warms = self.rng.below(4) == 0;
        if let Some(daemon) = &self.daemon {
            daemon.steward.tick();
            if warms {
                // Chunks that nobody has: what a stale journal calls so may be somebody's.
                daemon.steward.warm(DEVICE, Part { len: Bytes::mib(2), count: 6 }).unwrap();
            }
            let late = daemon.keeping.late.lock().unwrap().as_mut().map(std::mem::take).unwrap_or_default();
            if !late.is_empty() {
                let fds: Vec<_> = late.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd())).collect();
                daemon.keeping.tell(|link| link.keep(&fds).is_ok());
            }
        }
    }

    /// One piece of work is done.
    fn work(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        let piece = {
            let mut work = daemon.work.lock().unwrap();
            if work.is_empty() {
                return;
            }
            let at = self.rng.index(work.len());
            work.swap_remove(at)
        };
        piece();
    }

    /// The daemon sends what it has to say: from here on it is in the kernel's hands.
    fn send(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        for (whose, what) in daemon.outbox.lock().unwrap().drain(..) {
            // To a connection that is gone nothing can be sent.
            if !self.clients[whose].is_cut {
                self.clients[whose].down.push_back(what);
            }
        }
    }

    fn deliver_up(&mut self, whose: usize) {
        if self.daemon.is_some()
            && !self.clients[whose].is_cut
            && let Some(message) = self.clients[whose].up.pop_front()
        {
            self.serve(whose, message);
        }
    }

    fn deliver_down(&mut self, whose: usize) {
        match self.clients[whose].down.pop_front() {
            Some(message) => self.hear(whose, message),
            None if self.clients[whose].is_cut => self.note_gone(whose),
            None => {}
        }
    }

    /// A client does something by itself.
    fn act(&mut self, whose: usize) {
        let forgets = self.has(Plant::Forgets);
        let (what, mib, chance) = (self.rng.below(3), 2 * (1 + self.rng.below(4)), self.rng.below(2));
        let pick = self.rng.next_u64();
        let client = &mut self.clients[whose];
        match (client.state, client.me) {
            (State::New, _) if !client.is_cut => {
                client.state = State::Asks;
                client.up.push_back(ToDaemon::Open);
            }
            // Whatever the one before had sent is read first.
            (State::Away, Some((session, secret))) if client.down.is_empty() && self.daemon.is_some() => {
                let mut held: Vec<_> =
                    client.held.values().filter_map(|mapped| Some((mapped.now?, mapped.len))).collect();
                if forgets {
                    held.pop();
                }
                client.state = State::Asks;
                client.up.push_back(ToDaemon::Reattach { session, secret, held });
            }
            (State::Attached, Some((session, _))) if what == 0 && !client.is_asking => {
                client.is_asking = true;
                client.up.push_back(ToDaemon::Acquire { session, mib });
            }
            (State::Attached, Some((session, _))) if what == 1 && chance == 0 && !client.held.is_empty() => {
                // Handles first; then the daemon hears of it.
                let keys: Vec<u64> = client.held.keys().copied().collect();
                let gone = client.held.remove(&keys[(pick % keys.len() as u64) as usize]).unwrap();
                if let Some(now) = gone.now {
                    client.up.push_back(ToDaemon::Release { session, chunks: vec![now] });
                }
            }
            _ => {}
        }
    }

    /// A client's process dies: what it has mapped is unmapped, and the daemon hears of it, or the next one does.
    fn die(&mut self, whose: usize) {
        self.counts.deaths += 1;
        let was = std::mem::replace(&mut self.clients[whose], Client::new());
        if let (Some(daemon), Some((session, secret))) = (&mut self.daemon, was.me)
            && daemon.sessions.get(&session) == Some(&(whose, secret))
        {
            daemon.sessions.remove(&session);
            let _ = daemon.steward.end(session, EndReason::Died);
        }
        // Sessions that it never heard of go with it, too.
        if let Some(daemon) = &mut self.daemon {
            let others: Vec<_> =
                daemon.sessions.iter().filter(|(_, (of, _))| *of == whose).map(|(session, _)| *session).collect();
            for session in others {
                daemon.sessions.remove(&session);
                let _ = daemon.steward.end(session, EndReason::Died);
            }
            daemon.outbox.lock().unwrap().retain(|(of, _)| *of != whose);
        }
    }

    /// Everything that is on its way arrives, and nobody does anything more: then all say the same.
    pub(crate) fn settle(&mut self) {
        if self.daemon.is_none() {
            self.start_daemon();
        }
        self.mend();
        for _ in 0..200 {
            for whose in 0..CLIENTS {
                while !self.clients[whose].down.is_empty()
                    || !self.clients[whose].up.is_empty()
                    || self.clients[whose].is_cut
                {
                    self.deliver_down(whose);
                    self.deliver_up(whose);
                }
                // Those that were away come back.
                if matches!(self.clients[whose].state, State::Away) {
                    self.act(whose);
                }
                // What was lost with a daemon is asked for again.
                if self.clients[whose].state == State::Asks && self.clients[whose].up.is_empty() {
                    let is_open =
                        self.daemon.as_ref().unwrap().outbox.lock().unwrap().iter().any(|(of, _)| *of == whose);
                    if !is_open {
                        self.note_gone(whose);
                    }
                }
            }
            self.clock.0.fetch_add(20, Ordering::Relaxed);
            self.tick();
            while !self.daemon.as_ref().unwrap().work.lock().unwrap().is_empty() {
                self.work();
            }
            self.send();
            self.serve_keeper();
        }
        self.audit();
    }

    fn audit(&self) {
        let daemon = self.daemon.as_ref().unwrap();
        let mut leased = Bytes::ZERO;
        for (whose, client) in self.clients.iter().enumerate() {
            let held: Bytes = client.held.values().filter(|mapped| mapped.now.is_some()).map(|mapped| mapped.len).sum();
            let Some((session, _)) = client.me else { continue };
            if client.state != State::Attached {
                continue;
            }
            let view = daemon.steward.session(session).unwrap();
            assert_eq!(view.held_bytes(), held, "client {whose} and the daemon say otherwise");
            leased += held;
        }
        let others = daemon.steward.sessions();
        let others: Bytes = others.iter().map(|view| view.held_bytes()).sum();
        assert_eq!(others, leased, "somebody who is not there has something");
        let device = daemon.steward.device(DEVICE).unwrap();
        assert_eq!(device.bytes.leased, leased);
    }
}
