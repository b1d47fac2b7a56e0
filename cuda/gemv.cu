// gemv.cu    y = W x for 1 to 4 tokens: weights stream once through registers
//
//   a warp     two rows of W (a gate and its up when gated), lanes side by side along k: 512 contiguous bytes a load
//   a block    8 warps = 8/k_warps pairs of rows x k_warps slices of k, summed in shared memory in slice order
//
// in     w T[n][k], x T[m][ldx], 16-byte aligned, k % 8 == 0       out    y f32 or T [m][ldy], see abi/linear.h
// launch grid ceil(pairs / (8/k_warps)), block 256, shared 8 * 2 * M * 4 bytes
// loads  four steps of 256 columns of two rows: 8 x 16 bytes a lane issued before the first is used, 4 KiB a warp. A
//        warp's arithmetic (600 clocks a batch) is short beside the time that 16 warps wait for theirs (3100 clocks at
//        H200's 21 bytes a clock and multiprocessor), so a ring of loads would gain nothing. H200 needs 4.8 TB/s *
//        0.75 us / 132 = 27 KiB in flight a multiprocessor, A10 and T4 5 KiB; the host plans for 16 warps: 64 KiB.
//        Weights take no place in L1, which keeps x: every warp of a multiprocessor reads the same x at about the
//        same time, so x costs one L2 miss a line, and staging it would cost a barrier.
// bound  memory: 2*n*k bytes. 4096 x 4096: 33.5 MB = 7.0 us at 4.8 TB/s (H200), 56 us at 600 GB/s (A10),
//        105 us at 320 GB/s (T4). Issue slots at M = 4: 124 instructions a warp and KiB = 31 clocks of a
//        multiprocessor, where H200's memory delivers a KiB in 49: 63%; at M = 1 25%.
// regs   M = 1: 64 (4 blocks a multiprocessor), 2: 80 (3), 3: 118 to 124 (2), 4: 122 to 127 (2), at 75, 80 and 90
// order  a lane adds its columns in ascending order, lanes by halves (16, 8, .. 1), slices in ascending order: the
//        same for every M, so a row's result does not depend on its batch.
// error  f32 sums of exact products: (k/(32*k_warps) + 5 + k_warps) * 2^-24 * sum |w x|
// oracle f64, tests/gpu_linear.rs
// no-spill all
// narrow-loads 0 all
// no-stack all
#include "linear_epilogue.cuh"
#include "ptx.cuh"

static constexpr u32 WARPS = 8;
static constexpr int STEPS = 4; // of 256 columns, in flight at once

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Sums each of V (a power of two) values over the warp; lane l ends up with value l / (32/V). Each step hands half
// of the values to the partner lane and keeps the other half: V - 1 + log2(32/V) shuffles instead of 5 V.
template <int V> DEVICE float warp_sum_each(float (&v)[V]) {
    const u32 lane = threadIdx.x % 32;
    int d = 16;
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2, d /= 2) {
        const bool upper = lane & d;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float give = upper ? v[i] : v[i + half];
            const float keep = upper ? v[i + half] : v[i];
            v[i] = keep + __shfl_xor_sync(~0u, give, d);
        }
    }
#pragma unroll
    for (; d > 0; d /= 2) v[0] += __shfl_xor_sync(~0u, v[0], d);
    return v[0];
}

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

template <class T, int M> DEVICE void gemv(const LinearParams& p) {
    SHARED_DYNAMIC(smem);
    float* sums = (float*)smem; // [warp][row of the pair][token]
    constexpr int V = 2 * (M == 3 ? 4 : M);

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 slices = 1u << p.k_warps_log2;
    const u32 block_pairs = WARPS >> p.k_warps_log2, pairs = (p.n + 1) / 2;
    const bool gated = is_gated(p);

    // Beyond the end a warp repeats the last pair and stores nothing: it must reach the barrier.
    const u32 pair = min(blockIdx.x * block_pairs + warp % block_pairs, pairs - 1);
    const u32 row0 = gated ? pair / 8 * 16 + pair % 8 : 2 * pair;
    const u32 row1 = min(row0 + (gated ? 8 : 1), p.n - 1);

    // This warp's slice of the columns.
    const u32 begin = warp / block_pairs * p.k_split, end = min(begin + p.k_split, p.k);
    const T* w0 = (const T*)p.w + ((u64)row0 * p.k + begin + 8 * lane);
    const T* w1 = (const T*)p.w + ((u64)row1 * p.k + begin + 8 * lane);
    const T* x[M];
#pragma unroll
    for (int m = 0; m < M; m++) x[m] = (const T*)p.x + ((u64)m * p.ldx + begin + 8 * lane);

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
    const u32 mine = blockIdx.x * block_pairs + of;
    if (mine >= pairs) return;
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

KERNEL_BOUNDS(gemv_f16_m1, LinearParams, 256, 4) { gemv<f16, 1>(p); }
KERNEL_BOUNDS(gemv_f16_m2, LinearParams, 256, 3) { gemv<f16, 2>(p); }
KERNEL_BOUNDS(gemv_f16_m3, LinearParams, 256, 2) { gemv<f16, 3>(p); }
KERNEL_BOUNDS(gemv_f16_m4, LinearParams, 256, 2) { gemv<f16, 4>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(gemv_bf16_m1, LinearParams, 256, 4) { gemv<bf16, 1>(p); }
KERNEL_BOUNDS(gemv_bf16_m2, LinearParams, 256, 3) { gemv<bf16, 2>(p); }
KERNEL_BOUNDS(gemv_bf16_m3, LinearParams, 256, 2) { gemv<bf16, 3>(p); }
KERNEL_BOUNDS(gemv_bf16_m4, LinearParams, 256, 2) { gemv<bf16, 4>(p); }
#endif
