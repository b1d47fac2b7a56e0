// abi/quant.h    linear with quantised weights, packed by src/device/kernels/quant/pack.rs    see ../abi.h
#pragma once

typedef struct {
    // w: packed weights of n rows and k columns (k % 32 == 0; k % 256 == 0 for the K formats). The rest as for dense
    // weights; k_warps is not used. k_split: columns of one split, a multiple of 64 (gemv) or 128 (linear).
    LinearParams linear;
    abi_u32 stages;  // linear_quant: depth of the shared-memory ring, 2 to 4
} QuantLinearParams;

typedef struct {
    PTR(const void) w;  // packed weights of n rows and k columns
    PTR(void) y;        // T [rows][ldy], 16-byte aligned, ldy % 8 == 0
    abi_u32 n, k;
    abi_u32 row_begin;  // first row, a multiple of 16
    abi_u32 rows;       // rows to write
    abi_u32 ldy;
} QuantRowsParams;

typedef struct {
    PTR(const void) w;           // packed weights of n rows and k columns
    PTR(const abi_u32) row_ids;  // [rows], each < n
    PTR(float) y;                // f32 [rows][ldy], ldy % 4 == 0
    abi_u32 n, k;
    abi_u32 rows;
    abi_u32 ldy;
    float scale;  // multiplies the result (Gemma scales embeddings)
} QuantGatherParams;
