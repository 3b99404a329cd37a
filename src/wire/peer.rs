//! Who is at the other end of a Unix socket: the process, not its number; and how much it has not read yet.
//!
//! A pid can be reused and user namespaces shift uids, so identity is the peer's pidfd (`SO_PEERPIDFD`, Linux 6.5): by its inode where the
//! kernel gives each process one of its own (pidfs, Linux 6.9), else by pid and start time. Where the kernel has neither, only tickets and
//! secrets tell peers apart, and the daemon says so when it starts.

#![expect(unsafe_code, reason = "asks for SO_PEERPIDFD and SIOCOUTQ, which rustix does not know")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
pub use rustix::net::SocketType;

/// The process at the other end, as it was when it connected.
#[derive(Debug)]
pub struct Peer {
    /// Readable once the process is gone. `None` where the kernel has no such thing.
    pub pidfd: Option<OwnedFd>,
    /// Tells processes apart.
    pub identity: Identity,
    /// For people; 0 where the peer is in another pid namespace.
    pub pid: i32,
    /// The user that it was when it connected, as this process's user namespace has it; [`UID_UNKNOWN`] where the kernel does not say.
    pub uid: u32,
}

/// What a user of another namespace is shown as: nobody in particular.
pub const UID_OVERFLOW: u32 = 65_534;

/// A process sees the same users as this one, and is in the same pod, or in none as this one is.
pub fn is_beside_us(pid: i32) -> bool {
    sees_our_users(pid) == Some(true) && pod_of(pid) == pod_of(std::process::id().cast_signed())
}

/// A process is in the same user namespace as this one. Nothing where that cannot be seen: it is in another pid namespace, or gone.
pub fn sees_our_users(pid: i32) -> Option<bool> {
    let users = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/user")).ok();
    if pid <= 0 {
        return None;
    }
    Some(users(&pid.to_string())? == users("self")?)
}

/// Nobody's number: what the kernel shows for users of other namespaces, too, is 65534 at most.
pub const UID_UNKNOWN: u32 = u32::MAX;

/// A process, never another one with the same number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Identity {
    /// By the inode of its pidfd.
    Pidfs(u64),
    /// By pid and the moment at which it began, in clock ticks since boot.
    Process {
        /// Its number.
        pid: i32,
        /// Its beginning.
        start: u64,
    },
    /// Cannot be told on this kernel.
    Unknown,
    /// Could not be told just now, though this kernel can: out of descriptors, or the process is gone already. Nobody is it.
    Unproven,
}

impl Identity {
    /// True where both are the same process, or this kernel can never say that they are not.
    pub fn may_be(self, other: Identity) -> bool {
        let is_unproven = self == Identity::Unproven || other == Identity::Unproven;
        !is_unproven && (self == other || self == Identity::Unknown || other == Identity::Unknown)
    }
}

const SO_PEERPIDFD: libc::c_int = 77;
/// Magic number of the file system that pidfds live in (linux/magic.h).
const PIDFS_MAGIC: u64 = 0x5049_4446;

impl Peer {
    /// Asks the kernel who connected `socket`.
    pub fn of(socket: BorrowedFd<'_>) -> Peer {
        let (pid, uid) = credentials(socket).unwrap_or((0, UID_UNKNOWN));
        let pidfd = peer_pidfd(socket);
        let identity = match &pidfd {
            Ok(Some(pidfd)) => identity_of(pidfd.as_fd(), pid),
            Ok(None) => identity_by_start(pid, &stat_of(pid)),
            Err(_) => Identity::Unproven,
        };
        Peer { pidfd: pidfd.ok().flatten(), identity, pid, uid }
    }
}

/// The process of this number, as long as it is that one, and who it is. Nothing where it is gone, or the kernel has no pidfds.
pub fn process_by_pid(pid: i32) -> Option<(OwnedFd, Identity)> {
    let number = rustix::process::Pid::from_raw(pid)?;
    let pidfd = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).ok()?;
    let identity = identity_of(pidfd.as_fd(), pid);
    Some((pidfd, identity))
}

/// The pod that a process runs in, by the UID that Kubernetes gives it: it stands in the name of its control group.
pub fn pod_of(pid: i32) -> Option<String> {
    if pid <= 0 {
        return None;
    }
    pod_in(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// `/kubepods.slice/kubepods-burstable-pod1234_….slice/…` or `/kubepods/burstable/pod1234-…/…`: from the root on, as only root can be put there. A user may call groups below his own as he likes.
fn pod_in(cgroups: &str) -> Option<String> {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.filter_map(|path| path.strip_prefix('/').and_then(pod_in_path)).next()
}

/// A daemon in a container sees paths from its own group on (cgroup_namespaces(7)): of another pod `../../../kubepods-burstable.slice/kubepods-burstable-pod1234_….slice/…`, without what both have above them. What comes first
/// below that must be the pod's own group, or the one of its class: names further below may be anybody's.
fn pod_in_path(path: &str) -> Option<String> {
    let mut parts = path.split('/').skip_while(|part| *part == "..").peekable();
    let is_relative = path.starts_with("..");
    let first = *parts.peek()?;
    let is_class =
        matches!(first, "burstable" | "besteffort" | "kubepods-burstable.slice" | "kubepods-besteffort.slice");
    match first {
        "kubepods" | "kubepods.slice" => parts.find_map(pod_uid),
        _ if is_relative && is_class => pod_uid(parts.nth(1)?),
        _ if is_relative => pod_uid(first),
        _ => None,
    }
}

/// `pod1234-…`, `kubepods-burstable-pod1234_….slice`: the UID of the pod whose group is called so.
fn pod_uid(part: &str) -> Option<String> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let (before, uid) = part.rsplit_once("pod")?;
    let is_own = matches!(before, "" | "kubepods-" | "kubepods-burstable-" | "kubepods-besteffort-");
    let uid = uid.replace('_', "-");
    (is_own && is_pod_uid(&uid)).then_some(uid)
}

/// It is written as Kubernetes writes the UID of a pod, `0a1b2c3d-1111-2222-3333-444455556666`. Pods of the kubelet's own files (static pods) have others in their control groups, and are no pods here.
pub fn is_pod_uid(text: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let fits = |(at, byte): (usize, u8)| if matches!(at, 8 | 13 | 18 | 23) { byte == b'-' } else { is_digit(byte) };
    text.len() == 36 && text.bytes().enumerate().all(fits)
}

/// The process and the user at the other end. A process of a pid namespace that this one does not see has the number 0: what rustix asks with has no such number.
pub fn credentials(socket: BorrowedFd<'_>) -> Option<(i32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY:
    // * `socket` is open while it is borrowed;
    // * the option's value is one `ucred`, and `peer` and `len` are ours and as large as they say.
    let answer = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len)
    };
    (answer == 0 && len as usize == size_of::<libc::ucred>()).then_some((peer.pid, peer.uid))
}

/// `None` where the kernel does not know the question.
fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY:
    // * `socket` is open while it is borrowed;
    // * the option's value is one int, and `fd` and `len` are ours and as large as they say.
    let answer = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut len)
    };
    if answer != 0 || fd < 0 {
        return match last_error() {
            Errno::NOPROTOOPT => Ok(None),
            errno => Err(errno),
        };
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&pidfd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(Some(pidfd))
}

/// Why the call of libc just now failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Who the process of a pidfd is, whose number was `pid`.
pub fn identity_of(pidfd: BorrowedFd<'_>, pid: i32) -> Identity {
    let is_pidfs = rustix::fs::fstatfs(pidfd).is_ok_and(|fs| fs.f_type as u64 == PIDFS_MAGIC);
    match rustix::fs::fstat(pidfd) {
        Ok(stat) if is_pidfs => Identity::Pidfs(stat.st_ino),
        Ok(_) => identity_by_start(pid, &stat_of(pid)),
        Err(_) => Identity::Unproven,
    }
}

/// What the kernel tells about a process.
fn stat_of(pid: i32) -> std::io::Result<String> {
    if pid <= 0 {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
}

/// Who that is. Where it could not be read for want of descriptors or memory it could be another time, so that is not a kernel that cannot tell.
fn identity_by_start(pid: i32, stat: &std::io::Result<String>) -> Identity {
    match stat {
        Ok(stat) => start_time(stat).map_or(Identity::Unknown, |start| Identity::Process { pid, start }),
        Err(error) => match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Identity::Unproven,
            _ => Identity::Unknown,
        },
    }
}

/// When the process began: field 22 of /proc/PID/stat, counted behind the name, which may hold anything.
fn start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// What was sent on a Unix socket and not read by the other end, in bytes as the kernel counts them: with its own books, so more than was sent. Zero once all of it was read, or the other end
/// is closed.
pub fn unread_bytes(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY:
    // * `socket` is open while it is borrowed;
    // * the question (SIOCOUTQ, which has TIOCOUTQ's number) writes one int, and `bytes` is one of ours.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if answer != 0 {
        return Err(last_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// The process that listens at `path`, where the kernel says which: not one of another pid namespace, and not a service manager that listens for a daemon. Waits for nothing, and says nothing there.
pub fn listener_at(path: &std::path::Path, kind: SocketType) -> Option<i32> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, connect, socket_with};
    const MANAGER: i32 = 1;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).ok()?;
    connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    credentials(socket.as_fd()).map(|(pid, _)| pid).filter(|pid| *pid > MANAGER)
}

/// Somebody has the socket at `path`: it is not one that was left behind. Nobody is connected to, who would hear of that, or start a daemon: a socket of another type is told apart before that
/// (EPROTOTYPE in unix(7)).
///
/// # Errors
///
/// What the system says.
pub fn is_bound(path: &std::path::Path) -> Result<bool, Errno> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, connect, socket_with};
    let other = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    match connect(&other, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::fd_channel::FdChannel;
    use crate::wire::v1::Ack;

    #[test]
    fn what_the_other_end_has_not_read_is_counted_until_it_does_or_goes() {
        let (here, there) = FdChannel::pair().unwrap();
        let unread = || unread_bytes(here.as_fd()).unwrap();
        assert_eq!(unread(), 0);
        for request in 1..=2 {
            here.send(&Ack { request }, &[there.as_fd()]).unwrap();
        }
        let two = unread();
        there.receive::<Ack>().unwrap();
        assert!(0 < unread() && unread() < two);
        there.receive::<Ack>().unwrap();
        assert_eq!(unread(), 0);
        here.send(&Ack { request: 3 }, &[]).unwrap();
        drop(there);
        assert_eq!(unread(), 0);
    }

    #[test]
    fn a_pod_is_known_by_its_control_group_and_by_no_other() {
        let uid = "0a1b2c3d-1111-2222-3333-444455556666";
        let slice = uid.replace('-', "_");
        let systemd =
            format!("0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-x.scope\n");
        let cgroupfs = format!("12:memory:/kubepods/besteffort/pod{uid}/abc\n0::/\n");
        assert_eq!([pod_in(&systemd), pod_in(&cgroupfs)], [Some(uid.to_owned()), Some(uid.to_owned())]);
        let made = format!("0::/user.slice/user-1000.slice/user@1000.service/kubepods-pod{slice}.slice/x\n");
        assert_eq!([pod_in(&made), pod_in("0::/system.slice/ssh.service\n"), pod_in("")], [None, None, None]);

        // As a daemon in a container sees them.
        let known = |path: &str| pod_in(&format!("0::{path}\n"));
        let some = Some(uid.to_owned());
        assert_eq!(
            known(&format!("/../../../kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-x.scope")),
            some
        );
        assert_eq!(
            known(&format!("/../../kubepods-burstable-pod{slice}.slice/cri-x.scope")),
            some,
            "one of its own class"
        );
        assert_eq!(known(&format!("/../../../kubepods-pod{slice}.slice/cri-x.scope")), some, "one that is guaranteed");
        assert_eq!(known(&format!("/../../../burstable/pod{uid}/x")), some);
        assert_eq!(known(&format!("/../../../../kubepods/pod{uid}/x")), some);
        for other in [
            "/".to_owned(),
            "/../cri-x.scope".to_owned(),
            format!("/../cri-x.scope/kubepods-pod{slice}.slice"),
            format!("/../../../../user.slice/user-1000.slice/kubepods-pod{slice}.slice/x"),
            format!("/../../../kubepods-burstable.slice/mine.slice/kubepods-pod{slice}.slice"),
            format!("/kubepods-pod{slice}.slice/x"),
            // Of a file of the kubelet's: the hash of it.
            format!("/kubepods/burstable/pod{}/x", uid.replace('-', "")),
        ] {
            assert_eq!(known(&other), None, "{other}");
        }
    }

    #[test]
    fn the_uid_of_a_pod_is_no_name_and_no_other_number() {
        assert!(is_pod_uid("0a1b2c3d-1111-2222-3333-444455556666"));
        for other in [
            "",
            "web-0",
            "0a1b2c3d",
            "0a1b2c3d111122223333444455556666",
            "0A1B2C3D-1111-2222-3333-444455556666",
            "0a1b2c3d_1111_2222_3333_444455556666",
            "pod0a1b2c3d-1111-2222-3333-444455556666",
            "0a1b2c3d-1111-2222-3333-44445555666g",
        ] {
            assert!(!is_pod_uid(other), "{other}");
        }
    }

    #[test]
    fn both_ends_of_a_pair_are_this_process() {
        let (one, other) = FdChannel::pair().unwrap();
        let (one, other) = (Peer::of(one.as_fd()), Peer::of(other.as_fd()));
        assert_eq!(one.identity, other.identity);
        assert_ne!(one.identity, Identity::Unknown, "this machine cannot tell processes apart");
        assert_eq!(one.pid as u32, std::process::id());
    }

    #[test]
    fn whoever_could_not_be_told_is_nobody() {
        let someone = Identity::Pidfs(7);
        assert!(someone.may_be(someone) && someone.may_be(Identity::Unknown));
        for other in [someone, Identity::Unknown, Identity::Unproven] {
            assert!(!Identity::Unproven.may_be(other) && !other.may_be(Identity::Unproven));
        }
    }

    #[test]
    fn where_pidfds_have_no_inodes_a_process_is_its_start_and_want_of_descriptors_makes_nobody() {
        let here = std::process::id() as i32;
        assert!(
            matches!(identity_by_start(here, &stat_of(here)), Identity::Process { pid, start } if pid == here && start > 0)
        );
        let failed = |errno: Errno| identity_by_start(here, &Err(errno.into()));
        assert_eq!((failed(Errno::MFILE), failed(Errno::NFILE)), (Identity::Unproven, Identity::Unproven));
        assert_eq!((failed(Errno::NOENT), identity_by_start(0, &stat_of(0))), (Identity::Unknown, Identity::Unknown));
    }

    #[test]
    fn another_process_is_another_identity_and_its_end_is_seen() {
        use std::os::unix::net::UnixListener;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nsys.stdin.read()";
        let mut child = std::process::Command::new("python3")
            .args(["-c", script, path.to_str().unwrap()])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (socket, _) = listener.accept().unwrap();
        let peer = Peer::of(socket.as_fd());
        assert_eq!(peer.pid as u32, child.id());
        let (here, _there) = FdChannel::pair().unwrap();
        assert!(!peer.identity.may_be(Peer::of(here.as_fd()).identity));
        let pidfd = peer.pidfd.unwrap();
        let is_gone = |patience: i64| {
            let mut fds = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
            let patience = rustix::event::Timespec { tv_sec: patience, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&patience)).unwrap() == 1
        };
        assert!(!is_gone(0));
        child.kill().unwrap();
        assert!(is_gone(10));
        child.wait().unwrap();
    }
}
