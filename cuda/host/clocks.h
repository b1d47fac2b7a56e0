// clocks.h    which accesses are ordered before which: vector clocks, one entry a warp
//
// Every access is stamped with its thread and the epoch of that thread's warp; a warp's epoch grows whenever it
// releases something (barrier, __syncwarp, mbarrier arrival). What a warp knows of another is a bound: accesses
// stamped below it happened before. Barriers join the bounds of all warps that meet; an mbarrier carries a clock
// from those who arrive to those who wait.
#pragma once

#include "../include/ptx.cuh"

#include <vector>

namespace emu {

// 32 warps of threads, and one for bulk copies, which write in nobody's name.
constexpr u32 ASYNC_WARP = 32;
constexpr u32 CLOCK_WARPS = 33;

// stamp: epoch << 12 | atomic << 11 | thread. 0: never.
constexpr u32 STAMP_ATOMIC = 1u << 11;
constexpr u32 STAMP_EPOCH = 12;
constexpr u32 EPOCH_LIMIT = (1u << 20) - (1u << 14);
inline u32 make_stamp(u32 epoch, u32 thread) { return epoch << STAMP_EPOCH | thread; }
inline u32 stamp_thread(u32 stamp) { return stamp & (STAMP_ATOMIC - 1); }
inline u32 stamp_epoch(u32 stamp) { return stamp >> STAMP_EPOCH; }

// What is known of one warp: accesses of all its lanes below `all`, and of `lanes` (that released for themselves,
// without meeting the others of their warp) below `some`.
struct Known {
    u32 all, lanes, some;
    void join(const Known& o) {
        if (o.all > all) all = o.all;
        if (o.some > some) some = o.some;
        lanes |= o.lanes;
        if (some <= all) lanes = 0, some = 0;
    }
};

struct Clock {
    Known of[CLOCK_WARPS];
    void join(const Clock& o) {
        for (u32 w = 0; w < CLOCK_WARPS; w++) of[w].join(o.of[w]);
    }
};

struct Clocks {
    u32 epoch[CLOCK_WARPS];
    Clock of[CLOCK_WARPS];

    bool ordered(u32 stamp, u32 thread) const {
        u32 other = stamp_thread(stamp), epoch = stamp_epoch(stamp);
        const Known& known = of[thread / 32].of[other / 32];
        return epoch < known.all || other == thread || (epoch < known.some && (known.lanes >> other % 32 & 1));
    }
    // A thread alone publishes what it has done so far, and what its warp knows.
    void release(Clock& into, u32 thread) {
        u32 warp = thread / 32;
        into.join(of[warp]);
        into.of[warp].join({of[warp].of[warp].all, 1u << thread % 32, ++epoch[warp]});
    }
    void acquire(const Clock& from, u32 thread) { of[thread / 32].join(from); }
    // All lanes of the warps in `met` have met: each knows everything the others did or knew.
    void meet(u32 met, const Clock* released) {
        Clock joined = {};
        if (released) joined = *released;
        for (u32 w = 0; w < 32; w++)
            if (met >> w & 1) joined.join(of[w]);
        for (u32 w = 0; w < 32; w++)
            if (met >> w & 1) joined.of[w].join({++epoch[w], 0, 0});
        for (u32 w = 0; w < 32; w++)
            if (met >> w & 1) of[w] = joined;
    }
    void meet_warp(u32 warp) { of[warp].of[warp].join({++epoch[warp], 0, 0}); }
    // Everything so far is ordered before everything from now on.
    void begin() {
        for (u32 w = 0; w < CLOCK_WARPS; w++) epoch[w]++;
        for (Clock& clock : of)
            for (u32 w = 0; w < CLOCK_WARPS; w++) clock.of[w] = {epoch[w], 0, 0};
    }
    u32 latest() const {
        u32 most = 0;
        for (u32 e : epoch) most = e > most ? e : most;
        return most;
    }
};

// The last accesses to a word (or byte): one write, and up to three reads that are not ordered after each other.
struct Cell {
    u32 write;
    u32 read[3];
};
constexpr u32 SPLIT = ~0u; // Cell::write of a word whose bytes have cells of their own, number read[0]
struct ByteCells {
    Cell of[4];
};

enum class Conflict { NONE, READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ };

// Checks an access against a cell and records it. On a conflict `other` is the stamp of the other access.
inline Conflict use_cell(Cell& cell, const Clocks& clocks, u32 stamp, bool write, u32& other) {
    if (!write && cell.read[0] == stamp && clocks.ordered(cell.write, stamp_thread(stamp))) return Conflict::NONE;
    u32 thread = stamp_thread(stamp);
    bool atomics = stamp & cell.write & STAMP_ATOMIC;
    if (!atomics && !clocks.ordered(cell.write, thread)) {
        other = cell.write;
        return write ? Conflict::WRITE_AFTER_WRITE : Conflict::READ_AFTER_WRITE;
    }
    if (write) {
        for (u32& read : cell.read) {
            if (!clocks.ordered(read, thread)) {
                other = read;
                return Conflict::WRITE_AFTER_READ;
            }
            read = 0;
        }
        cell.write = stamp;
        return Conflict::NONE;
    }
    for (u32& read : cell.read)
        if (clocks.ordered(read, thread)) {
            read = stamp;
            return Conflict::NONE;
        }
    // Three concurrent readers are known; another warp says more than a third lane of the same.
    u32 warp = thread / 32;
    bool same = stamp_thread(cell.read[0]) / 32 == stamp_thread(cell.read[1]) / 32 &&
                stamp_thread(cell.read[1]) / 32 == stamp_thread(cell.read[2]) / 32;
    if (same && stamp_thread(cell.read[0]) / 32 != warp) cell.read[2] = stamp;
    return Conflict::NONE;
}

// Device memory: cells of recently used words, found by address; what is forgotten is not checked.
struct GlobalCell {
    u64 key;         // word address and launch
    u32 block;       // number of the block that used it last
    u8 written, read; // masks of bytes
    Cell cell;
};
struct GlobalCells {
    std::vector<GlobalCell> table;
    u64 launch = 0;
};

} // namespace emu
