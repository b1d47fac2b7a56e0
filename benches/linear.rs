//! Linear kernels of every tier and dtype against the limits measured in the same run.
//!
//!   cargo bench --bench linear                    SmolLM2 and Llama shapes
//!   cargo bench --bench linear -- q4_0 4096       only lines that contain all words
//!   cargo bench --bench linear -- --test          one tiny shape, answers checked, no timing
//!
//! Weights are cold: each call takes the next of enough copies to overflow the caches, as in a forward
//! pass. Answers are verified before anything is timed. GB/s counts the bytes of the weights.

use std::time::Instant;

use tandem::device::host::Pool;
use tandem::profile;
use tandem::simd::Isa;
use tandem::simd::linear::{Acts, Linear, Mode, Out, linear, pack};
use tandem::tensor::{Bytes, DType, Tensor};

struct Rng(u64);
impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn random(dtype: DType, n: usize, k: usize, rng: &mut Rng) -> Tensor {
    let len = n * dtype.row_bytes(k).expect("whole blocks");
    let mut words: Vec<u64> = (0..len.div_ceil(8)).map(|_| rng.next()).collect();
    // Bytes as scales or floats must be finite: clear exponent bits that make them large.
    let mask = match dtype {
        DType::F32 => 0xbf7f_ffff_bf7f_ffff,
        DType::BF16 => 0xbf7f_bf7f_bf7f_bf7f,
        DType::F16 => 0xbbff_bbff_bbff_bbff,
        _ => !0,
    };
    words.iter_mut().for_each(|w| *w &= mask);
    if dtype.is_quantised() {
        // SAFETY: plain bytes of a live vector.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), len) };
        let at: &[usize] = match dtype {
            DType::Q6_K => &[208],
            DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
            _ => &[0, 2],
        };
        for b in bytes.chunks_exact_mut(dtype.block_bytes()) {
            at.iter().for_each(|&a| b[a..a + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes()));
        }
    }
    Tensor::new(dtype, vec![n, k], Bytes::from_words(words, len)).expect("sized above")
}

fn make(w: &Tensor, isa: Isa) -> Linear {
    if Linear::wants_packing(w.dtype, isa) {
        Linear::from_packed(pack(w), isa)
    } else {
        Linear::from_rows(w.clone(), isa)
    }
}

/// Compares a few rows with the f64 reference; panics when they differ.
fn verify(w: &Tensor, x: &[f32], out: &[f32], n: usize, k: usize, what: &str) {
    let mut row = vec![0f32; k];
    for r in [0, n / 2, n - 1] {
        tandem::reference::dequant::dequantise_row(w.dtype, w.row(r), &mut row);
        for (t, x) in x.chunks_exact(k).enumerate().take(2) {
            let want: f64 = row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum();
            let size: f64 =
                row.iter().zip(x).map(|(&w, &x)| (w as f64 * x as f64).powi(2)).sum::<f64>().sqrt();
            let got = out[t * n + r] as f64;
            assert!(
                (got - want).abs() <= 0.05 * size.max(1e-3),
                "{what}: row {r} token {t}: {got}, want {want}"
            );
        }
    }
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let test = args.iter().any(|a| a == "--test");
    let words: Vec<&String> = args.iter().filter(|a| !a.starts_with("--")).collect();
    let pool = Pool::pinned(None);
    let mut rng = Rng(42);
    let (mut bw, mut peaks) = (1.0, Vec::new());
    if !test {
        bw = profile::read_bandwidth(&pool, 1 << 30, 5);
        peaks = profile::peaks(&pool);
        println!("{} threads; read bandwidth {:.1} GB/s", pool.threads(), bw / 1e9);
        for p in &peaks {
            println!("peak {}: {:.0} Gop/s", p.name, p.ops / 1e9);
        }
        println!(
            "{:10} {:6} {:>12} {:>5} {:>9} {:>8} {:>6} {:>9} {:>7}",
            "tier", "dtype", "N x K", "M", "us", "GB/s", "% bw", "GFLOP/s", "of peak"
        );
    }
    let shapes: &[(usize, usize)] = if test {
        &[(48, 256)]
    } else {
        &[(1536, 576), (576, 1536), (2048, 2048), (8192, 2048), (4096, 4096), (4096, 14336)]
    };
    let ms: &[usize] = if test { &[1, 5, 16] } else { &[1, 2, 3, 4, 8, 16, 64, 512] };
    for &(n, k) in shapes {
        for dtype in DType::ALL {
            if dtype.row_bytes(k).is_none() {
                continue;
            }
            let w = random(dtype, n, k, &mut rng);
            for isa in Isa::supported().into_iter().skip(1) {
                let line = format!("{:10} {:6} {:>12}", isa.name(), dtype.name(), format!("{n}x{k}"));
                if !words.iter().all(|w| line.contains(w.as_str())) {
                    continue;
                }
                let first = make(&w, isa);
                let copies = if test { 1 } else { (160usize << 20).div_ceil(first.bytes()).clamp(1, 400) };
                let lins: Vec<Linear> = (0..copies)
                    .map(|_| {
                        let copy =
                            Tensor::new(dtype, vec![n, k], Bytes::copy_of(&w.data)).expect("same size");
                        make(&copy, isa)
                    })
                    .collect();
                let mut next = 0;
                for &m in ms {
                    let x: Vec<f32> = (0..m * k).map(|_| rng.uniform()).collect();
                    let mut acts = Acts::default();
                    let mut out = vec![0f32; m * n];
                    let mut once = |next: &mut usize| {
                        acts.reset(m, k).copy_from_slice(&x);
                        let w = &lins[*next % copies];
                        *next += 1;
                        let start = Instant::now();
                        linear(&pool, Mode::Fast, &mut acts, &mut [Out { w, out: &mut out, ldo: n }]);
                        start.elapsed().as_secs_f64()
                    };
                    let t = once(&mut next);
                    let reps = if test { 0 } else { ((0.15 / t) as usize).clamp(5, 400) };
                    let times: Vec<f64> = (0..reps).map(|_| once(&mut next)).collect();
                    verify(&w, &x, &out, n, k, &format!("{line} M={m}"));
                    if test {
                        continue;
                    }
                    let t = median(times);
                    let (gb, gflop) = (first.bytes() as f64 / t, 2.0 * (m * n * k) as f64 / t);
                    let peak = if dtype.is_quantised() && isa >= Isa::Avx512 {
                        "int8 dot"
                    } else if dtype == DType::BF16 && isa >= Isa::Avx512 {
                        "bf16 dot"
                    } else {
                        "f32 fma"
                    };
                    let peak = peaks.iter().find(|p| p.name == peak).map_or(f64::NAN, |p| p.ops);
                    println!(
                        "{line} {m:>5} {:>9.1} {:>8.1} {:>5.0}% {:>9.0} {:>6.0}%",
                        t * 1e6,
                        gb / 1e9,
                        100.0 * gb / bw,
                        gflop / 1e9,
                        100.0 * gflop / peak
                    );
                }
            }
        }
        // Peers: f32 GEMM crates, hot, on this thread count where they offer it.
        for m in ms.iter().copied().filter(|&m| m >= 16 && !test && words.is_empty()) {
            let (x, w) = (vec![0.5f32; m * k], vec![0.25f32; n * k]);
            let mut out = vec![0f32; m * n];
            for peer in ["gemm", "matrixmultiply"] {
                let mut once = || {
                    let start = Instant::now();
                    // SAFETY: matrices of the stated sizes and strides.
                    unsafe {
                        if peer == "gemm" {
                            gemm::gemm(
                                m,
                                n,
                                k,
                                out.as_mut_ptr(),
                                1,
                                n as isize,
                                false,
                                x.as_ptr(),
                                1,
                                k as isize,
                                w.as_ptr(),
                                k as isize,
                                1,
                                0.0,
                                1.0,
                                false,
                                false,
                                false,
                                gemm::Parallelism::Rayon(pool.threads()),
                            );
                        } else {
                            matrixmultiply::sgemm(
                                m,
                                k,
                                n,
                                1.0,
                                x.as_ptr(),
                                k as isize,
                                1,
                                w.as_ptr(),
                                1,
                                k as isize,
                                0.0,
                                out.as_mut_ptr(),
                                n as isize,
                                1,
                            );
                        }
                    }
                    start.elapsed().as_secs_f64()
                };
                let t = once();
                let t = median((0..((0.2 / t) as usize).clamp(3, 50)).map(|_| once()).collect());
                assert!((out[0] - 0.125 * k as f32).abs() < 1e-2 * k as f32, "{peer} is wrong");
                println!(
                    "{:10} {:6} {:>12} {m:>5} {:>9.1} {:>8} {:>6} {:>9.0}",
                    peer,
                    "f32",
                    format!("{n}x{k}"),
                    t * 1e6,
                    "",
                    "",
                    2.0 * (m * n * k) as f64 / t / 1e9
                );
            }
        }
    }
    println!("linear: every answer agreed with the reference");
}
