// experts.cuh    grouped products: which expert and which of its rows a block of a product of dense linear computes
//
// The grid is (row tiles of a matrix, groups). Blocks of one group are launched side by side: they share its rows in L2,
// and the next group, often of the same expert, its weights. A block of a group without rows ends at once.
#pragma once

#include "linear_epilogue.cuh"

// The block's place in the product of its group: one tile of tokens, and all of k.
struct ExpertGrid {
    static DEVICE u32 tokens() { return 0; }
    static DEVICE u32 rows() { return blockIdx.x; }
    static DEVICE u32 split() { return 0; }
    static DEVICE u32 splits() { return 1; }
    static DEVICE u32 tile() { return 0; }
};

DEVICE ExpertGroup expert_group(const ExpertGroup* groups) {
    const uint4 v = ld_16(groups + blockIdx.y);
    ExpertGroup group;
    group.slot = v.x;
    group.first = v.y;
    group.count = v.z;
    group.unused = 0;
    return group;
}

DEVICE const float* bias_of_slot(const float* bias, u64 stride, u32 slot) {
    return bias ? (const float*)((const u8*)bias + slot * stride) : nullptr;
}

// The product of a group; its bias is still that of slot 0.
DEVICE LinearParams without_bias(LinearParams p, u64 stride, const ExpertGroup& group) {
    p.w = (const u8*)p.w + group.slot * stride;
    p.x = (const u8*)p.x + (u64)group.first * p.ldx * 2;
    p.y = (u8*)p.y + (u64)group.first * p.ldy * (p.epilogue == LINEAR_F32 ? 4 : 2);
    p.m = group.count;
    return p;
}

// The product of a group.
DEVICE LinearParams of_group(LinearParams p, u64 stride, const ExpertGroup& group) {
    p = without_bias(p, stride, group);
    p.bias = bias_of_slot(p.bias, stride, group.slot);
    return p;
}

// The same for a body with no register to keep the bias in: it is looked up again where it is added.
struct LateBias : LinearParams {
    const ExpertGroup* groups;
    u64 stride;
    DEVICE LateBias(const LinearParams& p, const ExpertGroup* groups_, u64 stride_) : LinearParams(p), groups(groups_), stride(stride_) {}
};
DEVICE const float* bias_of(const LateBias& p) { return bias_of_slot(p.bias, p.stride, expert_group(p.groups).slot); }
