// peak_sm90a.cu    the rate of wgmma with operands that stay in shared memory: what gemm_sm90a.cu is measured against
// out    [thread]: the sum of its accumulators after `iterations` (at least one) of a[128][64] * b[256][64]^T, 64 rows a warpgroup
// launch any grid (one block a multiprocessor), block 256 = two warpgroups, shared 48 KiB
// work   iterations * 128*256*64 multiply-adds a block
// no-spill all
// hgmma-run 4 all
// hgmma-open 1 all
// no-stack all
#include "peak_value.cuh"
#include "ptx.cuh"

#if TANDEM_SM90A

template <class T> DEVICE void peak(const PeakParams& p, u8* smem) {
    constexpr u32 ROWS = 128, COLUMNS = 256, DEPTH = 64, ROW_BYTES = DEPTH * 2;
    for (u32 i = threadIdx.x; i < (ROWS + COLUMNS) * DEPTH; i += blockDim.x) {
        const u32 row = i / DEPTH, k = i % DEPTH;
        *(T*)(smem + swizzle<ROW_BYTES>(row, k / 8) + k % 8 * 2) = from_f32<T>(peak_value(row, k));
    }
    fence_async_shared();
    __syncthreads();
    const u64 a = smem_desc_sw128(smem_u32(smem + threadIdx.x / 128 * 64 * ROW_BYTES));
    const u64 b = smem_desc_sw128(smem_u32(smem + ROWS * ROW_BYTES));
    float c[COLUMNS / 2];
    wgmma_discard(c);
    for (u32 i = 0; i < p.iterations; i++) {
        wgmma_fence(c);
#pragma unroll
        for (u32 kk = 0; kk < DEPTH / 16; kk++) wgmma_m64k16<T, COLUMNS>(c, a + kk * 2, b + kk * 2, kk > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>(c);
    }
    wgmma_wait<0>(c);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 2; i++) sum += c[i];
    p.out[(u64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

KERNEL_BOUNDS(peak_wgmma_f16, PeakParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    peak<f16>(p, smem);
}
KERNEL_BOUNDS(peak_wgmma_bf16, PeakParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    peak<bf16>(p, smem);
}

#endif
