//! Moments at which a test has this process killed: between any two things of which one could be done and the other not. In releases there are none.
//!
//! Not for: errors. What is killed here is gone as by SIGKILL, with nothing undone and nobody told.

/// Something was done, or is about to be.
#[inline(always)]
pub fn moment() {
    #[cfg(feature = "testing")]
    testing::moment();
}

#[cfg(feature = "testing")]
pub use testing::{die_at, is_mortal};

#[cfg(feature = "testing")]
mod testing {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// How many moments are left, and the file that says that somebody has died: it is once, whoever is started in the place of the dead.
    static DEATH: OnceLock<(AtomicU64, PathBuf)> = OnceLock::new();

    /// Has this process killed at its `number`th moment from now, unless `died` is there; it is then.
    pub fn die_at(number: u64, died: PathBuf) {
        // Once is enough.
        let _ = DEATH.set((AtomicU64::new(number), died));
    }

    /// It will be.
    pub fn is_mortal() -> bool {
        DEATH.get().is_some()
    }

    pub(super) fn moment() {
        let Some((left, died)) = DEATH.get() else { return };
        if left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        if std::fs::File::options().write(true).create_new(true).open(died).is_ok() {
            // It is this process: there is nobody else whom it could be.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}
