// gemm_tiles.cuh    in which order the tiles of a matrix product are made, and how parts of K meet
#pragma once
#include "ptx.cuh"
#include "common.cuh"

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
