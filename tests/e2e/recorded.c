/* Jobs that are recorded (recorder.rs knows what each does, event by event). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stitch.h"

#define MIB ((size_t)1 << 20)

static void expect(int is_so, const char *what) {
    if (!is_so) {
        printf("not so: %s (%s)\n", what, stitch_last_error());
        fflush(stdout);
        _exit(1);
    }
}

static int error_says(const char *words) { return strstr(stitch_last_error(), words) != NULL; }

static void *get(size_t size, size_t stream) {
    void *block = stitch_malloc(size, 0, (void *)stream);
    expect(block != NULL, "memory");
    return block;
}

static void *of_a_thread;

static void *other_thread(void *nothing) {
    stitch_context_push(STITCH_PHASE_BACKWARD, 0, -1, "model.layers.0", 0);
    stitch_free(of_a_thread, 5 * MIB, 0, NULL);
    of_a_thread = get(4000, 0);
    return nothing;
}

static void script(void) {
    pthread_t thread;
    /* Nothing was allocated, so nothing has iterations. */
    stitch_iteration_mark(-1);
    stitch_iteration_mark(0);
    void *a = get(1000, 0);
    stitch_context_push(STITCH_PHASE_FORWARD, 0, -1, "model.layers.0", 0);
    void *b = get(3 * MIB, 7);
    stitch_context_push(STITCH_PHASE_FORWARD, 0, 1, "model.layers.0.experts", 1);
    of_a_thread = get(5 * MIB, 0);
    stitch_context_pop();
    stitch_free(b, 3 * MIB, 0, (void *)7);
    stitch_context_pop();
    expect(*stitch_last_error() == '\0', "nothing was wrong");
    stitch_context_pop();
    expect(error_says("no context of this thread"), "there is none to pop");
    stitch_iteration_mark(0);
    stitch_context_push(99, -1, -1, NULL, 0);
    void *d = get(2000, 0);
    stitch_context_pop();
    expect(pthread_create(&thread, NULL, other_thread, NULL) == 0, "a thread");
    pthread_join(thread, NULL);
    expect(stitch_malloc((size_t)1 << 40, 0, NULL) == NULL, "nobody has so much");
    stitch_iteration_mark(-1);
    stitch_iteration_mark(77);
    expect(error_says("device 77"), "there is none");
    stitch_free(a, 1000, 0, NULL);
    stitch_free(a, 1000, 0, NULL);
    stitch_free(d, 2000, 0, NULL);
}

/* The same again and again, each iteration of 41 events. */
static void iteration(void) {
    void *blocks[20];
    for (size_t at = 0; at < 20; at++) {
        blocks[at] = get(MIB / 4 * (at + 1), 0);
    }
    for (size_t at = 0; at < 20; at++) {
        stitch_free(blocks[at], 0, 0, NULL);
    }
    stitch_iteration_mark(-1);
}

static void forked(void) {
    iteration();
    pid_t child = fork();
    expect(child >= 0, "a fork");
    if (child == 0) {
        stitch_context_push(STITCH_PHASE_FORWARD, 0, 0, "child", 0);
        expect(stitch_malloc(MIB, 0, NULL) == NULL && error_says("forked"), "a child has no memory");
        stitch_iteration_mark(-1);
        stitch_context_pop();
        /* With all that is registered for it. */
        exit(0);
    }
    int status = 1;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child that ends");
    iteration();
}

int main(int count, char **words) {
    expect(count == 2, "which job");
    if (strcmp(words[1], "script") == 0) {
        script();
    } else if (strcmp(words[1], "forked") == 0) {
        forked();
    } else if (strcmp(words[1], "burst") == 0) {
        for (int round = 0; round < 500000; round++) {
            stitch_free(get(1000, 0), 1000, 0, NULL);
        }
    } else if (strcmp(words[1], "refused") == 0) {
        expect(stitch_malloc(MIB, 0, NULL) == NULL, "it is not recorded, and not served");
        expect(error_says("STITCHD_RECORD: /nowhere/"), "and says why");
    } else {
        for (int round = 0; round < 50; round++) {
            iteration();
        }
        puts("begun");
        fflush(stdout);
        for (;;) {
            iteration();
            usleep(1000);
        }
    }
    puts("fine");
    return 0;
}
