/* plain_logits.c    the greatest logits by plain loops */
#include "plain.h"

/* The kernel's order (logits.cu): the greater key is the better candidate, and nothing is 0. */
static uint64_t key_of(float x, uint32_t index) {
    uint32_t bits = as_bits(x == 0 ? 0 : x);
    uint32_t order = x != x ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)order << 32 | (uint32_t)~index;
}
/* Puts a key among the `k` greatest, which are in order. */
static void enter(abi_u64* best, unsigned k, abi_u64 key) {
    for (unsigned i = 0; i < k && key; i++)
        if (key > best[i]) {
            abi_u64 next = best[i];
            best[i] = key, key = next;
        }
}

int logits_spans(const char* rest, Type type, const void* params) {
    const LogitsReduceParams* p = params;
    for (uint64_t row = 0; row < p->rows; row++)
        for (unsigned span = 0; span < p->spans; span++) {
            const float* x = p->logits + row * p->ld;
            uint64_t at = row * p->spans + span;
            abi_u64* best = p->keys + at * p->k;
            unsigned first = span * LOGITS_SPAN, end = first + LOGITS_SPAN < p->vocab ? first + LOGITS_SPAN : p->vocab;
            float most = -INFINITY, sum = 0;
            memset(best, 0, 8 * p->k);
            for (unsigned i = first; i < end; i++) most = fmaxf(most, x[i]), enter(best, p->k, key_of(x[i], i));
            for (unsigned i = first; i < end; i++) sum += x[i] == most ? 1 : expf(x[i] - most);
            p->sums[2 * at] = most, p->sums[2 * at + 1] = sum;
            written((uint64_t)best, 8 * p->k), written((uint64_t)(p->sums + 2 * at), 8);
        }
    return 0;
}
int logits_merge(const char* rest, Type type, const void* params) {
    const LogitsReduceParams* p = params;
    for (uint64_t row = 0; row < p->rows; row++) {
        abi_u64 best[LOGITS_MAX_K] = {0};
        const float* sums = p->sums + 2 * row * p->spans;
        float most = -INFINITY, sum = 0;
        for (unsigned i = 0; i < p->spans * p->k; i++) enter(best, p->k, p->keys[row * p->spans * p->k + i]);
        for (unsigned i = 0; i < p->spans; i++) most = fmaxf(most, sums[2 * i]);
        for (unsigned i = 0; i < p->spans; i++) sum += sums[2 * i + 1] * (sums[2 * i] == most ? 1 : expf(sums[2 * i] - most));
        for (unsigned i = 0; i < p->k; i++) {
            uint32_t index = ~(uint32_t)best[i];
            p->indices[row * p->k + i] = index;
            if (p->values) p->values[row * p->k + i] = p->logits[row * p->ld + index];
        }
        written((uint64_t)(p->indices + row * p->k), 4 * p->k);
        if (p->values) written((uint64_t)(p->values + row * p->k), 4 * p->k);
        if (!p->logsumexp) continue;
        p->logsumexp[row] = most + logf(sum);
        written((uint64_t)(p->logsumexp + row), 4);
    }
    return 0;
}
