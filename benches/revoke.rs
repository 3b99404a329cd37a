//! Revocation: 1 GiB that lies idle in one process goes to another that asks for it, over a real daemon and its real sockets, from the request until the bytes can be used.
//!
//! The floor is what has to happen whoever arranges it, measured in the same run: one packet to a process, which unmaps as many files as the subject has chunks, closes them and answers; and
//! what the same daemon takes to grant as much that nobody has. (On a GPU the floor has the device's synchronisation, too.)
//!
//! Beside it what people do today: one process is told to empty its cache, gives its one allocation of 1 GiB back to the driver, and says so; the other allocates. Somebody has to know whom to
//! tell, and all of the cache goes.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]
#![expect(unsafe_code, reason = "the floor is bare system calls, and mapping memory is an unsafe one")]

mod support;

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};
use stitchd::driver::{Access, Driver, Handle};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::pool::Request;
use stitchd::pool::pages::PagePolicy;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::giving::GiverThread;
use stitchd::session::{Session, SessionConfig};
use stitchd::units::{AddressSpan, Bytes, Place as _, Span};
use support::{compare, timed};

const ROUNDS: usize = 101;
const LEN: Bytes = Bytes::gib(1);
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon whose device has room for one of both.
struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(chunk: Bytes) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("stitchd.toml");
        std::fs::write(&config, format!("ladder = ['{}']\n", chunk.get())).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["serve", "--json", "--driver", "host", "--device=0=1088MiB", "--log", "error", "--config"])
            .arg(&config)
            .arg("--runtime-dir")
            .arg(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        Daemon { child, dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("stitchd.sock")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process: this program, which does what it is told line by line.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

const OTHER: &str = "--other";

impl Other {
    fn start(daemon: &Daemon, chunk: Bytes) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(OTHER)
            .arg(daemon.socket())
            .arg(chunk.get().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Other { child, input, output }
    }

    /// Has it do something, and waits until it is done.
    fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
        self.output.read_line(&mut String::new()).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Files mapped one by one, side by side.
struct Mapped {
    base: usize,
    _files: Vec<OwnedFd>,
}

impl Mapped {
    fn new(chunk: Bytes) -> Mapped {
        let len = LEN.get() as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that is there.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) }.unwrap();
        let map = |at: u64| {
            let file = rustix::fs::memfd_create("floor", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, chunk.get()).unwrap();
            let place = base.wrapping_byte_add((at * chunk.get()) as usize);
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            // SAFETY: `place` lies whole in the reservation made above, which nothing else uses.
            unsafe { rustix::mm::mmap(place, chunk.get() as usize, access, flags, &file, 0) }.unwrap();
            file
        };
        let files = (0..LEN.get() / chunk.get()).map(map).collect();
        Mapped { base: base as usize, _files: files }
    }

    fn unmap(self, chunk: Bytes) {
        for at in 0..LEN.get() / chunk.get() {
            let place = self.base + (at * chunk.get()) as usize;
            // SAFETY: the range was mapped by `new`, is unmapped once, and nothing points into it.
            unsafe { rustix::mm::munmap(place as *mut std::ffi::c_void, chunk.get() as usize) }.unwrap();
        }
    }
}

/// One allocation as a program without any pool has it: one handle, mapped.
struct Plain(AddressSpan, Handle);

impl Plain {
    fn new(driver: &dyn Driver) -> Plain {
        let device = DeviceId(0);
        let handle = driver.create(device, LEN).unwrap();
        let at = driver.reserve(device, LEN, Bytes::mib(2)).unwrap();
        let span = Span::new(at, LEN).unwrap();
        driver.map(at, handle).unwrap();
        driver.set_access(span, device, Access::ReadWrite).unwrap();
        Plain(span, handle)
    }

    fn free(self, driver: &dyn Driver) {
        driver.synchronize(DeviceId(0)).unwrap();
        driver.unmap(self.0).unwrap();
        driver.unreserve(self.0).unwrap();
        driver.release(self.1).unwrap();
    }
}

fn join(socket: PathBuf, name: &str, chunk: Bytes) -> (Arc<Session>, Arc<Runtime>, GiverThread) {
    let session = Session::connect(&SessionConfig::new(socket, name)).unwrap();
    let config = RuntimeConfig {
        pages: PagePolicy { granule: chunk, ..PagePolicy::default() }.with_uniform_chunks(),
        wait: PATIENCE,
        ..RuntimeConfig::default()
    };
    let runtime = Arc::new(session.runtime(0, config).unwrap());
    let giver = GiverThread::begin(&session, Arc::clone(&runtime)).unwrap();
    (session, runtime, giver)
}

fn plain_driver() -> Arc<dyn Driver> {
    stitchd::driver::open("host".parse().unwrap(), &[Bytes::gib(4)], &stitchd::driver::LibraryPlace::default()).unwrap()
}

/// The other process.
fn obey(socket: PathBuf, chunk: Bytes) {
    let (_session, runtime, _giver) = join(socket, "holder", chunk);
    let (mut mapped, mut plain, driver) = (None, None, plain_driver());
    for line in std::io::stdin().lock().lines() {
        match line.unwrap().as_str() {
            // Memory that was used, and lies idle.
            "park" => {
                let address = runtime.alloc(&Request::of(LEN)).unwrap();
                runtime.free(address, StreamId::DEFAULT).unwrap();
            }
            "trim" => drop(runtime.trim(LEN)),
            "map" => mapped = Some(Mapped::new(chunk)),
            "unmap" => mapped.take().unwrap().unmap(chunk),
            "allocate" => plain = Some(Plain::new(&*driver)),
            "free" => plain.take().unwrap().free(&*driver),
            other => panic!("nobody knows how to {other}"),
        }
        println!("done");
    }
}

/// Asks for 1 GiB and sees that both ends of it can be used.
fn grow(session: &Session, runtime: &Runtime) -> Duration {
    let mut address = None;
    let time = timed(|| address = Some(runtime.alloc(&Request::of(LEN)).unwrap()));
    let first = address.unwrap();
    let last = first.checked_add(LEN - Bytes::new(8)).unwrap();
    session.driver().write(first, &[7; 8]).unwrap();
    session.driver().write(last, &[7; 8]).unwrap();
    runtime.free(first, StreamId::DEFAULT).unwrap();
    assert_eq!(runtime.trim(LEN), LEN);
    time
}

/// Both processes, and what they do in turns.
struct Stage {
    daemon: Daemon,
    other: Other,
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    _giver: GiverThread,
    driver: Arc<dyn Driver>,
}

impl Stage {
    fn new(chunk: Bytes) -> Stage {
        let daemon = Daemon::start(chunk);
        let other = Other::start(&daemon, chunk);
        let (session, runtime, giver) = join(daemon.socket(), "asker", chunk);
        Stage { daemon, other, session, runtime, _giver: giver, driver: plain_driver() }
    }

    /// Nobody has anything, the daemon neither.
    fn clear(&mut self) {
        self.other.tell("trim");
        let trimmed = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["trim", "--json", "--socket"])
            .arg(self.daemon.socket())
            .output()
            .unwrap();
        assert!(trimmed.status.success());
    }

    fn revoke(&mut self) -> Duration {
        self.clear();
        self.other.tell("park");
        grow(&self.session, &self.runtime)
    }

    /// A message each way with the unmapping, and a grant of what nobody has.
    fn floor(&mut self) -> Duration {
        self.clear();
        let grant = grow(&self.session, &self.runtime);
        self.other.tell("map");
        grant + timed(|| self.other.tell("unmap"))
    }

    fn today(&mut self) -> Duration {
        self.clear();
        self.other.tell("allocate");
        let mut mine = None;
        let time = timed(|| {
            self.other.tell("free");
            mine = Some(Plain::new(&*self.driver));
        });
        mine.unwrap().free(&*self.driver);
        time
    }
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == OTHER) {
        return obey(PathBuf::from(&arguments[at + 1]), Bytes::new(arguments[at + 2].parse().unwrap()));
    }
    let mut compared = Vec::new();
    for chunk in [Bytes::mib(2), Bytes::mib(32)] {
        let name = format!("1 GiB of another process, chunks of {chunk}");
        let by_hand = format!("by hand (1 handle), beside chunks of {chunk}");
        if !support::is_wanted(&name) {
            continue;
        }
        let stage = RefCell::new(Stage::new(chunk));
        let floor = || (stage.borrow_mut().floor(), 1);
        compared.push(compare(name, ROUNDS, || (stage.borrow_mut().revoke(), 1), floor));
        compared.push(compare(by_hand, ROUNDS, || (stage.borrow_mut().today(), 1), floor));
    }
    support::print(("µs", 1000.0), &compared);
}
