//! The daemon's end of a keeper.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{KEYS_MAX, KeeperError, Key, SOCKET_NAME, VERSION, files_max, is_one_of_us, to, v1};
use crate::clock::{Clock as _, SystemClock};
use crate::limits;
use crate::mortal::moment;
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::peer::{Identity, Peer, process_by_pid, unread_bytes};

/// How long a keeper may take for a message: it does nothing but read them.
const PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors on their way are few for a moment.
const PAUSE: Duration = Duration::from_millis(1);

/// A connection to a keeper.
#[derive(Debug)]
pub struct Link {
    channel: FdChannel,
    /// What it says of itself.
    welcome: v1::Welcome,
    /// Where this process has started it: whoever starts one is told when it ends.
    child: Option<Child>,
}

impl Link {
    /// The keeper that is there; nothing where none is.
    ///
    /// # Errors
    ///
    /// One is there, and does not answer or speaks another version.
    pub fn connect(state_dir: &Path, patience: Duration) -> Result<Option<Link>, KeeperError> {
        Link::connect_at(&state_dir.join(SOCKET_NAME), patience)
    }

    /// The keeper whose socket is at `path`.
    ///
    /// # Errors
    ///
    /// As of [`Link::connect`].
    pub fn connect_at(path: &Path, patience: Duration) -> Result<Option<Link>, KeeperError> {
        Link::call(path, patience)?.map(|link| link.greeted(path)).transpose()
    }

    /// The same, which has said hello and not heard anything yet.
    ///
    /// # Errors
    ///
    /// As of [`Link::connect`].
    pub fn call(path: &Path, patience: Duration) -> Result<Option<Link>, KeeperError> {
        match FdChannel::connect(path, patience) {
            // Whoever listens there gets every descriptor.
            Ok(channel) if !is_one_of_us(channel.as_fd()) => Err(KeeperError::NoKeeper(path.to_owned())),
            Ok(channel) => Link::over(channel, None).map(Some),
            Err(ChannelError::Connect(Errno::NOENT | Errno::CONNREFUSED)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn over(channel: FdChannel, child: Option<Child>) -> Result<Link, KeeperError> {
        let link = Link { channel, welcome: v1::Welcome::default(), child };
        match link.channel.send(&to(v1::To::Hello(v1::Hello { version: VERSION })), &[]) {
            Ok(()) => Ok(link),
            Err(error) => {
                link.discard();
                Err(error.into())
            }
        }
    }

    /// Nobody needs one that was started just now: it ends.
    pub fn discard(mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts one: `program` with its arguments is `stitchd keep`, whose standard input becomes the connection.
    ///
    /// # Errors
    ///
    /// It does not start, or does not say that it is there.
    pub fn start(mut program: Command, state_dir: &Path) -> Result<Link, KeeperError> {
        let (ours, theirs) = FdChannel::pair()?;
        let ours = ours.with_patience(PATIENCE)?;
        program.stdin(Stdio::from(theirs.into_socket())).stdout(Stdio::null()).stderr(Stdio::null());
        let child = program.spawn().map_err(KeeperError::system("start a keeper"))?;
        drop(program);
        Link::over(ours, Some(child))?.greeted(&state_dir.join(SOCKET_NAME))
    }

    /// The same, once it has answered.
    ///
    /// # Errors
    ///
    /// It does not answer, or speaks another version.
    pub fn greeted(mut self, path: &Path) -> Result<Link, KeeperError> {
        let heard = self.channel.receive::<v1::FromKeeper>().map(|(message, _)| message.what);
        if let Ok(Some(v1::From::Welcome(welcome))) = heard {
            self.welcome = welcome;
            return Ok(self);
        }
        self.discard();
        match heard? {
            Some(v1::From::Refused(text)) => Err(KeeperError::Refused(text)),
            _ => Err(KeeperError::NoKeeper(path.to_owned())),
        }
    }

    /// It has not read all that it was sent.
    pub fn is_behind(&self) -> bool {
        unread_bytes(self.channel.as_fd()).is_ok_and(|bytes| bytes > 0)
    }

    /// As long as it was asked for what only it holds it had more time.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn with_usual_patience(self) -> Result<Link, KeeperError> {
        self.channel.set_patience_of_both(PATIENCE)?;
        Ok(self)
    }

    /// Which process it is, as it says itself.
    pub fn pid(&self) -> u32 {
        self.welcome.pid
    }

    /// The file in the state directory where it listens as long as it is not the one that is found.
    pub fn name(&self) -> &str {
        &self.welcome.name
    }

    /// These are the same process, as far as that can be told: each says a number that no other has, one of before none.
    pub fn is_same(&self, other: &Link) -> bool {
        if self.welcome.id != 0 && other.welcome.id != 0 {
            return self.welcome.id == other.welcome.id;
        }
        let (one, other) = (self.process().identity, other.process().identity);
        matches!(one, Identity::Pidfs(_) | Identity::Process { .. }) && one == other
    }

    /// No daemon has started it: it goes on when another takes its place.
    pub fn stays(&self) -> bool {
        self.welcome.stays
    }

    /// How many files it may have open; 0 where it does not say.
    pub fn files_max(&self) -> u64 {
        self.welcome.files_max
    }

    /// Fails where it may not have as many files open as this process: a keeper of before says nothing of that.
    ///
    /// # Errors
    ///
    /// How many are missing.
    pub fn check_files(&self) -> Result<(), KeeperError> {
        let (keeper, daemon) = (self.welcome.files_max, files_max());
        if keeper == 0 || keeper >= daemon { Ok(()) } else { Err(KeeperError::TooFewFiles { keeper, daemon }) }
    }

    /// The process, where the kernel says which it is.
    pub fn process(&self) -> Peer {
        let peer = Peer::of(self.channel.as_fd());
        // The kernel says who has made the connection: of a child that is this process.
        let child = self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok());
        match child.map(|pid| (pid, process_by_pid(pid))) {
            None => peer,
            Some((pid, Some((pidfd, identity)))) => Peer { pidfd: Some(pidfd), identity, pid, ..peer },
            Some((pid, None)) => Peer { pidfd: None, identity: Identity::Unproven, pid, ..peer },
        }
    }

    /// Everything that it holds: copies.
    ///
    /// # Errors
    ///
    /// It does not answer, or this process may not have so many open files.
    pub fn list(&self) -> Result<Vec<(Key, OwnedFd)>, KeeperError> {
        self.ask()?;
        self.answer()
    }

    /// Asks for everything that it holds.
    ///
    /// # Errors
    ///
    /// As of [`Link::list`].
    pub fn ask(&self) -> Result<(), KeeperError> {
        Ok(self.channel.send(&to(v1::To::List(v1::Nothing {})), &[])?)
    }

    /// What was asked for.
    ///
    /// # Errors
    ///
    /// As of [`Link::list`].
    pub fn answer(&self) -> Result<Vec<(Key, OwnedFd)>, KeeperError> {
        let mut held = Vec::new();
        while let Some((keys, fds)) = self.answer_some()? {
            held.extend(keys.zip(fds));
        }
        Ok(held)
    }

    /// The names of everything that it holds. Only a few of the copies are open at a time.
    ///
    /// # Errors
    ///
    /// As of [`Link::list`].
    pub fn names(&self) -> Result<Vec<Key>, KeeperError> {
        self.ask()?;
        let mut names = Vec::new();
        loop {
            // Copies that this process may not have are not needed either.
            let (message, _, _) = self.channel.receive_some::<v1::FromKeeper>()?;
            let keys = held_in(message)?;
            if keys.is_empty() {
                return Ok(names);
            }
            names.extend(keys.into_iter().map(Key::of));
        }
    }

    /// Returns when it has done all that it was told: only then does it hold what it was to keep.
    ///
    /// # Errors
    ///
    /// It has not, or does not answer.
    pub fn settle(&self) -> Result<(), KeeperError> {
        self.say_let_go(&[])?;
        self.hear_let_go()
    }

    /// One message of what was asked for; nothing at its end.
    fn answer_some(&self) -> Result<Option<(impl Iterator<Item = Key> + use<>, Vec<OwnedFd>)>, KeeperError> {
        let (message, fds, is_cut) = self.channel.receive_some::<v1::FromKeeper>()?;
        let keys = held_in(message)?;
        if is_cut || keys.len() != fds.len() {
            return Err(ChannelError::DescriptorsLost.into());
        }
        Ok((!keys.is_empty()).then(|| (keys.into_iter().map(Key::of), fds)))
    }

    /// Has these held, from before this returns.
    ///
    /// # Errors
    ///
    /// The keeper is gone, or does not read.
    pub fn keep(&self, fds: &[(Key, BorrowedFd<'_>)]) -> Result<(), KeeperError> {
        for some in fds.chunks(limits::FDS_PER_MESSAGE_MAX) {
            let keys = some.iter().map(|(key, _)| key.message()).collect();
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| *fd).collect();
            self.send(v1::To::Keep(v1::Keys { keys }), &fds)?;
        }
        Ok(())
    }

    /// Has these held no more, from before this returns: what is given back to the driver is to be free when the ledger says so.
    ///
    /// # Errors
    ///
    /// As of [`Link::keep`]; it does not answer.
    pub fn let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        keys.chunks(KEYS_MAX).try_for_each(|some| {
            self.say_let_go(some)?;
            self.hear_let_go()
        })
    }

    /// Says so, of a few.
    ///
    /// # Errors
    ///
    /// As of [`Link::keep`].
    pub fn say_let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        let keys = keys.iter().map(|key| key.message()).collect();
        self.send(v1::To::LetGo(v1::Keys { keys }), &[])
    }

    /// Hears that it is done.
    ///
    /// # Errors
    ///
    /// It does not answer, or says something else.
    pub fn hear_let_go(&self) -> Result<(), KeeperError> {
        match self.channel.receive::<v1::FromKeeper>()?.0.what {
            Some(v1::From::LetGone(_)) => Ok(()),
            Some(v1::From::Refused(text)) => Err(KeeperError::Refused(text)),
            _ => Err(KeeperError::Refused("what it was not asked for came".to_owned())),
        }
    }

    fn send(&self, what: v1::To, fds: &[BorrowedFd<'_>]) -> Result<(), KeeperError> {
        let message = to(what);
        let since = SystemClock::new();
        moment();
        loop {
            match self.channel.send(&message, fds) {
                Err(ChannelError::System(Errno::TOOMANYREFS)) if since.now() < PATIENCE => std::thread::sleep(PAUSE),
                outcome => {
                    moment();
                    return Ok(outcome?);
                }
            }
        }
    }

    /// Its process has ended, as far as that can be seen.
    pub fn has_ended(&self) -> bool {
        self.process().pidfd.is_some_and(|pidfd| has_ended(&pidfd))
    }

    /// It is gone, or has hung up: it says nothing by itself but why it does.
    pub fn is_gone(&self) -> bool {
        is_readable(&self.channel, Duration::ZERO)
    }

    /// Why it has hung up, where it has said so.
    pub fn last_words(&self) -> Option<String> {
        match self.channel.receive_now::<v1::FromKeeper>().ok()?.0.what {
            Some(v1::From::Refused(text)) => Some(text),
            _ => None,
        }
    }

    /// Has it let go of everything. One that a daemon has started ends with that; one that somebody else has started stays for the next.
    ///
    /// # Errors
    ///
    /// It does not answer.
    pub fn end(mut self) -> Result<(), KeeperError> {
        self.send(v1::To::End(v1::Nothing {}), &[])?;
        let heard = self.channel.receive::<v1::FromKeeper>().map(drop);
        if let Some(mut child) = self.child.take() {
            if heard.is_err() {
                // One that does not answer would be waited for without an end.
                let _ = child.kill();
            }
            let _ = child.wait();
        }
        Ok(heard?)
    }

    /// Kills the process, whatever it does, and does not wait for its end. Says whether it could: not one of another pid namespace, or that is not known.
    pub fn say_kill(&mut self) -> bool {
        if let Some(child) = &mut self.child {
            return child.kill().is_ok();
        }
        let Some(pidfd) = self.process().pidfd else { return false };
        let killed = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        matches!(killed, Ok(()) | Err(Errno::SRCH))
    }

    /// This process has started it.
    pub fn is_child(&self) -> bool {
        self.child.is_some()
    }

    /// Tells it to let go of everything, and does not wait for that.
    ///
    /// # Errors
    ///
    /// It has hung up.
    pub fn say_end(&self) -> Result<(), KeeperError> {
        Ok(self.channel.send(&to(v1::To::End(v1::Nothing {})), &[])?)
    }

    /// Hears what it says by itself: whether it has let go of everything, as it was told ([`Link::say_end`]), and whether it has hung up.
    pub fn hear_end(&self) -> (bool, bool) {
        // What it had to say before that is not much.
        const MESSAGES_MAX: usize = 1_000;
        for _ in 0..MESSAGES_MAX {
            if !self.is_gone() {
                break;
            }
            match self.channel.receive_now::<v1::FromKeeper>().map(|(message, _)| message.what) {
                Ok(Some(v1::From::Ended(_))) => return (true, false),
                Ok(_) => {}
                Err(error) => return (false, error == ChannelError::Closed),
            }
        }
        (false, false)
    }
}

/// The keys of what it holds.
fn held_in(message: v1::FromKeeper) -> Result<Vec<v1::Key>, KeeperError> {
    match message.what {
        Some(v1::From::Held(v1::Keys { keys })) => Ok(keys),
        Some(v1::From::Refused(text)) => Err(KeeperError::Refused(text)),
        _ => Err(KeeperError::Refused("what it was not asked for came".to_owned())),
    }
}

/// There is something to read of it, or soon: of a process, that it has ended.
pub(crate) fn is_readable(fd: &impl AsFd, patience: Duration) -> bool {
    let patience = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
}

/// The process of a pidfd has ended. Waits for nothing.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    is_readable(pidfd, Duration::ZERO)
}

impl Drop for Link {
    fn drop(&mut self) {
        // One that has ended is not to stay as a zombie; one that goes on is init's when this process ends.
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
    }
}
