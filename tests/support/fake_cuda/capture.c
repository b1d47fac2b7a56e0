/* capture.c    the rules of stream capture
 *
 * From the CUDA programming guide ("Prohibited and Unhandled Operations") and the driver API's cuStreamBeginCapture,
 * cuThreadExchangeStreamCaptureMode and cuCtxSynchronize:
 *   unsafe       calls that may synchronise (allocate, free, page-lock, load, unload, query or wait for events and streams).
 *                Prohibited for a thread in mode GLOBAL while any thread captures in mode GLOBAL, or it captures itself (not
 *                in mode RELAXED); in mode THREAD_LOCAL only while it captures itself; in mode RELAXED never.
 *   conflicting  calls that encompass a stream in capture: synchronising its context, querying it, the legacy stream beside
 *                a capturing stream that is not non-blocking. Prohibited in every mode.
 * A prohibited call fails and invalidates the captures that prohibit it: all their later work fails, and so does their end. */
#include "fake.h"

/* Captures that prohibit an unsafe call of this thread become invalid. */
int prohibited(void) {
    int found = 0;
    for (int i = 0; i < n_streams; i++) {
        Stream* s = streams[i];
        if (!s || !s->capturing || s->mode == RELAXED || mode == RELAXED) continue;
        int mine = pthread_equal(s->owner, pthread_self());
        if (mine || (mode == GLOBAL && s->mode == GLOBAL)) found = s->invalidated = 1;
    }
    return found;
}
int any_capture(void) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && streams[i]->capturing) return 1;
    return 0;
}
/* The legacy stream waits for every blocking stream. */
int legacy(void* s) {
    int found = 0;
    for (int i = 0; (uintptr_t)s <= 1 && i < n_streams; i++)
        if (streams[i] && streams[i]->capturing && streams[i]->blocking) found = streams[i]->invalidated = 1;
    return found;
}

Result cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }

Result cuStreamBeginCapture_v2(Stream* s, int m) {
    ENQUEUE(s);
    if (s->capturing || m < GLOBAL || m > RELAXED) return INVALID_VALUE;
    s->capturing = 1, s->mode = m, s->owner = pthread_self();
    s->recorded = s->recorded_last = 0, s->records = 0;
    return 0;
}
Result cuStreamEndCapture(Stream* s, void** out) {
    LOCK;
    if (!current) return INVALID_CONTEXT;
    if (!s || !s->capturing) return 401;
    if (s->mode != RELAXED && !pthread_equal(s->owner, pthread_self())) return CAPTURE_WRONG_THREAD;
    /* However it ends, the stream leaves capture. */
    int invalid = s->invalidated;
    s->capturing = s->invalidated = 0;
    *out = 0;
    Work* recorded = s->recorded;
    s->recorded = s->recorded_last = 0;
    Result r = begin(__func__);
    if (r || invalid) {
        forget(recorded);
        return r ? r : CAPTURE_INVALIDATED;
    }
    Graph* g = calloc(1, sizeof *g);
    g->first = recorded, g->pieces = s->records, g->users = 1;
    *out = keep(g, sizeof *g, "graph");
    return 0;
}
