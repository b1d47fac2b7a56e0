// attention_prefill.cu    out = sum_t softmax(scale * q . k_t) v_t      chunks of prompts over paged KV (flash attention)
//
// in     q [rows][n_heads * D] and pages [page][kv_head][K, V][32][D] of the KV type T (q8: codes and their scales, queries in
//        f16: attention.cuh; the chunk's own keys are already appended); a work list of 64-query tiles (abi/attention.h), longest first. A row at position t sees tokens
//        <= t, with a window the last `window` of them
// out    [rows][n_heads * D], bf16 or f16; or (m, s, o) in f32 of rows that are finished elsewhere
// launch prefill_attention_T_dD: grid items * n_heads (any more exit), block 128, shared Tile<T, D>::BYTES
// tile   64 queries x BC keys, a warp takes 16 queries. Q stays in registers (D <= 128) or in shared memory (256)
//
//            S[16][BC] = Q . K^T                  K by ldmatrix; soft-capped if the model wants it
//            P = exp2(S * scale - m)              rounded to T: the accumulators of S are the operand of the next mma
//            O[16][D] += P . V                    V by ldmatrix.trans
//
//        K and V tiles take turns in one ring of STAGES slots, filled by cp.async through the page table: while one is
//        multiplied the next STAGES - 1 are on their way. One block barrier a tile
//
//        q8: ldmatrix brings four codes a lane, a row of K or (transposed) pairs of V; their order of elements is the
//        queries' in registers, and that of the result's columns: a lane has four neighbours. Scores are times the keys' scales
//        before the soft-cap, weights times the values' before P
// regs   at D = 128: 64 O + 32 S + 32 Q + addresses = 240, two blocks an SM (three at D <= 96); no spills
// bound  tensor cores: 4 * queries * keys * D flops, half of a diagonal tile wasted. One ldmatrix.x4 (4 cycles of shared
//        memory) feeds two mma (4 cycles of an A100's tensor cores, 2 of an H200's): shared memory caps an A100 near its
//        peak and an H200 at half of it; with softmax (32 exp2 a thread and tile, 16 a cycle and SM) predicted
//        50-60% of peak on sm_80..89 and 30-35% on sm_90, which has attention_prefill_sm90a.cu. q8: a warp converts each
//        tile anew, 2.5 instructions a pair of codes beside 1/8 mma: predicted 0.6-0.7 of the rate of 16 bits
// narrow-loads 42 prefill_attention_q8_d256 (scales, and the queries in the order of the codes)
// narrow-loads 18 prefill_attention_q8_* (scales)
// narrow-loads 2 all (numbers of a tile's pages)
// error  f32 accumulation and softmax, P rounded to T: tests/gpu/kernels/attention/
// order  key tiles lie at multiples of BC, masked ones change nothing: bits depend on the row alone, not on its tile
// oracle f64 in tests/gpu/kernels/attention/
// refs   Dao 2022, 2023 (FlashAttention 1, 2); Kwon 2023 (paged KV)
// no-spill all
// no-stack all

#include "attention.cuh"

namespace prefill {

constexpr u32 THREADS = 128;
constexpr u32 QUERIES = PREFILL_QUERIES;

// Mirrored by prefill.rs.
template <class T, int D> struct Tile {
    static constexpr u32 KEYS = D <= 128 ? 64 : 32;
    static constexpr bool Q_IN_REGISTERS = D <= 128;
    static constexpr u32 STAGES = D <= 96 ? 4 : D <= 128 || TANDEM_SM >= 80 ? 3 : 2; // 64 KB on a T4
    static constexpr u32 SCALES = KEYS * ROW<T, D>; // where those of the keys, then of the values, begin
    static constexpr u32 SLOT = SCALES + (Stored<T>::SCALED ? 2 * KEYS * 4 : 0);
    // Queries pass through the last slot on their way to registers (of q8 from memory), or stay before the ring.
    static constexpr u32 Q_BYTES = Q_IN_REGISTERS ? 0 : QUERIES * D * 2;
    static constexpr u32 BYTES = Q_BYTES + STAGES * SLOT;
};

// A tile's queries to shared memory; rows past the last are zeros.
template <int D> DEVICE void copy_queries(const PrefillAttentionParams& p, const PrefillItem& item, u32 head, u8* to) {
    constexpr u32 CHUNKS = D / 8;
#pragma unroll(COPY_UNROLL)
    for (u32 i = 0; i < QUERIES * CHUNKS / THREADS; i++) {
        const u32 c = threadIdx.x + THREADS * i, row = c / CHUNKS, chunk = c % CHUNKS;
        const u64 at = (u64)(item.row0 + min(row, item.n_rows - 1)) * p.n_heads + head;
        cp_async_16(to + swizzle<2 * D>(row, chunk), (const u16*)p.q + at * D + chunk * 8, row < item.n_rows);
    }
}

// The pages of one tile of keys (KEYS / 32 of them). Those without a token of [begin, end) are not looked up: they may
// not be on this device.
template <u32 KEYS> struct Pages {
    u32 page[KEYS / KV_PAGE_TOKENS];
    DEVICE void look_up(const u32* table, u32 first, u32 key0, u32 begin, u32 end) {
#pragma unroll
        for (u32 i = 0; i < KEYS / KV_PAGE_TOKENS; i++) {
            const u32 token = key0 + i * KV_PAGE_TOKENS;
            page[i] = begin < token + KV_PAGE_TOKENS && token < end ? table[(u32)(first + token / KV_PAGE_TOKENS)] : 0;
        }
    }
};

// Keys (half 0) or values (1) of tokens key0.. to shared memory; zeros outside [begin, end): memory there may hold NaN,
// and 0 * NaN is not 0. The scales of both come with the keys; outside they are anything.
template <class T, int D, u32 KEYS>
DEVICE void copy_tile(const PrefillAttentionParams& p, const Pages<KEYS>& pages, u32 kv_head, u32 half, u32 key0, u32 begin, u32 end, u8* to) {
    constexpr u32 CHUNKS = ROW<T, D> / 16;
    auto page_of = [&](u32 row) { return KEYS > KV_PAGE_TOKENS && row >= KV_PAGE_TOKENS ? pages.page[KEYS / KV_PAGE_TOKENS - 1] : pages.page[0]; };
#pragma unroll(COPY_UNROLL)
    for (u32 i = 0; i < ceil_div(KEYS * CHUNKS, THREADS); i++) {
        const u32 c = threadIdx.x + THREADS * i, row = c / CHUNKS, token = key0 + row;
        if (KEYS * CHUNKS % THREADS && c >= KEYS * CHUNKS) break;
        const auto* from = page_half<T, D>(p.kv, page_of(row), p.n_kv_heads, kv_head, half) + row % KV_PAGE_TOKENS * D + c % CHUNKS * CHUNK<T>;
        cp_async_16(to + swizzle<ROW<T, D>>(row, c % CHUNKS), from, begin <= token && token < end);
    }
    if (Stored<T>::SCALED && half == 0 && threadIdx.x < 2 * KEYS / 4) {
        const u32 row = threadIdx.x % (KEYS / 4) * 4; // the first of four tokens
        const auto* from = page_half<T, D>(p.kv, page_of(row), p.n_kv_heads, kv_head, threadIdx.x / (KEYS / 4)) + SCALES_AT<D> + row % KV_PAGE_TOKENS * 4;
        cp_async_16(to + Tile<T, D>::SCALES + threadIdx.x * 16, from, begin < key0 + row + 4 && key0 + row < end);
    }
}

// Elements 16 * k.. of queries as the m16 x k16 operand. `rows` is the warp's 16 rows in shared memory.
template <class T, int D> DEVICE void queries_of(const u8* rows, u32 k, u32 lane, u32 a[4]) {
    if constexpr (Stored<T>::SCALED) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const uint2 four = *(const uint2*)(rows + swizzle<2 * D>(lane / 4 + 8 * i, 2 * k + lane % 4 / 2) + lane % 2 * 8);
            a[i] = four.x, a[2 + i] = four.y;
        }
    } else {
        ldmatrix_x4(a, rows + swizzle<2 * D>(lane % 16, 2 * k + lane / 16));
    }
}

// The same from memory, of q8: row lane/4 (and + 8) of the warp's.
template <int D> DEVICE void queries_from(const PrefillAttentionParams& p, const PrefillItem& item, u32 head, u32 k, u32 a[4]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 row = warp * 16 + lane / 4 + 8 * i;
        const u64 at = (u64)(item.row0 + min(row, item.n_rows - 1)) * p.n_heads + head;
        uint2 four = *(const uint2*)((const u16*)p.q + at * D + 16 * k + lane % 4 * 4);
        if (row >= item.n_rows) four = make_uint2(0, 0);
        a[i] = four.x, a[2 + i] = four.y;
    }
}

// Elements 16 * k.. of 16 keys (16 * t..) as two k16 x n8 operands, of eight keys each.
template <class T, int D> DEVICE void keys_of(const u8* keys, u32 t, u32 k, u32 lane, u32 b[4]) {
    if constexpr (Stored<T>::SCALED) {
        u32 codes[2];
        ldmatrix_x2(codes, keys + swizzle<D>(16 * t + lane % 16, k));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 of = biased(codes[i]);
            b[2 * i] = first_codes(of), b[2 * i + 1] = last_codes(of);
        }
    } else {
        ldmatrix_x4(b, keys + swizzle<2 * D>(16 * t + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    }
}
// Elements 16 * t.. of 16 tokens' values (16 * k..), likewise: eight elements each, of q8 the even ones and the odd ones.
template <class T, int D> DEVICE void values_of(const u8* values, u32 k, u32 t, u32 lane, u32 b[4]) {
    if constexpr (Stored<T>::SCALED) {
        u32 codes[2];
        ldmatrix_x2_trans(codes, values + swizzle<D>(16 * k + lane % 16, t));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 of = biased(codes[i]);
            b[i] = even_codes(of), b[2 + i] = odd_codes(of);
        }
    } else {
        ldmatrix_x4_trans(b, values + swizzle<2 * D>(16 * k + lane % 16, 2 * t + lane / 16));
    }
}

template <class T, int D> DEVICE void attention(const PrefillAttentionParams& p) {
    using Shape = Tile<T, D>;
    using Half = typename Stored<T>::Half;
    constexpr u32 KEYS = Shape::KEYS, STAGES = Shape::STAGES;
    constexpr bool SCALED = Stored<T>::SCALED;
    SHARED_DYNAMIC(smem);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 head = blockIdx.x % p.n_heads; // neighbouring blocks share keys in L2
    const u32 kv_head = head / (p.n_heads / p.n_kv_heads);
    if (blockIdx.x / p.n_heads >= *p.n_items) return;
    const PrefillItem item = p.items[blockIdx.x / p.n_heads];
    u8* const ring = smem + Shape::Q_BYTES;

    // The row at `pos` sees tokens [low, high); both grow with it, so a warp's first and last row bound what all 16 see
    // (no mask needed) and what any of them sees (the rest is skipped). Computed anew for each tile: registers are scarce.
    const u32 pos0 = item.first_pos + warp * 16;
    auto low = [&](u32 pos) { return p.window && pos + 1 > p.window ? max(item.begin, pos + 1 - p.window) : item.begin; };
    auto high = [&](u32 pos) { return min(pos + 1, item.end); };

    const u32 begin = item.begin, end = min(item.end, item.first_pos + item.n_rows);
    const u32 tile0 = begin / KEYS;
    const u32 n_units = begin < end ? 2 * (ceil_div(end, KEYS) - tile0) : 0; // K, V, K, V...

    // Starts unit `u` (the tile's keys if even, its values if odd); an empty group after the last. Page numbers are
    // looked up one unit ahead: a copy must not wait for its address.
    Pages<KEYS> pages;
    if (n_units) pages.look_up(p.page_table, item.pages, tile0 * KEYS, begin, end);
    u32 to = 0, from = 0; // slots, wrapping around
    auto copy = [&](u32 u) {
        if (u < n_units) {
            const u32 key0 = (tile0 + u / 2) * KEYS;
            copy_tile<T, D>(p, pages, kv_head, u % 2, key0, begin, end, ring + to * Shape::SLOT);
            if (u % 2) pages.look_up(p.page_table, item.pages, key0 + KEYS, begin, end);
        }
        to = to + 1 == STAGES ? 0 : to + 1;
        cp_async_commit();
    };
    // Until the next unit is there for all threads, and the one before it has been read by all: its slot is free.
    auto next = [&](u32 u) -> const u8* {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy(u + STAGES - 1);
        const u8* slot = ring + from * Shape::SLOT;
        from = from + 1 == STAGES ? 0 : from + 1;
        return slot;
    };

    u8* const q_shared = Shape::Q_IN_REGISTERS ? ring + (STAGES - 1) * Shape::SLOT : smem;
    if (!SCALED || !Shape::Q_IN_REGISTERS) copy_queries<D>(p, item, head, q_shared);
    cp_async_commit();
#pragma unroll
    for (u32 u = 0; u < STAGES - 1; u++) copy(u);
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    const u8* const q_row = q_shared + warp * 16 * D * 2;
    u32 q[Shape::Q_IN_REGISTERS ? D / 16 : 1][4];
    if (Shape::Q_IN_REGISTERS) {
#pragma unroll
        for (u32 k = 0; k < (Shape::Q_IN_REGISTERS ? D / 16 : 1); k++)
            if constexpr (SCALED) queries_from<D>(p, item, head, k, q[k]);
            else queries_of<T, D>(q_row, k, lane, q[k]);
    }

    float o[D / 8][4] = {};
    float m[2] = {NEG_INF, NEG_INF}, s[2] = {};
    for (u32 u = 0; u < n_units; u += 2) {
        const u32 key0 = (tile0 + u / 2) * KEYS;
        const bool active = warp * 16 < item.n_rows && key0 < high(pos0 + 15) && low(pos0) < key0 + KEYS;
        const u8* const keys = next(u);
        u32 weights[KEYS / 16][4];
        if (active) {
            float x[KEYS / 8][4] = {};
#pragma unroll
            for (u32 k = 0; k < D / 16; k++) {
                if (!Shape::Q_IN_REGISTERS) queries_of<T, D>(q_row, k, lane, q[0]);
#pragma unroll
                for (u32 t = 0; t < KEYS / 16; t++) {
                    u32 b[4];
                    keys_of<T, D>(keys, t, k, lane, b);
                    mma_16816<Half>(x[2 * t], q[Shape::Q_IN_REGISTERS ? k : 0], b);
                    mma_16816<Half>(x[2 * t + 1], q[Shape::Q_IN_REGISTERS ? k : 0], b + 2);
                }
            }
            // A lane's columns are keys 8 * t + lane % 4 * 2 and the next.
            const float* const scales = (const float*)(keys + Shape::SCALES) + lane % 4 * 2;
            if constexpr (SCALED) {
#pragma unroll
                for (u32 t = 0; t < KEYS / 8; t++) {
                    const float2 of = *(const float2*)(scales + 8 * t);
                    x[t][0] *= of.x, x[t][1] *= of.y, x[t][2] *= of.x, x[t][3] *= of.y;
                }
            }
            if (p.cap_span != 0.0f) // columns outside: the other order spills at D = 96 on sm_86
#pragma unroll
                for (u32 i = 0; i < 4; i++)
#pragma unroll
                    for (u32 t = 0; t < KEYS / 8; t++) x[t][i] = soft_capped(x[t][i], p.cap_span, p.cap_slope);
            if (key0 < low(pos0 + 15) || high(pos0) < key0 + KEYS) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 pos = pos0 + lane / 4 + 8 * r, first = low(pos), end = high(pos);
#pragma unroll
                    for (u32 t = 0; t < KEYS / 8; t++)
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            const u32 key = key0 + 8 * t + lane % 4 * 2 + i;
                            if (key < first || key >= end) x[t][2 * r + i] = NEG_INF;
                        }
                }
            }
            // Those of values; none outside what the item's rows see: 0 * NaN is not 0.
            float2 scale[SCALED ? KEYS / 8 : 1];
            if constexpr (SCALED) {
                const bool edge = key0 < begin || end < key0 + KEYS;
#pragma unroll
                for (u32 t = 0; t < (SCALED ? KEYS / 8 : 1); t++) {
                    scale[t] = *(const float2*)(scales + KEYS + 8 * t);
                    const u32 key = key0 + 8 * t + lane % 4 * 2;
                    if (edge && (key < begin || key >= end)) scale[t].x = 0.0f;
                    if (edge && (key + 1 < begin || key + 1 >= end)) scale[t].y = 0.0f;
                }
            }
            // Online softmax of the two rows; the scale is folded into exp2's argument.
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                float most = NEG_INF;
#pragma unroll
                for (u32 t = 0; t < KEYS / 8; t++)
                    if constexpr (SCALED) {
                        const float2 of = scale[SCALED ? t : 0];
                        most = fmaxf(most, fmaxf(fmaf(x[t][2 * r], p.scale_log2, scale_exponent(of.x)), fmaf(x[t][2 * r + 1], p.scale_log2, scale_exponent(of.y))));
                    } else {
                        most = fmaxf(most, fmaxf(x[t][2 * r], x[t][2 * r + 1]));
                    }
                most = warp_max<4>(most);
                most = fmaxf(m[r], SCALED ? most : most * p.scale_log2);
                const float base = finite_or_zero(most);
                const float rescale = ex2(m[r] - base);
                m[r] = most;
                float sum = 0.0f;
#pragma unroll
                for (u32 t = 0; t < KEYS / 8; t++) {
                    x[t][2 * r] = ex2(fmaf(x[t][2 * r], p.scale_log2, -base));
                    x[t][2 * r + 1] = ex2(fmaf(x[t][2 * r + 1], p.scale_log2, -base));
                    sum += x[t][2 * r] + x[t][2 * r + 1];
                    if (SCALED) x[t][2 * r] *= scale[SCALED ? t : 0].x, x[t][2 * r + 1] *= scale[SCALED ? t : 0].y;
                }
                s[r] = s[r] * rescale + sum;
#pragma unroll
                for (u32 t = 0; t < D / 8; t++) o[t][2 * r] *= rescale, o[t][2 * r + 1] *= rescale;
            }
#pragma unroll
            for (u32 t = 0; t < KEYS / 16; t++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) weights[t][i] = pack2<Half>(x[2 * t + i / 2][i % 2 * 2], x[2 * t + i / 2][i % 2 * 2 + 1]);
        }
        const u8* const values = next(u + 1);
        if (active) {
#pragma unroll
            for (u32 k = 0; k < KEYS / 16; k++)
#pragma unroll
                for (u32 t = 0; t < D / 16; t++) {
                    u32 b[4];
                    values_of<T, D>(values, k, t, lane, b);
                    mma_16816<Half>(o[2 * t], weights[k], b);
                    mma_16816<Half>(o[2 * t + 1], weights[k], b + 2);
                }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (u32 r = 0; r < 2; r++) s[r] = warp_sum<4>(s[r]);

    if (item.partial != ATTENTION_FINAL) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = warp * 16 + lane / 4 + 8 * r;
            if (row >= item.n_rows) continue;
            const u64 at = (u64)(item.partial + row) * p.n_heads + head;
            if (lane % 4 == 0) p.part_m[at] = m[r] * LN_2, p.part_s[at] = s[r];
            if constexpr (SCALED) {
#pragma unroll
                for (u32 t = 0; t < D / 16; t++)
                    *(float4*)(p.part_o + at * D + 16 * t + lane % 4 * 4) =
                        make_float4(o[2 * t][2 * r], o[2 * t + 1][2 * r], o[2 * t][2 * r + 1], o[2 * t + 1][2 * r + 1]);
            } else {
#pragma unroll
                for (u32 t = 0; t < D / 8; t++)
                    *(float2*)(p.part_o + at * D + 8 * t + lane % 4 * 2) = make_float2(o[t][2 * r], o[t][2 * r + 1]);
            }
        }
        return;
    }
    // Through shared memory, each warp in rows of its own, so that a lane stores 16 bytes.
    __syncthreads();
    u8* const mine = smem + warp * 16 * D * 2;
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const float inv = inverse_sum_with(p.sinks, head, m[r], s[r]);
        const u32 row = lane / 4 + 8 * r;
        if constexpr (SCALED) {
#pragma unroll
            for (u32 t = 0; t < D / 16; t++) {
                auto out = [&](u32 i) { return normalised(o[2 * t + i % 2][2 * r + i / 2], inv); }; // of elements lane % 4 * 4 + i
                *(uint2*)(mine + swizzle<2 * D>(row, 2 * t + lane % 4 / 2) + lane % 2 * 8) =
                    make_uint2(pack2_as(p.out_type, out(0), out(1)), pack2_as(p.out_type, out(2), out(3)));
            }
        } else {
#pragma unroll
            for (u32 t = 0; t < D / 8; t++)
                *(u32*)(mine + swizzle<2 * D>(row, t) + lane % 4 * 4) =
                    pack2_as(p.out_type, normalised(o[t][2 * r], inv), normalised(o[t][2 * r + 1], inv));
        }
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 16 * (D / 8) / 32; i++) {
        const u32 c = lane + 32 * i, row = c / (D / 8), chunk = c % (D / 8);
        const u64 at = (u64)(item.row0 + warp * 16 + row) * p.n_heads + head;
        if (warp * 16 + row < item.n_rows) *(uint4*)((u16*)p.out + at * D + chunk * 8) = *(const uint4*)(mine + swizzle<2 * D>(row, chunk));
    }
}

} // namespace prefill

// Blocks an SM that registers are bounded for.
#define PREFILL_KERNEL(T, D) \
    KERNEL_BOUNDS(prefill_attention_##T##_d##D, PrefillAttentionParams, 128, (D <= 96 && TANDEM_SM >= 80 ? 3 : 2)) { prefill::attention<T, D>(p); }
#define PREFILL_KERNELS(T) \
    PREFILL_KERNEL(T, 64) PREFILL_KERNEL(T, 80) PREFILL_KERNEL(T, 96) PREFILL_KERNEL(T, 128) PREFILL_KERNEL(T, 256)

PREFILL_KERNELS(f16)
PREFILL_KERNELS(q8)
#if TANDEM_SM >= 80
PREFILL_KERNELS(bf16)
#endif
