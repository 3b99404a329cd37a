//! Hardware mechanism without policy: physical chunks, address ranges, mappings, streams and events of one machine's
//! devices, behind one object-safe trait.
//!
//! The rules are those of the CUDA and HIP virtual memory APIs, and every driver here keeps them:
//!
//! * a chunk is created whole and mapped whole, from its first byte; sizes are multiples of the granularity;
//! * addresses are reserved first; a mapping needs a reservation that is not yet mapped there;
//! * a fresh mapping, also of a chunk that was mapped before, has no access until [`Driver::set_access`] gives it;
//! * an export is a file descriptor that anybody may import; it cannot be taken back;
//! * a chunk's bytes return to the device only when its last handle, mapping and descriptor, in any process, are gone.
//!
//! If an operation fails, the driver's state is as before the call. Everything that is multi-step is built in
//! [`crate::memory`], with rollback.
//!
//! No method is `unsafe`: addresses are numbers here, and a driver holds every span against its own books before it touches
//! memory. `unsafe` stays inside the drivers.

mod books;
#[cfg(feature = "daemon")]
pub mod conformance;
pub mod cost_table;
#[cfg(feature = "daemon")]
pub mod costs;
pub mod gpu;
pub mod host;
pub mod layers;
pub mod sim;
mod streams;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
#[cfg(feature = "testing")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use gpu::OpenError;

use crate::error::ErrorKind;
use crate::ids::{DeviceId, DeviceUuid, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

/// One machine's devices. Shared between threads; each call is one step that either happens or leaves no trace.
pub trait Driver: Send + Sync + fmt::Debug {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// What the vendor's library calls its version; nothing where there is no vendor.
    fn version(&self) -> Option<String> {
        None
    }

    /// The devices, by ordinal.
    fn devices(&self) -> Vec<DeviceDescription>;

    /// What this device can do.
    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError>;

    /// How much memory the device has and how much of it nobody holds.
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError>;

    /// Creates `len` bytes of physical memory: a multiple of the granularity, not zero. Its contents are zero where
    /// [`Capabilities::clears_memory`] says so, and anybody's otherwise.
    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError>;

    /// Lets go of a handle that [`Driver::create`] or [`Driver::import`] gave. Mappings of it stay.
    fn release(&self, handle: Handle) -> Result<(), DriverError>;

    /// A new descriptor of the chunk. Whoever has it, or a copy, can import it.
    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError>;

    /// A new handle for the `len` bytes behind `fd`, which is closed when the driver has no more use for it: at once on most, with the chunk on some.
    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError>;

    /// The vendor's own handle of the chunk, for libraries that register memory chunk by chunk. It stays the driver's: good until the handle is released, and never to be released by others.
    fn native_handle(&self, handle: Handle) -> Result<u64, DriverError>;

    /// Lets nobody write the chunk any more, in whatever process, for good. False where the driver cannot: there an importer chooses its own access. Fails where somebody maps it for writing.
    fn seal(&self, _handle: Handle) -> Result<bool, DriverError> {
        Ok(false)
    }

    /// Whether other processes can have its chunks.
    fn is_shared(&self) -> bool {
        true
    }

    /// Files that the system shows the devices as, as far as this process has them open: where nobody has, the vendor's driver may take a device down with what is on it.
    fn nodes(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }

    /// Misuses the vendor's library, past all checks, and tells what it answers to each misuse: what is written down about it is too little. Nothing where there is no such library. Only for a process
    /// that does nothing else: it may end by it.
    fn misuse(&self, _device: DeviceId, _tell: &mut dyn FnMut(&'static str, String)) -> Result<(), DriverError> {
        Ok(())
    }

    /// Adds up, byte by byte over all ranks, the `len` bytes at each one's `from`, and puts the sums at each one's `to`: an all-reduce by the vendor's library for collectives, which is looked for
    /// now. Each one's stream is one that [`Driver::create_stream`] gave for its device. The library's version; done when it returns. Only for a process that does nothing else: libraries for collectives keep threads and memory.
    fn all_reduce(&self, _ranks: &[Rank], _len: Bytes) -> Result<i32, DriverError> {
        Err(DriverError::new(Call::Query, Cause::Unsupported { driver: self.name() }))
    }

    /// Sets aside `len` bytes of addresses, at a multiple of `alignment` (a power of two, at least the granularity).
    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Gives back exactly what one [`Driver::reserve`] gave. Nothing may be mapped in it.
    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError>;

    /// Makes the whole chunk visible at `at`, inside one reservation, where nothing is mapped. No access yet.
    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError>;

    /// Removes every mapping in `span`, which must be covered by whole mappings without a hole. The caller has made sure that no
    /// queued work uses them ([`Driver::synchronize`]).
    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError>;

    /// Sets who may use `span`, which must be covered by mappings without a hole.
    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError>;

    /// Copies bytes from the device. Waits for work that is queued already, as far as [`Capabilities::copies_wait`] says.
    fn read(&self, from: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError>;

    /// Copies bytes to the device. Waits as [`Driver::read`] does.
    fn write(&self, to: DeviceAddress, from: &[u8]) -> Result<(), DriverError>;

    /// `len` bytes of this process's memory that are locked where they are, with whatever is in them: copies to and from a device are as fast there as they can be. Nothing where the driver has none of that, or the system locks no more.
    fn host_memory(&self, _device: DeviceId, _len: usize) -> Option<Box<dyn HostMemory>> {
        None
    }

    /// Queues setting every byte of `span` to `value`, after all that `stream` of `device` has queued.
    fn fill(&self, device: DeviceId, stream: StreamId, span: AddressSpan, value: u8) -> Result<(), DriverError>;

    /// A new stream of the device.
    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError>;

    /// Ends a stream that [`Driver::create_stream`] gave, after what it has queued.
    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError>;

    /// An event that completes when all that `stream` has queued until now has run.
    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError>;

    /// True once the event is complete. Never waits.
    fn query_event(&self, event: EventId) -> Result<bool, DriverError>;

    /// Makes `stream` of `device` wait for the event before it goes on.
    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError>;

    /// Forgets an event, complete or not.
    fn destroy_event(&self, event: EventId) -> Result<(), DriverError>;

    /// Waits until everything queued on the device has run.
    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError>;
}

/// A device as the driver knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Its ordinal in this process.
    pub id: DeviceId,
    /// Its name everywhere.
    pub uuid: DeviceUuid,
    /// Its model.
    pub model: String,
    /// All its memory.
    pub total: Bytes,
}

/// What a device can do. Where a driver lacks something, callers ask here first and choose another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Smallest size and alignment of a chunk.
    pub granularity: Bytes,
    /// One chunk may be mapped at two addresses, and both see the same bytes, though not within one running kernel: there the two are not coherent.
    pub alias: bool,
    /// [`Driver::read`], [`Driver::write`] and [`Driver::fill`] move real bytes.
    pub contents: bool,
    /// New chunks read as zero, whoever had the memory before.
    pub clears_memory: bool,
    /// The driver holds to [`Access::Read`]: a write through such a mapping fails.
    pub enforces_read_only: bool,
    /// An import of a descriptor that is a chunk of another size is refused; else only mapping more than there is.
    pub checks_imports: bool,
    /// Descriptors that the driver holds for each chunk while a handle lives.
    pub fds_per_chunk: u64,
    /// Mappings that this process can have at one time.
    pub mappings_max: u64,
    /// What was mapped returns only once the addresses where it was are given back ([`Driver::unreserve`]): unmapping and releasing it is not enough.
    pub memory_stays_with_addresses: bool,
    /// [`Driver::read`] and [`Driver::write`] wait for busy streams to their end, as GPUs do; else as far as they can go on.
    pub copies_wait: bool,
    /// Chunks are made so that network cards can read them (GPUDirect).
    pub rdma: bool,
    /// Chunks are made so that they can be passed to other nodes (FABRIC), unless the first create shows that this process may not. Here they are passed as descriptors, on one node.
    pub fabric: bool,
    /// Processes share the device through MPS: a fatal fault of one takes all down, and limits may count what was created, so here the daemon, rather than what is used.
    pub mps: bool,
    /// Kernels that run may fault when memory is mapped, wherever it is: who maps waits for them first.
    pub maps_when_quiet: bool,
}

/// A device's memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All of it.
    pub total: Bytes,
    /// What a create could still get: what nobody holds through a handle, a mapping or a descriptor.
    pub free: Bytes,
    /// `free` is what the device says. Otherwise nobody tells, and it is all that this process has not taken, whoever else has.
    pub is_live: bool,
}

/// A chunk inside its driver and process. The number means nothing elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Handle(pub u64);

/// An event inside its driver and process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EventId(pub u64);

/// A device's part in a collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    /// Whose.
    pub device: DeviceId,
    /// One of the device's streams.
    pub stream: StreamId,
    /// Where what it gives begins.
    pub from: DeviceAddress,
    /// Where what it gets begins.
    pub to: DeviceAddress,
}

/// Memory of this process, to copy to and from.
pub trait HostMemory: Send + Sync + fmt::Debug {
    /// What is in it.
    fn bytes(&self) -> &[u8];

    /// The same, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// It is the driver's, and locked where it is.
    fn is_locked(&self) -> bool;
}

impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn is_locked(&self) -> bool {
        false
    }
}

/// Who may use a mapping, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Nobody: any use faults.
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// The kinds of driver calls, for counts, costs, faults and error messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Call {
    /// [`Driver::create`]
    Create,
    /// [`Driver::release`]
    Release,
    /// [`Driver::reserve`]
    Reserve,
    /// [`Driver::unreserve`]
    Unreserve,
    /// [`Driver::map`]
    Map,
    /// [`Driver::unmap`]
    Unmap,
    /// [`Driver::set_access`], [`Driver::seal`]
    SetAccess,
    /// [`Driver::export`]
    Export,
    /// [`Driver::import`]
    Import,
    /// Recording, asking, waiting for and forgetting events; making and ending streams.
    Event,
    /// [`Driver::synchronize`]
    Synchronize,
    /// [`Driver::read`], [`Driver::write`], [`Driver::fill`]
    Copy,
    /// [`Driver::capabilities`], [`Driver::memory`], [`Driver::native_handle`]
    Query,
}

impl Call {
    /// All of them, in order of their [`Call::index`].
    pub const ALL: [Call; 13] = [
        Call::Create,
        Call::Release,
        Call::Reserve,
        Call::Unreserve,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::Export,
        Call::Import,
        Call::Event,
        Call::Synchronize,
        Call::Copy,
        Call::Query,
    ];

    /// Its place in [`Call::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name in JSON, metrics and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Call::Create => "create",
            Call::Release => "release",
            Call::Reserve => "reserve",
            Call::Unreserve => "unreserve",
            Call::Map => "map",
            Call::Unmap => "unmap",
            Call::SetAccess => "set_access",
            Call::Export => "export",
            Call::Import => "import",
            Call::Event => "event",
            Call::Synchronize => "synchronize",
            Call::Copy => "copy",
            Call::Query => "query",
        }
    }

    /// True for the calls that change physical memory or addresses: what a steady iteration should do without.
    pub const fn is_memory(self) -> bool {
        !matches!(self, Call::Event | Call::Synchronize | Call::Copy | Call::Query)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A driver call that did not happen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("driver call {call} failed")]
pub struct DriverError {
    /// Which call.
    pub call: Call,
    /// Why.
    #[source]
    pub cause: Cause,
}

impl DriverError {
    /// The error of `call` for `cause`.
    pub fn new(call: Call, cause: Cause) -> DriverError {
        DriverError { call, cause }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        self.cause.kind()
    }
}

/// Why a driver call did not happen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The device has too little memory left.
    #[error("{device} has {available} of {total} left and {requested} were asked for")]
    Exhausted {
        /// Where.
        device: DeviceId,
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes left.
        available: Bytes,
        /// All bytes of the device.
        total: Bytes,
    },
    /// Something countable has run out.
    #[error("all {limit} {what} are in use; {remedy}")]
    TooMany {
        /// What.
        what: &'static str,
        /// How many there may be.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// No such device.
    #[error("there is no {device}; this machine has {count}")]
    NoDevice {
        /// As asked for.
        device: DeviceId,
        /// How many there are.
        count: usize,
    },
    /// A size or address is not what the device can use.
    #[error("{what} {value:#x} is not a multiple of {unit}, or is zero")]
    Misaligned {
        /// What.
        what: &'static str,
        /// As asked for.
        value: u64,
        /// Of what it must be a multiple.
        unit: Bytes,
    },
    /// A handle that this driver did not give, or that was released.
    #[error("handle {0:?} is not one of this driver's")]
    UnknownHandle(Handle),
    /// An event that this driver did not give, or that was destroyed.
    #[error("{0:?} is not one of this driver's")]
    UnknownEvent(EventId),
    /// A stream that is not of this driver.
    #[error("{0} is not one of this driver's")]
    UnknownStream(StreamId),
    /// Addresses that no single reservation covers.
    #[error("{0} does not lie in one reservation")]
    NotReserved(AddressSpan),
    /// A span that is not exactly one reservation.
    #[error("{0} is not exactly one reservation")]
    NotAReservation(AddressSpan),
    /// Something is mapped there.
    #[error("something is mapped in {0}")]
    AlreadyMapped(AddressSpan),
    /// The chunk is mapped elsewhere, and this driver cannot map it twice.
    #[error("the chunk is mapped elsewhere and this device maps a chunk only once")]
    NoAlias,
    /// The span has a hole, or cuts through a mapping.
    #[error("{0} is not covered by whole mappings without a hole")]
    NotMapped(AddressSpan),
    /// The mapping's access forbids it.
    #[error("{0} may not be accessed this way")]
    NoAccess(AddressSpan),
    /// The descriptor is not a chunk of this driver.
    #[error("the descriptor is not a chunk of {expected}: {found}")]
    NotAChunk {
        /// Bytes that the caller expects.
        expected: Bytes,
        /// What it is instead.
        found: String,
    },
    /// This driver cannot do it.
    #[error("the {driver} driver cannot do this")]
    Unsupported {
        /// Which driver.
        driver: &'static str,
    },
    /// A library that is looked for only when somebody needs it.
    #[error("{library} cannot be loaded ({reason}); {remedy}")]
    NoLibrary {
        /// Its name.
        library: String,
        /// What the loader says.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The vendor's library refused.
    #[error("{function} answers {code} ({meaning})")]
    Library {
        /// The function.
        function: &'static str,
        /// Its answer.
        code: i32,
        /// In words.
        meaning: &'static str,
    },
    /// The operating system refused.
    #[error("{what}")]
    System {
        /// The system call.
        what: &'static str,
        /// Its error.
        #[source]
        errno: rustix::io::Errno,
    },
    /// A call has not come back in time.
    #[error(
        "the driver has not come back from a {call} for {limit:?}: it or its device hangs (the kernel's log may say why, such as an Xid)"
    )]
    Overdue {
        /// Which call hangs.
        call: Call,
        /// How long it may take.
        limit: Duration,
    },
    /// A call has ended in a panic: what came of it is not known.
    #[error("the driver has panicked in a {call}: that is a bug of stitchd's, and the log says where")]
    Panicked {
        /// Which call.
        call: Call,
    },
    /// The device is gone (an Xid error, a reset, the driver unloaded) and nothing on it works any more.
    #[error("{device} is lost ({reason}); restart whatever uses it once the device is back")]
    Lost {
        /// Which.
        device: DeviceId,
        /// What the driver says.
        reason: &'static str,
    },
    /// A test asked for this failure.
    #[error("injected fault number {0}")]
    Injected(u64),
}

impl Cause {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Cause::Exhausted { .. } | Cause::TooMany { .. } => ErrorKind::Exhausted,
            Cause::NoDevice { .. } | Cause::UnknownHandle(_) | Cause::UnknownEvent(_) | Cause::UnknownStream(_) => {
                ErrorKind::NotFound
            }
            Cause::Misaligned { .. }
            | Cause::NotReserved(_)
            | Cause::NotAReservation(_)
            | Cause::NotAChunk { .. }
            | Cause::NotMapped(_)
            | Cause::NoAccess(_) => ErrorKind::Invalid,
            Cause::AlreadyMapped(_) => ErrorKind::Conflict,
            Cause::NoAlias | Cause::Unsupported { .. } | Cause::NoLibrary { .. } => ErrorKind::Unsupported,
            Cause::System { errno, .. } => match *errno {
                rustix::io::Errno::NOMEM | rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => ErrorKind::Exhausted,
                _ => ErrorKind::Broken,
            },
            Cause::Library { function, code, .. } => gpu::kind_of(function, *code),
            Cause::Overdue { .. } | Cause::Lost { .. } => ErrorKind::Unavailable,
            Cause::Panicked { .. } => ErrorKind::Broken,
            Cause::Injected(_) => ErrorKind::Broken,
        }
    }
}

/// The span of `len` bytes from `at`, which may be used.
fn usable(books: &books::Books, at: DeviceAddress, len: usize, writes: bool) -> Result<AddressSpan, Cause> {
    let span = Span::new(at, Bytes::new(len as u64)).ok_or(Cause::Misaligned {
        what: "address",
        value: at.get(),
        unit: Bytes::new(1),
    })?;
    books.check_use(span, writes)?;
    Ok(span)
}

/// `alignment` is a power of two and not below the granularity.
fn check_alignment(alignment: Bytes, granularity: Bytes) -> Result<(), Cause> {
    if !alignment.get().is_power_of_two() || alignment < granularity {
        return Err(Cause::Misaligned { what: "alignment", value: alignment.get(), unit: granularity });
    }
    Ok(())
}

/// The drivers that a user can name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DriverName {
    /// The best driver that this machine has.
    Auto,
    /// NVIDIA's.
    Cuda,
    /// AMD's.
    Hip,
    /// Real bytes and descriptors in host memory.
    Host,
    /// Addresses and costs only.
    Sim,
}

impl DriverName {
    /// Every name with what it means, for help and error texts.
    pub const ALL: [(&'static str, DriverName); 5] = [
        ("auto", DriverName::Auto),
        ("cuda", DriverName::Cuda),
        ("hip", DriverName::Hip),
        ("host", DriverName::Host),
        ("sim", DriverName::Sim),
    ];
}

impl DriverName {
    /// The name, as [`DriverName::ALL`] has it.
    pub fn as_str(self) -> &'static str {
        DriverName::ALL.iter().find(|(_, driver)| *driver == self).map_or("", |(name, _)| name)
    }

    /// The names of those whose memory a process can have, for error texts.
    pub fn of_processes() -> String {
        let names: Vec<_> =
            DriverName::ALL.iter().filter(|(_, driver)| *driver != DriverName::Sim).map(|(name, _)| *name).collect();
        names.join(", ")
    }

    /// What `auto` has come to, or the same.
    #[must_use]
    pub fn opened_as(self, driver: &dyn Driver) -> DriverName {
        driver.name().parse().unwrap_or(self)
    }

    /// Its devices are as large as somebody says. Of `auto` nobody knows before it is opened ([`DriverName::opened_as`]).
    pub fn is_pretended(self) -> bool {
        !matches!(self, DriverName::Cuda | DriverName::Hip)
    }
}

impl std::str::FromStr for DriverName {
    type Err = UnknownDriverName;

    fn from_str(text: &str) -> Result<DriverName, UnknownDriverName> {
        DriverName::ALL
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, driver)| *driver)
            .ok_or_else(|| UnknownDriverName(text.to_owned()))
    }
}

/// A driver name that nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no driver '{0}'; choose auto, cuda, hip, host or sim")]
pub struct UnknownDriverName(String);

/// Where a vendor's library is: where the system has it, or for tests at another place. Releases have no way to name one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPlace {
    #[cfg(feature = "testing")]
    path: Option<PathBuf>,
}

impl LibraryPlace {
    /// The library at `path`, which stands for all of the vendor's.
    #[cfg(feature = "testing")]
    pub fn at(path: impl Into<PathBuf>) -> LibraryPlace {
        LibraryPlace { path: Some(path.into()) }
    }

    /// NVIDIA's kernel module has made its devices' files, or Windows that of its subsystem for Linux, whatever became of the library.
    fn machine_has_a_device(&self) -> bool {
        #[cfg(feature = "testing")]
        if self.path.is_some() {
            return false;
        }
        ["/dev/nvidiactl", "/dev/dxg"].iter().any(|file| Path::new(file).exists())
    }

    fn open(&self, kind: gpu::GpuKind) -> Result<gpu::GpuDriver, OpenError> {
        #[cfg(feature = "testing")]
        if let Some(path) = &self.path {
            return gpu::GpuDriver::open_library(kind, path);
        }
        gpu::GpuDriver::open(kind)
    }
}

/// Opens the driver `name` with the devices `totals`, where the driver's devices are pretended. `Auto` is NVIDIA's where this machine has it and a device, and the host driver where there is none. AMD's is
/// taken by its name alone: it has not been run on hardware.
pub fn open(name: DriverName, totals: &[Bytes], library: &LibraryPlace) -> Result<Arc<dyn Driver>, OpenError> {
    match open_shared(name, totals, library)? {
        Some(driver) => Ok(driver),
        None => Ok(Arc::new(sim::SimDriver::new(sim::SimOptions::with_devices(totals)))),
    }
}

/// The driver of the vendor whose devices this machine has, NVIDIA's first. Never a pretended one: whoever asks wants devices that its other libraries use.
pub fn open_vendor(library: &LibraryPlace) -> Result<Arc<dyn Driver>, OpenError> {
    let opened = library.open(gpu::GpuKind::Cuda);
    match opened {
        Ok(driver) => Ok(Arc::new(driver)),
        Err(error) => {
            library.open(gpu::GpuKind::Hip).map_or(Err(error), |driver| Ok(Arc::new(driver) as Arc<dyn Driver>))
        }
    }
}

/// The driver `name`, where processes can share its memory; `None` where they cannot. A client needs no other.
pub fn open_shared(
    name: DriverName,
    totals: &[Bytes],
    library: &LibraryPlace,
) -> Result<Option<Arc<dyn Driver>>, OpenError> {
    let pretended = || host::HostDriver::new(host::HostOptions::with_devices(totals));
    Ok(Some(match name {
        DriverName::Cuda => Arc::new(library.open(gpu::GpuKind::Cuda)?),
        DriverName::Hip => Arc::new(library.open(gpu::GpuKind::Hip)?),
        DriverName::Auto => match library.open(gpu::GpuKind::Cuda) {
            Ok(driver) => Arc::new(driver),
            // One that is there and does not work is no reason to serve other memory.
            Err(error) if error.is_no_gpu() && !library.machine_has_a_device() => {
                tracing::info!(%error, "no GPU: memory of this machine pretends to be devices");
                Arc::new(pretended())
            }
            Err(error) => return Err(error),
        },
        DriverName::Host => Arc::new(pretended()),
        DriverName::Sim => return Ok(None),
    }))
}
