// epoch.cuh    telling the host that rows in its memory are complete
#pragma once

#include "common.cuh"

// All threads of each of `total` blocks call this after their stores to the host's memory. The last block to
// arrive publishes `value`; a host thread that acquires it sees every store. `arrived` is zero again afterwards.
//
// Each thread fences its own stores for the whole system before the barrier: the release below orders what its
// thread has seen, and a barrier or an atomic of device scope alone says nothing to an observer across the bus.
DEVICE void publish_epoch(u32* arrived, u32 total, u32* flag, u32 value) {
    __threadfence_system();
    __syncthreads();
    if (thread_rank() != 0 || atomicAdd(arrived, 1u) != total - 1) return;
    *arrived = 0;
    __threadfence_system();
    st_release_sys(flag, value);
}
