// bugs.cu    planted bugs, each with its corrected twin: what the checker claims to catch, it must (host emulation
//            only; tests/gpu_emulation.rs)
//
// Every kernel takes BugParams, one block of 128 threads unless said otherwise.
#include "../include/common.cuh"
#include "bugs.h"

// Thread t publishes t, its neighbour in the next warp reads.
template <bool fixed> DEVICE void missing_syncthreads(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    s[threadIdx.x] = threadIdx.x;
    if (fixed) __syncthreads();
    p.out[threadIdx.x] = s[(threadIdx.x + 32) % blockDim.x];
}
KERNEL(bug_missing_syncthreads, BugParams) { missing_syncthreads<false>(p); }
KERNEL(fixed_missing_syncthreads, BugParams) { missing_syncthreads<true>(p); }

// The same within a warp.
template <bool fixed> DEVICE void missing_syncwarp(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    s[threadIdx.x] = threadIdx.x;
    if (fixed) __syncwarp();
    p.out[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL(bug_missing_syncwarp, BugParams) { missing_syncwarp<false>(p); }
KERNEL(fixed_missing_syncwarp, BugParams) { missing_syncwarp<true>(p); }

// The next round's store may overtake this round's load.
template <bool fixed> DEVICE void write_after_read(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    u32 sum = 0;
    for (u32 i = 0; i < 4; i++) {
        s[threadIdx.x] = i + threadIdx.x;
        __syncthreads();
        sum += s[(threadIdx.x + 32) % blockDim.x];
        if (fixed) __syncthreads();
    }
    p.out[threadIdx.x] = sum;
}
KERNEL(bug_write_after_read, BugParams) { write_after_read<false>(p); }
KERNEL(fixed_write_after_read, BugParams) { write_after_read<true>(p); }

// Bytes that two threads store side by side do not clash; one that both store does.
template <bool fixed> DEVICE void shared_bytes(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    smem[fixed ? threadIdx.x : threadIdx.x / 2] = (u8)threadIdx.x;
    __syncthreads();
    p.out[threadIdx.x] = smem[threadIdx.x / 2];
}
KERNEL(bug_shared_bytes, BugParams) { shared_bytes<false>(p); }
KERNEL(fixed_shared_bytes, BugParams) { shared_bytes<true>(p); }

// Two groups in flight, the older is read: at most one may stay. The bug lets two.
template <int groups> DEVICE void wait_group(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    for (u32 i = 0; i < 2; i++) {
        cp_async_16(smem + (i * blockDim.x + threadIdx.x) * 16, p.in + 4 * threadIdx.x);
        cp_async_commit();
    }
    cp_async_wait<groups>();
    p.out[threadIdx.x] = *(const u32*)(smem + threadIdx.x * 16);
    cp_async_wait<0>();
}
KERNEL(bug_wait_group, BugParams) { wait_group<2>(p); }
KERNEL(fixed_wait_group, BugParams) { wait_group<1>(p); }

// A wait is for one's own copies; others' need a barrier besides.
template <bool fixed> DEVICE void copy_without_barrier(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    cp_async_16(smem + threadIdx.x * 16, p.in + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    if (fixed) __syncthreads();
    p.out[threadIdx.x] = *(const u32*)(smem + (threadIdx.x + 32) % blockDim.x * 16);
}
KERNEL(bug_copy_without_barrier, BugParams) { copy_without_barrier<false>(p); }
KERNEL(fixed_copy_without_barrier, BugParams) { copy_without_barrier<true>(p); }

// The ring's stage is filled again while a slow warp still reads it.
template <bool fixed> DEVICE void copy_over_reader(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32 sum = 0;
    for (u32 i = 0; i < 3; i++) {
        cp_async_16(smem + threadIdx.x * 16, p.in + 4 * threadIdx.x);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        sum += *(const u32*)(smem + (threadIdx.x + 64) % blockDim.x * 16);
        if (fixed) __syncthreads();
    }
    p.out[threadIdx.x] = sum;
}
KERNEL(bug_copy_over_reader, BugParams) { copy_over_reader<false>(p); }
KERNEL(fixed_copy_over_reader, BugParams) { copy_over_reader<true>(p); }

// Zeros for what lies past the end: from there, or from an address that exists. n = 508 words for 128 threads by four.
template <bool fixed> DEVICE void zeros_from_nowhere(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    const bool inside = 4 * threadIdx.x + 4 <= p.n;
    cp_async_16(smem + threadIdx.x * 16, p.in + (fixed && !inside ? 0 : 4 * threadIdx.x), inside);
    cp_async_commit();
    cp_async_wait<0>();
    p.out[threadIdx.x] = *(const u32*)(smem + threadIdx.x * 16);
}
KERNEL(bug_zeros_from_nowhere, BugParams) { zeros_from_nowhere<false>(p); }
KERNEL(fixed_zeros_from_nowhere, BugParams) { zeros_from_nowhere<true>(p); }

template <bool fixed> DEVICE void exit_in_flight(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    cp_async_16(smem + threadIdx.x * 16, p.in + 4 * threadIdx.x);
    cp_async_commit();
    if (fixed) cp_async_wait<0>();
    p.out[threadIdx.x] = threadIdx.x;
}
KERNEL(bug_exit_in_flight, BugParams) { exit_in_flight<false>(p); }
KERNEL(fixed_exit_in_flight, BugParams) { exit_in_flight<true>(p); }

template <bool fixed> DEVICE void divergent_barrier(const BugParams& p) {
    if (!fixed && threadIdx.x >= 100) return;
    __syncthreads();
    if (threadIdx.x < 100) p.out[threadIdx.x] = 1;
}
KERNEL(bug_divergent_barrier, BugParams) { divergent_barrier<false>(p); }
KERNEL(fixed_divergent_barrier, BugParams) { divergent_barrier<true>(p); }

// Both branches have a barrier, but not the same.
template <bool fixed> DEVICE void two_barriers(const BugParams& p) {
    if (fixed || threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    p.out[threadIdx.x] = 1;
}
KERNEL(bug_two_barriers, BugParams) { two_barriers<false>(p); }
KERNEL(fixed_two_barriers, BugParams) { two_barriers<true>(p); }

// The last loop of a warp whose lanes have different amounts of work.
template <bool fixed> DEVICE void divergent_shuffle(const BugParams& p) {
    u32 v = threadIdx.x;
    if (fixed || threadIdx.x % 32 < 20) v += __shfl_xor_sync(~0u, v, 1);
    p.out[threadIdx.x] = v;
}
KERNEL(bug_divergent_shuffle, BugParams) { divergent_shuffle<false>(p); }
KERNEL(fixed_divergent_shuffle, BugParams) { divergent_shuffle<true>(p); }

// n = 127 elements for 128 threads.
template <bool fixed> DEVICE void store_past_end(const BugParams& p) {
    if (threadIdx.x < p.n + (fixed ? 0 : 1)) p.out[threadIdx.x] = 1;
}
KERNEL(bug_store_past_end, BugParams) { store_past_end<false>(p); }
KERNEL(fixed_store_past_end, BugParams) { store_past_end<true>(p); }

template <bool fixed> DEVICE void load_past_end(const BugParams& p) {
    u32 at = fixed ? min(4 * threadIdx.x, p.n - 4) : 4 * threadIdx.x + 4;
    p.out[threadIdx.x] = ld_stream_16(p.in + (at & ~3u)).x;
}
KERNEL(bug_load_past_end, BugParams) { load_past_end<false>(p); }
KERNEL(fixed_load_past_end, BugParams) { load_past_end<true>(p); }

template <bool fixed> DEVICE void shared_past_end(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    s[threadIdx.x + (fixed ? 0 : p.shared_words - blockDim.x + 1)] = 1;
    p.out[threadIdx.x] = 1;
}
KERNEL(bug_shared_past_end, BugParams) { shared_past_end<false>(p); }
KERNEL(fixed_shared_past_end, BugParams) { shared_past_end<true>(p); }

template <bool fixed> DEVICE void uninitialised_shared(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    if (fixed || threadIdx.x != 77) s[threadIdx.x] = 1;
    __syncthreads();
    p.out[threadIdx.x] = s[threadIdx.x];
}
KERNEL(bug_uninitialised_shared, BugParams) { uninitialised_shared<false>(p); }
KERNEL(fixed_uninitialised_shared, BugParams) { uninitialised_shared<true>(p); }

// `scratch` is fresh device memory.
template <bool fixed> DEVICE void uninitialised_global(const BugParams& p) {
    if (fixed) p.scratch[threadIdx.x] = 1;
    p.out[threadIdx.x] = p.scratch[threadIdx.x];
}
KERNEL(bug_uninitialised_global, BugParams) { uninitialised_global<false>(p); }
KERNEL(fixed_uninitialised_global, BugParams) { uninitialised_global<true>(p); }

template <bool fixed> DEVICE void misaligned(const BugParams& p) {
    uint4 v = ld_16((const u8*)p.in + (fixed ? 16 : 4) * (threadIdx.x % 4));
    p.out[threadIdx.x] = v.x + v.w;
}
KERNEL(bug_misaligned, BugParams) { misaligned<false>(p); }
KERNEL(fixed_misaligned, BugParams) { misaligned<true>(p); }

// Device memory between two warps of a block.
template <bool fixed> DEVICE void global_race(const BugParams& p) {
    p.scratch[threadIdx.x] = threadIdx.x;
    if (fixed) __syncthreads();
    p.out[threadIdx.x] = p.scratch[(threadIdx.x + 32) % blockDim.x];
}
KERNEL(bug_global_race, BugParams) { global_race<false>(p); }
KERNEL(fixed_global_race, BugParams) { global_race<true>(p); }

// Two blocks store the same elements. Grid: 2.
template <bool fixed> DEVICE void blocks_overlap(const BugParams& p) { p.out[threadIdx.x + (fixed ? blockDim.x : 64) * blockIdx.x] = blockIdx.x; }
KERNEL(bug_blocks_overlap, BugParams) { blocks_overlap<false>(p); }
KERNEL(fixed_blocks_overlap, BugParams) { blocks_overlap<true>(p); }

// The last block adds what the others stored; without counting arrivals it reads what may not be there. Grid: 2.
template <bool fixed> DEVICE void last_block(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* last = (u32*)smem;
    p.scratch[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    if (fixed) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *last = atomicAdd(p.counter, 1u) + 1 == gridDim.x;
        __syncthreads();
        if (!*last) return;
        __threadfence();
    } else if (blockIdx.x + 1 != gridDim.x) {
        return;
    }
    u32 sum = 0;
    for (u32 b = 0; b < gridDim.x; b++) sum += p.scratch[b * blockDim.x + threadIdx.x];
    p.out[threadIdx.x] = sum;
}
KERNEL(bug_last_block, BugParams) { last_block<false>(p); }
KERNEL(fixed_last_block, BugParams) { last_block<true>(p); }

// Rows of 64 bytes: eight rows fall on two groups of banks.
template <bool fixed> DEVICE void bank_conflicts(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) ((u32*)smem)[i] = i;
    __syncthreads();
    u32 r[4];
    ldmatrix_x4(r, smem + (fixed ? swizzle<64>(threadIdx.x, 1) : threadIdx.x * 64));
    p.out[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}
KERNEL(bug_bank_conflicts, BugParams) { bank_conflicts<false>(p); }
KERNEL(fixed_bank_conflicts, BugParams) { bank_conflicts<true>(p); }

// A named barrier stops half of the block; the other half's data is not covered by it.
template <bool fixed> DEVICE void wrong_barrier(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    u32 half = threadIdx.x / 64;
    s[threadIdx.x] = threadIdx.x;
    if (fixed)
        __syncthreads();
    else
        named_barrier_sync(1 + half, 64);
    p.out[threadIdx.x] = s[(threadIdx.x + 64) % blockDim.x];
}
KERNEL(bug_wrong_barrier, BugParams) { wrong_barrier<false>(p); }
KERNEL(fixed_wrong_barrier, BugParams) { wrong_barrier<true>(p); }

// More barriers than the checker has epochs for: nothing wrong, and nothing may be reported. One warp.
KERNEL(fixed_long_block, BugParams) {
    SHARED_DYNAMIC(smem);
    u32* s = (u32*)smem;
    u32 sum = 0;
    for (u32 i = 0; i < p.n; i++) {
        s[threadIdx.x] = i;
        __syncwarp();
        sum += s[threadIdx.x ^ 1];
        __syncwarp();
    }
    p.out[threadIdx.x] = sum;
}

// ---------------------------------------------------------------------------------------------------------
// sm_90a. A producer thread (warp 4) fills one stage of 64x64 halves by bulk copies; 128 consumers multiply. 160
// threads are not whole warpgroups, so the block has 256.

// `early`: the stage is handed back before the product that reads it was waited for.
// `unwaited`: the accumulators are stored before the wait.
template <bool early, bool unwaited> DEVICE void hopper_stage(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u64* full = (u64*)(smem + 16384);
    u64* empty = full + 1;
    if (threadIdx.x == 0) {
        mbar_init(full, 1);
        mbar_init(empty, 128);
        mbar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        if (threadIdx.x != 128) return;
        for (u32 i = 0; i < p.n; i++) {
            mbar_wait(empty, (i & 1) ^ 1);
            mbar_expect_tx(full, 16384);
            tma_load_2d(smem, &p.map, full, (i32)(64 * i), 0);
            tma_load_2d(smem + 8192, &p.map, full, (i32)(64 * i), 64);
        }
        return;
    }
    float d[8];
    for (u32 i = 0; i < 8; i++) d[i] = 0;
    for (u32 i = 0; i < p.n; i++) {
        mbar_wait(full, i & 1);
        wgmma_fence(d);
        for (u32 k = 0; k < 4; k++)
            wgmma_m64k16<f16, 16>(d, smem_desc_sw128(smem_u32(smem)) + 2 * k, smem_desc_sw128(smem_u32(smem + 8192)) + 2 * k, true);
        wgmma_commit();
        if (early) mbar_arrive(empty);
        if (unwaited && i + 1 == p.n) break;
        wgmma_wait<0>(d);
        if (!early) mbar_arrive(empty);
    }
    for (u32 i = 0; i < 8; i++) ((float*)p.out)[threadIdx.x * 8 + i] = d[i];
    if (unwaited) wgmma_wait<0>(d);
}
KERNEL(bug_early_release, BugParams) { hopper_stage<true, false>(p); }
KERNEL(bug_read_accumulators, BugParams) { hopper_stage<false, true>(p); }
KERNEL(fixed_hopper_stage, BugParams) { hopper_stage<false, false>(p); }

// Tiles that threads store themselves are not what wgmma sees, until a fence. 128 threads.
template <bool fixed> DEVICE void unfenced_store(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    for (u32 i = threadIdx.x; i < 2560; i += blockDim.x) ((u32*)smem)[i] = 0x3c003c00;
    if (fixed) fence_async_shared();
    __syncthreads();
    float d[8];
    for (u32 i = 0; i < 8; i++) d[i] = 0;
    wgmma_fence(d);
    wgmma_m64k16<f16, 16>(d, smem_desc_sw128(smem_u32(smem)), smem_desc_sw128(smem_u32(smem + 8192)), true);
    wgmma_commit();
    wgmma_wait<0>(d);
    p.out[threadIdx.x] = (u32)(d[0] + d[7]);
}
KERNEL(bug_unfenced_store, BugParams) { unfenced_store<false>(p); }
KERNEL(fixed_unfenced_store, BugParams) { unfenced_store<true>(p); }

// Two stages of a k loop over tiles of ones, a and b in shared memory. 128 threads.
//
// late_zeros    stores zeros to accumulators after the fence, where the device may make them overtake the products
// added_to      accumulates in the first step, onto registers that hold nothing
// touched       writes accumulators of products in flight
// unfenced      touches them between two groups without a fence
enum WgmmaBug { NO_BUG, LATE_ZEROS, ADDED_TO, TOUCHED, UNFENCED };
template <WgmmaBug bug> DEVICE void accumulators(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    for (u32 i = threadIdx.x; i < 2560; i += blockDim.x) ((u32*)smem)[i] = 0x3c003c00;
    fence_async_shared();
    __syncthreads();
    const u64 a = smem_desc_sw128(smem_u32(smem)), b = smem_desc_sw128(smem_u32(smem + 8192));
    float d[8];
    wgmma_discard(d);
    for (u32 step = 0; step < 2; step++) {
        if (bug != UNFENCED || step == 0) wgmma_fence(d);
        if (bug == LATE_ZEROS && step == 0)
            for (u32 i = 0; i < 8; i++) d[i] = 0;
        for (u32 k = 0; k < 4; k++) wgmma_m64k16<f16, 16>(d, a + 2 * k, b + 2 * k, bug == ADDED_TO || k > 0 || step > 0);
        wgmma_commit();
        if (bug == TOUCHED) d[3] = 1;
        wgmma_wait<0>(d);
        d[0] += 1;
    }
    p.out[threadIdx.x] = (u32)(d[0] + d[7]);
}
KERNEL(bug_wgmma_late_zeros, BugParams) { accumulators<LATE_ZEROS>(p); }
KERNEL(fixed_wgmma_late_zeros, BugParams) { accumulators<NO_BUG>(p); }
KERNEL(bug_wgmma_added_to, BugParams) { accumulators<ADDED_TO>(p); }
KERNEL(fixed_wgmma_added_to, BugParams) { accumulators<NO_BUG>(p); }
KERNEL(bug_wgmma_touched, BugParams) { accumulators<TOUCHED>(p); }
KERNEL(fixed_wgmma_touched, BugParams) { accumulators<NO_BUG>(p); }
KERNEL(bug_wgmma_unfenced, BugParams) { accumulators<UNFENCED>(p); }
KERNEL(fixed_wgmma_unfenced, BugParams) { accumulators<NO_BUG>(p); }

// a in registers, of ones: changed while the product is in flight. 128 threads.
template <bool fixed> DEVICE void reused_operand(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    for (u32 i = threadIdx.x; i < 512; i += blockDim.x) ((u32*)smem)[i] = 0x3c003c00;
    fence_async_shared();
    __syncthreads();
    u32 a[4];
    float d[32];
    for (u32 i = 0; i < 4; i++) a[i] = 0x3c003c00;
    wgmma_discard(d);
    wgmma_fence(d, a);
    wgmma_m64k16_ra<f16, 64>(d, a, smem_desc_sw128_mn(smem_u32(smem), 2048), false);
    wgmma_commit();
    if (!fixed) a[2] = threadIdx.x;
    wgmma_wait<0>(d, a);
    if (fixed) a[2] = threadIdx.x;
    p.out[threadIdx.x] = (u32)(d[0] + d[31]) + a[2];
}
KERNEL(bug_reused_operand, BugParams) { reused_operand<false>(p); }
KERNEL(fixed_reused_operand, BugParams) { reused_operand<true>(p); }

// A tensor map 64 bytes further on than it may be. One thread of 32.
template <bool fixed> DEVICE void misplaced_map(const BugParams& p) {
    SHARED_DYNAMIC(smem);
    u64* bar = (u64*)(smem + 8192);
    if (threadIdx.x > 0) return;
    mbar_init(bar, 1);
    mbar_expect_tx(bar, 8192);
    tma_load_2d(smem, fixed ? &p.map : (const TensorMap*)(p.map.bytes + 64), bar, 0, 0);
    mbar_wait(bar, 0);
    p.out[0] = *(const u32*)smem;
}
KERNEL(bug_misplaced_map, BugParams) { misplaced_map<false>(p); }
KERNEL(fixed_misplaced_map, BugParams) { misplaced_map<true>(p); }
