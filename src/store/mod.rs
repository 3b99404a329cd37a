//! The chunk store: the driver handles of every chunk that this process owns, by [`ChunkId`], and the one descriptor that each was exported
//! as.
//!
//! A chunk is exported once; whoever is to get a descriptor is sent that one, because exports are finite on the whole machine
//! ([`limits::EXPORTS_MAX`]).
//!
//! Where a device does not clear new memory, somebody else has to, before anybody is sent a chunk of it: a [`Scrub`].
//!
//! So that memory outlives this process somebody else may hold each chunk's descriptor as well: a [`Keep`]. What a process that is gone has exported is adopted ([`Store::adopt`]): its descriptor is the one that it was exported as, and it has no handle
//! here before somebody needs one.
//!
//! Not for: who may have a chunk. The ledger decides, the store does.
//!
//! Threads: every method may be called from any thread. Driver calls are made without the lock, so one that is slow, or hangs, delays nobody else.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use crate::driver::{Call, Cause, DeviceMemory, DriverError};
use crate::error::ErrorKind;
use crate::ids::{ChunkId, DeviceId};
use crate::limits;
use crate::memory::{Chunk, Device, MemoryError};
use crate::mortal::moment;
use crate::units::Bytes;

/// A way to clear chunks that may hold what another process wrote.
pub trait Scrub: Send + Sync + fmt::Debug {
    /// Sets every byte of these chunks to zero, and returns when that is done.
    fn scrub(&self, chunks: &[(Arc<OwnedFd>, Bytes)]) -> Result<(), ScrubError>;
}

/// Chunks that may not be clear.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ScrubError(pub String);

/// Somebody who holds descriptors as long as they are to outlive this process.
pub trait Keep: Send + Sync + fmt::Debug {
    /// Holds these, from before this returns: also where this process ends right then. Nothing fails: where nobody can hold anything that is for whoever keeps to say and to mend.
    fn keep(&self, chunks: &[(ChunkId, Arc<OwnedFd>)]);
    /// Lets go of these, as far as that can be had: [`Keep::holds`] says what came of it.
    fn let_go(&self, chunks: &[ChunkId]);
    /// Those of these that may be held still: whoever was told to let go of them has not answered, and goes on.
    fn holds(&self, chunks: &[ChunkId]) -> BTreeSet<ChunkId>;
}

/// The chunks of this process.
#[derive(Debug)]
pub struct Store {
    devices: Vec<Arc<Device>>,
    scrubbers: BTreeMap<DeviceId, Arc<dyn Scrub>>,
    /// The most that this process takes of a device.
    caps: BTreeMap<DeviceId, Bytes>,
    /// Descriptors that chunks may take, those of all devices together.
    descriptors: u64,
    keeper: Option<Arc<dyn Keep>>,
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    chunks: HashMap<ChunkId, Stored>,
    /// Those that were not free when the driver was asked to take them back, by name because there can be as many as there were chunks. A name is free again once its chunk is here.
    kept: HashMap<ChunkId, Vec<Kept>>,
    /// Numbers them.
    next_kept: u64,
    /// Chunks that were in use when they should have been destroyed, and may be tried again.
    in_use: BTreeSet<ChunkId>,
    /// How many of them have an exported descriptor, or are being exported.
    exported: u64,
    /// Those of which no descriptor is left, as nobody has kept it, with their devices.
    unkept: BTreeMap<ChunkId, (DeviceId, Bytes)>,
}

#[derive(Debug)]
struct Stored {
    chunk: Held,
    exported: Option<Arc<OwnedFd>>,
    /// It is about to be destroyed.
    is_going: bool,
    /// It should have been destroyed, and was in use.
    was_in_use: bool,
}

impl Shelf {
    /// Those of a device that were in use when they should have been destroyed.
    fn in_use_of(&self, device: DeviceId) -> impl Iterator<Item = ChunkId> {
        let is_there = move |id: &&ChunkId| {
            matches!(&self.chunks.get(id)?.chunk, Held::Chunk(chunk) if chunk.device().id() == device).then_some(())
        };
        self.in_use.iter().filter(move |id| is_there(id).is_some()).copied()
    }
}

/// What this process has of a chunk beside its descriptor.
#[derive(Debug)]
enum Held {
    /// A handle.
    Chunk(Arc<Chunk>),
    /// Nothing yet: another process has created it.
    Adopted(Arc<Device>, Bytes),
}

/// A chunk that is gone from here, and whose memory is not free.
#[derive(Debug)]
struct Kept {
    /// They are asked for again in the order in which they came here.
    number: u64,
    device: DeviceId,
    /// What its driver did not take back; nothing where that is done, and only whoever was to let go of it holds it still.
    chunk: Option<Box<Chunk>>,
    may_retry: bool,
}

impl Kept {
    /// It is of this device, and may be asked for again.
    fn is_wanted(&self, device: DeviceId) -> bool {
        self.may_retry && self.device == device
    }
}

/// Why the store could not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The store has no such chunk.
    #[error("{0} is not in the store")]
    NoChunk(ChunkId),
    /// The store has no such device.
    #[error("there is no {0}")]
    NoDevice(DeviceId),
    /// A chunk of that name is there already.
    #[error("{0} is in the store already")]
    Exists(ChunkId),
    /// A kind of descriptor has run out.
    #[error("all {limit} exports of this machine are in use; use larger chunks")]
    Exports {
        /// How many there may be.
        limit: u64,
    },
    /// New chunks of this device could not be cleared.
    #[error("new chunks of {device} cannot be cleared")]
    Scrub {
        /// Where.
        device: DeviceId,
        /// Why.
        #[source]
        source: ScrubError,
    },
    /// The chunk is still used inside this process.
    #[error("{0} is in use in this process")]
    InUse(ChunkId),
    /// Whoever was to let go of it has not done so, nor ended: until then the memory is not free.
    #[error("a keeper that another has taken the place of, or is about to, may hold it still")]
    Held,
    /// It was adopted, and its descriptor is nowhere any more: only those who have mapped it have it.
    #[error("the descriptor of {0} was lost with the processes that had it: only whoever has mapped it still has it")]
    NoDescriptor(ChunkId),
    /// The driver refused.
    #[error("the driver refused")]
    Memory(#[from] MemoryError),
}

impl StoreError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StoreError::NoChunk(_) | StoreError::NoDevice(_) => ErrorKind::NotFound,
            StoreError::Exists(_) | StoreError::InUse(_) | StoreError::NoDescriptor(_) => ErrorKind::Conflict,
            StoreError::Exports { .. } => ErrorKind::Exhausted,
            StoreError::Held => ErrorKind::Unavailable,
            StoreError::Scrub { .. } => ErrorKind::Broken,
            StoreError::Memory(error) => error.kind(),
        }
    }
}

impl Store {
    /// An empty store over `devices`, by their ordinal.
    pub fn new(devices: Vec<Arc<Device>>) -> Store {
        Store {
            devices,
            scrubbers: BTreeMap::new(),
            caps: BTreeMap::new(),
            descriptors: u64::MAX,
            keeper: None,
            shelf: Mutex::default(),
        }
    }

    /// The same, whose chunks take at most so many descriptors.
    pub fn with_descriptors(mut self, descriptors: u64) -> Store {
        self.descriptors = descriptors;
        self
    }

    /// The same, as if `device` were not larger than this.
    pub fn with_cap(mut self, device: DeviceId, cap: Bytes) -> Store {
        self.caps.insert(device, cap);
        self
    }

    /// The same, with somebody who clears new chunks of `device`.
    pub fn with_scrubber(mut self, device: DeviceId, scrubber: Arc<dyn Scrub>) -> Store {
        self.scrubbers.insert(device, scrubber);
        self
    }

    /// The same, with somebody who holds descriptors of chunks as well.
    pub fn with_keeper(mut self, keeper: Arc<dyn Keep>) -> Store {
        self.keeper = Some(keeper);
        self
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().expect("nothing panics while it holds this lock")
    }

    /// The devices.
    pub fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    fn device(&self, id: DeviceId) -> Result<&Arc<Device>, StoreError> {
        self.devices.iter().find(|device| device.id() == id).ok_or(StoreError::NoDevice(id))
    }

    /// How many chunks of a device there may be: each device has an equal share of the machine's exports and of the descriptors of this process. A chunk takes
    /// those that its driver holds for it, and the exported one.
    pub fn chunks_max(&self, device: DeviceId) -> u64 {
        let held = self.device(device).map_or(0, |device| device.capabilities().fds_per_chunk);
        let devices = self.devices.len().max(1) as u64;
        (limits::EXPORTS_MAX / devices).min(self.descriptors / devices / (held + 1))
    }

    /// How much memory of a device this process may take, and how much of the device nobody holds.
    pub fn memory(&self, device: DeviceId) -> Result<DeviceMemory, StoreError> {
        let error = |source| {
            StoreError::Memory(MemoryError::Driver { action: "ask for the free memory of", len: Bytes::ZERO, source })
        };
        let memory = self.device(device)?.driver().memory(device).map_err(error)?;
        let total = self.caps.get(&device).map_or(memory.total, |cap| memory.total.min(*cap));
        Ok(DeviceMemory { total, ..memory })
    }

    /// Creates a chunk and keeps it as `id`.
    pub fn create(&self, id: ChunkId, device: DeviceId, len: Bytes) -> Result<(), StoreError> {
        if self.lock().chunks.contains_key(&id) {
            return Err(StoreError::Exists(id));
        }
        let chunk = Held::Chunk(Arc::new(Chunk::create(self.device(device)?, id, len)?));
        moment();
        self.lock().chunks.insert(id, Stored { chunk, exported: None, is_going: false, was_in_use: false });
        Ok(())
    }

    /// A chunk that another process has created, with the descriptor that it was exported as; without one where only others hold it still. No driver is asked.
    pub fn adopt(
        &self,
        id: ChunkId,
        device: DeviceId,
        len: Bytes,
        exported: Option<OwnedFd>,
    ) -> Result<(), StoreError> {
        let device = Arc::clone(self.device(device)?);
        let mut shelf = self.lock();
        if shelf.chunks.contains_key(&id) {
            return Err(StoreError::Exists(id));
        }
        shelf.exported += u64::from(exported.is_some());
        if exported.is_none() {
            shelf.unkept.insert(id, (device.id(), len));
        }
        let exported = exported.map(Arc::new);
        let chunk = Held::Adopted(device, len);
        shelf.chunks.insert(id, Stored { chunk, exported, is_going: false, was_in_use: false });
        Ok(())
    }

    /// Has chunks kept that were just created: where this process ends from here on, they do not.
    pub fn keep(&self, ids: &[ChunkId]) {
        let Some(keeper) = &self.keeper else { return };
        let known: Vec<_> = {
            let shelf = self.lock();
            let exported = |id: &ChunkId| Some((*id, Arc::clone(shelf.chunks.get(id)?.exported.as_ref()?)));
            ids.iter().filter_map(exported).collect()
        };
        if !known.is_empty() {
            keeper.keep(&known);
        }
    }

    /// Nobody keeps these any more, which are about to be destroyed.
    pub fn let_go(&self, ids: &[ChunkId]) {
        let Some(keeper) = self.keeper.as_ref().filter(|_| !ids.is_empty()) else { return };
        // First out of what another keeper would be told, if one takes its place in this moment; closed when it has let go, so that their memory is freed here.
        let exported: Vec<_> = {
            let mut shelf = self.lock();
            let exported: Vec<_> = ids
                .iter()
                .filter_map(|id| {
                    let stored = shelf.chunks.get_mut(id)?;
                    stored.is_going = true;
                    stored.exported.take()
                })
                .collect();
            shelf.exported -= exported.len() as u64;
            exported
        };
        keeper.let_go(ids);
        drop(exported);
    }

    /// Every chunk that has a descriptor, with it.
    pub fn exported(&self) -> Vec<(ChunkId, Arc<OwnedFd>)> {
        let shelf = self.lock();
        let exported = |(id, stored): (&ChunkId, &Stored)| Some((*id, Arc::clone(stored.exported.as_ref()?)));
        shelf.chunks.iter().filter_map(exported).collect()
    }

    /// Clears chunks of `device` that were just created, where its driver does not.
    pub fn scrub(&self, device: DeviceId, ids: &[ChunkId]) -> Result<(), StoreError> {
        let Some(scrubber) = self.scrubbers.get(&device) else { return Ok(()) };
        let fd_and_len = |id: &ChunkId| Ok((self.descriptor(*id)?, self.chunk(*id)?.len()));
        let chunks = ids.iter().map(fd_and_len).collect::<Result<Vec<_>, StoreError>>()?;
        scrubber.scrub(&chunks).map_err(|source| StoreError::Scrub { device, source })
    }

    /// Gives a chunk back to the driver: its exported descriptor, then its handle. What others hold of it lives on with them. If the driver does not take it, or whoever was to let go
    /// of it holds it still, it is no chunk of the store any more, and [`Store::destroy_kept`] tries again; as it does with one that is in use in this process, which stays.
    pub fn destroy(&self, id: ChunkId) -> Result<(), StoreError> {
        self.destroy_as(id, false)
    }

    fn destroy_as(&self, id: ChunkId, may_retry: bool) -> Result<(), StoreError> {
        let mut shelf = self.lock();
        let Stored { chunk, exported, is_going, .. } = shelf.chunks.remove(&id).ok_or(StoreError::NoChunk(id))?;
        shelf.in_use.remove(&id);
        shelf.unkept.remove(&id);
        let (device, chunk) = match chunk {
            Held::Adopted(device, _) => (device.id(), None),
            Held::Chunk(chunk) => match Arc::try_unwrap(chunk) {
                Ok(chunk) => (chunk.device().id(), Some(chunk)),
                Err(chunk) => {
                    let chunk = Held::Chunk(chunk);
                    shelf.chunks.insert(id, Stored { chunk, exported, is_going, was_in_use: true });
                    if may_retry {
                        shelf.in_use.insert(id);
                    }
                    return Err(StoreError::InUse(id));
                }
            },
        };
        shelf.exported -= u64::from(exported.is_some());
        drop(shelf);
        drop(exported);
        moment();
        self.release(id, device, chunk, may_retry)
    }

    fn release(&self, id: ChunkId, device: DeviceId, chunk: Option<Chunk>, may_retry: bool) -> Result<(), StoreError> {
        let (chunk, error) = match chunk.map_or(Ok(()), Chunk::release) {
            Ok(()) if self.is_held(id) => (None, StoreError::Held),
            Ok(()) => return Ok(()),
            Err((chunk, error)) => (Some(chunk), error.into()),
        };
        let mut shelf = self.lock();
        shelf.next_kept += 1;
        let number = shelf.next_kept;
        shelf.kept.entry(id).or_default().push(Kept { number, device, chunk, may_retry });
        Err(error)
    }

    /// Somebody else holds it, who was to let go of it.
    fn is_held(&self, id: ChunkId) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| !keeper.holds(&[id]).is_empty())
    }

    /// It is written down that this chunk was not free when it should have been: from now on it may be tried again. Before, whoever writes it down would hear that the chunk is gone first.
    pub fn settle(&self, id: ChunkId) {
        let mut shelf = self.lock();
        for kept in shelf.kept.get_mut(&id).into_iter().flatten() {
            kept.may_retry = true;
        }
        if shelf.chunks.get(&id).is_some_and(|stored| stored.was_in_use) {
            shelf.in_use.insert(id);
        }
    }

    /// Tries once more to free what of `device` was not free. Says what is gone now.
    pub fn destroy_kept(&self, device: DeviceId) -> Vec<ChunkId> {
        let mut kept = Vec::new();
        let used: Vec<ChunkId> = {
            let mut shelf = self.lock();
            shelf.kept.retain(|id, same| {
                kept.extend(same.extract_if(.., |kept| kept.is_wanted(device)).map(|kept| (*id, kept)));
                !same.is_empty()
            });
            shelf.in_use_of(device).collect()
        };
        kept.sort_unstable_by_key(|(_, kept)| kept.number);
        let again = |(id, kept): (ChunkId, Kept)| {
            self.release(id, device, kept.chunk.map(|chunk| *chunk), true).is_ok().then_some(id)
        };
        let used = used.into_iter().filter(|id| self.destroy_as(*id, true).is_ok());
        kept.into_iter().filter_map(again).chain(used).collect()
    }

    /// True if some chunk of `device` was not free, and may be by now.
    pub fn keeps_any(&self, device: DeviceId) -> bool {
        let shelf = self.lock();
        shelf.kept.values().flatten().any(|kept| kept.is_wanted(device)) || shelf.in_use_of(device).next().is_some()
    }

    /// The descriptor of a chunk, to be sent to a process that it was leased to.
    pub fn descriptor(&self, id: ChunkId) -> Result<Arc<OwnedFd>, StoreError> {
        let chunk = {
            let mut shelf = self.lock();
            // Of one that is about to be destroyed nobody gets a descriptor any more: it would be another one, and held by nobody.
            let stored = shelf.chunks.get(&id).filter(|stored| !stored.is_going).ok_or(StoreError::NoChunk(id))?;
            if let Some(exported) = &stored.exported {
                return Ok(Arc::clone(exported));
            }
            // What was adopted is not exported again: it has its descriptor, or has none.
            let Held::Chunk(chunk) = &stored.chunk else { return Err(StoreError::NoDescriptor(id)) };
            let chunk = Arc::clone(chunk);
            if shelf.exported >= limits::EXPORTS_MAX {
                return Err(StoreError::Exports { limit: limits::EXPORTS_MAX });
            }
            shelf.exported += 1;
            chunk
        };
        let made = chunk.export();
        let mut shelf = self.lock();
        let Shelf { chunks, exported: count, .. } = &mut *shelf;
        // While it is exported it is in use, and is not destroyed.
        let stored = chunks.get_mut(&id).ok_or(StoreError::NoChunk(id))?;
        match (made, &stored.exported) {
            (Ok(made), None) => Ok(Arc::clone(stored.exported.insert(Arc::new(made)))),
            // Another thread was faster, and a chunk has one.
            (_, Some(exported)) => {
                *count -= 1;
                Ok(Arc::clone(exported))
            }
            (Err(error), None) => {
                *count -= 1;
                Err(error.into())
            }
        }
    }

    /// Lets nobody write these chunks any more, in whatever process; false where their driver cannot ([`crate::driver::Driver::seal`]).
    pub fn seal(&self, ids: &[ChunkId]) -> Result<bool, StoreError> {
        let mut is_enforced = !ids.is_empty();
        for id in ids {
            is_enforced &= self.chunk(*id)?.seal()?;
        }
        Ok(is_enforced)
    }

    /// A chunk, to be used inside this process. One that was adopted is imported when it is first wanted.
    pub fn chunk(&self, id: ChunkId) -> Result<Arc<Chunk>, StoreError> {
        let (device, len, exported) = {
            let shelf = self.lock();
            let stored = shelf.chunks.get(&id).ok_or(StoreError::NoChunk(id))?;
            match &stored.chunk {
                Held::Chunk(chunk) => return Ok(Arc::clone(chunk)),
                Held::Adopted(device, len) => {
                    let exported = stored.exported.as_ref().ok_or(StoreError::NoDescriptor(id))?;
                    (Arc::clone(device), *len, Arc::clone(exported))
                }
            }
        };
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let system = |error| Cause::System { what: "duplicate the descriptor of a chunk", errno: errno(error) };
        let fd = exported.try_clone().map_err(system).map_err(|cause| {
            let source = DriverError::new(Call::Import, cause);
            StoreError::Memory(MemoryError::Driver { action: "import a chunk of", len, source })
        })?;
        drop(exported);
        let made = Arc::new(Chunk::import(&device, id, fd, len)?);
        let mut shelf = self.lock();
        let stored = shelf.chunks.get_mut(&id).ok_or(StoreError::NoChunk(id))?;
        // Another thread may have been faster, and a chunk has one handle.
        if matches!(stored.chunk, Held::Adopted(..)) {
            stored.chunk = Held::Chunk(Arc::clone(&made));
        }
        match &stored.chunk {
            Held::Chunk(chunk) => Ok(Arc::clone(chunk)),
            Held::Adopted(..) => Ok(made),
        }
    }

    /// How large a chunk is.
    pub fn len_of(&self, id: ChunkId) -> Result<Bytes, StoreError> {
        let shelf = self.lock();
        let stored = shelf.chunks.get(&id).ok_or(StoreError::NoChunk(id))?;
        Ok(match &stored.chunk {
            Held::Chunk(chunk) => chunk.len(),
            Held::Adopted(_, len) => *len,
        })
    }

    /// A chunk can be handed on: its descriptor is here, or can be made.
    pub fn can_hand_on(&self, id: ChunkId) -> bool {
        self.lock()
            .chunks
            .get(&id)
            .is_some_and(|stored| matches!(stored.chunk, Held::Chunk(_)) || stored.exported.is_some())
    }

    /// Bytes of a device of which no descriptor is left: whoever has them mapped has them, and nobody else can.
    pub fn unkept(&self, device: DeviceId) -> Bytes {
        self.lock().unkept.values().filter(|(of, _)| *of == device).map(|(_, len)| *len).sum()
    }

    /// Chunks, and how many of them were exported.
    pub fn counts(&self) -> (u64, u64) {
        let shelf = self.lock();
        (shelf.chunks.len() as u64, shelf.exported)
    }

    /// How many chunks their drivers have not taken back.
    pub fn kept(&self) -> u64 {
        self.lock().kept.values().map(|same| same.len() as u64).sum()
    }

    /// The device that is lost, if that is why something failed, and what its driver says.
    pub fn lost_by(error: &StoreError) -> Option<(DeviceId, &'static str)> {
        match error {
            StoreError::Memory(error) => match error.cause() {
                Some(Cause::Lost { device, reason }) => Some((*device, reason)),
                _ => None,
            },
            _ => None,
        }
    }

    /// True where a failed create means that chunks have run out before memory has: descriptors of this process, or exports of the machine.
    pub fn is_out_of_chunks(error: &StoreError) -> bool {
        match error {
            StoreError::Memory(error) => matches!(
                error.cause(),
                Some(Cause::TooMany { .. } | Cause::System { errno: Errno::MFILE | Errno::NFILE, .. })
            ),
            other => other.kind() == ErrorKind::Exhausted,
        }
    }

    /// True where a failed create means that the device has no more memory or exports, false where something is broken.
    pub fn is_exhaustion(error: &StoreError) -> bool {
        match error {
            StoreError::Memory(error) => matches!(error.cause(), Some(Cause::Exhausted { .. } | Cause::TooMany { .. })),
            other => other.kind() == ErrorKind::Exhausted,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::driver::layers::{Intercept, Layered, Step};
    use crate::driver::sim::{SimDriver, SimOptions};
    use crate::driver::{Call, Driver, DriverError, Handle};

    /// Says that an export has begun, and holds it up until it hears something.
    #[derive(Debug)]
    struct Gate {
        began: Sender<()>,
        may_go_on: Mutex<Receiver<()>>,
    }

    impl Intercept for Gate {
        fn around<T>(
            &self,
            step: Step,
            run: impl FnOnce() -> Result<T, DriverError>,
            _handle: impl Fn(&T) -> Option<Handle>,
        ) -> Result<T, DriverError> {
            if step.call() == Call::Export {
                self.began.send(()).unwrap();
                self.may_go_on.lock().unwrap().recv().unwrap();
            }
            run()
        }
    }

    #[test]
    fn an_export_that_hangs_keeps_nobody_from_the_rest() {
        let (began, has_begun) = channel();
        let (go_on, may_go_on) = channel();
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(8), Bytes::mib(8)])));
        let gate = Gate { began, may_go_on: Mutex::new(may_go_on) };
        let driver: Arc<dyn Driver> = Arc::new(Layered::new(sim, gate));
        let open = |device| Device::open(Arc::clone(&driver), DeviceId(device)).unwrap();
        let store = Arc::new(Store::new(vec![open(0), open(1)]));
        store.create(ChunkId(1), DeviceId(0), Bytes::mib(2)).unwrap();
        let export = || {
            let store = Arc::clone(&store);
            std::thread::spawn(move || store.descriptor(ChunkId(1)).unwrap())
        };
        let hanging = [export(), export()];
        let patience = Duration::from_secs(20);
        for _ in &hanging {
            has_begun.recv_timeout(patience).unwrap();
        }
        let (done, is_done) = channel();
        let other = Arc::clone(&store);
        std::thread::spawn(move || {
            other.create(ChunkId(2), DeviceId(1), Bytes::mib(2)).unwrap();
            other.destroy(ChunkId(2)).unwrap();
            done.send(other.destroy(ChunkId(1))).unwrap();
        });
        let destroyed = is_done.recv_timeout(patience);
        go_on.send(()).unwrap();
        go_on.send(()).unwrap();
        let [one, same] = hanging.map(|hanging| hanging.join().unwrap());
        assert_eq!(destroyed, Ok(Err(StoreError::InUse(ChunkId(1)))));
        assert!(Arc::ptr_eq(&one, &same), "a chunk has one descriptor");
        assert_eq!(store.counts(), (1, 1));
        store.destroy(ChunkId(1)).unwrap();
        assert_eq!(store.counts(), (0, 0));
    }

    /// Somebody who does not let go of what he holds before he is told to.
    #[derive(Debug, Default)]
    struct Holds(Mutex<BTreeSet<ChunkId>>);

    impl Keep for Holds {
        fn keep(&self, chunks: &[(ChunkId, Arc<OwnedFd>)]) {
            self.0.lock().unwrap().extend(chunks.iter().map(|(chunk, _)| *chunk));
        }

        fn let_go(&self, _: &[ChunkId]) {}

        fn holds(&self, chunks: &[ChunkId]) -> BTreeSet<ChunkId> {
            let held = self.0.lock().unwrap();
            chunks.iter().filter(|chunk| held.contains(chunk)).copied().collect()
        }
    }

    #[test]
    fn what_is_in_use_or_held_elsewhere_is_gone_when_it_is_free_and_not_before_that_is_written_down() {
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(8)])));
        let keeper = Arc::new(Holds::default());
        let (device, one, two) = (DeviceId(0), ChunkId(1), ChunkId(2));
        let store = Store::new(vec![Device::open(driver, device).unwrap()]).with_keeper(Arc::clone(&keeper) as _);
        for chunk in [one, two] {
            store.create(chunk, device, Bytes::mib(2)).unwrap();
            store.descriptor(chunk).unwrap();
        }
        store.keep(&[two]);
        let used = store.chunk(one).unwrap();
        store.let_go(&[one, two]);
        assert_eq!(store.destroy(one), Err(StoreError::InUse(one)));
        assert_eq!(store.destroy(two), Err(StoreError::Held));
        assert!(!store.keeps_any(device));
        assert_eq!(store.destroy_kept(device), []);
        store.settle(one);
        store.settle(two);
        assert!(store.keeps_any(device));
        assert_eq!(store.destroy_kept(device), []);
        drop(used);
        assert_eq!(store.destroy_kept(device), [one]);
        assert!(store.keeps_any(device), "the other is held still");
        keeper.0.lock().unwrap().clear();
        assert_eq!(store.destroy_kept(device), [two]);
        assert!(!store.keeps_any(device));
        assert_eq!((store.counts(), store.kept()), ((0, 0), 0));
    }
}
