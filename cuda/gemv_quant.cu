// gemv_quant.cu    y = W x for 1 to 4 tokens, W quantised: codes stream once through registers into the tensor cores
//
//   a warp     16 rows, every eighth tile of 64 columns; tokens are the n8 operand (4 or more of 8 columns are zero)
//   a block    8 warps side by side along k on the same 16 rows, summed in shared memory in warp order
//   the grid   row tiles x splits along k (only where row tiles are too few to fill the device)
//
// Why mma for one token: a fragment costs 9 to 11 instructions a lane for 8 codes and one mma multiplies them; to
// convert each code to f32 and multiply it there costs 3 a code. The tensor cores have nothing else to do.
//
// in     w packed (quant_tile.cuh), x T[m][ldx]                       out    y, see abi/linear.h
// launch grid (ceil(n/16), splits), block 256, shared 8 * 512 bytes
// loads  a ring of DEPTH tiles a warp: 64 bytes of codes in flight a lane, 32 KiB a multiprocessor with 16 warps
//        (H200 needs 27 KiB, A10 and T4 5). x is read by fragment through L1: each word once a block.
// bound  memory: bits/8 * n * k bytes, bits = 4.5 (Q4_0), 5 (Q4_1), 4.625 (Q4_K), 5.5, 6, 5.625 (Q5_0, 1, K),
//        6.5625 (Q6_K), 8.5 (Q8_0). 4096 x 4096 of Q4_K: 9.7 MB = 2.0 us at 4.8 TB/s (H200), 16 us at 600 GB/s (A10).
//        Issue slots of a tile (16 x 64), counted in the machine code for sm_90, against those that pass while H200's
//        memory delivers it: Q4_0 99 of 111, Q4_K 139 of 114 (so 82% at best), Q6_K 174 of 162, Q8_0 117 of 210;
//        A100 has twice as many, A10 four times.
// order  tiles ascending in a warp, warps ascending, splits ascending: whatever the other tokens of the batch
// error  f32 sums of exact products; (k/16 + 8 + splits) * 2^-23 * sum |w x| + the same with |m x| for minima
// oracle f64 on dequantised weights, tests/gpu/kernels/quant.rs
// modules mxfp4 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "gemv_quant.cuh"

#define GEMV(format, F)                                                                           \
    KERNEL_BOUNDS(gemv_##format##_f16, QuantLinearParams, 256, 2) { gemv_quant<f16, F>(p.linear, blockIdx.x, blockIdx.y, gridDim.y); }
#define GEMV_BF16(format, F)                                                                      \
    KERNEL_BOUNDS(gemv_##format##_bf16, QuantLinearParams, 256, 2) { gemv_quant<bf16, F>(p.linear, blockIdx.x, blockIdx.y, gridDim.y); }
#define ALL(M) M(mxfp4, MXFP4) M(q4_0, Q4_0) M(q4_1, Q4_1) M(q4_k, Q4_K) M(q5_0, Q5_0) M(q5_1, Q5_1) M(q5_k, Q5_K) M(q6_k, Q6_K) M(q8_0, Q8_0)
ALL(GEMV)
#if TANDEM_SM >= 80
ALL(GEMV_BF16)
#endif
