// gemv_quant.cu    y = W x for 1 to 4 tokens, W quantised: codes stream once through registers into the tensor cores
//
//   a warp     16 rows, every eighth tile of 64 columns; tokens are the n8 operand (4 or more of 8 columns are zero)
//   a block    8 warps side by side along k on the same 16 rows, summed in shared memory in warp order
//   the grid   row tiles x splits along k (only where row tiles are too few to fill the device)
//
// Why mma for one token: a fragment costs 9 to 11 instructions a lane for 8 codes and one mma multiplies them; to
// convert each code to f32 and multiply it there costs 3 a code. The tensor cores have nothing else to do.
//
// in     w packed (quant_tile.cuh), x T[m][ldx]                       out    y, see abi/linear.h
// launch grid (ceil(n/16), splits), block 256, shared 8 * 512 bytes
// loads  a ring of DEPTH tiles a warp: 64 bytes of codes in flight a lane, 32 KiB a multiprocessor with 16 warps
//        (H200 needs 27 KiB, A10 and T4 5). x is read by fragment through L1: each word once a block.
// bound  memory: bits/8 * n * k bytes, bits = 4.5 (Q4_0), 5 (Q4_1), 4.625 (Q4_K), 5.5, 6, 5.625 (Q5_0, 1, K),
//        6.5625 (Q6_K), 8.5 (Q8_0). 4096 x 4096 of Q4_K: 9.7 MB = 2.0 us at 4.8 TB/s (H200), 16 us at 600 GB/s (A10).
//        Issue slots of a tile (16 x 64), counted in the machine code for sm_90, against those that pass while H200's
//        memory delivers it: Q4_0 99 of 111, Q4_K 139 of 114 (so 82% at best), Q6_K 174 of 162, Q8_0 117 of 210;
//        A100 has twice as many, A10 four times.
// order  tiles ascending in a warp, warps ascending, splits ascending: whatever the other tokens of the batch
// error  f32 sums of exact products; (k/16 + 8 + splits) * 2^-23 * sum |w x| + the same with |m x| for minima
// oracle f64 on dequantised weights, tests/gpu_quant.rs
// modules q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "quant_store.cuh"
#include "quant_tile.cuh"

static constexpr u32 WARPS = 8;

// Where a lane reads its share of a warp's tiles. The warp takes every eighth tile, a whole number of super-blocks apart, so
// each of its streams moves by a constant: addresses cost one addition for DEPTH tiles.
template <class T, class F> struct Stream {
    static constexpr u32 STRIDE = WARPS / F::GROUP * F::GROUP_BYTES, STRIDE_X = WARPS * TILE_COLS * 2;
    const u8 *low, *high, *scale, *super, *x;
    bool token; // this lane's is there
    DEVICE Stream(const LinearParams& p, u32 k_tiles, u32 row_tile, u32 k_tile) {
        const u32 lane = threadIdx.x % 32, g = lane / 4;
        const TileAt<F> at = tile_at<F>(p.w, k_tiles, row_tile, k_tile);
        low = at.body + 16 * lane;
        high = at.body + F::LOW + F::HIGH / 32 * lane;
        scale = at.body + F::LOW + F::HIGH + F::SCALE_BYTES / 8 * g;
        super = at.super + F::SUPER / 8 * g;
        // Fragments of x: lane (g, t) holds token g, columns 16s + 2t, +1 and 16s + 8 + 2t, +1.
        token = g < p.m;
        x = (const u8*)p.x + ((u64)(token ? g : 0) * p.ldx + k_tile * TILE_COLS + lane % 4 * 2) * 2;
    }
    // The i-th tile from here; `whole`: it has all 64 columns, not 32.
    DEVICE void load(Tile<F>& tile, u32 b[8], int i, bool whole) const {
#pragma unroll
        for (u32 c = 0; c < F::LOW; c += 512) put_16(tile.low + c / 128, ld_stream_16(low + i * STRIDE + c));
        if (F::HIGH == 128) tile.high[0] = *(const u32*)(high + i * STRIDE);
        if (F::HIGH == 256) put_8(tile.high, high + i * STRIDE);
        if (F::SCALE_BYTES == 64) put_8(tile.scale, scale + i * STRIDE);
        if (F::SCALE_BYTES == 128) put_16(tile.scale, ld_16(scale + i * STRIDE));
        if (F::SUPER == 32) tile.super[0] = *(const u32*)(super + i * STRIDE);
        if (F::SUPER == 64) put_8(tile.super, super + i * STRIDE);
#pragma unroll
        for (u32 c = 0; c < 8; c++) b[c] = token && (c < 4 || whole) ? *(const u32*)(x + i * STRIDE_X + 16 * c) : 0;
    }
    DEVICE void advance(int tiles) {
        low += tiles * STRIDE;
        high += tiles * STRIDE;
        scale += tiles * STRIDE;
        super += tiles * STRIDE;
        x += tiles * STRIDE_X;
    }
};

template <class T, class F> DEVICE void gemv_quant(const QuantLinearParams& params) {
    SHARED_DYNAMIC(smem);
    float4* sums = (float4*)smem; // [warp][lane]
    constexpr int DEPTH = F::BITS == 8 ? 2 : F::BITS == 4 ? 4 : 3;

    const LinearParams& p = params.linear;
    const u32 lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be the same in a warp
    const u32 row_tile = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const u32 k_tiles = ceil_div(p.k, TILE_COLS);
    const u32 begin = split * (p.k_split / TILE_COLS) + warp;
    const u32 end = min((split + 1) * (p.k_split / TILE_COLS), k_tiles);

    Tile<F> tile[DEPTH];
    u32 b[DEPTH][8];
    float acc[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
    Stream<T, F> stream(p, k_tiles, row_tile, begin);
    const u32 whole = p.k / TILE_COLS; // tiles with all their columns
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const u32 kt = begin + WARPS * i;
        if (kt < end) stream.load(tile[i], b[i], i, kt < whole);
    }
    for (u32 base = begin; base < end; base += WARPS * DEPTH) {
        stream.advance(DEPTH);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u32 kt = base + WARPS * i, next = kt + WARPS * DEPTH;
            if (kt < end) { // the same for the whole warp
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 bh[1][4] = {{b[i][4 * half], b[i][4 * half + 1], b[i][4 * half + 2], b[i][4 * half + 3]}};
                    float x_sums[1][2];
                    if (F::HAS_MIN) column_sums<T, 1>(x_sums, bh);
                    mma_half<T, F, 1>(acc, tile[i], half, half_scales<F>(tile[i], half), bh, x_sums);
                }
            }
            if (next < end) stream.load(tile[i], b[i], i, next < whole);
        }
    }

    sums[warp * 32 + lane] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
    __syncthreads();
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (warp == 0) {
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const float4 v = sums[w * 32 + lane];
            total[0] += v.x;
            total[1] += v.y;
            total[2] += v.z;
            total[3] += v.w;
        }
    }
    if (splits > 1) {
        float4* partials = (float4*)p.partials; // [row tile][split][lane]
        if (warp == 0) partials[((u64)row_tile * splits + split) * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
        __syncthreads(); // sums were read: its first word becomes the flag
        if (!last_to_arrive(p.counters + row_tile, splits, (u32*)smem) || warp != 0) return;
        total[0] = total[1] = total[2] = total[3] = 0.0f;
        for (u32 s = 0; s < splits; s++) {
            const float4 v = partials[((u64)row_tile * splits + s) * 32 + lane];
            total[0] += v.x;
            total[1] += v.y;
            total[2] += v.z;
            total[3] += v.w;
        }
    }
    if (warp == 0) store_tile<T>(p, row_tile, 0, total);
}

#define GEMV(format, F)                                                                           \
    KERNEL_BOUNDS(gemv_##format##_f16, QuantLinearParams, 256, 2) { gemv_quant<f16, F>(p); }
#define GEMV_BF16(format, F)                                                                      \
    KERNEL_BOUNDS(gemv_##format##_bf16, QuantLinearParams, 256, 2) { gemv_quant<bf16, F>(p); }
#define ALL(M) M(q4_0, Q4_0) M(q4_1, Q4_1) M(q4_k, Q4_K) M(q5_0, Q5_0) M(q5_1, Q5_1) M(q5_k, Q5_K) M(q6_k, Q6_K) M(q8_0, Q8_0)
ALL(GEMV)
#if TANDEM_SM >= 80
ALL(GEMV_BF16)
#endif
