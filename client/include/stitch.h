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

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Allocates `size` bytes on `device`, to be used on `stream` first. The device is the process's own ordinal, as the vendor's library counts in it.

 The address is aligned to 512 bytes. Opens a session with the daemon at the first call; after that most calls take tens of nanoseconds, do not leave the
 process, and take no lock that another process can hold. May be called from any thread.

 Returns NULL when size is 0, which is no failure, and when it fails: then `stitch_last_error` says why.
 */
void *stitch_malloc(size_t size,
                    int device,
                    void *stream);

/*
 Gives back what `stitch_malloc` returned, with the same size, device and stream.

 NULL, and anything that is not a live allocation, changes nothing; for the latter `stitch_last_error` says so.
 */
void stitch_free(void *ptr,
                 size_t size,
                 int device,
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
 */
void stitch_iteration_mark(int device);

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
 `stitch_malloc` for PyTorch, whose callers do not look for NULL: never NULL for a size above 0. When it fails it raises PyTorch's own error, a C++ exception that Python sees as a RuntimeError, with a text that begins
 with "CUDA out of memory." (by which training programs know that a smaller batch may help) and goes on with what `stitch_last_error` says.

 NULL is returned for a size of 0, and in a process without PyTorch (libc10.so), where there is nothing to raise; then `stitch_last_error` says why.
 */
void *stitch_torch_malloc(size_t size,
                          int device,
                          void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STITCH_H */
