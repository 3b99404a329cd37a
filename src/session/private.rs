//! A process that is its own daemon: chunks come from a store in the process, and nobody else can have them.
//!
//! For machines where no daemon runs, when the user has allowed that, and for tests and benches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{SessionError, fork, opening};
use crate::clock::{Clock, SystemClock};
use crate::driver::{self, Driver, DriverError, DriverName, LibraryPlace};
use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, DeviceId};
use crate::ladder::Ladder;
use crate::limits;
use crate::memory::{Chunk, Device};
use crate::runtime::{ChunkSource, Counters, Room, Runtime, RuntimeConfig, SourceError, Want};
use crate::store::Store;

/// A process that is its own daemon.
#[derive(Debug)]
pub struct PrivateProcess {
    driver: Arc<dyn Driver>,
    store: Arc<Store>,
    clock: Arc<dyn Clock>,
}

impl PrivateProcess {
    /// Whose memory it takes.
    pub fn driver_name(&self) -> &'static str {
        self.driver.name()
    }

    /// Opens the driver of this name, or that of the vendor whose devices the machine has. Where devices are pretended there is one, of [`limits::PRIVATE_HOST_LEN`].
    pub fn open(name: Option<&str>, library: &LibraryPlace) -> Result<PrivateProcess, SessionError> {
        if fork::is_child() {
            return Err(SessionError::Forked);
        }
        fork::watch();
        let known: Option<DriverName> = match name {
            Some(name) => Some(name.parse().map_err(|_| SessionError::PrivateDriver(name.to_owned()))?),
            None => None,
        };
        let library = library.clone();
        let open = move || match known {
            Some(known) => driver::open_shared(known, &[limits::PRIVATE_HOST_LEN], &library),
            None => driver::open_vendor(&library).map(Some),
        };
        let what = name.unwrap_or("the vendor's");
        let opened = opening::in_time(what, opening::OPENING_MAX, open).map_err(SessionError::PrivateOpen)?;
        let driver = opened.ok_or_else(|| SessionError::PrivateDriver(what.to_owned()))?;
        let devices = driver.devices();
        let devices = devices.iter().map(|device| Device::open(Arc::clone(&driver), device.id));
        let store = Arc::new(Store::new(devices.collect::<Result<_, DriverError>>()?));
        Ok(PrivateProcess { driver, store, clock: Arc::new(SystemClock::new()) })
    }

    /// A runtime for device `ordinal`.
    pub fn runtime(&self, ordinal: u32, config: RuntimeConfig) -> Result<Runtime, SessionError> {
        let device = self.store.devices().iter().find(|device| device.id() == DeviceId(ordinal));
        let count = self.driver.devices().len();
        let device = device.ok_or(SessionError::NoDevice { ordinal, count, lost: Vec::new() })?;
        let ladder = Ladder::standard();
        let config = config.on(&ladder);
        let source = PrivateSource::new(Arc::clone(&self.store), device.id(), ladder);
        Ok(Runtime::new(Arc::clone(device), Arc::new(source), Arc::clone(&self.clock), config, Counters::private()))
    }
}

/// The store of this process as a source of chunks for one device.
#[derive(Debug)]
pub struct PrivateSource {
    store: Arc<Store>,
    device: DeviceId,
    ladder: Ladder,
    next: AtomicU64,
}

impl PrivateSource {
    /// Takes chunks of `ladder` on `device` from `store`.
    pub fn new(store: Arc<Store>, device: DeviceId, ladder: Ladder) -> PrivateSource {
        PrivateSource { store, device, ladder, next: AtomicU64::new(1) }
    }

    fn create(&self, want: Want) -> Result<Vec<ChunkId>, SourceError> {
        let too_large = || SourceError {
            kind: ErrorKind::Invalid,
            message: format!("{} are more than one lease can be", want.len),
        };
        let parts = self.ladder.cover(want.len, want.shape).ok_or_else(too_large)?;
        // What the driver did not take back it may take now, before there is more of it.
        self.store.destroy_kept(self.device);
        let mut ids = Vec::new();
        for part in parts {
            for _ in 0..part.count {
                let id = ChunkId(self.next.fetch_add(1, Ordering::Relaxed));
                if let Err(error) = self.store.create(id, self.device, part.len) {
                    self.destroy(ids);
                    return Err(SourceError { kind: error.kind(), message: chain(&error) });
                }
                ids.push(id);
            }
        }
        Ok(ids)
    }

    fn destroy(&self, ids: Vec<ChunkId>) {
        for id in ids {
            if let Err(error) = self.store.destroy(id) {
                tracing::warn!(%id, error = %chain(&error), "a chunk cannot be given back yet");
                self.store.settle(id);
            }
        }
    }
}

impl ChunkSource for PrivateSource {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let ids = self.create(want)?;
        let chunk = |id: &ChunkId| self.store.chunk(*id).expect("it was just created");
        Ok(ids.iter().map(chunk).collect())
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        let ids = chunks.iter().map(|chunk| chunk.id()).collect();
        drop(chunks);
        self.destroy(ids);
    }

    /// The device's own figures: nobody shares it out.
    fn room(&self) -> Result<Room, SourceError> {
        let device = self.store.devices().iter().find(|device| device.id() == self.device);
        let memory = device.expect("the store has it").driver().memory(self.device);
        let memory = memory.map_err(|error| SourceError { kind: error.kind(), message: chain(&error) })?;
        Ok(Room { most: memory.total, free: memory.free })
    }
}
