// attention_prefill_sm90a.cu    attention_prefill.cu for Hopper: pages by bulk tensor copies (TMA), products by wgmma
//
// in     as attention_prefill.cu, tiles of 128 queries; the layer's pages as a tensor map, rows of head_dim
// out    as attention_prefill.cu
// launch prefill_attention_T_dD_sm90a: grid items * n_heads (any more exit), block 384 = one producer warpgroup, two
//        consumers of 64 queries each; shared Tile<D>::BYTES
// tile   128 queries x KEYS keys
//
//            producer    wait empty[s] -> expect bytes, copy a tile's K or V (a page's 32 rows x 64 columns a copy) --.
//                           ^                                                                                v full[s]
//            consumers   empty[s] <- S = Q . K^T (both from shared memory) | soft-cap, softmax | O += P . V (P from registers)
//
//        one consumer's softmax runs beside the other's products
// regs   at D = 128: 64 O + 64 S (P in place of it); the producer gives its registers up
// no-spill all
// hgmma-run 4 all
// narrow-loads 0 all
// bound  matrix units: 4 * queries * keys * D flops; the two products of a tile take 1024 cycles a consumer at D = 128, its
//        8192 exp2 512 cycles of the special function unit, beside the other consumer's products. The same structure
//        reaches 570 of 989 TFLOP/s in FlashAttention-3's ablation: predicted 50-57%
// error  f32 accumulation and softmax, P rounded to T: tests/gpu/kernels/attention/
// order  key tiles lie at multiples of KEYS, masked ones change nothing: bits depend on the row alone, not on its tile
// refs   Shah 2024 (FlashAttention-3); CUTLASS sm90 collectives (descriptors of MN-major operands)
// no-spill all
// no-stack all
// entry-registers 168 all: 384 threads; 40 for the producer and 232 for both consumers are as many

#include "attention.cuh"

#if TANDEM_SM90A

namespace prefill90 {

constexpr u32 WARPGROUP = 128, CONSUMERS = 2;
constexpr u32 ROWS = 64;        // queries of a consumer: the m64 of wgmma
constexpr u32 ROW_BYTES = 128;  // of tiles in shared memory: 64 columns, swizzled
constexpr u32 PAGE_BOX = KV_PAGE_TOKENS * ROW_BYTES;
constexpr u32 ALL_CONSUMERS = 1, ONE_CONSUMER = 2; // named barriers; the second: and the next

// Mirrored by prefill.rs.
template <int D> struct Tile {
    static constexpr u32 KEYS = D <= 128 ? 128 : 64;
    static constexpr u32 PARTS = D / 64;               // of 64 columns, each a tile of its own in shared memory
    static constexpr u32 PART_BYTES = KEYS * ROW_BYTES;
    static constexpr u32 SLOT = PARTS * PART_BYTES;    // K or V of a tile
    static constexpr u32 STAGES = 4;
    static constexpr u32 Q_BYTES = PARTS * ROWS * ROW_BYTES; // of a consumer
    static constexpr u32 BYTES = CONSUMERS * Q_BYTES + STAGES * (SLOT + 16);
};

// A place in the ring that goes round: the slot, and the parity of the phase it is in.
template <u32 STAGES> struct Cursor {
    u32 slot = 0, parity = 0;
    DEVICE void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// What an item's rows see, tile by tile: [begin, end), of which each row [low, high).
struct Sight {
    u32 begin, end, window;
    DEVICE u32 low(u32 pos) const { return window && pos + 1 > window ? max(begin, pos + 1 - window) : begin; }
    DEVICE u32 high(u32 pos) const { return min(pos + 1, end); }
};

// Copies the pages that hold a token of [begin, end), K then V of each tile, as slots become free. One thread.
template <int D>
DEVICE void produce(const PrefillAttentionTmaParams& p, const PrefillItem& item, const Sight& sight, u32 kv_head, u8* ring, u64* full, u64* empty) {
    using Shape = Tile<D>;
    Cursor<Shape::STAGES> at;
    for (u32 key0 = sight.begin / Shape::KEYS * Shape::KEYS; key0 < sight.end; key0 += Shape::KEYS) {
        const u32 first = max(key0, sight.begin) / KV_PAGE_TOKENS, last = ceil_div(min(key0 + Shape::KEYS, sight.end), KV_PAGE_TOKENS);
        for (u32 half = 0; half < 2; half++, at.advance()) {
            mbar_wait(empty + at.slot, at.parity ^ 1); // the first round finds the slots empty
            mbar_expect_tx(full + at.slot, (last - first) * (Shape::PARTS * PAGE_BOX));
            for (u32 page = first; page < last; page++) {
                const u32 number = p.attention.page_table[(u32)(item.pages + page)];
                const i32 row = (i32)(((number * p.attention.n_kv_heads + kv_head) * 2 + half) * KV_PAGE_TOKENS);
                u8* to = ring + at.slot * Shape::SLOT + (page - key0 / KV_PAGE_TOKENS) * PAGE_BOX;
#pragma unroll
                for (u32 part = 0; part < Shape::PARTS; part++)
                    tma_load_2d(to + part * Shape::PART_BYTES, &p.kv, full + at.slot, (i32)part * 64, row);
            }
        }
    }
}

// Zeros in the rows of a tile that hold no token of [begin, end): what is there may be NaN, and 0 * NaN is not 0. Both
// consumers together.
template <int D> DEVICE void clear_edges(const Sight& sight, u32 key0, u8* slot, u32 thread) {
    using Shape = Tile<D>;
    for (u32 c = thread; c < Shape::SLOT / 16; c += CONSUMERS * WARPGROUP) {
        const u32 token = key0 + c * 16 % Shape::PART_BYTES / ROW_BYTES; // whole rows: the swizzle stays within them
        if (token < sight.begin || token >= sight.end) *(uint4*)(slot + c * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
    named_barrier_sync(ALL_CONSUMERS, CONSUMERS * WARPGROUP);
}

template <class T, int D>
DEVICE void consume(const PrefillAttentionParams& p, const PrefillItem& item, const Sight& sight, u32 head, u32 thread, u8* q, u8* ring, u64* full, u64* empty) {
    using Shape = Tile<D>;
    constexpr u32 KEYS = Shape::KEYS, CHUNKS = D / 8;
    const u32 consumer = thread / WARPGROUP, lane = thread % 32, warp = thread % WARPGROUP / 32;
    const u32 row0 = consumer * ROWS; // of the item
    const u32 pos0 = item.first_pos + row0 + warp * 16;

    // This consumer's queries, in parts of 64 columns; rows past the last are zeros.
    for (u32 c = thread % WARPGROUP; c < ROWS * CHUNKS; c += WARPGROUP) {
        const u32 row = c / CHUNKS, chunk = c % CHUNKS;
        const u64 at = (u64)(item.row0 + min(row0 + row, item.n_rows - 1)) * p.n_heads + head;
        cp_async_16(q + chunk / 8 * (ROWS * ROW_BYTES) + swizzle<ROW_BYTES>(row, chunk % 8), (const T*)p.q + at * D + chunk * 8, row0 + row < item.n_rows);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    named_barrier_sync(ONE_CONSUMER + consumer, WARPGROUP);

    float o[D / 2];
    wgmma_discard(o);
    bool summed = false; // whether o holds anything
    float m[2] = {NEG_INF, NEG_INF}, s[2] = {};
    const u64 q_desc = smem_desc_sw128(smem_u32(q));
    Cursor<Shape::STAGES> at;
    for (u32 key0 = sight.begin / KEYS * KEYS; key0 < sight.end; key0 += KEYS) {
        const bool edge = key0 < sight.begin || sight.end < key0 + KEYS;
        // Whether any of the consumer's rows sees a token of the tile.
        const bool active = row0 < item.n_rows && key0 < sight.high(item.first_pos + row0 + ROWS - 1) && sight.low(item.first_pos + row0) < key0 + KEYS;
        float x[KEYS / 2];

        mbar_wait(full + at.slot, at.parity);
        if (edge) clear_edges<D>(sight, key0, ring + at.slot * Shape::SLOT, thread);
        if (active) {
            wgmma_discard(x);
            const u64 k_desc = smem_desc_sw128(smem_u32(ring + at.slot * Shape::SLOT));
            wgmma_fence(x);
#pragma unroll
            for (u32 k = 0; k < D / 16; k++)
                wgmma_m64k16<T, KEYS>(x, q_desc + k / 4 * (ROWS * ROW_BYTES / 16) + k % 4 * 2, k_desc + k / 4 * (Shape::PART_BYTES / 16) + k % 4 * 2, k > 0);
            wgmma_commit();
            wgmma_wait<0>(x);
        }
        if (lane == 0) mbar_arrive(empty + at.slot);
        at.advance();

        u32 weights[KEYS / 16][4];
        if (active) {
            if (p.cap_span != 0.0f)
#pragma unroll
                for (u32 i = 0; i < KEYS / 2; i++) x[i] = soft_capped(x[i], p.cap_span, p.cap_slope);
            if (key0 < sight.low(pos0 + 15) || sight.high(pos0) < key0 + KEYS) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 pos = pos0 + lane / 4 + 8 * r, first = sight.low(pos), end = sight.high(pos);
#pragma unroll
                    for (u32 t = 0; t < KEYS / 8; t++)
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            const u32 key = key0 + 8 * t + lane % 4 * 2 + i;
                            if (key < first || key >= end) x[4 * t + 2 * r + i] = NEG_INF;
                        }
                }
            }
            // Online softmax of the two rows; the scale is folded into exp2's argument.
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                float most = NEG_INF;
#pragma unroll
                for (u32 t = 0; t < KEYS / 8; t++) most = fmaxf(most, fmaxf(x[4 * t + 2 * r], x[4 * t + 2 * r + 1]));
                most = warp_max<4>(most);
                most = fmaxf(m[r], most * p.scale_log2);
                const float base = finite_or_zero(most);
                const float rescale = ex2(m[r] - base);
                m[r] = most;
                float sum = 0.0f;
#pragma unroll
                for (u32 t = 0; t < KEYS / 8; t++) {
                    float& a = x[4 * t + 2 * r];
                    float& b = x[4 * t + 2 * r + 1];
                    a = ex2(fmaf(a, p.scale_log2, -base));
                    b = ex2(fmaf(b, p.scale_log2, -base));
                    sum += a + b;
                }
                s[r] = s[r] * rescale + sum;
#pragma unroll
                for (u32 t = 0; t < D / 8; t++) o[4 * t + 2 * r] *= rescale, o[4 * t + 2 * r + 1] *= rescale;
            }
#pragma unroll
            for (u32 t = 0; t < KEYS / 16; t++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) weights[t][i] = pack2<T>(x[8 * t + 2 * i], x[8 * t + 2 * i + 1]);
        }

        mbar_wait(full + at.slot, at.parity);
        if (edge) clear_edges<D>(sight, key0, ring + at.slot * Shape::SLOT, thread);
        if (active) {
            const u64 v_desc = smem_desc_sw128_mn(smem_u32(ring + at.slot * Shape::SLOT), Shape::PART_BYTES);
            wgmma_fence(o, weights);
#pragma unroll
            for (u32 k = 0; k < KEYS / 16; k++) wgmma_m64k16_ra<T, D>(o, weights[k], v_desc + k * (16 * ROW_BYTES / 16), summed || k > 0);
            wgmma_commit();
            wgmma_wait<0>(o, weights);
            summed = true;
        }
        if (lane == 0) mbar_arrive(empty + at.slot);
        at.advance();
    }
    if (!summed) {
#pragma unroll
        for (u32 i = 0; i < D / 2; i++) o[i] = 0.0f;
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) s[r] = warp_sum<4>(s[r]);

    if (item.partial != ATTENTION_FINAL) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = row0 + warp * 16 + lane / 4 + 8 * r;
            if (row >= item.n_rows) continue;
            const u64 at = (u64)(item.partial + row) * p.n_heads + head;
            if (lane % 4 == 0) p.part_m[at] = m[r] * LN_2, p.part_s[at] = s[r];
#pragma unroll
            for (u32 t = 0; t < D / 8; t++)
                *(float2*)(p.part_o + at * D + 8 * t + lane % 4 * 2) = make_float2(o[4 * t + 2 * r], o[4 * t + 2 * r + 1]);
        }
        return;
    }
    // Through the queries' memory, each warp in rows of its own, so that a lane stores 16 bytes.
    named_barrier_sync(ONE_CONSUMER + consumer, WARPGROUP);
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const float inv = inverse_sum_with(p.sinks, head, m[r], s[r]);
        const u32 row = warp * 16 + lane / 4 + 8 * r;
#pragma unroll
        for (u32 t = 0; t < CHUNKS; t++)
            *(u32*)(q + t / 8 * (ROWS * ROW_BYTES) + swizzle<ROW_BYTES>(row, t % 8) + lane % 4 * 4) =
                pack2_as(p.out_type, normalised(o[4 * t + 2 * r], inv), normalised(o[4 * t + 2 * r + 1], inv));
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 16 * CHUNKS / 32; i++) {
        const u32 c = lane + 32 * i, row = warp * 16 + c / CHUNKS, chunk = c % CHUNKS;
        const u64 at = (u64)(item.row0 + row0 + row) * p.n_heads + head;
        if (row0 + row < item.n_rows)
            *(uint4*)((u16*)p.out + at * D + chunk * 8) = *(const uint4*)(q + chunk / 8 * (ROWS * ROW_BYTES) + swizzle<ROW_BYTES>(row, chunk % 8));
    }
}

template <class T, int D> DEVICE void attention(const PrefillAttentionTmaParams& p) {
    using Shape = Tile<D>;
    SHARED_DYNAMIC(smem);
    u8* const ring = smem;
    u8* const queries = ring + Shape::STAGES * Shape::SLOT;
    u64* const full = (u64*)(queries + CONSUMERS * Shape::Q_BYTES);
    u64* const empty = full + Shape::STAGES;
    const u32 n_heads = p.attention.n_heads;
    if (blockIdx.x / n_heads >= *p.attention.n_items) return;
    const PrefillItem item = p.attention.items[blockIdx.x / n_heads];
    const u32 head = blockIdx.x % n_heads; // neighbouring blocks share keys in L2
    const u32 end = min(item.end, item.first_pos + item.n_rows);
    const Sight sight = {item.begin, item.begin < end ? end : 0, p.attention.window}; // nothing seen: no tile at all

    if (threadIdx.x == 0) {
        for (u32 s = 0; s < Shape::STAGES; s++) {
            mbar_init(full + s, 1);
            mbar_init(empty + s, CONSUMERS * WARPGROUP / 32);
        }
        mbar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        set_max_registers_dec<40>();
        if (threadIdx.x == 0) produce<D>(p, item, sight, head / (n_heads / p.attention.n_kv_heads), ring, full, empty);
    } else {
        set_max_registers_inc<232>();
        const u32 thread = threadIdx.x - WARPGROUP;
        consume<T, D>(p.attention, item, sight, head, thread, queries + thread / WARPGROUP * Shape::Q_BYTES, ring, full, empty);
    }
}

} // namespace prefill90

#define PREFILL_KERNEL(T, D) \
    KERNEL_BOUNDS(prefill_attention_##T##_d##D##_sm90a, PrefillAttentionTmaParams, 384, 1) { prefill90::attention<T, D>(p); }
#define PREFILL_KERNELS(T) PREFILL_KERNEL(T, 64) PREFILL_KERNEL(T, 128) PREFILL_KERNEL(T, 256)

PREFILL_KERNELS(f16)
PREFILL_KERNELS(bf16)

#endif
