/* fake_cuda.h    what the fake driver keeps in mind: what is alive, lanes that lag, the rules of stream capture
 *
 * Data moves at once, but counts as done only later: a stream's work is passed when somebody waits for it, or one piece with
 * each question about an event. So a program that frees too early, or believes an event done because it was recorded, is
 * seen.
 *
 * Capture, from the CUDA programming guide ("Prohibited and Unhandled Operations") and the driver API's
 * cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode and cuCtxSynchronize:
 *   unsafe       calls that may synchronise (allocate, free, page-lock, load, unload, query or wait for events and streams).
 *                Prohibited for a thread in mode GLOBAL while any thread captures in mode GLOBAL, or it captures itself (not
 *                in mode RELAXED); in mode THREAD_LOCAL only while it captures itself; in mode RELAXED never.
 *   conflicting  calls that encompass a stream in capture: synchronising its context, querying it, the legacy stream beside
 *                a capturing stream that is not non-blocking. Prohibited in every mode.
 * A prohibited call fails and invalidates the captures that prohibit it: all their later work fails, and so does their end. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum {
    OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712, NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908
};

/* Something given out that has to come back. */
typedef struct Node {
    void* at;
    size_t bytes;
    const char* kind;
    uint64_t used[64]; /* of each stream, the number of the last piece of work that touches it */
    struct Node* next;
} Node;

typedef struct Stream {
    int id, blocking, capturing, mode, invalidated, recorded;
    pthread_t owner;
    uint64_t given, done;
} Stream;

typedef struct Event {
    int flags, captured;
    Stream* stream;
    uint64_t number;
    double at;
} Event;

static pthread_mutex_t big = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Node* live;
static Stream* streams[64];
static int n_streams;
static size_t used;
static Result sticky;
static __thread void* current;
static __thread int mode = GLOBAL;

/* Counts for the tests, by name. */
static struct { char name[40]; int n; } counts[128];
static int* count(const char* name) {
    int i = 0;
    for (; i < 127 && counts[i].name[0] && strcmp(counts[i].name, name); i++) {}
    strncpy(counts[i].name, name, 39);
    return &counts[i].n;
}
/* How often a function was called, or something happened. */
int fake_count(const char* name) {
    pthread_mutex_lock(&big);
    int n = *count(name);
    pthread_mutex_unlock(&big);
    return n;
}

static long env(const char* name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void release_lock(int* unused) { (void)unused; pthread_mutex_unlock(&big); }
static Result begin(const char* function) {
    static int calls;
    const char* plan = getenv("FAKE_FAIL");
    size_t n = strlen(function);
    ++*count(function);
    if (sticky) return sticky;
    if (plan && !strncmp(plan, function, n) && plan[n] == ':') {
        int code = 0, at = 1, times = 1;
        sscanf(plan + n, ":%d:%d:%d", &code, &at, &times);
        if (++calls >= at && (calls < at + times || at == 0)) {
            if ((code >= 700 && code < 720 && code != 701 && code != 712) || code == 999) sticky = code;
            return code;
        }
    }
    return 0;
}

static void* keep(void* at, size_t bytes, const char* kind) {
    Node* node = calloc(1, sizeof *node);
    node->at = at, node->bytes = bytes, node->kind = kind, node->next = live;
    live = node;
    return at;
}
/* The entry that contains these bytes. */
static Node* find(uint64_t at, size_t bytes) {
    for (Node* n = live; n; n = n->next)
        if (at >= (uint64_t)n->at && at + bytes <= (uint64_t)n->at + n->bytes) return n;
    return 0;
}
static Result drop(void* at, const char* kind, size_t* bytes) {
    for (Node** p = &live; *p; p = &(*p)->next)
        if ((*p)->at == at && !strcmp((*p)->kind, kind)) {
            Node* node = *p;
            for (int i = 0; i < n_streams; i++)
                if (streams[i] && node->used[i] > streams[i]->done) fprintf(stderr, "fake driver: gave back %s under work in flight\n", kind);
            if (bytes) *bytes = node->bytes;
            *p = node->next;
            free(node);
            return 0;
        }
    fprintf(stderr, "fake driver: no %s at %p\n", kind, at);
    return 1;
}

/* Captures that prohibit an unsafe call of this thread become invalid. */
static int prohibited(void) {
    int found = 0;
    for (int i = 0; i < n_streams; i++) {
        Stream* s = streams[i];
        if (!s || !s->capturing || s->mode == RELAXED || mode == RELAXED) continue;
        int mine = pthread_equal(s->owner, pthread_self());
        if (mine || (mode == GLOBAL && s->mode == GLOBAL)) found = s->invalidated = 1;
    }
    return found;
}
static int any_capture(void) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && streams[i]->capturing) return 1;
    return 0;
}
/* The legacy stream waits for every blocking stream. */
static int legacy(void* s) {
    int found = 0;
    for (int i = 0; (uintptr_t)s <= 1 && i < n_streams; i++)
        if (streams[i] && streams[i]->capturing && streams[i]->blocking) found = streams[i]->invalidated = 1;
    return found;
}

#define LOCK                                                                          \
    pthread_mutex_lock(&big);                                                         \
    __attribute__((cleanup(release_lock), unused)) int locked_ = 0
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

/* A piece of work that touches these bytes: number it. */
static Result work(Stream* s, uint64_t a, size_t na, uint64_t b, size_t nb) {
    if (s->capturing) return s->recorded++, 0;
    s->given++;
    Node* of[2] = {na ? find(a, na) : 0, nb ? find(b, nb) : 0};
    for (int i = 0; i < 2; i++)
        if (of[i]) of[i]->used[s->id] = s->given;
    return 0;
}
