/* wrong.c    a kernel that computes wrong values
 *
 * FAKE_WRONG=linear_dense,softcap: of kernels whose names begin so, every word of device memory, or of host memory that the device sees, that a launch
 * changed has two of its bits turned around afterwards: a quarter of an f32's value, a thirtieth of an f16's, a quarter of a bf16's. Counters that a kernel leaves
 * as they were stay right, so that it ends. Allocations of more than 256 MiB are left alone.
 * FAKE_WRONG=recorded work: of a graph that is launched the last piece never runs. */
#include "fake.h"

#define LARGEST ((size_t)256 << 20)
enum { TURNED = 0x00200020 };

typedef struct Copy {
    unsigned char *at, *held;
    size_t bytes;
    struct Copy* next;
} Copy;

/* Whether a list of beginnings has that of a name. */
static int begins(const char* name, const char* list) {
    while (list && *list) {
        size_t n = strcspn(list, ",");
        if (n && !strncmp(name, list, n)) return 1;
        list += n + (list[n] == ',');
    }
    return 0;
}

int is_wrong(const char* name) { return begins(name, getenv("FAKE_WRONG")); }
void* before_wrong(const char* kernel) {
    if (!is_wrong(kernel)) return 0;
    Copy* first = 0;
    LOCK;
    for (Node* n = live; n; n = n->next) {
        int seen = !strcmp(n->kind, "memory") || !strcmp(n->kind, "mapped memory");
        if (!seen || n->bytes > LARGEST) continue;
        Copy* c = malloc(sizeof *c);
        *c = (Copy){n->at, malloc(n->bytes), n->bytes, first};
        memcpy(c->held, c->at, c->bytes);
        first = c;
    }
    return first;
}

/* Memory is not given back while a kernel runs: what was there before is there still. */
void after_wrong(void* copies) {
    for (Copy* c = copies; c;) {
        for (size_t i = 0; i + 4 <= c->bytes; i += 4) {
            uint32_t was, is;
            memcpy(&was, c->held + i, 4);
            memcpy(&is, c->at + i, 4);
            if (was == is) continue;
            is ^= TURNED;
            memcpy(c->at + i, &is, 4);
        }
        Copy* next = c->next;
        free(c->held);
        free(c);
        c = next;
    }
}
