// pages_q8.cu    pages.cu for keys and values in 8 bits: codes, and a scale for each token (docs/decisions/0052)
//
//   device  K [32 tokens][head_dim] [32] scales              V [32 tokens][head_dim] [32] scales      (bytes; scales in f32)
//   host    K [token/16][head_dim/2][16][2] [32] scales      V [token/2][head_dim][2] [32] scales
//
// in, out, launch    as pages.cu, shared 2 * 32 * (head_dim + 4) + 256 bytes
// bound  the bus: 2 * 32 * (head_dim + 4) bytes in and out a (layer, page, head)
// banks  all pieces go through rows of head_dim + 4 bytes in shared memory: head_dim/4 + 1 words, so that the eight tokens that
//        a piece of the host's K has lie in different banks
// error  none: a permutation
// oracle tandem::cache::LayerKv::{key, value}
// no-spill all
// no-stack all
#include "common.cuh"
#include "pages.cuh"
#include "ptx.cuh"

namespace pages_q8 {

using namespace pages;

// 16-byte pieces of codes that a thread holds: a (layer, page, head) has 4 * head_dim of them.
constexpr int HELD = 4 * MOST_DIMS / THREADS;
// And of scales: 64 of them are 16 pieces, of the first threads.
constexpr u32 SCALES = 2 * TOKENS / 4;

// Codes of K come first, then those of V; both as rows of tokens.
DEVICE u32 row_bytes(u32 head_dim) { return head_dim + 4; }
DEVICE u32 scales_at(u32 head_dim) { return 2 * TOKENS * row_bytes(head_dim); }
DEVICE u32 half_page(u32 head_dim) { return TOKENS * (head_dim + 4); }

struct Pieces {
    uint4 codes[HELD], scales;
};

// f(piece of K or V, whether of V, which of the thread's it is) of this thread's pieces.
template <class F> DEVICE void each_piece(u32 head_dim, F f) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        u32 i = j * THREADS + threadIdx.x;
        if (i < 4 * head_dim) f(i % (2 * head_dim), i >= 2 * head_dim, j);
    }
}

// A piece of the device's layout: sixteen dims of a token. In shared memory its words are not 16 bytes aligned.
struct Row {
    u32 token, at; // the token of the piece, and where its words lie in shared memory
    DEVICE Row(u32 i, bool is_v, u32 head_dim) {
        token = i / (head_dim / 16);
        at = (is_v * TOKENS + token) * row_bytes(head_dim) + i % (head_dim / 16) * 16;
    }
    DEVICE void put(u8* shared, uint4 v) const {
        u32* to = (u32*)(shared + at);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
    DEVICE uint4 get(const u8* shared) const {
        const u32* from = (const u32*)(shared + at);
        return make_uint4(from[0], from[1], from[2], from[3]);
    }
};

// A piece of the host's: of K a pair of dims of eight tokens, of V eight dims of a pair of tokens.
struct Group {
    u8* at;
    u32 stride;
    bool is_v;
    DEVICE Group(u8* shared, u32 i, bool v, u32 head_dim) : stride(row_bytes(head_dim)), is_v(v) {
        if (v) {
            at = shared + (TOKENS + i / (head_dim / 8) * 2) * stride + i % (head_dim / 8) * 8;
        } else {
            u32 pair = i / 2 % (head_dim / 2), token = i / head_dim * 16 + i % 2 * 8;
            at = shared + token * stride + pair * 2;
        }
    }
    DEVICE u32 pair(u32 token) const { return *(const u16*)(at + token * stride); }
    DEVICE void put_pair(u32 token, u32 v) const { *(u16*)(at + token * stride) = (u16)v; }
    DEVICE uint4 get() const {
        if (!is_v) return make_uint4(pair(0) | pair(1) << 16, pair(2) | pair(3) << 16, pair(4) | pair(5) << 16, pair(6) | pair(7) << 16);
        const u32 *a = (const u32*)at, *b = (const u32*)(at + stride);
        return make_uint4(prmt(a[0], b[0], 0x5140), prmt(a[0], b[0], 0x7362), prmt(a[1], b[1], 0x5140), prmt(a[1], b[1], 0x7362));
    }
    DEVICE void put(uint4 v) const {
        if (is_v) {
            u32 *a = (u32*)at, *b = (u32*)(at + stride);
            a[0] = prmt(v.x, v.y, 0x6420), b[0] = prmt(v.x, v.y, 0x7531);
            a[1] = prmt(v.z, v.w, 0x6420), b[1] = prmt(v.z, v.w, 0x7531);
        } else {
            put_pair(0, v.x), put_pair(1, v.x >> 16), put_pair(2, v.y), put_pair(3, v.y >> 16);
            put_pair(4, v.z), put_pair(5, v.z >> 16), put_pair(6, v.w), put_pair(7, v.w >> 16);
        }
    }
};

struct Way {
    using Held = Pieces;
    static DEVICE u32 half_bytes(u32 head_dim) { return half_page(head_dim); }
    static DEVICE void store_first(const Place&, u32, const Pieces&) {} // all of it goes through shared memory

    // Four scales: both sides have them in the same order.
    static DEVICE uint4* scales_of(u8* side, u32 head_dim) {
        return (uint4*)(side + threadIdx.x / (TOKENS / 4) * half_page(head_dim) + TOKENS * head_dim) + threadIdx.x % (TOKENS / 4);
    }
    static DEVICE void load_scales(u8* side, u32 head_dim, Pieces& held) {
        if (threadIdx.x < SCALES) held.scales = *scales_of(side, head_dim);
    }
    static DEVICE void stage_scales(u32 head_dim, u8* shared, const Pieces& held) {
        if (threadIdx.x < SCALES) ((uint4*)(shared + scales_at(head_dim)))[threadIdx.x] = held.scales;
    }
    static DEVICE void store_scales(u8* side, u32 head_dim, u32 n_tokens, const u8* shared) {
        if (threadIdx.x >= SCALES) return;
        uint4 v = ((const uint4*)(shared + scales_at(head_dim)))[threadIdx.x];
        u32 token = threadIdx.x % (TOKENS / 4) * 4;
        v.x = token < n_tokens ? v.x : 0, v.y = token + 1 < n_tokens ? v.y : 0;
        v.z = token + 2 < n_tokens ? v.z : 0, v.w = token + 3 < n_tokens ? v.w : 0;
        *scales_of(side, head_dim) = v;
    }
    static DEVICE u8* half(const u8* side, bool is_v, u32 head_dim) { return (u8*)side + is_v * half_page(head_dim); }
};

struct ToHost : Way {
    static DEVICE void load(const Place& at, u32 head_dim, Pieces& held) {
        each_piece(head_dim, [&](u32 i, bool v, int j) {
            bool there = Row(i, v, head_dim).token < at.n_tokens;
            held.codes[j] = there ? ld_16(half(at.device, v, head_dim) + i * 16) : make_uint4(0, 0, 0, 0);
        });
        load_scales(at.device, head_dim, held);
    }
    static DEVICE void stage(u32 head_dim, u8* shared, const Pieces& held) {
        each_piece(head_dim, [&](u32 i, bool v, int j) { Row(i, v, head_dim).put(shared, held.codes[j]); });
        stage_scales(head_dim, shared, held);
    }
    static DEVICE void store_last(const Place& at, u32 head_dim, u8* shared) {
        each_piece(head_dim, [&](u32 i, bool v, int) { ((uint4*)half(at.host, v, head_dim))[i] = Group(shared, i, v, head_dim).get(); });
        store_scales(at.host, head_dim, at.n_tokens, shared);
    }
};

struct FromHost : Way {
    static DEVICE void load(const Place& at, u32 head_dim, Pieces& held) {
        each_piece(head_dim, [&](u32 i, bool v, int j) { held.codes[j] = ((const uint4*)half(at.host, v, head_dim))[i]; });
        load_scales(at.host, head_dim, held);
    }
    static DEVICE void stage(u32 head_dim, u8* shared, const Pieces& held) {
        each_piece(head_dim, [&](u32 i, bool v, int j) { Group(shared, i, v, head_dim).put(held.codes[j]); });
        stage_scales(head_dim, shared, held);
    }
    static DEVICE void store_last(const Place& at, u32 head_dim, u8* shared) {
        each_piece(head_dim, [&](u32 i, bool v, int) {
            Row row(i, v, head_dim);
            ((uint4*)half(at.device, v, head_dim))[i] = row.token < at.n_tokens ? row.get(shared) : make_uint4(0, 0, 0, 0);
        });
        store_scales(at.device, head_dim, at.n_tokens, shared);
    }
};

} // namespace pages_q8

KERNEL_BOUNDS(pages_to_host_q8, PagesParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    pages::move<pages_q8::ToHost>(p, smem);
}
KERNEL_BOUNDS(pages_from_host_q8, PagesParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    pages::move<pages_q8::FromHost>(p, smem);
}
