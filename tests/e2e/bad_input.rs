//! Whatever is wrong gets its own clear error, and nothing is lost by it.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use stitchd::session::{Session, SessionConfig, SessionError};
use stitchd::wire::fd_channel::FdChannel;
use stitchd::wire::v1::{self, client_frame, daemon_frame};

use crate::raw::{self, Grpc};
use crate::support::{PATIENCE, TestDaemon, config_file, eventually, needs_host, python};

const MIB: u64 = 1 << 20;

#[test]
fn another_protocol_is_refused_by_number_on_both_sockets() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let error = grpc.open("future", 99).unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unimplemented);
    assert!(error.message().contains("protocol 99"), "{}", error.message());
    let session = grpc.open("present", 1).unwrap();
    let channel = raw::chunk_socket(&daemon);
    raw::send(&channel, client_frame::What::Hello(v1::Hello { protocol: 2, ticket: session.ticket, patience_ms: 0 }));
    raw::expect_refusal(&channel, v1::ErrorKind::Unsupported, "protocol 2");
    raw::expect_closed(&channel);
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let session = grpc.open("lost", 1).unwrap();
    let want = v1::Want { device_uuid: vec![9; 16], ..raw::want(&session, 2) };
    let error = grpc.acquire(&session, want).unwrap_err();
    assert_eq!(error.code(), tonic::Code::NotFound);
    assert!(
        error.message().contains("GPU-09090909") && error.message().contains("there are GPU-"),
        "{}",
        error.message()
    );
    let session = daemon.session("lost");
    let error = session.runtime(7, stitchd::runtime::RuntimeConfig::default()).unwrap_err();
    assert!(matches!(error, SessionError::NoDevice { ordinal: 7, count: 1, .. }), "{error}");
}

#[test]
fn wants_that_make_no_sense_are_refused_by_field() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "confused");
    let good = raw::want(&session, 2);
    let cases: [(v1::Want, &str); 6] = [
        (v1::Want { len_bytes: 0, ..good.clone() }, "want.len_bytes"),
        (v1::Want { len_bytes: u64::MAX, ..good.clone() }, "want.len_bytes"),
        (v1::Want { shape: None, ..good.clone() }, "want.shape"),
        (v1::Want { device_uuid: vec![1, 2], ..good.clone() }, "want.device_uuid"),
        (v1::Want { wait_ms: u64::MAX, ..good.clone() }, "want.wait_ms"),
        (v1::Want { len_bytes: 1 << 41, ..good.clone() }, "more chunks than one lease can have"),
    ];
    for (request, (want, words)) in (1..).zip(cases) {
        let refused = raw::acquire(&channel, request, want).unwrap_err();
        assert_eq!(refused.kind(), v1::ErrorKind::Invalid, "{}", refused.message);
        assert!(refused.message.contains(words), "{}", refused.message);
    }
    // The session is as good as before.
    assert_eq!(raw::acquire(&channel, 99, good).unwrap().len(), 1);
}

#[test]
fn a_secret_or_ticket_of_somebody_else_is_no_good() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let mine = grpc.open("mine", 1).unwrap();
    let forged = v1::OpenReply { secret: vec![0; 16], ..mine.clone() };
    assert_eq!(grpc.close(&forged).unwrap_err().code(), tonic::Code::NotFound);
    let short = v1::OpenReply { secret: vec![0; 3], ..mine.clone() };
    assert_eq!(grpc.close(&short).unwrap_err().code(), tonic::Code::InvalidArgument);
    // A ticket is good once.
    let first = raw::chunk_socket(&daemon);
    raw::send(&first, raw::hello(&mine));
    assert!(matches!(raw::receive(&first).0, daemon_frame::What::Welcome(_)));
    let second = raw::chunk_socket(&daemon);
    raw::send(&second, raw::hello(&mine));
    raw::expect_refusal(&second, v1::ErrorKind::NotFound, "ticket is not good");
    // The first connection does not suffer.
    assert_eq!(raw::acquire(&first, 1, raw::want(&mine, 2)).unwrap().len(), 1);
}

#[test]
fn a_client_that_reads_late_gets_every_answer() {
    const RELEASES: u64 = 2000;
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "late");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // More than a socket buffer of answers: the daemon waits for room, and so does this side then.
            for request in 1..=RELEASES {
                raw::send(&channel, client_frame::What::Release(v1::Release { request, chunk_ids: vec![77] }));
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(daemon.session("another").devices().len(), 1, "others are served meanwhile");
        for request in 1..=RELEASES {
            match raw::receive(&channel).0 {
                daemon_frame::What::Refused(refused) => assert_eq!(refused.request, request),
                other => panic!("not refused: {other:?}"),
            }
        }
    });
    assert_eq!(raw::acquire(&channel, RELEASES + 1, raw::want(&session, 2)).unwrap().len(), 1);
}

#[test]
fn packets_that_break_the_protocol_end_the_connection_and_cost_nothing() {
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("broke the protocol");
    let grpc = Grpc::connect(&daemon);
    let before = grpc.status().open_fds;
    let pipe = rustix::pipe::pipe().unwrap();
    let other = std::fs::File::open("/dev/null").unwrap();
    type Break<'a> = Box<dyn Fn(&FdChannel, &v1::OpenReply) + 'a>;
    let breaks: [(&str, Break<'_>); 8] = [
        ("cannot be understood", Box::new(|channel, _| channel.send_bytes(&[0xff; 40], &[]).unwrap())),
        ("longer than", Box::new(|channel, _| channel.send_bytes(&vec![0; 70_000], &[]).unwrap())),
        (
            "descriptors came with a message that has none",
            Box::new(|channel, session| {
                let acquire = v1::Acquire { request: 1, want: Some(raw::want(session, 2)) };
                let frame = v1::ClientFrame { what: Some(client_frame::What::Acquire(acquire)) };
                channel.send(&frame, &[other.as_fd(), pipe.0.as_fd()]).unwrap();
            }),
        ),
        ("a second first message", Box::new(|channel, session| raw::send(channel, raw::hello(session)))),
        (
            "an ack for a batch that was not sent",
            Box::new(|channel, _| {
                raw::send(channel, client_frame::What::Ack(v1::Ack { request: 5 }));
            }),
        ),
        (
            "neither a hello nor a claim",
            Box::new(|_, _| {
                let channel = raw::chunk_socket(&daemon);
                raw::send(&channel, client_frame::What::Release(v1::Release::default()));
                raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "neither a hello nor a claim");
            }),
        ),
        (
            "kind that this daemon does not know",
            Box::new(|channel, _| {
                // An unknown field: a message from a later version.
                channel.send_bytes(&[0xfa, 0x01, 0x01, 0x00], &[]).unwrap();
            }),
        ),
        (
            "",
            Box::new(|channel, _| {
                // Descriptors and not one byte of a message.
                channel.send_bytes(&[], &[pipe.0.as_fd(), pipe.1.as_fd()]).unwrap();
            }),
        ),
    ];
    for (words, break_it) in breaks {
        let (session, channel) = raw::link(&daemon, &grpc, "rude");
        let leased = raw::acquire(&channel, 1, raw::want(&session, 8)).unwrap();
        break_it(&channel, &session);
        if words != "neither a hello nor a claim" {
            if !words.is_empty() {
                raw::expect_refusal(&channel, v1::ErrorKind::Invalid, words);
            }
            raw::expect_closed(&channel);
            // What it has leased stays its own: its process lives.
            assert_eq!(daemon.device("leased_bytes"), 8 * MIB, "{words}");
        }
        drop(leased);
        grpc.close(&session).unwrap();
        drop(channel);
    }
    daemon.wait_for_device("available_bytes", 64 * MIB);
    eventually("descriptors are closed", || (grpc.status().open_fds <= before).then_some(()));
}

/// What a client makes of a daemon that breaks the protocol.
fn against_a_false_daemon(answer: impl Fn(&FdChannel, u64) + Send + 'static) -> String {
    // A real daemon for gRPC, and a false chunk socket in its directory.
    let daemon = TestDaemon::start(64);
    std::fs::remove_file(daemon.chunk_socket()).unwrap();
    let listener = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let address = rustix::net::SocketAddrUnix::new(daemon.chunk_socket()).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let served = std::thread::spawn(move || {
        let channel = FdChannel::over(rustix::net::accept(&listener).unwrap(), true);
        channel.receive::<v1::ClientFrame>().unwrap();
        let page = stitchd::wire::stats_page::create(stitchd::ids::SessionId(1)).unwrap();
        let welcome =
            daemon_frame::What::Welcome(v1::Welcome { session_id: 1, stats_page_version: 1, ..v1::Welcome::default() });
        channel.send(&v1::DaemonFrame { what: Some(welcome) }, &[page.as_fd()]).unwrap();
        let (frame, _) = channel.receive::<v1::ClientFrame>().unwrap();
        let Some(client_frame::What::Acquire(acquire)) = frame.what else { panic!("{frame:?}") };
        answer(&channel, acquire.request);
        // Whatever the client still says is read, so that it does not meet a closed socket before its own judgement.
        while channel.receive::<v1::ClientFrame>().is_ok() {}
    });
    let runtime = daemon.runtime("victim");
    let error = runtime.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(4))).unwrap_err();
    drop(runtime);
    served.join().unwrap();
    stitchd::error::chain(&error)
}

fn batch(request: u64, chunks: u64) -> v1::DaemonFrame {
    let chunks = (1..=chunks).map(|chunk_id| v1::ChunkInfo { chunk_id, len_bytes: 2 << 20 }).collect();
    v1::DaemonFrame { what: Some(daemon_frame::What::Batch(v1::Batch { request, chunks, is_last: true })) }
}

#[test]
fn a_client_refuses_a_manifest_without_its_descriptors() {
    let text = against_a_false_daemon(|channel, request| channel.send(&batch(request, 2), &[]).unwrap());
    assert!(text.contains("2 chunks came with 0 descriptors"), "{text}");
}

#[test]
fn a_client_refuses_descriptors_that_are_no_chunks() {
    let text = against_a_false_daemon(|channel, request| {
        let null = std::fs::File::open("/dev/null").unwrap();
        channel.send(&batch(request, 2), &[null.as_fd(), null.as_fd()]).unwrap();
    });
    assert!(text.contains("not a chunk"), "{text}");
    // Memory that whoever sent it could still cut short is no chunk either, where it is the kernel's.
    if needs_host("a GPU's chunks are not files") {
        return;
    }
    let text = against_a_false_daemon(|channel, request| {
        let unsealed = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 2 << 20).unwrap();
        channel.send(&batch(request, 1), &[unsealed.as_fd()]).unwrap();
    });
    assert!(text.contains("not sealed"), "{text}");
}

#[test]
fn a_client_survives_garbage_silence_and_hanging_up() {
    let text = against_a_false_daemon(|channel, _| channel.send_bytes(&[0xff; 100], &[]).unwrap());
    assert!(text.contains("cannot be understood"), "{text}");
    let text = against_a_false_daemon(|channel, _| channel.send_bytes(&vec![0; 80_000], &[]).unwrap());
    assert!(text.contains("longer than"), "{text}");
    let text = against_a_false_daemon(|channel, _| {
        rustix::net::shutdown(channel, rustix::net::Shutdown::Both).unwrap();
    });
    assert!(text.contains("went away"), "{text}");
}

#[test]
fn nobody_a_file_and_a_deaf_listener_are_told_apart_from_a_daemon_in_bounded_time() {
    let dir = tempfile::tempdir().unwrap();
    let connect = |name: &str| {
        let config = SessionConfig {
            patience: std::time::Duration::from_millis(300),
            ..SessionConfig::new(dir.path().join(name), "x")
        };
        Session::connect(&config).unwrap_err()
    };
    let error = connect("nothing");
    assert!(matches!(&error, SessionError::NoDaemon { .. }) && error.to_string().contains("stitchd serve"), "{error}");
    std::fs::write(dir.path().join("file"), "no socket").unwrap();
    assert!(matches!(connect("file"), SessionError::NoDaemon { .. }));
    let _deaf = UnixListener::bind(dir.path().join("deaf")).unwrap();
    assert!(matches!(connect("deaf"), SessionError::NoDaemon { .. }));
}

#[test]
fn one_process_has_its_share_of_sessions_and_of_waiting_requests_and_no_more() {
    use stitchd::limits::{ACQUIRES_QUEUED_MAX, PROCESS_SESSIONS_MAX};
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let sessions: Vec<_> = (0..PROCESS_SESSIONS_MAX).map(|_| grpc.open("one of many", 1).unwrap()).collect();
    let refused = grpc.open("one too many", 1).unwrap_err();
    assert!(refused.message().contains("256 sessions"), "{refused}");
    grpc.close(&sessions[0]).unwrap();
    grpc.open("one again", 1).unwrap();

    grpc.acquire(&sessions[1], raw::want(&sessions[1], 64)).unwrap();
    let want = v1::Want { wait_ms: 500, ..raw::want(&sessions[2], 8) };
    let answers = grpc.acquire_at_once(&sessions[2], &want, ACQUIRES_QUEUED_MAX + 3);
    let too_many = answers
        .iter()
        .filter(|answer| answer.as_ref().is_err_and(|refused| refused.message().contains("wait already")));
    assert_eq!(too_many.count(), 3);
    assert!(answers.iter().all(Result::is_err), "the memory is another session's");
}

#[test]
fn one_process_cannot_take_every_connection() {
    // Both sockets of a daemon with few descriptors, held by one process that says nothing.
    let daemon = TestDaemon::with_open_files(512, None, &["--device=0=64MiB"]);
    let before = daemon.status()["open_fds"].as_u64().unwrap();
    let mut held = Vec::new();
    for _ in 0..300 {
        // A connection that is closed at once is refused as well as one that is not accepted.
        held.extend(std::os::unix::net::UnixStream::connect(daemon.socket()).ok());
    }
    let chunk_sockets: Vec<_> = (0..100).map(|_| raw::chunk_socket(&daemon)).collect();
    // Another process is served, and sees that not all of it is taken.
    let taken = daemon.status()["open_fds"].as_u64().unwrap() - before;
    assert!(taken < 128, "{taken} descriptors are one process's");
    drop((held, chunk_sockets));
    eventually("all are closed", || (daemon.status()["open_fds"].as_u64().unwrap() <= before).then_some(()));
    daemon.runtime("next").alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(64))).unwrap();
}

#[test]
fn one_process_cannot_take_every_descriptor_with_sessions() {
    let daemon = TestDaemon::with_open_files(512, None, &["--device=0=64MiB"]);
    let before = daemon.status()["open_fds"].as_u64().unwrap();
    // They need no connection once they are open.
    let grpc = Grpc::connect(&daemon);
    let mut opened = 0;
    let refused = loop {
        match grpc.open("one of many", 1) {
            Ok(_) => opened += 1,
            Err(refused) => break refused,
        }
        assert!(opened < 64, "one process has {opened} sessions");
    };
    assert!(refused.message().contains("LimitNOFILE"), "{refused}");
    let taken = daemon.status()["open_fds"].as_u64().unwrap() - before;
    assert!(opened > 8 && taken < 128, "{opened} sessions of one process take {taken} descriptors");
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("broke the protocol");
    let grpc = Grpc::connect(&daemon);
    let before = daemon.status()["open_fds"].as_u64().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for round in 0..20 {
        let (session, channel) = raw::link(&daemon, &grpc, "sender");
        let release = v1::ClientFrame {
            what: Some(client_frame::What::Release(v1::Release { request: round, chunk_ids: Vec::new() })),
        };
        channel.send(&release, &[null.as_fd(); 253]).unwrap();
        raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "descriptors");
        grpc.close(&session).unwrap();
    }
    eventually("all are closed", || (daemon.status()["open_fds"].as_u64().unwrap() <= before).then_some(()));
}

/// Asks for memory, and waits until the first of it lies there to be read.
fn acquire_unread(channel: &FdChannel, request: u64, want: v1::Want) {
    raw::send(channel, client_frame::What::Acquire(v1::Acquire { request, want: Some(want) }));
    let mut fds = [rustix::event::PollFd::new(channel, rustix::event::PollFlags::IN)];
    let patience = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&patience)), Ok(1), "nothing came");
}

fn expect_batch(channel: &FdChannel, request: u64, count: usize) -> Vec<u64> {
    match raw::receive(channel) {
        (daemon_frame::What::Batch(batch), fds) => {
            assert_eq!((batch.request, fds.len()), (request, count));
            batch.chunks.iter().map(|chunk| chunk.chunk_id).collect()
        }
        (other, _) => panic!("not a batch: {other:?}"),
    }
}

/// An ack for request 1, whose batch nobody has read: no lie that shows, for the answer to a release (of another thread, say) lies behind the batch.
fn ack_behind_an_answer(channel: &FdChannel) {
    raw::send(channel, client_frame::What::Release(v1::Release { request: 2, chunk_ids: vec![7777] }));
    raw::send(channel, client_frame::What::Ack(v1::Ack { request: 1 }));
}

#[test]
fn an_ack_for_what_was_not_read_ends_the_connection_and_the_others_lease() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    // Who reads before the daemon has looked has told no lie.
    let is_caught = |times: usize| {
        let count = || daemon.log().matches("an ack for a batch that was not read").count();
        eventually("the daemon has looked", || (count() == times).then_some(()));
    };
    let (session, channel) = raw::link(&daemon, &grpc, "blind");
    let (next, other) = raw::link(&daemon, &grpc, "another");
    acquire_unread(&channel, 1, raw::want(&session, 4));
    raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 1 }));
    assert_eq!(raw::acquire(&other, 1, raw::want(&next, 8)).unwrap().len(), 4);
    is_caught(1);
    expect_batch(&channel, 1, 2);
    raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "that was not read");
    raw::expect_closed(&channel);
    // The same where the lease was made over gRPC.
    let lease = grpc.acquire(&next, raw::want(&next, 4)).unwrap();
    let channel = raw::chunk_socket(&daemon);
    raw::send(&channel, client_frame::What::Claim(v1::Claim { protocol: 1, ticket: lease.ticket }));
    let mut fds = [rustix::event::PollFd::new(&channel, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, None).unwrap();
    raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 0 }));
    is_caught(2);
    expect_batch(&channel, 0, 2);
    raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "that was not read");
    raw::expect_closed(&channel);
}

#[test]
fn an_answer_that_waits_behind_a_batch_makes_no_liar_of_who_has_read_it() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "busy");
    acquire_unread(&channel, 1, raw::want(&session, 4));
    ack_behind_an_answer(&channel);
    raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 3, want: Some(raw::want(&session, 2)) }));
    daemon.wait_for_device("leased_bytes", 6 * MIB);
    expect_batch(&channel, 1, 2);
    raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "chunk 7777");
    expect_batch(&channel, 3, 1);
    raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 3 }));
    assert_eq!(raw::acquire(&channel, 4, raw::want(&session, 2)).unwrap().len(), 1);
}

#[test]
fn of_a_lease_whose_rest_cannot_be_sent_in_time_only_the_rest_is_taken_back() {
    let daemon = TestDaemon::start(600);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "says that it reads");
    acquire_unread(&channel, 1, raw::want(&session, 600));
    ack_behind_an_answer(&channel);
    // The next one in line for the same memory.
    raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 3, want: Some(raw::want(&session, 80)) }));
    daemon.wait_for_device("leased_bytes", (253 + 40) * 2 * MIB);
    let first = expect_batch(&channel, 1, 253);
    raw::expect_refusal(&channel, v1::ErrorKind::Invalid, "chunk 7777");
    raw::expect_refusal(&channel, v1::ErrorKind::Exhausted, "were not read within 10s");
    // What was acknowledged may be in use: it is granted to nobody, the session itself neither, until it is released.
    let second = expect_batch(&channel, 3, 40);
    assert!(second.iter().all(|chunk| !first.contains(chunk)), "{first:?} {second:?}");
    raw::send(&channel, client_frame::What::Ack(v1::Ack { request: 3 }));
    raw::send(&channel, client_frame::What::Release(v1::Release { request: 4, chunk_ids: first }));
    daemon.wait_for_device("leased_bytes", 80 * MIB);
}

#[test]
fn who_leaves_descriptors_unread_is_sent_no_more_and_another_process_is() {
    let (_dir, flag) = config_file("ladder = ['2MiB', '32MiB']\n");
    let daemon = TestDaemon::with_open_files(512, None, &["--device=0=2GiB", &flag]);
    let grpc = Grpc::connect(&daemon);
    // Two links that end with 150 descriptors unread each: the bound is a full message, 253.
    let ended: Vec<_> = (0..2)
        .map(|_| {
            let (session, channel) = raw::link(&daemon, &grpc, "does not read");
            acquire_unread(&channel, 1, raw::want(&session, 300));
            grpc.close(&session).unwrap();
            daemon.wait_for_device("leased_bytes", 0);
            channel
        })
        .collect();
    let (session, channel) = raw::link(&daemon, &grpc, "the same process");
    let refused = raw::acquire(&channel, 1, raw::want(&session, 2)).unwrap_err();
    let whose = format!("process {} has 300 of them", std::process::id());
    assert!(refused.message.contains(&whose), "{}", refused.message);
    if let Some(child) = python(&daemon, "say(malloc(8 * MIB) > 0)") {
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(said, "True\n");
    }
    for channel in &ended {
        expect_batch(channel, 1, 150);
    }
    eventually("what was read counts no more", || raw::acquire(&channel, 2, raw::want(&session, 2)).ok());
}
