//! Knows whether this process was forked from one that has a session.
//!
//! GPU memory does not survive fork without exec, locks may be held by threads that the child does not have, and the daemon knows the parent. So a
//! child does nothing at all with a session: every entry asks [`is_child`] first, which is one load.

#![expect(unsafe_code, reason = "registers a handler with pthread_atfork")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);
static WATCHING: Once = Once::new();

extern "C" fn note_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// From now on forked children of this process know that they are.
pub fn watch() {
    WATCHING.call_once(|| {
        // SAFETY:
        // * the handler is a function of the right type, which lives as long as this library is loaded; the C library drops handlers of a library that
        //   is unloaded;
        // * it only stores to an atomic, which is allowed between fork and exec.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(note_child)) };
        // ENOMEM is its only error. Then a child is not noticed; the memory itself is still not inherited (MADV_DONTFORK).
        if refused != 0 {
            tracing::warn!("pthread_atfork failed; forked children are not noticed");
        }
    });
}

/// True in a process that was forked after [`watch`].
#[inline]
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}
