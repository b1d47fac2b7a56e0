//! Every tier of linear, every dtype, against the f64 reference on the dequantised weights.

use proptest::prelude::*;
use tandem::host::Pool;
use tandem::simd::linear::{Acts, Linear, LinearKernel, Mode, Out, Packed, kernels, linear, named, pack};
use tandem::simd::tuning::{LinearTuning, Tuning};
use tandem::simd::{Caps, Isa};
use tandem::tensor::{Bytes, DType, Tensor, set_scales};

/// A small generator, so that a case is a seed.
struct Rng(u64);
impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Random blocks: every code and every sub-scale occurs; the f16 scales are small and positive or negative.
fn random_weight(dtype: DType, n: usize, k: usize, rng: &mut Rng) -> Tensor {
    random_weight_of(dtype, n, k, 0.05, rng)
}

/// The same with scales of up to `scale`.
fn random_weight_of(dtype: DType, n: usize, k: usize, scale: f32, rng: &mut Rng) -> Tensor {
    let mut bytes: Vec<u8> =
        (0..n * dtype.row_bytes(k).expect("whole blocks")).map(|_| rng.next() as u8).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        set_scales(dtype, block, rng.uniform() * scale, rng.uniform() * scale);
        match dtype {
            DType::F32 => block.copy_from_slice(&rng.uniform().to_le_bytes()),
            DType::F16 => block.copy_from_slice(&half::f16::from_f32(rng.uniform()).to_le_bytes()),
            DType::BF16 => block.copy_from_slice(&half::bf16::from_f32(rng.uniform()).to_le_bytes()),
            _ => {}
        }
    }
    Tensor::new(dtype, vec![n, k], Bytes::copy_of(&bytes)).expect("sized above")
}

fn make(w: &Tensor, isa: Isa) -> Linear {
    if Linear::wants_packing(w.dtype, isa) {
        Linear::from_packed(pack(w), isa)
    } else {
        Linear::from_rows(w.clone(), isa)
    }
}

/// |y - y*| allowed for activations rounded to `eps` relative to their block's maximum (int8) or to
/// themselves (bf16), plus f32 accumulation: c·eps·Σ|w·x| never underestimates rounding to nearest.
fn tolerance(isa: Isa, fine: bool, dtype: DType, w: &[f32], x: &[f32]) -> f64 {
    let abs_sum: f64 = w.iter().zip(x).map(|(w, x)| (w * x).abs() as f64).sum();
    let k = w.len() as f64;
    let f32_part = k * 2f64.powi(-24) * 2.0 * abs_sum;
    if dtype.is_quantised() && isa > Isa::Reference {
        // int8: each activation is off by at most half a step, max|x|/254 of its block of 32. The offsets
        // (m·Σx) see the same quantised activations, so |w| below is the dequantised weight; the two
        // parts d·q·x and m·x are rounded apart, which the factor 64 on f32 epsilon covers.
        let int8: f64 = w
            .chunks(32)
            .zip(x.chunks(32))
            .map(|(w, x)| {
                let amax = x.iter().fold(0f32, |a, v| a.max(v.abs())) as f64;
                amax / 254.0 * w.iter().map(|w| w.abs() as f64).sum::<f64>()
            })
            .sum();
        let parts: f64 = w
            .chunks(32)
            .zip(x.chunks(32))
            .map(|(w, x)| {
                let wmax = w.iter().fold(0f32, |a, v| a.max(v.abs())) as f64;
                64.0 * wmax * x.iter().map(|x| x.abs() as f64).sum::<f64>()
            })
            .sum();
        let amx = if isa == Isa::Amx { abs_sum * 2f64.powi(-7) } else { 0.0 };
        // A second plane leaves half a step of a range that is half a step of the first.
        let int8 = if fine && isa != Isa::Amx { int8 / 254.0 } else { int8 };
        return int8 * 1.01 + parts * 2f64.powi(-23) + f32_part + amx + 1e-6;
    }
    // bf16 activations (2^-9 each) and, on AMX, f16 weights rounded to bf16 (2^-9).
    abs_sum * 2f64.powi(-8) + f32_part + 1e-7
}

fn check(dtype: DType, m: usize, n: usize, k: usize, seed: u64, mode: Mode) -> Result<(), TestCaseError> {
    let mut rng = Rng(seed);
    let w = random_weight(dtype, n, k, &mut rng);
    let x: Vec<f32> = (0..m * k).map(|_| rng.uniform() * 3.0).collect();
    check_products(&w, &x, m, mode, &format!("seed={seed}"))
}

/// The kernels of a weight's tier that can multiply it by `m` rows, but do not pay.
fn others(lin: &Linear, isa: Isa, m: usize, mode: Mode) -> Vec<&'static LinearKernel> {
    let can = |k: &&&'static LinearKernel| lin.clone().with_kernel(k).kernel(m, mode) == **k;
    kernels(isa).iter().filter(can).copied().filter(|k| *k != lin.kernel(m, mode)).collect()
}

/// All tiers' products of `w` and the `m` rows of `x`, in outputs with room beside them that must stay as it was: by the kernels
/// that pay, and by one that could.
fn check_products(w: &Tensor, x: &[f32], m: usize, mode: Mode, seed: &str) -> Result<(), TestCaseError> {
    let (dtype, n, k) = (w.dtype, w.rows(), w.cols());
    let mut rows = vec![0f32; n * k];
    for r in 0..n {
        tandem::reference::dequant::dequantise_row(dtype, w.row(r), &mut rows[r * k..(r + 1) * k]);
    }
    let pool = Pool::new(2);
    for (isa, fine) in Isa::supported().into_iter().flat_map(|i| [(i, false), (i, true)]) {
        let lin = make(w, isa);
        let lin = if fine { lin.with_fine_activations() } else { lin };
        let others = others(&lin, isa, m, mode);
        let forced = x.first().and_then(|x| others.get(x.to_bits() as usize % others.len().max(1)));
        for lin in [Some(lin.clone()), forced.map(|k| lin.with_kernel(k))].into_iter().flatten() {
            let ldo = n + 3;
            let canary = 12345.678f32;
            let mut out = vec![canary; m * ldo + 16];
            let mut acts = Acts::default();
            acts.reset(m, k).copy_from_slice(x);
            linear(&pool, mode, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo }]);
            for t in 0..m {
                let x = &x[t * k..(t + 1) * k];
                for r in 0..n {
                    let w = &rows[r * k..(r + 1) * k];
                    let want: f64 = w.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum();
                    let got = out[t * ldo + r] as f64;
                    let tol = tolerance(isa, fine, dtype, w, x);
                    prop_assert!(
                        (got - want).abs() <= tol,
                        "{isa} {} {dtype} fine={fine} M={m} N={n} K={k} {seed}: [{t},{r}] {got} want {want} tolerance {tol}",
                        lin.kernel(m, mode)
                    );
                }
                for c in n..ldo {
                    prop_assert!(out[t * ldo + c] == canary, "{isa} {dtype}: wrote column {c} of {n}");
                }
            }
            prop_assert!(out[m * ldo..].iter().all(|&v| v == canary), "{isa} {dtype}: wrote past the end");
        }
    }
    Ok(())
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn every_tier_agrees_with_reference(
        dtype in any_dtype(),
        m in prop::sample::select(vec![1usize, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 33]),
        n in prop::sample::select(vec![1usize, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 65]),
        blocks in 1usize..5,
        odd in 0usize..40,
        seed in any::<u64>(),
        deterministic in any::<bool>(),
    ) {
        let k = blocks * dtype.block_len().max(32) + if dtype.is_quantised() { 0 } else { odd };
        let mode = if deterministic { Mode::Deterministic } else { Mode::Fast };
        check(dtype, m, n, k, seed, mode)?;
    }

    #[test]
    fn a_row_alone_equals_the_row_in_a_batch_bit_for_bit(
        dtype in any_dtype(),
        m in 2usize..40,
        n in 1usize..40,
        blocks in 1usize..4,
        seed in any::<u64>(),
    ) {
        let k = blocks * dtype.block_len().max(32);
        let mut rng = Rng(seed);
        let w = random_weight(dtype, n, k, &mut rng);
        let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
        for isa in Isa::supported() {
            let lin = make(&w, isa);
            let run = |x: &[f32], m: usize, pool: &Pool| {
                let mut acts = Acts::default();
                acts.reset(m, k).copy_from_slice(x);
                let mut out = vec![0f32; m * n];
                linear(pool, Mode::Deterministic, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo: n }]);
                out
            };
            let all = run(&x, m, &Pool::new(2));
            for t in 0..m {
                let alone = run(&x[t * k..(t + 1) * k], 1, &Pool::new(1));
                prop_assert_eq!(&alone[..], &all[t * n..(t + 1) * n], "{} {} row {} of {}", isa, dtype, t, m);
            }
        }
    }
}

/// The largest codes times the largest activations of one sign: sums of 16 bits that some tiers add up in would wrap.
#[test]
fn the_largest_products_do_not_overflow() {
    for dtype in DType::QUANTISED {
        let (n, k, m) = (17, 512, 5);
        let mut bytes = vec![0xffu8; n * dtype.row_bytes(k).expect("whole blocks")];
        for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            if dtype == DType::Q8_0 {
                // 127 in some blocks and -128 in others.
                block.fill(if i % 2 == 0 { 0x7f } else { 0x80 });
            }
            set_scales(dtype, block, 0.01, 0.01);
        }
        let w = Tensor::new(dtype, vec![n, k], Bytes::copy_of(&bytes)).expect("sized above");
        for sign in [1.0, -1.0] {
            check_products(&w, &vec![sign; m * k], m, Mode::Fast, "largest").expect("as the reference");
        }
    }
}

/// bf16 weights are exact in tiles; two planes of bf16 hold 16 bits of an activation, so that what is left is its last
/// bits and f32 accumulation. One plane is off by some 2^-9 of each product.
#[test]
fn fine_tiles_keep_sixteen_bits() {
    if !Isa::supported().contains(&Isa::Amx) {
        eprintln!("skipped: no AMX here; TANDEM_AMX=emulate runs this test");
        return;
    }
    let (m, n, k) = (19, 33, 600);
    let mut rng = Rng(7);
    let w = random_weight(DType::BF16, n, k, &mut rng);
    let x: Vec<f32> = (0..m * k).map(|_| rng.uniform() * 3.0).collect();
    let lin = make(&w, Isa::Amx).with_fine_activations();
    let mut acts = Acts::default();
    acts.reset(m, k).copy_from_slice(&x);
    let mut out = vec![0f32; m * n];
    linear(&Pool::new(2), Mode::Fast, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo: n }]);
    let mut row = vec![0f32; k];
    for r in 0..n {
        tandem::reference::dequant::dequantise_row(DType::BF16, w.row(r), &mut row);
        for t in 0..m {
            let products =
                || row.iter().zip(&x[t * k..(t + 1) * k]).map(|(&w, &x)| f64::from(w) * f64::from(x));
            let (want, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
            let off = (f64::from(out[t * n + r]) - want).abs();
            // 2^-17 of each product, and k roundings of sums no larger than `size`.
            assert!(off <= size * (2f64.powi(-17) + k as f64 * 2f64.powi(-24)), "[{t},{r}] off by {off}");
        }
    }
}

/// 16-bit floats packed into tiles at load, in the AMX tier. Many rows, and any number in deterministic mode, have the bits of
/// tiles made from the file's rows; few rows are within rounding of the reference, and each the same alone and beside another.
#[test]
fn floats_packed_into_tiles_multiply_as_those_that_are_not() {
    if !Isa::supported().contains(&Isa::Amx) || !tandem::simd::Caps::get().avx512_bf16 {
        eprintln!("skipped: no AMX here; TANDEM_AMX=emulate runs this test");
        return;
    }
    let (pool, canary) = (Pool::new(2), 12345.678f32);
    let run = |lin: &Linear, x: &[f32], mode: Mode| {
        let (m, n) = (x.len() / lin.k(), lin.n());
        let mut acts = Acts::default();
        acts.reset(m, lin.k()).copy_from_slice(x);
        let mut out = vec![canary; m * (n + 3)];
        linear(&pool, mode, &mut acts, &mut [Out { w: lin, out: &mut out, ldo: n + 3 }]);
        for row in out.chunks_exact(n + 3) {
            assert_eq!(row[n..], [canary; 3], "wrote past {n} columns");
        }
        out
    };
    let mut rng = Rng(23);
    for dtype in [DType::BF16, DType::F16] {
        // Half an ulp of bf16 is up to 2^-8: of x, and of an f16 weight; then a chain of f32 sums.
        let rounding = |w: &[f32], x: &[f32]| {
            let size: f64 = w.iter().zip(x).map(|(w, x)| f64::from((w * x).abs())).sum();
            let halves = if dtype == DType::F16 { 2.01 } else { 1.0 };
            size * (halves * 2f64.powi(-8) + w.len() as f64 * 2f64.powi(-23)) + 1e-9
        };
        for (n, k) in
            [(1, 1), (15, 31), (16, 32), (17, 33), (64, 64), (65, 65), (100, 97), (133, 300), (48, 4200)]
        {
            let w = random_weight(dtype, n, k, &mut rng);
            let (packed, rows) =
                (Linear::from_packed(pack(&w), Isa::Amx), Linear::from_rows(w.clone(), Isa::Amx));
            let mut weights = vec![0f32; n * k];
            for r in 0..n {
                tandem::reference::dequant::dequantise_row(dtype, w.row(r), &mut weights[r * k..(r + 1) * k]);
            }
            for m in [1, 2, 3, 5, 16, 17, 33, 70] {
                let x: Vec<f32> = (0..m * k).map(|_| rng.uniform() * 3.0).collect();
                for fine in [false, true] {
                    let fine =
                        |lin: &Linear| if fine { lin.clone().with_fine_activations() } else { lin.clone() };
                    let (packed, rows) = (fine(&packed), fine(&rows));
                    let (got, want) =
                        (run(&packed, &x, Mode::Deterministic), run(&rows, &x, Mode::Deterministic));
                    assert_eq!(got, want, "{dtype} M={m} N={n} K={k}, deterministic");
                    let got = run(&packed, &x, Mode::Fast);
                    if m > 2 {
                        assert_eq!(got, run(&rows, &x, Mode::Fast), "{dtype} M={m} N={n} K={k}");
                    }
                    for (t, x) in x.chunks_exact(k).enumerate() {
                        for (r, w) in weights.chunks_exact(k).enumerate() {
                            let want: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                            let (got, tol) = (f64::from(got[t * (n + 3) + r]), rounding(w, x));
                            let at = format!("{dtype} M={m} N={n} K={k}: [{t},{r}]");
                            assert!((got - want).abs() <= tol, "{at} {got} want {want} tolerance {tol}");
                        }
                        if m == 2 {
                            assert_eq!(
                                run(&packed, x, Mode::Fast),
                                got[t * (n + 3)..][..n + 3],
                                "{dtype}: row {t} alone"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn several_blocks_of_k_are_summed() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (m, n, k) in [(1, 35, 4100), (5, 35, 4100), (14, 35, 8233), (1, 7, 8233)] {
            check(dtype, m, n, k, 7, Mode::Fast).unwrap();
            check(dtype, m, n, k, 8, Mode::Deterministic).unwrap();
        }
    }
}

/// Activations that fit in a share of L2 are read once per tile of rows, others once per chunk of rows: both
/// orders, and their last tiles, give what the reference gives, and a row the same bits in either.
#[test]
fn tokens_that_do_not_fit_in_cache_change_no_bit() {
    let (n, k) = (38, 8233);
    for (dtype, m) in [(DType::F32, 35), (DType::F16, 34), (DType::BF16, 34)] {
        check(dtype, m, n, k, 9, Mode::Fast).unwrap();
        let mut rng = Rng(10);
        let w = random_weight(dtype, n, k, &mut rng);
        let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
        for isa in Isa::supported().into_iter().filter(|&i| i > Isa::Reference) {
            let lin = make(&w, isa);
            let run = |m: usize, pool: &Pool| {
                let mut acts = Acts::default();
                acts.reset(m, k).copy_from_slice(&x[..m * k]);
                let mut out = vec![0f32; m * n];
                linear(pool, Mode::Deterministic, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo: n }]);
                out
            };
            let many = run(m, &Pool::new(2));
            for few in [1, 5, 8] {
                assert_eq!(run(few, &Pool::new(1)), many[..few * n], "{isa} {dtype}: {few} of {m} tokens");
            }
        }
    }
}

/// Chunks, prefetches and groups of VNNI tiles are the machine's affair: none of them changes a bit, of fine activations
/// neither, and nothing is written past the last row of weights.
#[test]
fn entries_of_the_tuning_table_change_no_bit() {
    let (pool, canary) = (Pool::new(2), 12345.678f32);
    for dtype in DType::ALL {
        // Seven groups, the last of them partial: wide tiles, narrower ones for the rest, a mask.
        let (n, k) = (6 * 16 + 5, 3 * dtype.block_len().max(64));
        let mut rng = Rng(11);
        let w = random_weight(dtype, n, k, &mut rng);
        for (isa, fine) in Isa::supported().into_iter().skip(1).flat_map(|i| [(i, false), (i, true)]) {
            let lin = if fine { make(&w, isa).with_fine_activations() } else { make(&w, isa) };
            for m in (1..=13).chain([16, 17, 33, 70]) {
                let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
                let run = |[
                    chunk_bytes,
                    ahead_from,
                    ahead_bytes,
                    groups_of_1,
                    groups_of_2,
                    groups_of_4,
                    groups_of_8,
                    int8_tiles_from,
                ]: [usize; 8]| {
                    let entries = LinearTuning {
                        chunk_bytes,
                        ahead_from,
                        ahead_bytes,
                        groups_of_1,
                        groups_of_2,
                        groups_of_4,
                        groups_of_8,
                        int8_tiles_from,
                        tiles_from: usize::MAX,
                        fine_tiles_from: usize::MAX,
                        half_up_to: 0,
                        tiles_at_load: false,
                    };
                    let lin = lin.clone().with_tuning(entries);
                    let mut acts = Acts::default();
                    acts.reset(m, k).copy_from_slice(&x);
                    let mut out = vec![canary; m * (n + 3)];
                    linear(&pool, Mode::Fast, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo: n + 3 }]);
                    for row in out.chunks_exact(n + 3) {
                        assert_eq!(row[n..], [canary; 3], "{isa} {dtype} M={m}: wrote past {n} columns");
                    }
                    out
                };
                let plain = run([1, 3, 64, 1, 1, 1, 1, usize::MAX]);
                for other in [
                    [1 << 20, 1, 4096, 4, 4, 4, 2, usize::MAX],
                    [1 << 20, 2, 64, 1, 4, 2, 2, usize::MAX],
                    [4096, 1, 65536, 4, 1, 4, 1, usize::MAX],
                    [1, 3, 64, 1, 1, 1, 1, 1],
                ] {
                    assert_eq!(run(other), plain, "{isa} {dtype} fine={fine} M={m}: {other:?}");
                }
            }
        }
    }
}

/// The table: names are unique, every dtype has a kernel for any number of rows, and which one serves follows from the
/// thresholds of the tuning table.
#[test]
fn every_weight_has_a_kernel_and_thresholds_choose_it() {
    for isa in Isa::supported() {
        let names: Vec<&str> = kernels(isa).iter().map(|k| k.name).collect();
        let distinct: std::collections::BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(distinct.len(), names.len(), "{isa}: {names:?}");
        assert!(named(isa, "gemm").unwrap_err().to_string().contains(names[0]));
        let mut seen = std::collections::BTreeSet::new();
        for dtype in DType::ALL {
            let lin = make(&random_weight(dtype, 3, 256, &mut Rng(1)), isa);
            let tuning = Tuning::current().linear(dtype);
            let lin = lin.with_tuning(LinearTuning {
                int8_tiles_from: 10,
                tiles_from: 20,
                fine_tiles_from: 9,
                half_up_to: 30,
                ..tuning
            });
            for mode in [Mode::Fast, Mode::Deterministic] {
                let of = |m| lin.kernel(m, mode).name;
                (1..70).for_each(|m| _ = seen.insert(of(m)));
                let fast = mode == Mode::Fast;
                if isa == Isa::Amx && dtype.is_quantised() {
                    assert_eq!([of(1), of(9), of(10), of(19)], ["vnni", "vnni", "amx_int8", "amx_int8"]);
                    let half = tandem::amx::half_arithmetic();
                    let tiles =
                        if half { ["amx_half", "amx_half", "amx_quantised"] } else { ["amx_quantised"; 3] };
                    assert_eq!([of(20), of(30), of(31)], if fast { tiles } else { ["amx_int8"; 3] });
                    let fine = lin.clone().with_fine_activations();
                    let name = |m| fine.kernel(m, Mode::Fast).name;
                    assert_eq!([name(8), name(9)], ["vnni", if half { "amx_half" } else { "amx_quantised" }]);
                } else if isa == Isa::Avx512 && dtype == DType::F16 {
                    let few = if fast { "rowdot_avx512" } else { "tiledot_avx512" };
                    assert_eq!(
                        [of(1), of(2), of(3), of(500)],
                        [few, few, "tiledot_avx512", "tiledot_avx512"]
                    );
                } else if isa == Isa::Avx2 && dtype.is_quantised() {
                    let name = if Caps::get().avx_vnni { "avx_vnni" } else { "avx2_int8" };
                    assert_eq!([of(1), of(500)], [name; 2]);
                }
            }
        }
        println!("{isa}: {seen:?} of {names:?}");
    }
}

#[test]
fn tiers_skipped_here_are_named() {
    for isa in Isa::ALL {
        if let Some(why) = isa.missing() {
            println!("skipped: {isa}: {why}");
        }
    }
    assert!(Isa::supported().contains(&Isa::Reference));
}

#[test]
fn packed_size_is_what_was_promised() {
    let mut rng = Rng(1);
    for dtype in DType::ALL.into_iter().filter(|&d| d != DType::F32) {
        let w = random_weight(dtype, 33, 512, &mut rng);
        let p: Packed = pack(&w);
        let grown = p.data.len() as f64 / (48.0 * dtype.row_bytes(512).unwrap() as f64);
        let most = match dtype {
            // A scale of eight bits takes sixteen, one of six bits takes eight.
            DType::MXFP4 => 1.059,
            DType::Q3_K => 1.055,
            _ => 1.03,
        };
        assert!((1.0..most).contains(&grown), "{dtype} grew by {grown}");
    }
}

/// Tiles made with f16 arithmetic: within an ulp of bf16 of those made in f32, and the same bits whatever the number of
/// threads, which decides who makes which tile.
#[test]
fn tiles_made_by_f16_are_nearly_those_made_by_f32() {
    let Some(why) = Isa::Amx.missing() else {
        for dtype in DType::ALL.into_iter().filter(|d| d.is_quantised()) {
            let (n, k) = (7 * 16 + 5, 3 * dtype.block_len().max(64));
            let mut rng = Rng(13);
            // Weights below one, also those of K-quants, whose sub-scales go up to 127.
            let w = random_weight_of(dtype, n, k, 1e-4, &mut rng);
            let mut entries = tandem::simd::tuning::Tuning::current().linear(dtype);
            entries.tiles_from = 1;
            for m in [1, 16, 17, 40, 50, 64] {
                let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
                let mut run = |half_up_to: usize, threads: usize| {
                    entries.half_up_to = half_up_to;
                    let lin = make(&w, Isa::Amx).with_tuning(entries);
                    let (mut acts, mut out) = (Acts::default(), vec![0f32; m * n]);
                    acts.reset(m, k).copy_from_slice(&x);
                    let pool = Pool::new(threads);
                    linear(&pool, Mode::Fast, &mut acts, &mut [Out { w: &lin, out: &mut out, ldo: n }]);
                    out
                };
                let (half, full) = (run(m, 2), run(m - 1, 2));
                assert_eq!(half, run(m, 1), "{dtype} M={m}: threads");
                let mut row = vec![0f32; k];
                let mut same = 0;
                for r in 0..n {
                    tandem::reference::dequant::dequantise_row(dtype, w.row(r), &mut row);
                    // A weight may become another bf16 number, 2^-7 away at most; half as much again for scales that were rounded.
                    let sizes = row.chunks(32).map(|b| b.iter().fold(0f32, |a, v| a.max(v.abs())));
                    let sizes: Vec<f32> = sizes.collect();
                    for t in 0..m {
                        let x = &x[t * k..(t + 1) * k];
                        let size: f32 = x.iter().enumerate().map(|(i, v)| v.abs() * sizes[i / 32]).sum();
                        let (a, b) = (half[t * n + r], full[t * n + r]);
                        assert!(
                            (a - b).abs() <= size * 1.5 * 2f32.powi(-7),
                            "{dtype} M={m} [{t},{r}]: {a}, {b}"
                        );
                        same += usize::from(a == b);
                    }
                }
                assert!(same < m * n, "{dtype} M={m}: not made by f16");
            }
        }
        return;
    };
    println!("skipped: {why}");
}
