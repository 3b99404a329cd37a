//! Devices at the moment of a scrape: bytes by state, and in which shape what is free is.

use metrics::{Label, gauge};

use super::sessions::SessionFigures;
use super::uuid_label;
use crate::daemon::NodeDevice;
use crate::ledger::{AccountView, RequestView};
use crate::runtime::Counter;
use crate::units::Bytes;

pub(super) fn record_device(
    device: &NodeDevice,
    driver_version: String,
    unkept: Bytes,
    account: &AccountView,
    sessions: &[SessionFigures],
    requests: &[RequestView],
) {
    let labels = || vec![Label::new("gpu", device.id.0.to_string()), uuid_label(device)];
    let with = |name: &'static str, value: &'static str| {
        let mut labels = labels();
        labels.push(Label::new(name, value));
        labels
    };
    let mut info = labels();
    info.extend([Label::new("model", device.model.clone()), Label::new("driver_version", driver_version)]);
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
    let waiting = requests.iter().filter(|request| request.device == account.device && request.is_waiting);
    let oldest_ms = waiting.map(|request| request.age_ms).max().unwrap_or(0);
    for (name, value) in [
        ("stitchd_device_lost", f64::from(u8::from(account.is_lost))),
        ("stitchd_device_draining", f64::from(u8::from(account.is_draining))),
        ("stitchd_available_bytes", account.available().get() as f64),
        ("stitchd_unkept_bytes", unkept.get() as f64),
        ("stitchd_plan_reserved_bytes", bytes.reserved.get() as f64),
        ("stitchd_guaranteed_bytes", account.guaranteed.get() as f64),
        ("stitchd_oldest_wait_seconds", oldest_ms as f64 / 1e3),
    ] {
        gauge!(name, labels()).set(value);
    }
    for (name, label, value, figure) in [
        ("stitchd_device_chunks", "kind", "used", account.chunks as f64),
        ("stitchd_device_chunks", "kind", "limit", account.chunks_max as f64),
        ("stitchd_largest_free_bytes", "kind", "stitchable", free.stitchable as f64),
        ("stitchd_largest_free_bytes", "kind", "contiguous", free.contiguous as f64),
        ("stitchd_fragmentation_ratio", "kind", "external", free.external()),
        ("stitchd_fragmentation_ratio", "kind", "internal", free.internal()),
    ] {
        gauge!(name, with(label, value)).set(figure);
    }
}

/// What is free on a device, and in which shape.
pub(in crate::daemon) struct Free {
    /// The largest range that somebody could still get: by stitching, or as new chunks.
    pub(in crate::daemon) stitchable: u64,
    /// The same without stitching.
    pub(in crate::daemon) contiguous: u64,
    /// All of it, wherever it is.
    all: u64,
    live: u64,
    leased: u64,
}

impl Free {
    pub(in crate::daemon) fn of(account: &AccountView, sessions: &[SessionFigures]) -> Free {
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
    pub(in crate::daemon) fn external(&self) -> f64 {
        if self.all == 0 { 0.0 } else { (1.0 - self.contiguous as f64 / self.all as f64).clamp(0.0, 1.0) }
    }

    /// 1 − live / leased: how much of what sessions hold nobody has asked for.
    pub(in crate::daemon) fn internal(&self) -> f64 {
        if self.leased == 0 { 0.0 } else { (1.0 - self.live as f64 / self.leased as f64).clamp(0.0, 1.0) }
    }
}
