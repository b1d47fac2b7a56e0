/* streams.c    streams, and events: a position in a stream, a new one each time it is recorded */
#include "fake.h"

/* As on every GPU since 2016: 0 is a stream's own, -5 goes first. The driver takes a number outside for the nearest one. */
enum { LEAST = 0, GREATEST = -5 };
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    IN_CONTEXT;
    if (least) *least = LEAST;
    if (greatest) *greatest = GREATEST;
    return 0;
}
Result cuStreamCreateWithPriority(Stream** out, unsigned flags, int priority) {
    UNSAFE;
    /* Numbers go on where those of the place's last stream ended: memory remembers them. */
    static uint64_t before[STREAMS];
    int id = 0;
    while (id < n_streams && streams[id]) id++;
    if (flags > 1 || id == STREAMS) return INVALID_VALUE;
    Stream* s = calloc(1, sizeof *s);
    s->id = id, s->blocking = !flags, s->urgent = priority <= GREATEST;
    s->last_number = before + id, s->given = s->done = before[id];
    ++*count(s->urgent ? "urgent streams" : priority >= LEAST ? "normal streams" : "streams between");
    streams[id] = s;
    if (id == n_streams) n_streams++;
    *out = keep(s, 1, "stream");
    return 0;
}
Result cuStreamDestroy_v2(Stream* s) {
    IN_CONTEXT;
    if (s->capturing) fprintf(stderr, "fake driver: no stream to record any more\n");
    /* What is enqueued still runs. */
    wait_for(s, s->given);
    streams[s->id] = 0;
    *s->last_number = s->given;
    return drop(s, "stream", 0);
}
Result cuStreamSynchronize(Stream* s) {
    IN_CONTEXT;
    if (legacy(s)) return CAPTURE_IMPLICIT;
    if ((uintptr_t)s <= 1) return INVALID_VALUE;
    if (s->capturing) return s->invalidated = 1, CAPTURE_UNSUPPORTED;
    if (prohibited()) return CAPTURE_UNSUPPORTED;
    wait_for(s, s->given);
    return sticky;
}
Result cuStreamWaitEvent(Stream* s, Event* e, unsigned flags) {
    ENQUEUE(s);
    if (!find((uint64_t)e, 1) || flags) return INVALID_VALUE;
    /* Captured work cannot depend on other work, nor other work on captured work. */
    if (s->capturing != e->captured) {
        if (s->capturing) s->invalidated = 1;
        if (e->captured && e->stream) e->stream->invalidated = 1;
        return CAPTURE_ISOLATION;
    }
    if (!executes() || s->capturing || !e->stream) return 0;
    /* What tests are to find: every so-many-th wait is forgotten. */
    static long waits;
    long forget = env("FAKE_FORGET", 0);
    if (forget && ++waits % forget == 0) return 0;
    return enqueue(s, &(Work){.kind = WAIT, .on = e->stream, .until = e->number});
}

Result cuEventCreate(Event** out, unsigned flags) {
    IN_CONTEXT;
    if (flags & ~3u) return INVALID_VALUE;
    Event* e = calloc(1, sizeof *e);
    e->flags = flags;
    ++*count(flags & 1 ? "events that sleep" : "events that spin");
    *out = keep(e, sizeof *e, "event");
    return 0;
}
Result cuEventDestroy_v2(Event* e) { IN_CONTEXT; return drop(e, "event", 0); }
Result cuEventRecord(Event* e, Stream* s) {
    ENQUEUE(s);
    Node* of = find((uint64_t)e, 1);
    if (!of) return INVALID_VALUE;
    e->stream = s, e->captured = s->capturing, e->at = now();
    Result r = executes() && !s->capturing ? enqueue(s, &(Work){.kind = RECORD, .event = e, .event_serial = of->serial}) : 0;
    e->number = s->given;
    return r;
}
static Result event(Event* e) {
    if (!find((uint64_t)e, 1)) return INVALID_VALUE;
    if (e->captured) return e->stream->invalidated = 1, CAPTURED_EVENT;
    return 0;
}
/* A question takes the stream a piece of work further: whoever asks often enough gets there. */
Result cuEventQuery(Event* e) {
    UNSAFE;
    Result r = event(e);
    if (r || !e->stream || e->stream->done >= e->number) return r;
    ask_for(e->stream);
    return sticky ? sticky : NOT_READY;
}
Result cuEventSynchronize(Event* e) {
    UNSAFE;
    Result r = event(e);
    if (r || !e->stream) return r;
    wait_for(e->stream, e->number);
    return sticky;
}
Result cuEventElapsedTime(float* ms, Event* from, Event* to) {
    UNSAFE;
    if (event(from) || event(to)) return INVALID_VALUE;
    if ((from->flags | to->flags) & 2) return 400;
    if (from->stream->done < from->number || to->stream->done < to->number) return NOT_READY;
    *ms = 1e3 * (to->at - from->at);
    return 0;
}
