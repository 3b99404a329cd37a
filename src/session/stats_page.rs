//! Maps the session's stats page and lets a runtime count in it.

#![expect(unsafe_code, reason = "maps shared memory and counts in it")]

use std::os::fd::{AsFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use crate::limits::COUNTERS_MAX;
use crate::runtime::Counters;
use crate::sync::atomic::AtomicU64;
use crate::wire::stats_page::{COUNTERS_AT, LEN, StatsPageError, check};

/// Maps the page behind `fd`. It stays mapped as long as the process lives: a page per session, so that no thread can ever count into nothing.
pub(super) fn map(fd: &OwnedFd) -> Result<Counters, StatsPageError> {
    assert_eq!(size_of::<AtomicU64>(), size_of::<u64>(), "a model's cells are no memory to share");
    check(fd.as_fd())?;
    // SAFETY: without MAP_FIXED mmap disturbs nothing that exists.
    let page = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
    }
    .map_err(StatsPageError::System)?;
    // SAFETY: the mapping is LEN bytes long, and the counters begin inside it (asserted where the layout is).
    let counters = unsafe { page.cast::<u8>().add(COUNTERS_AT) };
    let cells = counters.cast::<[AtomicU64; COUNTERS_MAX]>();
    // SAFETY:
    // * the memory is mapped for reads and writes, page-aligned plus 64, so aligned for u64, and long enough (asserted where the layout is);
    // * it is never unmapped, and the file is sealed against shrinking (checked above), so the reference is good for ever;
    // * it is only ever touched through atomics here; the daemon reads it with pread, and whatever else it did could only change numbers.
    let cells = unsafe { &*cells };
    Ok(Counters::at(cells))
}
