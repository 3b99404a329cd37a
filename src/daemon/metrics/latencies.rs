//! What is recorded as it happens: how long acquires and driver calls take, and how long asking for memory back does.

use std::fmt;
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram, with_local_recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::names;
use crate::clock::{Clock, SystemClock};
use crate::driver::layers::{Intercept, Step};
use crate::driver::{Call, DriverError, Handle};

/// From a round trip over a socket, tens of microseconds, to the longest wait worth looking at: a quantile is known within a factor of three, of six in the last.
const SECONDS: [f64; 14] = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0];

/// The calls that a daemon makes itself. What is mapped and written is the clients' own.
const CALLS: [Call; 6] = [Call::Create, Call::Release, Call::Export, Call::Import, Call::SetAccess, Call::Query];

/// The histograms.
pub(in crate::daemon) struct Latencies {
    handle: PrometheusHandle,
    granted: Histogram,
    refused: Histogram,
    revocations: Histogram,
    calls: [(Histogram, Counter); CALLS.len()],
}

impl fmt::Debug for Latencies {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Latencies").finish_non_exhaustive()
    }
}

impl Latencies {
    pub(in crate::daemon) fn new() -> Latencies {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
            .expect("there are buckets")
            .build_recorder();
        with_local_recorder(&recorder, || {
            names::describe_latencies();
            Latencies {
                handle: recorder.handle(),
                granted: histogram!("stitchd_acquire_seconds", "result" => "granted"),
                refused: histogram!("stitchd_acquire_seconds", "result" => "refused"),
                revocations: histogram!("stitchd_revocation_seconds"),
                calls: CALLS.map(|call| {
                    let failures = counter!("stitchd_driver_failures_total", "call" => call.name());
                    // There from the first scrape.
                    failures.absolute(0);
                    (histogram!("stitchd_driver_call_seconds", "call" => call.name()), failures)
                }),
            }
        })
    }

    /// An acquire was answered.
    pub(in crate::daemon) fn note_acquire(&self, took: Duration, is_granted: bool) {
        let histogram = if is_granted { &self.granted } else { &self.refused };
        histogram.record(took.as_secs_f64());
    }

    /// A session has answered what it was asked to give back, or its time was up.
    pub(in crate::daemon) fn note_revocation(&self, took: Duration) {
        self.revocations.record(took.as_secs_f64());
    }

    /// Sorts what was recorded into buckets: until then each figure takes a place of its own.
    pub(in crate::daemon) fn sort(&self) {
        self.handle.run_upkeep();
    }

    pub(super) fn render(&self) -> String {
        self.sort();
        self.handle.render()
    }
}

/// Times the driver's calls.
#[derive(Debug)]
pub(in crate::daemon) struct CallTimes {
    pub(in crate::daemon) latencies: std::sync::Arc<Latencies>,
    pub(in crate::daemon) clock: SystemClock,
}

impl Intercept for CallTimes {
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        _handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        let started = self.clock.now();
        let outcome = run();
        if let Some(at) = CALLS.iter().position(|call| *call == step.call()) {
            let (took, failures) = &self.latencies.calls[at];
            took.record(self.clock.now().saturating_sub(started).as_secs_f64());
            failures.increment(u64::from(outcome.is_err()));
        }
        outcome
    }
}
