/* plain_rows.c    embeddings, norms, RoPE and appending, rows from and to the host, by plain loops */
#include "plain.h"

int embed(const char* rest, Type type, const void* params) {
    const EmbedParams* p = params;
    for (unsigned row = 0; row < p->rows; row++) {
        unsigned token = p->tokens ? p->tokens[row] : row;
        const uint16_t* from = (const uint16_t*)(p->table + (uint64_t)token * p->row_bytes);
        float* to = p->hidden + (uint64_t)row * p->d;
        if (token < p->vocab && p->positions) return 1;
        for (unsigned i = 0; i < p->d; i++) to[i] = token < p->vocab ? widened(type, from[i]) * p->scale : 0;
        written((uint64_t)to, 4 * p->d);
    }
    return 0;
}

static float inverse_root(const float* x, unsigned n, float eps) {
    float squares = 0;
    for (unsigned i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / sqrtf(squares / n + eps);
}
static int norm(const NormParams* p, Type type, int layer) {
    float h[p->d], added[p->d];
    for (unsigned row = 0; row < p->rows; row++) {
        unsigned from = p->row_list ? p->row_list[row] : row, none = from == ROW_NONE;
        for (unsigned i = 0; i < p->d; i++) h[i] = none ? 0 : p->hidden[(uint64_t)from * p->d + i];
        if (p->delta && !none) {
            for (unsigned i = 0; i < p->d; i++) added[i] = p->delta[(uint64_t)from * p->ld_delta + i] + (p->delta_bias ? p->delta_bias[i] : 0);
            float scale = p->post_w ? inverse_root(added, p->d, p->post_eps) : 1;
            for (unsigned i = 0; i < p->d; i++) h[i] += p->post_w ? added[i] * scale * p->post_w[i] : added[i];
        }
        if (p->sum) {
            memcpy(p->sum + (uint64_t)row * p->d, h, sizeof h);
            written((uint64_t)(p->sum + (uint64_t)row * p->d), sizeof h);
        }
        if (!p->x) continue;
        uint16_t* x = (uint16_t*)p->x + (uint64_t)row * p->ld_x;
        float mean = 0;
        for (unsigned i = 0; layer && p->w && i < p->d; i++) mean += h[i] / p->d;
        for (unsigned i = 0; i < p->d; i++) h[i] -= mean;
        float scale = p->w && !none ? inverse_root(h, p->d, p->eps) : 1;
        for (unsigned i = 0; i < p->d; i++)
            x[i] = rounded(type, none ? 0 : p->w ? h[i] * scale * p->w[i] + (layer && p->b ? p->b[i] : 0) : h[i]);
        written((uint64_t)x, 2 * p->d);
    }
    return 0;
}
int norm_rms(const char* rest, Type type, const void* params) { return norm(params, type, 0); }
int norm_layer(const char* rest, Type type, const void* params) { return norm(params, type, 1); }

/* ---- q, k and v ---- */

static void turn(float* a, float* b, float c, float s) {
    float turned = *a * c - *b * s;
    *b = *b * c + *a * s, *a = turned;
}
static void store(uint16_t* to, Type type, const float* x, unsigned n) {
    for (unsigned i = 0; i < n; i++) to[i] = rounded(type, x[i]);
    written((uint64_t)to, 2 * n);
}
static void append_head(const RopeAppendParams* p, Type type, unsigned row, unsigned head, int publish_slot) {
    unsigned hd = p->head_dim, is_q = head < p->n_heads, is_v = head >= p->n_heads + p->n_kv_heads, half = p->rope_dim / 2;
    float x[hd];
    for (unsigned i = 0; i < hd; i++) x[i] = p->qkv[(uint64_t)row * p->ld + head * hd + i] + (p->bias ? p->bias[head * hd + i] : 0);
    const float* w = is_q ? p->q_norm : is_v ? 0 : p->k_norm;
    float scale = w ? inverse_root(x, hd, p->eps) : 1;
    for (unsigned i = 0; w && i < hd; i++) x[i] = x[i] * scale * w[i];
    for (unsigned i = 0; !is_v && i < half; i++) {
        uint64_t at = (uint64_t)p->row_pos[row] * half + i;
        if (p->interleaved) turn(x + 2 * i, x + 2 * i + 1, p->rope_cos[at], p->rope_sin[at]);
        else turn(x + i, x + i + half, p->rope_cos[at], p->rope_sin[at]);
    }
    if (p->finished) {
        float* to = p->finished + (uint64_t)row * p->ld + head * hd;
        memcpy(to, x, sizeof x);
        written((uint64_t)to, sizeof x);
    }
    if (publish_slot >= 0) store((uint16_t*)(p->published + (uint64_t)publish_slot * p->publish_stride) + head * hd, type, x, hd);
    if (is_q && p->q) store(p->q + ((uint64_t)row * p->n_heads + head) * hd, type, x, hd);
    if (is_q || !p->row_slot || p->row_slot[row] < 0) return;
    uint64_t page = p->row_slot[row] / KV_PAGE_TOKENS, token = p->row_slot[row] % KV_PAGE_TOKENS, kv_head = (head - p->n_heads) % p->n_kv_heads;
    store(p->kv + (((page * p->n_kv_heads + kv_head) * 2 + is_v) * KV_PAGE_TOKENS + token) * hd, type, x, hd);
}
static void tell(abi_u32* flag, abi_u32 epoch) { __atomic_store_n(flag, epoch, __ATOMIC_RELEASE); }
int rope_append(const char* rest, Type type, const void* params) {
    const RopeAppendParams* p = params;
    unsigned published = 0, heads = p->n_heads + 2 * p->n_kv_heads;
    for (unsigned row = 0; row < p->rows; row++) {
        int slot = p->publish_slot ? p->publish_slot[row] : -1;
        for (unsigned head = 0; head < heads; head++) append_head(p, type, row, head, slot);
        published += slot >= 0;
    }
    if (!p->publish_slot) return 0;
    /* As many blocks arrive as the kernel has for the published rows, of all launches that share them. */
    unsigned blocks = (heads + 3) / 4, all = *p->n_published * blocks;
    if (published) *p->arrived += published * blocks;
    if (*p->arrived != all) return 0;
    *p->arrived = 0;
    tell(p->epoch_flag, *p->epoch + p->epoch_add);
    return 0;
}

/* ---- from and to the host ---- */

static unsigned count_of(const abi_u32* n, unsigned most) { return n && *n < most ? *n : most; }
int publish_rows(const char* rest, Type type, const void* params) {
    const PublishParams* p = params;
    unsigned n = count_of(p->n_rows, p->max_rows);
    for (unsigned place = 0; place < n; place++) {
        uint64_t row = p->list ? p->list[place] : place;
        uint16_t* to = (uint16_t*)(p->dst + place * p->dst_stride);
        for (int s = 0; s < 3; s++) {
            if (!p->src[s]) continue;
            store(to, type, (const float*)(p->src[s] + row * p->src_stride[s]), p->src_bytes[s] / 4);
            to += p->src_bytes[s] / 4;
        }
    }
    tell(p->epoch_flag, *p->epoch + p->epoch_add);
    return 0;
}
int copy_rows(const char* rest, Type type, const void* params) {
    const MoveRowsParams* p = params;
    if (p->gate && !*p->gate) return 0;
    unsigned n = count_of(p->n_rows, p->max_rows);
    for (unsigned i = 0; i < n; i++) {
        unsigned from = p->src_list ? p->src_list[i] : i, to = p->dst_list ? p->dst_list[i] : i;
        if (from == ROW_NONE || to == ROW_NONE) continue;
        memmove(p->dst + to * p->dst_stride, p->src + from * p->src_stride, p->n);
        written((uint64_t)(p->dst + to * p->dst_stride), p->n);
    }
    return 0;
}
