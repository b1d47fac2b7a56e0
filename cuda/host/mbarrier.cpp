// mbarrier.cpp    barriers in shared memory that count arrivals and bytes (sm_90)
//
// A phase ends when the pending arrivals and the announced bytes are both zero; the next one begins at once, with
// the count that the barrier was initialised with. Waiting names the parity of the phase that must have ended.
#include "machine.h"

#include <cstring>

namespace emu {

struct Word {
    u32 magic : 9, phase : 1, count : 11, pending : 11;
    i32 bytes; // announced and not yet arrived
};
static_assert(sizeof(Word) == 8, "an mbarrier is 8 bytes");
constexpr u32 MAGIC = 0x1b5;
constexpr u32 MOST = (1u << 11) - 1; // arrivals; the device takes more, a block has no more threads

static Word get(const u64* bar) {
    Word w;
    memcpy(&w, bar, 8);
    return w;
}

static MBarrier& details(const u64* bar) {
    for (MBarrier& b : machine->mbarriers)
        if (b.at == bar) return b;
    machine->mbarriers.push_back({bar, {}, {}, {}});
    return machine->mbarriers.back();
}

static void require_mbarrier(const u64* bar, const char* what, Site site) {
    require_shared(bar, 8, 8, what, site);
    check(bar, 8, Access::ATOMIC, site);
    if (get(bar).magic != MAGIC) fail(site, "%s: no mbarrier was initialised there", what);
}

// Stores the word; ends the phase if it is complete.
static void update(u64* bar, Word w) {
    if (w.pending == 0 && w.bytes == 0) {
        MBarrier& b = details(bar);
        w.phase ^= 1;
        w.pending = w.count;
        b.completed = b.arriving;
        b.arriving = Clock{};
        for (u32 warp = 0; warp < machine->warp_count; warp++) {
            wake(warp, b.waiting[warp]);
            b.waiting[warp] = 0;
        }
    }
    memcpy(bar, &w, 8);
}

void mbarrier_init(u64* bar, u32 count, Site site) {
    require_shared(bar, 8, 8, "mbar_init", site);
    check(bar, 8, Access::WRITE, site);
    if (count == 0 || count > MOST) fail(site, "mbar_init: %u arrivals", count);
    Word w = {MAGIC, 0, count, count, 0};
    memcpy(bar, &w, 8);
    details(bar).arriving = Clock{};
}

void mbarrier_arrive(u64* bar, u32 bytes, Site site) {
    require_mbarrier(bar, "mbar_arrive", site);
    Word w = get(bar);
    if (w.pending == 0) fail(site, "mbar_arrive: more than the phase's %u arrivals", w.count);
    machine->clocks.release(details(bar).arriving, self->rank);
    w.pending--;
    w.bytes += (i32)bytes;
    update(bar, w);
    restart_clocks_if_late();
}

void bytes_arrived(u64* bar, u32 bytes) {
    Machine& m = *machine;
    Word w = get(bar);
    details(bar).arriving.of[ASYNC_WARP].join({++m.clocks.epoch[ASYNC_WARP], 0, 0});
    w.bytes -= (i32)bytes;
    update(bar, w);
}

void mbarrier_wait(u64* bar, u32 parity, Site site) {
    if (parity > 1) fail(site, "mbar_wait: parity %u", parity);
    for (;;) {
        require_mbarrier(bar, "mbar_wait", site);
        if (get(bar).phase != parity) break;
        details(bar).waiting[self->warp] |= 1u << self->lane;
        yield_until_woken("mbar_wait", site);
    }
    machine->clocks.acquire(details(bar).completed, self->rank);
}

void forget_mbarrier_clocks() {
    for (MBarrier& b : machine->mbarriers) b.arriving = b.completed = Clock{};
}

} // namespace emu
