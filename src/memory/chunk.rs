//! A physical chunk: one driver handle, released once.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Device, MemoryError};
use crate::driver::{DriverError, Handle};
use crate::ids::ChunkId;
use crate::units::Bytes;

/// A chunk that this process created or imported. Dropping it releases the handle; mappings of it live on.
#[derive(Debug)]
pub struct Chunk {
    device: Arc<Device>,
    id: ChunkId,
    /// Gone only inside [`Chunk::release`].
    handle: Option<Handle>,
    len: Bytes,
    /// Some mapping of it could not be undone.
    is_stuck: AtomicBool,
}

impl Chunk {
    /// A new chunk of `len` bytes, called `id` by whoever keeps the books: a multiple of the device's granularity.
    pub fn create(device: &Arc<Device>, id: ChunkId, len: Bytes) -> Result<Chunk, MemoryError> {
        let handle = device.driver().create(device.id(), len).map_err(MemoryError::of("create a chunk of", len))?;
        Ok(Chunk { device: Arc::clone(device), id, handle: Some(handle), len, is_stuck: AtomicBool::new(false) })
    }

    /// The chunk `id` of `len` bytes that somebody else exported as `fd`.
    pub fn import(device: &Arc<Device>, id: ChunkId, fd: OwnedFd, len: Bytes) -> Result<Chunk, MemoryError> {
        let handle = device.driver().import(device.id(), fd, len).map_err(MemoryError::of("import a chunk of", len))?;
        Ok(Chunk { device: Arc::clone(device), id, handle: Some(handle), len, is_stuck: AtomicBool::new(false) })
    }

    /// A descriptor for another process. A bearer right: nobody can take it back.
    pub fn export(&self) -> Result<OwnedFd, MemoryError> {
        self.device.driver().export(self.handle()).map_err(MemoryError::of("export a chunk of", self.len))
    }

    /// Lets nobody write it any more, in whatever process; false where the driver cannot ([`crate::driver::Driver::seal`]).
    pub fn seal(&self) -> Result<bool, MemoryError> {
        self.device.driver().seal(self.handle()).map_err(MemoryError::of("seal a chunk of", self.len))
    }

    /// The driver's own handle, for libraries that use the driver beside us. It is good as long as this chunk.
    pub fn native_handle(&self) -> Result<u64, DriverError> {
        self.device.driver().native_handle(self.handle())
    }

    /// Its name in the books of whoever owns it.
    pub fn id(&self) -> ChunkId {
        self.id
    }

    /// Its size.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// A chunk is never empty; here because clippy asks for it beside `len`.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Where it lives.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// It may be visible for ever somewhere in this process, for an unmap has failed: nobody else may get it while the process lives.
    pub fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed)
    }

    pub(super) fn note_stuck(&self) {
        self.is_stuck.store(true, Ordering::Relaxed);
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle.expect("a chunk has its handle until it is released")
    }

    /// Gives the handle back to the driver. If that does not take it, here is the chunk again: it can be tried later.
    pub fn release(mut self) -> Result<(), (Box<Chunk>, MemoryError)> {
        match self.device.driver().release(self.handle()) {
            Ok(()) => {
                self.handle = None;
                Ok(())
            }
            Err(error) => {
                let len = self.len;
                Err((Box::new(self), MemoryError::of("release a chunk of", len)(error)))
            }
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        // There is nobody to return it to: counted and logged.
        if let Err(error) = self.device.driver().release(handle) {
            self.device.note_quarantined(self.len, &error);
        }
    }
}
