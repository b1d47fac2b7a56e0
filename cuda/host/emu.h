// emu.h    the C++ half of ptx.cuh: the same names for a kernel that runs on the host
//
// Included by kernels only. What needs the other threads of a warp or block, or the checker, is a call into the
// emulator (the extern functions); what is arithmetic is here. Operands of warp-wide instructions go by value: an
// array whose address escaped would cost a call of the checker at every later access.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Emulation shows the newest target; `-DTANDEM_SM=75` compiles the paths of an older one.
#ifndef TANDEM_SM
#define TANDEM_SM 90
#endif
#define TANDEM_SM90A (TANDEM_SM >= 90)

#define __device__
#define __global__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define DEVICE inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------------------
// Vector types. Those of 16 bytes are copied as one vector, so that the checker sees one access of 16 bytes and
// its alignment, not four of 4.

struct dim3 {
    u32 x, y, z;
};
struct alignas(4) uchar4 {
    u8 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(8) int2 {
    i32 x, y;
};
struct alignas(8) float2 {
    float x, y;
};

#define EMU_VECTOR_16(name, T)                                                                    \
    typedef T name##_lanes __attribute__((vector_size(16), may_alias));                           \
    struct alignas(16) name {                                                                     \
        union {                                                                                   \
            struct {                                                                              \
                T x, y, z, w;                                                                     \
            };                                                                                    \
            name##_lanes lanes;                                                                   \
        };                                                                                        \
        name() = default;                                                                         \
        __attribute__((always_inline)) name(T a, T b, T c, T d) : lanes{a, b, c, d} {}            \
        __attribute__((always_inline)) name(const name& o) : lanes(o.lanes) {}                    \
        __attribute__((always_inline)) name& operator=(const name& o) {                           \
            lanes = o.lanes;                                                                      \
            return *this;                                                                         \
        }                                                                                         \
    };                                                                                            \
    DEVICE name make_##name(T a, T b, T c, T d) { return name(a, b, c, d); }
EMU_VECTOR_16(uint4, u32)
EMU_VECTOR_16(int4, i32)
EMU_VECTOR_16(float4, float)

DEVICE uchar4 make_uchar4(u8 x, u8 y, u8 z, u8 w) { return {x, y, z, w}; }
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE int2 make_int2(i32 x, i32 y) { return {x, y}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }

// ---------------------------------------------------------------------------------------------------------
// Kernels register themselves when the program starts.

namespace emu {

// Where in the source a call is, for messages, and to tell whether lanes meet in the same instruction.
struct Site {
    const char* file;
    int line;
};

struct KernelEntry {
    const char* name;
    size_t params_size;
    u32 max_threads;
    void (*run)(const void* params);
    KernelEntry(const char* name, size_t params_size, u32 max_threads, void (*run)(const void*));
};

template <class Params, void (*body)(const Params)> __attribute__((no_sanitize("thread"))) void run_kernel(const void* params) {
    body(*static_cast<const Params*>(params));
}

} // namespace emu

#define KERNEL_BOUNDS(name, Params, max_threads, min_blocks)                                                          \
    static void name##_body(const Params p);                                                                          \
    static const emu::KernelEntry name##_entry(#name, sizeof(Params), max_threads, emu::run_kernel<Params, name##_body>); \
    static void name##_body(const Params p)
#define KERNEL(name, Params) KERNEL_BOUNDS(name, Params, 1024, 1)

// Every wrapper that the checker may have to talk about takes its call site as a last, hidden argument.
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE \
    emu::Site { file, line }

// ---------------------------------------------------------------------------------------------------------
// Calls into the emulator.

namespace emu {

struct Words2 {
    u32 r[2];
};
struct Words4 {
    u32 r[4];
};
struct Floats4 {
    float c[4];
};
struct Ints4 {
    i32 c[4];
};

// Constant for a thread of a kernel, so the compiler may call each once.
__attribute__((const)) dim3 thread_index();
__attribute__((const)) dim3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) u8* shared_memory();

void barrier(int id, int threads, bool wait, Site site); // threads 0: the whole block
void sync_warp(u32 mask, Site site);
enum Shuffle { SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };
u32 shuffle(Shuffle kind, u32 mask, u32 value, int operand, int width, Site site);
u32 ballot(u32 mask, bool predicate, Site site);

Words4 ldmatrix_4(const void* row, bool transposed, Site site);
Words2 ldmatrix_2(const void* row, bool transposed, Site site);
u32 movmatrix(u32 value, Site site);
Floats4 mma_bf16(Floats4 c, Words4 a, Words2 b, Site site);
Floats4 mma_f16(Floats4 c, Words4 a, Words2 b, Site site);
Ints4 mma_s8(Ints4 c, Words4 a, Words2 b, Site site);

void copy_async(void* to, const void* from, bool predicate, Site site);
void copy_commit();
void copy_wait(int groups);

Words4 load_stream_16(const void* at, Site site);
u32 load_word(const u32* at, bool acquire, Site site);
void store_release(u32* at, u32 value, Site site);
u32 atomic_add(u32* at, u32 value, Site site);
float atomic_add(float* at, float value, Site site);
u32 atomic_max(u32* at, u32 value, Site site);
u32 atomic_exchange(u32* at, u32 value, Site site);
u32 atomic_compare_exchange(u32* at, u32 expected, u32 value, Site site);
void fence();

u32 shared_address(const void* at, Site site);
void mbarrier_init(u64* bar, u32 count, Site site);
void mbarrier_arrive(u64* bar, u32 bytes, Site site);
void mbarrier_wait(u64* bar, u32 parity, Site site);
void tensor_copy_2d(void* to, const TensorMap* map, u64* bar, i32 x, i32 y, Site site);
void fence_shared();
void wgmma(float* d, int n, bool is_bf16, u64 a, u64 b, bool accumulate, Site site);
void wgmma_registers(float* d, int n, bool is_bf16, const u32* a, u64 b, bool accumulate, Site site);
void wgmma_order(const void* registers, u32 words, const void* more, u32 more_words); // of this thread, from here to a wait
void wgmma_poison(float* d, u32 n);
void wgmma_close(Site site);
void wgmma_finish(int groups, Site site);

} // namespace emu

// ---------------------------------------------------------------------------------------------------------
// CUDA's own names.

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())
#define SHARED_DYNAMIC(name) u8* name = emu::shared_memory()

DEVICE float __uint_as_float(u32 u) { return __builtin_bit_cast(float, u); }
DEVICE u32 __float_as_uint(float f) { return __builtin_bit_cast(u32, f); }
DEVICE float __int_as_float(i32 i) { return __builtin_bit_cast(float, i); }
DEVICE i32 __float_as_int(float f) { return __builtin_bit_cast(i32, f); }

DEVICE void __syncthreads(EMU_SITE) { emu::barrier(0, 0, true, EMU_HERE); }
DEVICE void __syncwarp(u32 mask = ~0u, EMU_SITE) { emu::sync_warp(mask, EMU_HERE); }
DEVICE void __threadfence() { emu::fence(); }
DEVICE void __threadfence_block() {}
DEVICE void __threadfence_system() { emu::fence(); }

#define EMU_SHUFFLE(name, kind, T, to_bits, from_bits)                                               \
    DEVICE T name(u32 mask, T v, int operand, int width = 32, EMU_SITE) {                            \
        return from_bits(emu::shuffle(emu::kind, mask, to_bits(v), operand, width, EMU_HERE));       \
    }
#define EMU_SHUFFLES(name, kind)                                                                     \
    EMU_SHUFFLE(name, kind, u32, u32, u32)                                                           \
    EMU_SHUFFLE(name, kind, i32, u32, i32)                                                           \
    EMU_SHUFFLE(name, kind, float, __float_as_uint, __uint_as_float)
EMU_SHUFFLES(__shfl_sync, SHUFFLE_INDEX)
EMU_SHUFFLES(__shfl_up_sync, SHUFFLE_UP)
EMU_SHUFFLES(__shfl_down_sync, SHUFFLE_DOWN)
EMU_SHUFFLES(__shfl_xor_sync, SHUFFLE_XOR)
DEVICE u32 __ballot_sync(u32 mask, int predicate, EMU_SITE) { return emu::ballot(mask, predicate != 0, EMU_HERE); }
DEVICE int __any_sync(u32 mask, int predicate, EMU_SITE) { return emu::ballot(mask, predicate != 0, EMU_HERE) != 0; }
DEVICE int __all_sync(u32 mask, int predicate, EMU_SITE) { return emu::ballot(mask, predicate == 0, EMU_HERE) == 0; }

DEVICE u32 atomicAdd(u32* at, u32 v, EMU_SITE) { return emu::atomic_add(at, v, EMU_HERE); }
DEVICE i32 atomicAdd(i32* at, i32 v, EMU_SITE) { return (i32)emu::atomic_add((u32*)at, (u32)v, EMU_HERE); }
DEVICE float atomicAdd(float* at, float v, EMU_SITE) { return emu::atomic_add(at, v, EMU_HERE); }
DEVICE u32 atomicMax(u32* at, u32 v, EMU_SITE) { return emu::atomic_max(at, v, EMU_HERE); }
DEVICE u32 atomicExch(u32* at, u32 v, EMU_SITE) { return emu::atomic_exchange(at, v, EMU_HERE); }
DEVICE u32 atomicCAS(u32* at, u32 expected, u32 v, EMU_SITE) { return emu::atomic_compare_exchange(at, expected, v, EMU_HERE); }

#define EMU_MINMAX(T)                                \
    DEVICE T min(T a, T b) { return b < a ? b : a; } \
    DEVICE T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(i32)
EMU_MINMAX(u32)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(u64)
DEVICE u32 min(i32 a, u32 b) { return min((u32)a, b); }
DEVICE u32 min(u32 a, i32 b) { return min(a, (u32)b); }
DEVICE u32 max(i32 a, u32 b) { return max((u32)a, b); }
DEVICE u32 max(u32 a, i32 b) { return max(a, (u32)b); }
DEVICE float min(float a, float b) { return fminf(a, b); }
DEVICE float max(float a, float b) { return fmaxf(a, b); }

DEVICE float __expf(float x) { return expf(x); }
DEVICE float __logf(float x) { return logf(x); }
DEVICE float __sinf(float x) { return sinf(x); }
DEVICE float __cosf(float x) { return cosf(x); }
DEVICE float __fdividef(float a, float b) { return a / b; }
DEVICE float __frcp_rn(float x) { return 1.0f / x; }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
DEVICE i32 __float2int_rn(float x) { return (i32)rintf(x); }
DEVICE i32 __float2int_rz(float x) { return (i32)x; }
DEVICE float __int2float_rn(i32 x) { return (float)x; }
DEVICE int __popc(u32 x) { return __builtin_popcount(x); }
DEVICE int __clz(i32 x) { return x ? __builtin_clz((u32)x) : 32; }
DEVICE int __ffs(i32 x) { return __builtin_ffs(x); }
DEVICE u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
template <class T> DEVICE T __ldg(const T* at) { return *at; }

// ---------------------------------------------------------------------------------------------------------
// 16-bit floats.

#include "half.h"

DEVICE float to_f32(bf16 v) { return emu::bf16_to_f32(v.x); }
DEVICE float to_f32(f16 v) { return emu::f16_to_f32(v.x); }
template <class T> DEVICE T from_f32(float f);
template <> DEVICE bf16 from_f32<bf16>(float f) { return {emu::f32_to_bf16(f)}; }
template <> DEVICE f16 from_f32<f16>(float f) { return {emu::f32_to_f16(f)}; }
template <class T> DEVICE u32 pack2(float lo, float hi) { return (u32)from_f32<T>(lo).x | (u32)from_f32<T>(hi).x << 16; }
template <class T> DEVICE float2 unpack2(u32 v) { return {to_f32(T{(u16)v}), to_f32(T{(u16)(v >> 16)})}; }

// One rounding each: f64 holds a product exactly, and its sum with a third is rounded to odd first.
namespace emu {
template <class T> T round_once(double v);
template <> DEVICE bf16 round_once<bf16>(double v) { return {f64_to_bf16(v)}; }
template <> DEVICE f16 round_once<f16>(double v) { return {f64_to_f16(v)}; }
template <class T> DEVICE u16 fma1(u16 a, u16 b, u16 c) {
    return round_once<T>(add_to_odd((double)to_f32(T{a}) * to_f32(T{b}), to_f32(T{c}))).x;
}
} // namespace emu
template <class T> DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    return (u32)emu::fma1<T>((u16)a, (u16)b, (u16)c) | (u32)emu::fma1<T>((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}
template <class T> DEVICE u32 mul2(u32 a, u32 b) {
    float2 x = unpack2<T>(a), y = unpack2<T>(b);
    return pack2<T>(x.x * y.x, x.y * y.y);
}
template <class T> DEVICE u32 add2(u32 a, u32 b) {
    float2 x = unpack2<T>(a), y = unpack2<T>(b);
    return (u32)emu::round_once<T>(emu::add_to_odd(x.x, y.x)).x | (u32)emu::round_once<T>(emu::add_to_odd(x.y, y.y)).x << 16;
}
template <class T> DEVICE u32 sub2(u32 a, u32 b) {
    float2 x = unpack2<T>(a), y = unpack2<T>(b);
    return (u32)emu::round_once<T>(emu::add_to_odd(x.x, -y.x)).x | (u32)emu::round_once<T>(emu::add_to_odd(x.y, -y.y)).x << 16;
}

// ---------------------------------------------------------------------------------------------------------
// Bits.

template <int IMM> DEVICE u32 lop3(u32 a, u32 b, u32 c) {
    u32 r = 0;
    if (IMM & 0x01) r |= ~a & ~b & ~c;
    if (IMM & 0x02) r |= ~a & ~b & c;
    if (IMM & 0x04) r |= ~a & b & ~c;
    if (IMM & 0x08) r |= ~a & b & c;
    if (IMM & 0x10) r |= a & ~b & ~c;
    if (IMM & 0x20) r |= a & ~b & c;
    if (IMM & 0x40) r |= a & b & ~c;
    if (IMM & 0x80) r |= a & b & c;
    return r;
}
DEVICE u32 prmt(u32 a, u32 b, u32 sel) {
    u64 bytes = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = sel >> 4 * i & 0xf;
        u32 byte = (u32)(bytes >> 8 * (pick & 7)) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << 8 * i;
    }
    return r;
}
DEVICE u32 __byte_perm(u32 a, u32 b, u32 sel) { return prmt(a, b, sel & 0x7777); }
DEVICE i32 dp4a(i32 a, i32 b, i32 c) {
    for (int i = 0; i < 4; i++) c += (i32)(int8_t)(a >> 8 * i) * (i32)(int8_t)(b >> 8 * i);
    return c;
}
DEVICE float ex2(float x) { return exp2f(x); }

// ---------------------------------------------------------------------------------------------------------
// Memory.

DEVICE uint4 ld_stream_16(const void* at, EMU_SITE) {
    emu::Words4 w = emu::load_stream_16(at, EMU_HERE);
    return make_uint4(w.r[0], w.r[1], w.r[2], w.r[3]);
}
DEVICE uint4 ld_16(const void* at) { return *(const uint4*)at; }
DEVICE u32 ld_volatile_u32(const u32* at, EMU_SITE) { return emu::load_word(at, false, EMU_HERE); }
DEVICE u32 ld_acquire_gpu(const u32* at, EMU_SITE) { return emu::load_word(at, true, EMU_HERE); }
DEVICE u32 ld_acquire_sys(const u32* at, EMU_SITE) { return emu::load_word(at, true, EMU_HERE); }
DEVICE void st_release_gpu(u32* at, u32 v, EMU_SITE) { emu::store_release(at, v, EMU_HERE); }
DEVICE void st_release_sys(u32* at, u32 v, EMU_SITE) { emu::store_release(at, v, EMU_HERE); }

DEVICE u32 smem_u32(const void* at, EMU_SITE) { return emu::shared_address(at, EMU_HERE); }
DEVICE void cp_async_16(void* to, const void* from, bool pred = true, EMU_SITE) {
#if TANDEM_SM >= 80
    emu::copy_async(to, from, pred, EMU_HERE);
#else
    uint4 v = make_uint4(0, 0, 0, 0);
    if (pred) v = *(const uint4*)from;
    *(uint4*)to = v;
#endif
}
DEVICE void cp_async_commit() { emu::copy_commit(); }
template <int N> DEVICE void cp_async_wait() { emu::copy_wait(N); }
DEVICE void named_barrier_sync(int id, int threads, EMU_SITE) { emu::barrier(id, threads, true, EMU_HERE); }
DEVICE void named_barrier_arrive(int id, int threads, EMU_SITE) { emu::barrier(id, threads, false, EMU_HERE); }

// ---------------------------------------------------------------------------------------------------------
// Tensor cores.

namespace emu {
DEVICE void unpack(u32 r[4], Words4 w) { r[0] = w.r[0], r[1] = w.r[1], r[2] = w.r[2], r[3] = w.r[3]; }
DEVICE void unpack(u32 r[2], Words2 w) { r[0] = w.r[0], r[1] = w.r[1]; }
template <class T> DEVICE void unpack_c(T* c, const T (&from)[4]) { c[0] = from[0], c[1] = from[1], c[2] = from[2], c[3] = from[3]; }
} // namespace emu

DEVICE void ldmatrix_x4(u32 r[4], const void* row, EMU_SITE) { emu::unpack(r, emu::ldmatrix_4(row, false, EMU_HERE)); }
DEVICE void ldmatrix_x4_trans(u32 r[4], const void* row, EMU_SITE) { emu::unpack(r, emu::ldmatrix_4(row, true, EMU_HERE)); }
DEVICE void ldmatrix_x2(u32 r[2], const void* row, EMU_SITE) {
    emu::Words2 w = emu::ldmatrix_2(row, false, EMU_HERE);
    r[0] = w.r[0], r[1] = w.r[1];
}
DEVICE void ldmatrix_x2_trans(u32 r[2], const void* row, EMU_SITE) {
    emu::Words2 w = emu::ldmatrix_2(row, true, EMU_HERE);
    r[0] = w.r[0], r[1] = w.r[1];
}

DEVICE u32 movmatrix_trans(u32 v, EMU_SITE) { return emu::movmatrix(v, EMU_HERE); }

template <class T> DEVICE void mma_16816(float c[4], const u32 a[4], const u32 b[2], EMU_SITE);
template <> DEVICE void mma_16816<f16>(float c[4], const u32 a[4], const u32 b[2], const char* file, int line) {
    emu::unpack_c(c, emu::mma_f16({c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, EMU_HERE).c);
}
#if TANDEM_SM >= 80
template <> DEVICE void mma_16816<bf16>(float c[4], const u32 a[4], const u32 b[2], const char* file, int line) {
    emu::unpack_c(c, emu::mma_bf16({c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, EMU_HERE).c);
}
#endif
DEVICE void mma_16832_s8(i32 c[4], const u32 a[4], const u32 b[2], EMU_SITE) {
    emu::unpack_c(c, emu::mma_s8({c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, EMU_HERE).c);
}

// ---------------------------------------------------------------------------------------------------------
// sm_90a.

#if TANDEM_SM90A
DEVICE void mbar_init(u64* bar, u32 n, EMU_SITE) { emu::mbarrier_init(bar, n, EMU_HERE); }
DEVICE void mbar_init_fence() {}
DEVICE void mbar_expect_tx(u64* bar, u32 bytes, EMU_SITE) { emu::mbarrier_arrive(bar, bytes, EMU_HERE); }
DEVICE void mbar_arrive(u64* bar, EMU_SITE) { emu::mbarrier_arrive(bar, 0, EMU_HERE); }
DEVICE void mbar_wait(u64* bar, u32 parity, EMU_SITE) { emu::mbarrier_wait(bar, parity, EMU_HERE); }
DEVICE void tma_load_2d(void* to, const TensorMap* map, u64* bar, i32 x, i32 y, EMU_SITE) {
    emu::tensor_copy_2d(to, map, bar, x, y, EMU_HERE);
}
DEVICE void fence_async_shared() { emu::fence_shared(); }
DEVICE u64 smem_desc_sw128(u32 smem_addr) { return (u64)((smem_addr & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
DEVICE u64 smem_desc_sw128_mn(u32 smem_addr, u32 next) {
    return (u64)((smem_addr & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
template <class D> DEVICE void wgmma_fence(D& d) { emu::wgmma_order(d, sizeof d / 4, nullptr, 0); }
template <class D, class A> DEVICE void wgmma_fence(D& d, A& a) { emu::wgmma_order(d, sizeof d / 4, a, sizeof a / 4); }
DEVICE void wgmma_commit(EMU_SITE) { emu::wgmma_close(EMU_HERE); }
template <int GROUPS, class D> DEVICE void wgmma_wait(D&, EMU_SITE) { emu::wgmma_finish(GROUPS, EMU_HERE); }
template <int GROUPS, class D, class A> DEVICE void wgmma_wait(D&, A&, EMU_SITE) { emu::wgmma_finish(GROUPS, EMU_HERE); }
template <int N> DEVICE void wgmma_discard(float (&d)[N]) { emu::wgmma_poison(d, N); }
namespace emu {
template <class T> constexpr bool is_bf16 = false;
template <> inline constexpr bool is_bf16<bf16> = true;
} // namespace emu
template <class T, int N> DEVICE void wgmma_m64k16(float* d, u64 desc_a, u64 desc_b, bool accumulate, EMU_SITE) {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "N of wgmma");
    emu::wgmma(d, N, emu::is_bf16<T>, desc_a, desc_b, accumulate, EMU_HERE);
}
template <class T, int N> DEVICE void wgmma_m64k16_ra(float* d, const u32 a[4], u64 desc_b, bool accumulate, EMU_SITE) {
    static_assert(N == 64 || N == 128 || N == 256, "N of wgmma");
    emu::wgmma_registers(d, N, emu::is_bf16<T>, a, desc_b, accumulate, EMU_HERE);
}
template <int N> DEVICE void set_max_registers_inc() {}
template <int N> DEVICE void set_max_registers_dec() {}
#endif
