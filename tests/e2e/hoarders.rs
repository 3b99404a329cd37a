//! Whoever takes and does not use: half a message, a reply that nobody reads, connections that say nothing. It costs the daemon little, and the others nothing.

use std::io::Read as _;
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::Frame;
use stitchd::limits;
use stitchd::pool::Request;
use stitchd::units::Bytes;
use stitchd::wire::v1::notice;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service as _, http};

use crate::plans::small_trace;
use crate::raw::Grpc;
use crate::support::{PATIENCE, TestDaemon, eventually, run_json};

/// A message of 64 MiB of which the last 4 never come.
struct Half {
    left: usize,
    sent: Arc<AtomicUsize>,
}

const HALF_LEN: usize = 60 << 20;

impl http_body::Body for Half {
    type Data = tonic::codegen::Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        static PIECE: [u8; 64 << 10] = [0; 64 << 10];
        static BEGIN: [u8; 5] = [0, 4, 0, 0, 0];
        let piece: &'static [u8] = if self.left == HALF_LEN { &BEGIN } else { &PIECE };
        if self.left < piece.len() {
            return Poll::Pending;
        }
        self.left -= piece.len();
        self.sent.fetch_add(piece.len(), Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(tonic::codegen::Bytes::from_static(piece)))))
    }
}

/// The most memory that the daemon has had.
fn peak_mib(daemon: &TestDaemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

#[test]
fn plans_that_never_arrive_take_the_memory_of_one_and_keep_nobody_from_storing_another() {
    let daemon = TestDaemon::start(64);
    let trace = small_trace(daemon.path());
    let plan = daemon.path().join("small.plan");
    run_json(&["plan", trace.to_str().unwrap(), "-o", plan.to_str().unwrap(), "--json"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let sent = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let channel = runtime.block_on(stitchd::session::dial(&daemon.socket())).unwrap();
        for _ in 0..8 {
            let request = http::Request::post("http://localhost/stitchd.v1.Plans/Put")
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(Body::new(Half { left: HALF_LEN, sent: Arc::clone(&sent) }))
                .unwrap();
            let mut channel = channel.clone();
            runtime.spawn(async move {
                std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
                channel.call(request).await
            });
        }
    }
    // Until nothing more is taken.
    let mut last = 0;
    eventually("what can be sent was sent", || {
        std::thread::sleep(Duration::from_millis(300));
        let before = std::mem::replace(&mut last, sent.load(Ordering::Relaxed));
        (last >= HALF_LEN - (64 << 10) && last == before).then_some(())
    });
    daemon.cli_json(&["reserve", "--plan", plan.to_str().unwrap()]);
    let peak = peak_mib(&daemon);
    assert!(peak < 256, "the daemon has had {peak} MiB");
    // Those of the same process have their turn when the time of the first is up.
    eventually("the next begins to arrive", || (sent.load(Ordering::Relaxed) > last + HALF_LEN / 2).then_some(()));
    runtime.shutdown_background();
}

#[test]
fn replies_that_nobody_reads_take_the_memory_of_one_and_keep_nobody_from_theirs() {
    const CONNECTIONS: usize = 48;
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let name = "n".repeat(limits::NAME_LEN_MAX);
    let sessions: Vec<_> = (0..limits::PROCESS_SESSIONS_MAX - 1).map(|_| grpc.open(&name, 1).unwrap()).collect();
    let before = peak_mib(&daemon);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let answered = Arc::new(AtomicUsize::new(0));
    // Nothing is asked of the one; of the other what file describes a service (field 4, a name).
    let calls = [
        ("stitchd.v1.Admin/Status", "\0\0\0\0\0".to_owned()),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "\0\0\0\0\x12\x22\x10stitchd.v1.Admin".to_owned()),
    ];
    for (path, message) in (0..CONNECTIONS).map(|number| &calls[number % 2]) {
        let socket = daemon.socket();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
        });
        // Room for the first bytes of a reply, and no more.
        let endpoint = tonic::transport::Endpoint::from_static("http://localhost").initial_stream_window_size(64);
        let channel = runtime.block_on(endpoint.connect_with_connector(connector)).unwrap();
        for _ in 0..limits::GRPC_STREAMS_MAX {
            let request = http::Request::post(format!("http://localhost/{path}"))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(Body::new(message.clone()))
                .unwrap();
            let (mut channel, answered) = (channel.clone(), Arc::clone(&answered));
            runtime.spawn(async move {
                std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
                let reply = channel.call(request).await;
                answered.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await;
                drop(reply);
            });
        }
    }
    eventually("the first of each is answered", || (answered.load(Ordering::Relaxed) > 1).then_some(()));
    // Another process asks, and reads.
    assert_eq!(daemon.status()["sessions"], sessions.len());
    std::thread::sleep(Duration::from_secs(1));
    let grown = peak_mib(&daemon) - before;
    assert!(grown < 24, "{grown} MiB for replies that nobody reads, {} of them", answered.load(Ordering::Relaxed));
    runtime.shutdown_background();
    // With the connections their turns go, too.
    assert_eq!(grpc.status().sessions.len(), sessions.len());
}

#[test]
fn of_two_that_watch_a_session_the_second_is_told() {
    let mut daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let session = grpc.open("watched twice", 1).unwrap();
    let mut first = grpc.watch(&session);
    assert!(matches!(grpc.hear(&mut first), Some(notice::What::Attached(_))));
    let mut second = grpc.watch(&session);
    assert!(matches!(grpc.hear(&mut second), Some(notice::What::Attached(_))));
    assert_eq!(grpc.hear(&mut first), None);
    daemon.terminate();
    assert!(matches!(grpc.hear(&mut second), Some(notice::What::ShuttingDown(_))));
}

#[test]
fn connections_over_http_that_say_nothing_take_few_descriptors_and_keep_nobody_out() {
    let flags = ["--device=0=64MiB", "--http", "127.0.0.1:0"];
    let daemon = TestDaemon::with_open_files(256, None, &flags);
    let before = daemon.status()["open_fds"].as_u64().unwrap();
    let mut held: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(daemon.http_address()).unwrap()).collect();
    let (status, text) = daemon.http("/metrics");
    assert!(status.contains("200") && text.contains("stitchd_open_fds"), "{status}");
    let taken = daemon.status()["open_fds"].as_u64().unwrap() - before;
    assert!(taken <= 40, "{taken} descriptors");
    // Everything else goes on.
    daemon.runtime("a job").alloc(&Request::of(Bytes::mib(64))).unwrap();
    assert!(daemon.http("/livez").0.contains("200"));
    // Those that were first are gone already, and the last are let go of, too.
    for connection in [held.remove(0), held.pop().unwrap()] {
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        let outcome = (&connection).read(&mut [0]);
        let is_open = outcome.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!is_open, "{outcome:?}");
    }
}
