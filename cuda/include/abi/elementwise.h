// abi/elementwise.h    embeddings, norms, RoPE and appending, activations, logits    see ../abi.h
#pragma once

// In a list of tokens or rows: nothing here (the padding of a batch bucket).
#define ROW_NONE 0xffffffffu

// embed.cu: hidden[row] = scale * table[tokens[row]] (+ positions[row_pos[row] + position_offset])
typedef struct {
    PTR(const abi_u32) tokens;     // [rows] rows of the table; NULL: row r is row r of the table; beyond vocab: zeros
    PTR(const abi_u8) table;       // [vocab] rows as the model file stores them, row_bytes apart
    PTR(const abi_u32) row_pos;    // [rows]; only read with positions
    PTR(const abi_u8) positions;   // [n_positions][d] learned positions; NULL: none
    PTR(float) hidden;             // [rows][d]
    abi_u64 row_bytes;
    abi_u32 rows;
    abi_u32 d;
    abi_u32 vocab;
    abi_u32 n_positions;
    abi_u32 position_dtype;        // EMBED_POSITION_*
    abi_u32 position_offset;
    float scale;
} EmbedParams;

#define EMBED_POSITION_F32 0
#define EMBED_POSITION_F16 1
#define EMBED_POSITION_BF16 2

// norm.cu: sum[i] = hidden[r] + post(delta[r] + delta_bias), x[i] = norm(sum[i]) or sum[i], for r = row_list[i]
typedef struct {
    PTR(const float) hidden;       // [..][d]
    PTR(const float) delta;        // [..][ld_delta]; NULL: nothing is added
    PTR(const float) delta_bias;   // [d]; NULL: none
    PTR(const float) post_w;       // [d] RMS norm of what is added; NULL: none
    PTR(const float) w;            // [d]; only read with x; NULL: x is the sum itself
    PTR(const float) b;            // [d] (layer norm); NULL: none
    PTR(float) sum;                // [rows][d]; without row_list it may be hidden itself; NULL: not stored
    PTR(void) x;                   // [rows][ld_x] bf16 or f16; NULL: only the sum
    PTR(const abi_u32) row_list;   // [rows]; NULL: row i is row i; ROW_NONE: rows of zeros
    abi_u32 rows;
    abi_u32 d;
    abi_u32 ld_delta;
    abi_u32 ld_x;
    float eps;
    float post_eps;
} NormParams;

// rope_append.cu: what happens to q, k and v between their projection and attention
typedef struct {
    PTR(const float) qkv;          // [rows][ld]: q heads, k heads, v heads
    PTR(const float) bias;         // [(n_heads + 2 n_kv_heads) * head_dim]; NULL: none
    PTR(const float) q_norm;       // [head_dim] RMS norm of each query head; NULL: none; or, for
                                   // rope_append_whole_*, [n_heads*head_dim] RMS norm of all of them together
    PTR(const float) k_norm;       // [head_dim]; NULL: none; or [n_kv_heads*head_dim]
    PTR(const float) rope_cos;     // [positions][rope_dim/2]
    PTR(const float) rope_sin;     // [positions][rope_dim/2]
    PTR(const abi_u32) row_pos;    // [rows]; only read when rope_dim > 0
    PTR(const int) row_slot;       // [rows] page * KV_PAGE_TOKENS + token in page; -1: K and V go nowhere; NULL: of no row
    PTR(float) finished;           // [rows][ld] q, k and v as f32; it may be qkv itself; NULL: not stored
    PTR(abi_u16) q;                // [rows][n_heads*head_dim] in the KV type, of q8 in f16; NULL: not stored
    PTR(abi_u16) kv;               // this layer's pages
    PTR(const int) publish_slot;   // [rows] place of the row in `published`; -1: none; NULL: nothing is published
    PTR(const abi_u32) n_published; // device word: how many rows are published, in all launches
    PTR(abi_u8) published;         // [..] rows of publish_stride bytes: q, k, v in the KV type, in mapped host memory
    PTR(const abi_u32) epoch;      // device word; epoch_flag becomes *epoch + epoch_add when all rows are there
    PTR(abi_u32) epoch_flag;       // mapped host memory
    PTR(abi_u32) arrived;          // device word, 0 between steps: rows may be divided among launches of one lane
    abi_u64 publish_stride;
    abi_u32 epoch_add;
    abi_u32 rows;
    abi_u32 ld;
    abi_u32 n_heads;
    abi_u32 n_kv_heads;
    abi_u32 head_dim;
    abi_u32 rope_dim;              // rotated elements of a head, a multiple of 4; 0: none
    abi_u32 interleaved;           // 1: RoPE turns (2i, 2i + 1); 0: (i, i + rope_dim/2)
    float eps;
} RopeAppendParams;

// activation.cu: out = act(gate + gate_bias) * (up + up_bias), or without `up` act(gate + gate_bias)
typedef struct {
    PTR(const float) gate;         // [rows][ld_gate]
    PTR(const float) up;           // [rows][ld_up]; only read by the gated kinds
    PTR(const float) gate_bias;    // [n]; NULL: none
    PTR(const float) up_bias;      // [n]; NULL: none
    PTR(void) out;                 // [rows][ld_out]
    abi_u32 rows;
    abi_u32 n;
    abi_u32 ld_gate;
    abi_u32 ld_up;
    abi_u32 ld_out;
} ActivationParams;

// logits.cu: x = cap * tanh(x / cap) in place
typedef struct {
    PTR(float) logits;             // [rows][ld]
    abi_u32 rows;
    abi_u32 vocab;
    abi_u32 ld;
    float cap;
} SoftcapParams;

// logits.cu: logits that a warp of the first stage covers.
#define LOGITS_SPAN 1024
// logits.cu: the most candidates that a row can keep.
#define LOGITS_MAX_K 64

// logits.cu: the k greatest logits of each row and log sum exp of the row, in two stages
typedef struct {
    PTR(const float) logits;       // [rows][ld]
    PTR(abi_u64) keys;             // [rows][spans][k] workspace: candidates of each span
    PTR(float) sums;               // [rows][spans][2] workspace: greatest logit m, sum of e^(x - m)
    PTR(abi_u32) indices;          // [rows][k], greatest first, the lower index first among equals
    PTR(float) values;             // [rows][k]; NULL: not wanted
    PTR(float) logsumexp;          // [rows]; NULL: not wanted
    abi_u32 rows;
    abi_u32 vocab;
    abi_u32 ld;
    abi_u32 spans;                 // ceil(vocab / LOGITS_SPAN)
    abi_u32 k;
} LogitsReduceParams;

// top_k.cu: logits of a row that it finds, most rows of a launch, and 32-bit words of a row of its results
#define TOP_K 256
#define TOP_ROWS 128
#define TOP_WORDS (2 * TOP_K + 4)

// top_k.cu: the TOP_K greatest logits of each row, and the sum of e^(factor * (x - greatest)) over the row
typedef struct {
    PTR(const float) logits;       // [rows][ld]
    PTR(float) out;                // [rows][TOP_WORDS]: values [TOP_K], tokens [TOP_K], sum, unused [3]
    abi_u32 vocab;
    abi_u32 ld;
    float factors[TOP_ROWS];       // as many as the launch has blocks
} TopKParams;
