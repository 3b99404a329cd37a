//! One device as this process uses it: the driver, the ordinal, what it can do, and what could not be let go of.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Call, Capabilities, Cause, Driver, DriverError};
use crate::ids::{DeviceId, DeviceUuid};
use crate::limits;
use crate::units::Bytes;

/// A device of a driver.
#[derive(Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
    id: DeviceId,
    uuid: DeviceUuid,
    capabilities: Capabilities,
    quarantined_chunks: AtomicU64,
    quarantined_bytes: AtomicU64,
    mappings: AtomicU64,
    address_bytes: AtomicU64,
}

/// What a device has lost to failed unmaps and releases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quarantine {
    /// Chunks and ranges of addresses.
    pub count: u64,
    /// Their bytes.
    pub bytes: Bytes,
}

impl Device {
    /// Device `id` of `driver`.
    pub fn open(driver: Arc<dyn Driver>, id: DeviceId) -> Result<Arc<Device>, DriverError> {
        let capabilities = driver.capabilities(id)?;
        let described = driver.devices().into_iter().find(|device| device.id == id);
        let uuid = described.expect("a device that has capabilities is listed").uuid;
        Ok(Arc::new(Device {
            driver,
            id,
            uuid,
            capabilities,
            quarantined_chunks: AtomicU64::new(0),
            quarantined_bytes: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
            address_bytes: AtomicU64::new(0),
        }))
    }

    /// The driver.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// The ordinal in this process.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The name in every process.
    pub fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    /// What it can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// What has been quarantined so far.
    pub fn quarantine(&self) -> Quarantine {
        Quarantine {
            count: self.quarantined_chunks.load(Ordering::Relaxed),
            bytes: Bytes::new(self.quarantined_bytes.load(Ordering::Relaxed)),
        }
    }

    /// Chunks that are mapped, each as often as it is, and bytes of addresses that are reserved.
    pub fn mapped(&self) -> (u64, Bytes) {
        (self.mappings.load(Ordering::Relaxed), Bytes::new(self.address_bytes.load(Ordering::Relaxed)))
    }

    pub(super) fn note_mapped(&self, chunks: usize) {
        self.mappings.fetch_add(chunks as u64, Ordering::Relaxed);
    }

    pub(super) fn note_unmapped(&self, chunks: usize) {
        self.mappings.fetch_sub(chunks as u64, Ordering::Relaxed);
    }

    /// Counts addresses that are to be reserved, if there may be so many.
    pub(super) fn take_addresses(&self, len: Bytes) -> Result<(), DriverError> {
        let max = limits::ADDRESS_BYTES_MAX.get();
        let more = |held: u64| held.checked_add(len.get()).filter(|sum| *sum <= max);
        let taken = self.address_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let remedy = "fewer ranges, or smaller ones: freed ones are kept for the next request of their size";
        let cause = Cause::TooMany { what: "bytes of addresses of this process", limit: max, remedy };
        taken.map(drop).map_err(|_| DriverError::new(Call::Reserve, cause))
    }

    pub(super) fn give_addresses_back(&self, len: Bytes) {
        self.address_bytes.fetch_sub(len.get(), Ordering::Relaxed);
    }

    /// Counts something that could not be let go of.
    pub(super) fn note_quarantined(&self, len: Bytes, error: &DriverError) {
        self.quarantined_chunks.fetch_add(1, Ordering::Relaxed);
        self.quarantined_bytes.fetch_add(len.get(), Ordering::Relaxed);
        tracing::error!(device = self.id.0, bytes = len.get(), error = %crate::error::chain(error), "quarantined");
    }
}
