// linear_dense.cuh    the body of linear_dense.cu and experts_dense.cu; linear_dense.cu's header describes it
#pragma once

#include "linear_epilogue.cuh"

static constexpr u32 THREADS = 256;
static constexpr u32 BK = 64;         // columns of a tile
static constexpr u32 ROW = 2 * BK;    // its bytes

// LONG, MIDDLE and 2: stages that the ring can have.
template <u32 BN_, u32 TM_, u32 WN_, u32 WM_, u32 WK_, u32 LONG_, u32 MIDDLE_> struct Tile {
    static constexpr u32 BN = BN_, TM = TM_, WN = WN_, WM = WM_, WK = WK_, LONG = LONG_, MIDDLE = MIDDLE_;
    static constexpr u32 WARP_N = BN / WN, WARP_M = TM / WM;
    static constexpr u32 MT = WARP_N / 16, NT = WARP_M / 8; // mma tiles of a warp
    static constexpr u32 ACC = MT * NT * 4;                 // its accumulators a thread
    static constexpr u32 STAGE_BYTES = (BN + TM) * ROW;
    static constexpr u32 OUT_THREADS = 32 * WN * WM;        // threads that hold sums after the warps along k met
    static_assert(WN * WM * WK * 32 == THREADS, "a warp for every part");
    static_assert((WK - 1) * BN * TM * 4 <= 2 * STAGE_BYTES, "partial sums fit the shortest ring");
};

// Which chunks of a tile this thread copies: one column of chunks, rows 32 apart. All that does not change from tile
// to tile is computed once; what is left is an addition and a comparison a copy.
template <class T, class C> struct Copies {
    static constexpr u32 W_ROWS = C::BN / 32, X_ROWS = (C::TM + 31) / 32;
    const u8 *w, *x;                    // row 0, this thread's column of the split's first tile
    u32 w_row[W_ROWS], x_row[X_ROWS];   // bytes from there to this thread's rows
    bool w_ok[W_ROWS], x_ok[X_ROWS];    // whether they exist: those beyond repeat the last one's address
    u32 columns;                        // of the split, from this thread's column on
    u32 to;                             // bytes into a stage
    bool copies_x;                      // whole warps, since TM is 8 or a multiple of 16

    DEVICE Copies(const LinearParams& p, u32 n0, u32 m0, u32 k0, u32 k_end) {
        const u32 row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        columns = k_end - k0 > 8 * chunk ? k_end - k0 - 8 * chunk : 0;
        const u32 column = k0 + (columns ? 8 * chunk : 0); // of a chunk that has none: the split's first
        w = (const u8*)((const T*)p.w + ((u64)n0 * p.k + column));
        x = (const u8*)((const T*)p.x + ((u64)m0 * p.ldx + column));
#pragma unroll
        for (u32 i = 0; i < W_ROWS; i++) {
            w_ok[i] = n0 + row + 32 * i < p.n;
            w_row[i] = min(row + 32 * i, p.n - 1 - n0) * p.k * 2;
        }
#pragma unroll
        for (u32 i = 0; i < X_ROWS; i++) {
            x_ok[i] = m0 + row + 32 * i < p.m;
            x_row[i] = min(row + 32 * i, p.m - 1 - m0) * p.ldx * 2;
        }
        to = swizzle<ROW>(row, chunk);
        copies_x = C::TM >= 32 || row < C::TM;
    }

    // Tile `step` of the split to a stage. Beyond the last column the address stays in the split's first tile.
    DEVICE void copy(u8* stage, u32 step) const {
        const bool inside = step * BK < columns;
        const u32 at = inside ? step * ROW : 0;
#pragma unroll
        for (u32 i = 0; i < W_ROWS; i++) cp_async_16(stage + to + i * 32 * ROW, w + at + w_row[i], inside && w_ok[i]);
        if (!copies_x) return;
        stage += C::BN * ROW;
#pragma unroll
        for (u32 i = 0; i < X_ROWS; i++) cp_async_16(stage + to + i * 32 * ROW, x + at + x_row[i], inside && x_ok[i]);
    }
};

// This warp's k16 slices of a stage.
template <class T, class C> DEVICE void multiply_tile(const u8* stage, u32 wn, u32 wm, u32 wk, float (&acc)[C::MT][C::NT][4]) {
    const u32 lane = threadIdx.x % 32;
    const u8* w = stage;
    const u8* x = stage + C::BN * ROW;
#pragma unroll
    for (u32 j = 0; j < BK / 16 / C::WK; j++) {
        const u32 chunk = 2 * (wk * (BK / 16 / C::WK) + j);
        u32 a[C::MT][4], b[C::NT][2];
#pragma unroll
        for (u32 i = 0; i < C::MT; i++) {
            // Matrices: rows 0..8 and 8..16 of the first eight columns, then of the second.
            ldmatrix_x4(a[i], w + swizzle<ROW>(wn * C::WARP_N + 16 * i + lane % 16, chunk + lane / 16));
        }
        if constexpr (C::NT == 1) {
            ldmatrix_x2(b[0], x + swizzle<ROW>(wm * C::WARP_M + lane % 8, chunk + lane / 8 % 2));
        } else {
#pragma unroll
            for (u32 i = 0; i < C::NT; i += 2) {
                // Two token tiles: both halves of k of the first, then of the second.
                ldmatrix_x4(b[i], x + swizzle<ROW>(wm * C::WARP_M + 8 * i + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
            }
        }
#pragma unroll
        for (u32 i = 0; i < C::MT; i++)
#pragma unroll
            for (u32 t = 0; t < C::NT; t++) mma_16816<T>(acc[i][t], a[i], b[t]);
    }
}

// The tiles of a split through a ring of STAGES.
template <class T, class C, u32 STAGES>
DEVICE void multiply_split(const Copies<T, C>& copies, u8* ring, u32 steps, u32 wn, u32 wm, u32 wk, float (&acc)[C::MT][C::NT][4]) {
    // Copies beyond the last step write zeros: a branch around them would have the compiler move the address
    // arithmetic of Copies into it, 40 instructions a step.
#pragma unroll 1
    for (u32 s = 0; s < STAGES - 1; s++) {
        copies.copy(ring + s * C::STAGE_BYTES, s);
        cp_async_commit();
    }
    u32 read = 0, write = STAGES - 1;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>(); // this thread's copies of `step` have landed
        __syncthreads();                // everyone's have, and everyone has read the stage written next
        copies.copy(ring + write * C::STAGE_BYTES, step + STAGES - 1);
        cp_async_commit();
        multiply_tile<T, C>(ring + read * C::STAGE_BYTES, wn, wm, wk, acc);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
    }
}

// Adds the sums of warps along k to those of the first, in order, through the ring (free: the caller waited).
template <class C> DEVICE void sum_warps(u8* ring, u32 wk, u32 thread, float (&acc)[C::MT][C::NT][4]) {
    // [warp along k - 1][element][thread]: neighbours in neighbouring banks.
    float* mine = (float*)ring + thread;
    if (wk > 0) {
#pragma unroll
        for (u32 e = 0; e < C::ACC; e++) {
            mine[((wk - 1) * C::ACC + e) * C::OUT_THREADS] = acc[e / 4 / C::NT][e / 4 % C::NT][e % 4];
        }
    }
    __syncthreads();
    if (wk > 0) return;
    for (u32 other = 0; other < C::WK - 1; other++) {
#pragma unroll
        for (u32 e = 0; e < C::ACC; e++) {
            acc[e / 4 / C::NT][e / 4 % C::NT][e % 4] += mine[(other * C::ACC + e) * C::OUT_THREADS];
        }
    }
}

// Publishes this block's sums; the last block of the tile gets all splits' sums, added in order. Whether this is it.
template <class C, class Grid>
DEVICE bool sum_splits(const LinearParams& p, u8* smem, bool holds, u32 thread, float (&acc)[C::MT][C::NT][4]) {
    const u32 tile = Grid::tile(), splits = Grid::splits();
    // [split][four elements][thread]: 16-byte accesses, neighbours side by side.
    float4* tile_sums = (float4*)(p.partials + (u64)tile * splits * C::BN * C::TM) + thread;
    if (holds) {
        float4* mine = tile_sums + Grid::split() * (C::BN * C::TM / 4);
#pragma unroll
        for (u32 e = 0; e < C::ACC / 4; e++) {
            const float* c = acc[e / C::NT][e % C::NT];
            mine[e * C::OUT_THREADS] = make_float4(c[0], c[1], c[2], c[3]);
        }
    }
    // Every thread's stores are visible to the device before the block counts as arrived.
    __threadfence();
    __syncthreads();
    u32* arrived = (u32*)smem;
    if (threadIdx.x == 0) {
        const u32 before = atomicAdd(p.counters + tile, 1u);
        if (before == splits - 1) p.counters[tile] = 0; // for the next launch: nobody else comes
        *arrived = before;
    }
    __syncthreads();
    if (*arrived != splits - 1) return false;
    __threadfence();
    if (!holds) return true;
#pragma unroll
    for (u32 e = 0; e < C::ACC / 4; e++) {
        float* c = acc[e / C::NT][e % C::NT];
        c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
    for (u32 split = 0; split < splits; split++) {
        const float4* from = tile_sums + split * (C::BN * C::TM / 4);
#pragma unroll
        for (u32 e = 0; e < C::ACC / 4; e++) {
            float* c = acc[e / C::NT][e % C::NT];
            const float4 v = from[e * C::OUT_THREADS];
            c[0] += v.x;
            c[1] += v.y;
            c[2] += v.z;
            c[3] += v.w;
        }
    }
    return true;
}

template <class T, class C, class Grid> DEVICE void linear_dense(const LinearParams& p) {
    SHARED_DYNAMIC(smem);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 wn = warp % C::WN, wm = warp / C::WN % C::WM, wk = warp / (C::WN * C::WM);
    const u32 m0 = Grid::tokens() * C::TM, n0 = Grid::rows() * C::BN;
    const u32 k0 = Grid::split() * p.k_split, k_end = min(k0 + p.k_split, p.k);
    const u32 steps = (k_end - k0 + BK - 1) / BK;

    const Copies<T, C> copies(p, n0, m0, k0, k_end);
    float acc[C::MT][C::NT][4] = {};
    // A loop for every length: as a variable it would cost an indirect branch a step.
    if (p.stages == C::LONG) {
        multiply_split<T, C, C::LONG>(copies, smem, steps, wn, wm, wk, acc);
    } else if (p.stages == C::MIDDLE) {
        multiply_split<T, C, C::MIDDLE>(copies, smem, steps, wn, wm, wk, acc);
    } else {
        multiply_split<T, C, 2>(copies, smem, steps, wn, wm, wk, acc);
    }
    cp_async_wait<0>();
    __syncthreads(); // the ring has been read and nothing will land in it: it can hold sums

    const u32 thread = threadIdx.x % C::OUT_THREADS;
    if constexpr (C::WK > 1) sum_warps<C>(smem, wk, thread, acc);
    if (Grid::splits() > 1) {
        __syncthreads();
        if (!sum_splits<C, Grid>(p, smem, wk == 0, thread, acc)) return;
    }
    if (wk > 0) return;

    // A thread holds rows g and g + 8 of tokens 2t and 2t + 1.
    const u32 g = lane / 4, t = lane % 4;
    const bool gated = is_gated(p);
#pragma unroll
    for (u32 i = 0; i < C::MT; i++) {
        const u32 n = n0 + wn * C::WARP_N + 16 * i + g;
#pragma unroll
        for (u32 j = 0; j < C::NT; j++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                const u32 m = m0 + wm * C::WARP_M + 8 * j + 2 * t + e;
                if (m >= p.m || n >= p.n) continue;
                if (gated) {
                    linear_store_gated<T>(p, m, n, acc[i][j][e], acc[i][j][2 + e]);
                } else {
                    linear_store<T>(p, m, n, acc[i][j][e]);
                    if (n + 8 < p.n) linear_store<T>(p, m, n + 8, acc[i][j][2 + e]);
                }
            }
        }
    }
}

// How many blocks a multiprocessor has room for, with the rings that the host plans.
#if TANDEM_SM >= 90
#define BLOCKS_N32 2
#define BLOCKS_N64 2
#else
#define BLOCKS_N32 1
#define BLOCKS_N64 1
#endif

// src/device/kernels/product/tiles.rs has the same table.
typedef Tile<64, 8, 2, 1, 4, 6, 4> N8;
typedef Tile<64, 16, 2, 1, 4, 6, 4> N16;
typedef Tile<128, 32, 4, 1, 2, 4, 3> N32;
typedef Tile<128, 64, 4, 1, 2, 4, 3> N64;
typedef Tile<128, 128, 4, 2, 1, 4, 3> N128;
