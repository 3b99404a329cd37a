//! Asking a daemon something, from a command.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;
use tonic::{Response, Status};

use super::Failure;
use crate::session::{SessionError, dial};
use crate::wire::status::kind_from_code;
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;

/// How long a daemon may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to the daemon at `socket`, asks, and waits for the answer.
pub(super) fn ask<T, F, A>(socket: &Path, patience: Duration, question: F) -> Result<T, Failure>
where
    F: FnOnce(Channel) -> A,
    A: Future<Output = Result<Response<T>, Status>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Other(error.into()))?;
    runtime.block_on(async {
        let no_answer = || SessionError::NoDaemon { socket: socket.to_owned(), reason: "no answer in time".into() };
        let asking = async {
            let channel = dial(socket).await?;
            question(channel).await.map(Response::into_inner).map_err(|status| refused(socket, &status))
        };
        tokio::time::timeout(PATIENCE + patience, asking)
            .await
            .unwrap_or_else(|_| Err(no_answer()))
            .map_err(Failure::from)
    })
}

fn refused(socket: &Path, status: &Status) -> SessionError {
    if status.code() == tonic::Code::Unavailable {
        return SessionError::NoDaemon { socket: socket.to_owned(), reason: status.message().to_owned() };
    }
    SessionError::Refused { kind: kind_from_code(status.code()), message: status.message().to_owned() }
}

/// The daemon's status.
pub(super) fn status(socket: &Path) -> Result<v1::StatusReply, Failure> {
    ask(socket, Duration::ZERO, async |channel| AdminClient::new(channel).status(v1::StatusRequest {}).await)
}
