//! The daemon as a source of chunks.
//!
//! A chunk that has slept has another number at the daemon than before: what the runtime knows it by is translated here.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::holdings::{Holding, Leased};
use super::link::{Leased as LeasedAnew, Link};
use super::{Session, SessionError, fork};
use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, DeviceUuid};
use crate::ladder::Shape;
use crate::limits;
use crate::memory::{Chunk, Device, MemoryError};
use crate::runtime::{ChunkSource, Room, SourceError, Want};
use crate::units::Bytes;
use crate::wire::convert::{WantedChunks, malformed};

/// Imports chunks: all of them, or none.
pub(super) fn import(device: &Arc<Device>, leased: Vec<LeasedAnew>) -> Result<Vec<Arc<Chunk>>, SessionError> {
    let import = |(id, len, fd)| Chunk::import(device, id, fd, len).map(Arc::new);
    let imported: Result<Vec<_>, MemoryError> = leased.into_iter().map(import).collect();
    imported.map_err(|error| {
        let message = format!("cannot import: {}", chain(&error));
        SessionError::Refused { kind: error.kind(), message }
    })
}

/// What a runtime is told.
fn told(error: SessionError) -> SourceError {
    SourceError { kind: error.kind(), message: chain(&error) }
}

/// How long a request may wait still, and how long it has waited.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    left: Duration,
    so_far: Duration,
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The daemon as a source of chunks for one device.
#[derive(Debug)]
pub(super) struct DaemonSource {
    session: Arc<Session>,
    device: Arc<Device>,
    uuid: DeviceUuid,
    /// The set of the stats page that its runtime writes.
    set: Option<usize>,
    holding: Arc<Holding>,
}

impl Drop for DaemonSource {
    fn drop(&mut self) {
        // The runtime has let go of its source, and writes no more: one that was made for a plan that cannot be installed has not used the figures up.
        if let Some(set) = self.set {
            self.session.page.give_back(set);
        }
    }
}

impl DaemonSource {
    pub(super) fn new(
        session: Arc<Session>,
        device: Arc<Device>,
        uuid: DeviceUuid,
        set: Option<usize>,
    ) -> DaemonSource {
        let holding = session.line.holdings.hold(uuid);
        DaemonSource { session, device, uuid, set, holding }
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// What the daemon calls these chunks; nothing where it does not count one of them.
    pub(super) fn names_of(&self, chunks: &[Arc<Chunk>]) -> Option<Vec<ChunkId>> {
        let held = self.held();
        chunks.iter().map(|chunk| held.get(&chunk.id())?.now).collect()
    }

    /// These are another's by now, or nobody's.
    pub(super) fn forget(&self, chunks: &[Arc<Chunk>]) {
        let mut held = self.held();
        for chunk in chunks {
            held.remove(&chunk.id());
        }
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<ChunkId, Leased>> {
        self.holding.held()
    }

    fn check(&self) -> Result<(), SessionError> {
        if fork::is_child() {
            return Err(SessionError::Forked);
        }
        if self.session.control.is_lost(self.uuid) { Err(SessionError::DeviceLost(self.uuid)) } else { Ok(()) }
    }

    /// Asks the daemon for something, and where it goes meanwhile the next one, as long as may be waited. `ask` is told how long that is: whoever is refused by the next one has waited for the first, too.
    fn ask<T>(
        &self,
        wait: Duration,
        ask: impl Fn(&Link, Waiting) -> Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        let clock = &self.session.clock;
        let began = clock.now();
        let until = began.saturating_add(wait);
        loop {
            self.check()?;
            let now = clock.now();
            let waiting = Waiting { left: until.saturating_sub(now), so_far: now.saturating_sub(began) };
            let (epoch, outcome) = match self.session.line.enter() {
                Some(link) if self.session.line.is_attached() => {
                    self.holding.send_unsent(|ids| link.release(ids));
                    (link.epoch(), ask(&link, waiting))
                }
                inside => {
                    let epoch = inside.map_or_else(|| self.session.line.epoch(), |link| link.epoch());
                    (epoch, Err(SessionError::DaemonGone))
                }
            };
            let is_away = matches!(
                &outcome,
                Err(SessionError::DaemonGone | SessionError::Refused { kind: ErrorKind::Unavailable, .. })
            );
            let left = until.saturating_sub(clock.now());
            if is_away {
                self.session.line.note_broken(epoch);
            }
            if !is_away || left.is_zero() || !self.session.line.wait_for_next(epoch, left) {
                return outcome;
            }
        }
    }

    pub(super) fn lease(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SessionError> {
        self.ask(want.wait, |link, waiting| self.lease_over(link, want, waiting))
    }

    fn lease_over(&self, link: &Link, want: Want, waiting: Waiting) -> Result<Vec<Arc<Chunk>>, SessionError> {
        let (wait_ms, waited_ms) = (millis(waiting.left), millis(waiting.so_far));
        let Want { len, shape, plan, .. } = want;
        let wanted = WantedChunks { device: self.uuid, len, shape, plan, wait_ms, waited_ms };
        let leased = link.acquire(wanted)?;
        let ids: Vec<ChunkId> = leased.iter().map(|(id, ..)| *id).collect();
        if let Shape::Uniform(len) = want.shape
            && self.session.ladder.steps().contains(&len)
            && let Some((_, other, _)) = leased.iter().find(|(_, of, _)| *of != len)
        {
            let message = format!(
                "the daemon deals in chunks of {other} by now, and this session was told of {len}: start this process again to use them"
            );
            drop(leased);
            link.release(ids)?;
            return Err(SessionError::Refused { kind: ErrorKind::Unsupported, message });
        }
        // A daemon that could not know which numbers were given gives some again: here each is one chunk's.
        let (leased, now): (Vec<LeasedAnew>, Vec<ChunkId>) = {
            let held = self.held();
            let here = |id: ChunkId| if held.contains_key(&id) { self.session.line.holdings.next_chunk() } else { id };
            leased.into_iter().map(|(id, len, fd)| ((here(id), len, fd), id)).unzip()
        };
        // When this has failed what was imported is let go of and every descriptor is closed: only then the daemon may hear of it.
        let imported = import(&self.device, leased).or_else(|error| {
            link.release(ids)?;
            Err(error)
        })?;
        let leased = |(chunk, now): (&Arc<Chunk>, ChunkId)| {
            let (handle, len, now) = (chunk.handle(), chunk.len(), Some(now));
            (chunk.id(), Leased { handle, len, now, uncounted: None })
        };
        self.held().extend(imported.iter().zip(now).map(leased));
        Ok(imported)
    }

    /// Also while the daemon is away: the next one hears of it.
    fn put_down(&self) -> Result<Bytes, SessionError> {
        self.check()?;
        let bytes = {
            let mut unsent = self.holding.unsent();
            let mut held = self.held();
            let awake: Vec<_> = held.values_mut().filter(|leased| !leased.is_asleep()).collect();
            let handles: Vec<_> = awake.iter().map(|leased| leased.handle).collect();
            self.session.sleeping.put_down(&handles)?;
            let bytes = awake.iter().map(|leased| leased.len).sum();
            // Nothing here refers to them any more.
            for leased in awake {
                unsent.extend(leased.now.take());
                leased.uncounted = None;
            }
            bytes
        };
        if let Some(link) = self.session.line.enter() {
            self.holding.send_unsent(|ids| link.release(ids));
        }
        Ok(bytes)
    }

    /// Chunks of the sizes of all that sleep, in their order.
    fn lease_again(
        &self,
        link: &Link,
        asleep: &[(ChunkId, Leased)],
        waiting: Waiting,
    ) -> Result<Vec<LeasedAnew>, SessionError> {
        let mut count: BTreeMap<Bytes, u64> = BTreeMap::new();
        asleep.iter().for_each(|(_, leased)| *count.entry(leased.len).or_default() += 1);
        let mut got: Vec<LeasedAnew> = Vec::new();
        let now = self.session.clock.now();
        let (began, until) = (now.saturating_sub(waiting.so_far), now.saturating_add(waiting.left));
        let outcome: Result<(), SessionError> = count.into_iter().try_for_each(|(len, count)| {
            let mut left = count;
            while left > 0 {
                let some = left.min(limits::ACQUIRE_CHUNKS_MAX).min(limits::ACQUIRE_BYTES_MAX.get() / len.get());
                let now = self.session.clock.now();
                let (wait_ms, waited_ms) = (millis(until.saturating_sub(now)), millis(now.saturating_sub(began)));
                let (all, shape) = (Bytes::new(len.get() * some), Shape::Exactly(len));
                let wanted = WantedChunks { device: self.uuid, len: all, shape, plan: None, wait_ms, waited_ms };
                let leased = link.acquire(wanted)?;
                let is_as_before = leased.len() as u64 == some && leased.iter().all(|(_, of, _)| *of == len);
                got.extend(leased);
                if !is_as_before {
                    return Err(malformed("batch.chunks", format!("not {some} chunks of {len}")).into());
                }
                left -= some;
            }
            Ok(())
        });
        if outcome.is_err() {
            give_up(link, std::mem::take(&mut got));
        }
        outcome.map(|()| got)
    }

    fn take_up(&self, link: &Link, waiting: Waiting) -> Result<Bytes, SessionError> {
        let asleep: Vec<_> = {
            let held = self.held();
            let asleep = held.iter().filter(|(_, leased)| leased.is_asleep());
            asleep.map(|(id, leased)| (*id, *leased)).collect()
        };
        let got = self.lease_again(link, &asleep, waiting)?;
        // What was released meanwhile is not woken.
        let mut held = self.held();
        let mut of_len: BTreeMap<Bytes, Vec<LeasedAnew>> = BTreeMap::new();
        got.into_iter().for_each(|leased| of_len.entry(leased.1).or_default().push(leased));
        let (mut named, mut woken) = (Vec::new(), Vec::new());
        for (id, leased) in asleep {
            let of_len = of_len.get_mut(&leased.len).expect("there is one for each");
            if held.contains_key(&id)
                && let Some((now, _, fd)) = of_len.pop()
            {
                named.push((id, now));
                woken.push((leased.handle, fd));
            }
        }
        let outcome = self.session.sleeping.take_up(woken);
        let spare: Vec<_> = of_len.into_values().flatten().collect();
        if let Err(error) = outcome {
            drop(held);
            let ids = named.into_iter().map(|(_, now)| now).collect();
            // The descriptors have gone with it.
            tell_released(link, ids);
            give_up(link, spare);
            return Err(error.into());
        }
        let mut bytes = Bytes::ZERO;
        for (id, now) in named {
            let leased = held.get_mut(&id).expect("looked up above");
            leased.now = Some(now);
            bytes += leased.len;
        }
        drop(held);
        if !spare.is_empty() {
            give_up(link, spare);
        }
        Ok(bytes)
    }
}

/// Chunks that nobody here wants after all.
fn give_up(link: &Link, leased: Vec<LeasedAnew>) {
    let ids = leased.iter().map(|(id, ..)| *id).collect();
    drop(leased);
    tell_released(link, ids);
}

/// Tells the daemon of chunks of which nothing is here any more. Where it is gone the next one hears what is here, and they are not.
fn tell_released(link: &Link, ids: Vec<ChunkId>) {
    if let Err(error) = link.release(ids) {
        tracing::debug!(error = %chain(&error), "chunks could not be given back; they are when this session is there again, or over");
    }
}

impl ChunkSource for DaemonSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        self.lease(want).map_err(told)
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        // Inside, where that is possible: what is held is told to the next daemon either with these or after they were released.
        let link = self.session.line.enter();
        let ids: Vec<_> = chunks.iter().map(|chunk| chunk.id()).collect();
        // Handles first: the daemon may give the memory to somebody else the moment it hears of it.
        self.holding.give_back(ids, || drop(chunks));
        if let (Some(link), Ok(())) = (link, self.check()) {
            self.holding.send_unsent(|ids| link.release(ids));
        }
    }

    fn sleep(&self) -> Result<Bytes, SourceError> {
        self.put_down().map_err(told)
    }

    fn wake(&self, wait: Duration) -> Result<Bytes, SourceError> {
        self.ask(wait, |link, waiting| self.take_up(link, waiting)).map_err(told)
    }

    fn room(&self) -> Result<Room, SourceError> {
        let is_there = self.check().and_then(|()| match self.session.line.is_attached() {
            true => Ok(()),
            // Whoever looks at figures waits for nobody.
            false => Err(SessionError::DaemonGone),
        });
        let room = is_there.and_then(|()| self.session.control.room(self.uuid));
        room.map_err(told)
    }
}
