//! Counts the bytes that a thread allocates, so that a test can hold a reader to what its input is worth.

#![expect(unsafe_code, reason = "an allocator is asked for and given raw memory")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, and a count for each thread.
pub(crate) struct Counting;

impl Counting {
    /// Bytes that this thread has allocated and not given back.
    pub(crate) fn now() -> isize {
        NOW.get()
    }
}

fn note(bytes: isize) {
    // At the very end of a thread nobody asks any more.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call goes to the system's allocator as it came, and its answer back; the counts allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: the caller's promise that `ptr` came from here with `layout`, so from the system, is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there at once.
        note(size as isize);
        note(-(layout.size() as isize));
        // SAFETY: the caller's promises about all three are passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Runs `what`, and says how many bytes more than before this thread had at one time.
pub(crate) fn peak_of<T>(what: impl FnOnce() -> T) -> (T, usize) {
    let before = Counting::now();
    PEAK.set(before);
    let done = what();
    (done, (PEAK.get() - before).max(0) as usize)
}
