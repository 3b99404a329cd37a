//! The daemon as a service: one at a time, started and ended cleanly, configured clearly.

use std::collections::BTreeSet;
use std::process::Stdio;

use rustix::process::{Pid, Resource, Rlimit};

use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::units::Bytes;
use stitchd::wire::v1::{self, client_frame};

use crate::raw::{self, Grpc};
use crate::support::{TestDaemon, config_file, needs_host, run, stderr, stitchd};

#[test]
fn a_second_daemon_is_refused_and_the_first_unharmed() {
    let daemon = TestDaemon::start(64);
    let second = run(&["serve", "--driver", "host", "--runtime-dir", daemon.path().to_str().unwrap()]);
    assert_eq!(second.status.code(), Some(2));
    let text = stderr(&second);
    assert!(text.contains(&format!("another stitchd daemon (pid {})", daemon.pid())), "{text}");
    assert_eq!(daemon.cli_json(&["health"])["serving"], true);
}

#[test]
fn sockets_that_a_killed_daemon_left_behind_do_not_stop_the_next() {
    let daemon = TestDaemon::start(64);
    let dir = daemon.kill();
    assert!(dir.path().join("stitchd.sock").exists());
    let daemon = TestDaemon::in_dir(dir, &["--device=0=64MiB"]);
    assert_eq!(daemon.cli_json(&["health"])["serving"], true);
}

#[test]
fn a_socket_that_somebody_listens_on_who_is_no_daemon_is_left_to_him() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stitchd.sock");
    // As a service manager does for a daemon that it is to start.
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut command = stitchd();
    command.args(["serve", "--driver", "host", "--device=0=64MiB", "--runtime-dir"]).arg(dir.path());
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("systemctl start stitchd"), "{said}");
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nobody has come");
    drop(listener);
    let daemon = TestDaemon::in_dir(dir, &["--device=0=64MiB"]);
    assert_eq!(daemon.status()["sessions"], 0);
}

#[test]
fn a_daemon_that_is_told_to_end_ends_well_and_leaves_no_sockets() {
    let mut daemon = TestDaemon::start(64);
    let session = daemon.session("unfinished");
    assert!(session.is_attached());
    assert_eq!(daemon.terminate().code(), Some(0));
    assert!(!daemon.socket().exists() && !daemon.chunk_socket().exists());
    let attached = |_| std::thread::sleep(std::time::Duration::from_millis(10));
    (0..500).take_while(|_| session.is_attached()).for_each(attached);
    assert!(!session.is_attached(), "the session was not told");
}

#[test]
fn directories_that_cannot_be_used_and_flags_that_make_no_sense_are_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let in_a_file = file.path().join("x");
    let dir = tempfile::tempdir().unwrap();
    let fine = dir.path().to_str().unwrap();
    let too_long = dir.path().join("x".repeat(120)).to_str().unwrap().to_owned();
    let cases: [(&[&str], &str); 11] = [
        (&["--runtime-dir", in_a_file.to_str().unwrap()], "choose another with --runtime-dir"),
        (&["--runtime-dir", &too_long], "is longer than a socket's path may be, 107 bytes"),
        (&["--runtime-dir", "/proc/none"], "choose another with --runtime-dir"),
        (&["--runtime-dir", fine, "--driver", "cudda"], "there is no driver 'cudda'"),
        (&["--runtime-dir", fine, "--device", "0=banana"], "'banana' is not a size"),
        (&["--runtime-dir", fine, "--device", "0=99999999TiB"], "is more than there can be"),
        (&["--runtime-dir", fine, "--device", "zero"], "is not ORDINAL"),
        (&["--runtime-dir", fine, "--device", "0", "--device", "0"], "device 0 is there twice"),
        (&["--runtime-dir", fine, "--http", "here"], "is not an address with a port"),
        (&["--runtime-dir", fine, "--config", "/nowhere.toml"], "cannot read the configuration"),
        (&["--runtime-dir", fine, "--log", "a=b=c"], "--log"),
    ];
    for (args, words) in cases {
        let output = run(&[&["serve"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?} says {:?}, not {words:?}", stderr(&output));
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    let output = run(&["serve", "--driver", "host", "--runtime-dir", dir.path().to_str().unwrap(), "--http", &address]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains(&address), "{}", stderr(&output));
}

#[test]
fn the_effective_configuration_can_be_printed_and_used() {
    let dir = tempfile::tempdir().unwrap();
    let printed = run(&[
        "serve",
        "--runtime-dir",
        dir.path().to_str().unwrap(),
        "--driver",
        "host",
        "--device",
        "0=32MiB",
        "--print-config",
    ]);
    assert!(printed.status.success());
    let file = dir.path().join("stitchd.toml");
    std::fs::write(&file, &printed.stdout).unwrap();
    let again = run(&["serve", "--config", file.to_str().unwrap(), "--print-config"]);
    assert_eq!(again.stdout, printed.stdout);
    let daemon = TestDaemon::in_dir(dir, &["--config", file.to_str().unwrap()]);
    assert_eq!(daemon.device("total_bytes"), 32 << 20);
}

#[test]
fn logs_are_lines_or_json_on_standard_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = stitchd()
        .args(["serve", "--driver", "host", "--log-format", "json", "--json", "--runtime-dir"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut String::new())
        .unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    for line in stderr(&output).lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(event["level"].is_string() && event["fields"]["message"].is_string(), "{line}");
    }
}

#[test]
fn two_devices_are_two_budgets() {
    let daemon = TestDaemon::with(&["--device=0=64MiB", "--device=1=32MiB"]);
    let session = daemon.session("both");
    assert_eq!(session.devices().len(), 2);
    let request = |mib| stitchd::pool::Request::of(stitchd::units::Bytes::mib(mib));
    let runtimes = [0, 1].map(|ordinal| session.runtime(ordinal, stitchd::runtime::RuntimeConfig::default()).unwrap());
    runtimes[1].alloc(&request(33)).unwrap_err();
    runtimes[1].alloc(&request(32)).unwrap();
    runtimes[0].alloc(&request(64)).unwrap();
    let status = daemon.status();
    assert_eq!(status["devices"][0]["leased_bytes"], 64 << 20);
    assert_eq!(status["devices"][1]["leased_bytes"], 32 << 20);
}

#[test]
fn a_device_that_the_daemon_leaves_out_keeps_its_place() {
    if needs_host("a pretended machine has as many devices as are named") {
        return;
    }
    let daemon = TestDaemon::with(&["--device=1=32MiB"]);
    let session = daemon.session("second");
    let config = stitchd::runtime::RuntimeConfig::default();
    let error = session.runtime(0, config).unwrap_err();
    assert!(matches!(error, stitchd::session::SessionError::NotServed { ordinal: 0, .. }), "{error}");
    assert!(error.to_string().contains("which is device 0 of this process; it has GPU-"), "{error}");
    let runtime = session.runtime(1, config).unwrap();
    runtime.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(32))).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 32 << 20);
}

#[test]
fn warm_chunks_lie_there_before_they_are_asked_for_and_are_in_nobodys_way() {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stitchd.toml");
    std::fs::write(&file, "warm = '16MiB'\n").unwrap();
    let daemon = TestDaemon::in_dir(dir, &["--config", file.to_str().unwrap(), "--device=0=64MiB"]);
    daemon.wait_for_device("idle_bytes", 16 * MIB);
    let request = |mib| stitchd::pool::Request::of(stitchd::units::Bytes::mib(mib));
    let one = daemon.runtime("one");
    one.alloc(&request(10)).unwrap();
    // Made up for.
    daemon.wait_for_device("idle_bytes", 16 * MIB);
    let two = daemon.runtime("two");
    two.alloc(&request(54)).unwrap();
    assert_eq!((daemon.device("leased_bytes"), daemon.device("idle_bytes")), (64 * MIB, 0));
}

#[test]
fn connections_that_say_nothing_do_not_keep_a_daemon_from_ending() {
    let mut daemon = TestDaemon::start(64);
    let silent = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    let silent_too = daemon.session("one that stays");
    daemon.terminate();
    drop((silent, silent_too));
}

#[test]
fn a_daemon_whose_open_files_are_all_for_connections_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_stitchd")])
        .args(["serve", "--driver", "host", "--runtime-dir", dir.path().to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("this process may have 64 files open"), "{}", stderr(&output));
}

#[test]
fn what_is_printed_as_configuration_can_be_extended_and_moved() {
    let dir = tempfile::tempdir().unwrap();
    let printed = run(&["serve", "--print-config"]);
    let text = String::from_utf8_lossy(&printed.stdout).into_owned() + "\n[[device]]\nordinal = 0\nbytes = \"1GiB\"\n";
    let file = dir.path().join("stitchd.toml");
    std::fs::write(&file, text).unwrap();
    let moved = run(&["serve", "--config", file.to_str().unwrap(), "--runtime-dir", "/tmp/moved", "--print-config"]);
    let text = String::from_utf8_lossy(&moved.stdout).into_owned();
    assert!(moved.status.success() && !text.contains("\"/run/stitchd\"") && text.contains("ordinal = 0"), "{text}");
}

#[test]
fn who_comes_where_the_daemon_has_no_descriptor_left_is_told_and_may_come_again() {
    let daemon = TestDaemon::start(64);
    let pid = Pid::from_raw(daemon.pid() as i32);
    let grpc = Grpc::connect(&daemon);
    // The connection is there, and its process known, before anything runs short.
    assert!(grpc.status().sessions.is_empty());
    let open_files = || -> BTreeSet<u64> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
        fds.filter_map(|fd| fd.unwrap().file_name().to_str()?.parse().ok()).collect()
    };
    // None is left; then one, and so on: whichever of a session's descriptors cannot be had.
    let mut left = 0;
    let session = loop {
        let taken = open_files();
        let current = (0..).filter(|fd| !taken.contains(fd)).nth(left);
        rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current, maximum: Some(4096) }).unwrap();
        match grpc.open("one more", 1) {
            Ok(session) => break session,
            Err(refused) => assert!(refused.message().contains("LimitNOFILE"), "{left} left: {}", refused.message()),
        }
        assert!(grpc.status().sessions.is_empty());
        left += 1;
    };
    assert!(left >= 2, "its page and its process were too many with {left} left");
    grpc.close(&session).unwrap();
}

#[test]
fn who_waits_for_memory_while_the_daemon_ends_hears_that_it_does() {
    let mut daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let holds = grpc.open("holds all", 1).unwrap();
    grpc.acquire(&holds, raw::want(&holds, 64)).unwrap();
    let (session, channel) = raw::link(&daemon, &grpc, "waits");
    let want = v1::Want { wait_ms: 60_000, ..raw::want(&session, 8) };
    raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 1, want: Some(want) }));
    daemon.wait_for_device("waiting_requests", 1);
    daemon.terminate();
    raw::expect_refusal(&channel, v1::ErrorKind::Unavailable, "the daemon is shutting down");
    raw::expect_closed(&channel);
}

#[test]
fn chunks_are_so_large_that_the_open_files_suffice_for_all_of_the_device() {
    let daemon = TestDaemon::with_open_files(512, None, &["--device=0=16GiB"]);
    let session = daemon.session("one large tensor");
    let smallest = session.ladder().smallest();
    assert!(smallest > Bytes::mib(2) && smallest <= Bytes::mib(256), "{smallest}");
    let status = daemon.status();
    let chunks_max = status["devices"][0]["chunks_max"].as_u64().unwrap();
    assert!(smallest.get() * chunks_max >= 16 << 30 && smallest.get() / 2 * chunks_max < 16 << 30, "{status}");
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    runtime.alloc(&Request::of(Bytes::gib(15))).unwrap();
    // Whoever lists sizes has them, whatever they suffice for.
    let (_dir, flag) = config_file("ladder = ['2MiB', '256MiB']\n");
    let daemon = TestDaemon::with_open_files(512, None, &["--device=0=16GiB", &flag]);
    assert_eq!(daemon.session("small ones").ladder().smallest(), Bytes::mib(2));
}
