//! Opens a driver in time. A vendor's library looks at every device of the machine while it starts, and one that is sick can keep it from ever coming back.
//!
//! Not for: calls of a driver that is open. A daemon bounds those by itself, and a client watches them.

use std::collections::BTreeSet;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::driver::OpenError;

/// How long a library may take to start where nobody says: on a node of eight GPUs that nobody has used it takes half a minute.
pub(super) const OPENING_MAX: Duration = Duration::from_secs(120);

/// Drivers that were given up and have not come back. One that is asked again would hang again, and each time take a thread with it.
static HANGING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn hanging() -> MutexGuard<'static, BTreeSet<String>> {
    HANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says, however its thread ends, that a driver has come back.
struct Back(String);

impl Drop for Back {
    fn drop(&mut self) {
        hanging().remove(&self.0);
    }
}

/// Opens the driver called `name` on a thread of its own, because a call into a library cannot be interrupted, and gives it up after `limit`: the thread is left behind, and goes with
/// the process. Until it has come back that driver is not asked again.
pub fn in_time<T: Send + 'static>(
    name: &str,
    limit: Duration,
    open: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
) -> Result<T, OpenError> {
    let (send, receive) = channel();
    let failed = |reason: String| OpenError::Unopened { driver: name.to_owned(), reason };
    let panicked = || failed("opening it has panicked".to_owned());
    let overdue = || OpenError::Overdue { driver: name.to_owned(), limit };
    if hanging().contains(name) {
        return Err(overdue());
    }
    let back = Back(name.to_owned());
    let opening = std::thread::Builder::new().name("stitchd-open".into()).spawn(move || {
        // In this order: what it has to say is there, or never will be, before it is back.
        let _back = back;
        let send = send;
        // If it has been given up nobody listens any more.
        drop(send.send(open()));
    });
    opening.map_err(|error| failed(format!("a thread cannot be started: {error}")))?;
    match receive.recv_timeout(limit) {
        Ok(opened) => opened,
        Err(RecvTimeoutError::Timeout) => {
            let mut hanging = hanging();
            // It may have come back just now, and says so only once.
            match receive.try_recv() {
                Ok(opened) => opened,
                Err(TryRecvError::Empty) => {
                    hanging.insert(name.to_owned());
                    Err(overdue())
                }
                Err(TryRecvError::Disconnected) => Err(panicked()),
            }
        }
        Err(RecvTimeoutError::Disconnected) => Err(panicked()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_was_given_up_is_asked_again_only_when_it_has_come_back() {
        const NAME: &str = "slow";
        let limit = Duration::from_millis(10);
        let (come_back, waits) = channel::<()>();
        let slow = move || {
            let _ = waits.recv();
            Ok(())
        };
        assert!(matches!(in_time(NAME, limit, slow), Err(OpenError::Overdue { .. })));
        let unasked = || -> Result<(), OpenError> { unreachable!("it is not asked while it hangs") };
        assert!(matches!(in_time(NAME, limit, unasked), Err(OpenError::Overdue { .. })));
        assert_eq!(in_time("another", OPENING_MAX, || Ok(1)), Ok(1));
        come_back.send(()).unwrap();
        while hanging().contains(NAME) {
            std::thread::yield_now();
        }
        assert_eq!(in_time(NAME, OPENING_MAX, || Ok(2)), Ok(2));
    }

    #[test]
    fn a_library_that_hangs_while_it_starts_is_an_error_that_says_what_to_do() {
        let hangs = || loop {
            std::thread::park();
        };
        let error = in_time::<()>("some", Duration::from_millis(10), hangs).unwrap_err().to_string();
        assert!(error.contains("has not started within 10ms") && error.contains("dmesg"), "{error}");
        let breaks = || unreachable!("it is expected to panic");
        let error = in_time::<()>("other", OPENING_MAX, breaks).unwrap_err();
        assert!(matches!(error, OpenError::Unopened { .. }), "{error}");
        assert_eq!(in_time("other", OPENING_MAX, || Ok(7)), Ok(7));
    }
}
