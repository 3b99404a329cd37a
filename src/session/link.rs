//! The chunk socket from the client's side: acquire and release, one round trip each, in the thread that needs it.
//!
//! Sends need no order among threads: a packet goes whole. Only whoever waits for an answer holds the receiving side, so a release never waits behind an
//! acquire that waits for memory.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::SessionError;
use crate::error::ErrorKind;
use crate::ids::ChunkId;
use crate::limits;
use crate::units::Bytes;
use crate::wire::PROTOCOL;
use crate::wire::convert::{self, Token, WantedChunks, malformed};
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::v1::{self, client_frame, daemon_frame};

/// A chunk that was just leased, with its descriptor.
pub(super) type Leased = (ChunkId, Bytes, OwnedFd);

#[derive(Debug)]
pub(super) struct Link {
    channel: FdChannel,
    /// How long the socket waits for an answer now. Held while one is awaited.
    receiving: Mutex<Duration>,
    next_request: AtomicU64,
    /// How long the daemon may be silent while it owes an answer.
    patience: Duration,
    /// It says that it works on a request, or has it wait, several times in that time. An older one is silent until it has the answer.
    says_working: bool,
}

impl Link {
    /// Connects and shows the ticket. The answer brings the session's stats page.
    pub(super) fn open(socket: &Path, ticket: Token, patience: Duration) -> Result<(Link, OwnedFd), SessionError> {
        let channel = FdChannel::connect(socket, patience)?;
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1);
        let hello = v1::Hello { protocol: PROTOCOL, ticket: ticket.to_vec(), patience_ms };
        let (receiving, next_request) = (Mutex::new(patience), AtomicU64::new(1));
        let mut link = Link { channel, receiving, next_request, patience, says_working: false };
        link.send(client_frame::What::Hello(hello))?;
        let (what, mut fds) = link.receive()?;
        match (what, fds.pop(), fds.is_empty()) {
            (daemon_frame::What::Welcome(welcome), Some(page), true) => {
                link.says_working = welcome.says_working;
                Ok((link, page))
            }
            (daemon_frame::What::Refused(refused), None, _) => Err(refusal(&refused)),
            _ => Err(malformed("welcome", "the daemon's first answer is neither a welcome nor a refusal").into()),
        }
    }

    fn send(&self, what: client_frame::What) -> Result<(), SessionError> {
        Ok(self.channel.send(&v1::ClientFrame { what: Some(what) }, &[])?)
    }

    fn receive(&self) -> Result<(daemon_frame::What, Vec<OwnedFd>), SessionError> {
        let (frame, fds) = self.channel.receive::<v1::DaemonFrame>()?;
        let what =
            frame.what.ok_or_else(|| malformed("frame", "a message of a kind that this client does not know"))?;
        Ok((what, fds))
    }

    /// Leases chunks: all that is wanted, or none and why.
    pub(super) fn acquire(&self, wanted: WantedChunks) -> Result<Vec<Leased>, SessionError> {
        let mut receiving = self.receiving.lock().expect("nothing panics while it holds this lock");
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let wait = if self.says_working { Duration::ZERO } else { Duration::from_millis(wanted.wait_ms) };
        let patience = self.patience + wait;
        if *receiving != patience {
            self.channel.set_patience(patience)?;
            *receiving = patience;
        }
        let sent = self.send(client_frame::What::Acquire(v1::Acquire { request, want: Some(wanted.into()) }));
        let mut leased = Vec::new();
        let outcome = sent.and_then(|()| self.receive_lease(request, &mut leased));
        if outcome.is_err() && !leased.is_empty() {
            // All or none: what came is ours, as the daemon sees it, and nobody here wants it any more.
            let ids = leased.iter().map(|(id, ..)| *id).collect();
            leased.clear();
            // If not even this goes through the daemon is gone, or soon hears that this process is.
            let _ = self.release(ids);
        }
        outcome.map(|()| leased).map_err(|error| match error {
            // Whichever way the message went on which it was noticed.
            SessionError::Channel(ChannelError::Closed) => SessionError::DaemonGone,
            other => other,
        })
    }

    fn receive_lease(&self, request: u64, leased: &mut Vec<Leased>) -> Result<(), SessionError> {
        loop {
            match self.receive() {
                Ok((daemon_frame::What::Batch(batch), fds)) if batch.request == request => {
                    if self.take_batch(&batch, fds, leased)? {
                        return Ok(());
                    }
                }
                // The answer to a request that this side has given up: nobody wants these any more.
                Ok((daemon_frame::What::Batch(batch), fds)) => {
                    drop(fds);
                    self.send(client_frame::What::Ack(v1::Ack { request: batch.request }))?;
                    self.release(batch.chunks.iter().map(|chunk| ChunkId(chunk.chunk_id)).collect())?;
                }
                Ok((daemon_frame::What::Refused(refused), _)) if refused.request == request || refused.request == 0 => {
                    return Err(refusal(&refused));
                }
                Ok((daemon_frame::What::Refused(_), _)) => {}
                // Somebody works on it: the patience begins anew. A driver that hangs is the daemon's to notice (`driver_deadline`).
                Ok((daemon_frame::What::Working(working), _)) => {
                    let v1::Working { ready, wanted, .. } = working;
                    tracing::debug!(ready, wanted, "the daemon is still at it");
                }
                Ok((daemon_frame::What::Welcome(_), _)) => {
                    return Err(malformed("frame", "a second welcome").into());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a batch of the request that is awaited. True when it was the last.
    fn take_batch(&self, batch: &v1::Batch, fds: Vec<OwnedFd>, leased: &mut Vec<Leased>) -> Result<bool, SessionError> {
        self.send(client_frame::What::Ack(v1::Ack { request: batch.request }))?;
        let chunks = convert::chunks("batch.chunks", &batch.chunks)?;
        if chunks.len() != fds.len() {
            let what = format!("{} chunks came with {} descriptors", chunks.len(), fds.len());
            // They are ours, as the daemon sees it.
            self.release(chunks.into_iter().map(|(id, _)| id).collect())?;
            return Err(malformed("batch.chunks", what).into());
        }
        leased.extend(chunks.into_iter().zip(fds).map(|((id, len), fd)| (id, len, fd)));
        Ok(batch.is_last)
    }

    /// Gives chunks back, without waiting for an answer.
    pub(super) fn release(&self, chunks: Vec<ChunkId>) -> Result<(), SessionError> {
        for some in chunks.chunks(limits::RELEASE_CHUNKS_MAX) {
            let request = self.next_request.fetch_add(1, Ordering::Relaxed);
            let chunk_ids = some.iter().map(|chunk| chunk.0).collect();
            self.send(client_frame::What::Release(v1::Release { request, chunk_ids }))?;
        }
        Ok(())
    }
}

fn refusal(refused: &v1::Refused) -> SessionError {
    SessionError::Refused { kind: ErrorKind::from(refused.kind()), message: refused.message.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::DeviceUuid;
    use crate::ladder::Shape;

    #[test]
    fn a_daemon_that_has_gone_is_said_so_on_whichever_way_it_is_noticed() {
        let wanted = WantedChunks {
            device: DeviceUuid([7; 16]),
            len: Bytes::mib(2),
            shape: Shape::Largest,
            plan: None,
            wait_ms: 0,
        };
        let link = |channel| {
            let (receiving, next_request) = (Mutex::new(Duration::ZERO), AtomicU64::new(1));
            Link { channel, receiving, next_request, patience: Duration::from_secs(5), says_working: true }
        };
        let (here, there) = FdChannel::pair().unwrap();
        drop(there);
        assert_eq!(link(here).acquire(wanted).unwrap_err(), SessionError::DaemonGone, "while it sends");
        let (here, there) = FdChannel::pair().unwrap();
        let daemon = std::thread::spawn(move || there.receive::<v1::ClientFrame>().unwrap());
        assert_eq!(link(here).acquire(wanted).unwrap_err(), SessionError::DaemonGone, "while it waits");
        daemon.join().unwrap();
    }
}
