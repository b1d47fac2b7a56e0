// wgmma.cuh    d[64][N] += a[64][16] * b[N][16]^T of a warpgroup (4 warps), both operands in shared memory
//
// The only instruction that reaches the matrix peak of sm_90: it runs asynchronously and reads its operands
// without passing registers. N = 8, 16, ..., 256; accumulators are d[N/2] of each thread: for column block j of 8,
// d[4j + 0, 1] is row 16*warp + lane/4, columns 8j + 2*(lane%4) + 0, 1; d[4j + 2, 3] is that row + 8.
//
// A pipeline stage, with every array of registers that its wgmmas use named at both ends:
//
//   wgmma_fence(d);                  // or (d, a) where a is in registers
//   wgmma_m64k16<T, N>(d, a, b, accumulate);  ...
//   wgmma_commit();
//   wgmma_wait<0>(d);
//
// In between, accumulators and a belong to the tensor cores: an access is undefined (PTX ISA 9.7.15.7.1), and ptxas,
// when it sees one, serialises every wgmma of the function. The order of asm volatile statements and "memory" do not
// bind registers: the compiler may move an ordinary read or write of d across them. So fence and wait pin each register
// by an empty asm that claims to change it: no code, but no access crosses it either.
#pragma once

// A point in the program that no access to these registers crosses.
template <int N> DEVICE void pin_registers(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> DEVICE void pin_registers(u32 (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}
template <int M, int N> DEVICE void pin_registers(u32 (&r)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; i++) pin_registers(r[i]);
}

// Before the first wgmma, and whenever other instructions touched the registers.
template <class... R> DEVICE void wgmma_fence(R&... registers) {
    (pin_registers(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most GROUPS groups run: only then are their accumulators defined and their operands free to overwrite.
template <int GROUPS, class... R> DEVICE void wgmma_wait(R&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
    (pin_registers(registers), ...);
}
// What accumulators hold does not matter: the first wgmma on them does not accumulate. Nothing here; host emulation
// poisons them, so that a first wgmma which does accumulate is an error.
template <int N> DEVICE void wgmma_discard(float (&)[N]) {}

// `accumulate` (scale-d) false: d = a * b^T, whatever d held: a sum needs no zeros stored to registers before it begins.
// asm operands cannot be counted by templates, so the lists below grow by macros, four registers a step.
template <class T, int N> DEVICE void wgmma_m64k16(float* d, u64 desc_a, u64 desc_b, bool accumulate);

#define TANDEM_NAMES_8 "%0, %1, %2, %3"
#define TANDEM_NAMES_16 TANDEM_NAMES_8 ", %4, %5, %6, %7"
#define TANDEM_NAMES_24 TANDEM_NAMES_16 ", %8, %9, %10, %11"
#define TANDEM_NAMES_32 TANDEM_NAMES_24 ", %12, %13, %14, %15"
#define TANDEM_NAMES_40 TANDEM_NAMES_32 ", %16, %17, %18, %19"
#define TANDEM_NAMES_48 TANDEM_NAMES_40 ", %20, %21, %22, %23"
#define TANDEM_NAMES_56 TANDEM_NAMES_48 ", %24, %25, %26, %27"
#define TANDEM_NAMES_64 TANDEM_NAMES_56 ", %28, %29, %30, %31"
#define TANDEM_NAMES_72 TANDEM_NAMES_64 ", %32, %33, %34, %35"
#define TANDEM_NAMES_80 TANDEM_NAMES_72 ", %36, %37, %38, %39"
#define TANDEM_NAMES_88 TANDEM_NAMES_80 ", %40, %41, %42, %43"
#define TANDEM_NAMES_96 TANDEM_NAMES_88 ", %44, %45, %46, %47"
#define TANDEM_NAMES_104 TANDEM_NAMES_96 ", %48, %49, %50, %51"
#define TANDEM_NAMES_112 TANDEM_NAMES_104 ", %52, %53, %54, %55"
#define TANDEM_NAMES_120 TANDEM_NAMES_112 ", %56, %57, %58, %59"
#define TANDEM_NAMES_128 TANDEM_NAMES_120 ", %60, %61, %62, %63"
#define TANDEM_NAMES_136 TANDEM_NAMES_128 ", %64, %65, %66, %67"
#define TANDEM_NAMES_144 TANDEM_NAMES_136 ", %68, %69, %70, %71"
#define TANDEM_NAMES_152 TANDEM_NAMES_144 ", %72, %73, %74, %75"
#define TANDEM_NAMES_160 TANDEM_NAMES_152 ", %76, %77, %78, %79"
#define TANDEM_NAMES_168 TANDEM_NAMES_160 ", %80, %81, %82, %83"
#define TANDEM_NAMES_176 TANDEM_NAMES_168 ", %84, %85, %86, %87"
#define TANDEM_NAMES_184 TANDEM_NAMES_176 ", %88, %89, %90, %91"
#define TANDEM_NAMES_192 TANDEM_NAMES_184 ", %92, %93, %94, %95"
#define TANDEM_NAMES_200 TANDEM_NAMES_192 ", %96, %97, %98, %99"
#define TANDEM_NAMES_208 TANDEM_NAMES_200 ", %100, %101, %102, %103"
#define TANDEM_NAMES_216 TANDEM_NAMES_208 ", %104, %105, %106, %107"
#define TANDEM_NAMES_224 TANDEM_NAMES_216 ", %108, %109, %110, %111"
#define TANDEM_NAMES_232 TANDEM_NAMES_224 ", %112, %113, %114, %115"
#define TANDEM_NAMES_240 TANDEM_NAMES_232 ", %116, %117, %118, %119"
#define TANDEM_NAMES_248 TANDEM_NAMES_240 ", %120, %121, %122, %123"
#define TANDEM_NAMES_256 TANDEM_NAMES_248 ", %124, %125, %126, %127"

#define TANDEM_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TANDEM_REGS_8 TANDEM_FOUR(0)
#define TANDEM_REGS_16 TANDEM_REGS_8, TANDEM_FOUR(4)
#define TANDEM_REGS_24 TANDEM_REGS_16, TANDEM_FOUR(8)
#define TANDEM_REGS_32 TANDEM_REGS_24, TANDEM_FOUR(12)
#define TANDEM_REGS_40 TANDEM_REGS_32, TANDEM_FOUR(16)
#define TANDEM_REGS_48 TANDEM_REGS_40, TANDEM_FOUR(20)
#define TANDEM_REGS_56 TANDEM_REGS_48, TANDEM_FOUR(24)
#define TANDEM_REGS_64 TANDEM_REGS_56, TANDEM_FOUR(28)
#define TANDEM_REGS_72 TANDEM_REGS_64, TANDEM_FOUR(32)
#define TANDEM_REGS_80 TANDEM_REGS_72, TANDEM_FOUR(36)
#define TANDEM_REGS_88 TANDEM_REGS_80, TANDEM_FOUR(40)
#define TANDEM_REGS_96 TANDEM_REGS_88, TANDEM_FOUR(44)
#define TANDEM_REGS_104 TANDEM_REGS_96, TANDEM_FOUR(48)
#define TANDEM_REGS_112 TANDEM_REGS_104, TANDEM_FOUR(52)
#define TANDEM_REGS_120 TANDEM_REGS_112, TANDEM_FOUR(56)
#define TANDEM_REGS_128 TANDEM_REGS_120, TANDEM_FOUR(60)
#define TANDEM_REGS_136 TANDEM_REGS_128, TANDEM_FOUR(64)
#define TANDEM_REGS_144 TANDEM_REGS_136, TANDEM_FOUR(68)
#define TANDEM_REGS_152 TANDEM_REGS_144, TANDEM_FOUR(72)
#define TANDEM_REGS_160 TANDEM_REGS_152, TANDEM_FOUR(76)
#define TANDEM_REGS_168 TANDEM_REGS_160, TANDEM_FOUR(80)
#define TANDEM_REGS_176 TANDEM_REGS_168, TANDEM_FOUR(84)
#define TANDEM_REGS_184 TANDEM_REGS_176, TANDEM_FOUR(88)
#define TANDEM_REGS_192 TANDEM_REGS_184, TANDEM_FOUR(92)
#define TANDEM_REGS_200 TANDEM_REGS_192, TANDEM_FOUR(96)
#define TANDEM_REGS_208 TANDEM_REGS_200, TANDEM_FOUR(100)
#define TANDEM_REGS_216 TANDEM_REGS_208, TANDEM_FOUR(104)
#define TANDEM_REGS_224 TANDEM_REGS_216, TANDEM_FOUR(108)
#define TANDEM_REGS_232 TANDEM_REGS_224, TANDEM_FOUR(112)
#define TANDEM_REGS_240 TANDEM_REGS_232, TANDEM_FOUR(116)
#define TANDEM_REGS_248 TANDEM_REGS_240, TANDEM_FOUR(120)
#define TANDEM_REGS_256 TANDEM_REGS_248, TANDEM_FOUR(124)

// A, B and S are the numbers of the operands after the accumulators: two descriptors, from N/2 on, and `accumulate`. The
// constants: no negation, both operands K-major.
#define TANDEM_WGMMA(N, T, A, B, S)                                                                               \
    template <> DEVICE void wgmma_m64k16<T, N>(float* d, u64 desc_a, u64 desc_b, bool accumulate) {               \
        asm volatile("{\n.reg .pred scale_d;\nsetp.ne.u32 scale_d, %" #S ", 0;\n"                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" TANDEM_NAMES_##N "}, %" #A  \
                     ", %" #B ", scale_d, 1, 1, 0, 0;\n}"                                                         \
                     : TANDEM_REGS_##N                                                                            \
                     : "l"(desc_a), "l"(desc_b), "r"((u32)accumulate));                                           \
    }
#define TANDEM_WGMMA_BOTH(N, A, B, S) TANDEM_WGMMA(N, bf16, A, B, S) TANDEM_WGMMA(N, f16, A, B, S)

TANDEM_WGMMA_BOTH(8, 4, 5, 6)
TANDEM_WGMMA_BOTH(16, 8, 9, 10)
TANDEM_WGMMA_BOTH(24, 12, 13, 14)
TANDEM_WGMMA_BOTH(32, 16, 17, 18)
TANDEM_WGMMA_BOTH(40, 20, 21, 22)
TANDEM_WGMMA_BOTH(48, 24, 25, 26)
TANDEM_WGMMA_BOTH(56, 28, 29, 30)
TANDEM_WGMMA_BOTH(64, 32, 33, 34)
TANDEM_WGMMA_BOTH(72, 36, 37, 38)
TANDEM_WGMMA_BOTH(80, 40, 41, 42)
TANDEM_WGMMA_BOTH(88, 44, 45, 46)
TANDEM_WGMMA_BOTH(96, 48, 49, 50)
TANDEM_WGMMA_BOTH(104, 52, 53, 54)
TANDEM_WGMMA_BOTH(112, 56, 57, 58)
TANDEM_WGMMA_BOTH(120, 60, 61, 62)
TANDEM_WGMMA_BOTH(128, 64, 65, 66)
TANDEM_WGMMA_BOTH(136, 68, 69, 70)
TANDEM_WGMMA_BOTH(144, 72, 73, 74)
TANDEM_WGMMA_BOTH(152, 76, 77, 78)
TANDEM_WGMMA_BOTH(160, 80, 81, 82)
TANDEM_WGMMA_BOTH(168, 84, 85, 86)
TANDEM_WGMMA_BOTH(176, 88, 89, 90)
TANDEM_WGMMA_BOTH(184, 92, 93, 94)
TANDEM_WGMMA_BOTH(192, 96, 97, 98)
TANDEM_WGMMA_BOTH(200, 100, 101, 102)
TANDEM_WGMMA_BOTH(208, 104, 105, 106)
TANDEM_WGMMA_BOTH(216, 108, 109, 110)
TANDEM_WGMMA_BOTH(224, 112, 113, 114)
TANDEM_WGMMA_BOTH(232, 116, 117, 118)
TANDEM_WGMMA_BOTH(240, 120, 121, 122)
TANDEM_WGMMA_BOTH(248, 124, 125, 126)
TANDEM_WGMMA_BOTH(256, 128, 129, 130)

// d[64][N] += a[64][16] * b[16][N]: a in registers (each warp's 16 rows as mma_16816's a), b in shared memory with N
// contiguous (smem_desc_sw128_mn). Attention's weights leave the accumulators of one product as the a of the next, and
// values are stored by token: both without a copy.
template <class T, int N> DEVICE void wgmma_m64k16_ra(float* d, const u32 a[4], u64 desc_b, bool accumulate);

// A0..A3, B and S: the numbers of the operands after the accumulators. The constants: no negation, B by N.
#define TANDEM_WGMMA_RA(N, T, A0, A1, A2, A3, B, S)                                                                \
    template <> DEVICE void wgmma_m64k16_ra<T, N>(float* d, const u32 a[4], u64 desc_b, bool accumulate) {         \
        asm volatile("{\n.reg .pred scale_d;\nsetp.ne.u32 scale_d, %" #S ", 0;\n"                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" TANDEM_NAMES_##N "}, {%" #A0 \
                     ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", scale_d, 1, 1, 1;\n}"                              \
                     : TANDEM_REGS_##N                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"((u32)accumulate));             \
    }
#define TANDEM_WGMMA_RA_BOTH(N, ...) TANDEM_WGMMA_RA(N, bf16, __VA_ARGS__) TANDEM_WGMMA_RA(N, f16, __VA_ARGS__)

TANDEM_WGMMA_RA_BOTH(64, 32, 33, 34, 35, 36, 37)
TANDEM_WGMMA_RA_BOTH(128, 64, 65, 66, 67, 68, 69)
TANDEM_WGMMA_RA_BOTH(256, 128, 129, 130, 131, 132, 133)
