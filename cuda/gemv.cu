// gemv.cu    y = W x for 1 to 4 tokens: weights stream once through registers
//
//   a warp     two rows of W (a gate and its up when gated), lanes side by side along k: 512 contiguous bytes a load
//   a block    8 warps = 8/k_warps pairs of rows x k_warps slices of k, summed in shared memory in slice order
//
// in     w T[n][k], x T[m][ldx], 16-byte aligned, k % 8 == 0       out    y f32 or T [m][ldy], see abi/linear.h
// launch grid ceil(pairs / (8/k_warps)), block 256, shared 8 * 2 * M * 4 bytes
// loads  four steps of 256 columns of two rows: 8 x 16 bytes a lane issued before the first is used, 4 KiB a warp. A
//        warp's arithmetic (600 clocks a batch) is short beside the time that 16 warps wait for theirs (3100 clocks at
//        H200's 21 bytes a clock and multiprocessor), so a ring of loads would gain nothing. H200 needs 4.8 TB/s *
//        0.75 us / 132 = 27 KiB in flight a multiprocessor, A10 and T4 5 KiB; the host plans for 16 warps: 64 KiB.
//        Weights take no place in L1, which keeps x: every warp of a multiprocessor reads the same x at about the
//        same time, so x costs one L2 miss a line, and staging it would cost a barrier.
// bound  memory: 2*n*k bytes. 4096 x 4096: 33.5 MB = 7.0 us at 4.8 TB/s (H200), 56 us at 600 GB/s (A10),
//        105 us at 320 GB/s (T4). Issue slots at M = 4: 124 instructions a warp and KiB = 31 clocks of a
//        multiprocessor, where H200's memory delivers a KiB in 49: 63%; at M = 1 25%.
// regs   M = 1: 64 (4 blocks a multiprocessor), 2: 80 (3), 3: 118 to 124 (2), 4: 122 to 127 (2), at 75, 80 and 90
// order  a lane adds its columns in ascending order, lanes by halves (16, 8, .. 1), slices in ascending order: the
//        same for every M, so a row's result does not depend on its batch.
// error  f32 sums of exact products: (k/(32*k_warps) + 5 + k_warps) * 2^-24 * sum |w x|
// oracle f64, tests/gpu/kernels/linear.rs
// no-spill all
// narrow-loads 0 all
// no-stack all
#include "gemv.cuh"

KERNEL_BOUNDS(gemv_f16_m1, LinearParams, 256, 4) { gemv<f16, 1>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_f16_m2, LinearParams, 256, 3) { gemv<f16, 2>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_f16_m3, LinearParams, 256, 2) { gemv<f16, 3>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_f16_m4, LinearParams, 256, 2) { gemv<f16, 4>(p, blockIdx.x); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(gemv_bf16_m1, LinearParams, 256, 4) { gemv<bf16, 1>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_bf16_m2, LinearParams, 256, 3) { gemv<bf16, 2>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_bf16_m3, LinearParams, 256, 2) { gemv<bf16, 3>(p, blockIdx.x); }
KERNEL_BOUNDS(gemv_bf16_m4, LinearParams, 256, 2) { gemv<bf16, 4>(p, blockIdx.x); }
#endif
