// logits.cu    what the host wants of a row of logits without reading it all: the k greatest, and log sum exp
//
//   softcap         x = cap * tanh(x / cap), in place
//   logits_spans    a warp a span of 1024 logits: its k greatest, its greatest m and sum of e^(x - m)
//   logits_merge    a block a row: the same of all spans, in the order of the spans
//
// in     logits[rows][ld] f32, any vocabulary; k <= 64; greedy decoding is k = 1
// out    indices[rows][k] (greatest first; of equals, and -0 equals 0, the lowest index; NaN below everything),
//        values[rows][k], logsumexp[rows] (NaN if any logit is)
// launch softcap grid (rows, ceil(vocab/1024)), block 256; spans grid (rows, ceil(spans/4)), block 128;
//        merge grid rows, block 32 * warps (warps by spans * k), k * 8 bytes of shared memory a warp
// registers a lane holds 32 candidates as 64-bit keys (64 registers): the order of floats above, the complement of
//        the index below, so all keys differ and "greatest key" is the whole rule
// bound  memory: 4 bytes a logit, read once; k rounds of a warp's maximum (5 shuffles) for top-k
// error  indices and values exact; logsumexp: (vocab/1024 + 16) eps + 4 eps |x - m| where it matters (<= 1)
// oracle src/reference/{reduce,softmax,activation}.rs
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace logits {

constexpr u32 WARPS = 4;          // spans of a block
constexpr int HELD = 32;          // candidates of a lane
constexpr u32 ROOM = 32 * HELD;   // of a warp
constexpr float LOG2_E = 1.44269504088896341f;

static_assert(LOGITS_SPAN == ROOM, "a warp holds a span");

// A greater key is a better candidate. No candidate: 0. NaN: above nothing else.
DEVICE u64 key_of(float x, u32 index) {
    u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
    u32 order = x != x ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | ~index;
}
DEVICE u32 index_of(u64 key) { return ~(u32)key; }

DEVICE u64 warp_max_key(u64 key) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        u64 other = (u64)__shfl_xor_sync(~0u, (u32)(key >> 32), d) << 32 | __shfl_xor_sync(~0u, (u32)key, d);
        key = key > other ? key : other;
    }
    return key;
}

// The k greatest of the warp's keys to `out`, greatest first. Keys differ, so each round only the lane that held
// the winner looks for its next one: the greatest below it.
DEVICE void warp_top_k(const u64 (&keys)[HELD], u32 k, u64* out) {
    u64 mine = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) mine = keys[j] > mine ? keys[j] : mine;
    for (u32 n = 0; n < k; n++) {
        u64 top = warp_max_key(mine);
        if (lane_id() == 0) out[n] = top;
        if (mine == top) {
            mine = 0;
#pragma unroll
            for (int j = 0; j < HELD; j++) mine = keys[j] < top && keys[j] > mine ? keys[j] : mine;
        }
    }
}

// e^(x - m) for m >= x; 1 where they are equal, infinities too. exp2f, not __expf: e to the last bits.
DEVICE float exp_below(float x, float m) { return x == m ? 1.0f : exp2f((x - m) * LOG2_E); }

DEVICE void spans(const LogitsReduceParams& p) {
    u64 row = blockIdx.x;
    u32 span = blockIdx.y * WARPS + warp_id();
    if (span >= p.spans) return;
    const float* from = p.logits + row * p.ld;
    bool aligned = p.ld % 4 == 0;

    float x[HELD];
    u32 base = span * LOGITS_SPAN + lane_id() * 4;
#pragma unroll
    for (int v = 0; v < HELD / 4; v++) {
        u32 i = base + v * 128;
        if (aligned && i + 4 <= p.vocab) {
            uint4 four = ld_stream_16(from + i);
            x[4 * v] = __uint_as_float(four.x), x[4 * v + 1] = __uint_as_float(four.y);
            x[4 * v + 2] = __uint_as_float(four.z), x[4 * v + 3] = __uint_as_float(four.w);
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; j++) x[4 * v + j] = i + j < p.vocab ? from[i + j] : NEG_INF;
        }
    }

    float most = NEG_INF;
#pragma unroll
    for (int j = 0; j < HELD; j++) most = fmaxf(most, x[j]);
    most = warp_max(most);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) sum += exp_below(x[j], most);
    sum = warp_sum(sum);
    if (lane_id() == 0) *(float2*)(p.sums + (row * p.spans + span) * 2) = make_float2(most, sum);

    u64 keys[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        u32 i = base + j / 4 * 128 + j % 4;
        keys[j] = i < p.vocab ? key_of(x[j], i) : 0;
    }
    warp_top_k(keys, p.k, p.keys + (row * p.spans + span) * p.k);
}

// One warp, in an order that depends on the number of spans alone.
DEVICE float log_sum_exp(const float2* spans, u32 n) {
    float most = NEG_INF, sum = 0;
    for (u32 i = lane_id(); i < n; i += 32) most = fmaxf(most, spans[i].x);
    most = warp_max(most);
    for (u32 i = lane_id(); i < n; i += 32) sum += spans[i].y * exp_below(spans[i].x, most);
    return most + logf(warp_sum(sum));
}

DEVICE void merge(const LogitsReduceParams& p, u64* best) {
    u64 row = blockIdx.x;
    u32 n = p.spans * p.k, warps = blockDim.x / 32;
    const u64* from = p.keys + row * n;
    u64 keys[HELD];
    // Each warp: what it kept so far in the first places, candidates in the others, until there are no more.
    u64* kept = best + warp_id() * p.k;
    bool first = true;
    for (u32 start = warp_id() * (ROOM - LOGITS_MAX_K); start < n; start += warps * (ROOM - LOGITS_MAX_K)) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            u32 place = j * 32 + lane_id(), i = start + place - LOGITS_MAX_K;
            if (place < LOGITS_MAX_K)
                keys[j] = !first && place < p.k ? kept[place] : 0;
            else
                keys[j] = i < n ? from[i] : 0;
        }
        __syncwarp();
        warp_top_k(keys, p.k, kept);
        __syncwarp();
        first = false;
    }
    __syncthreads();
    if (warp_id() != 0) return;
    // A warp whose start lay behind the end kept nothing.
    u32 filled = min(warps, ceil_div(n, ROOM - LOGITS_MAX_K)) * p.k;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        u32 place = j * 32 + lane_id();
        keys[j] = place < filled ? best[place] : 0;
    }
    __syncwarp();
    warp_top_k(keys, p.k, best);
    __syncwarp();
    for (u32 i = lane_id(); i < p.k; i += 32) {
        u32 index = index_of(best[i]);
        p.indices[row * p.k + i] = index;
        if (p.values) p.values[row * p.k + i] = p.logits[row * p.ld + index];
    }
    if (p.logsumexp) {
        float lse = log_sum_exp((const float2*)p.sums + row * p.spans, p.spans);
        if (lane_id() == 0) p.logsumexp[row] = lse;
    }
}

DEVICE void cap(const SoftcapParams& p) {
    float* row = p.logits + (u64)blockIdx.x * p.ld;
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (p.ld % 4 == 0 && i + 4 <= p.vocab) {
        float4 v = *(float4*)(row + i);
        *(float4*)(row + i) = make_float4(p.cap * tanhf(v.x / p.cap), p.cap * tanhf(v.y / p.cap), p.cap * tanhf(v.z / p.cap),
                                          p.cap * tanhf(v.w / p.cap));
    } else {
        for (u32 j = i; j < min(i + 4, p.vocab); j++) row[j] = p.cap * tanhf(row[j] / p.cap);
    }
}

} // namespace logits

KERNEL_BOUNDS(softcap, SoftcapParams, 256, 1) { logits::cap(p); }
KERNEL_BOUNDS(logits_spans, LogitsReduceParams, 128, 1) { logits::spans(p); }
KERNEL_BOUNDS(logits_merge, LogitsReduceParams, 512, 1) {
    SHARED_DYNAMIC(smem);
    logits::merge(p, (u64*)smem);
}
