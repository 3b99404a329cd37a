//! What a session holds: chunks, by their source, and shared ranges. What it says of them to a daemon that follows another, and what it makes of the answer.
//!
//! Not for: how that gets there and back ([`super::line`], [`super::returning`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::SessionError;
use crate::driver::Handle;
use crate::error::chain;
use crate::ids::{ChunkId, DeviceUuid, RangeId};
use crate::limits;
use crate::units::Bytes;
use crate::wire::v1;

/// See the module.
#[derive(Debug)]
pub struct Holdings {
    chunks: Mutex<Vec<Weak<Holding>>>,
    ranges: Mutex<Vec<Weak<RangeHold>>>,
    /// Numbers chunks whose own number is another's here.
    next_chunk: AtomicU64,
    /// How often it was said what is held.
    tellings: AtomicU64,
    /// How often chunks have got other names.
    renamings: AtomicU64,
}

impl Default for Holdings {
    fn default() -> Holdings {
        Holdings {
            chunks: Mutex::default(),
            ranges: Mutex::default(),
            next_chunk: AtomicU64::new(1 << 63),
            tellings: AtomicU64::new(0),
            renamings: AtomicU64::new(0),
        }
    }
}

/// The chunks of one source.
#[derive(Debug)]
pub struct Holding {
    /// Where its chunks lie.
    pub device: DeviceUuid,
    /// Chunks whose release could not be sent: the daemon counts them, and they are nowhere here. Locked before `held`.
    pub unsent: Mutex<Vec<ChunkId>>,
    /// Everything that was acquired and not released, by the number that it came with.
    pub held: Mutex<BTreeMap<ChunkId, Leased>>,
}

/// A hold of a shared range.
#[derive(Debug)]
pub struct RangeHold {
    /// The daemon's number.
    pub range: RangeId,
    /// False once a daemon has said that it knows of no such hold: then there is nothing to let go of, and the number may be another range's.
    pub is_known: AtomicBool,
    /// The connection over which it came.
    pub epoch: u64,
    /// The last telling that it was part of.
    told: AtomicU64,
}

/// A chunk that is leased.
#[derive(Clone, Copy, Debug)]
pub struct Leased {
    /// The driver's, in this process.
    pub handle: Handle,
    /// Of a ladder's step.
    pub len: Bytes,
    /// What the daemon calls it now; nothing while it sleeps, or where the daemon does not count it.
    pub now: Option<ChunkId>,
    /// Where the daemon does not count it, and it does not sleep: what the next is told that it is called, a number that no daemon gives.
    pub uncounted: Option<ChunkId>,
}

impl Leased {
    /// Its contents are elsewhere, and the daemon has the memory.
    pub fn is_asleep(&self) -> bool {
        self.name().is_none()
    }

    /// What the daemon is told that it is called.
    fn name(&self) -> Option<ChunkId> {
        self.now.or(self.uncounted)
    }
}

impl Holding {
    /// See the field.
    pub fn held(&self) -> MutexGuard<'_, BTreeMap<ChunkId, Leased>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See the field.
    pub fn unsent(&self) -> MutexGuard<'_, Vec<ChunkId>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives chunks back, which the daemon is to hear of: `drop_handles` is done before anybody can tell it. Of those that sleep it has heard already.
    pub fn give_back(&self, ids: impl IntoIterator<Item = ChunkId>, drop_handles: impl FnOnce()) {
        let mut unsent = self.unsent();
        let now: Vec<_> = {
            let mut held = self.held();
            ids.into_iter().filter_map(|id| held.remove(&id)?.now).collect()
        };
        drop_handles();
        unsent.extend(now);
    }

    /// Tells the daemon what could not be told before: that chunks are given back.
    pub fn send_unsent(&self, mut send: impl FnMut(Vec<ChunkId>) -> Result<(), SessionError>) {
        let mut unsent = self.unsent();
        while !unsent.is_empty() {
            let some = unsent.len().min(limits::RELEASE_CHUNKS_MAX);
            // What has been said once is not said again: it may be another's by then.
            match send(unsent[..some].to_vec()) {
                Ok(()) => drop(unsent.drain(..some)),
                Err(error) => {
                    tracing::debug!(error = %chain(&error), "chunks could not be given back yet");
                    return;
                }
            }
        }
    }
}

impl Holdings {
    /// A number for a chunk that no daemon gives.
    pub fn next_chunk(&self) -> ChunkId {
        ChunkId(self.next_chunk.fetch_add(1, Ordering::Relaxed))
    }

    /// A source of this device begins: what it holds is the session's.
    pub fn hold(&self, device: DeviceUuid) -> Arc<Holding> {
        let holding = Arc::new(Holding { device, unsent: Mutex::default(), held: Mutex::default() });
        let mut holdings = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        holdings.retain(|known| known.strong_count() > 0);
        holdings.push(Arc::downgrade(&holding));
        holding
    }

    /// Everything that has chunks.
    pub fn all(&self) -> Vec<Arc<Holding>> {
        let holdings = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        holdings.iter().filter_map(Weak::upgrade).collect()
    }

    /// The session holds a range once more: so it has heard over connection `epoch`.
    pub fn hold_range(&self, range: RangeId, epoch: u64) -> Arc<RangeHold> {
        let hold = Arc::new(RangeHold { range, is_known: AtomicBool::new(true), epoch, told: AtomicU64::new(0) });
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
    pub fn tell(&self) -> Vec<v1::ReattachRequest> {
        let mut chunks = Vec::new();
        for holding in self.all() {
            let mut unsent = holding.unsent();
            let held = holding.held();
            chunks.extend(held.values().filter_map(|leased| Some((holding.device, leased.name()?, leased.len))));
            unsent.clear();
        }
        let mut times: BTreeMap<RangeId, u32> = BTreeMap::new();
        let attempt = self.tellings.fetch_add(1, Ordering::Relaxed) + 1;
        for hold in self.range_holds() {
            hold.told.store(attempt, Ordering::Relaxed);
            *times.entry(hold.range).or_default() += 1;
        }
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
            (message.is_first, message.has_more, message.attempt) = (number == 0, number < last, attempt);
        }
        messages
    }

    /// The daemon that was told last was told of this hold, too.
    pub fn was_told(&self, hold: &RangeHold) -> bool {
        hold.told.load(Ordering::Relaxed) == self.tellings.load(Ordering::Relaxed)
    }

    /// How often chunks have got other names: what was named before may be another by now.
    pub fn renamings(&self) -> u64 {
        self.renamings.load(Ordering::Relaxed)
    }

    /// What the daemon has said to that: chunks have other names now, or none.
    pub fn hear(&self, reply: &v1::ReattachReply) {
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
        self.renamings.fetch_add(1, Ordering::Relaxed);
        for holding in self.all() {
            // What was let go of since it was named has another name by now, too.
            let mut unsent = holding.unsent();
            unsent.retain(|now| !unknown.contains(now));
            unsent.iter_mut().for_each(|now| *now = renamed.get(now).copied().unwrap_or(*now));
            for leased in holding.held().values_mut() {
                let Some(name) = leased.name() else { continue };
                if let Some(now) = renamed.get(&name) {
                    (leased.now, leased.uncounted) = (Some(*now), None);
                } else if unknown.contains(&name) {
                    // Another daemon may count it: one that has its device, or more room.
                    let uncounted = leased.uncounted.unwrap_or_else(|| self.next_chunk());
                    (leased.now, leased.uncounted) = (None, Some(uncounted));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_daemon_does_not_count_the_next_is_told_of_under_a_name_that_no_daemon_gives() {
        let holdings = Holdings::default();
        let holding = holdings.hold(DeviceUuid([1; 16]));
        let leased = |now| Leased { handle: Handle(7), len: Bytes::mib(2), now: Some(ChunkId(now)), uncounted: None };
        holding.held().extend([(ChunkId(1), leased(1)), (ChunkId(2), leased(2))]);
        let told = || -> Vec<u64> {
            let messages = holdings.tell();
            messages
                .iter()
                .flat_map(|told| &told.held)
                .flat_map(|held| &held.chunks)
                .map(|chunk| chunk.chunk_id)
                .collect()
        };
        assert_eq!(told(), [1, 2]);
        // It has not the device, say.
        holdings.hear(&v1::ReattachReply { unknown_chunk_ids: vec![2], ..v1::ReattachReply::default() });
        let name = told()[1];
        assert!(told() == [1, name] && name >= 1 << 63 && !holding.held()[&ChunkId(2)].is_asleep());
        // Nor the one after that; the one that counts it gives it a name.
        holdings.hear(&v1::ReattachReply { unknown_chunk_ids: vec![name], ..v1::ReattachReply::default() });
        assert_eq!(told(), [1, name]);
        let renamed = vec![v1::RenamedChunk { chunk_id: name, now: 9 }];
        holdings.hear(&v1::ReattachReply { renamed, ..v1::ReattachReply::default() });
        assert_eq!(told(), [1, 9]);
    }
}
