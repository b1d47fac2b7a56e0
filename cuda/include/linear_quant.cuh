// linear_quant.cuh    the body of linear_quant.cu and experts_quant.cu; linear_quant.cu's header describes it
#pragma once

#include "quant_store.cuh"
#include "quant_tile.cuh"

static constexpr u32 WARPS = 8, K_WARPS = 2, ROW_WARPS = WARPS / K_WARPS;
static constexpr u32 STEP_TILES = K_WARPS, STEP_COLS = STEP_TILES * TILE_COLS;
static constexpr u32 X_ROW = STEP_COLS * 2; // bytes

// A stage of the ring: x, then R tiles for each warp (body, then super-scales). Behind the ring, K formats have the scales
// of the stage at hand in f32. The host computes the same: product/quant.rs.
template <class F, int NT, int R> struct Ring {
    static constexpr u32 X = NT * 8 * X_ROW;
    static constexpr u32 TILE = F::BODY + F::SUPER;
    static constexpr u32 STAGE = X + WARPS * R * TILE;
    static constexpr u32 SCALES = F::IS_K ? R * 16 * 16 : 0; // of a warp
};

// Until the oldest of the stages in flight is there.
DEVICE void wait_for_stage(u32 stages) {
    if (stages == 4) {
        cp_async_wait<2>();
    } else if (stages == 3) {
        cp_async_wait<1>();
    } else {
        cp_async_wait<0>();
    }
}

// What a thread copies of x: chunks of 16 bytes of tokens first + thread/16 + 16 i. Chunks 0..8 of a row are the columns
// of the first k warp, 8..16 those of the second.
template <class T, int NT> struct CopyX {
    static constexpr u32 CHUNKS = X_ROW / 16, ROWS = 256 / CHUNKS, N = (NT * 8 + ROWS - 1) / ROWS;
    const T* from;
    u32 to, row, k;
    DEVICE CopyX(const LinearParams& p, u32 first_token, u32 first_tile, u32 half_tiles) {
        const u32 chunk = threadIdx.x % CHUNKS;
        row = threadIdx.x / CHUNKS;
        to = swizzle<X_ROW>(row, chunk); // ROWS is a multiple of 8: all its chunks are swizzled alike
        k = (first_tile + chunk / 8 * half_tiles) * TILE_COLS + chunk % 8 * 8;
        from = (const T*)p.x + (u64)(first_token + row) * p.ldx;
        row += first_token;
    }
    DEVICE void operator()(u8* stage, const LinearParams& p, u32 step) const {
        const u32 col = k + step * TILE_COLS;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (NT * 8 < ROWS && threadIdx.x >= NT * 8 * CHUNKS) break;
            const bool inside = row + ROWS * i < p.m && col < p.k;
            cp_async_16(stage + to + ROWS * i * X_ROW, inside ? from + (u64)(ROWS * i) * p.ldx + col : (const T*)p.x, inside);
        }
    }
};

// What a lane copies of this warp's R tiles: one 16-byte chunk in 32 of each, and of what is left of them all its share.
template <class F, int R> struct CopyTiles {
    static constexpr u32 TILE = F::BODY + F::SUPER, WHOLE = TILE / 512, REST = TILE % 512 / 16, N = (R * REST + 31) / 32;
    const u8* whole; // chunk `lane` of the first tile
    const u8* rest[N];
    u64 row_bytes;
    u32 rows, of_super;
    DEVICE CopyTiles(const void* w, u32 k_tiles, u32 row_tile, u32 row_tiles) {
        const u32 lane = threadIdx.x % 32;
        row_bytes = (u64)(k_tiles / F::GROUP) * F::GROUP_BYTES;
        rows = row_tile < row_tiles ? min(row_tiles - row_tile, (u32)R) : 0;
        whole = (const u8*)w + row_tile * row_bytes + 16 * lane;
        of_super = 0;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const u32 item = lane + 32 * i, chunk = 32 * WHOLE + item % REST;
            const bool super = 16 * chunk >= F::BODY; // super-scales lie behind the group's last tile
            rest[i] = (const u8*)w + (row_tile + item / REST) * row_bytes + 16 * chunk + (super ? (F::GROUP - 1) * F::BODY : 0);
            of_super |= (u32)super << i;
        }
    }
    DEVICE void operator()(u8* to, u32 k_tile) const {
        const u32 lane = threadIdx.x % 32;
        const u32 group = k_tile / F::GROUP * F::GROUP_BYTES, body = group + k_tile % F::GROUP * F::BODY;
#pragma unroll
        for (u32 r = 0; r < R; r++)
#pragma unroll
            for (u32 i = 0; i < WHOLE; i++)
                if (r < rows) cp_async_16(to + r * TILE + 512 * i + 16 * lane, whole + r * row_bytes + body + 512 * i);
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const u32 item = lane + 32 * i, r = item / REST;
            if (r < rows) cp_async_16(to + r * TILE + 512 * WHOLE + item % REST * 16, rest[i] + (of_super >> i & 1 ? group : body));
        }
    }
};

// P: LinearParams, or what adds to them.
template <class T, class F, int NT, int R, class Grid, class P> DEVICE void linear_quant(const P& p, u32 stages) {
    SHARED_DYNAMIC(smem);
    using Stage = Ring<F, NT, R>;
    const u32 lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); // known to be the same in a warp
    const u32 row_warp = warp % ROW_WARPS, k_warp = warp / ROW_WARPS;
    const u32 first_token = Grid::tokens() * NT * 8;
    const u32 k_tiles = ceil_div(p.k, TILE_COLS), row_tiles = ceil_div(p.n, TILE_ROWS);
    const u32 row_tile = (Grid::rows() * ROW_WARPS + row_warp) * R;
    // The first k warp has the first half of the split's tiles and the odd one.
    const u32 begin = Grid::split() * (p.k_split / TILE_COLS);
    const u32 tiles = min(p.k_split / TILE_COLS, k_tiles - begin);
    const u32 steps = (tiles + 1) / 2;
    const u32 mine = begin + k_warp * steps, my_steps = k_warp ? tiles - steps : steps;

    const CopyX<T, NT> copy_x(p, first_token, begin, steps);
    const CopyTiles<F, R> copy_tiles(p.w, k_tiles, row_tile, row_tiles);
    const u32 rows = copy_tiles.rows;
    u8 *fill = smem, *const ring_end = smem + stages * Stage::STAGE;
    float2* scales = (float2*)(ring_end + warp * Stage::SCALES);
    auto copy = [&](u32 step) {
        if (step < steps) {
            copy_x(fill, p, step);
            if (step < my_steps) copy_tiles(fill + Stage::X + warp * R * Stage::TILE, mine + step);
        }
        cp_async_commit(); // empty at the end, so that the count of groups in flight stays the same
        fill = fill + Stage::STAGE == ring_end ? smem : fill + Stage::STAGE;
    };

    float acc[R][NT][4] = {};
    const u8* stage = smem;
    for (u32 step = 0; step + 1 < stages; step++) copy(step);
    for (u32 step = 0; step < steps; step++) {
        wait_for_stage(stages);
        __syncthreads(); // the stage is there for all, and the one before has been read by all
        copy(step + stages - 1);

        if (step < my_steps) {
            const u8* from = stage + Stage::X + warp * R * Stage::TILE;
            Tile<F> tile[R];
            if (F::IS_K) share_scales<F, R>(scales, from, rows);
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (r >= rows) break;
                const TileAt<F> at = {from + r * Stage::TILE, from + r * Stage::TILE + F::BODY};
                load_codes<F, false>(tile[r], at);
                if (!F::IS_K) load_scales<F>(tile[r], at);
            }
            if (F::IS_K) __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Four 8x8 matrices: eight tokens x 32 columns.
                u32 b[NT][4];
#pragma unroll
                for (int n = 0; n < NT; n++)
                    ldmatrix_x4(b[n], stage + swizzle<X_ROW>(8 * n + lane % 8, 8 * k_warp + 4 * half + lane / 8));
                float sums[NT][2];
                if (F::HAS_MIN) column_sums<T, NT>(sums, b);
#pragma unroll
                for (int r = 0; r < R; r++)
                    // The branch also keeps the compiler from dequantising all R tiles at once, which spills.
                    if (r < rows) {
                        const HalfScales of = F::IS_K ? shared_half_scales<F>(scales, r, half) : half_scales<F>(tile[r], half);
                        mma_half<T, F, NT>(acc[r], tile[r], half, of, b, sums);
                    }
            }
        }
        stage = stage + Stage::STAGE == ring_end ? smem : stage + Stage::STAGE;
    }

    // The second half of every step to the first.
    cp_async_wait<0>();
    __syncthreads();
    float4* shared = (float4*)smem; // [row warp][r][n][lane]
    if (k_warp == 1) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                shared[((row_warp * R + r) * NT + n) * 32 + lane] = make_float4(acc[r][n][0], acc[r][n][1], acc[r][n][2], acc[r][n][3]);
    }
    __syncthreads();
    LinearParams end = p;
    end.bias = bias_of(p);
    const u32 splits = Grid::splits();
    const u32 tile_index = Grid::tile();
    constexpr u32 ITEMS = ROW_WARPS * R * NT; // m16n8 tiles of the block
    float4* partials = (float4*)p.partials + (u64)tile_index * splits * ITEMS * 32;
    if (k_warp == 0) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 item = (row_warp * R + r) * NT + n;
                const float4 v = shared[item * 32 + lane];
                float* sum = acc[r][n];
                sum[0] += v.x;
                sum[1] += v.y;
                sum[2] += v.z;
                sum[3] += v.w;
                if (splits == 1) {
                    store_tile<T>(end, row_tile + r, first_token + 8 * n, sum);
                } else {
                    partials[((u64)Grid::split() * ITEMS + item) * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
                }
            }
    }
    if (splits == 1) return;
    __syncthreads(); // shared was read: its first word becomes the flag
    if (!last_to_arrive(p.counters + tile_index, splits, (u32*)smem)) return;
    for (u32 item = warp; item < ITEMS; item += WARPS) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 s = 0; s < splits; s++) {
            const float4 v = partials[((u64)s * ITEMS + item) * 32 + lane];
            sum[0] += v.x;
            sum[1] += v.y;
            sum[2] += v.z;
            sum[3] += v.w;
        }
        store_tile<T>(end, Grid::rows() * ROW_WARPS * R + item / NT, first_token + item % NT * 8, sum);
    }
}

// The kernels of a type of activations: OF(format, its Format, type's name, type, tokens of a block, R, blocks of a
// multiprocessor). R is 4 where x would otherwise be read too often and the registers and T4's shared memory have room:
// 4- and 5-bit codes up to 32 tokens. src/device/kernels/product/quant.rs has the same table.
#define QUANT_TILES_4(OF, format, F, t, T) \
    OF(format, F, t, T, 8, 4, 2)           \
    OF(format, F, t, T, 16, 4, 2)          \
    OF(format, F, t, T, 32, 4, 1)          \
    OF(format, F, t, T, 64, 2, 1)
// 128 registers do not suffice for 6 bits on T4, whose shared memory has room for one block anyway.
#define QUANT_TILES_8(OF, format, F, t, T)               \
    OF(format, F, t, T, 8, 2, 2)                         \
    OF(format, F, t, T, 16, 2, 2)                        \
    OF(format, F, t, T, 32, 2, (TANDEM_SM < 80 ? 1 : 2)) \
    OF(format, F, t, T, 64, 2, 1)
#define QUANT_TILES(OF, t, T)         \
    QUANT_TILES_4(OF, mxfp4, MXFP4, t, T) \
    QUANT_TILES_4(OF, q4_0, Q4_0, t, T) \
    QUANT_TILES_4(OF, q4_1, Q4_1, t, T) \
    QUANT_TILES_4(OF, q4_k, Q4_K, t, T) \
    QUANT_TILES_4(OF, q5_0, Q5_0, t, T) \
    QUANT_TILES_4(OF, q5_1, Q5_1, t, T) \
    QUANT_TILES_4(OF, q5_k, Q5_K, t, T) \
    QUANT_TILES_8(OF, q6_k, Q6_K, t, T) \
    QUANT_TILES_8(OF, q8_0, Q8_0, t, T)
