//! Growing a process by 1 GiB in 32 MiB chunks that the daemon has warm: a real daemon process, its real socket, from the request until the bytes can be
//! used.
//!
//! The floor is the system calls between two processes and the encoding of the same messages: one packet there, one packet with 32 descriptors back, one that says that they have arrived, one
//! reservation, one mapping per descriptor, one change of access over all. Outside of the measurement it gives them back with a packet, as the
//! subject does: who was woken last, and on which core, is half of what a round trip takes.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]
#![expect(unsafe_code, reason = "the floor is bare system calls, and mapping memory is an unsafe one")]

mod support;

use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::pool::pages::PagePolicy;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::{Bytes, DeviceAddress, Place as _};
use stitchd::wire::fd_channel::FdChannel;
use stitchd::wire::v1::{Ack, Batch, ChunkInfo};
use support::{compare, timed};

const ROUNDS: usize = 201;
const ROUNDS_OF_FIRST: usize = 21;
const LEN: Bytes = Bytes::gib(1);
const CHUNK: Bytes = Bytes::mib(32);
const CHUNKS: usize = 32;

/// A daemon that keeps twice of what is asked for warm.
struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("stitchd.toml");
        std::fs::write(&config, "ladder = ['32MiB']\nwarm = '2GiB'\n").unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["serve", "--json", "--driver", "host", "--device=0=8GiB", "--log", "warn", "--config"])
            .arg(&config)
            .arg("--runtime-dir")
            .arg(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        Daemon { child, dir }
    }

    /// A new session, once the daemon has made up for what the last one took: its chunks are as nobody has ever had them.
    fn session(&self) -> Arc<Session> {
        while self.idle() < 2 * LEN.get() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let config = SessionConfig::new(self.dir.path().join("stitchd.sock"), "bench");
        let session = Session::connect(&config).unwrap();
        // The daemon is done with whoever asked before.
        std::thread::sleep(Duration::from_millis(30));
        session
    }

    fn runtime(&self) -> (Arc<Session>, Runtime) {
        let session = self.session();
        let config = RuntimeConfig {
            pages: PagePolicy { granule: CHUNK, ..PagePolicy::default() }.with_uniform_chunks(),
            ..RuntimeConfig::default()
        };
        let runtime = session.runtime(0, config).unwrap();
        (session, runtime)
    }

    fn idle(&self) -> u64 {
        let status = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["status", "--json", "--socket"])
            .arg(self.dir.path().join("stitchd.sock"))
            .output()
            .unwrap();
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        status["devices"][0]["idle_bytes"].as_u64().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn memfds() -> Vec<OwnedFd> {
    let create = |_| {
        let fd = rustix::fs::memfd_create("floor", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, CHUNK.get()).unwrap();
        fd
    };
    (0..CHUNKS).map(create).collect()
}

/// What the packets of the floor ask for.
const ACQUIRE: Ack = Ack { request: 1 };
const ACK: Ack = Ack { request: 2 };
const RELEASE: Ack = Ack { request: 3 };
/// New files for the next acquire: such as nobody has ever had.
const RENEW: Ack = Ack { request: 4 };

/// The other side of the floor, a process of its own: this program, with a socket as its standard input.
struct Peer {
    channel: FdChannel,
    child: Child,
}

const PEER: &str = "--peer";

impl Peer {
    fn start() -> Peer {
        let (here, there) = FdChannel::pair().unwrap();
        let there = there.as_fd().try_clone_to_owned().unwrap();
        let child = Command::new(std::env::current_exe().unwrap()).arg(PEER).stdin(there).spawn().unwrap();
        Peer { channel: here, child }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers every acquire with as many descriptors as the subject needs.
fn answer(channel: &FdChannel) {
    let mut files = memfds();
    let chunks = (0..CHUNKS as u64).map(|chunk_id| ChunkInfo { chunk_id, len_bytes: CHUNK.get() }).collect();
    let batch = Batch { request: 1, chunks, is_last: true };
    while let Ok((packet, _)) = channel.receive::<Ack>() {
        let fds: Vec<_> = files.iter().map(|fd| fd.as_fd()).collect();
        if packet == ACQUIRE && channel.send(&batch, &fds).is_err() {
            break;
        }
        if packet == RENEW {
            files = memfds();
        }
    }
}

/// One round trip, and the mapping.
fn floor(channel: &FdChannel) {
    channel.send(&ACQUIRE, &[]).unwrap();
    let (_, fds) = channel.receive::<Batch>().unwrap();
    channel.send(&ACK, &[]).unwrap();
    let len = LEN.get() as usize;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that is there.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) }.unwrap();
    for (at, fd) in fds.iter().enumerate() {
        let place = base.wrapping_byte_add(at * CHUNK.get() as usize);
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: `place` lies whole in the reservation made above, which nothing else uses.
        unsafe { rustix::mm::mmap(place, CHUNK.get() as usize, ProtFlags::empty(), flags, fd, 0) }.unwrap();
    }
    let access = MprotectFlags::READ | MprotectFlags::WRITE;
    // SAFETY: the range is this function's own, and nothing points into it.
    unsafe { rustix::mm::mprotect(base, len, access) }.unwrap();
    LAST.with(|last| last.set((base as usize, fds)));
}

thread_local! {
    /// What the floor has mapped: let go of outside of the measurement.
    static LAST: std::cell::Cell<(usize, Vec<OwnedFd>)> = const { std::cell::Cell::new((0, Vec::new())) };
}

fn let_go(channel: &FdChannel) {
    let (base, fds) = LAST.with(std::cell::Cell::take);
    drop(fds);
    // SAFETY: the range was mapped by `floor`, is unmapped once, and nothing points into it.
    unsafe { rustix::mm::munmap(base as *mut std::ffi::c_void, LEN.get() as usize) }.unwrap();
    channel.send(&RELEASE, &[]).unwrap();
}

/// Grows by what is asked for, and sees that both ends of it can be used.
fn grow(session: &Session, runtime: &Runtime) -> (Duration, DeviceAddress) {
    let mut address = None;
    let time = timed(|| address = Some(runtime.alloc(&Request::of(LEN)).unwrap()));
    let (first, bytes) = (address.unwrap(), [7; 8]);
    let last = first.checked_add(LEN - Bytes::new(8)).unwrap();
    session.driver().write(first, &bytes).unwrap();
    session.driver().write(last, &bytes).unwrap();
    (time, first)
}

fn main() {
    if std::env::args().any(|arg| arg == PEER) {
        return answer(&FdChannel::over(std::io::stdin().as_fd().try_clone_to_owned().unwrap(), true));
    }
    let daemon = Daemon::start();
    let peer = Peer::start();
    let floor = || {
        let time = timed(|| floor(&peer.channel));
        let_go(&peer.channel);
        (time, 1)
    };
    let mut compared = Vec::new();
    let again = "grow by 1 GiB in 32 MiB chunks, again and again";
    if support::is_wanted(again) {
        let (session, runtime) = daemon.runtime();
        let subject = || {
            let (time, address) = grow(&session, &runtime);
            runtime.free(address, StreamId::DEFAULT).unwrap();
            assert_eq!(runtime.trim(LEN), LEN);
            (time, 1)
        };
        compared.push(compare(again, ROUNDS, subject, floor));
    }
    let first = "the same, a session's first";
    if support::is_wanted(first) {
        let subject = || {
            let (session, runtime) = daemon.runtime();
            (grow(&session, &runtime).0, 1)
        };
        let floor = || {
            // After the same preparations: what they push out of the caches is part of what a first time costs.
            let _other = daemon.runtime();
            peer.channel.send(&RENEW, &[]).unwrap();
            std::thread::sleep(Duration::from_millis(30));
            floor()
        };
        compared.push(compare(first, ROUNDS_OF_FIRST, subject, floor));
    }
    support::print(("µs", 1000.0), &compared);
}
