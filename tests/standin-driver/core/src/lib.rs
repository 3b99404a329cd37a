//! A pretended machine with GPUs, for tests on machines that have none. It is a directory: the driver library of the machine lies in it (a copy of
//! `libstandin_cuda.so` or `libstandin_hip.so`), `machine.conf` says what the machine is like, and each chunk is a file in it. So processes that load
//! the same copy share devices, as with a real driver, and two tests with two directories do not.
//!
//! It keeps the rules of the virtual memory calls (facts of cuda.h): a chunk is mapped whole from its first byte, where nothing is mapped, inside one
//! reservation; no access until it is set; unmapping covers whole mappings without a hole; bytes return when the last handle, mapping and descriptor of
//! any process are gone. A forked child is refused everything. It is as strict as a device: its memory cannot be touched by the CPU, only by copies.
//!
//! `machine.conf` has lines `key = value`:
//!
//! | key | what it is | default |
//! |---|---|---|
//! | `devices` | bytes of each device, with commas | `1073741824` |
//! | `version` | what the library says its version is | the vendor's newest |
//! | `latency_us` | how long each memory call takes | 0 |
//! | `fail` | the n-th memory call of a process fails with code 999 | none |
//! | `context_bytes` | device memory that a process's context takes | 0 |
//! | `quirks` | misbehaviour by name, with commas: [`Quirk`] | none |
//!
//! Not for: streams that are busy. What is queued has run when the call returns.

mod facade;
mod machine;
mod process;

pub use facade::{NativeAccess, NativeProperties, put};
pub use machine::{Machine, Quirk};
pub use process::{Process, Properties, answer, driver_beside};

/// Result codes, the same numbers in CUDA and HIP.
pub mod code {
    /// Done.
    pub const OK: i32 = 0;
    /// An argument is not what the call takes.
    pub const INVALID_VALUE: i32 = 1;
    /// Memory has run out.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// Not initialised, or a forked child.
    pub const NOT_INITIALIZED: i32 = 3;
    /// No such device.
    pub const INVALID_DEVICE: i32 = 101;
    /// The thread has no context.
    pub const INVALID_CONTEXT: i32 = 201;
    /// A system call failed.
    pub const OPERATING_SYSTEM: i32 = 304;
    /// Not a handle.
    pub const INVALID_HANDLE: i32 = 400;
    /// A copy used addresses that it may not use: nothing works after that.
    pub const ILLEGAL_ADDRESS: i32 = 700;
    /// A failure that the test asked for.
    pub const UNKNOWN: i32 = 999;
}

/// What a call answers.
pub type Called<T> = Result<T, i32>;
