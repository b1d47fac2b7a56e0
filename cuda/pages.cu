// pages.cu    pages of keys and values between the device's layout and the host's, for swapping
//
//   device  K [32 tokens][head_dim]               V [32 tokens][head_dim]           (a token's row is contiguous)
//   host    K [token/16][head_dim/2][16][2]       V [token/2][head_dim][2]          (what the CPU's dot products read)
//
// A swapped page can so be attended on the CPU in place, and comes back without a pass on the host.
//
// in     addresses of layers, page ids and token counts, in the parameters; the host's side is a staging buffer of the
//        device or mapped host memory. A sequence's last page holds fewer than 32 tokens; the rest of it becomes zeros,
//        and is not read where the device's page is the source
// out    every byte of the listed pages of every listed layer
// launch grid few blocks, each walks over (layer, page, head) in strides; block 256, shared 32 * (head_dim/2 + 2) * 4
//        bytes; head_dim % 16 == 0, at most 256. Few, because these kernels run beside products, on streams that go
//        first (docs/decisions/0036): a block holds its multiprocessor's room for as long as the bus takes
// bound  the bus (or memory): 128*head_dim bytes in and out a (layer, page, head). All global accesses are 16 bytes a
//        thread, neighbours contiguous, so that stores to the host fill whole bus packets. A thread loads its pieces of
//        the next (layer, page, head) before it stores the last half of this one: up to 128 bytes a thread in flight
// banks  K is a transpose of words (pairs of dims) through shared memory. A warp gathers 4 tokens of 4 groups of 8
//        words: token rows of head_dim/2 + 2 = 2 mod 8 words put groups 8 banks apart: no conflict. Its 8-byte
//        stores of rows conflict two ways. V is exchanged between neighbouring lanes, one token of a pair each
// error  none: a permutation
// oracle tandem::cache::LayerKv::{key, value}
// no-spill all
// no-stack all
#include "common.cuh"
#include "pages.cuh"
#include "ptx.cuh"

namespace pages {

// 16-byte pieces of K, and of V, that a thread holds. A (layer, page, head) has 4 * head_dim of each, whole warps of them.
constexpr int HELD = 4 * MOST_DIMS / THREADS;

struct Pieces {
    uint4 k[HELD], v[HELD];
};

// Words of a token's row in the shared transpose.
DEVICE u32 shared_stride(u32 head_dim) { return head_dim / 2 + 2; }

// Bytes of K, after which V begins.
DEVICE u32 half_page(u32 head_dim) { return TOKENS * head_dim * 2; }

// Where, in the shared transpose, the four words of host piece `i` of K lie: four tokens of one pair of dims.
DEVICE u32 k_piece(u32 i, u32 head_dim) {
    u32 pair = i / 4 % (head_dim / 2), token = i / 4 / (head_dim / 2) * 16 + i % 4 * 4;
    return token * shared_stride(head_dim) + pair;
}

// Host piece `i` of V has 4 dims of a pair of tokens; it and its neighbour have 8. On the device these are a row piece of
// either token: the first lane of two takes the even token's, the second the odd one's.
DEVICE u32 v_token(u32 i, u32 head_dim) { return i / (head_dim / 4) * 2 + i % 2; }
DEVICE u32 v_piece(u32 i, u32 head_dim) { return i % (head_dim / 4) / 2; }

// Low halves of two words side by side, and high halves: what (de)interleaves the tokens of a pair.
DEVICE u32 lows(u32 a, u32 b) { return prmt(a, b, 0x5410); }
DEVICE u32 highs(u32 a, u32 b) { return prmt(a, b, 0x7632); }

DEVICE u32 neighbours(u32 word) { return __shfl_xor_sync(~0u, word, 1); }

// This lane's row piece of a token of the pair to its host piece. All lanes of a warp call it.
DEVICE uint4 v_interleaved(uint4 mine) {
    bool odd = lane_id() % 2;
    u32 r0 = neighbours(odd ? mine.x : mine.z), r1 = neighbours(odd ? mine.y : mine.w);
    u32 a0 = odd ? r0 : mine.x, a1 = odd ? r1 : mine.y, b0 = odd ? mine.z : r0, b1 = odd ? mine.w : r1;
    return make_uint4(lows(a0, b0), highs(a0, b0), lows(a1, b1), highs(a1, b1));
}
// The inverse.
DEVICE uint4 v_separated(uint4 mine) {
    bool odd = lane_id() % 2;
    u32 l0 = lows(mine.x, mine.y), l1 = lows(mine.z, mine.w), h0 = highs(mine.x, mine.y), h1 = highs(mine.z, mine.w);
    u32 r0 = neighbours(odd ? l0 : h0), r1 = neighbours(odd ? l1 : h1);
    return odd ? make_uint4(r0, r1, h0, h1) : make_uint4(l0, l1, r0, r1);
}

// f(piece, which of the thread's it is) of this thread's pieces of K, or of V.
template <class F> DEVICE void each_piece(u32 head_dim, F f) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        u32 i = j * THREADS + threadIdx.x;
        if (i < 4 * head_dim) f(i, j);
    }
}

struct Way {
    using Held = Pieces;
    static DEVICE u32 half_bytes(u32 head_dim) { return half_page(head_dim); }
};

struct ToHost : Way {
    // Eight dims of a token, or zeros.
    static DEVICE uint4 row_piece(const Place& at, const u8* rows, u32 token, u32 head_dim, u32 piece) {
        return token < at.n_tokens ? ld_16(rows + (token * head_dim + piece * 8) * 2) : make_uint4(0, 0, 0, 0);
    }
    static DEVICE void load(const Place& at, u32 head_dim, Pieces& held) {
        const u8 *k = at.device, *v = at.device + half_page(head_dim);
        u32 pieces = head_dim / 8;
        each_piece(head_dim, [&](u32 i, int j) { held.k[j] = row_piece(at, k, i / pieces, head_dim, i % pieces); });
        each_piece(head_dim, [&](u32 i, int j) {
            held.v[j] = row_piece(at, v, v_token(i, head_dim), head_dim, v_piece(i, head_dim));
        });
    }
    static DEVICE void stage(u32 head_dim, u8* shared, const Pieces& held) {
        u32* const words = (u32*)shared;
        u32 pieces = head_dim / 8;
        each_piece(head_dim, [&](u32 i, int j) {
            uint2* to = (uint2*)(words + i / pieces * shared_stride(head_dim) + i % pieces * 4);
            to[0] = make_uint2(held.k[j].x, held.k[j].y);
            to[1] = make_uint2(held.k[j].z, held.k[j].w);
        });
    }
    static DEVICE void store_first(const Place& at, u32 head_dim, const Pieces& held) {
        uint4* to = (uint4*)(at.host + half_page(head_dim));
        each_piece(head_dim, [&](u32 i, int j) { to[i] = v_interleaved(held.v[j]); });
    }
    static DEVICE void store_last(const Place& at, u32 head_dim, const u8* shared) {
        const u32* const words = (const u32*)shared;
        u32 stride = shared_stride(head_dim);
        each_piece(head_dim, [&](u32 i, int) {
            const u32* from = words + k_piece(i, head_dim);
            ((uint4*)at.host)[i] = make_uint4(from[0], from[stride], from[2 * stride], from[3 * stride]);
        });
    }
};

struct FromHost : Way {
    static DEVICE void load(const Place& at, u32 head_dim, Pieces& held) {
        const uint4 *k = (const uint4*)at.host, *v = (const uint4*)(at.host + half_page(head_dim));
        each_piece(head_dim, [&](u32 i, int j) { held.k[j] = k[i]; });
        each_piece(head_dim, [&](u32 i, int j) { held.v[j] = v[i]; });
    }
    static DEVICE void stage(u32 head_dim, u8* shared, const Pieces& held) {
        u32* const words = (u32*)shared;
        u32 stride = shared_stride(head_dim);
        each_piece(head_dim, [&](u32 i, int j) {
            u32* to = words + k_piece(i, head_dim);
            to[0] = held.k[j].x, to[stride] = held.k[j].y, to[2 * stride] = held.k[j].z, to[3 * stride] = held.k[j].w;
        });
    }
    static DEVICE void store_first(const Place& at, u32 head_dim, const Pieces& held) {
        uint4* to = (uint4*)(at.device + half_page(head_dim));
        each_piece(head_dim, [&](u32 i, int j) {
            u32 token = v_token(i, head_dim);
            uint4 row = v_separated(held.v[j]);
            to[token * (head_dim / 8) + v_piece(i, head_dim)] = token < at.n_tokens ? row : make_uint4(0, 0, 0, 0);
        });
    }
    static DEVICE void store_last(const Place& at, u32 head_dim, const u8* shared) {
        const u32* const words = (const u32*)shared;
        u32 pieces = head_dim / 8;
        each_piece(head_dim, [&](u32 i, int) {
            u32 token = i / pieces;
            const uint2* from = (const uint2*)(words + token * shared_stride(head_dim) + i % pieces * 4);
            uint2 a = from[0], b = from[1];
            ((uint4*)at.device)[i] = token < at.n_tokens ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(0, 0, 0, 0);
        });
    }
};

} // namespace pages

KERNEL_BOUNDS(pages_to_host, PagesParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    pages::move<pages::ToHost>(p, smem);
}
KERNEL_BOUNDS(pages_from_host, PagesParams, 256, 1) {
    SHARED_DYNAMIC(smem);
    pages::move<pages::FromHost>(p, smem);
}
