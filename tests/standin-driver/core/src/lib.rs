//! A pretended machine with GPUs, for tests on machines that have none. It is a directory: the driver library of the machine lies in it (a copy of
//! `libstandin_cuda.so` or `libstandin_hip.so`), `machine.conf` says what the machine is like, and each chunk is a file in it. So processes that load
//! the same copy share devices, as with a real driver, and two tests with two directories do not.
//!
//! It keeps the rules of the virtual memory calls (facts of cuda.h): a chunk is mapped whole from its first byte, where nothing is mapped, inside one
//! reservation; no access until it is set, device by device; unmapping covers whole mappings without a hole; bytes return when the last handle, mapping and
//! descriptor of any process are gone. A forked child is refused everything. It is as strict as a device: its memory cannot be touched by the CPU, only by
//! copies, and a copy or fill that goes where it must not ends everything for its process.
//!
//! `machine.conf` has lines `key = value`; a key that is not of this table ends the process.
//!
//! | key | what it is | default |
//! |---|---|---|
//! | `devices` | bytes of each device, with commas | `1073741824` |
//! | `granularity` | the size of which chunks of each device are multiples, with commas; the last stands for those that follow | `2097152` |
//! | `version` | what the library says its version is | the vendor's newest |
//! | `latency_us` | how long each memory call takes | 0 |
//! | `fail` | `n`: the n-th memory call of a process fails with code 999; `n import`: its n-th import; `n import 1234`: that of the process 1234, and no other's | none |
//! | `fail_code` | the code with which that call fails | 999 |
//! | `hang_after` | the n-th memory call of a process does not return until the machine has a file `resume` | none |
//! | `context_bytes` | device memory that a process's context takes | 0 |
//! | `mappings` | mappings that one process may have; then memory is said to have run out. Each is an entry of a table here and no mapping of the CPU's, so it may be as large as a test likes | 30000 |
//! | `export_slots` | exports that may be open on the machine at one time, in whatever process. What is said then is what NVIDIA's kernel module says, whose table has 524,287 places: out of memory (2) | 0: as many as one likes |
//! | `dirty` | 1: a new chunk has some of what its memory held before (0xa5, 64 bytes of every 2 MiB) | 0 |
//! | `peers` | which devices reach each other's memory: `all`, `none`, or pairs as in `0-1, 2-3`; `0>1` is one that device 0 alone has: it reaches the memory of device 1, which does not reach its | `all` |
//! | `rdma` | 1: network cards can read chunks that ask for it; else asking for it fails with code 801 | 0 |
//! | `fabric` | 1: the device says that it has FABRIC handles; chunks that ask for them are noted in `fabric-made`, a line each | 0 |
//! | `imex` | 0: processes may not use the channels that such handles take: a create that asks for one fails with code 800, and is noted in `fabric-refused` | 1 |
//! | `mps` | 1: the devices are shared through MPS | 0 |
//! | `volta` | 1: the devices are of generation 7.0, else 9.0, and what runs on one while anything is mapped there faults | 0 |
//! | `mig` | 1: each device is a part of a GPU, and the management library knows it by its `MIG-` name only | 0 |
//! | `nvml` | 0: the management library does not start, as in a container without it: nobody tells how much memory is free | 1 |
//! | `one_uuid` | 1: all devices say that they have the uuid of the first, as boards without a number of their own may | 0 |
//! | `locked_bytes` | bytes of its own memory that a process may have locked for copies; then memory is said to have run out | as many as one likes |
//! | `collectives` | what an all-reduce does: `work`; `broken`: fails with code 2 of its library; `nothing`: says that it is done; and with ranges of several chunks, `refused`: fails with code 1; `ends`: ends its process; `first_chunk`: what lies behind the first stays as it was; `first_chunk_again`: the first is read in the place of each. Communicators are noted in `communicators-made`, a line each | `work` |
//! | `quirks` | misbehaviour by name, with commas: [`Quirk`] | none |
//!
//! What happens while tests run is said by files of the directory, which every call looks at:
//!
//! | file | what it does while it is there |
//! |---|---|
//! | `lost` | the devices whose ordinals it has, with commas, are gone: every call for them fails with code 46 (HIP: 100), in every process, and the management library says 15 |
//! | `reset` | the devices whose ordinals it has need a reset: every call for them fails with code 999, which may mean anything, and the management library says 16 |
//! | `hang` | calls whose names it has, with commas (`create`, `map`, … as [`symbols!`] has them; `memory_info`, `init`), do not return; `create@1` is for device 1 alone, where a call is told its device or has it by its thread's context |
//! | `resume` | what `hang_after` holds returns |
//!
//! A process sees the devices that `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` names, by their ordinals on the machine or their uuids, in that order: their places in the list are its
//! ordinals, and what names no device ends the list. The machine's management library sees all of them.
//!
//! A stream is busy while a test wants it to be: `standin_stall(device, stream, &stall)` queues something that runs until `standin_resume(stall)`. What is
//! queued behind it runs then, in order; until then events are not complete, other streams that wait for them wait, and synchronizing waits. A copy runs
//! what can run before it.
//!
//! Descriptors: a handle is an open file and an export is another, so a process with few of them sees each call fail as it would (code 304, or 2 with
//! [`Quirk::FdPerHandle`]).

mod addresses;
mod chunks;
mod collectives;
mod conf;
mod facade;
mod machine;
mod process;
mod streams;

pub use collectives::{AllReduce, VERSION as COLLECTIVES_VERSION};
pub use conf::Quirk;
pub use facade::{NativeAccess, NativeProperties, put};
pub use machine::Machine;
pub use process::{Habits, Process, Properties, answer, driver_beside};

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
    /// The device cannot be used: CUDA's for one that is gone.
    pub const DEVICE_UNAVAILABLE: i32 = 46;
    /// There is no device: HIP's for one that is gone.
    pub const NO_DEVICE: i32 = 100;
    /// No such device.
    pub const INVALID_DEVICE: i32 = 101;
    /// The thread has no context.
    pub const INVALID_CONTEXT: i32 = 201;
    /// A system call failed.
    pub const OPERATING_SYSTEM: i32 = 304;
    /// Not a handle.
    pub const INVALID_HANDLE: i32 = 400;
    /// Not yet.
    pub const NOT_READY: i32 = 600;
    /// A copy used addresses that it may not use: nothing works after that.
    pub const ILLEGAL_ADDRESS: i32 = 700;
    /// The process may not do this.
    pub const NOT_PERMITTED: i32 = 800;
    /// The device cannot do this.
    pub const NOT_SUPPORTED: i32 = 801;
    /// A failure that the test asked for.
    pub const UNKNOWN: i32 = 999;
}

/// What a call answers.
pub type Called<T> = Result<T, i32>;
