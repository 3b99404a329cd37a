//! The heap of a daemon's process, in one piece: what one thread takes for a moment (a page of metrics has megabytes) another takes again after it, where glibc gives every thread a heap of its own,
//! which keeps it. With a thousand sessions that are read now and then it is 20 MB less. Threads that allocate at the same time wait for each other for some nanoseconds.

#![expect(unsafe_code, reason = "mallopt is a function of C")]

/// What is larger has pages of its own, and gives them back: a page for people or for Prometheus, in one piece. glibc would take each that is given back for a sign that it comes again, and keep it.
#[cfg(target_env = "gnu")]
const LARGE: i32 = 128 * 1024;

/// For the whole process, before it has threads.
pub fn in_one_piece() {
    #[cfg(target_env = "gnu")]
    for (what, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)] {
        // SAFETY: it takes two numbers and touches nothing that is allocated; an allocator that does not know the first says so.
        unsafe {
            libc::mallopt(what, value);
        }
    }
}
