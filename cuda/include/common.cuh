// common.cuh    what several kernels share: reductions, swizzles, activation functions
#pragma once

#include "ptx.cuh"

#define NEG_INF (-__uint_as_float(0x7f800000u))

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// This thread's number within its block, and its place in its warp (blocks may be (32, warps) or flat).
DEVICE u32 thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
DEVICE u32 block_threads() { return blockDim.x * blockDim.y * blockDim.z; }
DEVICE u32 lane_id() { return thread_rank() % 32; }
DEVICE u32 warp_id() { return thread_rank() / 32; }

// ---------------------------------------------------------------------------------------------------------
// Reductions. Fixed order: a result depends on the values alone. Every lane (thread) gets it.

// Over groups of WIDTH neighbouring lanes.
template <int WIDTH = 32> DEVICE float warp_sum(float v) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
template <int WIDTH = 32> DEVICE float warp_max(float v) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// Sums each of V (a power of two) values over the warp; lane l ends up with value l / (32/V). Each step hands half
// of the values to the partner lane and keeps the other half: V - 1 + log2(32/V) shuffles instead of 5 V.
// Steps are unrolled by the template: as a loop of 32 values nvcc leaves them in local memory.
template <int HALF, int D, int V> DEVICE void warp_fold(float (&v)[V], u32 lane) {
    if constexpr (HALF > 0) {
        const bool upper = lane & D;
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            const float give = upper ? v[i] : v[i + HALF];
            const float keep = upper ? v[i + HALF] : v[i];
            v[i] = keep + __shfl_xor_sync(~0u, give, D);
        }
    } else {
        v[0] += __shfl_xor_sync(~0u, v[0], D);
    }
    if constexpr (D > 1) warp_fold<HALF / 2, D / 2>(v, lane);
}
template <int V> DEVICE float warp_sum_each(float (&v)[V]) {
    warp_fold<V / 2, 16>(v, threadIdx.x % 32);
    return v[0];
}

// Over the block (whole warps): `scratch` is 32 floats of shared memory, free again on return.
DEVICE float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    if (lane_id() == 0) scratch[warp_id()] = v;
    __syncthreads();
    float sum = 0;
    for (u32 w = 0; w < block_threads() / 32; w++) sum += scratch[w];
    __syncthreads();
    return sum;
}
DEVICE float block_max(float v, float* scratch) {
    v = warp_max(v);
    if (lane_id() == 0) scratch[warp_id()] = v;
    __syncthreads();
    float most = NEG_INF;
    for (u32 w = 0; w < block_threads() / 32; w++) most = fmaxf(most, scratch[w]);
    __syncthreads();
    return most;
}

// ---------------------------------------------------------------------------------------------------------
// Swizzle: where 16-byte chunk `chunk` of row `row` lies (in bytes) in a shared tile whose rows are ROW_BYTES.
//
// ldmatrix and 16-byte stores touch the same chunk of eight consecutive rows; they are free of bank conflicts if
// those fall on eight different residues mod 128 bytes. Rows of ROW_BYTES = 16 * R step by R residues, which meet
// again after 8 / g rows, g = gcd(R, 8); from there on the chunk number is xor-ed with the next 0..g. No padding,
// for every head_dim (64, 80, 96, 128, 256) and every tile of 32 or 64 halves. At 128 bytes this is the 128-byte
// swizzle of TMA and wgmma.
template <int ROW_BYTES> DEVICE u32 swizzle(u32 row, u32 chunk) {
    static_assert(ROW_BYTES % 16 == 0, "rows are whole 16-byte chunks");
    constexpr u32 R = ROW_BYTES / 16;
    constexpr u32 g = R % 8 == 0 ? 8 : R % 4 == 0 ? 4 : R % 2 == 0 ? 2 : 1;
    return row * ROW_BYTES + ((chunk ^ (row / (8 / g) % g)) << 4);
}

// ---------------------------------------------------------------------------------------------------------
// Activation functions, in f32 as the reference.

DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
DEVICE float gelu_tanh(float x) {
    const float sqrt_2_over_pi = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanhf(sqrt_2_over_pi * (x + 0.044715f * x * x * x)));
}
// g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up between -7 and 7. NaN stays NaN.
DEVICE float clamped_swiglu(float gate, float up) {
    const float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return g / (1.0f + __expf(-1.702f * g)) * (u + 1.0f);
}
DEVICE float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }
