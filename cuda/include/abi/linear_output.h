// abi/linear_output.h    what becomes of the sums of a linear kernel (cuda/include/linear_epilogue.cuh); see ../abi.h
#pragma once

// LinearOutput::kind. T is the activation type of the kernel (bf16 or f16).
#define LINEAR_STORE 0     // y f32 [m][ldy]  = sum + bias
#define LINEAR_RELU 1      // y T   [m][ldy]  = max(0, sum + bias)
#define LINEAR_SWIGLU 2    // y T   [m][ldy]  = silu(gate + bias) * (up + bias), rows of w interleaved by 8, n / 2 columns
#define LINEAR_GEGLU 3     // y T   [m][ldy]  = gelu_tanh(gate + bias) * (up + bias), likewise

typedef struct {
    PTR(void) y;
    PTR(const float) bias;    // f32 [n] in the order of w's rows, or null
    abi_u64 ldy;              // elements of y from one token to the next
    abi_u32 m;                // tokens
    abi_u32 n;                // rows of w; a multiple of 16 where the kind is gated
    abi_u32 kind;
    abi_u32 pad;
} LinearOutput;
