// copy.cpp    cp.async: copies that are in flight until their group is waited for
//
// When the bytes land is not known to the kernel, so any moment between issue and wait must do: the launch says
// which is shown (at once, as late as possible, at random). Until the wait, the destination is in flight: reading
// or writing it is an error whenever the bytes did land.
#include "machine.h"

#include <cstring>

namespace emu {

static void land(Copy& copy) {
    if (copy.landed) return;
    if (copy.predicate)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
    copy.landed = true;
}

void copy_async(void* to, const void* from, bool predicate, Site site) {
    Machine& m = *machine;
    m.stats.async_copies++;
    require_shared(to, 16, 16, "cp_async_16 to", site);
    if (m.config.checks) {
        check(to, 16, Access::WRITE, site);
        if ((size_t)from % 16) fail(site, "cp_async_16 from %p: not 16-byte aligned", from);
        if (predicate)
            check_global(from, 16, Access::READ, site);
        else
            require_global(from, 16, "cp_async_16 of no bytes from", site);
        set_state(to, 16, IN_FLIGHT);
    }
    Copy copy = {static_cast<u8*>(to), static_cast<const u8*>(from), predicate, false, self->groups};
    if (m.config.copies == TANDEM_EMU_COPIES_AT_ONCE || (m.config.copies == TANDEM_EMU_COPIES_RANDOM && random_number() % 2)) land(copy);
    self->copies.push_back(copy);
}

void copy_commit() { self->groups++; }

void copy_wait(int groups) {
    u32 done = 0;
    for (Copy& copy : self->copies) {
        // Group numbers grow; the latest `groups` committed ones, and what is not committed, may stay in flight.
        if (copy.group >= self->groups || self->groups - copy.group <= (u32)groups) break;
        land(copy);
        if (machine->config.checks) {
            set_state(copy.to, 16, STORED);
            stamp_write(copy.to, 16, stamp_of(*self)); // others see it after a barrier from here on
        }
        done++;
    }
    self->copies.erase(self->copies.begin(), self->copies.begin() + done);
}

void require_copies_landed() {
    if (self->copies.empty()) return;
    fail(self->site, "ends with %zu cp_async_16 in flight", self->copies.size());
}

} // namespace emu
