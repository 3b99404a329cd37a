//! The daemon's keeper: found or started, told what to hold, started again and told everything when it has gone.
//!
//! Not for: what a keeper is ([`crate::keeper`]), and what becomes of what it holds when a daemon follows another ([`super::takeover`]).
//!
//! Invariant: what [`Keeping`] was given to keep is held by a keeper or, while there is none, known here, and told to the next.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use super::this_file_again;
use crate::clock::{Clock as _, SystemClock};
use crate::error::chain;
use crate::ids::ChunkId;
use crate::keeper::manager::{self, Manager, Passed};
use crate::keeper::{KeeperError, Key, Link, SOCKET_NAME};
use crate::mortal::moment;
use crate::steward::Steward;
use crate::store::Keep;
use crate::wire::fd_channel::ChannelError;

/// After a keeper could not be started so long none is.
const PAUSE: Duration = Duration::from_secs(1);
/// A process that has closed its connection has ended then, or soon.
const ENDING: Duration = Duration::from_millis(20);
/// How often it is looked whether the next daemon would find the keeper.
const LOOK: Duration = Duration::from_secs(1);
/// One that reads nothing for so long is none: what was let go of stays held, and counts.
const BEHIND_MAX: Duration = Duration::from_secs(2);
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

    /// Everything that it holds, where it can be asked.
    fn list(&self) -> Result<Descriptors, KeeperError> {
        match self {
            Holder::Process(link) => link.list(),
            Holder::Manager(_) => Ok(Vec::new()),
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

    /// Whoever starts this process is not ours to end.
    fn kill(self) {
        if let Holder::Process(link) = self {
            link.kill();
        }
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
    since: SystemClock,
}

#[derive(Debug, Default)]
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
    /// Which file the socket is by which it is found.
    socket: Option<u64>,
    /// When that was looked at last.
    looked: Duration,
    /// This daemon keeps nothing any more: another may by now.
    is_over: bool,
}

/// The keeper that is there, with what it holds. One that ends while it is asked is none a moment later.
fn find(state_dir: &Path) -> Result<Option<(Link, Descriptors)>, KeeperError> {
    const TIMES: u32 = 5;
    let mut left = TIMES;
    loop {
        let found = Link::connect(state_dir, FIRST_PATIENCE).and_then(|link| {
            let with = |link: Link| link.list().map(|held| (link, held));
            link.map(with).transpose()
        });
        left -= 1;
        match found {
            Err(KeeperError::Channel(ChannelError::Closed)) if left > 0 => std::thread::sleep(ENDING),
            found => return found,
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
            post: Mutex::default(),
            steward: OnceLock::new(),
            pid: AtomicU32::new(0),
            restarts: AtomicU64::new(0),
            since: SystemClock::new(),
        };
        let passed = keeping.manager.as_ref().map(manager::take);
        let (link, held) = match passed {
            Some(held) => (keeping.start(), held),
            None => match find(state_dir) {
                Ok(Some((link, held))) => (Ok(Holder::Process(link)), held),
                Ok(None) => (keeping.start(), Vec::new()),
                // It holds nothing of ours.
                Err(error @ KeeperError::NoKeeper(_)) => {
                    tracing::error!(error = %chain(&error), "a keeper of this daemon's takes its place");
                    (keeping.start(), Vec::new())
                }
                Err(error) => return Err(error),
            },
        };
        match link {
            Ok(link) => {
                tracing::info!(
                    pid = link.pid(),
                    descriptors = held.len(),
                    "a keeper holds what is to outlive this process"
                );
                keeping.take(&mut keeping.post(), link);
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

    fn take(&self, post: &mut Post, link: Holder) {
        self.pid.store(link.pid(), Ordering::Relaxed);
        (post.link, post.failed, post.behind) = (Some(link), None, None);
        (post.linked, post.socket) = (Some(SystemClock::new()), self.socket());
    }

    /// Which file the keeper's socket is.
    fn socket(&self) -> Option<u64> {
        let path = self.state_dir.join(SOCKET_NAME);
        std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
    }

    /// The next daemon would not find this keeper: its socket is gone, or another's is there. The one that it would find is filled, and then this one is let go.
    fn is_hidden(&self, post: &mut Post) -> bool {
        let now = self.since.now();
        if self.manager.is_some() || now.saturating_sub(post.looked) < LOOK {
            return false;
        }
        post.looked = now;
        post.link.is_some() && self.socket() != post.socket
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
        link.kill();
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
            let is_early = post.failed.as_ref().is_some_and(|since| since.now() < PAUSE);
            let is_hidden = self.is_hidden(&mut post);
            if post.is_over || is_early || post.link.is_some() && !is_hidden {
                return;
            }
            if is_hidden {
                tracing::warn!(
                    pid = self.pid().unwrap_or(0),
                    "the keeper's socket is gone, or another keeper's: the one that the next daemon finds is told everything"
                );
            }
        }
        // Without the lock: whoever creates chunks meanwhile does not wait for it. One that is there by itself comes first.
        let found = match self.manager {
            Some(_) => None,
            None => Link::connect(&self.state_dir, BEHIND_MAX).ok().flatten(),
        };
        let is_new = found.is_none();
        let link = found.map_or_else(|| self.start(), |link| Ok(Holder::Process(link)));
        moment();
        let mut post = self.post();
        if post.is_over {
            // Nobody is to be started for a daemon that has ended, and one that is there may be its follower's.
            if let (Ok(link), true) = (link, is_new) {
                link.kill();
            }
            return;
        }
        let filled = link.and_then(|link| {
            // Chunks that come from here on are told to it after the lock; those before are in the store.
            let chunks = self.chunks();
            let others = post.others.iter().map(|(key, fd)| (*key, fd.as_fd()));
            let all: Vec<(Key, BorrowedFd<'_>)> =
                others.chain(chunks.iter().map(|(chunk, fd)| (Key::Chunk(*chunk), fd.as_fd()))).collect();
            let filled = link.list().and_then(|held| {
                // What one that was there before holds, and should not any more.
                let wanted: BTreeSet<Key> = all.iter().map(|(key, _)| *key).collect();
                let held = held.into_iter().map(|(key, _)| key);
                let useless: Vec<Key> = held.filter(|key| !wanted.contains(key)).collect();
                link.let_go(&useless)?;
                link.keep(&all)
            });
            match filled {
                Ok(()) => Ok((link, all.len())),
                Err(error) => {
                    link.kill();
                    Err(error)
                }
            }
        });
        match filled {
            Ok((link, count)) => {
                self.restarts.fetch_add(1, Ordering::Relaxed);
                tracing::info!(
                    pid = link.pid(),
                    descriptors = count,
                    "another keeper holds what is to outlive this process"
                );
                self.take(&mut post, link);
            }
            // The one that nobody finds is better than none.
            Err(error) if post.link.is_some() => {
                tracing::error!(error = %chain(&error), "the keeper that the next daemon would find cannot be used; it is tried again");
            }
            Err(error) => self.note_failed(&mut post, &error),
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
        self.tell(&mut self.post(), |link| link.keep(&fds));
    }

    fn let_go(&self, chunks: &[ChunkId]) {
        let keys: Vec<Key> = chunks.iter().map(|chunk| Key::Chunk(*chunk)).collect();
        // One that does not answer is ended, and holds nothing then either.
        self.tell(&mut self.post(), |link| link.let_go(&keys));
    }
}
