// peak.cu    the rate of mma.sync with operands in registers: what gemm.cu is measured against
// out    [thread]: the sum of its accumulators after `iterations` of a[16][16] * b[8 blocks of 8][16]^T
// launch any grid, block 256; 8 independent accumulators a warp and 16 warps a multiprocessor hide mma's latency
// work   iterations * 8 * 16*8*16 multiply-adds a warp
// no-spill all
// no-stack all
#include "peak_value.cuh"
#include "ptx.cuh"

template <class T> DEVICE void peak(const PeakParams& p) {
    constexpr u32 BLOCKS = 8;
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto pair = [](u32 row, u32 k) { return pack2<T>(peak_value(row, k), peak_value(row, k + 1)); };
    const u32 a[4] = {pair(g, 2 * t), pair(g + 8, 2 * t), pair(g, 2 * t + 8), pair(g + 8, 2 * t + 8)};
    u32 b[BLOCKS][2];
    float c[BLOCKS][4] = {};
#pragma unroll
    for (u32 j = 0; j < BLOCKS; j++) {
        b[j][0] = pair(16 + j * 8 + g, 2 * t);
        b[j][1] = pair(16 + j * 8 + g, 2 * t + 8);
    }
    for (u32 i = 0; i < p.iterations; i++) {
#pragma unroll
        for (u32 j = 0; j < BLOCKS; j++) mma_16816<T>(c[j], a, b[j]);
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < BLOCKS; j++) sum += (c[j][0] + c[j][1]) + (c[j][2] + c[j][3]);
    p.out[(u64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

KERNEL_BOUNDS(peak_mma_f16, PeakParams, 256, 2) { peak<f16>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(peak_mma_bf16, PeakParams, 256, 2) { peak<bf16>(p); }
#endif
