//! The drivers for real GPUs: one implementation over CUDA's and HIP's virtual memory calls ([`table`]), with what the two do differently as data
//! ([`Vendor`]: [`cuda`], [`hip`]).
//!
//! Not for: policy, and not for emulation: what the books do not allow is never asked of the library, for some libraries crash or lie when it is.
//!
//! ## Who makes a context
//!
//! Creating, releasing, exporting and importing chunks need none, so a daemon takes no memory of the device for itself. Everything that has to do with addresses, streams and
//! copies needs the process's primary context (without one, hooks around the driver have crashed), which a training process has anyway; it is retained when the first of them is called.
//!
//! ## Who vouches for streams
//!
//! A stream's number is the library's own handle, which it follows without looking. Those that this driver made are known; others are the training framework's, and whoever passes one in
//! at the C border vouches that it lives. An all-reduce takes only those that were made here.
//!
//! ## Who waits for whom
//!
//! A library's call may hang. What holds chunks (create, release, export, import: all that a daemon does) waits for its turn on the device that it is for, and for no other; how much memory is
//! free waits for nobody. What has to do with addresses waits for one lock of all: the books and the library must agree before the next call.
//!
//! ## Rules that the libraries have, and where they are kept
//!
//! * A chunk is mapped whole from its first byte, where nothing is mapped, inside one reservation: `super::books`, before the library is asked. The offset into a chunk is always zero,
//!   so chunks are never cut, and a mapping is never unmapped in part.
//! * A mapping has no access until it is set, for each device that reaches the memory; after it was mapped again it has none again. One call sets a whole run: [`Driver::set_access`].
//! * Unmapping and releasing do not reliably wait for queued work: the caller synchronizes first ([`crate::memory`]).
//! * Every export is a new descriptor, and importing leaves it open: an import closes it here. Exports are finite on a machine: whoever has one keeps it and copies it.
//! * NVIDIA's drivers up to 525 are slow with chunks that can be passed as descriptors (PyTorch issue 130890): all of these can, so on those every call is dear, and `stitchd selftest --costs` shows it.
//! * Exports and imports wait for each other, on all devices of a machine: NVIDIA's kernel module does one at a time. A chunk is exported once; imports take fewer, larger chunks rather than more threads.
//! * Another process's descriptor can be taken by its number (`pidfd_getfd`) only with the right to trace that process, which containers do not give each other: descriptors come over sockets.
//! * On Volta kernels have faulted when anything was remapped while they ran, at whatever addresses (kvcached issue 465). There what runs is waited for before memory is mapped, too
//!   ([`crate::driver::Capabilities::maps_when_quiet`]); what other threads of the process queue meanwhile nobody can hold back.
//! * Importing is not owning: each import is released by itself, and its handle is another number.
//! * A copy from addresses that are not mapped breaks a process's context for good: the books are asked first.
//! * A forked child is refused everything with "not initialized": it must become another program first.
//! * Devices go by uuid between processes; ordinals depend on what each process may see. Of a part of a GPU (MIG) the uuid is the part's; memory is not passed between parts.
//! * A handle is never asked for by address, and addresses are never asked for their segment: some versions give a handle back without counting it.
//! * When a device is gone each call says so in its own way: [`answer`] tells which, and [`Cause::Lost`] is one word for all.
//!
//! What HIP does differently is in [`hip`], as data: an import takes the descriptor's number or a pointer to it and is for the thread's *current* device; one call unmaps, or sets the
//! access of, one mapping; memory that was mapped returns only with the addresses where it was; a map may lie; the alignment of a reservation may be ignored; out of memory may mean out of descriptors. Known and not to be worked around here: [`hip`], above its table.
//!
//! Asked for and not used yet: FABRIC handles, where the device has them and the library lets this process; one refusal ends that ([`Gpu::gives_up_fabric`]). A chunk gets its kinds of handles when it is made, or never.
//!
//! Not used: multicast, compressible memory, chunks in the host's memory, dma-buf export (the range's chunks are told to who asks:
//! [`Driver::native_handle`]).

mod answer;
mod collectives;
mod cuda;
mod device;
mod hip;
mod locked;
mod misuse;
mod nvml;
mod open;
pub mod table;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use super::books::{Books, ChunkKey};
use super::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
    HostMemory, Rank, check_alignment, usable,
};
use crate::ids::{DeviceId, DeviceUuid, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};
pub(super) use answer::kind_of;
use answer::{Loss, is_surely_of_a_peer, loss, may_be_of_a_peer, meaning, too_many_files};
use collectives::Collectives;
use device::Gpu;
use locked::Locked;
use nvml::Nvml;
pub use open::OpenError;
use table::{AccessDescription, Called, Code, Location, Names, Table, code};

/// No library names a limit of mappings; what it takes for each is its own.
const MAPPINGS_MAX: u64 = u64::MAX;

/// Calls that have no one name.
const RETAIN: &str = "cuDevicePrimaryCtxRetain";
const CHOOSE: &str = "choosing the device";

/// What one vendor's library is called, and what it does in its own way.
#[derive(Debug)]
struct Vendor {
    name: &'static str,
    /// File names, the first to be tried first.
    libraries: &'static [&'static str],
    /// What to do where the library is missing.
    remedy: &'static str,
    names: Names,
    /// The attribute that says whether the device has virtual memory calls.
    vmm_attribute: i32,
    /// The attribute that says whether chunks can be passed as descriptors.
    fd_attribute: Option<i32>,
    /// The attribute that says whether network cards can read chunks that ask for it.
    rdma_attribute: Option<i32>,
    /// The attribute that says whether chunks can be passed to other nodes.
    fabric_attribute: Option<i32>,
    /// The attribute that says whether the device is shared through MPS.
    mps_attribute: Option<i32>,
    /// The attributes that say of which generation the device is, where some generations are to be treated apart.
    generation_attributes: Option<[i32; 2]>,
    /// The oldest version that works.
    version_min: i32,
    /// The first version whose import takes a descriptor's number; those before take a pointer to it. The wrong one crashes.
    imports_by_number_from: i32,
    /// One call may unmap, or set the access of, several mappings.
    takes_runs: bool,
    /// A map that fails may say that it is done.
    map_may_lie: bool,
    /// Memory that was mapped returns with the addresses where it was, and not before.
    memory_stays_with_addresses: bool,
    /// Descriptors that the library holds for each chunk.
    fds_per_chunk: u64,
    /// Exports that can be open on the machine, where that is known; what is said then is that memory has run out.
    exports_max: Option<u64>,
    /// The library that says how much memory is free, where the driver itself cannot without a context.
    nvml: Option<&'static str>,
    /// The library for collectives.
    collectives: &'static str,
}

/// Which library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuKind {
    /// NVIDIA's.
    Cuda,
    /// AMD's.
    Hip,
}

impl GpuKind {
    fn vendor(self) -> &'static Vendor {
        match self {
            GpuKind::Cuda => &cuda::CUDA,
            GpuKind::Hip => &hip::HIP,
        }
    }
}

/// A driver over one vendor's library.
#[derive(Debug)]
pub struct GpuDriver {
    vendor: &'static Vendor,
    table: Arc<Table>,
    nvml: Option<Nvml>,
    /// Where the library for collectives is.
    collectives: String,
    /// As the library writes it: 12090 for CUDA 12.9, 70100000 for HIP 7.1.
    version: i32,
    /// By the library's ordinals, without those that cannot be used.
    devices: BTreeMap<DeviceId, Gpu>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    books: Books,
    handles: HashMap<Handle, Native>,
    homes: BTreeMap<DeviceAddress, Home>,
    /// Chunks that were created here and exist for anything of this process.
    created: HashMap<ChunkKey, (DeviceId, Bytes)>,
    streams: HashMap<StreamId, DeviceId>,
    events: HashMap<EventId, DeviceId>,
    /// Retained primary contexts, by device.
    contexts: HashMap<DeviceId, u64>,
}

/// A handle as the library knows it.
#[derive(Clone, Copy, Debug)]
struct Native {
    number: u64,
    device: DeviceId,
}

/// A reservation, by its first address.
#[derive(Clone, Copy, Debug)]
struct Home {
    /// Whose memory it is for.
    device: DeviceId,
    /// What the library gave: more than was asked for where it ignored the alignment.
    raw: AddressSpan,
}

impl State {
    /// The device of the reservation that `span` lies in.
    fn home_of(&self, span: AddressSpan) -> Result<DeviceId, Cause> {
        let home = self.homes.range(..=span.start()).next_back();
        home.map(|(_, home)| home.device).ok_or(Cause::NotReserved(span))
    }

    /// The library's handle of what is mapped there, if there is one still, and its access.
    fn mapped_as(&self, part: AddressSpan) -> (Option<u64>, Access) {
        let (handle, access) = self.books.mapped_as(part);
        (handle.and_then(|handle| self.handles.get(&handle)).map(|native| native.number), access)
    }

    /// The span from the first address of the reservation to the end of `span`, if what is mapped before `span` leaves no hole and may have this access, too: it has it, or none has been
    /// set. The books hold to none for as long as they say so.
    fn span_from_first(&self, span: AddressSpan, access: Access) -> Option<AddressSpan> {
        let (start, _) = self.homes.range(..=span.start()).next_back()?;
        let until = |end: DeviceAddress| Span::new(*start, Bytes::new(end.get() - start.get()));
        let mapped = self.books.check_covered(until(span.start())?).ok()?;
        let may_have = |part: &AddressSpan| [access, Access::None].contains(&self.books.mapped_as(*part).1);
        if mapped.iter().all(may_have) { until(span.end()) } else { None }
    }

    /// Chunks that nothing of this process refers to any more.
    fn forget(&mut self, gone: &[ChunkKey]) {
        for chunk in gone {
            self.created.remove(chunk);
        }
    }

    /// A handle, as the library knows it.
    fn native(&self, handle: Handle) -> Result<Native, Cause> {
        self.handles.get(&handle).copied().ok_or(Cause::UnknownHandle(handle))
    }

    /// The device on which an event was made.
    fn event(&self, event: EventId) -> Result<DeviceId, Cause> {
        self.events.get(&event).copied().ok_or(Cause::UnknownEvent(event))
    }
}

impl GpuDriver {
    /// Chunks, mappings and reservations that this process still has.
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.lock();
        (state.books.chunk_count(), state.books.mapping_count(), state.books.reservation_count())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no step of this driver panics while it holds the lock")
    }

    fn gpu(&self, device: DeviceId) -> Result<&Gpu, Cause> {
        let count = self.devices.len();
        self.devices.get(&device).ok_or(Cause::NoDevice { device, count })
    }

    /// What the library answered to `function` about the device, as a cause. Where an answer may mean that the device is gone, and the management library can tell, that is asked.
    fn answered(&self, device: DeviceId, function: &'static str) -> impl Fn(Code) -> Cause {
        let begins_with_device = [self.vendor.names.create, RETAIN, CHOOSE].contains(&function);
        move |code| {
            let told = match loss(code, begins_with_device) {
                Loss::Sure(reason) => Some(Cause::Lost { device, reason }),
                Loss::Likely => self.nvml.as_ref().and_then(|nvml| nvml.loss(device)),
                Loss::No => None,
            };
            told.unwrap_or(Cause::Library { function, code, meaning: meaning(code) })
        }
    }

    /// The context, or device, that makes a thread's calls be for this device.
    fn context(&self, state: &mut State, device: DeviceId) -> Result<u64, Cause> {
        if let Some(context) = state.contexts.get(&device) {
            return Ok(*context);
        }
        let native = self.gpu(device)?.native;
        let retained = self.table.retain(native).map_err(self.answered(device, RETAIN))?;
        let context = retained.unwrap_or(native as u64);
        state.contexts.insert(device, context);
        Ok(context)
    }

    /// Does something that needs the device to be the thread's current one; afterwards the thread's own is again.
    fn on<T>(
        &self,
        state: &mut State,
        device: DeviceId,
        function: &'static str,
        step: impl FnOnce(&Table) -> Called<T>,
    ) -> Result<T, Cause> {
        let current = self.context(state, device)?;
        self.as_current(device, current, function, step)
    }

    /// The same for calls that need no context: none is made for them, and where there are none they are for the thread's current device.
    fn for_memory<T>(
        &self,
        device: DeviceId,
        function: &'static str,
        step: impl FnOnce(&Table) -> Called<T>,
    ) -> Result<T, Cause> {
        if self.table.has_contexts() {
            return step(&self.table).map_err(self.answered(device, function));
        }
        self.as_current(device, self.gpu(device)?.native as u64, function, step)
    }

    fn as_current<T>(
        &self,
        device: DeviceId,
        current: u64,
        function: &'static str,
        step: impl FnOnce(&Table) -> Called<T>,
    ) -> Result<T, Cause> {
        let before = self.table.current().map_err(self.answered(device, "asking for the current device"))?;
        let is_other = before != current;
        if is_other {
            self.table.set_current(current).map_err(self.answered(device, CHOOSE))?;
        }
        let outcome = step(&self.table).map_err(self.answered(device, function));
        if is_other && let Err(code) = self.table.set_current(before) {
            // What was done is done; whoever uses the thread chooses its own device anyway.
            tracing::warn!(code, "a thread cannot go back to its own device");
        }
        outcome
    }

    /// The spans that one call each is made for, with their mappings: all at once, or mapping by mapping.
    fn calls_over<'a>(&self, span: AddressSpan, mapped: &'a [AddressSpan]) -> Vec<(AddressSpan, &'a [AddressSpan])> {
        if self.vendor.takes_runs { vec![(span, mapped)] } else { mapped.chunks(1).map(|one| (one[0], one)).collect() }
    }

    fn unreserve_raw(&self, state: &mut State, device: DeviceId, raw: AddressSpan) -> Result<(), Cause> {
        let function = self.vendor.names.unreserve;
        self.on(state, device, function, |table| table.unreserve(raw.start().get(), len_of(raw)))
    }

    /// One map, of a whole chunk. Where a map that failed may say that it is done, that access can be set is what tells, and the books
    /// hold to none until somebody asks for some; a mapping that is not there is never unmapped, for that crashes some versions.
    fn map_native(&self, state: &mut State, device: DeviceId, span: AddressSpan, native: u64) -> Result<(), Cause> {
        let names = &self.vendor.names;
        let mapped = self.on(state, device, names.map, |table| table.map(span.start().get(), len_of(span), native));
        mapped.map_err(|cause| match cause {
            // The chunk has its memory: what has run out is what the library, or the kernel, has for each mapping.
            Cause::Library { code: code::OUT_OF_MEMORY, .. } => Cause::TooMany {
                what: "mappings of this process",
                limit: state.books.mapping_count() as u64,
                remedy: "use larger chunks",
            },
            cause => cause,
        })?;
        if self.vendor.map_may_lie {
            self.set_access_native(state, device, span, Access::ReadWrite)?;
        }
        Ok(())
    }

    fn unmap_native(&self, state: &mut State, device: DeviceId, span: AddressSpan) -> Result<(), Cause> {
        self.on(state, device, self.vendor.names.unmap, |table| table.unmap(span.start().get(), len_of(span)))
    }

    fn set_access_native(
        &self,
        state: &mut State,
        device: DeviceId,
        span: AddressSpan,
        access: Access,
    ) -> Result<(), Cause> {
        let flags = match access {
            Access::None => table::ACCESS_NONE,
            Access::Read => table::ACCESS_READ,
            Access::ReadWrite => table::ACCESS_READ_WRITE,
        };
        let gpu = self.gpu(device)?;
        let function = self.vendor.names.set_access;
        let refused = |code| self.answered(device, function)(code);
        let set = |state: &mut State, ids: &[i32]| {
            let location = |id: &i32| Location { kind: table::LOCATION_DEVICE, id: *id };
            let who: Vec<_> = ids.iter().map(|id| AccessDescription { location: location(id), flags }).collect();
            self.set_access_of(state, device, span, access, &who)
        };
        // One call for all that reach the memory, as long as each of them is there.
        let peers = gpu.peers();
        let mut reached = [&[gpu.native][..], &peers].concat();
        match set(state, &reached)? {
            Ok(()) => return Ok(()),
            Err(code) if peers.is_empty() || !may_be_of_a_peer(code) => return Err(refused(code)),
            Err(_) => {}
        }
        // One of them may be gone, and must not stop the others. If it is the device itself, this says so.
        reached.truncate(1);
        set(state, &reached)?.map_err(refused)?;
        for peer in peers {
            reached.push(peer);
            let Err(code) = set(state, &reached)? else { continue };
            reached.pop();
            if !may_be_of_a_peer(code) {
                return Err(refused(code));
            }
            if self.is_peer_gone(peer, code) && gpu.forget_peer(peer) {
                let reason = meaning(code);
                tracing::warn!(%device, peer, code, reason, "a device that reached this one's memory is gone, or reaches it no longer: it gets no access to it from now on");
            }
        }
        Ok(())
    }

    /// Whether an answer about this peer is for good: it says so, or the management library does.
    fn is_peer_gone(&self, native: i32, code: Code) -> bool {
        let peer = self.devices.iter().find(|(_, gpu)| gpu.native == native);
        let is_lost = |nvml: &Nvml| peer.is_some_and(|(id, _)| nvml.loss(*id).is_some());
        is_surely_of_a_peer(code) || self.nvml.as_ref().is_some_and(is_lost)
    }

    /// What the library says to setting the access of these. An error is one of the device, or of its context.
    fn set_access_of(
        &self,
        state: &mut State,
        device: DeviceId,
        span: AddressSpan,
        access: Access,
        who: &[AccessDescription],
    ) -> Result<Called<()>, Cause> {
        let mut set = |span: AddressSpan| {
            let call = |table: &Table| Ok(table.set_access(span.start().get(), len_of(span), who));
            self.on(state, device, self.vendor.names.set_access, call)
        };
        let first = set(span)?;
        if first.is_ok() || self.vendor.takes_runs {
            return Ok(first);
        }
        // HIP's fails for some ranges in some runs, and not the second time (ROCm issues 2516, 2667).
        let second = set(span)?;
        if second.is_ok() {
            return Ok(second);
        }
        // In others it adds up sizes from the first mapping of the reservation, so that where these differ only a span that begins there has a sum that fits.
        match state.span_from_first(span, access) {
            Some(from_first) => {
                let call = |table: &Table| Ok(table.set_access(from_first.start().get(), len_of(from_first), who));
                self.on(state, device, self.vendor.names.set_access, call)
            }
            None => Ok(second),
        }
    }

    /// Maps parts again that were unmapped before another could not be, so that a failed unmap has changed nothing. Those for which not even that works are gone from the books, too.
    fn remap(&self, state: &mut State, device: DeviceId, parts: impl Iterator<Item = AddressSpan>) {
        for part in parts {
            let (native, access) = state.mapped_as(part);
            let mapped = native.ok_or(Cause::NotMapped(part)).and_then(|native| {
                self.map_native(state, device, part, native)?;
                self.set_access_native(state, device, part, access)
            });
            if let Err(error) = mapped {
                tracing::error!(span = %part, %error, "a mapping was lost while another could not be undone");
                let gone = state.books.unmap(&[part]);
                state.forget(&gone);
            }
        }
    }

    /// Waits for what is queued on the device of these addresses, which may be used. Not under the lock: it takes as long as kernels do.
    /// Says which device that is; none for no bytes, which may lie anywhere.
    fn settle(&self, at: DeviceAddress, len: usize, writes: bool) -> Result<Option<DeviceId>, Cause> {
        let (device, context) = {
            let mut state = self.lock();
            let span = usable(&state.books, at, len, writes)?;
            if span.is_empty() {
                return Ok(None);
            }
            let device = state.home_of(span)?;
            (device, self.context(&mut state, device)?)
        };
        self.as_current(device, context, self.vendor.names.synchronize, Table::synchronize)?;
        Ok(Some(device))
    }

    /// A rank's device is there and its stream was made here for it, and so many bytes may be read where it gives and written where it gets.
    fn check_rank(&self, state: &State, rank: &Rank, len: Bytes) -> Result<(), Cause> {
        let Rank { device, stream, from, to } = *rank;
        self.gpu(device)?;
        if state.streams.get(&stream) != Some(&device) {
            return Err(Cause::UnknownStream(stream));
        }
        let len = len.get() as usize;
        usable(&state.books, from, len, false)?;
        usable(&state.books, to, len, true).map(drop)
    }

    /// What a create that ran out of something ran out of.
    fn exhausted(&self, device: DeviceId, requested: Bytes) -> Cause {
        let memory = match self.told_memory(device) {
            Ok(Some(memory)) => memory,
            Err(cause @ Cause::Lost { .. }) => return cause,
            Ok(None) | Err(_) => match self.known_memory(device) {
                Ok(memory) => memory,
                Err(cause) => return cause,
            },
        };
        if memory.free >= requested
            && let Some(cause) = too_many_files()
        {
            return cause;
        }
        Cause::Exhausted { device, requested, available: memory.free, total: memory.total }
    }

    /// What the library, or the one that manages its devices, says. Without a lock: that a call hangs must not keep anybody from asking.
    fn told_memory(&self, device: DeviceId) -> Result<Option<DeviceMemory>, Cause> {
        let total = self.gpu(device)?.description.total;
        let free = match &self.nvml {
            Some(nvml) => nvml.free(device)?,
            None => {
                let function = self.vendor.names.memory_info.unwrap_or("asking for free memory");
                self.for_memory(device, function, Table::free_bytes)?.map(|free| free as u64)
            }
        };
        Ok(free.map(|free| DeviceMemory { total, free: Bytes::new(free).min(total), is_live: true }))
    }

    /// Where nobody tells, all that is known is what this process has taken.
    fn known_memory(&self, device: DeviceId) -> Result<DeviceMemory, Cause> {
        let total = self.gpu(device)?.description.total;
        let state = self.lock();
        let created: Bytes = state.created.values().filter(|(on, _)| *on == device).map(|(_, len)| *len).sum();
        Ok(DeviceMemory { total, free: total.saturating_sub(created), is_live: false })
    }
}

impl Driver for GpuDriver {
    fn name(&self) -> &'static str {
        self.vendor.name
    }

    fn version(&self) -> Option<String> {
        Some(self.version.to_string())
    }

    fn nodes(&self) -> Vec<std::path::PathBuf> {
        const PREFIXES: [&str; 3] = ["/dev/nvidia", "/dev/kfd", "/dev/dri/"];
        let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
        let path = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.ok()?.path()).ok();
        let is_node = |path: &std::path::PathBuf| {
            path.to_str().is_some_and(|text| PREFIXES.iter().any(|prefix| text.starts_with(prefix)))
        };
        let nodes: std::collections::BTreeSet<_> = open.filter_map(path).filter(is_node).collect();
        nodes.into_iter().collect()
    }

    fn devices(&self) -> Vec<DeviceDescription> {
        self.devices.values().map(|gpu| gpu.description.clone()).collect()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError> {
        let gpu = self.gpu(device).map_err(|cause| DriverError::new(Call::Query, cause))?;
        Ok(Capabilities {
            granularity: gpu.granularity,
            alias: true,
            contents: true,
            // Not promised anywhere: to be shown on hardware before it is relied on.
            clears_memory: false,
            // Whoever imports a chunk chooses its access.
            enforces_read_only: false,
            // A descriptor does not say how large its chunk is.
            checks_imports: false,
            fds_per_chunk: self.vendor.fds_per_chunk,
            mappings_max: MAPPINGS_MAX,
            memory_stays_with_addresses: self.vendor.memory_stays_with_addresses,
            // They synchronize first: work of other streams is not ordered with a copy by itself.
            copies_wait: true,
            rdma: gpu.properties().rdma != 0,
            fabric: gpu.has_fabric(),
            mps: gpu.mps,
            maps_when_quiet: gpu.maps_when_quiet,
        })
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        let told = self.told_memory(device).and_then(|told| told.map_or_else(|| self.known_memory(device), Ok));
        told.map_err(|cause| DriverError::new(Call::Query, cause))
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        let fail = |cause| DriverError::new(Call::Create, cause);
        let gpu = self.gpu(device).map_err(fail)?;
        self.lock().books.check_len("chunk size", len).map_err(fail)?;
        let _turn = gpu.turn();
        let function = self.vendor.names.create;
        let make = |table: &Table| {
            let create = || table.create(len.get() as usize, &gpu.properties());
            create().or_else(|code| {
                if !gpu.gives_up_fabric(code) {
                    return Err(code);
                }
                tracing::info!(%device, code, "chunks that other nodes could import are refused (no IMEX channel, or no right to it): they are passed on this node alone");
                create()
            })
        };
        let made = self.for_memory(device, function, make);
        let number = made.map_err(|cause| match cause {
            Cause::Library { code: code::OUT_OF_MEMORY, .. } => fail(self.exhausted(device, len)),
            cause => fail(of_files(cause)),
        })?;
        let mut state = self.lock();
        let (handle, chunk) = state.books.add_chunk(len);
        state.handles.insert(handle, Native { number, device });
        state.created.insert(chunk, (device, len));
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Release, cause);
        let native = self.lock().native(handle).map_err(fail)?;
        let _turn = self.gpu(native.device).map_err(fail)?.turn();
        // Nobody else finds it from here on: what the library has taken back it may give to another chunk.
        self.lock().handles.remove(&handle).ok_or_else(|| fail(Cause::UnknownHandle(handle)))?;
        let released = self.table.release(native.number);
        let mut state = self.lock();
        if let Err(code) = released {
            state.handles.insert(handle, native);
            drop(state);
            return Err(fail(self.answered(native.device, self.vendor.names.release)(code)));
        }
        let gone = state.books.release(handle).map_err(fail)?;
        state.forget(gone.as_slice());
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let fail = |cause| DriverError::new(Call::Export, cause);
        let device = self.lock().native(handle).map_err(fail)?.device;
        let _turn = self.gpu(device).map_err(fail)?.turn();
        // It may have been released before this turn came.
        let number = self.lock().native(handle).map_err(fail)?.number;
        let fd = self.table.export(number).map_err(self.answered(device, self.vendor.names.export));
        fd.map_err(|cause| match (of_files(cause), self.vendor.exports_max) {
            (Cause::Library { code: code::OUT_OF_MEMORY, .. }, Some(limit)) => {
                fail(Cause::TooMany { what: "exports of this machine", limit, remedy: "use larger chunks" })
            }
            (cause, _) => fail(cause),
        })
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        let fail = |cause| DriverError::new(Call::Import, cause);
        let _turn = self.gpu(device).map_err(fail)?.turn();
        self.lock().books.check_len("chunk size", len).map_err(fail)?;
        let by_pointer = self.version < self.vendor.imports_by_number_from;
        let native = self.for_memory(device, self.vendor.names.import, |table| table.import(fd.as_fd(), by_pointer));
        let number = native.map_err(of_files).map_err(|cause| match cause {
            Cause::Library {
                // Unknown is what a descriptor that is no chunk's is answered with (580.159, H200); a device that is gone was found to be that before.
                code:
                    code::INVALID_VALUE
                    | code::INVALID_DEVICE
                    | code::OPERATING_SYSTEM
                    | code::INVALID_HANDLE
                    | code::UNKNOWN,
                ..
            } => fail(Cause::NotAChunk { expected: len, found: cause.to_string() }),
            cause => fail(cause),
        })?;
        // The library does not take the descriptor: `fd` is closed here.
        let mut state = self.lock();
        let (handle, _) = state.books.add_chunk(len);
        state.handles.insert(handle, Native { number, device });
        Ok(handle)
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        let native = self.lock().native(handle).map_err(|cause| DriverError::new(Call::Query, cause))?;
        Ok(native.number)
    }

    fn misuse(&self, device: DeviceId, tell: &mut dyn FnMut(&'static str, String)) -> Result<(), DriverError> {
        self.misuse_library(device, tell).map_err(|cause| DriverError::new(Call::Query, cause))
    }

    fn all_reduce(&self, ranks: &[Rank], len: Bytes) -> Result<i32, DriverError> {
        let fail = |cause| DriverError::new(Call::Query, cause);
        // Held until all is queued: nobody may unmap meanwhile, nor end a stream.
        let state = self.lock();
        ranks.iter().try_for_each(|rank| self.check_rank(&state, rank, len)).map_err(fail)?;
        let collectives = Collectives::load(&self.collectives).map_err(fail)?;
        let version = collectives.version().map_err(fail)?;
        let communicators = collectives.all_reduce(ranks, len).map_err(fail)?;
        drop(state);
        ranks.iter().try_for_each(|rank| self.synchronize(rank.device))?;
        collectives.destroy(&communicators).map_err(fail)?;
        Ok(version)
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        let fail = |cause| DriverError::new(Call::Reserve, cause);
        let gpu = self.gpu(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_len("reservation size", len).map_err(fail)?;
        check_alignment(alignment, gpu.granularity).map_err(fail)?;
        // HIP ignored the alignment until 2025: so much more is taken, and what lies at a multiple is used.
        let padded = len
            .checked_add(alignment)
            .ok_or_else(|| fail(Cause::Misaligned { what: "reservation size", value: len.get(), unit: alignment }))?;
        let names = &self.vendor.names;
        let take = |state: &mut State, len: Bytes| {
            let reserve = |table: &Table| table.reserve(len.get() as usize, alignment.get() as usize);
            self.on(state, device, names.reserve, reserve)
        };
        let span = |start: u64, len| {
            let span = Span::new(DeviceAddress::new(start), len);
            span.ok_or_else(|| fail(Cause::Misaligned { what: "reserved address", value: start, unit: alignment }))
        };
        let mut raw = span(take(&mut state, len).map_err(fail)?, len)?;
        if !raw.start().get().is_multiple_of(alignment.get()) {
            // Addresses that cannot be given back are nobody's from here on, and take no memory with them: what was asked for can still be had.
            if let Err(error) = self.unreserve_raw(&mut state, device, raw) {
                tracing::warn!(%device, span = %raw, %error, "addresses that lie in the wrong place cannot be given back; they are lost to this process");
            }
            raw = span(take(&mut state, padded).map_err(fail)?, padded)?;
        }
        let start = DeviceAddress::new(raw.start().get().next_multiple_of(alignment.get()));
        state.books.reserve(start, len);
        state.homes.insert(start, Home { device, raw });
        Ok(start)
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Unreserve, cause);
        let mut state = self.lock();
        state.books.check_unreserve(span).map_err(fail)?;
        let Home { device, raw } = state.homes[&span.start()];
        self.unreserve_raw(&mut state, device, raw).map_err(fail)?;
        state.books.unreserve(span);
        state.homes.remove(&span.start());
        Ok(())
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Map, cause);
        let mut state = self.lock();
        let (span, chunk) = state.books.check_map(at, handle).map_err(fail)?;
        let device = state.home_of(span).map_err(fail)?;
        let Native { number, .. } = state.native(handle).map_err(fail)?;
        self.map_native(&mut state, device, span, number).map_err(fail)?;
        state.books.map(span, chunk);
        Ok(())
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Unmap, cause);
        let mut state = self.lock();
        let mapped = state.books.check_covered(span).map_err(fail)?;
        let device = state.home_of(span).map_err(fail)?;
        let parts = self.calls_over(span, &mapped);
        for (done, (part, _)) in parts.iter().enumerate() {
            if let Err(cause) = self.unmap_native(&mut state, device, *part) {
                self.remap(&mut state, device, parts[..done].iter().map(|(part, _)| *part));
                return Err(fail(cause));
            }
        }
        let gone = state.books.unmap(&mapped);
        state.forget(&gone);
        Ok(())
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::SetAccess, cause);
        self.gpu(device).map_err(fail)?;
        let mut state = self.lock();
        let mapped = state.books.check_covered(span).map_err(fail)?;
        for (part, mappings) in self.calls_over(span, &mapped) {
            self.set_access_native(&mut state, device, part, access).map_err(fail)?;
            // Part by part: what the books allow and the library does not breaks the context for good.
            state.books.set_access(mappings, access);
        }
        Ok(())
    }

    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        let Some(device) = self.settle(from, into.len(), false).map_err(fail)? else { return Ok(()) };
        let mut state = self.lock();
        usable(&state.books, from, into.len(), false).map_err(fail)?;
        let copy = |table: &Table| table.copy_to_host(into, from.get());
        self.on(&mut state, device, self.vendor.names.copy_to_host, copy).map_err(fail)
    }

    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        let Some(device) = self.settle(to, from.len(), true).map_err(fail)? else { return Ok(()) };
        let mut state = self.lock();
        // Others may have unmapped it meanwhile.
        usable(&state.books, to, from.len(), true).map_err(fail)?;
        let copy = |table: &Table| table.copy_to_device(to.get(), from);
        self.on(&mut state, device, self.vendor.names.copy_to_device, copy).map_err(fail)
    }

    fn host_memory(&self, device: DeviceId, len: usize) -> Option<Box<dyn HostMemory>> {
        let current = self.context(&mut self.lock(), device).ok()?;
        let make = |_: &Table| Locked::new(&self.table, current, len);
        // Where the system locks no more there is memory that is not locked.
        let made = self.as_current(device, current, self.vendor.names.host_alloc, make);
        made.map(|locked| Box::new(locked) as Box<dyn HostMemory>).ok()
    }

    fn fill(&self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        self.gpu(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_use(span, true).map_err(fail)?;
        let fill = |table: &Table| table.fill(span.start().get(), value, len_of(span), stream.0);
        self.on(&mut state, device, self.vendor.names.fill, fill).map_err(fail)
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        let mut state = self.lock();
        let made = self.on(&mut state, device, self.vendor.names.stream_create, Table::stream_create);
        let stream = StreamId(made.map_err(fail)?);
        state.streams.insert(stream, device);
        Ok(stream)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        let mut state = self.lock();
        let device = *state.streams.get(&stream).ok_or_else(|| fail(Cause::UnknownStream(stream)))?;
        let function = self.vendor.names.stream_destroy;
        self.table.stream_destroy(stream.0).map_err(self.answered(device, function)).map_err(fail)?;
        state.streams.remove(&stream);
        Ok(())
    }

    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        let mut state = self.lock();
        let names = &self.vendor.names;
        let event = self.on(&mut state, device, names.event_create, Table::event_create).map_err(fail)?;
        let recorded = self.on(&mut state, device, names.event_record, |table| table.event_record(event, stream.0));
        if let Err(cause) = recorded {
            // What was made for it goes with it; if not even that works there is nobody to tell.
            let _ = self.table.event_destroy(event);
            return Err(fail(cause));
        }
        state.events.insert(EventId(event), device);
        Ok(EventId(event))
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        // Held over the call, which never waits: nobody may destroy the event meanwhile.
        let state = self.lock();
        let device = state.event(event).map_err(fail)?;
        self.table.event_query(event.0).map_err(self.answered(device, self.vendor.names.event_query)).map_err(fail)
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        let mut state = self.lock();
        state.event(event).map_err(fail)?;
        let wait = |table: &Table| table.stream_wait(stream.0, event.0);
        self.on(&mut state, device, self.vendor.names.stream_wait, wait).map_err(fail)
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Event, cause);
        let mut state = self.lock();
        let device = state.event(event).map_err(fail)?;
        let function = self.vendor.names.event_destroy;
        self.table.event_destroy(event.0).map_err(self.answered(device, function)).map_err(fail)?;
        state.events.remove(&event);
        Ok(())
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Synchronize, cause);
        let context = self.context(&mut self.lock(), device).map_err(fail)?;
        // Not under the lock: it takes as long as the kernels do, and other threads may have something to ask meanwhile.
        self.as_current(device, context, self.vendor.names.synchronize, Table::synchronize).map_err(fail)
    }
}

impl Drop for GpuDriver {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for device in state.contexts.keys() {
            // At the end of a process the library may be gone already; then so is the context.
            let _ = self.table.let_go(self.devices[device].native);
        }
    }
}

fn len_of(span: AddressSpan) -> usize {
    span.len().get() as usize
}

/// A system call that failed may have lacked a descriptor.
fn of_files(cause: Cause) -> Cause {
    let may_be = matches!(cause, Cause::Library { code: code::OPERATING_SYSTEM | code::OUT_OF_MEMORY, .. });
    if may_be { too_many_files().unwrap_or(cause) } else { cause }
}
