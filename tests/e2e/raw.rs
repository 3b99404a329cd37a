//! The wire without the client's manners: single calls and packets, right and wrong.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use stitchd::wire::fd_channel::{ChannelError, FdChannel};
use stitchd::wire::v1::admin_client::AdminClient;
use stitchd::wire::v1::leases_client::LeasesClient;
use stitchd::wire::v1::ranges_client::RangesClient;
use stitchd::wire::v1::sessions_client::SessionsClient;
use stitchd::wire::v1::{self, client_frame, daemon_frame};
use tonic::transport::Channel;
use tonic::{Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{PATIENCE, TestDaemon};

/// A gRPC connection, kept as long as the session shall be.
pub(crate) struct Grpc {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

impl Grpc {
    pub(crate) fn connect(daemon: &TestDaemon) -> Grpc {
        Grpc::at(&daemon.socket())
    }

    pub(crate) fn at(socket: &Path) -> Grpc {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let channel = runtime.block_on(stitchd::session::dial(socket)).unwrap();
        Grpc { runtime, channel }
    }

    fn call<T, A>(&self, call: impl FnOnce(Channel) -> A) -> Result<T, Status>
    where
        A: Future<Output = Result<Response<T>, Status>>,
    {
        self.runtime.block_on(call(self.channel.clone())).map(Response::into_inner)
    }

    /// What gRPC's own health service says of a service, or of the whole.
    pub(crate) fn health(&self, service: &str) -> ServingStatus {
        let request = HealthCheckRequest { service: service.into() };
        self.call(async |channel| HealthClient::new(channel).check(request).await).unwrap().status()
    }

    pub(crate) fn open(&self, name: &str, protocol: u32) -> Result<v1::OpenReply, Status> {
        self.open_as(v1::OpenRequest { protocol, name: name.into(), ..v1::OpenRequest::default() })
    }

    pub(crate) fn open_as(&self, request: v1::OpenRequest) -> Result<v1::OpenReply, Status> {
        self.call(async |channel| SessionsClient::new(channel).open(request).await)
    }

    pub(crate) fn close(&self, session: &v1::OpenReply) -> Result<v1::CloseReply, Status> {
        let request = v1::CloseRequest { session_id: session.session_id, secret: session.secret.clone() };
        self.call(async |channel| SessionsClient::new(channel).close(request).await)
    }

    pub(crate) fn acquire(&self, session: &v1::OpenReply, want: v1::Want) -> Result<v1::AcquireReply, Status> {
        let request =
            v1::AcquireRequest { session_id: session.session_id, secret: session.secret.clone(), want: Some(want) };
        self.call(async |channel| LeasesClient::new(channel).acquire(request).await)
    }

    /// The same so many times at once.
    pub(crate) fn acquire_at_once(
        &self,
        session: &v1::OpenReply,
        want: &v1::Want,
        count: usize,
    ) -> Vec<Result<v1::AcquireReply, Status>> {
        self.runtime.block_on(async {
            let mut calls = tokio::task::JoinSet::new();
            for _ in 0..count {
                let (session_id, secret) = (session.session_id, session.secret.clone());
                let request = v1::AcquireRequest { session_id, secret, want: Some(want.clone()) };
                let mut client = LeasesClient::new(self.channel.clone());
                calls.spawn(async move { client.acquire(request).await.map(Response::into_inner) });
            }
            calls.join_all().await
        })
    }

    pub(crate) fn release(&self, session: &v1::OpenReply, chunk_ids: Vec<u64>) -> Result<v1::ReleaseReply, Status> {
        let request = v1::ReleaseRequest { session_id: session.session_id, secret: session.secret.clone(), chunk_ids };
        self.call(async |channel| LeasesClient::new(channel).release(request).await)
    }

    /// What the session is told from now on.
    pub(crate) fn watch(&self, session: &v1::OpenReply) -> tonic::Streaming<v1::Notice> {
        let request = v1::WatchRequest { session_id: session.session_id, secret: session.secret.clone() };
        self.call(async |channel| SessionsClient::new(channel).watch(request).await).unwrap()
    }

    /// The next of it, or that there is no more.
    pub(crate) fn hear(&self, notices: &mut tonic::Streaming<v1::Notice>) -> Option<v1::notice::What> {
        let next = async { tokio::time::timeout(PATIENCE, notices.message()).await };
        self.runtime.block_on(next).expect("nothing is heard").unwrap().and_then(|notice| notice.what)
    }

    pub(crate) fn publish(
        &self,
        session: &v1::OpenReply,
        request: v1::PublishRequest,
    ) -> Result<v1::PublishReply, Status> {
        let request = v1::PublishRequest { session_id: session.session_id, secret: session.secret.clone(), ..request };
        self.call(async |channel| RangesClient::new(channel).publish(request).await)
    }

    pub(crate) fn reattach(&self, request: v1::ReattachRequest) -> Result<v1::ReattachReply, Status> {
        self.call(async |channel| SessionsClient::new(channel).reattach(request).await)
    }

    pub(crate) fn attach(&self, session: &v1::OpenReply, name: &str) -> Result<v1::AttachReply, Status> {
        let (session_id, secret) = (session.session_id, session.secret.clone());
        let request = v1::AttachRequest { session_id, secret, name: name.into(), ..v1::AttachRequest::default() };
        self.call(async |channel| RangesClient::new(channel).attach(request).await)
    }

    pub(crate) fn detach(&self, session: &v1::OpenReply, range_id: u64) -> Result<v1::DetachReply, Status> {
        let request = v1::DetachRequest { session_id: session.session_id, secret: session.secret.clone(), range_id };
        self.call(async |channel| RangesClient::new(channel).detach(request).await)
    }

    pub(crate) fn status(&self) -> v1::StatusReply {
        self.call(async |channel| AdminClient::new(channel).status(v1::StatusRequest {}).await).unwrap()
    }
}

/// A want for `mib` MiB in chunks of 2 MiB on the session's first device.
pub(crate) fn want(session: &v1::OpenReply, mib: u64) -> v1::Want {
    v1::Want {
        device_uuid: session.devices[0].uuid.clone(),
        len_bytes: mib << 20,
        shape: Some(v1::want::Shape::UniformBytes(2 << 20)),
        plan_id: 0,
        wait_ms: 0,
        waited_ms: 0,
    }
}

/// A connection to the chunk socket.
pub(crate) fn chunk_socket(daemon: &TestDaemon) -> FdChannel {
    FdChannel::connect(&daemon.chunk_socket(), PATIENCE).unwrap()
}

pub(crate) fn send(channel: &FdChannel, what: client_frame::What) {
    channel.send(&v1::ClientFrame { what: Some(what) }, &[]).unwrap();
}

pub(crate) fn receive(channel: &FdChannel) -> (daemon_frame::What, Vec<OwnedFd>) {
    let (frame, fds) = channel.receive::<v1::DaemonFrame>().unwrap();
    (frame.what.unwrap(), fds)
}

pub(crate) fn hello(session: &v1::OpenReply) -> client_frame::What {
    client_frame::What::Hello(v1::Hello { protocol: 1, ticket: session.ticket.clone(), patience_ms: 0 })
}

/// A session with its chunk socket, welcomed.
pub(crate) fn link(daemon: &TestDaemon, grpc: &Grpc, name: &str) -> (v1::OpenReply, FdChannel) {
    link_at(&daemon.chunk_socket(), grpc, name)
}

pub(crate) fn link_at(chunk_socket: &Path, grpc: &Grpc, name: &str) -> (v1::OpenReply, FdChannel) {
    let session = grpc.open(name, 1).unwrap();
    let channel = FdChannel::connect(chunk_socket, PATIENCE).unwrap();
    send(&channel, hello(&session));
    let (welcome, fds) = receive(&channel);
    assert!(matches!(welcome, daemon_frame::What::Welcome(_)) && fds.len() == 1);
    (session, channel)
}

/// Asks for memory over the chunk socket and takes every batch.
pub(crate) fn acquire(channel: &FdChannel, request: u64, want: v1::Want) -> Result<Vec<(u64, OwnedFd)>, v1::Refused> {
    send(channel, client_frame::What::Acquire(v1::Acquire { request, want: Some(want) }));
    let mut leased = Vec::new();
    loop {
        match receive(channel) {
            (daemon_frame::What::Batch(batch), fds) => {
                assert_eq!((batch.request, batch.chunks.len()), (request, fds.len()));
                send(channel, client_frame::What::Ack(v1::Ack { request }));
                leased.extend(batch.chunks.iter().map(|chunk| chunk.chunk_id).zip(fds));
                if batch.is_last {
                    return Ok(leased);
                }
            }
            (daemon_frame::What::Refused(refused), _) => return Err(refused),
            (other, _) => panic!("{other:?}"),
        }
    }
}

/// The daemon says no on this connection, and perhaps closes it.
pub(crate) fn expect_refusal(channel: &FdChannel, kind: v1::ErrorKind, words: &str) {
    match receive(channel).0 {
        daemon_frame::What::Refused(refused) => {
            assert_eq!(refused.kind(), kind, "{}", refused.message);
            assert!(refused.message.contains(words), "{:?} does not say {words:?}", refused.message);
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// The daemon has closed this connection.
pub(crate) fn expect_closed(channel: &FdChannel) {
    channel.set_patience(Duration::from_secs(5)).unwrap();
    assert_eq!(channel.receive::<v1::DaemonFrame>().map(|_| ()), Err(ChannelError::Closed));
}
