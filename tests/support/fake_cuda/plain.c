/* plain.c    kernels by plain loops (FAKE_PLAIN): which
 *
 * For tests of orders and of memories, of which there should be many: what a kernel computes matters there, how it does so does not. The
 * emulation runs each thread of a kernel; a loop over its output takes a small part of that. These are the kernels that take most of the
 * time of a tiny model; all others are emulated. The kernels' own tests hold them to the same bounds (tests/gpu/stand_in.rs).
 *
 * Memory that was given back is not there any more (memory.c), so a late kernel ends the process; no other access is checked. */
#include "plain.h"

/* Where a kernel's name has its type: nowhere, with more behind it, or at its end. */
typedef enum { UNTYPED, WITHIN, AT_END } Place;
static const struct {
    const char* kernel; /* its name begins so */
    Place place;
    Loop* run;
} known[] = {
    {"gemv_", WITHIN, linear},
    {"linear_dense_", WITHIN, linear},
    {"prefill_attention_", WITHIN, prefill},
    {"decode_attention_", WITHIN, decode},
    {"pages_to_host", UNTYPED, pages_to_host},
    {"pages_from_host", UNTYPED, pages_from_host},
    {"embed_", AT_END, embed},
    {"norm_rms_", WITHIN, norm_rms},
    {"norm_layer_", WITHIN, norm_layer},
    {"rope_append_", AT_END, rope_append},
    {"publish_rows_", AT_END, publish_rows},
    {"copy_rows_16", UNTYPED, copy_rows},
    {"copy_rows_2", UNTYPED, copy_rows},
    {"logits_spans", UNTYPED, logits_spans},
    {"logits_merge", UNTYPED, logits_merge},
};

/* Whether `*rest` begins with this type where it may; what follows it. */
static int is_of(const char** rest, const char* type, Place place) {
    size_t n = strlen(type);
    if (strncmp(*rest, type, n) || (*rest)[n] != (place == WITHIN ? '_' : 0)) return 0;
    *rest += n;
    return 1;
}
int plainly(const char* kernel, const void* params) {
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        size_t n = strlen(known[i].kernel);
        if (strncmp(kernel, known[i].kernel, n)) continue;
        const char* rest = kernel + n;
        if (known[i].place == UNTYPED) return *rest ? 1 : known[i].run(rest, F16, params);
        if (is_of(&rest, "bf16", known[i].place)) return known[i].run(rest, BF16, params);
        if (is_of(&rest, "f16", known[i].place)) return known[i].run(rest, F16, params);
        /* Codes, or a kernel whose name only begins so. */
    }
    return 1;
}
