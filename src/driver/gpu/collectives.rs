//! The vendor's library for collectives (NCCL, RCCL), as far as one experiment needs it: whether it takes stitched memory.
//!
//! nccl.h: `ncclGetVersion`, `ncclCommInitAll`, `ncclGroupStart`, `ncclAllReduce`, `ncclGroupEnd`, `ncclCommDestroy`. RCCL has the same names, types and numbers.

#![expect(unsafe_code, reason = "calls C functions of a library that is loaded at run time")]

use std::ffi::c_int;

use libloading::Library;

use super::table::Code;
use super::{Bytes, Cause, Rank};
use crate::error::{ErrorKind, chain};

/// How the library's functions begin.
pub(super) const PREFIX: &str = "nccl";

const GET_VERSION: &str = "ncclGetVersion";
const INIT_ALL: &str = "ncclCommInitAll";
const GROUP_START: &str = "ncclGroupStart";
const ALL_REDUCE: &str = "ncclAllReduce";
const GROUP_END: &str = "ncclGroupEnd";
const DESTROY: &str = "ncclCommDestroy";

const REMEDY: &str = "install it, or name the folder that has it in LD_LIBRARY_PATH (PyTorch's CUDA wheels bring it as site-packages/nvidia/nccl/lib)";

/// `ncclUint8`.
const BYTE: c_int = 1;
/// `ncclSum`.
const SUM: c_int = 0;

/// Result codes: numbers of the library's own.
mod code {
    use super::Code;

    pub(super) const UNHANDLED_DEVICE_ERROR: Code = 1;
    pub(super) const SYSTEM_ERROR: Code = 2;
    pub(super) const INTERNAL_ERROR: Code = 3;
    pub(super) const INVALID_ARGUMENT: Code = 4;
    pub(super) const INVALID_USAGE: Code = 5;
}

/// What a caller can do about an answer.
pub(super) fn kind_of(code: Code) -> ErrorKind {
    match code {
        code::INVALID_ARGUMENT | code::INVALID_USAGE => ErrorKind::Invalid,
        _ => ErrorKind::Broken,
    }
}

fn check(function: &'static str, code: Code) -> Result<(), Cause> {
    let meaning = match code {
        0 => return Ok(()),
        code::UNHANDLED_DEVICE_ERROR => "a call of the driver failed; NCCL_DEBUG=WARN says which",
        code::SYSTEM_ERROR => "a call of the system failed; NCCL_DEBUG=WARN says which",
        code::INTERNAL_ERROR => "an error of the library's own; NCCL_DEBUG=WARN says more",
        code::INVALID_ARGUMENT => "an argument is not what it takes",
        code::INVALID_USAGE => "its calls do not go together",
        _ => "see nccl.h",
    };
    Err(Cause::Library { function, code, meaning })
}

/// A communicator, as the library gives it: a pointer that nobody here follows.
pub(super) type Communicator = usize;

/// The library.
#[derive(Debug)]
pub(super) struct Collectives {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    init_all: unsafe extern "C" fn(*mut Communicator, c_int, *const c_int) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Communicator, u64) -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    destroy: unsafe extern "C" fn(Communicator) -> c_int,
}

/// A function, as the type of the field into which it goes has it.
fn find<T: Copy>(library: &Library, name: &str) -> Result<T, libloading::Error> {
    // SAFETY: the types of the fields are those of nccl.h, a pointer being as wide as the number that stands for it here; the library is never unloaded once all are found.
    unsafe { library.get(name) }.map(|function| *function)
}

impl Collectives {
    /// The library, which stays loaded: it has threads of its own.
    pub(super) fn load(path: &str) -> Result<Collectives, Cause> {
        Collectives::open(path).map_err(|error| Cause::NoLibrary {
            library: path.to_owned(),
            reason: chain(&error),
            remedy: REMEDY,
        })
    }

    fn open(path: &str) -> Result<Collectives, libloading::Error> {
        // SAFETY: loading runs the library's initialisers; it is the vendor's, by the name under which every program of the machine loads it.
        let library = unsafe { Library::new(path) }?;
        let collectives = Collectives {
            get_version: find(&library, GET_VERSION)?,
            init_all: find(&library, INIT_ALL)?,
            group_start: find(&library, GROUP_START)?,
            all_reduce: find(&library, ALL_REDUCE)?,
            group_end: find(&library, GROUP_END)?,
            destroy: find(&library, DESTROY)?,
        };
        std::mem::forget(library);
        Ok(collectives)
    }

    /// As the library writes it: 22703 for 2.27.3.
    pub(super) fn version(&self) -> Result<i32, Cause> {
        let mut version = 0;
        // SAFETY: the place for the answer lives through the call.
        check(GET_VERSION, unsafe { (self.get_version)(&raw mut version) })?;
        Ok(version)
    }

    /// Queues an all-reduce over all ranks, which this one thread stands for. The caller has held them against its books, and sees to it that they stay so until this returns; the communicators must
    /// live until the devices are through with it.
    pub(super) fn all_reduce(&self, ranks: &[Rank], len: Bytes) -> Result<Vec<Communicator>, Cause> {
        let devices: Vec<c_int> = ranks.iter().map(|rank| rank.device.0 as c_int).collect();
        let mut communicators: Vec<Communicator> = vec![0; ranks.len()];
        // SAFETY: both lists have as many places as the call is told, and live through it.
        let made = unsafe { (self.init_all)(communicators.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        check(INIT_ALL, made)?;
        // SAFETY: it takes nothing. Calls for several ranks from one thread wait for each other unless they are a group (nccl.h).
        check(GROUP_START, unsafe { (self.group_start)() })?;
        let queue = |(rank, communicator): (&Rank, &Communicator)| {
            let Rank { stream, from, to, .. } = rank;
            let len = len.get() as usize;
            // SAFETY: the communicator is what the library has just given for this rank's device; `len` bytes from both addresses are mapped and may be used, and the stream is one that
            // was made for this device and not ended (`GpuDriver::check_rank`, under the lock that is held until the group has ended). A device that does not reach them faults.
            let queued = unsafe { (self.all_reduce)(from.get(), to.get(), len, BYTE, SUM, *communicator, stream.0) };
            check(ALL_REDUCE, queued)
        };
        let queued = ranks.iter().zip(&communicators).try_for_each(queue);
        // SAFETY: it takes nothing, and ends the group that began above.
        let ended = check(GROUP_END, unsafe { (self.group_end)() });
        queued.and(ended).map(|()| communicators)
    }

    /// Ends them. Nothing of theirs may be under way.
    pub(super) fn destroy(&self, communicators: &[Communicator]) -> Result<(), Cause> {
        // SAFETY: each is the library's own, and is ended once.
        communicators.iter().try_for_each(|communicator| check(DESTROY, unsafe { (self.destroy)(*communicator) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_where_to_get_it() {
        let missing = Collectives::load("libstitchd-has-no-such-library.so.2").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Unsupported);
        let words = missing.to_string();
        assert!(words.starts_with("libstitchd-has-no-such-library.so.2 cannot be loaded"), "{words}");
        assert!(words.contains("LD_LIBRARY_PATH"), "{words}");
    }

    #[test]
    fn a_library_without_the_functions_is_none() {
        let other = Collectives::load("libc.so.6").unwrap_err().to_string();
        assert!(other.contains(GET_VERSION), "{other}");
    }
}
