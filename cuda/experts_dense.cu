// experts_dense.cu    y^T = W x^T of groups of up to 64 tokens, each by its expert's matrix: linear_dense.cu's kernels
//
// in     w T[slot][n][k], x T[places][ldx], groups of at most TM places       out    y f32 or T [places][ldy], see abi/experts.h
// launch grid (ceil(n/BN), groups), block 256, shared stages * (BN + TM) * 128 bytes; one split: groups make blocks enough
// tiles, loads, order, error    linear_dense.cu: a token's bits depend on no other token of its group
// bound  memory while groups are small: 2*n*k bytes an expert (its groups follow each other and share them in L2).
//        Padding of a group to TM costs tensor-core slots only
// oracle f64, tests/gpu/kernels/experts/
// no-spill all
// narrow-loads 0 all
// no-stack all
#include "experts.cuh"
#include "linear_dense.cuh"

template <class T, class C> DEVICE void experts_dense(const ExpertLinearParams& p) {
    const ExpertGroup group = expert_group(p.groups);
    if (group.count == 0) return;
    linear_dense<T, C, ExpertGrid>(of_group(p.linear, p.stride, group));
}

KERNEL_BOUNDS(experts_dense_f16_n8, ExpertLinearParams, 256, 4) { experts_dense<f16, N8>(p); }
KERNEL_BOUNDS(experts_dense_f16_n16, ExpertLinearParams, 256, 3) { experts_dense<f16, N16>(p); }
KERNEL_BOUNDS(experts_dense_f16_n32, ExpertLinearParams, 256, BLOCKS_N32) { experts_dense<f16, N32>(p); }
KERNEL_BOUNDS(experts_dense_f16_n64, ExpertLinearParams, 256, BLOCKS_N64) { experts_dense<f16, N64>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(experts_dense_bf16_n8, ExpertLinearParams, 256, 4) { experts_dense<bf16, N8>(p); }
KERNEL_BOUNDS(experts_dense_bf16_n16, ExpertLinearParams, 256, 3) { experts_dense<bf16, N16>(p); }
KERNEL_BOUNDS(experts_dense_bf16_n32, ExpertLinearParams, 256, BLOCKS_N32) { experts_dense<bf16, N32>(p); }
KERNEL_BOUNDS(experts_dense_bf16_n64, ExpertLinearParams, 256, BLOCKS_N64) { experts_dense<bf16, N64>(p); }
#endif
