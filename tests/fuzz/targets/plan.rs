//! Plan files. Few changes survive their checksum, so the body of an input is also read with the header and the checksum that it should have.

use stitchd::ids::StreamId;
use stitchd::plan::{
    Detour, DetourRequest, DynamicEntry, Entry, Expiries, Fingerprint, Job, Lane, Plan, Position, Provenance,
    ReuseSpaces, format, span_of,
};
use stitchd::pool::Request;
use stitchd::pool::planned::{PlannedPool, Served};
use stitchd::trace::{ContextKey, Cut};
use stitchd::units::{Bytes, DeviceAddress, Lifetime, PlanOffset, Span};

/// Behind the name, the version and the length.
const BODY_AT: usize = 16;
const CHECKSUM_LEN: usize = 4;

/// Larger pools are read and not served from: no device has so much.
const POOL_MAX: Bytes = Bytes::gib(64);

pub(crate) fn read(bytes: &[u8]) {
    check(bytes);
    let body = bytes.get(BODY_AT..bytes.len().saturating_sub(CHECKSUM_LEN)).unwrap_or(bytes);
    check(&sealed(body));
}

fn check(bytes: &[u8]) {
    let Ok(plan) = format::read(bytes) else { return };
    // A plan has one form: its name is a checksum of it.
    assert_eq!(format::write(&plan), bytes);
    let lanes = plan.lanes();
    let expiries = Expiries::of(&lanes);
    let count = plan.entries.len() as u32;
    assert!((0..count).all(|entry| expiries.before(entry).iter().all(|other| *other < count)));
    if plan.pool_len <= POOL_MAX {
        for lane in &lanes {
            let spaces = ReuseSpaces::of(lane);
            for number in 0..lane.plan.dynamic.len() as u32 {
                let Some(group) = spaces.group(number) else { continue };
                let ends = spaces.spaces(group).iter().map(|space| span_of(*space).end().get());
                assert!(ends.max().unwrap_or(0) <= plan.pool_len.get());
            }
        }
        serve(&plan);
    }
}

/// A job that goes by the plan, and one that frees nothing until the end.
fn serve(plan: &Plan) {
    let span = Span::new(DeviceAddress::new(1 << 40), plan.pool_len).expect("it lies far below the end");
    let Ok(mut pool) = PlannedPool::new(plan, span) else { return };
    for frees in [true, false] {
        let mut live: Vec<DeviceAddress> = Vec::new();
        for entry in &plan.entries {
            let request = Request { context: entry.context, ..Request::of(entry.bytes) };
            let served = pool.alloc(&Request { stream: entry.lane.stream, thread: entry.lane.role, ..request });
            if let Served::At(address) | Served::Reused(address) = served {
                assert!(span.contains(address));
                live.push(address);
            }
            if frees && let Some(address) = live.pop() {
                pool.free(address).expect("it is live");
            }
        }
        for entry in &plan.dynamic {
            let request = Request {
                context: entry.context,
                stream: entry.lane.stream,
                thread: entry.lane.role,
                is_dynamic: true,
                ..Request::of(Bytes::kib(1))
            };
            if let Served::Reused(address) = pool.alloc(&request) {
                live.push(address);
            }
        }
        for detour in &plan.detours {
            let of_lane = plan.entries.iter().enumerate().filter(|(_, entry)| entry.lane == detour.lane);
            let before = of_lane.filter(|(at, _)| (plan.cycle_start..detour.from as usize).contains(at));
            let asked = before.map(|(_, entry)| (entry.bytes, entry.context));
            let asked = asked.chain(detour.requests.iter().map(|of| (of.bytes, of.context)));
            pool.mark_iteration();
            for (bytes, context) in asked {
                let Lane { stream, role } = detour.lane;
                let request = Request { context, stream, thread: role, ..Request::of(bytes) };
                if let Served::At(address) | Served::Reused(address) = pool.alloc(&request) {
                    assert!(span.contains(address));
                    live.push(address);
                }
            }
        }
        pool.invariants().expect("served as planned");
        live.into_iter().for_each(|address| assert!(pool.free(address).is_some()));
        pool.mark_iteration();
    }
    assert_eq!(pool.live_allocations(), 0);
}

/// A body with all that belongs around it.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"STPLAN".to_vec();
    bytes.extend_from_slice(&format::VERSION.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(body);
    let checksum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

fn entry(bytes: u64, offset: u64, stream: u64, lifetime: Lifetime) -> Entry {
    Entry {
        bytes: Bytes::new(bytes),
        offset: PlanOffset::new(offset),
        lane: Lane::on(StreamId(stream)),
        context: ContextKey(offset | 1),
        lifetime,
        again: None,
    }
}

fn varies(before: u32, interval: Option<Lifetime>) -> DynamicEntry {
    DynamicEntry { before, lane: Lane::on(StreamId(0)), context: ContextKey(77), interval }
}

/// What is there for good, a cycle of three, and two iterations of other kinds.
fn with_detours() -> Plan {
    let cycle = [(1000, 1024, 1), (700, 2048, 2), (3000, 3072, 3)].map(|(bytes, offset, at)| {
        let again = Some(Lifetime::new(at + 3, at + 4));
        Entry { again, ..entry(bytes, offset, 0, Lifetime::new(at, at + 1)) }
    });
    let request = |bytes: u64, offset: Option<u64>| DetourRequest {
        bytes: Bytes::new(bytes),
        context: ContextKey(bytes),
        offset: offset.map(PlanOffset::new),
    };
    let lane = Lane::on(StreamId(0));
    let detours = vec![
        Detour { lane, from: 1, to: 4, requests: vec![request(900, Some(1024)), request(9, None)] },
        Detour { lane, from: 2, to: 1, requests: Vec::new() },
        Detour { lane, from: 3, to: 4, requests: vec![request(5000, Some(8192)), request(1, Some(2048))] },
    ];
    let entries = [&[entry(512, 0, 0, Lifetime::new(0, 7))][..], &cycle].concat();
    Plan { pool_len: Bytes::kib(16), entries, cycle_start: 1, detours, ..Plan::default() }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let cut = Some(Cut { iteration: 1, events: 9, requests: 3, live: Bytes::mib(7) });
    let provenance = Provenance {
        iteration: 1,
        solver: "by hand".into(),
        lower_bound: Bytes::new(2048),
        cut,
        ..Provenance::default()
    };
    let two_streams = [entry(0, 0, 0, Lifetime::new(0, 9)), entry(1000, 512, 5, Lifetime::new(1, 3))];
    let mut again = entry(512, 1536, 0, Lifetime::new(2, 5));
    again.again = Some(Lifetime::new(7, 9));
    let same_place = [entry(3000, 2048, 0, Lifetime::new(3, 4)), entry(2048, 2048, 0, Lifetime::new(4, 5))];
    let entries = [&two_streams[..], &[again], &same_place].concat();
    let far = vec![entry(u64::MAX >> 2, 0, u64::MAX, Lifetime::new(u64::MAX - 2, u64::MAX))];
    let plans = [
        Plan {
            pool_len: Bytes::new(5120),
            entries,
            cycle_start: 2,
            dynamic: vec![varies(1, Some(Lifetime::new(0, 1))), varies(3, None), varies(4, Some(Lifetime::new(8, 9)))],
            dynamic_cycle_start: 1,
            detours: Vec::new(),
            job: Job { fingerprint: Fingerprint(0x1234_5678_9abc), position: Position::new(200, 256) },
            provenance: provenance.clone(),
        },
        Plan { pool_len: Bytes::gib(1), ..Plan::default() },
        Plan { pool_len: Bytes::MAX, entries: far, cycle_start: 1, provenance, ..Plan::default() },
    ];
    let mut seeds: Vec<_> = plans.iter().map(format::write).collect();
    let served = format::write(&with_detours());
    assert!(format::read(&served).is_ok(), "one at least is a plan");
    seeds.extend([served, b"STPLAN".to_vec(), b"STPLAN\x05\x00".to_vec()]);
    seeds
}
