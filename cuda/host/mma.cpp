// mma.cpp    ldmatrix, movmatrix and mma.sync: fragment layouts as the PTX ISA draws them
//
// Lane l, with g = l / 4 and t = l % 4. Each 32-bit register holds two neighbours of a row (16-bit elements) or
// four (bytes), the lower index in the lower bits.
//
//   ldmatrix            r[m] = elements (g, 2t..2t+1) of matrix m; row i of matrix m at lane 8m + i's address
//   ldmatrix .trans     r[m] = elements (2t, g) and (2t+1, g)
//   movmatrix           from the former to the latter, in registers
//
//   m16n8k16   a[0] (g,   2t..)     a[1] (g+8, 2t..)      b[0] (k = 2t..,   n = g)      c[0..1] (g,   2t..)
//              a[2] (g,   2t+8..)   a[3] (g+8, 2t+8..)    b[1] (k = 2t+8.., n = g)      c[2..3] (g+8, 2t..)
//   m16n8k32   the same with k = 4t.. and 4t+16.. (bytes)
//
// Products of 16-bit floats are exact in f32; they are summed in f32 in the order of k. A tensor core's own order
// and truncation are not specified: tests bound the error for any order.
#include "machine.h"

#include <cstring>

namespace emu {

static Warp& whole_warp(const char* what, Site site) {
    Warp& w = machine->warps[self->warp];
    if (w.lanes != ~0u) fail(site, "%s by a warp of fewer than 32 threads", what);
    return w;
}

// Eight rows of 16 bytes are read in one pass if they fall on eight different groups of four banks; each
// additional row on the most used group costs one more pass.
static void count_conflicts(const Warp& w, u32 matrix) {
    u8 rows[8] = {};
    u32 most = 1;
    for (u32 i = 0; i < 8; i++) {
        const u8* row = w.slots[8 * matrix + i].matrix.row;
        bool again = false; // the same 16 bytes are broadcast
        for (u32 j = 0; j < i; j++) again |= w.slots[8 * matrix + j].matrix.row == row;
        u32 group = (u32)((size_t)row / 16 % 8);
        if (!again && ++rows[group] > most) most = rows[group];
    }
    machine->stats.ldmatrix_phases++;
    machine->stats.ldmatrix_conflicts += most - 1;
}

static void load_matrix(Warp& w, u32 matrix, bool transposed) {
    count_conflicts(w, matrix);
    u16 m[8][8];
    for (u32 i = 0; i < 8; i++) memcpy(m[i], w.slots[8 * matrix + i].matrix.row, 16);
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        u16 lo = transposed ? m[2 * t][g] : m[g][2 * t];
        u16 hi = transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
        w.slots[lane].matrix.r[matrix] = (u32)lo | (u32)hi << 16;
    }
}

static Slot& ldmatrix(u32 matrices, const void* row, bool transposed, const char* what, Site site) {
    Warp& w = whole_warp(what, site);
    if (self->lane < 8 * matrices) {
        require_shared(row, 16, 16, what, site);
        check(row, 16, Access::READ, site);
    }
    Slot& mine = w.slots[self->lane];
    mine.matrix.row = static_cast<const u8*>(row);
    if (meet(~0u, what, site)) {
        for (u32 m = 0; m < matrices; m++) load_matrix(w, m, transposed);
        part();
    }
    return mine;
}

Words4 ldmatrix_4(const void* row, bool transposed, Site site) {
    const Slot& s = ldmatrix(4, row, transposed, transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", site);
    return {{s.matrix.r[0], s.matrix.r[1], s.matrix.r[2], s.matrix.r[3]}};
}
Words2 ldmatrix_2(const void* row, bool transposed, Site site) {
    const Slot& s = ldmatrix(2, row, transposed, transposed ? "ldmatrix_x2_trans" : "ldmatrix_x2", site);
    return {{s.matrix.r[0], s.matrix.r[1]}};
}

u32 movmatrix(u32 value, Site site) {
    Warp& w = whole_warp("movmatrix_trans", site);
    auto& mine = w.slots[self->lane].shuffle;
    mine.value = value;
    if (meet(~0u, "movmatrix_trans", site)) {
        u16 m[8][8];
        for (u32 lane = 0; lane < 32; lane++) memcpy(&m[lane / 4][2 * (lane % 4)], &w.slots[lane].shuffle.value, 4);
        for (u32 lane = 0; lane < 32; lane++) {
            u32 g = lane / 4, t = lane % 4;
            w.slots[lane].shuffle.result = (u32)m[2 * t][g] | (u32)m[2 * t + 1][g] << 16;
        }
        part();
    }
    return mine.result;
}

// ---------------------------------------------------------------------------------------------------------

struct Bf16 {
    static float wide(u16 v) { return bf16_to_f32(v); }
};
struct F16 {
    static float wide(u16 v) { return f16_to_f32(v); }
};

// Eight columns are a vector: the inner loop is one fused multiply-add where the CPU has it.
__attribute__((target_clones("arch=haswell", "default"))) static void multiply(float c[16][8], const float a[16][16], const float b[16][8]) {
    typedef float Row __attribute__((vector_size(32), aligned(4)));
    for (int m = 0; m < 16; m++) {
        Row sum = *(const Row*)c[m];
        for (int k = 0; k < 16; k++) sum += a[m][k] * *(const Row*)b[k];
        *(Row*)c[m] = sum;
    }
}

template <class T> static void mma_16(Warp& w) {
    float a[16][16], b[16][8], c[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        const auto& s = w.slots[lane].mma;
        for (u32 i = 0; i < 2; i++) {
            u32 column = 2 * t + i, shift = 16 * i;
            a[g][column] = T::wide((u16)(s.a[0] >> shift));
            a[g + 8][column] = T::wide((u16)(s.a[1] >> shift));
            a[g][column + 8] = T::wide((u16)(s.a[2] >> shift));
            a[g + 8][column + 8] = T::wide((u16)(s.a[3] >> shift));
            b[column][g] = T::wide((u16)(s.b[0] >> shift));
            b[column + 8][g] = T::wide((u16)(s.b[1] >> shift));
            c[g][column] = s.c[i];
            c[g + 8][column] = s.c[2 + i];
        }
    }
    multiply(c, a, b);
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        auto& s = w.slots[lane].mma;
        s.c[0] = c[g][2 * t], s.c[1] = c[g][2 * t + 1];
        s.c[2] = c[g + 8][2 * t], s.c[3] = c[g + 8][2 * t + 1];
    }
    machine->stats.mma++;
}

template <class T> static Floats4 mma(const Floats4& c, const Words4& a, const Words2& b, const char* what, Site site) {
    Warp& w = whole_warp(what, site);
    auto& mine = w.slots[self->lane].mma;
    mine = {{a.r[0], a.r[1], a.r[2], a.r[3]}, {b.r[0], b.r[1]}, {c.c[0], c.c[1], c.c[2], c.c[3]}};
    if (meet(~0u, what, site)) {
        mma_16<T>(w);
        part();
    }
    return {{mine.c[0], mine.c[1], mine.c[2], mine.c[3]}};
}

Floats4 mma_bf16(Floats4 c, Words4 a, Words2 b, Site site) { return mma<Bf16>(c, a, b, "mma_16816<bf16>", site); }
Floats4 mma_f16(Floats4 c, Words4 a, Words2 b, Site site) { return mma<F16>(c, a, b, "mma_16816<f16>", site); }

static void mma_32(Warp& w) {
    int8_t a[16][32], b[8][32];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        const auto& s = w.slots[lane].mma_s8;
        memcpy(&a[g][4 * t], &s.a[0], 4);
        memcpy(&a[g + 8][4 * t], &s.a[1], 4);
        memcpy(&a[g][4 * t + 16], &s.a[2], 4);
        memcpy(&a[g + 8][4 * t + 16], &s.a[3], 4);
        memcpy(&b[g][4 * t], &s.b[0], 4);
        memcpy(&b[g][4 * t + 16], &s.b[1], 4);
    }
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4; i++) {
            const int8_t *row = a[g + 8 * (i / 2)], *column = b[2 * t + i % 2];
            u32 sum = (u32)w.slots[lane].mma_s8.c[i]; // wraps, as without .satfinite
            for (int k = 0; k < 32; k++) sum += (u32)((i32)row[k] * column[k]);
            w.slots[lane].mma_s8.c[i] = (i32)sum;
        }
    }
    machine->stats.mma++;
}

Ints4 mma_s8(Ints4 c, Words4 a, Words2 b, Site site) {
    Warp& w = whole_warp("mma_16832_s8", site);
    auto& mine = w.slots[self->lane].mma_s8;
    mine = {{a.r[0], a.r[1], a.r[2], a.r[3]}, {b.r[0], b.r[1]}, {c.c[0], c.c[1], c.c[2], c.c[3]}};
    if (meet(~0u, "mma_16832_s8", site)) {
        mma_32(w);
        part();
    }
    return {{mine.c[0], mine.c[1], mine.c[2], mine.c[3]}};
}

} // namespace emu
