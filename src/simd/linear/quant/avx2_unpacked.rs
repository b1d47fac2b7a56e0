//! Quantised linear, AVX2, many tokens: a group's codes are unpacked once, into bytes beside f32 scales, for all tokens.
//!
//! block      512 bytes of codes, quad by quad (16 rows of 4 elements), then for each half that has a scale of its own (one or two)
//!            16 scales and 16 offsets
//! tile       16 rows x 1 to 4 tokens, one block of 32 at a time: each broadcast of activations serves two products
//! registers  8 sums of 16 bits, 2 lines of codes, an activation; the f32 accumulators wait on the stack. The sums are pinned to
//!            registers after each quad ([`pin`]): left alone, LLVM keeps broadcasts for the second line of codes in memory and
//!            runs at 0.7 x
//! bound      instructions: per block of 16 rows and 4 tokens 16 loads of codes, 32 broadcasts, 64 products, 56 sums and some 60
//!            of scales (four bits); of a Zen 3 core 6 a cycle at most, 4 if it is shared
//! order      k ascending, operation by operation that of [`avx2_int8`](super::avx2_int8): the same bits
//! scratch    k x 16 bytes and a quarter of that: in L2, from which a tile of four tokens takes some 10 bytes a cycle

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;

use super::super::packed::RecordLayout;
use super::X;
use super::avx2_int8::{Dest, largest, line, quads, scales, signed};
use crate::host::AlignedBuffer;
use crate::tensor::formats::BlockFormat;

/// Tokens from which unpacking pays.
pub(super) const FROM: usize = 8;

/// Bytes of codes of a block: 8 quads of 16 rows.
const CODES: usize = 512;

/// Bytes of an unpacked block.
const fn block_bytes<F: BlockFormat>() -> usize {
    CODES + 32 / F::SUB * 128
}

/// Quads whose products are summed in 16 bits: pairs of products are at most 2 · 127 · the largest code.
const fn quads_per_sum<F: BlockFormat>() -> usize {
    match largest::<F>() {
        ..=15 => 8,
        16..=31 => 4,
        _ => 2,
    }
}

thread_local! {
    /// The group that this thread has unpacked.
    static SCRATCH: RefCell<AlignedBuffer<f32>> = RefCell::default();
}

/// This thread's scratch of at least that many bytes, on cache lines.
fn scratch(bytes: usize) -> *mut u8 {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.renew(bytes / size_of::<f32>());
        scratch.as_mut_ptr().cast()
    })
}

/// Unpacks the group at `w` of `k` columns to `out`.
#[inline(always)]
unsafe fn unpack<F: BlockFormat, const VNNI: bool>(w: *const u8, k: usize, mut out: *mut u8) {
    let layout = const { RecordLayout::new::<F>() };
    // SAFETY: the caller's group has these records, and `out` room for their blocks.
    unsafe {
        for r in 0..k.div_ceil(layout.record_k) {
            let w = w.add(r * layout.record_bytes);
            for b in 0..layout.record_k / 32 {
                for h in 0..2 {
                    for j in 0..4 {
                        let [lo, hi] = quads::<F, VNNI>(w.add(layout.high(b)), w.add(layout.codes(b)), j, h);
                        let to = out.add(j * 64 + h * 32).cast();
                        _mm256_store_si256(to, lo);
                        _mm256_store_si256(to.add(8), hi);
                    }
                    let both = scales::<F>(w, b, h);
                    for half in 0..32 / F::SUB {
                        let (d, offset) = both[half];
                        let to = out.add(CODES + half * 128 + h * 32).cast();
                        _mm256_store_ps(to, d);
                        _mm256_store_ps(to.add(16), offset);
                    }
                }
                out = out.add(block_bytes::<F>());
            }
        }
    }
}

/// Two lines of 8 rows times MT tokens.
type Sums<const MT: usize> = [[__m256i; MT]; 2];

/// Has the sums be in registers here.
#[inline]
#[target_feature(enable = "avx2")]
fn pin<const MT: usize>(sums: &mut Sums<MT>) {
    for t in 0..MT {
        // SAFETY: no instruction; the registers keep their values.
        unsafe {
            asm!("/* {0} {1} */", inout(ymm_reg) sums[0][t], inout(ymm_reg) sums[1][t], options(nomem, nostack, preserves_flags));
        }
    }
}

/// Quad `Q` of the codes at `c` times MT tokens: pairs of products in 16 bits, added to `sums` unless it is the `first`.
#[inline(always)]
unsafe fn pairs<const Q: usize, const MT: usize>(
    c: *const u8,
    x: *const i8,
    stride: usize,
    first: bool,
    sums: &mut Sums<MT>,
) {
    // SAFETY: the caller's block and rows.
    unsafe {
        let c = [line(c.add(Q * 64)), line(c.add(Q * 64 + 32))];
        for t in 0..MT {
            let x = _mm256_set1_epi32(x.add(t * stride).cast::<i32>().add(Q).read_unaligned());
            for h in 0..2 {
                let products = _mm256_maddubs_epi16(c[h], x);
                sums[h][t] = if first { products } else { _mm256_add_epi16(sums[h][t], products) };
            }
        }
        pin(sums);
    }
}

/// Quad `Q` of signed codes, added to `sums` of 32 bits.
#[inline(always)]
unsafe fn signed_quad<const Q: usize, const MT: usize>(
    c: *const u8,
    x: *const i8,
    stride: usize,
    sums: &mut Sums<MT>,
) {
    // SAFETY: the caller's block and rows.
    unsafe {
        let (c, ones) = ([line(c.add(Q * 64)), line(c.add(Q * 64 + 32))], _mm256_set1_epi16(1));
        let size = [_mm256_abs_epi8(c[0]), _mm256_abs_epi8(c[1])];
        for t in 0..MT {
            let x = _mm256_set1_epi32(x.add(t * stride).cast::<i32>().add(Q).read_unaligned());
            for h in 0..2 {
                let products = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(x, c[h]));
                sums[h][t] = _mm256_add_epi32(sums[h][t], _mm256_madd_epi16(products, ones));
            }
        }
        pin(sums);
    }
}

/// Quad `Q` of unsigned codes, added to `sums` of 32 bits by AVX-VNNI.
#[inline(always)]
unsafe fn vnni_quad<const Q: usize, const MT: usize>(
    c: *const u8,
    x: *const i8,
    stride: usize,
    sums: &mut Sums<MT>,
) {
    // SAFETY: the caller's block and rows; AVX-VNNI.
    unsafe {
        let c = [line(c.add(Q * 64)), line(c.add(Q * 64 + 32))];
        for t in 0..MT {
            let x = _mm256_set1_epi32(x.add(t * stride).cast::<i32>().add(Q).read_unaligned());
            for h in 0..2 {
                sums[h][t] = _mm256_dpbusd_avx_epi32(sums[h][t], c[h], x);
            }
        }
        pin(sums);
    }
}

/// Four quads from `$q` on.
macro_rules! four {
    ($f:ident, $q:literal, ($($arg:expr),*)) => {{
        $f::<{ $q }, MT>($($arg),*);
        $f::<{ $q + 1 }, MT>($($arg),*);
        $f::<{ $q + 2 }, MT>($($arg),*);
        $f::<{ $q + 3 }, MT>($($arg),*);
    }};
}

/// The sums of products of half `HALF` of a block, of all of it where halves share a scale. `minus`: minus the sums of the
/// activations, of the first token first.
#[inline(always)]
unsafe fn half_sums<F: BlockFormat, const VNNI: bool, const HALF: usize, const MT: usize>(
    c: *const u8,
    x: *const i8,
    minus: *const i32,
    stride: usize,
) -> Sums<MT> {
    // SAFETY: the caller's block and rows.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut sums = [[_mm256_setzero_si256(); MT]; 2];
        if VNNI && signed::<F>() {
            for t in 0..MT {
                let start = _mm256_slli_epi32::<7>(_mm256_set1_epi32(*minus.add(t * stride / 32)));
                (sums[0][t], sums[1][t]) = (start, start);
            }
        }
        // The second half of the quads is the second half of the block.
        let (lower, upper) = (F::SUB == 32 || HALF == 0, F::SUB == 32 || HALF == 1);
        if VNNI {
            if lower {
                four!(vnni_quad, 0, (c, x, stride, &mut sums));
            }
            if upper {
                four!(vnni_quad, 4, (c, x, stride, &mut sums));
            }
            return sums;
        }
        if signed::<F>() {
            four!(signed_quad, 0, (c, x, stride, &mut sums));
            four!(signed_quad, 4, (c, x, stride, &mut sums));
            return sums;
        }
        let most = const { quads_per_sum::<F>() };
        let (mut part, mut some) = (sums, false);
        macro_rules! quad {
            ($q:literal) => {
                if ($q < 4 && lower) || ($q >= 4 && upper) {
                    let begins = $q % most == 0 || (F::SUB == 16 && $q % 4 == 0);
                    pairs::<$q, MT>(c, x, stride, begins, &mut part);
                    if ($q + 1) % most == 0 || (F::SUB == 16 && $q % 4 == 3) {
                        for h in 0..2 {
                            for t in 0..MT {
                                let wide = _mm256_madd_epi16(part[h][t], ones);
                                sums[h][t] = if some { _mm256_add_epi32(sums[h][t], wide) } else { wide };
                            }
                        }
                        some = true;
                    }
                }
            };
        }
        quad!(0);
        quad!(1);
        quad!(2);
        quad!(3);
        quad!(4);
        quad!(5);
        quad!(6);
        quad!(7);
        let _ = some;
        sums
    }
}

/// Scales of half `half` of the unpacked block at `c` for rows `8i..8i+8`; from `i` = 2 on, offsets.
#[inline(always)]
unsafe fn eight(c: *const u8, half: usize, i: usize) -> __m256 {
    // SAFETY: the caller's block.
    unsafe { _mm256_load_ps(c.add(CODES + half * 128 + i * 32).cast()) }
}

/// MT tokens from `t0` on times the group unpacked at `c`.
#[inline(always)]
unsafe fn tile<F: BlockFormat, const VNNI: bool, const MT: usize>(
    mut c: *const u8,
    blocks: usize,
    x: X,
    t0: usize,
    dest: Dest,
) {
    // SAFETY: the group has these blocks, and the activation rows t0..t0 + MT, as their outputs, exist.
    unsafe {
        let x = x.row(t0);
        let mut acc = [[_mm256_setzero_ps(); MT]; 2];
        for at in 0..blocks {
            let (q, minus) = (x.q.add(at * 32), x.minus32.add(at));
            macro_rules! add {
                ($half:literal) => {
                    let sums = half_sums::<F, VNNI, $half, MT>(c, q, minus, x.stride);
                    for h in 0..2 {
                        let d = eight(c, $half, h);
                        for t in 0..MT {
                            let dx = _mm256_set1_ps(*x.d.add(t * x.stride / 32 + at));
                            let product = _mm256_cvtepi32_ps(sums[h][t]);
                            acc[h][t] = _mm256_fmadd_ps(product, _mm256_mul_ps(d, dx), acc[h][t]);
                        }
                    }
                };
            }
            add!(0);
            if F::SUB == 16 {
                add!(1);
            }
            if !signed::<F>() {
                for h in 0..2 {
                    for t in 0..MT {
                        if F::SUB == 16 {
                            let s = x.sum16.add(t * x.stride / 16 + at * 2);
                            acc[h][t] = _mm256_fmadd_ps(eight(c, 0, 2 + h), _mm256_set1_ps(*s), acc[h][t]);
                            acc[h][t] =
                                _mm256_fmadd_ps(eight(c, 1, 2 + h), _mm256_set1_ps(*s.add(1)), acc[h][t]);
                        } else {
                            let s = _mm256_set1_ps(*x.sum32.add(t * x.stride / 32 + at));
                            acc[h][t] = _mm256_fmadd_ps(eight(c, 0, 2 + h), s, acc[h][t]);
                        }
                    }
                }
            }
            c = c.add(block_bytes::<F>());
        }
        for (h, acc) in acc.into_iter().enumerate() {
            for (t, acc) in acc.into_iter().enumerate() {
                dest.put(t0 + t, h, acc);
            }
        }
    }
}

/// `m` tokens times the group at `w`.
#[inline(always)]
pub(super) unsafe fn group<F: BlockFormat, const VNNI: bool>(
    w: *const u8,
    k: usize,
    x: X,
    m: usize,
    dest: Dest,
) {
    let layout = const { RecordLayout::new::<F>() };
    let blocks = k.div_ceil(layout.record_k) * (layout.record_k / 32);
    let c = scratch(blocks * block_bytes::<F>());
    // SAFETY: the caller's contract; room for all blocks, which nothing else uses before this call ends.
    unsafe {
        unpack::<F, VNNI>(w, k, c);
        let mut t = 0;
        while t < m {
            let step = (m - t).min(4);
            match step {
                1 => tile::<F, VNNI, 1>(c, blocks, x, t, dest),
                2 => tile::<F, VNNI, 2>(c, blocks, x, t, dest),
                3 => tile::<F, VNNI, 3>(c, blocks, x, t, dest),
                _ => tile::<F, VNNI, 4>(c, blocks, x, t, dest),
            }
            t += step;
        }
    }
}
