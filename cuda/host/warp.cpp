// warp.cpp    instructions that lanes of a warp execute together: meeting, shuffles, votes
#include "machine.h"

#include <cstring>

namespace emu {

bool meet(u32 mask, const char* what, Site site) {
    Warp& w = machine->warps[self->warp];
    u32 bit = 1u << self->lane;
    if (!(mask & bit)) fail(site, "%s with mask %08x by lane %u, which is not in it", what, mask, self->lane);
    Meeting* meeting = nullptr;
    for (u32 i = 0; i < w.meetings_open; i++)
        if (w.meetings[i].mask & mask) meeting = &w.meetings[i];
    if (!meeting) {
        if (w.meetings_open == sizeof w.meetings / sizeof *w.meetings) fail(site, "%s: a fifth group of lanes diverges", what);
        meeting = &w.meetings[w.meetings_open++];
        *meeting = {mask, 0, what, site};
    }
    if (meeting->mask != mask || meeting->site.line != site.line || (meeting->what != what && strcmp(meeting->what, what)))
        fail(site, "divergent warp: %s with mask %08x, but other lanes are in %s with mask %08x at %s", what, mask, meeting->what, meeting->mask,
             text(meeting->site).c_str());
    meeting->arrived |= bit;
    u32 expected = mask & w.lanes; // the last warp of a block may have fewer
    if (meeting->arrived == expected) {
        w.completed = expected;
        *meeting = w.meetings[--w.meetings_open];
        return true;
    }
    yield_until_woken(what, site);
    return false;
}

void part() {
    Warp& w = machine->warps[self->warp];
    wake(self->warp, w.completed & ~(1u << self->lane));
    if (random_schedule()) maybe_land_bulk_copies(), yield();
}

// Lanes whose value each lane takes; PTX ISA, shfl.sync, with the clamp that CUDA's intrinsics give it.
static u32 shuffle_source(Shuffle kind, u32 lane, u32 operand, u32 width) {
    u32 first = lane & ~(width - 1), last = first + width - 1;
    operand &= 31;
    switch (kind) {
    case SHUFFLE_INDEX: return first + (operand & (width - 1));
    case SHUFFLE_UP: return lane >= first + operand ? lane - operand : lane;
    case SHUFFLE_DOWN: return lane + operand <= last ? lane + operand : lane;
    default: return (lane ^ operand) <= last ? lane ^ operand : lane;
    }
}

u32 shuffle(Shuffle kind, u32 mask, u32 value, int operand, int width, Site site) {
    static const char* const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
    Warp& w = machine->warps[self->warp];
    Slot& mine = w.slots[self->lane];
    if (width < 1 || width > 32 || (width & (width - 1))) fail(site, "%s: width %d", names[kind], width);
    mine.shuffle = {value, operand, width, 0};
    if (meet(mask, names[kind], site)) {
        for (u32 lane = 0; lane < 32; lane++) {
            if (!(w.completed >> lane & 1)) continue;
            auto& s = w.slots[lane].shuffle;
            u32 source = shuffle_source(kind, lane, (u32)s.operand, (u32)s.width);
            if (!(w.completed >> source & 1)) fail(site, "%s: lane %u takes from lane %u, which does not take part", names[kind], lane, source);
            s.result = w.slots[source].shuffle.value;
        }
        part();
    }
    return mine.shuffle.result;
}

u32 ballot(u32 mask, bool predicate, Site site) {
    Warp& w = machine->warps[self->warp];
    Slot& mine = w.slots[self->lane];
    mine.shuffle.value = predicate;
    if (meet(mask, "__ballot_sync", site)) {
        u32 votes = 0;
        for (u32 lane = 0; lane < 32; lane++)
            if (w.completed >> lane & 1) votes |= w.slots[lane].shuffle.value << lane;
        for (u32 lane = 0; lane < 32; lane++)
            if (w.completed >> lane & 1) w.slots[lane].shuffle.result = votes;
        part();
    }
    return mine.shuffle.result;
}

} // namespace emu
