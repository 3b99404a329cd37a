//! The daemon's keeper: found or started, told what to hold, started again and told everything when it has gone.
//!
//! Not for: what a keeper is ([`crate::keeper`]), and what becomes of what it holds when a daemon follows another ([`super::takeover`]).
//!
//! Invariant: what [`Keeping`] was given to keep is held by a keeper or, while there is none, known here, and told to the next. What a keeper may hold that was to let go of it is not called free
//! ([`Keep::holds`]): one that has been replaced is told to end, and believed to have when it says so or is gone ([`Stray`]).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use super::this_file_again;
use crate::clock::{Clock as _, SystemClock};
use crate::error::chain;
use crate::ids::ChunkId;
use crate::keeper::link::is_readable;
use crate::keeper::manager::{self, Manager, Passed};
use crate::keeper::process::{find, inode_of};
use crate::keeper::{CANDIDATE_PREFIX, KeeperError, Key, Link, SOCKET_NAME};
use crate::mortal::moment;
use crate::steward::Steward;
use crate::store::Keep;
use crate::wire::peer::Peer;

/// After a keeper could not be started so long none is.
const PAUSE: Duration = Duration::from_secs(1);
/// How often it is looked whether the next daemon would find the keeper.
const LOOK: Duration = Duration::from_secs(1);
/// One that reads nothing for so long is none: what was let go of stays held, and counts.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// One that could not be used is not tried for so long.
const USELESS_FOR: Duration = Duration::from_secs(10);
/// So many of those are remembered.
const USELESS_MAX: usize = 64;
/// How long the one that is there may take for its first answer: what only it holds is worth that.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// What is held, as it is given out.
pub(super) type Descriptors = Vec<(Key, OwnedFd)>;

/// Who holds it.
#[derive(Debug)]
enum Holder {
    /// A process of ours.
    Process(Link),
    /// Who has started this one.
    Manager(Manager),
}

impl Holder {
    fn keep(&self, fds: &[(Key, BorrowedFd<'_>)]) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.keep(fds),
            Holder::Manager(manager) => manager.keep(fds),
        }
    }

    fn let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.let_go(keys),
            Holder::Manager(manager) => manager.let_go(keys),
        }
    }

    /// The names of everything that it holds, where it can be asked.
    fn names(&self) -> Result<Vec<Key>, KeeperError> {
        match self {
            Holder::Process(link) => link.names(),
            Holder::Manager(_) => Ok(Vec::new()),
        }
    }

    /// Where it listens as long as it is not the one that is found.
    fn name(&self) -> Option<String> {
        match self {
            Holder::Process(link) => Some(link.name().to_owned()),
            Holder::Manager(_) => None,
        }
    }

    /// Returns when it holds what it was told to.
    fn settle(&self) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.settle(),
            Holder::Manager(_) => Ok(()),
        }
    }

    fn pid(&self) -> u32 {
        match self {
            Holder::Process(link) => link.pid(),
            Holder::Manager(_) => MANAGER,
        }
    }

    fn is_gone(&self) -> bool {
        matches!(self, Holder::Process(link) if link.is_gone())
    }

    fn is_behind(&self) -> bool {
        matches!(self, Holder::Process(link) if link.is_behind())
    }

    fn last_words(&self) -> Option<String> {
        match self {
            Holder::Process(link) => link.last_words(),
            Holder::Manager(_) => None,
        }
    }

    /// Whoever starts this process is not ours to end; nor is a process that this one may not end, which is returned.
    fn kill(self) -> Option<Box<Link>> {
        match self {
            Holder::Process(link) => link.kill().err(),
            Holder::Manager(_) => None,
        }
    }
}

/// A keeper that is none any more, and goes on with what it holds.
#[derive(Debug)]
struct Stray {
    link: Box<Link>,
    process: Peer,
    /// Chunks up to this one may be among it.
    last: ChunkId,
    /// It was told to let go of everything.
    was_told: bool,
}

impl Stray {
    fn new(link: Box<Link>, last: ChunkId) -> Stray {
        let process = link.process();
        Stray { link, process, last, was_told: false }
    }

    /// It holds nothing any more. Waits for nothing.
    fn is_over(&mut self, keeper: Option<&Peer>) -> bool {
        if self.process.pidfd.as_ref().is_some_and(|pidfd| is_readable(pidfd, Duration::ZERO)) {
            return true;
        }
        // It reads again.
        if !self.was_told && !self.link.is_behind() {
            self.was_told = self.link.say_end().is_ok();
        }
        let (has_ended, has_hung_up) = self.link.hear_end();
        // Where processes cannot be told apart there is nothing more to hear.
        let is_nobody = self.process.pidfd.is_none();
        // It was asked again for what it holds, and what it should not was let go of.
        let is_keeper = keeper.is_some_and(|keeper| keeper.identity == self.process.identity);
        has_ended || has_hung_up && (is_nobody || is_keeper)
    }
}

/// The number that a service manager's process has, or may as well.
const MANAGER: u32 = 1;

/// Who holds what is to outlive this process.
#[derive(Debug)]
pub(super) struct Keeping {
    state_dir: PathBuf,
    /// What the service manager says, where it is to hold.
    manager: Option<Passed>,
    /// How long a keeper that this daemon starts stays when nobody is left.
    linger: Duration,
    post: Mutex<Post>,
    /// Whose chunks are told to a new keeper.
    steward: OnceLock<Weak<Steward>>,
    /// The keeper's process; 0 where there is none.
    pid: AtomicU32,
    /// How often one was started in the place of one that had gone.
    restarts: AtomicU64,
    /// Another than the keeper may hold something.
    has_strays: AtomicBool,
    since: SystemClock,
}

#[derive(Debug)]
struct Post {
    link: Option<Holder>,
    /// What is held beside chunks.
    others: BTreeMap<Key, Arc<OwnedFd>>,
    /// A clock that began when the last could not be started.
    failed: Option<SystemClock>,
    /// A clock that began when it was first seen not to read.
    behind: Option<SystemClock>,
    /// A clock that began with the link.
    linked: Option<SystemClock>,
    /// Those that were before it, as long as they may hold anything.
    strays: Vec<Stray>,
    /// The last chunk that any of them was given.
    last: ChunkId,
    /// Which file the socket is by which it is found.
    socket: Option<u64>,
    /// Names of those that cannot be used, with a clock that began when that was seen.
    useless: BTreeMap<String, SystemClock>,
    /// When that was looked at last.
    looked: Duration,
    /// This daemon keeps nothing any more: another may by now.
    is_over: bool,
}

/// The last chunk among these.
fn last_of(keys: impl Iterator<Item = Key>) -> ChunkId {
    let chunk = |key| if let Key::Chunk(chunk) = key { Some(chunk) } else { None };
    keys.filter_map(chunk).max().unwrap_or(ChunkId(0))
}

impl Post {
    fn note_useless(&mut self, name: String, error: &KeeperError) {
        if self.useless.insert(name.clone(), SystemClock::new()).is_none() {
            tracing::error!(name, error = %chain(error), "a keeper cannot be used; it is tried again from time to time");
        }
        // Names are chosen anew each time that one is started.
        while self.useless.len() > USELESS_MAX {
            self.useless.pop_first();
        }
    }
}

impl Keeping {
    /// The keeper of a runtime directory, with what it holds: one that is there, else a new one. Where there is neither the daemon serves without, and tries again.
    ///
    /// # Errors
    ///
    /// One is there, and cannot be asked for what it holds: that is worth more than a start.
    pub(super) fn begin(
        state_dir: &Path,
        linger: Duration,
        manager: Option<Passed>,
    ) -> Result<(Arc<Keeping>, Descriptors), KeeperError> {
        let keeping = Keeping {
            state_dir: state_dir.to_owned(),
            manager,
            linger,
            post: Mutex::new(Post {
                link: None,
                others: BTreeMap::new(),
                failed: None,
                behind: None,
                linked: None,
                strays: Vec::new(),
                last: ChunkId(0),
                socket: None,
                useless: BTreeMap::new(),
                looked: Duration::ZERO,
                is_over: false,
            }),
            steward: OnceLock::new(),
            pid: AtomicU32::new(0),
            restarts: AtomicU64::new(0),
            has_strays: AtomicBool::new(false),
            since: SystemClock::new(),
        };
        let passed = keeping.manager.as_ref().map(manager::take);
        let socket = keeping.socket();
        // One that is found at once: there is nothing to tell it yet.
        let begin = || {
            let link = keeping.start()?;
            let socket = link.name().map_or(Ok(None), |name| keeping.publish(&name))?;
            Ok((link, socket))
        };
        let (link, held) = match passed {
            Some(held) => (begin(), held),
            None => match find(state_dir, FIRST_PATIENCE)? {
                Some((link, held)) => (Ok((Holder::Process(link), socket)), held),
                None => (begin(), Vec::new()),
            },
        };
        keeping.post().last = last_of(held.iter().map(|(key, _)| *key));
        match link {
            Ok((link, socket)) => {
                tracing::info!(
                    pid = link.pid(),
                    descriptors = held.len(),
                    "a keeper holds what is to outlive this process"
                );
                keeping.take(&mut keeping.post(), link, socket);
            }
            Err(error) => keeping.note_failed(&mut keeping.post(), &error),
        }
        Ok((Arc::new(keeping), held))
    }

    /// Whose chunks are kept.
    pub(super) fn set_steward(&self, steward: &Arc<Steward>) {
        // Nobody else sets it.
        let _ = self.steward.set(Arc::downgrade(steward));
    }

    /// Every chunk that is to be held.
    fn chunks(&self) -> Vec<(ChunkId, Arc<OwnedFd>)> {
        self.steward.get().and_then(Weak::upgrade).map_or_else(Vec::new, |steward| steward.store().exported())
    }

    fn post(&self) -> MutexGuard<'_, Post> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<Holder, KeeperError> {
        if let Some(passed) = &self.manager {
            return Manager::connect(passed).map(Holder::Manager);
        }
        let mut program = this_file_again();
        program.arg("keep").arg("--state-dir").arg(&self.state_dir).arg("--until-alone-for");
        program.arg(format!("{}ms", self.linger.as_millis())).arg("--connected");
        // A signal that a terminal sends to the daemon is not for it.
        program.process_group(0);
        Link::start(program, &self.state_dir).map(Holder::Process)
    }

    /// This one is the keeper from here on.
    fn take(&self, post: &mut Post, link: Holder, socket: Option<u64>) {
        self.pid.store(link.pid(), Ordering::Relaxed);
        (post.failed, post.behind) = (None, None);
        (post.linked, post.socket) = (Some(SystemClock::new()), socket);
        if let Some(Holder::Process(before)) = post.link.replace(link) {
            // Whoever has started it may wait for its end, and does not find it killed.
            let before = if before.is_child() { before.kill().err() } else { Some(Box::new(before)) };
            before.into_iter().for_each(|before| self.note_stray(post, before));
        }
    }

    /// The next daemon finds this keeper from here on: it has everything. Says which file its socket is.
    fn publish(&self, name: &str) -> Result<Option<u64>, KeeperError> {
        let (own, socket) = (self.state_dir.join(name), self.state_dir.join(SOCKET_NAME));
        let file = inode_of(&own);
        std::fs::rename(own, socket)
            .map_err(|source| KeeperError::System { action: "have the keeper found", source })?;
        moment();
        Ok(file)
    }

    /// A keeper that waits for somebody to tell it everything, if there is one; with where it listens. Those that have gone leave a file behind.
    fn candidate(&self) -> Option<(String, Link)> {
        let entries = std::fs::read_dir(&self.state_dir).ok()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_wanted = |name: &String| {
            let is_early = || self.post().useless.get(name).is_some_and(|since| since.now() < USELESS_FOR);
            name.starts_with(CANDIDATE_PREFIX) && !is_early()
        };
        for name in names.filter(is_wanted) {
            let path = self.state_dir.join(&name);
            match Link::connect_at(&path, BEHIND_MAX) {
                Ok(Some(link)) => return Some((name, link)),
                Ok(None) => drop(std::fs::remove_file(path)),
                Err(error) => self.post().note_useless(name, &error),
            }
        }
        None
    }

    fn note_stray(&self, post: &mut Post, link: Box<Link>) {
        let stray = Stray::new(link, post.last);
        // It has been asked anew since, and did first what it was told before.
        post.strays
            .retain(|before| before.process.pidfd.is_none() || before.process.identity != stray.process.identity);
        post.strays.push(stray);
        self.has_strays.store(true, Ordering::Release);
    }

    /// Hears of those before.
    fn hear_strays(&self, post: &mut Post) {
        if post.strays.is_empty() {
            return;
        }
        let keeper = if let Some(Holder::Process(link)) = &post.link { Some(link.process()) } else { None };
        let over = post.strays.extract_if(.., |stray| stray.is_over(keeper.as_ref()));
        for stray in over {
            tracing::info!(pid = stray.link.pid(), "a keeper of before holds nothing any more");
        }
        self.has_strays.store(!post.strays.is_empty(), Ordering::Release);
    }

    /// Which file the keeper's socket is.
    fn socket(&self) -> Option<u64> {
        inode_of(&self.state_dir.join(SOCKET_NAME))
    }

    /// The next daemon may not find this keeper, as its socket is gone, or another's is there; or another has come.
    fn is_time_to_look(&self, post: &mut Post) -> bool {
        let now = self.since.now();
        let is_time = self.manager.is_none() && now.saturating_sub(post.looked) >= LOOK;
        if is_time {
            post.looked = now;
        }
        is_time
    }

    fn note_failed(&self, post: &mut Post, error: &KeeperError) {
        if post.failed.is_none() {
            tracing::error!(error = %chain(error), "there is no keeper: where this daemon is killed, what it holds is lost; it is tried again");
        }
        post.failed = Some(SystemClock::new());
        self.pid.store(0, Ordering::Relaxed);
    }

    /// Something went wrong with the keeper: it is ended, and [`Keeping::mend`] starts another.
    fn drop_link(&self, post: &mut Post, error: Option<&KeeperError>) {
        let Some(link) = post.link.take() else { return };
        self.pid.store(0, Ordering::Relaxed);
        post.behind = None;
        // One that ends as soon as it has begun is not begun again at once.
        if post.linked.take().is_some_and(|since| since.now() < PAUSE) {
            post.failed = Some(SystemClock::new());
        }
        let what = if link.is_behind() { "it does not read what it is sent" } else { "it has ended" };
        let why = link.last_words().or_else(|| error.map(|error| chain(error)));
        tracing::error!(
            pid = link.pid(),
            why = why.as_deref().unwrap_or(what),
            "the keeper is gone: another takes its place"
        );
        if let Some(link) = link.kill() {
            tracing::error!(
                pid = link.pid(),
                "that keeper cannot be ended from here (it may be in another pid namespace): what it should let go of is not free until it does or ends"
            );
            self.note_stray(post, link);
        }
    }

    /// Keeps something beside chunks.
    pub(super) fn keep_other(&self, key: Key, fd: Arc<OwnedFd>) {
        let mut post = self.post();
        post.others.insert(key, Arc::clone(&fd));
        self.tell(&mut post, |link| link.keep(&[(key, fd.as_fd())]));
    }

    /// Keeps these no more, whatever they are.
    pub(super) fn let_go_of(&self, keys: &[Key]) {
        let mut post = self.post();
        keys.iter().for_each(|key| drop(post.others.remove(key)));
        if !keys.is_empty() {
            self.tell(&mut post, |link| link.let_go(keys));
        }
    }

    fn tell(&self, post: &mut Post, what: impl FnOnce(&Holder) -> Result<(), KeeperError>) {
        let told = post.link.as_ref().map_or(Ok(()), what);
        if let Err(error) = told {
            self.drop_link(post, Some(&error));
        }
    }

    /// Looks whether there is a keeper, and where there is none starts one that holds all that there is to hold. Takes as long as a process takes to start.
    pub(super) fn mend(&self) {
        {
            let mut post = self.post();
            if post.link.as_ref().is_some_and(Holder::is_gone) {
                self.drop_link(&mut post, None);
            }
            match (post.link.as_ref().is_some_and(Holder::is_behind), &post.behind) {
                (false, _) => post.behind = None,
                (true, None) => post.behind = Some(SystemClock::new()),
                (true, Some(since)) if since.now() >= BEHIND_MAX => self.drop_link(&mut post, None),
                (true, Some(_)) => {}
            }
            self.hear_strays(&mut post);
            let is_early = post.failed.as_ref().is_some_and(|since| since.now() < PAUSE);
            if post.is_over || is_early || post.link.is_some() && !self.is_time_to_look(&mut post) {
                return;
            }
        }
        // Without the lock: whoever creates chunks meanwhile does not wait for it.
        let candidate = if self.manager.is_none() { self.candidate() } else { None };
        let socket = self.socket();
        {
            let post = self.post();
            let is_hidden = self.manager.is_none() && socket != post.socket;
            match (&candidate, post.link.is_some(), is_hidden) {
                (None, true, false) => return,
                (None, true, true) => tracing::warn!(
                    pid = self.pid().unwrap_or(0),
                    "the keeper's socket is gone, or another keeper's: the one that the next daemon finds is told everything"
                ),
                (Some(_), true, _) => tracing::info!("a keeper has come to take the place of the one that is there"),
                (_, false, _) => {}
            }
        }
        // One that is there by itself comes first; else one that is found already, else one of the daemon's own.
        let found = match (candidate, &self.manager) {
            (Some((name, link)), _) => Some((link, Some(name))),
            (None, Some(_)) => None,
            (None, None) => Link::connect(&self.state_dir, BEHIND_MAX).ok().flatten().map(|link| (link, None)),
        };
        if let Some((link, name)) = found {
            let mut post = self.post();
            if post.is_over {
                // It may be its follower's.
                return;
            }
            match self.fill(&mut post, Holder::Process(link), name.as_deref(), socket) {
                Ok(()) => return,
                Err((link, error)) => self.give_up(&mut post, link, name, &error),
            }
            // The one that nobody finds is better than none.
            if post.link.is_some() {
                return;
            }
        }
        let started = self.start();
        moment();
        let mut post = self.post();
        match started {
            // Nobody is to be started for a daemon that has ended; it is a child, and can be.
            Ok(link) if post.is_over => drop(link.kill()),
            Ok(link) => {
                let name = link.name();
                if let Err((link, error)) = self.fill(&mut post, link, name.as_deref(), socket) {
                    drop(link.kill());
                    self.note_failed(&mut post, &error);
                }
            }
            Err(error) => self.note_failed(&mut post, &error),
        }
    }

    /// Has a keeper hold all that there is to hold, and nothing else; then it is the one that is found, where it was not (its name), and the keeper of this daemon.
    fn fill(
        &self,
        post: &mut Post,
        link: Holder,
        name: Option<&str>,
        socket: Option<u64>,
    ) -> Result<(), (Holder, KeeperError)> {
        // Chunks that come from here on are told to it after the lock; those before are in the store.
        let chunks = self.chunks();
        post.last = post.last.max(last_of(chunks.iter().map(|(chunk, _)| Key::Chunk(*chunk))));
        let others = post.others.iter().map(|(key, fd)| (*key, fd.as_fd()));
        let all: Vec<(Key, BorrowedFd<'_>)> =
            others.chain(chunks.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd()))).collect();
        let filled = link.names().and_then(|held| {
            // What one that was there before holds, and should not any more.
            let wanted: BTreeSet<Key> = all.iter().map(|(key, _)| *key).collect();
            let useless: Vec<Key> = held.into_iter().filter(|key| !wanted.contains(key)).collect();
            link.let_go(&useless)?;
            link.keep(&all)?;
            // What was sent is not held before it was read: the one before is let go next.
            link.settle()?;
            moment();
            let socket = name.map_or(Ok(socket), |name| self.publish(name))?;
            // One that has died in between is not worth the one that is there.
            link.settle()?;
            Ok(socket)
        });
        let socket = match filled {
            Ok(socket) => socket,
            Err(error) => return Err((link, error)),
        };
        self.restarts.fetch_add(1, Ordering::Relaxed);
        tracing::info!(
            pid = link.pid(),
            descriptors = all.len(),
            "another keeper holds what is to outlive this process"
        );
        self.take(post, link, socket);
        self.hear_strays(post);
        Ok(())
    }

    /// A keeper that was there by itself cannot be used. It is not ended, as whoever has started it would start it again; it is to hold nothing.
    fn give_up(&self, post: &mut Post, link: Holder, name: Option<String>, error: &KeeperError) {
        let path = self.state_dir.join(name.as_deref().unwrap_or(SOCKET_NAME));
        post.note_useless(name.unwrap_or_else(|| SOCKET_NAME.to_owned()), error);
        let Holder::Process(link) = link else { return };
        // It has hung up, perhaps, and hears who asks anew.
        let ended = match Link::connect_at(&path, BEHIND_MAX) {
            Ok(Some(again)) => again.end().is_ok(),
            _ => false,
        };
        if !ended {
            self.note_stray(post, Box::new(link));
        }
    }

    /// Nobody is to follow: the keeper ends, with all that it holds.
    pub(super) fn end(&self) {
        let mut post = self.post();
        post.is_over = true;
        let Some(link) = post.link.take() else { return };
        let ended = match link {
            Holder::Process(link) => link.end(),
            Holder::Manager(manager) => {
                let chunks = self.chunks().into_iter().map(|(chunk, _)| Key::Chunk(chunk));
                manager.let_go(&post.others.keys().copied().chain(chunks).collect::<Vec<_>>())
            }
        };
        if let Err(error) = ended {
            tracing::warn!(error = %chain(&error), "the keeper may hold for a while what nobody needs any more");
        }
    }

    /// A daemon follows, or may: the keeper holds on. Nothing is said to it from here on.
    pub(super) fn leave(&self) {
        let mut post = self.post();
        post.is_over = true;
        drop(post.link.take());
    }

    /// The keeper's process, where there is one.
    pub(super) fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// How often one was started in the place of another.
    pub(super) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

impl Keep for Keeping {
    fn keep(&self, chunks: &[(ChunkId, Arc<OwnedFd>)]) {
        let fds: Vec<(Key, BorrowedFd<'_>)> =
            chunks.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd())).collect();
        let mut post = self.post();
        post.last = post.last.max(last_of(fds.iter().map(|(key, _)| *key)));
        self.tell(&mut post, |link| link.keep(&fds));
    }

    fn let_go(&self, chunks: &[ChunkId]) {
        let keys: Vec<Key> = chunks.iter().map(|chunk| Key::Chunk(*chunk)).collect();
        // One that does not answer is ended, and holds nothing then either; if it can be ended.
        self.tell(&mut self.post(), |link| link.let_go(&keys));
    }

    fn holds(&self, chunks: &[ChunkId]) -> BTreeSet<ChunkId> {
        if !self.has_strays.load(Ordering::Acquire) {
            return BTreeSet::new();
        }
        let post = self.post();
        // Numbers grow: whatever was created since is not its.
        let is_held = |chunk: &&ChunkId| post.strays.iter().any(|stray| **chunk <= stray.last);
        chunks.iter().filter(is_held).copied().collect()
    }
}
