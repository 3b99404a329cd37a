//! Decorators over any driver: [`metered`] counts and times, [`limited`] runs out early, [`faulty`] fails on purpose. And [`sleeping`], whose chunks stay while their memory goes and comes.
//!
//! Each is an [`Intercept`], which sees every call as a [`Step`]; [`Layered`] is the one place that forwards them.
//!
//! Not for: rules of the drivers, which stay below.

pub mod faulty;
pub mod limited;
pub mod metered;
pub mod sleeping;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{
    Access, Call, Capabilities, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle, HostMemory,
};
use crate::ids::{DeviceId, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress};

/// What stands around every call of a driver.
pub trait Intercept: Send + Sync + fmt::Debug {
    /// Makes the call, or refuses to. `handle` tells the handle in an answer that is one.
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError>;
}

/// One call with what matters of its arguments.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// [`Driver::create`]
    Create {
        /// Where.
        device: DeviceId,
        /// How much.
        len: Bytes,
    },
    /// [`Driver::release`]
    Release {
        /// Which.
        handle: Handle,
    },
    /// [`Driver::export`]
    Export {
        /// Which.
        handle: Handle,
    },
    /// [`Driver::import`]
    Import {
        /// Where.
        device: DeviceId,
        /// How much.
        len: Bytes,
    },
    /// [`Driver::map`]
    Map {
        /// Where it begins.
        at: DeviceAddress,
    },
    /// [`Driver::unmap`]
    Unmap {
        /// Where.
        span: AddressSpan,
    },
    /// Any other call.
    Other(Call),
}

impl Step {
    /// The kind of call.
    pub fn call(&self) -> Call {
        match self {
            Step::Create { .. } => Call::Create,
            Step::Release { .. } => Call::Release,
            Step::Export { .. } => Call::Export,
            Step::Import { .. } => Call::Import,
            Step::Map { .. } => Call::Map,
            Step::Unmap { .. } => Call::Unmap,
            Step::Other(call) => *call,
        }
    }
}

/// A driver with something around it.
#[derive(Debug)]
pub struct Layered<I> {
    inner: Arc<dyn Driver>,
    layer: I,
}

impl<I: Intercept> Layered<I> {
    /// Puts `layer` around `inner`.
    pub fn new(inner: Arc<dyn Driver>, layer: I) -> Layered<I> {
        Layered { inner, layer }
    }

    /// The layer.
    pub fn layer(&self) -> &I {
        &self.layer
    }

    fn plain<T>(&self, step: Step, run: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        self.layer.around(step, run, |_| None)
    }
}

impl<I: Intercept> Driver for Layered<I> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn version(&self) -> Option<String> {
        self.inner.version()
    }

    fn devices(&self) -> Vec<DeviceDescription> {
        self.inner.devices()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError> {
        self.plain(Step::Other(Call::Query), || self.inner.capabilities(device))
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        self.plain(Step::Other(Call::Query), || self.inner.memory(device))
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        self.layer.around(Step::Create { device, len }, || self.inner.create(device, len), |handle| Some(*handle))
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.plain(Step::Release { handle }, || self.inner.release(handle))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        self.plain(Step::Export { handle }, || self.inner.export(handle))
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        self.layer.around(Step::Import { device, len }, || self.inner.import(device, fd, len), |handle| Some(*handle))
    }

    fn seal(&self, handle: Handle) -> Result<bool, DriverError> {
        self.plain(Step::Other(Call::SetAccess), || self.inner.seal(handle))
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        self.plain(Step::Other(Call::Query), || self.inner.native_handle(handle))
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        self.plain(Step::Other(Call::Reserve), || self.inner.reserve(device, len, alignment))
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Unreserve), || self.inner.unreserve(span))
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        self.plain(Step::Map { at }, || self.inner.map(at, handle))
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.plain(Step::Unmap { span }, || self.inner.unmap(span))
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::SetAccess), || self.inner.set_access(span, device, access))
    }

    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Copy), || self.inner.read(from, into))
    }

    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Copy), || self.inner.write(to, from))
    }

    fn host_memory(&self, device: DeviceId, len: usize) -> Option<Box<dyn HostMemory>> {
        self.inner.host_memory(device, len)
    }

    fn fill(&self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Copy), || self.inner.fill(device, stream, span, value))
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.create_stream(device))
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.destroy_stream(stream))
    }

    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.record_event(device, stream))
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.query_event(event))
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.wait_event(device, stream, event))
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Event), || self.inner.destroy_event(event))
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        self.plain(Step::Other(Call::Synchronize), || self.inner.synchronize(device))
    }
}
