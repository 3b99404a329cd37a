//! Why a runtime does not do what it is asked for.

use super::SourceError;
use crate::error::ErrorKind;
use crate::memory::MemoryError;
use crate::pool::planned::InstallError;
use crate::units::{Bytes, DeviceAddress};

/// Why a request was not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// There is no memory left, anywhere.
    #[error(
        "out of memory: {requested} asked for; this process holds {held} of which {live} are live, and {stitchable} idle could be stitched ({parked} idle in all, {contiguous} in one piece{})",
        plan_words(*of_plan)
    )]
    OutOfMemory {
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes that this process holds.
        held: Bytes,
        /// Bytes of live allocations.
        live: Bytes,
        /// Idle bytes that can be put together elsewhere: whole chunks.
        stitchable: Bytes,
        /// All idle bytes outside of a static pool, those between live ones among them.
        parked: Bytes,
        /// The longest idle stretch.
        contiguous: Bytes,
        /// Of its plan, if it has one.
        of_plan: Option<OutOfPlan>,
        /// Why there is no more.
        #[source]
        source: SourceError,
    },
    /// Its memory is asleep.
    #[error("cannot serve {requested}: this memory is asleep, and is to be woken first")]
    Asleep {
        /// Bytes asked for.
        requested: Bytes,
    },
    /// More than any device has.
    #[error("{requested} are more than any device has")]
    TooLarge {
        /// Bytes asked for.
        requested: Bytes,
    },
    /// Memory was there and could not be mapped.
    #[error("cannot serve {requested}")]
    Memory {
        /// Bytes asked for.
        requested: Bytes,
        /// What failed.
        #[source]
        source: MemoryError,
    },
}

/// What a job has of its plan that runs out of memory all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfPlan {
    /// Idle bytes of the static pool: where the plan has requests that are not live, and where it has none.
    pub idle: Bytes,
    /// How often the job has left the plan, and those before it.
    pub deviations: u64,
}

fn plan_words(of_plan: Option<OutOfPlan>) -> String {
    let words = |OutOfPlan { idle, deviations }| {
        format!("; {} from its plan, in whose pool {idle} are idle", crate::units::counted(deviations, "deviation"))
    };
    of_plan.map_or_else(String::new, words)
}

impl AllocError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            AllocError::OutOfMemory { source, .. } => source.kind,
            AllocError::TooLarge { .. } => ErrorKind::Invalid,
            AllocError::Asleep { .. } => ErrorKind::Conflict,
            AllocError::Memory { source, .. } => source.kind(),
        }
    }

    /// Memory has run out, or there is not as much in the world: a smaller request may be served.
    pub fn is_lack(&self) -> bool {
        matches!(self, AllocError::TooLarge { .. }) || self.kind().is_lack()
    }
}

/// An address that is not a live allocation of this runtime: freed before, or never its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a live allocation")]
pub struct NotLive(pub DeviceAddress);

/// Why a plan was not installed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanInstallError {
    /// There is one already.
    #[error("a plan is installed already")]
    Installed,
    /// The static pool could not be had.
    #[error("cannot get the {len} of the static pool")]
    Source {
        /// Bytes of it.
        len: Bytes,
        /// Why.
        #[source]
        source: SourceError,
    },
    /// The static pool could not be mapped.
    #[error("cannot map the static pool")]
    Memory(#[from] MemoryError),
    /// The plan cannot be served.
    #[error("the plan cannot be served")]
    Pool(#[from] InstallError),
    /// There is no range of addresses for it.
    #[error("no addresses for the {0} of the plan's pool")]
    NoAddresses(Bytes),
}

impl PlanInstallError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PlanInstallError::Installed => ErrorKind::Conflict,
            PlanInstallError::Source { source, .. } => source.kind,
            PlanInstallError::Memory(error) => error.kind(),
            PlanInstallError::Pool(_) => ErrorKind::Invalid,
            PlanInstallError::NoAddresses(_) => ErrorKind::Exhausted,
        }
    }
}
