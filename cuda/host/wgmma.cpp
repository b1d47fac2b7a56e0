// wgmma.cpp    matrix products of a warpgroup, asynchronous, operands in shared memory or a in registers (sm_90a)
//
// Warp w of the four computes rows 16 * (w % 4) .. + 16 of d[64][n] += a[64][16] * b[n][16]^T, without `accumulate`
// d = a * b^T. Operands in shared memory count as read at both ends: whoever overwrites them in between is reported. The
// launch says whether the values are taken at issue, at the wait or at random.
//
// Registers are the tensor cores' from wgmma_fence to the wait: a product whose registers were not fenced, or changed
// since, is reported (but for accumulators that an earlier product still holds). From issue to wait accumulators are NaN
// to the kernel; at the wait these and a must be as they were left. Discarded accumulators hold a NaN of their own, and
// a product that would add to it is reported.
//
// Operands are K-major, rows of 128 bytes in groups of eight, swizzled by 128 bytes (see tma.cpp):
//   element (r, k) at start + r / 8 * stride + r % 8 * 128 + k * 2, then the chunk xor the line.
// With a in registers (mma's fragment of each warp's 16 rows), b is MN-major: rows of 64 n, eight k a group, blocks
// of 64 n `leading` bytes apart:
//   element (n, k) at start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2, then the chunk xor the line.
#include "machine.h"

#include <algorithm>
#include <cstring>

namespace emu {

struct Operand {
    u32 start, stride, leading; // bytes; start within the window of shared memory
};

static Operand decode(u64 descriptor, u32 rows, const char* which, Site site, bool by_n = false) {
    Operand o = {(u32)(descriptor & 0x3fff) * 16, (u32)(descriptor >> 32 & 0x3fff) * 16, (u32)(descriptor >> 16 & 0x3fff) * 16};
    if (descriptor >> 62 != 1) fail(site, "wgmma: operand %s is not swizzled by 128 bytes", which);
    if (descriptor >> 49 & 7) fail(site, "wgmma: operand %s with a base offset", which);
    if (o.start & 0x380) fail(site, "wgmma: operand %s begins at byte %u, not in the first row of a 1024-byte pattern", which, o.start);
    if ((o.start & 0x7f) + 32 > 128) fail(site, "wgmma: operand %s begins at byte %u of its 128-byte rows", which, o.start & 0x7f);
    if (by_n && (o.start & 0x7f)) fail(site, "wgmma: operand %s begins at byte %u of its 128-byte rows", which, o.start & 0x7f);
    u32 end = o.start + (by_n ? (rows / 64 - 1) * o.leading + o.stride : (rows / 8 - 1) * o.stride) + 1024 - (o.start & 0x7f);
    if (o.start < SHARED_WINDOW || end > SHARED_WINDOW + machine->shared_bytes)
        fail(site, "wgmma: operand %s is bytes %u to %u of a block's %u of shared memory", which, o.start - SHARED_WINDOW, end - SHARED_WINDOW,
             machine->shared_bytes);
    return o;
}

// Where the 16-byte half (of 16 columns) `half` of row `row` lies in shared memory.
static u32 place(const Operand& o, u32 row, u32 half) {
    u32 at = o.start + row / 8 * o.stride + row % 8 * 128 + half * 16;
    return (at ^ (at / 128 % 8 * 16)) - SHARED_WINDOW;
}

// The same by N: where the 8 n from 8 * chunk on lie, of row k.
static u32 place_by_n(const Operand& o, u32 chunk, u32 k) {
    u32 at = o.start + chunk / 8 * o.leading + k / 8 * o.stride + k % 8 * 128 + chunk % 8 * 16;
    return (at ^ (at / 128 % 8 * 16)) - SHARED_WINDOW;
}

static void check_operand(u32 offset, const Thread& reader, Site site) {
    check_shared(offset, 16, Access::READ, stamp_of(reader), site);
    require_fenced(offset, 16, site);
}

static void check_reads(const Product& p, Site site) {
    if (!machine->config.checks) return;
    const Thread& first = machine->threads[self->warp * 32]; // the whole warp reads; one lane stands for it
    if (p.a_in_registers) {
        Operand b = decode(p.b, p.n, "b", site, true);
        for (u32 k = 0; k < 16; k++)
            for (u32 chunk = 0; chunk < p.n / 8; chunk++) check_operand(place_by_n(b, chunk, k), first, site);
        return;
    }
    Operand a = decode(p.a, 64, "a", site), b = decode(p.b, p.n, "b", site);
    u32 row = self->warp % 4 * 16;
    for (u32 half = 0; half < 2; half++) {
        for (u32 r = 0; r < 16; r++) check_operand(place(a, row + r, half), first, site);
        for (u32 r = 0; r < p.n; r++) check_operand(place(b, r, half), first, site);
    }
}

__attribute__((target_clones("arch=haswell", "default"))) static void multiply(float* c, const float (*a)[16], const float* b, u32 n) {
    for (u32 m = 0; m < 16; m++)
        for (u32 k = 0; k < 16; k++)
            for (u32 j = 0; j < n; j++) c[m * n + j] += a[m][k] * b[k * n + j];
}

static float widen(u16 v, bool is_bf16) { return is_bf16 ? bf16_to_f32(v) : f16_to_f32(v); }

static void load_row(float* to, u32 step, const Operand& o, u32 row, bool is_bf16) {
    for (u32 k = 0; k < 16; k++) {
        u16 v;
        memcpy(&v, machine->shared + place(o, row, k / 8) + k % 8 * 2, 2);
        to[k * step] = widen(v, is_bf16);
    }
}

static void compute(ProductQueue& queue, Product& p, Site site) {
    if (p.done) return;
    Operand b = decode(p.b, p.n, "b", site, p.a_in_registers);
    float wide_a[16][16], wide_b[16 * 256];
    if (p.a_in_registers) {
        // Register i of lane (g, t): rows g, g + 8, g, g + 8, columns 2t, 2t, 2t + 8, 2t + 8 and the next.
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 i = 0; i < 8; i++)
                wide_a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i / 4 * 8 + i % 2] = widen((u16)(p.a_words[lane][i / 2] >> i % 2 * 16), p.is_bf16);
        for (u32 k = 0; k < 16; k++)
            for (u32 n = 0; n < p.n; n++) {
                u16 v;
                memcpy(&v, machine->shared + place_by_n(b, n / 8, k) + n % 8 * 2, 2);
                wide_b[k * p.n + n] = widen(v, p.is_bf16);
            }
    } else {
        Operand a = decode(p.a, 64, "a", site);
        for (u32 r = 0; r < 16; r++) load_row(wide_a[r], 1, a, self->warp % 4 * 16 + r, p.is_bf16);
        for (u32 r = 0; r < p.n; r++) load_row(wide_b + r, p.n, b, r, p.is_bf16);
    }
    std::vector<float>& values = queue.accumulators[p.accumulators].values;
    if (!p.accumulate) std::fill(values.begin(), values.end(), 0.0f);
    multiply(values.data(), wide_a, wide_b, p.n);
    machine->stats.mma += p.n / 8;
    p.done = true;
}

// Lane l, g = l / 4, t = l % 4, column block j: d[4j + 0..1] is (g, 8j + 2t..), d[4j + 2..3] is (g + 8, 8j + 2t..).
template <class F> static void for_fragments(Accumulators& c, F f) {
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < c.n / 2; i++) {
            u32 row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            f(c.d[lane][i], c.values[row * c.n + column]);
        }
}

// NaNs that no arithmetic makes: of accumulators in flight, and of discarded ones.
constexpr u32 IN_FLIGHT_BITS = 0x7fdf1e1d, DISCARDED_BITS = 0x7fddead1;

static u32 bits_of(float v) {
    u32 bits;
    memcpy(&bits, &v, 4);
    return bits;
}
static float nan_of(u32 bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// That the running thread gave these registers to its latest wgmma_fence, and has left them alone since.
static void require_ordered(const void* at, u32 words, const char* which, Site site) {
    if (!machine->config.checks) return;
    for (const FencedRegisters& r : self->ordered) {
        size_t offset = (size_t)(static_cast<const u32*>(at) - r.at);
        if (!r.at || at < r.at || offset + words > r.words.size()) continue;
        if (memcmp(at, r.words.data() + offset, words * 4)) fail(site, "wgmma: %s changed after wgmma_fence", which);
        return;
    }
    fail(site, "wgmma: %s that no wgmma_fence ordered", which);
}

static const Accumulators* in_flight(const ProductQueue& queue, u32 lane, const float* d) {
    for (const Accumulators& c : queue.accumulators)
        if (c.pending && c.d[lane] == d) return &c;
    return nullptr;
}

// The accumulators of this product: those of earlier ones in flight, or taken from the kernel.
static u32 take_accumulators(ProductQueue& queue, const Warp& w, u32 n, bool accumulate, Site site) {
    if (const Accumulators* held = in_flight(queue, 0, w.slots[0].wgmma.d)) {
        u32 i = (u32)(held - queue.accumulators.data());
        if (held->n != n) fail(site, "wgmma: accumulators in flight with another n");
        queue.accumulators[i].pending++;
        return i;
    }
    u32 i = 0;
    while (i < queue.accumulators.size() && queue.accumulators[i].pending) i++;
    if (i == queue.accumulators.size()) queue.accumulators.push_back({});
    Accumulators& c = queue.accumulators[i];
    c.n = n, c.pending = 1;
    c.values.resize(16 * n);
    for (u32 lane = 0; lane < 32; lane++) c.d[lane] = w.slots[lane].wgmma.d;
    bool poisoned = false;
    for_fragments(c, [&](float& d, float& value) {
        poisoned |= bits_of(d) == DISCARDED_BITS;
        value = d;
        d = nan_of(IN_FLIGHT_BITS);
    });
    if (accumulate && poisoned && machine->config.checks) fail(site, "wgmma: accumulates onto registers that were discarded");
    return i;
}

static void issue(float* d, int n, bool is_bf16, u64 a, const u32* a_registers, u64 b, bool accumulate, Site site) {
    Machine& m = *machine;
    if (m.thread_count % 128) fail(site, "wgmma in a block of %u threads: no whole warpgroups", m.thread_count);
    Warp& w = m.warps[self->warp];
    ProductQueue& queue = m.products[self->warp];
    if (!in_flight(queue, self->lane, d)) require_ordered(d, (u32)n / 2, "accumulators", site);
    if (a_registers) require_ordered(a_registers, 4, "a in registers", site);
    w.slots[self->lane].wgmma = {d, a, b, a_registers, accumulate};
    if (!meet(~0u, "wgmma", site)) return;
    for (u32 lane = 0; lane < 32; lane++) {
        const auto& slot = w.slots[lane].wgmma;
        if (slot.a != a || slot.b != b) fail(site, "wgmma: lanes of a warp give different descriptors");
        if (slot.accumulate != accumulate) fail(site, "wgmma: some lanes of a warp accumulate, others do not");
    }
    Product p = {a, b, (u32)n, is_bf16, accumulate, false, queue.groups, 0, site, a_registers != nullptr, {}, {}};
    if (a_registers)
        for (u32 lane = 0; lane < 32; lane++) {
            p.a_at[lane] = w.slots[lane].wgmma.a_registers;
            memcpy(p.a_words[lane], p.a_at[lane], 16);
        }
    std::vector<Product>& group = m.warpgroup_products[self->warp / 4];
    size_t number = queue.issued++;
    if (number == group.size())
        group.push_back(p);
    else if (group[number].a != a || group[number].b != b || group[number].n != p.n || group[number].accumulate != accumulate)
        fail(site, "wgmma: warps of a warpgroup issue different products");
    p.accumulators = take_accumulators(queue, w, p.n, accumulate, site);
    check_reads(p, site);
    queue.products.push_back(p);
    if (m.config.copies == TANDEM_EMU_COPIES_AT_ONCE || (m.config.copies == TANDEM_EMU_COPIES_RANDOM && random_number() % 2))
        // In order: a later product on the same accumulators needs the earlier ones.
        for (Product& each : queue.products) compute(queue, each, site);
    part();
}

void wgmma(float* d, int n, bool is_bf16, u64 a, u64 b, bool accumulate, Site site) { issue(d, n, is_bf16, a, nullptr, b, accumulate, site); }

void wgmma_registers(float* d, int n, bool is_bf16, const u32* a, u64 b, bool accumulate, Site site) {
    issue(d, n, is_bf16, 0, a, b, accumulate, site);
}

void wgmma_order(const void* registers, u32 words, const void* more, u32 more_words) {
    if (!machine->config.checks) return;
    auto keep = [](FencedRegisters& r, const void* at, u32 n) {
        r.at = static_cast<const u32*>(at);
        r.words.assign(r.at, r.at + n);
    };
    keep(self->ordered[0], registers, words);
    keep(self->ordered[1], more, more_words);
}

void wgmma_poison(float* d, u32 n) { std::fill(d, d + n, nan_of(DISCARDED_BITS)); }

// That the kernel left registers alone while a product had them.
static void require_operand_untouched(const Product& p, Site site) {
    for (u32 lane = 0; lane < 32; lane++)
        if (memcmp(p.a_at[lane], p.a_words[lane], 16))
            fail(site, "wgmma: a in registers changed while the product of %s was in flight", text(p.site).c_str());
}
static void require_accumulators_untouched(const Accumulators& c, Site site) {
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < c.n / 2; i++)
            if (bits_of(c.d[lane][i]) != IN_FLIGHT_BITS) fail(site, "wgmma: accumulators written while products were in flight");
}

void wgmma_close(Site site) {
    if (!meet(~0u, "wgmma_commit", site)) return;
    machine->products[self->warp].groups++;
    part();
}

void wgmma_finish(int groups, Site site) {
    if (!meet(~0u, "wgmma_wait", site)) return;
    ProductQueue& queue = machine->products[self->warp];
    size_t done = 0;
    for (Product& p : queue.products) {
        if (p.group >= queue.groups || queue.groups - p.group <= (u32)groups) break;
        check_reads(p, site);
        compute(queue, p, site);
        Accumulators& c = queue.accumulators[p.accumulators];
        if (p.a_in_registers && machine->config.checks) require_operand_untouched(p, site);
        if (--c.pending == 0) {
            if (machine->config.checks) require_accumulators_untouched(c, site);
            for_fragments(c, [](float& d, float& value) { d = value; });
        }
        done++;
    }
    queue.products.erase(queue.products.begin(), queue.products.begin() + (long)done);
    machine->clocks.meet_warp(self->warp); // from here on any lane may say for the warp that its reads are over
    part();
}

void require_products_finished() {
    if (!machine->products[self->warp].products.empty()) fail(self->site, "ends with wgmma in flight");
}

u32 shared_address(const void* at, Site site) {
    size_t offset = (size_t)((const u8*)at - machine->shared);
    if (offset > machine->shared_bytes) fail(site, "smem_u32 of %p, which is not shared memory", at);
    return SHARED_WINDOW + (u32)offset;
}

} // namespace emu
