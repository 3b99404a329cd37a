//! Ownership of driver things: a [`Chunk`] owns a handle, a [`Reservation`] owns addresses, a [`Mapping`] owns what it shows and where. Each
//! lets go of exactly that when it is dropped, in the right order by construction.
//!
//! Multi-step actions happen here, whole or not at all: when step k fails, steps k−1 … 1 are undone.
//!
//! Not for: policy. Who gets which chunk is decided in [`crate::pool`] and by the daemon.
//!
//! Invariant: what cannot be let go of is quarantined: counted, kept, and never used again.

mod chunk;
mod device;
mod mapping;
mod reservation;

pub use chunk::Chunk;
pub use device::{Device, Quarantine};
pub use mapping::Mapping;
pub use reservation::Reservation;

use crate::driver::{Cause, DriverError};
use crate::error::ErrorKind;
use crate::units::Bytes;

/// Why an action on memory did not happen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A driver call failed; everything done before it was undone.
    #[error("cannot {action} {len}")]
    Driver {
        /// What was being done.
        action: &'static str,
        /// To how many bytes.
        len: Bytes,
        /// The call that failed.
        #[source]
        source: DriverError,
    },
    /// The chunks together are larger than any address space, or there are none.
    #[error("chunks of {0} in all cannot be stitched into one range")]
    Unstitchable(Bytes),
}

impl MemoryError {
    fn of(action: &'static str, len: Bytes) -> impl FnOnce(DriverError) -> MemoryError {
        move |source| MemoryError::Driver { action, len, source }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            MemoryError::Driver { source, .. } => source.kind(),
            MemoryError::Unstitchable(_) => ErrorKind::Invalid,
        }
    }

    /// The driver's reason, where it was a driver call that failed.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            MemoryError::Driver { source, .. } => Some(&source.cause),
            MemoryError::Unstitchable(_) => None,
        }
    }
}

#[cfg(test)]
mod tests;
