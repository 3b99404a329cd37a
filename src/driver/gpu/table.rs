//! The C functions of a GPU driver library, found at run time: nothing is linked, so every machine builds and starts, and one without the library gets an error.
//!
//! CUDA and HIP have the same virtual memory calls with the same arguments, structures and numbers under different names (the layouts are held against
//! `cuda-driver-sys` and `hip-sys` by the test target `layouts`), so there is one table and two lists of names. Where the two differ a field is an enum or an `Option`.
//!
//! Not for: any decision, and any rule. Every function here is one call.

#![expect(unsafe_code, reason = "calls C functions of a library that is loaded at run time")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use libloading::Library;
use rustix::io::FdFlags;

/// A result code as the library gives it. An integer and never an enum: a code that this build does not know must not be undefined behaviour.
pub(super) type Code = c_int;

/// `CUmemLocation`, `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// [`LOCATION_DEVICE`].
    pub kind: c_uint,
    /// The ordinal.
    pub id: c_int,
}

/// `CUmemAllocationProp`, `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// [`ALLOCATION_PINNED`].
    pub kind: c_uint,
    /// [`HANDLE_POSIX_FD`].
    pub handle_types: c_uint,
    /// Where.
    pub location: Location,
    /// Zero here.
    pub win32_metadata: usize,
    /// `allocFlags.compressionType`.
    pub compression: u8,
    /// `allocFlags.gpuDirectRDMACapable`: must be asked for when the chunk is made.
    pub rdma: u8,
    /// `allocFlags.usage`.
    pub usage: u16,
    /// `allocFlags.reserved`.
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`, `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDescription {
    /// Who.
    pub location: Location,
    /// [`ACCESS_NONE`], [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub flags: c_uint,
}

/// Memory of a device.
pub const LOCATION_DEVICE: c_uint = 1;
/// Memory that stays where it is.
pub const ALLOCATION_PINNED: c_uint = 1;
/// A handle that can be passed as a file descriptor.
pub const HANDLE_POSIX_FD: c_uint = 1;
/// A handle that other nodes can import, too.
pub const HANDLE_FABRIC: c_uint = 8;
/// No access.
pub const ACCESS_NONE: c_uint = 0;
/// Reads only.
pub const ACCESS_READ: c_uint = 1;
/// Reads and writes.
pub const ACCESS_READ_WRITE: c_uint = 3;
/// The smallest granularity.
pub const GRANULARITY_MINIMUM: c_uint = 0;
/// An event that keeps no time: all that is asked of one is whether it is complete.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// Memory of the process that is locked for every context of it.
pub const HOST_PORTABLE: c_uint = 1;
/// A stream that does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;

/// What a device can do, in CUDA's numbers.
pub mod cuda_attribute {
    /// It has the virtual memory calls.
    pub const VIRTUAL_MEMORY: i32 = 102;
    /// Its chunks can be passed as descriptors.
    pub const POSIX_FD: i32 = 103;
    /// Network cards can read its chunks that ask for it (newer than `cuda-driver-sys`).
    pub const RDMA: i32 = 110;
    /// Its chunks can be passed to other nodes (newer, too).
    pub const FABRIC: i32 = 128;
    /// It is shared through MPS (newer, too).
    pub const MPS: i32 = 133;
    /// Its generation, as in 7.5: what stands before the point.
    pub const GENERATION_MAJOR: i32 = 75;
    /// What stands behind it.
    pub const GENERATION_MINOR: i32 = 76;
}

/// What a device can do, in HIP's numbers.
pub mod hip_attribute {
    /// It has the virtual memory calls.
    pub const VIRTUAL_MEMORY: i32 = 89;
}

/// Result codes, the same numbers in both libraries.
pub mod code {
    use super::Code;

    /// Done.
    pub const OK: Code = 0;
    /// An argument is not what the call takes.
    pub const INVALID_VALUE: Code = 1;
    /// Memory, or something else that is counted, has run out.
    pub const OUT_OF_MEMORY: Code = 2;
    /// The library was not initialised, or this is a forked child.
    pub const NOT_INITIALIZED: Code = 3;
    /// The library is shutting down.
    pub const DEINITIALIZED: Code = 4;
    /// `libcuda` of the toolkit, which only links.
    pub const STUB_LIBRARY: Code = 34;
    /// Another process has the device for itself.
    pub const DEVICE_UNAVAILABLE: Code = 46;
    /// There is no device.
    pub const NO_DEVICE: Code = 100;
    /// No such device.
    pub const INVALID_DEVICE: Code = 101;
    /// Something is mapped there.
    pub const ALREADY_MAPPED: Code = 208;
    /// Another device does not reach this one's memory.
    pub const PEER_UNREACHABLE: Code = 217;
    /// An uncorrectable memory error.
    pub const ECC_UNCORRECTABLE: Code = 214;
    /// A system call failed.
    pub const OPERATING_SYSTEM: Code = 304;
    /// Not a handle.
    pub const INVALID_HANDLE: Code = 400;
    /// Not yet.
    pub const NOT_READY: Code = 600;
    /// A kernel used memory that it may not use.
    pub const ILLEGAL_ADDRESS: Code = 700;
    /// A kernel failed.
    pub const LAUNCH_FAILED: Code = 719;
    /// The process may not do this.
    pub const NOT_PERMITTED: Code = 800;
    /// The device or driver cannot do this.
    pub const NOT_SUPPORTED: Code = 801;
    /// The kernel module and the library are of different versions.
    pub const DRIVER_MISMATCH: Code = 803;
    /// The process that shares the devices among clients (MPS) cannot be reached.
    pub const MPS_CONNECTION_FAILED: Code = 805;
    /// Nobody knows.
    pub const UNKNOWN: Code = 999;
}

/// How a library calls the functions that the table needs.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) init: &'static str,
    pub(super) version: &'static str,
    pub(super) device_count: &'static str,
    pub(super) device_get: &'static str,
    pub(super) device_name: &'static str,
    /// The first that is there.
    pub(super) device_uuid: &'static [&'static str],
    pub(super) device_total: &'static str,
    pub(super) device_attribute: &'static str,
    pub(super) can_access_peer: &'static str,
    pub(super) granularity: &'static str,
    pub(super) create: &'static str,
    pub(super) release: &'static str,
    pub(super) export: &'static str,
    pub(super) import: &'static str,
    pub(super) reserve: &'static str,
    pub(super) unreserve: &'static str,
    pub(super) map: &'static str,
    pub(super) unmap: &'static str,
    pub(super) set_access: &'static str,
    pub(super) current: CurrentNames,
    pub(super) synchronize: &'static str,
    pub(super) stream_create: &'static str,
    pub(super) stream_destroy: &'static str,
    pub(super) stream_wait: &'static str,
    pub(super) event_create: &'static str,
    pub(super) event_record: &'static str,
    pub(super) event_query: &'static str,
    pub(super) event_destroy: &'static str,
    pub(super) copy_to_host: &'static str,
    pub(super) copy_to_device: &'static str,
    pub(super) fill: &'static str,
    pub(super) host_alloc: &'static str,
    pub(super) host_free: &'static str,
    /// Where it takes no context.
    pub(super) memory_info: Option<&'static str>,
}

/// How a thread says which device its calls are for.
#[derive(Debug)]
pub(super) enum CurrentNames {
    /// By a context, of which each device has a primary one.
    Context { retain: &'static str, release: &'static str, get: &'static str, set: &'static str },
    /// By the device.
    Device { get: &'static str, set: &'static str },
}

/// The functions. Addresses and handles are numbers: both are as wide as a pointer and passed alike.
#[derive(Debug)]
pub(super) struct Table {
    init: unsafe extern "C" fn(c_uint) -> Code,
    version: unsafe extern "C" fn(*mut c_int) -> Code,
    device_count: unsafe extern "C" fn(*mut c_int) -> Code,
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    device_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code,
    device_uuid: unsafe extern "C" fn(*mut [u8; 16], c_int) -> Code,
    device_total: unsafe extern "C" fn(*mut usize, c_int) -> Code,
    device_attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code,
    can_access_peer: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code,
    granularity: unsafe extern "C" fn(*mut usize, *const Properties, c_uint) -> Code,
    create: unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> Code,
    release: unsafe extern "C" fn(u64) -> Code,
    export: unsafe extern "C" fn(*mut c_int, u64, c_uint, u64) -> Code,
    import: unsafe extern "C" fn(*mut u64, *const c_void, c_uint) -> Code,
    reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> Code,
    unreserve: unsafe extern "C" fn(u64, usize) -> Code,
    map: unsafe extern "C" fn(u64, usize, usize, u64, u64) -> Code,
    unmap: unsafe extern "C" fn(u64, usize) -> Code,
    set_access: unsafe extern "C" fn(u64, usize, *const AccessDescription, usize) -> Code,
    current: Current,
    synchronize: unsafe extern "C" fn() -> Code,
    stream_create: unsafe extern "C" fn(*mut u64, c_uint) -> Code,
    stream_destroy: unsafe extern "C" fn(u64) -> Code,
    stream_wait: unsafe extern "C" fn(u64, u64, c_uint) -> Code,
    event_create: unsafe extern "C" fn(*mut u64, c_uint) -> Code,
    event_record: unsafe extern "C" fn(u64, u64) -> Code,
    event_query: unsafe extern "C" fn(u64) -> Code,
    event_destroy: unsafe extern "C" fn(u64) -> Code,
    copy_to_host: unsafe extern "C" fn(*mut c_void, u64, usize) -> Code,
    copy_to_device: unsafe extern "C" fn(u64, *const c_void, usize) -> Code,
    fill: unsafe extern "C" fn(u64, u8, usize, u64) -> Code,
    host_alloc: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> Code,
    host_free: unsafe extern "C" fn(*mut c_void) -> Code,
    memory_info: Option<unsafe extern "C" fn(*mut usize, *mut usize) -> Code>,
}

#[derive(Debug)]
enum Current {
    Context {
        retain: unsafe extern "C" fn(*mut u64, c_int) -> Code,
        release: unsafe extern "C" fn(c_int) -> Code,
        get: unsafe extern "C" fn(*mut u64) -> Code,
        set: unsafe extern "C" fn(u64) -> Code,
    },
    Device {
        get: unsafe extern "C" fn(*mut c_int) -> Code,
        set: unsafe extern "C" fn(c_int) -> Code,
    },
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It is not there, under none of these names.
    #[error("{reason}")]
    Missing {
        /// What the loader says of each.
        reason: String,
    },
    /// It lacks a function: it is older than what is needed.
    #[error("{library} has no {symbol}: it is too old")]
    TooOld {
        /// Which.
        library: String,
        /// The function.
        symbol: &'static str,
    },
}

/// A function of the library, by its name.
macro_rules! function {
    ($library:expr, $path:expr, $symbol:expr) => {{
        // SAFETY: the symbol is one of the library's C functions, whose documented signature is the type of the field that this is assigned to (the layouts are held
        // by the test target `layouts`); the library is never unloaded.
        let found = unsafe { $library.get($symbol) };
        *found.map_err(|_| LoadError::TooOld { library: $path.to_owned(), symbol: $symbol })?
    }};
}

impl Table {
    /// Loads the first library of `paths` that is there.
    pub(super) fn load(paths: &[&str], names: &Names) -> Result<Table, LoadError> {
        let mut reasons = Vec::new();
        for path in paths {
            // SAFETY: loading runs the library's initialisers. It is the vendor's driver, by the name under which every program of the machine loads it; another
            // path is taken only by builds for tests.
            match unsafe { Library::new(*path) } {
                Ok(library) => return Table::of(library, path, names),
                Err(error) => reasons.push(crate::error::root(&error).to_string()),
            }
        }
        Err(LoadError::Missing { reason: reasons.join("; ") })
    }

    fn of(library: Library, path: &str, names: &Names) -> Result<Table, LoadError> {
        let has = |symbol: &&&str| {
            // SAFETY: the address is compared with nothing and called by nobody.
            unsafe { library.get::<*const c_void>(**symbol) }.is_ok()
        };
        let uuid = names.device_uuid.iter().find(has).unwrap_or(&names.device_uuid[0]);
        let current = match &names.current {
            CurrentNames::Context { retain, release, get, set } => Current::Context {
                retain: function!(library, path, *retain),
                release: function!(library, path, *release),
                get: function!(library, path, *get),
                set: function!(library, path, *set),
            },
            CurrentNames::Device { get, set } => {
                Current::Device { get: function!(library, path, *get), set: function!(library, path, *set) }
            }
        };
        let table = Table {
            init: function!(library, path, names.init),
            version: function!(library, path, names.version),
            device_count: function!(library, path, names.device_count),
            device_get: function!(library, path, names.device_get),
            device_name: function!(library, path, names.device_name),
            device_uuid: function!(library, path, *uuid),
            device_total: function!(library, path, names.device_total),
            device_attribute: function!(library, path, names.device_attribute),
            can_access_peer: function!(library, path, names.can_access_peer),
            granularity: function!(library, path, names.granularity),
            create: function!(library, path, names.create),
            release: function!(library, path, names.release),
            export: function!(library, path, names.export),
            import: function!(library, path, names.import),
            reserve: function!(library, path, names.reserve),
            unreserve: function!(library, path, names.unreserve),
            map: function!(library, path, names.map),
            unmap: function!(library, path, names.unmap),
            set_access: function!(library, path, names.set_access),
            current,
            synchronize: function!(library, path, names.synchronize),
            stream_create: function!(library, path, names.stream_create),
            stream_destroy: function!(library, path, names.stream_destroy),
            stream_wait: function!(library, path, names.stream_wait),
            event_create: function!(library, path, names.event_create),
            event_record: function!(library, path, names.event_record),
            event_query: function!(library, path, names.event_query),
            event_destroy: function!(library, path, names.event_destroy),
            copy_to_host: function!(library, path, names.copy_to_host),
            copy_to_device: function!(library, path, names.copy_to_device),
            fill: function!(library, path, names.fill),
            host_alloc: function!(library, path, names.host_alloc),
            host_free: function!(library, path, names.host_free),
            memory_info: match names.memory_info {
                Some(symbol) => Some(function!(library, path, symbol)),
                None => None,
            },
        };
        // For good: its threads, and functions of it that anybody still knows, must not be unloaded under it.
        std::mem::forget(library);
        Ok(table)
    }
}

/// What a call answered, or its code.
pub(super) type Called<T> = Result<T, Code>;

fn done(code: Code) -> Called<()> {
    if code == code::OK { Ok(()) } else { Err(code) }
}

/// Calls `function` with a place for its answer first.
macro_rules! answer {
    ($function:expr, $empty:expr $(, $argument:expr)*) => {{
        let mut answer = $empty;
        // SAFETY: the first argument is a place of the type that the function writes, which lives through the call; the others are numbers, or pointers to values that do.
        let code = unsafe { $function(&raw mut answer $(, $argument)*) };
        done(code).map(|()| answer)
    }};
}

/// Calls `function`, which answers with its code only.
macro_rules! call {
    ($function:expr $(, $argument:expr)*) => {{
        // SAFETY: the arguments are numbers, or pointers to values that live through the call and are as large as it is told.
        let code = unsafe { $function($($argument),*) };
        done(code)
    }};
}

/// One call each. Numbers in, numbers out. Handles, addresses and events are those that the library gave and has not taken back: the driver's books see to that; streams of others
/// are vouched for by whoever passes them in (the driver's header).
impl Table {
    pub(super) fn init(&self) -> Called<()> {
        call!(self.init, 0)
    }

    pub(super) fn version(&self) -> Called<i32> {
        answer!(self.version, 0)
    }

    pub(super) fn device_count(&self) -> Called<i32> {
        answer!(self.device_count, 0)
    }

    pub(super) fn device(&self, ordinal: i32) -> Called<i32> {
        answer!(self.device_get, 0, ordinal)
    }

    pub(super) fn device_name(&self, device: i32) -> Called<String> {
        let mut name: [c_char; 256] = [0; 256];
        // One less than there is room for: it ends with a zero, whatever happens.
        call!(self.device_name, name.as_mut_ptr(), 255, device)?;
        let bytes: Vec<u8> = name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn device_uuid(&self, device: i32) -> Called<[u8; 16]> {
        answer!(self.device_uuid, [0; 16], device)
    }

    pub(super) fn device_total(&self, device: i32) -> Called<usize> {
        answer!(self.device_total, 0, device)
    }

    pub(super) fn device_attribute(&self, attribute: i32, device: i32) -> Called<i32> {
        answer!(self.device_attribute, 0, attribute, device)
    }

    pub(super) fn can_access_peer(&self, device: i32, peer: i32) -> Called<bool> {
        answer!(self.can_access_peer, 0, device, peer).map(|can| can != 0)
    }

    pub(super) fn granularity(&self, properties: &Properties) -> Called<usize> {
        answer!(self.granularity, 0, properties, GRANULARITY_MINIMUM)
    }

    pub(super) fn create(&self, len: usize, properties: &Properties) -> Called<u64> {
        answer!(self.create, 0, len, properties, 0)
    }

    pub(super) fn release(&self, handle: u64) -> Called<()> {
        call!(self.release, handle)
    }

    /// A new descriptor.
    pub(super) fn export(&self, handle: u64) -> Called<OwnedFd> {
        let fd: c_int = answer!(self.export, -1, handle, HANDLE_POSIX_FD, 0)?;
        if fd < 0 {
            return Err(code::UNKNOWN);
        }
        // SAFETY: the library has just opened it for its caller, who is to close it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Not every library does it itself.
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|_| code::OPERATING_SYSTEM)?;
        Ok(fd)
    }

    /// `by_pointer`: the library wants to know where the number of the descriptor is, in place of the number.
    pub(super) fn import(&self, fd: BorrowedFd<'_>, by_pointer: bool) -> Called<u64> {
        let fd = fd.as_raw_fd();
        let number: *const c_void = std::ptr::without_provenance(fd as usize);
        let place: *const c_void = (&raw const fd).cast();
        answer!(self.import, 0, if by_pointer { place } else { number }, HANDLE_POSIX_FD)
    }

    pub(super) fn reserve(&self, len: usize, alignment: usize) -> Called<u64> {
        answer!(self.reserve, 0, len, alignment, 0, 0)
    }

    pub(super) fn unreserve(&self, start: u64, len: usize) -> Called<()> {
        call!(self.unreserve, start, len)
    }

    pub(super) fn map(&self, at: u64, len: usize, handle: u64) -> Called<()> {
        // The offset into the chunk must be zero.
        call!(self.map, at, len, 0, handle, 0)
    }

    pub(super) fn unmap(&self, start: u64, len: usize) -> Called<()> {
        call!(self.unmap, start, len)
    }

    pub(super) fn set_access(&self, start: u64, len: usize, who: &[AccessDescription]) -> Called<()> {
        call!(self.set_access, start, len, who.as_ptr(), who.len())
    }

    /// Threads choose a context; else a device, which every call is for then: also an import is tagged with it.
    pub(super) fn has_contexts(&self) -> bool {
        matches!(self.current, Current::Context { .. })
    }

    /// The primary context of a device, which is made if nobody has made it; nothing where devices do without.
    pub(super) fn retain(&self, device: i32) -> Called<Option<u64>> {
        match self.current {
            Current::Context { retain, .. } => answer!(retain, 0, device).map(Some),
            Current::Device { .. } => Ok(None),
        }
    }

    /// Gives a primary context back.
    pub(super) fn let_go(&self, device: i32) -> Called<()> {
        match self.current {
            Current::Context { release, .. } => call!(release, device),
            Current::Device { .. } => Ok(()),
        }
    }

    /// What the calling thread's calls are for: a context or a device.
    pub(super) fn current(&self) -> Called<u64> {
        match self.current {
            Current::Context { get, .. } => answer!(get, 0),
            Current::Device { get, .. } => answer!(get, 0).map(|device| device as u64),
        }
    }

    /// From now on the calling thread's calls are for this context or device.
    pub(super) fn set_current(&self, current: u64) -> Called<()> {
        match self.current {
            Current::Context { set, .. } => call!(set, current),
            Current::Device { set, .. } => call!(set, current as i32),
        }
    }

    /// Waits for everything that was queued on the current device.
    pub(super) fn synchronize(&self) -> Called<()> {
        call!(self.synchronize)
    }

    pub(super) fn stream_create(&self) -> Called<u64> {
        answer!(self.stream_create, 0, STREAM_NON_BLOCKING)
    }

    pub(super) fn stream_destroy(&self, stream: u64) -> Called<()> {
        call!(self.stream_destroy, stream)
    }

    pub(super) fn stream_wait(&self, stream: u64, event: u64) -> Called<()> {
        call!(self.stream_wait, stream, event, 0)
    }

    pub(super) fn event_create(&self) -> Called<u64> {
        answer!(self.event_create, 0, EVENT_DISABLE_TIMING)
    }

    pub(super) fn event_record(&self, event: u64, stream: u64) -> Called<()> {
        call!(self.event_record, event, stream)
    }

    pub(super) fn event_query(&self, event: u64) -> Called<bool> {
        match call!(self.event_query, event) {
            Ok(()) => Ok(true),
            Err(code::NOT_READY) => Ok(false),
            Err(code) => Err(code),
        }
    }

    pub(super) fn event_destroy(&self, event: u64) -> Called<()> {
        call!(self.event_destroy, event)
    }

    pub(super) fn copy_to_host(&self, into: &mut [u8], from: u64) -> Called<()> {
        call!(self.copy_to_host, into.as_mut_ptr().cast(), from, into.len())
    }

    pub(super) fn copy_to_device(&self, to: u64, from: &[u8]) -> Called<()> {
        call!(self.copy_to_device, to, from.as_ptr().cast(), from.len())
    }

    /// Bytes of the current device that nobody holds, where the library can say.
    pub(super) fn free_bytes(&self) -> Called<Option<usize>> {
        let Some(memory_info) = self.memory_info else { return Ok(None) };
        let mut total = 0;
        answer!(memory_info, 0, &raw mut total).map(Some)
    }

    /// Memory of the process that stays where it is, with whatever it has in it.
    pub(super) fn host_alloc(&self, len: usize) -> Called<*mut c_void> {
        answer!(self.host_alloc, std::ptr::null_mut(), len, HOST_PORTABLE)
    }

    /// Gives it back.
    pub(super) fn host_free(&self, at: *mut c_void) -> Called<()> {
        call!(self.host_free, at)
    }

    pub(super) fn fill(&self, start: u64, value: u8, len: usize, stream: u64) -> Called<()> {
        call!(self.fill, start, value, len, stream)
    }
}
