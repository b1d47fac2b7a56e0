// quant_store.cuh    how the partial sums of splits along k become outputs
//
// Every split of a tile of outputs writes its sums to the workspace and counts itself; the last one to arrive adds all
// of them in the order of the splits (not of arrival: results repeat bit for bit) and resets the counter.
#pragma once

#include "linear_epilogue.cuh"

// Accumulators of one m16n8 tile: (row g, tokens 2t, 2t+1), (row g+8, the same).
template <class T> DEVICE void store_tile(const LinearParams& p, u32 row_tile, u32 first_token, const float acc[4]) {
    const u32 lane = threadIdx.x % 32;
    const u32 n = 16 * row_tile + lane / 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 m = first_token + lane % 4 * 2 + i;
        if (m >= p.m) continue;
        if (is_gated(p)) {
            if (n < p.n) linear_store_gated<T>(p, m, n, acc[i], acc[2 + i]);
        } else {
            if (n < p.n) linear_store<T>(p, m, n, acc[i]);
            if (n + 8 < p.n) linear_store<T>(p, m, n + 8, acc[2 + i]);
        }
    }
}

// Whether this block is the last of `splits` to come here with `counter`, after what it wrote before. All threads
// call it; `flag` is a word of shared memory that nobody else uses.
DEVICE bool last_to_arrive(u32* counter, u32 splits, u32* flag) {
    __threadfence(); // this thread's partial sums before the count
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 before = atomicAdd(counter, 1u);
        *flag = before + 1 == splits;
        if (*flag) *counter = 0; // for the next launch
    }
    __syncthreads();
    const bool last = *flag;
    if (last) __threadfence(); // the others' partial sums after the count
    return last;
}
