// gemm.cu    y[m][n] = sum_k x[m][k] w[n][k], many tokens m (prefill), then the epilogue     y^T = W x^T with mma.sync
// in     w [n][k] and x [m][ldx], f16 or bf16, 16-byte aligned, k % 8 == 0, ldx % 8 == 0; any m, n
// out    linear_epilogue.cuh: f32, or T through ReLU or a gated activation
// tile   128 rows of w (the m16 operand) x 128 or 64 tokens (the n8 operand), 32 of k at a time
// launch grid (tiles, splits), block 128 = 2 x 2 warps of 64 rows x 64 (32) tokens; two blocks share a multiprocessor
// shared stages of (128 + tokens) x 64 bytes: 48 KiB with 128 tokens, within every device's default
// regs   128 sums + 2 x 32 fragments at 128 tokens
// no-spill all
// narrow-loads 0 all
// no-stack all
// bound  matrix units; per k16 a warp reads 4 KiB of shared memory for 65536 multiply-adds
// error  f32 sums in the order of k, splits added in order; tolerance derived in tests/gpu/kernels/gemm.rs
// refs   CUTLASS "efficient GEMM" (multistage mainloop); Marlin (weights as the m16 operand)
#include "gemm_tiles.cuh"
#include "ptx.cuh"

constexpr u32 ROWS = 128, DEPTH = 32, THREADS = 128;
constexpr u32 ROW_BYTES = DEPTH * 2, ROWS_PER_PASS = THREADS / 4;

// What one thread copies of an operand's tile: 16 bytes (column `col` of a stage) of every 32nd row.
template <typename T, u32 COUNT> struct Copies {
    static constexpr u32 PASSES = COUNT / ROWS_PER_PASS;
    const T* src;     // row threadIdx / 4, column col of the first stage
    const T* base;    // of the operand: the address of what is not there
    u64 pass;         // elements from one of its rows to the next
    u32 rows_left;    // rows of the operand from its first row on
    u32 offset;       // where that lies in a stage

    DEVICE Copies(const void* base, u64 ld, u32 first, u32 rows, u32 k_begin, u32 stage_base) {
        u32 row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        this->base = (const T*)base;
        src = this->base + (u64)(first + row) * ld + k_begin + chunk * 8;
        pass = ROWS_PER_PASS * ld;
        rows_left = first + row < rows ? rows - first - row : 0;
        offset = stage_base + swizzle<ROW_BYTES>(row, chunk);    // 32 rows further the permutation is the same
    }
    DEVICE bool exists(u32 j) const { return j * ROWS_PER_PASS < rows_left; }

    // Rows and columns outside arrive as zeros: they add nothing.
    DEVICE void start(u8* stage, u32 k, bool in_k) const {
#pragma unroll
        for (u32 j = 0; j < PASSES; j++) {
            const bool inside = in_k && exists(j);
            cp_async_16(stage + offset + j * ROWS_PER_PASS * ROW_BYTES, inside ? src + j * pass + k : base, inside);
        }
    }
    DEVICE void load(uint4 (&held)[PASSES], u32 k, bool in_k) const {
#pragma unroll
        for (u32 j = 0; j < PASSES; j++) held[j] = in_k && exists(j) ? ld_16(src + j * pass + k) : make_uint4(0, 0, 0, 0);
    }
    DEVICE void store(u8* stage, const uint4 (&held)[PASSES]) const {
#pragma unroll
        for (u32 j = 0; j < PASSES; j++) *(uint4*)(stage + offset + j * ROWS_PER_PASS * ROW_BYTES) = held[j];
    }
};

// The operands of one warp for 16 of k: 64 rows as four m16, TOKENS / 2 tokens as pairs of n8.
template <u32 TOKENS> struct Fragments {
    u32 a[4][4];
    u32 b[TOKENS / 32][4];

    DEVICE void load(const u8* stage, u32 kk) {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // a: matrices are rows 0..8 and 8..16 of k 0..8, then of k 8..16;  b: k 0..8 and 8..16 of tokens 0..8, then of 8..16
        u32 a_row = warp / 2 * 64 + lane % 16, a_chunk = kk * 2 + lane / 16;
        u32 b_row = warp % 2 * (TOKENS / 2) + lane / 16 * 8 + lane % 8, b_chunk = kk * 2 + lane / 8 % 2;
#pragma unroll
        for (u32 i = 0; i < 4; i++) ldmatrix_x4(a[i], stage + swizzle<ROW_BYTES>(a_row, a_chunk) + i * 16 * ROW_BYTES);
#pragma unroll
        for (u32 j = 0; j < TOKENS / 32; j++) ldmatrix_x4(b[j], stage + ROWS * ROW_BYTES + swizzle<ROW_BYTES>(b_row, b_chunk) + j * 16 * ROW_BYTES);
    }
};

// Sums of one warp: [m16][n8][c0..c3], flat for split_k_reduce.
template <u32 TOKENS> constexpr u32 N8 = TOKENS / 16;

template <typename T, u32 TOKENS> DEVICE void multiply(float (&sums)[4 * N8<TOKENS> * 4], const Fragments<TOKENS>& f) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 j = 0; j < N8<TOKENS>; j++) mma_16816<T>(&sums[(i * N8<TOKENS> + j) * 4], f.a[i], &f.b[j / 2][j % 2 * 2]);
    }
}

// Ring of three stages filled by cp.async, two ahead. Fragments are double buffered in registers: the next 16 of k
// are read (from the next stage at a stage's end) while the present ones are multiplied.
template <typename T, u32 TOKENS>
DEVICE void mainloop_async(float (&sums)[4 * N8<TOKENS> * 4], u8* smem, const Copies<T, ROWS>& w, const Copies<T, TOKENS>& x, u32 k_here) {
    constexpr u32 STAGES = 3, STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
    u32 steps = (k_here + DEPTH - 1) / DEPTH, col = threadIdx.x % 4 * 8;
    auto start = [&](u32 step) {
        if (step < steps) {
            u8* stage = smem + step % STAGES * STAGE_BYTES;
            bool in_k = step * DEPTH + col < k_here;
            w.start(stage, step * DEPTH, in_k);
            x.start(stage, step * DEPTH, in_k);
        }
        cp_async_commit();    // empty at the end: the count of groups stays one a step
    };
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) start(s);
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    Fragments<TOKENS> now, next;
    now.load(smem, 0);
    for (u32 step = 0; step < steps; step++) {
        next.load(smem + step % STAGES * STAGE_BYTES, 1);
        start(step + STAGES - 1);                  // into the stage that all left at the last barrier
        multiply<T, TOKENS>(sums, now);
        cp_async_wait<STAGES - 2>();               // own copies of stage step + 1 are there,
        __syncthreads();                           // everyone's are, and everyone has read stage step
        if (step + 1 < steps) now.load(smem + (step + 1) % STAGES * STAGE_BYTES, 0);
        multiply<T, TOKENS>(sums, next);
    }
}

// Without cp.async (T4): the next stage waits in registers while this one is multiplied; two stages of shared memory.
template <typename T, u32 TOKENS>
DEVICE void mainloop_sync(float (&sums)[4 * N8<TOKENS> * 4], u8* smem, const Copies<T, ROWS>& w, const Copies<T, TOKENS>& x, u32 k_here) {
    constexpr u32 STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
    u32 steps = (k_here + DEPTH - 1) / DEPTH, col = threadIdx.x % 4 * 8;
    uint4 held_w[Copies<T, ROWS>::PASSES], held_x[Copies<T, TOKENS>::PASSES];
    auto load = [&](u32 step) {
        bool in_k = step * DEPTH + col < k_here;
        w.load(held_w, step * DEPTH, in_k);
        x.load(held_x, step * DEPTH, in_k);
    };
    load(0);
    for (u32 step = 0; step < steps; step++) {
        u8* stage = smem + step % 2 * STAGE_BYTES;
        w.store(stage, held_w);                    // all left this stage before the last barrier
        x.store(stage, held_x);
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        Fragments<TOKENS> f;
#pragma unroll
        for (u32 kk = 0; kk < 2; kk++) {
            f.load(stage, kk);
            multiply<T, TOKENS>(sums, f);
        }
    }
}

template <typename T, u32 TOKENS, bool ASYNC> DEVICE void gemm(const GemmParams& p, u8* smem) {
    u32 row_tiles = (p.out.n + ROWS - 1) / ROWS, token_tiles = (p.out.m + TOKENS - 1) / TOKENS;
    TilePlace tile = tile_place(blockIdx.x, row_tiles, token_tiles);
    u32 n0 = tile.row_tile * ROWS, m0 = tile.token_tile * TOKENS;
    u32 k_begin = blockIdx.y * p.split.k_per_split, k_here = min(p.split.k_per_split, p.k - k_begin);

    Copies<T, ROWS> w(p.w, p.k, n0, p.out.n, k_begin, 0);
    Copies<T, TOKENS> x(p.x, p.ldx, m0, p.out.m, k_begin, ROWS * ROW_BYTES);
    float sums[4 * N8<TOKENS> * 4];
#pragma unroll
    for (u32 i = 0; i < 4 * N8<TOKENS> * 4; i++) sums[i] = 0.0f;
    if constexpr (ASYNC) mainloop_async<T, TOKENS>(sums, smem, w, x, k_here);
    else mainloop_sync<T, TOKENS>(sums, smem, w, x, k_here);

    if (p.split.splits > 1) {
        bool last = split_k_reduce<THREADS, 4 * N8<TOKENS>>(p.split, blockIdx.x, blockIdx.y, threadIdx.x, sums, (u32*)smem, [] { __syncthreads(); });
        if (!last) return;
    }
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 n = n0 + warp / 2 * 64 + lane / 4, m = m0 + warp % 2 * (TOKENS / 2) + lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < 4; i++) store_sums<T, N8<TOKENS>>(p.out, m, n + i * 16, sums + i * N8<TOKENS> * 4);
}

#define GEMM(name, T, TOKENS, ASYNC) \
    KERNEL_BOUNDS(name, GemmParams, THREADS, 2) { SHARED_DYNAMIC(smem); gemm<T, TOKENS, ASYNC>(p, smem); }

GEMM(gemm_f16_128x128_sync, f16, 128, false)
GEMM(gemm_f16_128x64_sync, f16, 64, false)
#if TANDEM_SM >= 80
GEMM(gemm_f16_128x128, f16, 128, true)
GEMM(gemm_f16_128x64, f16, 64, true)
GEMM(gemm_bf16_128x128, bf16, 128, true)
GEMM(gemm_bf16_128x64, bf16, 64, true)
#endif
