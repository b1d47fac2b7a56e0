//! Quantised linear, AVX-512 VNNI: packed unsigned codes times int8 activations.
//!
//!   y[t][n] = Σ_blocks (d_w·d_x)·(q_w·q_x) + m_w·(d_x·Σq_x)
//!   symmetric dtypes, with zero point z: Σ_blocks (d_w·d_x)·(q_w·q_x - z·Σq_x), the brackets in integers
//!
//! layout     see `packed`: a row per lane, four elements of k per dword
//! tile       16 rows x 1 to 8 tokens (`tile`), or 2 groups x 4 to 8 and 4 groups x 4 tokens (`wide`), whichever the
//!            tuning table says; one block of 32 at a time
//! registers  tile: 8 codes + MT acc + d, m + 2 temporaries = 20 of 32 zmm at MT = 8, an activation is broadcast from
//!            memory for each product. wide: 16 sums + G codes + 1 activation, which serves G products; the f32
//!            accumulators wait on the stack, where a block's sums are added to them
//! bound      M = 1: memory; per 16x32 codes 8 vpdpbusd + ~16 others against 256..512 bytes
//!            M >= 8: products, whole and float (1 a cycle on Zen 4, the same ports): 8 vpdpbusd and 3 float ones per
//!            block and token, 2 where the dtype is symmetric: 73 and 80% of the peak of vpdpbusd at most
//! order      k ascending, one fused multiply-add per block for scale and offset: the same for every MT
//! error      integers exact; f32 rounding over K/32 blocks; activations quantised to 8 bits

use std::arch::x86_64::*;

use super::super::kernel::{ActsForm, CHUNK_GROUPS, GROUP, LinearKernel, Shape, Work};
use super::X;
use super::format::RecordFormat;
use crate::simd::tuning::LinearTuning;
use crate::tensor::formats::with_format;

/// Four or eight quads of one token against `codes`, added to `start`.
#[inline(always)]
unsafe fn dot<const FROM: usize, const TO: usize>(
    codes: &[__m512i; 8],
    x: *const i8,
    start: __m512i,
) -> __m512i {
    // SAFETY: `x` points to 32 int8 activations; the rest is register arithmetic. A single chain: the sums of other
    // tokens and blocks hide its latency, and adding two chains would take a slot that products could use.
    unsafe {
        let x = x.cast::<i32>();
        let mut sum = start;
        let mut q = FROM;
        while q < TO {
            sum = _mm512_dpbusd_epi32(sum, codes[q], _mm512_set1_epi32(x.add(q).read_unaligned()));
            q += 1;
        }
        sum
    }
}

/// Where the integer sums of a format start: see [`RecordFormat::ZERO_LOG2`]. `minus` points to minus the sum of the
/// activations.
#[inline(always)]
unsafe fn start<F: RecordFormat>(minus: *const i32) -> __m512i {
    // SAFETY: the caller's row has the sum; the rest is register arithmetic.
    unsafe {
        match F::ZERO_LOG2 {
            Some(z) => _mm512_sllv_epi32(_mm512_set1_epi32(*minus), _mm512_set1_epi32(z)),
            None => _mm512_setzero_si512(),
        }
    }
}

/// MT tokens times one group: `out[t·ldo + lane]` for the lanes in `lanes`. With `AHEAD`, lines `ahead` bytes further
/// on are prefetched.
///
/// # Safety
/// AVX-512 VNNI; `w` is a group of `records` records of `F`; `x` has MT rows of that many elements; the
/// outputs exist.
#[inline(always)]
unsafe fn tile<F: RecordFormat, const MT: usize, const AHEAD: bool>(
    w: *const u8,
    records: usize,
    ahead: usize,
    x: X,
    out: *mut f32,
    ldo: usize,
    lanes: __mmask16,
) {
    // SAFETY: all offsets below stay inside the records and the MT activation rows.
    unsafe {
        let blocks = F::LAYOUT.record_k / 32;
        let mut acc = [_mm512_setzero_ps(); MT];
        let mut w = w;
        for r in 0..records {
            for b in 0..blocks {
                // Each block prefetches its share of the record's lines, since all at once would fill the miss buffers.
                let lines = if AHEAD { F::LAYOUT.record_bytes.div_ceil(64 * blocks) } else { 0 };
                for l in b * lines..(b + 1) * lines {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(ahead + l * 64).cast());
                }
                let codes = F::codes(w, b);
                let at = r * blocks + b;
                if F::HALVES {
                    let (d0, m0) = F::scales(w, b, 0);
                    let (d1, m1) = F::scales(w, b, 1);
                    for t in 0..MT {
                        let q = x.q.add(t * x.stride + at * 32);
                        let dx = _mm512_set1_ps(*x.d.add(t * x.stride / 32 + at));
                        let minus = x.minus16.add(t * x.stride / 16 + at * 2);
                        let i0 = _mm512_cvtepi32_ps(dot::<0, 4>(&codes, q, start::<F>(minus)));
                        let i1 = _mm512_cvtepi32_ps(dot::<4, 8>(&codes, q, start::<F>(minus.add(1))));
                        let both = _mm512_fmadd_ps(i0, d0, _mm512_mul_ps(i1, d1));
                        acc[t] = _mm512_fmadd_ps(both, dx, acc[t]);
                        if F::ZERO_LOG2.is_none() {
                            let s = x.sum16.add(t * x.stride / 16 + at * 2);
                            acc[t] = _mm512_fmadd_ps(m0, _mm512_set1_ps(*s), acc[t]);
                            acc[t] = _mm512_fmadd_ps(m1, _mm512_set1_ps(*s.add(1)), acc[t]);
                        }
                    }
                } else {
                    let (d, m) = F::scales(w, b, 0);
                    for t in 0..MT {
                        let minus = x.minus32.add(t * x.stride / 32 + at);
                        let i = dot::<0, 8>(&codes, x.q.add(t * x.stride + at * 32), start::<F>(minus));
                        let dx = _mm512_set1_ps(*x.d.add(t * x.stride / 32 + at));
                        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i), _mm512_mul_ps(d, dx), acc[t]);
                        if F::ZERO_LOG2.is_none() {
                            let s = _mm512_set1_ps(*x.sum32.add(t * x.stride / 32 + at));
                            acc[t] = _mm512_fmadd_ps(m, s, acc[t]);
                        }
                    }
                }
            }
            w = w.add(F::LAYOUT.record_bytes);
        }
        for t in 0..MT {
            _mm512_mask_storeu_ps(out.add(t * ldo), lanes, acc[t]);
        }
    }
}

/// Quad `Q` of G groups times MT tokens, added to `sums`.
///
/// # Safety
/// As [`wide`]: the groups' records at `w`, `group_bytes` apart; `x` points to block `b` of the first token.
#[inline(always)]
unsafe fn quad<F: RecordFormat, const G: usize, const MT: usize, const Q: usize>(
    w: *const u8,
    group_bytes: usize,
    b: usize,
    x: *const i8,
    stride: usize,
    sums: &mut [[__m512i; MT]; G],
) {
    // SAFETY: the caller's records and rows. Of the eight codes only the one in use is computed.
    unsafe {
        let mut codes = [_mm512_setzero_si512(); G];
        for g in 0..G {
            codes[g] = F::codes(w.add(g * group_bytes), b)[Q];
        }
        for t in 0..MT {
            let x = _mm512_set1_epi32(x.add(t * stride).cast::<i32>().add(Q).read_unaligned());
            for g in 0..G {
                sums[g][t] = _mm512_dpbusd_epi32(sums[g][t], codes[g], x);
            }
        }
    }
}

/// G x MT values of 16 lanes.
type Wide<T, const G: usize, const MT: usize> = [[T; MT]; G];

/// MT tokens times G groups, with the bits of [`tile`] for each group. A broadcast of an activation serves G products,
/// so that loads are not the bottleneck.
///
/// # Safety
/// AVX-512 VNNI; `w` is G consecutive groups of `records` records of `F`; `x` has MT rows of that many elements;
/// the outputs exist: 16 columns for each group, in the last of them those in `lanes`.
#[inline(always)]
unsafe fn wide<F: RecordFormat, const G: usize, const MT: usize>(
    w: *const u8,
    records: usize,
    ahead: usize,
    x: X,
    out: *mut f32,
    ldo: usize,
    lanes: __mmask16,
) {
    // SAFETY: all offsets below stay inside the records of the groups and the MT activation rows.
    unsafe {
        let blocks = F::LAYOUT.record_k / 32;
        let group_bytes = records * F::LAYOUT.record_bytes;
        let lines = F::LAYOUT.record_bytes.div_ceil(64 * blocks);
        // G groups are G streams, which together have as many bytes in flight as the single stream of a `tile`.
        let ahead = (ahead / G).next_multiple_of(64);
        let mut acc: Wide<__m512, G, MT> = [[_mm512_setzero_ps(); MT]; G];
        for r in 0..records {
            let w = w.add(r * F::LAYOUT.record_bytes);
            for b in 0..blocks {
                // Past the end of a group its successor is already in use, so prefetch from the next G groups.
                let mut to = r * F::LAYOUT.record_bytes + b * lines * 64 + ahead;
                if to >= group_bytes {
                    to += (G - 1) * group_bytes;
                }
                let to = w.wrapping_sub(r * F::LAYOUT.record_bytes).wrapping_add(to);
                for g in 0..G {
                    for l in 0..lines {
                        _mm_prefetch::<_MM_HINT_T0>(to.wrapping_add(g * group_bytes + l * 64).cast());
                    }
                }
                let at = r * blocks + b;
                let q = x.q.add(at * 32);
                let mut sums: Wide<__m512i, G, MT> = [[_mm512_setzero_si512(); MT]; G];
                if F::HALVES {
                    for t in 0..MT {
                        let begin = start::<F>(x.minus16.add(t * x.stride / 16 + at * 2));
                        for g in 0..G {
                            sums[g][t] = begin;
                        }
                    }
                    quad::<F, G, MT, 0>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 1>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 2>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 3>(w, group_bytes, b, q, x.stride, &mut sums);
                    let first = sums;
                    for t in 0..MT {
                        let begin = start::<F>(x.minus16.add(t * x.stride / 16 + at * 2 + 1));
                        for g in 0..G {
                            sums[g][t] = begin;
                        }
                    }
                    quad::<F, G, MT, 4>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 5>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 6>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 7>(w, group_bytes, b, q, x.stride, &mut sums);
                    for g in 0..G {
                        let (d0, m0) = F::scales(w.add(g * group_bytes), b, 0);
                        let (d1, m1) = F::scales(w.add(g * group_bytes), b, 1);
                        for t in 0..MT {
                            let dx = _mm512_set1_ps(*x.d.add(t * x.stride / 32 + at));
                            let i0 = _mm512_cvtepi32_ps(first[g][t]);
                            let i1 = _mm512_cvtepi32_ps(sums[g][t]);
                            let both = _mm512_fmadd_ps(i0, d0, _mm512_mul_ps(i1, d1));
                            acc[g][t] = _mm512_fmadd_ps(both, dx, acc[g][t]);
                            if F::ZERO_LOG2.is_none() {
                                let s = x.sum16.add(t * x.stride / 16 + at * 2);
                                acc[g][t] = _mm512_fmadd_ps(m0, _mm512_set1_ps(*s), acc[g][t]);
                                acc[g][t] = _mm512_fmadd_ps(m1, _mm512_set1_ps(*s.add(1)), acc[g][t]);
                            }
                        }
                    }
                } else {
                    for t in 0..MT {
                        let begin = start::<F>(x.minus32.add(t * x.stride / 32 + at));
                        for g in 0..G {
                            sums[g][t] = begin;
                        }
                    }
                    quad::<F, G, MT, 0>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 1>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 2>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 3>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 4>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 5>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 6>(w, group_bytes, b, q, x.stride, &mut sums);
                    quad::<F, G, MT, 7>(w, group_bytes, b, q, x.stride, &mut sums);
                    for g in 0..G {
                        let (d, m) = F::scales(w.add(g * group_bytes), b, 0);
                        for t in 0..MT {
                            let dx = _mm512_set1_ps(*x.d.add(t * x.stride / 32 + at));
                            let i = _mm512_cvtepi32_ps(sums[g][t]);
                            acc[g][t] = _mm512_fmadd_ps(i, _mm512_mul_ps(d, dx), acc[g][t]);
                            if F::ZERO_LOG2.is_none() {
                                let s = _mm512_set1_ps(*x.sum32.add(t * x.stride / 32 + at));
                                acc[g][t] = _mm512_fmadd_ps(m, s, acc[g][t]);
                            }
                        }
                    }
                }
            }
        }
        for g in 0..G {
            let lanes = if g + 1 == G { lanes } else { !0 };
            for t in 0..MT {
                _mm512_mask_storeu_ps(out.add(t * ldo + g * GROUP), lanes, acc[g][t]);
            }
        }
    }
}

/// Tokens per tile when there are many: activations of a tile stay in L1 while groups pass.
const MT: usize = 8;

/// Groups of 16 rows in a tile of `m` tokens, by the tuning table and the available kernels. Chunks of work are whole
/// tiles.
fn groups_per_tile(how: &LinearTuning, m: usize) -> usize {
    let one_or_four = |groups: usize| if groups < 4 { 1 } else { 4 };
    match m {
        0..=1 => one_or_four(how.groups_of_1),
        2..=3 => one_or_four(how.groups_of_2),
        4 => how.groups_of_4,
        _ => how.groups_of_8.min(2),
    }
}

/// Whole tiles.
fn chunk(s: &Shape<'_>) -> usize {
    let (unit, most) = (groups_per_tile(s.tuning, s.m), s.most());
    let chunk = if s.streams() { s.of_bytes(s.tuning.chunk_bytes) } else { CHUNK_GROUPS.min(most) };
    let whole = chunk.next_multiple_of(unit);
    if whole <= most { whole } else { (most / unit * unit).max(unit.min(s.groups())) }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "vnni",
    takes: |a| a.quantised(),
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::Int8,
    chunk,
    run,
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")]
unsafe fn groups<F: RecordFormat>(
    how: &LinearTuning,
    w: &[u8],
    k: usize,
    x: X,
    m: usize,
    out: *mut f32,
    ldo: usize,
    n: usize,
) {
    let records = k.div_ceil(F::LAYOUT.record_k);
    let group_bytes = records * F::LAYOUT.record_bytes;
    let (n_groups, ahead) = (w.len() / group_bytes, how.ahead_bytes);
    let mut t = 0;
    while t < m {
        let step = (m - t).min(MT);
        let most = groups_per_tile(how, step);
        let asked = step >= how.ahead_from;
        let mut g = 0;
        while g < n_groups {
            let take = match (n_groups - g).min(most) {
                4.. => 4,
                2.. if step >= 4 => 2,
                _ => 1,
            };
            let lanes = (n - (g + take - 1) * GROUP).min(GROUP);
            let lanes = ((1u32 << lanes) - 1) as __mmask16;
            // SAFETY: the bytes of `take` groups, the rows t..t+step and their outputs exist.
            unsafe {
                let (w, x, o) = (w.as_ptr().add(g * group_bytes), x.row(t), out.add(t * ldo + g * GROUP));
                match (take, step, asked) {
                    (1, 1, false) => tile::<F, 1, false>(w, records, ahead, x, o, ldo, lanes),
                    (1, 1, true) => tile::<F, 1, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 2, false) => tile::<F, 2, false>(w, records, ahead, x, o, ldo, lanes),
                    (1, 2, true) => tile::<F, 2, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 3, _) => tile::<F, 3, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 4, _) => tile::<F, 4, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 5, _) => tile::<F, 5, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 6, _) => tile::<F, 6, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, 7, _) => tile::<F, 7, true>(w, records, ahead, x, o, ldo, lanes),
                    (1, ..) => tile::<F, MT, true>(w, records, ahead, x, o, ldo, lanes),
                    (2, 4, _) => wide::<F, 2, 4>(w, records, ahead, x, o, ldo, lanes),
                    (2, 5, _) => wide::<F, 2, 5>(w, records, ahead, x, o, ldo, lanes),
                    (2, 6, _) => wide::<F, 2, 6>(w, records, ahead, x, o, ldo, lanes),
                    (2, 7, _) => wide::<F, 2, 7>(w, records, ahead, x, o, ldo, lanes),
                    (2, ..) => wide::<F, 2, MT>(w, records, ahead, x, o, ldo, lanes),
                    (_, 1, _) => wide::<F, 4, 1>(w, records, ahead, x, o, ldo, lanes),
                    (_, 2, _) => wide::<F, 4, 2>(w, records, ahead, x, o, ldo, lanes),
                    (_, 3, _) => wide::<F, 4, 3>(w, records, ahead, x, o, ldo, lanes),
                    (..) => wide::<F, 4, 4>(w, records, ahead, x, o, ldo, lanes),
                }
            }
            g += take;
        }
        t += step;
    }
}

/// `m` tokens times the consecutive groups `w` (covering `n` rows): `out[t·ldo + row]`. The tuning table does not
/// change any bit of the result.
///
/// # Safety
/// The CPU has AVX-512 F/BW/DQ/VL/VNNI; the work's weights are whole groups of a quantised dtype, its activations int8.
unsafe fn run(work: &Work<'_>) {
    let &Work { tuning: how, w, n, k, out, ldo, .. } = work;
    let (x, m) = (X::of(work), work.x.m());
    // SAFETY: the caller's contract.
    unsafe { with_format!(work.dtype, F => groups::<F>(how, w, k, x, m, out, ldo, n)) }
}
