// schedule.cpp    which thread of the block runs next
//
// A thread runs until it waits. Ready threads are bits: a word of lanes for each warp, a word of warps. The order
// is the launch's schedule; a kernel that is right gives the same result in all of them.
#include "machine.h"

namespace emu {

EMU_THREAD_LOCAL Machine* machine;
EMU_THREAD_LOCAL Thread* self;
EMU_THREAD_LOCAL bool watching;

void wake(u32 warp, u32 lanes) {
    if (!lanes) return;
    machine->warps[warp].runnable |= lanes;
    machine->ready_warps |= 1u << warp;
}

static Thread* take(u32 warp, u32 lane) {
    Warp& w = machine->warps[warp];
    w.runnable &= ~(1u << lane);
    if (!w.runnable) machine->ready_warps &= ~(1u << warp);
    return &machine->threads[warp * 32 + lane];
}

// The first set bit at or after `from`, else the first of all.
static u32 next_bit(u32 bits, u32 from) {
    u32 after = from < 32 ? bits & ~0u << from : 0;
    return __builtin_ctz(after ? after : bits);
}
// The last set bit at or before `from`, else the last of all.
static u32 previous_bit(u32 bits, i32 from) {
    u32 before = from >= 0 ? bits & ~0u >> (31 - from) : 0;
    return 31 - __builtin_clz(before ? before : bits);
}

// A ready thread, or nullptr. Threads stay with their warp, which has work to do together, unless `away`.
static Thread* pick(bool away) {
    Machine& m = *machine;
    if (!m.ready_warps) return nullptr;
    u32 warp = self ? self->warp : 0, lane = self ? self->lane : 0;
    switch (m.config.schedule) {
    case TANDEM_EMU_ASCENDING: {
        u32 lanes = m.warps[warp].runnable;
        if (lanes && !away) return take(warp, next_bit(lanes, 0));
        if (away && lane < 31 && lanes >> (lane + 1)) return take(warp, next_bit(lanes, lane + 1));
        warp = next_bit(m.ready_warps, self ? warp + 1 : 0);
        return take(warp, next_bit(m.warps[warp].runnable, 0));
    }
    case TANDEM_EMU_DESCENDING: {
        u32 lanes = self ? m.warps[warp].runnable : 0;
        if (lanes && !away) return take(warp, previous_bit(lanes, 31));
        if (away && lanes & ((1u << lane) - 1)) return take(warp, previous_bit(lanes, (i32)lane - 1));
        warp = previous_bit(m.ready_warps, self ? (i32)warp - 1 : 31);
        return take(warp, previous_bit(m.warps[warp].runnable, 31));
    }
    default: {
        u64 r = random_number();
        if (!m.warps[warp].runnable || r % 8 == 0) warp = next_bit(m.ready_warps, (u32)(r >> 8) % 32);
        return take(warp, next_bit(m.warps[warp].runnable, (u32)(r >> 16) % 32));
    }
    }
}

static void go_to(Thread* next, void** save) {
    self = next;
    machine->stats.switches++;
    switch_stack(save, next->stack_pointer);
}

// Leaves the running fiber for the next one, or for the launching thread when none is ready.
static void leave(bool away) {
    Thread* me = self;
    Thread* next = machine->failed ? nullptr : pick(away);
    if (next == me) return;
    if (next) {
        go_to(next, &me->stack_pointer);
    } else {
        switch_stack(&me->stack_pointer, machine->scheduler_stack_pointer);
    }
}

void yield_until_woken(const char* what, Site site) {
    self->what = what;
    self->site = site;
    leave(false);
}

void yield() {
    wake(self->warp, 1u << self->lane);
    leave(true);
}

void end_thread() {
    require_copies_landed();
    require_products_finished();
    self->ended = true;
    machine->alive--;
    leave(false);
    __builtin_unreachable();
}

// Why nothing can run, from what the threads wait for.
static void report_deadlock() {
    Machine& m = *machine;
    u32 ended = 0, first = MAX_THREADS;
    for (u32 t = 0; t < m.thread_count; t++) {
        if (m.threads[t].ended)
            ended++;
        else if (first == MAX_THREADS)
            first = t;
    }
    const Thread& one = m.threads[first];
    std::string what = text("deadlock: waits in %s", one.what);
    for (u32 t = 0; t < m.thread_count; t++) {
        const Thread& other = m.threads[t];
        if (other.ended || (other.site.line == one.site.line && other.what == one.what)) continue;
        what += text(", thread %s in %s at %s", text(other.index).c_str(), other.what, text(other.site).c_str());
        break;
    }
    if (ended) what += text("; %u of %u threads have ended", ended, m.thread_count);
    record(&one, one.site, what);
}

void run_threads() {
    Machine& m = *machine;
    for (;;) {
        self = nullptr;
        watching = m.config.checks != 0 || m.config.schedule == TANDEM_EMU_PREEMPTED;
        Thread* next = pick(false);
        if (next) go_to(next, &m.scheduler_stack_pointer);
        watching = false;
        self = nullptr;
        if (m.failed) return;
        if (m.ready_warps) continue;
        if (land_bulk_copy()) continue; // wakes who waits for its bytes
        if (m.alive) report_deadlock();
        return;
    }
}

} // namespace emu
