// conformance_sm90a.cu    the wrappers of sm_90a, dumped: see conformance.cu
//
// Operands of wgmma arrive as the bytes that shared memory is to hold, swizzled by the test's own statement of the
// layout, so nothing here knows it.
// no-spill all
// no-stack all
#include "common.cuh"

#if TANDEM_SM90A

// Copies `bytes` (a multiple of 16) to shared memory as they are, and shows them to the asynchronous units.
DEVICE void fill_shared(u8* smem, const void* from, u32 bytes) {
    for (u32 i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) *(uint4*)(smem + i) = *(const uint4*)((const u8*)from + i);
    fence_async_shared();
    __syncthreads();
}

// in: 8192 bytes of a [64][64] halves, then N * 128 bytes of b [N][64], then f32 d [128][N / 2], to which the first step
// adds if n is not zero, and which it overwrites otherwise.
// out: f32 d [128][N / 2], after the four steps of k: one group, or four of which at most two run at a time. 128 threads,
// 8192 + 128 N bytes of shared memory.
template <class T, int N, bool PIPELINED = false> DEVICE void wgmma(const ConformanceParams& p) {
    SHARED_DYNAMIC(smem);
    constexpr u32 bytes = 8192 + 128 * N;
    fill_shared(smem, p.in, bytes);
    const float* before = (const float*)((const u8*)p.in + bytes) + threadIdx.x * (N / 2);
    float d[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) d[i] = before[i];
    u64 a = smem_desc_sw128(smem_u32(smem)), b = smem_desc_sw128(smem_u32(smem + 8192));
    wgmma_fence(d);
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        wgmma_m64k16<T, N>(d, a + 2 * k, b + 2 * k, k > 0 || p.n);
        if (!PIPELINED) continue;
        wgmma_commit();
        wgmma_wait<1>(d);
        wgmma_fence(d);
    }
    wgmma_commit();
    wgmma_wait<0>(d);
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) ((float*)p.out)[threadIdx.x * (N / 2) + i] = d[i];
}
KERNEL(conformance_wgmma_f16_n8, ConformanceParams) { wgmma<f16, 8>(p); }
KERNEL(conformance_wgmma_f16_n128, ConformanceParams) { wgmma<f16, 128>(p); }
KERNEL(conformance_wgmma_bf16_n64, ConformanceParams) { wgmma<bf16, 64>(p); }
KERNEL(conformance_wgmma_bf16_n256, ConformanceParams) { wgmma<bf16, 256>(p); }
KERNEL(conformance_wgmma_f16_n64_pipelined, ConformanceParams) { wgmma<f16, 64, true>(p); }
KERNEL(conformance_wgmma_bf16_n256_pipelined, ConformanceParams) { wgmma<bf16, 256, true>(p); }

// a in registers, b by N. in: a [128][4] words, then N / 64 tiles of b [16][64] halves, 2048 bytes each, then d and n as above.
// 128 threads, 32 N bytes of shared memory.
template <class T, int N> DEVICE void wgmma_ra(const ConformanceParams& p) {
    SHARED_DYNAMIC(smem);
    const u32* in = (const u32*)p.in;
    u32 a[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[i] = in[threadIdx.x * 4 + i];
    fill_shared(smem, in + 512, 32 * N);
    const float* before = (const float*)(in + 512 + 8 * N) + threadIdx.x * (N / 2);
    float d[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) d[i] = before[i];
    wgmma_fence(d, a);
    wgmma_m64k16_ra<T, N>(d, a, smem_desc_sw128_mn(smem_u32(smem), 2048), p.n);
    wgmma_commit();
    wgmma_wait<0>(d, a);
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) ((float*)p.out)[threadIdx.x * (N / 2) + i] = d[i];
}
KERNEL(conformance_wgmma_ra_f16_n64, ConformanceParams) { wgmma_ra<f16, 64>(p); }
KERNEL(conformance_wgmma_ra_bf16_n128, ConformanceParams) { wgmma_ra<bf16, 128>(p); }
KERNEL(conformance_wgmma_ra_f16_n256, ConformanceParams) { wgmma_ra<f16, 256>(p); }

// One box by a bulk copy, dumped as it lies. 32 threads, the box's bytes and 8 of shared memory, 1024-byte aligned.
KERNEL(conformance_tma_sm90a, ConformanceTmaParams) {
    SHARED_DYNAMIC(smem);
    u32 bytes = p.box_rows * p.box_cols * 2;
    u64* bar = (u64*)(smem + bytes);
    if (threadIdx.x == 0) {
        mbar_init(bar, 1);
        mbar_init_fence();
    }
    __syncwarp();
    if (threadIdx.x == 0) {
        mbar_expect_tx(bar, bytes);
        tma_load_2d(smem, &p.map, bar, p.x, p.y);
    }
    mbar_wait(bar, 0);
    for (u32 i = threadIdx.x; i < bytes / 4; i += 32) ((u32*)p.out)[i] = ((const u32*)smem)[i];
}

// Phases of an mbarrier: a ring of one word that 32 producers (warp 0) fill and 32 consumers (warp 1) empty, n times.
// in: n words, out: n words. 64 threads, 32 bytes of shared memory.
KERNEL(conformance_mbarrier_sm90a, ConformanceParams) {
    SHARED_DYNAMIC(smem);
    u64 *full = (u64*)smem, *empty = full + 1;
    u32* word = (u32*)(smem + 16);
    if (threadIdx.x == 0) {
        mbar_init(full, 32);
        mbar_init(empty, 32);
        mbar_init_fence();
    }
    __syncthreads();
    for (u32 i = 0; i < p.n; i++) {
        if (threadIdx.x < 32) {
            mbar_wait(empty, (i & 1) ^ 1);
            if (threadIdx.x == i % 32) *word = ((const u32*)p.in)[i];
            mbar_arrive(full);
        } else {
            mbar_wait(full, i & 1);
            if (threadIdx.x == 32 + i % 32) ((u32*)p.out)[i] = *word;
            mbar_arrive(empty);
        }
    }
}

#endif
