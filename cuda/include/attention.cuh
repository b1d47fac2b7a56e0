// attention.cuh    what decode and prefill attention share: the paged cache, the soft-cap of scores, sinks, and how a result leaves
#pragma once

#include "common.cuh"

// How far loops of copies are unrolled: whole, but where a copy passes registers (sm_75).
constexpr int COPY_UNROLL = TANDEM_SM >= 80 ? 32 : 2;

// 16-bit elements of head `kv_head`'s keys (values: half = 1) of a page: [token][D].
template <class T, int D> DEVICE const T* page_half(const void* kv, u32 page, u32 n_kv_heads, u32 kv_head, u32 half) {
    return (const T*)kv + (((u64)page * n_kv_heads + kv_head) * 2 + half) * (KV_PAGE_TOKENS * D);
}

// The exponent's base where nothing was seen: exp(-inf - (-inf)) would be NaN.
DEVICE float finite_or_zero(float m) { return m == NEG_INF ? 0.0f : m; }

// Scores are kept times log2(e), so that exp is one ex2; partials leave in natural units.
#define LN_2 0.69314718055994530942f
#define LOG2_E 1.44269504088896340736f

// Divides by the sum. Nothing seen gives 0. Adding +0 turns -0 into +0, all that masked tokens can leave.
DEVICE float normalised(float o, float inv) { return o * inv + 0.0f; }
DEVICE float inverse_sum(float s) { return s == 0.0f ? 0.0f : 1.0f / s; }

// The same of a finished row, whose sum a sink joins: a logit of the head that has no value, e^(sink - m) with m as scores are kept.
// It is added here and nowhere else, so it counts once, however many parts the row was computed in. Where it is so large that the
// power is infinite, the row is 0.
DEVICE float inverse_sum_with(const float* sinks, u32 head, float m, float s) {
    if (sinks && s != 0.0f) s += ex2(sinks[head] * LOG2_E - m);
    return inverse_sum(s);
}

// cap * tanh(x / cap) = 2 cap * (1/2 - 1 / (1 + e^(2x / cap))): span = 2 cap, slope = 2 log2(e) / cap. Both are parameters, so
// that no step needs a register beside x; an infinite power gives cap.
DEVICE float soft_capped(float x, float span, float slope) { return span * (0.5f - __fdividef(1.0f, 1.0f + ex2(x * slope))); }

DEVICE u32 pack2_as(u32 out_type, float lo, float hi) {
    return out_type == ATTENTION_OUT_BF16 ? pack2<bf16>(lo, hi) : pack2<f16>(lo, hi);
}
