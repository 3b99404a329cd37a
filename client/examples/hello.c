/*
 * Leases memory from a running stitchd daemon and gives it back.
 *
 *   stitchd serve --driver host --runtime-dir /tmp/stitchd &
 *   cargo build --release
 *   cc -Iclient/include client/examples/hello.c -Ltarget/release -lstitchd_client -o hello
 *   STITCHD_RUNTIME_DIR=/tmp/stitchd LD_LIBRARY_PATH=target/release ./hello
 */
#include <stdio.h>
#include <string.h>

#include "stitch.h"

int main(void) {
    const size_t size = 64u << 20;
    char *memory = stitch_malloc(size, 0, NULL);
    if (memory == NULL) {
        fprintf(stderr, "stitch_malloc: %s\n", stitch_last_error());
        return 1;
    }
    /* On the host driver device memory is ordinary memory. */
    memset(memory, 0x5a, size);
    printf("%zu bytes at a multiple of 512: %s\n", size, (size_t)memory % 512 == 0 ? "yes" : "no");
    stitch_free(memory, size, 0, NULL);
    return 0;
}
