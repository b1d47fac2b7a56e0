// ptx.cuh    the one place with inline PTX: every instruction wrapped once, with the reason why it is used
//
// A kernel file includes this and common.cuh, nothing else. Two halves of the same names: nvcc takes the PTX
// below, a C++ compiler takes ../host/emu.h, which states in C++ what the instruction does (host emulation;
// conformance.cu compares the two on a real device). Where an architecture lacks an instruction, the wrapper
// falls back, so a kernel body is written once:
//
//   sm_75 (T4)      no cp.async: synchronous 16-byte copies; mma m16n8k16 as two m16n8k8; s8 mma as four m8n8k16;
//                   no bf16 arithmetic: bf16 kernels are instantiated under `#if TANDEM_SM >= 80`
//   sm_80 and up    everything but the last section
//   sm_90a          `#if TANDEM_SM90A`: mbarriers, bulk tensor copies (TMA), wgmma
//
// Fragment layouts of ldmatrix and mma are drawn in ../host/mma.cpp.
#pragma once

#include "abi.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

// 16-bit floats by their bits: CUDA's own types need its headers.
struct bf16 {
    u16 x;
};
struct f16 {
    u16 x;
};

#ifndef __CUDACC__
#include "../host/emu.h"
#else

// TANDEM_SM     75, 80 or 90: the target that this pass compiles for (kernels choose paths by it)
// TANDEM_SM90A  whether the instructions of sm_90a, which no later architecture runs, may be used
#ifdef __CUDA_ARCH__
#define TANDEM_SM (__CUDA_ARCH__ / 10)
#else
#define TANDEM_SM 90
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TANDEM_SM90A 1
#else
#define TANDEM_SM90A 0
#endif

#define DEVICE __device__ __forceinline__

// A kernel: one POD parameter struct, seen by address (tensor maps inside it must be). Found by its plain name.
#define KERNEL(name, Params) extern "C" __global__ void name(const __grid_constant__ Params p)
// The same, with registers bounded so that `min_blocks` blocks of `max_threads` threads fit a multiprocessor.
#define KERNEL_BOUNDS(name, Params, max_threads, min_blocks) \
    extern "C" __global__ void __launch_bounds__(max_threads, min_blocks) name(const __grid_constant__ Params p)
// The block's dynamic shared memory, aligned for 128-byte swizzles.
extern __shared__ __align__(1024) u8 tandem_dynamic_shared[];
#define SHARED_DYNAMIC(name) u8* name = tandem_dynamic_shared

// ---------------------------------------------------------------------------------------------------------
// 16-bit floats. All conversions round to nearest even, as the reference does.

DEVICE float to_f32(bf16 v) { return __uint_as_float((u32)v.x << 16); }
DEVICE float to_f32(f16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.x));
    return f;
}

template <class T> DEVICE T from_f32(float f);
template <> DEVICE f16 from_f32<f16>(float f) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.x) : "f"(f));
    return r;
}
template <> DEVICE bf16 from_f32<bf16>(float f) {
    bf16 r;
#if TANDEM_SM >= 80
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.x) : "f"(f));
#else
    u32 u = __float_as_uint(f);
    r.x = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
#endif
    return r;
}

// Two floats to a packed pair in one instruction (lo in bits 0..16): half the conversions of an epilogue.
template <class T> DEVICE u32 pack2(float lo, float hi) {
    return (u32)from_f32<T>(lo).x | (u32)from_f32<T>(hi).x << 16;
}
#if TANDEM_SM >= 80
template <> DEVICE u32 pack2<bf16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <> DEVICE u32 pack2<f16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
#endif
template <class T> DEVICE float2 unpack2(u32 v) {
    T lo, hi;
    lo.x = (u16)v;
    hi.x = (u16)(v >> 16);
    return make_float2(to_f32(lo), to_f32(hi));
}

// Packed arithmetic: two lanes an instruction, one rounding each. Dequantisation lives on these.
template <class T> DEVICE u32 fma2(u32 a, u32 b, u32 c); // a * b + c
template <class T> DEVICE u32 mul2(u32 a, u32 b);
template <class T> DEVICE u32 add2(u32 a, u32 b);
template <class T> DEVICE u32 sub2(u32 a, u32 b);
template <> DEVICE u32 fma2<f16>(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
template <> DEVICE u32 mul2<f16>(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
template <> DEVICE u32 add2<f16>(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
template <> DEVICE u32 sub2<f16>(u32 a, u32 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#if TANDEM_SM >= 80
// sm_80 has only fma for bf16x2; times -0, plus 1 and minus 1 below round once and keep signed zeros, so they
// are the mul, add and sub that sm_90 has.
template <> DEVICE u32 fma2<bf16>(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
template <> DEVICE u32 mul2<bf16>(u32 a, u32 b) { return fma2<bf16>(a, b, 0x80008000u); }
template <> DEVICE u32 add2<bf16>(u32 a, u32 b) { return fma2<bf16>(a, 0x3f803f80u, b); }
template <> DEVICE u32 sub2<bf16>(u32 a, u32 b) { return fma2<bf16>(b, 0xbf80bf80u, a); }
#endif

// ---------------------------------------------------------------------------------------------------------
// Bits.

// Any function of three words in one instruction; IMM is its truth table (a = 0xf0, b = 0xcc, c = 0xaa): masks
// and or-ed exponents of dequantisation cost one instruction instead of two or three.
template <int IMM> DEVICE u32 lop3(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(IMM));
    return r;
}
// Picks four of the eight bytes of (b:a) by the nibbles of sel (bit 3 of a nibble replicates the sign).
DEVICE u32 prmt(u32 a, u32 b, u32 sel) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
}
// Four signed bytes by four signed bytes, added to c: integer dot products of GEMV without tensor cores.
DEVICE i32 dp4a(i32 a, i32 b, i32 c) { return __dp4a(a, b, c); }
// 2^x in one instruction, denormal results flushed: exp2f adds two more to keep them, softmax does not care.
DEVICE float ex2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---------------------------------------------------------------------------------------------------------
// Global memory.

// 16 bytes that are read once: through the read-only path and without a place in L1, which stays for operands
// that are read again. Only for memory that no kernel writes while this one runs.
DEVICE uint4 ld_stream_16(const void* at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}
// 16 bytes, cached as usual.
DEVICE uint4 ld_16(const void* at) { return *(const uint4*)at; }
// A word that another agent may change: always from memory, in no order.
DEVICE u32 ld_volatile_u32(const u32* at) { return *(const volatile u32*)at; }
// Acquire: what was written before the matching release is visible after this load. gpu: to other blocks;
// sys: to the host too. A fence around a plain load says the same and costs more.
DEVICE u32 ld_acquire_gpu(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE u32 ld_acquire_sys(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
// Release: everything this thread wrote (and has seen by barriers) before is visible to who acquires.
DEVICE void st_release_gpu(u32* at, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
DEVICE void st_release_sys(u32* at, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }

// ---------------------------------------------------------------------------------------------------------
// Shared memory: asynchronous copies, barriers of a part of the block.

// The 32-bit address that shared-memory instructions take.
DEVICE u32 smem_u32(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// 16 bytes from global to shared memory without passing registers: the copy is in flight while the tensor cores
// work. `pred` false fills with zeros and reads nothing (edges of a matrix). `from` must then still be an address that
// could be read: nothing promises that a copy of no bytes is not translated, or prefetched (L2::128B). Both 16-byte
// aligned. Complete only after cp_async_wait and a barrier.
DEVICE void cp_async_16(void* to, const void* from, bool pred = true) {
#if TANDEM_SM >= 80
    u32 bytes = pred ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_u32(to)), "l"(from), "r"(bytes) : "memory");
#else
    uint4 v = make_uint4(0, 0, 0, 0);
    if (pred) v = *(const uint4*)from;
    *(uint4*)to = v;
#endif
}
// Closes a group of this thread's copies.
DEVICE void cp_async_commit() {
#if TANDEM_SM >= 80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most the N latest groups of this thread are in flight. Other threads' copies need a barrier.
template <int N> DEVICE void cp_async_wait() {
#if TANDEM_SM >= 80
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// A barrier of `threads` threads (a multiple of 32): part of the block meets without stopping the rest.
// 0 is __syncthreads; use 1..15.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Counts towards the barrier without waiting: the producer's half.
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---------------------------------------------------------------------------------------------------------
// Tensor cores. A warp calls these together.

// 8x8 matrices of 16-bit elements from shared memory in mma's fragment layout: one instruction for what would be
// eight 4-byte loads with bank conflicts. Lane i gives the address of row i % 8 of matrix i / 8 (16 aligned bytes).
DEVICE void ldmatrix_x4(u32 r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(row))
                 : "memory");
}
// The same, each matrix transposed: V of attention is stored by token and needed by dimension.
DEVICE void ldmatrix_x4_trans(u32 r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(row))
                 : "memory");
}
// Two matrices: lanes 0..16 give the rows (the others' addresses must still be valid).
DEVICE void ldmatrix_x2(u32 r[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(smem_u32(row)) : "memory");
}
DEVICE void ldmatrix_x2_trans(u32 r[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_u32(row))
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that lies in registers (lane 4 * row + column / 2): scores computed as
// keys x queries become the keys-first operand of the next mma without a trip through shared memory.
DEVICE u32 movmatrix_trans(u32 v) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// c[16][8] += a[16][16] * b[16][8], a by rows, b by columns, f32 accumulators.
template <class T> DEVICE void mma_16816(float c[4], const u32 a[4], const u32 b[2]);
template <> DEVICE void mma_16816<f16>(float c[4], const u32 a[4], const u32 b[2]) {
#if TANDEM_SM >= 80
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}
#if TANDEM_SM >= 80
template <> DEVICE void mma_16816<bf16>(float c[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// c[16][8] += a[16][32] * b[32][8] of signed bytes, exact in 32 bits: quantised weights by quantised activations
// at twice the rate of 16-bit floats.
DEVICE void mma_16832_s8(i32 c[4], const u32 a[4], const u32 b[2]) {
#if TANDEM_SM >= 80
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(c[2 * half]), "+r"(c[2 * half + 1])
                : "r"(a[2 * k + half]), "r"(b[k]));
#endif
}

// ---------------------------------------------------------------------------------------------------------
// sm_90a: barriers in shared memory that count bytes, bulk tensor copies, warpgroup mma.

#if TANDEM_SM90A

// Sets the barrier up for phases of n arrivals. One thread; others see it after mbar_init_fence and a barrier.
DEVICE void mbar_init(u64* bar, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(n) : "memory"); }
// Makes initialised barriers visible to the asynchronous copy unit.
DEVICE void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One arrival that also announces `bytes` of bulk copies: the phase ends when all threads and all bytes arrived.
DEVICE void mbar_expect_tx(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)), "r"(bytes) : "memory");
}
DEVICE void mbar_arrive(u64* bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(bar)) : "memory"); }
// Waits until the phase of this parity has ended (a fresh barrier: phase 0 runs; parity 1 returns at once).
DEVICE void mbar_wait(u64* bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(smem_u32(bar)), "r"(parity)
                     : "memory");
    } while (!done);
}

// One thread copies a whole box of a matrix, swizzled, zero-filled outside: no address arithmetic, no registers.
// x counts columns, y rows. `to` is 1024-byte aligned, `map` 128-byte aligned in the kernel's parameters.
DEVICE void tma_load_2d(void* to, const TensorMap* map, u64* bar, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(smem_u32(to)),
                 "l"(map), "r"(smem_u32(bar)), "r"(x), "r"(y)
                 : "memory");
}
// Orders this thread's ordinary stores to shared memory before later reads by wgmma or bulk copies.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a K-major operand whose rows are 128 bytes, swizzled by 128 bytes, groups of eight rows 1024
// bytes apart (what tma_load_2d writes with box_cols = 64). Sixteen columns further on: + 2.
DEVICE u64 smem_desc_sw128(u32 smem_addr) { return (u64)((smem_addr & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

// The same for an operand whose rows run along N (MN-major): 64 columns of a tile [k][64] of 128-byte rows, the next 64
// columns `next` bytes further on. Sixteen rows of k further on: + 128.
DEVICE u64 smem_desc_sw128_mn(u32 smem_addr, u32 next) {
    return (u64)((smem_addr & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Moves registers from producer warps to those that hold accumulators (a multiple of 8, a warpgroup together).
template <int N> DEVICE void set_max_registers_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void set_max_registers_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

#include "wgmma.cuh"

#endif // TANDEM_SM90A
#endif // __CUDACC__
