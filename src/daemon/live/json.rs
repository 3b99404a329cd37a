//! What a daemon says, in JSON: the same for `--json` and for the page.
//!
//! Of a thousand sessions that is a megabyte of text: what is written is borrowed from what the daemon says, and sessions one at a time ([`Sessions`]), as a tree of values would take ten times that and the heap would keep it.

use std::cell::Cell;
use std::collections::HashMap;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

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
    ["planned", "reuse", "pool"]
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
#[derive(Serialize)]
pub struct Device<'a> {
    ordinal: u32,
    uuid: String,
    model: &'a str,
    total_bytes: u64,
    budget_bytes: u64,
    creating_bytes: u64,
    idle_bytes: u64,
    reserved_bytes: u64,
    leased_bytes: u64,
    shared_bytes: u64,
    guaranteed_bytes: u64,
    peak_leased_bytes: u64,
    destroying_bytes: u64,
    quarantined_bytes: u64,
    unkept_bytes: u64,
    foreign_bytes: u64,
    available_bytes: u64,
    waiting_requests: u64,
    refused_creates: u64,
    chunks: u64,
    chunks_max: u64,
    state: &'static str,
    mps: bool,
}

/// See [`Device`].
pub fn device(status: &v1::DeviceStatus) -> Device<'_> {
    let device = status.device.as_ref();
    let uuid: [u8; 16] = device.and_then(|device| device.uuid.as_slice().try_into().ok()).unwrap_or_default();
    Device {
        ordinal: device.map_or(0, |device| device.ordinal),
        uuid: DeviceUuid(uuid).to_string(),
        model: device.map_or("", |device| &device.model),
        total_bytes: device.map_or(0, |device| device.total_bytes),
        budget_bytes: status.budget_bytes,
        creating_bytes: status.creating_bytes,
        idle_bytes: status.idle_bytes,
        reserved_bytes: status.reserved_bytes,
        leased_bytes: status.leased_bytes,
        shared_bytes: status.shared_bytes,
        guaranteed_bytes: status.guaranteed_bytes,
        peak_leased_bytes: status.peak_leased_bytes,
        destroying_bytes: status.destroying_bytes,
        quarantined_bytes: status.quarantined_bytes,
        unkept_bytes: status.unkept_bytes,
        foreign_bytes: status.foreign_bytes,
        available_bytes: status.available_bytes,
        waiting_requests: status.waiting_requests,
        refused_creates: status.refused_creates,
        chunks: status.chunks,
        chunks_max: status.chunks_max,
        state: device_state(status),
        mps: status.is_mps,
    }
}

/// A session, as `stitchd sessions --json` has it.
#[derive(Serialize)]
pub struct Session<'a> {
    session: u64,
    name: &'a str,
    tenant: &'a str,
    pid: i32,
    priority: u32,
    revision: u64,
    lend: bool,
    is_evicted: bool,
    unanswered: u64,
    plan: Option<String>,
    devices: Vec<HeldOn>,
    limit_bytes: u64,
    leased_bytes: u64,
    chunks: u64,
    is_attached: bool,
    age_ms: u64,
    counters: Counters<'a>,
}

/// What a session holds of a device.
#[derive(Serialize)]
struct HeldOn {
    ordinal: u32,
    leased_bytes: u64,
    shared_bytes: u64,
    guarantee_bytes: u64,
}

/// All that a session counts, in the order of [`Counter::ALL`]: `null` is what its daemon does not know.
struct Counters<'a>(&'a HashMap<String, u64>);

impl Serialize for Counters<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Counter::ALL.iter().map(|(name, _)| (*name, self.0.get(*name))))
    }
}

/// See [`Session`].
pub fn session(session: &v1::SessionStatus) -> Session<'_> {
    let held = |on: &v1::HeldOn| HeldOn {
        ordinal: on.ordinal,
        leased_bytes: on.leased_bytes,
        shared_bytes: on.shared_bytes,
        guarantee_bytes: on.guarantee_bytes,
    };
    Session {
        session: session.session_id,
        name: &session.name,
        tenant: &session.tenant,
        pid: session.pid,
        priority: session.priority,
        revision: session.revision,
        lend: session.lends,
        is_evicted: session.is_evicted,
        unanswered: session.unanswered,
        plan: plan_of(session),
        devices: session.on.iter().map(held).collect(),
        limit_bytes: session.limit_bytes,
        leased_bytes: session.leased_bytes,
        chunks: session.chunks,
        is_attached: session.is_attached,
        age_ms: session.age_ms,
        counters: Counters(&session.counters),
    }
}

/// The plan that a session last asked for memory with, as `stitchd plans` names it.
pub fn plan_of(session: &v1::SessionStatus) -> Option<String> {
    (session.plan_id != 0).then(|| PlanId(session.plan_id).to_hex())
}

/// Everything at one moment, as `live.json` and `stitchd top --json` have it.
#[derive(Serialize)]
pub struct Live<'a, Sessions> {
    version: &'a str,
    driver: &'a str,
    uptime_ms: u64,
    is_draining: bool,
    devices: Vec<DeviceLive<'a>>,
    sessions: Sessions,
    waiting: Vec<Waiting<'a>>,
    events: Vec<Event<'a>>,
    samples: Samples<'a>,
}

/// A device with what is looked at only as it happens.
#[derive(Serialize)]
struct DeviceLive<'a> {
    #[serde(flatten)]
    device: Device<'a>,
    live_bytes: u64,
    rescued_bytes: u64,
    failures: u64,
    free: Free,
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Free {
    stitchable_bytes: u64,
    contiguous_bytes: u64,
    external_fragmentation: f64,
    internal_fragmentation: f64,
}

/// Chunks in a row that are the same to who looks.
#[derive(Serialize)]
struct Run {
    state: &'static str,
    session: u64,
    bytes: u64,
    chunks: u64,
}

/// Sessions as they come: each is made, written and forgotten. They can be written once.
pub struct Sessions<Each>(Cell<Option<Each>>);

impl<Each: Iterator<Item = v1::SessionStatus>> Sessions<Each> {
    /// All of these.
    pub fn of(all: impl IntoIterator<IntoIter = Each>) -> Sessions<Each> {
        Sessions(Cell::new(Some(all.into_iter())))
    }
}

impl<Each: Iterator<Item = v1::SessionStatus>> Serialize for Sessions<Each> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct One(v1::SessionStatus);
        impl Serialize for One {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                session_live(&self.0).serialize(serializer)
            }
        }
        serializer.collect_seq(self.0.take().into_iter().flatten().map(One))
    }
}

/// A session with what is worked out of its counters.
#[derive(Serialize)]
struct SessionLive<'a> {
    #[serde(flatten)]
    session: Session<'a>,
    requests: u64,
    deviations: u64,
    failures: u64,
    state: &'static str,
}

/// A request that is not answered yet.
#[derive(Serialize)]
struct Waiting<'a> {
    session: u64,
    r#for: &'a str,
    ordinal: u32,
    bytes: u64,
    is_waiting: bool,
    age_ms: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    at_ms: u64,
    kind: &'static str,
    text: &'a str,
}

/// Figures of the last minutes.
#[derive(Serialize)]
struct Samples<'a> {
    now_ms: u64,
    span_ms: u64,
    points: Vec<Point<'a>>,
}

#[derive(Serialize)]
struct Point<'a> {
    at_ms: u64,
    devices: Sampled<'a>,
}

/// The devices of a [`Point`].
struct Sampled<'a>(&'a [v1::DeviceSample]);

impl Serialize for Sampled<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Figures {
            ordinal: u32,
            leased_bytes: u64,
            live_bytes: u64,
            available_bytes: u64,
        }
        let figures = |device: &v1::DeviceSample| Figures {
            ordinal: device.ordinal,
            leased_bytes: device.leased_bytes,
            live_bytes: device.live_bytes,
            available_bytes: device.available_bytes,
        };
        serializer.collect_seq(self.0.iter().map(figures))
    }
}

/// See [`Live`]; nothing of a daemon that says nothing. The sessions are the reply's own, or come from elsewhere ([`Sessions`]).
pub fn live<Sessions: Serialize>(live: &v1::LiveReply, sessions: Sessions) -> Option<Live<'_, Sessions>> {
    let status = live.status.as_ref()?;
    let more: HashMap<u32, &v1::DeviceLive> = live.devices.iter().map(|device| (device.ordinal, device)).collect();
    let of_device = |status| {
        let device = device(status);
        let more = more.get(&device.ordinal).copied();
        device_live(device, more)
    };
    Some(Live {
        version: &status.version,
        driver: &status.driver,
        uptime_ms: status.uptime_ms,
        is_draining: status.is_draining,
        devices: status.devices.iter().map(of_device).collect(),
        sessions,
        waiting: live.waiting.iter().map(waiting).collect(),
        events: live.events.iter().map(event).collect(),
        samples: Samples {
            now_ms: status.uptime_ms,
            span_ms: live.span_ms,
            points: live.samples.iter().map(point).collect(),
        },
    })
}

fn waiting(wait: &v1::WaitingRequest) -> Waiting<'_> {
    Waiting {
        session: wait.session_id,
        r#for: &wait.name,
        ordinal: wait.ordinal,
        bytes: wait.len_bytes,
        is_waiting: wait.is_waiting,
        age_ms: wait.age_ms,
    }
}

fn event(event: &v1::Event) -> Event<'_> {
    Event { at_ms: event.at_ms, kind: event_kind(event), text: &event.text }
}

fn point(sample: &v1::Sample) -> Point<'_> {
    Point { at_ms: sample.at_ms, devices: Sampled(&sample.devices) }
}

fn device_live<'a>(device: Device<'a>, more: Option<&v1::DeviceLive>) -> DeviceLive<'a> {
    let none = v1::DeviceLive::default();
    let more = more.unwrap_or(&none);
    let run = |run: &v1::ChunkRun| Run {
        state: run_state(run),
        session: run.session_id,
        bytes: run.len_bytes,
        chunks: run.chunks,
    };
    DeviceLive {
        device,
        live_bytes: more.live_bytes,
        rescued_bytes: more.rescued_bytes,
        failures: more.failures,
        free: Free {
            stitchable_bytes: more.stitchable_bytes,
            contiguous_bytes: more.contiguous_bytes,
            external_fragmentation: more.external_fragmentation,
            internal_fragmentation: more.internal_fragmentation,
        },
        runs: more.runs.iter().map(run).collect(),
    }
}

fn session_live(status: &v1::SessionStatus) -> SessionLive<'_> {
    SessionLive {
        session: session(status),
        requests: requests(status),
        deviations: deviations(status),
        failures: counter(status, "failures"),
        state: session_state(status),
    }
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

/// `planned`, `pool` and so on.
pub fn range_kind(range: &v1::AddressRange) -> &'static str {
    use v1::address_range::Kind;
    match range.kind() {
        Kind::Planned => "planned",
        Kind::Pool => "pool",
        Kind::Stitched => "stitched",
        Kind::Private => "private",
        Kind::Unspecified => "unknown",
    }
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
        Kind::Operator => "operator",
        Kind::Ended => "ended",
        Kind::Unspecified => "unknown",
    }
}
