//! A session's way to the daemon, and to the one that follows it: the connection of the moment, and what the session holds, which is what it says when it is there again.
//!
//! Whoever leases or releases is inside ([`Line::enter`]) from before the daemon hears of it until what is held says so too. A connection is changed when nobody is. So what the session names is what it has: no chunk is on its way past it.
//!
//! Not for: finding the next daemon (the control thread does).

use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::giving::Question;
use super::holdings::Holdings;
use super::link::Link;
use super::{Guaranteed, SessionError};
use crate::clock::Clock;
use crate::ids::{DeviceUuid, SessionId};
use crate::wire::convert::Token;
use crate::wire::v1::AddressMap;

/// A daemon that says no because it ends is gone soon: within that the session has noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// One that has been away for so long is not waited for any more: it comes again, or not.
const AWAY_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Line {
    gate: Mutex<Gate>,
    changed: Condvar,
    /// The session's number at the daemon.
    session: AtomicU64,
    is_attached: AtomicBool,
    /// No daemon will know this session again.
    is_given_up: AtomicBool,
    pub(super) holdings: Holdings,
    /// Somebody found that the connection is over.
    pub(super) broken: tokio::sync::Notify,
    /// What it is guaranteed, by device.
    pub(super) guaranteed: Mutex<BTreeMap<DeviceUuid, Guaranteed>>,
    /// Where chunks come from, and how long for a word.
    chunk_socket: PathBuf,
    patience: Duration,
    /// Where the session counts: brought along to the next daemon.
    page: OwnedFd,
    clock: Arc<dyn Clock>,
}

#[derive(Debug)]
struct Gate {
    link: Arc<Link>,
    /// How many connections there were.
    epoch: u64,
    users: usize,
    is_closed: bool,
    /// When the daemon went away.
    away_since: Option<Duration>,
}

/// Somebody is inside: the connection is not changed.
pub(super) struct User<'a> {
    line: &'a Line,
    link: Arc<Link>,
    epoch: u64,
}

impl User<'_> {
    /// Which connection it is.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Deref for User<'_> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.line.gate().users -= 1;
        self.line.changed.notify_all();
    }
}

impl Line {
    pub(super) fn new(
        link: Link,
        session: SessionId,
        page: OwnedFd,
        chunk_socket: PathBuf,
        patience: Duration,
        clock: Arc<dyn Clock>,
    ) -> Line {
        Line {
            gate: Mutex::new(Gate { link: Arc::new(link), epoch: 1, users: 0, is_closed: false, away_since: None }),
            changed: Condvar::new(),
            session: AtomicU64::new(session.0),
            is_attached: AtomicBool::new(true),
            is_given_up: AtomicBool::new(false),
            holdings: Holdings::default(),
            broken: tokio::sync::Notify::new(),
            guaranteed: Mutex::default(),
            chunk_socket,
            patience,
            page,
            clock,
        }
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn session(&self) -> SessionId {
        SessionId(self.session.load(Ordering::Relaxed))
    }

    pub(super) fn chunk_socket(&self) -> &PathBuf {
        &self.chunk_socket
    }

    pub(super) fn is_attached(&self) -> bool {
        self.is_attached.load(Ordering::Relaxed)
    }

    /// The connection to the daemon is gone, or there again.
    pub(super) fn set_attached(&self, is_attached: bool) {
        self.is_attached.store(is_attached, Ordering::Relaxed);
        // Whoever waits looks again.
        let now = self.clock.now();
        let mut gate = self.gate();
        gate.away_since = (!is_attached).then(|| gate.away_since.unwrap_or(now));
        drop(gate);
        self.changed.notify_all();
    }

    /// Nobody will be there again.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.set_attached(false);
    }

    /// Has the connection of the moment, unless it is being changed.
    pub(super) fn enter(&self) -> Option<User<'_>> {
        let mut gate = self.gate();
        if gate.is_closed {
            return None;
        }
        gate.users += 1;
        Some(User { line: self, link: Arc::clone(&gate.link), epoch: gate.epoch })
    }

    /// The number of the connection of the moment.
    pub(super) fn epoch(&self) -> u64 {
        self.gate().epoch
    }

    /// The connection `epoch` is over, as whoever has used it says: where nobody has noticed the next one is looked for.
    pub(super) fn note_broken(&self, epoch: u64) {
        if self.epoch() == epoch && self.is_attached() {
            self.broken.notify_one();
        }
    }

    /// Waits until there is another connection than `epoch`, `patience` at most. False where there is none: nor will there be soon where the daemon has not gone.
    pub(super) fn wait_for_next(&self, epoch: u64, patience: Duration) -> bool {
        let since = self.clock.now();
        let mut gate = self.gate();
        loop {
            if gate.epoch > epoch && !gate.is_closed {
                return true;
            }
            let waited = self.clock.now().saturating_sub(since);
            let is_there = self.is_attached() && !gate.is_closed;
            let away = gate.away_since.map_or(Duration::ZERO, |away| since.saturating_sub(away));
            let most = patience.min(if is_there { NOTICED } else { AWAY_MAX.saturating_sub(away) });
            if self.is_given_up.load(Ordering::Relaxed) || waited >= most {
                return false;
            }
            let waiting = self.changed.wait_timeout(gate, most.saturating_sub(waited));
            gate = waiting.map_or_else(|poisoned| poisoned.into_inner().0, |(gate, _)| gate);
        }
    }

    /// Lets nobody in any more, and waits until nobody is inside: whoever waits there for the daemon hears that it is gone. False where somebody stays too long; then it is as before.
    pub(super) fn close(&self) -> bool {
        let since = self.clock.now();
        let mut gate = self.gate();
        gate.is_closed = true;
        gate.link.hang_up();
        while gate.users > 0 {
            let waited = self.clock.now().saturating_sub(since);
            if waited >= self.patience {
                gate.is_closed = false;
                drop(gate);
                self.changed.notify_all();
                return false;
            }
            let waiting = self.changed.wait_timeout(gate, self.patience.saturating_sub(waited));
            gate = waiting.map_or_else(|poisoned| poisoned.into_inner().0, |(gate, _)| gate);
        }
        true
    }

    /// Lets everybody in again: with another connection, or with the one that is gone.
    pub(super) fn open(&self, next: Option<(Link, SessionId)>) {
        if let Some((link, session)) = next {
            // Before anybody leases: what is free again could come as what it was called before.
            self.holdings.all().iter().for_each(|holding| holding.send_unsent(|ids| link.release(ids)));
            self.session.store(session.0, Ordering::Relaxed);
            let mut gate = self.gate();
            (gate.link, gate.epoch, gate.away_since) = (Arc::new(link), gate.epoch + 1, None);
            // Before anybody is let in: who is would take it for away.
            self.is_attached.store(true, Ordering::Relaxed);
        }
        self.gate().is_closed = false;
        self.changed.notify_all();
    }

    /// Connects to the chunk socket of the next daemon.
    pub(super) fn link_to(&self, ticket: Token) -> Result<Link, SessionError> {
        Ok(Link::open(&self.chunk_socket, ticket, self.patience, Some(self.page.as_fd()))?.0)
    }

    /// Answers a question of the daemon's.
    pub(super) fn answer(&self, question: Question) -> Result<(), SessionError> {
        self.enter().ok_or(SessionError::DaemonGone)?.answer(question)
    }

    /// Shows the daemon where everything on a device lies, for its `look`th time.
    pub(super) fn show(&self, device: DeviceUuid, look: u64, map: (AddressMap, Duration)) -> Result<(), SessionError> {
        self.enter().ok_or(SessionError::DaemonGone)?.show(device, look, map)
    }

    /// See [`Link::settle`].
    pub(super) fn settle(&self) {
        if let Some(link) = self.enter() {
            link.settle();
        }
    }
}
