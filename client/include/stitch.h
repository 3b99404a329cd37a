/* The C contract of libstitchd_client. Written by cbindgen from client/src/ffi.rs; `cargo test -p stitchd-client` holds it. */

#ifndef STITCH_H
#define STITCH_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Allocates `size` bytes on `device`, to be used on `stream` first.

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
 Why the last call of this thread failed, as text in UTF-8; empty if none has failed yet.

 Never NULL. Good until this thread's next failure.
 */
const char *stitch_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* STITCH_H */
