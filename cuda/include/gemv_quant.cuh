// gemv_quant.cuh    the body of gemv_quant.cu and experts_gemv_quant.cu; gemv_quant.cu's header describes it
#pragma once

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

// One row tile, summed over one split of k.
template <class T, class F> DEVICE void gemv_quant(const LinearParams& p, u32 row_tile, u32 split, u32 splits) {
    SHARED_DYNAMIC(smem);
    float4* sums = (float4*)smem; // [warp][lane]
    constexpr int DEPTH = F::BITS == 8 ? 2 : F::BITS == 4 ? 4 : 3;

    const u32 lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be the same in a warp
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
