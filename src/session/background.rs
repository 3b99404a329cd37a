//! A thread of the library beside the job: told to end, and waited for no longer than somebody says.
//!
//! Not for: what it does ([`super::recording`], [`super::auto`]).
//!
//! Invariant: nobody waits for it but who asks, and that with a bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::Thread;
use std::time::Duration;

use super::signals;

/// Such a thread, which ends with a `T`. It goes on where this is dropped.
#[derive(Debug)]
pub(super) struct Background<T> {
    is_over: Arc<AtomicBool>,
    thread: Thread,
    ended: Receiver<T>,
}

impl<T: Send + 'static> Background<T> {
    /// Begins it. `work` looks now and then whether it is over, parks in between, and is woken up when it is.
    pub(super) fn begin(name: &str, work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> std::io::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (tell, ended) = mpsc::channel();
        let over = Arc::clone(&is_over);
        let work = move || {
            // Whoever began it may not want to hear of it any more.
            let _ = tell.send(work(&over));
        };
        let thread = signals::begin(name, work)?;
        Ok(Background { is_over, thread: thread.thread().clone(), ended })
    }

    /// Tells it to end.
    pub(super) fn stop(&self) {
        self.is_over.store(true, Ordering::Release);
        self.thread.unpark();
    }

    /// Tells it to end, and waits for that, `patience` at most. `None` where it does not get on.
    pub(super) fn end(&self, patience: Duration) -> Option<T> {
        self.stop();
        self.ended.recv_timeout(patience).ok()
    }
}
