//! The layout of a stats page: a sealed memfd of 4 KiB that the daemon makes and a session writes its counters to.
//!
//! ```text
//!   0   "STITCHD\0"      8 bytes
//!   8   version          u32
//!   12  counters         u32, how many numbers there are room for
//!   16  session          u64
//!   24  devices          u32 each, of which device a set is: its ordinal at the daemon and 1; 0 where the client does not say
//!   64  sets             512 bytes each: counters, u64 each, by their place in runtime::Counter
//! ```
//!
//! A runtime has a set of its own: a process has one for each device, and one for each tag and device. Who comes where all are taken is in none.
//!
//! Numbers are in the machine's byte order: the page never leaves it. Each counter is written by one thread at a time, the runtime's, and read by the daemon
//! whenever it likes; a value is whole, the page as a whole is of no one moment. Nothing is accounted by it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::STATS_PAGE_VERSION;
use crate::ids::SessionId;
use crate::limits::COUNTERS_MAX;

/// Bytes of it: a page of most machines, and the first part of one where pages are larger (64 KiB on some aarch64): a mapping begins and ends at pages of the machine, whatever length it is asked
/// for, and the rest of the last one reads as zero. Whoever maps it keeps within these.
pub const LEN: usize = 4096;
/// Where the counters begin.
pub const COUNTERS_AT: usize = 64;

/// Bytes of one set of them.
pub const SET_LEN: usize = COUNTERS_MAX * size_of::<u64>();
/// How many sets there are.
pub const SETS: usize = (LEN - COUNTERS_AT) / SET_LEN;
/// Where it is said of which device each is.
pub const DEVICES_AT: usize = 24;

const MAGIC: &[u8; 8] = b"STITCHD\0";
const _: () = assert!(COUNTERS_AT + SETS * SET_LEN <= LEN && SETS > 0);
const _: () = assert!(DEVICES_AT + SETS * size_of::<u32>() <= COUNTERS_AT);

/// What one runtime of a session counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Set {
    /// The daemon's ordinal of its device, as far as the client says.
    pub device: Option<u32>,
    /// By their place in `runtime::Counter`.
    pub counters: [u64; COUNTERS_MAX],
}

/// Why a descriptor is not a stats page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatsPageError {
    /// It could be resized under whoever maps it.
    #[error("the stats page is not sealed, or not {LEN} bytes long")]
    Unsealed,
    /// It has another layout.
    #[error("the stats page is of version {found}, and this build knows {STATS_PAGE_VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// It is something else.
    #[error("the descriptor is not a stats page")]
    NotAPage,
    /// The operating system refused.
    #[error("cannot make, map or read a stats page")]
    System(#[source] Errno),
}

/// Makes a page for a session: nobody can resize it.
pub fn create(session: SessionId) -> Result<OwnedFd, StatsPageError> {
    let fd = rustix::fs::memfd_create("stitchd-stats", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(StatsPageError::System)?;
    rustix::fs::ftruncate(&fd, LEN as u64).map_err(StatsPageError::System)?;
    let mut header = [0; COUNTERS_AT];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&STATS_PAGE_VERSION.to_ne_bytes());
    header[12..16].copy_from_slice(&(COUNTERS_MAX as u32).to_ne_bytes());
    header[16..24].copy_from_slice(&session.0.to_ne_bytes());
    rustix::io::pwrite(&fd, &header, 0).map_err(StatsPageError::System)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(StatsPageError::System)?;
    Ok(fd)
}

/// `fd` is a page that can be mapped and written without fear.
pub fn check(fd: BorrowedFd<'_>) -> Result<(), StatsPageError> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| StatsPageError::NotAPage)?;
    let len = rustix::fs::fstat(fd).map_err(StatsPageError::System)?.st_size;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) || len != LEN as i64 {
        return Err(StatsPageError::Unsealed);
    }
    let mut header = [0; COUNTERS_AT];
    let read = rustix::io::pread(fd, &mut header, 0).map_err(StatsPageError::System)?;
    if read != COUNTERS_AT || &header[..8] != MAGIC {
        return Err(StatsPageError::NotAPage);
    }
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if word(8) != STATS_PAGE_VERSION || word(12) as usize != COUNTERS_MAX {
        return Err(StatsPageError::Version { found: word(8) });
    }
    Ok(())
}

/// Nobody counts as far, in bytes or in anything else: 64 PiB.
pub const COUNTED_MAX: u64 = 1 << 56;

/// The sets in a page that this process made. A session may write anything there: the numbers are its own word, and what no process can have counted is 0,
/// so that sums of them, which outlive the session, are never spoilt.
pub fn read(page: &OwnedFd) -> Result<[Set; SETS], StatsPageError> {
    let mut bytes = [0; LEN];
    rustix::io::pread(page.as_fd(), &mut bytes, 0).map_err(StatsPageError::System)?;
    let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut sets = [Set { device: None, counters: [0; COUNTERS_MAX] }; SETS];
    for (number, set) in sets.iter_mut().enumerate() {
        set.device = word(DEVICES_AT + number * size_of::<u32>()).checked_sub(1);
        let at = COUNTERS_AT + number * SET_LEN;
        for (counter, word) in set.counters.iter_mut().zip(bytes[at..at + SET_LEN].as_chunks::<8>().0) {
            let said = u64::from_ne_bytes(*word);
            *counter = if said <= COUNTED_MAX { said } else { 0 };
        }
    }
    Ok(sets)
}
