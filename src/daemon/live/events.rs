//! The last things that happened, for people. Logs have all of them.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::wire::v1;

/// So many are remembered.
const REMEMBERED: usize = 256;
/// A text is cut there: names in it are others'.
const TEXT_LEN_MAX: usize = 512;

#[derive(Debug, Default)]
pub(in crate::daemon) struct Events(Mutex<VecDeque<v1::Event>>);

impl Events {
    pub(super) fn note(&self, mut event: v1::Event) {
        if event.text.len() > TEXT_LEN_MAX {
            let end = (0..=TEXT_LEN_MAX).rev().find(|end| event.text.is_char_boundary(*end)).unwrap_or(0);
            event.text.truncate(end);
        }
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == REMEMBERED {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// The oldest first.
    pub(super) fn all(&self) -> Vec<v1::Event> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_long_texts_are_cut_between_characters() {
        let events = Events::default();
        for at_ms in 0..300 {
            events.note(v1::Event { at_ms, kind: 0, text: "ü".repeat(400) });
        }
        let all = events.all();
        assert_eq!((all.len(), all[0].at_ms, all[255].at_ms), (REMEMBERED, 44, 299));
        assert!(all.iter().all(|event| event.text == "ü".repeat(256)));
    }
}
