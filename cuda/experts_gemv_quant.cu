// experts_gemv_quant.cu    y = W x of groups of 1 to 4 tokens, each by its expert's quantised matrix: gemv_quant.cu's kernel
//
// in     w packed (quant_tile.cuh) [slot], x T[places][ldx], groups of at most 4 places       out    y, see abi/experts.h
// launch grid (ceil(n/16), groups), block 256, shared 8 * 512 bytes
// loads, bound, order, error    gemv_quant.cu, of one split: a token's bits depend on no other token of its group;
//                               weights of an expert are read once for every 4 of its tokens
// oracle f64 on dequantised weights, tests/gpu/kernels/experts/
// modules mxfp4 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0
// no-spill all
// no-stack all
#include "experts.cuh"
#include "gemv_quant.cuh"

template <class T, class F> DEVICE void experts_gemv(const ExpertQuantLinearParams& p) {
    const ExpertGroup group = expert_group(p.groups);
    if (group.count == 0) return;
    gemv_quant<T, F>(of_group(p.quant.linear, p.stride, group), blockIdx.x, 0, 1);
}

#define GEMV(format, F) \
    KERNEL_BOUNDS(experts_gemv_##format##_f16, ExpertQuantLinearParams, 256, 2) { experts_gemv<f16, F>(p); }
#define GEMV_BF16(format, F) \
    KERNEL_BOUNDS(experts_gemv_##format##_bf16, ExpertQuantLinearParams, 256, 2) { experts_gemv<bf16, F>(p); }
#define ALL(M) M(mxfp4, MXFP4) M(q4_0, Q4_0) M(q4_1, Q4_1) M(q4_k, Q4_K) M(q5_0, Q5_0) M(q5_1, Q5_1) M(q5_k, Q5_K) M(q6_k, Q6_K) M(q8_0, Q8_0)
ALL(GEMV)
#if TANDEM_SM >= 80
ALL(GEMV_BF16)
#endif
