/* Waiting for the ranks of a host, and the all-reduce of small tensors, in the memory that these ranks share.
 *
 * A rank writes into its slot, stores the number of the stage into its mark, and waits until the marks of all have that
 * number; then it may read all slots of that stage. Each rank has two slots, one for even stages and one for odd ones:
 * who has come to a stage has read all that belongs to the one before.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FUTEX_WAIT 0 /* not the private ones: the waiting are other processes */
#define FUTEX_WAKE 1
#define SPINS 300
#define YIELDS 30

struct mark {
    uint32_t stage;
    uint32_t sleepers;
};

/* As `Layout` in memory.py has it. */
struct group {
    char *places; /* one for each rank, which begins with its mark */
    char *slots;
    int64_t place_bytes;
    int64_t slot_bytes;
    int64_t note_bytes;
    int64_t head_at; /* where a place keeps the head of the last note */
    int32_t size;
    int32_t rank;
};

static struct mark *mark_of(const struct group *g, int rank) {
    return (struct mark *)(g->places + rank * g->place_bytes);
}

static char *slot_of(const struct group *g, int rank, uint32_t stage) {
    return g->slots + (2 * rank + (stage & 1)) * g->slot_bytes;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pause_a_little(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

void shardwright_arrive(const struct group *g, uint32_t stage) {
    struct mark *mine = mark_of(g, g->rank);
    __atomic_store_n(&mine->stage, stage, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&mine->sleepers, __ATOMIC_SEQ_CST)) {
        syscall(SYS_futex, &mine->stage, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static void sleep_on(struct mark *mark, uint32_t seen, int64_t ns) {
    struct timespec left = {ns / 1000000000LL, ns % 1000000000LL};
    __atomic_add_fetch(&mark->sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &mark->stage, FUTEX_WAIT, seen, &left, NULL, 0);
    __atomic_sub_fetch(&mark->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* 1 when all have come to the stage, 0 when the time is over before. */
int shardwright_wait(const struct group *g, uint32_t stage, int64_t timeout_ns) {
    int64_t end_ns = 0;
    for (int rank = 0; rank < g->size; rank++) {
        struct mark *mark = mark_of(g, rank);
        for (int turn = 0;; turn++) {
            uint32_t seen = __atomic_load_n(&mark->stage, __ATOMIC_SEQ_CST);
            if ((int32_t)(seen - stage) >= 0) break;
            if (timeout_ns <= 0) return 0;
            if (turn < SPINS) {
                pause_a_little();
                continue;
            }
            if (turn < SPINS + YIELDS) {
                sched_yield();
                continue;
            }
            if (!end_ns) end_ns = now_ns() + timeout_ns;
            int64_t left_ns = end_ns - now_ns();
            if (left_ns <= 0) return 0;
            sleep_on(mark, seen, left_ns);
        }
    }
    return 1;
}

/* The first part and another into the result: in the order of the ranks, so that all compute the same. */
#define REDUCE(type, expression)                                                    \
    for (int rank = 1; rank < g->size; rank++) {                                    \
        const type *first = rank == 1 ? (const type *)parts[0] : (const type *)out; \
        const type *other = (const type *)parts[rank];                              \
        type *result = (type *)out;                                                 \
        for (int64_t i = 0; i < count; i++) {                                       \
            type a = first[i], b = other[i];                                        \
            result[i] = (expression);                                               \
        }                                                                           \
    }
#define DIVIDE(type) \
    for (int64_t i = 0; i < count; i++) ((type *)out)[i] /= (type)g->size;

enum { SUM, PRODUCT, MAX, MIN, AVERAGE };

/* Not a number wins, as it does in torch. */
#define FLOATS(type)                                          \
    switch (operation) {                                      \
        case SUM: REDUCE(type, a + b) break;                  \
        case PRODUCT: REDUCE(type, a * b) break;              \
        case MAX: REDUCE(type, a != a || a > b ? a : b) break; \
        case MIN: REDUCE(type, a != a || a < b ? a : b) break; \
        case AVERAGE: REDUCE(type, a + b) DIVIDE(type) break; \
    }
/* Sums and products of integers are those of their bits, which overflow without harm where they have no sign. */
#define INTEGERS(type, bits)                                              \
    switch (operation) {                                                  \
        case SUM: REDUCE(type, (type)((bits)a + (bits)b)) break;          \
        case PRODUCT: REDUCE(type, (type)((bits)a * (bits)b)) break;      \
        case MAX: REDUCE(type, a > b ? a : b) break;                      \
        case MIN: REDUCE(type, a < b ? a : b) break;                      \
    }

/* 1 when the data are reduced, 0 when the time is over before all have come, 2 where the notes of two ranks differ.
 * Called again with posted set where it has answered 0. */
int shardwright_all_reduce(const struct group *g, uint32_t stage, int posted, const char *note, int64_t head_bytes,
                           char *out, int64_t bytes, int64_t count, int type, int operation, int64_t timeout_ns) {
    char *mine = slot_of(g, g->rank, stage);
    if (!posted) {
        memcpy(g->places + g->rank * g->place_bytes + g->head_at, note, head_bytes);
        memcpy(mine, note, head_bytes);
        memcpy(mine + g->note_bytes, out, bytes);
        shardwright_arrive(g, stage);
    }
    if (!shardwright_wait(g, stage, timeout_ns)) return 0;
    const char *parts[g->size];
    for (int rank = 0; rank < g->size; rank++) {
        if (memcmp(slot_of(g, rank, stage), mine, head_bytes)) return 2;
        parts[rank] = slot_of(g, rank, stage) + g->note_bytes;
    }
    switch (type) {
        case 0: FLOATS(float) break;
        case 1: FLOATS(double) break;
        case 2: INTEGERS(int32_t, uint32_t) break;
        case 3: INTEGERS(int64_t, uint64_t) break;
    }
    return 1;
}
