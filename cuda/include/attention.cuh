// attention.cuh    what decode and prefill attention share: the paged cache and its 8-bit codes, the soft-cap of scores, sinks, and
//                  how a result leaves
#pragma once

#include "common.cuh"

// How far loops of copies are unrolled: whole, but where a copy passes registers (sm_75).
constexpr int COPY_UNROLL = TANDEM_SM >= 80 ? 32 : 2;

// How keys and values of a KV type lie in pages. 16-bit floats are elements as they are. Of q8 (docs/decisions/0052) a head's key
// of a token is D signed bytes, its value too, and x = scale * code: the scale is a factor of the token's score (keys) or of its
// weight (values). Queries are in `Half`.
struct q8 {};
template <class T> struct Stored {
    using Half = T;
    using Element = u16; // addresses count in elements: as bytes they took registers that f16 does not have (sm_86, D = 96)
    static constexpr bool SCALED = false;
};
template <> struct Stored<q8> {
    using Half = f16;
    using Element = u8;
    static constexpr bool SCALED = true;
};

// Bytes of a token's row of a head, and elements of 16 bytes.
template <class T, int D> constexpr int ROW = sizeof(typename Stored<T>::Element) * D;
template <class T> constexpr int CHUNK = 16 / sizeof(typename Stored<T>::Element);
// Where the scales of a page's keys of a head (its values are as many) begin, and where what follows: in elements.
template <int D> constexpr int SCALES_AT = KV_PAGE_TOKENS * D;
template <class T, int D> constexpr int PAGE_HALF = SCALES_AT<D> + (Stored<T>::SCALED ? KV_PAGE_TOKENS * 4 : 0);

// Head `kv_head`'s keys (values: half = 1) of a page: [token][D], then, of q8, [token] scales in f32.
template <class T, int D> DEVICE const typename Stored<T>::Element* page_half(const void* kv, u32 page, u32 n_kv_heads, u32 kv_head, u32 half) {
    return (const typename Stored<T>::Element*)kv + (((u64)page * n_kv_heads + kv_head) * 2 + half) * PAGE_HALF<T, D>;
}

// Codes as f16, exactly: 0x6400 is 1024, so that 0x64 before code + 128 is 1152 + code. `biased` makes that sum of all four
// bytes of a word; the pairs are those of bytes (0, 1), (2, 3), (0, 2) and (1, 3).
DEVICE u32 biased(u32 codes) { return codes ^ 0x80808080u; }
DEVICE u32 first_codes(u32 biased) { return sub2<f16>(prmt(biased, 0x64646464u, 0x4140), 0x64806480u); }
DEVICE u32 last_codes(u32 biased) { return sub2<f16>(prmt(biased, 0x64646464u, 0x4342), 0x64806480u); }
DEVICE u32 even_codes(u32 biased) { return sub2<f16>(prmt(biased, 0x64646464u, 0x4240), 0x64806480u); }
DEVICE u32 odd_codes(u32 biased) { return sub2<f16>(prmt(biased, 0x64646464u, 0x4341), 0x64806480u); }

// A value's scale as a power of two, which joins the exponent's base: weight times scale is then at most 2, in f16's range
// whatever the values' size is. Within bounds, so that the sum of the weights themselves stays in f32's.
DEVICE float scale_exponent(float scale) {
    const i32 e = (i32)(__float_as_uint(scale) >> 23) - 127;
    return (float)min(max(e, -60), 60);
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
