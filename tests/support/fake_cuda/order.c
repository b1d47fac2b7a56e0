/* order.c    when work runs: streams are queues, and FAKE_ORDER says which one moves
 *
 *   (unset)   data moves when it is enqueued, and kernels do nothing; but work counts as done only when somebody waits for it, or one
 *             piece with each question about an event. So a program that frees too early, or believes an event done because it
 *             was recorded, is seen.
 *   late      work runs as late as it may: when somebody waits for it, or for what waits for it. After a quiet time (the program calls
 *             nothing: it may look at memory that a kernel writes) the oldest runs, also if it has become old.
 *   seed:N    any stream whose next piece may run, by chance, with pauses.
 *   calls:N   the same within the program's calls: with each some pieces run, and whoever waits runs others until it may go on. No thread
 *             has to wake up for that, so it is the quickest, for many orders. How eager the device is depends on N. Only where the program
 *             calls nothing (it looks at memory that a kernel writes) a thread goes on for it.
 *
 * A stream's work runs in its order; a wait holds its stream until the position that the event had when the wait was enqueued. One
 * piece runs at a time: a kernel that waited for another would wait for ever (there is none). */
#include "fake.h"

#include <sys/prctl.h>

#define QUIET 2e-3
#define OLD 100e-3
#define SOON 50e-6

static enum { UNKNOWN, RULES, LATE, SEEDED, CALLS } order;
static uint64_t seed;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER, progress = PTHREAD_COND_INITIALIZER;
static int started, stopping, busy, sleeping;
static pthread_t thread;
/* Of calls, in 16ths: with how many of them a piece runs. */
static const unsigned eagerness[] = {1, 3, 6, 12};
static unsigned eager;

static void read_order(void) {
    const char* text = getenv("FAKE_ORDER");
    if (!text || !*text) order = RULES;
    else if (!strcmp(text, "late")) order = LATE;
    else if (sscanf(text, "seed:%lu", &seed) == 1) order = SEEDED;
    else if (sscanf(text, "calls:%lu", &seed) == 1) order = CALLS, eager = eagerness[seed % 4];
    else fprintf(stderr, "fake driver: FAKE_ORDER=%s\n", text), abort();
    seed = (seed + 1) * 0x9e3779b97f4a7c15 | 1;
}
int executes(void) {
    if (order == UNKNOWN) read_order();
    return order != RULES;
}
int late(void) { return executes() && order == LATE; }

int idle(void) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && streams[i]->first) return 0;
    return 1;
}

/* ---- which one ---- */

static uint64_t chance(uint64_t of) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % of;
}
static int ready(const Stream* s) { return s->first && !(s->first->kind == WAIT && s->first->on->done < s->first->until); }
static void want(Stream* s, uint64_t number) { if (s->wanted < number) s->wanted = number; }

/* The stream that has to move for `s` to move. */
static Stream* behind(Stream* s) {
    while (s->first && !ready(s)) {
        want(s->first->on, s->first->until);
        s = s->first->on;
    }
    return s->first ? s : 0;
}
static Stream* pick_late(void) {
    Stream* oldest = 0;
    for (int i = 0; i < n_streams; i++) {
        Stream* s = streams[i];
        if (!s || !s->first) continue;
        if (s->done < s->wanted && behind(s)) return behind(s);
        if (ready(s) && (!oldest || s->first->enqueued < oldest->first->enqueued)) oldest = s;
    }
    return oldest && (now() - last_call > QUIET || now() - oldest->first->enqueued > OLD) ? oldest : 0;
}
static Stream* any_ready(void) {
    Stream* may[STREAMS];
    int n = 0;
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && ready(streams[i])) may[n++] = streams[i];
    return n ? may[chance(n)] : 0;
}
static Stream* pick_by_chance(void) {
    if (!chance(4)) {
        /* Meanwhile the program enqueues more. */
        unsigned pause = chance(200);
        pthread_mutex_unlock(&big);
        usleep(pause);
        pthread_mutex_lock(&big);
    }
    return any_ready();
}
/* Only where the program calls nothing. */
static Stream* pick_forgotten(void) { return now() - last_call > SOON ? any_ready() : 0; }

/* ---- the executor ---- */

static void until(pthread_cond_t* what, double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += seconds * 1e9;
    if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec++;
    pthread_cond_timedwait(what, &big, &t);
}

static void over(Stream* s) {
    Work* w = s->first;
    s->first = w->next, s->done = w->number;
    if (!s->first) s->last = 0;
    w->next = 0;
    forget(w);
}
/* The first piece of `s` has run. */
static void has_run(Stream* s, Result r) {
    over(s);
    if (r && !sticky) sticky = r;
    /* After an error that loses the device nothing runs any more. */
    for (int i = 0; sticky && i < n_streams; i++)
        while (streams[i] && streams[i]->first) over(streams[i]);
}
/* Within a call: a piece of any stream. Whether there was one. */
static int run_one(void) {
    Stream* s = any_ready();
    if (!s) return 0;
    show_device_memory(1);
    has_run(s, perform(s->first));
    return 1;
}
static void* executor(void* unused) {
    (void)unused;
    /* A sleep of microseconds takes as long. */
    prctl(PR_SET_TIMERSLACK, 1);
    LOCK;
    while (!stopping) {
        Stream* s = order == LATE ? pick_late() : order == CALLS ? pick_forgotten() : pick_by_chance();
        if (!s && stopping) break; /* told while it paused */
        if (!s) {
            show_device_memory(0);
            sleeping = idle();
            if (sleeping) pthread_cond_wait(&more, &big);
            else until(&more, order == CALLS ? SOON : QUIET / 3);
            sleeping = 0;
            continue;
        }
        busy = 1;
        show_device_memory(1);
        Work* w = s->first;
        pthread_mutex_unlock(&big);
        Result r = perform(w);
        pthread_mutex_lock(&big);
        busy = 0;
        has_run(s, r);
        pthread_cond_broadcast(&progress);
    }
    return 0;
}
/* What is enqueued when the program ends never runs; what runs at that moment ends. */
static void stop(void) {
    pthread_mutex_lock(&big);
    stopping = 1;
    pthread_cond_broadcast(&more);
    pthread_mutex_unlock(&big);
    pthread_join(thread, 0);
}

/* ---- the program's side ---- */

static void use(Stream* s, const Work* w) {
    uint64_t of[2] = {w->to_serial, w->from_serial};
    for (int i = 0; i < 2; i++) {
        Node* n = of[i] ? of_serial(of[i]) : 0;
        if (n) n->used[s->id] = s->given;
    }
    for (const Work* part = w->kind == GRAPH ? w->graph->first : 0; part; part = part->next) use(s, part);
}
Result enqueue(Stream* s, Work* given) {
    Work* w = malloc(sizeof *w);
    *w = *given;
    w->next = 0;
    if (s->capturing) {
        if (s->recorded) s->recorded_last->next = w;
        else s->recorded = w;
        s->recorded_last = w;
        s->records++;
        return 0;
    }
    w->number = ++s->given, w->enqueued = now();
    use(s, w);
    if (!executes()) {
        Result r = perform(w);
        forget(w);
        return r;
    }
    if (s->first) s->last->next = w;
    else s->first = w;
    s->last = w;
    if (!started) {
        started = 1;
        pthread_create(&thread, 0, executor, 0);
        atexit(stop);
    }
    while (order == CALLS && chance(16) < eager && !busy && run_one()) {}
    if (order != CALLS || (sleeping && !idle())) pthread_cond_signal(&more);
    return 0;
}
void wait_for(Stream* s, uint64_t number) {
    if (!executes()) {
        if (s->done < number) s->done = number;
        return;
    }
    want(s, number);
    if (order != CALLS) pthread_cond_signal(&more);
    while (s->done < number && !sticky)
        if (order != CALLS || busy || !run_one()) pthread_cond_wait(&progress, &big);
}
void ask_for(Stream* s) {
    if (!executes()) {
        s->done += !env("FAKE_STUCK", 0);
        return;
    }
    want(s, s->done + 1);
    if (order == CALLS) {
        if (!busy && chance(16) < eager) run_one();
        return;
    }
    pthread_cond_signal(&more);
    /* Whoever asks without end leaves the lock to the executor. */
    until(&progress, 50e-6);
}
void wait_for_the_executor(void) {
    while (busy) pthread_cond_wait(&progress, &big);
}
