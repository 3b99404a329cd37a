//! Ctrl-C while something is searched: the best until then is the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use super::{ignores, stop_after};
use crate::work::Stop;

/// While this is there Ctrl-C is a word, once: another ends the process, as does the first that comes later.
#[derive(Debug)]
pub(super) struct Interrupt {
    is_said: Arc<AtomicBool>,
    /// What Ctrl-C does is what it does everywhere.
    ends_all: Arc<AtomicBool>,
}

impl Interrupt {
    /// Where the word cannot be heard every Ctrl-C ends the process. Whoever has started this one so that none does (a script, behind its back) is left that.
    pub(super) fn listen() -> Interrupt {
        let [is_said, ends_all] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        if ignores(SIGINT) {
            return Interrupt { is_said, ends_all };
        }
        // In this order: once it was said it ends all. None is taken back, as a signal that nobody hears would be lost.
        let listens = flag::register(SIGINT, Arc::clone(&is_said))
            .and_then(|_| flag::register_conditional_default(SIGINT, Arc::clone(&ends_all)))
            .and_then(|_| flag::register(SIGINT, Arc::clone(&ends_all)));
        if let Err(error) = listens {
            tracing::debug!(%error, "Ctrl-C ends all");
            ends_all.store(true, Ordering::Relaxed);
        }
        Interrupt { is_said, ends_all }
    }

    pub(super) fn is_said(&self) -> bool {
        self.is_said.load(Ordering::Relaxed)
    }

    /// Says stop at Ctrl-C, or when so much time has passed.
    pub(super) fn or_after(&self, limit: Option<Duration>) -> Stop {
        let (is_said, is_late) = (Arc::clone(&self.is_said), limit.map(stop_after));
        Arc::new(move || is_said.load(Ordering::Relaxed) || is_late.as_ref().is_some_and(|is_late| is_late()))
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.ends_all.store(true, Ordering::Relaxed);
    }
}

/// What is said of an answer that was interrupted.
pub(super) const NOTE: &str = "interrupted: the best that was found until then";
