// experts_gemv.cu    y = W x of groups of 1 to 4 tokens, each by its expert's matrix: gemv.cu's kernel for 4 tokens
//
// A token's bits are those that gemv.cu gives it with as many k_warps, and depend on no other token of its group. A group
// of fewer tokens computes its last one again.
//
// in     w T[slot][n][k], x T[places][ldx], groups of at most 4 places       out    y f32 or T [places][ldy], see abi/experts.h
// launch grid (ceil(pairs / (8/k_warps)), groups), block 256, shared 8 * 2 * 4 * 4 bytes
// loads, bound, order, error    gemv.cu; weights of an expert are read once for every 4 of its tokens
// oracle f64, tests/gpu/kernels/experts/
// no-spill all
// narrow-loads 0 all
// no-stack all
#include "experts.cuh"
#include "gemv.cuh"

template <class T> DEVICE void experts_gemv(const ExpertLinearParams& p) {
    const ExpertGroup group = expert_group(p.groups);
    if (group.count == 0) return;
    gemv<T, 4, true>(of_group(p.linear, p.stride, group), blockIdx.x);
}

KERNEL_BOUNDS(experts_gemv_f16_m4, ExpertLinearParams, 256, 2) { experts_gemv<f16>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(experts_gemv_bf16_m4, ExpertLinearParams, 256, 2) { experts_gemv<bf16>(p); }
#endif
