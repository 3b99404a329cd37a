//! Asking a daemon something, from a command.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;
use tonic::{Response, Status};

use super::Failure;
use crate::ids::DeviceUuid;
use crate::session::{SessionError, dial};
use crate::wire::status::kind_from_code;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

/// How long a daemon may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to the daemon at `socket`, asks, and waits for the answer: as long as a daemon may take, and `patience` besides.
pub(super) fn ask<T, F, A>(socket: &Path, patience: Duration, question: F) -> Result<T, Failure>
where
    F: FnOnce(Channel) -> A,
    A: Future<Output = Result<Response<T>, Status>>,
{
    ask_within(socket, PATIENCE + patience, question)
}

/// The same, and waits no longer than `within`.
pub(super) fn ask_within<T, F, A>(socket: &Path, within: Duration, question: F) -> Result<T, Failure>
where
    F: FnOnce(Channel) -> A,
    A: Future<Output = Result<Response<T>, Status>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Other(error.into()))?;
    runtime.block_on(async {
        let asking = async {
            let channel = dial(socket).await?;
            question(channel).await.map(Response::into_inner).map_err(|status| refused(socket, &status))
        };
        tokio::time::timeout(within, asking)
            .await
            .unwrap_or_else(|_| Err(SessionError::no_answer(socket)))
            .map_err(Failure::from)
    })
}

fn refused(socket: &Path, status: &Status) -> SessionError {
    if status.code() == tonic::Code::Unavailable {
        return SessionError::no_daemon(socket, status.message());
    }
    SessionError::Refused { kind: kind_from_code(status.code()), message: status.message().to_owned() }
}

/// The daemon's device of this ordinal, or of this UUID.
pub(super) fn device(status: &v1::StatusReply, wanted: &str) -> Result<v1::Device, Failure> {
    let devices: Vec<_> = status.devices.iter().filter_map(|status| status.device.as_ref()).collect();
    let uuid = DeviceUuid::parse(wanted.trim());
    let is_it = |device: &&&v1::Device| match uuid {
        Some(uuid) => device.uuid == uuid.0,
        None => device.ordinal.to_string() == wanted,
    };
    let found = devices.iter().find(is_it);
    found.copied().cloned().ok_or_else(|| {
        let known: Vec<_> = devices.iter().map(|device| device.ordinal.to_string()).collect();
        let known = known.join(", ");
        Failure::Usage(format!(
            "the daemon has no device {wanted}; its devices: {known} (`stitchd status --json` has their UUIDs)"
        ))
    })
}

/// The session of this number, or the only one of this name.
pub(super) fn session<'a>(status: &'a v1::StatusReply, wanted: &str) -> Result<&'a v1::SessionStatus, Failure> {
    let is_it = |session: &&v1::SessionStatus| session.session_id.to_string() == wanted || session.name == wanted;
    let found: Vec<_> = status.sessions.iter().filter(is_it).collect();
    match found[..] {
        [one] => Ok(one),
        [] => Err(Failure::Usage(format!("there is no session '{wanted}'; `stitchd sessions` lists them"))),
        _ => {
            let numbers: Vec<_> = found.iter().map(|session| session.session_id.to_string()).collect();
            Err(Failure::Usage(format!(
                "several sessions are called '{wanted}': name one by number ({})",
                numbers.join(", ")
            )))
        }
    }
}

/// The daemon's status.
pub(super) fn status(socket: &Path) -> Result<v1::StatusReply, Failure> {
    ask(socket, Duration::ZERO, async |channel| AdminClient::new(channel).status(v1::StatusRequest {}).await)
}
