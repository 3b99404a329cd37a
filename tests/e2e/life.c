/* Processes that end, or go on, in the middle of something. The first argument says in the middle of what. */
#define _XOPEN_SOURCE 700
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "stitch.h"

#define MIB ((size_t)1 << 20)
#define THREADS 1000

static void *kept;

static void die(const char *what) {
    printf("wrong: %s: %s\n", what, stitch_last_error());
    fflush(stdout);
    _exit(1);
}

static void *ask(size_t size) {
    void *got = stitch_malloc(size, 0, NULL);
    if (!got) die("an allocation");
    return got;
}

/* Tensors are freed by handlers that run at the very end. */
static void free_late(void) { stitch_free(kept, 3 * MIB, 0, NULL); }

static pthread_barrier_t barrier;

static void *work(void *number) {
    size_t size = 1000 + 512 * ((size_t)number % 7), i;
    pthread_barrier_wait(&barrier);
    for (i = 0; i < 20; i++) {
        char *got = ask(size);
        memset(got, (int)i, size);
        if (got[0] != (char)i || got[size - 1] != (char)i) die("bytes of its own");
        stitch_free(got, size, 0, NULL);
    }
    return NULL;
}

static void threads(void) {
    static pthread_t all[THREADS];
    pthread_attr_t small;
    size_t i;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (i = 0; i < THREADS; i++) {
        int error = pthread_create(&all[i], &small, work, (void *)i);
        if (error) die(strerror(error));
    }
    for (i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
}

static volatile sig_atomic_t rang;
static void ring(int number) { rang += number == SIGALRM; }

/* Signals without SA_RESTART, all the time: every wait is cut short again and again. */
static void signals(void) {
    struct sigaction action;
    struct itimerval often = {{0, 500}, {0, 500}};
    int i;
    memset(&action, 0, sizeof action);
    action.sa_handler = ring;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (i = 0; i < 50 || rang < 100; i++) {
        size_t size = (size_t)(1 + i % 40) * MIB;
        char *got = ask(size);
        memset(got, 1, 4096);
        stitch_free(got, size, 0, NULL);
    }
}

/* All that a thread may call, in a destructor that runs when the library's own thread-locals are gone. */
static void use_late(void *rounds) {
    struct stitch_block block;
    void *got, *more;
    if (stitch_context_push(STITCH_PHASE_FORWARD, -1, -1, "late", 0), stitch_tag_push("late", 0) != 0) stitch_tag_pop();
    got = ask((size_t)rounds * 24 * MIB);
    memset(got, 1, 4096);
    more = ask(2 * MIB);
    stitch_free(more, 2 * MIB, 0, NULL);
    block = stitch_block_of(got);
    if (block.address != got) die("a block that is found");
    stitch_free(got, (size_t)rounds * 24 * MIB, 0, NULL);
    stitch_free(got, 0, 0, NULL);
    if (!stitch_last_error()) die("an error");
    stitch_context_pop();
    stitch_tag_pop();
    stitch_iteration_mark(0);
    if (stitch_memory_stat(0, "allocated_bytes.all.current") < 0) die("statistics");
}

static void use_at_exit(void) { use_late((void *)3); }

static pthread_key_t late;

static void *end_late(void *uses) {
    if (uses) stitch_free(ask(MIB), MIB, 0, NULL);
    stitch_context_push(STITCH_PHASE_BACKWARD, 0, 0, "early", 0);
    pthread_setspecific(late, uses ? (void *)2 : (void *)1);
    return NULL;
}

/* Threads that grow the process in their last moments, those that have used the library before and others. */
static void ends(void) {
    pthread_t thread;
    size_t uses;
    atexit(use_at_exit);
    if (pthread_key_create(&late, use_late)) die("a key");
    for (uses = 0; uses < 2; uses++) {
        if (pthread_create(&thread, NULL, end_late, (void *)uses)) die("a thread");
        pthread_join(thread, NULL);
    }
    stitch_free(ask(60 * MIB), 60 * MIB, 0, NULL);
}

/* Who waits for signals in a place of its own blocks them elsewhere, and gets all of them. */
static void awaits(void) {
    const struct timespec moment = {0, 300000000};
    int numbers[] = {SIGUSR1, SIGTERM, SIGHUP, SIGCHLD}, i;
    sigset_t all, waiting;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = ring;
    sigemptyset(&all);
    for (i = 0; i < 4; i++) {
        sigaction(numbers[i], &action, NULL);
        sigaddset(&all, numbers[i]);
    }
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (i = 0; i < 4; i++) kill(getpid(), numbers[i]);
    nanosleep(&moment, NULL);
    sigpending(&waiting);
    for (i = 0; i < 4; i++)
        if (!sigismember(&waiting, numbers[i])) die("a signal that another thread took");
    stitch_free(ask(20 * MIB), 20 * MIB, 0, NULL);
}

static void *wait_for_memory(void *unused) {
    stitch_malloc(40 * MIB, 0, NULL);
    return unused;
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    const struct timespec moment = {0, 200000000};
    pthread_t thread;
    kept = ask(3 * MIB);
    if (!strcmp(what, "live")) atexit(free_late);
    if (!strcmp(what, "threads")) threads();
    if (!strcmp(what, "signals")) signals();
    if (!strcmp(what, "ends")) ends();
    if (!strcmp(what, "awaits")) awaits();
    if (!strcmp(what, "pending")) {
        printf("ready\n");
        fflush(stdout);
        getchar();
        if (pthread_create(&thread, NULL, wait_for_memory, NULL)) die("a thread");
        nanosleep(&moment, NULL);
    }
    if (!strcmp(what, "outlives")) {
        printf("ready\n");
        fflush(stdout);
        getchar();
        /* From what it has. */
        stitch_free(kept, 3 * MIB, 0, NULL);
        kept = ask(3 * MIB);
    }
    if (!strcmp(what, "exec")) execlp("true", "true", (char *)NULL);
    printf("fine\n");
    return 0;
}
