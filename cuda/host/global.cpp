// global.cpp    accesses to device memory: live, in bounds, written before read, and not in two hands at once
#include "machine.h"

#include <link.h>

namespace emu {

static const Region* find_region(const void* at) {
    RegionCache& cache = machine->region_cache;
    for (const Region* region : cache.recent)
        if (region && (size_t)((const u8*)at - region->base) < region->bytes) return region;
    const Region* region = region_before(*machine->regions, at);
    if (!region || (size_t)((const u8*)at - region->base) >= region->bytes) return nullptr;
    cache.recent[cache.next++ % 8] = region;
    return region;
}

// Constant tables of kernels lie in the program's read-only segments.
static bool in_constants(const void* at, size_t bytes) {
    struct Segments {
        std::vector<std::pair<size_t, size_t>> of;
        Segments() {
            dl_iterate_phdr(
                [](dl_phdr_info* info, size_t, void* out) {
                    for (int i = 0; i < info->dlpi_phnum; i++) {
                        const auto& h = info->dlpi_phdr[i];
                        size_t begin = info->dlpi_addr + h.p_vaddr;
                        bool constant = (h.p_type == PT_LOAD && !(h.p_flags & PF_W)) || h.p_type == PT_GNU_RELRO;
                        if (constant) static_cast<Segments*>(out)->of.push_back({begin, begin + h.p_memsz});
                    }
                    return 0;
                },
                this);
        }
    };
    static const Segments segments;
    for (auto [begin, end] : segments.of)
        if ((size_t)at >= begin && (size_t)at + bytes <= end) return true;
    return false;
}

[[noreturn]] static void fail_outside(const void* at, size_t bytes, bool write, const Place& place) {
    const Machine& m = *machine;
    const char* deed = write ? "writes" : "reads";
    for (u32 t = 0; t < m.thread_count; t++)
        if ((size_t)((const u8*)at - m.threads[t].stack_low) < STACK_BYTES)
            fail(place, "%s %zu bytes at %p: a local variable of thread %s", deed, bytes, at, text(m.threads[t].index).c_str());
    size_t past = (size_t)((const u8*)at - m.shared);
    if (past < m.shared_storage.size())
        fail(place, "%s %zu bytes at byte %zu of shared memory, which ends at %u", deed, bytes, past, m.shared_bytes);
    const Region* region = region_before(*m.regions, at);
    const Region* after = region ? region + 1 : m.regions->data();
    if (after != m.regions->data() + m.regions->size() && (size_t)(after->base - (const u8*)at) <= 4096)
        fail(place, "%s %zu bytes at %p: %zu bytes before an allocation of %zu bytes at %p", deed, bytes, at,
             (size_t)(after->base - (const u8*)at), after->bytes, after->base);
    if (!region) fail(place, "%s %zu bytes at %p: no device memory", deed, bytes, at);
    fail(place, "%s %zu bytes at %p: offset %zu of an allocation of %zu bytes at %p", deed, bytes, at, (size_t)((const u8*)at - region->base),
         region->bytes, region->base);
}

// ---------------------------------------------------------------------------------------------------------
// Races. Within a block as in shared memory; between blocks, whose order nobody knows, two may not touch a byte if
// one writes, unless the later one has synchronised with others before (an atomic, a fence, an acquire).

constexpr size_t GLOBAL_CELLS = 1 << 15;

[[noreturn]] static void fail_between_blocks(const GlobalCell& cell, size_t word, u8 bytes, bool write, const Place& place) {
    fail(place, "race between blocks: %s device memory at %p, which another block of this launch %s", write ? "writes" : "reads",
         (const void*)(word * 4), cell.written & bytes ? "wrote" : "reads");
}

[[noreturn]] static void fail_between_threads(Conflict conflict, u32 other, size_t word, bool write, const Place& place) {
    fail(place, "race: %s device memory at %p that thread %s %s, no barrier between", write ? "writes" : "reads", (const void*)(word * 4),
         text(machine->threads[stamp_thread(other) % MAX_THREADS].index).c_str(), conflict == Conflict::WRITE_AFTER_READ ? "reads" : "wrote");
}

static void check_global_word(GlobalCell& cell, u64 key, size_t word, u8 bytes, bool write, u32 stamp, const Place& place) {
    Machine& m = *machine;
    bool known = cell.key == key;
    if (known && cell.block != m.block_number) {
        bool clash = (cell.written & bytes) || (write && (cell.read & bytes));
        if (clash && !m.acquired) fail_between_blocks(cell, word, bytes, write, place);
        known = false;
    }
    if (!known) {
        cell.key = key, cell.block = m.block_number;
        cell.written = write ? bytes : 0, cell.read = write ? 0 : bytes;
        cell.cell = write ? Cell{stamp, {0, 0, 0}} : Cell{0, {stamp, 0, 0}};
        return;
    }
    u32 other = 0;
    if ((write ? cell.written | cell.read : cell.written) & bytes) {
        Conflict conflict = use_cell(cell.cell, m.clocks, stamp, write, other);
        if (conflict != Conflict::NONE) fail_between_threads(conflict, other, word, write, place);
        if (write) cell.written = bytes, cell.read = 0;
    } else if (write) { // other bytes of the word: the cell is for the latest
        cell.cell = {stamp, {0, 0, 0}};
        cell.written = bytes, cell.read = 0;
    } else if (cell.cell.read[0] != stamp) {
        u32 writer = cell.cell.write; // of other bytes
        cell.cell.write = 0;
        use_cell(cell.cell, m.clocks, stamp, false, other);
        cell.cell.write = writer;
    }
    if (!write) cell.read |= bytes;
}

static void check_global_races(const void* at, size_t bytes, bool write, u32 stamp, const Place& place) {
    GlobalCells& cells = machine->global_cells;
    if (cells.table.empty()) cells.table.resize(GLOBAL_CELLS);
    size_t begin = (size_t)at, end = begin + bytes;
    for (size_t word = begin / 4; word * 4 < end; word++) {
        u32 mask = 0xf;
        if (word * 4 < begin) mask &= 0xfu << (begin - word * 4);
        if (word * 4 + 4 > end) mask &= 0xfu >> (word * 4 + 4 - end);
        check_global_word(cells.table[(word ^ word >> 16) % GLOBAL_CELLS], word | cells.launch << 46, word, (u8)mask, write, stamp, place);
    }
}

void check_global(const void* at, size_t bytes, Access access, const Place& place) {
    Machine& m = *machine;
    bool write = access == Access::WRITE || access == Access::ATOMIC;
    const Region* region = find_region(at);
    if (!region) {
        bool in_params = (size_t)((const u8*)at - (const u8*)m.params) + bytes <= m.params_size;
        if (!write && (in_params || in_constants(at, bytes))) return;
        fail_outside(at, bytes, write, place);
    }
    size_t offset = (size_t)((const u8*)at - region->base);
    if (offset + bytes > region->bytes)
        fail(place, "%s %zu bytes at offset %zu of an allocation of %zu bytes at %p", write ? "writes" : "reads", bytes, offset, region->bytes,
             region->base);
    if (checks(TANDEM_EMU_UNINITIALISED)) {
        Initialised& initialised = *region->initialised;
        if (access != Access::WRITE && access != Access::COPY && !initialised.all(offset, bytes))
            fail(place, "reads offset %zu of an allocation of %zu bytes at %p, which nobody wrote", offset, region->bytes, region->base);
        if (write) initialised.mark(offset, bytes, true);
    }
    if (checks(TANDEM_EMU_GLOBAL_RACES) && access != Access::ATOMIC) check_global_races(at, bytes, write, stamp_of(*self), place);
}

void require_global(const void* at, size_t bytes, const char* what, const Place& place) {
    const Region* region = find_region(at);
    if (!region) {
        region = region_before(*machine->regions, at);
        if (!region) fail(place, "%s %p: no device memory", what, at);
    }
    size_t offset = (size_t)((const u8*)at - region->base);
    if (offset + bytes > region->bytes)
        fail(place, "%s %p: offset %zu of an allocation of %zu bytes at %p", what, at, offset, region->bytes, region->base);
}

bool global_written(const void* at, size_t bytes) {
    if (!checks(TANDEM_EMU_UNINITIALISED)) return true;
    const Region* region = find_region(at);
    return !region || region->initialised->all((size_t)((const u8*)at - region->base), bytes);
}

} // namespace emu
