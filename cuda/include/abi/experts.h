// abi/experts.h    mixtures of experts: the choice of experts, places sorted by expert, grouped products, their sum    see ../abi.h
#pragma once

// No place: the expert is not on this device. In a table of slots: the expert's matrices lie elsewhere.
#define EXPERT_NONE 0xffffffffu

// Some rows of one expert: places first .. first + count. The capacity of a list of groups is fixed, groups of no rows
// are behind those that there are.
typedef struct {
    abi_u32 slot;   // where the expert's matrices lie
    abi_u32 first;
    abi_u32 count;  // 0: nothing; at most the tokens that the list was made for
    abi_u32 unused;
} ExpertGroup;

// experts_route.cu: logits[row][e] = router[e] . x[row] + bias[e], gate[row] = gate_w . x[row]
typedef struct {
    PTR(const float) router;   // [experts][d], 16-byte aligned
    PTR(const float) gate_w;   // [d], of a shared expert; NULL: none
    PTR(const void) x;         // T [rows][ldx], 8-byte aligned
    PTR(float) logits;         // [rows][experts]
    PTR(float) gate;           // [rows]; only written with gate_w
    PTR(const float) bias;     // [experts]; NULL: none
    abi_u32 rows;
    abi_u32 experts;
    abi_u32 d;                 // d % 4 == 0
    abi_u32 ldx;               // in elements; ldx % 4 == 0
} ExpertRouteParams;

// experts_route.cu: the `used` largest logits of each row, and their weights
typedef struct {
    PTR(const float) logits;   // [rows][experts]
    PTR(abi_u32) ids;          // [rows][used], the largest first, the lowest index first among equals
    PTR(float) weights;        // [rows][used]
    abi_u32 rows;
    abi_u32 experts;
    abi_u32 used;              // 1 to experts
    abi_u32 of_all;            // 1: softmax over all experts; 0: over the chosen
} ExpertChooseParams;

// experts_sort.cu: the places of all choices, sorted by expert, and groups of them
typedef struct {
    PTR(const abi_u32) ids;    // [choices], those of a row behind each other
    PTR(const abi_u32) slots;  // [experts] where an expert's matrices lie, or EXPERT_NONE; NULL: expert e's are the e-th
    PTR(abi_u32) places;       // [choices] the place of each choice, or EXPERT_NONE
    PTR(abi_u32) rows;         // [choices] the row of each place; EXPERT_NONE behind the last
    PTR(ExpertGroup) groups;   // [capacity], 16-byte aligned
    abi_u32 choices;
    abi_u32 used;              // choices of a row
    abi_u32 experts;
    abi_u32 tokens;            // most rows of a group
    abi_u32 capacity;
    abi_u32 warps;             // that count
    abi_u32 chunk_log2;        // choices that a warp counts
} ExpertSortParams;

// experts_rows.cu: xs[place] = x[rows[place]]
typedef struct {
    PTR(const abi_u32) rows;   // [places], or EXPERT_NONE: nothing is copied
    PTR(const void) x;         // rows of ldx vectors
    PTR(void) xs;              // [places] rows of d vectors
    abi_u32 places;
    abi_u32 d;                 // vectors of 16 bytes
    abi_u32 ldx;
} ExpertGatherParams;

// experts_rows.cu: delta[row] = sigmoid(gate[row]) * shared[row] + sum over j of weights[row][j] * out[places[row][j]]
typedef struct {
    PTR(const float) out;      // [places][d], 16-byte aligned
    PTR(const abi_u32) places; // [rows][used]
    PTR(const float) weights;  // [rows][used]
    PTR(const float) shared;   // [rows][d], 16-byte aligned, may be delta; NULL: none
    PTR(const float) gate;     // [rows]; only read with shared
    PTR(float) delta;          // [rows][d], 16-byte aligned
    abi_u32 rows;
    abi_u32 used;
    abi_u32 d;                 // d % 4 == 0
} ExpertCombineParams;

// experts_gemv.cu, experts_dense.cu: y[place] = w[slot] x[place] for the places of each group
typedef struct {
    // w, bias: those of matrix 0; x, y: place 0; m, partials and counters are not used; k_split (but for gemv): all of k.
    LinearParams linear;
    PTR(const ExpertGroup) groups;
    abi_u64 stride;            // bytes between the matrices, and between their biases, a multiple of 16
} ExpertLinearParams;

// experts_gemv_quant.cu, experts_quant.cu: the same with quantised weights
typedef struct {
    QuantLinearParams quant;
    PTR(const ExpertGroup) groups;
    abi_u64 stride;
} ExpertQuantLinearParams;
