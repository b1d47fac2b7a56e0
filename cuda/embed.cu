// embed.cu    hidden[row] = scale * table[tokens[row]] (+ positions[row_pos[row] + offset])    four elements a thread
//
// in     tokens[rows] u32 in device memory; a table in the layout of the model file (tensor/formats/), rows
//        row_bytes apart, 2-byte aligned (blocks of 18, 22, 34 and 210 bytes leave no more, those of 17 not even that);
//        f32, f16 or bf16
//        positions [n_positions][d]
// out    hidden[rows][d] f32; a token beyond the vocabulary (padding) gives a row of zeros
// launch grid (rows, ceil(d/512)), block 128, no shared memory
// bound  memory, but tiny: 4*rows*d bytes out, and as much of the table as its type takes
// error  none: every product and sum rounds on its own (no fused multiply-add), as the reference's
// oracle src/reference/embed.rs, bit for bit
// no-spill all
// no-stack all
#include "common.cuh"
#include "ptx.cuh"

namespace embed {

constexpr u32 THREADS = 128, PER_THREAD = 4;

DEVICE float half_at(const u8* at) { return to_f32(*(const f16*)at); }

// Four bytes, 2-byte aligned.
DEVICE u32 word_at(const u8* at) { return *(const u16*)at | (u32) * (const u16*)(at + 2) << 16; }

// Plain floats: rows may have any length.
template <class T> struct Floats {
    static constexpr bool ANY_LENGTH = true;
    static DEVICE float decode(const u8* row, u32 i) { return to_f32(((const T*)row)[i]); }
};
template <> DEVICE float Floats<float>::decode(const u8* row, u32 i) { return ((const float*)row)[i]; }

// Blocks of 32: f16 d, and for the affine types f16 m; 5-bit types then hold the 32 fifth bits; then the codes.
// Elements l and l + 16 share a byte.
template <u32 BLOCK_BYTES, bool AFFINE, bool FIVE> struct Nibbles {
    static constexpr bool ANY_LENGTH = false;
    static DEVICE void decode4(const u8* row, u32 i, float* out) {
        const u8* block = row + (u64)(i / 32) * BLOCK_BYTES;
        const u8* codes = block + (AFFINE ? 4 : 2);
        u32 l = i % 32, high = 0;
        if (FIVE) {
            high = word_at(codes) >> l;
            codes += 4;
        }
        u32 q = word_at(codes + l % 16) >> (l / 16 * 4);
        float d = half_at(block);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            i32 code = (q >> (8 * j)) & 15;
            if (FIVE) code |= ((high >> j) & 1) << 4;
            if (AFFINE)
                out[j] = __fadd_rn(__fmul_rn(d, (float)code), half_at(block + 2));
            else
                out[j] = __fmul_rn(d, (float)(code - (FIVE ? 16 : 8)));
        }
    }
};

// Blocks of 32: f16 d, 32 signed bytes.
struct Bytes {
    static constexpr bool ANY_LENGTH = false;
    static DEVICE void decode4(const u8* row, u32 i, float* out) {
        const u8* block = row + (u64)(i / 32) * 34;
        u32 q = word_at(block + 2 + i % 32);
        float d = half_at(block);
#pragma unroll
        for (u32 j = 0; j < 4; j++) out[j] = __fmul_rn(d, (float)(signed char)(q >> (8 * j)));
    }
};

// Q4_K and Q5_K, blocks of 256: f16 d, f16 dmin, 12 bytes of eight 6-bit scales and minima, for Q5_K 32 bytes of
// fifth bits (bit s of byte l: sub-block s, element l), then nibbles: 64 elements share 32 bytes.
template <bool FIVE> struct KAffine {
    static constexpr bool ANY_LENGTH = false;
    static DEVICE void decode4(const u8* row, u32 i, float* out) {
        const u8* block = row + (u64)(i / 256) * (FIVE ? 176 : 144);
        const u8* s = block + 4;
        const u8* codes = block + (FIVE ? 48 : 16);
        u32 sub = i % 256 / 32, l = i % 32;
        u32 scale, least;
        if (sub < 4) {
            scale = s[sub] & 63;
            least = s[sub + 4] & 63;
        } else {
            scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
            least = (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
        }
        float d = __fmul_rn(half_at(block), (float)scale), m = __fmul_rn(half_at(block + 2), (float)least);
        u32 q = word_at(codes + sub / 2 * 32 + l) >> (sub % 2 * 4);
        u32 high = FIVE ? word_at(block + 16 + l) >> sub : 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 code = ((q >> (8 * j)) & 15) | ((high >> (8 * j)) & 1) << 4;
            out[j] = __fadd_rn(__fmul_rn(d, (float)code), -m);
        }
    }
};

// Q6_K, blocks of 256 in halves of 128: 64 bytes of nibbles each (quarters 0 and 1 low, 2 and 3 high), 32 bytes of
// bit pairs each, 16 signed scales of 16 elements, f16 d.
struct SixBits {
    static constexpr bool ANY_LENGTH = false;
    static DEVICE void decode4(const u8* row, u32 i, float* out) {
        const u8* block = row + (u64)(i / 256) * 210;
        u32 half = i % 256 / 128, quarter = i / 32 % 4, l = i % 32;
        u32 low = word_at(block + half * 64 + quarter % 2 * 32 + l) >> (quarter / 2 * 4);
        u32 top = word_at(block + 128 + half * 32 + l) >> (quarter * 2);
        float d = __fmul_rn(half_at(block + 208), (float)(signed char)block[192 + i % 256 / 16]);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            i32 code = ((low >> (8 * j)) & 15) | ((top >> (8 * j)) & 3) << 4;
            out[j] = __fmul_rn(d, (float)(code - 32));
        }
    }
};

// MXFP4, blocks of 32: an exponent e, and nibbles as above, floats of two bits of exponent and one of mantissa. Doubled they are
// integers, and 2^(e - 128) is their scale.
struct FloatNibbles {
    static constexpr bool ANY_LENGTH = false;
    static DEVICE void decode4(const u8* row, u32 i, float* out) {
        const u8* block = row + (u64)(i / 32) * 17;
        u32 l = i % 32, e = block[0];
        float d = __uint_as_float(e < 2 ? 0x200000u << e : (e - 1) << 23);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 code = block[1 + l % 16 + j] >> (l / 16 * 4);
            i32 size = (code & 6) ? (2 | (code & 1)) << ((code >> 1 & 3) - 1) : code & 1;
            out[j] = __fmul_rn(d, (float)(code & 8 ? -size : size));
        }
    }
};

DEVICE float position_at(const EmbedParams& p, u64 element) {
    if (p.position_dtype == EMBED_POSITION_F32) return ((const float*)p.positions)[element];
    u16 bits = ((const u16*)p.positions)[element];
    return p.position_dtype == EMBED_POSITION_F16 ? to_f32(f16{bits}) : to_f32(bf16{bits});
}

template <class Table> DEVICE void rows(const EmbedParams& p) {
    u32 row = blockIdx.x, i = (blockIdx.y * THREADS + threadIdx.x) * PER_THREAD;
    if (i >= p.d) return;
    u32 n = min(PER_THREAD, p.d - i);
    u32 token = p.tokens ? p.tokens[row] : row;
    float v[PER_THREAD] = {};
    if (token < p.vocab) {
        const u8* from = p.table + token * p.row_bytes;
        if constexpr (Table::ANY_LENGTH) {
#pragma unroll
            for (u32 j = 0; j < PER_THREAD; j++)
                if (j < n) v[j] = Table::decode(from, i + j);
        } else {
            Table::decode4(from, i, v);
        }
#pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) v[j] = __fmul_rn(v[j], p.scale);
        if (p.positions) {
            u32 at = p.row_pos[row] + p.position_offset;
            for (u32 j = 0; j < n && at < p.n_positions; j++) v[j] = __fadd_rn(v[j], position_at(p, (u64)at * p.d + i + j));
        }
    }
    float* out = p.hidden + (u64)row * p.d + i;
    if (p.d % PER_THREAD == 0)
        *(float4*)out = make_float4(v[0], v[1], v[2], v[3]);
    else
        for (u32 j = 0; j < n; j++) out[j] = v[j];
}

} // namespace embed

KERNEL_BOUNDS(embed_f32, EmbedParams, 128, 1) { embed::rows<embed::Floats<float>>(p); }
KERNEL_BOUNDS(embed_f16, EmbedParams, 128, 1) { embed::rows<embed::Floats<f16>>(p); }
KERNEL_BOUNDS(embed_bf16, EmbedParams, 128, 1) { embed::rows<embed::Floats<bf16>>(p); }
KERNEL_BOUNDS(embed_mxfp4, EmbedParams, 128, 1) { embed::rows<embed::FloatNibbles>(p); }
KERNEL_BOUNDS(embed_q8_0, EmbedParams, 128, 1) { embed::rows<embed::Bytes>(p); }
KERNEL_BOUNDS(embed_q4_0, EmbedParams, 128, 1) { embed::rows<embed::Nibbles<18, false, false>>(p); }
KERNEL_BOUNDS(embed_q4_1, EmbedParams, 128, 1) { embed::rows<embed::Nibbles<20, true, false>>(p); }
KERNEL_BOUNDS(embed_q5_0, EmbedParams, 128, 1) { embed::rows<embed::Nibbles<22, false, true>>(p); }
KERNEL_BOUNDS(embed_q5_1, EmbedParams, 128, 1) { embed::rows<embed::Nibbles<24, true, true>>(p); }
KERNEL_BOUNDS(embed_q4_k, EmbedParams, 128, 1) { embed::rows<embed::KAffine<false>>(p); }
KERNEL_BOUNDS(embed_q5_k, EmbedParams, 128, 1) { embed::rows<embed::KAffine<true>>(p); }
KERNEL_BOUNDS(embed_q6_k, EmbedParams, 128, 1) { embed::rows<embed::SixBits>(p); }
