/* graphs.c    graphs are lists of work, in the order in which it was recorded
 *
 * An executable graph is a copy, parameters included: what the program changes afterwards it does not see. A launch runs the list
 * as one piece of work, and keeps it until it has run. */
#include "fake.h"

void leave(Graph* g) {
    if (--g->users) return;
    forget(g->first);
    free(g);
}

Result cuGraphDestroy(Graph* g) {
    LOCK;
    Result r = drop(g, "graph", 0);
    if (!r) leave(g);
    return r;
}
Result cuGraphInstantiateWithFlags(void** out, Graph* g, unsigned long long flags) {
    UNSAFE;
    if (!g || flags) return INVALID_VALUE;
    Graph* executable = calloc(1, sizeof *executable);
    executable->pieces = g->pieces, executable->users = 1;
    Work** end = &executable->first;
    for (Work* w = g->first; w; w = w->next) {
        *end = copied(w);
        end = &(*end)->next;
    }
    *out = keep(executable, sizeof *executable, "executable graph");
    return 0;
}
Result cuGraphExecDestroy(Graph* g) {
    GIVE_BACK;
    Result r = drop(g, "executable graph", 0);
    if (!r) leave(g);
    return r;
}
Result cuGraphLaunch(Graph* g, Stream* s) {
    ENQUEUE(s);
    Node* of = find((uint64_t)g, 1);
    if (!of) return INVALID_VALUE;
    if (!s->capturing) launched += g->pieces;
    g->users++;
    return enqueue(s, &(Work){.kind = GRAPH, .graph = g, .to_serial = of->serial});
}
