//! Who holds it: a process, or the service manager.

use std::os::fd::BorrowedFd;

use crate::keeper::manager::Manager;
use crate::keeper::{KeeperError, Key, Link};

/// The number that a service manager's process has, or may as well.
const MANAGER: u32 = 1;

/// Who holds it.
#[derive(Debug)]
pub(super) enum Holder {
    /// A process of ours.
    Process(Link),
    /// Who has started this one.
    Manager(Manager),
}

impl Holder {
    pub(super) fn keep(&self, fds: &[(Key, BorrowedFd<'_>)]) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.keep(fds),
            Holder::Manager(manager) => manager.keep(fds),
        }
    }

    pub(super) fn let_go(&self, keys: &[Key]) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.let_go(keys),
            Holder::Manager(manager) => manager.let_go(keys),
        }
    }

    /// The names of everything that it holds, where it can be asked.
    pub(super) fn names(&self) -> Result<Vec<Key>, KeeperError> {
        match self {
            Holder::Process(link) => link.names(),
            Holder::Manager(_) => Ok(Vec::new()),
        }
    }

    /// Where it listens as long as it is not the one that is found.
    pub(super) fn name(&self) -> Option<String> {
        match self {
            Holder::Process(link) => Some(link.name().to_owned()),
            Holder::Manager(_) => None,
        }
    }

    /// Returns when it holds what it was told to.
    pub(super) fn settle(&self) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.settle(),
            Holder::Manager(_) => Ok(()),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        match self {
            Holder::Process(link) => link.pid(),
            Holder::Manager(_) => MANAGER,
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Holder::Process(link) if link.is_gone())
    }

    pub(super) fn is_behind(&self) -> bool {
        matches!(self, Holder::Process(link) if link.is_behind())
    }

    pub(super) fn last_words(&self) -> Option<String> {
        match self {
            Holder::Process(link) => link.last_words(),
            Holder::Manager(_) => None,
        }
    }

    /// Whether it may have as many files open as this process, where that is to be asked.
    pub(super) fn check_files(&self) -> Result<(), KeeperError> {
        match self {
            Holder::Process(link) => link.check_files(),
            Holder::Manager(_) => Ok(()),
        }
    }

    /// Somebody else has started it, and ends it.
    pub(super) fn stays(&self) -> bool {
        match self {
            Holder::Process(link) => link.stays(),
            Holder::Manager(_) => true,
        }
    }

    /// Nobody needs it: one that was started for this ends.
    pub(super) fn discard(self) {
        if let Holder::Process(link) = self {
            link.discard();
        }
    }
}
