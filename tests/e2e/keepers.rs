//! Keepers in trouble, and who must not reach them: what they hold is not lost, and nobody else gets it.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use stitchd::clock::{Clock as _, SystemClock};
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::shared::{Publishing, SharedRange};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use stitchd::wire::v1;

use crate::raw::{Grpc, acquire, link, want};
use crate::support::{TestDaemon, eventually, needs_host, stitchd};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "--device=0=256MiB";

/// A range that outlives its publisher.
fn publish(session: &Arc<Session>, mib: u64) -> SharedRange {
    let draft = session.draft(0, Bytes::mib(mib)).unwrap();
    let linger = Duration::from_secs(600);
    let how = Publishing { name: "weights".into(), content: Bytes::mib(mib), linger, ..Publishing::default() };
    draft.publish(&how).unwrap()
}

/// A daemon with a range that only it and its keeper have, of 32 MiB.
fn with_range(dir: tempfile::TempDir) -> TestDaemon {
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    let session = daemon.session("publisher");
    drop((publish(&session, 32), session));
    eventually("its session is over", || (daemon.status()["sessions"] == 0).then_some(()));
    keeper(&daemon);
    daemon
}

fn keeper(daemon: &TestDaemon) -> i64 {
    eventually("a keeper", || daemon.status()["keeper"]["pid"].as_i64().filter(|pid| *pid > 0))
}

/// A keeper that is there by itself.
fn keep(dir: &Path) -> Child {
    let child = keep_beside(dir);
    eventually("its socket", || dir.join("keeper.sock").exists().then_some(()));
    child
}

/// One that comes while another is there.
fn keep_beside(dir: &Path) -> Child {
    let mut command = stitchd();
    command.args(["keep", "--runtime-dir"]).arg(dir).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().unwrap()
}

/// One that may not have many files open.
fn keep_few(dir: &Path, files: u32) -> Child {
    let mut few = Command::new("sh");
    let script = format!("ulimit -n {files}; exec \"$0\" keep --runtime-dir \"$1\"");
    few.args(["-c", &script, env!("CARGO_BIN_EXE_stitchd")]).arg(dir);
    few.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

/// How many files there are whose names begin so.
fn files(dir: &Path, prefix: &str) -> usize {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(prefix)).count()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn signal(pid: i64, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn a_keeper_whose_socket_is_gone_makes_way_for_one_that_is_found() {
    let mut daemon = with_range(tempfile::tempdir().unwrap());
    daemon.expect_complaint("the keeper's socket is gone");
    let first = keeper(&daemon);
    std::fs::remove_file(daemon.path().join("keeper.sock")).unwrap();
    eventually("another keeper", || (keeper(&daemon) != first).then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.device("shared_bytes"), 32 * MIB);
}

#[test]
fn a_keeper_that_comes_again_is_told_everything_before_the_daemons_own_is_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let outer = keep(dir.path());
    let mut daemon = with_range(dir);
    daemon.expect_complaint("keeper");
    assert_eq!(keeper(&daemon), i64::from(outer.id()));
    end(outer);
    eventually("its own", || daemon.status()["keeper"]["pid"].as_i64().filter(|pid| *pid > 0));
    // The pod of the keeper is there again.
    let outer = keep(daemon.path());
    eventually("the one that is found", || (keeper(&daemon) == i64::from(outer.id())).then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.device("shared_bytes"), 32 * MIB);
    end(outer);
}

#[test]
fn a_daemon_that_is_killed_before_it_has_told_a_new_keeper_anything_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let outer = keep(dir.path());
    let mut daemon = with_range(dir);
    daemon.expect_complaint("keeper");
    let candidates = |dir: &Path| files(dir, "k.");
    // Well within the second in which it looks. Nobody finds it by the name that counts.
    let mut newer = keep_beside(daemon.path());
    eventually("that it is there", || (candidates(daemon.path()) == 1).then_some(()));
    let dir = daemon.kill();
    let mut daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    daemon.expect_complaint("keeper");
    assert_eq!(daemon.device("shared_bytes"), 32 * MIB);
    // It gets the place as soon as it has everything, and the one before stands by.
    eventually("the new one", || (keeper(&daemon) == i64::from(newer.id())).then_some(()));
    eventually("that the first stands by", || (files(daemon.path(), "s.") == 1).then_some(()));
    assert_eq!(candidates(daemon.path()), 0);
    let mut daemon = daemon.follow(&[DEVICE]);
    daemon.expect_complaint("keeper");
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(newer.id())));
    // One that dies before it has everything leaves a file, which is cleared away, and nothing else.
    let third = keep_beside(daemon.path());
    signal(third.id().into(), rustix::process::Signal::STOP);
    end(third);
    eventually("that it is cleared away", || (candidates(daemon.path()) == 0).then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(newer.id())));
    assert!(newer.try_wait().unwrap().is_none());
    // The first is there when it is wanted, and was told to let go of nothing that it has been told to hold since.
    let mut daemon = daemon;
    daemon.expect_complaint("keeper");
    end(newer);
    eventually("the first", || (keeper(&daemon) == i64::from(outer.id())).then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(outer.id())));
    end(outer);
}

#[test]
fn one_that_stands_by_holds_nothing_of_before() {
    let dir = tempfile::tempdir().unwrap();
    let first = keep(dir.path());
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", first.id())).unwrap().count();
    let empty = fds();
    let mut daemon = with_range(dir);
    daemon.expect_complaint("keeper");
    assert!(fds() > empty, "it has the range's chunks");
    signal(first.id().into(), rustix::process::Signal::STOP);
    let second = keep_beside(daemon.path());
    eventually("the second", || (keeper(&daemon) == i64::from(second.id())).then_some(()));
    // It has told the first to let go of everything, which has not read that yet; and no daemon knows of it any more.
    let dir = daemon.kill();
    signal(first.id().into(), rustix::process::Signal::CONT);
    eventually("that it stands by", || (files(dir.path(), "s.") == 1).then_some(()));
    eventually("that it holds nothing", || (fds() <= empty).then_some(()));
    let mut daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    daemon.expect_complaint("keeper");
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(second.id())));
    // What it leaves behind is cleared away.
    end(first);
    eventually("that it is cleared away", || (files(daemon.path(), "s.") == 0).then_some(()));
    drop(daemon);
    end(second);
}

#[test]
fn one_that_stands_by_does_not_take_the_place_of_one_that_has_lost_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (keep(dir.path()), keep_beside(dir.path()));
    eventually("that one stands by", || (files(dir.path(), "s.") == 1).then_some(()));
    // What is no keeper's is nobody's to clear away.
    std::fs::write(dir.path().join("s.notes"), "mine").unwrap();
    std::fs::write(dir.path().join("k.0000aaaa"), "mine").unwrap();
    let daemon = with_range(dir);
    let first = keeper(&daemon);
    let mut dir = daemon.kill();
    for _ in 0..2 {
        std::fs::remove_file(dir.path().join("keeper.sock")).unwrap();
        eventually("that one is found", || dir.path().join("keeper.sock").exists().then_some(()));
        let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
        assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first), "{}", daemon.log());
        dir = daemon.kill();
    }
    assert!(dir.path().join("s.notes").exists() && dir.path().join("k.0000aaaa").exists());
    [one, other].into_iter().for_each(end);
}

/// A keeper that is stopped with everything and has lost its socket, and one that has begun since, without a daemon. The first does not find out before it goes on, and nobody else has anything.
fn stopped_and_begun() -> (tempfile::TempDir, Child, Child) {
    let dir = tempfile::tempdir().unwrap();
    let first = keep(dir.path());
    let daemon = with_range(dir);
    assert_eq!(keeper(&daemon), i64::from(first.id()));
    let dir = daemon.kill();
    signal(first.id().into(), rustix::process::Signal::STOP);
    std::fs::remove_file(dir.path().join("keeper.sock")).unwrap();
    let second = keep(dir.path());
    (dir, first, second)
}

fn found(dir: &tempfile::TempDir) -> Option<u64> {
    std::fs::symlink_metadata(dir.path().join("keeper.sock")).map(|metadata| metadata.ino()).ok()
}

/// The first takes the place of the second, and the next daemon has everything.
fn first_comes_back(dir: tempfile::TempDir, first: Child, second: Child, seconds: Option<u64>) {
    eventually("that the first is found", || (found(&dir) != seconds).then_some(()));
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(first.id())), "{}", daemon.log());
    drop(daemon);
    [first, second].into_iter().for_each(end);
}

#[test]
fn one_that_was_stopped_with_everything_is_not_emptied_by_one_that_has_begun_meanwhile() {
    let (dir, first, second) = stopped_and_begun();
    let seconds = found(&dir);
    signal(first.id().into(), rustix::process::Signal::CONT);
    first_comes_back(dir, first, second, seconds);
}

#[test]
fn a_keeper_whose_socket_is_removed_while_no_daemon_is_there_is_found_by_the_next_at_once() {
    for stays in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let by_itself = stays.then(|| keep(dir.path()));
        let daemon = with_range(dir);
        let first = keeper(&daemon);
        let dir = daemon.kill();
        std::fs::remove_file(dir.path().join("keeper.sock")).unwrap();
        let mut daemon = TestDaemon::in_dir(dir, &[DEVICE]);
        daemon.expect_complaint("the keeper is found again");
        assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first), "{}", daemon.log());
        drop(daemon);
        by_itself.into_iter().for_each(end);
    }
}

#[test]
fn one_that_has_everything_waits_until_a_daemon_that_begins_has_found_somebody() {
    let (dir, first, second) = stopped_and_begun();
    let seconds = found(&dir);
    // Somebody begins, has told nobody anything, and is killed.
    let lock = std::fs::File::options().write(true).open(dir.path().join("stitchd.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    signal(first.id().into(), rustix::process::Signal::CONT);
    eventually("that the first stands by", || (files(dir.path(), "s.") == 1).then_some(()));
    std::thread::sleep(Duration::from_millis(2_500));
    assert_eq!(found(&dir), seconds);
    drop(lock);
    first_comes_back(dir, first, second, seconds);
}

#[test]
fn a_daemon_whose_lock_is_removed_has_another() {
    if needs_host("another process is to be the daemon") {
        return;
    }
    let mut daemon = with_range(tempfile::tempdir().unwrap());
    daemon.expect_complaint("the lock of this directory was removed");
    let lock = daemon.path().join("stitchd.lock");
    std::fs::remove_file(&lock).unwrap();
    eventually("another", || lock.exists().then_some(()));
    eventually("that it is the daemon's", || daemon.log().contains("this daemon has another").then_some(()));
    let output = serve(daemon.path(), &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("another stitchd daemon (pid {})", daemon.pid())), "{said}");
}

/// A daemon that the test does not look after.
fn serve(dir: &Path, more: &[&str]) -> Command {
    let mut command = stitchd();
    command.args(["serve", "--driver", "host", "--runtime-dir"]).arg(dir).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Waits until this process has ended.
fn ended(pid: u32) {
    eventually("that the daemon ends", || {
        (!Path::new(&format!("/proc/{pid}/status")).exists() || is_zombie(pid)).then_some(())
    });
}

fn is_zombie(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| status.contains("State:\tZ"))
}

#[test]
fn a_daemon_whose_sockets_are_removed_ends_and_the_next_has_everything() {
    if needs_host("the daemon ends by itself") {
        return;
    }
    let mut daemon = with_range(tempfile::tempdir().unwrap());
    daemon.expect_complaint("nobody finds this daemon any more");
    let first = keeper(&daemon);
    for name in ["stitchd.sock", "chunks.sock"] {
        std::fs::remove_file(daemon.path().join(name)).unwrap();
    }
    ended(daemon.pid());
    let dir = daemon.kill();
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first));
}

#[test]
fn of_two_daemons_in_one_directory_the_first_leaves_everything_to_the_other() {
    if needs_host("another process is to be the daemon") {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let state_dir = format!("--state-dir={}", state.path().join("state").display());
    let mut first = TestDaemon::with(&[DEVICE, &state_dir]);
    first.expect_complaint("");
    let session = first.session("stays");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let kept = runtime.alloc(&Request::of(Bytes::mib(20))).unwrap();
    // It cannot make it anew before the other is there.
    signal(first.pid().into(), rustix::process::Signal::STOP);
    std::fs::remove_file(state.path().join("state/stitchd.lock")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut second = serve(elsewhere.path(), &[DEVICE, &state_dir]).spawn().unwrap();
    eventually("the second", || elsewhere.path().join("stitchd.sock").exists().then_some(()));
    signal(first.pid().into(), rustix::process::Signal::CONT);
    ended(first.pid());
    assert!(first.log().contains("another daemon has begun there"), "{}", first.log());
    let status = || -> Value {
        let socket = elsewhere.path().join("stitchd.sock");
        let output = stitchd().args(["status", "--json", "--socket"]).arg(socket).output();
        serde_json::from_slice(&output.unwrap().stdout).unwrap()
    };
    eventually("its keeper", || status()["keeper"]["pid"].as_i64().filter(|pid| *pid > 0));
    assert_eq!(status()["devices"][0]["leased_bytes"], 20 * MIB);
    second.kill().unwrap();
    second.wait().unwrap();
    runtime.free(kept, StreamId(0)).unwrap();
}

#[test]
fn a_journal_that_is_removed_under_its_daemon_is_written_anew() {
    let mut daemon = with_range(tempfile::tempdir().unwrap());
    daemon.expect_complaint("the journal was removed");
    let journal = daemon.path().join("journal");
    std::fs::remove_file(&journal).unwrap();
    eventually("another", || journal.exists().then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.device("shared_bytes"), 32 * MIB, "{}", daemon.log());
}

#[test]
fn a_device_of_which_live_processes_have_memory_is_not_left_out_by_mistake() {
    if needs_host("another process is to be the daemon") {
        return;
    }
    let daemon = TestDaemon::with(&[DEVICE]);
    let session = daemon.session("stays");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let kept = runtime.alloc(&Request::of(Bytes::mib(20))).unwrap();
    let dir = daemon.kill();
    for (wrong, expected) in [
        (&["--device=1=256MiB"][..], "has leased memory of device 0"),
        (&["--driver=sim", DEVICE], "of another driver than 'sim'"),
    ] {
        let mut command = stitchd();
        command.args(["serve", "--runtime-dir"]).arg(dir.path());
        if !wrong[0].starts_with("--driver") {
            command.args(["--driver", "host"]);
        }
        let output = command.args(wrong).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{said}");
    }
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    eventually("that it is there again", || session.is_attached().then_some(()));
    assert_eq!(daemon.device("leased_bytes"), 20 * MIB, "{}", daemon.log());
    runtime.free(kept, StreamId(0)).unwrap();
}

#[test]
fn a_daemon_that_ends_leaves_a_keeper_also_where_its_own_has_just_gone() {
    for is_killed in [true, false] {
        let mut daemon = with_range(tempfile::tempdir().unwrap());
        daemon.expect_complaint("keeper");
        if is_killed {
            signal(keeper(&daemon), rustix::process::Signal::KILL);
        } else {
            std::fs::remove_file(daemon.path().join("keeper.sock")).unwrap();
        }
        assert!(daemon.terminate().success());
        let daemon = daemon.follow(&[DEVICE]);
        assert_eq!(daemon.device("shared_bytes"), 32 * MIB, "{}", daemon.log());
    }
}

#[test]
fn two_keepers_that_are_to_stay_do_not_take_each_others_place_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    // One that ends at some time is to stay until then.
    let one = {
        let mut command = stitchd();
        command.args(["keep", "--until-alone-for", "10m", "--runtime-dir"]).arg(dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
    };
    eventually("its socket", || dir.path().join("keeper.sock").exists().then_some(()));
    let other = keep_beside(dir.path());
    let both = [i64::from(one.id()), i64::from(other.id())];
    // Without a daemon, and with one.
    eventually("that one stands by", || (files(dir.path(), "s.") == 1).then_some(()));
    let daemon = with_range(dir);
    let first = keeper(&daemon);
    assert!(both.contains(&first));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((keeper(&daemon), files(daemon.path(), "s.")), (first, 1));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first));
    drop(daemon);
    [one, other].into_iter().for_each(end);
}

#[test]
fn a_keeper_that_may_not_open_as_many_files_takes_nobodys_place() {
    let mut daemon = with_range(tempfile::tempdir().unwrap());
    daemon.expect_complaint("keeper");
    let first = keeper(&daemon);
    // In the smallest chunks: as many descriptors.
    let session = daemon.session("job");
    let one = session.runtime(0, RuntimeConfig::default()).unwrap();
    one.alloc(&Request::of(Bytes::mib(64))).unwrap();
    // More than there are now.
    let small = keep_few(daemon.path(), 200);
    eventually("that it was tried", || daemon.log().contains("a keeper cannot be used").then_some(()));
    assert!(daemon.log().contains("it may open 200 files and the daemon"), "{}", daemon.log());
    assert_eq!((keeper(&daemon), daemon.device("quarantined_bytes")), (first, 0));
    // What comes and goes is free at once: it holds nothing of it.
    drop((one, session));
    eventually("its memory", || (daemon.device("available_bytes") == (256 - 32) * MIB).then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first));
    end(small);
}

#[test]
fn a_keeper_that_can_hold_no_more_is_ended_when_another_has_everything_and_not_before() {
    // The daemon dies at each moment, before it is refused and after that.
    let mut was_asked = false;
    for moment in (1..).step_by(5) {
        let dir = tempfile::tempdir().unwrap();
        let died = dir.path().join("died");
        let few = keep_few(dir.path(), 30);
        eventually("its socket", || dir.path().join("keeper.sock").exists().then_some(()));
        let mut daemon = with_range(dir);
        daemon.expect_complaint("keeper");
        // On a busy machine another has taken its place by now: it may have fewer files.
        was_asked |= keeper(&daemon) == i64::from(few.id());
        let died = daemon.path().join(died.file_name().unwrap());
        // What it did not take, and the daemon died with.
        daemon.expect_complaint("nobody has kept these chunks");
        let mut daemon = daemon.follow_mortal(&format!("daemon:{moment}:{}", died.display()), &[DEVICE]);
        let config = SessionConfig { patience: Duration::from_millis(500), ..daemon.session_config("job") };
        // More than it can hold.
        let session = Session::connect(&config);
        let runtime = session.as_ref().ok().and_then(|session| session.runtime(0, RuntimeConfig::default()).ok());
        let held = runtime.as_ref().map(|runtime| runtime.alloc(&Request::of(Bytes::mib(64))));
        eventually("another, or an end", || {
            let status = daemon.cli(&["status", "--json"]);
            let pid =
                serde_json::from_slice(&status.stdout).ok().and_then(|status: Value| status["keeper"]["pid"].as_i64());
            let is_another = pid.is_some_and(|pid| pid > 0 && pid != i64::from(few.id()));
            (is_another || daemon.has_died()).then_some(())
        });
        let has_died = died.exists();
        let daemon = daemon.follow(&[DEVICE]);
        assert_eq!(daemon.device("shared_bytes"), 32 * MIB, "killed at moment {moment}: {}", daemon.log());
        drop((held, runtime, session, daemon));
        end(few);
        if !has_died {
            println!("{moment} moments");
            assert!(moment > 20 && was_asked, "so few moments are none");
            return;
        }
    }
}

#[test]
fn a_keeper_that_cannot_be_asked_keeps_a_daemon_from_starting_and_loses_nothing() {
    let daemon = with_range(tempfile::tempdir().unwrap());
    let first = keeper(&daemon);
    let dir = daemon.kill();
    if !needs_host("another process is to be the daemon") {
        signal(first, rustix::process::Signal::STOP);
        let mut command = stitchd();
        command.args(["serve", DEVICE, "--driver", "host", "--runtime-dir"]).arg(dir.path());
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("that it ends", || child.try_wait().unwrap());
        let output = child.wait_with_output().unwrap();
        signal(first, rustix::process::Signal::CONT);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("worth more than a start"), "{said}");
    }
    let mut daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    daemon.expect_complaint("keeper");
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first));
}

#[test]
fn root_of_another_user_namespace_is_handed_nothing() {
    const SCRIPT: &str = "
import array, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(5)
s.connect(sys.argv[1] + '/keeper.sock')
try:
    s.send(bytes([0x0a, 2, 8, 1]))
    s.send(bytes([0x22, 0]))
    data, control, _, _ = s.recvmsg(65536, 65536)
    print('heard', len(data), len(control))
except OSError as e: print('refused')
";
    let mut daemon = TestDaemon::with(&[DEVICE]);
    // Whoever is asked in takes the place of the daemon there.
    daemon.expect_complaint("the keeper is gone");
    let runtime = daemon.session("another tenant").runtime(0, RuntimeConfig::default()).unwrap();
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    keeper(&daemon);
    let from = |before: &[&str]| {
        let mut command = Command::new(before.first().unwrap_or(&"python3"));
        command.args(before.iter().skip(1)).args(before.first().map(|_| "python3")).args(["-c", SCRIPT]);
        let output = command.arg(daemon.path()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let said = from(&[]);
    assert!(
        said.starts_with("heard") && said != "heard 0 0",
        "the same user of the same namespace is asked in: {said}"
    );
    let apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
    match from(&apart).as_str() {
        "" => println!("skipped: there are no user namespaces to be had here"),
        said => assert!(said == "heard 0 0" || said == "refused", "{said}"),
    }
}

#[test]
fn what_is_to_be_taken_over_can_lie_where_no_client_comes() {
    let state = tempfile::tempdir().unwrap();
    let state_dir = state.path().join("of stitchd");
    let flags = [DEVICE, "--state-dir", state_dir.to_str().unwrap()];
    let daemon = TestDaemon::with(&flags);
    let session = daemon.session("publisher");
    drop((publish(&session, 32), session));
    let first = keeper(&daemon);
    assert_eq!(std::fs::metadata(&state_dir).unwrap().permissions().mode() & 0o777, 0o700);
    for name in ["keeper.sock", "journal"] {
        assert!(state_dir.join(name).exists() && !daemon.path().join(name).exists(), "{name}");
    }
    let daemon = daemon.follow(&flags);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, first));
    // Two daemons of one state directory would take each other over.
    let other = tempfile::tempdir().unwrap();
    let serve = |runtime_dir: &Path, state_dir: &Path| {
        let mut command = stitchd();
        command.args(["serve", "--driver", "host", DEVICE, "--runtime-dir"]).arg(runtime_dir).arg("--state-dir");
        let mut child = command.arg(state_dir).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("that it is refused", || child.try_wait().unwrap());
        String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap()
    };
    let said = serve(other.path(), &state_dir);
    assert!(said.contains("another stitchd daemon") && said.contains(&daemon.pid().to_string()), "{said}");
    assert!(serve(other.path(), daemon.path()).contains("another stitchd daemon"));
    // Nor one where everybody may take away what is in it.
    let open = other.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    let said = serve(other.path(), &open);
    assert!(said.contains("everybody may write there") && said.contains("--state-dir"), "{said}");
}

#[test]
fn where_nobody_is_to_keep_any_more_the_keeper_of_before_lets_go() {
    let daemon = TestDaemon::with(&[DEVICE]);
    let session = daemon.session("stays");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let kept = runtime.alloc(&Request::of(Bytes::mib(100))).unwrap();
    let first = keeper(&daemon);
    let config = daemon.path().join("stitchd.toml");
    std::fs::write(&config, "keeper = \"none\"\n").unwrap();
    let mut daemon = daemon.follow(&[DEVICE, "--config", config.to_str().unwrap()]);
    daemon.expect_complaint("session");
    eventually("that it has registered what it has", || {
        (session.is_attached() && daemon.device("leased_bytes") == 100 * MIB).then_some(())
    });
    assert!(!daemon.path().join("journal").exists());
    // It is another session to the daemon, and counts where it has counted before.
    let counters = daemon.cli_json(&["sessions"])["sessions"][0]["counters"].clone();
    assert_eq!(counters["live_bytes"], 100 * MIB, "{counters}");
    eventually("its end", || (!Path::new(&format!("/proc/{first}/fd/0")).exists()).then_some(()));
    runtime.free(kept, StreamId(0)).unwrap();
    runtime.trim(Bytes::mib(256));
    daemon.wait_for_device("available_bytes", 256 * MIB);
    let mut daemon = daemon.follow(&[DEVICE]);
    daemon.expect_complaint("session");
    eventually("that it is there again", || session.is_attached().then_some(()));
    daemon.wait_for_device("available_bytes", 256 * MIB);
}

#[test]
fn a_journal_that_could_not_be_written_is_whole_again_as_soon_as_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(&path).output();
    if !mount.is_ok_and(|mounted| mounted.status.success()) {
        println!("skipped: this process may not mount a file system that is full");
        return;
    }
    let log = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(log.path().join("log"), path.join("log")).unwrap();
    let mut daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    daemon.expect_complaint("the journal cannot be written");
    let session = daemon.session("publisher");
    let range = publish(&session, 32);
    let mut filler = std::fs::File::create(path.join("filler")).unwrap();
    while filler.write_all(&[0; 4096]).is_ok() {}
    while filler.write_all(&[0; 1]).is_ok() {}
    let grpc = Grpc::connect(&daemon);
    let (raw, channel) = link(&daemon, &grpc, "many");
    let leased = acquire(&channel, 1, want(&raw, 160)).unwrap();
    eventually("that it cannot", || daemon.log().contains("the journal cannot be written").then_some(()));
    drop(filler);
    std::fs::remove_file(path.join("filler")).unwrap();
    // Nothing is leased or released meanwhile.
    eventually("that it can again", || daemon.log().contains("the journal can be written again").then_some(()));
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.cli_json(&["shared"])["ranges"].as_array().unwrap().len(), 1);
    drop((range, leased, daemon));
    Command::new("umount").arg("-l").arg(&path).output().unwrap();
}

#[test]
fn a_daemon_serves_where_its_log_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = stitchd();
    command.args(["serve", "--driver", "host", DEVICE, "--log", "debug", "--runtime-dir"]).arg(dir.path());
    let mut daemon = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(full).spawn().unwrap();
    let status = || stitchd().args(["status", "--socket"]).arg(dir.path().join("stitchd.sock")).output().unwrap();
    eventually("that it serves", || status().status.success().then_some(()));
    signal(daemon.id().into(), rustix::process::Signal::TERM);
    assert!(daemon.wait().unwrap().success());
}

/// What a session says that it holds.
fn says(
    session: &v1::OpenReply,
    chunks: &[(u64, u64)],
    attempt: u64,
    is_first: bool,
    more: bool,
) -> v1::ReattachRequest {
    let of = |(chunk_id, len_bytes): &(u64, u64)| v1::ChunkInfo { chunk_id: *chunk_id, len_bytes: *len_bytes };
    let device_uuid = session.devices[0].uuid.clone();
    v1::ReattachRequest {
        session_id: session.session_id,
        secret: session.secret.clone(),
        held: vec![v1::HeldChunks { device_uuid, chunks: chunks.iter().map(of).collect() }],
        is_first,
        has_more: more,
        attempt,
        ..v1::ReattachRequest::default()
    }
}

#[test]
fn what_was_said_before_a_session_was_there_again_is_not_heard_after_that() {
    let daemon = TestDaemon::with(&[DEVICE]);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = link(&daemon, &grpc, "late");
    let leased = acquire(&channel, 1, want(&session, 4)).unwrap();
    drop(channel);
    let all: Vec<(u64, u64)> = leased.iter().map(|(chunk, _)| (*chunk, 2 * MIB)).collect();
    assert_eq!(all.len(), 2);
    grpc.reattach(says(&session, &all, 2, true, false)).unwrap();
    // An attempt that was given up, and comes all the same: it knows of less.
    let stale = grpc.reattach(says(&session, &all[..1], 1, true, false)).unwrap_err();
    assert_eq!(stale.code(), tonic::Code::Unavailable, "{stale:?}");
    assert_eq!(daemon.device("leased_bytes"), 4 * MIB);
    grpc.reattach(says(&session, &all[..1], 3, true, false)).unwrap();
    daemon.wait_for_device("leased_bytes", all[0].1);
}

#[test]
fn one_process_cannot_use_up_the_room_in_which_sessions_say_what_they_hold() {
    let daemon = TestDaemon::with(&[DEVICE]);
    let grpc = Grpc::connect(&daemon);
    let (session, _channel) = link(&daemon, &grpc, "hostile");
    let since = SystemClock::new();
    let refused = (0..10_000_u64).find_map(|number| {
        let chunks: Vec<_> = (0..128).map(|of| ((1 << 40) + number * 128 + of, 2 * MIB)).collect();
        grpc.reattach(says(&session, &chunks, 1, number == 0, true)).err()
    });
    let refused = refused.expect("it ends some time");
    assert!(refused.message().contains("more chunks than there can be"), "{refused:?} after {:?}", since.now());
    // It is not lost for that: from the beginning.
    grpc.reattach(says(&session, &[], 2, true, false)).unwrap();
}

#[test]
fn what_is_not_said_from_the_beginning_is_not_taken_for_all_that_a_session_holds() {
    let daemon = TestDaemon::with(&[DEVICE]);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = link(&daemon, &grpc, "in two messages");
    let leased = acquire(&channel, 1, want(&session, 8)).unwrap();
    drop(channel);
    let all: Vec<(u64, u64)> = leased.iter().map(|(chunk, _)| (*chunk, 2 * MIB)).collect();
    grpc.reattach(says(&session, &all[..3], 1, true, true)).unwrap();
    // The rest comes to the daemon that follows, which has not heard the beginning.
    let daemon = daemon.follow(&[DEVICE]);
    let grpc = Grpc::connect(&daemon);
    for attempt in [1, 2] {
        let rest = grpc.reattach(says(&session, &all[3..], attempt, false, false)).unwrap_err();
        assert_eq!(rest.code(), tonic::Code::Unavailable, "{rest:?}");
        assert_eq!(daemon.device("leased_bytes"), 8 * MIB);
    }
    // Nor the rest of another attempt.
    grpc.reattach(says(&session, &all[..3], 3, true, true)).unwrap();
    grpc.reattach(says(&session, &all[3..], 4, false, false)).unwrap_err();
    grpc.reattach(says(&session, &all[..3], 5, true, true)).unwrap();
    grpc.reattach(says(&session, &all[3..], 5, false, false)).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 8 * MIB);
}

#[test]
fn a_session_that_says_it_holds_a_range_more_often_than_it_can_is_refused_at_once() {
    let daemon = TestDaemon::with(&[DEVICE]);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = link(&daemon, &grpc, "hostile");
    let leased = acquire(&channel, 1, want(&session, 2)).unwrap();
    let chunk_ids = leased.iter().map(|(chunk, _)| *chunk).collect();
    let request = v1::PublishRequest { name: "r".into(), chunk_ids, content_bytes: 1, ..Default::default() };
    let range_id = grpc.publish(&session, request).unwrap().range.unwrap().range_id;
    let since = SystemClock::new();
    for times in [0, 65, u32::MAX] {
        let mut message = says(&session, &[], 1, true, false);
        message.ranges = vec![v1::HeldRange { range_id, times }];
        assert_eq!(grpc.reattach(message).unwrap_err().code(), tonic::Code::InvalidArgument, "{times} times");
    }
    assert!(since.now() < Duration::from_secs(30), "four thousand million steps take minutes");
}

#[test]
fn a_keeper_that_begins_while_no_daemon_is_there_takes_over_what_the_one_before_holds() {
    let daemon = with_range(tempfile::tempdir().unwrap());
    let first = keeper(&daemon);
    let dir = daemon.kill();
    let second = keep(dir.path());
    eventually("that the first is gone", || (!Path::new(&format!("/proc/{first}/fd/0")).exists()).then_some(()));
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    assert_eq!((daemon.device("shared_bytes"), keeper(&daemon)), (32 * MIB, i64::from(second.id())));
    end(second);
}

#[test]
fn a_state_directory_that_is_new_is_refused_while_the_keeper_of_before_is_needed_elsewhere() {
    if needs_host("another process is to be the daemon") {
        return;
    }
    let daemon = TestDaemon::with(&[DEVICE]);
    let session = daemon.session("stays");
    let _runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let first = keeper(&daemon);
    let dir = daemon.kill();
    let state = tempfile::tempdir().unwrap();
    let mut command = stitchd();
    command.args(["serve", DEVICE, "--driver", "host", "--runtime-dir"]).arg(dir.path());
    command.arg("--state-dir").arg(state.path().join("new")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    eventually("that it is refused", || child.try_wait().unwrap());
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(said.contains(&format!("the keeper (pid {first})")) && said.contains("need what it holds (1)"), "{said}");
    // As it was before it goes on.
    let daemon = TestDaemon::in_dir(dir, &[DEVICE]);
    assert_eq!(keeper(&daemon), first);
    eventually("that the session is there again", || session.is_attached().then_some(()));
}

#[test]
fn a_state_directory_is_not_changed_while_the_keeper_in_the_one_of_before_is_needed() {
    if needs_host("another process is to be the daemon") {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let of = |name: &str| format!("--state-dir={}", state.path().join(name).display());
    let daemon = TestDaemon::with(&[DEVICE, &of("one")]);
    let session = daemon.session("stays");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let first = keeper(&daemon);
    let mut dir = daemon.kill();
    // Another one, or none of its own.
    for flags in [&[DEVICE, &of("two")][..], &[DEVICE]] {
        let mut command = stitchd();
        command.args(["serve", "--driver", "host", "--runtime-dir"]).arg(dir.path()).args(flags);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("that it is refused", || child.try_wait().unwrap());
        let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
        let wanted = format!("start with --state-dir {}", state.path().join("one").display());
        assert!(said.contains(&format!("the keeper (pid {first})")) && said.contains(&wanted), "{said}");
    }
    let daemon = TestDaemon::in_dir(dir, &[DEVICE, &of("one")]);
    assert_eq!(keeper(&daemon), first);
    eventually("that the session is there again", || session.is_attached().then_some(()));
    drop((runtime, session));
    daemon.wait_for_device("leased_bytes", 0);
    eventually("that the session is over", || (daemon.cli_json(&["status"])["sessions"] == 0).then_some(()));
    dir = daemon.kill();
    // Nobody needs it any more.
    let mut daemon = TestDaemon::in_dir(dir, &[DEVICE, &of("two")]);
    daemon.expect_complaint("holds what a daemon before had, for no process any more");
    assert_ne!(keeper(&daemon), first);
}

#[test]
fn a_daemon_that_is_to_outlive_its_terminal_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("nohup");
    command.arg(env!("CARGO_BIN_EXE_stitchd")).args(["serve", "--driver", "host", DEVICE, "--runtime-dir"]);
    let spawned = command.arg(dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let Ok(mut daemon) = spawned else {
        println!("skipped: there is no nohup here");
        return;
    };
    let status = || stitchd().args(["status", "--socket"]).arg(dir.path().join("stitchd.sock")).output().unwrap();
    eventually("that it serves", || status().status.success().then_some(()));
    signal(daemon.id().into(), rustix::process::Signal::HUP);
    std::thread::sleep(Duration::from_millis(300));
    assert!(daemon.try_wait().unwrap().is_none() && status().status.success());
    signal(daemon.id().into(), rustix::process::Signal::TERM);
    assert!(daemon.wait().unwrap().success());
}
