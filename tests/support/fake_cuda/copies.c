/* copies.c    copies and fills, as they are enqueued
 *
 * Page-locked host memory is read and written when the copy runs. Pageable memory is read when it is enqueued, and a copy to it
 * has run when the call returns, as the driver does it. */
#include "fake.h"

/* A copy from or to pageable memory cannot be captured. */
static int cannot_be_captured(const Node* host, Stream* s) {
    if (!s->capturing || host) return 0;
    return s->invalidated = 1;
}

Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, Stream* s) {
    ENQUEUE(s);
    Node *device = find(to, n), *host = find((uint64_t)from, n);
    if (!device) return INVALID_VALUE;
    if (cannot_be_captured(host, s)) return CAPTURE_UNSUPPORTED;
    Work w = {.kind = COPY_IN, .to = to, .from = (uint64_t)from, .bytes = n, .to_serial = device->serial};
    if (host) {
        w.from_serial = host->serial;
    } else {
        w.staged = malloc(n + 1);
        memcpy(w.staged, from, n);
    }
    return enqueue(s, &w);
}
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, Stream* s) {
    ENQUEUE(s);
    Node *device = find(from, n), *host = find((uint64_t)to, n);
    if (!device) return INVALID_VALUE;
    if (cannot_be_captured(host, s)) return CAPTURE_UNSUPPORTED;
    /* Until the copy has run its destination holds nothing that anybody may read. (Unless something enqueued before reads it.) */
    if (host && late() && !s->capturing && idle()) memset(to, 0xa5, n);
    Work w = {.kind = COPY_OUT, .to = (uint64_t)to, .from = from, .bytes = n, .from_serial = device->serial};
    if (host) w.to_serial = host->serial;
    Result r = enqueue(s, &w);
    if (r || host) return r;
    wait_for(s, s->given);
    return sticky;
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, Stream* s) {
    ENQUEUE(s);
    Node *a = find(to, n), *b = find(from, n);
    if (!a || !b) return INVALID_VALUE;
    return enqueue(s, &(Work){.kind = COPY, .to = to, .from = from, .bytes = n, .to_serial = a->serial, .from_serial = b->serial});
}
Result cuMemsetD8Async(uint64_t to, unsigned char v, size_t n, Stream* s) {
    ENQUEUE(s);
    Node* device = find(to, n);
    if (!device) return INVALID_VALUE;
    return enqueue(s, &(Work){.kind = FILL, .to = to, .bytes = n, .value = v, .to_serial = device->serial});
}
