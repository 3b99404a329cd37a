//! A client that is killed at each step of the protocol: whatever it was doing, every byte, chunk and descriptor of the daemon comes back, once.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use stitchd::driver::LibraryPlace;
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use stitchd::wire::v1::{self, client_frame, daemon_frame};

use crate::raw::{self, Grpc};
use crate::support::{self, TestDaemon, eventually};

const MIB: u64 = 1 << 20;
/// More chunks of 2 MiB than one batch has descriptors.
const DEVICE_MIB: u64 = 640;

/// Where the client stops, and what it holds then, in MiB.
const STEPS: [(&str, u64); 13] = [
    ("opened", 0),
    ("linked", 0),
    ("asked", DEVICE_MIB),
    ("waiting", 0),
    ("ticket-out", 64),
    ("claimed", 64),
    ("first-batch", DEVICE_MIB),
    ("all-batches", DEVICE_MIB),
    ("mapped", 64),
    ("freed", 64),
    ("release-sent", 64),
    ("released", 0),
    ("closed", 0),
];

/// Set in the client: where to stop, and where the daemon is.
const STEP: &str = "STITCHD_TEST_STEP";
const DIRECTORY: &str = "STITCHD_TEST_DIRECTORY";

#[test]
fn a_client_that_is_killed_at_any_step_leaves_nothing_behind() {
    // The other side: this very test, started by itself.
    if let Some(step) = support::environment(STEP) {
        let directory = PathBuf::from(support::environment(DIRECTORY).unwrap());
        go_until(step.to_str().unwrap(), &directory);
        panic!("the client should have been killed");
    }
    let daemon = TestDaemon::start(DEVICE_MIB);
    // Until every connection of the one before is gone.
    let settle = || daemon.wait_for_device("available_bytes", DEVICE_MIB * MIB);
    settle();
    let figures = || {
        let status = daemon.status();
        let figure = |name: &str| status[name].as_u64().unwrap();
        let device = |name: &str| status["devices"][0][name].as_u64().unwrap();
        // What was created for somebody who is gone lies idle, for the next: each such chunk has a descriptor and an export.
        let idle = device("idle_bytes") / (2 * MIB);
        let lost = (figure("sessions"), figure("exports") - idle, device("chunks") - idle);
        (lost, figure("open_fds").saturating_sub(2 * idle))
    };
    // The least of some looks: whoever looked before may be on its way out still.
    let before = (0..10).map(|_| figures()).min().unwrap();
    for (step, holds) in STEPS {
        // What somebody waits for has to be taken.
        let hoarder = (step == "waiting").then(|| daemon.runtime("hoarder"));
        if let Some(hoarder) = &hoarder {
            hoarder.alloc(&Request::of(Bytes::mib(DEVICE_MIB))).unwrap();
        }
        let mut client = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "steps::a_client_that_is_killed_at_any_step_leaves_nothing_behind", "--nocapture"])
            .env(STEP, step)
            .env(DIRECTORY, daemon.path())
            .envs(daemon.environment())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
        let stopped = lines.by_ref().map(Result::unwrap).find(|line| line.ends_with("stopped"));
        assert!(stopped.is_some(), "{step}: the client ended before");
        if step == "waiting" {
            eventually("it waits", || (daemon.device("waiting_requests") == 1).then_some(()));
        }
        // A release that was sent may have come.
        let held = daemon.device("leased_bytes") + daemon.device("creating_bytes");
        let expected = if hoarder.is_some() { DEVICE_MIB } else { holds };
        assert!(held == expected * MIB || step == "release-sent" || step == "asked", "{step}: {held} bytes are held");
        client.kill().unwrap();
        client.wait().unwrap();
        drop(hoarder);
        eventually(&format!("{step}: the session ends"), || (daemon.status()["sessions"] == 0).then_some(()));
        settle();
        // A connection that is gone is noticed a little later than the process; a ticket that nobody showed takes its time.
        eventually(&format!("{step}: nothing is left, {before:?}"), || (figures() == before).then_some(()));
        // All of it, for the next.
        let next = daemon.runtime("next");
        next.alloc(&Request::of(Bytes::mib(DEVICE_MIB))).unwrap();
        drop(next);
        settle();
    }
}

#[expect(clippy::explicit_write, reason = "println writes for the harness, which may keep it")]
fn stop(here: &str, at: &str) {
    if here == at {
        writeln!(std::io::stdout(), "stopped").unwrap();
        loop {
            std::thread::park();
        }
    }
}

fn go_until(step: &str, directory: &std::path::Path) {
    if matches!(step, "mapped" | "freed") {
        return use_memory_until(step, directory);
    }
    let grpc = Grpc::at(&directory.join("stitchd.sock"));
    if step == "opened" {
        let _session = grpc.open("doomed", 1).unwrap();
        stop("opened", step);
    }
    let (session, channel) = raw::link_at(&directory.join("chunks.sock"), &grpc, "doomed");
    stop("linked", step);
    if matches!(step, "ticket-out" | "claimed") {
        let reply = grpc.acquire(&session, raw::want(&session, 64)).unwrap();
        stop("ticket-out", step);
        let claim =
            stitchd::wire::fd_channel::FdChannel::connect(&directory.join("chunks.sock"), crate::support::PATIENCE);
        let claim = claim.unwrap();
        raw::send(&claim, client_frame::What::Claim(v1::Claim { protocol: 1, ticket: reply.ticket }));
        let (_batch, _fds) = raw::receive(&claim);
        stop("claimed", step);
    }
    if step == "waiting" {
        let want = v1::Want { wait_ms: 60_000, ..raw::want(&session, 64) };
        raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 1, want: Some(want) }));
        stop("waiting", step);
    }
    if matches!(step, "asked" | "first-batch") {
        let want = raw::want(&session, DEVICE_MIB);
        raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 1, want: Some(want) }));
        stop("asked", step);
        // Not acknowledged: the daemon has more.
        let (batch, _fds) = raw::receive(&channel);
        assert!(matches!(batch, daemon_frame::What::Batch(batch) if !batch.is_last));
        stop("first-batch", step);
    }
    let mib = if step == "all-batches" { DEVICE_MIB } else { 64 };
    let leased = raw::acquire(&channel, 2, raw::want(&session, mib)).unwrap();
    stop("all-batches", step);
    let chunk_ids = leased.iter().map(|(id, _)| *id).collect();
    // The descriptors are still open: somebody who says that he gives back, and keeps.
    raw::send(&channel, client_frame::What::Release(v1::Release { request: 3, chunk_ids }));
    stop("release-sent", step);
    // There is no answer to a release.
    eventually("it is released", || (grpc.status().devices[0].leased_bytes == 0).then_some(()));
    drop(leased);
    stop("released", step);
    grpc.close(&session).unwrap();
    stop("closed", step);
}

/// With the real client: memory that is mapped and written to, and what the pools keep after a free.
fn use_memory_until(step: &str, directory: &std::path::Path) {
    let library = support::environment("STITCHD_DRIVER_LIBRARY").map_or_else(LibraryPlace::default, LibraryPlace::at);
    let config = SessionConfig { library, ..SessionConfig::new(directory.join("stitchd.sock"), "doomed") };
    let runtime = Session::connect(&config).unwrap().runtime(0, RuntimeConfig::default()).unwrap();
    let address = runtime.alloc(&Request::of(Bytes::mib(64))).unwrap();
    runtime.device().driver().write(address, &[7; 4096]).unwrap();
    stop("mapped", step);
    runtime.free(address, stitchd::ids::StreamId::DEFAULT).unwrap();
    stop("freed", step);
}
