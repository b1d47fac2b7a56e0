// experts_sort.cu    places of all choices sorted by expert, and groups of at most M places of one expert
//
//   1  a warp counts a chunk of neighbouring choices, 32 at a time: lanes with the same expert find each other by ballots,
//      so that a choice's rank in its chunk is known and no two lanes ever count at once
//   2  a thread an expert: ranks of chunks add up, then prefix sums over the experts of places and of groups
//   3  place = the expert's first + that of the chunk + the rank in it; a thread a group finds its expert by bisection
//
// One stable counting sort: places ascend by expert, within an expert by row and choice, whatever the number of warps.
// Choices of experts that are elsewhere (slots) get no place.
//
// in     ids[choices] <= 65536 choices, experts <= 1024, slots[experts] or NULL      out    places, rows, groups, see abi/experts.h
// launch one block: of max(128, experts) threads up to 512 choices, else of 1024 threads
//        shared 4*(4 experts + 64) + 2*experts*warps bytes: 3 KiB for 128 experts and few choices, at most 49 KiB
// bound  latency. Few choices (decode: 8 to 512): a load of the ids, ten ballots a warp, two scans of a load, five
//        shuffles and a barrier: estimated 2000 clocks, 1.2 us. Many: 64 rounds of a warp for 65536 choices, each a load,
//        ten ballots and a count in shared memory, then as many independent rounds: estimated 50 us, where the products
//        of these rows take milliseconds. Nothing here was measured yet
// order  exact; no atomics
// oracle a sort, tests/gpu/kernels/experts/
// no-spill all
// no-stack all
#include "common.cuh"

namespace sort {

struct Shared {
    u32* first;   // [experts] first place, or EXPERT_NONE
    u32* count;   // [experts] places
    u32* group;   // [experts] first group
    u32* slot;    // [experts]
    u32* sums;    // [2][32] places and groups of each warp's experts
    u16* ranks;   // [warps][experts] choices of each chunk, then those of the chunks before
};

// Lanes whose expert is this lane's. `in`: it has one.
DEVICE u32 peers(u32 expert, bool in, u32 experts) {
    u32 same = __ballot_sync(~0u, in);
    for (u32 bit = 1; bit < experts; bit *= 2) {
        const bool set = expert & bit;
        const u32 with = __ballot_sync(~0u, in && set);
        same &= set ? with : ~with;
    }
    return same;
}

// Counts this warp's chunk. `places` gets each choice's rank among those of its expert in the chunk.
DEVICE void count(const ExpertSortParams& p, u16* ranks) {
    const u32 lane = lane_id(), begin = warp_id() << p.chunk_log2;
    const u32 end = min(begin + (1u << p.chunk_log2), p.choices);
    for (u32 base = begin; base < end; base += 32) {
        const u32 i = base + lane;
        const u32 expert = i < end ? p.ids[i] : EXPERT_NONE;
        const bool in = expert < p.experts;
        const u32 same = peers(expert, in, p.experts);
        const u32 below = __popc(same & ((1u << lane) - 1));
        const u32 before = in ? ranks[expert] : 0;
        __syncwarp(); // all have read the count
        if (in && below == 0) ranks[expert] = (u16)(before + __popc(same));
        __syncwarp(); // and see the new one
        if (in) p.places[i] = before + below;
    }
}

// Exclusive prefix sums of two values over the block, and their totals. All threads call it.
DEVICE void scan(u32* sums, u32& a, u32& b, u32& total_a, u32& total_b) {
    const u32 lane = lane_id(), warp = warp_id(), warps = block_threads() / 32;
    u32 up_to_a = a, up_to_b = b;
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 from_a = __shfl_up_sync(~0u, up_to_a, d), from_b = __shfl_up_sync(~0u, up_to_b, d);
        if (lane >= d) up_to_a += from_a, up_to_b += from_b;
    }
    if (lane == 31) sums[warp] = up_to_a, sums[32 + warp] = up_to_b;
    __syncthreads();
    u32 before_a = 0, before_b = 0;
    total_a = total_b = 0;
    for (u32 w = 0; w < warps; w++) {
        if (w == warp) before_a = total_a, before_b = total_b;
        total_a += sums[w];
        total_b += sums[32 + w];
    }
    a = before_a + up_to_a - a;
    b = before_b + up_to_b - b;
}

DEVICE void sort(const ExpertSortParams& p, const Shared& s) {
    const u32 thread = thread_rank(), threads = block_threads();
    // Early: it is long on its way.
    u32 slot = EXPERT_NONE;
    if (thread < p.experts) slot = p.slots ? p.slots[thread] : thread;
    for (u32 i = thread; i < p.warps * p.experts; i += threads) s.ranks[i] = 0;
    __syncthreads();
    if (warp_id() < p.warps) count(p, s.ranks + warp_id() * p.experts);
    __syncthreads();

    u32 places = 0;
    if (thread < p.experts) {
        for (u32 w = 0; w < p.warps; w++) {
            u16& rank = s.ranks[w * p.experts + thread];
            const u32 n = rank;
            rank = (u16)places;
            places += n;
        }
        if (slot == EXPERT_NONE) places = 0;
        s.count[thread] = places;
        s.slot[thread] = slot;
    }
    u32 groups = ceil_div(places, p.tokens), all_places, all_groups;
    scan(s.sums, places, groups, all_places, all_groups);
    if (thread < p.experts) {
        s.first[thread] = slot == EXPERT_NONE ? EXPERT_NONE : places;
        s.group[thread] = groups;
    }
    __syncthreads();

    for (u32 i = thread; i < p.choices; i += threads) {
        const u32 expert = p.ids[i];
        const u32 first = expert < p.experts ? s.first[expert] : EXPERT_NONE;
        u32 place = EXPERT_NONE;
        if (first != EXPERT_NONE) {
            place = first + s.ranks[(i >> p.chunk_log2) * p.experts + expert] + p.places[i];
            p.rows[place] = i / p.used;
        }
        p.places[i] = place;
    }
    for (u32 i = all_places + thread; i < p.choices; i += threads) p.rows[i] = EXPERT_NONE;
    for (u32 g = thread; g < p.capacity; g += threads) {
        uint4 group = make_uint4(0, 0, 0, 0);
        if (g < all_groups) {
            // The last expert whose first group is not behind this one: those before it that have none begin there, too.
            u32 low = 0, high = p.experts;
            while (high - low > 1) {
                const u32 middle = (low + high) / 2;
                if (s.group[middle] <= g) low = middle;
                else high = middle;
            }
            const u32 done = (g - s.group[low]) * p.tokens;
            group = make_uint4(s.slot[low], s.first[low] + done, min(s.count[low] - done, p.tokens), 0);
        }
        *(uint4*)(p.groups + g) = group;
    }
}

} // namespace sort

KERNEL_BOUNDS(experts_sort, ExpertSortParams, 1024, 1) {
    SHARED_DYNAMIC(smem);
    u32* words = (u32*)smem;
    const u32 n = p.experts;
    sort::sort(p, sort::Shared{words, words + n, words + 2 * n, words + 3 * n, words + 4 * n, (u16*)(words + 4 * n + 64)});
}
