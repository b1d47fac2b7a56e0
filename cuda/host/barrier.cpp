// barrier.cpp    barriers of a block, whole or in part, and of a warp
#include "machine.h"

namespace emu {

// Everyone has arrived: who waits goes on, knowing what all others did.
static void complete(Barrier& b, bool with_self) {
    Machine& m = *machine;
    m.clocks.meet(b.waiting_warps | (with_self ? 1u << self->warp : 0), b.any_released ? &b.released : nullptr);
    m.stats.barriers++;
    for (u32 w = 0; w < m.warp_count; w++) {
        wake(w, b.waiting[w]);
        b.waiting[w] = 0;
    }
    b.arrived = b.waiting_warps = 0;
    b.any_released = false;
    restart_clocks_if_late();
    if (with_self && random_schedule()) maybe_land_bulk_copies(), yield();
}

void barrier(int id, int threads, bool wait, Site site) {
    Machine& m = *machine;
    if (id < 0 || id > 15) fail(site, "barrier %d: there are 16", id);
    if (threads % 32 || threads < 0 || (u32)threads > m.thread_count)
        fail(site, "barrier %d of %d threads: must be whole warps of the block's %u threads", id, threads, m.thread_count);
    Barrier& b = m.barriers[id];
    u32 expected = threads ? (u32)threads : m.thread_count;
    if (!b.arrived) {
        b.expected = expected;
        b.site = site;
    } else {
        if (b.expected != expected)
            fail(site, "barrier %d of %u threads, but others wait for %u at %s", id, expected, b.expected, text(b.site).c_str());
        if (!threads && b.site.line != site.line) // all threads must reach __syncthreads at one place
            fail(site, "divergent __syncthreads: other threads wait at %s", text(b.site).c_str());
    }
    b.arrived++;
    if (!wait) {
        if (!b.any_released) b.released = Clock{};
        b.any_released = true;
        m.clocks.release(b.released, self->rank);
    }
    if (b.arrived == b.expected) return complete(b, wait);
    if (!wait) return;
    b.waiting_warps |= 1u << self->warp;
    b.waiting[self->warp] |= 1u << self->lane;
    yield_until_woken(threads ? "named_barrier_sync" : "__syncthreads", site);
}

void sync_warp(u32 mask, Site site) {
    if (!meet(mask, "__syncwarp", site)) return;
    machine->clocks.meet_warp(self->warp); // a part of a warp is taken for the whole: clocks have one entry a warp
    restart_clocks_if_late();
    part();
}

} // namespace emu
