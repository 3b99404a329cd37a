//! The driver for machines without a GPU: a chunk is a sealed memfd, a device is a byte budget in host memory, an address is an address
//! of this process. Real bytes, real descriptors, real sharing between processes.
//!
//! Not for: rules (they are in [`super::books`]) or stream order ([`super::streams`]).
//!
//! Invariant: memory is touched only inside spans that the books hold as mapped with that access.
//!
//! ## When bytes return
//!
//! A chunk that this process has created counts against its device until nobody refers to it any more, in whatever process. The
//! kernel knows: `F_SETLEASE` with `F_WRLCK` succeeds only where no other open file description of the inode exists (fcntl(2)),
//! and mappings and descriptors in flight hold theirs. So exports share one description, and after the last handle is gone a
//! second one, opened through `/proc/self/fd`, asks whether the first has died with all its copies.

#![expect(unsafe_code, reason = "maps memory and copies into it")]

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::books::{Books, ChunkKey};
use super::streams::{Stall, Streams};
use super::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
    check_alignment, usable,
};
use crate::ids::{DeviceId, DeviceUuid, StreamId};
use crate::limits;
use crate::units::{AddressSpan, Bytes, DeviceAddress};

/// How a [`HostDriver`] pretends.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Bytes of each device.
    pub devices: Vec<Bytes>,
    /// Smallest chunk.
    pub granularity: Bytes,
    /// Whether a chunk can be mapped at two addresses.
    pub alias: bool,
    /// Mappings that this process may have.
    pub mappings_max: u64,
    /// Says that memory which was mapped returns with its addresses only, as some vendors' does. Here it returns before; but what is made for those can be tried.
    pub memory_stays_with_addresses: bool,
}

impl HostOptions {
    /// Devices of `totals`, the usual granularity, aliases, and as many mappings as the kernel lets a process have.
    pub fn with_devices(totals: &[Bytes]) -> HostOptions {
        HostOptions {
            devices: totals.to_vec(),
            // Chunks are mapped, and maps go by pages.
            granularity: limits::granularity_for(limits::CHUNK_LEN_MIN, limits::page_size()),
            alias: true,
            mappings_max: mappings_max_of_system(),
            memory_stays_with_addresses: false,
        }
    }
}

/// What the kernel allows, less what the rest of a process needs: when all are used up, malloc itself fails.
fn mappings_max_of_system() -> u64 {
    const DEFAULT: u64 = 65_530;
    const FOR_THE_REST: u64 = 8_192;
    let configured =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse::<u64>().ok());
    configured.unwrap_or(DEFAULT).saturating_sub(FOR_THE_REST).max(1_024)
}

/// The host driver.
#[derive(Debug)]
pub struct HostDriver {
    options: HostOptions,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    books: Books,
    streams: Streams,
    files: HashMap<ChunkKey, ChunkFile>,
    /// Chunks that nothing in this process refers to, and something elsewhere may.
    lingering: Vec<ChunkFile>,
    /// Bytes that count against each device: its files and its lingering chunks.
    charged: Vec<Bytes>,
    /// A fill that hit addresses it may not use: sticky, as on a device.
    fault: Option<AddressSpan>,
}

/// A chunk's memory.
#[derive(Debug)]
struct ChunkFile {
    file: OwnedFd,
    len: Bytes,
    /// The device that this counts against; `None` for an import, which counts where it was created.
    charged: Option<DeviceId>,
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> Cause {
    move |errno| Cause::System { what, errno }
}

impl HostDriver {
    /// The driver that `options` describe.
    pub fn new(options: HostOptions) -> HostDriver {
        let books = Books::new(options.granularity, options.alias, options.mappings_max);
        let state = State {
            books,
            streams: Streams::default(),
            files: HashMap::new(),
            lingering: Vec::new(),
            charged: vec![Bytes::ZERO; options.devices.len()],
            fault: None,
        };
        HostDriver { options, state: Mutex::new(state) }
    }

    /// Keeps `stream` busy until the answer is dropped, as a long kernel would.
    pub fn stall(&self, device: DeviceId, stream: StreamId) -> Stall {
        self.lock().streams.stall(device, stream)
    }

    /// Chunks, mappings and reservations that this process still has.
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.lock();
        (state.books.chunk_count(), state.books.mapping_count(), state.books.reservation_count())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no step of this driver panics while it holds the lock")
    }

    fn total(&self, device: DeviceId) -> Result<Bytes, Cause> {
        let count = self.options.devices.len();
        self.options.devices.get(device.0 as usize).copied().ok_or(Cause::NoDevice { device, count })
    }
}

impl State {
    /// Lets go of chunks that nothing in this process refers to.
    fn drop_files(&mut self, gone: &[ChunkKey]) {
        for chunk in gone {
            let file = self.files.remove(chunk).expect("every chunk of the books has its file");
            if file.charged.is_none() {
                continue;
            }
            match reopen(file.file.as_fd()) {
                Ok(probe) => self.lingering.push(ChunkFile { file: probe, ..file }),
                // Where /proc is missing we cannot ask who else has it; then the bytes count as returned.
                Err(_) => self.uncharge(&file),
            }
        }
        self.sweep();
    }

    /// Forgets lingering chunks that nobody has any more.
    fn sweep(&mut self) {
        let (held, returned): (Vec<_>, Vec<_>) =
            self.lingering.drain(..).partition(|file| is_held_elsewhere(file.file.as_fd()));
        self.lingering = held;
        for file in &returned {
            self.uncharge(file);
        }
    }

    fn uncharge(&mut self, file: &ChunkFile) {
        if let Some(device) = file.charged {
            self.charged[device.0 as usize] -= file.len;
        }
    }

    fn pump(&mut self) {
        let State { books, streams, fault, .. } = self;
        streams.pump(|span, value| {
            if books.check_use(span, true).is_err() {
                fault.get_or_insert(span);
                return;
            }
            // SAFETY:
            // * the books hold every byte of `span` as mapped for reads and writes in this process;
            // * the driver's lock is held, so no mapping changes meanwhile;
            // * the memory is a chunk: no Rust object lives in it.
            unsafe { std::ptr::write_bytes(pointer(span.start()), value, len_of(span)) };
        });
    }

    fn check_fault(&self) -> Result<(), Cause> {
        self.fault.map_or(Ok(()), |span| Err(Cause::NotMapped(span)))
    }
}

fn pointer(at: DeviceAddress) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at.get() as usize)
}

fn len_of(span: AddressSpan) -> usize {
    span.len().get() as usize
}

/// A second open file description of the same memory.
fn reopen(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    reopen_as(file, OFlags::RDWR)
}

fn reopen_as(file: BorrowedFd<'_>, access: OFlags) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())
}

/// linux/fcntl.h; the libc crate lacks it.
const F_SETSIG: libc::c_int = 10;

/// True when another open file description of the memory behind `probe` exists, in whatever process.
fn is_held_elsewhere(probe: BorrowedFd<'_>) -> bool {
    let fd = probe.as_raw_fd();
    // A lease that somebody breaks raises SIGIO, which would end the process. Nobody can open what nobody else has, but SIGURG,
    // which is ignored, costs nothing.
    // SAFETY: fcntl with F_SETSIG takes an int and touches no memory of ours; `probe` is open while borrowed.
    unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) };
    // SAFETY: fcntl with F_SETLEASE takes an int and touches no memory of ours; `probe` is open while borrowed.
    let taken = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) };
    if taken == 0 {
        // SAFETY: as above.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        return false;
    }
    // Anything but "in use" means that this system cannot tell.
    std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
}

/// A new piece of shareable memory that nobody can resize. More seals can come: they only take rights away, and whoever has a descriptor takes them from himself.
fn new_chunk_file(len: Bytes) -> Result<OwnedFd, Cause> {
    let memfd = rustix::fs::memfd_create("stitchd-chunk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(system("memfd_create"))?;
    rustix::fs::ftruncate(&memfd, len.get()).map_err(system("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW).map_err(system("fcntl(F_ADD_SEALS)"))?;
    // The description that memfd_create made is not counted by the kernel's check for leases; one that was opened is.
    Ok(reopen(memfd.as_fd()).unwrap_or(memfd))
}

/// `fd` is a chunk of `len` bytes that whoever sent it can no longer resize under us. Says whether nobody can write it any more.
fn check_chunk_file(fd: BorrowedFd<'_>, len: Bytes) -> Result<bool, Cause> {
    let not_a_chunk = |found: String| Cause::NotAChunk { expected: len, found };
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(|errno| not_a_chunk(format!("it cannot be sealed ({errno})")))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(not_a_chunk("it is not sealed against resizing".into()));
    }
    let is_sealed = seals.contains(SealFlags::WRITE);
    // What fstat would say, for a third of its time; nobody uses the position that this changes.
    let found = rustix::fs::seek(fd, SeekFrom::End(0)).map_err(system("lseek"))?;
    if found != len.get() {
        return Err(not_a_chunk(format!("it has {found} bytes")));
    }
    Ok(is_sealed)
}

/// Turns `span` into reserved addresses with nothing behind them, whatever was mapped there.
///
/// # Safety
///
/// `span` lies in a reservation of this driver, or is fresh from mmap and not yet known to anybody.
unsafe fn blank(span: AddressSpan) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: MAP_FIXED replaces only addresses that the caller owns (this function's contract).
    unsafe { rustix::mm::mmap_anonymous(pointer(span.start()).cast(), len_of(span), ProtFlags::empty(), flags) }
        .map(|_| ())
}

/// Fresh addresses with nothing behind them, at a multiple of `alignment`.
fn reserve_addresses(len: Bytes, alignment: Bytes) -> Result<DeviceAddress, Cause> {
    // The kernel aligns to pages only: take `alignment` more, then give back what sticks out on both sides.
    //
    //   got:   |........|=================================|.....|
    //          raw      aligned                  aligned + len  raw + padded
    let padded = len.checked_add(alignment).ok_or(Cause::System { what: "mmap", errno: Errno::NOMEM })?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without MAP_FIXED mmap disturbs nothing that exists.
    let raw =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), padded.get() as usize, ProtFlags::empty(), flags) }
            .map_err(system("mmap"))?
            .expose_provenance() as u64;
    let aligned = raw.next_multiple_of(alignment.get());
    for (start, end) in [(raw, aligned), (aligned + len.get(), raw + padded.get())] {
        if end > start {
            // SAFETY: the two edges belong to the mapping made above, and nobody knows of it yet.
            unsafe { rustix::mm::munmap(pointer(DeviceAddress::new(start)).cast(), (end - start) as usize) }
                .map_err(system("munmap"))?;
        }
    }
    Ok(DeviceAddress::new(aligned))
}

impl Driver for HostDriver {
    fn name(&self) -> &'static str {
        "host"
    }

    fn devices(&self) -> Vec<DeviceDescription> {
        let describe = |(ordinal, total): (usize, &Bytes)| DeviceDescription {
            id: DeviceId(ordinal as u32),
            uuid: uuid_of(*b"stitchd-host-", ordinal),
            model: "host memory".into(),
            total: *total,
        };
        self.options.devices.iter().enumerate().map(describe).collect()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError> {
        self.total(device).map_err(|cause| DriverError::new(Call::Query, cause))?;
        Ok(Capabilities {
            granularity: self.options.granularity,
            alias: self.options.alias,
            contents: true,
            clears_memory: true,
            enforces_read_only: true,
            checks_imports: true,
            fds_per_chunk: 1,
            mappings_max: self.options.mappings_max,
            memory_stays_with_addresses: self.options.memory_stays_with_addresses,
            copies_wait: false,
            rdma: false,
            fabric: false,
            mps: false,
            maps_when_quiet: false,
        })
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        let total = self.total(device).map_err(|cause| DriverError::new(Call::Query, cause))?;
        let mut state = self.lock();
        state.sweep();
        Ok(DeviceMemory { total, free: total.saturating_sub(state.charged[device.0 as usize]), is_live: true })
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        let fail = |cause| DriverError::new(Call::Create, cause);
        let total = self.total(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_len("chunk size", len).map_err(fail)?;
        state.sweep();
        let available = total.saturating_sub(state.charged[device.0 as usize]);
        if len > available {
            return Err(fail(Cause::Exhausted { device, requested: len, available, total }));
        }
        let file = new_chunk_file(len).map_err(fail)?;
        let (handle, chunk) = state.books.add_chunk(len);
        state.files.insert(chunk, ChunkFile { file, len, charged: Some(device) });
        state.charged[device.0 as usize] += len;
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        let mut state = self.lock();
        let gone = state.books.release(handle).map_err(|cause| DriverError::new(Call::Release, cause))?;
        state.drop_files(gone.as_slice());
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let fail = |cause| DriverError::new(Call::Export, cause);
        let state = self.lock();
        let (chunk, _) = state.books.chunk(handle).map_err(fail)?;
        // A duplicate, not a second open: see the module's header.
        rustix::io::fcntl_dupfd_cloexec(&state.files[&chunk].file, 3).map_err(system("fcntl(F_DUPFD)")).map_err(fail)
    }

    fn seal(&self, handle: Handle) -> Result<bool, DriverError> {
        let fail = |cause| DriverError::new(Call::SetAccess, cause);
        let state = self.lock();
        let (chunk, _) = state.books.chunk(handle).map_err(fail)?;
        rustix::fs::fcntl_add_seals(&state.files[&chunk].file, SealFlags::WRITE | SealFlags::SEAL)
            .map_err(system("fcntl(F_ADD_SEALS)"))
            .map_err(fail)?;
        Ok(true)
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        let fail = |cause| DriverError::new(Call::Import, cause);
        self.total(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_len("chunk size", len).map_err(fail)?;
        let fd = match check_chunk_file(fd.as_fd(), len).map_err(fail)? {
            // Before Linux 6.7 what is sealed can be mapped only through a description that cannot write.
            true => reopen_as(fd.as_fd(), OFlags::RDONLY).unwrap_or(fd),
            false => fd,
        };
        let (handle, chunk) = state.books.add_chunk(len);
        state.files.insert(chunk, ChunkFile { file: fd, len, charged: None });
        Ok(handle)
    }

    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError> {
        let state = self.lock();
        let (chunk, _) = state.books.chunk(handle).map_err(|cause| DriverError::new(Call::Query, cause))?;
        Ok(state.files[&chunk].file.as_raw_fd() as u64)
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        let fail = |cause| DriverError::new(Call::Reserve, cause);
        self.total(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_len("reservation size", len).map_err(fail)?;
        check_alignment(alignment, self.options.granularity).map_err(fail)?;
        let start = reserve_addresses(len, alignment).map_err(fail)?;
        state.books.reserve(start, len);
        Ok(start)
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Unreserve, cause);
        let mut state = self.lock();
        state.books.check_unreserve(span).map_err(fail)?;
        // SAFETY: the books hold `span` as exactly one reservation of ours with nothing mapped in it.
        unsafe { rustix::mm::munmap(pointer(span.start()).cast(), len_of(span)) }
            .map_err(system("munmap"))
            .map_err(fail)?;
        state.books.unreserve(span);
        Ok(())
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Map, cause);
        let mut state = self.lock();
        let (span, chunk) = state.books.check_map(at, handle).map_err(fail)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let file = &state.files[&chunk].file;
        // SAFETY: MAP_FIXED replaces only addresses that the books hold as reserved by us and unmapped.
        unsafe { rustix::mm::mmap(pointer(at).cast(), len_of(span), ProtFlags::empty(), flags, file, 0) }
            .map_err(system("mmap"))
            .map_err(fail)?;
        state.books.map(span, chunk);
        Ok(())
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Unmap, cause);
        let mut state = self.lock();
        let mapped = state.books.check_covered(span).map_err(fail)?;
        // SAFETY: the books hold `span` as mapped by us, so it lies in a reservation of ours.
        unsafe { blank(span) }.map_err(system("mmap")).map_err(fail)?;
        let gone = state.books.unmap(&mapped);
        state.drop_files(&gone);
        Ok(())
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::SetAccess, cause);
        self.total(device).map_err(fail)?;
        let mut state = self.lock();
        let mapped = state.books.check_covered(span).map_err(fail)?;
        let protection = match access {
            Access::None => MprotectFlags::empty(),
            Access::Read => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: the books hold `span` as mapped by us; no Rust object lives in chunk memory.
        unsafe { rustix::mm::mprotect(pointer(span.start()).cast(), len_of(span), protection) }
            .map_err(system("mprotect"))
            .map_err(fail)?;
        // A forked child must not keep a trainer's memory. Where the kernel refuses, the daemon's rules still hold.
        // SAFETY: as above; the advice changes what fork copies and nothing here.
        let _ = unsafe {
            rustix::mm::madvise(pointer(span.start()).cast(), len_of(span), rustix::mm::Advice::LinuxDontFork)
        };
        state.books.set_access(&mapped, access);
        Ok(())
    }

    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        let mut state = self.lock();
        state.pump();
        let span = usable(&state.books, from, into.len(), false).map_err(fail)?;
        // SAFETY:
        // * the books hold every byte of `span` as mapped for reads in this process, and the lock keeps it so;
        // * `into` is ours alone and as long as `span`; it cannot overlap, for chunk memory holds no Rust object;
        // * another process may write meanwhile: then the bytes are any mix of old and new, as on a device.
        unsafe { std::ptr::copy_nonoverlapping(pointer(span.start()), into.as_mut_ptr(), len_of(span)) };
        Ok(())
    }

    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        let mut state = self.lock();
        state.pump();
        let span = usable(&state.books, to, from.len(), true).map_err(fail)?;
        // SAFETY: as in `read`, with the books holding the span as mapped for writes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), pointer(span.start()), len_of(span)) };
        Ok(())
    }

    fn fill(&self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) -> Result<(), DriverError> {
        let fail = |cause| DriverError::new(Call::Copy, cause);
        self.total(device).map_err(fail)?;
        let mut state = self.lock();
        state.books.check_use(span, true).map_err(fail)?;
        state.streams.fill(device, stream, span, value);
        Ok(())
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError> {
        self.total(device).map_err(|cause| DriverError::new(Call::Event, cause))?;
        Ok(self.lock().streams.create(device))
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        self.lock().streams.destroy(stream).map_err(|cause| DriverError::new(Call::Event, cause))
    }

    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        self.total(device).map_err(|cause| DriverError::new(Call::Event, cause))?;
        Ok(self.lock().streams.record(device, stream))
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        let mut state = self.lock();
        state.pump();
        state
            .check_fault()
            .and_then(|()| state.streams.query(event))
            .map_err(|cause| DriverError::new(Call::Event, cause))
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        self.lock().streams.wait(device, stream, event).map_err(|cause| DriverError::new(Call::Event, cause))
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        self.lock().streams.forget(event).map_err(|cause| DriverError::new(Call::Event, cause))
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        self.total(device).map_err(|cause| DriverError::new(Call::Synchronize, cause))?;
        loop {
            let mut state = self.lock();
            state.pump();
            if state.streams.is_idle(device) {
                return state.check_fault().map_err(|cause| DriverError::new(Call::Synchronize, cause));
            }
            drop(state);
            // Something stalls, as a kernel that still runs would.
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// The uuid of a pretended device: the same for the same ordinal in every process, and no other ordinal's. From 1000 up, where three digits do not do, in hexadecimal: up to
/// [`limits::ORDINALS_MAX`] that begins with `3e` or `3f`, as no decimal number does.
pub(super) fn uuid_of(prefix: [u8; 13], ordinal: usize) -> DeviceUuid {
    assert!(ordinal < limits::ORDINALS_MAX as usize, "there is no device {ordinal}");
    let mut uuid = [0; 16];
    uuid[..13].copy_from_slice(&prefix);
    let digits = if ordinal < 1000 { format!("{ordinal:03}") } else { format!("{ordinal:03x}") };
    uuid[13..].copy_from_slice(digits.as_bytes());
    DeviceUuid(uuid)
}

/// A descriptor that names a chunk without holding its bytes, for drivers that have none.
#[derive(Debug)]
pub(super) struct Token {
    file: OwnedFd,
}

impl Token {
    pub(super) fn new() -> Result<Token, Cause> {
        new_chunk_file(Bytes::ZERO).map(|file| Token { file })
    }

    /// A descriptor for others.
    pub(super) fn duplicate(&self) -> Result<OwnedFd, Cause> {
        rustix::io::fcntl_dupfd_cloexec(&self.file, 3).map_err(system("fcntl(F_DUPFD)"))
    }

    /// Which token this descriptor is a copy of: the inode, never the number.
    pub(super) fn identity(fd: BorrowedFd<'_>) -> Result<(u64, u64), Cause> {
        let stat = rustix::fs::fstat(fd).map_err(system("fstat"))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// From now on this asks only whether copies exist elsewhere.
    pub(super) fn into_probe(self) -> Option<Token> {
        reopen(self.file.as_fd()).ok().map(|file| Token { file })
    }

    /// True while a copy exists. For probes only.
    pub(super) fn is_held_elsewhere(&self) -> bool {
        is_held_elsewhere(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_ordinal_that_a_device_can_have_has_a_uuid_of_its_own() {
        let count = limits::ORDINALS_MAX as usize;
        let uuids: BTreeSet<_> = (0..count).map(|ordinal| uuid_of(*b"stitchd-host-", ordinal).0).collect();
        assert_eq!(uuids.len(), count);
    }
}
