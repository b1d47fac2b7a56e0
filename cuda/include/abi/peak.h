// abi/peak.h    how fast the matrix units are at best (cuda/peak.cu, cuda/peak_sm90a.cu); see ../abi.h
#pragma once

typedef struct {
    PTR(float) out;          // [threads of the grid]: the sum of a thread's accumulators
    abi_u32 iterations;
    abi_u32 pad;
} PeakParams;
