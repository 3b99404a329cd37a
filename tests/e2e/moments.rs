//! The daemon, its keeper, and a daemon that is just taking over are killed at each moment between two things of which one could be done and the other not ([`stitchd::mortal`]): halves of a step in the journal, a descriptor that the keeper has and the journal not, a grant that nobody heard of.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::shared::{Attaching, Publishing, SharedRange};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::{Bytes, DeviceAddress};

use crate::support::{TestDaemon, eventually, eventually_or_says};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "--device=0=64MiB";
/// More moments than a job of this kind has.
const MOMENTS_MAX: u64 = 2_000;

fn alloc(runtime: &Runtime, mib: u64, byte: u8) -> DeviceAddress {
    let address = eventually_or_says("memory", || {
        runtime.alloc(&Request::of(Bytes::mib(mib))).map_err(|e| stitchd::error::chain(&e))
    });
    let mut bytes = vec![1; (mib * MIB) as usize];
    runtime.device().driver().read(address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0 || *byte >> 4 == 0xa), "it holds what another has written");
    runtime.device().driver().write(address, &vec![0xa0 | byte; bytes.len()]).unwrap();
    address
}

fn check(runtime: &Runtime, address: DeviceAddress, mib: u64, byte: u8) {
    let mut bytes = vec![0; (mib * MIB) as usize];
    runtime.device().driver().read(address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|found| *found == 0xa0 | byte), "bytes are lost");
}

fn publish(session: &Arc<Session>) -> SharedRange {
    eventually_or_says("a range that is published", || {
        let draft = session.draft(0, Bytes::mib(4)).map_err(|error| error.to_string())?;
        session.driver().write(draft.span().start(), &vec![0xb7; 4 << 20]).unwrap();
        let how = Publishing { name: "weights".into(), content: Bytes::mib(4), ..Publishing::default() };
        draft.publish(&how).map_err(|error| error.error.to_string())
    })
}

/// Everything that a job does with a daemon, as often as it takes.
fn job(config: &SessionConfig) {
    let patient = || RuntimeConfig { wait: Duration::from_secs(5), ..RuntimeConfig::default() };
    let connect = || eventually_or_says("a session", || Session::connect(config));
    let session = connect();
    let one = session.runtime(0, patient()).unwrap();
    let (kept, gone) = (alloc(&one, 6, 1), alloc(&one, 3, 2));
    one.free(gone, StreamId(0)).unwrap();
    one.trim(Bytes::mib(2));
    let range = publish(&session);
    let other = connect();
    let wanted = Attaching { name: "weights".into(), ..Attaching::default() };
    let held = eventually_or_says("the range", || other.attach(&wanted).map_err(|error| error.to_string()));
    let mut bytes = vec![0; 4 << 20];
    other.driver().read(held.span().start(), &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0xb7), "shared bytes are lost");
    drop(held);
    let grown = alloc(&one, 10, 3);
    check(&one, kept, 6, 1);
    drop((range, other));
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    check(&one, grown, 10, 3);
    one.free(grown, StreamId(0)).unwrap();
}

/// A job over daemons that follow one another whenever one has died, and what is left in the end: nothing.
fn survive(mut daemon: TestDaemon, moment: u64) {
    daemon.expect_complaint("the keeper is gone");
    daemon.expect_complaint("there is no keeper");
    daemon.expect_complaint("nobody has kept these chunks");
    // A session whose opening nobody heard of.
    let config = SessionConfig { patience: Duration::from_secs(2), ..daemon.session_config("job") };
    let work = std::thread::spawn(move || job(&config));
    while !work.is_finished() {
        if daemon.has_died() {
            daemon = daemon.follow(&[DEVICE]);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    work.join().unwrap_or_else(|_| panic!("killed at moment {moment}: {}", daemon.log()));
    let rest = |daemon: &TestDaemon| {
        let output = daemon.cli(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let device = |figure: &str| status["devices"][0][figure].as_u64().unwrap();
        let bytes = ["leased_bytes", "shared_bytes", "available_bytes"].map(device);
        Some((status["sessions"].as_u64().unwrap(), bytes))
    };
    let mut waits = Some(daemon);
    eventually_or_says(&format!("that all is back (killed at moment {moment})"), || {
        // It may have died of the job's last words.
        let mut known = waits.take().expect("there is always one");
        if known.has_died() {
            known = known.follow(&[DEVICE]);
        }
        let rest = rest(waits.insert(known));
        if rest == Some((0, [0, 0, 64 * MIB])) { Ok(()) } else { Err(format!("{rest:?}")) }
    });
}

/// Whether somebody has died.
fn has_died(died: &Path) -> bool {
    died.exists()
}

/// Moments from 1 on, each in a daemon of its own, until there are no more.
fn at_each_moment(whose: &str, begin: impl Fn(&str) -> TestDaemon) {
    for moment in 1..=MOMENTS_MAX {
        let dir = tempfile::tempdir().unwrap();
        let died = dir.path().join("died");
        survive(begin(&format!("{whose}:{moment}:{}", died.display())), moment);
        // A keeper may be on its way to its last moment still: what it does then nobody waits for.
        if !has_died(&died) {
            println!("{whose}: {} moments", moment - 1);
            assert!(moment > 10, "so few moments are no job");
            return;
        }
    }
    panic!("a job has more than {MOMENTS_MAX} moments");
}

#[test]
fn a_daemon_that_is_killed_at_each_of_its_moments_loses_nothing() {
    at_each_moment("daemon", |wish| {
        let daemon = TestDaemon::mortal(tempfile::tempdir().unwrap(), wish, &[DEVICE]);
        daemon.unwrap_or_else(|dir| TestDaemon::in_dir(dir, &[DEVICE]))
    });
}

#[test]
fn a_keeper_that_is_killed_at_each_of_its_moments_loses_nothing() {
    at_each_moment("keeper", |wish| {
        let daemon = TestDaemon::mortal(tempfile::tempdir().unwrap(), wish, &[DEVICE]);
        daemon.unwrap_or_else(|dir| TestDaemon::in_dir(dir, &[DEVICE]))
    });
}

#[test]
fn a_daemon_that_is_killed_at_each_moment_of_taking_over_loses_nothing() {
    // What the one before had is that of sessions which live.
    for moment in 1..=MOMENTS_MAX {
        let dir = tempfile::tempdir().unwrap();
        let died = dir.path().join("died");
        let first = TestDaemon::start(64);
        let session = Session::connect(&first.session_config("stays")).unwrap();
        let one = session.runtime(0, RuntimeConfig::default()).unwrap();
        let kept = alloc(&one, 6, 1);
        let range = publish(&session);
        let wish = format!("daemon:{moment}:{}", died.display());
        let second = first.follow_mortal(&wish, &[DEVICE]);
        // As far as it lives it takes over, and serves; what it was asked is asked again.
        let is_back = |daemon: &TestDaemon| {
            let output = daemon.cli(&["sessions", "--json"]);
            let listed: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
            let of = listed["sessions"].as_array()?.first()?;
            (of["is_attached"] == true && session.is_attached()).then_some(())
        };
        let mut waits = Some(second);
        eventually(&format!("that the session is there again (killed at moment {moment})"), || {
            let mut known = waits.take().expect("there is always one");
            if known.has_died() {
                known = known.follow(&[DEVICE]);
            }
            is_back(waits.insert(known))
        });
        let daemon = waits.expect("there is always one");
        check(&one, kept, 6, 1);
        assert_eq!((daemon.device("leased_bytes"), daemon.device("shared_bytes")), (6 * MIB, 4 * MIB));
        drop((range, one, session));
        if !has_died(&died) {
            println!("taking over: {} moments", moment - 1);
            assert!(moment > 5, "so few moments are no takeover");
            return;
        }
    }
}
