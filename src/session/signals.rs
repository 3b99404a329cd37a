//! Threads of the library take no signal of the program that it is loaded into: they begin with all of
//! them blocked, and the program's own threads are left to hear them, wherever it waits for them.
//!
//! Not for: signals that a thread raises itself by what it does wrong (SIGSEGV and its like): blocked they
//! would end the process, and no handler of it would hear.

#![expect(unsafe_code, reason = "sets the mask of signals of a thread")]

use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

/// Raised by an instruction of the thread itself.
const OWN: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// The mask that a thread had, which it gets back.
struct Before(libc::sigset_t);

impl Before {
    /// Blocks the signals of this thread. `None` where that fails.
    fn block() -> Option<Before> {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: it writes all of the set, which has room for it.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: it was filled.
        let mut all = unsafe { all.assume_init() };
        for signal in OWN {
            // SAFETY: the set is one, and the number is a signal's.
            unsafe { libc::sigdelset(&raw mut all, signal) };
        }
        // SAFETY: both are sets of this thread's stack; it reads one and writes the other.
        let refused = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, before.as_mut_ptr()) };
        // SAFETY: it was written where nothing failed.
        (refused == 0).then(|| Before(unsafe { before.assume_init() }))
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        // SAFETY: it is the set that this thread had, and nothing is to be written.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// Begins a thread of this name, which inherits the mask of the one that begins it. A signal that comes
/// meanwhile is heard behind it.
///
/// # Errors
///
/// The system has no more threads.
pub(super) fn begin<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    let _before = Before::block();
    Builder::new().name(name.to_owned()).spawn(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(signal: libc::c_int) -> bool {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: nothing is set, and the set has room for what is written.
        let refused = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), set.as_mut_ptr()) };
        assert_eq!(refused, 0);
        // SAFETY: it was written.
        unsafe { libc::sigismember(set.as_ptr(), signal) == 1 }
    }

    #[test]
    fn a_thread_of_ours_hears_none_and_whoever_begins_it_what_it_heard_before() {
        let all = || [libc::SIGTERM, libc::SIGALRM, libc::SIGUSR1, libc::SIGSEGV].map(blocked);
        let before = all();
        let inside = begin("stitchd-test", all).unwrap().join().unwrap();
        assert_eq!(inside, [true, true, true, before[3]]);
        assert_eq!(all(), before);
    }
}
