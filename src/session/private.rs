//! A process that is its own daemon: chunks come from a store in the process, and nobody else can have them.
//!
//! For machines where no daemon runs, when the user has allowed that, and for tests and benches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, DeviceId};
use crate::ladder::Ladder;
use crate::memory::Chunk;
use crate::runtime::{ChunkSource, SourceError, Want};
use crate::store::Store;

/// The store of this process as a source of chunks for one device.
#[derive(Debug)]
pub struct PrivateSource {
    store: Arc<Store>,
    device: DeviceId,
    ladder: Ladder,
    next: AtomicU64,
}

impl PrivateSource {
    /// Takes chunks of `ladder` on `device` from `store`.
    pub fn new(store: Arc<Store>, device: DeviceId, ladder: Ladder) -> PrivateSource {
        PrivateSource { store, device, ladder, next: AtomicU64::new(1) }
    }

    fn create(&self, want: Want) -> Result<Vec<ChunkId>, SourceError> {
        let too_large = || SourceError {
            kind: ErrorKind::Invalid,
            message: format!("{} are more than one lease can be", want.len),
        };
        let parts = self.ladder.cover(want.len, want.shape).ok_or_else(too_large)?;
        // What the driver did not take back it may take now, before there is more of it.
        self.store.destroy_kept(self.device);
        let mut ids = Vec::new();
        for part in parts {
            for _ in 0..part.count {
                let id = ChunkId(self.next.fetch_add(1, Ordering::Relaxed));
                if let Err(error) = self.store.create(id, self.device, part.len) {
                    self.destroy(ids);
                    return Err(SourceError { kind: error.kind(), message: chain(&error) });
                }
                ids.push(id);
            }
        }
        Ok(ids)
    }

    fn destroy(&self, ids: Vec<ChunkId>) {
        for id in ids {
            if let Err(error) = self.store.destroy(id) {
                tracing::warn!(%id, error = %chain(&error), "a chunk cannot be given back yet");
                self.store.settle(id);
            }
        }
    }
}

impl ChunkSource for PrivateSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let ids = self.create(want)?;
        let chunk = |id: &ChunkId| self.store.chunk(*id).expect("it was just created");
        Ok(ids.iter().map(chunk).collect())
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let ids = chunks.iter().map(|chunk| chunk.id()).collect();
        drop(chunks);
        self.destroy(ids);
    }
}
