//! How long a plan is searched, what is seen of that meanwhile, and what was found when.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::super::interrupt::Interrupt;
use super::super::spinner::Spinner;
use super::PlanArgs;
use crate::clock::{Clock as _, SystemClock};
use crate::plan::solve::Solution;
use crate::plan::{Problem, lower_bound};
use crate::units::Bytes;
use crate::work::{Budget, Told};

/// A search that somebody waits for.
pub(super) struct Searching {
    interrupt: Interrupt,
    spinner: Arc<Spinner>,
    found: Arc<Mutex<Vec<Better>>>,
}

/// An answer that was better than those before.
struct Better {
    seconds: f64,
    work_units: u64,
    peak: u64,
}

impl Searching {
    pub(super) fn of(is_json: bool) -> Searching {
        let spinner = Arc::new(Spinner::of(!is_json));
        spinner.say("looking");
        Searching { interrupt: Interrupt::listen(), spinner, found: Arc::default() }
    }

    /// What is searched: as much as the arguments say, or as is `known` to be enough.
    pub(super) fn budget(&self, args: &PlanArgs, known: Budget, problem: &Problem) -> Budget {
        // Somewhat more than there is time for: how much there is decides what is tried for how long.
        let timed = |limit: Duration| (limit.as_secs_f64() * 2e7).min(1e15) as u64;
        let units = args.work.unwrap_or(args.time_limit.map_or(known.units, timed));
        Budget {
            units,
            seed: args.seed,
            stop: Some(self.interrupt.or_after(args.time_limit)),
            told: Some(self.told(problem)),
        }
    }

    fn told(&self, problem: &Problem) -> Told {
        let bound = if self.spinner.is_seen() { lower_bound(problem) } else { Bytes::ZERO };
        let (clock, spinner, found) = (SystemClock::new(), Arc::clone(&self.spinner), Arc::clone(&self.found));
        Arc::new(move |peak, work_units| {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            if found.last().is_none_or(|best| peak < best.peak) {
                found.push(Better { seconds: clock.now().as_secs_f64(), work_units, peak });
                let gap = (peak as f64 / bound.get().max(1) as f64 - 1.0) * 100.0;
                spinner.say(format!("{} so far, {gap:.3} % above the bound", Bytes::new(peak)));
            }
        })
    }

    /// It is over: what was found when, the first first. While this is there Ctrl-C does not keep the answer from being written.
    pub(super) fn improvements(&self) -> Value {
        self.spinner.end();
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |better: &Better| json!({ "seconds": better.seconds, "work_units": better.work_units, "peak_bytes": better.peak });
        found.iter().map(one).collect()
    }

    /// Somebody did not wait for an answer that may have been better.
    pub(super) fn is_cut_short(&self, solution: &Solution) -> bool {
        self.interrupt.is_said() && !solution.is_optimal()
    }
}
