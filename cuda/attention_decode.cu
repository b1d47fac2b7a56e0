// attention_decode.cu    out = sum_t softmax(scale * q . k_t) v_t      paged GQA, one query a sequence
//
// in     q [rows][n_heads * D] and pages [page][kv_head][K, V][32][D] of the KV type T (q8: codes and their scales, queries in
//        f16: attention.cuh); a work list (abi/attention.h)
// out    [rows][n_heads * D], bf16 or f16; or (m, s, o) in f32 of rows that are finished elsewhere
// launch decode_attention_T_dD: any grid (blocks take items in turns), block 128, shared Tile<T, D>::BYTES
//        attention_merge_T: grid any, block 128, no shared memory
// tile   block = one item (a row, a KV head, up to 8 query heads of its group, a split of the tokens); each warp takes
//        every fourth 16 tokens, with a ring of its own in shared memory: no block barrier until the end. Larger
//        groups take several blocks an item, which share the keys in L2
//
//            S^T[16 keys][8 heads] = K . Q^T      keys are the m16, heads the n8: padding to 8, not to 16; soft-capped if the
//                                                 model wants it
//            P^T = exp2(S^T - m)                  transposed in registers to the k16 x n8 operand
//            O^T[D][8 heads] += V^T . P^T         V by ldmatrix.trans
//
//        q8: a lane's four codes of a key are its elements of the m16 x k16 operand, so the queries' elements have that
//        order; of values, ldmatrix.trans brings pairs of codes, (d, d + 1) of two tokens, that become rows of the operand.
//        Scores are times the keys' scales before the soft-cap, weights times the values' before P. Two instructions a
//        pair of codes: ~1.6 of 16 bits' instructions for 16 tokens, half of the bytes
//
// bound  memory: 2 * tokens * D * 2 bytes per KV head. In flight: 4 warps * (stages - 1) units of 16 * D * 2 bytes a
//        block, 32 KB at D = 128 and 4 blocks an SM, where an H200 needs 26 KB an SM. An SM may spend 390 cycles on
//        16 tokens at D = 128 there (4.8 TB/s), which take ~250 warp instructions, 63 issue cycles of a quarter:
//        predicted >= 80% of copy bandwidth from 2k tokens and 16 sequences on; what is lost is the start of a
//        split (three dependent loads, ~2 us of the ~14 us that 4 blocks an SM take for 256 tokens, behind other
//        blocks) and 6% partials
// narrow-loads 4 decode_attention_q8_* (scales)
// narrow-loads 0 decode_attention_*
// error  f32 accumulation and softmax, P rounded to T (and summed as rounded): tests/gpu/kernels/attention/
// order  splits lie at fixed tokens, warps and splits are merged in order: bits depend on the row alone
// oracle f64 in tests/gpu/kernels/attention/
// refs   Milakov & Gimelshein 2018; Dao 2023 (flash-decoding); Kwon 2023 (paged KV); Ye 2025 (FlashInfer: host planning)
// no-spill all
// no-stack all

#include "attention.cuh"

namespace decode {

constexpr int WARPS = 4;
constexpr int KEYS = 16; // tokens that a warp takes at a time: the m16 of mma
constexpr int HEADS = DECODE_HEADS;

// Mirrored by decode.rs.
template <class T, int D> struct Tile {
    static constexpr int STAGES = D <= 96 ? 4 : D <= 128 || TANDEM_SM >= 80 ? 3 : 2; // a T4 has 64 KB, and no cp.async
    static constexpr int SCALES = KEYS * ROW<T, D>;                                 // where those of keys, then of values, begin
    static constexpr int UNIT = SCALES + (Stored<T>::SCALED ? 2 * KEYS * 4 : 0);    // bytes of 16 keys, or their values
    static constexpr int BYTES = WARPS * STAGES * UNIT;
    // Warps hand their results over in the ring's memory: o[warp][head][D + 4], then (m, s)[warp][head]. The padding
    // puts the four head pairs that a store of O^T touches on different banks.
    static constexpr int O_STRIDE = D + 4;
    static_assert(WARPS * HEADS * (O_STRIDE + 2) * 4 <= BYTES, "results fit the ring's memory");
};

// Two heads of a lane while tokens go by: running maximum and this lane's share of the sum.
struct Running {
    float m = NEG_INF, s = 0.0f;
};

// A warp's part of an item: every fourth 16 tokens of [begin, end), into o (d x heads) and two heads' running sums.
template <class T, int D> struct WarpPass {
    using Half = typename Stored<T>::Half;
    static constexpr bool SCALED = Stored<T>::SCALED;
    static constexpr u32 CHUNKS = ROW<T, D> / 16; // 16 bytes each, of a row
    static constexpr int STAGES = Tile<T, D>::STAGES, UNIT = Tile<T, D>::UNIT;

    const DecodeAttentionParams& p;
    const DecodeItem& item;
    u32 kv_head;
    u8* ring;
    u32 lane;
    u32 first;   // the warp's first 16 tokens, counted in 16
    u32 n;       // how many times 16
    u32 my_page; // lane i: page of the i-th

    // Starts copying unit `u` (keys of the u/2-th 16 tokens if even, values if odd) to `slot`; an empty group at the end.
    // Scales come with the keys, those of values too: weights are made before values are waited for.
    DEVICE void copy(u32 u, u32 slot) const {
        if (u / 2 < n) {
            const u32 token0 = (first + u / 2 * WARPS) * KEYS;
            const u32 page = __shfl_sync(~0u, my_page, u / 2);
            const auto* const half = page_half<T, D>(p.kv, page, p.n_kv_heads, kv_head, u % 2);
            const auto* const from = half + token0 % KV_PAGE_TOKENS * D;
#pragma unroll(COPY_UNROLL)
            for (u32 i = 0; i < ceil_div(KEYS * CHUNKS, 32); i++) {
                const u32 c = lane + 32 * i, token = token0 + c / CHUNKS;
                if (KEYS * CHUNKS % 32 && c >= KEYS * CHUNKS) break;
                // Zeros for tokens outside: what memory holds there may be NaN, and 0 * NaN is not 0.
                cp_async_16(ring + slot * UNIT + swizzle<ROW<T, D>>(c / CHUNKS, c % CHUNKS), from + c * CHUNK<T>,
                            item.begin <= token && token < item.end);
            }
            if (SCALED && u % 2 == 0 && lane < 2 * KEYS / 4)
                cp_async_16(ring + slot * UNIT + Tile<T, D>::SCALES + lane * 16,
                            half + lane / (KEYS / 4) * PAGE_HALF<T, D> + SCALES_AT<D> + token0 % KV_PAGE_TOKENS * 4 + lane % (KEYS / 4) * 16);
        }
        cp_async_commit();
    }

    // Elements 16 * k.. of 16 keys as the m16 x k16 operand.
    DEVICE void keys_of(const u8* keys, u32 k, u32 a[4]) const {
        if constexpr (SCALED) {
            u32 rows[2];
            ldmatrix_x2(rows, keys + swizzle<D>(lane % 16, k));
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 codes = biased(rows[i]);
                a[i] = first_codes(codes), a[2 + i] = last_codes(codes);
            }
        } else {
            ldmatrix_x4(a, keys + swizzle<2 * D>(lane % 16, 2 * k + lane / 16));
        }
    }

    // Elements 16 * t.. of 16 tokens' values as the m16 x k16 operand; of q8 its row r is element 2 * (r % 8) + r / 8.
    DEVICE void values_of(const u8* values, u32 t, u32 a[4]) const {
        if constexpr (SCALED) {
            u32 tokens[2];
            ldmatrix_x2_trans(tokens, values + swizzle<D>(lane % 16, t));
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 codes = biased(tokens[i]);
                a[2 * i] = even_codes(codes), a[2 * i + 1] = odd_codes(codes);
            }
        } else {
            ldmatrix_x4_trans(a, values + swizzle<2 * D>(lane % 8 + lane / 16 * 8, 2 * t + lane / 8 % 2));
        }
    }

    // x[key lane/4 (+8)][head 2 * (lane%4) (+1)]
    DEVICE void scores(const u8* keys, const u32 q[D / 16][2], float x[4]) const {
        float even[4] = {}, odd[4] = {}; // two chains: an mma waits ~33 cycles for the one before
#pragma unroll
        for (u32 k = 0; k < D / 16; k++) {
            u32 a[4];
            keys_of(keys, k, a);
            mma_16816<Half>(k % 2 ? odd : even, a, q[k]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = even[i] + odd[i];
            if (SCALED) x[i] *= ((const float*)(keys + Tile<T, D>::SCALES))[lane / 4 + i / 2 * 8];
        }
        if (p.cap_span != 0.0f)
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = soft_capped(x[i], p.cap_span, p.cap_slope);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] *= p.scale_log2;
    }

    DEVICE void run(const u32 q[D / 16][2], float o[D / 16][4], Running head[2]) const {
        u32 to = 0, from = 0; // slots, wrapping around
#pragma unroll
        for (u32 u = 0; u < STAGES - 1; u++) copy(u, to++);
        for (u32 i = 0; i < n; i++) {
            // The warp passes this barrier when the unit is there and the one before it has been read: its slot is free.
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            copy(2 * i + STAGES - 1, to);
            to = to + 1 == STAGES ? 0 : to + 1;

            float x[4];
            scores(ring + from * UNIT, q, x);

            const u32 key = (first + i * WARPS) * KEYS + lane / 4;
            const bool seen[2] = {item.begin <= key && key < item.end, item.begin <= key + 8 && key + 8 < item.end};
            float scale[2], exponent[2] = {};
            if (SCALED) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float of = ((const float*)(ring + from * UNIT + Tile<T, D>::SCALES))[KEYS + lane / 4 + 8 * j];
                    scale[j] = seen[j] ? of : 0.0f; // 0 * NaN is not 0
                    exponent[j] = scale_exponent(scale[j]);
                }
            }
            from = from + 1 == STAGES ? 0 : from + 1;
            float rescale[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                x[h] = seen[0] ? x[h] : NEG_INF;
                x[2 + h] = seen[1] ? x[2 + h] : NEG_INF;
                float m = fmaxf(x[h] + exponent[0], x[2 + h] + exponent[1]);
#pragma unroll
                for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
                m = fmaxf(m, head[h].m);
                const float base = finite_or_zero(m);
                rescale[h] = ex2(head[h].m - base);
                head[h].m = m;
                x[h] = ex2(x[h] - base);
                x[2 + h] = ex2(x[2 + h] - base);
            }
            u32 p_lo, p_hi;
            if (SCALED) {
                p_lo = pack2<Half>(x[0] * scale[0], x[1] * scale[0]), p_hi = pack2<Half>(x[2] * scale[1], x[3] * scale[1]);
#pragma unroll
                for (int h = 0; h < 2; h++) head[h].s = head[h].s * rescale[h] + (x[h] + x[2 + h]);
            } else {
                p_lo = pack2<Half>(x[0], x[1]), p_hi = pack2<Half>(x[2], x[3]);
                // Summed as rounded: the result is a mean of values, whatever T is.
                const float2 lo = unpack2<Half>(p_lo), hi = unpack2<Half>(p_hi);
                head[0].s = head[0].s * rescale[0] + (lo.x + hi.x);
                head[1].s = head[1].s * rescale[1] + (lo.y + hi.y);
            }
            if (__ballot_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                for (u32 t = 0; t < D / 16; t++) {
                    o[t][0] *= rescale[0], o[t][1] *= rescale[1];
                    o[t][2] *= rescale[0], o[t][3] *= rescale[1];
                }
            }
            const u32 weights[2] = {movmatrix_trans(p_lo), movmatrix_trans(p_hi)};

            cp_async_wait<STAGES - 2>();
            __syncwarp();
            copy(2 * i + STAGES, to);
            to = to + 1 == STAGES ? 0 : to + 1;
            const u8* values = ring + from * UNIT;
            from = from + 1 == STAGES ? 0 : from + 1;
#pragma unroll
            for (u32 t = 0; t < D / 16; t++) {
                u32 a[4];
                values_of(values, t, a);
                mma_16816<Half>(o[t], a, weights);
            }
        }
        cp_async_wait<0>();
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int d = 4; d < 32; d *= 2) head[h].s += __shfl_xor_sync(~0u, head[h].s, d);
    }
};

// Parts of one head, merged in order: part i has (m, s) at ms[2 * i * ms_stride] and o at o[i * o_stride].
struct Merged {
    float m, s;
    float4 o;
};
DEVICE Merged merge(u32 n, const float* ms, u32 ms_stride, const float* o, u64 o_stride) {
    Merged r = {NEG_INF, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    for (u32 i = 0; i < n; i++) r.m = fmaxf(r.m, ms[i * ms_stride]);
    const float base = finite_or_zero(r.m);
#pragma unroll 4
    for (u32 i = 0; i < n; i++) {
        const float f = ex2(ms[i * ms_stride] - base);
        const float4 v = *(const float4*)(o + i * o_stride);
        r.s += ms[i * ms_stride + 1] * f;
        r.o.x += v.x * f, r.o.y += v.y * f, r.o.z += v.z * f, r.o.w += v.w * f;
    }
    return r;
}

// A finished row's head: elements d..d+4 to where the item wants them.
template <int D> DEVICE void finish(const DecodeAttentionParams& p, const DecodeItem& item, u32 head, u32 d, const Merged& r) {
    if (item.partial == ATTENTION_FINAL) {
        const float inv = inverse_sum_with(p.sinks, head, r.m, r.s);
        uint2 v;
        v.x = pack2_as(p.out_type, normalised(r.o.x, inv), normalised(r.o.y, inv));
        v.y = pack2_as(p.out_type, normalised(r.o.z, inv), normalised(r.o.w, inv));
        *(uint2*)((u16*)p.out + ((u64)item.row * p.n_heads + head) * D + d) = v;
    } else {
        const u64 at = (u64)item.partial * p.n_heads + head;
        *(float4*)(p.part_o + at * D + d) = r.o;
        if (d == 0) p.part_m[at] = r.m * LN_2, p.part_s[at] = r.s;
    }
}

// One item: all warps' passes, merged; with several splits, the last block to finish merges those.
template <class T, int D> DEVICE void run_item(const DecodeAttentionParams& p, const DecodeItem& item, u32 kv_head, u32 head_block, u8* smem) {
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u32 group = p.n_heads / p.n_kv_heads;
    const u32 head0 = kv_head * group + head_block * HEADS;
    const u32 heads = min(group - head_block * HEADS, (u32)HEADS);

    // The warp's 16-token steps are those = warp (mod 4), counted from the sequence's first token.
    const u32 step0 = item.begin / KEYS;
    const u32 first = step0 + (warp - step0) % WARPS;
    const u32 last = ceil_div(item.end, KEYS); // one past
    const u32 n = item.begin < item.end && first < last ? ceil_div(last - first, WARPS) : 0;
    u32 my_page = 0;
    if (lane < n) my_page = p.page_table[(u32)(item.pages + (first + lane * WARPS) * KEYS / KV_PAGE_TOKENS)];

    // Queries as the n8 operand: head lane/4, elements 2 * (lane%4) + {0, 1, 8, 9} of each 16.
    u32 q[D / 16][2];
    const bool real = lane / 4 < heads;
    constexpr bool SCALED = Stored<T>::SCALED; // then its elements are 4 * (lane%4) + {0, 1, 2, 3}
    const u32* row = (const u32*)((const u16*)p.q + ((u64)item.row * p.n_heads + head0 + (real ? lane / 4 : 0)) * D) + lane % 4 * (SCALED ? 2 : 1);
#pragma unroll
    for (u32 k = 0; k < D / 16; k++) {
        q[k][0] = real ? row[8 * k] : 0;
        q[k][1] = real ? row[8 * k + (SCALED ? 1 : 4)] : 0;
    }

    float o[D / 16][4] = {};
    Running run[2];
    WarpPass<T, D>{p, item, kv_head, smem + warp * (Tile<T, D>::STAGES * Tile<T, D>::UNIT), lane, first, n, my_page}.run(q, o, run);

    __syncthreads(); // the rings are read: their memory carries results now
    float* const all_o = (float*)smem;
    float* const all_ms = all_o + WARPS * HEADS * Tile<T, D>::O_STRIDE;
    const u32 pair = lane % 4 * 2;
    if (lane < 4)
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            all_ms[2 * (warp * HEADS + pair + h)] = run[h].m;
            all_ms[2 * (warp * HEADS + pair + h) + 1] = run[h].s;
        }
    float* const my_o = all_o + (warp * HEADS + pair) * Tile<T, D>::O_STRIDE + lane / 4 * (SCALED ? 2 : 1);
#pragma unroll
    for (u32 t = 0; t < D / 16; t++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) my_o[i % 2 * Tile<T, D>::O_STRIDE + 16 * t + i / 2 * (SCALED ? 1 : 8)] = o[t][i];
    __syncthreads();

    // From here on a thread has four elements of a head at a time.
    const bool whole = item.n_splits == 1;
    for (u32 e = tid; e < heads * (D / 4); e += WARPS * 32) {
        const u32 h = e / (D / 4), d = e % (D / 4) * 4;
        const Merged r = merge(WARPS, all_ms + 2 * h, 2 * HEADS, all_o + h * Tile<T, D>::O_STRIDE + d, HEADS * Tile<T, D>::O_STRIDE);
        if (whole) {
            finish<D>(p, item, head0 + h, d, r);
        } else {
            const u64 at = (u64)(item.workspace + item.split) * p.n_heads + head0 + h;
            *(float4*)(p.split_o + at * D + d) = r.o;
            if (d == 0) p.split_ms[2 * at] = r.m, p.split_ms[2 * at + 1] = r.s;
        }
    }
    if (whole) return;

    // Everyone's stores, then one ticket a block; who draws the last one sees all of them.
    __threadfence();
    __syncthreads();
    u32* const last_drawn = (u32*)smem;
    u32* const counter = p.counters + (u64)item.row * (p.n_kv_heads * ceil_div(group, HEADS)) + kv_head * ceil_div(group, HEADS) + head_block;
    if (tid == 0) *last_drawn = atomicAdd(counter, 1u) == item.n_splits - 1;
    __syncthreads();
    if (!*last_drawn) return;
    __threadfence();
    if (tid == 0) atomicExch(counter, 0u); // for the next layer
    for (u32 e = tid; e < heads * (D / 4); e += WARPS * 32) {
        const u32 h = e / (D / 4), d = e % (D / 4) * 4;
        const u64 at = (u64)item.workspace * p.n_heads + head0 + h;
        finish<D>(p, item, head0 + h, d,
                  merge(item.n_splits, p.split_ms + 2 * at, 2 * p.n_heads, p.split_o + at * D + d, (u64)p.n_heads * D));
    }
}

template <class T, int D> DEVICE void attention(const DecodeAttentionParams& p) {
    SHARED_DYNAMIC(smem);
    const u32 head_blocks = ceil_div(p.n_heads / p.n_kv_heads, HEADS);
    const u32 per_item = p.n_kv_heads * head_blocks;
    const u32 n = *p.n_items * per_item;
    // Neighbouring blocks share an item: their KV heads are neighbours in a page.
    for (u32 w = blockIdx.x; w < n; w += gridDim.x) {
        const DecodeItem item = p.items[w / per_item];
        run_item<T, D>(p, item, w % per_item / head_blocks, w % head_blocks, smem);
        __syncthreads(); // the next item reuses shared memory
    }
}

// A warp takes a head of a row at a time.
template <class T> DEVICE void merge_two(const AttentionMergeParams& p) {
    const u32 lane = threadIdx.x % 32, n = *p.n_rows * p.n_heads;
    for (u32 w = blockIdx.x * WARPS + threadIdx.x / 32; w < n; w += gridDim.x * WARPS) {
        const float m_a = p.m_a[w], m_b = p.m_b[w];
        const float base = finite_or_zero(fmaxf(m_a, m_b));
        const float f_a = __expf(m_a - base), f_b = __expf(m_b - base);
        const u32 head = w % p.n_heads;
        const float inv = inverse_sum_with(p.sinks, head, base * LOG2_E, p.s_a[w] * f_a + p.s_b[w] * f_b);
        const u64 from = (u64)w * p.head_dim;
        u32* const to = (u32*)((T*)p.out + ((u64)p.rows[w / p.n_heads] * p.n_heads + head) * p.head_dim);
        for (u32 d = lane; d < p.head_dim / 2; d += 32) {
            const float2 a = ((const float2*)(p.o_a + from))[d], b = ((const float2*)(p.o_b + from))[d];
            to[d] = pack2<T>(normalised(a.x * f_a + b.x * f_b, inv), normalised(a.y * f_a + b.y * f_b, inv));
        }
    }
}

} // namespace decode

// Blocks an SM that registers are bounded for: more, and shared memory is the limit.
#define DECODE_KERNEL(T, D) \
    KERNEL_BOUNDS(decode_attention_##T##_d##D, DecodeAttentionParams, 128, (D <= 128 && TANDEM_SM >= 80 ? 4 : 2)) { decode::attention<T, D>(p); }
#define DECODE_KERNELS(T) DECODE_KERNEL(T, 64) DECODE_KERNEL(T, 80) DECODE_KERNEL(T, 96) DECODE_KERNEL(T, 128) DECODE_KERNEL(T, 256)

DECODE_KERNELS(f16)
DECODE_KERNELS(q8)
#if TANDEM_SM >= 80
DECODE_KERNELS(bf16)
#endif

KERNEL_BOUNDS(attention_merge_f16, AttentionMergeParams, 128, 8) { decode::merge_two<f16>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(attention_merge_bf16, AttentionMergeParams, 128, 8) { decode::merge_two<bf16>(p); }
#endif
