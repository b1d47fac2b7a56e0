// shared.cpp    what the bytes of shared memory hold, and who used them last
#include "machine.h"

#include <algorithm>
#include <cstring>

namespace emu {

u32 stamp_of(const Thread& thread) { return make_stamp(machine->clocks.epoch[thread.warp], thread.rank); }

static std::string who(u32 stamp) {
    u32 thread = stamp_thread(stamp);
    return thread < MAX_THREADS ? "thread " + text(machine->threads[thread].index) : std::string("a bulk copy");
}

[[noreturn]] static void fail_race(Conflict conflict, size_t offset, u32 other, const Place& place) {
    const char* deed = conflict == Conflict::READ_AFTER_WRITE    ? "reads shared memory that %s wrote"
                       : conflict == Conflict::WRITE_AFTER_WRITE ? "writes shared memory that %s wrote"
                                                                 : "writes shared memory that %s reads";
    std::string what = "race: ";
    what += deed;
    what.replace(what.find("%s"), 2, who(other));
    fail(place, "%s, at byte %zu, no barrier between", what.c_str(), offset);
}

void restart_clocks() {
    Machine& m = *machine;
    for (Cell& cell : m.cells) cell = {};
    m.split.clear();
    m.clocks = {};
    m.clocks.begin();
    for (Thread& t : m.threads) t.fenced = 0;
    for (Barrier& b : m.barriers) b.released = Clock{};
    forget_mbarrier_clocks();
    rename_launch(m.global_cells); // its stamps are of the old epochs
}

void begin_block_checks() {
    Machine& m = *machine;
    memset(m.shared, 0xff, m.shared_bytes); // NaN in every float format
    if (!m.config.checks) return;
    memset(m.byte_state.data(), UNWRITTEN, m.shared_bytes);
    if (!m.split.empty() || m.clocks.latest() > EPOCH_LIMIT / 2)
        restart_clocks();
    else
        m.clocks.begin(); // what earlier blocks did is ordered before: cells need not be cleared
}

void require_shared(const void* at, size_t bytes, size_t align, const char* what, const Place& place) {
    size_t offset = (size_t)((const u8*)at - machine->shared);
    if (offset >= machine->shared_bytes) fail(place, "%s %p, which is not shared memory", what, at);
    if (offset + bytes > machine->shared_bytes)
        fail(place, "%s byte %zu of shared memory, which ends at %u", what, offset, machine->shared_bytes);
    if (offset % align) fail(place, "%s byte %zu of shared memory: not %zu-byte aligned", what, offset, align);
}

void set_state(const void* at, size_t bytes, ByteState state) { memset(&machine->byte_state[(size_t)((const u8*)at - machine->shared)], state, bytes); }

static bool all_written(const u8* state, size_t bytes) {
    for (; bytes >= 4; state += 4, bytes -= 4) {
        u32 word;
        memcpy(&word, state, 4);
        if ((word & 0x01010101u) != 0x01010101u) return false;
    }
    for (; bytes; state++, bytes--)
        if (!(*state & 1)) return false;
    return true;
}

static void check_state(size_t offset, size_t bytes, Access access, const Place& place) {
    Machine& m = *machine;
    u8* state = &m.byte_state[offset];
    bool readable = all_written(state, bytes);
    if (readable && access != Access::WRITE) return;
    if (!readable && memchr(state, IN_FLIGHT, bytes))
        fail(place, "%s byte %zu of shared memory while a copy to it is in flight", access == Access::WRITE ? "writes" : "reads", offset);
    if (access == Access::WRITE)
        memset(state, STORED, bytes);
    else if (checks(TANDEM_EMU_UNINITIALISED))
        fail(place, "reads byte %zu of shared memory, which nobody wrote", offset);
}

// The cells of one word's bytes, made from the word's.
static ByteCells& split_word(Cell& cell) {
    Machine& m = *machine;
    if (cell.write != SPLIT) {
        m.split.push_back({{cell, cell, cell, cell}});
        cell = {SPLIT, {(u32)m.split.size() - 1, 0, 0}};
    }
    return m.split[cell.read[0]];
}

static void check_races(size_t offset, size_t bytes, bool write, u32 stamp, const Place& place) {
    Machine& m = *machine;
    u32 other = 0;
    for (size_t end = offset + bytes; offset < end;) {
        Cell& cell = m.cells[offset / 4];
        if (offset % 4 == 0 && end - offset >= 4 && cell.write != SPLIT) {
            Conflict conflict = use_cell(cell, m.clocks, stamp, write, other);
            if (conflict != Conflict::NONE) fail_race(conflict, offset, other, place);
            offset += 4;
            continue;
        }
        Cell& byte = split_word(cell).of[offset % 4];
        Conflict conflict = use_cell(byte, m.clocks, stamp, write, other);
        if (conflict != Conflict::NONE) fail_race(conflict, offset, other, place);
        offset++;
    }
}

void check_shared(size_t offset, size_t bytes, Access access, u32 stamp, const Place& place) {
    Machine& m = *machine;
    if (offset + bytes > m.shared_bytes)
        fail(place, "uses %zu bytes at byte %zu of shared memory, which ends at %u", bytes, offset, m.shared_bytes);
    check_state(offset, bytes, access, place);
    if (checks(TANDEM_EMU_RACES))
        check_races(offset, bytes, access == Access::WRITE || access == Access::ATOMIC, access == Access::ATOMIC ? stamp | STAMP_ATOMIC : stamp,
                    place);
}

void require_fenced(size_t offset, size_t bytes, const Place& place) {
    Machine& m = *machine;
    if (!checks(TANDEM_EMU_RACES)) return;
    for (; bytes; offset++, bytes--) {
        if (m.byte_state[offset] != STORED) continue;
        const Cell& cell = m.cells[offset / 4];
        u32 stamp = cell.write == SPLIT ? m.split[cell.read[0]].of[offset % 4].write : cell.write;
        if (stamp && stamp_epoch(stamp) >= m.threads[stamp_thread(stamp)].fenced)
            fail(place, "reads byte %zu of shared memory, which %s stored without fence_async_shared", offset, who(stamp).c_str());
    }
}

void fence_shared() {
    // A new epoch, so that later stores have other stamps than those before; nobody else learns of it.
    self->fenced = ++machine->clocks.epoch[self->warp];
}

void stamp_write(const void* at, size_t bytes, u32 stamp) {
    Machine& m = *machine;
    size_t offset = (size_t)((const u8*)at - m.shared);
    for (size_t word = offset / 4; word < (offset + bytes) / 4; word++) m.cells[word] = {stamp, {0, 0, 0}};
}

} // namespace emu
