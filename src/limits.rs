//! Every maximum in the system, each with its reason.
//!
//! Whatever comes from outside (a socket, a file, a flag) is held against these before it is used.

use crate::units::Bytes;

/// Bytes of a page of this machine: 4 KiB on x86-64, 4, 16 or 64 KiB on aarch64, as its kernel was built.
///
/// The rule: whatever is mapped, reserved or sized as a file is a multiple of it. Chunks and addresses are, because [`granularity_for`] makes every driver's granularity one; what is smaller
/// than a page, as the stats page is, gets a whole one.
pub fn page_size() -> Bytes {
    Bytes::new(rustix::param::page_size() as u64)
}

/// The granularity of a device that can make chunks of multiples of `smallest`, on a machine with pages of this size: never below [`CHUNK_LEN_MIN`], and whole pages.
pub fn granularity_for(smallest: Bytes, page: Bytes) -> Bytes {
    let least = smallest.max(CHUNK_LEN_MIN);
    least.round_up(page).unwrap_or(least)
}

/// Smallest chunk: the allocation granularity of today's data-centre GPUs. A driver with a larger one raises it.
pub const CHUNK_LEN_MIN: Bytes = Bytes::mib(2);
/// Largest chunk. Above this one refused create would move the budget in too large a step.
pub const CHUNK_LEN_MAX: Bytes = Bytes::gib(4);
/// Ordinals of devices are below this: pretended devices are counted up to the highest.
pub const ORDINALS_MAX: u32 = 1024;
/// Chunks that one daemon keeps books on: a node of eight 288 GB devices in the smallest chunks.
pub const CHUNKS_MAX: usize = 1 << 21;
/// Addresses that a process reserves on one device: half of what x86-64 gives a process, and hundreds of times the largest device.
pub const ADDRESS_BYTES_MAX: Bytes = Bytes::gib(64 << 10);
/// Chunks in one acquire: 128 GiB in the smallest chunks.
pub const ACQUIRE_CHUNKS_MAX: u64 = 1 << 16;
/// Bytes in one acquire: more than any device has.
pub const ACQUIRE_BYTES_MAX: Bytes = Bytes::gib(4096);
/// Exports that one daemon may have open. The NVIDIA kernel driver numbers those of a whole machine from one range of 0x80000; the rest is for others.
pub const EXPORTS_MAX: u64 = 500_000;
/// Sessions of one daemon.
pub const SESSIONS_MAX: usize = 4096;
/// Sessions of one process: a runtime needs one for each daemon, tests and tools some more.
pub const PROCESS_SESSIONS_MAX: usize = 256;
/// Connections of one process, on both sockets: two for each session that it may have, and as many that are on their way.
pub const PROCESS_CONNECTIONS_MAX: usize = 4 * PROCESS_SESSIONS_MAX;
/// Shared ranges of one daemon, whoever published them.
pub const RANGES_MAX: usize = 4096;
/// Shared ranges that one session may hold.
pub const SESSION_RANGES_MAX: usize = 1024;
/// Times that one session may hold one shared range.
pub const HOLDS_MAX: u32 = 64;
/// Shared ranges of one tenant.
pub const TENANT_RANGES_MAX: usize = RANGES_MAX / 4;
/// Bytes of the key of a shared range: no fewer than nobody can guess.
pub const KEY_LEN_MIN: usize = 16;
/// And no more than this.
pub const KEY_LEN_MAX: usize = 64;
/// Milliseconds that a shared range may outlive its last holder: a week.
pub const LINGER_MS_MAX: u64 = 7 * 24 * 3_600_000;
/// Requests that wait for memory at one time, all sessions together.
pub const WAITING_MAX: usize = 8192;
/// Longest wait that an acquire may ask for, in milliseconds: an hour.
pub const WAIT_MS_MAX: u64 = 3_600_000;
/// Milliseconds that a session is waited for which was asked for idle memory: a kernel that runs, and taking a gigabyte of mappings down.
pub const ANSWER_MS_MAX: u64 = 1_000;
/// Descriptors in one message of the chunk socket: the kernel's SCM_MAX_FD.
pub const FDS_PER_MESSAGE_MAX: usize = 253;
/// Descriptors that one process may have been sent and not have read: this part of the daemon's limit of open files, and at least a full message. The kernel counts those of all processes
/// together, and above that limit it refuses every send of a daemon without CAP_SYS_RESOURCE.
pub const UNREAD_FDS_SHARE: u64 = 64;
/// Bytes in one message of the chunk socket. A full manifest takes about 6 KiB, a full release list about 45 KiB;
/// default socket buffers carry 200 KiB.
pub const CHUNK_MESSAGE_LEN_MAX: usize = 64 << 10;
/// Chunks, and ranges, named in one message of a session that is there again.
pub const REATTACH_CHUNKS_MAX: usize = 128;
/// Chunks that a session can say it holds when it is there again.
pub const REATTACH_TOLD_MAX: usize = CHUNKS_MAX / 4;
/// The same of all sessions that have not said all.
pub const REATTACH_TOLD_BY_ALL_MAX: usize = CHUNKS_MAX / 2;
/// The same of the sessions of one process, or as many as there can be chunks.
pub const REATTACH_TOLD_BY_PROCESS_MAX: usize = REATTACH_TOLD_BY_ALL_MAX / 16;
/// Chunks named in one release message.
pub const RELEASE_CHUNKS_MAX: usize = 4096;
/// Bytes of one gRPC message that holds a plan; a plan of 300,000 requests takes about 12 MiB.
pub const GRPC_MESSAGE_LEN_MAX: usize = 64 << 20;
/// Bytes of a gRPC message about leases that comes to a daemon: a full release list takes about 45 KiB.
pub const GRPC_LEASE_MESSAGE_LEN_MAX: usize = 64 << 10;
/// Bytes of any other gRPC message that comes to a daemon: a name of [`NAME_LEN_MAX`] and some numbers.
pub const GRPC_SMALL_MESSAGE_LEN_MAX: usize = 4 << 10;
/// Plans that arrive at one time, of all processes together: each may take [`GRPC_MESSAGE_LEN_MAX`] while it comes, and as much again when it is read.
pub const PLANS_AT_ONCE_MAX: usize = 4;
/// gRPC calls of one connection that are open at one time, those that tell what happens (`Watch`) among them: those at work, and half as many that are not.
pub const GRPC_STREAMS_MAX: u32 = 48;
/// gRPC calls of one connection that are at work at one time; those beyond wait. Twice the acquires that one session may have waiting, which takes up to an hour each.
pub const GRPC_CALLS_MAX: usize = 2 * ACQUIRES_QUEUED_MAX;
/// Bytes that a gRPC call may send ahead of what is read of it. A connection may send so much for each of its calls: those that wait must not keep the one whose turn it is from sending.
pub const GRPC_WINDOW_LEN: u32 = 32 << 10;
/// HTTP connections at one time: what reads metrics and asks for health makes a few.
pub const HTTP_CONNECTIONS_MAX: usize = 32;
/// Sessions that metrics list by name.
pub const SESSION_SERIES_MAX: usize = 256;
/// Bytes of a session's or plan's name.
pub const NAME_LEN_MAX: usize = 128;
/// Bytes of a name that Kubernetes gives.
pub const POD_NAME_LEN_MAX: usize = 253;
/// Records of one frame of a journal when it is written anew: some hundred KiB.
pub const JOURNAL_FRAME_RECORDS_MAX: usize = 4_096;
/// Bytes of one step of a journal: a lease of as many chunks as one can have, thirty bytes each, several times.
pub const JOURNAL_FRAME_LEN_MAX: u32 = 64 << 20;
/// A journal that is not longer than this is not worth to be written anew.
pub const JOURNAL_SLACK_LEN: u64 = 4 << 20;
/// Plans that a daemon stores.
pub const PLANS_MAX: usize = 1024;
/// Processes of one job: ten times those of the largest that are known.
pub const WORLD_SIZE_MAX: u32 = 1 << 20;
/// Operators of a graph that is ordered: some ten times those of the largest training steps that are traced whole.
pub const GRAPH_NODES_MAX: usize = 1 << 17;
/// Tensors of one.
pub const GRAPH_TENSORS_MAX: usize = 1 << 19;
/// Fields of an ONNX model: what as many operators and tensors have.
pub const GRAPH_FIELDS_MAX: u64 = 1 << 23;
/// Edges of a graph: thirty for each operator.
pub const GRAPH_EDGES_MAX: usize = 1 << 22;
/// Bytes of a file that one is read from: some three times what as many operators take, with names of usual length.
pub const GRAPH_FILE_LEN_MAX: u64 = 256 << 20;
/// Layers of a model that is partitioned: more than any has that is cut between layers.
pub const PARTITION_LAYERS_MAX: usize = 4096;
/// GPUs of a mesh that it is partitioned for: some three times those of the largest training runs that are known.
pub const PARTITION_GPUS_MAX: usize = 1 << 16;
/// The largest batch or number of micro-batches: a fraction of it is still exact.
pub const PARTITION_BATCH_MAX: u64 = 1 << 40;
/// Measurements of one profile: more degrees and batch sizes than anybody profiles.
pub const PARTITION_MEASUREMENTS_MAX: usize = 1024;
/// Bytes of a profile or of a file of results: as many measurements of as many layers as there can be take some 105 MiB, and the parts of all runs that are listed less.
pub const PARTITION_FILE_LEN_MAX: u64 = 128 << 20;
/// Parts of all profiling runs that are listed: ten times what a thousand layers on sixteen GPUs have.
pub const PARTITION_PARTS_MAX: usize = 1 << 22;
/// Predictions that are kept: those of 256 layers with 64 micro-batches of 1F1B on nodes of eight GPUs are nearly as many.
pub const PARTITION_PREDICTIONS_MAX: usize = 1 << 24;
/// Ways to use the GPUs of a mesh: those of a thousand GPUs on nodes of six are a tenth of them.
pub const PARTITION_WAYS_MAX: usize = 1 << 21;
/// Bits of all sets of ways that a search keeps: 256 MiB.
pub const PARTITION_SETS_BITS_MAX: usize = 1 << 31;
/// Requests in one plan.
pub const PLAN_ENTRIES_MAX: usize = 1 << 22;

/// Bytes of a plan file that is read: some 250 for each entry that a plan can have.
pub const PLAN_FILE_LEN_MAX: u64 = 1 << 30;
/// Events in one trace.
pub const TRACE_EVENTS_MAX: usize = 1 << 27;
/// Bytes in one block of a binary trace: 64 times what the writer makes, in case another makes longer ones.
pub const TRACE_BLOCK_LEN_MAX: u32 = 2 << 20;
/// Bytes in the name of a module of a binary trace: hundreds of times the longest seen.
pub const TRACE_MODULE_LEN_MAX: usize = 64 << 10;
/// Contexts of one thread inside each other: a module is some ten deep in its model.
pub const CONTEXT_DEPTH_MAX: usize = 256;
/// Contexts that a process keeps in words, and names of modules: hundreds of layers with ten modules each in dozens of micro-batches, in some 30 MiB.
pub const CONTEXTS_MAX: usize = 1 << 18;
/// Bytes of the names of modules that a process keeps: a hundred thousand of the longest that are usual.
pub const CONTEXT_NAMES_LEN_MAX: usize = 16 << 20;
/// Contexts that a thread finds again without the process's table: those of one layer's worth of modules many times over, in 64 KiB.
pub const CONTEXTS_CACHED: usize = 1 << 10;
/// Events that a runtime may be ahead of its recorder: half a second of a busy job, in 3 MiB. A power of two.
pub const RECORD_AHEAD_MAX: usize = 1 << 16;
/// Events of a job that are kept to make a plan of: two iterations of half a million requests each, in some 190 MiB that are given back when the plan is made.
pub const AUTO_EVENTS_MAX: usize = 1 << 21;
/// Events that a recorder writes: what a reader takes.
pub const RECORD_EVENTS_MAX: usize = TRACE_EVENTS_MAX;
/// Bytes of a file that a recorder writes: days of a job that repeats itself.
pub const RECORD_FILE_LEN_MAX: u64 = 1 << 30;
/// Live allocations that a recorder keeps numbers of, in some 100 MiB: tens of times what a large job has.
pub const RECORD_LIVE_MAX: usize = 1 << 21;
/// Bytes in one line of a text that is read, what stands in quotes included: sixteen times the longest name of a module.
pub const TEXT_LINE_LEN_MAX: usize = 1 << 20;
/// Figures in a stats page: eight times what there are, in half a kilobyte.
pub const COUNTERS_MAX: usize = 64;
/// Milliseconds between two words that a request is still worked on, at most; a client that has less patience hears more often, but not more often than [`WORD_MS_MIN`].
pub const WORD_MS_MAX: u64 = 1_000;
/// See [`WORD_MS_MAX`].
pub const WORD_MS_MIN: u64 = 20;
/// Acquires of one session that the daemon queues; a client sends one at a time.
pub const ACQUIRES_QUEUED_MAX: usize = 16;
/// Milliseconds that a ticket for a session's chunk socket is good for: before it is used its process opens its driver, which may take two minutes.
pub const LINK_TICKET_MS_MAX: u64 = 150_000;
/// Milliseconds that a ticket for the chunks of a lease is good for.
pub const TICKET_MS_MAX: u64 = 10_000;
/// Addresses of one range of the page pool: more than any device has memory, so that a stream seldom
/// needs another.
pub const PAGE_RANGE_LEN: Bytes = Bytes::gib(512);
/// The same for a private pool, and for all but the first streams: thousands of them fit into
/// [`ADDRESS_BYTES_MAX`]. Where one needs more it reserves another range.
pub const SIDE_RANGE_LEN: Bytes = Bytes::gib(16);
/// Memory of the device that a process pretends to have which goes without a daemon: enough to try things.
pub const PRIVATE_HOST_LEN: Bytes = Bytes::gib(1);
/// Alignment of every allocation, and the unit that sizes are rounded to: what PyTorch's caching allocator gives, and
/// what kernels have come to rely on.
pub const ALLOCATION_ALIGNMENT: Bytes = Bytes::new(512);

/// What an allocation of so many bytes occupies; `None` where that is more than any address space. A request for nothing occupies one unit, so that its address is its own.
pub fn allocation_len(bytes: Bytes) -> Option<Bytes> {
    bytes.max(Bytes::new(1)).round_up(ALLOCATION_ALIGNMENT)
}

/// The same of an allocation that there is, or that a plan has: it is no longer than addresses are.
#[inline]
pub const fn occupied_len(bytes: Bytes) -> Bytes {
    let unit = ALLOCATION_ALIGNMENT.get();
    Bytes::new((bytes.get().saturating_sub(1) | (unit - 1)) + 1)
}

const _: () = assert!(CHUNK_LEN_MIN.get() <= CHUNK_LEN_MAX.get());
const _: () = assert!(RELEASE_CHUNKS_MAX * 11 < CHUNK_MESSAGE_LEN_MAX);
const _: () = assert!(RECORD_AHEAD_MAX.is_power_of_two());
const _: () = assert!(FDS_PER_MESSAGE_MAX * 32 < CHUNK_MESSAGE_LEN_MAX);
const _: () = assert!(REATTACH_CHUNKS_MAX * 28 < GRPC_SMALL_MESSAGE_LEN_MAX);
const _: () = assert!(RELEASE_CHUNKS_MAX * 11 < GRPC_LEASE_MESSAGE_LEN_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_occupies_what_it_was_allowed_to() {
        for bytes in [0, 1, 511, 512, 513, 1023, 1024, 1 << 40, (1 << 40) + 1].map(Bytes::new) {
            assert_eq!(Some(occupied_len(bytes)), allocation_len(bytes), "{bytes}");
        }
    }

    #[test]
    fn chunks_are_whole_pages_whatever_a_page_is() {
        for page in [Bytes::kib(4), Bytes::kib(16), Bytes::kib(64)] {
            for (smallest, granularity) in
                [(Bytes::kib(4), Bytes::mib(2)), (Bytes::kib(64), Bytes::mib(2)), (Bytes::mib(4), Bytes::mib(4))]
            {
                assert_eq!(granularity_for(smallest, page), granularity);
                assert!(granularity.is_multiple_of(page));
            }
        }
        // No such machine is known; a chunk would be a page there.
        assert_eq!(granularity_for(Bytes::kib(4), Bytes::mib(16)), Bytes::mib(16));
        assert!(page_size().get().is_power_of_two() && page_size() >= Bytes::kib(4));
    }
}
