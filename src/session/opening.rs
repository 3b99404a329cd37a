//! Opens a driver in time. A vendor's library looks at every device of the machine while it starts, and one that is sick can keep it from ever coming back.
//!
//! Not for: calls of a driver that is open. A daemon bounds those by itself, and a client watches them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::signals;
use crate::driver::OpenError;

/// How long a library may take to start where nobody says: on a node of eight GPUs that nobody has used it takes half a minute.
pub(super) const OPENING_MAX: Duration = Duration::from_secs(120);

/// Openings that were given up and have not come back, by driver: two that began at once may both hang. One that is asked again would hang again, and each time take a thread with it.
static HANGING: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

fn hanging() -> MutexGuard<'static, BTreeMap<String, usize>> {
    HANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says, however its thread ends, that an opening has come back.
struct Back {
    driver: String,
    /// It was counted among those that hang. Only changed and read under their lock.
    given_up: Arc<AtomicBool>,
}

impl Drop for Back {
    fn drop(&mut self) {
        let mut hanging = hanging();
        if !self.given_up.load(Ordering::Relaxed) {
            return;
        }
        if let Some(count) = hanging.get_mut(&self.driver) {
            *count -= 1;
            if *count == 0 {
                hanging.remove(&self.driver);
            }
        }
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
    if hanging().contains_key(name) {
        return Err(overdue());
    }
    let given_up = Arc::new(AtomicBool::new(false));
    let back = Back { driver: name.to_owned(), given_up: Arc::clone(&given_up) };
    let work = move || {
        // In this order: what it has to say is there, or never will be, before it is back.
        let _back = back;
        let send = send;
        // If it has been given up nobody listens any more.
        drop(send.send(open()));
    };
    let opening = signals::begin("stitchd-open", work);
    opening.map_err(|error| failed(format!("a thread cannot be started: {error}")))?;
    match receive.recv_timeout(limit) {
        Ok(opened) => opened,
        Err(RecvTimeoutError::Timeout) => {
            let mut hanging = hanging();
            // It may have come back just now, and says so only once.
            match receive.try_recv() {
                Ok(opened) => opened,
                Err(TryRecvError::Empty) => {
                    given_up.store(true, Ordering::Relaxed);
                    *hanging.entry(name.to_owned()).or_default() += 1;
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
        let slow = move || Ok(waits.recv().is_ok());
        assert!(matches!(in_time(NAME, limit, slow), Err(OpenError::Overdue { .. })));
        let unasked = || -> Result<(), OpenError> { unreachable!("it is not asked while it hangs") };
        assert!(matches!(in_time(NAME, limit, unasked), Err(OpenError::Overdue { .. })));
        assert_eq!(in_time("another", OPENING_MAX, || Ok(1)), Ok(1));
        come_back.send(()).unwrap();
        while hanging().contains_key(NAME) {
            std::thread::yield_now();
        }
        assert_eq!(in_time(NAME, OPENING_MAX, || Ok(2)), Ok(2));
    }

    #[test]
    fn a_library_of_which_one_opening_came_back_is_not_asked_while_another_hangs() {
        const NAME: &str = "slow twice";
        let limit = Duration::from_millis(100);
        let hangs = || {
            let (come_back, waits) = channel::<()>();
            let opening = std::thread::spawn(move || in_time(NAME, limit, move || Ok(waits.recv().is_ok())));
            (come_back, opening)
        };
        let openings = [hangs(), hangs()];
        let [one, other] = openings.map(|(come_back, opening)| {
            assert!(matches!(opening.join().unwrap(), Err(OpenError::Overdue { .. })));
            come_back
        });
        let count = || hanging().get(NAME).copied();
        // One that began after the other was given up was not asked at all.
        let both = count().unwrap();
        one.send(()).unwrap_or_default();
        if both == 2 {
            while count() == Some(2) {
                std::thread::yield_now();
            }
            assert_eq!(count(), Some(1));
        }
        other.send(()).unwrap_or_default();
        while count().is_some() {
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
