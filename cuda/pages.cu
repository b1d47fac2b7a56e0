// pages.cu    pages of one layer between the device's layout and the host's, for swapping
//
//   device  K [32 tokens][head_dim]               V [32 tokens][head_dim]           (a token's row is contiguous)
//   host    K [token/16][head_dim/2][16][2]       V [token/2][head_dim][2]          (what the CPU's dot products read)
//
// A swapped page can so be attended on the CPU in place, and comes back without a pass on the host.
//
// in     page ids and token counts, in the parameters; the host's side is a staging buffer of the device or mapped host
//        memory. A sequence's last page holds fewer than 32 tokens; the rest of it becomes zeros, and is not read where
//        the device's page is the source
// out    every byte of the listed pages
// launch grid (pages <= PAGES_MAX, n_kv_heads), block 128, shared 32 * (head_dim/2 + 2) * 4 bytes; head_dim % 16 == 0
// bound  the bus (or memory): 128*head_dim bytes in and out a (page, head), all global accesses 16 bytes
// banks  K is a transpose of words (pairs of dims) through shared memory. A warp gathers 4 tokens of 4 groups of 8
//        words: token rows of head_dim/2 + 2 = 2 mod 8 words put groups 8 banks apart: no conflict. Its 8-byte
//        stores of rows conflict two ways
// error  none: a permutation
// oracle tandem::cache::LayerKv::{key, value}
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace pages {

constexpr u32 TOKENS = KV_PAGE_TOKENS;

// One half (K or V) of a (page, head): addresses in both layouts, and how many of its tokens exist.
struct Half {
    u16* device;
    u16* host;
    u32 n_tokens;
};

// Words of a token's row in the shared transpose.
DEVICE u32 shared_stride(u32 head_dim) { return head_dim / 2 + 2; }

// Eight dims of a token, or zeros.
DEVICE uint4 row_piece(const Half& h, u32 token, u32 head_dim, u32 piece) {
    return token < h.n_tokens ? ld_16(h.device + token * head_dim + piece * 8) : make_uint4(0, 0, 0, 0);
}

// Where, in the shared transpose, the four words of host piece `i` of K lie: four tokens of one pair of dims.
DEVICE u32 k_piece(u32 i, u32 head_dim) {
    u32 pair = i / 4 % (head_dim / 2), token = i / 4 / (head_dim / 2) * 16 + i % 4 * 4;
    return token * shared_stride(head_dim) + pair;
}

DEVICE void k_to_host(const Half& h, u32 head_dim, u32* words) {
    u32 stride = shared_stride(head_dim), pieces = head_dim / 8;
    for (u32 i = threadIdx.x; i < TOKENS * pieces; i += blockDim.x) {
        uint4 v = row_piece(h, i / pieces, head_dim, i % pieces);
        uint2* to = (uint2*)(words + i / pieces * stride + i % pieces * 4);
        to[0] = make_uint2(v.x, v.y);
        to[1] = make_uint2(v.z, v.w);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TOKENS * pieces; i += blockDim.x) {
        const u32* from = words + k_piece(i, head_dim);
        ((uint4*)h.host)[i] = make_uint4(from[0], from[stride], from[2 * stride], from[3 * stride]);
    }
}

DEVICE void k_from_host(const Half& h, u32 head_dim, u32* words) {
    u32 stride = shared_stride(head_dim), pieces = head_dim / 8;
    for (u32 i = threadIdx.x; i < TOKENS * pieces; i += blockDim.x) {
        uint4 v = ((const uint4*)h.host)[i];
        u32* to = words + k_piece(i, head_dim);
        to[0] = v.x, to[stride] = v.y, to[2 * stride] = v.z, to[3 * stride] = v.w;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TOKENS * pieces; i += blockDim.x) {
        u32 token = i / pieces;
        const uint2* from = (const uint2*)(words + token * stride + i % pieces * 4);
        uint2 a = from[0], b = from[1];
        ((uint4*)h.device)[i] = token < h.n_tokens ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(0, 0, 0, 0);
    }
}

// Low halves of two words side by side, and high halves: what (de)interleaves the tokens of a pair.
DEVICE u32 lows(u32 a, u32 b) { return prmt(a, b, 0x5410); }
DEVICE u32 highs(u32 a, u32 b) { return prmt(a, b, 0x7632); }

DEVICE void v_to_host(const Half& h, u32 head_dim) {
    u32 pieces = head_dim / 8;
    for (u32 i = threadIdx.x; i < TOKENS / 2 * pieces; i += blockDim.x) {
        u32 pair = i / pieces, piece = i % pieces;
        uint4 a = row_piece(h, 2 * pair, head_dim, piece), b = row_piece(h, 2 * pair + 1, head_dim, piece);
        uint4* to = (uint4*)h.host + 2 * i;
        to[0] = make_uint4(lows(a.x, b.x), highs(a.x, b.x), lows(a.y, b.y), highs(a.y, b.y));
        to[1] = make_uint4(lows(a.z, b.z), highs(a.z, b.z), lows(a.w, b.w), highs(a.w, b.w));
    }
}

DEVICE void v_from_host(const Half& h, u32 head_dim) {
    u32 pieces = head_dim / 8;
    uint4 zeros = make_uint4(0, 0, 0, 0);
    for (u32 i = threadIdx.x; i < TOKENS / 2 * pieces; i += blockDim.x) {
        u32 token = i / pieces * 2, piece = i % pieces;
        const uint4* from = (const uint4*)h.host + 2 * i;
        uint4 u = from[0], v = from[1];
        uint4 a = make_uint4(lows(u.x, u.y), lows(u.z, u.w), lows(v.x, v.y), lows(v.z, v.w));
        uint4 b = make_uint4(highs(u.x, u.y), highs(u.z, u.w), highs(v.x, v.y), highs(v.z, v.w));
        ((uint4*)h.device)[token * pieces + piece] = token < h.n_tokens ? a : zeros;
        ((uint4*)h.device)[(token + 1) * pieces + piece] = token + 1 < h.n_tokens ? b : zeros;
    }
}

// f(K, V) of this block's (page, head).
template <class F> DEVICE void each(const PagesParams& p, F f) {
    u32 i = blockIdx.x, head = blockIdx.y, n_tokens = p.pages[i].tokens, half = TOKENS * p.head_dim;
    u16* d = p.device + ((u64)p.pages[i].device * p.n_kv_heads + head) * 2 * half;
    u16* h = p.host + ((u64)p.pages[i].host * p.n_kv_heads + head) * 2 * half;
    f(Half{d, h, n_tokens}, Half{d + half, h + half, n_tokens});
}

} // namespace pages

KERNEL_BOUNDS(pages_to_host, PagesParams, 128, 1) {
    SHARED_DYNAMIC(smem);
    u32 head_dim = p.head_dim;
    pages::each(p, [=](const pages::Half& k, const pages::Half& v) {
        pages::k_to_host(k, head_dim, (u32*)smem);
        pages::v_to_host(v, head_dim);
    });
}
KERNEL_BOUNDS(pages_from_host, PagesParams, 128, 1) {
    SHARED_DYNAMIC(smem);
    u32 head_dim = p.head_dim;
    pages::each(p, [=](const pages::Half& k, const pages::Half& v) {
        pages::k_from_host(k, head_dim, (u32*)smem);
        pages::v_from_host(v, head_dim);
    });
}
