// dequant.cu    packed quantised weights (quant_tile.cuh) to rows: 16-bit for prefill GEMM, f32 rows of an embedding
//
// quant_rows_*    y[row][k] = T(w), rows in the order they were packed in (gate and up stay interleaved)
//   launch grid (ceil(rows/16), ceil(k_tiles/8)), block 256: a warp a tile; shared 8 * 16 * 144 bytes
//   bound  memory: (bits/8 + 2) bytes a weight. 4096 x 4096 of Q4_K: 43 MB = 9 us on H200, a tenth of the product
//          with 512 tokens
// quant_gather_*  y[i][k] = scale * w[row_ids[i]][k], f32; zeros where row_ids[i] >= n
//   launch grid (rows, ceil(k_tiles/8)), block 256: a warp a tile of which one row is wanted; no shared memory
//   bound  latency: a few rows; it reads the other 15 rows' codes too, for one copy of the table serves the
//          embedding and the output layer
//
// error  none: w is bit for bit what the reference decodes (its products d*q are exact in f32, so the fused
//        multiply-add rounds once, as the reference's sum does), then one rounding to T (quant_gather: of the product)
// oracle src/reference/dequant.rs
// modules mxfp4 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "common.cuh"
#include "quant_tile.cuh"

// The four columns of row g + 8 * r in step s that this lane holds: 16s + 2t, +1, 16s + 8 + 2t, +1.
template <class F> DEVICE void decode(float v[4], const Tile<F>& tile, int s, int r) {
    u32 a[4];
    fragment<f16, F>(a, tile, s);
    float d[2], m[2] = {0.0f, 0.0f};
    step_scales<F>(tile, s, d, m);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 q = unpack2<f16>(a[r + 2 * i]);
        v[2 * i] = F::HAS_MIN ? fmaf(d[r], q.x, m[r]) : d[r] * q.x;
        v[2 * i + 1] = F::HAS_MIN ? fmaf(d[r], q.y, m[r]) : d[r] * q.y;
    }
}

template <class T, class F> DEVICE void quant_rows(const QuantRowsParams& p) {
    SHARED_DYNAMIC(smem);
    // A tile of T, rows 16 bytes apart from a multiple of 128: its 4-byte writes and 16-byte reads meet no bank twice.
    constexpr u32 STRIDE = TILE_COLS * 2 + 16;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 k_tiles = ceil_div(p.k, TILE_COLS), k_tile = blockIdx.y * 8 + warp;
    if (k_tile >= k_tiles) return;
    const Tile<F> tile = load_tile<F, true>(tile_at<F>(p.w, k_tiles, p.row_begin / TILE_ROWS + blockIdx.x, k_tile));
    u8* mine = smem + warp * TILE_ROWS * STRIDE;
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float v[4];
            decode<F>(v, tile, s, r);
            u8* row = mine + (g + 8 * r) * STRIDE + 32 * s + 4 * t;
            *(u32*)row = pack2<T>(v[0], v[1]);
            *(u32*)(row + 16) = pack2<T>(v[2], v[3]);
        }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 r = 4 * i + lane / 8, chunk = lane % 8;
        const u32 row = blockIdx.x * TILE_ROWS + r, col = k_tile * TILE_COLS + 8 * chunk;
        if (row < p.rows && col < p.k) *(uint4*)((T*)p.y + (u64)row * p.ldy + col) = ld_16(mine + r * STRIDE + 16 * chunk);
    }
}

template <class F> DEVICE void quant_gather(const QuantGatherParams& p) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 k_tiles = ceil_div(p.k, TILE_COLS), k_tile = blockIdx.y * 8 + warp;
    if (k_tile >= k_tiles) return;
    const u32 row = p.row_ids[blockIdx.x];
    if (g != row % 8) return; // other lanes' rows
    if (row >= p.n) {         // a padding row
        for (u32 c = k_tile * TILE_COLS + 2 * t; c < min((k_tile + 1) * TILE_COLS, p.k); c += 8)
            *(float2*)(p.y + (u64)blockIdx.x * p.ldy + c) = make_float2(0.0f, 0.0f);
        return;
    }
    const Tile<F> tile = load_tile<F, false>(tile_at<F>(p.w, k_tiles, row / TILE_ROWS, k_tile));
    float* y = p.y + (u64)blockIdx.x * p.ldy + k_tile * TILE_COLS + 2 * t;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        float low[4], high[4];
        decode<F>(low, tile, s, 0);
        decode<F>(high, tile, s, 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (k_tile * TILE_COLS + 16 * s + 8 * i >= p.k) break;
            const float* v = (row % 16 < 8 ? low : high) + 2 * i;
            *(float2*)(y + 16 * s + 8 * i) = make_float2(p.scale * v[0], p.scale * v[1]);
        }
    }
}

#define ROWS(format, F)                                                                  \
    KERNEL_BOUNDS(quant_rows_##format##_f16, QuantRowsParams, 256, 4) { quant_rows<f16, F>(p); } \
    KERNEL_BOUNDS(quant_gather_##format, QuantGatherParams, 256, 4) { quant_gather<F>(p); }
#define ROWS_BF16(format, F) \
    KERNEL_BOUNDS(quant_rows_##format##_bf16, QuantRowsParams, 256, 4) { quant_rows<bf16, F>(p); }
#define ALL(M) M(mxfp4, MXFP4) M(q4_0, Q4_0) M(q4_1, Q4_1) M(q4_k, Q4_K) M(q5_0, Q5_0) M(q5_1, Q5_1) M(q5_k, Q5_K) M(q6_k, Q6_K) M(q8_0, Q8_0)
ALL(ROWS)
#if TANDEM_SM >= 80
ALL(ROWS_BF16)
#endif
