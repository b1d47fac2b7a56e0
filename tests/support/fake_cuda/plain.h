/* plain.h    what kernels by plain loops share: 16-bit numbers, and their table's functions
 *
 * Each function takes what follows the kernel's name in the table, its type if it is of one, and its parameters. It returns 0 if it has done
 * what the kernel does, 1 in a case that it leaves to the emulation. */
#pragma once
#include "fake.h"

#include <math.h>

#include "../../../cuda/include/abi.h"

typedef enum { F16, BF16 } Type;
typedef int Loop(const char* rest, Type type, const void* params);

/* plain_linear.c, plain_attention.c, plain_pages.c, plain_rows.c, plain_logits.c */
Loop linear, prefill, decode, pages_to_host, pages_from_host;
Loop embed, norm_rms, norm_layer, rope_append, publish_rows, copy_rows;
Loop logits_spans, logits_merge;

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float widened(Type type, uint16_t h) {
    if (type == BF16) return as_float((uint32_t)h << 16);
    uint32_t sign = (uint32_t)(h >> 15) << 31, rest = h & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* 2^112 puts the exponent right, of numbers with leading zeros, too. */
    return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));
}
/* To the nearest, ties to even. */
static inline uint16_t rounded(Type type, float x) {
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000;
    if (type == BF16) return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (x != x) return 0x7fff;
    float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)nearbyintf(size * 0x1p24f);
    bits = as_bits(size);
    return sign | ((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}
/* Several sums, so that the compiler may take several numbers at once. */
enum { SUMS = 8 };
static inline float dot(Type type, const uint16_t* a, const uint16_t* b, unsigned n) {
    float sums[SUMS] = {0}, sum = 0;
    unsigned i = 0;
    if (type == BF16)
        for (; i + SUMS <= n; i += SUMS)
            for (unsigned j = 0; j < SUMS; j++) sums[j] += as_float((uint32_t)a[i + j] << 16) * as_float((uint32_t)b[i + j] << 16);
    for (; i < n; i++) sums[i % SUMS] += widened(type, a[i]) * widened(type, b[i]);
    for (i = 0; i < SUMS; i++) sum += sums[i];
    return sum;
}
