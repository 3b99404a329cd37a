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
use crate::collectives::Communicators;
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
    calls_by_name: HashMap<String, u64>,
    pub(crate) handles: HashMap<u64, Arc<Chunk>>,
    pub(crate) addresses: Addresses,
    pub(crate) streams: Streams,
    pub(crate) communicators: Communicators,
    /// Memory of each context, by device.
    contexts: HashMap<usize, (u64, Option<OwnedFd>)>,
    /// Bytes of the process that are locked, by their address.
    locked: HashMap<usize, usize>,
    /// A copy or fill went where it must not: nothing works any more.
    is_poisoned: bool,
}

impl State {
    pub(crate) fn next(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Runs queued work as far as it goes.
    pub(crate) fn pump(&mut self) -> Called<()> {
        let State { addresses, streams, is_poisoned, .. } = self;
        streams.pump(|fill| *is_poisoned |= addresses.fill(fill).is_err());
        if *is_poisoned { Err(code::ILLEGAL_ADDRESS) } else { Ok(()) }
    }

    /// What a device does with addresses that may not be used: nothing works any more.
    pub(crate) fn used(&mut self, outcome: Called<()>) -> Called<()> {
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
    /// The machine's devices that the process may see, in its order: their places here are its ordinals.
    visible: Vec<usize>,
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

/// What a vendor's library is to its process.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// What it says its version is where the machine says nothing.
    pub version: i32,
    /// A thread must choose a context; else it has the first device.
    pub has_contexts: bool,
    /// What a device's name everywhere begins with; its number follows.
    pub uuid: &'static [u8; 13],
    /// The variable of the environment that hides and orders devices.
    pub visible_devices: &'static str,
}

/// The process's driver: its machine is the directory of the library that the code at `symbol` is of.
#[expect(clippy::disallowed_methods, reason = "what the vendors' libraries read, as they do it: once, when they begin")]
pub fn driver_beside(symbol: usize, habits: Habits) -> Process {
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
    let machine = Machine::of(&directory.expect("a library lies in a directory"), habits.version);
    let visible = std::env::var_os(habits.visible_devices).map(|list| list.to_string_lossy().into_owned());
    Process::new(machine, habits, visible.as_deref())
}

/// A device's name everywhere.
fn uuid_of(prefix: &[u8; 13], device: usize) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid[..13].copy_from_slice(prefix);
    uuid[13..].copy_from_slice(format!("{:03}", device % 1000).as_bytes());
    uuid
}

/// The devices that a list of ordinals and uuids (`GPU-` or `MIG-`, as much of it as is nobody else's) names, in its order. What names no device, or one that was named
/// before, ends it.
fn named_by(list: &str, prefix: &[u8; 13], count: usize) -> Vec<usize> {
    let mut visible = Vec::new();
    for word in list.split(',').map(str::trim) {
        let device = match word.strip_prefix("GPU-").or(word.strip_prefix("MIG-")) {
            None => word.parse().ok().filter(|device| *device < count),
            Some(digits) => {
                let digits = digits.replace('-', "").to_ascii_lowercase();
                let begins_so = |device: &usize| {
                    uuid_of(prefix, *device).map(|byte| format!("{byte:02x}")).concat().starts_with(&digits)
                };
                let mut found = (0..count).filter(begins_so);
                found.next().filter(|_| found.next().is_none())
            }
        };
        match device.filter(|device| !visible.contains(device)) {
            Some(device) => visible.push(device),
            None => break,
        }
    }
    visible
}

impl Process {
    /// The process that calls, on `machine`, of whose devices it sees those that a list names, or all.
    pub fn new(machine: Machine, habits: Habits, visible: Option<&str>) -> Process {
        let Habits { has_contexts, uuid, .. } = habits;
        let count = machine.device_count();
        let visible = visible.map_or_else(|| (0..count).collect(), |list| named_by(list, uuid, count));
        Process { machine, has_contexts, visible, pid: std::process::id(), state: Mutex::default() }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    pub(crate) fn has_contexts(&self) -> bool {
        self.has_contexts
    }

    pub(crate) fn lock(&self) -> Called<MutexGuard<'_, State>> {
        if std::process::id() != self.pid {
            return Err(code::NOT_INITIALIZED);
        }
        let state = self.state.lock().map_err(|_| code::UNKNOWN)?;
        if state.is_poisoned { Err(code::ILLEGAL_ADDRESS) } else { Ok(state) }
    }

    /// The machine's device that is this one in the process.
    pub(crate) fn seen(&self, ordinal: i32) -> Called<usize> {
        let at = usize::try_from(ordinal).ok();
        at.and_then(|at| self.visible.get(at)).copied().ok_or(code::INVALID_DEVICE)
    }

    /// The process may see this device of the machine.
    pub(crate) fn sees(&self, device: usize) -> bool {
        self.visible.contains(&device)
    }

    /// The device is there.
    pub(crate) fn check(&self, device: usize) -> Called<()> {
        if device >= self.machine.device_count() {
            return Err(code::INVALID_DEVICE);
        }
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
        let of_name = state.calls_by_name.entry(call.to_owned()).or_default();
        *of_name += 1;
        let is_to_fail = self.machine.conf.fail.is_due(call, number, *of_name);
        // Other threads' calls go on meanwhile.
        drop(state);
        while self.machine.hangs(call, device) || number == self.machine.conf.hang_after && !self.machine.is_resumed() {
            std::thread::sleep(LOOK);
        }
        if let Some(device) = device {
            self.check(device)?;
        }
        if is_to_fail { Err(self.machine.conf.fail_code) } else { self.lock() }
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
        let ordinal = CURRENT.get().saturating_sub(1) as usize;
        // Where nothing may be seen: a device that is none.
        self.visible.get(ordinal).copied().unwrap_or(usize::MAX)
    }

    /// The library starts, and looks at every device: it may hang.
    pub fn start(&self) -> Called<()> {
        while self.machine.hangs("init", None) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.init()
    }

    /// Whether calls are taken at all.
    pub fn init(&self) -> Called<()> {
        self.lock().map(drop)
    }

    /// Bytes of each device.
    pub fn device(&self, ordinal: i32) -> Called<u64> {
        self.init()?;
        self.bytes_of(self.seen(ordinal)?)
    }

    /// Bytes of a device of the machine, whether the process sees it or not.
    pub fn bytes_of(&self, device: usize) -> Called<u64> {
        self.init()?;
        self.check(device).map(|()| self.machine.conf.devices[device])
    }

    /// The name of a device everywhere: what comes before its number is the vendor's.
    pub fn uuid(&self, prefix: &[u8; 13], ordinal: i32) -> Called<[u8; 16]> {
        self.init()?;
        let device = self.seen(ordinal)?;
        self.name_of(prefix, if self.machine.conf.one_uuid { 0 } else { device })
    }

    /// The same of a device of the machine, whether the process sees it or not.
    pub fn name_of(&self, prefix: &[u8; 13], device: usize) -> Called<[u8; 16]> {
        self.bytes_of(device).map(|_| uuid_of(prefix, device))
    }

    /// How many devices the process sees.
    pub fn device_count(&self) -> Called<i32> {
        self.init()?;
        Ok(self.visible.len() as i32)
    }

    /// The size of which every chunk of a device is a multiple.
    pub fn granularity(&self, ordinal: i32) -> Called<u64> {
        self.init()?;
        Ok(self.machine.conf.granularity_of(self.seen(ordinal)?))
    }

    /// One device reaches the memory of another.
    pub fn can_access_peer(&self, device: i32, peer: i32) -> Called<bool> {
        self.device(device)?;
        self.device(peer)?;
        let (device, peer) = (self.seen(device)?, self.seen(peer)?);
        Ok(device != peer && self.machine.conf.peers.reach(device, peer))
    }

    /// Bytes of a device that nobody holds, in whatever process.
    pub fn free(&self, ordinal: i32) -> Called<u64> {
        self.free_of(self.seen(ordinal)?)
    }

    /// The same of a device of the machine, whether the process sees it or not.
    pub fn free_of(&self, device: usize) -> Called<u64> {
        self.bytes_of(device)?;
        while self.machine.hangs("memory_info", Some(device)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.machine.free(device)
    }

    /// A device's context: its memory is taken when the first is retained.
    pub fn retain(&self, ordinal: i32) -> Called<u64> {
        self.device(ordinal)?;
        let mut state = self.lock()?;
        let device = self.seen(ordinal)?;
        let context = match state.contexts.entry(device) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let bytes = self.machine.conf.context_bytes;
                place.insert((0, if bytes == 0 { None } else { Some(self.machine.create(device, bytes, false)?) }))
            }
        };
        context.0 += 1;
        Ok(ordinal as u64 + 1)
    }

    /// Lets go of it once.
    pub fn let_go(&self, ordinal: i32) -> Called<()> {
        let mut state = self.lock()?;
        let device = self.seen(ordinal)?;
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
        if current > self.visible.len() as u64 {
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
        let device = self.seen(device)?;
        self.lock()?.streams.stall(device, stream)
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

    /// Memory of the process that is locked where it is; its address.
    pub fn host_alloc(&self, len: usize) -> Called<usize> {
        let (mut state, _) = self.with_device(None)?;
        let locked: u64 = state.locked.values().map(|len| *len as u64).sum();
        if locked.saturating_add(len as u64) > self.machine.conf.locked_bytes {
            return Err(code::OUT_OF_MEMORY);
        }
        // Whoever has had it before has left something in it.
        let bytes: &mut [u8] = Box::leak(vec![0xa5_u8; len].into_boxed_slice());
        let at = bytes.as_mut_ptr().expose_provenance();
        state.locked.insert(at, len);
        Ok(at)
    }

    /// Gives it back.
    pub fn host_free(&self, at: usize) -> Called<()> {
        let (mut state, _) = self.with_device(None)?;
        let len = state.locked.remove(&at).ok_or(code::INVALID_VALUE)?;
        let bytes = std::ptr::slice_from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(at), len);
        // SAFETY: it is what was leaked there, and is taken back once; its caller says that nobody uses it any more.
        drop(unsafe { Box::from_raw(bytes) });
        Ok(())
    }

    /// Queues setting bytes.
    pub fn fill(&self, start: u64, value: u8, len: u64, stream: u64) -> Called<()> {
        let (mut state, device) = self.with_device(None)?;
        state.streams.fill(stream, Fill { device, start, len, value })?;
        state.pump()
    }
}
