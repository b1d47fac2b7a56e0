// activation.cu    out = act(gate + gate_bias, up + up_bias), or act(gate + gate_bias) alone        4 elements a thread
//
// For feed-forwards whose linear cannot apply the activation in its epilogue (gate and up of different types), and,
// with the identity as activation, rows of f32 to 16 bits or the addition of a bias in place.
//
// in     gate, up f32 [rows][ld]; n and all strides multiples of 4
// out    f32 (cast_f32: may be gate itself), bf16 or f16 [rows][ld_out]
// launch grid (rows, ceil(n/1024)), block 256, no shared memory
// bound  memory: rows*n*(8 + 2) bytes
// error  silu, clamped or not: 2^-21 relative (__expf); gelu: 2^-22 |x|; one product; out's rounding
// oracle src/reference/activation.rs
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace activation {

constexpr u32 THREADS = 256;

struct Silu {
    static constexpr bool GATED = true;
    static DEVICE float apply(float x, float up) { return silu(x) * up; }
};
struct Clamped {
    static constexpr bool GATED = true;
    static DEVICE float apply(float x, float up) { return clamped_swiglu(x, up); }
};
struct Gelu {
    static constexpr bool GATED = true;
    static DEVICE float apply(float x, float up) { return gelu_tanh(x) * up; }
};
struct Relu {
    static constexpr bool GATED = false;
    static DEVICE float apply(float x, float) { return x < 0 ? 0 : x; } // NaN stays NaN
};
struct Identity {
    static constexpr bool GATED = false;
    static DEVICE float apply(float x, float) { return x; }
};

DEVICE float4 biased(const float* row, const float* bias, u32 i) {
    float4 v = *(const float4*)(row + i);
    if (!bias) return v;
    float4 b = *(const float4*)(bias + i);
    return make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
}

template <class T> DEVICE void store(void* out, u64 at, float4 v) { *(uint2*)((u16*)out + at) = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w)); }
template <> DEVICE void store<float>(void* out, u64 at, float4 v) { *(float4*)((float*)out + at) = v; }

template <class T, class Act> DEVICE void rows(const ActivationParams& p) {
    u64 row = blockIdx.x;
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (i >= p.n) return;
    float4 g = biased(p.gate + row * p.ld_gate, p.gate_bias, i);
    float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (Act::GATED) u = biased(p.up + row * p.ld_up, p.up_bias, i);
    float4 v = make_float4(Act::apply(g.x, u.x), Act::apply(g.y, u.y), Act::apply(g.z, u.z), Act::apply(g.w, u.w));
    store<T>(p.out, row * p.ld_out + i, v);
}

} // namespace activation

#define ACTIVATION_KERNELS(T)                                                                                            \
    KERNEL_BOUNDS(activation_swiglu_##T, ActivationParams, 256, 1) { activation::rows<T, activation::Silu>(p); }         \
    KERNEL_BOUNDS(activation_clamped_swiglu_##T, ActivationParams, 256, 1) { activation::rows<T, activation::Clamped>(p); } \
    KERNEL_BOUNDS(activation_geglu_##T, ActivationParams, 256, 1) { activation::rows<T, activation::Gelu>(p); }          \
    KERNEL_BOUNDS(activation_relu_##T, ActivationParams, 256, 1) { activation::rows<T, activation::Relu>(p); }           \
    KERNEL_BOUNDS(cast_##T, ActivationParams, 256, 1) { activation::rows<T, activation::Identity>(p); }

ACTIVATION_KERNELS(f16)
#if TANDEM_SM >= 80
ACTIVATION_KERNELS(bf16)
#endif
KERNEL_BOUNDS(cast_f32, ActivationParams, 256, 1) { activation::rows<float, activation::Identity>(p); }
