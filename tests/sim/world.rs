//! The world: what there is, what may happen next, and what must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stitchd::clock::Clock;
use stitchd::daemon::takeover::{Begun, Following, JOURNAL_NAME, Left};
use stitchd::ids::{ChunkId, DeviceUuid, RangeId, SessionId};
use stitchd::journal::witnessed;
use stitchd::keeper::process::Keeper;
use stitchd::keeper::{Key, Link, SOCKET_NAME};
use stitchd::ladder::{Ladder, Part};
use stitchd::ledger::EndReason;
use stitchd::rng::Rng;
use stitchd::steward::Steward;
use stitchd::store::{Keep, Store};
use stitchd::units::Bytes;

use crate::client::{Client, State, ToClient, ToDaemon};
use crate::daemon::{DEVICE, DEVICE_MIB, Daemon, Keeping, Outbox, Shared, Work, device, let_go, serve_now};

const CLIENTS: usize = 4;

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
    /// What is granted is told before it is in the journal.
    TellsEarly,
    /// A client leaves out its shared ranges when it says what it holds.
    ForgetsRanges,
    /// What a client had said in an attempt that it has given up is believed after the next.
    HearsLate,
}

impl Plant {
    pub(crate) const ALL: [Plant; 8] = [
        Plant::Forgets,
        Plant::Keeps,
        Plant::Believes,
        Plant::KeepsLate,
        Plant::OldNames,
        Plant::TellsEarly,
        Plant::ForgetsRanges,
        Plant::HearsLate,
    ];

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
    pub(crate) torn: u64,
    pub(crate) takeovers: u64,
    pub(crate) reattached: u64,
    pub(crate) retried: u64,
    pub(crate) registered: u64,
    pub(crate) published: u64,
    pub(crate) attached: u64,
    pub(crate) guaranteed: u64,
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
        self.torn += more.torn;
        self.takeovers += more.takeovers;
        self.reattached += more.reattached;
        self.retried += more.retried;
        self.registered += more.registered;
        self.published += more.published;
        self.attached += more.attached;
        self.guaranteed += more.guaranteed;
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
    uuid: DeviceUuid,
    /// Somebody has put another journal in its place since a daemon looked.
    is_damaged: bool,
    /// An older copy of the journal.
    older: Option<Vec<u8>>,
    secrets: u64,
    pub(crate) counts: Counts,
}

impl World {
    pub(crate) fn new(seed: u64, plant: Option<Plant>) -> World {
        let (dir, uuid) = (tempfile::tempdir().unwrap(), device().uuid());
        let mut world = World {
            rng: Rng::new(seed),
            plant,
            clock: Arc::default(),
            dir,
            keeper: Shared::default(),
            daemon: None,
            is_kept: true,
            bare: BTreeSet::new(),
            clients: (0..CLIENTS).map(|_| Client::new(uuid)).collect(),
            uuid,
            is_damaged: false,
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
        let link =
            Link::call(&self.dir.path().join(stitchd::keeper::SOCKET_NAME), Duration::from_secs(1)).ok().flatten()?;
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
        // Where both have died an older journal cannot be told from the last one: what it says of guarantees is believed.
        if std::mem::take(&mut self.is_damaged) && held.iter().all(|(key, _)| *key != Key::Witness) {
            self.clients.iter_mut().for_each(|client| client.guaranteed = None);
        }
        let left = Left::find(self.dir.path(), held).unwrap();
        let (device, uuid) = (device(), self.uuid);
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
        let (plant, registered, attempts) = (self.plant, Vec::new(), BTreeMap::new());
        self.daemon = Some(Daemon {
            steward,
            keeping,
            work,
            outbox,
            sessions,
            has_leased,
            attempts,
            registered,
            witness,
            uuid,
            plant,
        });
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
            self.counts.lost_messages += (client.link_up.len() + client.calls.len()) as u64;
            client.link_up.clear();
            client.calls.clear();
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
        all.push((Key::Witness, daemon.witness.as_fd()));
        link.keep(&all).unwrap();
        self.is_kept = true;
        *daemon.keeping.link.lock().unwrap() = Some(link);
        self.serve_keeper();
    }

    fn journal(&self) -> std::path::PathBuf {
        self.dir.path().join(JOURNAL_NAME)
    }

    /// While no daemon looks the journal is taken away, replaced by an older copy, cut somewhere, or a bit of it turned.
    fn damage(&mut self) {
        let Ok(mut journal) = std::fs::read(self.journal()) else { return };
        if self.daemon.is_some() || journal.is_empty() {
            return;
        }
        self.counts.damaged += 1;
        self.is_damaged = true;
        let at = self.rng.index(journal.len());
        match self.rng.below(4) {
            0 => return std::fs::remove_file(self.journal()).unwrap(),
            1 => journal = self.older.take().unwrap_or_default(),
            2 => journal.truncate(at),
            _ => journal[at] ^= 1 << self.rng.below(8),
        }
        std::fs::write(self.journal(), journal).unwrap();
    }

    /// The daemon dies while it writes down what it does now: the rest is not in the journal, and what would have come after that does not come.
    fn tear(&mut self, whose: usize) {
        let Some(daemon) = &self.daemon else { return };
        let before = std::fs::read(self.journal()).unwrap();
        let last = witnessed(&daemon.witness).unwrap().last;
        daemon.keeping.is_dying.store(true, Ordering::Relaxed);
        match self.rng.below(3) {
            0 => self.tick(),
            1 => self.work(),
            _ => self.deliver_up(whose),
        }
        if self.has(Plant::TellsEarly) {
            self.send();
        }
        let after = std::fs::read(self.journal()).unwrap();
        let witness = self.daemon.as_ref().unwrap().witness.try_clone().unwrap();
        self.kill_daemon();
        // One that was written anew is there as a whole or not at all.
        if after.len() == before.len() || !after.starts_with(&before) {
            return;
        }
        self.counts.torn += 1;
        let cut = before.len() + self.rng.index(after.len() - before.len());
        std::fs::write(self.journal(), &after[..cut]).unwrap();
        // Each frame says first how long it is, without its sixteen bytes of header.
        let (mut at, mut whole) = (before.len(), 0);
        while let Some(len) = after[..cut].get(at..at + 4) {
            at += 16 + u32::from_le_bytes(len.try_into().unwrap()) as usize;
            whole += u64::from(at <= cut);
        }
        // Of the last whole one the witness has heard, or not yet.
        let heard = last + whole - if whole > 0 { self.rng.below(2) } else { 0 };
        rustix::io::pwrite(&witness, &heard.to_le_bytes(), 0).unwrap();
    }

    // === Messages

    fn serve(&mut self, whose: usize, message: ToDaemon) {
        self.secrets += 1;
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&self.secrets.to_le_bytes());
        if let Some(daemon) = &mut self.daemon {
            daemon.serve(whose, message, secret, &mut self.counts);
            self.bare.extend(daemon.registered.drain(..));
        }
    }

    /// What must never be otherwise: memory that comes is nobody's.
    fn check(&self, whose: usize, message: &ToClient) {
        let holds = |other: &Client, inode: u64| other.inodes().contains(&inode);
        let inodes = match message {
            ToClient::Granted { chunks } => chunks.iter().map(|(_, _, inode)| *inode).collect(),
            ToClient::Attached { inode, .. } => vec![*inode],
            _ => return,
        };
        for inode in inodes {
            for (other, client) in self.clients.iter().enumerate() {
                // What was to be published is mapped nowhere, whoever it was has heard of it or not.
                let is_published = matches!(message, ToClient::Attached { .. });
                let is_on_its_way = is_published && client.inode_of_publishing() == Some(inode);
                let is_shared = !is_published && client.ranges.iter().any(|range| range.inode == inode);
                let has_it = holds(client, inode) && !is_on_its_way || is_shared;
                assert!(!has_it, "{message:?} comes to client {whose} while client {other} has it mapped");
            }
        }
    }

    fn hear(&mut self, whose: usize, message: ToClient) {
        self.check(whose, &message);
        self.clients[whose].hear(message, &mut self.counts);
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
            64..66 => self.tear(whose),
            66..70 => self.older = std::fs::read(self.journal()).ok().or(self.older.take()),
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
            let client = &mut self.clients[whose];
            // To a connection that is gone nothing can be sent.
            match what {
                _ if client.is_cut => {}
                what @ (ToClient::Granted { .. } | ToClient::Refused) => client.link_down.push_back(what),
                what => client.answers.push(what),
            }
        }
    }

    /// Something that a client has said arrives: over its link in order, calls as they come.
    fn deliver_up(&mut self, whose: usize) {
        let is_call = self.rng.below(2) == 0;
        let client = &mut self.clients[whose];
        if self.daemon.is_none() || client.is_cut {
            return;
        }
        let message = match is_call && !client.calls.is_empty() {
            // Mostly the newest: what is late is to be very late now and then.
            true if self.rng.below(4) > 0 => client.calls.pop(),
            true => Some(client.calls.swap_remove(self.rng.index(client.calls.len()))),
            false => client.link_up.pop_front(),
        };
        if let Some(message) = message {
            self.serve(whose, message);
        }
    }

    fn deliver_down(&mut self, whose: usize) {
        let is_answer = self.rng.below(2) == 0;
        let client = &mut self.clients[whose];
        if is_answer && !client.answers.is_empty() {
            let answer = client.answers.swap_remove(self.rng.index(client.answers.len()));
            return self.hear(whose, answer);
        }
        match client.link_down.pop_front() {
            Some(message) => self.hear(whose, message),
            // Answers that have not been read by then are lost: the connection has broken.
            None if client.is_cut => client.note_gone(),
            None => {}
        }
    }

    /// A client does something by itself.
    fn act(&mut self, whose: usize) {
        if self.clients[whose].state != State::Away || self.daemon.is_some() {
            self.clients[whose].act(&mut self.rng, self.plant, &mut self.counts);
        }
    }

    /// A client's process dies: what it has mapped is unmapped, and the daemon hears of it, or the next one does.
    fn die(&mut self, whose: usize) {
        self.counts.deaths += 1;
        let was = std::mem::replace(&mut self.clients[whose], Client::new(self.uuid));
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
                while !self.clients[whose].is_quiet() || self.clients[whose].is_cut {
                    self.deliver_down(whose);
                    self.deliver_up(whose);
                }
                self.clients[whose].give_up_publishing();
                // Those that were away come back.
                if matches!(self.clients[whose].state, State::Away) {
                    self.act(whose);
                }
                // What was lost with a daemon is asked for again.
                if self.clients[whose].state == State::Asks && self.clients[whose].is_quiet() {
                    let is_open =
                        self.daemon.as_ref().unwrap().outbox.lock().unwrap().iter().any(|(of, _)| *of == whose);
                    if !is_open {
                        self.clients[whose].note_gone();
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
        let steward = &self.daemon.as_ref().unwrap().steward;
        let mut leased = Bytes::ZERO;
        let mut holds: BTreeMap<RangeId, BTreeSet<SessionId>> = BTreeMap::new();
        for (whose, client) in self.clients.iter().enumerate() {
            let Some((session, _)) = client.me else { continue };
            if client.state != State::Attached {
                continue;
            }
            let mut ranges = client.known_ranges();
            self.audit_ranges(whose, steward, session, &ranges);
            ranges.dedup();
            for (range, _) in &ranges {
                holds.entry(*range).or_default().insert(session);
            }
            let held = client.held_bytes();
            let of_ranges: Bytes = ranges.iter().map(|(_, len)| *len).sum();
            let view = steward.session(session).unwrap();
            assert_eq!(view.held_bytes(), held + of_ranges, "client {whose} and the daemon say otherwise");
            leased += held;
            let guaranteed: Bytes = view.guarantees.iter().map(|(_, bytes)| *bytes).sum();
            assert!(
                client.guaranteed.is_none_or(|told| told == guaranteed),
                "client {whose} was told of {:?} that it is guaranteed, and is {guaranteed}",
                client.guaranteed
            );
        }
        for view in steward.ranges() {
            let known = holds.remove(&view.range).unwrap_or_default();
            assert_eq!(view.holders.into_iter().collect::<BTreeSet<_>>(), known, "who holds {}", view.range);
        }
        assert!(holds.is_empty(), "ranges that are held and are not there: {holds:?}");
        let others = steward.sessions();
        let others: Bytes = others.iter().flat_map(|view| view.held.iter().map(|(_, held)| *held)).sum();
        let shared: Bytes =
            steward.sessions().iter().flat_map(|view| view.shared.iter().map(|(_, shared)| *shared)).sum();
        assert_eq!(others - shared, leased, "somebody who is not there has something");
        let device = steward.device(DEVICE).unwrap();
        assert_eq!(device.bytes.leased, leased);
    }

    /// As often as it says, and no other.
    fn audit_ranges(&self, whose: usize, steward: &Steward, session: SessionId, told: &[(RangeId, Bytes)]) {
        let mut times: BTreeMap<RangeId, u32> = BTreeMap::new();
        told.iter().for_each(|(range, _)| *times.entry(*range).or_default() += 1);
        let known: BTreeMap<RangeId, u32> = steward.holds_of(session).into_iter().collect();
        assert_eq!(known, times, "the daemon and client {whose} of its ranges");
    }
}
