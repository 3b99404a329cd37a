//! Figures of the last minutes, in memory: for longer there is Prometheus.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::wire::v1;

/// How far back it reaches.
pub(in crate::daemon) const SPAN_MS: u64 = 10 * 60 * 1_000;
/// How far apart figures are.
const EVERY_MS: u64 = 2_000;

#[derive(Debug, Default)]
pub(in crate::daemon) struct History(Mutex<VecDeque<v1::Sample>>);

impl History {
    /// It is time for another.
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        samples.back().is_none_or(|last| now_ms >= last.at_ms.saturating_add(EVERY_MS))
    }

    pub(super) fn note(&self, sample: v1::Sample) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = sample.at_ms.saturating_sub(SPAN_MS);
        while samples.front().is_some_and(|oldest| oldest.at_ms < from) {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// The oldest first.
    pub(super) fn all(&self) -> Vec<v1::Sample> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reaches_back_so_far_and_no_further() {
        let history = History::default();
        for now_ms in (0..4 * SPAN_MS).step_by(20) {
            if history.is_due(now_ms) {
                history.note(v1::Sample { at_ms: now_ms, devices: Vec::new() });
            }
        }
        let all = history.all();
        assert_eq!(all.len() as u64, SPAN_MS / EVERY_MS + 1);
        assert!(all.windows(2).all(|two| two[1].at_ms - two[0].at_ms == EVERY_MS));
    }
}
