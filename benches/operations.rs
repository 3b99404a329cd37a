//! What a daemon costs a node that only has it, and what it costs to look at it: processor time while nothing happens, memory, and a scrape, with no session and with a thousand that have memory,
//! on one device and on eight.
//!
//! The floor of a scrape is `/livez`: the same connection, request and answer, and nothing to say. That of the memory is the same daemon without sessions.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;

const SESSIONS: usize = 1_000;
/// Sessions of one process: a daemon lets it have 256.
const EACH: usize = 250;
const HOLD: &str = "--hold-sessions";
const SCRAPES: usize = 51;
const QUIET: Duration = Duration::from_secs(20);

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    http: String,
}

impl Daemon {
    fn start(devices: u32) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_stitchd"))
            .args(["serve", "--json", "--driver", "host", "--log", "error", "--http", "127.0.0.1:0"])
            .args((0..devices).map(|device| format!("--device={device}=112GiB")))
            .arg("--runtime-dir")
            .arg(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).unwrap();
        let http = said["http"].as_str().unwrap().to_owned();
        Daemon { child, dir, http }
    }

    /// Processor time so far, of the threads that there are: the first figure of each's schedstat, in nanoseconds.
    fn cpu(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let ns = threads.map(|thread| {
            let schedstat = std::fs::read_to_string(thread.unwrap().path().join("schedstat")).unwrap();
            schedstat.split(' ').next().unwrap().parse::<u64>().unwrap()
        });
        Duration::from_nanos(ns.sum())
    }

    /// Bytes of it that are in memory.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Of one core, while nothing happens.
    fn idle_share(&self) -> f64 {
        // What came before has settled.
        std::thread::sleep(Duration::from_secs(2));
        let (clock, before) = (SystemClock::new(), self.cpu());
        std::thread::sleep(QUIET);
        self.cpu().saturating_sub(before).as_secs_f64() / clock.now().as_secs_f64()
    }

    /// How long it takes to get a page, and how large it is: the median of many.
    fn get(&self, path: &str) -> (Duration, usize) {
        let mut len = 0;
        let mut times: Vec<Duration> = (0..SCRAPES)
            .map(|_| {
                let clock = SystemClock::new();
                let mut stream = TcpStream::connect(&self.http).unwrap();
                write!(stream, "GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n").unwrap();
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).unwrap();
                assert!(answer.starts_with(b"HTTP/1.1 200"), "{path}");
                len = answer.len();
                let took = clock.now();
                // A daemon rests between pages as long as the last one took.
                std::thread::sleep(took);
                took
            })
            .collect();
        times.sort_unstable();
        (times[times.len() / 2], len)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A process with many sessions, as one may not have all of them: it ends with its standard input.
fn hold(socket: &Path, devices: u32) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(HOLD).arg(socket).arg(devices.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    child
}

/// Each with a chunk on the one device, or on every second of them: a chunk takes descriptors, and there are only so many.
fn hold_sessions(socket: &Path, devices: u32) {
    let sessions = (0..EACH as u32).map(|number| {
        let name = format!("job-{}-{number}", std::process::id());
        let session = Session::connect(&SessionConfig::new(socket.to_owned(), name)).unwrap();
        let on = (0..devices).filter(|device| devices == 1 || (number + *device).is_multiple_of(2));
        let runtimes = on.map(|device| {
            let runtime = session.runtime(device, RuntimeConfig::default()).unwrap();
            runtime.alloc(&Request::of(Bytes::mib(2))).unwrap();
            runtime
        });
        runtimes.collect::<Vec<_>>()
    });
    let _held: Vec<_> = sessions.collect();
    println!("held");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn main() {
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(at) = words.iter().position(|word| word == HOLD) {
        let devices = words[at + 2].to_str().unwrap().parse().unwrap();
        return hold_sessions(Path::new(&words[at + 1]), devices);
    }
    [1, 8].into_iter().for_each(measure);
}

/// A daemon of so many devices.
fn measure(devices: u32) {
    let daemon = Daemon::start(devices);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let show = |daemon: &Daemon, sessions: usize| {
        let idle = daemon.idle_share();
        let (floor, _) = daemon.get("/livez");
        let resident = daemon.resident();
        let (scrape, scrape_len) = daemon.get("/metrics");
        let scraped = daemon.resident();
        let (look, look_len) = daemon.get("/live.json");
        println!("with {sessions} sessions, {devices} devices:");
        println!("  idle: {:.3} % of a core over {} s", idle * 100.0, QUIET.as_secs());
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let looked = mb(daemon.resident());
        println!(
            "  resident: {:.1} MB, {:.1} once scraped, {looked:.1} once the live page was there",
            mb(resident),
            mb(scraped)
        );
        println!(
            "  scrape: {:.2} ms for {} kB, {:.1} times /livez ({:.3} ms)",
            ms(scrape),
            scrape_len / 1000,
            ms(scrape) / ms(floor),
            ms(floor)
        );
        println!("  the live page's figures: {:.2} ms for {} kB", ms(look), look_len / 1000);
        scraped
    };
    let before = show(&daemon, 0);
    let socket = daemon.dir.path().join("stitchd.sock");
    let holders: Vec<Child> = (0..SESSIONS / EACH).map(|_| hold(&socket, devices)).collect();
    let after = show(&daemon, SESSIONS);
    println!(
        "a session takes {:.1} KiB of the daemon's memory",
        after.saturating_sub(before) as f64 / 1024.0 / SESSIONS as f64
    );
    for mut holder in holders {
        drop(holder.stdin.take());
        holder.wait().unwrap();
    }
}
