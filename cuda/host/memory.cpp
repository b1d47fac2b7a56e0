// memory.cpp    registering memory, and which of its bytes were ever written
#include "memory.h"

#include <algorithm>
#include <mutex>

#include "api.h"

namespace emu {

static std::mutex& regions_mutex() {
    static std::mutex mutex;
    return mutex;
}
static std::shared_ptr<const Regions>& current_regions() {
    static std::shared_ptr<const Regions> regions = std::make_shared<Regions>();
    return regions;
}

std::shared_ptr<const Regions> live_regions() {
    std::lock_guard<std::mutex> guard(regions_mutex());
    return current_regions();
}

const Region* region_before(const Regions& regions, const void* at) {
    auto after = std::upper_bound(regions.begin(), regions.end(), at, [](const void* a, const Region& r) { return a < (const void*)r.base; });
    return after == regions.begin() ? nullptr : &*(after - 1);
}

// Calls f(word, mask) for the words that hold bits [offset, offset + bytes); stops when it returns false.
template <class F> static bool for_words(size_t offset, size_t bytes, F f) {
    while (bytes) {
        size_t bit = offset % 64, take = std::min(bytes, 64 - bit);
        u64 mask = (take == 64 ? ~0ull : (1ull << take) - 1) << bit;
        if (!f(offset / 64, mask)) return false;
        offset += take, bytes -= take;
    }
    return true;
}

void Initialised::mark(size_t offset, size_t bytes, bool written) {
    if (written && complete.load(std::memory_order_relaxed)) return;
    if (!written && complete.load(std::memory_order_relaxed)) {
        for (auto& word : bits) word.store(~0ull, std::memory_order_relaxed);
        complete = false;
    }
    // Other launches may mark neighbours at the same time; most words are already right and cost a load.
    for_words(offset, bytes, [&](size_t word, u64 mask) {
        u64 now = bits[word].load(std::memory_order_relaxed);
        if (written && (now & mask) != mask) bits[word].fetch_or(mask, std::memory_order_relaxed);
        if (!written && (now & mask)) bits[word].fetch_and(~mask, std::memory_order_relaxed);
        return true;
    });
}

bool Initialised::all(size_t offset, size_t bytes) const {
    if (complete.load(std::memory_order_relaxed)) return true;
    return for_words(offset, bytes, [&](size_t word, u64 mask) { return (bits[word].load(std::memory_order_relaxed) & mask) == mask; });
}

// The region that holds all of [at, at + bytes), with the offset in it.
static const Region* holder(const Regions& regions, const void* at, size_t bytes, size_t& offset) {
    const Region* region = region_before(regions, at);
    if (!region) return nullptr;
    offset = (size_t)((const u8*)at - region->base);
    return offset <= region->bytes && bytes <= region->bytes - offset ? region : nullptr;
}

static void mark(void* at, size_t bytes, bool written) {
    auto regions = live_regions();
    size_t offset;
    const Region* region = holder(*regions, at, bytes, offset);
    if (!region || !region->initialised) return;
    if (written && bytes == region->bytes)
        region->initialised->complete = true;
    else
        region->initialised->mark(offset, bytes, written);
}

} // namespace emu

using namespace emu;

extern "C" void tandem_emu_register(void* base, size_t len, int initialised) {
    Region region{static_cast<u8*>(base), len, std::make_shared<Initialised>(len)};
    region.initialised->complete = initialised != 0;
    std::lock_guard<std::mutex> guard(regions_mutex());
    auto changed = std::make_shared<Regions>(*current_regions());
    auto place = std::lower_bound(changed->begin(), changed->end(), region, [](const Region& a, const Region& b) { return a.base < b.base; });
    if (place != changed->end() && place->base == region.base)
        *place = std::move(region);
    else
        changed->insert(place, std::move(region));
    current_regions() = std::move(changed);
}

extern "C" void tandem_emu_unregister(void* base) {
    std::lock_guard<std::mutex> guard(regions_mutex());
    auto changed = std::make_shared<Regions>();
    for (const Region& region : *current_regions())
        if (region.base != base) changed->push_back(region);
    current_regions() = std::move(changed);
}

extern "C" void tandem_emu_mark_initialised(void* at, size_t len) { mark(at, len, true); }
extern "C" void tandem_emu_mark_uninitialised(void* at, size_t len) { mark(at, len, false); }

extern "C" int tandem_emu_is_initialised(const void* at, size_t len) {
    auto regions = live_regions();
    size_t offset;
    const Region* region = holder(*regions, at, len, offset);
    return region && region->initialised->all(offset, len);
}
