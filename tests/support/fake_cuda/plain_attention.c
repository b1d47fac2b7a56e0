/* plain_attention.c    attention by plain loops */
#include "plain.h"

/* A query's head over some tokens: exponents in base 2, in front of `o` not divided by the sum. */
typedef struct Seen {
    float m, s, o[256];
} Seen;
typedef struct Heads {
    Type type;
    const uint16_t *q, *kv;
    const abi_u32* page_table;
    unsigned d, n_heads, n_kv_heads;
    float scale_log2, cap_span, cap_slope;
    const float* sinks;
} Heads;

static void attend(const Heads* h, unsigned row, unsigned head, unsigned pages, unsigned begin, unsigned end, Seen* seen) {
    const uint16_t* q = h->q + ((size_t)row * h->n_heads + head) * h->d;
    unsigned kv_head = head / (h->n_heads / h->n_kv_heads);
    seen->m = -INFINITY, seen->s = 0;
    memset(seen->o, 0, sizeof seen->o);
    for (unsigned t = begin; t < end; t++) {
        size_t page = h->page_table[(abi_u32)(pages + t / KV_PAGE_TOKENS)];
        const uint16_t* k = h->kv + ((page * h->n_kv_heads + kv_head) * 2 * KV_PAGE_TOKENS + t % KV_PAGE_TOKENS) * h->d;
        const uint16_t* v = k + KV_PAGE_TOKENS * h->d;
        float x = dot(h->type, q, k, h->d);
        if (h->cap_span) x = h->cap_span * (0.5f - 1 / (1 + exp2f(x * h->cap_slope)));
        x *= h->scale_log2;
        float m = fmaxf(seen->m, x), before = exp2f(seen->m - m), weight = exp2f(x - m);
        seen->m = m, seen->s = seen->s * before + weight;
        for (unsigned i = 0; i < h->d; i++) seen->o[i] = seen->o[i] * before + weight * widened(h->type, v[i]);
    }
}
/* Finished, or in part: a row of `part_*`. */
static void leaves(const Heads* h, const Seen* seen, unsigned row, unsigned head, unsigned partial, void* out, unsigned out_type, float* part_m,
                   float* part_s, float* part_o) {
    if (partial == ATTENTION_FINAL) {
        uint16_t* to = (uint16_t*)out + ((size_t)row * h->n_heads + head) * h->d;
        float sum = seen->s + (h->sinks && seen->s ? exp2f(h->sinks[head] * 1.44269504089f - seen->m) : 0);
        for (unsigned i = 0; i < h->d; i++)
            to[i] = rounded(out_type == ATTENTION_OUT_BF16 ? BF16 : F16, sum ? seen->o[i] / sum : 0);
        return written((uint64_t)to, 2 * h->d);
    }
    size_t at = (size_t)partial * h->n_heads + head;
    part_m[at] = seen->m * 0.69314718056f, part_s[at] = seen->s;
    memcpy(part_o + at * h->d, seen->o, 4 * h->d);
    written((uint64_t)(part_m + at), 4), written((uint64_t)(part_s + at), 4), written((uint64_t)(part_o + at * h->d), 4 * h->d);
}
static unsigned head_dim(const char* rest) { return strtoul(rest + strlen("_d"), 0, 10); }

int prefill(const char* rest, Type type, const void* params) {
    /* Also the beginning of what the kernels with tensor maps take. */
    const PrefillAttentionParams* p = params;
    Heads h = {type, p->q, p->kv, p->page_table, head_dim(rest), p->n_heads, p->n_kv_heads, p->scale_log2, p->cap_span, p->cap_slope, p->sinks};
    Seen seen;
    for (unsigned i = 0; i < *p->n_items; i++) {
        const PrefillItem* item = p->items + i;
        for (unsigned r = 0; r < item->n_rows; r++) {
            unsigned pos = item->first_pos + r, begin = item->begin, end = item->end < pos + 1 ? item->end : pos + 1;
            if (p->window && pos + 1 > p->window && pos + 1 - p->window > begin) begin = pos + 1 - p->window;
            for (unsigned head = 0; head < h.n_heads; head++) {
                attend(&h, item->row0 + r, head, item->pages, begin, end, &seen);
                unsigned partial = item->partial == ATTENTION_FINAL ? ATTENTION_FINAL : item->partial + r;
                leaves(&h, &seen, item->row0 + r, head, partial, p->out, p->out_type, p->part_m, p->part_s, p->part_o);
            }
        }
    }
    return 0;
}
int decode(const char* rest, Type type, const void* params) {
    const DecodeAttentionParams* p = params;
    Heads h = {type, p->q, p->kv, p->page_table, head_dim(rest), p->n_heads, p->n_kv_heads, p->scale_log2, p->cap_span, p->cap_slope, p->sinks};
    Seen seen;
    for (unsigned i = 0; i < *p->n_items; i++)
        if (p->items[i].n_splits > 1) return 1;
    for (unsigned i = 0; i < *p->n_items; i++) {
        const DecodeItem* item = p->items + i;
        for (unsigned head = 0; head < h.n_heads; head++) {
            attend(&h, item->row, head, item->pages, item->begin, item->end, &seen);
            leaves(&h, &seen, item->row, head, item->partial, p->out, p->out_type, p->part_m, p->part_s, p->part_o);
        }
    }
    return 0;
}
