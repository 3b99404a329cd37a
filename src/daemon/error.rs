//! Why there is no daemon, or no more.

use std::path::PathBuf;

use super::config;
use super::listener::{ListenError, Ousted};
use super::plans::PlanStoreError;
use crate::driver::DriverError;
use crate::error::ErrorKind;
use crate::ids::DeviceUuid;
use crate::journal::JournalError;
use crate::keeper::KeeperError;
use crate::ladder::LadderError;
use crate::ledger::FactsError;
use crate::store::{ScrubError, StoreError};

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The runtime directory or a socket cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The driver does not answer.
    #[error("the driver failed")]
    Driver(#[from] DriverError),
    /// The devices cannot be looked at.
    #[error("cannot look at the devices")]
    Store(#[from] StoreError),
    /// There is no such device.
    #[error("there is no device {wanted}, or it is named twice; the driver has {there}")]
    NoDevice {
        /// As configured.
        wanted: config::Which,
        /// Those that there are.
        there: String,
    },
    /// New memory of the device may hold what another process wrote, and cannot be cleared.
    #[error("the driver does not promise that new memory of device {device} is cleared, and nothing else clears it")]
    Uncleared {
        /// Which device.
        device: u32,
        /// Why not.
        #[source]
        source: ScrubError,
    },
    /// Connections alone take all that may be open.
    #[error(
        "this process may have {limit} files open, and chunks need some beside the {reserve} that are kept for connections: raise the limit (LimitNOFILE, `ulimit -n`)"
    )]
    TooFewFiles {
        /// How many.
        limit: u64,
        /// How many are kept.
        reserve: u64,
    },
    /// The devices' granularity is no size that a chunk can have.
    #[error("chunks must be multiples of the devices' granularity")]
    Ladder(#[from] LadderError),
    /// A keeper is there, and cannot be asked for what it holds.
    #[error(
        "the keeper that is there cannot be used, and what it holds is worth more than a start: start again when it can be, or end the process that listens at keeper.sock to go on without: then only what processes have mapped is left"
    )]
    Keeper(#[source] KeeperError),
    /// It is somewhere else.
    #[error(
        "the keeper (pid {pid}) of a daemon before is in {there}, and processes that are there need what it holds ({processes}): start with --state-dir {there}, and not {state_dir}, as long as they run, or end them before"
    )]
    Elsewhere {
        /// Of the keeper.
        pid: u32,
        /// Where it is.
        there: PathBuf,
        /// Where it is looked for.
        state_dir: PathBuf,
        /// Whose sessions it knows.
        processes: usize,
    },
    /// The journal that the daemon before has left cannot be gone on with.
    #[error("cannot take over from the daemon before")]
    Journal(#[from] JournalError),
    /// What it has left cannot be.
    #[error("cannot take over from the daemon before")]
    Follow(#[source] FactsError),
    /// The stored plans cannot be read.
    #[error("cannot use the directory of plans")]
    Plans(#[from] PlanStoreError),
    /// The chunk socket has no thread.
    #[error("cannot start a thread for the chunk socket")]
    Thread(#[source] std::io::Error),
    /// The server ended by itself.
    #[error("the gRPC server failed")]
    Server(#[from] tonic::transport::Error),
    /// The directory is not this daemon's any more.
    #[error(transparent)]
    Ousted(Ousted),
    /// A service manager is to be the keeper, and there is none.
    #[error(
        "keeper = \"systemd\": NOTIFY_SOCKET is not set, as no service manager has started this process (Type=notify); keeper = \"process\" needs none"
    )]
    NoManager,
    /// It would be lost, and handed out again by the next.
    #[error(
        "a daemon before has leased memory of device {device} ({uuid}) to processes that live ({sessions}), and this one is configured to have other devices: start it with that device, or end the processes before (`stitchd sessions` of a daemon that has it says which)"
    )]
    LeftOut {
        /// The driver's number of it.
        device: u32,
        /// Its name.
        uuid: DeviceUuid,
        /// How many.
        sessions: usize,
    },
    /// The same, where no process can be followed at all.
    #[error(
        "the keeper (pid {pid}) in {state_dir} has what processes that live have leased ({processes}), of another driver than '{driver}', whose memory is for one process: start with the driver of before, end the processes, or use another --runtime-dir"
    )]
    OtherDriver {
        /// Of the keeper.
        pid: u32,
        /// Where it is.
        state_dir: PathBuf,
        /// How many.
        processes: usize,
        /// As configured.
        driver: &'static str,
    },
}

impl DaemonError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            DaemonError::Listen(error) => error.kind(),
            DaemonError::Driver(error) => error.kind(),
            DaemonError::Store(error) => error.kind(),
            DaemonError::NoDevice { .. } => ErrorKind::NotFound,
            DaemonError::Uncleared { .. } => ErrorKind::Broken,
            DaemonError::TooFewFiles { .. } => ErrorKind::Invalid,
            DaemonError::Ladder(_) => ErrorKind::Unsupported,
            DaemonError::Keeper(error) => error.kind(),
            DaemonError::Elsewhere { .. } => ErrorKind::Conflict,
            DaemonError::Journal(error) => error.kind(),
            DaemonError::Follow(_) => ErrorKind::Broken,
            DaemonError::Plans(_) => ErrorKind::Invalid,
            DaemonError::Thread(_) => ErrorKind::Exhausted,
            DaemonError::Server(_) => ErrorKind::Broken,
            DaemonError::Ousted(_) | DaemonError::LeftOut { .. } | DaemonError::OtherDriver { .. } => {
                ErrorKind::Conflict
            }
            DaemonError::NoManager => ErrorKind::Invalid,
        }
    }
}
