//! One device in the ledger: its budget, its bytes by state, and the shelves on which its idle chunks lie.
//!
//! Invariant: [`DeviceBytes`] and the shelves say exactly what the chunk records say ([`super::Ledger::invariants`] counts it again).

use std::collections::{BTreeMap, BTreeSet};

use super::queue::QueueKey;
use super::{Shortage, State};
use crate::ids::{ChunkId, DeviceId, PlanId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// Bytes of a device by the state of the chunks that they are in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceBytes {
    /// Promised, being created.
    pub creating: Bytes,
    /// Set aside for a request whose other chunks are being created.
    pub claimed: Bytes,
    /// With the daemon, for whoever asks.
    pub idle: Bytes,
    /// With the daemon, for the job of a plan.
    pub reserved: Bytes,
    /// With a session.
    pub leased: Bytes,
    /// In shared ranges: counted once, whoever holds them.
    pub shared: Bytes,
    /// On the way back to the driver.
    pub destroying: Bytes,
    /// In quarantine: the driver did not take them back when it was asked.
    pub quarantined: Bytes,
}

impl DeviceBytes {
    /// All of them: what counts against the budget.
    pub fn promised(&self) -> Bytes {
        self.creating
            + self.claimed
            + self.idle
            + self.reserved
            + self.leased
            + self.shared
            + self.destroying
            + self.quarantined
    }

    fn of(&mut self, state: State) -> &mut Bytes {
        match state {
            State::Creating { .. } => &mut self.creating,
            State::Claimed { .. } => &mut self.claimed,
            State::Idle { .. } => &mut self.idle,
            State::Reserved { .. } => &mut self.reserved,
            State::Leased { .. } => &mut self.leased,
            State::Shared { .. } => &mut self.shared,
            State::Quarantined { failed: false } => &mut self.destroying,
            State::Quarantined { failed: true } => &mut self.quarantined,
        }
    }
}

/// A device as the ledger sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccountView {
    /// Which.
    pub device: DeviceId,
    /// All its memory.
    pub total: Bytes,
    /// What may be promised: the total less what others hold, and less what the driver refused.
    pub budget: Bytes,
    /// What others hold: contexts, foreign processes, and chunks that were given back while somebody still maps them.
    pub foreign: Bytes,
    /// Bytes by state.
    pub bytes: DeviceBytes,
    /// Requests that wait here, those for guarantees among them.
    pub waiting: usize,
    /// Creates that the driver refused.
    pub refused_creates: u64,
    /// Most bytes that were leased at one time.
    pub peak_leased: Bytes,
    /// Chunks that the driver did not take back when it was asked.
    pub quarantined_chunks: u64,
    /// Chunks in whatever state.
    pub chunks: u64,
    /// How many there may be.
    pub chunks_max: u64,
    /// How many could be promised, once idle ones are given up.
    pub chunks_left: u64,
    /// The largest that is dealt in.
    pub chunk_len_max: Bytes,
    /// The device is gone.
    pub is_lost: bool,
    /// Nothing more of it is promised.
    pub is_draining: bool,
    /// Nothing more of any device is promised: the daemon is shutting down.
    pub is_closed: bool,
    /// Bytes that sessions are guaranteed.
    pub guaranteed: Bytes,
    /// Sessions that were asked for idle memory and have yet to answer, and are waited for.
    pub asked: usize,
}

impl AccountView {
    /// What a new request could get at most, once idle chunks are given up for it: in as many chunks as there may be, and none larger than are dealt in.
    pub fn available(&self) -> Bytes {
        self.unpromised().min(self.in_chunks())
    }

    /// The same of bytes alone, in however many chunks.
    pub(super) fn unpromised(&self) -> Bytes {
        if self.is_lost || self.is_draining || self.is_closed {
            return Bytes::ZERO;
        }
        let stays = self.bytes.promised() - self.bytes.idle - self.bytes.destroying;
        self.budget.saturating_sub(stays)
    }

    /// The same of chunks alone.
    pub(super) fn in_chunks(&self) -> Bytes {
        self.chunk_len_max.checked_mul(self.chunks_left).unwrap_or(Bytes::MAX)
    }
}

/// Where a chunk that is with the daemon lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Shelf {
    /// Nobody could have imported it.
    Pristine,
    /// This session could have.
    Used(SessionId),
    /// For the job of this plan.
    Reserved(PlanId),
}

impl Shelf {
    fn of(state: State) -> Option<Shelf> {
        match state {
            State::Idle { used_by: None, .. } => Some(Shelf::Pristine),
            State::Idle { used_by: Some(session), .. } => Some(Shelf::Used(session)),
            State::Reserved { plan } => Some(Shelf::Reserved(plan)),
            State::Creating { .. }
            | State::Claimed { .. }
            | State::Leased { .. }
            | State::Shared { .. }
            | State::Quarantined { .. } => None,
        }
    }
}

/// A device's account.
#[derive(Debug)]
pub(super) struct Account {
    total: Bytes,
    /// The most that may be promised: the total, or what was there when the ledger began, where that was more, less what has gone since.
    most: Bytes,
    foreign: Bytes,
    /// What the driver turned out to have, until it says something else.
    ceiling: Option<Bytes>,
    bytes: DeviceBytes,
    peak_leased: Bytes,
    shelves: BTreeMap<Shelf, BTreeMap<Bytes, BTreeSet<ChunkId>>>,
    /// Idle chunks (not reserved ones), those that have been idle longest first.
    by_age: BTreeMap<u64, (ChunkId, Bytes, Shelf)>,
    waiting: BTreeSet<QueueKey>,
    /// Requests for guarantees.
    admissions: BTreeSet<QueueKey>,
    refused_creates: u64,
    quarantined_chunks: u64,
    chunks: u64,
    chunks_max: u64,
    /// The same without those beyond it that were there from the start.
    chunks_max_after: u64,
    chunks_destroying: u64,
    is_lost: bool,
    is_draining: bool,
}

impl Account {
    pub(super) fn new(total: Bytes, chunks_max: u64) -> Account {
        Account {
            total,
            most: total,
            foreign: Bytes::ZERO,
            ceiling: None,
            bytes: DeviceBytes::default(),
            peak_leased: Bytes::ZERO,
            shelves: BTreeMap::new(),
            by_age: BTreeMap::new(),
            waiting: BTreeSet::new(),
            admissions: BTreeSet::new(),
            refused_creates: 0,
            quarantined_chunks: 0,
            chunks: 0,
            chunks_max,
            chunks_max_after: chunks_max,
            chunks_destroying: 0,
            is_lost: false,
            is_draining: false,
        }
    }

    /// Nothing more is to be promised here, or that ends.
    pub(super) fn drain(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// The device is gone, and has nothing to promise.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    pub(super) fn chunks_max(&self) -> u64 {
        self.chunks_max
    }

    /// As many chunks as there are there may be, and as many bytes, until they go.
    pub(super) fn allow_what_is_there(&mut self) {
        self.chunks_max = self.chunks_max.max(self.chunks);
        self.most = self.most.max(self.bytes.promised());
    }

    /// A chunk is gone: what was there beyond the total does not come again.
    pub(super) fn note_gone(&mut self) {
        self.most = self.most.min(self.bytes.promised()).max(self.total);
        self.chunks_max = self.chunks_max.min(self.chunks).max(self.chunks_max_after);
    }

    /// The most that may be promised.
    pub(super) fn most(&self) -> Bytes {
        self.most
    }

    /// What is there beyond the total, and is not on its way back to the driver.
    pub(super) fn excess(&self) -> Bytes {
        (self.bytes.promised() - self.bytes.destroying).saturating_sub(self.total)
    }

    /// What others seem to hold.
    pub(super) fn foreign(&self) -> Bytes {
        self.foreign
    }

    /// Chunks in whatever state.
    pub(super) fn chunks(&self) -> usize {
        usize::try_from(self.chunks).unwrap_or(usize::MAX)
    }

    /// What others seemed to hold is ours.
    pub(super) fn note_registered(&mut self, len: Bytes) {
        self.foreign = self.foreign.saturating_sub(len);
    }

    /// Chunks on their way back to the driver.
    pub(super) fn chunks_coming(&self) -> u64 {
        self.chunks_destroying
    }

    /// Chunks that can be promised now, without giving up anything idle.
    pub(super) fn chunks_free(&self) -> u64 {
        if self.is_lost { 0 } else { self.chunks_max.saturating_sub(self.chunks) }
    }

    pub(super) fn total(&self) -> Bytes {
        self.total
    }

    pub(super) fn budget(&self) -> Bytes {
        if self.is_lost {
            return Bytes::ZERO;
        }
        let known = self.total.saturating_sub(self.foreign);
        self.ceiling.map_or(known, |ceiling| ceiling.min(known))
    }

    /// What can be promised now, without giving up anything idle.
    pub(super) fn available(&self) -> Bytes {
        self.budget().saturating_sub(self.bytes.promised())
    }

    pub(super) fn bytes(&self) -> &DeviceBytes {
        &self.bytes
    }

    /// A chunk comes into `state`.
    pub(super) fn enter(&mut self, chunk: ChunkId, len: Bytes, state: State) {
        *self.bytes.of(state) += len;
        self.chunks += 1;
        self.chunks_destroying += u64::from(state == State::Quarantined { failed: false });
        self.peak_leased = self.peak_leased.max(self.bytes.leased);
        self.quarantined_chunks += u64::from(state == State::Quarantined { failed: true });
        if let Some(shelf) = Shelf::of(state) {
            self.shelves.entry(shelf).or_default().entry(len).or_default().insert(chunk);
            if let State::Idle { since, .. } = state {
                self.by_age.insert(since, (chunk, len, shelf));
            }
        }
    }

    /// A chunk leaves `state`.
    pub(super) fn leave(&mut self, chunk: ChunkId, len: Bytes, state: State) {
        *self.bytes.of(state) -= len;
        self.chunks -= 1;
        self.chunks_destroying -= u64::from(state == State::Quarantined { failed: false });
        self.quarantined_chunks -= u64::from(state == State::Quarantined { failed: true });
        let Some(shelf) = Shelf::of(state) else { return };
        let lens = self.shelves.get_mut(&shelf).expect("a chunk lies on the shelf of its state");
        let chunks = lens.get_mut(&len).expect("a chunk lies among those of its size");
        assert!(chunks.remove(&chunk), "a chunk lies on the shelf of its state");
        if chunks.is_empty() {
            lens.remove(&len);
            if lens.is_empty() {
                self.shelves.remove(&shelf);
            }
        }
        if let State::Idle { since, .. } = state {
            self.by_age.remove(&since);
        }
    }

    /// Chunks of `len` on a shelf.
    pub(super) fn on_shelf(&self, shelf: Shelf, len: Bytes) -> impl Iterator<Item = ChunkId> + '_ {
        self.shelves.get(&shelf).and_then(|lens| lens.get(&len)).into_iter().flatten().copied()
    }

    /// How many of them.
    pub(super) fn count_on_shelf(&self, shelf: Shelf, len: Bytes) -> u64 {
        self.shelves.get(&shelf).and_then(|lens| lens.get(&len)).map_or(0, |chunks| chunks.len() as u64)
    }

    fn all_on_shelf(&self, shelf: Shelf) -> Vec<ChunkId> {
        self.shelves.get(&shelf).into_iter().flat_map(|lens| lens.values().flatten()).copied().collect()
    }

    /// Idle chunks that this session has returned, the longest first.
    pub(super) fn used_by(&self, session: SessionId) -> impl Iterator<Item = (Bytes, ChunkId)> + '_ {
        let lens = self.shelves.get(&Shelf::Used(session)).into_iter().flat_map(|lens| lens.iter().rev());
        lens.flat_map(|(len, chunks)| chunks.iter().map(|chunk| (*len, *chunk)))
    }

    /// Idle chunks that this session could have imported, or with `None` those that nobody could.
    pub(super) fn idle_of(&self, session: Option<SessionId>) -> Vec<ChunkId> {
        self.all_on_shelf(session.map_or(Shelf::Pristine, Shelf::Used))
    }

    /// The lengths of idle chunks that a session may get as they are, and how many there are of each.
    pub(super) fn idle_lens(&self, session: SessionId) -> BTreeMap<Bytes, u64> {
        let mut lens = BTreeMap::new();
        for shelf in [Shelf::Used(session), Shelf::Pristine] {
            for (len, chunks) in self.shelves.get(&shelf).into_iter().flatten() {
                *lens.entry(*len).or_insert(0) += chunks.len() as u64;
            }
        }
        lens
    }

    pub(super) fn reserved_of(&self, plan: PlanId) -> Vec<ChunkId> {
        self.all_on_shelf(Shelf::Reserved(plan))
    }

    /// Every chunk that lies on a shelf.
    pub(super) fn all_shelved(&self) -> Vec<ChunkId> {
        self.shelved().map(|(_, _, chunk)| chunk).collect()
    }

    /// Idle chunks, those that have been idle longest first.
    pub(super) fn oldest_idle(&self) -> impl Iterator<Item = (ChunkId, Bytes, Shelf)> + '_ {
        self.by_age.values().copied()
    }

    /// The driver says how much nobody holds. It counts only while nothing is on its way in or out: otherwise the driver and this account speak
    /// of different moments.
    pub(super) fn observe(&mut self, free: Bytes) {
        if self.bytes.creating.is_zero() && self.bytes.destroying.is_zero() {
            self.foreign = self.total.saturating_sub(free).saturating_sub(self.bytes.promised());
            self.ceiling = None;
        }
    }

    pub(super) fn note_refused_create(&mut self, why: Shortage) {
        self.refused_creates += 1;
        if why == Shortage::Memory {
            // The driver has no more than what exists already.
            self.ceiling = Some(self.bytes.promised().saturating_sub(self.bytes.creating));
        }
    }

    /// A create of `len` came through, while the chunk still counts as being created.
    pub(super) fn note_created(&mut self, len: Bytes) {
        if let Some(ceiling) = &mut self.ceiling {
            *ceiling = (*ceiling).max(self.bytes.promised().saturating_sub(self.bytes.creating) + len);
        }
    }

    pub(super) fn waiting(&self) -> &BTreeSet<QueueKey> {
        &self.waiting
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn admissions(&self) -> &BTreeSet<QueueKey> {
        &self.admissions
    }

    fn queue_mut(&mut self, is_guarantee: bool) -> &mut BTreeSet<QueueKey> {
        if is_guarantee { &mut self.admissions } else { &mut self.waiting }
    }

    pub(super) fn enqueue(&mut self, key: QueueKey, is_guarantee: bool) {
        self.queue_mut(is_guarantee).insert(key);
    }

    pub(super) fn dequeue(&mut self, key: &QueueKey, is_guarantee: bool) {
        assert!(self.queue_mut(is_guarantee).remove(key), "a waiting request stands in the queue of its device");
    }

    pub(super) fn view(&self, device: DeviceId) -> AccountView {
        AccountView {
            device,
            total: self.total,
            budget: self.budget(),
            foreign: self.foreign,
            bytes: self.bytes,
            waiting: self.waiting.len() + self.admissions.len(),
            refused_creates: self.refused_creates,
            peak_leased: self.peak_leased,
            quarantined_chunks: self.quarantined_chunks,
            chunks: self.chunks,
            chunks_max: self.chunks_max,
            chunks_left: self.chunks_free() + self.chunks_coming() + self.aged() as u64,
            chunk_len_max: limits::CHUNK_LEN_MAX,
            is_lost: self.is_lost,
            is_draining: self.is_draining,
            is_closed: false,
            guaranteed: Bytes::ZERO,
            asked: 0,
        }
    }

    /// What lies on the shelves, for the audit.
    pub(super) fn shelved(&self) -> impl Iterator<Item = (Shelf, Bytes, ChunkId)> + '_ {
        self.shelves.iter().flat_map(|(shelf, lens)| {
            lens.iter().flat_map(move |(len, chunks)| chunks.iter().map(move |chunk| (*shelf, *len, *chunk)))
        })
    }

    /// Idle chunks.
    pub(super) fn aged(&self) -> usize {
        self.by_age.len()
    }
}
