//! Memory changes hands: leases, releases, limits, waiting, recycling.

use std::os::fd::AsFd;
use std::time::Duration;

use stitchd::error::ErrorKind;
use stitchd::pool::Request;
use stitchd::runtime::{AllocError, RuntimeConfig};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use stitchd::wire::stats_page;
use stitchd::wire::v1::{self, client_frame, daemon_frame};

use crate::raw::{self, Grpc};
use crate::support::{PATIENCE, TestDaemon, eventually, needs_host};

const MIB: u64 = 1 << 20;

#[test]
fn a_runtime_leases_what_it_needs_and_gives_it_back_when_it_ends() {
    let daemon = TestDaemon::start(256);
    let runtime = daemon.runtime("trainer");
    let address = runtime.alloc(&Request::of(Bytes::mib(30))).unwrap();
    runtime.alloc(&Request::of(Bytes::kib(3))).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 32 * MIB);
    assert_eq!(runtime.borders(address).len(), 14);
    drop(runtime);
    daemon.wait_for_device("available_bytes", 256 * MIB);
    assert_eq!(daemon.status()["returned_by_release_bytes"], 32 * MIB);
    assert_eq!(daemon.status()["sessions"], 0);
}

#[test]
fn sessions_show_their_figures_from_the_stats_page() {
    let daemon = TestDaemon::start(256);
    let runtime = daemon.runtime("trainer");
    let kept = runtime.alloc(&Request::of(Bytes::mib(5))).unwrap();
    runtime.alloc(&Request::of(Bytes::kib(3))).unwrap();
    let sessions = daemon.cli_json(&["sessions"]);
    let session = &sessions["sessions"][0];
    assert_eq!((session["name"].as_str(), session["pid"].as_u64()), (Some("trainer"), Some(std::process::id().into())));
    assert_eq!(session["counters"]["live_bytes"], 5 * MIB + 3072);
    assert_eq!(session["counters"]["requests_pool"], 2);
    runtime.free(kept, stitchd::ids::StreamId::DEFAULT).unwrap();
    assert_eq!(daemon.cli_json(&["sessions"])["sessions"][0]["counters"]["live_bytes"], 3072);
}

#[test]
fn the_figures_of_a_session_are_of_all_its_runtimes_and_one_that_is_gone_makes_room_for_the_next() {
    let daemon = TestDaemon::start(256);
    let session = daemon.session("trainer");
    let runtime = || session.runtime(0, stitchd::runtime::RuntimeConfig::default()).unwrap();
    (0..20).for_each(|_| drop(runtime()));
    let mut runtimes: Vec<_> = (0..stats_page::SETS).map(|_| runtime()).collect();
    for runtime in &runtimes {
        runtime.alloc(&Request::of(Bytes::mib(3))).unwrap();
    }
    let live = || daemon.cli_json(&["sessions"])["sessions"][0]["counters"]["live_bytes"].as_u64().unwrap();
    assert_eq!(live(), stats_page::SETS as u64 * 3 * MIB);
    // There is no room for one more.
    let unseen = runtime();
    unseen.alloc(&Request::of(Bytes::mib(3))).unwrap();
    assert_eq!(live(), stats_page::SETS as u64 * 3 * MIB);
    runtimes.truncate(1);
    assert_eq!(live(), 3 * MIB, "what went with its runtime is not live");
    let last = runtime();
    last.alloc(&Request::of(Bytes::mib(5))).unwrap();
    assert_eq!(live(), 8 * MIB);
}

#[test]
fn a_range_of_many_batches_comes_whole_in_order_and_one_batch_at_a_time() {
    let daemon = TestDaemon::start(2048);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "batches");
    let want = raw::want(&session, 1200);
    raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 7, want: Some(want) }));
    let mut counts = Vec::new();
    loop {
        let (daemon_frame::What::Batch(batch), fds) = raw::receive(&channel) else { panic!() };
        assert_eq!(batch.chunks.len(), fds.len());
        for fd in &fds {
            assert_eq!(rustix::fs::fstat(fd).unwrap().st_size, 2 << 20);
        }
        counts.push(fds.len());
        // Nothing follows before the ack.
        channel.set_patience(std::time::Duration::from_millis(50)).unwrap();
        assert!(channel.receive::<v1::DaemonFrame>().is_err());
        channel.set_patience(PATIENCE).unwrap();
        raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 7 }));
        if batch.is_last {
            break;
        }
    }
    assert_eq!(counts, [253, 253, 94]);
    assert_eq!(daemon.device("leased_bytes"), 1200 * MIB);
}

#[test]
fn a_lease_over_grpc_is_fetched_with_its_ticket_once() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let session = grpc.open("tool", 1).unwrap();
    let lease = grpc.acquire(&session, raw::want(&session, 8)).unwrap();
    assert_eq!(lease.chunks.len(), 4);
    let claim = || client_frame::What::Claim(v1::Claim { protocol: 1, ticket: lease.ticket.clone() });

    let channel = raw::chunk_socket(&daemon);
    raw::send(&channel, claim());
    let (daemon_frame::What::Batch(batch), fds) = raw::receive(&channel) else { panic!() };
    assert_eq!((batch.chunks.clone(), batch.is_last, fds.len()), (lease.chunks.clone(), true, 4));
    rustix::io::pwrite(&fds[0], b"mine", 0).unwrap();
    raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 0 }));

    let again = raw::chunk_socket(&daemon);
    raw::send(&again, claim());
    raw::expect_refusal(&again, v1::ErrorKind::NotFound, "ticket is not good");

    let ids: Vec<_> = lease.chunks.iter().map(|chunk| chunk.chunk_id).collect();
    grpc.release(&session, ids.clone()).unwrap();
    let error = grpc.release(&session, ids).unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
    assert!(error.message().contains("does not hold"), "{}", error.message());
    // The same session gets its own chunks again.
    let lease = grpc.acquire(&session, raw::want(&session, 8)).unwrap();
    assert_eq!(lease.chunks.len(), 4);
    grpc.close(&session).unwrap();
    drop(fds);
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

#[test]
fn a_lease_that_nobody_fetches_comes_back() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let session = grpc.open("forgetful", 1).unwrap();
    let lease = grpc.acquire(&session, raw::want(&session, 64)).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 64 * MIB);
    // Also the rest of one of which something was given back by itself.
    grpc.release(&session, vec![lease.chunks[0].chunk_id]).unwrap();
    daemon.wait_for_device("leased_bytes", 0);
}

#[test]
fn limits_and_budgets_are_held_and_said_with_numbers() {
    let daemon = TestDaemon::start(64);
    let session = daemon.session_with_limit("small", Bytes::mib(16));
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    let mut held = vec![runtime.alloc(&Request::of(Bytes::mib(12))).unwrap()];
    let error = runtime.alloc(&Request::of(Bytes::mib(12))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverLimit);
    let text = stitchd::error::chain(&error);
    assert!(text.contains("12.0 MiB held") && text.contains("limit is 16.0 MiB"), "{text}");
    held.push(runtime.alloc(&Request::of(Bytes::mib(4))).unwrap());

    let other = daemon.runtime("other");
    let error = other.alloc(&Request::of(Bytes::mib(60))).unwrap_err();
    let text = stitchd::error::chain(&error);
    assert!(text.contains("'small'") && text.contains("48.0 MiB of 64.0 MiB available"), "{text}");
    let error = other.alloc(&Request::of(Bytes::mib(65))).unwrap_err();
    assert!(stitchd::error::chain(&error).contains("whole budget"), "{error}");
    let error = other.alloc(&Request::of(Bytes::gib(1 << 30))).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory { .. } | AllocError::TooLarge { .. }));
    other.alloc(&Request::of(Bytes::mib(48))).unwrap();
}

#[test]
fn a_request_waits_for_what_another_gives_back() {
    let daemon = TestDaemon::start(64);
    let first = daemon.runtime("first");
    let held = first.alloc(&Request::of(Bytes::mib(60))).unwrap();
    let patient = RuntimeConfig { wait: PATIENCE, ..RuntimeConfig::default() };
    // How long the daemon may take for an answer is one thing, how long one waits for memory another.
    let patience = Duration::from_millis(500);
    let second = SessionConfig { patience, ..daemon.session_config("second") };
    let second = Session::connect(&second).unwrap().runtime(0, patient).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.alloc(&Request::of(Bytes::mib(32))).unwrap());
        eventually("the request waits", || (daemon.status()["waiting_requests"] == 1).then_some(()));
        std::thread::sleep(patience + patience);
        assert!(!waiting.is_finished());
        first.free(held, stitchd::ids::StreamId::DEFAULT).unwrap();
        assert_eq!(first.trim(Bytes::MAX), Bytes::mib(60));
        waiting.join().unwrap();
    });
    assert_eq!(daemon.device("leased_bytes"), 32 * MIB);
}

#[test]
fn a_request_that_waits_too_long_is_told_who_has_the_memory() {
    let daemon = TestDaemon::start(64);
    let first = daemon.runtime("hoarder");
    first.alloc(&Request::of(Bytes::mib(60))).unwrap();
    let patient = RuntimeConfig { wait: Duration::from_millis(200), ..RuntimeConfig::default() };
    let second = daemon.session("second").runtime(0, patient).unwrap();
    let text = stitchd::error::chain(&second.alloc(&Request::of(Bytes::mib(32))).unwrap_err());
    // Not before its time, of which a little was gone before the daemon was asked; how much later is for a busy machine to say.
    let waited = text.split("after ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    assert!(text.contains("'hoarder'") && waited >= Some(150), "{text}");
}

#[test]
fn descriptors_are_sealed_and_their_memory_is_shared_with_the_daemons_copy() {
    if needs_host("a GPU's chunks are not files") {
        return;
    }
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "sealed");
    let leased = raw::acquire(&channel, 1, raw::want(&session, 2)).unwrap();
    let fd = leased[0].1.as_fd();
    assert!(rustix::fs::ftruncate(fd, 0).is_err(), "a chunk could be cut short under whoever maps it");
    assert!(rustix::fs::ftruncate(fd, 4 << 20).is_err());
    assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
}
