//! The heap of a daemon's process, in one piece: what one thread takes for a moment (a page of metrics has megabytes) another takes again after it, where glibc gives every thread a heap of its own,
//! which keeps it. With a thousand sessions that are read now and then it is 20 MB less. Threads that allocate at the same time wait for each other for some nanoseconds.

#![expect(unsafe_code, reason = "mallopt is a function of C")]

/// For the whole process, before it has threads.
pub fn in_one_piece() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes two numbers and touches nothing that is allocated; an allocator that does not know the first says so.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
