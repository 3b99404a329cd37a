//! Maps the session's stats page and lets its runtimes count in it.

#![expect(unsafe_code, reason = "maps shared memory and counts in it")]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

use crate::limits::COUNTERS_MAX;
use crate::runtime::Counters;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::wire::stats_page::{COUNTERS_AT, DEVICES_AT, LEN, SET_LEN, SETS, StatsPageError, check};

/// The page, as long as the process lives: a page per session, so that no thread can ever count into nothing.
#[derive(Debug)]
pub(super) struct Page {
    sets: [Counters; SETS],
    devices: &'static [AtomicU32; SETS],
    /// Which sets runtimes have: each has one writer.
    taken: Mutex<[bool; SETS]>,
}

/// Maps the page behind `fd`.
pub(super) fn map(fd: &OwnedFd) -> Result<Page, StatsPageError> {
    let sizes = (size_of::<AtomicU64>(), size_of::<AtomicU32>());
    assert_eq!(sizes, (size_of::<u64>(), size_of::<u32>()), "a model's cells are no memory to share");
    check(fd.as_fd())?;
    // SAFETY: without MAP_FIXED mmap disturbs nothing that exists.
    let page = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
    }
    .map_err(StatsPageError::System)?
    .cast::<u8>();
    let set = |number: usize| {
        // SAFETY: the mapping is LEN bytes long, and every set lies inside it (asserted where the layout is).
        let counters = unsafe { page.add(COUNTERS_AT + number * SET_LEN) };
        let cells = counters.cast::<[AtomicU64; COUNTERS_MAX]>();
        // SAFETY:
        // * the memory is mapped for reads and writes, page-aligned plus a multiple of 64, so aligned for u64, and long enough (asserted where the layout is);
        // * it is never unmapped, and the file is sealed against shrinking (checked above), so the reference is good for ever;
        // * it is only ever touched through atomics here; the daemon reads it with pread, and whatever else it did could only change numbers.
        Counters::at(unsafe { &*cells })
    };
    let sets = std::array::from_fn(set);
    // SAFETY: as above; the devices lie in front of the sets (asserted where the layout is).
    let devices = unsafe { page.add(DEVICES_AT) }.cast::<[AtomicU32; SETS]>();
    // SAFETY: as above, at a multiple of 8.
    let devices = unsafe { &*devices };
    Ok(Page { sets, devices, taken: Mutex::new([false; SETS]) })
}

impl Page {
    /// The first set, where what is the session's own is counted, too.
    pub(super) fn first(&self) -> Counters {
        self.sets[0]
    }

    /// A set that nobody has, for a runtime of this device of the daemon's; nothing where all are taken.
    pub(super) fn take(&self, device: u32) -> Option<(usize, Counters)> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let number = taken.iter().position(|taken| !taken)?;
        taken[number] = true;
        self.devices[number].store(device.saturating_add(1), Ordering::Relaxed);
        Some((number, self.sets[number]))
    }

    /// Its runtime is gone.
    pub(super) fn give_back(&self, number: usize) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)[number] = false;
    }
}
