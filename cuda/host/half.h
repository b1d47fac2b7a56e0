// half.h    16-bit floats to and from wider ones, rounding to nearest even, without instructions of newer CPUs
#pragma once

#include <stdint.h>

namespace emu {

inline __attribute__((always_inline)) float bf16_to_f32(uint16_t v) { return __builtin_bit_cast(float, (uint32_t)v << 16); }

// The exponent is moved by a multiplication with 2^112, which is exact and takes subnormals along; what was
// infinite or NaN lands at 2^16 and above, where the f32 exponent is then filled up.
inline __attribute__((always_inline)) float f16_to_f32(uint16_t v) {
    float magnitude = __builtin_bit_cast(float, (uint32_t)(v & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = __builtin_bit_cast(uint32_t, magnitude);
    bits |= magnitude >= 65536.0f ? 0x7f800000u : 0u;
    return __builtin_bit_cast(float, bits | (uint32_t)(v & 0x8000) << 16);
}

inline __attribute__((always_inline)) uint16_t f32_to_bf16(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// Rounds a double to a float format of `mantissa` explicit bits and least normal exponent `least`: one rounding.
// Returns magnitude bits in that format; `overflow` is its infinity.
inline uint16_t round_f64(double v, int mantissa, int least, int bias, uint16_t overflow) {
    uint64_t u = __builtin_bit_cast(uint64_t, v);
    uint16_t sign = (uint16_t)(u >> 48 & 0x8000);
    int exponent = (int)(u >> 52 & 0x7ff) - 1023;
    uint64_t fraction = (u & 0xfffffffffffffull) | 1ull << 52;
    if (exponent == 1024) return v != v ? 0x7fff : (uint16_t)(sign | overflow);
    int drop = 52 - mantissa; // bits that the format has no room for
    if (exponent < least) drop += least - exponent;
    if (drop > 54) return sign; // below half of the least subnormal (f64 subnormals too)
    uint64_t kept = fraction >> drop, rest = fraction & ((1ull << drop) - 1), half = 1ull << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    // A normal number's hidden bit adds one to the exponent field; carries do the rest.
    uint64_t field = exponent < least ? kept : kept + ((uint64_t)(exponent + bias - 1) << mantissa);
    return (uint16_t)(sign | (field >= overflow ? overflow : field));
}

// a + b, its last bit 1 if anything was lost ("round to odd"): rounding that to a shorter format is then as if the
// exact sum had been rounded.
inline double add_to_odd(double a, double b) {
    double sum = a + b, from_b = sum - a;
    double lost = (a - (sum - from_b)) + (b - from_b);
    if (!(lost > 0 || lost < 0)) return sum; // exact, infinite or NaN
    uint64_t u = __builtin_bit_cast(uint64_t, sum);
    if ((lost > 0) != (sum > 0)) u -= 1; // was rounded away from zero
    return __builtin_bit_cast(double, u | 1);
}

inline uint16_t f64_to_f16(double v) { return round_f64(v, 10, -14, 15, 0x7c00); }
inline uint16_t f64_to_bf16(double v) { return round_f64(v, 7, -126, 127, 0x7f80); }
inline uint16_t f32_to_f16(float f) { return f64_to_f16((double)f); }

} // namespace emu
