//! A word that moves on a terminal, for work whose length nobody knows.

use std::borrow::Cow;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// What moves on a terminal moves so often, also where its work does not.
pub(super) const MOVES: Duration = Duration::from_millis(100);

/// Says what goes on just now; nothing of it is left on the terminal.
pub(super) struct Spinner(ProgressBar);

impl Spinner {
    /// One that nobody sees where nobody looks.
    pub(super) fn of(is_seen: bool) -> Spinner {
        if !is_seen {
            return Spinner(ProgressBar::hidden());
        }
        let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}").expect("the template is right");
        let bar = ProgressBar::new_spinner().with_style(style);
        bar.enable_steady_tick(MOVES);
        Spinner(bar)
    }

    /// Somebody may be looking.
    pub(super) fn is_seen(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Nothing of it is left from here on.
    pub(super) fn end(&self) {
        self.0.finish_and_clear();
    }

    pub(super) fn say(&self, what: impl Into<Cow<'static, str>>) {
        self.0.set_message(what);
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.end();
    }
}
