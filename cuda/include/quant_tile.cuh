// quant_tile.cuh    quantised weights on the device: how a tile lies in memory, and how its codes become mma fragments
//
// A matrix of n rows and k columns is cut into tiles of 16 rows x 64 columns: the A operands of four m16n8k16 steps
// (s = 0..4, columns 16s..16s+16). Lane l = 4g + t of a warp owns in step s what mma wants of it:
//
//   a0 = row g,   columns 16s + 2t, +1     a2 = row g,   columns 16s + 8 + 2t, +1
//   a1 = row g+8, columns 16s + 2t, +1     a3 = row g+8, columns 16s + 8 + 2t, +1
//
// Codes are stored by lane, so one 16-byte load a lane, 512 bytes in a row a warp, fetches the fragments of all four
// steps (two steps for 8 bits), and no code ever changes lanes. A tile's body, in this order:
//
//   low    4 bits: [lane][step] u32; pair a_j at bits 4j (first column) and 16 + 4j (second)
//          8 bits: [half][lane][step % 2][2] u32; pairs a0, a1 then a2, a3: bytes (0, 2) and (1, 3), two's complement
//   high   5 bits: [lane] u32; the fifth bit of pair p = 4 * step + j at bits p and 16 + p
//          6 bits: [lane][half] u32; the top two bits of pair p = 4 * (step % 2) + j at bits 2p and 16 + 2p
//   scales by g: what rows g and g + 8 need (see Scales), 8 or 16 bytes
//
// K formats add, behind every 4 tiles (256 columns), the f16 scales of their super-blocks. Tiles of a row tile
// follow each other along k, row tiles follow each other: a warp that walks along k reads one contiguous stream.
//
// Exactness. Codes (with their offset: q - 8, q - 16, q - 32) are integers of at most 8 bits and exact in f16 and
// bf16 alike, so the tensor core multiplies exactly what the file stores; the scale of a block multiplies the f32 sum
// of that block. Scales are stored as the file has them (f16, 6- and 8-bit integers): d, d*sc and dmin*m are exact
// in f32. E2M1 codes are doubled to integers from -12 to 12, and so halve their scale, again a power of two. No weight is ever
// rounded to 16 bits. Minima multiply the f32 sum of the block's activations, which one
// more mma with a fragment of ones gives in the layout of the accumulators.
#pragma once

#include "common.cuh"

// What stands for the values of a block besides its codes.
enum Scales {
    SCALE,         // x = d * q          32 columns: f16 d                      by g: d(g, block 0), d(g, 1), d(g+8, 0), d(g+8, 1)
    SCALE_MIN,     // x = d * q + m      32 columns: f16 d, f16 m               by g: d, m (g, 0), (g, 1), (g+8, 0), (g+8, 1)
    SUPER_MIN,     // x = d*sc*q - dmin*m  32 columns: u8 sc, m; 256: f16 d, dmin  by g: sc, m in the same order
    SUPER_SIGNED,  // x = d*sc*q         16 columns: i8 sc + 128; 256: f16 d    by g: sc(g, step 0..4), sc(g+8, step 0..4)
    POWER,         // x = d * 2v         32 columns: bf16 d, a power of two     as SCALE; codes are floats v: a sign, two bits of
                   //                                                           exponent, one of mantissa (E2M1)
};

template <int BITS_, int OFFSET_, Scales SCALES_> struct Format {
    static constexpr int BITS = BITS_;        // of a stored code
    static constexpr int OFFSET = OFFSET_;    // x = d * (code - OFFSET)
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool IS_FLOAT = SCALES == POWER;         // codes are not integers
    static constexpr bool HAS_MIN = SCALES == SCALE_MIN || SCALES == SUPER_MIN;
    static constexpr bool IS_K = SCALES == SUPER_MIN || SCALES == SUPER_SIGNED;

    static constexpr u32 LOW = BITS == 8 ? 1024 : 512;               // bytes
    static constexpr u32 HIGH = BITS == 5 ? 128 : BITS == 6 ? 256 : 0;
    static constexpr u32 SCALE_BYTES = SCALES == SCALE_MIN ? 128 : 64;
    static constexpr u32 BODY = LOW + HIGH + SCALE_BYTES;
    static constexpr u32 SUPER = SCALES == SUPER_MIN ? 64 : SCALES == SUPER_SIGNED ? 32 : 0;
    static constexpr u32 GROUP = IS_K ? 4 : 1;                       // tiles that share super-scales
    static constexpr u32 GROUP_BYTES = GROUP * BODY + SUPER;

    static constexpr int LOW_WORDS = LOW / 128, HIGH_WORDS = HIGH / 128;   // of a lane
    static constexpr int SCALE_WORDS = SCALE_BYTES / 32, SUPER_WORDS = SUPER / 32;
};
using Q4_0 = Format<4, 8, SCALE>;
using Q4_1 = Format<4, 0, SCALE_MIN>;
using Q4_K = Format<4, 0, SUPER_MIN>;
using Q5_0 = Format<5, 16, SCALE>;
using Q5_1 = Format<5, 0, SCALE_MIN>;
using Q5_K = Format<5, 0, SUPER_MIN>;
using Q6_K = Format<6, 32, SUPER_SIGNED>;
using Q8_0 = Format<8, 0, SCALE>;
using MXFP4 = Format<4, 0, POWER>;

static constexpr u32 TILE_ROWS = 16, TILE_COLS = 64;

// Where tile (row_tile, k_tile) and its super-scales are.
template <class F> struct TileAt {
    const u8 *body, *super;
};
template <class F> DEVICE TileAt<F> tile_at(const void* w, u32 k_tiles, u32 row_tile, u32 k_tile) {
    const u64 row = (u64)row_tile * (k_tiles / F::GROUP) * F::GROUP_BYTES;
    const u8* group = (const u8*)w + row + (u64)(k_tile / F::GROUP) * F::GROUP_BYTES;
    return {group + (k_tile % F::GROUP) * F::BODY, group + F::GROUP * F::BODY};
}

// What one lane needs of a tile.
template <class F> struct Tile {
    u32 low[F::LOW_WORDS];
    u32 high[F::HIGH_WORDS ? F::HIGH_WORDS : 1];
    u32 scale[F::SCALE_WORDS];
    u32 super[F::SUPER_WORDS ? F::SUPER_WORDS : 1];
};

DEVICE void put_16(u32* to, uint4 v) {
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
}
DEVICE void put_8(u32* to, const u8* from) {
    const uint2 v = *(const uint2*)from;
    to[0] = v.x;
    to[1] = v.y;
}

// STREAM: from global memory, past L1; otherwise from shared memory (or any other).
template <class F, bool STREAM> DEVICE void load_codes(Tile<F>& tile, TileAt<F> at) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < F::LOW; i += 512) {
        const u8* from = at.body + i + 16 * lane;
        put_16(tile.low + i / 128, STREAM ? ld_stream_16(from) : ld_16(from));
    }
    const u8* high = at.body + F::LOW;
    if (F::HIGH == 128) tile.high[0] = ((const u32*)high)[lane];
    if (F::HIGH == 256) put_8(tile.high, high + 8 * lane);
}
template <class F> DEVICE void load_scales(Tile<F>& tile, TileAt<F> at) {
    const u32 g = threadIdx.x % 32 / 4;
    const u8* scales = at.body + F::LOW + F::HIGH;
    if (F::SCALE_BYTES == 64) put_8(tile.scale, scales + 8 * g);
    if (F::SCALE_BYTES == 128) put_16(tile.scale, ld_16(scales + 16 * g));
    if (F::SUPER == 32) tile.super[0] = ((const u32*)at.super)[g];
    if (F::SUPER == 64) put_8(tile.super, at.super + 8 * g);
}
template <class F, bool STREAM> DEVICE Tile<F> load_tile(TileAt<F> at) {
    Tile<F> tile;
    load_codes<F, STREAM>(tile, at);
    load_scales<F>(tile, at);
    return tile;
}

// ---------------------------------------------------------------------------------------------------------
// Codes to fragments. An integer below 2^10 (f16) or 2^7 (bf16) or-ed into the mantissa of 2^10 or 2^7 is that
// power plus the integer; one packed subtraction leaves the integer, exactly.

static constexpr int AND_OR = 0xea;       // (a & b) | c
static constexpr int AND_XOR = 0x6a;      // (a & b) ^ c

template <class T> struct Packed;
template <> struct Packed<f16> {
    static constexpr u32 ONE = 0x3c003c00u, MAGIC = 0x64006400u; // 1024
    static constexpr bool WIDE = true;                           // ten bits below the leading one, not seven
    static constexpr u32 POWER = 0x78007800u;                    // 2^15: what exponents of E2M1 lack, and one to double
};
template <> struct Packed<bf16> {
    static constexpr u32 ONE = 0x3f803f80u, MAGIC = 0x43004300u; // 128
    static constexpr bool WIDE = false;
    static constexpr u32 POWER = 0x7f007f00u;                    // 2^127
};

DEVICE u32 shift_left(u32 v, int by) { return by >= 0 ? v << by : v >> -by; }

// Fragment a[0..4] of step s: 16-bit floats whose values are the codes less the offset.
template <class T, class F> DEVICE void fragment(u32 a[4], const Tile<F>& tile, int s) {
    if (F::BITS == 8) {
        // bf16 has room for 7 bits below its leading one: take them, and turn bit 7 (weight -128) into the
        // subtrahend, as 128 or 256 differ in just that bit. f16 has room for all 8, with bit 7 flipped.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 v = tile.low[2 * s + i / 2] >> (i % 2 * 8);
            if (!Packed<T>::WIDE) {
                const u32 low7 = lop3<AND_OR>(v, 0x007f007fu, Packed<T>::MAGIC);
                const u32 less = lop3<AND_OR>(v, 0x00800080u, Packed<T>::MAGIC);
                a[i] = sub2<T>(low7, less);
            } else {
                a[i] = sub2<T>(lop3<AND_XOR>(v, 0x00ff00ffu, 0x64806480u), 0x64806480u);
            }
        }
        return;
    }
    if (F::IS_FLOAT) {
        // Exponent and mantissa to where the 16-bit float has its lowest bit of exponent, and the sign to its sign: a float that is
        // too small by the difference of the biases, subnormals included, since both formats have these. Adding 0 turns -0 into 0.
        constexpr int LOWEST = Packed<T>::WIDE ? 9 : 6;
        constexpr u32 REST = 0x00070007u << LOWEST;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 rest = shift_left(tile.low[s], LOWEST - 4 * i) & REST;
            a[i] = fma2<T>(lop3<AND_OR>(shift_left(tile.low[s], 12 - 4 * i), 0x80008000u, rest), Packed<T>::POWER, 0u);
        }
        return;
    }
    const u32 high = F::BITS == 5 ? tile.high[0] : F::BITS == 6 ? tile.high[s / 2] : 0;
    constexpr u32 HIGH_MASK = F::BITS == 5 ? 0x00100010u : 0x00300030u;
    constexpr u32 BIAS = Packed<T>::MAGIC + 0x00010001u * F::OFFSET; // 1024 or 128, and the offset: neighbours differ by 1
    constexpr u32 BIAS_16 = 0xd400d400u + 0x00100010u * F::OFFSET;   // f16 -(64 + offset): neighbours differ by 1/16
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Pairs 1 and 3 in f16 stay four bits higher: 1024 + 16 q, which an fma turns into q as well as a subtraction,
        // and their shifts are those of pairs 0 and 2.
        const bool times_16 = Packed<T>::WIDE && i % 2 == 1;
        const int up = times_16 ? 4 : 0;
        u32 v = lop3<AND_OR>(tile.low[s] >> (4 * i - up), 0x000f000fu << up, Packed<T>::MAGIC);
        if (F::HIGH) {
            const int at = F::BITS == 5 ? 4 * s + i : 2 * (4 * (s % 2) + i);
            v = lop3<AND_OR>(shift_left(high, 4 + up - at), HIGH_MASK << up, v);
        }
        a[i] = times_16 ? fma2<T>(v, 0x2c002c00u, BIAS_16) : sub2<T>(v, BIAS);
    }
}

// f times byte i of v. The byte or-ed into the mantissa of 2^23 is 2^23 + byte; 2^23 f and the product are exact in f32
// (f is an f16), so the fused multiply-add that takes 2^23 f away again is, too. I2F would run at a quarter of its rate.
DEVICE float byte_plus_2_23(u32 v, int i) { return __uint_as_float(prmt(v, 0x4b000000u, 0x7440u | (u32)i)); }
DEVICE float times_byte(float f, u32 v, int i) { return fmaf(f, byte_plus_2_23(v, i), f * -8388608.0f); }
DEVICE float signed_byte(u32 v, int i) { return byte_plus_2_23(v, i) - (8388608.0f + 128.0f); }

// Scales (and what to add per unit of the activations' sum) of rows g and g + 8 in step s.
template <class F> DEVICE void step_scales(const Tile<F>& tile, int s, float d[2], float m[2]) {
    const int block = s / 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (F::SCALES == SCALE) {
            const float2 both = unpack2<f16>(tile.scale[r]);
            d[r] = block ? both.y : both.x;
        } else if (F::SCALES == POWER) {
            d[r] = __uint_as_float(block ? tile.scale[r] & 0xffff0000u : tile.scale[r] << 16);
        } else if (F::SCALES == SCALE_MIN) {
            const float2 dm = unpack2<f16>(tile.scale[(2 * r + block) % F::SCALE_WORDS]);
            d[r] = dm.x;
            m[r] = dm.y;
        } else if (F::SCALES == SUPER_MIN) {
            const float2 super = unpack2<f16>(tile.super[r % (F::SUPER_WORDS ? F::SUPER_WORDS : 1)]);
            d[r] = times_byte(super.x, tile.scale[r], 2 * block);
            m[r] = times_byte(-super.y, tile.scale[r], 2 * block + 1);
        } else {
            const float2 super = unpack2<f16>(tile.super[0]);
            d[r] = (r ? super.y : super.x) * signed_byte(tile.scale[r], s);
        }
    }
}

// Scales of 32 columns for a lane's two rows: of each step (a format whose scales change after 32 columns: d[0]), and of
// the activations' sum.
struct HalfScales {
    float d[2][2], m[2];
};
template <class F> DEVICE HalfScales half_scales(const Tile<F>& tile, int half) {
    HalfScales s;
    s.m[0] = s.m[1] = 0.0f;
    step_scales<F>(tile, 2 * half, s.d[0], s.m);
    if (F::SCALES == SUPER_SIGNED) step_scales<F>(tile, 2 * half + 1, s.d[1], s.m);
    return s;
}

// K formats take 8 instructions a scale, and the four lanes of a row would do the same work. A warp with a few tiles in
// shared memory does it once for all its rows, a row a lane: float2 [16 rows x tiles][half] of (d, m) or (d, d of the next 16 columns).
template <class F, int TILES> DEVICE void share_scales(float2* shared, const u8* tiles, u32 tiles_there) {
    constexpr u32 TILE = F::BODY + F::SUPER;
#pragma unroll
    for (u32 row = threadIdx.x % 32; row < TILES * 16; row += 32) {
        if (row >= 16 * tiles_there) break;
        const u8* tile = tiles + row / 16 * TILE;
        const u32 place = row % 8 * 2 + row % 16 / 8; // rows g and g + 8 are neighbours
        const u32 scale = ((const u32*)(tile + F::LOW + F::HIGH))[place];
        float4 v;
        if (F::SCALES == SUPER_MIN) {
            const float2 super = unpack2<f16>(((const u32*)(tile + F::BODY))[place]);
            v = make_float4(times_byte(super.x, scale, 0), times_byte(-super.y, scale, 1), times_byte(super.x, scale, 2),
                            times_byte(-super.y, scale, 3));
        } else {
            f16 super;
            super.x = ((const u16*)(tile + F::BODY))[place];
            const float d = to_f32(super);
            v = make_float4(d * signed_byte(scale, 0), d * signed_byte(scale, 1), d * signed_byte(scale, 2), d * signed_byte(scale, 3));
        }
        ((float4*)shared)[row] = v;
    }
}
template <class F> DEVICE HalfScales shared_half_scales(const float2* shared, int tile, int half) {
    HalfScales s;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float2 v = shared[(16 * tile + threadIdx.x % 32 / 4 + 8 * r) * 2 + half];
        s.d[0][r] = v.x;
        s.d[1][r] = s.m[r] = v.y;
    }
    return s;
}

// acc[n] += W x for the tile's columns 32 * half .. + 32. b[n]: fragments of both steps (b0, b1, b0', b1') of eight
// tokens; sums[n]: sums of those 32 columns of x for this lane's two tokens (only if the format has minima).
template <class T, class F, int NT>
DEVICE void mma_half(float (&acc)[NT][4], const Tile<F>& tile, int half, const HalfScales& scales, const u32 (&b)[NT][4],
                     const float (&sums)[NT][2]) {
    u32 a[2][4];
    fragment<T, F>(a[0], tile, 2 * half);
    fragment<T, F>(a[1], tile, 2 * half + 1);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_16816<T>(part, a[0], b[n]);
        if (F::SCALES == SUPER_SIGNED) { // scales change after 16 columns
            float next[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_16816<T>(next, a[1], b[n] + 2);
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][i] = fmaf(scales.d[1][i / 2], next[i], fmaf(scales.d[0][i / 2], part[i], acc[n][i]));
        } else {
            mma_16816<T>(part, a[1], b[n] + 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[n][i] = fmaf(scales.d[0][i / 2], part[i], acc[n][i]);
                if (F::HAS_MIN) acc[n][i] = fmaf(scales.m[i / 2], sums[n][i % 2], acc[n][i]);
            }
        }
    }
}

// Sums of 32 columns of x for this lane's two tokens: a product with ones, the same in every row.
template <class T, int NT> DEVICE void column_sums(float (&sums)[NT][2], const u32 (&b)[NT][4]) {
    const u32 ones[4] = {Packed<T>::ONE, Packed<T>::ONE, Packed<T>::ONE, Packed<T>::ONE};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_16816<T>(part, ones, b[n]);
        mma_16816<T>(part, ones, b[n] + 2);
        sums[n][0] = part[0];
        sums[n][1] = part[1];
    }
}
