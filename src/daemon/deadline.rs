//! Bounds how long anybody waits for a driver: a call that has not come back in time is an error for its caller, and is made good when it does come back.
//!
//! Each call runs on a thread of its own pool, because a call into a vendor's library cannot be interrupted. While one of a device is overdue, other calls to that device are
//! refused at once: threads that hang must not pile up. What an overdue call brings in the end is given back to the driver, for nobody knows of it any more; a release that was
//! refused, or came through too late, is asked for again by whoever has the handle ([`crate::store`]).
//!
//! Not for: streams and copies, which a daemon does not use and whose time is the job's own; and not for clients, where two switches of threads for each call
//! cost more than the calls ([`crate::driver::layers::metered::Meter::overdue`] is theirs).

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::driver::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
};
use crate::error::chain;
use crate::ids::{DeviceId, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress};

/// Threads that are kept for the next calls; more are made when more calls are made at once.
const IDLE_MAX: usize = 4;

/// A driver whose calls end in time.
#[derive(Debug)]
pub(super) struct Deadline {
    inner: Arc<dyn Driver>,
    limit: Duration,
    pool: Arc<Mutex<Pool>>,
}

type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Sender<Work>>,
    /// The device of each handle.
    homes: HashMap<Handle, DeviceId>,
    /// Handles whose release came through after its caller had given up: whoever asks again is told that it is done.
    released: HashSet<Handle>,
    /// Calls that are overdue, by device.
    overdue: HashMap<DeviceId, Vec<Call>>,
}

impl Deadline {
    /// Puts a limit around `driver`.
    pub(super) fn around(driver: Arc<dyn Driver>, limit: Duration) -> Arc<Deadline> {
        Arc::new(Deadline { inner: driver, limit, pool: Arc::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        lock(&self.pool)
    }

    fn home_of(&self, handle: Handle) -> Option<DeviceId> {
        self.lock().homes.get(&handle).copied()
    }

    /// Makes a call on another thread and waits for it. `undo` gives back what comes too late.
    fn within<T: Send + 'static>(
        &self,
        call: Call,
        device: Option<DeviceId>,
        run: impl FnOnce(&dyn Driver) -> Result<T, DriverError> + Send + 'static,
        undo: impl FnOnce(&dyn Driver, T) + Send + 'static,
    ) -> Result<T, DriverError> {
        let overdue = |call: Call| Cause::Overdue { call, limit: self.limit };
        if let Some(stuck) = device.and_then(|device| self.lock().overdue.get(&device)?.first().copied()) {
            return Err(DriverError::new(call, overdue(stuck)));
        }
        let (send, receive) = channel();
        let (inner, pool) = (Arc::clone(&self.inner), Arc::clone(&self.pool));
        // Taken by whoever is first: the caller that gives up, or the call that comes back.
        let given_up = Arc::new(Mutex::new(false));
        let was_given_up = Arc::clone(&given_up);
        let work = Box::new(move || {
            // One that panics is a call that has failed. Without an answer its caller would never end, and one that was given up would be overdue for ever.
            let outcome = catch_unwind(AssertUnwindSafe(|| run(&*inner)));
            let outcome = outcome.unwrap_or_else(|_| Err(DriverError::new(call, Cause::Panicked { call })));
            let is_late = was_given_up.lock().expect("nothing panics while it holds this lock");
            if !*is_late {
                // The receiver waits as long as it has not given up.
                let _ = send.send(outcome);
                return;
            }
            drop(is_late);
            if let Ok(value) = outcome {
                undo(&*inner, value);
            }
            tracing::warn!(%call, "a driver call that was overdue has come back");
            if let Some(device) = device {
                let mut pool = lock(&pool);
                let calls = pool.overdue.entry(device).or_default();
                if let Some(at) = calls.iter().position(|overdue| *overdue == call) {
                    calls.swap_remove(at);
                }
                if calls.is_empty() {
                    pool.overdue.remove(&device);
                }
            }
        });
        self.start(work).map_err(|errno| DriverError::new(call, Cause::System { what: "starting a thread", errno }))?;
        match receive.recv_timeout(self.limit) {
            Ok(outcome) => return outcome,
            // The thread is gone without a word.
            Err(RecvTimeoutError::Disconnected) => return Err(DriverError::new(call, Cause::Panicked { call })),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let mut given_up = given_up.lock().expect("nothing panics while it holds this lock");
        // It may have come back in this very moment.
        if let Ok(outcome) = receive.try_recv() {
            return outcome;
        }
        *given_up = true;
        if let Some(device) = device {
            self.lock().overdue.entry(device).or_default().push(call);
        }
        tracing::error!(%call, limit_seconds = self.limit.as_secs_f64(), "a driver call is overdue");
        Err(DriverError::new(call, overdue(call)))
    }

    /// A call that brings a handle: its home is noted, or it is released if it comes too late.
    fn new_handle(
        &self,
        call: Call,
        device: DeviceId,
        run: impl FnOnce(&dyn Driver) -> Result<Handle, DriverError> + Send + 'static,
    ) -> Result<Handle, DriverError> {
        let undo = move |driver: &dyn Driver, handle| {
            if let Err(error) = driver.release(handle) {
                // Nobody asks for it again: unlike a chunk of the store it was never anybody's.
                tracing::error!(%device, error = %chain(&error), "a chunk that came too late cannot be given back: its memory is lost until this daemon is restarted");
            }
        };
        let handle = self.within(call, Some(device), run, undo)?;
        self.lock().homes.insert(handle, device);
        Ok(handle)
    }

    /// Gives work to a thread that has none, or to a new one.
    fn start(&self, work: Work) -> Result<(), rustix::io::Errno> {
        let mut work = work;
        loop {
            let Some(idle) = self.lock().idle.pop() else { break };
            match idle.send(work) {
                Ok(()) => return Ok(()),
                // It ended; the next one.
                Err(back) => work = back.0,
            }
        }
        let (send, receive) = channel();
        let pool = Arc::clone(&self.pool);
        let again = send.clone();
        let thread = std::thread::Builder::new().name("stitchd-driver".into());
        let failed =
            |error: std::io::Error| rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN);
        thread.spawn(move || serve(&receive, &again, &pool)).map_err(failed)?;
        // Its receiver is in the thread that was just started.
        let _ = send.send(work);
        Ok(())
    }
}

/// Does work until there are enough others who have none.
fn serve(work: &Receiver<Work>, again: &Sender<Work>, pool: &Mutex<Pool>) {
    while let Ok(next) = work.recv() {
        next();
        let mut pool = lock(pool);
        if pool.idle.len() >= IDLE_MAX {
            return;
        }
        pool.idle.push(again.clone());
    }
}

fn lock(pool: &Mutex<Pool>) -> MutexGuard<'_, Pool> {
    pool.lock().expect("nothing panics while it holds this lock")
}

/// Nothing came of it that would have to be given back.
fn keep<T>(_: &dyn Driver, _: T) {}

impl Driver for Deadline {
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
        self.within(Call::Query, Some(device), move |driver| driver.capabilities(device), keep)
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        self.within(Call::Query, Some(device), move |driver| driver.memory(device), keep)
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        self.new_handle(Call::Create, device, move |driver| driver.create(device, len))
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        if self.lock().released.remove(&handle) {
            return Ok(());
        }
        let home = self.home_of(handle);
        let pool = Arc::clone(&self.pool);
        let note = move |_: &dyn Driver, ()| {
            let mut pool = lock(&pool);
            pool.homes.remove(&handle);
            pool.released.insert(handle);
        };
        self.within(Call::Release, home, move |driver| driver.release(handle), note)?;
        self.lock().homes.remove(&handle);
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        self.within(Call::Export, self.home_of(handle), move |driver| driver.export(handle), keep)
    }

    fn seal(&self, handle: Handle) -> Result<bool, DriverError> {
        self.within(Call::SetAccess, self.home_of(handle), move |driver| driver.seal(handle), keep)
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        self.inner.native_handle(handle)
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        self.new_handle(Call::Import, device, move |driver| driver.import(device, fd, len))
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        self.inner.reserve(device, len, alignment)
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.inner.unreserve(span)
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        self.inner.map(at, handle)
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.inner.unmap(span)
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        self.inner.set_access(span, device, access)
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
    use std::sync::Condvar;

    use super::*;
    use crate::driver::layers::{Intercept, Layered, Step};
    use crate::driver::sim::{SimDriver, SimOptions};

    const DEVICE: DeviceId = DeviceId(0);
    const OTHER: DeviceId = DeviceId(1);
    const LEN: Bytes = Bytes::mib(2);

    /// Holds calls of a kind up; creates on one device alone.
    #[derive(Debug, Default)]
    struct Gate {
        shut: Mutex<Option<Call>>,
        opened: Condvar,
    }

    impl Gate {
        fn set(&self, shut: Option<Call>) {
            *self.shut.lock().unwrap() = shut;
            self.opened.notify_all();
        }
    }

    impl Intercept for Gate {
        fn around<T>(
            &self,
            step: Step,
            run: impl FnOnce() -> Result<T, DriverError>,
            _handle: impl Fn(&T) -> Option<Handle>,
        ) -> Result<T, DriverError> {
            if !matches!(step, Step::Create { device: OTHER, .. }) {
                drop(self.opened.wait_while(self.shut.lock().unwrap(), |shut| *shut == Some(step.call())).unwrap());
            }
            run()
        }
    }

    fn eventually(mut done: impl FnMut() -> bool) {
        for _ in 0..2_000 {
            if done() {
                return;
            }
            std::thread::yield_now();
            std::thread::park_timeout(Duration::from_millis(1));
        }
        panic!("it did not happen");
    }

    fn gated(limit: Duration) -> (Arc<SimDriver>, Arc<Layered<Gate>>, Arc<Deadline>) {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(64), Bytes::mib(64)])));
        let gate = Arc::new(Layered::new(Arc::clone(&sim) as Arc<dyn Driver>, Gate::default()));
        let deadline = Deadline::around(Arc::clone(&gate) as Arc<dyn Driver>, limit);
        (sim, gate, deadline)
    }

    #[test]
    fn a_call_that_hangs_is_an_error_and_is_undone_when_it_comes_back() {
        let (sim, gate, driver) = gated(Duration::from_millis(20));
        gate.layer().set(Some(Call::Create));
        let error = driver.create(DEVICE, LEN).unwrap_err();
        assert!(matches!(error.cause, Cause::Overdue { call: Call::Create, .. }), "{error:?}");
        // Refused at once, whatever it is; the other device does not know of it.
        let error = driver.memory(DEVICE).unwrap_err();
        assert!(matches!(error.cause, Cause::Overdue { call: Call::Create, .. }), "{error:?}");
        let other = driver.create(OTHER, LEN).unwrap();
        driver.release(other).unwrap();
        gate.layer().set(None);
        eventually(|| driver.memory(DEVICE).is_ok());
        assert_eq!(sim.counts(), (0, 0, 0), "what came too late was given back");
        let handle = driver.create(DEVICE, LEN).unwrap();
        assert_eq!(driver.release(handle), Ok(()));
    }

    #[test]
    fn a_release_that_came_through_too_late_is_done_for_whoever_asks_again() {
        let (sim, gate, driver) = gated(Duration::from_millis(20));
        let (one, other) = (driver.create(DEVICE, LEN).unwrap(), driver.create(DEVICE, LEN).unwrap());
        gate.layer().set(Some(Call::Release));
        for handle in [one, other, one] {
            let error = driver.release(handle).unwrap_err();
            assert!(matches!(error.cause, Cause::Overdue { call: Call::Release, .. }), "{error:?}");
        }
        gate.layer().set(None);
        eventually(|| driver.memory(DEVICE).is_ok());
        assert_eq!(sim.counts().0, 1, "the first was made, the other never asked for");
        assert_eq!((driver.release(one), driver.release(other)), (Ok(()), Ok(())));
        assert_eq!(sim.counts().0, 0);
        driver.release(one).unwrap_err();
        let pool = driver.lock();
        assert!(pool.homes.is_empty() && pool.released.is_empty());
    }

    /// Panics at every export.
    #[derive(Debug)]
    struct Panics;

    impl Intercept for Panics {
        fn around<T>(
            &self,
            step: Step,
            run: impl FnOnce() -> Result<T, DriverError>,
            _handle: impl Fn(&T) -> Option<Handle>,
        ) -> Result<T, DriverError> {
            assert!(step.call() != Call::Export, "it is expected to panic");
            run()
        }
    }

    #[test]
    fn a_call_that_panics_is_an_error_like_others_and_the_next_is_made() {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(64)])));
        let panics = Arc::new(Layered::new(sim as Arc<dyn Driver>, Panics));
        let driver = Deadline::around(panics as Arc<dyn Driver>, Duration::from_secs(20));
        let handle = driver.create(DEVICE, LEN).unwrap();
        let error = driver.export(handle).unwrap_err();
        assert_eq!(error.cause, Cause::Panicked { call: Call::Export });
        assert_eq!(driver.release(handle), Ok(()));
    }

    #[test]
    fn many_calls_at_once_all_come_back_and_few_threads_stay() {
        let (sim, _gate, driver) = gated(Duration::from_secs(20));
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let handle = driver.create(DEVICE, LEN).unwrap();
                        driver.export(handle).unwrap();
                        driver.release(handle).unwrap();
                    }
                });
            }
        });
        assert_eq!(sim.counts(), (0, 0, 0));
        assert!(driver.lock().idle.len() <= IDLE_MAX && driver.lock().homes.is_empty());
    }
}
