//! What every error of the system can say about itself, and the one place that prints a chain of causes.

use std::error::Error;
use std::fmt::Write as _;

/// What a caller can do about an error. Callers branch on this, never on text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// There is no memory (or descriptor, or export slot) left: wait, free something, or ask for less.
    Exhausted,
    /// The caller's own limit stands in the way.
    OverLimit,
    /// The request makes no sense, whatever the state of the system.
    Invalid,
    /// The thing named does not exist, or no longer does.
    NotFound,
    /// The thing is there but in a state that forbids this.
    Conflict,
    /// This driver, system or version cannot do it.
    Unsupported,
    /// The other side cannot be reached, or did not answer in time.
    Unavailable,
    /// Something failed that should not have.
    Broken,
}

impl ErrorKind {
    /// Somebody has what was asked for, or may not give more of it; anything else would be answered the same after asking for less.
    pub fn is_lack(self) -> bool {
        matches!(self, ErrorKind::Exhausted | ErrorKind::OverLimit)
    }
}

/// The first cause: what went wrong, without who was doing what.
pub fn root<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut error = error;
    while let Some(next) = error.source() {
        error = next;
    }
    error
}

/// The first `max` characters of a text that is somebody else's, without what a terminal would take for orders.
pub fn excerpt(text: &str, max: usize) -> String {
    let mut shown: String = text.chars().take(max).flat_map(char::escape_debug).collect();
    if text.chars().nth(max).is_some() {
        shown.push('…');
    }
    shown
}

/// `error` and all its causes in one line, outermost first: "cannot do this: because of that: no such file".
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        // Infallible: writing to a String.
        let _ = write!(text, ": {next}");
        cause = next.source();
    }
    text
}

/// A message as a terminal may have it: names in it come from files, and what would steer the terminal is written out.
pub fn shown(message: &str) -> String {
    let is_text = |letter: &char| !letter.is_control() || matches!(letter, '\n' | '\t');
    message.chars().fold(String::new(), |mut shown, letter| {
        if is_text(&letter) {
            shown.push(letter);
        } else {
            shown.extend(letter.escape_default());
        }
        shown
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_steers_no_terminal() {
        let message = "node 'a\u{1b}[31m': ünknown\r\n\tnext\u{9b}\u{7}";
        assert_eq!(shown(message), "node 'a\\u{1b}[31m': ünknown\\r\n\tnext\\u{9b}\\u{7}");
    }
}
