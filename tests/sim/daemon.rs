//! A daemon and its keeper: the product's steward, store, journal and keeper, and who tells whom what, as `daemon/keeping.rs` and the services have it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use stitchd::driver::Driver;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{ChunkId, DeviceId, DeviceUuid, RangeId, SessionId};
use stitchd::journal::{Process, PublishedRange, SessionRecord};
use stitchd::keeper::process::Keeper;
use stitchd::keeper::{Key, Link};
use stitchd::ladder::Part;
use stitchd::ledger::{Holder, Terms};
use stitchd::memory::Device;
use stitchd::steward::{Again, Answer, Ask, Steward, Told};
use stitchd::store::Keep;
use stitchd::units::Bytes;
use stitchd::wire::v1;

use crate::client::{Me, ToClient, ToDaemon};
use crate::world::{Counts, Plant};

pub(crate) const DEVICE: DeviceId = DeviceId(0);
pub(crate) const DEVICE_MIB: u64 = 64;
/// What a client may have.
const LIMIT: Bytes = Bytes::mib(32);

/// The device, as each daemon opens it anew.
pub(crate) fn device() -> Arc<Device> {
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(DEVICE_MIB)])));
    Device::open(driver, DEVICE).unwrap()
}

/// Chunks with their descriptors.
type Kept = Vec<(ChunkId, Arc<OwnedFd>)>;

/// The keeper, which runs when somebody waits for it.
pub(crate) type Shared = Arc<Mutex<Option<Keeper>>>;

pub(crate) fn serve_now(keeper: &Shared) {
    if let Some(keeper) = &mut *keeper.lock().unwrap() {
        keeper.serve_now();
    }
}

/// The daemon's end of the keeper, as `daemon/keeping.rs` has it.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    pub(crate) link: Mutex<Option<Link>>,
    pub(crate) keeper: Shared,
    /// What is told late, where that is the mistake.
    pub(crate) late: Mutex<Option<Kept>>,
    /// The daemon dies in what it does now: what comes after a step is in the journal is not done any more.
    pub(crate) is_dying: AtomicBool,
}

impl Keeping {
    pub(crate) fn tell(&self, what: impl FnOnce(&Link) -> bool) {
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
        if self.is_dying.load(Ordering::Relaxed) {
            return;
        }
        let keys: Vec<Key> = chunks.iter().map(|chunk| Key::Chunk(*chunk)).collect();
        self.tell(|link| let_go(link, &self.keeper, &keys));
    }

    // One that is dead holds nothing, and one that lives answers.
    fn holds(&self, _: &[ChunkId]) -> BTreeSet<ChunkId> {
        BTreeSet::new()
    }
}

pub(crate) fn let_go(link: &Link, keeper: &Shared, keys: &[Key]) -> bool {
    keys.chunks(1_000).all(|some| {
        let is_said = link.say_let_go(some).is_ok();
        serve_now(keeper);
        is_said && link.hear_let_go().is_ok()
    })
}

pub(crate) type Work = Arc<Mutex<Vec<Box<dyn FnOnce() + Send>>>>;
pub(crate) type Outbox = Arc<Mutex<Vec<(usize, ToClient)>>>;

/// A daemon.
pub(crate) struct Daemon {
    pub(crate) steward: Arc<Steward>,
    pub(crate) keeping: Arc<Keeping>,
    /// What is to be done on other threads.
    pub(crate) work: Work,
    /// What is to be sent, and was not yet: lost with the daemon.
    pub(crate) outbox: Outbox,
    pub(crate) sessions: BTreeMap<SessionId, (usize, [u8; 16])>,
    /// Sessions that have leased something from this daemon.
    pub(crate) has_leased: Arc<Mutex<BTreeSet<SessionId>>>,
    /// The last attempt to be there again of each session.
    pub(crate) attempts: BTreeMap<SessionId, u64>,
    /// Chunks that it was told of, and cannot hand on.
    pub(crate) registered: Vec<ChunkId>,
    pub(crate) witness: OwnedFd,
    pub(crate) uuid: DeviceUuid,
    pub(crate) plant: Option<Plant>,
}

pub(crate) fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

impl Daemon {
    /// What it does with a message. Answers are in the outbox, now or later.
    pub(crate) fn serve(&mut self, whose: usize, message: ToDaemon, secret: [u8; 16], counts: &mut Counts) {
        let outbox = Arc::clone(&self.outbox);
        let say = move |what| outbox.lock().unwrap().push((whose, what));
        match message {
            ToDaemon::Open => say(ToClient::Opened { me: self.open(whose, secret) }),
            ToDaemon::Acquire { session, mib } => self.acquire(session, mib, say),
            ToDaemon::Release { session, chunks } => {
                // One that names what is not its own has lost its session meanwhile.
                let released = self.steward.release(session, chunks);
                assert!(released.is_ok() || !self.sessions.contains_key(&session), "{released:?}");
            }
            ToDaemon::Reattach { me, told } => say(self.reattach(whose, me, &told, counts)),
            ToDaemon::Publish { session, chunk } => say(self.publish(session, chunk)),
            ToDaemon::Attach { session, pick } => say(self.attach(session, pick)),
            ToDaemon::Leave { session, range } => drop(self.steward.leave(session, range)),
            ToDaemon::Admit { session, guarantee } => {
                let answers = say.clone();
                let asked = self.steward.admit(session, DEVICE, guarantee, 50, move |answer| {
                    let is_given = matches!(answer, Answer::Granted(_));
                    answers(ToClient::Guaranteed { is_given, guarantee });
                });
                if asked.is_err() {
                    say(ToClient::Guaranteed { is_given: false, guarantee });
                }
            }
        }
    }

    fn open(&mut self, whose: usize, secret: [u8; 16]) -> Me {
        let terms = Terms::new(LIMIT, 0);
        let record = |session| {
            Some(SessionRecord {
                session,
                secret,
                process: Process { pid: whose as i32, pidfs: 0, start: 1 },
                name: String::new(),
                tenant: String::new(),
                terms,
                guarantee_max: LIMIT,
                opened_s: 0,
            })
        };
        let session = self.steward.open_as(terms, record).unwrap();
        self.sessions.insert(session, (whose, secret));
        (session, secret)
    }

    fn acquire(&self, session: SessionId, mib: u64, say: impl Fn(ToClient) + Clone + Send + 'static) {
        let parts = vec![Part { len: Bytes::mib(2), count: mib / 2 }];
        let ask =
            Ask { holder: Holder::Session(session), device: DEVICE, parts, plan: None, wait_ms: 50, waited_ms: 0 };
        let (steward, answers) = (Arc::downgrade(&self.steward), say.clone());
        let has_leased = Arc::clone(&self.has_leased);
        let asked = self.steward.acquire(ask, move |answer| match (answer, steward.upgrade()) {
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

    /// As `daemon/reattach.rs`: what was said, read and answered.
    fn reattach(&mut self, whose: usize, me: Me, told: &[v1::ReattachRequest], counts: &mut Counts) -> ToClient {
        let ((session, secret), attempt) = (me, told[0].attempt);
        if self.sessions.get(&session) != Some(&(whose, secret)) {
            return ToClient::Unknown { attempt };
        }
        // As `Entry::check_attempt`.
        let last = self.attempts.entry(session).or_default();
        if *last > attempt && self.plant != Some(Plant::HearsLate) {
            return ToClient::Unknown { attempt };
        }
        *last = attempt.max(*last);
        let mut all = Told::default();
        for message in told {
            for held in &message.held {
                let device = (held.device_uuid == self.uuid.0).then_some(DEVICE);
                let chunk = |chunk: &v1::ChunkInfo| (device, ChunkId(chunk.chunk_id), Bytes::new(chunk.len_bytes));
                all.chunks.extend(held.chunks.iter().map(chunk));
            }
            all.ranges.extend(message.ranges.iter().map(|held| (RangeId(held.range_id), held.times)));
        }
        let may_register = !self.has_leased.lock().unwrap().contains(&session);
        let mut again = self.steward.reattach(session, &all, may_register).unwrap();
        counts.reattached += 1;
        counts.registered += again.renamed.len() as u64;
        self.registered.extend(again.renamed.iter().map(|(_, now)| *now));
        match self.plant {
            Some(Plant::Keeps) => again = Again::default(),
            Some(Plant::OldNames) => again.renamed.iter_mut().for_each(|(was, now)| *now = *was),
            _ => {}
        }
        let renamed = |(chunk, now): (ChunkId, ChunkId)| v1::RenamedChunk { chunk_id: chunk.0, now: now.0 };
        let reply = v1::ReattachReply {
            renamed: again.renamed.into_iter().map(renamed).collect(),
            unknown_chunk_ids: again.uncounted.iter().map(|chunk| chunk.0).collect(),
            unknown_range_ids: again.unknown_ranges.iter().map(|range| range.0).collect(),
            ..v1::ReattachReply::default()
        };
        ToClient::Reattached { attempt, reply }
    }

    /// As `daemon/ranges.rs`.
    fn publish(&self, session: SessionId, chunk: ChunkId) -> ToClient {
        let store = self.steward.store();
        if store.len_of(chunk).is_err() || !store.can_hand_on(chunk) {
            return ToClient::NotPublished;
        }
        let record = |range, chunks| {
            Some(PublishedRange {
                range,
                name: "range".to_owned(),
                tenant: String::new(),
                version: range.0,
                key: Vec::new(),
                content: Bytes::mib(1),
                is_writable: true,
                is_sealed: false,
                publisher: session,
                linger_ms: 30,
                chunks,
            })
        };
        match self.steward.publish_as(session, vec![chunk], 30, record) {
            Ok(range) => ToClient::Published { range },
            Err(_) => ToClient::NotPublished,
        }
    }

    fn attach(&self, session: SessionId, pick: usize) -> ToClient {
        // What is withdrawn has no name.
        let named = self.steward.ranges().into_iter().filter(|view| !view.is_withdrawn);
        let ranges: Vec<RangeId> = named.map(|view| view.range).collect();
        if ranges.is_empty() {
            return ToClient::NotAttached;
        }
        let range = ranges[pick % ranges.len()];
        match self.steward.attach(session, range) {
            Ok(view) => {
                let (chunk, len) = view.chunks[0];
                ToClient::Attached { range, len, inode: inode(&self.steward.descriptor(chunk).unwrap()) }
            }
            Err(_) => ToClient::NotAttached,
        }
    }
}
