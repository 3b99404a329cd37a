//! What a daemon says, in JSON: the same for `--json` and for the page.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::ids::{DeviceUuid, PlanId};
use crate::runtime::Counter;
use crate::wire::v1;

/// `ready`, `draining` or `lost`.
pub fn device_state(status: &v1::DeviceStatus) -> &'static str {
    match (status.is_lost, status.is_draining) {
        (true, _) => "lost",
        (false, true) => "draining",
        (false, false) => "ready",
    }
}

/// `attached`, `asleep`, `evicted` or `detached`.
pub fn session_state(session: &v1::SessionStatus) -> &'static str {
    // What is live and has no memory sleeps.
    let is_asleep = session.leased_bytes == 0 && session.counters.get("live_bytes").is_some_and(|live| *live > 0);
    match (session.is_evicted, session.is_attached) {
        (true, _) => "evicted",
        (false, true) if is_asleep => "asleep",
        (false, true) => "attached",
        (false, false) => "detached",
    }
}

/// What a session has counted under a name.
pub fn counter(session: &v1::SessionStatus, name: &str) -> u64 {
    session.counters.get(name).copied().unwrap_or(0)
}

/// Allocations that were served, by whichever pool.
pub fn requests(session: &v1::SessionStatus) -> u64 {
    ["planned", "reuse", "stitching", "small"]
        .map(|served| counter(session, &format!("requests_{served}")))
        .into_iter()
        .fold(0, u64::saturating_add)
}

/// Requests that did not match the plan, and entries that were skipped.
pub fn deviations(session: &v1::SessionStatus) -> u64 {
    let kinds = ["late", "blocked", "unplanned", "skipped", "resized"];
    kinds.map(|kind| counter(session, &format!("deviations_{kind}"))).into_iter().fold(0, u64::saturating_add)
}

/// A device, as `stitchd status --json` has it.
pub fn device(status: &v1::DeviceStatus) -> Value {
    let device = status.device.clone().unwrap_or_default();
    let uuid: [u8; 16] = device.uuid.try_into().unwrap_or_default();
    json!({
        "ordinal": device.ordinal,
        "uuid": DeviceUuid(uuid).to_string(),
        "model": device.model,
        "total_bytes": device.total_bytes,
        "budget_bytes": status.budget_bytes,
        "creating_bytes": status.creating_bytes,
        "idle_bytes": status.idle_bytes,
        "reserved_bytes": status.reserved_bytes,
        "leased_bytes": status.leased_bytes,
        "shared_bytes": status.shared_bytes,
        "guaranteed_bytes": status.guaranteed_bytes,
        "peak_leased_bytes": status.peak_leased_bytes,
        "destroying_bytes": status.destroying_bytes,
        "quarantined_bytes": status.quarantined_bytes,
        "unkept_bytes": status.unkept_bytes,
        "foreign_bytes": status.foreign_bytes,
        "available_bytes": status.available_bytes,
        "waiting_requests": status.waiting_requests,
        "refused_creates": status.refused_creates,
        "chunks": status.chunks,
        "chunks_max": status.chunks_max,
        "state": device_state(status),
        "mps": status.is_mps,
    })
}

/// A session, as `stitchd sessions --json` has it.
pub fn session(session: &v1::SessionStatus) -> Value {
    let counters: Map<String, Value> =
        Counter::ALL.iter().map(|(name, _)| ((*name).to_owned(), json!(session.counters.get(*name)))).collect();
    json!({
        "session": session.session_id,
        "name": session.name,
        "tenant": session.tenant,
        "pid": session.pid,
        "priority": session.priority,
        "revision": session.revision,
        "lend": session.lends,
        "is_evicted": session.is_evicted,
        "unanswered": session.unanswered,
        "plan": plan_of(session),
        "devices": session.on.iter().map(|on| json!({
            "ordinal": on.ordinal,
            "leased_bytes": on.leased_bytes,
            "shared_bytes": on.shared_bytes,
            "guarantee_bytes": on.guarantee_bytes,
        })).collect::<Vec<_>>(),
        "limit_bytes": session.limit_bytes,
        "leased_bytes": session.leased_bytes,
        "chunks": session.chunks,
        "is_attached": session.is_attached,
        "age_ms": session.age_ms,
        "counters": counters,
    })
}

/// The plan that a session last asked for memory with, as `stitchd plans` names it.
pub fn plan_of(session: &v1::SessionStatus) -> Option<String> {
    (session.plan_id != 0).then(|| PlanId(session.plan_id).to_hex())
}

/// Everything at one moment, as `live.json` and `stitchd top --json` have it.
pub fn live(live: &v1::LiveReply) -> Value {
    let status = live.status.clone().unwrap_or_default();
    let more: HashMap<u32, &v1::DeviceLive> = live.devices.iter().map(|device| (device.ordinal, device)).collect();
    json!({
        "version": status.version,
        "driver": status.driver,
        "uptime_ms": status.uptime_ms,
        "is_draining": status.is_draining,
        "devices": status.devices.iter().map(|status| {
            let ordinal = status.device.as_ref().map_or(0, |device| device.ordinal);
            device_live(device(status), more.get(&ordinal).copied())
        }).collect::<Vec<_>>(),
        "sessions": status.sessions.iter().map(session_live).collect::<Vec<_>>(),
        "waiting": live.waiting.iter().map(|wait| json!({
            "session": wait.session_id,
            "for": wait.name,
            "ordinal": wait.ordinal,
            "bytes": wait.len_bytes,
            "is_waiting": wait.is_waiting,
            "age_ms": wait.age_ms,
        })).collect::<Vec<_>>(),
        "events": live.events.iter().map(|event| json!({
            "at_ms": event.at_ms,
            "kind": event_kind(event),
            "text": event.text,
        })).collect::<Vec<_>>(),
        "samples": {
            "now_ms": status.uptime_ms,
            "span_ms": live.span_ms,
            "points": live.samples.iter().map(|sample| json!({
                "at_ms": sample.at_ms,
                "devices": sample.devices.iter().map(|device| json!({
                    "ordinal": device.ordinal,
                    "leased_bytes": device.leased_bytes,
                    "live_bytes": device.live_bytes,
                    "available_bytes": device.available_bytes,
                })).collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
        },
    })
}

/// Where a session's memory lies, as `map.json` and `stitchd top --map --json` have it.
pub fn address_map(session: u64, reply: &v1::AddressMapReply) -> Value {
    let range = |range: &v1::AddressRange| {
        json!({
            "kind": range_kind(range),
            "address": format!("{:#x}", range.address),
            "bytes": range.len_bytes,
            "live_bytes": range.live_bytes,
            "largest_free_bytes": range.largest_free_bytes,
            "used": range.used,
        })
    };
    let device = |device: &v1::DeviceMap| {
        let map = device.map.clone().unwrap_or_default();
        json!({
            "ordinal": device.ordinal,
            "age_ms": device.age_ms,
            "cell_bytes": map.cell_bytes,
            "ranges": map.ranges.iter().map(range).collect::<Vec<_>>(),
            "others": { "ranges": map.other_ranges, "bytes": map.other_bytes, "live_bytes": map.other_live_bytes },
        })
    };
    json!({ "session": session, "devices": reply.devices.iter().map(device).collect::<Vec<_>>() })
}

/// `planned`, `stitching` and so on.
pub fn range_kind(range: &v1::AddressRange) -> &'static str {
    use v1::address_range::Kind;
    match range.kind() {
        Kind::Planned => "planned",
        Kind::Packed => "packed",
        Kind::Stitching => "stitching",
        Kind::Stitched => "stitched",
        Kind::Small => "small",
        Kind::Private => "private",
        Kind::Unspecified => "unknown",
    }
}

fn device_live(mut shown: Value, more: Option<&v1::DeviceLive>) -> Value {
    let more = more.cloned().unwrap_or_default();
    shown["live_bytes"] = json!(more.live_bytes);
    shown["rescued_bytes"] = json!(more.rescued_bytes);
    shown["failures"] = json!(more.failures);
    shown["free"] = json!({
        "stitchable_bytes": more.stitchable_bytes,
        "contiguous_bytes": more.contiguous_bytes,
        "external_fragmentation": more.external_fragmentation,
        "internal_fragmentation": more.internal_fragmentation,
    });
    let run = |run: &v1::ChunkRun| {
        json!({
            "state": run_state(run),
            "session": run.session_id,
            "bytes": run.len_bytes,
            "chunks": run.chunks,
        })
    };
    shown["runs"] = more.runs.iter().map(run).collect();
    shown
}

fn session_live(status: &v1::SessionStatus) -> Value {
    let mut shown = session(status);
    shown["requests"] = json!(requests(status));
    shown["deviations"] = json!(deviations(status));
    shown["failures"] = json!(counter(status, "failures"));
    shown["state"] = json!(session_state(status));
    shown
}

/// `leased`, `idle` and so on.
pub fn run_state(run: &v1::ChunkRun) -> &'static str {
    use v1::chunk_run::State;
    match run.state() {
        State::Creating => "creating",
        State::Idle => "idle",
        State::Reserved => "reserved",
        State::Leased => "leased",
        State::Shared => "shared",
        State::Quarantined => "quarantined",
        State::Unspecified => "unknown",
    }
}

/// What happened, in a word or two.
pub fn event_kind(event: &v1::Event) -> &'static str {
    use v1::event::Kind;
    match event.kind() {
        Kind::Opened => "opened",
        Kind::Closed => "closed",
        Kind::Died => "died",
        Kind::Gave => "gave back",
        Kind::NoAnswer => "no answer",
        Kind::DeviceLost => "device lost",
        Kind::TakenOver => "taken over",
        Kind::Unspecified => "unknown",
    }
}
