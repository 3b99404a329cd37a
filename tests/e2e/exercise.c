/*
 * Everything that a program can do at the C border, right and wrong, for a checker of memory to watch.
 *
 *   exercise without    there is no daemon: every call fails, and says why
 *   exercise with       there is one: sizes, threads, frees from elsewhere, a fork
 *   exercise wrong      reads behind a block and loses another, so that the checker shows that it looks
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stitch.h"

#define MIB ((size_t)1 << 20)
#define THREADS 2
#define ROUNDS 40

static void expect(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s; last error: %s\n", what, stitch_last_error());
        exit(1);
    }
}

/* The text of the last failure is read to its end: the checker sees every byte. */
static int error_says(const char *words) {
    const char *why = stitch_last_error();
    return why != NULL && strlen(why) < 1000 && strstr(why, words) != NULL;
}

static void nonsense(void) {
    expect(stitch_malloc(0, 0, NULL) == NULL, "nothing is no allocation");
    stitch_free(NULL, 0, 0, NULL);
    stitch_free(NULL, 7, -1, NULL);
    stitch_free((void *)4096, 1, -1, NULL);
    stitch_free((void *)4096, 1, 0, NULL);
    expect(stitch_malloc(1, -1, NULL) == NULL && error_says("device -1"), "there is no device -1");
    expect(stitch_malloc(1, 1000, NULL) == NULL && error_says("device 1000"), "there is no device 1000");
    stitch_context_pop();
    expect(error_says("no context of this thread"), "there is nothing to pop");
    stitch_iteration_mark(-1);
    stitch_iteration_mark(-2);
    expect(error_says("device -2"), "there is no device -2");
    for (int depth = 0; depth < 300; depth++) {
        stitch_context_push(depth, depth - 1, -depth, depth % 2 == 0 ? NULL : "a \xff b", depth);
    }
    expect(error_says("more than 256 contexts"), "that is too deep");
    for (int depth = 0; depth < 300; depth++) {
        stitch_context_pop();
    }
}

static void *fails(void *unused) {
    (void)unused;
    /* The last error is the thread's own, and goes with it. */
    expect(*stitch_last_error() == '\0', "nothing has failed here yet");
    for (int round = 0; round < ROUNDS; round++) {
        expect(stitch_malloc(MIB, 0, NULL) == NULL && error_says("no stitchd daemon"), "there is no daemon");
    }
    return NULL;
}

static void without_daemon(void) {
    pthread_t threads[THREADS];
    nonsense();
    for (int at = 0; at < THREADS; at++) {
        expect(pthread_create(&threads[at], NULL, fails, NULL) == 0, "a thread");
    }
    for (int at = 0; at < THREADS; at++) {
        pthread_join(threads[at], NULL);
    }
}

static const size_t SIZES[] = {1, 511, 512, 513, 1000, 4096, 65537, MIB - 1, MIB, 2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB + 512};
#define COUNT (sizeof SIZES / sizeof SIZES[0])

static void sizes(void) {
    unsigned char *blocks[COUNT];
    for (size_t at = 0; at < COUNT; at++) {
        blocks[at] = stitch_malloc(SIZES[at], 0, NULL);
        expect(blocks[at] != NULL, "memory");
        expect((size_t)blocks[at] % 512 == 0, "alignment");
        memset(blocks[at], (int)at + 1, SIZES[at]);
    }
    for (size_t at = 0; at < COUNT; at++) {
        expect(blocks[at][0] == at + 1 && blocks[at][SIZES[at] - 1] == at + 1, "what was written is there");
        /* Every other one now, the rest from behind. */
        if (at % 2 == 0) {
            stitch_free(blocks[at], SIZES[at], 0, NULL);
        }
    }
    for (size_t at = COUNT; at-- > 0;) {
        if (at % 2 == 1) {
            stitch_free(blocks[at], SIZES[at], 0, NULL);
        }
    }
    stitch_free(blocks[3], SIZES[3], 0, NULL);
    expect(error_says("is not a live allocation"), "twice is once too often");
    expect(stitch_malloc((size_t)1 << 45, 0, NULL) == NULL && *stitch_last_error() != '\0', "more than there is");
    expect(stitch_malloc((size_t)-1, 0, NULL) == NULL && *stitch_last_error() != '\0', "more than anything");
}

/* Blocks that one thread allocates and another frees. */
static void *handed[THREADS][ROUNDS];

static void *works(void *number) {
    size_t self = (size_t)number;
    for (int round = 0; round < ROUNDS; round++) {
        size_t size = SIZES[(self * 5 + (size_t)round) % COUNT];
        unsigned char *block = stitch_malloc(size, 0, (void *)(self + 1));
        expect(block != NULL, "memory for a thread");
        block[0] = block[size - 1] = (unsigned char)self;
        if (round % 3 == 0 && size < MIB) {
            handed[self][round] = block;
            continue;
        }
        expect(block[0] == self && block[size - 1] == self, "nobody else writes here");
        stitch_free(block, size, 0, (void *)(self + 1));
    }
    return NULL;
}

static void threads(void) {
    pthread_t threads[THREADS];
    for (size_t at = 0; at < THREADS; at++) {
        expect(pthread_create(&threads[at], NULL, works, (void *)at) == 0, "a thread");
    }
    for (size_t at = 0; at < THREADS; at++) {
        pthread_join(threads[at], NULL);
        for (int round = 0; round < ROUNDS; round++) {
            stitch_free(handed[at][round], 1, 0, NULL);
        }
    }
}

static void forked(void) {
    void *block = stitch_malloc(MIB, 0, NULL);
    expect(block != NULL, "memory before a fork");
    pid_t child = fork();
    expect(child >= 0, "a fork");
    if (child == 0) {
        stitch_free(block, MIB, 0, NULL);
        int is_right = stitch_malloc(MIB, 0, NULL) == NULL && error_says("forked");
        /* Not by exit: what its parent's threads had is lost here, and right so. */
        execlp(is_right ? "true" : "false", "child", (char *)NULL);
        _exit(1);
    }
    int status = 1;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child without memory");
    memset(block, 1, MIB);
    stitch_free(block, MIB, 0, NULL);
}

static void wrong(void) {
    /* The compiler, too, would see it. */
    volatile size_t size = 16;
    volatile char *block = calloc(1, size);
    volatile char behind = block[size];
    (void)behind;
    block = malloc(2 * size);
    block = NULL;
}

int main(int count, char **words) {
    expect(count == 2, "with, without or wrong");
    if (strcmp(words[1], "without") == 0) {
        without_daemon();
    } else if (strcmp(words[1], "with") == 0) {
        nonsense();
        sizes();
        threads();
        forked();
    } else {
        wrong();
    }
    puts("fine");
    return 0;
}
