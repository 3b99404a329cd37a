//! The keeper: a small process that holds descriptors, so that what they are of outlives the daemon: chunks, the processes of sessions, the devices' nodes, the witness of the journal.
//!
//! It knows nothing of what they are. It is exec'ed by a daemon, or started by whoever wants it to outlive more than that (a pod of its own); a daemon that follows finds it by its socket in the state directory, gets copies of everything, and goes on telling it what to hold.
//!
//! | file | what |
//! |---|---|
//! | [`process`] | the process: `stitchd keep` |
//! | [`link`] | the daemon's end |
//! | [`manager`] | a service manager in the place of the process |
//!
//! ## What is promised
//!
//! * What [`Link::keep`] was given is held once it has returned: also where the daemon is killed right then, for a message that the kernel has taken is read before the next daemon is answered.
//! * What [`Link::let_go`] was given is closed once it has returned: memory that nobody else has is free then.
//! * One daemon at a time. A second connection takes the place of the first, after everything that came over that has been read. Which daemon may be there is for the lock on the runtime directory to say.
//! * Only the keeper's own user, and root, may talk to it.
//!
//! Not for: whose what is (the journal says that), and starting itself again (the daemon does).
//!
//! Between versions: messages are protobuf, a key of a kind that the keeper does not know is a key like any other, and what it does not understand it refuses with its version.

pub mod link;
pub mod manager;
pub mod process;

use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use prost::Message;

use crate::error::ErrorKind;
use crate::ids::{ChunkId, SessionId};
use crate::wire::fd_channel::ChannelError;
use crate::wire::peer::{credentials, sees_our_users};

pub use link::Link;

/// The file that the daemon of a directory has locked.
pub const LOCK_NAME: &str = "stitchd.lock";
/// And the one that a keeper has which looks whether it takes another's place.
pub const KEEPERS_LOCK_NAME: &str = "keepers.lock";
/// Where the daemon writes what it does, beside the keeper's socket.
pub const JOURNAL_NAME: &str = "journal";
/// The keeper's socket in a state directory.
pub const SOCKET_NAME: &str = "keeper.sock";
/// How names of keepers' sockets begin that are not found yet: the daemon looks for them, tells each everything, and then gives it the other name. Shorter than that, as a path has a length.
pub const CANDIDATE_PREFIX: &str = "k.";
/// And of those that were found once, and wait until one is wanted again: that a daemon has not started.
pub const RESERVE_PREFIX: &str = "s.";
/// And before anybody listens there.
pub const UNFINISHED_PREFIX: &str = "n.";
/// What this build speaks. A keeper serves daemons that speak the same.
pub const VERSION: u32 = 1;

/// What a descriptor is held as.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Key {
    /// A chunk, as it was exported.
    Chunk(ChunkId),
    /// The process of a session.
    Process(SessionId),
    /// A device's node: while it is open the driver does not take the device down.
    Node(u64),
    /// Where the number of the journal's last frame stands.
    Witness,
    /// Something that a newer daemon has it hold.
    Other(u32, u64),
}

impl Key {
    fn message(self) -> v1::Key {
        let (kind, number) = match self {
            Key::Chunk(chunk) => (1, chunk.0),
            Key::Process(session) => (2, session.0),
            Key::Node(number) => (3, number),
            Key::Witness => (4, 0),
            Key::Other(kind, number) => (kind, number),
        };
        v1::Key { kind, number }
    }

    fn of(message: v1::Key) -> Key {
        match (message.kind, message.number) {
            (1, number) => Key::Chunk(ChunkId(number)),
            (2, number) => Key::Process(SessionId(number)),
            (3, number) => Key::Node(number),
            (4, 0) => Key::Witness,
            (kind, number) => Key::Other(kind, number),
        }
    }
}

/// Why there is no keeper, or none that can be used.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The connection to it.
    #[error("the keeper does not answer")]
    Channel(#[from] ChannelError),
    /// It is there, and says nothing.
    #[error("the keeper{} does not answer: it is stopped, or hangs", which(*listener))]
    Silent {
        /// Its process, where the kernel says which.
        listener: Option<i32>,
    },
    /// It says no.
    #[error("the keeper refuses: {0}")]
    Refused(String),
    /// It says something else.
    #[error("what answers at {0} is no keeper of stitchd")]
    NoKeeper(PathBuf),
    /// It may come to hold less than it is told to.
    #[error(
        "it may open {keeper} files and the daemon {daemon}: give it as many (LimitNOFILE, ulimit -n), or the daemon fewer"
    )]
    TooFewFiles {
        /// How many it may open.
        keeper: u64,
        /// And how many the daemon.
        daemon: u64,
    },
    /// It cannot be started, or cannot serve.
    #[error("cannot {action}")]
    System {
        /// What.
        action: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Which process, and what may help where it is only stopped.
fn which(listener: Option<i32>) -> String {
    listener.map_or_else(String::new, |pid| {
        format!(" (process {pid}; `kill -CONT {pid}` has it go on where it is stopped)")
    })
}

impl KeeperError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            KeeperError::Channel(error) => error.kind(),
            KeeperError::Silent { .. } => ErrorKind::Unavailable,
            KeeperError::Refused(_) => ErrorKind::Unsupported,
            KeeperError::NoKeeper(_) | KeeperError::TooFewFiles { .. } => ErrorKind::Invalid,
            KeeperError::System { .. } => ErrorKind::Unavailable,
        }
    }

    fn system(action: &'static str) -> impl FnOnce(std::io::Error) -> KeeperError {
        move |source| KeeperError::System { action, source }
    }
}

/// What goes between the two.
mod v1 {
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Key {
        #[prost(uint32, tag = "1")]
        pub(super) kind: u32,
        #[prost(uint64, tag = "2")]
        pub(super) number: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ToKeeper {
        #[prost(oneof = "To", tags = "1, 2, 3, 4, 5")]
        pub(super) what: Option<To>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum To {
        #[prost(message, tag = "1")]
        Hello(Hello),
        /// With a descriptor for each.
        #[prost(message, tag = "2")]
        Keep(Keys),
        /// Answered when they are closed.
        #[prost(message, tag = "3")]
        LetGo(Keys),
        /// Answered with everything that is held.
        #[prost(message, tag = "4")]
        List(Nothing),
        /// Answered when nothing is held any more; then the keeper ends.
        #[prost(message, tag = "5")]
        End(Nothing),
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Hello {
        #[prost(uint32, tag = "1")]
        pub(super) version: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Keys {
        #[prost(message, repeated, tag = "1")]
        pub(super) keys: Vec<Key>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Nothing {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct FromKeeper {
        #[prost(oneof = "From", tags = "1, 2, 3, 4, 5")]
        pub(super) what: Option<From>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum From {
        #[prost(message, tag = "1")]
        Welcome(Welcome),
        /// With a descriptor for each; the last one has none.
        #[prost(message, tag = "2")]
        Held(Keys),
        #[prost(string, tag = "3")]
        Refused(String),
        #[prost(message, tag = "4")]
        Ended(Nothing),
        #[prost(message, tag = "5")]
        LetGone(Nothing),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Welcome {
        #[prost(uint32, tag = "1")]
        pub(super) version: u32,
        #[prost(uint32, tag = "2")]
        pub(super) pid: u32,
        /// Where it listens beside the one that is found: a file in the state directory, as long as nobody has it found.
        #[prost(string, tag = "3")]
        pub(super) name: String,
        /// How many files it may have open.
        #[prost(uint64, tag = "4")]
        pub(super) files_max: u64,
        /// No daemon has started it.
        #[prost(bool, tag = "5")]
        pub(super) stays: bool,
        /// Tells it from all others, where the kernel does not.
        #[prost(uint64, tag = "6")]
        pub(super) id: u64,
    }
}

/// How many files this process may have open.
pub fn files_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

fn to(what: v1::To) -> v1::ToKeeper {
    v1::ToKeeper { what: Some(what) }
}

fn from(what: v1::From) -> v1::FromKeeper {
    v1::FromKeeper { what: Some(what) }
}

/// The process at the other end is of this user, or root: whoever listened there, or connected. Root of another user namespace is not root, as far as that can be seen; where
/// processes do not see each other (containers) it is the directory that keeps others out.
fn is_one_of_us(socket: BorrowedFd<'_>) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    credentials(socket).is_some_and(|(pid, uid)| (uid == ours || uid == 0) && sees_our_users(pid) != Some(false))
}

/// Makes the directory of the keeper's socket and of the journal where there is none: for its owner alone.
///
/// # Errors
///
/// The system's.
pub fn prepare(state_dir: &Path) -> Result<(), KeeperError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir);
    made.map_err(KeeperError::system("make the directory of the keeper's socket and of the journal (--state-dir)"))?;
    let mode = std::fs::metadata(state_dir).map_err(KeeperError::system("look at the state directory"))?.mode();
    if mode & 0o002 != 0 && mode & 0o1000 == 0 {
        let text = format!("its mode is {:o}: everybody may write there, and take away what is in it", mode & 0o7777);
        return Err(KeeperError::system("use the state directory")(std::io::Error::other(text)));
    }
    Ok(())
}

/// A name that only a keeper's socket has.
pub fn is_own_name(name: &str) -> bool {
    const DIGITS: usize = 8;
    let number =
        [CANDIDATE_PREFIX, RESERVE_PREFIX, UNFINISHED_PREFIX].iter().find_map(|prefix| name.strip_prefix(prefix));
    number.is_some_and(|number| number.len() == DIGITS && number.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// A message of keys fits.
const KEYS_MAX: usize = 2_048;
const _: () = assert!(KEYS_MAX * 24 < crate::limits::CHUNK_MESSAGE_LEN_MAX);

/// Bytes as a message to the keeper: for tests that feed it anything.
pub fn understands(bytes: &[u8]) -> bool {
    v1::ToKeeper::decode(bytes).is_ok_and(|message| message.what.is_some())
}

#[cfg(test)]
mod tests;
