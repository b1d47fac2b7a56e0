// norm.cu    sum = hidden + post(delta + bias), x = norm(sum)        residual and norm in one pass over the row
//
//   rms    x = sum * rsqrt(mean(sum^2) + eps) * w
//   layer  x = (sum - mean) * rsqrt(mean((sum - mean)^2) + eps) * w + b      two passes over registers
//   post   rms norm of delta before it is added (families that norm a sublayer's output)
//   none   x = sum, without weights (families that norm outputs alone)
//
// in     hidden[rows][d], delta[rows][ld_delta] f32, weights f32; d % 4 == 0, rows 16-byte aligned
// out    sum f32 (usually over hidden itself), x bf16 or f16 [rows][ld_x]; either may be absent
// launch d <= 1024: a warp a row (no barriers), grid ceil(rows/4), block 128
//        else a block a row: 2 or 4 vectors of 4 a thread, grid rows, block ceil(d/8 or d/16) in whole warps,
//        128 bytes of shared memory
// registers the row: 32 f32 a lane (warp), 8 or 16 a thread (block), and delta as much again until it is added
// bound  memory: rows*d*(4 hidden + 4 delta + 4 sum + 2 x) bytes
// error  sums of d squares by a tree of depth log2: (d/threads + 10) eps, relative; then 3 roundings and x's own
// order  by d alone: a row's result does not depend on its neighbours
// oracle src/reference/norm.rs
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace norms {

constexpr u32 WARPS = 4; // rows of a block when a warp takes a row

// How the threads of a row share it: thread t holds vectors t, t + threads, ...
struct ByWarp {
    static constexpr int VECTORS = 8;
    DEVICE u32 row() const { return blockIdx.x * WARPS + warp_id(); }
    DEVICE u32 thread() const { return lane_id(); }
    DEVICE u32 threads() const { return 32; }
    DEVICE float sum(float v) const { return warp_sum(v); }
};
template <int V> struct ByBlock {
    static constexpr int VECTORS = V;
    float* scratch;
    DEVICE u32 row() const { return blockIdx.x; }
    DEVICE u32 thread() const { return threadIdx.x; }
    DEVICE u32 threads() const { return blockDim.x; }
    DEVICE float sum(float v) const { return block_sum(v, scratch); }
};

DEVICE float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float4 mul(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
DEVICE float4 scaled(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }
DEVICE float total(float4 a) { return (a.x + a.y) + (a.z + a.w); }
DEVICE float4 load4(const float* at) { return *(const float4*)at; }

template <class T, bool LAYER, class Share> DEVICE void row(const NormParams& p, Share share) {
    constexpr int V = Share::VECTORS;
    u32 row = share.row();
    if (row >= p.rows) return;
    u32 from = p.row_list ? p.row_list[row] : row;
    u32 at[V];
    bool in[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        at[v] = (v * share.threads() + share.thread()) * 4;
        in[v] = at[v] < p.d;
    }

    float4 h[V];
    bool none = from == ROW_NONE;
#pragma unroll
    for (int v = 0; v < V; v++)
        h[v] = in[v] && !none ? load4(p.hidden + (u64)from * p.d + at[v]) : make_float4(0, 0, 0, 0);
    if (p.delta && !none) {
        float4 a[V];
#pragma unroll
        for (int v = 0; v < V; v++) {
            a[v] = in[v] ? load4(p.delta + (u64)from * p.ld_delta + at[v]) : make_float4(0, 0, 0, 0);
            if (p.delta_bias && in[v]) a[v] = add(a[v], load4(p.delta_bias + at[v]));
        }
        if (p.post_w) {
            float squares = 0;
#pragma unroll
            for (int v = 0; v < V; v++) squares += total(mul(a[v], a[v]));
            float scale = rsqrtf(share.sum(squares) / (float)p.d + p.post_eps);
#pragma unroll
            for (int v = 0; v < V; v++)
                if (in[v]) a[v] = mul(scaled(a[v], scale), load4(p.post_w + at[v]));
        }
#pragma unroll
        for (int v = 0; v < V; v++) h[v] = add(h[v], a[v]);
    }
    if (p.sum) {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in[v]) *(float4*)(p.sum + (u64)row * p.d + at[v]) = h[v];
    }
    if (!p.x) return;

    u16* x = (u16*)p.x + (u64)row * p.ld_x;
    if (none) {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in[v]) *(uint2*)(x + at[v]) = make_uint2(0, 0);
        return;
    }
    if (!p.w) {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in[v]) *(uint2*)(x + at[v]) = make_uint2(pack2<T>(h[v].x, h[v].y), pack2<T>(h[v].z, h[v].w));
        return;
    }
    if (LAYER) {
        float sum = 0;
#pragma unroll
        for (int v = 0; v < V; v++) sum += total(h[v]);
        float mean = share.sum(sum) / (float)p.d;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (in[v]) h[v] = add(h[v], make_float4(-mean, -mean, -mean, -mean));
    }
    float squares = 0;
#pragma unroll
    for (int v = 0; v < V; v++) squares += total(mul(h[v], h[v]));
    float scale = rsqrtf(share.sum(squares) / (float)p.d + p.eps);
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (!in[v]) continue;
        float4 y = mul(scaled(h[v], scale), load4(p.w + at[v]));
        if (LAYER && p.b) y = add(y, load4(p.b + at[v]));
        *(uint2*)(x + at[v]) = make_uint2(pack2<T>(y.x, y.y), pack2<T>(y.z, y.w));
    }
}

} // namespace norms

#define NORM_KERNELS(T)                                                                                        \
    KERNEL_BOUNDS(norm_rms_##T##_warp, NormParams, 128, 1) { norms::row<T, false>(p, norms::ByWarp{}); }       \
    KERNEL_BOUNDS(norm_layer_##T##_warp, NormParams, 128, 1) { norms::row<T, true>(p, norms::ByWarp{}); }      \
    KERNEL_BOUNDS(norm_rms_##T##_block2, NormParams, 1024, 1) {                                                \
        SHARED_DYNAMIC(smem);                                                                                  \
        norms::row<T, false>(p, norms::ByBlock<2>{(float*)smem});                                              \
    }                                                                                                          \
    KERNEL_BOUNDS(norm_rms_##T##_block4, NormParams, 1024, 1) {                                                \
        SHARED_DYNAMIC(smem);                                                                                  \
        norms::row<T, false>(p, norms::ByBlock<4>{(float*)smem});                                              \
    }                                                                                                          \
    KERNEL_BOUNDS(norm_layer_##T##_block2, NormParams, 1024, 1) {                                              \
        SHARED_DYNAMIC(smem);                                                                                  \
        norms::row<T, true>(p, norms::ByBlock<2>{(float*)smem});                                               \
    }                                                                                                          \
    KERNEL_BOUNDS(norm_layer_##T##_block4, NormParams, 1024, 1) {                                              \
        SHARED_DYNAMIC(smem);                                                                                  \
        norms::row<T, true>(p, norms::ByBlock<4>{(float*)smem});                                               \
    }

NORM_KERNELS(f16)
#if TANDEM_SM >= 80
NORM_KERNELS(bf16)
#endif
