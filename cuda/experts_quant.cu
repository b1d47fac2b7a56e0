// experts_quant.cu    y = W x of groups of up to 64 tokens, each by its expert's quantised matrix: linear_quant.cu's kernels
//
// in     w packed (quant_tile.cuh) [slot], x T[places][ldx], groups of at most 8 NT places       out    y, see abi/experts.h
// launch grid (ceil(n / 64R), groups), block 256, shared stages * stage_bytes (Ring); one split: groups make blocks enough
// tiles, loads, bound, order, error    linear_quant.cu: a token's bits depend on no other token of its group
// oracle f64 on dequantised weights, tests/gpu/kernels/experts/
// modules mxfp4 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "experts.cuh"
#include "linear_quant.cuh"

template <class T, class F, int NT, int R> DEVICE void experts_quant(const ExpertQuantLinearParams& p) {
    const ExpertGroup group = expert_group(p.groups);
    if (group.count == 0) return;
    const LateBias product(without_bias(p.quant.linear, p.stride, group), p.groups, p.stride);
    linear_quant<T, F, NT, R, ExpertGrid>(product, p.quant.stages);
}

// Names: tokens of a group (8 NT).
#define EXPERTS(format, F, t, T, tokens, R, blocks)                                                    \
    KERNEL_BOUNDS(experts_linear_##format##_##t##_t##tokens, ExpertQuantLinearParams, 256, blocks) {   \
        experts_quant<T, F, tokens / 8, R>(p);                                                         \
    }
QUANT_TILES(EXPERTS, f16, f16)
#if TANDEM_SM >= 80
QUANT_TILES(EXPERTS, bf16, bf16)
#endif
