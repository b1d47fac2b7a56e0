//! Every tier of the small kernels against the reference, on sizes around its vector widths.
//!
//! # Tolerances
//! `EPS` is half an ulp of 1.0 (2^-24): the relative error of one rounding. A tier may differ from the
//! exact result by its own roundings, counted from the code, and the reference by one (it computes in
//! double precision and rounds once at the end), so bounds below are "(k + 1)·EPS·|value|" for k roundings.
//! A sum of n terms in 4·LANES accumulators is at most n / (4·8) + 7 additions deep (AVX2, the shorter
//! vector), and each addition is off by EPS of a partial sum: depth·EPS·Σ|terms|.
//! `TINY` covers results that are subnormal, or flushed to zero where the code says so.

use proptest::prelude::*;
use tandem::model::RopePairing;
use tandem::reference;
use tandem::simd::{Isa, Kernels};
use tandem::tensor::DType;

const EPS: f64 = 1.0 / (1u64 << 24) as f64;
const TINY: f64 = 4e-37;

/// Tiers above reference that run here. The others are announced, once per test.
fn tiers() -> Vec<&'static Kernels> {
    let (can, cannot): (Vec<_>, Vec<_>) =
        Isa::ALL.into_iter().skip(1).partition(|isa| isa.missing().is_none());
    for isa in cannot {
        println!("skipped: {isa}: {}", isa.missing().unwrap());
    }
    can.into_iter().map(Kernels::for_isa).collect()
}

/// Sizes around the widths of 8 and 16 lanes and of four accumulators, odd ones, and those of models.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        0usize..=70,
        prop::sample::select(vec![127, 128, 129, 255, 256, 257, 511, 513, 576, 1023, 1536, 2048, 2049, 4097]),
    ]
}

/// A few sizes, exhaustively: what proptest may not draw.
const SIZES: [usize; 26] =
    [0, 1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 576, 2048];

/// Deterministic values of mixed magnitudes, about normal.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n).map(|_| (next() + next() + next() + next() - 2.0) * (next() * 6.0 - 2.0).exp2()).collect()
}

/// A buffer whose payload starts `offset` elements in, between canaries that must survive.
struct Guarded<T> {
    buf: Vec<T>,
    start: usize,
    len: usize,
}

const CANARIES: usize = 40;

trait Canary: Copy + PartialEq + std::fmt::Debug {
    const VALUE: Self;
}
impl Canary for f32 {
    const VALUE: f32 = -1234.5678;
}
impl Canary for u16 {
    const VALUE: u16 = 0xbeef;
}

impl<T: Canary> Guarded<T> {
    fn new(payload: &[T], offset: usize) -> Self {
        let start = CANARIES + offset;
        let mut buf = vec![T::VALUE; start + payload.len() + CANARIES];
        buf[start..start + payload.len()].copy_from_slice(payload);
        Guarded { buf, start, len: payload.len() }
    }
    fn filled(len: usize, offset: usize) -> Self {
        Guarded::new(&vec![T::VALUE; len], offset)
    }
    fn get(&self) -> &[T] {
        &self.buf[self.start..self.start + self.len]
    }
    fn get_mut(&mut self) -> &mut [T] {
        &mut self.buf[self.start..self.start + self.len]
    }
    #[track_caller]
    fn check(&self, what: &str) {
        let end = self.start + self.len;
        for (i, v) in self.buf.iter().enumerate() {
            if !(self.start..end).contains(&i) {
                assert!(*v == T::VALUE, "{what}: wrote outside, at {}", i as isize - self.start as isize);
            }
        }
    }
}

/// Every element within its own bound; NaN and infinities must be equal in kind.
#[track_caller]
fn close(what: &str, got: &[f32], want: &[f32], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let ok = (g.is_nan() && w.is_nan()) || g == w || (g as f64 - w as f64).abs() <= bound(i);
        assert!(ok, "{what}: element {i} of {}: {g:e}, reference {w:e}, bound {:e}", got.len(), bound(i));
    }
}

/// Depth of the additions of a sum of n terms in the shortest vector: see the top of this file.
fn sum_depth(n: usize) -> f64 {
    n as f64 / 32.0 + 7.0
}

fn check_norms(k: &Kernels, n: usize, offset: usize, seed: u64) {
    let eps = 1e-5;
    let (x, w, b) = (values(n, seed), values(n, seed ^ 1), values(n, seed ^ 2));
    let what = |op: &str| format!("{} {op} n={n} offset={offset}", k.name);
    let xg = Guarded::new(&x, offset);

    // The sum of squares is positive, so its relative error is (depth + 1 for the square)·EPS, halved by
    // the root; then rounding the scale, two products, and the reference's three.
    let rms_bound = |want: &[f32], i: usize| (0.5 * (sum_depth(n) + 1.0) + 6.0) * EPS * want[i].abs() as f64;
    let mut want = vec![0.0; n];
    reference::norm::rms_norm(&x, &w, eps, &mut want);
    let mut out = Guarded::filled(n, offset);
    k.rms_norm(xg.get(), &w, eps, out.get_mut());
    out.check(&what("rms_norm"));
    close(&what("rms_norm"), out.get(), &want, |i| rms_bound(&want, i) + TINY);

    // In place and over heads: the very same bits as row by row.
    if n > 0 {
        let mut heads = Guarded::new(&[x.clone(), x.clone(), x.clone()].concat(), offset);
        k.rms_norm_heads(heads.get_mut(), &w, eps);
        heads.check(&what("rms_norm_heads"));
        for head in heads.get().chunks_exact(n) {
            assert_eq!(head, out.get(), "{}", what("rms_norm_heads"));
        }
    }

    // Fused = add, then norm, bit for bit.
    let mut sum = x.clone();
    reference::activation::add(&mut sum, &b);
    let mut separate = vec![0.0; n];
    k.rms_norm(&sum, &w, eps, &mut separate);
    let (mut xr, mut fused) = (Guarded::new(&x, offset), Guarded::filled(n, offset));
    k.add_rms_norm(xr.get_mut(), &b, &w, eps, fused.get_mut());
    xr.check(&what("add_rms_norm x"));
    fused.check(&what("add_rms_norm out"));
    assert_eq!(xr.get(), sum, "{}", what("add_rms_norm x"));
    assert_eq!(fused.get(), separate, "{}", what("add_rms_norm"));

    // Layer norm: the mean is off by depth·EPS·mean|x|; centring it costs EPS·(|x| + |mean|) more. The
    // variance is second order in the first error: n·δ² over n·var; take (depth + 3)·EPS relative, and
    // δ²/var for the shift.
    if n > 0 {
        let mean_abs = x.iter().map(|v| v.abs() as f64).sum::<f64>() / n as f64;
        let mean = x.iter().map(|&v| v as f64).sum::<f64>() / n as f64;
        let var = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n as f64 + eps as f64;
        let scale = var.sqrt().recip();
        let delta = (sum_depth(n) + 1.0) * EPS * mean_abs;
        let mut want = vec![0.0; n];
        reference::norm::layer_norm(&x, &w, &b, eps, &mut want);
        let mut out = Guarded::filled(n, offset);
        k.layer_norm(xg.get(), &w, &b, eps, out.get_mut());
        out.check(&what("layer_norm"));
        close(&what("layer_norm"), out.get(), &want, |i| {
            let centred = (x[i] as f64 - mean).abs();
            let product = centred * scale * w[i].abs() as f64;
            let relative = (0.5 * (sum_depth(n) + 3.0) + 4.0) * EPS + delta * delta / var;
            let shift = (delta + EPS * (x[i].abs() as f64 + mean.abs())) * scale * w[i].abs() as f64;
            product * relative + shift + EPS * (product + 2.0 * b[i].abs() as f64) + TINY
        });
    }
}

fn check_rope(k: &Kernels, heads: usize, head_dim: usize, pairs: usize, offset: usize, seed: u64) {
    let x = values(heads * head_dim, seed);
    let angles = values(pairs, seed ^ 3);
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    for pairing in [RopePairing::Half, RopePairing::Interleaved] {
        let what =
            format!("{} rope {pairing:?} {heads} x {head_dim}, {pairs} pairs, offset {offset}", k.name);
        let mut want = x.clone();
        reference::rope::rope_heads(&mut want, head_dim, &cos, &sin, pairing);
        let mut got = Guarded::new(&x, offset);
        k.rope_heads(got.get_mut(), heads, head_dim, &cos, &sin, pairing);
        got.check(&what);
        // a·c - b·s: one rounding of b·s, one of the fused rest, one in the reference.
        close(&what, got.get(), &want, |i| {
            let (head, j) = (i / head_dim * head_dim, i % head_dim);
            if j >= 2 * pairs {
                return 0.0;
            }
            let (p, partner) = match pairing {
                RopePairing::Half => (j % pairs, head + (j + pairs) % (2 * pairs)),
                RopePairing::Interleaved => (j / 2, head + (j ^ 1)),
            };
            let (a, b) = (x[i].abs() as f64, x[partner].abs() as f64);
            3.0 * EPS * (a * cos[p].abs() as f64 + b * sin[p].abs() as f64)
                + 3.0 * EPS * (a * sin[p].abs() as f64 + b * cos[p].abs() as f64)
                + TINY
        });
    }
}

/// Gate values over the whole interesting range, with the special ones sprinkled in.
fn gates(n: usize, seed: u64) -> Vec<f32> {
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        88.8,
        -88.8,
        -104.0,
        1e4,
        -1e4,
    ];
    let mut v = values(n, seed);
    for (i, x) in v.iter_mut().enumerate() {
        if (i as u64 + seed).is_multiple_of(5) {
            *x = special[(i / 5 + seed as usize) % special.len()];
        }
    }
    v
}

fn check_activations(k: &Kernels, n: usize, offset: usize, seed: u64) {
    let (gate, up) = (gates(n, seed), values(n, seed ^ 5));
    let what = |op: &str| format!("{} {op} n={n} offset={offset}", k.name);

    // silu: e^-x within 2 ulp = 4 EPS, the sum 1, the quotient 1, two products 2, the reference 1 => 9.
    // Below -88.7 it is flushed: TINY·|up|.
    let mut want = gate.clone();
    reference::activation::silu_mul_inplace(&mut want, &up);
    let mut out = Guarded::new(&gate, offset);
    k.silu_mul_inplace(out.get_mut(), &up);
    out.check(&what("silu_mul_inplace"));
    let bound =
        |want: &[f32], i: usize, c: f64| c * EPS * want[i].abs() as f64 + TINY * (1.0 + up[i].abs() as f64);
    close(&what("silu_mul_inplace"), out.get(), &want, |i| bound(&want, i, 9.0));

    // gelu: the argument 2u of e is off by 4 roundings (x², two constants, fma, product: 5 EPS at most),
    // which e^-2u turns into 5·|2u|·EPS of itself; the rest is as for silu.
    let mut want = gate.clone();
    reference::activation::gelu_tanh_mul_inplace(&mut want, &up);
    let mut out = Guarded::new(&gate, offset);
    k.gelu_tanh_mul_inplace(out.get_mut(), &up);
    out.check(&what("gelu_tanh_mul_inplace"));
    close(&what("gelu_tanh_mul_inplace"), out.get(), &want, |i| {
        let x = gate[i] as f64;
        let two_u = (1.5957691216 * (x + 0.044715 * x * x * x)).abs().min(120.0);
        bound(&want, i, 9.0 + 5.0 * two_u)
    });

    // Clamped SwiGLU: as silu, and the product 1.702·g is rounded (EPS/2 of an argument of at most 105), the sum u + 1 once.
    let mut want = gate.clone();
    reference::activation::clamped_swiglu_inplace(&mut want, &up);
    let mut out = Guarded::new(&gate, offset);
    k.clamped_swiglu_inplace(out.get_mut(), &up);
    out.check(&what("clamped_swiglu_inplace"));
    close(&what("clamped_swiglu_inplace"), out.get(), &want, |i| {
        let argument = (1.702 * f64::from(gate[i])).abs().min(105.0);
        bound(&want, i, 10.0 + argument)
    });

    // Exact ones: one IEEE operation, or a selection.
    let mut x = Guarded::new(&gate, offset);
    k.relu(x.get_mut());
    x.check(&what("relu"));
    let mut want = gate.clone();
    reference::activation::relu(&mut want);
    close(&what("relu"), x.get(), &want, |_| 0.0);
    let mut x = Guarded::new(&gate, offset);
    k.add(x.get_mut(), &up);
    x.check(&what("add"));
    let mut want = gate.clone();
    reference::activation::add(&mut want, &up);
    close(&what("add"), x.get(), &want, |_| 0.0);

    // softcap: x / cap 1, cap· 1, reference 1. tanh: polynomial 1.3e-7 = 2.2 EPS + 3 roundings; or
    // 1 - 2/(e + 1) with (4 + 1 + 1) EPS on a term <= 0.45, + 1: 5 at most in either. The rounding of x / cap
    // moves tanh by no more than its own relative size.
    let mut x = Guarded::new(&gate, offset);
    k.softcap(x.get_mut(), 30.0);
    x.check(&what("softcap"));
    let mut want = gate.clone();
    reference::activation::softcap(&mut want, 30.0);
    close(&what("softcap"), x.get(), &want, |i| 9.0 * EPS * want[i].abs() as f64 + TINY);
}

fn check_logsumexp(k: &Kernels, x: &[f32]) {
    let n = x.len();
    let what = format!("{} max_and_logsumexp n={n}", k.name);
    // x - max is rounded: EPS·|x - max| in the argument of e, weighted by e^d·d (< 0.37) in the sum; e itself 4, sum of
    // up to 2048 in f32: depth.
    let sum_error = 4.0 + 0.37 * n as f64 + sum_depth(n.min(2048));
    let (m, lse) = k.max_and_logsumexp(x);
    let (rm, rlse) = reference::softmax::max_and_logsumexp(x);
    assert_eq!(m, rm, "{what}");
    assert!(
        (lse.is_nan() && rlse.is_nan()) || lse == rlse || (lse - rlse).abs() <= sum_error * EPS,
        "{what}: logsumexp {lse}, reference {rlse}"
    );
}

fn check_argmax(k: &Kernels, x: &[f32], offset: usize) {
    let g = Guarded::new(x, offset);
    let want = reference::reduce::argmax(x);
    assert_eq!(k.argmax(g.get()), want, "{} argmax n={} offset={offset} {:?}", k.name, x.len(), x.get(want));
}

fn check_conversions(k: &Kernels, x: &[f32], offset: usize) {
    let n = x.len();
    let what = |op: &str| format!("{} {op} n={n} offset={offset}", k.name);
    let g = Guarded::new(x, offset);
    let mut want = vec![0; n];

    reference::convert::f32_to_bf16(x, &mut want);
    let mut bf16 = Guarded::filled(n, offset);
    k.f32_to_bf16(g.get(), bf16.get_mut());
    bf16.check(&what("f32_to_bf16"));
    for i in 0..n {
        // Subnormal inputs may be taken for zero (AVX512_BF16); the sign stays.
        let flushed = x[i].is_subnormal() && bf16.get()[i] == (want[i] & 0x8000);
        let nan = x[i].is_nan() && half::bf16::from_bits(bf16.get()[i]).is_nan();
        assert!(nan || flushed || bf16.get()[i] == want[i], "{} of {:e}", what("f32_to_bf16"), x[i]);
    }
}

/// Any dtype, any bytes (so NaN and infinite scales too): the same bits as the definition times the scale.
fn check_embed(k: &Kernels, dtype: DType, blocks: usize, offset: usize, seed: u64, scale: f32) {
    let n = blocks * dtype.block_len();
    let mut bytes = vec![0xa5; offset];
    bytes.extend(values(dtype.row_bytes(n).unwrap().div_ceil(4), seed).iter().flat_map(|v| {
        // Well mixed bytes out of a float: its bits times an odd constant.
        v.to_bits().wrapping_mul(0x9e37_79b1).rotate_left(11).to_le_bytes()
    }));
    let row = &bytes[offset..offset + dtype.row_bytes(n).unwrap()];
    let what = format!("{} embed_row {dtype} n={n} offset={offset} scale={scale}", k.name);
    let mut want = vec![0.0; n];
    reference::embed::embed_row(dtype, row, scale, &mut want);
    let mut out = Guarded::filled(n, offset % 16);
    k.embed_row(dtype, row, scale, out.get_mut());
    out.check(&what);
    for (i, (g, w)) in out.get().iter().zip(&want).enumerate() {
        let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
        assert!(same, "{what}: element {i}: {g:e}, not {w:e}");
    }
}

/// All operations at one size.
fn check_all(k: &Kernels, n: usize, offset: usize, seed: u64) {
    check_norms(k, n, offset, seed);
    check_activations(k, n, offset, seed);
    check_logsumexp(k, &values(n, seed ^ 7));
    check_argmax(k, &gates(n, seed ^ 8), offset);
    check_conversions(k, &gates(n, seed ^ 9), offset);
}

#[test]
fn every_size_around_the_vector_widths_at_every_alignment() {
    for k in tiers() {
        for n in SIZES {
            for offset in [0, 1, 3, 8, 15] {
                check_all(k, n, offset, n as u64 * 31 + offset as u64);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_sizes_alignments_and_values(n in size(), offset in 0usize..16, seed in any::<u64>()) {
        for k in tiers_quietly() {
            check_all(k, n, offset, seed >> 8);
        }
    }

    #[test]
    fn rope_at_any_shape(
        heads in 0usize..5,
        dims in prop::sample::select(vec![(2, 1), (6, 3), (18, 9), (64, 32), (80, 40), (80, 16), (96, 48), (100, 25), (128, 64), (256, 128)]),
        offset in 0usize..16,
        seed in any::<u64>(),
    ) {
        for k in tiers_quietly() {
            check_rope(k, heads, dims.0, dims.1, offset, seed >> 8);
        }
    }

    #[test]
    fn embedding_rows_decode_bit_for_bit(
        blocks in 0usize..40,
        offset in 0usize..16,
        seed in any::<u64>(),
        scale in prop::sample::select(vec![1.0f32, 25.298_22, 0.1]),
    ) {
        for k in tiers_quietly() {
            for dtype in DType::ALL {
                check_embed(k, dtype, blocks, offset, seed >> 8, scale);
            }
        }
    }

    #[test]
    fn conversions_of_any_bits(bits in prop::collection::vec(any::<u32>(), 0..100), offset in 0usize..16) {
        let x: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        for k in tiers_quietly() {
            check_conversions(k, &x, offset);
        }
    }
}

/// [`tiers`], announced elsewhere already.
fn tiers_quietly() -> Vec<&'static Kernels> {
    Isa::supported().into_iter().skip(1).map(Kernels::for_isa).collect()
}

/// silu(-x)·1 = -x·e^-x / (1 + e^-x) walks e^x over its range: for large x it is -x·e^-x.
#[test]
fn exp_is_within_two_ulp_over_its_whole_range() {
    for k in tiers() {
        let mut worst = (0f64, 0f32);
        let mut x = 0.0f32;
        while x < 87.0 {
            let mut gate = [-x; 32];
            k.silu_mul_inplace(&mut gate, &[1.0; 32]);
            let want = -(x as f64) / (1.0 + (x as f64).exp());
            if want.abs() > f32::MIN_POSITIVE as f64 {
                let ulp = 2.0 * EPS * 2f64.powi(want.abs().log2().floor() as i32);
                for got in gate {
                    let error = (got as f64 - want).abs() / ulp;
                    if error > worst.0 {
                        worst = (error, x);
                    }
                }
            }
            x += 0.003_917;
        }
        // 2 of e^x itself, half an ulp each of the sum, the quotient and two products, at most doubled by their binades.
        assert!(worst.0 <= 6.0, "{}: {} ulp at {}", k.name, worst.0, worst.1);
        println!("{}: worst {:.2} ulp at x = {}", k.name, worst.0, worst.1);
    }
}

#[test]
fn masked_rows_and_infinities() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut ks = tiers();
    ks.push(Kernels::for_isa(Isa::Reference));
    for k in ks {
        for n in SIZES {
            assert_eq!(k.max_and_logsumexp(&vec![-inf; n]), (-inf, f64::NEG_INFINITY), "{}", k.name);
            assert_eq!(k.argmax(&vec![-inf; n]), 0, "{}", k.name);
            assert_eq!(k.argmax(&vec![nan; n]), 0, "{}", k.name);
            if n < 2 {
                continue;
            }
            // All but the last masked.
            let mut row = vec![-inf; n];
            row[n - 1] = 5.0;
            assert_eq!(k.argmax(&row), n - 1);
            let (max, lse) = k.max_and_logsumexp(&row);
            assert_eq!((max, lse), (5.0, 5.0), "{}", k.name);
            // NaN hides no winner; it does poison a sum.
            let mut row = vec![nan; n];
            row[n - 1] = -inf;
            assert_eq!(k.argmax(&row), n - 1, "{}", k.name);
            row[n - 1] = 1.0;
            assert!(k.max_and_logsumexp(&row).1.is_nan(), "{}", k.name);
            // Ties: the lowest index, in whichever vector or lane the others are.
            for first in [0, n / 2, n - 1] {
                let mut row = vec![-1.0; n];
                row[first..].fill(3.0);
                assert_eq!(k.argmax(&row), first, "{} n={n}", k.name);
            }
            assert_eq!(k.argmax(&[vec![-1.0; n], vec![inf, nan, inf]].concat()), n, "{}", k.name);
        }
    }
}

#[test]
fn a_vocabulary_sums_as_in_double_precision() {
    // 262 144 terms: a plain f32 sum would be off by up to 2^13 times more.
    let x = values(262_144, 42);
    for k in tiers() {
        let (m, lse) = k.max_and_logsumexp(&x);
        let (rm, rlse) = reference::softmax::max_and_logsumexp(&x);
        assert_eq!(m, rm);
        // Blocks of 2048: depth + e^x (4) + rounded differences (0.37 of a ulp of each |x - max| < 40).
        assert!((lse - rlse).abs() <= (sum_depth(2048) + 4.0 + 40.0) * EPS, "{}: {lse} {rlse}", k.name);
        assert_eq!(k.argmax(&x), reference::reduce::argmax(&x));
    }
}

#[test]
#[should_panic(expected = "rms_norm: x has 4 elements, w has 3")]
fn shapes_are_asserted_by_name() {
    Kernels::for_isa(Isa::best()).rms_norm(&[0.0; 4], &[0.0; 3], 1e-5, &mut [0.0; 4]);
}
