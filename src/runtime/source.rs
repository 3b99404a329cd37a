//! Where a runtime gets its chunks: from the daemon, or from a store of its own.

use std::sync::Arc;
use std::time::Duration;

use crate::error::ErrorKind;
use crate::ids::PlanId;
use crate::ladder::Shape;
use crate::memory::Chunk;
use crate::units::Bytes;

/// Gives chunks and takes them back. Shared between threads.
pub trait ChunkSource: Send + Sync + std::fmt::Debug {
    /// Chunks that hold at least `want.len`: all of them, or none and why. Blocks for at most `want.wait` and a round trip.
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError>;

    /// Takes chunks back that nothing maps any more. Never fails as seen from here: what cannot be given back counts as held until the process ends.
    fn release(&self, chunks: Vec<Arc<Chunk>>);

    /// Puts the memory of all chunks that were acquired and not released down: they keep their handles, and their mappings their addresses, and nothing is behind. On error nothing has changed. Says how many bytes that was.
    fn sleep(&self) -> Result<Bytes, SourceError> {
        Err(SourceError {
            kind: ErrorKind::Unsupported,
            message: "only memory of a daemon can be put to sleep".to_owned(),
        })
    }

    /// Gets memory for all chunks that sleep, or for none: other memory than before. Blocks for at most `wait` and some round trips. Says how many bytes that was.
    fn wake(&self, _wait: Duration) -> Result<Bytes, SourceError> {
        Err(SourceError { kind: ErrorKind::Unsupported, message: "only memory of a daemon can be woken".to_owned() })
    }

    /// How much memory there is for this process. May take a round trip.
    fn room(&self) -> Result<Room, SourceError> {
        Err(SourceError { kind: ErrorKind::Unsupported, message: "nobody tells how much memory there is".to_owned() })
    }
}

/// How much memory there is for a process on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// The most that it may hold.
    pub most: Bytes,
    /// What it could get beside what it holds.
    pub free: Bytes,
}

/// What a runtime wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Want {
    /// Bytes.
    pub len: Bytes,
    /// In which chunks.
    pub shape: Shape,
    /// The plan whose reserved chunks may be used for it.
    pub plan: Option<PlanId>,
    /// How long others may be waited for.
    pub wait: Duration,
}

/// Why there are no chunks. The reason comes from another process, in its words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SourceError {
    /// What a caller can do about it.
    pub kind: ErrorKind,
    /// The reason, with numbers.
    pub message: String,
}
