//! A range of addresses with nothing behind it yet.

use std::sync::Arc;

use super::{Device, MemoryError};
use crate::units::{AddressSpan, Bytes, Span};

/// Addresses that nobody else in this process gets. Dropping it gives them back; a [`super::Mapping`] holds its reservation, so nothing
/// is mapped then.
#[derive(Debug)]
pub struct Reservation {
    device: Arc<Device>,
    span: AddressSpan,
}

impl Reservation {
    /// `len` bytes of addresses, aligned to the device's granularity.
    pub fn new(device: &Arc<Device>, len: Bytes) -> Result<Reservation, MemoryError> {
        let failed = || MemoryError::of("reserve addresses for", len);
        device.take_addresses(len).map_err(failed())?;
        let start = device.driver().reserve(device.id(), len, device.capabilities().granularity).map_err(|error| {
            device.give_addresses_back(len);
            failed()(error)
        })?;
        let span = Span::new(start, len).ok_or(MemoryError::Unstitchable(len))?;
        Ok(Reservation { device: Arc::clone(device), span })
    }

    /// The addresses.
    pub fn span(&self) -> AddressSpan {
        self.span
    }

    /// Where they belong.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        match self.device.driver().unreserve(self.span) {
            Ok(()) => self.device.give_addresses_back(self.span.len()),
            Err(error) => self.device.note_quarantined(self.span.len(), &error),
        }
    }
}
