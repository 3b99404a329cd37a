//! The second ledger: three lists, and an imaginary driver with bytes of its own.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use stitchd::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Command, EndReason, Holder, Ledger, ReturnedBytes, Shortage, Terms};
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
    Shared(RangeId),
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
    pub(super) terms: Terms,
    pub(super) revision: u64,
    pub(super) is_attached: bool,
    pub(super) is_evicted: bool,
    pub(super) guarantees: BTreeMap<DeviceId, Bytes>,
}

/// What several sessions hold.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) id: RangeId,
    pub(super) device: DeviceId,
    pub(super) chunks: Vec<ChunkId>,
    pub(super) bytes: Bytes,
    /// Who holds it, once for each time.
    pub(super) holders: Vec<SessionId>,
    /// Whose guarantee it counts against, as long as he lives and somebody holds it.
    pub(super) publisher: SessionId,
    pub(super) linger_ms: u64,
    pub(super) due_ms: Option<u64>,
    pub(super) is_withdrawn: bool,
}

/// A question that a session was asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) ask: u64,
    pub(super) bytes: Bytes,
    pub(super) given: Bytes,
    pub(super) at_ms: u64,
    pub(super) request: Option<RequestId>,
    pub(super) is_late: bool,
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
    /// It is for this, and for no chunks.
    pub(super) guarantee: Option<Bytes>,
    pub(super) asked_ms: u64,
    pub(super) before_ms: u64,
    pub(super) deadline_ms: u64,
    pub(super) refused_ms: u64,
    pub(super) refused_creates: u32,
    pub(super) phase: Phase,
}

impl Request {
    pub(super) fn bytes(&self) -> Bytes {
        let parts = self.parts.iter().map(|part| Bytes::new(part.len.get() * part.count)).sum();
        self.guarantee.unwrap_or(parts)
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
    pub(super) is_draining: bool,
}

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) ledger: Ledger,
    pub(super) devices: Vec<Device>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) sessions: Vec<Session>,
    pub(super) requests: Vec<Request>,
    pub(super) ranges: Vec<Range>,
    /// A range of which some chunks are on their way, and the others follow.
    pub(super) going: BTreeSet<RangeId>,
    pub(super) asked: BTreeMap<(DeviceId, SessionId), Asked>,
    /// The command that is followed, for whoever reads what went wrong.
    pub(super) doing: Option<Command>,
    /// Chunks that were released because somebody asked for them, on their way to the driver.
    pub(super) given: Vec<ChunkId>,
    /// What sessions were guaranteed before this step.
    pub(super) former: BTreeMap<SessionId, BTreeMap<DeviceId, Bytes>>,
    /// Sizes of the chunks that are created in this step and that were not looked at yet.
    pub(super) creates: Vec<Bytes>,
    /// In this step a request for a guarantee was refused.
    pub(super) is_guarantee_over: bool,
    /// When somebody was last granted what others were asked for: what he got stays with him for at most two seconds.
    pub(super) settled_ms: Option<u64>,
    pub(super) answered: BTreeSet<RequestId>,
    pub(super) granted: u64,
    pub(super) refused: BTreeMap<&'static str, u64>,
    pub(super) returned: ReturnedBytes,
    pub(super) is_closed: bool,
    pub(super) now_ms: u64,
    pub(super) last_chunk: u64,
    pub(super) last_session: u64,
    pub(super) last_request: u64,
    pub(super) last_range: u64,
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
        promised + self.bytes(device, |chunk| chunk.is == Is::Leased(session)) + self.shared(session, device)
    }

    /// What a session holds of shared ranges.
    pub(super) fn shared(&self, session: SessionId, device: DeviceId) -> Bytes {
        let held = self.ranges.iter().filter(|range| range.device == device && range.holders.contains(&session));
        held.map(|range| range.bytes).sum()
    }

    /// What counts against a session's guarantee.
    pub(super) fn borne(&self, session: SessionId, device: DeviceId) -> Bytes {
        let bears = |range: &&Range| range.device == device && !range.holders.is_empty() && range.publisher == session;
        let bears: Bytes = self.ranges.iter().filter(bears).map(|range| range.bytes).sum();
        self.held(session, device) - self.shared(session, device) + bears
    }

    pub(super) fn range(&self, id: RangeId) -> Option<&Range> {
        self.ranges.iter().find(|range| range.id == id)
    }

    pub(super) fn held_everywhere(&self, session: SessionId) -> Bytes {
        self.devices.iter().map(|device| self.held(session, device.id)).sum()
    }

    pub(super) fn is_over_limit(&self, request: &Request) -> bool {
        let Holder::Session(session) = request.holder else { return false };
        self.held_everywhere(session) + request.bytes() > self.session(session).unwrap().terms.limit
    }

    pub(super) fn is_starting(&self, holder: Holder, device: DeviceId) -> bool {
        match holder {
            Holder::Session(session) => self.held(session, device).is_zero(),
            Holder::Plan(_) => true,
        }
    }

    /// Who waits on a device, whoever is to be served first in front.
    pub(super) fn queue(&self, device: DeviceId) -> Vec<&Request> {
        self.queue_of(device, false)
    }

    /// The same of those who wait for guarantees.
    pub(super) fn admissions(&self, device: DeviceId) -> Vec<&Request> {
        self.queue_of(device, true)
    }

    fn queue_of(&self, device: DeviceId, is_guarantee: bool) -> Vec<&Request> {
        let waits = |request: &&Request| {
            request.device == device && request.phase == Phase::Waiting && request.guarantee.is_some() == is_guarantee
        };
        let mut queue: Vec<_> = self.requests.iter().filter(waits).collect();
        queue.sort_by_key(|request| {
            let (priority, is_within) = match request.holder {
                Holder::Session(session) => {
                    let is_within = self.borne(session, device) + request.bytes() <= self.guaranteed(session, device);
                    (self.session(session).map_or(0, |session| session.terms.priority), is_within || is_guarantee)
                }
                Holder::Plan(_) => (0, false),
            };
            (!is_within, Reverse(priority), self.is_starting(request.holder, device), request.id)
        });
        queue
    }

    pub(super) fn guaranteed(&self, session: SessionId, device: DeviceId) -> Bytes {
        let known = self.session(session);
        known.and_then(|session| session.guarantees.get(&device)).copied().unwrap_or_default()
    }

    /// What of their guarantees others do not lend.
    pub(super) fn withheld(&self, holder: Holder, device: DeviceId) -> Bytes {
        let others =
            self.sessions.iter().filter(|session| !session.terms.lends && holder != Holder::Session(session.id));
        others.map(|other| self.guaranteed(other.id, device).saturating_sub(self.borne(other.id, device))).sum()
    }

    /// Bytes that would have to come from others for `bytes` more, `of_plan` of which are reserved for it.
    pub(super) fn lacking(&self, holder: Holder, device: DeviceId, bytes: Bytes, of_plan: Bytes) -> Bytes {
        let used = self.bytes(device, |chunk| !matches!(chunk.is, Is::Idle | Is::Destroying));
        (used + bytes + self.withheld(holder, device)).saturating_sub(of_plan).saturating_sub(self.budget(device))
    }

    /// What a request lacks beside what others use and are kept.
    pub(super) fn lacks(&self, request: &Request) -> Bytes {
        let of_plan = |part: &Part| {
            let usable = self.usable(request, part.len).into_iter().take(part.count as usize);
            usable.filter(|chunk| matches!(chunk.is, Is::Reserved(_))).map(|chunk| chunk.len).sum::<Bytes>()
        };
        let of_plan = request.parts.iter().map(of_plan).sum();
        self.lacking(request.holder, request.device, request.bytes(), of_plan)
    }

    /// What others are kept leaves room for it.
    pub(super) fn leaves_what_is_kept(&self, request: &Request) -> bool {
        self.withheld(request.holder, request.device).is_zero() || self.lacks(request).is_zero()
    }

    /// Somebody who is guaranteed it waits for what ranges have that nobody holds.
    pub(super) fn is_short_of_guaranteed(&self, device: DeviceId) -> bool {
        let is_short = |request: &Request| {
            let Holder::Session(session) = request.holder else { return false };
            let guaranteed = self.guaranteed(session, device);
            match request.guarantee {
                Some(guarantee) => {
                    let unfilled = guarantee.saturating_sub(self.borne(session, device));
                    let lends = self.session(session).unwrap().terms.lends;
                    guaranteed == guarantee
                        && !lends
                        && !self.lacking(request.holder, device, unfilled, Bytes::ZERO).is_zero()
                }
                None => self.borne(session, device) + request.bytes() <= guaranteed && !self.lacks(request).is_zero(),
            }
        };
        [self.queue(device).first(), self.admissions(device).first()].into_iter().flatten().any(|first| is_short(first))
    }

    /// Somebody was asked on behalf of a request, and is waited for.
    pub(super) fn has_open_questions(&self, request: &Request) -> bool {
        self.asked.values().any(|asked| !asked.is_late && asked.request == Some(request.id))
    }

    pub(super) fn is_overdue(&self, request: &Request) -> bool {
        request.deadline_ms <= self.now_ms
            && self.destroying(request.device).is_zero()
            && !self.has_open_questions(request)
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
        self.has_room_but_for_guarantees(request) && self.leaves_what_is_kept(request)
    }

    pub(super) fn has_room_but_for_guarantees(&self, request: &Request) -> bool {
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

    // === Whoever uses it

    pub(super) fn open(&mut self, limit: Bytes, priority: u32) -> SessionId {
        self.last_session += 1;
        let session = SessionId(self.last_session);
        self.step(Command::Open { session, terms: Terms::new(limit, priority) });
        session
    }

    /// One that answers, and perhaps keeps what it is guaranteed.
    pub(super) fn join(&mut self, limit: Bytes, priority: u32, lends: bool) {
        self.last_session += 1;
        let terms = Terms { lends, answers: true, ..Terms::new(limit, priority) };
        self.step(Command::Open { session: SessionId(self.last_session), terms });
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
        // Some have waited for another ledger.
        let waited_ms = request.0 % 3 * 70;
        self.step(Command::Acquire { request, holder, device, parts, plan, wait_ms, waited_ms });
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
        self.step(Command::Tick { now_ms: self.now_ms + 1_000_000 });
        while let Some(chunk) = self.work().first() {
            self.carry_out(*chunk);
        }
        assert!(self.ranges.is_empty(), "these last for ever: {:?}", self.ranges);
        let is_kept = |chunk: &Chunk| chunk.granted_to.is_some() && chunk.is != Is::Quarantined;
        assert!(!self.chunks.iter().any(is_kept), "chunks of sessions that are gone: {:?}", self.chunks);
    }
}
