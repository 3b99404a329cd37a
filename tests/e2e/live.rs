//! What people look at: the page at `/`, what it reads, and `stitchd top` in a terminal.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::giving::GiverThread;
use stitchd::units::Bytes;

use crate::support::{TestDaemon, eventually, hear, python, stitchd};

const MIB: u64 = 1 << 20;
const FLAGS: [&str; 3] = ["--device=0=64MiB", "--http", "127.0.0.1:0"];

fn live(daemon: &TestDaemon) -> Value {
    let (status, text) = daemon.http("/live.json");
    assert!(status.contains("200"), "{status}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_page_comes_whole_and_asks_nobody_else() {
    let daemon = TestDaemon::with(&FLAGS);
    let (head, page) = daemon.http_with("/", "");
    assert!(head.contains("200") && head.to_lowercase().contains("content-type: text/html"), "{head}");
    let policy = head.to_lowercase();
    assert!(
        policy.contains("content-security-policy: default-src 'none'") && policy.contains("frame-ancestors 'none'"),
        "{head}"
    );
    for elsewhere in ["http:", "https:", "src=", "@import", "url("] {
        assert!(!page.contains(elsewhere), "the page has {elsewhere}");
    }
    // Names of others are text.
    for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!page.contains(markup), "the page has {markup}");
    }
}

#[test]
fn chunks_sessions_and_events_are_those_that_there_are() {
    let daemon = TestDaemon::with(&FLAGS);
    let empty = live(&daemon);
    assert_eq!(
        (&empty["devices"][0]["runs"], &empty["sessions"]),
        (&Value::from(Vec::<u8>::new()), &Value::from(Vec::<u8>::new()))
    );
    let name = "<script>alert('\"')</script>";
    let (first, second) = (daemon.runtime(&format!("{name}\u{1b}[2J")), daemon.runtime("second"));
    let kept = first.alloc(&Request::of(Bytes::mib(12))).unwrap();
    second.alloc(&Request::of(Bytes::mib(20))).unwrap();
    second.alloc(&Request::of(Bytes::mib(100))).unwrap_err();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let seen = live(&daemon);
    let device = &seen["devices"][0];
    assert_eq!((&device["leased_bytes"], &device["live_bytes"]), (&Value::from(32 * MIB), &Value::from(32 * MIB)));
    assert!(device["failures"].as_u64() >= Some(1));
    let of = |name: &str| {
        let session = seen["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|session| session["name"].as_str().unwrap().starts_with(name))
            .unwrap();
        session["session"].as_u64().unwrap()
    };
    let runs = device["runs"].as_array().unwrap();
    let shown: Vec<(&str, u64, u64, u64)> = runs
        .iter()
        .map(|run| {
            let number = |what: &str| run[what].as_u64().unwrap();
            (run["state"].as_str().unwrap(), number("session"), number("bytes"), number("chunks"))
        })
        .filter(|(state, ..)| *state == "leased")
        .collect();
    assert_eq!(shown, [("leased", of(name), 12 * MIB, 6), ("leased", of("second"), 20 * MIB, 10)]);
    // With every byte of the ledger in some run.
    let all: u64 = runs.iter().map(|run| run["bytes"].as_u64().unwrap()).sum();
    let figures = ["leased", "shared", "idle", "reserved", "creating", "destroying", "quarantined"];
    let expected: u64 = figures.iter().map(|state| device[&format!("{state}_bytes")].as_u64().unwrap()).sum();
    assert_eq!(all, expected);
    drop((kept, first, second));
    eventually("that both are over", || {
        let seen = live(&daemon);
        let kinds: Vec<&str> =
            seen["events"].as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect();
        (kinds == ["opened", "opened", "closed", "closed"]).then_some(())
    });
    let points = || live(&daemon)["samples"]["points"].as_array().unwrap().len();
    let before = points();
    eventually("figures of later", || (points() > before).then_some(()));
}

#[test]
fn where_a_sessions_memory_lies_is_what_it_says_itself() {
    let daemon = TestDaemon::with(&FLAGS);
    let session = daemon.session("trainer");
    let runtime = Arc::new(session.runtime(0, RuntimeConfig::default()).unwrap());
    let kept = runtime.alloc(&Request::of(Bytes::mib(12))).unwrap();
    let freed = runtime.alloc(&Request::of(Bytes::mib(8))).unwrap();
    runtime.free(freed, StreamId(0)).unwrap();
    let number = live(&daemon)["sessions"][0]["session"].as_u64().unwrap();
    let path = format!("/map.json?session={number}");
    let map = || -> Value {
        let (status, text) = daemon.http(&path);
        assert!(status.contains("200"), "{status}");
        serde_json::from_str(&text).unwrap()
    };
    // Nobody is there to answer yet.
    assert_eq!(map(), serde_json::json!({ "session": number, "devices": [] }));
    let giver = GiverThread::begin(&session, Arc::clone(&runtime)).unwrap();
    let seen = eventually("an answer", || Some(map()).filter(|map| map["devices"][0].is_object()));
    let sum = |of: &str| -> u64 {
        let ranges = seen["devices"][0]["ranges"].as_array().unwrap();
        ranges.iter().filter(|range| range["kind"] != "stitched").map(|range| range[of].as_u64().unwrap()).sum()
    };
    assert_eq!((sum("bytes"), sum("live_bytes")), (20 * MIB, 12 * MIB), "{seen}");
    let addresses: Vec<&str> = seen["devices"][0]["ranges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|range| range["address"].as_str().unwrap())
        .collect();
    assert!(addresses.contains(&format!("{:#x}", kept.get()).as_str()), "{kept:?}: {seen}");
    // What it looks like is what it is now.
    runtime.free(kept, StreamId(0)).unwrap();
    eventually("that it is free", || {
        let ranges = map()["devices"][0]["ranges"].as_array().unwrap().clone();
        ranges.iter().all(|range| range["live_bytes"] == 0).then_some(())
    });
    let output = daemon.cli(&["top", "--once", "--map", &number.to_string()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("where the memory of trainer #{number} lies")) && text.contains("0 pool"), "{text}");
    assert_eq!(daemon.cli_json(&["top", "--map", &number.to_string()])["session"], number);
    drop((giver, runtime, session));
    eventually("that it is over", || daemon.http(&path).0.contains("404").then_some(()));
    assert!(daemon.http("/map.json").0.contains("400") && daemon.http("/map.json?session=x").0.contains("400"));
}

#[test]
fn a_program_that_uses_the_c_library_says_where_its_memory_lies_and_is_found_by_its_name() {
    let daemon = TestDaemon::with(&FLAGS);
    let script = "\
kept, freed = malloc(12 * MIB), malloc(8 * MIB)
free(freed, 8 * MIB)
say('there')
sys.stdin.read()
";
    let Some(mut program) = python(&daemon, script) else { return };
    assert_eq!(hear(&mut BufReader::new(program.stdout.take().unwrap()).lines()), "there");
    let name = daemon.cli_json(&["sessions"])["sessions"][0]["name"].as_str().unwrap().to_owned();
    let seen = eventually("an answer", || {
        Some(daemon.cli_json(&["top", "--map", &name])).filter(|map| map["devices"][0].is_object())
    });
    let sum = |of: &str| -> u64 {
        let ranges = seen["devices"][0]["ranges"].as_array().unwrap();
        ranges.iter().filter(|range| range["kind"] != "stitched").map(|range| range[of].as_u64().unwrap()).sum()
    };
    assert_eq!((sum("bytes"), sum("live_bytes")), (20 * MIB, 12 * MIB), "{seen}");
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
}

#[test]
fn top_shows_once_what_there_is_where_there_is_no_terminal() {
    let daemon = TestDaemon::with(&FLAGS);
    let runtime = daemon.runtime("trainer");
    runtime.alloc(&Request::of(Bytes::mib(12))).unwrap();
    for flags in [&["top"][..], &["top", "--once"]] {
        let output = daemon.cli(flags);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        assert!(
            text.contains("device 0") && text.contains("12.0 MiB of 64.0 MiB leased") && text.contains("trainer"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text}");
    }
    assert_eq!(daemon.cli_json(&["top"])["sessions"][0]["name"], "trainer");
    let nobody = tempfile::tempdir().unwrap();
    let socket = nobody.path().join("stitchd.sock");
    let output = stitchd().args(["top", "--socket"]).arg(&socket).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("stitchd.sock"));
}

/// `stitchd top` in a terminal of 100 columns and 30 rows.
struct Screen {
    child: Child,
    master: std::fs::File,
    terminal: OwnedFd,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    fn start(daemon: &TestDaemon) -> Screen {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let terminal = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        tcsetwinsize(&terminal, Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let of_it = || Stdio::from(terminal.try_clone().unwrap());
        let mut command = stitchd();
        command.args(["top", "--every", "100ms", "--socket"]).arg(daemon.socket());
        let child = command.stdin(of_it()).stdout(of_it()).stderr(of_it()).spawn().unwrap();
        let master = std::fs::File::from(master);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, into) = (master.try_clone().unwrap(), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = reader.read(&mut bytes) {
                into.lock().unwrap().extend_from_slice(&bytes[..len]);
            }
        });
        Screen { child, master, terminal, seen }
    }

    /// The last picture that was drawn whole, without colors.
    fn picture(&self) -> String {
        let text = String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned();
        let whole = text.rsplit_once("\x1b[J").map_or("", |(whole, _)| whole);
        let last = whole.rsplit("\x1b[H").next().unwrap_or_default();
        let mut plain = String::new();
        let mut letters = last.chars();
        while let Some(letter) = letters.next() {
            match letter {
                '\x1b' => drop(letters.by_ref().find(|letter| letter.is_ascii_alphabetic())),
                letter => plain.push(letter),
            }
        }
        plain
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        eventually(what, || Some(self.picture()).filter(|picture| is_so(picture)))
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(self.terminal.as_fd()).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// It has ended so, and the terminal is as it was.
    fn ends(mut self, expected: bool) {
        let status = eventually("its end", || self.child.try_wait().unwrap());
        assert_eq!(status.success(), expected, "{status}");
        assert!(!self.is_raw());
        // What it has written last may be on its way here.
        let is_as_before = || self.seen.lock().unwrap().ends_with(b"\x1b[?25h\x1b[?1049l").then_some(());
        eventually("the screen of before", is_as_before);
    }
}

/// Names of sessions in the order of the lines.
fn order(picture: &str) -> Vec<&str> {
    let names = ["anna", "bert", "cleo"];
    let lines = picture.lines().filter(|line| line.starts_with('█') && line.contains("uid:"));
    lines.filter_map(|line| names.into_iter().find(|name| line.contains(name))).collect()
}

#[test]
fn top_is_live_in_a_terminal_sorts_by_keys_and_leaves_it_as_it_was() {
    let daemon = TestDaemon::with(&FLAGS);
    let runtimes = [("bert", 8), ("cleo", 16), ("anna", 4)].map(|(name, mib)| {
        let runtime = daemon.runtime(name);
        runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap();
        runtime
    });
    let mut screen = Screen::start(&daemon);
    let picture = screen.until("all sessions", |picture| order(picture) == ["cleo", "bert", "anna"]);
    assert!(picture.contains("28.0 MiB of 64.0 MiB leased") && screen.is_raw(), "{picture}");
    assert!(picture.lines().all(|line| line.trim_end().chars().count() <= 100), "{picture}");
    screen.press("n");
    screen.until("by name", |picture| order(picture) == ["anna", "bert", "cleo"]);
    screen.press("n");
    screen.until("the other way round", |picture| order(picture) == ["cleo", "bert", "anna"]);
    screen.press("h");
    screen.until("help", |picture| picture.contains("space stops"));
    screen.press("h\x1b[B");
    screen.until("one further", |picture| order(picture) == ["bert", "anna"]);
    screen.press("\x1b[A ");
    screen.until("stopped", |picture| picture.contains("stopped: space goes on"));
    // What happens is seen while it happens.
    screen.press(" ");
    runtimes[2].alloc(&Request::of(Bytes::mib(24))).unwrap();
    screen.until("what was allocated", |picture| picture.contains("52.0 MiB of 64.0 MiB leased"));
    tcsetwinsize(&screen.terminal, Winsize { ws_row: 12, ws_col: 60, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    rustix::process::kill_process(pid(&screen.child), rustix::process::Signal::WINCH).unwrap();
    screen.until("a smaller one", |picture| {
        picture.lines().count() <= 12 && picture.lines().all(|line| line.chars().count() <= 60)
    });
    screen.press("q");
    screen.ends(true);
    for (end, keys) in
        [(None, "\x03"), (Some(rustix::process::Signal::TERM), ""), (Some(rustix::process::Signal::HUP), "")]
    {
        let mut screen = Screen::start(&daemon);
        screen.until("a picture", |picture| picture.contains("device 0"));
        screen.press(keys);
        if let Some(signal) = end {
            rustix::process::kill_process(pid(&screen.child), signal).unwrap();
        }
        screen.ends(true);
    }
}

fn pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap()
}

#[test]
fn top_says_when_the_daemon_is_away_and_goes_on_with_the_next() {
    let daemon = TestDaemon::with(&FLAGS);
    let runtime = daemon.runtime("anna");
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    let mut screen = Screen::start(&daemon);
    screen.until("a picture", |picture| order(picture) == ["anna"]);
    let dir = daemon.kill();
    screen.until("that it is away", |picture| picture.contains("the daemon does not answer"));
    let daemon = TestDaemon::in_dir(dir, &FLAGS);
    screen.until("the next", |picture| !picture.contains("does not answer") && picture.contains("taken over"));
    screen.press("q");
    screen.ends(true);
    drop((runtime, daemon));
}
