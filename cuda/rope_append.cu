// rope_append.cu    bias, q/k norm, RoPE, q to its buffer, K and V to their pages, rows for the CPU to the host
//
//   q, k, v = qkv + bias;  q, k = rope(rms_norm(q), rms_norm(k));  pages[row_slot] = k, v        a warp a head
//
// in     qkv[rows][ld] f32: n_heads query heads, n_kv_heads key heads, as many value heads; ld, head_dim and
//        rope_dim multiples of 4, head_dim <= 256; cosines and sines f32 [positions][rope_dim/2]
// out    q[rows][n_heads*head_dim]; K and V in pages [page][kv_head][K, V][token][head_dim]; all in the KV type,
//        rounded to nearest even (q8: codes and a scale of each head in pages, all else in f16). A row with publish_slot >= 0 also goes to mapped host memory in that type, q, k and v side
//        by side; when all such rows are there the epoch is published (see epoch.cuh). Each output is optional, and
//        `finished` (f32, before the rounding) may be qkv itself: a lane stores only elements that it has loaded, after
//        all its loads. So a launch that only finishes and one that only rounds give the bits of one that does both
// launch rope_append_T: norms of each head; grid (rows, ceil(heads/4)), block 128 (4 heads), no shared memory
//        rope_append_whole_T: norms of all query heads together and of all key heads together; grid rows, block 32 *
//        min(heads, 32), whose warps take the row's heads in turns, 128 bytes of shared memory
// registers a lane holds two quads: four elements of two RoPE pairs each, so loads are 8 bytes and stores 4
// bound  memory: 4 bytes in and 2 out an element
// error  rms: (head_dim/32 + 8) eps relative, of whole rows (width/threads + 40) eps; RoPE: 1.5 eps (|a c| + |b s|); then the rounding to the KV type
// oracle src/reference/{norm,rope}.rs, cache layout in abi.h
// no-spill all
// no-stack all
#include "attention.cuh"
#include "common.cuh"
#include "epoch.cuh"
#include "ptx.cuh"

namespace rope_append {

constexpr u32 WARPS = 4;
constexpr int QUADS = 2; // of a lane: 32 lanes * 2 quads * 4 elements = 256

// Four elements of a head, as two pairs of neighbours: at `first`, `first + 1` and `second`, `second + 1`. With
// half pairing the neighbours belong to two RoPE pairs, (x0, x2) and (x1, x3), with interleaved ones to (x0, x1)
// and (x2, x3): either way the pairs numbered 2 * quad and 2 * quad + 1.
struct Quad {
    u32 first, second;
    float x[4];
};

// An element's code of q8 in the low byte: 1.5 * 2^23 leaves a float's integer part, rounded to nearest even, in the low bits. At
// most 127, as |x| <= amax.
DEVICE u32 code(float x, float inverse) { return __float_as_uint(fmaf(x, inverse, 12582912.0f)) & 0xff; }
DEVICE u16 codes(float lo, float hi, float inverse) { return (u16)(code(lo, inverse) | code(hi, inverse) << 8); }

// A head's scale and its inverse, as tandem::cache::quantise_head: magnitudes by their bits, in which NaN is larger than infinity.
DEVICE float2 scales(const Quad (&quads)[QUADS]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < QUADS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) most = max(most, __float_as_uint(quads[i].x[j]) & 0x7fffffffu);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
    const float amax = __uint_as_float(most);
    return make_float2(amax / 127.0f, most ? fminf(127.0f / amax, 3.4028234663852886e38f) : 0.0f);
}

DEVICE void turn(float& a, float& b, float c, float s) {
    float turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
}

// The norm of a whole row has been reduced to `scale` already.
template <class T, bool WHOLE> DEVICE void head(const RopeAppendParams& p, u32 row, u32 head, int publish_slot, float scale = 0) {
    u32 hd = p.head_dim, n_quads = hd / 4;
    bool is_q = head < p.n_heads, is_v = head >= p.n_heads + p.n_kv_heads;
    u32 rotated = is_v ? 0 : p.rope_dim / 4; // quads
    bool halves = !p.interleaved;
    const float* from = p.qkv + (u64)row * p.ld + head * hd;

    Quad quads[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        Quad& q = quads[i];
        u32 n = lane_id() + 32 * i;
        bool split = halves && n < rotated;
        q.first = split ? 2 * n : 4 * n;
        q.second = split ? 2 * n + p.rope_dim / 2 : 4 * n + 2;
        float2 a = make_float2(0, 0), b = a;
        if (n < n_quads) {
            a = *(const float2*)(from + q.first);
            b = *(const float2*)(from + q.second);
            if (p.bias) {
                float2 c = *(const float2*)(p.bias + head * hd + q.first), d = *(const float2*)(p.bias + head * hd + q.second);
                a = make_float2(a.x + c.x, a.y + c.y);
                b = make_float2(b.x + d.x, b.y + d.y);
            }
        }
        q.x[0] = a.x, q.x[1] = a.y, q.x[2] = b.x, q.x[3] = b.y;
    }

    const float* w = is_q ? p.q_norm : is_v ? (const float*)0 : p.k_norm;
    if (w) {
        if (WHOLE) {
            w += (is_q ? head : head - p.n_heads) * hd;
        } else {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) squares += quads[i].x[j] * quads[i].x[j];
            scale = rsqrtf(warp_sum(squares) / (float)hd + p.eps);
        }
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            Quad& q = quads[i];
            if (lane_id() + 32 * i >= n_quads) continue;
            float2 a = *(const float2*)(w + q.first), b = *(const float2*)(w + q.second);
            q.x[0] = q.x[0] * scale * a.x, q.x[1] = q.x[1] * scale * a.y;
            q.x[2] = q.x[2] * scale * b.x, q.x[3] = q.x[3] * scale * b.y;
        }
    }

    if (rotated) {
        u64 table = (u64)p.row_pos[row] * (p.rope_dim / 2);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            Quad& q = quads[i];
            u32 n = lane_id() + 32 * i;
            if (n >= rotated) continue;
            float2 c = *(const float2*)(p.rope_cos + table + 2 * n), s = *(const float2*)(p.rope_sin + table + 2 * n);
            if (halves) {
                turn(q.x[0], q.x[2], c.x, s.x);
                turn(q.x[1], q.x[3], c.y, s.y);
            } else {
                turn(q.x[0], q.x[1], c.x, s.x);
                turn(q.x[2], q.x[3], c.y, s.y);
            }
        }
    }

    using Half = typename Stored<T>::Half;
    u16* to = 0;
    u8* to_codes = 0;
    float inverse = 0;
    if (is_q) {
        if (p.q) to = p.q + ((u64)row * p.n_heads + head) * hd;
    } else if (p.row_slot) {
        int slot = p.row_slot[row];
        u32 kv_head = (head - p.n_heads) % p.n_kv_heads;
        u64 page = (u32)slot / KV_PAGE_TOKENS, token = (u32)slot % KV_PAGE_TOKENS;
        u64 half = (page * p.n_kv_heads + kv_head) * 2 + is_v; // keys or values of a head in the page
        if (Stored<T>::SCALED) {
            const float2 scale = scales(quads);
            u8* const at = (u8*)p.kv + half * (KV_PAGE_TOKENS * (hd + 4));
            inverse = scale.y;
            if (slot >= 0) {
                to_codes = at + token * hd;
                if (lane_id() == 0) *(float*)(at + KV_PAGE_TOKENS * hd + 4 * token) = scale.x;
            }
        } else if (slot >= 0) {
            to = p.kv + (half * KV_PAGE_TOKENS + token) * hd;
        }
    }
    float* finished = p.finished ? p.finished + (u64)row * p.ld + head * hd : 0;
    u8* publish = 0;
    if (publish_slot >= 0) publish = p.published + (u64)publish_slot * p.publish_stride + (u64)head * hd * 2;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        Quad& q = quads[i];
        if (lane_id() + 32 * i >= n_quads) continue;
        u32 a = pack2<Half>(q.x[0], q.x[1]), b = pack2<Half>(q.x[2], q.x[3]);
        if (to_codes) {
            *(u16*)(to_codes + q.first) = codes(q.x[0], q.x[1], inverse);
            *(u16*)(to_codes + q.second) = codes(q.x[2], q.x[3], inverse);
        }
        if (to) {
            *(u32*)(to + q.first) = a;
            *(u32*)(to + q.second) = b;
        }
        if (finished) {
            *(float2*)(finished + q.first) = make_float2(q.x[0], q.x[1]);
            *(float2*)(finished + q.second) = make_float2(q.x[2], q.x[3]);
        }
        if (publish) {
            *(u32*)((u16*)publish + q.first) = a;
            *(u32*)((u16*)publish + q.second) = b;
        }
    }
}

// What 1 / sqrt(mean square + eps) of heads first..first + n of a row is; the whole block.
DEVICE float whole_scale(const RopeAppendParams& p, u32 row, u32 first, u32 n, float* scratch) {
    const float* from = p.qkv + (u64)row * p.ld;
    float squares = 0;
    for (u32 i = first * p.head_dim + 4 * thread_rank(); i < (first + n) * p.head_dim; i += 4 * block_threads()) {
        float4 x = *(const float4*)(from + i);
        if (p.bias) {
            float4 b = *(const float4*)(p.bias + i);
            x = make_float4(x.x + b.x, x.y + b.y, x.z + b.z, x.w + b.w);
        }
        squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    }
    return rsqrtf(block_sum(squares, scratch) / (float)(n * p.head_dim) + p.eps);
}

// Publishes the epoch if the row, or another one, goes to the host.
DEVICE void publish(const RopeAppendParams& p, u32 row, int publish_slot) {
    if (!p.publish_slot) return;
    // Only the blocks of published rows meet: fences across the bus are not for free.
    u32 n = *p.n_published, epoch = *p.epoch + p.epoch_add;
    if (publish_slot >= 0)
        publish_epoch(p.arrived, n * gridDim.y, p.epoch_flag, epoch);
    else if (n == 0 && row == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        st_release_sys(p.epoch_flag, epoch);
}

DEVICE int publish_slot_of(const RopeAppendParams& p, u32 row) { return p.publish_slot ? p.publish_slot[row] : -1; }

template <class T> DEVICE void rows(const RopeAppendParams& p) {
    u32 row = blockIdx.x, which = blockIdx.y * WARPS + warp_id();
    int publish_slot = publish_slot_of(p, row);
    if (which < p.n_heads + 2 * p.n_kv_heads) head<T, false>(p, row, which, publish_slot);
    publish(p, row, publish_slot);
}

template <class T> DEVICE void whole_rows(const RopeAppendParams& p) {
    SHARED_DYNAMIC(smem);
    u32 row = blockIdx.x;
    int publish_slot = publish_slot_of(p, row);
    float q = p.q_norm ? whole_scale(p, row, 0, p.n_heads, (float*)smem) : 0;
    float k = p.k_norm ? whole_scale(p, row, p.n_heads, p.n_kv_heads, (float*)smem) : 0;
    // The barriers of the sums are behind all their loads, so heads may be stored where they came from.
    for (u32 which = warp_id(); which < p.n_heads + 2 * p.n_kv_heads; which += block_threads() / 32)
        head<T, true>(p, row, which, publish_slot, which < p.n_heads ? q : k);
    publish(p, row, publish_slot);
}

} // namespace rope_append

KERNEL_BOUNDS(rope_append_f16, RopeAppendParams, 128, 1) { rope_append::rows<f16>(p); }
KERNEL_BOUNDS(rope_append_whole_f16, RopeAppendParams, 1024, 1) { rope_append::whole_rows<f16>(p); }
KERNEL_BOUNDS(rope_append_q8, RopeAppendParams, 128, 1) { rope_append::rows<q8>(p); }
KERNEL_BOUNDS(rope_append_whole_q8, RopeAppendParams, 1024, 1) { rope_append::whole_rows<q8>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(rope_append_bf16, RopeAppendParams, 128, 1) { rope_append::rows<bf16>(p); }
KERNEL_BOUNDS(rope_append_whole_bf16, RopeAppendParams, 1024, 1) { rope_append::whole_rows<bf16>(p); }
#endif
