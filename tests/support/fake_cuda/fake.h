/* fake.h    a CUDA driver without a GPU: what its parts share (README.md: what it is for, what may be set)
 *
 * One lock, `big`, guards all of it; every call of the program holds it (CALL). The executor (order.c) lets go of it while a
 * piece of work runs. */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum {
    OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 201, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712,
    LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908
};
enum { STREAMS = 64 };

/* Something given out that has to come back. */
typedef struct Node {
    void* at;
    size_t bytes;
    const char* kind;
    uint64_t serial;        /* no two ever have the same: work names what it uses by it */
    uint64_t used[STREAMS]; /* of each stream, the number of the last piece of work that touches it */
    struct Node* next;
} Node;

typedef struct Work Work;
typedef struct Stream {
    int id, blocking, urgent, capturing, mode, invalidated;
    pthread_t owner;
    uint64_t given, done; /* numbers of the latest piece of work enqueued, and of the latest that counts as done */
    uint64_t wanted;      /* somebody waits for this number */
    uint64_t* last_number; /* where it leaves its latest number when it is destroyed */
    Work *first, *last;   /* enqueued and not executed */
    Work *recorded, *recorded_last;
    int records;
} Stream;

typedef struct Event {
    int flags, captured;
    Stream* stream;  /* 0: never recorded */
    uint64_t number; /* where it was recorded last */
    double at;
} Event;

/* A graph, and an executable one: its work in order, with parameters of its own. */
typedef struct Graph {
    Work* first;
    int pieces, users;
} Graph;

/* A kernel, and how much dynamic shared memory it may have. */
typedef struct Function {
    unsigned shared;
    struct Function* next;
    char name[];
} Function;

/* One piece of work. Host memory is read and written when it runs, unless it was pageable. */
struct Work {
    enum { COPY_IN, COPY_OUT, COPY, FILL, KERNEL, RECORD, WAIT, GRAPH } kind;
    uint64_t number, order; /* in its stream, among all */
    double enqueued;
    uint64_t to, from;
    size_t bytes;
    unsigned char value;
    uint64_t to_serial, from_serial; /* of the memory that held the addresses when it was enqueued; 0: staged, or pageable */
    void* staged;                    /* what pageable memory held then; a kernel's parameters */
    const Function* function;
    unsigned grid[3], block[3], shared;
    size_t params;
    Event* event;
    uint64_t event_serial;
    Stream* on;
    uint64_t until;
    Graph* graph;
    Work* next;
};

/* state.c */
extern pthread_mutex_t big;
extern Node* live;
extern Stream* streams[STREAMS];
extern int n_streams, launched;
extern Result sticky;
extern double last_call;
extern __thread void* current;
extern __thread int mode;
int* count(const char* name);
long env(const char* name, long otherwise);
double now(void);
void unlock(int* unused);
Result begin(const char* function);
void* keep(void* at, size_t bytes, const char* kind);
Node* find(uint64_t at, size_t bytes);
Node* of_serial(uint64_t serial);
Result drop(void* at, const char* kind, size_t* bytes);

/* capture.c */
int prohibited(void);
int any_capture(void);
int legacy(void* s);

/* order.c */
int executes(void); /* whether work runs, and later than it is enqueued */
int late(void);
Result enqueue(Stream* s, Work* w);
void wait_for(Stream* s, uint64_t number);
void ask_for(Stream* s);
void wait_for_the_executor(void);
int idle(void); /* whether nothing is enqueued anywhere */

/* work.c */
Work* copied(const Work* w);
void forget(Work* w);
Result perform(Work* w);
Result failed(Result code, const char* format, ...) __attribute__((format(printf, 2, 3)));

/* wrong.c: what a kernel changes, if it is to be wrong */
int is_wrong(const char* name);
void* before_wrong(const char* kernel);
void after_wrong(void* before);

/* plain.c: returns 0 if it has done what the kernel does */
int plainly(const char* kernel, const void* params);

/* graphs.c */
void leave(Graph* g);

/* memory.c */
size_t granules(size_t bytes);
size_t total_memory(void);
size_t context_memory(void);
Result charge(size_t bytes);
void discharge(size_t bytes);
void show_device_memory(int shown);

/* emulator.c: does nothing where the kernels' host emulation is not linked */
size_t params_of(const char* kernel);
Result run_kernel(const Work* w);
void register_memory(uint64_t at, size_t bytes, int initialised);
void unregister_memory(uint64_t at);
void written(uint64_t at, size_t bytes);
void copied_marks(uint64_t to, uint64_t from, size_t bytes);
Result encode_map(uint64_t* map, void* base, const uint64_t* size, uint64_t stride, const unsigned* box);

#define LOCK                                                     \
    pthread_mutex_lock(&big);                                    \
    __attribute__((cleanup(unlock), unused)) int locked_ = 0
#define CALL                             \
    LOCK;                                \
    do {                                 \
        Result r_ = begin(__func__);     \
        if (r_) return r_;               \
    } while (0)
#define IN_CONTEXT                              \
    CALL;                                       \
    do {                                        \
        if (!current) return INVALID_CONTEXT;   \
    } while (0)
#define UNSAFE                                  \
    IN_CONTEXT;                                 \
    do {                                        \
        if (prohibited()) return CAPTURE_UNSUPPORTED; \
    } while (0)
/* Enqueues on a stream that the call names, or fails. */
#define ENQUEUE(s)                                                            \
    IN_CONTEXT;                                                               \
    do {                                                                      \
        if (legacy(s)) return CAPTURE_IMPLICIT;                               \
        if ((uintptr_t)(s) <= 1) return INVALID_VALUE;                        \
        if (((Stream*)(s))->invalidated) return CAPTURE_INVALIDATED;          \
    } while (0)
/* Giving back may synchronise the whole context: no mode makes that safe beside a capture. What runs at this moment ends
 * first; what is enqueued does not. */
#define GIVE_BACK                                                                       \
    UNSAFE;                                                                             \
    do {                                                                                \
        if (any_capture()) fprintf(stderr, "fake driver: %s beside a recording\n", __func__); \
        wait_for_the_executor();                                                        \
    } while (0)
