// linear_dense.cu    y^T = W x^T for 5 to 256 tokens: weights are mma's m16 operand, tokens its n8 operand
//
//   a block    BN rows of W x TM tokens x one split of k; k advances by 64 (a 128-byte row of the tile)
//   a ring     of 2 to 6 tiles [BN + TM rows][128 bytes], filled by cp.async, 16-byte chunks xor-swizzled by row, so
//              that ldmatrix and the copies are free of bank conflicts
//   its warps  WN along the rows of W x WM along tokens x WK along k: warps that share rows take different k16 slices
//              of every tile, which divides the re-reading of x by WK; their sums meet in shared memory at the end
//   splits     of k make blocks for all multiprocessors: f32 partials go to a workspace, the last block of a tile to
//              arrive adds them in split order and resets the tile's counter
//
// Tokens are padded to the next TM (8, 16, 32, 64, 128): padding costs tensor-core slots that are idle anyway, and no
// memory traffic. With more tokens than TM the blocks of one weight tile are launched side by side and share it in L2.
//
// in     w T[n][k], x T[m][ldx], 16-byte aligned, k % 8 == 0       out    y f32 or T [m][ldy], see abi/linear.h
// launch grid (ceil(m/TM), ceil(n/BN), splits), block 256, shared stages * (BN + TM) * 128 bytes
// order  k16 slices ascending within a warp, then WK, then splits: fixed by n, k and the device, never by m
// error  f32 sums of exact products: (k/16 + WK + splits) roundings of sums of 16, see tests/gpu/kernels/linear.rs
// oracle f64, tests/gpu/kernels/linear.rs
//
//                                          stages of T4,    their shared     KiB of weights    registers
//   kernel  BN  TM  WN WM WK  warp tile     A10, H200            KiB         in flight, H200     75, 80, 90
//   n8      64   8   2  1  4    32 x 8       2 / 4 / 6      18 / 36 / 54          40             50, 52, 54
//   n16     64  16   2  1  4    32 x 16      2 / 4 / 6      20 / 40 / 60          40             80, 80, 80
//   n32    128  32   4  1  2    32 x 32      2 / 3 / 4      40 / 60 / 80          48            107, 114, 114
//   n64    128  64   4  1  2    32 x 64      2 / 3 / 4      48 / 72 / 96          48            145, 150, 128
//   n128   128 128   4  2  1    32 x 64      2 / 3 / 4      64 / 96 / 128         48            153, 164, 164
//
// bound  memory: 2*n*k bytes (as gemv.cu) plus, through L2, x of m/BN times that. 4096 x 4096 at M = 32: 33.5 MB and
//        8.4 MB: 7.0 us at 4.8 TB/s. Shared memory at n32: a byte of weights is written once and read once, its
//        share of x 0.25 and 1: 3.25 bytes, of 128 a clock, where H200 delivers 21 of weights: 53%. Tensor cores at
//        M = 64: 2*64 FLOP a weight = 64 FLOP a byte: 0.3 PFLOP/s at 4.8 TB/s. Issue slots at n8: 55 instructions a
//        warp and tile of 8 KiB: 110 clocks of a multiprocessor, where H200's memory takes 390.
//        Splits write and read 4*m*n*splits bytes of partials through L2: m = 32, 4096 x 4096, 4 splits: 2 MB each
// no-spill all
// narrow-loads 0 all
// no-stack all
// refs   Frantar et al. 2024 (Marlin): weights as the wide operand, striped splits; CUTLASS multistage pipelines
#include "linear_dense.cuh"

KERNEL_BOUNDS(linear_dense_f16_n8, LinearParams, 256, 4) { linear_dense<f16, N8, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_f16_n16, LinearParams, 256, 3) { linear_dense<f16, N16, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_f16_n32, LinearParams, 256, BLOCKS_N32) { linear_dense<f16, N32, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_f16_n64, LinearParams, 256, BLOCKS_N64) { linear_dense<f16, N64, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_f16_n128, LinearParams, 256, 1) { linear_dense<f16, N128, LinearGrid>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(linear_dense_bf16_n8, LinearParams, 256, 4) { linear_dense<bf16, N8, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_bf16_n16, LinearParams, 256, 3) { linear_dense<bf16, N16, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_bf16_n32, LinearParams, 256, BLOCKS_N32) { linear_dense<bf16, N32, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_bf16_n64, LinearParams, 256, BLOCKS_N64) { linear_dense<bf16, N64, LinearGrid>(p); }
KERNEL_BOUNDS(linear_dense_bf16_n128, LinearParams, 256, 1) { linear_dense<bf16, N128, LinearGrid>(p); }
#endif
