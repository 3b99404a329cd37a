//! Sessions as the daemon knows them: who they are, what proves it, and how their end is noticed.
//!
//! A session's *process* decides when its memory comes back: the pidfd says when it is gone. Its *connection* only decides whether it is served: a forked child
//! can hold that open, and a live process can lose it.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use tokio::io::Interest;
use tokio::sync::{Semaphore, watch};

use super::Daemon;
use super::claims::OpenClaims;
use super::connections::Seat;
use super::live::maps::Maps;
use super::pods::PodNames;
use super::reattach::Told;
use super::revocations::Questions;
use super::watched;
use crate::error::chain;
use crate::ids::{RangeId, SessionId};
use crate::keeper::Key;
use crate::ledger::EndReason;
use crate::limits;
use crate::units::Bytes;
use crate::wire::convert::Token;
use crate::wire::peer::{Identity, Peer};
use crate::wire::v1::event::Kind;

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
    pub(super) tenant: String,
    /// Where its process runs; nothing where nobody says, or the daemon does not see that it is so.
    pub(super) pod: OnceLock<PodNames>,
    /// The most that it can be guaranteed of a device.
    pub(super) guarantee_max: Bytes,
    /// What it has leased and attached and not fetched.
    pub(super) claims: OpenClaims,
    /// What it is asked for.
    pub(super) questions: Questions,
    /// Where its memory lies.
    pub(super) maps: Maps,
    /// How often it has not answered in time.
    pub(super) unanswered: AtomicU64,
    /// The plan that it last asked for memory with; 0 for none.
    pub(super) plan: AtomicU64,
    /// Becomes true when its process is to be ended.
    pub(super) ending: watch::Sender<bool>,
    /// Where it counts. Of a session that was taken over nobody has it before its process is there again.
    pub(super) page: Mutex<Option<OwnedFd>>,
    /// Its connections on the chunk socket so far: the last one is its own.
    pub(super) links: watch::Sender<u64>,
    /// Held by who serves one, so that the next begins when that is over.
    pub(super) serving: tokio::sync::Mutex<()>,
    /// What it has said so far that it holds.
    pub(super) told: Mutex<Told>,
    /// Which of its attempts to be there again is the last that was heard.
    pub(super) attempt: AtomicU64,
    /// It has leased something from this daemon: what it holds is known.
    pub(super) has_leased: AtomicBool,
    pub(super) opened: Duration,
    /// How old it was then: one that a daemon before has opened.
    pub(super) age_before: Duration,
    /// Places for acquires over gRPC that wait.
    pub(super) acquires: Semaphore,
    /// How often somebody has begun to watch it: the last one does.
    pub(super) watches: watch::Sender<u64>,
    /// Becomes true when the session is over, whatever the reason.
    pub(super) ended: watch::Sender<bool>,
    pub(super) _seat: Option<Seat>,
}

impl Entry {
    /// Has its process ended, by whoever has hold of it. False where nobody has.
    pub(super) fn end_process(&self) -> bool {
        if !self.has_pidfd {
            tracing::error!(session = %self.id, pid = self.pid, "the kernel gives this daemon no hold of the process: it is not ended");
            return false;
        }
        self.ending.send_replace(true);
        true
    }

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

/// A lease, or a hold of a shared range, whose descriptors were not fetched yet: one of the session's
/// [`OpenClaims`].
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) session: SessionId,
    pub(super) number: u64,
    /// The shared range, if it is of a hold.
    pub(super) range: Option<RangeId>,
}

impl Good {
    fn session(&self) -> SessionId {
        match self {
            Good::Link(session) => *session,
            Good::Claim(claim) => claim.session,
        }
    }
}

#[derive(Debug)]
struct Ticket {
    good: Good,
    identity: Identity,
    expires: Duration,
}

/// Every ticket, by what it is looked for. Each is in all three, or in none.
#[derive(Debug, Default)]
struct Tickets {
    by_token: HashMap<Token, Ticket>,
    by_end: BTreeSet<(Duration, Token)>,
    by_session: BTreeSet<(SessionId, Token)>,
}

impl Tickets {
    fn add(&mut self, token: Token, ticket: Ticket) {
        self.by_end.insert((ticket.expires, token));
        self.by_session.insert((ticket.good.session(), token));
        self.by_token.insert(token, ticket);
    }

    fn take(&mut self, token: &Token) -> Option<Ticket> {
        let ticket = self.by_token.remove(token)?;
        self.by_end.remove(&(ticket.expires, *token));
        self.by_session.remove(&(ticket.good.session(), *token));
        Some(ticket)
    }

    /// One whose time is up, if there is any.
    fn take_expired(&mut self, now: Duration) -> Option<Ticket> {
        let (expires, token) = *self.by_end.first()?;
        if expires < now { self.take(&token) } else { None }
    }

    /// A session is over, and what its tickets were good for is, too.
    fn drop_those_of(&mut self, session: SessionId) {
        let of_session = (session, Token::default())..=(session, [u8::MAX; 16]);
        let tokens: Vec<_> = self.by_session.range(of_session).map(|(_, token)| *token).collect();
        for token in tokens {
            self.take(&token);
        }
    }
}

/// All sessions and tickets. Look-up tables only: no reference into them is held over another call.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sessions: DashMap<SessionId, Arc<Entry>>,
    tickets: Mutex<Tickets>,
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

    /// Chunks that the sessions of a process have said they hold, and have not said all.
    pub(super) fn told_by(&self, identity: Identity) -> usize {
        self.sessions.iter().filter(|entry| entry.identity == identity).map(|entry| entry.told_count()).sum()
    }

    /// Forgets what sessions have begun to say before `since`, and have not said all.
    pub(super) fn forget_told_before(&self, since: Duration) {
        self.sessions.iter().for_each(|entry| entry.forget_told_before(since));
    }

    pub(super) fn add(&self, entry: Arc<Entry>) {
        self.sessions.insert(entry.id, entry);
    }

    /// Takes a session out, with its tickets. `None` if somebody else did before.
    fn take(&self, session: SessionId) -> Option<Arc<Entry>> {
        let (_, entry) = self.sessions.remove(&session)?;
        self.tickets().drop_those_of(session);
        Some(entry)
    }

    fn tickets(&self) -> MutexGuard<'_, Tickets> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What was leased for tickets that were not shown goes back otherwise.
    pub(super) fn drop_tickets_of(&self, session: SessionId) {
        self.tickets().drop_those_of(session);
        if let Some(entry) = self.get(session) {
            entry.claims.end_all();
        }
    }

    /// The session that a call is for, if the caller can prove that it is its own.
    pub(super) fn authorise(&self, session: SessionId, secret: &Token, peer: &Peer) -> Result<Arc<Entry>, NotGood> {
        let entry = self.get(session).filter(|entry| entry.secret == *secret && entry.identity.may_be(peer.identity));
        entry.ok_or(NotGood("session or its secret"))
    }

    /// Makes a ticket for the process that `identity` is. Where the session is over already it is good for nothing, and is not kept.
    pub(super) fn issue(&self, good: Good, identity: Identity, now: Duration) -> Result<Token, rustix::io::Errno> {
        let token = random_token()?;
        let good_for = match good {
            Good::Link(_) => limits::LINK_TICKET_MS_MAX,
            Good::Claim(_) => limits::TICKET_MS_MAX,
        };
        let expires = now + Duration::from_millis(good_for);
        // Under the lock: a session that ends takes its tickets out after it has gone itself.
        let mut tickets = self.tickets();
        if self.sessions.contains_key(&good.session()) {
            tickets.add(token, Ticket { good, identity, expires });
        }
        Ok(token)
    }

    /// Uses a ticket up. It is gone even when it is shown by the wrong process: whoever could guess it gets one try.
    pub(super) fn redeem(&self, token: &Token, peer: &Peer, now: Duration) -> Result<Good, NotGood> {
        let mut tickets = self.tickets();
        let ticket = tickets.take(token).ok_or(NotGood("ticket"))?;
        if ticket.expires < now || !ticket.identity.may_be(peer.identity) {
            // A claim's chunks must not be lost with it.
            if let Good::Claim(_) = ticket.good {
                tickets.add(*token, Ticket { expires: Duration::ZERO, ..ticket });
            }
            return Err(NotGood("ticket"));
        }
        Ok(ticket.good)
    }

    /// Forgets tickets whose time is up; gives back the leases that nobody has fetched.
    pub(super) fn expired_claims(&self, now: Duration) -> Vec<Claim> {
        let mut tickets = self.tickets();
        let mut claims = Vec::new();
        while let Some(ticket) = tickets.take_expired(now) {
            if let Good::Claim(claim) = ticket.good {
                claims.push(claim);
            }
        }
        claims
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
        self.keep_counters_of(&entry);
        self.session_counts.note_end(reason);
        let ended = self.steward.end(session, reason);
        // Who waits for its end looks next at what it held.
        entry.ended.send_replace(true);
        if let Some(keeping) = &self.keeping {
            keeping.let_go_of(&[Key::Process(session)]);
        }
        match ended {
            Ok(returned) => {
                let kind = match reason {
                    EndReason::Closed => Kind::Closed,
                    EndReason::Died => Kind::Died,
                };
                self.note_event(kind, format!("{} ({session}): {returned} came back", entry.name));
                tracing::info!(%session, name = entry.name, ?reason, returned_bytes = returned.get(), "session ended");
                Some(returned)
            }
            Err(error) => {
                tracing::error!(%session, error = %chain(&error), "the ledger does not know a session that was open");
                None
            }
        }
    }

    /// The session's connection is gone, and it has no other: it is served no longer. Where the kernel cannot tell when its process ends, that is its end.
    pub(super) fn detach_session(&self, entry: &Entry, link: u64) {
        if *entry.links.borrow() != link {
            return;
        }
        if !entry.has_pidfd {
            self.end_session(entry.id, EndReason::Died);
            return;
        }
        if self.registry.get(entry.id).is_some() && self.steward.detach(entry.id).is_ok() {
            tracing::debug!(session = %entry.id, "connection lost");
        }
    }

    /// Waits for the session's process to end, or for the session to be over before.
    pub(super) async fn watch_process(self: Arc<Daemon>, entry: Arc<Entry>, pidfd: Arc<OwnedFd>) {
        let pidfd = match watched::watch(pidfd, Interest::READABLE) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                tracing::error!(session = %entry.id, %error, "a process cannot be watched: its memory stays until the daemon ends");
                return;
            }
        };
        let mut ending = entry.ending.subscribe();
        let mut is_ending = false;
        loop {
            tokio::select! {
                () = entry.over() => return,
                _ = pidfd.readable() => {
                    self.end_session(entry.id, EndReason::Died);
                    return;
                }
                // The sender lives in the entry that this holds.
                _ = ending.wait_for(|ending| *ending), if !is_ending => {
                    is_ending = true;
                    // By its descriptor: a number may be another's by now.
                    if let Err(error) = rustix::process::pidfd_send_signal(pidfd.get_ref(), rustix::process::Signal::KILL) {
                        tracing::error!(session = %entry.id, pid = entry.pid, %error, "the process cannot be ended");
                        self.steward.spare(entry.id);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::connections::Connections;
    use crate::wire::stats_page;

    const NOW: Duration = Duration::from_secs(100);

    fn peer() -> Peer {
        Peer { pidfd: None, identity: Identity::Pidfs(7), pid: 7, uid: 0 }
    }

    fn open(registry: &Registry, id: u64) -> SessionId {
        let id = SessionId(id);
        registry.add(Arc::new(Entry {
            id,
            name: String::new(),
            secret: Token::default(),
            identity: peer().identity,
            pid: 7,
            has_pidfd: true,
            tenant: String::new(),
            pod: OnceLock::new(),
            guarantee_max: Bytes::ZERO,
            claims: OpenClaims::default(),
            questions: Questions::default(),
            maps: Maps::default(),
            unanswered: AtomicU64::new(0),
            plan: AtomicU64::new(0),
            ending: watch::Sender::new(false),
            page: Mutex::new(Some(stats_page::create(id).unwrap())),
            links: watch::Sender::new(0),
            serving: tokio::sync::Mutex::default(),
            told: Mutex::default(),
            attempt: AtomicU64::new(0),
            has_leased: AtomicBool::new(false),
            opened: NOW,
            age_before: Duration::ZERO,
            acquires: Semaphore::new(1),
            watches: watch::Sender::new(0),
            ended: watch::Sender::new(false),
            _seat: Connections::new(1024, 1024).enter(&peer()),
        }));
        id
    }

    fn claim(session: SessionId, number: u64) -> Good {
        Good::Claim(Claim { session, number, range: None })
    }

    fn count(registry: &Registry) -> usize {
        let tickets = registry.tickets();
        assert_eq!((tickets.by_end.len(), tickets.by_session.len()), (tickets.by_token.len(), tickets.by_token.len()));
        tickets.by_token.len()
    }

    #[test]
    fn sessions_that_end_leave_no_tickets_behind() {
        let registry = Registry::default();
        let stays = open(&registry, u64::MAX);
        let kept = registry.issue(Good::Link(stays), peer().identity, NOW).unwrap();
        for id in 1..=1_000 {
            let session = open(&registry, id);
            registry.issue(Good::Link(session), peer().identity, NOW).unwrap();
            registry.issue(claim(session, id), peer().identity, NOW).unwrap();
            registry.take(session).unwrap();
            // Of a session that has ended in the same moment.
            registry.issue(Good::Link(session), peer().identity, NOW).unwrap();
            assert_eq!(count(&registry), 1, "session {id}");
        }
        assert!(matches!(registry.redeem(&kept, &peer(), NOW), Ok(Good::Link(session)) if session == stays));
        assert_eq!(count(&registry), 0);
    }

    #[test]
    fn tickets_end_in_their_time_and_claims_are_given_back() {
        let registry = Registry::default();
        let session = open(&registry, 1);
        let issue = |good| registry.issue(good, peer().identity, NOW).unwrap();
        let (link, _late) = (issue(Good::Link(session)), issue(claim(session, 8)));
        let stolen = issue(claim(session, 9));
        let thief = Peer { identity: Identity::Pidfs(8), ..peer() };
        registry.redeem(&stolen, &thief, NOW).unwrap_err();
        let given_back =
            |now| -> Vec<_> { registry.expired_claims(now).into_iter().map(|claim| claim.number).collect() };
        assert_eq!(given_back(NOW), [9]);
        assert_eq!(given_back(NOW + Duration::from_millis(limits::TICKET_MS_MAX)), [0; 0]);
        assert_eq!(given_back(NOW + Duration::from_millis(limits::TICKET_MS_MAX + 1)), [8]);
        assert_eq!(count(&registry), 1);
        assert_eq!(given_back(NOW + Duration::from_millis(limits::LINK_TICKET_MS_MAX + 1)), [0; 0]);
        assert_eq!(count(&registry), 0);
        assert_eq!(registry.redeem(&link, &peer(), NOW).unwrap_err(), NotGood("ticket"));
    }
}
