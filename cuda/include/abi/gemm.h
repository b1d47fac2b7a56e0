// abi/gemm.h    products of many tokens with dense weights (cuda/gemm.cu, cuda/gemm_sm90a.cu); see ../abi.h
#pragma once

// Where results go and what becomes of them: names as in LinearParams, for linear_epilogue.cuh.
typedef struct {
    PTR(const float) bias;   // [n] in the order of w's rows, or NULL
    PTR(void) y;             // f32 or T [m][ldy]
    abi_u64 ldy;             // in elements
    abi_u32 m, n;            // tokens; rows of w, a multiple of 16 if gated
    abi_u32 epilogue;        // LINEAR_*
    abi_u32 pad;
} GemmOutput;

// Which part of K each work item sums, and where sums meet when more than one part makes a tile.
typedef struct {
    PTR(float) partial;      // f32 [tile][split][rows of a tile * tokens of a tile], or null if splits is 1
    PTR(abi_u32) arrived;    // [tile], zero before and after every launch
    abi_u32 splits;
    abi_u32 k_per_split;     // a multiple of the tile's depth; the last split may be shorter, none is empty
} GemmSplit;

typedef struct {
    GemmOutput out;
    GemmSplit split;
    PTR(const void) w;       // T [n][k], 16-byte aligned, k % 8 == 0
    PTR(const void) x;       // T [m][ldx], 16-byte aligned, ldx % 8 == 0
    abi_u64 ldx;
    abi_u32 k;
    abi_u32 pad;
} GemmParams;

typedef struct {
    TensorMap w;             // [n][k] in boxes of 128 rows and 64 columns
    TensorMap x;             // [m][k] in boxes of the tile's tokens and 64 columns
    GemmOutput out;
    GemmSplit split;
    abi_u32 k;
    abi_u32 pad;
} GemmTmaParams;
