//! Sessions that are there again, with what they say that they hold: what the ledger makes of it.
//!
//! What a session does not name is released: it was on its way to it, or on its way back. What it names and nobody here knows of is registered, as far as its terms and the device reach; what cannot be is not counted.
//!
//! Not for: who may say so, and how it is said (`daemon/reattach.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Steward, Todo};
use crate::error::chain;
use crate::ids::{ChunkId, DeviceId, RangeId, SessionId};
use crate::ledger::{Command, LedgerError};
use crate::mortal::moment;
use crate::store::StoreError;
use crate::units::Bytes;

/// What a session says that it holds: all of it.
#[derive(Clone, Default, Debug)]
pub struct Told {
    /// Chunks that its process has mapped, by the name that it last heard. Nowhere, where their device is none of these.
    pub chunks: Vec<(Option<DeviceId>, ChunkId, Bytes)>,
    /// How often it holds each shared range.
    pub ranges: BTreeMap<RangeId, u32>,
}

/// What it is told.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Again {
    /// Chunks that are registered: their name, and the one from here on.
    pub renamed: Vec<(ChunkId, ChunkId)>,
    /// What it has mapped and is not counted as its own.
    pub uncounted: Vec<ChunkId>,
    /// It does not hold these.
    pub unknown_ranges: Vec<RangeId>,
}

/// Why something is not registered.
#[derive(Debug, thiserror::Error)]
enum RegisterError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Steward {
    /// The session's connection is there again, and this is all that its process has. Nothing is registered unless it `may_register`: whoever has leased something from here has nothing that nobody knows of.
    ///
    /// # Errors
    ///
    /// There is no such session.
    pub fn reattach(
        self: &Arc<Self>,
        session: SessionId,
        told: &Told,
        may_register: bool,
    ) -> Result<Again, LedgerError> {
        let mut todo = Todo::default();
        let leased: BTreeSet<ChunkId> = {
            let mut core = self.lock();
            core.step(Command::Reattach { session }, &mut todo)?;
            let leased: BTreeSet<ChunkId> = core.ledger.leased_by(session).into_iter().collect();
            // Numbers begin anew where both journal and keeper were lost: a chunk of another size is another chunk.
            let is_this = |chunk: &ChunkId, len: &Bytes| {
                leased.contains(chunk) && self.store.len_of(*chunk).map_or(true, |known| known == *len)
            };
            let named: BTreeSet<ChunkId> =
                told.chunks.iter().filter(|(_, chunk, len)| is_this(chunk, len)).map(|(_, chunk, _)| *chunk).collect();
            let chunks: Vec<ChunkId> = leased.difference(&named).copied().collect();
            core.step(Command::Release { session, chunks }, &mut todo)?;
            named
        };
        self.follow(todo);
        moment();
        let mut again = Again::default();
        for (device, chunk, len) in told.chunks.iter().filter(|(_, chunk, _)| !leased.contains(chunk)) {
            let registered = match device.filter(|_| may_register) {
                Some(device) => self.register(session, device, *len).map_err(Some),
                None => Err(None),
            };
            match registered {
                Ok(now) => again.renamed.push((*chunk, now)),
                Err(error) => {
                    if let Some(error) = error {
                        tracing::debug!(%session, %chunk, error = %chain(&error), "a session has memory mapped that cannot be its own");
                    }
                    again.uncounted.push(*chunk);
                }
            }
        }
        again.unknown_ranges = self.leave_others(session, &told.ranges);
        moment();
        Ok(again)
    }

    /// A session has mapped memory that nobody here knows of: from here on it is a chunk that it has leased, of this name, and of which only it has a descriptor or a handle.
    fn register(self: &Arc<Self>, session: SessionId, device: DeviceId, len: Bytes) -> Result<ChunkId, RegisterError> {
        let mut todo = Todo::default();
        let mut core = self.lock();
        core.step(Command::Register { session, device, len }, &mut todo)?;
        let (chunk, len) = todo.registered.take().expect("what is registered has a name");
        // With the lock: nobody is to be told to destroy it before it is there.
        self.store.adopt(chunk, device, len, None)?;
        Ok(chunk)
    }

    /// A session holds these ranges, so often, and holds no other any more. Says which it does not hold at all.
    fn leave_others(self: &Arc<Self>, session: SessionId, told: &BTreeMap<RangeId, u32>) -> Vec<RangeId> {
        let known = self.holds_of(session);
        for (range, times) in &known {
            let told = told.get(range).copied().unwrap_or(0);
            for _ in told..*times {
                // It may have gone meanwhile.
                let _ = self.leave(session, *range);
            }
            // An older journal, whose witness has gone with the keeper, knows of fewer.
            for _ in *times..told {
                if self.attach(session, *range).is_err() {
                    break;
                }
            }
        }
        let is_known = |range: &RangeId| known.iter().any(|(of, _)| of == range);
        told.keys().filter(|range| !is_known(range)).copied().collect()
    }
}
