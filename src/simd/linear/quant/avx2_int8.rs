//! Quantised linear, AVX2: the same packed codes and the same arithmetic as `vnni`, eight rows at a time.
//!
//!   vpmaddubsw multiplies unsigned codes with signed activations and adds pairs in 16 bits; these sums are also added
//!   in 16 bits as far as they cannot overflow, then widened ([`lines_per_sum`]). q8_0 codes are signed again first,
//!   and the sign moves to the activation (vpsignb), so that 128·127·2 still fits.
//!   With AVX-VNNI (`VNNI`: desktop CPUs from Alder Lake on, Zen 5) vpdpbusd does all that in 32 bits; codes stay unsigned, and
//!   sums of those that stand for signed bytes begin at minus their zero. Integers are exact, so the bits are the same.
//!
//! tile       16 rows x 1 or 2 tokens, 8 rows x 3 or 4; one block of 32 at a time. From 8 tokens on: `avx2_unpacked`
//! bound      M = 1: memory, with lines asked for ahead. M = 4, four bits: per block of 8 rows and token 8 products, 8 sums, 1
//!            widening, 4 float operations and 10 loads, and a quarter of unpacking the codes: 340 to 360 GOP/s on two Zen 4
//!            cores, 240 to 300 on two of a Zen 3
//! order      k ascending, fused multiply-adds as in `vnni`: the same bits for every M

use std::arch::x86_64::*;

use super::super::packed::{RecordLayout, nibble_scales};
use super::X;
use crate::tensor::formats::{BlockFormat, Scales};

#[inline(always)]
pub(super) unsafe fn line(p: *const u8) -> __m256i {
    // SAFETY: the caller's record holds 32 bytes here.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

#[inline(always)]
unsafe fn half8(p: *const u8) -> __m256 {
    // SAFETY: the caller's record holds 8 halves here.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// Eight bf16 to f32.
#[inline(always)]
unsafe fn wide8(p: *const u8) -> __m256 {
    // SAFETY: the caller's record holds 8 words here.
    unsafe {
        let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }
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

/// The low and the high nibbles of eight bytes (a row each) to f32.
#[inline(always)]
unsafe fn nibbles8(p: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller's record holds 8 bytes here.
    unsafe {
        let both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        let low = _mm256_and_si256(both, _mm256_set1_epi32(15));
        (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(both)))
    }
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

/// `BIT` in every byte of quad `q` whose bit is set in the masks at `p`.
#[inline(always)]
unsafe fn highest<const BIT: i8>(p: *const u8, q: usize, h: usize) -> __m256i {
    // SAFETY: the caller's record holds eight 64-bit masks here; q < 8, h < 2.
    unsafe {
        let bits = p.add(q * 8 + h * 4).cast::<i32>().read_unaligned();
        // Byte i of the result depends on bit i: spread the four bytes, then test one bit in each.
        let spread = _mm256_shuffle_epi8(
            _mm256_set1_epi32(bits),
            _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3,
                3,
            ),
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(BIT))
    }
}

/// The upper two bits of quad `q`, from the line of bit pairs at `p`, in their position within a q6_k code.
#[inline(always)]
unsafe fn upper_pair(p: *const u8, q: usize, h: usize) -> __m256i {
    // SAFETY: the caller's record holds a line here; h < 2.
    unsafe {
        let v = line(p.add(h * 32));
        let v = match q {
            0 => _mm256_slli_epi16::<4>(v),
            1 => _mm256_slli_epi16::<2>(v),
            2 => v,
            _ => _mm256_srli_epi16::<2>(v),
        };
        _mm256_and_si256(v, _mm256_set1_epi8(0x30))
    }
}

/// The codes of two bits of quad `q`, from the line at `p`.
#[inline(always)]
unsafe fn low_pair(p: *const u8, q: usize, h: usize) -> __m256i {
    // SAFETY: the caller's record holds a line here; h < 2.
    unsafe {
        let v = line(p.add(h * 32));
        let v = match q {
            0 => v,
            1 => _mm256_srli_epi16::<2>(v),
            2 => _mm256_srli_epi16::<4>(v),
            _ => _mm256_srli_epi16::<6>(v),
        };
        _mm256_and_si256(v, _mm256_set1_epi8(3))
    }
}

/// Scale and offset of one half of a block, a row per lane (equal for both halves where they share a scale).
pub(super) type Scale = (__m256, __m256);

/// Scales of block `b` of the record at `w` for rows `8h..8h+8`.
#[inline(always)]
pub(super) unsafe fn scales<F: BlockFormat>(w: *const u8, b: usize, h: usize) -> [Scale; 2] {
    // SAFETY: `w` points to a record of this format; b is a block of it; offsets are those of `packed`.
    unsafe {
        let d = match F::SCALES {
            Scales::Scale => [half8(w.add(b * 32 + h * 16)); 2],
            Scales::PowerOfTwo => [wide8(w.add(b * 32 + h * 16)); 2],
            Scales::ScaleMin => {
                return [(half8(w.add(b * 32 + h * 16)), half8(w.add(64 + b * 32 + h * 16))); 2];
            }
            Scales::SuperMin => {
                let (d, dmin) = (half8(w.add(h * 16)), half8(w.add(32 + h * 16)));
                let (each, at) = (32 / F::SUB, w.add(64 + h * 8));
                let mut both = [(d, dmin); 2];
                for half in 0..each {
                    let sub = b * each + half;
                    let (scale, min) = if nibble_scales::<F>() {
                        nibbles8(at.add(sub * 16))
                    } else {
                        (unsigned8(at.add(sub * 16)), unsigned8(at.add((256 / F::SUB + sub) * 16)))
                    };
                    let m = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(dmin, min));
                    both[half] = (_mm256_mul_ps(d, scale), m);
                }
                return [both[0], both[each - 1]];
            }
            Scales::SuperSigned => {
                let (d, each) = (half8(w.add(h * 16)), 32 / F::SUB);
                let at = w.add(64 + b * each * 16 + h * 8);
                [_mm256_mul_ps(d, signed8(at)), _mm256_mul_ps(d, signed8(at.add((each - 1) * 16)))]
            }
        };
        let zero = F::ZERO - floor::<F>();
        let offset = _mm256_set1_ps(if signed::<F>() { 0.0 } else { -f32::from(zero) });
        [(d[0], _mm256_mul_ps(d[0], offset)), (d[1], _mm256_mul_ps(d[1], offset))]
    }
}

/// The least and the largest value of a table.
const fn ends(table: &[u8; 16]) -> (u8, u8) {
    let (mut least, mut most, mut i) = (255, 0, 0);
    while i < 16 {
        least = if table[i] < least { table[i] } else { least };
        most = if table[i] > most { table[i] } else { most };
        i += 1;
    }
    (least, most)
}

/// What is subtracted from the values of codes before they are multiplied.
const fn floor<F: BlockFormat>() -> u8 {
    match F::TABLE {
        Some(table) if ends(table).1 - ends(table).0 < 64 => ends(table).0,
        _ => 0,
    }
}

/// The largest factor that stands for a code.
pub(super) const fn largest<F: BlockFormat>() -> u8 {
    match F::TABLE {
        Some(table) => ends(table).1 - floor::<F>(),
        None => (1u32 << F::BITS).wrapping_sub(1) as u8,
    }
}

/// Whether codes are multiplied as signed bytes, without an offset: where they take eight bits.
pub(super) const fn signed<F: BlockFormat>() -> bool {
    largest::<F>() > 63
}

/// Quads j and j + 4 of rows `8h..8h+8` of the block whose high bits are at `high` and codes at `at`: unsigned, or
/// without `VNNI` signed where [`signed`].
#[inline(always)]
pub(super) unsafe fn quads<F: BlockFormat, const VNNI: bool>(
    high: *const u8,
    at: *const u8,
    j: usize,
    h: usize,
) -> [__m256i; 2] {
    // SAFETY: the caller's block; j < 4, h < 2.
    unsafe {
        let flip = _mm256_set1_epi8(if signed::<F>() && !VNNI { -128 } else { 0 });
        if F::BITS == 8 {
            let (lo, hi) = (line(at.add(j * 64 + h * 32)), line(at.add((j + 4) * 64 + h * 32)));
            return [_mm256_xor_si256(lo, flip), _mm256_xor_si256(hi, flip)];
        }
        if F::BITS == 2 {
            return [low_pair(at, j, h), low_pair(at.add(64), j, h)];
        }
        if F::BITS == 3 {
            let lo = _mm256_or_si256(low_pair(at, j, h), highest::<4>(high, j, h));
            let hi = _mm256_or_si256(low_pair(at.add(64), j, h), highest::<4>(high, j + 4, h));
            return [lo, hi];
        }
        let [lo, hi] = nibble_pair(at, j, h);
        if let Some(table) = F::TABLE {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let table = _mm256_sub_epi8(table, _mm256_set1_epi8(floor::<F>() as i8));
            let table = _mm256_xor_si256(table, flip);
            return [_mm256_shuffle_epi8(table, lo), _mm256_shuffle_epi8(table, hi)];
        }
        let [first, second] = match F::BITS {
            5 => [highest::<16>(high, j, h), highest::<16>(high, j + 4, h)],
            6 => [upper_pair(high, j, h), upper_pair(high.add(64), j, h)],
            _ => return [lo, hi],
        };
        [_mm256_or_si256(lo, first), _mm256_or_si256(hi, second)]
    }
}

/// Lines of codes whose 16-bit sums cannot overflow together: the products of a pair are at most 2 · 128 · the largest
/// code (3, 7, 15, 24, 31, 63), and a line is two of them (for 2, 3 and 6 bits one in each half's sum). Signed bytes fill 16 bits alone.
const fn lines_per_sum<F: BlockFormat>() -> usize {
    match largest::<F>() {
        ..=15 => 4,
        16..=63 => 2,
        _ => 1,
    }
}

/// Destination of a token's results: the first `rows` rows of the group.
#[derive(Clone, Copy)]
pub(super) struct Dest {
    pub(super) out: *mut f32,
    pub(super) ldo: usize,
    pub(super) rows: usize,
}

impl Dest {
    /// Writes the results of token `t` for rows `8h..8h+8`.
    ///
    /// # Safety
    /// The token's outputs exist.
    #[inline(always)]
    pub(super) unsafe fn put(self, t: usize, h: usize, results: __m256) {
        let (first, mut lanes) = (8 * h, [0f32; 8]);
        // SAFETY: the caller's promise; no more lanes than rows.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), results);
            let out = self.out.wrapping_add(t * self.ldo + first);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, self.rows.saturating_sub(first).min(8));
        }
    }
}

/// MT tokens from `t0` times rows `8·h0..8·(h0 + H)` of one group. Lines `ahead` bytes further on are prefetched, unless it is 0.
#[inline(always)]
unsafe fn tile<F: BlockFormat, const VNNI: bool, const MT: usize, const H: usize>(
    w: *const u8,
    h0: usize,
    k: usize,
    x: X,
    t0: usize,
    dest: Dest,
    ahead: usize,
) {
    let layout = const { RecordLayout::new::<F>() };
    let (records, blocks) = (k.div_ceil(layout.record_k), layout.record_k / 32);
    // SAFETY: offsets stay inside the group's records, the activation rows t0..t0+MT and their outputs.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); MT]; H];
        let x = x.row(t0);
        for r in 0..records {
            let w = w.add(r * layout.record_bytes);
            for b in 0..blocks {
                if ahead > 0 {
                    // Each block prefetches its share of the record's lines, since all at once would fill the miss buffers.
                    let lines = layout.record_bytes.div_ceil(64 * blocks);
                    for l in b * lines..(b + 1) * lines {
                        _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead + l * 64).cast());
                    }
                }
                let at = r * blocks + b;
                let q = x.q.add(at * 32);
                let sums = if VNNI {
                    let minus = x.minus32.add(at);
                    vnni_sums::<F, MT, H>(w, b, h0, q, minus, x.stride)
                } else {
                    block_sums::<F, MT, H>(w, b, h0, q, x.stride)
                };
                for h in 0..H {
                    let [(d, off), (d1, off1)] = scales::<F>(w, b, h0 + h);
                    for t in 0..MT {
                        let dx = _mm256_set1_ps(*x.d.add(t * x.stride / 32 + at));
                        let [i0, i1] = sums[h][t];
                        let a = &mut acc[h][t];
                        *a = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i0), _mm256_mul_ps(d, dx), *a);
                        if F::SUB == 16 {
                            *a = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i1), _mm256_mul_ps(d1, dx), *a);
                            let s = x.sum16.add(t * x.stride / 16 + at * 2);
                            *a = _mm256_fmadd_ps(off, _mm256_set1_ps(*s), *a);
                            *a = _mm256_fmadd_ps(off1, _mm256_set1_ps(*s.add(1)), *a);
                        } else if !signed::<F>() {
                            let s = _mm256_set1_ps(*x.sum32.add(t * x.stride / 32 + at));
                            *a = _mm256_fmadd_ps(off, s, *a);
                        }
                    }
                }
            }
        }
        for (h, acc) in acc.into_iter().enumerate() {
            for (t, acc) in acc.into_iter().enumerate() {
                dest.put(t0 + t, h0 + h, acc);
            }
        }
    }
}

/// The integer sums of block `b` against MT tokens whose activations begin at `x`: the whole block's in the first
/// place, or those of each half where it has its own scale. A line of codes is kept for MT tokens only, so that it fits the 16 registers
/// together with sums and accumulators.
#[inline(always)]
unsafe fn block_sums<F: BlockFormat, const MT: usize, const H: usize>(
    w: *const u8,
    b: usize,
    h0: usize,
    x: *const i8,
    stride: usize,
) -> [[[__m256i; 2]; MT]; H] {
    let layout = const { RecordLayout::new::<F>() };
    // SAFETY: the record at `w` has block b; 32 activations of each token at `x + t·stride`.
    unsafe {
        let (zero, ones) = (_mm256_setzero_si256(), _mm256_set1_epi16(1));
        let mut sums = [[[zero; 2]; MT]; H];
        let (high, at) = (w.add(layout.high(b)), w.add(layout.codes(b)));
        let mut part = [[[zero; 2]; MT]; H];
        for j in 0..4 {
            for h in 0..H {
                let [lo, hi] = quads::<F, false>(high, at, j, h0 + h);
                for t in 0..MT {
                    let x = x.add(t * stride).cast::<i32>();
                    let x0 = _mm256_set1_epi32(x.add(j).read_unaligned());
                    let x1 = _mm256_set1_epi32(x.add(j + 4).read_unaligned());
                    if signed::<F>() {
                        let a = _mm256_maddubs_epi16(_mm256_abs_epi8(lo), _mm256_sign_epi8(x0, lo));
                        let c = _mm256_maddubs_epi16(_mm256_abs_epi8(hi), _mm256_sign_epi8(x1, hi));
                        let both = _mm256_add_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(c, ones));
                        sums[h][t][0] = _mm256_add_epi32(sums[h][t][0], both);
                        continue;
                    }
                    let (a, c) = (_mm256_maddubs_epi16(lo, x0), _mm256_maddubs_epi16(hi, x1));
                    let part = &mut part[h][t];
                    if F::SUB == 16 {
                        part[0] = _mm256_add_epi16(part[0], a);
                        part[1] = _mm256_add_epi16(part[1], c);
                    } else {
                        part[0] = _mm256_add_epi16(part[0], _mm256_add_epi16(a, c));
                    }
                    if (j + 1) % lines_per_sum::<F>() == 0 {
                        for i in 0..2 {
                            let wide = _mm256_madd_epi16(part[i], ones);
                            sums[h][t][i] = _mm256_add_epi32(sums[h][t][i], wide);
                            part[i] = zero;
                        }
                    }
                }
            }
        }
        sums
    }
}

/// As [`block_sums`], by AVX-VNNI. `minus` points to minus the sum of the first token's activations.
#[inline(always)]
unsafe fn vnni_sums<F: BlockFormat, const MT: usize, const H: usize>(
    w: *const u8,
    b: usize,
    h0: usize,
    x: *const i8,
    minus: *const i32,
    stride: usize,
) -> [[[__m256i; 2]; MT]; H] {
    const { assert!(!signed::<F>() || (F::ZERO == 128 && F::SUB == 32)) };
    let layout = const { RecordLayout::new::<F>() };
    // SAFETY: the record at `w` has block b; 32 activations of each token at `x + t·stride`, a sum at `minus + t·stride/32`.
    unsafe {
        let mut sums = [[[_mm256_setzero_si256(); 2]; MT]; H];
        if signed::<F>() {
            for t in 0..MT {
                let from = _mm256_slli_epi32::<7>(_mm256_set1_epi32(*minus.add(t * stride / 32)));
                for h in 0..H {
                    sums[h][t][0] = from;
                }
            }
        }
        let (high, at) = (w.add(layout.high(b)), w.add(layout.codes(b)));
        for j in 0..4 {
            for h in 0..H {
                let [lo, hi] = quads::<F, true>(high, at, j, h0 + h);
                for t in 0..MT {
                    let x = x.add(t * stride).cast::<i32>();
                    let x0 = _mm256_set1_epi32(x.add(j).read_unaligned());
                    let x1 = _mm256_set1_epi32(x.add(j + 4).read_unaligned());
                    // Two chains, since a product takes four or five cycles.
                    let sum = &mut sums[h][t];
                    sum[0] = _mm256_dpbusd_avx_epi32(sum[0], lo, x0);
                    sum[1] = _mm256_dpbusd_avx_epi32(sum[1], hi, x1);
                }
            }
        }
        if F::SUB == 32 {
            for h in 0..H {
                for t in 0..MT {
                    sums[h][t][0] = _mm256_add_epi32(sums[h][t][0], sums[h][t][1]);
                }
            }
        }
        sums
    }
}

/// `m` tokens times one group.
#[inline(always)]
pub(super) unsafe fn tiles<F: BlockFormat, const VNNI: bool>(
    w: *const u8,
    k: usize,
    x: X,
    m: usize,
    dest: Dest,
    ahead: usize,
) {
    let (mut t, mut ahead) = (0, ahead);
    // SAFETY: the caller's contract; t stays below m.
    unsafe {
        while t < m {
            // With few tokens, both halves of a line at once; with more, as many tokens as registers hold.
            let step = (m - t).min(4);
            match step {
                1 => tile::<F, VNNI, 1, 2>(w, 0, k, x, t, dest, ahead),
                2 => tile::<F, VNNI, 2, 2>(w, 0, k, x, t, dest, ahead),
                3 => {
                    tile::<F, VNNI, 3, 1>(w, 0, k, x, t, dest, ahead);
                    tile::<F, VNNI, 3, 1>(w, 1, k, x, t, dest, 0);
                }
                _ => {
                    tile::<F, VNNI, 4, 1>(w, 0, k, x, t, dest, ahead);
                    tile::<F, VNNI, 4, 1>(w, 1, k, x, t, dest, 0);
                }
            }
            t += step;
            // The weights of later tokens are in a cache.
            ahead = 0;
        }
    }
}
