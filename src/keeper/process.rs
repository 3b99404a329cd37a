//! The process that keeps: one thread, one daemon at a time, no policy.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{
    CANDIDATE_PREFIX, JOURNAL_NAME, KEEPERS_LOCK_NAME, KeeperError, Key, LOCK_NAME, Link, RESERVE_PREFIX, SOCKET_NAME,
    UNFINISHED_PREFIX, VERSION, from, is_one_of_us, v1,
};
use crate::clock::{Clock as _, SystemClock};
use crate::error::chain;
use crate::limits;
use crate::mortal::moment;
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::peer::{is_bound, listener_at};

/// How a keeper is to serve.
#[derive(Debug)]
pub struct Keeping {
    /// Where its socket is to be.
    pub state_dir: PathBuf,
    /// A daemon that is connected already.
    pub daemon: Option<OwnedFd>,
    /// Ends when no daemon has been there for so long, and none of the processes that it holds is alive; stays for ever where there is none.
    pub alone_max: Option<Duration>,
}

/// How often it looks whether anybody is left.
const LOOK: Duration = Duration::from_secs(1);
/// A process that has closed its connection has ended then, or soon.
const ENDING: Duration = Duration::from_millis(20);
/// How long the keeper before may take for a message: a daemon waits meanwhile, a second at most.
const TAKING_OVER: Duration = Duration::from_millis(500);
/// So often an empty keeper looks for one that is found before it takes the place.
const MISSED_MAX: u32 = 3;
/// One that has lost its place keeps what it holds for so long where a daemon is there: one that begins waits ten seconds at most for the keeper that is found, and has told nobody anything before.
const OUTLIVED_MAX: Duration = Duration::from_secs(15);
/// How long a daemon may leave unread what it asked for.
const PATIENCE: Duration = Duration::from_secs(10);

/// A keeper that is told when to look: [`serve`] has one look all the time.
#[derive(Debug)]
pub struct Keeper {
    listener: OwnedFd,
    /// Where daemons look.
    socket: PathBuf,
    /// Where it listens until it has everything.
    own: PathBuf,
    /// Which file its socket is, wherever it is.
    inode: u64,
    daemon: Option<FdChannel>,
    /// It has been told something to hold, or to let go of: whoever only looks is no daemon.
    is_served: bool,
    /// How often no keeper was found in a row.
    missed: u32,
    /// No daemon has started it.
    stays: bool,
    /// It was found once, and is not any more.
    is_lost: bool,
    /// A clock that began when it was first seen beside a daemon that has another keeper.
    outlived: Option<SystemClock>,
    /// Tells it from all others.
    id: u64,
    held: BTreeMap<Key, OwnedFd>,
}

/// What becomes of the keeper after a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    GoOn,
    /// The connection is over.
    Hang,
    End,
}

/// Keeps, until a daemon says that it is to end or nobody is left.
///
/// # Errors
///
/// The socket cannot be made.
pub fn serve(keeping: Keeping) -> Result<(), KeeperError> {
    // What a daemon has started is that daemon's; else somebody may start it again when it ends.
    let stays = keeping.daemon.is_none();
    let mut keeper = Keeper::candidate(&keeping.state_dir, stays)?;
    keeper.daemon = keeping.daemon.and_then(|socket| FdChannel::over(socket, true).with_patience(PATIENCE).ok());
    let clock = SystemClock::new();
    let (mut alone_since, mut looked) = (clock.now(), clock.now());
    let mut is_first = true;
    loop {
        if keeper.daemon.is_none() && !keeper.is_found() && (keeper.stays || !keeper.held.is_empty()) {
            // Another has its place, and whoever has started both goes on with both; or its socket was removed, and it is the only one that has anything.
            if let Err(error) = keeper.stand_by() {
                // Where there is no directory any more nobody comes; else what it holds is worth another attempt.
                if !keeping.state_dir.is_dir() {
                    return Err(error);
                }
                if is_first {
                    tracing::error!(error = %chain(&error), "it cannot listen anew; it is tried again");
                }
                is_first = false;
            }
        }
        // Where a daemon is there, it has this one found when it has told it everything.
        if keeper.daemon.is_none() && keeper.is_candidate() {
            match keeper.take_over() {
                Ok(()) => {}
                // It may answer later, and holds what is worth waiting for.
                Err(error) if is_first => {
                    tracing::error!(error = %chain(&error), "the keeper that is there does not make way; it is tried again")
                }
                Err(_) => {}
            }
            is_first = false;
        }
        let then = keeper.wait_and_serve(LOOK);
        if then == Then::End {
            return Ok(());
        }
        let now = clock.now();
        if keeper.is_served {
            alone_since = now;
        }
        if now.saturating_sub(looked) >= LOOK {
            looked = now;
            let is_long = keeping.alone_max.is_some_and(|most| now.saturating_sub(alone_since) >= most);
            // Where its socket is gone nobody can find it any more; one that is to stay, or has anything, listens anew.
            let is_useless = keeper.held.is_empty() && (!keeper.is_found() || keeper.is_lost && keeper.is_candidate());
            if keeper.daemon.is_none() && (!keeper.stays && is_useless || is_long && !keeper.is_anybody_alive()) {
                keeper.remove_socket();
                return Ok(());
            }
        }
    }
}

/// The lock of this name in a directory; nothing where somebody has it. Whoever is kept out by it for long finds in it whom to end.
fn locked(state_dir: &Path, name: &str) -> Result<Option<OwnedFd>, KeeperError> {
    let error = |errno: Errno| KeeperError::system("look for a daemon")(errno.into());
    super::prepare(state_dir)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let lock = rustix::fs::open(state_dir.join(name), flags, Mode::from(0o600)).map_err(error)?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(errno) => return Err(error(errno)),
    }
    let pid = format!("{}\n", std::process::id());
    // A disk that is full is no reason not to go on.
    let _ = rustix::fs::ftruncate(&lock, 0).and_then(|()| rustix::io::pwrite(&lock, pid.as_bytes(), 0));
    Ok(Some(lock))
}

/// A keeper that is there, with what it holds.
pub type Held = (Link, Vec<(Key, OwnedFd)>);

/// The keeper that is found, with what it holds. One that ends while it is asked is none a moment later.
///
/// # Errors
///
/// One is there, and cannot be asked: what only it holds is worth more than a start.
pub fn find(state_dir: &Path, patience: Duration) -> Result<Option<Held>, KeeperError> {
    const TIMES: u32 = 5;
    asked(state_dir, patience, TIMES, with_all)
}

/// All that it holds is listed.
fn with_all(link: Link) -> Result<Held, KeeperError> {
    let held = link.list()?;
    Ok((link, held))
}

/// What comes of asking the keeper that is found, so many times where it hangs up; nothing where there is none.
fn asked<T>(
    state_dir: &Path,
    patience: Duration,
    times: u32,
    ask: impl Fn(Link) -> Result<T, KeeperError>,
) -> Result<Option<T>, KeeperError> {
    let mut left = times;
    loop {
        let heard = Link::connect(state_dir, patience).and_then(|link| link.map(&ask).transpose());
        left -= 1;
        match heard {
            Err(KeeperError::Channel(ChannelError::Closed)) if left > 0 => std::thread::sleep(ENDING),
            // It holds nothing of ours.
            Err(error @ KeeperError::NoKeeper(_)) => {
                tracing::error!(error = %chain(&error), "it is asked for nothing, and a keeper takes its place");
                return Ok(None);
            }
            Err(KeeperError::Channel(ChannelError::TimedOut)) => {
                let listener = listener_at(&state_dir.join(SOCKET_NAME), SocketType::SEQPACKET);
                return Err(KeeperError::Silent { listener });
            }
            heard => return heard,
        }
    }
}

/// A number that no other keeper has.
fn random() -> u64 {
    let mut random = [0; 8];
    // Where there is none it is told from others by the kernel alone, and its names may be another's: that is told.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(random)
}

/// Listens where only its own user finds it, under a name that no other has and that begins with `prefix`. Says which that is, and which file.
fn listen(state_dir: &Path, prefix: &str) -> Result<(OwnedFd, PathBuf, u64), std::io::Error> {
    const BACKLOG: i32 = 8;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let number = random() as u32;
    // Not where anybody looks before somebody listens.
    let new = state_dir.join(format!("{UNFINISHED_PREFIX}{number:08x}"));
    rustix::net::bind(&socket, &SocketAddrUnix::new(&new)?)?;
    // Whoever connects before this is asked who he is all the same.
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    let inode = std::fs::symlink_metadata(&new)?.ino();
    let own = state_dir.join(format!("{prefix}{number:08x}"));
    std::fs::rename(&new, &own)?;
    Ok((socket, own, inode))
}

/// Which file is at a path.
pub(crate) fn inode_of(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

impl Keeper {
    /// One that is found, and ends when it is told to unless whoever has started it ends it.
    ///
    /// # Errors
    ///
    /// The socket cannot be made.
    pub fn new(state_dir: &Path, stays: bool) -> Result<Keeper, KeeperError> {
        let keeper = Keeper::candidate(state_dir, stays)?;
        keeper.publish()?;
        Ok(keeper)
    }

    /// One that listens beside the one that is found, if there is any: until it has everything, whoever ends meanwhile.
    fn candidate(state_dir: &Path, stays: bool) -> Result<Keeper, KeeperError> {
        super::prepare(state_dir)?;
        let (listener, own, inode) =
            listen(state_dir, CANDIDATE_PREFIX).map_err(KeeperError::system("listen for daemons"))?;
        let socket = state_dir.join(SOCKET_NAME);
        Ok(Keeper {
            listener,
            socket,
            own,
            inode,
            daemon: None,
            is_served: false,
            missed: 0,
            stays,
            is_lost: false,
            outlived: None,
            id: random(),
            held: BTreeMap::new(),
        })
    }

    /// Waits until no other is there. What this one holds it holds until [`Keeper::take_over`] finds that another has everything.
    fn stand_by(&mut self) -> Result<(), KeeperError> {
        let listening = listen(self.state_dir(), RESERVE_PREFIX).map_err(KeeperError::system("listen for daemons"))?;
        (self.listener, self.own, self.inode) = listening;
        self.is_lost = true;
        Ok(())
    }

    fn state_dir(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new("."))
    }

    /// From here on this is the one that is found.
    fn publish(&self) -> Result<(), KeeperError> {
        std::fs::rename(&self.own, &self.socket).map_err(KeeperError::system("have the keeper found"))
    }

    /// It was not told everything yet.
    fn is_candidate(&self) -> bool {
        inode_of(&self.own) == Some(self.inode)
    }

    /// Where no daemon is there, takes the place of the keeper that is found, with what it holds. No daemon begins meanwhile, and no other keeper does this.
    fn take_over(&mut self) -> Result<(), KeeperError> {
        // Keepers know each other by this one: whoever has the other is a daemon, but for a moment.
        let Some(_alone) = locked(self.state_dir(), KEEPERS_LOCK_NAME)? else { return Ok(()) };
        if locked(self.state_dir(), LOCK_NAME)?.is_none() {
            self.give_way();
            return Ok(());
        }
        self.outlived = None;
        let stands_by =
            self.own.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(RESERVE_PREFIX.as_bytes()));
        let is_begun = self.state_dir().join(JOURNAL_NAME).exists();
        // One that was stopped, say, and has lost its socket meanwhile may be the only one that has anything: the one that is found has begun without a daemon.
        let is_only = !self.held.is_empty() && is_begun;
        // One that could not hold all that the other will be told is no better. That is asked for nothing: it may hold a lot.
        let is_better =
            |link: &Link| link.files_max() <= super::files_max() && !(stands_by && (link.stays() || !self.stays));
        let socket = inode_of(&self.socket);
        // Without the daemon's lock: one that does not answer is waited for, and keeps no daemon from beginning.
        // Once: who hangs up may have a daemon by now, which would be in its place.
        let before = asked(self.state_dir(), TAKING_OVER, 1, |link| {
            if is_only && link.names()?.is_empty() {
                Ok(Some((link, true)))
            } else {
                Ok(is_better(&link).then_some((link, false)))
            }
        })?;
        moment();
        let Some(_lock) = locked(self.state_dir(), LOCK_NAME)? else { return Ok(()) };
        if inode_of(&self.socket) != socket {
            // A daemon has come since, with another.
            return Ok(());
        }
        let Some(before) = before else {
            if !is_begun {
                // A daemon has ended since, and left nothing: nobody would believe what this one holds.
                self.held.clear();
            }
            // Whoever has everything may have lost its socket just now, and finds that out within a second or two: one that has nothing lets it come first.
            if self.held.is_empty() && (stands_by || is_begun) && self.missed < MISSED_MAX {
                self.missed += 1;
                return Ok(());
            }
            return self.publish();
        };
        self.missed = 0;
        let Some((link, is_empty)) = before else {
            self.held.clear();
            return Ok(());
        };
        if link.is_gone() {
            // A daemon has come since, and it has told that one more.
            return Ok(());
        }
        if !is_empty {
            self.held = link.list()?.into_iter().collect();
        }
        self.publish()?;
        moment();
        // Nobody finds it any more, so that it ends by itself where it does not hear this.
        let _ = link.end();
        Ok(())
    }

    /// A daemon is there. It has told the keeper that is found everything, or will soon: what this one holds is from before then.
    fn give_way(&mut self) {
        self.missed = 0;
        // A daemon that has another kind of keeper has none that is found.
        let most = if is_bound(&self.socket).unwrap_or(false) { OUTLIVED_MAX } else { OUTLIVED_MAX * 4 };
        if self.outlived.get_or_insert_with(SystemClock::new).now() >= most {
            self.held.clear();
        }
    }

    fn is_found(&self) -> bool {
        [&self.socket, &self.own].into_iter().any(|path| inode_of(path) == Some(self.inode))
    }

    fn remove_socket(&self) {
        for path in [&self.socket, &self.own] {
            if inode_of(path) == Some(self.inode) {
                // It may have gone in this moment.
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// The daemon has gone. One that was told something and not everything is nobody's, and what it was told may be old by the time that it is somebody's.
    fn hang_up(&mut self) {
        let was_served = std::mem::take(&mut self.is_served);
        self.daemon = None;
        if was_served && self.is_candidate() {
            self.held.clear();
        }
    }

    /// Some process that it holds has not ended.
    fn is_anybody_alive(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let processes = self.held.iter().filter(|(key, _)| matches!(key, Key::Process(_)));
        let is_alive = |fd: &OwnedFd| {
            let mut fds = [PollFd::new(fd, PollFlags::IN)];
            poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 0)
        };
        processes.into_iter().any(|(_, fd)| is_alive(fd))
    }

    /// Serves whoever is there, and waits for nobody.
    pub fn serve_now(&mut self) {
        let is_there = |keeper: &Keeper| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut fds = vec![PollFd::new(&keeper.listener, PollFlags::IN)];
            fds.extend(keeper.daemon.as_ref().map(|daemon| PollFd::new(daemon, PollFlags::IN)));
            poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
        };
        while is_there(self) {
            if self.wait_and_serve(Duration::ZERO) == Then::End {
                return;
            }
        }
    }

    /// Waits a while for somebody, and serves him.
    fn wait_and_serve(&mut self, patience: Duration) -> Then {
        let patience = Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        let (has_daemon, has_new) = {
            let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
            if let Some(daemon) = &self.daemon {
                fds.push(PollFd::new(daemon, PollFlags::IN));
            }
            // A signal, say.
            if poll(&mut fds, Some(&patience)).is_err() {
                return Then::GoOn;
            }
            (fds.get(1).is_some_and(|fd| !fd.revents().is_empty()), !fds[0].revents().is_empty())
        };
        if has_daemon {
            match self.take_one() {
                Then::GoOn => {}
                Then::Hang => self.hang_up(),
                Then::End => return Then::End,
            }
        }
        if has_new { self.accept() } else { Then::GoOn }
    }

    /// A daemon that connects takes the place of the one before, of which everything that it has sent is done first.
    fn accept(&mut self) -> Then {
        let flags = SocketFlags::CLOEXEC;
        let socket = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN) => return Then::GoOn,
            Err(_) => {
                // There are too few open files, say: whoever waits is still there after that.
                std::thread::sleep(ENDING);
                return Then::GoOn;
            }
        };
        if !is_one_of_us(socket.as_fd()) {
            return Then::GoOn;
        }
        while self.daemon.is_some() {
            match self.take_one() {
                Then::GoOn => {}
                Then::Hang => self.hang_up(),
                Then::End => return Then::End,
            }
        }
        self.daemon = FdChannel::over(socket, true).with_patience(PATIENCE).ok();
        self.is_served = false;
        Then::GoOn
    }

    /// Serves one message that is there.
    fn take_one(&mut self) -> Then {
        let Some(daemon) = &self.daemon else { return Then::Hang };
        let received = match daemon.receive_now::<v1::ToKeeper>() {
            // A peer that is closed with something unread resets the connection: that is said once, and before what it had sent.
            Err(ChannelError::Closed) => daemon.receive_now::<v1::ToKeeper>(),
            received => received,
        };
        let (message, fds) = match received {
            Ok(received) => received,
            // Whatever the next message is, this one is lost with what it was to have held: a daemon that breaks the rules is done with.
            Err(_) => return Then::Hang,
        };
        moment();
        let then = self.serve(message, fds);
        moment();
        then
    }

    fn serve(&mut self, message: v1::ToKeeper, fds: Vec<OwnedFd>) -> Then {
        match message.what {
            Some(v1::To::Hello(hello)) if hello.version == VERSION => {
                let pid = std::process::id();
                let name = self.own.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let _ = self.say(v1::From::Welcome(v1::Welcome {
                    version: VERSION,
                    pid,
                    name,
                    files_max: super::files_max(),
                    stays: self.stays,
                    id: self.id,
                }));
                Then::GoOn
            }
            Some(v1::To::Hello(hello)) => {
                let text = format!(
                    "it speaks version {VERSION} and the daemon {}: end the one that does not fit the other (the keeper ends with what only it holds)",
                    hello.version
                );
                let _ = self.say(v1::From::Refused(text));
                Then::Hang
            }
            Some(v1::To::Keep(v1::Keys { keys })) if keys.len() == fds.len() => {
                self.is_served = true;
                self.held.extend(keys.into_iter().map(Key::of).zip(fds));
                Then::GoOn
            }
            Some(v1::To::Keep(v1::Keys { keys })) => {
                let text = format!(
                    "{} descriptors came for {} keys: it may not have as many open files as the daemon (ulimit -n)",
                    fds.len(),
                    keys.len()
                );
                let _ = self.say(v1::From::Refused(text));
                Then::Hang
            }
            Some(v1::To::LetGo(v1::Keys { keys })) => {
                self.is_served = true;
                for key in keys {
                    self.held.remove(&Key::of(key));
                }
                // Where nobody is there to hear it, what he has sent behind it is done all the same.
                let _ = self.say(v1::From::LetGone(v1::Nothing {}));
                Then::GoOn
            }
            Some(v1::To::List(_)) => self.list(),
            Some(v1::To::End(_)) => {
                self.held.clear();
                if !self.stays {
                    self.remove_socket();
                }
                // Whether or not anybody hears it.
                let _ = self.say(v1::From::Ended(v1::Nothing {}));
                if self.stays { Then::Hang } else { Then::End }
            }
            None => {
                let _ = self.say(v1::From::Refused(format!("a message that version {VERSION} does not know")));
                Then::Hang
            }
        }
    }

    fn list(&self) -> Then {
        let held: Vec<(&Key, &OwnedFd)> = self.held.iter().collect();
        for some in held.chunks(limits::FDS_PER_MESSAGE_MAX) {
            let keys = some.iter().map(|(key, _)| key.message()).collect();
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
            moment();
            if self.send(v1::From::Held(v1::Keys { keys }), &fds) != Then::GoOn {
                return Then::Hang;
            }
        }
        self.say(v1::From::Held(v1::Keys { keys: Vec::new() }))
    }

    fn say(&self, what: v1::From) -> Then {
        self.send(what, &[])
    }

    /// What cannot be sent for want of room among descriptors on their way (TOOMANYREFS) has room soon.
    fn send(&self, what: v1::From, fds: &[BorrowedFd<'_>]) -> Then {
        const PAUSE: Duration = Duration::from_millis(5);
        let Some(daemon) = &self.daemon else { return Then::Hang };
        let message = from(what);
        let since = SystemClock::new();
        loop {
            match daemon.send(&message, fds) {
                Ok(()) => return Then::GoOn,
                Err(ChannelError::System(rustix::io::Errno::TOOMANYREFS)) if since.now() < PATIENCE => {
                    std::thread::sleep(PAUSE);
                }
                Err(_) => return Then::Hang,
            }
        }
    }
}
