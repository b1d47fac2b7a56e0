// linear_quant.cu    y = W x for 5 to 256 tokens, W quantised: weights are the m16 operand, tokens the n8 operand
//
//   a step     128 columns: x [8 NT tokens][128] and the tiles of 64 R rows x 4 x 64 columns
//   a block    8 warps = 4 groups of R row tiles x 2 halves of the step; halves are added in shared memory at the end
//   the grid   token tiles (fastest: they share weights in L2) x blocks of 64 R rows x splits along k
//
// in     w packed (quant_tile.cuh), x T[m][ldx]                       out    y, see abi/linear.h
// launch grid (ceil(m / 8NT), ceil(n / 64R), splits), block 256, shared stages * stage_bytes (Ring in the .cuh)
// loads  a ring of 2 to 4 steps by cp.async. A tile's bytes are copied as they lie and read back as fragments, lane by
//        lane: no bank conflicts (16 bytes a lane in order). x is xor-swizzled for ldmatrix: none either.
// bound  memory: bits/8 * n * k bytes (bits: gemv_quant.cu) as long as instructions fit beside it. Slots of a scheduler for
//        16 rows x 32 columns, counted in the machine code for sm_90 (bf16; f16 4 fewer), against those that pass
//        while the memory delivers these bytes:
//          tokens          8    16    32    64        H200   A100   3090   A10   T4   L40S
//          Q4_0           55    55    72   116          56    113    172   235  229    477
//          Q4_1           62    72    92   160          62    125    191   261  254    530
//          Q4_K           75    71   101   176          57    116    177   242  235    490
//          Q6_K           94   112   140   185          81    165    250   343  334    695
//          Q8_0           73    79    85   127         105    214    324   444  432    901
//        So: memory-bound to 32 tokens everywhere but on H200, which the issue slots bound to 78% of its bandwidth
//        for Q4_0 at 32 tokens, 80% and 56% for Q4_K at 16 and 32. Of Q4_K's 101, 32 are the fma of scales and minima
//        on f32 sums, 22 dequantise, 10 are mma.
//        Beyond 64 tokens weights are read and dequantised once per 64 tokens.
// order  k ascending in a warp, halves, splits ascending: whatever the other tokens of the batch
// error  f32 sums of exact products; (k/16 + 2 + splits) * 2^-23 * sum |w x| + the same with |m x| for minima
// oracle f64 on dequantised weights, tests/gpu/kernels/quant.rs
// refs   Frantar et al. 2024 (Marlin): fragment order, ring, split-k
// modules mxfp4 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "linear_quant.cuh"

// Names: tokens a block (8 NT).
#define LINEAR(format, F, t, T, tokens, R, blocks)                                       \
    KERNEL_BOUNDS(linear_##format##_##t##_t##tokens, QuantLinearParams, 256, blocks) {   \
        linear_quant<T, F, tokens / 8, R, LinearGrid>(p.linear, p.stages);               \
    }
QUANT_TILES(LINEAR, f16, f16)
#if TANDEM_SM >= 80
QUANT_TILES(LINEAR, bf16, bf16)
#endif
