// peak_value.cuh    operands of the peak kernels: all bits of a bf16's fraction vary (power, and so the clock, depends on
// the data), yet sums of products are exact for a few iterations, so that benches can check the answer first
#pragma once
#include "common.cuh"

// -127/128 ..= 127/128 in steps of 1/128; as benches/cuda/peak.rs.
DEVICE float peak_value(u32 row, u32 k) {
    const u32 h = (row * 0x9e3779b1u ^ k * 0x85ebca77u) * 0xc2b2ae3du;
    return (float)((i32)((h >> 16) % 255u) - 127) * (1.0f / 128.0f);
}
