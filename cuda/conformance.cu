// conformance.cu    what every wrapper of ptx.cuh does, dumped: for a GPU to be compared with the PTX ISA
//
// Kernels are tested through host emulation, which is our reading of the ISA. These kernels run one wrapper each on
// given operands; tests/gpu/kernels/conformance/ states the ISA's layouts once more, independently, and compares both the
// emulation and, where there is one, the device with it.
//
// in, out  32-bit words unless said otherwise, [thread][operand] and [thread][result]
// launch   1 block of 32 threads unless said otherwise
// no-spill all
// no-stack all
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------
// Matrices.

// in: 128 words, four 8x8 matrices of halves by rows. out: [x4, x4 trans, x2, x2 trans][lane][4 or 2], shared memory
// 512 bytes.
KERNEL(conformance_ldmatrix, ConformanceParams) {
    SHARED_DYNAMIC(smem);
    const u32* in = (const u32*)p.in;
    for (u32 i = threadIdx.x; i < 128; i += 32) ((u32*)smem)[i] = in[i];
    __syncthreads();
    const u8* row = smem + threadIdx.x * 16;
    u32 r[4], *out = (u32*)p.out;
    ldmatrix_x4(r, row);
    for (u32 i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
    ldmatrix_x4_trans(r, row);
    for (u32 i = 0; i < 4; i++) out[128 + threadIdx.x * 4 + i] = r[i];
    ldmatrix_x2(r, row);
    for (u32 i = 0; i < 2; i++) out[256 + threadIdx.x * 2 + i] = r[i];
    ldmatrix_x2_trans(r, row);
    for (u32 i = 0; i < 2; i++) out[320 + threadIdx.x * 2 + i] = r[i];
}

// in: [lane][1], out: [lane][1].
KERNEL(conformance_movmatrix, ConformanceParams) { ((u32*)p.out)[threadIdx.x] = movmatrix_trans(((const u32*)p.in)[threadIdx.x]); }

// in: [lane][a0..a3, b0, b1, c0..c3], out: [lane][c0..c3].
template <class T> DEVICE void mma(const ConformanceParams& p) {
    const u32* in = (const u32*)p.in + threadIdx.x * 10;
    float c[4];
    for (u32 i = 0; i < 4; i++) c[i] = __uint_as_float(in[6 + i]);
    u32 a[4] = {in[0], in[1], in[2], in[3]}, b[2] = {in[4], in[5]};
    mma_16816<T>(c, a, b);
    for (u32 i = 0; i < 4; i++) ((float*)p.out)[threadIdx.x * 4 + i] = c[i];
}
KERNEL(conformance_mma_f16, ConformanceParams) { mma<f16>(p); }
#if TANDEM_SM >= 80
KERNEL(conformance_mma_bf16, ConformanceParams) { mma<bf16>(p); }
#endif
KERNEL(conformance_mma_s8, ConformanceParams) {
    const u32* in = (const u32*)p.in + threadIdx.x * 10;
    u32 a[4] = {in[0], in[1], in[2], in[3]}, b[2] = {in[4], in[5]};
    i32 c[4] = {(i32)in[6], (i32)in[7], (i32)in[8], (i32)in[9]};
    mma_16832_s8(c, a, b);
    for (u32 i = 0; i < 4; i++) ((i32*)p.out)[threadIdx.x * 4 + i] = c[i];
}

// ---------------------------------------------------------------------------------------------------------
// Arithmetic. n threads in blocks of 32.

DEVICE u32 element() { return blockIdx.x * blockDim.x + threadIdx.x; }

// in: [thread][a, b, c], out: [thread][prmt, lop3 x 3, dp4a].
KERNEL(conformance_bits, ConformanceParams) {
    if (element() >= p.n) return;
    const u32* in = (const u32*)p.in + element() * 3;
    u32 a = in[0], b = in[1], c = in[2], *out = (u32*)p.out + element() * 5;
    out[0] = prmt(a, b, c);
    out[1] = lop3<0xea>(a, b, c); // (a & b) | c
    out[2] = lop3<0x96>(a, b, c); // a ^ b ^ c
    out[3] = lop3<0x1d>(a, b, c); // no operand commutes with another
    out[4] = (u32)dp4a((i32)a, (i32)b, (i32)c);
}

// in: [thread][x, y, z], x, y, z packed pairs for the first four results and f32 for the others.
// out: [thread][fma2, mul2, add2, sub2, pack2(x, y), from_f32(x), to_f32(low half of x), unpack2(x) low, high].
template <class T> DEVICE void conversions(const u32* in, u32* out) {
    float x = __uint_as_float(in[0]), y = __uint_as_float(in[1]);
    out[4] = pack2<T>(x, y);
    out[5] = from_f32<T>(x).x;
    float2 both = unpack2<T>(in[0]);
    T low;
    low.x = (u16)in[0];
    out[6] = __float_as_uint(to_f32(low));
    out[7] = __float_as_uint(both.x);
    out[8] = __float_as_uint(both.y);
}
template <class T> DEVICE void packed(const ConformanceParams& p) {
    if (element() >= p.n) return;
    const u32* in = (const u32*)p.in + element() * 3;
    u32* out = (u32*)p.out + element() * 9;
    out[0] = fma2<T>(in[0], in[1], in[2]);
    out[1] = mul2<T>(in[0], in[1]);
    out[2] = add2<T>(in[0], in[1]);
    out[3] = sub2<T>(in[0], in[1]);
    conversions<T>(in, out);
}
KERNEL(conformance_packed_f16, ConformanceParams) { packed<f16>(p); }
#if TANDEM_SM >= 80
KERNEL(conformance_packed_bf16, ConformanceParams) { packed<bf16>(p); }
#endif

// in: [thread] f32, out: [thread][ex2, __expf, rsqrtf, tanhf, silu, gelu_tanh, gelu_erf] f32: how far approximations are off.
KERNEL(conformance_functions, ConformanceParams) {
    if (element() >= p.n) return;
    float x = ((const float*)p.in)[element()], *out = (float*)p.out + element() * 7;
    out[0] = ex2(x);
    out[1] = __expf(x);
    out[2] = rsqrtf(fabsf(x));
    out[3] = tanhf(x);
    out[4] = silu(x);
    out[5] = gelu_tanh(x);
    out[6] = gelu_erf(x);
}

// ---------------------------------------------------------------------------------------------------------
// Warps and blocks.

// in: [lane][value, operand], out: [lane][idx, up, down, xor of 32, of 8, ballot of odd values, warp_sum, warp_max].
KERNEL(conformance_shuffle, ConformanceParams) {
    const u32* in = (const u32*)p.in + threadIdx.x * 2;
    u32 v = in[0], *out = (u32*)p.out + threadIdx.x * 11;
    int d = (int)in[1];
    out[0] = __shfl_sync(~0u, v, d);
    out[1] = __shfl_up_sync(~0u, v, d);
    out[2] = __shfl_down_sync(~0u, v, d);
    out[3] = __shfl_xor_sync(~0u, v, d);
    out[4] = __shfl_sync(~0u, v, d, 8);
    out[5] = __shfl_up_sync(~0u, v, d, 8);
    out[6] = __shfl_down_sync(~0u, v, d, 8);
    out[7] = __shfl_xor_sync(~0u, v, d, 8);
    out[8] = __ballot_sync(~0u, (int)(v & 1));
    out[9] = __float_as_uint(warp_sum((float)(v % 64)));
    out[10] = __float_as_uint(warp_max((float)(v % 64)));
}

// in: [thread] f32, out: [thread][block_sum, block_max, the value of the thread 64 further on]. 256 threads, 2 KiB of
// shared memory. The upper half fills, the lower half, then everyone reads: named barriers as a hand-over.
KERNEL(conformance_barriers, ConformanceParams) {
    SHARED_DYNAMIC(smem);
    float v = ((const float*)p.in)[threadIdx.x], *out = (float*)p.out + threadIdx.x * 3;
    out[0] = block_sum(v, (float*)smem);
    out[1] = block_max(v, (float*)smem);
    float* s = (float*)smem;
    if (threadIdx.x >= 128) {
        s[threadIdx.x] = v;
        named_barrier_arrive(1, 256);
        named_barrier_sync(2, 128);
    } else {
        named_barrier_sync(1, 256);
        s[threadIdx.x] = s[threadIdx.x + 128] + v;
    }
    __syncthreads();
    out[2] = s[(threadIdx.x + 64) % 256];
}

// in: 128 words. out: 128 words: 16 bytes a lane by cp_async_16, odd lanes' predicate false, in two groups; then the
// same 128 words by ld_stream_16, by ld_16. Shared memory 512 bytes.
KERNEL(conformance_copies, ConformanceParams) {
    SHARED_DYNAMIC(smem);
    const u32* in = (const u32*)p.in + threadIdx.x * 4;
    u32* out = (u32*)p.out + threadIdx.x * 4;
    bool first = threadIdx.x < 16;
    if (first) cp_async_16(smem + threadIdx.x * 16, in, threadIdx.x % 2 == 0);
    cp_async_commit();
    if (!first) cp_async_16(smem + threadIdx.x * 16, in, threadIdx.x % 2 == 0);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    if (first) *(uint4*)out = *(const uint4*)(smem + (15 - threadIdx.x) * 16);
    cp_async_wait<0>();
    __syncwarp();
    if (!first) *(uint4*)out = *(const uint4*)(smem + (47 - threadIdx.x) * 16);
    *(uint4*)(out + 128) = ld_stream_16(in);
    *(uint4*)(out + 256) = ld_16(in);
}

// n blocks. Each stores 32 words and counts itself; the last adds them all. out: [block][32] partial words, then 32 sums,
// then words[1 + block] as released and acquired. words: counter, then a flag a block; all zero before.
KERNEL(conformance_last_block, ConformanceParams) {
    SHARED_DYNAMIC(smem);
    u32 *partial = (u32*)p.out, *sums = partial + p.n * 32, *seen = sums + 32, *last = (u32*)smem;
    partial[blockIdx.x * 32 + threadIdx.x] = (blockIdx.x + 1) * (threadIdx.x + 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (blockIdx.x % 2 == 0)
            st_release_gpu(p.words + 1 + blockIdx.x, blockIdx.x + 7);
        else
            st_release_sys(p.words + 1 + blockIdx.x, blockIdx.x + 7);
        *last = atomicAdd(p.words, 1u) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!*last) return;
    __threadfence();
    u32 sum = 0;
    for (u32 b = 0; b < p.n; b++) sum += ld_volatile_u32(partial + b * 32 + threadIdx.x);
    sums[threadIdx.x] = sum;
    for (u32 b = threadIdx.x; b < p.n; b += 32) seen[b] = b % 2 == 0 ? ld_acquire_gpu(p.words + 1 + b) : ld_acquire_sys(p.words + 1 + b);
    if (threadIdx.x == 0) p.words[0] = 0;
}
