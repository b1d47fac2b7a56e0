// abi/exchange.h    rows and pages between the device and the host    see ../abi.h
#pragma once

// exchange.cu: row list[i] of up to three sources, side by side and rounded to a 16-bit type, to place i of mapped host memory,
// then the epoch
typedef struct {
    PTR(const abi_u8) src[3];      // rows of f32, src_stride[s] bytes apart; NULL: no such source
    abi_u64 src_stride[3];
    abi_u32 src_bytes[3];          // bytes of a row that are read
    abi_u32 max_rows;              // most that n_rows can be
    PTR(abi_u8) dst;               // rows of dst_stride bytes
    abi_u64 dst_stride;
    PTR(const abi_u32) list;       // [max_rows]; NULL: row i
    PTR(const abi_u32) n_rows;     // device word; NULL: max_rows
    PTR(const abi_u32) epoch;      // device word; epoch_flag becomes *epoch + epoch_add when all rows are there
    PTR(abi_u32) epoch_flag;       // mapped host memory
    PTR(abi_u32) arrived;          // device word, 0 between launches
    abi_u32 epoch_add;
} PublishParams;

// exchange.cu: dst[dst_list[i]] = src[src_list[i]]
typedef struct {
    PTR(const abi_u8) src;
    PTR(abi_u8) dst;
    PTR(const abi_u32) src_list;   // [max_rows]; NULL: row i
    PTR(const abi_u32) dst_list;   // [max_rows]; NULL: row i; ROW_NONE in either list: nothing
    PTR(const abi_u32) n_rows;     // device word; NULL: max_rows
    PTR(const abi_u32) gate;       // device word (see ReadyParams): 0: do nothing; NULL: go
    abi_u64 src_stride;            // bytes
    abi_u64 dst_stride;            // bytes
    abi_u32 max_rows;
    abi_u32 n;                     // bytes of a row to copy
} MoveRowsParams;

// exchange.cu: has the other side reached an epoch?
typedef struct {
    PTR(const abi_u32) epoch_flag; // mapped host memory, or device memory
    PTR(const abi_u32) epoch;      // device word; what is waited for is *epoch + epoch_add
    PTR(abi_u32) ready;            // device word: 1 or 0
    abi_u32 epoch_add;
} ReadyParams;

// pages.cu: most pages of one launch, and most layers
#define PAGES_MAX 128
#define PAGES_LAYERS 64

// pages.cu: a page and where it goes or comes from, in every layer
typedef struct {
    abi_u32 device;                // page of the layer's `device`
    abi_u32 host;                  // page of its `host`
    abi_u32 tokens;                // tokens that it holds, 1..=32: the places after them become zeros
} PageItem;

// pages.cu: a layer's pages on both sides
typedef struct {
    PTR(abi_u16) device;           // [page][kv_head]: K [32][head_dim], V [32][head_dim]; of q8 each followed by its scales [32]
    PTR(abi_u16) host;             // [page][kv_head]: K [2][head_dim/2][16][2], V [16][head_dim][2] (tandem::cache)
} PageLayer;

// pages.cu: pages of some layers between the device's layout and the host's. The lists are part of the parameters, so
// a launch needs no other memory and its lists live as long as it does
typedef struct {
    abi_u32 n_kv_heads;
    abi_u32 head_dim;
    abi_u32 n_layers;
    abi_u32 n_pages;
    PageLayer layers[PAGES_LAYERS];
    PageItem pages[PAGES_MAX];
} PagesParams;
