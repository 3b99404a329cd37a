//! The chunk socket from the client's side: acquire and release, one round trip each, in the thread that needs it.
//!
//! Sends need no order among threads: a packet goes whole. Only whoever waits for an answer holds the receiving side, so a release never waits behind an
//! acquire that waits for memory.
//!
//! A request that was given up may be granted all the same. What comes for it is given back by whoever receives next, or by [`Link::settle`] where nobody does.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::SessionError;
use super::giving::Question;
use crate::error::ErrorKind;
use crate::ids::{ChunkId, DeviceUuid};
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
    /// Held while an answer is awaited.
    receiving: Mutex<Receiving>,
    next_request: AtomicU64,
    /// How long the daemon may be silent while it owes an answer.
    patience: Duration,
    /// It says that it works on a request, or has it wait, several times in that time. An older one is silent until it has the answer.
    says_working: bool,
}

/// The receiving side.
#[derive(Debug)]
struct Receiving {
    /// How long the socket waits for an answer now.
    patience: Duration,
    /// Requests that were given up, and that the daemon may grant yet.
    given_up: Vec<u64>,
}

impl Receiving {
    fn new(patience: Duration) -> Mutex<Receiving> {
        Mutex::new(Receiving { patience, given_up: Vec::new() })
    }

    /// The daemon has answered a request that was given up.
    fn is_answered(&mut self, request: u64) {
        self.given_up.retain(|given_up| *given_up != request);
    }
}

impl Link {
    /// Connects and shows the ticket, with the stats page that the session has already. The answer brings the session's stats page.
    pub(super) fn open(
        socket: &Path,
        ticket: Token,
        patience: Duration,
        page: Option<BorrowedFd<'_>>,
    ) -> Result<(Link, OwnedFd), SessionError> {
        let channel = FdChannel::connect(socket, patience)?;
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1);
        let hello = v1::Hello { protocol: PROTOCOL, ticket: ticket.to_vec(), patience_ms };
        let (receiving, next_request) = (Receiving::new(patience), AtomicU64::new(1));
        let mut link = Link { channel, receiving, next_request, patience, says_working: false };
        let hello = v1::ClientFrame { what: Some(client_frame::What::Hello(hello)) };
        link.channel.send(&hello, page.as_slice())?;
        let (what, mut fds, is_cut) = link.receive()?;
        match (what, fds.pop(), fds.is_empty()) {
            (daemon_frame::What::Welcome(welcome), Some(page), true) => {
                link.says_working = welcome.says_working;
                Ok((link, page))
            }
            (daemon_frame::What::Welcome(_), None, _) if is_cut => Err(ChannelError::DescriptorsLost.into()),
            (daemon_frame::What::Refused(refused), None, _) => Err(refusal(&refused)),
            _ => Err(malformed("welcome", "the daemon's first answer is neither a welcome nor a refusal").into()),
        }
    }

    fn send(&self, what: client_frame::What) -> Result<(), SessionError> {
        Ok(self.channel.send(&v1::ClientFrame { what: Some(what) }, &[])?)
    }

    /// One over a connection that is there: for tests.
    #[cfg(test)]
    pub(super) fn over(channel: FdChannel, patience: Duration) -> Link {
        let (receiving, next_request) = (Receiving::new(patience), AtomicU64::new(1));
        Link { channel, receiving, next_request, patience, says_working: true }
    }

    /// Ends the connection, whoever uses it: what has come can still be read.
    pub(super) fn hang_up(&self) {
        // It may be over already.
        let _ = rustix::net::shutdown(&self.channel, rustix::net::Shutdown::Both);
    }

    /// A message with its descriptors, and whether some found no room here.
    fn receive(&self) -> Result<(daemon_frame::What, Vec<OwnedFd>, bool), SessionError> {
        let (frame, fds, is_cut) = self.channel.receive_some::<v1::DaemonFrame>()?;
        let what =
            frame.what.ok_or_else(|| malformed("frame", "a message of a kind that this client does not know"))?;
        Ok((what, fds, is_cut))
    }

    /// Leases chunks: all that is wanted, or none and why.
    pub(super) fn acquire(&self, wanted: WantedChunks) -> Result<Vec<Leased>, SessionError> {
        // After a panic in the middle of an answer that request is one of those that were given up.
        let mut receiving = self.receiving.lock().unwrap_or_else(PoisonError::into_inner);
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let wait = if self.says_working { Duration::ZERO } else { Duration::from_millis(wanted.wait_ms) };
        let patience = self.patience + wait;
        if receiving.patience != patience {
            self.channel.set_patience(patience)?;
            receiving.patience = patience;
        }
        let sent = self.send(client_frame::What::Acquire(v1::Acquire { request, want: Some(wanted.into()) }));
        let mut leased = Vec::new();
        if sent.is_ok() {
            // Given up until its answer has come.
            receiving.given_up.push(request);
        }
        let outcome = sent.and_then(|()| self.receive_lease(request, &mut leased, &mut receiving));
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

    fn receive_lease(
        &self,
        request: u64,
        leased: &mut Vec<Leased>,
        receiving: &mut Receiving,
    ) -> Result<(), SessionError> {
        let mut outcome = Ok(());
        loop {
            match self.receive() {
                Ok((daemon_frame::What::Batch(batch), fds, is_cut)) if batch.request == request && outcome.is_ok() => {
                    if batch.is_last {
                        receiving.is_answered(request);
                    }
                    outcome = self.take_batch(&batch, fds, is_cut, leased);
                    // The daemon sends the rest of what it has leased all the same; left there, it would be nobody's for a while.
                    let is_lost = matches!(outcome, Err(SessionError::Channel(ChannelError::DescriptorsLost)));
                    if batch.is_last || outcome.is_err() && !is_lost {
                        return outcome;
                    }
                }
                Ok((daemon_frame::What::Batch(batch), fds, _)) => {
                    drop(fds);
                    self.turn_down(&batch, receiving)?;
                    if batch.request == request && batch.is_last {
                        return outcome;
                    }
                }
                Ok((daemon_frame::What::Refused(refused), ..))
                    if refused.request == request || refused.request == 0 =>
                {
                    receiving.is_answered(request);
                    return outcome.and(Err(refusal(&refused)));
                }
                Ok((daemon_frame::What::Refused(refused), ..)) => receiving.is_answered(refused.request),
                // Somebody works on it: the patience begins anew. A driver that hangs is the daemon's to notice (`driver_deadline`).
                Ok((daemon_frame::What::Working(working), ..)) => {
                    let v1::Working { ready, wanted, .. } = working;
                    tracing::debug!(ready, wanted, "the daemon is still at it");
                }
                Ok((daemon_frame::What::Welcome(_), ..)) => {
                    return Err(malformed("frame", "a second welcome").into());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a batch of the request that is awaited.
    fn take_batch(
        &self,
        batch: &v1::Batch,
        fds: Vec<OwnedFd>,
        is_cut: bool,
        leased: &mut Vec<Leased>,
    ) -> Result<(), SessionError> {
        self.send(client_frame::What::Ack(v1::Ack { request: batch.request }))?;
        let chunks = convert::chunks("batch.chunks", &batch.chunks)?;
        if chunks.len() != fds.len() {
            let (told, came) = (chunks.len(), fds.len());
            drop(fds);
            // They are ours, as the daemon sees it.
            self.release(chunks.into_iter().map(|(id, _)| id).collect())?;
            if is_cut {
                return Err(ChannelError::DescriptorsLost.into());
            }
            return Err(malformed("batch.chunks", format!("{told} chunks came with {came} descriptors")).into());
        }
        leased.extend(chunks.into_iter().zip(fds).map(|((id, len), fd)| (id, len, fd)));
        Ok(())
    }

    /// A batch came for a request that this side has given up: nobody wants it any more.
    fn turn_down(&self, batch: &v1::Batch, receiving: &mut Receiving) -> Result<(), SessionError> {
        if batch.is_last {
            receiving.is_answered(batch.request);
        }
        self.send(client_frame::What::Ack(v1::Ack { request: batch.request }))?;
        self.release(batch.chunks.iter().map(|chunk| ChunkId(chunk.chunk_id)).collect())
    }

    /// Gives back what has come for requests that were given up: until somebody asks for more nobody else would, and it would be leased to nobody. To be called now and then; waits for
    /// nothing but the rest of what has begun to come.
    pub(super) fn settle(&self) {
        const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        // Whoever receives now does the same.
        let mut receiving = match self.receiving.try_lock() {
            Ok(receiving) => receiving,
            Err(TryLockError::Poisoned(panicked)) => panicked.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let mut has_come = false;
        while !receiving.given_up.is_empty() {
            match self.channel.receive_now::<v1::DaemonFrame>() {
                Ok((frame, fds)) => {
                    drop(fds);
                    has_come = true;
                    match frame.what {
                        Some(daemon_frame::What::Batch(batch)) => match self.turn_down(&batch, &mut receiving) {
                            Ok(()) => {}
                            Err(_) => return,
                        },
                        Some(daemon_frame::What::Refused(refused)) => receiving.is_answered(refused.request),
                        // That it is still worked on, say.
                        _ => {}
                    }
                }
                Err(ChannelError::WouldBlock) => {
                    let mut fds = [PollFd::new(&self.channel, PollFlags::IN)];
                    if !has_come || !poll(&mut fds, Some(&REST)).is_ok_and(|ready| ready > 0) {
                        return;
                    }
                }
                // The daemon is gone, and what it had granted with it; or it breaks the protocol, which the next acquire meets.
                Err(_) => receiving.given_up.clear(),
            }
        }
    }

    /// What was asked for is released, as far as it will be.
    pub(super) fn answer(&self, question: Question) -> Result<(), SessionError> {
        let device_uuid = question.device.0.to_vec();
        self.send(client_frame::What::Answer(v1::Answer { device_uuid, ask: question.ask }))
    }

    /// Shows where everything on a device lies.
    pub(super) fn show(
        &self,
        device: DeviceUuid,
        look: u64,
        (map, age): (v1::AddressMap, Duration),
    ) -> Result<(), SessionError> {
        let shown = v1::Shown {
            device_uuid: device.0.to_vec(),
            look,
            map: Some(map),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        };
        self.send(client_frame::What::Shown(shown))
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

pub(super) fn refusal(refused: &v1::Refused) -> SessionError {
    SessionError::Refused { kind: ErrorKind::from(refused.kind()), message: refused.message.clone() }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::ids::DeviceUuid;
    use crate::ladder::Shape;

    /// One whose socket has waited for nothing yet.
    fn link(channel: FdChannel, patience: Duration) -> Link {
        let (receiving, next_request) = (Receiving::new(Duration::ZERO), AtomicU64::new(1));
        Link { channel, receiving, next_request, patience, says_working: true }
    }

    fn wanted(mib: u64) -> WantedChunks {
        let (device, len) = (DeviceUuid([7; 16]), Bytes::mib(mib));
        WantedChunks { device, len, shape: Shape::Largest, plan: None, wait_ms: 0, waited_ms: 0 }
    }

    #[test]
    fn what_comes_for_a_request_that_was_given_up_goes_back_although_nobody_asks_again() {
        let (here, there) = FdChannel::pair().unwrap();
        let link = link(here, Duration::from_millis(20));
        let daemon = |what| there.send(&v1::DaemonFrame { what: Some(what) }, &[]).unwrap();
        let batch = |request, chunk_id, is_last| {
            let chunks = vec![v1::ChunkInfo { chunk_id, len_bytes: 2 << 20 }];
            daemon_frame::What::Batch(v1::Batch { request, chunks, is_last })
        };
        let heard = || there.receive_now::<v1::ClientFrame>().map(|(frame, _)| frame.what.unwrap());
        assert_eq!(link.acquire(wanted(4)).unwrap_err(), SessionError::Channel(ChannelError::TimedOut));
        assert!(matches!(heard(), Ok(client_frame::What::Acquire(acquire)) if acquire.request == 1));
        link.settle();
        assert_eq!(heard(), Err(ChannelError::WouldBlock));
        for (chunk, is_last) in [(7, false), (8, true)] {
            daemon(batch(1, chunk, is_last));
            link.settle();
            assert_eq!(heard(), Ok(client_frame::What::Ack(v1::Ack { request: 1 })));
            assert!(matches!(heard(), Ok(client_frame::What::Release(release)) if release.chunk_ids == [chunk]));
        }
        // That was all of it.
        daemon(batch(1, 9, true));
        link.settle();
        assert_eq!(heard(), Err(ChannelError::WouldBlock));
    }

    #[test]
    fn a_batch_that_lacks_descriptors_goes_back_and_the_next_request_is_served() {
        let (here, there) = FdChannel::pair().unwrap();
        let link = link(here, Duration::from_secs(5));
        let file = std::fs::File::open("/dev/null").unwrap();
        let batch = |request, ids: &[u64]| {
            let chunks = ids.iter().map(|id| v1::ChunkInfo { chunk_id: *id, len_bytes: 2 << 20 }).collect();
            v1::DaemonFrame { what: Some(daemon_frame::What::Batch(v1::Batch { request, chunks, is_last: true })) }
        };
        // As it looks where there is room for one: two chunks with one descriptor. (The kernel says then that it dropped some; here the daemon sent too few.)
        there.send(&batch(1, &[7, 8]), &[file.as_fd()]).unwrap();
        assert_eq!(link.acquire(wanted(4)).unwrap_err().kind(), ErrorKind::Broken);
        let heard = || there.receive_now::<v1::ClientFrame>().map(|(frame, _)| frame.what.unwrap());
        assert!(matches!(heard(), Ok(client_frame::What::Acquire(_))));
        assert!(matches!(heard(), Ok(client_frame::What::Ack(ack)) if ack.request == 1));
        assert!(matches!(heard(), Ok(client_frame::What::Release(release)) if release.chunk_ids == [7, 8]));
        assert!(link.receiving.lock().unwrap().given_up.is_empty(), "it was answered");
        // The release was request 2.
        there.send(&batch(3, &[9]), &[file.as_fd()]).unwrap();
        assert_eq!(link.acquire(wanted(2)).unwrap().len(), 1);
    }

    #[test]
    fn a_panic_while_an_answer_is_awaited_stops_no_later_request() {
        let (here, there) = FdChannel::pair().unwrap();
        let link = link(here, Duration::from_secs(5));
        let panics = || {
            let _held = link.receiving.lock();
            std::panic::resume_unwind(Box::new("in the middle of an answer"));
        };
        assert!(std::thread::scope(|scope| scope.spawn(panics).join()).is_err());
        link.settle();
        let file = std::fs::File::open("/dev/null").unwrap();
        let chunks = vec![v1::ChunkInfo { chunk_id: 7, len_bytes: 2 << 20 }];
        let batch = daemon_frame::What::Batch(v1::Batch { request: 1, chunks, is_last: true });
        there.send(&v1::DaemonFrame { what: Some(batch) }, &[file.as_fd()]).unwrap();
        assert_eq!(link.acquire(wanted(2)).unwrap().len(), 1);
    }

    #[test]
    fn a_daemon_that_has_gone_is_said_so_on_whichever_way_it_is_noticed() {
        let link = |channel| link(channel, Duration::from_secs(5));
        let (here, there) = FdChannel::pair().unwrap();
        drop(there);
        assert_eq!(link(here).acquire(wanted(2)).unwrap_err(), SessionError::DaemonGone, "while it sends");
        let (here, there) = FdChannel::pair().unwrap();
        let daemon = std::thread::spawn(move || there.receive::<v1::ClientFrame>().unwrap());
        assert_eq!(link(here).acquire(wanted(2)).unwrap_err(), SessionError::DaemonGone, "while it waits");
        daemon.join().unwrap();
    }
}
