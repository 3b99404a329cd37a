//! Fetches descriptors that wait on the chunk socket for a ticket: of what was leased or attached over gRPC.

use std::path::Path;
use std::time::Duration;

use super::SessionError;
use super::link::{Leased, refusal};
use crate::wire::PROTOCOL;
use crate::wire::convert::{self, Token, malformed};
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::v1::{self, client_frame, daemon_frame};

/// All chunks that the ticket is for, in their order. What was not fetched is the daemon's again.
pub(super) fn fetch(socket: &Path, ticket: Token, patience: Duration) -> Result<Vec<Leased>, SessionError> {
    let channel = FdChannel::connect(socket, patience)?;
    let say = |what| channel.send(&v1::ClientFrame { what: Some(what) }, &[]);
    say(client_frame::What::Claim(v1::Claim { protocol: PROTOCOL, ticket: ticket.to_vec() }))?;
    let mut fetched = Vec::new();
    loop {
        let (frame, fds, is_cut) = channel.receive_some::<v1::DaemonFrame>()?;
        let batch = match frame.what {
            Some(daemon_frame::What::Batch(batch)) => batch,
            Some(daemon_frame::What::Refused(refused)) => return Err(refusal(&refused)),
            _ => return Err(malformed("frame", "neither chunks nor a refusal").into()),
        };
        if is_cut {
            return Err(ChannelError::DescriptorsLost.into());
        }
        let chunks = convert::chunks("batch.chunks", &batch.chunks)?;
        if chunks.len() != fds.len() {
            let text = format!("{} chunks came with {} descriptors", chunks.len(), fds.len());
            return Err(malformed("batch.chunks", text).into());
        }
        say(client_frame::What::Ack(v1::Ack { request: batch.request }))?;
        fetched.extend(chunks.into_iter().zip(fds).map(|((id, len), fd)| (id, len, fd)));
        if batch.is_last {
            return Ok(fetched);
        }
    }
}
