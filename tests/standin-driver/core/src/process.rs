//! What one process has of the machine, how its calls begin, and what it asks of devices, contexts and streams.

#![expect(unsafe_code, reason = "asks the loader where the library lies")]

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::addresses::Addresses;
use crate::chunks::Chunk;
use crate::streams::{Fill, Streams};
use crate::{Called, Machine, code};

/// What is wanted of a chunk: as `CUmemAllocationProp` says it.
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// 1: pinned.
    pub kind: u32,
    /// 1: a POSIX descriptor.
    pub handle_types: u32,
    /// 1: of a device.
    pub location: u32,
    /// Its ordinal.
    pub device: i32,
    /// Network cards are to read it.
    pub rdma: bool,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    numbers: u64,
    calls: u64,
    pub(crate) handles: HashMap<u64, Arc<Chunk>>,
    pub(crate) addresses: Addresses,
    streams: Streams,
    /// Memory of each context, by device.
    contexts: HashMap<usize, (u64, Option<OwnedFd>)>,
    /// A copy or fill went where it must not: nothing works any more.
    is_poisoned: bool,
}

impl State {
    pub(crate) fn next(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn chunk(&self, handle: u64) -> Called<&Arc<Chunk>> {
        self.handles.get(&handle).ok_or(code::INVALID_HANDLE)
    }

    /// Runs queued work as far as it goes.
    fn pump(&mut self) -> Called<()> {
        let State { addresses, streams, is_poisoned, .. } = self;
        streams.pump(|fill| *is_poisoned |= addresses.fill(fill).is_err());
        if *is_poisoned { Err(code::ILLEGAL_ADDRESS) } else { Ok(()) }
    }

    /// What a device does with addresses that may not be used: nothing works any more.
    fn used(&mut self, outcome: Called<()>) -> Called<()> {
        self.is_poisoned |= outcome == Err(code::ILLEGAL_ADDRESS);
        outcome
    }
}

/// One process's driver.
#[derive(Debug)]
pub struct Process {
    machine: Machine,
    /// A thread must choose a context; else it has the first device.
    has_contexts: bool,
    pid: u32,
    state: Mutex<State>,
}

thread_local! {
    /// The current context or device of the thread, plus one; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// What a C function answers: its code, with the value put where it was asked for.
pub fn answer<T>(outcome: Called<T>, put: impl FnOnce(T)) -> i32 {
    match outcome {
        Ok(value) => {
            put(value);
            code::OK
        }
        Err(code) => code,
    }
}

/// The process's driver: its machine is the directory of the library that the code at `symbol` is of.
pub fn driver_beside(symbol: usize, version: i32, has_contexts: bool) -> Process {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr looks the address up and writes into `info`, which is as large as it thinks.
    let found = unsafe { libc::dladdr(std::ptr::without_provenance(symbol), &raw mut info) };
    assert!(found != 0 && !info.dli_fname.is_null(), "a loaded library has a file");
    // SAFETY: dladdr gave a C string that lives as long as the library is loaded.
    let path = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()));
    let directory = path.parent().and_then(|parent| parent.canonicalize().ok());
    Process::new(Machine::of(&directory.expect("a library lies in a directory"), version), has_contexts)
}

impl Process {
    /// The process that calls, on `machine`.
    pub fn new(machine: Machine, has_contexts: bool) -> Process {
        Process { machine, has_contexts, pid: std::process::id(), state: Mutex::default() }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    pub(crate) fn has_contexts(&self) -> bool {
        self.has_contexts
    }

    fn lock(&self) -> Called<MutexGuard<'_, State>> {
        if std::process::id() != self.pid {
            return Err(code::NOT_INITIALIZED);
        }
        let state = self.state.lock().map_err(|_| code::UNKNOWN)?;
        if state.is_poisoned { Err(code::ILLEGAL_ADDRESS) } else { Ok(state) }
    }

    /// The device is there.
    pub(crate) fn check(&self, device: usize) -> Called<()> {
        match (self.machine.is_lost(device), self.has_contexts) {
            (false, _) if self.machine.needs_reset(device) => Err(code::UNKNOWN),
            (false, _) => Ok(()),
            (true, true) => Err(code::DEVICE_UNAVAILABLE),
            (true, false) => Err(code::NO_DEVICE),
        }
    }

    /// A memory call begins, for a device if that is known: it takes its time, and may be the one that is to fail or hang.
    pub(crate) fn begin(&self, call: &str, device: Option<usize>) -> Called<MutexGuard<'_, State>> {
        const LOOK: Duration = Duration::from_millis(1);
        if self.machine.conf.latency_us > 0 {
            std::thread::sleep(Duration::from_micros(self.machine.conf.latency_us));
        }
        let mut state = self.lock()?;
        state.calls += 1;
        let number = state.calls;
        // Other threads' calls go on meanwhile.
        drop(state);
        while self.machine.hangs(call, device) || number == self.machine.conf.hang_after && !self.machine.is_resumed() {
            std::thread::sleep(LOOK);
        }
        if let Some(device) = device {
            self.check(device)?;
        }
        if number == self.machine.conf.fail { Err(code::UNKNOWN) } else { self.lock() }
    }

    /// The same for calls that need a context.
    pub(crate) fn begin_in_context(&self, call: &str) -> Called<MutexGuard<'_, State>> {
        let state = self.begin(call, Some(self.current_device()))?;
        if self.is_without_context() { Err(code::INVALID_CONTEXT) } else { Ok(state) }
    }

    fn is_without_context(&self) -> bool {
        self.has_contexts && CURRENT.get() == 0
    }

    /// Whose calls the thread's are. A thread that has chosen none has the first.
    pub(crate) fn current_device(&self) -> usize {
        CURRENT.get().saturating_sub(1) as usize
    }

    /// Whether calls are taken at all.
    pub fn init(&self) -> Called<()> {
        self.lock().map(drop)
    }

    /// Bytes of each device.
    pub fn device(&self, ordinal: i32) -> Called<u64> {
        self.init()?;
        let device = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        let bytes = self.machine.conf.devices.get(device).copied().ok_or(code::INVALID_DEVICE)?;
        self.check(device).map(|()| bytes)
    }

    /// The name of a device everywhere: what comes before the ordinal is the vendor's.
    pub fn uuid(&self, prefix: &[u8; 13], ordinal: i32) -> Called<[u8; 16]> {
        self.device(ordinal)?;
        let mut uuid = [0; 16];
        uuid[..13].copy_from_slice(prefix);
        uuid[13..].copy_from_slice(format!("{:03}", ordinal % 1000).as_bytes());
        Ok(uuid)
    }

    /// How many devices there are.
    pub fn device_count(&self) -> Called<i32> {
        self.init()?;
        Ok(self.machine.conf.devices.len() as i32)
    }

    /// One device reaches the memory of another.
    pub fn can_access_peer(&self, device: i32, peer: i32) -> Called<bool> {
        self.device(device)?;
        self.device(peer)?;
        Ok(device != peer && self.machine.conf.peers.reach(device as usize, peer as usize))
    }

    /// Bytes of a device that nobody holds, in whatever process.
    pub fn free(&self, ordinal: i32) -> Called<u64> {
        self.device(ordinal)?;
        while self.machine.hangs("memory_info", Some(ordinal as usize)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.machine.free(ordinal as usize)
    }

    /// A device's context: its memory is taken when the first is retained.
    pub fn retain(&self, ordinal: i32) -> Called<u64> {
        self.device(ordinal)?;
        let mut state = self.lock()?;
        let device = ordinal as usize;
        let context = match state.contexts.entry(device) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let bytes = self.machine.conf.context_bytes;
                place.insert((0, if bytes == 0 { None } else { Some(self.machine.create(device, bytes, false)?) }))
            }
        };
        context.0 += 1;
        Ok(device as u64 + 1)
    }

    /// Lets go of it once.
    pub fn let_go(&self, ordinal: i32) -> Called<()> {
        let mut state = self.lock()?;
        let device = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
        let context = state.contexts.get_mut(&device).filter(|context| context.0 > 0).ok_or(code::INVALID_CONTEXT)?;
        context.0 -= 1;
        if context.0 == 0 {
            state.contexts.remove(&device);
        }
        Ok(())
    }

    /// The thread's context or device, plus one; 0 for none.
    pub fn current(&self) -> Called<u64> {
        self.init()?;
        Ok(CURRENT.get())
    }

    /// Chooses it.
    pub fn set_current(&self, current: u64) -> Called<()> {
        self.init()?;
        if current > self.machine.conf.devices.len() as u64 {
            return Err(code::INVALID_CONTEXT);
        }
        CURRENT.set(current);
        Ok(())
    }

    /// For calls on streams and copies: they need a context, and the device that the stream or event was made on, or else the thread's.
    fn with_device(&self, made: Option<u64>) -> Called<(MutexGuard<'_, State>, usize)> {
        let state = self.lock()?;
        let device = made.and_then(|made| state.streams.device_of(made)).unwrap_or(self.current_device());
        self.check(device)?;
        if made.is_none() && self.is_without_context() { Err(code::INVALID_CONTEXT) } else { Ok((state, device)) }
    }

    /// Waits for what is queued on the device.
    pub fn synchronize(&self) -> Called<()> {
        loop {
            let (mut state, device) = self.with_device(None)?;
            state.pump()?;
            if state.streams.is_idle(device) {
                return Ok(());
            }
            drop(state);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// A stream.
    pub fn stream_create(&self) -> Called<u64> {
        let (mut state, device) = self.with_device(None)?;
        Ok(state.streams.create(device))
    }

    /// Ends one.
    pub fn stream_destroy(&self, stream: u64) -> Called<()> {
        self.with_device(Some(stream))?.0.streams.destroy(stream)
    }

    /// Makes a stream busy until the answer is given to [`Process::resume`].
    pub fn stall(&self, device: i32, stream: u64) -> Called<u64> {
        self.device(device)?;
        self.lock()?.streams.stall(device as usize, stream)
    }

    /// What made a stream busy ends, and what waited for it runs.
    pub fn resume(&self, stall: u64) -> Called<()> {
        let mut state = self.lock()?;
        state.streams.resume(stall)?;
        state.pump()
    }

    /// An event.
    pub fn event_create(&self) -> Called<u64> {
        let (mut state, device) = self.with_device(None)?;
        Ok(state.streams.create_event(device))
    }

    /// The event is complete when what is queued now has run.
    pub fn event_record(&self, event: u64, stream: u64) -> Called<()> {
        let (mut state, device) = self.with_device(Some(stream))?;
        state.streams.record(device, event, stream)?;
        state.pump()
    }

    /// The stream waits for the event.
    pub fn stream_wait(&self, stream: u64, event: u64) -> Called<()> {
        let (mut state, device) = self.with_device(Some(stream))?;
        state.streams.wait(device, event, stream)?;
        state.pump()
    }

    /// Whether it is complete.
    pub fn event_query(&self, event: u64) -> Called<()> {
        let (mut state, _) = self.with_device(Some(event))?;
        state.pump()?;
        state.streams.query(event)
    }

    /// Forgets one.
    pub fn event_destroy(&self, event: u64) -> Called<()> {
        self.with_device(Some(event))?.0.streams.destroy_event(event)
    }

    /// Copies from the device, after what can run.
    pub fn copy_to_host(&self, into: &mut [u8], from: u64) -> Called<()> {
        let (mut state, device) = self.with_device(None)?;
        state.pump()?;
        let outcome = state.addresses.read(device, from, into);
        state.used(outcome)
    }

    /// Copies to the device, after what can run.
    pub fn copy_to_device(&self, to: u64, from: &[u8]) -> Called<()> {
        let (mut state, device) = self.with_device(None)?;
        state.pump()?;
        let outcome = state.addresses.write(device, to, from);
        state.used(outcome)
    }

    /// Queues setting bytes.
    pub fn fill(&self, start: u64, value: u8, len: u64, stream: u64) -> Called<()> {
        let (mut state, device) = self.with_device(None)?;
        state.streams.fill(stream, Fill { device, start, len, value })?;
        state.pump()
    }
}
