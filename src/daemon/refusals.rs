//! What the daemon has refused because it was not for whoever asked: counted by reason, and in the log (target `audit`) with who asked.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::wire::peer::Peer;

/// Why something was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// A session's number without its secret, or from another process.
    Secret,
    /// A ticket that is unknown, used before, too old, or another process's.
    Ticket,
    /// A message that no client of ours sends.
    Protocol,
    /// A shared range that is another's, has another key, or is not there.
    Range,
    /// A command for those who run the daemon.
    Admin,
    /// One connection more than a process may have, or than there can be.
    Connections,
}

impl Refused {
    /// All of them with their names in metrics, in the order of their numbers.
    const ALL: [(&'static str, Refused); 6] = [
        ("secret", Refused::Secret),
        ("ticket", Refused::Ticket),
        ("protocol", Refused::Protocol),
        ("range", Refused::Range),
        ("admin", Refused::Admin),
        ("connections", Refused::Connections),
    ];
}

/// How often what was refused.
#[derive(Debug, Default)]
pub(super) struct Refusals([AtomicU64; Refused::ALL.len()]);

impl Refusals {
    /// Counts a refusal and writes down who asked. What is in the log of one that asks in a loop is for whoever reads it to bound.
    pub(super) fn note(&self, why: Refused, peer: &Peer, what: &str) {
        self.count(why);
        tracing::info!(target: "audit", reason = Refused::ALL[why as usize].0, uid = peer.uid, pid = peer.pid, what, "refused");
    }

    /// Counts a refusal without a word: of connections there can be thousands in a second.
    pub(super) fn count(&self, why: Refused) {
        self.0[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often each has been, by name.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Refused::ALL.iter().map(|(name, why)| (*name, self.0[*why as usize].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::peer::Identity;

    #[test]
    fn every_reason_is_counted_under_its_own_name() {
        let refusals = Refusals::default();
        let peer = Peer { pidfd: None, identity: Identity::Pidfs(7), pid: 7, uid: 0 };
        for (times, (_, why)) in Refused::ALL.iter().enumerate() {
            (0..times).for_each(|_| refusals.note(*why, &peer, "a test"));
        }
        let counted: Vec<_> = refusals.counts().collect();
        let expected: Vec<_> =
            Refused::ALL.iter().enumerate().map(|(times, (name, _))| (*name, times as u64)).collect();
        assert_eq!(counted, expected);
    }
}
