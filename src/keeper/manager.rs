//! A service manager as keeper: systemd's file descriptor store (sd_notify(3), `FDSTORE=1`, and sd_listen_fds(3) for what comes back). What it holds outlives the service, also one that it restarts itself; no process of ours does.
//!
//! A name is what a descriptor is held as; each is sent by itself, as a message has one name for all that it carries. The store is a datagram socket without answers: what the kernel has taken is the manager's, in the order in which it was sent. It must be told not to look at the descriptors (`FDPOLL=0`), or a pidfd would go when its process does.
//!
//! The service needs `Type=notify` or `NotifyAccess=main`, and `FileDescriptorStoreMax=` of as many descriptors as there are chunks and sessions: what is beyond that systemd closes, with a word in its log and none to us.

#![expect(unsafe_code, reason = "takes descriptors that its parent has passed by number")]

use std::ffi::OsString;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::{KeeperError, Key};
use crate::clock::{Clock as _, SystemClock};
use crate::ids::{ChunkId, SessionId};
use crate::mortal::moment;

/// What a service manager says to what it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// `NOTIFY_SOCKET`: where it listens.
    pub socket: Option<OsString>,
    /// `LISTEN_FDNAMES`, of as many as `LISTEN_FDS` says: what it passes has the numbers from 3 on.
    pub names: Vec<String>,
}

/// Of the first descriptor that is passed (sd_listen_fds(3), SD_LISTEN_FDS_START).
const FIRST: i32 = 3;
/// A manager reads what it is sent in this time.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);

/// The store of a service manager.
#[derive(Debug)]
pub struct Manager {
    socket: OwnedFd,
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

/// Takes what was passed to this process. What has no name of ours is closed. To be called once, before anything else opens files.
pub fn take(passed: &Passed) -> Vec<(Key, OwnedFd)> {
    let mut taken = Vec::new();
    for (number, name) in (FIRST..).zip(&passed.names) {
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
                "NOTIFY_SOCKET is not set: this process was not started by a service manager (Type=notify)",
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
        Ok(Manager { socket })
    }

    /// Has these held, from before this returns.
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
            self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", name_of(*key)), &[*fd])
        })
    }

    /// Has these held no more.
    ///
    /// # Errors
    ///
    /// As of [`Manager::keep`].
    pub fn let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        keys.iter().try_for_each(|key| self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}", name_of(*key)), &[]))
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
        for other in ["", "c", "cx", "stored", "w1", "k1", "é"] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }
}
