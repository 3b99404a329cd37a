/* Calls the hooks as PyTorch does, through function pointers of its types, and says what came of it. */
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "stitch.h"

typedef void *Stream;
typedef std::pair<unsigned long long, unsigned long long> PoolId;
typedef std::function<bool(Stream)> Filter;

static const size_t MIB = 1u << 20;
static const Stream DEFAULT = nullptr, SIDE = reinterpret_cast<Stream>(16);

/* PyTorch is given addresses, and believes what they are. */
template <class Of> static Of *as(void (*hook)()) { return reinterpret_cast<Of *>(hook); }
#define HOOK(type, name) as<type>(reinterpret_cast<void (*)()>(name))

static void check(bool holds, const char *what) {
    if (holds) return;
    std::printf("wrong: %s (%s)\n", what, stitch_last_error());
    std::exit(1);
}

static char *ask(size_t size, Stream stream) {
    char *got = static_cast<char *>(stitch_torch_malloc(size, 0, stream));
    check(got != nullptr, "an allocation");
    return got;
}

static int alive = 0;
/* Large enough that std::function keeps it elsewhere, and counted. */
struct Large {
    std::array<long, 8> room{};
    Large() { alive++; }
    Large(const Large &) { alive++; }
    ~Large() { alive--; }
    bool operator()(Stream stream) const { return stream == SIDE; }
};

int main() {
    auto begin = HOOK(void(int, PoolId, Filter), stitch_torch_begin_allocate_to_pool);
    auto end = HOOK(void(int, PoolId), stitch_torch_end_allocate_to_pool);
    auto release = HOOK(void(int, PoolId), stitch_torch_release_pool);
    HOOK(void(int), stitch_torch_init)(1);

    const PoolId graph(7, 0), mine(0, 3);
    begin(0, graph, Large());
    check(alive == 1, "one copy of the filter is kept");
    char *inside = ask(3 * MIB, SIDE), *outside = ask(3 * MIB, DEFAULT);
    size_t size = 0;
    auto base = HOOK(void *(void *, size_t *), stitch_torch_base_alloc);
    check(base(inside + MIB, &size) == inside && size == 3 * MIB, "the base of an inner address");
    check(!base(&size, &size) && size == 0 && !base(nullptr, nullptr), "what is not ours has no base");
    stitch_free(inside, 3 * MIB, 0, SIDE);
    check(ask(3 * MIB, SIDE) == inside, "what is freed in a pool serves it again");
    check(static_cast<char *>(stitch_malloc(MIB, 0, SIDE)) != nullptr, "plain C allocates there, too");
    /* Freed while another stream uses it: that is not asked about now. */
    HOOK(void(void *, Stream), stitch_torch_record_stream)(inside, DEFAULT);
    HOOK(void(void *, Stream), stitch_torch_record_stream)(nullptr, DEFAULT);
    stitch_free(inside, 3 * MIB, 0, SIDE);
    char *other = ask(3 * MIB, SIDE);
    check(other != inside, "bytes that another stream may use are not reused");
    std::memset(other, 1, 3 * MIB);
    end(0, graph);
    check(alive == 0, "the filter is dropped with the end");
    for (int i = 0; i < 4; i++) {
        char *eager = ask(3 * MIB, SIDE);
        check(eager != inside && eager != other, "nobody else gets the memory of a graph");
        std::memset(eager, 2, 3 * MIB);
        stitch_free(eager, 3 * MIB, 0, SIDE);
    }
    check(other[0] == 1 && other[3 * MIB - 1] == 1, "it stays as it was");
    stitch_free(other, 3 * MIB, 0, SIDE);
    stitch_free(outside, 3 * MIB, 0, DEFAULT);

    /* A second capture into the same pool, with a small filter; then one that raises. */
    begin(0, graph, [](Stream) { return true; });
    char *again = ask(3 * MIB, SIDE);
    check(again == inside || again == other, "a pool that is begun again has its memory");
    stitch_free(again, 3 * MIB, 0, SIDE);
    end(0, graph);
    begin(0, mine, [](Stream) -> bool { throw std::logic_error("no such stream"); });
    try {
        ask(MIB, SIDE);
        check(false, "a filter raised");
    } catch (const std::logic_error &error) {
        std::printf("caught: %s\n", error.what());
    }
    end(0, mine);
    begin(0, mine, Filter());
    stitch_free(ask(MIB, DEFAULT), MIB, 0, DEFAULT);
    end(0, mine);
    end(0, mine);
    check(std::strstr(stitch_last_error(), "0.3 of device 0 is not open"), "an end too many is told");

    release(0, mine), release(0, mine), release(0, graph), release(0, graph);
    HOOK(void(), stitch_torch_reset)();
    std::printf("reset\n");
    std::fflush(stdout);
    std::getchar();

    auto fraction = HOOK(void(double, int), stitch_torch_memory_fraction);
    fraction(0.5, 0);
    void *refused = stitch_malloc(40 * MIB, 0, DEFAULT);
    check(!refused && std::strstr(stitch_last_error(), "a limit of 32.0 MiB on this device"), "a limit holds");
    char *less = ask(20 * MIB, DEFAULT);
    stitch_free(less, 20 * MIB, 0, DEFAULT);
    fraction(2.0, 0);
    check(std::strstr(stitch_last_error(), "2 is no fraction"), "what is no fraction is told");
    fraction(1.0, 0);
    check(stitch_malloc(40 * MIB, 0, DEFAULT), "no limit any more");
    std::printf("fine\n");
    return 0;
}
