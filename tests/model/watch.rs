//! A driver that writes down what is mapped where, and whose streams stand still until a test lets them go on.
//!
//! It is what shows *physical* bytes: two addresses with the same chunk behind them are one place.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use stitchd::driver::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::units::{AddressSpan, Bytes, DeviceAddress, Place, Span};

/// Some bytes of a chunk: which one, from where, to where.
pub(crate) type Piece = (Handle, u64, u64);

/// The driver `inner`, watched.
#[derive(Debug)]
pub(crate) struct Watch {
    inner: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lens: BTreeMap<Handle, u64>,
    created: Option<Handle>,
    mapped: BTreeMap<u64, Mapped>,
    mapped_times: BTreeMap<Handle, u64>,
    /// Live allocations: nothing behind them may go away.
    guarded: BTreeMap<u64, u64>,
    /// What went away all the same.
    wrong: Option<String>,
    time: u64,
    passed: BTreeMap<StreamId, u64>,
    /// Streams that have nothing queued.
    idle: BTreeSet<StreamId>,
    /// Everything recorded before this has run, on whatever stream.
    synchronized: u64,
    events: BTreeMap<EventId, (StreamId, u64)>,
}

#[derive(Debug)]
struct Mapped {
    len: u64,
    handle: Handle,
    access: Access,
}

impl State {
    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    fn passed(&self, stream: StreamId) -> u64 {
        if self.idle.contains(&stream) {
            return self.time;
        }
        self.passed.get(&stream).copied().unwrap_or(0).max(self.synchronized)
    }
}

impl Watch {
    pub(crate) fn around(inner: Arc<dyn Driver>) -> Arc<Watch> {
        Arc::new(Watch { inner, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Mappings go while a test that failed unwinds; they must not fail again.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The handle that was created last.
    pub(crate) fn created(&self) -> Handle {
        self.lock().created.unwrap()
    }

    /// The physical bytes behind a span; panics where it is not mapped for reading and writing.
    pub(crate) fn behind(&self, start: u64, len: u64) -> Vec<Piece> {
        let state = self.lock();
        let mut pieces = Vec::new();
        let mut at = start;
        while at < start + len {
            let (from, mapped) = state.mapped.range(..=at).next_back().expect("nothing is mapped there");
            assert!(at < from + mapped.len, "{at:#x} of [{start:#x} + {len:#x}) is not mapped");
            assert_eq!(mapped.access, Access::ReadWrite, "{at:#x} is mapped and may not be used");
            let to = (from + mapped.len).min(start + len);
            pieces.push((mapped.handle, at - from, to - from));
            at = to;
        }
        pieces
    }

    /// At how many places a chunk is visible.
    pub(crate) fn mapped_times(&self, handle: Handle) -> u64 {
        self.lock().mapped_times.get(&handle).copied().unwrap_or(0)
    }

    /// From now on nothing in the span may be unmapped.
    pub(crate) fn guard(&self, start: u64, len: u64) {
        self.lock().guarded.insert(start, len);
    }

    pub(crate) fn unguard(&self, start: u64) {
        self.lock().guarded.remove(&start).unwrap();
    }

    /// Panics if something live was unmapped.
    pub(crate) fn check(&self) {
        let wrong = self.lock().wrong.clone();
        assert_eq!(wrong, None);
    }

    /// A moment, later than all before.
    pub(crate) fn tick(&self) -> u64 {
        self.lock().tick()
    }

    /// Up to which moment a stream has run.
    pub(crate) fn passed(&self, stream: StreamId) -> u64 {
        self.lock().passed(stream)
    }

    /// A stream runs all that it has queued; until more is, whatever is recorded on it is complete at once.
    pub(crate) fn pass(&self, stream: StreamId) {
        self.lock().idle.insert(stream);
    }

    /// A stream has something queued that runs only when it is told to.
    pub(crate) fn queue(&self, stream: StreamId) {
        let mut state = self.lock();
        if state.idle.remove(&stream) {
            let now = state.tick();
            state.passed.insert(stream, now);
        }
    }
}

impl Driver for Watch {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn devices(&self) -> Vec<DeviceDescription> {
        self.inner.devices()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError> {
        self.inner.capabilities(device)
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        self.inner.memory(device)
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        let handle = self.inner.create(device, len)?;
        let mut state = self.lock();
        state.lens.insert(handle, len.get());
        state.created = Some(handle);
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.inner.release(handle)
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        self.inner.export(handle)
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        self.inner.import(device, fd, len)
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        self.inner.native_handle(handle)
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        self.inner.reserve(device, len, alignment)
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.inner.unreserve(span)
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        self.inner.map(at, handle)?;
        let mut state = self.lock();
        let len = state.lens[&handle];
        state.mapped.insert(at.get(), Mapped { len, handle, access: Access::None });
        *state.mapped_times.entry(handle).or_default() += 1;
        Ok(())
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.inner.unmap(span)?;
        let mut state = self.lock();
        let (start, end) = (span.start().get(), span.end().get());
        if let Some((at, len)) = state.guarded.range(..end).next_back()
            && at + len > start
        {
            state.wrong = Some(format!("{span} is unmapped under the live [{at:#x} + {len:#x})"));
        }
        let gone: Vec<u64> = state.mapped.range(start..end).map(|(at, _)| *at).collect();
        for at in gone {
            let handle = state.mapped.remove(&at).unwrap().handle;
            *state.mapped_times.get_mut(&handle).unwrap() -= 1;
        }
        Ok(())
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        self.inner.set_access(span, device, access)?;
        let mut state = self.lock();
        for (_, mapped) in state.mapped.range_mut(span.start().get()..span.end().get()) {
            mapped.access = access;
        }
        Ok(())
    }

    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        self.inner.read(from, into)
    }

    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        self.inner.write(to, from)
    }

    fn fill(&self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) -> Result<(), DriverError> {
        self.inner.fill(device, stream, span, value)
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError> {
        self.inner.create_stream(device)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        self.inner.destroy_stream(stream)
    }

    fn record_event(&self, _device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        let mut state = self.lock();
        let now = state.tick();
        state.events.insert(EventId(now), (stream, now));
        Ok(EventId(now))
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        let state = self.lock();
        let unknown = || DriverError::new(Call::Event, Cause::UnknownEvent(event));
        let (stream, at) = *state.events.get(&event).ok_or_else(unknown)?;
        Ok(state.passed(stream) >= at)
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        self.inner.wait_event(device, stream, event)
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        self.lock().events.remove(&event).map(|_| ()).ok_or(DriverError::new(Call::Event, Cause::UnknownEvent(event)))
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        self.inner.synchronize(device)?;
        let mut state = self.lock();
        state.synchronized = state.tick();
        Ok(())
    }
}

/// A unique number at the first and last bytes of every chunk of an allocation: whoever shares a chunk with it overwrites one.
pub(crate) fn write_pattern(driver: &dyn Driver, start: u64, len: u64, granule: u64, number: u64) {
    for at in marks(start, len, granule) {
        driver.write(at, &number.to_le_bytes()).unwrap();
    }
}

/// Panics if the pattern is another's.
pub(crate) fn check_pattern(driver: &dyn Driver, start: u64, len: u64, granule: u64, number: u64) {
    for at in marks(start, len, granule) {
        let mut bytes = [0; 8];
        driver.read(at, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), number, "somebody else wrote to {at} of [{start:#x} + {len:#x})");
    }
}

/// Where patterns are: eight bytes at either end, and on both sides of every border of chunks inside. Spans below 16 bytes have none.
fn marks(start: u64, len: u64, granule: u64) -> Vec<DeviceAddress> {
    if len < 16 {
        return Vec::new();
    }
    let first = (start / granule + 1) * granule;
    let borders = (first..start + len).step_by(granule as usize).flat_map(|border| [border - 8, border]);
    let inside = borders.filter(|at| *at >= start && at + 8 <= start + len);
    let mut marks: Vec<u64> = [start, start + len - 8].into_iter().chain(inside).collect();
    marks.sort_unstable();
    // Where an end lies near a border one would lie over the other.
    let mut end = 0;
    marks.retain(|at| {
        let is_clear = *at >= end;
        end = if is_clear { at + 8 } else { end };
        is_clear
    });
    marks.into_iter().map(DeviceAddress::new).collect()
}

/// A span, for calls that want one.
pub(crate) fn span(start: u64, len: u64) -> AddressSpan {
    Span::new(DeviceAddress::from_raw(start), Bytes::new(len)).unwrap()
}
