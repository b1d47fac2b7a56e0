//! Quantised linear, AVX2: the same packed codes and the same arithmetic as `vnni`, eight rows at a time.
//!
//!   vpmaddubsw multiplies unsigned codes with signed activations and adds pairs in 16 bits. Codes up to
//!   63 times 127 stay below 2^15 even for two such sums. q8_0 codes are signed again first, and the sign
//!   moves to the activation (vpsignb), so that 128·127·2 still fits.
//!
//! tile       8 rows x 4 tokens (or 1); one block of 32 at a time
//! bound      about 30 instructions per block of 8 rows: compute, ~15 GB/s of 4-bit weights a core
//! order      k ascending, fused multiply-adds as in `vnni`: the same bits for every M

use std::arch::x86_64::*;

use super::packed::{GROUP, Layout};
use super::vnni::X;
use crate::tensor::DType;

#[inline(always)]
unsafe fn line(p: *const u8) -> __m256i {
    // SAFETY: the caller's record holds 32 bytes here.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

#[inline(always)]
unsafe fn half8(p: *const u8) -> __m256 {
    // SAFETY: the caller's record holds 8 halves here.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// Eight bytes (a row each) to f32.
#[inline(always)]
unsafe fn unsigned8(p: *const u8) -> __m256 {
    // SAFETY: the caller's record holds 8 bytes here.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
}

#[inline(always)]
unsafe fn signed8(p: *const u8) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
}

/// One line of nibbles (rows `8h..8h+8`): quads j and j + 4.
#[inline(always)]
unsafe fn nibble_pair(p: *const u8, j: usize, h: usize) -> [__m256i; 2] {
    // SAFETY: the caller's record holds four lines here; j < 4, h < 2.
    unsafe {
        let v = line(p.add(j * 64 + h * 32));
        let low = _mm256_set1_epi8(15);
        [_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low)]
    }
}

/// 16 in every byte of quad `q` whose bit is set in the masks at `p`.
#[inline(always)]
unsafe fn fifth(p: *const u8, q: usize, h: usize) -> __m256i {
    // SAFETY: the caller's record holds eight 64-bit masks here; q < 8, h < 2.
    unsafe {
        let bits = p.add(q * 8 + h * 4).cast::<i32>().read_unaligned();
        // Byte i of the result looks at bit i: spread the four bytes, then test one bit in each.
        let spread = _mm256_shuffle_epi8(
            _mm256_set1_epi32(bits),
            _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3,
                3,
            ),
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

struct Block {
    /// Quads 0..8 of rows 8h..8h+8; unsigned, or signed for q8_0.
    codes: [__m256i; 8],
    /// Scale and offset of each half of the block (equal but for q6_k).
    scale: [(__m256, __m256); 2],
}

/// Reads block `b` of the record at `w`, laid out as `layout`, for rows `8h..8h+8`.
#[inline(always)]
unsafe fn block(dtype: DType, layout: Layout, w: *const u8, b: usize, h: usize) -> Block {
    // SAFETY: `w` points to a record of `dtype`; b is a block of it; offsets are those of `packed`.
    unsafe {
        let (high, at) = (w.add(layout.high(b)), w.add(layout.codes(b)));
        let mut codes = [_mm256_setzero_si256(); 8];
        if dtype == DType::Q8_0 {
            let flip = _mm256_set1_epi8(-128);
            for q in 0..8 {
                codes[q] = _mm256_xor_si256(line(at.add(q * 64 + h * 32)), flip);
            }
        } else {
            for j in 0..4 {
                let [lo, hi] = nibble_pair(at, j, h);
                (codes[j], codes[j + 4]) = (lo, hi);
            }
        }
        if matches!(dtype, DType::Q5_0 | DType::Q5_1 | DType::Q5_K) {
            for q in 0..8 {
                codes[q] = _mm256_or_si256(codes[q], fifth(high, q, h));
            }
        }
        let scale = if dtype == DType::Q6_K {
            let two = _mm256_set1_epi8(0x30);
            for l in 0..2 {
                let v = line(high.add(l * 64 + h * 32));
                let pairs =
                    [_mm256_slli_epi16::<4>(v), _mm256_slli_epi16::<2>(v), v, _mm256_srli_epi16::<2>(v)];
                for q in 0..4 {
                    codes[l * 4 + q] = _mm256_or_si256(codes[l * 4 + q], _mm256_and_si256(pairs[q], two));
                }
            }
            let d = half8(w.add(h * 16));
            let d0 = _mm256_mul_ps(d, signed8(w.add(64 + b * 32 + h * 8)));
            let d1 = _mm256_mul_ps(d, signed8(w.add(64 + b * 32 + 16 + h * 8)));
            let offset = _mm256_set1_ps(-32.0);
            [(d0, _mm256_mul_ps(d0, offset)), (d1, _mm256_mul_ps(d1, offset))]
        } else if matches!(dtype, DType::Q4_K | DType::Q5_K) {
            let d = _mm256_mul_ps(half8(w.add(h * 16)), unsigned8(w.add(64 + b * 16 + h * 8)));
            let m = _mm256_mul_ps(half8(w.add(32 + h * 16)), unsigned8(w.add(192 + b * 16 + h * 8)));
            [(d, _mm256_sub_ps(_mm256_setzero_ps(), m)); 2]
        } else {
            let d = half8(w.add(b * 32 + h * 16));
            let m = match dtype {
                DType::Q4_0 => _mm256_mul_ps(d, _mm256_set1_ps(-8.0)),
                DType::Q5_0 => _mm256_mul_ps(d, _mm256_set1_ps(-16.0)),
                DType::Q8_0 => _mm256_setzero_ps(),
                _ => half8(w.add(64 + b * 32 + h * 16)),
            };
            [(d, m); 2]
        };
        Block { codes, scale }
    }
}

/// The 16-bit sums of pairs of quad `q` against a token's activations.
#[inline(always)]
unsafe fn pairs(signed: bool, code: __m256i, x: *const i8, q: usize) -> __m256i {
    // SAFETY: 32 activations at `x`; q < 8.
    unsafe {
        let x = _mm256_set1_epi32(x.cast::<i32>().add(q).read_unaligned());
        if signed {
            _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code))
        } else {
            _mm256_maddubs_epi16(code, x)
        }
    }
}

/// Quads `4·half..4·half+4` against a token's activations at `x` (the block's first).
#[inline(always)]
unsafe fn dot4(signed: bool, codes: &[__m256i; 8], half: usize, x: *const i8) -> __m256i {
    // SAFETY: 32 activations at `x`; half < 2.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut sum = _mm256_setzero_si256();
        let mut q = half * 4;
        while q < half * 4 + 4 {
            let (a, b) = (pairs(signed, codes[q], x, q), pairs(signed, codes[q + 1], x, q + 1));
            if signed {
                // Two sums of q8_0 pairs could overflow 16 bits: widen each.
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, ones));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(b, ones));
            } else {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(a, b), ones));
            }
            q += 2;
        }
        sum
    }
}

/// Where the eight results of a token go.
#[derive(Clone, Copy)]
struct Dest {
    out: *mut f32,
    ldo: usize,
    rows: usize,
}

/// MT tokens from `t0`, rows `8h..8h+8` of one group.
#[inline(always)]
unsafe fn tile<const MT: usize>(dtype: DType, w: *const u8, h: usize, k: usize, x: X, t0: usize, dest: Dest) {
    let layout = Layout::of(dtype).expect("quantised");
    let (records, blocks) = (k.div_ceil(layout.record_k), layout.record_k / 32);
    let signed = matches!(dtype, DType::Q8_0);
    // SAFETY: offsets stay inside the group's records, the activation rows t0..t0+MT and their outputs.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); MT];
        let x = x.row(t0);
        for r in 0..records {
            for b in 0..blocks {
                let blk = block(dtype, layout, w.add(r * layout.record_bytes), b, h);
                let at = r * blocks + b;
                for t in 0..MT {
                    let q = x.q.add(t * x.stride + at * 32);
                    let dx = _mm256_set1_ps(*x.d.add(t * x.stride / 32 + at));
                    let i0 = dot4(signed, &blk.codes, 0, q);
                    let i1 = dot4(signed, &blk.codes, 1, q);
                    let (d, off) = blk.scale[0];
                    if matches!(dtype, DType::Q6_K) {
                        let (d1, off1) = blk.scale[1];
                        let s = x.sum16.add(t * x.stride / 16 + at * 2);
                        acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i0), _mm256_mul_ps(d, dx), acc[t]);
                        acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i1), _mm256_mul_ps(d1, dx), acc[t]);
                        acc[t] = _mm256_fmadd_ps(off, _mm256_set1_ps(*s), acc[t]);
                        acc[t] = _mm256_fmadd_ps(off1, _mm256_set1_ps(*s.add(1)), acc[t]);
                    } else {
                        let i = _mm256_cvtepi32_ps(_mm256_add_epi32(i0, i1));
                        let s = _mm256_set1_ps(*x.sum32.add(t * x.stride / 32 + at));
                        acc[t] = _mm256_fmadd_ps(i, _mm256_mul_ps(d, dx), acc[t]);
                        acc[t] = _mm256_fmadd_ps(off, s, acc[t]);
                    }
                }
            }
        }
        let mut lanes = [0f32; 8];
        for t in 0..MT {
            _mm256_storeu_ps(lanes.as_mut_ptr(), acc[t]);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), dest.out.add((t0 + t) * dest.ldo), dest.rows);
        }
    }
}

#[inline(always)]
unsafe fn rows8(dtype: DType, w: *const u8, h: usize, k: usize, x: X, m: usize, dest: Dest) {
    let mut t = 0;
    // SAFETY: the caller's contract; t stays below m.
    unsafe {
        while t + 4 <= m {
            tile::<4>(dtype, w, h, k, x, t, dest);
            t += 4;
        }
        while t < m {
            tile::<1>(dtype, w, h, k, x, t, dest);
            t += 1;
        }
    }
}

macro_rules! instantiate {
    ($($name:ident $dtype:expr),*) => {
        $(#[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name(w: *const u8, h: usize, k: usize, x: X, m: usize, dest: Dest) {
            // SAFETY: the caller's contract.
            unsafe { rows8($dtype, w, h, k, x, m, dest) }
        })*
    };
}
instantiate!(q4_0 DType::Q4_0, q4_1 DType::Q4_1, q5_0 DType::Q5_0, q5_1 DType::Q5_1, q8_0 DType::Q8_0,
             q4_k DType::Q4_K, q5_k DType::Q5_K, q6_k DType::Q6_K);

/// As [`super::vnni::gemm`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; otherwise as there.
pub(super) unsafe fn gemm(
    dtype: DType,
    w: &[u8],
    k: usize,
    x: X,
    m: usize,
    out: *mut f32,
    ldo: usize,
    n: usize,
) {
    let group_bytes = Layout::of(dtype).expect("quantised").group_bytes(k);
    for (g, w) in w.chunks_exact(group_bytes).enumerate() {
        for h in 0..2 {
            let first = g * GROUP + h * 8;
            if first >= n {
                break;
            }
            let rows = (n - first).min(8);
            // SAFETY: rows of `out` are `ldo >= n` long.
            let dest = Dest { out: unsafe { out.add(first) }, ldo, rows };
            let w = w.as_ptr();
            // SAFETY: the caller's contract.
            unsafe {
                match dtype {
                    DType::Q4_0 => q4_0(w, h, k, x, m, dest),
                    DType::Q4_1 => q4_1(w, h, k, x, m, dest),
                    DType::Q5_0 => q5_0(w, h, k, x, m, dest),
                    DType::Q5_1 => q5_1(w, h, k, x, m, dest),
                    DType::Q8_0 => q8_0(w, h, k, x, m, dest),
                    DType::Q4_K => q4_k(w, h, k, x, m, dest),
                    DType::Q5_K => q5_k(w, h, k, x, m, dest),
                    DType::Q6_K => q6_k(w, h, k, x, m, dest),
                    DType::F32 | DType::F16 | DType::BF16 => unreachable!("floats are not packed"),
                }
            }
        }
    }
}
