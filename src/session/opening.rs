//! Opens a driver in time. A vendor's library looks at every device of the machine while it starts, and one that is sick can keep it from ever coming back.
//!
//! Not for: calls of a driver that is open. A daemon bounds those by itself, and a client watches them.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::driver::OpenError;

/// How long a library may take to start where nobody says: on a node of eight GPUs that nobody has used it takes half a minute.
pub(super) const OPENING_MAX: Duration = Duration::from_secs(120);

/// Opens the driver called `name` on a thread of its own, because a call into a library cannot be interrupted, and gives it up after `limit`: the thread is left behind, and goes with
/// the process.
pub fn in_time<T: Send + 'static>(
    name: &str,
    limit: Duration,
    open: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
) -> Result<T, OpenError> {
    let (send, receive) = channel();
    let failed = |reason: String| OpenError::Unopened { driver: name.to_owned(), reason };
    // If it has been given up nobody listens any more.
    let opening = std::thread::Builder::new().name("stitchd-open".into()).spawn(move || drop(send.send(open())));
    opening.map_err(|error| failed(format!("a thread cannot be started: {error}")))?;
    match receive.recv_timeout(limit) {
        Ok(opened) => opened,
        Err(RecvTimeoutError::Timeout) => Err(OpenError::Overdue { driver: name.to_owned(), limit }),
        Err(RecvTimeoutError::Disconnected) => Err(failed("opening it has panicked".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_hangs_while_it_starts_is_an_error_that_says_what_to_do() {
        let hangs = || loop {
            std::thread::park();
        };
        let error = in_time::<()>("some", Duration::from_millis(10), hangs).unwrap_err().to_string();
        assert!(error.contains("has not started within 10ms") && error.contains("dmesg"), "{error}");
        let breaks = || unreachable!("it is expected to panic");
        let error = in_time::<()>("some", OPENING_MAX, breaks).unwrap_err();
        assert!(matches!(error, OpenError::Unopened { .. }), "{error}");
        assert_eq!(in_time("some", OPENING_MAX, || Ok(7)), Ok(7));
    }
}
