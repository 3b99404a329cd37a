//! Every effect of the ledger is held against the rules before the lists of [`World`] have it: who may have a chunk, what a device can give, what a session may hold, whose turn it is.

use std::collections::{BTreeMap, BTreeSet};

use stitchd::ids::{ChunkId, DeviceId, RangeId, RequestId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Command, Effect, EndReason, Holder, Refusal, Shortage};
use stitchd::units::Bytes;

use super::reference::{Asked, Chunk, Device, Is, Phase, Range, Request, Session, World};

impl World {
    // === Steps

    pub(super) fn step(&mut self, command: Command) {
        let expected = self.error_of(&command);
        self.doing = Some(command.clone());
        match (self.ledger.step(command.clone()), expected) {
            (Err(error), Some(expected)) => assert_eq!(error, expected, "{command:?}"),
            (Ok(effects), None) => self.follow(&command, effects),
            (outcome, expected) => panic!("{command:?}: {outcome:?}, and {expected:?} was expected"),
        }
        self.check(&command);
    }

    /// A session holds a range no more.
    fn let_go(&mut self, range: RangeId, session: SessionId) {
        let now_ms = self.now_ms;
        let range = self.ranges.iter_mut().find(|known| known.id == range).unwrap();
        range.holders.retain(|holder| *holder != session);
        if range.holders.is_empty() {
            range.due_ms = Some(now_ms + range.linger_ms);
        }
    }

    /// Nobody holds a range, and why it goes.
    fn may_go(&self, range: RangeId) -> bool {
        let known = self.range(range).expect("its chunks are there");
        let is_due = known.due_ms.is_some_and(|due_ms| due_ms <= self.now_ms);
        let device = self.device(known.device);
        let is_over = known.is_withdrawn || is_due || device.is_lost || device.is_draining || self.is_closed;
        known.holders.is_empty()
            && (is_over || self.going.contains(&range) || self.is_short_of_guaranteed(known.device))
    }

    /// What sessions are guaranteed, as the ledger says; a guarantee that is not there yet, but kept for who waits for it, is told of nowhere else.
    fn learn_guarantees(&mut self) {
        for view in self.ledger.sessions() {
            let said: BTreeMap<_, _> = view.guarantees.into_iter().collect();
            let Some(known) = self.sessions.iter().find(|known| known.id == view.session) else { continue };
            if known.guarantees == said {
                continue;
            }
            for (device, bytes) in &said {
                if self.guaranteed(view.session, *device) < *bytes {
                    let waits = self.requests.iter().any(|request| {
                        request.holder == Holder::Session(view.session)
                            && request.device == *device
                            && request.guarantee == Some(*bytes)
                    });
                    assert!(waits, "{} is guaranteed {bytes} and asked for no such thing", view.session);
                }
            }
            let known = self.sessions.iter_mut().find(|known| known.id == view.session).unwrap();
            known.guarantees = said;
        }
    }

    /// The guarantees of a device fit its budget, but where that has shrunk since.
    fn check_guarantees(&self, before: &BTreeMap<DeviceId, Bytes>) {
        for device in &self.devices {
            let sum: Bytes = self.sessions.iter().map(|session| self.guaranteed(session.id, device.id)).sum();
            let was = before.get(&device.id).copied().unwrap_or_default();
            assert!(sum <= self.budget(device.id).max(was), "{} has promised {sum}", device.id);
        }
    }

    pub(super) fn follow(&mut self, command: &Command, effects: Vec<Effect>) {
        let sums = |world: &World| -> BTreeMap<DeviceId, Bytes> {
            let sum =
                |device: &Device| world.sessions.iter().map(|session| world.guaranteed(session.id, device.id)).sum();
            world.devices.iter().map(|device| (device.id, sum(device))).collect()
        };
        let before = sums(self);
        let is_guarantee =
            |request: &RequestId| self.request(*request).is_some_and(|request| request.guarantee.is_some());
        self.is_guarantee_over =
            effects.iter().any(|effect| matches!(effect, Effect::Refuse { request, .. } if is_guarantee(request)));
        self.begin(command);
        self.former = self.sessions.iter().map(|session| (session.id, session.guarantees.clone())).collect();
        self.learn_guarantees();
        self.creates = effects
            .iter()
            .filter_map(|effect| if let Effect::Create { len, .. } = effect { Some(*len) } else { None })
            .collect();
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
                Effect::AskBack { session, device, ask, bytes, request } => {
                    self.ask_back(
                        command,
                        session,
                        device,
                        Asked { ask, bytes, request, given: Bytes::ZERO, at_ms: self.now_ms, is_late: false },
                    );
                }
                Effect::Gave { session, device, asked, given, took_ms, .. } => {
                    let known = self.asked.remove(&(device, session)).expect("only what was asked is answered");
                    let took = self.now_ms - known.at_ms;
                    assert_eq!((asked, given, took_ms), (known.bytes, known.given, took));
                }
                Effect::Unanswered { session, device, asked } => {
                    let now_ms = self.now_ms;
                    let known = self.asked.get_mut(&(device, session)).expect("only what was asked is missed");
                    assert!(!known.is_late && known.bytes == asked && now_ms >= known.at_ms + 1_000);
                    known.is_late = true;
                }
                Effect::RangeGone { range } => {
                    let gone = self.range(range).expect("what goes was there").clone();
                    let is_left = |chunk: &ChunkId| self.chunk(*chunk).unwrap().is != Is::Destroying;
                    assert!(gone.holders.is_empty() && !gone.chunks.iter().any(is_left), "{gone:?} is gone");
                    self.ranges.retain(|known| known.id != range);
                    self.going.clear();
                }
                Effect::EndBorrower { .. } => panic!("nobody is to be ended"),
                Effect::Registered { .. } => panic!("nobody registers anything"),
            }
        }
        self.end(command);
        self.check_guarantees(&before);
        if matches!(command, Command::TrimIdle { .. }) {
            return;
        }
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
                is_draining: false,
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
            Command::Open { session, terms } => self.sessions.push(Session {
                id: *session,
                terms: *terms,
                revision: 0,
                is_attached: true,
                is_evicted: false,
                guarantees: BTreeMap::new(),
            }),
            Command::Detach { session } => {
                self.session_mut(*session).is_attached = false;
                self.asked.retain(|(_, of), _| of != session);
            }
            Command::Reattach { session } => self.session_mut(*session).is_attached = true,
            Command::Register { .. } => panic!("nobody registers anything"),
            Command::Change { session, change, .. } => {
                let known = self.session_mut(*session);
                known.revision += 1;
                known.terms.limit = change.limit.unwrap_or(known.terms.limit);
                known.terms.priority = change.priority.unwrap_or(known.terms.priority);
                known.terms.lends = change.lends.unwrap_or(known.terms.lends);
            }
            Command::Evict { session } => {
                let known = self.session_mut(*session);
                known.is_evicted = true;
                known.guarantees.clear();
            }
            Command::Drain { device, is_draining } => self.device_mut(*device).is_draining = *is_draining,
            Command::Admit { request, session, device, guarantee, wait_ms } => self.requests.push(Request {
                id: *request,
                holder: Holder::Session(*session),
                device: *device,
                parts: Vec::new(),
                plan: None,
                guarantee: Some(*guarantee),
                asked_ms: self.now_ms,
                before_ms: 0,
                deadline_ms: self.now_ms + wait_ms,
                refused_creates: 0,
                refused_ms: 0,
                phase: Phase::Waiting,
            }),
            Command::Spare { .. }
            | Command::Trim { .. }
            | Command::TrimIdle { .. }
            | Command::Parked { .. }
            | Command::Answered { .. } => {}
            Command::Acquire { request, holder, device, parts, plan, wait_ms, waited_ms } => {
                self.requests.push(Request {
                    id: *request,
                    holder: *holder,
                    device: *device,
                    parts: parts.clone(),
                    plan: *plan,
                    guarantee: None,
                    asked_ms: self.now_ms,
                    before_ms: *waited_ms,
                    deadline_ms: self.now_ms + wait_ms,
                    refused_creates: 0,
                    refused_ms: 0,
                    phase: Phase::Waiting,
                })
            }
            Command::Release { session, chunks } => {
                for chunk in &chunks.iter().collect::<BTreeSet<_>>() {
                    let chunk = *chunk;
                    self.chunk_mut(*chunk).is = Is::Idle;
                    let Chunk { len, device, .. } = *self.chunk(*chunk).unwrap();
                    let asked = self.asked.get_mut(&(device, *session));
                    let is_wanted = asked.as_ref().is_some_and(|asked| !asked.is_late && asked.given < asked.bytes);
                    if let Some(asked) = asked {
                        asked.given += len;
                    }
                    *(if is_wanted { &mut self.returned.revoke } else { &mut self.returned.release }) += len;
                    if is_wanted || self.device(device).is_draining {
                        self.given.push(*chunk);
                    }
                }
            }
            Command::Publish { range, session, chunks, linger_ms } => {
                let device = self.chunk(chunks[0]).unwrap().device;
                for chunk in chunks {
                    self.chunk_mut(*chunk).is = Is::Shared(*range);
                }
                self.ranges.push(Range {
                    id: *range,
                    device,
                    chunks: chunks.clone(),
                    bytes: chunks.iter().map(|chunk| self.chunk(*chunk).unwrap().len).sum(),
                    holders: vec![*session],
                    publisher: *session,
                    linger_ms: *linger_ms,
                    due_ms: None,
                    is_withdrawn: false,
                });
            }
            Command::Attach { range, session } => {
                let range = self.ranges.iter_mut().find(|known| known.id == *range).unwrap();
                range.holders.push(*session);
                range.due_ms = None;
            }
            Command::Leave { range, session } => {
                let held = self.ranges.iter_mut().find(|known| known.id == *range).unwrap();
                let times = held.holders.iter().filter(|holder| *holder == session).count();
                if times > 1 {
                    let at = held.holders.iter().position(|holder| holder == session).unwrap();
                    held.holders.remove(at);
                } else {
                    self.let_go(*range, *session);
                }
            }
            Command::Withdraw { range } => {
                self.ranges.iter_mut().find(|known| known.id == *range).unwrap().is_withdrawn = true;
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
                if self.queue(*device).is_empty() && !is_creating && !self.device(*device).is_draining {
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
            Command::End { session, .. } => {
                self.asked.retain(|(_, of), _| of != session);
                self.session_mut(*session).guarantees.clear();
                let held = self.ranges.iter().filter(|range| range.holders.contains(session));
                for range in held.map(|range| range.id).collect::<Vec<_>>() {
                    self.let_go(range, *session);
                }
            }
            Command::Cancel { .. } => {}
        }
    }

    pub(super) fn session_mut(&mut self, id: SessionId) -> &mut Session {
        self.sessions.iter_mut().find(|session| session.id == id).unwrap()
    }

    /// A session is asked for idle memory: by whoever runs the daemon, or for who is first to be served.
    fn ask_back(&mut self, command: &Command, session: SessionId, device: DeviceId, asked: Asked) {
        let bytes = asked.bytes;
        let known = self.session(session).expect("who is asked is there");
        assert!(known.is_attached && known.terms.answers, "{session} is asked and will not answer");
        assert!(
            !bytes.is_zero() && bytes <= self.held(session, device) - self.shared(session, device),
            "{session} is asked for {bytes}, more than the {} that it has, by {command:?}",
            self.held(session, device) - self.shared(session, device)
        );
        let is_by_hand = match command {
            Command::Trim { device: of, session: only, .. } => *of == device && only.is_none_or(|only| only == session),
            Command::Change { session: of, .. } | Command::Evict { session: of } => *of == session,
            Command::Drain { device: of, .. } => *of == device,
            Command::Tick { .. } => known.is_evicted || self.held_everywhere(session) > known.terms.limit,
            _ => false,
        };
        let first = self.queue(device).first().map(|first| (*first).clone());
        let admitted = self.admissions(device).first().map(|first| (*first).clone());
        let is_fair = |request: &Request| {
            let is_kept = known.terms.lends
                || self.borne(session, device).saturating_sub(self.guaranteed(session, device)) >= bytes;
            request.holder != Holder::Session(session) && request.deadline_ms > self.now_ms && is_kept
        };
        let for_whom = [first, admitted].into_iter().flatten().find(|request| asked.request == Some(request.id));
        match for_whom {
            Some(request) => assert!(is_fair(&request), "{session} is asked for {request:?}"),
            None => assert!(is_by_hand && asked.request.is_none(), "{session} is asked for nobody"),
        }
        let former = self.asked.insert((device, session), asked);
        let is_free = former.is_none_or(|former| former.is_late && self.now_ms >= former.at_ms + 10_000);
        assert!(is_free, "{session} is asked twice");
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
        self.put_back(id);
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

    /// What is true with the guarantees that there were before this step: some may have come with what it granted.
    fn before<T>(&mut self, look: impl FnOnce(&World) -> T) -> T {
        let swap = |world: &mut World| {
            for session in &mut world.sessions {
                if let Some(former) = world.former.get_mut(&session.id) {
                    std::mem::swap(&mut session.guarantees, former);
                }
            }
        };
        swap(self);
        let seen = look(self);
        swap(self);
        seen
    }

    /// Who is first to be served on a device, with the guarantees that there are, and with those that there were.
    fn firsts(&mut self, device: DeviceId) -> [Option<RequestId>; 2] {
        let first = |world: &World| world.queue(device).first().map(|first| first.id);
        [first(self), self.before(first)]
    }

    /// For whom the next chunks are created: that is told by how many come.
    fn created_next_for(&mut self, device: DeviceId) -> RequestId {
        let firsts = self.firsts(device);
        let lens = |world: &World, id: RequestId| {
            let request = world.request(id).unwrap();
            let missing = |part: &Part| {
                let count = part.count.saturating_sub(world.usable(request, part.len).len() as u64);
                vec![part.len; count as usize]
            };
            request.parts.iter().flat_map(missing).collect::<Vec<_>>()
        };
        let fits = |id: &RequestId| {
            let lens = lens(self, *id);
            !lens.is_empty() && self.creates.starts_with(&lens)
        };
        let both: Vec<_> = firsts.into_iter().flatten().collect();
        both.iter().copied().find(fits).or(both.first().copied()).expect("chunks are created for somebody")
    }

    /// Sets aside what there is for a request; what is missing has to be created next.
    pub(super) fn promise(&mut self, id: RequestId) {
        let request = self.request(id).unwrap().clone();
        assert!(self.firsts(request.device).contains(&Some(id)), "others come before {id}");
        let left_before = self.before(|world| world.leaves_what_is_kept(&request));
        // Where a request for a guarantee has ended in this step, another may be kept what it wants since.
        let has_room = self.has_room_but_for_guarantees(&request)
            && (self.is_guarantee_over || left_before || self.leaves_what_is_kept(&request));
        assert!(
            has_room,
            "{id} is promised more than there is by {:?}: withheld {:?}, room {:?}",
            self.doing,
            self.withheld(request.holder, request.device),
            self.room(request.device)
        );
        assert!(!self.is_over_limit(&request), "{id} is promised more than its session may hold");
        assert!(!self.device(request.device).is_draining, "{id} is promised what is being drained");
        let is_evicted = |session| self.session(session).is_some_and(|session| session.is_evicted);
        assert!(
            !matches!(request.holder, Holder::Session(session) if is_evicted(session)),
            "{id} is of one that was evicted"
        );
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
            let first = self.created_next_for(device);
            self.promise(first);
        }
        assert!(!self.to_come.is_empty(), "{chunk} is created for nobody");
        let (request, expected) = self.to_come.remove(0);
        self.creates.remove(0);
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
            // It was asked for.
            (Is::Idle, Command::Release { .. }) if self.given.contains(&chunk) => {
                self.given.retain(|given| *given != chunk)
            }
            (Is::Shared(range), _) => {
                assert!(self.may_go(range), "{:?} is not to go by {command:?}", self.range(range));
                self.going.insert(range);
            }
            (Is::Idle | Is::Reserved(_), _) if self.device(found.device).is_lost => {}
            (Is::Idle, _) if self.is_exchanged(&found) => {}
            (Is::Idle, _) => {
                given_up.insert(found.device, found.len);
            }
            _ => panic!("{found:?} is destroyed"),
        }
        self.chunk_mut(chunk).is = Is::Destroying;
    }

    /// The session that has returned a chunk is served next, and chunks of other lengths are created for
    /// it, for which there is room.
    fn is_exchanged(&self, idle: &Chunk) -> bool {
        let queue = self.queue(idle.device);
        let Some(first) = queue.first() else { return false };
        let is_of_session = idle.granted_to.is_some_and(|session| first.holder == Holder::Session(session));
        let to_create = self.to_create(first);
        is_of_session
            && !to_create.is_zero()
            && to_create <= self.room(idle.device)
            && self.chunks_to_create(first) <= self.chunk_room(idle.device)
            && !first.parts.iter().any(|part| part.len == idle.len)
    }

    /// A guarantee is there.
    fn grant_guarantee(&mut self, id: RequestId, session: SessionId, guarantee: Bytes) {
        let device = self.request(id).unwrap().device;
        assert_eq!(self.guaranteed(session, device), guarantee);
        assert!(self.session(session).unwrap().is_attached);
        self.answer(id);
        self.granted += 1;
    }

    pub(super) fn grant(&mut self, id: RequestId, holder: Holder, chunks: &[(ChunkId, Bytes)]) {
        if let (Some(Request { guarantee: Some(guarantee), .. }), Holder::Session(session)) = (self.request(id), holder)
        {
            let guarantee = *guarantee;
            assert_eq!(chunks, []);
            return self.grant_guarantee(id, session, guarantee);
        }
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
        self.settled_ms = Some(self.now_ms);
        if let Holder::Session(session) = holder {
            let session = self.session(session).unwrap();
            assert!(session.is_attached, "{id} is granted and nobody is there");
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
                let known = self.session(session).unwrap();
                if request.guarantee.is_some() {
                    let elsewhere = known.guarantees.iter().filter(|(device, _)| **device != request.device);
                    assert_eq!(*held, elsewhere.map(|(_, bytes)| *bytes).sum());
                    assert!(*held + *requested > *limit && *limit == known.terms.limit);
                } else {
                    let said = (self.held_everywhere(session), known.terms.limit);
                    assert_eq!((*requested, (*held, *limit)), (request.bytes(), said));
                    assert!(self.is_over_limit(&request) && request.phase == Phase::Waiting);
                }
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
                assert_eq!(
                    (*budget, *waited_ms),
                    (self.budget(*device), self.now_ms - request.asked_ms + request.before_ms)
                );
                let is_overdue = self.is_overdue(&request);
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
                    let is_overdue = self.is_overdue(&request);
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
                let stuck = self.stuck();
                // Whoever is guaranteed what he waits for comes before all others.
                let is_within = |session: SessionId, device: DeviceId, request: RequestId| {
                    let bytes = self.request(request).map_or(Bytes::ZERO, Request::bytes);
                    self.borne(session, device) + bytes <= self.guaranteed(session, device)
                };
                let order = |(session, device, request): &(SessionId, DeviceId, RequestId)| {
                    (!is_within(*session, *device, *request), *request)
                };
                let first = stuck.iter().copied().max_by_key(order).map(|(.., request)| request);
                assert_eq!((Some(id), *device), (first, request.device), "{id} is refused for a circle");
                let said: Vec<_> = cycle.iter().map(|holding| (holding.session, holding.held)).collect();
                let members: BTreeSet<_> = stuck.iter().map(|(session, ..)| *session).collect();
                let held = members.into_iter().map(|session| (session, self.held(session, *device)));
                let is_named =
                    |(session, held): &(SessionId, Bytes)| !held.is_zero() || holder == Holder::Session(*session);
                assert_eq!(said, held.filter(is_named).collect::<Vec<_>>());
                "deadlock"
            }
            Refusal::Guarantee { device, requested, waited_ms, .. } => {
                assert_eq!((*device, Some(*requested)), (request.device, request.guarantee));
                assert!(self.is_overdue(&request) && *waited_ms == self.now_ms - request.asked_ms);
                "guarantee"
            }
            Refusal::Draining { device } => {
                assert!(*device == request.device && self.device(*device).is_draining);
                "draining"
            }
            Refusal::Evicted => {
                let Holder::Session(session) = holder else { panic!("a plan is not evicted") };
                assert!(self.session(session).unwrap().is_evicted);
                self.put_back(id);
                "evicted"
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
                    // A later wish is there.
                    (Command::Admit { session, device, .. }, Holder::Session(holder)) => {
                        (*session, *device) == (holder, request.device) && request.guarantee.is_some()
                    }
                    _ => false,
                });
                self.put_back(id);
                "cancelled"
            }
            Refusal::Closed => {
                let asks = |asked: &Command| matches!(asked, Command::Acquire { request, .. } | Command::Admit { request, .. } if *request == id);
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

    /// Requests of sessions that are in each other's way, on whatever devices: none of them goes on unless another gives up.
    pub(super) fn stuck(&self) -> Vec<(SessionId, DeviceId, RequestId)> {
        let waiting: Vec<_> = self
            .devices
            .iter()
            .flat_map(|device| self.queue(device.id))
            .filter_map(|request| match request.holder {
                Holder::Session(session) => Some((session, request.device, request.id)),
                Holder::Plan(_) => None,
            })
            .collect();
        let is_still = |device: DeviceId| {
            let is_asked = self.asked.iter().any(|((of, _), asked)| *of == device && !asked.is_late);
            let is_unheld = self.ranges.iter().any(|range| range.device == device && range.holders.is_empty());
            self.creating(device).is_zero() && self.destroying(device).is_zero() && !is_asked && !is_unheld
        };
        let mut lost: BTreeSet<SessionId> = waiting.iter().map(|(session, ..)| *session).collect();
        loop {
            let is_hopeless = |device: DeviceId| {
                let holders = self.holders(device);
                is_still(device) && !holders.is_empty() && holders.iter().all(|(session, _)| lost.contains(session))
            };
            let saved = waiting.iter().find(|(session, device, _)| lost.contains(session) && !is_hopeless(*device));
            let Some((session, ..)) = saved else { break };
            let session = *session;
            lost.remove(&session);
        }
        let wanted: BTreeSet<_> =
            waiting.iter().filter(|(session, ..)| lost.contains(session)).map(|(_, device, _)| *device).collect();
        let holds = |session: SessionId| wanted.iter().any(|device| !self.held(session, *device).is_zero());
        waiting.into_iter().filter(|(session, ..)| lost.contains(session) && holds(*session)).collect()
    }

    pub(super) fn end(&mut self, command: &Command) {
        assert_eq!(self.to_come, [], "not all is created that was promised");
        assert_eq!(self.given, [], "what was asked for and given stays with the daemon");
        match command {
            Command::Cancel { request } => assert!(self.request(*request).is_none(), "{request} was cancelled"),
            Command::Close => assert!(self.requests.is_empty(), "nobody waits for what is closed"),
            Command::End { session, .. } => {
                self.sessions.retain(|known| known.id != *session);
                let is_left = |chunk: &&Chunk| {
                    chunk.granted_to == Some(*session)
                        && !matches!(chunk.is, Is::Destroying | Is::Quarantined | Is::Shared(_))
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
}
