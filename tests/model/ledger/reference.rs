//! The second ledger: three lists, and an imaginary driver with bytes of its own. It holds every effect of the first against the rules before it writes it
//! down: who may have a chunk, what a device can give, what a session may hold, whose turn it is.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use stitchd::ids::{ChunkId, DeviceId, PlanId, RequestId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Command, Effect, EndReason, Holder, Ledger, LedgerError, Refusal, ReturnedBytes, Shortage};
use stitchd::units::Bytes;

use super::UNIT;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Is {
    Creating(Option<RequestId>),
    Idle,
    Reserved(PlanId),
    /// Set aside for a request; from the chunks of a plan, or from the idle ones.
    Claimed(RequestId, Option<PlanId>),
    Leased(SessionId),
    Destroying,
    Quarantined,
}

#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) id: ChunkId,
    pub(super) device: DeviceId,
    pub(super) len: Bytes,
    pub(super) is: Is,
    pub(super) granted_to: Option<SessionId>,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) limit: Bytes,
    pub(super) priority: u32,
    pub(super) is_attached: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Phase {
    Waiting,
    Creating {
        missing: usize,
        failure: Option<Shortage>,
    },
    /// All creates are answered, and this request is to be refused for it.
    Lost {
        failure: Shortage,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) holder: Holder,
    pub(super) device: DeviceId,
    pub(super) parts: Vec<Part>,
    pub(super) plan: Option<PlanId>,
    pub(super) asked_ms: u64,
    pub(super) deadline_ms: u64,
    pub(super) is_starting: bool,
    pub(super) refused_ms: u64,
    pub(super) refused_creates: u32,
    pub(super) phase: Phase,
}

impl Request {
    pub(super) fn bytes(&self) -> Bytes {
        self.parts.iter().map(|part| Bytes::new(part.len.get() * part.count)).sum()
    }
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) id: DeviceId,
    pub(super) total: Bytes,
    /// What the ledger was told.
    pub(super) known_foreign: Bytes,
    pub(super) ceiling: Option<Bytes>,
    pub(super) refused_creates: u64,
    pub(super) peak_leased: Bytes,
    /// What others really hold.
    pub(super) foreign: Bytes,
    pub(super) chunks_max: u64,
    pub(super) is_lost: bool,
}

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) ledger: Ledger,
    pub(super) devices: Vec<Device>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) sessions: Vec<Session>,
    pub(super) requests: Vec<Request>,
    pub(super) answered: BTreeSet<RequestId>,
    pub(super) granted: u64,
    pub(super) refused: BTreeMap<&'static str, u64>,
    pub(super) returned: ReturnedBytes,
    pub(super) is_closed: bool,
    pub(super) now_ms: u64,
    pub(super) last_chunk: u64,
    pub(super) last_session: u64,
    pub(super) last_request: u64,
    /// Creates that have to come before anything else does.
    pub(super) to_come: Vec<(Option<RequestId>, Bytes)>,
}

impl World {
    pub(super) fn new(totals: &[Bytes], chunks_max: u64) -> World {
        let mut world = World::default();
        for (ordinal, total) in totals.iter().enumerate() {
            world.step(Command::AddDevice { device: DeviceId(ordinal as u32), total: *total, chunks_max });
        }
        world
    }

    // === The lists

    pub(super) fn device(&self, id: DeviceId) -> &Device {
        self.devices.iter().find(|device| device.id == id).unwrap()
    }

    pub(super) fn device_mut(&mut self, id: DeviceId) -> &mut Device {
        self.devices.iter_mut().find(|device| device.id == id).unwrap()
    }

    pub(super) fn session(&self, id: SessionId) -> Option<&Session> {
        self.sessions.iter().find(|session| session.id == id)
    }

    pub(super) fn request(&self, id: RequestId) -> Option<&Request> {
        self.requests.iter().find(|request| request.id == id)
    }

    pub(super) fn request_mut(&mut self, id: RequestId) -> &mut Request {
        self.requests.iter_mut().find(|request| request.id == id).unwrap()
    }

    pub(super) fn chunk(&self, id: ChunkId) -> Option<&Chunk> {
        self.chunks.iter().find(|chunk| chunk.id == id)
    }

    pub(super) fn chunk_mut(&mut self, id: ChunkId) -> &mut Chunk {
        self.chunks.iter_mut().find(|chunk| chunk.id == id).unwrap()
    }

    pub(super) fn bytes(&self, device: DeviceId, matches: impl Fn(&Chunk) -> bool) -> Bytes {
        self.chunks.iter().filter(|chunk| chunk.device == device && matches(chunk)).map(|chunk| chunk.len).sum()
    }

    pub(super) fn creating(&self, device: DeviceId) -> Bytes {
        self.bytes(device, |chunk| matches!(chunk.is, Is::Creating(_)))
    }

    pub(super) fn destroying(&self, device: DeviceId) -> Bytes {
        self.bytes(device, |chunk| chunk.is == Is::Destroying)
    }

    /// Bytes that the driver has given out.
    pub(super) fn existing(&self, device: DeviceId) -> Bytes {
        self.bytes(device, |chunk| !matches!(chunk.is, Is::Creating(_)))
    }

    pub(super) fn budget(&self, device: DeviceId) -> Bytes {
        let device = self.device(device);
        let known = device.total.saturating_sub(device.known_foreign);
        if device.is_lost { Bytes::ZERO } else { device.ceiling.unwrap_or(known).min(known) }
    }

    pub(super) fn count(&self, device: DeviceId, matches: impl Fn(&Chunk) -> bool) -> u64 {
        self.chunks.iter().filter(|chunk| chunk.device == device && matches(chunk)).count() as u64
    }

    /// Chunks that could be promised at once.
    pub(super) fn chunk_room(&self, device: DeviceId) -> u64 {
        let known = self.device(device);
        if known.is_lost { 0 } else { known.chunks_max.saturating_sub(self.count(device, |_| true)) }
    }

    /// The same, once all that is idle or on its way back is gone.
    pub(super) fn chunk_room_at_most(&self, device: DeviceId) -> u64 {
        self.chunk_room(device) + self.count(device, |chunk| matches!(chunk.is, Is::Destroying | Is::Idle))
    }

    /// Bytes that could be promised at once.
    pub(super) fn room(&self, device: DeviceId) -> Bytes {
        self.budget(device).saturating_sub(self.bytes(device, |_| true))
    }

    /// Leased, and promised to requests whose chunks are being created.
    pub(super) fn held(&self, session: SessionId, device: DeviceId) -> Bytes {
        let is_promised = |request: &&Request| {
            request.holder == Holder::Session(session)
                && request.device == device
                && matches!(request.phase, Phase::Creating { .. })
        };
        let promised: Bytes = self.requests.iter().filter(is_promised).map(Request::bytes).sum();
        promised + self.bytes(device, |chunk| chunk.is == Is::Leased(session))
    }

    pub(super) fn held_everywhere(&self, session: SessionId) -> Bytes {
        self.devices.iter().map(|device| self.held(session, device.id)).sum()
    }

    pub(super) fn is_over_limit(&self, request: &Request) -> bool {
        let Holder::Session(session) = request.holder else { return false };
        self.held_everywhere(session) + request.bytes() > self.session(session).unwrap().limit
    }

    pub(super) fn is_starting(&self, holder: Holder, device: DeviceId) -> bool {
        match holder {
            Holder::Session(session) => self.held(session, device).is_zero(),
            Holder::Plan(_) => true,
        }
    }

    /// Who waits on a device, whoever is to be served first in front.
    pub(super) fn queue(&self, device: DeviceId) -> Vec<&Request> {
        let waits = |request: &&Request| request.device == device && request.phase == Phase::Waiting;
        let mut queue: Vec<_> = self.requests.iter().filter(waits).collect();
        queue.sort_by_key(|request| {
            let priority = match request.holder {
                Holder::Session(session) => self.session(session).map_or(0, |session| session.priority),
                Holder::Plan(_) => 0,
            };
            (Reverse(priority), request.is_starting, request.id)
        });
        queue
    }

    /// Chunks of `len` that a request may be given: first those of its plan, then its session's own, then those that nobody ever had.
    pub(super) fn usable(&self, request: &Request, len: Bytes) -> Vec<&Chunk> {
        let rank = |chunk: &&Chunk| match (chunk.is, chunk.granted_to) {
            (Is::Reserved(plan), _) if Some(plan) == request.plan => Some(0),
            (Is::Idle, Some(session)) if request.holder == Holder::Session(session) => Some(1),
            (Is::Idle, None) => Some(2),
            _ => None,
        };
        let mut usable: Vec<_> = self
            .chunks
            .iter()
            .filter(|chunk| chunk.device == request.device && chunk.len == len && rank(chunk).is_some())
            .collect();
        usable.sort_by_key(|chunk| (rank(chunk), chunk.id));
        usable
    }

    /// Bytes that have to be created for a request.
    pub(super) fn to_create(&self, request: &Request) -> Bytes {
        let missing = |part: &Part| part.count.saturating_sub(self.usable(request, part.len).len() as u64);
        request.parts.iter().map(|part| Bytes::new(part.len.get() * missing(part))).sum()
    }

    /// Chunks that have to be created for a request.
    pub(super) fn chunks_to_create(&self, request: &Request) -> u64 {
        let missing = |part: &Part| part.count.saturating_sub(self.usable(request, part.len).len() as u64);
        request.parts.iter().map(missing).sum()
    }

    /// It could be served at once.
    pub(super) fn has_room(&self, request: &Request) -> bool {
        self.to_create(request) <= self.room(request.device)
            && self.chunks_to_create(request) <= self.chunk_room(request.device)
    }

    /// Idle bytes that a request has no use for, and in how many chunks.
    pub(super) fn in_its_way(&self, request: &Request) -> (Bytes, u64) {
        let mut useful = BTreeSet::new();
        for part in &request.parts {
            useful.extend(self.usable(request, part.len).into_iter().take(part.count as usize).map(|chunk| chunk.id));
        }
        let is_idle = |chunk: &Chunk| chunk.is == Is::Idle && !useful.contains(&chunk.id);
        (self.bytes(request.device, is_idle), self.count(request.device, is_idle))
    }

    // === Steps

    pub(super) fn step(&mut self, command: Command) {
        let expected = self.error_of(&command);
        match (self.ledger.step(command.clone()), expected) {
            (Err(error), Some(expected)) => assert_eq!(error, expected, "{command:?}"),
            (Ok(effects), None) => self.follow(&command, effects),
            (outcome, expected) => panic!("{command:?}: {outcome:?}, and {expected:?} was expected"),
        }
        self.check(&command);
    }

    pub(super) fn error_of(&self, command: &Command) -> Option<LedgerError> {
        let no_device = |device: DeviceId| {
            (!self.devices.iter().any(|known| known.id == device)).then_some(LedgerError::NoDevice(device))
        };
        let no_session =
            |session: SessionId| self.session(session).is_none().then_some(LedgerError::NoSession(session));
        let unasked = |chunk: ChunkId, is_asked: &dyn Fn(Is) -> bool| {
            (!self.chunk(chunk).is_some_and(|found| is_asked(found.is))).then_some(LedgerError::Unasked(chunk))
        };
        match command {
            Command::AddDevice { device, .. } => {
                no_device(*device).is_none().then_some(LedgerError::DeviceExists(*device))
            }
            Command::Observe { device, .. } | Command::Warm { device, .. } | Command::Lose { device } => {
                no_device(*device)
            }
            Command::Open { session, .. } => {
                self.session(*session).map(|session| LedgerError::SessionExists(session.id))
            }
            Command::Detach { session } | Command::End { session, .. } => no_session(*session),
            Command::Acquire { request, holder, device, parts, .. } => {
                let mut lens: Vec<_> = parts.iter().map(|part| part.len).collect();
                lens.sort();
                lens.dedup();
                let is_wrong = |part: &Part| part.len < UNIT || part.len > Bytes::gib(4) || part.count == 0;
                if parts.is_empty() || parts.iter().any(is_wrong) || lens.len() != parts.len() {
                    return Some(LedgerError::Parts);
                }
                if self.request(*request).is_some() {
                    return Some(LedgerError::RequestExists(*request));
                }
                no_device(*device).or_else(|| match holder {
                    Holder::Session(session) => no_session(*session).or_else(|| {
                        (!self.session(*session).unwrap().is_attached).then_some(LedgerError::Detached(*session))
                    }),
                    Holder::Plan(_) => None,
                })
            }
            Command::Cancel { .. } | Command::Close | Command::Tick { .. } => None,
            Command::Release { session, chunks } => no_session(*session).or_else(|| {
                let is_held =
                    |chunk: &ChunkId| self.chunk(*chunk).is_some_and(|found| found.is == Is::Leased(*session));
                let at = (0..chunks.len()).find(|at| !is_held(&chunks[*at]) || chunks[..*at].contains(&chunks[*at]))?;
                Some(LedgerError::NotHeld { session: *session, chunk: chunks[at] })
            }),
            Command::Unreserve { plan } => {
                let is_for_it = |chunk: &Chunk| {
                    chunk.is == Is::Reserved(*plan) || matches!(chunk.is, Is::Claimed(_, Some(from)) if from == *plan)
                };
                let is_asked_for = self.requests.iter().any(|request| request.holder == Holder::Plan(*plan));
                (!is_asked_for && !self.chunks.iter().any(is_for_it)).then_some(LedgerError::NoPlan(*plan))
            }
            Command::Created { chunk } | Command::CreateFailed { chunk, .. } => {
                unasked(*chunk, &|is| matches!(is, Is::Creating(_)))
            }
            Command::Destroyed { chunk } => unasked(*chunk, &|is| matches!(is, Is::Destroying | Is::Quarantined)),
            Command::DestroyFailed { chunk } => unasked(*chunk, &|is| is == Is::Destroying),
        }
    }

    pub(super) fn follow(&mut self, command: &Command, effects: Vec<Effect>) {
        self.begin(command);
        let mut given_up: BTreeMap<DeviceId, Bytes> = BTreeMap::new();
        for effect in effects {
            assert!(
                self.to_come.is_empty() || matches!(effect, Effect::Create { .. }),
                "{effect:?} came before the rest of {:?}",
                self.to_come
            );
            match effect {
                Effect::Create { chunk, device, len } => self.create(chunk, device, len),
                Effect::Destroy { chunk } => self.destroy(command, chunk, &mut given_up),
                Effect::Grant { request, holder, chunks } => self.grant(request, holder, &chunks),
                Effect::Refuse { request, holder, refusal } => self.refuse(command, request, holder, &refusal),
            }
        }
        self.end(command);
        for (device, last) in given_up {
            let coming = self.room(device) + self.destroying(device);
            let chunks_coming = self.chunk_room(device) + self.count(device, |chunk| chunk.is == Is::Destroying);
            let queue = self.queue(device);
            let first = queue.first().expect("idle chunks are given up for somebody");
            let (wanted, chunks) = (self.to_create(first), self.chunks_to_create(first));
            assert!(wanted <= coming && chunks <= chunks_coming, "idle chunks are given up and do not help");
            let is_needed = wanted > coming - last || chunks > chunks_coming - 1;
            assert!(is_needed, "more idle chunks are given up than needed");
        }
    }

    /// What a command changes by itself.
    pub(super) fn begin(&mut self, command: &Command) {
        match command {
            Command::AddDevice { device, total, chunks_max } => self.devices.push(Device {
                id: *device,
                total: *total,
                known_foreign: Bytes::ZERO,
                ceiling: None,
                refused_creates: 0,
                peak_leased: Bytes::ZERO,
                foreign: Bytes::ZERO,
                chunks_max: *chunks_max,
                is_lost: false,
            }),
            Command::Lose { device } => self.device_mut(*device).is_lost = true,
            Command::Observe { device, free } => {
                if self.creating(*device).is_zero() && self.destroying(*device).is_zero() {
                    let ours = self.bytes(*device, |_| true);
                    let device = self.device_mut(*device);
                    device.known_foreign = device.total.saturating_sub(*free).saturating_sub(ours);
                    device.ceiling = None;
                }
            }
            Command::Open { session, limit, priority } => {
                self.sessions.push(Session { id: *session, limit: *limit, priority: *priority, is_attached: true })
            }
            Command::Detach { session } => {
                self.sessions.iter_mut().find(|known| known.id == *session).unwrap().is_attached = false;
            }
            Command::Acquire { request, holder, device, parts, plan, wait_ms } => self.requests.push(Request {
                id: *request,
                holder: *holder,
                device: *device,
                parts: parts.clone(),
                plan: *plan,
                asked_ms: self.now_ms,
                deadline_ms: self.now_ms + wait_ms,
                is_starting: self.is_starting(*holder, *device),
                refused_creates: 0,
                refused_ms: 0,
                phase: Phase::Waiting,
            }),
            Command::Release { chunks, .. } => {
                for chunk in chunks {
                    self.chunk_mut(*chunk).is = Is::Idle;
                    self.returned.release += self.chunk(*chunk).unwrap().len;
                }
            }
            Command::Unreserve { plan } => {
                for chunk in &mut self.chunks {
                    match chunk.is {
                        Is::Reserved(of) if of == *plan => chunk.is = Is::Idle,
                        Is::Claimed(request, Some(of)) if of == *plan => chunk.is = Is::Claimed(request, None),
                        _ => {}
                    }
                }
            }
            Command::Warm { device, part } => {
                let here = |chunk: &&Chunk| chunk.device == *device;
                let is_creating = self.chunks.iter().filter(here).any(|chunk| matches!(chunk.is, Is::Creating(_)));
                if self.queue(*device).is_empty() && !is_creating {
                    let is_warm =
                        |chunk: &&Chunk| chunk.is == Is::Idle && chunk.len == part.len && chunk.granted_to.is_none();
                    let warm = self.chunks.iter().filter(here).filter(is_warm).count() as u64;
                    let missing = part.count.saturating_sub(warm);
                    let count = (self.room(*device).get() / part.len.get()).min(missing).min(self.chunk_room(*device));
                    self.to_come = vec![(None, part.len); count as usize];
                }
            }
            Command::Created { chunk } => self.begin_created(*chunk),
            Command::CreateFailed { chunk, why } => self.begin_create_failed(*chunk, *why),
            Command::Destroyed { chunk } => self.chunks.retain(|known| known.id != *chunk),
            Command::DestroyFailed { chunk } => self.chunk_mut(*chunk).is = Is::Quarantined,
            Command::Tick { now_ms } => self.now_ms = self.now_ms.max(*now_ms),
            Command::Close => self.is_closed = true,
            Command::End { .. } | Command::Cancel { .. } => {}
        }
    }

    /// The request that a chunk is created for, unless it was given up.
    pub(super) fn created_for(&self, chunk: ChunkId) -> Option<RequestId> {
        let Is::Creating(request) = self.chunk(chunk).unwrap().is else { panic!("{chunk} is not being created") };
        request.filter(|request| self.request(*request).is_some())
    }

    pub(super) fn begin_created(&mut self, chunk: ChunkId) {
        let request = self.created_for(chunk);
        self.chunk_mut(chunk).is = request.map_or(Is::Idle, |request| Is::Claimed(request, None));
        let device = self.chunk(chunk).unwrap().device;
        let existing = self.existing(device);
        let ceiling = &mut self.device_mut(device).ceiling;
        *ceiling = ceiling.map(|ceiling| ceiling.max(existing));
        if let Some(request) = request {
            self.note_answer(request, None);
        }
    }

    pub(super) fn begin_create_failed(&mut self, chunk: ChunkId, why: Shortage) {
        let request = self.created_for(chunk);
        let device = self.chunk(chunk).unwrap().device;
        self.chunks.retain(|known| known.id != chunk);
        let existing = self.existing(device);
        let device = self.device_mut(device);
        device.refused_creates += 1;
        if why == Shortage::Memory {
            device.ceiling = Some(existing);
        }
        if let Some(request) = request {
            self.note_answer(request, Some(why));
        }
    }

    /// A create for a request was answered; a failure says what has run out.
    pub(super) fn note_answer(&mut self, id: RequestId, why: Option<Shortage>) {
        let now_ms = self.now_ms;
        let request = self.request_mut(id);
        let Phase::Creating { missing, failure } = &mut request.phase else { panic!("{id} creates nothing") };
        *missing -= 1;
        *failure = why.or(*failure);
        let (0, Some(failure)) = (*missing, *failure) else { return };
        request.refused_creates = if now_ms < request.refused_ms + 1_000 { request.refused_creates + 1 } else { 1 };
        request.refused_ms = now_ms;
        request.phase = match (failure, request.refused_creates) {
            (Shortage::Memory, ..3) => Phase::Waiting,
            _ => Phase::Lost { failure },
        };
        let (holder, device) = (request.holder, request.device);
        self.put_back(id);
        self.request_mut(id).is_starting = self.is_starting(holder, device);
    }

    /// What was set aside for a request lies where it lay.
    pub(super) fn put_back(&mut self, request: RequestId) {
        for chunk in &mut self.chunks {
            match chunk.is {
                Is::Claimed(of, from) if of == request => chunk.is = from.map_or(Is::Idle, Is::Reserved),
                Is::Creating(Some(of)) if of == request => chunk.is = Is::Creating(None),
                _ => {}
            }
        }
    }

    /// Sets aside what there is for a request; what is missing has to be created next.
    pub(super) fn promise(&mut self, id: RequestId) {
        let request = self.request(id).unwrap().clone();
        assert_eq!(self.queue(request.device).first().map(|first| first.id), Some(id), "others come before {id}");
        assert!(self.has_room(&request), "{id} is promised more than there is");
        assert!(!self.is_over_limit(&request), "{id} is promised more than its session may hold");
        for part in &request.parts {
            let usable = self.usable(&request, part.len);
            let claimed: Vec<_> = usable.into_iter().take(part.count as usize).map(|chunk| chunk.id).collect();
            let missing = part.count as usize - claimed.len();
            self.to_come.extend(vec![(Some(id), part.len); missing]);
            for chunk in claimed {
                let chunk = self.chunk_mut(chunk);
                let from = if let Is::Reserved(plan) = chunk.is { Some(plan) } else { None };
                chunk.is = Is::Claimed(id, from);
            }
        }
        self.request_mut(id).phase = Phase::Creating { missing: self.to_come.len(), failure: None };
    }

    pub(super) fn create(&mut self, chunk: ChunkId, device: DeviceId, len: Bytes) {
        assert!(chunk.0 > self.last_chunk, "{chunk} is used twice");
        self.last_chunk = chunk.0;
        if self.to_come.is_empty() {
            let first = self.queue(device).first().map(|first| first.id);
            self.promise(first.expect("chunks are created for somebody"));
        }
        assert!(!self.to_come.is_empty(), "{chunk} is created for nobody");
        let (request, expected) = self.to_come.remove(0);
        assert_eq!(len, expected);
        assert!(request.is_none_or(|request| self.request(request).unwrap().device == device));
        self.chunks.push(Chunk { id: chunk, device, len, is: Is::Creating(request), granted_to: None });
        assert!(self.bytes(device, |_| true) <= self.budget(device), "more is promised than {device} has");
        let chunks_max = self.device(device).chunks_max;
        assert!(self.count(device, |_| true) <= chunks_max, "{device} has more chunks than it may have");
    }

    pub(super) fn destroy(&mut self, command: &Command, chunk: ChunkId, given_up: &mut BTreeMap<DeviceId, Bytes>) {
        let found = self.chunk(chunk).expect("what is destroyed exists").clone();
        match (found.is, command) {
            (Is::Leased(holder), Command::End { session, reason }) if holder == *session => match reason {
                EndReason::Closed => self.returned.release += found.len,
                EndReason::Died => self.returned.death += found.len,
            },
            (Is::Idle, Command::End { session, .. }) if found.granted_to == Some(*session) => {}
            (Is::Idle | Is::Reserved(_), _) if self.device(found.device).is_lost => {}
            (Is::Idle, _) => {
                given_up.insert(found.device, found.len);
            }
            _ => panic!("{found:?} is destroyed"),
        }
        self.chunk_mut(chunk).is = Is::Destroying;
    }

    pub(super) fn grant(&mut self, id: RequestId, holder: Holder, chunks: &[(ChunkId, Bytes)]) {
        if self.request(id).expect("only what was asked for is granted").phase == Phase::Waiting {
            self.promise(id);
            assert!(self.to_come.is_empty(), "{id} is granted before its chunks are there");
        }
        let request = self.request(id).unwrap().clone();
        assert_eq!(request.phase, Phase::Creating { missing: 0, failure: None }, "{id} is granted too early");
        assert!(!self.device(request.device).is_lost, "{id} is granted what is lost");
        assert_eq!(request.holder, holder);
        let mut left = chunks;
        for part in &request.parts {
            let (these, rest) = left.split_at(part.count as usize);
            assert!(these.iter().all(|(_, len)| *len == part.len), "{id} is not granted what it asked for: {chunks:?}");
            left = rest;
        }
        assert_eq!(left, [], "{id} is granted more than it asked for");
        for (chunk, len) in chunks {
            let chunk = self.chunk_mut(*chunk);
            assert_eq!(chunk.len, *len);
            assert!(matches!(chunk.is, Is::Claimed(of, _) if of == id), "{chunk:?} is granted to {id}");
            match holder {
                Holder::Session(session) => {
                    let others = chunk.granted_to.replace(session).filter(|former| *former != session);
                    assert_eq!(others, None, "{chunk:?} was another session's and is granted again");
                    chunk.is = Is::Leased(session);
                }
                Holder::Plan(plan) => {
                    assert_eq!(chunk.granted_to, None, "{chunk:?} was a session's and is reserved");
                    chunk.is = Is::Reserved(plan);
                }
            }
        }
        self.answer(id);
        if let Holder::Session(session) = holder {
            let session = self.session(session).unwrap();
            assert!(session.is_attached, "{id} is granted and nobody is there");
            assert!(self.held_everywhere(session.id) <= session.limit, "{} is over its limit", session.id);
        }
        let leased = self.bytes(request.device, |chunk| matches!(chunk.is, Is::Leased(_)));
        let device = self.device_mut(request.device);
        device.peak_leased = device.peak_leased.max(leased);
        self.granted += 1;
    }

    pub(super) fn answer(&mut self, request: RequestId) {
        assert!(self.answered.insert(request), "{request} is answered twice");
        self.requests.retain(|known| known.id != request);
    }

    pub(super) fn refuse(&mut self, command: &Command, id: RequestId, holder: Holder, refusal: &Refusal) {
        let request = self.request(id).expect("only what was asked for is refused").clone();
        assert_eq!(request.holder, holder);
        let name = match refusal {
            Refusal::OverLimit { requested, held, limit } => {
                let Holder::Session(session) = holder else { panic!("a plan has no limit") };
                let said = (self.held_everywhere(session), self.session(session).unwrap().limit);
                assert_eq!((*requested, (*held, *limit)), (request.bytes(), said));
                assert!(self.is_over_limit(&request) && request.phase == Phase::Waiting);
                "over limit"
            }
            Refusal::OverBudget { device, requested, budget } => {
                assert_eq!((*device, *requested), (request.device, request.bytes()));
                assert_eq!(*budget, self.budget(request.device));
                assert!(*requested > self.device(*device).total);
                "over budget"
            }
            Refusal::Exhausted { device, requested, budget, waited_ms, .. } => {
                assert_eq!((*device, *requested), (request.device, request.bytes()));
                assert_eq!((*budget, *waited_ms), (self.budget(*device), self.now_ms - request.asked_ms));
                let is_overdue = request.deadline_ms <= self.now_ms && self.destroying(*device).is_zero();
                assert!(match request.phase {
                    Phase::Waiting => is_overdue,
                    Phase::Creating { .. } => false,
                    Phase::Lost { failure } => failure == Shortage::Memory,
                });
                if request.phase == Phase::Waiting { "overdue" } else { "exhausted" }
            }
            Refusal::Chunks { device, requested, available, limit } => {
                let wanted = request.parts.iter().map(|part| part.count).sum();
                assert_eq!((*device, *requested, *limit), (request.device, wanted, self.device(*device).chunks_max));
                assert!(requested > available && available <= limit);
                // One that was short of descriptors is told of what came, whatever room there is.
                let is_short = request.phase == Phase::Lost { failure: Shortage::Chunks };
                if wanted <= *limit && !is_short {
                    let of_plan = self.count(
                        *device,
                        |chunk| matches!((chunk.is, request.plan), (Is::Reserved(of), Some(plan)) if of == plan),
                    );
                    assert_eq!(*available, self.chunk_room_at_most(*device) + of_plan);
                    let is_overdue = request.deadline_ms <= self.now_ms && self.destroying(*device).is_zero();
                    assert!(is_overdue || request.phase == Phase::Lost { failure: Shortage::Memory });
                }
                "chunks"
            }
            Refusal::Lost { device } => {
                assert!(*device == request.device && self.device(*device).is_lost);
                match request.phase {
                    Phase::Creating { missing, .. } => {
                        assert_eq!(missing, 0, "{id} is refused before all answers are in");
                        self.put_back(id);
                    }
                    Phase::Waiting | Phase::Lost { .. } => {}
                }
                "lost"
            }
            Refusal::Deadlock { device, cycle } => {
                assert_eq!(Some(id), self.youngest_in_circle(*device), "{id} is refused for a circle");
                let said: Vec<_> = cycle.iter().map(|holding| (holding.session, holding.held)).collect();
                assert_eq!(said, self.holders(*device));
                "deadlock"
            }
            Refusal::Driver { device } => {
                assert_eq!((*device, &request.phase), (request.device, &Phase::Lost { failure: Shortage::Nothing }));
                "driver"
            }
            Refusal::Cancelled => {
                assert!(match (command, holder) {
                    (Command::Cancel { request }, _) => *request == id,
                    (Command::Detach { session } | Command::End { session, .. }, Holder::Session(holder)) => {
                        *session == holder
                    }
                    (Command::Unreserve { plan }, Holder::Plan(holder)) => *plan == holder,
                    _ => false,
                });
                self.put_back(id);
                "cancelled"
            }
            Refusal::Closed => {
                let asks = |asked: &Command| matches!(asked, Command::Acquire { request, .. } if *request == id);
                assert!(self.is_closed && (matches!(command, Command::Close) || asks(command)), "{command:?}");
                self.put_back(id);
                "closed"
            }
        };
        *self.refused.entry(name).or_default() += 1;
        self.answer(id);
    }

    pub(super) fn holders(&self, device: DeviceId) -> Vec<(SessionId, Bytes)> {
        let held = |session: &Session| (session.id, self.held(session.id, device));
        let mut holders: Vec<_> = self.sessions.iter().map(held).filter(|(_, held)| !held.is_zero()).collect();
        holders.sort();
        holders
    }

    /// The youngest request of those who hold memory, where all of them wait for more and nothing is on its way.
    pub(super) fn youngest_in_circle(&self, device: DeviceId) -> Option<RequestId> {
        if !self.creating(device).is_zero() || !self.destroying(device).is_zero() {
            return None;
        }
        let queue = self.queue(device);
        let youngest_of = |session: SessionId| {
            queue.iter().filter(|request| request.holder == Holder::Session(session)).map(|request| request.id).max()
        };
        let waiting: Option<Vec<_>> =
            self.holders(device).into_iter().map(|(session, _)| youngest_of(session)).collect();
        waiting?.into_iter().max()
    }

    pub(super) fn end(&mut self, command: &Command) {
        assert_eq!(self.to_come, [], "not all is created that was promised");
        match command {
            Command::Cancel { request } => assert!(self.request(*request).is_none(), "{request} was cancelled"),
            Command::Close => assert!(self.requests.is_empty(), "nobody waits for what is closed"),
            Command::End { session, .. } => {
                self.sessions.retain(|known| known.id != *session);
                let is_left = |chunk: &&Chunk| {
                    chunk.granted_to == Some(*session) && !matches!(chunk.is, Is::Destroying | Is::Quarantined)
                };
                assert!(!self.chunks.iter().any(|chunk| is_left(&chunk)), "{session} is gone, its chunks are not");
            }
            Command::Acquire { request, .. } => {
                if let Some(request) = self.request(*request) {
                    assert!(!self.is_closed, "{} is neither served nor refused", request.id);
                    assert!(request.bytes() <= self.device(request.device).total);
                }
            }
            _ => {}
        }
    }

    // === Whoever uses it

    pub(super) fn open(&mut self, limit: Bytes, priority: u32) -> SessionId {
        self.last_session += 1;
        let session = SessionId(self.last_session);
        self.step(Command::Open { session, limit, priority });
        session
    }

    pub(super) fn acquire(
        &mut self,
        holder: Holder,
        device: DeviceId,
        parts: Vec<Part>,
        plan: Option<PlanId>,
        wait_ms: u64,
    ) {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        self.step(Command::Acquire { request, holder, device, parts, plan, wait_ms });
    }

    pub(super) fn acquire_units(&mut self, session: SessionId, count: u64) {
        self.acquire(Holder::Session(session), DeviceId(0), vec![Part { len: UNIT, count }], None, 1_000);
    }

    pub(super) fn leased(&self, session: SessionId) -> Vec<ChunkId> {
        self.chunks.iter().filter(|chunk| chunk.is == Is::Leased(session)).map(|chunk| chunk.id).collect()
    }

    /// Creates and destroys that are not yet carried out, the oldest first.
    pub(super) fn work(&self) -> Vec<ChunkId> {
        let is_work = |chunk: &&Chunk| matches!(chunk.is, Is::Creating(_) | Is::Destroying);
        self.chunks.iter().filter(is_work).map(|chunk| chunk.id).collect()
    }

    /// The driver carries a piece of work out, if it can.
    pub(super) fn carry_out(&mut self, chunk: ChunkId) {
        let Chunk { device, len, is, .. } = *self.chunk(chunk).unwrap();
        let free = self.device(device).total - self.device(device).foreign - self.existing(device);
        self.step(match is {
            Is::Creating(_) if len > free => Command::CreateFailed { chunk, why: Shortage::Memory },
            Is::Creating(_) => Command::Created { chunk },
            _ => Command::Destroyed { chunk },
        });
    }

    /// The driver is broken when it should carry this out.
    pub(super) fn fail(&mut self, chunk: ChunkId) {
        self.step(match self.chunk(chunk).unwrap().is {
            Is::Creating(_) => Command::CreateFailed { chunk, why: Shortage::Nothing },
            _ => Command::DestroyFailed { chunk },
        });
    }

    pub(super) fn observe(&mut self, device: DeviceId) {
        let known = self.device(device);
        let free = known.total - known.foreign - self.existing(device);
        self.step(Command::Observe { device, free });
    }

    /// All work is done and all time has passed: nobody waits any more.
    pub(super) fn finish(&mut self) {
        while let Some(chunk) = self.work().first() {
            self.carry_out(*chunk);
        }
        self.step(Command::Tick { now_ms: self.now_ms + 1_000_000 });
        while let Some(chunk) = self.work().first() {
            self.carry_out(*chunk);
        }
        self.step(Command::Tick { now_ms: self.now_ms + 1_000_000 });
        assert!(self.requests.is_empty(), "these wait for ever: {:?}", self.requests);
        for session in self.sessions.iter().map(|session| session.id).collect::<Vec<_>>() {
            self.step(Command::End { session, reason: EndReason::Died });
        }
        while let Some(chunk) = self.work().first() {
            self.carry_out(*chunk);
        }
        let is_kept = |chunk: &Chunk| chunk.granted_to.is_some() && chunk.is != Is::Quarantined;
        assert!(!self.chunks.iter().any(is_kept), "chunks of sessions that are gone: {:?}", self.chunks);
    }
}
