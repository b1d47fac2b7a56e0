/* state.c    what is alive, counts for the tests, errors on demand */
#include "fake.h"

pthread_mutex_t big = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
Node* live;
Stream* streams[STREAMS];
int n_streams, launched;
Result sticky;
double last_call;
__thread void* current;
__thread int mode = GLOBAL;

/* Counts for the tests, by name. */
static struct { char name[40]; int n; } counts[128];
int* count(const char* name) {
    int i = 0;
    for (; i < 127 && counts[i].name[0] && strcmp(counts[i].name, name); i++) {}
    strncpy(counts[i].name, name, 39);
    return &counts[i].n;
}
/* How often a function was called, or something happened. */
int fake_count(const char* name) {
    LOCK;
    return *count(name);
}

long env(const char* name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }
double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
void unlock(int* unused) { (void)unused; pthread_mutex_unlock(&big); }

static int fatal(int code) { return (code >= 700 && code < 720 && code != 701 && code != 712) || code == 999; }
Result begin(const char* function) {
    static int calls;
    const char* plan = getenv("FAKE_FAIL");
    size_t n = strlen(function);
    ++*count(function);
    last_call = now();
    if (sticky) return sticky;
    if (plan && !strncmp(plan, function, n) && plan[n] == ':') {
        int code = 0, at = 1, times = 1;
        sscanf(plan + n, ":%d:%d:%d", &code, &at, &times);
        if (++calls >= at && (calls < at + times || at == 0)) {
            if (fatal(code)) sticky = code;
            return code;
        }
    }
    return 0;
}

void* keep(void* at, size_t bytes, const char* kind) {
    static uint64_t serial;
    Node* node = calloc(1, sizeof *node);
    node->at = at, node->bytes = bytes, node->kind = kind, node->serial = ++serial, node->next = live;
    live = node;
    return at;
}
/* What is looked for often is soon found: it moves to the front. */
static Node* to_front(Node** link) {
    Node* n = *link;
    *link = n->next, n->next = live, live = n;
    return n;
}
/* The entry that contains these bytes. */
Node* find(uint64_t at, size_t bytes) {
    for (Node** p = &live; *p; p = &(*p)->next)
        if (at >= (uint64_t)(*p)->at && at + bytes <= (uint64_t)(*p)->at + (*p)->bytes) return to_front(p);
    return 0;
}
Node* of_serial(uint64_t serial) {
    for (Node** p = &live; *p; p = &(*p)->next)
        if ((*p)->serial == serial) return to_front(p);
    return 0;
}
Result drop(void* at, const char* kind, size_t* bytes) {
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

__attribute__((destructor)) static void leaks(void) {
    for (Node* n = env("FAKE_KEEPS", 0) ? 0 : live; n; n = n->next) fprintf(stderr, "fake driver: leaked %s\n", n->kind);
    if (any_capture()) fprintf(stderr, "fake driver: still recording\n");
    if (*count("plain")) fprintf(stderr, "fake driver: %d kernels by plain loops\n", *count("plain"));
    fprintf(stderr, "fake driver: %d launches\n", launched);
}
