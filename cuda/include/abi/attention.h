// abi/attention.h    see ../abi.h
#pragma once

// The work lists of a step, made by tandem::device::kernels::attention, uploaded once and used by every layer.
// Which tokens belong to which item depends on the row's own position alone, never on the batch.

// The page of an item's token is `page_table[(abi_u32)(item.pages + token / KV_PAGE_TOKENS)]`: all sequences' pages lie in one
// table; where a sequence's first tokens are elsewhere, `pages` may lie before the table's start (and wraps).

// `partial` of an item whose row is finished here: normalised, into `out`.
#define ATTENTION_FINAL 0xffffffffu
// Tokens that one decode item may span: a warp's page numbers fit its 32 lanes.
#define DECODE_SPLIT_MAX 1024
// Query heads that a decode block takes together (the n8 of mma).
#define DECODE_HEADS 8
// Queries of a prefill item, at most: four warps of m16, and on sm_90a two warpgroups of m64.
#define PREFILL_QUERIES 64
#define PREFILL_QUERIES_SM90A 128

// What `out` holds.
#define ATTENTION_OUT_F16 0
#define ATTENTION_OUT_BF16 1

// One row over its tokens [begin, end), for every head. begin == end: nothing seen (a padding row: zeros).
typedef struct {
    abi_u32 row;        // of q and out
    abi_u32 pages;      // where the sequence's pages begin in the table
    abi_u32 begin, end; // tokens
    abi_u32 split;      // which of the row's splits this is...
    abi_u32 n_splits;   // ...of how many; the one that finishes last merges them, in order
    abi_u32 workspace;  // place of the row's first split in the workspace
    abi_u32 partial;    // row of the partial output, or ATTENTION_FINAL
} DecodeItem;

// Rows row0.. of a sequence at positions first_pos.., at most PREFILL_QUERIES(_SM90A): each sees the tokens of
// [begin, end) that are not after it and not before its window.
typedef struct {
    abi_u32 row0, n_rows;
    abi_u32 first_pos;
    abi_u32 pages;
    abi_u32 begin, end;
    abi_u32 partial; // row of the partial output for row0, or ATTENTION_FINAL
    abi_u32 reserved;
} PrefillItem;

// decode_attention_<kv type>_d<head_dim>
typedef struct {
    PTR(const void) q;  // [rows][n_heads * head_dim], KV type
    PTR(const void) kv; // this layer's pages, KV type
    PTR(const abi_u32) page_table;
    PTR(const DecodeItem) items;
    PTR(const abi_u32) n_items; // read on the device: a captured launch serves steps of other sizes
    PTR(void) out;              // [rows][n_heads * head_dim], out_type
    PTR(float) part_m;          // [partial rows][n_heads]
    PTR(float) part_s;
    PTR(float) part_o;   // [partial rows][n_heads * head_dim]
    PTR(float) split_ms; // [workspace splits][n_heads][2], base-2 exponents
    PTR(float) split_o;  // [workspace splits][n_heads][head_dim]
    PTR(abi_u32) counters; // [rows][n_kv_heads * ceil(group / DECODE_HEADS)], zero before and after
    PTR(const float) sinks; // [n_heads], logits without a value that join the sums of finished rows; NULL: none
    abi_u32 n_heads, n_kv_heads;
    abi_u32 out_type;
    float scale_log2; // scale * log2(e) > 0
    float cap_span;   // soft-cap of q . k before the scale: 2 * cap / scale; 0: none
    float cap_slope;  // 2 * log2(e) * scale / cap
} DecodeAttentionParams;

// prefill_attention_<kv type>_d<head_dim>
typedef struct {
    PTR(const void) q;  // [rows][n_heads * head_dim], KV type
    PTR(const void) kv; // this layer's pages, KV type
    PTR(const abi_u32) page_table;
    PTR(const PrefillItem) items;
    PTR(const abi_u32) n_items;
    PTR(void) out;     // [rows][n_heads * head_dim], out_type
    PTR(float) part_m; // [partial rows][n_heads]
    PTR(float) part_s;
    PTR(float) part_o;      // [partial rows][n_heads * head_dim]
    PTR(const float) sinks; // [n_heads], as of decode
    abi_u32 n_heads, n_kv_heads;
    abi_u32 out_type;
    abi_u32 window;   // tokens that a row sees, itself included; 0: all
    float scale_log2; // scale * log2(e) > 0
    float cap_span;   // soft-cap of q . k before the scale: 2 * cap / scale; 0: none
    float cap_slope;  // 2 * log2(e) * scale / cap
} PrefillAttentionParams;

// prefill_attention_<kv type>_d<head_dim>_sm90a
typedef struct {
    PrefillAttentionParams attention;
    TensorMap kv; // the layer's pages as rows of head_dim, boxes of a page's 32 tokens x 64
} PrefillAttentionTmaParams;

// attention_merge_<out type>: two partials of the same rows, over disjoint tokens, to the final rows
typedef struct {
    PTR(const float) m_a; // [n_rows][n_heads]
    PTR(const float) s_a;
    PTR(const float) o_a; // [n_rows][n_heads * head_dim]
    PTR(const float) m_b; // the same, from elsewhere (the host's share)
    PTR(const float) s_b;
    PTR(const float) o_b;
    PTR(const abi_u32) rows;   // [n_rows] row of out that each becomes
    PTR(const abi_u32) n_rows; // read on the device
    PTR(void) out;             // [rows][n_heads * head_dim]
    PTR(const float) sinks;    // [n_heads], as of decode
    abi_u32 n_heads, head_dim;
} AttentionMergeParams;
