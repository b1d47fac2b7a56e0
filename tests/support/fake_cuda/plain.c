/* plain.c    a few kernels by plain loops (FAKE_PLAIN)
 *
 * For tests of orders, of which there should be many: what a kernel computes matters there, how it does so does not. The emulation runs
 * each thread of a kernel; a loop over its output takes a small part of that. These are the kernels that take most of the time of a tiny
 * model; all others are emulated. The kernels' own tests hold them to the same bounds (tests/gpu/stand_in.rs).
 *
 * Memory that was given back is not there any more (memory.c), so a late kernel ends the process; no other access is checked. */
#include "fake.h"

#include <math.h>

#include "../../../cuda/include/abi.h"

typedef enum { F16, BF16 } Type;
typedef struct Plain {
    const char* kernel; /* its name begins so; then follows f16 or bf16, if it is of a type */
    int typed;
    /* 0: done; 1: a case that these loops leave to the emulation */
    int (*run)(const char* rest, Type type, const void* params);
} Plain;

static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float widened(Type type, uint16_t h) {
    if (type == BF16) return as_float((uint32_t)h << 16);
    uint32_t sign = (uint32_t)(h >> 15) << 31, rest = h & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* 2^112 puts the exponent right, of numbers with leading zeros, too. */
    return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));
}
/* To the nearest, ties to even. */
static uint16_t rounded(Type type, float x) {
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000;
    if (type == BF16) return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (x != x) return 0x7fff;
    float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)nearbyintf(size * 0x1p24f);
    bits = as_bits(size);
    return sign | ((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

/* ---- products ---- */

static float dot(Type type, const uint16_t* a, const uint16_t* b, unsigned n) {
    float sum = 0;
    if (type == BF16)
        for (unsigned i = 0; i < n; i++) sum += as_float((uint32_t)a[i] << 16) * as_float((uint32_t)b[i] << 16);
    else
        for (unsigned i = 0; i < n; i++) sum += widened(F16, a[i]) * widened(F16, b[i]);
    return sum;
}
static float activated(unsigned epilogue, float gate) {
    if (epilogue == LINEAR_SWIGLU) return gate / (1 + expf(-gate));
    if (epilogue == LINEAR_CLAMPED_SWIGLU) return fminf(gate, 7) / (1 + expf(-1.702f * fminf(gate, 7)));
    return gate / 2 * (1 + tanhf(0.7978845608f * (gate + 0.044715f * gate * gate * gate)));
}
static float factor(unsigned epilogue, float up) { return epilogue == LINEAR_CLAMPED_SWIGLU ? fmaxf(-7, fminf(up, 7)) + 1 : up; }
static int linear(const char* rest, Type type, const void* params) {
    (void)rest;
    const LinearParams* p = params;
    const uint16_t *w = p->w, *x = p->x;
    for (unsigned m = 0; m < p->m; m++) {
        const uint16_t* row = x + (size_t)m * p->ldx;
        float gates[8];
        for (unsigned n = 0; n < p->n; n++) {
            float sum = dot(type, w + (size_t)n * p->k, row, p->k) + (p->bias ? p->bias[n] : 0);
            size_t at = (size_t)m * p->ldy + n;
            if (p->epilogue == LINEAR_F32) ((float*)p->y)[at] = sum;
            else if (p->epilogue == LINEAR_RELU) ((uint16_t*)p->y)[at] = rounded(type, fmaxf(sum, 0));
            else if (n % 16 < 8) gates[n % 8] = sum;
            else
                ((uint16_t*)p->y)[(size_t)m * p->ldy + n / 16 * 8 + n % 8] = rounded(type, activated(p->epilogue, gates[n % 8]) * factor(p->epilogue, sum));
        }
    }
    /* Rows of either size are written whole, up to their gaps. */
    unsigned gated = p->epilogue >= LINEAR_SWIGLU, bytes = p->epilogue == LINEAR_F32 ? 4 : 2;
    for (unsigned m = 0; m < p->m; m++) written((uint64_t)p->y + (uint64_t)m * p->ldy * bytes, (size_t)p->n / (1 + gated) * bytes);
    return 0;
}

/* ---- attention ---- */

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

static int prefill(const char* rest, Type type, const void* params) {
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
static int decode(const char* rest, Type type, const void* params) {
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

/* ---- pages ---- */

static void move_page(const PagesParams* p, const PageLayer* layer, const PageItem* page, unsigned head, int to_host) {
    unsigned d = p->head_dim, half = KV_PAGE_TOKENS * d;
    uint16_t* device = layer->device + ((size_t)page->device * p->n_kv_heads + head) * 2 * half;
    uint16_t* host = layer->host + ((size_t)page->host * p->n_kv_heads + head) * 2 * half;
    for (unsigned t = 0; t < KV_PAGE_TOKENS; t++)
        for (unsigned i = 0; i < d; i++) {
            uint16_t *k = host + (t / 16 * (d / 2) + i / 2) * 32 + t % 16 * 2 + i % 2, *v = host + half + (t / 2 * d + i) * 2 + t % 2;
            uint16_t *of_k = device + t * d + i, *of_v = of_k + half;
            int there = t < page->tokens;
            if (to_host) *k = there ? *of_k : 0, *v = there ? *of_v : 0;
            else *of_k = there ? *k : 0, *of_v = there ? *v : 0;
        }
    written((uint64_t)(to_host ? host : device), 4 * half);
}
static int move_pages(const PagesParams* p, int to_host) {
    for (unsigned l = 0; l < p->n_layers; l++)
        for (unsigned i = 0; i < p->n_pages; i++)
            for (unsigned head = 0; head < p->n_kv_heads; head++) move_page(p, p->layers + l, p->pages + i, head, to_host);
    return 0;
}
static int pages_to_host(const char* rest, Type type, const void* params) { return move_pages(params, 1); }
static int pages_from_host(const char* rest, Type type, const void* params) { return move_pages(params, 0); }

/* ---- which ---- */

static const Plain known[] = {
    {"gemv_", 1, linear},
    {"linear_dense_", 1, linear},
    {"prefill_attention_", 1, prefill},
    {"decode_attention_", 1, decode},
    {"pages_to_host", 0, pages_to_host},
    {"pages_from_host", 0, pages_from_host},
};

int plainly(const char* kernel, const void* params) {
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        const Plain* k = known + i;
        size_t n = strlen(k->kernel);
        if (strncmp(kernel, k->kernel, n)) continue;
        const char* rest = kernel + n;
        if (!k->typed) return *rest ? 1 : k->run(rest, F16, params);
        if (!strncmp(rest, "bf16_", 5)) return k->run(rest + 4, BF16, params);
        if (!strncmp(rest, "f16_", 4)) return k->run(rest + 3, F16, params);
        /* A quantised product. */
    }
    return 1;
}
