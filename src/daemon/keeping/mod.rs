//! The daemon's keeper: found or started, told what to hold, started again and told everything when it has gone.
//!
//! | file | what |
//! |---|---|
//! | [`holder`] | a process, or the service manager |
//! | [`strays`] | keepers of before, as long as they may hold anything |
//!
//! Not for: what a keeper is ([`crate::keeper`]), and what becomes of what it holds when a daemon follows another ([`super::takeover`]).
//!
//! Invariant: what [`Keeping`] was given to keep is held by a keeper or, while there is none, known here, and told to the next. What a keeper may hold that was to let go of it is not called free
//! ([`Keep::holds`]): one that has been replaced is told to end, or killed, and believed to have when it says so or is gone ([`Strays`]); never before another has everything.

mod holder;
mod strays;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

use self::holder::Holder;
use self::strays::{End, Strays};
use super::this_file_again;
use crate::clock::{Clock as _, SystemClock};
use crate::error::chain;
use crate::ids::ChunkId;
use crate::keeper::manager::{self, Manager, Passed};
use crate::keeper::process::{find, inode_of};
use crate::keeper::{CANDIDATE_PREFIX, JOURNAL_NAME, KeeperError, Key, Link, RESERVE_PREFIX, SOCKET_NAME, is_own_name};
use crate::mortal::moment;
use crate::steward::Steward;
use crate::store::Keep;
use crate::wire::fd_channel::ChannelError;
use crate::wire::peer::is_bound;

/// After a keeper could not be started so long none is.
const PAUSE: Duration = Duration::from_secs(1);
/// How often it is looked whether the next daemon would find the keeper.
const LOOK: Duration = Duration::from_secs(1);
/// One that reads nothing for so long is none: what was let go of stays held, and counts.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// One that waits to be told everything has nothing else to do: one that does not answer at once holds up the others, and the daemon's own.
const FOR_A_WORD: Duration = Duration::from_millis(300);
/// One that could not be used is not tried for so long.
const USELESS_FOR: Duration = Duration::from_secs(10);
/// So many of those are remembered.
const USELESS_MAX: usize = 64;
/// One whose socket is gone finds that out within a second.
const HIDDEN_MAX: Duration = Duration::from_millis(1_500);
/// How long the one that is there may take for its first answer: what only it holds is worth that.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// What is held, as it is given out.
pub(super) type Descriptors = Vec<(Key, OwnedFd)>;

/// Who holds what is to outlive this process.
#[derive(Debug)]
pub(super) struct Keeping {
    state_dir: PathBuf,
    /// What the service manager says, where it is to hold.
    manager: Option<Passed>,
    /// How long a keeper that this daemon starts stays when nobody is left.
    linger: Duration,
    post: Mutex<Post>,
    /// Somebody looks for another keeper: what is said to it then is said before this daemon is over.
    mending: Mutex<()>,
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
    /// What the service manager was to let go of, and has not heard.
    owed: BTreeSet<Key>,
    /// A clock that began when the last could not be started.
    failed: Option<SystemClock>,
    /// A clock that began when it was first seen not to read.
    behind: Option<SystemClock>,
    /// A clock that began with the link.
    linked: Option<SystemClock>,
    strays: Strays,
    /// The last chunk that any of them was given.
    last: ChunkId,
    /// Which file the socket is by which it is found.
    socket: Option<u64>,
    /// That it is not found was said.
    is_said_hidden: bool,
    /// It may have fewer open files than this process: another is to take its place.
    is_small: bool,
    /// Names and files of those that cannot be used, with a clock that began when that was seen.
    useless: BTreeMap<Place, SystemClock>,
    /// When that was looked at last.
    looked: Duration,
    /// This daemon keeps nothing any more: another may by now.
    is_over: bool,
}

/// Where a keeper listens, and which file that is: names are chosen anew each time that one is started, but for the one that is found.
type Place = (String, Option<u64>);

/// The last chunk among these.
fn last_of(keys: impl Iterator<Item = Key>) -> ChunkId {
    let chunk = |key| if let Key::Chunk(chunk) = key { Some(chunk) } else { None };
    keys.filter_map(chunk).max().unwrap_or(ChunkId(0))
}

/// A keeper that could not be told everything.
#[derive(Debug)]
struct Unfilled {
    link: Holder,
    error: KeeperError,
    /// The next daemon would find it all the same.
    is_found: bool,
}

/// One that could not hold everything is asked for nothing.
fn checked(link: Option<Link>) -> Result<Option<Link>, KeeperError> {
    link.map(|link| link.check_files().and_then(|()| link.with_usual_patience())).transpose()
}

impl Post {
    fn note_useless(&mut self, place: Place, error: &KeeperError) {
        let name = place.0.clone();
        if self.useless.insert(place, SystemClock::new()).is_none() {
            tracing::error!(name, error = %chain(error), "a keeper cannot be used; it is tried again from time to time");
        }
        while self.useless.len() > USELESS_MAX {
            self.useless.pop_first();
        }
    }

    fn is_useless(&self, place: &Place) -> bool {
        self.useless.get(place).is_some_and(|since| since.now() < USELESS_FOR)
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
                owed: BTreeSet::new(),
                failed: None,
                behind: None,
                linked: None,
                strays: Strays::default(),
                last: ChunkId(0),
                socket: None,
                is_said_hidden: false,
                is_small: false,
                useless: BTreeMap::new(),
                looked: Duration::ZERO,
                is_over: false,
            }),
            mending: Mutex::new(()),
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
            let socket = link.name().map_or(Ok(None), |name| keeping.publish(&name));
            let socket = match socket {
                Ok(socket) => socket,
                Err(error) => {
                    link.discard();
                    return Err(error);
                }
            };
            Ok((link, socket))
        };
        let (link, held) = match passed {
            Some(held) => {
                let begun = begin();
                if let Ok((Holder::Manager(manager), _)) = &begun {
                    manager.has_held(held.iter().map(|(key, _)| *key));
                }
                (begun, held)
            }
            None => {
                let found = find(state_dir, FIRST_PATIENCE)?;
                // One that was told nothing yet may stand where the other was found.
                let has_anything = found.as_ref().is_some_and(|(_, held)| !held.is_empty());
                let hidden = if has_anything { None } else { keeping.hidden()? };
                match (hidden, found) {
                    (Some((name, link, held)), _) => {
                        let found = keeping.publish(&name).and_then(|socket| Ok((link.with_usual_patience()?, socket)));
                        (found.map(|(link, socket)| (Holder::Process(link), socket)), held)
                    }
                    (None, Some((link, held))) => {
                        (link.with_usual_patience().map(|link| (Holder::Process(link), socket)), held)
                    }
                    (None, None) => (begin(), Vec::new()),
                }
            }
        };
        keeping.post().last = last_of(held.iter().map(|(key, _)| *key));
        match link {
            Ok((link, socket)) => {
                tracing::info!(
                    pid = link.pid(),
                    descriptors = held.len(),
                    "a keeper holds what is to outlive this process"
                );
                let mut post = keeping.post();
                let enough = link.check_files();
                keeping.take(&mut post, link, socket);
                if let Err(error) = enough {
                    tracing::warn!(error = %chain(&error), "the keeper that is there may come to hold less than it is told to: another takes its place");
                    post.is_small = true;
                }
            }
            Err(error) => keeping.note_failed(&mut keeping.post(), &error),
        }
        Ok((Arc::new(keeping), held))
    }

    /// One that has everything, and has lost its socket: it listens anew within a second. Looked for where a journal says that there was one.
    fn hidden(&self) -> Result<Option<(String, Link, Descriptors)>, KeeperError> {
        const PAUSE: Duration = Duration::from_millis(50);
        if !self.state_dir.join(JOURNAL_NAME).exists() {
            return Ok(None);
        }
        let since = SystemClock::new();
        while since.now() < HIDDEN_MAX {
            for (name, _) in self.places() {
                // One that does not answer is no candidate either.
                let Ok(Some(link)) = Link::connect_at(&self.state_dir.join(&name), FOR_A_WORD) else { continue };
                if link.names().is_ok_and(|names| names.contains(&Key::Witness)) {
                    tracing::warn!(
                        pid = link.pid(),
                        "the keeper's socket was gone, and the keeper is found again with what it holds"
                    );
                    let held = link.list()?;
                    return Ok(Some((name, link, held)));
                }
            }
            std::thread::sleep(PAUSE);
        }
        Ok(None)
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

    fn mending(&self) -> MutexGuard<'_, ()> {
        self.mending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<Holder, KeeperError> {
        if let Some(passed) = &self.manager {
            let manager = Manager::connect(passed)?;
            // One that does not read is not waited for with everything else.
            manager.settle()?;
            return Ok(Holder::Manager(manager));
        }
        let mut program = this_file_again();
        program.arg("keep").arg("--state-dir").arg(&self.state_dir).arg("--until-alone-for");
        program.arg(format!("{}ms", self.linger.as_millis())).arg("--connected");
        Link::start(program, &self.state_dir).map(Holder::Process)
    }

    /// This one is the keeper from here on.
    fn take(&self, post: &mut Post, link: Holder, socket: Option<u64>) {
        self.pid.store(link.pid(), Ordering::Relaxed);
        (post.failed, post.behind) = (None, None);
        (post.linked, post.socket) = (Some(SystemClock::new()), socket);
        (post.is_said_hidden, post.is_small) = (false, false);
        if let Some(Holder::Process(before)) = post.link.replace(link) {
            let end = if before.is_child() { End::Killed } else { End::Told };
            let stays = before.stays();
            self.note_stray(post, before, end, true, stays);
        }
        // It may be the same that has hung up meanwhile, and listens anew.
        if let Some(Holder::Process(link)) = &post.link {
            post.strays.forget(link);
        }
        self.hear_strays(post);
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

    /// A keeper that waits for somebody to tell it everything, if there is one; with where it listens. Those that stand by are only asked where `is_any` will do. Those that have gone leave a file
    /// behind.
    fn candidate(&self, is_any: bool) -> Option<(Place, Link)> {
        for place in self.places() {
            let is_one = place.0.starts_with(CANDIDATE_PREFIX) || is_any && place.0.starts_with(RESERVE_PREFIX);
            if !is_one || self.post().is_useless(&place) {
                continue;
            }
            match Link::connect_at(&self.state_dir.join(&place.0), FOR_A_WORD).and_then(checked) {
                Ok(Some(link)) => return Some((place, link)),
                Ok(None) => {}
                Err(error) => {
                    let is_slow = matches!(error, KeeperError::Channel(ChannelError::TimedOut));
                    self.post().note_useless(place, &error);
                    if is_slow {
                        // One of these is waited for at a time: the daemon's own is not to come late for them. The next is asked at the next look.
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Where keepers listen beside the one that is found; who stands by comes last.
    fn places(&self) -> Vec<Place> {
        let Ok(entries) = std::fs::read_dir(&self.state_dir) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut places: Vec<Place> = names.filter(|name| is_own_name(name)).map(|name| self.place(name)).collect();
        // Nobody has one that is bound no more: whoever began it has gone.
        places.retain(|(name, _)| {
            let path = self.state_dir.join(name);
            let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.file_type().is_socket());
            let is_dead = is_socket && matches!(is_bound(&path), Ok(false));
            if is_dead {
                // It may be another's to clear away in this moment.
                let _ = std::fs::remove_file(path);
            }
            !is_dead
        });
        places.sort_unstable();
        places
    }

    /// Calls those that had hung up before they heard that they are to end, where they listen anew. Of another pid namespace none could be ended otherwise, and what it holds would never be free.
    fn call_strays(&self) {
        for place in self.places() {
            if self.post().is_useless(&place) {
                continue;
            }
            let called = Link::connect_at(&self.state_dir.join(&place.0), FOR_A_WORD);
            let mut post = self.post();
            match called {
                Ok(Some(link)) => post.strays.hear_again(link),
                Ok(None) => {}
                Err(error) => {
                    post.note_useless(place, &error);
                    // One is waited for at each look.
                    break;
                }
            }
            if !post.strays.any_out_of_hearing() {
                break;
            }
        }
        self.hear_strays(&mut self.post());
    }

    fn place(&self, name: String) -> Place {
        let file = inode_of(&self.state_dir.join(&name));
        (name, file)
    }

    /// The keeper that is found, where it is of use.
    fn found(&self) -> Option<(Place, Link)> {
        let place = self.place(SOCKET_NAME.to_owned());
        if self.manager.is_some() || self.post().is_useless(&place) {
            return None;
        }
        match Link::connect(&self.state_dir, BEHIND_MAX).and_then(checked) {
            Ok(link) => link.map(|link| (place, link)),
            Err(error) => {
                self.post().note_useless(place, &error);
                None
            }
        }
    }

    fn note_stray(&self, post: &mut Post, link: Link, end: End, is_needed: bool, stays: bool) {
        post.strays.note(link, post.last, end, is_needed, stays);
        self.note_whether_any(post);
    }

    /// Hears of those before, and ends them where another has everything.
    fn hear_strays(&self, post: &mut Post) {
        if !post.strays.is_empty() {
            let has_everything = self.is_found(post);
            post.strays.hear(has_everything);
            self.note_whether_any(post);
        }
    }

    /// Others than the keeper may hold something, or do not.
    fn note_whether_any(&self, post: &Post) {
        self.has_strays.store(!post.strays.is_empty() || !post.owed.is_empty(), Ordering::Release);
    }

    /// There is a keeper, and the next daemon finds it.
    fn is_found(&self, post: &Post) -> bool {
        let is_found = || post.socket.is_some() && self.socket() == post.socket;
        post.link.is_some() && (self.manager.is_some() || is_found())
    }

    /// Which file the keeper's socket is.
    fn socket(&self) -> Option<u64> {
        inode_of(&self.state_dir.join(SOCKET_NAME))
    }

    /// The next daemon may not find this keeper, as its socket is gone, or another's is there; or another has come.
    fn is_time_to_look(&self, post: &mut Post) -> bool {
        let is_time = self.is_look_due(post);
        if is_time {
            post.looked = self.since.now();
        }
        is_time
    }

    fn is_look_due(&self, post: &Post) -> bool {
        self.manager.is_none() && self.since.now().saturating_sub(post.looked) >= LOOK
    }

    fn note_failed(&self, post: &mut Post, error: &KeeperError) {
        if post.failed.is_none() {
            let is_hidden = post.link.is_some();
            tracing::error!(is_hidden, error = %chain(error), "there is no keeper that the next daemon would find: where this one is killed, what it holds is lost; it is tried again");
        }
        post.failed = Some(SystemClock::new());
        if post.link.is_none() {
            self.pid.store(0, Ordering::Relaxed);
        }
    }

    /// Something went wrong with the keeper: [`Keeping::mend`] starts another, and what this one holds it holds until that has everything.
    fn drop_link(&self, post: &mut Post, error: Option<&KeeperError>) {
        let Some(link) = post.link.take() else { return };
        self.pid.store(0, Ordering::Relaxed);
        post.behind = None;
        // One that ends as soon as it has begun is not begun again at once; one that has hung up, and goes on, was asked by somebody else.
        let goes_on = matches!(&link, Holder::Process(link) if !link.has_ended());
        if post.linked.take().is_some_and(|since| since.now() < PAUSE) && !goes_on {
            post.failed = Some(SystemClock::new());
        }
        let what = if link.is_behind() { "it does not read what it is sent" } else { "it has ended" };
        let why = link.last_words().or_else(|| error.map(|error| chain(error)));
        // Nothing is lost by that: where no other can be started that is an error.
        tracing::warn!(
            pid = link.pid(),
            why = why.as_deref().unwrap_or(what),
            "the keeper is gone: another takes its place"
        );
        if let Holder::Process(link) = link {
            // Where it is still there it is not the one to be told everything once more.
            post.useless.insert((SOCKET_NAME.to_owned(), post.socket), SystemClock::new());
            let stays = link.stays();
            // Whoever has started it would find it killed.
            let end = if stays && !link.is_behind() { End::Told } else { End::Killed };
            self.note_stray(post, link, end, true, stays);
            self.hear_strays(post);
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
            self.tell_to_let_go(&mut post, keys);
        }
    }

    fn tell_to_let_go(&self, post: &mut Post, keys: &[Key]) {
        if self.manager.is_some() {
            // Until it is known to have heard that; no process of ours goes, and takes it along.
            post.owed.extend(keys);
            self.note_whether_any(post);
        }
        self.tell(post, |link| link.let_go(keys));
        if post.link.is_some() {
            for key in keys {
                post.owed.remove(key);
            }
            self.note_whether_any(post);
        }
    }

    fn tell(&self, post: &mut Post, what: impl FnOnce(&Holder) -> Result<(), KeeperError>) {
        let told = post.link.as_ref().map_or(Ok(()), what);
        if let Err(error) = told {
            self.drop_link(post, Some(&error));
        }
    }

    /// [`Keeping::mend`] has something to do. Waits for nothing: whoever fills a keeper just now is at it already. Where a glance says that all is well nobody else is woken for that.
    pub(super) fn is_to_be_mended(&self) -> bool {
        let mut post = match self.post.try_lock() {
            Ok(post) => post,
            Err(TryLockError::Poisoned(post)) => post.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let is_well = |link: &Holder| !link.is_gone() && !link.is_behind() && post.behind.is_none();
        let is_all_well = post.link.as_ref().is_some_and(is_well) && post.strays.is_empty() && !post.is_small;
        if !is_all_well || !self.is_look_due(&post) {
            return !is_all_well;
        }
        let is_as_before = self.is_found(&post) && !self.is_anybody_beside();
        if is_as_before {
            post.looked = self.since.now();
        }
        !is_as_before
    }

    /// Some keeper listens beside the one that is found, or has.
    fn is_anybody_beside(&self) -> bool {
        let Ok(entries) = std::fs::read_dir(&self.state_dir) else { return true };
        entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_own_name))
    }

    /// Looks whether there is a keeper, and where there is none starts one that holds all that there is to hold. Takes as long as a process takes to start.
    pub(super) fn mend(&self) {
        let _mending = self.mending();
        let is_to_call = {
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
            if post.is_over || is_early || post.link.is_some() && !post.is_small && !self.is_time_to_look(&mut post) {
                return;
            }
            post.strays.any_out_of_hearing() && self.is_found(&post)
        };
        if is_to_call {
            self.call_strays();
        }
        // Without the lock: whoever creates chunks meanwhile does not wait for it.
        let Some(candidate) = self.look() else { return };
        // One that is there by itself comes first; else one that is found already, else one of the daemon's own.
        // The one that it has is not to be asked once more: it would hang up.
        let is_asked = self.is_found(&self.post());
        if let Some((place, link)) = candidate.or_else(|| if is_asked { None } else { self.found() }) {
            let mut post = self.post();
            match self.fill(&mut post, Holder::Process(link), &place.0) {
                Ok(()) => return,
                Err(unfilled) => self.give_up(&mut post, place, *unfilled),
            }
            // One that has died after it had been given the name leaves the daemon's keeper where nobody finds it.
            if self.is_found(&post) && !post.is_small {
                return;
            }
        }
        self.start_own();
    }

    /// A keeper of the daemon's own, with everything.
    fn start_own(&self) {
        let started = self.start();
        moment();
        let mut post = self.post();
        let filled = started.and_then(|link| {
            let name = link.name().unwrap_or_default();
            self.fill(&mut post, link, &name).map_err(|unfilled| {
                let Unfilled { link, error, is_found } = *unfilled;
                if let Holder::Process(link) = link {
                    self.note_stray(&mut post, link, End::Killed, is_found, false);
                }
                error
            })
        });
        if let Err(error) = filled {
            self.note_failed(&mut post, &error);
        }
        self.hear_strays(&mut post);
    }

    /// Looks whether another is to take the keeper's place, and says who where one waits for that; nothing where all is well.
    fn look(&self) -> Option<Option<(Place, Link)>> {
        if self.manager.is_some() {
            return self.post().link.is_none().then_some(None);
        }
        let (is_there, stays, is_hidden) = {
            let post = self.post();
            let is_enough = !post.is_small;
            (post.link.is_some() && is_enough, post.link.as_ref().is_some_and(Holder::stays), !self.is_found(&post))
        };
        // Who comes beside one that no daemon has started waits until it has gone: both may be started again and again.
        let candidate = self.candidate(!is_there || !stays || is_hidden);
        match (&candidate, is_there, is_hidden) {
            (None, true, false) => return None,
            (None, true, true) => {
                let pid = self.pid().unwrap_or(0);
                let mut post = self.post();
                if !std::mem::replace(&mut post.is_said_hidden, true) {
                    tracing::warn!(
                        pid,
                        "the keeper's socket is gone, or another keeper's: the one that the next daemon finds is told everything"
                    );
                }
            }
            (Some(_), true, _) => tracing::info!("a keeper has come to take the place of the one that is there"),
            (_, false, _) => {}
        }
        Some(candidate)
    }

    /// Has a keeper hold all that there is to hold, and nothing else; then it is the one that is found, and the keeper of this daemon. `name` is where it listens.
    fn fill(&self, post: &mut Post, link: Holder, name: &str) -> Result<(), Box<Unfilled>> {
        let mut is_found = name == SOCKET_NAME;
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
            // Of what has the same name by now, too: there is one of each.
            link.let_go(&post.owed.iter().copied().collect::<Vec<_>>())?;
            link.keep(&all)?;
            // What was sent is not held before it was read: the one before is let go next.
            link.settle()?;
            moment();
            let socket = match name {
                "" => None,
                SOCKET_NAME => self.socket(),
                name => self.publish(name)?,
            };
            is_found = true;
            // One that has died in between is not worth the one that is there.
            link.settle()?;
            Ok(socket)
        });
        let socket = match filled {
            Ok(socket) => socket,
            Err(error) => return Err(Box::new(Unfilled { link, error, is_found })),
        };
        self.restarts.fetch_add(1, Ordering::Relaxed);
        post.owed.clear();
        self.note_whether_any(post);
        tracing::info!(
            pid = link.pid(),
            descriptors = all.len(),
            "another keeper holds what is to outlive this process"
        );
        self.take(post, link, socket);
        Ok(())
    }

    /// A keeper that was there by itself cannot be used. It is not killed, as whoever has started it would start it again; it is to hold nothing. It has hung up, perhaps, and hears who asks anew;
    /// one that nobody has found forgets with that what it was told.
    fn give_up(&self, post: &mut Post, place: Place, unfilled: Unfilled) {
        let Unfilled { link: Holder::Process(link), error, is_found } = unfilled else { return };
        let stays = link.stays();
        let again = [&place.0, SOCKET_NAME].into_iter().find_map(|name| {
            let path = self.state_dir.join(name);
            let is_its = inode_of(&path) == place.1;
            is_its.then(|| Link::call(&path, BEHIND_MAX).ok().flatten()).flatten()
        });
        post.note_useless(place, &error);
        self.note_stray(post, again.unwrap_or(link), End::Told, is_found, stays);
        self.hear_strays(post);
    }

    /// Another daemon is there: nothing is said to any keeper from here on.
    pub(super) fn abandon(&self) {
        let _mending = self.mending();
        let mut post = self.post();
        post.is_over = true;
        drop(post.link.take());
    }

    /// Nobody is to follow: the keeper ends, with all that it holds.
    pub(super) fn end(&self) {
        let _mending = self.mending();
        let mut post = self.post();
        post.is_over = true;
        // What others held is nobody's either.
        post.strays.hear(true);
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

    /// A daemon follows, or may: the keeper holds on, another where it is gone just now. Nothing is said to it from here on. Says whether there is one that the next daemon finds.
    pub(super) fn leave(&self) -> bool {
        let _mending = self.mending();
        let is_well = {
            let mut post = self.post();
            if post.link.as_ref().is_some_and(Holder::is_gone) {
                self.drop_link(&mut post, None);
            }
            // One that was killed just now has not hung up yet. It will not answer.
            self.tell(&mut post, Holder::settle);
            self.is_found(&post)
        };
        if !is_well {
            self.start_own();
        }
        let mut post = self.post();
        post.is_over = true;
        self.hear_strays(&mut post);
        let is_found = self.is_found(&post);
        drop(post.link.take());
        is_found
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
        self.tell_to_let_go(&mut self.post(), &keys);
    }

    fn holds(&self, chunks: &[ChunkId]) -> BTreeSet<ChunkId> {
        if !self.has_strays.load(Ordering::Acquire) {
            return BTreeSet::new();
        }
        let post = self.post();
        // Numbers grow: whatever was created since is not its.
        let may_be_held = |chunk: &ChunkId| post.strays.may_hold(*chunk) || post.owed.contains(&Key::Chunk(*chunk));
        chunks.iter().copied().filter(may_be_held).collect()
    }
}
