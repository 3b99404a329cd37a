//! Every metric, in one list. The rest of the house returns plain figures; here they get names.
//!
//! What is a state (bytes, sessions, the counters of stats pages) is written when somebody scrapes, into a recorder made for that scrape: a series exists exactly
//! as long as what it is about, and counters are there at zero from the first scrape. No session is asked. Latencies are recorded as they happen.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use metrics::{
    Histogram, Label, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    with_local_recorder,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::registry::Entry;
use super::{Daemon, NodeDevice};
use crate::ids::DeviceId;
use crate::ledger::{AccountView, SessionView};
use crate::limits::COUNTERS_MAX;
use crate::runtime::Counter;
use crate::units::Bytes;
use crate::wire::stats_page;

/// The metrics that are recorded as things happen.
pub(super) struct Metrics {
    handle: PrometheusHandle,
    granted: Histogram,
    refused: Histogram,
    /// What sessions that are over had counted.
    ended: Mutex<[u64; COUNTERS_MAX]>,
}

const ACQUIRE_SECONDS: &str = "stitchd_acquire_seconds";
/// From a round trip over a socket, tens of microseconds, to the longest wait worth looking at.
const ACQUIRE_BUCKETS: [f64; 12] = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0, 60.0];

/// Pools by their label.
const SERVED: [(&str, Counter); 4] = [
    ("planned", Counter::RequestsPlanned),
    ("reuse", Counter::RequestsReuse),
    ("stitching", Counter::RequestsStitching),
    ("small", Counter::RequestsSmall),
];

const DEVIATIONS: [(&str, Counter); 5] = [
    ("late", Counter::DeviationsLate),
    ("blocked", Counter::DeviationsBlocked),
    ("unplanned", Counter::DeviationsUnplanned),
    ("skipped", Counter::DeviationsSkipped),
    ("resized", Counter::DeviationsResized),
];

impl Metrics {
    pub(super) fn new() -> Metrics {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Full(ACQUIRE_SECONDS.to_owned()), &ACQUIRE_BUCKETS)
            .expect("there are buckets")
            .build_recorder();
        let (granted, refused) = with_local_recorder(&recorder, || {
            describe_histogram!(ACQUIRE_SECONDS, Unit::Seconds, "Time from an acquire to its answer, by result.");
            (histogram!(ACQUIRE_SECONDS, "result" => "granted"), histogram!(ACQUIRE_SECONDS, "result" => "refused"))
        });
        Metrics { handle: recorder.handle(), granted, refused, ended: Mutex::new([0; COUNTERS_MAX]) }
    }

    /// An acquire was answered.
    pub(super) fn note_acquire(&self, took: Duration, is_granted: bool) {
        let histogram = if is_granted { &self.granted } else { &self.refused };
        histogram.record(took.as_secs_f64());
    }

    /// A session is over: what it counted stays counted.
    pub(super) fn note_ended(&self, counters: &[u64; COUNTERS_MAX]) {
        add(&mut self.ended.lock().expect("nothing panics while it holds this lock"), counters);
    }

    fn ended(&self) -> [u64; COUNTERS_MAX] {
        *self.ended.lock().expect("nothing panics while it holds this lock")
    }
}

/// One session at the moment of a scrape.
struct SessionFigures {
    name: String,
    view: SessionView,
    /// By device.
    counters: BTreeMap<DeviceId, [u64; COUNTERS_MAX]>,
}

impl SessionFigures {
    fn get(&self, device: DeviceId, counter: Counter) -> u64 {
        self.counters.get(&device).map_or(0, |counters| counters[counter as usize])
    }
}

/// What several runtimes count, together.
fn add(sum: &mut [u64; COUNTERS_MAX], more: &[u64; COUNTERS_MAX]) {
    for (_, counter) in Counter::ALL {
        let at = *counter as usize;
        sum[at] = counter.both(sum[at], more[at]);
    }
}

impl Daemon {
    /// Everything as Prometheus reads it.
    pub(super) fn render_metrics(&self) -> String {
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || self.record_state());
        self.metrics.handle.run_upkeep();
        let mut text = recorder.handle().render();
        text.push_str(&self.metrics.handle.render());
        text
    }

    /// What a session's stats page says, by device; nothing where it cannot be read. What is of no device that there is counts for `home`.
    pub(super) fn counters_by_device(&self, entry: &Entry, home: DeviceId) -> BTreeMap<DeviceId, [u64; COUNTERS_MAX]> {
        let mut by_device = BTreeMap::new();
        let read = entry.page.lock().expect("nothing panics while it holds this lock").as_ref().map(stats_page::read);
        let Some(Ok(sets)) = read else { return by_device };
        for set in sets.iter().filter(|set| set.counters != [0; COUNTERS_MAX]) {
            let said = set.device.map(DeviceId).filter(|said| self.devices.iter().any(|device| device.id == *said));
            add(by_device.entry(said.unwrap_or(home)).or_insert([0; COUNTERS_MAX]), &set.counters);
        }
        by_device
    }

    /// The same of all devices together.
    pub(super) fn counters_of(&self, entry: &Entry) -> [u64; COUNTERS_MAX] {
        let mut sum = [0; COUNTERS_MAX];
        self.counters_by_device(entry, DeviceId(0)).values().for_each(|counters| add(&mut sum, counters));
        sum
    }

    fn record_state(&self) {
        describe();
        gauge!("stitchd_build_info", "version" => env!("CARGO_PKG_VERSION"), "revision" => option_env!("STITCHD_REVISION").unwrap_or("unknown")).set(1.0);
        let sessions = self.session_figures();
        for account in self.steward.devices() {
            if let Some(device) = self.devices.iter().find(|device| device.id == account.device) {
                record_device(device, &account, &sessions);
            }
        }
        for session in &sessions {
            self.record_session(session);
        }
        self.record_totals(&sessions);
    }

    fn session_figures(&self) -> Vec<SessionFigures> {
        let mut figures = Vec::new();
        for view in self.steward.sessions() {
            // A session that ends at this moment is in one list and not in the other.
            let Some(entry) = self.registry.get(view.session) else { continue };
            let device = view.held.iter().max_by_key(|(_, held)| *held).map(|(device, _)| *device);
            let Some(home) = device.or_else(|| self.devices.first().map(|device| device.id)) else { continue };
            let counters = self.counters_by_device(&entry, home);
            figures.push(SessionFigures { name: entry.name.clone(), view, counters });
        }
        figures
    }

    fn record_session(&self, session: &SessionFigures) {
        let label = Label::new("session", session.name.clone());
        for device in &self.devices {
            let held = session.view.held.iter().find(|(of, _)| *of == device.id).map_or(Bytes::ZERO, |(_, held)| *held);
            let guarantees = &session.view.guarantees;
            let guarantee = guarantees.iter().find(|(of, _)| *of == device.id).map_or(Bytes::ZERO, |(_, bytes)| *bytes);
            if held.is_zero() && guarantee.is_zero() && !session.counters.contains_key(&device.id) {
                continue;
            }
            let own = |counter| session.get(device.id, counter);
            for (kind, bytes) in [
                ("guarantee", guarantee.get()),
                ("limit", session.view.terms.limit.get()),
                ("leased", held.get()),
                ("live", own(Counter::LiveBytes)),
                ("parked", own(Counter::StitchableBytes)),
            ] {
                let labels = vec![Label::new("UUID", device.uuid.to_string()), label.clone(), Label::new("kind", kind)];
                gauge!("stitchd_session_bytes", labels).set(bytes as f64);
            }
        }
    }

    fn record_totals(&self, sessions: &[SessionFigures]) {
        // Per device, so that a session that ends leaves its count behind: counters never go back.
        let ended = self.metrics.ended();
        let mut sums: BTreeMap<DeviceId, [u64; COUNTERS_MAX]> = BTreeMap::new();
        if let Some(first) = self.devices.first() {
            sums.insert(first.id, ended);
        }
        for session in sessions {
            for (device, counters) in &session.counters {
                add(sums.entry(*device).or_insert([0; COUNTERS_MAX]), counters);
            }
        }
        let (exports, open_fds) = (self.steward.store().counts().1, Daemon::open_fds());
        let returned = self.steward.returned();
        for device in &self.devices {
            let sum = sums.get(&device.id).copied().unwrap_or([0; COUNTERS_MAX]);
            let is_first = self.devices.first().is_some_and(|first| first.id == device.id);
            let uuid = || Label::new("UUID", device.uuid.to_string());
            let count = |name: &'static str, label: &'static str, value: &'static str, sum: u64| {
                counter!(name, vec![uuid(), Label::new(label, value)]).absolute(sum);
            };
            for (served, of) in SERVED {
                count("stitchd_requests_total", "served", served, sum[of as usize]);
            }
            for (kind, of) in DEVIATIONS {
                count("stitchd_plan_deviations_total", "kind", kind, sum[of as usize]);
            }
            count("stitchd_allocation_failures_total", "reason", "exhausted", sum[Counter::Failures as usize]);
            counter!("stitchd_rescued_bytes_total", vec![uuid()]).absolute(sum[Counter::StitchedBytes as usize]);
            // The ledger counts what came back for the node; it stands with the first device.
            let node = |bytes: Bytes| if is_first { bytes.get() } else { 0 };
            count("stitchd_returned_bytes_total", "reason", "release", node(returned.release));
            count("stitchd_returned_bytes_total", "reason", "revoke", node(returned.revoke));
            count("stitchd_returned_bytes_total", "reason", "death", node(returned.death));
        }
        for (reason, count) in self.refusals.counts() {
            counter!("stitchd_refusals_total", "reason" => reason).absolute(count);
        }
        let node: [(&'static str, u64); 5] = [
            ("stitchd_tasks", self.tasks()),
            ("stitchd_waiting_requests", self.steward.request_count() as u64),
            ("stitchd_sessions", sessions.len() as u64),
            ("stitchd_export_slots", exports),
            ("stitchd_open_fds", open_fds),
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

fn record_device(device: &NodeDevice, account: &AccountView, sessions: &[SessionFigures]) {
    let labels = || vec![Label::new("gpu", device.id.0.to_string()), Label::new("UUID", device.uuid.to_string())];
    let with = |name: &'static str, value: &'static str| {
        let mut labels = labels();
        labels.push(Label::new(name, value));
        labels
    };
    let mut info = labels();
    info.push(Label::new("model", device.model.clone()));
    gauge!("stitchd_device_info", info).set(1.0);
    let bytes = &account.bytes;
    for (state, value) in [
        ("total", account.total),
        ("budget", account.budget),
        ("idle", bytes.idle + bytes.reserved),
        ("leased", bytes.leased + bytes.creating + bytes.claimed),
        ("shared", bytes.shared),
        ("quarantined", bytes.quarantined + bytes.destroying),
        ("foreign", account.foreign),
    ] {
        gauge!("stitchd_device_bytes", with("state", state)).set(value.get() as f64);
    }
    let free = Free::of(account, sessions);
    gauge!("stitchd_device_lost", labels()).set(f64::from(u8::from(account.is_lost)));
    gauge!("stitchd_device_chunks", with("kind", "used")).set(account.chunks as f64);
    gauge!("stitchd_device_chunks", with("kind", "limit")).set(account.chunks_max as f64);
    gauge!("stitchd_largest_free_bytes", with("kind", "stitchable")).set(free.stitchable as f64);
    gauge!("stitchd_largest_free_bytes", with("kind", "contiguous")).set(free.contiguous as f64);
    gauge!("stitchd_fragmentation_ratio", with("kind", "external")).set(free.external());
    gauge!("stitchd_fragmentation_ratio", with("kind", "internal")).set(free.internal());
}

/// What is free on a device, and in which shape.
struct Free {
    /// The largest range that somebody could still get: by stitching, or as new chunks.
    stitchable: u64,
    /// The same without stitching.
    contiguous: u64,
    /// All of it, wherever it is.
    all: u64,
    live: u64,
    leased: u64,
}

impl Free {
    fn of(account: &AccountView, sessions: &[SessionFigures]) -> Free {
        let available = account.available().get();
        let leased = account.bytes.leased.get();
        let mut free = Free { stitchable: available, contiguous: available, all: available, live: 0, leased };
        for session in sessions {
            let get = |counter| session.get(account.device, counter);
            let stitchable = get(Counter::StitchableBytes);
            // A session can stitch its own idle blocks and what it can still lease into one range.
            free.stitchable = free.stitchable.max(available.saturating_add(stitchable));
            free.contiguous = free.contiguous.max(get(Counter::ContiguousBytes));
            free.all = free.all.saturating_add(stitchable);
            free.live = free.live.saturating_add(get(Counter::LiveBytes));
        }
        free
    }

    /// 1 − largest contiguous / free: how much of what is free one request cannot have without stitching.
    fn external(&self) -> f64 {
        if self.all == 0 { 0.0 } else { (1.0 - self.contiguous as f64 / self.all as f64).clamp(0.0, 1.0) }
    }

    /// 1 − live / leased: how much of what sessions hold nobody has asked for.
    fn internal(&self) -> f64 {
        if self.leased == 0 { 0.0 } else { (1.0 - self.live as f64 / self.leased as f64).clamp(0.0, 1.0) }
    }
}

/// The list of names that are written at a scrape, with what they mean.
fn describe() {
    let gauges: [(&'static str, Option<Unit>, &'static str); 15] = [
        ("stitchd_tasks", None, "Tasks of the daemon: some for each connection and session."),
        ("stitchd_device_lost", None, "1 once the device is gone, until the daemon is restarted."),
        ("stitchd_device_chunks", None, "Chunks of a device, and how many descriptors and exports allow."),
        ("stitchd_build_info", None, "1, with the version."),
        ("stitchd_device_info", None, "1, with the model."),
        ("stitchd_device_bytes", Some(Unit::Bytes), "Physical memory of a device by state."),
        ("stitchd_session_bytes", Some(Unit::Bytes), "Memory of a session by kind."),
        ("stitchd_fragmentation_ratio", None, "external: 1 - largest contiguous / free; internal: 1 - live / leased."),
        ("stitchd_largest_free_bytes", Some(Unit::Bytes), "The largest range that one request could still get."),
        ("stitchd_waiting_requests", None, "Requests for memory that wait."),
        ("stitchd_sessions", None, "Sessions that are open."),
        ("stitchd_export_slots", None, "Chunks that were exported."),
        ("stitchd_open_fds", None, "Descriptors that the daemon has open."),
        ("stitchd_keeper_up", None, "1 while a keeper holds what is to outlive the daemon."),
        ("stitchd_journal_bytes", Some(Unit::Bytes), "What the daemon that follows has to read."),
    ];
    for (name, unit, text) in gauges {
        match unit {
            Some(unit) => describe_gauge!(name, unit, text),
            None => describe_gauge!(name, text),
        }
    }
    for (name, text) in [
        ("stitchd_keeper_restarts_total", "Keepers that were started in the place of one that had gone."),
        ("stitchd_requests_total", "Allocations served, by pool."),
        ("stitchd_plan_deviations_total", "Requests that did not match the plan, and entries nobody asked for."),
        ("stitchd_allocation_failures_total", "Allocations that failed, by reason."),
        ("stitchd_rescued_bytes_total", "Bytes served by stitching where no contiguous block could."),
        ("stitchd_returned_bytes_total", "Bytes that came back from sessions, by reason."),
        ("stitchd_refusals_total", "What was refused because it was not for whoever asked, by reason."),
    ] {
        describe_counter!(name, text);
    }
}
