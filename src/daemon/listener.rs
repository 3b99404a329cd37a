//! The daemon's doors: the runtime directory with its lock, the two Unix sockets, the HTTP port.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tonic::transport::server::Connected;

use super::config::Config;
use super::connections::{Connections, Seat};
use crate::error::ErrorKind;
use crate::keeper::manager::Sockets;
use crate::keeper::process::inode_of;
use crate::keeper::{self, KeeperError, LOCK_NAME};
use crate::session::locate::SOCKET_NAME;
use crate::wire::peer::{self, Peer};

/// The name of the chunk socket in a runtime directory.
pub(super) const CHUNK_SOCKET_NAME: &str = "chunks.sock";
/// unix(7): `sun_path` less the zero at its end.
const SOCKET_PATH_LEN_MAX: usize = 107;

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The directory cannot be made or written to.
    #[error("cannot use the runtime directory {path}; choose another with --runtime-dir")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The journal's directory cannot be made or written to.
    #[error("cannot use the state directory {path}; choose another with --state-dir")]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: KeeperError,
    },
    /// Another daemon has it.
    #[error(
        "another stitchd daemon (pid {pid}) serves {path}; stop it, or choose another --runtime-dir (and --state-dir, if one is given)"
    )]
    SecondDaemon {
        /// Where.
        path: PathBuf,
        /// Which, as it has written itself.
        pid: String,
    },
    /// The directory's name leaves no room for the sockets'.
    #[error("{path} is longer than a socket's path may be, {max} bytes; choose a shorter --runtime-dir", max = SOCKET_PATH_LEN_MAX)]
    TooLong {
        /// The socket.
        path: PathBuf,
    },
    /// What a service manager listens on is not where clients look.
    #[error(
        "the service manager listens on {path}, and clients look at {expected}: have its socket unit and --runtime-dir name the same directory"
    )]
    Passed {
        /// Its.
        path: PathBuf,
        /// Ours.
        expected: PathBuf,
    },
    /// Somebody listens already who is no daemon: clients would not find him any more.
    #[error(
        "somebody listens on {path} already, and is no daemon: where it is a service manager's socket unit, have that start the daemon (systemctl start stitchd), or end it (systemctl stop stitchd.socket)"
    )]
    Listened {
        /// Where.
        path: PathBuf,
    },
    /// A socket cannot be made.
    #[error("cannot listen on {what}")]
    Socket {
        /// Which.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ListenError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ListenError::SecondDaemon { .. } | ListenError::Listened { .. } => ErrorKind::Conflict,
            ListenError::Directory { .. }
            | ListenError::State { .. }
            | ListenError::TooLong { .. }
            | ListenError::Passed { .. }
            | ListenError::Socket { .. } => ErrorKind::Invalid,
        }
    }
}

/// Everything that is open to the outside.
#[derive(Debug)]
pub struct Listeners {
    pub(super) lock: RuntimeLock,
    /// Where the journal is, if that is another directory: two daemons would take each other over.
    pub(super) state_lock: Option<RuntimeLock>,
    pub(super) grpc: UnixListener,
    pub(super) chunks: OwnedFd,
    pub(super) http: Option<TcpListener>,
}

/// The right to serve from a runtime directory. As long as it lives no other daemon serves there; when it goes the sockets go, too.
#[derive(Debug)]
pub(super) struct RuntimeLock {
    directory: PathBuf,
    file: OwnedFd,
    /// Those that this daemon has bound, with the files that they are.
    sockets: Vec<(PathBuf, Option<u64>)>,
    /// How often in a row somebody else had the lock that was removed here.
    contested: u32,
}

/// A daemon that has lost its directory.
#[derive(Debug, thiserror::Error)]
pub enum Ousted {
    /// The lock was removed, and somebody else has the next.
    #[error(
        "the lock of {0} was removed, and another daemon has begun there: this one leaves everything to it, and ends"
    )]
    Another(PathBuf),
    /// Nobody finds it.
    #[error(
        "{0} was removed, or is another's: nobody finds this daemon any more, and it ends; the next takes over what there is"
    )]
    Unreachable(PathBuf),
}

impl Drop for RuntimeLock {
    fn drop(&mut self) {
        for (socket, file) in &self.sockets {
            // Somebody may have removed it already, and have another there.
            if file.is_some() && inode_of(socket) == *file {
                let _ = std::fs::remove_file(socket);
            }
        }
    }
}

impl Listeners {
    /// Takes the runtime directory and opens what the configuration asks for, but for what a service manager has opened. Must be called inside a tokio runtime.
    pub async fn open(config: &Config, passed: Sockets) -> Result<Listeners, ListenError> {
        for name in [SOCKET_NAME, CHUNK_SOCKET_NAME] {
            let path = config.runtime_dir.join(name);
            if path.as_os_str().len() > SOCKET_PATH_LEN_MAX {
                return Err(ListenError::TooLong { path });
            }
        }
        let is_for_all = config.socket_mode & 0o002 != 0;
        let mut lock = RuntimeLock::take(&config.runtime_dir, config.socket_group, is_for_all)?;
        let state_dir = Some(config.state_dir()).filter(|dir| *dir != config.runtime_dir);
        let state_lock = state_dir.map(|dir| {
            let unusable = |error: KeeperError| ListenError::State { path: dir.to_owned(), source: error };
            keeper::prepare(dir).map_err(unusable)?;
            let is_same = std::fs::canonicalize(dir).ok() == std::fs::canonicalize(&config.runtime_dir).ok();
            if is_same { Ok(None) } else { RuntimeLock::take(dir, None, false).map(Some) }
        });
        let state_lock = state_lock.transpose()?.flatten();
        let grpc = match passed.stream {
            Some(passed) => {
                let path = check_passed(&passed, &config.runtime_dir.join(SOCKET_NAME))?;
                UnixListener::from_std(passed.into()).map_err(socket(&path))?
            }
            None => {
                let path = lock.socket_path(&config.runtime_dir, SOCKET_NAME)?;
                let grpc = UnixListener::bind(&path).map_err(socket(&path))?;
                set_access(&path, config)?;
                grpc
            }
        };
        let chunks = match passed.packets {
            Some(passed) => {
                check_passed(&passed, &config.runtime_dir.join(CHUNK_SOCKET_NAME))?;
                passed
            }
            None => {
                let path = lock.socket_path(&config.runtime_dir, CHUNK_SOCKET_NAME)?;
                let chunks = listen_for_chunks(&path).map_err(|errno| socket(&path)(errno.into()))?;
                set_access(&path, config)?;
                chunks
            }
        };
        let http = match (passed.tcp, config.http) {
            (Some(passed), _) => Some(passed_http(passed)?),
            (None, Some(address)) => Some(listen_for_http(address).await?),
            (None, None) => None,
        };
        for (path, file) in &mut lock.sockets {
            *file = inode_of(path);
        }
        Ok(Listeners { lock, state_lock, grpc, chunks, http })
    }

    /// Where HTTP is served, with the port that the system chose if it was to choose.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().and_then(|listener| listener.local_addr().ok())
    }
}

impl RuntimeLock {
    /// Where sockets are for all (`is_for_all`), so is a directory that is made for them.
    fn take(directory: &Path, group: Option<u32>, is_for_all: bool) -> Result<RuntimeLock, ListenError> {
        let unusable = |source: std::io::Error| ListenError::Directory { path: directory.to_owned(), source };
        if !directory.exists() {
            if let Some(parent) = directory.parent() {
                std::fs::create_dir_all(parent).map_err(unusable)?;
            }
            // Nobody but its owner and its group finds the sockets in it, unless everybody is to.
            match std::fs::DirBuilder::new().mode(if is_for_all { 0o755 } else { 0o750 }).create(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(unusable(error)),
                _ => {}
            }
        }
        // Whoever may write there may put a socket of his own in the place of the daemon's.
        let mode = std::fs::metadata(directory).map_err(unusable)?.mode();
        if mode & 0o002 != 0 && mode & 0o1000 == 0 {
            let text = format!(
                "its mode is {:o}: everybody may write there, and put other sockets in the place of the daemon's",
                mode & 0o7777
            );
            return Err(unusable(std::io::Error::other(text)));
        }
        if is_for_all && mode & 0o001 == 0 {
            tracing::warn!(
                path = %directory.display(),
                mode = %format_args!("{:o}", mode & 0o7777),
                "`socket_mode` is for everybody, and this directory lets nobody but its owner and its group to the sockets: chmod o+x"
            );
        }
        if group.is_some() {
            std::os::unix::fs::chown(directory, None, group).map_err(unusable)?;
            // A keeper that was first has made it for its owner alone.
            let passable = std::fs::Permissions::from_mode((mode | 0o050) & 0o7777);
            std::fs::set_permissions(directory, passable).map_err(unusable)?;
        }
        let path = directory.join(LOCK_NAME);
        let file = open_lock(&path).map_err(|errno| unusable(errno.into()))?;
        match lock(&file) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let pid = std::fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
                return Err(ListenError::SecondDaemon { path: directory.to_owned(), pid });
            }
            Err(errno) => return Err(unusable(errno.into())),
        }
        sign(&file).map_err(|errno| unusable(errno.into()))?;
        Ok(RuntimeLock { directory: directory.to_owned(), file, sockets: Vec::new(), contested: 0 })
    }

    /// Looks whether the directory is this daemon's still, and locks the file that is there by now, where that which was locked is not: whoever removes it would let another daemon in, or a keeper that
    /// takes this one for gone.
    ///
    /// # Errors
    ///
    /// It is not.
    pub(super) fn look(&mut self) -> Result<(), Ousted> {
        // A keeper has it for a moment; a daemon stays.
        const CONTESTED_MAX: u32 = 10;
        if let Some((path, _)) = self.sockets.iter().find(|(path, file)| inode_of(path) != *file) {
            return Err(Ousted::Unreachable(path.clone()));
        }
        if self.is_own() {
            return Ok(());
        }
        let path = self.directory.join(LOCK_NAME);
        let renewed = open_lock(&path).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            sign(&file)?;
            Ok(file)
        });
        match renewed {
            Ok(file) => {
                tracing::warn!(path = %path.display(), "the lock of this directory was removed: this daemon has another");
                (self.file, self.contested) = (file, 0);
            }
            Err(Errno::WOULDBLOCK) => {
                self.contested += 1;
                if self.contested >= CONTESTED_MAX {
                    return Err(Ousted::Another(self.directory.clone()));
                }
            }
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "the lock of this directory was removed, and this daemon cannot have another; it is tried again");
            }
        }
        Ok(())
    }

    /// The file of the lock is the one that was locked: nobody else is there.
    pub(super) fn is_own(&self) -> bool {
        let own = rustix::fs::fstat(&self.file).map(|stat| stat.st_ino);
        own.is_ok_and(|own| inode_of(&self.directory.join(LOCK_NAME)) == Some(own))
    }

    /// Somebody else has the lock, for a moment or for good.
    pub(super) fn is_contested(&self) -> bool {
        self.contested > 0
    }

    /// The path of a socket, free to bind: with the lock held, one that is there was left behind, unless a service manager listens on it.
    fn socket_path(&mut self, directory: &Path, name: &str) -> Result<PathBuf, ListenError> {
        let path = directory.join(name);
        if is_listened_on(&path) {
            return Err(ListenError::Listened { path });
        }
        match std::fs::remove_file(&path) {
            Ok(()) => tracing::debug!(path = %path.display(), "removed a socket that a daemon had left behind"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(socket(&path)(source)),
        }
        self.sockets.push((path.clone(), None));
        Ok(path)
    }
}

/// Somebody listens on a socket, and goes on with that.
fn is_listened_on(path: &Path) -> bool {
    // A daemon that was killed has lost its lock, perhaps, and not yet its sockets.
    const TIMES: u32 = 25;
    const PAUSE: Duration = Duration::from_millis(20);
    for _ in 0..TIMES {
        if !matches!(peer::is_bound(path), Ok(true)) {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// For its owner alone: whoever can open it can lock it, and keep the daemon that follows from beginning.
fn open_lock(path: &Path) -> Result<OwnedFd, Errno> {
    let mode = Mode::from(0o600);
    let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC, mode)?;
    // One of before may be another user's.
    let _ = rustix::fs::fchmod(&file, mode);
    Ok(file)
}

/// Whoever is kept out reads by whom.
fn sign(file: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::ftruncate(file, 0)?;
    rustix::io::pwrite(file, format!("{}\n", std::process::id()).as_bytes(), 0)?;
    Ok(())
}

/// Locks a directory's file. A keeper that takes another's place has it for a moment.
fn lock(file: &OwnedFd) -> Result<(), Errno> {
    // A keeper that takes over from another keeps daemons away as long as that takes.
    const TIMES: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(20);
    let mut left = TIMES;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if left > 0 => std::thread::sleep(PAUSE),
            locked => return locked,
        }
        left -= 1;
    }
}

fn socket(path: &Path) -> impl FnOnce(std::io::Error) -> ListenError {
    let what = path.display().to_string();
    move |source| ListenError::Socket { what, source }
}

/// Who may connect.
fn set_access(path: &Path, config: &Config) -> Result<(), ListenError> {
    if config.socket_group.is_some() {
        std::os::unix::fs::chown(path, None, config.socket_group).map_err(socket(path))?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(config.socket_mode)).map_err(socket(path))
}

fn listen_for_chunks(path: &Path) -> Result<OwnedFd, Errno> {
    const BACKLOG: i32 = 128;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// A socket that a service manager has opened waits for nobody from here on, and is where clients look.
fn check_passed(passed: &OwnedFd, expected: &Path) -> Result<PathBuf, ListenError> {
    let named = || -> Result<PathBuf, Errno> {
        rustix::io::ioctl_fionbio(passed, true)?;
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(passed)?)?;
        Ok(PathBuf::from(std::ffi::OsStr::from_bytes(address.path_bytes().unwrap_or_default())))
    };
    let path = named().map_err(|errno| socket(expected)(errno.into()))?;
    // One whose file is gone is found by nobody either.
    let is_there =
        std::fs::canonicalize(expected).is_ok_and(|there| std::fs::canonicalize(&path).is_ok_and(|path| path == there));
    if is_there { Ok(path) } else { Err(ListenError::Passed { path, expected: expected.to_owned() }) }
}

fn passed_http(passed: OwnedFd) -> Result<TcpListener, ListenError> {
    let error = |source| ListenError::Socket { what: "the HTTP port of the service manager".to_owned(), source };
    rustix::io::ioctl_fionbio(&passed, true).map_err(|errno| error(errno.into()))?;
    TcpListener::from_std(passed.into()).map_err(error)
}

async fn listen_for_http(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let error = |source: std::io::Error| {
        let hint = match source.kind() {
            std::io::ErrorKind::AddrInUse => " (another process has the port: `ss -ltnp`; --http says which)",
            std::io::ErrorKind::AddrNotAvailable => " (this machine has no such address: `ip address`)",
            _ => "",
        };
        ListenError::Socket { what: format!("http://{address}{hint}"), source }
    };
    TcpListener::bind(address).await.map_err(error)
}

/// Accepts that fail one after the other: descriptors may be short for long.
#[derive(Debug, Default)]
pub(super) struct AcceptFailures(u64);

impl AcceptFailures {
    /// One more failed on `socket`: waits a moment before the next. Said at once, and then at 2, 4, 8, … of them; nothing is said where nobody was kept out.
    pub(super) async fn note(&mut self, socket: &str, listener: &impl AsFd, error: &std::io::Error) {
        const PAUSE: Duration = Duration::from_millis(50);
        if is_anybody_there(listener) {
            self.0 += 1;
            if self.0.is_power_of_two() {
                tracing::warn!(%error, failures = self.0, "cannot accept a connection on {socket}");
            }
        }
        tokio::time::sleep(PAUSE).await;
    }

    /// One did not fail.
    pub(super) fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Somebody waits to be accepted. accept(2) has no descriptor to give before it looks for one, and fails for want of it where nobody came, too.
fn is_anybody_there(listener: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0))
}

/// A gRPC connection that knows who is at the other end.
#[derive(Debug)]
pub(super) struct PeerStream {
    stream: UnixStream,
    peer: PeerInfo,
    _seat: Seat,
}

/// Who is at the other end of a gRPC connection.
#[derive(Clone, Debug)]
pub(super) struct PeerInfo(pub(super) Arc<Peer>);

impl PeerStream {
    /// `None` where the process has as many connections as it may have.
    pub(super) fn new(stream: UnixStream, connections: &Arc<Connections>) -> Option<PeerStream> {
        let peer = Peer::of(stream.as_fd());
        let seat = connections.enter(&peer)?;
        Some(PeerStream { stream, peer: PeerInfo(Arc::new(peer)), _seat: seat })
    }
}

impl Connected for PeerStream {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        self.peer.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_accept_that_fails_where_nobody_came_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (mut failures, error) = (AcceptFailures::default(), std::io::Error::from(Errno::MFILE));
        failures.note("a socket", &listener, &error).await;
        assert_eq!(failures.0, 0);
        let _comes = std::os::unix::net::UnixStream::connect(&path).unwrap();
        failures.note("a socket", &listener, &error).await;
        assert_eq!(failures.0, 1);
    }
}
