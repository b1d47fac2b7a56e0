// abi/linear.h    y[m][n] = sum_k x[m][k] * w[n][k] (+ bias[n]), dense 16-bit weights    see ../abi.h
#pragma once

// What becomes of a sum. All but the first write T (the type of weights and activations) instead of f32.
#define LINEAR_F32 0u     // y[m*ldy + n]
#define LINEAR_RELU 1u    // y[m*ldy + n] = max(sum, 0)
#define LINEAR_SWIGLU 2u  // y[m*ldy + i] = silu(gate_i) * up_i, rows of w interleaved by 8 (gate 0..8, up 0..8, ...)
#define LINEAR_GEGLU 3u   // the same with gelu_tanh(gate_i)
#define LINEAR_CLAMPED_SWIGLU 4u // g * sigmoid(1.702 g) * (u + 1), g = min(gate_i, 7), u = up_i between -7 and 7

typedef struct {
    PTR(const void) w;      // T [n][k]
    PTR(const void) x;      // T [m][ldx]
    PTR(const float) bias;  // [n] in the order of w's rows, or NULL
    PTR(void) y;            // f32 or T [m][ldy]
    PTR(float) partials;    // linear_dense: [tile][split][tile elements], when splits > 1
    PTR(abi_u32) counters;  // linear_dense: [tile], 0 before and after
    abi_u32 m, n, k;        // k % 8 == 0; w and x 16-byte aligned; gated: n % 16 == 0
    abi_u32 ldx, ldy;       // in elements; ldx % 8 == 0
    abi_u32 epilogue;       // LINEAR_*
    abi_u32 k_warps_log2;   // gemv: 1, 2, 4 or 8 warps of a block share a row
    abi_u32 stages;         // linear_dense: tiles in its ring: 2, 3, 4 or 6
    abi_u32 k_split;        // columns of one split (linear_dense: a multiple of 64) or one warp (gemv: of 256)
} LinearParams;
