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
//        Issue slots a tile of Q4_K: see the count below `bound` in linear_quant.cu; here about 90 of the 114 that a
//        scheduler of H200 has while its memory delivers the tile's 592 bytes (A100: 230, A10: 480).
// order  tiles ascending in a warp, warps ascending, splits ascending: whatever the other tokens of the batch
// error  f32 sums of exact products; (k/16 + 8 + splits) * 2^-23 * sum |w x| + the same with |m x| for minima
// oracle f64 on dequantised weights, tests/gpu_quant.rs
// no-spill all
#include "quant_store.cuh"
#include "quant_tile.cuh"

static constexpr u32 WARPS = 8;

// Fragments of x for the tile at column k: lane (g, t) holds token g, columns 16s + 2t, +1 and 16s + 8 + 2t, +1.
template <class T> DEVICE void load_x(u32 b[8], const LinearParams& p, u32 k) {
    const u32 lane = threadIdx.x % 32, token = lane / 4;
    const T* x = (const T*)p.x + (u64)token * p.ldx + k + lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < 8; i++) b[i] = token < p.m && k + 8 * i < p.k ? *(const u32*)(x + 8 * i) : 0;
}

template <class T, class F> DEVICE void gemv_quant(const QuantLinearParams& params) {
    SHARED_DYNAMIC(smem);
    float4* sums = (float4*)smem; // [warp][lane]
    constexpr int DEPTH = F::BITS == 8 ? 2 : F::BITS == 4 ? 4 : 3;

    const LinearParams& p = params.linear;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 row_tile = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const u32 k_tiles = ceil_div(p.k, TILE_COLS);
    const u32 begin = split * (p.k_split / TILE_COLS) + warp;
    const u32 end = min((split + 1) * (p.k_split / TILE_COLS), k_tiles);

    Tile<F> tile[DEPTH];
    u32 b[DEPTH][8];
    float acc[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        // A warp without work reads its last tile again (any valid address will do) and drops it.
        const u32 kt = min(begin + WARPS * i, end - 1);
        tile[i] = load_tile<F, true>(tile_at<F>(p.w, k_tiles, row_tile, kt));
        load_x<T>(b[i], p, kt * TILE_COLS);
    }
    for (u32 base = begin; base < end; base += WARPS * DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u32 kt = base + WARPS * i;
            if (kt < end) { // the same for the whole warp
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 bh[1][4] = {{b[i][4 * half], b[i][4 * half + 1], b[i][4 * half + 2], b[i][4 * half + 3]}};
                    float x_sums[1][2];
                    if (F::HAS_MIN) column_sums<T, 1>(x_sums, bh);
                    mma_half<T, F, 1>(acc, tile[i], half, half_scales<F>(tile[i], half), bh, x_sums);
                }
            }
            const u32 next = kt + WARPS * DEPTH;
            if (next < end) {
                tile[i] = load_tile<F, true>(tile_at<F>(p.w, k_tiles, row_tile, next));
                load_x<T>(b[i], p, next * TILE_COLS);
            }
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
