//! Every metric, in one list ([`names`]). The rest of the house returns plain figures; here they get names.
//!
//! What is a state (bytes, sessions, the counters of stats pages) is written when somebody scrapes, into a recorder made for that scrape: a series exists exactly
//! as long as what it is about, and counters are there at zero from the first scrape. No session is asked. Latencies are recorded as they happen.
//!
//! | part | what it does |
//! |---|---|
//! | [`names`] | the list, with what each means |
//! | [`devices`], [`sessions`], [`process`] | what is read for a scrape |
//! | [`tally`] | what sessions have counted, also those that are over |
//! | [`families`] | how what sessions have and count is written |
//! | [`latencies`] | what is recorded as it happens |
//! | [`open_metrics`] | the other text format, which Prometheus asks for first |

mod devices;
mod families;
mod latencies;
mod names;
mod open_metrics;
mod process;
mod sessions;
mod tally;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Label, counter, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::registry::Entry;
use super::{Daemon, NodeDevice};
use crate::driver::Driver as _;
use crate::ids::DeviceId;
use crate::ledger::{EndReason, RequestView};
use crate::limits::{self, COUNTERS_MAX};
use crate::runtime::Counter;
use crate::units::Bytes;
use crate::wire::stats_page::{self, StatsPageError};
pub(super) use devices::Free;
use devices::record_device;
pub(super) use latencies::{CallTimes, Latencies};
use open_metrics::to_open_metrics;
pub(super) use sessions::SessionFigures;
use sessions::{record_unlisted, write_sessions};
pub(super) use tally::Tally;
use tally::by_device;

/// What a session counts, of one device or of all.
pub(super) type CounterSet = [u64; COUNTERS_MAX];
/// What is counted, by device. A map has room for eleven from its first on: half a kilobyte each is too much for that.
pub(super) type ByDevice = BTreeMap<DeviceId, Box<CounterSet>>;

/// What the runtimes of a session count, each with its device where that is one of this node.
type Sets = [(Option<DeviceId>, CounterSet); stats_page::SETS];

/// How many sessions have begun and ended.
#[derive(Debug, Default)]
pub(super) struct SessionCounts {
    starts: AtomicU64,
    closed: AtomicU64,
    died: AtomicU64,
}

impl SessionCounts {
    pub(super) fn note_start(&self) {
        self.starts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_end(&self, reason: EndReason) {
        let count = match reason {
            EndReason::Closed => &self.closed,
            EndReason::Died => &self.died,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Pools by their label.
const SERVED: [(&str, Counter); 3] =
    [("planned", Counter::RequestsPlanned), ("reuse", Counter::RequestsReuse), ("pool", Counter::RequestsPool)];

const DEVIATIONS: [(&str, Counter); 5] = [
    ("late", Counter::DeviationsLate),
    ("blocked", Counter::DeviationsBlocked),
    ("unplanned", Counter::DeviationsUnplanned),
    ("skipped", Counter::DeviationsSkipped),
    ("resized", Counter::DeviationsResized),
];

/// Failures but those for want of memory, which are all others.
const FAILURES: [(&str, Counter); 4] = [
    ("fragmented", Counter::FailuresFragmented),
    ("limit", Counter::FailuresLimit),
    ("driver", Counter::FailuresDriver),
    ("unavailable", Counter::FailuresUnavailable),
];

/// What several runtimes count, together.
fn add(sum: &mut CounterSet, more: &CounterSet) {
    for (_, counter) in Counter::ALL {
        let at = *counter as usize;
        sum[at] = counter.both(sum[at], more[at]);
    }
}

/// Which text is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    /// Prometheus text 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// What an `Accept` asks for. Prometheus names what it likes best first; who names neither gets what everybody reads.
    pub(super) fn of(accept: &str) -> Format {
        let is_wanted = accept.split(',').any(|kind| {
            let mut words = kind.split(';').map(str::trim);
            let none = |word: &str| word.strip_prefix("q=").and_then(|share| share.parse().ok()) == Some(0.0);
            words.next() == Some("application/openmetrics-text") && !words.any(none)
        });
        if is_wanted { Format::OpenMetrics } else { Format::Text }
    }

    /// As a header says it.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Daemon {
    /// Everything as Prometheus reads it.
    pub(super) fn render_metrics(&self, format: Format) -> String {
        let sessions = self.session_figures();
        let own = process::Stat::read();
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || self.record_state(&sessions, own));
        let mut text = recorder.handle().render();
        process::write(&mut text, own);
        write_sessions(&mut text, &self.devices, &sessions, &self.tally.names());
        text.push_str(&self.latencies.render());
        match format {
            Format::Text => text,
            Format::OpenMetrics => to_open_metrics(&text),
        }
    }

    /// What a session's stats page says, by device; nothing where it cannot be read. What is of no device that there is counts for `home`.
    pub(super) fn counters_by_device(&self, entry: &Entry, home: DeviceId) -> ByDevice {
        self.sets_of(entry).map(|sets| by_device(&sets, home)).unwrap_or_default()
    }

    /// The same of all devices together, of one that holds so much of each.
    pub(super) fn counters_of(&self, entry: &Entry, held: &[(DeviceId, Bytes)]) -> CounterSet {
        let mut by_device = self.counters_by_device(entry, Daemon::home_of(held).unwrap_or_else(|| self.home()));
        cap_by_books(&mut by_device, held);
        let mut sum = [0; COUNTERS_MAX];
        by_device.values().for_each(|counters| add(&mut sum, counters));
        sum
    }

    /// A session is over: what it counted stays counted.
    pub(super) fn keep_counters_of(&self, entry: &Entry) {
        self.tally.end(entry.id, self.home(), || self.sets_of(entry));
    }

    /// A session's process counts on the page that it has brought from now on, or on one that is made for it.
    pub(super) fn take_page_of(&self, entry: &Entry, brought: Option<OwnedFd>) -> Result<(), StatsPageError> {
        self.tally.rebase(entry.id, self.home(), || {
            // The end of one that is over counts what is on the page that it had.
            if self.registry.get(entry.id).is_none() {
                return Ok(None);
            }
            let before = self.sets_of(entry);
            entry.take_page(brought)?;
            Ok(Some([before, self.sets_of(entry)]))
        })
    }

    fn sets_of(&self, entry: &Entry) -> Option<Sets> {
        let is_there = |said: &DeviceId| self.devices.iter().any(|device| device.id == *said);
        let page = entry.page.lock().unwrap_or_else(PoisonError::into_inner);
        let sets = page.as_ref().and_then(|page| stats_page::read(page).ok())?;
        Some(sets.map(|set| (set.device.map(DeviceId).filter(is_there), set.counters)))
    }

    /// Where most is held.
    fn home_of(held: &[(DeviceId, Bytes)]) -> Option<DeviceId> {
        held.iter().max_by_key(|(_, held)| *held).map(|(device, _)| *device)
    }

    /// Where counts what is of no device that anybody knows.
    fn home(&self) -> DeviceId {
        self.devices.first().map_or(DeviceId(0), |device| device.id)
    }

    fn record_state(&self, sessions: &[SessionFigures], own: Option<process::Stat>) {
        names::describe();
        let open_fds = Daemon::open_fds();
        process::record(open_fds, own);
        gauge!("stitchd_build_info", "version" => env!("CARGO_PKG_VERSION"), "revision" => option_env!("STITCHD_REVISION").unwrap_or("unknown")).set(1.0);
        let requests = self.steward.requests();
        for account in self.steward.devices() {
            if let Some(device) = self.devices.iter().find(|device| device.id == account.device) {
                let version = self.driver.version().unwrap_or_default();
                let unkept = self.steward.store().unkept(device.id);
                record_device(device, version, unkept, &account, sessions, &requests);
            }
        }
        record_unlisted(sessions);
        self.record_counters();
        self.record_node(sessions, &requests, open_fds);
    }

    /// What sessions have counted since this daemon met them, up to when it last looked, those that are over among them.
    pub(super) fn totals(&self) -> ByDevice {
        self.tally.devices()
    }

    fn record_counters(&self) {
        let (sums, exhausted) = (self.totals(), self.tally.exhausted());
        let returned = self.steward.returned();
        for device in &self.devices {
            let sum = sums.get(&device.id).map_or([0; COUNTERS_MAX], |sum| **sum);
            let is_home = device.id == self.home();
            let uuid = || uuid_label(device);
            let count = |name: &'static str, label: &'static str, value: &'static str, sum: u64| {
                counter!(name, vec![uuid(), Label::new(label, value)]).absolute(sum);
            };
            for (served, of) in SERVED {
                count("stitchd_requests_total", "served", served, sum[of as usize]);
            }
            for (kind, of) in DEVIATIONS {
                count("stitchd_plan_deviations_total", "kind", kind, sum[of as usize]);
            }
            let exhausted = exhausted.get(&device.id).copied().unwrap_or(0);
            count("stitchd_allocation_failures_total", "reason", "exhausted", exhausted);
            for (reason, of) in FAILURES {
                count("stitchd_allocation_failures_total", "reason", reason, sum[of as usize]);
            }
            counter!("stitchd_rescued_bytes_total", vec![uuid()]).absolute(sum[Counter::RescuedBytes as usize]);
            // The ledger counts what came back for the node; it stands with the first device.
            let node = |bytes: Bytes| if is_home { bytes.get() } else { 0 };
            count("stitchd_returned_bytes_total", "reason", "release", node(returned.release));
            count("stitchd_returned_bytes_total", "reason", "revoke", node(returned.revoke));
            count("stitchd_returned_bytes_total", "reason", "death", node(returned.death));
        }
    }

    /// What is of the node.
    fn record_node(&self, sessions: &[SessionFigures], requests: &[RequestView], open_fds: u64) {
        for (reason, count) in self.refusals.counts() {
            counter!("stitchd_refusals_total", "reason" => reason).absolute(count);
        }
        let (asked, unanswered) = (self.revocations.asked(), self.revocations.unanswered());
        counter!("stitchd_revocations_total", "result" => "asked").absolute(asked);
        counter!("stitchd_revocations_total", "result" => "unanswered").absolute(unanswered);
        let SessionCounts { starts, closed, died } = &self.session_counts;
        counter!("stitchd_session_starts_total").absolute(starts.load(Ordering::Relaxed));
        counter!("stitchd_session_ends_total", "reason" => "closed").absolute(closed.load(Ordering::Relaxed));
        counter!("stitchd_session_ends_total", "reason" => "died").absolute(died.load(Ordering::Relaxed));
        let node: [(&'static str, u64); 9] = [
            ("stitchd_tasks", self.tasks()),
            ("stitchd_waiting_requests", requests.len() as u64),
            ("stitchd_sessions", sessions.len() as u64),
            ("stitchd_shared_ranges", self.steward.ranges().len() as u64),
            ("stitchd_export_slots", self.steward.store().counts().1),
            ("stitchd_export_slots_max", limits::EXPORTS_MAX),
            ("stitchd_open_fds", open_fds),
            ("stitchd_open_fds_max", Daemon::open_fds_max()),
            ("stitchd_ready", u64::from(!self.is_draining())),
        ];
        for (name, value) in node {
            gauge!(name).set(value as f64);
        }
        if let Some(keeping) = &self.keeping {
            gauge!("stitchd_keeper_up").set(f64::from(u8::from(keeping.pid().is_some())));
            counter!("stitchd_keeper_restarts_total").absolute(keeping.restarts());
            gauge!("stitchd_journal_bytes").set(self.steward.journal_len().unwrap_or(0) as f64);
        }
    }
}

/// What a process says that it uses now is not more than what it holds by the books, whoever writes on its page.
fn cap_by_books(by_device: &mut ByDevice, held: &[(DeviceId, Bytes)]) {
    for (device, counters) in by_device {
        let held = held.iter().find(|(of, _)| of == device).map_or(0, |(_, held)| held.get());
        tally::cap(counters, held);
    }
}

fn uuid_label(device: &NodeDevice) -> Label {
    Label::new("UUID", device.uuid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_for_whoever_asks_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::of(prometheus), Format::OpenMetrics);
        for other in ["", "*/*", "text/plain;version=0.0.4", "application/openmetrics-text; q=0, text/plain"] {
            assert_eq!(Format::of(other), Format::Text, "{other}");
        }
    }
}
