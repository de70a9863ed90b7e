/* Waiting for the ranks of a host, all-reduces, all-gathers and reduce-scatters, in the memory that they share.
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
#define SPIN_NS 1000000 /* a core that has gone to sleep takes some 0.1 ms to wake up, in a virtual machine longer */
#define SPIN_ASIDE_NS 5000
#define GLANCES 32 /* between two looks at the clock */
#define YIELDS 30

struct mark {
    uint32_t stage;
    uint32_t sleepers;
};

/* As `Layout` in memory.py has it. */
struct group {
    char *places; /* one for each rank, which begins with its mark */
    char *slots;
    char *wide; /* larger slots, for all-reduces alone */
    int64_t place_bytes;
    int64_t slot_bytes;
    int64_t note_bytes;
    int64_t wide_bytes;
    int64_t head_at; /* where a place keeps the head of the last note */
    int64_t head_bytes;
    int64_t small_bytes; /* of the parts of all ranks, up to which each rank reads them all in one stage */
    int32_t size;
    int32_t rank;
    int32_t spins; /* whether a rank keeps its core for a while before it gives way to others */
};

static struct mark *mark_of(const struct group *g, int rank) {
    return (struct mark *)(g->places + rank * g->place_bytes);
}

static char *slot_of(const struct group *g, int rank, uint32_t stage) {
    return g->slots + (2 * rank + (stage & 1)) * g->slot_bytes;
}

static char *data_of(const struct group *g, int rank, uint32_t stage) {
    return slot_of(g, rank, stage) + g->note_bytes;
}

static char *wide_of(const struct group *g, int rank, uint32_t stage) {
    return g->wide + (2 * rank + (stage & 1)) * g->wide_bytes;
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
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

/* For how long a waiting thread keeps its core. */
static __thread int64_t spin_ns = SPIN_NS;

/* From now on this thread waits beside another one of its rank, which computes. */
void shardwright_wait_aside(void) {
    spin_ns = SPIN_ASIDE_NS;
}

static void sleep_on(struct mark *mark, uint32_t seen, int64_t ns) {
    struct timespec left = {ns / 1000000000LL, ns % 1000000000LL};
    __atomic_add_fetch(&mark->sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &mark->stage, FUTEX_WAIT, seen, &left, NULL, 0);
    __atomic_sub_fetch(&mark->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* 1 when all have come to the stage, 0 when the time is over before. */
int shardwright_wait(const struct group *g, uint32_t stage, int64_t timeout_ns) {
    int64_t end_ns = 0, spun_ns = 0;
    int spins = g->spins;
    for (int rank = 0; rank < g->size; rank++) {
        struct mark *mark = mark_of(g, rank);
        for (int turn = 0, yields = 0;; turn++) {
            uint32_t seen = __atomic_load_n(&mark->stage, __ATOMIC_SEQ_CST);
            if ((int32_t)(seen - stage) >= 0) break;
            if (timeout_ns <= 0) return 0;
            if (spins && turn % GLANCES == 0) {
                int64_t now = now_ns();
                if (!spun_ns) spun_ns = now + spin_ns;
                spins = now < spun_ns;
            }
            if (spins) {
                pause_a_little();
                continue;
            }
            if (yields++ < YIELDS) {
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

/* --- reducing */

enum { SUM, PRODUCT, MAX, MIN, AVERAGE, GATHER };

/* The result may be what is reduced, element by element: the compiler need not look out for more. */
#if defined(__clang__)
#define BY_ELEMENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define BY_ELEMENT _Pragma("GCC ivdep")
#endif
/* The first part and another into the result: in the order of the ranks, so that all compute the same. */
#define REDUCE(type, expression)                                                    \
    for (int rank = 1; rank < size; rank++) {                                       \
        const type *first = rank == 1 ? (const type *)parts[0] : (const type *)out; \
        const type *other = (const type *)parts[rank];                              \
        type *result = (type *)out;                                                 \
        BY_ELEMENT                                                                  \
        for (int64_t i = 0; i < count; i++) {                                       \
            type a = first[i], b = other[i];                                        \
            result[i] = (expression);                                               \
        }                                                                           \
    }
#define DIVIDE(type) \
    for (int64_t i = 0; i < count; i++) ((type *)out)[i] /= (type)size;

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

static const int64_t WIDTHS[] = {4, 8, 4, 8, 1};

/* The parts of all ranks into out. */
static void reduce(const char *const *parts, int size, char *out, int64_t count, int type, int operation) {
    if (size == 1 && out != parts[0]) memcpy(out, parts[0], count * WIDTHS[type]);
    switch (type) {
        case 0: FLOATS(float) break;
        case 1: FLOATS(double) break;
        case 2: INTEGERS(int32_t, uint32_t) break;
        case 3: INTEGERS(int64_t, uint64_t) break;
    }
}

/* --- collectives, in steps each of which ends with a stage */

/* SMALL: one step, in which each rank reads the parts of all. SLICES: they go through the wide slots chunk by chunk; each
 * rank reduces a slice of each chunk, and the others take that from it one step later.
 *
 * GATHERED and SCATTERED: parts, or rows of parts, go through the slots chunk by chunk, as the steps in Python have them.
 */
enum { SMALL, SLICES, GATHERED, SCATTERED };
enum { WAITING, DONE, DIFFER };
#define BLOCK_BYTES (1 << 13) /* reduced at a time, which stay in the nearest cache */

struct collective {
    const char *head;
    int64_t note_bytes; /* of the head and what stands behind it, on which all must agree */
    const char *own;    /* what this rank gives */
    char *data;         /* where the result goes, which is the same for a large all-reduce */
    int64_t count;      /* of what each gives, or gets where it gives a row to each */
    int32_t type;
    int32_t operation;
    int64_t step;
    uint32_t stage; /* to which this rank has come */
    int32_t way;
    int32_t waits; /* whether it waits for others there */
    int32_t scatters;
};

/* Which elements of a chunk, or of the whole, are those of a rank. */
static int64_t slice_start(int64_t count, int rank, int size) {
    return count * rank / size;
}

/* Bytes of the largest slice of a chunk, of which a wide slot has room for all, and for a reduced one behind them. */
static int64_t slice_room(const struct group *g) {
    return g->wide_bytes / (g->size + 1) / 64 * 64;
}

static char *reduced_slice(const struct group *g, int rank, uint32_t stage) {
    return wide_of(g, rank, stage) + slice_room(g) * g->size;
}

/* The chunk of a step: its elements, 0 behind the last one. */
static int64_t chunk(const struct group *g, const struct collective *r, int64_t step, int64_t *start) {
    int64_t most = slice_room(g) * g->size / WIDTHS[r->type];
    *start = step * most;
    return *start < r->count ? least(most, r->count - *start) : 0;
}

/* The slices that others reduce of a chunk, into the slot for the next stage. */
static void put(const struct group *g, const struct collective *r, int64_t start, int64_t count) {
    int64_t width = WIDTHS[r->type], first = slice_start(count, g->rank, g->size) * width;
    int64_t last = slice_start(count, g->rank + 1, g->size) * width;
    char *to = wide_of(g, g->rank, r->stage + 1), *from = r->data + start * width;
    memcpy(to, from, first);
    memcpy(to + last, from + last, count * width - last);
}

/* This rank's slice of a chunk, reduced, for itself and into the slot for the next stage. */
static void take(const struct group *g, const struct collective *r, int64_t start, int64_t count) {
    int64_t width = WIDTHS[r->type], first = slice_start(count, g->rank, g->size);
    int64_t own = slice_start(count, g->rank + 1, g->size) - first, most = BLOCK_BYTES / width;
    char *mine = r->data + (start + first) * width, *reduced = reduced_slice(g, g->rank, r->stage + 1);
    const char *parts[g->size];
    for (int64_t at = 0; at < own; at += most) {
        int64_t some = least(most, own - at);
        for (int rank = 0; rank < g->size; rank++) parts[rank] = wide_of(g, rank, r->stage) + (first + at) * width;
        parts[g->rank] = mine + at * width;
        reduce(parts, g->size, reduced + at * width, some, r->type, r->operation);
        memcpy(mine + at * width, reduced + at * width, some * width);
    }
}

/* The slices of a chunk that others have reduced. */
static void collect(const struct group *g, const struct collective *r, int64_t start, int64_t count) {
    int64_t width = WIDTHS[r->type];
    for (int rank = 0; rank < g->size; rank++) {
        int64_t first = slice_start(count, rank, g->size), last = slice_start(count, rank + 1, g->size);
        if (rank != g->rank) {
            memcpy(r->data + (start + first) * width, reduced_slice(g, rank, r->stage), (last - first) * width);
        }
    }
}

/* Bytes of a part, or of a row of it, that go through a slot at a time. */
static int64_t rows_room(const struct group *g, const struct collective *r) {
    int64_t room = g->slot_bytes - g->note_bytes;
    return r->way == SCATTERED ? room / g->size / 64 * 64 : room;
}

/* The bytes of a step: how many, and from where; 0 behind the last one. */
static int64_t rows_chunk(const struct group *g, const struct collective *r, int64_t *start) {
    int64_t bytes = r->count * WIDTHS[r->type], room = rows_room(g, r);
    *start = r->step * room;
    return *start < bytes ? least(room, bytes - *start) : 0;
}

/* What others read of this rank, into the slot for the next stage; 0 where that was all. */
static int put_rows(const struct group *g, const struct collective *r) {
    int64_t bytes = r->count * WIDTHS[r->type], room = rows_room(g, r), start, some = rows_chunk(g, r, &start);
    char *to = data_of(g, g->rank, r->stage + 1);
    if (r->way == GATHERED) memcpy(to, r->own + start, some);
    for (int rank = 0; r->way == SCATTERED && rank < g->size; rank++) {
        if (rank != g->rank) memcpy(to + rank * room, r->own + rank * bytes + start, some);
    }
    return some || r->step == 0;
}

static void gather_rows(const struct group *g, const struct collective *r) {
    int64_t bytes = r->count * WIDTHS[r->type], start, some = rows_chunk(g, r, &start);
    for (int rank = 0; rank < g->size; rank++) {
        memcpy(r->data + rank * bytes + start, data_of(g, rank, r->stage), some);
    }
}

/* A chunk of this rank's row, of which others have theirs in the slots. */
static void reduce_row(const struct group *g, const struct collective *r) {
    int64_t width = WIDTHS[r->type], room = rows_room(g, r), start, some = rows_chunk(g, r, &start);
    const char *mine = r->own + g->rank * r->count * width + start, *parts[g->size];
    char total[BLOCK_BYTES]; /* the result may lie where this rank's row does, which is not the first to be reduced */
    for (int64_t at = 0; at < some; at += BLOCK_BYTES) {
        for (int rank = 0; rank < g->size; rank++) {
            parts[rank] = (rank == g->rank ? mine : data_of(g, rank, r->stage) + g->rank * room) + at;
        }
        int64_t bytes = least(BLOCK_BYTES, some - at);
        reduce(parts, g->size, total, bytes / width, r->type, r->operation);
        memcpy(r->data + start + at, total, bytes);
    }
}

/* Write what this rank has for the next stage; 0 where there is no further one. */
static int before(const struct group *g, struct collective *r) {
    int64_t start, bytes = r->count * WIDTHS[r->type];
    if (r->step == 0) {
        char *mine = slot_of(g, g->rank, r->stage + 1);
        r->way = bytes * g->size <= g->small_bytes ? SMALL : SLICES;
        if (r->operation == GATHER) r->way = GATHERED;
        if (r->scatters) r->way = SCATTERED;
        memcpy(g->places + g->rank * g->place_bytes + g->head_at, r->head, g->head_bytes);
        memcpy(mine, r->head, r->note_bytes);
        if (r->way == SMALL) {
            memcpy(mine + g->note_bytes, r->own, bytes);
            return 1;
        }
    }
    if (r->way == SMALL) return 0;
    if (r->way == GATHERED || r->way == SCATTERED) return put_rows(g, r);
    int64_t count = chunk(g, r, r->step, &start);
    if (count) put(g, r, start, count);
    return count || chunk(g, r, r->step - 1, &start);
}

static int same(const struct group *g, const struct collective *r) {
    for (int rank = 0; rank < g->size; rank++) {
        if (memcmp(slot_of(g, rank, r->stage), r->head, r->note_bytes)) return 0;
    }
    return 1;
}

/* Read what others have for this stage, to which all have come. */
static void after(const struct group *g, struct collective *r) {
    int64_t start, count;
    if (r->way == SMALL) {
        const char *parts[g->size];
        for (int rank = 0; rank < g->size; rank++) parts[rank] = data_of(g, rank, r->stage);
        reduce(parts, g->size, r->data, r->count, r->type, r->operation);
        return;
    }
    if (r->way == GATHERED) gather_rows(g, r);
    if (r->way == SCATTERED) reduce_row(g, r);
    if (r->way == SLICES) {
        if (r->step > 0 && (count = chunk(g, r, r->step - 1, &start))) collect(g, r, start, count);
        if ((count = chunk(g, r, r->step, &start))) take(g, r, start, count);
    }
}

/* DONE when the data are there, WAITING when the time is over before all have come, to be called again; DIFFER where
 * the heads of two ranks do. */
int shardwright_collective(const struct group *g, struct collective *r, int64_t timeout_ns) {
    for (;;) {
        if (!r->waits) {
            if (!before(g, r)) return DONE;
            shardwright_arrive(g, ++r->stage);
            r->waits = 1;
        }
        if (!shardwright_wait(g, r->stage, timeout_ns)) return WAITING;
        r->waits = 0;
        if (r->step == 0 && !same(g, r)) return DIFFER;
        after(g, r);
        r->step++;
    }
}

/* Begins a collective anew that was made before, of one tensor of the same dtype and size: its number, where the tensor
 * lies and where the result goes, and the stage to which this rank has come.
 */
int shardwright_again(const struct group *g, struct collective *r, uint32_t number, const char *own, char *data,
                      uint32_t stage, int64_t timeout_ns) {
    memcpy((char *)r->head, &number, sizeof number);
    r->own = own;
    r->data = data;
    r->stage = stage;
    r->step = 0;
    r->waits = 0;
    return shardwright_collective(g, r, timeout_ns);
}
