//! The list of metrics, with what each means.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

const GAUGES: [(&str, Option<Unit>, &str); 32] = [
    ("stitchd_build_info", None, "1, with the version."),
    ("stitchd_ready", None, "1 until the daemon is told to end."),
    ("stitchd_device_info", None, "1, with the model and the version of the driver."),
    ("stitchd_device_bytes", Some(Unit::Bytes), "Physical memory of a device by state."),
    ("stitchd_available_bytes", Some(Unit::Bytes), "What a new request could get at most."),
    (
        "stitchd_unkept_bytes",
        Some(Unit::Bytes),
        "Memory of which no descriptor is left: it stays with whoever has it mapped.",
    ),
    ("stitchd_guaranteed_bytes", Some(Unit::Bytes), "What sessions are guaranteed of a device."),
    ("stitchd_plan_reserved_bytes", Some(Unit::Bytes), "Chunks that are kept for jobs with a plan."),
    ("stitchd_largest_free_bytes", Some(Unit::Bytes), "The largest range that one request could still get."),
    ("stitchd_fragmentation_ratio", None, "external: 1 - largest contiguous / free; internal: 1 - live / leased."),
    ("stitchd_device_chunks", None, "Chunks of a device, and how many descriptors and exports allow."),
    ("stitchd_device_lost", None, "1 once the device is gone, until the daemon is restarted."),
    ("stitchd_device_draining", None, "1 while nothing more of the device is leased."),
    ("stitchd_oldest_wait_seconds", Some(Unit::Seconds), "How long the oldest request waits for others."),
    ("stitchd_session_bytes", Some(Unit::Bytes), "Memory of sessions by kind."),
    ("stitchd_sessions_unlisted", None, "Sessions that are shown together, as _other."),
    ("stitchd_sessions", None, "Sessions that are open."),
    ("stitchd_shared_ranges", None, "Ranges that several processes may have mapped."),
    ("stitchd_waiting_requests", None, "Requests for memory that wait, or are being created."),
    ("stitchd_export_slots", None, "Chunks that were exported."),
    ("stitchd_export_slots_max", None, "How many may be."),
    ("stitchd_open_fds", None, "Descriptors that the daemon has open."),
    ("stitchd_open_fds_max", None, "How many it may have."),
    ("stitchd_tasks", None, "Tasks of the daemon: some for each connection and session."),
    ("stitchd_keeper_up", None, "1 while a keeper holds what is to outlive the daemon."),
    ("stitchd_journal_bytes", Some(Unit::Bytes), "What the daemon that follows has to read."),
    ("process_open_fds", None, "Descriptors that the daemon has open."),
    ("process_max_fds", None, "How many it may have."),
    ("process_resident_memory_bytes", Some(Unit::Bytes), "Memory of the daemon's process."),
    ("process_virtual_memory_bytes", Some(Unit::Bytes), "Addresses of the daemon's process."),
    ("process_threads", None, "Threads of the daemon."),
    ("process_start_time_seconds", Some(Unit::Seconds), "When the daemon was started, since 1970."),
];

const COUNTERS: [(&str, &str); 13] = [
    ("stitchd_requests_total", "Allocations served, by pool."),
    ("stitchd_session_requests_total", "The same of the sessions that are there."),
    ("stitchd_plan_deviations_total", "Requests that did not match the plan, and entries nobody asked for."),
    ("stitchd_session_plan_deviations_total", "The same of the sessions that are there."),
    ("stitchd_allocation_failures_total", "Allocations that failed, by reason."),
    (
        "stitchd_rescued_bytes_total",
        "Bytes served by stitching when no more could be had: a contiguous allocator would have refused.",
    ),
    ("stitchd_returned_bytes_total", "Bytes that came back from sessions, by reason."),
    ("stitchd_refusals_total", "What was refused because it was not for whoever asked, by reason."),
    ("stitchd_revocations_total", "Questions for idle memory: asked, and not answered in time."),
    ("stitchd_session_starts_total", "Sessions that were opened."),
    ("stitchd_session_ends_total", "Sessions that are over, by how."),
    ("stitchd_keeper_restarts_total", "Keepers that were started in the place of one that had gone."),
    ("process_cpu_seconds_total", "Processor time of the daemon."),
];

/// What one means.
pub(super) fn meaning(name: &str) -> &'static str {
    let gauges = GAUGES.iter().map(|(name, _, text)| (name, text));
    let mut all = gauges.chain(COUNTERS.iter().map(|(name, text)| (name, text)));
    all.find(|(known, _)| **known == name).map_or("", |(_, text)| text)
}

/// Describes what is written at a scrape.
pub(super) fn describe() {
    for (name, unit, text) in GAUGES {
        match unit {
            Some(unit) => describe_gauge!(name, unit, text),
            None => describe_gauge!(name, text),
        }
    }
    for (name, text) in COUNTERS {
        describe_counter!(name, text);
    }
}

/// Describes what is recorded as it happens.
pub(super) fn describe_latencies() {
    for (name, text) in [
        ("stitchd_acquire_seconds", "Time from an acquire to its answer, by result."),
        ("stitchd_driver_call_seconds", "Time of the daemon's calls of the driver."),
        ("stitchd_revocation_seconds", "Time until a session has given back what it was asked for."),
    ] {
        describe_histogram!(name, Unit::Seconds, text);
    }
    describe_counter!("stitchd_driver_failures_total", "Calls of the driver that failed.");
}
