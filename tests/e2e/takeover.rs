//! A daemon is killed, or makes way, and another follows it: what sessions have stays theirs, what nobody has is free, and nothing is granted twice.
//!
//! `STITCHD_TAKEOVER_KILLS=500 cargo test --release --test e2e takeover -- --nocapture` kills at so many random moments; without the variable it is some.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use stitchd::clock::{Clock as _, SystemClock};
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::rng::Rng;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::shared::{Attaching, Publishing};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::{Bytes, DeviceAddress};

use crate::support::{TestDaemon, config_file, eventually, python, run, stderr, variable};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "--device=0=64MiB";

fn connect(daemon: &TestDaemon, name: &str) -> Arc<Session> {
    Session::connect(&daemon.session_config(name)).unwrap()
}

fn runtime(session: &Arc<Session>) -> Runtime {
    session.runtime(0, RuntimeConfig::default()).unwrap()
}

fn fill(runtime: &Runtime, address: DeviceAddress, mib: u64, byte: u8) {
    runtime.device().driver().write(address, &vec![byte; (mib * MIB) as usize]).unwrap();
}

fn is_all(runtime: &Runtime, address: DeviceAddress, mib: u64, byte: u8) -> bool {
    let mut bytes = vec![!byte; (mib * MIB) as usize];
    runtime.device().driver().read(address, &mut bytes).unwrap();
    bytes.iter().all(|found| *found == byte)
}

/// The daemon and the session agree that it is there.
fn is_back(daemon: &TestDaemon, session: &Session) {
    eventually("that the session is there again", || {
        let listed = daemon.cli_json(&["sessions"]);
        let id = session.id().0;
        let mut all = listed["sessions"].as_array().unwrap().iter();
        (session.is_attached() && all.any(|of| of["session"] == id && of["is_attached"] == true)).then_some(())
    });
}

/// What the daemon says that a session holds.
fn held_of(daemon: &TestDaemon, session: &Session) -> u64 {
    let listed = daemon.cli_json(&["sessions"]);
    let all = listed["sessions"].as_array().unwrap();
    let of = all.iter().find(|of| of["session"] == session.id().0);
    of.map_or(0, |of| of["leased_bytes"].as_u64().unwrap())
}

/// The daemon's keeper.
fn keeper(daemon: &TestDaemon) -> i32 {
    eventually("a keeper", || daemon.status()["keeper"]["pid"].as_i64().filter(|pid| *pid > 0)) as i32
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_session_goes_on_when_its_daemon_was_killed_and_another_follows() {
    let daemon = TestDaemon::start(64);
    let (session, other) = (connect(&daemon, "stays"), connect(&daemon, "other"));
    let (one, two) = (runtime(&session), runtime(&other));
    let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    fill(&one, kept, 20, 0x5a);
    let theirs = two.alloc(&Request::of(Bytes::mib(10))).unwrap();
    let id = session.id();
    let keeper_pid = keeper(&daemon);
    std::thread::sleep(Duration::from_millis(1_100));
    let daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &session);
    is_back(&daemon, &other);
    assert_eq!((session.id(), keeper(&daemon)), (id, keeper_pid), "the keeper is the same");
    let ages = daemon.cli_json(&["sessions"])["sessions"].clone();
    assert!(
        ages.as_array().unwrap().iter().all(|one| one["age_ms"].as_u64() >= Some(1_000)),
        "as old as they are: {ages}"
    );
    assert_eq!((held_of(&daemon, &session), held_of(&daemon, &other)), (20 * MIB, 10 * MIB));
    assert!(is_all(&one, kept, 20, 0x5a));
    // Nobody gets what they have, and what is left is for all.
    let third = daemon.runtime("third");
    third.alloc(&Request::of(Bytes::mib(36))).unwrap_err();
    let address = third.alloc(&Request::of(Bytes::mib(34))).unwrap();
    fill(&third, address, 34, 0xee);
    assert!(is_all(&one, kept, 20, 0x5a));
    drop(third);
    // They grow, and give back, as before.
    let more = one.alloc(&Request::of(Bytes::mib(30))).unwrap();
    assert!(is_all(&one, more, 30, 0), "no byte of another's");
    for (runtime, address) in [(&one, kept), (&one, more), (&two, theirs)] {
        runtime.free(address, StreamId(0)).unwrap();
        runtime.trim(Bytes::mib(64));
    }
    daemon.wait_for_device("leased_bytes", 0);
    drop((one, two, session, other));
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

#[test]
fn who_has_gone_while_no_daemon_was_there_leaves_nothing_behind() {
    let daemon = TestDaemon::start(64);
    let Some(mut client) = python(&daemon, "p = malloc(40 * MIB)\nsay('has it')\nsys.stdin.read()\n") else { return };
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(client.stdout.take().unwrap()));
    assert_eq!(crate::support::hear(&mut lines), "has it");
    assert_eq!(daemon.device("leased_bytes"), 40 * MIB);
    kill(daemon.pid() as i32);
    client.kill().unwrap();
    client.wait().unwrap();
    let daemon = daemon.follow(&[DEVICE]);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(daemon.status()["returned_by_death_bytes"], 40 * MIB);
    daemon.runtime("next").alloc(&Request::of(Bytes::mib(64))).unwrap();
}

#[test]
fn a_request_that_waits_while_the_daemon_is_killed_is_served_by_the_next() {
    let daemon = TestDaemon::start(64);
    let session = connect(&daemon, "grows");
    let patient = RuntimeConfig { wait: Duration::from_secs(10), ..RuntimeConfig::default() };
    let runtime = Arc::new(session.runtime(0, patient).unwrap());
    runtime.alloc(&Request::of(Bytes::mib(20))).unwrap();
    let mut daemon = daemon;
    kill(daemon.pid() as i32);
    eventually("that it is noticed", || (!session.is_attached()).then_some(()));
    let growing = Arc::clone(&runtime);
    let grown = std::thread::spawn(move || growing.alloc(&Request::of(Bytes::mib(30))));
    std::thread::sleep(Duration::from_millis(200));
    daemon = daemon.follow(&[DEVICE]);
    grown.join().unwrap().unwrap();
    assert_eq!(held_of(&daemon, &session), 50 * MIB);
}

#[test]
fn a_request_that_has_waited_for_the_daemon_before_says_how_long_that_was_in_all() {
    let daemon = TestDaemon::start(64);
    let (hoarder, session) = (connect(&daemon, "hoarder"), connect(&daemon, "waits"));
    let hoards = runtime(&hoarder);
    hoards.alloc(&Request::of(Bytes::mib(60))).unwrap();
    let patient = RuntimeConfig { wait: Duration::from_secs(5), ..RuntimeConfig::default() };
    let patient = session.runtime(0, patient).unwrap();
    let waiting = std::thread::spawn(move || patient.alloc(&Request::of(Bytes::mib(32))).unwrap_err());
    eventually("that it waits", || (daemon.status()["waiting_requests"] == 1).then_some(()));
    std::thread::sleep(Duration::from_secs(2));
    let daemon = daemon.follow(&[DEVICE]);
    let text = stitchd::error::chain(&waiting.join().unwrap());
    let waited = text.split("after ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    // The second daemon saw three seconds of it at most.
    assert!(text.contains("'hoarder'") && waited >= Some(4_800), "{text}");
    drop(daemon);
}

#[test]
fn a_shared_range_is_there_still_with_its_name_and_its_key() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (connect(&daemon, "one"), connect(&daemon, "two"));
    let key = vec![7; 16];
    let mut published = Vec::new();
    for (name, key, byte) in [("weights", Vec::new(), 0x11), ("secret", key.clone(), 0x22)] {
        let draft = one.draft(0, Bytes::mib(8)).unwrap();
        one.driver().write(draft.span().start(), &vec![byte; 8 << 20]).unwrap();
        let how = Publishing {
            name: name.into(),
            content: Bytes::mib(8),
            linger: Duration::from_secs(60),
            key,
            ..Publishing::default()
        };
        published.push(draft.publish(&how).unwrap());
    }
    let wanted = |name: &str, key: &[u8]| Attaching { name: name.into(), key: key.to_vec(), ..Attaching::default() };
    let held = two.attach(&wanted("weights", &[])).unwrap();
    let before = daemon.cli_json(&["shared"]);
    let daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &one);
    is_back(&daemon, &two);
    assert_eq!(daemon.cli_json(&["shared"]), before);
    let three = connect(&daemon, "three");
    three.attach(&wanted("secret", &[8; 16])).unwrap_err();
    for (name, key, byte) in [("weights", &[][..], 0x11), ("secret", &key, 0x22)] {
        let range = three.attach(&wanted(name, key)).unwrap();
        let mut bytes = vec![0; 8 << 20];
        three.driver().read(range.span().start(), &mut bytes).unwrap();
        assert!(bytes.iter().all(|found| *found == byte), "{name}");
        assert!(three.driver().write(range.span().start(), &[1]).is_err());
    }
    // A later one of a name has a later version.
    let draft = one.draft(0, Bytes::mib(8)).unwrap();
    let how = Publishing { name: "weights".into(), content: Bytes::mib(8), ..Publishing::default() };
    assert_eq!(draft.publish(&how).unwrap().version(), 3);
    drop((published, held, one, two, three));
    // What lingers does.
    eventually("what is left", || {
        let left = daemon.cli_json(&["shared"]);
        let left = left["ranges"].as_array().unwrap();
        (left.len() == 1 && left[0]["name"] == "secret").then_some(())
    });
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.cli_json(&["shared"])["ranges"][0]["name"], "secret", "though nobody is left");
}

#[test]
fn a_keeper_that_was_killed_is_replaced_and_the_next_holds_everything() {
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("the keeper is gone");
    let session = connect(&daemon, "stays");
    let one = runtime(&session);
    let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    fill(&one, kept, 20, 0x5a);
    let mut former = keeper(&daemon);
    for mib in [2, 4] {
        kill(former);
        let next = eventually("another keeper", || {
            daemon.status()["keeper"]["pid"].as_i64().filter(|pid| *pid > 0 && *pid != i64::from(former))
        });
        former = next as i32;
        one.alloc(&Request::of(Bytes::mib(mib))).unwrap();
    }
    let daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &session);
    let held = one.stats().held.get();
    assert_eq!((held_of(&daemon, &session), keeper(&daemon)), (held, former));
    // It can be handed to others: the next keeper had its descriptors.
    let log = daemon.log();
    assert!(log.contains("registered=0"), "{log}");
    assert!(is_all(&one, kept, 20, 0x5a));
}

#[test]
fn when_both_die_sessions_keep_what_they_have_mapped_and_nobody_else_gets_it() {
    for keeper_first in [true, false] {
        let mut daemon = TestDaemon::start(64);
        daemon.expect_complaint("the keeper is gone");
        daemon.expect_complaint("nobody has kept these chunks");
        let (session, publisher) = (connect(&daemon, "stays"), connect(&daemon, "publisher"));
        let one = runtime(&session);
        let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
        fill(&one, kept, 20, 0x5a);
        let idle = one.alloc(&Request::of(Bytes::mib(6))).unwrap();
        let draft = publisher.draft(0, Bytes::mib(8)).unwrap();
        let how = Publishing { name: "weights".into(), content: Bytes::mib(8), ..Publishing::default() };
        let range = draft.publish(&how).unwrap();
        let (pid, keeper) = (daemon.pid() as i32, keeper(&daemon));
        let both = if keeper_first { [keeper, pid] } else { [pid, keeper] };
        both.into_iter().for_each(kill);
        let daemon = daemon.follow(&[DEVICE]);
        is_back(&daemon, &session);
        is_back(&daemon, &publisher);
        assert_eq!(held_of(&daemon, &session), 26 * MIB);
        assert!(is_all(&one, kept, 20, 0x5a));
        assert_eq!(daemon.device("unkept_bytes"), 34 * MIB);
        // A range is for those who have it, and for nobody more.
        assert_eq!(daemon.device("shared_bytes"), 8 * MIB);
        let wanted = Attaching { name: "weights".into(), ..Attaching::default() };
        session.attach(&wanted).unwrap_err();
        let third = daemon.runtime("third");
        third.alloc(&Request::of(Bytes::mib(32))).unwrap_err();
        let address = third.alloc(&Request::of(Bytes::mib(30))).unwrap();
        fill(&third, address, 30, 0xee);
        assert!(is_all(&one, kept, 20, 0x5a));
        // What comes back goes to the driver: it cannot be handed on.
        one.free(idle, StreamId(0)).unwrap();
        one.trim(Bytes::mib(64));
        eventually("what was given back", || (held_of(&daemon, &session) == 20 * MIB).then_some(()));
        assert_eq!(daemon.device("idle_bytes"), 0);
        drop((range, third));
        daemon.wait_for_device("shared_bytes", 0);
        daemon.wait_for_device("unkept_bytes", 20 * MIB);
        eventually("that what is left can be had", || one.alloc(&Request::of(Bytes::mib(40))).ok());
    }
}

/// What may happen to a journal while nobody looks.
fn damage(bytes: &[u8], how: usize) -> Option<Vec<u8>> {
    let mut damaged = bytes.to_vec();
    match how {
        0 => return None,
        1 => damaged.clear(),
        2 => damaged[20] ^= 1,
        // Behind a step, and in the middle of the first.
        3 => damaged.truncate(56 + 20),
        4 => damaged[90] ^= 0x40,
        // Of another start of the machine, and whole.
        5 => {
            damaged[12] ^= 1;
            let checksum = crc32(&damaged[..52]);
            damaged[52..56].copy_from_slice(&checksum.to_le_bytes());
        }
        _ => damaged.truncate(damaged.len() - 1),
    }
    Some(damaged)
}

#[test]
fn nothing_of_a_damaged_journal_is_believed_and_sessions_register_what_they_have() {
    for how in 0..7 {
        let mut daemon = TestDaemon::start(64);
        daemon.expect_complaint("the journal of the daemon before");
        let session = connect(&daemon, "stays");
        let one = runtime(&session);
        let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
        fill(&one, kept, 20, 0x5a);
        // Idle with the daemon: a stale journal would have it granted twice.
        let idle = one.alloc(&Request::of(Bytes::mib(6))).unwrap();
        one.free(idle, StreamId(0)).unwrap();
        one.trim(Bytes::mib(64));
        kill(daemon.pid() as i32);
        let path = daemon.path().join("journal");
        eventually("that it is noticed", || (!session.is_attached()).then_some(()));
        match damage(&std::fs::read(&path).unwrap(), how) {
            None => std::fs::remove_file(&path).unwrap(),
            Some(damaged) => std::fs::write(&path, damaged).unwrap(),
        }
        let daemon = daemon.follow(&[DEVICE]);
        is_back(&daemon, &session);
        assert_eq!(held_of(&daemon, &session), 20 * MIB, "damage {how}");
        let third = daemon.runtime("third");
        third.alloc(&Request::of(Bytes::mib(46))).unwrap_err();
        let address = third.alloc(&Request::of(Bytes::mib(44))).unwrap();
        fill(&third, address, 44, 0xee);
        assert!(is_all(&one, kept, 20, 0x5a), "damage {how}");
        drop(third);
        eventually("that what is left can be had", || one.alloc(&Request::of(Bytes::mib(40))).ok());
    }
}

#[test]
fn a_journal_of_a_newer_version_is_refused_by_name() {
    let daemon = TestDaemon::start(64);
    let session = connect(&daemon, "stays");
    let dir = daemon.kill();
    let path = dir.path().join("journal");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "it holds secrets");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[8..12].copy_from_slice(&9_u32.to_le_bytes());
    let checksum = crc32(&bytes[..52]);
    bytes[52..56].copy_from_slice(&checksum.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let refused = run(&["serve", "--driver", "host", "--runtime-dir", dir.path().to_str().unwrap(), DEVICE]);
    let text = stderr(&refused);
    assert!(!refused.status.success() && text.contains("version 9") && text.contains("newer one"), "{text}");
    drop(session);
}

/// CRC-32 as zip has it, by its definition.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

#[test]
fn a_daemon_that_is_told_to_end_is_followed_where_somebody_is_left_and_else_leaves_nothing() {
    let mut daemon = TestDaemon::start(64);
    let session = connect(&daemon, "stays");
    let one = runtime(&session);
    one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    assert!(daemon.terminate().success());
    let mut daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &session);
    assert_eq!(held_of(&daemon, &session), 20 * MIB);
    let keeper = keeper(&daemon);
    drop((one, session));
    daemon.wait_for_device("leased_bytes", 0);
    assert!(daemon.terminate().success());
    assert!(!daemon.path().join("journal").exists() && !daemon.path().join("keeper.sock").exists());
    eventually("that the keeper ends", || (!std::path::Path::new(&format!("/proc/{keeper}")).exists()).then_some(()));
}

#[test]
fn without_a_keeper_a_daemon_that_follows_begins_with_nothing_and_sessions_register() {
    let (_kept, config) = config_file("keeper = \"none\"\n");
    let flags = [config.as_str(), DEVICE];
    let daemon = TestDaemon::with(&flags);
    let session = connect(&daemon, "stays");
    let one = runtime(&session);
    one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    assert_eq!(daemon.status()["keeper"], Value::Null);
    let daemon = daemon.follow(&flags);
    is_back(&daemon, &session);
    assert_eq!(held_of(&daemon, &session), 20 * MIB);
    assert!(!daemon.path().join("journal").exists());
}

/// What a worker holds and knows.
struct Worker {
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    /// Set while nobody is to lease or release.
    is_paused: Arc<AtomicBool>,
    paused: Arc<AtomicU64>,
    rounds: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

/// Takes and frees memory with a pattern of its own, and looks at it all the time.
fn work(daemon: &TestDaemon, number: u8, is_over: &Arc<AtomicBool>) -> Worker {
    let config = SessionConfig { ..daemon.session_config(&format!("worker {number}")) };
    let session = Session::connect(&config).unwrap();
    let runtime = Arc::new(runtime(&session));
    let (is_paused, paused, rounds) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (uses, pause, stands, counts, is_over) =
        (Arc::clone(&runtime), Arc::clone(&is_paused), Arc::clone(&paused), Arc::clone(&rounds), Arc::clone(is_over));
    let thread = std::thread::spawn(move || {
        let mut rng = Rng::new(u64::from(number));
        let mut blocks: Vec<(DeviceAddress, u64, u8)> = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            if pause.load(Ordering::Acquire) {
                stands.store(1, Ordering::Release);
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            stands.store(0, Ordering::Release);
            let mib = 1 + rng.below(6);
            let byte = number << 4 | (1 + rng.below(15) as u8);
            if blocks.len() < 3
                && let Ok(address) = uses.alloc(&Request::of(Bytes::mib(mib)))
            {
                let mut fresh = vec![0; (mib * MIB) as usize];
                uses.device().driver().read(address, &mut fresh).unwrap();
                let is_own = |byte: &u8| *byte == 0 || *byte >> 4 == number;
                assert!(fresh.iter().all(is_own), "worker {number} reads another's bytes");
                fill(&uses, address, mib, byte);
                blocks.push((address, mib, byte));
            } else if !blocks.is_empty() {
                let (address, mib, byte) = blocks.swap_remove(rng.index(blocks.len()));
                assert!(is_all(&uses, address, mib, byte), "worker {number} has lost bytes");
                uses.free(address, StreamId(0)).unwrap();
                uses.trim(Bytes::mib(rng.below(8)));
            }
            counts.fetch_add(1, Ordering::Relaxed);
        }
        for (address, mib, byte) in blocks {
            assert!(is_all(&uses, address, mib, byte), "worker {number} has lost bytes");
            uses.free(address, StreamId(0)).unwrap();
        }
    });
    Worker { session, runtime, is_paused, paused, rounds, thread }
}

/// Everybody stands, and daemon and workers say the same of what each has.
fn audit(daemon: &TestDaemon, workers: &[Worker], after: &str) {
    workers.iter().for_each(|worker| worker.is_paused.store(true, Ordering::Release));
    for worker in workers {
        eventually("that a worker stands", || (worker.paused.load(Ordering::Acquire) == 1).then_some(()));
        is_back(daemon, &worker.session);
    }
    let mut all = 0;
    for worker in workers {
        let held = worker.runtime.stats().held.get();
        eventually(&format!("that both say the same, {after}"), || {
            (held_of(daemon, &worker.session) == held).then_some(())
        });
        all += held;
    }
    assert_eq!(daemon.device("leased_bytes"), all, "{after}");
    workers.iter().for_each(|worker| worker.is_paused.store(false, Ordering::Release));
}

#[test]
fn killed_at_any_moment_under_load_a_daemon_and_its_keeper_lose_nothing_and_grant_nothing_twice() {
    let kills = variable("STITCHD_TAKEOVER_KILLS").map_or(24, |kills| kills.to_string_lossy().parse().unwrap());
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("the keeper is gone");
    daemon.expect_complaint("nobody has kept these chunks");
    let is_over = Arc::new(AtomicBool::new(false));
    let workers: Vec<Worker> = (1..=4).map(|number| work(&daemon, number, &is_over)).collect();
    let mut rng = Rng::new(11);
    let mut counts = [0; 4];
    for number in 1..=kills {
        std::thread::sleep(Duration::from_micros(rng.below(60_000)));
        // The daemon; its keeper; both, in either order.
        let which = if number % 4 == 0 { rng.index(4) } else { rng.index(2) };
        counts[which] += 1;
        let (pid, held_by) = (daemon.pid() as i32, daemon.status()["keeper"]["pid"].as_i64().unwrap_or(0) as i32);
        let pids = [vec![pid], vec![held_by], vec![held_by, pid], vec![pid, held_by]];
        pids[which].iter().filter(|pid| **pid > 0).for_each(|pid| {
            let pid = rustix::process::Pid::from_raw(*pid).unwrap();
            // A keeper may have gone by itself, with the daemon before.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        });
        if which != 1 {
            daemon = daemon.follow(&[DEVICE]);
        }
        if number % 3 == 0 {
            audit(&daemon, &workers, &format!("after {number} kills"));
        }
        assert!(workers.iter().all(|worker| !worker.thread.is_finished()), "a worker has ended after {number} kills");
    }
    audit(&daemon, &workers, "in the end");
    let rounds: u64 = workers.iter().map(|worker| worker.rounds.load(Ordering::Relaxed)).sum();
    is_over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.thread.join().unwrap();
        drop(worker.runtime);
    }
    daemon.wait_for_device("leased_bytes", 0);
    println!("{kills} kills (daemon, keeper, keeper and daemon, daemon and keeper: {counts:?}), {rounds} rounds");
}

#[test]
fn numbers_that_are_given_again_are_other_chunks() {
    // A daemon that could not know which numbers were given begins anew, below those that a session has.
    let (_kept, config) = config_file("keeper = \"none\"\nladder = [\"2MiB\"]\n");
    let flags = [config.as_str(), DEVICE];
    let daemon = TestDaemon::with(&flags);
    let session = connect(&daemon, "stays");
    let one = runtime(&session);
    let gone = one.alloc(&Request::of(Bytes::mib(16))).unwrap();
    let kept = one.alloc(&Request::of(Bytes::mib(8))).unwrap();
    fill(&one, kept, 8, 0x52);
    one.free(gone, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    eventually("what was given back", || (held_of(&daemon, &session) == 8 * MIB).then_some(()));
    let daemon = daemon.follow(&flags);
    is_back(&daemon, &session);
    let more = one.alloc(&Request::of(Bytes::mib(16))).unwrap();
    fill(&one, more, 16, 0x70);
    assert!(is_all(&one, kept, 8, 0x52));
    // What is published are its chunks, whatever they were called.
    let draft = session.draft(0, Bytes::mib(4)).unwrap();
    session.driver().write(draft.span().start(), &vec![0x33; 4 << 20]).unwrap();
    let how = Publishing { name: "weights".into(), content: Bytes::mib(4), ..Publishing::default() };
    let range = draft.publish(&how).unwrap();
    let mut bytes = vec![0; 4 << 20];
    session.driver().read(range.span().start(), &mut bytes).unwrap();
    assert!(bytes.iter().all(|found| *found == 0x33));
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    eventually("what was given back", || (daemon.device("leased_bytes") == 16 * MIB).then_some(()));
    let third = daemon.runtime("third");
    let theirs = third.alloc(&Request::of(Bytes::mib(20))).unwrap();
    fill(&third, theirs, 20, 0xee);
    let next = one.alloc(&Request::of(Bytes::mib(8))).unwrap();
    fill(&one, next, 8, 0x71);
    assert!(is_all(&one, more, 16, 0x70) && is_all(&third, theirs, 20, 0xee) && is_all(&one, next, 8, 0x71));
}

#[test]
fn a_keeper_that_does_not_read_is_replaced_and_holds_nobodys_memory_back() {
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("the keeper is gone");
    let stopped = keeper(&daemon);
    let pid = rustix::process::Pid::from_raw(stopped).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let first = daemon.runtime("first");
    first.alloc(&Request::of(Bytes::mib(40))).unwrap();
    drop(first);
    let next = daemon.runtime("next");
    eventually("that it can be had", || next.alloc(&Request::of(Bytes::mib(40))).ok());
    assert_ne!(keeper(&daemon), stopped);
    assert!(daemon.log().contains("the keeper is gone"), "{}", daemon.log());
}

#[test]
fn a_keeper_of_another_user_is_not_told_anything() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: needs to be root, to be another user as well");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    let script = "import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen()
print('there', flush=True)
c, _ = s.accept()
print('heard', len(c.recv(65536)), flush=True)
";
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
    let mut planted = std::process::Command::new("python3")
        .args(["-c", script, path.to_str().unwrap()])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(planted.stdout.take().unwrap()));
    assert_eq!(crate::support::hear(&mut lines), "there");
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    // Its own stands in the place of that one.
    assert!(keeper(&daemon) > 0);
    daemon.runtime("job").alloc(&Request::of(Bytes::mib(4))).unwrap();
    assert_eq!(crate::support::hear(&mut lines), "heard 0");
    planted.wait().unwrap();
    let mut daemon = daemon;
    daemon.expect_complaint("takes its place");
}

#[test]
fn a_device_that_is_smaller_by_now_has_what_is_there_still() {
    // Of a device that is named by its ordinal the host driver pretends that it is smaller.
    for is_by_uuid in [false, true] {
        let daemon = TestDaemon::start(64);
        let which = if is_by_uuid { daemon.uuid() } else { "0".to_owned() };
        let session = connect(&daemon, "stays");
        let one = runtime(&session);
        let kept = one.alloc(&Request::of(Bytes::mib(40))).unwrap();
        fill(&one, kept, 40, 0x5a);
        let more = one.alloc(&Request::of(Bytes::mib(8))).unwrap();
        let daemon = daemon.follow(&[&format!("--device={which}=32MiB"), "--http=127.0.0.1:0"]);
        is_back(&daemon, &session);
        assert!(is_all(&one, kept, 40, 0x5a));
        let figures = || {
            let names = ["total", "budget", "leased", "idle", "available", "foreign"];
            names.map(|name| daemon.device(&format!("{name}_bytes")) / MIB)
        };
        assert_eq!(figures(), [32, 32, 48, 0, 0, 0], "as it is configured, and as it is");
        let (_, metrics) = daemon.http("/metrics");
        let of_state = |state: &str| {
            let label = format!("state=\"{state}\"");
            let is_it = |line: &&str| line.starts_with("stitchd_device_bytes{") && line.contains(&label);
            metrics.lines().find(is_it).and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        };
        let mib = |mib: u64| Some((mib * MIB) as f64);
        let states = ["total", "leased", "foreign"].map(of_state);
        assert_eq!(states, [mib(32), mib(48), mib(0)], "{metrics}");
        let said = String::from_utf8(daemon.cli(&["status"]).stdout).unwrap();
        assert!(said.contains("48.0 MiB are held of it") && said.contains("until 16.0 MiB have come back"), "{said}");
        daemon.runtime("other").alloc(&Request::of(Bytes::mib(2))).unwrap_err();
        // What comes back is for nobody, and nobody else's, until there is no more than that.
        one.free(more, StreamId(0)).unwrap();
        one.trim(Bytes::mib(64));
        eventually("what was given back", || (figures() == [32, 32, 40, 0, 0, 0]).then_some(()));
        one.free(kept, StreamId(0)).unwrap();
        one.trim(Bytes::mib(64));
        daemon.wait_for_device("available_bytes", 32 * MIB);
        let [total, budget, leased, _, _, foreign] = figures();
        assert_eq!([total, budget, leased, foreign], [32, 32, 0, 0]);
        let said = String::from_utf8(daemon.cli(&["status"]).stdout).unwrap();
        assert!(!said.contains("are held of it"), "{said}");
        let third = daemon.runtime("third");
        third.alloc(&Request::of(Bytes::mib(34))).unwrap_err();
        third.alloc(&Request::of(Bytes::mib(32))).unwrap();
    }
}

#[test]
fn sessions_get_chunks_of_the_sizes_that_they_were_told_of_also_of_a_daemon_with_others() {
    let (_kept, small) = config_file("ladder = [\"2MiB\"]\n");
    let (_also_kept, large) = config_file("ladder = [\"8MiB\"]\n");
    let daemon = TestDaemon::with(&[&small, DEVICE]);
    let session = connect(&daemon, "stays");
    let one = runtime(&session);
    one.alloc(&Request::of(Bytes::mib(10))).unwrap();
    let daemon = daemon.follow(&[&large, DEVICE]);
    is_back(&daemon, &session);
    one.alloc(&Request::of(Bytes::mib(6))).unwrap();
    assert_eq!(held_of(&daemon, &session), 16 * MIB);
    drop((one, session));
    // Nobody is there that was told of others: the next deals in its own.
    daemon.wait_for_device("leased_bytes", 0);
    let daemon = daemon.follow(&[&large, DEVICE]);
    let later = connect(&daemon, "later");
    assert_eq!(later.ladder().steps(), [Bytes::mib(8)]);
}

#[test]
fn what_is_drained_and_who_is_evicted_stay_so() {
    let daemon = TestDaemon::start(64);
    let (session, evicted) = (connect(&daemon, "stays"), connect(&daemon, "evicted"));
    let (one, two) = (runtime(&session), runtime(&evicted));
    one.alloc(&Request::of(Bytes::mib(10))).unwrap();
    two.alloc(&Request::of(Bytes::mib(10))).unwrap();
    daemon.cli_json(&["evict", &evicted.id().0.to_string()]);
    let limit = (20 * MIB).to_string();
    daemon.cli_json(&["limit", &session.id().0.to_string(), &limit]);
    let daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &session);
    is_back(&daemon, &evicted);
    two.alloc(&Request::of(Bytes::mib(10))).unwrap_err();
    one.alloc(&Request::of(Bytes::mib(12))).unwrap_err();
    one.alloc(&Request::of(Bytes::mib(10))).unwrap();
    // It says that sessions have memory there still.
    assert_eq!(daemon.cli(&["drain", "0"]).status.code(), Some(1));
    let daemon = daemon.follow(&[DEVICE]);
    is_back(&daemon, &session);
    let error = daemon.runtime("later").alloc(&Request::of(Bytes::mib(2))).unwrap_err();
    assert!(stitchd::error::chain(&error).contains("drained"), "{error:?}");
    drop((one, two, session, evicted));
    daemon.wait_for_device("leased_bytes", 0);
    // Nobody is there, and it is told to end: a device is emptied before somebody works on it.
    let mut daemon = daemon;
    eventually("that nobody is there", || (daemon.status()["sessions"] == 0).then_some(()));
    assert!(daemon.terminate().success());
    let mut daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.status()["devices"][0]["state"], "draining");
    daemon.cli_json(&["drain", "0", "--undo"]);
    daemon.runtime("later").alloc(&Request::of(Bytes::mib(2))).unwrap();
    eventually("that nobody is there", || (daemon.status()["sessions"] == 0).then_some(()));
    assert!(daemon.terminate().success());
    assert_eq!(daemon.follow(&[DEVICE]).status()["devices"][0]["state"], "ready");
}

#[test]
fn a_session_that_goes_while_no_daemon_is_there_is_gone_when_one_is() {
    let daemon = TestDaemon::start(64);
    let session = connect(&daemon, "goes");
    let one = runtime(&session);
    one.alloc(&Request::of(Bytes::mib(10))).unwrap();
    kill(daemon.pid() as i32);
    eventually("that it is noticed", || (!session.is_attached()).then_some(()));
    let began = SystemClock::new();
    drop((one, session));
    assert!(began.now() < Duration::from_secs(10), "nobody waits for a daemon that is not there");
    let daemon = daemon.follow(&[DEVICE]);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(daemon.status()["sessions"], 0);
}
