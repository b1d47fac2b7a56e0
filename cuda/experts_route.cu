// experts_route.cu    which experts a row uses: logits = R x + b (and the logit of a shared expert's gate), then the k largest
//
//   logits   few rows: a block an expert and 4 rows, its 8 warps side by side along d, summed in shared memory in order
//            many: a warp 8 experts x 4 rows and all of d; the 8 warps of a block share the experts' rows of R in L1
//   choose   a warp a row, E/32 neighbouring logits a lane: k rounds of a maximum over the warp
//
// in     router f32 [E][d], gate_w f32 [d] or NULL, x T [rows][ldx]; E <= 1024      out    see abi/experts.h
// launch logits: grid (E or E + 1, ceil(rows/4)), block 256, shared 128 bytes; grid (ceil(E/8), ceil(rows/32)), block 256
//        choose: grid ceil(rows/4), block 128
// loads  few: 16 bytes of R a lane and 128 columns, two steps in flight: of 2048 columns a warp has all at once
// bound  few: memory, 4*E*d bytes: 128 x 2048 is 1 MB, 0.2 us at 4.8 TB/s (H200), 1.7 us at 600 GB/s (A10), and so
//        latency: 129 blocks of 8 KB. Many: L1, 5 KB a warp and 128 columns of 8 x 4 sums, 40 clocks of a multiprocessor,
//        where their 128 fma take 32: at best four fifths of its fma rate; 4096 rows of that shape: 1.1 G fma
//        choose: k rounds of 7 shuffles and E/32 comparisons, estimated 150 clocks each
// order  a lane adds its columns in ascending order, lanes by halves, slices in ascending order: a row's bits depend on
//        the kernel and on d alone. Weights: chosen ones in their order; of all, by lane, then lanes by halves
// error  logits: (d/32 + 14) * 2^-24 * (sum |R x| + |b|), fused products. Weights: a few ulp of exp, E/32 + 6 roundings
// nan    a logit that is no number counts as -inf for the choice, and makes the weights that it is part of NaN
// oracle src/reference/experts.rs, tests/gpu/kernels/experts/
// no-spill all
// no-stack all
#include "common.cuh"

namespace route {

constexpr u32 WARPS = 8;

// ROWS x EXPERTS sums a warp, SLICES warps along d, STEPS loads of R in flight a lane and expert.
template <class T, int ROWS, int EXPERTS, u32 SLICES, u32 STEPS> DEVICE void logits(const ExpertRouteParams& p) {
    constexpr int V = ROWS * EXPERTS;
    constexpr u32 GROUPS = WARPS / SLICES; // of rows a block
    const u32 lane = lane_id(), warp = warp_id();
    const u32 slice = warp / GROUPS, group = warp % GROUPS;
    const u32 row0 = (blockIdx.y * GROUPS + group) * ROWS, expert0 = blockIdx.x * EXPERTS;
    const u32 experts = p.experts + (p.gate_w ? 1 : 0);

    // Beyond the ends the last row and expert are computed again, and not stored.
    const float* w[EXPERTS];
    const T* x[ROWS];
#pragma unroll
    for (int e = 0; e < EXPERTS; e++) {
        const u32 expert = min(expert0 + e, experts - 1);
        w[e] = (expert < p.experts ? p.router + (u64)expert * p.d : p.gate_w) + 4 * lane;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) x[r] = (const T*)p.x + ((u64)min(row0 + r, p.rows - 1) * p.ldx + 4 * lane);

    float acc[ROWS][EXPERTS] = {};
#pragma unroll 1
    for (u32 k = 128 * slice; k < p.d; k += 128 * SLICES * STEPS) {
        uint4 a[STEPS][EXPERTS];
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
            const u32 at = k + 128 * SLICES * s;
            const bool in = at + 4 * lane < p.d;
#pragma unroll
            for (int e = 0; e < EXPERTS; e++) {
                a[s][e] = make_uint4(0, 0, 0, 0);
                if (in) a[s][e] = SLICES > 1 ? ld_stream_16(w[e] + at) : ld_16(w[e] + at);
            }
        }
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
            const u32 at = k + 128 * SLICES * s;
            const bool in = at + 4 * lane < p.d;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                uint2 b = make_uint2(0, 0);
                if (in) b = *(const uint2*)(x[r] + at);
                const float2 lo = unpack2<T>(b.x), hi = unpack2<T>(b.y);
#pragma unroll
                for (int e = 0; e < EXPERTS; e++) {
                    float sum = fmaf(__uint_as_float(a[s][e].x), lo.x, acc[r][e]);
                    sum = fmaf(__uint_as_float(a[s][e].y), lo.y, sum);
                    sum = fmaf(__uint_as_float(a[s][e].z), hi.x, sum);
                    acc[r][e] = fmaf(__uint_as_float(a[s][e].w), hi.y, sum);
                }
            }
        }
    }

    float v[V];
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = acc[i / EXPERTS][i % EXPERTS];
    float sum = warp_sum_each(v);
    u32 which = lane / (32 / V);
    bool stores = lane % (32 / V) == 0;
    if (SLICES > 1) {
        SHARED_DYNAMIC(smem);
        float* sums = (float*)smem; // [slice][group][sum]
        if (stores) sums[(slice * GROUPS + group) * V + which] = sum;
        __syncthreads();
        which = lane;
        stores = slice == 0 && lane < V;
        sum = 0.0f;
        if (stores)
            for (u32 s = 0; s < SLICES; s++) sum += sums[(s * GROUPS + group) * V + which];
    }
    const u32 row = row0 + which / EXPERTS, expert = expert0 + which % EXPERTS;
    if (!stores || row >= p.rows || expert >= experts) return;
    if (expert < p.experts) {
        p.logits[(u64)row * p.experts + expert] = p.bias ? sum + p.bias[expert] : sum;
    } else {
        p.gate[row] = sum;
    }
}

// A larger logit has a larger key, and -0 that of 0. No logit's key is 0.
DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x != x ? NEG_INF : x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// V logits a lane.
template <int V> DEVICE void choose(const ExpertChooseParams& p) {
    const u32 lane = lane_id(), row = blockIdx.x * (blockDim.x / 32) + warp_id();
    if (row >= p.rows) return;
    const float* logits = p.logits + (u64)row * p.experts;
    float x[V];
    u32 key[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const u32 i = lane * V + v;
        x[v] = i < p.experts ? logits[i] : NEG_INF;
        key[v] = i < p.experts ? key_of(x[v]) : 0;
    }

    float most = 0.0f, total = 0.0f;
    u32* ids = p.ids + (u64)row * p.used;
    float* weights = p.weights + (u64)row * p.used;
    for (u32 j = 0; j < p.used; j++) {
        u32 best = 0, at = 0;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (key[v] > best) best = key[v], at = v;
        u32 top = best;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) top = max(top, __shfl_xor_sync(~0u, top, d));
        // The first of the lanes with it has the lowest index.
        const u32 owner = __ffs((i32)__ballot_sync(~0u, best == top)) - 1;
        const u32 id = __shfl_sync(~0u, lane * V + at, (int)owner);
#pragma unroll
        for (int v = 0; v < V; v++)
            if (lane == owner && v == at) key[v] = 0;
        const float logit = logits[id];
        if (j == 0) most = logit;
        const float e = expf(logit - most);
        total += e;
        if (lane == j % 32) {
            ids[j] = id;
            weights[j] = e;
        }
    }
    if (p.of_all) {
        total = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (lane * V + v < p.experts) total += expf(x[v] - most);
        total = warp_sum(total);
    }
    for (u32 j = lane; j < p.used; j += 32) weights[j] /= total; // what this lane wrote
}

} // namespace route

KERNEL_BOUNDS(experts_logits_f16_few, ExpertRouteParams, 256, 2) { route::logits<f16, 4, 1, 8, 2>(p); }
KERNEL_BOUNDS(experts_logits_f16_many, ExpertRouteParams, 256, 2) { route::logits<f16, 4, 8, 1, 1>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(experts_logits_bf16_few, ExpertRouteParams, 256, 2) { route::logits<bf16, 4, 1, 8, 2>(p); }
KERNEL_BOUNDS(experts_logits_bf16_many, ExpertRouteParams, 256, 2) { route::logits<bf16, 4, 8, 1, 1>(p); }
#endif

// Names: the most experts.
KERNEL_BOUNDS(experts_choose_128, ExpertChooseParams, 128, 1) { route::choose<4>(p); }
KERNEL_BOUNDS(experts_choose_256, ExpertChooseParams, 128, 1) { route::choose<8>(p); }
KERNEL_BOUNDS(experts_choose_1024, ExpertChooseParams, 128, 1) { route::choose<32>(p); }
