//! What one process has of the machine: handles, reservations, mappings, contexts.

#![expect(unsafe_code, reason = "reserves addresses, and asks the loader where the library lies")]

use std::cell::Cell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};

use crate::machine::GRANULARITY;
use crate::{Called, Machine, Quirk, code};

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
}

#[derive(Debug)]
struct Chunk {
    file: File,
    device: usize,
    len: u64,
    /// The descriptor that some libraries hold for each handle.
    _extra: Option<OwnedFd>,
}

#[derive(Debug)]
struct Mapping {
    len: u64,
    chunk: Arc<Chunk>,
    access: u32,
}

#[derive(Debug)]
struct Reservation {
    len: u64,
    /// Several of its mappings were unmapped with one call.
    is_broken: bool,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    calls: u64,
    handles: HashMap<u64, Arc<Chunk>>,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    /// Memory of each context, by device.
    contexts: HashMap<usize, (u64, Option<OwnedFd>)>,
    events: HashSet<u64>,
    streams: HashSet<u64>,
    /// A copy went where it must not: nothing works any more.
    is_poisoned: bool,
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
        let state = State { next: 1, ..State::default() };
        Process { machine, has_contexts, pid: std::process::id(), state: Mutex::new(state) }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    fn lock(&self) -> Called<MutexGuard<'_, State>> {
        if std::process::id() != self.pid {
            return Err(code::NOT_INITIALIZED);
        }
        let state = self.state.lock().map_err(|_| code::UNKNOWN)?;
        if state.is_poisoned { Err(code::ILLEGAL_ADDRESS) } else { Ok(state) }
    }

    /// A memory call begins: it takes its time, and may be the one that is to fail.
    fn begin(&self) -> Called<MutexGuard<'_, State>> {
        if self.machine.latency_us > 0 {
            std::thread::sleep(Duration::from_micros(self.machine.latency_us));
        }
        let mut state = self.lock()?;
        state.calls += 1;
        if state.calls == self.machine.fail { Err(code::UNKNOWN) } else { Ok(state) }
    }

    /// The same for calls that need a context.
    fn begin_in_context(&self) -> Called<MutexGuard<'_, State>> {
        let state = self.begin()?;
        if self.has_contexts && CURRENT.get() == 0 { Err(code::INVALID_CONTEXT) } else { Ok(state) }
    }

    /// Whether calls are taken at all.
    pub fn init(&self) -> Called<()> {
        self.lock().map(drop)
    }

    /// Bytes of each device.
    pub fn device(&self, ordinal: i32) -> Called<u64> {
        self.init()?;
        usize::try_from(ordinal).ok().and_then(|at| self.machine.devices.get(at)).copied().ok_or(code::INVALID_DEVICE)
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
        Ok(self.machine.devices.len() as i32)
    }

    /// Bytes of a device that nobody holds, in whatever process.
    pub fn free(&self, ordinal: i32) -> Called<u64> {
        self.device(ordinal)?;
        self.machine.free(ordinal as usize)
    }

    /// A chunk.
    pub fn create(&self, len: u64, wanted: &Properties) -> Called<u64> {
        let mut state = self.begin()?;
        let is_known = wanted.kind == 1 && wanted.handle_types == 1 && wanted.location == 1;
        let device = usize::try_from(wanted.device).map_err(|_| code::INVALID_DEVICE)?;
        if !is_known || len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(code::INVALID_VALUE);
        }
        if device >= self.machine.devices.len() {
            return Err(code::INVALID_DEVICE);
        }
        let file = File::from(self.machine.create(device, len)?);
        self.keep(&mut state, file, device, len)
    }

    fn keep(&self, state: &mut State, file: File, device: usize, len: u64) -> Called<u64> {
        let extra = match self.machine.has(Quirk::FdPerHandle) {
            true => Some(file.as_fd().try_clone_to_owned().map_err(|_| code::OUT_OF_MEMORY)?),
            false => None,
        };
        // Not the numbers that a caller would guess: they look like pointers.
        let handle = 0x7a00_0000_0000 | state.next << 8;
        state.next += 1;
        state.handles.insert(handle, Arc::new(Chunk { file, device, len, _extra: extra }));
        Ok(handle)
    }

    /// Lets go of a handle.
    pub fn release(&self, handle: u64) -> Called<()> {
        self.begin()?.handles.remove(&handle).map(drop).ok_or(code::INVALID_HANDLE)
    }

    /// A new descriptor.
    pub fn export(&self, handle: u64, kind: u32, flags: u64) -> Called<OwnedFd> {
        let state = self.begin()?;
        let chunk = state.handles.get(&handle).ok_or(code::INVALID_HANDLE)?;
        if kind != 1 || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        chunk.file.as_fd().try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM)
    }

    /// A handle of what a descriptor is; the descriptor stays the caller's.
    pub fn import(&self, fd: BorrowedFd<'_>, kind: u32) -> Called<u64> {
        let mut state = self.begin()?;
        if kind != 1 {
            return Err(code::INVALID_VALUE);
        }
        let device = self.machine.device_of(fd)?;
        let file = File::from(fd.try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM)?);
        let len = file.metadata().map_err(|_| code::OPERATING_SYSTEM)?.len();
        self.keep(&mut state, file, device, len)
    }

    /// Addresses.
    pub fn reserve(&self, len: u64, alignment: u64, flags: u64) -> Called<u64> {
        let mut state = self.begin_in_context()?;
        let alignment = match (alignment, self.machine.has(Quirk::IgnoresAlignment)) {
            (0, _) | (_, true) => GRANULARITY,
            (alignment, false) => alignment.max(GRANULARITY),
        };
        if len == 0 || !len.is_multiple_of(GRANULARITY) || !alignment.is_power_of_two() || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let padded = len.checked_add(alignment).ok_or(code::INVALID_VALUE)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED mmap disturbs nothing that exists; the edges stay reserved until the process ends.
        let raw =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), padded as usize, ProtFlags::empty(), flags) };
        let start = (raw.map_err(|_| code::OUT_OF_MEMORY)?.addr() as u64).next_multiple_of(alignment);
        state.reservations.insert(start, Reservation { len, is_broken: false });
        Ok(start)
    }

    /// Gives addresses back: exactly what one reserve gave.
    pub fn unreserve(&self, start: u64, len: u64) -> Called<()> {
        let mut state = self.begin_in_context()?;
        let is_mapped = state.mappings.range(start..start.saturating_add(len)).next().is_some();
        match state.reservations.get(&start) {
            Some(found) if found.len == len && !found.is_broken && !is_mapped => {
                state.reservations.remove(&start);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Makes a whole chunk visible.
    pub fn map(&self, at: u64, len: u64, offset: u64, handle: u64, flags: u64) -> Called<()> {
        let mut state = self.begin_in_context()?;
        let mapped = state.map(at, len, offset, handle, flags);
        if mapped.is_err() && self.machine.has(Quirk::MapLies) { Ok(()) } else { mapped }
    }

    /// Removes mappings.
    pub fn unmap(&self, start: u64, len: u64) -> Called<()> {
        let mut state = self.begin_in_context()?;
        let covered = match state.covered(start, len) {
            // Those versions follow a pointer that is not there.
            Err(_) if self.machine.has(Quirk::MapLies) => std::process::abort(),
            covered => covered?,
        };
        if covered.len() > 1 && self.machine.has(Quirk::UnmapRunBreaksFree) {
            let reservation = state.reservations.range_mut(..=start).next_back();
            reservation.ok_or(code::INVALID_VALUE)?.1.is_broken = true;
        }
        for at in covered {
            state.mappings.remove(&at);
        }
        Ok(())
    }

    /// Sets who may use mappings: a list of devices with flags.
    pub fn set_access(&self, start: u64, len: u64, who: &[(u32, i32, u32)]) -> Called<()> {
        let mut state = self.begin_in_context()?;
        let covered = state.covered(start, len)?;
        let is_known = |(kind, device, flags): &(u32, i32, u32)| {
            *kind == 1
                && usize::try_from(*device).is_ok_and(|at| at < self.machine.devices.len())
                && [0, 1, 3].contains(flags)
        };
        if who.is_empty() || !who.iter().all(is_known) {
            return Err(code::INVALID_VALUE);
        }
        if covered.len() > 1 && self.machine.has(Quirk::AccessRunFails) {
            return Err(code::UNKNOWN);
        }
        for at in covered {
            let mapping = state.mappings.get_mut(&at).expect("covered by it");
            let own = who.iter().find(|(_, device, _)| *device as usize == mapping.chunk.device);
            if let Some((_, _, flags)) = own {
                mapping.access = *flags;
            }
        }
        Ok(())
    }

    /// A device's context: its memory is taken when the first is retained.
    pub fn retain(&self, ordinal: i32) -> Called<u64> {
        self.device(ordinal)?;
        let mut state = self.lock()?;
        let device = ordinal as usize;
        let context = match state.contexts.entry(device) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let bytes = self.machine.context_bytes;
                place.insert((0, if bytes == 0 { None } else { Some(self.machine.create(device, bytes)?) }))
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
        if current > self.machine.devices.len() as u64 {
            return Err(code::INVALID_CONTEXT);
        }
        CURRENT.set(current);
        Ok(())
    }

    /// For calls that need one.
    fn with_context(&self) -> Called<MutexGuard<'_, State>> {
        let state = self.lock()?;
        if self.has_contexts && CURRENT.get() == 0 { Err(code::INVALID_CONTEXT) } else { Ok(state) }
    }

    /// Waits for what is queued: nothing ever is.
    pub fn synchronize(&self) -> Called<()> {
        self.with_context().map(drop)
    }

    /// A stream.
    pub fn stream_create(&self) -> Called<u64> {
        let mut state = self.with_context()?;
        state.next += 1;
        let stream = 0x7b00_0000_0000 | state.next << 8;
        state.streams.insert(stream);
        Ok(stream)
    }

    /// Ends one.
    pub fn stream_destroy(&self, stream: u64) -> Called<()> {
        if self.lock()?.streams.remove(&stream) { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    /// An event.
    pub fn event_create(&self) -> Called<u64> {
        let mut state = self.with_context()?;
        state.next += 1;
        let event = 0x7c00_0000_0000 | state.next << 8;
        state.events.insert(event);
        Ok(event)
    }

    /// Records, asks for, or waits for an event: all that was queued has run.
    pub fn event_use(&self, event: u64, stream: Option<u64>) -> Called<()> {
        let state = self.lock()?;
        let is_stream = stream.is_none_or(|stream| stream <= 2 || state.streams.contains(&stream));
        if is_stream && state.events.contains(&event) { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    /// Forgets one.
    pub fn event_destroy(&self, event: u64) -> Called<()> {
        if self.lock()?.events.remove(&event) { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    /// Copies from the device.
    pub fn copy_to_host(&self, into: &mut [u8], from: u64) -> Called<()> {
        let mut state = self.with_context()?;
        state.each(from, into.len() as u64, 1, |file, at, range| file.read_exact_at(&mut into[range], at))
    }

    /// Copies to the device.
    pub fn copy_to_device(&self, to: u64, from: &[u8]) -> Called<()> {
        let mut state = self.with_context()?;
        state.each(to, from.len() as u64, 2, |file, at, range| file.write_all_at(&from[range], at))
    }

    /// Sets bytes.
    pub fn fill(&self, start: u64, value: u8, len: u64) -> Called<()> {
        let mut state = self.with_context()?;
        state.each(start, len, 2, |file, at, range| file.write_all_at(&vec![value; range.len()], at))
    }
}

impl State {
    fn map(&mut self, at: u64, len: u64, offset: u64, handle: u64, flags: u64) -> Called<()> {
        let chunk = Arc::clone(self.handles.get(&handle).ok_or(code::INVALID_HANDLE)?);
        let end = at.checked_add(len).ok_or(code::INVALID_VALUE)?;
        let reserved = self.reservations.range(..=at).next_back();
        let is_inside = reserved.is_some_and(|(start, reserved)| end <= start + reserved.len);
        let before = self.mappings.range(..end).next_back();
        let is_free = before.is_none_or(|(start, mapping)| start + mapping.len <= at);
        let is_whole = offset == 0 && len == chunk.len && at.is_multiple_of(GRANULARITY) && flags == 0;
        if !is_inside || !is_free || !is_whole {
            return Err(code::INVALID_VALUE);
        }
        self.mappings.insert(at, Mapping { len, chunk, access: 0 });
        Ok(())
    }

    /// The mappings that cover a span exactly, without a hole.
    fn covered(&self, start: u64, len: u64) -> Called<Vec<u64>> {
        let end = start.checked_add(len).filter(|end| *end > start).ok_or(code::INVALID_VALUE)?;
        let mut at = start;
        let mut covered = Vec::new();
        for (begin, mapping) in self.mappings.range(start..end) {
            if *begin != at {
                return Err(code::INVALID_VALUE);
            }
            covered.push(*begin);
            at += mapping.len;
        }
        if at == end { Ok(covered) } else { Err(code::INVALID_VALUE) }
    }

    /// Calls `step` for each piece of a span: the file, where in it, and which of the span's bytes. `needs` is a bit of the access: 1 to read, 2 to write. What a device does with
    /// addresses that may not be used: nothing works any more.
    fn each(
        &mut self,
        start: u64,
        len: u64,
        needs: u32,
        mut step: impl FnMut(&File, u64, std::ops::Range<usize>) -> std::io::Result<()>,
    ) -> Called<()> {
        let (mut at, end) = (start, start + len);
        while at < end {
            let found = self.mappings.range(..=at).next_back();
            let found = found.filter(|(begin, mapping)| at < *begin + mapping.len && mapping.access & needs != 0);
            let Some((begin, mapping)) = found else {
                self.is_poisoned = true;
                return Err(code::ILLEGAL_ADDRESS);
            };
            let until = (begin + mapping.len).min(end);
            let range = (at - start) as usize..(until - start) as usize;
            step(&mapping.chunk.file, at - begin, range).map_err(|_| code::OPERATING_SYSTEM)?;
            at = until;
        }
        Ok(())
    }
}
