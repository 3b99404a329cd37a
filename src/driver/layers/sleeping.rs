//! Chunks that can be put down and taken up again at the same addresses: whoever uses the driver through this sees handles and mappings that stay, while the memory behind them goes and comes.
//!
//! A handle given here is a number of this layer's own. It has the real handle of the driver below while it is awake, and none while it sleeps; where it is mapped, and with which access, is kept here.
//! What is mapped or unmapped of a chunk that sleeps is done when it wakes. Its bytes are gone: who wants them has saved them.
//!
//! Not for: whose memory it is, and what was in it. The caller has waited for the device.
//!
//! Invariant: a chunk that sleeps is nowhere mapped below, and its handle is released there.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
    HostMemory,
};
use crate::ids::{DeviceId, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

/// A driver whose chunks can sleep.
#[derive(Debug)]
pub struct Sleeping {
    inner: Arc<dyn Driver>,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    last: u64,
    chunks: HashMap<Handle, Held>,
    places: BTreeMap<DeviceAddress, Mapped>,
    /// Where reservations begin: no call of a driver goes over more than one.
    reservations: BTreeSet<DeviceAddress>,
}

#[derive(Debug)]
struct Held {
    device: DeviceId,
    len: Bytes,
    /// `None` while it sleeps.
    real: Option<Handle>,
}

/// Where a chunk is to be seen.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    handle: Handle,
    len: Bytes,
    access: Option<(DeviceId, Access)>,
    /// The driver below has it there.
    is_there: bool,
}

impl Books {
    fn insert(&mut self, device: DeviceId, len: Bytes, real: Handle) -> Handle {
        self.last += 1;
        let handle = Handle(self.last);
        self.chunks.insert(handle, Held { device, len, real: Some(real) });
        handle
    }

    fn real(&self, handle: Handle, call: Call) -> Result<Handle, DriverError> {
        let held = self.chunks.get(&handle).and_then(|held| held.real);
        held.ok_or_else(|| DriverError::new(call, Cause::UnknownHandle(handle)))
    }

    /// The places in a span, in order.
    fn places_in(&self, span: AddressSpan) -> Vec<(DeviceAddress, Mapped)> {
        self.places.range(span.start()..span.end()).map(|(at, mapped)| (*at, *mapped)).collect()
    }

    /// Runs of places that lie side by side in one reservation, with the same access.
    fn runs(&self, places: &[(DeviceAddress, Mapped)]) -> Vec<(AddressSpan, Option<(DeviceId, Access)>)> {
        let mut runs: Vec<(AddressSpan, Option<(DeviceId, Access)>)> = Vec::new();
        for (at, mapped) in places {
            let span = Span::new(*at, mapped.len).expect("it was mapped there");
            let begins = self.reservations.contains(at);
            match runs.last_mut() {
                Some((last, access)) if !begins && last.end() == *at && *access == mapped.access => {
                    *last = Span::new(last.start(), last.len() + mapped.len).expect("both lie in one reservation");
                }
                _ => runs.push((span, mapped.access)),
            }
        }
        runs
    }

    /// Those of some chunks.
    fn places_of(&self, handles: &HashSet<Handle>) -> Vec<(DeviceAddress, Mapped)> {
        let places = self.places.iter().map(|(at, mapped)| (*at, *mapped));
        places.filter(|(_, mapped)| handles.contains(&mapped.handle)).collect()
    }
}

impl Sleeping {
    /// The same driver, whose chunks can sleep.
    pub fn over(inner: Arc<dyn Driver>) -> Arc<Sleeping> {
        Arc::new(Sleeping { inner, books: Mutex::default() })
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unmaps these chunks wherever they are seen and lets go of them. On error all are as before, but for what the driver does not map again.
    ///
    /// # Errors
    ///
    /// The driver's. One that takes memory back only with its addresses cannot do it.
    pub fn put_down(&self, handles: &[Handle]) -> Result<(), DriverError> {
        let mut books = self.books();
        let mut awake = HashSet::new();
        for handle in handles {
            let Some(held) = books.chunks.get(handle) else { continue };
            if self.inner.capabilities(held.device)?.memory_stays_with_addresses {
                let cause = Cause::Unsupported { driver: self.inner.name() };
                return Err(DriverError::new(Call::Unmap, cause));
            }
            if held.real.is_some() {
                awake.insert(*handle);
            }
        }
        let places: Vec<_> = books.places_of(&awake).into_iter().filter(|(_, mapped)| mapped.is_there).collect();
        let mut done = Vec::new();
        for place in places {
            let span = Span::new(place.0, place.1.len).expect("it was mapped there");
            if let Err(error) = self.inner.unmap(span) {
                // Back to how it was, as far as the driver does it.
                let _ = self.show(&mut books, &done);
                return Err(error);
            }
            done.push(place);
            books.places.get_mut(&place.0).expect("it was found there").is_there = false;
        }
        for handle in awake {
            let held = books.chunks.get_mut(&handle).expect("it was found there");
            let Some(real) = held.real.take() else { continue };
            if let Err(error) = self.inner.release(real) {
                // It is visible nowhere; its bytes come back when this process ends.
                tracing::warn!(%error, len = held.len.get(), "the driver does not take a chunk back that goes to sleep");
            }
        }
        Ok(())
    }

    /// Maps places again, with their access.
    fn show(&self, books: &mut Books, places: &[(DeviceAddress, Mapped)]) -> Result<(), DriverError> {
        let mut outcome = Ok(());
        let mut shown = Vec::new();
        for (at, mapped) in places {
            let real = books.real(mapped.handle, Call::Map)?;
            match self.inner.map(*at, real) {
                Ok(()) => {
                    books.places.get_mut(at).expect("it is kept there").is_there = true;
                    shown.push((*at, *mapped));
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        // What is mapped gets its access whatever has failed beside it: it may be in use.
        for (span, access) in books.runs(&shown) {
            if let Some((device, access)) = access {
                outcome = outcome.and(self.inner.set_access(span, device, access));
            }
        }
        outcome
    }

    /// Gives chunks that sleep new memory, and shows it wherever they are to be seen. On error they sleep on, and nothing is left of the new memory here.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn take_up(&self, chunks: Vec<(Handle, OwnedFd)>) -> Result<(), DriverError> {
        let mut books = self.books();
        let mut woken: Vec<Handle> = Vec::new();
        let mut outcome = Ok(());
        for (handle, fd) in chunks {
            let Some(held) = books.chunks.get_mut(&handle).filter(|held| held.real.is_none()) else {
                outcome = Err(DriverError::new(Call::Import, Cause::UnknownHandle(handle)));
                break;
            };
            match self.inner.import(held.device, fd, held.len) {
                Ok(real) => held.real = Some(real),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
            woken.push(handle);
        }
        let places = books.places_of(&woken.iter().copied().collect());
        let outcome = outcome.and_then(|()| self.show(&mut books, &places));
        if outcome.is_err() {
            for (at, mapped) in &places {
                let is_there = books.places.get(at).is_some_and(|mapped| mapped.is_there);
                let span = Span::new(*at, mapped.len).expect("it was mapped there");
                if is_there && self.inner.unmap(span).is_ok() {
                    books.places.get_mut(at).expect("it was found there").is_there = false;
                }
            }
            for handle in woken {
                let held = books.chunks.get_mut(&handle).expect("it was found there");
                if let Some(real) = held.real.take() {
                    let _ = self.inner.release(real);
                }
            }
        }
        outcome
    }
}

impl Driver for Sleeping {
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
        let real = self.inner.create(device, len)?;
        Ok(self.books().insert(device, len, real))
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        let mut books = self.books();
        let held = books.chunks.get(&handle);
        let held = held.ok_or_else(|| DriverError::new(Call::Release, Cause::UnknownHandle(handle)))?;
        if let Some(real) = held.real {
            self.inner.release(real)?;
        }
        books.chunks.remove(&handle);
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let real = self.books().real(handle, Call::Export)?;
        self.inner.export(real)
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        let real = self.inner.import(device, fd, len)?;
        Ok(self.books().insert(device, len, real))
    }

    fn seal(&self, handle: Handle) -> Result<bool, DriverError> {
        let real = self.books().real(handle, Call::SetAccess)?;
        self.inner.seal(real)
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        let real = self.books().real(handle, Call::Query)?;
        self.inner.native_handle(real)
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        let at = self.inner.reserve(device, len, alignment)?;
        self.books().reservations.insert(at);
        Ok(at)
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        // Before: from then on the addresses may be another reservation's.
        let mut books = self.books();
        self.inner.unreserve(span)?;
        books.reservations.remove(&span.start());
        Ok(())
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        let mut books = self.books();
        let held = books.chunks.get(&handle);
        let held = held.ok_or_else(|| DriverError::new(Call::Map, Cause::UnknownHandle(handle)))?;
        let mapped = Mapped { handle, len: held.len, access: None, is_there: held.real.is_some() };
        if let Some(real) = held.real {
            self.inner.map(at, real)?;
        }
        books.places.insert(at, mapped);
        Ok(())
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        let mut books = self.books();
        let places = books.places_in(span);
        if places.iter().all(|(_, mapped)| mapped.is_there) {
            self.inner.unmap(span)?;
        } else {
            // Where some of it sleeps the rest goes run by run; a run that does not keeps those behind it.
            let there: Vec<_> = places.iter().copied().filter(|(_, mapped)| mapped.is_there).collect();
            for (run, _) in books.runs(&there) {
                self.inner.unmap(run)?;
                for (at, _) in books.places_in(run) {
                    books.places.remove(&at);
                }
            }
        }
        for (at, _) in places {
            books.places.remove(&at);
        }
        Ok(())
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        let mut books = self.books();
        let places = books.places_in(span);
        if places.iter().all(|(_, mapped)| mapped.is_there) {
            self.inner.set_access(span, device, access)?;
        } else {
            let there: Vec<_> = places.iter().copied().filter(|(_, mapped)| mapped.is_there).collect();
            for (run, _) in books.runs(&there) {
                self.inner.set_access(run, device, access)?;
            }
        }
        for (at, _) in places {
            books.places.get_mut(&at).expect("it was found there").access = Some((device, access));
        }
        Ok(())
    }

    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        self.inner.read(from, into)
    }

    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        self.inner.write(to, from)
    }

    fn host_memory(&self, device: DeviceId, len: usize) -> Option<Box<dyn HostMemory>> {
        self.inner.host_memory(device, len)
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

    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        self.inner.record_event(device, stream)
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        self.inner.query_event(event)
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        self.inner.wait_event(device, stream, event)
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        self.inner.destroy_event(event)
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        self.inner.synchronize(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::{HostDriver, HostOptions};
    use crate::driver::layers::faulty::Faults;
    use crate::units::Place as _;

    const DEVICE: DeviceId = DeviceId(0);
    const LEN: Bytes = Bytes::mib(2);

    fn host() -> Arc<dyn Driver> {
        Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(64)])))
    }

    /// Two chunks side by side, the first of them seen at a second place.
    fn show(driver: &Sleeping) -> ([Handle; 2], [DeviceAddress; 2]) {
        let handles = [(); 2].map(|()| driver.create(DEVICE, LEN).unwrap());
        let both = driver.reserve(DEVICE, LEN + LEN, LEN).unwrap();
        let again = driver.reserve(DEVICE, LEN, LEN).unwrap();
        driver.map(both, handles[0]).unwrap();
        driver.map(both.checked_add(LEN).unwrap(), handles[1]).unwrap();
        driver.map(again, handles[0]).unwrap();
        driver.set_access(Span::new(both, LEN + LEN).unwrap(), DEVICE, Access::ReadWrite).unwrap();
        driver.set_access(Span::new(again, LEN).unwrap(), DEVICE, Access::Read).unwrap();
        (handles, [both, again])
    }

    fn byte(driver: &dyn Driver, at: DeviceAddress) -> Option<u8> {
        let mut byte = [9];
        driver.read(at, &mut byte).ok().map(|()| byte[0])
    }

    #[test]
    fn memory_goes_and_comes_and_is_seen_where_it_was_with_the_access_that_it_had() {
        let below = host();
        let driver = Sleeping::over(Arc::clone(&below));
        let (handles, [both, again]) = show(&driver);
        driver.write(both, &[7]).unwrap();
        assert_eq!(byte(&*driver, again), Some(7));
        let free = || below.memory(DEVICE).unwrap().free;
        assert_eq!(free(), Bytes::mib(60));
        driver.put_down(&handles).unwrap();
        assert_eq!((free(), byte(&*driver, both), byte(&*driver, again)), (Bytes::mib(64), None, None));
        let fresh = handles.map(|handle| {
            let new = below.create(DEVICE, LEN).unwrap();
            let fd = below.export(new).unwrap();
            below.release(new).unwrap();
            (handle, fd)
        });
        driver.take_up(fresh.into()).unwrap();
        assert_eq!((free(), byte(&*driver, both)), (Bytes::mib(60), Some(0)), "it is new memory");
        driver.write(both, &[5]).unwrap();
        assert_eq!(byte(&*driver, again), Some(5));
        assert!(driver.write(again, &[1]).is_err(), "that place may only be read");
    }

    #[test]
    fn what_is_done_to_a_chunk_that_sleeps_is_true_when_it_wakes() {
        let below = host();
        let driver = Sleeping::over(Arc::clone(&below));
        let ([one, two], [both, again]) = show(&driver);
        driver.put_down(&[one]).unwrap();
        assert_eq!(byte(&*driver, both.checked_add(LEN).unwrap()), Some(0), "the other one is awake");
        // One place goes, another comes, and the chunk beside it goes with its mapping.
        driver.unmap(Span::new(again, LEN).unwrap()).unwrap();
        driver.unmap(Span::new(both, LEN + LEN).unwrap()).unwrap();
        driver.release(two).unwrap();
        driver.map(again, one).unwrap();
        driver.set_access(Span::new(again, LEN).unwrap(), DEVICE, Access::ReadWrite).unwrap();
        let new = below.create(DEVICE, LEN).unwrap();
        let fd = below.export(new).unwrap();
        below.release(new).unwrap();
        driver.take_up(vec![(one, fd)]).unwrap();
        assert_eq!((byte(&*driver, again), byte(&*driver, both)), (Some(0), None));
        driver.unmap(Span::new(again, LEN).unwrap()).unwrap();
        driver.release(one).unwrap();
        assert_eq!(below.memory(DEVICE).unwrap().free, Bytes::mib(64));
    }

    #[test]
    fn whatever_call_fails_all_are_awake_or_all_sleep_on() {
        for call in [Call::Unmap, Call::Import, Call::Map, Call::SetAccess] {
            let below = host();
            let faulty = Faults::around(Arc::clone(&below));
            let driver = Sleeping::over(Arc::clone(&faulty) as Arc<dyn Driver>);
            let (handles, [both, again]) = show(&driver);
            driver.write(both, &[7]).unwrap();
            if call == Call::Unmap {
                faulty.layer().fail_always(&[call]);
                driver.put_down(&handles).unwrap_err();
                faulty.layer().fail_always(&[]);
                assert_eq!((byte(&*driver, both), byte(&*driver, again)), (Some(7), Some(7)));
            }
            driver.put_down(&handles).unwrap();
            let fresh = || {
                handles.map(|handle| {
                    let new = below.create(DEVICE, LEN).unwrap();
                    let fd = below.export(new).unwrap();
                    below.release(new).unwrap();
                    (handle, fd)
                })
            };
            if call != Call::Unmap {
                faulty.layer().fail_always(&[call]);
                driver.take_up(fresh().into()).unwrap_err();
                faulty.layer().fail_always(&[]);
                assert_eq!((byte(&*driver, both), byte(&*driver, again)), (None, None), "{call}");
                assert_eq!(below.memory(DEVICE).unwrap().free, Bytes::mib(64), "{call}");
            }
            driver.take_up(fresh().into()).unwrap();
            assert_eq!((byte(&*driver, both), byte(&*driver, again)), (Some(0), Some(0)), "{call}");
        }
    }
}
