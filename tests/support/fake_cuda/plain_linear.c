/* plain_linear.c    products of 16-bit weights by plain loops */
#include "plain.h"

static float activated(unsigned epilogue, float gate) {
    if (epilogue == LINEAR_SWIGLU) return gate / (1 + expf(-gate));
    if (epilogue == LINEAR_CLAMPED_SWIGLU) return fminf(gate, 7) / (1 + expf(-1.702f * fminf(gate, 7)));
    return gate / 2 * (1 + tanhf(0.7978845608f * (gate + 0.044715f * gate * gate * gate)));
}
static float factor(unsigned epilogue, float up) { return epilogue == LINEAR_CLAMPED_SWIGLU ? fmaxf(-7, fminf(up, 7)) + 1 : up; }
int linear(const char* rest, Type type, const void* params) {
    (void)rest;
    const LinearParams* p = params;
    const uint16_t *w = p->w, *x = p->x;
    for (unsigned m = 0; m < p->m; m++) {
        const uint16_t* row = x + (size_t)m * p->ldx;
        float gates[8];
        for (unsigned n = 0; n < p->n; n++) {
            float sum = dot(type, w + (size_t)n * p->k, row, p->k) + (p->bias ? p->bias[n] : 0);
            size_t at = (size_t)m * p->ldy + n;
            if (p->epilogue == LINEAR_F32) ((float*)p->y)[at] = sum;
            else if (p->epilogue == LINEAR_RELU) ((uint16_t*)p->y)[at] = rounded(type, fmaxf(sum, 0));
            else if (n % 16 < 8) gates[n % 8] = sum;
            else
                ((uint16_t*)p->y)[(size_t)m * p->ldy + n / 16 * 8 + n % 8] = rounded(type, activated(p->epilogue, gates[n % 8]) * factor(p->epilogue, sum));
        }
    }
    /* Rows of either size are written whole, up to their gaps. */
    unsigned gated = p->epilogue >= LINEAR_SWIGLU, bytes = p->epilogue == LINEAR_F32 ? 4 : 2;
    for (unsigned m = 0; m < p->m; m++) written((uint64_t)p->y + (uint64_t)m * p->ldy * bytes, (size_t)p->n / (1 + gated) * bytes);
    return 0;
}
