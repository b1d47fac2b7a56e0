// experts_rows.cu    rows of activations to the places of their experts, and the experts' outputs back: sum w y
//
//   gather     a block a place: 16 bytes a thread and step; a place without a row keeps what it has
//   combine    a thread four elements of a row: the shared expert's times the sigmoid of its gate, then the choices in
//              their order; those that have no place here add nothing
//
// in     x T [rows][ldx], rows[places]; out f32 [places][d], places and weights [rows][used]      out    xs T [places][d], delta f32 [rows][d]
// launch gather: grid places, block 128; combine: grid (rows, ceil(d/1024)), block 256
// bound  memory: 4*places*d bytes (x comes from L2: used times each row), (4*used + 8)*rows*d bytes
// order  j ascending: a row's bits depend on its own choices alone
// error  combine: 2 (used + 4) 2^-24 of the sum of magnitudes, and the sigmoid's few ulp
// oracle f64, tests/gpu/kernels/experts/
// no-spill all
// no-stack all
#include "common.cuh"

KERNEL_BOUNDS(experts_gather, ExpertGatherParams, 128, 1) {
    const u32 place = blockIdx.x, row = p.rows[place];
    if (row == EXPERT_NONE) return;
    const uint4* from = (const uint4*)p.x + (u64)row * p.ldx;
    uint4* to = (uint4*)p.xs + (u64)place * p.d;
    for (u32 i = threadIdx.x; i < p.d; i += 128) to[i] = from[i];
}

KERNEL_BOUNDS(experts_combine, ExpertCombineParams, 256, 1) {
    const u32 row = blockIdx.x, at = (blockIdx.y * 256 + threadIdx.x) * 4;
    if (at >= p.d) return;
    const u64 mine = (u64)row * p.d + at;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (p.shared) {
        const float g = 1.0f / (1.0f + expf(-p.gate[row]));
        const float4 v = *(const float4*)(p.shared + mine);
        sum = make_float4(g * v.x, g * v.y, g * v.z, g * v.w);
    }
    const u32* places = p.places + (u64)row * p.used;
    const float* weights = p.weights + (u64)row * p.used;
#pragma unroll 4
    for (u32 j = 0; j < p.used; j++) {
        const u32 place = places[j];
        if (place == EXPERT_NONE) continue;
        const float w = weights[j];
        const float4 v = *(const float4*)(p.out + (u64)place * p.d + at);
        sum.x += w * v.x;
        sum.y += w * v.y;
        sum.z += w * v.z;
        sum.w += w * v.w;
    }
    *(float4*)(p.delta + mine) = sum;
}
