// memory.h    the memory that kernels may touch, as the accelerator registered it
#pragma once

#include "../include/ptx.cuh"

#include <atomic>
#include <memory>
#include <vector>

namespace emu {

// One bit a byte: was it ever written? Bits are only looked at until all are set (`complete`).
struct Initialised {
    std::atomic<bool> complete{false};
    std::vector<std::atomic<u64>> bits;
    explicit Initialised(size_t bytes) : bits((bytes + 63) / 64) {}
    void mark(size_t offset, size_t bytes, bool written);
    bool all(size_t offset, size_t bytes) const;
};

struct Region {
    u8* base;
    size_t bytes;
    std::shared_ptr<Initialised> initialised;
};
// Sorted by base; never changed, only replaced: a launch keeps the one it began with.
using Regions = std::vector<Region>;

std::shared_ptr<const Regions> live_regions();
// The region that holds `at`, or the last one that begins before it (nullptr: none does).
const Region* region_before(const Regions& regions, const void* at);

// The regions a launch used last: kernels have a handful of operands.
struct RegionCache {
    const Region* recent[8];
    u32 next;
};

} // namespace emu
