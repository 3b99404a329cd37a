//! A session's way to the daemon, and to the one that follows it: the connection of the moment, and what the session holds, which is what it says when it is there again.
//!
//! Whoever leases or releases is inside ([`Line::enter`]) from before the daemon hears of it until what is held says so too. A connection is changed when nobody is. So what the session names is what it has: no chunk is on its way past it.
//!
//! Not for: finding the next daemon (the control thread does).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::giving::Question;
use super::link::Link;
use super::{Guaranteed, SessionError};
use crate::clock::Clock;
use crate::driver::Handle;
use crate::error::chain;
use crate::ids::{ChunkId, DeviceUuid, RangeId, SessionId};
use crate::limits;
use crate::units::Bytes;
use crate::wire::convert::Token;
use crate::wire::v1;

/// A daemon that says no because it ends is gone soon: within that the session has noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// One that has been away for so long is not waited for any more: it comes again, or not.
const AWAY_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Line {
    gate: Mutex<Gate>,
    changed: Condvar,
    /// The session's number at the daemon.
    session: AtomicU64,
    is_attached: AtomicBool,
    /// No daemon will know this session again.
    is_given_up: AtomicBool,
    holdings: Mutex<Vec<Weak<Holding>>>,
    /// Its holds of shared ranges.
    ranges: Mutex<Vec<Weak<RangeHold>>>,
    /// Numbers chunks whose own number is another's here.
    next_chunk: AtomicU64,
    /// Somebody found that the connection is over.
    pub(super) broken: tokio::sync::Notify,
    /// What it is guaranteed, by device.
    pub(super) guaranteed: Mutex<BTreeMap<DeviceUuid, Guaranteed>>,
    /// Where chunks come from, and how long for a word.
    chunk_socket: PathBuf,
    patience: Duration,
    /// Where the session counts: brought along to the next daemon.
    page: OwnedFd,
    clock: Arc<dyn Clock>,
}

#[derive(Debug)]
struct Gate {
    link: Arc<Link>,
    /// How many connections there were.
    epoch: u64,
    users: usize,
    is_closed: bool,
    /// When the daemon went away.
    away_since: Option<Duration>,
}

/// Somebody is inside: the connection is not changed.
pub(super) struct User<'a> {
    line: &'a Line,
    link: Arc<Link>,
    epoch: u64,
}

impl User<'_> {
    /// Which connection it is.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Deref for User<'_> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.line.gate().users -= 1;
        self.line.changed.notify_all();
    }
}

/// The chunks of one source.
#[derive(Debug)]
pub(super) struct Holding {
    pub(super) device: DeviceUuid,
    /// Chunks whose release could not be sent: the daemon counts them, and they are nowhere here. Locked before `held`.
    pub(super) unsent: Mutex<Vec<ChunkId>>,
    /// Everything that was acquired and not released, by the number that it came with.
    pub(super) held: Mutex<BTreeMap<ChunkId, Leased>>,
}

/// A hold of a shared range.
#[derive(Debug)]
pub(super) struct RangeHold {
    pub(super) range: RangeId,
    /// False once a daemon has said that it knows of no such hold: then there is nothing to let go of, and the number may be another range's.
    pub(super) is_known: AtomicBool,
    /// The connection over which it came.
    pub(super) epoch: u64,
}

/// A chunk that is leased.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leased {
    pub(super) handle: Handle,
    pub(super) len: Bytes,
    /// What the daemon calls it now; nothing while it sleeps, or where the daemon does not count it.
    pub(super) now: Option<ChunkId>,
    /// The daemon does not count it, and it does not sleep.
    pub(super) is_uncounted: bool,
}

impl Leased {
    pub(super) fn is_asleep(&self) -> bool {
        self.now.is_none() && !self.is_uncounted
    }
}

impl Holding {
    pub(super) fn held(&self) -> MutexGuard<'_, BTreeMap<ChunkId, Leased>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unsent(&self) -> MutexGuard<'_, Vec<ChunkId>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the daemon what could not be told before: that chunks are given back.
    pub(super) fn send_unsent(&self, link: &Link) {
        let mut unsent = self.unsent();
        if unsent.is_empty() {
            return;
        }
        match link.release(unsent.clone()) {
            Ok(()) => unsent.clear(),
            Err(error) => tracing::debug!(error = %chain(&error), "chunks could not be given back yet"),
        }
    }
}

impl Line {
    pub(super) fn new(
        link: Link,
        session: SessionId,
        page: OwnedFd,
        chunk_socket: PathBuf,
        patience: Duration,
        clock: Arc<dyn Clock>,
    ) -> Line {
        Line {
            gate: Mutex::new(Gate { link: Arc::new(link), epoch: 1, users: 0, is_closed: false, away_since: None }),
            changed: Condvar::new(),
            session: AtomicU64::new(session.0),
            is_attached: AtomicBool::new(true),
            is_given_up: AtomicBool::new(false),
            holdings: Mutex::default(),
            ranges: Mutex::default(),
            next_chunk: AtomicU64::new(1 << 63),
            broken: tokio::sync::Notify::new(),
            guaranteed: Mutex::default(),
            chunk_socket,
            patience,
            page,
            clock,
        }
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn session(&self) -> SessionId {
        SessionId(self.session.load(Ordering::Relaxed))
    }

    pub(super) fn chunk_socket(&self) -> &PathBuf {
        &self.chunk_socket
    }

    pub(super) fn is_attached(&self) -> bool {
        self.is_attached.load(Ordering::Relaxed)
    }

    /// The connection to the daemon is gone, or there again.
    pub(super) fn set_attached(&self, is_attached: bool) {
        self.is_attached.store(is_attached, Ordering::Relaxed);
        // Whoever waits looks again.
        let now = self.clock.now();
        let mut gate = self.gate();
        gate.away_since = (!is_attached).then(|| gate.away_since.unwrap_or(now));
        drop(gate);
        self.changed.notify_all();
    }

    /// Nobody will be there again.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.set_attached(false);
    }

    /// Has the connection of the moment, unless it is being changed.
    pub(super) fn enter(&self) -> Option<User<'_>> {
        let mut gate = self.gate();
        if gate.is_closed {
            return None;
        }
        gate.users += 1;
        Some(User { line: self, link: Arc::clone(&gate.link), epoch: gate.epoch })
    }

    /// The number of the connection of the moment.
    pub(super) fn epoch(&self) -> u64 {
        self.gate().epoch
    }

    /// The connection `epoch` is over, as whoever has used it says: where nobody has noticed the next one is looked for.
    pub(super) fn note_broken(&self, epoch: u64) {
        if self.epoch() == epoch && self.is_attached() {
            self.broken.notify_one();
        }
    }

    /// A number for a chunk that no daemon gives.
    pub(super) fn next_chunk(&self) -> ChunkId {
        ChunkId(self.next_chunk.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until there is another connection than `epoch`, `patience` at most. False where there is none: nor will there be soon where the daemon has not gone.
    pub(super) fn wait_for_next(&self, epoch: u64, patience: Duration) -> bool {
        let since = self.clock.now();
        let mut gate = self.gate();
        loop {
            if gate.epoch > epoch && !gate.is_closed {
                return true;
            }
            let waited = self.clock.now().saturating_sub(since);
            let is_there = self.is_attached() && !gate.is_closed;
            let away = gate.away_since.map_or(Duration::ZERO, |away| since.saturating_sub(away));
            let most = patience.min(if is_there { NOTICED } else { AWAY_MAX.saturating_sub(away) });
            if self.is_given_up.load(Ordering::Relaxed) || waited >= most {
                return false;
            }
            let waiting = self.changed.wait_timeout(gate, most.saturating_sub(waited));
            gate = waiting.map_or_else(|poisoned| poisoned.into_inner().0, |(gate, _)| gate);
        }
    }

    /// Lets nobody in any more, and waits until nobody is inside: whoever waits there for the daemon hears that it is gone. False where somebody stays too long; then it is as before.
    pub(super) fn close(&self) -> bool {
        let since = self.clock.now();
        let mut gate = self.gate();
        gate.is_closed = true;
        gate.link.hang_up();
        while gate.users > 0 {
            let waited = self.clock.now().saturating_sub(since);
            if waited >= self.patience {
                gate.is_closed = false;
                drop(gate);
                self.changed.notify_all();
                return false;
            }
            let waiting = self.changed.wait_timeout(gate, self.patience.saturating_sub(waited));
            gate = waiting.map_or_else(|poisoned| poisoned.into_inner().0, |(gate, _)| gate);
        }
        true
    }

    /// Lets everybody in again: with another connection, or with the one that is gone.
    pub(super) fn open(&self, next: Option<(Link, SessionId)>) {
        if let Some((link, session)) = next {
            // Before anybody leases: what is free again could come as what it was called before.
            self.holdings().iter().for_each(|holding| holding.send_unsent(&link));
            self.session.store(session.0, Ordering::Relaxed);
            let mut gate = self.gate();
            (gate.link, gate.epoch, gate.away_since) = (Arc::new(link), gate.epoch + 1, None);
            // Before anybody is let in: who is would take it for away.
            self.is_attached.store(true, Ordering::Relaxed);
        }
        self.gate().is_closed = false;
        self.changed.notify_all();
    }

    /// Connects to the chunk socket of the next daemon.
    pub(super) fn link_to(&self, ticket: Token) -> Result<Link, SessionError> {
        Ok(Link::open(&self.chunk_socket, ticket, self.patience, Some(self.page.as_fd()))?.0)
    }

    /// A source of this device begins: what it holds is the session's.
    pub(super) fn hold(&self, device: DeviceUuid) -> Arc<Holding> {
        let holding = Arc::new(Holding { device, unsent: Mutex::default(), held: Mutex::default() });
        let mut holdings = self.holdings.lock().unwrap_or_else(PoisonError::into_inner);
        holdings.retain(|known| known.strong_count() > 0);
        holdings.push(Arc::downgrade(&holding));
        holding
    }

    fn holdings(&self) -> Vec<Arc<Holding>> {
        let holdings = self.holdings.lock().unwrap_or_else(PoisonError::into_inner);
        holdings.iter().filter_map(Weak::upgrade).collect()
    }

    /// The session holds a range once more.
    pub(super) fn hold_range(&self, range: RangeId) -> Arc<RangeHold> {
        let hold = Arc::new(RangeHold { range, is_known: AtomicBool::new(true), epoch: self.epoch() });
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|known| known.strong_count() > 0);
        ranges.push(Arc::downgrade(&hold));
        hold
    }

    /// Its holds that a daemon knows of.
    fn range_holds(&self) -> Vec<Arc<RangeHold>> {
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let all = ranges.iter().filter_map(Weak::upgrade);
        all.filter(|hold| hold.is_known.load(Ordering::Relaxed)).collect()
    }

    /// What the session says that it holds, in messages that are not too long. What it has let go of without being able to say so is not in it, and is known with that.
    pub(super) fn tell(&self) -> Vec<v1::ReattachRequest> {
        let mut chunks = Vec::new();
        for holding in self.holdings() {
            let mut unsent = holding.unsent();
            let held = holding.held();
            chunks.extend(held.values().filter_map(|leased| Some((holding.device, leased.now?, leased.len))));
            unsent.clear();
        }
        let mut times: BTreeMap<RangeId, u32> = BTreeMap::new();
        self.range_holds().iter().for_each(|hold| *times.entry(hold.range).or_default() += 1);
        let ranges: Vec<_> = times.into_iter().collect();
        let mut messages = Vec::new();
        for some in chunks.chunks(limits::REATTACH_CHUNKS_MAX) {
            let mut held: BTreeMap<DeviceUuid, Vec<v1::ChunkInfo>> = BTreeMap::new();
            for (device, chunk, len) in some {
                held.entry(*device).or_default().push(v1::ChunkInfo { chunk_id: chunk.0, len_bytes: len.get() });
            }
            let held =
                held.into_iter().map(|(device, chunks)| v1::HeldChunks { device_uuid: device.0.to_vec(), chunks });
            messages.push(v1::ReattachRequest { held: held.collect(), ..v1::ReattachRequest::default() });
        }
        for some in ranges.chunks(limits::REATTACH_CHUNKS_MAX) {
            let ranges = some.iter().map(|(range, times)| v1::HeldRange { range_id: range.0, times: *times });
            messages.push(v1::ReattachRequest { ranges: ranges.collect(), ..v1::ReattachRequest::default() });
        }
        if messages.is_empty() {
            messages.push(v1::ReattachRequest::default());
        }
        let last = messages.len() - 1;
        for (number, message) in messages.iter_mut().enumerate() {
            (message.is_first, message.has_more) = (number == 0, number < last);
        }
        messages
    }

    /// What the daemon has said to that: chunks have other names now, or none.
    pub(super) fn hear(&self, reply: &v1::ReattachReply) {
        let unknown_ranges: Vec<RangeId> = reply.unknown_range_ids.iter().copied().map(RangeId).collect();
        for hold in self.range_holds().iter().filter(|hold| unknown_ranges.contains(&hold.range)) {
            hold.is_known.store(false, Ordering::Relaxed);
        }
        let renamed: BTreeMap<ChunkId, ChunkId> =
            reply.renamed.iter().map(|renamed| (ChunkId(renamed.chunk_id), ChunkId(renamed.now))).collect();
        let unknown: BTreeSet<ChunkId> = reply.unknown_chunk_ids.iter().copied().map(ChunkId).collect();
        if renamed.is_empty() && unknown.is_empty() {
            return;
        }
        for holding in self.holdings() {
            // What was let go of since it was named has another name by now, too.
            let mut unsent = holding.unsent();
            unsent.retain(|now| !unknown.contains(now));
            unsent.iter_mut().for_each(|now| *now = renamed.get(now).copied().unwrap_or(*now));
            for leased in holding.held().values_mut() {
                let Some(now) = leased.now else { continue };
                if let Some(name) = renamed.get(&now) {
                    leased.now = Some(*name);
                } else if unknown.contains(&now) {
                    (leased.now, leased.is_uncounted) = (None, true);
                }
            }
        }
    }

    /// Answers a question of the daemon's.
    pub(super) fn answer(&self, question: Question) -> Result<(), SessionError> {
        self.enter().ok_or(SessionError::DaemonGone)?.answer(question)
    }

    /// See [`Link::settle`].
    pub(super) fn settle(&self) {
        if let Some(link) = self.enter() {
            link.settle();
        }
    }
}
