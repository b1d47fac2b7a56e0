// linear_epilogue.cuh    what becomes of the sums of a linear kernel: store, bias, ReLU, gated activations
//
// An accumulator of y^T = W x^T (mma m16n8, or n8 columns of wgmma m64) gives each lane four sums, g = lane / 4, t = lane % 4:
//
//              token 2t   token 2t+1
//   row g         c0          c1          the eight lanes of one t write 8 neighbours of one token's row:
//   row g + 8     c2          c3          32 bytes, one sector
//
// Gated weights (gate and up of one MLP) have their rows interleaved by 8: [gate 0..8, up 0..8, gate 8..16, up 8..16, ...],
// so c0, c1 are gates and c2, c3 the ups of the same outputs: the activation needs nobody else's sums.
#pragma once
#include "ptx.cuh"
#include "common.cuh"

DEVICE bool is_gated(u32 kind) { return kind >= LINEAR_SWIGLU; }

DEVICE float bias_of(const LinearOutput& out, u32 n) { return out.bias ? out.bias[n] : 0.0f; }

// One sum of row n (not gated).
template <typename T> DEVICE void emit(const LinearOutput& out, u32 m, u32 n, float sum) {
    sum += bias_of(out, n);
    u64 at = (u64)m * out.ldy + n;
    if (out.kind == LINEAR_STORE) ((float*)out.y)[at] = sum;
    else ((T*)out.y)[at] = from_f32<T>(fmaxf(sum, 0.0f));
}

// The gate's sum of row n, n % 16 < 8, and the up's of row n + 8: output column n / 16 * 8 + n % 8.
template <typename T> DEVICE void emit_gated(const LinearOutput& out, u32 m, u32 n, float gate, float up) {
    gate += bias_of(out, n);
    up += bias_of(out, n + 8);
    float act = out.kind == LINEAR_SWIGLU ? silu(gate) : gelu_tanh(gate);
    ((T*)out.y)[(u64)m * out.ldy + (n / 16 * 8 + n % 8)] = from_f32<T>(act * up);
}

// One lane's four sums: `n` is its row g, `m` its token 2t. Rows and tokens beyond the output are left out.
template <typename T> DEVICE void emit_fragment(const LinearOutput& out, u32 m, u32 n, const float c[4]) {
    if (is_gated(out.kind)) {
        if (n + 8 >= out.n) return;
        if (m < out.m) emit_gated<T>(out, m, n, c[0], c[2]);
        if (m + 1 < out.m) emit_gated<T>(out, m + 1, n, c[1], c[3]);
        return;
    }
    #pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = n + i / 2 * 8, token = m + i % 2;
        if (row < out.n && token < out.m) emit<T>(out, token, row, c[i]);
    }
}
