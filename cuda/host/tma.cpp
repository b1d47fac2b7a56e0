// tma.cpp    bulk copies of a box of a matrix into shared memory, swizzled by 128 bytes (sm_90)
//
//   box row r, column c lies at byte o = r * row_bytes + c * 2, its 16-byte chunk number xor-ed with the number of
//   the 128-byte line modulo 8:  o ^= (o / 128 % 8) * 16     (addresses, so a tile begins at a multiple of 1024)
//
// Like cp.async the bytes land whenever the launch says; the destination is in flight until then. A box is copied
// whole, needed or not: rows of which nobody wrote all are as unwritten in shared memory as they were.
#include "machine.h"

#include <cstring>

namespace emu {

constexpr u64 TENSOR_MAGIC = 0x54616e64656d3244ull;
static_assert(sizeof(Tensor) <= sizeof(TensorMap), "fits a tensor map");

static u32 row_bytes(const Tensor& t) { return t.box_cols * 2; }
static u32 box_bytes(const Tensor& t) { return t.box_rows * row_bytes(t); }

static void land(const BulkCopy& copy) {
    Machine& m = *machine;
    const Tensor& t = copy.tensor;
    u32 first = (u32)(copy.to - m.shared);
    for (u32 r = 0; r < t.box_rows; r++)
        for (u32 c = 0; c < t.box_cols; c++) {
            long long row = (long long)copy.y + r, col = (long long)copy.x + c;
            u16 v = 0;
            if (row >= 0 && col >= 0 && row < (long long)t.rows && col < (long long)t.cols) memcpy(&v, t.base + ((u64)row * t.stride + (u64)col) * 2, 2);
            u32 offset = first + r * row_bytes(t) + c * 2;
            offset ^= (offset / 128 % 8) * 16;
            memcpy(m.shared + offset, &v, 2);
        }
    if (m.config.checks) {
        set_state(copy.to, box_bytes(t), WRITTEN);
        long long first = copy.x < 0 ? 0 : copy.x, last = (long long)copy.x + t.box_cols < (long long)t.cols ? (long long)copy.x + t.box_cols : (long long)t.cols;
        for (u32 r = 0; r < t.box_rows && first < last; r++) {
            long long row = (long long)copy.y + r;
            if (row < 0 || row >= (long long)t.rows) continue;
            if (!global_written(t.base + ((u64)row * t.stride + (u64)first) * 2, (size_t)(last - first) * 2))
                set_state(copy.to + r * row_bytes(t), row_bytes(t), UNWRITTEN);
        }
        stamp_write(copy.to, box_bytes(t), make_stamp(m.clocks.epoch[ASYNC_WARP], ASYNC_WARP * 32));
    }
    bytes_arrived(copy.bar, box_bytes(t));
}

bool land_bulk_copy() {
    Machine& m = *machine;
    if (m.bulk_copies.empty()) return false;
    size_t which = random_schedule() ? random_number() % m.bulk_copies.size() : 0;
    BulkCopy copy = m.bulk_copies[which];
    m.bulk_copies.erase(m.bulk_copies.begin() + (long)which);
    land(copy);
    return true;
}

void maybe_land_bulk_copies() {
    Machine& m = *machine;
    if (m.config.copies == TANDEM_EMU_COPIES_RANDOM && !m.bulk_copies.empty() && random_number() % 8 == 0) land_bulk_copy();
}

void tensor_copy_2d(void* to, const TensorMap* map, u64* bar, i32 x, i32 y, Site site) {
    Machine& m = *machine;
    BulkCopy copy = {static_cast<u8*>(to), {}, bar, x, y};
    if ((size_t)map % alignof(TensorMap)) fail(site, "tma_load_2d: tensor map at %p, not %zu-byte aligned", map, alignof(TensorMap));
    check(map, sizeof *map, Access::READ, site);
    memcpy(&copy.tensor, map, sizeof copy.tensor);
    const Tensor& t = copy.tensor;
    if (t.magic != TENSOR_MAGIC) fail(site, "tma_load_2d: not a tensor map");
    require_shared(to, box_bytes(t), 1024, "tma_load_2d to", site);
    require_shared(bar, 8, 8, "tma_load_2d: mbarrier at", site);
    m.stats.async_copies++;
    if (m.config.checks) {
        // The unit writes in this thread's name: what others still read or write there, it must know to be over.
        check(to, box_bytes(t), Access::WRITE, site);
        set_state(to, box_bytes(t), IN_FLIGHT);
        long long first = x < 0 ? 0 : x, last = (long long)x + t.box_cols < (long long)t.cols ? (long long)x + t.box_cols : (long long)t.cols;
        for (long long row = y < 0 ? 0 : y; row < (long long)y + t.box_rows && row < (long long)t.rows && first < last; row++)
            check_global(t.base + ((u64)row * t.stride + (u64)first) * 2, (size_t)(last - first) * 2, Access::COPY, site);
    }
    m.bulk_copies.push_back(copy);
    if (m.config.copies == TANDEM_EMU_COPIES_AT_ONCE) land_bulk_copy();
    maybe_land_bulk_copies();
}

} // namespace emu

using namespace emu;

extern "C" int tandem_emu_tensor_map_2d(void* out128, void* base, uint64_t rows, uint64_t cols, uint64_t stride, uint32_t box_rows,
                                        uint32_t box_cols) {
    // What cuTensorMapEncodeTiled demands of two dimensions of 2-byte elements with a 128-byte swizzle.
    if ((size_t)base % 16 || stride * 2 % 16 || stride < cols || rows == 0 || cols == 0 || rows > 1ull << 32 || cols > 1ull << 32) return 1;
    if (box_rows == 0 || box_rows > 256 || box_cols == 0 || box_cols * 2 > 128 || box_cols * 2 % 16) return 1;
    Tensor t = {TENSOR_MAGIC, static_cast<const u8*>(base), rows, cols, stride, box_rows, box_cols};
    memset(out128, 0, 128);
    memcpy(out128, &t, sizeof t);
    return 0;
}
