//! From start to serving with 10,000 chunks and 50 sessions to take over, beside a daemon that has nothing to take over. Real descriptors, held by a real keeper; a journal as a daemon writes it.
//!
//! What both have in common (the process, the driver, the sockets) is the floor; the rest is the journal, the descriptors, and what a ledger is made of.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};
use stitchd::ids::{ChunkId, DeviceUuid, SessionId};
use stitchd::journal::{Book, Header, Journal, Process, Record, SessionRecord, Whose, boot_mark};
use stitchd::keeper::{Key, Link, SOCKET_NAME};
use stitchd::ledger::Terms;
use stitchd::units::Bytes;
use stitchd::wire::peer::{Identity, process_by_pid};

const ROUNDS: usize = 15;
const CHUNKS: u64 = 10_000;
const SESSIONS: u64 = 50;
const CHUNK: Bytes = Bytes::mib(2);

/// The device's name at the daemon: it is the same for every `host` driver of one device.
fn uuid(dir: &Path) -> DeviceUuid {
    let (mut child, _) = serve(dir);
    let socket = dir.join("stitchd.sock");
    let status = Command::new(env!("CARGO_BIN_EXE_stitchd"))
        .args(["status", "--json", "--socket"])
        .arg(socket)
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let uuid = DeviceUuid::parse(status["devices"][0]["uuid"].as_str().unwrap()).unwrap();
    end(&mut child);
    uuid
}

/// A daemon, and how long it took until it served, of which so much to open the driver.
fn serve(dir: &Path) -> (std::process::Child, (Duration, Duration)) {
    let began = SystemClock::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stitchd"))
        .args(["serve", "--json", "--driver", "host", "--device=0=64GiB", "--log", "error", "--runtime-dir"])
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let took = began.now();
    let said: serde_json::Value = serde_json::from_str(&line).unwrap();
    (child, (took, Duration::from_secs_f64(said["driver_ms"].as_f64().unwrap() / 1e3)))
}

fn end(child: &mut std::process::Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Leaves a keeper and a journal as a daemon with so many chunks would that was killed.
fn leave(dir: &Path, device: DeviceUuid, chunks: u64) -> Link {
    let mut program = Command::new(env!("CARGO_BIN_EXE_stitchd"));
    program.args(["keep", "--connected", "--until-alone-for", "60s", "--state-dir"]).arg(dir);
    let keeper = Link::start(program, dir).unwrap();
    std::fs::rename(dir.join(keeper.name()), dir.join(SOCKET_NAME)).unwrap();
    let mut book = Vec::new();
    // Sessions of a process that lives: this one.
    let pid = std::process::id() as i32;
    let (pidfd, identity) = process_by_pid(pid).unwrap();
    let process = match identity {
        Identity::Pidfs(pidfs) => Process { pid, pidfs, start: 0 },
        Identity::Process { start, .. } => Process { pid, pidfs: 0, start },
        Identity::Unknown | Identity::Unproven => panic!("this kernel cannot tell processes apart"),
    };
    for session in 1..=SESSIONS {
        let session = SessionId(session);
        keeper.keep(&[(Key::Process(session), pidfd.as_fd())]).unwrap();
        book.push(Record::Opened(SessionRecord {
            session,
            secret: [7; 16],
            process,
            name: "bench".into(),
            tenant: "bench".into(),
            terms: Terms::new(Bytes::gib(64), 0),
            guarantee_max: Bytes::ZERO,
            opened_s: 0,
        }));
    }
    for chunk in (1..=chunks).map(ChunkId) {
        let fd = rustix::fs::memfd_create("stitchd-chunk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, CHUNK.get()).unwrap();
        keeper.keep(&[(Key::Chunk(chunk), fd.as_fd())]).unwrap();
        book.push(Record::Created { chunk, device, len: CHUNK });
        book.push(Record::Granted { chunk, whose: Whose::Session(SessionId(1 + chunk.0 % SESSIONS)) });
    }
    let header = Header { boot: boot_mark().unwrap(), journal: [1; 16] };
    let mut journal = Journal::begin(&dir.join("journal"), header, Book::default()).unwrap();
    // As leases write it.
    book.chunks(32).for_each(|step| journal.append(step).unwrap());
    keeper
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let device = uuid(dir.path());
    let (mut fresh, mut followed) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let dir = tempfile::tempdir().unwrap();
        // One keeper is there in both: starting it is not what is compared.
        let keeper = leave(dir.path(), device, 0);
        let (mut child, took) = serve(dir.path());
        fresh.push(took);
        end(&mut child);
        keeper.discard();
        let dir = tempfile::tempdir().unwrap();
        let keeper = leave(dir.path(), device, CHUNKS);
        let (mut child, took) = serve(dir.path());
        followed.push(took);
        let status = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["status", "--json", "--socket"])
            .arg(dir.path().join("stitchd.sock"))
            .output()
            .unwrap();
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        assert_eq!(status["devices"][0]["leased_bytes"], CHUNKS * CHUNK.get(), "all of it is there");
        assert_eq!(status["sessions"], SESSIONS);
        end(&mut child);
        keeper.discard();
    }
    let (followed, driver) = followed.into_iter().unzip();
    let (fresh, _): (Vec<_>, Vec<_>) = fresh.into_iter().unzip();
    let (fresh, followed, driver) = (median(fresh), median(followed), median(driver));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "start to serving: {:.1} ms with {CHUNKS} chunks and {SESSIONS} sessions to take over, {:.1} ms with none: {:.1} ms for what is taken over (median of {ROUNDS}; the opening of the driver is {:.2} ms of each)",
        ms(followed),
        ms(fresh),
        ms(followed.saturating_sub(fresh)),
        ms(driver)
    );
}
