//! What each process has of the daemon: connections, sessions, and descriptors that it was sent and has not read. Without a limit one process could take every descriptor that the daemon keeps for
//! connections, or all that the kernel lets the daemon have on their way, and nobody else would be served. A session counts by itself, because it outlives its connections.
//!
//! Not for: what a connection may ask for.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use crate::limits;
use crate::wire::peer::{Identity, Peer};

/// The connections of every process.
#[derive(Debug)]
pub(super) struct Connections {
    /// For one process.
    max: usize,
    /// Descriptors that one process may leave unread, and be sent more.
    unread_max: usize,
    of: Mutex<HashMap<Identity, Share>>,
}

/// What one process has.
#[derive(Debug, Default)]
struct Share {
    pid: i32,
    seats: usize,
    unread: usize,
    turns: BTreeMap<Line, Arc<Semaphore>>,
}

/// What the calls of one process wait in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Line {
    /// Large messages, either way: one at a time.
    Large,
    /// Leases, with the names of their chunks: they may wait for memory, and others of the process meanwhile.
    Lease,
    /// What the services look like: a caller keeps that open and calls them.
    Description,
}

impl Line {
    /// How many of one process may be at it.
    fn width(self) -> usize {
        match self {
            Line::Large | Line::Description => 1,
            Line::Lease => limits::GRPC_CALLS_MAX,
        }
    }
}

/// The place of a connection or a session. It is free again when this goes, and so is what was counted with it.
#[derive(Debug)]
pub(super) struct Seat {
    connections: Arc<Connections>,
    identity: Identity,
    /// Descriptors that were sent on this connection and not read.
    unread: usize,
}

impl Connections {
    /// Where so many files may be open, and so many descriptors are kept for connections. Each takes two (itself, and its process), as does each session (its page, and its process), and one process
    /// at most half of them all.
    pub(super) fn new(fds: u64, open_fds_max: u64) -> Arc<Connections> {
        let share = usize::try_from(fds / 4).unwrap_or(usize::MAX);
        let unread = usize::try_from(open_fds_max / limits::UNREAD_FDS_SHARE).unwrap_or(usize::MAX);
        Arc::new(Connections {
            max: share.min(limits::PROCESS_CONNECTIONS_MAX),
            unread_max: unread.max(limits::FDS_PER_MESSAGE_MAX),
            of: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, Share>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection or session of this process, if it may have one.
    pub(super) fn enter(self: &Arc<Self>, peer: &Peer) -> Option<Seat> {
        let identity = peer.identity;
        let mut of = self.lock();
        let share = of.entry(identity).or_default();
        // Where the kernel cannot tell processes apart everybody is one.
        if share.seats >= self.max && identity != Identity::Unknown {
            tracing::debug!(?identity, max = self.max, "a process has as many connections and sessions as it may have");
            return None;
        }
        share.pid = peer.pid;
        share.seats += 1;
        Some(Seat { connections: Arc::clone(self), identity, unread: 0 })
    }

    /// The turns of a process in a line. `None` where it has no place. Where processes cannot be told apart each call has its own: one that nobody knows must not hold up all the others.
    pub(super) fn turn(&self, identity: Identity, line: Line) -> Option<Arc<Semaphore>> {
        let turns = || Arc::new(Semaphore::new(line.width()));
        if matches!(identity, Identity::Unknown | Identity::Unproven) {
            return Some(turns());
        }
        let mut of = self.lock();
        Some(Arc::clone(of.get_mut(&identity)?.turns.entry(line).or_insert_with(turns)))
    }

    /// The process that has left most descriptors unread, and how many.
    pub(super) fn most_unread(&self) -> Option<(i32, usize)> {
        let of = self.lock();
        let most = of.values().max_by_key(|share| share.unread)?;
        (most.unread > 0).then_some((most.pid, most.unread))
    }
}

impl Seat {
    /// Counts descriptors that are to be sent, if the process may be sent more: what it has not read yet is below its bound. So it is passed by less than one message.
    pub(super) fn send(&mut self, fds: usize) -> bool {
        let mut of = self.connections.lock();
        let share = of.get_mut(&self.identity).expect("who has a seat has a share");
        if share.unread >= self.connections.unread_max && self.identity != Identity::Unknown {
            return false;
        }
        share.unread += fds;
        self.unread += fds;
        true
    }

    /// Descriptors that the process has not read, as far as is known.
    pub(super) fn unread(&self) -> usize {
        self.unread
    }

    /// Whatever was sent on this connection was read, or will not be.
    pub(super) fn all_read(&mut self) {
        let unread = std::mem::take(&mut self.unread);
        if let Some(share) = self.connections.lock().get_mut(&self.identity) {
            share.unread -= unread;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut of = self.connections.lock();
        if let Some(share) = of.get_mut(&self.identity) {
            share.unread -= self.unread;
            share.seats -= 1;
            if share.seats == 0 {
                of.remove(&self.identity);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(number: u64) -> Peer {
        Peer { pidfd: None, identity: Identity::Pidfs(number), pid: number as i32, uid: 0 }
    }

    #[test]
    fn a_process_has_its_share_and_gets_it_back() {
        let connections = Connections::new(12, 1024);
        let one = process(1);
        let mut seats: Vec<_> = (0..3).map(|_| connections.enter(&one).unwrap()).collect();
        assert!(connections.enter(&one).is_none());
        assert!(connections.enter(&process(2)).is_some());
        seats.pop();
        assert!(connections.enter(&one).is_some());
        drop(seats);
        assert!(connections.lock().is_empty());
    }

    #[test]
    fn a_process_has_one_turn_and_those_whom_nobody_knows_have_one_each() {
        let connections = Connections::new(1024, 1024);
        let unknown = Peer { pidfd: None, identity: Identity::Unknown, pid: 0, uid: 0 };
        let _seats = [&process(1), &process(1), &unknown].map(|peer| connections.enter(peer).unwrap());
        let turn = |identity, line| connections.turn(identity, line).unwrap().try_acquire_owned();
        let _first = turn(Identity::Pidfs(1), Line::Large).unwrap();
        assert!(turn(Identity::Pidfs(1), Line::Large).is_err());
        assert!(turn(Identity::Pidfs(1), Line::Description).is_ok(), "of another line");
        for unknown in [Identity::Unknown, Identity::Unproven] {
            let _unknown = turn(unknown, Line::Large).unwrap();
            assert!(turn(unknown, Line::Large).is_ok());
        }
        assert!(connections.turn(Identity::Pidfs(2), Line::Large).is_none());
    }

    #[test]
    fn who_leaves_descriptors_unread_is_sent_no_more_and_the_others_are() {
        let max = limits::FDS_PER_MESSAGE_MAX;
        let connections = Connections::new(1024, 1024);
        let [mut first, mut second] = [1, 1].map(|_| connections.enter(&process(1)).unwrap());
        let mut other = connections.enter(&process(2)).unwrap();
        // On whichever of its connections.
        assert!(first.send(max - 1) && second.send(max));
        assert!(!first.send(1) && !second.send(1));
        assert_eq!(connections.most_unread(), Some((1, 2 * max - 1)));
        assert!(other.send(max));
        second.all_read();
        assert!(second.send(1) && !second.send(1));
        // A connection that goes takes along what was counted with it.
        drop(first);
        assert!(second.send(1));
        drop((second, other));
        assert!(connections.most_unread().is_none() && connections.lock().is_empty());
        // With many open files it is a small part of them.
        assert_eq!(Connections::new(1024, 1 << 20).unread_max, 1 << 14);
    }
}
