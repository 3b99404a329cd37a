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

/// How it went.
pub(super) enum Returned {
    /// It is there again.
    Here(Channel, Me),
    /// There is no daemon, or it cannot yet.
    NotYet(String),
    /// What is there will never know this session.
    Never(String),
}

/// Tries once.
pub(super) async fn try_to(config: &SessionConfig, line: &Arc<Line>, me: Me) -> Returned {
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
        Ok(Ok((me, link))) => {
            line.open(Some((link, me.0)));
            Returned::Here(channel, me)
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
async fn say(config: &SessionConfig, line: &Line, channel: Channel, me: Me) -> Result<(Me, Link), Why> {
    let told = line.tell();
    let (me, reply) = match reattach(channel.clone(), me, &told).await? {
        Some(reply) => (me, reply),
        None => {
            let opened = open_over(channel.clone(), config).await?;
            let me = (opened.session, opened.secret);
            tracing::debug!(session = %me.0, "the daemon does not know what was before: what is mapped is registered");
            let reply = reattach(channel.clone(), me, &told).await?;
            (me, reply.ok_or_else(|| Why::Never("a session is over as soon as it is opened".to_owned()))?)
        }
    };
    let ticket = convert::token("ticket", &reply.ticket).map_err(SessionError::from)?;
    let link = line.link_to(ticket)?;
    line.hear(&reply);
    if line.session() != me.0 {
        be_guaranteed(line, channel, me).await;
    }
    Ok((me, link))
}

/// Nothing where the daemon does not know the session.
async fn reattach(
    channel: Channel,
    (session, secret): Me,
    told: &[v1::ReattachRequest],
) -> Result<Option<v1::ReattachReply>, Why> {
    let mut sessions = SessionsClient::new(channel);
    let mut last = v1::ReattachReply::default();
    for message in told {
        let message = v1::ReattachRequest { session_id: session.0, secret: secret.to_vec(), ..message.clone() };
        last = match sessions.reattach(message).await {
            Ok(reply) => reply.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) if status.code() == Code::Unimplemented => {
                return Err(Why::Never("the daemon is older than this client".to_owned()));
            }
            Err(status) => return Err(refused(&status).into()),
        };
    }
    Ok(Some(last))
}

/// What the session was guaranteed it asks for anew, of a daemon that does not know of it; what it does not get it has not.
async fn be_guaranteed(line: &Line, channel: Channel, (session, secret): Me) {
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
