// conformance_pipeline_sm90a.cu    what gemm_sm90a.cu and attention_prefill_sm90a.cu keep in flight, dumped: see conformance.cu
//
// conformance_sm90a.cu has one product, one copy, one word at a time; here a second group runs while the first is waited
// for, its stage overwritten, its sums read, and a ring goes round more than once.
// no-spill all
// no-stack all
#include "common.cuh"

#if TANDEM_SM90A

// Copies `bytes` (a multiple of 16) to shared memory as they are, and shows them to the asynchronous units. Nobody
// reads or writes there when it begins.
static DEVICE void fill_stage(u8* to, const u8* from, u32 bytes) {
    __syncthreads();
    for (u32 i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) *(uint4*)(to + i) = *(const uint4*)(from + i);
    fence_async_shared();
    __syncthreads();
}

template <int N> static DEVICE void load_sums(float d[N / 2], const float* from) {
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) d[i] = from[threadIdx.x * (N / 2) + i];
}

template <int N> static DEVICE void store_sums(void* to, const float d[N / 2]) {
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) ((float*)to)[threadIdx.x * (N / 2) + i] = d[i];
}

// Groups that follow each other in two stages: wait<1> ends the group before the last, whose stage is overwritten at
// once, while the last one runs.
// in: n steps, each 8192 bytes of a [64][64] halves and 128 N bytes of b [N][64]; then f32 d [128][N / 2].
// out: f32 d [128][N / 2], all steps summed. 128 threads, 2 (8192 + 128 N) bytes of shared memory.
template <class T, int N> static DEVICE void wait_one(const ConformanceParams& p) {
    SHARED_DYNAMIC(smem);
    constexpr u32 STAGE = 8192 + 128 * N;
    const u8* in = (const u8*)p.in;
    float d[N / 2];
    load_sums<N>(d, (const float*)(in + (u64)p.n * STAGE));
    for (u32 step = 0; step < p.n; step++) {
        u8* stage = smem + step % 2 * STAGE;
        fill_stage(stage, in + (u64)step * STAGE, STAGE);
        const u64 a = smem_desc_sw128(smem_u32(stage)), b = smem_desc_sw128(smem_u32(stage + 8192));
        wgmma_fence(d);
#pragma unroll
        for (u32 k = 0; k < 4; k++) wgmma_m64k16<T, N>(d, a + 2 * k, b + 2 * k, true);
        wgmma_commit();
        wgmma_wait<1>(d);
    }
    wgmma_wait<0>(d);
    store_sums<N>(p.out, d);
}
KERNEL_BOUNDS(conformance_wait_one_f16_n256_sm90a, ConformanceParams, 128, 1) { wait_one<f16, 256>(p); }
KERNEL_BOUNDS(conformance_wait_one_bf16_n128_sm90a, ConformanceParams, 128, 1) { wait_one<bf16, 128>(p); }

// Two groups with sums of their own: those of the first are read while the second runs.
// in: two steps as above, then two f32 d [128][N / 2]. out: both d. 128 threads, 2 (8192 + 128 N) bytes of shared memory.
template <class T, int N> static DEVICE void two_groups(const ConformanceParams& p) {
    SHARED_DYNAMIC(smem);
    constexpr u32 STAGE = 8192 + 128 * N, SUMS = 64 * N;
    const u8* in = (const u8*)p.in;
    const float* before = (const float*)(in + 2 * STAGE);
    float first[N / 2], second[N / 2];
    load_sums<N>(first, before);
    load_sums<N>(second, before + SUMS);
    fill_stage(smem, in, 2 * STAGE);
    const u64 a = smem_desc_sw128(smem_u32(smem)), b = smem_desc_sw128(smem_u32(smem + 8192));
    constexpr u64 NEXT = STAGE / 16;    // descriptors count in 16 bytes
    wgmma_fence(first, second);
#pragma unroll
    for (u32 k = 0; k < 4; k++) wgmma_m64k16<T, N>(first, a + 2 * k, b + 2 * k, true);
    wgmma_commit();
#pragma unroll
    for (u32 k = 0; k < 4; k++) wgmma_m64k16<T, N>(second, a + NEXT + 2 * k, b + NEXT + 2 * k, true);
    wgmma_commit();
    wgmma_wait<1>(first);
    store_sums<N>(p.out, first);
    wgmma_wait<0>(second);
    store_sums<N>((float*)p.out + SUMS, second);
}
KERNEL_BOUNDS(conformance_two_groups_bf16_n64_sm90a, ConformanceParams, 128, 1) { two_groups<bf16, 64>(p); }

// Four steps of k with a in registers: 16 words of a beside N / 2 sums a thread.
// in: a [128][4 steps][4] words, then by step N / 64 tiles of b [16][64] halves, 2048 bytes each, then f32 d [128][N / 2].
// out: f32 d [128][N / 2]. 128 threads, 128 N bytes of shared memory.
template <class T, int N> static DEVICE void steps_ra(const ConformanceParams& p) {
    SHARED_DYNAMIC(smem);
    const u32* in = (const u32*)p.in;
    u32 a[4][4];
#pragma unroll
    for (u32 i = 0; i < 16; i++) a[i / 4][i % 4] = in[threadIdx.x * 16 + i];
    const u8* b = (const u8*)(in + 128 * 16);
    fill_stage(smem, b, 128 * N);
    float d[N / 2];
    load_sums<N>(d, (const float*)(b + 128 * N));
    wgmma_fence(d, a);
#pragma unroll
    for (u32 k = 0; k < 4; k++) wgmma_m64k16_ra<T, N>(d, a[k], smem_desc_sw128_mn(smem_u32(smem + k * 32 * N), 2048), true);
    wgmma_commit();
    wgmma_wait<0>(d, a);
    store_sums<N>(p.out, d);
}
KERNEL_BOUNDS(conformance_steps_ra_f16_n256_sm90a, ConformanceParams, 128, 1) { steps_ra<f16, 256>(p); }
KERNEL_BOUNDS(conformance_steps_ra_bf16_n256_sm90a, ConformanceParams, 128, 1) { steps_ra<bf16, 256>(p); }

// A ring of four stages that goes round: bulk copies announce their bytes to full[s], two consumer warps, each with half
// of every stage, arrive at empty[s]. Stage and parity are kept as gemm_sm90a.cu keeps them.
// Boxes of 8 rows and 64 columns, from row 0 of the map up to row y; out: the boxes as they lie, 256 words each.
// 96 threads, 4096 + 64 bytes of shared memory.
KERNEL_BOUNDS(conformance_ring_sm90a, ConformanceTmaParams, 96, 1) {
    SHARED_DYNAMIC(smem);
    constexpr u32 STAGES = 4, BYTES = 1024;
    u64 *full = (u64*)(smem + STAGES * BYTES), *empty = full + STAGES;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; s++) {
            mbar_init(full + s, 1);
            mbar_init(empty + s, 2);
        }
        mbar_init_fence();
    }
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 stage = 0, parity = 0;
    for (u32 step = 0, steps = p.y / 8; step < steps; step++) {
        u8* at = smem + stage * BYTES;
        if (warp == 0) {
            if (lane == 0) {
                mbar_wait(empty + stage, parity ^ 1);    // the first round finds the stages empty
                mbar_expect_tx(full + stage, BYTES);
                tma_load_2d(at, &p.map, full + stage, 0, 8 * step);
            }
        } else {
            mbar_wait(full + stage, parity);
            const u32 half = (warp - 1) * 128;
            for (u32 i = lane; i < 128; i += 32) ((u32*)p.out)[step * 256 + half + i] = ((const u32*)at)[half + i];
            __syncwarp();
            if (lane == 0) mbar_arrive(empty + stage);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

#endif
