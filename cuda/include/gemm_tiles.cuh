// gemm_tiles.cuh    what the two GEMMs share: the order of tiles, how parts of K meet, the epilogue of a fragment
#pragma once
#include "ptx.cuh"
#include "linear_epilogue.cuh"

struct TilePlace { u32 row_tile, token_tile; };

// Tiles are made in bands of 8 token tiles, all rows of weights within a band: the blocks that run together
// then share about as many rows of w as of x, so each is read from L2, and from memory once a band.
DEVICE TilePlace tile_place(u32 index, u32 row_tiles, u32 token_tiles) {
    constexpr u32 BAND = 8;
    u32 band = index / (BAND * row_tiles);
    u32 width = min(BAND, token_tiles - band * BAND);
    u32 within = index - band * BAND * row_tiles;
    return {within / width, band * BAND + within % width};
}

// Split-K: every split of a tile writes its sums; the one that arrives last adds all of them in the order of
// the splits (so the bits do not depend on who is last) and goes on to the epilogue. Sums lie as
// [tile][split][quad][thread] float4: neighbours in a warp write neighbouring 16 bytes.
//
// Called by `THREADS` threads, of which the caller is `thread`; `sync` is a barrier of exactly those, `flag` a word
// of shared memory that nobody else uses. Returns whether the caller's block was last; `sums` are then the totals.
template <u32 THREADS, u32 QUADS, typename Sync>
DEVICE bool split_k_reduce(const GemmSplit& split, u32 tile, u32 part, u32 thread, float (&sums)[QUADS * 4], u32* flag, Sync sync) {
    float4* slots = (float4*)split.partial + (u64)tile * split.splits * (QUADS * THREADS) + thread;
    float4* mine = slots + (u64)part * (QUADS * THREADS);
#pragma unroll
    for (u32 q = 0; q < QUADS; q++) mine[q * THREADS] = make_float4(sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
    __threadfence();        // the sums are visible before the arrival is counted
    sync();
    if (thread == 0) *flag = atomicAdd(split.arrived + tile, 1u);
    sync();
    if (*flag != split.splits - 1) return false;
    __threadfence();        // the others' sums are read after their arrivals
#pragma unroll
    for (u32 i = 0; i < QUADS * 4; i++) sums[i] = 0.0f;
    for (u32 s = 0; s < split.splits; s++) {
        const float4* theirs = slots + (u64)s * (QUADS * THREADS);
#pragma unroll
        for (u32 q = 0; q < QUADS; q++) {
            float4 v = theirs[q * THREADS];
            sums[4 * q] += v.x;
            sums[4 * q + 1] += v.y;
            sums[4 * q + 2] += v.z;
            sums[4 * q + 3] += v.w;
        }
    }
    if (thread == 0) split.arrived[tile] = 0;    // ready for the next launch
    return true;
}

// One lane's sums of 16 rows and 8 * N8 tokens of y^T = W x^T: accumulators of mma m16n8, or of one warp's wgmma, side by
// side; g = lane / 4, t = lane % 4, `n` the row of g and `m` the token of 2t in the first:
//
//              token 2t   token 2t+1   token 8+2t ...
//   row g         c0          c1           c4
//   row g + 8     c2          c3           c6          the eight lanes of one t store 8 neighbours of one token's row:
//                                                      32 bytes of f32, one sector
// With rows interleaved by 8, c0 and c1 are gates and c2 and c3 their ups: the activation needs nobody else's sums.
// What is the same for all sums (bias, kind, addresses) is settled outside of the loops: short k leave no time to hide it.
template <class T, u32 N8> DEVICE void store_sums(const GemmOutput& out, u32 m, u32 n, float* c) {
    const bool low = n < out.n, high = n + 8 < out.n;
    const u32 tokens = m < out.m ? out.m - m : 0;    // from this lane's first on
    if (out.bias) {
        const float b0 = low ? out.bias[n] : 0.0f, b1 = high ? out.bias[n + 8] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < N8 * 4; i++) c[i] += i % 4 < 2 ? b0 : b1;
    }
    if (out.epilogue >= LINEAR_SWIGLU) {
        if (!high) return;
        T* y = (T*)out.y + (u64)m * out.ldy + (n / 16 * 8 + n % 8);
#pragma unroll
        for (u32 i = 0; i < N8 * 2; i++) {
            const u32 token = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
            if (token < tokens) y[token * out.ldy] = from_f32<T>(linear_gated(out.epilogue, c[at], c[at + 2]));
        }
        return;
    }
    const u64 at = (u64)m * out.ldy + n;
    if (out.epilogue == LINEAR_F32) {
        float* y = (float*)out.y + at;
#pragma unroll
        for (u32 i = 0; i < N8 * 4; i++) {
            const u32 token = i / 4 * 8 + i % 2;
            if (token < tokens && (i % 4 < 2 ? low : high)) y[token * out.ldy + i % 4 / 2 * 8] = c[i];
        }
    } else {
        T* y = (T*)out.y + at;
#pragma unroll
        for (u32 i = 0; i < N8 * 4; i++) {
            const u32 token = i / 4 * 8 + i % 2;
            if (token < tokens && (i % 4 < 2 ? low : high)) y[token * out.ldy + i % 4 / 2 * 8] = from_f32<T>(fmaxf(c[i], 0.0f));
        }
    }
}
