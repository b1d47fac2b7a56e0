// pages.cuh    what moving pages between the device's layout and the host's is made of, whatever their KV type is
#pragma once

#include "common.cuh"

namespace pages {

constexpr u32 TOKENS = KV_PAGE_TOKENS;
constexpr u32 THREADS = 256;
constexpr u32 MOST_DIMS = 256;

// One (layer, page, head): addresses in both layouts, and how many of its tokens exist.
struct Place {
    u8* device;
    u8* host;
    u32 n_tokens;
};

// `half_bytes` of K, after which as many of V begin.
DEVICE Place place_of(const PagesParams& p, u32 i, u32 half_bytes) {
    u32 head = i % p.n_kv_heads, page = i / p.n_kv_heads % p.n_pages, layer = i / p.n_kv_heads / p.n_pages;
    u64 bytes = 2 * half_bytes;
    return Place{(u8*)p.layers[layer].device + ((u64)p.pages[page].device * p.n_kv_heads + head) * bytes,
                 (u8*)p.layers[layer].host + ((u64)p.pages[page].host * p.n_kv_heads + head) * bytes, p.pages[page].tokens};
}

// Walks over (layer, page, head). A thread loads its pieces of the next one before it stores the last part of this one, so that the
// bus has work while shared memory is turned over.
template <class Way> DEVICE void move(const PagesParams& p, u8* shared) {
    u32 head_dim = p.head_dim, all = p.n_layers * p.n_pages * p.n_kv_heads, i = blockIdx.x;
    if (i >= all) return;
    typename Way::Held held;
    Place at = place_of(p, i, Way::half_bytes(head_dim));
    Way::load(at, head_dim, held);
    for (;;) {
        Way::stage(head_dim, shared, held);
        Way::store_first(at, head_dim, held);
        i += gridDim.x;
        bool more = i < all;
        Place next = more ? place_of(p, i, Way::half_bytes(head_dim)) : at;
        if (more) Way::load(next, head_dim, held);
        __syncthreads();
        Way::store_last(at, head_dim, shared);
        if (!more) return;
        at = next;
        __syncthreads();
    }
}

} // namespace pages
