//! A session whose daemon has gone finds the next one, and is there again: with what it holds, at the same addresses, while the job goes on.
//!
//! A daemon that has taken over knows the session. One that could not (its journal was damaged, or gone with the node's files) opens it anew, and has it register what it has mapped.

use std::sync::Arc;
use std::time::Duration;

use tonic::Code;
use tonic::transport::Channel;

use super::control::{Me, dial, open_over, refused};
use super::line::Line;
use super::link::Link;
use super::{SessionConfig, SessionError};
use crate::error::chain;
use crate::units::Bytes;
use crate::wire::convert;
use crate::wire::v1::sessions_client::SessionsClient;
use crate::wire::v1::{self, AdmitRequest};

/// A daemon that restarts is away for some tens of milliseconds.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(5);
/// And one that does not come back costs a connection now and then.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A daemon that does not come within that hears it from the end of this process.
const CLOSING: Duration = Duration::from_secs(30);

/// Tells the daemon that the session is over. False where it has not heard that, and another may.
pub(super) async fn close(channel: Channel, (session, secret): Me, patience: Duration) -> bool {
    let request = v1::CloseRequest { session_id: session.0, secret: secret.to_vec() };
    let closed = tokio::time::timeout(patience, SessionsClient::new(channel).close(request)).await;
    match closed {
        Ok(Ok(_)) => true,
        Ok(Err(status)) => matches!(status.code(), Code::NotFound | Code::Unimplemented | Code::InvalidArgument),
        // Silence: whoever is there will know when this process ends.
        Err(_) => true,
    }
}

/// Tells the next one, if there is one soon: the process of the session may go on for long.
pub(super) async fn close_later(socket: &std::path::Path, me: Me, patience: Duration) {
    let mut pause = PAUSE_MIN;
    let telling = async {
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
            if let Ok(channel) = dial(socket).await
                && close(channel, me, patience).await
            {
                return;
            }
        }
    };
    // Nobody is there.
    let _ = tokio::time::timeout(CLOSING, telling).await;
}

/// How it went.
pub(super) enum Returned {
    /// It is there again.
    Here(Channel),
    /// There is no daemon, or it cannot yet.
    NotYet(String),
    /// What is there will never know this session.
    Never(String),
}

/// Tries once.
/// What session it is changes where a daemon did not know it, also where that is as far as it goes.
pub(super) async fn try_to(config: &SessionConfig, line: &Arc<Line>, me: &mut Me) -> Returned {
    let dialing = tokio::time::timeout(config.patience, dial(&config.socket));
    let channel = match dialing.await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => return Returned::NotYet(chain(&error)),
        Err(_) => return Returned::NotYet("no answer in time".to_owned()),
    };
    if !line.close() {
        return Returned::NotYet("a lease is not over yet".to_owned());
    }
    let said = tokio::time::timeout(config.patience * 2, say(config, line, channel.clone(), me)).await;
    match said {
        Ok(Ok(link)) => {
            let is_new = line.session() != me.0;
            line.open(Some((link, me.0)));
            if is_new {
                // Beside the rest: it leases meanwhile.
                drop(tokio::spawn(be_guaranteed(Arc::clone(line), channel.clone(), *me)));
            }
            Returned::Here(channel)
        }
        Ok(Err(why)) => {
            line.open(None);
            match why {
                Why::NotYet(error) => Returned::NotYet(chain(&error)),
                Why::Never(text) => Returned::Never(text),
            }
        }
        Err(_) => {
            line.open(None);
            Returned::NotYet("no answer in time".to_owned())
        }
    }
}

/// Why not.
enum Why {
    NotYet(SessionError),
    Never(String),
}

impl<E: Into<SessionError>> From<E> for Why {
    fn from(error: E) -> Why {
        Why::NotYet(error.into())
    }
}

/// Says what is held, to a daemon that knows the session or does from now on.
async fn say(config: &SessionConfig, line: &Line, channel: Channel, me: &mut Me) -> Result<Link, Why> {
    let told = line.holdings.tell();
    let reply = match reattach(channel.clone(), *me, config, &told).await? {
        Some(reply) => reply,
        None => {
            let opened = open_over(channel.clone(), config).await?;
            *me = (opened.session, opened.secret);
            tracing::debug!(session = %me.0, "the daemon does not know what was before: what is mapped is registered");
            let reply = reattach(channel, *me, config, &told).await?;
            reply.ok_or_else(|| Why::Never("a session is over as soon as it is opened".to_owned()))?
        }
    };
    // Before anything else can fail: the next time it is named as the daemon calls it.
    line.holdings.hear(&reply);
    let ticket = convert::token("ticket", &reply.ticket).map_err(SessionError::from)?;
    Ok(line.link_to(ticket)?)
}

/// Nothing where the daemon does not know the session.
async fn reattach(
    channel: Channel,
    (session, secret): Me,
    config: &SessionConfig,
    told: &[v1::ReattachRequest],
) -> Result<Option<v1::ReattachReply>, Why> {
    let mut sessions = SessionsClient::new(channel);
    let mut last = v1::ReattachReply::default();
    for message in told {
        let (session_id, secret, pod) = (session.0, secret.to_vec(), config.pod.clone());
        let message = v1::ReattachRequest { session_id, secret, pod, ..message.clone() };
        last = match sessions.reattach(message).await {
            Ok(reply) => reply.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) if status.code() == Code::Unimplemented => {
                return Err(Why::Never("the daemon is older than this client".to_owned()));
            }
            Err(status) if status.code() == Code::InvalidArgument => {
                return Err(Why::Never(status.message().to_owned()));
            }
            Err(status) => return Err(refused(&status).into()),
        };
    }
    Ok(Some(last))
}

/// What the session was guaranteed it asks for anew, of a daemon that does not know of it; what it does not get it has not.
async fn be_guaranteed(line: Arc<Line>, channel: Channel, (session, secret): Me) {
    let wanted: Vec<_> = {
        let guaranteed = line.guaranteed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        guaranteed.iter().map(|(device, known)| (*device, known.now())).collect()
    };
    for (device, bytes) in wanted.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO) {
        let (device_uuid, guarantee_bytes) = (device.0.to_vec(), bytes.get());
        let admit =
            AdmitRequest { session_id: session.0, secret: secret.to_vec(), device_uuid, guarantee_bytes, wait_ms: 0 };
        if let Err(status) = SessionsClient::new(channel.clone()).admit(admit).await {
            tracing::debug!(%device, error = status.message(), "what was guaranteed is not any more");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::clock::SystemClock;
    use crate::ids::SessionId;
    use crate::wire::fd_channel::FdChannel;
    use crate::wire::stats_page;
    use crate::wire::v1::sessions_server::{Sessions, SessionsServer};

    /// A daemon of before: what it does not know it answers as tonic does.
    struct Older;

    #[tonic::async_trait]
    impl Sessions for Older {
        type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::Notice, Status>> + Send>>;

        async fn open(&self, _: Request<v1::OpenRequest>) -> Result<Response<v1::OpenReply>, Status> {
            panic!("who cannot come back opens nothing")
        }

        async fn reattach(&self, _: Request<v1::ReattachRequest>) -> Result<Response<v1::ReattachReply>, Status> {
            Err(Status::unimplemented(""))
        }

        async fn close(&self, _: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
            Err(Status::not_found("the session or its secret is not good"))
        }

        async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            Err(Status::not_found(""))
        }

        async fn room(&self, _: Request<v1::RoomRequest>) -> Result<Response<v1::RoomReply>, Status> {
            Err(Status::not_found(""))
        }

        async fn admit(&self, _: Request<AdmitRequest>) -> Result<Response<v1::AdmitReply>, Status> {
            Err(Status::not_found(""))
        }

        async fn answer(&self, _: Request<v1::AnswerRequest>) -> Result<Response<v1::AnswerReply>, Status> {
            Err(Status::not_found(""))
        }
    }

    #[tokio::test]
    async fn a_daemon_that_is_older_than_this_client_is_not_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let patience = Duration::from_secs(5);
        let config = SessionConfig { patience, ..SessionConfig::new(socket.clone(), "newer") };
        let (here, _there) = FdChannel::pair().unwrap();
        let session = SessionId(7);
        let page = stats_page::create(session).unwrap();
        let clock = Arc::new(SystemClock::new());
        let line = Line::new(Link::over(here, patience), session, page, dir.path().join("chunks"), patience, clock);
        let (line, mut me) = (Arc::new(line), (session, [1; 16]));
        line.set_attached(false);
        assert!(matches!(try_to(&config, &line, &mut me).await, Returned::NotYet(_)), "nobody is there");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let serving = tonic::transport::Server::builder().add_service(SessionsServer::new(Older));
        drop(tokio::spawn(serving.serve_with_incoming(UnixListenerStream::new(listener))));
        let tried = try_to(&config, &line, &mut me).await;
        assert!(matches!(tried, Returned::Never(reason) if reason.contains("older")));
        assert_eq!((me.0, line.session(), line.epoch()), (session, session, 1));
        // Whoever waits is not kept waiting.
        line.give_up();
        assert!(!line.wait_for_next(1, patience));
        let channel = dial(&socket).await.unwrap();
        assert!(close(channel, me, patience).await, "it knows nothing of this session: nobody need be told");
    }
}
