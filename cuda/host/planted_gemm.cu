// planted_gemm.cu    ../gemm.cu and ../gemm_sm90a.cu with one mistake each, which the checker must catch
//
// The kernels' own text is compiled again with one wrapper replaced (and without its kernels, which exist already).
// Never for a GPU: that takes cuda/*.cu only. tests/gpu/kernels/gemm.rs launches them.
#include "../include/gemm_tiles.cuh"
#include "../include/ptx.cuh"

#pragma push_macro("KERNEL_BOUNDS")
#undef KERNEL_BOUNDS
#define KERNEL_BOUNDS(name, Params, max_threads, min_blocks) [[maybe_unused]] static void name##_left_out(const Params p)

// Waits for one group of copies fewer than it should: a stage is read while it may still be filled.
namespace early_read {
template <int N> DEVICE void cp_async_wait_short() { cp_async_wait<N + 1>(); }
#define cp_async_wait cp_async_wait_short
#include "../gemm.cu"
#undef cp_async_wait
#undef GEMM
} // namespace early_read

// Forgets the barriers: a warp reads what others have not copied yet, and copies into what others still read.
namespace no_barrier {
DEVICE void nothing() {}
#define __syncthreads nothing
#include "../gemm.cu"
#undef __syncthreads
#undef GEMM
} // namespace no_barrier

// Gives a stage back while the products that read it may still run.
namespace early_release {
template <int N, class D> DEVICE void wgmma_wait_short(D& d) { wgmma_wait<N == 1 ? 2 : N>(d); }
#define wgmma_wait wgmma_wait_short
#include "../gemm_sm90a.cu"
#undef wgmma_wait
#undef GEMM
} // namespace early_release

#pragma pop_macro("KERNEL_BOUNDS")

KERNEL_BOUNDS(planted_gemm_early_read, GemmParams, 128, 2) {
    SHARED_DYNAMIC(smem);
    early_read::gemm<f16, 64, true>(p, smem);
}
KERNEL_BOUNDS(planted_gemm_no_barrier, GemmParams, 128, 2) {
    SHARED_DYNAMIC(smem);
    no_barrier::gemm<f16, 64, true>(p, smem);
}
KERNEL_BOUNDS(planted_gemm_early_release, GemmTmaParams, 384, 1) {
    SHARED_DYNAMIC(smem);
    early_release::gemm<f16, 128, 6>(p, smem);
}
