//! Parts of rows with weights of their own: the same bits as a product of each part alone, and the reference's mixture of experts.

use proptest::prelude::*;
use tandem::host::Pool;
use tandem::reference::dequant::dequantise;
use tandem::reference::{mix, route};
use tandem::simd::linear::{Acts, Linear, Mode, Out, Part, linear, linear_parts, pack};
use tandem::simd::{Isa, Kernels};
use tandem::tensor::{Bytes, DType, Tensor, quantise_row};

/// Numbers from -1 to 1.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        z ^= z << 13;
        z ^= z >> 7;
        z ^= z << 17;
        (z >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn tensor(dtype: DType, n: usize, k: usize, seed: u64) -> Tensor {
    let scale = (k as f32).powf(-0.5);
    let x: Vec<f32> = numbers(n * k, seed).into_iter().map(|x| x * scale).collect();
    let mut bytes = vec![0; n * dtype.row_bytes(k).expect("whole blocks")];
    quantise_row(dtype, &x, &mut bytes);
    Tensor::new(dtype, vec![n, k], Bytes::copy_of(&bytes)).expect("sized above")
}

fn prepared(w: &Tensor, isa: Isa) -> Linear {
    if Linear::wants_packing(w.dtype, isa) {
        Linear::from_packed(pack(w), isa)
    } else {
        Linear::from_rows(w.clone(), isa)
    }
}

/// Rows one behind the other, from which parts begin where the weights that multiply them want it.
fn inputs<'w>(
    acts: &mut Acts,
    parts: &[Vec<f32>],
    k: usize,
    mode: Mode,
    weights: impl Fn(usize) -> Vec<&'w Linear>,
) -> Vec<std::ops::Range<usize>> {
    let mut at = 0usize;
    let ranges: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let m = p.len() / k;
            let align = weights(i).into_iter().map(|w| w.part_alignment(m, mode)).max().unwrap();
            let first = at.next_multiple_of(align);
            at = (first + m).next_multiple_of(align);
            first..first + m
        })
        .collect();
    let x = acts.reset(at, k);
    x.fill(0.0);
    for (p, rows) in parts.iter().zip(&ranges) {
        x[rows.start * k..rows.end * k].copy_from_slice(p);
    }
    ranges
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn parts_have_the_bits_of_products_of_their_own(
        rows in prop::collection::vec(prop::sample::select(vec![0usize, 1, 2, 3, 5, 17, 33]), 1..6),
        n in prop::sample::select(vec![1usize, 16, 40, 129]),
        dtypes in prop::sample::subsequence(DType::ALL.to_vec(), 2),
        threads in 1usize..4,
        gated: bool,
        seed: u64,
    ) {
        let (k, pool) = (256, Pool::new(threads));
        for isa in Isa::supported() {
            for mode in [Mode::Fast, Mode::Deterministic] {
                let of = |i: usize, salt| prepared(&tensor(dtypes[i % 2], n, k, seed ^ (i as u64 + salt)), isa);
                let weights: Vec<(Linear, Linear)> = (0..rows.len()).map(|i| (of(i, 1), of(i + 1, 99))).collect();
                let x: Vec<Vec<f32>> = rows.iter().map(|&m| numbers(m * k, seed ^ m as u64)).collect();
                let mut want = Vec::new();
                for ((w, up), x) in weights.iter().zip(&x) {
                    let m = x.len() / k;
                    let alone = |w: &Linear| {
                        let (mut acts, mut out) = (Acts::default(), vec![f32::NAN; m * n]);
                        acts.reset(m, k).copy_from_slice(x);
                        linear(&pool, mode, &mut acts, &mut [Out { w, out: &mut out, ldo: n }]);
                        out
                    };
                    let (mut a, b) = (alone(w), alone(up));
                    if gated {
                        for (a, b) in a.chunks_mut(n).zip(b.chunks(n)) {
                            Kernels::for_isa(isa).silu_mul_inplace(a, b);
                        }
                    }
                    want.push(a);
                }
                let mut acts = Acts::default();
                let ranges = inputs(&mut acts, &x, k, mode, |i| vec![&weights[i].0, &weights[i].1]);
                let mut outs: Vec<_> = rows.iter().map(|&m| (vec![f32::NAN; m * n], vec![f32::NAN; m * n])).collect();
                let mut parts: Vec<Part<'_>> = weights.iter().zip(&mut outs).zip(&ranges)
                    .map(|(((w, up), (out, second)), rows)| {
                        Part { w, second: gated.then_some((up, &mut second[..])), rows: rows.clone(), out }
                    })
                    .collect();
                let silu = |a: &mut [f32], b: &[f32]| Kernels::for_isa(isa).silu_mul_inplace(a, b);
                linear_parts(&pool, mode, &mut acts, &mut parts, &silu);
                for (i, (out, want)) in outs.iter().zip(&want).enumerate() {
                    let same = out.0.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    prop_assert!(same, "{} {:?} {:?}, part {} of {:?} rows", isa, mode, dtypes, i, rows);
                }
                // What parts left in `acts` of forms of some rows is no form of all of them.
                let m = acts.f32().len() / k;
                for (w, _) in weights.iter().filter(|_| m > 0) {
                    let whole = |acts: &mut Acts| {
                        let mut out = vec![f32::NAN; m * n];
                        linear(&pool, mode, acts, &mut [Out { w, out: &mut out, ldo: n }]);
                        out
                    };
                    let mut fresh = Acts::default();
                    fresh.reset(m, k).copy_from_slice(acts.f32());
                    let (got, want) = (whole(&mut acts), whole(&mut fresh));
                    let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                    prop_assert!(same, "{} {:?} {:?}, all of {:?} rows", isa, mode, dtypes, rows);
                }
            }
        }
    }
}

/// A whole mixture: routed, computed in parts and added, against the reference's sum in f64.
#[test]
fn a_mixture_is_the_references() {
    const D: usize = 256;
    const FF: usize = 256;
    const E: usize = 7;
    const K: usize = 3;
    let pool = Pool::new(2);
    for dtype in [DType::F32, DType::BF16, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let of = |n, k, salt: usize| tensor(dtype, n, k, salt as u64 + 11);
        let experts: Vec<[Tensor; 3]> =
            (0..E).map(|e| [of(FF, D, 3 * e), of(FF, D, 3 * e + 1), of(D, FF, 3 * e + 2)]).collect();
        for (rows, of_chosen) in [(1, true), (2, false), (19, true)] {
            let x = numbers(rows * D, 5);
            let chosen: Vec<Vec<(usize, f64)>> =
                (0..rows).map(|r| route(&numbers(E, r as u64 + 1), K, of_chosen)).collect();
            let want: Vec<f64> = (0..rows)
                .flat_map(|r| mix(&chosen[r], |e| exact(&experts[e], &x[r * D..(r + 1) * D])))
                .collect();
            for isa in Isa::supported() {
                let prepared: Vec<[Linear; 3]> =
                    experts.iter().map(|e| [&e[0], &e[1], &e[2]].map(|w| prepared(w, isa))).collect();
                // (Row, choice) of every place, by expert.
                let places: Vec<Vec<(usize, usize)>> = (0..E)
                    .map(|e| {
                        let all = (0..rows).flat_map(|r| (0..K).map(move |j| (r, j)));
                        all.filter(|&(r, j)| chosen[r][j].0 == e).collect()
                    })
                    .collect();
                let gathered: Vec<Vec<f32>> = places
                    .iter()
                    .map(|p| p.iter().flat_map(|&(r, _)| x[r * D..(r + 1) * D].to_vec()).collect())
                    .collect();
                let mut acts = Acts::default();
                let mut run = |x: &[Vec<f32>], which: [usize; 2], n: usize, k: usize| -> Vec<Vec<f32>> {
                    let ranges =
                        inputs(&mut acts, x, k, Mode::Fast, |i| which.map(|w| &prepared[i][w]).to_vec());
                    let mut outs: Vec<_> =
                        places.iter().map(|p| (vec![0.0; p.len() * n], vec![0.0; p.len() * n])).collect();
                    let gated = which[0] != which[1];
                    let mut parts: Vec<Part<'_>> = prepared
                        .iter()
                        .zip(&mut outs)
                        .zip(&ranges)
                        .map(|((w, (out, second)), rows)| {
                            let second = gated.then_some((&w[which[1]], &mut second[..]));
                            Part { w: &w[which[0]], second, rows: rows.clone(), out }
                        })
                        .collect();
                    let silu = |a: &mut [f32], b: &[f32]| Kernels::for_isa(isa).silu_mul_inplace(a, b);
                    linear_parts(&pool, Mode::Fast, &mut acts, &mut parts, &silu);
                    outs.into_iter().map(|o| o.0).collect()
                };
                let act = run(&gathered, [0, 1], FF, D);
                let out = run(&act, [2, 2], D, FF);
                let mut got = vec![0f64; rows * D];
                for (e, p) in places.iter().enumerate() {
                    for (i, &(r, j)) in p.iter().enumerate() {
                        for c in 0..D {
                            got[r * D + c] += chosen[r][j].1 * f64::from(out[e][i * D + c]);
                        }
                    }
                }
                let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let off = square(&mut got.iter().zip(&want).map(|(g, w)| g - w));
                let size = square(&mut want.iter().copied());
                // int8 blocks of 32 of each of two inputs are off by 1/127 of their largest over √12, bf16 by 2⁻⁹ over √3;
                // f32 by some 2⁻²⁰.
                let bound = if isa == Isa::Reference || dtype == DType::F32 { 1e-5 } else { 0.02 };
                assert!(off <= bound * size, "{isa} {dtype}, {rows} rows: {} of {bound}", off / size);
            }
        }
    }
}

/// An expert's output in f64.
fn exact([gate, up, down]: &[Tensor; 3], x: &[f32]) -> Vec<f64> {
    let times = |w: &Tensor, x: &[f64]| -> Vec<f64> {
        let w = dequantise(w);
        w.chunks(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let (gate, up) = (times(gate, &x), times(up, &x));
    let act: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    times(down, &act)
}
