//! A service manager as keeper: systemd's file descriptor store (sd_notify(3), `FDSTORE=1`, and sd_listen_fds(3) for what comes back). What it holds outlives the service, also one that it restarts itself; no process of ours does.
//!
//! A name is what a descriptor is held as; each is sent by itself, as a message has one name for all that it carries. The store is a datagram socket without answers: what the kernel has taken is the manager's, in the order in which it was sent. It must be told not to look at the descriptors (`FDPOLL=0`), or a pidfd would go when its process does.
//!
//! The service needs `Type=notify` or `NotifyAccess=main`, and `FileDescriptorStoreMax=` of as many descriptors as there are chunks and sessions: what is beyond that systemd closes, with a word in its log and none to us. With `Type=notify` it waits for [`say_ready`].

#![expect(unsafe_code, reason = "takes descriptors that its parent has passed by number")]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::link::is_readable;
use super::{KeeperError, Key};
use crate::clock::{Clock as _, SystemClock};
use crate::ids::{ChunkId, SessionId};
use crate::mortal::moment;

/// What a service manager says to what it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// `NOTIFY_SOCKET`: where it listens.
    pub socket: Option<OsString>,
    /// `LISTEN_FDNAMES`, of as many as `LISTEN_FDS` says: what it passes has the numbers from 3 on. Empty where it was taken.
    pub names: Vec<String>,
    /// `WATCHDOG_USEC`: it wants to hear that often that this process is well, or ends it and starts another.
    pub watchdog: Option<Duration>,
}

/// Sockets on which a service manager listens for this process (systemd.socket(5)): it has them while no daemon is there, so that who connects then waits and is served by the next.
#[derive(Debug, Default)]
pub struct Sockets {
    /// `ListenStream=` with a path.
    pub stream: Option<OwnedFd>,
    /// `ListenSequentialPacket=`.
    pub packets: Option<OwnedFd>,
    /// `ListenStream=` with a port.
    pub tcp: Option<OwnedFd>,
}

/// Of the first descriptor that is passed (sd_listen_fds(3), SD_LISTEN_FDS_START).
const FIRST: i32 = 3;
/// A manager reads what it is sent in this time.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);

/// All names of what is passed together are one string of a program's environment, which Linux lets be 128 KiB long: with a longer one the manager could not start the next daemon (execve(2), MAX_ARG_STRLEN).
const NAMES_LEN_MAX: usize = 120 << 10;
/// So many chunks find room there, with the sessions beside them, before ten million were ever made.
pub const CHUNKS_MAX: u64 = 12_000;

/// The store of a service manager.
#[derive(Debug)]
pub struct Manager {
    socket: OwnedFd,
    held: Mutex<Held>,
}

/// What is in the store, by its own count.
#[derive(Debug, Default)]
struct Held {
    keys: BTreeSet<Key>,
    /// Bytes of their names, with what stands between them.
    names_len: usize,
    is_full_said: bool,
}

impl Held {
    /// False where there is no room for its name.
    fn add(&mut self, key: Key) -> bool {
        let len = name_of(key).len() + 1;
        if self.keys.contains(&key) {
            return true;
        }
        // What a daemon cannot go on without has room in any case.
        if matches!(key, Key::Chunk(_)) && self.names_len + len > NAMES_LEN_MAX {
            return false;
        }
        self.names_len += len;
        self.keys.insert(key)
    }

    fn remove(&mut self, key: Key) {
        if self.keys.remove(&key) {
            self.names_len -= name_of(key).len() + 1;
        }
    }
}

/// What a descriptor is called in the store.
fn name_of(key: Key) -> String {
    match key {
        Key::Chunk(chunk) => format!("c{}", chunk.0),
        Key::Process(session) => format!("p{}", session.0),
        Key::Node(number) => format!("n{number}"),
        Key::Witness => "w".to_owned(),
        Key::Other(kind, number) => format!("k{kind}-{number}"),
    }
}

/// What is called so; nothing where it is none of ours.
fn key_of(name: &str) -> Option<Key> {
    let (kind, number) = name.split_at_checked(1)?;
    let number = || number.parse().ok();
    match kind {
        "c" => Some(Key::Chunk(ChunkId(number()?))),
        "p" => Some(Key::Process(SessionId(number()?))),
        "n" => Some(Key::Node(number()?)),
        "w" if name.len() == 1 => Some(Key::Witness),
        "k" => {
            let (kind, number) = name.get(1..)?.split_once('-')?;
            Some(Key::Other(kind.parse().ok()?, number.parse().ok()?))
        }
        _ => None,
    }
}

/// What this process starts is not to have what was passed to it. To be called before anything is started, and before [`take`].
pub fn close_on_exec(passed: &Passed) {
    for (number, _) in (FIRST..).zip(&passed.names) {
        // SAFETY:
        // * whoever started this process says that this number is an open descriptor, and nothing here closes it meanwhile;
        // * if that is a lie the call is refused, or closes on exec what another part of this process has opened, which it does by itself.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        // Not open.
        let _ = rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC);
    }
}

/// Takes those of what was passed that listen, each told by its kind: one unit may have them all, and they have its name then.
pub fn take_sockets(passed: &mut Passed) -> Sockets {
    let mut sockets = Sockets::default();
    for (number, name) in (FIRST..).zip(&mut passed.names) {
        // SAFETY: as in `close_on_exec`.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let listens = key_of(name).is_none() && socket_acceptconn(fd).is_ok_and(|listens| listens);
        let place = match (listens, socket_domain(fd), socket_type(fd)) {
            (true, Ok(AddressFamily::UNIX), Ok(SocketType::STREAM)) => &mut sockets.stream,
            (true, Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => &mut sockets.packets,
            (true, Ok(AddressFamily::INET | AddressFamily::INET6), Ok(SocketType::STREAM)) => &mut sockets.tcp,
            _ => continue,
        };
        if place.is_none() {
            // SAFETY: as in `take`, which leaves it alone: its name is gone.
            *place = Some(unsafe { OwnedFd::from_raw_fd(number) });
            name.clear();
        }
    }
    sockets
}

/// Says that this process is well, where whoever started it wants to hear that (sd_watchdog_enabled(3)).
///
/// # Errors
///
/// It cannot be reached.
pub fn say_alive(passed: &Passed) -> Result<(), KeeperError> {
    Manager::connect(passed)?.send("WATCHDOG=1", &[])
}

/// Says that this process serves, where whoever started it waits for that (sd_notify(3), `READY=1`).
///
/// # Errors
///
/// It cannot be reached.
pub fn say_ready(passed: &Passed) -> Result<(), KeeperError> {
    match passed.socket {
        Some(_) => Manager::connect(passed)?.send("READY=1", &[]),
        None => Ok(()),
    }
}

/// Takes what was passed to this process. What has no name of ours is closed. To be called once, before anything else opens files.
pub fn take(passed: &Passed) -> Vec<(Key, OwnedFd)> {
    let mut taken = Vec::new();
    for (number, name) in (FIRST..).zip(&passed.names).filter(|(_, name)| !name.is_empty()) {
        // SAFETY:
        // * whoever started this process says that this number is an open descriptor and ours alone; nothing here has used it before;
        // * if that is a lie it is closed as one that is not open, which changes nothing, or is refused when it is used.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        if rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).is_err() {
            // Not open: not to be closed either, another may have the number by then.
            std::mem::forget(fd);
            continue;
        }
        if let Some(key) = key_of(name) {
            taken.push((key, fd));
        }
    }
    taken
}

/// Closes what was passed to this process, and has the manager hold it no more: somebody else keeps.
///
/// # Errors
///
/// The manager cannot be reached.
pub fn give_up(passed: &Passed) -> Result<(), KeeperError> {
    let keys: Vec<Key> = take(passed).into_iter().map(|(key, _)| key).collect();
    if keys.is_empty() { Ok(()) } else { Manager::connect(passed)?.let_go(&keys) }
}

impl Manager {
    /// The manager that has started this process.
    ///
    /// # Errors
    ///
    /// There is none, or it cannot be connected to.
    pub fn connect(passed: &Passed) -> Result<Manager, KeeperError> {
        let none = || {
            std::io::Error::new(
                std::io::ErrorKind::NotFound,
                "NOTIFY_SOCKET is not set: no service manager has started this process (Type=notify); keeper = \"process\" needs none",
            )
        };
        let path = passed.socket.as_ref().ok_or_else(none).map_err(KeeperError::system("find the service manager"))?;
        let bytes = path.as_bytes();
        let address = match bytes.strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name),
            None => SocketAddrUnix::new(bytes),
        };
        let connect = || -> Result<OwnedFd, Errno> {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
            rustix::net::connect(&socket, &address?)?;
            Ok(socket)
        };
        let socket =
            connect().map_err(|errno| errno.into()).map_err(KeeperError::system("reach the service manager"))?;
        Ok(Manager { socket, held: Mutex::default() })
    }

    /// What it held before this process told it anything.
    pub fn has_held(&self, keys: impl Iterator<Item = Key>) {
        let mut held = self.held();
        for key in keys {
            held.add(key);
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has these held, from before this returns, but for chunks that it has no room for: of those only their holders have something when this process dies.
    ///
    /// # Errors
    ///
    /// The manager does not read.
    pub fn keep(&self, fds: &[(Key, BorrowedFd<'_>)]) -> Result<(), KeeperError> {
        fds.iter().try_for_each(|(key, fd)| {
            // There is one of each name: what has the same name goes first.
            if *key == Key::Witness {
                self.let_go(&[*key])?;
            }
            if !self.add(*key) {
                return Ok(());
            }
            self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", name_of(*key)), &[*fd])
        })
    }

    /// Has these held no more, from before this returns.
    ///
    /// # Errors
    ///
    /// As of [`Manager::keep`]; it does not say that it has done it.
    pub fn let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        if keys.is_empty() {
            return Ok(());
        }
        {
            let mut held = self.held();
            keys.iter().for_each(|key| held.remove(*key));
        }
        keys.iter().try_for_each(|key| self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}", name_of(*key)), &[]))?;
        self.settle()
    }

    /// Returns when it has done all that it was told (sd_notify_barrier(3): it closes what came with that when it comes to it; one that does not know the word closes what it does not know, too).
    ///
    /// # Errors
    ///
    /// It does not say so in time.
    pub fn settle(&self) -> Result<(), KeeperError> {
        let action = "hear that the service manager has done what it was told";
        let error = |errno: Errno| KeeperError::System { action, source: errno.into() };
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(error)?;
        self.send("BARRIER=1", &[theirs.as_fd()])?;
        drop(theirs);
        // It is at its end then: nobody writes anything.
        if is_readable(&ours, PATIENCE) { Ok(()) } else { Err(error(Errno::TIMEDOUT)) }
    }

    fn add(&self, key: Key) -> bool {
        let mut held = self.held();
        let has_room = held.add(key);
        if !has_room && !std::mem::replace(&mut held.is_full_said, true) {
            tracing::warn!(
                held = held.keys.len(),
                "the service manager's store has no room for more names: what else there is, is lost to the next daemon but for who has it mapped (use a keeper that is a process, or larger chunks)"
            );
        }
        has_room
    }

    fn send(&self, text: &str, fds: &[BorrowedFd<'_>]) -> Result<(), KeeperError> {
        let since = SystemClock::new();
        moment();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                // There is room for one.
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let sent = rustix::net::sendmsg(
                self.socket.as_fd(),
                &[IoSlice::new(text.as_bytes())],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(_) => {
                    moment();
                    return Ok(());
                }
                Err(Errno::TOOMANYREFS | Errno::INTR) if since.now() < PATIENCE => std::thread::sleep(PAUSE),
                Err(errno) => return Err(KeeperError::system("tell the service manager")(errno.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_a_name_and_no_other_name_is_one() {
        for key in [
            Key::Chunk(ChunkId(17)),
            Key::Process(SessionId(3)),
            Key::Node(0),
            Key::Witness,
            Key::Other(9, 5),
            Key::Chunk(ChunkId(u64::MAX)),
        ] {
            let name = name_of(key);
            assert_eq!(key_of(&name), Some(key), "{name}");
            // systemd takes names of printable characters without colons.
            assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') && name.len() < 255);
        }
        // A store has room for so many chunks, and for all else beside them.
        let mut held = Held::default();
        let most = (1..).take_while(|chunk| held.add(Key::Chunk(ChunkId(*chunk)))).count();
        assert!((10_000..20_000).contains(&most) && held.add(Key::Witness) && held.add(Key::Chunk(ChunkId(1))));
        assert!(!held.add(Key::Chunk(ChunkId(u64::MAX))));
        held.remove(Key::Chunk(ChunkId(9_999)));
        held.remove(Key::Chunk(ChunkId(9_998)));
        held.remove(Key::Chunk(ChunkId(9_997)));
        assert!(held.add(Key::Chunk(ChunkId(99_999))));
        let mut held = Held::default();
        assert!((0..CHUNKS_MAX).all(|chunk| held.add(Key::Chunk(ChunkId(1_000_000 + chunk)))));
        for other in ["", "c", "cx", "stored", "w1", "k1", "é"] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }
}
