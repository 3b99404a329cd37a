//! Knows when this process ends by `exit`, as almost all do: whoever has something to write down still can.
//!
//! Not for: a process that is killed, or ends by `_exit`. Nobody is asked there.

#![expect(unsafe_code, reason = "registers a handler with atexit")]

use std::sync::OnceLock;

static AT_EXIT: OnceLock<fn()> = OnceLock::new();

extern "C" fn end() {
    if let Some(handler) = AT_EXIT.get() {
        // Nothing may unwind into the C library; a panic has been told by its hook.
        let _ = std::panic::catch_unwind(*handler);
    }
}

/// Calls `handler` when the process ends by `exit`, before its other threads do. The first of a process is the only one.
pub fn before(handler: fn()) {
    let mut is_first = false;
    AT_EXIT.get_or_init(|| {
        is_first = true;
        handler
    });
    if is_first {
        // SAFETY: the handler is a function of the right type, which does not unwind, and lives as long as this library is loaded: the C library calls it when a library is unloaded.
        let refused = unsafe { libc::atexit(end) };
        // Want of memory is its only error. Then what came last is missing.
        if refused != 0 {
            tracing::warn!("atexit failed; what is recorded last is not written");
        }
    }
}
