// abi/conformance.h    one wrapper a kernel, its operands and results dumped (cuda/conformance.cu); see ../abi.h
#pragma once

typedef struct {
    PTR(const void) in;  // as each kernel says
    PTR(void) out;
    PTR(abi_u32) words;  // of conformance_last_block: counter and flags, zero
    abi_u32 n;
    abi_u32 pad;
} ConformanceParams;

typedef struct {
    TensorMap map;       // of a matrix of halves, in boxes of `box_rows` rows and `box_cols` columns
    PTR(void) out;       // the box as it lies in shared memory
    int x, y;            // its first column and row
    abi_u32 box_rows, box_cols;
} ConformanceTmaParams;
