// gemv.cuh    the body of gemv.cu and experts_gemv.cu; gemv.cu's header describes it
#pragma once

#include "linear_epilogue.cuh"

static constexpr u32 WARPS = 8;
static constexpr int STEPS = 4; // of 256 columns, in flight at once

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// STEPS steps of 256 columns from this lane's column k on: all loads of weights are issued before any is used.
// CHECK: columns from `left` on (counted from k) are beyond the end and count as zeros.
template <class T, int M, bool CHECK>
DEVICE void gemv_steps(const T* w0, const T* w1, const T* const (&x)[M], i32 left, float (&acc)[2][M]) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 w[STEPS][2];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const bool ok = !CHECK || 256 * s < left;
        w[s][0] = ok ? ld_stream_16(w0 + 256 * s) : zero;
        w[s][1] = ok ? ld_stream_16(w1 + 256 * s) : zero;
    }
    __syncwarp(); // or ptxas sinks half of the loads below the first use of the others
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        uint4 v[M];
#pragma unroll
        for (int m = 0; m < M; m++) v[m] = !CHECK || 256 * s < left ? ld_16(x[m] + 256 * s) : zero;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 a = unpack2<T>(word(w[s][0], i)), b = unpack2<T>(word(w[s][1], i));
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float2 c = unpack2<T>(word(v[m], i));
                acc[0][m] = fmaf(a.y, c.y, fmaf(a.x, c.x, acc[0][m]));
                acc[1][m] = fmaf(b.y, c.y, fmaf(b.x, c.x, acc[1][m]));
            }
        }
    }
}

// Block `block` of the product of M tokens. FEWER: of p.m tokens, at most M; a token's bits are the same.
template <class T, int M, bool FEWER = false> DEVICE void gemv(const LinearParams& p, u32 block) {
    SHARED_DYNAMIC(smem);
    float* sums = (float*)smem; // [warp][row of the pair][token]
    constexpr int V = 2 * (M == 3 ? 4 : M);

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 slices = 1u << p.k_warps_log2;
    const u32 block_pairs = WARPS >> p.k_warps_log2, pairs = (p.n + 1) / 2;
    const bool gated = is_gated(p);

    // Beyond the end a warp repeats the last pair and stores nothing: it must reach the barrier.
    const u32 pair = min(block * block_pairs + warp % block_pairs, pairs - 1);
    const u32 row0 = gated ? pair / 8 * 16 + pair % 8 : 2 * pair;
    const u32 row1 = min(row0 + (gated ? 8 : 1), p.n - 1);

    // This warp's slice of the columns.
    const u32 begin = warp / block_pairs * p.k_split, end = min(begin + p.k_split, p.k);
    const T* w0 = (const T*)p.w + ((u64)row0 * p.k + begin + 8 * lane);
    const T* w1 = (const T*)p.w + ((u64)row1 * p.k + begin + 8 * lane);
    const T* x[M];
#pragma unroll
    for (int m = 0; m < M; m++) x[m] = (const T*)p.x + ((u64)(FEWER ? min((u32)m, p.m - 1) : m) * p.ldx + begin + 8 * lane);

    float acc[2][M] = {};
    i32 left = (i32)(end - begin);
    for (; left >= 256 * STEPS; left -= 256 * STEPS) {
        gemv_steps<T, M, false>(w0, w1, x, left, acc);
        w0 += 256 * STEPS;
        w1 += 256 * STEPS;
#pragma unroll
        for (int m = 0; m < M; m++) x[m] += 256 * STEPS;
    }
    if (left > 0) gemv_steps<T, M, true>(w0, w1, x, left - (i32)(8 * lane), acc);

    float v[V];
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = i % (V / 2) < M ? acc[i / (V / 2)][i % (V / 2)] : 0.0f;
    const float sum = warp_sum_each(v);
    const u32 which = lane / (32 / V), m = which % (V / 2);
    if (lane % (32 / V) == 0 && m < M) sums[(warp * 2 + which / (V / 2)) * M + m] = sum;
    __syncthreads();

    // One thread a pair and token.
    if (threadIdx.x >= block_pairs * M) return;
    const u32 token = threadIdx.x / block_pairs, of = threadIdx.x % block_pairs;
    const u32 mine = block * block_pairs + of;
    if (mine >= pairs || (FEWER && token >= p.m)) return;
    float s0 = 0.0f, s1 = 0.0f;
    for (u32 slice = 0; slice < slices; slice++) {
        const float* from = sums + (slice * block_pairs + of) * 2 * M + token;
        s0 += from[0];
        s1 += from[M];
    }
    if (gated) {
        linear_store_gated<T>(p, token, mine / 8 * 16 + mine % 8, s0, s1);
    } else {
        linear_store<T>(p, token, 2 * mine, s0);
        if (2 * mine + 1 < p.n) linear_store<T>(p, token, 2 * mine + 1, s1);
    }
}
