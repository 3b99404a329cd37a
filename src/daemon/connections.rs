//! How many connections and sessions each process has. Without a limit one process could take every descriptor that the daemon keeps for them, and nobody else could connect. A session counts
//! by itself, because it outlives its connections.
//!
//! Not for: what a connection may ask for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits;
use crate::wire::peer::Identity;

/// The connections of every process.
#[derive(Debug)]
pub(super) struct Connections {
    /// For one process.
    max: usize,
    of: Mutex<HashMap<Identity, usize>>,
}

/// The place of a connection or a session. It is free again when this goes.
#[derive(Debug)]
pub(super) struct Seat {
    connections: Arc<Connections>,
    identity: Identity,
}

impl Connections {
    /// Where so many descriptors are kept. Each connection takes two (itself, and its process), as does each session (its page, and its process), and one process at most half of them all.
    pub(super) fn new(fds: u64) -> Arc<Connections> {
        let share = usize::try_from(fds / 4).unwrap_or(usize::MAX);
        Arc::new(Connections { max: share.min(limits::PROCESS_CONNECTIONS_MAX), of: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, usize>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection or session of this process, if it may have one.
    pub(super) fn enter(self: &Arc<Self>, identity: Identity) -> Option<Seat> {
        let mut of = self.lock();
        let count = of.entry(identity).or_default();
        // Where the kernel cannot tell processes apart everybody is one.
        if *count >= self.max && identity != Identity::Unknown {
            tracing::debug!(?identity, max = self.max, "a process has as many connections and sessions as it may have");
            return None;
        }
        *count += 1;
        Some(Seat { connections: Arc::clone(self), identity })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut of = self.connections.lock();
        if let Some(count) = of.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                of.remove(&self.identity);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_its_share_and_gets_it_back() {
        let connections = Connections::new(12);
        let one = Identity::Pidfs(1);
        let mut seats: Vec<_> = (0..3).map(|_| connections.enter(one).unwrap()).collect();
        assert!(connections.enter(one).is_none());
        assert!(connections.enter(Identity::Pidfs(2)).is_some());
        seats.pop();
        assert!(connections.enter(one).is_some());
        drop(seats);
        assert!(connections.lock().is_empty());
    }
}
