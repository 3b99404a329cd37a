//! Processes that end in the middle of something, many threads, signals, want of memory, and life without a daemon: through the C border.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use stitchd::clock::{Clock as _, SystemClock};
use stitchd::pool::Request;
use stitchd::units::Bytes;

use crate::compiled::{Language, command, compiled, run};
use crate::support::{PATIENCE, TestDaemon, hear, needs_host, python};

/// The program on the host driver, which it writes to with the CPU.
fn life(daemon: &TestDaemon) -> Option<std::path::PathBuf> {
    if needs_host("the program writes with the CPU") {
        return None;
    }
    compiled(Language::C, "tests/e2e/life.c", daemon.path().join("life"), &[])
}

/// The program has said that all was well, and ended so, without a word of the library.
fn assert_fine(output: &Output, words: &str) {
    assert_eq!(String::from_utf8_lossy(&output.stdout), "fine\n", "{words}: {output:?}");
    assert!(output.status.success() && output.stderr.is_empty(), "{words}: {output:?}");
}

#[test]
fn whatever_is_live_at_the_end_comes_back_and_late_frees_harm_nobody() {
    let daemon = TestDaemon::start(128);
    let Some(program) = life(&daemon) else { return };
    for (words, said) in [("", "fine\n"), ("live", "fine\n"), ("exec", "")] {
        let output = run(&program, &daemon, &[words], &[]);
        assert!(output.status.success() && output.stderr.is_empty(), "{words}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), said, "{words}");
        daemon.wait_for_device("leased_bytes", 0);
    }
}

#[test]
fn a_thousand_threads_and_signals_all_the_time_change_nothing() {
    let daemon = TestDaemon::start(128);
    let Some(program) = life(&daemon) else { return };
    for words in ["threads", "signals"] {
        let output = run(&program, &daemon, &[words], &[]);
        assert_fine(&output, words);
        daemon.wait_for_device("leased_bytes", 0);
    }
}

/// In destructors that run when the library's own thread-locals are gone, and in a handler at the end of the process.
#[test]
fn threads_and_the_process_allocate_in_their_last_moments() {
    let daemon = TestDaemon::start(128);
    let Some(program) = life(&daemon) else { return };
    let output = run(&program, &daemon, &["ends"], &[]);
    assert_fine(&output, "ends");
    daemon.wait_for_device("leased_bytes", 0);
}

/// With every thread that the library may begin: of the session, of plans made meanwhile, of a recording.
#[test]
fn signals_of_the_program_are_left_to_its_own_threads() {
    let daemon = TestDaemon::start(128);
    let Some(program) = life(&daemon) else { return };
    let recording = daemon.path().join("run.stitchtrace");
    for environment in [&[][..], &[("STITCHD_PLAN", "auto"), ("STITCHD_RECORD", recording.to_str().unwrap())]] {
        let output = run(&program, &daemon, &["awaits"], environment);
        assert_fine(&output, &format!("awaits, {environment:?}"));
    }
}

#[test]
fn a_process_ends_at_once_while_one_of_its_threads_waits_for_a_lease() {
    let daemon = TestDaemon::start(128);
    let Some(program) = life(&daemon) else { return };
    let mut client = command(&program, &daemon);
    let mut client = client.arg("pending").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "ready");
    let pid = Pid::from_raw(daemon.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let clock = SystemClock::new();
    writeln!(client.stdin.take().unwrap(), "go").unwrap();
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
    let took = clock.now();
    kill_process(pid, Signal::CONT).unwrap();
    assert!(took < PATIENCE / 4, "{took:?}");
    // What was asked for, and nobody fetched, is leased to nobody.
    daemon.wait_for_device("leased_bytes", 0);
}

/// A program in C that has said nothing of SIGPIPE, which ends it: the connection's last words are written to a daemon that is gone, often enough.
#[test]
fn a_daemon_that_is_stopped_takes_no_program_with_it() {
    for _ in 0..3 {
        let mut daemon = TestDaemon::start(64);
        let Some(program) = life(&daemon) else { return };
        let mut client = command(&program, &daemon);
        let mut client = client.arg("outlives").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
        assert_eq!(hear(&mut lines), "ready");
        daemon.terminate();
        writeln!(client.stdin.take().unwrap(), "go").unwrap();
        assert_eq!(hear(&mut lines), "fine");
        assert!(client.wait().unwrap().success());
    }
}

#[test]
fn want_of_memory_says_who_holds_what() {
    let daemon = TestDaemon::start(64);
    let hoarder = daemon.runtime("hoarder");
    hoarder.alloc(&Request::of(Bytes::mib(40))).unwrap();
    let script = "\
a, b, c = malloc(6 * MIB), malloc(4 * MIB), malloc(6 * MIB)
free(a, 6 * MIB); free(c, 6 * MIB)
assert lib.stitch_malloc(30 * MIB, 0, None) is None
why = lib.stitch_last_error().decode()
for words in ('30.0 MiB asked for', 'this process holds 16.0 MiB of which 4.0 MiB are live', '12.0 MiB idle could be stitched',
    '12.0 MiB idle in all, 6.0 MiB in one piece', 'held by', \"'hoarder'\", '40.0 MiB'):
    assert words in why, (words, why)
assert 'plan' not in why, why
say('fine')
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
}

/// Runs the program far from any daemon.
fn alone(daemon: &TestDaemon, environment: &[(&str, &str)]) -> Option<std::process::Output> {
    let program = life(daemon)?;
    let nowhere = [("STITCHD_SOCKET", "/nowhere/stitchd.sock")];
    Some(run(&program, daemon, &["threads"], &[&nowhere, environment].concat()))
}

#[test]
fn without_a_daemon_a_process_refuses_unless_it_is_told_to_go_on_alone() {
    let daemon = TestDaemon::start(64);
    let private = [("STITCHD_WITHOUT_DAEMON", "private"), ("STITCHD_DRIVER", "host")];
    let Some(output) = alone(&daemon, &private) else { return };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "fine\n");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    for (environment, words) in [
        (&[][..], "no stitchd daemon answers at /nowhere/stitchd.sock"),
        (&[("STITCHD_WITHOUT_DAEMON", "refuse")], "STITCHD_WITHOUT_DAEMON=private goes on without one"),
        (&[("STITCHD_WITHOUT_DAEMON", "maybe")], "'maybe', and can be refuse or private"),
        (&[("STITCHD_WITHOUT_DAEMON", "private"), ("STITCHD_DRIVER", "sim")], "and not without one"),
        (&[("STITCHD_WITHOUT_DAEMON", "private"), ("STITCHD_DRIVER", "foo")], "there are auto, cuda, hip, host"),
    ] {
        let output = alone(&daemon, environment).unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.starts_with("wrong: an allocation") && said.contains(words), "{environment:?}: {said}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
    assert_eq!(daemon.device("leased_bytes"), 0);
}

#[test]
fn a_process_that_goes_on_alone_says_so_once_and_has_limits() {
    let daemon = TestDaemon::start(64);
    let script = "\
os.environ.update({'STITCHD_SOCKET': '/nowhere/stitchd.sock', 'STITCHD_WITHOUT_DAEMON': 'private', 'STITCHD_DRIVER': 'host'})
p = malloc(700 * MIB)
why = lib.stitch_last_error().decode()
assert 'no stitchd daemon answers' in why and 'takes its memory itself' in why, why
assert lib.stitch_malloc(700 * MIB, 0, None) is None
why = lib.stitch_last_error().decode()
assert 'out of memory' in why and 'takes its memory itself' not in why, why
assert lib.stitch_malloc(MIB, 1, None) is None
free(p, 700 * MIB)
free(malloc(900 * MIB), 900 * MIB)
say('fine')
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
}
