//! The gate before the gRPC services that have large messages: plans, the status of the daemon, which grows with its sessions, leases with the names of all their chunks, and what the services
//! look like. Without it whoever may connect could have the daemon hold as much memory as they like: messages of which the end never comes, or replies that nobody reads.
//!
//! A `Put` goes in one at a time for each process, a few at a time for the node, and has so long to arrive: who stops half way gives the place back. A `Get`, a `List` and a `Status` go one at a time
//! for each process, until the reply was read, leases some at a time; nobody else waits for that. Every other call has small messages and passes.
//!
//! Not for: what the calls mean.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service, http};
use tonic::server::NamedService;

use super::connections::{Connections, Line};
use super::listener::PeerInfo;
use crate::error::ErrorKind;
use crate::limits;
use crate::wire::status::status;

/// How long a plan may take to arrive, from the first byte that is read of it: as long as a client waits for its answer.
const PATIENCE: Duration = Duration::from_secs(5);

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, std::convert::Infallible>> + Send>>;

/// A service behind the gate: once for large messages, once for small ones.
#[derive(Clone, Debug)]
pub(super) struct Gate<S> {
    large: S,
    small: S,
    connections: Arc<Connections>,
    places: Arc<Semaphore>,
}

impl<S> Gate<S> {
    /// `large` takes messages of any length that a plan may have, `small` only those of the other calls.
    pub(super) fn new(large: S, small: S, connections: Arc<Connections>) -> Gate<S> {
        Gate { large, small, connections, places: Arc::new(Semaphore::new(limits::PLANS_AT_ONCE_MAX)) }
    }

    /// Before one whose calls bring nothing large.
    pub(super) fn of(service: S, connections: Arc<Connections>) -> Gate<S>
    where
        S: Clone,
    {
        Gate::new(service.clone(), service, connections)
    }
}

impl<S: NamedService> NamedService for Gate<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Gate<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = std::convert::Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Generated services are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        let call = request.uri().path().rsplit('/').next().unwrap_or_default();
        let is_put = call == "Put";
        let line = match call {
            "Put" | "Get" | "List" | "Status" => Some(Line::Large),
            "Acquire" => Some(Line::Lease),
            "ServerReflectionInfo" => Some(Line::Description),
            _ => None,
        };
        let Gate { mut large, mut small, connections, places } = self.clone();
        let Some(line) = line else { return Box::pin(small.call(request)) };
        Box::pin(async move {
            let turn = match request.extensions().get::<PeerInfo>() {
                Some(peer) => connections.turn(peer.0.identity, line),
                None => None,
            };
            let Some(turn) = turn else {
                return Ok(status(ErrorKind::Broken, "the connection has no peer").into_http());
            };
            let turn = turn.acquire_owned().await.expect("nobody closes the turns");
            if is_put {
                let _place = places.acquire().await.expect("nobody closes the places");
                let request =
                    request.map(|body| Body::new(InTime { body, until: Box::pin(tokio::time::sleep(PATIENCE)) }));
                return large.call(request).await;
            }
            let reply = small.call(request).await?;
            Ok(reply.map(|body| Body::new(UntilRead { body, rest: Bytes::new(), _turn: turn })))
        })
    }
}

/// A message that is an error when it has not arrived in time.
struct InTime {
    body: Body,
    until: Pin<Box<Sleep>>,
}

impl http_body::Body for InTime {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        ready!(self.until.as_mut().poll(cx));
        let text = format!("the plan has not arrived within {PATIENCE:?}");
        Poll::Ready(Some(Err(status(ErrorKind::Unavailable, text))))
    }
}

/// A reply in pieces: the next is taken when there is room for it, so this lives, and has its turn, until the last was sent. In one piece it would be gone with the first byte, and wait elsewhere.
struct UntilRead {
    body: Body,
    rest: Bytes,
    _turn: OwnedSemaphorePermit,
}

impl http_body::Body for UntilRead {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        const PIECE: usize = 16 << 10;
        while self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                end => return Poll::Ready(end),
            }
        }
        let len = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(len)))))
    }

    /// An error has no message, only headers. Behind an empty message it would be none to most languages' clients, which say that the stream was broken.
    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Waker;

    use http_body::Body as _;

    use super::*;
    use crate::wire::peer::{Identity, Peer};

    /// A message in one frame, and what ends it.
    struct Reply(Vec<Frame<Bytes>>);

    impl http_body::Body for Reply {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop().map(Ok))
        }
    }

    #[test]
    fn a_reply_keeps_its_turn_until_its_last_piece_was_taken_and_arrives_whole() {
        let turn = Arc::new(Semaphore::new(1));
        let sent: Vec<u8> = (0..40_000_u32).map(|n| n as u8).collect();
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        let frames = vec![Frame::trailers(trailers.clone()), Frame::data(Bytes::from(sent.clone()))];
        let body = Body::new(Reply(frames));
        let permit = Arc::clone(&turn).try_acquire_owned().unwrap();
        let mut reply = UntilRead { body, rest: Bytes::new(), _turn: permit };
        assert!(!reply.is_end_stream());
        let mut next = || match Pin::new(&mut reply).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(frame) => frame.map(Result::unwrap),
            Poll::Pending => panic!("all of it is there"),
        };
        let mut received = Vec::new();
        for piece_number in 1..=3 {
            let piece = next().unwrap().into_data().unwrap();
            received.extend_from_slice(&piece);
            assert_eq!(received.len() == sent.len(), piece_number == 3, "a piece at a time");
        }
        assert_eq!(received, sent);
        assert_eq!(next().unwrap().into_trailers().unwrap(), trailers);
        assert!(next().is_none() && turn.available_permits() == 0);
        drop(reply);
        assert_eq!(turn.available_permits(), 1);
        let permit = Arc::clone(&turn).try_acquire_owned().unwrap();
        assert!(UntilRead { body: Body::empty(), rest: Bytes::new(), _turn: permit }.is_end_stream(), "an error");
    }

    /// Counts what it is asked, and answers at once or never.
    #[derive(Clone, Default)]
    struct Asked {
        count: Arc<AtomicUsize>,
        is_silent: bool,
    }

    impl Service<http::Request<Body>> for Asked {
        type Response = http::Response<Body>;
        type Error = std::convert::Infallible;
        type Future = Answer;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Answer {
            self.count.fetch_add(1, Ordering::Relaxed);
            if self.is_silent {
                return Box::pin(std::future::pending());
            }
            let reply = Reply(vec![Frame::data(Bytes::from_static(b"reply"))]);
            Box::pin(std::future::ready(Ok(http::Response::new(Body::new(reply)))))
        }
    }

    impl NamedService for Asked {
        const NAME: &'static str = "stitchd.v1.Plans";
    }

    fn process(number: u64) -> Peer {
        Peer { pidfd: None, identity: Identity::Pidfs(number), pid: 1, uid: 0 }
    }

    /// What a process calls.
    fn request(call: &str, number: u64) -> http::Request<Body> {
        let mut request = http::Request::new(Body::empty());
        *request.uri_mut() = format!("/stitchd.v1.Plans/{call}").parse().unwrap();
        request.extensions_mut().insert(PeerInfo(Arc::new(process(number))));
        request
    }

    fn poll(answer: &mut Answer) -> Option<http::Response<Body>> {
        match answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(reply)) => Some(reply),
            Poll::Pending => None,
        }
    }

    #[test]
    fn who_does_not_read_a_large_reply_gets_no_second_one_and_the_others_get_theirs() {
        let connections = Connections::new(1024, 1024);
        let _seats = [1, 2].map(|number| connections.enter(&process(number)).unwrap());
        let mut gate = Gate::of(Asked::default(), Arc::clone(&connections));
        let mut ask = |call: &str, number| gate.call(request(call, number));
        let unread = poll(&mut ask("Status", 1)).expect("it is the first");
        let mut second = ask("Status", 1);
        for large in ["Get", "List"] {
            assert!(poll(&mut second).is_none() && poll(&mut ask(large, 1)).is_none());
        }
        assert!(poll(&mut ask("Status", 2)).is_some(), "another process waits for nobody");
        assert!(poll(&mut ask("Delete", 1)).is_some(), "nor does a small reply");
        let described = poll(&mut ask("ServerReflectionInfo", 1)).expect("it is in another line");
        assert!(poll(&mut ask("ServerReflectionInfo", 1)).is_none() && poll(&mut ask("Acquire", 1)).is_some());
        drop((unread, described));
        assert!(poll(&mut second).is_some());
    }

    #[tokio::test]
    async fn plans_come_one_at_a_time_from_a_process_and_a_few_at_a_time_from_all() {
        let connections = Connections::new(1024, 1024);
        let processes = limits::PLANS_AT_ONCE_MAX as u64 + 1;
        let _seats: Vec<_> = (0..processes).map(|number| connections.enter(&process(number)).unwrap()).collect();
        let (reads, small) = (Asked { is_silent: true, ..Asked::default() }, Asked::default());
        let reading = Arc::clone(&reads.count);
        let read = || reading.load(Ordering::Relaxed);
        let mut gate = Gate::new(reads, small, Arc::clone(&connections));
        let (mut first, mut again) = (gate.call(request("Put", 0)), gate.call(request("Put", 0)));
        assert!(poll(&mut first).is_none() && poll(&mut again).is_none());
        assert_eq!(read(), 1, "one of a process");
        drop(again);
        let mut others: Vec<_> = (1..processes).map(|number| gate.call(request("Put", number))).collect();
        assert!(others.iter_mut().all(|other| poll(other).is_none()));
        assert_eq!(read(), limits::PLANS_AT_ONCE_MAX, "the last one waits");
        drop(first);
        assert!(poll(others.last_mut().unwrap()).is_none());
        assert_eq!(read(), limits::PLANS_AT_ONCE_MAX + 1);
    }
}
