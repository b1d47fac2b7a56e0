/* work.c    one piece of work, and what it does when its turn comes */
#include "fake.h"

#include <stdarg.h>

Work* copied(const Work* of) {
    Work* w = malloc(sizeof *w);
    *w = *of;
    w->next = 0;
    if (w->kind == GRAPH) w->graph->users++;
    if (w->staged) {
        size_t n = w->kind == KERNEL ? w->params : w->bytes;
        w->staged = malloc(n + 1);
        memcpy(w->staged, of->staged, n);
    }
    return w;
}
/* The whole list. */
void forget(Work* w) {
    while (w) {
        Work* next = w->next;
        if (w->kind == GRAPH) leave(w->graph);
        free(w->staged);
        free(w);
        w = next;
    }
}

Result failed(Result code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "fake driver: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    return code;
}

/* Whether the memory that an address lay in when this was enqueued is still that memory. */
static int lives(uint64_t serial) {
    LOCK;
    return of_serial(serial) != 0;
}
static Result move(const Work* w) {
    static const char* names[] = {"copy to the device", "copy to the host", "copy within the device", "fill"};
    const char* what = names[w->kind];
    if (w->to_serial && !lives(w->to_serial)) return failed(ILLEGAL_ADDRESS, "a %s of %zu bytes: its destination was given back", what, w->bytes);
    if (w->from_serial && !lives(w->from_serial)) return failed(ILLEGAL_ADDRESS, "a %s of %zu bytes: its source was given back", what, w->bytes);
    if (w->kind == FILL) memset((void*)w->to, w->value, w->bytes);
    else memmove((void*)w->to, w->staged ? w->staged : (void*)w->from, w->bytes);
    if (w->kind == COPY) copied_marks(w->to, w->from, w->bytes);
    if (w->kind == COPY_IN || w->kind == FILL) written(w->to, w->bytes);
    return 0;
}
Result perform(Work* w) {
    Result r = 0;
    switch (w->kind) {
    case KERNEL: return executes() ? run_kernel(w) : 0;
    case WAIT: return 0;
    case RECORD: {
        LOCK;
        /* Only the event's latest position has a time. */
        if (of_serial(w->event_serial) && w->event->number == w->number) w->event->at = now();
        return 0;
    }
    case GRAPH:
        for (Work* part = w->graph->first; part && !r; part = part->next)
            if (part->next || !is_wrong("recorded work")) r = perform(part);
        return r;
    default: return move(w);
    }
}
