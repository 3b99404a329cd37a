//! The daemon's end of a keeper.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{KEYS_MAX, KeeperError, Key, SOCKET_NAME, VERSION, is_one_of_us, to, v1};
use crate::clock::{Clock as _, SystemClock};
use crate::limits;
use crate::mortal::moment;
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::peer::{Peer, unread_bytes};

/// How long a keeper may take for a message: it does nothing but read them.
const PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors on their way are few for a moment.
const PAUSE: Duration = Duration::from_millis(1);

/// A connection to a keeper.
#[derive(Debug)]
pub struct Link {
    channel: FdChannel,
    pid: u32,
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
        Link::call(state_dir, patience)?.map(|link| link.greeted(&state_dir.join(SOCKET_NAME))).transpose()
    }

    /// The same, which has said hello and not heard anything yet.
    ///
    /// # Errors
    ///
    /// As of [`Link::connect`].
    pub fn call(state_dir: &Path, patience: Duration) -> Result<Option<Link>, KeeperError> {
        let path = state_dir.join(SOCKET_NAME);
        match FdChannel::connect(&path, patience) {
            // Whoever listens there gets every descriptor.
            Ok(channel) if !is_one_of_us(channel.as_fd()) => Err(KeeperError::NoKeeper(path)),
            Ok(channel) => Link::over(channel, None).map(Some),
            Err(ChannelError::Connect(Errno::NOENT | Errno::CONNREFUSED)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn over(channel: FdChannel, child: Option<Child>) -> Result<Link, KeeperError> {
        let link = Link { channel, pid: 0, child };
        match link.channel.send(&to(v1::To::Hello(v1::Hello { version: VERSION })), &[]) {
            Ok(()) => Ok(link),
            Err(error) => {
                link.leave_nothing();
                Err(error.into())
            }
        }
    }

    /// One that was started for this and is of no use is not left behind.
    fn leave_nothing(self) {
        if self.child.is_some() {
            self.kill();
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
            self.pid = welcome.pid;
            return Ok(self);
        }
        self.leave_nothing();
        match heard? {
            Some(v1::From::Refused(text)) => Err(KeeperError::Refused(text)),
            _ => Err(KeeperError::NoKeeper(path.to_owned())),
        }
    }

    /// It has not read all that it was sent.
    pub fn is_behind(&self) -> bool {
        unread_bytes(self.channel.as_fd()).is_ok_and(|bytes| bytes > 0)
    }

    /// Which process it is, as it says itself.
    pub fn pid(&self) -> u32 {
        self.pid
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
        loop {
            let (message, fds, is_cut) = self.channel.receive_some::<v1::FromKeeper>()?;
            let Some(v1::From::Held(v1::Keys { keys })) = message.what else {
                return Err(KeeperError::Refused("what it was not asked for came".to_owned()));
            };
            if is_cut || keys.len() != fds.len() {
                return Err(ChannelError::DescriptorsLost.into());
            }
            if keys.is_empty() {
                return Ok(held);
            }
            held.extend(keys.into_iter().map(Key::of).zip(fds));
        }
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

    /// It is gone, or has hung up: it says nothing by itself but why it does.
    pub fn is_gone(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.channel, PollFlags::IN)];
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
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
            // It has said that it ends.
            let _ = child.wait();
        }
        Ok(heard?)
    }

    /// Ends the process, whatever it does: before another takes its place.
    pub fn kill(mut self) {
        match self.child.take() {
            Some(mut child) => {
                // It may have ended already.
                let _ = child.kill();
                let _ = child.wait();
            }
            None => {
                if let Some(pidfd) = Peer::of(self.channel.as_fd()).pidfd {
                    let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
                }
            }
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // One that has ended is not to stay as a zombie; one that goes on is init's when this process ends.
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
    }
}
