// linear_epilogue.cuh    what becomes of the sums of a linear: bias, activation, and where they go
//
// All kernels of dense linear end here, so a fused epilogue is defined once (LINEAR_* in abi/linear.h).
#pragma once

#include "common.cuh"

// Which part of a product a block computes: a tile of tokens, one of weight rows, one of the splits along k; `tile`
// counts the tiles that have partial sums. This one: as the grid of a product lies. experts.cuh has another.
struct LinearGrid {
    static DEVICE u32 tokens() { return blockIdx.x; }
    static DEVICE u32 rows() { return blockIdx.y; }
    static DEVICE u32 split() { return blockIdx.z; }
    static DEVICE u32 splits() { return gridDim.z; }
    static DEVICE u32 tile() { return blockIdx.y * gridDim.x + blockIdx.x; }
};

// The bias of a product, where it is added. experts.cuh has another.
DEVICE const float* bias_of(const LinearParams& p) { return p.bias; }

DEVICE bool is_gated(const LinearParams& p) { return p.epilogue >= LINEAR_SWIGLU; }

// The sum of token m and weight row n.
template <class T> DEVICE void linear_store(const LinearParams& p, u32 m, u32 n, float sum) {
    if (p.bias) sum += p.bias[n];
    const u64 at = (u64)m * p.ldy + n;
    if (p.epilogue == LINEAR_F32) {
        ((float*)p.y)[at] = sum;
    } else {
        ((T*)p.y)[at] = from_f32<T>(fmaxf(sum, 0.0f));
    }
}

// What a gate and its up make.
DEVICE float linear_gated(u32 epilogue, float gate, float up) {
    if (epilogue == LINEAR_CLAMPED_SWIGLU) return clamped_swiglu(gate, up);
    return (epilogue == LINEAR_SWIGLU ? silu(gate) : gelu_tanh(gate)) * up;
}

// The sums of token m and of weight rows n (a gate) and n + 8 (its up): one element of the output.
template <class T> DEVICE void linear_store_gated(const LinearParams& p, u32 m, u32 n, float gate, float up) {
    if (p.bias) {
        gate += p.bias[n];
        up += p.bias[n + 8];
    }
    const u32 i = n / 16 * 8 + n % 8;
    ((T*)p.y)[(u64)m * p.ldy + i] = from_f32<T>(linear_gated(p.epilogue, gate, up));
}
