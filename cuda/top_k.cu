// top_k.cu    what a sampler wants of a row of logits: the TOP_K greatest with their tokens, and how much all weigh
//
//   1  every thread finds the greatest of its logits. The TOP_K-th of these is a bound: at least TOP_K logits are not
//      below it, so the TOP_K greatest of the row are not
//   2  all logits not below it are collected (some 300 of a real row), and sum += e^(factor * (x - greatest))
//   3  these are sorted
//
// in     logits[rows][ld] f32, any vocabulary; a factor for each row, in the parameters
// out    for each row values[TOP_K] f32, tokens[TOP_K], the sum, 3 unused words. Greatest first, by the total order of
//        floats (-0 below 0); of equal bits the lowest token; NaN below everything. A shorter vocabulary leaves tokens
//        ~0 at the end. The sum is NaN if a logit is NaN, the greatest infinite, none finite, or the factor infinite
// launch grid rows <= TOP_ROWS, block 1024, shared ROOM * 8 + 128 bytes
// bound  memory: 4 bytes a logit, twice (the second time from the level-two cache); a row is one block's, some 10 us
// ties   where more than ROOM logits are not below the bound (thousands of equal ones), it is bisected by whole passes:
//        keys are all different, so a bound that leaves TOP_K to ROOM of them exists. 64 passes at the very most
// error  values and tokens exact. Sum: (4 ln(vocab) + vocab/1024 + 24) 2^-24, of itself: a term is off by four roundings
//        of its exponent, which is ln(vocab) in the mean that the sum is, and by 2 ulp of exp2
// oracle src/text/sampler.rs, by sorting
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace top_k {

constexpr u32 THREADS = 1024;
constexpr u32 ROOM = 2048;       // keys that are sorted at most
constexpr int BATCH = 4;         // loads of 16 bytes that a thread has in flight
constexpr u32 NONE = ~0u;
constexpr float LOG2_E = 1.44269504088896341f;

static_assert(TOP_K <= THREADS, "the bound is one of the threads' greatest");

// A greater key is a better candidate; no two logits of a row have the same. Nothing: 0.
DEVICE u64 key_of(float x, u32 token) {
    u32 bits = __float_as_uint(x);
    u32 order = x != x ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | ~token;
}
DEVICE u32 token_of(u64 key) { return ~(u32)key; }
DEVICE float value_of(u64 key) {
    u32 order = (u32)(key >> 32);
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// f(logit, token) of this thread's logits, in the order of their tokens.
template <class F> DEVICE void each(const TopKParams& p, const float* row, F f) {
    bool aligned = p.ld % 4 == 0;
    for (u32 base = threadIdx.x * 4; base < p.vocab; base += BATCH * THREADS * 4) {
        float x[BATCH * 4];
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            u32 i = base + b * THREADS * 4;
            if (aligned && i + 4 <= p.vocab) {
                uint4 four = ld_stream_16(row + i);
                x[4 * b] = __uint_as_float(four.x), x[4 * b + 1] = __uint_as_float(four.y);
                x[4 * b + 2] = __uint_as_float(four.z), x[4 * b + 3] = __uint_as_float(four.w);
            } else {
#pragma unroll
                for (u32 j = 0; j < 4; j++) x[4 * b + j] = i + j < p.vocab ? row[i + j] : NEG_INF;
            }
        }
#pragma unroll
        for (u32 e = 0; e < BATCH * 4; e++) {
            u32 i = base + e / 4 * THREADS * 4 + e % 4;
            if (i < p.vocab) f(x[e], i);
        }
    }
}

// Sorts a power of two of keys, greatest first (bitonic). Barriers before and after are the caller's and its own.
DEVICE void sort(u64* keys, u32 n) {
    for (u32 run = 2; run <= n; run *= 2) {
        for (u32 apart = run / 2; apart > 0; apart /= 2) {
            for (u32 t = threadIdx.x; t < n / 2; t += THREADS) {
                u32 i = 2 * t - (t & (apart - 1)), j = i + apart;
                u64 a = keys[i], b = keys[j];
                if ((a < b) == ((i & run) == 0)) keys[i] = b, keys[j] = a;
            }
            __syncthreads();
        }
    }
}

struct Shared {
    u64* keys;        // [ROOM]
    float* scratch;   // [32]; its first word counts between sums
};

// Collects the keys from `bound` on, as many as there is room for, in any order. Returns how many there are.
template <class F> DEVICE u32 collect(const TopKParams& p, const float* row, const Shared& s, u64 bound, F also) {
    u32* found = (u32*)s.scratch;
    __syncthreads();
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
    each(p, row, [&](float x, u32 token) {
        also(x);
        u64 key = key_of(x, token);
        if (key < bound) return;
        u32 at = atomicAdd(found, 1u);
        if (at < ROOM) s.keys[at] = key;
    });
    __syncthreads();
    return *found;
}

DEVICE void top(const TopKParams& p, const Shared& s) {
    const float* row = p.logits + (u64)blockIdx.x * p.ld;
    float most = NEG_INF;
    u32 at = NONE;
    each(p, row, [&](float x, u32 token) {
        if (x > most) most = x, at = token;
    });
    s.keys[threadIdx.x] = at == NONE ? 0 : key_of(most, at);
    __syncthreads();
    sort(s.keys, THREADS);
    u64 bound = s.keys[TOP_K - 1], first = s.keys[0];
    most = first ? value_of(first) : NEG_INF;

    float sum = 0, factor = p.factors[blockIdx.x];
    u32 n = collect(p, row, s, bound, [&](float x) { sum += exp2f((x - most) * factor * LOG2_E); });
    u64 above = ~0ull;
    // At first too many: from then on too many from `bound` on, and too few from `above` on.
    while (n > ROOM || n < min(TOP_K, p.vocab)) {
        u64 middle = bound + (above - bound) / 2;
        n = collect(p, row, s, middle, [](float) {});
        if (n > ROOM) bound = middle;
        else if (n < TOP_K) above = middle;
    }
    __syncthreads();
    u32 sorted = TOP_K;
    while (sorted < n) sorted *= 2;
    for (u32 i = n + threadIdx.x; i < sorted; i += THREADS) s.keys[i] = 0;
    __syncthreads();
    sort(s.keys, sorted);

    float* values = p.out + (u64)blockIdx.x * TOP_WORDS;
    for (u32 i = threadIdx.x; i < TOP_K; i += THREADS) {
        u64 key = s.keys[i];
        values[i] = value_of(key);
        ((u32*)values)[TOP_K + i] = token_of(key);
    }
    sum = block_sum(sum, s.scratch);
    if (threadIdx.x < 4) values[2 * TOP_K + threadIdx.x] = threadIdx.x == 0 ? sum : 0.0f;
}

} // namespace top_k

KERNEL_BOUNDS(logits_top_k, TopKParams, 1024, 1) {
    SHARED_DYNAMIC(smem);
    top_k::top(p, top_k::Shared{(u64*)smem, (float*)(smem + top_k::ROOM * 8)});
}
