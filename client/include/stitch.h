/* The C contract of libstitchd_client. Written by cbindgen from client/src/ffi.rs; `cargo test -p stitchd-client` holds it. */

#ifndef STITCH_H
#define STITCH_H

#include <stddef.h>
#include <stdint.h>

/*
 Phases of an iteration, for `stitch_context_push`: before the first step.
 */
#define STITCH_PHASE_INIT 0

/*
 Forward pass.
 */
#define STITCH_PHASE_FORWARD 1

/*
 Backward pass.
 */
#define STITCH_PHASE_BACKWARD 2

/*
 Forward pass made again for the backward pass.
 */
#define STITCH_PHASE_RECOMPUTE 3

/*
 Optimizer step.
 */
#define STITCH_PHASE_OPTIMIZER 4

/*
 Anything else.
 */
#define STITCH_PHASE_OTHER 5

/*
 For `stitch_sleep`: contents are kept or not as `stitch_tag_push` said; those of memory without a tag are.
 */
#define STITCH_KEEP_AS_TAGGED -1

/*
 Contents are gone.
 */
#define STITCH_KEEP_NOTHING 0

/*
 Contents are kept in this process's memory.
 */
#define STITCH_KEEP_CONTENTS 1

/*
 A part of an allocation that lies in one chunk of physical memory.
 */
typedef struct stitch_piece {
  /*
   Where it is visible.
   */
  void *address;
  /*
   Its bytes.
   */
  size_t size;
  /*
   Where it begins in the chunk, in bytes.
   */
  size_t offset;
  /*
   The chunk, as the driver calls it (CUmemGenericAllocationHandle, hipMemGenericAllocationHandle_t). Good as long as the allocation lives; whoever needs it
   longer exports or retains it.
   */
  uint64_t handle;
} stitch_piece;

/*
 A live allocation, and what is free beside it in its range of addresses.
 */
typedef struct stitch_block {
  /*
   Where it begins; NULL for none.
   */
  void *address;
  /*
   Bytes that it occupies, which may be some more than were asked for.
   */
  size_t size;
  /*
   Free bytes right before it.
   */
  size_t before;
  /*
   Free bytes right behind it.
   */
  size_t after;
} stitch_block;

/*
 Free bytes on both sides of an allocation.
 */
typedef struct stitch_free_bytes {
  /*
   Right before it.
   */
  size_t before;
  /*
   Right behind it.
   */
  size_t after;
} stitch_free_bytes;

/*
 A range of `stitch_share_create`, `stitch_share_publish` or `stitch_share_attach`.
 */
typedef struct stitch_shared {
  /*
   Where it begins, until `stitch_share_close`.
   */
  void *address;
  /*
   Its bytes: whole chunks.
   */
  size_t size;
  /*
   Bytes that its publisher says mean something; 0 before it is published.
   */
  size_t content;
  /*
   A range that is published later has a larger number; 0 before it is published.
   */
  uint64_t version;
  /*
   The ordinal of its device in this process.
   */
  int device;
  /*
   Not 0 where this process may write it.
   */
  int writable;
  /*
   Not 0 where the driver lets nobody write it any more, in whatever process. Where it is 0 and `writable` is too, nobody is to write it, and each process keeps to that by itself: CUDA and HIP let whoever imports memory choose.
   */
  int sealed;
} stitch_shared;

/*
 A pool for what a captured graph replays, or one that a program made: PyTorch's MempoolId_t, which has these two numbers and is passed the same way.
 */
typedef struct stitch_torch_pool_id {
  /*
   The first number.
   */
  uint64_t first;
  /*
   The second.
   */
  uint64_t second;
} stitch_torch_pool_id;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Allocates `size` bytes on `device`, to be used on `stream` first. The device is the process's own ordinal, as the vendor's library counts in it.

 The address is aligned to 512 bytes. Opens a session with the daemon at the first call; after that most calls take tens of nanoseconds, do not leave the
 process, and take no lock that another process can hold. May be called from any thread, and not from a signal handler; a signal that comes during a call changes nothing.

 Returns NULL when size is 0, which is no failure, and when it fails: then `stitch_last_error` says why. Where memory has run out it says who holds what: this process, and the daemon's other sessions.

 Without a daemon every call fails, at most once a second after a try to find one. With STITCHD_WITHOUT_DAEMON=private in its environment the process takes memory itself instead, with the same behaviour otherwise, from then on
 until it ends, and `stitch_last_error` says so once; STITCHD_DRIVER names the driver then. A daemon that goes away leaves the process with what it has; what needs more waits for the next daemon, as long as it would for memory, and fails then.

 In a child of fork (without exec) every call fails, and frees do nothing. What is live when the process ends, however it ends, goes back to the daemon.
 */
void *stitch_malloc(size_t size,
                    int device,
                    void *stream);

/*
 Gives back what `stitch_malloc` returned, with the same size and device. `stream` is the one that used it last: where that is not the one it was allocated for, its bytes are not reused before that has passed the free, as if it had been
 recorded by `stitch_record_stream`. Only a stitched block, of a job without a plan, is for `stream` at once, which must be behind all that was queued on the block's own stream.

 NULL, and anything that is not a live allocation (freed before, of somebody else, not the first byte of one), changes nothing; for the latter `stitch_last_error` says so.
 */
void stitch_free(void *ptr,
                 size_t size,
                 int device,
                 void *stream);

/*
 Does now what the first allocation would: opens the session with the daemon and reads the plan that STITCHD_PLAN names, and sets `device` up unless that is negative. For whoever has to know before the job begins whether there is a
 daemon, and may go another way.

 Returns 0, or -1 when it fails: then `stitch_last_error` says why. It may be called again; what is there already stays.
 */
int stitch_open(int device);

/*
 Whose memory this process has: the name of the driver of its daemon, or of its own without one; empty as long as there is no session. Memory of the driver `host` is the machine's and not a GPU's.

 Never NULL, and good for ever.
 */
const char *stitch_driver(void);

/*
 `stream` uses the allocation at `ptr`, too: once it is freed its bytes are not reused before `stream` has passed the free. To be called before the free, by whoever queues work on a stream other than the one it
 was allocated for.

 NULL, and anything that is not a live allocation of this process, changes nothing and is no failure.
 */
void stitch_record_stream(const void *ptr,
                          void *stream);

/*
 This thread goes into a part of its job, until `stitch_context_pop`: what it allocates from now on is from there, for plans and recordings. Contexts lie inside each other, and the innermost counts
 alone: what it leaves open is not taken from those around it. Every thread has its own.

 `phase` is one of `STITCH_PHASE_`, and any other number is `STITCH_PHASE_OTHER`. `microbatch` and `chunk` (of the model, in a virtual pipeline) count from 0; -1 is none. `module` is a name in UTF-8,
 which is copied, or NULL for none. `dynamic` is not 0 where the sizes of what is asked for vary from iteration to iteration: no plan has that.

 Takes tens of nanoseconds where the thread was in the same context before, and may be called before the first allocation. More than 256 contexts inside each other count as the innermost of these, and
 `stitch_last_error` says so; each needs its pop all the same.

 # Safety

 `module` is NULL, or ends in NUL.
 */
void stitch_context_push(int phase,
                         int microbatch,
                         int chunk,
                         const char *module,
                         int dynamic);

/*
 This thread leaves the context that it pushed last. Where none is left nothing changes, and `stitch_last_error` says so.
 */
void stitch_context_pop(void);

/*
 An iteration of the job ends on `device`, or with -1 on every device that the process has allocated on: what is asked for from now on is of the next. Frees of what is still live may come in any later one.

 May be called from any thread; one call for each iteration, whichever thread makes it. A device on which nothing was allocated yet has no iterations, and nothing changes. Of a number that no device
 has `stitch_last_error` says so.

 Where STITCHD_ADMIT says how long, this waits until what the next iteration needs at its peak is guaranteed: what its plan has, or what the last iteration held. One that is not admitted in time begins all the same; `stitch_last_error`
 says why, and `iterations_refused` of `stitch_counters` counts it. Each that follows one waits half as long, until one is admitted. A process on several devices marks all at once: two that mark theirs one by one may wait for each other.
 */
void stitch_iteration_mark(int device);

/*
 Has this process guaranteed `size` bytes of a device, in place of what it is guaranteed: what it holds up to there comes when it asks. 0 gives the guarantee up. Waits up to `wait_ms` milliseconds for the guarantees of others to
 end. Sets the device up if that is not done yet.

 Where STITCHD_ADMIT has iterations wait for their peaks, this is the least that stays guaranteed between them; what one is admitted with stays until it ends.

 0, or -1: then `stitch_last_error` says why, with who is guaranteed what, and nothing has changed. More than its tenant may have is refused; so is all where there is no daemon.
 */
int stitch_guarantee(int device,
                     size_t size,
                     uint64_t wait_ms);

/*
 What an allocation of `stitch_malloc` is made of, in the order of addresses, to the end of its block, which is whole chunks for large ones: for libraries that register memory with network cards, or open it in other
 processes, and would see the first chunk only.

 What a live allocation is made of does not change, whatever else this process allocates, frees, stitches or trims: a registration holds until the
 allocation is freed. The next one may have the same address and other chunks: it is asked for, and registered, anew. cuIpcGetMemHandle fails for memory
 that is mapped (VMM), and so for this; the pieces are what can be passed on.

 Writes up to `capacity` pieces to `pieces`, which may be NULL where capacity is 0, and returns how many there are; 0 when it fails: then
 `stitch_last_error` says why.

 # Safety

 `pieces` is aligned for a `stitch_piece` and has room for `capacity` of them.
 */
size_t stitch_range_manifest(const void *ptr,
                             int device,
                             struct stitch_piece *pieces,
                             size_t capacity);

/*
 Why the last call of this thread failed, as text in UTF-8; empty if none has failed yet.

 Never NULL. Good until this thread's next failure.
 */
const char *stitch_last_error(void);

/*
 The statistics of a device as one JSON object, flat, under the names of `torch.cuda.memory_stats` and with their meanings: `"allocated_bytes.all.current"`, `"reserved_bytes.all.peak"`, `"num_ooms"` and so on. All nine figures are there of
 `.all`, `.small_pool` and `.large_pool`, with `.current`, `.peak`, `.allocated` and `.freed`; one pool serves all sizes, so everything is large. An allocation that was freed and waits for other streams
 is active and not allocated, but for the peaks, which are those of `active` for both. The peaks of `allocation` and `active` are the most that this function has told: a count at every allocation would cost more than it says.
 So is what is said of `inactive_split`, with all that came and went there.

 Writes at most `capacity` bytes to `text`, a NUL at the end among them, and returns how many the whole text has without its NUL: one that is cut is asked for again with more room. `text` may be NULL where capacity is 0.
 A device that nothing was allocated on has an empty object. What is under tags is counted with the rest; its peaks are added to the others', whenever they were.

 # Safety

 `text` has room for `capacity` bytes.
 */
size_t stitch_memory_stats(int device,
                           char *text,
                           size_t capacity);

/*
 How much memory this process may have on a device, as `cudaMemGetInfo` says it of the device: `total` is the most that it may hold there (the daemon's budget, the session's limit or the process's own, whichever is least), `unused` what it
 could get beside what it holds now. What the process holds and does not use is not in `unused`. Sets the device up if that is not done yet, and asks the daemon: a round trip.

 Returns 0, or -1 when it fails: then nothing is written, and `stitch_last_error` says why.

 # Safety

 Both pointers have room for their number.
 */
int stitch_memory_info(int device,
                       size_t *unused,
                       size_t *total);

/*
 What the runtime of a device counts as one JSON object: the names and meanings that `stitchd sessions --json` has under `counters`, of this device alone. Among them what served requests (`requests_planned` and so on), `deviations_` from the
 plan by kind, `peak_live_bytes` and `peak_held_bytes`. What is under tags is added, peaks as high as they were whenever that was; `iterations` and what is said of admissions are of the memory without a tag.

 `text` and the result are as for `stitch_memory_stats`.

 # Safety

 `text` has room for `capacity` bytes.
 */
size_t stitch_counters(int device,
                       char *text,
                       size_t capacity);

/*
 One of the statistics of a device by its name, as in `stitch_memory_stats`: -1 where there is no such name, and 0 where nothing was allocated yet.

 # Safety

 `name` ends in NUL.
 */
int64_t stitch_memory_stat(int device,
                           const char *name);

/*
 Peaks of a device are counted anew from now on, as by `torch.cuda.reset_peak_memory_stats`. So are those that the daemon shows for this process.
 */
void stitch_reset_peak_memory_stats(int device);

/*
 What was `allocated` and `freed` so far, and what was counted, is counted anew from now on, as by `torch.cuda.reset_accumulated_memory_stats`.
 */
void stitch_reset_accumulated_memory_stats(int device);

/*
 All memory of a device that this process holds, and what lies where in it, as a JSON list of segments with the keys of `torch.cuda.memory_snapshot()`, by address. Segments are contiguous and mapped.

 Beside PyTorch's keys each has `pool`: `planned`, `pool`, `private`, or `stitched`, and `is_stitched`. One that is stitched is a live allocation at addresses of its own; its memory is that of other segments, whose blocks are
 `inactive` with `"shown": true`. So the sizes of all others together are what is reserved, and active blocks are counted once.

 `text` and the result are as for `stitch_memory_stats`. What other threads do between two calls may make it longer. Takes time proportional to all blocks, and other threads wait for it.

 # Safety

 `text` has room for `capacity` bytes.
 */
size_t stitch_memory_snapshot(int device,
                              char *text,
                              size_t capacity);

/*
 The live allocation that has the byte at `ptr`, wherever in it that is. Its address is NULL where none of this process has it, which is no failure.

 Goes over the allocations that lie side by side before `ptr`, or over all of the pool where stitched
 ones lie between. In the static pool of a plan the time grows with what the plan has in the 2 MiB
 around `ptr`, and the first question of a process goes over the plan once.
 */
struct stitch_block stitch_block_of(const void *ptr);

/*
 The bytes that are free right before and right behind the allocation that has the byte at `ptr`: by so much it could grow if it were alone, and so much would be contiguous with it once it is freed. What is free may be for another
 stream, or planned for somebody. A stitched block's addresses are its own, and nothing is free beside it. 0 and 0 where there is no such allocation.

 Takes as long as `stitch_block_of`; what is free is found in steps as many as the logarithm of the number of free pieces, or one step for each idle block or empty 2 MiB beside it.
 */
struct stitch_free_bytes stitch_adjacent_free_bytes(const void *ptr);

/*
 Live allocations of a device, ranked by what would be contiguous without them, their own bytes and what is free beside them: first those that would make room for `bytes`, the least room first, then the others, the most
 room first. For whoever can give memory up and chooses what.

 Writes up to `capacity` of them to `candidates`, which may be NULL where capacity is 0, and returns how many there are. Takes time proportional to all blocks, and other threads wait for it.

 # Safety

 `candidates` is aligned for a `stitch_block` and has room for `capacity` of them.
 */
size_t stitch_release_candidates(size_t bytes,
                                 int device,
                                 struct stitch_block *candidates,
                                 size_t capacity);

/*
 Memory of at least `size` bytes on `device` at one run of addresses, to be written and then published. It counts against the limit of this process's session. Needs a daemon.

 0 and the range in `range`, or -1: then `stitch_last_error` says why.

 # Safety

 `range` is aligned for a `stitch_shared`, and nobody else uses it meanwhile.
 */
int stitch_share_create(size_t size,
                        int device,
                        struct stitch_shared *range);

/*
 Publishes the range of `stitch_share_create` that begins at `address`, under a name of 1 to 128 bytes, with `content` bytes that mean something. A range that this tenant has published under the name makes way: who holds it
 keeps it. Work that this process has queued is waited for; from then on the range is read where it lies, or, where `writable` is not 0, written by whoever attaches it.

 It outlives its last holder by `linger_ms` milliseconds, as far as the daemon's `linger_max` goes, unless memory that somebody is guaranteed is short. `key` is NULL where sessions of this tenant may attach it, or has
 16 to 64 bytes that whoever attaches it must show.

 0 and what `range` was changed to, or -1: then `stitch_last_error` says why, and the range is as it was, if it is there still (`stitch_share_close` says that).

 # Safety

 `name` ends in NUL; `key` is NULL or has `key_size` bytes; `range` is aligned for a `stitch_shared`, and nobody else uses it meanwhile.
 */
int stitch_share_publish(const void *address,
                         const char *name,
                         size_t content,
                         uint64_t linger_ms,
                         int writable,
                         const void *key,
                         size_t key_size,
                         struct stitch_shared *range);

/*
 Holds the shared range of this name, and maps it here: for reading, and for writing too where it was published so. With a `version` of 0 it is the newest, else exactly that one. It counts against the limit of this process's
 session, as often as the session holds it only once.

 0 and the range in `range`, or -1: then `stitch_last_error` says why. What is not there, what is another tenant's and what has another key are one answer.

 # Safety

 As of `stitch_share_publish`.
 */
int stitch_share_attach(const char *name,
                        uint64_t version,
                        const void *key,
                        size_t key_size,
                        struct stitch_shared *range);

/*
 Unmaps the range that begins at `address`, once its device has done what is queued: a range that was not published is given back, one that was is held no more by this process. The addresses mean nothing any more.

 0, or -1 where no range of this process begins there.
 */
int stitch_share_close(const void *address);

/*
 What this thread allocates from now on is under `tag`, until `stitch_tag_pop`: it lies apart, and can be put to sleep without the rest. With `keep` not 0 its contents are kept when it sleeps. Tags can be inside each other; the innermost counts. Each has
 pools of its own, so a process should have few.

 0, or -1: then `stitch_last_error` says why, and nothing is to be popped.

 # Safety

 `tag` ends in NUL.
 */
int stitch_tag_push(const char *tag,
                    int keep);

/*
 This thread leaves the tag that it pushed last. Where it is under none nothing changes, and `stitch_last_error` says so.
 */
void stitch_tag_pop(void);

/*
 Gives all memory of this process under `tag`, or with NULL all there is, back to the daemon, once the devices have done what is queued. Addresses stay; what is touched before `stitch_wake` is not there, and what is asked for
 meanwhile is refused. Contents of live allocations are kept in this process's memory, or are gone, as `keep` says (STITCH_KEEP_...). Nobody may use the memory while this runs.

 What sleeps already sleeps on. 0 and in `freed`, unless that is NULL, how many bytes of device memory went back; or -1: then `stitch_last_error` says why, and what was asleep by then is.

 Fails while a graph is captured; without a daemon; and on devices whose memory returns with its addresses only.

 # Safety

 `tag` is NULL, or ends in NUL; `freed` is NULL, or aligned and nobody else's.
 */
int stitch_sleep(const char *tag,
                 int keep,
                 size_t *freed);

/*
 Gets memory again for what sleeps under `tag`, or with NULL for all that does, and puts it where it was, with the contents that were kept; what was not kept is undefined, and never another process's. Waits its turn for memory that others have, for `wait_ms`
 milliseconds at most.

 What is awake stays so. 0, or -1: then `stitch_last_error` says why, with who has the memory, and what is not awake by then sleeps on and can be woken later.

 # Safety

 `tag` is NULL, or ends in NUL.
 */
int stitch_wake(const char *tag,
                uint64_t wait_ms);

/*
 `stitch_malloc` for PyTorch, whose callers do not look for NULL: never NULL for a size above 0. When it fails it raises PyTorch's own error, a C++ exception. Where memory has run out Python sees a `torch.OutOfMemoryError`, with a text that begins
 with "CUDA out of memory." (by which training programs know that a smaller batch may help) and goes on with what `stitch_last_error` says; what fails otherwise, as there is no daemon, is a `RuntimeError` that begins with "CUDA memory cannot be had.".

 Between `stitch_torch_begin_allocate_to_pool` and its end it allocates in a pool's own memory, as `stitch_malloc` does, too.

 NULL is returned for a size of 0, and in a process without PyTorch (libc10.so), where there is nothing to raise; then `stitch_last_error` says why.
 */
void *stitch_torch_malloc(size_t size,
                          int device,
                          void *stream);

/*
 For `set_init_fn`: PyTorch begins to use so many devices. Opens nothing: the session with the daemon begins at the first allocation, so a process that allocates nothing has none.
 */
void stitch_torch_init(int device_count);

/*
 For `set_reset_fn`, which `torch.cuda.empty_cache()` calls: waits for what is queued on the devices, and gives all idle memory back to the daemon. Nothing happens while a pool is open (`stitch_torch_begin_allocate_to_pool`):
 waiting would break a capture.
 */
void stitch_torch_reset(void);

/*
 `stitch_free` for whoever caches itself and frees what he wants to be rid of, as PyTorch does with the segments of a pool: as `cudaFree`, it waits for the device. Then what is idle goes back to the daemon. While a graph is captured it does not wait,
 and the memory stays with the process.
 */
void stitch_torch_free_segment(void *ptr,
                               size_t size,
                               int device,
                               void *stream);

/*
 For `set_memory_fraction_fn`: the process holds at most this part of all memory of the device from now on, also where it has not used it yet. Above that, requests that need more fail, after all that is idle was tried.
 What it holds already it keeps. 1 is no limit; what is not between 0 and 1 changes nothing, and `stitch_last_error` says so.
 */
void stitch_torch_memory_fraction(double fraction,
                                  int device);

/*
 For `set_base_alloc_fn`: where the allocation begins that has the byte at `ptr`, and its bytes to `size` unless that is NULL. NULL, and 0, where there is none.

 # Safety

 `size` is NULL, or has room for its number.
 */
void *stitch_torch_base_alloc(void *ptr,
                              size_t *size);

/*
 For `set_record_stream_fn`: `stitch_record_stream`.
 */
void stitch_torch_record_stream(void *ptr, void *stream);

/*
 For `set_begin_allocate_to_pool`: a capture begins, or a program uses a pool of its own. What is allocated from now on, on streams that `filter` accepts in the thread that asks, comes from memory that serves this pool alone. It stays
 at its addresses, and what is freed in it is reused in it only, until the pool is released.

 `filter` is a `std::function<bool(cudaStream_t)>` of libstdc++, by value as C++ passes it, which is a pointer; NULL accepts every stream. It is copied. From `stitch_malloc` it is called without a way to raise;
 from `stitch_torch_malloc` what it raises is passed on.

 While any pool is open nothing of the process waits for the device or asks about events, as a capture would break: frees that wait for other streams (`stitch_record_stream`, and frees on another stream than the allocation's) wait until the last pool is ended.

 # Safety

 `filter` is NULL or such an object, which lives until this returns; what it refers to lives until the pool is ended.
 */
void stitch_torch_begin_allocate_to_pool(int device,
                                         struct stitch_torch_pool_id pool,
                                         const void *filter);

/*
 For `set_end_allocate_to_pool_fn`: what is allocated from now on goes where it went before. A pool that is not open changes nothing, and `stitch_last_error` says so.
 */
void stitch_torch_end_allocate_to_pool(int device,
                                       struct stitch_torch_pool_id pool);

/*
 For `set_release_pool`: the graph is gone. Once a pool has been released as often as it was begun, and nothing in it is live any more, its memory goes back to the daemon.
 */
void stitch_torch_release_pool(int device,
                               struct stitch_torch_pool_id pool);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STITCH_H */
