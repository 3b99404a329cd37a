//! Sessions as the daemon knows them: who they are, what proves it, and how their end is noticed.
//!
//! A session's *process* decides when its memory comes back: the pidfd says when it is gone. Its *connection* only decides whether it is served: a forked child
//! can hold that open, and a live process can lose it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use tokio::io::Interest;
use tokio::sync::{Semaphore, watch};

use super::Daemon;
use super::connections::Seat;
use super::watched;
use crate::error::chain;
use crate::ids::{ChunkId, SessionId};
use crate::ledger::EndReason;
use crate::limits;
use crate::units::Bytes;
use crate::wire::convert::Token;
use crate::wire::peer::{Identity, Peer};
use crate::wire::stats_page;

/// A session.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: SessionId,
    pub(super) name: String,
    pub(super) secret: Token,
    pub(super) identity: Identity,
    pub(super) pid: i32,
    /// The kernel tells when its process ends; without that its connection stands for it.
    pub(super) has_pidfd: bool,
    pub(super) limit: Bytes,
    pub(super) page: OwnedFd,
    pub(super) opened: Duration,
    /// Places for acquires over gRPC that wait.
    pub(super) acquires: Semaphore,
    /// How often somebody has begun to watch it: the last one does.
    pub(super) watches: watch::Sender<u64>,
    /// Becomes true when the session is over, whatever the reason.
    pub(super) ended: watch::Sender<bool>,
    pub(super) _seat: Seat,
}

impl Entry {
    /// Completes when the session is over.
    pub(super) async fn over(&self) {
        // The sender lives as long as this does.
        drop(self.ended.subscribe().wait_for(|ended| *ended).await);
    }
}

/// What a ticket is good for, once.
#[derive(Debug)]
pub(super) enum Good {
    /// To be the chunk socket of a session.
    Link(SessionId),
    /// To receive what was leased over gRPC.
    Claim(Claim),
}

/// A lease whose descriptors nobody has fetched yet.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) session: SessionId,
    pub(super) chunks: Vec<(ChunkId, Bytes)>,
}

#[derive(Debug)]
struct Ticket {
    good: Good,
    identity: Identity,
    expires: Duration,
}

/// All sessions and tickets. Look-up tables only: no reference into them is held over another call.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sessions: DashMap<SessionId, Arc<Entry>>,
    tickets: DashMap<Token, Ticket>,
}

/// Why a ticket or a secret is no good. The text does not say which part was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {0} is not good: unknown, used before, too old, or another process's")]
pub(super) struct NotGood(&'static str);

impl Registry {
    pub(super) fn count(&self) -> usize {
        self.sessions.len()
    }

    /// Sessions of one process.
    pub(super) fn count_of(&self, identity: Identity) -> usize {
        self.sessions.iter().filter(|entry| entry.identity == identity).count()
    }

    pub(super) fn add(&self, entry: Arc<Entry>) {
        self.sessions.insert(entry.id, entry);
    }

    /// Takes a session out. `None` if somebody else did before.
    fn take(&self, session: SessionId) -> Option<Arc<Entry>> {
        self.sessions.remove(&session).map(|(_, entry)| entry)
    }

    pub(super) fn get(&self, session: SessionId) -> Option<Arc<Entry>> {
        self.sessions.get(&session).map(|entry| Arc::clone(&entry))
    }

    /// Every session, by number.
    pub(super) fn all(&self) -> Vec<Arc<Entry>> {
        let mut all: Vec<_> = self.sessions.iter().map(|entry| Arc::clone(&entry)).collect();
        all.sort_by_key(|entry| entry.id);
        all
    }

    /// The session that a call is for, if the caller can prove that it is its own.
    pub(super) fn authorise(&self, session: SessionId, secret: &Token, peer: &Peer) -> Result<Arc<Entry>, NotGood> {
        let entry = self.get(session).filter(|entry| entry.secret == *secret && entry.identity.may_be(peer.identity));
        entry.ok_or(NotGood("session or its secret"))
    }

    /// Makes a ticket for the process that `identity` is.
    pub(super) fn issue(&self, good: Good, identity: Identity, now: Duration) -> Result<Token, rustix::io::Errno> {
        let token = random_token()?;
        let good_for = match good {
            Good::Link(_) => limits::LINK_TICKET_MS_MAX,
            Good::Claim(_) => limits::TICKET_MS_MAX,
        };
        let expires = now + Duration::from_millis(good_for);
        self.tickets.insert(token, Ticket { good, identity, expires });
        Ok(token)
    }

    /// Uses a ticket up. It is gone even when it is shown by the wrong process: whoever could guess it gets one try.
    pub(super) fn redeem(&self, token: &Token, peer: &Peer, now: Duration) -> Result<Good, NotGood> {
        let (_, ticket) = self.tickets.remove(token).ok_or(NotGood("ticket"))?;
        if ticket.expires < now || !ticket.identity.may_be(peer.identity) {
            // A claim's chunks must not be lost with it.
            if let Good::Claim(_) = ticket.good {
                self.tickets
                    .insert(*token, Ticket { expires: Duration::ZERO, identity: ticket.identity, good: ticket.good });
            }
            return Err(NotGood("ticket"));
        }
        Ok(ticket.good)
    }

    /// Forgets tickets whose time is up; gives back the leases that nobody has fetched.
    pub(super) fn expired_claims(&self, now: Duration) -> Vec<Claim> {
        let expired: Vec<Token> =
            self.tickets.iter().filter(|ticket| ticket.expires < now).map(|ticket| *ticket.key()).collect();
        let take = |token: &Token| self.tickets.remove(token).map(|(_, ticket)| ticket.good);
        let claim = |good| if let Good::Claim(claim) = good { Some(claim) } else { None };
        expired.iter().filter_map(take).filter_map(claim).collect()
    }
}

/// Sixteen bytes that nobody can guess.
pub(super) fn random_token() -> Result<Token, rustix::io::Errno> {
    let mut token = [0; 16];
    let filled = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
    if filled == token.len() { Ok(token) } else { Err(rustix::io::Errno::IO) }
}

impl Daemon {
    /// A session is over: its memory goes back. Only the first to say so does anything.
    pub(super) fn end_session(&self, session: SessionId, reason: EndReason) -> Option<Bytes> {
        let entry = self.registry.take(session)?;
        let counters = stats_page::read(&entry.page).unwrap_or([0; limits::COUNTERS_MAX]);
        self.metrics.note_ended(&counters);
        entry.ended.send_replace(true);
        match self.steward.end(session, reason) {
            Ok(returned) => {
                tracing::info!(%session, name = entry.name, ?reason, returned_bytes = returned.get(), "session ended");
                Some(returned)
            }
            Err(error) => {
                tracing::error!(%session, error = %chain(&error), "the ledger does not know a session that was open");
                None
            }
        }
    }

    /// The session's connection is gone: it is served no longer. Where the kernel cannot tell when its process ends, that is its end.
    pub(super) fn detach_session(&self, entry: &Entry) {
        if !entry.has_pidfd {
            self.end_session(entry.id, EndReason::Died);
            return;
        }
        if self.registry.get(entry.id).is_some() && self.steward.detach(entry.id).is_ok() {
            tracing::debug!(session = %entry.id, "connection lost");
        }
    }

    /// Waits for the session's process to end, or for the session to be over before.
    pub(super) async fn watch_process(self: Arc<Daemon>, entry: Arc<Entry>, pidfd: OwnedFd) {
        let pidfd = match watched::watch(pidfd, Interest::READABLE) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                tracing::error!(session = %entry.id, %error, "a process cannot be watched: its memory stays until the daemon ends");
                return;
            }
        };
        tokio::select! {
            () = entry.over() => {}
            _ = pidfd.readable() => {
                self.end_session(entry.id, EndReason::Died);
            }
        }
    }
}
