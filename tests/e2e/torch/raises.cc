/* Allocates as PyTorch does, and shows what is caught. The first argument is the library that stands for libc10.so, if there is one. */
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>

#include "c10.h"
#include "stitch.h"

static const size_t MIB = 1u << 20;

static void ask(size_t size) {
    try {
        void *got = stitch_torch_malloc(size, 0, nullptr);
        std::printf("%s\n", got ? "served" : "NULL");
        if (got) stitch_free(got, size, 0, nullptr);
    } catch (const c10::OutOfMemoryError &error) {
        std::printf("caught as out of memory: %s\n", error.what());
    } catch (const std::runtime_error &error) {
        std::printf("caught: %s\n", error.what());
    }
}

int main(int count, char **words) {
    /* As Python loads it: nobody sees its symbols who does not ask that library. */
    if (count > 1 && !dlopen(words[1], RTLD_NOW | RTLD_LOCAL)) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    ask(0);
    ask(MIB);
    for (int i = 0; i < 3; i++) ask(1000 * MIB);
    ask(MIB);
    std::printf("last error: %s\n", stitch_last_error());
    return 0;
}
