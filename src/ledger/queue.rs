//! Requests: from asking, over waiting and creating, to a grant or a refusal.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::account::{Account, Shelf};
use super::{Effect, Holder, Holding, Ledger, LedgerError, Refusal, Shortage, State};
use crate::ids::{ChunkId, DeviceId, PlanId, RequestId, SessionId};
use crate::ladder::Part;
use crate::limits;
use crate::units::Bytes;

/// One acquire on its way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) holder: Holder,
    pub(super) device: DeviceId,
    parts: Vec<Part>,
    pub(super) bytes: Bytes,
    /// How many chunks the parts are together.
    chunks: u64,
    plan: Option<PlanId>,
    /// It is for a guarantee of so many bytes, and for no chunks.
    pub(super) is_guarantee: bool,
    /// What the session was guaranteed before this request was kept for it.
    pub(super) guaranteed_before: Option<Bytes>,
    /// Others were asked for what it lacks.
    pub(super) has_asked: bool,
    /// It was to wait for others.
    pub(super) waits: bool,
    /// It waits on beyond its time.
    pub(super) is_extended: bool,
    pub(super) asked_ms: u64,
    /// How long it had waited before that, for another ledger.
    before_ms: u64,
    pub(super) deadline_ms: u64,
    /// Times that the driver refused to create its chunks, each soon after the last.
    refused_creates: u32,
    refused_ms: u64,
    pub(super) phase: Phase,
}

#[derive(Debug)]
pub(super) enum Phase {
    /// Nothing is promised; it stands in its device's queue.
    Waiting(QueueKey),
    /// Everything is promised; chunks are being created.
    Creating { missing: u64, ready: Vec<ChunkId>, failure: Option<Shortage> },
}

/// The place in a queue: what is guaranteed first, then high priority, then those who hold memory already, then the older.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct QueueKey {
    is_beyond_guarantee: bool,
    priority: Reverse<u32>,
    is_starting: bool,
    pub(super) request: RequestId,
}

/// Creates of one request that the driver may refuse, one soon after the other, before the request is: the budget was corrected each time, so a third refusal
/// means that it cannot be known. One that comes later is the first again: others may have taken and given back what they like.
const REFUSED_CREATES_MAX: u32 = 3;
const SOON_MS: u64 = 1_000;

impl Request {
    pub(super) fn new(
        holder: Holder,
        device: DeviceId,
        parts: Vec<Part>,
        plan: Option<PlanId>,
        now_ms: u64,
        wait_ms: u64,
    ) -> Result<Request, LedgerError> {
        let mut bytes = Bytes::ZERO;
        let mut chunks = 0_u64;
        for part in &parts {
            let is_chunk = part.len >= limits::CHUNK_LEN_MIN && part.len <= limits::CHUNK_LEN_MAX && part.count > 0;
            let sum = part.bytes().filter(|_| is_chunk).and_then(|more| bytes.checked_add(more));
            bytes = sum.filter(|sum| *sum <= limits::ACQUIRE_BYTES_MAX).ok_or(LedgerError::Parts)?;
            chunks = chunks.checked_add(part.count).ok_or(LedgerError::Parts)?;
        }
        let distinct: BTreeSet<_> = parts.iter().map(|part| part.len).collect();
        if chunks == 0 || chunks > limits::ACQUIRE_CHUNKS_MAX || distinct.len() != parts.len() {
            return Err(LedgerError::Parts);
        }
        let request = Request { parts, chunks, plan, ..Request::of(holder, device, bytes, now_ms, wait_ms) };
        Ok(request)
    }

    /// A request of a session to be guaranteed so much.
    pub(super) fn guarantee(session: SessionId, device: DeviceId, bytes: Bytes, now_ms: u64, wait_ms: u64) -> Request {
        Request { is_guarantee: true, ..Request::of(Holder::Session(session), device, bytes, now_ms, wait_ms) }
    }

    fn of(holder: Holder, device: DeviceId, bytes: Bytes, now_ms: u64, wait_ms: u64) -> Request {
        Request {
            holder,
            device,
            parts: Vec::new(),
            bytes,
            chunks: 0,
            plan: None,
            is_guarantee: false,
            guaranteed_before: None,
            has_asked: false,
            waits: wait_ms > 0,
            is_extended: false,
            asked_ms: now_ms,
            before_ms: 0,
            deadline_ms: now_ms.saturating_add(wait_ms.min(limits::WAIT_MS_MAX)),
            refused_creates: 0,
            refused_ms: 0,
            phase: Phase::Creating { missing: 0, ready: Vec::new(), failure: None },
        }
    }

    pub(super) fn having_waited(self, before_ms: u64) -> Request {
        Request { before_ms, ..self }
    }

    /// How long it has waited in all.
    pub(super) fn waited_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.asked_ms).saturating_add(self.before_ms)
    }

    /// Chunks that are there, and how many are wanted.
    pub(super) fn progress(&self) -> (u64, u64) {
        match &self.phase {
            Phase::Waiting(_) => (0, self.chunks),
            Phase::Creating { ready, .. } => (ready.len() as u64, self.chunks),
        }
    }

    /// The shelves that its chunks may come from, in the order in which they are used.
    fn shelves(&self) -> impl Iterator<Item = Shelf> {
        let used = match self.holder {
            Holder::Session(session) => Some(Shelf::Used(session)),
            Holder::Plan(_) => None,
        };
        self.plan.map(Shelf::Reserved).into_iter().chain(used).chain([Shelf::Pristine])
    }
}

impl Ledger {
    /// Whether there is somebody who asks, and a place for one more.
    pub(super) fn check_asking(
        &self,
        request: RequestId,
        holder: Holder,
        device: DeviceId,
    ) -> Result<Holder, LedgerError> {
        if self.requests.contains_key(&request) {
            return Err(LedgerError::RequestExists(request));
        }
        if !self.devices.contains_key(&device) {
            return Err(LedgerError::NoDevice(device));
        }
        if let Holder::Session(session) = holder {
            let asking = self.sessions.get(&session).ok_or(LedgerError::NoSession(session))?;
            if !asking.is_attached {
                return Err(LedgerError::Detached(session));
            }
        }
        if self.requests.len() >= limits::WAITING_MAX {
            return Err(LedgerError::TooMany { what: "waiting requests", limit: limits::WAITING_MAX });
        }
        Ok(holder)
    }

    pub(super) fn acquire(
        &mut self,
        request: RequestId,
        wanted: Request,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let (device, bytes, chunks) = (wanted.device, wanted.bytes, wanted.chunks);
        let holder = self.check_asking(request, wanted.holder, device)?;
        let account = &self.devices[&device];
        if self.chunks.len() as u64 + chunks > limits::CHUNKS_MAX as u64 {
            return Err(LedgerError::TooMany { what: "chunks of this daemon", limit: limits::CHUNKS_MAX });
        }
        let refusal = if let Some(refusal) = self.barred(holder, device) {
            Some(refusal)
        } else if bytes > account.total() {
            Some(Refusal::OverBudget { device, requested: bytes, budget: account.budget() })
        } else if chunks > account.chunks_max() {
            let limit = account.chunks_max();
            Some(Refusal::Chunks { device, requested: chunks, available: limit, limit })
        } else {
            self.over_limit(holder, bytes)
        };
        if let Some(refusal) = refusal {
            effects.push(Effect::Refuse { request, holder, refusal });
            return Ok(());
        }
        self.requests.insert(request, wanted);
        self.enqueue(request);
        self.serve(device, effects);
        Ok(())
    }

    fn over_limit(&self, holder: Holder, requested: Bytes) -> Option<Refusal> {
        let Holder::Session(session) = holder else { return None };
        let asking = self.sessions.get(&session)?;
        let limit = asking.terms.limit;
        let fits = asking.held.checked_add(requested).is_some_and(|sum| sum <= limit);
        (!fits).then_some(Refusal::OverLimit { requested, held: asking.held, limit })
    }

    /// Where a request stands in its queue.
    pub(super) fn key_of(&self, request: RequestId) -> QueueKey {
        let waiting = &self.requests[&request];
        let is_starting = match waiting.holder {
            Holder::Session(session) => !self.sessions[&session].holds_on(waiting.device),
            Holder::Plan(_) => true,
        };
        QueueKey {
            is_beyond_guarantee: !self.is_within_guarantee(request),
            priority: Reverse(self.priority_of(waiting.holder)),
            is_starting,
            request,
        }
    }

    pub(super) fn enqueue(&mut self, request: RequestId) {
        let key = self.key_of(request);
        let waiting = self.requests.get_mut(&request).expect("the caller has the request");
        waiting.phase = Phase::Waiting(key);
        let is_guarantee = waiting.is_guarantee;
        self.devices.get_mut(&waiting.device).expect("the request has its device").enqueue(key, is_guarantee);
    }

    /// What a session holds or may have has changed: its requests may stand elsewhere now.
    pub(super) fn rekey(&mut self, session: SessionId, device: DeviceId) {
        let account = &self.devices[&device];
        if !self.sessions.contains_key(&session) || !account.has_waiting() && account.admissions().is_empty() {
            return;
        }
        let keys = account.waiting().iter().chain(account.admissions());
        let of_session = |key: &&QueueKey| self.requests[&key.request].holder == Holder::Session(session);
        let requests: Vec<_> = keys.filter(of_session).map(|key| key.request).collect();
        for request in requests {
            self.leave_queue(request);
            self.enqueue(request);
        }
    }

    fn take(&mut self, session: SessionId, device: DeviceId, bytes: Bytes) {
        self.sessions.get_mut(&session).expect("a request ends with its session").take(device, bytes);
        self.rekey(session, device);
    }

    /// Grants what can be granted, in order; then refuses what has no more time, and breaks up circles.
    pub(super) fn serve(&mut self, device: DeviceId, effects: &mut Vec<Effect>) {
        let mut next = Some(device);
        while let Some(device) = next {
            self.serve_one(device, effects);
            // Somebody left the queue of a device: whoever stood behind may be served now.
            next = self.break_deadlock(effects);
        }
    }

    fn serve_one(&mut self, device: DeviceId, effects: &mut Vec<Effect>) {
        if self.devices[&device].is_lost() {
            return self.clear_lost(device, effects);
        }
        loop {
            while let Some(key) = self.devices[&device].admissions().first().copied() {
                if !self.try_admit(key.request, effects) {
                    break;
                }
            }
            let mut is_any = false;
            while let Some(key) = self.devices[&device].waiting().first().copied() {
                if !self.try_promise(key.request, effects) {
                    break;
                }
                is_any = true;
            }
            // Whoever waits until what it is guaranteed is there may have it by now.
            let may_admit = is_any && !self.devices[&device].admissions().is_empty();
            if !may_admit && !self.refuse_overdue(device, effects) {
                return;
            }
        }
    }

    /// Nobody waits for a device that is lost, and nothing on it is kept.
    fn clear_lost(&mut self, device: DeviceId, effects: &mut Vec<Effect>) {
        let waiting = |account: &Account| account.waiting().iter().chain(account.admissions()).next().copied();
        while let Some(key) = waiting(&self.devices[&device]) {
            self.refuse(key.request, Refusal::Lost { device }, effects);
        }
        for chunk in self.devices[&device].all_shelved() {
            let record = &self.chunks[&chunk];
            if let State::Reserved { plan } = record.state {
                self.note_unreserved(plan, record.len);
            }
            self.destroy(chunk, effects);
        }
    }

    /// Promises all that the request needs, if it is there. If it is not, but idle chunks could make room, gives those up and says no for now.
    fn try_promise(&mut self, request: RequestId, effects: &mut Vec<Effect>) -> bool {
        let wanted = &self.requests[&request];
        let (holder, device, bytes) = (wanted.holder, wanted.device, wanted.bytes);
        if let Some(refusal) = self.barred(holder, device).or_else(|| self.over_limit(holder, bytes)) {
            self.refuse(request, refusal, effects);
            return true;
        }
        let account = &self.devices[&device];
        let (mut to_create, mut chunks) = (Bytes::ZERO, 0);
        for part in &wanted.parts {
            let there: u64 = wanted.shelves().map(|shelf| account.count_on_shelf(shelf, part.len)).sum();
            let missing = Part { count: part.count.saturating_sub(there), ..*part };
            to_create += missing.bytes().expect("checked when it was asked for");
            chunks += missing.count;
        }
        let of_plan = self.of_plan(request);
        if !self.withheld_from(holder, device).is_zero() {
            let mut lacking = self.lacking(holder, device, bytes, of_plan);
            if self.is_within_guarantee(request) && self.let_unheld_go(device, lacking, effects) {
                lacking = self.lacking(holder, device, bytes, of_plan);
            }
            if !lacking.is_zero() {
                self.ask_back(request, lacking, effects);
                return false;
            }
        }
        let account = &self.devices[&device];
        if to_create > account.available() || chunks > account.chunks_free() {
            if let Err(chunks_lacking) = self.make_room(request, to_create, chunks, effects) {
                let lacking = self.lacking(holder, device, bytes, of_plan);
                if self.is_within_guarantee(request) && self.let_unheld_go(device, lacking, effects) {
                    return false;
                }
                let in_chunks = limits::CHUNK_LEN_MIN.checked_mul(chunks_lacking).unwrap_or(Bytes::MAX);
                self.ask_back(request, lacking.max(in_chunks), effects);
            }
            return false;
        }
        self.exchange_used(request, to_create, effects);
        self.promise_all(request, effects);
        true
    }

    /// Gives up chunks that the session itself has returned, as far as new ones are created for it: it
    /// takes other lengths than it gave, and the device holds no more for it. What is given up beyond
    /// that counts for its next requests.
    fn exchange_used(&mut self, request: RequestId, to_create: Bytes, effects: &mut Vec<Effect>) {
        let wanted = &self.requests[&request];
        let (device, Holder::Session(session)) = (wanted.device, wanted.holder) else { return };
        let place = self.sessions[&session].place(device);
        let mut left = to_create.saturating_sub(place.exchanged);
        let exchanged = place.exchanged.saturating_sub(to_create);
        let account = &self.devices[&device];
        let is_wanted = |len: Bytes| wanted.parts.iter().any(|part| part.len == len);
        let (mut given_up, mut larger) = (Vec::new(), None);
        if !left.is_zero() {
            for (len, chunk) in account.used_by(session).filter(|(len, _)| !is_wanted(*len)) {
                if left.is_zero() {
                    break;
                }
                if len <= left {
                    left -= len;
                    given_up.push(chunk);
                } else {
                    larger = Some((len, chunk));
                }
            }
        }
        let beyond = larger.filter(|_| !left.is_zero());
        let exchanged = exchanged + beyond.map_or(Bytes::ZERO, |(len, _)| len.saturating_sub(left));
        given_up.extend(beyond.map(|(_, chunk)| chunk));
        let asking = self.sessions.get_mut(&session).expect("a request ends with its session");
        asking.place_mut(device).exchanged = exchanged;
        given_up.into_iter().for_each(|chunk| self.destroy(chunk, effects));
    }

    /// Bytes of a request that come from what is reserved for its plan.
    fn of_plan(&self, request: RequestId) -> Bytes {
        let wanted = &self.requests[&request];
        let Some(plan) = wanted.plan else { return Bytes::ZERO };
        let account = &self.devices[&wanted.device];
        let there = |part: &Part| {
            let count = account.count_on_shelf(Shelf::Reserved(plan), part.len).min(part.count);
            Part { count, ..*part }.bytes().expect("checked when it was asked for")
        };
        wanted.parts.iter().map(there).sum()
    }

    fn promise_all(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let wanted = self.requests.get_mut(&request).expect("the caller has the request");
        let (holder, device, bytes) = (wanted.holder, wanted.device, wanted.bytes);
        let (parts, shelves) = (wanted.parts.clone(), wanted.shelves().collect::<Vec<_>>());
        self.leave_queue(request);
        if let Holder::Session(session) = holder {
            self.take(session, device, bytes);
        }
        let mut ready = Vec::new();
        let mut missing = 0;
        for part in parts {
            let mut left = part.count;
            for shelf in &shelves {
                let account = &self.devices[&device];
                let found: Vec<_> = account.on_shelf(*shelf, part.len).take(left as usize).collect();
                left -= found.len() as u64;
                for chunk in found {
                    self.claim(chunk, request, *shelf);
                    ready.push(chunk);
                }
            }
            missing += left;
            for _ in 0..left {
                self.promise(device, part.len, Some(request), effects);
            }
        }
        let wanted = self.requests.get_mut(&request).expect("still there");
        wanted.phase = Phase::Creating { missing, ready, failure: None };
        self.finish_if_complete(request, effects);
    }

    /// Sets a chunk aside for a request.
    fn claim(&mut self, chunk: ChunkId, request: RequestId, from: Shelf) {
        if let Shelf::Reserved(plan) = from {
            self.note_unreserved(plan, self.chunks[&chunk].len);
        }
        self.set_state(chunk, State::Claimed { request, from });
    }

    /// Puts a chunk that was set aside back to where it lay.
    fn unclaim(&mut self, chunk: ChunkId) {
        let State::Claimed { from, .. } = self.chunks[&chunk].state else { panic!("only a claimed chunk is put back") };
        match from {
            Shelf::Pristine => self.make_idle(chunk, None),
            Shelf::Used(session) => self.make_idle(chunk, Some(session)),
            Shelf::Reserved(plan) => self.reserve(chunk, plan),
        }
    }

    /// Chunks of a plan that are set aside for requests go back to everybody, should they be put back. Says whether there were any.
    pub(super) fn forget_plan_of_claims(&mut self, plan: PlanId) -> bool {
        let set_aside = self.requests.values().filter_map(|request| match &request.phase {
            Phase::Creating { ready, .. } => Some(ready),
            Phase::Waiting(_) => None,
        });
        let mut found = false;
        for chunk in set_aside.flatten() {
            let record = self.chunks.get_mut(chunk).expect("a request's chunks are on record");
            if let State::Claimed { from, .. } = &mut record.state
                && *from == Shelf::Reserved(plan)
            {
                *from = Shelf::Pristine;
                found = true;
            }
        }
        found
    }

    fn reserve(&mut self, chunk: ChunkId, plan: PlanId) {
        *self.plans.entry(plan).or_default() += self.chunks[&chunk].len;
        self.set_state(chunk, State::Reserved { plan });
    }

    fn note_unreserved(&mut self, plan: PlanId, len: Bytes) {
        let reserved = self.plans.get_mut(&plan).expect("reserved chunks are on record");
        *reserved -= len;
        if reserved.is_zero() {
            self.plans.remove(&plan);
        }
    }

    /// Gives idle chunks up, the longest idle first, until `to_create` bytes in so many chunks can be promised. Gives up none where even all would not do, and says how many chunks lack then.
    fn make_room(
        &mut self,
        request: RequestId,
        to_create: Bytes,
        chunks: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), u64> {
        let wanted = &self.requests[&request];
        let account = &self.devices[&wanted.device];
        let coming = account.available() + account.bytes().destroying;
        // Whatever is there beyond the total has to go before any of that can be had.
        let beyond = account.bytes().promised().saturating_sub(account.total());
        let mut lacking = (to_create + beyond).saturating_sub(coming);
        let mut chunks_lacking = chunks.saturating_sub(account.chunks_free() + account.chunks_coming());
        // Chunks that the request itself will use must stay; more of that size than it needs may go.
        let mut spare: BTreeMap<Bytes, u64> = BTreeMap::new();
        for part in &wanted.parts {
            let there: u64 = wanted.shelves().map(|shelf| account.count_on_shelf(shelf, part.len)).sum();
            spare.insert(part.len, there.saturating_sub(part.count));
        }
        let shelves: Vec<_> = wanted.shelves().collect();
        let mut given_up = Vec::new();
        for (chunk, len, shelf) in account.oldest_idle() {
            if lacking.is_zero() && chunks_lacking == 0 {
                break;
            }
            if shelves.contains(&shelf)
                && let Some(spare) = spare.get_mut(&len)
            {
                if *spare == 0 {
                    continue;
                }
                *spare -= 1;
            }
            lacking = lacking.saturating_sub(len);
            chunks_lacking = chunks_lacking.saturating_sub(1);
            given_up.push(chunk);
        }
        if !lacking.is_zero() || chunks_lacking > 0 {
            return Err(chunks_lacking);
        }
        for chunk in given_up {
            self.destroy(chunk, effects);
        }
        Ok(())
    }

    /// A chunk that was created for a request: claims it.
    pub(super) fn chunk_ready(&mut self, request: RequestId, chunk: ChunkId, effects: &mut Vec<Effect>) {
        self.claim(chunk, request, Shelf::Pristine);
        self.note_answer(request, |ready, _| ready.push(chunk));
        self.finish_if_complete(request, effects);
    }

    /// A chunk of a request could not be created.
    pub(super) fn chunk_missing(&mut self, request: RequestId, why: Shortage, effects: &mut Vec<Effect>) {
        self.note_answer(request, |_, failure| *failure = Some(why));
        self.finish_if_complete(request, effects);
    }

    fn note_answer(&mut self, request: RequestId, note: impl FnOnce(&mut Vec<ChunkId>, &mut Option<Shortage>)) {
        let creating = self.requests.get_mut(&request).expect("the caller has the request");
        let Phase::Creating { missing, ready, failure } = &mut creating.phase else {
            panic!("only a request that creates gets an answer");
        };
        *missing -= 1;
        note(ready, failure);
    }

    fn finish_if_complete(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let Phase::Creating { missing: 0, ready, failure } = &self.requests[&request].phase else { return };
        let (ready, failure) = (ready.clone(), *failure);
        let device = self.requests[&request].device;
        if self.devices[&device].is_lost() {
            self.take_back(request, &ready);
            return self.refuse(request, Refusal::Lost { device }, effects);
        }
        let Some(failure) = failure else {
            let granted = self.requests.remove(&request).expect("looked up above");
            for chunk in &ready {
                match granted.holder {
                    Holder::Session(session) => self.lease(*chunk, session),
                    Holder::Plan(plan) => self.reserve(*chunk, plan),
                }
            }
            let chunks = self.in_order(&granted.parts, &ready);
            if granted.has_asked {
                self.settle(granted.holder, device);
            }
            effects.push(Effect::Grant { request, holder: granted.holder, chunks });
            return;
        };
        self.take_back(request, &ready);
        let failed = self.requests.get_mut(&request).expect("looked up above");
        let is_soon = self.now_ms < failed.refused_ms.saturating_add(SOON_MS);
        failed.refused_creates = if is_soon { failed.refused_creates + 1 } else { 1 };
        failed.refused_ms = self.now_ms;
        match failure {
            Shortage::Memory if failed.refused_creates < REFUSED_CREATES_MAX => {
                // The budget is corrected by now: back to the queue, and to whoever stands before it.
                self.enqueue(request);
                self.serve(device, effects);
            }
            Shortage::Memory => {
                let refusal = self.exhausted(request);
                self.refuse(request, refusal, effects);
            }
            Shortage::Chunks => {
                // Not by waiting for memory, which is there: whoever asked is told what to raise.
                let (requested, available) = (failed.chunks, ready.len() as u64);
                let limit = self.devices[&device].chunks_max();
                self.refuse(request, Refusal::Chunks { device, requested, available, limit }, effects);
            }
            Shortage::Nothing => self.refuse(request, Refusal::Driver { device }, effects),
        }
    }

    fn in_order(&self, parts: &[Part], chunks: &[ChunkId]) -> Vec<(ChunkId, Bytes)> {
        let mut chunks: Vec<_> = chunks.iter().map(|chunk| (*chunk, self.chunks[chunk].len)).collect();
        let place = |len: Bytes| parts.iter().position(|part| part.len == len);
        chunks.sort_by_key(|(chunk, len)| (place(*len), *chunk));
        chunks
    }

    /// Undoes the promise to a request whose chunks did not all come. None of them was handed out.
    fn take_back(&mut self, request: RequestId, ready: &[ChunkId]) {
        let failed = &self.requests[&request];
        let (holder, device, bytes) = (failed.holder, failed.device, failed.bytes);
        if let Holder::Session(session) = holder {
            self.sessions.get_mut(&session).expect("a request ends with its session").untake(device, bytes);
            self.rekey(session, device);
        }
        for chunk in ready {
            self.unclaim(*chunk);
        }
    }

    /// Takes a request out of whatever it is in and answers it with a refusal.
    pub(super) fn refuse(&mut self, request: RequestId, refusal: Refusal, effects: &mut Vec<Effect>) {
        self.leave_queue(request);
        let refused = self.requests.remove(&request).expect("the caller has the request");
        if let (Some(before), Holder::Session(session)) = (refused.guaranteed_before, refused.holder) {
            // What was kept for it meanwhile is not any more.
            self.set_guarantee(session, refused.device, before);
        }
        effects.push(Effect::Refuse { request, holder: refused.holder, refusal });
    }

    pub(super) fn leave_queue(&mut self, request: RequestId) {
        let waiting = &self.requests[&request];
        if let Phase::Waiting(key) = &waiting.phase {
            let account = self.devices.get_mut(&waiting.device).expect("the request has its device");
            account.dequeue(key, waiting.is_guarantee);
        }
    }

    pub(super) fn cancel(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let Some(device) = self.requests.get(&request).map(|given_up| given_up.device) else { return };
        self.give_up(request, Refusal::Cancelled, effects);
        self.serve(device, effects);
    }

    pub(super) fn close(&mut self, effects: &mut Vec<Effect>) {
        self.is_closed = true;
        let requests: Vec<_> = self.requests.keys().copied().collect();
        for request in requests {
            self.give_up(request, Refusal::Closed, effects);
        }
    }

    fn give_up(&mut self, request: RequestId, why: Refusal, effects: &mut Vec<Effect>) {
        if let Phase::Creating { ready, .. } = &self.requests[&request].phase {
            let ready = ready.clone();
            self.take_back(request, &ready);
        }
        self.refuse(request, why, effects);
    }

    /// Gives up every request of a holder. Says where, for the caller to serve whoever stood behind them: only once all are gone, or the next of
    /// the same holder would be granted to nobody.
    pub(super) fn drop_requests_of(
        &mut self,
        holder: Holder,
        why: &Refusal,
        effects: &mut Vec<Effect>,
    ) -> BTreeSet<DeviceId> {
        let of_holder = |(_, request): &(&RequestId, &Request)| request.holder == holder;
        let requests: Vec<_> =
            self.requests.iter().filter(of_holder).map(|(id, request)| (*id, request.device)).collect();
        for (request, _) in &requests {
            self.give_up(*request, why.clone(), effects);
        }
        requests.into_iter().map(|(_, device)| device).collect()
    }

    fn exhausted(&self, request: RequestId) -> Refusal {
        let waiting = &self.requests[&request];
        if waiting.is_guarantee {
            return self.guarantee_refused(request);
        }
        let account = &self.devices[&waiting.device];
        let view = self.device(waiting.device).expect("the request has its device");
        let of_plan = waiting.plan.map(|plan| account.reserved_of(plan)).unwrap_or_default();
        let requested = waiting.chunks;
        let available = account.chunks_free() + account.chunks_coming() + (account.aged() + of_plan.len()) as u64;
        if view.unpromised() >= waiting.bytes && requested > available {
            return Refusal::Chunks { device: waiting.device, requested, available, limit: account.chunks_max() };
        }
        let own: Bytes = of_plan.iter().map(|chunk| self.chunks[chunk].len).sum();
        Refusal::Exhausted {
            device: waiting.device,
            requested: waiting.bytes,
            available: view.available(),
            budget: view.budget,
            holders: self.holders(waiting.device),
            reserved: view.bytes.reserved - own,
            withheld: self.withheld_from(waiting.holder, waiting.device),
            waited_ms: waiting.waited_ms(self.now_ms),
            ahead: self.devices[&waiting.device].waiting().iter().take_while(|key| key.request != request).count(),
        }
    }

    /// Refuses requests whose time is up. While room is being made nobody's is: the answer is on its way.
    pub(super) fn refuse_overdue(&mut self, device: DeviceId, effects: &mut Vec<Effect>) -> bool {
        let account = &self.devices[&device];
        if !account.bytes().destroying.is_zero() {
            return false;
        }
        let is_overdue = |request: &RequestId| {
            self.requests[request].deadline_ms <= self.now_ms && !self.questions.are_open_for(device, *request)
        };
        let waiting = account.waiting().iter().chain(account.admissions()).map(|key| key.request);
        let overdue: Vec<_> = waiting.filter(is_overdue).collect();
        let mut is_any = false;
        for request in &overdue {
            if self.overstayed(*request, effects) {
                continue;
            }
            let refusal = self.exhausted(*request);
            self.refuse(*request, refusal, effects);
            is_any = true;
        }
        is_any
    }

    /// Where every session that holds memory waits for more, nobody will release any: the youngest such request is refused, and before all that are within a guarantee one that is not. So it is where sessions wait for each other on several
    /// devices. Says where.
    fn break_deadlock(&mut self, effects: &mut Vec<Effect>) -> Option<DeviceId> {
        if !self.devices.values().any(Account::has_waiting) {
            return None;
        }
        let stuck = self.stuck();
        let order = |(.., request): &(SessionId, DeviceId, RequestId)| (!self.is_within_guarantee(*request), *request);
        let (session, device, request) = stuck.iter().copied().max_by_key(order)?;
        let held = |session: &SessionId| self.sessions[session].held_on(device);
        let members: BTreeSet<_> = stuck.iter().map(|(session, ..)| *session).collect();
        let mut cycle: Vec<_> = members
            .iter()
            .map(|session| Holding { session: *session, held: held(session) })
            .filter(|holding| !holding.held.is_zero() || holding.session == session)
            .collect();
        cycle.sort_by_key(|holding| holding.session);
        self.refuse(request, Refusal::Deadlock { device, cycle }, effects);
        Some(device)
    }

    /// Requests of sessions that hold memory which somebody waits for, and that can go on only if one of them gives up.
    fn stuck(&self) -> Vec<(SessionId, DeviceId, RequestId)> {
        let mut waiting: Vec<(SessionId, DeviceId, RequestId)> = Vec::new();
        // Devices on which somebody waits who may hope, and who holds memory on the others.
        let mut open: BTreeSet<DeviceId> = BTreeSet::new();
        let mut holders: BTreeMap<DeviceId, Vec<SessionId>> = BTreeMap::new();
        for (device, account) in self.devices.iter().filter(|(_, account)| account.has_waiting()) {
            let is_moving = !account.bytes().destroying.is_zero() || !account.bytes().creating.is_zero();
            if is_moving || self.questions.are_open(*device) || self.has_unheld(*device) {
                open.insert(*device);
            } else {
                let there = self.sessions.iter().filter(|(_, session)| session.holds_on(*device));
                let there: Vec<_> = there.map(|(session, _)| *session).collect();
                if there.is_empty() {
                    open.insert(*device);
                }
                holders.insert(*device, there);
            }
        }
        if holders.is_empty() {
            return waiting;
        }
        let mut waits_on: BTreeMap<SessionId, BTreeSet<DeviceId>> = BTreeMap::new();
        for (device, account) in &self.devices {
            for key in account.waiting() {
                if let Holder::Session(session) = self.requests[&key.request].holder {
                    waiting.push((session, *device, key.request));
                    waits_on.entry(session).or_default().insert(*device);
                }
            }
        }
        let mut stuck = waits_on;
        loop {
            // A device opens up when one of its holders may go on; there are few devices, and each opens once.
            let before = open.len();
            for (device, there) in &holders {
                if !open.contains(device) && there.iter().any(|holder| !stuck.contains_key(holder)) {
                    open.insert(*device);
                }
            }
            let count = stuck.len();
            stuck.retain(|_, devices| devices.is_disjoint(&open));
            if stuck.is_empty() || open.len() == before && stuck.len() == count {
                break;
            }
        }
        // Whoever holds nothing of what they wait for is in nobody's way.
        let wanted: BTreeSet<DeviceId> = stuck.values().flatten().copied().collect();
        let is_in_the_way = |session: &SessionId| wanted.iter().any(|device| self.sessions[session].holds_on(*device));
        waiting.retain(|(session, ..)| stuck.contains_key(session) && is_in_the_way(session));
        // Looked at last, as it takes a walk over all sessions: what somebody got by asking may be asked back later.
        let first = |device: &DeviceId| self.devices[device].waiting().first().map(|key| key.request);
        if !waiting.is_empty() && wanted.iter().filter_map(first).any(|request| self.may_ask_later(request)) {
            waiting.clear();
        }
        waiting
    }
}
